"""Colour images out of layers: which layers fit, the plane that is shown, the part in view.

Layers may be NumPy, dask or zarr, multiscale, and stacks (T, Z, … × Y × X × 3 or 4). A `Plane`
holds the array and not the layer, reads no more than it is asked for, and may be read anywhere.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Labels, Layer

from napari_beerlanet.core.images import ImageError
from napari_beerlanet.core.overviews import with_overviews

Window = tuple[slice, slice]
"""Rows and columns."""

LARGE = 16_000_000
"""Pixels of a plane from which on it is a slide: streamed, and never in memory as a whole."""

LARGE_LAZY = 4_000_000
"""The same of a plane that is not in memory anyway."""

_WAY_OUT = "Open a colour image (RGB or RGBA)."


def unfit_reason(layer: Layer | None) -> str | None:
    """Why a layer's stains cannot be taken apart, in one sentence; None where they can."""
    if layer is None:
        return f"There is no image. {_WAY_OUT}"
    named = f"“{layer.name}”"
    if isinstance(layer, Labels) or not isinstance(layer, Image):
        return f"{named} is a {layer._type_string} layer and not an image. {_WAY_OUT}"
    if not layer.rgb:
        return f"{named} has no colours: it is a grey image or a set of channels. {_WAY_OUT}"
    dtype = np.dtype(_levels(layer)[0].dtype)
    if dtype not in (np.uint8, np.uint16) and dtype.kind != "f":
        return (
            f"“{layer.name}” holds {dtype} values; 8 or 16 bit, or floating point from 0 to 1, "
            "are needed."
        )
    if 0 in _levels(layer)[0].shape:
        return f"{named} is empty: its shape is {tuple(_levels(layer)[0].shape)}."
    return None


def fitting_layers(viewer: Any) -> list[Image]:
    """The viewer's colour images that can be worked on, the topmost last."""
    return [layer for layer in viewer.layers if unfit_reason(layer) is None]


def _levels(layer: Image) -> Sequence[Any]:
    return list(layer.data) if layer.multiscale else [layer.data]


@dataclass(frozen=True, eq=False)
class Plane:
    """One colour image (H, W, 3 or 4) of a layer; `levels` are its arrays, the finest first.

    `index` is its place in a stack, one number per leading axis, () where there is none.
    """

    name: str
    levels: tuple[Any, ...]
    index: tuple[int, ...] = ()

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W) of the finest level."""
        return self.level_shape(0)

    def level_shape(self, level: int) -> tuple[int, int]:
        """(H, W) of a level."""
        height, width = self.levels[level].shape[-3:-1]
        return int(height), int(width)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Of the pixels."""
        return np.dtype(self.levels[0].dtype)

    @property
    def is_slide(self) -> bool:
        """Whether it is too large, or too slow to read, to be taken at once."""
        in_memory = all(isinstance(level, np.ndarray) for level in self.levels)
        return math.prod(self.shape) > (LARGE if in_memory else LARGE_LAZY)

    @cached_property
    def pyramid(self) -> list[Any]:
        """Levels (h, w, 3 or 4), the finest first, nothing read; coarse ones are always there."""
        return with_overviews([self.lazy(k) for k in range(len(self.levels))])

    def lazy(self, level: int = 0) -> Any:
        """(h, w, 3 or 4) array of whatever kind the layer has, nothing read."""
        return self.levels[level][self.index] if self.index else self.levels[level]

    def read(self, window: Window | None = None, level: int = 0) -> npt.NDArray[Any]:
        """The pixels (h, w, 3 or 4), or those of a window, in memory."""
        part = self.lazy(level) if window is None else self.levels[level][(*self.index, *window)]
        pixels = np.asarray(part)
        if 0 in pixels.shape:
            raise ImageError(f"“{self.name}”: the part asked for is empty.")
        return pixels

    def level_for(self, pixels: float) -> int:
        """The finest level with at most so many pixels, or the coarsest there is."""
        fits = (k for k in range(len(self.levels)) if np.prod(self.level_shape(k)) <= pixels)
        return next(fits, len(self.levels) - 1)


def current_plane(layer: Image, viewer: Any) -> Plane:
    """The plane that the viewer's sliders point at."""
    levels = tuple(_levels(layer))
    leading = levels[0].shape[:-3]
    if not leading:
        return Plane(layer.name, levels)
    at = np.rint(layer.world_to_data(in_units_of(layer, viewer, viewer.dims.point)))
    index = tuple(int(np.clip(i, 0, n - 1)) for i, n in zip(at, leading, strict=False))
    return Plane(layer.name, levels, index)


def all_planes(layer: Image) -> list[Plane]:
    """Every plane of a stack, in order; one of a single image."""
    levels = tuple(_levels(layer))
    places = itertools.product(*(range(n) for n in levels[0].shape[:-3]))
    return [Plane(layer.name, levels, index) for index in places]


def canvas_corners(layer: Layer, viewer: Any) -> npt.NDArray[np.float64]:
    """(4, 2) row and column in the layer's data, whose pixels have whole numbers as centres."""
    half = np.array(viewer.canvas.size, dtype=float) / viewer.scene.camera.zoom / 2
    centre, corners = np.array(viewer.scene.camera.center[-2:]), []
    for signs in itertools.product((-1, 1), repeat=2):
        world = np.array(viewer.dims.point, dtype=float)
        world[list(viewer.dims.displayed[-2:])] = centre + half * signs
        corners.append(layer.world_to_data(in_units_of(layer, viewer, world))[-2:])
    return np.array(corners)


def visible_window(layer: Image, viewer: Any) -> Window | None:
    """The rows and columns of the finest level that the canvas shows; None if it shows none."""
    size = _levels(layer)[0].shape[-3:-1]
    corners = canvas_corners(layer, viewer) + 0.5
    low = np.clip(np.floor(corners.min(axis=0)), 0, size).astype(int)
    high = np.clip(np.ceil(corners.max(axis=0)), 0, size).astype(int)
    if (high <= low).any():
        return None
    return slice(int(low[0]), int(high[0])), slice(int(low[1]), int(high[1]))


def pixel_size(layer: Layer) -> tuple[float, float] | None:
    """(y, x) in micrometres, None where the layer's units are no lengths."""
    sizes = []
    for scale, unit in zip(layer.scale[-2:], layer.units[-2:], strict=True):
        try:
            sizes.append(abs(float(scale)) * float((1 * unit).to("micrometer").magnitude))
        except Exception:  # pint's own family: a pixel is no length
            return None
    return (sizes[0], sizes[1]) if all(size > 0 for size in sizes) else None


def in_units_of(layer: Layer, viewer: Any, world: Sequence[float]) -> npt.NDArray[np.float64]:
    """A position of the viewer's world, whose units may be others than the layer's."""
    position = np.array(world, dtype=float)[-layer.ndim :]
    units = (viewer.dims.units or ())[-layer.ndim :]
    for axis, (here, there) in enumerate(zip(units, layer.units, strict=False)):
        if here != there and here.is_compatible_with(there):
            position[axis] = (position[axis] * here).to(there).magnitude
    return position
