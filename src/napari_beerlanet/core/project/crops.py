"""Cut annotated regions into training crops: the image's own pixels, at the training scale.

Training resizes an image's longer side to the training size. So a crop is as long as shows its
objects at the size that the model was trained on: `crop_size` image pixels become the training
size, and a smaller crop is filled up with padding. Padding also hides everything nobody has
annotated: what lies outside of regions, and objects of which most is cut off. The network ignores
padding, so none of it is taught as background.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.geometry import translate
from napari_beerlanet.core.boxes.regions import (
    MIN_FRACTION_INSIDE,
    Mask,
    clip_box_to_mask,
    fraction_inside,
    group_touching,
    union_mask,
)
from napari_beerlanet.core.common.rectangle import Rectangle, tile_starts
from napari_beerlanet.core.detection.object_sizes import MIN_KNOWN_BOXES, TrainingSizes
from napari_beerlanet.core.images.rgb import PADDING_GREY, check_rgb, to_uint8

_MIN_OVERLAP, _MAX_OVERLAP = 0.125, 0.5  # of the crop size
_MAX_WINDOWS_TO_GROUP = 500  # beyond that, what overlaps is not worked out pair by pair
_MIN_VISIBLE_FRACTION = 0.01  # of a crop without objects
MIN_CROP_SIDE = 32  # of a crop's shorter side in pixels: the stride of the network
_VALIDATION_FRACTION = 0.25  # of a single region that is cut in two
_WHOLE_IMAGE_TOLERANCE = (
    1.3  # factor of scale below which a crop is the whole image, as in `detect`
)


@dataclass(frozen=True, eq=False)
class Crop:
    """Pixels (h, w, 3) uint8, boxes xyxy (n, 4) in the crop's pixels, labels and ids (n,).

    `window` is where it lies in the image; beyond it the crop is padding. `visible_fraction` is the
    part of the window that is no padding, `uniform` whether that is of one colour, `hidden` the
    number of objects under padding.
    """

    pixels: npt.NDArray[np.uint8]
    xyxy: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    ids: npt.NDArray[np.int64]
    window: Rectangle
    visible_fraction: float
    uniform: bool
    hidden: int

    @property
    def empty(self) -> bool:
        """Whether there is neither an object nor a background to train on.

        Uniform crops of two images would also be one and the same, in both splits.
        """
        hardly_visible = self.visible_fraction < _MIN_VISIBLE_FRACTION
        return not len(self.labels) and (self.uniform or hardly_visible)


@dataclass(frozen=True)
class PlannedCrop:
    """A window to cut out; windows of different groups share no pixel. `regions` are in it."""

    window: Rectangle
    group: int
    regions: tuple[int, ...]


def plan_crops(
    annotations: Annotations, crop_size: int, overlap: int | None = None
) -> list[PlannedCrop]:
    """Windows of at most `crop_size` pixels that cover the regions, row by row.

    Neighbours overlap by the largest object, within limits, so that each lies whole in one. What
    touches is covered as one.
    """
    shape = annotations.image_shape
    bounds = [(k, region.window(shape)) for k, region in enumerate(annotations.regions)]
    visible = [(k, window) for k, window in bounds if window is not None]
    overlap = _choose_overlap(annotations, crop_size) if overlap is None else overlap
    planned = []
    for group, members in enumerate(group_touching([window for _, window in visible], gap=1)):
        around = _bounding_window([visible[m][1] for m in members])
        for window in _tile_windows(around, crop_size, overlap):
            inside = _regions_in_window(annotations, [visible[m][0] for m in members], window)
            if inside:
                planned.append(PlannedCrop(window, group, inside))
    if len(planned) > _MAX_WINDOWS_TO_GROUP:
        return planned
    groups = group_touching([p.window for p in planned])
    number = {k: g for g, members in enumerate(groups) for k in members}
    return [PlannedCrop(p.window, number[k], p.regions) for k, p in enumerate(planned)]


def split_for_validation(
    planned: Sequence[PlannedCrop], annotations: Annotations, crop_size: int
) -> list[PlannedCrop]:
    """The same with a single group cut into two that share no pixel, if it is long enough.

    The second, a quarter of it, can then validate what is trained on the first, if both have
    objects.
    """
    if len({p.group for p in planned}) != 1:
        return list(planned)
    around = _bounding_window([p.window for p in planned])
    if max(around.width, around.height) < 2 * crop_size:
        return list(planned)
    parts = _cut_for_validation(around, crop_size)
    if not all(_has_object(annotations, part) for part in parts):
        return list(planned)
    overlap = _choose_overlap(annotations, crop_size)
    regions = sorted({k for p in planned for k in p.regions})
    windows = [
        (group, w)
        for group, part in enumerate(parts)
        for w in _tile_windows(part, crop_size, overlap)
    ]
    held = [(group, w, _regions_in_window(annotations, regions, w)) for group, w in windows]
    return [PlannedCrop(window, group, inside) for group, window, inside in held if inside]


def cut_crop(
    rgb: Any,
    annotations: Annotations,
    window: Rectangle,
    crop_size: int,
    grey: int = PADDING_GREY,
    hide: npt.NDArray[np.float64] | None = None,
) -> Crop:
    """A crop of an image (H, W, 3 or 4), of which only the window is read.

    A box is kept, clipped, where most of it lies in regions and in the window; what is visible of
    others is hidden, and so are the boxes `hide` (k, 4).
    """
    x1, y1, x2, y2 = window.corners
    annotations = annotations[_meets_window(annotations.xyxy, window)]
    pixels = to_uint8(check_rgb(np.asarray(rgb[y1:y2, x1:x2])).pixels)
    covered = union_mask(annotations.regions, window)
    fraction = fraction_inside(annotations.xyxy, covered, window)
    kept = np.flatnonzero(fraction >= MIN_FRACTION_INSIDE - 1e-9)
    parts = [clip_box_to_mask(annotations.xyxy[k], covered, window) for k in kept]
    valid = [k for k, part in enumerate(parts) if part is not None]
    boxes = np.array([parts[k] for k in valid], np.float64).reshape(-1, 4)
    boxes = np.asarray(translate(boxes, -x1, -y1), np.float64)
    cut_off = np.flatnonzero((fraction > 0) & (fraction < MIN_FRACTION_INSIDE - 1e-9))
    others = np.concatenate([annotations.xyxy[cut_off], np.empty((0, 4)) if hide is None else hide])
    hidden = _box_mask(translate(others, -x1, -y1), covered.shape)
    visible = covered & ~(hidden & ~_box_mask(boxes, covered.shape))
    if pixels.shape[2] == 4:
        visible &= pixels[..., 3] > 0
    canvas = _padded_canvas(window, crop_size, grey)
    canvas[: window.height, : window.width][visible] = pixels[visible, :3]
    labels, ids = annotations.labels[kept[valid]], annotations.object_ids[kept[valid]]
    colours = pixels[visible, :3]
    uniform = not len(colours) or bool((colours == colours[0]).all())
    return Crop(canvas, boxes, labels, ids, window, float(visible.mean()), uniform, len(cut_off))


def _choose_overlap(annotations: Annotations, crop_size: int) -> int:
    sizes = annotations.xyxy[:, 2:] - annotations.xyxy[:, :2]
    largest = float(sizes.max(initial=0.0))
    return round(min(max(largest, _MIN_OVERLAP * crop_size), _MAX_OVERLAP * crop_size))


def _bounding_window(windows: Sequence[Rectangle]) -> Rectangle:
    corners = np.array([window.corners for window in windows])
    (x1, y1), (x2, y2) = corners[:, :2].min(axis=0).tolist(), corners[:, 2:].max(axis=0).tolist()
    return Rectangle(x1, y1, x2 - x1, y2 - y1)


def _tile_windows(around: Rectangle, crop_size: int, overlap: int) -> list[Rectangle]:
    width, height = min(crop_size, around.width), min(crop_size, around.height)
    return [
        Rectangle(around.x + x, around.y + y, width, height)
        for y in tile_starts(around.height, height, overlap)
        for x in tile_starts(around.width, width, overlap)
    ]


def _cut_for_validation(around: Rectangle, crop_size: int) -> list[Rectangle]:
    """Cut across the longer side; the second part has at least one `crop_size`."""
    x, y, width, height = around.x, around.y, around.width, around.height
    if width >= height:
        first = width - max(round(_VALIDATION_FRACTION * width), crop_size)
        return [Rectangle(x, y, first, height), Rectangle(x + first, y, width - first, height)]
    first = height - max(round(_VALIDATION_FRACTION * height), crop_size)
    return [Rectangle(x, y, width, first), Rectangle(x, y + first, width, height - first)]


def _regions_in_window(
    annotations: Annotations, regions: Sequence[int], window: Rectangle
) -> tuple[int, ...]:
    """Which of the regions have a pixel in the window."""
    return tuple(k for k in regions if union_mask([annotations.regions[k]], window).any())


def _meets_window(xyxy: npt.NDArray[np.float64], window: Rectangle) -> Mask:
    """(n,) which boxes meet the window."""
    x1, y1, x2, y2 = window.corners
    low, high = xyxy[:, :2] < (x2, y2), xyxy[:, 2:] > (x1, y1)
    return np.asarray((low & high).all(axis=1))


def _has_object(annotations: Annotations, part: Rectangle) -> bool:
    """Whether a box has its centre in the part."""
    centres = (annotations.xyxy[:, :2] + annotations.xyxy[:, 2:]) / 2
    return bool(_meets_window(np.hstack([centres, centres]), part).any())


def _box_mask(boxes: npt.NDArray[Any], shape: tuple[int, ...]) -> Mask:
    """Which pixels any of the boxes meets."""
    mask = np.zeros(shape, bool)
    for x1, y1, x2, y2 in np.asarray(boxes, np.float64):
        rows = slice(max(math.floor(y1), 0), max(math.ceil(y2), 0))
        mask[rows, max(math.floor(x1), 0) : max(math.ceil(x2), 0)] = True
    return mask


def _padded_canvas(window: Rectangle, crop_size: int, grey: int) -> npt.NDArray[np.uint8]:
    """Padding whose longer side is `crop_size`, or the window's where that is longer."""
    height, width = window.height, window.width
    if width >= height:
        width = max(width, crop_size)
    else:
        height = max(height, crop_size)
    shape = max(height, MIN_CROP_SIDE), max(width, MIN_CROP_SIDE), 3
    return np.full(shape, grey, np.uint8)


