"""Run one detection job. Runs off the GUI thread and touches neither widgets nor layers.

Whatever is slow to import is imported here, in the thread, so that the panel opens at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from napari_beerlanet.core.boxes.detections import Detections, replace_in_windows
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.threads import numpy_until_compiled
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.images.slide import SLIDE_PIXELS
from napari_beerlanet.ui.common.model_section import load_model, place_model
from napari_beerlanet.ui.viewer.planes import Plane, SliceWindow
from napari_beerlanet.ui.viewer.viewport import SearchArea

if TYPE_CHECKING:
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.ui.stains.fitting import FitResult, LayerData

Refine = Callable[[Detections, Mapping[str, Any]], Detections]


@dataclass(frozen=True, eq=False)
class DetectJob:
    """What to detect, where and how.

    `windows` is None for the whole plane; `model_key` a name or path, `model` the same if it is
    loaded already. `show_stains`: decompose the image for layers of the learned stains, too. For a
    slide: the `path` of its file, the file of tile `results`, and which `source` these are of.
    `before`: the plane's earlier detections, which stay outside of `windows` if they are of the
    same model. `size_hint`: the cell size in pixels to try first, where it is automatic. `refine`
    changes the detections, by the model's `info`. `owner`: as of `load_model`.
    """

    plane: Plane
    windows: tuple[SliceWindow, ...] | None
    model_key: str
    model: Detector | None = None
    device: str = "auto"
    settings: DetectSettings = field(default_factory=DetectSettings)
    show_stains: bool = False
    path: Path | None = None
    results: Path | None = None
    source: dict[str, Any] | None = None
    area: SearchArea = "whole"
    before: Detections | None = None
    size_hint: float | None = None
    refine: Refine | None = None
    owner: object = None

    @property
    def streamed(self) -> bool:
        """Whether it is too large to be read at once."""
        if self.windows is None:
            return self.plane.is_slide
        sides = ((part.stop - part.start for part in window) for window in self.windows)
        return bool(sum(math.prod(window) for window in sides) > SLIDE_PIXELS)


@dataclass(frozen=True, eq=False)
class DetectResult:
    """The result of a job: the model that was used, all detections, and warnings."""

    job: DetectJob
    model: Detector
    detections: Detections
    warnings: list[str]
    seconds: float
    stains: tuple[FitResult, list[LayerData]] | None = None


def run_job(job: DetectJob, report: Report) -> DetectResult:
    """Load the model if needed, detect objects, and warn if the image is out of domain."""
    with numpy_until_compiled():
        return _run_job(job, report)


def _run_job(job: DetectJob, report: Report) -> DetectResult:
    from napari_beerlanet.core.detection.detector import detect_windows
    from napari_beerlanet.core.detection.stain_statistics import detection_warnings
    from napari_beerlanet.ui.viewer.fast_shapes import fast_shapes_supported

    started, settings = time.monotonic(), job.settings
    first = 0.1 if job.model is None else 0.0  # of the progress, for loading the model
    model = job_model(job, subprogress(report, 0.0, first) or report)
    height, width = job.plane.shape
    windows = job.windows or ((slice(0, height), slice(0, width)),)
    end = 0.85 if job.show_stains else 0.98
    detections = detect_windows(
        model,
        job.plane.read,
        windows,
        job.plane.shape,
        iou=settings.iou,
        object_size=settings.object_size,
        pixel_size=settings.pixel_size_yx,
        size_hint=job.size_hint,
        openvino=settings.openvino,
        report=subprogress(report, first, end),
    )
    if job.refine is not None:
        detections = job.refine(detections, model.info)
    stains = None
    if job.show_stains and model.network.has_stain:
        stains = learned_stains(model, job, subprogress(report, end, 0.98))
    report_progress(report, 98, 100, "preparing the layer")
    fast_shapes_supported()  # compiles what drawing needs here, not while the window waits
    warnings = detection_warnings(model.info, detections, settings.pixel_size_yx)
    if job.show_stains and stains is None:
        warnings.append("The model has no stain channels to show: it does not use BeerLaNet.")
    detections = replace(
        detections,
        report=detections.report | {"warnings": warnings, "limits": limits_text(model.info)},
    )
    detections = merge_before(job, model, detections)
    everything = detections if detections.candidates is None else detections.candidates
    assert len(everything.type_labels) == len(everything)  # cached here, not while one waits
    return DetectResult(job, model, detections, warnings, time.monotonic() - started, stains)


def merge_before(job: DetectJob, model: Detector, detections: Detections) -> Detections:
    """The detections, with the earlier ones outside of the windows that were searched.

    `report["searched"]` has the area, its windows (m, 4) and whether earlier ones were kept;
    nothing where the whole image was searched.
    """
    if job.windows is None:
        return detections
    windows = [[c.start, r.start, c.stop, r.stop] for r, c in job.windows]
    before = job.before
    kept = (
        before is not None
        and before.names == model.classes
        and before.report.get("model") == model.info.get("name", "")
    )
    searched = {"area": job.area, "windows": windows, "kept": kept}
    detections = replace(detections, report=detections.report | {"searched": searched})
    if not kept or before is None:
        return detections
    merged = replace_in_windows(before, detections, np.array(windows))
    return merged.above(DetectSettings.default("confidence"))


def job_model(job: DetectJob, report: Report) -> Detector:
    """The job's model on its device."""
    if job.model is None:
        model: Detector = load_model(job.model_key, job.device, report, owner=job.owner)
        return model
    moved: Detector = place_model(job.model, job.device)
    return moved


def learned_stains(
    model: Detector, job: DetectJob, report: Report | None
) -> tuple[FitResult, list[LayerData]]:
    """Layer data of the learned stains, lazy if the image is large."""
    from napari_beerlanet.core.stains.settings import DecomposeSettings
    from napari_beerlanet.core.stains.slide import scan_slide_colours
    from napari_beerlanet.ui.stains.fitting import (
        FitResult,
        FitTarget,
        density_data,
        shared_contrast_limit,
    )

    target, colours = FitTarget((job.plane,)), None
    if target.is_slide:
        colours = scan_slide_colours(job.plane.pyramid, report=report)
        decomposition = colours.fit(**model.stain_settings)
    else:
        decomposition = model.decompose(target.read(job.plane), report)
    limit = shared_contrast_limit(decomposition)
    fitted = FitResult(decomposition, DecomposeSettings(), target, limit, slide_colours=colours)
    return fitted, density_data(fitted)
