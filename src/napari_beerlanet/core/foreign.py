"""Annotated images that other programs have left: which image belongs to which annotations.

A data.yaml with its folders, a COCO file about many images, or a folder in which images and YOLO,
Pascal VOC, COCO or GeoJSON files belong together by their names, wherever each of them lies.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from .boxes import Detections, from_centres
from .dataset import read_dataset
from .files import SUFFIXES, FileError
from .formats import CLASSES, image_names, load_json, read_coco_images, read_detections
from .labels import Item, label_file
from .split import count_of

Shape = tuple[int, int]
_KINDS = (".xml", ".geojson", ".json", ".txt")  # the first that is there is taken
_LISTED = 3
_HOMES = ("images", "image", "img", "imgs", "jpegimages")
"""Folders of images beside a folder of COCO's annotations."""


@dataclass(frozen=True)
class Pair:
    """An image file, and what reads its boxes, given its shape (H, W)."""

    image: Path
    read: Callable[[Shape], Detections]


@dataclass(frozen=True)
class Pairs:
    """What was found, sorted by path, and sentences on what was not."""

    found: list[Pair]
    notes: list[str] = field(default_factory=list)


def find_pairs(
    path: str | os.PathLike[str], names: Sequence[str], images: str | os.PathLike[str] | None = None
) -> Pairs:
    """Annotated images in a folder, a data.yaml, or a file of annotations.

    `images` is the image or the folder of images that a file of annotations is about; without it
    they are looked for near it. `names` are the classes of YOLO files that come without.
    """
    place = Path(path)
    if not place.exists():
        raise FileError(f"{place}: there is no such file or folder.")
    if place.suffix.lower() in (".yaml", ".yml") or (place / "data.yaml").is_file():
        return _of_dataset(place)
    if place.is_dir():
        return _of_folder(place, names)
    around = Path(images) if images is not None else place.parent
    if place.suffix.lower() not in _KINDS:
        raise FileError(f"{place}: neither a data.yaml nor a file of annotations that is known.")
    if is_coco(place):
        own = _images_in(around)
        return _of_coco(place, own if own or images is not None else _images_of_coco(place))
    if around.is_file():
        return Pairs([_pair(around, place, names)])
    known = _images_in(around) if images is not None else _images_near(around)
    same = [image for image in known if image.stem == _stem(place)]
    if not same:
        raise FileError(f"{place}: no image with this name is near it; say which image it is of.")
    return Pairs([_pair(same[0], place, names)])


def is_coco(path: Path) -> bool:
    """Whether a file is COCO's, which may be about many images."""
    if path.suffix.lower() != ".json":
        return False
    content = load_json(path, "COCO or GeoJSON")
    return isinstance(content, dict) and "images" in content


def _of_dataset(place: Path) -> Pairs:
    dataset = read_dataset(place)
    pairs, notes = [], list(dataset.missing.values())
    for items in dataset.splits.values():
        for item in items:
            pairs.append(Pair(item.image, _item_reader(item, dataset.names)))
            notes += item.problems
    return Pairs(_once(pairs), notes)


def _of_folder(folder: Path, names: Sequence[str]) -> Pairs:
    images, files = _images_in(folder), _files_in(folder)
    coco = [file for file in files if is_coco(file)]
    pairs: list[Pair] = []
    notes: list[str] = []
    for file in coco:
        found = _of_coco(file, images)
        pairs += found.found
        notes += found.notes
    by_stem = defaultdict(list)
    for file in files:
        if file not in coco:
            by_stem[_stem(file)].append(file)
    alike = defaultdict(list)
    for image in images:
        alike[image.stem].append(image)
    known = {pair.image for pair in pairs}
    for image in images:
        mine = _closest(image, by_stem[image.stem], lone=len(alike[image.stem]) == 1)
        if image not in known and mine is not None:
            pairs.append(_pair(image, mine, names))
    known = {pair.image for pair in pairs}
    bare = [image for image in images if image not in known]
    if bare:
        notes.append(
            f"{count_of(len(bare), 'image')} without annotations left out: {_listed(bare)}."
        )
    if not pairs:
        raise FileError(
            f"{folder}: no image with annotations (YOLO, COCO, Pascal VOC, GeoJSON) in it."
        )
    return Pairs(_once(pairs), notes)


