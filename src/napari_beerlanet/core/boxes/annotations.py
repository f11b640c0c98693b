"""Annotations of an image: boxes with classes, and the regions in which everything is annotated.

Boxes are x1, y1, x2, y2 in image pixels with continuous edges, see `geometry`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.boxes.geometry import area, check_boxes, clip
from napari_beerlanet.core.boxes.regions import Region, shape_bounds
from napari_beerlanet.core.common.messages import count_of, name_list, quoted

Indices = npt.NDArray[np.int64]

DRAWN, COPIED, CORRECTED, CONFIRMED = "drawn", "copied", "corrected", "confirmed"
CLASSIFIED = "classified"
STATUSES = (DRAWN, COPIED, CORRECTED, CONFIRMED, CLASSIFIED)
"""By hand; from detections and not looked at yet; from detections and changed; looked at; looked at
but for the type, which is a classifier's."""
UNREVIEWED_TYPES = (COPIED, CLASSIFIED)
"""Of boxes whose type, if they have one, nobody has looked at."""

MIN_CLASS_BOXES = 10
"""About so many boxes of a class are needed to learn it, or to measure how well it was learned."""

MIN_TRAINABLE_SIDE = 4.0
"""Pixels of a box's shorter side in the image; what is smaller was hardly meant."""


