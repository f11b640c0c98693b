"""The stain of an image against the stains that a model was trained on.

The limits are set on real images, see `core.detection.stain_statistics`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.stains.front_end import StainFit

_SAMPLE_PIXELS = 1 << 17  # that stand for an image
_MAX_BACKGROUND_SHIFT = 0.55  # of ln intensity, mean of the channels
_MAX_COLOUR_CAST = 0.45  # the same of one channel against the mean
_MIN_SPECTRA_COSINE = 0.93
_MIN_COLOURFULNESS = 0.1  # difference of the channels, as a fraction of the optical density


def describe_stains(fits: Sequence[StainFit]) -> dict[str, Any]:
    """Background x₀ (mean and spread) and mean spectra (3, r) of training images."""
    x0, S = np.array([fit.background for fit in fits]), np.array([fit.spectra for fit in fits])
    background = {"mean": _rounded(x0.mean(0)), "sd": _rounded(x0.std(0))}
    return {"background": background, "spectra": _rounded(S.mean(0))}


def subsample_pixels(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Every n-th row and column of an image (H, W, …), about 130 000 pixels."""
    step = max(1, math.isqrt(math.prod(pixels.shape[:2]) // _SAMPLE_PIXELS))
    return pixels[::step, ::step]


def summarize_stain(fit: StainFit, pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Plain numbers on an image's stain: background (3,), spectra (3, r), share of each (r,).

    `pixels` (h, w, 3) are the image or a sample of it; those of the padding's grey do not count.
    """
    rows, table = fit.look_up(pixels)
    counts = np.bincount(rows[(pixels != PADDING_GREY).any(-1)], minlength=len(table))
    density = counts @ table.astype(np.float64) * np.linalg.norm(fit.spectra, axis=0)
    total = density.sum()
    share = density / total if total > 0 else np.zeros_like(density)
    od = fit.spectra @ (counts @ table.astype(np.float64)) / max(counts.sum(), 1)
    return {
        "background": _rounded(fit.background),
        "spectra": _rounded(fit.spectra),
        "share": _rounded(share),
        "optical_density": _rounded(od),
    }


def mean_stain(summaries: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The mean of several images' `summarize_stain`."""
    return {key: _rounded(np.mean([s[key] for s in summaries], axis=0)) for key in summaries[0]}


def stain_warnings(seen: Mapping[str, Any] | None, stain: Mapping[str, Any] | None) -> list[str]:
    """Sentences on how an image's stain (`summarize_stain`) differs from `describe_stains`."""
    if not seen or not stain:
        return []
    background, usual = np.array(stain["background"]), np.array(seen["background"]["mean"])
    warnings = []
    if abs(background.mean() - usual.mean()) > _MAX_BACKGROUND_SHIFT:
        warnings.append(
            f"The background has {100 * math.exp(background.mean()):.0f} % of full intensity; in "
            f"training it had {100 * math.exp(usual.mean()):.0f} %."
        )
    elif np.abs(background - background.mean() - usual + usual.mean()).max() > _MAX_COLOUR_CAST:
        warnings.append("The background has a different colour than in training.")
    return warnings + _colour_warnings(np.array(seen["spectra"]), stain)


def _colour_warnings(usual: npt.NDArray[Any], stain: Mapping[str, Any]) -> list[str]:
    spectra, share = np.array(stain["spectra"]), np.array(stain["share"])
    od = np.array(stain["optical_density"])
    if not share.any():
        return ["There is hardly any stain in this image."]
    if od.max() - od.min() < _MIN_COLOURFULNESS * float(np.linalg.norm(od)):
        return ["The image has hardly any colour; the model was trained on stained slides."]
    if spectra.shape != usual.shape:
        return []
    length = np.linalg.norm(spectra, axis=0) * np.linalg.norm(usual, axis=0)
    cosine = (spectra * usual).sum(axis=0) / np.where(length > 0, length, 1)
    if (share * cosine).sum() < _MIN_SPECTRA_COSINE:
        return ["The stains have different colours than in training."]
    return []


def _rounded(values: npt.NDArray[Any]) -> Any:
    return np.round(np.asarray(values, np.float64), 6).tolist()
