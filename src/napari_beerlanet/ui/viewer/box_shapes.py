"""Boxes and regions to shapes of a Shapes layer and back, with the half-pixel shift.

napari's pixels have their centres at whole numbers, boxes and regions their edges: half a pixel
lies between (`HALF_PIXEL`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes

from napari_beerlanet.core.boxes.annotations import boxes_from_shapes
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.ui.viewer.fast_shapes import (
    BoxCorners,
    Slicing,
    build_shape_list,
    fast_shapes_supported,
    recolour_shape_list,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex

MAX_DRAWN_BOXES = 2000
"""Boxes that a layer shows at once: more do not follow the mouse."""

MAX_DRAWN_BOXES_SLOW = 300
"""The same where `fast_shapes` does not work."""

HALF_PIXEL = 0.5
"""From napari's coordinates (pixel centres at whole numbers) to those of boxes (pixel edges)."""


def corners_from_boxes(xyxy: npt.NDArray[Any], index: Sequence[int] = ()) -> BoxCorners:
    """Boxes (n, 4) of the plane `index` of a stack in napari's coordinates."""
    x1, y1, x2, y2 = np.asarray(xyxy, np.float32).T - HALF_PIXEL
    planar = np.stack([y1, x1, y1, x2, y2, x2, y2, x1], axis=1).reshape(-1, 4, 2)
    leading = np.broadcast_to(np.asarray(index, np.float32), (len(planar), 4, len(index)))
    return np.concatenate([leading, planar], axis=2)


def bounding_boxes(shapes: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float32]:
    """(n, 4) boxes around shapes (m, D) in napari's coordinates."""
    if not len(shapes):
        return np.empty((0, 4), np.float32)
    corners = np.concatenate(shapes)[:, -2:]
    first = np.cumsum([0, *(len(shape) for shape in shapes)])[:-1]
    low = np.minimum.reduceat(corners, first).astype(np.float32)
    high = np.maximum.reduceat(corners, first).astype(np.float32)
    return np.concatenate([low[:, ::-1], high[:, ::-1]], axis=1) + np.float32(HALF_PIXEL)


def max_drawn_boxes() -> int:
    """How many boxes a layer may show at once."""
    return MAX_DRAWN_BOXES if fast_shapes_supported() else MAX_DRAWN_BOXES_SLOW


def set_boxes(
    layer: Shapes, corners: BoxCorners, colours: npt.NDArray[Any], width: float, features: Any
) -> None:
    """Make these the layer's only shapes: colours (n, 4) of the edges, features by name."""
    layer.selected_data = set()
    with layer.block_thumbnail_update():
        if len(corners) and fast_shapes_supported() and layer._slice_input.ndisplay == 2:
            layer._data_view = build_shape_list(corners, colours, width, _slicing(layer))
            layer.features = features
            layer.refresh(thumbnail=False)
        else:
            _set_boxes_slow(layer, corners, colours, width, features)


def _set_boxes_slow(
    layer: Shapes, corners: BoxCorners, colours: Any, width: float, features: Any
) -> None:
    layer.data = []
    if len(corners):
        style = {"edge_color": colours, "face_color": "transparent", "edge_width": width}
        layer.add_rectangles(list(corners), **style)
    layer.features = features


def restyle_boxes(layer: Shapes, colours: npt.NDArray[Any], width: float, features: Any) -> bool:
    """Give the boxes of `set_boxes`, as they are, other edges and another table.

    The selection stays. False, and nothing has changed, where they have to be set anew.
    """
    if not fast_shapes_supported() or layer._slice_input.ndisplay != 2:
        return False
    with layer.block_thumbnail_update():
        if not recolour_shape_list(layer._data_view, np.asarray(colours, np.float32)):
            return False
        layer.features = features
        set_edge_width(layer, width)  # which has napari draw them
    return True


