"""The command `report`: find the objects of an image and write all about it into one HTML file."""

from __future__ import annotations

import argparse
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

from napari_beerlanet.arguments import length, share
from napari_beerlanet.commands import UsageError, made, say, stop_if_asked
from napari_beerlanet.detect_command import Finish, add_model, load

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes import Detections
    from napari_beerlanet.core.files import ImageFile


def add_parser(verbs: Any, finish: Finish) -> None:
    """Add the command to a parser's verbs."""
    command = verbs.add_parser(
        "report",
        help="write a report on an image: counts, quality, stains, examples",
        description="Find the objects of an image and write one self-contained HTML file with "
        "counts, the stains, examples of each class, the model's record, versions and hashes; "
        "with annotations also precision, recall, curves and likely label errors.",
    )
    add = command.add_argument
    add("image", type=Path, metavar="IMAGE", help="a colour image")
    add("--out", required=True, type=Path, metavar="REPORT.html", help="the file to write")
    add_model(command)
    add(
        "--detections",
        type=Path,
        metavar="FILE",
        help="take these (CSV, GeoJSON, COCO, VOC, YOLO), reviewed or not, instead of a model's",
    )
    add("--annotations", type=Path, metavar="FILE", help="what is right, in any of these formats")
    add("--confidence", type=share, default=0.25, metavar="P", help="least score (default 0.25)")
    add("--overlap", type=share, default=0.5, metavar="P", help="to be the same (default 0.5)")
    add(
        "--pixel-size", type=length, metavar="UM", help="micrometres per pixel, if the file is mute"
    )
    add("--no-stains", action="store_true", help="leave out the stains, which take their time")
    finish(command, report)


def report(options: argparse.Namespace) -> int:
    """Write the report; says where it is."""
    from napari_beerlanet.core.files import read_image
    from napari_beerlanet.core.quality import Quality
    from napari_beerlanet.core.report import Subject, write_report

    made(options.out.absolute().parent)
    image = read_image(options.image)
    truth = _read(options.annotations, image) if options.annotations else None
    found, info, hashes = _found(options, image)
    stop_if_asked()
    subject = Subject(
        name=image.name,
        pixels=image.pixels,
        found=found,
        confidence=options.confidence,
        colours=info.get("colours"),
        decomposition=None if options.no_stains else _decomposed(image),
        quality=Quality.of(found, truth) if truth is not None else None,
        level=options.overlap,
        model=info,
        hashes={"the image file": _digest(options.image), **hashes},
        settings={"Overlap (IoU) to be the same": options.overlap} if truth is not None else {},
        facts=_facts(options),
    )
    write_report(options.out, subject)
    counts = ", ".join(f"{name} {count}" for name, count in subject.shown.counts().items())
    print(f"{options.out}: {counts}.", flush=True)
    return 0


def _found(
    options: argparse.Namespace, image: ImageFile
) -> tuple[Detections, dict[str, Any], dict[str, str]]:
    """The detections, the model's record and hashes."""
    if options.detections:
        found = _read(options.detections, image)
        return found, {}, {"the detections": _digest(options.detections)}
    from napari_beerlanet.core.checkpoint import checkpoint_hash

    model = load(options)
    say("finding objects ...")
    found = model.detect(
        image.pixels,
        confidence=options.confidence,
        object_size=options.object_size,
        pixel_size=options.pixel_size or image.pixel_size,
        report=lambda _: stop_if_asked(),
    )
    return found, model.info, {"the checkpoint": checkpoint_hash(options.model)}


def _read(path: Path, image: ImageFile) -> Detections:
    from dataclasses import replace

    from napari_beerlanet.core.formats import image_names, read_detections

    shape = (image.pixels.shape[0], image.pixels.shape[1])
    names = image_names(path)
    stem = Path(image.name).stem
    wanted = [n for n in names if Path(n.replace("\\", "/")).stem == stem]
    found = read_detections(path, shape, image_name=wanted[0] if wanted else image.name)
    return replace(found, image_shape=shape, pixel_size=image.pixel_size)


def _decomposed(image: ImageFile) -> Any:
    from napari_beerlanet.core.decompose import decompose

    say("taking the stains apart ...")
    return decompose(image.pixels, iterations="converge", report=lambda _: stop_if_asked())


def _facts(options: argparse.Namespace) -> dict[str, object]:
    told: dict[str, object] = {"Image file": options.image.name}
    if options.annotations:
        told["Annotations"] = options.annotations.name
    if options.detections:
        told["Detections"] = options.detections.name
    return told


def _digest(path: Path) -> str:
    if not path.is_file():
        raise UsageError(f"{path}: there is no such file.")
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
