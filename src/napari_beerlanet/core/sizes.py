"""How large objects are, and at what resolution an image must be shown to the network for that.

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

_AGREES = math.log(1.3)  # sizes that differ by less than this need no other resolution
_SURE = 0.4  # score of detections that tell the size
_FEW = 3  # of those, and no less
_SHOWN = 0.25  # score that at least one detection must have at a scale that is to be chosen
_WIDTH = 0.35  # of the bell by which a size of ln ratio x counts in a scale's quality
_STEP = 1.8  # between the scales that are tried
_TRIED = (12.0, 800.0)  # image pixels of the smallest and largest typical object that are tried
_SMALLEST_VIEW = 48  # working pixels of an image's longer side


@dataclass(frozen=True)
class Sample:
    """What is found at one scale in `area` working pixels; sizes (n,) in working pixels."""

    sizes: npt.NDArray[np.float64]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float64]
    area: float


@dataclass(frozen=True)
class Choice:
    """A scale (working pixels per image pixel), and in a few words how it was chosen."""

    scale: float
    how: str


def describe_sizes(
    boxes_wh: npt.NDArray[np.floating[Any]], labels: npt.NDArray[np.int64], names: Sequence[str]
) -> dict[str, dict[str, float]]:
    """Sizes per class, as checkpoints store them, of boxes' (n, 2) widths and heights."""
    size = np.sqrt(np.prod(boxes_wh, axis=1))
    found = {}
    for k, name in enumerate(names):
        mine = size[labels == k]
        if len(mine):
            low, median, high = (round(float(v), 2) for v in np.percentile(mine, (5, 50, 95)))
            found[name] = {"median": median, "low": low, "high": high, "count": len(mine)}
    return found


def pooled_sizes(
    before: Mapping[str, Mapping[str, float]], now: Mapping[str, Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Sizes of all that a model has learned from, by those its parent knew and those of new data.

    Medians are averaged (of logarithms) by the number of objects, so a few fields do not change
    the resolution that a model works at. What is new, or shown at quite another size than before,
    is as the new data shows it.
    """
    found = {name: dict(size) for name, size in now.items()}
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        ratio = math.log(new["median"] / old["median"])
        if abs(ratio) <= _AGREES:
            count = old["count"] + new["count"]
            found[name] = {
                "median": round(old["median"] * math.exp(ratio * new["count"] / count), 2),
                "low": min(old["low"], new["low"]),
                "high": max(old["high"], new["high"]),
                "count": count,
            }
    return found | {name: dict(size) for name, size in before.items() if name not in now}


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
class Known:
    """What training knew of each class: median size (n,), NaN where unknown, and its weight (n,).

    Classes weigh as the root of their share: a field of nothing but platelets is less likely than
    one of red cells that are shown too small.
    """

    medians: npt.NDArray[np.float64]
    weights: npt.NDArray[np.float64]

    @classmethod
    def of(cls, object_sizes: Mapping[str, Mapping[str, float]], names: Sequence[str]) -> Known:
        """From what a checkpoint stores."""
        sizes = [object_sizes.get(name, {}) for name in names]
        count = np.array([float(s.get("count", 0.0)) for s in sizes])
        weights = np.sqrt(count / count.max()) if count.any() else np.ones(len(names))
        return cls(np.array([float(s.get("median", math.nan)) for s in sizes]), weights)


def quality(sample: Sample, known: Known) -> float:
    """How much of the area is covered by sure detections of sizes and classes like training's.

    Area and not number, because the number of objects that fit into a view grows with its size.
    """
    sure = sample.scores**2 * _agreement(sample, known)
    return float((sure * sample.sizes**2).sum() / sample.area)


def deviation(sample: Sample, known: Known) -> float | None:
    """Median of ln(size / its class's size in training), weighted by score; None if too few."""
    sure = (sample.scores >= _SURE) & np.isfinite(known.medians[sample.labels])
    if sure.sum() < _FEW:
        return None
    x = np.log(sample.sizes[sure] / known.medians[sample.labels[sure]])
    order = np.argsort(x)
    weight = np.cumsum((sample.scores[sure] * known.weights[sample.labels[sure]])[order])
    return float(x[order][np.searchsorted(weight, weight[-1] / 2)])


def agrees(sample: Sample, known: Known) -> bool:
    """Whether sizes and classes are so much like training's that no other scale need be tried."""
    off = deviation(sample, known)
    if off is None or abs(off) > _AGREES:
        return False
    sure = sample.scores >= _SURE
    return float(_agreement(sample, known)[sure].mean()) > 0.5


def _agreement(sample: Sample, known: Known) -> npt.NDArray[np.float64]:
    """(n,) from 0 to 1 for each detection; half for the size of a class of which none is known."""
    with np.errstate(invalid="ignore", divide="ignore"):
        x = np.log(sample.sizes / known.medians[sample.labels])
    bell = np.where(np.isfinite(x), np.exp(-0.5 * (np.nan_to_num(x) / _WIDTH) ** 2), 0.5)
    return np.asarray(bell * known.weights[sample.labels])


def search(
    look: Callable[[float], Sample], typical: float, shape: tuple[int, int], known: Known
) -> Choice | None:
    """The best of several scales, then put right by the sizes found there; None if none is good.

    `look` returns what is found at a scale in the whole image or a sample of it.
    """
    seen = {scale: look(scale) for scale in scales(typical, shape)}
    # An empty field has many doubtful detections at the finest scale, which takes the longest.
    good = [scale for scale in seen if (seen[scale].scores >= _SHOWN).any()]
    best = max(good, key=lambda scale: quality(seen[scale], known), default=None)
    if best is None:
        return None
    for _ in range(2):
        off = deviation(seen[best], known)
        if off is None or abs(off) < 0.1:
            break
        scale = best * math.exp(-off)
        seen[scale] = look(scale)
        if quality(seen[scale], known) < quality(seen[best], known):
            break
        best = scale
    return Choice(best, f"best of {len(seen)} resolutions tried")


def scales(typical: float, shape: tuple[int, int]) -> list[float]:
    """Working pixels per image pixel to try, coarse to fine."""
    steps = math.floor(math.log(_TRIED[1] / _TRIED[0], _STEP))
    tried = [typical / (_TRIED[1] / _STEP**k) for k in range(steps + 1)]
    return [s for s in tried if max(shape) * s >= _SMALLEST_VIEW]
