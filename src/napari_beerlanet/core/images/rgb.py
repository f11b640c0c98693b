"""RGB arrays: checks, log intensity and back, columns for the solver, 8 bit, hex colours."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.messages import error_detail
from napari_beerlanet.core.images import Domain

ACCEPTED_IMAGES = (
    "Accepted are RGB or RGBA images of shape (height, width, 3 or 4) as uint8, uint16, "
    "or float with values from 0 to 1."
)
MAX_PIXELS = 400_000_000
"""Pixels of an image that are taken at once: 8 density planes of that many are 12.8 GB."""
FLOAT_FLOOR = 1.0 / 255.0
PADDING_GREY = 114
"""Grey level with which Ultralytics fills letterboxes and mosaics."""
_FLOAT_TOLERANCE = 1e-6  # what resizing or dividing by 255 in float32 may add to 1


class ImageError(ValueError):
    """An array that is no image we can decompose; the message says why and what is accepted."""


@dataclass(frozen=True, eq=False)
class RGBImage:
    """A checked image.

    `pixels` is (H, W, 3 or 4), uint8, uint16 or float in [0, 1]; a fourth channel is alpha.
    """

    pixels: npt.NDArray[Any]

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W)."""
        return self.pixels.shape[0], self.pixels.shape[1]

    @property
    def white(self) -> float:
        """The value of full intensity: 255, 65535 or 1."""
        return white_level(self.pixels.dtype)

    @property
    def flat(self) -> npt.NDArray[Any]:
        """(H·W, 3 or 4), C-contiguous; a view where the pixels already are."""
        return np.ascontiguousarray(self.pixels).reshape(-1, self.pixels.shape[2])


def check_rgb(image: Any) -> RGBImage:
    """The image as `RGBImage`, or an `ImageError` of one sentence that names what was given."""
    if isinstance(image, RGBImage):
        return image
    if isinstance(image, (str, bytes)) or image is None or not hasattr(image, "__array__"):
        raise ImageError(f"Expected an image array, got {_describe_type(image)}. {ACCEPTED_IMAGES}")
    try:
        pixels = load_array(np.ma.filled(image, 0) if np.ma.isMaskedArray(image) else image)
    except (TypeError, ValueError, RuntimeError) as error:  # tensors: sparse, meta, with gradients
        detail = error_detail(error, 80)
        raise ImageError(
            f"This {type(image).__name__} is no array in memory ({detail}). {ACCEPTED_IMAGES}"
        ) from error
    given = f"an array of shape {pixels.shape} and type {pixels.dtype}"
    if pixels.ndim != 3 or pixels.shape[2] not in (3, 4):
        raise ImageError(f"Not an RGB image: {given}{_shape_hint(pixels)}. {ACCEPTED_IMAGES}")
    if pixels.size == 0:
        raise ImageError(f"An empty image: {given}. {ACCEPTED_IMAGES}")
    if pixels.dtype.kind == "f" and pixels.dtype.itemsize <= 8:
        return RGBImage(_with_mask(_checked_floats(pixels, given), image))
    if pixels.dtype.kind != "u" or pixels.dtype.itemsize > 2:
        raise ImageError(f"Unsupported type of values: {given}. {ACCEPTED_IMAGES}")
    if not pixels.dtype.isnative:
        pixels = pixels.astype(pixels.dtype.newbyteorder("="))
    return RGBImage(_with_mask(pixels, image))


def white_level(dtype: npt.DTypeLike) -> float:
    """The value of full intensity for a dtype: its maximum for integers, 1 for floats."""
    dtype = np.dtype(dtype)
    return float(np.iinfo(dtype).max) if dtype.kind in "ui" else 1.0


def intensity_floor(dtype: npt.DTypeLike) -> float:
    """One grey level as a fraction of full intensity; floats count as 8-bit (1/255)."""
    dtype = np.dtype(dtype)
    return 1.0 / white_level(dtype) if dtype.kind in "ui" else FLOAT_FLOOR


def to_columns(values: npt.NDArray[Any], domain: Domain) -> npt.NDArray[np.float64]:
    """Pixel values (n, ≥3) to X (3, n) float64: ln of the intensity, or the intensity itself."""
    scaled = np.array(values[:, :3].T, dtype=np.float64, order="C")  # a copy: it is written to
    scaled /= white_level(values.dtype)
    if domain == "log":
        np.maximum(scaled, intensity_floor(values.dtype), out=scaled)
        np.log(scaled, out=scaled)
    return scaled


