"""A bright frame around the detection that is looked at, whichever layer shows it."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes
from napari.utils.colormaps.standardize_color import transform_color
from qtpy.QtCore import QTimer

from napari_beerlanet.ui.detection_shapes import corners_of, put
from napari_beerlanet.ui.detection_view import view_of
from napari_beerlanet.ui.layers import add_quietly, mark, spatial

ROLE = "current"
_COLOUR = "#ffffff"
_EDGE, _GAP = 2.5, 4.0  # pixels of the screen: its width, and how far it is from the box
_PAUSE = 60  # milliseconds until it follows another zoom


class ReviewMarker:
    """One layer with one rectangle, made at the first use; it never becomes the active layer."""

    def __init__(self, viewer: Any, source: Any, index: tuple[int, ...]) -> None:
        self.viewer, self.source, self.index = viewer, source, index
        self.layer: Shapes | None = None
        self._box: npt.NDArray[Any] | None = None
        self._soon = QTimer()
        self._soon.setSingleShot(True)
        self._soon.setInterval(_PAUSE)
        self._soon.timeout.connect(self._draw)
        viewer.scene.camera.events.zoom.connect(self._zoomed)

    def frame(self, box: npt.NDArray[Any]) -> None:
        """Put the frame around a box (4,)."""
        self._box = np.asarray(box, np.float32)
        if self.layer is None or self.layer not in self.viewer.layers:
            self.layer = self._made()
        self._draw()

    def remove(self) -> None:
        """Take it out of the viewer."""
        self._soon.stop()
        self.viewer.scene.camera.events.zoom.disconnect(self._zoomed)
        if self.layer is not None and self.layer in self.viewer.layers:
            self.viewer.layers.remove(self.layer)
        self.layer = None

    def _zoomed(self, event: Any = None) -> None:
        if self.layer is not None and not self._soon.isActive():
            self._soon.start()

    def _draw(self) -> None:
        if self.layer is None or self.layer not in self.viewer.layers or self._box is None:
            return
        view = view_of(self.source, self.viewer)
        pixel = view.pixel if view is not None else 1.0
        out = _GAP * pixel * np.array([-1, -1, 1, 1], np.float32)
        corners = corners_of((self._box + out)[None], self.index)
        put(self.layer, corners, transform_color(_COLOUR), _EDGE * pixel, {})

    def _made(self) -> Shapes:
        layer = Shapes(
            ndim=self.source.ndim,
            name=f"{self.source.name} · current",
            face_color="transparent",
            opacity=1.0,
            metadata=mark(ROLE, self.source),
            **spatial(self.source),
        )
        add_quietly(self.viewer, layer)
        return layer
