"""What runs: fraction, ETA, Cancel, and the error if it failed; in a panel or in the workspace."""

from __future__ import annotations

import time
from collections.abc import Callable

from qtpy.QtCore import QObject, Qt, Signal
from qtpy.QtWidgets import (
    QHBoxLayout,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.common.messages import error_message, format_duration
from napari_beerlanet.core.common.progress import DONE, Progress, eta_seconds
from napari_beerlanet.ui.common.controls import copy_text, wrapping_label
from napari_beerlanet.ui.common.notifications import error_details, notify_error
from napari_beerlanet.ui.common.tasks import Task, TaskOutcome

BAR_STEPS = 1000
_TEXT_MARGIN_PX = 12
_SHOW_AFTER_S = 0.4  # of running before a delayed bar appears


class Activity(QObject):
    """Something of a panel that runs and is worth a progress bar; `changed` whenever that does.

    The panel shows it by a bar of its own, unless `in_footer`: then the footer of the workspace
    does, which the user sees from every tab. `stop_text` and `stop_tip` are those of its button;
    without a text it has none.
    """

    changed = Signal()

    def __init__(
        self, parent: QObject, stop: Callable[[], None], stop_text: str, stop_tip: str
    ) -> None:
        super().__init__(parent)
        self.stop_text, self.stop_tip, self._stop = stop_text, stop_tip, stop
        self.running = self.in_footer = False
        self.can_stop = True
        self.fraction, self.text = 0.0, ""

    def begin(self, text: str) -> None:
        """It runs from now on."""
        self.running, self.can_stop, self.fraction, self.text = True, True, 0.0, text
        self.changed.emit()

    def report(self, text: str, fraction: float | None = None) -> None:
        """Show this of it; the fraction stays where none is given."""
        self.text = text
        if fraction is not None:
            self.fraction = fraction
        self.changed.emit()

    def end(self) -> None:
        """It does not run any more."""
        self.running = False
        self.changed.emit()

    def stop(self) -> None:
        """Request its end, once."""
        if self.running and self.can_stop:
            self.can_stop = False
            self._stop()
            self.changed.emit()

    def show_in_footer(self, in_footer: bool) -> None:
        """Let the footer of the workspace show it, or its own panel again."""
        self.in_footer = in_footer
        self.changed.emit()

    @property
    def shown_in_panel(self) -> bool:
        """Whether the panel's own bar is to be visible."""
        return self.running and not self.in_footer

    def show_on(self, bar: QProgressBar, button: QPushButton | None = None) -> None:
        """Fill a bar, and a button that stops it."""
        bar.setValue(round(BAR_STEPS * self.fraction))
        bar.setFormat(self.text)
        if button is not None:
            button.setText(self.stop_text)
            button.setToolTip(self.stop_tip)
            button.setEnabled(self.can_stop)
            button.setVisible(bool(self.stop_text))


class ElidingProgressBar(QProgressBar):
    """A bar that shortens a text that is too wide for it in the middle, as of a long file name."""

    def text(self) -> str:
        """What is drawn."""
        width = self.width() - _TEXT_MARGIN_PX
        return self.fontMetrics().elidedText(super().text(), Qt.TextElideMode.ElideMiddle, width)


def activity_bar(tooltip: str = "Progress, and the estimated time left.") -> QProgressBar:
    """A bar for `Activity.show_on`."""
    bar = ElidingProgressBar()
    bar.setRange(0, BAR_STEPS)
    bar.setToolTip(tooltip)
    return bar


class TaskProgressBar(QWidget):
    """The progress of one task: bar, ETA and Cancel while it runs, then one line of text.

    An error is shown here, with details on demand, and as a notification of napari's. `quiet`
    leaves the bar out for runs so short that it would only flicker; `can_cancel` the button.
    """

    def __init__(
        self,
        task: Task,
        parent: QWidget | None = None,
        *,
        quiet: bool = False,
        can_cancel: bool = True,
    ) -> None:
        super().__init__(parent)
        self.task, self.quiet = task, quiet
        self._started_at = 0.0
        self._stage, self._stage_started = "", (0.0, 0.0)
        text, tip = (
            ("Cancel", "Cancel the run. Layers stay as they are.")
            if can_cancel
            else ("", "This cannot be cancelled.")
        )
        self.activity = Activity(self, self._stop, text, tip)
        self._build()
        self.activity.changed.connect(self._show_activity)
        task.started.connect(self._start)
        task.progressed.connect(self._progress)
        task.ended.connect(self._end)

    def _build(self) -> None:
        self.bar, self.cancel = activity_bar(), QPushButton()
        self.cancel.clicked.connect(self.activity.stop)
        self.activity.show_on(self.bar, self.cancel)
        self.message_label = wrapping_label()
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
        if not self.quiet:
            self.activity.begin("starting …")
            self.set_message("")

    def _progress(self, progress: Progress) -> None:
        now, stage = time.monotonic(), progress.message.rstrip("0123456789, ").split(" ")[0]
        if stage != self._stage:  # each stage has a speed of its own
            self._stage, self._stage_started = stage, (now, progress.fraction)
        started, first = self._stage_started
        left = eta_seconds(now - started, (progress.fraction - first) / max(1 - first, 1e-9))
        eta = f" · {format_duration(left)} left" if left is not None else ""
        # The work is done, the task is not: what comes of it is still to be shown.
        message = "finishing" if progress.message == DONE else progress.message or "running"
        self.activity.report(f"{message}{eta}", progress.fraction)

    def _stop(self) -> None:
        self.activity.report("stopping …")
        self.task.cancel()

    def _show_activity(self) -> None:
        self.activity.show_on(self.bar, self.cancel)
        if not self.activity.shown_in_panel:
            self.cancel.hide()
        self.bar.setVisible(self.activity.shown_in_panel)

    def _end(self, outcome: TaskOutcome) -> None:
        if not self.task.running:
            self.activity.end()
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


class DelayedProgressBar(TaskProgressBar):
    """Shows the bar only for longer runs, so that it does not flicker."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, quiet=True)

    def _progress(self, progress: Progress) -> None:
        if not self.activity.running and time.monotonic() - self._started_at > _SHOW_AFTER_S:
            self.activity.begin("")
        super()._progress(progress)
