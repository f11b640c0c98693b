"""Images that are not in memory: their pyramid levels, read tile by tile.

A level is anything with a shape (H, W, 3 or 4), a dtype and slices: numpy, dask, zarr, or a file's
store as tifffile gives it. Level 0 is the finest.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .images import ACCEPTED, ImageError
from .threads import thread_count

T = TypeVar("T")
R = TypeVar("R")

_SIDE = 2048  # pixels of a tile's side, at least, where chunks are smaller
_WIDE = 4  # times side², at most, where chunks are strips across the image
_THUMBNAIL = 1024


@dataclass(frozen=True)
class Part:
    """Rows top … bottom − 1 and columns left … right − 1 of a level."""

    top: int
    bottom: int
    left: int
    right: int

    @property
    def pixels(self) -> int:
        """How many it has."""
        return (self.bottom - self.top) * (self.right - self.left)


def as_levels(data: Any) -> list[Any]:
    """An image, or its pyramid as a list or as napari's, the finest first; checked, not read."""
    # napari's pyramid is a sequence that has a shape and a dtype as well.
    levels = [data[k] for k in range(len(data))] if isinstance(data, Sequence) else [data]
    if not levels:
        raise ImageError(f"An image without any level. {ACCEPTED}")
    for level in levels:
        _check(level)
    kinds = {np.dtype(level.dtype) for level in levels}
    if len(kinds) > 1:
        raise ImageError(f"Levels of several types ({sorted(map(str, kinds))}) are no pyramid.")
    return sorted(levels, key=lambda level: -int(level.shape[0]) * int(level.shape[1]))


def _check(level: Any) -> None:
    shape = getattr(level, "shape", None)
    if shape is None or not hasattr(level, "dtype"):
        raise ImageError(f"Expected image arrays, got {type(level).__name__}. {ACCEPTED}")
    given = f"a level of shape {tuple(shape)} and type {level.dtype}"
    if len(shape) != 3 or shape[2] not in (3, 4):
        raise ImageError(f"Not an RGB image: {given}. {ACCEPTED}")
    if 0 in shape:
        raise ImageError(f"An empty image: {given}. {ACCEPTED}")


def read(level: Any, part: Part) -> npt.NDArray[Any]:
    """(h, w, 3 or 4) of a part of a level, in memory, by this thread."""
    try:
        pixels = level[part.top : part.bottom, part.left : part.right]
        if hasattr(pixels, "compute"):
            # Not dask's own threads: the caller has as many already, and knows what is under way.
            pixels = pixels.compute(scheduler="synchronous")
        array = np.asarray(pixels)
    except (ImageError, MemoryError):
        raise
    except Exception as error:
        detail = " ".join(str(error).split()).rstrip(".")[:120] or type(error).__name__
        place = f"rows {part.top}–{part.bottom - 1}, columns {part.left}–{part.right - 1}"
        raise ImageError(f"The image cannot be read at {place}: {detail}.") from error
    return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))


def parts_of(level: Any, side: int = _SIDE) -> list[Part]:
    """Parts that cover a level, along its chunks, and of about `side` where those are smaller."""
    columns = _pieces(level, 1, side)
    widest = max(right - left for left, right in columns)
    rows = _pieces(level, 0, min(side, max(_WIDE * side * side // widest, 1)))
    return [Part(*r, *c) for r in rows for c in columns]


def _pieces(level: Any, axis: int, side: int) -> list[tuple[int, int]]:
    length = int(level.shape[axis])
    chunks = getattr(level, "shards", None) or getattr(level, "chunks", None)
    steps = chunks[axis] if chunks else side
    if isinstance(steps, tuple):  # dask's may differ
        borders = np.cumsum(steps).tolist()
    else:
        borders = [*range(int(steps), length, int(steps)), length]
    pieces, begin = [], 0
    for border in borders:
        if border - begin >= side or border == length:
            pieces.append((begin, int(border)))
            begin = int(border)
    return pieces


def in_threads(
    work: Callable[[T], R], items: Iterable[T], threads: int | None = None
) -> Iterator[R]:
    """The work's results in the order of the items; few are under way at a time.

    Where the consumer stops (an exception, too), nothing new is begun.
    """
    count = threads or thread_count()
    if count < 2:
        yield from map(work, items)
        return
    under_way: deque[Future[R]] = deque()
    with ThreadPoolExecutor(count, "beerlanet-read") as pool:
        try:
            for item in items:
                under_way.append(pool.submit(work, item))
                if len(under_way) > 2 * count:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def thumbnail(levels: Sequence[Any], longest: int = _THUMBNAIL) -> npt.NDArray[Any]:
    """(h, w, 3 or 4): the whole image with at most `longest` pixels along its longer side.

    From the coarsest level that has as many, of which every k-th pixel is taken.
    """
    enough = [level for level in levels if max(level.shape[:2]) >= longest]
    level = enough[-1] if enough else levels[0]
    step = -(-max(level.shape[:2]) // longest)
    small = np.empty((*(-(-n // step) for n in level.shape[:2]), level.shape[2]), level.dtype)

    def copy(part: Part) -> None:
        put_every(small, read(level, part), part, step)

    for _ in in_threads(copy, parts_of(level)):
        pass
    return small


def put_every(small: npt.NDArray[Any], pixels: npt.NDArray[Any], part: Part, step: int) -> None:
    """Copy every `step`-th pixel of a part to its place in `small`, which has those of the level.

    Counted from the level's corner, so it does not matter how the level is cut into parts.
    """
    first_y, first_x = -(-part.top // step), -(-part.left // step)
    chosen = pixels[first_y * step - part.top :: step, first_x * step - part.left :: step]
    small[first_y : first_y + chosen.shape[0], first_x : first_x + chosen.shape[1]] = chosen
