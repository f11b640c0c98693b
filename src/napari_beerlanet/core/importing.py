"""Annotations of other programs into a project, or onto one image."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from .annotations import CONFIRMED, Annotations
from .boxes import Detections
from .cropsize import GREY
from .files import FileError, ImageFile, read_image
from .foreign import Pair, find_pairs
from .formats import CLASSES, UNCLASSIFIED, read_detections
from .images import ImageError
from .progress import Report, tell
from .project import Added, Project
from .projectfiles import checked_names
from .regions import Region
from .sources import Source
from .split import count_of

Shape = tuple[int, int]
Side = int | Callable[[Annotations, ImageFile], int]
"""Image pixels that become the training size: a number, or what finds it for an image."""


@dataclass(frozen=True)
class Imported:
    """What each image added came to, and sentences on what was left out."""

    added: list[Added]
    notes: list[str] = field(default_factory=list)


def import_into(
    project: Project,
    path: str | os.PathLike[str],
    training_size: int,
    *,
    images: str | os.PathLike[str] | None = None,
    rename: Mapping[str, str] | None = None,
    side: Side | None = None,
    grey: int = GREY,
    report: Report | None = None,
) -> Imported:
    """Add annotated images of a folder, a data.yaml or a file of annotations to a project.

    Each image counts as annotated all over. Classes that the project lacks are added; `rename`
    gives them other names. An image that cannot be used is told and passed over; what has been
    added stays where the import is cancelled.
    """
    pairs = find_pairs(path, project.classes, images)
    added, notes = [], list(pairs.notes)
    for number, pair in enumerate(pairs.found):
        tell(report, number, len(pairs.found), pair.image.name)
        try:
            done, told = _import_one(project, pair, training_size, rename or {}, side, grey)
        except (FileError, ImageError) as error:
            if not project.data.exists():  # the project is at fault, and so it will be for others
                raise
            notes.append(str(error))
        else:
            added.append(done)
            notes += told
    tell(report, 1, 1, "done")
    if not added:
        raise FileError(" ".join([f"{path}: nothing could be imported.", *notes[:3]]))
    return Imported(added, list(dict.fromkeys([*notes, *project.split_notes()])))


def read_onto(
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
    classes = list(names) if yolo and not Path(path).with_name(CLASSES).is_file() else None
    found = read_detections(path, shape, classes, image_name)
    return as_annotations(found, shape, names, rename or {}, str(path))


def as_annotations(
    found: Detections,
    shape: Shape,
    names: Sequence[str],
    rename: Mapping[str, str],
    where: str,
) -> tuple[Annotations, list[str]]:
    """Boxes of a file as annotations of all of an image; classes go by name, in any case."""
    notes = []
    known = {name.casefold(): name for name in names}
    called = [rename.get(name, name) for name in found.names]
    called = [known.get(name.casefold(), name) for name in called]
    nameless = np.array([name == UNCLASSIFIED for name in called], bool)[found.labels]
    if nameless.any() and UNCLASSIFIED not in names:
        count = count_of(int(nameless.sum()), "object")
        notes.append(f"{where}: {count} without a class left out.")
        found = found[~nameless]
    used = [called[k] for k in found.labels]
    classes = checked_names([*names, *(n for n in dict.fromkeys(used) if n not in names)])
    empty = Annotations.empty(classes, shape)
    annotations = replace(
        empty,
        xyxy=found.xyxy.astype(np.float64),
        labels=np.array([classes.index(" ".join(name.split())) for name in used], np.int64),
        ids=np.arange(len(used)),
        status=[CONFIRMED] * len(used),
        regions=(Region.whole(shape),),
    )
    return annotations, notes


def _import_one(
    project: Project,
    pair: Pair,
    training_size: int,
    rename: Mapping[str, str],
    side: Side | None,
    grey: int,
) -> tuple[Added, list[str]]:
    image = read_image(pair.image)
    shape = (image.pixels.shape[0], image.pixels.shape[1])
    found = pair.read(shape)
    annotations, notes = as_annotations(found, shape, project.classes, rename, str(pair.image))
    project.add_classes(annotations.names)
    source = Source.of(image.pixels, image.name, pair.image, image.pixel_size)
    length = side(annotations, image) if callable(side) else side
    added = project.add_image(
        source, image.pixels, annotations, training_size, side=length, grey=grey
    )
    odd = [f"{pair.image}: {note}" for note in added.notes if "left out" in note]
    return added, [*notes, *odd]
