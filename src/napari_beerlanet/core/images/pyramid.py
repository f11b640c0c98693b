"""Image pyramids read tile by tile: levels, regions, thumbnails, and overviews.

A level is anything with a shape (H, W, 3 or 4), a dtype and slices: numpy, dask, zarr, or a file's
store as tifffile gives it. Level 0 is the finest.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.arrays import is_dask, load_array
from napari_beerlanet.core.common.messages import error_detail
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import map_threads
from napari_beerlanet.core.images.rgb import ACCEPTED_IMAGES, ImageError

_TILE_SIZE = 2048  # pixels of a tile's side, at least, where chunks are smaller
_MAX_STRIP_AREA = 4  # times side², at most, where chunks are strips across the image
_THUMBNAIL_SIZE = 1024
_OVERVIEW_SIZE = 2048  # pixels of the longer side of a level that is kept in memory
_DOWNSAMPLE = 4  # between levels that a file does not have
_MIN_CHUNK_SIZE = 512  # pixels of a chunk's side for a viewer, at least


def as_levels(data: Any) -> list[Any]:
    """An image, or its pyramid as a list or as napari's, the finest first; checked, not read."""
    # napari's pyramid is a sequence that has a shape and a dtype as well.
    levels = [data[k] for k in range(len(data))] if isinstance(data, Sequence) else [data]
    if not levels:
        raise ImageError(f"An image without any level. {ACCEPTED_IMAGES}")
    for level in levels:
        _check_level(level)
    kinds = {np.dtype(level.dtype) for level in levels}
    if len(kinds) > 1:
        raise ImageError(f"Levels of several types ({sorted(map(str, kinds))}) are no pyramid.")
    return sorted(levels, key=lambda level: -int(level.shape[0]) * int(level.shape[1]))


def _check_level(level: Any) -> None:
    shape = getattr(level, "shape", None)
    if shape is None or not hasattr(level, "dtype"):
        raise ImageError(f"Expected image arrays, got {type(level).__name__}. {ACCEPTED_IMAGES}")
    given = f"a level of shape {tuple(shape)} and type {level.dtype}"
    if len(shape) != 3 or shape[2] not in (3, 4):
        raise ImageError(f"Not an RGB image: {given}. {ACCEPTED_IMAGES}")
    if 0 in shape:
        raise ImageError(f"An empty image: {given}. {ACCEPTED_IMAGES}")


