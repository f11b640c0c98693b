"""What is reviewed: a detection layer with its image, or boxes opened from a file.

A bright frame marks the current detection, and the view moves there where it is out of sight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from napari.utils.colormaps.standardize_color import transform_color
from superqt.utils import qthrottled

from napari_beerlanet.core.boxes.detections import TYPE_COLUMN, Detections
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.review.review import ACCEPTED, REJECTED, STATES, BoxEdit, Review
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.image_detections import detection_layers
from napari_beerlanet.ui.review.crops import CropStyles
from napari_beerlanet.ui.viewer.box_shapes import HALF_PIXEL, corners_from_boxes, set_boxes
from napari_beerlanet.ui.viewer.layer_data import detections_from_shapes
from napari_beerlanet.ui.viewer.layers import (
    METADATA_KEY,
    Role,
    add_unselected,
    role_metadata,
    role_of,
    source_image,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import Plane, current_plane
from napari_beerlanet.ui.viewer.viewport import viewport_of

if TYPE_CHECKING:
    from napari.viewer import Viewer

    from napari_beerlanet.core.detection.detector import Detector

_BOX_FRACTION_RANGE = (0.04, 0.4)  # of the canvas, within which the zoom stays for a box
_BOX_FRACTION = 0.12  # of the canvas, that a box gets otherwise
_BORDER = 0.05  # of the canvas: a box nearer to its edge is not in sight
_MAX_FINGERPRINT_PIXELS = 3e7  # larger images are identified by a coarser level

_MARKER_COLOUR = "#ffffff"
_MARKER_EDGE_WIDTH, _MARKER_GAP = 2.5, 4.0  # screen pixels: line width, distance from the box
_REDRAW_INTERVAL_MS = 60  # while the zoom changes


def review_targets(viewer: Viewer) -> list[ReviewTarget]:
    """The detection layers of this viewer, the oldest first."""
    return [
        ReviewTarget(viewer, source, layer)
        for source, layer in detection_layers(viewer).items()
        if source in viewer.layers and layer.detections is not None
    ]


@dataclass(eq=False)
class ReviewTarget:
    """The detections of the current plane, with their layer and the image layer below."""

    viewer: Viewer
    source: Image
    detection_layer: DetectionLayer
    detections: Detections = field(init=False)
    plane: Plane = field(init=False)

    def __post_init__(self) -> None:
        assert self.detection_layer.detections is not None  # see `review_targets`
        self.detections = self.detection_layer.detections
        self.plane = current_plane(self.source, self.viewer)
        self._bound_keys: list[str] = []
        self._on_selected: Callable[[int], None] | None = None
        self._marker: CurrentBoxMarker | None = None

    @property
    def name(self) -> str:
        """The name of the detection layer."""
        return str(self.detection_layer.layer.name)

    @property
    def colours(self) -> list[str]:
        """The colours of the classes."""
        return list(self.detection_layer.colours)

    def type_colours(self, names: Sequence[str]) -> list[str]:
        """The colours of cell types."""
        return get_session(self.viewer).type_palette.colours(names)

    @property
    def confidence(self) -> float:
        """The confidence from which the layer shows its boxes."""
        return float(self.detection_layer.confidence)

    def has_same_layer(self, other: ReviewTarget) -> bool:
        """Whether both are of the same detection layer."""
        return self.detection_layer is other.detection_layer

    def read_fingerprint_pixels(self) -> npt.NDArray[Any]:
        """Pixels that identify the image: all of them, or a coarse level of a slide."""
        return self.plane.read(level=self.plane.level_for(_MAX_FINGERPRINT_PIXELS))

    def crop_styles(self) -> CropStyles:
        """How thumbnails of its boxes can be shown."""
        session = get_session(self.viewer)
        return CropStyles(
            self.plane, self.detections, self.model, session.decompositions.get(self.source)
        )

    @property
    def model(self) -> Detector | None:
        """The model that detected them, None if it is not the loaded one."""
        loaded, name = get_session(self.viewer).model, self.detections.report.get("model")
        return loaded if name and loaded is not None and loaded.info.get("name") == name else None

    # --- the canvas ---

    def set_filter(self, mask: npt.NDArray[np.bool_]) -> None:
        """Show the detections where `mask` (n,) is true."""
        if self.detection_layer.alive:
            self.detection_layer.set_filter(mask)

    def show_detection(self, row: int) -> None:
        """Bring a detection into sight, and select it."""
        if self.detection_layer.alive:
            self.show_box(self.detections.xyxy[row])
            self.detection_layer.select(row)
            if self.detection_layer.layer.visible and not _is_drawing(self.viewer):
                self.viewer.layers.selection.active = self.detection_layer.layer  # it has the keys

    def show_box(self, box: npt.NDArray[Any]) -> None:
        """Frame a box (4,); the view moves there if it is out of sight, too small or too large."""
        x1, y1, x2, y2 = np.asarray(box, float) - HALF_PIXEL
        layer, camera = self.source, self.viewer.scene.camera
        leading = [float(i) for i in self.plane.index]
        corners = [layer.data_to_world([*leading, y, x])[-2:] for y, x in ((y1, x1), (y2, x2))]
        size = float(np.abs(np.subtract(*corners)).max())
        canvas = float(min(self.viewer.canvas.size))
        fraction = size * camera.zoom / canvas if canvas > 0 else _BOX_FRACTION
        if size > 0 and not _BOX_FRACTION_RANGE[0] <= fraction <= _BOX_FRACTION_RANGE[1]:
            camera.zoom = _BOX_FRACTION * canvas / size
            camera.center = tuple(np.mean(corners, axis=0))
        elif not self._is_in_sight(np.asarray(box, float)):
            camera.center = tuple(np.mean(corners, axis=0))
        if self._marker is None:
            self._marker = CurrentBoxMarker(self.viewer, self.source, self.plane.index)
        self._marker.show_at(np.asarray(box))

    def _is_in_sight(self, box: npt.NDArray[np.float64]) -> bool:
        view = viewport_of(self.source, self.viewer, margin=-_BORDER)
        if view is None:
            return False
        return bool((box[:2] >= view.box[:2]).all() and (box[2:] <= view.box[2:]).all())

    def write_decisions(self, review: Review) -> None:
        """Write states, classes and types into the layer's features."""
        if self.detection_layer.alive:
            self.detection_layer.apply_review(
                review.status,
                STATES,
                review.labels,
                review.names,
                review.type_labels,
                review.type_names,
            )

    def edits(self) -> list[BoxEdit]:
        """What the user has edited on the canvas."""
        return self.detection_layer.edits(self.plane.index)

    def restore_edits(self, edits: Sequence[BoxEdit]) -> None:
        """Edit the boxes as in an earlier session."""
        self.detection_layer.restore_edits(edits, self.plane.index)

    def accepted_detections(self, review: Review) -> Detections:
        """Accepted boxes, and those moved or drawn on the canvas, as they are now."""
        self.detection_layer.commit_edits()
        store = self.detection_layer.stores.get(self.plane.index)  # another plane may be shown
        if not self.detection_layer.alive or store is None or store.model_count != len(review):
            return review.accepted()
        keep = store.touched.copy()
        keep[store.model_rows] |= review.in_states(frozenset({ACCEPTED}))
        keep[store.model_rows] &= ~review.in_states(frozenset({REJECTED}))
        rows = np.flatnonzero(keep & store.alive)
        columns = {TYPE_COLUMN: store.types_of(rows)} if store.type_names else {}
        return Detections(
            store.xyxy[rows], store.labels[rows], store.scores[rows], list(store.names), columns
        )

    # --- keys and clicks ---

    def bind(self, keys: dict[str, Callable[[], Any]], on_selected: Callable[[int], None]) -> None:
        """Let keys work on the canvas too, and call `on_selected` with a box selected there."""
        layer = self.detection_layer.layer
        for key, method in keys.items():
            layer.bind_key(key, lambda _, method=method: method(), overwrite=True)
            self._bound_keys.append(key)
        self._on_selected = on_selected
        self.detection_layer.selected.connect(on_selected)

    def unbind(self) -> None:
        """Restore the layer's own keys and filter, and remove the frame."""
        self.detection_layer.set_filter(self.detection_layer.confidence)
        if self._marker is not None:
            self._marker.remove()
            self._marker = None
        for key in self._bound_keys:
            self.detection_layer.layer.bind_key(key, None, overwrite=True)
        self._bound_keys.clear()
        if self._on_selected is not None:
            self.detection_layer.selected.disconnect(self._on_selected, missing_ok=True)
            self._on_selected = None


