"""Which of the boxes of a plane are shown: chosen by confidence or mask, in view, the surest."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.liveindex import LiveIndex
from napari_beerlanet.core.spatial import SpatialIndex, Window
from napari_beerlanet.ui.detection_store import BoxStore, Chosen, Rows
from napari_beerlanet.ui.detection_view import View
from napari_beerlanet.ui.tasks import Task


class BoxChoice:
    """One store's boxes, with an index of them that is built beside the GUI."""

    def __init__(self, store: BoxStore) -> None:
        self.store = store
        self.index = LiveIndex()
        self._task = Task()
        self._mask: npt.NDArray[np.bool_] = np.empty(0, bool)
        self._total = 0
        self._of: tuple[int, object] = (-1, None)

    def close(self) -> None:
        """Build no further index."""
        self._task.close()

    def mask(self, chosen: Chosen) -> npt.NDArray[np.bool_]:
        """(n,) which rows are chosen, in view or not; kept until something changes."""
        of = (self.store.version, chosen)
        if self._of[0] != of[0] or self._of[1] is not chosen:
            self._mask = self.store.passing(chosen)
            self._total, self._of = int(np.count_nonzero(self._mask)), of
        return self._mask

    def total(self, chosen: Chosen) -> int:
        """How many are chosen."""
        self.mask(chosen)
        return self._total

    def inside(self, view: View | None, chosen: Chosen) -> Rows:
        """Ascending rows of the chosen that are in view."""
        mask = self.mask(chosen)
        if view is None:
            return np.flatnonzero(mask)
        x1, y1, x2, y2 = (float(v) for v in view.box)
        rows = self.near((x1, y1, x2, y2))
        return rows[mask[rows]]

    def near(self, window: Window) -> Rows:
        """Ascending rows of all boxes in a window."""
        self._renew()
        return self.index.query(window, self.store.xyxy, self.store.touched)

    def surest(self, rows: Rows, pinned: Rows, most: int) -> Rows:
        """At most so many of the rows and the pinned, ascending.

        Pinned ones and those that the user had a hand in come first, then the highest scores.
        """
        rows = np.union1d(rows, pinned)
        if len(rows) <= most:
            return rows
        store = self.store
        first = store.touched[rows] | np.isin(rows, pinned)
        key = np.where(first, -np.inf, -store.scores[rows])
        best = np.argpartition(key, most - 1)[:most]
        # Equal scores at the limit: the first rows, as a full sort would have it.
        limit = key[best].max()
        under, at = np.flatnonzero(key < limit), np.flatnonzero(key == limit)
        return np.sort(rows[np.concatenate([under, at[: most - len(under)]])])

    def _renew(self) -> None:
        """Have a new index built, if one would help."""
        if self._task.running or not self.index.stale(len(self.store)):
            return
        boxes = self.store.xyxy
        self._task.start(lambda report: SpatialIndex(boxes), self.index.take)
