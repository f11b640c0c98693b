"""Keys of an annotation layer: classes by number, stepping, confirming, undo.

Bound to the layer itself, before napari's bindings of all Shapes layers: the numbers 1 to 7, by
which those choose tools, have letters beside them (R, E, P, S, D, Z, …), which stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
from qtpy.QtCore import QEvent, QObject, Qt

from napari_beerlanet.ui.annotate_classes import KEYS
from napari_beerlanet.ui.annotation_layer import AnnotationLayer
from napari_beerlanet.ui.notices import show_info

HELP = (
    "1–9 class of new and selected boxes · Tab next box · Shift-Tab back · C confirm · "
    "Del remove · Ctrl-Z undo · R draw · S select"
)


def bind_keys(viewer: Any, boxes: AnnotationLayer) -> None:
    """Bind all keys of a layer."""
    layer, weak, window = boxes.layer, weakref.ref(boxes), weakref.ref(viewer)

    def bound(key: str, act: Callable[[AnnotationLayer], None]) -> None:
        def pressed(layer: Any) -> None:
            alive = weak()
            if alive is not None:
                act(alive)

        layer.bind_key(key, pressed, overwrite=True)

    for place in range(KEYS):
        bound(str(place + 1), lambda boxes, place=place: choose(boxes, place))
    bound("C", lambda boxes: boxes.confirm())
    bound("Control-Z", lambda boxes: _say(window(), "Undone", boxes.undo()))
    bound("Control-Shift-Z", lambda boxes: _say(window(), "Done again", boxes.redo()))
    _Tab.of(viewer).layers.add(boxes)


def choose(boxes: AnnotationLayer, place: int) -> None:
    """Make a class that of new boxes, and of those that are selected."""
    if not boxes.classes.choose(place):
        show_info(f"There is no class {place + 1}; add one in the Annotate panel.")
    elif boxes.classes.current:
        boxes.set_class(boxes.classes.current)


def step(viewer: Any, boxes: AnnotationLayer, forward: bool = True) -> int | None:
    """Select the next box of the plane that is shown and bring it to the centre; its index."""
    order = _reading_order(boxes)
    if not order:
        return None
    layer = boxes.layer
    chosen = [order.index(k) for k in layer.selected_data if k in order]
    if chosen:
        place = max(chosen) + 1 if forward else min(chosen) - 1
    else:
        place = 0 if forward else -1
    index = order[place % len(order)]
    if layer.mode != "select":
        layer.mode = "select"
    layer.selected_data = {index}
    centre_on(viewer, layer, layer.data[index].mean(axis=0))
    return index


def centre_on(viewer: Any, layer: Any, point: Any) -> None:
    """Move the camera to a point of a layer's data."""
    world = np.array(layer.data_to_world(point), float)
    for axis, (here, there) in enumerate(zip(layer.units, viewer.dims.units or (), strict=False)):
        if here != there and here.is_compatible_with(there):
            world[axis] = (world[axis] * here).to(there).magnitude
    shown = [axis - (viewer.dims.ndim - layer.ndim) for axis in viewer.dims.displayed]
    centre = list(viewer.scene.camera.center)
    centre[-len(shown) :] = [float(world[axis]) for axis in shown]
    viewer.scene.camera.center = tuple(centre)


def _reading_order(boxes: AnnotationLayer) -> list[int]:
    """Indices of the shapes that are shown, as one reads: in rows, from the left."""
    layer = boxes.layer
    shown = [int(k) for k in layer._view_indices]
    if not shown:
        return []
    low = np.array([layer.data[k].min(axis=0)[-2:] for k in shown])
    high = np.array([layer.data[k].max(axis=0)[-2:] for k in shown])
    line = max(float(np.median(high[:, 0] - low[:, 0])), 1e-6)
    centre = (low + high) / 2
    rows = np.floor(centre[:, 0] / line)
    return [shown[k] for k in np.lexsort((centre[:, 1], rows))]


class _Tab(QObject):
    """Takes Tab on the canvas while a layer of ours is active; Qt else moves the focus with it."""

    def __init__(self, viewer: Any, canvas: Any) -> None:
        super().__init__(canvas)
        self.setObjectName("napari-beerlanet-tab")
        self._viewer = weakref.ref(viewer)
        self.layers: weakref.WeakSet[AnnotationLayer] = weakref.WeakSet()
        canvas.installEventFilter(self)

    @classmethod
    def of(cls, viewer: Any) -> _Tab:
        """The one of this viewer."""
        canvas = viewer.window._qt_viewer.canvas.native
        found = canvas.findChild(cls, "napari-beerlanet-tab")
        return found if found is not None else cls(viewer, canvas)

    def eventFilter(self, watched: QObject, event: QEvent) -> bool:
        """Step through the boxes of the active layer."""
        if event.type() != QEvent.Type.KeyPress:
            return False
        if event.key() not in (Qt.Key.Key_Tab, Qt.Key.Key_Backtab):
            return False
        viewer = self._viewer()
        active = viewer.layers.selection.active if viewer is not None else None
        boxes = next((made for made in self.layers if made.layer is active), None)
        if boxes is None or viewer is None:
            return False
        step(viewer, boxes, forward=event.key() == Qt.Key.Key_Tab)
        return True


def _say(viewer: Any, done: str, what: str) -> None:
    """In the status line: a notification for each key would be in the way."""
    if viewer is not None:
        viewer.status = f"{done}: {what}." if what else "There is nothing more."
