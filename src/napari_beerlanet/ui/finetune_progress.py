"""A run that goes on: how far it is, curves, a look-in, and Pause and Stop."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QProgressBar, QVBoxLayout, QWidget

from napari_beerlanet.core.runs import look_at
from napari_beerlanet.core.wording import duration
from napari_beerlanet.ui.controls import button, heading, hint, row
from napari_beerlanet.ui.curves import Curves
from napari_beerlanet.ui.finetune_form import wrapped
from napari_beerlanet.ui.finetune_lookin import LookIn
from napari_beerlanet.ui.notices import show_warning
from napari_beerlanet.ui.tasks import Task
from napari_beerlanet.ui.training_process import End, TrainingProcess

_STEPS = 1000


class RunSection(QWidget):
    """Shows one `TrainingProcess` at a time; `ended` passes its end on.

    `details`, the curves and the look-in, are a widget to be placed by the panel.
    """

    ended = Signal(object)

    def __init__(self, look_in_task: Task, theme: str) -> None:
        super().__init__()
        self.process: TrainingProcess | None = None
        self.title = heading("Training")
        self.bar = QProgressBar()
        self.bar.setRange(0, _STEPS)
        self.bar.setToolTip("How far the training is, and about how long it still takes.")
        self.pause = button("Pause", "Suspend the training where it is.", self._pause)
        self.stop = button("Stop", "End the training; the best so far is kept.", self._stop)
        self.facts, self.warnings = wrapped(), hint()
        self.curves = Curves(theme)
        self.look_in = LookIn(look_in_task)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        self.buttons = row(self.pause, self.stop)
        for part in (self.title, self.bar, self.buttons, self.facts, self.warnings):
            layout.addWidget(part)
        self.details = QWidget()
        below = QVBoxLayout(self.details)
        below.setContentsMargins(0, 0, 0, 0)
        for part in (self.curves, self.look_in):
            below.addWidget(part)
        self.set_shown(False)

    @property
    def running(self) -> bool:
        """Whether a run is followed that has not ended."""
        return self.process is not None and self.process.running

    def follow(self, process: TrainingProcess) -> None:
        """Show a run from now on. To be called before it starts or is attached to."""
        self.leave()
        self.process = process
        self._data = str(look_at(process.folder).settings.get("data") or "")
        process.told.connect(self._told)
        process.paused_changed.connect(self._paused)
        process.ended.connect(self._end)
        self.title.setText(f"Training · {process.folder.name}")
        self.bar.setValue(0)
        self.bar.setFormat("loading …")
        self.facts.setText("")
        self._warn(None)
        self.curves.clear()
        self.curves.read(process.folder)
        self.look_in.clear()
        self._show_buttons(True)
        self.set_shown(True)

    def set_shown(self, shown: bool) -> None:
        """Show or hide all of it."""
        self.setVisible(shown)
        self.details.setVisible(shown)

    def leave(self) -> None:
        """Follow this run no more; it goes on without us."""
        if self.process is not None:
            self.process.leave()
            self.process.deleteLater()
            self.process = None

    def _told(self, event: dict[str, Any]) -> None:
        if event["event"] == "batch":
            self._batch(event)
        elif event["event"] == "epoch" and self.process is not None:
            self.curves.read(self.process.folder)
            self.look_in.epoch(event, self.process.folder, self._data)
        elif event["event"] == "warning":
            self._warn(str(event.get("message") or ""))

    def _batch(self, event: dict[str, Any]) -> None:
        self.curves.add_batch(event)
        done = (event["epoch"] - 1) * event["batches"] + event["batch"]
        self.bar.setValue(round(_STEPS * done / max(event["epochs"] * event["batches"], 1)))
        if self.process is not None and not self.process.stopping and not self.process.paused:
            eta = event.get("eta_seconds")
            left = f" · {duration(eta)} left" if eta is not None else ""
            self.bar.setFormat(f"epoch {event['epoch']} of {event['epochs']}{left}")
        memory = float(event.get("memory_mb") or 0)
        size = f"{memory / 1000:.1f} GB" if memory >= 1000 else f"{memory:.0f} MB"
        self.facts.setText(f"On {event.get('device')}, {size} of memory in use.")

    def _warn(self, text: str | None) -> None:
        known = [] if text is None else [*self.warnings.text().split("\n"), text]
        lines = list(dict.fromkeys(line for line in known if line))[-3:]
        self.warnings.setText("\n".join(lines))
        self.warnings.setVisible(bool(lines))

    def _pause(self) -> None:
        if self.process is not None and self.process.running:
            if self.process.paused:
                self.process.resume()
                return
            self.process.pause()
            if not self.process.paused:
                show_warning("The training process could not be paused.")

    def _paused(self, paused: bool) -> None:
        self.pause.setText("Go on" if paused else "Pause")
        word = "Let the training go on." if paused else "Suspend the training where it is."
        self.pause.setToolTip(word)
        if paused:
            self.bar.setFormat("paused")

    def _stop(self) -> None:
        if self.process is not None and self.process.running:
            self.process.stop()
            self.pause.setEnabled(False)
            self.stop.setEnabled(False)
            self.bar.setFormat("stopping after this step …")

    def _end(self, end: End) -> None:
        self._show_buttons(False)
        self.bar.setFormat(str(end.state))
        if self.process is not None:
            self.curves.read(self.process.folder)
        self.ended.emit(end)

    def _show_buttons(self, running: bool) -> None:
        for made in (self.pause, self.stop):
            made.setEnabled(running)
        self.buttons.setVisible(running)
        self._paused(self.process is not None and self.process.paused)

    @property
    def folder(self) -> Path | None:
        """Of the run that is shown."""
        return None if self.process is None else self.process.folder
