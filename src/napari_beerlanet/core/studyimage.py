"""One image of a study: decomposed, its objects found and measured, all of it written.

Speaks plain dicts, so that it runs in this process, in another, or on another machine.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .files import FileError, atomic_path
from .inputs import FOUND, OVERLAY, PREVIEW, SPECTRA, Job
from .manifest import find_record, settings_hash, write_record
from .progress import Cancelled, Report, tell, within
from .stamps import HOPELESS, stamp
from .wording import sentence

if TYPE_CHECKING:  # torch comes with them
    from .boxes import Detections
    from .detector import Detector
    from .slides import Slide
    from .stream import SlideDecomposition

KINDS = ("csv", "geojson", "coco", "voc")
WORK = ".work"
_LONGEST = 2048  # pixels of an overlay's side


@dataclass(frozen=True)
class StudySettings:
    """What decides a study's numbers.

    `model` is a packaged model's name, a checkpoint's path, or "" to find no objects;
    `model_sha256` is filled in by `run_study`. The rest is as for `decompose_slide`,
    `SlideDetection` and `Detector.detect`.
    """

    model: str = ""
    model_sha256: str = ""
    components: int = 8
    iterations: int | Literal["converge"] = "converge"
    lam: float | Literal["auto"] = "auto"
    gamma: float | Literal["auto"] = "auto"
    leave_out: tuple[str, ...] = ("pen", "border")
    confidence: float = 0.25
    iou: float = 0.7
    object_size: float | Literal["auto"] = "auto"
    tile: int | Literal["auto"] = "auto"
    pixel_size: float | None = None
    skip_glass: bool = True
    formats: tuple[str, ...] = ("csv", "geojson")
    previews: bool = True
    device: str = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StudySettings:
        """From a dict, for instance of a file; what is unknown is a `ValueError`."""
        names = [f.name for f in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"Unknown setting {unknown[0]!r}; known are {', '.join(names)}.")
        plain: dict[str, Any] = {
            k: tuple(v) if isinstance(v, list) else v for k, v in given.items()
        }
        settings = cls(**plain)
        settings._check()
        return settings

    def _check(self) -> None:
        """What would fail with every image is told at once."""
        wrong = [kind for kind in self.formats if kind not in KINDS]
        if wrong:
            raise ValueError(f"formats are {', '.join(KINDS)}, not {wrong[0]!r}.")
        steps = self.iterations
        if steps != "converge" and not (isinstance(steps, int) and steps > 0):
            raise ValueError(f'iterations is "converge" or a whole number, not {steps!r}.')
        for name in ("confidence", "iou"):
            value = getattr(self, name)
            if not isinstance(value, (int, float)) or not 0 <= value <= 1:
                raise ValueError(f"{name} is a number from 0 to 1, not {value!r}.")
        for name in ("model", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a text, not {getattr(self, name)!r}.")

    def hash(self) -> str:
        """Of all that changes results; where the model lies and what runs it does not."""
        decides = {k: v for k, v in asdict(self).items() if k not in ("model", "device")}
        return settings_hash(decides)


def do_image(task: Mapping[str, Any], report: Report | None = None) -> dict[str, Any]:
    """Do one image and return what became of it: a record, or an error in one sentence.

    `task` has source, name, out, settings and overwrite. A `hopeless` error is one that every
    other image would meet, too, such as a full disk.
    """
    job, out = Job(Path(task["source"]), task["name"]), Path(task["out"])
    settings = StudySettings.of(task["settings"])
    try:
        name, record = find_record(out, job, settings.hash())
        if record is not None and not task.get("overwrite"):
            return {"status": "skipped", "record": record}
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
    from .stream import decompose_slide

    if job.source.is_dir():
        raise FileError(f"{job.source}: no images in this folder.")
    source = stamp(job.source)
    with open_slide(job.source) as slide:
        size = settings.pixel_size
        slide = replace(slide, pixel_size=(size, size) if size else slide.pixel_size)
        chosen = {k: getattr(settings, k) for k in ("components", "iterations", "lam", "gamma")}
        leave_out: Any = settings.leave_out
        part = within(report, 0.0, 0.4)
        stains = decompose_slide(slide.levels, leave_out=leave_out, report=part, **chosen)
        found = None
        if settings.model:
            work = out / WORK / f"{name}.tiles"
            found = _detect(slide, stains, settings, work, source, within(report, 0.4, 0.95))
        if stamp(job.source) != source:
            raise FileError(f"{job.source}: it changed, or vanished, while it was being read.")
        outputs = _write(out, name, slide, stains, found, settings)
    row = _row(name, slide, stains, found)
    record = write_record(out, name, source, settings.hash(), outputs, row)
    with suppress(OSError):
        (out / WORK / f"{name}.tiles").unlink()
    tell(report, 1, 1, "done")
    return record


def _detect(
    slide: Slide,
    stains: SlideDecomposition,
    settings: StudySettings,
    work: Path,
    source: dict[str, Any],
    report: Report | None,
) -> Detections:
    from .slidedetect import detect_slide

    work.parent.mkdir(parents=True, exist_ok=True)
    counted = stains.palette if not settings.leave_out and slide.levels[0].shape[2] == 3 else None
    return detect_slide(
        _model(settings.model, settings.model_sha256, settings.device),
        slide.levels,
        settings.confidence,
        iou=settings.iou,
        object_size=settings.object_size,
        tile=settings.tile,
        pixel_size=slide.pixel_size,
        skip_glass=settings.skip_glass,
        tissue=stains.tissue,
        palette=counted,
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


def _write(
    out: Path,
    name: str,
    slide: Slide,
    stains: SlideDecomposition,
    found: Detections | None,
    settings: StudySettings,
) -> list[Path]:
    """All results of an image, all or none; their paths."""
    from .results import write_spectra

    title, paths = slide.path.name, []
    with ExitStack() as stack:

        def begin(ending: str) -> Path:
            paths.append(out / (name + ending))
            return stack.enter_context(atomic_path(paths[-1]))

        extra = {"settings": json.loads(json.dumps(asdict(settings))), "shape": slide.shape}
        write_spectra(begin(SPECTRA), stains.fit, slide.pixel_size, title, extra)
        if settings.previews:
            from .preview import preview

            picture = preview(stains.fit, _title(slide), _thumbnail_size(slide, stains))
            picture.save(begin(PREVIEW))
        if found is not None:
            from .formats import write_detections

            for kind in settings.formats:
                ending = {"coco": ".coco.json", "voc": ".xml"}.get(kind, f".{kind}")
                write_detections(begin(FOUND + ending), found, title, format=kind)
            if settings.previews:
                _draw(begin(OVERLAY), slide, found)
    return paths


def _title(slide: Slide) -> str:
    return f"{slide.path.name}, {slide.shape[1]} x {slide.shape[0]} pixels"


def _thumbnail_size(slide: Slide, stains: SlideDecomposition) -> tuple[float, float] | None:
    """Micrometres per pixel of the thumbnail that a preview shows."""
    if slide.pixel_size is None:
        return None
    pairs = zip(slide.pixel_size, slide.shape, stains.fit.image.shape, strict=True)
    y, x = (size * whole / small for size, whole, small in pairs)
    return y, x


def _draw(path: Path, slide: Slide, found: Detections) -> None:
    """Detections in a picture of the whole slide."""
    from PIL import Image

    from .boxes import scale
    from .images import to_bytes
    from .lazy import thumbnail
    from .overlay import draw_overlay

    small = to_bytes(thumbnail(slide.levels, _LONGEST))
    factor = small.shape[1] / slide.shape[1], small.shape[0] / slide.shape[0]
    boxes = replace(found, xyxy=scale(found.xyxy, *factor), image_shape=small.shape[:2])
    Image.fromarray(draw_overlay(small, boxes)).save(path)


def _row(
    name: str, slide: Slide, stains: SlideDecomposition, found: Detections | None
) -> dict[str, Any]:
    """A line of the study's table."""
    height, width = slide.shape
    row: dict[str, Any] = {"image": name, "path": str(slide.path), "width": width}
    row |= {"height": height, "um_per_pixel_y": None, "um_per_pixel_x": None}
    mm2 = None
    if slide.pixel_size is not None:
        y, x = slide.pixel_size
        mm2 = width * height * y * x / 1e6
        row |= {"um_per_pixel_y": y, "um_per_pixel_x": x, "mm2": mm2}
    if stains.tissue is not None:
        row["tissue_share"] = stains.tissue.share
        row |= {} if mm2 is None else {"tissue_mm2": mm2 * stains.tissue.share}
    fit = stains.fit
    row["stains"] = int(fit.active.sum())
    row |= {f"light_{c}": float(v) for c, v in zip("rgb", fit.light, strict=True)}
    row |= {f"OD {k + 1} share": float(share) for k, share in enumerate(fit.share)}
    if found is not None:
        row |= {"objects": len(found), **{f"count {n}": c for n, c in found.counts().items()}}
        row["object_size"] = found.report.get("object_size")
        row["notes"] = " ".join(found.report.get("notes", []))
    return row
