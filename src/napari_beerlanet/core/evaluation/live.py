"""Live evaluation of detections against annotations at any confidence threshold.

Matching is Ultralytics' and COCO's: the highest score first, each takes the free annotation of its
class with the largest IoU. What is left of both is then matched whatever the class (wrong class).
The confusion matrix is Ultralytics', too, and matches boxes whatever their class from the start.
Average precision is over all candidates, whatever the threshold.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.matching import (
    OverlapPairs,
    concatenate_pairs,
    match_greedy,
    overlap_pairs,
)
from napari_beerlanet.core.boxes.regions import (
    MIN_FRACTION_INSIDE,
    Region,
    fraction_inside,
    union_mask,
)
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.evaluation.metrics import (
    IOU_THRESHOLDS,
    ClassMetrics,
    Confusion,
    MatchResult,
    PrecisionRecallCurve,
    best_threshold,
    coco_ap,
    mean_metrics,
    ultralytics_ap,
)

Indices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Threshold = float | Mapping[str, float]

MATCH_IOU = 0.5
"""Intersection over union from which a detection is an annotated object, unless said otherwise."""

_DEFAULTS = DetectSettings()
_NUMBERED_CLASS = re.compile(r"(?:class[ _-]?)?([0-9]{1,4})", re.IGNORECASE)


class LabelledBoxes(Protocol):
    """Annotated boxes: `xyxy` (m, 4), `labels` (m,) into `names`. Annotations, Detections."""

    @property
    def xyxy(self) -> npt.NDArray[Any]: ...
    @property
    def labels(self) -> Indices: ...
    @property
    def names(self) -> list[str]: ...


class LiveEvaluation:
    """Detections and annotations of one image or many, matched at any confidence and IoU.

    Indices into detections mean all candidates, the highest score first; of several
    images one after another. Annotations keep their order. `names` are classes that come first,
    whether they occur or not.
    """

    def __init__(
        self,
        pairs: Sequence[tuple[Detections, LabelledBoxes]],
        inside: Sequence[tuple[Mask, Mask]] | None = None,
        names: Sequence[str] = (),
    ) -> None:
        self.detections = [detections.candidates or detections for detections, _ in pairs]
        self.annotations = [annotations for _, annotations in pairs]
        self.names, labels = unify_classes([*self.detections, *self.annotations], names)
        self.labels = _concatenate(labels[: len(pairs)], np.int64)
        self.true_labels = _concatenate(labels[len(pairs) :], np.int64)
        self.scores = _concatenate([d.scores for d in self.detections], np.float32)
        self.overlaps: OverlapPairs = concatenate_pairs(
            [
                overlap_pairs(d.xyxy, a.xyxy)
                for d, a in zip(self.detections, self.annotations, strict=True)
            ]
        )
        self.inside = np.ones(len(self.labels), bool)
        self.true_inside = np.ones(len(self.true_labels), bool)
        if inside is not None:
            self.inside = _concatenate([mine for mine, _ in inside], bool)
            self.true_inside = _concatenate([theirs for _, theirs in inside], bool)
        self._order = np.argsort(-self.scores, kind="stable")
        self._hits: dict[float, tuple[Indices, Mask]] = {}

    @classmethod
    def of(
        cls,
        detections: Detections,
        annotations: LabelledBoxes,
        regions: Sequence[Region] | Mask = (),
    ) -> LiveEvaluation:
        """Of one image; with regions (or a mask (H, W)) only what is in them counts.

        That is what has at least half of its area in one; a detection at the border that matches
        an annotation outside counts neither for nor against.
        """
        pair = (detections, annotations)
        if isinstance(regions, np.ndarray) or len(regions):
            candidates = detections.candidates or detections
            inside = [_inside_regions(part.xyxy, regions) for part in (candidates, annotations)]
            return cls([pair], [(inside[0], inside[1])])
        return cls([pair])

    def above_threshold(self, confidence: Threshold) -> Mask:
        """(n,) which detections pass a threshold, or one for each class by name."""
        if isinstance(confidence, Mapping):
            limits = np.array([confidence.get(name, np.inf) for name in self.names], np.float32)
            return np.asarray(self.scores >= np.append(limits, np.float32(0))[self.labels])
        return np.asarray(self.scores >= np.float32(confidence))

    def match_at(
        self, confidence: Threshold = _DEFAULTS.confidence, iou: float = MATCH_IOU
    ) -> MatchResult:
        """Match the detections that pass a threshold with the annotations anew."""
        order = self._in_order(confidence)
        matched = match_greedy(self.overlaps, order, iou, self.labels, self.true_labels)
        free = np.ones(len(self.true_labels), bool)
        free[matched[matched >= 0]] = False
        rest = order[matched[order] < 0]
        other_class = match_greedy(self.overlaps, rest, iou, free=free)
        free[other_class[other_class >= 0]] = False
        either = np.where(matched >= 0, matched, other_class)
        return self._result(
            true_positives=self._counted_pairs(matched),
            wrong_class=self._counted_pairs(other_class),
            false_positives=np.sort(order[(either[order] < 0) & self.inside[order]]),
            missed=np.flatnonzero(free & self.true_inside),
            confusion=self._confusion(order, iou),
        )

    def _confusion(self, order: Indices, iou: float) -> Confusion:
        """Of the detections in `order`."""
        matched = match_greedy(self.overlaps, order, iou)
        return Confusion(
            len(self.names),
            self.labels,
            self.true_labels,
            pairs=self._counted_pairs(matched),
            false_positives=np.sort(order[(matched[order] < 0) & self.inside[order]]),
            missed=np.setdiff1d(np.flatnonzero(self.true_inside), matched),
        )

    def average_precisions(
        self, kind: Literal["ultralytics", "coco"] = "ultralytics"
    ) -> npt.NDArray[np.float64]:
        """(c, 10) per class and IoU threshold, over all candidates; NaN if not annotated."""
        average = {"ultralytics": ultralytics_ap, "coco": coco_ap}[kind]
        table = np.full((len(self.names), len(IOU_THRESHOLDS)), np.nan)
        for column, iou in enumerate(IOU_THRESHOLDS):
            for label in self._annotated:
                _, hits = self._of_class(label, float(iou))
                table[label, column] = average(hits, int(self._counts[label]))
        return table

    def curve(self, name: str | None = None, iou: float = MATCH_IOU) -> PrecisionRecallCurve:
        """Precision and recall of a class, or of all boxes together."""
        label = None if name is None else self.names.index(name)
        which, hits = self._of_class(label, iou)
        count = self._counts.sum() if label is None else self._counts[label]
        return PrecisionRecallCurve(self.scores[which], hits, int(count))

    @property
    def counts(self) -> dict[str, int]:
        """Annotations of each class."""
        return dict(zip(self.names, self._counts.tolist(), strict=True))

    def best_threshold(self, name: str | None = None, iou: float = MATCH_IOU) -> float | None:
        """Where the F1 of a class, or the mean over the annotated classes, is highest."""
        names = [self.names[k] for k in self._annotated] if name is None else [name]
        return best_threshold([self.curve(one, iou) for one in names])

    @cached_property
    def _counts(self) -> Indices:
        return np.bincount(self.true_labels[self.true_inside], minlength=len(self.names))

    @property
    def _annotated(self) -> list[int]:
        return [int(label) for label in np.flatnonzero(self._counts)]

    @cached_property
    def _averages(self) -> npt.NDArray[np.float64]:
        return self.average_precisions()

    def _in_order(self, confidence: Threshold) -> Indices:
        """Detections that pass a threshold, by falling score."""
        return self._order[self.above_threshold(confidence)[self._order]]

    def _of_class(self, label: int | None, iou: float) -> tuple[Indices, Mask]:
        """Candidates of a class (of all: None) that count, by falling score, and their hits."""
        if iou not in self._hits:
            matched = match_greedy(self.overlaps, self._order, iou, self.labels, self.true_labels)
            hits = matched >= 0
            counts = np.where(hits, np.append(self.true_inside, False)[matched], self.inside)
            counted = self._order[counts[self._order]]
            self._hits[iou] = counted, hits[counted]
        counted, hits = self._hits[iou]
        mine = slice(None) if label is None else self.labels[counted] == label
        return counted[mine], hits[mine]

    def _counted_pairs(self, matched: Indices) -> Indices:
        """(k, 2) detection and annotation, where the annotation is in the regions."""
        which = np.flatnonzero(matched >= 0)
        which = which[self.true_inside[matched[which]]]
        return np.column_stack([which, matched[which]])

    def _result(
        self,
        true_positives: Indices,
        wrong_class: Indices,
        false_positives: Indices,
        missed: Indices,
        confusion: Confusion,
    ) -> MatchResult:
        size = len(self.names)
        right = np.bincount(self.labels[true_positives[:, 0]], minlength=size)
        others = np.concatenate([wrong_class[:, 0], false_positives])
        detected = right + np.bincount(self.labels[others], minlength=size)
        per_class = []
        for label, name in enumerate(self.names):
            count, hits, seen = int(self._counts[label]), int(right[label]), int(detected[label])
            fractions = (
                _fraction(hits, seen),
                _fraction(hits, count),
                _fraction(2 * hits, seen + count),
            )
            precisions = self._averages[label]
            averages = float(precisions[0]), float(precisions.mean())
            per_class.append(ClassMetrics(name, count, seen, hits, *fractions, *averages))
        return MatchResult(
            self.names,
            true_positives,
            wrong_class,
            false_positives,
            missed,
            confusion,
            per_class,
            mean_metrics(per_class),
        )


def unify_classes(
    parts: Sequence[Detections | LabelledBoxes], first: Sequence[str] = ()
) -> tuple[list[str], list[Indices]]:
    """All class names, those of `first` before others, and each part's labels as places in them.

    A name that only differs in capitals from one of an earlier part means the same.
    """
    names = list(first)
    labels = []
    for part in parts:
        known, own = set(names), set(part.names)
        alike = {name.casefold(): name for name in names if name not in own}
        mine = [n if n in known else alike.get(n.casefold(), n) for n in part.names]
        names += [name for name in dict.fromkeys(mine) if name not in known]
        places = {name: k for k, name in enumerate(names)}
        place = np.array([places[name] for name in mine], np.int64)
        labels.append(place[np.asarray(part.labels, np.int64)])
    return names, labels


def classes_by_order(names: Sequence[str], model_names: Sequence[str]) -> dict[str, str]:
    """What classes are that only have a number ("0", "class 1"), by the order of the model's.

    {} unless every one of `names` is a number, as one name shows that numbers mean something else.
    """
    numbers = {name: _NUMBERED_CLASS.fullmatch(name.strip()) for name in names}
    if not all(numbers.values()) or {*names} & {*model_names}:
        return {}
    places = {name: int(match[1]) for name, match in numbers.items() if match}
    return {name: model_names[k] for name, k in places.items() if k < len(model_names)}


def unknown_classes(names: Sequence[str], model_names: Sequence[str]) -> list[str]:
    """Those that the model does not have, in any spelling."""
    known = {name.casefold() for name in model_names}
    return [name for name in names if name.casefold() not in known]


def with_classes_renamed(annotations: Annotations, mapping: Mapping[str, str]) -> Annotations:
    """With other names of classes, by their names; those that become the same are one class."""
    renamed = [mapping.get(name, name) for name in annotations.names]
    names = list(dict.fromkeys(renamed))
    places = {name: k for k, name in enumerate(names)}
    place = np.array([places[name] for name in renamed], np.int64)
    return replace(annotations, labels=place[annotations.labels], names=names)


def contradicted_classes(matches: MatchResult) -> dict[str, str]:
    """Annotated classes most of whose matched boxes lie on detections of one other class."""
    confusion = matches.confusion.matrix[:-1, :-1]
    found = {}
    for label in np.flatnonzero(confusion.sum(axis=0)).tolist():
        column = confusion[:, label]
        other = int(column.argmax())
        if other != label and 2 * column[other] > column.sum():
            found[matches.names[label]] = matches.names[other]
    return found


def _inside_regions(xyxy: npt.NDArray[Any], regions: Sequence[Region] | Mask) -> Mask:
    if isinstance(regions, np.ndarray):
        height, width = regions.shape
        covered, window = np.asarray(regions, bool), Rectangle(0, 0, width, height)
    else:
        corners = np.array([region.bounds for region in regions])
        x, y = np.floor(corners[:, :2].min(axis=0)).astype(int)
        right, bottom = np.ceil(corners[:, 2:].max(axis=0)).astype(int)
        window = Rectangle(int(x), int(y), int(right - x), int(bottom - y))
        covered = union_mask(regions, window)
    return np.asarray(fraction_inside(xyxy, covered, window) >= MIN_FRACTION_INSIDE)


def _fraction(part: int, whole: int) -> float:
    return part / whole if whole else float("nan")


def _concatenate(parts: Sequence[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])
