"""How a run is going: a bar with the time that is left, Cancel, and what went wrong."""

from __future__ import annotations

import time

from napari.utils.notifications import show_error
from qtpy.QtCore import Qt, QTimer
from qtpy.QtGui import QGuiApplication
from qtpy.QtWidgets import QHBoxLayout, QLabel, QProgressBar, QPushButton, QVBoxLayout, QWidget

from napari_beerlanet.core.progress import Progress

from .tasks import End, Failure, Runner, State

_STEPS = 1000
_PATIENCE = 400  # milliseconds before the bar appears: live updates should not make it flicker
_FIRST_GUESS = 1.0  # seconds before the time that is left is worth telling


class RunBar(QWidget):
    """Watches a `Runner`; hidden where there is nothing to tell."""

    def __init__(self, runner: Runner, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._runner = runner
        self._failure: Failure | None = None
        self._since = 0.0
        self._build()
        self._appear = QTimer(self)
        self._appear.setSingleShot(True)
        self._appear.setInterval(_PATIENCE)
        self._appear.timeout.connect(self._show_progress)
        runner.started.connect(self._on_started)
        runner.progressed.connect(self._on_progressed)
        runner.state_changed.connect(self._on_state)
        runner.failed.connect(self.show_failure)
        runner.ended.connect(self._on_ended)

    def _build(self) -> None:
        self.bar = QProgressBar()
        self.bar.setRange(0, _STEPS)
        self.bar.setToolTip("How far the work is")
        self.cancel_button = QPushButton("Cancel")
        self.cancel_button.setToolTip("Stop; layers stay as they are")
        self.cancel_button.clicked.connect(self._runner.cancel)
        self.status = QLabel()
        self.error = QLabel()
        self.error.setWordWrap(True)
        self.error.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
        self.copy_button = QPushButton("Copy details")
        self.copy_button.setToolTip("Copy the error with its technical details, to report it")
        self.copy_button.clicked.connect(self._copy)
        self._progress, self._error = QWidget(), QWidget()
        rows = QVBoxLayout(self._progress)
        row = QHBoxLayout()
        row.addWidget(self.bar, 1)
        row.addWidget(self.cancel_button)
        rows.addLayout(row)
        rows.addWidget(self.status)
        row = QHBoxLayout(self._error)
        row.addWidget(self.error, 1)
        row.addWidget(self.copy_button, 0, Qt.AlignmentFlag.AlignTop)
        layout = QVBoxLayout(self)
        for part in (self._progress, self._error):
            part.layout().setContentsMargins(0, 0, 0, 0)
            part.setVisible(False)
            layout.addWidget(part)
        layout.setContentsMargins(0, 0, 0, 0)

    def show_failure(self, failure: Failure) -> None:
        """Show the sentence here and as napari's notification."""
        self._failure = failure
        self.error.setText(failure.sentence)
        self._error.setVisible(True)
        show_error(failure.sentence)

    def clear_failure(self) -> None:
        """Take the last error away."""
        self._failure = None
        self._error.setVisible(False)

    def _on_started(self) -> None:
        self._since = time.monotonic()
        self.bar.setValue(0)
        self.status.setText("")
        if self._progress.isHidden() and not self._appear.isActive():
            self._appear.start()

    def _on_progressed(self, progress: Progress) -> None:
        self.bar.setValue(round(_STEPS * progress.fraction))
        left = time_left(progress.fraction, time.monotonic() - self._since)
        self.status.setText(" · ".join(filter(None, [progress.message, left])))

    def _on_state(self, state: State) -> None:
        self.cancel_button.setEnabled(state is State.RUNNING)
        if state is State.CANCELLING:
            self.status.setText("cancelling …")

    def _on_ended(self, end: End) -> None:
        if end is End.DONE:
            self.clear_failure()
        if self._runner.state is State.IDLE:
            self._appear.stop()
            self._progress.setVisible(False)

    def _show_progress(self) -> None:
        self._progress.setVisible(self._runner.state is not State.IDLE)

    def _copy(self) -> None:
        if self._failure is not None:
            text = f"{self._failure.sentence}\n\n{self._failure.details}"
            QGuiApplication.clipboard().setText(text)


def time_left(fraction: float, elapsed: float) -> str:
    """ "about 12 s left", or nothing while it is too early to tell."""
    if elapsed < _FIRST_GUESS or not 0 < fraction < 1:
        return ""
    seconds = elapsed * (1 - fraction) / fraction
    if seconds < 90:
        return f"about {max(seconds, 1):.0f} s left"
    return f"about {seconds / 60:.0f} min left"
