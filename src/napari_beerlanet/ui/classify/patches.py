"""Patches of a slide in the viewer: a heat map for each class that fills where the user looks.

`run_patches` runs off the GUI thread and knows no Qt; `PatchSection` is the part of the panel that
runs it, shows its layers, and measures the regions that are drawn on the slide.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QHeaderView, QPushButton, QSpinBox, QTableWidget, QTableWidgetItem
from superqt.utils import QSignalThrottler, signals_blocked

from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.checkpoints.info import CLASSIFIER
from napari_beerlanet.core.classification.settings import PatchSettings
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, subprogress
from napari_beerlanet.core.common.storage import with_file_check
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    DisabledReason,
    FractionSlider,
    button,
    combo_box,
    copy_text,
    form,
    hint,
)
from napari_beerlanet.ui.common.model_section import load_model, place_model
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.viewer.layers import (
    ImagePicker,
    LayerListWatcher,
    Role,
    add_unselected,
    grid_transform,
    is_made_from,
    own_metadata,
    role_metadata,
    role_of,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import (
    Plane,
    PlaneIndex,
    PreviousSearch,
    SlideCache,
    current_plane,
    pixel_size,
    read_previous_search,
)
from napari_beerlanet.ui.viewer.viewport import canvas_corners, to_image_pixels

if TYPE_CHECKING:
    from napari.viewer import Viewer

    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.classification.slide_classifier import (
        PatchMap,
        PatchTile,
        RegionSummary,
    )

_POLL_INTERVAL_MS = 200  # between looks at what the thread has done
_MEASURE_DELAY_MS = 300  # between measurements, at least: tiles, shapes and the threshold may move
_OPACITY = 0.5
_COLORMAP = "turbo"
_SUFFIX = ".patches"  # as `slide_classifier.PATCH_SUFFIX`, which would load torch
_SETUP_FRACTION = 0.1  # of the progress: model, tissue and stains
_AUTO = 7  # what the box for the patch size holds for "auto": one less than its least
_AUTO_STEP = 0  # the same of the distance between patches
_ORDINARY = ("healthy", "normal", "benign", "negative", "uninfected", "background", "other")
_COLUMNS = ("Region", "Mean", "Above", "Patches", "Classified")
_REGION_LAYERS = (None, Role.REGIONS)  # roles of Shapes layers whose shapes are regions


# --- off the GUI thread ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class PatchJob:
    """A run over the patches of a plane; `model_key` is a name or path, `model` if it is loaded.

    `owner`: as of `load_model`.
    """

    plane: Plane
    model_key: str
    model: Classifier | None
    device: str
    settings: PatchSettings
    pixel_size: tuple[float, float] | None = None
    path: Path | None = None
    results: Path | None = None
    source: dict[str, Any] | None = None
    owner: object = None


@dataclass(eq=False)
class PatchFeed:
    """Connects the thread with the window. `focus` is (y, x) in image pixels."""

    focus: tuple[float, float] | None = None
    done: int = 0
    total: int = 0
    _queue: SimpleQueue[PatchMap | PatchTile] = field(default_factory=SimpleQueue)

    def put(self, item: PatchMap | PatchTile) -> None:
        """Called by the thread: first a copy of the map as it is at the start, then tiles."""
        self._queue.put(item)

    def take(self) -> list[PatchMap | PatchTile]:
        """Everything since the last call."""
        items: list[PatchMap | PatchTile] = []
        while True:
            try:
                items.append(self._queue.get_nowait())
            except Empty:
                return items


@dataclass(frozen=True, eq=False)
class PatchResult:
    """All patches of a run, with the sentences on why they may be wrong."""

    job: PatchJob
    patches: PatchMap
    changed: list[str]
    resumed: int


def run_patches(job: PatchJob, feed: PatchFeed, report: Report) -> PatchResult:
    """Classify the patches of a slide, first at the feed's focus, and put them into the feed."""
    from napari_beerlanet.core.classification.slide_classifier import SlideClassification

    report = with_file_check(job.path, report)
    loading = subprogress(report, 0.0, 0.02) or report
    model: Classifier = (
        load_model(job.model_key, job.device, loading, CLASSIFIER, job.owner)
        if job.model is None
        else place_model(job.model, job.device)
    )
    with SlideClassification(
        model,
        job.plane.pyramid,
        patch=job.settings.patch,
        step=job.settings.step,
        min_tissue=job.settings.min_tissue,
        pixel_size=job.pixel_size,
        results=job.results,
        source=job.source,
        report=subprogress(report, 0.02, _SETUP_FRACTION),
    ) as run:
        resumed = run.resumed
        feed.done, feed.total = resumed, len(run.tiles)
        feed.put(replace(run.map, scores=run.map.scores.copy()))
        rest = subprogress(report, _SETUP_FRACTION, 1.0)
        for tile in run.classify_tiles(lambda: feed.focus, report=rest):
            feed.done = tile.done
            feed.put(tile)
        return PatchResult(job, run.map, run.changed, resumed)


