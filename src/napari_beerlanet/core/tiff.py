"""TIFF and what is built on it (OME-TIFF, SVS, NDPI, ...) to an RGB array and its pixel size."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import tifffile
from tifffile import COMPRESSION, EXTRASAMPLE, PHOTOMETRIC, RESUNIT

from .images import ImageError

PixelSize = tuple[float, float]
"""(y, x) in micrometres."""

MOST_PIXELS = 400_000_000  # 8 density planes of that many are 12.8 GB
_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_DECODED_TO_RGB = {
    COMPRESSION.OJPEG,
    COMPRESSION.JPEG,
    COMPRESSION.JPEG_LOSSY,
    COMPRESSION.APERIO_JP2000_YCBC,
    COMPRESSION.JPEG_2000_LOSSY,
    COMPRESSION.APERIO_JP2000_RGB,
    COMPRESSION.JPEG2000,
}
_MICROMETRES = {
    "pm": 1e-6,
    "Å": 1e-4,
    "nm": 1e-3,
    "µm": 1.0,
    "um": 1.0,
    "micron": 1.0,
    "microns": 1.0,
    "micrometer": 1.0,
    "mm": 1e3,
    "cm": 1e4,
    "in": 25_400.0,
    "inch": 25_400.0,
    "m": 1e6,
}
_STATED = (1e-3, 1e3)
# Programs write 72, 300 or 1200 dots per inch into files that know nothing of a microscope; those
# are pixels of 353 to 21 micrometres.
_FROM_TAGS = (0.01, 20.0)


def is_tiff(path: Path) -> bool:
    """True where the file begins as a TIFF or BigTIFF does, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) in _SIGNATURES


def read_tiff(path: Path) -> tuple[npt.NDArray[Any], PixelSize | None]:
    """The largest image at full resolution as (H, W, 3 or 4), and its pixel size where known."""
    with tifffile.TiffFile(path) as tif:
        if not tif.series:
            raise ImageError("damaged or cut short (no image in it).")
        series = max(tif.series, key=area)
        _check_extent(series)
        check_colours(tif, series)
        return _to_rgb(series), pixel_size_of(tif, series)


def axes_of(series: tifffile.TiffPageSeries) -> dict[str, int]:
    """Length of each axis by its letter, those of length 1 too, in the order they are stored."""
    return dict(zip(series.get_axes(squeeze=False), series.get_shape(squeeze=False), strict=True))


def area(series: tifffile.TiffPageSeries) -> int:
    """Pixels of one plane."""
    axes = axes_of(series)
    return axes.get("Y", 0) * axes.get("X", 0)


def _check_extent(series: tifffile.TiffPageSeries) -> None:
    axes = axes_of(series)
    if area(series) > MOST_PIXELS:
        raise ImageError(
            f"{axes['X']} x {axes['Y']} pixels are more than the {MOST_PIXELS // 10**6} million "
            "that are taken at once; crop it, or export a lower level of it."
        )


