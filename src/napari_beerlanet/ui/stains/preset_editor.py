"""Stain presets in the viewer: where they are saved, and the dialog that makes and edits them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QColor
from qtpy.QtWidgets import (
    QDialog,
    QFileDialog,
    QHeaderView,
    QLineEdit,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
)

from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition, display_colours
from napari_beerlanet.core.stains.presets import (
    BUILT_IN_PRESETS,
    NamedSpectrum,
    RegionStain,
    StainLibrary,
    StainPreset,
    nearest_dyes,
    read_preset,
    stain_of_region,
    write_preset,
)
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    button,
    form,
    hint,
    plain_tooltip,
    row,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.recent import user_data_folder
from napari_beerlanet.ui.common.session import get_project_store
from napari_beerlanet.ui.viewer.planes import Plane, current_plane
from napari_beerlanet.ui.viewer.viewport import to_image_pixels

if TYPE_CHECKING:
    from napari import Viewer

_LIBRARY_FOLDER = "stains"
_MAX_REGION_PIXELS = 4_000_000  # of a region's window; more are read with a stride
_MAX_BACKGROUND_PIXELS = 1_000_000
_MIXED_REGION = 0.3  # of the region's OD unexplained by one stain
_HOW_TO_DRAW = (
    "Draw a rectangle or a polygon around one stain in a Shapes layer, and select it there."
)


def stain_library(viewer: Viewer) -> StainLibrary:
    """Where presets and names are saved: in the open project, or for the user."""
    return StainLibrary(_library_folders(viewer)[0])


def saved_presets(viewer: Viewer) -> list[StainPreset]:
    """The presets of the open project and of the user; of one name, the project's."""
    found: dict[str, StainPreset] = {}
    for folder in _library_folders(viewer):
        for preset in StainLibrary(folder).presets():
            found.setdefault(preset.name, preset)
    return list(found.values())


def named_spectra(viewer: Viewer) -> list[NamedSpectrum]:
    """All stains that the user has named, in the project and elsewhere."""
    return [
        one for folder in _library_folders(viewer) for one in StainLibrary(folder).named_spectra()
    ]


def _library_folders(viewer: Viewer) -> list[Path]:
    folders = [user_data_folder() / _LIBRARY_FOLDER]
    project = get_project_store(viewer).project if hasattr(viewer, "window") else None
    if project is not None:
        own = project.path / _LIBRARY_FOLDER
        folders = [*folders, own] if project.read_only else [own, *folders]
    return folders


def drawn_regions(viewer: Viewer, image: Image) -> list[Region]:
    """The selected shapes, or else the last one drawn, as regions of an image.

    An `ImageError` says how to draw one where there is none.
    """
    shapes = [layer for layer in viewer.layers if isinstance(layer, Shapes)]
    active = viewer.layers.selection.active
    shapes.sort(key=lambda layer: layer is not active)
    chosen = [(layer, k) for layer in shapes for k in sorted(layer.selected_data)]
    if not chosen:
        chosen = [(layer, len(layer.data) - 1) for layer in shapes if len(layer.data)][:1]
    if not chosen:
        raise ImageError(f"There is no region. {_HOW_TO_DRAW}")
    regions = []
    for layer, k in chosen:
        corners = to_image_pixels(np.asarray(layer.data[k]), layer, image)[:, ::-1]
        regions.append(Region.from_shape(corners, str(layer.shape_type[k])))
    return regions


def measure_regions(
    plane: Plane, regions: Sequence[Region], background: npt.NDArray[np.float64] | None
) -> RegionStain:
    """The dominant stain of all pixels in the regions; the background is estimated if None."""
    if background is None:
        level = plane.level_for(_MAX_BACKGROUND_PIXELS)
        height, width = plane.level_shape(level)
        step = max(1, round((height * width / _MAX_BACKGROUND_PIXELS) ** 0.5))
        pixels = plane.read((slice(0, height, step), slice(0, width, step)), level)
        background = decompose(pixels, iterations="converge").background
    parts = []
    for region in regions:
        window = region.window(plane.shape)
        if window is None:
            continue
        step = max(1, round((window.width * window.height / _MAX_REGION_PIXELS) ** 0.5))
        rows = slice(window.y, window.y + window.height, step)
        columns = slice(window.x, window.x + window.width, step)
        inside = region.mask(window)[::step, ::step]
        parts.append(plane.read((rows, columns))[inside])
    if not sum(map(len, parts)):
        raise ImageError(f"The region is outside of “{plane.name}”. {_HOW_TO_DRAW}")
    return stain_of_region(np.concatenate(parts), background)


