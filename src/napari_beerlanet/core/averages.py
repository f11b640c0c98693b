"""Precision over recall, its average, and the threshold of the best F1, from hits in order.

Both usual averages are here, as papers and programs differ in them by some thousandths:
`ultralytics_ap` (what we print, as training does) goes along the curve from point to point,
`coco_ap` (pycocotools) takes the best precision at each of 101 recalls.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]
Hits = npt.NDArray[np.bool_]

_RECALLS = np.linspace(0, 1, 101)


def ultralytics_ap(hits: Hits, count: int) -> float:
    """Average precision as Ultralytics has it; `hits` (n,) by falling score, of `count` objects."""
    if not len(hits) or not count:
        return 0.0
    right = np.cumsum(hits)
    recall, precision = right / count, right / np.arange(1, len(hits) + 1)
    at = np.concatenate([[0.0], recall, [recall[-1], 1.0]])
    upper = np.maximum.accumulate(np.concatenate([[1.0], precision, [0.0, 0.0]])[::-1])[::-1]
    return float(np.trapezoid(np.interp(_RECALLS, at, upper), _RECALLS))


def coco_ap(hits: Hits, count: int) -> float:
    """Average precision as COCO's own program has it, see `ultralytics_ap`."""
    if not len(hits) or not count:
        return 0.0
    right = np.cumsum(hits)
    recall, precision = right / count, right / np.arange(1, len(hits) + 1)
    upper = np.append(np.maximum.accumulate(precision[::-1])[::-1], 0.0)
    return float(upper[np.searchsorted(recall, _RECALLS, "left")].mean())


@dataclass(frozen=True, eq=False)
class Curve:
    """Exact precision, recall and F1 (k,) at each score that occurs, the highest first.

    Each is what one gets with that score as the threshold.
    """

    confidence: Values
    precision: Values
    recall: Values
    f1: Values

    @classmethod
    def of(cls, scores: npt.NDArray[np.float32], hits: Hits, count: int) -> Curve:
        """From scores and hits (n,), the highest score first, and the number of objects."""
        last = np.append(scores[1:] != scores[:-1], True) if len(scores) else np.zeros(0, bool)
        right, shown = np.cumsum(hits)[last], np.flatnonzero(last) + 1
        recall = right / count if count else np.zeros(len(right))
        f1 = 2 * right / np.maximum(shown + count, 1)
        return cls(scores[last].astype(np.float64), right / np.maximum(shown, 1), recall, f1)

    def f1_at(self, thresholds: Values) -> Values:
        """(k,) F1 at thresholds; 0 where nothing is shown."""
        shown = np.searchsorted(-self.confidence, -np.asarray(thresholds), "right")
        return np.append(0.0, self.f1)[shown]

    def point(self, threshold: float) -> tuple[float, float]:
        """Recall and precision at a threshold: (0, 1) where nothing is shown."""
        shown = int(np.searchsorted(-self.confidence, -threshold, "right"))
        return (
            (float(self.recall[shown - 1]), float(self.precision[shown - 1])) if shown else (0, 1)
        )


def best_threshold(curves: Sequence[Curve]) -> float | None:
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
