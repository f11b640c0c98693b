"""All boxes of one plane: the model's detections and the user's edits.

The layer shows a part of them. What the user moves, adds, deletes or relabels there is committed
(`edits`), so that it outlasts the next change of viewport or threshold. Boxes may be added while
the user works: a run on a slide adds them tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import (
    AGREEMENT_COLUMN,
    DOMAIN_SHIFT_COLUMN,
    PROBABILITY_COLUMN,
    TYPE_COLUMN,
    TYPE_FACTS,
    Detections,
    is_type_column,
    type_columns,
)
from napari_beerlanet.core.common.arrays import GrowableArray
from napari_beerlanet.core.review.review import ACCEPTED

FOUND, EDITED, ADDED = "found", "edited", "added"
"""Values of `status`: as detected by the model, edited by the user, drawn by the user."""

USER = "user"
"""Value of `source` for a box that the user drew."""

RowIndices = npt.NDArray[np.int64]
"""Indices of rows of the store."""

DetectionsOrNone = TypeVar("DetectionsOrNone", Detections, Detections | None)

BoxFilter = float | npt.NDArray[np.bool_]
"""Boxes of at least this confidence, or of a mask over the model's boxes."""


class OriginalBox(NamedTuple):
    """A box of the model's as it was before the user edited it; `type_code` as in `BoxStore`."""

    box: npt.NDArray[np.float32]
    label: int
    type_code: int


class TypeColumns(NamedTuple):
    """The cell types of the rows of a store: `codes` (n,) as in `BoxStore`, names, numbers.

    `numbers`: probability, entropy and P(name), (n,) float32 each. `facts`: the entries of a report
    in `TYPE_FACTS`. `detections`: the model's, with these types, None where they are to be
    assembled; `originals`: the types of boxes that the user edited, by row.
    """

    names: list[str]
    codes: npt.NDArray[np.int16]
    numbers: dict[str, npt.NDArray[np.float32]]
    facts: dict[str, Any]
    detections: Detections | None
    originals: dict[int, int]


