"""Evaluate a model on a dataset; of a detector: mAP, precision, recall, F1, curves, confusion.

Measured on what `Detector.detect` gives a user, choice of the object size included. The reference,
a set of synthetic images, measures catastrophic forgetting after fine-tuning. They are drawn anew
each time, from seeds that no training uses: the same bytes everywhere, and nothing to store.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import match_class_names
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import cxcywh_to_xyxy
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.object_sizes import reference_size
from napari_beerlanet.core.detection.scale_search import pooled_size
from napari_beerlanet.core.detection.settings import DetectSettings, OpenVinoMode
from napari_beerlanet.core.evaluation.classification import evaluate_classifier
from napari_beerlanet.core.evaluation.live import LabelledBoxes, LiveEvaluation
from napari_beerlanet.core.evaluation.metrics import plateau_centre
from napari_beerlanet.core.formats.dataset import (
    Dataset,
    LabelledImage,
    check_dataset,
    read_dataset,
)
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.samples import NUCLEI, SampleField, blood_smear, he_field

REFERENCE_SEED = 880_000
REFERENCE_COUNT = 8
_IMAGE_SIZE = 640
_SMEAR_CLASSES = ("RBC", "WBC", "Platelets")
_DEFAULT_OBJECT_SIZES = {
    "smear": 105.0,
    "section": 24.0,
}  # pixels of an object where a model does not say
_SIZE_FIELDS = 8  # that tell the size of objects in all
_DEFAULTS = DetectSettings()


def evaluate(
    model: Detector | Classifier,
    data: str | os.PathLike[str] | Dataset,
    split: str = "val",
    *,
    confidence: float = _DEFAULTS.confidence,
    iou: float = _DEFAULTS.iou,
    object_size: float | Literal["auto"] = _DEFAULTS.object_size,
    openvino: OpenVinoMode = _DEFAULTS.openvino,
    ordered: Sequence[Sequence[str]] | None = None,
    detector: Detector | None = None,
    object_class: str | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """How well a model finds what a dataset has annotated, or names its crops.

    A detector takes a data.yaml. The result is a plain dict: "mAP50", "mAP50-95", "precision",
    "recall", "F1" (means over the classes that occur, the last three at each class's best
    threshold), "per_class" (the same with "AP50",
    "AP50-95", "threshold" and "count" for each), "curves" (per class: "recall" and "precision" at
    IoU 0.5; "confidence", "precision_at", "recall_at", "F1_at"), "confusion", "images".

    A classifier takes a folder per class, Ultralytics' classification layout, images with files of
    annotations that have types, or a data.yaml, of whose boxes it gets crops; what has no splits is
    taken whole. `ordered` are groups of classes for the relaxed accuracy; with a `detector` crops
    are recentred and rescaled by its boxes first, of `object_class` if given (`locate_cells`). The
    result is that of `classification_metrics`, with "images" and "notes" on the data.

    Classes are matched by name.
    """
    if isinstance(model, Classifier):
        if isinstance(data, Dataset):
            data = data.path
        return evaluate_classifier(
            model,
            data,
            split,
            ordered=ordered,
            detector=detector,
            object_class=object_class,
            report=report,
        )
    dataset = data if isinstance(data, Dataset) else read_dataset(data)
    pairs = detect_split(
        model, dataset, split, iou=iou, object_size=object_size, openvino=openvino, report=report
    )
    return measure(pairs, model.classes, confidence)


def detect_split(
    model: Detector,
    dataset: Dataset,
    split: str = "val",
    *,
    iou: float = _DEFAULTS.iou,
    object_size: float | Literal["auto"] = _DEFAULTS.object_size,
    openvino: OpenVinoMode = _DEFAULTS.openvino,
    report: Report | None = None,
) -> list[tuple[Detections, Annotations]]:
    """Run the model on a split: detections and annotations of every image."""
    check_dataset(dataset, [split])
    place = match_class_names(dataset.names, model.classes)
    items = dataset.splits[split]
    pairs = []

    def find(item: LabelledImage, hint: float | None) -> Detections:
        image = read_image(item.image)
        return model.detect(
            image.pixels,
            iou=iou,
            object_size=object_size,
            pixel_size=image.pixel_size,
            size_hint=hint,
            densities=False,
            openvino=openvino,
        )

    hint = None
    if object_size == "auto" and len(items) > 1:
        some = np.unique(np.linspace(0, len(items) - 1, min(len(items), _SIZE_FIELDS)).astype(int))
        hint = pooled_size([find(items[k], None) for k in some])
    for number, item in enumerate(items):
        report_progress(report, number, len(items), item.image.name)
        detections = find(item, hint)
        boxes = cxcywh_to_xyxy(item.cxcywh, detections.image_shape)
        pairs.append((detections, Annotations(boxes, place[item.labels], model.classes)))
    report_progress(report, 1, 1, "done")
    return pairs


def measure(
    pairs: Sequence[tuple[Detections, LabelledBoxes]],
    names: Sequence[str],
    confidence: float = _DEFAULTS.confidence,
) -> dict[str, Any]:
    """All metrics of many images as a plain dict, per class in the order of `names`.

    All candidates count, whatever the threshold of the detections. See `evaluate`.
    """
    evaluation = LiveEvaluation(pairs, names=names)
    precisions, counts = evaluation.average_precisions(), evaluation.counts
    some = len(evaluation.labels) > 0 and len(evaluation.true_labels) > 0
    curves = {n: evaluation.curve(n).sampled() for n in names if some and counts[n]}
    per_class = {
        name: _class_metrics(precisions[k], curves.get(name, {}), counts[name])
        for k, name in enumerate(names)
    }
    return {
        **_mean_metrics([c for c in per_class.values() if c["count"]]),
        "images": len(pairs),
        "per_class": per_class,
        "curves": {
            name: {key: values.tolist() for key, values in sampled.items()}
            for name, sampled in curves.items()
        },
        "confusion": {
            "labels": [*names, "background"],
            "confidence": confidence,
            "matrix": evaluation.match_at(confidence).confusion.matrix.tolist(),
        },
    }


def _class_metrics(
    precisions: npt.NDArray[np.float64], curves: Mapping[str, npt.NDArray[np.float64]], count: int
) -> dict[str, Any]:
    """At the threshold of the best F1; zeros and no threshold without curves."""
    found: dict[str, Any] = dict.fromkeys(("AP50", "AP50-95", "precision", "recall", "F1"), 0.0)
    if not curves:
        return {**found, "threshold": None, "count": count}
    best = plateau_centre(curves["F1_at"])
    return {
        "AP50": float(precisions[0]),
        "AP50-95": float(precisions.mean()),
        **{key: float(curves[f"{key}_at"][best]) for key in ("precision", "recall", "F1")},
        "threshold": float(curves["confidence"][best]),
        "count": count,
    }


def _mean_metrics(present: list[dict[str, Any]]) -> dict[str, float]:
    """Over the classes that occur; 0 where none does."""
    keys = {"mAP50": "AP50", "mAP50-95": "AP50-95"}
    keys |= {key: key for key in ("precision", "recall", "F1")}
    return {
        name: float(np.mean([c[key] for c in present])) if present else 0.0
        for name, key in keys.items()
    }


# --- the reference --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Forgetting:
    """How a model does on the reference before and after training, on `classes` that both know.

    `before` and `after` have "mAP50", "mAP50-95" and, per class, "AP50".
    """

    classes: list[str]
    before: dict[str, Any]
    after: dict[str, Any]


def reference_images(info: Mapping[str, Any], count: int = REFERENCE_COUNT) -> list[SampleField]:
    """Fields with the objects that a model of this `info` finds, as large as it knows them.

    Empty where the package can draw no such objects.
    """
    known = {str(name).casefold() for name in info["classes"]}
    typical = reference_size(info)
    size = None if typical is None else typical * _IMAGE_SIZE / info["image_size"]
    seeds = range(REFERENCE_SEED, REFERENCE_SEED + count)
    if known & {name.casefold() for name in _SMEAR_CLASSES}:
        diameter = size or _DEFAULT_OBJECT_SIZES["smear"]
        shape = (_IMAGE_SIZE * 3 // 4, _IMAGE_SIZE)
        rare: dict[str, Any] = {"white_cells": 0.15, "platelets": 0.2}  # else a few decide
        return [blood_smear(shape, seed=s, cell_diameter=diameter, **rare) for s in seeds]
    if known & {name.casefold() for name in NUCLEI}:
        diameter = size or _DEFAULT_OBJECT_SIZES["section"]
        return [
            he_field((_IMAGE_SIZE, _IMAGE_SIZE), seed=s, nucleus_diameter=diameter) for s in seeds
        ]
    return []


def evaluate_on_reference(
    model: Detector,
    fields: Sequence[SampleField],
    classes: Sequence[str] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """What `evaluate` measures, on fields, for the classes named or all that the model knows."""
    pairs = []
    place = {name.casefold(): k for k, name in enumerate(model.classes)}
    wanted = place.keys() if classes is None else {name.casefold() for name in classes}
    for number, field in enumerate(fields):
        report_progress(report, number, len(fields), "evaluating on the reference")
        found = model.detect(field.image, densities=False)
        labels = np.array([place.get(name.casefold(), -1) for name in field.names])[field.labels]
        asked = np.array([name.casefold() in wanted for name in field.names])[field.labels]
        keep = (labels >= 0) & asked
        pairs.append((found, Annotations(field.boxes[keep], labels[keep], model.classes)))
    report_progress(report, 1, 1, "done")
    return measure(pairs, model.classes)


def compare_on_reference(
    before: Detector, after: Detector, count: int = REFERENCE_COUNT, report: Report | None = None
) -> Forgetting | None:
    """Both models on the reference of the first; None where there is none for it."""
    fields = reference_images(before.info, count)
    both = {name.casefold() for name in before.classes} & {n.casefold() for n in after.classes}
    drawn = {name.casefold() for field in fields for name in field.names}
    classes = [name for name in before.classes if name.casefold() in both & drawn]
    if not fields or not classes:
        return None
    first = evaluate_on_reference(before, fields, classes, subprogress(report, 0.0, 0.5))
    second = evaluate_on_reference(after, fields, classes, subprogress(report, 0.5, 1.0))
    return Forgetting(classes, first, second)
