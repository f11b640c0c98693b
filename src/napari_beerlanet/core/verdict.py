"""What a threshold shows, judged: true, false, missed, of a wrong class; and in numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Score:
    """Of one class or, as the mean over classes that are annotated, of all.

    `count` annotations, `shown` detections, `true` of both. What has no value is NaN.
    """

    name: str
    count: int
    shown: int
    true: int
    precision: float
    recall: float
    f1: float
    ap50: float
    ap: float


@dataclass(frozen=True, eq=False)
class Verdict:
    """What is what at one threshold and one level of overlap.

    Indices: `true` and `wrong` (k, 2) pairs of detection and annotation, of the same and of
    another class; `false` detections; `missed` annotations, without those in `wrong`. `confusion`
    (c + 1, c + 1) counts [found as, is], its last row what is missed, its last column what is not
    annotated; its diagonal is `true`, cell by cell what the boxes are.
    """

    names: list[str]
    true: Indices
    wrong: Indices
    false: Indices
    missed: Indices
    labels: Indices = field(repr=False)
    true_labels: Indices = field(repr=False)
    scores: list[Score]
    mean: Score

    @cached_property
    def confusion(self) -> Indices:
        """(c + 1, c + 1) int64, see above."""
        size = len(self.names) + 1
        both = np.concatenate([self.true, self.wrong])
        cells = [
            self.labels[both[:, 0]] * size + self.true_labels[both[:, 1]],
            self.labels[self.false] * size + size - 1,
            (size - 1) * size + self.true_labels[self.missed],
        ]
        return np.bincount(np.concatenate(cells), minlength=size * size).reshape(size, size)

    def cell(self, found_as: int, is_: int) -> tuple[Indices, Indices]:
        """The detections and the annotations behind a cell of the confusion matrix."""
        none, background = np.zeros(0, np.int64), len(self.names)
        if found_as == background:
            return none, self.missed[self.true_labels[self.missed] == is_]
        if is_ == background:
            return self.false[self.labels[self.false] == found_as], none
        both = np.concatenate([self.true, self.wrong])
        chosen = (self.labels[both[:, 0]] == found_as) & (self.true_labels[both[:, 1]] == is_)
        return both[chosen, 0], both[chosen, 1]

    def states(self) -> npt.NDArray[np.str_]:
        """(n,) "true", "false", "wrong class", or "" for detections that are not shown."""
        states = np.full(len(self.labels), "", "U11")
        for word, which in (("true", self.true[:, 0]), ("wrong class", self.wrong[:, 0])):
            states[which] = word
        states[self.false] = "false"
        return states

    def true_states(self) -> npt.NDArray[np.str_]:
        """(m,) "found", "missed", "wrong class", or "" for annotations outside the regions."""
        states = np.full(len(self.true_labels), "", "U11")
        for word, which in (("found", self.true[:, 1]), ("wrong class", self.wrong[:, 1])):
            states[which] = word
        states[self.missed] = "missed"
        return states


def mean_score(scores: Sequence[Score]) -> Score:
    """The mean over classes that are annotated; one of which nothing is shown has precision 0."""
    with_truth = [score for score in scores if score.count]

    def mean(what: str) -> float:
        values = [getattr(score, what) for score in with_truth]
        return float(np.nan_to_num(values).mean()) if values else float("nan")

    parts = [mean(what) for what in ("precision", "recall", "f1", "ap50", "ap")]
    totals = [sum(getattr(score, what) for score in scores) for what in ("count", "shown", "true")]
    return Score("all", *totals, *parts)