class BoxStore:
    """Boxes `xyxy` (n, 4) float32 in pixels with `labels` into `names`, `scores` and more columns.

    A row is never removed: `alive` (n,) is false where a box was deleted or turned out to be a
    duplicate, `touched` is true where the user edited it. `ids` (n,) stay. The model's boxes are
    the rows `model_rows`, in the order of the model's `Detections`; where all came at once, they
    are the first rows and their ids are their positions. `version` counts the changes.

    `type_codes` (n,) int16: 0 where a box has no cell type, else 1 + the place in `type_names`.
    """

    def __init__(self, detections: Detections) -> None:
        everything = _with_candidates(detections)
        n = len(everything)
        self.names = list(everything.names)
        self.status_names = [FOUND, EDITED, ADDED]
        self.sources = [str(detections.report.get("model") or "model"), USER]
        self.version = 0
        self.originals: dict[int, OriginalBox] = {}
        self._label_by_name = {name: k for k, name in enumerate(self.names)}
        self.type_names = list(everything.types)
        self._columns = {
            "xyxy": GrowableArray(everything.xyxy),
            "labels": GrowableArray(everything.labels),
            "scores": GrowableArray(everything.scores),
            "ids": GrowableArray(np.arange(n, dtype=np.int64)),
            "states": GrowableArray(np.zeros(n, np.uint8)),
            "origin": GrowableArray(np.zeros(n, np.uint8)),
            "alive": GrowableArray(np.ones(n, bool)),
            "touched": GrowableArray(np.zeros(n, bool)),
            "type_codes": GrowableArray((everything.type_labels + 1).astype(np.int16)),
        }
        self._extra_columns = {
            name: GrowableArray(values)
            for name, values in everything.columns.items()
            if name.endswith(" mean")
            or name in (DOMAIN_SHIFT_COLUMN, AGREEMENT_COLUMN)
            or _is_type_number(name, values)
        }
        self._detections: Detections | None = detections
        self._writable = False
        self._template = detections if len(detections) == 0 else detections[:0]
        self._model_rows: RowIndices | None = None  # None: the rows 0 … model_count - 1
        self.model_count = n
        self.reviewed = np.zeros(n, bool)
        self._refresh()

    def _refresh(self) -> None:
        """The columns as attributes, after they may have been reallocated."""
        self.xyxy: npt.NDArray[np.float32] = self._columns["xyxy"].values
        self.labels: npt.NDArray[np.int64] = self._columns["labels"].values
        self.scores: npt.NDArray[np.float32] = self._columns["scores"].values
        self.ids: npt.NDArray[np.int64] = self._columns["ids"].values
        self.states: npt.NDArray[np.uint8] = self._columns["states"].values
        self.origin: npt.NDArray[np.uint8] = self._columns["origin"].values
        self.alive: npt.NDArray[np.bool_] = self._columns["alive"].values
        self.touched: npt.NDArray[np.bool_] = self._columns["touched"].values
        self.type_codes: npt.NDArray[np.int16] = self._columns["type_codes"].values
        self.columns = {name: column.values for name, column in self._extra_columns.items()}
        self.version += 1

    def __len__(self) -> int:
        return len(self.xyxy)

    def make_writable(self) -> None:
        """To be called before boxes, labels or types are written: until then they are the model's.

        That is, their arrays are those of its `Detections`.
        """
        if not self._writable:
            self._writable = True
            for name in ("xyxy", "labels"):
                self._columns[name] = GrowableArray(getattr(self, name).copy())
            if PROBABILITY_COLUMN in self.columns:
                own = self.columns[PROBABILITY_COLUMN].copy()
                self._extra_columns[PROBABILITY_COLUMN] = GrowableArray(own)
            self._refresh()

    # --- the model's detections -------------------------------------------------------------------

    @property
    def detections(self) -> Detections:
        """The model's detections, without the user's edits. Assembled anew after `extend`."""
        if self._detections is None:
            self._detections = self._assemble_detections()
        return self._detections

    @property
    def model_rows(self) -> RowIndices:
        """(model_count,) the rows of the model's boxes, in the order of `detections`."""
        if self._detections is None:
            self._detections = self._assemble_detections()
        return np.arange(self.model_count) if self._model_rows is None else self._model_rows

    @property
    def report(self) -> dict[str, Any]:
        """How the detections were made: model, scale, …"""
        return self._template.report

    def row_of_detection(self, number: int) -> int | None:
        """The row of a box of `detections`, None where there is none."""
        rows = None if self._in_order else self.model_rows
        if not 0 <= number < self.model_count:
            return None
        return number if rows is None else int(rows[number])

    def detection_of_row(self, row: int) -> int | None:
        """The inverse of `row_of_detection`: None for a box that the user drew."""
        if self._in_order:
            return row if row < self.model_count else None
        numbers = np.flatnonzero(self.model_rows == row)
        return int(numbers[0]) if len(numbers) else None

    def accepts(self, box_filter: BoxFilter) -> bool:
        """Whether this is a threshold, or a mask over what `detections` gave last and still is."""
        return np.ndim(box_filter) == 0 or (
            self._detections is not None and len(np.asarray(box_filter)) == self.model_count
        )

    @property
    def _in_order(self) -> bool:
        return self._detections is not None and self._model_rows is None

    def _assemble_detections(self) -> Detections:
        """The model's boxes without duplicates and edits, the most confident first."""
        from_model = self.origin == 0
        retracted = ~self.alive & ~self.touched
        rows = np.flatnonzero(from_model & ~retracted)
        rows = rows[np.argsort(-self.scores[rows], kind="stable")]
        xyxy, labels, types = self.xyxy.copy(), self.labels.copy(), self.type_codes.copy()
        for row, original in self.originals.items():
            xyxy[row], labels[row], types[row] = original
        columns = {name: values[rows] for name, values in self.columns.items()}
        if self.type_names:
            columns[TYPE_COLUMN] = self._type_words[types[rows]]
        if PROBABILITY_COLUMN in columns:
            columns[PROBABILITY_COLUMN] = self._probability_of(
                rows, types[rows], columns[PROBABILITY_COLUMN]
            )
        self._model_rows, self.model_count = rows, len(rows)
        self.reviewed = np.zeros(len(rows), bool)
        return replace(
            self._template,
            xyxy=xyxy[rows],
            labels=labels[rows],
            scores=self.scores[rows],
            names=self.names,
            columns=columns,
            candidates=None,
        )

    # --- growing ----------------------------------------------------------------------------------

    def extend(self, detections: Detections) -> RowIndices:
        """Add boxes that the model detected later; their rows. Amortised: costs what is added."""
        new = _with_candidates(detections)
        labels = np.array([self.label_index(name) for name in new.names], np.int64)[new.labels]
        self.append(
            {"xyxy": new.xyxy, "labels": labels, "scores": new.scores},
            {name: new.columns[name] for name in self._extra_columns if name in new.columns},
        )
        self._template = replace(self._template, report=self._template.report | detections.report)
        self._detections = None
        return np.arange(len(self) - len(new), len(self), dtype=np.int64)

    def retract(self, rows: RowIndices) -> None:
        """Drop rows of the model's that the user has not edited."""
        self.alive[rows[~self.touched[rows]]] = False
        self._detections = None
        self.version += 1

    def append(
        self, columns: Mapping[str, Any], extra: Mapping[str, Any], by_user: bool = False
    ) -> None:
        """New rows: `columns` xyxy (m, 4), labels, scores (m,); `extra` ones, NaN if missing."""
        count, first = len(columns["xyxy"]), len(self)
        code = self.status_code(ADDED) if by_user else 0
        values = dict(columns) | {
            "ids": np.arange(first, first + count),
            "states": np.full(count, code),
            "origin": np.full(count, int(by_user)),
            "alive": np.ones(count, bool),
            "touched": np.full(count, by_user),
            "type_codes": columns.get("type_codes", np.zeros(count)),
        }
        for name, column in self._columns.items():
            column.extend(values[name])
        for name, column in self._extra_columns.items():
            column.extend(extra.get(name, np.full(count, np.nan)))
        self._refresh()

    # --- reading ----------------------------------------------------------------------------------

    def filter_mask(self, box_filter: BoxFilter) -> npt.NDArray[np.bool_]:
        """(n,): rows with at least this confidence, or of a mask over the model's boxes.

        What the user edited always passes, what the user deleted never.
        """
        if isinstance(box_filter, (int, float, np.integer, np.floating)):
            mask = self.scores >= np.float32(box_filter)
        else:
            mask = np.zeros(len(self), bool)
            rows = slice(self.model_count) if self._in_order else self.model_rows
            mask[rows] = np.asarray(box_filter, bool)[: self.model_count]
        mask |= self.touched
        mask &= self.alive
        return mask

    @property
    def status(self) -> npt.NDArray[Any]:
        """(n,) names."""
        return self.status_of(slice(None))

    def status_of(self, rows: Any) -> npt.NDArray[Any]:
        """(m,) names, of some rows."""
        names: npt.NDArray[Any] = np.array(self.status_names, dtype=object)[self.states[rows]]
        return names

    def features(self, rows: RowIndices) -> dict[str, npt.NDArray[Any]]:
        """Columns of a layer's table, (m,) each."""
        width, height = (self.xyxy[rows, 2:] - self.xyxy[rows, :2]).T
        return {
            "id": self.ids[rows],
            "class": np.array(self.names, dtype=object)[self.labels[rows]],
            "confidence": self.scores[rows],
            "status": self.status_of(rows),
            "source": np.array(self.sources, dtype=object)[self.origin[rows]],
            "area": width * height,
            **({TYPE_COLUMN: self.types_of(rows)} if self.type_names else {}),
            **{name: values[rows] for name, values in self.columns.items()},
        }

    def feature_defaults(self, label: int) -> dict[str, Any]:
        """The table's row for the next box that the user draws."""
        mine = {"id": -1, "class": self.names[label] if self.names else "", "confidence": 1.0}
        mine |= {"status": ADDED, "source": USER, "area": 0.0}
        mine |= {TYPE_COLUMN: ""} if self.type_names else {}
        return mine | dict.fromkeys(self.columns, np.nan)

    def label_index(self, name: str) -> int:
        """The label of a class, which is added if it is new."""
        if name not in self._label_by_name:
            self._label_by_name[name] = len(self.names)
            self.names.append(name)
        return self._label_by_name[name]

    def status_code(self, name: str) -> int:
        """The code of a status in `states`, which is added if it is new."""
        if name not in self.status_names:
            self.status_names.append(name)
        return self.status_names.index(name)

    # --- cell types -------------------------------------------------------------------------------

    @property
    def _type_words(self) -> npt.NDArray[Any]:
        """(k + 1,) the name of each code."""
        return np.array(["", *self.type_names], dtype=object)

    def types_of(self, rows: Any) -> npt.NDArray[Any]:
        """(m,) names, "" where there is none, of some rows."""
        names: npt.NDArray[Any] = self._type_words[self.type_codes[rows]]
        return names

    def type_code(self, name: str) -> int:
        """The code of a type, which is added if it is new; 0 for ""."""
        if name and name not in self.type_names:
            self.type_names.append(name)
        return 1 + self.type_names.index(name) if name else 0

    def type_counts(self, mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.int64]:
        """(k + 1,) how many of a mask have each code: without a type, then of each type."""
        return np.bincount(self.type_codes[mask], minlength=len(self.type_names) + 1)

    def set_type_codes(self, rows: RowIndices, codes: Any) -> None:
        """Give rows (m,) types; their probability is what the classifier gave these, or NaN.

        After `make_writable`.
        """
        codes = np.broadcast_to(np.asarray(codes, np.int16), len(rows))
        other = self.type_codes[rows] != codes
        rows, codes = rows[other], codes[other]
        self.type_codes[rows] = codes
        if PROBABILITY_COLUMN in self.columns and len(rows):
            answers = self._model_probability(rows, codes)
            self.columns[PROBABILITY_COLUMN][rows] = self._probability_of(rows, codes, answers)

    def _probability_of(
        self, rows: RowIndices, codes: npt.NDArray[np.int16], otherwise: npt.NDArray[Any]
    ) -> npt.NDArray[Any]:
        """(m,) how probable these types are for rows, `otherwise` where no column P(…) says."""
        result = np.array(otherwise)
        for code, name in enumerate(self.type_names, 1):
            values = self.columns.get(f"P({name})")
            if values is not None:
                mine = codes == code
                result[mine] = values[rows[mine]]
        return result

    def _model_probability(
        self, rows: RowIndices, codes: npt.NDArray[np.int16]
    ) -> npt.NDArray[np.float32]:
        """(m,) the probability that came with the detections, where these types did, else NaN."""
        answers = np.full(len(rows), np.nan, np.float32)
        found = _with_candidates(self._detections)
        if found is None or PROBABILITY_COLUMN not in found.columns:
            return answers
        place = np.full(len(self), -1, np.int64)
        place[self.model_rows] = np.arange(self.model_count)
        number = place[rows]
        known = {name: code for code, name in enumerate(self.type_names, 1)}
        said = np.array([*(known.get(name, -1) for name in found.types), 0], np.int16)
        same = (number >= 0) & (said[found.type_labels[number]] == codes)
        answers[same] = found.columns[PROBABILITY_COLUMN][number[same]]
        return answers

    def typed_by_user(self) -> npt.NDArray[np.bool_]:
        """(n,) which boxes have a type that the user has given, changed or accepted."""
        found, said = _with_candidates(self.detections), np.zeros(len(self), np.int16)
        place = {name: k for k, name in enumerate(self.type_names, 1)}
        codes = np.array([*(place.get(name, -1) for name in found.types), 0], np.int16)
        said[self.model_rows] = codes[found.type_labels]
        drawn = np.flatnonzero(self.origin == 1)
        known = [str(name) for name in self.report.get("types") or ()]
        numbers = [self.columns.get(f"P({name})") for name in known]
        if len(drawn) and numbers and all(values is not None for values in numbers):
            p = np.stack([values[drawn] for values in numbers if values is not None], axis=1)
            asked = np.isfinite(p).all(axis=1)
            answers = np.array([place.get(name, -1) for name in known], np.int16)
            said[drawn[asked]] = answers[p[asked].argmax(axis=1)]
        accepted = self.states == self.status_code(ACCEPTED)
        by_user = (self.type_codes != said) | accepted
        return np.asarray((self.type_codes > 0) & by_user)

    @property
    def types(self) -> TypeColumns:
        """As they are now; writing to the store does not change them."""
        return TypeColumns(
            list(self.type_names),
            self.type_codes.copy(),
            {n: v.copy() for n, v in self.columns.items() if _is_type_number(n, v)},
            {key: self.report[key] for key in TYPE_FACTS if key in self.report},
            self._detections if self._in_order else None,
            {row: original.type_code for row, original in self.originals.items()},
        )

    def set_types(self, types: TypeColumns) -> None:
        """Make these the types of all rows; rows that came since have none."""
        new = len(self) - len(types.codes)
        self.type_names = list(types.names)
        self._columns["type_codes"] = GrowableArray(_padded(types.codes, new, 0))
        others = {n: c for n, c in self._extra_columns.items() if not is_type_column(n)}
        self._extra_columns = others | {
            name: GrowableArray(_padded(values, new, np.nan))
            for name, values in types.numbers.items()
        }
        self.originals = {
            row: original._replace(type_code=types.originals.get(row, 0))
            for row, original in self.originals.items()
        }
        kept = {key: v for key, v in self.report.items() if key not in TYPE_FACTS}
        self._template = replace(self._template, report=kept | types.facts)
        all_of = _with_candidates(types.detections)
        fits = self._in_order and all_of is not None and len(all_of) == self.model_count
        self._detections = types.detections if fits else None
        self._refresh()

    # --- a review ---------------------------------------------------------------------------------

    def apply_review(
        self,
        status: npt.NDArray[Any],
        states: Sequence[str],
        labels: RowIndices,
        names: Sequence[str],
        type_labels: RowIndices | None = None,
        type_names: Sequence[str] = (),
    ) -> None:
        """Apply a review of the model's boxes (n,): `status` are indices into `states`.

        The first of the states means not decided on: those stay as they were. `type_labels` (n,)
        into `type_names`, -1 for none; None leaves the types as they are.
        """
        own_labels = np.array([self.label_index(name) for name in names], np.int64)
        codes = np.array([0, *(self.status_code(name) for name in states[1:])], np.uint8)
        decided = status != 0
        changed = np.flatnonzero(decided | self.reviewed)
        rows = changed if self._in_order else self.model_rows[changed]
        if len(rows):
            self.make_writable()
        self.labels[rows] = own_labels[labels[changed]]
        if type_labels is not None and (len(type_names) or self.type_names):
            own_types = np.array([0, *(self.type_code(name) for name in type_names)], np.int16)
            self.set_type_codes(rows, own_types[type_labels[changed] + 1])
        unedited = ~self.touched[rows]
        self.states[rows[unedited]] = codes[status[changed[unedited]]]
        self.reviewed = decided
        self.version += 1


