"""Key bindings of an annotation layer: classes or types by number, next box, confirm, undo.

Bound to the layer itself, so they take precedence over napari's bindings of all Shapes layers: the
numbers 1 to 7, which select tools there, have letters beside them (R, E, P, S, D, Z, …), which
stay.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QEvent, QObject, Qt
from qtpy.QtGui import QKeyEvent

from napari_beerlanet.ui.annotate.annotation_layer import AnnotationLayer
from napari_beerlanet.ui.annotate.classes import NUMBER_KEYS
from napari_beerlanet.ui.common.notifications import show_info
from napari_beerlanet.ui.viewer.box_shapes import HALF_PIXEL
from napari_beerlanet.ui.viewer.viewport import viewport_of

if TYPE_CHECKING:
    from napari import Viewer
    from napari.layers import Layer

KEY_HELP = (
    "1–9 class of new and selected boxes · Tab next box · Shift-Tab previous · C confirm · "
    "Del delete · Ctrl-Z undo · R draw · S select"
)
TYPE_KEY_HELP = KEY_HELP.replace("class of new and selected boxes", "type of boxes · 0 no type")


def bind_keys(viewer: Viewer, boxes: AnnotationLayer) -> None:
    """Bind all keys of a layer."""
    layer, weak_boxes, weak_viewer = boxes.layer, weakref.ref(boxes), weakref.ref(viewer)

    def bind(key: str, act: Callable[[AnnotationLayer], None]) -> None:
        def pressed(layer: Any) -> None:
            alive = weak_boxes()
            if alive is not None:
                act(alive)

        layer.bind_key(key, pressed, overwrite=True)

    for index in range(NUMBER_KEYS):
        bind(str(index + 1), partial(choose_class, index=index))
    bind("0", remove_type)
    bind("C", lambda boxes: boxes.confirm())
    bind("Control-Z", lambda boxes: _show_status(weak_viewer(), "Undone", boxes.undo()))
    bind("Control-Shift-Z", lambda boxes: _show_status(weak_viewer(), "Redone", boxes.redo()))
    _TabKeyFilter.of(viewer).layers.add(boxes)


def choose_class(boxes: AnnotationLayer, index: int) -> None:
    """Set the class of new boxes and of the selected ones or, while those are active, the type."""
    types = boxes.types
    if types.active:
        if not types.choose(index):
            show_info(f"There is no type {index + 1}; add one in the tab “Annotate”.")
        elif types.current:
            boxes.set_type(types.current)
    elif not boxes.classes.choose(index):
        show_info(f"There is no class {index + 1}; add one in the tab “Annotate”.")
    elif boxes.classes.current:
        boxes.set_class(boxes.classes.current)


def remove_type(boxes: AnnotationLayer) -> None:
    """Take the type from the selected boxes, while keys set types."""
    if boxes.types.active:
        boxes.set_type("")


def select_next_box(viewer: Viewer, boxes: AnnotationLayer, forward: bool = True) -> int | None:
    """Select the next box of the displayed plane and bring it into view; returns its index."""
    order = _reading_order(boxes)
    if not order:
        return None
    layer = boxes.layer
    selected = [order.index(k) for k in layer.selected_data if k in order]
    if selected:
        position = max(selected) + 1 if forward else min(selected) - 1
    else:
        position = 0 if forward else -1
    index = order[position % len(order)]
    if layer.mode != "select":
        layer.mode = "select"
    layer.selected_data = {index}
    if not _is_in_view(viewer, layer, layer.data[index]):
        centre_on(viewer, layer, layer.data[index].mean(axis=0))
    return index


def _is_in_view(viewer: Viewer, layer: Layer, corners: npt.NDArray[Any]) -> bool:
    """Whether the canvas shows all of a box: then nothing needs to move."""
    viewport = viewport_of(layer, viewer, margin=0.0)
    if viewport is None:
        return False
    x1, y1, x2, y2 = viewport.box - HALF_PIXEL
    low, high = corners.min(axis=0)[-2:], corners.max(axis=0)[-2:]
    return bool(y1 <= low[0] and x1 <= low[1] and high[0] <= y2 and high[1] <= x2)


def centre_on(viewer: Viewer, layer: Layer, point: npt.ArrayLike) -> None:
    """Move the camera to a point of a layer's data."""
    world = np.array(layer.data_to_world(point), float)
    for axis, (here, there) in enumerate(zip(layer.units, viewer.dims.units or (), strict=False)):
        if here != there and here.is_compatible_with(there):
            world[axis] = (world[axis] * here).to(there).magnitude
    visible = [axis - (viewer.dims.ndim - layer.ndim) for axis in viewer.dims.displayed]
    centre = np.array(viewer.scene.camera.center)
    centre[-len(visible) :] = world[visible]
    viewer.scene.camera.center = tuple(centre.tolist())


def _reading_order(boxes: AnnotationLayer) -> list[int]:
    """Indices of the visible shapes in reading order: row by row, from the left."""
    layer = boxes.layer
    visible = [int(k) for k in layer._view_indices]
    if not visible:
        return []
    low = np.array([layer.data[k].min(axis=0)[-2:] for k in visible])
    high = np.array([layer.data[k].max(axis=0)[-2:] for k in visible])
    line = max(float(np.median(high[:, 0] - low[:, 0])), 1e-6)
    centre = (low + high) / 2
    rows = np.floor(centre[:, 0] / line)
    return [visible[k] for k in np.lexsort((centre[:, 1], rows))]


class _TabKeyFilter(QObject):
    """Handles Tab on the canvas while an annotation layer is active; Qt would move the focus."""

    def __init__(self, viewer: Viewer, canvas: Any) -> None:
        super().__init__(canvas)
        self.setObjectName("napari-beerlanet-tab")
        self._viewer = weakref.ref(viewer)
        self.layers: weakref.WeakSet[AnnotationLayer] = weakref.WeakSet()
        canvas.installEventFilter(self)

    @classmethod
    def of(cls, viewer: Viewer) -> _TabKeyFilter:
        """The filter of this viewer."""
        canvas = viewer.window._qt_viewer.canvas.native
        existing = canvas.findChild(cls, "napari-beerlanet-tab")
        return existing if existing is not None else cls(viewer, canvas)

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """Step through the boxes of the active layer."""
        if not isinstance(event, QKeyEvent) or event.type() != QEvent.Type.KeyPress:
            return False
        if event.key() not in (Qt.Key.Key_Tab, Qt.Key.Key_Backtab):
            return False
        viewer = self._viewer()
        active = viewer.layers.selection.active if viewer is not None else None
        boxes = next((boxes for boxes in self.layers if boxes.layer is active), None)
        if boxes is None or viewer is None:
            return False
        select_next_box(viewer, boxes, forward=event.key() == Qt.Key.Key_Tab)
        return True


def _show_status(viewer: Viewer | None, done: str, what: str) -> None:
    """Show a step in napari's status bar; a notification per key press would be in the way."""
    if viewer is not None:
        viewer.status = f"{done}: {what}." if what else "Nothing to undo or redo."
