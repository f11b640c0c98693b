"""After training: the model before and after on the new data and on the reference; keeping it.

judged = judge(run)
judged.rows()                     # what a table shows
keep(run, "my model", judged)     # project/models/my-model.safetensors
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napari_beerlanet.core.checkpoint import checkpoint_hash, load_checkpoint, save_checkpoint
from napari_beerlanet.core.detector import Detector
from napari_beerlanet.core.evaluate import evaluate
from napari_beerlanet.core.files import FileError, atomic_path
from napari_beerlanet.core.progress import Report, tell, within
from napari_beerlanet.core.runfiles import read_run
from napari_beerlanet.core.runs import MODELS
from napari_beerlanet.core.sources import slug
from napari_beerlanet.reference import FIELDS, compare_on_reference

_FILE = "compared.json"
_KEYS = ("mAP50", "mAP50-95")
Metrics = dict[str, float]


@dataclass(frozen=True)
class Row:
    """One line of the comparison: `before` and `after` are mAPs from 0 to 1, None if unknown."""

    what: str
    before: float | None
    after: float | None


@dataclass(frozen=True)
class Judged:
    """Two models, the metrics of both on either data, and sentences on what could not be had."""

    before: Detector
    after: Detector
    new: tuple[Metrics | None, Metrics]
    reference: tuple[Metrics, Metrics] | None
    notes: tuple[str, ...] = ()

    def rows(self) -> list[Row]:
        """New data first, then the reference."""
        was, now = self.new
        rows = [Row(f"New data, {key}", was and was[key], now[key]) for key in _KEYS]
        if self.reference is not None:
            was, now = self.reference
            rows += [Row(f"Reference, {key}", was[key], now[key]) for key in _KEYS]
        return rows

    def write(self) -> dict[str, Any]:
        """As plain data, for a file and for the kept model's record."""
        return {"new data": list(self.new), "reference": self.reference and list(self.reference)}


def judge(
    run: str | os.PathLike[str], report: Report | None = None, fields: int = FIELDS
) -> Judged:
    """Measure the model that a run began with and its best, on the same images.

    What was measured before is read from the run's folder, as long as both models are the same.
    """
    folder = Path(run)
    settings = read_run(folder / "run.json")["settings"]
    best = folder / "best.safetensors"
    if not best.is_file():
        raise FileError(
            f"{folder}: the run has not finished an epoch, so there is nothing to keep."
        )
    tell(report, 0, 20, "loading both models")
    before = load_checkpoint(settings["model"], device="cpu")
    after = load_checkpoint(best, device="cpu")
    key = {"before": checkpoint_hash(settings["model"]), "after": checkpoint_hash(best)}
    known = _read(folder, key, fields)
    if known is None:
        known = _measure(before, after, str(settings["data"]), report, fields)
        _write(folder, key, fields, known)
    tell(report, 1, 1, "done")
    new, reference = known["new data"], known["reference"]
    return Judged(before, after, tuple(new), reference and tuple(reference), tuple(known["notes"]))


def _measure(
    before: Detector, after: Detector, data: str, report: Report | None, fields: int
) -> dict[str, Any]:
    notes, was = [], None
    now = _short(evaluate(after, data, report=within(report, 0.05, 0.25)))
    try:
        was = _short(evaluate(before, data, report=within(report, 0.25, 0.45)))
    except ValueError:  # classes that it has never heard of
        notes.append("The model before does not know all classes of the new data.")
    remembered = compare_on_reference(before, after, fields, within(report, 0.45, 1.0))
    if remembered is None:
        notes.append("There is no reference for a model of these classes.")
        pair = None
    else:
        pair = [_short(remembered.before), _short(remembered.after)]
    return {"new data": [was, now], "reference": pair, "notes": notes}


def keep(run: str | os.PathLike[str], name: str, judged: Judged | None = None) -> Path:
    """Save a run's best model into its project's `models`; returns the file.

    Its record tells parent, data, settings, seed, versions and metrics, and how it compares. No
    model that is there is ever overwritten: a name that is taken gets a number.
    """
    folder = Path(run)
    model = load_checkpoint(folder / "best.safetensors", device="cpu")
    path = _unused(folder.parents[1] / MODELS, slug(name))
    training = {**model.info.get("training", {}), "run": folder.name}
    if judged is not None:
        training["compared"] = judged.write()
    save_checkpoint(
        Detector(model.network, {**model.info, "name": path.stem, "training": training}), path
    )
    return path


def _unused(models: Path, name: str) -> Path:
    try:
        models.mkdir(exist_ok=True)
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise FileError(f"{models}: a model cannot be kept there ({why}).") from error
    path, number = models / f"{name}.safetensors", 1
    while path.exists():
        number += 1
        path = models / f"{name}-{number}.safetensors"
    return path


def _short(metrics: Mapping[str, Any]) -> Metrics:
    return {key: round(float(metrics[key]), 5) for key in _KEYS}


def _read(folder: Path, key: dict[str, str], fields: int) -> dict[str, Any] | None:
    try:
        content = json.loads((folder / _FILE).read_text(encoding="utf-8"))
        known: dict[str, Any] = content["result"]
        return known if content["models"] == key and content["fields"] == fields else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _write(folder: Path, key: dict[str, str], fields: int, known: dict[str, Any]) -> None:
    """So that it need not be done again; where it cannot be written, it will be."""
    content = {"models": key, "fields": fields, "result": known}
    with suppress(OSError), atomic_path(folder / _FILE) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
