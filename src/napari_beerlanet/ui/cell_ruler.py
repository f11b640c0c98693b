"""The size of a cell, from a box that the user draws over one."""

from __future__ import annotations

from typing import Any

import numpy as np
from napari.layers import Image, Shapes
from napari.layers.base import ActionType
from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.ui.detect_where import to_pixels
from napari_beerlanet.ui.gl_guard import guard_software_opengl
from napari_beerlanet.ui.layers import mark, spatial

_LEAST = 2.0  # pixels; less is a slip of the mouse


class CellRuler(QObject):
    """A layer for one rectangle; it goes when that is drawn.

    `measured` tells √(width · height) in image pixels, `ended` that the layer is gone.
    """

    measured = Signal(float)
    ended = Signal()

    def __init__(self, viewer: Any, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self._viewer = viewer
        self.layer: Shapes | None = None
        self._image: Image | None = None
        self._before: Any = None

    def start(self, image: Image) -> None:
        """Let the user draw a box over a cell of the image."""
        self.stop()
        guard_software_opengl(self._viewer)
        self._image, self._before = image, self._viewer.layers.selection.active
        options = spatial(image, planar=image.ndim > 2)
        self.layer = Shapes(
            ndim=2,
            name="Draw over one cell",
            edge_color="yellow",
            face_color="transparent",
            edge_width=2,
            metadata=mark("ruler", image),
            **options,
        )
        self._viewer.add_layer(self.layer)
        self._viewer.layers.selection.active = self.layer
        self.layer.mode = "add_rectangle"
        self.layer.events.data.connect(self._drawn)
        self._viewer.layers.events.removed.connect(self._removed)

    def stop(self) -> None:
        """Take the layer away."""
        layer = self.layer
        if layer is not None and layer in self._viewer.layers:
            self._viewer.layers.remove(layer)

    def _drawn(self, event: Any) -> None:
        if event.action == ActionType.ADDED:
            QTimer.singleShot(0, self._measure)  # napari is still busy with the mouse

    def _measure(self) -> None:
        if self.layer is None or not self.layer.data or self._image is None:
            return
        corners = to_pixels(self.layer.data[-1], self.layer, self._image)
        sides = [np.hypot(*(corners[k + 1] - corners[k])) for k in range(2)]
        self.stop()
        if min(sides) >= _LEAST:
            self.measured.emit(float(np.sqrt(sides[0] * sides[1])))

    def _removed(self, event: Any) -> None:
        if event.value is not self.layer or self.layer is None:
            return
        self.layer.events.data.disconnect(self._drawn)
        self._viewer.layers.events.removed.disconnect(self._removed)
        self.layer = None
        if self._before is not None and self._before in self._viewer.layers:
            self._viewer.layers.selection.active = self._before
        self.ended.emit()
