"""Datasets of crops with one label each: a folder per class, or the boxes of images.

    smears/neutrophil/a.png            a folder per class
    smears/train/neutrophil/a.png      the layout of Ultralytics' classification: train, val, test
    smears/data.yaml                   crops of the boxes of images, see `dataset`
    project/cells.csv                  a project's cells that have a type: image, box, type, split
    smears/a.png, a.geojson            images with files of annotations, see `discover`

Nothing is ever fetched or written.
"""

from __future__ import annotations

import csv
import hashlib
import math
import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import TYPE_COLUMN
from napari_beerlanet.core.boxes.geometry import area, clip, cxcywh_to_xyxy, xyxy_to_cxcywh
from napari_beerlanet.core.common.messages import count_of, name_list
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.common.storage import (
    DataError,
    FileError,
    csv_text,
    regular_file,
    seeded_fraction,
)
from napari_beerlanet.core.formats.dataset import (
    SPLITS,
    Dataset,
    ImageInspection,
    LabelledImage,
    describe_problems,
    inspect_images,
    list_images,
    read_dataset,
)
from napari_beerlanet.core.images.files import read_image

_SPLIT_FOLDERS = {"train": "train", "val": "val", "valid": "val", "validation": "val"}
_SPLIT_FOLDERS |= {"test": "test"}
_IMAGE_FOLDERS = {"images", "labels", "annotations"}  # names of no class
_ANNOTATION_ENDINGS = (".xml", ".json", ".geojson", ".detections.csv", ".types.csv")
WHOLE = "all"
"""The split of a dataset that has none."""
CELLS_FILE, CELLS_DIR = "cells.csv", "cells"
"""A project's table of cells that have a type, and the folder of the images that they are in."""


@dataclass(frozen=True)
class LabelledCrop:
    """A crop of a class: an image file, or the box (cxcywh, relative to the image) in one.

    `source` names the image that the file was cut from, "" where it is the image itself.
    `reviewed` is false where the class is a classifier's answer that nobody has looked at.
    """

    image: Path
    label: int
    cxcywh: tuple[float, float, float, float] | None = None
    source: str = ""
    reviewed: bool = True

    def box(self, shape: tuple[int, int]) -> npt.NDArray[np.float64] | None:
        """The box (4,) xyxy in pixels of an image of `shape` (H, W); None for the whole image."""
        return None if self.cxcywh is None else cxcywh_to_xyxy(np.array([self.cxcywh]), shape)[0]


@dataclass(frozen=True, eq=False)
class CropDataset:
    """Class names and, for each split, its crops, sorted by path.

    Without splits, `splits` has "all" alone. `notes` are sentences about what is odd;
    `inspections` are of the images that were read. `annotated`: crops are what somebody has given
    a type so far, and so there may be types without any.
    """

    path: Path
    names: list[str]
    splits: dict[str, list[LabelledCrop]]
    notes: list[str] = field(default_factory=list)
    inspections: dict[Path, ImageInspection] = field(default_factory=dict, repr=False)
    annotated: bool = False

    def sources(self, split: str) -> int:
        """How many images the crops of a split are from."""
        return len({item.source or str(item.image) for item in self.splits.get(split, ())})

    def counts(self, split: str) -> dict[str, int]:
        """Crops of each class, in the order of the names."""
        numbers = Counter(item.label for item in self.splits.get(split, ()))
        return {name: numbers[k] for k, name in enumerate(self.names)}


def read_crop_dataset(path: str | os.PathLike[str]) -> CropDataset:
    """Find the crops of a folder, a data.yaml or a project; no image is read yet.

    Of a project, and of images with files of annotations, these are the cells that have a type or,
    where none has one, all boxes by their class; a project's data.yaml stands for the latter.
    """
    folder = Path(path)
    if (folder / CELLS_FILE).is_file():
        return _typed_cells(folder)
    if folder.suffix.lower() in (".yaml", ".yml") or (folder / "data.yaml").is_file():
        return _crops_of_boxes(read_dataset(folder))
    if not folder.is_dir():
        what = "not a folder" if folder.exists() else "there is no such folder"
        raise DataError(f"{folder}: {what}; give a folder per class, or a data.yaml.")
    inside = _subfolders(folder)
    if _has_annotated_images(folder, inside):
        return _annotated_cells(folder)
    by_split = {_SPLIT_FOLDERS[p.name]: p for p in inside if p.name in _SPLIT_FOLDERS}
    if by_split and len(by_split) == len(inside):
        parts = {split: _class_folders(by_split[split]) for split in SPLITS if split in by_split}
    else:
        parts = {WHOLE: inside}
    names = sorted({place.name for places in parts.values() for place in places})
    if not names:
        raise DataError(
            f"{folder}: there are no folders in it; put the crops of each class into a folder with "
            "the class's name."
        )
    splits = {
        split: [
            LabelledCrop(image, names.index(place.name))
            for place in places
            for image in sorted(list_images(place, folder))
        ]
        for split, places in parts.items()
    }
    return CropDataset(folder, names, splits)


