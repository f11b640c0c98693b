"""The only place that reads napari layers: which ones fit, and the plane that the viewer is at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.components import ViewerModel
from napari.layers import Image, Layer
from napari.utils.transforms import Affine

KEY = "napari-beerlanet"  # of the metadata of a layer that we made
LARGE = 16_000_000  # pixels; of a multiscale image the finest level below this is taken


def is_rgb(layer: Layer) -> bool:
    """Whether the layer is an RGB image to take apart, and not one that we made ourselves."""
    if not isinstance(layer, Image) or not layer.rgb or KEY in layer.metadata:
        return False
    dtype = np.dtype(layer.dtype)
    known = dtype in (np.uint8, np.uint16) or (dtype.kind == "f" and dtype.itemsize <= 8)
    return known and all(layer.level_shapes[0])


def rgb_layers(viewer: ViewerModel) -> list[Image]:
    """The layers of a viewer that fit, the topmost first."""
    return [layer for layer in reversed(viewer.layers) if is_rgb(layer)]


@dataclass(frozen=True)
class Plane:
    """One (H, W, 3 or 4) plane of a layer, and where it lies.

    `array` is the whole level, (…, H, W, 3 or 4), numpy, dask or zarr; `index` chooses the plane,
    and `level` says which of a multiscale layer's it is, None for a plain layer.
    `place` are the arguments that put a layer of the same number of axes where the plane is.
    """

    array: Any
    index: tuple[int, ...]
    place: dict[str, Any]
    place_of_stack: dict[str, Any]
    key: str
    name: str
    level: int | None = None

    @property
    def is_stack(self) -> bool:
        """Whether there are axes before (H, W)."""
        return bool(self.index)

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W)."""
        return int(self.array.shape[-3]), int(self.array.shape[-2])

    def read(self) -> npt.NDArray[Any]:
        """The pixels; slow where they come from a disk, so not for the GUI thread."""
        return np.asarray(self.array[self.index])


def current_plane(layer: Image, viewer: ViewerModel) -> Plane:
    """The plane that the viewer is at; nothing is read yet."""
    level = _level(layer)
    array = layer.data[level] if layer.multiscale else layer.data
    factors = np.asarray(layer.downsample_factors)[level]
    point = layer.world_to_data(np.asarray(viewer.dims.point)[-layer.ndim :])
    steps = np.rint(np.asarray(point)[:-2] / factors[:-2]).astype(int)
    index = tuple(
        int(i) for i in np.clip(steps, 0, np.asarray(array.shape[: layer.ndim - 2], int) - 1)
    )
    stack = _transform(layer, factors)
    place = stack | {"translate": _origin(stack, index)}
    named = level if layer.multiscale else None
    return Plane(array, index, place, stack, str(layer.unique_id), layer.name, named)


def _level(layer: Image) -> int:
    if not layer.multiscale:
        return 0
    shapes = [shape[-2:] for shape in np.asarray(layer.level_shapes)]
    small = [i for i, shape in enumerate(shapes) if np.prod(shape, dtype=float) <= LARGE]
    return small[0] if small else len(shapes) - 1


def _transform(layer: Image, factors: npt.NDArray[np.float64]) -> dict[str, Any]:
    return {
        "scale": np.asarray(layer.scale) * factors,
        "translate": np.asarray(layer.translate),
        "rotate": np.asarray(layer.rotate),
        "shear": np.asarray(layer.shear),
        "affine": np.asarray(layer.affine.affine_matrix),
        "units": layer.units,
        "axis_labels": layer.axis_labels,
    }


def _origin(transform: dict[str, Any], index: tuple[int, ...]) -> npt.NDArray[np.float64]:
    linear = {name: transform[name] for name in ("scale", "translate", "rotate", "shear")}
    return np.asarray(Affine(**linear)((*index, 0, 0)), dtype=float)


def stack_of(plane: Plane, per_plane: Callable[[npt.NDArray[Any]], Any], r: int) -> list[Any]:
    """r lazy (…, H, W) float32 arrays: `per_plane` ((H, W, 3) to (r, H, W)) of every plane."""
    import dask.array as da

    array = plane.array
    chunks = (*[1] * (array.ndim - 3), *array.shape[-3:])
    lazy = array.rechunk(chunks) if isinstance(array, da.Array) else da.from_array(array, chunks)
    leading = tuple(range(array.ndim - 3))

    def one(block: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
        found = np.asarray(per_plane(block.reshape(block.shape[-3:])), np.float32)
        return np.moveaxis(found, 0, -1).reshape(*block.shape[:-1], r)

    sizes = (*lazy.chunks[:-1], (r,))
    all_of_them = lazy.map_blocks(one, dtype=np.float32, chunks=sizes, meta=np.empty(0, np.float32))
    assert all_of_them.ndim == len(leading) + 3
    return [all_of_them[..., i] for i in range(r)]