@dataclass(frozen=True, eq=False)
class Annotations:
    """Objects of one image of `image_shape` (H, W), and the regions without omissions.

    `xyxy` (n, 4) float64, `labels` (n,) int64 into `names`, `ids` (n,) int64, each there once,
    `status` (n,) one of `STATUSES` each, `types` (n,) cell types, "" where there is none.
    """

    xyxy: npt.NDArray[np.float64]
    labels: Indices
    names: list[str]
    ids: Indices | None = None
    status: Sequence[str] = ()
    regions: tuple[Region, ...] = ()
    image_shape: tuple[int, int] = (0, 0)
    types: Sequence[str] = ()

    def __post_init__(self) -> None:
        xyxy = check_boxes(self.xyxy).astype(np.float64)
        n = len(xyxy)
        labels = np.asarray(self.labels, np.int64).reshape(-1)
        ids = np.arange(n) if self.ids is None else np.asarray(self.ids, np.int64).reshape(-1)
        status = list(self.status) or [DRAWN] * n
        types = list(self.types) or [""] * n
        _check_annotations(n, labels, list(self.names), ids, status, types)
        for name, value in (
            ("xyxy", xyxy),
            ("labels", labels),
            ("names", list(self.names)),
            ("ids", ids.astype(np.int64)),
            ("status", tuple(status)),
            ("types", tuple(types)),
            ("regions", tuple(self.regions)),
            ("image_shape", (int(self.image_shape[0]), int(self.image_shape[1]))),
        ):
            object.__setattr__(self, name, value)

    def __len__(self) -> int:
        return len(self.xyxy)

    def __getitem__(self, which: Any) -> Annotations:
        """Those of a mask (n,), index array or slice."""
        which = np.atleast_1d(np.arange(len(self))[which])
        return replace(
            self,
            xyxy=self.xyxy[which],
            labels=self.labels[which],
            ids=self.object_ids[which],
            status=[self.status[k] for k in which],
            types=[self.types[k] for k in which],
        )

    @classmethod
    def empty(cls, names: Sequence[str], image_shape: Sequence[int] = (0, 0)) -> Annotations:
        """Nothing yet, and no region."""
        shape = (image_shape[0], image_shape[1])
        return cls(np.empty((0, 4)), np.empty(0, np.int64), list(names), image_shape=shape)

    @property
    def object_ids(self) -> Indices:
        """The ids."""
        assert self.ids is not None
        return self.ids

    def counts(self) -> dict[str, int]:
        """How many there are of each class, in the order of `names`."""
        numbers = np.bincount(self.labels, minlength=len(self.names))
        return dict(zip(self.names, numbers.tolist(), strict=True))

    def type_counts(self) -> dict[str, int]:
        """How many there are of each type, in the order in which they come; none without a type."""
        return dict(Counter(name for name in self.types if name))

    def typed(self) -> Annotations:
        """Those that have a type."""
        return self[np.array([bool(name) for name in self.types], bool)]

    def with_classes(self, names: Sequence[str]) -> Annotations:
        """The same with its classes numbered as in `names`; one that is missing is refused."""
        place = {name: k for k, name in enumerate(names)}
        used = {self.names[k] for k in self.labels}
        missing = sorted(used - set(place))
        if missing:
            raise ValueError(
                f"There is no class {name_list(missing)} in the project, which has "
                f"{name_list(names)}; add it, or give these boxes another class."
            )
        numbers = np.array([place.get(name, -1) for name in self.names], np.int64)
        return replace(self, labels=numbers[self.labels], names=list(names))

    def with_detections(
        self, detections: Detections, confidence: float = 0.0, duplicate_iou: float = 0.5
    ) -> Annotations:
        """These and the detections of at least this score, numbered on; classes go by name.

        A detection that is here already, by an IoU of `duplicate_iou`, is left out: copying again
        adds nothing.
        """
        from napari_beerlanet.core.boxes.matching import match_boxes  # numba comes with it

        new = detections.above(confidence)
        new = new[match_boxes(new.xyxy, self.xyxy, duplicate_iou, new.scores) < 0]
        names = list(dict.fromkeys([*self.names, *(new.names[k] for k in new.labels)]))
        place = {name: k for k, name in enumerate(names)}
        labels = [place[new.names[k]] for k in new.labels]
        first = int(self.object_ids.max(initial=-1)) + 1
        types = new.columns.get(TYPE_COLUMN, np.full(len(new), "", object))
        return replace(
            self,
            xyxy=np.concatenate([self.xyxy, new.xyxy.astype(np.float64)]),
            labels=np.concatenate([self.labels, np.array(labels, np.int64)]),
            names=names,
            ids=np.concatenate([self.object_ids, first + np.arange(len(new))]),
            status=[*self.status, *[COPIED] * len(new)],
            types=[*self.types, *map(str, types)],
        )

    def to_detections(self) -> Detections:
        """As `Detections`, certain ones, for the formats and for drawing."""
        columns = {"status": np.array(self.status, str)} if len(self) else {}
        if any(self.types):
            columns[TYPE_COLUMN] = np.array(self.types, object)
        ones = np.ones(len(self), np.float32)
        boxes = self.xyxy.astype(np.float32)
        shape = self.image_shape if min(self.image_shape) > 0 else None
        return Detections(boxes, self.labels, ones, self.names, columns, image_shape=shape)

    @property
    def reviewed(self) -> npt.NDArray[np.bool_]:
        """(n,) whether each was drawn, changed or confirmed, and not just copied."""
        return np.array([status != COPIED for status in self.status], bool)

    @property
    def type_reviewed(self) -> npt.NDArray[np.bool_]:
        """(n,) whether each has no type, or one that somebody has given or confirmed."""
        pairs = zip(self.types, self.status, strict=True)
        return np.array([not t or status not in UNREVIEWED_TYPES for t, status in pairs], bool)

    def unusable(self) -> dict[str, npt.NDArray[np.bool_]]:
        """What a box has that cannot be learned from, and which (n,) have it, each counted once."""
        inside = clip(self.xyxy, self.image_shape)
        empty, outside = area(self.xyxy) <= 0, area(inside) <= 0
        tiny = (inside[:, 2:] - inside[:, :2]).min(axis=1, initial=np.inf) < MIN_TRAINABLE_SIDE
        return {
            "no area": empty,
            "no part in the image": outside & ~empty,
            f"a side of less than {MIN_TRAINABLE_SIDE:.0f} pixels": tiny & ~outside & ~empty,
        }

    def trainable(self) -> tuple[Annotations, list[str]]:
        """Those that can be learned from, cut off at the image's border, and what is left out."""
        unusable = self.unusable()
        notes = [_left_out(int(which.sum()), has) for has, which in unusable.items() if which.any()]
        boxes = clip(self.xyxy, self.image_shape).astype(np.float64)
        usable = ~np.logical_or.reduce(list(unusable.values()))
        return replace(self, xyxy=boxes)[usable], notes

    def to_json(self) -> dict[str, Any]:
        """As JSON has it; classes by name, so that their order may change."""
        return {
            "classes": self.names,
            "objects": [
                {"id": int(i), "class": self.names[k], "box": box, "status": status}
                | ({"type": cell_type} if cell_type else {})
                for i, k, box, status, cell_type in zip(
                    self.object_ids,
                    self.labels,
                    self.xyxy.tolist(),
                    self.status,
                    self.types,
                    strict=True,
                )
            ],
            "regions": [region.to_json() for region in self.regions],
        }

    @classmethod
    def from_json(cls, content: Any, image_shape: Sequence[int]) -> Annotations:
        """What `to_json` gave; a KeyError, TypeError or ValueError where it is something else."""
        names = [str(name) for name in content["classes"]]
        label = {name: k for k, name in reversed(list(enumerate(names)))}
        objects = content["objects"]
        return cls(
            np.array([entry["box"] for entry in objects], np.float64).reshape(-1, 4),
            np.array([label[entry["class"]] for entry in objects], np.int64),
            names,
            np.array([entry["id"] for entry in objects], np.int64),
            [str(entry["status"]) for entry in objects],
            tuple(Region.from_json(entry) for entry in content["regions"]),
            (int(image_shape[0]), int(image_shape[1])),
            [str(entry.get("type", "")) for entry in objects],
        )


