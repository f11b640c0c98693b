"""Detections of an image: boxes with classes, scores and further columns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import (
    BoxArray,
    area,
    centre_inside,
    check_boxes,
    check_per_box,
    intersection,
    iou,
    scale,
)
from napari_beerlanet.core.common.messages import shortened
from napari_beerlanet.core.common.tile_store import TileStore

Indices = npt.NDArray[np.int64]

_SAME_OBJECT_IOU = 0.45  # of two searches' boxes, as far as both can see them
_ROUNDING = 1e-4  # of a box's area

_STORED_BOX = np.dtype([("xyxy", "<f4", 4), ("label", "<i4"), ("score", "<f4")])
_BOX_COLUMNS = ("x1", "y1", "x2", "y2", "width", "height", "centre_x", "centre_y")
_BOX_COLUMNS_UM = tuple(f"{name}_um" for name in _BOX_COLUMNS)
RESERVED_COLUMNS = ("image", "class", "confidence", *_BOX_COLUMNS, *_BOX_COLUMNS_UM)
"""Names in a table of detections that further columns may not have."""
DOMAIN_SHIFT_COLUMN = "unlike training"
"""The column of `Detections` that has `domain_shift_scores`."""
AGREEMENT_COLUMN = "class agreement"
"""The column of `Detections` that has `class_agreement`."""
TYPE_COLUMN, PROBABILITY_COLUMN, ENTROPY_COLUMN = "type", "probability", "entropy"
"""Columns that a classifier writes: "", NaN and NaN where it has not been asked."""
TYPE_FACTS = ("types", "classifier", "classifier_warnings", "classifier_limits")
"""What `report` says of the classifier: type names, its name, sentences on its answers, and on what
it does not know."""

CHANNEL_MEAN_COLUMN = re.compile(r"(Model channel (\d+)) mean")
"""The column of a model channel's mean density: its name, and its number from 1."""


def channel_name(index: int) -> str:
    """What a component that a model has learned is called: "Model channel 3" for index 2.

    An image's own stains are called otherwise, as `Decomposition.labels` says.
    """
    return f"Model channel {index + 1}"


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
            columns[name] = check_per_box(values, len(xyxy), f'values of "{shortened(name)}"')[
                order
            ]
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
        chosen = source[source.is_above(confidence)]
        return replace(chosen, report=self.report, candidates=source)

    def is_above(self, confidence: float | Mapping[str, float]) -> npt.NDArray[np.bool_]:
        """(n,) which of these have at least this score, or at least their class's."""
        if not isinstance(confidence, Mapping):
            return np.asarray(self.scores >= np.float32(confidence))
        least = np.array([confidence.get(name, np.inf) for name in self.names])
        return np.asarray(self.scores >= least[self.labels].astype(np.float32))

    def counts(self) -> dict[str, int]:
        """How many there are of each class, in the order of `names`."""
        numbers = np.bincount(self.labels, minlength=len(self.names))
        return dict(zip(self.names, numbers.tolist(), strict=True))

    @cached_property
    def types(self) -> list[str]:
        """Names of the cell types that these may have, in the classifier's order."""
        known = [str(name) for name in self.report.get("types") or ()]
        return [*known, *(name for name in self._type_codes[1] if name and name not in known)]

    @cached_property
    def type_labels(self) -> Indices:
        """(n,) into `types`, -1 where there is none; computed once: words are slow to compare."""
        codes, words = self._type_codes
        place = {name: k for k, name in enumerate(self.types)}
        return np.array([place.get(word, -1) for word in words] or [-1], np.int64)[codes]

    def type_counts(self) -> dict[str, int]:
        """How many there are of each type, in the order of `types`."""
        numbers = np.bincount(self.type_labels + 1, minlength=len(self.types) + 1)[1:]
        return dict(zip(self.types, numbers.tolist(), strict=True))

    @cached_property
    def _type_codes(self) -> tuple[Indices, list[str]]:
        """(n,) into the sorted words of the column; all 0 and no words where there is none."""
        column = self.columns.get(TYPE_COLUMN)
        if column is None or not len(column):
            return np.zeros(len(self), np.int64), []
        import pandas as pd  # hashes words, where NumPy sorts them

        codes, words = pd.factorize(column)
        # A missing value is -1: no type, whatever a file calls it.
        names = ["" if word != word else str(word) for word in [*words.tolist(), ""]]
        ranks = {name: k for k, name in enumerate(sorted(set(names)))}
        return np.array([ranks[name] for name in names], np.int64)[codes], list(ranks)

    def with_types(
        self,
        names: Sequence[str],
        probabilities: npt.NDArray[np.float32],
        labels: Indices | None = None,
        rows: Indices | npt.NDArray[np.bool_] | None = None,
        classifier: str = "",
    ) -> Detections:
        """All candidates with what a classifier says of some; `above` chooses from them.

        `probabilities` (m, k) of the types `names` and `labels` (m,) into these (the most probable
        ones if None), of `rows` of the candidates (all if None). What an earlier classifier has
        said of the others stays, if it knew the same types.
        """
        source = self if self.candidates is None else self.candidates
        chosen = np.arange(len(source))[slice(None) if rows is None else rows]
        columns = dict(source.columns)
        if list(names) != source.report.get("types"):
            columns = {name: columns[name] for name in columns if not is_type_column(name)}
        for name, values in type_columns(names, probabilities, labels).items():
            column = columns.get(name, _unknown(len(source), values)).copy()
            column[chosen] = values
            columns[name] = column
        report = source.report | {"types": list(names), "classifier": classifier}
        return replace(source, columns=columns, report=self.report | report)

    def by_type(self) -> Detections:
        """The same with types as classes, for drawing; what has no type keeps its class.

        Names are those of `types`, then the classes that are left.
        """
        if not self.types:
            return self
        untyped = self.type_labels < 0
        left = [self.names[k] for k in np.unique(self.labels[untyped])]
        names = list(dict.fromkeys([*self.types, *left]))
        place = {name: k for k, name in enumerate(names)}
        of_class = np.array([place.get(name, -1) for name in self.names], np.int64)
        labels = np.where(untyped, of_class[self.labels], self.type_labels)
        return replace(self, labels=labels, names=names, candidates=None)

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


