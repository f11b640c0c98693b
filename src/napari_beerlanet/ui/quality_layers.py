"""Detections against annotations on the canvas, and mending an annotation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes
from napari.utils.colormaps.standardize_color import transform_color

from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.quality import Quality
from napari_beerlanet.core.suspects import Suspect
from napari_beerlanet.core.verdict import Verdict
from napari_beerlanet.ui.annotate_shapes import read_boxes, read_regions
from napari_beerlanet.ui.detection_shapes import corners_of, most, put
from napari_beerlanet.ui.detection_view import view_of
from napari_beerlanet.ui.layers import mark, role, spatial

KINDS = {
    "true": "#2fbf71",
    "false": "#e5484d",
    "missed": "#f5a524",
    "wrong class": "#b45ae8",
}
"""What a box can be, and its colour."""

_ROLE = "quality"
_UNNAMED = "object"
_EDGE = 2.0  # pixels of the screen


def annotation_layers(viewer: Any, source: Any) -> list[Shapes]:
    """Layers of shapes that may be annotations of an image: not our detections or regions."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Shapes)
        and layer.ndim == source.ndim
        and role(layer) not in ("detections", "regions", _ROLE)
    ]


def region_layers(viewer: Any, source: Any) -> list[Shapes]:
    """Layers of shapes that may say where everything is annotated."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Shapes) and layer.ndim == source.ndim and role(layer) != _ROLE
    ]


@dataclass(frozen=True, eq=False)
class DrawnTruth:
    """The annotations of one plane, and the place of each in its layer."""

    annotations: Annotations
    places: npt.NDArray[np.int64]
    notes: list[str]


def read_truth(layer: Shapes, index: tuple[int, ...], shape: tuple[int, int]) -> DrawnTruth:
    """The boxes of a plane with the classes of the feature "class"; without one, all are one."""
    boxes = read_boxes(layer.data, layer.shape_type)
    here = (boxes.planes == np.array(index, np.int64)).all(axis=1)
    which, table = boxes.which[here], layer.features
    words = table["class"].to_numpy()[which] if "class" in table else [_UNNAMED] * len(which)
    said = [str(word) if isinstance(word, str) and word else _UNNAMED for word in words]
    names = list(dict.fromkeys(said))
    labels = np.array([names.index(word) for word in said], np.int64)
    made = Annotations(boxes.xyxy[here], labels, names, image_shape=shape)
    return DrawnTruth(made, which, boxes.notes)


def quality_of(
    found: Any, truth: DrawnTruth, regions: Shapes | None, index: tuple[int, ...]
) -> Quality:
    """Detections against annotations, in the regions of a layer if there is one."""
    inside = [] if regions is None else read_regions(regions.data, regions.shape_type, index)[0]
    return Quality.of(found, truth.annotations, inside)


class QualityLayers:
    """True, false, missed and wrong boxes, each kind in a layer of its own colour."""

    def __init__(self, viewer: Any, source: Any, index: tuple[int, ...]) -> None:
        self.viewer, self.source, self.index = viewer, source, index
        self.layers: dict[str, Shapes] = {}

    def show(self, quality: Quality, verdict: Verdict, visible: dict[str, bool]) -> None:
        """Draw a verdict; the boxes of a kind only if it is wanted."""
        found, truth = quality.found[0].xyxy, np.asarray(quality.truths[0].xyxy)
        boxes = {
            "true": found[verdict.true[:, 0]],
            "false": found[verdict.false],
            "missed": truth[verdict.missed],
            "wrong class": found[verdict.wrong[:, 0]],
        }
        for kind, xyxy in boxes.items():
            self._put(kind, xyxy[: most()], visible[kind])

    def _put(self, kind: str, xyxy: npt.NDArray[Any], visible: bool) -> None:
        layer = self.layers.get(kind)
        if layer is None or layer not in self.viewer.layers:
            if not visible or not len(xyxy):
                return
            layer = self.layers[kind] = self._made(kind)
        layer.visible = visible
        if visible:
            view = view_of(layer, self.viewer)
            width = _EDGE * view.pixel if view is not None else 1.0
            colours = np.repeat(transform_color(KINDS[kind]), len(xyxy), axis=0)
            features = {"kind": np.full(len(xyxy), kind, dtype=object)}
            put(layer, corners_of(xyxy, self.index), colours.astype(np.float32), width, features)

    def _made(self, kind: str) -> Shapes:
        layer = Shapes(
            ndim=self.source.ndim,
            name=f"{self.source.name} · {kind}",
            face_color="transparent",
            metadata=mark(_ROLE, self.source, kind=kind),
            **spatial(self.source),
        )
        active = self.viewer.layers.selection.active
        self.viewer.add_layer(layer)
        layer.editable = False
        self.viewer.layers.selection.active = active
        return layer

    def remove(self) -> None:
        """Take the layers out of the viewer."""
        for layer in self.layers.values():
            if layer in self.viewer.layers:
                self.viewer.layers.remove(layer)
        self.layers.clear()


def mend(
    layer: Shapes, truth: DrawnTruth, quality: Quality, suspect: Suspect, index: tuple[int, ...]
) -> str:
    """Do to the annotations what a suspect suggests; returns what was done, in a few words."""
    found = quality.found[0]
    name = quality.names[quality.labels[suspect.found]] if suspect.found >= 0 else ""
    place = int(truth.places[suspect.true]) if suspect.true >= 0 else -1
    if suspect.kind == "not annotated":
        _add(layer, found.xyxy[suspect.found], name, index)
        return f"{name} was added to “{layer.name}”"
    if suspect.kind == "never found":
        layer.selected_data = {place}
        layer.remove_selected()
        return f"the annotation was removed from “{layer.name}”"
    if suspect.kind == "another class":
        _set_class(layer, place, name)
        return f"the annotation is {name} now"
    shapes = list(layer.data)
    shapes[place] = corners_of(found.xyxy[suspect.found][None], index)[0]
    layer.data = (shapes, [*layer.shape_type[:place], "rectangle", *layer.shape_type[place + 1 :]])
    _set_class(layer, place, name)
    return "the annotation was moved to where it was found"


def _add(layer: Shapes, box: npt.NDArray[Any], name: str, index: tuple[int, ...]) -> None:
    defaults = layer.feature_defaults
    if "class" in layer.features:
        layer.feature_defaults = {**{k: defaults[k].iloc[0] for k in defaults}, "class": name}
    layer.add_rectangles([corners_of(box[None], index)[0]])
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
