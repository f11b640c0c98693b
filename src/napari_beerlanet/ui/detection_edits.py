"""What the user did to boxes in a layer, taken over into the store of all boxes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.ui.detection_store import EDITED, FOUND, BoxStore, Rows, Was

_STIRRED = 1e-3  # pixels; less is rounding


def take_over(
    store: BoxStore,
    shown: Rows,
    put: npt.NDArray[Any],
    boxes: npt.NDArray[Any],
    table: Mapping[str, Any],
) -> Rows | None:
    """Compare what a layer was given with what it holds now, and keep the difference.

    `shown` (m,) rows with boxes `put` (m, 4) were given; `boxes` (k, 4) and `table` are there
    now. Returns the rows (k,) of what is there, or None if nothing changed.
    """
    ids = np.asarray(table["id"]) if "id" in table else np.full(len(boxes), -1)
    place = {int(i): k for k, i in enumerate(store.ids[shown])}
    at = [place.pop(int(i), -1) if np.isfinite(i) else -1 for i in ids]  # a copy is a new box
    moved = np.abs(boxes - put[at]).max(axis=1) > _STIRRED if len(put) else np.empty(0)
    rows, changed = np.empty(len(boxes), np.int64), bool(place)
    for k, known in enumerate(at):
        if known >= 0:
            rows[k] = shown[known]
            changed |= _revise(store, int(rows[k]), boxes[k] if moved[k] else None, table, k)
        else:
            rows[k] = _append(store, boxes[k], table, k)
            changed = True
    gone = shown[list(place.values())]
    for row in gone:
        _remember(store, int(row))
    store.alive[gone], store.touched[gone] = False, True
    store.version += changed
    return rows if changed else None


def carry_over(old: BoxStore, new: BoxStore) -> None:
    """Put the user's hand in one store into another, whose model boxes are later ones.

    A box that the user changed or deleted takes the place of the same box of the model; where the
    model has it no longer, what the user made of it is a box of the user's own.
    """
    new.own()
    rows = np.flatnonzero(old.touched)
    places = _same_boxes([_was(old, int(row)) for row in rows], new)
    for row, at in zip(rows.tolist(), places, strict=True):
        label = new.label_of(old.names[old.labels[row]])
        if at is None:
            if old.alive[row]:
                _own(old, row, label, new)
            continue
        _remember(new, at)
        new.xyxy[at], new.labels[at] = old.xyxy[row], label
        new.states[at] = new.code_of(old.words[old.states[row]])
        new.alive[at], new.touched[at] = old.alive[row], True
    new.version += 1


def _own(old: BoxStore, row: int, label: int, new: BoxStore) -> None:
    """A box of the user's in another store."""
    columns = {"xyxy": old.xyxy[row][None], "labels": [label], "scores": old.scores[row][None]}
    new.append(columns, {}, by_user=True)
    new.states[-1] = new.code_of(old.words[old.states[row]])


def _was(store: BoxStore, row: int) -> npt.NDArray[np.float32] | None:
    """The box as the model found it, None where the user made it."""
    if store.origin[row]:
        return None
    return store.was[row].box if row in store.was else store.xyxy[row]


def _same_boxes(boxes: list[Any], store: BoxStore) -> list[int | None]:
    """For each box the row of the store's same one, if there is one."""
    lefts = np.array([box[0] for box in boxes if box is not None], np.float32)
    near = np.flatnonzero(np.isin(store.xyxy[: store.original, 0], lefts))
    rows = {store.xyxy[row].tobytes(): int(row) for row in near}
    return [None if box is None else rows.get(box.tobytes()) for box in boxes]


def rows_at(store: BoxStore, near: Rows, boxes: npt.NDArray[Any]) -> Rows:
    """Those of the rows `near` whose box, as the model found it, is one of `boxes` (m, 4)."""
    wanted = {box.tobytes() for box in np.asarray(boxes, np.float32)}
    found = []
    for row in near.tolist():
        box = _was(store, row)
        if box is not None and box.tobytes() in wanted:
            found.append(row)
    return np.array(found, np.int64)


def _remember(store: BoxStore, row: int) -> None:
    if not store.origin[row] and row not in store.was:
        store.was[row] = Was(store.xyxy[row].copy(), int(store.labels[row]))


def _revise(store: BoxStore, row: int, box: Any, table: Mapping[str, Any], k: int) -> bool:
    """Take over one row's box and what the table says of it; whether anything was new."""
    new = _label(store, table, k, int(store.labels[row]))
    had = store.words[store.states[row]]
    status = str(table["status"][k]) if "status" in table else had
    if box is None and new == store.labels[row] and status == had:
        return False
    _remember(store, row)
    store.own()
    if box is not None:
        store.xyxy[row] = box
    store.labels[row], store.touched[row], store.alive[row] = new, True, True
    store.states[row] = store.code_of(EDITED if status == FOUND else status)
    return True


def _append(store: BoxStore, box: Any, table: Mapping[str, Any], k: int) -> int:
    """A box that the user made."""
    columns = {
        "xyxy": np.asarray(box, np.float32)[None],
        "labels": [_label(store, table, k, 0)],
        "scores": [1.0],
    }
    store.append(columns, {}, by_user=True)
    return len(store) - 1


def _label(store: BoxStore, table: Mapping[str, Any], k: int, otherwise: int) -> int:
    """The label of the class that the table names; a new name becomes a new class."""
    name = table["class"][k] if "class" in table else None
    return store.label_of(name) if isinstance(name, str) and name else otherwise


def settled(old: BoxStore | None, found: Detections) -> BoxStore:
    """A store of what the model found in the end, with what the user did meanwhile."""
    new = BoxStore(found)
    if old is not None and old.touched.any():
        carry_over(old, new)
    return new
