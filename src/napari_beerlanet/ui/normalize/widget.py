"""The panel "Compare normalizations": what methods make of the image, beside it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

from napari.layers import Image
from qtpy.QtCore import QTimer, Signal
from qtpy.QtWidgets import QCheckBox, QFileDialog, QPushButton, QVBoxLayout, QWidget
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.normalization.methods import SUFFIX, save_normalizer
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    button,
    form,
    heading,
    row,
    separator,
)
from napari_beerlanet.ui.common.panel import Panel, open_panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.normalize.form import MethodChoice, ReferencePicker, remember_reference
from napari_beerlanet.ui.normalize.job import (
    CompareJob,
    MethodComparison,
    MethodResult,
    compare_methods,
    save_image,
)
from napari_beerlanet.ui.normalize.version_layers import NormalizedLayers
from napari_beerlanet.ui.normalize.version_table import VersionTable
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.layers import (
    NAME_SEPARATOR,
    ImageGrid,
    ImagePicker,
    LayerListWatcher,
    Role,
    guard_software_opengl,
    role_of,
    show_in_place_of_others,
    source_layer,
    user_images,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex, current_plane, pixel_size

if TYPE_CHECKING:
    from napari import Viewer

_FIND_CELLS = "Find cells"


class CompareWidget(Panel):
    """The panel "Compare normalizations".

    Every method makes an RGB layer "method · image". `compared` is emitted with the results when
    all layers are there.
    """

    title = "Compare normalizations"
    compared = Signal(object)

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        guard_software_opengl(self.viewer)
        self.compare_task, self.save_task = self.task(), self.task()
        self.layers = NormalizedLayers(self.viewer)
        self.grid = ImageGrid(self.viewer)
        self._results: WeakKeyDictionary[Image, MethodComparison] = WeakKeyDictionary()
        self._build()
        self._add_timer = QTimer(self)
        self._add_timer.setInterval(0)
        self._add_timer.timeout.connect(self._add_next)
        self._to_add: list[MethodResult] = []
        self._adding_for: Image | None = None
        self._plane_index: PlaneIndex = ()
        self._connect()
        self._image_chosen()

    def _build(self) -> None:
        self.image = ImagePicker(self)
        self.empty = EmptyState(self)
        self.reference = ReferencePicker()
        self.methods = MethodChoice()
        self.run_button = QPushButton("Compare")
        self.run_button.setToolTip("Normalize the image with these methods, one layer for each.")
        self.run_reason = DisabledReason(self.run_button)
        self.side_by_side = QCheckBox("Side by side")
        self.side_by_side.setChecked(True)
        self.side_by_side.setToolTip(
            "Show the image and its normalized versions in napari's grid; otherwise one at a time, "
            "at the same place."
        )
        self.progress_bar = TaskProgressBar(self.compare_task)
        self.table = VersionTable(self.viewer)
        self.result = self._result_section()
        rows = form()
        rows.addRow("Image", self.image)
        rows.addRow("Reference", self.reference)
        self.section = QWidget()
        section = QVBoxLayout(self.section)
        section.setContentsMargins(0, 0, 0, 0)
        section.setSpacing(6)
        section.addLayout(rows)
        for widget in (
            heading("Methods"),
            self.methods,
            row(self.run_button, self.side_by_side, stretch=0),
            self.run_reason,
            self.progress_bar,
            self.result,
        ):
            section.addWidget(widget)
        self.body.addWidget(self.empty)
        self.body.addWidget(self.section)
        self.body.addStretch(1)

    def _result_section(self) -> QWidget:
        self.find_button = button(
            "Use in Find cells",
            "Find cells in the version that is chosen above, with the model and settings of “Find "
            "cells”, for a quick look.",
            self.find_cells,
        )
        self.save_button = button(
            "Save image …", "Save the version that is chosen above.", self._choose_image_path
        )
        self.save_normalizer_button = button(
            "Save normalizer …",
            "Save the method with what it has learned from the reference, to use it as a reference "
            "again, in Python or on the command line.",
            self._choose_normalizer_path,
        )
        self.remove_button = button(
            "Remove layers",
            "Remove the normalized versions of this image; layers that you have renamed stay.",
            self.remove_layers,
        )
        self.save_bar = TaskProgressBar(self.save_task, quiet=True)
        section = QWidget()
        layout = QVBoxLayout(section)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(separator())
        layout.addWidget(self.table)
        layout.addWidget(row(self.find_button, self.remove_button))
        layout.addWidget(row(self.save_button, self.save_normalizer_button))
        layout.addWidget(self.save_bar)
        return section

    def _connect(self) -> None:
        self.image.chosen.connect(lambda *_: self._image_chosen())
        self.methods.changed.connect(self._update_run_button)
        self.reference.changed.connect(self._update_run_button)
        self.run_button.clicked.connect(lambda *_: self.run())
        self.side_by_side.toggled.connect(self._show_side_by_side)
        self.table.chosen.connect(self._show_method)
        self.compare_task.started.connect(self._update_run_button)
        self.compare_task.ended.connect(self._ended)
        self.connect_event(self.viewer.canvas.grid.events.enabled, self._grid_changed)
        self.connect_event(get_session(self.viewer).detections_changed, self._show_counts)
        self.connect_event(self.viewer.events.theme, self._theme_changed)
        self._layer_list = LayerListWatcher(self, self._layers_changed)

    # --- state ------------------------------------------------------------------------------------

    @property
    def source(self) -> Image | None:
        """The image that is normalized: the chosen one, or the one that it was made from."""
        layer = self.image.layer
        if layer is not None and role_of(layer) == Role.NORMALIZED:
            source = source_layer(self.viewer, layer)
            return source if isinstance(source, Image) else layer
        return layer

    @property
    def comparison(self) -> MethodComparison | None:
        """That of the chosen image."""
        source = self.source
        return None if source is None else self._results.get(source)

    @property
    def results(self) -> list[MethodResult]:
        """Those of the chosen image."""
        comparison = self.comparison
        return [] if comparison is None else comparison.results

    @property
    def shown_method(self) -> str:
        """The method whose version is the chosen image, "" for the image itself."""
        return self.layers.method_of(self.image.layer)

    @property
    def adding(self) -> bool:
        """Whether layers of the last run are still being added."""
        return self._add_timer.isActive()

    def _layers_changed(self) -> None:
        self.empty.update_text()
        self._image_chosen()

    def _image_chosen(self) -> None:
        source = self.source
        if self.grid.images and self.image.layer not in self.grid.images:
            self._uncheck_side_by_side()
            self._leave_grid()
        self.empty.setVisible(source is None)
        self.section.setVisible(source is not None)
        self.reference.offer([one for one in user_images(self.viewer) if one is not source])
        self._show_results()
        self._update_run_button()

    def _update_run_button(self) -> None:
        reason = ""
        if self.source is None:
            reason = "Open an image first."
        elif not self.methods.chosen and not self.reference.is_normalizer:
            reason = "Choose a method."
        elif self.methods.needs_reference and self.reference.key is None:
            reason = "Choose a reference."
        elif self.compare_task.running or self._to_add:
            reason = "A comparison is running."
        self.run_reason.update_button(reason)

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Normalize the image with the chosen methods."""
        source = self.source
        if source is None or not self.run_button.isEnabled():
            return
        try:
            reference = self.reference.reference(self.viewer)
            job = CompareJob(current_plane(source, self.viewer), self.methods.chosen, reference)
        except Exception as error:
            self.progress_bar.show_error(error)
            return
        weak = ref(source)
        self.compare_task.start(
            lambda report: compare_methods(job, report),
            lambda comparison: self._done(weak(), job, comparison),
        )

    def _done(self, source: Image | None, job: CompareJob, comparison: MethodComparison) -> None:
        if source is None or source not in self.viewer.layers:
            self.progress_bar.set_message("The image was removed meanwhile; nothing was added.")
            return
        if job.reference is not None and len(job.reference.paths) == 1:
            remember_reference(job.reference.paths[0])
        if self.grid.images:
            self._leave_grid()
        self._to_add = [result for result in comparison.results if result.data is not None]
        self.layers.remove(source, [result.method for result in self._to_add])
        self._results[source] = comparison
        self._adding_for, self._plane_index = source, job.plane.index
        self._add_timer.start()

    def _add_next(self) -> None:
        """Add one layer at each turn of the event loop: napari takes its time for each."""
        source = self._adding_for
        if source is None or source not in self.viewer.layers:
            self._to_add.clear()
        if self._to_add and source is not None:
            self.layers.put(source, self._to_add.pop(0), self._plane_index)
            return
        self._add_timer.stop()
        self._adding_for = None
        if source is not None and source in self.viewer.layers:
            self._all_added(source)
        self._update_run_button()

    def _all_added(self, source: Image) -> None:
        results = self._results[source].results
        self.layers.link(source)
        if self.source is source:
            if self.side_by_side.isChecked():
                self._show_side_by_side(True)
            else:
                self._show_method(results[0].method)
        failed = sum(result.data is None or result.unchanged for result in results)
        seconds = sum(result.seconds for result in results)
        text = f"{count_of(len(results), 'method')} in {seconds:.1f} s."
        if failed:
            text += f" {failed} could not normalize this image; see below."
        about = "" if self.source is source else f"“{source.name}”: "
        self.progress_bar.set_message(about + text)
        self._show_results()
        self.show_soon(self.result)
        self.compared.emit(results)

    def _ended(self, outcome: TaskOutcome) -> None:
        self._update_run_button()

    # --- showing ----------------------------------------------------------------------------------

    def _show_results(self) -> None:
        source, comparison = self.source, self.comparison
        self.result.setVisible(comparison is not None)
        if source is None or comparison is None:
            return
        there = self.layers.of(source)
        self.table.show_comparison(comparison, there)
        self.table.mark(self.shown_method)
        self._show_counts()
        chosen = self.shown_method
        made = any(one.method == chosen and one.normalizer for one in comparison.results)
        self.save_normalizer_button.setEnabled(made)
        self.remove_button.setEnabled(bool(there))

    def _show_counts(self, event: Any = None) -> None:
        """The number of cells that were found in each version."""
        source = self.source
        if source is None or not self.results:
            return
        detections = get_session(self.viewer).detections
        versions = {"": source, **self.layers.of(source)}
        found = {method: detections.get(layer) for method, layer in versions.items()}
        self.table.show_counts({k: len(one) for k, one in found.items() if one is not None})

    def _theme_changed(self, event: Any = None) -> None:
        self.table.repaint_swatches()

    def _show_method(self, method: str) -> None:
        """Choose a version; in its place, unless all are side by side."""
        source = self.source
        layer = None if source is None else {"": source, **self.layers.of(source)}.get(method)
        if layer is not None:
            self.image.pick(layer)
            show_in_place_of_others(self.viewer, layer)
        self.table.mark(self.shown_method)

    def _show_side_by_side(self, together: bool) -> None:
        source = self.source
        layers = [] if source is None else list(self.layers.of(source).values())
        if together and source is not None and layers:
            self.grid.show([source, *layers])
        elif not together and self.grid.images:
            self._leave_grid()

    def _leave_grid(self) -> None:
        source, layer = self.source, self.image.layer
        chosen = layer if layer in self.grid.images else source
        self.grid.leave(chosen)
        if layer is not None:
            show_in_place_of_others(self.viewer, layer)

    def _grid_changed(self, event: Any = None) -> None:
        """The user has left the grid by napari's own button."""
        if not self.viewer.canvas.grid.enabled and self.grid.images:
            self._uncheck_side_by_side()
            self._leave_grid()

    def _uncheck_side_by_side(self) -> None:
        with signals_blocked(self.side_by_side):
            self.side_by_side.setChecked(False)

    def find_cells(self) -> None:
        """Find cells in the chosen version; boxes and counts are those of that layer."""
        layer = self.image.layer
        if layer is None:
            return
        self.side_by_side.setChecked(False)  # boxes would have a cell of the grid of their own
        cells = open_panel(self.viewer, _FIND_CELLS)
        cells.image.pick(layer)
        cells.run()

    def remove_layers(self) -> None:
        """Remove the normalized versions of the image."""
        source = self.source
        if source is None:
            return
        if self.grid.images:
            self._leave_grid()
        self.image.pick(source)
        self.layers.remove(source)
        self._results.pop(source, None)
        self.progress_bar.set_message("")
        show_in_place_of_others(self.viewer, source)
        self._show_results()

    # --- saving -----------------------------------------------------------------------------------

    def _choose_image_path(self) -> None:
        layer = self.image.layer
        if layer is not None:
            name = f"{layer.name.replace(NAME_SEPARATOR, '-').replace('/', '-')}.tif"
            kinds = "Images (*.tif *.tiff *.png)"
            path, _ = QFileDialog.getSaveFileName(self, "Save image", name, kinds)
            if path:
                self.save_image(path)

    def save_image(self, path: str) -> None:
        """Write the chosen version to a file, off the GUI thread."""
        layer = self.image.layer
        if layer is not None:
            file = Path(path if Path(path).suffix else f"{path}.tif")
            plane, size = current_plane(layer, self.viewer), pixel_size(layer)
            self.save_task.start(
                lambda report: save_image(plane, size, file, report),
                lambda _: self.save_bar.set_message(f"Saved {file.name}."),
            )

    def _choose_normalizer_path(self) -> None:
        name = f"{self.shown_method}{SUFFIX}"
        kinds = f"Normalizers (*{SUFFIX})"
        path, _ = QFileDialog.getSaveFileName(self, "Save normalizer", name, kinds)
        if path:
            self.save_normalizer(path)

    def save_normalizer(self, path: str) -> None:
        """Write the fitted method of the chosen version to a file, off the GUI thread."""
        chosen = self.shown_method
        made = [one.normalizer for one in self.results if one.method == chosen and one.normalizer]
        if not made:
            return
        file = Path(path if Path(path).suffix else f"{path}{SUFFIX}")

        def done(_: object) -> None:
            remember_reference(file)
            self._image_chosen()
            self.save_bar.set_message(f"Saved {file.name}; it is offered as a reference.")

        self.save_task.start(lambda report: save_normalizer(made[0], file), done)

    def on_closed(self) -> None:
        """Layers stay; what the grid has hidden is shown again."""
        self._add_timer.stop()
        if self.grid.images:
            self._leave_grid()
