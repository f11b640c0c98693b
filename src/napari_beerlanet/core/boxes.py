"""Objects found in an image: boxes with classes and scores, duplicates, matches with the truth.

The geometry of plain boxes, from `geometry`, is to be had here, too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from .geometry import (
    Boxes,
    area,
    check_boxes,
    clip,
    from_centres,
    intersection,
    iou,
    over_smaller,
    scale,
    to_centres,
    translate,
)

__all__ = [
    "RESERVED",
    "Boxes",
    "Detections",
    "area",
    "check_boxes",
    "clip",
    "from_centres",
    "intersection",
    "iou",
    "matches",
    "over_smaller",
    "scale",
    "suppress",
    "to_centres",
    "translate",
]

Indices = npt.NDArray[np.int64]

_CORNERS = ("x1", "y1", "x2", "y2", "width", "height", "centre_x", "centre_y")
_MICROMETRES = tuple(f"{name}_um" for name in _CORNERS)
RESERVED = ("image", "class", "confidence", *_CORNERS, *_MICROMETRES)
"""Names in a table of detections that further columns may not have."""


@dataclass(frozen=True, eq=False)
class Detections:
    """Objects in one image, the highest score first; equal scores keep their order.

    `xyxy` (n, 4) float32, `labels` (n,) int64 into `names`, `scores` (n,) float32 in [0, 1].
    `columns`: further values per detection, (n,) each. `image_shape` is (H, W), `pixel_size`
    (y, x) in micrometres. `report`: plain facts on how they were found. `candidates`: everything
    above 0.01 that `above` chooses from when the threshold moves.
    """

    xyxy: npt.NDArray[np.float32]
    labels: Indices
    scores: npt.NDArray[np.float32]
    names: list[str]
    columns: dict[str, npt.NDArray[Any]] = field(default_factory=dict)
    image_shape: tuple[int, int] | None = None
    pixel_size: tuple[float, float] | None = None
    report: dict[str, Any] = field(default_factory=dict, repr=False)
    candidates: Detections | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        xyxy = check_boxes(self.xyxy).astype(np.float32)
        scores = _per_box(self.scores, len(xyxy), "scores").astype(np.float32)
        labels = _checked_labels(_per_box(self.labels, len(xyxy), "labels"), self.names)
        _check_scores(scores)
        order = np.argsort(-scores, kind="stable")
        columns = {}
        for name, values in self.columns.items():
            if name in RESERVED:
                raise ValueError(f'A column may not be called "{name}": tables have one already.')
            columns[name] = _per_box(values, len(xyxy), f'values of "{name}"')[order]
        for name, value in (
            ("xyxy", xyxy[order]),
            ("labels", labels[order]),
            ("scores", scores[order]),
            ("names", list(self.names)),
            ("columns", columns),
        ):
            object.__setattr__(self, name, value)

    @classmethod
    def empty(cls, names: Sequence[str], **rest: Any) -> Detections:
        """No detections of the classes `names`; `rest` are other fields, such as `image_shape`."""
        return cls(np.empty((0, 4), np.float32), np.empty(0), np.empty(0), list(names), **rest)  # type: ignore[arg-type]

    def __len__(self) -> int:
        return len(self.xyxy)

    def __getitem__(self, which: Any) -> Detections:
        """Those of a mask (n,), index array or slice, without the candidates of the others."""
        if isinstance(which, (int, np.integer)):
            which = [int(which)]
        which = np.arange(len(self))[which]
        return replace(
            self,
            xyxy=self.xyxy[which],
            labels=self.labels[which],
            scores=self.scores[which],
            columns={name: values[which] for name, values in self.columns.items()},
            candidates=None,
        )

    def above(self, confidence: float | Mapping[str, float]) -> Detections:
        """Those with at least this score, or at least their class's, from all candidates.

        A class without a number of its own is left out. The candidates stay with the result, so
        the threshold may be lowered again.
        """
        source = self if self.candidates is None else self.candidates
        if isinstance(confidence, Mapping):
            least = np.array([confidence.get(name, np.inf) for name in source.names])
            chosen = source[source.scores >= least[source.labels].astype(np.float32)]
        else:
            chosen = source[source.scores >= np.float32(confidence)]
        return replace(chosen, report=self.report, candidates=source)

    def counts(self) -> dict[str, int]:
        """How many there are of each class, in the order of `names`."""
        numbers = np.bincount(self.labels, minlength=len(self.names))
        return dict(zip(self.names, numbers.tolist(), strict=True))

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Columns (n,) by name: class, confidence, box in pixels and micrometres, all others."""
        classes = np.array(self.names, dtype=object)[self.labels]
        content = {"class": classes, "confidence": self.scores}
        content |= _measures(self.xyxy, _CORNERS)
        if self.pixel_size is not None:
            y, x = self.pixel_size
            content |= _measures(scale(self.xyxy.astype(np.float64), x, y), _MICROMETRES)
        return content | self.columns

    def to_frame(self) -> Any:
        """A pandas data frame, one row per detection."""
        import pandas as pd

        return pd.DataFrame(self.table())


