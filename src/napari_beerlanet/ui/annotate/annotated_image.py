"""An image that is being annotated: its boxes, its regions, and what each plane is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Image, Shapes
from psygnal import Signal

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.project.files import ImageSource
from napari_beerlanet.ui.annotate.annotation_layer import AnnotationLayer, empty_features
from napari_beerlanet.ui.annotate.classes import ClassList, TypeList
from napari_beerlanet.ui.viewer.box_shapes import (
    plane_index_of_shape,
    read_shape_regions,
    shape_from_region,
)
from napari_beerlanet.ui.viewer.layers import (
    Role,
    UpdateGuard,
    add_unselected,
    guard_software_opengl,
    role_metadata,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import Plane, PlaneIndex, all_planes, pixel_size

if TYPE_CHECKING:
    from napari import Viewer

MAX_WHOLE_IMAGE_PIXELS = 4_000_000
"""Of a larger image we ask which part is annotated; a smaller one counts as annotated wholly."""

WHOLE_IMAGE, DRAWN_REGIONS = "the whole image", "regions"

_REGION_COLOUR = "#00c8c8"  # no class has it, and no stain
_EDIT_ACTIONS = ("added", "changed", "removed")
_EDGES_PER_SIDE = 400  # the longer side of an image is this many edge widths, within limits
_MIN_EDGE_WIDTH, _MAX_EDGE_WIDTH = 1.0, 6.0


class AnnotatedImage:
    """An image layer with its box layer and, where regions are drawn, its region layer.

    An image that is annotated wholly has nothing to outline: its region layer is not in the viewer.
    `changed` is emitted when the user, or one of our keys, has changed something. `coverage` is the
    part that is annotated: `WHOLE_IMAGE`, `DRAWN_REGIONS`, or None while the user has not decided.
    `held`: nothing is written to the project until the user has decided whose boxes are right.
    `shown_from` says where annotations come from that are only shown so far; "" once the user works
    on them, and `shown_drafts` are the planes of those that are in no project. `edited`: there was
    a change by the user.
    """

    changed = Signal()

    def __init__(
        self,
        image: Image,
        viewer: Viewer,
        classes: ClassList,
        select: bool = True,
        types: TypeList | None = None,
        sources: dict[PlaneIndex, LazyImageSource] | None = None,
    ) -> None:
        """`select` makes the layer of boxes the active one; `sources` as of `image_sources`."""
        guard_software_opengl(viewer)
        self._image, self._viewer = weakref.ref(image), weakref.ref(viewer)
        self._name = image.name
        self.sources = sources or image_sources(image)
        self.shape = next(iter(self.sources.values())).plane.shape
        small = self.shape[0] * self.shape[1] <= MAX_WHOLE_IMAGE_PIXELS
        self.coverage = WHOLE_IMAGE if small else None
        self.saved: dict[PlaneIndex, dict[str, Any] | None] = {}
        self.held = False
        self.shown_from = ""
        self.edited = False
        self.shown_drafts: set[PlaneIndex] = set()
        self.changed_since_added = False  # to the project in this session, or loaded
        width = float(np.clip(max(self.shape) / _EDGES_PER_SIDE, _MIN_EDGE_WIDTH, _MAX_EDGE_WIDTH))
        regions = _new_shapes_layer(image, f"{image.name} · annotated regions", Role.REGIONS, {})
        layer = _new_shapes_layer(
            image, f"{image.name} · annotations", Role.ANNOTATIONS, empty_features()
        )
        if select:
            viewer.add_layer(layer)
        else:
            add_unselected(viewer, layer)
        self.regions = RegionLayer(regions, width)
        layer.current_edge_width = width
        layer.current_face_color = "transparent"
        self.boxes = AnnotationLayer(layer, classes, self.shape, width, types)
        self.changed.connect(self._mark_changed)
        self.boxes.changed.connect(self._boxes_changed)
        self.regions.changed.connect(self._emit_changed)

    @property
    def image(self) -> Image | None:
        """The image layer, None if it is gone."""
        return self._image()

    @property
    def name(self) -> str:
        """What the image layer is called, or was at first."""
        return self._name if self.image is None else str(self.image.name)

    def close(self) -> None:
        """Disconnect from the layers."""
        self.boxes.close()
        self.regions.close()

    # --- reading ----------------------------------------------------------------------------------

    def annotations(self, plane: PlaneIndex) -> Annotations:
        """Boxes and regions of a plane."""
        return self._with_regions(self.boxes.of_plane(plane), plane)

    def planes(self) -> set[PlaneIndex]:
        """Planes with boxes or regions, now or when they were last saved."""
        return {*self.boxes.planes(), *self.regions.planes(), *self.saved}

    def unsaved(self) -> dict[PlaneIndex, Annotations]:
        """Annotations that differ from those last saved, by plane."""
        boxes = self.boxes.by_plane()
        empty = Annotations.empty(self.boxes.classes.names, self.shape)
        current = {
            plane: self._with_regions(boxes.get(plane, empty), plane)
            for plane in self.planes()
            if plane in self.saved or self._is_edited(plane)
        }
        return {p: a for p, a in current.items() if a.to_json() != self.saved.get(p)}

    def is_whole(self, plane: PlaneIndex) -> bool:
        """Whether the region of a plane is all of it."""
        return _is_whole_image(self.regions.read(plane)[0], self.shape)

    def _with_regions(self, annotations: Annotations, plane: PlaneIndex) -> Annotations:
        return replace(annotations, regions=tuple(self.regions.read(plane)[0]))

    def _is_edited(self, plane: PlaneIndex) -> bool:
        """Whether there is more than the region that we put there by default."""
        return plane in self.boxes.planes() or self.regions.edited

    # --- changing ---------------------------------------------------------------------------------

    def put(self, saved: Annotations, plane: PlaneIndex) -> None:
        """Show saved annotations of a plane."""
        if saved.regions:
            whole = _is_whole_image(saved.regions, self.shape)
            self.coverage = WHOLE_IMAGE if whole else DRAWN_REGIONS
            if not whole:
                self.show_regions()
        self.regions.put(saved.regions, plane)  # first: boxes without any mark the whole image
        self.boxes.add(saved, plane)
        self.saved[plane] = self.annotations(plane).to_json()
        self.changed_since_added = False

    def clear(self) -> None:
        """Remove all boxes and regions."""
        self.boxes.clear()
        self.regions.clear()

    def mark_whole_image(self, plane: PlaneIndex) -> None:
        """Mark all of a plane as annotated."""
        self.coverage = WHOLE_IMAGE
        self.regions.replace([Region.whole_image(self.shape)], plane)

    def mark_whole_by_default(self, plane: PlaneIndex) -> None:
        """Mark all of a plane that has no regions; this alone is not saved."""
        self.regions.put_by_default([Region.whole_image(self.shape)], plane)

    def start_drawing_regions(self, plane: PlaneIndex) -> None:
        """Let the user draw the annotated regions; a region of the whole image is removed."""
        self.coverage = DRAWN_REGIONS
        if self.is_whole(plane):
            self.regions.replace([], plane)
        self.show_regions()

    def show_regions(self) -> None:
        """Add the layer of regions to the viewer, below the boxes, without selecting it."""
        viewer, image, layer = self._viewer(), self.image, self.regions.layer
        if viewer is None or image is None or layer in viewer.layers:
            return
        for name, value in transform_kwargs(image).items():  # the image may have moved since
            setattr(layer, name, value)
        boxes = self.boxes.layer
        below = viewer.layers.index(boxes) if boxes in viewer.layers else None
        add_unselected(viewer, layer, position=below)

    def _mark_changed(self) -> None:
        self.changed_since_added = True

    def _boxes_changed(self) -> None:
        """A plane with boxes but no regions counts as annotated wholly, if it is of usual size."""
        if self.coverage == WHOLE_IMAGE and not self.regions.edited:
            for plane in self.boxes.planes():
                self.mark_whole_by_default(plane)
        self._emit_changed()

    def _emit_changed(self) -> None:
        self.edited = True
        self.changed.emit()


class RegionLayer:
    """The annotated regions of one image, all planes of a stack, in a Shapes layer.

    `changed` is emitted after edits by the user; `edited` tells whether there ever was one.
    """

    changed = Signal()

    def __init__(self, layer: Shapes, width: float) -> None:
        self.layer, self.width = layer, width
        self.edited = False
        self._updating = UpdateGuard()
        self._filled: set[PlaneIndex] = set()
        layer.current_edge_color, layer.current_edge_width = _REGION_COLOUR, width
        layer.current_face_color = "transparent"
        layer.events.data.connect(self._data_changed)

    def close(self) -> None:
        """Disconnect from the layer."""
        self.layer.events.data.disconnect(self._data_changed)

    def read(self, plane: PlaneIndex) -> tuple[list[Region], list[str]]:
        """Regions of a plane, and sentences on shapes that enclose nothing."""
        return read_shape_regions(self.layer.data, self.layer.shape_type, plane)

    def planes(self) -> list[PlaneIndex]:
        """Planes that have regions."""
        return sorted({plane_index_of_shape(shape) for shape in self.layer.data})

    def put(self, regions: Sequence[Region], plane: PlaneIndex) -> None:
        """Add regions to a plane."""
        self._filled.add(plane)
        with self._updating:
            for region in regions:
                self.layer.add(
                    shape_from_region(region, plane),
                    shape_type=region.kind,
                    edge_width=self.width,
                    edge_color=_REGION_COLOUR,
                    face_color="transparent",
                )

    def put_by_default(self, regions: Sequence[Region], plane: PlaneIndex) -> None:
        """Add regions to a plane that has none and never had any."""
        if plane not in self._filled and plane not in self.planes():
            self.put(regions, plane)

    def replace(self, regions: Sequence[Region], plane: PlaneIndex) -> None:
        """Replace the regions of a plane, as an edit by the user."""
        self._remove(plane)
        self.put(regions, plane)
        self.edited = True
        self.changed.emit()

    def clear(self) -> None:
        """Remove all regions of all planes."""
        with self._updating:
            self.layer.remove(list(range(self.layer.nshapes)))

    def layer_deleted(self) -> None:
        """The user has deleted the layer, and its regions with it."""
        self.clear()
        self.edited = True

    def _remove(self, plane: PlaneIndex) -> None:
        shapes = enumerate(self.layer.data)
        indices = [k for k, shape in shapes if plane_index_of_shape(shape) == plane]
        with self._updating:
            self.layer.selected_data = set()
            self.layer.remove(indices)

    def _data_changed(self, event: Any) -> None:
        if not self._updating and str(getattr(event, "action", "")) in _EDIT_ACTIONS:
            self.edited = True
            self.changed.emit()


class LazyImageSource:
    """A plane of an image and, on request, its identity by its pixels; for any thread."""

    def __init__(
        self, plane: Plane, path: str | None, pixel_size: tuple[float, float] | None
    ) -> None:
        self.plane, self._path, self._pixel_size = plane, path, pixel_size
        self.last_saved = -1  # number of the last `SaveJob` that was written
        self._lock = threading.Lock()
        self._source: ImageSource | None = None

    @property
    def resolved(self) -> ImageSource | None:
        """The image's identity if it is known already."""
        return self._source

    def resolve(self) -> ImageSource:
        """The image's identity; reads the pixels the first time."""
        with self._lock:
            if self._source is None:
                plane = self.plane
                self._source = ImageSource.from_image(
                    plane.lazy(), plane.name, self._path, self._pixel_size, plane.index
                )
            return self._source


def image_sources(image: Image) -> dict[PlaneIndex, LazyImageSource]:
    """Every plane of an image layer by its index."""
    path, size = image.source.path, pixel_size(image)
    return {
        p.index: LazyImageSource(p, str(path) if path else None, size) for p in all_planes(image)
    }


def _is_whole_image(regions: Sequence[Region], shape: tuple[int, int]) -> bool:
    whole = Region.whole_image(shape).bounds
    return len(regions) == 1 and regions[0].kind == "rectangle" and regions[0].bounds == whole


def _new_shapes_layer(image: Image, name: str, role: Role, features: Any) -> Shapes:
    return Shapes(
        [],
        ndim=image.ndim,
        name=name,
        features=features,
        face_color="transparent",
        opacity=1.0,  # napari's 0.7 would pale edges and names
        metadata=role_metadata(role, image),
        **transform_kwargs(image),
    )
