"""Detections against annotations: average precision, precision and recall, confusion, matches.

Everything is measured on what `Detector.detect` gives a user, choice of the object size included;
the metrics themselves are Ultralytics'.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from .boxes import Detections, from_centres, iou, matches
from .dataset import Dataset, check_dataset, read_dataset
from .detector import Detector
from .files import read_image
from .labels import Item
from .progress import Report, tell
from .yolo import ConfusionMatrix, DetectionValidator, ap_per_class

Array = npt.NDArray[np.float64]

LEVELS = np.linspace(0.5, 0.95, 10)
"""Intersections over union at which mAP50-95 is measured."""


@dataclass(frozen=True, eq=False)
class Truth:
    """Annotated boxes of one image: xyxy (m, 4) in pixels and labels (m,) int64."""

    xyxy: Array
    labels: npt.NDArray[np.int64]
    name: str = ""


@dataclass(frozen=True, eq=False)
class Matches:
    """One image at one threshold: indices of true and false detections, and of missed annotations.

    `true` (k,) and `false` (l,) index the detections, `partner` (k,) the annotation of each true
    one, `missed` (j,) the annotations.
    """

    name: str
    true: npt.NDArray[np.int64]
    partner: npt.NDArray[np.int64]
    false: npt.NDArray[np.int64]
    missed: npt.NDArray[np.int64]


@dataclass
class Tally:
    """Detections and annotations of many images, collected one by one, then measured."""

    names: Sequence[str]
    hits: list[npt.NDArray[np.bool_]] = field(default_factory=list)
    scores: list[npt.NDArray[np.float32]] = field(default_factory=list)
    found: list[npt.NDArray[np.int64]] = field(default_factory=list)
    true: list[npt.NDArray[np.int64]] = field(default_factory=list)
    pairs: list[tuple[Detections, Truth]] = field(default_factory=list)

    def add(self, detections: Detections, truth: Truth) -> None:
        """One image; all candidates count, whatever the threshold they were shown at."""
        everything = detections.candidates or detections
        self.hits.append(_hits(everything, truth))
        self.scores.append(everything.scores)
        self.found.append(everything.labels)
        self.true.append(truth.labels)
        self.pairs.append((everything, truth))

    def measure(self, confidence: float = 0.25) -> dict[str, Any]:
        """All metrics as a plain dict; per class in the order of `names`. See `evaluate`."""
        found, true = _joined(self.found, np.int64), _joined(self.true, np.int64)
        hits = np.concatenate([np.zeros((0, len(LEVELS)), bool), *self.hits])
        if not len(found) or not len(true):
            per_class = {n: _nothing(int((true == k).sum())) for k, n in enumerate(self.names)}
            curves: dict[str, Any] = {}
        else:
            result = ap_per_class(hits, _joined(self.scores, np.float32), found, true)
            per_class, curves = _per_class(result, self.names, true)
        present = [c for c in per_class.values() if c["count"]]
        return {
            **_means(present),
            "images": len(self.pairs),
            "per_class": per_class,
            "curves": curves,
            "confusion": self.confusion(confidence),
        }

    def confusion(self, confidence: float) -> dict[str, Any]:
        """Counts, [found, true], with a last row for what is missed and column for background."""
        matrix = ConfusionMatrix(names=dict(enumerate(self.names)))
        for detections, truth in self.pairs:
            shown = detections.above(confidence)
            given = {"cls": shown.labels, "conf": shown.scores, "bboxes": shown.xyxy}
            known = {"cls": truth.labels, "bboxes": truth.xyxy}
            matrix.process_batch(_tensors(given), _tensors(known), conf=0.0, iou_thres=0.5)
        labels = [*self.names, "background"]
        return {"labels": labels, "confidence": confidence, "matrix": matrix.matrix.tolist()}

    def matches(self, confidence: float = 0.25, level: float = 0.5) -> list[Matches]:
        """Per image: what is true, false and missed at a threshold."""
        return [match(d.above(confidence), t, level) for d, t in self.pairs]


def evaluate(
    model: Detector,
    data: str | os.PathLike[str] | Dataset,
    split: str = "val",
    *,
    confidence: float = 0.25,
    iou: float = 0.7,
    object_size: float | Literal["auto"] = "auto",
    report: Report | None = None,
) -> dict[str, Any]:
    """How well a model finds what a dataset (a data.yaml) has annotated.

    Returns a plain dict: "mAP50", "mAP50-95", "precision", "recall", "F1" (means over the classes
    that occur, the last three at each class's best threshold), "per_class" (the same with "AP50",
    "AP50-95", "threshold" and "count" for each), "curves" (per class: "recall" and "precision" at
    IoU 0.5; "confidence", "precision_at", "recall_at", "F1_at"), "confusion", "images". Classes
    are matched by name.
    """
    dataset = data if isinstance(data, Dataset) else read_dataset(data)
    tally = collect(model, dataset, split, iou=iou, object_size=object_size, report=report)
    return tally.measure(confidence)


def collect(
    model: Detector,
    dataset: Dataset,
    split: str = "val",
    *,
    iou: float = 0.7,
    object_size: float | Literal["auto"] = "auto",
    report: Report | None = None,
) -> Tally:
    """Run the model on a split and keep detections and annotations of every image."""
    check_dataset(dataset, [split])
    place = class_numbers(dataset.names, model.classes)
    items = dataset.splits[split]
    tally = Tally(model.classes)
    for number, item in enumerate(items):
        tell(report, number, len(items), item.image.name)
        image = read_image(item.image)
        size = image.pixel_size
        found = model.detect(
            image.pixels, iou=iou, object_size=object_size, pixel_size=size, densities=False
        )
        tally.add(found, truth_of(item, image.pixels.shape[:2], place))
    tell(report, 1, 1, "done")
    return tally


def truth_of(item: Item, shape: tuple[int, int], place: npt.NDArray[np.int64]) -> Truth:
    """An item's boxes in pixels, its labels as the model numbers them."""
    return Truth(from_centres(item.cxcywh, shape), place[item.labels], item.image.name)


