"""Detections and annotations as the data of a Shapes layer, and back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import assign_colours
from napari_beerlanet.core.boxes.detections import RESERVED_COLUMNS, Detections
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.ui.common.panel import unwrap_viewer
from napari_beerlanet.ui.common.session import ClassPalette, get_session
from napari_beerlanet.ui.viewer.box_shapes import (
    corners_from_boxes,
    read_shape_boxes,
    read_shape_regions,
)
from napari_beerlanet.ui.viewer.layers import METADATA_KEY, Role, own_metadata, role_of
from napari_beerlanet.ui.viewer.planes import PlaneIndex

if TYPE_CHECKING:  # they compile kernels, which a reader has no time for
    from napari.viewer import Viewer

    from napari_beerlanet.core.evaluation.label_errors import LabelError
    from napari_beerlanet.core.evaluation.live import LiveEvaluation

LayerData = tuple[Any, dict[str, Any], str]
"""Data, keyword arguments and type of a layer, as napari's readers return them."""


UNNAMED_CLASS = "object"
"""The class of shapes that have none."""

_CLASS_COLUMNS = ("class", "label", "category", "classification")
_SCORE_COLUMNS = ("confidence", "score", "probability")


def shapes_layer_data(
    parts: Mapping[PlaneIndex, Detections],
    name: str,
    transform: Mapping[str, Any],
    metadata: Mapping[str, Any],
    colours: Mapping[str, str] | None = None,
) -> LayerData:
    """Data of a Shapes layer with the boxes of each plane, and all their columns as features.

    `transform`: keyword arguments that put it where the image is; `metadata` goes into ours;
    `colours` "#rrggbb" by class, as they are in the viewer already; a file's own are for others.
    """
    names = list(dict.fromkeys(name for part in parts.values() for name in part.names))
    own = {k: v for part in parts.values() for k, v in part.report.get("colours", {}).items()}
    shades = assign_colours(names, colours, own)
    classes = _concatenated([np.array(p.names, dtype=object)[p.labels] for p in parts.values()])
    corners = [corners_from_boxes(part.xyxy, index) for index, part in parts.items()]
    boxes = [box for part in corners for box in part]
    sides = [p.xyxy[:, 2:] - p.xyxy[:, :2] for p in parts.values()]
    typical = float(np.median(np.concatenate(sides))) if boxes else 20.0
    features = {
        "class": classes,
        "confidence": np.concatenate([p.scores for p in parts.values()]),
        **_merged_columns(list(parts.values())),
    }
    attributes = {
        "name": name,
        "shape_type": "rectangle",
        "features": features,
        "edge_color": [shades[name] for name in classes] or "#0072b2",
        "face_color": "transparent",
        "edge_width": max(typical / 25, 0.5),
        "metadata": {METADATA_KEY: {"role": str(Role.BOXES), "classes": names, **metadata}},
        **transform,
    }
    leading = {len(index) for index in parts}
    attributes.setdefault("ndim", 2 + max(leading, default=0))
    return boxes or None, attributes, "shapes"


_following: WeakSet[ClassPalette] = WeakSet()


def follow_palette(viewer: Viewer) -> None:
    """Keep the colours of boxes from files those that their classes have in the viewer."""
    palette, weak = get_session(viewer).palette, weakref.ref(unwrap_viewer(viewer))

    def recolour() -> None:
        alive = weak()
        for layer in alive.layers if alive is not None else ():
            if isinstance(layer, Shapes) and role_of(layer) == Role.BOXES and len(layer.data):
                table = {str(name): layer.features[name].to_numpy() for name in layer.features}
                column = next((table[name] for name in _CLASS_COLUMNS if name in table), None)
                if column is not None:
                    classes = list(map(_class_name, column))
                    names = list(dict.fromkeys(classes))
                    shades = dict(zip(names, palette.colours(names), strict=True))
                    layer.edge_color = [shades[name] for name in classes]

    if palette not in _following:
        _following.add(palette)
        palette.changed.connect(recolour)


