"""Planes of a stack as one thing to fit, without ever having all of them in memory."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import numpy.typing as npt

from .images import ImageError, RGBImage, check_rgb
from .palette import Histogram, Palette
from .progress import Report, tell

_MOSAIC = 2_000_000  # pixels that stand for a whole stack where stains are counted


def colours_of_stack(
    planes: Iterable[Any], count: int, report: Report | None = None
) -> tuple[RGBImage, Palette | None]:
    """An image and a palette for `decompose` that stand for all `count` planes (H, W, 3 or 4).

    The palette has every colour of every plane (None for floats); the image is a band of rows of
    each. Planes are taken one by one.
    """
    histogram: Histogram | None = None
    bands: list[npt.NDArray[Any]] = []
    for k, plane in enumerate(planes):
        tell(report, k, count, f"plane {k + 1} of {count}")
        pixels = _without_hidden_colours(check_rgb(np.asarray(plane)).pixels)
        if pixels is None:
            continue
        bands.append(_band(pixels, k, count))
        if pixels.dtype.kind == "u":
            histogram = histogram or Histogram(pixels.dtype)
            histogram.add(pixels)
    if not bands:
        raise ImageError("Every pixel of the stack is fully transparent.")
    image = check_rgb(np.concatenate(bands))
    return image, histogram.palette() if histogram is not None else None


def _without_hidden_colours(pixels: npt.NDArray[Any]) -> npt.NDArray[Any] | None:
    """A plane whose hidden pixels have a colour that is seen elsewhere; None if all are hidden."""
    if pixels.shape[-1] == 3:
        return pixels
    hidden = pixels[..., 3] == 0
    if hidden.all():
        return None
    if hidden.any():
        pixels = pixels.copy()
        pixels[hidden, :3] = pixels[~hidden][0, :3]
    return pixels


def _band(pixels: npt.NDArray[Any], k: int, count: int) -> npt.NDArray[Any]:
    """Rows of one plane that stand for it among all; another part of each plane."""
    height, width = pixels.shape[:2]
    rows = min(height, max(8, _MOSAIC // (count * width)))
    top = (height - rows) * (k % 7) // 6
    return pixels[top : top + rows].copy()
