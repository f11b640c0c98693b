"""Pictures inside the page, as data addresses: the image with its boxes, stains, and crops."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from .boxes import Detections
from .colours import parse_colour
from .images import check_rgb, to_bytes
from .report_html import escaped, picture

Pixels = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

_CROP = 104  # pixels of a crop in the page, at twice the density of a screen
_CONTEXT = 0.5  # of a box's longer side, around it


def embedded(image: Image.Image, words: str, quality: int = 86) -> str:
    """An image as JPEG in the page."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality, optimize=True)
    address = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return picture(address, words, *image.size)


def spread(scores: npt.NDArray[Any], count: int) -> Indices:
    """Up to `count` places in (n,) falling scores, evenly from the highest to the lowest."""
    n = len(scores)
    if n <= count:
        return np.arange(n, dtype=np.int64)
    return np.unique(np.linspace(0, n - 1, count).round().astype(np.int64))


def gallery(
    pixels: Pixels, xyxy: npt.NDArray[Any], colours: Sequence[str], words: Sequence[str]
) -> str:
    """Crops around boxes (n, 4), each with its box in a colour and words under it."""
    items = []
    for box, colour, text in zip(np.asarray(xyxy, float), colours, words, strict=True):
        cropped = embedded(crop(pixels, box, colour), text, 82)
        items.append(f"<figure>{cropped}<figcaption>{escaped(text)}</figcaption></figure>")
    return f'<div class="gallery">{"".join(items)}</div>' if items else ""


def crop(pixels: Pixels, box: npt.NDArray[Any], colour: str) -> Image.Image:
    """A square picture around a box x1, y1, x2, y2, white beyond the image's border."""
    x1, y1, x2, y2 = (float(v) for v in box)
    side = max((x2 - x1, y2 - y1, 8.0)) * (1 + _CONTEXT)
    left, top = (x1 + x2 - side) / 2, (y1 + y2 - side) / 2
    height, width = pixels.shape[:2]
    columns = slice(max(int(left), 0), min(int(left + side) + 2, width))
    rows = slice(max(int(top), 0), min(int(top + side) + 2, height))
    part = pixels[rows, columns]
    scale = 2 * _CROP / side
    square = Image.new("RGB", (2 * _CROP, 2 * _CROP), (255, 255, 255))
    if part.size:
        eight = np.ascontiguousarray(to_bytes(np.asarray(part))[..., :3])
        size = (max(round(part.shape[1] * scale), 1), max(round(part.shape[0] * scale), 1))
        at = (round((columns.start - left) * scale), round((rows.start - top) * scale))
        square.paste(Image.fromarray(eight).resize(size, Image.Resampling.BICUBIC), at)
    corners = [(v - o) * scale for v, o in zip((x1, y1, x2, y2), (left, top) * 2, strict=True)]
    ImageDraw.Draw(square).rectangle(corners, outline=parse_colour(colour), width=3)
    return square


def checked_pixels(pixels: Any) -> Pixels:
    """(H, W, 3 or 4) of an image that can be shown."""
    return check_rgb(pixels).pixels


def examples(pixels: Pixels, found: Detections, rows: Indices, colour: str, count: int = 12) -> str:
    """A gallery of some of the detections `rows`, from the surest to the least sure."""
    chosen = rows[spread(found.scores[rows], count)]
    words = [f"{100 * score:.0f} %" for score in found.scores[chosen]]
    return gallery(pixels, found.xyxy[chosen], [colour] * len(chosen), words)
