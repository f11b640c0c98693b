"""Classify boxes of a plane. Runs off the GUI thread and touches neither widgets nor layers.

Whatever is slow to import is imported here, in the thread, so that the panel opens at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.info import CLASSIFIER, limits_text
from napari_beerlanet.core.common.messages import count_of, format_duration
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.ui.common.model_section import load_model, place_model
from napari_beerlanet.ui.detections.box_store import RowIndices, TypeColumns, classified_types
from napari_beerlanet.ui.viewer.planes import Plane

if TYPE_CHECKING:
    from napari_beerlanet.core.classification.classifier import Classifier

_ANY = "cell"  # what all boxes of a job are called: their classes were chosen already


@dataclass(frozen=True, eq=False)
class ClassifyJob:
    """Boxes `xyxy` (m, 4) of a plane, in pixels, which are `rows` (m,) of what holds them.

    `kept` (m,): whether the user has given the box its type, which stays. `model_key` is a name or
    path, `model` the same if it is loaded already. `before`: the types of all boxes of a detections
    layer, and `model_rows` which of them are the detector's; None for boxes of another layer.
    `counted` (m,) are those above the threshold, None all: see `Classifier.adapt`.
    `owner`: as of `load_model`.
    """

    plane: Plane
    xyxy: npt.NDArray[Any]
    rows: RowIndices
    kept: npt.NDArray[np.bool_]
    model_key: str
    model: Classifier | None = None
    device: str = "auto"
    before: TypeColumns | None = None
    model_rows: RowIndices | None = None
    counted: npt.NDArray[np.bool_] | None = None
    owner: object = None


@dataclass(frozen=True, eq=False)
class ClassifyResult:
    """The types of `rows` (m,): `probabilities` (m, k) of `names`; `types` of a detections layer.

    `warnings` are sentences on why they may be wrong, `notes` on how the run went.
    """

    job: ClassifyJob
    model: Classifier
    rows: RowIndices
    names: list[str]
    probabilities: npt.NDArray[np.float32]
    types: TypeColumns | None
    warnings: list[str]
    notes: list[str]
    limits: str
    device: str
    seconds: float

    @property
    def type_of_row(self) -> dict[int, str]:
        """The most probable type by row."""
        labels = self.probabilities.argmax(1) if len(self.rows) else np.empty(0, np.int64)
        pairs = zip(self.rows.tolist(), labels.tolist(), strict=True)
        return {row: self.names[label] for row, label in pairs}


def run_classification(job: ClassifyJob, report: Report) -> ClassifyResult:
    """Load the model if needed, classify, and say what stands against the result."""
    from napari_beerlanet.core.common.device import describe_device
    from napari_beerlanet.core.stains.slide_pixels import SlidePixels

    started = time.monotonic()
    first = 0.1 if job.model is None else 0.0  # of the progress, for loading the model
    loading = subprogress(report, 0.0, first) or report
    model: Classifier = (
        load_model(job.model_key, job.device, loading, CLASSIFIER, job.owner)
        if job.model is None
        else place_model(job.model, job.device)
    )
    # As the detections of a study, so that a slide's types are the same there and here.
    boxes = np.asarray(job.xyxy, np.float32).reshape(-1, 4)
    count = len(boxes)
    cells = Detections(boxes, np.zeros(count, np.int64), np.ones(count, np.float32), [_ANY])
    pixels = SlidePixels(job.plane.pyramid) if job.plane.is_slide else job.plane.read()
    typed = model.classify_detections(
        pixels,
        cells,
        [_ANY],
        counted=job.counted,
        report=subprogress(report, first, 0.98) or report,
    )
    classified = typed.type_labels >= 0
    columns = [typed.columns[f"P({name})"][classified] for name in model.classes]
    rows, probabilities = job.rows[classified], np.stack(columns, axis=1)
    facts = typed.report["classification"]
    report_progress(report, 98, 100, "preparing the layer")
    name, limits = str(model.info.get("name", "")), limits_text(model.info)
    notes = list(facts["notes"])
    if job.kept.any():
        kept = int(job.kept.sum())
        one, many = "box keeps the type", "boxes keep the types"
        notes.append(f"{count_of(kept, one, many)} that you gave.")
    warnings = [*facts["warnings"], *map(str, model.info.get("notes") or [])]
    types = None
    if job.before is not None and job.model_rows is not None:
        said = {"classifier": name, "classifier_warnings": warnings, "classifier_limits": limits}
        types = classified_types(
            job.before,
            job.model_rows,
            rows,
            model.classes,
            probabilities,
            said,
            kept=job.rows[job.kept],
        )
    return ClassifyResult(
        job,
        model,
        rows,
        model.classes,
        probabilities,
        types,
        warnings,
        notes,
        limits,
        describe_device(model.device),
        time.monotonic() - started,
    )


def run_summary(result: ClassifyResult) -> str:
    """One line on a run: how many, how long, where, and notes."""
    seconds = f"{result.seconds:.1f} s" if result.seconds < 10 else format_duration(result.seconds)
    count, counted = count_of(len(result.rows), "box", "boxes"), result.job.counted
    line = f"{count} classified in {seconds} on {result.device}"
    if counted is not None and not counted.all():  # what is drawn and counted are fewer
        above = int(np.isin(result.rows, result.job.rows[counted]).sum())
        line += f", {above:,} of them above the confidence threshold"
    return " ".join([f"{line}.", *result.notes])
