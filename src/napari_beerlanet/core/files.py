"""Image files to arrays, and files that are either written whole or not at all."""

from __future__ import annotations

import os
import shutil
import time
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps, UnidentifiedImageError

from .images import ImageError, check_rgb
from .progress import Progress, Report
from .tiff import PixelSize, is_tiff, read_tiff

# Named one by one, as Pillow also opens formats that run other programs (EPS) or are no images.
_FORMATS = ("PNG", "JPEG", "BMP", "DIB", "WEBP", "GIF", "JPEG2000", "PPM", "TGA")
SUFFIXES = frozenset(
    {
        *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".dib", ".webp", ".gif"),
        *(".jp2", ".j2k", ".jpx", ".ppm", ".pnm", ".tga"),
        *(".tif", ".tiff", ".btf", ".tf2", ".tf8", ".svs", ".ndpi", ".scn", ".bif", ".qptiff"),
    }
)
"""How the names of image files end, in lower case: what is looked for in a folder."""


class FileError(ValueError):
    """A file that cannot be used; the message is one sentence that names it and the problem."""


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
    try:
        check_regular(path)
        with warnings.catch_warnings():
            # Both libraries warn of odd metadata; what matters to the pixels is an exception.
            warnings.simplefilter("ignore")
            pixels, pixel_size = read_tiff(path) if is_tiff(path) else (_read_picture(path), None)
        check_rgb(pixels)
    except (ImageError, MemoryError) as error:
        why = str(error) if isinstance(error, ImageError) else "it does not fit into memory."
        raise FileError(f"{path}: {why}") from error
    except Exception as error:
        # What a decoder raises over damaged data is its own affair: any kind has been seen.
        raise FileError(f"{path}: {reason(error)}.") from error
    return ImageFile(pixels, pixel_size, path.name)


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to, which becomes `path` at the end.

    Where the block raises (Ctrl-C, too) nothing is left behind, and what stood at `path` stays.
    """
    path = Path(path)
    # The suffix stays, as writers go by it; the name does not, as it may be of the longest length.
    unfinished = path.with_name(f".{uuid.uuid4().hex[:16]}.partial{path.suffix}")
    try:
        yield unfinished
        _flush(unfinished)
        _replace(unfinished, path)
    except BaseException:
        remove(unfinished)
        raise


def remove(path: Path) -> None:
    """Remove a file or folder; no matter if it is not there."""
    if path.is_dir() and not path.is_symlink():
        for _ in range(40):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                return
            time.sleep(0.05)  # after Ctrl-C zarr's own thread still finishes what it has begun
    else:
        path.unlink(missing_ok=True)


def _flush(path: Path) -> None:
    """To the disk before the name says so: a power cut must not leave an empty finished file."""
    if path.is_file():
        with path.open("r+b") as file:
            os.fsync(file.fileno())


def _replace(new: Path, path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        os.replace(new, path)
        return
    old = path.with_name(f".{uuid.uuid4().hex[:16]}.partial")  # no system replaces a full folder
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    remove(old)


def check_regular(path: Path) -> None:
    """An `ImageError` where there is no file with something in it."""
    if path.is_dir():
        raise ImageError("a folder, not an image file.")
    if not path.exists():
        raise ImageError("there is no such file.")
    if not path.is_file():  # reading from a pipe would wait for ever
        raise ImageError("not a regular file.")
    if path.stat().st_size == 0:
        raise ImageError("the file is empty.")


def _read_picture(path: Path) -> npt.NDArray[Any]:
    """What Pillow knows, except where it would cut 16 bit down to 8."""
    with Image.open(path, formats=_FORMATS) as picture:
        # A phone's JPEG may carry a preview or a depth map as its second picture.
        frames = 1 if picture.format == "MPO" else getattr(picture, "n_frames", 1)
        if frames > 1:
            raise ImageError(f"{frames} images in one; save the one you want as a file of its own.")
        if picture.mode.split(";")[0] in ("1", "L", "LA", "La", "I", "F"):
            raise ImageError("a grey image has no colours to take apart.")
        if picture.mode in ("CMYK", "LAB", "HSV"):
            raise ImageError(f"its colours are stored as {picture.mode}; save it as RGB first.")
        deep = _deep_pixels(path, picture)
        if deep is not None:
            return deep
        alpha = "A" in picture.getbands() or "transparency" in picture.info
        return np.asarray(ImageOps.exif_transpose(picture).convert("RGBA" if alpha else "RGB"))


def _deep_pixels(path: Path, picture: Image.Image) -> npt.NDArray[Any] | None:
    """The pixels of a file with more than 8 bits per channel, None for all others."""
    if picture.format == "PNG":
        with path.open("rb") as file:
            if file.read(25)[24] != 16:
                return None
        from imagecodecs import png_decode as decode
    elif picture.format == "JPEG2000":
        from imagecodecs import jpeg2k_decode as decode
    elif picture.format == "PPM" and _ppm_maximum(picture) > 255:
        raise ImageError("a PPM of more than 8 bit; save it as TIFF or PNG first.")
    else:
        return None
    pixels: npt.NDArray[Any] = decode(path.read_bytes())
    return pixels if pixels.dtype != np.uint8 else None


def _ppm_maximum(picture: Image.Image) -> int:
    """The value of white, which Pillow keeps among the arguments of its decoder."""
    arguments = [tile[3] for tile in getattr(picture, "tile", [])]
    return max((a[1] for a in arguments if isinstance(a, tuple) and len(a) == 2), default=255)


def still_there(path: Path | None, report: Report) -> Report:
    """A report that says so where the file that is worked on has vanished.

    What is open may be readable for a while, and missing chunks of a zarr folder read as black.
    """

    def checked(progress: Progress) -> None:
        if path is not None and not path.exists():
            raise FileError(f"{path}: no longer there; what was found so far stays.")
        report(progress)

    return checked


def reason(error: Exception) -> str:
    """What is wrong with a file that could not be read, in a few words."""
    if isinstance(error, PermissionError):
        return "no permission to read it"
    if isinstance(error, UnidentifiedImageError):
        return "not an image of a known format (TIFF, PNG, JPEG, BMP, WebP, JPEG 2000, ...)"
    if isinstance(error, Image.DecompressionBombError):
        return "too many pixels for this format; save it as TIFF, or crop it"
    detail = " ".join(str(error).split()).rstrip(".")
    return f"damaged or cut short ({detail[:120] or type(error).__name__})"
