"""Annotations out of a layer of shapes, and the mending of those that are wrong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes

from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.quality import Quality
from napari_beerlanet.core.regions import Region
from napari_beerlanet.core.suspects import Suspect
from napari_beerlanet.ui.annotate_shapes import read_boxes, read_regions
from napari_beerlanet.ui.detection_shapes import corners_of

_UNNAMED = "object"


@dataclass(frozen=True, eq=False)
class Drawn:
    """What a layer of shapes holds, without the layer: it may be looked at in a thread."""

    shapes: list[npt.NDArray[Any]]
    kinds: list[str]
    words: Sequence[Any] | None = None  # of the feature "class"

    @classmethod
    def of(cls, layer: Shapes) -> Drawn:
        """As it is now."""
        table = layer.features
        words = table["class"].to_numpy(copy=True) if "class" in table else None
        return cls(list(layer.data), list(layer.shape_type), words)


@dataclass(frozen=True, eq=False)
class DrawnTruth:
    """The annotations of one plane, and the place of each in its layer."""

    annotations: Annotations
    places: npt.NDArray[np.int64]
    notes: list[str]


def read_truth(drawn: Drawn, index: tuple[int, ...], shape: tuple[int, int]) -> DrawnTruth:
    """The boxes of a plane with the classes of the feature "class"; without one, all are one."""
    boxes = read_boxes(drawn.shapes, drawn.kinds)
    here = (boxes.planes == np.array(index, np.int64)).all(axis=1)
    which = boxes.which[here]
    words = [drawn.words[k] for k in which] if drawn.words is not None else [_UNNAMED] * len(which)
    said = [str(word) if isinstance(word, str) and word else _UNNAMED for word in words]
    names = list(dict.fromkeys(said))
    place = {name: label for label, name in enumerate(names)}
    labels = np.array([place[word] for word in said], np.int64)
    made = Annotations(boxes.xyxy[here], labels, names, image_shape=shape)
    return DrawnTruth(made, which, boxes.notes)


def regions_of(drawn: Drawn | None, index: tuple[int, ...]) -> list[Region]:
    """The regions of a plane, none for the whole image."""
    return [] if drawn is None else read_regions(drawn.shapes, drawn.kinds, index)[0]


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