def classified_types(
    store_types: TypeColumns,
    model_rows: RowIndices,
    rows: RowIndices,
    names: Sequence[str],
    probabilities: npt.NDArray[np.float32],
    facts: Mapping[str, Any],
    kept: RowIndices | None = None,
) -> TypeColumns:
    """The types of a store after `rows` (m,) of it were classified; for any thread.

    `probabilities` (m, k) of the types `names`. Of an earlier classifier that knew the same types,
    what it said of other rows stays. `kept`: rows whose type is the user's and stays, whatever the
    classifier says. `model_rows`: those of `store_types.detections`.
    """
    before, n = store_types, len(store_types.codes)
    same = before.facts.get("types") == list(names)
    columns = type_columns(names, probabilities)
    known = list(dict.fromkeys([*names, *(before.names if same else [])]))
    place = {name: k for k, name in enumerate(known, 1)}
    own = np.array([0, *(place.get(name, 0) for name in before.names)], np.int16)
    codes = own[before.codes] if same else np.zeros(n, np.int16)
    codes[rows] = 1 + np.asarray(probabilities).reshape(-1, len(names)).argmax(1)
    originals = {row: int(codes[row]) for row in before.originals}
    numbers = {}
    for name, values in columns.items():
        if name != TYPE_COLUMN:
            column = np.full(n, np.nan, np.float32)
            if same and name in before.numbers:
                column[:] = before.numbers[name]
            column[rows] = values
            numbers[name] = column
    for row in [] if kept is None else kept.tolist():
        name = before.names[before.codes[row] - 1]
        if name not in place:
            known.append(name)
            place[name] = len(known)
        codes[row] = place[name]
        p = numbers.get(f"P({name})")
        numbers[PROBABILITY_COLUMN][row] = np.nan if p is None else p[row]
    facts = {"types": list(names), **facts}
    detections = before.detections
    if detections is not None:
        of_model = np.full(n, -1, np.int64)
        of_model[model_rows] = np.arange(len(model_rows))
        places = of_model[rows]
        mine = places >= 0
        detections = detections.with_types(
            names,
            np.asarray(probabilities).reshape(-1, len(names))[mine],
            rows=places[mine],
            classifier=str(facts.get("classifier", "")),
        )
        detections = replace(detections, report=detections.report | facts)
        assert len(detections.type_labels) == len(detections)  # cached here, not while one waits
    return TypeColumns(known, codes, numbers, facts, detections, originals)


def _with_candidates(detections: DetectionsOrNone) -> DetectionsOrNone:
    """All candidates, or themselves where that is all there is."""
    if detections is None or detections.candidates is None:
        return detections
    return detections.candidates


def _is_type_number(name: str, values: npt.NDArray[Any]) -> bool:
    """Whether a column is one of numbers that a classifier writes."""
    return is_type_column(name) and values.dtype.kind == "f"


def _padded(values: npt.NDArray[Any], count: int, with_: float) -> npt.NDArray[Any]:
    """A copy with so many values more at the end."""
    more: npt.NDArray[Any] = np.full(count, with_, values.dtype)
    return np.concatenate([values, more])
