"""An image layer of the cell density, where there are more boxes than can be drawn.

The picture is rendered in a thread, of the whole image at once, so it need not follow the viewport.
Its opacity does: it rises as the boxes in view become too many, while their edges fade.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from qtpy.QtCore import QTimer

from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.figures.heatmap import HeatmapGrid, RGBAImage, draw_heatmap
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.detections.box_store import BoxFilter
from napari_beerlanet.ui.detections.visible_boxes import VisibleBoxes
from napari_beerlanet.ui.viewer.layers import (
    Role,
    add_unselected,
    grid_transform,
    role_metadata,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex, image_shape

if TYPE_CHECKING:
    from napari.viewer import Viewer

MIN_BOXES_FOR_DENSITY = 10_000
"""Boxes from which on there is a picture of their density."""

_FULL_FADE_RATIO = 8.0  # times as many boxes in view as can be drawn: only the density is left
_OPACITY = 0.7
_REFRESH_INTERVAL_MS = 1000  # between pictures while boxes are being added
_RESCALE_RATIO = 1.5  # times as many boxes as before: the opacity is scaled anew


def fade_fraction(in_view: int, limit: int) -> float:
    """From 0, all boxes in view are drawn, to 1, none: by how many times they are too many."""
    if in_view <= limit:
        return 0.0
    return float(min(np.log(in_view / limit) / np.log(_FULL_FADE_RATIO), 1.0))


@dataclass(frozen=True, eq=False)
class _DensityRequest:
    """A picture of boxes: which of them (n,), their plane, colours (k, 3), and whose (n,) each is.

    `codes` are labels or types: rows of `colours`.
    """

    boxes: VisibleBoxes
    mask: npt.NDArray[np.bool_]
    index: PlaneIndex
    codes: npt.NDArray[Any]
    colours: npt.NDArray[Any]

    def is_same(self, other: _DensityRequest) -> bool:
        """By the mask's identity: it is made anew when anything changes."""
        if self.mask is not other.mask or self.index != other.index:
            return False
        return np.array_equal(self.colours, other.colours)

    def has_grown_from(self, other: _DensityRequest) -> bool:
        """Whether boxes were added to those of the other."""
        return self.boxes is other.boxes and len(self.mask) > len(other.mask)


