"""What is reviewed: a layer of detections, its image, and how the canvas goes along."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.reviewing import ACCEPTED, REJECTED, STATES, Review
from napari_beerlanet.ui.crop_looks import CropLooks
from napari_beerlanet.ui.planes import Plane, current_plane
from napari_beerlanet.ui.review_marker import ReviewMarker
from napari_beerlanet.ui.session import session

_ON_SCREEN = (0.04, 0.4)  # share of the canvas that a box may have without another zoom
_AIM = 0.12
_WHOLE = 3e7  # pixels up to which an image is known by all of them


def targets(viewer: Any) -> list[ReviewTarget]:
    """The layers of detections of this viewer, the oldest first."""
    shown = session(viewer).shown
    return [
        ReviewTarget(viewer, source, shower)
        for source, shower in list(shown.items())
        if shower.alive and source in viewer.layers and shower.found is not None
    ]


@dataclass(eq=False)
class ReviewTarget:
    """A `DetectionLayer` of the plane that is shown, with the image layer it belongs to."""

    viewer: Any
    source: Any
    shower: Any
    found: Detections = field(init=False)
    plane: Plane = field(init=False)

    def __post_init__(self) -> None:
        self.found = self.shower.found
        self.plane = current_plane(self.source, self.viewer)
        self._bound: list[str] = []
        self._picked: Callable[[int], None] | None = None
        self._marker: ReviewMarker | None = None

    @property
    def name(self) -> str:
        """Of the layer."""
        return str(self.shower.layer.name)

    @property
    def colours(self) -> list[str]:
        """Of the classes."""
        return list(self.shower.colours)

    @property
    def confidence(self) -> float:
        """The threshold at which the layer shows its boxes."""
        return float(self.shower.confidence)

    def same(self, other: ReviewTarget) -> bool:
        """Whether both are of the same layer."""
        return self.shower is other.shower

    def read(self) -> npt.NDArray[Any]:
        """Pixels that the image is known by: all of them, or a coarse level of a slide."""
        return self.plane.read(level=self.plane.level_for(_WHOLE))

    def looks(self) -> CropLooks:
        """What crops of its boxes can show."""
        here = session(self.viewer)
        return CropLooks(self.plane, self.found, self.model, here.decompositions.get(self.source))

    @property
    def model(self) -> Any:
        """The model that found them, None if it is not the one that is loaded."""
        loaded, said = session(self.viewer).model, self.found.report.get("model")
        return loaded if said and loaded is not None and loaded.info.get("name") == said else None

    # --- the canvas ---

    def show(self, mask: npt.NDArray[np.bool_]) -> None:
        """Show these of the candidates."""
        if self.shower.alive:
            self.shower.show(mask)

    def look_at(self, row: int) -> None:
        """Centre the canvas on a detection, and select it."""
        if self.shower.alive:
            self.look_at_box(self.found.xyxy[row])
            self.shower.select(row)
            if self.shower.layer.visible and not _drawing(self.viewer):
                self.viewer.layers.selection.active = self.shower.layer  # the keys' layer

    def look_at_box(self, box: npt.NDArray[Any]) -> None:
        """Centre the canvas on a box (4,), nearer if it is small, and frame it."""
        x1, y1, x2, y2 = np.asarray(box, float) - 0.5
        layer, camera = self.source, self.viewer.scene.camera
        leading = [float(i) for i in self.plane.index]
        corners = [layer.data_to_world([*leading, y, x])[-2:] for y, x in ((y1, x1), (y2, x2))]
        size = float(np.abs(np.subtract(*corners)).max())
        canvas = float(min(self.viewer.canvas.size))
        share = size * camera.zoom / canvas if canvas > 0 else _AIM
        if size > 0 and not _ON_SCREEN[0] <= share <= _ON_SCREEN[1]:
            camera.zoom = _AIM * canvas / size
        camera.center = tuple(np.mean(corners, axis=0))
        if self._marker is None:
            self._marker = ReviewMarker(self.viewer, self.source, self.plane.index)
        self._marker.frame(np.asarray(box))

    def put_decisions(self, review: Review) -> None:
        """Write states and classes into the layer's features."""
        if self.shower.alive:
            self.shower.decide(review.status, STATES, review.labels, review.names)

    def to_learn_from(self, review: Review) -> Detections:
        """What was accepted, and boxes that were moved or drawn on the canvas, as they are now."""
        found = self.shower.passing() if self.shower.alive else None  # takes over what was changed
        if found is None or found[0].original != len(review):
            return review.decided()
        store, theirs = found[0], found[0].model_rows
        keep = store.touched.copy()
        keep[theirs] |= review.in_states(frozenset({ACCEPTED}))
        keep[theirs] &= ~review.in_states(frozenset({REJECTED}))
        rows = np.flatnonzero(keep & store.alive)
        return Detections(
            store.xyxy[rows], store.labels[rows], store.scores[rows], list(store.names)
        )

    # --- keys and clicks ---

    def bind(self, keys: dict[str, Callable[[], Any]], picked: Callable[[int], None]) -> None:
        """Let keys work on the canvas too, and tell which box the user selects there."""
        layer = self.shower.layer
        for key, method in keys.items():
            layer.bind_key(key, lambda _, method=method: method(), overwrite=True)
            self._bound.append(key)
        self._picked = picked
        self.shower.selected.connect(picked)

    def unbind(self) -> None:
        """Give the layer its own keys back, and take the frame away."""
        if self._marker is not None:
            self._marker.remove()
            self._marker = None
        for key in self._bound:
            self.shower.layer.bind_key(key, None, overwrite=True)
        self._bound.clear()
        if self._picked is not None:
            self.shower.selected.disconnect(self._picked, missing_ok=True)
            self._picked = None


def _drawing(viewer: Any) -> bool:
    """Whether the user is about to draw on a layer."""
    return str(getattr(viewer.layers.selection.active, "mode", "")).startswith("add_")