@dataclass(frozen=True)
class ConvertedShapes:
    """Boxes (n, 4) of drawn shapes, which of them they are (n,), and sentences on the others."""

    xyxy: npt.NDArray[np.float64]
    which: Indices
    notes: list[str] = field(default_factory=list)


def boxes_from_shapes(shapes: Sequence[Any], kinds: Sequence[str]) -> ConvertedShapes:
    """Boxes around drawn shapes: rectangles (also turned), ellipses, polygons.

    `shapes`: (k, 2) x, y each, in image pixels with continuous edges; `kinds` as napari calls
    them. Paths, lines and shapes without area are left out, with a note.
    """
    boxes, which, reasons = [], [], []
    for k, (points, kind) in enumerate(zip(shapes, kinds, strict=True)):
        try:
            box = shape_bounds(points, kind)
            if box[0] >= box[2] or box[1] >= box[3]:
                raise ValueError("it has no area")
        except ValueError as error:
            reasons.append(str(error))
        else:
            boxes.append(box)
            which.append(k)
    notes = [
        f"{count_of(reasons.count(reason), 'shape was', 'shapes were')} left out: {reason}."
        for reason in dict.fromkeys(reasons)
    ]
    xyxy = np.array(boxes, np.float64).reshape(-1, 4)
    return ConvertedShapes(xyxy, np.array(which, np.int64), notes)


def _left_out(count: int, reason: str) -> str:
    return (
        f"{count_of(count, 'box has', 'boxes have')} {reason} and "
        f"{'is' if count == 1 else 'are'} left out."
    )


def _check_annotations(
    n: int,
    labels: Indices,
    names: list[str],
    ids: Indices,
    status: list[str],
    types: list[str],
) -> None:
    for what, count in (
        ("labels", len(labels)),
        ("ids", len(ids)),
        ("status", len(status)),
        ("types", len(types)),
    ):
        if count != n:
            raise ValueError(f"{n} boxes need as many {what}, got {count}.")
    if len(set(names)) < len(names):
        raise ValueError(f"Class names must differ: {name_list(names)}.")
    if n and (labels.min() < 0 or labels.max() >= len(names)):
        raise ValueError(f"Labels must be from 0 to {len(names) - 1}, the places of the names.")
    if len(np.unique(ids)) < n:
        raise ValueError("Each annotation needs an id of its own.")
    wrong = sorted(set(status) - set(STATUSES))
    if wrong:
        raise ValueError(f"The status is one of {', '.join(STATUSES)}, not {quoted(wrong[0])}.")