def _subfolders(folder: Path) -> list[Path]:
    return sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))


def _class_folders(split: Path) -> list[Path]:
    places = _subfolders(split)
    if not places:
        raise DataError(f"{split}: there are no folders of classes in it.")
    return places


def _crops_of_boxes(dataset: Dataset) -> CropDataset:
    """The boxes of a YOLO dataset, with the classes that have any.

    What is wrong with its labels is a `DataError`.
    """
    for split, reason in dataset.unreadable.items():
        raise DataError(f"{dataset.path}: `{split}` cannot be used: {reason}")
    problems = [
        problem for items in dataset.splits.values() for item in items for problem in item.problems
    ]
    if problems:
        raise DataError(describe_problems(dataset.path, problems))
    used = {int(k) for items in dataset.splits.values() for item in items for k in item.labels}
    names = [name for k, name in enumerate(dataset.names) if k in used]
    places = {name: k for k, name in enumerate(names)}
    absent = [name for k, name in enumerate(dataset.names) if k not in used]
    splits = {
        split: [
            LabelledCrop(item.image, places[dataset.names[label]], (box[0], box[1], box[2], box[3]))
            for item in items
            for label, box in zip(item.labels, item.cxcywh.tolist(), strict=True)
        ]
        for split, items in dataset.splits.items()
    }
    if not names:
        raise DataError(f"{dataset.path}: there are no boxes, so there is nothing to classify.")
    notes = [f"There are no boxes of {name_list(absent)}, left out."] if absent else []
    return CropDataset(dataset.path, names, splits, notes)


def _has_annotated_images(folder: Path, inside: list[Path]) -> bool:
    """Whether images lie in a folder itself, and not in folders of classes."""
    if {p.name.lower() for p in inside} & _IMAGE_FOLDERS:
        return True
    files = [p for p in folder.iterdir() if p.is_file()]
    beside = any(p.name.lower().endswith(_ANNOTATION_ENDINGS) for p in files)
    return bool(set(files) & set(list_images(folder, folder))) and (beside or not inside)


def _annotated_cells(folder: Path) -> CropDataset:
    """The annotated boxes of images: those that have a type or, where none has one, all."""
    from napari_beerlanet.core.formats.discover import discover_annotations

    typed: list[tuple[str, LabelledCrop]] = []
    boxes: list[tuple[str, LabelledCrop]] = []
    try:
        found = discover_annotations(folder, [])
        for item in found.images:
            shape = read_image(item.image).pixels.shape[:2]
            here = item.read((shape[0], shape[1]))
            usable = here[area(clip(here.xyxy, (shape[0], shape[1]))) > 0]
            types = usable.columns.get(TYPE_COLUMN, np.full(len(usable), "", object))
            relative = xyxy_to_cxcywh(usable.xyxy.astype(np.float64), (shape[0], shape[1]))
            for label, name, (x, y, w, h) in zip(usable.labels, types, relative, strict=True):
                crop = LabelledCrop(item.image, 0, (float(x), float(y), float(w), float(h)))
                boxes.append((usable.names[label], crop))
                typed += [(str(name), crop)] if name else []
    except FileError as error:
        raise DataError(
            f"{str(error).rstrip('.')}; put crops into a folder per class, or annotations with "
            "types beside their images."
        ) from error
    chosen = typed or boxes
    names = sorted({name for name, _ in chosen})
    if not names:
        raise DataError(f"{folder}: there are no boxes, so there is nothing to classify.")
    left = len(boxes) - len(typed) if typed else 0
    one, many = "box has no type and is", "boxes have no type and are"
    notes = [*found.notes, *([f"{count_of(left, one, many)} left out."] if left else [])]
    label = {name: k for k, name in enumerate(names)}
    crops = [replace(crop, label=label[name]) for name, crop in chosen]
    return CropDataset(folder, names, {WHOLE: crops}, notes, annotated=bool(typed))


def _typed_cells(folder: Path) -> CropDataset:
    """The cells of a project that have a type, in the order of their images."""
    table = folder / CELLS_FILE
    cells: list[tuple[str, str, LabelledCrop]] = []
    try:
        with regular_file(table).open(newline="", encoding="utf-8") as file:
            for line in csv.DictReader(file):
                if None in line or None in line.values():
                    raise ValueError("a row has not as many cells as the header")
                kind = csv_text(line["type"])
                cells.append((line["split"], kind, _cell_of_line(line, folder)))
    except (OSError, ValueError, KeyError, TypeError, csv.Error) as error:
        raise DataError(
            f"{table}: damaged, or no table of cells; add the images to the project again."
        ) from error
    names = sorted({name for _, name, _ in cells})
    if not names:
        raise DataError(f"{folder}: no cell has a type yet, so there is nothing to classify.")
    label = {name: k for k, name in enumerate(names)}
    splits: dict[str, list[LabelledCrop]] = {}
    for split, name, cell in sorted(cells, key=lambda cell: str(cell[2].image)):
        splits.setdefault(split, []).append(replace(cell, label=label[name]))
    return CropDataset(folder, names, splits, annotated=True)


