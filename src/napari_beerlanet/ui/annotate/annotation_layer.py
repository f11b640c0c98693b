"""Annotated boxes as a napari Shapes layer: class, type, status, id in its features, and undo.

The layer is the single source of truth. Each change, by napari's own tools or by our keys and
buttons, is detected, tidied, coloured and recorded in the undo history.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from napari.layers import Shapes
from psygnal import Signal

from napari_beerlanet.core.boxes.annotations import (
    CLASSIFIED,
    CONFIRMED,
    COPIED,
    CORRECTED,
    DRAWN,
    STATUSES,
    UNREVIEWED_TYPES,
    Annotations,
)
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.history import History, ObjectState, objects_by_id
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.ui.annotate.classes import ClassList, TypeList
from napari_beerlanet.ui.viewer.box_shapes import ShapeBoxes, corners_from_boxes, read_shape_boxes
from napari_beerlanet.ui.viewer.layers import UpdateGuard
from napari_beerlanet.ui.viewer.planes import PlaneIndex

NEW_BOX_ID = -1
"""The id of a box that has none yet."""

_UNREVIEWED_OPACITY = 0.13  # of the face of boxes that nobody has reviewed
_MIN_DRAWN_PX = 5  # on the screen; a box that is smaller both ways was not drawn on purpose
# Of a type's name above its box: as far from the black canvas as from a white slide (4.5 : 1).
_LABEL_SIZE, _LABEL_COLOUR = 9, "#008577"
_EDIT_NAMES = {"added": "draw", "changed": "move", "removed": "delete"}

ShapeGeometry = tuple[npt.NDArray[Any], str]
"""Corners (k, D) of a shape, and its kind."""


class AnnotationLayer:
    """The boxes of one image (H, W, …), all planes of a stack; `width` is that of their edges.

    While `types` are active, boxes are coloured and labelled by their type. `changed` is emitted
    when there is something to save. `notes` are sentences on shapes that are not boxes. The
    constructor connects to the layer, the classes and the types until `close`.
    """

    changed = Signal()

    def __init__(
        self,
        layer: Shapes,
        classes: ClassList,
        shape: Sequence[int],
        width: float,
        types: TypeList | None = None,
    ) -> None:
        self.layer, self.classes, self.width = layer, classes, width
        self.types = TypeList() if types is None else types
        self.shape = int(shape[0]), int(shape[1])
        self.history = History()
        self.notes: list[str] = []
        self._updating = UpdateGuard()
        self._last_id = -1  # of any box so far: undo may bring back a deleted one
        self._drawn_shapes: dict[tuple[int, Any], ShapeGeometry] = {}
        self._last = Annotations.empty(classes.names, self.shape)
        self._set_defaults()
        self._commit("", record=False)
        layer.events.data.connect(self._data_changed)
        layer.events.features.connect(self._features_changed)
        classes.renamed.connect(self._rename)
        classes.changed.connect(self._paint)
        classes.current_changed.connect(self._set_defaults)
        self.types.renamed.connect(self._rename_type)
        self.types.changed.connect(self._paint)
        self.types.current_changed.connect(self._set_defaults)
        self.types.active_changed.connect(self._show_types)
        self._show_types()

    def close(self) -> None:
        """Disconnect from the layer and the classes."""
        self.layer.events.data.disconnect(self._data_changed)
        self.layer.events.features.disconnect(self._features_changed)
        self.classes.renamed.disconnect(self._rename)
        self.classes.changed.disconnect(self._paint)
        self.classes.current_changed.disconnect(self._set_defaults)
        self.types.renamed.disconnect(self._rename_type)
        self.types.changed.disconnect(self._paint)
        self.types.current_changed.disconnect(self._set_defaults)
        self.types.active_changed.disconnect(self._show_types)

    # --- reading ----------------------------------------------------------------------------------

    def all(self) -> Annotations:
        """The boxes of all planes."""
        return self._read()[0]

    def of_plane(self, plane: PlaneIndex) -> Annotations:
        """The boxes of one plane, without regions."""
        annotations, boxes = self._read()
        return annotations[(boxes.planes == np.array(plane, np.int64)).all(axis=1)]

    def by_plane(self) -> dict[PlaneIndex, Annotations]:
        """The boxes of each plane that has any."""
        annotations, boxes = self._read()
        places = {tuple(plane) for plane in boxes.planes.tolist()}
        return {p: annotations[(boxes.planes == np.array(p)).all(axis=1)] for p in sorted(places)}

    def planes(self) -> list[PlaneIndex]:
        """Planes that have boxes, as of the last change."""
        return sorted({tuple(plane) for plane in self._planes.tolist()})

    def counts(self) -> dict[str, int]:
        """How many boxes there are of each class, as of the last change."""
        return self._last.counts()

    def type_counts(self) -> dict[str, int]:
        """How many boxes there are of each type, as of the last change."""
        return self._last.type_counts()

    def unreviewed(self) -> tuple[int, int]:
        """How many boxes are copies that nobody has reviewed, and of how many others the type.

        As of the last change.
        """
        last = self._last
        types = last.reviewed & ~last.type_reviewed
        return int((~last.reviewed).sum()), int(types.sum())

    # --- editing: keys and buttons ----------------------------------------------------------------

    def set_class(self, name: str) -> None:
        """Give the selected boxes a class; one that has it already is thereby confirmed."""
        if name in self.classes.names:
            self._set_feature("class", name, "change the class")

    def set_type(self, name: str) -> None:
        """Give the selected boxes a type, "" for none; one that has it is thereby confirmed."""
        if name in self.types.names or not name:
            self._set_feature("type", name, "change the type")

    def _set_feature(self, column: str, name: str, what: str) -> None:
        selected = self._selected()
        if not selected:
            return
        table = self.layer.features.copy()
        same = (table[column] == name).to_numpy()[selected]
        old = table["status"].to_numpy()[selected]
        new = np.where(same, CONFIRMED, CORRECTED)
        # Another class says nothing about the type.
        stays = (old == DRAWN) | ((old == CLASSIFIED) & (column == "class"))
        table.loc[selected, "status"] = np.where(stays, old, new)
        table.loc[selected, column] = name
        self._set_features(table)
        self._commit(what, correct=False)

    def select_inside(self, region: Region, plane: PlaneIndex) -> int:
        """Select the boxes of a plane whose centres lie in a region; returns how many."""
        boxes = read_shape_boxes(self.layer.data, self.layer.shape_type)
        centres = (boxes.xyxy[:, :2] + boxes.xyxy[:, 2:]) / 2
        here = (boxes.planes == np.array(plane, np.int64)).all(axis=1)
        inside = here & region.contains(centres)
        self.layer.mode = "select"
        self.layer.selected_data = {int(k) for k in boxes.which[inside]}
        return int(inside.sum())

    def confirm(self) -> None:
        """Mark the selected boxes as confirmed."""
        selected = self._selected()
        if selected:
            table = self.layer.features.copy()
            table.loc[selected, "status"] = CONFIRMED
            self._set_features(table)
            self._commit("confirm", correct=False)

    def append(self, new: Annotations, plane: PlaneIndex, what: str) -> int:
        """Add boxes to a plane with new ids; `what` is the label of the undo step."""
        numbers = self._last_id + 1 + np.arange(len(new))
        return self.add(replace(new, ids=numbers), plane, what)

    def add(self, new: Annotations, plane: PlaneIndex, what: str = "") -> int:
        """Add boxes to a plane and keep their ids; `what` is the label of the undo step."""
        self.classes.add([new.names[k] for k in np.unique(new.labels)])
        self.types.add(new.type_counts())
        self._append(
            [(corners, "rectangle") for corners in corners_from_boxes(new.xyxy, plane)],
            [new.names[k] for k in new.labels],
            list(new.status),
            new.object_ids.tolist(),
            list(new.types),
        )
        self._commit(what, record=bool(what), correct=False)
        return len(new)

    def clear(self) -> None:
        """Remove all boxes and the undo history."""
        with self._updating:
            self.layer.remove(list(range(self.layer.nshapes)))
        self.history.clear()
        self._commit("", record=False)

    def undo(self) -> str:
        """Undo the last step; returns its label, "" if there is none."""
        what = self.history.undo_label
        self._restore(self.history.undo(self.all()))
        return what

    def redo(self) -> str:
        """Redo the step that was undone last; returns its label."""
        what = self.history.redo_label
        self._restore(self.history.redo(self.all()))
        return what

    def _read(self) -> tuple[Annotations, ShapeBoxes]:
        boxes = read_shape_boxes(self.layer.data, self.layer.shape_type)
        table, which = self.layer.features, boxes.which
        names = list(dict.fromkeys([*self.classes.names, *table["class"]]))
        place = {name: k for k, name in enumerate(names)}
        annotations = Annotations(
            boxes.xyxy,
            np.array([place[name] for name in table["class"].to_numpy()[which]], np.int64),
            names,
            table["id"].to_numpy()[which].astype(np.int64),
            table["status"].to_numpy()[which].tolist(),
            image_shape=self.shape,
            types=table["type"].to_numpy()[which].tolist(),
        )
        return annotations, boxes

    # --- writing to the layer ---------------------------------------------------------------------

    def _append(
        self,
        shapes: Sequence[ShapeGeometry],
        names: list[str],
        status: list[str],
        ids: list[int],
        types: list[str],
    ) -> None:
        if not shapes:
            return
        edges, faces = self._colours(names, types, status)
        first = self.layer.nshapes
        with self._updating:
            self.layer.add(
                [corners for corners, _ in shapes],
                shape_type=[kind for _, kind in shapes],
                edge_width=self.width,
                edge_color=edges,
                face_color=faces,
            )
        table = self.layer.features.copy()
        rows = range(first, first + len(shapes))
        table.loc[rows, "class"], table.loc[rows, "status"] = names, status
        table.loc[rows, "id"], table.loc[rows, "type"] = ids, types
        self._set_features(table)

    def _set_features(self, table: Any) -> None:
        if not same_features(table, self.layer.features):
            with self._updating:
                self.layer.features = table
                self._set_defaults()

    def _set_defaults(self) -> None:
        """Set the features and colour of the next box that is drawn."""
        with self._updating:
            ours = default_features(self.classes, self.types)
            others = self.layer.feature_defaults.iloc[0]
            columns = self.layer.features.columns
            self.layer.feature_defaults = {c: ours.get(c, others.get(c)) for c in columns}
            if not self.layer.selected_data and self.classes.current:
                edges, _ = self._colours([ours["class"]], [ours["type"]], [DRAWN])
                self.layer.current_edge_color = edges[0]

    def _colours(
        self, names: Sequence[str], types: Sequence[str], status: Sequence[str]
    ) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """(n, 4) colours of edges and of faces: by type while types are active, else by class.

        Faces are faint of boxes of which nobody has reviewed copy or type, else transparent.
        """
        edges = self.types.rgba(types) if self.types.active else self.classes.rgba(names)
        faces = edges.copy()
        unreviewed = np.array([s in UNREVIEWED_TYPES for s in status], bool)
        faces[:, 3] = np.where(unreviewed, _UNREVIEWED_OPACITY, 0)
        return edges, faces

    def _paint(self) -> None:
        """Update the colours of boxes that do not match their class, type and status."""
        table = self.layer.features
        types = table["type"].tolist() if "type" in table else [""] * len(table)  # while untidy
        types = [value if isinstance(value, str) else "" for value in types]
        edges, faces = self._colours(table["class"].tolist(), types, table["status"].tolist())
        with self._updating:
            _recolour(self.layer, "edge", edges)
            _recolour(self.layer, "face", faces)

    def _show_types(self) -> None:
        """Label the boxes with their types while keys set them, and colour them so."""
        if self.types.active:
            with self._updating:
                self.layer.text = {
                    "string": "{type}",
                    "size": _LABEL_SIZE,
                    "color": _LABEL_COLOUR,
                    "anchor": "upper_left",
                }
        elif self.layer.text.visible:
            self.layer.text.visible = False
        self._set_defaults()
        self._paint()

    def _rename(self, old: str, new: str) -> None:
        """A class was renamed; the undo history goes, as it holds the old name."""
        table = self.layer.features.copy()
        table.loc[table["class"] == old, "class"] = new
        self._set_features(table)
        self.history.clear()
        self._commit("", record=False, correct=False)

    def _rename_type(self, old: str, new: str) -> None:
        """A type was renamed; the undo history goes, as it holds the old name."""
        table = self.layer.features.copy()
        table.loc[table["type"] == old, "type"] = new
        self._set_features(table)
        self.history.clear()
        self._commit("", record=False, correct=False)

    def _selected(self) -> list[int]:
        return sorted(int(k) for k in self.layer.selected_data)

    def _restore(self, wanted: Annotations) -> None:
        """Change what differs; shapes are restored as they were drawn, ellipses as ellipses."""
        now, then = objects_by_id(self.all()), objects_by_id(wanted)
        self.classes.add(wanted.names)
        self.types.add(wanted.type_counts())
        redrawn = {i for i in now if i not in then or now[i][0] != then[i][0]}
        numbers = self.layer.features["id"].to_numpy()
        with self._updating:
            self.layer.selected_data = set()
            self.layer.remove([k for k, i in enumerate(numbers) if int(i) in redrawn])
        new = [i for i in then if i not in now or i in redrawn]
        shapes = [self._drawn_shapes[i, then[i][0]] for i in new]
        names, status = [then[i][1] for i in new], [then[i][2] for i in new]
        self._append(shapes, names, status, new, [then[i][3] for i in new])
        table = self.layer.features.copy()
        for place, name in ((1, "class"), (2, "status"), (3, "type")):
            pairs = zip(table["id"].tolist(), table[name].tolist(), strict=True)
            values = [then[i][place] if i in then else value for i, value in pairs]
            table[name] = np.array(values, dtype=object)
        self._set_features(table)
        self._commit("", record=False, correct=False)

    # --- changes of the layer ---------------------------------------------------------------------

    def _data_changed(self, event: Any) -> None:
        edit = _EDIT_NAMES.get(str(getattr(event, "action", "")))
        if self._updating or edit is None:
            return
        if edit == "draw" and self.layer._is_creating:
            self.layer.selected_data = set()  # so that the next key press is for the next box
            if self._is_slip(self.layer.data[-1]):
                with self._updating:
                    self.layer.remove([self.layer.nshapes - 1])
                return
        self._commit(edit)

    def _is_slip(self, corners: npt.NDArray[Any]) -> bool:
        """Whether a shape is a click rather than drawn: napari makes a small one of it."""
        sides = (corners.max(axis=0) - corners.min(axis=0))[-2:]
        return bool((sides < _MIN_DRAWN_PX * self.layer.scale_factor).all())

    def _features_changed(self, event: Any = None) -> None:
        if not self._updating and not self.layer._is_creating:
            self._commit("edit the features")

    def _commit(self, what: str, record: bool = True, correct: bool = True) -> None:
        """Tidy the features, compare with the last state, record the change and emit `changed`."""
        count = self.layer.nshapes
        self._set_features(
            tidy_features(self.layer.features, count, self.classes, self._last_id, self.types)
        )
        now, boxes = self._read()
        old, new = objects_by_id(self._last), objects_by_id(now)
        if correct and self._mark_corrected(old, new):
            now, boxes = self._read()
            new = objects_by_id(now)
        self._paint()
        self.notes, self._planes = boxes.notes, boxes.planes
        self._last_id = max(self._last_id, *new, -1)
        self._cache_shapes(new, boxes)
        before, self._last = self._last, now
        if old == new:
            return
        if record and what:
            self.history.record(what, before, now)
        self.changed.emit()

    def _mark_corrected(self, old: dict[int, ObjectState], new: dict[int, ObjectState]) -> bool:
        """Copied boxes that the user has changed get the status "corrected"."""
        moved = {i for i in new if i in old and new[i][2] == COPIED and new[i][:2] != old[i][:2]}
        if not moved:
            return False
        table = self.layer.features.copy()
        table.loc[table["id"].isin(moved), "status"] = CORRECTED
        self._set_features(table)
        return True

    def _cache_shapes(self, now: dict[int, ObjectState], boxes: ShapeBoxes) -> None:
        """Keep each shape as it was drawn, so that undo restores an ellipse as an ellipse."""
        data, kinds = self.layer.data, self.layer.shape_type
        for (i, entry), k in zip(now.items(), boxes.which, strict=True):
            if (i, entry[0]) not in self._drawn_shapes:
                self._drawn_shapes[i, entry[0]] = np.array(data[k]), str(kinds[k])


def copy_of_detections(
    detections: Detections, classes: ClassList, shape: tuple[int, int]
) -> Annotations:
    """Detections as annotations to review; those below the threshold are not copied."""
    visible = replace(detections, candidates=None)
    return Annotations.empty(classes.names, shape).with_detections(visible)


def empty_features() -> dict[str, npt.NDArray[Any]]:
    """The feature columns of a layer without shapes."""
    nothing = np.array([], dtype=object)
    return {
        "class": nothing,
        "status": nothing.copy(),
        "id": np.array([], np.int64),
        "type": nothing.copy(),
    }


def default_features(classes: ClassList, types: TypeList) -> dict[str, Any]:
    """The features of the next box that is drawn; it has a type only while keys set types."""
    of_type = types.current if types.active else None
    return {
        "class": classes.current or "",
        "status": DRAWN,
        "id": NEW_BOX_ID,
        "type": of_type or "",
    }


def tidy_features(
    table: Any, count: int, classes: ClassList, last: int, types: TypeList
) -> pd.DataFrame:
    """The features with a class, a valid status, a unique id and a type in each of `count` rows.

    Users, pasting and other plugins may leave anything there. New ids continue after `last`; of
    duplicate ids the first stays. A new class is added to the classes, a new type to the types.
    """
    tidy = pd.DataFrame(table).reset_index(drop=True).reindex(range(count))
    defaults = default_features(classes, types)
    for name, value in defaults.items():
        if name not in tidy:
            tidy[name] = pd.Series([value] * count, dtype=np.int64 if name == "id" else object)
    names = [_valid_class_name(value, str(defaults["class"])) for value in tidy["class"]]
    classes.add(names)
    tidy["class"] = pd.Series(names, dtype=object)
    statuses = [value if value in STATUSES else DRAWN for value in tidy["status"]]
    tidy["status"] = pd.Series(statuses, dtype=object)
    tidy["id"] = _unique_ids(tidy["id"].tolist(), last)
    of_boxes = [" ".join(value.split()) if isinstance(value, str) else "" for value in tidy["type"]]
    types.add(of_boxes)
    tidy["type"] = pd.Series(of_boxes, dtype=object)
    return tidy


def same_features(a: Any, b: Any) -> bool:
    """Whether two feature tables are equal."""
    return list(a.columns) == list(b.columns) and len(a) == len(b) and bool(a.equals(b))


def _valid_class_name(value: Any, current: str) -> str:
    name = " ".join(value.split()) if isinstance(value, str) else ""
    return name or current or "object"


def _unique_ids(values: list[Any], last: int) -> npt.NDArray[np.int64]:
    taken: set[int] = set()
    numbers = []
    for value in values:
        number = (
            int(value) if isinstance(value, (int, float)) and np.isfinite(value) else NEW_BOX_ID
        )
        if number < 0 or number in taken:
            last += 1
            number = last
        last = max(last, number)
        taken.add(number)
        numbers.append(number)
    return np.array(numbers, np.int64)


def _recolour(layer: Shapes, part: str, wanted: npt.NDArray[np.float32]) -> None:
    """Set the "edge" or "face" colours (n, 4) of the shapes that have others."""
    now = getattr(layer, f"{part}_color")
    wrong = np.flatnonzero(~np.isclose(now, wanted, atol=1e-3).all(axis=1))
    update = getattr(layer._data_view, f"update_{part}_colors", None)
    if len(wrong) and update is not None:
        update(wrong, wanted[wrong])
        getattr(layer.events, f"{part}_color")()
    elif len(wrong):  # a version of napari that can only set all at once
        setattr(layer, f"{part}_color", wanted)
