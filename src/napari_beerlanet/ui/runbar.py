"""How far a task is and how long it still takes, Cancel, and what went wrong."""

from __future__ import annotations

import time

from qtpy.QtWidgets import (
    QApplication,
    QHBoxLayout,
    QLabel,
    QProgressBar,
    QPushButton,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.progress import Progress
from napari_beerlanet.core.wording import duration
from napari_beerlanet.ui.notices import complain, details, sentence
from napari_beerlanet.ui.tasks import Outcome, Task

_STEPS = 1000
_ETA_FROM = 1.0  # seconds of running; earlier guesses jump


class RunBar(QWidget):
    """The state of one task. While it runs: bar, remaining time and Cancel; after that, one line.

    A failure is shown here, with its details on demand, and as a notification of napari's.
    `quiet` leaves the bar out for runs so short that it would only flicker.
    """

    def __init__(self, task: Task, parent: QWidget | None = None, *, quiet: bool = False) -> None:
        super().__init__(parent)
        self.task, self.quiet = task, quiet
        self._began = 0.0
        self._doing, self._since = "", (0.0, 0.0)
        self._build()
        task.started.connect(self._start)
        task.progressed.connect(self._progress)
        task.ended.connect(self._end)

    def _build(self) -> None:
        self.bar = QProgressBar()
        self.bar.setRange(0, _STEPS)
        self.bar.setToolTip("How far the run is, and about how long it still takes.")
        self.cancel = QPushButton("Cancel")
        self.cancel.setToolTip("Stop the run. Layers stay as they are.")
        self.cancel.clicked.connect(self._cancel)
        self.line = QLabel()
        self.line.setWordWrap(True)
        self.line.setTextInteractionFlags(self.line.textInteractionFlags().TextSelectableByMouse)
        self.more = QPushButton("Copy details")
        self.more.setToolTip("Copy the technical details of the error, for a report.")
        self.more.clicked.connect(self._copy_details)
        running, said = QHBoxLayout(), QHBoxLayout()
        running.addWidget(self.bar, 1)
        running.addWidget(self.cancel)
        said.addWidget(self.line, 1)
        said.addWidget(self.more)
        both = QVBoxLayout(self)
        both.setContentsMargins(0, 0, 0, 0)
        both.addLayout(running)
        both.addLayout(said)
        for widget in (self.bar, self.cancel, self.line, self.more):
            widget.hide()

    def say(self, text: str) -> None:
        """One line about the state of things; nothing for an empty text."""
        self.line.setText(text)
        self.line.setVisible(bool(text))
        self.more.hide()

    @property
    def text(self) -> str:
        """What the line says."""
        return self.line.text()

    def _start(self) -> None:
        self._began = time.monotonic()
        self._doing, self._since = "", (self._began, 0.0)
        self.bar.setValue(0)
        self.bar.setFormat("starting …")
        self.cancel.setEnabled(True)
        self._show_running(not self.quiet)
        if not self.quiet:
            self.say("")

    def _progress(self, progress: Progress) -> None:
        self.bar.setValue(round(_STEPS * progress.fraction))
        now, doing = time.monotonic(), progress.message.rstrip("0123456789, ").split(" ")[0]
        if doing != self._doing:  # another kind of work goes at another pace
            self._doing, self._since = doing, (now, progress.fraction)
        began, first = self._since
        left = remaining(now - began, (progress.fraction - first) / max(1 - first, 1e-9))
        eta = f" · {duration(left)} left" if left is not None else ""
        self.bar.setFormat(f"{progress.message or 'working'}{eta}")

    def _cancel(self) -> None:
        self.cancel.setEnabled(False)
        self.bar.setFormat("stopping …")
        self.task.cancel()

    def _end(self, outcome: Outcome) -> None:
        if not self.task.running:
            self._show_running(False)
        if outcome is Outcome.FAILED and self.task.error is not None:
            self.fail(self.task.error)
        elif outcome is Outcome.CANCELLED:
            self.say("Cancelled; nothing was changed.")

    def fail(self, error: BaseException) -> None:
        """Show what went wrong, here and as a notification."""
        self.task.error = error
        self.say(complain(sentence(error)))
        self.more.show()

    def _copy_details(self) -> None:
        if self.task.error is not None:
            QApplication.clipboard().setText(details(self.task.error))

    def _show_running(self, running: bool) -> None:
        self.bar.setVisible(running)
        self.cancel.setVisible(running)


def remaining(elapsed: float, fraction: float) -> float | None:
    """Seconds that are left if it goes on like this, None while that is no more than a guess."""
    if elapsed < _ETA_FROM or fraction <= 0.02:
        return None
    return elapsed * (1 - fraction) / fraction