def _cell_of_line(line: dict[str, str], folder: Path) -> LabelledCrop:
    """A cell without its label; a `ValueError` for what cannot be a box of an image of ours."""
    if not re.fullmatch(r"[^/\\.][^/\\]*", line["file"]) or line["split"] not in SPLITS:
        raise ValueError("not a file and a split of a project")
    values = [float(line[key]) for key in ("x1", "y1", "x2", "y2", "width", "height")]
    x1, y1, x2, y2, width, height = values
    if not (all(map(math.isfinite, values)) and x1 < x2 and y1 < y2 and min(width, height) >= 1):
        raise ValueError("not a box")
    if not line["type"]:
        raise ValueError("no type")
    box = ((x1 + x2) / 2 / width, (y1 + y2) / 2 / height, (x2 - x1) / width, (y2 - y1) / height)
    reviewed = line["reviewed"] != "False"
    return LabelledCrop(
        folder / CELLS_DIR / f"{line['file']}.png", 0, box, line["source"], reviewed
    )


def with_classes(dataset: CropDataset, known: Sequence[str]) -> CropDataset:
    """Return the crops with all classes that a model knows, in its order, and then the new ones.

    A class without training crops that the model does not know cannot be learned: its crops are
    left out, with a note.
    """
    counts = dataset.counts("train" if "train" in dataset.splits else WHOLE)
    familiar = set(known)
    new = [name for name, count in counts.items() if count and name not in familiar]
    names = [*known, *new]
    label = {name: k for k, name in reversed(list(enumerate(names)))}
    left_out = [name for name in dataset.names if name not in label]
    splits = {
        split: [
            replace(item, label=label[dataset.names[item.label]])
            for item in items
            if dataset.names[item.label] in label
        ]
        for split, items in dataset.splits.items()
    }
    splits = {split: items for split, items in splits.items() if items}
    notes = [
        f"All cells of type {name} are in images that validate, so it is left out; add an image "
        "with some that trains."
        if dataset.annotated
        else f"All crops of {name} validate, so it is left out; add some from other images."
        for name in left_out
    ]
    return replace(dataset, names=names, splits=splits, notes=[*dataset.notes, *notes])


def with_validation(dataset: CropDataset, fraction: float, seed: int) -> CropDataset:
    """Return the dataset with splits `train` and `val`; a missing one is held out.

    All cells of an image are in one split, unless there is only one image. A seeded hash of the
    image's name decides, wherever the folder lies and whatever else is in it, so that nothing that
    was trained on validates after more is added. Where it holds out nothing, the lowest one
    validates: of each class where every crop is a file of its own, otherwise of all images. It may
    hold out all of a small class; see `with_classes`.

    Ultralytics' layout may have `test` in place of `val`.
    """
    splits = dataset.splits
    if "train" in splits and ("val" in splits or "test" in splits):
        return replace(
            dataset, splits={**splits, "val": splits["val"] if "val" in splits else splits["test"]}
        )
    items = splits.get("train", splits.get(WHOLE))
    if items is None:
        raise DataError(f"{dataset.path}: there is no split `train` in it.")
    sources = [_source(dataset, item) for item in items]
    by_image = len(set(sources)) > 1 and any(item.cxcywh for item in items)
    if len(set(sources)) == 1:
        sources = [f"{sources[0]}\0{item.cxcywh}" for item in items]
    # (class, fraction) of each crop, or (0, fraction) where an image's classes stay together.
    places = [
        (0 if by_image else item.label, seeded_fraction(seed, source))
        for item, source in zip(items, sources, strict=True)
    ]
    groups: dict[int, set[float]] = {}
    for group, place in places:
        groups.setdefault(group, set()).add(place)
    lowest = {(group, min(found)) for group, found in groups.items() if len(found) > 1}
    held = [place in lowest or place[1] < fraction for place in places]
    parts = {
        split: [item for item, val in zip(items, held, strict=True) if val == (split == "val")]
        for split in ("train", "val")
    }
    what = "the images" if by_image else "each class"
    note = f"There is no validation set: a part of {what} was held out at random."
    return replace(dataset, splits=parts, notes=[*dataset.notes, note])


