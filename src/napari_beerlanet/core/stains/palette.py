"""Palettes: the distinct colours of an image and how often each occurs.

A pixel's densities depend on nothing but its colour, so an image of p pixels with u distinct
colours is u weighted columns for the solver. A palette is a histogram, and histograms add up:
tiles of a slide are counted one by one, in any order and by any number of threads, and merged.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from queue import LifoQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import (
    chunk_slices,
    in_numpy,
    map_chunks,
    map_threads,
    thread_count,
)
from napari_beerlanet.core.images.pyramid import read_region
from napari_beerlanet.core.stains.solver import kernels

TileCallback = Callable[[npt.NDArray[Any], Rectangle], None]
PixelMask = Callable[[Rectangle], npt.NDArray[np.bool_]]

_PIXELS_PER_TASK = 1 << 18
_PIXELS_PER_PAGE = 1 << 19  # as float32 in a large page of memory, best touched by one thread
_SAMPLE_PIXELS = 1 << 16  # by which `palette_pays` judges
_MAX_TABLES = 4  # each is 64 MB of address space
_THREADS_PER_TABLE = 4
_MAX_TABLE_PIXELS = 1 << 31  # after which a table of uint32 is drained
_UNKNOWN_COLOUR = "The pixels have colours that the palette does not hold."

# Tables are kept for the next image: only pages that were ever touched take memory, and not having
# to get them from the system again halves the time of a small image.
_spare_tables: deque[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]] = deque(
    maxlen=_MAX_TABLES
)
_spare_index: deque[npt.NDArray[np.int32]] = deque(maxlen=_MAX_TABLES)


@dataclass(frozen=True, eq=False)
class Palette:
    """u distinct colours.

    `colours` (u, 3) uint8 or uint16, in ascending order of `codes`; `counts` (u,) int64.
    """

    codes: npt.NDArray[Any]
    counts: npt.NDArray[np.int64]
    dtype: np.dtype[Any]

    def __len__(self) -> int:
        return len(self.codes)

    @property
    def colours(self) -> npt.NDArray[Any]:
        """(u, 3) in the image's own dtype."""
        return decode(self.codes, self.dtype)

    def __add__(self, other: Palette) -> Palette:
        """The colours of both and the sums of their counts."""
        if other.dtype != self.dtype:
            raise ValueError(f"A {other.dtype} palette does not add to a {self.dtype} one.")
        codes, counts = kernels.merge_counts(self.codes, self.counts, other.codes, other.counts)
        return Palette(codes, counts, self.dtype)

    def rows(self, pixels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Which row of the palette each of the (n, ≥3) pixels is. Unknown colours are refused."""
        codes = encode(pixels)
        rows = np.searchsorted(self.codes, codes)
        rows[rows == len(self)] = 0
        if len(self) == 0 or not np.array_equal(self.codes[rows], codes):
            raise KeyError(_UNKNOWN_COLOUR)
        return rows

    def look_up(
        self, table: npt.NDArray[np.float32], pixels: npt.NDArray[Any]
    ) -> npt.NDArray[np.float32]:
        """(r, n) float32 planes from `table` (u, r): what each pixel's colour has there.

        Colours that the palette does not hold are refused. A column of zeros is not looked up:
        its plane is memory that is never touched, which costs nothing.
        """
        if pixels.dtype != self.dtype or len(table) != len(self):
            raise ValueError(f"A palette of {len(self)} {self.dtype} colours does not fit these.")
        which = _live_columns(table)
        make = np.empty if len(which) == table.shape[1] else np.zeros
        planes = make((table.shape[1], len(pixels)), np.float32)
        if self.dtype == np.uint8 and not in_numpy():
            index = _row_index(self.codes)

            def look_up(part: slice) -> bool:
                given = pixels[part], self.codes, index, table, which, planes, part.start
                return bool(kernels.look_up_pixels(*given))

            share = max(-(-len(pixels) // thread_count()), 1)
            complete = map_chunks(look_up, len(pixels), min(share, _PIXELS_PER_PAGE))
            _spare_index.append(index)
            if not all(complete):
                raise KeyError(_UNKNOWN_COLOUR)
        else:
            for part in chunk_slices(len(pixels), _PIXELS_PER_TASK):
                planes[:, part] = table[self.rows(pixels[part])].T
        return planes

    def replace_colours(
        self, table: npt.NDArray[Any], pixels: npt.NDArray[Any], out: npt.NDArray[Any]
    ) -> None:
        """Write to `out` (n, ≥3) the colour of `table` (u, 3) for each of the (n, ≥3) pixels.

        All are of the palette's dtype; further channels of `out` stay. Colours that the palette
        does not hold are refused.
        """
        if pixels.dtype != self.dtype or len(table) != len(self):
            raise ValueError(f"A palette of {len(self)} {self.dtype} colours does not fit these.")
        if self.dtype != np.uint8:
            for part in chunk_slices(len(pixels), _PIXELS_PER_TASK):
                out[part, :3] = table[self.rows(pixels[part])]
            return
        index = _row_index(self.codes)

        def replace(part: slice) -> bool:
            given = pixels[part], self.codes, index, table
            return bool(kernels.replace_pixels(*given, out[part]))

        complete = map_chunks(replace, len(pixels), _PIXELS_PER_TASK)
        _spare_index.append(index)
        if not all(complete):
            raise KeyError(_UNKNOWN_COLOUR)


def palette_of(pixels: npt.NDArray[Any]) -> Palette:
    """The palette of (n, 3 or 4) uint8 or uint16 pixels. Fully transparent pixels count zero."""
    codes, counts = _distinct_codes(pixels)
    if pixels.shape[1] == 4:
        hidden = pixels[pixels[:, 3] == 0]
        codes, counts = _with_hidden(codes, counts, encode(hidden))
    return Palette(codes, counts, pixels.dtype)


def palette_pays(pixels: npt.NDArray[Any]) -> bool:
    """Whether distinct colours are so few that solving for them beats solving for pixels."""
    if pixels.dtype == np.uint8:
        return True
    if pixels.dtype != np.uint16:
        return False
    sample = pixels[:: max(1, len(pixels) // _SAMPLE_PIXELS)]
    return len(np.unique(encode(sample))) < len(sample) / 2


def count_colours(
    level: Any,
    parts: Sequence[Rectangle],
    mask: PixelMask | None = None,
    on_tile: TileCallback | None = None,
    report: Report | None = None,
    threads: int | None = None,
) -> Palette:
    """The palette of some parts of a level (H, W, 3 or 4) of 8 bits.

    `mask(part)` says which pixels count; `on_tile(pixels, part)` is called with every part, by
    several threads. `report` is called, and may raise `Cancelled`, in the caller's thread.
    """
    counter = ColourCounter()

    def work(part: Rectangle) -> None:
        pixels = read_region(level, part)
        counter.add(pixels, None if mask is None else mask(part))
        if on_tile is not None:
            on_tile(pixels, part)

    report_progress(report, 0, len(parts), "counting colours")
    for done, _ in enumerate(map_threads(work, parts, threads), start=1):
        report_progress(report, done, len(parts), "counting colours")
    return counter.palette()


class ColourCounter:
    """Counts of 8-bit colours, added to by any number of threads."""

    def __init__(self) -> None:
        self._codes = np.empty(0, np.uint32)
        self._counts = np.empty(0, np.int64)
        self._transparent: npt.NDArray[np.bool_] | None = None
        self._lock = threading.Lock()
        self._tables: LifoQueue[_CountTable] = LifoQueue()
        # Counting is quick beside reading, and of fewer tables more is in the cache.
        for _ in range(min(_MAX_TABLES, max(thread_count() // _THREADS_PER_TABLE, 1))):
            self._tables.put(_CountTable())

    def add(self, pixels: npt.NDArray[np.uint8], keep: npt.NDArray[np.bool_] | None = None) -> None:
        """Count (h, w, 3 or 4) pixels, or those of a mask (h, w); transparent ones are noted."""
        if keep is not None and not keep.all():
            pixels = pixels[keep]
        flat = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[-1])
        alpha = flat.shape[1] == 4
        table = self._tables.get()
        try:
            table.add(flat, alpha)
            if table.pixels > _MAX_TABLE_PIXELS:
                self._drain(table)
        finally:
            self._tables.put(table)
        if alpha:
            self._mark_transparent(flat)

    def palette(self) -> Palette:
        """What was counted; colours of transparent pixels alone have a count of zero."""
        tables = [self._tables.get() for _ in range(self._tables.qsize())]
        for table in tables:
            self._drain(table)
            self._tables.put(table)
        codes, counts = self._codes, self._counts
        if self._transparent is not None:
            hidden = np.flatnonzero(self._transparent).astype(np.uint32)
            codes, counts = _with_hidden(codes, counts, hidden)
        return Palette(codes, counts, np.dtype(np.uint8))

    def _drain(self, table: _CountTable) -> None:
        drained = table.drain()
        with self._lock:
            self._codes, self._counts = kernels.merge_counts(self._codes, self._counts, *drained)

    def _mark_transparent(self, flat: npt.NDArray[np.uint8]) -> None:
        hidden = flat[flat[:, 3] == 0]
        if len(hidden):
            with self._lock:
                if self._transparent is None:
                    self._transparent = np.zeros(kernels.CODE_COUNT, bool)
                self._transparent[encode(hidden)] = True


class _CountTable:
    """Counts of all colours, as `kernels.count_rgb_words` numbers them.

    Only pages that are touched take memory.
    """

    def __init__(self) -> None:
        self.table = np.zeros(kernels.CODE_COUNT, np.uint32)
        self.pixels = 0

    def add(self, flat: npt.NDArray[np.uint8], alpha: bool) -> None:
        """Count (n, 3 or 4) contiguous pixels."""
        self.pixels += len(flat)
        if alpha:
            kernels.count_rgba_words(_as_words(flat), self.table)
            return
        whole = len(flat) // 4 * 4
        kernels.count_rgb_words(_as_words(flat[:whole]), self.table)
        rest = flat[whole:].astype(np.int64)
        np.add.at(self.table, rest @ (1, 256, 65536), np.uint32(1))

    def drain(self) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]:
        """A palette's codes, ascending, and counts; the table is empty afterwards."""
        room = min(self.pixels, kernels.CODE_COUNT)
        colours, counts = np.empty((room, 3), np.uint8), np.empty(room, np.int64)
        number = kernels.drain_colours(self.table, colours, counts)
        self.pixels = 0
        codes = encode(colours[:number])
        order = np.argsort(codes)
        return codes[order], counts[order]


def distinct_rows(
    pixels: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.int32]]:
    """Distinct codes (u,) of (n, 3) pixels of 8 bits, ascending, and each pixel's row (n,)."""
    if in_numpy():
        codes, rows = np.unique(encode(pixels), return_inverse=True)
        return codes, rows.reshape(-1).astype(np.int32)
    codes, _, rows = kernels.unique_codes(encode(pixels))
    return codes, rows


