"""The panel "Compare normalizations": what methods make of the image, beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, ref

import numpy.typing as npt
from napari.layers import Image
from qtpy.QtCore import Qt, QTimer, Signal
from qtpy.QtGui import QColor, QPainter, QPixmap
from qtpy.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QFileDialog,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QRadioButton,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES
from napari_beerlanet.core.normalization.methods import (
    METHODS,
    SUFFIX,
    TRAINED_METHODS,
    find_method,
    save_normalizer,
)
from napari_beerlanet.core.normalization.normalizer import Appearance
from napari_beerlanet.samples import PHOTOGRAPHS, photograph_path
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    button,
    combo_box,
    form,
    heading,
    hint,
    row,
    separator,
)
from napari_beerlanet.ui.common.panel import Panel, ThemedLabel, open_panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.recent import RecentPaths
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.normalize.job import (
    CompareJob,
    LayerData,
    MethodComparison,
    MethodResult,
    Reference,
    compare_methods,
    save_image,
)
from napari_beerlanet.ui.stains.result_panel import colour_icon, theme_colour
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.layers import (
    NAME_SEPARATOR,
    ImageGrid,
    ImagePicker,
    LayerListWatcher,
    Role,
    add_hidden,
    grid_transform,
    guard_software_opengl,
    is_made_from,
    own_metadata,
    role_metadata,
    role_of,
    show_in_place_of_others,
    source_layer,
    transform_kwargs,
    user_images,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex, current_plane, pixel_size

if TYPE_CHECKING:
    from napari import Viewer

RECENT_REFERENCES = RecentPaths("references", "references.json")
"""Images and fitted normalizers that were used as references."""

_FIND_CELLS = "Find cells"
_METHOD_COLUMNS = 2  # check boxes side by side
_SWATCH_PX, _MAX_STAINS = 14, 4
_LINKED = (
    *("scale", "translate", "rotate", "shear", "affine"),
    *("contrast_limits", "gamma", "interpolation2d"),
)
"""What layers of one image share: place and contrast, not the visibility, as one looks at them in
turn."""
_ORIGINAL = "Original"
_SEVERAL = "macenko-multi"  # with one reference it is Macenko
OFFERED_METHODS = [method for method in METHODS.values() if method.name != "none"]
"""The image itself is shown anyway."""
_NAME_COLUMN, _CELLS_COLUMN, _FIRST_ROW = 0, 2, 2
_CAPTIONS = (
    ("Version", "Click one to look at it, and to work on it in the other panels."),
    (
        "Colours",
        "Background, then stain vectors, measured in the same way on each: what a tenth of the "
        "pixels exceed, and Macenko's vectors.",
    ),
    ("Cells", "Cells that were found in this version, with “Use in Find cells”."),
    ("s", "Seconds that the method took."),
)


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


def remember_reference(path: Path) -> None:
    """Offer a file first the next time; samples are offered anyway."""
    if path not in [photograph_path(name) for name in PHOTOGRAPHS]:
        RECENT_REFERENCES.add(path.absolute())


class NormalizedLayers:
    """The normalized versions of images: one layer for each method, updated by the next run.

    A layer that the user has renamed is the user's own: it is neither updated nor removed.
    """

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def of(self, source: Image) -> dict[str, Image]:
        """The layers of an image by method, in the order of napari's list."""
        return {
            str(own_metadata(layer.metadata).get("method")): layer
            for layer in self._viewer.layers
            if isinstance(layer, Image)
            and role_of(layer) == Role.NORMALIZED
            and is_made_from(layer, source)
            and layer.name == _layer_name(layer, source)
        }

    def method_of(self, layer: Image | None) -> str:
        """The method that a layer was made with, "" where it is none of ours."""
        if layer is None or role_of(layer) != Role.NORMALIZED:
            return ""
        return str(own_metadata(layer.metadata).get("method", ""))

    def put(self, source: Image, result: MethodResult, index: PlaneIndex) -> Image:
        """Show a result: in the method's layer, or in a new one above the others."""
        data = _with_plane_axes(result.data, len(index))
        place = transform_kwargs(source)
        if index:
            place |= grid_transform(source, 1, index)
        there = self.of(source)
        layer = there.get(result.method)
        if layer is not None and _can_show(layer, data):
            layer.data = data
            layer.translate = place["translate"]
            return layer
        if layer is not None:
            self._viewer.layers.remove(layer)
        layer = Image(
            data,
            name=f"{result.label}{NAME_SEPARATOR}{source.name}",
            rgb=True,
            multiscale=isinstance(data, list),
            metadata=role_metadata(Role.NORMALIZED, source, method=result.method),
            **place,
        )
        others = [one for one in there.values() if one in self._viewer.layers]
        add_hidden(self._viewer, layer, above=others[-1] if others else source)
        return layer

    def link(self, source: Image) -> None:
        """Let the versions of an image follow when it is moved or scaled."""
        layers = [source, *self.of(source).values()]
        if len(layers) > 1 and source.ndim == 2:  # planes of a stack are at places of their own
            self._viewer.layers.link_layers(layers, _LINKED)

    def remove(self, source: Image, keep: Sequence[str] = ()) -> None:
        """Remove the versions of an image, but not those of some methods.

        Boxes that were found in them go with them, unless the user has edited them.
        """
        for method, layer in self.of(source).items():
            if method not in keep:
                boxes = detection_layer_of(self._viewer, layer)
                if boxes is not None and not boxes.edited:
                    self._viewer.layers.remove(boxes.layer)
                self._viewer.layers.remove(layer)


