"""The images that a data.yaml means, and their label files.

The labels of …/images/a.png are in …/labels/a.txt: a line `class x y w h` for each box, or
`class x1 y1 x2 y2 x3 y3 …` for an outline, in shares of the image.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from .files import SUFFIXES, FileError

_SLACK = 0.01  # of the image's side, by which rounding may lead out of it
# What other programs write beside them, named here so that a sentence tells that we cannot read it.
_IMAGES = SUFFIXES | {".avif", ".dng", ".heic", ".heif", ".mpo"}


class DataError(FileError):
    """Data that nothing can be learned from; the message names each file and what is wrong."""


@dataclass(frozen=True, eq=False)
class Item:
    """An image and its n boxes.

    `labels` (n,) int64 are indices into the names, `cxcywh` (n, 4) float64 centres and sizes in
    shares of the image. `problems` and `notes` are sentences about its label file.
    """

    image: Path
    labels: npt.NDArray[np.int64]
    cxcywh: npt.NDArray[np.float64]
    problems: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


def label_file(image: Path) -> Path:
    """Where the labels of an image are: its last folder `images` becomes `labels`."""
    before, cut, after = str(image).rpartition(f"{os.sep}images{os.sep}")
    where = f"{before}{os.sep}labels{os.sep}{after}" if cut else str(image)
    return Path(where).with_suffix(".txt")


def images_of(place: Path, root: Path) -> list[Path]:
    """The images in a folder and the folders in it, in a text file of paths, or `place` itself.

    A line of a text file that begins with ./ is relative to that file, any other to `root` or the
    current folder.
    """
    if place.is_dir():
        depth = len(place.parts)
        return [
            path
            for path in place.rglob("*")
            if path.suffix.lower() in _IMAGES
            and not any(part.startswith(".") for part in path.parts[depth:])
        ]
    if place.suffix.lower() in _IMAGES:
        return [place]
    try:
        lines = place.read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{place}: not a folder, an image, or a list of images.") from error
    return [_listed(line.strip(), place, root) for line in lines if line.strip()]


def _listed(line: str, listing: Path, root: Path) -> Path:
    folders = [root, Path.cwd()] if not line.startswith("./") else []
    for folder in folders:
        if (folder / line).exists():
            return Path(os.path.abspath(folder / line))
    return Path(os.path.abspath(listing.parent / line))


def read_item(image: Path, classes: int) -> Item:
    """An image with its label file read; without one it has no boxes."""
    file = label_file(image)
    problems: list[str] = []
    rows: list[tuple[float, ...]] = []
    for number, line in enumerate(_lines(file, problems), 1):
        if line.strip():
            row, problem = _parse(line.split(), classes)
            if problem:
                problems.append(f"{file}, line {number}: {problem}")
            else:
                rows.append(row)
    kept = list(dict.fromkeys(rows))
    twice = len(rows) - len(kept)
    notes = (f"{file}: boxes listed twice count once ({twice}).",) if twice else ()
    table = np.array(kept, np.float64).reshape(-1, 5)
    return Item(image, table[:, 0].astype(np.int64), table[:, 1:], tuple(problems), notes)


def _lines(file: Path, problems: list[str]) -> list[str]:
    try:
        return file.read_text(encoding="utf-8-sig").splitlines() if file.exists() else []
    except (OSError, UnicodeDecodeError):
        problems.append(f"{file}: not a text file that can be read.")
        return []


def _parse(words: list[str], classes: int) -> tuple[tuple[float, ...], str]:
    """(class, x, y, w, h) of a line and "", or () and what is wrong with it."""
    try:
        values = [float(word) for word in words]
    except ValueError:
        return (), "not numbers; `class x y w h` is needed."
    outline = len(values) >= 7 and len(values) % 2 == 1
    if len(values) != 5 and not outline:
        return (), f"{len(values)} numbers; `class x y w h` is needed."
    label, *place = values
    if not np.isfinite(values).all():
        return (), "not finite numbers."
    if label not in range(classes):
        return (), f"class {label:g}, but the classes are 0 to {classes - 1}."
    if min(place) < -_SLACK or max(place) > 1 + _SLACK:
        return (), "out of range; coordinates are shares of the image, from 0 to 1."
    if outline:
        x, y = place[::2], place[1::2]
        place = [(max(x) + min(x)) / 2, (max(y) + min(y)) / 2, max(x) - min(x), max(y) - min(y)]
    if min(place[2:]) <= 0:
        return (), "a box without area."
    return (label, *place), ""
