"""Stain densities in boxes, and domain-shift warnings.

`measure_boxes` gives the mean and integrated optical density of each component in a box;
`domain_shift_scores` how far a box is from its class in training; `domain_shift_warnings` warns
when an image lies outside the model's training domain (background, stain, pixel size).

The limits are set on real images: the model of one laboratory's blood smears finds nothing strange
in another laboratory's, nor in malaria smears of six microscopes (background from 41 % to
87 %, weighted cosine of spectra from 0.94, up to 2.9 doubtful boxes for each confident one), but
does in H&E sections (8 and more doubtful boxes for each confident one), inverted and fluorescence
images.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numba import njit

from napari_beerlanet.core.common.threads import chunk_slices, map_chunks

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.detection.stain_fit import StainFit


_BLOCK_SIDE = 1024
_ROWS_PER_TASK = 64  # rows per task: fixed, so that sums do not depend on the number of threads
_MIN_BOXES_PER_CLASS = 5  # that tell a standard deviation
_MIN_SD = 0.005  # optical density: about one grey level of a bright pixel
_SAMPLE_PIXELS = 1 << 17  # that stand for an image
_MAX_BACKGROUND_SHIFT = 0.55  # of ln intensity, mean of the channels
_MAX_COLOUR_CAST = 0.45  # the same of one channel against the mean
_MIN_SPECTRA_COSINE = 0.93
_MIN_COLOURFULNESS = 0.1  # difference of the channels, as a fraction of the optical density
_MAX_PIXEL_SIZE_RATIO = 4.0  # times larger or smaller pixels
_DOUBTFUL_SCORE, _CONFIDENT_SCORE = 0.1, 0.4
_MAX_DOUBTFUL_RATIO = 4.0  # doubtful boxes for each confident one
_MIN_DOUBTFUL = 8  # boxes

IndexedColours = tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]


def measure_boxes(
    read: Callable[[slice, slice], IndexedColours],
    shape: tuple[int, int],
    components: int,
    xyxy: npt.NDArray[np.float32],
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
    """Mean and sum, (n, r) each, of the densities over the pixels of boxes (n, 4).

    `read(rows, columns)` gives a part of the image as the row (h, w) of each pixel's colour in a
    table (u, r) of densities; memory is bounded by a block of 1024². A box has the pixels whose
    centres it covers, and at least one.
    """
    height, width = shape
    x1, x2 = _covered_pixels(xyxy[:, 0], xyxy[:, 2], width)
    y1, y2 = _covered_pixels(xyxy[:, 1], xyxy[:, 3], height)
    total = np.zeros((len(xyxy), components))
    for rows in chunk_slices(height, _BLOCK_SIDE):
        for columns in chunk_slices(width, _BLOCK_SIDE):
            top, bottom, left, right = rows.start, rows.stop, columns.start, columns.stop
            here = np.flatnonzero((x1 < right) & (x2 > left) & (y1 < bottom) & (y2 > top))
            if len(here):
                across = np.clip(np.stack([x1[here], x2[here]]) - left, 0, right - left)
                down = np.clip(np.stack([y1[here], y2[here]]) - top, 0, bottom - top)
                total[here] += _box_sums(*read(rows, columns), across, down)
    area = ((x2 - x1) * (y2 - y1))[:, None]
    return (total / area).astype(np.float32), total.astype(np.float32)


def _covered_pixels(
    low: npt.NDArray[np.float32], high: npt.NDArray[np.float32], length: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """First pixel, and the one after the last, whose centres lie between two edges."""
    first = np.clip(np.ceil(low - 0.5), 0, length - 1).astype(np.int64)
    last = np.clip(np.ceil(high - 0.5), 0, length).astype(np.int64)
    return first, np.maximum(last, first + 1)


def _box_sums(
    rows: npt.NDArray[np.int32],
    table: npt.NDArray[np.float32],
    across: npt.NDArray[np.int64],
    down: npt.NDArray[np.int64],
) -> npt.NDArray[np.float64]:
    """(n, r) float64: sums over columns and rows from `across` and `down` [0] up to [1]."""

    def band(part: slice) -> npt.NDArray[np.float64]:
        sums = np.zeros((across.shape[1], table.shape[1]))
        _add_rows(rows, table, across, down, part.start, part.stop, sums)
        return sums

    parts = map_chunks(band, len(rows), _ROWS_PER_TASK)
    return np.asarray(sum(parts), dtype=np.float64)


@njit(cache=True, nogil=True)
def _add_rows(rows, table, across, down, first, last, sums):  # type: ignore
    """Add what boxes have in rows first … last − 1 to sums (n, r), by each row's running sum."""
    width, r = rows.shape[1], table.shape[1]
    running = np.zeros((width + 1, r))
    for y in range(first, last):
        for x in range(width):
            colour = rows[y, x]
            for k in range(r):
                running[x + 1, k] = running[x, k] + table[colour, k]
        for box in range(across.shape[1]):
            if down[0, box] <= y < down[1, box]:
                for k in range(r):
                    sums[box, k] += running[across[1, box], k] - running[across[0, box], k]


class AnnotatedSample(NamedTuple):
    """A training image (h, w, 3) uint8 and its n boxes: `xyxy` (n, 4) in pixels, `labels` (n,)."""

    pixels: npt.NDArray[np.uint8]
    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]


