"""Progress reports of long-running work, and how the caller cancels it."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import Any


class Cancelled(Exception):
    """Raised by a `report` callback to stop the work; nothing half-done is returned."""


@dataclass(frozen=True)
class Progress:
    """One report: `done` of `total` steps, and what is being done in a few words."""

    done: int
    total: int
    message: str = ""

    @property
    def fraction(self) -> float:
        """Between 0 and 1."""
        return min(self.done / self.total, 1.0) if self.total > 0 else 0.0


Report = Callable[[Progress], None]
"""Called from the thread that does the work. Raise `Cancelled` in it to stop."""


DONE = "done"
"""The last message of work that has come to its end."""

_RESOLUTION = 100_000


def subprogress(report: Report | None, start: float, stop: float) -> Report | None:
    """A report for a part of the work: its 0 … 1 becomes `start` … `stop` of the whole.

    That a part is done is no message of the whole, which is not: the message before stays.
    """
    if report is None:
        return None
    said = ""

    def part(progress: Progress) -> None:
        nonlocal said
        fraction = start + (stop - start) * progress.fraction
        if progress.message != DONE or stop >= 1:
            said = progress.message
        report(Progress(round(_RESOLUTION * fraction), _RESOLUTION, said))

    return part


def max_progress(report: Report | None) -> Report | None:
    """A report for several threads that each go from 0 to 1: how far the furthest of them is."""
    if report is None:
        return None
    lock, far = threading.Lock(), 0.0

    def any_thread(progress: Progress) -> None:
        nonlocal far
        with lock:
            far = max(far, progress.fraction)
            report(Progress(round(_RESOLUTION * far), _RESOLUTION, progress.message))

    return any_thread


class WorkProgress:
    """Progress of steps whose amounts of work become known one after the other.

    Of what is left of the bar, each step takes the share that it has of the work that is left. So
    the bar moves evenly as long as the work is as expected, and never goes back where it is not.
    """

    def __init__(self, report: Report | None) -> None:
        self._report, self._fraction = report, 0.0

    def step(self, work: float, left: float) -> Report | None:
        """The report of the next step, which goes from 0 to 1: `work` of all that is `left`."""
        first = self._fraction
        self._fraction += (1 - first) * (min(work / left, 1.0) if left > 0 else 1.0)
        return subprogress(self._report, first, self._fraction)


def renamed(report: Report | None, message: str) -> Report | None:
    """A report that says this, whatever is reported; the same report if this is nothing."""
    if report is None or not message:
        return report
    return lambda progress: report(Progress(progress.done, progress.total, message))


class ThrottledProgress:
    """A report to another process: as plain dicts, at most one per `interval` seconds.

    `write` takes a dict with the fraction and the message.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], interval: float = 0.5) -> None:
        self._write, self._interval, self._last = write, interval, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last > self._interval:
            self._last = now
            self._write({"fraction": progress.fraction, "message": progress.message})


def report_progress(report: Report | None, done: int, total: int, message: str = "") -> None:
    """Pass a `Progress` to `report`, if there is one."""
    if report is not None:
        report(Progress(done, total, message))


# --- the time that is left ---

_MIN_ETA_ELAPSED_S, _MIN_ETA_FRACTION = 1.0, 0.02  # before these, an ETA is no more than a guess
_MEDIAN_WINDOW = 101  # steps: enough for a median, few enough to follow a machine that gets busy


def eta_seconds(elapsed: float, fraction: float) -> float | None:
    """Seconds left of work that is done evenly, None while that is no more than a guess."""
    if elapsed < _MIN_ETA_ELAPSED_S or fraction <= _MIN_ETA_FRACTION:
        return None
    return elapsed * (1 - fraction) / fraction


class EtaEstimator:
    """Estimates the time left (ETA) of a training: by batches, and by what follows an epoch.

    Medians, so a run that was paused, or a machine that slept, does not count as slow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[int, float] | None = None
        self._batches: deque[float] = deque(maxlen=_MEDIAN_WINDOW)
        self._epoch_ends: deque[float] = deque(maxlen=_MEDIAN_WINDOW)

    def record_batch(self, epoch: int) -> None:
        """A batch of this epoch is done."""
        now = self._clock()
        if self._last is not None:
            before, then = self._last
            (self._batches if before == epoch else self._epoch_ends).append(now - then)
        self._last = epoch, now

    def seconds_left(self, batches: int, epochs: int) -> float | None:
        """Seconds for so many batches and ends of epochs (validation, writing files).

        None as long as nothing has been measured.
        """
        measured = self._batches or self._epoch_ends
        if not measured:
            return None
        batch = median(measured)
        end = max(median(self._epoch_ends) - batch, 0.0) if self._epoch_ends else 0.0
        return batches * batch + epochs * end
