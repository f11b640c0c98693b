"""Crops of boxes: each object in the middle of a square, as large as in training.

A crop is the square around a box's centre in which the box's longer side takes the part `fill`,
resampled to `size` × `size` pixels. What of it lies beyond the image is padding, which the front
end does not count. Colours stay 8 bit, so that stains are fitted to distinct colours.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from napari_beerlanet.core.boxes.geometry import area, check_boxes, clip
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.images.rgb import PADDING_GREY, check_rgb, fill_transparent, to_uint8

Pixels = npt.NDArray[np.uint8]

_BLOCK_SIDE = 1024  # pixels: boxes whose centres lie in one such square of a slide are read at once
_STRIP_HEIGHT = 128  # pixels: in a square they are read strip by strip
_MAX_READ_SIDE = 2048  # pixels of a crop that is read whole; of a larger one every second, third, …

_REACH = 1.5  # sides of a crop, from its centre to that of a box that it may show
_OUTLINE = 1.15  # radii of a box's ellipse, up to which what it shows is the box's

_MEDIAN_SIDE, _BLUR_SIZE, _BLUR_SIGMA = 11, (21, 21), 1.0  # as in the paper


def to_rgb8(image: Any) -> Pixels:
    """An image (H, W, 3 or 4) as (H, W, 3) uint8; what alpha hides becomes padding."""
    return np.ascontiguousarray(fill_transparent(to_uint8(check_rgb(image).pixels)))


def check_crop_boxes(xyxy: Any, shape: tuple[int, int]) -> npt.NDArray[np.float64]:
    """Boxes (n, 4) that crops of an image of `shape` (H, W) can be cut around.

    Boxes without area or outside the image are a `ValueError`.
    """
    boxes = np.asarray(check_boxes(xyxy), np.float64)
    height, width = shape
    empty = area(boxes) <= 0
    outside = ~empty & (area(clip(boxes, shape)) <= 0)
    for wrong, what in (
        (empty, "no area"),
        (outside, f"no part in the image of {width} × {height} pixels"),
    ):
        if wrong.any():
            first = int(np.argmax(wrong))
            more = int(wrong.sum()) - 1
            others = f", and {count_of(more, 'other box', 'other boxes')} neither" if more else ""
            raise ValueError(f"Box {first} {boxes[first].tolist()} has {what}{others}.")
    return boxes


def cut_crops(pixels: Pixels, xyxy: npt.ArrayLike, size: int, fill: float) -> Pixels:
    """Crops (n, size, size, 3) of boxes (n, 4) in an image (H, W, 3) uint8."""
    boxes = check_crop_boxes(xyxy, pixels.shape[:2])
    sides = (boxes[:, 2:] - boxes[:, :2]).max(1, initial=0) / fill
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    crops = np.empty((len(boxes), size, size, 3), np.uint8)
    for crop, (x, y), side in zip(crops, centres, sides, strict=True):
        crop[:] = cut_square(pixels, float(x), float(y), float(side), size)
    return crops


def reading_order(xyxy: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """(n,) an order of boxes (n, 4) in which neighbours in the image follow each other."""
    x, y = (xyxy[:, 0] + xyxy[:, 2]) / 2, (xyxy[:, 1] + xyxy[:, 3]) / 2
    return np.lexsort((x, y // _STRIP_HEIGHT, x // _BLOCK_SIDE, y // _BLOCK_SIDE))


def read_crops(image: Any, xyxy: npt.NDArray[np.float64], size: int, fill: float) -> Pixels:
    """As `cut_crops`, of an image (H, W, 3) uint8 that is read by slices, such as a slide.

    What is in memory is bounded: boxes near each other are read together.
    """
    sides = (xyxy[:, 2:] - xyxy[:, :2]).max(1, initial=0) / fill
    centres = (xyxy[:, :2] + xyxy[:, 2:]) / 2
    crops = np.empty((len(xyxy), size, size, 3), np.uint8)
    large = sides > _MAX_READ_SIDE
    for k in np.flatnonzero(large):
        step = math.ceil(sides[k] / _MAX_READ_SIDE)
        part, corner = _read_around(image, centres[[k]], sides[[k]], size, step)
        x, y = (centres[k] - corner) / step
        crops[k] = cut_square(part, float(x), float(y), float(sides[k]) / step, size)
    blocks = centres // _BLOCK_SIDE
    for block in np.unique(blocks[~large], axis=0):
        here = np.flatnonzero(~large & (blocks == block).all(1))
        part, corner = _read_around(image, centres[here], sides[here], size)
        for k, (x, y) in zip(here, centres[here] - corner, strict=True):
            crops[k] = cut_square(part, float(x), float(y), float(sides[k]), size)
    return crops


def _read_around(
    image: Any,
    centres: npt.NDArray[np.float64],
    sides: npt.NDArray[np.float64],
    size: int,
    step: int = 1,
) -> tuple[Pixels, npt.NDArray[np.float64]]:
    """The part of an image around squares (n, 2), (n,), with room for the filter; its corner."""
    reach = sides / 2 + np.ceil(2 * sides / size) + 2
    limit = np.array([image.shape[1], image.shape[0]])
    low = np.clip(np.floor((centres - reach[:, None]).min(0)), 0, limit).astype(int)
    high = np.clip(np.ceil((centres + reach[:, None]).max(0)), 0, limit).astype(int)
    columns, rows = (slice(int(a), int(b), step) for a, b in zip(low, high, strict=True))
    return np.ascontiguousarray(image[rows, columns]), low.astype(np.float64)


def crop_neighbours(
    xyxy: npt.NDArray[np.float64], rows: npt.NDArray[np.int64], fill: float
) -> npt.NDArray[np.int64]:
    """(p, 2) pairs i, j of boxes (n, 4) of which j reaches into the crop of i, one of `rows` (m,).

    In ascending order if `rows` are.
    """
    from scipy.spatial import cKDTree

    centres, halves = (xyxy[:, :2] + xyxy[:, 2:]) / 2, (xyxy[:, 2:] - xyxy[:, :2]) / 2
    reach = halves.max(1, initial=0) / fill
    near = [
        np.asarray(found, np.int64)
        for found in cKDTree(centres).query_ball_point(
            centres[rows], _REACH * 2 * reach[rows], return_sorted=True
        )
    ]
    i = np.repeat(rows, [len(found) for found in near])
    j = np.concatenate([np.empty(0, np.int64), *near])
    within = (np.abs(centres[i] - centres[j]) < reach[i, None] + halves[j]).all(1) & (i != j)
    return np.asarray(np.stack([i, j], 1)[within], np.int64)


def hide_neighbours(
    crop: Pixels, box: npt.NDArray[Any], others: npt.NDArray[Any], fill: float
) -> Pixels:
    """The crop (size, size, 3) of a box (4,) in which `others` (m, 4) are painted over.

    A pixel is that of the box in whose ellipse it lies deepest. The paint has the median colour of
    what is left, so that nothing stands out.
    """
    size, (x1, y1, x2, y2) = len(crop), box
    side = max(x2 - x1, y2 - y1) / fill
    place = ((np.arange(size) + 0.5) / size - 0.5) * side
    x, y = (x1 + x2) / 2 + place, (y1 + y2) / 2 + place
    depth = _radii(box, x, y)
    hidden = np.zeros((size, size), bool)
    for other in others:
        radii = _radii(other, x, y)
        hidden |= (radii < depth) & (radii < _OUTLINE)
    if not hidden.any() or hidden.all():
        return crop
    painted = crop.copy()
    painted[hidden] = np.median(crop[~hidden], axis=0)
    return painted


def _radii(box: npt.NDArray[Any], x: npt.NDArray[Any], y: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(h, w) how far points x (w,), y (h,) are from a box's centre; 1 is on its ellipse."""
    x1, y1, x2, y2 = box
    across = (2 * x - x1 - x2) / (x2 - x1)
    down = (2 * y - y1 - y2) / (y2 - y1)
    return np.asarray(np.hypot(across[None], down[:, None]))


