"""Process one image of a study: decompose or normalize it, find and classify its objects, write.

Tasks and outcomes are plain dicts, so the same code runs in this process, in a worker process, or
on another machine.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napari_beerlanet.core.batch.inputs import ImageJob
from napari_beerlanet.core.batch.malaria import claim_red_cells
from napari_beerlanet.core.batch.manifest import Record, Records
from napari_beerlanet.core.batch.outputs import ImageResult
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.checkpoints.info import model_limits
from napari_beerlanet.core.common.device import device_for_worker
from napari_beerlanet.core.common.jobs import attempt_job
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import (
    FileError,
    file_hash,
    file_stamp,
    read_json_or_empty,
    settings_hash,
    write_json,
)
from napari_beerlanet.core.images.rgb import MAX_PIXELS
from napari_beerlanet.core.stains.settings import DecomposeSettings

if TYPE_CHECKING:  # torch comes with them
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.images.slide import Slide
    from napari_beerlanet.core.normalization.normalizer import Normalizer
    from napari_beerlanet.core.normalization.slide import NormalizedSlide
    from napari_beerlanet.core.stains.slide import SlideDecomposition

WORK_FOLDER = ".work"
"""Where detections are, tile by tile, while their image is being processed."""


SIZE_FILE = "cell_size.json"
"""In a study's folder: the size of objects that is tried first in every image."""


def process_image(task: Mapping[str, Any], report: Report | None = None) -> dict[str, Any]:
    """Process one image and return its outcome: a record, or an error in one sentence.

    `task` has source, name, out, layout, settings and overwrite, and perhaps the number of the
    worker, and `fields`: images of the study that tell the size of objects in all.
    """
    job, out = ImageJob(Path(task["source"]), task["name"]), Path(task["out"])
    settings = StudySettings(**task["settings"])

    def work() -> dict[str, Any]:
        records = Records(task["layout"], out, settings)
        name, record = records.find(job)
        if record is not None and not task.get("overwrite"):
            return {"status": "skipped", "record": record}
        device = device_for_worker(settings.device, int(task.get("worker", 0)))
        hint = _size_of_fields(task.get("fields") or (), records, device, task["layout"], report)
        return _process(job, name, records, device, hint, report)

    return attempt_job(work, out)


def _process(
    job: ImageJob,
    name: str,
    records: Records,
    device: str,
    size_hint: float | None,
    report: Report | None,
) -> dict[str, Any]:
    from napari_beerlanet.core.images.slide import open_slide

    if job.source.is_dir() and not job.source.is_symlink():
        raise FileError(f"{job.source}: no images in this folder.")
    report_progress(report, 0, 1000, "reading")
    settings = records.settings
    source, work = file_stamp(job.source), records.out / WORK_FOLDER / f"{name}.tiles"
    with open_slide(job.source) as slide:
        size = settings.pixel_size_yx
        slide = replace(slide, pixel_size=size or slide.pixel_size)
        first = 0.4 if settings.has_objects or settings.normalizer else 0.95
        found = 0.8 if settings.classifier else 0.95
        stains = detections = model = classifier = normalized = None
        if settings.decompose:
            stains = decompose_image(slide, settings, subprogress(report, 0.0, first))
        if settings.normalizer:
            part = subprogress(report, first if settings.decompose else 0.0, 0.95)
            normalized = normalize_image(slide, settings, part)
        if settings.detections_file:
            detections = read_image_boxes(Path(settings.detections_file), slide)
        elif settings.model:
            model = _load_model("detector", settings.model, settings.model_sha256, device)
            part = subprogress(report, first if settings.decompose else 0.0, found)
            work.parent.mkdir(parents=True, exist_ok=True)
            detections = detect_objects(
                model, slide, settings, stains, work, source, part, size_hint
            )
        if settings.classifier and detections is not None:
            classifier = _load_model(
                "classifier", settings.classifier, settings.classifier_sha256, device
            )
            part = subprogress(report, found, 0.95)
            if model is not None and not settings.classify_only:
                detections = claim_red_cells(detections, model.info, classifier.info)
            detections = classify_objects(classifier, slide, detections, settings, part)
        unchanged = file_stamp(job.source) == source
        sha256 = file_hash(job.source) if unchanged else ""
        if not unchanged or file_stamp(job.source) != source:  # hashing it takes a while, too
            raise FileError(f"{job.source}: it changed, or vanished, while it was being read.")
        report_progress(report, 950, 1000, "writing")
        info = None if model is None else model.info
        truth = settings.annotations_file
        result = ImageResult(
            slide,
            settings,
            sha256,
            stains,
            detections,
            info,
            read_image_boxes(Path(truth), slide) if truth else None,
            records.overlay_size,
            None if classifier is None else classifier.info,
            normalized,
        )
        record: Record = records.write(name, source, result)
    with suppress(OSError):
        work.unlink()
    report_progress(report, 1, 1, "done")
    limits = model_limits(info or {}, result.classifier or {})
    own = [note for one in (info, result.classifier) for note in (one or {}).get("notes") or []]
    return {"record": record, "notes": [*map(str, own), *limits], "limits": limits}


