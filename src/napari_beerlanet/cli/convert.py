"""The command `convert`: boxes from one file format to another."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from napari_beerlanet.cli.common import (
    UsageError,
    echo,
    prepare_folder,
    print_message,
    raise_if_interrupted,
)
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
    _write_files(options, path.absolute().parent, [(path.name, name, boxes)], 1)
    echo(f"{path}: {count_of(len(boxes), 'box', 'boxes')}.")
    return 0


def _convert_all(options: argparse.Namespace, names: list[str], folder: bool) -> int:
    if not folder:
        raise UsageError(
            f"{options.input}: about {len(names)} images; name a folder to write to, "
            "or one of them with --image."
        )
    files = {name: _file_name(name, options) for name in names}
    twice = [file for file, count in Counter(files.values()).items() if count > 1]
    if twice or len(files) < len(names):
        what = twice[0] if twice else "the same file"
        raise UsageError(f"{options.input}: two of its images would both become {what}.")
    read = ((files[name], name, boxes) for name, boxes in _read_all(options, names))
    total = _write_files(options, options.output, read, len(names))
    echo(f"{options.output}: {count_of(total, 'box', 'boxes')} of {len(names)} images.")
    return 0


def _read_all(options: argparse.Namespace, names: list[str]) -> Iterator[tuple[str, Detections]]:
    """The boxes of each image."""
    from napari_beerlanet.core.formats import detect_format, read_coco_images, read_csv_images

    readers = {"coco": read_coco_images, "csv": read_csv_images}
    kind = options.source or detect_format(options.input)
    if kind in readers:
        yield from readers[kind](options.input)
    else:
        yield from ((name, _read(options, name)) for name in names)


def _write_files(
    options: argparse.Namespace,
    folder: Path,
    images: Iterable[tuple[str, str, Detections]],
    count: int,
) -> int:
    """Write all files or none: (file, image, boxes) of each image. The number of boxes."""
    from tqdm import tqdm

    from napari_beerlanet.core.common.storage import staged_folder
    from napari_beerlanet.core.formats import ClassesFile, write_detections, write_yolo
    from napari_beerlanet.core.formats.common import NOTES

    if folder.exists():
        prepare_folder(folder)
    classes = ClassesFile(folder)
    total, notes = 0, dict[str, None]()
    bar = tqdm(images, total=count, unit="image", leave=False, disable=None if count > 1 else True)
    with staged_folder(folder) as stage, bar:
        for file, name, boxes in bar:
            raise_if_interrupted()
            total += len(boxes)
            notes |= dict.fromkeys(boxes.report.get(NOTES, ()))
            path = stage / file
            if (options.target or path.suffix.lower()) not in ("yolo", ".txt"):
                write_detections(path, boxes, name, format=options.target)
            elif boxes.image_shape is None:
                raise UsageError(
                    f"{folder / file}: YOLO needs the image's size; name it with --image."
                )
            else:
                write_yolo(path, boxes, classes=classes)
        if classes.names:
            classes.write(stage)
    for note in notes:
        print_message(note)
    return total


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
