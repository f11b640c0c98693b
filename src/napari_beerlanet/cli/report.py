"""The command `report`: detect the objects of an image and write an HTML report."""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.cli.common import (
    UsageError,
    add_model_options,
    add_setting,
    given_settings,
    load_model,
    prepare_folder,
    print_message,
    raise_if_interrupted,
)

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.settings import StudySettings
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.images.slide import Slide

HELP = "write a report on an image: counts, metrics, stains, examples"
DESCRIPTION = (
    "Detect the objects of an image or slide and write one self-contained HTML file with counts, "
    "the stains, examples of each class, the model's record, versions and hashes; with annotations "
    "also precision, recall, curves, the confusion matrix and likely label errors."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    from napari_beerlanet.core.detection.settings import DetectSettings

    add = command.add_argument
    add("image", type=Path, metavar="IMAGE", help="a colour image or a whole slide")
    add("--out", required=True, type=Path, metavar="REPORT.html", help="the file to write")
    add_model_options(command)
    add(
        "--detections",
        type=Path,
        metavar="FILE",
        help="take these (CSV, GeoJSON, COCO, VOC, YOLO), reviewed or not, instead of a model's",
    )
    add("--annotations", type=Path, metavar="FILE", help="ground truth, in any of these formats")
    add_setting(command, DetectSettings, "confidence")
    add_setting(
        command,
        DetectSettings,
        "iou",
        "--match-iou",
        hidden=("--overlap",),
        dest="match_iou",
        help="minimum IoU of a detection with its annotation (default 0.5)",
    )
    add_setting(command, DetectSettings, "pixel_size", metavar="UM")
    add("--no-stains", action="store_true", help="do not decompose the stains")


def run(options: argparse.Namespace) -> int:
    """Write the report; prints where it is."""
    from napari_beerlanet.core.batch.image import decompose_image
    from napari_beerlanet.core.batch.outputs import ImageResult, report_subject
    from napari_beerlanet.core.common.storage import file_hash
    from napari_beerlanet.core.evaluation.live import LiveEvaluation
    from napari_beerlanet.core.images.slide import open_slide
    from napari_beerlanet.core.report.report import write_report

    prepare_folder(options.out.absolute().parent)
    settings = _settings(options)
    with open_slide(options.image) as slide:
        slide = replace(slide, pixel_size=settings.pixel_size_yx or slide.pixel_size)
        truth = _read_boxes(options.annotations, slide) if options.annotations else None
        detections, model, hashes = _detections(options, settings, slide)
        raise_if_interrupted()
        stains = None
        if settings.decompose:
            print_message("decomposing the stains ...")
            stains = decompose_image(slide, settings, lambda _: raise_if_interrupted())
        digest = file_hash(options.image)
        subject = report_subject(ImageResult(slide, settings, digest, stains, detections, model))
        changes: dict[str, Any] = {"facts": _provenance(options), "notes": (), "settings": {}}
        changes["hashes"] = {"the image file": digest, **hashes}
        if truth is not None:
            changes["evaluation"] = LiveEvaluation.of(detections, truth)
            changes["iou"] = getattr(options, "match_iou", subject.iou)
            changes["settings"] = {"Minimum IoU of a match": changes["iou"]}
        subject = replace(subject, **changes)
        write_report(options.out, subject)
    counts = ", ".join(
        f"{name} {count}" for name, count in subject.counted_detections.counts().items()
    )
    print(f"{options.out}: {counts}.", flush=True)
    return 0


def _settings(options: argparse.Namespace) -> StudySettings:
    from napari_beerlanet.core.batch.settings import DETECT_PRESET, StudySettings
    from napari_beerlanet.core.detection.settings import DetectSettings

    given = given_settings(options, DetectSettings)
    given |= {"model": options.model, "decompose": not options.no_stains}
    return StudySettings(**(DETECT_PRESET | given))


def _detections(
    options: argparse.Namespace, settings: StudySettings, slide: Slide
) -> tuple[Detections, dict[str, Any], dict[str, str]]:
    """The detections, the model's record and hashes."""
    from napari_beerlanet.core.batch.image import detect_objects
    from napari_beerlanet.core.checkpoints.checkpoint import checkpoint_hash
    from napari_beerlanet.core.common.storage import file_hash

    if options.detections:
        if not options.detections.is_file():
            raise UsageError(f"{options.detections}: there is no such file.")
        boxes = _read_boxes(options.detections, slide)
        return boxes, {}, {"the detections": file_hash(options.detections)}
    model = load_model(options)
    print_message("detecting objects ...")
    boxes = detect_objects(model, slide, settings, report=lambda _: raise_if_interrupted())
    return boxes, model.info, {"the checkpoint": checkpoint_hash(options.model)}


def _read_boxes(path: Path, slide: Slide) -> Detections:
    from napari_beerlanet.core.formats import image_names, read_detections

    stem = slide.path.stem
    names = [n for n in image_names(path) if Path(n.replace("\\", "/")).stem == stem]
    boxes = read_detections(path, slide.shape, image_name=names[0] if names else slide.path.name)
    return replace(boxes, image_shape=slide.shape, pixel_size=slide.pixel_size)


def _provenance(options: argparse.Namespace) -> dict[str, object]:
    facts: dict[str, object] = {"Image file": options.image.name}
    if options.annotations:
        facts["Annotations"] = options.annotations.name
    if options.detections:
        facts["Detections"] = options.detections.name
    return facts