def _size_of_fields(
    fields: Sequence[str], records: Records, device: str, layout: str, report: Report | None
) -> float | None:
    """The size of objects that a study tries first in every image, whatever their order.

    It is found in the same few images by whoever needs it first, and kept in the study's folder.
    """
    if not fields:
        return None
    from napari_beerlanet.core.detection.scale_search import pooled_size
    from napari_beerlanet.core.images.slide import SLIDE_PIXELS, open_slide

    settings, file = records.settings, records.out / SIZE_FILE
    key = settings_hash({"settings": settings.hash(), "fields": list(fields)})
    stored = read_json_or_empty(file) if layout == "study" else {}
    known = stored if stored.get("settings") == settings.hash() else _found_sizes.get(key)
    if known is None:
        model = _load_model("detector", settings.model, settings.model_sha256, device)
        found: list[Detections] = []
        for path in fields:
            report_progress(report, 0, 1000, "looking for the cell size in other images")
            with suppress(Exception), open_slide(Path(path)) as slide:  # told when its turn comes
                if math.prod(slide.shape) <= SLIDE_PIXELS:
                    found.append(detect_objects(model, slide, settings))
        known = {"settings": settings.hash(), "object_size": pooled_size(found)}
        _found_sizes[key] = known
        if layout == "study":
            write_json(file, known)
    return known.get("object_size")


def read_image_boxes(path: Path, slide: Slide) -> Detections:
    """The boxes of a slide in a file, which may be about several images."""
    from napari_beerlanet.core.formats import image_names, read_detections

    stem = slide.path.stem
    names = [n for n in image_names(path) if Path(n.replace("\\", "/")).stem == stem]
    boxes = read_detections(path, slide.shape, image_name=names[0] if names else slide.path.name)
    return replace(boxes, image_shape=slide.shape, pixel_size=slide.pixel_size)


def decompose_image(
    slide: Slide, settings: StudySettings, report: Report | None = None
) -> SlideDecomposition:
    """The stains of an image of any size."""
    import numpy as np

    from napari_beerlanet.core.stains.decompose import decompose
    from napari_beerlanet.core.stains.slide import (
        SlideDecomposition,
        SlideScan,
        fit_slide,
        scan_slide_colours,
    )

    chosen: dict[str, Any] = {
        name: getattr(settings, name) for name in DecomposeSettings.model_fields
    }
    chosen["device"] = settings.device
    finest = slide.levels[0]
    pixels = slide.shape[0] * slide.shape[1]
    # The palette of an 8-bit image is all that the solver needs of it, so its pixels are streamed.
    # Others are sampled where they are many, which would not do for densities of every pixel.
    sampled = np.dtype(finest.dtype) != np.uint8 and settings.density_maps != "none"
    if (settings.method == "dense" or sampled) and pixels <= MAX_PIXELS:
        fit = decompose(np.asarray(finest[:, :, :]), report=report, **chosen)
        return SlideDecomposition(fit, slide.levels, pixels)
    scan = SlideScan(leave_out=settings.leave_out)
    colours = scan_slide_colours(slide.levels, scan, subprogress(report, 0.0, 0.7))
    return fit_slide(colours, subprogress(report, 0.7, 1.0), **chosen)


