"""Commit the user's edits of a layer to its box store, and transfer them to another store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.review.review import STATES, BoxEdit
from napari_beerlanet.ui.detections.box_store import (
    ADDED,
    EDITED,
    FOUND,
    BoxStore,
    OriginalBox,
    RowIndices,
)

_MOVE_TOLERANCE_PX = 1e-3  # pixels; less is rounding


def commit_edits(
    store: BoxStore,
    drawn: RowIndices,
    drawn_xyxy: npt.NDArray[Any],
    xyxy: npt.NDArray[Any],
    table: Mapping[str, Any],
) -> RowIndices | None:
    """Compare what was drawn into a layer with what it holds now, and store the difference.

    The rows `drawn` (m,) were drawn with the boxes `drawn_xyxy` (m, 4); `xyxy` (k, 4) and `table`
    are there now. Returns the rows (k,) of what is there, or None if nothing changed.
    """
    ids = np.asarray(table["id"], np.float64) if "id" in table else np.full(len(xyxy), np.nan)
    missing = {i: k for k, i in enumerate(store.ids[drawn].tolist())}
    known = np.where(np.isfinite(ids), ids, -1).astype(np.int64).tolist()
    at = np.array([missing.pop(i, -1) for i in known], np.int64)  # a copy is a new box
    moved = np.zeros(len(xyxy), bool)
    if len(drawn_xyxy):
        moved = np.abs(xyxy - drawn_xyxy[at]).max(axis=1) > _MOVE_TOLERANCE_PX
    rows, changed = np.empty(len(xyxy), np.int64), bool(missing)
    there = at >= 0
    rows[there] = drawn[at[there]]
    # Thousands are drawn and few are edited: all are compared at once, and those taken one by one.
    doubtful = ~there | moved
    doubtful[there] |= _table_differs(store, rows[there], table, np.flatnonzero(there))
    for k in np.flatnonzero(doubtful).tolist():
        if there[k]:
            changed |= _update_row(store, int(rows[k]), xyxy[k] if moved[k] else None, table, k)
        else:
            rows[k] = _append_drawn_box(store, xyxy[k], table, k)
            changed = True
    deleted = drawn[list(missing.values())]
    for row in deleted:
        _save_original(store, int(row))
    store.alive[deleted], store.touched[deleted] = False, True
    store.version += changed
    return rows if changed else None


def transfer_edits(old: BoxStore, new: BoxStore) -> None:
    """Apply the edits of one store to another, whose model boxes are newer.

    A box that the user edited or deleted replaces the same box of the model; where the model has it
    no longer, the edited box becomes one of the user's own. What is edited in both stays.
    """
    new.make_writable()
    edited = new.touched.copy()
    there = {new.xyxy[row].tobytes() for row in np.flatnonzero(edited & new.alive)}
    rows = np.flatnonzero(old.touched)
    places = _matching_rows([_original_box(old, int(row)) for row in rows], new)
    for row, at in zip(rows.tolist(), places, strict=True):
        label = new.label_index(old.names[old.labels[row]])
        if at is None:
            if old.alive[row] and old.xyxy[row].tobytes() not in there:
                _append_user_box(old, row, label, new)
            continue
        if edited[at]:
            continue
        _save_original(new, at)
        new.xyxy[at], new.labels[at] = old.xyxy[row], label
        if old.type_names:
            new.set_type_codes(np.array([at]), new.type_code(_type_of_row(old, row)))
        new.states[at] = new.status_code(old.status_names[old.states[row]])
        new.alive[at], new.touched[at] = old.alive[row], True
    new.version += 1


def edits_of(store: BoxStore) -> list[BoxEdit]:
    """What the user has edited, for a file."""
    edits = []
    for row in np.flatnonzero(store.touched).tolist():
        original = _original_box(store, row)
        if original is not None or store.alive[row]:
            edits.append(
                BoxEdit(
                    None if original is None else original.tolist(),
                    store.xyxy[row].tolist() if store.alive[row] else None,
                    store.names[store.labels[row]],
                    float(store.scores[row]),
                    store.status_names[store.states[row]],
                    _type_of_row(store, row),
                )
            )
    return edits


def store_of_edits(edits: Sequence[BoxEdit]) -> BoxStore:
    """A store of nothing but edited boxes, to be transferred to another; the inverse."""
    names = list(dict.fromkeys(edit.name for edit in edits))
    labels = {name: k for k, name in enumerate(names)}
    store = BoxStore(Detections.empty(names))
    for edit in edits:
        columns = {
            "xyxy": np.array([edit.was or edit.box], np.float32),
            "labels": [labels[edit.name]],
            "scores": [edit.score],
            "type_codes": [store.type_code(edit.cell_type)],
        }
        store.append(columns, {}, by_user=True)
        known = edit.status in (ADDED, *STATES)
        store.states[-1] = store.status_code(edit.status if known else EDITED)
        if edit.was is not None:
            store.origin[-1] = 0
            _save_original(store, len(store) - 1)
            store.alive[-1] = edit.box is not None
            store.xyxy[-1] = edit.box or edit.was
    return store


def _append_user_box(old: BoxStore, row: int, label: int, new: BoxStore) -> None:
    """Copy an edited box as one of the user's own."""
    columns = {"xyxy": old.xyxy[row][None], "labels": [label], "scores": old.scores[row][None]}
    columns["type_codes"] = [new.type_code(_type_of_row(old, row))]
    new.append(columns, {}, by_user=True)
    new.states[-1] = new.status_code(old.status_names[old.states[row]])


