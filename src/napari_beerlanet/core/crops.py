"""Pieces of annotated regions to learn from: the image's own pixels, at the size of training.

Training resizes an image's longer side to the training size. So a piece is as long as shows its
objects at the size that the model knows: `side` image pixels become the training size, and a piece
of less is filled up with padding. Padding is also what hides everything nobody has annotated: what
lies outside of regions, and objects of which most is cut off. The network takes padding for no part
of the slide, so none of it is taught as background.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from .annotations import Annotations
from .cropsize import GREY
from .geometry import translate
from .images import check_rgb, to_bytes
from .regions import MOST_INSIDE, Mask, Window, covered_part, share_inside, together, union

_LEAST_OVERLAP, _MOST_OVERLAP = 0.125, 0.5  # of a side
_MANY = 500  # windows of which is not asked one by one which share pixels
_LEAST_SHOWN = 0.01  # of a piece without objects
_NARROWEST = 32  # pixels of a piece's shorter side: the stride of the network
_VALIDATE = 0.25  # of one region that is cut in two


@dataclass(frozen=True, eq=False)
class Piece:
    """Pixels (h, w, 3) uint8, boxes xyxy (n, 4) in the piece's pixels, labels and ids (n,).

    `window` is where it lies in the image; beyond it the piece is padding. `shown` is the share of
    the window that is no padding, `flat` whether that is of one colour, `hidden` the number of
    objects under padding.
    """

    pixels: npt.NDArray[np.uint8]
    xyxy: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    window: Window
    shown: float
    flat: bool
    hidden: int

    @property
    def empty(self) -> bool:
        """Whether there is neither an object nor a background to learn from.

        Flat pieces of two images would also be one and the same, on both sides of the split.
        """
        return not len(self.labels) and (self.flat or self.shown < _LEAST_SHOWN)


@dataclass(frozen=True)
class Planned:
    """A window to cut out; windows of different groups share no pixel. `regions` are in it."""

    window: Window
    group: int
    regions: tuple[int, ...]


def plan_crops(annotations: Annotations, side: int, overlap: int | None = None) -> list[Planned]:
    """Windows of at most `side` pixels that cover the regions, row by row.

    Neighbours overlap by the largest object, within limits, so that each lies whole in one. What
    touches is covered as one.
    """
    shape = annotations.image_shape
    found = [(k, region.window(shape)) for k, region in enumerate(annotations.regions)]
    seen = [(k, window) for k, window in found if window is not None]
    overlap = _overlap(annotations, side) if overlap is None else overlap
    planned = []
    for group, members in enumerate(together([window for _, window in seen], gap=1)):
        around = _around([seen[m][1] for m in members])
        for window in _tiles(around, side, overlap):
            inside = _inside(annotations, [seen[m][0] for m in members], window)
            if inside:
                planned.append(Planned(window, group, inside))
    if len(planned) > _MANY:
        return planned
    groups = together([p.window for p in planned])
    number = {k: g for g, members in enumerate(groups) for k in members}
    return [Planned(p.window, number[k], p.regions) for k, p in enumerate(planned)]


def cut_in_two(planned: Sequence[Planned], annotations: Annotations, side: int) -> list[Planned]:
    """The same with an only group cut into two that share no pixel, if it is long enough.

    The second, a quarter of it, can then validate what is learned from the first, if both have
    objects.
    """
    if len({p.group for p in planned}) != 1:
        return list(planned)
    around = _around([p.window for p in planned])
    if max(around.width, around.height) < 2 * side:
        return list(planned)
    parts = _halves(around, side)
    if not all(_has_object(annotations, part) for part in parts):
        return list(planned)
    overlap = _overlap(annotations, side)
    regions = sorted({k for p in planned for k in p.regions})
    windows = [(group, w) for group, part in enumerate(parts) for w in _tiles(part, side, overlap)]
    found = [(group, w, _inside(annotations, regions, w)) for group, w in windows]
    return [Planned(window, group, inside) for group, window, inside in found if inside]


def cut(rgb: Any, annotations: Annotations, window: Window, side: int, grey: int = GREY) -> Piece:
    """A piece of an image (H, W, 3 or 4), of which only the window is read.

    A box is kept, cut off, where most of it lies in regions and in the window; what is seen of
    others is hidden.
    """
    x1, y1, x2, y2 = window.corners
    annotations = annotations[_near(annotations.xyxy, window)]
    pixels = to_bytes(check_rgb(np.asarray(rgb[y1:y2, x1:x2])).pixels)
    covered = union(annotations.regions, window)
    share = share_inside(annotations.xyxy, covered, window)
    kept = np.flatnonzero(share >= MOST_INSIDE - 1e-9)
    parts = [covered_part(annotations.xyxy[k], covered, window) for k in kept]
    good = [k for k, part in enumerate(parts) if part is not None]
    boxes = np.array([parts[k] for k in good], np.float64).reshape(-1, 4)
    boxes = np.asarray(translate(boxes, -x1, -y1), np.float64)
    cut_off = np.flatnonzero((share > 0) & (share < MOST_INSIDE - 1e-9))
    hidden = _pixels_of(translate(annotations.xyxy[cut_off], -x1, -y1), covered.shape)
    shown = covered & ~(hidden & ~_pixels_of(boxes, covered.shape))
    visible = shown & (pixels[..., 3] > 0) if pixels.shape[2] == 4 else shown
    canvas = _canvas(window, side, grey)
    canvas[: window.height, : window.width][visible] = pixels[visible, :3]
    labels, ids = annotations.labels[kept[good]], annotations.numbers[kept[good]]
    seen = pixels[visible, :3]
    flat = not len(seen) or bool((seen == seen[0]).all())
    return Piece(canvas, boxes, labels, ids, window, float(visible.mean()), flat, len(cut_off))


def _overlap(annotations: Annotations, side: int) -> int:
    sizes = annotations.xyxy[:, 2:] - annotations.xyxy[:, :2]
    largest = float(sizes.max(initial=0.0))
    return round(min(max(largest, _LEAST_OVERLAP * side), _MOST_OVERLAP * side))


def _around(windows: Sequence[Window]) -> Window:
    corners = np.array([window.corners for window in windows])
    (x1, y1), (x2, y2) = corners[:, :2].min(axis=0).tolist(), corners[:, 2:].max(axis=0).tolist()
    return Window(x1, y1, x2 - x1, y2 - y1)


def _tiles(around: Window, side: int, overlap: int) -> list[Window]:
    width, height = min(side, around.width), min(side, around.height)
    return [
        Window(around.x + x, around.y + y, width, height)
        for y in _starts(around.height, height, overlap)
        for x in _starts(around.width, width, overlap)
    ]


def _starts(length: int, side: int, overlap: int) -> list[int]:
    """First pixels of as few pieces of `side` as cover `length`, evenly spread."""
    if side >= length:
        return [0]
    pieces = 1 + -(-(length - side) // max(side - overlap, 1))
    return [round(k * (length - side) / (pieces - 1)) for k in range(pieces)]


def _halves(around: Window, side: int) -> list[Window]:
    """Cut across the longer side; the second part has at least one `side`."""
    x, y, width, height = around.x, around.y, around.width, around.height
    if width >= height:
        first = width - max(round(_VALIDATE * width), side)
        return [Window(x, y, first, height), Window(x + first, y, width - first, height)]
    first = height - max(round(_VALIDATE * height), side)
    return [Window(x, y, width, first), Window(x, y + first, width, height - first)]


def _inside(annotations: Annotations, regions: Sequence[int], window: Window) -> tuple[int, ...]:
    """Which of the regions have a pixel in the window."""
    return tuple(k for k in regions if union([annotations.regions[k]], window).any())


def _near(xyxy: npt.NDArray[np.float64], window: Window) -> Mask:
    """(n,) which boxes meet the window."""
    x1, y1, x2, y2 = window.corners
    low, high = xyxy[:, :2] < (x2, y2), xyxy[:, 2:] > (x1, y1)
    return np.asarray((low & high).all(axis=1))


def _has_object(annotations: Annotations, part: Window) -> bool:
    """Whether a box has its centre in the part."""
    centres = (annotations.xyxy[:, :2] + annotations.xyxy[:, 2:]) / 2
    return bool(_near(np.hstack([centres, centres]), part).any())


def _pixels_of(boxes: npt.NDArray[Any], shape: tuple[int, ...]) -> Mask:
    """Which pixels any of the boxes meets."""
    mask = np.zeros(shape, bool)
    for x1, y1, x2, y2 in np.asarray(boxes, np.float64):
        rows = slice(max(math.floor(y1), 0), max(math.ceil(y2), 0))
        mask[rows, max(math.floor(x1), 0) : max(math.ceil(x2), 0)] = True
    return mask


def _canvas(window: Window, side: int, grey: int) -> npt.NDArray[np.uint8]:
    """Padding whose longer side is `side`, or the window's where that is longer."""
    height, width = window.height, window.width
    if width >= height:
        width = max(width, side)
    else:
        height = max(height, side)
    shape = max(height, _NARROWEST), max(width, _NARROWEST), 3
    return np.full(shape, grey, np.uint8)
