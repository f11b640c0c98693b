"""TIFF files: what their headers claim is checked before anything is planned for it, then read.

A file of a few bytes may declare any number of pixels, planes or values per pixel.
"""

from __future__ import annotations

import io
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
from tifffile import COMPRESSION, EXTRASAMPLE, PHOTOMETRIC, RESUNIT, TIFF

from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.rgb import MAX_PIXELS, ImageError

_MAX_PAGES = 10_000  # of a TIFF: the time that it takes to look at them
_LONG_SHAPE = re.compile(r'"shape":\s*\[[^\]]{1000}')  # as tifffile writes it, and reads it first
_MAX_SAMPLES = 16  # values of a pixel, of which the first three or four are read
_MAX_BITS = 256  # of these: RGBA of 64
_MAX_CHUNK_BYTES = 3 * MAX_PIXELS  # that are decoded at once of a slide
_MAX_BYTES = 8 * MAX_PIXELS  # of all values of what is read at once: RGBA of 16 bits
_MAX_XML_TAGS = 500_000  # of a description: ten thousand planes have room
_MAX_HEADER_READS = 4  # times a file's size that are read of it before any pixels are
_MIN_HEADER_BYTES = 1 << 16
# Bytes of pixels that a file may hold whatever its size, and how many for each of its own: of an
# image that is decoded at once, of a tile of it, and of all tiles of a slide, which come one by
# one. Blank glass is a thousandth in deflate.
AT_ONCE, _TILE, _STREAMED = (200_000_000, 200), (64_000_000, 200), (1_000_000_000, 1100)
_MAX_SHARED_BYTES = 1 << 20  # of parts that are the same bytes of the file, as blank ones may be
_MIN_CODED_PIXELS = 1 << 22  # below which a tile's own header may say what it likes
_MAX_SCANS = 50  # passes over all pixels of a JPEG; encoders make about ten
_MAX_PRECINCTS = 100_000  # of a JPEG 2000, beyond its bytes: each takes one at least
# What says a picture's size, wherever it is: decoders read on after rubbish.
_JPEG_FRAME = re.compile(
    rb"\xff[\xc0-\xc3\xc5-\xc7\xc9-\xcb\xcd-\xcf\xf7]\0[\x0b-\x2c].(.{4})", re.S
)
_PNG_HEAD = re.compile(rb"\x89PNG\r\n\x1a\n.{4}IHDR(.{8})", re.S)
_J2K_SIZE = re.compile(rb"\xff\x4f\xff\x51.{4}(.{16}).{16}(..)", re.S)
_J2K_STYLE = re.compile(rb"\xff([\x52\x53])\0(.)", re.S)
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
# Tiles that are whole files of other kinds: decoded to whatever size these say, which is told here.
_SIZED_TILES = _DECODED_TO_RGB | {COMPRESSION.PNG, COMPRESSION.WEBP}
# Likewise, and nothing but a decoder tells the size; or it ignores how much there is room for.
_UNSIZED_TILES = frozenset(TIFF.IMAGE_COMPRESSIONS) - _SIZED_TILES | {COMPRESSION.LERC}
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
        _check_bytes(series)
        return _read_rgb_series(series), read_pixel_size(tif, series)


def largest_series(tif: tifffile.TiffFile) -> tifffile.TiffPageSeries:
    """The image of the most pixels in a file."""
    _check_page_count(tif)
    if not tif.series:
        raise ImageError("damaged or cut short (no image in it).")
    header = tif.filehandle._fh
    assert isinstance(header, _HeaderFile)
    header.left = math.inf  # from here on it is pixels that are read
    return max(tif.series, key=series_area)


class _HeaderFile(io.BufferedReader):
    """A file of which no more bytes are read than are `left`, at first some times its size.

    Pages that lead in circles or lie one in the other, and tags that share their values, are as
    long as anyone likes.
    """

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path))
        self.left: float = _MIN_HEADER_BYTES + _MAX_HEADER_READS * path.stat().st_size

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size)
        self.left -= len(data)
        if self.left < 0:
            raise ImageError("damaged (its pages or tags share their bytes).")
        return data


