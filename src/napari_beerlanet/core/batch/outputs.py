"""Output files of one image: densities, spectra, pictures, normalized colours, boxes, a report."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet._version import __version__
from napari_beerlanet.core.batch.inputs import (
    DENSITY_SUFFIXES,
    DETECTIONS_SUFFIX,
    NORMALIZED_SUFFIXES,
    OVERLAY_SUFFIX,
    PREVIEW_SUFFIX,
    REPORT_SUFFIX,
    SPECTRA_SUFFIX,
    TYPES_SUFFIX,
)
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.boxes.classes import assign_colours, parasitaemia, proportions
from napari_beerlanet.core.common.storage import atomic_path, file_hash, remove_path
from napari_beerlanet.core.stains.files import write_densities, write_spectra

if TYPE_CHECKING:  # torch comes with them
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.images.slide import Slide
    from napari_beerlanet.core.normalization.normalizer import Appearance
    from napari_beerlanet.core.normalization.slide import NormalizedSlide
    from napari_beerlanet.core.report.subject import ReportSubject
    from napari_beerlanet.core.stains.slide import SlideDecomposition

_DETECTIONS_KIND, _DETECTIONS_VERSION = "napari-beerlanet detections", 1
_NORMALIZED_KIND, _NORMALIZED_VERSION = "napari-beerlanet normalized image", 1
YOLO_FOLDER = "yolo"
"""In the results folder: boxes as YOLO, whose images have files of the same names."""
NORMALIZED_RECORD_SUFFIX = ".normalized.json"
"""Of the file that says how an image was normalized."""
_MAX_PIXELS_IN_MEMORY = 1 << 26  # of an image whose pictures are drawn from all its pixels
_MAX_DENSITY_PIXELS = 1 << 24  # of one whose densities are computed at once: 64 MB for each stain
_FORMAT_SUFFIXES = {
    "coco": f"{DETECTIONS_SUFFIX}.coco.json",
    "voc": f"{DETECTIONS_SUFFIX}.xml",
    "types": TYPES_SUFFIX,
}
DETECTIONS_RECORD_SUFFIX = f"{DETECTIONS_SUFFIX}.json"
"""Of the file that says how detections were made, where there is no study."""


@dataclass(frozen=True)
class ImageResult:
    """All results of one image; `annotations` are the truth.

    `model` and `classifier` are the `info` of their checkpoints.

    `overlay_size` is the longer side of the picture of boxes, in pixels.
    """

    slide: Slide
    settings: StudySettings
    sha256: str
    stains: SlideDecomposition | None = None
    detections: Detections | None = None
    model: Mapping[str, Any] | None = None
    annotations: Detections | None = None
    overlay_size: int = 2048
    classifier: Mapping[str, Any] | None = None
    normalized: NormalizedSlide | None = None

    @cached_property
    def warnings(self) -> list[str]:
        """Where the image is out of the models' training domain."""
        if self.detections is None:
            return []
        from napari_beerlanet.core.detection.stain_statistics import detection_warnings

        warnings = []
        if self.model:
            warnings += detection_warnings(self.model, self.detections, self.slide.pixel_size)
        said = self.detections.report.get("classification", {}).get("warnings", [])
        return list(dict.fromkeys([*warnings, *(f"Classifier: {text}" for text in said)]))

    @property
    def class_colours(self) -> list[str] | None:
        """ "#rrggbb" by class, None where the model has none."""
        return (self.model or {}).get("colours")

    @cached_property
    def drawn(self) -> tuple[Detections, list[str]]:
        """Detections as pictures show them, by type where they have one, and their colours."""
        assert self.detections is not None
        shown, types = self.detections.by_type(), self.detections.types
        own = _colours_by_name(self.model)
        classes = {name: own[name] for name in shown.names if name in own and name not in types}
        colours = assign_colours(shown.names, classes, _colours_by_name(self.classifier))
        return shown, list(colours.values())

    @property
    def fits_in_memory(self) -> bool:
        """Whether pictures are drawn from all pixels."""
        return self.slide.shape[0] * self.slide.shape[1] <= _MAX_PIXELS_IN_MEMORY

    @cached_property
    def picture(self) -> Any:
        """(h, w, 3 or 4): the image, or a thumbnail of a large one."""
        import numpy as np

        from napari_beerlanet.core.images.pyramid import read_thumbnail

        if self.fits_in_memory:
            return np.asarray(self.slide.levels[0][:, :, :])
        return read_thumbnail(self.slide.levels, self.overlay_size)


