"""Image files as RGB arrays with their pixel size: TIFF, SVS, NDPI, PNG, JPEG, ... are read.

Images are written as PNG, or as OME-TIFF with their pyramid.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import tifffile
from PIL import Image, ImageOps, UnidentifiedImageError

from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.messages import error_detail, path_text
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.rgb import MAX_PIXELS, ImageError, check_rgb
from napari_beerlanet.core.images.tiff import check_picture, check_proportion, is_tiff, read_tiff

_TILE_SIDE = 512  # pixels of a written TIFF's tiles
_CONVERTED_SIDE = 2048  # pixels that are converted at once
_MAX_SIDE = 1_000_000  # pixels of what is no TIFF
# For each pixel, where decoders take more memory or time than for three of them.
_DECODED_BYTES = {"JPEG2000": 7, "WEBP": 5, "progressive": 5, "bmp_rle": 60}
_MIN_BIGTIFF_BYTES = 1 << 31  # a classic TIFF ends at twice that, compressed or not

# Named one by one, as Pillow also opens formats that run other programs (EPS) or are no images.
_PILLOW_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "WEBP", "GIF", "JPEG2000", "PPM", "TGA")
IMAGE_SUFFIXES = frozenset(
    {
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".webp", ".gif"),
        *(".jp2", ".j2k", ".jpx", ".ppm", ".pnm", ".tga"),
        *(".tif", ".tiff", ".btf", ".tf2", ".tf8", ".svs", ".ndpi", ".scn", ".bif", ".qptiff"),
    }
)
"""How the names of image files end, in lower case: what is looked for in a folder."""


@dataclass(frozen=True)
class ImageFile:
    """A file's image.

    `pixels` is (H, W, 3 or 4), uint8, uint16 or float in [0, 1]; `pixel_size` is (y, x) in
    micrometres, None where the file does not say; `name` is the file's, without its folder.
    """

    pixels: npt.NDArray[Any] = field(repr=False)
    pixel_size: PixelSize | None
    name: str


def read_image(path: str | os.PathLike[str]) -> ImageFile:
    """Read an RGB image; anything else is a `FileError`.

    Photographs are turned as their EXIF orientation says. A PNG's or JPEG's dots per inch are
    about print, and no pixel size.
    """
    path = Path(path)
    with image_file_errors(path):
        check_regular_file(path)
        pixels, pixel_size = read_tiff(path) if is_tiff(path) else (_read_with_pillow(path), None)
        check_rgb(pixels)
    return ImageFile(pixels, pixel_size, path.name)


@contextmanager
def image_file_errors(path: Path) -> Iterator[None]:
    """Whatever reading a file raises as a `FileError` of one sentence; warnings are dropped.

    Libraries warn of odd metadata; what matters to the pixels is an exception. What a decoder
    raises over damaged data may be of any kind.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except FileError:
        raise
    except ImageError as error:
        raise FileError(f"{path_text(path)}: {error}") from error
    except Exception as error:
        raise FileError(f"{path_text(path)}: {read_error_reason(error)}.") from error


def read_error_reason(error: Exception) -> str:
    """What is wrong with a file that could not be read, in a few words."""
    if isinstance(error, MemoryError):
        return "it does not fit into memory"
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format (TIFF, PNG, JPEG, BMP, WebP, JPEG 2000, ...)"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels for this format; save it as TIFF, or crop it"
    return f"damaged or cut short ({error_detail(error)})"


def check_regular_file(path: Path) -> None:
    """An `ImageError` where there is no file with something in it."""
    if not os.path.lexists(path):  # or no file can have such a name
        raise ImageError("there is no such file.")
    if path.is_dir() and path.is_symlink():
        raise ImageError("a link to a folder, which is not followed; name the folder itself.")
    if path.is_dir():
        raise ImageError("a folder, not an image file.")
    if not path.exists():
        raise ImageError("there is no such file.")
    if not path.is_file():  # reading from a pipe would wait for ever
        raise ImageError("not a regular file.")
    if path.stat().st_size == 0:
        raise ImageError("the file is empty.")


def _read_with_pillow(path: Path) -> npt.NDArray[Any]:
    """What Pillow knows, except where it would cut 16 bit down to 8."""
    with Image.open(path, formats=_PILLOW_FORMATS) as picture:
        if max(picture.size) > _MAX_SIDE:  # Pillow needs more for each line than its pixels
            raise ImageError(
                f"{picture.width} x {picture.height} pixels are too long and narrow for an image."
            )
        _check_cost(path, picture)
        # A phone's JPEG may carry a preview or a depth map as its second picture.
        frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
        if frames > 1:
            raise ImageError(f"{frames} images in one; save the one you want as a file of its own.")
        if picture.mode.split(";")[0] in ("1", "L", "LA", "La", "I", "F"):
            raise ImageError("a grey image has no colours to decompose.")
        if picture.mode in ("CMYK", "LAB", "HSV"):
            raise ImageError(f"its colours are stored as {picture.mode}; save it as RGB first.")
        deep = _read_16_bit(path, picture)
        if deep is not None:
            return deep
        alpha = "A" in picture.getbands() or "transparency" in picture.info
        ImageOps.exif_transpose(picture, in_place=True)  # otherwise a copy, turned or not
        return _to_array(picture, "RGBA" if alpha else "RGB")


