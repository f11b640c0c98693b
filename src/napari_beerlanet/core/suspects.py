"""Annotations that may be wrong: what the detector is sure of and nobody drew, and the reverse."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from .matching import most_shared
from .quality import Quality
from .verdict import Indices

Kind = Literal["not annotated", "another class", "another place", "never found"]

NEVER = 0.1
"""Score up to which a candidate does not count as having found something."""
NEAR = 0.3
"""Overlap (IoU) from which two boxes are about the same thing, if not quite at the same place."""


@dataclass(frozen=True)
class Suspect:
    """An annotation that may be wrong, or that may be lacking.

    `found` and `true` are indices of a detection and an annotation, -1 for none; `doubt` from 0
    to 1 says how sure the detector is of the contrary.
    """

    kind: Kind
    found: int
    true: int
    doubt: float
    sentence: str


def likely_label_errors(
    quality: Quality, level: float = 0.5, least: float = 0.5, most: int | None = None
) -> list[Suspect]:
    """Suspects, the worst first: those with a doubt of at least `least`, at most `most` of them.

    Looked for among all candidates, whatever threshold is shown.
    """
    verdict = quality.at(0.0, level)
    recall = {score.name: score.recall for score in verdict.scores if score.count}
    sure = quality.scores >= np.float32(least)
    wrong = verdict.wrong[sure[verdict.wrong[:, 0]]]
    false = verdict.false[sure[verdict.false]]
    chosen = [
        *_wrong(quality, wrong),
        *_false(quality, false, verdict.missed, level),
        *_never(quality, recall, least),
    ]
    # What is there and not drawn comes first among equals: it is the most frequent error.
    order = {"not annotated": 0, "another class": 1, "another place": 2, "never found": 3}
    chosen.sort(key=lambda s: (-s.doubt, order[s.kind], s.found, s.true))
    return chosen[:most]


def _wrong(quality: Quality, wrong: Indices) -> list[Suspect]:
    """Found at the right place as something else."""
    suspects = []
    for i, j in wrong.tolist():
        name, other = (quality.names[k] for k in (quality.labels[i], quality.true_labels[j]))
        score = float(quality.scores[i])
        sentence = f"Annotated as {other}, found as {name} with {_percent(score)}."
        suspects.append(Suspect("another class", i, j, score, sentence))
    return suspects


def _false(quality: Quality, false: Indices, missed: Indices, level: float) -> list[Suspect]:
    """Found where nothing is annotated, or beside it; a double of what was found is none."""
    near = quality.overlaps.iou >= min(NEAR, level)
    share = most_shared(quality.overlaps, near)
    unfound = np.zeros(len(quality.true_labels), bool)
    unfound[missed] = True
    neighbour = _nearest(quality, near & unfound[quality.overlaps.true])
    suspects = []
    for i in false.tolist():
        score, name = float(quality.scores[i]), quality.names[quality.labels[i]]
        if share[i] == 0:
            sentence = f"{name} with {_percent(score)}, and nothing is annotated there."
            suspects.append(Suspect("not annotated", i, -1, score, sentence))
        elif neighbour[i] >= 0:
            sentence = f"{name} with {_percent(score)}, and its annotation is at another place."
            suspects.append(Suspect("another place", i, int(neighbour[i]), score, sentence))
    return suspects


def _never(quality: Quality, recall: dict[str, float], least: float) -> list[Suspect]:
    """Annotated where no candidate of any class comes near with more than a trace of a score.

    The less of a class the detector finds at all, the less this says.
    """
    best = np.zeros(len(quality.true_labels))
    pairs = quality.overlaps
    near = pairs.iou >= NEAR
    np.maximum.at(best, pairs.true[near], quality.scores[pairs.found[near]])
    known = np.array([recall.get(name, 0.0) for name in quality.names])
    doubt = (1 - best) * known[quality.true_labels]
    suspects = []
    for j in np.flatnonzero(quality.true_inside & (best <= NEVER) & (doubt >= least)).tolist():
        name = quality.names[quality.true_labels[j]]
        seen = f"nothing above {_percent(best[j])} is" if best[j] else "nothing at all is"
        sentence = f"Annotated as {name}, and {seen} found there."
        suspects.append(Suspect("never found", -1, j, float(doubt[j]), sentence))
    return suspects


def _nearest(quality: Quality, allowed: npt.NDArray[np.bool_]) -> Indices:
    """(n,) the annotation that each detection shares most with, of allowed pairs; -1 for none."""
    pairs = quality.overlaps
    which = np.flatnonzero(allowed)
    which = which[np.argsort(pairs.iou[which], kind="stable")]
    nearest = np.full(len(quality.labels), -1, np.int64)
    nearest[pairs.found[which]] = pairs.true[which]  # of equal indices the last stays
    return nearest


def _percent(score: float) -> str:
    return f"{100 * score:.0f} %"
