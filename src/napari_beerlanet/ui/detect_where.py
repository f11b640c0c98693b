"""Which part of an image: all of it, what the canvas shows, or what lies under selected shapes."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Layer, Shapes

from napari_beerlanet.core.images import ImageError
from napari_beerlanet.ui.planes import Plane, Window, visible_window

Where = Literal["whole", "view", "shapes"]


def windows(where: Where, layer: Image, plane: Plane, viewer: Any) -> tuple[Window, ...] | None:
    """Rows and columns to search, None for everything; an `ImageError` says why there are none."""
    if where == "whole":
        return None
    if where == "view":
        seen = visible_window(layer, viewer)
        if seen is None:
            raise ImageError(
                f"The view shows no part of “{layer.name}”; bring it back with the home button."
            )
        return (seen,)
    return _under_shapes(layer, plane, viewer)


def _under_shapes(layer: Image, plane: Plane, viewer: Any) -> tuple[Window, ...]:
    chosen = selected_shapes(viewer)
    if not chosen:
        raise ImageError(
            "No shape is selected; draw one in a Shapes layer and select it, or search the "
            "whole image."
        )
    found = [_window(corners, plane.shape) for corners in _in_pixels(chosen, layer)]
    there = tuple(dict.fromkeys(_key(window) for window in found if window is not None))
    if not there:
        raise ImageError(f"The selected shapes lie beside “{layer.name}” or are empty.")
    return tuple((slice(a, b), slice(c, d)) for a, b, c, d in there)


def selected_shapes(viewer: Any) -> list[tuple[Shapes, npt.NDArray[Any]]]:
    """Selected shapes, those of the active layer if it has any, otherwise of all layers."""
    active = viewer.layers.selection.active
    for layers in ([active], list(viewer.layers)):
        found = [
            (layer, np.asarray(layer.data[k]))
            for layer in layers
            if isinstance(layer, Shapes)
            for k in sorted(layer.selected_data)
        ]
        if found:
            return found
    return []


def _in_pixels(
    chosen: list[tuple[Shapes, npt.NDArray[Any]]], layer: Image
) -> list[npt.NDArray[Any]]:
    return [to_pixels(shape, shapes, layer) for shapes, shape in chosen]


def to_pixels(vertices: npt.NDArray[Any], of: Layer, image: Image) -> npt.NDArray[np.float64]:
    """(m, 2) rows and columns in an image of vertices (m, D) of a layer, by way of the world."""
    placed = []
    for vertex in vertices:
        world = np.asarray(of.data_to_world(vertex), dtype=float)
        full = np.zeros(image.ndim)
        take = min(image.ndim, len(world))
        full[-take:] = world[-take:]
        placed.append(np.asarray(image.world_to_data(full))[-2:])
    return np.array(placed) + 0.5


def _window(corners: npt.NDArray[np.float64], shape: tuple[int, int]) -> Window | None:
    """The pixels that the corners' bounding box touches, None if there is none."""
    if not np.isfinite(corners).all():
        return None
    low = np.clip(np.floor(corners.min(axis=0)), 0, shape).astype(int)
    high = np.clip(np.ceil(corners.max(axis=0)), 0, shape).astype(int)
    if (high - low < 1).any():
        return None
    return slice(int(low[0]), int(high[0])), slice(int(low[1]), int(high[1]))


def _key(window: Window) -> tuple[int, int, int, int]:
    rows, columns = window
    return rows.start, rows.stop, columns.start, columns.stop
