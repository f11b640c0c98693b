"""The colours of an image that is not in memory, counted part by part by several threads.

Threads count into a few tables of all 8-bit colours (64 MB each), and only at the end tables
become lists and are added up: whole numbers, so neither the parts' order nor their borders matter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from queue import LifoQueue
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from . import kernels
from .lazy import Part, in_threads, read
from .palette import Palette, encode
from .progress import Report, tell
from .threads import thread_count

_TABLES = 4  # at most: each is 64 MB of address space
_SHARED = 4  # threads that count into one
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
        # Counting is quick beside reading, and of fewer tables more is in the cache.
        for _ in range(min(_TABLES, max(thread_count() // _SHARED, 1))):
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
        found = table.empty()
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
    """Counts of all colours, numbered R + 256 G + 65536 B; only pages that are touched take memory.

    Unlike the order of a palette, these numbers stand in memory as they are: four bytes of RGBA, or
    twelve of four RGB pixels, need only shifts, which counts twice as fast.
    """

    def __init__(self) -> None:
        self.counts = np.zeros(kernels.CODES, np.uint32)
        self.pixels = 0

    def add(self, flat: npt.NDArray[np.uint8], alpha: bool) -> None:
        """Count (n, 3 or 4) contiguous pixels."""
        self.pixels += len(flat)
        if alpha:
            _count_rgba(_words(flat), self.counts)
            return
        whole = len(flat) // 4 * 4
        _count_rgb(_words(flat[:whole]), self.counts)
        rest = flat[whole:].astype(np.int64)
        np.add.at(self.counts, rest @ (1, 256, 65536), np.uint32(1))

    def empty(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """Codes as a palette has them, ascending, and counts; the table begins anew."""
        most = min(self.pixels, kernels.CODES)
        colours, found = np.empty((most, 3), np.uint8), np.empty(most, np.int64)
        count = _empty(self.counts, colours, found)
        self.pixels = 0
        codes = encode(colours[:count])
        order = np.argsort(codes)
        return codes[order], found[order]


def _words(flat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Every four bytes as a number, the first byte the lowest."""
    return flat.reshape(-1).view("<u4").astype(np.uint32, copy=False)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _count_rgb(words, counts):  # type: ignore
    """Add pixels, four in each three of the words, to counts."""
    one, colour = np.uint32(1), np.uint32(0xFFFFFF)
    for k in range(words.shape[0] // 3):
        at = np.uint64(3 * k)  # unsigned: no index is looked at for being negative
        a, b, c = words[at], words[at + np.uint64(1)], words[at + np.uint64(2)]
        counts[a & colour] += one
        counts[((a >> np.uint32(24)) | (b << np.uint32(8))) & colour] += one
        counts[((b >> np.uint32(16)) | (c << np.uint32(16))) & colour] += one
        counts[c >> np.uint32(8)] += one


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _count_rgba(words, counts):  # type: ignore
    """Add pixels, one in each word, to counts, unless they are transparent."""
    for word in words:
        if word >> np.uint32(24):
            counts[word & np.uint32(0xFFFFFF)] += np.uint32(1)


@njit(cache=True, nogil=True)  # type: ignore[untyped-decorator, unused-ignore]
def _empty(counts, colours, found):  # type: ignore
    """Move what is counted into colours (n, 3) and found (n,), and leave zeros; how many it is."""
    number = 0
    for place in range(counts.shape[0]):
        if counts[place]:
            colours[number, 0] = place & 255
            colours[number, 1] = place >> 8 & 255
            colours[number, 2] = place >> 16
            found[number] = counts[place]
            counts[place] = 0
            number += 1
    return number


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
