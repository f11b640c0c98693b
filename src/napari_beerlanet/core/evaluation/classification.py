"""Metrics of classifiers, and a classifier on a dataset of crops."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import match_class_names, wilson_interval
from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.boxes.geometry import xyxy_to_cxcywh
from napari_beerlanet.core.boxes.matching import match_boxes
from napari_beerlanet.core.classification.classifier import Classification, Classifier
from napari_beerlanet.core.common.messages import name_list, quoted
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.formats.class_folders import (
    WHOLE,
    CropDataset,
    LabelledCrop,
    check_crop_dataset,
    read_crop_dataset,
)
from napari_beerlanet.core.images.files import read_image

Labels = npt.NDArray[np.int64]
Scores = npt.NDArray[np.floating[Any]]

_CALIBRATION_BINS = 15


def evaluate_classifier(
    model: Classifier,
    data: str | os.PathLike[str] | CropDataset,
    split: str = "val",
    *,
    ordered: Sequence[Sequence[str]] | None = None,
    detector: Detector | None = None,
    object_class: str | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """How well a classifier names the crops of a dataset; see `classification_metrics`.

    Of a dataset without splits all crops count. With a `detector` crops are recentred and rescaled
    first, see `locate_cells`.
    """
    dataset = data if isinstance(data, CropDataset) else read_crop_dataset(data)
    split = WHOLE if list(dataset.splits) == [WHOLE] else split
    place = match_class_names([n for n, k in dataset.counts(split).items() if k], model.classes)
    check_crop_dataset(dataset, [split], subprogress(report, 0.0, 0.1), least=0)
    items = dataset.splits[split]
    if detector is not None:
        fill = model.network.settings.fill
        items = locate_cells(items, detector, fill, object_class, subprogress(report, 0.1, 0.5))
    result = classify_items(model, items, subprogress(report, 0.5 if detector else 0.1, 1.0))
    present = {name: k for k, name in enumerate(n for n, c in dataset.counts(split).items() if c)}
    true = np.array([place[present[dataset.names[item.label]]] for item in items], np.int64)
    metrics = classification_metrics(true, result.scores, model.classes, ordered)
    images = len({item.source or str(item.image) for item in items})
    return {
        **metrics,
        "split": None if split == WHOLE else split,
        "images": images,
        "notes": [*dataset.notes, *result.report["notes"]],
    }


def classify_items(
    model: Classifier, items: Sequence[LabelledCrop], report: Report | None = None
) -> Classification:
    """The crops of a dataset, in its order; crops of one image are classified together."""
    # Stains of every image would be fitted for warnings that nobody reads here.
    model = Classifier(model.network, {**model.info, "stain_seen": None}, model.device)
    parts: list[Classification] = []
    done = 0
    for image, group in groupby(items, key=lambda item: item.image if item.cxcywh else None):
        mine = list(group)
        part = subprogress(report, done / len(items), (done + len(mine)) / len(items))
        if image is None:
            parts.append(model.classify(_ImageFiles([item.image for item in mine]), report=part))
        else:
            pixels = read_image(image).pixels
            boxes = np.array([item.box(pixels.shape[:2]) for item in mine])
            parts.append(model.classify(pixels, boxes=boxes, report=part))
        done += len(mine)
    return Classification(
        np.concatenate([np.empty(0, np.int64), *(part.labels for part in parts)]),
        np.concatenate(
            [np.empty((0, len(model.classes)), np.float32), *(part.scores for part in parts)]
        ),
        model.classes,
        {"notes": list(dict.fromkeys(note for part in parts for note in part.report["notes"]))},
    )


def locate_cells(
    items: Sequence[LabelledCrop],
    detector: Detector,
    fill: float,
    object_class: str | None = None,
    report: Report | None = None,
) -> list[LabelledCrop]:
    """Crops with the box of the cell in their middle, so that all show it at the same size.

    Laboratories differ in how much of a crop the cell fills. Its box is the most certain one, of
    `object_class` if given, that covers the middle of the image; where there is none, the part
    `fill` of the image is taken for it. Items that have a box keep it.
    """
    if object_class is not None and object_class not in detector.classes:
        raise ValueError(
            f"The detector has no class {quoted(object_class)}; it has "
            f"{name_list(detector.classes)}."
        )
    located = []
    sizes: list[float] = []
    for number, item in enumerate(items):
        report_progress(report, number, len(items), "finding the cells in crops")
        box = item.cxcywh or _middle_box(item, detector, object_class, sizes)
        located.append(replace(item, cxcywh=box or (0.5, 0.5, fill, fill)))
    return located


def _middle_box(
    item: LabelledCrop, detector: Detector, object_class: str | None, sizes: list[float]
) -> tuple[float, float, float, float] | None:
    """The box in the middle of a crop; `sizes` are object sizes of crops before, and this one's.

    One crop shows few cells to tell their size by; others of the laboratory have it, too.
    """
    image = read_image(item.image)
    usual = float(np.median(sizes)) if sizes else None
    settings: dict[str, Any] = {"pixel_size": image.pixel_size, "densities": False}
    found = detector.detect(image.pixels, size_hint=usual, **settings)
    box = _covering_middle(found, image.pixels.shape[:2], object_class)
    if box is None and usual is not None:
        found = detector.detect(image.pixels, object_size=usual, **settings)
        return _covering_middle(found, image.pixels.shape[:2], object_class)
    if box is not None and found.report.get("object_size"):
        sizes.append(float(found.report["object_size"]))
    return box


def _covering_middle(
    found: Detections, shape: tuple[int, int], object_class: str | None
) -> tuple[float, float, float, float] | None:
    height, width = shape
    if object_class is not None:
        found = found[found.labels == found.names.index(object_class)]
    middle = np.array([width, height]) / 2
    covers = ((found.xyxy[:, :2] < middle) & (found.xyxy[:, 2:] > middle)).all(1)
    if not covers.any():
        return None
    best = found.xyxy[covers][:1].astype(np.float64)  # the highest score comes first
    x, y, w, h = xyxy_to_cxcywh(best, (height, width))[0].tolist()
    return x, y, w, h


class _ImageFiles(Sequence[Any]):
    """Images that are read when they are asked for."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths = paths

    def __len__(self) -> int:
        return len(self._paths)

    @overload
    def __getitem__(self, which: int) -> Any: ...

    @overload
    def __getitem__(self, which: slice) -> list[Any]: ...

    def __getitem__(self, which: int | slice) -> Any:
        if isinstance(which, slice):
            return [read_image(path).pixels for path in self._paths[which]]
        return read_image(self._paths[which]).pixels


