"""How long-running work tells its caller how far it is, and how the caller stops it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
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


_FINE = 1000


def within(report: Report | None, start: float, stop: float) -> Report | None:
    """A report for a part of the work: its 0 … 1 becomes `start` … `stop` of the whole."""
    if report is None:
        return None

    def part(progress: Progress) -> None:
        fraction = start + (stop - start) * progress.fraction
        report(Progress(round(_FINE * fraction), _FINE, progress.message))

    return part


def furthest(report: Report | None) -> Report | None:
    """A report for several threads that each go from 0 to 1: how far the furthest of them is."""
    if report is None:
        return None
    lock, far = threading.Lock(), 0.0

    def any_thread(progress: Progress) -> None:
        nonlocal far
        with lock:
            far = max(far, progress.fraction)
            report(Progress(round(_FINE * far), _FINE, progress.message))

    return any_thread


class Teller:
    """A report to somebody in another process: as plain dicts, and only now and then.

    `write` takes a dict with the fraction and the message; `every` are seconds.
    """

    def __init__(self, write: Callable[[dict[str, Any]], None], every: float = 0.5) -> None:
        self._write, self._every, self._last = write, every, time.monotonic()

    def __call__(self, progress: Progress) -> None:
        now = time.monotonic()
        if now - self._last > self._every:
            self._last = now
            self._write({"fraction": progress.fraction, "message": progress.message})


def tell(report: Report | None, done: int, total: int, message: str = "") -> None:
    """Pass a `Progress` to `report`, if there is one."""
    if report is not None:
        report(Progress(done, total, message))
