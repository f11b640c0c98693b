"""Work off the GUI thread: progress, cancelling, errors, and exactly one end for every start.

The thread and the GUI talk through a queue that a timer empties on the GUI thread. No Qt object is
touched, kept or freed anywhere else, so a panel may be closed at any moment of a run.
"""

from __future__ import annotations

import enum
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.progress import Cancelled, Progress, Report
from napari_beerlanet.ui.last_words import when_deleted

_LOOK_EVERY = 10  # milliseconds

Work = Callable[[Report], Any]
"""Runs in the thread. Holds data only, never widgets, layers or the viewer: they must be freed by
the GUI thread."""


class Outcome(enum.Enum):
    """How a run ended. `SUPERSEDED`: a newer one took its place."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


@dataclass(eq=False)
class _Run:
    """One start: what to do, whom to tell, and the thread's only way to the GUI."""

    work: Work
    done: Callable[[Any], None] | None
    failed: Callable[[BaseException], None] | None
    queue: SimpleQueue[tuple[str, Any]] = field(default_factory=SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    superseded: bool = False

    @property
    def stopped_as(self) -> Outcome:
        return Outcome.SUPERSEDED if self.superseded else Outcome.CANCELLED


class Task(QObject):
    """One thing at a time, off the GUI thread.

    Signals, all on the GUI thread: `started`; `progressed` with the newest `Progress`; `ended` with
    an `Outcome`, once for each start, after `done` or `failed` of that start were called.
    """

    started = Signal()
    progressed = Signal(object)
    ended = Signal(object)

    def __init__(self, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.error: BaseException | None = None
        self._run: _Run | None = None
        self._next: _Run | None = None
        self._closed = False
        self._timer = QTimer(self)
        self._timer.setInterval(_LOOK_EVERY)
        self._timer.timeout.connect(self._look)
        _stop_with(self)

    @property
    def running(self) -> bool:
        """Whether something runs or waits for its turn."""
        return self._run is not None

    def start(
        self,
        work: Work,
        done: Callable[[Any], None] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        """Run `work(report)`, then `done(result)` or `failed(exception)` on the GUI thread.

        What runs already is superseded: it is cancelled and its result dropped. Of several that are
        started meanwhile only the newest gets its turn.
        """
        if self._closed:
            return
        run = _Run(work, done, failed)
        if self._run is None:
            self._begin(run)
            return
        waiting, self._next = self._next, run
        self._run.superseded = True
        self._run.stop.set()
        if waiting is not None:
            self.ended.emit(Outcome.SUPERSEDED)

    def cancel(self) -> None:
        """Ask the run to stop; it ends as `CANCELLED` at its next report, or when it is done."""
        waiting, self._next = self._next, None
        if self._run is not None:
            self._run.superseded = False
            self._run.stop.set()
        if waiting is not None:
            self.ended.emit(Outcome.CANCELLED)

    def close(self) -> None:
        """Cancel, end what was started, and start nothing more. What the thread brings is dropped.

        To be called where the panel is still whole; a panel that just vanishes stops its thread
        all the same, silently.
        """
        self._closed = True
        self.cancel()
        run, self._run = self._run, None
        self._timer.stop()
        if run is not None:
            self.ended.emit(Outcome.CANCELLED)

    def _begin(self, run: _Run) -> None:
        self._run, self.error = run, None
        self._stops.append(run.stop)
        thread = threading.Thread(target=_work, args=(run.work, run.queue, run.stop), daemon=False)
        thread.name = "napari-beerlanet"
        thread.start()
        self._timer.start()
        self.started.emit()

    def _look(self) -> None:
        """Empty the queue: pass the newest progress on, and the end, if it came."""
        run, newest, end = self._run, None, None
        while run is not None:
            try:
                kind, value = run.queue.get_nowait()
            except Empty:
                break
            if kind == "progress":
                newest = value
            else:
                end = kind, value
        if run is None:
            return
        if newest is not None and end is None and not run.stop.is_set():
            self.progressed.emit(newest)
        if end is not None:
            self._finish(run, *end)

    def _finish(self, run: _Run, kind: str, value: Any) -> None:
        self._run, following = None, self._next
        self._next = None
        self._stops.remove(run.stop)
        outcome = self._deliver(run, kind, value)
        if following is not None and not self._closed:
            if self._run is None:
                self._begin(following)
            else:  # what was called on delivery started something newer
                self.ended.emit(Outcome.SUPERSEDED)
        elif self._run is None:
            self._timer.stop()
        self.ended.emit(outcome)

    def _deliver(self, run: _Run, kind: str, value: Any) -> Outcome:
        """Call `done` or `failed`; an exception in `done` is a failure of the run."""
        if run.stop.is_set():
            return run.stopped_as
        if kind == "result":
            try:
                if run.done is not None:
                    run.done(value)
                return Outcome.DONE
            except Exception as error:
                value = error
        elif isinstance(value, Cancelled):
            return Outcome.CANCELLED
        self.error = value
        if run.failed is not None:
            run.failed(value)
        return Outcome.FAILED


def _stop_with(task: Task) -> None:
    """Let the task's threads stop when Qt deletes it with its panel, without a word from it."""
    stops: list[threading.Event] = []
    task._stops = stops
    when_deleted(task, lambda: [stop.set() for stop in stops])


def _work(work: Work, queue: SimpleQueue[tuple[str, Any]], stop: threading.Event) -> None:
    """The thread. It knows a queue and an event, and nothing of Qt."""

    def report(progress: Progress) -> None:
        if stop.is_set():
            raise Cancelled
        queue.put(("progress", progress))

    try:
        if stop.is_set():
            raise Cancelled
        queue.put(("result", work(report)))
    except BaseException as error:
        queue.put(("error", error))