class CellDensityOverlay:
    """The image layer of the cell density of one `DetectionLayer`, created when first needed.

    `ready` is called when a picture is there. A layer that the user deletes does not come back; the
    user decides whether it is visible, and how opaque at most.
    """

    def __init__(self, viewer: Viewer, shapes: Shapes, source: Image, ready: Callable[[], None]):
        self._viewer, self._shapes, self._ready = viewer, shapes, ready
        self._shape, self._source = image_shape(source), source
        self.layer: Image | None = None
        self.dismissed = False
        self._task = Task()
        self._requested: _DensityRequest | None = None
        self._rendered: _DensityRequest | None = None
        self._refresh_timer = QTimer()
        self._refresh_timer.setSingleShot(True)
        self._refresh_timer.setInterval(_REFRESH_INTERVAL_MS)
        self._refresh_timer.timeout.connect(self._start_delayed)
        self._pictured: VisibleBoxes | None = None
        self._opacity_scale: tuple[VisibleBoxes | None, int, float | None] = (None, 0, None)
        self._fade, self._max_opacity, self._own_change = 0.0, _OPACITY, False
        shapes.events.visible.connect(self._follow_visibility)
        viewer.layers.events.removed.connect(self._on_removed)

    def has_picture_of(self, boxes: VisibleBoxes) -> bool:
        """Whether the layer has a picture of these boxes, maybe of those a moment ago."""
        return self.layer is not None and self._pictured is boxes

    def is_expected(self, boxes: VisibleBoxes) -> bool:
        """Whether there is a picture of these boxes, or soon will be."""
        if self.dismissed:
            return False
        return self.has_picture_of(boxes) or (
            self._requested is not None and self._requested.boxes is boxes
        )

    def request(
        self,
        boxes: VisibleBoxes,
        box_filter: BoxFilter,
        codes: npt.NDArray[Any],
        colours: npt.NDArray[Any],
        index: PlaneIndex,
    ) -> None:
        """Render the boxes that pass the filter, if not done.

        `colours` (k, 3) from 0 to 255; `codes` (n,) which of them each box has.
        """
        request = _DensityRequest(boxes, boxes.mask(box_filter), index, codes, colours)
        if self.dismissed or (self._requested is not None and request.is_same(self._requested)):
            return
        self._requested = request
        if not self._task.running:  # a slider that moves must not keep it from ever being done
            self._start_newest()

    @property
    def waiting(self) -> bool:
        """Whether a picture is being made, or soon will be."""
        return self._task.running or self._refresh_timer.isActive()

    def _start_newest(self) -> None:
        """Render what was requested last; while boxes are being added, only once in a while."""
        request, previous = self._requested, self._rendered
        if request is None or (previous is not None and request.is_same(previous)):
            return
        if self.layer is not None and previous is not None and request.has_grown_from(previous):
            if not self._refresh_timer.isActive():
                self._refresh_timer.start()
        else:
            self._start_render(request)

    def _start_delayed(self) -> None:
        if self._requested is not None and not self._task.running:
            self._start_render(self._requested)

    def _start_render(self, request: _DensityRequest) -> None:
        self._rendered = request
        self._refresh_timer.stop()
        store, shape, full = request.boxes.store, self._shape, self._opacity_scale_of(request.boxes)
        mask, colours, xyxy, labels = request.mask, request.colours, store.xyxy, request.codes

        def work(report: Report) -> tuple[HeatmapGrid, RGBAImage, float]:
            rows = np.flatnonzero(mask[: len(xyxy)])
            grid = HeatmapGrid.for_boxes(shape, xyxy)
            return grid, *draw_heatmap(grid, xyxy[rows], labels[rows], colours, full)

        self._task.start(work, lambda made: self._done(request, *made))

    def _done(
        self, request: _DensityRequest, grid: HeatmapGrid, picture: RGBAImage, full: float
    ) -> None:
        if self._opacity_scale_of(request.boxes) is None:
            self._opacity_scale = request.boxes, len(request.boxes.store), full
        wanted = self._requested is not None and self._requested.boxes is request.boxes
        if wanted and not self.dismissed:
            self._set_picture(request, grid, picture)
        self._start_newest()

    def fade(self, by: float) -> None:
        """Set the visible fraction of its opacity, from 0 to 1."""
        self._fade = by
        if self.layer is not None:
            self._set("opacity", self._max_opacity * by)

    def close(self) -> None:
        """Remove the layer, and render no further picture."""
        self._task.close()
        self._refresh_timer.stop()
        self._shapes.events.visible.disconnect(self._follow_visibility)
        self._viewer.layers.events.removed.disconnect(self._on_removed)
        layer, self.layer, self.dismissed = self.layer, None, True
        if layer is not None:  # not within the removal of another
            QTimer.singleShot(0, lambda: _remove_layer(self._viewer, layer))

    def _opacity_scale_of(self, boxes: VisibleBoxes) -> float | None:
        """Boxes in a cell that are shown opaque: as before, unless there are many more now."""
        of, count, full = self._opacity_scale
        same = of is boxes and len(boxes.store) < _RESCALE_RATIO * count
        return full if same else None

    def _set_picture(self, request: _DensityRequest, grid: HeatmapGrid, picture: RGBAImage) -> None:
        data = picture.reshape((1,) * len(request.index) + picture.shape)
        place = grid_transform(self._shapes, grid.cell, request.index)
        if self.layer is None:
            self._create_layer(data, place)
        else:
            for name, value in place.items():
                if not np.array_equal(getattr(self.layer, name), value):
                    setattr(self.layer, name, value)
            self.layer.data = data
        first, self._pictured = self._pictured is not request.boxes, request.boxes
        if first:
            self._ready()

    def _create_layer(self, data: npt.NDArray[np.uint8], place: dict[str, Any]) -> None:
        self.layer = Image(
            data,
            rgb=True,
            name=f"{self._source.name} · cell density",
            opacity=self._max_opacity * self._fade,
            visible=self._shapes.visible,
            interpolation2d="linear",
            metadata=role_metadata(Role.CELL_DENSITY, self._source),
            **transform_kwargs(self._shapes) | place,
        )
        add_unselected(self._viewer, self.layer, position=self._viewer.layers.index(self._shapes))
        self.layer.events.opacity.connect(self._on_opacity_changed)

    def _set(self, name: str, value: Any) -> None:
        if self.layer is not None and getattr(self.layer, name) != value:
            self._own_change = True
            setattr(self.layer, name, value)
            self._own_change = False

    def _on_opacity_changed(self, event: Any = None) -> None:
        if not self._own_change and self.layer is not None and self._fade > 0.05:
            self._max_opacity = min(self.layer.opacity / self._fade, 1.0)

    def _follow_visibility(self, event: Any = None) -> None:
        self._set("visible", self._shapes.visible)

    def _on_removed(self, event: Any) -> None:
        if self.layer is not None and event.value is self.layer:
            self.layer, self.dismissed = None, True
            self._task.cancel()
            self._refresh_timer.stop()
            self._ready()


def _remove_layer(viewer: Viewer, layer: Image) -> None:
    if layer in viewer.layers:
        viewer.layers.remove(layer)
