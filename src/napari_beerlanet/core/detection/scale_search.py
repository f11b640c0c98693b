"""Object sizes, and the search for the resolution at which an image is shown to the network.

A network knows objects of the sizes it was trained on. The same cell is 50 pixels wide in one
laboratory's images and 150 in another's; at the right working resolution it is as wide as in
training. Size here is √(width · height) of a box.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import MIN_CLASS_BOXES
from napari_beerlanet.core.detection.ultralytics_api import cv2

_SIZE_TOLERANCE = math.log(1.3)  # sizes that differ by less than this need no other resolution
_CONFIDENT_SCORE = 0.4  # of detections that tell the size
_MIN_CONFIDENT = 3  # detections
_MIN_BEST_SCORE = 0.25  # of at least one detection at a scale that is to be chosen
_SIZE_SIGMA = 0.35  # of the bell by which a size of ln ratio x counts in a scale's quality
_SCALE_STEP = 1.8  # between the scales that are tried
_OBJECT_SIZE_RANGE = (12.0, 800.0)  # image pixels of the typical objects that are tried
_MIN_VIEW_SIDE = 48  # working pixels of an image's longer side
_CLOSE_ENOUGH = 0.1  # of ln size: a difference that needs no correction
_MAX_STEPS = 4  # in which the sizes of objects are followed
_BLOB_LEVEL = 0.25  # of the autocorrelation, at the radius that tells a blob's size
_SIZE_PER_RADIUS = 2.2  # objects' size by that radius, in blood smears


@dataclass(frozen=True)
class ScaleSample:
    """Detections at one scale in `area` working pixels; sizes (n,) in working pixels.

    `whole`: they are all of the image's, which need not be run again.
    """

    sizes: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    area: float
    whole: bool = False


@dataclass(frozen=True)
class ScaleChoice:
    """A scale (working pixels per image pixel), and in a few words how it was chosen."""

    scale: float
    how: str


def describe_sizes(
    boxes_wh: npt.NDArray[np.floating[Any]], labels: npt.NDArray[np.int64], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Sizes per class, as checkpoints store them, of boxes' (n, 2) widths and heights."""
    size = np.sqrt(np.prod(boxes_wh, axis=1))
    sizes = {}
    for k, name in enumerate(names):
        mine = size[labels == k]
        if len(mine):
            low, median, high = (round(float(v), 2) for v in np.percentile(mine, (5, 50, 95)))
            sizes[name] = {"median": median, "low": low, "high": high, "count": len(mine)}
    return sizes


