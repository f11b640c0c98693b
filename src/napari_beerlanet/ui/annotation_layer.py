"""Annotations as a Shapes layer: the steps that keys and buttons make, and their undo."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from napari_beerlanet.core.annotations import CONFIRMED, CORRECTED, DRAWN, Annotations
from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.history import entries
from napari_beerlanet.ui.annotate_keeper import ShapesKeeper
from napari_beerlanet.ui.annotate_shapes import Plane
from napari_beerlanet.ui.detection_shapes import corners_of

ROLE = "annotations"


class AnnotationLayer(ShapesKeeper):
    """What can be done with the boxes of an image."""

    def set_class(self, name: str) -> None:
        """Give the selected boxes a class; one that has it already is thereby confirmed."""
        chosen = self._selected()
        if chosen and name in self.classes.names:
            table = self.layer.features.copy()
            same = (table["class"] == name).to_numpy()[chosen]
            old = table["status"].to_numpy()[chosen]
            given = np.where(same, CONFIRMED, CORRECTED)
            table.loc[chosen, "status"] = np.where(old == DRAWN, DRAWN, given)
            table.loc[chosen, "class"] = name
            self._put_table(table)
            self._settle("change the class", correct=False)

    def confirm(self) -> None:
        """Say of the selected boxes that they are right."""
        chosen = self._selected()
        if chosen:
            table = self.layer.features.copy()
            table.loc[chosen, "status"] = CONFIRMED
            self._put_table(table)
            self._settle("confirm", correct=False)

    def copy(self, found: Detections, plane: Plane, what: str) -> int:
        """Add detections to a plane, to be looked at; returns how many."""
        shown = replace(found, candidates=None)  # what is not shown is not to come back
        before = Annotations.empty(self.classes.names, self.shape)
        return self.append(before.with_copied(shown), plane, what)

    def append(self, new: Annotations, plane: Plane, what: str) -> int:
        """Add boxes to a plane with ids of their own; `what` is the step that undo names."""
        numbers = self._highest + 1 + np.arange(len(new))
        return self.add(replace(new, ids=numbers), plane, what)

    def add(self, new: Annotations, plane: Plane, what: str = "") -> int:
        """Add boxes to a plane, all with the ids they have; `what` is the step that undo names."""
        self.classes.add([new.names[k] for k in np.unique(new.labels)])
        self._append(
            [(corners, "rectangle") for corners in corners_of(new.xyxy, plane)],
            [new.names[k] for k in new.labels],
            list(new.status),
            new.numbers.tolist(),
        )
        self._settle(what, remember=bool(what), correct=False)
        return len(new)

    def clear(self) -> None:
        """Remove everything, for good."""
        with self._quietly():
            self.layer.remove(list(range(self.layer.nshapes)))
        self.history.clear()
        self._settle("", remember=False)

    def undo(self) -> str:
        """Take back the last step; returns what it was, "" where there is none."""
        what = self.history.undoes
        self._show(self.history.undo(self.all()))
        return what

    def redo(self) -> str:
        """Do again what was taken back last."""
        what = self.history.redoes
        self._show(self.history.redo(self.all()))
        return what

    def _selected(self) -> list[int]:
        return sorted(int(k) for k in self.layer.selected_data)

    def _show(self, wanted: Annotations) -> None:
        """Change what differs; shapes come back as they were drawn."""
        now, then = entries(self.all()), entries(wanted)
        self.classes.add(wanted.names)
        moved = {i for i in now if i not in then or now[i][0] != then[i][0]}
        numbers = self.layer.features["id"].to_numpy()
        with self._quietly():
            self.layer.selected_data = set()
            self.layer.remove([k for k, i in enumerate(numbers) if int(i) in moved])
        new = [i for i in then if i not in now or i in moved]
        shapes = [self._seen[i, then[i][0]] for i in new]
        self._append(shapes, [then[i][1] for i in new], [then[i][2] for i in new], new)
        table = self.layer.features.copy()
        for place, name in ((1, "class"), (2, "status")):
            pairs = zip(table["id"].tolist(), table[name].tolist(), strict=True)
            values = [then[i][place] if i in then else value for i, value in pairs]
            table[name] = np.array(values, dtype=object)
        self._put_table(table)
        self._settle("", remember=False, correct=False)
