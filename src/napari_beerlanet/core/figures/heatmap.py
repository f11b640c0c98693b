"""Heatmap of many boxes: the denser, the more opaque, in the colours of the classes.

The image has one pixel for each cell of a grid over the whole image, so it serves every zoom.
A cell's colour is the mean of its boxes' colours; its opacity grows with the square root of their
number, so that single objects in an empty region are still visible beside dense tissue.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import BoxArray

MAX_CELLS = 1024
"""Cells along the longer side of an image."""

_MAX_OPACITY = 0.75  # of a map of probabilities: what lies below stays visible
_MIN_CELL_IN_BOXES = 1.5  # typical boxes that a cell is wide, at least
_OPAQUE_PERCENTILE = 95  # percentile of the cells with boxes that is shown opaque
_SAMPLE_BOXES = 10_000  # boxes by which a typical one is known

RGBAImage = npt.NDArray[np.uint8]
"""(h, w, 4) red, green, blue and opacity."""


@dataclass(frozen=True)
class HeatmapGrid:
    """Square cells of `cell` image pixels, `shape` (h, w) of them from the image's corner on."""

    cell: float
    shape: tuple[int, int]

    @classmethod
    def for_boxes(cls, image_shape: tuple[int, int], xyxy: BoxArray) -> HeatmapGrid:
        """A grid over an image (H, W), no finer than its boxes (n, 4) are large."""
        some = xyxy[:: max(len(xyxy) // _SAMPLE_BOXES, 1)]
        side = float(np.median((some[:, 2:] - some[:, :2]).max(axis=1))) if len(some) else 1.0
        cell = max(max(image_shape) / MAX_CELLS, _MIN_CELL_IN_BOXES * side, 1.0)
        height, width = (max(int(np.ceil(side / cell)), 1) for side in image_shape)
        return cls(cell, (height, width))

    def cells_of(self, xyxy: BoxArray) -> npt.NDArray[np.int64]:
        """(n,) row · w + column of the cell of each box's centre; of the nearest, if outside."""
        height, width = self.shape
        half = np.float32(0.5 / self.cell)
        column = ((xyxy[:, 0] + xyxy[:, 2]) * half).astype(np.int32)
        row = ((xyxy[:, 1] + xyxy[:, 3]) * half).astype(np.int32)
        np.clip(column, 0, width - 1, out=column)
        np.clip(row, 0, height - 1, out=row)
        return row.astype(np.int64) * width + column


def draw_heatmap(
    grid: HeatmapGrid,
    xyxy: BoxArray,
    labels: npt.NDArray[Any],
    colours: npt.NDArray[Any],
    opaque_count: float | None = None,
) -> tuple[RGBAImage, float]:
    """The picture of boxes (n, 4) with `labels` (n,) into `colours` (k, 3) from 0 to 255.

    `opaque_count`: boxes in a cell that make it opaque; None to take it from these boxes. Returned
    with the picture, so that others of the same image may be on the same scale.
    """
    cells, size = grid.cells_of(xyxy), grid.shape[0] * grid.shape[1]
    number = np.bincount(cells, minlength=size).astype(np.float32)
    planes = [number]
    for channel in np.asarray(colours, np.float64).T:
        weights = channel[labels] if len(labels) else np.empty(0)
        planes.append(np.bincount(cells, weights, minlength=size).astype(np.float32))
    smooth = [_smooth(plane.reshape(grid.shape)) for plane in planes]
    opaque_count = _opaque_count(smooth[0]) if opaque_count is None else opaque_count
    return _to_rgba(smooth, opaque_count), opaque_count


def draw_probabilities(
    small: npt.NDArray[np.uint8],
    scores: npt.NDArray[np.float32],
    patch: float,
    shape: tuple[int, int],
    colour: npt.ArrayLike,
) -> npt.NDArray[np.uint8]:
    """A small copy (h, w, 3) of an image of `shape` (H, W) with a map of probabilities over it.

    `scores` (rows, columns) of squares of `patch` image pixels: the higher, the more of `colour`
    (3,) from 0 to 255. Where they are NaN the image stays as it is.
    """
    places = [
        ((np.arange(n) + 0.5) * (length / n) / patch).astype(np.int64).clip(0, count - 1)
        for n, length, count in zip(small.shape[:2], shape, scores.shape, strict=True)
    ]
    opacity = _MAX_OPACITY * np.nan_to_num(scores[np.ix_(*places)])[..., None]
    mixed = small * (1 - opacity) + np.asarray(colour, np.float64) * opacity
    return np.asarray(np.rint(mixed), dtype=np.uint8)


def _to_rgba(planes: list[npt.NDArray[np.float32]], full: float) -> RGBAImage:
    """From the number and the sums of red, green and blue of each cell."""
    number = planes[0]
    total = float(number.sum())
    made = np.empty((*number.shape, 4), np.uint8)
    some = number > 0
    for k, plane in enumerate(planes[1:]):
        # Empty cells have a colour too: the viewer blends neighbours.
        typical = float(plane.sum()) / total if total else 0.0
        mean = np.divide(plane, number, out=np.full_like(plane, typical), where=some)
        made[..., k] = np.rint(mean)
    made[..., 3] = np.rint(255 * np.sqrt(np.minimum(number / np.float32(full), 1)))
    return made


def _opaque_count(number: npt.NDArray[np.float32]) -> float:
    some = number[number > 0]
    return max(float(np.percentile(some, _OPAQUE_PERCENTILE)), 1e-6) if len(some) else 1.0


def _smooth(plane: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Each cell a quarter with either neighbour, down and across; the sum stays."""
    for axis in (0, 1):
        before = np.roll(plane, 1, axis)
        after = np.roll(plane, -1, axis)
        first: list[Any] = [slice(None), slice(None)]
        last: list[Any] = [slice(None), slice(None)]
        first[axis], last[axis] = 0, -1
        before[tuple(first)] = plane[tuple(first)]
        after[tuple(last)] = plane[tuple(last)]
        plane = np.float32(0.25) * (before + after) + np.float32(0.5) * plane
    return plane