def _is_drawing(viewer: Viewer) -> bool:
    """Whether a drawing tool of a layer is active."""
    return str(getattr(viewer.layers.selection.active, "mode", "")).startswith("add_")


class CurrentBoxMarker:
    """A layer with one rectangle, made at the first use; it never becomes the active layer."""

    def __init__(self, viewer: Viewer, source: Image, index: tuple[int, ...]) -> None:
        self.viewer, self.source, self.index = viewer, source, index
        self.layer: Shapes | None = None
        self._box: npt.NDArray[Any] | None = None
        self._draw_soon = qthrottled(self._draw, timeout=_REDRAW_INTERVAL_MS, leading=False)
        viewer.scene.camera.events.zoom.connect(self._zoom_changed)

    def show_at(self, box: npt.NDArray[Any]) -> None:
        """Frame a box (4,)."""
        self._box = np.asarray(box, np.float32)
        if self.layer is None or self.layer not in self.viewer.layers:
            self.layer = self._make_layer()
        self._draw()

    def remove(self) -> None:
        """Remove the frame from the viewer."""
        self._draw_soon.cancel()
        self.viewer.scene.camera.events.zoom.disconnect(self._zoom_changed)
        if self.layer is not None and self.layer in self.viewer.layers:
            self.viewer.layers.remove(self.layer)
        self.layer = None

    def _zoom_changed(self, event: Any = None) -> None:
        if self.layer is not None:
            self._draw_soon()

    def _draw(self) -> None:
        if self.layer is None or self.layer not in self.viewer.layers or self._box is None:
            return
        viewport = viewport_of(self.source, self.viewer)
        pixel = viewport.pixel_size if viewport is not None else 1.0
        margin = _MARKER_GAP * pixel * np.array([-1, -1, 1, 1], np.float32)
        corners = corners_from_boxes((self._box + margin)[None], self.index)
        colour = transform_color(_MARKER_COLOUR)
        set_boxes(self.layer, corners, colour, _MARKER_EDGE_WIDTH * pixel, {})

    def _make_layer(self) -> Shapes:
        layer = Shapes(
            ndim=self.source.ndim,
            name=f"{self.source.name} · current",
            face_color="transparent",
            opacity=1.0,
            metadata=role_metadata(Role.REVIEW_MARKER, self.source),
            **transform_kwargs(self.source),
        )
        add_unselected(self.viewer, layer)
        layer.editable = False
        return layer


