"""Classify boxes of a plane. Runs off the GUI thread and touches neither widgets nor layers.

Whatever is slow to import is imported here, in the thread, so that the panel opens at once.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.geometry import area, clip
from napari_beerlanet.core.checkpoints.info import CLASSIFIER, limits_text
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.ui.common.model_section import load_model, place_model
from napari_beerlanet.ui.detections.box_store import RowIndices, TypeColumns, classified_types
from napari_beerlanet.ui.viewer.planes import Plane, SliceWindow

if TYPE_CHECKING:
    from napari_beerlanet.core.classification.classifier import Classifier

_TILE_PX = 2048  # of a slide, that are read at once with the boxes in them
_SAMPLE_CROPS = 16  # of a slide, whose stains are compared with those of training


@dataclass(frozen=True, eq=False)
class ClassifyJob:
    """Boxes `xyxy` (m, 4) of a plane, in pixels, which are `rows` (m,) of what holds them.

    `model_key` is a name or path, `model` the same if it is loaded already. `before`: the types of
    all boxes of a detections layer, and `model_rows` which of them are the detector's; None for
    boxes of another layer.
    """

    plane: Plane
    xyxy: npt.NDArray[Any]
    rows: RowIndices
    model_key: str
    model: Classifier | None = None
    device: str = "auto"
    before: TypeColumns | None = None
    model_rows: RowIndices | None = None


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

    started = time.monotonic()
    first = 0.1 if job.model is None else 0.0  # of the progress, for loading the model
    loading = subprogress(report, 0.0, first) or report
    model: Classifier = (
        load_model(job.model_key, job.device, loading, CLASSIFIER)
        if job.model is None
        else place_model(job.model, job.device)
    )
    possible = area(clip(np.asarray(job.xyxy, np.float64), job.plane.shape)) > 0
    rows, boxes = job.rows[possible], np.asarray(job.xyxy, np.float64)[possible]
    classify = _classify_slide if job.plane.is_slide else _classify_image
    probabilities, facts = classify(
        model, job.plane, boxes, subprogress(report, first, 0.98) or report
    )
    report_progress(report, 98, 100, "preparing the layer")
    name, limits = str(model.info.get("name", "")), limits_text(model.info)
    notes, left_out = [str(note) for note in facts.get("notes", [])], int((~possible).sum())
    if left_out:
        notes.append(
            f"{count_of(left_out, 'box has', 'boxes have')} no part in the image and "
            f"{'was' if left_out == 1 else 'were'} left out."
        )
    warnings = [*facts.get("warnings", []), *map(str, model.info.get("notes") or [])]
    types = None
    if job.before is not None and job.model_rows is not None:
        said = {"classifier": name, "classifier_warnings": warnings, "classifier_limits": limits}
        types = classified_types(
            job.before, job.model_rows, rows, model.classes, probabilities, said
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


def _classify_image(
    model: Classifier, plane: Plane, boxes: npt.NDArray[np.float64], report: Report
) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
    result = model.classify(plane.read(), boxes, report)
    return result.scores, result.report


def _classify_slide(
    model: Classifier, plane: Plane, boxes: npt.NDArray[np.float64], report: Report
) -> tuple[npt.NDArray[np.float32], dict[str, Any]]:
    """Tile by tile, with so much around each box as its crop shows."""
    from napari_beerlanet.core.classification.crops import cut_crops, to_rgb8

    settings = model.network.settings
    probabilities = np.empty((len(boxes), len(model.classes)), np.float32)
    tiles = np.floor((boxes[:, :2] + boxes[:, 2:]) / 2 / _TILE_PX).astype(np.int64)
    order = np.lexsort((tiles[:, 0], tiles[:, 1]))
    starts = np.flatnonzero((np.diff(tiles[order], axis=0, prepend=-1) != 0).any(axis=1))
    groups = np.split(order, starts[1:]) if len(order) else []
    sampled = set(np.linspace(0, len(boxes) - 1, _SAMPLE_CROPS).round().astype(int).tolist())
    crops: list[Any] = []
    notes: list[str] = []
    done = 0
    for group in groups:
        window = _window_around(boxes[group], settings.fill, plane.shape)
        pixels = to_rgb8(plane.read(window))
        origin = np.array([window[1].start, window[0].start] * 2, np.float64)
        inside = boxes[group] - origin
        part = subprogress(report, done / len(boxes), (done + len(group)) / len(boxes))
        result = model.classify(pixels, inside, part)
        probabilities[group] = result.scores
        notes += [note for note in result.report["notes"] if note not in notes]
        mine = np.array([k in sampled for k in group.tolist()], bool)
        crops += list(cut_crops(pixels, inside[mine], settings.input_size, settings.fill))
        done += len(group)
    warnings = model.classify(crops).report["warnings"] if crops else []
    return probabilities, {"warnings": warnings, "notes": notes}


def _window_around(
    boxes: npt.NDArray[np.float64], fill: float, shape: tuple[int, int]
) -> SliceWindow:
    """Rows and columns of an image that the crops of boxes (n, 4) show."""
    centres = (boxes[:, :2] + boxes[:, 2:]) / 2
    half = (boxes[:, 2:] - boxes[:, :2]).max(axis=1, keepdims=True) / 2 / fill + 4
    # A box may reach beyond its centre's tile, and beyond the image.
    low = np.minimum(centres - half, boxes[:, :2]).min(axis=0)
    high = np.maximum(centres + half, boxes[:, 2:]).max(axis=0)
    x1, y1 = np.maximum(np.floor(low), 0).astype(int).tolist()
    x2, y2 = np.minimum(np.ceil(high), [shape[1], shape[0]]).astype(int).tolist()
    return slice(y1, y2), slice(x1, x2)


def run_summary(result: ClassifyResult) -> str:
    """One line on a run: how many, how long, where, and notes."""
    seconds = f"{result.seconds:.1f} s" if result.seconds < 10 else f"{result.seconds:.0f} s"
    count = count_of(len(result.rows), "box", "boxes")
    return " ".join([f"{count} classified in {seconds} on {result.device}.", *result.notes])