def _layer_name(layer: Image, source: Image) -> str:
    """The name that we give a version of an image."""
    method = str(own_metadata(layer.metadata).get("method"))
    known = METHODS | TRAINED_METHODS
    label = known[method].label if method in known else method
    return f"{label}{NAME_SEPARATOR}{source.name}"


def _with_plane_axes(data: LayerData, leading: int) -> LayerData:
    """The data with the leading axes of a stack, each of length 1."""
    if isinstance(data, list):
        return [_with_plane_axes(level, leading) for level in data]
    return data[(None,) * leading] if leading else data


def _can_show(layer: Image, data: LayerData) -> bool:
    """Whether a layer can take the data, or a new one is needed."""
    ndim = data[0].ndim if isinstance(data, list) else data.ndim
    return bool(layer.multiscale) == isinstance(data, list) and layer.ndim + 1 == ndim


class MethodChoice(QWidget):
    """A check box for each method; `changed` when others are checked."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.boxes: dict[str, QCheckBox] = {}
        layout = QGridLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        for place, method in enumerate(OFFERED_METHODS):
            box = QCheckBox(method.label)
            box.setToolTip(f"{method.description} ({method.licence})")
            box.setChecked(method.needs_template and method.name != _SEVERAL)
            box.toggled.connect(lambda *_: self.changed.emit())
            layout.addWidget(box, *divmod(place, _METHOD_COLUMNS))
            self.boxes[method.name] = box

    @property
    def chosen(self) -> tuple[str, ...]:
        """Names of the checked methods."""
        return tuple(name for name, box in self.boxes.items() if box.isChecked())

    @property
    def needs_reference(self) -> bool:
        """Whether one of them does."""
        return any(METHODS[name].needs_template for name in self.chosen)


class ReferencePicker(QWidget):
    """What the image shall look like: another open image, a recent file, files, or a sample.

    `changed` when another one is chosen. As long as the user has chosen none, it is the topmost
    other image, or else the file that was used last.
    """

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.list = combo_box(
            "The image whose colours are taken over: another open image, a file, a sample, or a "
            "normalizer that was saved here. Files can also be dropped here.",
            12,
            expanding=True,
        )
        self.open = button(
            "Open …",
            "Choose an image file, several of the same stain, or a saved normalizer.",
            self.open_dialog,
        )
        self._images: list[ref[Image]] = []
        self._opened: list[_Paths] = []
        self._keys: list[ref[Image] | _Paths] = []
        self._chosen: ref[Image] | _Paths | None = None  # by the user
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.list, 1)
        layout.addWidget(self.open)
        self.setAcceptDrops(True)
        self.list.activated.connect(self._activated)
        self.offer([])

    def offer(self, images: Sequence[Image]) -> None:
        """Offer these layers beside files and samples; the user's choice stays if it is there."""
        self._images = [ref(image) for image in reversed(images)]
        before = self.key
        recent = [(path,) for path in RECENT_REFERENCES.paths() if path.is_file()]
        files = list(dict.fromkeys([*self._opened, *recent]))
        self._keys = [*self._images, *files, *((photograph_path(name),) for name in PHOTOGRAPHS)]
        with signals_blocked(self.list):
            self.list.clear()
            for place, key in enumerate(self._keys):
                text, tip = _described(key)
                self.list.addItem(text)
                self.list.setItemData(place, tip, Qt.ItemDataRole.ToolTipRole)
            places = [k for k, key in enumerate(self._keys) if key == self._chosen]
            self.list.setCurrentIndex(places[0] if places else 0)
        if self.key != before:
            self.changed.emit()

    @property
    def key(self) -> ref[Image] | tuple[Path, ...] | None:
        """The chosen layer or files, None while there are none."""
        place = self.list.currentIndex()
        return self._keys[place] if 0 <= place < len(self._keys) else None

    @property
    def is_normalizer(self) -> bool:
        """Whether a saved normalizer is chosen, which is of one method."""
        return isinstance(self.key, tuple) and Reference(paths=self.key).is_normalizer

    def reference(self, viewer: Viewer) -> Reference | None:
        """What is chosen, for a thread."""
        key = self.key
        layer = key() if isinstance(key, ref) else None
        if layer is not None:
            return Reference(current_plane(layer, viewer))
        return Reference(paths=key) if isinstance(key, tuple) else None

    def choose_files(self, paths: Sequence[str | Path]) -> None:
        """Choose images, or a saved normalizer, as the user does with *Open …*."""
        self._chosen = tuple(Path(path) for path in paths)
        if self._chosen not in self._opened:
            self._opened.insert(0, self._chosen)
        self.offer([image for weak in self._images[::-1] if (image := weak()) is not None])

    def choose_image(self, image: Image) -> None:
        """Choose one of the offered layers."""
        self._chosen = ref(image)
        self.offer([one for weak in self._images[::-1] if (one := weak()) is not None])

    def open_dialog(self) -> None:
        """Let the user choose files."""
        images = " ".join(f"*{suffix}" for suffix in sorted(IMAGE_SUFFIXES))
        kinds = f"Images and normalizers ({images} *{SUFFIX})"
        paths, _ = QFileDialog.getOpenFileNames(self, "Choose a reference", "", kinds)
        if paths:
            self.choose_files(paths)

    def _activated(self, place: int) -> None:
        self._chosen = self.key
        self.changed.emit()

    def dragEnterEvent(self, event: Any) -> None:
        """Accept files."""
        if event.mimeData().hasUrls():
            event.acceptProposedAction()

    def dropEvent(self, event: Any) -> None:
        """Choose the files that are dropped."""
        event.acceptProposedAction()
        self.choose_files([url.toLocalFile() for url in event.mimeData().urls()])


