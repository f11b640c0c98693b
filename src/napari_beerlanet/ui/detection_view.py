"""Which part of a layer the canvas shows, and how large a pixel of the screen is in it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from napari.layers import Layer

from napari_beerlanet.ui.planes import canvas_corners, in_units_of

_MARGIN = 0.15  # of the view's size: a short way that it may move without a gap at its border


class View(NamedTuple):
    """x1, y1, x2, y2 in image pixels (edges, not centres), and image pixels per screen pixel."""

    box: npt.NDArray[np.float64]
    pixel: float


def view_of(layer: Layer, viewer: Any, margin: float = _MARGIN) -> View | None:
    """What the canvas shows of a layer, a little more at each side; None if that is not known."""
    size = np.array(viewer.canvas.size, dtype=float)
    zoom = viewer.scene.camera.zoom
    if not (np.isfinite(zoom) and zoom > 0 and (size > 0).all()) or viewer.dims.ndisplay != 2:
        return None
    corners = canvas_corners(layer, viewer)
    far = np.hypot(*(corners[-1] - corners[0])) / np.hypot(*size)
    low, high = corners.min(axis=0) + 0.5, corners.max(axis=0) + 0.5
    more = margin * (high - low)
    return View(np.array([*(low - more)[::-1], *(high + more)[::-1]]), float(far))


def plane_of(layer: Layer, viewer: Any) -> tuple[int, ...]:
    """The place in a stack that the viewer's sliders point at, () where there is no stack."""
    if layer.ndim <= 2:
        return ()
    at = layer.world_to_data(in_units_of(layer, viewer, viewer.dims.point))
    return tuple(int(i) for i in np.rint(at[:-2]))
