"""Work that takes longer than a blink, off the GUI thread: one worker, and what starts and ends it.

Whatever happens (done, failed, cancelled, overtaken by a newer request, widget or viewer closed),
every run that `Runner.start` was asked for ends exactly once.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

from napari.qt.threading import WorkerBase, WorkerBaseSignals
from qtpy.QtCore import QObject, Signal, Slot

from napari_beerlanet.core.progress import Cancelled, Progress, Report

Work = Callable[[Report], Any]
"""What a worker does; it hands the report on to core, which so can be watched and cancelled."""

_PAUSE = 0.05  # seconds between two reports that are shown
_OURS = __name__.split(".")[0]


class State(Enum):
    """What a runner is at; buttons follow it."""

    IDLE = "idle"
    RUNNING = "running"
    CANCELLING = "cancelling"


class End(Enum):
    """How a run ended."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


@dataclass(frozen=True)
class Failure:
    """One sentence for the user, and the traceback for whoever can mend it."""

    sentence: str
    details: str
    expected: bool = True


@dataclass(frozen=True)
class _Outcome:
    end: End
    result: Any = None
    failure: Failure | None = None


def describe(error: BaseException) -> Failure:
    """The failure as it is shown: our own sentences as they are, all else said to be unexpected."""
    details = "".join(traceback.format_exception(error))
    if isinstance(error, ValueError) and _raised_by_us(error):
        return Failure(str(error), details)
    if isinstance(error, MemoryError):
        return Failure("There is not enough memory for this; try a smaller part.", details)
    if isinstance(error, OSError) and error.strerror:
        place = f"{error.filename}: " if error.filename else ""
        return Failure(f"{place}{error.strerror.lower()}.", details)
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(f"Something unexpected went wrong ({what}).", details, expected=False)


def _raised_by_us(error: BaseException) -> bool:
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and str(frames[-1].f_globals.get("__name__")).split(".")[0] == _OURS


class _Signals(WorkerBaseSignals):
    progressed = Signal(object)  # Progress
    ended = Signal(object, object)  # Worker, _Outcome


class Worker(WorkerBase):
    """One run of a `Work`. napari asks it to quit, and waits for it, when the application ends."""

    def __init__(self, work: Work) -> None:
        super().__init__(SignalsClass=_Signals)
        self._work = work
        self._told = 0.0

    def run(self) -> None:
        """Called by Qt in the worker's thread.

        The base class would swallow a RuntimeError, and it changes Python's warning filters for
        all threads: hence no call of it.
        """
        outcome = self._outcome()
        self._work = _nothing  # and with it whatever data it held
        with suppress(RuntimeError):  # the application is gone, and the signals with it
            self.signals.ended.emit(self, outcome)
            self.signals._finished.emit(self)

    def _outcome(self) -> _Outcome:
        try:
            self._raise_if_asked_to_stop()
            return _Outcome(End.DONE, self._work(self._report))
        except Cancelled:
            return _Outcome(End.CANCELLED)
        except Exception as error:
            return _Outcome(End.FAILED, failure=describe(error))

    def _report(self, progress: Progress) -> None:
        self._raise_if_asked_to_stop()
        now = time.monotonic()
        if now - self._told >= _PAUSE:
            self._told = now
            with suppress(RuntimeError):
                self.signals.progressed.emit(progress)

    def _raise_if_asked_to_stop(self) -> None:
        if self.abort_requested:
            raise Cancelled


def _nothing(report: Report) -> None:
    pass


@dataclass
class _Request:
    work: Work
    then: Callable[[Any], None] | None


class Runner(QObject):
    """Runs one `Work` at a time. A newer request overtakes: nothing ever queues up.

    Lives in the GUI thread as a child of its widget. The work of a newer request starts when the
    older has let go, and the older one's result is dropped.
    """

    state_changed = Signal(object)  # State
    started = Signal()
    progressed = Signal(object)  # Progress
    failed = Signal(object)  # Failure
    ended = Signal(object)  # End; once for each call of `start`

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._state = State.IDLE
        self._request: _Request | None = None
        self._next: _Request | None = None
        self._worker: Worker | None = None
        self._last: list[Worker] = []  # outlives this object, for the moment it is destroyed
        self.destroyed.connect(partial(_quit_all, self._last))

    @property
    def state(self) -> State:
        """Idle, running or cancelling."""
        return self._state

    def start(self, work: Work, then: Callable[[Any], None] | None = None) -> None:
        """Do `work(report)` in a thread, then `then(result)` in this one."""
        request = _Request(work, then)
        if self._worker is None:
            self._begin(request)
            return
        overtaken, self._next = self._next, request
        self._worker.quit()
        self._set(State.RUNNING)
        if overtaken is not None:
            self.ended.emit(End.SUPERSEDED)

    def cancel(self) -> None:
        """Ask the work to stop; it does at its next report."""
        if self._worker is None:
            return
        waiting, self._next = self._next, None
        self._worker.quit()
        self._set(State.CANCELLING)
        if waiting is not None:
            self.ended.emit(End.CANCELLED)

    def abandon(self) -> None:
        """End the run now, without waiting for the thread: whatever it returns is dropped."""
        runs = int(self._worker is not None) + int(self._next is not None)
        if self._worker is not None:
            self._worker.quit()
        self._forget()
        self._next = None
        self._set(State.IDLE)
        for _ in range(runs):
            self.ended.emit(End.CANCELLED)

    def _begin(self, request: _Request) -> None:
        self._request = request
        self._worker = worker = Worker(request.work)
        self._last[:] = [worker]
        worker.signals.progressed.connect(self._pass_on)
        worker.signals.ended.connect(self._finish)
        self._set(State.RUNNING)
        self.started.emit()
        worker.start()

    def _forget(self) -> None:
        self._worker = self._request = None
        self._last.clear()

    @Slot(object)
    def _pass_on(self, progress: Progress) -> None:
        if self._state is State.RUNNING and self._next is None and self._worker is not None:
            self.progressed.emit(progress)

    @Slot(object, object)
    def _finish(self, worker: Worker, outcome: _Outcome) -> None:
        if worker is not self._worker or self._request is None:
            return  # abandoned
        then, following = self._request.then, self._next
        cancelling = self._state is State.CANCELLING
        self._forget()
        self._next = None
        if following is not None:
            outcome = _Outcome(End.SUPERSEDED)
            self._begin(following)
        else:
            self._set(State.IDLE)
            outcome = _Outcome(End.CANCELLED) if cancelling else outcome
        self._settle(outcome, then)

    def _settle(self, outcome: _Outcome, then: Callable[[Any], None] | None) -> None:
        end, failure = outcome.end, outcome.failure
        if end is End.DONE and then is not None:
            try:
                then(outcome.result)
            except Exception as error:
                end, failure = End.FAILED, describe(error)
        if failure is not None:
            self.failed.emit(failure)
        self.ended.emit(end)

    def _set(self, state: State) -> None:
        if state is not self._state:
            self._state = state
            self.state_changed.emit(state)


def _quit_all(workers: list[Worker], *_: object) -> None:
    for worker in workers:
        worker.quit()
