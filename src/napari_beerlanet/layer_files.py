"""Boxes as the data of a Shapes layer, and back: what readers and writers have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import RESERVED, Detections
from napari_beerlanet.core.colours import class_colours
from napari_beerlanet.core.files import FileError

LayerData = tuple[Any, dict[str, Any], str]
Index = tuple[int, ...]

OWNER = "napari-beerlanet"
"""The key under which a layer's metadata says where it comes from, as in `ui.layers`."""
ENDINGS = (".geojson", ".json", ".xml", ".txt", ".csv")
"""Of files of boxes."""
UNNAMED = "object"
"""The class of shapes that have none."""

_CLASS = ("class", "label", "category", "classification")
_SCORE = ("confidence", "score", "probability")


def shapes_data(
    parts: Mapping[Index, Detections],
    name: str,
    place: Mapping[str, Any],
    colours: Mapping[str, str] | None = None,
    **told: Any,
) -> LayerData:
    """Data of a Shapes layer with the boxes of each plane, and all their columns as features.

    `place`: keyword arguments that put it where the image is; `colours` "#rrggbb" by class, for
    those that the file has none of; `told` goes into the metadata.
    """
    from napari_beerlanet.ui.detection_shapes import corners_of

    names = list(dict.fromkeys(name for part in parts.values() for name in part.names))
    shades = dict(zip(names, class_colours(len(names)), strict=True)) | dict(colours or {})
    for part in parts.values():
        shades |= part.report.get("colours", {})
    kinds = _joined([np.array(p.names, dtype=object)[p.labels] for p in parts.values()])
    corners = [corners_of(part.xyxy, index) for index, part in parts.items()]
    boxes = [box for part in corners for box in part]
    sides = [p.xyxy[:, 2:] - p.xyxy[:, :2] for p in parts.values()]
    typical = float(np.median(np.concatenate(sides))) if boxes else 20.0
    features = {
        "class": kinds,
        "confidence": np.concatenate([p.scores for p in parts.values()]),
        **_columns(list(parts.values())),
    }
    look = {
        "name": name,
        "shape_type": "rectangle",
        "features": features,
        "edge_color": [shades[kind] for kind in kinds] or "#0072b2",
        "face_color": "transparent",
        "edge_width": max(typical / 25, 0.5),
        "metadata": {OWNER: {"role": "boxes", "classes": names, **told}},
        **place,
    }
    leading = {len(index) for index in parts}
    look.setdefault("ndim", 2 + max(leading, default=0))
    return boxes or None, look, "shapes"


def detections_of(data: Any, attributes: Mapping[str, Any]) -> dict[Index, Detections]:
    """The boxes of a Shapes layer, by plane, with its features; {} stands for no shapes.

    Shapes that enclose nothing (lines, paths) are refused: nothing is left out in silence.
    """
    from napari_beerlanet.ui.annotate_shapes import read_boxes

    shapes = list(data) if data is not None else []
    kinds = attributes.get("shape_type", "rectangle")
    kinds = [kinds] * len(shapes) if isinstance(kinds, str) else list(kinds)
    boxes = read_boxes(shapes, kinds)
    if boxes.notes:
        raise FileError(f"{attributes.get('name', 'The layer')}: {boxes.notes[0]}")
    table = {str(name): np.asarray(v) for name, v in (attributes.get("features", {})).items()}
    table = {name: v[boxes.which] for name, v in table.items() if len(v) == len(shapes)}
    known = _told(attributes).get("classes", [])
    whole = from_table(boxes.xyxy, table, known)
    colours = _edge_colours(attributes.get("edge_color"), boxes.which, table)
    whole = replace(whole, report={"colours": colours}) if colours else whole
    planes: dict[Index, list[int]] = {}
    order = np.argsort(-_scores(table, len(boxes.xyxy)), kind="stable")
    for row, plane in enumerate(boxes.planes[order].tolist()):
        planes.setdefault(tuple(plane), []).append(row)
    return {index: whole[rows] for index, rows in sorted(planes.items())}


