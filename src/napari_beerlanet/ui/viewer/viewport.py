"""The viewport: the part of a layer on the canvas, the search area, a message on the canvas."""

from __future__ import annotations

import itertools
import time
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, cast

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Layer, Shapes
from qtpy.QtCore import QTimer

from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.ui.viewer.box_shapes import HALF_PIXEL
from napari_beerlanet.ui.viewer.planes import (
    Plane,
    PlaneIndex,
    SliceWindow,
    image_shape,
    to_layer_units,
)

if TYPE_CHECKING:
    from napari.components.overlays import TextOverlay
    from napari.viewer import Viewer
    from qtpy.QtWidgets import QWidget

    from napari_beerlanet.ui.common.panel import DockedWidget

SearchArea = Literal["whole", "view", "shapes"]
"""The whole image, what is in view, or the selected shapes."""

_VIEWPORT_MARGIN = 0.15  # of its size: how far it may move without a gap at its border

_SETTLING_S = 2.0  # in which docks and controls take their space


class Viewport(NamedTuple):
    """x1, y1, x2, y2 in image pixels (edges, not centres), and image pixels per screen pixel."""

    box: npt.NDArray[np.float64]
    pixel_size: float


def viewport_of(layer: Layer, viewer: Viewer, margin: float = _VIEWPORT_MARGIN) -> Viewport | None:
    """What the canvas shows of a layer, with a margin; None in 3D or without a canvas."""
    size = np.array(viewer.canvas.size, dtype=np.float64)
    zoom = viewer.scene.camera.zoom
    if not (np.isfinite(zoom) and zoom > 0 and (size > 0).all()) or viewer.dims.ndisplay != 2:
        return None
    corners = canvas_corners(layer, viewer)
    pixel_size = np.hypot(*(corners[-1] - corners[0])) / np.hypot(*size)
    low, high = corners.min(axis=0), corners.max(axis=0)
    more = margin * (high - low)
    return Viewport(np.array([*(low - more)[::-1], *(high + more)[::-1]]), float(pixel_size))


def paint_later(viewer: Viewer, delay_ms: int = 1) -> None:
    """Have the canvas painted in a turn of the event loop of its own.

    Qt paints right after what has changed the picture, before anything else is heard. Where both
    take long, mouse and keys are heard in between.
    """
    qt_viewer = getattr(getattr(viewer, "window", None), "_qt_viewer", None)
    if qt_viewer is None:
        return
    canvas: QWidget = qt_viewer.canvas.native
    if canvas.updatesEnabled():
        canvas.setUpdatesEnabled(False)
        timer = QTimer(canvas)  # which goes with the canvas

        def paint() -> None:
            timer.deleteLater()
            canvas.setUpdatesEnabled(True)

        timer.setSingleShot(True)
        timer.timeout.connect(paint)
        timer.start(delay_ms)


def current_plane_index(layer: Layer, viewer: Viewer) -> PlaneIndex:
    """The plane of a stack that the viewer's sliders point at."""
    if layer.ndim <= 2:
        return ()
    at = layer.world_to_data(to_layer_units(layer, viewer, viewer.dims.point))
    return tuple(int(i) for i in np.rint(at[:-2]))


def canvas_corners(layer: Layer, viewer: Viewer) -> npt.NDArray[np.float64]:
    """(4, 2) rows and columns of the canvas corners in image pixels (edges, not centres)."""
    half = np.array(viewer.canvas.size, dtype=np.float64) / viewer.scene.camera.zoom / 2
    centre, corners = np.array(viewer.scene.camera.center[-2:]), []
    for signs in itertools.product((-1, 1), repeat=2):
        world = np.array(viewer.dims.point, dtype=np.float64)
        world[list(viewer.dims.displayed[-2:])] = centre + half * signs
        corners.append(layer.world_to_data(to_layer_units(layer, viewer, world))[-2:])
    return np.array(corners) + HALF_PIXEL


def visible_window(layer: Image, viewer: Viewer) -> SliceWindow | None:
    """The rows and columns of the finest level that the canvas shows; None if it shows none."""
    return _bounding_window(canvas_corners(layer, viewer), image_shape(layer))


def is_whole_in_view(layer: Image, viewer: Viewer) -> bool:
    """Whether the canvas shows an image from border to border."""
    corners, shape = canvas_corners(layer, viewer), np.array(image_shape(layer)[:2])
    low, high = corners.min(axis=0), corners.max(axis=0)
    return bool((low <= 0).all() and (high >= shape).all())


