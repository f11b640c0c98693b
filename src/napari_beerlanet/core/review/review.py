"""Review decisions on detections (accepted, rejected, relabelled), with filters, orders and undo.

Everything is columnar and NumPy, so that a hundred thousand detections are filtered and sorted
between two movements of a slider. Rows are positions in the review's detections, the highest score
first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import (
    DOMAIN_SHIFT_COLUMN,
    PROBABILITY_COLUMN,
    TYPE_COLUMN,
    Detections,
)
from napari_beerlanet.core.common.arrays import stable_argsort
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.storage import FileError, atomic_path, read_json_of_kind
from napari_beerlanet.core.detection.settings import DetectSettings

RowIndices = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]

UNREVIEWED, ACCEPTED, REJECTED = "unreviewed", "accepted", "rejected"
STATES = (UNREVIEWED, ACCEPTED, REJECTED)
ReviewOrder = Literal[
    "confidence", "least confident", "uncertain", "least certain type", "unusual", "out of domain",
    "position", "shuffled",
]  # fmt: skip
ORDERS: tuple[ReviewOrder, ...] = get_args(ReviewOrder)
OUT_OF_DOMAIN: ReviewOrder = "out of domain"
UNCERTAIN_TYPE: ReviewOrder = "least certain type"
_DEFAULT_CONFIDENCE: float = DetectSettings.default("confidence")
_MAX_UNDO = 1000  # decisions
_BUILTIN_COLUMNS = ("id", "class", "confidence", "status", "area", "width", "height", "x", "y")


@dataclass(frozen=True)
class DetectionFilter:
    """Which detections to show. None is no restriction; ranges are inclusive.

    `ranges`: minimum and maximum of a numeric column, such as "confidence", "area", "Model channel
    1 mean". `types`: cell types, "" for boxes without one.
    `text` is searched in class, status and other columns of words, whatever the case.
    """

    classes: frozenset[str] | None = None
    states: frozenset[str] | None = None
    ranges: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    text: str = ""
    types: frozenset[str] | None = None


@dataclass(frozen=True)
class _Decision:
    rows: RowIndices
    status: npt.NDArray[np.uint8]
    labels: RowIndices
    types: RowIndices


class Review:
    """Decisions on `detections`, which are all candidates; nothing here changes the detections.

    Decisions that came with them, in a column "status", hold: the review of a file that a colleague
    has started is resumed.

    `status` (n,) uint8, indices into `STATES`; `labels` (n,) int64, indices into `names`: the
    reviewer's classes, which may be others than were detected. `type_labels` (n,) int64, indices
    into `type_names`, -1 for none: the reviewer's cell types.
    """

    def __init__(self, detections: Detections) -> None:
        candidates = detections.candidates
        self.detections = detections if candidates is None else candidates
        self.names = list(self.detections.names)
        self.status = _imported_status(self.detections)
        self.labels = self.detections.labels.copy()
        self.type_names = list(self.detections.types)
        self.type_labels = self.detections.type_labels.copy()
        self._undo_stack: list[_Decision] = []
        self._redo_stack: list[_Decision] = []
        self._orders: dict[tuple[str, int], RowIndices] = {}

    def __len__(self) -> int:
        return len(self.detections)

    # --- deciding ---

    def accept(self, rows: Sequence[int] | RowIndices) -> RowIndices:
        """These are right; returns the rows that this changes."""
        return self._decide(rows, ACCEPTED)

    def reject(self, rows: Sequence[int] | RowIndices) -> RowIndices:
        """These are no objects, or not of their class."""
        return self._decide(rows, REJECTED)

    def reset(self, rows: Sequence[int] | RowIndices) -> RowIndices:
        """These are unreviewed again."""
        return self._decide(rows, UNREVIEWED)

    def relabel(self, rows: Sequence[int] | RowIndices, name: str) -> RowIndices:
        """These are right but for their class, which is `name`; that accepts them."""
        return self._decide(rows, ACCEPTED, self.class_index(name))

    def relabel_type(self, rows: Sequence[int] | RowIndices, name: str) -> RowIndices:
        """These are right but for their cell type, which is `name`; that accepts them.

        "" for no type: what they are cannot be said.
        """
        return self._decide(rows, ACCEPTED, cell_type=self.type_index(name) if name else -1)

    def _decide(
        self,
        rows: Sequence[int] | RowIndices,
        state: str,
        label: int | None = None,
        cell_type: int | None = None,
    ) -> RowIndices:
        given = np.asarray(rows, np.int64).reshape(-1)
        if len(given) and not (given.min() >= 0 and given.max() < len(self)):
            raise ValueError(f"There are {len(self)} detections; there is no row {given.max()}.")
        chosen = np.zeros(len(self), bool)
        chosen[given] = True
        unique: RowIndices = np.flatnonzero(chosen)
        new = np.full(len(unique), STATES.index(state), np.uint8)
        labels, types = self.labels[unique], self.type_labels[unique]
        if label is not None:
            labels = np.full(len(unique), label, np.int64)
        if cell_type is not None:
            types = np.full(len(unique), cell_type, np.int64)
        changed = (self.status[unique] != new) | (self.labels[unique] != labels)
        changed |= self.type_labels[unique] != types
        if changed.any():
            decision = _Decision(unique[changed], new[changed], labels[changed], types[changed])
            self._undo_stack = [*self._undo_stack[-_MAX_UNDO + 1 :], self._apply(decision)]
            self._redo_stack.clear()
        return np.asarray(unique[changed])

    def _apply(self, decision: _Decision) -> _Decision:
        """Set status, labels and types of its rows; returns the decision that undoes it."""
        rows = decision.rows
        inverse = _Decision(rows, self.status[rows], self.labels[rows], self.type_labels[rows])
        self.status[rows], self.labels[rows] = decision.status, decision.labels
        self.type_labels[rows] = decision.types
        return inverse

    def undo(self) -> RowIndices:
        """Undo the last decision; returns the rows that this changes, none if there is nothing."""
        return self._undo_or_redo(self._undo_stack, self._redo_stack)

    def redo(self) -> RowIndices:
        """Redo the decision that was undone last."""
        return self._undo_or_redo(self._redo_stack, self._undo_stack)

    def _undo_or_redo(self, source: list[_Decision], target: list[_Decision]) -> RowIndices:
        if not source:
            return np.empty(0, np.int64)
        decision = source.pop()
        target.append(self._apply(decision))
        return decision.rows

    # --- columns, filters and orders ---

    def column(self, name: str, rows: RowIndices | slice = slice(None)) -> npt.NDArray[Any]:
        """(n,) values by name: class, confidence, status, area, width, height, x, y, others.

        Of `rows` alone where they are given: a few cells cost nothing then, however many there are.
        """
        x1, y1, x2, y2 = self.detections.xyxy[rows].T
        if name == "id":
            return np.arange(*rows.indices(len(self))) if isinstance(rows, slice) else rows
        if name == "class":
            return np.array(self.names, dtype=object)[self.labels[rows]]
        if name == "status":
            return np.array(STATES, dtype=object)[self.status[rows]]
        if name == TYPE_COLUMN:
            return np.array([*self.type_names, ""], dtype=object)[self.type_labels[rows]]
        if name == PROBABILITY_COLUMN and self.has_type_probability:
            return self._probability(rows)
        plain: dict[str, Callable[[], npt.NDArray[Any]]] = {
            "confidence": lambda: self.detections.scores[rows],
            "area": lambda: (x2 - x1) * (y2 - y1),
            "width": lambda: x2 - x1,
            "height": lambda: y2 - y1,
            "x": lambda: (x1 + x2) / 2,
            "y": lambda: (y1 + y2) / 2,
        }
        return plain[name]() if name in plain else self.detections.columns[name][rows]

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order of a table; that of types where there are any."""
        first, rest = _BUILTIN_COLUMNS[:2], _BUILTIN_COLUMNS[2:]
        return [*first, *([TYPE_COLUMN] if self.type_names else []), *rest, *self._extra_columns]

    @property
    def numeric_columns(self) -> list[str]:
        """Names of the columns of numbers."""
        others = [
            name
            for name in self._extra_columns
            if self.detections.columns[name].dtype.kind in "biuf"
        ]
        return [*(name for name in _BUILTIN_COLUMNS if name not in ("class", "status")), *others]

    @property
    def _extra_columns(self) -> list[str]:
        """Columns that came with the detections, but those that we have of our own."""
        own = (*_BUILTIN_COLUMNS, TYPE_COLUMN)
        return [name for name in self.detections.columns if name not in own]

    def mask(self, chosen: DetectionFilter) -> Mask:
        """(n,) which rows pass."""
        passing = np.ones(len(self), bool)
        if chosen.classes is not None:
            included = np.array([name in chosen.classes for name in self.names], bool)
            passing &= included[self.labels]
        if chosen.states is not None:
            passing &= self.in_states(chosen.states)
        if chosen.types is not None:
            included = np.array([name in chosen.types for name in (*self.type_names, "")], bool)
            passing &= included[self.type_labels]
        for name, (minimum, maximum) in chosen.ranges.items():
            values = self.column(name)
            passing &= (values >= np.asarray(minimum, values.dtype)) & (values <= maximum)
        if chosen.text:
            passing &= self._matches_text(chosen.text.casefold())
        return passing

    def in_states(self, states: frozenset[str] | None) -> Mask:
        """(n,) which rows are in one of these states; None means any."""
        included = np.array([states is None or state in states for state in STATES])
        return np.asarray(included[self.status])

    def class_of(self, row: int) -> str:
        """The reviewer's class of a row."""
        return self.names[int(self.labels[row])]

    def type_of(self, row: int) -> str:
        """The reviewer's cell type of a row, "" for none."""
        label = int(self.type_labels[row])
        return self.type_names[label] if label >= 0 else ""

    def state_of(self, row: int) -> str:
        """The status of a row, of `STATES`."""
        return STATES[int(self.status[row])]

    def _matches_text(self, text: str) -> Mask:
        classes = np.array([text in name.casefold() for name in self.names], bool)
        states = np.array([text in state for state in STATES])
        types = np.array([*(text in name.casefold() for name in self.type_names), False], bool)
        matching = classes[self.labels] | states[self.status] | types[self.type_labels]
        for name in self._extra_columns:
            if name not in self.numeric_columns:
                words, index = np.unique(
                    self.detections.columns[name].astype(str), return_inverse=True
                )
                matching |= np.array([text in word.casefold() for word in words], bool)[index]
        return np.asarray(matching)

    def ordered(
        self,
        mask: Mask,
        order: ReviewOrder = "confidence",
        threshold: float = _DEFAULT_CONFIDENCE,
        seed: int = 0,
    ) -> RowIndices:
        """The rows of a mask in an order for reviewing.

        "uncertain": the nearest to the threshold first. "unusual": the densities least like those
        of their class first. "out of domain": the densities farthest from those of their class in
        training first, if the model has these (see `has_domain_shift`). "least certain type": the
        lowest probability of its type first. "position": line by line, as one reads. "shuffled": an
        unbiased sample.
        """
        if order not in ORDERS:
            raise ValueError(f"The order is one of {', '.join(ORDERS)}, not {quoted(order)}.")
        if order == "confidence":
            return np.flatnonzero(mask).astype(np.int64)
        if order == "uncertain":
            rows = np.flatnonzero(mask).astype(np.int64)
            return rows[
                stable_argsort(np.abs(self.detections.scores[rows] - np.float32(threshold)))
            ]
        everything = self._cached_order(order, seed)
        return everything[mask[everything]]

    def precompute_orders(self) -> None:
        """Compute and cache the orders that take long; for a worker thread."""
        for order in ("position", "unusual"):
            self._cached_order(order)

    def _cached_order(self, order: str, seed: int = 0) -> RowIndices:
        """(n,) all rows in an order; cached, as the detections do not change."""
        if (order, seed) not in self._orders:
            make: dict[str, Callable[[], RowIndices]] = {
                "least confident": lambda: stable_argsort(self.detections.scores),
                "unusual": lambda: stable_argsort(-self._outlier_scores()),
                OUT_OF_DOMAIN: lambda: stable_argsort(-self._domain_shift()),
                UNCERTAIN_TYPE: lambda: stable_argsort(self._type_probability()),
                "position": self._reading_order,
                "shuffled": lambda: np.argsort(np.random.default_rng(seed).permutation(len(self))),
            }
            self._orders[order, seed] = make[order]()
        return self._orders[order, seed]

    def _reading_order(self) -> RowIndices:
        """By lines as high as two objects, and from left to right within them."""
        if not len(self):
            return np.empty(0, np.int64)
        height = 2 * max(float(np.median(self.column("height"))), 1e-6)
        across = stable_argsort(self.column("x"))
        line = np.floor(self.column("y") / height).astype(np.int32)
        return across[stable_argsort(line[across])]

    def _outlier_scores(self) -> npt.NDArray[np.float64]:
        """(n,) how far mean densities are from their class's median, in typical spreads."""
        names = [name for name in self.detections.columns if name.endswith(" mean")]
        far = np.zeros(len(self))
        for label in np.unique(self.detections.labels):
            mine = self.detections.labels == label
            for name in names:
                values = np.asarray(self.detections.columns[name][mine], np.float64)
                off = np.abs(values - np.median(values))
                spread = float(np.median(off))
                if spread > 0:
                    far[mine] += (off / spread) ** 2
        return np.sqrt(far)

    @property
    def has_domain_shift(self) -> bool:
        """Whether the detections say how far their densities are from those of training."""
        return DOMAIN_SHIFT_COLUMN in self.numeric_columns and bool(
            np.isfinite(self.detections.columns[DOMAIN_SHIFT_COLUMN]).any()
        )

    def _domain_shift(self) -> npt.NDArray[np.float64]:
        """(n,) standard deviations, -1 where they are not known."""
        if not self.has_domain_shift:
            return np.zeros(len(self))
        far = np.asarray(self.detections.columns[DOMAIN_SHIFT_COLUMN], np.float64)
        return np.where(np.isnan(far), -1.0, far)

    @property
    def has_type_probability(self) -> bool:
        """Whether a classifier has said how probable types are."""
        return PROBABILITY_COLUMN in self.numeric_columns

    def _probability(self, rows: RowIndices | slice) -> npt.NDArray[Any]:
        """(m,) of the types that rows have now.

        A type that the reviewer has changed has the probability that the classifier gave it, NaN
        where it does not know that type.
        """
        given = self.detections.columns
        said: npt.NDArray[Any] = given[PROBABILITY_COLUMN][rows]
        labels = self.type_labels[rows]
        changed = self.detections.type_labels[rows] != labels
        if not changed.any():
            return said
        now = np.where(changed, np.nan, said).astype(said.dtype)
        for label, name in enumerate(self.type_names):
            mine = changed & (labels == label)
            if f"P({name})" in given and mine.any():
                now[mine] = given[f"P({name})"][rows][mine]
        return now

    def _type_probability(self) -> npt.NDArray[np.float64]:
        """(n,) of the type; NaN, which sorts last, where there is none."""
        if not self.has_type_probability:
            return np.full(len(self), np.nan)
        return np.asarray(self.detections.columns[PROBABILITY_COLUMN], np.float64)

    def progress(self, mask: Mask | None = None) -> tuple[int, int]:
        """How many are reviewed, of how many."""
        status = self.status if mask is None else self.status[mask]
        return int((status > 0).sum()), len(status)

    def next_unreviewed(self, rows: RowIndices, after: int) -> int | None:
        """The position in `rows` of the next unreviewed one, wrapping around; None if all are."""
        unreviewed = np.flatnonzero(self.status[rows] == 0)
        if not len(unreviewed):
            return None
        later = unreviewed[unreviewed > after]
        return int(later[0] if len(later) else unreviewed[0])

    def reviewed(self, rows: RowIndices | None = None) -> Detections:
        """Detections, all or some, with the reviewer's classes and types and a column "status"."""
        rows = np.arange(len(self)) if rows is None else rows
        part = self.detections[rows]
        columns = {
            **part.columns,
            "status": self.column("status", rows),
            **self._reviewed_types(rows),
        }
        report = self.detections.report | ({"types": self.type_names} if self.type_names else {})
        return Detections(
            part.xyxy,
            self.labels[rows],
            part.scores,
            self.names,
            columns,
            part.image_shape,
            part.pixel_size,
            report,
        )

    def _reviewed_types(self, rows: RowIndices) -> dict[str, npt.NDArray[Any]]:
        """The columns of types and their probability, as the reviewer has them."""
        if not self.type_names:
            return {}
        names = [TYPE_COLUMN, *([PROBABILITY_COLUMN] if self.has_type_probability else [])]
        return {name: self.column(name, rows) for name in names}

    def accepted(self) -> Detections:
        """The accepted detections, with the reviewer's classes."""
        return self.reviewed(np.flatnonzero(self.status == STATES.index(ACCEPTED)))

    def class_index(self, name: str) -> int:
        """The number of a class, which is added if it is new."""
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)

    def type_index(self, name: str) -> int:
        """The number of a cell type, which is added if it is new."""
        if name not in self.type_names:
            self.type_names.append(name)
        return self.type_names.index(name)


