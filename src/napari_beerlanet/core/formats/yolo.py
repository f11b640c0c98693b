"""YOLO's files: label lines `class x y width height [confidence]`, classes.txt, data.yaml.

Coordinates are relative to the image size. `class x1 y1 x2 y2 x3 y3 …` is an outline. The labels
of …/images/a.png are in …/labels/a.txt.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import yaml

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import (
    BoxArray,
    area,
    clip,
    cxcywh_to_xyxy,
    xyxy_to_cxcywh,
)
from napari_beerlanet.core.common.storage import DataError, FileError, read_yaml, staged_folder
from napari_beerlanet.core.formats.common import (
    AnyPath,
    BoxRows,
    ImageShape,
    check_token_count,
    parsing,
    read_text,
    to_detections,
    write_text,
)

CLASSES_FILE = "classes.txt"
"""The file beside YOLO's that names the classes, one on each line."""

_DATASET_FILES = ("data.yaml", "dataset.yaml")
_MAX_FOUND_BYTES = 1 << 16  # of a data.yaml that nobody named: reading YAML takes long
_MAX_FOUND_BRACKETS = 500
_MAX_CLASSES = 10_000
_MAX_PARENTS = 3  # folders: …/labels/train/a.txt is named by …/data.yaml
_TOLERANCE = 0.01  # of the image's side, by which others' rounding may lead out of it


def write_yolo(
    path: AnyPath,
    detections: Detections,
    image_name: str = "",
    confidence: bool = True,
    classes: ClassesFile | None = None,
) -> None:
    """Write boxes cut off at the image's borders, as YOLO refuses what lies outside.

    Without `confidence` they are labels to train with. Neither class names nor the image's name
    have a place in it; `classes` says which numbers the classes have, by default their own.
    """
    shape = detections.image_shape
    if shape is None:
        raise ValueError("YOLO's text is relative to the image size, so image_shape must be known.")
    boxes = clip(detections.xyxy, shape)
    some = area(boxes) > 0
    scores = detections.scores[some] if confidence else None
    labels = detections.labels[some]
    if classes is not None:
        labels = classes.numbers(detections.names)[labels]
    write_text(path, format_yolo_lines(labels, boxes[some], shape, scores))


def write_classes(path: AnyPath, names: Sequence[str]) -> None:
    """Write class names, one on each line: what annotation tools expect as classes.txt."""
    write_text(path, "".join(" ".join(name.splitlines()) + "\n" for name in names))


class ClassesFile:
    """A folder's classes.txt, which may grow.

    The names that it has stay where they are, as the numbers in other files of the folder mean
    them.
    """

    def __init__(self, folder: AnyPath) -> None:
        self.path = Path(folder) / CLASSES_FILE
        self._known = _read_classes_file(self.path, 0) if self.path.is_file() else None
        self.names = list(self._known or ())
        self._numbers = {name: k for k, name in reversed(list(enumerate(self.names)))}

    def numbers(self, names: Sequence[str]) -> npt.NDArray[np.int64]:
        """(k,) the numbers of classes, which are added where they are new."""
        for name in (plain := [" ".join(name.splitlines()) for name in names]):
            if name not in self._numbers:
                self._numbers[name] = len(self.names)
                self.names.append(name)
        return np.array([self._numbers[name] for name in plain], np.int64)

    def write(self, folder: AnyPath) -> Path | None:
        """Write it to this folder, if it has changed; where it is then."""
        if self.names == self._known:
            return None
        path = Path(folder) / CLASSES_FILE
        write_classes(path, self.names)
        return path


def write_yolo_with_classes(
    path: AnyPath, detections: Detections, confidence: bool = True
) -> list[Path]:
    """Write a file whose numbers are those of the classes.txt beside it, which may grow.

    Both are written, or none. Returns both paths.
    """
    path = Path(path)
    classes = ClassesFile(path.parent)
    with staged_folder(path.parent) as stage:
        write_yolo(stage / path.name, detections, confidence=confidence, classes=classes)
        classes.write(stage)
    return [path, classes.path]


