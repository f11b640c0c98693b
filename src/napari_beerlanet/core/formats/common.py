"""Shared by all formats: reading and writing text, parse errors, rows to `Detections`."""

from __future__ import annotations

import json
import math
import os
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import (
    RESERVED_COLUMNS,
    TYPE_COLUMN,
    Detections,
    is_type_column,
    types_of_columns,
)
from napari_beerlanet.core.common.messages import (
    error_detail,
    name_list,
    path_text,
    shortened,
    system_reason,
)
from napari_beerlanet.core.common.storage import FileError, atomic_path

ImageShape = tuple[int, int]
AnyPath = str | os.PathLike[str]

MAX_FILE_BYTES = 1 << 28
"""Bytes of a file that is read: a million boxes have room."""
MAX_COLUMNS = 500
"""Further columns of a file that are read."""
MIN_COLUMNS = 32
"""Further columns that are read in any case, also where few boxes have a value in them."""
MAX_TEXT_LENGTH = 1000
"""Characters of a class's name, or of a text in a further column."""
MAX_LISTED_CLASSES = 1000
"""Classes that each image of a file lists also where it has no such object."""
NOTES = "notes"
"""What `Detections.report` calls sentences on what was left out of a file."""


@dataclass
class BoxRows:
    """Boxes as they are read: one entry per object in each list."""

    classes: list[str] = field(default_factory=list)
    boxes: list[Sequence[float]] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    extras: list[dict[str, Any]] = field(default_factory=list)

    def add(
        self, name: str, box: Sequence[float], score: float | None, extra: dict[str, Any]
    ) -> None:
        """Add an object; one without a score is certain."""
        self.classes.append(name)
        self.boxes.append(box)
        self.scores.append(1.0 if score is None else float(score))
        self.extras.append(extra)


def read_bytes(path: AnyPath, empty: bool = False) -> bytes:
    """A file's content; `empty` says whether there may be none."""
    path = Path(path)
    if not os.path.exists(path):  # or no file can have such a name
        raise FileError(f"{path_text(path)}: there is no such file.")
    if path.is_dir():
        raise FileError(f"{path}: a folder, not a file.")
    if not path.is_file():  # reading from a pipe would wait for ever
        raise FileError(f"{path}: not a regular file.")
    try:
        with path.open("rb") as file:
            content = file.read(MAX_FILE_BYTES + 1)
    except PermissionError as error:
        raise FileError(f"{path}: no permission to read it.") from error
    except OSError as error:
        raise FileError(f"{path}: cannot be read ({system_reason(error)}).") from error
    if len(content) > MAX_FILE_BYTES:
        raise FileError(
            f"{path}: larger than {MAX_FILE_BYTES >> 20} MB, the limit for a file of boxes; "
            "save it in parts."
        )
    if not empty and not content.strip():
        raise FileError(f"{path}: the file is empty.")
    return content


def read_text(path: AnyPath, empty: bool = False) -> str:
    """A file's text; `empty` says whether there may be none."""
    try:
        return read_bytes(path, empty).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileError(f"{path}: not a text file in UTF-8.") from error


def check_token_count(path: AnyPath, content: str | bytes, mark: Any, most: int) -> None:
    """Refuse what would take minutes, by how often `mark` is in it."""
    if content.count(mark) > most:
        raise FileError(f"{path}: more than {most:,} values; split it into several files.")


def write_text(path: AnyPath, text: str) -> None:
    """Write text as UTF-8, whole or not at all; a file's name may hold what is no character."""
    try:
        with atomic_path(path) as unfinished:
            unfinished.write_bytes(text.encode("utf-8", "replace"))
    except OSError as error:
        raise FileError(f"{path}: cannot be written ({system_reason(error)}).") from error


def save_json(path: AnyPath, content: Any) -> None:
    """Write JSON in plain characters; where some are none (half a pair), in escapes."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False)
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        text = json.dumps(content, allow_nan=False)
    write_text(path, text)


def load_json(path: AnyPath, what: str) -> Any:
    """A JSON file's content; `what` it should be is named where it is none."""
    text = read_text(path)
    with parsing(path, what):
        return json.loads(text)


@contextmanager
def parsing(path: AnyPath, what: str) -> Iterator[None]:
    """Turn whatever strange content raises into one sentence."""
    try:
        yield
    except FileError:
        raise
    except KeyError as error:
        raise FileError(f"{path}: not {what} as expected: {error} is missing.") from error
    except (ValueError, TypeError, AttributeError, LookupError, ArithmeticError) as error:
        detail = error_detail(error, 160)
        raise FileError(f"{path}: not {what} that can be read: {detail}.") from error
    except RecursionError as error:
        raise FileError(f"{path}: not {what} that can be read: it is nested too deep.") from error


def to_detections(
    path: AnyPath,
    rows: BoxRows,
    names: Sequence[str] | None,
    image_shape: ImageShape | None = None,
    known: Sequence[str] = (),
) -> Detections:
    """Rows as Detections with the classes `names`, or else `known` and what else occurs."""
    classes = list(dict.fromkeys([*known, *rows.classes])) if names is None else list(names)
    longest = max(map(len, rows.classes), default=0)
    if longest > MAX_TEXT_LENGTH:
        raise FileError(
            f"{path}: a class has a name of {longest:,} characters; up to {MAX_TEXT_LENGTH:,} are "
            "read."
        )
    place = {name: label for label, name in reversed(list(enumerate(classes)))}
    for name in rows.classes:
        if name not in place:
            have = name_list(classes) or "none"
            raise FileError(
                f'{path}: the class "{shortened(name)}" is not one of the requested ones ({have}).'
            )
    with np.errstate(over="ignore"):  # what is too large becomes infinite, and is refused
        boxes = np.array(rows.boxes, np.float64).reshape(-1, 4).astype(np.float32)
    columns, notes = _extra_columns(path, rows.extras)
    types = types_of_columns(columns) if TYPE_COLUMN in columns else []
    report: dict[str, Any] = {"types": types} if types else {}
    return Detections(
        boxes,
        np.array([place[name] for name in rows.classes], np.int64),
        np.array(rows.scores, np.float32),
        classes,
        columns,
        image_shape=image_shape,
        report=report | ({NOTES: notes} if notes else {}),
    )