def _imported_status(detections: Detections) -> npt.NDArray[np.uint8]:
    """(n,) indices into `STATES` by a column "status", 0 where it holds something else."""
    column = detections.columns.get("status")
    status = np.zeros(len(detections), np.uint8)
    if column is not None:
        for index, state in enumerate(STATES):
            status[np.asarray(column).astype(str) == state] = index
    return status


# --- on disk --------------------------------------------------------------------------------------

_FILE_KIND, _FORMAT_VERSION = "napari-beerlanet review", 1
_DECISION_LENGTHS = (8, 9)  # entries of a decision; the last is a cell type, where there is one
_DECISIONS_PER_WRITE = 1000


class BoxEdit(NamedTuple):
    """A box that the user drew (`was` is None), deleted (`box` is None), moved or relabelled."""

    was: list[float] | None
    box: list[float] | None
    name: str
    score: float
    status: str
    cell_type: str = ""


def save_review(
    path: str | os.PathLike[str],
    review: Review,
    image: str = "",
    edits: Sequence[BoxEdit] = (),
) -> Path:
    """Write all decisions and edits, whole or not at all; `image` is its name, for people."""
    content = {
        "kind": _FILE_KIND,
        "version": _FORMAT_VERSION,
        "image": image,
        "model": review.detections.report.get("model"),
        "detections": len(review),
        "edits": edits,
    }
    head = json.dumps(content, ensure_ascii=False)[:-1]
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
        file.write(f'{head}, "decisions": [')
        rows = np.flatnonzero(review.status > 0)
        # All at once would hold up the window.
        for start in range(0, len(rows), _DECISIONS_PER_WRITE):
            lines = [_encode_decision(review, k) for k in rows[start:][:_DECISIONS_PER_WRITE]]
            file.write((",\n" if start else "\n") + ",\n".join(lines))
        file.write("]}\n")
    return path


