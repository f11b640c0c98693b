"""Detections against annotations, live: true, false, missed and wrong ones at any threshold.

What is shown is matched as Ultralytics and COCO do it: the highest score first, each takes the
free annotation of its class that it shares most with. What is left of both is then matched
whatever the class: those are found, but as something else. Average precisions are about all
candidates, whatever the threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from .averages import Curve, best_threshold, coco_ap, ultralytics_ap
from .boxes import Detections
from .matching import Pairs, assign, joined, pairs_of
from .regions import MOST_INSIDE, Region, Window, share_inside, union
from .verdict import Score, Verdict, mean_score

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Threshold = float | Mapping[str, float]

LEVELS = np.linspace(0.5, 0.95, 10)
"""Intersections over union over which mAP50-95 is the mean."""


class Truth(Protocol):
    """Annotated boxes: `xyxy` (m, 4), `labels` (m,) into `names`. Annotations, Detections."""

    @property
    def xyxy(self) -> npt.NDArray[Any]: ...
    @property
    def labels(self) -> Indices: ...
    @property
    def names(self) -> list[str]: ...


class Quality:
    """Detections of one image (or several) and its annotations, to be looked at from all sides.

    Indices into detections mean all candidates, `found`, the highest score first; of several
    images one after another. Annotations keep their order.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Detections, Truth]],
        inside: Sequence[tuple[Mask, Mask]] | None = None,
    ) -> None:
        self.found = [found.candidates or found for found, _ in pairs]
        self.truths = [truth for _, truth in pairs]
        self.names, labels = numbered([*self.found, *self.truths])
        self.labels = _joined(labels[: len(pairs)], np.int64)
        self.true_labels = _joined(labels[len(pairs) :], np.int64)
        self.scores = _joined([f.scores for f in self.found], np.float32)
        self.overlaps: Pairs = joined(
            [pairs_of(f.xyxy, t.xyxy) for f, t in zip(self.found, self.truths, strict=True)]
        )
        self.inside = np.ones(len(self.labels), bool)
        self.true_inside = np.ones(len(self.true_labels), bool)
        if inside is not None:
            self.inside = _joined([mine for mine, _ in inside], bool)
            self.true_inside = _joined([theirs for _, theirs in inside], bool)
        self._order = np.argsort(-self.scores, kind="stable")
        self._hits: dict[float, tuple[Indices, Mask]] = {}

    @classmethod
    def of(
        cls, detections: Detections, truth: Truth, regions: Sequence[Region] | Mask = ()
    ) -> Quality:
        """Of one image; with regions (or a mask (H, W)) only what is in them counts.

        That is what has at least half of its area in one; a detection at the border that matches
        an annotation outside counts neither for nor against.
        """
        found = detections.candidates or detections
        if isinstance(regions, np.ndarray) or len(regions):
            marks = (_inside(found.xyxy, regions), _inside(truth.xyxy, regions))
            return cls([(detections, truth)], [marks])
        return cls([(detections, truth)])

    def shown(self, confidence: Threshold) -> Mask:
        """(n,) which detections a threshold, or one for each class by name, lets through."""
        if isinstance(confidence, Mapping):
            least = np.array([confidence.get(name, np.inf) for name in self.names], np.float32)
            return np.asarray(self.scores >= np.append(least, np.float32(0))[self.labels])
        return np.asarray(self.scores >= np.float32(confidence))

    def at(self, confidence: Threshold = 0.25, level: float = 0.5) -> Verdict:
        """Match everything anew with what a threshold shows; `level` is the least overlap."""
        shown = self.shown(confidence)
        turns = self._order[shown[self._order]]
        taken = assign(self.overlaps, turns, level, self.labels, self.true_labels)
        free = np.ones(len(self.true_labels), bool)
        free[taken[taken >= 0]] = False
        rest = turns[taken[turns] < 0]
        other = assign(self.overlaps, rest, level, free=free)
        both = np.where(taken >= 0, taken, other)
        true, wrong = (self._counted_pairs(which) for which in (taken, other))
        false = np.sort(turns[(both[turns] < 0) & self.inside[turns]])
        free[other[other >= 0]] = False
        missed = np.flatnonzero(free & self.true_inside)
        scores = self._scores(true, wrong, false)
        return Verdict(
            self.names, true, wrong, false, missed, self.labels, self.true_labels,
            scores, mean_score(scores),
        )  # fmt: skip

    def average_precisions(
        self, kind: Literal["ultralytics", "coco"] = "ultralytics"
    ) -> npt.NDArray[np.float64]:
        """(c, 10) of each class at each of `LEVELS`, over all candidates; NaN if not annotated."""
        average = {"ultralytics": ultralytics_ap, "coco": coco_ap}[kind]
        table = np.full((len(self.names), len(LEVELS)), np.nan)
        for column, level in enumerate(LEVELS):
            for label in self._annotated:
                _, hits = self._of_class(label, float(level))
                table[label, column] = average(hits, int(self._counts[label]))
        return table

    def curve(self, name: str | None = None, level: float = 0.5) -> Curve:
        """Precision and recall of a class, or of all boxes together."""
        label = None if name is None else self.names.index(name)
        which, hits = self._of_class(label, level)
        count = self._counts.sum() if label is None else self._counts[label]
        return Curve.of(self.scores[which], hits, int(count))

    def best_threshold(self, name: str | None = None, level: float = 0.5) -> float | None:
        """Where the F1 of a class, or the mean over the annotated classes, is highest."""
        names = [self.names[k] for k in self._annotated] if name is None else [name]
        return best_threshold([self.curve(one, level) for one in names])

    @cached_property
    def _counts(self) -> Indices:
        return np.bincount(self.true_labels[self.true_inside], minlength=len(self.names))

    @property
    def _annotated(self) -> list[int]:
        return [int(label) for label in np.flatnonzero(self._counts)]

    @cached_property
    def _averages(self) -> npt.NDArray[np.float64]:
        return self.average_precisions()

    def _of_class(self, label: int | None, level: float) -> tuple[Indices, Mask]:
        """Candidates of a class (of all: None) that count, by falling score, and their hits."""
        if level not in self._hits:
            taken = assign(self.overlaps, self._order, level, self.labels, self.true_labels)
            hits = taken >= 0
            counts = np.where(hits, np.append(self.true_inside, False)[taken], self.inside)
            which = self._order[counts[self._order]]
            self._hits[level] = which, hits[which]
        which, hits = self._hits[level]
        mine = slice(None) if label is None else self.labels[which] == label
        return which[mine], hits[mine]

    def _counted_pairs(self, taken: Indices) -> Indices:
        """(k, 2) detection and annotation, where the annotation is in the regions."""
        which = np.flatnonzero(taken >= 0)
        which = which[self.true_inside[taken[which]]]
        return np.column_stack([which, taken[which]])

    def _scores(self, true: Indices, wrong: Indices, false: Indices) -> list[Score]:
        size = len(self.names)
        right = np.bincount(self.labels[true[:, 0]], minlength=size)
        others = np.concatenate([wrong[:, 0], false])
        shown = right + np.bincount(self.labels[others], minlength=size)
        rows = []
        for label, name in enumerate(self.names):
            count, hits, seen = int(self._counts[label]), int(right[label]), int(shown[label])
            parts = (_share(hits, seen), _share(hits, count), _share(2 * hits, seen + count))
            levels = self._averages[label]
            rows.append(
                Score(name, count, seen, hits, *parts, float(levels[0]), float(levels.mean()))
            )
        return rows


