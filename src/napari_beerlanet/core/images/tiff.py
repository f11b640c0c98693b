"""TIFF files: what their headers claim is checked before anything is planned for it, then read.

A file of a few bytes may declare any number of pixels, planes or values per pixel.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import numpy.typing as npt
import tifffile
from tifffile import COMPRESSION, EXTRASAMPLE, PHOTOMETRIC, RESUNIT

from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.rgb import MAX_PIXELS, ImageError

_MAX_PAGES = 10_000  # of a TIFF: the time that it takes to look at them
_LONG_SHAPE = re.compile(r'"shape":\s*\[[^\]]{1000}')  # as tifffile writes it, and reads it first
_MAX_SAMPLES = 16  # values of a pixel, of which the first three or four are read
_MAX_CHUNK_BYTES = 3 * MAX_PIXELS  # that are decoded at once of a slide
_MAX_EMPTY_BYTES = 1 << 30  # of pixels that a file declares and does not have: they are black
_MAX_EMPTY_CHUNK_BYTES = 1 << 26
_MIN_CODED_PIXELS = 1 << 22  # below which a tile's own header may say what it likes
_TIFF_SIGNATURES = (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")
_DECODED_TO_RGB = {
    COMPRESSION.OJPEG,
    COMPRESSION.JPEG,
    COMPRESSION.JPEG_LOSSY,
    COMPRESSION.APERIO_JP2000_YCBC,
    COMPRESSION.JPEG_2000_LOSSY,
    COMPRESSION.APERIO_JP2000_RGB,
    COMPRESSION.JPEG2000,
}
_MICROMETRES_PER_UNIT = {
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
_PLAUSIBLE_STATED_SIZES = (1e-3, 1e3)
# Programs write 72, 300 or 1200 dots per inch into files that know nothing of a microscope; those
# are pixels of 353 to 21 micrometres.
_PLAUSIBLE_TAG_SIZES = (0.01, 20.0)


def is_tiff(path: Path) -> bool:
    """True where the file begins as a TIFF or BigTIFF does, whatever its name."""
    with path.open("rb") as file:
        return file.read(4) in _TIFF_SIGNATURES


def read_tiff(path: Path) -> tuple[npt.NDArray[Any], PixelSize | None]:
    """The largest image at full resolution as (H, W, 3 or 4), and its pixel size where known."""
    with open_tiff(path) as tif:
        series = largest_series(tif)
        _check_series_size(series)
        check_rgb_series(tif, series)
        check_stored_pixels(tif, series, streamed=False)
        return _read_rgb_series(series), read_pixel_size(tif, series)


def largest_series(tif: tifffile.TiffFile) -> tifffile.TiffPageSeries:
    """The image of the most pixels in a file."""
    _check_page_count(tif)
    if not tif.series:
        raise ImageError("damaged or cut short (no image in it).")
    return max(tif.series, key=series_area)


def open_tiff(path: Path) -> tifffile.TiffFile:
    """Open a TIFF alone: a file must not have others opened, which may be pipes or anything."""
    return tifffile.TiffFile(path, _multifile=False)


def _check_page_count(tif: tifffile.TiffFile) -> None:
    """Refuse what would take minutes to look at, before it is looked at."""
    if tif.is_shaped and _LONG_SHAPE.search(tif.pages.first.description):
        raise ImageError("damaged (its description has a shape that no image has).")
    count = len(tif.pages)
    if count <= _MAX_PAGES:
        count += sum(len(getattr(page, "subifds", None) or ()) for page in tif.pages)
    count = max(count, _ome_planes(tif))
    if count > _MAX_PAGES:
        raise ImageError(f"{count} images in one; save the one you want as a file of its own.")


def _ome_planes(tif: tifffile.TiffFile) -> int:
    """Planes that the OME-XML declares, of all its images; tifffile makes room for each."""
    total = 0
    for part in _ome_elements(tif):
        tag, given = part.tag.rpartition("}")[2], part.attrib
        if tag == "Pixels":
            total += math.prod(_positive_whole(given.get(f"Size{axis}")) for axis in "CZT")
        elif tag == "TiffData":
            total += _positive_whole(given.get("PlaneCount", given.get("NumPlanes")))
        elif tag.startswith("ModuloAlong"):
            start, end, step = (_parse_float(given.get(k, "1")) for k in ("Start", "End", "Step"))
            steps = abs(end - start) / abs(step) if step else math.inf
            total += int(min(steps, _MAX_PAGES + 1)) if steps == steps else 0
    return total


def _positive_whole(text: str | None) -> int:
    """A number in OME-XML, 1 for what is none: whoever reads it says so."""
    try:
        return max(int(text or 1), 1)
    except ValueError:
        return 1


def check_stored_pixels(
    tif: tifffile.TiffFile, series: tifffile.TiffPageSeries, streamed: bool = True
) -> None:
    """Refuse pixels that are declared and not in the file, and chunks too large to decode.

    `streamed`: chunk by chunk from all levels, where otherwise the finest is read at once. From
    then on, a tile's own header must agree with the file's.
    """
    for level in series.levels if streamed else [series]:
        page = level.keyframe
        counts = np.asarray(page.databytecounts, np.int64)
        missing = max(math.prod(page.chunked) - len(page.dataoffsets), 0)
        size = math.prod(page.chunks) * (page.dtype.itemsize if page.dtype is not None else 1)
        if streamed:
            ends = np.add(page.dataoffsets, counts, dtype=np.int64)
            if ends.max(initial=0) > tif.filehandle.size:
                raise ImageError("damaged or cut short (pixels are missing at its end).")
            if missing:
                stored, parts = len(page.dataoffsets), math.prod(page.chunked)
                raise ImageError(
                    f"damaged or cut short ({page.imagewidth} x {page.imagelength} pixels, of "
                    f"which the file has {stored} parts out of {parts})."
                )
            if size > _MAX_CHUNK_BYTES:
                raise ImageError("stored as one chunk, too large to decode; save it in tiles.")
        empty = missing + int((counts == 0).sum())
        most = _MAX_EMPTY_CHUNK_BYTES if streamed else _MAX_EMPTY_BYTES // max(empty, 1)
        if empty and size > most:
            raise ImageError("damaged or cut short (large parts have no pixels).")
        _check_tiles_when_decoded(page)


def _check_tiles_when_decoded(page: tifffile.TiffPage) -> None:
    """Have a tile refused whose own header declares far more pixels than the file's does."""
    if page.compression not in _DECODED_TO_RGB:
        return
    decode = page.decode
    most = max(4 * math.prod(page.chunks[:2]), _MIN_CODED_PIXELS)

    def checked(data: bytes | None, *arguments: Any, **named: Any) -> Any:
        if data is not None and _coded_pixels(data) > most:
            raise ImageError("damaged (a tile is larger than the file says).")
        return decode(data, *arguments, **named)

    page.decode = checked


