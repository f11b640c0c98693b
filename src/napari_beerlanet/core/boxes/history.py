"""Undo and redo of changes to annotations.

A step is stored as its difference, object by object, not as the whole state before it: what the
user has drawn in between stays when a step is undone.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from napari_beerlanet.core.boxes.annotations import Annotations

ObjectState = tuple[tuple[float, float, float, float], str, str, str]
"""Box, class, status and type of an object."""


@dataclass(frozen=True)
class Change:
    """Objects as they were and as they are, by id; in one of the two only if new or removed."""

    label: str
    before: dict[int, ObjectState]
    after: dict[int, ObjectState]

    def __bool__(self) -> bool:
        return self.before != self.after

    def inverse(self) -> Change:
        """The change back."""
        return Change(self.label, self.after, self.before)


class History:
    """The last `limit` changes, and those undone of them."""

    def __init__(self, limit: int = 200) -> None:
        self._limit = limit
        self._done: list[Change] = []
        self._undone: list[Change] = []

    def record(self, label: str, before: Annotations, after: Annotations) -> Change:
        """Add a step, `label` in a few words ("copy detections"); a step of nothing is none."""
        change = diff_annotations(label, before, after)
        if change:
            self._done = [*self._done, change][-self._limit :]
            self._undone.clear()
        return change

    @property
    def undo_label(self) -> str:
        """What `undo` would take back, "" if there is nothing."""
        return self._done[-1].label if self._done else ""

    @property
    def redo_label(self) -> str:
        """What `redo` would do again, "" if there is nothing."""
        return self._undone[-1].label if self._undone else ""

    def undo(self, now: Annotations) -> Annotations:
        """The annotations without the last step; as they are if there is none."""
        if not self._done:
            return now
        change = self._done.pop()
        self._undone.append(change)
        return apply_change(change.inverse(), now)

    def redo(self, now: Annotations) -> Annotations:
        """The annotations with the step that was undone last; as they are if there is none."""
        if not self._undone:
            return now
        change = self._undone.pop()
        self._done.append(change)
        return apply_change(change, now)

    def clear(self) -> None:
        """Forget everything, as for another image."""
        self._done.clear()
        self._undone.clear()


def diff_annotations(label: str, before: Annotations, after: Annotations) -> Change:
    """What differs between two states."""
    old, new = objects_by_id(before), objects_by_id(after)
    changed = {i for i in old.keys() | new.keys() if old.get(i) != new.get(i)}
    return Change(
        label,
        {i: entry for i, entry in old.items() if i in changed},
        {i: entry for i, entry in new.items() if i in changed},
    )


def apply_change(change: Change, now: Annotations) -> Annotations:
    """The annotations with a change made, in the order of ids; regions and other objects stay."""
    objects = objects_by_id(now)
    for i in change.before:
        objects.pop(i, None)
    objects |= change.after
    names = list(dict.fromkeys([*now.names, *(name for _, name, _, _ in objects.values())]))
    places = {name: k for k, name in enumerate(names)}
    ids = sorted(objects)
    return replace(
        now,
        xyxy=np.array([objects[i][0] for i in ids], np.float64).reshape(-1, 4),
        labels=np.array([places[objects[i][1]] for i in ids], np.int64),
        names=names,
        ids=np.array(ids, np.int64),
        status=[objects[i][2] for i in ids],
        types=[objects[i][3] for i in ids],
    )


def objects_by_id(annotations: Annotations) -> dict[int, ObjectState]:
    """Every object by its id."""
    return {
        int(i): ((box[0], box[1], box[2], box[3]), annotations.names[k], status, cell_type)
        for i, box, k, status, cell_type in zip(
            annotations.object_ids,
            annotations.xyxy.tolist(),
            annotations.labels,
            annotations.status,
            annotations.types,
            strict=True,
        )
    }