_Paths = tuple[Path, ...]


def _described(key: ref[Image] | _Paths) -> tuple[str, str]:
    """Name and tooltip of a reference."""
    if not isinstance(key, tuple):
        layer = key()
        name = layer.name if layer is not None else ""
        return name, f"The open image “{name}”."
    samples = {photograph_path(name): name for name in PHOTOGRAPHS}
    if key[0] in samples:
        return f"Sample: {samples[key[0]]}", "An image that comes with this plugin."
    return (key[0].name if len(key) == 1 else f"{len(key)} images"), "\n".join(map(str, key))


# --- results --------------------------------------------------------------------------------------


class VersionTable(QWidget):
    """A line for the image itself and one for each method; `chosen` with a method, or ""."""

    chosen = Signal(str)

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer = viewer
        self.lines: dict[str, VersionLine] = {}
        self._group = QButtonGroup(self)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(6)
        self._grid.setVerticalSpacing(2)
        self._grid.setColumnStretch(_NAME_COLUMN, 1)
        self.captions = [hint(text) for text, _ in _CAPTIONS]
        for column, (caption, (_, tip)) in enumerate(zip(self.captions, _CAPTIONS, strict=True)):
            caption.setToolTip(tip)
            self._grid.addWidget(caption, 0, column)
        self.reference_label, self.reference = QLabel("Reference"), QLabel()
        self._reference: Appearance | None = None
        self._grid.addWidget(self.reference_label, 1, 0)
        self._grid.addWidget(self.reference, 1, 1)

    def show_comparison(self, comparison: MethodComparison, layers: Mapping[str, Image]) -> None:
        """Show these results; a method without a layer cannot be chosen."""
        wanted = {"": None, **{result.method: result for result in comparison.results}}
        for method in [method for method in self.lines if method not in wanted]:
            self.lines.pop(method).remove(self._grid, self._group)
        for method in wanted:
            if method not in self.lines:
                line = VersionLine(self._viewer)
                line.name.clicked.connect(lambda *_, method=method: self.chosen.emit(method))
                self._group.addButton(line.name)
                self.lines[method] = line
        for place, (method, result) in enumerate(wanted.items()):
            line = self.lines[method]
            line.place(self._grid, 2 * place + _FIRST_ROW)
            line.show(result, comparison.original)
            line.name.setEnabled(result is None or method in layers)
        self._reference = comparison.reference
        for widget in (self.reference_label, self.reference):
            widget.setVisible(comparison.reference is not None)
        self.repaint_swatches()

    def mark(self, method: str) -> None:
        """Highlight the version that is chosen."""
        if method in self.lines:
            self.lines[method].name.setChecked(True)

    def show_counts(self, counts: Mapping[str, int]) -> None:
        """The number of cells that were found in each version, where one was searched."""
        for method, line in self.lines.items():
            line.cells.setText(f"{counts[method]:,}" if method in counts else "")
        self.captions[_CELLS_COLUMN].setVisible(bool(counts))

    def repaint_swatches(self) -> None:
        """Repaint all swatches in the colours of the present theme."""
        _paint_looks(self.reference, self._reference, self._viewer)
        for line in self.lines.values():
            line.paint()


