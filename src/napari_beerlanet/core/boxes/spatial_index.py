"""Spatial index of a million boxes: which of them are in a window, in a few milliseconds.

Boxes are sorted into grids by the cell of their upper left corner, one grid for each size: sides up
to the grid's cell, which doubles from grid to grid. What reaches into a window begins in the cells
of the window or in the row or column of cells before it. The dynamic index adds boxes that came
later or were moved, which are scanned one by one until the next grid is built.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import BoxArray, check_boxes

Indices = npt.NDArray[np.int64]
Bounds = tuple[float, float, float, float]
"""x₁, y₁, x₂, y₂ in image pixels."""

_BOXES_PER_CELL = 8.0  # boxes that a cell should have
_MAX_UNINDEXED = 20_000  # boxes that are scanned within a millisecond
_MAX_CELLS_PER_SIDE = 1 << 20  # cells along a side


@dataclass(frozen=True)
class _SizeGrid:
    """`order` (m,) sorts the boxes of one size by `keys` (m,): row · columns + column."""

    cell: float
    columns: int
    rows: int
    keys: Indices
    order: Indices

    def ranges(self, corner: npt.NDArray[np.float64], window: Bounds) -> tuple[Indices, Indices]:
        """Begins and ends in `order` of the boxes that begin where such may reach into a window."""
        x1, y1, x2, y2 = np.array(window) - np.tile(corner, 2)
        # One cell before it; two, as rounding must never hide a box.
        left, right = self._clip(x1 / self.cell - 2, x2 / self.cell + 1, self.columns)
        top, bottom = self._clip(y1 / self.cell - 2, y2 / self.cell + 1, self.rows)
        if right <= left or bottom <= top:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        rows = np.arange(top, bottom, dtype=np.int64) * self.columns
        begin = np.searchsorted(self.keys, rows + left)
        end = np.searchsorted(self.keys, rows + right)
        return begin, end

    @staticmethod
    def _clip(low: float, high: float, count: int) -> tuple[int, int]:
        return int(np.clip(np.floor(low), 0, count)), int(np.clip(np.ceil(high), 0, count))


class SpatialIndex:
    """An index of boxes (n, 4); the boxes stay as they are."""

    def __init__(self, xyxy: BoxArray) -> None:
        self.xyxy = check_boxes(xyxy)
        self.corner = np.zeros(2)
        self._grids: list[_SizeGrid] = []
        if len(self.xyxy):
            self._build(self.xyxy.astype(np.float64))

    def __len__(self) -> int:
        return len(self.xyxy)

    def candidates_in(self, window: Bounds, max_count: int | None = None) -> Indices | None:
        """Indices, in no order, of all boxes in the window and some about it.

        None where they are more than `max_count`; that costs nothing.
        """
        ranges = [grid.ranges(self.corner, window) for grid in self._grids]
        if (
            max_count is not None
            and sum(int((end - begin).sum()) for begin, end in ranges) > max_count
        ):
            return None
        near = [g.order[_expand_ranges(*r)] for g, r in zip(self._grids, ranges, strict=True)]
        return np.concatenate([np.empty(0, np.int64), *near])

    def _build(self, boxes: npt.NDArray[np.float64]) -> None:
        self.corner = boxes[:, :2].min(axis=0)
        extent = np.maximum(boxes[:, :2].max(axis=0) - self.corner, 1e-6)
        side = (boxes[:, 2:] - boxes[:, :2]).max(axis=1)
        least = max(
            float(np.sqrt(extent.prod() * _BOXES_PER_CELL / len(boxes))),
            float(extent.max() / _MAX_CELLS_PER_SIDE),
            1e-6,
        )
        level = np.maximum(np.ceil(np.log2(np.maximum(side, 1e-30) / least)), 0).astype(np.int64)
        for k in np.unique(level):
            self._grids.append(self._grid(boxes, np.flatnonzero(level == k), least * 2.0**k))

    def _grid(self, boxes: npt.NDArray[np.float64], which: Indices, cell: float) -> _SizeGrid:
        columns, rows = ((boxes[which, :2] - self.corner) / cell).astype(np.int64).T
        wide = int(columns.max()) + 1
        keys = rows * wide + columns
        order = np.argsort(keys, kind="stable")
        return _SizeGrid(cell, wide, int(rows.max()) + 1, keys[order], which[order])


def _expand_ranges(begin: Indices, end: Indices) -> Indices:
    """The numbers of all ranges begin … end − 1, one after the other."""
    length = end - begin
    total = int(length.sum())
    start = np.repeat(begin - np.concatenate([[0], np.cumsum(length)[:-1]]), length)
    return start + np.arange(total, dtype=np.int64)


class DynamicSpatialIndex:
    """Finds boxes by window. Without a grid all are looked through, which is right, too."""

    def __init__(self) -> None:
        self._grid: SpatialIndex | None = None

    def is_stale(self, count: int) -> bool:
        """Whether a new grid would help, now that there are so many boxes."""
        had = 0 if self._grid is None else len(self._grid)
        return count - had > max(_MAX_UNINDEXED, had // 4)

    def use_grid(self, grid: SpatialIndex) -> None:
        """Use a grid of the first boxes; those moved since it was begun must be among `moved`."""
        if self._grid is None or len(grid) > len(self._grid):
            self._grid = grid

    def query(self, window: Bounds, xyxy: BoxArray, moved: npt.NDArray[np.bool_]) -> Indices:
        """Ascending indices of the boxes (n, 4) that share a point with the window's inside.

        `moved` (n,): boxes that are no longer where they were when the grid was built.
        """
        found = self._candidates(window, len(xyxy), moved)
        boxes = xyxy if found is None else xyxy[found]
        x1, y1, x2, y2 = window
        inside = (boxes[:, 0] < x2) & (boxes[:, 2] > x1) & (boxes[:, 1] < y2) & (boxes[:, 3] > y1)
        return np.flatnonzero(inside) if found is None else found[inside]

    def _candidates(
        self, window: Bounds, count: int, moved: npt.NDArray[np.bool_]
    ) -> Indices | None:
        """Ascending indices that may be in the window; None for all."""
        if self._grid is None:
            return None
        near = self._grid.candidates_in(window, max_count=count // 8)
        if near is None:  # to look through all is as fast
            return None
        known = len(self._grid)
        near = near[~moved[near]]
        later = known + np.flatnonzero(~moved[known:])
        return np.sort(np.concatenate([near, np.flatnonzero(moved), later]))