def _colours_by_name(info: Mapping[str, Any] | None) -> dict[str, str]:
    known = info or {}
    return dict(zip(known.get("classes") or (), known.get("colours") or (), strict=False))


def output_files(out: Path, name: str, settings: StudySettings) -> dict[str, Path]:
    """The file of each kind of output that the settings ask for."""
    files: dict[str, Path] = {}
    if settings.decompose:
        if settings.density_maps != "none":
            files["densities"] = out / (name + DENSITY_SUFFIXES[settings.density_maps])
        files["spectra"] = out / (name + SPECTRA_SUFFIX)
        if settings.previews:
            files["preview"] = out / (name + PREVIEW_SUFFIX)
    if settings.normalizer:
        files["normalized"] = out / (name + NORMALIZED_SUFFIXES[settings.normalized_format])
        files["normalization"] = out / (name + NORMALIZED_RECORD_SUFFIX)
    if settings.has_objects:
        for kind in settings.formats:
            ending = _FORMAT_SUFFIXES.get(kind, f"{DETECTIONS_SUFFIX}.{kind}")
            # YOLO's are called as the image, so they have a folder of their own.
            place = out / YOLO_FOLDER / f"{name}.txt" if kind == "yolo" else out / (name + ending)
            files[kind] = place
        if settings.previews:
            files["overlay"] = out / (name + OVERLAY_SUFFIX)
        if settings.reports:
            files["report"] = out / (name + REPORT_SUFFIX)
    return files


def write_outputs(
    files: Mapping[str, Path],
    result: ImageResult,
    holder: str = "",
    record: Callable[[Mapping[str, Path]], _Extra] | None = None,
) -> None:
    """Write all files of an image, all or none.

    `holder` is the kind of the file that says that the others are there, and gets its name last.
    What it holds besides is the `record` of the others, by kind as they are written so far.
    """
    with ExitStack() as stack:
        unfinished = {}
        for kind in sorted(files, key=lambda kind: kind != holder):  # contexts end in reverse
            files[kind].parent.mkdir(exist_ok=True)
            unfinished[kind] = stack.enter_context(atomic_path(files[kind]))
        last = {kind: unfinished.pop(kind) for kind in [holder] if kind in unfinished}
        for kind, path in unfinished.items():
            _WRITERS.get(kind, _write_boxes)(path, kind, result, {})
        for kind, path in last.items():
            extra = record(unfinished) if record is not None else {}
            _WRITERS.get(kind, _write_boxes)(path, kind, result, extra)
            remove_path(files[kind])


_Extra = Mapping[str, Any]
_Writer = Callable[[Path, str, ImageResult, _Extra], None]


