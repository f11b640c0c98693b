"""Detections and annotations to files and back: CSV, GeoJSON (QuPath), YOLO, COCO, Pascal VOC.

A file is written whole or not at all. Coordinates come back to within a hundredth of a pixel, and
what cannot be read is a `FileError` of one sentence.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats.coco import (
    coco_image_names,
    read_coco,
    read_coco_images,
    write_coco,
)
from napari_beerlanet.core.formats.common import load_json
from napari_beerlanet.core.formats.csv_table import (
    csv_image_names,
    read_csv,
    read_csv_images,
    write_csv,
)
from napari_beerlanet.core.formats.geojson import UNCLASSIFIED, read_geojson, write_geojson
from napari_beerlanet.core.formats.voc import read_voc, voc_image_name, write_voc
from napari_beerlanet.core.formats.yolo import (
    CLASSES_FILE,
    ClassesFile,
    read_yolo,
    write_classes,
    write_yolo,
    write_yolo_with_classes,
)

__all__ = [
    "CLASSES_FILE",
    "FORMATS",
    "UNCLASSIFIED",
    "ClassesFile",
    "Format",
    "detect_format",
    "image_names",
    "load_json",
    "read_coco",
    "read_coco_images",
    "read_csv",
    "read_csv_images",
    "read_detections",
    "read_geojson",
    "read_voc",
    "read_yolo",
    "write_classes",
    "write_coco",
    "write_csv",
    "write_detections",
    "write_geojson",
    "write_voc",
    "write_yolo",
    "write_yolo_with_classes",
]


@dataclass(frozen=True)
class Format:
    """How files of a format end, and the two functions that write and read one."""

    suffix: str
    write: Callable[..., None]
    read: Callable[..., Detections]


FORMATS = {
    "csv": Format(".csv", write_csv, read_csv),
    "geojson": Format(".geojson", write_geojson, read_geojson),
    "yolo": Format(".txt", write_yolo, read_yolo),
    "coco": Format(".json", write_coco, read_coco),
    "voc": Format(".xml", write_voc, read_voc),
}
"""All formats by name."""


def write_detections(
    path: str | os.PathLike[str],
    detections: Detections,
    image_name: str = "",
    format: str | None = None,
    colours: Sequence[str] | None = None,
) -> None:
    """Write detections in a format of `FORMATS`: the one named, or as the path's ending says.

    `colours` ("#rrggbb" by class) are for formats that have colours.
    """
    kind = _format_by_suffix(Path(path)) if format is None else _check_format_name(format)
    if kind == "geojson":
        write_geojson(path, detections, image_name, colours=colours)
    else:
        FORMATS[kind].write(path, detections, image_name)


def read_detections(
    path: str | os.PathLike[str],
    image_shape: tuple[int, int] | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
    format: str | None = None,
) -> Detections:
    """Read detections or annotations of one image; without confidences they all have 1.

    The format is the one named, or found from the path's ending and content. `image_shape` (H, W)
    is needed for YOLO. `names` are the classes to sort into; another class is a `FileError`. With
    None they are the file's own. `image_name` chooses where a file is about several images.
    """
    kind = detect_format(path) if format is None else _check_format_name(format)
    return FORMATS[kind].read(path, image_shape=image_shape, names=names, image_name=image_name)


def detect_format(path: str | os.PathLike[str]) -> str:
    """The format of a file that is there, by its ending and, of a .json, by its content."""
    kind = _format_by_suffix(Path(path))
    return "geojson" if kind == "coco" and not _looks_like_coco(Path(path)) else kind


def image_names(path: str | os.PathLike[str], format: str | None = None) -> list[str]:
    """Names of the images that a file says it is about; none where it has no place for that."""
    kind = detect_format(path) if format is None else _check_format_name(format)
    if kind == "voc":
        return [name for name in [voc_image_name(path)] if name]
    names = {"coco": coco_image_names, "csv": csv_image_names}.get(kind)
    return names(path) if names else []


def _first_text(path: Path) -> str:
    """Some text that a file begins with; mostly enough to see what it is."""
    if not path.is_file():
        return ""
    try:
        with path.open("rb") as file:
            return file.read(512).decode("utf-8-sig", "replace")
    except OSError:
        return ""  # reading all of it will say what is wrong


def _check_format_name(name: str) -> str:
    if name.lower() not in FORMATS:
        raise ValueError(f"There is no format {quoted(name)}; there are {', '.join(FORMATS)}.")
    return name.lower()


def _format_by_suffix(path: Path) -> str:
    for name, kind in FORMATS.items():
        if path.suffix.lower() == kind.suffix:
            return name
    endings = ", ".join(kind.suffix for kind in FORMATS.values())
    raise FileError(f"{path}: not a known format of boxes ({endings}).")


def _looks_like_coco(path: Path) -> bool:
    """QuPath writes its GeoJSON as .json, too, with or without a collection around the list."""
    beginning = _first_text(path)
    if re.search(r'"type"\s*:\s*"Feature', beginning):
        return False
    if re.match(r'\s*\{\s*"(images|categories|annotations|info|licenses)"\s*:', beginning):
        return True
    content = load_json(path, "COCO or GeoJSON")
    items = content if isinstance(content, list) else [content]
    kinds = [item.get("type") for item in items[:1] if isinstance(item, dict)]
    return not {"Feature", "FeatureCollection"}.intersection(kinds)
