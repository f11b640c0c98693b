"""The files in a project's folder, and how each is read and written.

project.json         classes, train/validation split, versions
data.yaml            for Ultralytics, and for `fine_tune`
images/train, val    crops of annotated regions, PNG
labels/train, val    their boxes, YOLO text
crops.csv            where each crop comes from
cells/, cells.csv    cells that have a type, in the image's own pixels, for `train_classifier`
annotations/         a JSON file for each image, as it was last saved
runs/, models/       training runs, and the models saved from them
"""

from __future__ import annotations

import csv
import errno
import hashlib
import io
import json
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, TypeAdapter, ValidationError

from napari_beerlanet._version import __version__
from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import parse_colour
from napari_beerlanet.core.common.messages import (
    error_detail,
    first_problem,
    shortened,
    slug,
    system_reason,
)
from napari_beerlanet.core.common.storage import (
    FileError,
    csv_cell,
    csv_text,
    pixel_digest,
    regular_file,
)
from napari_beerlanet.core.formats.class_folders import CELLS_DIR, CELLS_FILE
from napari_beerlanet.core.formats.yolo import format_data_yaml
from napari_beerlanet.core.project.split import TRAIN, VAL

FORMAT_VERSION = 1
PROJECT_FILE, DATA_FILE, CROPS_FILE = "project.json", "data.yaml", "crops.csv"
ANNOTATIONS_DIR, RUNS_DIR, MODELS_DIR = "annotations", "runs", "models"
SUBFOLDERS = (
    *(f"{kind}/{split}" for kind in ("images", "labels") for split in (TRAIN, VAL)),
    *(ANNOTATIONS_DIR, RUNS_DIR, MODELS_DIR),
)

_DRIVE_GONE_ERRNOS = {
    errno.ENOENT,
    errno.ENODEV,
    errno.ENXIO,
    errno.EIO,
    errno.ESTALE,
    errno.ENOTCONN,
}
_DISK_FULL_ERRNOS = {errno.ENOSPC, errno.EDQUOT}


class ProjectError(FileError):
    """What cannot be done with a project; the message is a sentence with the way out."""


def _split_name(name: str) -> str:
    if name not in (TRAIN, VAL):
        raise ValueError(f"should be {TRAIN} or {VAL}")
    return name


def _plain_name(name: str) -> str:
    """Refuse what would lead out of the project's folder."""
    if re.search(r"[/\\]|^\.", name):
        raise ValueError("should be a plain file name")
    return name


_Record = TypeVar("_Record")
_SplitName = Annotated[str, AfterValidator(_split_name)]
_PlainName = Annotated[str, AfterValidator(_plain_name)]


@dataclass(frozen=True)
class ImageSource:
    """An image that is annotated: what it is called, where it lies and what it is.

    `digest` is of its pixels, `shape` (H, W), `pixel_size` (y, x) in micrometres, `plane` the
    place in a stack. The same pixels are the same source, wherever the file lies.
    """

    name: str
    digest: str
    shape: tuple[int, int]
    path: str | None = None
    pixel_size: tuple[float, float] | None = None
    plane: tuple[int, ...] = ()

    @classmethod
    def from_image(
        cls,
        rgb: Any,
        name: str,
        path: str | os.PathLike[str] | None = None,
        pixel_size: Sequence[float] | None = None,
        plane: Sequence[int] = (),
    ) -> ImageSource:
        """For an image (H, W, 3 or 4), also a lazy one."""
        return cls(
            name,
            pixel_digest(rgb),
            (int(rgb.shape[0]), int(rgb.shape[1])),
            None if path is None else os.path.abspath(path),
            None if pixel_size is None else (float(pixel_size[0]), float(pixel_size[1])),
            tuple(int(k) for k in plane),
        )

    @classmethod
    def from_json(cls, content: Any) -> ImageSource:
        """From the content of a JSON file; a `ValueError` where it is something else."""
        return _SOURCE_ADAPTER.validate_python(content)

    def is_changed_version_of(self, other: ImageSource) -> bool:
        """Whether it lies in the file of another image, is as large, and has other pixels.

        It may be the same picture saved again, or another one under the same name: only a person
        can tell.
        """
        here, there = ((one.path, one.plane, one.shape) for one in (self, other))
        return self.path is not None and here == there and self.digest != other.digest

    @property
    def id(self) -> str:
        """A name for files: readable, plain ASCII, and another one for every other image."""
        what = f"{self.digest}\0{','.join(map(str, self.plane))}"
        readable = slug(PurePath(self.name).stem or self.name)
        return f"{readable}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"


_SOURCE_ADAPTER = TypeAdapter(ImageSource)