# --- layers ---------------------------------------------------------------------------------------


class PatchLayers:
    """An image layer of the probability of each class, over the image that it was made from.

    A layer that the user deletes does not come back until the next run.
    """

    def __init__(
        self, viewer: Viewer, source: Image, patches: PatchMap, index: PlaneIndex, shown: str
    ) -> None:
        self.source, self.patches = source, patches
        for old in patch_layers(viewer, source):
            viewer.layers.remove(old)
        place = transform_kwargs(source) | grid_transform(source, patches.cell, index)
        facts = {"patch": patches.patch, "model": patches.report["model"]}
        self.layers: dict[str, Image] = {}
        names = patches.names
        for k, name in enumerate(names):
            plane = np.ascontiguousarray(patches.scores[..., k])
            layer = Image(
                plane.reshape((1,) * len(index) + plane.shape),
                name=f"{source.name} · {name}",
                colormap=_COLORMAP,
                contrast_limits=(0, 1),
                opacity=_OPACITY,
                blending="translucent",
                interpolation2d="nearest",
                visible=name == shown,
                metadata=role_metadata(Role.PATCHES, source, **facts, type=name),
                **place,
            )
            # Right above the image: boxes and regions stay on top.
            add_unselected(viewer, layer, above=source if k == 0 else self.layers[names[k - 1]])
            self.layers[name] = layer

    def add(self, tiles: Sequence[PatchTile]) -> None:
        """Write tiles into the map and its layers."""
        for tile in tiles:
            self.patches.scores[tile.rows, tile.columns] = tile.scores
        for k, name in enumerate(self.patches.names):
            data: npt.NDArray[np.float32] = np.asarray(self.layers[name].data)
            for tile in tiles:
                data[..., tile.rows, tile.columns] = tile.scores[..., k]
            self.layers[name].refresh(extent=False)

    def show(self, name: str) -> None:
        """Show the layer of one class, and hide the others."""
        for other, layer in self.layers.items():
            layer.visible = other == name


