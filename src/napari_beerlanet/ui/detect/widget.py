"""The cell detection panel ("Find cells")."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from napari.layers import Image
from qtpy.QtWidgets import QPushButton, QVBoxLayout, QWidget
from superqt.utils import QSignalDebouncer

from napari_beerlanet.core.common.messages import format_duration
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    batch_button,
    form,
    row,
    separator,
)
from napari_beerlanet.ui.common.model_section import ModelPanel, ModelSection
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.recent import FoundSizes
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.detect.form import CellRuler, DetectForm
from napari_beerlanet.ui.detect.job import DetectJob, DetectResult, Refine, run_job
from napari_beerlanet.ui.detect.results import CountsPanel, DetectionResults
from napari_beerlanet.ui.detect.slide_search import SlideSearch
from napari_beerlanet.ui.viewer import fast_shapes
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.layers import ImagePicker, LayerListWatcher
from napari_beerlanet.ui.viewer.planes import (
    Plane,
    PreviousSearch,
    SlideCache,
    current_plane,
    layer_path,
    pixel_size,
    read_previous_search,
)
from napari_beerlanet.ui.viewer.viewport import search_windows

if TYPE_CHECKING:
    from napari import Viewer

_MIN_CELLS_FOR_SIZE = 3  # in an image whose cell size is remembered
_DEBOUNCE_MS = 15  # movements of the confidence slider within this become one


class DetectWidget(ModelPanel):
    """The panel "Find cells"."""

    title = "Find cells"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.session = get_session(self.viewer)
        self._source: Image | None = None  # what is being searched
        self.detect_task, self.cache_task = self.task(), self.task()
        self._build()
        self.slide = SlideSearch(self.viewer, self.session, self.detect_task, self)
        self.slide_cache = SlideCache()
        self._found_sizes: WeakKeyDictionary[Image, dict[str, float]] = WeakKeyDictionary()
        self.ruler = CellRuler(self.viewer, self)
        # That of the user's own runs; a preset has another one, for its image alone.
        self._own_confidence = self._run_confidence = self.form.confidence
        self._debounce = QSignalDebouncer(parent=self)
        self._debounce.setTimeout(_DEBOUNCE_MS)
        self._connect()
        fast_shapes.warm_up_shapes()
        self.model.load_initial()
        self._image_chosen()

    def _build(self) -> None:
        self.image = ImagePicker(self)
        self.form = DetectForm(self.image)
        self.model = ModelSection(
            self, self.session, self.form.device, openvino=lambda: self.form.openvino_mode
        )
        self.run_button = QPushButton("Find cells")
        self.run_button.setToolTip("Search with these settings (Ctrl+Shift+F).")
        self.run_reason = DisabledReason(self.run_button, keep_space=False)
        self.progress_bar = TaskProgressBar(self.detect_task)
        self.counts = CountsPanel()
        self.result = DetectionResults(self, self.session, self.counts)
        self.empty = EmptyState(self)
        model = form()
        model.addRow("Model", self.model.picker)
        self.body.addLayout(model)
        self.body.addWidget(self.model)
        self.body.addWidget(separator())
        self.body.addWidget(self.empty)
        self.detect_section = QWidget()
        section = QVBoxLayout(self.detect_section)
        section.setContentsMargins(0, 0, 0, 0)
        buttons = row(self.run_button, batch_button(self), stretch=0)
        for widget in (
            self.form,
            buttons,
            self.run_reason,
            self.form.slide_note,
            self.progress_bar,
            self.counts,
        ):
            section.addWidget(widget)
        self.body.addWidget(self.detect_section)
        self.body.addStretch(1)

    def _connect(self) -> None:
        self.image.chosen.connect(lambda *_: self._image_chosen())
        self.model.ready.connect(self._update_run_button)
        self.run_button.clicked.connect(lambda *_: self.run())
        self.detect_task.started.connect(self._update_run_button)
        self.detect_task.ended.connect(self._ended)
        self.form.confidence_changed.connect(self._confidence_moved)
        self._debounce.triggered.connect(self._update_confidence)
        self.form.labels_changed.connect(self.result.set_labels)
        self.form.draw_requested.connect(self._draw)
        self.form.openvino_changed.connect(self.model.update_card)
        self.ruler.measured.connect(self.form.set_measured_size)
        self.ruler.ended.connect(lambda: self.form.draw.setChecked(False))
        self.slide.boxes_added.connect(self.result.boxes_added)
        self.slide.message.connect(self._show_slide_message)
        self.add_shortcut("Ctrl+Shift+F", self.run)
        self._layer_list = LayerListWatcher(self, self._layers_changed)

    # --- state ------------------------------------------------------------------------------------

    def _confidence_moved(self, value: float) -> None:
        self._own_confidence = value
        if self._source is None or self._source is self.image.layer:
            self._run_confidence = value
        self._debounce.throttle()

    def _update_confidence(self) -> None:
        self.result.set_confidence(self.form.confidence)

    def _layers_changed(self) -> None:
        self.empty.update_text()
        self._image_chosen()

    def _image_chosen(self) -> None:
        another = self.image.layer is not self.result.source
        if another and not self.detect_task.running:
            self.progress_bar.set_message("")  # it was about the image before
            self.form.show_size_note("")
        has_image = self.image.layer is not None
        self.empty.setVisible(not has_image)
        self.detect_section.setVisible(has_image)
        self.result.choose(self.image.layer)
        if another:
            shown = self.result.detection_layer
            known = shown.confidence if shown is not None and shown.alive else None
            self.form.show_confidence(self._own_confidence if known is None else known)
        self._check_previous_search()
        self._update_run_button()

    def _check_previous_search(self, note: bool = True) -> None:
        """Look up whether the slide was searched before, and how far."""
        layer = self.image.layer
        plane = None if layer is None else current_plane(layer, self.viewer)
        slide = plane is not None and plane.is_slide
        self.form.show_slide_controls(slide)
        if self.detect_task.running:
            return
        self._show_previous_search(None)
        if slide and layer is not None and plane is not None:
            entry = self.slide_cache.entry(layer, plane)
            self.cache_task.start(
                lambda report: read_previous_search(entry),
                lambda previous: self._show_previous_search(previous, note),
            )

    def _show_previous_search(self, previous: PreviousSearch | None, note: bool = True) -> None:
        """Offer to resume an unfinished search."""
        unfinished = previous is not None and not previous.finished
        self.run_button.setText("Resume" if unfinished else "Find cells")
        self.form.show_slide_note(
            _previous_search_text(previous) if previous is not None and note else ""
        )

    def _update_run_button(self) -> None:
        reason = ""
        if self.image.layer is None:
            reason = "Open an image first."
        elif not self.model.picker.key:
            reason = "Choose a model first."
        elif self.detect_task.running:
            reason = "A search is running."
        self.run_reason.update_button(reason)

    def _ended(self, outcome: TaskOutcome) -> None:
        if outcome is not TaskOutcome.DONE:
            self.result.keep_partial(self.slide.detection_layer)
        self._check_previous_search(note=False)  # the progress bar has just told
        self._update_run_button()

    def _draw(self, on: bool) -> None:
        if on and self.image.layer is not None:
            self.form.show_size_note("Draw a box over a typical cell.")
            self.ruler.start(self.image.layer)
        else:
            self.form.show_size_note("")
            self.ruler.stop()

    # --- running ----------------------------------------------------------------------------------

    def run(
        self,
        iou: float | None = None,
        refine: Refine | None = None,
        confidence: float | None = None,
    ) -> None:
        """Detect with the present settings, perhaps with another `iou`; see `DetectJob`.

        Another `confidence` moves the slider, which decides what is shown and counted, for this
        image alone.
        """
        layer = self.image.layer
        if layer is None or self.detect_task.running:
            return
        if confidence is not None:
            self.form.show_confidence(confidence)
            self._update_confidence()
        try:
            job = replace(self._job(layer), refine=refine)
            if iou is not None:
                job = replace(job, settings=job.settings.replace(iou=iou))
        except Exception as error:
            self.progress_bar.show_error(error)
            return
        self._source, self._run_confidence = layer, self.form.confidence
        self.form.show_size_note("")
        self.form.show_slide_note("")
        if job.streamed:
            self.slide.start(layer, job, *self._display(), self._done, self._failed)
        else:
            self.detect_task.start(lambda report: run_job(job, report), self._done, self._failed)

    def _display(self) -> tuple[float, bool]:
        """Confidence threshold and whether boxes are labelled."""
        return self._run_confidence, bool(self.form.labels.value)

    def _job(self, layer: Image) -> DetectJob:
        plane = current_plane(layer, self.viewer)
        entry = self.slide_cache.entry(layer, plane)
        return DetectJob(
            plane,
            search_windows(self.form.search_area, layer, plane, self.viewer),
            self.model.picker.key,
            self.model.loaded,
            self.form.chosen_device,
            self.form.settings(pixel_size(layer)),
            bool(self.form.stains.value),
            entry.path,
            entry.results,
            entry.source,
            self.form.search_area,
            self.result.unedited_detections(layer, plane.index),
            self._found_size(layer, plane),
            owner=self.session,
        )

    def _found_size(self, layer: Image, plane: Plane) -> float | None:
        """The cell size that was found in this image before, or in another one of its folder."""
        key, path = self.model.picker.key, layer_path(layer)
        size = self._found_sizes.get(layer, {}).get(key)
        if size is None and path is not None:
            size = FoundSizes().find(key, path, _magnification(layer, plane))
        return size

    def _save_size(self, layer: Image, result: DetectResult) -> None:
        """Remember the cell size that was found, to try it first the next time."""
        job, size = result.job, result.detections.report.get("object_size")
        asked_for = job.settings.object_size != "auto"
        if size is None or asked_for or len(result.detections) < _MIN_CELLS_FOR_SIZE:
            return
        self._found_sizes.setdefault(layer, {})[job.model_key] = size
        path = layer_path(layer)
        if path is not None:
            FoundSizes().add(job.model_key, path, _magnification(layer, job.plane), size)

    def _done(self, result: DetectResult) -> None:
        source, self._source = self._source, None
        self.model.share_model(result.model, result.job.model_key)
        if source is None or source not in self.viewer.layers:
            self.progress_bar.set_message("The image was removed meanwhile; nothing was added.")
            return
        if result.job.streamed:
            self.slide.finalise(result)
            self.result.finalise(source, result, self.slide.detection_layer)
        else:
            self.result.show(source, result, *self._display())
        chosen = source is self.image.layer
        if chosen and not result.job.streamed:
            self.show_soon(self.counts.table)
        index = result.job.plane.index  # the user may look at another plane by now
        about = f"Plane {', '.join(map(str, index))}: " if index else ""
        about = about if chosen else f"“{source.name}”: {about}"
        self.progress_bar.set_message(f"{about}{run_summary(result)}")
        self._save_size(source, result)
        size = result.detections.report.get("object_size")
        if size is not None and chosen:
            reason = result.detections.report["chosen"]
            self.form.show_size_note(f"Assumed cell size: {size:.0f} px ({reason}).")

    def _show_slide_message(self, text: str) -> None:
        """While a search runs, the progress bar has no room for a line."""
        if self.detect_task.running:
            self.form.show_slide_note(text)
        else:
            self.progress_bar.set_message(text)

    def _failed(self, error: BaseException) -> None:
        self._source = None
        self.model.picker.refresh()  # a file may have been deleted

    # --- “Run on folder” --------------------------------------------------------------------------

    @property
    def study_layer(self) -> Image | None:
        """The image whose folder is suggested for “Run on folder”."""
        return self.image.layer

    def study_settings(self) -> dict[str, Any]:
        """The present settings by the names of `StudySettings`."""
        return self.form.study_settings(self.model.picker.key)

    def on_closed(self) -> None:
        """Layers stay as they are."""
        self._debounce.cancel()
        self.ruler.stop()
        self.slide.close()
        self.result.close()
        self.model.disconnect_session()


def _magnification(layer: Image, plane: Plane) -> str:
    """What images of one magnification share: the pixel size or, where it is unknown, the shape."""
    size = pixel_size(layer)
    if size is None:
        return f"{plane.shape[0]} × {plane.shape[1]} pixels"
    return f"{size[0]:.5g} × {size[1]:.5g} µm per pixel"


def _previous_search_text(search: PreviousSearch) -> str:
    """One line on an earlier search."""
    model = f" with “{search.model}”" if search.model else ""
    if search.finished:
        return f"Searched before{model}: with the same settings the boxes are shown at once."
    return (
        f"{search.done:,} of {search.total:,} tiles were searched before{model}. With the same "
        "settings the search resumes there."
    )


def run_summary(result: DetectResult) -> str:
    """One line on a run: duration, device and notes."""
    report = result.detections.report
    seconds = f"{result.seconds:.1f} s" if result.seconds < 10 else format_duration(result.seconds)
    line = f"Done in {seconds} on {report['device']}."
    return " ".join([line, *report.get("notes", [])])