def _of_coco(file: Path, images: Iterable[Path]) -> Pairs:
    by_name = defaultdict(list)
    for image in images:
        by_name[image.name].append(image)
    pairs, lost = [], []
    for name, found in read_coco_images(file).items():
        wanted = PurePosixPath(name.replace("\\", "/"))
        alike = by_name.get(wanted.name, [])
        ending = [i for i in alike if i.as_posix().endswith(f"/{wanted.as_posix()}")]
        if len(ending or alike) == 1:
            pairs.append(Pair((ending or alike)[0], _fixed(found)))
        else:
            lost.append(wanted)
    notes = []
    if lost:
        notes.append(
            f"{file}: {count_of(len(lost), 'image')} of it not found, or more than once: "
            f"{_listed(lost)}."
        )
    return Pairs(_once(pairs), notes)


def _pair(image: Path, file: Path, names: Sequence[str]) -> Pair:
    bare_yolo = file.suffix.lower() == ".txt" and not file.with_name(CLASSES).is_file()
    classes = (list(names) or None) if bare_yolo else None

    def read(shape: Shape) -> Detections:
        return read_detections(file, shape, classes, image.name)

    return Pair(image, read)


def _item_reader(item: Item, names: list[str]) -> Callable[[Shape], Detections]:
    def read(shape: Shape) -> Detections:
        boxes = from_centres(item.cxcywh, shape).astype(np.float32)
        ones = np.ones(len(boxes), np.float32)
        return Detections(boxes, item.labels, ones, names, image_shape=shape)

    return read


def _fixed(found: Detections) -> Callable[[Shape], Detections]:
    return lambda shape: found


def _closest(image: Path, files: list[Path], lone: bool) -> Path | None:
    """The annotations of an image: beside it, where YOLO has them, or the only ones so called."""
    beside = {file for file in files if file.parent == image.parent}
    yolo = {file for file in files if file == label_file(image)}
    homes = [beside, yolo, set(files) if lone else set()]
    for home in homes:
        for kind in _KINDS:
            mine = sorted(file for file in home if file.suffix.lower() == kind)
            if len(mine) == 1:
                return mine[0]
    return None


def _images_in(place: Path) -> list[Path]:
    return [path for path in _all_in(place) if path.suffix.lower() in SUFFIXES]


def _images_near(folder: Path) -> list[Path]:
    """Images beside a file of annotations, and where YOLO's layout has them: labels/x, images/x."""
    homes = (folder, folder.parent / "images", folder.parent.parent / "images" / folder.name)
    return [
        path
        for home in homes
        if home.is_dir()
        for path in sorted(home.iterdir())
        if path.is_file() and path.suffix.lower() in SUFFIXES
    ]


def _images_of_coco(file: Path) -> list[Path]:
    """Images where COCO's layout has them: annotations/instances_val.json, images/ or val/.

    Or in a folder that the file names; others beside are none of its business.
    """
    above = file.absolute().parent.parent
    named = {part for name in image_names(file, "coco") for part in _parts(name)}
    homes = [
        home
        for home in sorted(above.iterdir())
        if home.is_dir() and (home.name.lower() in _HOMES or home.name in _words(file.stem) | named)
    ]
    direct = [path for path in sorted(above.iterdir()) if path.is_file()]
    return [p for p in direct if p.suffix.lower() in SUFFIXES] + [
        path for home in homes for path in _images_in(home)
    ]


def _parts(name: str) -> tuple[str, ...]:
    """The folders in an image's name."""
    return PurePosixPath(name.replace("\\", "/")).parts[:-1]


def _words(stem: str) -> set[str]:
    """The parts of a name such as instances_train2017."""
    return {stem, *stem.replace("-", "_").split("_")}


def _files_in(place: Path) -> list[Path]:
    return [p for p in _all_in(place) if p.suffix.lower() in _KINDS and p.name != CLASSES]


def _all_in(place: Path) -> list[Path]:
    """Files in a folder and those in it, without hidden ones, sorted."""
    if place.is_file():
        return [place]
    depth = len(place.parts)
    return sorted(
        path
        for path in place.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts[depth:])
    )


def _stem(file: Path) -> str:
    """The image's name of a file of annotations; ours end in .detections.geojson."""
    return file.stem.removesuffix(".detections")


def _once(pairs: Iterable[Pair]) -> list[Pair]:
    first: dict[Path, Pair] = {}
    for pair in pairs:
        first.setdefault(pair.image, pair)
    return [first[image] for image in sorted(first)]


def _listed(paths: Sequence[Path | PurePosixPath]) -> str:
    more = ", …" if len(paths) > _LISTED else ""
    return ", ".join(path.name for path in paths[:_LISTED]) + more
