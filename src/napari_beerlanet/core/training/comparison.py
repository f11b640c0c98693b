"""Compare the model before and after training, on new and on reference data; save the best one.

comparison = compare_models(run)
comparison.rows()                                   # what a table shows
save_best_model(run, "my model", comparison)        # project/models/my-model.safetensors
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from napari_beerlanet.core.checkpoints.checkpoint import (
    checkpoint_hash,
    load_detector,
    save_checkpoint,
)
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.evaluation.dataset import REFERENCE_COUNT, compare_on_reference, evaluate
from napari_beerlanet.core.formats.dataset import Dataset, read_dataset
from napari_beerlanet.core.training.runs import read_run, unused_model_path

_CACHE_FILE = "compared.json"
_METRIC_KEYS = ("mAP50", "mAP50-95")
_FORGOTTEN = 0.05  # of AP50 that a class has lost at least
Metrics = dict[str, float]
ClassScores = tuple[float | None, float, int]
"""AP50 before and after, and the number of boxes."""


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison: `before` and `after` are mAPs from 0 to 1, None if unknown.

    Of a class, `count` annotated boxes were measured; `forgotten`: it was known clearly better.
    """

    what: str
    before: float | None
    after: float | None
    count: int | None = None

    @property
    def forgotten(self) -> bool:
        """Whether it fell by more than chance and by more than some points."""
        if self.before is None or self.after is None or not self.count:
            return False
        chance = 2 * math.sqrt(self.before * (1 - self.before) / self.count)  # standard errors
        return self.before - self.after > max(_FORGOTTEN, chance)


@dataclass(frozen=True)
class ModelComparison:
    """Two models, the metrics of both on either data, and sentences on what could not be had.

    Where a class was added, the metrics on the new data are of the classes that both know.
    `classes`: for "new data" and "reference", by class, AP50 before and after, and the number of
    boxes.
    """

    before: Detector
    after: Detector
    new: tuple[Metrics | None, Metrics]
    reference: tuple[Metrics, Metrics] | None
    notes: tuple[str, ...] = ()
    classes: dict[str, dict[str, ClassScores]] = field(default_factory=dict)

    def class_rows(self) -> list[ComparisonRow]:
        """AP50 of each class that was measured, on the new data and on the reference."""
        titles = {"new data": "New data", "reference": "Reference"}
        return [
            ComparisonRow(f"{titles[where]}, {name}", before, after, count)
            for where, classes in self.classes.items()
            for name, (before, after, count) in classes.items()
            if count
        ]

    @property
    def forgotten(self) -> list[str]:
        """Sentences' parts on classes that were forgotten: "WBC: 98.6 → 45.2 % (reference)"."""
        return [
            f"{row.what.partition(', ')[2]}: {100 * (row.before or 0):.1f} → "
            f"{100 * (row.after or 0):.1f} % ({row.what.partition(', ')[0].lower()})"
            for row in self.class_rows()
            if row.forgotten
        ]

    def rows(self) -> list[ComparisonRow]:
        """New data first, then the reference."""
        before, after = self.new
        rows = [
            ComparisonRow(f"New data, {key}", before[key] if before else None, after[key])
            for key in _METRIC_KEYS
        ]
        if self.reference is not None:
            before, after = self.reference
            rows += [
                ComparisonRow(f"Reference, {key}", before[key], after[key]) for key in _METRIC_KEYS
            ]
        return rows

    def to_dict(self) -> dict[str, Any]:
        """As plain data, for a file and for the saved model's record."""
        return {
            "new data": list(self.new),
            "reference": self.reference and list(self.reference),
            "classes": {
                where: {name: list(scores) for name, scores in classes.items()}
                for where, classes in self.classes.items()
            },
            "forgotten": self.forgotten,
        }


def compare_models(
    run: str | os.PathLike[str], report: Report | None = None, fields: int = REFERENCE_COUNT
) -> ModelComparison:
    """Evaluate the model that a run started from and its best one, on the same images.

    Cached metrics are read from the run's folder, as long as both models are the same.
    """
    folder = Path(run)
    settings = read_run(folder / "run.json")["settings"]
    best = folder / "best.safetensors"
    if not best.is_file():
        raise FileError(
            f"{folder}: no epoch of the run is finished, so there is no model to compare."
        )
    report_progress(report, 0, 20, "loading both models")
    before = load_detector(settings["model"], device="cpu")
    after = load_detector(best, device="cpu")
    key = {"before": checkpoint_hash(settings["model"]), "after": checkpoint_hash(best)}
    metrics = _read_cache(folder, key, fields)
    if metrics is None:
        metrics = _evaluate_both(before, after, str(settings["data"]), report, fields)
        _write_cache(folder, key, fields, metrics)
    report_progress(report, 1, 1, "done")
    new, reference = metrics["new data"], metrics["reference"]
    return ModelComparison(
        before,
        after,
        tuple(new),
        reference and tuple(reference),
        tuple(metrics["notes"]),
        metrics.get("classes", {}),
    )


