"""Difference of two results on one image, before and after: gained, lost, relabelled, rescored."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.matching import match_greedy, overlap_pairs
from napari_beerlanet.core.common.messages import count_of

Indices = npt.NDArray[np.int64]
IndexPairs = npt.NDArray[np.int64]

SAME_OBJECT_IOU = 0.5
"""Intersection over union from which two boxes are one object."""
MIN_SCORE_CHANGE = 0.1
"""Difference of scores that counts as a change."""


@dataclass(frozen=True, eq=False)
class DetectionDiff:
    """Indices into `before` and `after`.

    `gained` (g,) into after, `lost` (l,) into before; `relabelled`, `rescored` and `unchanged`
    (k, 2) pairs of both: of another class, of the same class and another score, and the rest.
    """

    before: Detections
    after: Detections
    gained: Indices
    lost: Indices
    relabelled: IndexPairs
    rescored: IndexPairs
    unchanged: IndexPairs

    @property
    def changed(self) -> bool:
        """Whether there is any difference to report."""
        return any(len(part) for part in (self.gained, self.lost, self.relabelled, self.rescored))

    def summary(self) -> str:
        """For people: "4 boxes gained, 1 lost, 2 of another class, 3 of another confidence …"."""
        if not self.changed:
            return (
                f"Nothing has changed: {count_of(len(self.unchanged), 'box', 'boxes')} as before."
            )
        parts = [
            f"{count_of(len(self.gained), 'box', 'boxes')} gained",
            f"{len(self.lost)} lost",
            f"{len(self.relabelled)} of another class",
            f"{len(self.rescored)} of another confidence",
            f"{len(self.unchanged)} as before",
        ]
        return ", ".join(parts) + "."


def describe_against(diff: DetectionDiff, annotations: Annotations) -> str:
    """Of the boxes gained and lost, how many are annotated: right, or right before.

    Empty where none was gained or lost.
    """
    names = list(dict.fromkeys([*diff.before.names, *diff.after.names, *annotations.names]))
    truth = _common_labels(annotations, names)

    def right(detections: Detections, which: Indices) -> int:
        pairs = overlap_pairs(detections.xyxy, annotations.xyxy.astype(np.float32))
        order, labels = np.arange(len(detections)), _common_labels(detections, names)
        return int((match_greedy(pairs, order, SAME_OBJECT_IOU, labels, truth)[which] >= 0).sum())

    gained, lost = right(diff.after, diff.gained), right(diff.before, diff.lost)
    parts = []
    if len(diff.gained):
        parts.append(
            f"{gained} of {len(diff.gained)} gained {'is' if gained == 1 else 'are'} right"
        )
    if len(diff.lost):
        parts.append(f"{lost} of {len(diff.lost)} lost {'was' if lost == 1 else 'were'} right")
    return f"Against the annotations: {', '.join(parts)}." if parts else ""


def diff_detections(
    before: Detections,
    after: Detections,
    iou: float = SAME_OBJECT_IOU,
    min_score_change: float = MIN_SCORE_CHANGE,
) -> DetectionDiff:
    """Compare the detections themselves, not their candidates; classes go by name.

    Boxes of one class are paired first, the largest scores before others, and then what is left
    of both whatever its class.
    """
    names = list(dict.fromkeys([*before.names, *after.names]))
    old, new = _common_labels(before, names), _common_labels(after, names)
    pairs = overlap_pairs(after.xyxy, before.xyxy)
    partner = match_greedy(pairs, np.arange(len(after)), iou, new, old)
    free = np.ones(len(before), bool)
    free[partner[partner >= 0]] = False
    alone, rest = np.flatnonzero(partner < 0), np.flatnonzero(free)
    other_class = match_greedy(pairs, alone, iou, free=free)[alone]
    matched = other_class >= 0
    relabelled = np.column_stack([other_class[matched], alone[matched]])
    same = np.flatnonzero(partner >= 0)
    both = np.column_stack([partner[same], same])
    step = np.abs(after.scores[both[:, 1]] - before.scores[both[:, 0]])
    rescored = step >= np.float32(min_score_change)
    return DetectionDiff(
        before,
        after,
        gained=alone[~matched],
        lost=np.setdiff1d(rest, relabelled[:, 0]),
        relabelled=relabelled,
        rescored=both[rescored],
        unchanged=both[~rescored],
    )


def _common_labels(boxes: Detections | Annotations, names: list[str]) -> Indices:
    """Labels (n,) as places in `names`."""
    places = {name: k for k, name in enumerate(names)}
    return np.array([places[name] for name in boxes.names], np.int64)[boxes.labels]