@dataclass(frozen=True)
class OpenedBoxes:
    """A layer of boxes from a file, and the image that it is on."""

    layer: Shapes
    source: Image = field(repr=False)

    @property
    def name(self) -> str:
        """The text in the list of what can be reviewed."""
        return f"{self.layer.name} (opened)"


def opened_boxes(viewer: Viewer) -> list[OpenedBoxes]:
    """Layers of boxes from files that belong to an open image and are not under review yet."""
    opened = []
    for layer in viewer.layers:
        facts = layer.metadata.get(METADATA_KEY) if isinstance(layer.metadata, dict) else None
        if isinstance(layer, Shapes) and role_of(layer) == Role.BOXES and isinstance(facts, dict):
            source = source_image(viewer, layer)
            if source is not None and len(layer.data) and not facts.get("reviewed"):
                opened.append(OpenedBoxes(layer, source))
    return opened


def detection_layer_from_boxes(viewer: Viewer, opened: OpenedBoxes) -> DetectionLayer:
    """Show opened boxes of the current plane as detections, and hide their own layer.

    Earlier detections of the image become the previous run, to compare with.
    """
    layer, source = opened.layer, opened.source
    plane = current_plane(source, viewer)
    by_plane = detections_from_shapes(layer.data, layer.as_layer_data_tuple()[1])
    detections = by_plane.get(plane.index)
    if detections is None:
        raise ValueError(f"“{layer.name}” has no boxes on the current plane.")
    lowest_score = float(np.min(detections.scores, initial=1.0))
    confidence = min(lowest_score, DetectSettings.default("confidence"))
    detection_layer = DetectionLayer(
        viewer, source, detections, index=plane.index, confidence=confidence
    )
    layer.metadata[METADATA_KEY]["reviewed"] = True
    layer.visible = False
    get_session(viewer).set_detections(source, detections, detection_layer)
    return detection_layer
