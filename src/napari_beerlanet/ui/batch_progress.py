"""A batch that runs: how far it is, Stop, what failed, and the way to its results."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtCore import Qt, QUrl, Signal
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import QListWidget, QListWidgetItem, QProgressBar, QVBoxLayout, QWidget

from napari_beerlanet.core.runs import State
from napari_beerlanet.core.wording import duration
from napari_beerlanet.ui.batch_process import BatchProcess
from napari_beerlanet.ui.controls import button, heading, row
from napari_beerlanet.ui.finetune_form import wrapped
from napari_beerlanet.ui.followed_process import End

_STEPS = 1000
_ROWS = 5  # of failures that are in view


class BatchProgress(QWidget):
    """Shows one `BatchProcess` at a time; `ended` passes its end on."""

    ended = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.process: BatchProcess | None = None
        self._folder: Path | None = None
        self.bar = QProgressBar()
        self.bar.setRange(0, _STEPS)
        self.bar.setToolTip("How far the batch is, and about how long it still takes.")
        self.stop = button("Stop", "End the run; what is finished is kept.", self._stop)
        self.line = wrapped()
        self.failed = heading("")
        self.failures = QListWidget()
        self.failures.setToolTip("Images that failed, and why. They are also in failures.csv.")
        self.failures.setWordWrap(True)
        self.open = button("Open results folder", "Show it in the file manager.", self.open_folder)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(row(self.bar, self.stop, stretch=0))
        for part in (self.line, self.failed, self.failures, row(self.open)):
            layout.addWidget(part)
        self.hide()

    @property
    def running(self) -> bool:
        """Whether a run is followed that has not ended."""
        return self.process is not None and self.process.running

    @property
    def failed_count(self) -> int:
        """Images that failed so far."""
        return self.failures.count()

    def follow(self, process: BatchProcess) -> None:
        """Show a run from now on. To be called before it starts or is attached to."""
        self.leave()
        self.process, self._folder = process, process.folder
        process.told.connect(self._told)
        process.ended.connect(self._end)
        self.bar.setValue(0)
        self.bar.setFormat("starting …")
        self.failures.clear()
        self._show_failures()
        self.line.setText("It goes on if the viewer is closed, and is found here again.")
        self._show_running(True)
        self.show()

    def leave(self) -> None:
        """Follow this run no more; it goes on without us."""
        if self.process is not None:
            self.process.leave()
            self.process.deleteLater()
            self.process = None

    def open_folder(self) -> None:
        """Show the results in the system's file manager."""
        if self._folder is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self._folder)))

    def _told(self, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            self._progress(event)
        elif event["event"] == "image" and event.get("status") == "failed":
            self._add_failure(str(event.get("path")), str(event.get("error")))
        elif event["event"] == "end":
            self.line.setText(summary(event))

    def _progress(self, event: dict[str, Any]) -> None:
        self.bar.setValue(round(_STEPS * float(event.get("fraction", 0))))
        if self.process is not None and not self.process.stopping:
            left = event.get("eta_seconds")
            eta = "" if left is None else f" · {duration(left)} left"
            self.bar.setFormat(f"{event['done']:,} of {event['total']:,} images{eta}")
            if event.get("message"):
                self.line.setText(str(event["message"]))

    def _add_failure(self, path: str, error: str) -> None:
        text = error if path in error else f"{path}: {error}"
        item = QListWidgetItem(text.replace(path, Path(path).name))
        item.setToolTip(text)
        item.setFlags(item.flags() | Qt.ItemFlag.ItemIsSelectable)
        self.failures.addItem(item)
        self._show_failures()

    def _show_failures(self) -> None:
        count = self.failures.count()
        self.failed.setText(f"{count:,} image{'s' * (count != 1)} failed")
        rows = 2 * min(count, _ROWS)  # a sentence mostly takes two lines
        self.failures.setFixedHeight(rows * self.failures.fontMetrics().lineSpacing() + 8)
        for widget in (self.failed, self.failures):
            widget.setVisible(count > 0)

    def _stop(self) -> None:
        if self.process is not None and self.process.running:
            self.process.stop()
            self.stop.setEnabled(False)
            self.bar.setFormat("stopping …")

    def _end(self, end: End) -> None:
        self._show_running(False)
        if end.state is State.FINISHED:
            self.bar.setValue(_STEPS)
        if end.state is State.STOPPED:
            self.line.setText("Stopped; what was finished is kept. Run it again to go on.")
        elif end.message:
            self.line.setText(end.message[:1].upper() + end.message[1:])
        self.ended.emit(end)

    def _show_running(self, running: bool) -> None:
        self.stop.setEnabled(running)
        self.stop.setVisible(running)
        self.bar.setVisible(running)


def summary(event: dict[str, Any]) -> str:
    """What became of a study, by its last event."""
    told = [f"{event['done']:,} done"]
    told += [f"{event['skipped']:,} done before"] if event.get("skipped") else []
    told += [f"{event['failed']:,} failed"] if event.get("failed") else []
    more = [event["stopped"]] if event.get("stopped") else []
    more += event.get("notes") or []
    return " ".join([", ".join(told) + ".", *(text[:1].upper() + text[1:] for text in more)])
