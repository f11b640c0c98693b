"""The Shapes layer's part of the boxes: what was put into it, and what the user made of that."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from napari.layers import Image, Shapes

from napari_beerlanet.ui import detection_shapes
from napari_beerlanet.ui.detection_edits import take_over
from napari_beerlanet.ui.detection_look import Look
from napari_beerlanet.ui.detection_store import BoxStore, Rows
from napari_beerlanet.ui.detection_view import View
from napari_beerlanet.ui.layers import mark, put_above, spatial

ROLE = "detections"
_SAME_FADE = 0.02  # that nobody sees
_NO_BOXES = np.empty((0, 4), np.float32)


def make_layer(viewer: Any, source: Image) -> Shapes:
    """An empty layer above an image, at the same place in the world, not visible yet."""
    layer = Shapes(
        ndim=source.ndim,
        name=f"{source.name} · detections",
        face_color="transparent",
        opacity=1.0,
        visible=False,
        metadata=mark(ROLE, source),
        **spatial(source),
    )
    viewer.add_layer(layer)
    put_above(viewer, layer, source)
    return layer


class Shown:
    """What a Shapes layer shows: the rows `rows` (m,) of `store`, in this order.

    `version` is the store's when they were put there. `ours` is true while the layer is changed by
    us and not by the user.
    """

    def __init__(self, layer: Shapes, look: Look) -> None:
        self.layer, self.look = layer, look
        self.store: BoxStore | None = None
        self.rows: Rows = np.empty(0, np.int64)
        self.version, self.fade, self.ours = -1, 0.0, False
        self._put = _NO_BOXES

    @contextmanager
    def changing(self) -> Iterator[None]:
        """While the layer is changed by us."""
        before, self.ours = self.ours, True
        try:
            yield
        finally:
            self.ours = before

    def holds(self, store: BoxStore, rows: Rows | None = None, fade: float = 0.0) -> bool:
        """Whether the layer is filled from the store as it is now, and just with these rows."""
        filled = store is self.store and store.version == self.version
        if not filled or rows is None:
            return filled
        return abs(fade - self.fade) < _SAME_FADE and np.array_equal(rows, self.rows)

    def put(
        self,
        store: BoxStore | None,
        rows: Rows,
        view: View | None,
        index: tuple[int, ...],
        fade: float = 0.0,
    ) -> None:
        """Make these rows the layer's boxes, faded from 0 to 1; what was selected stays so."""
        selected = self.selected_rows() if store is self.store else []
        self.look.see(view)
        boxes = store.xyxy[rows] if store is not None else _NO_BOXES
        with self.changing():
            detection_shapes.put(
                self.layer,
                detection_shapes.corners_of(boxes, index),
                self.look.edges(store, rows, fade),
                self.look.width,
                store.features(rows) if store is not None else {},
            )
            if store is not self.store:
                self.look.set_defaults(self.layer, store)
            self.store, self.rows, self._put = store, rows, boxes.copy()
            self.version, self.fade = -1 if store is None else store.version, fade
            if selected:
                self.layer.selected_data = set(np.flatnonzero(np.isin(rows, selected)).tolist())

    def fit_width(self, view: View | None) -> None:
        """Edges of the same width on the screen, at whatever zoom."""
        if self.look.see(view):
            with self.changing():
                self.look.set_width(self.layer)

    def take_over(self) -> bool:
        """Keep what the user changed in the layer since it was last filled; whether it was any."""
        if self.store is None:
            return False
        boxes = detection_shapes.boxes_of(self.layer.data)
        table = {name: self.layer.features[name].to_numpy() for name in self.layer.features}
        rows = take_over(self.store, self.rows, self._put, boxes, table)
        if rows is None:
            return False
        self.rows, self._put = rows, boxes
        self.version = self.store.version
        with self.changing():
            self.layer.features = self.store.features(rows)
        return True

    def select(self, row: int) -> None:
        """Select the box of a row of the store, if it is in the layer."""
        with self.changing():
            self.layer.selected_data = set(np.flatnonzero(self.rows == row).tolist())

    @property
    def selected_row(self) -> int | None:
        """The row of the one box that is selected."""
        if len(self.layer.selected_data) != 1:
            return None
        (place,) = self.layer.selected_data
        return int(self.rows[place]) if place < len(self.rows) else None

    def selected_rows(self) -> list[int]:
        """The rows of the boxes that are selected."""
        chosen = [k for k in self.layer.selected_data if k < len(self.rows)]
        return self.rows[chosen].tolist() if chosen else []

    @property
    def busy(self) -> bool:
        """Whether the user is drawing or moving a box."""
        layer: Any = self.layer
        return bool(getattr(layer, "_is_moving", False) or getattr(layer, "_is_creating", False))
