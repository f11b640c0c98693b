"""How many image pixels a piece to learn from is long, and what colour fills it up."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .annotations import Annotations
from .sizes import Known, Sample, deviation

GREY = 114
"""The grey level of Ultralytics' padding."""

_AGREES = 1.3  # factor of magnification below which an image is shown whole, as `detect` does it
_FIELD = 2.0  # sides: what is longer than this is more than a field of view


def padding_grey(info: Mapping[str, Any]) -> int:
    """The grey level, 0 to 255, that a model takes for padding."""
    padding = info.get("padding")
    return GREY if padding is None else round(255 * float(padding))


def crop_side(
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
    how, wanted = "as objects were detected", scale
    if wanted is None and pixel_size and info.get("pixel_size"):
        how, wanted = "from the pixel sizes", math.sqrt(math.prod(pixel_size)) / info["pixel_size"]
    if wanted is None:
        how, wanted = "from the sizes of the annotated objects", _scale_of_boxes(info, annotations)
    if wanted is None or not 0 < wanted < math.inf:
        return longest, "the whole image"
    side = max(round(training_size / wanted), 32)
    if longest / _AGREES <= side <= longest * _AGREES:
        return longest, f"the whole image, {how}"
    return side, how


def needs_regions(shape: Sequence[int], side: int) -> bool:
    """Whether an image is larger than a field, so that nobody annotates all of it unasked."""
    return max(shape[:2]) > _FIELD * side


def _scale_of_boxes(info: Mapping[str, Any], annotations: Annotations) -> float | None:
    """Working pixels per image pixel at which the boxes are as large as in the model's training."""
    known = Known.of(info.get("object_sizes") or {}, annotations.names)
    sizes = np.sqrt(np.prod(annotations.xyxy[:, 2:] - annotations.xyxy[:, :2], axis=1))
    real = sizes > 0
    ones = np.ones(int(real.sum()))
    off = deviation(Sample(sizes[real], annotations.labels[real], ones, 1.0), known)
    return None if off is None else math.exp(-off)