def _encode_decision(review: Review, k: int) -> str:
    """A decision: box, score, detected class, status, reviewer's class and, if any, type."""
    decision = [
        *(round(float(v), 3) for v in review.detections.xyxy[k]),
        round(float(review.detections.scores[k]), 4),
        review.detections.names[review.detections.labels[k]],
        STATES[review.status[k]],
        review.names[review.labels[k]],
        *([review.type_of(k)] if review.type_labels[k] >= 0 else []),
    ]
    return json.dumps(decision, ensure_ascii=False)


def load_review(path: str | os.PathLike[str], detections: Detections) -> tuple[Review, int]:
    """A review of `detections` with the decisions of a file where its boxes are the same.

    Also returns how many decisions were restored.
    """
    content = read_json_of_kind(path, [_FILE_KIND], _FORMAT_VERSION, "a review")
    try:
        earlier = _review_of_decisions(content["decisions"])
    except (KeyError, TypeError, ValueError, IndexError, OverflowError) as error:
        raise FileError(f"{path}: its decisions cannot be read.") from error
    review = Review(detections)
    return review, carry_over_decisions(earlier, review)


def load_edits(path: str | os.PathLike[str]) -> list[BoxEdit]:
    """The edits of boxes that were saved with a review."""
    content = read_json_of_kind(path, [_FILE_KIND], _FORMAT_VERSION, "a review")
    try:
        return [
            BoxEdit(_read_box(was), _read_box(box), str(name), float(score), str(status), str(kind))
            for was, box, name, score, status, kind in content.get("edits", [])
        ]
    except (TypeError, ValueError, OverflowError) as error:
        raise FileError(f"{path}: its edits cannot be read.") from error