@dataclass
class ProjectManifest:
    """What project.json holds; `one` says how a single image is split, see `describe_split`.

    `colours` are "#rrggbb" by class; of a class without one, any. `types` are the cell types, and
    `type_colours` theirs. `added` is the `annotations_digest` of each image when it was added.
    """

    classes: list[str]
    seed: int = 0
    created: str = ""
    split: dict[str, _SplitName] = field(default_factory=dict)
    one: str = ""
    training_size: int = 0
    colours: dict[str, str] = field(default_factory=dict)
    format: int = FORMAT_VERSION
    program: str = __version__
    types: list[str] = field(default_factory=list)
    type_colours: dict[str, str] = field(default_factory=dict)
    added: dict[str, str] = field(default_factory=dict)


@dataclass
class CropRecord:
    """Where a training crop comes from; `counts` are labels and numbers of boxes as "0:12 1:3"."""

    file: _PlainName
    split: _SplitName
    source: _PlainName
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


@dataclass
class CellRecord:
    """A cell that has a type: its box in pixels of a file in `cells`, and where that comes from.

    The file is a window of the image `source`, at x, y, and `width` × `height` pixels large.
    `reviewed`: whether somebody has given or confirmed the type, and not a classifier alone.
    """

    file: _PlainName
    split: _SplitName
    source: _PlainName
    type: str
    x1: float
    y1: float
    x2: float
    y2: float
    x: int
    y: int
    width: int
    height: int
    reviewed: bool = True

    def image(self) -> str:
        """Its place in the project."""
        return f"{CELLS_DIR}/{self.file}.png"


_MANIFEST = TypeAdapter(ProjectManifest)
_CROP_RECORD, _CELL_RECORD = TypeAdapter(CropRecord), TypeAdapter(CellRecord)


@contextmanager
def explain_disk_errors(root: Path, doing: str) -> Iterator[None]:
    """Turn errors of the disk into a `ProjectError` of one sentence; `doing` completes "to …"."""
    try:
        yield
    except FileError:
        raise
    except OSError as error:
        raise ProjectError(_disk_error_message(root, doing, error)) from error


def _disk_error_message(root: Path, doing: str, error: OSError) -> str:
    if error.errno in _DISK_FULL_ERRNOS:
        return (
            f"{root}: no space left on the disk to {doing}; make some and try again. What was "
            "saved before is as it was."
        )
    if error.errno in _DRIVE_GONE_ERRNOS and not (root / PROJECT_FILE).exists():
        return (
            f"{root}: the project's folder is gone, so it is not possible to {doing}; connect its "
            "drive again. Until then keep the viewer open."
        )
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return f"{root}: no permission to {doing}; choose a folder that you may write to."
    return f"{root}: it was not possible to {doing} ({system_reason(error)})."