def numbered(parts: Sequence[Detections | Truth]) -> tuple[list[str], list[Indices]]:
    """All class names, and the labels (n,) of each part as places in them.

    A name that only differs in capitals from one of an earlier part means the same.
    """
    names: list[str] = []
    labels = []
    for part in parts:
        alike = {name.casefold(): name for name in names if name not in part.names}
        mine = [n if n in names else alike.get(n.casefold(), n) for n in part.names]
        names += [name for name in dict.fromkeys(mine) if name not in names]
        place = np.array([names.index(name) for name in mine], np.int64)
        labels.append(place[np.asarray(part.labels, np.int64)])
    return names, labels


def _inside(xyxy: npt.NDArray[Any], regions: Sequence[Region] | Mask) -> Mask:
    if isinstance(regions, np.ndarray):
        height, width = regions.shape
        covered, window = np.asarray(regions, bool), Window(0, 0, width, height)
    else:
        corners = np.array([region.bounds for region in regions])
        x, y = np.floor(corners[:, :2].min(axis=0)).astype(int)
        right, bottom = np.ceil(corners[:, 2:].max(axis=0)).astype(int)
        window = Window(int(x), int(y), int(right - x), int(bottom - y))
        covered = union(regions, window)
    return np.asarray(share_inside(xyxy, covered, window) >= MOST_INSIDE)


def _share(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _joined(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])