class WholeImageView:
    """Fits an image again that was in view as a whole when the canvas becomes smaller.

    napari fits an image once, before the controls of its layer, or our dock, have taken their part
    of the window. Only until the window has settled, and not once the user has moved the camera.
    """

    def __init__(self, panel: DockedWidget) -> None:
        self._viewer = panel.viewer
        self._image: Image | None = None
        self._fitted, self._end = (0.0, (0.0, 0.0, 0.0)), 0.0
        panel.connect_event(self._viewer.canvas.events.size, self._canvas_resized)

    def keep(self, image: Image | None) -> None:
        """Keep this image in view for a moment, if all of it is."""
        flat = self._viewer.dims.ndisplay == 2
        whole = image is not None and flat and is_whole_in_view(image, self._viewer)
        self._image = image if whole else None
        self._fitted, self._end = self._camera(), time.monotonic() + _SETTLING_S

    def _camera(self) -> tuple[float, Any]:
        camera = self._viewer.scene.camera
        return camera.zoom, camera.center

    def _canvas_resized(self, event: Any) -> None:
        viewer, image = self._viewer, self._image
        if image is None:
            return
        settled = time.monotonic() > self._end or viewer.dims.ndisplay != 2
        if settled or self._camera() != self._fitted or image not in viewer.layers:
            self._image = None
        elif not is_whole_in_view(image, viewer):
            viewer.fit_to_view(layers=[image])
            self._fitted = self._camera()


class CanvasMessage:
    """Writes into the viewer's text overlay, unless the user or another plugin uses it."""

    def __init__(self, viewer: Viewer) -> None:
        self._overlay = cast("TextOverlay", viewer.canvas.overlays.text)
        self._shown_text = ""

    def show(self, text: str) -> None:
        """Show a text; "" hides it."""
        overlay = self._overlay
        free = not overlay.visible or not overlay.text or overlay.text == self._shown_text
        if not free or (text == self._shown_text and overlay.visible == bool(text)):
            return
        if not text and not self._shown_text:
            return
        overlay.visible = bool(text)
        self._shown_text = overlay.text = text
        if text:  # napari puts it in its place only one drawing later
            overlay.events.position.emit(overlay.position)


def search_windows(
    area: SearchArea, layer: Image, plane: Plane, viewer: Viewer
) -> tuple[SliceWindow, ...] | None:
    """Rows and columns to search, None for everything; an `ImageError` says why there are none."""
    if area == "whole":
        return None
    if area == "view":
        window = visible_window(layer, viewer)
        if window is None:
            raise ImageError(
                f"“{layer.name}” is not in the current view; use the home button to reset the view."
            )
        return (window,)
    return _windows_of_shapes(layer, plane, viewer)


def _windows_of_shapes(layer: Image, plane: Plane, viewer: Viewer) -> tuple[SliceWindow, ...]:
    selected = selected_shapes(viewer)
    if not selected:
        raise ImageError(
            "No shape is selected; draw a region of interest in a Shapes layer and select it, or "
            "search the whole image."
        )
    windows: list[SliceWindow] = []
    for shapes, vertices in selected:
        window = _bounding_window(to_image_pixels(vertices, shapes, layer), plane.shape)
        if window is not None and window not in windows:
            windows.append(window)
    if not windows:
        raise ImageError(f"The selected shapes are empty or outside of “{layer.name}”.")
    return tuple(windows)


def selected_shapes(viewer: Viewer) -> list[tuple[Shapes, npt.NDArray[Any]]]:
    """Selected shapes, those of the active layer if it has any, otherwise of all layers."""
    active = viewer.layers.selection.active
    for layers in ([active], list(viewer.layers)):
        selected = [
            (layer, np.asarray(layer.data[k]))
            for layer in layers
            if isinstance(layer, Shapes)
            for k in sorted(layer.selected_data)
        ]
        if selected:
            return selected
    return []


def to_image_pixels(vertices: npt.NDArray[Any], of: Layer, image: Image) -> npt.NDArray[np.float64]:
    """(m, 2) rows and columns in an image of vertices (m, D) of a layer, by way of the world."""
    placed = []
    for vertex in vertices:
        world = np.asarray(of.data_to_world(vertex), dtype=np.float64)
        full = np.zeros(image.ndim)
        take = min(image.ndim, len(world))
        full[-take:] = world[-take:]
        placed.append(np.asarray(image.world_to_data(full))[-2:])
    return np.array(placed) + HALF_PIXEL


def _bounding_window(
    corners: npt.NDArray[np.float64], shape: tuple[int, int]
) -> SliceWindow | None:
    """The pixels that the corners' bounding box touches, None if there is none."""
    if not np.isfinite(corners).all():
        return None
    low = np.clip(np.floor(corners.min(axis=0)), 0, shape).astype(int)
    high = np.clip(np.ceil(corners.max(axis=0)), 0, shape).astype(int)
    if (high - low < 1).any():
        return None
    return slice(int(low[0]), int(high[0])), slice(int(low[1]), int(high[1]))
