"""Run work off the GUI thread: progress, cancelling, errors, exactly one end for every start.

The thread and the GUI talk through a queue that a timer empties on the GUI thread. No Qt object is
touched, kept or freed anywhere else, so a panel may be closed at any moment of a run.

When the program ends, every run is asked to stop. One that does not hear of it, as it waits for a
network drive, say, is waited for `EXIT_TIMEOUT_S`, or longer where the machine is busy and it gets
to its next report slowly; files are written whole or not at all, so one that is cut off leaves
nothing half-written.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any

from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.common.progress import Cancelled, Progress, Report
from napari_beerlanet.ui.common.notifications import WORKER_THREAD_NAME, hide_library_warnings

EXIT_TIMEOUT_S = 60.0
"""How long a program whose last window was closed waits for threads of ours that do nothing, and
the seconds of the processor that those may take that work."""

_IDLE_CPU_S = 0.1  # in a minute; looking whether threads have ended takes less

_POLL_INTERVAL_MS = 10

Work = Callable[[Report], Any]
"""Runs in a thread. Holds data only, never widgets, layers or the viewer: they must be freed by
the GUI thread."""


class TaskOutcome(enum.Enum):
    """How a run ended. `SUPERSEDED`: a newer one took its place."""

    DONE = "done"
    FAILED = "failed"
    CANCELLED = "cancelled"
    SUPERSEDED = "superseded"


@dataclass(eq=False)
class _TaskRun:
    """One start: the work, its callbacks, and the queue from the thread to the GUI."""

    work: Work
    done: Callable[[Any], None] | None
    failed: Callable[[BaseException], object] | None
    queue: SimpleQueue[tuple[str, Any]] = field(default_factory=SimpleQueue)
    stop: threading.Event = field(default_factory=threading.Event)
    superseded: bool = False

    @property
    def stop_outcome(self) -> TaskOutcome:
        return TaskOutcome.SUPERSEDED if self.superseded else TaskOutcome.CANCELLED


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
        self._run: _TaskRun | None = None
        self._next: _TaskRun | None = None
        self._closed = False
        self._timer = QTimer(self)
        self._timer.setInterval(_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)
        self._stop_events: list[threading.Event] = []
        _stop_on_destroyed(self)
        hide_library_warnings()

    @property
    def running(self) -> bool:
        """Whether something is running or waiting."""
        return self._run is not None

    def start(
        self,
        work: Work,
        done: Callable[[Any], None] | None = None,
        failed: Callable[[BaseException], object] | None = None,
    ) -> None:
        """Run `work(report)`, then `done(result)` or `failed(exception)` on the GUI thread.

        What is running already is superseded: it is cancelled and its result dropped. Of several
        that are started meanwhile only the newest is run.
        """
        if self._closed:
            return
        run = _TaskRun(work, done, failed)
        if self._run is None:
            self._start_thread(run)
            return
        waiting, self._next = self._next, run
        self._run.superseded = True
        self._run.stop.set()
        if waiting is not None:
            self.ended.emit(TaskOutcome.SUPERSEDED)

    def cancel(self) -> None:
        """Request a stop; the run ends as `CANCELLED` at its next report, or when it is done."""
        waiting, self._next = self._next, None
        if self._run is not None:
            self._run.superseded = False
            self._run.stop.set()
        if waiting is not None:
            self.ended.emit(TaskOutcome.CANCELLED)

    def close(self) -> None:
        """Cancel, end what was started, and start nothing more. The thread's result is dropped.

        To be called while the panel is still intact; a panel that Qt just deletes stops its thread
        all the same, without a signal.
        """
        self._closed = True
        self.cancel()
        run, self._run = self._run, None
        self._timer.stop()
        if run is not None:
            self.ended.emit(TaskOutcome.CANCELLED)

    def _start_thread(self, run: _TaskRun) -> None:
        self._run, self.error = run, None
        self._stop_events.append(run.stop)
        thread = threading.Thread(
            target=_run_in_thread, args=(run.work, run.queue, run.stop), daemon=False
        )
        thread.name = WORKER_THREAD_NAME
        _stop_with_program(run.stop)
        thread.start()
        self._timer.start()
        self.started.emit()

    def _poll(self) -> None:
        """Empty the queue: emit the newest progress, and the end, if it is there."""
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

    def _finish(self, run: _TaskRun, kind: str, value: Any) -> None:
        self._run, following = None, self._next
        self._next = None
        self._stop_events.remove(run.stop)
        outcome = self._deliver(run, kind, value)
        if following is not None and not self._closed:
            if not self.running:
                self._start_thread(following)
            else:  # a callback has started something newer
                self.ended.emit(TaskOutcome.SUPERSEDED)
        elif not self.running:
            self._timer.stop()
        self.ended.emit(outcome)

    def _deliver(self, run: _TaskRun, kind: str, value: Any) -> TaskOutcome:
        """Call `done` or `failed`; an exception in `done` is a failure of the run."""
        if run.stop.is_set():
            return run.stop_outcome
        if kind == "result":
            try:
                if run.done is not None:
                    run.done(value)
                return TaskOutcome.DONE
            except Exception as error:
                value = error
        elif isinstance(value, Cancelled):
            return TaskOutcome.CANCELLED
        self.error = value
        if run.failed is not None:
            run.failed(value)
        return TaskOutcome.FAILED


def _stop_on_destroyed(task: Task) -> None:
    """Stop the task's threads when Qt deletes it with its panel."""
    events = task._stop_events

    def stop_all() -> None:
        for event in events:
            event.set()

    on_destroyed(task, stop_all)