def class_numbers(names: Sequence[str], classes: Sequence[str]) -> npt.NDArray[np.int64]:
    """(n,) for each of a dataset's class names the model's label; unknown ones are refused."""
    known = {name.casefold(): k for k, name in reversed(list(enumerate(classes)))}
    known |= {name: k for k, name in enumerate(classes)}  # written alike goes before all else
    place = {name: known.get(name, known.get(name.casefold())) for name in names}
    unknown = [name for name in names if place[name] is None]
    if unknown:
        raise ValueError(
            f"The model does not know the class{'es' * (len(unknown) > 1)} {', '.join(unknown)}; "
            f"it knows {', '.join(classes)}: name them alike in the data.yaml."
        )
    return np.array([place[name] for name in names], dtype=np.int64)


def match(detections: Detections, truth: Truth, level: float = 0.5) -> Matches:
    """What of the detections is true or false, and which annotations are missed."""
    partner = matches(
        detections.xyxy, truth.xyxy, level, detections.scores, detections.labels, truth.labels
    )
    missed = np.setdiff1d(np.arange(len(truth.xyxy)), partner)
    true, false = np.flatnonzero(partner >= 0), np.flatnonzero(partner < 0)
    return Matches(truth.name, true, partner[true], false, missed)


def _hits(detections: Detections, truth: Truth) -> npt.NDArray[np.bool_]:
    """(n, 10): whether each detection is right at each level."""
    overlap = torch.from_numpy(iou(truth.xyxy, detections.xyxy.astype(np.float64)))
    found, true = torch.from_numpy(detections.labels), torch.from_numpy(truth.labels)
    self = SimpleNamespace(iouv=torch.from_numpy(LEVELS))
    return np.asarray(DetectionValidator.match_predictions(self, found, true, overlap))


def _per_class(
    result: Any, names: Sequence[str], true: npt.NDArray[np.int64]
) -> tuple[dict[str, Any], dict[str, Any]]:
    ap, present, p_curve, r_curve, f1_curve, x, precision = result[5:12]
    rows = {int(k): row for row, k in enumerate(present)}
    per_class, curves = {}, {}
    for k, name in enumerate(names):
        if k not in rows:
            per_class[name] = _nothing(0)
            continue
        row = rows[k]
        best = _middle_of_maximum(f1_curve[row])
        per_class[name] = {
            "AP50": float(ap[row, 0]),
            "AP50-95": float(ap[row].mean()),
            "precision": float(p_curve[row, best]),
            "recall": float(r_curve[row, best]),
            "F1": float(f1_curve[row, best]),
            "threshold": float(x[best]),
            "count": int((true == k).sum()),
        }
        curves[name] = {
            "recall": x.tolist(),
            "precision": precision[row].tolist(),
            "confidence": x.tolist(),
            "precision_at": p_curve[row].tolist(),
            "recall_at": r_curve[row].tolist(),
            "F1_at": f1_curve[row].tolist(),
        }
    return per_class, curves


def _middle_of_maximum(curve: Array) -> int:
    """The index of the maximum; where the curve is flat there, the middle of that part."""
    first = int(np.argmax(curve))
    below = np.flatnonzero(curve[first:] < curve[first] - 1e-9)
    length = int(below[0]) if len(below) else len(curve) - first
    return first + (length - 1) // 2


def _nothing(count: int) -> dict[str, Any]:
    zero = dict.fromkeys(("AP50", "AP50-95", "precision", "recall", "F1"), 0.0)
    return {**zero, "threshold": None, "count": count}


def _means(present: list[dict[str, Any]]) -> dict[str, float]:
    """Over the classes that occur; 0 where none does."""
    keys = {"mAP50": "AP50", "mAP50-95": "AP50-95"}
    keys |= {key: key for key in ("precision", "recall", "F1")}
    return {
        name: float(np.mean([c[key] for c in present])) if present else 0.0
        for name, key in keys.items()
    }


def _joined(parts: Iterable[npt.NDArray[Any]], dtype: Any) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *parts])


def _tensors(arrays: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {key: torch.as_tensor(np.asarray(value, np.float32)) for key, value in arrays.items()}
