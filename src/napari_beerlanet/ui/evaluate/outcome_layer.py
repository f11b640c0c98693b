"""The layer that shows true positives, false positives, missed objects and wrong classes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from napari.utils.colormaps.standardize_color import transform_color
from superqt.utils import qthrottled

from napari_beerlanet.core.boxes.classes import OUTCOME_COLOURS
from napari_beerlanet.core.evaluation.live import LiveEvaluation
from napari_beerlanet.core.evaluation.metrics import MatchResult
from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes, max_drawn_boxes, set_boxes
from napari_beerlanet.ui.viewer.layers import (
    DISPLAY_ONLY,
    Role,
    add_unselected,
    boxes_removed,
    is_made_from,
    own_metadata,
    role_metadata,
    role_of,
    source_image,
    step_back,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.viewport import viewport_of

if TYPE_CHECKING:
    from napari.viewer import Viewer

_EXPLANATIONS = {
    "true": "True positives: detections that match an annotation of their class.",
    "false": "False positives: detections that match no annotation.",
    "missed": "False negatives: annotations that no detection matches.",
    "wrong class": "Detections that match an annotation of another class.",
}
OUTCOMES = {kind: (OUTCOME_COLOURS[kind], text) for kind, text in _EXPLANATIONS.items()}
"""What a box can be when compared with annotations: its colour, and an explanation."""

_EDGE_WIDTH = 2.0  # screen pixels
_REDRAW_INTERVAL_MS = 60  # while the camera moves


def annotation_layers(viewer: Viewer, source: Image) -> list[Shapes]:
    """Shapes layers that may be annotations of an image, its own first.

    Neither our detections or regions, nor layers of another image.
    """
    layers = [
        layer
        for layer in _shapes_layers(viewer, source)
        if role_of(layer) not in (Role.DETECTIONS, Role.REGIONS)
        and not layer.name.endswith(str(Role.REGIONS))  # a layer that was saved loses its role
    ]
    return sorted(layers, key=lambda layer: not is_made_from(layer, source))


def region_layers(viewer: Viewer, source: Image) -> list[Shapes]:
    """Shapes layers that may outline the annotated regions of an image, its own first."""
    boxes = (Role.DETECTIONS, Role.ANNOTATIONS, Role.BOXES)
    layers = [layer for layer in _shapes_layers(viewer, source) if role_of(layer) not in boxes]
    return sorted(layers, key=lambda layer: not is_made_from(layer, source))


def preferred_annotations(layers: Sequence[Shapes], source: Image) -> Shapes | None:
    """The annotations of an image: drawn on it, opened onto it, or else the only ones there are."""
    # Boxes from a file that are reviewed are the detections, and match themselves.
    layers = [layer for layer in layers if not own_metadata(layer.metadata).get("reviewed")]
    for role in (Role.ANNOTATIONS, Role.BOXES):
        mine = [layer for layer in layers if role_of(layer) == role and is_made_from(layer, source)]
        if mine:
            return mine[-1]
    with_classes = [layer for layer in layers if "class" in layer.features and layer.nshapes]
    return with_classes[0] if len(with_classes) == 1 else None


def preferred_regions(layers: Sequence[Shapes], source: Image) -> Shapes | None:
    """The regions in which an image is annotated, None for the whole image."""
    mine = (one for one in layers if role_of(one) == Role.REGIONS and is_made_from(one, source))
    return next((layer for layer in mine if layer.nshapes), None)


def _shapes_layers(viewer: Viewer, source: Image) -> list[Shapes]:
    """Shapes layers of the same axes that hold something of the user's, of no other image."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Shapes)
        and layer.ndim == source.ndim
        and role_of(layer) not in DISPLAY_ONLY
        and source_image(viewer, layer) in (None, source)
    ]


class OutcomeLayer:
    """True, false, missed and wrong boxes, each outcome in its colour.

    Of many only those in the viewport are drawn, errors first, and others when the camera moves.
    One layer for all outcomes, and its boxes a turn later: adding a layer is slow in napari.
    """

    def __init__(self, viewer: Viewer, source: Image, index: tuple[int, ...]) -> None:
        self.viewer, self.source, self.index = viewer, source, index
        self._boxes: dict[str, npt.NDArray[Any]] = {}
        self._visible = dict.fromkeys(OUTCOMES, True)
        self._draw_soon = qthrottled(self._draw, timeout=_REDRAW_INTERVAL_MS, leading=False)
        self.layer = self._make_layer()
        self._is_new = True
        for emitter in self._camera_events():
            emitter.connect(self._camera_moved)

    def show(
        self, evaluation: LiveEvaluation, matches: MatchResult, visible: dict[str, bool]
    ) -> None:
        """Draw the boxes of the visible outcomes."""
        detected = evaluation.detections[0].xyxy
        annotated = np.asarray(evaluation.annotations[0].xyxy)
        self._boxes = {
            "false": detected[matches.false_positives],
            "wrong class": detected[matches.wrong_class[:, 0]],
            "missed": annotated[matches.missed],
            "true": detected[matches.true_positives[:, 0]],
        }
        self._visible = dict(visible)
        if self._is_new:
            self._is_new = False
            self._draw_soon()
        else:
            self._draw()

    def _camera_events(self) -> list[Any]:
        camera = self.viewer.scene.camera.events
        return [camera.zoom, camera.center]

    def _camera_moved(self, event: Any = None) -> None:
        self._draw_soon()

    def _draw(self) -> None:
        if self.layer not in self.viewer.layers:
            return
        viewport, remaining = viewport_of(self.source, self.viewer), max_drawn_boxes()
        visible = {kind: xyxy for kind, xyxy in self._boxes.items() if self._visible[kind]}
        too_many = sum(map(len, visible.values())) > remaining
        kinds, boxes = [], [np.empty((0, 4), np.float32)]
        for kind, xyxy in visible.items():
            if too_many and viewport is not None:
                xyxy = xyxy[intersects(xyxy, viewport.box)]
            boxes.append(xyxy[:remaining].astype(np.float32))
            kinds += [kind] * len(boxes[-1])
            remaining -= len(boxes[-1])
        rgba = {kind: transform_color(colour)[0] for kind, (colour, _) in OUTCOMES.items()}
        colours = np.array([rgba[kind] for kind in kinds], np.float32).reshape(-1, 4)
        corners = corners_from_boxes(np.concatenate(boxes), self.index)
        width = _EDGE_WIDTH * viewport.pixel_size if viewport is not None else 1.0
        set_boxes(self.layer, corners, colours, width, {"kind": np.array(kinds, dtype=object)})

    def _make_layer(self) -> Shapes:
        layer = Shapes(
            ndim=self.source.ndim,
            name=f"{self.source.name} · evaluation",
            face_color="transparent",
            metadata=role_metadata(Role.OUTCOME, self.source),
            **transform_kwargs(self.source),
        )
        add_unselected(self.viewer, layer)
        step_back(self.viewer, self.source)
        layer.editable = False
        return layer

    def remove(self) -> None:
        """Remove the layer from the viewer."""
        self._draw_soon.cancel()
        for emitter in self._camera_events():
            emitter.disconnect(self._camera_moved)
        if self.layer in self.viewer.layers:
            self.viewer.layers.remove(self.layer)
            boxes_removed(self.viewer, self.source)


def intersects(xyxy: npt.NDArray[Any], box: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """(n,): which boxes (n, 4) overlap the box (4,)."""
    x1, y1, x2, y2 = np.asarray(xyxy).T
    return np.asarray((x1 < box[2]) & (x2 > box[0]) & (y1 < box[3]) & (y2 > box[1]))
