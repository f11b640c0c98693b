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

_SIZE_TOLERANCE = math.log(1.3)  # sizes that differ by less than this need no other resolution
_CONFIDENT_SCORE = 0.4  # of detections that tell the size
_MIN_CONFIDENT = 3  # detections
_MIN_BEST_SCORE = 0.25  # of at least one detection at a scale that is to be chosen
_SIZE_SIGMA = 0.35  # of the bell by which a size of ln ratio x counts in a scale's quality
_SCALE_STEP = 1.8  # between the scales that are tried
_OBJECT_SIZE_RANGE = (12.0, 800.0)  # image pixels of the typical objects that are tried
_MIN_VIEW_SIDE = 48  # working pixels of an image's longer side


@dataclass(frozen=True)
class ScaleSample:
    """Detections at one scale in `area` working pixels; sizes (n,) in working pixels."""

    sizes: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    area: float


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
) -> ScaleChoice | None:
    """The best of several scales, then refined by the sizes found there; None if none is good.

    `probe` returns the detections at a scale in the whole image or a sample of it.
    """
    samples = {scale: probe(scale) for scale in candidate_scales(typical, shape)}
    # An empty image has many doubtful detections at the finest scale, which takes the longest.
    good = [scale for scale in samples if (samples[scale].scores >= _MIN_BEST_SCORE).any()]
    best = max(good, key=lambda scale: scale_quality(samples[scale], training), default=None)
    if best is None:
        return None
    for _ in range(2):
        deviation = size_deviation(samples[best], training)
        if deviation is None or abs(deviation) < 0.1:
            break
        scale = best * math.exp(-deviation)
        samples[scale] = probe(scale)
        if scale_quality(samples[scale], training) < scale_quality(samples[best], training):
            break
        best = scale
    return ScaleChoice(best, f"best of {len(samples)} resolutions tried")


def candidate_scales(typical: float, shape: tuple[int, int]) -> list[float]:
    """Working pixels per image pixel to try, coarse to fine."""
    steps = math.floor(math.log(_OBJECT_SIZE_RANGE[1] / _OBJECT_SIZE_RANGE[0], _SCALE_STEP))
    tried = [typical / (_OBJECT_SIZE_RANGE[1] / _SCALE_STEP**k) for k in range(steps + 1)]
    return [s for s in tried if max(shape) * s >= _MIN_VIEW_SIDE]