def whole_crop(pixels: Pixels, size: int) -> Pixels:
    """An image (H, W, 3) uint8 that is a crop already, as (size, size, 3); padded to a square."""
    height, width = pixels.shape[:2]
    return cut_square(pixels, width / 2, height / 2, float(max(height, width)), size)


def cut_square(pixels: Pixels, x: float, y: float, side: float, size: int) -> Pixels:
    """The square of `side` image pixels around (x, y), as (size, size, 3); beyond it is padding."""
    crop = np.full((size, size, 3), PADDING_GREY, np.uint8)
    scale = size / side
    height, width = pixels.shape[:2]
    columns = _inside(x - side / 2, width, scale, size)
    rows = _inside(y - side / 2, height, scale, size)
    if columns is None or rows is None:
        return crop
    (left, right, x1, x2), (top, bottom, y1, y2) = columns, rows
    # Only what is needed is handed over, with room for the filter, which may reach beyond the box.
    reach = math.ceil(2 / scale) + 2
    a, b = max(math.floor(x1) - reach, 0), min(math.ceil(x2) + reach, width)
    c, d = max(math.floor(y1) - reach, 0), min(math.ceil(y2) + reach, height)
    part = Image.fromarray(np.ascontiguousarray(pixels[c:d, a:b]))
    box = (max(x1 - a, 0.0), max(y1 - c, 0.0), min(x2 - a, b - a), min(y2 - c, d - c))
    resized = part.resize((right - left, bottom - top), Image.Resampling.BILINEAR, box=box)
    crop[top:bottom, left:right] = np.asarray(resized)
    return crop


def _inside(
    start: float, length: int, scale: float, size: int
) -> tuple[int, int, float, float] | None:
    """Crop pixels (first, after the last) that lie in the image, and its pixels that they show."""
    # A hundredth of a pixel is no reason to lose a row to padding.
    first = max(math.ceil(-start * scale - 0.01), 0)
    last = min(math.floor((length - start) * scale + 0.01), size)
    if last <= first:
        return None
    low, high = start + first / scale, start + last / scale
    return first, last, min(max(low, 0.0), float(length)), min(max(high, 0.0), float(length))


def denoise_crop(crop: Pixels) -> Pixels:
    """A crop (size, size, 3) after a median filter and a Gaussian blur; padding stays padding."""
    from napari_beerlanet.core.detection.ultralytics_api import cv2  # takes a second

    calm = cv2.medianBlur(np.ascontiguousarray(crop), _MEDIAN_SIDE)
    result = np.asarray(cv2.GaussianBlur(calm, _BLUR_SIZE, _BLUR_SIGMA))
    result[(crop == PADDING_GREY).all(2)] = PADDING_GREY
    return result
