"""Many boxes into a Shapes layer at once, and out of it again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes

from napari_beerlanet.ui.detection_mesh import Corners, Slicing, build, fast

MOST = 2000
"""Boxes that a layer shows at once: more take longer to draw than a hand takes to move."""

MOST_SLOWLY = 300
"""The same where napari has to build them."""

_HALF = np.float32(0.5)  # napari's pixels have their centres at whole numbers, boxes their edges


def corners_of(xyxy: npt.NDArray[Any], index: Sequence[int] = ()) -> Corners:
    """Boxes (n, 4) of the plane `index` of a stack in napari's coordinates."""
    x1, y1, x2, y2 = np.asarray(xyxy, np.float32).T - _HALF
    planar = np.stack([y1, x1, y1, x2, y2, x2, y2, x1], axis=1).reshape(-1, 4, 2)
    leading = np.broadcast_to(np.asarray(index, np.float32), (len(planar), 4, len(index)))
    return np.concatenate([leading, planar], axis=2)


def boxes_of(shapes: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """(n, 4) boxes around shapes (m, D) in napari's coordinates."""
    if not len(shapes):
        return np.empty((0, 4), np.float32)
    low = np.array([np.min(shape, axis=0)[-2:] for shape in shapes], np.float32)
    high = np.array([np.max(shape, axis=0)[-2:] for shape in shapes], np.float32)
    return np.concatenate([low[:, ::-1], high[:, ::-1]], axis=1) + _HALF


def most() -> int:
    """How many boxes may be put into a layer at once."""
    return MOST if fast() else MOST_SLOWLY


def put(
    layer: Shapes, corners: Corners, colours: npt.NDArray[Any], width: float, features: Any
) -> None:
    """Make these the layer's only shapes: colours (n, 4) of the edges, features by name."""
    layer.selected_data = set()
    with layer.block_thumbnail_update():
        if len(corners) and fast() and layer._slice_input.ndisplay == 2:
            layer._data_view = build(corners, colours, width, _slicing(layer))
            layer.features = features
            layer.refresh(thumbnail=False)
        else:
            _put_slowly(layer, corners, colours, width, features)


def _put_slowly(layer: Shapes, corners: Corners, colours: Any, width: float, features: Any) -> None:
    layer.data = []
    if len(corners):
        look = {"edge_color": colours, "face_color": "transparent", "edge_width": width}
        layer.add_rectangles(list(corners), **look)
    layer.features = features


def set_width(layer: Shapes, width: float) -> None:
    """Give all edges this width in the layer's pixels."""
    view = layer._data_view
    if not fast() or not len(view.shapes):
        layer.edge_width = width
        return
    for shape in view.shapes:
        shape._edge_width = width
    mesh = view._mesh
    mesh.vertices[:] = mesh.vertices_centers + width * mesh.vertices_offsets
    layer.events.edge_width()


def _slicing(layer: Shapes) -> Slicing:
    """How the layer's axes are shown: their order, and where the others are cut."""
    shown = layer._slice_input
    return tuple(shown.order), list(np.array(layer._data_slice.point)[shown.not_displayed])