def read_json_object(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file; `what` it should be is named where it is none."""
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise ProjectError(f"{path}: damaged, or not {what}.") from error
    if not isinstance(content, dict):
        raise ProjectError(f"{path}: damaged, or not {what}.")
    return content


def read_manifest(root: Path) -> ProjectManifest:
    """project.json; of a newer version, what can be understood of it."""
    path = root / PROJECT_FILE
    try:
        manifest = _MANIFEST.validate_json(regular_file(path).read_bytes(), strict=True)
    except ValidationError as error:
        raise ProjectError(
            f"{path}: damaged, or not a project of napari-beerlanet ({first_problem(error)})."
        ) from error
    manifest.colours = dict(filter(_has_colour, manifest.colours.items()))
    manifest.type_colours = dict(filter(_has_colour, manifest.type_colours.items()))
    return manifest


def _has_colour(entry: tuple[str, Any]) -> bool:
    """Whether a class has a colour that can be drawn; another one is no reason to refuse a file."""
    try:
        parse_colour(entry[1])
    except ValueError:
        return False
    return True


def encode_manifest(manifest: ProjectManifest) -> bytes:
    """As project.json."""
    content = {**asdict(manifest), "format": FORMAT_VERSION, "program": __version__}
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode("utf-8", "replace")


def encode_data_yaml(manifest: ProjectManifest) -> bytes:
    """As data.yaml, relative to the file itself so that the folder may be moved."""
    val = TRAIN if manifest.one == "same" else VAL
    comment = "Made by napari-beerlanet; where each crop comes from is in crops.csv."
    text = format_data_yaml(f"images/{TRAIN}", f"images/{val}", manifest.classes, comment)
    return text.encode("utf-8", "replace")


def clean_class_names(names: Sequence[str]) -> list[str]:
    """Class names with single blanks; none, empty ones and duplicates are refused."""
    if not names or not all(str(name).split() for name in names):
        raise ProjectError("A project needs at least one class, and each a name.")
    return clean_names(names, "class")


def clean_names(names: Sequence[str], noun: str) -> list[str]:
    """Names of classes or types with single blanks; empty ones and duplicates are refused."""
    clean = [" ".join(str(name).split()) for name in names]
    if not all(clean):
        raise ProjectError(f"Each {noun} needs a name.")
    folded = [name.casefold() for name in clean]
    counts = Counter(folded)
    duplicates = [name for name in clean if counts[name.casefold()] > 1]
    if duplicates:
        raise ProjectError(
            f"The {noun} {shortened(duplicates[0])} is there twice; rename one of them."
        )
    return clean


def read_crop_records(root: Path) -> list[CropRecord]:
    """crops.csv."""
    return _read_table(root / CROPS_FILE, _CROP_RECORD, "it says where each crop comes from")


def read_cell_records(root: Path) -> list[CellRecord]:
    """cells.csv."""
    return _read_table(root / CELLS_FILE, _CELL_RECORD, "it has the cells with a type")


def _read_table(path: Path, adapter: TypeAdapter[_Record], what: str) -> list[_Record]:
    try:
        with regular_file(path).open(newline="", encoding="utf-8") as file:
            return [adapter.validate_python(_row_texts(entry)) for entry in csv.DictReader(file)]
    except FileNotFoundError:
        return []
    except (ValueError, csv.Error) as error:
        why = first_problem(error) if isinstance(error, ValidationError) else error_detail(error)
        raise ProjectError(f"{path}: damaged ({why}); {what}.") from error


def _row_texts(entry: dict[Any, Any]) -> dict[str, Any]:
    """A row's cells by column; a `ValueError` where it has more or fewer than the header."""
    if None in entry or None in entry.values():
        raise ValueError("a row has not as many cells as the header")
    return {column: csv_text(cell) for column, cell in entry.items()}


def encode_records(kind: type[CropRecord] | type[CellRecord], records: Sequence[Any]) -> bytes:
    """As crops.csv or cells.csv."""
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, [part.name for part in fields(kind)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(
        {name: csv_cell(value) for name, value in asdict(record).items()} for record in records
    )
    return text.getvalue().encode("utf-8", "replace")


def read_annotation_file(path: Path) -> dict[str, Any]:
    """A file's content, with a source and a format that is known."""
    content = read_json_object(path, "annotations of napari-beerlanet")
    if not isinstance(content.get("source"), dict) or not isinstance(content.get("format"), int):
        raise ProjectError(f"{path}: damaged, or not annotations of napari-beerlanet.")
    if content["format"] > FORMAT_VERSION:
        raise ProjectError(f"{path}: of a newer version of this program; update napari-beerlanet.")
    return content


def read_image_source(path: Path) -> ImageSource:
    """The image that a file is about."""
    content = read_annotation_file(path)
    try:
        return ImageSource.from_json(content["source"])
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise ProjectError(f"{path}: damaged; it does not say which image it is about.") from error


def read_annotations(path: Path, source: ImageSource) -> Annotations:
    """The annotations in a file."""
    content = read_annotation_file(path)
    try:
        return Annotations.from_json(content, source.shape)
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise ProjectError(f"{path}: damaged; remove it to annotate the image again.") from error


def encode_annotations(source: ImageSource, annotations: Annotations) -> bytes:
    """An image's annotations as a file."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    content = {
        "format": FORMAT_VERSION,
        "saved": now,
        "source": asdict(source),
        **annotations.to_json(),
    }
    return _to_json_bytes(content)


def annotations_digest(
    source: ImageSource, content: Mapping[str, Any], classes: Sequence[str], types: Sequence[str]
) -> str:
    """Digest of an image's pixels and annotations, as `Annotations.to_json` has them.

    Names count by their place in `classes` and `types`: a new name changes no training crop.
    """
    place = {name: k for k, name in enumerate(classes)}
    type_place = {name: k for k, name in enumerate(types)}
    objects = [
        (o["id"], place.get(o["class"], o["class"]), o["box"], o["status"], type_place.get(t, t))
        for o in content["objects"]
        for t in [o.get("type", "")]
    ]
    regions = sorted(map(str, content["regions"]))
    return hashlib.sha256(f"{source.digest} {sorted(objects)} {regions}".encode()).hexdigest()


def encode_with_renamed_classes(path: Path, renamed: Mapping[str, str]) -> bytes:
    """An annotation file with other names for its classes."""
    content = read_annotation_file(path)
    content["classes"] = [renamed.get(name, name) for name in content["classes"]]
    for entry in content["objects"]:
        entry["class"] = renamed.get(entry["class"], entry["class"])
    return _to_json_bytes(content)


def encode_with_renamed_types(path: Path, renamed: Mapping[str, str]) -> bytes | None:
    """An annotation file with other names for its types; None where it has none of them."""
    content = read_annotation_file(path)
    affected = [entry for entry in content["objects"] if entry.get("type") in renamed]
    for entry in affected:
        entry["type"] = renamed[entry["type"]]
    return _to_json_bytes(content) if affected else None


def _to_json_bytes(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, ensure_ascii=False) + "\n").encode("utf-8", "replace")
