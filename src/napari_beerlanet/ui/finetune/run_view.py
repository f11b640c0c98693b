"""The active training run: its process, progress, ETA, curves and previews, with Pause and Stop."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
from qtpy.QtCore import Qt, QTimer, Signal
from qtpy.QtGui import QIcon, QPixmap
from qtpy.QtWidgets import QDialog, QHBoxLayout, QLabel, QToolButton, QVBoxLayout, QWidget

from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.messages import format_duration
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.training.runs import Run, inspect_run
from napari_beerlanet.ui.common.background_process import (
    BackgroundProcess,
    RunEnd,
    explain_exit,
    launch_training,
    lower_priority,
)
from napari_beerlanet.ui.common.controls import (
    button,
    heading,
    hint,
    not_none,
    rgb_pixmap,
    row,
    wrapping_label,
)
from napari_beerlanet.ui.common.notifications import show_warning
from napari_beerlanet.ui.common.progress_bar import Activity, activity_bar
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.finetune.curves import TrainingCurves

_PAUSE_TOOLTIP = "Suspend the training process where it is."
_CURVES_DELAY_MS = 300
_STOP_TOOLTIP = "Stop the training; the best model is kept."


class RunView(QWidget):
    """Shows one `TrainingProcess` at a time; `ended` carries its `RunEnd`, `resume` the `Run`.

    `details`, the curves and the preview, is a widget of its own, which the panel places.
    """

    ended = Signal(object)
    resume = Signal(object)

    def __init__(self, preview_task: Task) -> None:
        super().__init__()
        self.process: TrainingProcess | None = None
        self.shown_above: Sequence[str] = ()  # what is said of the data already
        self.title = heading("Training")
        self.bar = activity_bar("Progress of the training, and the estimated time left.")
        self.activity = Activity(self, self._stop, "Stop", _STOP_TOOLTIP)
        self.activity.changed.connect(self._show_activity)
        self.pause_button = button("Pause", _PAUSE_TOOLTIP, self._pause_or_resume)
        self.stop_button = button("Stop", _STOP_TOOLTIP, self.activity.stop)
        self.resume_button = button(
            "Resume", "Resume after the last completed epoch.", self._resume_stopped
        )
        self.end_line = wrapping_label()
        self.resources_line, self.warnings_line = wrapping_label(), hint()
        self.preview = PredictionPreview(preview_task)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        self.buttons = row(self.pause_button, self.stop_button, self.resume_button)
        lines = (self.end_line, self.resources_line, self.warnings_line)
        for part in (self.title, self.bar, self.buttons, *lines):
            layout.addWidget(part)
        self.details = QWidget()
        below = QVBoxLayout(self.details)
        below.setContentsMargins(0, 0, 0, 0)
        below.addWidget(self.preview)
        self._curves_timer = QTimer(self)
        self._curves_timer.setSingleShot(True)
        self._curves_timer.timeout.connect(self._make_curves)
        self._curves_timer.start(_CURVES_DELAY_MS)
        self.set_visible(False)

    @cached_property
    def curves(self) -> TrainingCurves:
        """Made a moment after the panel: plots take as long as the rest of it."""
        curves = TrainingCurves()
        below = self.details.layout()
        assert isinstance(below, QVBoxLayout)
        below.insertWidget(0, curves)
        return curves

    def _make_curves(self) -> None:
        assert self.curves is not None

    @property
    def running(self) -> bool:
        """Whether the followed run is still active."""
        return self.process is not None and self.process.running

    def follow(self, process: TrainingProcess) -> None:
        """Show a run from now on. Call it before the process is started or attached to."""
        self.detach()
        self.process = process
        run = inspect_run(process.folder)
        self._data = str(run.settings.get("data") or "")
        process.event_received.connect(self._on_event)
        process.paused_changed.connect(self._on_paused_changed)
        process.ended.connect(self._on_ended)
        self.title.setText(f"Training · {process.folder.name}")
        self.activity.begin("Loading …")
        self.resources_line.setText("")
        self._set_end_line("")
        self._set_warnings([])
        self.curves.clear()
        self.curves.set_task(run.task)
        self.curves.read_epochs(process.folder)
        self.preview.clear()
        self._show_buttons(True)
        self.set_visible(True)

    def set_visible(self, visible: bool) -> None:
        """Show or hide this section and its details."""
        self.setVisible(visible)
        self.details.setVisible(visible)

    def detach(self) -> None:
        """Stop following this run; its process continues."""
        process, self.process = self.process, None
        if process is not None:
            process.release(self.activity)

    def _show_activity(self) -> None:
        """When the run has ended, the bar says how."""
        self.activity.show_on(self.bar)
        self.bar.setVisible(self.activity.shown_in_panel or not self.activity.running)

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "batch":
            self._on_batch(event)
        elif event["event"] == "epoch" and self.process is not None:
            self.curves.read_epochs(self.process.folder)
            self.preview.on_epoch(event, self.process.folder, self._data)
        elif event["event"] == "compare":
            self.activity.report("Comparing with the model before …", 1.0)
        elif event["event"] == "warning":
            earlier = self.warnings_line.text().split("\n")
            self._set_warnings([*earlier, str(event.get("message") or "")])

    def _on_batch(self, event: dict[str, Any]) -> None:
        self.curves.add_batch(event)
        text = self.activity.text
        if self.process is not None and not self.process.stopping and not self.process.paused:
            eta = event.get("eta_seconds")
            left = f" · {format_duration(eta)} left" if eta is not None else ""
            text = f"Epoch {event['epoch']} of {event['epochs']}{left}"
        self.activity.report(text, event["step"] / event["steps"])
        memory = float(event.get("memory_mb") or 0)
        size = f"{memory / 1000:.1f} GB" if memory >= 1000 else f"{memory:.0f} MB"
        self.resources_line.setText(f"Device: {event.get('device')} · memory in use: {size}")

    def _set_warnings(self, warnings: list[str]) -> None:
        """Show the last three different ones that are not shown above."""
        new = [line for line in warnings if line and line not in self.shown_above]
        lines = list(dict.fromkeys(new))[-3:]
        self.warnings_line.setText("\n".join(lines))
        self.warnings_line.setVisible(bool(lines))

    def _pause_or_resume(self) -> None:
        if self.process is not None and self.process.running:
            if self.process.paused:
                self.process.resume()
                return
            self.process.pause()
            if not self.process.paused:
                show_warning("The training process could not be paused.")

    def _on_paused_changed(self, paused: bool) -> None:
        self.pause_button.setText("Resume" if paused else "Pause")
        self.pause_button.setToolTip("Resume the training." if paused else _PAUSE_TOOLTIP)
        if paused:
            self.activity.report("Paused")

    def _stop(self) -> None:
        if self.process is not None and self.process.running:
            self.process.stop()
            self.pause_button.setEnabled(False)
            self.stop_button.setEnabled(False)
            self.activity.report("Stopping after this step …")

    def _on_ended(self, end: RunEnd) -> None:
        run = None if self.process is None else inspect_run(self.process.folder)
        known = run is not None and run.state is end.state
        self.activity.report((run.status if run and known else str(end.state)).capitalize())
        self.activity.end()
        self._show_buttons(False, can_resume=run is not None and run.can_resume)
        self._set_end_line(end.message if end.state is RunState.FINISHED else "")
        if self.process is not None:
            self.curves.read_epochs(self.process.folder)
        self.ended.emit(end)

    def _set_end_line(self, text: str) -> None:
        self.end_line.setText(text)
        self.end_line.setVisible(bool(text))

    def _show_buttons(self, running: bool, can_resume: bool = False) -> None:
        """Pause and Stop while it runs, then Resume in their place if that is possible."""
        for control in (self.pause_button, self.stop_button):
            control.setEnabled(running)
            control.setVisible(running)
        self.resume_button.setVisible(can_resume)
        self.buttons.setVisible(running or can_resume)
        self._on_paused_changed(self.process is not None and self.process.paused)

    def _resume_stopped(self) -> None:
        if self.process is not None and not self.process.running:
            self.resume.emit(inspect_run(self.process.folder))

    @property
    def folder(self) -> Path | None:
        """The folder of the followed run."""
        return None if self.process is None else self.process.folder


class TrainingProcess(BackgroundProcess):
    """The process of a training run, whose folder has a run.json."""

    def attach(self, run: Run | None = None) -> bool:
        """Follow a run that is already active; False where it is not."""
        run = run or inspect_run(self.folder)
        if not run.is_active or run.process is None:
            return False
        return self.attach_to_pid(run.process, run.state is RunState.PAUSED)

    def _launch(self) -> psutil.Process:
        process = psutil.Process(launch_training(self.folder, self.environment).pid)
        lower_priority(process)
        return process

    def _recorded_end(self) -> RunEnd | None:
        run = inspect_run(self.folder)
        ends = (RunState.FINISHED, RunState.STOPPED, RunState.FAILED, RunState.DIVERGED)
        ended = run.state in ends
        return RunEnd(run.state, run.message) if ended else None

    def _explain_exit(self, code: int | None = None, error: BaseException | None = None) -> str:
        return explain_exit(self.folder, code, error)


# --- predictions on validation images -------------------------------------------------------------

CROP_SHEET = "Validation crops"
"""The name of a picture of many crops."""

_IMAGE_COUNT, _CROP_COUNT = 3, 12
_MAX_PICTURE_SIDE = 1024  # pixels of a picture
_TOTAL_WIDTH, _MAX_PICTURE_WIDTH = 320, 160  # pixels on the screen, for all pictures and for one
_PREVIEWS_PER_RUN = 6
_SCREEN_FRACTION = 0.8  # that an enlarged picture may take
_FIT = Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation

Picture = tuple[str, npt.NDArray[np.uint8]]
"""A name and pixels (h, w, 3)."""


class PictureButton(QToolButton):
    """A thumbnail that shows its picture in a window of its own when it is clicked."""

    def __init__(self) -> None:
        super().__init__()
        self.setAutoRaise(True)
        self.setToolTip("Click to enlarge.")
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.dialog: QDialog | None = None
        self._title, self._pixmap = "", QPixmap()
        self.clicked.connect(self.enlarge)

    def show_picture(self, title: str, pixels: npt.NDArray[np.uint8], width: int) -> None:
        """Show a picture (h, w, 3) so wide."""
        self._title, self._pixmap = title, rgb_pixmap(pixels)
        thumbnail = self._pixmap.scaled(width, width, *_FIT)
        self.setIcon(QIcon(thumbnail))
        self.setIconSize(thumbnail.size())
        self.setToolTip(f"{title}. Click to enlarge.")

    def enlarge(self) -> None:
        """Show the picture as large as it is, or as the screen allows."""
        screen = not_none(self.screen()).availableSize() * _SCREEN_FRACTION
        large = self._pixmap.scaled(screen, *_FIT)
        self.dialog = QDialog(self.window())
        self.dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.dialog.destroyed.connect(self._dialog_closed)
        self.dialog.setWindowTitle(self._title)
        picture = QLabel()
        picture.setPixmap(large)
        layout = QVBoxLayout(self.dialog)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(picture)
        self.dialog.show()

    def _dialog_closed(self) -> None:
        self.dialog = None


class PredictionPreview(QWidget):
    """Thumbnails of validation images with predicted boxes, made off the GUI thread.

    Of a classifier: one sheet of validation crops with their predicted types.
    """

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.caption = wrapping_label()
        self.pictures = [PictureButton() for _ in range(_IMAGE_COUNT)]
        row = QHBoxLayout()
        row.setSpacing(4)
        for picture in self.pictures:
            row.addWidget(picture, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.caption)
        layout.addLayout(row)
        self.clear()

    def clear(self) -> None:
        """Show nothing."""
        self._epoch: int | None = None  # of the last prediction
        self.task.cancel()
        self.hide()

    def on_epoch(self, event: dict[str, Any], folder: Path, data: str) -> None:
        """Predict again after some of the epochs, unless a prediction is still running."""
        every = max(int(event.get("epochs") or 1) // _PREVIEWS_PER_RUN, 1)
        due = self._epoch is None or event["epoch"] >= self._epoch + every
        if due and not self.task.running:
            self._epoch = int(event["epoch"])
            self.predict(folder, data)

    def predict(self, folder: Path, data: str) -> None:
        """Predict now, with the last checkpoint of a run on the validation images of `data`."""
        self.task.start(
            lambda report: predict_validation_images(folder, data, report),
            lambda predicted: self.show_pictures(*predicted),
        )

    def show_pictures(self, epoch: int, pictures: list[Picture]) -> None:
        """Show what `predict_validation_images` returned."""
        what = "crops" if pictures and pictures[0][0] == CROP_SHEET else "images"
        self.caption.setText(
            f"Predictions on validation {what} after epoch {epoch} (click to enlarge):"
        )
        padded = [*pictures, *[None] * _IMAGE_COUNT]
        for thumbnail, picture in zip(self.pictures, padded, strict=False):
            thumbnail.setVisible(picture is not None)
            if picture is not None:
                name, pixels = picture
                width = min(_TOTAL_WIDTH // len(pictures), _MAX_PICTURE_WIDTH)
                width = _TOTAL_WIDTH if name == CROP_SHEET else width
                thumbnail.show_picture(f"{name}, after epoch {epoch}", pixels, width)
        self.setVisible(bool(pictures))


def predict_validation_images(
    folder: Path, data: str, report: Report | None = None
) -> tuple[int, list[Picture]]:
    """The last epoch, and the first validation images with the predicted boxes drawn in."""
    if inspect_run(folder).task == "classify":
        return predict_validation_crops(folder, report)
    from napari_beerlanet.core.checkpoints.checkpoint import load_detector
    from napari_beerlanet.core.figures.overlay import draw_overlay
    from napari_beerlanet.core.formats.dataset import read_dataset
    from napari_beerlanet.core.images.files import read_image

    report_progress(report, 0, _IMAGE_COUNT)
    model = load_detector(folder / "last.safetensors", device="cpu")
    pictures = []
    for number, item in enumerate(read_dataset(data).splits.get("val", [])[:_IMAGE_COUNT]):
        report_progress(report, number, _IMAGE_COUNT)
        pixels = read_image(item.image).pixels
        detections = model.detect(pixels, densities=False)
        colours = model.info.get("colours")
        overlay = draw_overlay(pixels, detections, colours, max_side=_MAX_PICTURE_SIDE)
        pictures.append((item.image.name, overlay))
    return int(model.info["training"]["epochs"]), pictures


def predict_validation_crops(
    folder: Path, report: Report | None = None
) -> tuple[int, list[Picture]]:
    """The last epoch, and a sheet of validation crops, each with its type and the predicted one."""
    from napari_beerlanet.core.boxes.classes import OUTCOME_COLOURS
    from napari_beerlanet.core.checkpoints.checkpoint import load_classifier
    from napari_beerlanet.core.evaluation.classification import classify_items
    from napari_beerlanet.core.figures.drawing import draw_crop_sheet
    from napari_beerlanet.core.training.train_classifier import (
        ClassifierTrainSettings,
        training_crops,
    )
    from napari_beerlanet.core.training.trainer.classification import TrainingCrops

    model = load_classifier(folder / "last.safetensors", device="cpu")
    dataset = training_crops(ClassifierTrainSettings(**inspect_run(folder).settings))
    items = dataset.splits["val"]
    chosen = np.unique(np.linspace(0, len(items) - 1, min(len(items), _CROP_COUNT)).astype(int))
    items = [items[k] for k in chosen]
    result = classify_items(model, items, report)
    crops = TrainingCrops(items, model.network.settings)
    captions, colours = [], []
    for k, item in enumerate(items):
        annotated, predicted = dataset.names[item.label], result.names[result.labels[k]]
        captions.append((predicted, "" if predicted == annotated else f"is {annotated}"))
        colours.append(OUTCOME_COLOURS["true" if predicted == annotated else "false"])
    sheet = draw_crop_sheet(crops.plain(range(len(items))), captions, colours)
    return int(model.info["training"]["epochs"]), [(CROP_SHEET, sheet)]
