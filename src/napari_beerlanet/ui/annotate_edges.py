"""Edges of drawn boxes and regions, equally thin at any zoom."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from qtpy.QtCore import QObject, QTimer

from napari_beerlanet.ui.detection_shapes import set_width
from napari_beerlanet.ui.detection_view import view_of

_EDGE = 1.8  # pixels of the screen
_PAUSE = 60  # milliseconds between changes while the view moves
_SAME = 0.02  # share by which a width may be off


class ThinEdges(QObject):
    """Follows the zoom of a viewer; `keepers` gives all that have a `layer` and a `width`."""

    def __init__(self, parent: QObject, viewer: Any, keepers: Callable[[], Iterable[Any]]) -> None:
        super().__init__(parent)
        self._viewer, self._keepers = weakref.ref(viewer), keepers
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.setInterval(_PAUSE)
        self._timer.timeout.connect(self.follow)
        viewer.scene.camera.events.zoom.connect(self._zoomed)

    def _zoomed(self, event: Any = None) -> None:
        if not self._timer.isActive():
            self._timer.start()

    def follow(self) -> None:
        """Give all edges the width that the zoom asks for."""
        viewer = self._viewer()
        for keeper in self._keepers() if viewer is not None else ():
            if keeper.layer in viewer.layers and not self._drawing(keeper.layer):
                view = view_of(keeper.layer, viewer)
                if view is not None:
                    _widen(keeper, _EDGE * view.pixel)

    def _drawing(self, layer: Any) -> bool:
        busy = layer._is_creating or layer._is_moving
        if busy:
            self._timer.start()
        return bool(busy)


def _widen(keeper: Any, width: float) -> None:
    if abs(width - keeper.width) > _SAME * keeper.width:
        keeper.width = width
        set_width(keeper.layer, width)
        keeper.layer.current_edge_width = width
