"""What lies in a project's folder, and how each file is read and written.

project.json         classes, which images validate, versions
data.yaml            for Ultralytics, and for `fine_tune`
images/train, val    pieces of annotated regions, PNG
labels/train, val    their boxes, YOLO's text
crops.csv            where each piece comes from
annotations/         a JSON file for each image, as it was last saved
runs/, models/       of training, and what was kept of it
"""

from __future__ import annotations

import csv
import errno
import io
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from napari_beerlanet import __version__

from .files import FileError
from .split import TRAIN, VAL

FORMAT = 1
PROJECT, DATA, TABLE = "project.json", "data.yaml", "crops.csv"
ANNOTATIONS, RUNS, MODELS = "annotations", "runs", "models"
FOLDERS = (
    *(f"{kind}/{split}" for kind in ("images", "labels") for split in (TRAIN, VAL)),
    *(ANNOTATIONS, RUNS, MODELS),
)

_GONE = {errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EIO, errno.ESTALE, errno.ENOTCONN}
_FULL = {errno.ENOSPC, errno.EDQUOT}


class ProjectError(FileError):
    """What cannot be done with a project; the message is a sentence with the way out."""


@dataclass
class Manifest:
    """What project.json holds; `one` says how an only image is used, see `split.describe`."""

    classes: list[str]
    seed: int = 0
    created: str = ""
    split: dict[str, str] = field(default_factory=dict)
    one: str = ""
    training_size: int = 0
    format: int = FORMAT
    program: str = __version__


@dataclass
class Row:
    """Where a piece comes from; `counts` are labels and numbers of boxes as "0:12 1:3"."""

    file: str
    split: str
    source: str
    source_name: str
    source_path: str
    source_digest: str
    plane: str
    x: int
    y: int
    width: int
    height: int
    side: int
    group: int
    regions: str
    boxes: int
    counts: str
    hidden: int
    shown: float
    sha256: str

    def image(self, split: str | None = None) -> str:
        """Its place in the project, in its split or another."""
        return f"images/{split or self.split}/{self.file}.png"

    def label(self, split: str | None = None) -> str:
        """The place of its boxes."""
        return f"labels/{split or self.split}/{self.file}.txt"


@contextmanager
def explained(root: Path, doing: str) -> Iterator[None]:
    """Errors of the disk as a `ProjectError` of one sentence; `doing` completes "to …"."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise ProjectError(_reason(root, doing, error)) from error


def read_manifest(root: Path) -> Manifest:
    """project.json; of a newer version, what can be understood of it."""
    content = load_object(root / PROJECT, "a project of napari-beerlanet")
    known = {part.name for part in fields(Manifest)}
    try:
        manifest = Manifest(**{key: value for key, value in content.items() if key in known})
        right = (
            isinstance(manifest.format, int)
            and all(isinstance(name, str) for name in manifest.classes)
            and set(manifest.split.values()) <= {TRAIN, VAL}
        )
    except (TypeError, AttributeError):
        right = False
    if not right:
        raise ProjectError(f"{root / PROJECT}: damaged, or not a project of napari-beerlanet.")
    return manifest


def write_manifest(manifest: Manifest) -> bytes:
    """As project.json."""
    content = {**asdict(manifest), "format": FORMAT, "program": __version__}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def write_data(manifest: Manifest) -> bytes:
    """As data.yaml, relative to the file itself so that the folder may be moved."""
    same = manifest.one == "same"
    content = {
        "train": f"images/{TRAIN}",
        "val": f"images/{TRAIN if same else VAL}",
        "names": dict(enumerate(manifest.classes)),
    }
    head = "# Made by napari-beerlanet; where each piece comes from is in crops.csv.\n"
    body: str = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
    return (head + body).encode("utf-8", "replace")


def checked_names(names: Sequence[str]) -> list[str]:
    """Class names without odd blanks; none, empty ones and doubles are refused."""
    clean = [" ".join(str(name).split()) for name in names]
    if not clean or not all(clean):
        raise ProjectError("A project needs at least one class, and each a name.")
    folded = [name.casefold() for name in clean]
    twice = [name for name in clean if folded.count(name.casefold()) > 1]
    if twice:
        raise ProjectError(f"The class {twice[0]} is there twice; give one another name.")
    return clean


def read_table(root: Path) -> list[Row]:
    """crops.csv."""
    path = root / TABLE
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return [_row(entry) for entry in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError, csv.Error) as error:
        raise ProjectError(
            f"{path}: damaged ({error}); it says where each piece is from."
        ) from error


def write_table(rows: Sequence[Row]) -> bytes:
    """As crops.csv."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [part.name for part in fields(Row)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in rows)
    return text.getvalue().encode("utf-8", "replace")


def load_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; `what` it should be is named where it is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProjectError(f"{path}: damaged, or not {what}.") from error
    if not isinstance(content, dict):
        raise ProjectError(f"{path}: damaged, or not {what}.")
    return content


def _row(entry: dict[str, Any]) -> Row:
    kinds: dict[str, Any] = {"int": int, "float": float, "str": str}
    row = Row(**{part.name: kinds[str(part.type)](entry[part.name]) for part in fields(Row)})
    names = (row.file, row.source)
    if row.split not in (TRAIN, VAL) or any(re.search(r"[/\\]|^\.", name) for name in names):
        raise ValueError(f"a piece {row.file!r} in {row.split!r}")
    return row


def _reason(root: Path, doing: str, error: OSError) -> str:
    if error.errno in _FULL:
        return (
            f"{root}: no space left on the disk to {doing}; make some and try again. What was "
            "saved before is as it was."
        )
    if error.errno in _GONE and not (root / PROJECT).exists():
        return (
            f"{root}: the project's folder is gone, so it is not possible to {doing}; connect its "
            "drive again. Until then keep the viewer open."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{root}: no permission to {doing}; choose a folder that you may write to."
    return f"{root}: it was not possible to {doing} ({error.strerror or error})."
