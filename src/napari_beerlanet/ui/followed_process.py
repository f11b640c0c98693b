"""A run in a process of its own, which the viewer follows but does not hold.

The process writes what happens to its run's folder, and a timer reads it there. So it makes no
difference whether this viewer has begun the run, another one, or one that was killed since: a run
that goes on is followed as from its start. Pausing suspends the process where it is, which loses
no step, and the system itself remembers that it is paused.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.runs import LASTS, EventTail, State
from napari_beerlanet.ui.training_launch import ask_to_stop, each, exit_code, is_alive

_LOOK_EVERY = 200  # milliseconds
_LOOK_BACK = 1 << 16  # bytes of earlier events that are told again when a run is found
_FAREWELL = 10.0  # seconds that a process has to end after its last event


@dataclass(frozen=True)
class End:
    """How a run ended: FINISHED, STOPPED, FAILED or INTERRUPTED, and what is to be said of it."""

    state: State
    message: str = ""


class FollowedProcess(QObject):
    """One run. Signals: `started`; `told` with each event; `paused_changed`; `ended`, once.

    `patience` are the seconds after which a run that was asked to stop is sent a signal, and after
    which it is killed; what it has finished is on the disk in any case. What kind of run it is, is
    told by `_launch`, `_written` and `_why`.
    """

    started = Signal()
    told = Signal(dict)
    paused_changed = Signal(bool)
    ended = Signal(object)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parent: QObject | None = None,
        patience: tuple[float, float] = (30.0, 45.0),
    ) -> None:
        super().__init__(parent)
        self.folder, self.patience = Path(folder), patience
        self.end: End | None = None
        self.environment: dict[str, str] = {}
        self._process: psutil.Process | None = None
        self._tail: EventTail | None = None
        self._last: dict[str, Any] | None = None
        self._last_at = self._asked_at = 0.0
        self._paused = self._begun = self._found = False
        self._timer = QTimer(self)
        self._timer.setInterval(_LOOK_EVERY)
        self._timer.timeout.connect(self._look)

    # --- beginning -------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether it was started or found, and has not ended."""
        return self._tail is not None and self.end is None

    @property
    def paused(self) -> bool:
        """Whether the process is suspended."""
        return self._paused

    @property
    def stopping(self) -> bool:
        """Whether it was asked to stop."""
        return bool(self._asked_at)

    @property
    def process(self) -> int | None:
        """The process's number."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Begin the run that the folder describes, or go on with it."""
        tail = EventTail(self.folder)
        tail.skip()
        self._follow(tail)
        try:
            self._process = self._launch()
        except (OSError, psutil.Error) as error:
            self._finish(End(State.FAILED, self._why(error=error)))
            return
        self.started.emit()

    def attach_to(self, number: int, paused: bool = False) -> bool:
        """Follow a run that goes on in the process of a number; False where that is gone."""
        try:
            self._process = psutil.Process(number)
        except psutil.Error:
            return False
        self._begun = self._found = True
        self._follow(EventTail(self.folder, latest=_LOOK_BACK))
        self._set_paused(paused)
        self.started.emit()
        self._tell()
        self._last = None  # it may be the end of an earlier try: the process lives
        return True

    def _launch(self) -> psutil.Process:
        """Start the process."""
        raise NotImplementedError

    def _written(self) -> End | None:
        """How the files say that a run has ended, which was found as it went on."""
        return None

    def _why(self, code: int | None = None, error: BaseException | None = None) -> str:
        """One sentence on a process that ended without a word, with this code, or never began."""
        raise NotImplementedError

    def _follow(self, tail: EventTail) -> None:
        self.end = self._last = None
        self._asked_at, self._tail = 0.0, tail
        self._timer.start()

    # --- what can be asked of it -----------------------------------------------------------------

    def pause(self) -> None:
        """Suspend the process and those it has started."""
        if self.running and not self.stopping:
            self._set_paused(each(self._process, "suspend"))

    def resume(self) -> None:
        """Let a paused run go on."""
        if self.running and self._paused:
            each(self._process, "resume")
            self._set_paused(False)

    def stop(self) -> None:
        """Have the run end after its step; the best so far is kept. It `ended` when it has."""
        if self.running:
            self.resume()
            self._asked_at = self._asked_at or time.monotonic()
            ask_to_stop(self.folder, None if self._begun else self._process)

    def kill(self) -> None:
        """End it at once."""
        each(self._process, "kill")

    def leave(self) -> None:
        """Follow it no more; it goes on without us, and nothing is told any more."""
        self._timer.stop()
        self._tail = None

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self.paused_changed.emit(paused)

    # --- following -------------------------------------------------------------------------------

    def _look(self) -> None:
        alive = is_alive(self._process)  # before reading: what it wrote last is read after
        self._tell()
        if self._tail is None or self.end is not None:  # somebody who was told has left or ended it
            return
        if not alive:
            self._finish(self._how_it_ended())
        elif self._last is not None and time.monotonic() - self._last_at > _FAREWELL:
            self.kill()
        elif self.stopping:
            self._insist()

    def _tell(self) -> None:
        for event in self._tail.read() if self._tail is not None else []:
            self._begun = True
            if event["event"] in LASTS:
                self._last, self._last_at = event, time.monotonic()
            elif event["event"] == "start":  # of a run that went on after an earlier end
                self._last = None
            self.told.emit(event)

    def _insist(self) -> None:
        """The file may have come too early: a run that begins removes one that it finds."""
        waited = time.monotonic() - self._asked_at
        if self._last is None and not (self.folder / "stop").exists():
            ask_to_stop(self.folder, None)
        if waited > self.patience[1]:
            self.kill()
        elif waited > self.patience[0] and self._process is not None:
            self._begun = True
            with suppress(psutil.Error):
                self._process.terminate()
            self.patience = (self.patience[1] + 1, self.patience[1])

    def _how_it_ended(self) -> End:
        told = {"end": State.FINISHED, "cancelled": State.STOPPED, "failed": State.FAILED}
        if self._last is not None:
            return End(told[self._last["event"]], str(self._last.get("message") or ""))
        written = self._written() if self._found else None
        if written is not None:
            return written
        if self.stopping:
            return End(State.STOPPED, "Stopped at once.")
        code = exit_code(self.process)
        failed = bool(code) and code > 0  # type: ignore[operator] - a number below 0 is a signal
        state = State.FAILED if failed else State.INTERRUPTED
        return End(state, self._why(code))

    def _finish(self, end: End) -> None:
        self._timer.stop()
        self._tell()
        if self.end is None:
            self.end, self._tail = end, None
            self._set_paused(False)
            with suppress(OSError):
                (self.folder / "stop").unlink(missing_ok=True)
            self.ended.emit(end)
