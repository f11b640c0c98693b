"""Average precision, precision-recall curves, best F1 threshold, confusion matrix.

Both usual average precisions are here, as papers and programs differ in them by some thousandths:
`ultralytics_ap` (what we print, as training does) goes along the curve from point to point,
`coco_ap` (pycocotools) takes the best precision at each of 101 recalls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]
Values = npt.NDArray[np.float64]
Hits = npt.NDArray[np.bool_]

IOU_THRESHOLDS = np.linspace(0.5, 0.95, 10)
"""Intersections over union over which mAP50-95 is the mean."""

_RECALL_LEVELS = np.linspace(0, 1, 101)
_CURVE_POINTS = np.linspace(0, 1, 1000)


def ultralytics_ap(hits: Hits, count: int) -> float:
    """Average precision as Ultralytics has it; `hits` (n,) by falling score, of `count` objects."""
    if not len(hits) or not count:
        return 0.0
    recall, precision = _recall_and_precision(hits, count)
    envelope = _interpolated_envelope(recall, precision, _RECALL_LEVELS)
    return float(np.trapezoid(envelope, _RECALL_LEVELS))


def coco_ap(hits: Hits, count: int) -> float:
    """Average precision as COCO's own program has it, see `ultralytics_ap`."""
    if not len(hits) or not count:
        return 0.0
    recall, precision = _recall_and_precision(hits, count)
    upper = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(upper[np.searchsorted(recall, _RECALL_LEVELS, "left")].mean())


def _recall_and_precision(hits: Hits, count: int) -> tuple[Values, Values]:
    """(n,) each, of the first detection, the first two, …"""
    right = np.cumsum(hits)
    return right / count, right / np.arange(1, len(hits) + 1)


def _interpolated_envelope(recall: Values, precision: Values, at: Values) -> Values:
    """(k,) the best precision from each recall of `at` on, as Ultralytics interpolates it."""
    sides = np.concatenate([[0.0], recall, [recall[-1], 1.0]])
    upper = np.maximum.accumulate(np.concatenate([[1.0], precision, [0.0, 0.0]])[::-1])[::-1]
    return np.asarray(np.interp(at, sides, upper))


def plateau_centre(curve: Values) -> int:
    """The index of the maximum; where the curve is flat there, the middle of that part."""
    first = int(np.argmax(curve))
    below = np.flatnonzero(curve[first:] < curve[first] - 1e-9)
    length = int(below[0]) if len(below) else len(curve) - first
    return first + (length - 1) // 2


@dataclass(frozen=True, eq=False)
class PrecisionRecallCurve:
    """How precision and recall of a class depend on the threshold.

    Of detections with `scores` (n,), the highest first, those in `hits` (n,) are one of `count`
    objects. `confidence` (k,) are the scores that occur, each once; `precision`, `recall` and `f1`
    (k,) are what one gets with that score as the threshold.
    """

    scores: npt.NDArray[np.float32] = field(repr=False)
    hits: Hits = field(repr=False)
    count: int

    @cached_property
    def _last(self) -> Indices:
        """(k,) the last detection of each score."""
        return np.flatnonzero(np.append(self.scores[1:] != self.scores[:-1], len(self.scores) > 0))

    @cached_property
    def _right(self) -> Indices:
        """(k,) how many of the detections up to each score are objects."""
        return np.cumsum(self.hits, dtype=np.int64)[self._last]

    @cached_property
    def confidence(self) -> Values:
        """The scores that occur, the highest first."""
        return self.scores[self._last].astype(np.float64)

    @cached_property
    def precision(self) -> Values:
        """At each confidence."""
        return self._right / (self._last + 1)

    @cached_property
    def recall(self) -> Values:
        """At each confidence."""
        return self._right / max(self.count, 1)

    @cached_property
    def f1(self) -> Values:
        """At each confidence."""
        return 2 * self._right / (self._last + 1 + self.count)

    def sampled(self) -> dict[str, Values]:
        """(1000,) each, as Ultralytics draws it: at recalls and at confidences from 0 to 1.

        "precision" over "recall"; "precision_at", "recall_at" and "F1_at" over "confidence",
        interpolated between scores.
        """
        x = _CURVE_POINTS
        over_recall = precision_at = recall_at = np.zeros(len(x))
        if len(self.hits) and self.count:
            recall, precision = _recall_and_precision(self.hits, self.count)
            over_recall = _interpolated_envelope(recall, precision, x)
            precision_at = np.interp(-x, -self.scores, precision, left=1)
            recall_at = np.interp(-x, -self.scores, recall, left=0)
        f1_at = 2 * precision_at * recall_at / (precision_at + recall_at + 1e-16)
        return {
            "recall": x,
            "precision": over_recall,
            "confidence": x,
            "precision_at": precision_at,
            "recall_at": recall_at,
            "F1_at": f1_at,
        }

    def f1_at(self, thresholds: Values) -> Values:
        """(k,) F1 at thresholds; 0 where nothing is shown."""
        shown = np.searchsorted(-self.confidence, -np.asarray(thresholds), "right")
        return np.append(0.0, self.f1)[shown]

    def point_at(self, threshold: float) -> tuple[float, float]:
        """Recall and precision at a threshold: (0, 1) where nothing is shown."""
        shown = int(np.searchsorted(-self.confidence, -threshold, "right"))
        return (
            (float(self.recall[shown - 1]), float(self.precision[shown - 1])) if shown else (0, 1)
        )


