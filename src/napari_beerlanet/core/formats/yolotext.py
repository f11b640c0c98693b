"""YOLO's text files: a line `class x y width height [confidence]` per object, in image shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from ..boxes import Detections, area, clip, from_centres, to_centres
from ..files import FileError
from .shared import (
    AnyPath,
    Rows,
    Shape,
    check_amount,
    parsing,
    read_text,
    to_detections,
    write_text,
)

CLASSES = "classes.txt"
"""The file beside YOLO's that names the classes, one on each line."""

_DATASETS = ("data.yaml", "dataset.yaml")
_ABOVE = 3  # folders: …/labels/train/a.txt is named by …/data.yaml
_LARGEST_YAML = 1 << 16  # bytes, with at most so many brackets: reading it takes long
_MOST_BRACKETS = 500
_MOST_WORDS = 1 << 23
_SLACK = 0.01  # of the image's side, by which others' rounding may lead out of it


def write_yolo(
    path: AnyPath, detections: Detections, image_name: str = "", confidence: bool = True
) -> None:
    """Write boxes cut off at the image's borders, as YOLO refuses what lies outside.

    Without `confidence` they are labels to train with. Neither class names nor the image's name
    have a place in it; for the former see `write_classes`.
    """
    shape = detections.image_shape
    if shape is None:
        raise ValueError("YOLO's text is in shares of the image, so image_shape must be known.")
    boxes = clip(detections.xyxy, shape)
    centres = to_centres(boxes, shape).tolist()
    lines = []
    for i in np.flatnonzero(area(boxes) > 0):
        words = [str(detections.labels[i]), *(f"{value:.8f}" for value in centres[i])]
        words += [f"{detections.scores[i]:.6f}"] if confidence else []
        lines.append(" ".join(words) + "\n")
    write_text(path, "".join(lines))


def write_classes(path: AnyPath, names: Sequence[str]) -> None:
    """Write class names, one on each line: what annotation tools expect as classes.txt."""
    write_text(path, "".join(" ".join(name.splitlines()) + "\n" for name in names))


def add_classes(folder: AnyPath, names: Sequence[str]) -> list[str]:
    """See that a folder's classes.txt has these names, and return all that it has, in order.

    Those that it has stay where they are, as the numbers in other files of the folder mean them.
    """
    path = Path(folder) / CLASSES
    known = _listed(path, 0) if path.is_file() else []
    plain = [" ".join(name.splitlines()) for name in names]
    every = list(dict.fromkeys([*known, *plain]))
    if every != known or not path.is_file():
        write_classes(path, every)
    return every


def write_yolo_beside_classes(
    path: AnyPath, detections: Detections, confidence: bool = True
) -> list[Path]:
    """Write a file whose numbers are those of the classes.txt beside it, which may grow.

    Returns both paths.
    """
    path = Path(path)
    names = [" ".join(name.splitlines()) for name in detections.names]
    every = add_classes(path.parent, names)
    place = np.array([every.index(name) for name in names], np.int64)
    renumbered = replace(detections, labels=place[detections.labels], names=every, candidates=None)
    write_yolo(path, renumbered, confidence=confidence)
    return [path, path.with_name(CLASSES)]


def read_yolo(
    path: AnyPath,
    image_shape: Shape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read boxes, or the boxes around outlines (`class x1 y1 x2 y2 x3 y3 …`).

    Without `names` they are those of a classes.txt beside it or a data.yaml above it, or else the
    numbers.
    """
    if image_shape is None:
        raise ValueError("YOLO's text is in shares of the image, so image_shape must be given.")
    text = read_text(path, empty=True)
    check_amount(path, text, " \t\n", _MOST_WORDS)
    lines = [(n, line.split()) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    with parsing(path, "YOLO's text"):
        parsed = [_parse(path, number, words) for number, words in lines]
        classes = _names(Path(path), names, max((label for label, *_ in parsed), default=-1))
        centres = np.array([place for _, place, _ in parsed], np.float64).reshape(-1, 4)
        boxes = clip(from_centres(centres, image_shape), image_shape).tolist()
        rows = Rows()
        for (label, _, score), box in zip(parsed, boxes, strict=True):
            if label >= len(classes):
                raise FileError(
                    f"{path}: class {label}, but the classes are 0 to {len(classes) - 1}."
                )
            rows.add(classes[label], box, score, {})
        return to_detections(path, rows, classes, image_shape)


def _parse(path: AnyPath, number: int, words: list[str]) -> tuple[int, list[float], float | None]:
    """Label, centre and size, confidence of a line."""

    def wrong(reason: str) -> FileError:
        return FileError(f"{path}, line {number}: {reason}.")

    try:
        label, *values = [float(word) for word in words]
    except ValueError as error:
        raise wrong("not numbers; `class x y width height` is needed") from error
    score = values.pop() if len(values) == 5 else None
    if len(values) != 4 and (len(values) < 6 or len(values) % 2):
        raise wrong(f"{len(words)} numbers; `class x y width height` is needed")
    if not label.is_integer() or label < 0:
        raise wrong(f"the class is {words[0]}, not a whole number from 0")
    if not all(-_SLACK <= value <= 1 + _SLACK for value in values):
        raise wrong("out of range; places are shares of the image, from 0 to 1")
    if score is not None and not 0 <= score <= 1:
        raise wrong(f"the confidence is {score:g}, not from 0 to 1")
    if len(values) > 4:
        x, y = values[::2], values[1::2]
        left, right, top, bottom = min(x), max(x), min(y), max(y)
        values = [(left + right) / 2, (top + bottom) / 2, right - left, bottom - top]
    if min(values[2:]) < 0:
        raise wrong("a size below 0")
    return int(label), values, score


def _names(path: Path, names: Sequence[str] | None, largest: int) -> list[str]:
    if names is not None:
        return list(names)
    beside = path.with_name(CLASSES)
    if beside.is_file():
        return _listed(beside, largest + 1)
    for folder in list(path.absolute().parents)[:_ABOVE]:
        for name in _DATASETS:
            found = _of_dataset(folder / name)
            if found:
                return found
    return [str(label) for label in range(largest + 1)]


def _listed(path: Path, needed: int) -> list[str]:
    """Names in a classes.txt; empty ones at its end only as far as there are numbers for them."""
    lines = read_text(path, empty=True).splitlines()
    used = len(lines)
    while used > needed and not lines[used - 1].strip():
        used -= 1
    return lines[:used]


def _of_dataset(path: Path) -> list[str]:
    """The names of a data.yaml, or none."""
    import yaml  # type: ignore[import-untyped]

    if not path.is_file() or path.stat().st_size > _LARGEST_YAML:
        return []
    try:
        text = read_text(path)
        check_amount(path, text, "[{", _MOST_BRACKETS)
        names = yaml.safe_load(text)["names"]
    except (yaml.YAMLError, RecursionError, TypeError, KeyError, FileError):
        return []
    if isinstance(names, dict):
        names = [names.get(k) for k in range(len(names))]
    fine = isinstance(names, list) and all(isinstance(name, (str, int)) for name in names)
    return [str(name).strip() for name in names] if fine else []
