"""Where everything has been annotated: a Shapes layer of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from napari.layers import Shapes
from psygnal import Signal

from napari_beerlanet.core.regions import Region
from napari_beerlanet.ui.annotate_shapes import Plane, plane_of, read_regions, region_shape

ROLE = "annotated regions"

_COLOUR = "#00c8c8"  # no class has it, and no stain
_SEEN = ("added", "changed", "removed")


class RegionLayer:
    """The regions of one image, all planes of a stack.

    `changed` tells of what a hand has done; `touched` whether one ever has.
    """

    changed = Signal()

    def __init__(self, layer: Shapes, shape: Sequence[int], width: float) -> None:
        self.layer, self.shape, self.width = layer, shape, width
        self.touched = False
        self._busy = False
        self._given: set[Plane] = set()
        layer.current_edge_color, layer.current_edge_width = _COLOUR, width
        layer.current_face_color = "transparent"
        layer.events.data.connect(self._data_changed)

    def close(self) -> None:
        """Hear nothing more of the layer."""
        self.layer.events.data.disconnect(self._data_changed)

    def read(self, plane: Plane) -> tuple[list[Region], list[str]]:
        """Regions of a plane, and sentences on shapes that enclose nothing."""
        return read_regions(self.layer.data, self.layer.shape_type, plane)

    def planes(self) -> list[Plane]:
        """Planes that have regions."""
        return sorted({plane_of(shape) for shape in self.layer.data})

    def put(self, regions: Sequence[Region], plane: Plane) -> None:
        """Add regions to a plane."""
        self._given.add(plane)
        with self._quietly():
            for region in regions:
                self.layer.add(
                    region_shape(region, plane),
                    shape_type=region.kind,
                    edge_width=self.width,
                    edge_color=_COLOUR,
                    face_color="transparent",
                )

    def put_first(self, regions: Sequence[Region], plane: Plane) -> None:
        """Add regions to a plane that was never given any, and has none."""
        if plane not in self._given and plane not in self.planes():
            self.put(regions, plane)

    def replace(self, regions: Sequence[Region], plane: Plane) -> None:
        """Have these on a plane instead of what it has; as if by hand."""
        self._remove(plane)
        self.put(regions, plane)
        self.touched = True
        self.changed.emit()

    def clear(self) -> None:
        """Remove all regions of all planes."""
        with self._quietly():
            self.layer.remove(list(range(self.layer.nshapes)))

    def forget(self) -> None:
        """The layer was deleted by hand, and its regions with it."""
        self.clear()
        self.touched = True

    def _remove(self, plane: Plane) -> None:
        mine = [k for k, shape in enumerate(self.layer.data) if plane_of(shape) == plane]
        with self._quietly():
            self.layer.selected_data = set()
            self.layer.remove(mine)

    def _data_changed(self, event: Any) -> None:
        if not self._busy and str(getattr(event, "action", "")) in _SEEN:
            self.touched = True
            self.changed.emit()

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before
