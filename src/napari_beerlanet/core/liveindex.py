"""An index of boxes that are moved and added while it is in use.

The grid of `SpatialIndex` is built once, beside whatever else goes on. Boxes that came later, and
those that were moved, are looked through one by one until the next grid is ready.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .geometry import Boxes
from .spatial import Indices, SpatialIndex, Window

_LATER = 20_000  # boxes that are looked through within a millisecond


class LiveIndex:
    """Finds boxes by window. Without a grid all are looked through, which is right, too."""

    def __init__(self) -> None:
        self._grid: SpatialIndex | None = None

    def stale(self, count: int) -> bool:
        """Whether a new grid would help, now that there are so many boxes."""
        had = 0 if self._grid is None else len(self._grid)
        return count - had > max(_LATER, had // 4)

    def take(self, grid: SpatialIndex) -> None:
        """Use a grid of the first boxes; those moved since it was begun must be among `moved`."""
        if self._grid is None or len(grid) > len(self._grid):
            self._grid = grid

    def query(self, window: Window, xyxy: Boxes, moved: npt.NDArray[np.bool_]) -> Indices:
        """Ascending indices of the boxes (n, 4) that share a point with the window's inside.

        `moved` (n,): boxes that are no longer where they were when the grid was built.
        """
        found = self._candidates(window, len(xyxy), moved)
        boxes = xyxy if found is None else xyxy[found]
        x1, y1, x2, y2 = window
        inside = (boxes[:, 0] < x2) & (boxes[:, 2] > x1) & (boxes[:, 1] < y2) & (boxes[:, 3] > y1)
        return np.flatnonzero(inside) if found is None else found[inside]

    def _candidates(
        self, window: Window, count: int, moved: npt.NDArray[np.bool_]
    ) -> Indices | None:
        """Ascending indices that may be in the window; None for all."""
        if self._grid is None:
            return None
        near = self._grid.near(window, most=count // 8)
        if near is None:  # to look through all is as fast
            return None
        known = len(self._grid)
        near = near[~moved[near]]
        later = known + np.flatnonzero(~moved[known:])
        return np.sort(np.concatenate([near, np.flatnonzero(moved), later]))
