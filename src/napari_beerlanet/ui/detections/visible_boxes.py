"""The boxes of each plane, and which of them are visible.

By threshold or mask, in the viewport, the most confident.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.spatial_index import Bounds, DynamicSpatialIndex, SpatialIndex
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.detections.box_store import BoxFilter, BoxStore, RowIndices
from napari_beerlanet.ui.detections.edits import finalised_store, rows_of_boxes
from napari_beerlanet.ui.viewer.planes import PlaneIndex
from napari_beerlanet.ui.viewer.viewport import Viewport, current_plane_index

if TYPE_CHECKING:
    from napari.viewer import Viewer


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


class PlaneStores:
    """The boxes of each plane on which something was run, and the filter on them.

    `confidence` is the last threshold that was set as a filter.
    """

    def __init__(self, viewer: Viewer, layer: Shapes, confidence: float) -> None:
        self._viewer, self._layer = viewer, layer
        self.set_filter(confidence)
        self._by_plane: dict[PlaneIndex, VisibleBoxes] = {}
        self._other_run: dict[PlaneIndex, VisibleBoxes] = {}
        self._undone: set[PlaneIndex] = set()

    @property
    def current(self) -> VisibleBoxes | None:
        """Of the current plane, None where nothing was run."""
        return self._by_plane.get(current_plane_index(self._layer, self._viewer))

    @property
    def box_filter(self) -> BoxFilter:
        """Of the current plane; the last threshold where a mask is not of its boxes."""
        boxes = self.current
        fits = boxes is None or boxes.store.accepts(self._filter)
        return self._filter if fits else self.confidence

    def set_filter(self, box_filter: BoxFilter) -> None:
        """Show boxes of at least this confidence, or of a mask over the model's."""
        self._filter: BoxFilter = box_filter
        if np.ndim(box_filter) == 0:
            self.confidence = float(box_filter)

    @property
    def stores(self) -> dict[PlaneIndex, BoxStore]:
        """The boxes of each plane."""
        return {index: boxes.store for index, boxes in self._by_plane.items()}

    def set_detections(self, detections: Detections, index: PlaneIndex) -> None:
        """Make these a plane's boxes; those that it had are kept for `swap`."""
        index = tuple(index)
        before, dropped = self._by_plane.pop(index, None), self._other_run.pop(index, None)
        if dropped is not None:
            dropped.close()
        if before is not None and len(before.store):
            self._other_run[index] = before
        self._undone.discard(index)
        self._set_store(BoxStore(detections), index)

    def has_other(self, index: PlaneIndex) -> bool:
        """Whether a plane has boxes of another run, to be swapped with the present ones."""
        return tuple(index) in self._other_run

    def is_undone(self, index: PlaneIndex) -> bool:
        """Whether the present boxes of a plane are those of the run before the last."""
        return tuple(index) in self._undone

    def swap(self, index: PlaneIndex) -> None:
        """Exchange the boxes of a plane's last run with those of the run before."""
        index = tuple(index)
        self._by_plane[index], self._other_run[index] = (
            self._other_run[index],
            self._by_plane[index],
        )
        self._undone ^= {index}

    def extend(
        self, detections: Detections, duplicates: npt.NDArray[Any] | None, index: PlaneIndex
    ) -> None:
        """Add boxes to a plane's; drop the `duplicates` (m, 4) of earlier calls."""
        boxes = self._by_plane.get(tuple(index))
        if boxes is None:
            self.set_detections(detections, index)
            return
        boxes.store.extend(detections)
        if duplicates is not None and len(duplicates):
            (x1, y1), (x2, y2) = duplicates[:, :2].min(axis=0), duplicates[:, 2:].max(axis=0)
            near = boxes.in_window((float(x1 - 1), float(y1 - 1), float(x2 + 1), float(y2 + 1)))
            boxes.store.retract(rows_of_boxes(boxes.store, near, duplicates))

    def finalise(self, detections: Detections, index: PlaneIndex) -> None:
        """Make these the model's boxes of a plane, with the user's edits of the earlier ones."""
        self._set_store(finalised_store(self.stores.get(tuple(index)), detections), index)

    def _set_store(self, store: BoxStore, index: PlaneIndex) -> None:
        old = self._by_plane.get(tuple(index))
        if old is not None:
            old.close()
        self._by_plane[tuple(index)] = VisibleBoxes(store)

    def close(self) -> None:
        """Build no further spatial index."""
        for boxes in [*self._by_plane.values(), *self._other_run.values()]:
            boxes.close()