def check_colours(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> None:
    """An `ImageError` where the series is no single RGB image, before its pixels are read."""
    axes, page = axes_of(series), series.keyframe
    colours, channels = axes.get("S", 1), axes.get("C", 1)
    stack = math.prod(n for axis, n in axes.items() if axis not in "YXSC")
    if stack > 1:
        raise ImageError(f"a stack of {stack} images; save the one you want as a file of its own.")
    if page.photometric == PHOTOMETRIC.PALETTE:
        return
    if colours * channels < 3:
        raise ImageError("a grey image has no colours to take apart.")
    if channels > 1 and not (channels == 3 and colours == 1 and _named_rgb(tif)):
        raise ImageError(
            f"{channels} separate channels, which need not be red, green and blue; convert it to "
            "RGB first (in Fiji: Image > Type > RGB Color)."
        )
    ycbcr = page.photometric == PHOTOMETRIC.YCBCR and page.compression in _DECODED_TO_RGB
    if not ycbcr and page.photometric not in (PHOTOMETRIC.RGB, PHOTOMETRIC.MINISBLACK):
        cmyk = page.photometric == PHOTOMETRIC.SEPARATED
        kind = "CMYK" if cmyk else getattr(page.photometric, "name", page.photometric)
        raise ImageError(f"its colours are stored as {kind}; save it as RGB first.")


def _to_rgb(series: tifffile.TiffPageSeries) -> npt.NDArray[Any]:
    axes, page = axes_of(series), series.keyframe
    order = "".join(axes)
    pixels = series.asarray().reshape(series.get_shape(squeeze=False))
    channel = "C" if axes.get("C", 1) > 1 else "S"
    keep = [order.index(axis) for axis in ("Y", "X", channel) if axis in order]
    rest = [i for i in range(pixels.ndim) if i not in keep]
    pixels = pixels.transpose(*rest, *keep)[(0,) * len(rest)]
    if page.photometric == PHOTOMETRIC.PALETTE:
        # TIFF's colour tables are 16 bit by definition.
        table = np.right_shift(np.asarray(page.colormap, np.uint16).T, 8).astype(np.uint8)
        coloured: npt.NDArray[Any] = table[pixels.reshape(pixels.shape[:2])]
        return coloured
    alpha = page.extrasamples[:1] in ((EXTRASAMPLE.ASSOCALPHA,), (EXTRASAMPLE.UNASSALPHA,))
    return np.ascontiguousarray(pixels[..., : 4 if alpha else 3])


def pixel_size_of(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> PixelSize | None:
    """From whoever knows best: OME-XML, the scanner's description, ImageJ, the resolution tags."""
    for (y, x), (least, most) in _stated_sizes(tif, series):
        if least <= y <= most and least <= x <= most:
            return y, x
    return None


def _stated_sizes(
    tif: tifffile.TiffFile, series: tifffile.TiffPageSeries
) -> Iterator[tuple[PixelSize, tuple[float, float]]]:
    page = series.keyframe
    if tif.is_ome:
        yield _ome_size(tif, series), _STATED
    stated = re.search(r"\bMPP\s*=\s*([0-9.]+)", page.description)
    if stated and page.description.startswith("Aperio"):
        size = _number(stated[1])
        yield (size, size), _STATED
    unit = math.nan
    if tif.is_imagej:
        unit = _unit((tif.imagej_metadata or {}).get("unit", ""))
        yield _per_pixel(page, unit), _STATED
    if math.isnan(unit) and page.resolutionunit in (RESUNIT.INCH, RESUNIT.CENTIMETER):
        name = "inch" if page.resolutionunit == RESUNIT.INCH else "cm"
        yield _per_pixel(page, _unit(name)), _FROM_TAGS


def _per_pixel(page: tifffile.TiffPage | tifffile.TiffFrame, unit: float) -> PixelSize:
    x, y = page.resolution
    return (unit / y if y > 0 else math.nan), (unit / x if x > 0 else math.nan)


def _ome_size(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> PixelSize:
    pixels = _ome_elements(tif, "Pixels")
    number = tif.series.index(series)
    if number >= len(pixels):
        return math.nan, math.nan
    y, x = (
        _number(pixels[number].get(f"PhysicalSize{axis}", "nan"))
        * _unit(pixels[number].get(f"PhysicalSize{axis}Unit", "µm"))
        for axis in "YX"
    )
    return y, x


def _named_rgb(tif: tifffile.TiffFile) -> bool:
    """True for an OME-TIFF whose channels are called red, green and blue."""
    names = [element.get("Name", "").strip().lower() for element in _ome_elements(tif, "Channel")]
    return names[:3] == ["red", "green", "blue"]


def _ome_elements(tif: tifffile.TiffFile, tag: str) -> list[ElementTree.Element]:
    if not tif.is_ome or not tif.ome_metadata:
        return []
    try:
        return ElementTree.fromstring(tif.ome_metadata).findall(f".//{{*}}{tag}")
    except ElementTree.ParseError:
        return []


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _unit(name: object) -> float:
    """Micrometres in one unit, NaN where it is none of length."""
    # ImageJ writes the micro sign as an escape; Unicode has it twice.
    plain = str(name).strip().replace("\\u00B5", "µ").replace("μ", "µ")
    return _MICROMETRES.get(plain, math.nan)
