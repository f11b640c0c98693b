"""Annotated regions: rectangles and polygons, and the pixels that they cover.

Points are x, y in image pixels with continuous edges, as boxes have them (see `geometry`). A pixel
belongs to a region if its centre lies in it; self-intersecting polygons fill by the even-odd rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import BoxArray
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.rectangle import Rectangle

Mask = npt.NDArray[np.bool_]
Points = npt.NDArray[np.float64]

MIN_FRACTION_INSIDE = 0.5
"""Share of an object's box that must lie in a region for the object to belong to it."""

_ELLIPSE_CORNERS = 64  # corners of the polygon that stands for an ellipse
_OPEN_SHAPES = ("path", "line")


@dataclass(frozen=True, eq=False)
class Region:
    """`points` (k, 2) float64, the corners one after another; `kind` "rectangle" or "polygon"."""

    kind: str
    points: Points

    def __post_init__(self) -> None:
        points = np.asarray(self.points, np.float64)
        if self.kind not in ("rectangle", "polygon"):
            raise ValueError(f'A region is a "rectangle" or a "polygon", not {quoted(self.kind)}.')
        if points.ndim != 2 or points.shape[1] != 2 or len(points) < 3:
            raise ValueError(f"A region has at least 3 corners x, y; got shape {points.shape}.")
        if not np.isfinite(points).all():
            raise ValueError("A region's corners must be finite numbers.")
        object.__setattr__(self, "points", points)

    @classmethod
    def rectangle(cls, x1: float, y1: float, x2: float, y2: float) -> Region:
        """An upright rectangle."""
        corners = [[x1, y1], [x2, y1], [x2, y2], [x1, y2]]
        return cls("rectangle", np.array(corners, np.float64))

    @classmethod
    def whole_image(cls, shape: Sequence[int]) -> Region:
        """All of an image of `shape` (H, W, …)."""
        return cls.rectangle(0, 0, shape[1], shape[0])

    @classmethod
    def from_shape(cls, points: Any, kind: str) -> Region:
        """From a drawn shape: "rectangle" (also turned), "ellipse" (its corners), "polygon"."""
        corners = np.asarray(points, np.float64)
        if kind in _OPEN_SHAPES:
            raise ValueError(f"A {kind} encloses nothing; draw a rectangle or a polygon.")
        if kind == "ellipse":
            corners = _ellipse_polygon(corners)
        return cls("rectangle" if _is_upright(corners) else "polygon", corners)

    @property
    def bounds(self) -> tuple[float, float, float, float]:
        """x1, y1, x2, y2 around it."""
        (x1, y1), (x2, y2) = self.points.min(axis=0).tolist(), self.points.max(axis=0).tolist()
        return x1, y1, x2, y2

    def window(self, shape: Sequence[int]) -> Rectangle | None:
        """The smallest window with all its pixels in an image of `shape`; None if there are none.

        For a polygon that crosses itself or is very thin the window may hold none after all.
        """
        x1, y1, x2, y2 = (_first_pixel(v) for v in self.bounds)
        x1, y1, x2, y2 = max(x1, 0), max(y1, 0), min(x2, shape[1]), min(y2, shape[0])
        return Rectangle(x1, y1, x2 - x1, y2 - y1) if x1 < x2 and y1 < y2 else None

    def mask(self, window: Rectangle) -> Mask:
        """(height, width) which of the window's pixels it covers."""
        toggles = np.zeros((window.height, window.width + 1), np.int32)
        x, y = (self.points - (window.x, window.y)).T
        centres = np.arange(window.height) + 0.5
        for k in range(len(x)):
            (xa, ya), (xb, yb) = (x[k - 1], y[k - 1]), (x[k], y[k])
            crossed = np.flatnonzero((centres >= min(ya, yb)) & (centres < max(ya, yb)))
            if len(crossed):
                at = xa + (centres[crossed] - ya) * ((xb - xa) / (yb - ya))
                # Rounded, so that edges that lie on each other toggle the same pixel.
                first = np.ceil(np.round(at - 0.5, 9))
                column = np.clip(first, 0, window.width).astype(np.int64)
                np.add.at(toggles, (crossed, column), 1)
        return np.asarray(np.cumsum(toggles, axis=1, dtype=np.int32)[:, :-1] % 2 == 1)

    def contains(self, points: npt.NDArray[Any]) -> Mask:
        """(n,) which of the points (n, 2) x, y lie in it."""
        px, py = np.asarray(points, np.float64).reshape(-1, 2).T
        crossings = np.zeros(len(px), np.int64)
        for (xa, ya), (xb, yb) in zip(np.roll(self.points, 1, 0), self.points, strict=True):
            level = (py >= min(ya, yb)) & (py < max(ya, yb))
            with np.errstate(divide="ignore", invalid="ignore"):
                crossings += level & (px < xa + (py - ya) * ((xb - xa) / (yb - ya)))
        return np.asarray(crossings % 2 == 1)

    def to_json(self) -> dict[str, Any]:
        """As JSON has it."""
        return {"kind": self.kind, "points": self.points.tolist()}

    @classmethod
    def from_json(cls, content: Any) -> Region:
        """What `to_json` gave."""
        return cls(str(content["kind"]), np.array(content["points"], np.float64))


