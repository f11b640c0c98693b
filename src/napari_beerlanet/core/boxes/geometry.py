"""Geometry of boxes as plain arrays: checks, area, IoU, clipping, scaling, xyxy and cxcywh.

A box is x1, y1, x2, y2 in image pixels, x to the right, y down, edges continuous: a box over
pixel columns 3 to 5 reaches from 3.0 to 6.0.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

BoxArray = npt.NDArray[np.floating[Any]]


def check_boxes(xyxy: Any) -> BoxArray:
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


def area(xyxy: BoxArray) -> npt.NDArray[np.float64]:
    """Areas (n,) in square pixels."""
    boxes = np.asarray(xyxy, np.float64)
    sides: npt.NDArray[np.float64] = np.maximum(boxes[:, 2:] - boxes[:, :2], 0)
    return sides[:, 0] * sides[:, 1]


def intersection(a: BoxArray, b: BoxArray) -> npt.NDArray[np.float64]:
    """Areas (n, m) in square pixels that each of (n, 4) shares with each of (m, 4)."""
    a, b = np.asarray(a, np.float64)[:, None], np.asarray(b, np.float64)[None]
    sides = np.minimum(a[..., 2:], b[..., 2:]) - np.maximum(a[..., :2], b[..., :2])
    np.maximum(sides, 0, out=sides)
    shared: npt.NDArray[np.float64] = sides[..., 0] * sides[..., 1]
    return shared


def iou(a: BoxArray, b: BoxArray) -> npt.NDArray[np.float64]:
    """Intersection over union (n, m) of (n, 4) and (m, 4) boxes; 0 where both are empty."""
    shared = intersection(a, b)
    return _safe_divide(shared, area(a)[:, None] + area(b)[None] - shared)


def centre_inside(xyxy: BoxArray, windows: BoxArray) -> npt.NDArray[np.bool_]:
    """(n,) whether the centre of each of (n, 4) lies in any of the (m, 4) windows."""
    x, y = (np.asarray(xyxy)[:, :2] + np.asarray(xyxy)[:, 2:]).T / 2
    inside = np.zeros(len(xyxy), bool)
    for x1, y1, x2, y2 in np.asarray(windows):
        inside |= (x >= x1) & (x < x2) & (y >= y1) & (y < y2)
    return inside


def clip(xyxy: BoxArray, shape: tuple[int, int]) -> BoxArray:
    """Boxes cut off at the borders of an image of `shape` (H, W); those outside become empty."""
    height, width = shape[:2]
    return np.clip(xyxy, 0, np.array([width, height, width, height], np.asarray(xyxy).dtype))


def scale(xyxy: BoxArray, x: float, y: float | None = None) -> BoxArray:
    """Boxes with all coordinates multiplied by `x` and `y` (`x` where None), dtype kept."""
    y = x if y is None else y
    boxes = np.asarray(xyxy)
    scaled: BoxArray = (boxes * np.array([x, y, x, y], np.float64)).astype(boxes.dtype)
    return scaled


def translate(xyxy: BoxArray, x: float, y: float) -> BoxArray:
    """Boxes moved by `x` to the right and `y` down, dtype kept."""
    boxes = np.asarray(xyxy)
    moved: BoxArray = (boxes + np.array([x, y, x, y], np.float64)).astype(boxes.dtype)
    return moved


def xyxy_to_cxcywh(xyxy: BoxArray, shape: tuple[int, int] | None = None) -> npt.NDArray[np.float64]:
    """Centre x, centre y, width, height (n, 4); as parts of the image where `shape` is given."""
    height, width = (1, 1) if shape is None else shape
    boxes = np.asarray(xyxy, np.float64)
    centres = np.hstack([(boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]])
    return centres / (width, height, width, height)


def cxcywh_to_xyxy(
    cxcywh: BoxArray, shape: tuple[int, int] | None = None
) -> npt.NDArray[np.float64]:
    """The inverse of `xyxy_to_cxcywh`: x1, y1, x2, y2 (n, 4) in pixels."""
    height, width = (1, 1) if shape is None else shape
    centres = np.asarray(cxcywh, np.float64) * (width, height, width, height)
    half = centres[:, 2:] / 2
    return np.hstack([centres[:, :2] - half, centres[:, :2] + half])


def _safe_divide(part: BoxArray, whole: BoxArray) -> npt.NDArray[np.float64]:
    """part / whole, 0 where the whole is 0."""
    result: npt.NDArray[np.float64] = np.divide(
        part, whole, out=np.zeros(part.shape, np.float64), where=whole > 0
    )
    return result


def check_per_box(values: Any, count: int, what: str) -> npt.NDArray[Any]:
    """The values as an array of one per box, or a `ValueError` that names them."""
    array = np.asarray(values)
    if array.shape != (count,):
        raise ValueError(f"{count} boxes need as many {what}, got an array of {array.shape}.")
    return array
