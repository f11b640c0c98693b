"""The data of a benchmark: what a laboratory has, templates, and copies that a method has changed.

A copy has the images as PNG files and the same labels. It is written image by image, each whole or
not at all, so a run that was killed continues where it was.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image

from napari_beerlanet.core.benchmark.settings import TaskKind, TaskSettings
from napari_beerlanet.core.boxes.classes import match_class_names
from napari_beerlanet.core.common.messages import error_message, path_text, quoted
from napari_beerlanet.core.common.progress import Cancelled, Report, report_progress
from napari_beerlanet.core.common.storage import DataError, FileError, atomic_path
from napari_beerlanet.core.formats.class_folders import (
    WHOLE,
    CropDataset,
    LabelledCrop,
    read_crop_dataset,
)
from napari_beerlanet.core.formats.dataset import SPLITS, Dataset, LabelledImage, read_dataset
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import fill_transparent, to_uint8

Pixels = npt.NDArray[np.uint8]
LabelledData = Dataset | CropDataset
Change = Callable[[Pixels], tuple[Pixels, Sequence[str]]]
"""(H, W, 3) uint8 to the same, and sentences on what could not be done."""

_MAX_TEMPLATES = 20  # random training images that are tried
_TEST_SPLITS = ("test", "val", WHOLE, "train")  # in the order of preference


def read_data(kind: TaskKind, path: str) -> LabelledData:
    """A laboratory's images with their labels."""
    return read_dataset(path) if kind == "detect" else read_crop_dataset(path)


def laboratory_data(task: TaskSettings, number: int) -> LabelledData:
    """The images of a task's test set, all in one split `val`."""
    test = task.tests[number]
    data = read_data(task.kind, test.data)
    unreadable = getattr(data, "unreadable", {})
    there = [split for split in _TEST_SPLITS if data.splits.get(split)]
    chosen = test.split or (there[0] if there else "")
    if test.split == WHOLE or list(data.splits) == [WHOLE]:
        items: list[Any] = [item for part in data.splits.values() for item in part]
    else:
        if chosen not in data.splits:
            why = unreadable.get(
                chosen, f"there is no split {quoted(chosen)}" if chosen else "it is empty"
            )
            raise DataError(f"{test.data}: nothing to test on ({str(why).rstrip('.')}).")
        items = list(data.splits[chosen])
    if not items:
        raise DataError(f"{test.data}: nothing to test on, as {chosen} is empty.")
    return with_items(data, {"val": items})


def with_items(data: LabelledData, splits: Mapping[str, list[Any]]) -> LabelledData:
    """The same data with other items in its splits."""
    if isinstance(data, Dataset):
        return Dataset(data.path, data.names, dict(splits))
    return replace(data, splits=dict(splits), inspections={})


def image_files(data: LabelledData, splits: Sequence[str] | None = None) -> list[Path]:
    """All image files of some splits, each once."""
    chosen = data.splits if splits is None else splits
    return list(dict.fromkeys(item.image for split in chosen for item in data.splits[split]))


def check_task(task: TaskSettings) -> None:
    """Refuse data that cannot be used, before anything is trained; one sentence names the task."""
    try:
        training = read_data(task.kind, task.train)
        parts = ("train", WHOLE) if task.kind == "classify" else ("train",)
        if not any(training.splits.get(split) for split in parts):
            raise DataError(f"{task.train}: there are no images to train on.")
        if task.kind == "detect" and not training.splits.get("val"):
            raise DataError(f"{task.train}: there is no split `val`, to choose the best epoch by.")
        named = Path(task.weights).suffix in (".yaml", ".yml") if task.weights else True
        if task.weights and not named and not os.path.exists(task.weights):
            raise FileError(f"{path_text(task.weights)}: there is no such file of weights.")
    except ValueError as error:
        raise DataError(f"Task {quoted(task.name)}: {error}") from error
    for number, test in enumerate(task.tests):
        try:
            match_class_names(present_classes(laboratory_data(task, number)), training.names)
        except FileError as error:
            raise FileError(
                f"Task {quoted(task.name)}, test set {quoted(test.name)}: {error}"
            ) from error
        except ValueError as error:
            said = str(error).replace("The model does not know", "the training data does not have")
            raise DataError(
                f"Task {quoted(task.name)}, test set {quoted(test.name)}: {said}"
            ) from error