def union_mask(regions: Iterable[Region], window: Rectangle) -> Mask:
    """(height, width) which of the window's pixels are in any of the regions."""
    covered = np.zeros((window.height, window.width), bool)
    for region in regions:
        near = region.window((window.y + window.height, window.x + window.width))
        if near is not None and near.touches(window):
            covered |= region.mask(window)
    return covered


def fraction_inside(xyxy: BoxArray, covered: Mask, window: Rectangle) -> npt.NDArray[np.float64]:
    """(n,) which share of each box's area lies on covered pixels of the window."""
    shares = np.zeros(len(xyxy))
    for k, box in enumerate(np.asarray(xyxy, np.float64)):
        size = (box[2] - box[0]) * (box[3] - box[1])
        columns = _pixel_overlaps(box[0] - window.x, box[2] - window.x, window.width)
        rows = _pixel_overlaps(box[1] - window.y, box[3] - window.y, window.height)
        inside = covered[rows[0], columns[0]]
        if size > 0 and inside.size:
            shares[k] = rows[1] @ inside @ columns[1] / size
    return np.clip(shares, 0, 1)


def clip_box_to_mask(box: BoxArray, covered: Mask, window: Rectangle) -> BoxArray | None:
    """x1, y1, x2, y2 around the part of a box that lies on covered pixels; None if there is none.

    In the image's pixels, as the box.
    """
    columns, _ = _pixel_overlaps(box[0] - window.x, box[2] - window.x, window.width)
    rows, _ = _pixel_overlaps(box[1] - window.y, box[3] - window.y, window.height)
    inside = covered[rows, columns]
    x, y = np.flatnonzero(inside.any(axis=0)), np.flatnonzero(inside.any(axis=1))
    if not len(x):
        return None
    left, top = window.x + columns.start, window.y + rows.start
    low = np.maximum(box[:2], (left + x[0], top + y[0]))
    high = np.minimum(box[2:], (left + x[-1] + 1, top + y[-1] + 1))
    return np.concatenate([low, high])


def group_touching(windows: Sequence[Rectangle], gap: int = 0) -> list[list[int]]:
    """Indices of windows that are connected by shared pixels (or touch, with a `gap` of 1)."""
    from scipy.sparse.csgraph import connected_components

    if not windows:
        return []
    corners = np.array([window.corners for window in windows])
    low, high = corners[:, :2], corners[:, 2:] + gap
    touching = ((low[:, None] < high) & (low < high[:, None])).all(axis=2)
    _, group = connected_components(touching, directed=False)
    return sorted(np.flatnonzero(group == k).tolist() for k in np.unique(group))


def shape_bounds(points: Any, kind: str) -> tuple[float, float, float, float]:
    """x1, y1, x2, y2 around a drawn shape; a path or line, which has no inside, is refused.

    `points` (k, 2) x, y; those of an ellipse are the corners of the rectangle that it fills,
    which may be turned.
    """
    corners = np.asarray(points, np.float64)
    if kind in _OPEN_SHAPES:
        raise ValueError(f"a {kind} encloses nothing")
    if corners.ndim != 2 or corners.shape[1] != 2 or len(corners) < 3:
        raise ValueError(f"corners x, y are needed, got an array of {corners.shape}")
    if not np.isfinite(corners).all():
        raise ValueError("its corners are no finite numbers")
    if kind == "ellipse":
        centre, a, b = _ellipse_axes(corners)
        reach = np.hypot(a, b)
        low, high = centre - reach, centre + reach
    else:
        low, high = corners.min(axis=0), corners.max(axis=0)
    return float(low[0]), float(low[1]), float(high[0]), float(high[1])


def _ellipse_axes(corners: Points) -> tuple[Points, Points, Points]:
    """Centre and half axes of an ellipse, each x, y, from the four corners around it."""
    return corners[:4].mean(axis=0), (corners[1] - corners[0]) / 2, (corners[3] - corners[0]) / 2


def _ellipse_polygon(corners: Points) -> Points:
    centre, a, b = _ellipse_axes(corners)
    angle = np.linspace(0, 2 * math.pi, _ELLIPSE_CORNERS, endpoint=False)[:, None]
    return np.asarray(centre + np.cos(angle) * a + np.sin(angle) * b)


def _is_upright(corners: Points) -> bool:
    return len(corners) == 4 and all(len(np.unique(corners[:, k])) == 2 for k in (0, 1))


def _first_pixel(edge: float) -> int:
    """The first pixel whose centre is not before an edge."""
    return math.ceil(min(max(edge, -1e9), 1e9) - 0.5)


def _pixel_overlaps(low: float, high: float, length: int) -> tuple[slice, npt.NDArray[np.float64]]:
    """The pixels of 0 … length that an interval meets, and how much of each it covers."""
    begin, end = max(math.floor(low), 0), min(math.ceil(high), length)
    if begin >= end:
        return slice(0, 0), np.zeros(0)
    edges = np.arange(begin, end + 1, dtype=np.float64)
    return slice(begin, end), np.minimum(edges[1:], high) - np.maximum(edges[:-1], low)
