"""Discover annotated images from other programs: which image belongs to which annotation file.

A data.yaml with its folders, a COCO file of many images, or a folder in which images and YOLO,
Pascal VOC, COCO or GeoJSON files, or our own tables, are matched by name, wherever each lies.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

import numpy as np

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import cxcywh_to_xyxy
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import (
    CLASSES_FILE,
    image_names,
    load_json,
    read_coco_images,
    read_detections,
)
from napari_beerlanet.core.formats.common import ImageShape
from napari_beerlanet.core.formats.dataset import LabelledImage, label_path, read_dataset
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES

_ANNOTATION_SUFFIXES = (".xml", ".geojson", ".json", ".txt", ".csv")  # the first there is taken
_OUR_TABLES = (".detections.csv", ".types.csv")  # others may be tables of anything
_MAX_LISTED_NAMES = 3
_IMAGE_FOLDERS = ("images", "image", "img", "imgs", "jpegimages")
"""Folders of images beside a folder of COCO's annotations."""


@dataclass(frozen=True)
class AnnotatedImageFile:
    """An image file, and what reads its boxes, given its shape (H, W)."""

    image: Path
    read: Callable[[ImageShape], Detections]


@dataclass(frozen=True)
class DiscoveredAnnotations:
    """Annotated images, sorted by path, and sentences on what was not found."""

    images: list[AnnotatedImageFile]
    notes: list[str] = field(default_factory=list)


def discover_annotations(
    path: str | os.PathLike[str], names: Sequence[str], images: str | os.PathLike[str] | None = None
) -> DiscoveredAnnotations:
    """Annotated images in a folder, a data.yaml, or a file of annotations.

    `images` is the image or the folder of images that a file of annotations is about; without it
    they are looked for near it. `names` are the classes of YOLO files that come without.
    """
    place = Path(path)
    if not place.exists():
        raise FileError(f"{place}: there is no such file or folder.")
    if place.suffix.lower() in (".yaml", ".yml") or (place / "data.yaml").is_file():
        return _discover_dataset(place)
    if place.is_dir():
        return _discover_folder(place, names)
    around = Path(images) if images is not None else place.parent
    if place.suffix.lower() not in _ANNOTATION_SUFFIXES:
        raise FileError(f"{place}: neither a data.yaml nor a file of annotations that is known.")
    if is_coco(place):
        own = _find_images(around)
        return _discover_coco(place, own if own or images is not None else _find_coco_images(place))
    if around.is_file():
        return DiscoveredAnnotations([_annotated_image(around, place, names)])
    known = _find_images(around) if images is not None else _find_images_near(around)
    same = [image for image in known if image.stem == _image_stem(place)]
    if not same:
        raise FileError(f"{place}: no image with this name is near it; say which image it is of.")
    return DiscoveredAnnotations([_annotated_image(same[0], place, names)])


def is_coco(path: Path) -> bool:
    """Whether a file is COCO's, which may be about many images."""
    if path.suffix.lower() != ".json":
        return False
    content = load_json(path, "COCO or GeoJSON")
    return isinstance(content, dict) and "images" in content


def _discover_dataset(place: Path) -> DiscoveredAnnotations:
    dataset = read_dataset(place)
    pairs, notes = [], list(dataset.unreadable.values())
    for items in dataset.splits.values():
        for item in items:
            pairs.append(AnnotatedImageFile(item.image, _label_reader(item, dataset.names)))
            notes += item.problems
    return DiscoveredAnnotations(_first_per_image(pairs), notes)


def _discover_folder(folder: Path, names: Sequence[str]) -> DiscoveredAnnotations:
    images, files = _find_images(folder), _find_annotation_files(folder)
    coco = [file for file in files if is_coco(file)]
    pairs: list[AnnotatedImageFile] = []
    notes: list[str] = []
    for file in coco:
        discovered = _discover_coco(file, images)
        pairs += discovered.images
        notes += discovered.notes
    by_stem = defaultdict(list)
    for file in files:
        if file not in coco:
            by_stem[_image_stem(file)].append(file)
    alike = defaultdict(list)
    for image in images:
        alike[image.stem].append(image)
    known = {pair.image for pair in pairs}
    for image in images:
        mine = _annotation_file_of(image, by_stem[image.stem], lone=len(alike[image.stem]) == 1)
        if image not in known and mine is not None:
            pairs.append(_annotated_image(image, mine, names))
    known = {pair.image for pair in pairs}
    bare = [image for image in images if image not in known]
    if bare:
        notes.append(
            f"{count_of(len(bare), 'image')} without annotations left out: {_list_names(bare)}."
        )
    if not pairs:
        raise FileError(
            f"{folder}: no image with annotations (YOLO, COCO, Pascal VOC, GeoJSON) in it."
        )
    return DiscoveredAnnotations(_first_per_image(pairs), notes)


