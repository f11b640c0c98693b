"""RGB planes of image layers: which layers are supported, the current plane, its pixels.

Layers may be NumPy, dask or zarr, multiscale, and stacks (T, Z, … × Y × X × 3 or 4). A `Plane`
holds the array and not the layer, reads no more than is asked for, and may be read in any thread.
"""

from __future__ import annotations

import itertools
import math
import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Labels, Layer

from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.storage import FileError, file_stamp
from napari_beerlanet.core.common.tile_store import SUFFIX, read_summary, tile_store_path
from napari_beerlanet.core.images.pyramid import with_overviews
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.images.slide import SLIDE_PIXELS

if TYPE_CHECKING:
    from napari.viewer import Viewer

PlaneIndex = tuple[int, ...]
"""The position of a plane in a stack, one number per leading axis, () where there is none."""

SliceWindow = tuple[slice, slice]
"""Rows and columns of a rectangle of pixels."""

SLIDE_PIXELS_LAZY = 4_000_000
"""As `SLIDE_PIXELS`, of a plane that is not in memory anyway."""

PIXEL_SIZE_KEY = "pixel_size_um"
"""The key of a layer's metadata under which its pixel size is, (y, x) in micrometres."""

OPENED_KEY = "opened_file"
"""The key under which a reader of ours has put the `file_stamp` of the file that it opened."""

_HOW_TO_FIX = "Open a colour image (RGB or RGBA)."


def unsupported_reason(layer: Layer | None) -> str | None:
    """Why a layer is no RGB image that we can work on, in one sentence; None if it is."""
    if layer is None:
        return f"There is no image. {_HOW_TO_FIX}"
    named = f"“{layer.name}”"
    if isinstance(layer, Labels) or not isinstance(layer, Image):
        return f"{named} is a {layer._type_string} layer and not an image. {_HOW_TO_FIX}"
    if not layer.rgb:
        return f"{named} has no colours: it is a grey image or a set of channels. {_HOW_TO_FIX}"
    dtype = np.dtype(_pyramid_levels(layer)[0].dtype)
    if dtype not in (np.uint8, np.uint16) and dtype.kind != "f":
        return (
            f"“{layer.name}” holds {dtype} values; 8 or 16 bit, or floating point from 0 to 1, "
            "are needed."
        )
    if 0 in _pyramid_levels(layer)[0].shape:
        return f"{named} is empty: its shape is {tuple(_pyramid_levels(layer)[0].shape)}."
    return None


def colour_images(viewer: Viewer) -> list[Image]:
    """The viewer's RGB images, the topmost last."""
    images = (layer for layer in viewer.layers if isinstance(layer, Image))
    return [layer for layer in images if unsupported_reason(layer) is None]


def _pyramid_levels(layer: Image) -> Sequence[Any]:
    return list(layer.data) if layer.multiscale else [layer.data]


@dataclass(frozen=True, eq=False)
class Plane:
    """One colour image (H, W, 3 or 4) of a layer; `levels` are its arrays, the finest first.

    `index` is its position in a stack.
    """

    name: str
    levels: tuple[Any, ...]
    index: PlaneIndex = ()

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
        dtype: np.dtype[Any] = np.dtype(self.levels[0].dtype)
        return dtype

    @property
    def is_slide(self) -> bool:
        """Whether it is too large, or too slow to read, to be taken at once."""
        in_memory = all(isinstance(level, np.ndarray) for level in self.levels)
        return math.prod(self.shape) > (SLIDE_PIXELS if in_memory else SLIDE_PIXELS_LAZY)

    @cached_property
    def pyramid(self) -> list[Any]:
        """Levels (h, w, 3 or 4), the finest first, nothing read; coarse ones are always there."""
        return with_overviews([self.lazy(k) for k in range(len(self.levels))])

    def lazy(self, level: int = 0) -> Any:
        """(h, w, 3 or 4) array of the layer's own type (numpy, dask, zarr), nothing read."""
        return self.levels[level][self.index] if self.index else self.levels[level]

    def read(self, window: SliceWindow | None = None, level: int = 0) -> npt.NDArray[Any]:
        """The pixels (h, w, 3 or 4), or those of a window, as a NumPy array."""
        part = self.lazy(level) if window is None else self.levels[level][(*self.index, *window)]
        pixels = load_array(part)
        if 0 in pixels.shape:
            raise ImageError(f"“{self.name}”: the requested part is empty.")
        return pixels

    def level_for(self, pixels: float) -> int:
        """The finest level with at most this many pixels, or the coarsest there is."""
        fits = (k for k in range(len(self.levels)) if np.prod(self.level_shape(k)) <= pixels)
        return next(fits, len(self.levels) - 1)


def current_plane(layer: Image, viewer: Viewer) -> Plane:
    """The plane that the viewer's sliders point at."""
    levels = tuple(_pyramid_levels(layer))
    leading = levels[0].shape[:-3]
    if not leading:
        return Plane(layer.name, levels)
    at = np.rint(layer.world_to_data(to_layer_units(layer, viewer, viewer.dims.point)))
    index = tuple(int(np.clip(i, 0, n - 1)) for i, n in zip(at, leading, strict=False))
    return Plane(layer.name, levels, index)


def all_planes(layer: Image) -> list[Plane]:
    """Every plane of a stack, in order; one of a single image."""
    levels = tuple(_pyramid_levels(layer))
    places = itertools.product(*(range(n) for n in levels[0].shape[:-3]))
    return [Plane(layer.name, levels, index) for index in places]


def image_shape(layer: Image) -> tuple[int, int]:
    """(H, W) of the finest level of an image layer, RGB or not."""
    finest = _pyramid_levels(layer)[0]
    height, width = finest.shape[-3:-1] if layer.rgb else finest.shape[-2:]
    return int(height), int(width)


