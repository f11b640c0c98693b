"""What was found in an image, as its layer shows it, with what the user has changed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.reviewing import REJECTED
from napari_beerlanet.ui.annotate_shapes import Plane, read_boxes
from napari_beerlanet.ui.layers import OWNER, role
from napari_beerlanet.ui.session import session

DETECTIONS = "detections"


def shown_detections(viewer: Any, image: Image, plane: Plane) -> Detections | None:
    """The boxes of the image's detections in the plane that is shown, None without a layer.

    Those that the threshold hides or a review has rejected are left out.
    """
    shower = session(viewer).shown.get(image)
    if shower is not None and shower.alive:
        back = shower.read_back()
        scores = back.features.get("confidence", np.ones(len(back.xyxy), np.float32))
        kept = np.asarray(back.features.get("status", scores)) != REJECTED
        return _checked(back.xyxy[kept], back.labels[kept], scores[kept], back.names)
    layer = _layer_of(viewer, image)
    return None if layer is None else read_detections(layer, plane)


def hide_detections(viewer: Any, image: Image) -> None:
    """Hide the layer, as its boxes lie exactly under their copies."""
    shower = session(viewer).shown.get(image)
    layer = shower.layer if shower is not None and shower.alive else _layer_of(viewer, image)
    if layer is not None:
        layer.visible = False


def scale_of(viewer: Any, image: Image) -> float | None:
    """Working pixels per image pixel at which the image's objects were found, if they were."""
    result = session(viewer).results.get(image)
    found = (result.report or {}).get("scale") if isinstance(result, Detections) else None
    return float(found) if isinstance(found, (int, float)) else None


def _layer_of(viewer: Any, image: Image) -> Shapes | None:
    """A Shapes layer that says of itself that it holds this image's detections."""
    for layer in reversed(viewer.layers):
        mine = isinstance(layer, Shapes) and role(layer) == DETECTIONS
        if mine and layer.metadata[OWNER].get("source") == image.name:
            return layer
    return None


def read_detections(layer: Shapes, plane: Plane) -> Detections:
    """The boxes of a plane of such a layer, with class and confidence."""
    boxes = read_boxes(layer.data, layer.shape_type)
    here = (boxes.planes == np.array(plane, np.int64)).all(axis=1)
    rows, table = boxes.which[here], layer.features
    names = [str(name) for name in table["class"].to_numpy()[rows]] if "class" in table else []
    classes = list(dict.fromkeys(names)) or ["object"]
    labels = [classes.index(name) for name in names] or [0] * len(rows)
    scores = np.ones(len(rows))
    if "confidence" in table:
        scores = table["confidence"].to_numpy()[rows].astype(float)
    return _checked(boxes.xyxy[here], np.array(labels, np.int64), scores, classes)


def _checked(
    xyxy: npt.NDArray[Any],
    labels: npt.NDArray[np.int64],
    scores: npt.NDArray[Any],
    names: Sequence[str],
) -> Detections:
    """Drawn boxes have no confidence, and are sure."""
    sure = np.where(np.isfinite(scores), scores, 1.0)
    return Detections(xyxy, labels, np.clip(sure, 0, 1).astype(np.float32), list(names))
