"""The detections of an image as its layer shows them, edits included."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from napari.layers import Image, Shapes

from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.review.review import REJECTED
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer.box_shapes import read_shape_boxes
from napari_beerlanet.ui.viewer.layer_data import detections_from_table
from napari_beerlanet.ui.viewer.layers import Role, role_of, source_layer
from napari_beerlanet.ui.viewer.planes import PlaneIndex

if TYPE_CHECKING:
    from napari.viewer import Viewer

_COLUMNS = ("class", "confidence", TYPE_COLUMN)


def detection_layer_of(viewer: Viewer, image: Image) -> DetectionLayer | None:
    """The layer that shows the detections of an image, None where it has none or it was removed."""
    layer = get_session(viewer).detection_layers.get(image)
    return layer if isinstance(layer, DetectionLayer) and layer.alive else None


def detection_layers(viewer: Viewer) -> dict[Image, DetectionLayer]:
    """The detection layers of all images, the oldest first."""
    images = list(get_session(viewer).detection_layers)
    layers = {image: detection_layer_of(viewer, image) for image in images}
    return {image: layer for image, layer in layers.items() if layer is not None}


def visible_detections(viewer: Viewer, image: Image, plane: PlaneIndex) -> Detections | None:
    """The detections of an image in the current plane, None where it has none.

    Those that the threshold hides or a review has rejected are left out.
    """
    detection_layer = detection_layer_of(viewer, image)
    if detection_layer is not None:
        boxes = detection_layer.read_back()
        status = boxes.features.get("status", np.full(len(boxes.xyxy), "", object))
        kept = np.flatnonzero(status != REJECTED)
        table = {name: values[kept] for name, values in boxes.features.items() if name in _COLUMNS}
        return detections_from_table(boxes.xyxy[kept], table, boxes.names)
    layer = _detections_layer_of(viewer, image)
    return None if layer is None else detections_from_layer(layer, plane)


def hide_detections(viewer: Viewer, image: Image) -> None:
    """Hide the layer, as its boxes lie exactly under their copies."""
    detection_layer = detection_layer_of(viewer, image)
    layer = detection_layer.layer if detection_layer else _detections_layer_of(viewer, image)
    if layer is not None:
        layer.visible = False


def detection_scale(viewer: Viewer, image: Image) -> float | None:
    """Working pixels per image pixel at which the image's objects were detected, if they were."""
    detections = get_session(viewer).detections.get(image)
    scale = None if detections is None else (detections.report or {}).get("scale")
    return float(scale) if isinstance(scale, (int, float)) else None


def _detections_layer_of(viewer: Viewer, image: Image) -> Shapes | None:
    """A Shapes layer whose metadata says that it holds this image's detections."""
    for layer in reversed(viewer.layers):
        if not isinstance(layer, Shapes) or role_of(layer) != Role.DETECTIONS:
            continue
        if source_layer(viewer, layer) is image:
            return layer
    return None


def detections_from_layer(layer: Shapes, plane: PlaneIndex) -> Detections:
    """The boxes of a plane of such a layer, with class and confidence."""
    boxes = read_shape_boxes(layer.data, layer.shape_type)
    here = (boxes.planes == np.array(plane, np.int64)).all(axis=1)
    rows, features = boxes.which[here], layer.features
    table = {name: features[name].to_numpy()[rows] for name in _COLUMNS if name in features}
    return detections_from_table(boxes.xyxy[here], table)
