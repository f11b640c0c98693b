"""Boxes as plain arrays: checks, areas, overlaps, conversions.

A box is x1, y1, x2, y2 in image pixels, x to the right, y down, edges continuous: a box over
pixel columns 3 to 5 reaches from 3.0 to 6.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Boxes = npt.NDArray[np.floating[Any]]


def check_boxes(xyxy: Any) -> Boxes:
    """The boxes as (n, 4) floats, or a ValueError that says what is wrong with which of them."""
    boxes = np.asarray(xyxy)
    if boxes.size == 0 and boxes.shape[-1] in (0, 4):
        return np.empty((0, 4), np.float32)
    if boxes.ndim != 2 or boxes.shape[1] != 4 or boxes.dtype.kind not in "fiu":
        raise ValueError(
            "Boxes are numbers of shape (n, 4), each x1, y1, x2, y2; "
            f"got shape {boxes.shape} and type {boxes.dtype}."
        )
    if boxes.dtype.kind != "f":
        boxes = boxes.astype(np.float64)
    for wrong, reason in (
        (~np.isfinite(boxes).all(1), "has coordinates that are no finite numbers"),
        ((boxes[:, 2:] < boxes[:, :2]).any(1), "ends before it begins (x2 < x1 or y2 < y1)"),
    ):
        if wrong.any():
            index = int(np.argmax(wrong))
            raise ValueError(f"Box {index} {reason}: {boxes[index].tolist()}.")
    return boxes


def area(xyxy: Boxes) -> npt.NDArray[np.float64]:
    """Areas (n,) in square pixels."""
    boxes = np.asarray(xyxy, np.float64)
    sides: npt.NDArray[np.float64] = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    return sides[:, 0] * sides[:, 1]


def intersection(a: Boxes, b: Boxes) -> npt.NDArray[np.float64]:
    """Areas (n, m) in square pixels that each of (n, 4) shares with each of (m, 4)."""
    a, b = np.asarray(a, np.float64)[:, None], np.asarray(b, np.float64)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    np.maximum(sides, 0, out=sides)
    shared: npt.NDArray[np.float64] = sides[..., 0] * sides[..., 1]
    return shared


def iou(a: Boxes, b: Boxes) -> npt.NDArray[np.float64]:
    """Intersection over union (n, m) of (n, 4) and (m, 4) boxes; 0 where both are empty."""
    shared = intersection(a, b)
    return _ratio(shared, area(a)[:, None] + area(b)[None] - shared)


def over_smaller(a: Boxes, b: Boxes) -> npt.NDArray[np.float64]:
    """Intersection over the smaller box's area (n, m): 1 where one lies inside the other."""
    return _ratio(intersection(a, b), np.minimum(area(a)[:, None], area(b)[None]))


def clip(xyxy: Boxes, shape: tuple[int, int]) -> Boxes:
    """Boxes cut off at the borders of an image of `shape` (H, W); those outside become empty."""
    height, width = shape[:2]
    return np.clip(xyxy, 0, np.array([width, height, width, height], np.asarray(xyxy).dtype))


def scale(xyxy: Boxes, x: float, y: float | None = None) -> Boxes:
    """Boxes with all coordinates multiplied by `x` and `y` (`x` where None), dtype kept."""
    y = x if y is None else y
    boxes = np.asarray(xyxy)
    scaled: Boxes = (boxes * np.array([x, y, x, y], np.float64)).astype(boxes.dtype)
    return scaled


def translate(xyxy: Boxes, x: float, y: float) -> Boxes:
    """Boxes moved by `x` to the right and `y` down, dtype kept."""
    boxes = np.asarray(xyxy)
    moved: Boxes = (boxes + np.array([x, y, x, y], np.float64)).astype(boxes.dtype)
    return moved


def to_centres(xyxy: Boxes, shape: tuple[int, int] | None = None) -> npt.NDArray[np.float64]:
    """Centre x, centre y, width, height (n, 4); as parts of the image where `shape` is given."""
    height, width = (1, 1) if shape is None else shape
    boxes = np.asarray(xyxy, np.float64)
    centres = np.hstack([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]])
    return centres / (width, height, width, height)


def from_centres(cxcywh: Boxes, shape: tuple[int, int] | None = None) -> npt.NDArray[np.float64]:
    """The inverse of `to_centres`: x1, y1, x2, y2 (n, 4) in pixels."""
    height, width = (1, 1) if shape is None else shape
    centres = np.asarray(cxcywh, np.float64) * (width, height, width, height)
    half = centres[:, 2:] / 2
    return np.hstack([centres[:, :2] - half, centres[:, :2] + half])


def _ratio(part: Boxes, whole: Boxes) -> npt.NDArray[np.float64]:
    """part / whole, 0 where the whole is 0."""
    result: npt.NDArray[np.float64] = np.divide(
        part, whole, out=np.zeros(part.shape, np.float64), where=whole > 0
    )
    return result