def set_edge_width(layer: Shapes, width: float) -> None:
    """Give all edges this width in the layer's pixels."""
    view = layer._data_view
    if not fast_shapes_supported() or not len(view.shapes):
        layer.edge_width = width
        return
    for shape in view.shapes:
        shape._edge_width = width
    mesh = view._mesh
    mesh.vertices[:] = mesh.vertices_centers + width * mesh.vertices_offsets
    layer.events.edge_width()


def _slicing(layer: Shapes) -> Slicing:
    """The order of the layer's axes, and where those that are not displayed are sliced."""
    dims = layer._slice_input
    return tuple(dims.order), list(np.array(layer._data_slice.point)[dims.not_displayed])


@dataclass(frozen=True)
class ShapeBoxes:
    """Boxes (n, 4) around shapes, indices of the shapes (n,), their planes (n, leading axes).

    `notes`: sentences on shapes that enclose nothing.
    """

    xyxy: npt.NDArray[np.float64]
    which: npt.NDArray[np.int64]
    planes: npt.NDArray[np.int64]
    notes: list[str] = field(default_factory=list)


def points_from_shape(shape: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(k, 2) x, y in the image's pixels of a shape (k, D) in napari's coordinates."""
    return np.asarray(shape, np.float64)[:, :-3:-1] + HALF_PIXEL


def plane_index_of_shape(shape: npt.NDArray[Any]) -> PlaneIndex:
    """The plane that a shape (k, D) lies in."""
    return tuple(np.rint(np.asarray(shape)[0, :-2]).astype(int).tolist())


def read_shape_boxes(shapes: Sequence[npt.NDArray[Any]], kinds: Sequence[str]) -> ShapeBoxes:
    """Bounding boxes of the shapes of a layer, in their order."""
    rectangles = np.flatnonzero([kind == "rectangle" for kind in kinds])
    xyxy = _rectangle_bounds([shapes[k] for k in rectangles.tolist()])
    valid = (xyxy[:, 2:] > xyxy[:, :2]).all(axis=1) & np.isfinite(xyxy).all(axis=1)
    others = np.setdiff1d(np.arange(len(shapes)), rectangles[valid])
    converted = boxes_from_shapes(
        [points_from_shape(shapes[k]) for k in others.tolist()], [kinds[k] for k in others.tolist()]
    )
    which = np.concatenate([rectangles[valid], others[converted.which]])
    order = np.argsort(which)
    which = which[order]
    planes = [plane_index_of_shape(shapes[k]) for k in which.tolist()]
    leading = shapes[0].shape[1] - 2 if len(shapes) else 0
    return ShapeBoxes(
        np.concatenate([xyxy[valid], converted.xyxy])[order],
        which,
        np.array(planes, np.int64).reshape(len(which), leading),
        converted.notes,
    )


def read_shape_regions(
    shapes: Sequence[npt.NDArray[Any]], kinds: Sequence[str], plane: PlaneIndex
) -> tuple[list[Region], list[str]]:
    """Regions of one plane, and sentences on shapes that enclose nothing."""
    regions, notes = [], []
    for shape, kind in zip(shapes, kinds, strict=True):
        if plane_index_of_shape(shape) != plane:
            continue
        try:
            regions.append(Region.from_shape(points_from_shape(shape), kind))
        except ValueError as error:
            notes.append(str(error))
    return regions, list(dict.fromkeys(notes))


def shape_from_region(region: Region, plane: PlaneIndex) -> npt.NDArray[np.float64]:
    """(k, D) corners of a region in napari's coordinates."""
    planar = region.points[:, ::-1] - HALF_PIXEL
    leading = np.broadcast_to(np.array(plane, np.float64), (len(planar), len(plane)))
    return np.concatenate([leading, planar], axis=1)


def _rectangle_bounds(rectangles: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    """(n, 4) boxes of rectangles (4, D) each, all at once."""
    if not len(rectangles):
        return np.empty((0, 4))
    corners = np.asarray(rectangles, np.float64)[:, :, :-3:-1] + HALF_PIXEL
    return np.concatenate([corners.min(axis=1), corners.max(axis=1)], axis=1)
