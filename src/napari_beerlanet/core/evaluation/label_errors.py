"""Likely label errors: confident detections nobody annotated, and annotations never detected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.matching import max_iou
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.messages import format_percent
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.evaluation.live import MATCH_IOU, LabelledBoxes, LiveEvaluation
from napari_beerlanet.core.evaluation.metrics import Indices, PrecisionRecallCurve

LabelErrorKind = Literal["not annotated", "another class", "another place", "never found"]

MAX_UNDETECTED_SCORE = 0.1
"""Score up to which a candidate does not count as having found something."""
NEARBY_IOU = 0.3
"""Overlap (IoU) from which two boxes are about the same thing, if not quite at the same place."""


@dataclass(frozen=True)
class LabelError:
    """An annotation that is probably wrong, or missing.

    `detection` and `annotation` are indices, -1 for none; `doubt` from 0 to 1 says how sure the
    detector is of the contrary; `message` is for people.
    """

    kind: LabelErrorKind
    detection: int
    annotation: int
    doubt: float
    message: str


@dataclass(frozen=True, eq=False)
class ImageEvaluation:
    """The `live` evaluation of an image, and what of it depends on the `iou` alone.

    `curves` by class name; `best_threshold` is that of the best F1, None if there is nothing;
    `label_errors`, the most doubtful first.
    """

    live: LiveEvaluation
    iou: float
    curves: dict[str, PrecisionRecallCurve]
    best_threshold: float | None
    label_errors: list[LabelError]


def evaluate_image(
    detections: Detections,
    annotations: LabelledBoxes,
    regions: Sequence[Region] = (),
    iou: float = MATCH_IOU,
    max_label_errors: int | None = None,
    report: Report | None = None,
) -> ImageEvaluation:
    """Evaluate the detections of an image against its annotations, all at once."""
    report_progress(report, 0, 4, "matching boxes")
    live = LiveEvaluation.of(detections, annotations, regions)
    report_progress(report, 1, 4, "measuring")
    live.match_at(0.0, iou)  # its average precisions are cached
    report_progress(report, 2, 4, "drawing curves")
    curves = {name: live.curve(name, iou) for name in live.names}
    best = live.best_threshold(iou=iou)
    report_progress(report, 3, 4, "looking for label errors")
    errors = likely_label_errors(live, iou, max_count=max_label_errors)
    return ImageEvaluation(live, iou, curves, best, errors)


def likely_label_errors(
    live: LiveEvaluation,
    iou: float = MATCH_IOU,
    min_doubt: float = 0.5,
    max_count: int | None = None,
) -> list[LabelError]:
    """Likely label errors with at least this doubt, the most doubtful first, at most `max_count`.

    Looked for among all candidates, whatever the confidence threshold.
    """
    matches = live.match_at(0.0, iou)
    recall = {metrics.name: metrics.recall for metrics in matches.per_class if metrics.annotated}
    confident = live.scores >= np.float32(min_doubt)
    wrong_class = matches.wrong_class[confident[matches.wrong_class[:, 0]]]
    false_positives = matches.false_positives[confident[matches.false_positives]]
    errors = [
        *_wrong_class(live, wrong_class),
        *_not_annotated(live, false_positives, matches.missed, iou),
        *_never_detected(live, recall, min_doubt),
    ]
    # What is there and not drawn comes first among equals: it is the most frequent error.
    rank = {"not annotated": 0, "another class": 1, "another place": 2, "never found": 3}
    errors.sort(key=lambda e: (-e.doubt, rank[e.kind], e.detection, e.annotation))
    return errors[:max_count]


def _wrong_class(live: LiveEvaluation, pairs: Indices) -> list[LabelError]:
    """Detected at the right place as something else."""
    errors = []
    for i, j in pairs.tolist():
        name, other = (live.names[k] for k in (live.labels[i], live.true_labels[j]))
        score = float(live.scores[i])
        message = f"Annotated as {other}, detected as {name} with {format_percent(score)}."
        errors.append(LabelError("another class", i, j, score, message))
    return errors


def _not_annotated(
    live: LiveEvaluation, false_positives: Indices, missed: Indices, iou: float
) -> list[LabelError]:
    """Detected where nothing is annotated, or beside it; a duplicate of a detection is no error."""
    nearby = live.overlaps.iou >= min(NEARBY_IOU, iou)
    overlap = max_iou(live.overlaps, nearby)
    is_missed = np.zeros(len(live.true_labels), bool)
    is_missed[missed] = True
    neighbour = _nearest_annotation(live, nearby & is_missed[live.overlaps.truth])
    errors = []
    for i in false_positives.tolist():
        score, name = float(live.scores[i]), live.names[live.labels[i]]
        what = f"{name} with {format_percent(score)}"
        if overlap[i] == 0:
            message = f"{what}, and nothing is annotated there."
            errors.append(LabelError("not annotated", i, -1, score, message))
        elif neighbour[i] >= 0:
            message = f"{what}, and its annotation is at another place."
            errors.append(LabelError("another place", i, int(neighbour[i]), score, message))
    return errors


def _never_detected(
    live: LiveEvaluation, recall: dict[str, float], min_doubt: float
) -> list[LabelError]:
    """Annotated where no candidate of any class comes near with more than a trace of a score.

    The fewer objects of a class the detector finds at all, the less this says.
    """
    best = np.zeros(len(live.true_labels))
    pairs = live.overlaps
    nearby = pairs.iou >= NEARBY_IOU
    np.maximum.at(best, pairs.truth[nearby], live.scores[pairs.detection[nearby]])
    recalls = np.array([recall.get(name, 0.0) for name in live.names])
    doubt = (1 - best) * recalls[live.true_labels]
    undetected = live.true_inside & (best <= MAX_UNDETECTED_SCORE) & (doubt >= min_doubt)
    errors = []
    for j in np.flatnonzero(undetected).tolist():
        name = live.names[live.true_labels[j]]
        seen = f"nothing above {format_percent(best[j])} is" if best[j] else "nothing at all is"
        message = f"Annotated as {name}, and {seen} detected there."
        errors.append(LabelError("never found", -1, j, float(doubt[j]), message))
    return errors


def _nearest_annotation(live: LiveEvaluation, allowed: npt.NDArray[np.bool_]) -> Indices:
    """(n,) the annotation with the largest IoU per detection, of allowed pairs; -1 for none."""
    pairs = live.overlaps
    order = np.flatnonzero(allowed)
    order = order[np.argsort(pairs.iou[order], kind="stable")]
    nearest = np.full(len(live.labels), -1, np.int64)
    nearest[pairs.detection[order]] = pairs.truth[order]  # of equal indices the last stays
    return nearest
