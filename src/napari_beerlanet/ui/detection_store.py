"""All boxes of one image: what the model found, and what the user made of it.

A layer shows a part of them. What the user moves, adds, deletes or renames there is taken over
here, so that it outlasts the next change of view or threshold.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import Detections

FOUND, EDITED, ADDED = "found", "edited", "added"
"""What `status` says of a box: as the model found it, changed by the user, made by the user."""

_USER = "user"
_STIRRED = 1e-3  # pixels; less is rounding

Rows = npt.NDArray[np.int64]
"""Numbers of rows of the store."""


class BoxStore:
    """Boxes `xyxy` (n, 4) float32 in pixels with `labels` into `names`, `scores` and more columns.

    A row is never removed: `alive` (n,) is false where the user deleted a box, `touched` where the
    user had a hand in it. `ids` (n,) stay; those of the model's boxes are their places among the
    candidates of its `Detections`.
    """

    def __init__(self, detections: Detections) -> None:
        everything = detections.candidates if detections.candidates is not None else detections
        n = len(everything)
        self.names = list(everything.names)
        self.xyxy = everything.xyxy.copy()
        self.labels = everything.labels.copy()
        self.scores = everything.scores.copy()
        self.ids = np.arange(n, dtype=np.int64)
        self.status = np.full(n, FOUND, dtype=object)
        self.source = np.full(n, detections.report.get("model") or "model", dtype=object)
        self.alive, self.touched = np.ones(n, bool), np.zeros(n, bool)
        self.columns = {
            name: values.copy()
            for name, values in everything.columns.items()
            if name.endswith(" mean")
        }
        self.original = n
        self.reviewed = np.zeros(n, bool)

    def __len__(self) -> int:
        return len(self.xyxy)

    def passing(self, chosen: float | npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        """(n,): rows with at least this confidence, or of a mask over the model's boxes.

        What the user had a hand in always passes, what the user deleted never.
        """
        if isinstance(chosen, (int, float, np.integer, np.floating)):
            mask = self.scores >= np.float32(chosen)
        else:
            mask = np.zeros(len(self), bool)
            mask[: self.original] = np.asarray(chosen, bool)[: self.original]
        return (mask | self.touched) & self.alive

    def features(self, rows: Rows) -> dict[str, npt.NDArray[Any]]:
        """Columns of a layer's table, (m,) each."""
        wide, high = (self.xyxy[rows, 2:] - self.xyxy[rows, :2]).T
        return {
            "id": self.ids[rows],
            "class": np.array(self.names, dtype=object)[self.labels[rows]],
            "confidence": self.scores[rows],
            "status": self.status[rows],
            "source": self.source[rows],
            "area": wide * high,
            **{name: values[rows] for name, values in self.columns.items()},
        }

    def defaults(self, label: int) -> dict[str, Any]:
        """The table's row of a box that the user is going to draw."""
        mine = {"id": -1, "class": self.names[label] if self.names else "", "confidence": 1.0}
        mine |= {"status": ADDED, "source": _USER, "area": 0.0}
        return mine | dict.fromkeys(self.columns, np.nan)

    def decide(
        self, words: npt.NDArray[Any], labels: Rows, names: Sequence[str], open_: str
    ) -> None:
        """Take over a review of the model's boxes (n,); `open_` means not decided on."""
        for name in names:
            if name not in self.names:
                self.names.append(name)
        place = np.array([self.names.index(name) for name in names], np.int64)
        decided = words != open_
        changed = decided | self.reviewed
        self.labels[: self.original][changed] = place[labels[changed]]
        untouched = changed & ~self.touched[: self.original]
        self.status[: self.original][untouched] = np.where(decided, words, FOUND)[untouched]
        self.reviewed = decided

    # --- what the user did ------------------------------------------------------------------------

    def take_over(
        self, shown: Rows, put: npt.NDArray[Any], boxes: npt.NDArray[Any], table: Mapping[str, Any]
    ) -> Rows | None:
        """Compare what a layer was given with what it holds now, and keep the difference.

        `shown` (m,) rows with boxes `put` (m, 4) were given; `boxes` (k, 4) and `table` are there
        now. Returns the rows (k,) of what is there, or None if nothing changed.
        """
        ids = np.asarray(table["id"]) if "id" in table else np.full(len(boxes), -1)
        place = {int(i): k for k, i in enumerate(self.ids[shown])}
        at = [place.pop(int(i), -1) if np.isfinite(i) else -1 for i in ids]  # a copy is a new box
        moved = np.abs(boxes - put[at]).max(axis=1) > _STIRRED if len(put) else np.empty(0)
        rows, changed = np.empty(len(boxes), np.int64), bool(place)
        for k, known in enumerate(at):
            if known >= 0:
                rows[k] = shown[known]
                changed |= self._revise(int(rows[k]), boxes[k] if moved[k] else None, table, k)
            else:
                rows[k] = self._append(boxes[k], table, k)
                changed = True
        gone = shown[list(place.values())]
        self.alive[gone], self.touched[gone] = False, True
        return rows if changed else None

    def _revise(self, row: int, box: Any, table: Mapping[str, Any], k: int) -> bool:
        """Take over one row's box and what the table says of it; whether anything was new."""
        new = self._label_of(table, k, int(self.labels[row]))
        status = str(table["status"][k]) if "status" in table else self.status[row]
        if box is None and new == self.labels[row] and status == self.status[row]:
            return False
        if box is not None:
            self.xyxy[row] = box
        self.labels[row], self.touched[row] = new, True
        if status == FOUND:
            status = EDITED
        self.status[row] = status
        return True

    def _append(self, box: Any, table: Mapping[str, Any], k: int) -> int:
        """A box that the user made."""
        row = len(self)
        new_id = int(self.ids.max(initial=-1)) + 1
        values: dict[str, Any] = {
            "xyxy": np.asarray(box, np.float32)[None],
            "labels": self._label_of(table, k, 0),
            "scores": np.float32(1),
            "ids": new_id,
            "status": ADDED,
            "source": _USER,
            "alive": True,
            "touched": True,
        }
        for name, value in values.items():
            old = getattr(self, name)
            added = value if name == "xyxy" else np.array([value], dtype=old.dtype)
            setattr(self, name, np.concatenate([old, added]))
        self.columns = {
            name: np.append(old, np.float32(np.nan)) for name, old in self.columns.items()
        }
        return row

    def _label_of(self, table: Mapping[str, Any], k: int, otherwise: int) -> int:
        """The label of the class that the table names; a new name becomes a new class."""
        name = table["class"][k] if "class" in table else None
        if not isinstance(name, str) or not name:
            return otherwise
        if name not in self.names:
            self.names.append(name)
        return self.names.index(name)
