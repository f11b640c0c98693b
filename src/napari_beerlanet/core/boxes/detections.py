"""Detections of an image: boxes with classes, scores and further columns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import BoxArray, check_boxes, check_per_box, scale

Indices = npt.NDArray[np.int64]

_BOX_COLUMNS = ("x1", "y1", "x2", "y2", "width", "height", "centre_x", "centre_y")
_BOX_COLUMNS_UM = tuple(f"{name}_um" for name in _BOX_COLUMNS)
RESERVED_COLUMNS = ("image", "class", "confidence", *_BOX_COLUMNS, *_BOX_COLUMNS_UM)
"""Names in a table of detections that further columns may not have."""
DOMAIN_SHIFT_COLUMN = "unlike training"
"""The column of `Detections` that has `domain_shift_scores`."""


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
        scores = check_per_box(self.scores, len(xyxy), "scores").astype(np.float32)
        labels = _checked_labels(check_per_box(self.labels, len(xyxy), "labels"), self.names)
        _check_scores(scores)
        order = np.argsort(-scores, kind="stable")
        columns = {}
        for name, values in self.columns.items():
            if name in RESERVED_COLUMNS:
                raise ValueError(f'A column may not be called "{name}": the name is reserved.')
            columns[name] = check_per_box(values, len(xyxy), f'values of "{name}"')[order]
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
        content |= _box_columns(self.xyxy, _BOX_COLUMNS)
        if self.pixel_size is not None:
            y, x = self.pixel_size
            content |= _box_columns(scale(self.xyxy.astype(np.float64), x, y), _BOX_COLUMNS_UM)
        return content | self.columns

    def to_frame(self) -> Any:
        """A pandas data frame, one row per detection."""
        import pandas as pd

        return pd.DataFrame(self.table())


@dataclass(frozen=True)
class RawDetections:
    """Boxes xyxy (n, 4) float32, labels (n,) int64, scores (n,) float32."""

    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    scores: npt.NDArray[np.float32]

    @classmethod
    def concatenate(cls, parts: Sequence[RawDetections]) -> RawDetections:
        """All parts, one after the other."""
        return cls(
            np.concatenate([np.zeros((0, 4), np.float32), *(p.xyxy for p in parts)]),
            np.concatenate([np.zeros(0, np.int64), *(p.labels for p in parts)]),
            np.concatenate([np.zeros(0, np.float32), *(p.scores for p in parts)]),
        )

    def __getitem__(self, which: Any) -> RawDetections:
        return RawDetections(self.xyxy[which], self.labels[which], self.scores[which])

    def __len__(self) -> int:
        return len(self.xyxy)


def _box_columns(xyxy: BoxArray, names: Sequence[str]) -> dict[str, BoxArray]:
    """The eight numbers of `_BOX_COLUMNS`, (n,) each, under `names`."""
    x1, y1, x2, y2 = xyxy.T
    values = (x1, y1, x2, y2, x2 - x1, y2 - y1, (x1 + x2) / 2, (y1 + y2) / 2)
    return dict(zip(names, values, strict=True))


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
