"""What a study writes of one image: spectra, pictures, detections, a report, a table's line."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .files import atomic_path
from .inputs import FOUND, OVERLAY, PREVIEW, REPORT, SPECTRA
from .studysettings import StudySettings

if TYPE_CHECKING:  # torch comes with them
    from .boxes import Detections
    from .slides import Slide
    from .stream import SlideDecomposition

_LONGEST = 2048  # pixels of an overlay's side


@dataclass(frozen=True)
class ImageResult:
    """All that is known of one image; `model` is its checkpoint's `info`."""

    slide: Slide
    settings: StudySettings
    sha256: str
    stains: SlideDecomposition | None = None
    found: Detections | None = None
    model: Mapping[str, Any] | None = None

    @cached_property
    def warnings(self) -> list[str]:
        """In what the image is unlike those that the model was trained on."""
        from .familiar import warnings_on

        if self.found is None or not self.model:
            return []
        return warnings_on(self.model, self.found, self.slide.pixel_size)


def write_image(out: Path, name: str, result: ImageResult) -> list[Path]:
    """All results of an image, all or none; their paths."""
    paths = []
    with ExitStack() as stack:

        def begin(ending: str) -> Path:
            paths.append(out / (name + ending))
            return stack.enter_context(atomic_path(paths[-1]))

        if result.stains is not None:
            _write_stains(begin, result, result.stains)
        if result.found is not None:
            _write_found(begin, result, result.found)
    return paths


def _write_stains(begin: Any, result: ImageResult, stains: SlideDecomposition) -> None:
    from .results import write_spectra

    slide, settings = result.slide, result.settings
    extra = {"settings": json.loads(json.dumps(asdict(settings))), "shape": slide.shape}
    write_spectra(begin(SPECTRA), stains.fit, slide.pixel_size, slide.path.name, extra)
    if settings.previews:
        from .preview import preview

        title = f"{slide.path.name}, {slide.shape[1]} x {slide.shape[0]} pixels"
        preview(stains.fit, title, _thumbnail_size(slide, stains)).save(begin(PREVIEW))


def _write_found(begin: Any, result: ImageResult, found: Detections) -> None:
    from PIL import Image

    from .formats import write_detections
    from .images import to_bytes
    from .lazy import thumbnail
    from .overlay import draw_overlay, in_picture

    slide, settings = result.slide, result.settings
    for kind in settings.formats:
        ending = {"coco": ".coco.json", "voc": ".xml"}.get(kind, f".{kind}")
        write_detections(begin(FOUND + ending), found, slide.path.name, format=kind)
    if not settings.previews and not settings.reports:
        return
    small = to_bytes(thumbnail(slide.levels, _LONGEST))
    if settings.previews:
        Image.fromarray(draw_overlay(small, in_picture(found, small))).save(begin(OVERLAY))
    if settings.reports:
        from .report import write_report

        write_report(begin(REPORT), _subject(result, found, small))


def _subject(result: ImageResult, found: Detections, small: Any) -> Any:
    from .lazypixels import LazyPixels
    from .report import Subject

    slide, settings, model = result.slide, result.settings, dict(result.model or {})
    return Subject(
        name=slide.path.name,
        pixels=LazyPixels(slide.levels),
        picture=small,
        found=found,
        confidence=settings.confidence,
        colours=model.get("colours"),
        decomposition=None if result.stains is None else result.stains.fit,
        model=model,
        hashes={"the image file": result.sha256, "the checkpoint": settings.model_sha256},
        settings={"Overlap (IoU) of doubles": settings.iou},
        facts={"Image file": slide.path.name},
        notes=result.warnings,
    )


def _thumbnail_size(slide: Slide, stains: SlideDecomposition) -> tuple[float, float] | None:
    """Micrometres per pixel of the thumbnail that a preview shows."""
    if slide.pixel_size is None:
        return None
    pairs = zip(slide.pixel_size, slide.shape, stains.fit.image.shape, strict=True)
    y, x = (size * whole / small for size, whole, small in pairs)
    return y, x


def table_row(name: str, result: ImageResult) -> dict[str, Any]:
    """A line of the study's table."""
    slide = result.slide
    height, width = slide.shape
    row: dict[str, Any] = {"image": name, "path": str(slide.path), "width": width}
    row |= {"height": height, "um_per_pixel_y": None, "um_per_pixel_x": None}
    mm2 = None
    if slide.pixel_size is not None:
        y, x = slide.pixel_size
        mm2 = width * height * y * x / 1e6
        row |= {"um_per_pixel_y": y, "um_per_pixel_x": x, "mm2": mm2}
    if result.stains is not None:
        row |= _stains_row(result.stains, mm2)
    if result.found is not None:
        row |= _found_row(result.found, row.get("tissue_mm2", mm2))
        row["warnings"] = " ".join(result.warnings)
    return row


def _stains_row(stains: SlideDecomposition, mm2: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if stains.tissue is not None:
        row["tissue_share"] = stains.tissue.share
        row |= {} if mm2 is None else {"tissue_mm2": mm2 * stains.tissue.share}
    fit = stains.fit
    row["stains"] = int(fit.active.sum())
    row |= {f"light_{c}": float(v) for c, v in zip("rgb", fit.light, strict=True)}
    return row | {f"OD {k + 1} share": float(share) for k, share in enumerate(fit.share)}


def _found_row(found: Detections, mm2: float | None) -> dict[str, Any]:
    from .counting import parasitaemia

    counts = found.counts()
    row: dict[str, Any] = {"objects": len(found), **{f"count {n}": c for n, c in counts.items()}}
    if mm2:
        row |= {f"per mm2 {n}": c / mm2 for n, c in counts.items()}
    infected = parasitaemia(counts)
    if infected is not None:
        low, high = infected.interval
        row |= {"parasitaemia": infected.share, "parasitaemia_low": low, "parasitaemia_high": high}
    row["object_size"] = found.report.get("object_size")
    row["notes"] = " ".join(found.report.get("notes", []))
    return row