def present_classes(data: LabelledData) -> list[str]:
    """Classes that occur."""
    counts: Counter[int] = Counter()
    for items in data.splits.values():
        for item in items:
            counts.update([item.label] if isinstance(item, LabelledCrop) else item.labels.tolist())
    return [name for k, name in enumerate(data.names) if counts[k]]


def fingerprint(data: LabelledData) -> str:
    """A hash of names, labels and the files' names and sizes, wherever the folder lies."""
    total = hashlib.sha256("\0".join(data.names).encode())
    for split, items in data.splits.items():
        for item in items:
            try:
                size = item.image.stat().st_size
            except OSError:
                size = -1  # reading it will say what is wrong
            total.update(f"\0{split}\0{item.image.name}\0{size}\0".encode())
            if isinstance(item, LabelledImage):
                total.update(item.labels.tobytes() + item.cxcywh.tobytes())
            else:
                total.update(f"{item.label} {item.cxcywh}".encode())
    return total.hexdigest()


def read_pixels(path: Path) -> Pixels:
    """(H, W, 3) uint8, as networks see an image: what alpha hides is padding."""
    return np.ascontiguousarray(fill_transparent(to_uint8(read_image(path).pixels)))


# --- templates -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Template:
    """The image that others are normalized to, and a note where another was unusable."""

    path: Path
    pixels: Pixels
    notes: tuple[str, ...] = ()


def templates(data: LabelledData, seed: int, given: str = "random") -> Iterator[Template]:
    """The given template, or training images in the random order of a seed; see `fit_template`."""
    if given != "random":
        path = Path(given)
        if not path.exists():
            raise FileError(f"{path}: the template is not there any more.")
        yield Template(path, read_pixels(path))
        return
    paths = image_files(data, [s for s in ("train", WHOLE) if s in data.splits][:1])
    order = np.random.default_rng([seed, 1]).permutation(len(paths))
    for number in order[:_MAX_TEMPLATES]:
        yield Template(paths[number], read_pixels(paths[number]))


def fit_template(
    candidates: Iterator[Template], fit: Callable[[Pixels], Any]
) -> tuple[Any, Template]:
    """What `fit` makes of the first template that it can use, such as one with stain in it."""
    notes: list[str] = []
    last: ValueError | None = None
    for template in candidates:
        try:
            return fit(template.pixels), replace(template, notes=tuple(notes))
        except ValueError as error:
            last = error
            notes.append(f"{template.path.name} cannot be a template: {error_message(error)}")
    if last is None:
        raise DataError("There is no training image to take as a template.")
    more = "" if len(notes) == 1 else f" and {len(notes) - 1} more"
    raise DataError(f"{notes[0].rstrip('.')}{more}; choose another template.") from last


# --- copies --------------------------------------------------------------------------------------


@dataclass
class CopyNotes:
    """What happened to the images of a copy: how many there are, and which stayed as they are."""

    total: int = 0
    unchanged: list[str] = field(default_factory=list)

    def sentences(self, method: str) -> list[str]:
        """What a person should know."""
        if not self.unchanged:
            return []
        return [
            f"{method}: {len(self.unchanged)} of {self.total} images stayed as they are; the first "
            f"is {self.unchanged[0].rstrip('.')}."
        ]


