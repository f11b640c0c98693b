"""All boxes of one image: what the model found, and what the user made of it.

A layer shows a part of them. What the user moves, adds, deletes or renames there is taken over
(`detection_edits`), so that it outlasts the next change of view or threshold. Boxes may come while
the user works: a run on a slide adds them tile by tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.classstain import UNLIKE
from napari_beerlanet.core.growing import GrowingArray

FOUND, EDITED, ADDED = "found", "edited", "added"
"""What `status` says of a box: as the model found it, changed by the user, made by the user."""

USER = "user"
"""What `source` says of a box that the user made."""

Rows = npt.NDArray[np.int64]
"""Numbers of rows of the store."""

Chosen = float | npt.NDArray[np.bool_]
"""Boxes of at least this confidence, or of a mask over the model's boxes."""


class Was(NamedTuple):
    """A model's box as it was before the user changed it."""

    box: npt.NDArray[np.float32]
    label: int


class BoxStore:
    """Boxes `xyxy` (n, 4) float32 in pixels with `labels` into `names`, `scores` and more columns.

    A row is never removed: `alive` (n,) is false where a box was deleted or turned out to be a
    double, `touched` where the user had a hand in it. `ids` (n,) stay. The model's boxes are the
    rows `model_rows`, in the order of the model's `Detections`; where all came at once, they are
    the first rows and their ids are their places. `version` counts the changes.
    """

    def __init__(self, detections: Detections) -> None:
        everything = detections.candidates if detections.candidates is not None else detections
        n = len(everything)
        self.names = list(everything.names)
        self.words = [FOUND, EDITED, ADDED]
        self.sources = [str(detections.report.get("model") or "model"), USER]
        self.version = 0
        self.was: dict[int, Was] = {}
        self._place_of_name = {name: k for k, name in enumerate(self.names)}
        self._columns = {
            "xyxy": GrowingArray(everything.xyxy),
            "labels": GrowingArray(everything.labels),
            "scores": GrowingArray(everything.scores),
            "ids": GrowingArray(np.arange(n, dtype=np.int64)),
            "states": GrowingArray(np.zeros(n, np.uint8)),
            "origin": GrowingArray(np.zeros(n, np.uint8)),
            "alive": GrowingArray(np.ones(n, bool)),
            "touched": GrowingArray(np.zeros(n, bool)),
        }
        self._more = {
            name: GrowingArray(values)
            for name, values in everything.columns.items()
            if name.endswith(" mean") or name == UNLIKE
        }
        self._found: Detections | None = detections
        self._own = False
        self._like = detections if len(detections) == 0 else detections[:0]
        self._model_rows: Rows | None = None  # as they are while all came at once: 0 … original - 1
        self.original = n
        self.reviewed = np.zeros(n, bool)
        self._refresh()

    def _refresh(self) -> None:
        """The columns as attributes, after they may have moved."""
        self.xyxy: npt.NDArray[np.float32] = self._columns["xyxy"].values
        self.labels: npt.NDArray[np.int64] = self._columns["labels"].values
        self.scores: npt.NDArray[np.float32] = self._columns["scores"].values
        self.ids: npt.NDArray[np.int64] = self._columns["ids"].values
        self.states: npt.NDArray[np.uint8] = self._columns["states"].values
        self.origin: npt.NDArray[np.uint8] = self._columns["origin"].values
        self.alive: npt.NDArray[np.bool_] = self._columns["alive"].values
        self.touched: npt.NDArray[np.bool_] = self._columns["touched"].values
        self.columns = {name: column.values for name, column in self._more.items()}
        self.version += 1

    def __len__(self) -> int:
        return len(self.xyxy)

    def own(self) -> None:
        """To be called before boxes or labels are written: until then they are the model's own."""
        if not self._own:
            self._own = True
            for name in ("xyxy", "labels"):
                self._columns[name] = GrowingArray(getattr(self, name).copy())
            self._refresh()

    # --- the model's ------------------------------------------------------------------------------

    @property
    def found(self) -> Detections:
        """What the model found, whatever the user made of it. Put together anew after `extend`."""
        if self._found is None:
            self._found = self._put_together()
        return self._found

    @property
    def model_rows(self) -> Rows:
        """(original,) the rows of the model's boxes, in the order of `found`."""
        if self._found is None:
            self._found = self._put_together()
        return np.arange(self.original) if self._model_rows is None else self._model_rows

    @property
    def report(self) -> dict[str, Any]:
        """Facts on how the boxes were found."""
        return self._like.report

    def row_of(self, place: int) -> int | None:
        """The row of the model's box at a place of `found`, None where there is none."""
        rows = None if self._in_order else self.model_rows
        if not 0 <= place < self.original:
            return None
        return place if rows is None else int(rows[place])

    def place_of(self, row: int) -> int | None:
        """The inverse of `row_of`: None for a box that the user made."""
        if self._in_order:
            return row if row < self.original else None
        found = np.flatnonzero(self.model_rows == row)
        return int(found[0]) if len(found) else None

    def fits(self, chosen: Chosen) -> bool:
        """Whether this is a threshold, or a mask over what `found` gave last and still is."""
        return np.ndim(chosen) == 0 or (
            self._found is not None and len(np.asarray(chosen)) == self.original
        )

    @property
    def _in_order(self) -> bool:
        return self._found is not None and self._model_rows is None

    def _put_together(self) -> Detections:
        """The model's boxes that are no doubles, the surest first, as they were found."""
        theirs = self.origin == 0
        dropped = theirs & ~self.alive & ~self.touched
        rows = np.flatnonzero(theirs & ~dropped)
        rows = rows[np.argsort(-self.scores[rows], kind="stable")]
        xyxy, labels = self.xyxy.copy(), self.labels.copy()
        for row, was in self.was.items():
            xyxy[row], labels[row] = was
        self._model_rows, self.original = rows, len(rows)
        self.reviewed = np.zeros(len(rows), bool)
        like, names = self._like, self.names
        columns = {name: values[rows] for name, values in self.columns.items()}
        return replace(
            like, xyxy=xyxy[rows], labels=labels[rows], scores=self.scores[rows], names=names,
            columns=columns, candidates=None,
        )  # fmt: skip

    # --- growing ----------------------------------------------------------------------------------

    def extend(self, detections: Detections) -> Rows:
        """Add boxes that the model found later; their rows. Costs what is added, on average."""
        new = detections.candidates if detections.candidates is not None else detections
        place = np.array([self.label_of(name) for name in new.names], np.int64)
        self.append(
            {"xyxy": new.xyxy, "labels": place[new.labels], "scores": new.scores},
            {name: new.columns[name] for name in self._more if name in new.columns},
        )
        self._like = replace(self._like, report=self._like.report | detections.report)
        self._found = None
        return np.arange(len(self) - len(new), len(self), dtype=np.int64)

    def drop(self, rows: Rows) -> None:
        """The model takes these back, where the user had no hand in them."""
        self.alive[rows[~self.touched[rows]]] = False
        self._found = None
        self.version += 1

    def append(
        self, columns: Mapping[str, Any], more: Mapping[str, Any], by_user: bool = False
    ) -> None:
        """New rows: `columns` xyxy (m, 4), labels, scores (m,); `more` others, NaN if not given."""
        count, first = len(columns["xyxy"]), len(self)
        code = self.code_of(ADDED) if by_user else 0
        values = dict(columns) | {
            "ids": np.arange(first, first + count),
            "states": np.full(count, code),
            "origin": np.full(count, int(by_user)),
            "alive": np.ones(count, bool),
            "touched": np.full(count, by_user),
        }
        for name, column in self._columns.items():
            column.extend(values[name])
        for name, column in self._more.items():
            column.extend(more.get(name, np.full(count, np.nan)))
        self._refresh()

    # --- reading ----------------------------------------------------------------------------------

    def passing(self, chosen: Chosen) -> npt.NDArray[np.bool_]:
        """(n,): rows with at least this confidence, or of a mask over the model's boxes.

        What the user had a hand in always passes, what the user deleted never.
        """
        if isinstance(chosen, (int, float, np.integer, np.floating)):
            mask = self.scores >= np.float32(chosen)
        else:
            mask = np.zeros(len(self), bool)
            rows = slice(self.original) if self._in_order else self.model_rows
            mask[rows] = np.asarray(chosen, bool)[: self.original]
        mask |= self.touched
        mask &= self.alive
        return mask

    @property
    def status(self) -> npt.NDArray[Any]:
        """(n,) words."""
        return self.status_of(slice(None))

    def status_of(self, rows: Any) -> npt.NDArray[Any]:
        """(m,) words of some rows."""
        return np.array(self.words, dtype=object)[self.states[rows]]

    def features(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """Columns of a layer's table, (m,) each."""
        wide, high = (self.xyxy[rows, 2:] - self.xyxy[rows, :2]).T
        return {
            "id": self.ids[rows],
            "class": np.array(self.names, dtype=object)[self.labels[rows]],
            "confidence": self.scores[rows],
            "status": self.status_of(rows),
            "source": np.array(self.sources, dtype=object)[self.origin[rows]],
            "area": wide * high,
            **{name: values[rows] for name, values in self.columns.items()},
        }

    def defaults(self, label: int) -> dict[str, Any]:
        """The table's row of a box that the user is going to draw."""
        mine = {"id": -1, "class": self.names[label] if self.names else "", "confidence": 1.0}
        mine |= {"status": ADDED, "source": USER, "area": 0.0}
        return mine | dict.fromkeys(self.columns, np.nan)

    def label_of(self, name: str) -> int:
        """The number of a class, which is added if it is new."""
        if name not in self._place_of_name:
            self._place_of_name[name] = len(self.names)
            self.names.append(name)
        return self._place_of_name[name]

    def code_of(self, word: str) -> int:
        """The number of a status."""
        if word not in self.words:
            self.words.append(word)
        return self.words.index(word)

    # --- a review ---------------------------------------------------------------------------------

    def decide(
        self, status: npt.NDArray[Any], states: Sequence[str], labels: Rows, names: Sequence[str]
    ) -> None:
        """Take over a review of the model's boxes (n,): `status` places in `states`.

        The first of the states means not decided on: those stay as they were.
        """
        place = np.array([self.label_of(name) for name in names], np.int64)
        codes = np.array([0, *(self.code_of(word) for word in states[1:])], np.uint8)
        decided = status != 0
        changed = np.flatnonzero(decided | self.reviewed)
        rows = changed if self._in_order else self.model_rows[changed]
        if len(rows):
            self.own()
        self.labels[rows] = place[labels[changed]]
        free = ~self.touched[rows]
        self.states[rows[free]] = codes[status[changed[free]]]
        self.reviewed = decided
        self.version += 1
