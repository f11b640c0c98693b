"""Greedy suppression of duplicate boxes, fast for 100 000 of them.

Two boxes that share much are of similar size. So boxes are sorted into grids, one for each class
and each size (a level: sides up to the grid's cell, which doubles from level to level), by their
upper left corner, and each box that stays looks only into the few cells where its duplicates are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

_CELLS = 1 << 14  # along the longer side, at most; a row of the grid has twice as many numbers
ROW = 1 << 15
GRID = 1 << 30
SLACK = 1 + 1e-9  # rounding must never hide a neighbour


def survivors(
    boxes: npt.NDArray[Any], labels: npt.NDArray[Any], turns: npt.NDArray[np.int64], limit: float
) -> npt.NDArray[np.int64]:
    """Ascending indices of the boxes (n, 4), x1, y1, x2, y2, that remain.

    They have their turn in the order `turns` (n,): each that is still there removes those of its
    label with an intersection over union above `limit`.
    """
    if len(boxes) == 0:
        return np.empty(0, np.int64)
    boxes = np.asarray(boxes, np.float64)
    grid = Grid.of(boxes, labels)
    place = np.empty(len(boxes), np.int64)
    place[grid.order] = np.arange(len(boxes))
    alive = np.ones(len(boxes), np.bool_)
    corner = boxes[:, :2].min(axis=0)
    _sweep(
        np.ascontiguousarray(boxes[grid.order]),
        place[turns],
        grid.keys,
        grid.starts,
        grid.levels,
        grid.cell,
        corner,
        limit,
        alive,
    )
    return np.sort(grid.order[alive])


@dataclass(frozen=True)
class Grid:
    """Where each box is: sorted by `keys`, which are label, level, row, column in one number.

    `order` (n,) sorts the boxes so; `starts` (labels · levels + 1,) is where each grid begins;
    `cell` is the side of a cell of level 0 in pixels.
    """

    order: npt.NDArray[np.int64]
    keys: npt.NDArray[np.int64]
    starts: npt.NDArray[np.int64]
    levels: int
    cell: float

    @classmethod
    def of(cls, boxes: npt.NDArray[np.float64], labels: npt.NDArray[Any]) -> Grid:
        corner = boxes[:, :2].min(axis=0)
        side = (boxes[:, 2:] - boxes[:, :2]).max(axis=1)
        extent = (boxes[:, :2].max(axis=0) - corner).max()
        least: float = max(extent / _CELLS, side.min(), 1e-30)
        cell = 2.0 ** np.ceil(np.log2(least) + 0.1)  # a power of two: dividing by it is exact
        level = np.maximum(np.frexp(side / cell)[1], 0)  # side < 2**level cells
        levels = int(level.max()) + 1
        kinds, kind = np.unique(labels, return_inverse=True)
        number = kind * levels + level
        columns, rows = ((boxes[:, :2] - corner).T // (cell * 2.0**level)).astype(np.int64)
        keys = number * GRID + rows * ROW + columns
        order = np.argsort(keys, kind="stable")
        starts = np.searchsorted(keys[order], np.arange(len(kinds) * levels + 1) * GRID)
        return cls(order, keys[order], starts, levels, float(cell))


@njit(cache=True, nogil=True)
def _sweep(boxes, turns, keys, starts, levels, cell, corner, limit, alive):
    """Clear `alive` (n,) where a box is removed; all are in the order of the grid."""
    for p in turns:
        if not alive[p]:
            continue
        side = max(boxes[p, 2] - boxes[p, 0], boxes[p, 3] - boxes[p, 1])
        label = keys[p] // (GRID * levels)
        for level in range(levels):
            grid = label * levels + level
            size = cell * 2.0**level  # this level's boxes are at least half as long
            too_small = size * SLACK < limit * side
            too_large = level > 0 and side * SLACK < limit * size / 2
            if starts[grid] == starts[grid + 1] or too_small or too_large:
                continue
            reach = size * SLACK
            left = max(int(np.floor((boxes[p, 0] - corner[0] - reach) / size)), 0)
            right = min(int(np.floor((boxes[p, 2] - corner[0]) / size)), ROW - 1)
            top = max(int(np.floor((boxes[p, 1] - corner[1] - reach) / size)), 0)
            bottom = min(int(np.floor((boxes[p, 3] - corner[1]) / size)), ROW - 1)
            if bottom - top > starts[grid + 1] - starts[grid]:
                _remove(boxes, p, starts[grid], starts[grid + 1], limit, alive)
                continue
            for row in range(top, bottom + 1):
                here = grid * GRID + row * ROW
                begin = first_at(keys, starts[grid], starts[grid + 1], here + left)
                end = begin
                while end < starts[grid + 1] and keys[end] <= here + right:
                    end += 1
                _remove(boxes, p, begin, end, limit, alive)


@njit(cache=True, nogil=True)
def first_at(keys, low, high, key):
    """The first index from `low` on whose key is not below `key`; `high` if there is none."""
    while low < high:
        middle = (low + high) // 2
        if keys[middle] < key:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def _remove(boxes, p, begin, end, limit, alive):
    """Remove those of boxes begin … end − 1 that share more than `limit` with box p."""
    x1, y1, x2, y2 = boxes[p]
    area = (x2 - x1) * (y2 - y1)
    for q in range(begin, end):
        if not alive[q] or q == p:
            continue
        width = min(x2, boxes[q, 2]) - max(x1, boxes[q, 0])
        height = min(y2, boxes[q, 3]) - max(y1, boxes[q, 1])
        if width <= 0 or height <= 0:
            continue
        shared = width * height
        other = (boxes[q, 2] - boxes[q, 0]) * (boxes[q, 3] - boxes[q, 1])
        union = area + other - shared
        if union > 0 and shared / union > limit:
            alive[q] = False
