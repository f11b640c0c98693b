"""A fixed set of synthetic fields that tells what a model has forgotten in learning something new.

The fields are drawn anew each time, from seeds that no training uses: the same bytes everywhere,
and nothing to download or to keep.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from napari_beerlanet.core.detector import Detector
from napari_beerlanet.core.evaluate import Tally, Truth
from napari_beerlanet.core.progress import Report, tell, within
from napari_beerlanet.core.sizes import typical_size
from napari_beerlanet.sample_data import NUCLEI, SampleField, blood_smear, he_field

SEED = 880_000
FIELDS = 8
_SIDE = 640
_SMEAR = ("RBC", "WBC", "Platelets")
_TYPICAL = {"smear": 105.0, "section": 24.0}  # pixels of an object where a model does not say


@dataclass(frozen=True)
class Forgetting:
    """How a model does on the reference before and after training, on `classes` that both know.

    `before` and `after` have "mAP50", "mAP50-95" and, per class, "AP50".
    """

    classes: list[str]
    before: dict[str, Any]
    after: dict[str, Any]

    @property
    def lost(self) -> float:
        """mAP50 before minus after, so that more is worse."""
        return float(self.before["mAP50"] - self.after["mAP50"])

    def sentence(self) -> str:
        """For people, in points of mAP50."""
        points = 100 * self.lost
        was, now = (f"{100 * part['mAP50']:.1f}" for part in (self.before, self.after))
        if abs(points) < 1:
            return f"What it knew it still knows: mAP50 on the reference was {was} and is {now}."
        word = "lost" if points > 0 else "gained"
        amount = f"{abs(points):.1f} points of mAP50"
        return f"On the reference it {word} {amount}: {was} before, {now} now."


def reference_fields(info: Mapping[str, Any], count: int = FIELDS) -> list[SampleField]:
    """Fields with the objects that a model of this `info` finds, as large as it knows them.

    Empty where the package can draw no such objects.
    """
    known = {str(name).casefold() for name in info["classes"]}
    typical = typical_size(info.get("object_sizes") or {})
    size = None if typical is None else typical * _SIDE / info["image_size"]
    seeds = range(SEED, SEED + count)
    if known & {name.casefold() for name in _SMEAR}:
        diameter = size or _TYPICAL["smear"]
        shape = (_SIDE * 3 // 4, _SIDE)
        rare: dict[str, Any] = {"white_cells": 0.15, "platelets": 0.2}  # else a few decide
        return [blood_smear(shape, seed=s, cell_diameter=diameter, **rare) for s in seeds]
    if known & {name.casefold() for name in NUCLEI}:
        diameter = size or _TYPICAL["section"]
        return [he_field((_SIDE, _SIDE), seed=s, nucleus_diameter=diameter) for s in seeds]
    return []


def measure(
    model: Detector,
    fields: Sequence[SampleField],
    classes: Sequence[str] | None = None,
    report: Report | None = None,
) -> dict[str, Any]:
    """What `evaluate` measures, on fields, for the classes named or all that the model knows."""
    tally = Tally(model.classes)
    place = {name.casefold(): k for k, name in enumerate(model.classes)}
    wanted = place.keys() if classes is None else {name.casefold() for name in classes}
    for number, field in enumerate(fields):
        tell(report, number, len(fields), "looking at the reference")
        found = model.detect(field.image, densities=False)
        labels = np.array([place.get(name.casefold(), -1) for name in field.names])[field.labels]
        asked = np.array([name.casefold() in wanted for name in field.names])[field.labels]
        keep = (labels >= 0) & asked
        tally.add(found, Truth(field.boxes[keep].astype(np.float64), labels[keep]))
    tell(report, 1, 1, "done")
    return tally.measure()


def compare_on_reference(
    before: Detector, after: Detector, count: int = FIELDS, report: Report | None = None
) -> Forgetting | None:
    """Both models on the reference of the first; None where there is none for it."""
    fields = reference_fields(before.info, count)
    both = {name.casefold() for name in before.classes} & {n.casefold() for n in after.classes}
    drawn = {name.casefold() for field in fields for name in field.names}
    classes = [name for name in before.classes if name.casefold() in both & drawn]
    if not fields or not classes:
        return None
    first = measure(before, fields, classes, within(report, 0.0, 0.5))
    second = measure(after, fields, classes, within(report, 0.5, 1.0))
    return Forgetting(classes, first, second)
