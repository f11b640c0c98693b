"""The colours of an image that is not in memory, counted part by part by several threads.

Each thread counts into a table of all 8-bit colours (64 MB), and only at the end tables become
lists and are added up: whole numbers, so neither the parts' order nor their borders matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import LifoQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .lazy import Part, in_threads, read
from .palette import Palette, encode
from .progress import Report, tell
from .threads import thread_count

_TABLES = 4
_FULL = 1 << 31  # pixels after which a table of uint32 is emptied

See = Callable[[npt.NDArray[Any], Part], None]
Mask = Callable[[Part], npt.NDArray[np.bool_]]


class ColourCounter:
    """Counts of 8-bit colours, added to by any number of threads."""

    def __init__(self) -> None:
        self._codes = np.empty(0, np.uint32)
        self._counts = np.empty(0, np.int64)
        self._hidden: npt.NDArray[np.bool_] | None = None
        self._lock = threading.Lock()
        self._tables: LifoQueue[_Table] = LifoQueue()
        for _ in range(min(_TABLES, thread_count())):
            self._tables.put(_Table())

    def add(self, pixels: npt.NDArray[np.uint8], keep: npt.NDArray[np.bool_] | None = None) -> None:
        """Count (h, w, 3 or 4) pixels, or those of a mask (h, w); transparent ones are noted."""
        if keep is not None and not keep.all():
            pixels = pixels[keep]
        flat = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[-1])
        alpha = flat.shape[1] == 4
        table = self._tables.get()
        try:
            table.add(flat, alpha)
            if table.pixels > _FULL:
                self._empty(table)
        finally:
            self._tables.put(table)
        if alpha:
            self._note_hidden(flat)

    def palette(self) -> Palette:
        """What was counted; colours of transparent pixels alone have a count of zero."""
        tables = [self._tables.get() for _ in range(self._tables.qsize())]
        for table in tables:
            self._empty(table)
            self._tables.put(table)
        codes, counts = self._codes, self._counts
        if self._hidden is not None:
            unseen = np.setdiff1d(np.flatnonzero(self._hidden).astype(np.uint32), codes)
            none = np.zeros(len(unseen), np.int64)
            codes, counts = kernels.merge_counts(codes, counts, unseen, none)
        return Palette(codes, counts, np.dtype(np.uint8))

    def _empty(self, table: _Table) -> None:
        found = kernels.distinct(table.counts, table.touched)
        table.pixels = 0
        with self._lock:
            self._codes, self._counts = kernels.merge_counts(self._codes, self._counts, *found)

    def _note_hidden(self, flat: npt.NDArray[np.uint8]) -> None:
        hidden = flat[flat[:, 3] == 0]
        if len(hidden):
            with self._lock:
                if self._hidden is None:
                    self._hidden = np.zeros(kernels.CODES, bool)
                self._hidden[encode(hidden)] = True


class _Table:
    """Counts of all colours; only pages that are ever touched take memory."""

    def __init__(self) -> None:
        self.counts = np.zeros(kernels.CODES, np.uint32)
        self.touched = np.zeros(kernels.CODES >> 6, np.uint8)
        self.pixels = 0

    def add(self, flat: npt.NDArray[np.uint8], alpha: bool) -> None:
        kernels.count_pixels(flat, alpha, self.counts, self.touched)
        self.pixels += len(flat)


def count_colours(
    level: Any,
    parts: Sequence[Part],
    mask: Mask | None = None,
    see: See | None = None,
    report: Report | None = None,
    threads: int | None = None,
) -> Palette:
    """The palette of some parts of a level (H, W, 3 or 4) of 8 bits.

    `mask(part)` says which pixels count; `see(pixels, part)` is shown every part on the way, by
    several threads. `report` is called, and may raise `Cancelled`, in the caller's thread.
    """
    counter = ColourCounter()

    def work(part: Part) -> None:
        pixels = read(level, part)
        counter.add(pixels, None if mask is None else mask(part))
        if see is not None:
            see(pixels, part)

    tell(report, 0, len(parts), "counting colours")
    for done, _ in enumerate(in_threads(work, parts, threads), start=1):
        tell(report, done, len(parts), "counting colours")
    return counter.palette()
