"""Which of a million boxes are in view, in a few milliseconds; and how many are where.

Boxes are sorted into grids by the cell of their upper left corner, one grid for each size: sides up
to the grid's cell, which doubles from grid to grid. What reaches into a window begins in the cells
of the window or in the row or column of cells before it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .geometry import Boxes, check_boxes

Indices = npt.NDArray[np.int64]
Window = tuple[float, float, float, float]
"""x₁, y₁, x₂, y₂ in image pixels."""

_PER_CELL = 8.0  # boxes that a cell should have
_MOST = 1 << 20  # cells along a side


@dataclass(frozen=True)
class _Grid:
    """`order` (m,) sorts the boxes of one size by `keys` (m,): row · columns + column."""

    cell: float
    columns: int
    rows: int
    keys: Indices
    order: Indices

    def ranges(self, corner: npt.NDArray[np.float64], window: Window) -> tuple[Indices, Indices]:
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

    def __init__(self, xyxy: Boxes) -> None:
        self.xyxy = check_boxes(xyxy)
        self.corner = np.zeros(2)
        self._grids: list[_Grid] = []
        if len(self.xyxy):
            self._build(self.xyxy.astype(np.float64))

    def __len__(self) -> int:
        return len(self.xyxy)

    def query(self, window: Window, first: int | None = None, most: int | None = None) -> Indices:
        """Ascending indices of the boxes that share a point with the window's inside.

        `first`: only of the first so many boxes. Detections are sorted by score, so that is a
        threshold of confidence. `most`: of those the first so many, the surest.
        """
        found = self.near(window)
        assert found is not None
        if first is not None:
            found = found[found < first]
        x1, y1, x2, y2 = window
        left, top, right, bottom = (self.xyxy[found, k] for k in range(4))
        inside = (left < x2) & (right > x1) & (top < y2) & (bottom > y1)
        found = found[inside]
        if most is not None and len(found) > most:
            found = np.partition(found, most)[:most]
        return np.sort(found)

    def near(self, window: Window, most: int | None = None) -> Indices | None:
        """Indices, in no order, of all boxes in the window and some about it.

        None where they are more than `most`; that costs nothing.
        """
        ranges = [grid.ranges(self.corner, window) for grid in self._grids]
        if most is not None and sum(int((end - begin).sum()) for begin, end in ranges) > most:
            return None
        near = [g.order[_ranges(*r)] for g, r in zip(self._grids, ranges, strict=True)]
        return np.concatenate([np.empty(0, np.int64), *near])

    def at(self, x: float, y: float) -> Indices:
        """Ascending indices of the boxes about a point."""
        reach = 1e-3
        return self.query((x - reach, y - reach, x + reach, y + reach))

    def counts(
        self,
        window: Window,
        shape: tuple[int, int],
        first: int | None = None,
        keep: npt.NDArray[np.bool_] | None = None,
    ) -> npt.NDArray[np.int64]:
        """How many boxes have their centre in each of `shape` (h, w) cells of a window.

        `first` as for `query`; `keep` (n,): count those alone.
        """
        x1, y1, x2, y2 = window
        centres = self._centres[:first]
        wide, high = max(x2 - x1, 1e-9), max(y2 - y1, 1e-9)
        column = np.floor((centres[:, 0] - x1) * (shape[1] / wide)).astype(np.int64)
        row = np.floor((centres[:, 1] - y1) * (shape[0] / high)).astype(np.int64)
        inside = (row >= 0) & (row < shape[0]) & (column >= 0) & (column < shape[1])
        if keep is not None:
            inside &= keep[:first]
        number = row[inside] * shape[1] + column[inside]
        return np.bincount(number, minlength=shape[0] * shape[1]).reshape(shape)

    @property
    def _centres(self) -> npt.NDArray[np.float32]:
        """(n, 2) x, y."""
        if not hasattr(self, "_middle"):
            self._middle = ((self.xyxy[:, :2] + self.xyxy[:, 2:]) / 2).astype(np.float32)
        return self._middle

    def _build(self, boxes: npt.NDArray[np.float64]) -> None:
        self.corner = boxes[:, :2].min(axis=0)
        extent = np.maximum(boxes[:, :2].max(axis=0) - self.corner, 1e-6)
        side = (boxes[:, 2:] - boxes[:, :2]).max(axis=1)
        least = max(
            float(np.sqrt(extent.prod() * _PER_CELL / len(boxes))),
            float(extent.max() / _MOST),
            1e-6,
        )
        level = np.maximum(np.ceil(np.log2(np.maximum(side, 1e-30) / least)), 0).astype(np.int64)
        for k in np.unique(level):
            self._grids.append(self._grid(boxes, np.flatnonzero(level == k), least * 2.0**k))

    def _grid(self, boxes: npt.NDArray[np.float64], which: Indices, cell: float) -> _Grid:
        columns, rows = ((boxes[which, :2] - self.corner) / cell).astype(np.int64).T
        wide = int(columns.max()) + 1
        keys = rows * wide + columns
        order = np.argsort(keys, kind="stable")
        return _Grid(cell, wide, int(rows.max()) + 1, keys[order], which[order])


def _ranges(begin: Indices, end: Indices) -> Indices:
    """The numbers of all ranges begin … end − 1, one after the other."""
    length = end - begin
    total = int(length.sum())
    start = np.repeat(begin - np.concatenate([[0], np.cumsum(length)[:-1]]), length)
    return start + np.arange(total, dtype=np.int64)