def _coded_pixels(data: bytes) -> int:
    """Pixels of all components by the header of a JPEG or JPEG 2000; 0 where there is none."""
    start = data.find(b"\xff\x4f\xff\x51", 0, 4096)
    if start >= 0 and len(data) >= start + 42:
        right, bottom, left, top = struct.unpack_from(">4I", data, start + 8)
        (components,) = struct.unpack_from(">H", data, start + 40)
        return int(max(right - left, 0) * max(bottom - top, 0) * -(-components // 4))
    at = 2
    while at + 9 <= len(data) and data[at] == 0xFF:
        kind = data[at + 1]
        if 0xC0 <= kind <= 0xCF and kind not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", data, at + 5)
            return int(height * width)
        fill = kind == 0xFF
        alone = fill or kind in (0x01, 0xD8) or 0xD0 <= kind <= 0xD7
        at += 1 if fill else 2 if alone else 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return 0


def axis_lengths(series: tifffile.TiffPageSeries) -> dict[str, int]:
    """Length of each axis by its letter, those of length 1 too, in the order they are stored."""
    return dict(zip(series.get_axes(squeeze=False), series.get_shape(squeeze=False), strict=True))


def series_area(series: tifffile.TiffPageSeries) -> int:
    """Pixels of one plane."""
    axes = axis_lengths(series)
    return axes.get("Y", 0) * axes.get("X", 0)


def _check_series_size(series: tifffile.TiffPageSeries) -> None:
    axes = axis_lengths(series)
    if series_area(series) > MAX_PIXELS:
        raise ImageError(
            f"{axes['X']} x {axes['Y']} pixels are more than the {MAX_PIXELS // 10**6} million "
            "that are taken at once; crop it, or export a lower level of it."
        )


def check_rgb_series(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> None:
    """An `ImageError` where the series is no single RGB image, before its pixels are read."""
    axes, page = axis_lengths(series), series.keyframe
    colours, channels = axes.get("S", 1), axes.get("C", 1)
    stack = math.prod(n for axis, n in axes.items() if axis not in "YXSC")
    if stack > 1:
        raise ImageError(f"a stack of {stack} images; save the one you want as a file of its own.")
    if page.photometric == PHOTOMETRIC.PALETTE:
        return
    if colours > _MAX_SAMPLES:
        raise ImageError(f"{colours} values per pixel; save it as RGB first.")
    if colours * channels < 3:
        raise ImageError("a grey image has no colours to decompose.")
    if channels > 1 and not (channels == 3 and colours == 1 and _has_rgb_channel_names(tif)):
        raise ImageError(
            f"{channels} separate channels, which need not be red, green and blue; convert it to "
            "RGB first (in Fiji: Image > Type > RGB Color)."
        )
    ycbcr = page.photometric == PHOTOMETRIC.YCBCR and page.compression in _DECODED_TO_RGB
    if not ycbcr and page.photometric not in (PHOTOMETRIC.RGB, PHOTOMETRIC.MINISBLACK):
        cmyk = page.photometric == PHOTOMETRIC.SEPARATED
        kind = "CMYK" if cmyk else getattr(page.photometric, "name", page.photometric)
        raise ImageError(f"its colours are stored as {kind}; save it as RGB first.")


def _read_rgb_series(series: tifffile.TiffPageSeries) -> npt.NDArray[Any]:
    axes, page = axis_lengths(series), series.keyframe
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


def read_pixel_size(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> PixelSize | None:
    """From whoever knows best: OME-XML, the scanner's description, ImageJ, the resolution tags."""
    for (y, x), (least, most) in _pixel_size_candidates(tif, series):
        if least <= y <= most and least <= x <= most:
            return y, x
    return None


def _pixel_size_candidates(
    tif: tifffile.TiffFile, series: tifffile.TiffPageSeries
) -> Iterator[tuple[PixelSize, tuple[float, float]]]:
    page = series.keyframe
    if tif.is_ome:
        yield _ome_pixel_size(tif, series), _PLAUSIBLE_STATED_SIZES
    stated = re.search(r"\bMPP\s*=\s*([0-9.]+)", page.description)
    if stated and page.description.startswith("Aperio"):
        size = _parse_float(stated[1])
        yield (size, size), _PLAUSIBLE_STATED_SIZES
    unit = math.nan
    if tif.is_imagej:
        unit = _micrometres_per_unit((tif.imagej_metadata or {}).get("unit", ""))
        yield _resolution_pixel_size(page, unit), _PLAUSIBLE_STATED_SIZES
    if math.isnan(unit) and page.resolutionunit in (RESUNIT.INCH, RESUNIT.CENTIMETER):
        name = "inch" if page.resolutionunit == RESUNIT.INCH else "cm"
        yield _resolution_pixel_size(page, _micrometres_per_unit(name)), _PLAUSIBLE_TAG_SIZES


def _resolution_pixel_size(page: tifffile.TiffPage | tifffile.TiffFrame, unit: float) -> PixelSize:
    x, y = page.resolution
    return (unit / y if y > 0 else math.nan), (unit / x if x > 0 else math.nan)


def _ome_pixel_size(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> PixelSize:
    pixels = _ome_elements(tif, "Pixels")
    number = tif.series.index(series)
    if number >= len(pixels):
        return math.nan, math.nan
    y, x = (
        _parse_float(pixels[number].get(f"PhysicalSize{axis}", "nan"))
        * _micrometres_per_unit(pixels[number].get(f"PhysicalSize{axis}Unit", "µm"))
        for axis in "YX"
    )
    return y, x


def _has_rgb_channel_names(tif: tifffile.TiffFile) -> bool:
    """True for an OME-TIFF whose channels are called red, green and blue."""
    names = [element.get("Name", "").strip().lower() for element in _ome_elements(tif, "Channel")]
    return names[:3] == ["red", "green", "blue"]


def _ome_elements(tif: tifffile.TiffFile, tag: str = "*") -> list[ElementTree.Element]:
    if not tif.is_ome or not tif.ome_metadata:
        return []
    try:
        return ElementTree.fromstring(tif.ome_metadata).findall(f".//{{*}}{tag}")
    except ElementTree.ParseError:
        return []


def _parse_float(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _micrometres_per_unit(name: object) -> float:
    """Micrometres in one unit, NaN where it is none of length."""
    # ImageJ writes the micro sign as an escape; Unicode has it twice.
    plain = str(name).strip().replace("\\u00B5", "µ").replace("μ", "µ")
    return _MICROMETRES_PER_UNIT.get(plain, math.nan)