def open_tiff(path: Path) -> tifffile.TiffFile:
    """Open a TIFF alone: a file must not have others opened, which may be pipes or anything."""
    file = _HeaderFile(path)
    try:
        tif = tifffile.TiffFile(file, _multifile=False)
        tif.filehandle._close = True  # with it
        tif.is_mmstack = tif.is_ndtiff = False  # Micro-Manager's have an index or parts beside them
        return tif
    except BaseException:
        file.close()
        raise


def _check_page_count(tif: tifffile.TiffFile) -> None:
    """Refuse what would take minutes to look at, before it is looked at."""
    description = tif.pages.first.description
    if tif.is_shaped and _LONG_SHAPE.search(description):
        raise ImageError("damaged (its description has a shape that no image has).")
    if "<!DOCTYPE" in description or description.count("<") > _MAX_XML_TAGS:
        raise ImageError("damaged (its description is larger than any image's).")
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


def check_proportion(decoded: int, stored: int, limit: tuple[int, int] = AT_ONCE) -> None:
    """An `ImageError` for so many bytes of pixels out of proportion to those in the file."""
    floor, ratio = limit
    if decoded > floor + ratio * stored:
        raise ImageError(f"damaged (its pixels are out of proportion to its {stored:,} bytes).")


def check_stored_pixels(
    tif: tifffile.TiffFile, series: tifffile.TiffPageSeries, streamed: bool = True
) -> None:
    """Refuse pixels that are declared and not in the file, or out of proportion to it.

    `streamed`: chunk by chunk from all levels, where otherwise the finest is read at once. From
    then on, a tile's own header must agree with the file's.
    """
    size = tif.filehandle.size
    for level in series.levels if streamed else [series]:
        page = level.keyframe
        parts, stored = (
            math.prod(page.chunked),
            min(len(page.dataoffsets), len(page.databytecounts)),
        )
        places = np.array([page.dataoffsets[:stored], page.databytecounts[:stored]], np.int64)
        if stored < parts:
            raise ImageError(
                f"damaged or cut short ({page.imagewidth} x {page.imagelength} pixels, of which "
                f"the file has {stored} parts out of {parts})."
            )
        if places.sum(0).max(initial=0) > size:
            raise ImageError("damaged or cut short (pixels are missing at its end).")
        if places[1].sum() > _MAX_SHARED_BYTES + 2 * size:
            raise ImageError("damaged (its parts are the same bytes).")
        check_proportion(level.nbytes, size, _STREAMED if streamed else AT_ONCE)
        if streamed:
            width = page.dtype.itemsize if page.dtype is not None else 1
            chunk = math.prod(page.chunks) * width
            check_proportion(chunk, int(places[1].max(initial=0)), _TILE)
            if chunk > _MAX_CHUNK_BYTES:
                raise ImageError("stored as one chunk, too large to decode; save it in tiles.")
        _check_tiles_when_decoded(page)


def _check_tiles_when_decoded(page: tifffile.TiffPage) -> None:
    """Have a tile refused whose own header declares far more pixels than the file's does."""
    if page.compression in _UNSIZED_TILES:
        name = getattr(page.compression, "name", page.compression)
        raise ImageError(f"compressed as {name}; save it with JPEG, LZW or deflate.")
    if page.compression not in _SIZED_TILES:
        return
    decode = page.decode
    most = max(4 * math.prod(page.chunks[:2]), _MIN_CODED_PIXELS)

    def checked(data: bytes | None, *arguments: Any, **named: Any) -> Any:
        if data is not None and check_picture((named.get("jpegheader") or b"") + data) > most:
            raise ImageError("damaged (a tile is larger than the file says).")
        return decode(data, *arguments, **named)

    page.decode = checked