def read_yolo(
    path: AnyPath,
    image_shape: ImageShape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read boxes, or the boxes around outlines (`class x1 y1 x2 y2 x3 y3 …`).

    Without `names` they are those of a classes.txt beside it or beside its folder "labels", or of a
    data.yaml above it, or else the numbers.
    """
    if image_shape is None:
        raise ValueError("YOLO's text is relative to the image size, so image_shape must be given.")
    text = read_text(path, empty=True)
    with parsing(path, "YOLO's text"):
        parsed = []
        for number, line in enumerate(text.splitlines(), 1):
            try:
                parsed += [parse_yolo_line(line)] if line.strip() else []
            except ValueError as error:
                raise FileError(f"{path}, line {number}: {error}") from error
        classes = _class_names(
            Path(path), names, max((entry.label for entry in parsed), default=-1)
        )
        centres = np.array([entry.cxcywh for entry in parsed], np.float64).reshape(-1, 4)
        boxes = clip(cxcywh_to_xyxy(centres, image_shape), image_shape).tolist()
        rows = BoxRows()
        for entry, box in zip(parsed, boxes, strict=True):
            if entry.label >= len(classes):
                raise FileError(
                    f"{path}: class {entry.label}, but the classes are 0 to {len(classes) - 1}."
                )
            rows.add(classes[entry.label], box, entry.score, {})
        return to_detections(path, rows, classes, image_shape)


class YoloLine(NamedTuple):
    """A line of a label file: `cxcywh` centre and size relative to the image."""

    label: int
    cxcywh: tuple[float, float, float, float]
    score: float | None


def parse_yolo_line(line: str) -> YoloLine:
    """A line `class x y width height [confidence]`, or of an outline; a ValueError says why not."""
    words = line.split()
    try:
        label, *values = [float(word) for word in words]
    except ValueError as error:
        raise ValueError("not numbers; `class x y width height` is needed.") from error
    score = values.pop() if len(values) == 5 else None
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise ValueError(f"{len(words)} numbers; `class x y width height` is needed.")
    if not label.is_integer() or label < 0:
        raise ValueError(f"class {words[0]:.80}, which is not a whole number from 0.")
    if label >= _MAX_CLASSES:
        raise ValueError(f"class {label:.0f}; up to {_MAX_CLASSES:,} classes, from 0, are read.")
    if not all(map(math.isfinite, values)):
        raise ValueError("not finite numbers.")
    if min(values) < -_TOLERANCE or max(values) > 1 + _TOLERANCE:
        raise ValueError("out of range; coordinates are fractions of the image, from 0 to 1.")
    if score is not None and not 0 <= score <= 1:
        raise ValueError(f"the confidence is {score:g}, not from 0 to 1.")
    x, y, width, height = values if len(values) == 4 else _bounding_cxcywh(values)
    if min(width, height) < 0:
        raise ValueError("a box without area: a size below 0.")
    return YoloLine(int(label), (x, y, width, height), score)


def _bounding_cxcywh(outline: list[float]) -> list[float]:
    x, y = outline[::2], outline[1::2]
    left, right, top, bottom = min(x), max(x), min(y), max(y)
    return [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]


def format_yolo_lines(
    labels: npt.NDArray[Any],
    xyxy: BoxArray,
    shape: ImageShape,
    scores: npt.NDArray[Any] | None = None,
) -> str:
    """The text of boxes (n, 4) in pixels of an image of `shape` (H, W); with `scores` (n,), too."""
    places = np.clip(xyxy_to_cxcywh(xyxy, shape), 0, 1)
    lines = []
    for i, place in enumerate(places.tolist()):
        words = [str(int(labels[i])), *(f"{value:.8f}" for value in place)]
        words += [f"{scores[i]:.6f}"] if scores is not None else []
        lines.append(" ".join(words) + "\n")
    return "".join(lines)


def _class_names(path: Path, names: Sequence[str] | None, largest: int) -> list[str]:
    if names is not None:
        return list(names)
    for listed_in in _classes_files(path.absolute()):
        if listed_in.is_file():
            return _read_classes_file(listed_in, largest + 1)
    for folder in list(path.absolute().parents)[:_MAX_PARENTS]:
        for name in _DATASET_FILES:
            listed = _class_names_if_any(folder / name)
            if listed:
                return listed
    return [str(label) for label in range(largest + 1)]


def _classes_files(path: Path) -> list[Path]:
    """Where a classes.txt of a label file may lie: beside it, or beside its folder of labels."""
    files = [path.with_name(CLASSES_FILE)]
    labels = [folder for folder in list(path.parents)[:_MAX_PARENTS] if folder.name == "labels"]
    return files + [folder.with_name(CLASSES_FILE) for folder in labels]


def _read_classes_file(path: Path, needed: int) -> list[str]:
    """Names in a classes.txt; empty ones at its end only as far as there are numbers for them."""
    text = read_text(path, empty=True)
    check_token_count(path, text, "\n", _MAX_CLASSES)
    lines = text.splitlines()
    used = len(lines)
    while used > needed and not lines[used - 1].strip():
        used -= 1
    return lines[:used]


def read_data_yaml(file: Path) -> dict[str, Any]:
    """The content of a data.yaml, or a `DataError`."""
    try:
        content = read_yaml(file)
    except FileError as error:
        raise DataError(str(error)) from error
    if not isinstance(content, dict):
        raise DataError(f"{file}: not a data.yaml, which has `train:`, `val:` and `names:`.")
    return content


def class_names_of(content: dict[str, Any], file: Path) -> list[str]:
    """The class names, each there once; where only their number is given, "class 0", …"""
    count = content.get("nc")
    if content.get("names") is None and isinstance(count, int) and 0 < count < _MAX_CLASSES:
        return [f"class {k}" for k in range(count)]
    names = _listed_names(content, file)
    duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
    if duplicates or not all(names):
        listed = ", ".join(duplicates[:3]) or "an empty name"
        raise DataError(f"{file}: `names` has {listed:.80} twice.")
    if isinstance(count, int) and count != len(names):
        raise DataError(f"{file}: `nc` says {count} classes, but `names` lists {len(names)}.")
    return names


def _class_names_if_any(file: Path) -> list[str]:
    """The class names of a file that may be there and may be a data.yaml; [] where it is none."""
    try:
        if not file.is_file() or file.stat().st_size > _MAX_FOUND_BYTES:
            return []
        content = file.read_bytes()
        if content.count(b"[") + content.count(b"{") > _MAX_FOUND_BRACKETS:
            return []
        return _listed_names(read_data_yaml(file), file)
    except (DataError, OSError):
        return []


def format_data_yaml(train: str, val: str, names: Sequence[str], comment: str) -> str:
    """The text of a data.yaml that lies in the folder of the rest, so that it may be moved."""
    content = {"train": train, "val": val, "names": dict(enumerate(names))}
    body: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return f"# {comment}\n{body}"


def _listed_names(content: dict[str, Any], file: Path) -> list[str]:
    """What `names` lists, be it a list or numbered."""
    given = content.get("names")
    if isinstance(given, dict):
        numbered = {str(key): name for key, name in given.items()}
        if sorted(numbered) != sorted(str(k) for k in range(len(numbered))):
            raise DataError(f"{file}: `names` must number its classes 0, 1, 2 … without a gap.")
        given = [numbered[str(k)] for k in range(len(numbered))]
    if not isinstance(given, list) or not given:
        raise DataError(f"{file}: `names` must list the classes, for instance [RBC, WBC].")
    if any(name is None or isinstance(name, (list, dict)) for name in given):
        raise DataError(f"{file}: `names` must list the classes, for instance [RBC, WBC].")
    return [str(name).strip() for name in given]