def _read_box(given: Any) -> list[float] | None:
    if given is None:
        return None
    x1, y1, x2, y2 = map(float, given)
    if not (np.isfinite([x1, y1, x2, y2]).all() and x1 <= x2 and y1 <= y2):
        raise ValueError("not a box")
    return [x1, y1, x2, y2]


def carry_over_decisions(earlier: Review, review: Review, iou: float = 0.7) -> int:
    """Carry the decisions of an earlier review of the same image over to boxes that are the same.

    Of the same detected class, and overlapping by at least `iou`. Returns how many there are.
    """
    # numba comes with it, for which the panel would have to wait as it opens
    from napari_beerlanet.core.boxes.matching import match_greedy, overlap_pairs

    old = np.flatnonzero(earlier.status > 0)
    index = {name: k for k, name in enumerate(review.detections.names)}
    classes = np.array([index.get(name, -1) for name in earlier.detections.names], np.int64)
    partner = match_greedy(
        overlap_pairs(earlier.detections.xyxy[old], review.detections.xyxy),
        np.arange(len(old)),
        iou,
        classes[earlier.detections.labels[old]],
        review.detections.labels,
    )
    matched = partner >= 0
    mine, theirs = partner[matched], old[matched]
    names = _add_names(review.names, earlier.names)
    review.status[mine] = earlier.status[theirs]
    review.labels[mine] = names[earlier.labels[theirs]]
    typed = earlier.type_labels[theirs] >= 0
    types = _add_names(review.type_names, earlier.type_names)
    review.type_labels[mine[typed]] = types[earlier.type_labels[theirs[typed]]]
    return len(mine)