@dataclass(frozen=True, eq=False)
class TypeMatches:
    """Cell types of detections against those of annotations, in the order of `names`.

    `confusion` (k + 1, k + 1) [detected as, annotated as]; the last row and column are cells that
    have no box or no type on the other side. `metrics` are `classification_metrics` of the cells
    that have a type on both sides.
    """

    names: list[str]
    confusion: Labels
    metrics: dict[str, Any]


def match_types(
    detections: Detections, annotations: Annotations | Detections, min_iou: float = 0.5
) -> TypeMatches | None:
    """Match boxes of at least this IoU, whatever their classes, and compare their types.

    None where one of both has no types.
    """
    truth = annotations.to_detections() if isinstance(annotations, Annotations) else annotations
    if not any(detections.type_counts().values()) or not any(truth.type_counts().values()):
        return None
    names = list(dict.fromkeys([*detections.types, *truth.types]))
    partner = match_boxes(detections.xyxy, truth.xyxy, min_iou, detections.scores)
    found, true = (_type_labels(part, names) for part in (detections, truth))
    pairs = np.flatnonzero(partner >= 0)
    confusion = np.zeros((len(names) + 1, len(names) + 1), np.int64)
    np.add.at(confusion, (found[pairs], true[partner[pairs]]), 1)
    confusion[:, -1] += np.bincount(found[partner < 0], minlength=len(names) + 1)
    missed = np.setdiff1d(np.arange(len(truth)), partner[pairs])
    confusion[-1] += np.bincount(true[missed], minlength=len(names) + 1)
    confusion[-1, -1] = 0  # cells without a type on either side say nothing
    both = pairs[(found[pairs] < len(names)) & (true[partner[pairs]] < len(names))]
    scores = _type_scores(detections[both], found[both], names)
    return TypeMatches(names, confusion, classification_metrics(true[partner[both]], scores, names))


def _type_labels(detections: Detections, names: Sequence[str]) -> Labels:
    """(n,) places in `names`, their number where there is no type."""
    place = {name: k for k, name in enumerate(names)}
    given = detections.columns.get(TYPE_COLUMN, np.full(len(detections), "", object))
    return np.array([place.get(str(name), len(names)) for name in given], np.int64)


def _type_scores(detections: Detections, labels: Labels, names: Sequence[str]) -> Scores:
    """(n, k) probabilities; certainty of the type where they are not known or say otherwise."""
    zero = np.zeros(len(detections))
    known = [np.asarray(detections.columns.get(f"P({name})", zero), np.float64) for name in names]
    scores = np.nan_to_num(np.stack(known, 1)) if known else np.empty((len(detections), 0))
    rows = np.flatnonzero((scores.argmax(1) != labels) | ~scores.any(1)) if len(scores) else labels
    scores[rows] = np.eye(len(names))[labels[rows]]
    return np.asarray(scores)


# --- metrics -------------------------------------------------------------------------------------


