"""GeoJSON as QuPath writes and reads it: rectangles with class, colour and measurements."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.classes import assign_colours, class_colours, parse_colours
from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.messages import shortened
from napari_beerlanet.core.formats.common import (
    AnyPath,
    BoxRows,
    DetectionRecord,
    ImageShape,
    detection_records,
    load_json,
    parsing,
    save_json,
    to_detections,
)

UNCLASSIFIED = "Unclassified"
"""The class of objects that have none in QuPath."""

_CONFIDENCE = "Confidence"
_DERIVED = ": "  # between the parts of a derived class's name
_CLASSES = "classes"  # beside the features, where these have the colours of their types


def write_geojson(
    path: AnyPath,
    detections: Detections,
    image_name: str = "",
    colours: Sequence[str] | None = None,
    object_type: Literal["detection", "annotation"] = "detection",
) -> None:
    """Write a FeatureCollection in pixels; `colours` are "#rrggbb" by class.

    Without them they are those that were read with the detections, or else ours.
    Numbers are measurements in QuPath, and text is metadata. An object with a cell type has
    QuPath's derived class "RBC: ring", in the type's colour. `image_name` has no place in it.
    """
    shades = parse_colours(colours or _saved_colours(detections), len(detections.names))
    classes = [
        {"name": name, "color": list(shade)}
        for name, shade in zip(detections.names, shades, strict=True)
    ]
    types = detections.types
    type_shades = parse_colours(list(assign_colours(types).values()), len(types))
    type_colours = {name: list(shade) for name, shade in zip(types, type_shades, strict=True)}
    features = [
        _feature(entry, _classification(entry, classes, type_colours), object_type)
        for entry in detection_records(detections)
    ]
    known = {_CLASSES: classes} if types else {}
    save_json(path, {"type": "FeatureCollection", "features": features, **known})


def _classification(
    entry: DetectionRecord, classes: list[dict[str, Any]], type_colours: dict[str, list[int]]
) -> dict[str, Any]:
    cell_type = entry.extra.get(TYPE_COLUMN)
    if not cell_type:
        return classes[entry.label]
    name = f"{entry.name}{_DERIVED}{cell_type}"
    return {"name": name, "color": type_colours[str(cell_type)]}


def _feature(
    entry: DetectionRecord, classification: dict[str, Any], object_type: str
) -> dict[str, Any]:
    x1, y1, x2, y2 = entry.box
    ring = [[x1, y1], [x2, y1], [x2, y2], [x1, y2], [x1, y1]]
    numbers = {name: v for name, v in entry.extra.items() if not isinstance(v, (str, bool))}
    words = {name: str(v) for name, v in entry.extra.items() if isinstance(v, (str, bool))}
    properties = {
        "objectType": object_type,
        "classification": classification,
        "measurements": {_CONFIDENCE: entry.score, **numbers},
    }
    properties |= {"metadata": words} if words else {}
    shape = {"type": "Polygon", "coordinates": [ring]}
    return {"type": "Feature", "geometry": shape, "properties": properties}


def read_geojson(
    path: AnyPath,
    image_shape: ImageShape | None = None,
    names: Sequence[str] | None = None,
    image_name: str = "",
) -> Detections:
    """Read polygons as the boxes around them: a collection, a list of features, or one.

    As older versions of QuPath wrote them, too. Objects inside objects are read as well. The
    classes' colours are in the report, "#rrggbb" by name under "colours".
    """
    content = load_json(path, "GeoJSON")
    with parsing(path, "GeoJSON"):
        rows = BoxRows()
        colours: dict[str, str] = {}
        listed = content.get(_CLASSES) if isinstance(content, dict) else None
        for entry in listed if isinstance(listed, list) else []:
            if _colour(entry) and isinstance(entry.get("name"), str):
                colours[entry["name"]] = _colour(entry)
        for feature in _features(content):
            _add_feature(rows, feature)
            colour = _colour((feature.get("properties") or {}).get("classification"))
            if colour and not rows.extras[-1].get(TYPE_COLUMN):
                colours.setdefault(rows.classes[-1], colour)
        detections = to_detections(path, rows, names, image_shape)
        if not colours:
            return detections
        used = {name: colour for name, colour in colours.items() if name in detections.names}
        return replace(detections, report={**detections.report, "colours": used})


def read_regions(path: AnyPath) -> list[tuple[str, Region]]:
    """The polygons of a file as regions with holes, in pixels, each with a name.

    That is the name of the annotation in QuPath, or else its class and number, "Region 2".
    """
    content = load_json(path, "GeoJSON")
    regions = []
    with parsing(path, "GeoJSON"):
        for number, feature in enumerate(_features(content), 1):
            properties = feature.get("properties") or {}
            given, kind = properties.get("name"), _class_name(properties)
            word = "Region" if kind == UNCLASSIFIED else kind
            name = given if isinstance(given, str) and given else f"{word} {number}"
            regions.append((name, Region("polygon", _outline(feature["geometry"]))))
    return regions


def _outline(geometry: Any) -> npt.NDArray[np.float64]:
    """(k, 2) all rings as one line that fills by the even-odd rule: holes stay holes.

    It goes back to its start after each ring, so that the way there and back cancel each other.
    """
    _bounds(geometry)
    polygons = geometry["coordinates"]
    rings = polygons if geometry["type"] == "Polygon" else [r for p in polygons for r in p]
    lines = [np.array(list(_points(ring)), np.float64).reshape(-1, 2) for ring in rings]
    lines = [line for line in lines if len(line)]
    start = lines[0][:1]
    closed = [part for line in lines for part in (line, line[:1], start)]
    return np.concatenate(closed)


def _features(content: Any) -> Iterator[dict[str, Any]]:
    """All features, those inside others after them."""
    if isinstance(content, dict) and content.get("type") == "FeatureCollection":
        content = content["features"]
    for feature in content if isinstance(content, list) else [content]:
        if not isinstance(feature, dict) or feature.get("type") != "Feature":
            raise ValueError("something other than a Feature is in it")
        yield feature
        properties = feature.get("properties") or {}
        yield from _features(properties.get("childObjects") or properties.get("children") or [])


def _add_feature(rows: BoxRows, feature: dict[str, Any]) -> None:
    properties = feature.get("properties") or {}
    measured = properties.get("measurements") or {}
    if isinstance(measured, list):
        measured = {entry["name"]: entry["value"] for entry in measured}
    extra = {name: _measurement(value) for name, value in measured.items()}
    confidence = extra.pop(_CONFIDENCE, None)
    extra |= {name: str(text) for name, text in (properties.get("metadata") or {}).items()}
    # Of "RBC: ring", the type is in the metadata, too, if we have written it.
    cell_type = extra.get(TYPE_COLUMN)
    name = _class_name(properties)
    name = name.removesuffix(f"{_DERIVED}{cell_type}") if cell_type else name
    rows.add(name, _bounds(feature["geometry"]), confidence, extra)


def _class_name(properties: dict[str, Any]) -> str:
    """A class is text, or an object with a name or, where QuPath derives one, several."""
    given = properties.get("classification")
    if isinstance(given, dict):
        given = given.get("name", _DERIVED.join(given.get("names", [])) or None)
    if given is not None and not isinstance(given, str):
        raise ValueError("a class has no name")
    return UNCLASSIFIED if given is None else given


def _colour(given: Any) -> str:
    """A class's colour as "#rrggbb": three numbers, or one as Java has it; "" for none."""
    if not isinstance(given, dict):
        return ""
    colour, packed = given.get("color"), given.get("colorRGB")
    if isinstance(packed, int):
        return f"#{packed & 0xFFFFFF:06x}"
    values = colour if isinstance(colour, list) and len(colour) == 3 else []
    if not values or not all(isinstance(v, int) and 0 <= v <= 255 for v in values):
        return ""
    return "#" + "".join(f"{value:02x}" for value in values)


def _saved_colours(detections: Detections) -> list[str] | None:
    """Colours that came with the detections, ours for classes without."""
    known = detections.report.get("colours")
    if not isinstance(known, dict):
        return None
    ours = class_colours(len(detections.names))
    return [str(known.get(n, ours[k])) for k, n in enumerate(detections.names)]


def _measurement(value: Any) -> float | None:
    return None if value is None else float(value)  # "NaN" is text in what QuPath writes


def _bounds(geometry: Any) -> list[float]:
    kind = geometry.get("type") if isinstance(geometry, dict) else None
    if kind not in ("Polygon", "MultiPolygon"):
        raise ValueError(
            f"a feature is a {shortened(kind or 'thing without shape')}, not a polygon"
        )
    points = np.array(list(_points(geometry["coordinates"])), np.float64).reshape(-1, 2)
    if len(points) == 0:
        raise ValueError("a polygon has no points")
    return [*points.min(axis=0).tolist(), *points.max(axis=0).tolist()]


def _points(nested: Any) -> Iterator[tuple[float, float]]:
    if nested and not isinstance(nested[0], list):
        yield float(nested[0]), float(nested[1])
    else:
        for inner in nested:
            yield from _points(inner)
