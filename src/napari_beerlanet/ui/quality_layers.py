"""Detections against annotations on the canvas."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes
from napari.utils.colormaps.standardize_color import transform_color
from qtpy.QtCore import QTimer

from napari_beerlanet.core.quality import Quality
from napari_beerlanet.core.verdict import Verdict
from napari_beerlanet.ui.detection_shapes import corners_of, most, put
from napari_beerlanet.ui.detection_view import touching, view_of
from napari_beerlanet.ui.layers import mark, role, spatial

KINDS = {
    "true": "#2fbf71",
    "false": "#e5484d",
    "missed": "#f5a524",
    "wrong class": "#b45ae8",
}
"""What a box can be, and its colour."""

_ROLE = "quality"
_EDGE = 2.0  # pixels of the screen
_PAUSE = 60  # milliseconds between changes of what is shown, while the view moves


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


class QualityLayers:
    """True, false, missed and wrong boxes, each kind in a layer of its own colour.

    Of many those in view are drawn, errors before what is right; other ones when the view moves.
    """

    def __init__(self, viewer: Any, source: Any, index: tuple[int, ...]) -> None:
        self.viewer, self.source, self.index = viewer, source, index
        self.layers: dict[str, Shapes] = {}
        self._boxes: dict[str, npt.NDArray[Any]] = {}
        self._visible = dict.fromkeys(KINDS, True)
        self._soon = QTimer()
        self._soon.setSingleShot(True)
        self._soon.setInterval(_PAUSE)
        self._soon.timeout.connect(self._draw)
        for emitter in self._heard():
            emitter.connect(self._moved)

    def show(self, quality: Quality, verdict: Verdict, visible: dict[str, bool]) -> None:
        """Draw a verdict; the boxes of a kind only if it is wanted."""
        found, truth = quality.found[0].xyxy, np.asarray(quality.truths[0].xyxy)
        self._boxes = {
            "true": found[verdict.true[:, 0]],
            "false": found[verdict.false],
            "missed": truth[verdict.missed],
            "wrong class": found[verdict.wrong[:, 0]],
        }
        self._visible = dict(visible)
        self._draw()

    def _heard(self) -> list[Any]:
        camera = self.viewer.scene.camera.events
        return [camera.zoom, camera.center]

    def _moved(self, event: Any = None) -> None:
        if not self._soon.isActive():
            self._soon.start()

    def _draw(self) -> None:
        view, room = view_of(self.source, self.viewer), most()
        for kind in sorted(self._boxes, key=lambda kind: kind == "true"):
            xyxy, visible = self._boxes[kind], self._visible[kind]
            if visible and view is not None and len(xyxy) > room:
                xyxy = xyxy[touching(xyxy, view.box)]
            xyxy = xyxy[:room]
            room -= len(xyxy) if visible else 0
            self._put(kind, xyxy, visible, _EDGE * view.pixel if view is not None else 1.0)

    def _put(self, kind: str, xyxy: npt.NDArray[Any], visible: bool, width: float) -> None:
        layer = self.layers.get(kind)
        if layer is None or layer not in self.viewer.layers:
            if not visible or not len(xyxy):
                return
            layer = self.layers[kind] = self._made(kind)
        if layer.visible != visible:
            layer.visible = visible
        if visible:
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
        self._soon.stop()
        for emitter in self._heard():
            emitter.disconnect(self._moved)
        for layer in self.layers.values():
            if layer in self.viewer.layers:
                self.viewer.layers.remove(layer)
        self.layers.clear()