class PresetEditor(QDialog):
    """Makes, changes, imports and exports presets; `saved` is emitted with a preset's name."""

    saved = Signal(str)

    def __init__(self, panel: Panel) -> None:
        super().__init__(panel)
        self.setWindowTitle("Stain presets")
        self._viewer, self.task = panel.viewer, panel.task()
        self._image: Image | None = None
        self._fit: Decomposition | None = None
        self._source = ""  # where the spectra come from, which is saved with them
        self.name = QLineEdit()
        self.name.setPlaceholderText("Giemsa, our laboratory")
        self.name.setToolTip("The name of the preset, as it appears in the list of spectra.")
        self.table = QTableWidget(0, 4)
        self.table.setHorizontalHeaderLabels(["Stain", "Absorbs red", "green", "blue"])
        self.table.setToolTip("Names and spectra of the stains; click twice to change one.")
        sides, heads = self.table.verticalHeader(), self.table.horizontalHeader()
        assert sides is not None
        assert heads is not None
        sides.hide()
        heads.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        self.note, self.where = hint(), hint()
        self._lay_out()
        self.resize(460, 420)

    def _lay_out(self) -> None:
        self.region_button = button(
            "Add drawn region",
            f"Add the stain that dominates in a drawn region. {_HOW_TO_DRAW}",
            self.add_region,
        )
        self.stains_button = button(
            "Add this image's stains", "Add the stains of the last decomposition.", self.add_stains
        )
        self.stains_reason = DisabledReason(self.stains_button)
        self.remove_button = button("Remove", "Remove the selected stains.", self.remove_selected)
        self.save_button = button("Save", "Save the preset for all images.", self.save)
        self.delete_button = button("Delete", "Delete the saved preset of this name.", self.delete)
        self.import_button = button("Import …", "Open a preset's file.", self._choose_import)
        self.export_button = button(
            "Export …", "Save the preset to a file, to share it.", self._choose_export
        )
        top = form()
        top.addRow("Preset", self.name)
        layout = QVBoxLayout(self)
        layout.addLayout(top)
        layout.addWidget(self.table, 1)
        layout.addWidget(row(self.region_button, self.stains_button, self.remove_button))
        layout.addWidget(self.stains_reason)
        layout.addWidget(self.note)
        layout.addWidget(
            row(self.save_button, self.delete_button, self.import_button, self.export_button)
        )
        layout.addWidget(self.where)

    def open_for(self, image: Image | None, fit: Decomposition | None, preset: str = "") -> None:
        """Show the dialog for an image and its decomposition, with a preset if it has that name."""
        self.set_fit(image, fit)
        known = {one.name: one for one in (*BUILT_IN_PRESETS, *saved_presets(self._viewer))}
        if preset in known:
            self.show_preset(known[preset])
        elif not self.table.rowCount():
            self.note.setText(_HOW_TO_DRAW)
        folder = stain_library(self._viewer).folder
        project = folder.parent != user_data_folder()
        place = f"in the project {folder.parent.name}" if project else "for all images"
        self.where.setText(f"Presets are saved {place}.")
        self.where.setToolTip(plain_tooltip(str(folder)))
        self.show()
        self.raise_()

    def set_fit(self, image: Image | None, fit: Decomposition | None) -> None:
        """The image and its decomposition, which may come while the dialog is open."""
        self._image, self._fit = image, fit
        self.stains_reason.update_button(
            "" if fit is not None else "To add its stains, decompose the image first."
        )

    def show_preset(self, preset: StainPreset) -> None:
        """Edit this preset."""
        self.name.setText(preset.name)
        self.table.setRowCount(0)
        for stain in preset.stains:
            self._add(stain)
        self._set_source(preset.source)

    def _set_source(self, text: str) -> None:
        self._source = text
        self.note.setText(text)

    @property
    def preset(self) -> StainPreset:
        """What is in the dialog; a `ValueError` says what is missing."""
        stains = []
        for k in range(self.table.rowCount()):
            name, *numbers = (self._text(k, column) for column in range(4))
            try:
                red, green, blue = (float(text.replace(",", ".")) for text in numbers)
            except ValueError:
                raise ValueError(f"“{name}” needs 3 numbers: red, green and blue.") from None
            stains.append(NamedSpectrum(name.strip(), (red, green, blue)))
        return StainPreset(self.name.text().strip(), tuple(stains), self._source)

    def _text(self, k: int, column: int) -> str:
        cell = self.table.item(k, column)
        return "" if cell is None else cell.text()

    def _add(self, stain: NamedSpectrum) -> None:
        k = self.table.rowCount()
        self.table.insertRow(k)
        spectrum = np.array(stain.spectrum) / max(float(np.linalg.norm(stain.spectrum)), 1e-12)
        items = [stain.name, *(f"{value:z.4f}" for value in spectrum)]
        cells = [QTableWidgetItem(text) for text in items]
        for column, cell in enumerate(cells):
            self.table.setItem(k, column, cell)
        (colour,) = display_colours(spectrum[:, None])
        cells[0].setData(Qt.ItemDataRole.DecorationRole, QColor(*(int(v) for v in colour)))
        self.table.selectRow(k)

    def add_region(self) -> None:
        """Add the stain that dominates in the drawn region."""
        if self._image is None:
            notify_error("There is no image to measure in: open one first.")
            return
        try:
            regions = drawn_regions(self._viewer, self._image)
        except ValueError as error:
            notify_error(error)
            return
        plane = current_plane(self._image, self._viewer)
        background = None if self._fit is None else self._fit.background

        def work(report: Report) -> RegionStain:
            return measure_regions(plane, regions, background)

        self.task.start(work, self._region_measured, notify_error)

    def _region_measured(self, found: RegionStain) -> None:
        near = nearest_dyes(found.spectrum)[0]
        name = f"Stain {self.table.rowCount() + 1}"
        self._add(NamedSpectrum(name, found.spectrum))
        text = (
            f"Measured in {found.pixels:,} pixels; nearest known dye: {near.name}, "
            f"{near.angle:.0f}°."
        )
        if found.unexplained > _MIXED_REGION:
            text += " The region seems to hold more than one stain: draw it smaller."
        self._set_source(text)

    def add_stains(self) -> None:
        """Add the stains of the image's decomposition."""
        if self._fit is not None:
            labels = self._fit.labels
            for i in self._fit.order:
                red, green, blue = self._fit.spectra[:, i].tolist()
                self._add(NamedSpectrum(labels[i], (red, green, blue)))
            self._set_source("")

    def remove_selected(self) -> None:
        """Remove the selected stains from the table."""
        for k in sorted({index.row() for index in self.table.selectedIndexes()}, reverse=True):
            self.table.removeRow(k)

    def save(self) -> None:
        """Save the preset in the project, or for the user."""
        try:
            preset = self.preset
            if preset.name in {one.name for one in BUILT_IN_PRESETS}:
                raise ValueError(f"“{preset.name}” is built in; give yours another name.")
        except ValueError as error:
            notify_error(error)
            return
        library = stain_library(self._viewer)
        self.task.start(
            lambda report: library.save(preset), lambda _: self._saved(preset.name), notify_error
        )

    def _saved(self, name: str) -> None:
        self.note.setText(f"Saved “{name}”.")
        self.saved.emit(name)

    def delete(self) -> None:
        """Delete the saved preset of this name."""
        name = self.name.text().strip()
        if name not in {one.name for one in saved_presets(self._viewer)}:
            built_in = name in {one.name for one in BUILT_IN_PRESETS}
            reason = "is built in" if built_in else "is no saved preset"
            notify_error(f"“{name}” {reason}; nothing was deleted.")
            return
        folders = _library_folders(self._viewer)

        def work(report: Report) -> None:
            for folder in folders:
                StainLibrary(folder).remove(name)

        def done(_: None) -> None:
            self.note.setText(f"Deleted “{name}”.")
            self.saved.emit("")

        self.task.start(work, done, notify_error)

    def _choose_import(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Import preset", "", "Presets (*.json)")
        if path:
            self.import_file(path)

    def import_file(self, path: str) -> None:
        """Edit the preset of a file, or the stains of a spectra file."""
        self.task.start(lambda report: read_preset(path), self.show_preset, notify_error)

    def _choose_export(self) -> None:
        name = f"{self.name.text().strip() or 'preset'}.json"
        path, _ = QFileDialog.getSaveFileName(self, "Export preset", name, "Presets (*.json)")
        if path:
            self.export_file(path)

    def export_file(self, path: str) -> None:
        """Write the preset to a file."""
        try:
            preset = self.preset
        except ValueError as error:
            notify_error(error)
            return
        path = path if Path(path).suffix else f"{path}.json"
        done = f"Exported {Path(path).name}."
        self.task.start(
            lambda report: write_preset(path, preset),
            lambda _: self.note.setText(done),
            notify_error,
        )