def best_threshold(curves: Sequence[PrecisionRecallCurve]) -> float | None:
    """The threshold at which the mean F1 of the curves is highest; None if there is nothing.

    Of all thresholds that show the same, the one amid them.
    """
    scores = np.unique(np.concatenate([np.zeros(0), *(c.confidence for c in curves)]))
    if not len(scores):
        return None
    mean = np.mean([curve.f1_at(scores) for curve in curves], axis=0)
    best = int(np.flatnonzero(mean >= mean.max() - 1e-12)[-1])
    below = scores[best - 1] if best else 0.0
    return float((scores[best] + below) / 2)


@dataclass(frozen=True)
class ClassMetrics:
    """Of one class or, as the mean over classes that are annotated, of all.

    `annotated` boxes, `detected` ones, and `true_positives` of both. What has no value is NaN.
    """

    name: str
    annotated: int
    detected: int
    true_positives: int
    precision: float
    recall: float
    f1: float
    ap50: float
    ap: float


@dataclass(frozen=True, eq=False)
class Confusion:
    """What annotations were detected as, as Ultralytics counts it.

    The class plays no part in the matching: the highest score first, each detection takes the free
    annotation with the largest IoU. `pairs` (k, 2) are indices of detection and annotation;
    `labels` and `true_labels` are those of all detections and annotations, of `classes` classes.
    """

    classes: int
    labels: Indices = field(repr=False)
    true_labels: Indices = field(repr=False)
    pairs: Indices
    false_positives: Indices
    missed: Indices

    @cached_property
    def matrix(self) -> Indices:
        """(c + 1, c + 1) counts [detected as, annotated as].

        The last row is what is missed, the last column what is not annotated.
        """
        size = self.classes + 1
        cells = [
            self.labels[self.pairs[:, 0]] * size + self.true_labels[self.pairs[:, 1]],
            self.labels[self.false_positives] * size + self.classes,
            self.classes * size + self.true_labels[self.missed],
        ]
        return np.bincount(np.concatenate(cells), minlength=size * size).reshape(size, size)

    def cell(self, detected_as: int, annotated_as: int) -> tuple[Indices, Indices]:
        """The detections and the annotations behind a cell of the matrix."""
        none = np.zeros(0, np.int64)
        if detected_as == self.classes:
            return none, self.missed[self.true_labels[self.missed] == annotated_as]
        if annotated_as == self.classes:
            return self.false_positives[self.labels[self.false_positives] == detected_as], none
        found, true = self.pairs.T
        here = (self.labels[found] == detected_as) & (self.true_labels[true] == annotated_as)
        return found[here], true[here]


@dataclass(frozen=True, eq=False)
class MatchResult:
    """Detections matched with annotations, at one confidence and one IoU threshold.

    Indices: `true_positives` and `wrong_class` (k, 2) pairs of detection and annotation;
    `false_positives` detections; `missed` annotations, without those in `wrong_class`. Boxes of one
    class are matched first; for the `confusion` they are matched anew, whatever their class.
    """

    names: list[str]
    true_positives: Indices
    wrong_class: Indices
    false_positives: Indices
    missed: Indices
    confusion: Confusion
    per_class: list[ClassMetrics]
    mean: ClassMetrics

    @property
    def all_boxes(self) -> ClassMetrics:
        """Of all boxes together, also those of classes that are not annotated.

        Precision, recall and F1 count boxes; average precisions are means over annotated classes.
        """
        mean = self.mean
        right, detected, annotated = mean.true_positives, mean.detected, mean.annotated
        return replace(
            mean,
            precision=right / detected if detected else float("nan"),
            recall=right / annotated if annotated else float("nan"),
            f1=2 * right / (detected + annotated) if detected + annotated else float("nan"),
        )


def mean_metrics(per_class: Sequence[ClassMetrics]) -> ClassMetrics:
    """The mean over annotated classes; the precision of one without detections counts as 0."""
    annotated = [metrics for metrics in per_class if metrics.annotated]

    def mean(what: str) -> float:
        values = [getattr(metrics, what) for metrics in annotated]
        return float(np.nan_to_num(values).mean()) if values else float("nan")

    def total(what: str) -> int:
        return sum(getattr(metrics, what) for metrics in per_class)

    return ClassMetrics(
        "all",
        *(total(what) for what in ("annotated", "detected", "true_positives")),
        *(mean(what) for what in ("precision", "recall", "f1", "ap50", "ap")),
    )
