"""Stain densities in boxes, and domain-shift warnings.

`measure_boxes` gives the mean and integrated optical density of each component in a box;
`domain_shift_scores` how far a box is from its class in training; `domain_shift_warnings` warns
when an image lies outside the model's training domain (background, stain, pixel size), and
`class_agreement` says which objects have neither the looks of one class nor the size and stain of
another, such as parasites that a model of blood cells calls white cells.

The limits are set on real images: the model of one laboratory's blood smears finds nothing strange
in another laboratory's, nor in malaria smears of six microscopes (background from 41 % to
87 %, weighted cosine of spectra from 0.94, up to 2.9 doubtful boxes for each confident one), but
does in H&E sections (8 and more doubtful boxes for each confident one), inverted and fluorescence
images. `class_agreement` is low for 1 of 129 white cells in smears without parasites (BCCD test and
125 images of the other laboratory) and for 35 of 40 parasites that it calls white cells in 117
malaria fields; 2 of those 197 smears and 34 of the 36 fields with such parasites are warned of.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import AGREEMENT_COLUMN
from napari_beerlanet.core.common.threads import chunk_slices, in_numpy, map_chunks, njit
from napari_beerlanet.core.stains.domain_shift import stain_warnings

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes.detections import Detections

_BLOCK_SIDE = 1024
_ROWS_PER_TASK = 64  # rows per task: fixed, so that sums do not depend on the number of threads
_MIN_BOXES_PER_CLASS = 5  # that tell a standard deviation
_MIN_SD = 0.005  # optical density: about one grey level of a bright pixel
_MAX_PIXEL_SIZE_RATIO = 4.0  # times larger or smaller pixels
_DOUBTFUL_SCORE, _CONFIDENT_SCORE = 0.1, 0.4
_MAX_DOUBTFUL_RATIO = 4.0  # doubtful boxes for each confident one
_MIN_DOUBTFUL = 8  # boxes

_MIN_REFERENCE_BOXES = 5  # confident ones of an image's commonest class
_MIN_SIZE_SIGMA = 0.2  # of ln size: how much it varies within a class
_DENSITY_SIGMA = 0.35  # of ln density relative to another class: how much laboratories differ
_MIN_CLASS_DISTANCE = 1.5  # in sigmas, of two classes that can be told apart by size and stain
MIN_AGREEMENT = 0.4
"""Of size and stain of an object with its class, see `class_agreement`."""
_MAX_DISAGREEING = 0.25  # of a class's objects, without a warning
_BORDER_FRACTION = 0.01  # of the longer side: nearer to the image's border an object may be cut

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
        if in_numpy():
            _add_rows_in_numpy(rows[part], table, across, down - part.start, sums)
            return sums
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


def _add_rows_in_numpy(
    rows: npt.NDArray[np.int32],
    table: npt.NDArray[np.float32],
    across: npt.NDArray[np.int64],
    down: npt.NDArray[np.int64],
    sums: npt.NDArray[np.float64],
) -> None:
    """As `_add_rows`, of all the rows that are given."""
    height, width = rows.shape
    running = np.zeros((height, width + 1, table.shape[1]))
    np.cumsum(table[rows], axis=1, dtype=np.float64, out=running[:, 1:])
    first, last = np.clip(down, 0, height)
    for box in np.flatnonzero(first < last):
        lines = running[first[box] : last[box]]
        sums[box] += (lines[:, across[1, box]] - lines[:, across[0, box]]).sum(0)


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


def class_agreement(
    info: Mapping[str, Any],
    xyxy: npt.NDArray[Any],
    labels: npt.NDArray[np.int64],
    scores: npt.NDArray[Any],
    means: npt.NDArray[Any],
    shape: tuple[int, int],
) -> npt.NDArray[np.float32]:
    """(n,) how well size and stain of objects agree with the class that the network gives them.

    An image's commonest class r is the yardstick, so that neither magnification nor staining
    matters: x = (ln size / size_r, ln density / density_r), each divided by how much it varies. An
    object of class c is expected at e_c, by what the model knows of its training; its agreement is
    (x · e_c) / (e_c · e_c): 1 as in training, 0 as if it were of class r. It is NaN for objects of
    class r, at the border of the image, or of classes that size and stain do not tell from r. A
    density that is below that of r in training does not count: laboratories differ too much in it.

    `xyxy` (n, 4) in pixels of an image of `shape`, `means` (n, r) of `measure_boxes`.
    """
    agreement = np.full(len(labels), np.nan, np.float32)
    sizes, densities = info.get("object_sizes") or {}, info.get("densities_seen") or {}
    names = [name if name in sizes and name in densities else None for name in info["classes"]]
    known = np.array([name is not None for name in names])
    near = _BORDER_FRACTION * max(shape)
    height, width = shape
    whole = (xyxy[:, :2] > near).all(1) & (xyxy[:, 2] < width - near) & (xyxy[:, 3] < height - near)
    usable = whole & (scores >= _CONFIDENT_SCORE) & known[labels]
    counts = np.bincount(labels[usable], minlength=len(names))
    common = int(counts.argmax())
    if counts[common] < _MIN_REFERENCE_BOXES:
        return agreement
    reference = usable & (labels == common)
    size, density = _ln_sizes(xyxy), np.log(np.maximum(means.sum(1, dtype=np.float64), _MIN_SD))
    size, density = size - np.median(size[reference]), density - np.median(density[reference])
    for label, name in enumerate(names):
        mine = whole & (labels == label)
        if name is None or label == common or not mine.any():
            continue
        other = str(names[common])
        size_sigma = max(
            np.hypot(_size_sigma(sizes[name]), _size_sigma(sizes[other])), _MIN_SIZE_SIGMA
        )
        by_size = math.log(sizes[name]["median"] / sizes[other]["median"]) / size_sigma
        ratio = math.log(sum(densities[name]["mean"]) / sum(densities[other]["mean"]))
        by_density = max(ratio, 0.0) / _DENSITY_SIGMA
        if np.hypot(by_size, by_density) >= _MIN_CLASS_DISTANCE:
            along = by_size * size[mine] / size_sigma + by_density * density[mine] / _DENSITY_SIGMA
            agreement[mine] = along / (by_size**2 + by_density**2)
    return agreement


def _ln_sizes(xyxy: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """(n,) ln of √(width · height)."""
    sides = np.maximum(xyxy[:, 2:].astype(np.float64) - xyxy[:, :2], 1e-3)
    return np.asarray(0.5 * np.log(sides).sum(1))


def _size_sigma(size: Mapping[str, float]) -> float:
    """Of ln size, by the 5th and 95th percentile."""
    return math.log(max(size["high"] / max(size["low"], 1e-3), 1.0)) / 3.29


def detection_warnings(
    info: Mapping[str, Any], detections: Detections, pixel_size: tuple[float, float] | None = None
) -> list[str]:
    """All warnings on an image by the detections of the model `info` in it."""
    candidates = detections if detections.candidates is None else detections.candidates
    stain = detections.report.get("stain")
    warnings = domain_shift_warnings(info, stain, pixel_size, candidates.scores)
    return warnings + _disagreement_warnings(detections)


def _disagreement_warnings(detections: Detections) -> list[str]:
    """For each class of which many objects have the size and stain of no class."""
    agreement = detections.columns.get(AGREEMENT_COLUMN)
    if agreement is None:
        return []
    warnings = []
    for label, name in enumerate(detections.names):
        mine = agreement[detections.labels == label]  # NaN where it cannot be said
        odd = int((mine < MIN_AGREEMENT).sum())
        if odd and odd >= _MAX_DISAGREEING * np.isfinite(mine).sum():
            warnings.append(
                f"{odd} of {len(mine)} {name} {'does' if odd == 1 else 'do'} not have the size and "
                f"stain of {name}: {'it' if odd == 1 else 'they'} may be something that the model "
                "does not know."
            )
    return warnings


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
    warnings = stain_warnings(info.get("stain_seen"), stain)
    warnings += _pixel_size_warnings(info.get("pixel_size"), pixel_size)
    return warnings + (_confidence_warnings(scores) if scores is not None else [])


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