def patch_layers(viewer: Viewer, source: Image) -> list[Image]:
    """The layers of patch probabilities of an image."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Image)
        and role_of(layer) == Role.PATCHES
        and is_made_from(layer, source)
    ]


def drawn_regions(viewer: Viewer, source: Image) -> list[tuple[str, Region]]:
    """Shapes that enclose a part of an image, in its pixels, with a name each."""
    regions = []
    for layer in viewer.layers:
        if not isinstance(layer, Shapes) or role_of(layer) not in _REGION_LAYERS:
            continue
        if own_metadata(layer.metadata).get("source") and not is_made_from(layer, source):
            continue
        for number, (shape, kind) in enumerate(zip(layer.data, layer.shape_type, strict=True), 1):
            points = to_image_pixels(np.asarray(shape), layer, source)[:, ::-1]
            try:
                regions.append((f"{layer.name} {number}", Region.from_shape(points, kind)))
            except ValueError:
                continue  # a line encloses nothing
    return regions


def likely_positive(names: Sequence[str]) -> str:
    """The class whose map is shown first: the last that is not called healthy, normal, …"""
    special = [name for name in names if name.lower() not in _ORDINARY]
    return (special or list(names))[-1]


# --- the section ----------------------------------------------------------------------------------


class PatchSection(CollapsibleGroup):
    """“Patches of a slide” in the panel: run, heat maps, and regions.

    `model()` gives the key and, if it is loaded, the model that is chosen in the panel; `device()`
    its device. `update_state` is to be called when they change.
    """

    def __init__(
        self,
        panel: Panel,
        image: ImagePicker,
        model: Callable[[], tuple[str, Classifier | None]],
        device: Callable[[], str],
    ) -> None:
        super().__init__("Patches of a slide")
        self._panel, self._image, self._model, self._device = panel, image, model, device
        self.viewer = panel.viewer
        self.patch_task, self.cache_task, self.measure_task = (panel.task() for _ in range(3))
        self._cache = SlideCache()
        self._feed = PatchFeed()
        self._job: PatchJob | None = None
        self._source: Image | None = None
        self.layers: PatchLayers | None = None
        self._previous: PreviousSearch | None = None
        self._build()
        self._timer = QTimer(self)
        self._timer.setInterval(_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)
        self._measure_soon = QSignalThrottler(parent=self)
        self._measure_soon.setTimeout(_MEASURE_DELAY_MS)
        self._measure_soon.triggered.connect(self.measure)
        self._connect()
        self.image_chosen()

    def _build(self) -> None:
        defaults = PatchSettings()
        self.patch_size = _pixel_box("patch", _AUTO)
        self.step = _pixel_box("step", _AUTO_STEP)
        self.min_tissue = FractionSlider(
            defaults.min_tissue, PatchSettings.spec("min_tissue").description, 0.0
        )
        self.run_button = QPushButton()
        self.run_reason = DisabledReason(self.run_button)
        self.note = hint()
        self.progress_bar = TaskProgressBar(self.patch_task)
        self.shown = combo_box("The class whose heat map is shown and measured.", 10, True)
        self.threshold = FractionSlider(
            defaults.threshold, PatchSettings.spec("threshold").description
        )
        self.table = QTableWidget(0, len(_COLUMNS))
        self.table.setHorizontalHeaderLabels(list(_COLUMNS))
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.verticalHeader().hide()  # type: ignore[union-attr]
        header = self.table.horizontalHeader()
        assert header is not None
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        header.setSectionResizeMode(0, QHeaderView.ResizeMode.Stretch)
        self.table.setMaximumHeight(160)
        self.table.setToolTip(
            "Mean probability of the class in each region that is drawn in a Shapes layer, the "
            "part of its patches above the threshold, how many patches it has, and how much of its "
            "area is classified: the rest is background, or still to come."
        )
        self.copy = button("Copy table", "Copy the table for a spreadsheet.", self.copy_table)
        top, self._result_form = form(), form()
        top.addRow("Patch size", self.patch_size)
        top.addRow("Step", self.step)
        top.addRow("Tissue at least", self.min_tissue)
        self._result_form.addRow("Heat map", self.shown)
        self._result_form.addRow("Threshold", self.threshold)
        self.body.addLayout(top)
        for widget in (self.run_button, self.run_reason, self.note, self.progress_bar):
            self.body.addWidget(widget)
        self.result = CollapsibleGroup("Regions", True)
        self.result.body.addLayout(self._result_form)
        self.result.body.addWidget(self.table)
        self.result.body.addWidget(self.copy)
        self.body.addWidget(self.result)
        self.result.hide()

    def _connect(self) -> None:
        self.run_button.clicked.connect(lambda *_: self.run())
        self._image.chosen.connect(lambda *_: self.image_chosen())
        self.patch_task.started.connect(self.update_state)
        self.patch_task.ended.connect(self._ended)
        self.shown.currentIndexChanged.connect(lambda *_: self._class_chosen())
        self.threshold.changed.connect(lambda *_: self._measure_soon.throttle())
        self._watched: WeakSet[Shapes] = WeakSet()
        self._layer_list = LayerListWatcher(self._panel, self._layers_changed)
        self._layers_changed()

    # --- state ------------------------------------------------------------------------------------

    @property
    def settings(self) -> PatchSettings:
        """As they are set."""
        side, step = self.patch_size.value(), self.step.value()
        patch: Any = "auto" if side == _AUTO else side
        distance: Any = "auto" if step == _AUTO_STEP else step
        return PatchSettings(
            patch=patch,
            step=distance,
            min_tissue=self.min_tissue.value,
            threshold=self.threshold.value,
        )

    def image_chosen(self) -> None:
        """Look up whether the slide was classified before, and how far."""
        layer = self._image.layer
        if self.patch_task.running:
            return
        self._previous = None
        self.progress_bar.set_message("")
        if layer is not None:
            plane = current_plane(layer, self.viewer)
            if plane.is_slide:
                entry = self._cache.entry(layer, plane, _SUFFIX)
                self.cache_task.start(
                    lambda report: read_previous_search(entry), self._show_earlier
                )
        self.update_state()

    def _show_earlier(self, previous: PreviousSearch | None) -> None:
        self._previous = previous
        self.update_state()

    def update_state(self) -> None:
        """Button and notes as the image, the model and the run have it."""
        layer, (key, _) = self._image.layer, self._model()
        reason = ""
        if layer is None:
            reason = "Open an image first."
        elif not key:
            reason = "Choose a model first."
        elif self.patch_task.running:
            reason = "Patches are being classified."
        self.run_reason.update_button(reason)
        earlier, text, note = self._previous, "Classify patches", ""
        if earlier is not None and not self.patch_task.running:
            text = "Show heat map" if earlier.finished else "Resume"
            note = (
                f"{earlier.model or 'A model'} has classified {earlier.done:,} of "
                f"{count_of(earlier.total, 'tile', 'tiles')} before."
            )
        self.run_button.setText(text)
        self.run_button.setToolTip(
            "Classify the tissue patch by patch, first where you look. It can be stopped and "
            "resumed at any time, also after napari was closed."
        )
        self.note.setText(note)
        self.note.setVisible(bool(note))

    def _layers_changed(self) -> None:
        """Hear of changes of shapes, and of layers that were removed."""
        for layer in self.viewer.layers:
            if isinstance(layer, Shapes) and layer not in self._watched:
                self._watched.add(layer)
                self._panel.connect_event(layer.events.data, self._shapes_changed)
        if self.layers is not None and self.layers.source not in self.viewer.layers:
            self.layers = None
            self.result.hide()
        self._measure_soon.throttle()

    def _shapes_changed(self, event: Any = None) -> None:
        self._measure_soon.throttle()

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Classify the patches of the image that is chosen, or resume."""
        layer, (key, model) = self._image.layer, self._model()
        if layer is None or not key or self.patch_task.running:
            return
        plane = current_plane(layer, self.viewer)
        job = PatchJob(plane, key, model, self._device(), self.settings, pixel_size(layer))
        job = replace(job, owner=get_session(self.viewer))
        if plane.is_slide:
            entry = self._cache.entry(layer, plane, _SUFFIX)
            job = replace(job, path=entry.path, results=entry.results, source=entry.source)
        feed = self._feed = PatchFeed(self._viewport_centre(layer))
        self._job, self._source = job, layer
        self._timer.start()
        self.patch_task.start(lambda report: run_patches(job, feed, report), self._finished)

    def _viewport_centre(self, source: Image) -> tuple[float, float] | None:
        if self.viewer.dims.ndisplay != 2:
            return None
        y, x = canvas_corners(source, self.viewer).mean(axis=0)
        return float(y), float(x)

    def _poll(self) -> None:
        source, job = self._source, self._job
        if source is None or job is None:
            return
        if source not in self.viewer.layers:
            self.patch_task.cancel()
            return
        self._feed.focus = self._viewport_centre(source)
        tiles: list[Any] = []
        for item in self._feed.take():
            if hasattr(item, "rows"):
                tiles.append(item)
            else:
                self._show_map(source, item, job.plane.index)
        if tiles and self.layers is not None:
            self.layers.add(tiles)
            self._measure_soon.throttle()

    def _show_map(self, source: Image, patches: Any, index: PlaneIndex) -> None:
        before = self.shown.currentText()
        shown = before if before in patches.names else likely_positive(patches.names)
        self.layers = PatchLayers(self.viewer, source, patches, index, shown)
        with signals_blocked(self.shown):
            self.shown.clear()
            self.shown.addItems(patches.names)
            self.shown.setCurrentIndex(patches.names.index(shown))
        self.result.show()

    def _class_chosen(self) -> None:
        if self.layers is not None and self.shown.currentText():
            self.layers.show(self.shown.currentText())
            self.measure()

    def _finished(self, result: PatchResult) -> None:
        self._poll()
        patches = result.patches
        text = f"{count_of(int(patches.classified.sum()), 'patch', 'patches')} classified."
        if not patches.classified.any():
            text = "No patch has that much tissue; lower “Tissue at least”."
        if result.changed:
            words = " and ".join(result.changed)
            text = f"{words[:1].upper()}{words[1:]} changed since the last run. {text}"
        self.progress_bar.set_message(" ".join([text, *patches.report["warnings"]]))

    def _ended(self, outcome: TaskOutcome) -> None:
        job, source, feed = self._job, self._source, self._feed
        if job is None:
            return
        self._poll()
        self._timer.stop()
        self._job = self._source = self._previous = None
        if source is not self._image.layer:
            self.image_chosen()  # another image was chosen meanwhile
        elif outcome is not TaskOutcome.DONE and feed.total:
            if job.results is not None:
                model = self.layers.patches.report["model"] if self.layers is not None else ""
                self._previous = PreviousSearch(feed.done, feed.total, model)
            if outcome is TaskOutcome.CANCELLED:
                stopped = f"Stopped after {feed.done:,} of {feed.total:,} tiles"
                way_on = "." if self._previous is None else "; “Resume” continues."
                self.progress_bar.set_message(stopped + way_on)
        self.update_state()
        self.measure()

    # --- regions ----------------------------------------------------------------------------------

    def measure(self) -> None:
        """Measure the whole slide and the regions that are drawn, off the GUI thread."""
        if self.layers is None or self.layers.source not in self.viewer.layers:
            return
        source, patches = self.layers.source, self.layers.patches
        whole = ("Whole slide", Region.whole_image(patches.shape))
        regions = [whole, *drawn_regions(self.viewer, source)]
        copied = replace(patches, scores=patches.scores.copy())
        name, threshold = self.shown.currentText(), self.threshold.value

        def show(summaries: list[tuple[str, RegionSummary]]) -> None:
            self._show_table(name, summaries)

        self.measure_task.start(
            lambda report: copied.region_summaries(regions, threshold, report), show
        )

    def _show_table(self, name: str, summaries: list[tuple[str, RegionSummary]]) -> None:
        self.table.setRowCount(len(summaries))
        for row, (region, summary) in enumerate(summaries):
            mean, above = summary.means.get(name, math.nan), summary.fractions.get(name, math.nan)
            texts = [
                region,
                "–" if math.isnan(mean) else f"{mean:.3f}",
                "–" if math.isnan(above) else f"{above:.1%}",
                f"{summary.patches:,.1f}",
                f"{summary.classified:.0%}",
            ]
            for column, text in enumerate(texts):
                self.table.setItem(row, column, QTableWidgetItem(text))

    def copy_table(self) -> None:
        """Copy the table as text, columns between tabs."""
        rows = [list(_COLUMNS)]
        for row in range(self.table.rowCount()):
            items = (self.table.item(row, column) for column in range(len(_COLUMNS)))
            rows.append([item.text() if item is not None else "" for item in items])
        copy_text("\n".join("\t".join(row) for row in rows))


def _pixel_box(name: str, automatic: int) -> QSpinBox:
    """A box for a setting in pixels, which stands for "auto" at the value `automatic`."""
    box = QSpinBox()
    spec = PatchSettings.spec(name)
    box.setRange(automatic, int(spec.maximum or automatic))
    box.setSpecialValueText("auto")
    box.setSuffix(" px")
    box.setToolTip(spec.description)
    return box