def detections_from_shapes(
    data: Any, attributes: Mapping[str, Any]
) -> dict[PlaneIndex, Detections]:
    """The boxes of a Shapes layer, by plane, with its features; {} stands for no shapes.

    Shapes that enclose nothing (lines, paths) are refused: nothing is left out in silence.
    """
    shapes = list(data) if data is not None else []
    types = attributes.get("shape_type", "rectangle")
    types = [types] * len(shapes) if isinstance(types, str) else list(types)
    boxes = read_shape_boxes(shapes, types)
    if boxes.notes:
        raise FileError(f"{attributes.get('name', 'The layer')}: {boxes.notes[0]}")
    table = {str(name): np.asarray(v) for name, v in (attributes.get("features", {})).items()}
    table = {name: v[boxes.which] for name, v in table.items() if len(v) == len(shapes)}
    classes = own_metadata(attributes.get("metadata")).get("classes", [])
    whole = detections_from_table(boxes.xyxy, table, classes)
    colours = _edge_colours(attributes.get("edge_color"), boxes.which, table)
    whole = replace(whole, report={"colours": colours}) if colours else whole
    planes: dict[PlaneIndex, list[int]] = {}
    order = np.argsort(-_scores(table, len(boxes.xyxy)), kind="stable")
    for row, plane in enumerate(boxes.planes[order].tolist()):
        planes.setdefault(tuple(plane), []).append(row)
    return {index: whole[rows] for index, rows in sorted(planes.items())}


def detections_from_table(
    xyxy: npt.NDArray[Any], table: Mapping[str, npt.NDArray[Any]], classes: Sequence[str] = ()
) -> Detections:
    """Boxes (n, 4) with their class, confidence and further columns from a layer's table."""
    column = next((table[name] for name in _CLASS_COLUMNS if name in table), None)
    of_boxes = [UNNAMED_CLASS] * len(xyxy) if column is None else list(map(_class_name, column))
    names = list(dict.fromkeys([*map(str, classes), *of_boxes]))
    labels = np.array([names.index(name) for name in of_boxes], np.int64)
    used = {
        next((n for n in group if n in table), "") for group in (_CLASS_COLUMNS, _SCORE_COLUMNS)
    }
    columns = {
        name: _plain_column(values)
        for name, values in table.items()
        if name not in used and name not in RESERVED_COLUMNS
    }
    return Detections(xyxy, labels, _scores(table, len(xyxy)), names, columns)


def _edge_colours(
    edges: Any, which: npt.NDArray[np.int64], table: Mapping[str, npt.NDArray[Any]]
) -> dict[str, str]:
    """The colour of each class: that of its first shape."""
    classes = next((table[name] for name in _CLASS_COLUMNS if name in table), None)
    shades = np.asarray(edges) if edges is not None else np.empty(0)
    if classes is None or shades.ndim != 2 or len(shades) <= int(which.max(initial=0)):
        return {}
    eight = np.rint(np.clip(shades[which, :3].astype(float), 0, 1) * 255).astype(int)
    colours: dict[str, str] = {}
    for name, (red, green, blue) in zip(classes, eight, strict=True):
        colours.setdefault(_class_name(name), f"#{red:02x}{green:02x}{blue:02x}")
    return colours


def with_image_facts(detections: Detections, shape: Any, pixel_size: Any) -> Detections:
    """With the image's shape (H, W) and pixel size (y, x) in micrometres, where known."""
    shape = tuple(int(side) for side in shape) if shape is not None else None
    return replace(detections, image_shape=shape, pixel_size=pixel_size)


def _scores(table: Mapping[str, npt.NDArray[Any]], count: int) -> npt.NDArray[np.float32]:
    """(n,) from 0 to 1; 1 where there is none."""
    values = next((table[name] for name in _SCORE_COLUMNS if name in table), None)
    if values is None:
        return np.ones(count, np.float32)
    try:
        numbers = values.astype(np.float32)
    except (TypeError, ValueError):
        return np.ones(count, np.float32)
    return np.clip(np.where(np.isfinite(numbers), numbers, 1), 0, 1).astype(np.float32)


def _class_name(value: Any) -> str:
    return UNNAMED_CLASS if _is_missing(value) else str(value)


def _is_missing(value: Any) -> bool:
    """None, NaN, or pandas' own NA."""
    same = value == value
    return value is None or not isinstance(same, (bool, np.bool_)) or not same