def copy_images(
    paths: Sequence[Path],
    folder: Path,
    change: Change,
    notes: CopyNotes,
    report: Report | None = None,
    message: str = "normalizing",
) -> dict[Path, Path]:
    """Changed images as PNG files in a folder, by the paths of the originals.

    An image that `change` fails on stays as it is, and is noted.
    """
    folder.mkdir(parents=True, exist_ok=True)
    made: dict[Path, Path] = {}
    for number, path in enumerate(paths):
        report_progress(report, number, len(paths), message)
        target = folder / f"{number:06d}.png"
        said = folder / f"{number:06d}.note"
        made[path] = target
        notes.total += 1
        if not target.exists():
            pixels = read_pixels(path)
            try:
                changed, problems = change(pixels)
            except Cancelled:
                raise
            except OSError:
                raise
            except Exception as error:
                changed, problems = pixels, [error_message(error)]
            if problems:  # before the image, which says that all is there
                with atomic_path(said) as unfinished:
                    unfinished.write_text(f"{path.name}: {problems[0]}", encoding="utf-8")
            with atomic_path(target) as unfinished:
                Image.fromarray(changed).save(unfinished, compress_level=1)
        if said.exists():
            notes.unchanged.append(said.read_text(encoding="utf-8"))
    report_progress(report, 1, 1, message)
    return made


def copy_laboratory_data(
    data: LabelledData, folder: Path, change: Change, notes: CopyNotes, report: Report | None = None
) -> LabelledData:
    """The same data with changed images."""
    made = copy_images(image_files(data), folder, change, notes, report)
    return with_items(
        data,
        {
            split: [replace(item, image=made[item.image]) for item in items]
            for split, items in data.splits.items()
        },
    )


def copy_training_data(
    data: LabelledData, folder: Path, change: Change, notes: CopyNotes, report: Report | None = None
) -> Path:
    """A copy of training data on disk; returns what a training takes: data.yaml, or its folder."""
    splits = {split: data.splits[split] for split in (*SPLITS, WHOLE) if data.splits.get(split)}
    splits.pop("test", None) if "val" in splits else None
    made = copy_images(image_files(data, list(splits)), folder / "all", change, notes, report)
    boxes = isinstance(data, Dataset) or any(
        item.cxcywh for items in splits.values() for item in items
    )
    if not boxes:
        return _write_class_folders(data, splits, folder, made)
    return _write_yolo(data, splits, folder, made)


def _write_class_folders(
    data: LabelledData, splits: Mapping[str, list[Any]], folder: Path, made: Mapping[Path, Path]
) -> Path:
    root = folder / "classes"
    for split, items in splits.items():
        for number, item in enumerate(items):
            place = root if split == WHOLE else root / split
            place = place / data.names[item.label]
            place.mkdir(parents=True, exist_ok=True)
            _link(made[item.image], place / f"{number:06d}.png")
    return root


def _write_yolo(
    data: LabelledData, splits: Mapping[str, list[Any]], folder: Path, made: Mapping[Path, Path]
) -> Path:
    import yaml

    root = folder / "yolo"
    for split, items in splits.items():
        lines: dict[Path, list[str]] = {}
        for item in items:
            rows = lines.setdefault(made[item.image], [])
            if isinstance(item, LabelledImage):
                rows += [
                    _label_line(label, box)
                    for label, box in zip(item.labels.tolist(), item.cxcywh.tolist(), strict=True)
                ]
            else:
                rows.append(_label_line(item.label, item.cxcywh or (0.5, 0.5, 1.0, 1.0)))
        name = "train" if split == WHOLE else split
        for kind in ("images", "labels"):
            (root / kind / name).mkdir(parents=True, exist_ok=True)
        for path, rows in lines.items():
            text = "\n".join(rows) + "\n" if rows else ""
            (root / "labels" / name / f"{path.stem}.txt").write_text(text, encoding="utf-8")
            _link(path, root / "images" / name / path.name)
    named = {
        ("train" if s == WHOLE else s): f"images/{'train' if s == WHOLE else s}" for s in splits
    }
    with atomic_path(root / "data.yaml") as unfinished:
        unfinished.write_text(
            yaml.safe_dump({**named, "names": list(data.names)}, allow_unicode=True),
            encoding="utf-8",
        )
    return root / "data.yaml"


def _label_line(label: int, box: Sequence[float]) -> str:
    return " ".join([str(label), *(repr(float(value)) for value in box)])


def _link(source: Path, target: Path) -> None:
    """The same file under another name; a copy where the disk has no links."""
    target.unlink(missing_ok=True)
    try:
        target.hardlink_to(source)
    except OSError:
        with atomic_path(target) as unfinished:
            unfinished.write_bytes(source.read_bytes())