def _evaluate_both(
    before: Detector, after: Detector, data: str, report: Report | None, fields: int
) -> dict[str, Any]:
    dataset = read_dataset(data)
    known = {name.casefold() for name in before.classes}
    shared = [name for name in dataset.names if name.casefold() in known]
    new = [name for name in dataset.names if name not in shared]
    later = evaluate(after, dataset, report=subprogress(report, 0.05, 0.25))
    notes, earlier = [], None
    if shared:
        some = _with_classes(dataset, shared) if new else dataset
        earlier = evaluate(before, some, report=subprogress(report, 0.25, 0.45))
    if new:
        scores = "; scores of the new data are of the other classes" if shared else ""
        notes.append(f"The model before does not know {', '.join(new)}{scores}.")
    classes = {"new data": _class_scores(earlier, later, dataset.names)}
    on_reference = compare_on_reference(before, after, fields, subprogress(report, 0.45, 1.0))
    pair = None
    if on_reference is None:
        notes.append("There is no reference dataset for a model of these classes.")
    else:
        pair = [_main_metrics(on_reference.before), _main_metrics(on_reference.after)]
        classes["reference"] = _class_scores(
            on_reference.before, on_reference.after, on_reference.classes
        )
    both = shared or dataset.names
    return {
        "new data": [earlier and _mean_metrics(earlier, both), _mean_metrics(later, both)],
        "reference": pair,
        "classes": classes,
        "notes": notes,
    }


def _with_classes(dataset: Dataset, names: list[str]) -> Dataset:
    """The same images with the boxes of these classes only."""
    place = np.array([names.index(n) if n in names else -1 for n in dataset.names], np.int64)
    items = []
    for item in dataset.splits["val"]:
        labels = place[item.labels]
        kept = labels >= 0
        items.append(replace(item, labels=labels[kept], cxcywh=item.cxcywh[kept]))
    return Dataset(dataset.path, names, {"val": items}, inspections=dataset.inspections)


def _class_scores(
    earlier: Mapping[str, Any] | None, later: Mapping[str, Any], names: Sequence[str]
) -> dict[str, ClassScores]:
    """AP50 before (None of a class that is new) and after, and the number of boxes, by class."""
    before = _by_folded_name(earlier["per_class"] if earlier else {})
    after = _by_folded_name(later["per_class"])
    scores = {}
    for name in names:
        old, now = before.get(name.casefold()), after[name.casefold()]
        ap = None if old is None else round(float(old["AP50"]), 5)
        scores[name] = (ap, round(float(now["AP50"]), 5), int(now["count"]))
    return scores


def _mean_metrics(metrics: Mapping[str, Any], names: Sequence[str]) -> Metrics:
    """Means over those of these classes that occur."""
    classes = _by_folded_name(metrics["per_class"])
    present = [c for n in names if (c := classes[n.casefold()])["count"]]
    keys = {"mAP50": "AP50", "mAP50-95": "AP50-95"}
    return {
        key: round(float(np.mean([c[ap] for c in present])), 5) if present else 0.0
        for key, ap in keys.items()
    }


def _by_folded_name(classes: Mapping[str, Any]) -> dict[str, Any]:
    return {name.casefold(): values for name, values in classes.items()}


def save_best_model(
    run: str | os.PathLike[str], name: str, comparison: ModelComparison | None = None
) -> Path:
    """Save a run's best model into its project's `models`; returns the file.

    Its record holds parent, data, settings, seed, versions and metrics, and how it compares. No
    model that is there is ever overwritten: a name that is taken gets a number.
    """
    folder = Path(run)
    model = load_detector(folder / "best.safetensors", device="cpu")
    path = unused_model_path(folder.parents[1], name)
    training = {**(model.info.get("training") or {}), "run": folder.name}
    if comparison is not None:
        training["compared"] = comparison.to_dict()
    save_checkpoint(
        Detector(model.network, {**model.info, "name": path.stem, "training": training}), path
    )
    return path


def record_comparison(path: Path, comparison: ModelComparison) -> dict[str, Any]:
    """Add a comparison to a model that was saved before it was done; returns the new `info`."""
    model = load_detector(path, device="cpu")
    training = {**(model.info.get("training") or {}), "compared": comparison.to_dict()}
    info = {**model.info, "training": training}
    save_checkpoint(Detector(model.network, info), path)
    return info


def _main_metrics(metrics: Mapping[str, Any]) -> Metrics:
    return {key: round(float(metrics[key]), 5) for key in _METRIC_KEYS}


def _read_cache(folder: Path, key: dict[str, str], fields: int) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / _CACHE_FILE).read_text(encoding="utf-8"))
        metrics: dict[str, Any] = content["result"]
        return metrics if content["models"] == key and content["fields"] == fields else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(folder: Path, key: dict[str, str], fields: int, metrics: dict[str, Any]) -> None:
    """So that it need not be done again; where it cannot be written, it will be."""
    content = {"models": key, "fields": fields, "result": metrics}
    with suppress(OSError), atomic_path(folder / _CACHE_FILE) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
