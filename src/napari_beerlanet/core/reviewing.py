"""A person's decisions on detections: accepted, rejected, another class; what is left to look at.

Everything is columnar and NumPy, so that a hundred thousand detections are filtered and sorted
between two movements of a slider. Rows are places in `Review.found`, the highest score first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from .boxes import Detections
from .classstain import UNLIKE
from .sorting import stable_order

Rows = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

UNREVIEWED, ACCEPTED, REJECTED = "unreviewed", "accepted", "rejected"
STATES = (UNREVIEWED, ACCEPTED, REJECTED)
Order = Literal[
    "confidence", "least confident", "uncertain", "unusual", "unlike training", "position",
    "shuffled",
]  # fmt: skip
ORDERS: tuple[Order, ...] = get_args(Order)
_STEPS = 1000  # that can be undone
_OWN = ("id", "class", "confidence", "status", "area", "width", "height", "x", "y")


@dataclass(frozen=True)
class Filter:
    """What to look at. None is no restriction; ranges are inclusive.

    `ranges`: least and most of a numeric column, such as "confidence", "area", "OD 1 mean".
    `text` is looked for in class, status and other columns of words, small and capital letters
    alike.
    """

    classes: frozenset[str] | None = None
    states: frozenset[str] | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    text: str = ""


@dataclass(frozen=True)
class _Step:
    rows: Rows
    status: npt.NDArray[np.uint8]
    labels: Rows


class Review:
    """Decisions on `found`, which holds all candidates; nothing here changes the detections.

    Decisions that came with them, in a column "status", are kept: a file that a colleague has
    reviewed goes on where it stopped.

    `status` (n,) uint8, places in `STATES`; `labels` (n,) int64, places in `names`: as a person
    has them, which may be other classes than were found.
    """

    def __init__(self, found: Detections) -> None:
        self.found = found if found.candidates is None else found.candidates
        self.names = list(self.found.names)
        self.status = _earlier_status(self.found)
        self.labels = self.found.labels.copy()
        self._done: list[_Step] = []
        self._undone: list[_Step] = []
        self._orders: dict[tuple[str, int], Rows] = {}

    def __len__(self) -> int:
        return len(self.found)

    # --- deciding ---

    def accept(self, rows: Sequence[int] | Rows) -> Rows:
        """These are right; returns the rows that this changes."""
        return self._decide(rows, ACCEPTED)

    def reject(self, rows: Sequence[int] | Rows) -> Rows:
        """These are no objects, or not of their class."""
        return self._decide(rows, REJECTED)

    def forget(self, rows: Sequence[int] | Rows) -> Rows:
        """These have not been looked at after all."""
        return self._decide(rows, UNREVIEWED)

    def relabel(self, rows: Sequence[int] | Rows, name: str) -> Rows:
        """These are right but for their class, which is `name`; that accepts them."""
        return self._decide(rows, ACCEPTED, self.place_of(name))

    def _decide(self, rows: Sequence[int] | Rows, state: str, label: int | None = None) -> Rows:
        asked = np.asarray(rows, np.int64).reshape(-1)
        if len(asked) and not (asked.min() >= 0 and asked.max() < len(self)):
            raise ValueError(f"There are {len(self)} detections; there is no row {asked.max()}.")
        once = np.zeros(len(self), bool)
        once[asked] = True
        wanted: Rows = np.flatnonzero(once)
        new = np.full(len(wanted), STATES.index(state), np.uint8)
        labels = self.labels[wanted] if label is None else np.full(len(wanted), label, np.int64)
        changed = (self.status[wanted] != new) | (self.labels[wanted] != labels)
        if changed.any():
            step = _Step(wanted[changed], new[changed], labels[changed])
            self._done = [*self._done[-_STEPS + 1 :], self._put(step)]
            self._undone.clear()
        return np.asarray(wanted[changed])

    def _put(self, step: _Step) -> _Step:
        """Set what a step says; returns the step back."""
        back = _Step(step.rows, self.status[step.rows], self.labels[step.rows])
        self.status[step.rows], self.labels[step.rows] = step.status, step.labels
        return back

    def undo(self) -> Rows:
        """Take the last decision back; the rows that this changes, none if there is nothing."""
        return self._move(self._done, self._undone)

    def redo(self) -> Rows:
        """Decide again what was taken back last."""
        return self._move(self._undone, self._done)

    def _move(self, source: list[_Step], target: list[_Step]) -> Rows:
        if not source:
            return np.empty(0, np.int64)
        step = source.pop()
        target.append(self._put(step))
        return step.rows

    # --- looking ---

    def column(self, name: str) -> npt.NDArray[Any]:
        """(n,) values by name: class, confidence, status, area, width, height, x, y, others."""
        x1, y1, x2, y2 = self.found.xyxy.T
        if name == "class":
            return np.array(self.names, dtype=object)[self.labels]
        if name == "found as":
            return np.array(self.found.names, dtype=object)[self.found.labels]
        if name == "status":
            return np.array(STATES, dtype=object)[self.status]
        plain: dict[str, Callable[[], npt.NDArray[Any]]] = {
            "id": lambda: np.arange(len(self)),
            "confidence": lambda: self.found.scores,
            "area": lambda: (x2 - x1) * (y2 - y1),
            "width": lambda: x2 - x1,
            "height": lambda: y2 - y1,
            "x": lambda: (x1 + x2) / 2,
            "y": lambda: (y1 + y2) / 2,
        }
        return plain[name]() if name in plain else self.found.columns[name]

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order of a table."""
        return [*_OWN, *self._extra]

    @property
    def numeric(self) -> list[str]:
        """Names of the columns of numbers."""
        others = [name for name in self._extra if self.found.columns[name].dtype.kind in "biuf"]
        return [*(name for name in _OWN if name not in ("class", "status")), *others]

    @property
    def _extra(self) -> list[str]:
        """Columns that came with the detections, but those that we have of our own."""
        return [name for name in self.found.columns if name not in _OWN]

    def mask(self, chosen: Filter) -> Mask:
        """(n,) which rows pass."""
        passing = np.ones(len(self), bool)
        if chosen.classes is not None:
            known = np.array([name in chosen.classes for name in self.names], bool)
            passing &= known[self.labels]
        if chosen.states is not None:
            passing &= self.in_states(chosen.states)
        for name, (least, most) in chosen.ranges.items():
            values = self.column(name)
            passing &= (values >= np.asarray(least, values.dtype)) & (values <= most)
        if chosen.text:
            passing &= self._with_text(chosen.text.casefold())
        return passing

    def in_states(self, states: frozenset[str] | None) -> Mask:
        """(n,) which rows are in one of these states; None means any."""
        known = np.array([states is None or state in states for state in STATES])
        return np.asarray(known[self.status])

    def class_of(self, row: int) -> str:
        """The class of a row, as a person has it."""
        return self.names[int(self.labels[row])]

    def state_of(self, row: int) -> str:
        """What was decided on a row, of `STATES`."""
        return STATES[int(self.status[row])]

    def _with_text(self, text: str) -> Mask:
        classes = np.array([text in name.casefold() for name in self.names], bool)
        states = np.array([text in state for state in STATES])
        found = classes[self.labels] | states[self.status]
        for name in self._extra:
            if name not in self.numeric:
                words, place = np.unique(self.found.columns[name].astype(str), return_inverse=True)
                found |= np.array([text in word.casefold() for word in words], bool)[place]
        return np.asarray(found)

    def ordered(
        self, mask: Mask, order: Order = "confidence", threshold: float = 0.25, seed: int = 0
    ) -> Rows:
        """The rows of a mask in an order for looking through.

        "uncertain": the nearest to the threshold first. "unusual": the densities least like those
        of their class first. "unlike training": the densities farthest from those of their class in
        training first, which the model tells (see `tells_training`). "position": line by line, as
        one reads. "shuffled": an unbiased sample.
        """
        if order not in ORDERS:
            raise ValueError(f"The order is one of {', '.join(ORDERS)}, not {order!r}.")
        if order == "confidence":
            return np.flatnonzero(mask).astype(np.int64)
        if order == "uncertain":
            rows = np.flatnonzero(mask).astype(np.int64)
            return rows[stable_order(np.abs(self.found.scores[rows] - np.float32(threshold)))]
        everything = self._order_of_all(order, seed)
        return everything[mask[everything]]

    def prepare(self) -> None:
        """Find the orders that take long; they are kept. May run beside everything else."""
        for order in ("position", "unusual"):
            self._order_of_all(order)

    def _order_of_all(self, order: str, seed: int = 0) -> Rows:
        """(n,) all rows in an order; kept, as the detections stay what they are."""
        if (order, seed) not in self._orders:
            make: dict[str, Callable[[], Rows]] = {
                "least confident": lambda: stable_order(self.found.scores),
                "unusual": lambda: stable_order(-self.unusual()),
                "unlike training": lambda: stable_order(-self._unlike_training()),
                "position": self._reading_order,
                "shuffled": lambda: np.argsort(np.random.default_rng(seed).permutation(len(self))),
            }
            self._orders[order, seed] = make[order]()
        return self._orders[order, seed]

    def _reading_order(self) -> Rows:
        """By lines as high as two objects, and from left to right within them."""
        if not len(self):
            return np.empty(0, np.int64)
        height = 2 * max(float(np.median(self.column("height"))), 1e-6)
        across = stable_order(self.column("x"))
        line = np.floor(self.column("y") / height).astype(np.int32)
        return across[stable_order(line[across])]

    def unusual(self) -> npt.NDArray[np.float64]:
        """(n,) how far mean densities are from their class's median, in typical spreads."""
        names = [name for name in self.found.columns if name.endswith(" mean")]
        far = np.zeros(len(self))
        for label in np.unique(self.found.labels):
            mine = self.found.labels == label
            for name in names:
                values = np.asarray(self.found.columns[name][mine], np.float64)
                off = np.abs(values - np.median(values))
                spread = float(np.median(off))
                if spread > 0:
                    far[mine] += (off / spread) ** 2
        return np.sqrt(far)

    @property
    def tells_training(self) -> bool:
        """Whether the detections say how unlike the training's their densities are."""
        return UNLIKE in self.numeric and bool(np.isfinite(self.found.columns[UNLIKE]).any())

    def _unlike_training(self) -> npt.NDArray[np.float64]:
        """(n,) standard deviations, -1 where they are not known."""
        if not self.tells_training:
            return np.zeros(len(self))
        far = np.asarray(self.found.columns[UNLIKE], np.float64)
        return np.where(np.isnan(far), -1.0, far)

    def progress(self, mask: Mask | None = None) -> tuple[int, int]:
        """How many are reviewed, of how many."""
        status = self.status if mask is None else self.status[mask]
        return int((status > 0).sum()), len(status)

    def next_unreviewed(self, rows: Rows, after: int) -> int | None:
        """The place in `rows` of the next one to look at, going round; None if all are done."""
        open_ = np.flatnonzero(self.status[rows] == 0)
        if not len(open_):
            return None
        later = open_[open_ > after]
        return int(later[0] if len(later) else open_[0])

    def judged(self, which: Rows | None = None) -> Detections:
        """Detections, all or some, under the classes of a person, with a column "status"."""
        rows = np.arange(len(self)) if which is None else which
        part = self.found[rows]
        return Detections(
            part.xyxy,
            self.labels[rows],
            part.scores,
            self.names,
            {**part.columns, "status": self.column("status")[rows]},
            part.image_shape,
            part.pixel_size,
            self.found.report,
        )

    def decided(self) -> Detections:
        """The accepted detections under the classes that a person gave them."""
        return self.judged(np.flatnonzero(self.status == STATES.index(ACCEPTED)))

    def place_of(self, name: str) -> int:
        """The number of a class, which is added if it is new."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)


def _earlier_status(found: Detections) -> npt.NDArray[np.uint8]:
    """(n,) places in `STATES` of what a column "status" says, 0 where it says something else."""
    said = found.columns.get("status")
    status = np.zeros(len(found), np.uint8)
    if said is not None:
        for place, state in enumerate(STATES):
            status[np.asarray(said).astype(str) == state] = place
    return status