def _run_in_thread(work: Work, queue: SimpleQueue[tuple[str, Any]], stop: threading.Event) -> None:
    """The thread's function. It knows a queue and an event, and nothing of Qt."""

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


_stops: weakref.WeakSet[threading.Event] = weakref.WeakSet()
_watcher: threading.Thread | None = None


def _stop_with_program(stop: threading.Event) -> None:
    """Set an event when the program ends: not every window is deleted before that."""
    global _watcher
    _stops.add(stop)
    if _watcher is None:
        _watcher = threading.Thread(target=_watch_end, name="beerlanet-exit", daemon=True)
        _watcher.start()


def _watch_end() -> None:
    """Ask all runs to stop when the main thread has ended; end the program if one does not.

    Python waits for every thread that is no daemon, for ever if need be, and daemons that are in
    compiled code when it is taken down crash it.
    """
    threading.main_thread().join()
    for stop in list(_stops):
        stop.set()
    others = [one for one in threading.enumerate() if not _is_ours(one) and not one.daemon]
    for thread in others:
        thread.join()  # what it does may matter to someone
    if not _wait_for([one for one in threading.enumerate() if _is_ours(one)]):
        print(
            f"napari-beerlanet: a task did not end in {EXIT_TIMEOUT_S:.0f} s, and was cut off.",
            file=sys.stderr,
            flush=True,
        )
        os._exit(1)


def _wait_for(threads: list[threading.Thread]) -> bool:
    """Wait for threads to end; False where they hang.

    They hang if for `EXIT_TIMEOUT_S` the process has done next to nothing, or has worked for so
    long. By the clock alone, a task on a machine that has no time for it would seem to.
    """
    start = idle_since = time.monotonic()
    worked = seen = time.process_time()
    while any(thread.is_alive() for thread in threads):
        for thread in threads:
            thread.join(min(0.5, EXIT_TIMEOUT_S / 10) / len(threads))
        now, used = time.monotonic(), time.process_time()
        if used - seen > _IDLE_CPU_S:
            idle_since, seen = now, used
        idle, work = now - idle_since, used - worked
        if now - start > EXIT_TIMEOUT_S and max(idle, work) > EXIT_TIMEOUT_S:
            return False
    return True


def _is_ours(thread: threading.Thread) -> bool:
    """Whether it is a thread that the end of the program waits for, and belongs to this plugin."""
    return "beerlanet" in thread.name and not thread.daemon


def on_destroyed(thing: QObject, callback: Callable[[], object]) -> None:
    """Run a callback once when Qt destroys an object, without keeping the object alive.

    The callback must not refer to the object. A function that only the connection knows may be
    emptied by the garbage collector, together with a Python object in a cycle, before Qt calls it:
    a crash. Finalizers are referenced elsewhere until they have run.
    """
    finalizer = weakref.finalize(thing, callback)
    finalizer.atexit = False
    thing.destroyed.connect(finalizer)
