"""CSV (RFC 4180): a header, one line per detection, in pixels and micrometres."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import RESERVED_COLUMNS, TYPE_COLUMN, Detections
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.storage import FileError, csv_cell, csv_text
from napari_beerlanet.core.formats.common import (
    AnyPath,
    BoxRows,
    ImageShape,
    parse_value,
    parsing,
    read_text,
    to_detections,
    to_plain,
    write_text,
)

_BOX_COLUMNS = ("x1", "y1", "x2", "y2")


def write_csv(path: AnyPath, detections: Detections, image_name: str = "") -> None:
    """Write class, confidence, box, size and centre, and every further column.

    Micrometres (columns that end in _um) are there when the pixel size is known, a first column
    `image` when the image has a name.
    """
    columns = {name: _cells(name, values) for name, values in detections.table().items()}
    if image_name:
        columns = {"image": [csv_cell(image_name)] * len(detections), **columns}
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(map(csv_cell, columns))
    writer.writerows(zip(*columns.values(), strict=True))
    write_text(path, text.getvalue())


def read_csv(
    path: AnyPath,
    image_shape: ImageShape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read a table with at least the columns class, x1, y1, x2, y2 in pixels.

    Cells may be divided by semicolons or tabs, as spreadsheets do; then commas are decimal points.
    """
    header, body, delimiter = _read_table(path)
    with parsing(path, "a CSV table"):
        _check_header(path, header)
        lines = _lines_of_image(path, header, body, image_name)
        return _read_lines(path, header, lines, delimiter, image_shape, names)


def read_csv_images(
    path: AnyPath, names: Sequence[str] | None = None
) -> Iterator[tuple[str, Detections]]:
    """The boxes of each image that a table is about, in the order in which they come first."""
    header, body, delimiter = _read_table(path)
    with parsing(path, "a CSV table"):
        _check_header(path, header)
        place = header.index("image")
        by_image: dict[str, list[list[str]]] = {}
        for line in body:
            by_image.setdefault(line[place] if len(line) > place else "", []).append(line)
        for image, lines in by_image.items():
            yield image, _read_lines(path, header, lines, delimiter, None, names)


def csv_image_names(path: AnyPath) -> list[str]:
    """The names of the images that a table is about, none where it does not say."""
    header, body, _ = _read_table(path)
    if "image" not in header:
        return []
    place = header.index("image")
    return list(dict.fromkeys(line[place] for line in body if len(line) > place))


def _read_table(path: AnyPath) -> tuple[list[str], list[list[str]], str]:
    """Header, other lines and delimiter of a table."""
    text = read_text(path)
    with parsing(path, "a CSV table"):
        delimiter = _delimiter(text)
        header, *body = _split_lines(text, delimiter)
        return header, body, delimiter


def _read_lines(
    path: AnyPath,
    header: list[str],
    lines: list[list[str]],
    delimiter: str,
    image_shape: ImageShape | None,
    names: Sequence[str] | None,
) -> Detections:
    rows = BoxRows()
    for number, line in enumerate(lines, 1):
        if len(line) != len(header):
            raise ValueError(f"row {number} has {len(line)} cells, the header {len(header)}")
        _add_row(rows, dict(zip(header, line, strict=True)), delimiter != ",")
    return to_detections(path, rows, names, image_shape)


def _cells(name: str, values: npt.NDArray[Any]) -> list[str]:
    if name in RESERVED_COLUMNS and values.dtype.kind == "f":
        digits = 6 if name == "confidence" else 4 if name.endswith("_um") else 3
        return [f"{v + 0.0:.{digits}f}".rstrip("0").rstrip(".") for v in values.tolist()]
    cells = [to_plain(v) for v in values]
    return ["" if cell is None else csv_cell(str(cell)) for cell in cells]


def _delimiter(text: str) -> str:
    header = text.split("\n", 1)[0]
    return max(",;\t", key=header.count)


def _split_lines(text: str, delimiter: str) -> list[list[str]]:
    try:
        rows = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
        return [[csv_text(cell) for cell in row] for row in rows if row]
    except csv.Error as error:
        raise ValueError(str(error)) from error


def _check_header(path: AnyPath, header: list[str]) -> None:
    missing = [name for name in ("class", *_BOX_COLUMNS) if name not in header]
    if missing:
        raise FileError(
            f"{path}: not a table of boxes: its header lacks {', '.join(missing)}; "
            "needed are class, x1, y1, x2, y2."
        )
    if len(set(header)) < len(header):
        raise ValueError("two columns have the same name")


def _lines_of_image(
    path: AnyPath, header: list[str], body: list[list[str]], image_name: str
) -> list[list[str]]:
    """The lines about one image."""
    if "image" not in header:
        return body
    place = header.index("image")
    images = {line[place] for line in body if len(line) > place}
    if len(images) <= 1:
        return body
    if image_name not in images:
        raise FileError(
            f"{path}: about {len(images)} images, of which {quoted(image_name)} is none; "
            "say which is meant by its name."
        )
    return [line for line in body if len(line) <= place or line[place] == image_name]


def _add_row(rows: BoxRows, cells: dict[str, str], decimal_comma: bool) -> None:
    if decimal_comma:
        words = ("class", TYPE_COLUMN)
        cells = {n: c if n in words else _decimal_point(c) for n, c in cells.items()}
    confidence = cells.get("confidence", "").strip()
    others = {name: cell for name, cell in cells.items() if name and name not in RESERVED_COLUMNS}
    extra = {name: parse_value(cell, name) for name, cell in others.items()}
    box = [float(cells[name]) for name in _BOX_COLUMNS]
    rows.add(cells["class"], box, float(confidence) if confidence else None, extra)


def _decimal_point(cell: str) -> str:
    return cell.replace(",", ".") if re.fullmatch(r"-?[0-9]+,[0-9]+(e-?[0-9]+)?", cell) else cell
