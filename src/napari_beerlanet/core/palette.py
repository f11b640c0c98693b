"""Distinct colours of an image and how often each occurs.

A pixel's densities depend on nothing but its colour, so an image of p pixels with u distinct
colours is u weighted columns for the solver. A palette is a histogram, and histograms add up:
tiles of a slide are counted one by one, in any order and on any machine, and merged.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .threads import run_all, slices, thread_count

_SPARSE_ENTRY = 12  # bytes: uint32 code and int64 count
_DENSE_BYTES = 8 * kernels.CODES
_COUNT_TABLES = 4  # at most: each is 64 MB of address space
_RUN = 1 << 18  # pixels that a look-up task takes at a time
_SAMPLE = 1 << 16
_UNKNOWN = "The pixels have colours that the palette does not hold."


@dataclass(frozen=True)
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

    def rows(self, pixels: npt.NDArray[Any]) -> npt.NDArray[np.int64]:
        """Which row of the palette each of the (n, ≥3) pixels is. Unknown colours are refused."""
        codes = encode(pixels)
        rows = np.searchsorted(self.codes, codes)
        rows[rows == len(self)] = 0
        if len(self) == 0 or not np.array_equal(self.codes[rows], codes):
            raise KeyError(_UNKNOWN)
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
        which = np.flatnonzero(table.any(axis=0))
        planes = np.zeros((table.shape[1], len(pixels)), np.float32)
        if self.dtype == np.uint8:
            index = _filled_index(self.codes)
            known = run_all(
                [
                    lambda part=part: kernels.look_up_pixels(  # type: ignore[misc]
                        pixels[part], self.codes, index, table, which, planes[:, part]
                    )
                    for part in slices(len(pixels), _RUN)
                ]
            )
            _spare_index.append(index)
            if not all(known):
                raise KeyError(_UNKNOWN)
        else:
            for part in slices(len(pixels), _RUN):
                planes[:, part] = table[self.rows(pixels[part])].T
        return planes


def palette_of(pixels: npt.NDArray[Any]) -> Palette:
    """The palette of (n, 3 or 4) uint8 or uint16 pixels. Fully transparent pixels count zero."""
    codes, counts = _count(pixels)
    if pixels.shape[1] == 4:
        hidden = pixels[pixels[:, 3] == 0]
        if len(hidden):
            unseen = np.setdiff1d(encode(hidden), codes)
            codes, counts = kernels.merge_counts(
                codes, counts, unseen, np.zeros(len(unseen), np.int64)
            )
    return Palette(codes, counts, pixels.dtype)


def palette_pays(pixels: npt.NDArray[Any]) -> bool:
    """Whether distinct colours are so few that solving for them beats solving for pixels."""
    if pixels.dtype == np.uint8:
        return True
    if pixels.dtype != np.uint16:
        return False
    sample = pixels[:: max(1, len(pixels) // _SAMPLE)]
    return len(np.unique(encode(sample))) < len(sample) / 2


class Histogram:
    """Counts of colours that grow tile by tile.

    Held sparse (codes and counts) or, for 8 bits once that is smaller, as a table of all colours.
    """

    def __init__(self, dtype: npt.DTypeLike = np.uint8) -> None:
        self.dtype = np.dtype(dtype)
        if self.dtype not in (np.uint8, np.uint16):
            raise ValueError(f"A histogram counts uint8 or uint16 colours, not {self.dtype}.")
        self._codes = np.empty(0, _code_type(self.dtype))
        self._counts = np.empty(0, np.int64)
        self._table: npt.NDArray[np.int64] | None = None

    @property
    def is_dense(self) -> bool:
        """Whether it is held as a table of all colours."""
        return self._table is not None

    def add(self, tile: npt.NDArray[Any]) -> Histogram:
        """Count the pixels of a (…, 3 or 4) tile; fully transparent ones do not count."""
        if tile.dtype != self.dtype:
            raise ValueError(f"This histogram counts {self.dtype} colours, not {tile.dtype}.")
        pixels = np.ascontiguousarray(tile).reshape(-1, tile.shape[-1])
        return self._put(*_count(pixels))

    def merge(self, other: Histogram) -> Histogram:
        """Add another histogram's counts to this one."""
        if other.dtype != self.dtype:
            raise ValueError(f"A {other.dtype} histogram does not add to a {self.dtype} one.")
        return self._put(*other._sparse())

    def palette(self) -> Palette:
        """The colours counted so far."""
        return Palette(*self._sparse(), self.dtype)

    def _put(self, codes: npt.NDArray[Any], counts: npt.NDArray[np.int64]) -> Histogram:
        if self._table is not None:
            self._table[codes] += counts
            return self
        self._codes, self._counts = kernels.merge_counts(self._codes, self._counts, codes, counts)
        if self.dtype == np.uint8 and len(self._codes) * _SPARSE_ENTRY > _DENSE_BYTES:
            self._table = np.zeros(kernels.CODES, np.int64)
            self._table[self._codes] = self._counts
            self._codes, self._counts = self._codes[:0], self._counts[:0]
        return self

    def _sparse(self) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
        if self._table is None:
            return self._codes, self._counts
        codes = np.flatnonzero(self._table).astype(np.uint32)
        return codes, self._table[codes]


def encode(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Codes (n,) of (n, ≥3) pixels: Morton codes uint32 of 8 bits, 48-bit keys uint64 of 16."""
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
    kernels.decode_pixels(np.ascontiguousarray(codes, dtype=np.uint32), colours)
    return colours


def _filled_index(codes: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    """(2**24,) int32: the row of each of the codes, and anything elsewhere."""
    try:
        index = _spare_index.pop()
    except IndexError:
        index = np.empty(kernels.CODES, np.int32)
    index[codes] = np.arange(len(codes), dtype=np.int32)
    return index


def _count(pixels: npt.NDArray[Any]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    if pixels.dtype != np.uint8:
        seen = pixels if pixels.shape[1] == 3 else pixels[pixels[:, 3] > 0]
        codes, counts = np.unique(encode(seen), return_counts=True)
        return codes, counts.astype(np.int64)
    tables = min(_COUNT_TABLES, thread_count(), 1 + len(pixels) // (4 * _RUN))
    step = min(-(-max(len(pixels), 1) // tables), 1 << 31)  # a table counts to 2**32
    parts = run_all(
        [lambda part=part: _count_bytes(pixels[part]) for part in slices(len(pixels), step)]  # type: ignore[misc]
    )
    codes, counts = np.empty(0, np.uint32), np.empty(0, np.int64)
    for more in parts:
        codes, counts = kernels.merge_counts(codes, counts, *more)
    return codes, counts


def _count_bytes(pixels: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    tables = _take_tables()
    kernels.count_pixels(pixels, pixels.shape[1] == 4, *tables)
    found = kernels.distinct(*tables)
    _spare.append(tables)
    return found  # type: ignore[no-any-return]


# Tables are kept for the next image: only pages that were ever touched take memory, and not having
# to get them from the system again halves the time of a small image.
_spare: deque[tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]] = deque(maxlen=_COUNT_TABLES)
_spare_index: deque[npt.NDArray[np.int32]] = deque(maxlen=_COUNT_TABLES)


def _take_tables() -> tuple[npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Zeroed tables to count in, one entry per colour and one per 64 colours."""
    try:
        return _spare.pop()
    except IndexError:
        return np.zeros(kernels.CODES, np.uint32), np.zeros(kernels.CODES >> 6, np.uint8)


def _code_type(dtype: np.dtype[Any]) -> type[np.unsignedinteger[Any]]:
    return np.uint32 if dtype == np.uint8 else np.uint64