def describe_densities(
    means: npt.NDArray[Any], labels: npt.NDArray[np.int64], names: Sequence[str]
) -> dict[str, dict[str, Any]]:
    """By class {"mean": [r], "sd": [r], "count": n} of `means` (n, r), the boxes' mean densities.

    Mean and standard deviation are over the boxes of a class, each counting once however large it
    is. A class with fewer than 5 boxes has no entry.
    """
    classes = {}
    for label, name in enumerate(names):
        mine = np.asarray(means, np.float64)[labels == label]
        if len(mine) >= _MIN_BOXES_PER_CLASS:
            mean, sd = mine.mean(0).round(6).tolist(), mine.std(0).round(6).tolist()
            classes[name] = {"mean": mean, "sd": sd, "count": len(mine)}
    return classes


def domain_shift_scores(
    seen: Mapping[str, Mapping[str, Any]],
    means: npt.NDArray[Any],
    labels: npt.NDArray[np.int64],
    names: Sequence[str],
) -> npt.NDArray[np.float32]:
    """(n,) how far `means` (n, r) are from their class in training; NaN if it is not in `seen`.

    It is max over components k of |ODₖ − meanₖ| / max(sdₖ, 0.005): by how many standard deviations
    the stain that differs most is off. `seen` is of `describe_densities`.
    """
    scores = np.full(len(labels), np.nan, np.float32)
    for label, name in enumerate(names):
        mine = labels == label
        if name in seen and mine.any():
            mean, sd = (np.array(seen[name][key], np.float64) for key in ("mean", "sd"))
            scores[mine] = (np.abs(means[mine] - mean) / np.maximum(sd, _MIN_SD)).max(1)
    return scores


def subsample_pixels(pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Every n-th row and column of an image (H, W, …), about 130 000 pixels."""
    step = max(1, math.isqrt(math.prod(pixels.shape[:2]) // _SAMPLE_PIXELS))
    return pixels[::step, ::step]


def summarize_stain(fit: StainFit, pixels: npt.NDArray[np.uint8]) -> dict[str, Any]:
    """Plain numbers on an image's stain: background (3,), spectra (3, r), share of each (r,).

    `pixels` (h, w, 3) are the image or a sample of it.
    """
    rows, table = fit.look_up(pixels)
    counts = np.bincount(rows.ravel(), minlength=len(table))
    density = counts @ table.astype(np.float64) * np.linalg.norm(fit.spectra, axis=0)
    total = density.sum()
    share = density / total if total > 0 else np.zeros_like(density)
    od = fit.spectra @ (counts @ table.astype(np.float64)) / max(counts.sum(), 1)
    return {
        "background": _rounded(fit.background),
        "spectra": [_rounded(row) for row in fit.spectra],
        "share": _rounded(share),
        "optical_density": _rounded(od),
    }


def detection_warnings(
    info: Mapping[str, Any], detections: Detections, pixel_size: tuple[float, float] | None = None
) -> list[str]:
    """`domain_shift_warnings` of an image by the detections of the model `info` in it."""
    candidates = detections if detections.candidates is None else detections.candidates
    stain = detections.report.get("stain")
    return domain_shift_warnings(info, stain, pixel_size, candidates.scores)


def domain_shift_warnings(
    info: Mapping[str, Any],
    stain: Mapping[str, Any] | None = None,
    pixel_size: tuple[float, float] | None = None,
    scores: npt.NDArray[Any] | None = None,
) -> list[str]:
    """Warnings, a sentence each, where an image is outside the training domain of model `info`.

    `stain` is of `summarize_stain`, `pixel_size` (y, x) of the image in micrometres, and `scores`
    are those of all candidates.
    """
    warnings = _background_warnings(info.get("stain_seen"), stain) if stain else []
    warnings += _pixel_size_warnings(info.get("pixel_size"), pixel_size)
    return warnings + (_confidence_warnings(scores) if scores is not None else [])


def _background_warnings(seen: Mapping[str, Any] | None, stain: Mapping[str, Any]) -> list[str]:
    if not seen:
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
    return warnings + _stain_warnings(np.array(seen["spectra"]), stain)


def _stain_warnings(usual: npt.NDArray[Any], stain: Mapping[str, Any]) -> list[str]:
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


def _pixel_size_warnings(usual: float | None, size: tuple[float, float] | None) -> list[str]:
    if not usual or not size:
        return []
    here = math.sqrt(math.prod(size))
    if 1 / _MAX_PIXEL_SIZE_RATIO <= here / usual <= _MAX_PIXEL_SIZE_RATIO:
        return []
    much = "larger" if here > usual else "smaller"
    return [
        f"Its pixels are {max(here / usual, usual / here):.3g} times {much} than in training "
        f"({here:.3g} µm against {usual:.3g} µm)."
    ]


def _confidence_warnings(scores: npt.NDArray[Any]) -> list[str]:
    confident = int((scores >= _CONFIDENT_SCORE).sum())
    doubtful = int(((scores >= _DOUBTFUL_SCORE) & (scores < _CONFIDENT_SCORE)).sum())
    if doubtful < _MIN_DOUBTFUL or doubtful < _MAX_DOUBTFUL_RATIO * max(confident, 1):
        return []
    return [
        f"The model is uncertain here: {doubtful} doubtful boxes and {confident} confident ones. "
        "Perhaps these are not the objects that it was trained on."
    ]


def _rounded(values: npt.NDArray[Any]) -> list[float]:
    return [round(float(v), 6) for v in values]