def agreed_shape(
    path: AnyPath, width: Any, height: Any, given: ImageShape | None
) -> ImageShape | None:
    """(H, W) as the file and the caller know it; where both do, they must agree."""
    stated = (int(height or 0), int(width or 0))
    if min(stated) <= 0:
        return given
    if given is not None and tuple(given) != stated:
        raise FileError(
            f"{path}: made for an image of {shortened(stated[1])} x {shortened(stated[0])} pixels, "
            f"but this one has {given[1]} x {given[0]}."
        )
    return stated


def to_plain(value: Any) -> Any:
    """A value of an array as JSON has it: no more digits than it takes, None for no number."""
    if isinstance(value, (np.bool_, bool)):
        return bool(value)
    if isinstance(value, (np.integer, int)):
        return int(value)
    if isinstance(value, (np.floating, float)):
        number = float(str(value))
        return number if math.isfinite(number) else None
    return None if value is None else str(value)


def parse_value(text: str, column: str = "") -> Any:
    """What `to_plain` gave, from text: None, bool, int, float or the text itself.

    A cell type is text, whatever it looks like.
    """
    if column == TYPE_COLUMN:
        return text
    if text in ("", "True", "False"):
        return {"": None, "True": True, "False": False}[text]
    if re.fullmatch(r"-?[0-9]{1,18}", text):
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


@dataclass(frozen=True)
class DetectionRecord:
    """A detection to write: `box` x1, y1, x2, y2 with three decimals, `extra` further columns.

    All plain, as JSON has it; columns without a value are left out.
    """

    label: int
    name: str
    box: list[float]
    score: float
    extra: dict[str, Any]


def detection_records(detections: Detections) -> Iterator[DetectionRecord]:
    """The detections one by one."""
    columns = {name: [to_plain(v) for v in values] for name, values in detections.columns.items()}
    boxes, scores = (
        rounded_coordinates(detections.xyxy),
        [to_plain(score) for score in detections.scores],
    )
    for i, label in enumerate(detections.labels.tolist()):
        extra = {name: v[i] for name, v in columns.items() if v[i] is not None}
        yield DetectionRecord(label, detections.names[label], boxes[i], scores[i], extra)


def rounded_coordinates(values: npt.NDArray[Any]) -> list[Any]:
    """Pixels (n, ...) as lists of numbers with three decimals."""
    rounded: list[Any] = (np.round(values.astype(np.float64), 3) + 0.0).tolist()
    return rounded


def as_column(values: Sequence[Any]) -> npt.NDArray[Any]:
    """Values of one kind as bool, int64 or float32 (None is NaN), others as text."""
    kinds = {type(value) for value in values}
    if kinds == {bool}:
        return np.array(values, bool)
    if kinds == {int} and max(map(abs, values)) < 2**63:
        return np.array(values, np.int64)
    if kinds <= {int, float, type(None)} and kinds != {type(None)}:
        numbers = np.array([math.nan if v is None else float(v) for v in values])
        with np.errstate(over="ignore"):
            return numbers.astype(np.float32)
    # Objects: NumPy's own text gives every row the room of the longest.
    return np.array(["" if v is None else str(v) for v in values], object)


def _extra_columns(
    path: AnyPath, rows: list[dict[str, Any]]
) -> tuple[dict[str, npt.NDArray[Any]], list[str]]:
    """Further columns (n,) by name, and sentences on what was left out."""
    counts = Counter(name for row in rows for name in row)
    names = {name: None for name in counts if len(name) <= MAX_TEXT_LENGTH}
    # Columns that are almost empty would take many times the room of the file.
    filled = 4 * counts.total() // max(len(rows), 1)
    most = min(MAX_COLUMNS, max(MIN_COLUMNS, filled))
    if len(names) > most:  # those that most objects have
        names = dict.fromkeys(name for name, _ in counts.most_common(most) if name in names)
    notes = []
    if len(names) < len(counts):
        notes.append(
            f"{path}: {len(names):,} of {len(counts):,} further columns were read, those that most "
            "boxes have."
        )
    cut: set[str] = set()
    columns = {}
    for name in names:
        values = [row.get(name) for row in rows]
        if any(isinstance(value, str) and len(value) > MAX_TEXT_LENGTH for value in values):
            cut.add(name)
            values = [v[:MAX_TEXT_LENGTH] if isinstance(v, str) else v for v in values]
        kept = name if name not in RESERVED_COLUMNS else f"{name} (file)"
        columns[kept] = _extra_column(name, values)
    if cut:
        listed = ", ".join(f'"{name[:40]}"' for name in sorted(cut)[:3])
        notes.append(
            f"{path}: texts of more than {MAX_TEXT_LENGTH:,} characters were cut ({listed})."
        )
    return columns, notes


def _extra_column(name: str, values: Sequence[Any]) -> npt.NDArray[Any]:
    if name == TYPE_COLUMN:
        return np.array(["" if value is None else str(value) for value in values], object)
    if is_type_column(name) and {type(value) for value in values} <= {int, float, type(None)}:
        return np.array([math.nan if v is None else v for v in values], np.float32)
    return as_column(values)