class VersionLine:
    """The widgets of one version: a line of the grid, and a warning under it."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._looks: Appearance | None = None
        self._own_terms = ""
        self.name = QRadioButton()
        self.name.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.colours = QLabel()
        self.cells, self.seconds = QLabel(), QLabel()
        for label in (self.cells, self.seconds):
            label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.warning = ThemedLabel(kind="warning")
        self._widgets = (self.name, self.colours, self.cells, self.seconds)

    def place(self, grid: QGridLayout, place: int) -> None:
        """Put the widgets into these two rows of the grid."""
        for column, widget in enumerate(self._widgets):
            grid.addWidget(widget, place, column)
        grid.addWidget(self.warning, place + 1, 0, 1, len(self._widgets))

    def remove(self, grid: QGridLayout, group: QButtonGroup) -> None:
        """Take the widgets away."""
        group.removeButton(self.name)
        for widget in (*self._widgets, self.warning):
            grid.removeWidget(widget)
            widget.deleteLater()

    def show(self, result: MethodResult | None, original: Appearance | None) -> None:
        """Show the result of a method, or the image itself where there is none."""
        self.name.setText(_ORIGINAL if result is None else result.label)
        about = "The image itself." if result is None else find_method(result.method).description
        self.name.setToolTip(f"{about}\nClick to look at this version, and to work on it.")
        warning = "" if result is None else result.warning
        self.warning.setText(f"⚠ {warning}" if warning else "")
        self.warning.setVisible(bool(warning))
        self.seconds.setText("" if result is None else f"{result.seconds:.1f}")
        for widget, (_, tip) in zip(self._widgets[2:], _CAPTIONS[2:], strict=True):
            widget.setToolTip(tip)
        self._looks = original if result is None else result.looks
        self._own_terms = "" if result is None else _own_terms(result)
        self.paint()

    def paint(self) -> None:
        """Paint the swatches in the colours of the theme."""
        _paint_looks(self.colours, self._looks, self._viewer)
        self.colours.setToolTip(self.colours.toolTip() + self._own_terms)


def _paint_looks(label: QLabel, looks: Appearance | None, viewer: Viewer) -> None:
    looks = looks or Appearance()
    colours = looks.colours()[: _MAX_STAINS + 1]
    label.setPixmap(swatches(colours, theme_colour(viewer, "secondary")))
    label.setToolTip(looks.description)


def _own_terms(result: MethodResult) -> str:
    """Background and stains before and after, as the method itself knows them."""
    known = [(word, looks) for word, looks in (("before", result.before), ("after", result.after))]
    return "".join(
        f"\n\nAs the method sees it {word}:\n{looks.description}"
        for word, looks in known
        if looks is not None
    )


def swatches(colours: Sequence[npt.ArrayLike], edge: QColor) -> QPixmap:
    """Squares side by side, at least one wide."""
    side = _SWATCH_PX
    picture = QPixmap(max(len(colours), 1) * (side + 2), side)
    picture.fill(Qt.GlobalColor.transparent)
    painter = QPainter(picture)
    for k, colour in enumerate(colours):
        square = colour_icon(colour, edge).pixmap(side, side)
        painter.drawPixmap(k * (side + 2), 0, square)
    painter.end()
    return picture
