"""How long a training still takes, by the steps and the ends of epochs that it has done so far."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from statistics import median

_KEPT = 101  # of either: enough for a median, few enough to follow a machine that gets busy


class Pace:
    """Seconds of a batch, and of what comes between epochs (validation, writing files).

    Medians, so a run that was paused, or a machine that slept, does not count as slow.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: tuple[int, float] | None = None
        self._batches: deque[float] = deque(maxlen=_KEPT)
        self._ends: deque[float] = deque(maxlen=_KEPT)

    def batch(self, epoch: int) -> None:
        """A batch of this epoch is done."""
        now = self._clock()
        if self._last is not None:
            before, then = self._last
            (self._batches if before == epoch else self._ends).append(now - then)
        self._last = epoch, now

    def left(self, batches: int, epochs: int) -> float | None:
        """Seconds for so many batches and ends of epochs; None as long as nothing is known."""
        known = self._batches or self._ends
        if not known:
            return None
        each = median(known)
        end = max(median(self._ends) - each, 0.0) if self._ends else 0.0
        return batches * each + epochs * end
