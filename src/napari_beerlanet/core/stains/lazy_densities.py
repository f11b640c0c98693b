"""Lazy densities, reconstructions and residuals: dask arrays computed block by block on demand.

Blocks of densities are cached for the layers of all components. In a pyramid of 8 bits, colours
that have been seen once are looked up in a table; a coarser level has colours of its own, which
join the table as they come.
"""

from __future__ import annotations

import threading
import uuid
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import chunk_slices
from napari_beerlanet.core.images.pyramid import read_region
from napari_beerlanet.core.images.rgb import clip_floats
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.palette import Palette, palette_of
from napari_beerlanet.core.stains.solver import kernels

_MAX_CACHE_BYTES = 256 << 20  # of densities: the layers of one view share them
_CHUNK_SIDE = 512
_PIXELS_PER_LOOK_UP = 1 << 18
_MAP_CHUNK_SIDE = 1024

Planes = npt.NDArray[np.float32]


class DensityTable:
    """Densities of colours under a fit, for any number of threads at once.

    Only the active components are held; `components` (k,) are their numbers.
    """

    def __init__(self, fit: Decomposition) -> None:
        self.fit = fit
        self.components = np.flatnonzero(fit.active)
        self._is_uint8 = fit.image.pixels.dtype == np.uint8
        self._lock = threading.Lock()
        self._index = np.zeros(kernels.CODE_COUNT if self._is_uint8 else 0, np.int32)
        self._table = np.empty(0, np.uint32), np.empty((0, len(self.components)), np.float32)

    def planes(self, pixels: npt.NDArray[Any]) -> Planes:
        """(k, h, w) float32 of pixels (h, w, 3 or 4)."""
        if not self._is_uint8:
            return self.fit.densities_of(pixels)[self.components]
        flat = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[-1])
        out = np.empty((len(self.components), len(flat)), np.float32)
        table = self._table
        while not self._look_up(flat, *table, out):
            table = self._add_colours_of(flat)
        return out.reshape(-1, *pixels.shape[:2])

    def add_palette(self, palette: Palette) -> None:
        """Add all colours of a palette at once, which is faster than block by block."""
        if self._is_uint8 and len(palette):
            self._add_colours(palette)

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
            kernels.look_up_pixels(flat[part], codes, self._index, table, which, out, part.start)
            for part in chunk_slices(len(flat), _PIXELS_PER_LOOK_UP)
        )

    def _add_colours_of(self, flat: npt.NDArray[np.uint8]) -> tuple[npt.NDArray[np.uint32], Planes]:
        """Add the colours that are new; rows once given stay, so others look up meanwhile."""
        return self._add_colours(palette_of(np.ascontiguousarray(flat[:, :3])))

    def _add_colours(self, colours: Palette) -> tuple[npt.NDArray[np.uint32], Planes]:
        with self._lock:
            codes, table = self._table
            rows = self._index[colours.codes]
            held = (rows < len(codes)) & (len(codes) > 0)
            held[held] = codes[rows[held]] == colours.codes[held]
            new = ~held
            if not new.any():  # another thread has just added them
                return self._table
            fresh = self.fit.densities_of(colours.colours[new][None])[self.components, 0]
            self._table = (
                np.concatenate([codes, colours.codes[new]]),
                np.concatenate([table, np.ascontiguousarray(fresh.T)]),
            )
            self._index[colours.codes[new]] = np.arange(len(codes), len(codes) + new.sum())
            return self._table


class BlockCache:
    """The last used blocks of densities, for any number of threads at once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._blocks: OrderedDict[Any, Planes] = OrderedDict()
        self._under_way: dict[Any, Future[Planes]] = {}
        self._bytes = 0

    def get(self, key: Any, compute: Callable[[], Planes]) -> Planes:
        """The block of a key; computed, by one thread, where it is not there, or no longer."""
        with self._lock:
            if key in self._blocks:
                self._blocks.move_to_end(key)
                return self._blocks[key]
            others = self._under_way.get(key)
            if others is None:
                mine = self._under_way[key] = Future[Planes]()
        if others is not None:
            return others.result()
        try:
            mine.set_result(planes := compute())
        except BaseException as error:
            mine.set_exception(error)
            raise
        finally:
            with self._lock:
                del self._under_way[key]
                if not mine.exception():
                    self._blocks[key] = planes
                    self._bytes += planes.nbytes
                while self._bytes > _MAX_CACHE_BYTES:
                    self._bytes -= self._blocks.popitem(last=False)[1].nbytes
        return planes


class DensityPyramid:
    """Blocks of densities of every level, computed once for all components."""

    def __init__(self, levels: list[Any], fit: Decomposition) -> None:
        self.levels, self.table = levels, DensityTable(fit)
        self._cache = BlockCache()

    def dask(self, level: int, component: int | None = None) -> Any:
        """A dask array (r, H, W) float32 of a level, or (H, W) of one component."""
        import dask.array as da

        source = _LazyPlane(self, level, component)
        chunks = (*source.shape[:-2], *self.chunk(level))
        lazy: Any = da.from_array  # dask has no types here
        return lazy(source, chunks=chunks, asarray=False, name=False)

    def chunk(self, level: int) -> tuple[int, int]:
        """(h, w) of a level's blocks: as the image has them, if those are of a fair size."""
        array = self.levels[level]
        chunks = getattr(array, "chunks", None) or (0, 0)
        sides = [max(c) if isinstance(c, tuple) else int(c) for c in chunks[:2]]
        fair = [side if 128 <= side <= 4 * _CHUNK_SIDE else _CHUNK_SIDE for side in sides]
        return min(fair[0], array.shape[0]), min(fair[1], array.shape[1])

    def block(self, level: int, row: int, column: int) -> Planes:
        """(k, h, w) float32 of the active components of one block."""
        return self._cache.get((level, row, column), lambda: self._compute(level, row, column))

    def _compute(self, level: int, row: int, column: int) -> Planes:
        height, width = self.chunk(level)
        bottom = min((row + 1) * height, self.levels[level].shape[0])
        right = min((column + 1) * width, self.levels[level].shape[1])
        part = Rectangle.from_edges(column * width, row * height, right, bottom)
        return self.table.planes(read_region(self.levels[level], part))