def classification_metrics(
    true: Labels,
    scores: Scores,
    names: Sequence[str],
    ordered: Sequence[Sequence[str]] | None = None,
) -> dict[str, Any]:
    """Metrics of probabilities `scores` (n, k) for crops whose classes are `true` (n,).

    A plain dict: "accuracy"; "balanced_accuracy", the mean recall of the classes that occur;
    "relaxed_accuracy", for which a neighbour within a group of `ordered` counts as correct, too;
    "per_class" ("precision", "recall", "F1" by name, "count" and "predicted" that these stand on,
    and Wilson's 95 % intervals "precision_interval" and "recall_interval", None of no crops);
    "confusion" ("labels", and "matrix" [predicted as, annotated as], as for detectors); "roc_auc"
    of two classes, else None; "ece", the expected calibration error; "crops",
    "accuracy_interval".
    """
    true, scores = np.asarray(true, np.int64), np.asarray(scores, np.float64)
    labels = scores.argmax(1)
    matrix = np.zeros((len(names), len(names)), np.int64)
    np.add.at(matrix, (labels, true), 1)
    hits, annotated, predicted = matrix.diagonal(), matrix.sum(0), matrix.sum(1)
    precision, recall = _ratio(hits, predicted), _ratio(hits, annotated)
    f1 = _ratio(2 * hits, annotated + predicted)
    occurs = annotated > 0
    return {
        "accuracy": _mean(labels == true),
        "accuracy_interval": _interval(int(hits.sum()), len(true)),
        "balanced_accuracy": _mean(recall[occurs]),
        "relaxed_accuracy": relaxed_accuracy(true, labels, names, ordered or ()),
        "roc_auc": roc_auc(true == 1, scores[:, 1]) if len(names) == 2 else None,
        "ece": expected_calibration_error(true, scores),
        "crops": len(true),
        "per_class": {
            name: {
                "precision": float(precision[k]),
                "recall": float(recall[k]),
                "F1": float(f1[k]),
                "count": int(annotated[k]),
                "predicted": int(predicted[k]),
                "precision_interval": _interval(int(hits[k]), int(predicted[k])),
                "recall_interval": _interval(int(hits[k]), int(annotated[k])),
            }
            for k, name in enumerate(names)
        },
        "confusion": {"labels": list(names), "matrix": matrix.tolist()},
    }


def relaxed_accuracy(
    true: Labels, labels: Labels, names: Sequence[str], ordered: Sequence[Sequence[str]]
) -> float:
    """The share of labels that are right, or one step away within an ordered group of classes."""
    accepted = np.eye(len(names), dtype=bool)
    seen: set[str] = set()
    for group in ordered:
        if isinstance(group, str):
            raise ValueError(
                f"ordered is a list of groups, each a list of classes in their order; "
                f"{quoted(group)} is no group."
            )
        for name in group:
            if name not in names:
                raise ValueError(
                    f"ordered names {quoted(name)}, which is no class; there are "
                    f"{name_list(names)}."
                )
            if name in seen:
                raise ValueError(f"ordered names {quoted(name)} twice; a class is in one group.")
            seen.add(name)
        places = [list(names).index(name) for name in group]
        for a, b in pairwise(places):
            accepted[a, b] = accepted[b, a] = True
    return _mean(accepted[labels, true])


def roc_auc(positive: npt.NDArray[np.bool_], scores: Scores) -> float | None:
    """The area under the ROC curve: how often a positive one has the higher score; ties are half.

    None where one of the two kinds does not occur.
    """
    count = int(positive.sum())
    others = len(positive) - count
    if not count or not others:
        return None
    values, place = np.unique(scores, return_inverse=True)
    sizes = np.bincount(place, minlength=len(values))
    ranks = (np.cumsum(sizes) - (sizes - 1) / 2)[place]  # of equal ones the mean
    return float((ranks[positive].sum() - count * (count + 1) / 2) / (count * others))


def expected_calibration_error(
    true: Labels, scores: Scores, bins: int = _CALIBRATION_BINS
) -> float | None:
    """Σ over bins of confidence: share of crops × |accuracy − mean confidence|; None without any.

    Bins are of equal width, (k / bins, (k + 1) / bins].
    """
    if not len(true):
        return None
    confidence, right = scores.max(1), scores.argmax(1) == true
    place = np.clip(np.ceil(confidence * bins).astype(int) - 1, 0, bins - 1)
    gap = np.bincount(place, right, bins) - np.bincount(place, confidence, bins)
    return float(np.abs(gap).sum() / len(true))


def _ratio(part: npt.NDArray[Any], whole: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """part / whole, 0 where there is nothing."""
    return np.asarray(np.divide(part, whole, out=np.zeros(len(part)), where=whole > 0))


def _interval(part: int, whole: int) -> list[float] | None:
    return list(wilson_interval(part, whole)) if whole else None


def _mean(values: npt.NDArray[Any]) -> float:
    return float(np.mean(values)) if len(values) else 0.0