def _write_density_maps(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    stains, slide = result.stains, result.slide
    assert stains is not None
    densities = None  # the decomposition's own
    if stains.fit.image.shape != slide.shape:  # which are of a thumbnail
        in_memory = slide.shape[0] * slide.shape[1] <= _MAX_DENSITY_PIXELS
        densities = stains.fit.densities_of(result.picture) if in_memory else stains.densities()
    write_densities(path, stains.fit, slide.pixel_size, slide.path.name, densities)


def _write_spectra_file(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    stains, slide = result.stains, result.slide
    assert stains is not None
    settings = json.loads(json.dumps(result.settings.as_dict()))
    more = {"settings": settings, "shape": list(slide.shape), **extra}
    write_spectra(path, stains.fit, slide.pixel_size, slide.path.name, more)


def _write_preview(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    from napari_beerlanet.core.figures.preview import draw_preview

    stains, slide = result.stains, result.slide
    assert stains is not None
    title = f"{slide.path.name}, {slide.shape[1]} x {slide.shape[0]} pixels"
    draw_preview(stains.fit, title, _thumbnail_pixel_size(slide, stains)).save(path)


def _thumbnail_pixel_size(slide: Slide, stains: SlideDecomposition) -> tuple[float, float] | None:
    """Micrometres per pixel of the thumbnail that a preview shows."""
    if slide.pixel_size is None:
        return None
    pairs = zip(slide.pixel_size, slide.shape, stains.fit.image.shape, strict=True)
    y, x = (size * whole / small for size, whole, small in pairs)
    return y, x


def _write_boxes(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    from napari_beerlanet.core.formats import write_detections

    assert result.detections is not None
    name = result.slide.path.name
    write_detections(path, result.detections, name, format=kind, colours=result.class_colours)


def _write_types(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    """A table of the classified cells alone."""
    from napari_beerlanet.core.boxes.detections import TYPE_COLUMN
    from napari_beerlanet.core.formats import write_csv

    found = result.detections
    assert found is not None
    types = found.columns.get(TYPE_COLUMN, [""] * len(found))
    write_csv(path, found[[name != "" for name in types]], result.slide.path.name)


def _write_overlay(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    from PIL import Image

    from napari_beerlanet.core.figures.overlay import draw_overlay, scale_to_picture

    shown, colours = result.drawn
    scaled = scale_to_picture(shown, result.picture)
    size = result.overlay_size
    drawn = draw_overlay(result.picture, scaled, colours, max_side=size)
    Image.fromarray(drawn).save(path)


def _write_report_file(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    from napari_beerlanet.core.report.report import write_report

    write_report(path, report_subject(result), result.settings.one_page)


def _write_detections_record(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    detections = result.detections
    assert detections is not None
    size = detections.pixel_size
    content = {
        "kind": _DETECTIONS_KIND,
        "version": _DETECTIONS_VERSION,
        "software": f"napari-beerlanet {__version__}",
        "image": result.slide.path.name,
        "shape": list(detections.image_shape or ()),
        "pixel_size_um": list(size) if size else None,
        "classes": detections.names,
        "found": detections.report,
        **extra,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _write_normalized(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    from napari_beerlanet.core.images.files import write_png, write_pyramid

    assert result.normalized is not None
    levels, slide = result.normalized.levels, result.slide
    if result.settings.normalized_format == "png":
        write_png(path, levels[0])
    else:
        write_pyramid(path, levels, slide.pixel_size, slide.path.name)


def _write_normalization(path: Path, kind: str, result: ImageResult, extra: _Extra) -> None:
    normalized, slide = result.normalized, result.slide
    assert normalized is not None
    content = {
        "kind": _NORMALIZED_KIND,
        "version": _NORMALIZED_VERSION,
        "software": f"napari-beerlanet {__version__}",
        "image": slide.path.name,
        "shape": list(slide.shape),
        "pixel_size_um": list(slide.pixel_size) if slide.pixel_size else None,
        "normalizer_sha256": result.settings.normalizer_sha256,
        "unchanged": normalized.unchanged,
        "notes": list(normalized.notes),
        "before": _appearance(normalized.before),
        "after": _appearance(normalized.after),
        **extra,
    }
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _appearance(seen: Appearance | None) -> dict[str, Any] | None:
    """Background, stains (one list for each) and strengths as JSON has them."""
    if seen is None:
        return None
    stains = None if seen.stains is None else seen.stains.T
    parts = {"background": seen.background, "stains": stains, "strengths": seen.strengths}
    return {name: None if part is None else part.tolist() for name, part in parts.items()}


_WRITERS: dict[str, _Writer] = {
    "normalized": _write_normalized,
    "normalization": _write_normalization,
    "densities": _write_density_maps,
    "spectra": _write_spectra_file,
    "preview": _write_preview,
    "overlay": _write_overlay,
    "report": _write_report_file,
    "types": _write_types,
    "record": _write_detections_record,
}


def report_subject(result: ImageResult) -> ReportSubject:
    """What a report on an image is about; its pixels stay lazy where they are many."""
    from napari_beerlanet.core.evaluation.live import LiveEvaluation
    from napari_beerlanet.core.report.subject import ReportSubject
    from napari_beerlanet.core.stains.slide_pixels import SlidePixels

    slide, settings, model = result.slide, result.settings, dict(result.model or {})
    detections, truth = result.detections, result.annotations
    assert detections is not None
    whole = result.fits_in_memory
    hashes, facts = {"the image file": result.sha256}, {"Image file": slide.path.name}
    used: dict[str, object] = {}
    if model:
        hashes["the checkpoint"] = settings.model_sha256
        used["IoU of duplicates"] = settings.iou
    if result.classifier:
        hashes["the classifier"] = settings.classifier_sha256
    if settings.annotations_file:
        facts["Annotations"] = Path(settings.annotations_file).name
        used["Minimum IoU of a match"] = settings.match_iou
    if settings.detections_file:
        facts["Detections"] = Path(settings.detections_file).name
        hashes["the detections"] = file_hash(Path(settings.detections_file))
    return ReportSubject(
        name=slide.path.name,
        pixels=result.picture if whole else SlidePixels(slide.levels),
        picture=None if whole else result.picture,
        detections=detections,
        confidence=settings.confidence,
        colours=result.class_colours,
        decomposition=None if result.stains is None else result.stains.fit,
        evaluation=None if truth is None else LiveEvaluation.of(detections, truth),
        iou=settings.match_iou,
        model=model,
        classifier=dict(result.classifier or {}),
        hashes=hashes,
        settings=used,
        facts=facts,
        notes=result.warnings,
    )


def image_facts(result: ImageResult) -> dict[str, Any]:
    """What is counted in an image, and what is to be said of it, as its record has them.

    `counts` by class are there where objects were looked for, `types` where they were classified.
    `mm2` is of the tissue, or else of the image, None where the pixel size is not known.
    """
    slide, found = result.slide, result.detections
    notes = [] if result.normalized is None else list(result.normalized.notes)
    facts: dict[str, Any] = {"mm2": None, "notes": notes, "warnings": result.warnings}
    if slide.pixel_size is not None:
        facts["mm2"] = math.prod((*slide.shape, *slide.pixel_size)) / 1e6
        if result.stains is not None and result.stains.tissue is not None:
            facts["mm2"] *= result.stains.tissue.fraction
    if found is not None:
        facts["counts"] = found.counts()
        facts |= {"types": found.type_counts()} if found.types else {}
        notes += found.report.get("notes", [])
        notes += found.report.get("classification", {}).get("notes", [])
    return facts


def summary_row(name: str, result: ImageResult, facts: Mapping[str, Any]) -> dict[str, Any]:
    """The image's line of the summary table."""
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
    if result.normalized is not None:
        row["normalized"] = not result.normalized.unchanged
    if result.detections is not None:
        row |= _detections_row(result.detections, facts)
        row["warnings"] = " ".join(facts["warnings"])
    if result.normalized is not None or result.detections is not None:
        row["notes"] = " ".join(facts["notes"])
    return row


def _stains_row(stains: SlideDecomposition, mm2: float | None) -> dict[str, Any]:
    row: dict[str, Any] = {}
    if stains.tissue is not None:
        row["tissue_share"] = stains.tissue.fraction
        row |= {} if mm2 is None else {"tissue_mm2": mm2 * stains.tissue.fraction}
    fit = stains.fit
    row["stains"] = int(fit.active.sum())
    row |= {f"light_{c}": float(v) for c, v in zip("rgb", fit.light, strict=True)}
    labels, suggested = fit.labels, fit.suggestions()
    for i in fit.order:
        row[f"{labels[i]} share"] = float(fit.share[i])
    for i in fit.order:
        if labels[i] not in fit.names and i in suggested:
            near = suggested[i]
            row[f"{labels[i]} resembles"] = f"{near.name} ({near.angle:.0f}°)"
    return row


def _detections_row(detections: Detections, facts: Mapping[str, Any]) -> dict[str, Any]:
    counts, types, mm2 = facts["counts"], facts.get("types", {}), facts["mm2"]
    row: dict[str, Any] = {"objects": len(detections)}
    row |= {f"count {name}": count for name, count in counts.items()}
    if mm2:
        row |= {f"per mm2 {name}": count / mm2 for name, count in counts.items()}
    if types:
        row["classified"] = sum(types.values())
        row |= {f"type {name}": count for name, count in types.items()}
    for name, part in proportions(types).items():
        low, high = part.interval
        row |= {f"{name} share": part.share, f"{name} share_low": low, f"{name} share_high": high}
    infected = parasitaemia(counts, types)
    if infected is not None:
        low, high = infected.interval
        row |= {"parasitaemia": infected.share, "parasitaemia_low": low, "parasitaemia_high": high}
        if infected.per_100_white_cells is not None:
            row["parasites per 100 white cells"] = infected.per_100_white_cells
    row["object_size"] = detections.report.get("object_size")
    return row
