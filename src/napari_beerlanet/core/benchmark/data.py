"""The data of a benchmark: what a laboratory has, and templates for normalizers."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.benchmark.settings import TaskKind, TaskSettings
from napari_beerlanet.core.boxes.classes import match_class_names
from napari_beerlanet.core.common.messages import error_message, path_text, quoted
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.formats.class_folders import (
    WHOLE,
    CropDataset,
    LabelledCrop,
    read_crop_dataset,
)
from napari_beerlanet.core.formats.dataset import Dataset, LabelledImage, read_dataset
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import fill_transparent, to_uint8

Pixels = npt.NDArray[np.uint8]
LabelledData = Dataset | CropDataset

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
