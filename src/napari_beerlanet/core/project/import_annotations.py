"""Import annotations of other programs into a project, or onto one image."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from napari_beerlanet.core.boxes.annotations import CONFIRMED, Annotations
from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import CLASSES_FILE, UNCLASSIFIED, read_detections
from napari_beerlanet.core.formats.discover import AnnotatedImageFile, discover_annotations
from napari_beerlanet.core.images.files import ImageFile, read_image
from napari_beerlanet.core.images.rgb import PADDING_GREY, ImageError
from napari_beerlanet.core.project.crop_files import AddedImage
from napari_beerlanet.core.project.files import ImageSource, clean_class_names
from napari_beerlanet.core.project.project import Project

Shape = tuple[int, int]
CropSize = int | Callable[[Annotations, ImageFile], int]
"""Image pixels that become the training size: a number, or a function of an image."""


@dataclass(frozen=True)
class ImportedDataset:
    """The images that were added, and sentences on what was left out."""

    added: list[AddedImage]
    notes: list[str] = field(default_factory=list)


def import_dataset(
    project: Project,
    path: str | os.PathLike[str],
    training_size: int,
    *,
    images: str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    crop_size: CropSize | None = None,
    grey: int = PADDING_GREY,
    report: Report | None = None,
) -> ImportedDataset:
    """Add annotated images of a folder, a data.yaml or a file of annotations to a project.

    Each image counts as annotated all over. Classes that the project lacks are added; `rename`
    gives them other names. An image that cannot be used is skipped with a note; what has been
    added stays where the import is cancelled.
    """
    pairs = discover_annotations(path, project.classes, images)
    added, notes = [], list(pairs.notes)
    for number, pair in enumerate(pairs.images):
        report_progress(report, number, len(pairs.images), pair.image.name)
        try:
            image, more = _import_image(project, pair, training_size, rename or {}, crop_size, grey)
        except (FileError, ImageError) as error:
            if not project.data.exists():  # the project is at fault, and so it will be for others
                raise
            notes.append(str(error))
        else:
            added.append(image)
            notes += more
    report_progress(report, 1, 1, "done")
    if not added:
        raise FileError(" ".join([f"{path}: nothing could be imported.", *notes[:3]]))
    return ImportedDataset(added, list(dict.fromkeys([*notes, *project.split_notes()])))


def import_for_image(
    path: str | os.PathLike[str],
    shape: Shape,
    names: Sequence[str],
    image_name: str = "",
    rename: Mapping[str, str] | None = None,
) -> tuple[Annotations, list[str]]:
    """Annotations of one image of `shape` from a file, with classes `names` and what is new.

    Of a GeoJSON or COCO file about several images, those of `image_name`.
    """
    yolo = Path(path).suffix.lower() == ".txt"
    classes = list(names) if yolo and not Path(path).with_name(CLASSES_FILE).is_file() else None
    detections = read_detections(path, shape, classes, image_name)
    return to_annotations(detections, shape, names, rename or {}, str(path))


def to_annotations(
    detections: Detections,
    shape: Shape,
    names: Sequence[str],
    rename: Mapping[str, str],
    where: str,
) -> tuple[Annotations, list[str]]:
    """Boxes of a file as annotations of all of an image; classes go by name, in any case."""
    notes = []
    by_folded = {name.casefold(): name for name in names}
    renamed = [rename.get(name, name) for name in detections.names]
    renamed = [by_folded.get(name.casefold(), name) for name in renamed]
    unclassified = np.array([name == UNCLASSIFIED for name in renamed], bool)[detections.labels]
    if unclassified.any() and UNCLASSIFIED not in names:
        count = count_of(int(unclassified.sum()), "object")
        notes.append(f"{where}: {count} without a class left out.")
        detections = detections[~unclassified]
    used = [renamed[k] for k in detections.labels]
    known = set(names)
    classes = clean_class_names([*names, *(n for n in dict.fromkeys(used) if n not in known)])
    places = {name: k for k, name in enumerate(classes)}
    empty = Annotations.empty(classes, shape)
    annotations = replace(
        empty,
        xyxy=detections.xyxy.astype(np.float64),
        labels=np.array([places[" ".join(name.split())] for name in used], np.int64),
        ids=np.arange(len(used)),
        status=[CONFIRMED] * len(used),
        types=[str(name) for name in detections.columns.get(TYPE_COLUMN, ())],
        regions=(Region.whole_image(shape),),
    )
    return annotations, notes


def _import_image(
    project: Project,
    pair: AnnotatedImageFile,
    training_size: int,
    rename: Mapping[str, str],
    crop_size: CropSize | None,
    grey: int,
) -> tuple[AddedImage, list[str]]:
    image = read_image(pair.image)
    shape = (image.pixels.shape[0], image.pixels.shape[1])
    annotations, notes = to_annotations(
        pair.read(shape), shape, project.classes, rename, str(pair.image)
    )
    project.add_classes(annotations.names)
    source = ImageSource.from_image(image.pixels, image.name, pair.image, image.pixel_size)
    size = crop_size(annotations, image) if callable(crop_size) else crop_size
    added = project.add_image(
        source, image.pixels, annotations, training_size, crop_size=size, grey=grey
    )
    left_out = [f"{pair.image}: {note}" for note in added.notes if "left out" in note]
    return added, [*notes, *left_out]
