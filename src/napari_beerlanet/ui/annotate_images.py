"""One image that is being annotated: its two layers, and which image each plane is."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from napari.layers import Image, Shapes
from psygnal import Signal

from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.regions import Region
from napari_beerlanet.core.sources import Source
from napari_beerlanet.ui import annotate_table as tables
from napari_beerlanet.ui.annotate_classes import Classes
from napari_beerlanet.ui.annotate_regions import ROLE as REGIONS
from napari_beerlanet.ui.annotate_regions import RegionLayer
from napari_beerlanet.ui.annotate_shapes import Plane as Place
from napari_beerlanet.ui.annotation_layer import ROLE, AnnotationLayer
from napari_beerlanet.ui.gl_guard import guard_software_opengl
from napari_beerlanet.ui.layers import mark, spatial
from napari_beerlanet.ui.planes import Plane, all_planes, pixel_size

FIELD = 4_000_000
"""Pixels of a large field of view: of more than this nobody annotates all unasked."""

WHOLE, PARTS = "the whole image", "regions"

_LINES = 400  # edges are this part of an image's longer side, within limits
_THIN, _THICK = 1.0, 6.0


class Sourced:
    """A plane of an image and, once asked for, which image it is; for any thread."""

    def __init__(self, plane: Plane, path: str | None, size: tuple[float, float] | None) -> None:
        self.plane, self._path, self._size = plane, path, size
        self.written = -1  # number of the last change that was saved
        self._lock, self._source = threading.Lock(), None

    def source(self) -> Source:
        """Reads the pixels the first time."""
        with self._lock:
            if self._source is None:
                pixels, index = self.plane.lazy(), self.plane.index
                self._source = Source.of(pixels, self.plane.name, self._path, self._size, index)
            return self._source


class AnnotatedImage:
    """An image layer, the layer of its boxes and that of its regions.

    `changed` tells that a hand, or one of our keys, has changed something. `coverage` is what has
    been said of the part that is annotated: `WHOLE`, `PARTS`, or None while nothing has.
    """

    changed = Signal()

    def __init__(self, image: Image, viewer: Any, classes: Classes) -> None:
        guard_software_opengl(viewer)
        self._image = weakref.ref(image)
        self.name = image.name
        self.sourced = sourced_planes(image)
        any_plane = next(iter(self.sourced.values())).plane
        self.shape = any_plane.shape
        self.coverage = WHOLE if self.shape[0] * self.shape[1] <= FIELD else None
        self.saved: dict[Place, Any] = {}
        self.held = False  # from the project, until it is said whose boxes hold
        width = float(np.clip(max(self.shape) / _LINES, _THIN, _THICK))
        self.regions = RegionLayer(
            _shapes(image, viewer, f"{image.name} · annotated regions", REGIONS, {}),
            self.shape,
            width,
        )
        layer = _shapes(image, viewer, f"{image.name} · annotations", ROLE, tables.empty())
        layer.current_edge_width = width
        layer.current_face_color = "transparent"
        self.boxes = AnnotationLayer(layer, classes, self.shape, width)
        self._hear()

    def _hear(self) -> None:
        self.boxes.changed.connect(self._boxes_changed)
        self.regions.changed.connect(self.changed.emit)

    @property
    def image(self) -> Image | None:
        """The image layer, None where it is gone."""
        return self._image()

    def close(self) -> None:
        """Hear nothing more of the layers."""
        self.boxes.close()
        self.regions.close()

    def annotations(self, plane: Place) -> Annotations:
        """Boxes and regions of a plane, as they are now."""
        found = self.boxes.of_plane(plane)
        return with_regions(found, self.regions.read(plane)[0])

    def put(self, saved: Annotations, plane: Place) -> None:
        """Show what was saved of a plane."""
        if saved.regions:
            self.coverage = WHOLE if _is_whole(saved.regions, self.shape) else PARTS
        self.regions.put(saved.regions, plane)  # first: boxes without any mark the whole image
        self.boxes.add(saved, plane)
        self.saved[plane] = self.annotations(plane).write()

    def clear(self) -> None:
        """Take everything off the layers."""
        self.boxes.clear()
        self.regions.clear()

    def planes(self) -> set[Place]:
        """Planes with boxes or regions, now or when they were last saved."""
        return {*self.boxes.planes(), *self.regions.planes(), *self.saved}

    def unsaved(self) -> dict[Place, Annotations]:
        """What is different from what was saved, by plane."""
        drawn = self.boxes.by_plane()
        nothing = Annotations.empty(self.boxes.classes.names, self.shape)
        now = {
            plane: with_regions(drawn.get(plane, nothing), self.regions.read(plane)[0])
            for plane in self.planes()
            if plane in self.saved or self._drawn(plane)
        }
        return {p: a for p, a in now.items() if a.write() != self.saved.get(p)}

    def whole(self, plane: Place) -> None:
        """Mark all of a plane as annotated."""
        self.coverage = WHOLE
        self.regions.replace([Region.whole(self.shape)], plane)

    def draw_parts(self, plane: Place) -> None:
        """Have the user draw what is annotated; a mark of the whole image is taken away."""
        self.coverage = PARTS
        if _is_whole(self.regions.read(plane)[0], self.shape):
            self.regions.replace([], plane)

    def mark_whole_first(self, plane: Place) -> None:
        """Mark all of a plane on which nothing has been marked; nothing that is to be saved."""
        self.regions.put_first([Region.whole(self.shape)], plane)

    def _drawn(self, plane: Place) -> bool:
        """Whether there is more than the region that we put there."""
        return plane in self.boxes.planes() or self.regions.touched

    def _boxes_changed(self) -> None:
        """Boxes on a plane without regions: of an image of ordinary size all of it is meant."""
        if self.coverage == WHOLE and not self.regions.touched:
            for plane in self.boxes.planes():
                self.mark_whole_first(plane)
        self.changed.emit()


def _is_whole(regions: Sequence[Region], shape: tuple[int, int]) -> bool:
    whole = Region.whole(shape).bounds
    return len(regions) == 1 and regions[0].kind == "rectangle" and regions[0].bounds == whole


def with_regions(found: Annotations, regions: list[Region]) -> Annotations:
    """Annotations with these regions."""
    return replace(found, regions=tuple(regions))


def sourced_planes(image: Image) -> dict[Place, Sourced]:
    """Every plane of an image layer by its place."""
    path, size = image.source.path, pixel_size(image)
    return {p.index: Sourced(p, str(path) if path else None, size) for p in all_planes(image)}


def _shapes(image: Image, viewer: Any, name: str, role: str, features: Any) -> Shapes:
    layer = Shapes(
        [],
        ndim=image.ndim,
        name=name,
        features=features,
        face_color="transparent",
        metadata=mark(role, image),
        **spatial(image),
    )
    viewer.add_layer(layer)
    return layer
