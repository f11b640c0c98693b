"""Boxes in a Shapes layer that a hand changes with napari's own tools.

The layer is the truth: class, status and id of each box are columns of its features. Each change
is seen, tidied, coloured and remembered.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes
from psygnal import Signal

from napari_beerlanet.core.annotations import COPIED, CORRECTED, Annotations
from napari_beerlanet.core.history import Entry, History, entries
from napari_beerlanet.ui import annotate_table as tables
from napari_beerlanet.ui.annotate_classes import Classes
from napari_beerlanet.ui.annotate_shapes import Boxes, Plane, read_boxes

_WORDS = {"added": "draw", "changed": "move", "removed": "delete"}

Geometry = tuple[npt.NDArray[Any], str]
"""Corners (k, D) of a shape, and its kind."""


class ShapesKeeper:
    """The boxes of one image (H, W, …), all planes of a stack; `width` is that of their edges.

    `changed` tells that there is something to save. `notes` are about shapes that are no boxes.
    """

    changed = Signal()

    def __init__(self, layer: Shapes, classes: Classes, shape: Sequence[int], width: float) -> None:
        self.layer, self.classes, self.width = layer, classes, width
        self.shape = int(shape[0]), int(shape[1])
        self.history = History()
        self.notes: list[str] = []
        self._busy = False
        self._highest = -1  # id: one that was deleted may come back and is not given again
        self._seen: dict[tuple[int, Any], Geometry] = {}
        self._last = Annotations.empty(classes.names, self.shape)
        self._set_defaults()
        self._settle("", remember=False)
        layer.events.data.connect(self._data_changed)
        layer.events.features.connect(self._features_changed)
        classes.renamed.connect(self._rename)
        classes.changed.connect(self._paint)
        classes.current_changed.connect(self._set_defaults)

    def close(self) -> None:
        """Hear nothing more of the layer."""
        self.layer.events.data.disconnect(self._data_changed)
        self.layer.events.features.disconnect(self._features_changed)
        self.classes.renamed.disconnect(self._rename)
        self.classes.changed.disconnect(self._paint)
        self.classes.current_changed.disconnect(self._set_defaults)

    # --- what is there ----------------------------------------------------------------------------

    def all(self) -> Annotations:
        """Everything, whatever its plane."""
        return self._read()[0]

    def of_plane(self, plane: Plane) -> Annotations:
        """The objects of one plane, without regions."""
        annotations, boxes = self._read()
        return annotations[(boxes.planes == np.array(plane, np.int64)).all(axis=1)]

    def by_plane(self) -> dict[Plane, Annotations]:
        """The objects of each plane that has any."""
        annotations, boxes = self._read()
        places = {tuple(plane) for plane in boxes.planes.tolist()}
        return {p: annotations[(boxes.planes == np.array(p)).all(axis=1)] for p in sorted(places)}

    def planes(self) -> list[Plane]:
        """Planes that have boxes, as of the last change."""
        return sorted({tuple(plane) for plane in self._planes.tolist()})

    def counts(self) -> dict[str, int]:
        """How many boxes there are of each class, as of the last change."""
        return self._last.counts()

    def _read(self) -> tuple[Annotations, Boxes]:
        boxes = read_boxes(self.layer.data, self.layer.shape_type)
        table, which = self.layer.features, boxes.which
        names = list(dict.fromkeys([*self.classes.names, *table["class"]]))
        place = {name: k for k, name in enumerate(names)}
        found = Annotations(
            boxes.xyxy,
            np.array([place[name] for name in table["class"].to_numpy()[which]], np.int64),
            names,
            table["id"].to_numpy()[which].astype(np.int64),
            table["status"].to_numpy()[which].tolist(),
            image_shape=self.shape,
        )
        return found, boxes

    # --- into the layer ---------------------------------------------------------------------------

    def _append(
        self, shapes: Sequence[Geometry], names: list[str], status: list[str], ids: list[int]
    ) -> None:
        if not shapes:
            return
        first = self.layer.nshapes
        with self._quietly():
            self.layer.add(
                [corners for corners, _ in shapes],
                shape_type=[kind for _, kind in shapes],
                edge_width=self.width,
                edge_color=self.classes.rgba(names),
                face_color=tables.faces(self.classes, names, status),
            )
        table = self.layer.features.copy()
        rows = range(first, first + len(shapes))
        table.loc[rows, "class"], table.loc[rows, "status"] = names, status
        table.loc[rows, "id"] = ids
        self._put_table(table)

    def _put_table(self, table: Any) -> None:
        if not tables.same(table, self.layer.features):
            with self._quietly():
                self.layer.features = table
                self._set_defaults()

    def _set_defaults(self) -> None:
        """What a box gets that is drawn next."""
        with self._quietly():
            ours, others = tables.defaults(self.classes), self.layer.feature_defaults.iloc[0]
            columns = self.layer.features.columns
            self.layer.feature_defaults = {c: ours.get(c, others.get(c)) for c in columns}
            if not self.layer.selected_data and self.classes.current:
                self.layer.current_edge_color = self.classes.rgba([self.classes.current])[0]

    def _paint(self) -> None:
        """Give each box the colours of its class and status, where they are others."""
        table = self.layer.features
        names, status = table["class"].tolist(), table["status"].tolist()
        edges, faces = self.classes.rgba(names), tables.faces(self.classes, names, status)
        with self._quietly():
            _recolour(self.layer, "edge", edges)
            _recolour(self.layer, "face", faces)

    def _rename(self, old: str, new: str) -> None:
        """A class is called something else; what undo knows of goes by the old name."""
        table = self.layer.features.copy()
        table.loc[table["class"] == old, "class"] = new
        self._put_table(table)
        self.history.clear()
        self._settle("", remember=False, correct=False)

    # --- out of the layer -------------------------------------------------------------------------

    def _data_changed(self, event: Any) -> None:
        word = _WORDS.get(str(getattr(event, "action", "")))
        if self._busy or word is None:
            return
        if word == "draw" and self.layer._is_creating:  # the next key is for the next box
            self.layer.selected_data = set()
        self._settle(word)

    def _features_changed(self, event: Any = None) -> None:
        if not self._busy and not self.layer._is_creating:
            self._settle("change the table")

    def _settle(self, what: str, remember: bool = True, correct: bool = True) -> None:
        """Put the table in order, see what is different from before, remember and tell it."""
        count = self.layer.nshapes
        self._put_table(tables.tidied(self.layer.features, count, self.classes, self._highest))
        now, boxes = self._read()
        old, new = entries(self._last), entries(now)
        if correct and self._mark_corrected(old, new):
            now, boxes = self._read()
            new = entries(now)
        self._paint()
        self.notes, self._planes = boxes.notes, boxes.planes
        self._highest = max(self._highest, *new, -1)
        self._remember_shapes(new, boxes)
        before, self._last = self._last, now
        if old == new:
            return
        if remember and what:
            self.history.record(what, before, now)
        self.changed.emit()

    def _mark_corrected(self, old: dict[int, Entry], new: dict[int, Entry]) -> bool:
        """Boxes that were copied and have now been moved by hand are corrected."""
        hit = {i for i in new if i in old and new[i][2] == COPIED and new[i][:2] != old[i][:2]}
        if not hit:
            return False
        table = self.layer.features.copy()
        table.loc[table["id"].isin(hit), "status"] = CORRECTED
        self._put_table(table)
        return True

    def _remember_shapes(self, now: dict[int, Entry], boxes: Boxes) -> None:
        """Keep each shape as it is drawn, so that undo brings back an ellipse as one."""
        data, kinds = self.layer.data, self.layer.shape_type
        for (i, entry), k in zip(now.items(), boxes.which, strict=True):
            if (i, entry[0]) not in self._seen:
                self._seen[i, entry[0]] = np.array(data[k]), str(kinds[k])

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """Change the layer without hearing of it."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _recolour(layer: Shapes, part: str, wanted: npt.NDArray[np.float32]) -> None:
    """Give shapes other colours (n, 4) of "edge" or "face", those that have others."""
    now = getattr(layer, f"{part}_color")
    wrong = np.flatnonzero(~np.isclose(now, wanted, atol=1e-3).all(axis=1))
    few = getattr(layer._data_view, f"update_{part}_colors", None)
    if len(wrong) and few is not None:
        few(wrong, wanted[wrong])
        getattr(layer.events, f"{part}_color")()
    elif len(wrong):  # another version of napari's, which does all at once
        setattr(layer, f"{part}_color", wanted)