def _check_cost(path: Path, picture: Image.Image) -> None:
    """Refuse what takes far more memory or time than its bytes speak for."""
    kinds = (picture.format, _decoder_name(picture), *picture.info)
    each = max(_DECODED_BYTES.get(str(kind), 3) for kind in kinds)
    check_proportion(each * math.prod(picture.size), path.stat().st_size)
    if picture.format in ("JPEG", "MPO", "JPEG2000"):
        check_picture(path.read_bytes())


def _to_array(picture: Image.Image, mode: str) -> npt.NDArray[np.uint8]:
    """A picture's pixels, converted part by part: each whole copy of it takes its memory again."""
    picture.load()
    pixels = np.empty((picture.height, picture.width, len(mode)), np.uint8)
    for top in range(0, picture.height, _CONVERTED_SIDE):
        for left in range(0, picture.width, _CONVERTED_SIDE):
            part = pixels[top : top + _CONVERTED_SIDE, left : left + _CONVERTED_SIDE]
            box = (left, top, left + part.shape[1], top + part.shape[0])
            part[:] = np.asarray(picture.crop(box).convert(mode))
    return pixels


def _read_16_bit(path: Path, picture: Image.Image) -> npt.NDArray[Any] | None:
    """The pixels of a file with more than 8 bits per channel, None for all others."""
    if picture.format == "PNG":
        with path.open("rb") as file:
            if file.read(25)[24] != 16:
                return None
        from imagecodecs import png_decode as decode
    elif picture.format == "JPEG2000":
        from imagecodecs import jpeg2k_decode as decode
    elif picture.format == "PPM" and _decoder_name(picture) == "ppm_plain":
        raise ImageError("a PPM in digits; save it as PNG, or as a PPM of bytes (P6).")
    elif picture.format == "PPM" and _ppm_max_value(picture) > 255:
        raise ImageError("a PPM of more than 8 bit; save it as TIFF or PNG first.")
    else:
        return None
    pixels: npt.NDArray[Any] = decode(path.read_bytes())
    return pixels if pixels.dtype != np.uint8 else None


def _decoder_name(picture: Image.Image) -> str:
    """Of the first part of a picture, "" for one that is loaded."""
    return next((str(part[0]) for part in getattr(picture, "tile", [])), "")


def _ppm_max_value(picture: Image.Image) -> int:
    """The value of white, which Pillow keeps among the arguments of its decoder."""
    arguments = [tile[3] for tile in getattr(picture, "tile", [])]
    return max((a[1] for a in arguments if isinstance(a, tuple) and len(a) == 2), default=255)


# --- writing -------------------------------------------------------------------------------------


def write_png(path: Path, pixels: Any) -> None:
    """Write an image (H, W, 3 or 4) of 8 or 16 bits, lazy or not."""
    height, width = pixels.shape[:2]
    if np.dtype(pixels.dtype).kind != "u":
        raise ImageError(f"A PNG has 8 or 16 bits, not {pixels.dtype}; write a TIFF instead.")
    if height * width > MAX_PIXELS:
        raise ImageError(f"{width} x {height} pixels are too many for a PNG; write a TIFF instead.")
    from imagecodecs import png_encode

    path.write_bytes(png_encode(np.ascontiguousarray(pixels)))


def write_pyramid(
    path: Path, levels: Sequence[Any], pixel_size: PixelSize | None = None, name: str = ""
) -> None:
    """Write an image, or its pyramid (H, W, 3 or 4), the finest level first, as OME-TIFF.

    Levels may be lazy: they are computed band by band. `pixel_size` is (y, x) in micrometres.
    """
    metadata: dict[str, Any] = {"axes": "YXS"}
    if name:
        metadata["Name"] = xml_safe(name)
    if pixel_size:
        for axis, size in zip("YX", pixel_size, strict=True):
            metadata |= {f"PhysicalSize{axis}": size, f"PhysicalSize{axis}Unit": "µm"}
    bytes_of_all = sum(math.prod(level.shape) * np.dtype(level.dtype).itemsize for level in levels)
    with tifffile.TiffWriter(path, bigtiff=bytes_of_all > _MIN_BIGTIFF_BYTES, ome=True) as file:
        for number, level in enumerate(levels):
            high, wide = (min(_TILE_SIDE, -(-side // 16) * 16) for side in level.shape[:2])
            file.write(
                _tiles(level, high, wide),
                shape=level.shape,
                dtype=np.dtype(level.dtype),
                tile=(high, wide),
                photometric="rgb",
                planarconfig="contig",
                extrasamples=["unassalpha"] if level.shape[2] == 4 else None,
                compression="zlib",  # of those that every reader of OME-TIFF knows, the best
                subifds=len(levels) - 1 if number == 0 else None,
                subfiletype=0 if number == 0 else 1,
                metadata=metadata if number == 0 else None,
            )


def _tiles(level: Any, high: int, wide: int) -> Iterator[npt.NDArray[Any]]:
    """Tiles of a level in the order of a TIFF, computed band by band."""
    for top in range(0, level.shape[0], high):
        band = load_array(level[top : top + high])
        for left in range(0, level.shape[1], wide):
            part = band[:, left : left + wide]
            tile = np.zeros((high, wide, level.shape[2]), band.dtype)
            tile[: part.shape[0], : part.shape[1]] = part
            yield tile


def xml_safe(text: str) -> str:
    """A file name may hold what XML may not: control characters, bytes that are no text."""
    plain = text.encode("utf-8", "replace").decode("utf-8")
    return "".join(c if c.isprintable() else "?" for c in plain)
