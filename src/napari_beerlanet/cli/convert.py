"""The command `convert`: boxes from one file format to another."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from napari_beerlanet.cli.common import UsageError, prepare_folder
from napari_beerlanet.core.common.messages import count_of

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes.detections import Detections

BOX_FORMATS = ("csv", "geojson", "yolo", "coco", "voc")


HELP = "convert boxes from one file format to another"
DESCRIPTION = (
    "Read boxes from CSV, GeoJSON (QuPath), COCO JSON, Pascal VOC XML or YOLO text and write them "
    "in another of these formats, with classes, confidences and all further columns that it can "
    "hold. A file about several images becomes a folder of files."
)


def add_options(command: argparse.ArgumentParser) -> None:
    """Add the command's options."""
    add = command.add_argument
    add("input", type=Path, metavar="IN", help="a file of boxes")
    add("output", type=Path, metavar="OUT", help="the file to write; with --to also a folder")
    add("--image", type=Path, metavar="IMAGE", help="the image of the boxes: YOLO needs its size")
    add("--from", dest="source", choices=BOX_FORMATS, help="format of IN (default: by its name)")
    add("--to", dest="target", choices=BOX_FORMATS, help="format of OUT (default: by its name)")
    add("--classes", nargs="+", metavar="NAME", help="names of YOLO's classes 0, 1, 2 …")


def run(options: argparse.Namespace) -> int:
    """Read, write, and print how many boxes there were."""
    from napari_beerlanet.core.formats import image_names

    folder = options.output.is_dir() or not options.output.suffix
    if folder and not options.target:
        raise UsageError("a folder is no format; say which with --to, for instance --to voc.")
    names = image_names(options.input, options.source)
    if len(names) > 1 and not options.image:
        return _convert_all(options, names, folder)
    name = _image_name(options, names)
    boxes = _read(options, name)
    path = options.output
    if folder:
        path = path / _file_name(name or options.input.name, options)
    _write(options, path, boxes, name)
    print(f"{path}: {count_of(len(boxes), 'box', 'boxes')}.", flush=True)
    return 0


def _convert_all(options: argparse.Namespace, names: list[str], folder: bool) -> int:
    if not folder:
        raise UsageError(
            f"{options.input}: about {len(names)} images; name a folder to write to, "
            "or one of them with --image."
        )
    files = [_file_name(name, options) for name in names]
    twice = next((file for file in files if files.count(file) > 1), None)
    if twice is not None:
        raise UsageError(f"{options.input}: two of its images would both become {twice}.")
    total = 0
    for (name, boxes), file in zip(_read_all(options, names), files, strict=True):
        _write(options, options.output / file, boxes, name)
        total += len(boxes)
    print(
        f"{options.output}: {count_of(total, 'box', 'boxes')} of {len(names)} images.", flush=True
    )
    return 0


def _read_all(options: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, Detections]]:
    """The boxes of each image."""
    from napari_beerlanet.core.formats import detect_format, read_coco_images

    if (options.source or detect_format(options.input)) == "coco":
        yield from read_coco_images(options.input).items()
    else:
        yield from ((name, _read(options, name)) for name in names)


def _image_name(options: argparse.Namespace, names: list[str]) -> str:
    """Which of the file's images is meant."""
    if not options.image:
        return names[0] if names else ""
    stem = options.image.stem
    return next((n for n in names if Path(n.replace("\\", "/")).stem == stem), options.image.name)


def _file_name(name: str, options: argparse.Namespace) -> str:
    """A file's name for an image's: never a path, whatever the file says."""
    from napari_beerlanet.core.formats import FORMATS

    last = PurePosixPath(name.replace("\\", "/").replace("\0", "")).name
    stem = PurePosixPath(last).stem.strip(". ") or "image"
    return f"{stem}{FORMATS[options.target].suffix}"


def _read(options: argparse.Namespace, name: str) -> Detections:
    from napari_beerlanet.core.formats import detect_format, read_detections
    from napari_beerlanet.core.images.files import read_image

    shape, size = None, None
    if options.image:
        image = read_image(options.image)
        shape, size = (image.pixels.shape[0], image.pixels.shape[1]), image.pixel_size
    kind = options.source or detect_format(options.input)
    if kind == "yolo" and shape is None:
        raise UsageError(f"{options.input}: YOLO needs the image's size; name it with --image.")
    classes = options.classes if kind == "yolo" else None
    boxes = read_detections(options.input, shape, classes, name, kind)
    return replace(boxes, image_shape=shape or boxes.image_shape, pixel_size=size)


def _write(options: argparse.Namespace, path: Path, boxes: Detections, name: str) -> None:
    from napari_beerlanet.core.formats import write_detections, write_yolo_with_classes

    prepare_folder(path.absolute().parent)
    if (options.target or path.suffix.lower()) in ("yolo", ".txt"):
        if boxes.image_shape is None:
            raise UsageError(f"{path}: YOLO needs the image's size; name it with --image.")
        write_yolo_with_classes(path, boxes)
    else:
        write_detections(path, boxes, name, format=options.target)
