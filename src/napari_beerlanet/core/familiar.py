"""Is an image like those that a model was trained on? Told before anyone trusts a count.

The limits are set on real images: the model of one laboratory's blood smears finds nothing strange
in another laboratory's, nor in malaria smears of six microscopes (background light from 41 % to
87 %, weighted cosine of spectra from 0.94, up to 2.9 doubtful boxes for each sure one), but does in
H&E sections (8 and more doubtful boxes for each sure one), inverted and fluorescence images.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from .boxes import Detections
    from .stainfit import StainFit

_SAMPLE = 1 << 17  # pixels that stand for an image
_LIGHT = 0.55  # of ln intensity, mean of the channels
_CAST = 0.45  # the same of one channel against the mean
_COSINE = 0.93
_GREY = 0.1  # difference of the channels, as a part of the optical density, without colour
_ZOOM = 4.0  # times larger or smaller pixels
_DOUBT, _SURE = 0.1, 0.4  # scores
_DOUBTFUL = 4.0  # doubtful boxes for each sure one
_FEW = 8  # doubtful boxes that say nothing


def sample(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Every n-th row and column of an image (H, W, …), about 130 000 pixels."""
    step = max(1, math.isqrt(math.prod(pixels.shape[:2]) // _SAMPLE))
    return pixels[::step, ::step]


def stain_facts(fit: StainFit, pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Plain numbers on an image's stain: background (3,), spectra (3, r), share of each (r,).

    `pixels` (h, w, 3) are the image or a sample of it.
    """
    _, table = (found := fit.look_up(pixels))
    counts = np.bincount(found[0].ravel(), minlength=len(table))
    density = counts @ table.astype(np.float64) * np.linalg.norm(fit.spectra, axis=0)
    total = density.sum()
    share = density / total if total > 0 else np.zeros_like(density)
    od = fit.spectra @ (counts @ table.astype(np.float64)) / max(counts.sum(), 1)
    return {
        "background": _plain(fit.background),
        "spectra": [_plain(row) for row in fit.spectra],
        "share": _plain(share),
        "optical_density": _plain(od),
    }


def warnings_on(
    info: Mapping[str, Any], found: Detections, pixel_size: tuple[float, float] | None = None
) -> list[str]:
    """`unlike_training` by what the model `info` found in an image."""
    everything = found if found.candidates is None else found.candidates
    return unlike_training(info, found.report.get("stain"), pixel_size, everything.scores)


def unlike_training(
    info: Mapping[str, Any],
    stain: Mapping[str, Any] | None = None,
    pixel_size: tuple[float, float] | None = None,
    scores: npt.NDArray[Any] | None = None,
) -> list[str]:
    """Sentences on what differs much from what the model `info` was trained on; [] if nothing does.

    `stain` is of `stain_facts`, `pixel_size` (y, x) of the image in micrometres, and `scores` are
    those of all candidates that were found.
    """
    told = _stain(info.get("stain_seen"), stain) if stain else []
    told += _pixels(info.get("pixel_size"), pixel_size)
    return told + (_doubt(scores) if scores is not None else [])


def _stain(seen: Mapping[str, Any] | None, stain: Mapping[str, Any]) -> list[str]:
    if not seen:
        return []
    light, usual = np.array(stain["background"]), np.array(seen["background"]["mean"])
    told = []
    if abs(light.mean() - usual.mean()) > _LIGHT:
        told.append(
            f"The background has {100 * math.exp(light.mean()):.0f} % of full light; in training "
            f"it had {100 * math.exp(usual.mean()):.0f} %."
        )
    elif np.abs((light - light.mean()) - (usual - usual.mean())).max() > _CAST:
        told.append("The background has another colour than in training.")
    return told + _colours(np.array(seen["spectra"]), stain)


def _colours(usual: npt.NDArray[Any], stain: Mapping[str, Any]) -> list[str]:
    spectra, share = np.array(stain["spectra"]), np.array(stain["share"])
    od = np.array(stain["optical_density"])
    if not share.any():
        return ["There is hardly any stain in this image."]
    if od.max() - od.min() < _GREY * float(np.linalg.norm(od)):
        return ["The image has hardly any colour; the model was trained on stained slides."]
    if spectra.shape != usual.shape:
        return []
    length = np.linalg.norm(spectra, axis=0) * np.linalg.norm(usual, axis=0)
    cosine = (spectra * usual).sum(axis=0) / np.where(length > 0, length, 1)
    if (share * cosine).sum() < _COSINE:
        return ["The stains have other colours than in training."]
    return []


def _pixels(usual: float | None, size: tuple[float, float] | None) -> list[str]:
    if not usual or not size:
        return []
    here = math.sqrt(math.prod(size))
    if 1 / _ZOOM <= here / usual <= _ZOOM:
        return []
    much = "larger" if here > usual else "smaller"
    return [
        f"Its pixels are {max(here / usual, usual / here):.3g} times {much} than in training "
        f"({here:.3g} µm against {usual:.3g} µm)."
    ]


def _doubt(scores: npt.NDArray[Any]) -> list[str]:
    sure = int((scores >= _SURE).sum())
    doubtful = int(((scores >= _DOUBT) & (scores < _SURE)).sum())
    if doubtful < _FEW or doubtful < _DOUBTFUL * max(sure, 1):
        return []
    return [
        f"The model is unsure here: {doubtful} doubtful boxes and {sure} sure ones. "
        "Perhaps these are not the objects that it knows."
    ]


def _plain(values: npt.NDArray[Any]) -> list[float]:
    return [round(float(v), 6) for v in values]
