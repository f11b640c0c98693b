"""Boxes that were opened from a file, made ready to be reviewed like those that were just found."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from napari.layers import Shapes

from napari_beerlanet.layer_files import detections_of
from napari_beerlanet.ui.detection_layer import DetectionLayer
from napari_beerlanet.ui.layers import OWNER, role
from napari_beerlanet.ui.planes import current_plane, fitting_layers
from napari_beerlanet.ui.session import session

BOXES = "boxes"
"""The role of layers that come from files of boxes."""


@dataclass(frozen=True)
class Opened:
    """A layer of boxes from a file, and the image that it is on."""

    layer: Shapes
    source: Any = field(repr=False)

    @property
    def name(self) -> str:
        """As it is offered."""
        return f"{self.layer.name} (opened)"


def opened_boxes(viewer: Any) -> list[Opened]:
    """Layers of boxes from files that are on an open image and not under review yet."""
    images = {image.name: image for image in fitting_layers(viewer) if role(image) is None}
    found = []
    for layer in viewer.layers:
        told = layer.metadata.get(OWNER) if isinstance(layer.metadata, dict) else None
        if isinstance(layer, Shapes) and role(layer) == BOXES and isinstance(told, dict):
            source = images.get(str(told.get("source")))
            if source is not None and len(layer.data) and not told.get("reviewed"):
                found.append(Opened(layer, source))
    return found


def take_for_review(viewer: Any, opened: Opened) -> DetectionLayer:
    """Show the boxes of the plane in view as detections; the layer itself is hidden, and stays.

    What was found in the image before becomes the run to compare with.
    """
    layer, source = opened.layer, opened.source
    plane = current_plane(source, viewer)
    parts = detections_of(layer.data, layer.as_layer_data_tuple()[1])
    found = parts.get(plane.index)
    if found is None:
        raise ValueError(f"“{layer.name}” has no boxes on the plane that is shown.")
    least = float(np.min(found.scores, initial=1.0))
    shower = DetectionLayer(viewer, source, found, index=plane.index, confidence=min(least, 0.25))
    layer.metadata[OWNER]["reviewed"] = True
    layer.visible = False
    session(viewer).put_result(source, found, shower)
    return shower