def from_columns(X: npt.NDArray[Any], domain: Domain, dtype: npt.DTypeLike) -> npt.NDArray[Any]:
    """X (3, n) to pixel values (n, 3) of `dtype`: the inverse of `to_columns`, clipped."""
    intensity = np.exp(X) if domain == "log" else X
    values = np.clip(intensity.T, 0.0, 1.0) * white_level(dtype)
    if np.dtype(dtype).kind in "ui":
        np.rint(values, out=values)
    return np.asarray(values, dtype=dtype)


def clip_floats(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Floats in [0, 1], as the solver takes them: what the fit did not see may hold anything."""
    if pixels.dtype.kind != "f":
        return pixels
    return np.asarray(np.clip(np.nan_to_num(pixels, nan=1.0), 0, 1))


def to_uint8(pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """8-bit colours of (…, 3 or 4) pixels; alpha of more than 8 bits becomes 0 or 255."""
    if pixels.dtype == np.uint16:
        values = ((pixels.astype(np.uint32) * 255 + 32767) // 65535).astype(np.uint8)
    elif pixels.dtype == np.uint8:
        return pixels
    else:
        values = np.asarray(np.rint(clip_floats(pixels) * 255), dtype=np.uint8)
    if pixels.shape[-1] == 4:
        values[..., 3] = np.where(pixels[..., 3] > 0, 255, 0)
    return values


def fill_transparent(pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """(…, 3) of (…, 3 or 4) uint8: what alpha hides becomes the padding's grey."""
    if pixels.shape[-1] == 3:
        return pixels
    return np.where(pixels[..., 3:] > 0, pixels[..., :3], np.uint8(PADDING_GREY))


def _checked_floats(pixels: npt.NDArray[Any], given: str) -> npt.NDArray[Any]:
    low, high = float(pixels[..., :3].min()), float(pixels[..., :3].max())
    if not np.isfinite(pixels).all():
        raise ImageError(f"The image has NaN or infinite values: {given}. {ACCEPTED_IMAGES}")
    if low < 0 or high > 1 + _FLOAT_TOLERANCE:
        hint = (
            "if they are 0 to 255, pass image.astype(np.uint8) or image / 255"
            if low >= 0 and high <= 255
            else "rescale or clip them to 0 to 1 first"
        )
        raise ImageError(
            f"Float values from {low:.4g} to {high:.4g} do not say what white is: {given}; "
            f"{hint}. {ACCEPTED_IMAGES}"
        )
    return pixels if high <= 1 else np.minimum(pixels, 1)


def _with_mask(pixels: npt.NDArray[Any], image: Any) -> npt.NDArray[Any]:
    """With what a masked array hides as transparent, so that it weighs nothing."""
    if not np.ma.is_masked(image):
        return pixels
    hidden = np.ma.getmaskarray(image).any(axis=2)
    if hidden.all():
        raise ImageError("Every pixel of the image is masked.")
    if pixels.shape[2] == 3:
        alpha = np.full(pixels.shape[:2], white_level(pixels.dtype), pixels.dtype)
        pixels = np.dstack([pixels, alpha])
    shown = pixels.copy()
    shown[hidden] = 0
    return shown


def _shape_hint(pixels: npt.NDArray[Any]) -> str:
    if pixels.ndim == 2:
        return " (a grey image has no colours to decompose)"
    if pixels.ndim == 3 and pixels.shape[0] in (3, 4):
        return " (channels come last: use np.moveaxis(image, 0, -1))"
    if pixels.ndim > 3 and pixels.shape[-1] in (3, 4):
        return " (a stack: pass one plane at a time)"
    return ""


def _describe_type(thing: Any) -> str:
    if isinstance(thing, (str, bytes)):
        return f"the text {thing!r:.60}"
    return f"{type(thing).__name__}"


def hex_colour(rgb: npt.ArrayLike) -> str:
    """RGB, 0 to 255, as "#a03c50"."""
    return "#" + "".join(f"{int(value):02x}" for value in np.asarray(rgb))
