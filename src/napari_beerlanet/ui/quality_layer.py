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
from napari_beerlanet.ui.detection_view import view_of
from napari_beerlanet.ui.layers import add_quietly, mark, role, spatial

KINDS = {
    "true": "#2fbf71",
    "false": "#e5484d",
    "missed": "#f5a524",
    "wrong class": "#b45ae8",
}
"""What a box can be, and its colour."""

_ROLE = "quality"
_OURS = (_ROLE, "current", "compared")  # layers that only show something
_EDGE = 2.0  # pixels of the screen
_PAUSE = 60  # milliseconds between changes of what is shown, while the view moves


def annotation_layers(viewer: Any, source: Any) -> list[Shapes]:
    """Layers of shapes that may be annotations of an image: not our detections or regions."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Shapes)
        and layer.ndim == source.ndim
        and role(layer) not in ("detections", "regions", *_OURS)
    ]


def region_layers(viewer: Any, source: Any) -> list[Shapes]:
    """Layers of shapes that may say where everything is annotated."""
    return [
        layer
        for layer in viewer.layers
        if isinstance(layer, Shapes) and layer.ndim == source.ndim and role(layer) not in _OURS
    ]


class QualityLayer:
    """True, false, missed and wrong boxes, each kind in its colour.

    Of many those in view are drawn, errors before what is right; other ones when the view moves.
    One layer for all kinds, and its boxes a turn later: adding a layer takes napari long.
    """

    def __init__(self, viewer: Any, source: Any, index: tuple[int, ...]) -> None:
        self.viewer, self.source, self.index = viewer, source, index
        self._boxes: dict[str, npt.NDArray[Any]] = {}
        self._visible = dict.fromkeys(KINDS, True)
        self._soon = QTimer()
        self._soon.setSingleShot(True)
        self._soon.setInterval(_PAUSE)
        self._soon.timeout.connect(self._draw)
        self.layer = self._made()
        self._new = True
        for emitter in self._heard():
            emitter.connect(self._moved)

    def show(self, quality: Quality, verdict: Verdict, visible: dict[str, bool]) -> None:
        """Draw a verdict; the boxes of a kind only if it is wanted."""
        found, truth = quality.found[0].xyxy, np.asarray(quality.truths[0].xyxy)
        self._boxes = {
            "false": found[verdict.false],
            "wrong class": found[verdict.wrong[:, 0]],
            "missed": truth[verdict.missed],
            "true": found[verdict.true[:, 0]],
        }
        self._visible = dict(visible)
        if self._new:
            self._new = False
            self._moved()
        else:
            self._draw()

    def _heard(self) -> list[Any]:
        camera = self.viewer.scene.camera.events
        return [camera.zoom, camera.center]

    def _moved(self, event: Any = None) -> None:
        if not self._soon.isActive():
            self._soon.start()

    def _draw(self) -> None:
        if self.layer not in self.viewer.layers:
            return
        view, room = view_of(self.source, self.viewer), most()
        chosen = {kind: xyxy for kind, xyxy in self._boxes.items() if self._visible[kind]}
        many = sum(map(len, chosen.values())) > room
        kinds, boxes = [], [np.empty((0, 4), np.float32)]
        for kind, xyxy in chosen.items():
            if many and view is not None:
                xyxy = xyxy[touching(xyxy, view.box)]
            boxes.append(xyxy[:room].astype(np.float32))
            kinds += [kind] * len(boxes[-1])
            room -= len(boxes[-1])
        shades = {kind: transform_color(colour)[0] for kind, colour in KINDS.items()}
        colours = np.array([shades[kind] for kind in kinds], np.float32).reshape(-1, 4)
        corners = corners_of(np.concatenate(boxes), self.index)
        width = _EDGE * view.pixel if view is not None else 1.0
        put(self.layer, corners, colours, width, {"kind": np.array(kinds, dtype=object)})

    def _made(self) -> Shapes:
        layer = Shapes(
            ndim=self.source.ndim,
            name=f"{self.source.name} · compared",
            face_color="transparent",
            metadata=mark(_ROLE, self.source),
            **spatial(self.source),
        )
        add_quietly(self.viewer, layer)
        return layer

    def remove(self) -> None:
        """Take the layer out of the viewer."""
        self._soon.stop()
        for emitter in self._heard():
            emitter.disconnect(self._moved)
        if self.layer in self.viewer.layers:
            self.viewer.layers.remove(self.layer)


def touching(xyxy: npt.NDArray[Any], box: npt.NDArray[Any]) -> npt.NDArray[np.bool_]:
    """(n,): which boxes (n, 4) share a part with the box."""
    x1, y1, x2, y2 = np.asarray(xyxy).T
    return (x1 < box[2]) & (x2 > box[0]) & (y1 < box[3]) & (y2 > box[1])
