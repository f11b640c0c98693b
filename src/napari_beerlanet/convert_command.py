"""The command `convert`: boxes from one format to another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from napari_beerlanet.commands import UsageError, made
from napari_beerlanet.detect_command import Finish

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes import Detections

KINDS = ("csv", "geojson", "yolo", "coco", "voc")


def add_parser(verbs: Any, finish: Finish) -> None:
    """Add the command to a parser's verbs."""
    command = verbs.add_parser(
        "convert",
        help="boxes from one file format to another",
        description="Read boxes from CSV, GeoJSON (QuPath), COCO JSON, Pascal VOC XML or YOLO text "
        "and write them in another of these formats, with classes, confidences and all further "
        "columns that it can hold. A file about several images becomes a folder of files.",
    )
    add = command.add_argument
    add("input", type=Path, metavar="IN", help="a file of boxes")
    add("output", type=Path, metavar="OUT", help="the file to write; with --to also a folder")
    add("--image", type=Path, metavar="IMAGE", help="the image of the boxes: YOLO needs its size")
    add("--from", dest="source", choices=KINDS, help="format of IN (default: by its name)")
    add("--to", dest="target", choices=KINDS, help="format of OUT (default: by its name)")
    add("--classes", nargs="+", metavar="NAME", help="names of YOLO's classes 0, 1, 2 …")
    finish(command, convert)


def convert(options: argparse.Namespace) -> int:
    """Read, write, and say how many boxes there were."""
    from napari_beerlanet.core.formats import image_names

    folder = options.output.is_dir() or not options.output.suffix
    if folder and not options.target:
        raise UsageError("a folder is no format; say which with --to, for instance --to voc.")
    names = image_names(options.input, options.source)
    if len(names) > 1 and not options.image:
        return _convert_all(options, names, folder)
    name = _wanted(options, names)
    found = _read(options, name)
    path = options.output
    if folder:
        path = path / _named(name or options.input.name, options)
    _write(options, path, found, name)
    print(f"{path}: {_boxes(len(found))}.", flush=True)
    return 0


def _convert_all(options: argparse.Namespace, names: list[str], folder: bool) -> int:
    if not folder:
        raise UsageError(
            f"{options.input}: about {len(names)} images; name a folder to write to, "
            "or one of them with --image."
        )
    files = [_named(name, options) for name in names]
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise UsageError(f"{options.input}: two of its images would both become {twice}.")
    total = 0
    for (name, found), file in zip(_read_all(options, names), files, strict=True):
        _write(options, options.output / file, found, name)
        total += len(found)
    print(f"{options.output}: {_boxes(total)} of {len(names)} images.", flush=True)
    return 0


def _read_all(options: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, Detections]]:
    """The boxes of each image."""
    from napari_beerlanet.core.formats import format_of, read_coco_images

    if (options.source or format_of(options.input)) == "coco":
        yield from read_coco_images(options.input).items()
    else:
        yield from ((name, _read(options, name)) for name in names)


def _wanted(options: argparse.Namespace, names: list[str]) -> str:
    """Which of the file's images is meant."""
    if not options.image:
        return names[0] if names else ""
    stem = options.image.stem
    return next((n for n in names if Path(n.replace("\\", "/")).stem == stem), options.image.name)


def _named(name: str, options: argparse.Namespace) -> str:
    """A file's name for an image's: never a path, whatever the file says."""
    from napari_beerlanet.core.formats import FORMATS

    last = PurePosixPath(name.replace("\\", "/").replace("\0", "")).name
    stem = PurePosixPath(last).stem.strip(". ") or "image"
    return f"{stem}{FORMATS[options.target].suffix}"


def _read(options: argparse.Namespace, name: str) -> Detections:
    from napari_beerlanet.core.files import read_image
    from napari_beerlanet.core.formats import format_of, read_detections

    shape, size = None, None
    if options.image:
        image = read_image(options.image)
        shape, size = (image.pixels.shape[0], image.pixels.shape[1]), image.pixel_size
    kind = options.source or format_of(options.input)
    if kind == "yolo" and shape is None:
        raise UsageError(f"{options.input}: YOLO needs the image's size; name it with --image.")
    classes = options.classes if kind == "yolo" else None
    found = read_detections(options.input, shape, classes, name, kind)
    return replace(found, image_shape=shape or found.image_shape, pixel_size=size)


def _write(options: argparse.Namespace, path: Path, found: Detections, name: str) -> None:
    from napari_beerlanet.core.formats import write_detections, write_yolo_beside_classes

    made(path.absolute().parent)
    if (options.target or path.suffix.lower()) in ("yolo", ".txt"):
        if found.image_shape is None:
            raise UsageError(f"{path}: YOLO needs the image's size; name it with --image.")
        write_yolo_beside_classes(path, found)
    else:
        write_detections(path, found, name, format=options.target)


def _boxes(count: int) -> str:
    return "1 box" if count == 1 else f"{count:,} boxes"
