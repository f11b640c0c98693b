"""Densities of a slide as lazy arrays: worked out for what is looked at, when it is.

Colours that have been seen once are looked up in a table; a coarser level has colours of its own,
which join the table as they come.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from . import kernels
from .decomposition import Decomposition
from .lazy import Part, read
from .palette import Palette, palette_of
from .threads import slices

_CACHE = 256 << 20  # bytes of densities that are kept: the layers of one view share them
_CHUNK = 512
_RUN = 1 << 18

Planes = npt.NDArray[np.float32]


class DensityTable:
    """Densities of colours under a fit, for any number of threads at once.

    Only the active components are held; `components` (k,) are their numbers.
    """

    def __init__(self, fit: Decomposition) -> None:
        self.fit = fit
        self.components = np.flatnonzero(fit.active)
        self._eight_bits = fit.image.pixels.dtype == np.uint8
        self._lock = threading.Lock()
        self._index = np.zeros(kernels.CODES if self._eight_bits else 0, np.int32)
        self._known = np.empty(0, np.uint32), np.empty((0, len(self.components)), np.float32)

    def planes(self, pixels: npt.NDArray[Any]) -> Planes:
        """(k, h, w) float32 of pixels (h, w, 3 or 4)."""
        if not self._eight_bits:
            return self.fit.densities_of(pixels)[self.components]
        flat = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[-1])
        out = np.empty((len(self.components), len(flat)), np.float32)
        known = self._known
        while not self._look_up(flat, *known, out):
            known = self._learn(flat)
        return out.reshape(-1, *pixels.shape[:2])

    def know(self, palette: Palette) -> None:
        """Take up all colours of a palette at once, which is sooner done than block by block."""
        if self._eight_bits and len(palette):
            self._take_up(palette)

    def _look_up(
        self,
        flat: npt.NDArray[np.uint8],
        codes: npt.NDArray[np.uint32],
        table: Planes,
        out: Planes,
    ) -> bool:
        """Fill `out` (k, n); False where a colour is not in the table."""
        which = np.arange(len(self.components))
        return all(
            kernels.look_up_pixels(flat[part], codes, self._index, table, which, out[:, part])
            for part in slices(len(flat), _RUN)
        )

    def _learn(self, flat: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint32], Planes]:
        """Take up the colours that are new; rows once given stay, so others look up meanwhile."""
        return self._take_up(palette_of(np.ascontiguousarray(flat[:, :3])))

    def _take_up(self, colours: Palette) -> tuple[npt.NDArray[np.uint32], Planes]:
        with self._lock:
            codes, table = self._known
            rows = self._index[colours.codes]
            held = (rows < len(codes)) & (len(codes) > 0)
            held[held] = codes[rows[held]] == colours.codes[held]
            new = ~held
            if not new.any():  # another thread has just taken them up
                return self._known
            fresh = self.fit.densities_of(colours.colours[new][None])[self.components, 0]
            self._known = (
                np.concatenate([codes, colours.codes[new]]),
                np.concatenate([table, np.ascontiguousarray(fresh.T)]),
            )
            self._index[colours.codes[new]] = np.arange(len(codes), len(codes) + new.sum())
            return self._known


@dataclass(frozen=True)
class _Key:
    level: int
    row: int
    column: int


class DensityLevels:
    """Blocks of densities of every level, worked out once for all components."""

    def __init__(self, levels: list[Any], fit: Decomposition) -> None:
        self.levels, self.table = levels, DensityTable(fit)
        self._lock = threading.Lock()
        self._kept: OrderedDict[_Key, Planes] = OrderedDict()
        self._bytes = 0

    def dask(self, level: int, component: int | None = None) -> Any:
        """A dask array (r, H, W) float32 of a level, or (H, W) of one component."""
        import dask.array as da

        source = _Plane(self, level, component)
        chunks = (*source.shape[:-2], *self.chunk(level))
        lazy: Any = da.from_array  # dask has no types here
        return lazy(source, chunks=chunks, asarray=False, name=False)

    def chunk(self, level: int) -> tuple[int, int]:
        """(h, w) of a level's blocks: as the image has them, if those are of a fair size."""
        array = self.levels[level]
        chunks = getattr(array, "chunks", None) or (0, 0)
        sides = [max(c) if isinstance(c, tuple) else int(c) for c in chunks[:2]]
        fair = [side if 128 <= side <= 4 * _CHUNK else _CHUNK for side in sides]
        return min(fair[0], array.shape[0]), min(fair[1], array.shape[1])

    def block(self, level: int, row: int, column: int) -> Planes:
        """(k, h, w) float32 of the active components of one block."""
        key = _Key(level, row, column)
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
                return self._kept[key]
        height, width = self.chunk(level)
        bottom = min((row + 1) * height, self.levels[level].shape[0])
        right = min((column + 1) * width, self.levels[level].shape[1])
        part = Part(row * height, bottom, column * width, right)
        planes = self.table.planes(read(self.levels[level], part))
        self._keep(key, planes)
        return planes

    def _keep(self, key: _Key, planes: Planes) -> None:
        with self._lock:
            if key not in self._kept:
                self._kept[key] = planes
                self._bytes += planes.nbytes
            while self._bytes > _CACHE:
                self._bytes -= self._kept.popitem(last=False)[1].nbytes


class _Plane:
    """What dask slices: densities of a level, of all components or of one."""

    dtype = np.dtype(np.float32)

    def __init__(self, owner: DensityLevels, level: int, component: int | None) -> None:
        self.owner, self.level, self.component = owner, level, component
        shape = owner.levels[level].shape
        first = () if component is not None else (len(owner.table.fit.active),)
        self.shape = (*first, int(shape[0]), int(shape[1]))
        self.ndim = len(self.shape)

    def __getitem__(self, index: Any) -> Planes:
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *(slice(None),) * (self.ndim - len(index)))
        *which, rows, columns = index
        top, bottom, _ = rows.indices(self.shape[-2])
        left, right, _ = columns.indices(self.shape[-1])
        planes = self._region(top, max(bottom, top), left, max(right, left))
        steps = planes[:, :: rows.step or 1, :: columns.step or 1]
        return np.asarray(steps[0] if self.component is not None else steps[tuple(which)])

    def _region(self, top: int, bottom: int, left: int, right: int) -> Planes:
        """(r or 1, h, w) put together from blocks."""
        owner, chosen = self.owner, self._places()
        count = 1 if self.component is not None else self.shape[0]
        out = np.zeros((count, bottom - top, right - left), np.float32)
        height, width = owner.chunk(self.level)
        for row in range(top // height, -(-bottom // height)):
            for column in range(left // width, -(-right // width)):
                y1, x1 = max(row * height, top), max(column * width, left)
                y2, x2 = min((row + 1) * height, bottom), min((column + 1) * width, right)
                block = owner.block(self.level, row, column)[
                    :, y1 - row * height : y2 - row * height, x1 - column * width :
                ][:, :, : x2 - x1]
                for place, held in chosen:
                    out[place, y1 - top : y2 - top, x1 - left : x2 - left] = block[held]
        return out

    def _places(self) -> list[tuple[int, int]]:
        """Planes of the result, and which of the held components each is; others are zero."""
        active = self.owner.table.components.tolist()
        if self.component is None:
            return [(k, i) for i, k in enumerate(active)]
        return [(0, active.index(self.component))] if self.component in active else []