def pixel_size(layer: Layer) -> tuple[float, float] | None:
    """(y, x) in micrometres: by the layer's scale, or if that is in pixels, by its metadata.

    None where neither says it.
    """
    sizes = []
    for scale, unit in zip(layer.scale[-2:], layer.units[-2:], strict=True):
        try:
            sizes.append(abs(float(scale)) * float((1 * unit).to("micrometer").magnitude))
        except Exception:  # pint's own family: a pixel is no length
            return _stated_pixel_size(layer)
    return (sizes[0], sizes[1]) if all(size > 0 for size in sizes) else None


def _stated_pixel_size(layer: Layer) -> tuple[float, float] | None:
    """As a reader of ours, or the user, has put it into the layer's metadata."""
    stated = layer.metadata.get(PIXEL_SIZE_KEY) if isinstance(layer.metadata, dict) else None
    try:
        y, x = map(float, np.broadcast_to(np.asarray(stated, float), 2))
    except (TypeError, ValueError):
        return None
    return (y, x) if 0 < y < math.inf and 0 < x < math.inf else None


def placement_kwargs(size: tuple[float, float] | None, viewer: Viewer | None) -> dict[str, Any]:
    """Keyword arguments for an image layer with pixels of this size (y, x) in micrometres.

    napari draws layers of different units at sizes that do not fit together, and warns. Other
    readers' images are in pixels, so ours are in pixels too, and their metadata tell the size; they
    are in micrometres where all layers of the viewer have a unit of length.
    """
    if size is None:
        return {}
    told: dict[str, Any] = {"metadata": {PIXEL_SIZE_KEY: size}}
    if viewer is None or not viewer.layers or not all(map(_is_in_lengths, viewer.layers)):
        return told
    return told | {"scale": size, "units": ("um", "um")}


def _is_in_lengths(layer: Layer) -> bool:
    return all(unit.is_compatible_with("micrometer") for unit in layer.units[-2:])


def to_layer_units(layer: Layer, viewer: Viewer, world: npt.ArrayLike) -> npt.NDArray[np.float64]:
    """A position in the viewer's world, converted to the layer's units."""
    position = np.array(world, dtype=float)[-layer.ndim :]
    units = (viewer.dims.units or ())[-layer.ndim :]
    for axis, (here, there) in enumerate(zip(units, layer.units, strict=False)):
        if here != there and here.is_compatible_with(there):
            position[axis] = (position[axis] * here).to(there).magnitude
    return position


def layer_path(layer: Image) -> Path | None:
    """The file or folder that a layer was read from, if it is there."""
    ours = layer.metadata.get("path") if isinstance(layer.metadata, dict) else None
    for path in (layer.source.path, ours):
        if isinstance(path, (str, Path)) and Path(path).exists():
            return Path(path)
    return None


def _opened_stamp(layer: Image, path: Path) -> dict[str, Any]:
    """The stamp of the file whose pixels a layer shows; another one may have its name by now."""
    opened = layer.metadata.get(OPENED_KEY) if isinstance(layer.metadata, dict) else None
    now = file_stamp(path)
    return opened if isinstance(opened, dict) and opened.get("path") == now.get("path") else now


# --- tile results on disk -------------------------------------------------------------------------


@dataclass(frozen=True)
class SlideCacheEntry:
    """The image's own file, the file of its tile results, and which image these are of."""

    path: Path | None
    results: Path
    source: dict[str, Any]


@dataclass(frozen=True)
class PreviousSearch:
    """An earlier search: `done` of `total` tiles, with the model of this name."""

    done: int
    total: int
    model: str

    @property
    def finished(self) -> bool:
        """Whether all tiles were searched."""
        return self.done >= self.total


class SlideCache:
    """Tile result files of image layers; those of images without a file end with the session."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._tokens: weakref.WeakKeyDictionary[Image, tuple[Sequence[Any], str]]
        self._tokens = weakref.WeakKeyDictionary()

    def entry(self, layer: Image, plane: Plane, ending: str = SUFFIX) -> SlideCacheEntry:
        """Where the tile results of a plane are stored, in a file whose name ends so."""
        path = layer_path(layer)
        suffix = "-".join(map(str, plane.index))
        if path is None:
            token = self._token(layer, plane)
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp("-beerlanet"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            results = self._folder / f"{token}-{suffix}{ending}"
            return SlideCacheEntry(None, results, {"session": token, "index": list(plane.index)})
        named = path.with_name(f"{path.name}-{suffix}") if suffix else path
        # Not the path: the file may be moved with its folder.
        facts = {k: v for k, v in _opened_stamp(layer, path).items() if k != "path"}
        source = {"name": path.name, **facts, "index": list(plane.index)}
        return SlideCacheEntry(path, tile_store_path(named, ending), source)

    def _token(self, layer: Image, plane: Plane) -> str:
        """An identifier that stays as long as the layer has the same arrays."""
        levels, token = self._tokens.get(layer, ((), ""))
        same = len(levels) == len(plane.levels)
        if not same or any(a is not b for a, b in zip(levels, plane.levels, strict=True)):
            token = uuid.uuid4().hex
            self._tokens[layer] = plane.levels, token
        return token


def read_previous_search(entry: SlideCacheEntry) -> PreviousSearch | None:
    """The earlier search, None if there is none. Reads a file: not for the GUI thread."""
    summary = None
    with suppress(FileError):  # locked just now: whoever searches is told
        summary = read_summary(entry.results)
    if summary is None:
        return None
    header, done = summary
    source = header.get("identity", {}).get("source", {})
    if not isinstance(header.get("wanted"), int) or source != entry.source:
        return None
    return PreviousSearch(done, header["wanted"], str(header.get("name", "")))
