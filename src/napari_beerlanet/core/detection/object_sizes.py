"""Sizes of objects that a model was trained on, per class and all at one scale.

Size is √(width · height) of a box in working pixels. In training ln size = class + image +
residual: images of one laboratory and magnification differ little, and a checkpoint stores what
is left when their differences are taken out. All classes of a checkpoint are at one scale, as the
ratios between them tell at which resolution an image is to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

ClassSizes = Mapping[str, Mapping[str, float]]
"""Of each class median, low, high and count, as checkpoints store them."""

_POLISHES = 10  # of classes and images in turn: enough for medians to settle
MIN_KNOWN_BOXES = 3
"""So many boxes tell a scale, and count half as evidence that an image has one of its own."""

_SMALLEST = 0.01  # working pixels


@dataclass(frozen=True)
class MeasuredSizes:
    """Sizes of each class; `spread` is the standard deviation of ln of the images' scales."""

    classes: dict[str, dict[str, float]]
    spread: float


def measure(
    images: Sequence[tuple[npt.NDArray[np.floating[Any]], npt.NDArray[np.int64]]],
    names: Sequence[str],
) -> MeasuredSizes:
    """Sizes of boxes by the sizes (n,) and labels (n,) of each image, by median polish."""
    some = [(np.log(np.maximum(s, _SMALLEST)), labels) for s, labels in images if len(labels)]
    if not some:
        return MeasuredSizes({}, 0.0)
    x, label = (np.concatenate(part) for part in zip(*some, strict=True))
    boxes = np.array([len(labels) for _, labels in some])
    starts, mine = np.cumsum(boxes)[:-1], {k: label == k for k in np.unique(label).tolist()}
    of_image, of_class = np.zeros(len(boxes)), np.zeros(len(names))
    for _ in range(_POLISHES):
        rest = x - np.repeat(of_image, boxes)
        for k, rows in mine.items():
            of_class[k] = np.median(rest[rows])
        medians = [np.median(part) for part in np.split(x - of_class[label], starts)]
        of_image = np.array(medians) * boxes / (boxes + MIN_KNOWN_BOXES)
        of_image -= weighted_median(of_image, boxes)
    rest = x - np.repeat(of_image, boxes)
    sizes = {}
    for k, rows in mine.items():
        low, median, high = np.exp(np.percentile(rest[rows], (5, 50, 95))).tolist()
        sizes[names[k]] = _entry(low, median, high, int(rows.sum()))
    return MeasuredSizes(sizes, round(float(of_image.std()), 4))


def rebase(parent: ClassSizes, now: ClassSizes, otherwise: float = 1.0) -> dict[str, Any]:
    """The parent's sizes at the scale of new data: all classes times one factor.

    It is the weighted median of the ratios of classes that both have, or `otherwise` where there
    are too few boxes of such.
    """
    shared = sorted(parent.keys() & now.keys())
    factor = otherwise
    if sum(now[name]["count"] for name in shared) >= MIN_KNOWN_BOXES:
        ratios = [now[name]["median"] / parent[name]["median"] for name in shared]
        evidence = [math.sqrt(now[name]["count"] * parent[name]["count"]) for name in shared]
        factor = weighted_median(ratios, evidence)
    return {
        name: _entry(s["low"] * factor, s["median"] * factor, s["high"] * factor, int(s["count"]))
        for name, s in parent.items()
    }


def pool_sizes(
    before: ClassSizes, now: ClassSizes, image_size: int, otherwise: float = 1.0
) -> dict[str, dict[str, float]]:
    """Sizes of all that a model has learned from, by those its parent knew and those of new data.

    `before` is rebased first. Then medians are averaged (of logarithms) by the number of objects.
    None is larger than twice an image of `image_size`, see `checkpoints.info`.
    """
    before = rebase(before, now, otherwise)
    sizes = {**before, **now}
    for name in before.keys() & now.keys():
        old, new = before[name], now[name]
        count = old["count"] + new["count"]
        ratio = math.log(new["median"] / old["median"])
        median = old["median"] * math.exp(ratio * new["count"] / count)
        low, high = min(old["low"], new["low"]), max(old["high"], new["high"])
        sizes[name] = _entry(low, median, high, int(count))
    most = 2.0 * image_size
    keys = ("low", "median", "high")
    return {
        name: {**size, **{key: min(size[key], most) for key in keys}}
        for name, size in sizes.items()
    }


def choose_reference(sizes: ClassSizes, before: str | None = None) -> str | None:
    """The class whose size stands for all: the one `before`, or else that of most objects."""
    if before in sizes:
        return before
    return max(sorted(sizes), key=lambda name: sizes[name]["count"], default=None)


def reference_size(info: Mapping[str, Any]) -> float | None:
    """The size of a model's reference class in working pixels; None where none is stored."""
    sizes = info.get("object_sizes") or {}
    name = choose_reference(sizes, info.get("reference_class"))
    return None if name is None else float(sizes[name]["median"])


def largest_size(object_sizes: ClassSizes, otherwise: float) -> float:
    """The size in working pixels below which nearly all objects are."""
    return max((float(s["high"]) for s in object_sizes.values()), default=otherwise)


def weighted_median(values: npt.ArrayLike, weights: npt.ArrayLike) -> float:
    """The least value below or at which half of the weight is."""
    x, w = np.asarray(values, np.float64), np.asarray(weights, np.float64)
    order = np.argsort(x, kind="stable")
    total = np.cumsum(w[order])
    return float(x[order][np.searchsorted(total, total[-1] / 2)])


@dataclass(frozen=True)
class TrainingSizes:
    """What training knew of each class: median size (n,), NaN where unknown, and its share (n,)."""

    medians: npt.NDArray[np.float64]
    shares: npt.NDArray[np.float64]

    @classmethod
    def of(cls, object_sizes: ClassSizes, names: Sequence[str]) -> TrainingSizes:
        """From what a checkpoint stores."""
        sizes = [object_sizes.get(name, {}) for name in names]
        count = np.array([float(s.get("count", 0.0)) for s in sizes])
        shares = count / max(count.sum(), 1.0)
        return cls(np.array([float(s.get("median", math.nan)) for s in sizes]), shares)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """(n,) the root of the share in that of the commonest class; 1 for a class without boxes.

        A field of nothing but platelets is less likely than one of red cells that are shown too
        small; a class of which nothing is known may be as common as any.
        """
        known = self.shares > 0
        most = self.shares.max(where=known, initial=0.0) or 1.0
        return np.where(known, np.sqrt(self.shares / most), 1.0)

    def deviation(
        self, sizes: npt.NDArray[np.float64], labels: npt.NDArray[np.int64], weights: Any = 1.0
    ) -> tuple[float, int]:
        """Weighted median of ln(size / its class's), NaN without any, and of how many boxes."""
        known = np.flatnonzero(np.isfinite(self.medians[labels]) & (sizes > 0))
        if not len(known):
            return math.nan, 0
        x = np.log(sizes[known] / self.medians[labels[known]])
        weight = np.broadcast_to(weights, labels.shape)[known] * self.weights[labels[known]]
        return weighted_median(x, weight), len(known)


def _entry(low: float, median: float, high: float, count: int) -> dict[str, float]:
    low, median, high = (max(round(v, 2), _SMALLEST) for v in (low, median, high))
    return {"median": median, "low": low, "high": high, "count": count}