def _discover_coco(file: Path, images: Iterable[Path]) -> DiscoveredAnnotations:
    by_name = defaultdict(list)
    for image in images:
        by_name[image.name].append(image)
    pairs, lost = [], []
    for name, detections in read_coco_images(file):
        wanted = PurePosixPath(name.replace("\\", "/"))
        alike = by_name.get(wanted.name, [])
        ending = [i for i in alike if i.as_posix().endswith(f"/{wanted.as_posix()}")]
        if len(ending or alike) == 1:
            pairs.append(AnnotatedImageFile((ending or alike)[0], _constant_reader(detections)))
        else:
            lost.append(wanted)
    notes = []
    if lost:
        notes.append(
            f"{file}: {count_of(len(lost), 'image')} of it not found, or more than once: "
            f"{_list_names(lost)}."
        )
    return DiscoveredAnnotations(_first_per_image(pairs), notes)


def _annotated_image(image: Path, file: Path, names: Sequence[str]) -> AnnotatedImageFile:
    bare_yolo = file.suffix.lower() == ".txt" and not file.with_name(CLASSES_FILE).is_file()
    classes = (list(names) or None) if bare_yolo else None

    def read(shape: ImageShape) -> Detections:
        return read_detections(file, shape, classes, image.name)

    return AnnotatedImageFile(image, read)


def _label_reader(item: LabelledImage, names: list[str]) -> Callable[[ImageShape], Detections]:
    def read(shape: ImageShape) -> Detections:
        if item.problems and not len(item.labels):
            # Without any box it would count as an image of background.
            raise FileError(f"{item.problems[0]} So {item.image.name} is left out.")
        boxes = cxcywh_to_xyxy(item.cxcywh, shape).astype(np.float32)
        ones = np.ones(len(boxes), np.float32)
        return Detections(boxes, item.labels, ones, names, image_shape=shape)

    return read


def _constant_reader(detections: Detections) -> Callable[[ImageShape], Detections]:
    return lambda shape: detections


def _annotation_file_of(image: Path, files: list[Path], lone: bool) -> Path | None:
    """The annotations of an image: beside it, where YOLO has them, or the only ones so called."""
    beside = {file for file in files if file.parent == image.parent}
    yolo = {file for file in files if file == label_path(image)}
    homes = [beside, yolo, set(files) if lone else set()]
    for home in homes:
        for kind in _ANNOTATION_SUFFIXES:
            mine = sorted(file for file in home if file.suffix.lower() == kind)
            if len(mine) == 1:
                return mine[0]
    return None


def _find_images(place: Path) -> list[Path]:
    return [path for path in _find_files(place) if path.suffix.lower() in IMAGE_SUFFIXES]


def _find_images_near(folder: Path) -> list[Path]:
    """Images beside a file of annotations, and where YOLO's layout has them: labels/x, images/x."""
    homes = (folder, folder.parent / "images", folder.parent.parent / "images" / folder.name)
    return [
        path
        for home in homes
        if home.is_dir()
        for path in sorted(home.iterdir())
        if path.is_file() and path.suffix.lower() in IMAGE_SUFFIXES
    ]


def _find_coco_images(file: Path) -> list[Path]:
    """Images where COCO's layout has them: annotations/instances_val.json, images/ or val/.

    Or in a folder that the file names; others beside are none of its business.
    """
    above = file.absolute().parent.parent
    named = {part for name in image_names(file, "coco") for part in _parent_folders(name)}
    homes = [
        home
        for home in sorted(above.iterdir())
        if home.is_dir()
        and (home.name.lower() in _IMAGE_FOLDERS or home.name in _stem_words(file.stem) | named)
    ]
    direct = [path for path in sorted(above.iterdir()) if path.is_file()]
    return [p for p in direct if p.suffix.lower() in IMAGE_SUFFIXES] + [
        path for home in homes for path in _find_images(home)
    ]


def _parent_folders(name: str) -> tuple[str, ...]:
    """The folders in an image's name."""
    return PurePosixPath(name.replace("\\", "/")).parts[:-1]


def _stem_words(stem: str) -> set[str]:
    """The parts of a name such as instances_train2017."""
    return {stem, *stem.replace("-", "_").split("_")}


def _find_annotation_files(place: Path) -> list[Path]:
    return [
        p
        for p in _find_files(place)
        if p.suffix.lower() in _ANNOTATION_SUFFIXES
        and p.name != CLASSES_FILE
        and (p.suffix.lower() != ".csv" or p.name.endswith(_OUR_TABLES))
    ]


def _find_files(place: Path) -> list[Path]:
    """Files in a folder and those in it, without hidden ones, sorted."""
    if place.is_file():
        return [place]
    depth = len(place.parts)
    return sorted(
        path
        for path in place.rglob("*")
        if path.is_file() and not any(part.startswith(".") for part in path.parts[depth:])
    )


def _image_stem(file: Path) -> str:
    """The image's name of a file of annotations; ours end in .detections.geojson, .types.csv."""
    return file.stem.removesuffix(".detections").removesuffix(".types")


def _first_per_image(pairs: Iterable[AnnotatedImageFile]) -> list[AnnotatedImageFile]:
    first: dict[Path, AnnotatedImageFile] = {}
    for pair in pairs:
        first.setdefault(pair.image, pair)
    return [first[image] for image in sorted(first)]


def _list_names(paths: Sequence[Path | PurePosixPath]) -> str:
    more = ", …" if len(paths) > _MAX_LISTED_NAMES else ""
    return ", ".join(path.name for path in paths[:_MAX_LISTED_NAMES]) + more