def _plain_column(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """A column of a pandas dtype as bool, number or text."""
    if values.dtype.kind in "biuf":
        return values
    present = [v for v in values if not _is_missing(v)]
    if present and all(isinstance(v, (bool, np.bool_)) for v in present):
        return values.astype(bool) if len(present) == len(values) else values.astype(str)
    if present and all(isinstance(v, (int, float, np.number)) for v in present):
        return np.array([np.nan if _is_missing(v) else v for v in values], np.float64)
    return np.array(["" if _is_missing(v) else str(v) for v in values], str)


def _merged_columns(parts: Sequence[Detections]) -> dict[str, npt.NDArray[Any]]:
    """The columns of all parts, one after another; where one lacks a column it has no value."""
    names = dict.fromkeys(name for part in parts for name in part.columns)
    columns = {}
    for name in names:
        kinds = {part.columns[name].dtype.kind for part in parts if name in part.columns}
        missing: Any = "" if "U" in kinds else np.nan
        pieces = [p.columns.get(name, np.array([missing] * len(p), dtype=object)) for p in parts]
        columns[name] = pieces[0] if len(pieces) == 1 else _concatenated(pieces)
    return columns


def _concatenated(pieces: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate([np.empty(0, object), *(piece.astype(object) for piece in pieces)])


@dataclass(frozen=True, eq=False)
class ShapesSnapshot:
    """What a Shapes layer holds, without the layer: it may be read in any thread."""

    shapes: list[npt.NDArray[Any]]
    shape_types: list[str]
    classes: Sequence[Any] | None = None  # the feature "class"

    @classmethod
    def of(cls, layer: Shapes) -> ShapesSnapshot:
        """As it is now."""
        table = layer.features
        classes = table["class"].to_numpy(copy=True) if "class" in table else None
        return cls(list(layer.data), list(layer.shape_type), classes)


@dataclass(frozen=True, eq=False)
class LayerAnnotations:
    """The annotations of one plane, and the index of each shape in its layer."""

    annotations: Annotations
    shape_indices: npt.NDArray[np.int64]
    notes: list[str]


def read_layer_annotations(
    snapshot: ShapesSnapshot, index: PlaneIndex, shape: tuple[int, int]
) -> LayerAnnotations:
    """The boxes of a plane with the classes of the feature "class"; without one, all are one."""
    boxes = read_shape_boxes(snapshot.shapes, snapshot.shape_types)
    here = (boxes.planes == np.array(index, np.int64)).all(axis=1)
    which = boxes.which[here]
    classes = [UNNAMED_CLASS] * len(which)
    if snapshot.classes is not None:
        given = [snapshot.classes[k] for k in which.tolist()]
        classes = [name if isinstance(name, str) and name else UNNAMED_CLASS for name in given]
    names = list(dict.fromkeys(classes))
    label_by_name = {name: label for label, name in enumerate(names)}
    labels = np.array([label_by_name[name] for name in classes], np.int64)
    annotations = Annotations(boxes.xyxy[here], labels, names, image_shape=shape)
    return LayerAnnotations(annotations, which, boxes.notes)


def read_layer_regions(snapshot: ShapesSnapshot | None, index: PlaneIndex) -> list[Region]:
    """The annotated regions of a plane; [] means the whole image."""
    if snapshot is None:
        return []
    return read_shape_regions(snapshot.shapes, snapshot.shape_types, index)[0]


def fix_label_error(
    layer: Shapes,
    truth: LayerAnnotations,
    evaluation: LiveEvaluation,
    error: LabelError,
    index: PlaneIndex,
    own_names: Mapping[str, str] | None = None,
) -> str:
    """Fix a likely label error in the annotations; returns what was done, in a few words.

    `own_names`: what the annotations call a class of the evaluation, where that is another name.
    """
    detections = evaluation.detections[0]
    name = evaluation.names[evaluation.labels[error.detection]] if error.detection >= 0 else ""
    name = (own_names or {}).get(name, name)
    place = int(truth.shape_indices[error.annotation]) if error.annotation >= 0 else -1
    if error.kind == "not annotated":
        _add_annotation(layer, detections.xyxy[error.detection], name, index)
        return f"{name} was added to “{layer.name}”"
    if error.kind == "never found":
        layer.selected_data = {place}
        layer.remove_selected()
        return f"the annotation was removed from “{layer.name}”"
    if error.kind == "another class":
        _set_class(layer, place, name)
        return f"the annotation is {name} now"
    shapes = list(layer.data)
    shapes[place] = corners_from_boxes(detections.xyxy[error.detection][None], index)[0]
    layer.data = (shapes, [*layer.shape_type[:place], "rectangle", *layer.shape_type[place + 1 :]])
    _set_class(layer, place, name)
    return "the annotation was moved to the detected box"


def _add_annotation(layer: Shapes, box: npt.NDArray[Any], name: str, index: PlaneIndex) -> None:
    defaults = layer.feature_defaults
    if "class" in layer.features:
        layer.feature_defaults = {**{k: defaults[k].iloc[0] for k in defaults}, "class": name}
    layer.add_rectangles([corners_from_boxes(box[None], index)[0]])
    if "class" in layer.features:
        _set_class(layer, layer.nshapes - 1, name)


def _set_class(layer: Shapes, place: int, name: str) -> None:
    if "class" not in layer.features:
        return
    table = layer.features.copy()
    if getattr(table["class"].dtype, "categories", None) is not None:
        table["class"] = table["class"].astype(object)
    table.loc[place, "class"] = name
    layer.features = table
