"""One image of a study: decomposed, its objects found and measured, all of it written.

Speaks plain dicts, so that it runs in this process, in another, or on another machine.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .device import spread_device
from .files import FileError
from .inputs import Job
from .manifest import file_hash, find_record, write_record
from .progress import Cancelled, Report, tell, within
from .stamps import HOPELESS, stamp
from .studyresults import ImageResult, table_row, write_image
from .studysettings import StudySettings
from .wording import sentence

if TYPE_CHECKING:  # torch comes with them
    from .boxes import Detections
    from .detector import Detector
    from .slides import Slide
    from .stream import SlideDecomposition

WORK = ".work"


def do_image(task: Mapping[str, Any], report: Report | None = None) -> dict[str, Any]:
    """Do one image and return what became of it: a record, or an error in one sentence.

    `task` has source, name, out, settings and overwrite, and perhaps the number of the worker. A
    `hopeless` error is one that every other image would meet, too, such as a full disk.
    """
    job, out = Job(Path(task["source"]), task["name"]), Path(task["out"])
    settings = StudySettings.of(task["settings"])
    try:
        name, record = find_record(out, job, settings.hash())
        if record is not None and not task.get("overwrite"):
            return {"status": "skipped", "record": record}
        device = spread_device(settings.device, int(task.get("worker", 0)))
        settings = replace(settings, device=device)
        return {"status": "done", "record": _do(job, name, out, settings, report)}
    except Cancelled:
        raise
    except Exception as error:
        hopeless = isinstance(error, OSError) and error.errno in HOPELESS
        return {"status": "failed", "error": sentence(error), "hopeless": hopeless}


def _do(
    job: Job, name: str, out: Path, settings: StudySettings, report: Report | None
) -> dict[str, Any]:
    from .slides import open_slide

    if job.source.is_dir():
        raise FileError(f"{job.source}: no images in this folder.")
    source, work = stamp(job.source), out / WORK / f"{name}.tiles"
    with open_slide(job.source) as slide:
        size = settings.pixel_size
        slide = replace(slide, pixel_size=(size, size) if size else slide.pixel_size)
        first = 0.4 if settings.model else 0.95
        stains = _decompose(slide, settings, within(report, 0.0, first))
        found = model = None
        if settings.model:
            model = _model(settings.model, settings.model_sha256, settings.device)
            part = within(report, 0.4 if settings.decompose else 0.0, 0.95)
            found = _detect(model, slide, stains, settings, work, source, part)
        if stamp(job.source) != source:
            raise FileError(f"{job.source}: it changed, or vanished, while it was being read.")
        tell(report, 950, 1000, "writing")
        digest, info = file_hash(job.source), None if model is None else model.info
        result = ImageResult(slide, settings, digest, stains, found, info)
        outputs = write_image(out, name, result)
    record = write_record(
        out, name, source, digest, settings.hash(), outputs, table_row(name, result)
    )
    with suppress(OSError):
        work.unlink()
    tell(report, 1, 1, "done")
    return record


def _decompose(
    slide: Slide, settings: StudySettings, report: Report | None
) -> SlideDecomposition | None:
    """The slide's stains; where they are counted first, by two fits."""
    import numpy as np

    from .slidecolours import count_slide
    from .stream import fit_slide

    if not settings.decompose:
        return None
    chosen: dict[str, Any] = {k: getattr(settings, k) for k in ("iterations", "lam", "gamma")}
    chosen["components"] = 8 if settings.components == "auto" else settings.components
    leave_out: Any = settings.leave_out
    seen = count_slide(slide.levels, leave_out=leave_out, report=within(report, 0.0, 0.7))
    report = within(report, 0.7, 1.0)
    free = settings.lam == settings.gamma == "auto" or settings.iterations != "converge"
    if settings.spectra is not None:
        chosen["spectra"] = np.array(settings.spectra, np.float64)
        chosen["components"] = chosen["spectra"].shape[1]
    elif settings.components == "auto" and not free:
        counted = fit_slide(seen, within(report, 0.0, 0.5), iterations="converge")
        report = within(report, 0.5, 1.0)
        chosen["spectra"] = counted.fit.spectra
        chosen["components"] = counted.fit.spectra.shape[1]
    return fit_slide(seen, report, **chosen)


def _detect(
    model: Detector,
    slide: Slide,
    stains: SlideDecomposition | None,
    settings: StudySettings,
    work: Path,
    source: dict[str, Any],
    report: Report | None,
) -> Detections:
    from .slidedetect import detect_slide

    work.parent.mkdir(parents=True, exist_ok=True)
    whole = not settings.leave_out and slide.levels[0].shape[2] == 3
    return detect_slide(
        model,
        slide.levels,
        settings.confidence,
        densities=settings.measure,
        iou=settings.iou,
        object_size=settings.object_size,
        tile=settings.tile,
        pixel_size=slide.pixel_size,
        skip_glass=settings.skip_glass,
        tissue=None if stains is None else stains.tissue,
        palette=stains.palette if stains is not None and whole else None,
        results=work,
        source=source,
        report=report,
    )


_models: dict[tuple[str, str, str], Detector] = {}
_loading = threading.Lock()


def _model(name: str, sha256: str, device: str) -> Detector:
    """The model, loaded once in a process; it must be the one that the study was begun with."""
    from .checkpoint import checkpoint_hash, load_checkpoint

    key = (name, sha256, device)
    with _loading:
        if key not in _models:
            if sha256 and checkpoint_hash(name) != sha256:
                raise FileError(f"{name}: not the model that this study was begun with.")
            _models.clear()
            _models[key] = load_checkpoint(name, device)
        return _models[key]