class _LazyPlane:
    """What dask slices: densities of a level, of all components or of one."""

    dtype = np.dtype(np.float32)

    def __init__(self, owner: DensityPyramid, level: int, component: int | None) -> None:
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
        owner, chosen = self.owner, self._held_components()
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

    def _held_components(self) -> list[tuple[int, int]]:
        """Planes of the result, and which of the held components each is; others are zero."""
        active = self.owner.table.components.tolist()
        if self.component is None:
            return [(k, i) for i, k in enumerate(active)]
        return [(0, active.index(self.component))] if self.component in active else []


def lazy_densities(levels: Sequence[Any], fit: Decomposition) -> list[list[Any]]:
    """Densities of every component at every level: dask arrays (…, H, W) float32.

    `levels` (…, H, W, 3 or 4) may have leading axes, as stacks do, and be of any type.
    """
    cache = BlockCache()

    def one(component: int) -> list[Any]:
        def work(pixels: npt.NDArray[Any], key: Any) -> npt.NDArray[Any]:
            planes = cache.get(key, lambda: fit.densities_of(clip_floats(pixels)))
            return np.asarray(planes[component])

        return _map_levels(levels, work, np.dtype(np.float32))

    return [one(component) for component in range(len(fit.active))]


def lazy_reconstruction(
    levels: Sequence[Any], fit: Decomposition, components: Sequence[int]
) -> list[Any]:
    """The image from some components at every level: dask arrays (…, H, W, 3) in its own dtype."""
    keep = list(components)

    def work(pixels: npt.NDArray[Any], key: Any) -> npt.NDArray[Any]:
        return fit.reconstruct_of(clip_floats(pixels), keep)

    return _map_levels(levels, work, np.dtype(levels[0].dtype), colours=True)


def lazy_residual(levels: Sequence[Any], fit: Decomposition) -> list[Any]:
    """Distance of model and image over the three channels, in OD: dask arrays (…, H, W) float32."""

    def work(pixels: npt.NDArray[Any], key: Any) -> npt.NDArray[Any]:
        return np.asarray(np.linalg.norm(fit.residual_of(clip_floats(pixels)), axis=-1))

    return _map_levels(levels, work, np.dtype(np.float32))


def _map_levels(
    levels: Sequence[Any],
    work: Callable[[npt.NDArray[Any], Any], npt.NDArray[Any]],
    dtype: np.dtype[Any],
    colours: bool = False,
) -> list[Any]:
    """`work(pixels, key)` on every plane of every block of every level, lazily."""
    return [_map_level(k, level, work, dtype, colours) for k, level in enumerate(levels)]


def _map_level(k: int, level: Any, work: Any, dtype: np.dtype[Any], colours: bool) -> Any:
    import dask.array as da

    def on_block(block: npt.NDArray[Any], block_id: Any = None) -> npt.NDArray[Any]:
        tail = (3,) if colours else ()
        out = np.empty((*block.shape[:-1], *tail), dtype)
        for plane in np.ndindex(block.shape[:-3]):
            out[plane] = work(block[plane], (k, block_id, plane))
        return out

    level = _with_whole_channels(level)
    last = level.ndim - 1
    shape = {"chunks": (*level.chunks[:-1], (3,))} if colours else {"drop_axis": last}
    ndim = level.ndim if colours else last
    name = f"beerlanet-{uuid.uuid4().hex}"  # or dask would hash every array involved
    meta = np.empty((0,) * ndim, dtype)
    lazy: Any = da.map_blocks  # dask has no types here
    return lazy(on_block, level, dtype=dtype, meta=meta, name=name, **shape)


def _with_whole_channels(array: Any) -> Any:
    """The array (…, H, W, 3 or 4) as dask blocks, each with all channels."""
    import dask.array as da

    if hasattr(array, "rechunk"):
        return array.rechunk({array.ndim - 1: -1})
    leading = (1,) * (array.ndim - 3)
    sides = tuple(min(_MAP_CHUNK_SIDE, n) for n in array.shape[-3:-1])
    lazy: Any = da.from_array
    return lazy(array, chunks=(*leading, *sides, array.shape[-1]), name=False)
