"""A slide as the detector sees an image: 8 bit, RGB, sliced as if it were in memory."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from .colourcount import count_colours
from .images import to_bytes
from .lazy import Part, parts_of, put_every, read, thumbnail
from .palette import Palette
from .progress import Report
from .stainfit import GREY

_SMALL = 4096  # pixels of the longer side of what is kept in memory

Pixels = npt.NDArray[np.uint8]


class LazyPixels:
    """(H, W, 3) uint8 of the finest of some `levels`; transparent pixels are padding's grey.

    Slices with steps, for a look at the whole, come from a small copy in memory: of an image of up
    to 4096 pixels that is the image itself.
    """

    dtype, ndim = np.dtype(np.uint8), 3

    def __init__(self, levels: Sequence[Any]) -> None:
        self._levels = levels
        self.shape = (int(levels[0].shape[0]), int(levels[0].shape[1]), 3)
        chunks = getattr(levels[0], "chunks", None)
        self.chunks = None if chunks is None else (*chunks[:2], 3)
        self._step = -(-max(self.shape) // _SMALL)
        self._small: Pixels | None = None

    def __getitem__(self, index: Any) -> Pixels:
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *(slice(None),) * (3 - len(index)))
        rows, columns, channels = index
        if (rows.step or 1) > 1 or (columns.step or 1) > 1 or self._step == 1:
            return np.asarray(self._from_small(rows, columns)[..., channels])
        top, bottom, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1])
        return np.asarray(self._read(Part(top, bottom, left, right))[..., channels])

    def palette(self, report: Report | None = None) -> Palette:
        """The colours of all pixels."""
        parts = parts_of(self)
        if self._small is not None or len(self._levels) > 1:
            return count_colours(self, parts, None, None, report)
        size = (-(-n // self._step) for n in self.shape[:2])
        small = np.zeros((*size, 3), np.uint8)

        def see(pixels: npt.NDArray[Any], part: Part) -> None:
            put_every(small, pixels, part, self._step)

        found = count_colours(_Whole(self), parts, None, see, report)
        self._small = small
        return found

    def _read(self, part: Part) -> Pixels:
        return _opaque(to_bytes(read(self._levels[0], part)))

    def _from_small(self, rows: slice, columns: slice) -> Pixels:
        """Pixels at a slice's places, or those of the small copy that are nearest."""
        if self._small is None:
            self._small = _opaque(to_bytes(thumbnail(self._levels, _SMALL)))
        high, wide = self._small.shape[:2]
        y = np.arange(*rows.indices(self.shape[0])) * high // self.shape[0]
        x = np.arange(*columns.indices(self.shape[1])) * wide // self.shape[1]
        if self._step == 1:
            return np.asarray(self._small[rows, columns])
        return np.asarray(self._small[y[:, None], x])


class _Whole:
    """The same, always read from the finest level."""

    def __init__(self, pixels: LazyPixels) -> None:
        self._pixels = pixels
        self.shape, self.dtype, self.chunks = pixels.shape, pixels.dtype, pixels.chunks

    def __getitem__(self, index: Any) -> Pixels:
        rows, columns = index[:2]
        return self._pixels._read(Part(rows.start, rows.stop, columns.start, columns.stop))


def _opaque(pixels: Pixels) -> Pixels:
    if pixels.shape[-1] == 3:
        return pixels
    return np.where(pixels[..., 3:] > 0, pixels[..., :3], np.uint8(GREY))
