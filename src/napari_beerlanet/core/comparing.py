"""Two results on one image, before and after: what is gained, lost, and changed."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .boxes import Detections
from .matching import assign, pairs_of

Indices = npt.NDArray[np.int64]
Pairs = npt.NDArray[np.int64]

SAME = 0.5
"""Intersection over union from which two boxes are one object."""
SCORE_STEP = 0.1
"""Difference of scores that counts as a change."""


@dataclass(frozen=True, eq=False)
class Comparison:
    """Indices into `before` and `after`.

    `gained` (g,) into after, `lost` (l,) into before; `relabelled`, `rescored` and `kept` (k, 2)
    pairs of both: of another class, of the same class and another score, and the rest.
    """

    before: Detections
    after: Detections
    gained: Indices
    lost: Indices
    relabelled: Pairs
    rescored: Pairs
    kept: Pairs

    @property
    def changed(self) -> bool:
        """Whether there is any difference worth telling."""
        return any(len(part) for part in (self.gained, self.lost, self.relabelled, self.rescored))

    def counts(self) -> dict[str, int]:
        """How many of each kind."""
        kinds = ("gained", "lost", "relabelled", "rescored", "kept")
        return {kind: len(getattr(self, kind)) for kind in kinds}

    def states_before(self) -> list[str]:
        """(n,) "lost", "relabelled", "rescored" or "kept" for each detection before."""
        return self._states(len(self.before), 0, self.lost, "lost")

    def states_after(self) -> list[str]:
        """(n,) "gained", "relabelled", "rescored" or "kept" for each detection after."""
        return self._states(len(self.after), 1, self.gained, "gained")

    def _states(self, count: int, side: int, alone: Indices, word: str) -> list[str]:
        states = ["kept"] * count
        for k in alone:
            states[k] = word
        for kind in ("relabelled", "rescored"):
            for pair in getattr(self, kind):
                states[pair[side]] = kind
        return states

    def sentence(self) -> str:
        """For people: "4 boxes gained, 1 lost, 2 of another class, 3 of another confidence …"."""
        if not self.changed:
            return f"Nothing has changed: {_boxes(len(self.kept))} as before."
        told = [
            f"{_boxes(len(self.gained))} gained",
            f"{len(self.lost)} lost",
            f"{len(self.relabelled)} of another class",
            f"{len(self.rescored)} of another confidence",
            f"{len(self.kept)} as before",
        ]
        return ", ".join(told) + "."


def compare(
    before: Detections, after: Detections, iou: float = SAME, score_step: float = SCORE_STEP
) -> Comparison:
    """Compare what is shown, not the candidates; classes go by name.

    Boxes of one class are paired first, the largest scores before others, and then what is left
    of both whatever its class.
    """
    names = list(dict.fromkeys([*before.names, *after.names]))
    old, new = _common(before, names), _common(after, names)
    pairs, turns = pairs_of(after.xyxy, before.xyxy), np.arange(len(after))
    partner = assign(pairs, turns, iou, new, old)
    free = np.ones(len(before), bool)
    free[partner[partner >= 0]] = False
    alone, rest = np.flatnonzero(partner < 0), np.flatnonzero(free)
    second = assign(pairs, alone, iou, free=free)[alone]
    found = second >= 0
    relabelled = np.column_stack([second[found], alone[found]])
    same = np.flatnonzero(partner >= 0)
    both = np.column_stack([partner[same], same])
    step = np.abs(after.scores[both[:, 1]] - before.scores[both[:, 0]])
    rescored = step >= np.float32(score_step)
    return Comparison(
        before,
        after,
        gained=alone[~found],
        lost=np.setdiff1d(rest, relabelled[:, 0]),
        relabelled=relabelled,
        rescored=both[rescored],
        kept=both[~rescored],
    )


def _common(detections: Detections, names: list[str]) -> Indices:
    """Labels (n,) as places in `names`."""
    place = np.array([names.index(name) for name in detections.names], np.int64)
    return place[detections.labels]


def _boxes(count: int) -> str:
    return "1 box" if count == 1 else f"{count} boxes"