def from_table(
    xyxy: npt.NDArray[Any], table: Mapping[str, npt.NDArray[Any]], known: Sequence[str] = ()
) -> Detections:
    """Boxes (n, 4) with their class, confidence and further columns from a layer's table."""
    words = next((table[name] for name in _CLASS if name in table), None)
    said = [UNNAMED] * len(xyxy) if words is None else [_word(word) for word in words]
    names = list(dict.fromkeys([*map(str, known), *said]))
    labels = np.array([names.index(word) for word in said], np.int64)
    used = {next((n for n in group if n in table), "") for group in (_CLASS, _SCORE)}
    columns = {
        name: _plain(values)
        for name, values in table.items()
        if name not in used and name not in RESERVED
    }
    return Detections(xyxy, labels, _scores(table, len(xyxy)), names, columns)  # type: ignore[arg-type]


def _edge_colours(
    edges: Any, which: npt.NDArray[np.int64], table: Mapping[str, npt.NDArray[Any]]
) -> dict[str, str]:
    """The colour of each class: that of its first shape."""
    words = next((table[name] for name in _CLASS if name in table), None)
    shades = np.asarray(edges) if edges is not None else np.empty(0)
    if words is None or shades.ndim != 2 or len(shades) <= int(which.max(initial=0)):
        return {}
    eight = np.rint(np.clip(shades[which, :3].astype(float), 0, 1) * 255).astype(int)
    colours: dict[str, str] = {}
    for word, (red, green, blue) in zip(words, eight, strict=True):
        colours.setdefault(_word(word), f"#{red:02x}{green:02x}{blue:02x}")
    return colours


def with_image(found: Detections, shape: Any, pixel_size: Any) -> Detections:
    """With what is known of the image."""
    shape = tuple(int(side) for side in shape) if shape is not None else None
    return replace(found, image_shape=shape, pixel_size=pixel_size)


def _told(attributes: Mapping[str, Any]) -> dict[str, Any]:
    metadata = attributes.get("metadata")
    told = metadata.get(OWNER) if isinstance(metadata, Mapping) else None
    return dict(told) if isinstance(told, Mapping) else {}


def _scores(table: Mapping[str, npt.NDArray[Any]], count: int) -> npt.NDArray[np.float32]:
    """(n,) from 0 to 1; what has none is certain."""
    values = next((table[name] for name in _SCORE if name in table), None)
    if values is None:
        return np.ones(count, np.float32)
    try:
        numbers = values.astype(np.float32)
    except (TypeError, ValueError):
        return np.ones(count, np.float32)
    return np.clip(np.where(np.isfinite(numbers), numbers, 1), 0, 1).astype(np.float32)


def _word(value: Any) -> str:
    return UNNAMED if _missing(value) else str(value)


def _missing(value: Any) -> bool:
    """None, NaN, or pandas' own NA."""
    same = value == value
    return value is None or not isinstance(same, (bool, np.bool_)) or not same


def _plain(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Columns of pandas' kinds as bool, number or text."""
    if values.dtype.kind in "biuf":
        return values
    present = [v for v in values if not _missing(v)]
    if present and all(isinstance(v, (bool, np.bool_)) for v in present):
        return values.astype(bool) if len(present) == len(values) else values.astype(str)
    if present and all(isinstance(v, (int, float, np.number)) for v in present):
        return np.array([np.nan if _missing(v) else v for v in values], np.float64)
    return np.array(["" if _missing(v) else str(v) for v in values], str)


def _columns(parts: Sequence[Detections]) -> dict[str, npt.NDArray[Any]]:
    """The columns of all parts, one after another; where one lacks a column it has no value."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {}
    for name in names:
        kinds = {part.columns[name].dtype.kind for part in parts if name in part.columns}
        missing: Any = "" if "U" in kinds else np.nan
        pieces = [p.columns.get(name, np.array([missing] * len(p), dtype=object)) for p in parts]
        columns[name] = pieces[0] if len(pieces) == 1 else _joined(pieces)
    return columns


def _joined(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, object), *(piece.astype(object) for piece in pieces)])