def check_picture(data: bytes) -> int:
    """Pixels of a JPEG, JPEG 2000, PNG or WebP by its own header, at most; an `ImageError` where
    a few bytes of it send a decoder over all of them again, or there is no size.

    Of a JPEG 2000 of more than four components, as many times its pixels.
    """
    pixels: list[int] = [math.prod(struct.unpack(">HH", m[1])) for m in _JPEG_FRAME.finditer(data)]
    pixels += [math.prod(struct.unpack(">II", m[1])) for m in _PNG_HEAD.finditer(data)]
    pixels += [_webp_pixels(data)] if data.startswith(b"RIFF") else []
    for found in _J2K_SIZE.finditer(data):
        right, bottom, left, top = struct.unpack(">4I", found[1])
        sides, components = (max(right - left, 0), max(bottom - top, 0)), found[2]
        pixels.append(sides[0] * sides[1] * -(-int.from_bytes(components, "big") // 4))
        if _precincts(data, sides) > len(data) + _MAX_PRECINCTS:
            raise ImageError("damaged (a JPEG 2000 of more parts than bytes).")
    if not pixels:
        raise ImageError("damaged or cut short (a picture in it does not say its size).")
    if data.startswith(b"\xff\xd8") and data.count(b"\xff\xda") > _MAX_SCANS:
        raise ImageError(f"damaged (a JPEG of more than {_MAX_SCANS} passes).")
    return max(pixels)


def _precincts(data: bytes, sides: tuple[int, int]) -> int:
    """The most parts that a JPEG 2000 declares for one of its components."""
    most = 0
    for found in _J2K_STYLE.finditer(data):
        begin = found.start() + (14 if found[1] == b"\x52" else 11)
        end = found.start() + 2 + found[2][0]
        powers = data[begin:end][::-1]  # of the sides of parts, the finest resolution first
        if powers and data[begin - 5] == len(powers) - 1:
            high, wide = (
                [-(-side >> k + (byte >> shift & 15)) for k, byte in enumerate(powers)]
                for side, shift in zip(sides, (0, 4), strict=True)
            )
            most = max(most, sum(map(math.prod, zip(high, wide, strict=True))))
    return most


def _webp_pixels(data: bytes) -> int:
    kind, head = data[12:16], data[20:30].ljust(10, b"\0")
    if kind == b"VP8X":
        width, height = (1 + int.from_bytes(head[k : k + 3], "little") for k in (4, 7))
    elif kind == b"VP8L":
        bits = int.from_bytes(head[1:5], "little")
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (n & 0x3FFF for n in struct.unpack_from("<HH", head, 6))
    return int(width * height)


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


def _check_bytes(series: tifffile.TiffPageSeries) -> None:
    """Refuse values that take far more memory than three or four of 16 bits per pixel."""
    if series.nbytes > _MAX_BYTES:
        raise ImageError(
            f"{series.nbytes / 1e9:.1f} GB of values, more than are taken at once; save it as RGB "
            "of 8 or 16 bits, or crop it."
        )


def check_rgb_series(tif: tifffile.TiffFile, series: tifffile.TiffPageSeries) -> None:
    """An `ImageError` where the series is no single RGB image, before its pixels are read."""
    axes, page = axis_lengths(series), series.keyframe
    colours, channels = axes.get("S", 1), axes.get("C", 1)
    stack = math.prod(n for axis, n in axes.items() if axis not in "YXSC")
    if stack > 1:
        raise ImageError(f"a stack of {stack} images; save the one you want as a file of its own.")
    if page.photometric == PHOTOMETRIC.PALETTE:
        if colours * channels > 1:
            raise ImageError(f"a palette, and {colours * channels} values per pixel.")
        return
    if colours > _MAX_SAMPLES or colours * page.bitspersample > _MAX_BITS:
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
