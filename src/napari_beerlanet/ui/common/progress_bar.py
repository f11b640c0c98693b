"""Progress bar of a task: fraction, ETA, Cancel, and the error if it failed."""

from __future__ import annotations

import time

from qtpy.QtWidgets import (
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.common.messages import error_message, format_duration
from napari_beerlanet.core.common.progress import Progress, eta_seconds
from napari_beerlanet.ui.common.controls import copy_text
from napari_beerlanet.ui.common.notifications import error_details, notify_error
from napari_beerlanet.ui.common.tasks import Task, TaskOutcome

_BAR_STEPS = 1000
_SHOW_AFTER_S = 0.4  # of running before a delayed bar appears


class TaskProgressBar(QWidget):
    """The progress of one task: bar, ETA and Cancel while it runs, then one line of text.

    An error is shown here, with details on demand, and as a notification of napari's. `quiet`
    leaves the bar out for runs so short that it would only flicker.
    """

    def __init__(self, task: Task, parent: QWidget | None = None, *, quiet: bool = False) -> None:
        super().__init__(parent)
        self.task, self.quiet = task, quiet
        self._started_at = 0.0
        self._stage, self._stage_started = "", (0.0, 0.0)
        self._build()
        task.started.connect(self._start)
        task.progressed.connect(self._progress)
        task.ended.connect(self._end)

    def _build(self) -> None:
        self.bar = QProgressBar()
        self.bar.setRange(0, _BAR_STEPS)
        self.bar.setToolTip("Progress, and the estimated time left.")
        self.cancel = QPushButton("Cancel")
        self.cancel.setToolTip("Cancel the run. Layers stay as they are.")
        self.cancel.clicked.connect(self._cancel)
        self.message_label = QLabel()
        self.message_label.setWordWrap(True)
        self.message_label.setTextInteractionFlags(
            self.message_label.textInteractionFlags().TextSelectableByMouse
        )
        self.details_button = QPushButton("Copy details")
        self.details_button.setToolTip("Copy the traceback of the error, for a bug report.")
        self.details_button.clicked.connect(self._copy_details)
        progress, message = QHBoxLayout(), QHBoxLayout()
        progress.addWidget(self.bar, 1)
        progress.addWidget(self.cancel)
        message.addWidget(self.message_label, 1)
        message.addWidget(self.details_button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addLayout(progress)
        layout.addLayout(message)
        for widget in (self.bar, self.cancel, self.message_label, self.details_button):
            widget.hide()

    def set_message(self, text: str) -> None:
        """Show one line of text; "" hides it."""
        self.message_label.setText(text)
        self.message_label.setVisible(bool(text))
        self.details_button.hide()

    @property
    def text(self) -> str:
        """The message."""
        return self.message_label.text()

    def _start(self) -> None:
        self._started_at = time.monotonic()
        self._stage, self._stage_started = "", (self._started_at, 0.0)
        self.bar.setValue(0)
        self.bar.setFormat("starting …")
        self.cancel.setEnabled(True)
        self._show_running(not self.quiet)
        if not self.quiet:
            self.set_message("")

    def _progress(self, progress: Progress) -> None:
        self.bar.setValue(round(_BAR_STEPS * progress.fraction))
        now, stage = time.monotonic(), progress.message.rstrip("0123456789, ").split(" ")[0]
        if stage != self._stage:  # each stage has a speed of its own
            self._stage, self._stage_started = stage, (now, progress.fraction)
        started, first = self._stage_started
        left = eta_seconds(now - started, (progress.fraction - first) / max(1 - first, 1e-9))
        eta = f" · {format_duration(left)} left" if left is not None else ""
        self.bar.setFormat(f"{progress.message or 'running'}{eta}")

    def _cancel(self) -> None:
        self.cancel.setEnabled(False)
        self.bar.setFormat("stopping …")
        self.task.cancel()

    def _end(self, outcome: TaskOutcome) -> None:
        if not self.task.running:
            self._show_running(False)
        if outcome is TaskOutcome.FAILED and self.task.error is not None:
            self.show_error(self.task.error)
        elif outcome is TaskOutcome.CANCELLED:
            self.set_message("Cancelled; nothing has changed.")

    def show_error(self, error: BaseException) -> None:
        """Show an error here and as a notification."""
        self.task.error = error
        self.set_message(notify_error(error_message(error)))
        self.details_button.show()

    def _copy_details(self) -> None:
        if self.task.error is not None:
            copy_text(error_details(self.task.error))

    def _show_running(self, running: bool) -> None:
        self.bar.setVisible(running)
        self.cancel.setVisible(running)


class DelayedProgressBar(TaskProgressBar):
    """Shows the bar only for longer runs, so that it does not flicker."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, quiet=True)

    def _progress(self, progress: Progress) -> None:
        super()._progress(progress)
        if self.bar.isHidden() and time.monotonic() - self._started_at > _SHOW_AFTER_S:
            self._show_running(True)