def detect_objects(
    model: Detector,
    slide: Slide,
    settings: StudySettings,
    stains: SlideDecomposition | None = None,
    work: Path | None = None,
    source: Mapping[str, Any] | None = None,
    report: Report | None = None,
    size_hint: float | None = None,
) -> Detections:
    """The objects of an image of any size; `work` is the file to resume from."""
    from napari_beerlanet.core.detection.slide_detector import detect_slide

    # The model's fit sees all colours; those of the stains' fit may lack what it leaves out.
    whole = not settings.leave_out and slide.levels[0].shape[2] == 3
    return detect_slide(
        model,
        slide.levels,
        settings.confidence,
        densities=settings.densities,
        iou=settings.iou,
        object_size=settings.object_size,
        tile=settings.tile,
        batch=settings.batch,
        pixel_size=slide.pixel_size,
        size_hint=size_hint,
        skip_glass=settings.skip_glass,
        openvino=settings.openvino,
        tissue=None if stains is None else stains.tissue,
        palette=stains.palette if stains is not None and whole else None,
        results=work,
        source=None if source is None else dict(source),
        report=report,
    )


def normalize_image(
    slide: Slide, settings: StudySettings, report: Report | None = None
) -> NormalizedSlide:
    """An image of any size in the colours of a normalizer's template.

    The statistics of an image in memory are of all its pixels; a slide's, which is streamed, of its
    tissue.
    """
    import numpy as np

    from napari_beerlanet.core.images.slide import SLIDE_PIXELS
    from napari_beerlanet.core.normalization.slide import NormalizedSlide, normalize_slide

    normalizer = _load_normalizer(settings.normalizer, settings.normalizer_sha256)
    pixels = slide.shape[0] * slide.shape[1]
    if pixels > (SLIDE_PIXELS if normalizer.colour_only else MAX_PIXELS):
        return normalize_slide(slide.levels, normalizer, report=report)
    report_progress(report, 0, 1, "normalizing")
    done = normalizer.apply(np.asarray(slide.levels[0][:, :, :]))
    return NormalizedSlide([done.rgb], done.notes, done.unchanged, done.before, done.after)


def classify_objects(
    classifier: Classifier,
    slide: Slide,
    detections: Detections,
    settings: StudySettings,
    report: Report | None = None,
) -> Detections:
    """Detections of an image of any size with the types of their cells."""
    from napari_beerlanet.core.stains.slide_pixels import SlidePixels

    return classifier.classify_detections(
        SlidePixels(slide.levels),
        detections,
        settings.classify_only,
        confidence=0.0 if settings.detections_file else settings.confidence,
        fit=settings.classify_fit,
        report=report,
    )


def _load_normalizer(path: str, sha256: str) -> Normalizer:
    """The normalizer, loaded once in a process; it must be the study's."""
    from napari_beerlanet.core.normalization.methods import load_normalizer

    key = (path, sha256, "")
    with _load_lock:
        if _loaded_models.get("normalizer", (None, None))[0] != key:
            if sha256 and Path(path).is_file() and file_hash(Path(path)) != sha256:
                raise FileError(f"{path}: not the normalizer that this study was started with.")
            _loaded_models["normalizer"] = (key, load_normalizer(path))
        found: Normalizer = _loaded_models["normalizer"][1]
        return found


_found_sizes: dict[str, dict[str, Any]] = {}
_loaded_models: dict[str, tuple[tuple[str, str, str], Any]] = {}
_load_lock = threading.Lock()


def _load_model(
    kind: Literal["detector", "classifier"], name: str, sha256: str, device: str
) -> Any:
    """The model, loaded once in a process; it must be the one that the study was started with."""
    from napari_beerlanet.core.checkpoints.checkpoint import (
        checkpoint_hash,
        load_classifier,
        load_detector,
    )

    key = (name, sha256, device)
    with _load_lock:
        if kind not in _loaded_models or _loaded_models[kind][0] != key:
            if sha256 and checkpoint_hash(name) != sha256:
                raise FileError(f"{name}: not the model that this study was started with.")
            _loaded_models.pop(kind, None)
            load: Callable[..., Any] = load_detector if kind == "detector" else load_classifier
            _loaded_models[kind] = (key, load(name, device))
        return _loaded_models[kind][1]