def _source(dataset: CropDataset, item: LabelledCrop) -> str:
    """Return what an item's image is called in a dataset, wherever it lies; not by its class."""
    if item.source:
        return item.source
    image = Path(os.path.abspath(item.image))
    file = dataset.path.suffix.lower() in (".yaml", ".yml")
    for folder in map(Path, (os.path.abspath(dataset.path), os.path.realpath(dataset.path))):
        folder = folder.parent if file else folder
        image = image.relative_to(folder) if image.is_relative_to(folder) else image
    name = dataset.names[item.label]
    return "/".join([*(part for part in image.parts[:-1] if part != name), image.name])


def check_crop_dataset(
    dataset: CropDataset, splits: Sequence[str], report: Report | None = None, least: int = 1
) -> list[str]:
    """Read every image of `splits`; a `DataError` has all problems, the result what is odd.

    Each class needs `least` crops in the first of the splits.
    """
    problems = [_why_unusable(dataset, split) for split in splits]
    if not any(problems):
        problems += _too_few(dataset, splits[0], least)
    inspected = Dataset(dataset.path, dataset.names, {}, inspections=dataset.inspections)
    items = {
        split: [
            LabelledImage(image, np.empty(0, np.int64), np.empty((0, 4)))
            for image in dict.fromkeys(item.image for item in dataset.splits.get(split, ()))
        ]
        for split in splits
    }
    inspect_images(inspected, [item for part in items.values() for item in part], report)
    problems += [
        dataset.inspections[item.image].problem for part in items.values() for item in part
    ]
    problems += _in_two_splits(dataset, splits)
    problems = list(dict.fromkeys(problem for problem in problems if problem))
    if problems:
        raise DataError(describe_problems(dataset.path, problems))
    trained = dataset.counts(splits[0])
    notes = [
        f"{split}: no crops of {name_list(missing)}."
        for split in splits[1:]
        if (
            missing := [n for n, count in dataset.counts(split).items() if trained[n] and not count]
        )
    ]
    both = {item.image for item in dataset.splits[splits[0]]}
    for split in splits[1:]:
        both &= {item.image for item in dataset.splits[split]}
    if both and len(splits) > 1:
        notes.append(
            f"{' and '.join(splits)} share {count_of(len(both), 'image')}, so metrics will be "
            "optimistic."
        )
    return [*dataset.notes, *notes]


def _why_unusable(dataset: CropDataset, split: str) -> str:
    if split not in dataset.splits:
        there = ", ".join(dataset.splits)
        return f"{dataset.path}: there is no split `{split}`; there is {there}."
    return "" if dataset.splits[split] else f"{dataset.path}: `{split}` has no crops."


def _too_few(dataset: CropDataset, split: str, least: int) -> list[str]:
    counts = dataset.counts(split)
    empty = [name for name, count in counts.items() if count < min(least, 1)]
    few = [name for name, count in counts.items() if 0 < count < least]
    problems = []
    if empty:
        problems.append(
            f"{dataset.path}: there are no images of {name_list(empty)}; add some, or remove the "
            f"class."
        )
    if few:
        problems.append(
            f"{dataset.path}: only {count_of(counts[few[0]], 'image')} of {name_list(few)}; at "
            f"least {least} of each class are needed."
        )
    return problems


def _in_two_splits(dataset: CropDataset, splits: Sequence[str]) -> list[str]:
    """Sentences on files of the same content in two splits: metrics on them would not be valid."""
    first: dict[str, tuple[Path, str]] = {}
    problems = []
    for split in splits:
        for image in dict.fromkeys(item.image for item in dataset.splits.get(split, ())):
            digest = dataset.inspections[image].digest
            path, home = first.setdefault(digest, (image, split))
            if digest and home != split and path != image:
                problems.append(
                    f"{image}: the same image as {path}, so metrics on {split} are not valid."
                )
    return problems


def unreviewed_notes(dataset: CropDataset) -> list[str]:
    """A sentence on crops whose class nobody has looked at, where there are any."""
    crops = [item for items in dataset.splits.values() for item in items]
    count = sum(not item.reviewed for item in crops)
    if not count:
        return []
    have = "has a type" if count == 1 else "have types"
    return [
        f"{count} of {count_of(len(crops), 'crop')} {have} that a classifier gave and nobody has "
        "reviewed."
    ]


def crop_dataset_hash(dataset: CropDataset, splits: Sequence[str] = ("train", "val")) -> str:
    """SHA-256 over names, splits, images' contents and boxes, wherever the folder lies."""
    total = hashlib.sha256("\0".join(dataset.names).encode())
    for split in splits:
        for item in dataset.splits[split]:
            digest = dataset.inspections[item.image].digest
            total.update(f"\0{split}\0{item.label}\0{digest}\0{item.cxcywh}".encode())
    return total.hexdigest()
