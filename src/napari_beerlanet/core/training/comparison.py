"""Compare the model before and after training, on new and on reference data; save the best one.

comparison = compare_models(run)
comparison.rows()                                   # what a table shows
save_best_model(run, "my model", comparison)        # project/models/my-model.safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napari_beerlanet.core.checkpoints.checkpoint import (
    checkpoint_hash,
    load_checkpoint,
    save_checkpoint,
)
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.evaluation.dataset import REFERENCE_COUNT, compare_on_reference, evaluate
from napari_beerlanet.core.training.runs import read_run, unused_model_path

_CACHE_FILE = "compared.json"
_METRIC_KEYS = ("mAP50", "mAP50-95")
Metrics = dict[str, float]


@dataclass(frozen=True)
class ComparisonRow:
    """One line of the comparison: `before` and `after` are mAPs from 0 to 1, None if unknown."""

    what: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class ModelComparison:
    """Two models, the metrics of both on either data, and sentences on what could not be had."""

    before: Detector
    after: Detector
    new: tuple[Metrics | None, Metrics]
    reference: tuple[Metrics, Metrics] | None
    notes: tuple[str, ...] = ()

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
        return {"new data": list(self.new), "reference": self.reference and list(self.reference)}


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
    before = load_checkpoint(settings["model"], device="cpu")
    after = load_checkpoint(best, device="cpu")
    key = {"before": checkpoint_hash(settings["model"]), "after": checkpoint_hash(best)}
    metrics = _read_cache(folder, key, fields)
    if metrics is None:
        metrics = _evaluate_both(before, after, str(settings["data"]), report, fields)
        _write_cache(folder, key, fields, metrics)
    report_progress(report, 1, 1, "done")
    new, reference = metrics["new data"], metrics["reference"]
    return ModelComparison(
        before, after, tuple(new), reference and tuple(reference), tuple(metrics["notes"])
    )


def _evaluate_both(
    before: Detector, after: Detector, data: str, report: Report | None, fields: int
) -> dict[str, Any]:
    notes, metrics_before = [], None
    metrics_after = _main_metrics(evaluate(after, data, report=subprogress(report, 0.05, 0.25)))
    try:
        metrics_before = _main_metrics(
            evaluate(before, data, report=subprogress(report, 0.25, 0.45))
        )
    except ValueError:  # it has not all classes of the data
        notes.append("The starting model does not know all classes of the new data.")
    on_reference = compare_on_reference(before, after, fields, subprogress(report, 0.45, 1.0))
    if on_reference is None:
        notes.append("There is no reference dataset for a model of these classes.")
        pair = None
    else:
        pair = [_main_metrics(on_reference.before), _main_metrics(on_reference.after)]
    return {"new data": [metrics_before, metrics_after], "reference": pair, "notes": notes}


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
    save_checkpoint(
        Detector(model.network, {**model.info, "name": path.stem, "training": training}), path
    )
    return path


def record_comparison(path: Path, comparison: ModelComparison) -> dict[str, Any]:
    """Add a comparison to a model that was saved before it was done; returns the new `info`."""
    model = load_checkpoint(path, device="cpu")
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
