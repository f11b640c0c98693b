"""Text, swatches and thumbnails for figures, with Pillow alone.

The font that comes with Pillow has no Greek letters, no micro sign and no accents.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

RGB = tuple[int, int, int]
Point = tuple[float, float]

INK, GREY, LINE = (32, 32, 36), (112, 112, 120), (208, 208, 212)
_OVERSAMPLE = 4  # pixels read per pixel shown, along each side, so that a slide costs no more


def thumbnail(array: npt.NDArray[Any], size: tuple[int, int]) -> npt.NDArray[np.float32]:
    """(H, W[, channels]) to float32 of `size` (width, height): averages, or enlarged pixels."""
    height, width = array.shape[:2]
    step = max(min(width // (_OVERSAMPLE * size[0]), height // (_OVERSAMPLE * size[1])), 1)
    small = np.asarray(array[::step, ::step], dtype=np.float32)
    method = Image.Resampling.BOX if width > size[0] else Image.Resampling.NEAREST
    planes = [small] if small.ndim == 2 else list(np.moveaxis(small, -1, 0))
    shown = [np.asarray(Image.fromarray(p.copy()).resize(size, method)) for p in planes]
    return shown[0] if small.ndim == 2 else np.stack(shown, axis=-1)


def tint(density: npt.NDArray[Any], colour: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    """A density from 0 to 1 as a mixture of white and a colour, (H, W, 3)."""
    part = np.clip(density, 0, 1)[..., None]
    mixed: npt.NDArray[np.uint8] = np.rint(255 + part * (colour - 255)).astype(np.uint8)
    return mixed


def draw_swatch(draw: ImageDraw.ImageDraw, corner: tuple[int, int], colour: RGB) -> None:
    """A small square of a colour."""
    x, y = corner
    draw.rectangle((x, y, x + 20, y + 20), fill=colour, outline=LINE)


def to_rgb(values: npt.NDArray[Any]) -> RGB:
    """Three numbers as a colour of Pillow's, clipped."""
    red, green, blue = (int(v) for v in np.clip(np.rint(values), 0, 255))
    return red, green, blue


def draw_text(
    draw: ImageDraw.ImageDraw,
    at: Point,
    text: str,
    size: int,
    colour: RGB = INK,
    anchor: str = "lm",
) -> float:
    """Write on one line and return its length."""
    shown = printable(text)
    draw.text(at, shown, fill=colour, font=_font(size), anchor=anchor)
    return _font(size).getlength(shown)


def draw_crop_sheet(
    crops: Sequence[npt.NDArray[np.uint8]],
    captions: Sequence[Sequence[str]],
    colours: Sequence[str],
    columns: int = 6,
    side: int = 120,
) -> npt.NDArray[np.uint8]:
    """Crops (h, w, 3) in rows, each with a frame of its colour "#rrggbb" and lines below it."""
    rows, line, frame = -(-len(crops) // columns), 16, 3
    cell, height = side + 12, side + max(map(len, captions), default=0) * line + 14
    sheet = Image.new("RGB", (columns * cell, max(rows, 1) * height), (255, 255, 255))
    draw = ImageDraw.Draw(sheet)
    for k, (crop, texts, colour) in enumerate(zip(crops, captions, colours, strict=True)):
        x, y = (k % columns) * cell + 6, (k // columns) * height + 6
        draw.rectangle((x - frame, y - frame, x + side + frame - 1, y + side + frame - 1), colour)
        sheet.paste(Image.fromarray(crop).resize((side, side), Image.Resampling.BILINEAR), (x, y))
        for number, text in enumerate(texts):
            at = (x, y + side + frame + (number + 0.5) * line)
            draw_text(draw, at, elide(text, side, 12), 12)
    return np.asarray(sheet)


def text_length(text: str, size: int) -> float:
    """How many pixels a text is long."""
    return _font(size).getlength(printable(text))


def elide(text: str, room: float, size: int) -> str:
    """The text, with its middle left out where it is too long."""
    font, text = _font(size), printable(text)
    keep = len(text)
    short = text
    while font.getlength(short) > room and keep > 2:
        keep -= 1
        short = f"{text[: keep - keep // 2].rstrip()}…{text[len(text) - keep // 2 :].lstrip()}"
    return short


def printable(text: str) -> str:
    """With accents left out, and a question mark for what the font cannot show."""
    return "".join(c if c in "·…" else _ascii(c) for c in text.replace("µ", "u"))


def _ascii(character: str) -> str:
    if unicodedata.combining(character):
        return ""
    base = unicodedata.normalize("NFKD", character)[0]
    return base if " " <= base <= "~" else "?"


@cache
def _font(size: int) -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size)
    assert isinstance(font, ImageFont.FreeTypeFont)  # Pillow has it wherever FreeType is
    return font
