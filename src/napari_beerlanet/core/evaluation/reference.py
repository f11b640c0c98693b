"""Reference set of synthetic images that measures catastrophic forgetting after fine-tuning.

The images are drawn anew each time, from seeds that no training uses: the same bytes everywhere,
and nothing to download or to store.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.scale_search import typical_size
from napari_beerlanet.core.evaluation.dataset import measure
from napari_beerlanet.samples import NUCLEI, SampleField, blood_smear, he_field

REFERENCE_SEED = 880_000
REFERENCE_COUNT = 8
_IMAGE_SIZE = 640
_SMEAR_CLASSES = ("RBC", "WBC", "Platelets")
_DEFAULT_OBJECT_SIZES = {
    "smear": 105.0,
    "section": 24.0,
}  # pixels of an object where a model does not say


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
    typical = typical_size(info.get("object_sizes") or {})
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
        report_progress(report, number, len(fields), "looking at the reference")
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
