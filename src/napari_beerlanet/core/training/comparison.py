"""Compare the model before and after training, on new and on reference data; save the best one.

Of detectors the reference is drawn by this package; of classifiers it is a folder of crops, if the
run's settings name one.

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
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.checkpoints.checkpoint import (
    load_checkpoint,
    load_classifier,
    load_detector,
    save_checkpoint,
)
from napari_beerlanet.core.classification.classifier import Classification, Classifier
from napari_beerlanet.core.common.messages import count_of, name_list
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import DataError, FileError, atomic_path, regular_file
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.evaluation.classification import classification_metrics, classify_items
from napari_beerlanet.core.evaluation.dataset import REFERENCE_COUNT, compare_on_reference, evaluate
from napari_beerlanet.core.evaluation.diff import ModelChange
from napari_beerlanet.core.formats.class_folders import CropDataset, read_crop_dataset
from napari_beerlanet.core.formats.dataset import (
    Dataset,
    check_dataset,
    read_dataset,
)
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.training.runs import read_run, unused_model_path
from napari_beerlanet.core.training.setup import compare_with_parent, comparison_key
from napari_beerlanet.core.training.train_classifier import (
    ClassifierTrainSettings,
    training_crops,
)
from napari_beerlanet.core.training.trainer.classification import TrainingCrops

_CACHE_FILE = "compared.json"
_METRIC_KEYS = ("mAP50", "mAP50-95")
_CLASSIFIER_KEYS = ("balanced accuracy", "accuracy")
_FORGOTTEN = 0.05  # of AP50 that a class has lost at least
Metrics = dict[str, float]
ClassScores = tuple[float | None, float, int]
"""AP50, or of a type the recall, before and after, and the number of boxes or crops."""


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison: `before` and `after` are scores from 0 to 1, None if unknown.

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
        return round(self.before - self.after, 5) > max(_FORGOTTEN, chance)


class CropChange(NamedTuple):
    """A validation crop (size, size, 3) and its type: as annotated, before and after training."""

    pixels: npt.NDArray[np.uint8]
    annotated: str
    before: str
    after: str

    @property
    def gained(self) -> bool:
        """Whether it is right now and was not before."""
        return self.after == self.annotated != self.before

    @property
    def lost(self) -> bool:
        """Whether it was right before and is not now."""
        return self.before == self.annotated != self.after


@dataclass(frozen=True)
class ModelComparison:
    """Two models, the metrics of both on either data, and sentences on what could not be had.

    Where a class was added, the metrics on the new data are of the classes that both know.
    `classes`: for "new data" and "reference", by class, AP50 before and after, and the number of
    boxes; of classifiers the recall, and crops. `before` is None where a classifier was trained
    from a backbone alone. `keys` name the metrics; `changes` are validation crops whose type is
    another one now, of `crops` in all. `change` says of detectors whether they take cells for other
    sizes or classes.
    """

    before: Any
    after: Any
    new: tuple[Metrics | None, Metrics]
    reference: tuple[Metrics, Metrics] | None
    notes: tuple[str, ...] = ()
    classes: dict[str, dict[str, ClassScores]] = field(default_factory=dict)
    keys: tuple[str, ...] = _METRIC_KEYS
    changes: tuple[CropChange, ...] = ()
    crops: int = 0
    change: ModelChange | None = None

    @property
    def task(self) -> str:
        """ "detect" or "classify"."""
        return "detect" if self.keys == _METRIC_KEYS else "classify"

    def describe_changes(self) -> str:
        """How many validation crops have another type, and how many were gained and lost."""
        if self.task == "detect" or self.before is None:
            return ""
        gained = sum(change.gained for change in self.changes)
        lost = sum(change.lost for change in self.changes)
        other = len(self.changes) - gained - lost
        rest = f", {other} wrong in another way" if other else ""
        return f"Of {count_of(self.crops, 'validation crop')}: {gained} gained, {lost} lost{rest}."

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
            for key in self.keys
        ]
        if self.reference is not None:
            before, after = self.reference
            rows += [
                ComparisonRow(f"Reference, {key}", before[key], after[key]) for key in self.keys
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
            # Without the sentence: it names images, and a model is given to others.
            "change": self.change and {"code": self.change.code, "images": len(self.change.images)},
        }


def compare_models(
    run: str | os.PathLike[str], report: Report | None = None, fields: int = REFERENCE_COUNT
) -> ModelComparison:
    """Evaluate the model that a run started from and its best one, on the same images.

    Cached metrics are read from the run's folder, as long as both models and the data are the same.
    """
    folder = Path(run)
    record = read_run(folder / "run.json")
    settings = record["settings"]
    best = folder / "best.safetensors"
    if not best.is_file():
        raise FileError(
            f"{folder}: no epoch of the run is finished, so there is no model to compare."
        )
    if settings.get("task") == "classify":
        return _compare_classifiers(folder, ClassifierTrainSettings(**settings), report)
    report_progress(report, 0, 20, "loading both models")
    before = load_detector(settings["model"], device="cpu")
    after = load_detector(best, device="cpu")
    dataset = read_dataset(settings["data"])
    check_dataset(dataset, ["val"], subprogress(report, 0.0, 0.05))
    key = comparison_key(settings["model"], best, dataset)
    cached = _read_cache(folder, key, fields)
    if cached is None:
        change = _recorded_change(record, key) or compare_with_parent(
            before, after, dataset, subprogress(report, 0.05, 0.35)
        )
        metrics = _evaluate_both(before, after, dataset, subprogress(report, 0.35, 1.0), fields)
        _write_cache(folder, key, fields, {**metrics, "change": change and change.to_dict()})
    else:
        metrics, change = cached
    report_progress(report, 1, 1, "done")
    new, reference = metrics["new data"], metrics["reference"]
    return ModelComparison(
        before,
        after,
        tuple(new),
        reference and tuple(reference),
        tuple(metrics["notes"]),
        metrics.get("classes", {}),
        change=change,
    )


def _recorded_change(record: Mapping[str, Any], key: dict[str, str]) -> ModelChange | None:
    """What the training has written at its end, if that is of the same models and data."""
    try:
        stored = record["change"]
        return ModelChange.from_dict(stored) if stored["key"] == key else None
    except (KeyError, TypeError, ValueError):
        return None


def _evaluate_both(
    before: Detector, after: Detector, dataset: Dataset, report: Report | None, fields: int
) -> dict[str, Any]:
    known = {name.casefold() for name in before.classes}
    shared = [name for name in dataset.names if name.casefold() in known]
    new = [name for name in dataset.names if name not in shared]
    later = evaluate(after, dataset, report=subprogress(report, 0.0, 0.25))
    notes, earlier = [], None
    if shared:
        some = _with_classes(dataset, shared) if new else dataset
        earlier = evaluate(before, some, report=subprogress(report, 0.25, 0.45))
    if new:
        scores = "; scores of the new data are of the other classes" if shared else ""
        notes.append(f"The model before does not know {name_list(new)}{scores}.")
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


# --- classifiers ---------------------------------------------------------------------------------


def _compare_classifiers(
    folder: Path, settings: ClassifierTrainSettings, report: Report | None
) -> ModelComparison:
    """Both classifiers on the validation crops and, if there are any, on the reference crops."""
    report_progress(report, 0, 20, "loading both models")
    before = None if settings.model is None else load_classifier(settings.model, "cpu")
    after = load_classifier(folder / "best.safetensors", "cpu")
    dataset = training_crops(settings)
    items = dataset.splits["val"]
    later = classify_items(after, items, subprogress(report, 0.05, 0.35))
    earlier = None
    if before is not None:
        earlier = classify_items(before, items, subprogress(report, 0.35, 0.65))
    true = [dataset.names[item.label] for item in items]
    new, scores = _classifier_scores(true, earlier, later)
    classes, notes, reference = {"new data": scores}, [], None
    unknown = [] if before is None else sorted(set(true) - set(before.classes))
    if unknown:
        notes.append(
            f"The model before does not know {name_list(unknown)}; scores of the new data are of "
            "the other types."
        )
    if before is None:
        notes.append("There is no model before: training started from a backbone.")
    elif settings.reference:
        measured = _on_reference_crops(before, after, settings.reference, report)
        if isinstance(measured, str):
            notes.append(measured)
        else:
            reference, classes["reference"] = measured
    if before is not None:
        counted = {name for part in classes.values() for name, row in part.items() if row[2]}
        unmeasured = [name for name in before.classes if name not in counted]
        if unmeasured:
            notes.append(
                f"There are no crops to measure {name_list(unmeasured)} with. What the network "
                "sees and knows of them is as before, but other types may claim their cells now: "
                "reference crops would tell."
            )
    changes = () if earlier is None else _changed_crops(dataset, earlier, later, after)
    report_progress(report, 1, 1, "done")
    return ModelComparison(
        before,
        after,
        new,
        reference,
        tuple(notes),
        classes,
        _CLASSIFIER_KEYS,
        changes,
        len(items),
    )


def _classifier_scores(
    true: Sequence[str], earlier: Classification | None, later: Classification
) -> tuple[tuple[Metrics | None, Metrics], dict[str, ClassScores]]:
    """Metrics before and after, on types that both know, and the recall of every type."""
    known = np.array([earlier is None or name in earlier.names for name in true], bool)
    rows = np.flatnonzero(known) if known.any() else np.arange(len(true))
    pair = (
        None if earlier is None or not known.any() else _accuracies(true, earlier, rows),
        _accuracies(true, later, rows),
    )
    scores: dict[str, ClassScores] = {}
    for name in later.names:
        mine = np.array([other == name for other in true], bool)
        count = int(mine.sum())
        knows = earlier is not None and name in earlier.names
        recalls = [
            float(np.mean(result.labels[mine] == result.names.index(name))) if count else 0.0
            for result in ((earlier, later) if knows else (later,))
            if result is not None
        ]
        scores[name] = (
            round(recalls[0], 5) if knows else None,
            round(recalls[-1], 5),
            count,
        )
    return pair, scores


def _accuracies(
    true: Sequence[str], result: Classification, rows: npt.NDArray[np.int64]
) -> Metrics:
    labels = np.array([result.names.index(true[k]) for k in rows], np.int64)
    metrics = classification_metrics(labels, result.scores[rows], result.names)
    return {key: round(float(metrics[key.replace(" ", "_")]), 5) for key in _CLASSIFIER_KEYS}


def _on_reference_crops(
    before: Classifier, after: Classifier, path: str, report: Report | None
) -> tuple[tuple[Metrics, Metrics], dict[str, ClassScores]] | str:
    """Both models on crops of a folder, of types that both know; or why that is not possible."""
    try:
        dataset = read_crop_dataset(path)
        split = next(s for s in ("val", "test", *dataset.splits) if s in dataset.splits)
        both = set(before.classes) & set(after.classes)
        items = [i for i in dataset.splits[split] if dataset.names[i.label] in both]
        if not items:
            return f"{path}: there are no reference crops of types that the model knows."
        true = [dataset.names[item.label] for item in items]
        earlier = classify_items(before, items, subprogress(report, 0.65, 0.82))
        later = classify_items(after, items, subprogress(report, 0.82, 1.0))
    except (DataError, FileError, ImageError) as error:
        return f"The reference crops cannot be used: {error}"
    (first, second), scores = _classifier_scores(true, earlier, later)
    assert first is not None
    return (first, second), {name: row for name, row in scores.items() if name in both}


def _changed_crops(
    dataset: CropDataset, earlier: Classification, later: Classification, after: Classifier
) -> tuple[CropChange, ...]:
    """Validation crops whose type is another one now: lost ones first, then gained ones."""
    items = dataset.splits["val"]
    crops = TrainingCrops(items, after.network.settings)
    types = [
        (earlier.names[a], later.names[b])
        for a, b in zip(earlier.labels, later.labels, strict=True)
    ]
    changed = [k for k, (before, now) in enumerate(types) if before != now]
    changes = [
        CropChange(crop, dataset.names[items[k].label], *types[k])
        for k, crop in zip(changed, crops.plain(changed), strict=True)
    ]
    return tuple(sorted(changes, key=lambda change: (not change.lost, not change.gained)))


def save_best_model(
    run: str | os.PathLike[str], name: str, comparison: ModelComparison | None = None
) -> Path:
    """Save a run's best model into its project's `models`; returns the file.

    Its record holds parent, data, settings, seed, versions and metrics, and how it compares. No
    model that is there is ever overwritten: a name that is taken gets a number.
    """
    folder = Path(run)
    model = load_checkpoint(folder / "best.safetensors", device="cpu")
    path = unused_model_path(folder.parents[1], name)
    training = {**(model.info.get("training") or {}), "run": folder.name}
    if comparison is not None:
        training["compared"] = comparison.to_dict()
    save_checkpoint(_with_info(model, {"name": path.stem, "training": training}), path)
    return path


def record_comparison(path: Path, comparison: ModelComparison) -> dict[str, Any]:
    """Add a comparison to a model that was saved before it was done; returns the new `info`."""
    model = load_checkpoint(path, device="cpu")
    training = {**(model.info.get("training") or {}), "compared": comparison.to_dict()}
    changed = _with_info(model, {"training": training})
    save_checkpoint(changed, path)
    return changed.info


def _with_info(model: Detector | Classifier, changes: dict[str, Any]) -> Detector | Classifier:
    info = {**model.info, **changes}
    if isinstance(model, Classifier):
        return Classifier(model.network, info)
    return Detector(model.network, info)


def _main_metrics(metrics: Mapping[str, Any]) -> Metrics:
    return {key: round(float(metrics[key]), 5) for key in _METRIC_KEYS}


def _read_cache(
    folder: Path, key: dict[str, str], fields: int
) -> tuple[dict[str, Any], ModelChange | None] | None:
    try:
        content = json.loads(regular_file(folder / _CACHE_FILE).read_text(encoding="utf-8"))
        metrics: dict[str, Any] = content["result"]
        change = metrics["change"] and ModelChange.from_dict(metrics["change"])
        return (metrics, change) if (content["of"], content["fields"]) == (key, fields) else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write_cache(folder: Path, key: dict[str, str], fields: int, metrics: dict[str, Any]) -> None:
    """So that it need not be done again; where it cannot be written, it will be."""
    content = {"of": key, "fields": fields, "result": metrics}
    with suppress(OSError), atomic_path(folder / _CACHE_FILE) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