def suppress(
    xyxy: Boxes,
    scores: npt.NDArray[Any],
    labels: npt.NDArray[Any],
    iou: float,
    first: npt.NDArray[np.bool_] | None = None,
) -> Indices:
    """Indices of the boxes that remain, the highest score first.

    Greedy: the best box stays and removes those of its class with a larger intersection over
    union with it than `iou`, then the best of the rest, and so on. Boxes in `first` (n,) come
    before all others, whatever their score.
    """
    from .nms import survivors  # numba comes with it

    boxes = check_boxes(xyxy)
    scores = _per_box(scores, len(boxes), "scores").astype(np.float64)
    labels = _per_box(labels, len(boxes), "labels")
    late = np.zeros(len(boxes), bool) if first is None else ~_per_box(first, len(boxes), "marks")
    if not 0 <= iou <= 1:
        raise ValueError(f"The limit of intersection over union is from 0 to 1, not {iou}.")
    if not np.isfinite(scores).all():
        raise ValueError("Scores must be finite numbers.")
    kept = survivors(boxes, labels, np.lexsort((-scores, late)), float(iou))
    return kept[np.argsort(-scores[kept], kind="stable")]


def matches(
    found: Boxes,
    true: Boxes,
    iou: float,
    scores: npt.NDArray[Any] | None = None,
    found_labels: npt.NDArray[Any] | None = None,
    true_labels: npt.NDArray[Any] | None = None,
) -> Indices:
    """(n,) for each found box the index of the true one that it is, or -1; each is taken once.

    By descending score (in the order given, without `scores`), each takes the free box that it
    has the largest intersection over union with, if that is at least `iou`. With both labels,
    only boxes of one class match.
    """
    found, true = check_boxes(found).astype(np.float64), check_boxes(true).astype(np.float64)
    if not 0 < iou <= 1:
        raise ValueError(f"Boxes match from an intersection over union above 0 to 1, not {iou}.")
    if (found_labels is None) != (true_labels is None):
        raise ValueError("To match within classes, the labels of both are needed.")
    kinds = np.zeros(len(found)) if found_labels is None else np.asarray(found_labels)
    true_kinds = np.zeros(len(true)) if true_labels is None else np.asarray(true_labels)
    turns = range(len(found)) if scores is None else np.argsort(-np.asarray(scores), kind="stable")
    by_left = np.argsort(true[:, 0], kind="stable")
    left, widest = true[by_left, 0], (true[:, 2] - true[:, 0]).max(initial=0)
    begins = np.searchsorted(left, found[:, 0] - widest)
    ends = np.searchsorted(left, found[:, 2], "right")
    free, taken = np.ones(len(true), bool), np.full(len(found), -1, np.int64)
    for i in turns:
        near = np.sort(by_left[begins[i] : ends[i]])
        near = near[free[near] & (true_kinds[near] == kinds[i])]
        best, most = _closest(found[i], true[near])
        if most >= iou:
            taken[i] = near[best]
            free[taken[i]] = False
    return taken


def _closest(box: Boxes, others: Boxes) -> tuple[int, float]:
    """Which of the others has the largest intersection over union with the box, and how much."""
    shared = iou(box[None], others)[0]
    best = int(np.argmax(shared)) if len(shared) else 0
    return best, float(shared.max(initial=0))


def _measures(xyxy: Boxes, names: Sequence[str]) -> dict[str, Boxes]:
    """The eight numbers of `_CORNERS`, (n,) each, under `names`."""
    x1, y1, x2, y2 = xyxy.T
    values = (x1, y1, x2, y2, x2 - x1, y2 - y1, (x1 + x2) / 2, (y1 + y2) / 2)
    return dict(zip(names, values, strict=True))


def _per_box(values: Any, count: int, what: str) -> npt.NDArray[Any]:
    array = np.asarray(values)
    if array.shape != (count,):
        raise ValueError(f"{count} boxes need as many {what}, got an array of {array.shape}.")
    return array


def _check_scores(scores: npt.NDArray[np.float32]) -> None:
    wrong = ~((scores >= 0) & (scores <= 1))  # also NaN
    if wrong.any():
        raise ValueError(
            f"Scores are from 0 to 1; number {np.argmax(wrong)} is {scores[wrong][0]}."
        )


def _checked_labels(labels: npt.NDArray[Any], names: Sequence[str]) -> Indices:
    if len(labels) and labels.dtype.kind not in "iu":
        raise ValueError(f"Labels are whole numbers, the places of names; got {labels.dtype}.")
    wrong = (labels < 0) | (labels >= len(names))
    if wrong.any():
        raise ValueError(
            f"Label {labels[wrong][0]} of box {np.argmax(wrong)} has no name: "
            f"there are {len(names)} classes, counted from 0."
        )
    return labels.astype(np.int64)