def pool_sizes(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Sizes of all that a model has learned from, by those its parent knew and those of new data.

    Medians are averaged (of logarithms) by the number of objects, so a few images do not change
    the resolution that a model works at. What is new, or shown at quite another size than before
    by enough boxes, is as the new data shows it.
    """
    sizes = {name: dict(size) for name, size in now.items()}
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        ratio = math.log(new["median"] / old["median"])
        if abs(ratio) <= _SIZE_TOLERANCE or new["count"] < MIN_CLASS_BOXES:
            count = old["count"] + new["count"]
            sizes[name] = {
                "median": round(old["median"] * math.exp(ratio * new["count"] / count), 2),
                "low": min(old["low"], new["low"]),
                "high": max(old["high"], new["high"]),
                "count": count,
            }
    return sizes | {name: dict(size) for name, size in before.items() if name not in now}


def typical_size(object_sizes: Mapping[str, Mapping[str, float]]) -> float | None:
    """The median size of all objects together, in working pixels; None where none is stored."""
    if not object_sizes:
        return None
    ordered = sorted((s["median"], s["count"]) for s in object_sizes.values())
    half, seen = sum(count for _, count in ordered) / 2, 0.0
    for median, count in ordered:
        seen += count
        if seen >= half:
            return float(median)
    raise AssertionError("half of all is never more than all")


def largest_size(object_sizes: Mapping[str, Mapping[str, float]], otherwise: float) -> float:
    """The size in working pixels below which nearly all objects are."""
    return max((float(s["high"]) for s in object_sizes.values()), default=otherwise)


@dataclass(frozen=True)
class TrainingSizes:
    """What training knew of each class: median size (n,), NaN where unknown, and its weight (n,).

    Classes weigh as the root of their share: a field of nothing but platelets is less likely than
    one of red cells that are shown too small.
    """

    medians: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls, object_sizes: Mapping[str, Mapping[str, float]], names: Sequence[str]
    ) -> TrainingSizes:
        """From what a checkpoint stores."""
        sizes = [object_sizes.get(name, {}) for name in names]
        count = np.array([float(s.get("count", 0.0)) for s in sizes])
        weights = np.sqrt(count / count.max()) if count.any() else np.ones(len(names))
        return cls(np.array([float(s.get("median", math.nan)) for s in sizes]), weights)


def scale_quality(sample: ScaleSample, training: TrainingSizes) -> float:
    """How much of the area is covered by confident detections of sizes and classes like training's.

    Area and not number, because the number of objects that fit into a view grows with its size.
    """
    confident = sample.scores**2 * _agreement(sample, training)
    return float((confident * sample.sizes**2).sum() / sample.area)


def size_deviation(sample: ScaleSample, training: TrainingSizes) -> float | None:
    """Median of ln(size / its class's size in training), weighted by score; None if too few."""
    confident = (sample.scores >= _CONFIDENT_SCORE) & np.isfinite(training.medians[sample.labels])
    if confident.sum() < _MIN_CONFIDENT:
        return None
    x = np.log(sample.sizes[confident] / training.medians[sample.labels[confident]])
    order = np.argsort(x)
    weight = np.cumsum(
        (sample.scores[confident] * training.weights[sample.labels[confident]])[order]
    )
    return float(x[order][np.searchsorted(weight, weight[-1] / 2)])


def matches_training(sample: ScaleSample, training: TrainingSizes) -> bool:
    """Whether sizes and classes are so much like training's that no other scale need be tried."""
    deviation = size_deviation(sample, training)
    if deviation is None or abs(deviation) > _SIZE_TOLERANCE:
        return False
    confident = sample.scores >= _CONFIDENT_SCORE
    return float(_agreement(sample, training)[confident].mean()) > 0.5


def _agreement(sample: ScaleSample, training: TrainingSizes) -> npt.NDArray[np.float64]:
    """(n,) from 0 to 1 for each detection; half for a class of unknown size."""
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.log(sample.sizes / training.medians[sample.labels])
    bell = np.where(np.isfinite(x), np.exp(-0.5 * (np.nan_to_num(x) / _SIZE_SIGMA) ** 2), 0.5)
    return np.asarray(bell * training.weights[sample.labels])


def search_scale(
    probe: Callable[[float], ScaleSample],
    typical: float,
    shape: tuple[int, int],
    training: TrainingSizes,
    first: tuple[float, ScaleSample] | None = None,
    guess: float | None = None,
) -> ScaleChoice | None:
    """The scale at which objects have the sizes of training; None if none is good.

    `probe` returns the detections at a scale in the whole image or a sample of it; `first` is a
    scale with its detections that are there already, `guess` another scale that is likely. A
    network finds objects also at less than half and at nearly twice the size of training, and their
    sizes tell the right scale: the search follows them from the first scale at which a few are
    found. Only where that leads to nothing like training all scales are compared.
    """
    samples = {} if first is None else {first[0]: first[1]}
    tried = candidate_scales(typical, shape)
    starts = [*samples, *([guess] if guess is not None and tried else []), *tried]
    for scale in starts:
        if scale not in samples:
            samples[scale] = probe(scale)
        if size_deviation(samples[scale], training) is None:
            continue
        best = _follow_sizes(probe, scale, samples, training)
        if matches_training(samples[best], training):
            deviation = size_deviation(samples[best], training) or 0.0
            done = samples[best].whole or abs(deviation) < _CLOSE_ENOUGH
            scale = best if done else best * math.exp(-deviation)
            return ScaleChoice(scale, f"found with {len(samples)} resolutions")
    # An empty image has many doubtful detections at the finest scale, which takes the longest.
    good = [scale for scale in samples if (samples[scale].scores >= _MIN_BEST_SCORE).any()]
    best_or_none = max(good, key=lambda s: scale_quality(samples[s], training), default=None)
    if best_or_none is None:
        return None
    return ScaleChoice(best_or_none, f"best of {len(samples)} resolutions tried")


def _follow_sizes(
    probe: Callable[[float], ScaleSample],
    scale: float,
    samples: dict[float, ScaleSample],
    training: TrainingSizes,
) -> float:
    """The scale to which the sizes of objects lead; what is probed is added to `samples`."""
    for _ in range(_MAX_STEPS):
        deviation = size_deviation(samples[scale], training)
        if deviation is None or matches_training(samples[scale], training):
            break
        following = scale * math.exp(-deviation)
        if following not in samples:
            samples[following] = probe(following)
        if scale_quality(samples[following], training) < scale_quality(samples[scale], training):
            break
        scale = following
    return scale


def blob_size(pixels: npt.NDArray[np.uint8], side: int) -> float | None:
    """A rough size in pixels of what is repeated in an image (h, w, 3 or 4); None for nothing.

    Where the autocorrelation of the optical density, of a thumbnail of `side` pixels, falls to a
    quarter. In blood smears of four laboratories it is within a factor of 1.3 of the red cells in
    two thirds of the images, and within 1.8 in 98 %.
    """
    step = max(max(pixels.shape[:2]) // (2 * side), 1)
    green = np.asarray(pixels[::step, ::step, 1], np.float32)
    factor = min(side / max(green.shape), 1.0)
    size = [max(round(n * factor), 1) for n in green.shape[::-1]]
    od = -np.log((cv2.resize(green, size, interpolation=cv2.INTER_AREA) + 1) / 256)
    od = od - cv2.GaussianBlur(od, (0, 0), side / 6)  # uneven illumination
    height, width = od.shape
    window = np.outer(np.hanning(height), np.hanning(width)).astype(np.float32)
    if not window.any():
        return None
    od = (od - (od * window).sum() / window.sum()) * window
    power = np.abs(np.fft.rfft2(od, (2 * height, 2 * width))) ** 2
    correlation = np.fft.irfft2(power)
    reach = min(height, width) // 2
    y, x = np.mgrid[: reach + 1, : reach + 1]
    radius = np.rint(np.hypot(y, x)).astype(np.int64)
    sums = np.bincount(radius.ravel(), correlation[: reach + 1, : reach + 1].ravel())
    profile = sums / np.maximum(np.bincount(radius.ravel()), 1)
    if not profile[0] > 0:
        return None
    below = np.flatnonzero(profile < _BLOB_LEVEL * profile[0])
    if not len(below):
        return None
    low, high = profile[below[0]], profile[below[0] - 1]
    radius_there = below[0] - 1 + (high - _BLOB_LEVEL * profile[0]) / (high - low)
    return float(_SIZE_PER_RADIUS * radius_there * step / factor)


def candidate_scales(typical: float, shape: tuple[int, int]) -> list[float]:
    """Working pixels per image pixel to try, coarse to fine."""
    steps = math.floor(math.log(_OBJECT_SIZE_RANGE[1] / _OBJECT_SIZE_RANGE[0], _SCALE_STEP))
    tried = [typical / (_OBJECT_SIZE_RANGE[1] / _SCALE_STEP**k) for k in range(steps + 1)]
    return [s for s in tried if max(shape) * s >= _MIN_VIEW_SIDE]
