"""Which boxes of a plane are visible: by threshold or mask, in the viewport, the most confident."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.spatial_index import Bounds, DynamicSpatialIndex, SpatialIndex
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.detections.box_store import BoxFilter, BoxStore, RowIndices
from napari_beerlanet.ui.viewer.viewport import Viewport


class VisibleBoxes:
    """The boxes of one store, with a spatial index that is built off the GUI thread."""

    def __init__(self, store: BoxStore) -> None:
        self.store = store
        self.index = DynamicSpatialIndex()
        self._task = Task()
        self._mask: npt.NDArray[np.bool_] = np.empty(0, bool)
        self._total = 0
        self._mask_key: tuple[int, object] = (-1, None)

    def close(self) -> None:
        """Build no further index."""
        self._task.close()

    def mask(self, box_filter: BoxFilter) -> npt.NDArray[np.bool_]:
        """(n,) which rows pass the filter, in view or not; cached until something changes."""
        version = self.store.version
        if self._mask_key[0] != version or self._mask_key[1] is not box_filter:
            self._mask = self.store.filter_mask(box_filter)
            self._total = int(np.count_nonzero(self._mask))
            self._mask_key = version, box_filter
        return self._mask

    def total(self, box_filter: BoxFilter) -> int:
        """How many pass the filter."""
        self.mask(box_filter)
        return self._total

    def in_viewport(self, viewport: Viewport | None, box_filter: BoxFilter) -> RowIndices:
        """Ascending rows in the viewport that pass the filter."""
        mask = self.mask(box_filter)
        if viewport is None:
            return np.flatnonzero(mask)
        x1, y1, x2, y2 = (float(v) for v in viewport.box)
        rows = self.in_window((x1, y1, x2, y2))
        return rows[mask[rows]]

    def in_window(self, window: Bounds) -> RowIndices:
        """Ascending rows of all boxes in a window."""
        self._rebuild_index()
        return self.index.query(window, self.store.xyxy, self.store.touched)

    def most_confident(self, rows: RowIndices, pinned: RowIndices, limit: int) -> RowIndices:
        """At most `limit` of the rows and the pinned, ascending.

        Pinned ones and those that the user edited come first, then the highest scores.
        """
        rows = np.union1d(rows, pinned)
        if len(rows) <= limit:
            return rows
        store = self.store
        first = store.touched[rows] | np.isin(rows, pinned)
        key = np.where(first, -np.inf, -store.scores[rows])
        best = np.argpartition(key, limit - 1)[:limit]
        # Equal scores at the limit: the first rows, as a full sort would have it.
        worst = key[best].max()
        under, at = np.flatnonzero(key < worst), np.flatnonzero(key == worst)
        return np.sort(rows[np.concatenate([under, at[: limit - len(under)]])])

    def _rebuild_index(self) -> None:
        """Have a new index built, if one would help."""
        if self._task.running or not self.index.is_stale(len(self.store)):
            return
        boxes = self.store.xyxy
        self._task.start(lambda report: SpatialIndex(boxes), self.index.use_grid)
