"""Whole-slide images as lazy pyramids: SVS, NDPI, OME-TIFF and other TIFF, chunk by chunk."""

from __future__ import annotations

import math
import os
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile
from tifffile import EXTRASAMPLE, PHOTOMETRIC

from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.files import (
    check_regular_file,
    image_file_errors,
    read_error_reason,
    read_image,
)
from napari_beerlanet.core.images.pyramid import as_dask, as_levels, with_overviews
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.images.tiff import (
    axis_lengths,
    check_rgb_series,
    check_stored_pixels,
    is_tiff,
    largest_series,
    open_tiff,
    read_pixel_size,
    series_area,
)

SLIDE_SUFFIXES = frozenset({".svs", ".ndpi", ".scn", ".bif", ".qptiff"})
"""How the names of scanners' files end, in lower case."""

SLIDE_PIXELS = 16_000_000
"""Pixels above which an image is a slide: streamed, and never in memory as a whole."""

# Chunks of fewer pixels, if they are many, take longer one by one than the whole at once.
_MIN_CHUNK_PIXELS, _MAX_SMALL_CHUNKS = 4096, 20_000
_OPENSLIDE_CHUNK = 512  # pixels of the side of what is read at once of a foreign slide


@dataclass(frozen=True)
class Slide:
    """A slide that is open.

    `levels`: lazy arrays (H, W, 3 or 4), the finest first; `pixel_size` is (y, x) in micrometres
    of the finest, None where the file does not say.
    """

    path: Path
    levels: list[Any] = field(repr=False)
    pixel_size: PixelSize | None = None
    _file: Any = field(default=None, repr=False, compare=False)

    @property
    def shape(self) -> tuple[int, int]:
        """(H, W) of the finest level."""
        return int(self.levels[0].shape[0]), int(self.levels[0].shape[1])

    def dask(self) -> list[Any]:
        """The levels as dask arrays, as viewers take them."""
        return [as_dask(level) for level in self.levels]

    def close(self) -> None:
        """Let the file go; what is lazy cannot be read afterwards."""
        if self._file is not None:
            self._file.close()

    def __enter__(self) -> Slide:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()


def open_slide(path: str | os.PathLike[str]) -> Slide:
    """Open an image file of any size; anything but an RGB image is a `FileError`.

    What is no TIFF is read into memory. What tifffile cannot read is tried with openslide or
    tiffslide, where one of them is installed.
    """
    path = Path(path)
    with image_file_errors(path):
        check_regular_file(path)
        if not is_tiff(path):
            return _open_with_openslide(path) or _read_into_memory(path)
        try:
            return _open_tiff(path)
        except Exception:
            other = _open_with_openslide(path)
            if other is None:
                raise
            return other


def is_slide(path: str | os.PathLike[str]) -> bool:
    """Whether a file holds a whole slide, and not just any picture; only its header is read.

    That is an RGB TIFF of a scanner's, one with a pyramid, or a large one in tiles.
    """
    path = Path(path)
    try:
        with image_file_errors(path):
            check_regular_file(path)
            if not is_tiff(path):
                return False
            with open_tiff(path) as file:
                series = largest_series(file)
                check_rgb_series(file, series)
                large = series.keyframe.is_tiled and series_area(series) > SLIDE_PIXELS
                return path.suffix.lower() in SLIDE_SUFFIXES or len(series.levels) > 1 or large
    except FileError:
        return False


def _read_into_memory(path: Path) -> Slide:
    image = read_image(path)
    return Slide(path, as_levels(with_overviews([image.pixels])), image.pixel_size)


def _open_tiff(path: Path) -> Slide:
    file = open_tiff(path)
    weakref.finalize(file, file.filehandle.close)
    try:
        series = largest_series(file)
        check_rgb_series(file, series)
        check_stored_pixels(file, series)
        chunk_pixels = math.prod(series.keyframe.chunks[:2])
        many = math.prod(series.keyframe.chunked) > _MAX_SMALL_CHUNKS
        scattered = many and chunk_pixels < _MIN_CHUNK_PIXELS
        if series.keyframe.photometric == PHOTOMETRIC.PALETTE or scattered:
            file.close()
            return _read_into_memory(path)
        levels = [_open_level(series, k, file) for k in range(len(series.levels))]
        same = [level for level in levels if level.shape[2] == levels[0].shape[2]]
        size = read_pixel_size(file, series)
        return Slide(path, with_overviews(as_levels(same)), size, file)
    except BaseException:
        file.close()
        raise