def _original_box(store: BoxStore, row: int) -> npt.NDArray[np.float32] | None:
    """The box as the model detected it, None where the user drew it."""
    if store.origin[row]:
        return None
    return store.originals[row].box if row in store.originals else store.xyxy[row]


def _matching_rows(boxes: list[Any], store: BoxStore) -> list[int | None]:
    """For each box the row of the identical box of the model, if there is one."""
    lefts = np.array([box[0] for box in boxes if box is not None], np.float32)
    near = np.flatnonzero(np.isin(store.xyxy[: store.model_count, 0], lefts))
    rows = {store.xyxy[row].tobytes(): int(row) for row in near}
    return [None if box is None else rows.get(box.tobytes()) for box in boxes]


def rows_of_boxes(store: BoxStore, near: RowIndices, boxes: npt.NDArray[Any]) -> RowIndices:
    """Those of the rows `near` whose box, as the model detected it, is one of `boxes` (m, 4)."""
    wanted = {box.tobytes() for box in np.asarray(boxes, np.float32)}
    rows = []
    for row in near.tolist():
        box = _original_box(store, row)
        if box is not None and box.tobytes() in wanted:
            rows.append(row)
    return np.array(rows, np.int64)


def _save_original(store: BoxStore, row: int) -> None:
    if not store.origin[row] and row not in store.originals:
        store.originals[row] = OriginalBox(
            store.xyxy[row].copy(), int(store.labels[row]), int(store.type_codes[row])
        )


def _type_of_row(store: BoxStore, row: int) -> str:
    return str(store.types_of([row])[0])


def _table_differs(
    store: BoxStore, rows: RowIndices, table: Mapping[str, Any], places: RowIndices
) -> npt.NDArray[np.bool_]:
    """(m,) whether class, type or status at `places` (m,) of a table may differ from `rows`."""
    differs = np.zeros(len(rows), bool)
    expected: dict[str, Callable[[], npt.NDArray[Any]]] = {
        "class": lambda: np.array(store.names, object)[store.labels[rows]],
        TYPE_COLUMN: lambda: store.types_of(rows),
        "status": lambda: store.status_of(rows),
    }
    for name, words in expected.items():
        if name in table:
            here = np.asarray(table[name], object)[places].tolist()
            pairs = zip(here, words().tolist(), strict=True)
            # A table may hold anything, such as values that cannot be compared.
            differs |= np.array([not isinstance(a, str) or a != b for a, b in pairs], bool)
    return differs


def _update_row(store: BoxStore, row: int, box: Any, table: Mapping[str, Any], k: int) -> bool:
    """Store one row's box, class, type and status; whether anything changed."""
    new = _label_from_table(store, table, k, int(store.labels[row]))
    cell_type = _type_from_table(store, table, k, int(store.type_codes[row]))
    previous = store.status_names[store.states[row]]
    status = str(table["status"][k]) if "status" in table else previous
    same = new == store.labels[row] and cell_type == store.type_codes[row]
    if box is None and same and status == previous:
        return False
    _save_original(store, row)
    store.make_writable()
    if box is not None:
        store.xyxy[row] = box
    store.labels[row], store.touched[row], store.alive[row] = new, True, True
    store.set_type_codes(np.array([row]), cell_type)
    store.states[row] = store.status_code(EDITED if status == FOUND else status)
    return True


def _append_drawn_box(store: BoxStore, box: Any, table: Mapping[str, Any], k: int) -> int:
    """A box that the user drew."""
    columns = {
        "xyxy": np.asarray(box, np.float32)[None],
        "labels": [_label_from_table(store, table, k, 0)],
        "scores": [1.0],
        "type_codes": [_type_from_table(store, table, k, 0)],
    }
    store.append(columns, {}, by_user=True)
    return len(store) - 1


def _label_from_table(store: BoxStore, table: Mapping[str, Any], k: int, default: int) -> int:
    """The label of the class that the table names; a new name becomes a new class."""
    name = table["class"][k] if "class" in table else None
    return store.label_index(name) if isinstance(name, str) and name else default


def _type_from_table(store: BoxStore, table: Mapping[str, Any], k: int, default: int) -> int:
    """The code of the type that the table names; a new name becomes a new type."""
    name = table[TYPE_COLUMN][k] if TYPE_COLUMN in table else None
    return store.type_code(name) if isinstance(name, str) else default


def finalised_store(old: BoxStore | None, detections: Detections) -> BoxStore:
    """A store of the model's final detections, with the edits that the user made meanwhile."""
    new = BoxStore(detections)
    if old is not None and old.touched.any():
        transfer_edits(old, new)
    return new