def look_up_rows(
    rows: npt.NDArray[np.int32], table: npt.NDArray[np.float32]
) -> npt.NDArray[np.float32]:
    """(r, n) float32 planes from `table` (u, r): what rows (n,) of it hold."""
    planes = np.empty((table.shape[1], len(rows)), np.float32)
    if in_numpy():
        planes[:] = table[rows].T
    else:
        kernels.look_up_rows(rows, table, np.arange(len(planes)), planes, 0)
    return planes


def encode(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Codes (n,) of (n, ≥3) pixels: Morton codes uint32 of 8 bits, 48-bit keys uint64 of 16."""
    if pixels.dtype == np.uint8 and in_numpy():
        spread: list[npt.NDArray[np.uint32]] = [kernels.SPREAD_BITS[pixels[:, k]] for k in range(3)]
        return (spread[0] << np.uint32(2)) | (spread[1] << np.uint32(1)) | spread[2]
    if pixels.dtype == np.uint8:
        codes = np.empty(len(pixels), np.uint32)
        kernels.encode_pixels(np.ascontiguousarray(pixels), codes)
        return codes
    wide = pixels[:, :3].astype(np.uint64)
    return (wide[:, 0] << np.uint64(32)) | (wide[:, 1] << np.uint64(16)) | wide[:, 2]


def decode(codes: npt.NDArray[Any], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """Colours (u, 3) of codes (u,): the inverse of `encode`."""
    if np.dtype(dtype) == np.uint16:
        shifts = np.array([32, 16, 0], np.uint64)
        return ((codes[:, None] >> shifts) & np.uint64(0xFFFF)).astype(np.uint16)
    colours = np.empty((len(codes), 3), np.uint8)
    if in_numpy():
        bits = np.arange(8, dtype=np.uint32)
        for channel in range(3):
            spread = codes[:, None] >> (3 * bits + np.uint32(2 - channel))
            colours[:, channel] = ((spread & 1) << bits).sum(1)
        return colours
    kernels.decode_pixels(np.ascontiguousarray(codes, dtype=np.uint32), colours)
    return colours


def _with_hidden(
    codes: npt.NDArray[Any], counts: npt.NDArray[np.int64], hidden: npt.NDArray[Any]
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Codes of transparent pixels join with a count of zero, unless they occur elsewhere."""
    unseen = np.setdiff1d(hidden, codes)
    if not len(unseen):
        return codes, counts
    if in_numpy():
        every = np.concatenate([codes, unseen])
        order = np.argsort(every)
        return every[order], np.concatenate([counts, np.zeros(len(unseen), np.int64)])[order]
    nothing = np.zeros(len(unseen), np.int64)
    return kernels.merge_counts(codes, counts, unseen, nothing)  # type: ignore[no-any-return]


def _distinct_codes(pixels: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    if pixels.dtype != np.uint8 or in_numpy():
        seen = pixels if pixels.shape[1] == 3 else pixels[pixels[:, 3] > 0]
        codes, counts = np.unique(encode(seen), return_counts=True)
        return codes, counts.astype(np.int64)
    tables = min(_MAX_TABLES, thread_count(), 1 + len(pixels) // (4 * _PIXELS_PER_TASK))
    step = min(-(-max(len(pixels), 1) // tables), 1 << 31)  # a table counts to 2**32
    parts = map_chunks(lambda part: _distinct_uint8_codes(pixels[part]), len(pixels), step)
    if not parts:
        return np.empty(0, np.uint32), np.empty(0, np.int64)
    codes, counts = parts[0]
    for more in parts[1:]:
        codes, counts = kernels.merge_counts(codes, counts, *more)
    return codes, counts


def _distinct_uint8_codes(
    pixels: npt.NDArray[np.uint8],
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    tables = _get_tables()
    kernels.count_pixels(pixels, pixels.shape[1] == 4, *tables)
    distinct = kernels.drain_counts(*tables)
    _spare_tables.append(tables)
    return distinct  # type: ignore[no-any-return]


def _get_tables() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Zeroed tables to count in, one entry per colour and one per 64 colours."""
    try:
        return _spare_tables.pop()
    except IndexError:
        return np.zeros(kernels.CODE_COUNT, np.uint32), np.zeros(kernels.CODE_COUNT >> 6, np.uint8)


def _live_columns(table: npt.NDArray[np.float32]) -> npt.NDArray[np.intp]:
    """Columns of a table (u, r) that are not zero throughout, ascending."""
    u, r = table.shape
    wide = u // 64 * 64  # NumPy reduces long rows many times as fast as short ones
    live = table[wide:].any(axis=0)
    live |= table[:wide].reshape(-1, 64 * r).any(axis=0).reshape(64, r).any(axis=0)
    return np.flatnonzero(live)


def _row_index(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """(2**24,) int32: the row of each of the codes, and anything elsewhere."""
    try:
        index = _spare_index.pop()
    except IndexError:
        index = np.empty(kernels.CODE_COUNT, np.int32)
    index[codes] = np.arange(len(codes), dtype=np.int32)
    return index


def _as_words(flat: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint32]:
    """Every four bytes as a number, the first byte the lowest."""
    return flat.reshape(-1).view("<u4").astype(np.uint32, copy=False)