def read_region(level: Any, region: Rectangle) -> npt.NDArray[Any]:
    """(h, w, 3 or 4) of a region of a level, in memory, by this thread."""
    try:
        # Not dask's own threads: the caller has as many already, and knows what is under way.
        array = load_array(level[region.slices], scheduler="synchronous")
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        detail = error_detail(error)
        rows, columns = (f"{s.start}–{s.stop - 1}" for s in region.slices)
        raise ImageError(
            f"The image cannot be read at rows {rows}, columns {columns}: {detail}."
        ) from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def chunk_aligned_regions(level: Any, side: int = _TILE_SIZE) -> list[Rectangle]:
    """Regions that cover a level, along its chunks, and of about `side` where those are smaller."""
    columns = _chunk_aligned_intervals(level, 1, side)
    widest = max(right - left for left, right in columns)
    rows = _chunk_aligned_intervals(
        level, 0, min(side, max(_MAX_STRIP_AREA * side * side // widest, 1))
    )
    return [
        Rectangle.from_edges(left, top, right, bottom)
        for top, bottom in rows
        for left, right in columns
    ]


def _chunk_aligned_intervals(level: Any, axis: int, side: int) -> list[tuple[int, int]]:
    length = int(level.shape[axis])
    chunks = getattr(level, "shards", None) or getattr(level, "chunks", None)
    steps = chunks[axis] if chunks else side
    if isinstance(steps, tuple):  # dask's may differ
        borders = np.cumsum(steps).tolist()
    else:
        borders = [*range(int(steps), length, int(steps)), length]
    intervals, start = [], 0
    for border in borders:
        if border - start >= side or border == length:
            intervals.append((start, int(border)))
            start = int(border)
    return intervals


def read_thumbnail(levels: Sequence[Any], max_size: int = _THUMBNAIL_SIZE) -> npt.NDArray[Any]:
    """(h, w, 3 or 4): the whole image with at most `max_size` pixels along its longer side.

    From the coarsest level that has as many, of which every k-th pixel is taken.
    """
    enough = [level for level in levels if max(level.shape[:2]) >= max_size]
    level = enough[-1] if enough else levels[0]
    step = -(-max(level.shape[:2]) // max_size)
    small = np.empty((*(-(-n // step) for n in level.shape[:2]), level.shape[2]), level.dtype)

    def copy(region: Rectangle) -> None:
        copy_subsampled(small, read_region(level, region), region, step)

    for _ in map_threads(copy, chunk_aligned_regions(level)):
        pass
    return small


def copy_subsampled(
    small: npt.NDArray[Any], pixels: npt.NDArray[Any], region: Rectangle, step: int
) -> None:
    """Copy every `step`-th pixel of a region to its place in `small`, which has those of the level.

    Counted from the level's corner, so it does not matter how the level is cut into regions.
    """
    first_y, first_x = -(-region.top // step), -(-region.left // step)
    chosen = pixels[first_y * step - region.top :: step, first_x * step - region.left :: step]
    small[first_y : first_y + chosen.shape[0], first_x : first_x + chosen.shape[1]] = chosen


def with_overviews(levels: list[Any]) -> list[Any]:
    """The levels and, where the coarsest is still large, coarser ones of every fourth pixel."""
    levels = list(levels)
    while max(levels[-1].shape[:2]) > 2 * _OVERVIEW_SIZE:
        longest = -(-max(levels[-1].shape[:2]) // _DOWNSAMPLE)
        if longest <= 2 * _OVERVIEW_SIZE:
            levels.append(Overview(levels[-1], longest))
        else:
            levels.append(_downsampled(levels[-1], _DOWNSAMPLE))
    return levels


def _downsampled(level: Any, step: int) -> Any:
    if isinstance(level, np.ndarray):
        return level[::step, ::step]
    return as_dask(level)[::step, ::step]


class Overview:
    """A small level, (H, W, 3 or 4), that is read from a finer one when it is first looked at."""

    def __init__(self, finer: Any, longest: int) -> None:
        step = -(-max(finer.shape[:2]) // longest)
        self._source, self._max_size = finer, longest
        self.shape = (*(-(-int(n) // step) for n in finer.shape[:2]), int(finer.shape[2]))
        self.dtype, self.ndim = np.dtype(finer.dtype), 3
        self._lock = threading.Lock()
        self._pixels: npt.NDArray[Any] | None = None

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        return np.asarray(np.asarray(self)[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        with self._lock:
            if self._pixels is None:
                self._pixels = read_thumbnail([self._source], self._max_size)
        return self._pixels if dtype is None else self._pixels.astype(dtype)


def as_dask(level: Any) -> Any:
    """A level as a dask array, in chunks of a fair size for a viewer, along its own."""
    import dask.array as da

    if is_dask(level):
        return level
    lazy: Any = da.from_array
    return lazy(level, chunks=_viewer_chunks(level), name=False)


def _viewer_chunks(level: Any) -> tuple[int, ...]:
    own = getattr(level, "chunks", None)
    sides = (
        [max(c) if isinstance(c, tuple) else int(c) for c in own[:2]]
        if own
        else [_MIN_CHUNK_SIZE] * 2
    )
    sides = [
        min(side * max(round(_MIN_CHUNK_SIZE / side), 1), n)
        for side, n in zip(sides, level.shape[:2], strict=True)
    ]
    return (*sides, level.shape[2])