# --- the size of crops ---


def padding_grey(info: Mapping[str, Any]) -> int:
    """The grey level, 0 to 255, that a model takes for padding."""
    padding = info.get("padding")
    return PADDING_GREY if padding is None else round(255 * float(padding))


def choose_crop_size(
    info: Mapping[str, Any],
    annotations: Annotations,
    training_size: int,
    pixel_size: Sequence[float] | None = None,
    scale: float | None = None,
) -> tuple[int, str]:
    """Image pixels that become the training size, and in a few words how that was found.

    By the scale (working pixels per image pixel) at which objects were detected, or physical pixel
    sizes, or the sizes of what is annotated, or else as long as the image.
    """
    longest = max(annotations.image_shape)
    how, wanted = "at the scale of the detections", scale
    if wanted is None and pixel_size and info.get("pixel_size"):
        how, wanted = "from the pixel sizes", math.sqrt(math.prod(pixel_size)) / info["pixel_size"]
    if wanted is None:
        how, wanted = "from the sizes of the annotated objects", _scale_of_boxes(info, annotations)
    if wanted is None or not 0 < wanted < math.inf:
        return longest, "the whole image"
    crop_size = max(round(training_size / wanted), MIN_CROP_SIDE)
    if longest / _WHOLE_IMAGE_TOLERANCE <= crop_size <= longest * _WHOLE_IMAGE_TOLERANCE:
        return longest, f"the whole image, {how}"
    return crop_size, how


def _scale_of_boxes(info: Mapping[str, Any], annotations: Annotations) -> float | None:
    """Working pixels per image pixel at which the boxes are as large as in the model's training."""
    trained = TrainingSizes.of(info.get("object_sizes") or {}, annotations.names)
    sizes = np.sqrt(np.prod(annotations.xyxy[:, 2:] - annotations.xyxy[:, :2], axis=1))
    off, boxes = trained.deviation(sizes, annotations.labels)
    return math.exp(-off) if boxes >= MIN_KNOWN_BOXES else None