class _ZarrLevel:
    """A zarr array; the file is closed when the last one of it is gone.

    An `ImageError` where the file was written to, or cut, after it was opened: the places of its
    chunks are those of the opening, and what is there now may well decode to something.
    """

    def __init__(self, array: Any, file: tifffile.TiffFile) -> None:
        self._array, self._file = array, file
        self.shape, self.chunks = tuple(array.shape), tuple(array.chunks)
        self.dtype, self.ndim = np.dtype(array.dtype), len(array.shape)
        self._opened = self._state()

    def __getitem__(self, index: Any) -> npt.NDArray[Any]:
        try:
            pixels = np.asarray(self._array[index])
        except Exception as error:
            self._check_unchanged()
            if self._file.filehandle.closed:
                raise
            reason = f"{error}" if isinstance(error, ImageError) else f"{read_error_reason(error)}."
            raise FileError(f"{self._file.filehandle.path}: {reason}") from error
        self._check_unchanged()
        return pixels

    def _state(self) -> tuple[int, int] | None:
        """Size and time of what is open, wherever it is called so now."""
        handle = self._file.filehandle
        if handle.closed:
            return None
        status = os.fstat(handle.fileno())
        return status.st_size, status.st_mtime_ns

    def _check_unchanged(self) -> None:
        now = self._state()
        if now is not None and now != self._opened:
            raise ImageError(
                f"{self._file.filehandle.path}: changed after it was opened; open it again."
            )


def _open_level(series: tifffile.TiffPageSeries, number: int, file: tifffile.TiffFile) -> Any:
    """A level as an array (H, W, 3 or 4)."""
    import zarr

    array = _ZarrLevel(zarr.open(series.aszarr(level=number), mode="r"), file)
    axes = axis_lengths(series.levels[number])
    order = [axis for axis in "".join(axes) if axes[axis] > 1 or axis in "YX"]
    channel = "C" if axes.get("C", 1) > 1 else "S"
    page = series.keyframe
    alpha = page.extrasamples[:1] in ((EXTRASAMPLE.ASSOCALPHA,), (EXTRASAMPLE.UNASSALPHA,))
    keep = 4 if alpha else 3
    if tuple(array.shape) == (axes["Y"], axes["X"], keep):
        return array
    squeezed = as_dask(array).reshape([axes[axis] for axis in order])
    places = [order.index(axis) for axis in ("Y", "X", channel)]
    return squeezed.transpose(places)[..., :keep].rechunk({2: -1})


def _open_with_openslide(path: Path) -> Slide | None:
    """The slide through openslide or tiffslide; None where neither is there or can read it."""
    for module, name in (("openslide", "OpenSlide"), ("tiffslide", "TiffSlide")):
        try:
            opened = getattr(__import__(module), name)(str(path))
        except Exception:
            continue  # not installed, or not a slide for it: the first reader's error is reported
        facts = opened.properties
        sizes = [facts.get(f"{module}.mpp-{axis}") for axis in "yx"]
        size = (float(sizes[0]), float(sizes[1])) if all(sizes) else None
        levels = [_OpenSlideLevel(opened, k) for k in range(opened.level_count)]
        return Slide(path, with_overviews(list(levels)), size, opened)
    return None


class _OpenSlideLevel:
    """A level of an openslide-like object, (H, W, 4) uint8: transparent where nothing was scanned.

    Without alpha that would be black, and more densely stained than any tissue.
    """

    dtype, ndim, chunks = np.dtype(np.uint8), 3, (_OPENSLIDE_CHUNK, _OPENSLIDE_CHUNK, 4)

    def __init__(self, slide: Any, number: int) -> None:
        width, height = slide.level_dimensions[number]
        self.shape = (int(height), int(width), 4)
        self._slide, self._number = slide, number

    def __getitem__(self, index: Any) -> npt.NDArray[np.uint8]:
        rows, columns = index[:2]
        top, bottom, down = rows.indices(self.shape[0])
        left, right, across = columns.indices(self.shape[1])
        scale = self._slide.level_downsamples[self._number]
        corner = (round(left * scale), round(top * scale))
        size = (max(right - left, 0), max(bottom - top, 0))
        part = self._slide.read_region(corner, self._number, size)
        return np.asarray(part.convert("RGBA"))[::down, ::across][(..., *index[2:])]