def type_columns(
    names: Sequence[str], probabilities: npt.NDArray[np.float32], labels: Indices | None = None
) -> dict[str, npt.NDArray[Any]]:
    """Columns (m,) by name: type, its probability, entropy −Σ p ln p, and P(name) of each.

    `probabilities` (m, k) of the types `names`; `labels` (m,) into these, or the most probable.
    """
    p = np.asarray(probabilities, np.float32).reshape(-1, len(names))
    labels = p.argmax(1) if labels is None else np.asarray(labels, np.int64)
    logarithms = np.log(np.where(p > 0, p, 1).astype(np.float64))
    return {
        TYPE_COLUMN: np.array(list(names), object)[labels],
        PROBABILITY_COLUMN: p[np.arange(len(p)), labels],
        ENTROPY_COLUMN: np.asarray(-(p * logarithms).sum(1), np.float32),
    } | {f"P({name})": p[:, k] for k, name in enumerate(names)}


_TYPE_PROBABILITY = re.compile(r"P\((.*)\)", re.DOTALL)


def is_type_column(name: str) -> bool:
    """Whether a column is one that a classifier writes."""
    return name in (TYPE_COLUMN, PROBABILITY_COLUMN, ENTROPY_COLUMN) or bool(
        _TYPE_PROBABILITY.fullmatch(name)
    )


def types_of_columns(names: Iterable[str]) -> list[str]:
    """The types that a classifier knows, in its order, by the names of columns P(type)."""
    found = (_TYPE_PROBABILITY.fullmatch(name) for name in names)
    return [match[1] for match in found if match]


def _unknown(count: int, like: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """(count,) values that say nothing: "" in a column of words, NaN in one of numbers."""
    if like.dtype.kind in "OUS":
        return np.full(count, "", object)
    return np.full(count, np.nan, np.result_type(like.dtype, np.float32))


def replace_in_windows(
    before: Detections, found: Detections, windows: npt.NDArray[Any]
) -> Detections:
    """`before` with what lies in the windows (m, 4) replaced by `found`, a later search of them.

    At a window's border an object may be cut in `found`, or its centre may lie a little elsewhere
    than before: such an object keeps its box of `before`. All candidates of both take part; `above`
    chooses from the result. The report is that of `found`; cell types of `before` stay.
    """
    old = before if before.candidates is None else before.candidates
    new = found if found.candidates is None else found.candidates
    keep_old, keep_new = np.ones(len(old), bool), np.ones(len(new), bool)
    for window in np.asarray(windows, np.float64):
        shared = intersection(old.xyxy, window[None])[:, 0]
        touching = np.flatnonzero(shared > 0)
        crossing = touching[shared[touching] < area(old.xyxy[touching]) * (1 - _ROUNDING)]
        keep_old[np.setdiff1d(touching, crossing)] = False
        corners = [*window[:2], *window[:2]], [*window[2:], *window[2:]]
        same = iou(np.clip(old.xyxy[crossing], *corners), new.xyxy) >= _SAME_OBJECT_IOU
        # A doubtful box is no reason to drop a sure one.
        sure = same & (old.scores[crossing][:, None] >= 0.5 * new.scores[None])
        keep_new[sure.any(0)] = False
        here = centre_inside(old.xyxy[crossing], window[None]) | same.any(1)
        keep_old[crossing[here & ~sure.any(1)]] = False
    rest, new = old[keep_old], new[keep_new]
    names = list(dict.fromkeys([*found.names, *before.names]))
    place = np.array([names.index(name) for name in rest.names], np.int64)
    typed = {name: values for name, values in rest.columns.items() if is_type_column(name)}
    columns = {
        name: np.concatenate(
            [
                new.columns.get(name, _unknown(len(new), values)),
                rest.columns.get(name, _unknown(len(rest), values)),
            ]
        )
        for name, values in (typed | new.columns).items()
    }
    return replace(
        new,
        xyxy=np.concatenate([new.xyxy, rest.xyxy]),
        labels=np.concatenate([new.labels, place[rest.labels]]),
        scores=np.concatenate([new.scores, rest.scores]),
        names=names,
        columns=columns,
        report=found.report
        | {
            key: before.report[key]
            for key in TYPE_FACTS
            if key in before.report and key not in found.report
        },
    )


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


class DetectionTiles(TileStore[RawDetections]):
    """Detections of a slide's tiles, in a file that a search resumes from."""

    @staticmethod
    def pack(result: RawDetections) -> bytes:
        """See `TileStore`."""
        rows = np.empty(len(result), _STORED_BOX)
        rows["xyxy"], rows["label"], rows["score"] = result.xyxy, result.labels, result.scores
        return rows.tobytes()

    @staticmethod
    def unpack(stored: bytes) -> RawDetections:
        """See `TileStore`."""
        rows = np.frombuffer(stored, _STORED_BOX)
        labels = rows["label"].astype(np.int64)
        return RawDetections(rows["xyxy"].copy(), labels, rows["score"].copy())


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
