"""Coarser levels for images that have none, so that a viewer need not read all of them to pan."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import numpy.typing as npt

from .lazy import thumbnail

_OVERVIEW = 2048  # pixels of the longer side of a level that is kept in memory
_STEP = 4  # between levels that a file does not have
_FAIR = 512  # pixels of a chunk's side for a viewer, at least


def with_overviews(levels: list[Any]) -> list[Any]:
    """The levels and, where the coarsest is still large, coarser ones of every fourth pixel."""
    levels = list(levels)
    while max(levels[-1].shape[:2]) > 2 * _OVERVIEW:
        longest = -(-max(levels[-1].shape[:2]) // _STEP)
        if longest <= 2 * _OVERVIEW:
            levels.append(Overview(levels[-1], longest))
        else:
            levels.append(_every(levels[-1], _STEP))
    return levels


def _every(level: Any, step: int) -> Any:
    if isinstance(level, np.ndarray):
        return level[::step, ::step]
    return as_dask(level)[::step, ::step]


class Overview:
    """A small level, (H, W, 3 or 4), that is read from a finer one when it is first looked at."""

    def __init__(self, finer: Any, longest: int) -> None:
        step = -(-max(finer.shape[:2]) // longest)
        self._finer, self._longest = finer, longest
        self.shape = (*(-(-int(n) // step) for n in finer.shape[:2]), int(finer.shape[2]))
        self.dtype, self.ndim = np.dtype(finer.dtype), 3
        self._lock = threading.Lock()
        self._pixels: npt.NDArray[Any] | None = None

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        return np.asarray(np.asarray(self)[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> npt.NDArray[Any]:
        with self._lock:
            if self._pixels is None:
                self._pixels = thumbnail([self._finer], self._longest)
        return self._pixels if dtype is None else self._pixels.astype(dtype)


def as_dask(level: Any) -> Any:
    """A level as a dask array, in chunks of a fair size for a viewer, along its own."""
    import dask.array as da

    if hasattr(level, "dask"):
        return level
    lazy: Any = da.from_array
    return lazy(level, chunks=_chunks(level), name=False)


def _chunks(level: Any) -> tuple[int, ...]:
    own = getattr(level, "chunks", None)
    sides = [max(c) if isinstance(c, tuple) else int(c) for c in own[:2]] if own else [_FAIR] * 2
    sides = [
        min(side * max(round(_FAIR / side), 1), n)
        for side, n in zip(sides, level.shape[:2], strict=True)
    ]
    return (*sides, level.shape[2])