def _add_names(known: list[str], names: Sequence[str]) -> npt.NDArray[np.int64]:
    """The numbers (n,) of names in a list, to which the new ones are added."""
    place = {name: k for k, name in reversed(list(enumerate(known)))}
    for name in names:
        if name not in place:
            place[name] = len(known)
            known.append(name)
    return np.array([place[name] for name in names], np.int64)


def _review_of_decisions(decisions: list[list[Any]]) -> Review:
    """A review of nothing but the decided boxes."""
    if any(len(entry) not in _DECISION_LENGTHS for entry in decisions):
        raise ValueError("a decision is incomplete")
    detected, reviewed = [str(d[5]) for d in decisions], [str(d[7]) for d in decisions]
    names = list(dict.fromkeys([*detected, *reviewed]))
    index = {name: k for k, name in enumerate(names)}
    boxes = np.array([d[:4] for d in decisions], np.float32).reshape(-1, 4)
    scores = np.array([d[4] for d in decisions], np.float32)
    columns: dict[str, Any] = {"row": np.arange(len(decisions))}
    types = [str(d[8]) if len(d) > _DECISION_LENGTHS[0] else "" for d in decisions]
    if any(types):
        columns[TYPE_COLUMN] = np.array(types, object)
    review = Review(
        Detections(boxes, np.array([index[n] for n in detected], np.int64), scores, names, columns)
    )
    order = review.detections.columns["row"]  # the highest score first, as detections are
    states = np.array([STATES.index(str(d[6])) for d in decisions], np.uint8)
    review.status = states[order]
    review.labels = np.array([index[name] for name in reviewed], np.int64)[order]
    return review
