"""A running batch: its background process, progress and ETA, failures and the output folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from qtpy.QtCore import Qt, QUrl, Signal
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import QListWidget, QListWidgetItem, QVBoxLayout, QWidget

from napari_beerlanet.core.batch.settings import STUDY_FILE, StudyConfig
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.jobs import LOCK_FILE
from napari_beerlanet.core.common.locking import local_owner
from napari_beerlanet.core.common.messages import count_of, format_duration
from napari_beerlanet.ui.common.background_process import (
    BackgroundProcess,
    RunEnd,
    RunWording,
    explain_exit,
    launch_detached,
    lower_priority,
)
from napari_beerlanet.ui.common.controls import button, heading, row, wrapping_label
from napari_beerlanet.ui.common.progress_bar import Activity, activity_bar
from napari_beerlanet.ui.common.recent import RecentPaths

EVENTS_FILE = "progress.jsonl"
_END_TEXTS = RunWording("batch", "run it again", "the last finished image")

RECENT_BATCHES = RecentPaths("batches", "batches.json")
"""Output folders."""


class BatchProcess(BackgroundProcess):
    """The study that the study.json of an output folder describes."""

    def _launch(self) -> psutil.Process:
        words = ["napari_beerlanet.cli.main", "batch", str(self.folder / STUDY_FILE), "--json"]
        child = launch_detached(words, self.folder, self.folder / EVENTS_FILE, self.environment)
        process = psutil.Process(child.pid)
        lower_priority(process)
        return process

    def _explain_exit(self, code: int | None = None, error: BaseException | None = None) -> str:
        return explain_exit(self.folder, code, error, _END_TEXTS)


def prepare_study_folder(config: StudyConfig) -> Path:
    """Write the study file; the folder that a `BatchProcess` can then start in."""
    config.write()
    (config.out / EVENTS_FILE).write_bytes(b"")
    RECENT_BATCHES.add(config.out)
    return config.out


def active_process(out: Path) -> int | None:
    """The process on this computer that writes results to a folder, None where there is none."""
    return local_owner(out / LOCK_FILE)


def find_active_batch() -> tuple[Path, int] | None:
    """The output folder and process of an active study, of those that were started last."""
    for out in RECENT_BATCHES.paths():
        number = active_process(out)
        if number is not None:
            return out, number
    return None


_MAX_VISIBLE_FAILURES = 5


class BatchProgress(QWidget):
    """Shows one `BatchProcess` at a time; `ended` passes its end on, `image_ended` an image's."""

    ended = Signal(object)
    image_ended = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.process: BatchProcess | None = None
        self._folder: Path | None = None
        self.bar = activity_bar("Progress of the batch, and the estimated time left.")
        self.activity = Activity(
            self, self._stop, "Stop", "Stop the run; finished images are saved."
        )
        self.activity.changed.connect(self._show_activity)
        self.stop = button("Stop", self.activity.stop_tip, self.activity.stop)
        self.message = wrapping_label()
        self.failed = heading("")
        self.failures = QListWidget()
        self.failures.setToolTip("Images that failed, and why; also listed in failures.csv.")
        self.failures.setWordWrap(True)
        self.open = button("Open output folder", "Show it in the file manager.", self.open_folder)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(row(self.bar, self.stop, stretch=0))
        for part in (self.message, self.failed, self.failures, row(self.open)):
            layout.addWidget(part)
        self.hide()

    @property
    def running(self) -> bool:
        """Whether a run is followed that has not ended."""
        return self.process is not None and self.process.running

    def follow(self, process: BatchProcess) -> None:
        """Show a run from now on. To be called before it starts or is attached to."""
        self.detach()
        self.process, self._folder = process, process.folder
        process.event_received.connect(self._on_event)
        process.ended.connect(self._on_end)
        self.failures.clear()
        self._show_failures()
        self.message.setText(
            "Continues in the background if the viewer is closed; reopen this panel to follow it."
        )
        self.activity.begin("starting …")
        self.show()

    def detach(self) -> None:
        """Follow this run no more; it continues in the background."""
        process, self.process = self.process, None
        if process is not None:
            process.release(self.activity)

    def open_folder(self) -> None:
        """Show the results in the system's file manager."""
        if self._folder is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self._folder)))

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            self._show_progress(event)
        elif event["event"] == "image":
            if event.get("status") == "failed":
                self._add_failure(str(event.get("path")), str(event.get("error")))
            self.image_ended.emit()
        elif event["event"] == "end":
            self.message.setText(summarize_end(event))

    def _show_progress(self, event: dict[str, Any]) -> None:
        text = self.activity.text
        if self.process is not None and not self.process.stopping:
            left = event.get("eta_seconds")
            eta = "" if left is None else f" · {format_duration(left)} left"
            text = f"{event['done']:,} of {event['total']:,} images{eta}"
            if event.get("message"):
                self.message.setText(str(event["message"]))
        self.activity.report(text, float(event.get("fraction", 0)))

    def _add_failure(self, path: str, error: str) -> None:
        text = error if path in error else f"{path}: {error}"
        item = QListWidgetItem(text.replace(path, Path(path).name))
        item.setToolTip(text)
        item.setFlags(item.flags() | Qt.ItemFlag.ItemIsSelectable)
        self.failures.addItem(item)
        self._show_failures()

    def _show_failures(self) -> None:
        count = self.failures.count()
        self.failed.setText(f"{count_of(count, 'image')} failed")
        rows = 2 * min(count, _MAX_VISIBLE_FAILURES)  # a sentence mostly takes two lines
        self.failures.setFixedHeight(rows * self.failures.fontMetrics().lineSpacing() + 8)
        for widget in (self.failed, self.failures):
            widget.setVisible(count > 0)

    def _stop(self) -> None:
        if self.process is not None and self.process.running:
            self.process.stop()
            self.activity.report("stopping …")

    def _on_end(self, end: RunEnd) -> None:
        if end.state is RunState.FINISHED:
            self.activity.report(self.activity.text, 1.0)
        self.activity.end()
        if end.state is RunState.STOPPED:
            self.message.setText("Stopped; finished images are saved. Run again to resume.")
        elif end.message:
            self.message.setText(end.message[:1].upper() + end.message[1:])
        self.ended.emit(end)

    def _show_activity(self) -> None:
        self.activity.show_on(self.bar, self.stop)
        for widget in (self.bar, self.stop):
            widget.setVisible(self.activity.shown_in_panel)


def summarize_end(event: dict[str, Any]) -> str:
    """The outcome of a study, by its last event; the table of counts says what limits these."""
    counts = [f"{event['done']:,} done"]
    counts += [f"{event['skipped']:,} already done"] if event.get("skipped") else []
    counts += [f"{event['failed']:,} failed"] if event.get("failed") else []
    more = [event["stopped"]] if event.get("stopped") else []
    said = event.get("limits") or []
    more += [note for note in event.get("notes") or [] if not any(text in note for text in said)]
    return " ".join([", ".join(counts) + ".", *(text[:1].upper() + text[1:] for text in more)])
