"""Detections drawn on their image: boxes in their class's colour and a legend with counts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from napari_beerlanet.core.boxes.classes import parse_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import intersection, scale
from napari_beerlanet.core.figures.drawing import GREY, INK, LINE, RGB, draw_text, elide, thumbnail
from napari_beerlanet.core.images.rgb import check_rgb, white_level

_MAX_SCORES_DRAWN = 60  # more detections than this have no scores written at them
_MAX_LEGEND_ROWS = 12  # of classes in the legend
_WHITE = (255, 255, 255)


def draw_overlay(
    rgb: Any,
    detections: Detections,
    colours: Sequence[str] | None = None,
    confidence: float | None = None,
    max_side: int | None = None,
) -> npt.NDArray[np.uint8]:
    """Draw detections into their image (H, W, 3 or 4): (H, W, 3) uint8.

    `colours` are "#rrggbb" by class. With `confidence`, those with at least this score are drawn,
    and the legend says so. `max_side` makes the picture smaller where a side is longer.
    """
    visible = detections if confidence is None else detections.above(confidence)
    pixels = check_rgb(rgb).pixels
    factor = min(1.0, (max_side or np.inf) / max(pixels.shape[:2]))
    picture = Image.fromarray(_to_display_rgb(pixels, factor))
    boxes = scale(visible.xyxy, factor)
    shades = parse_colours(colours, len(visible.names))
    draw = ImageDraw.Draw(picture)
    width = _line_width(picture.size, boxes)
    for i in range(len(visible) - 1, -1, -1):  # the best last, on top
        _draw_box(draw, boxes[i], width, shades[visible.labels[i]])
    if len(visible) <= _MAX_SCORES_DRAWN and (visible.scores < 1).any():  # annotations are certain
        _write_scores(draw, picture.size, boxes, visible, shades, width)
    _add_legend(picture, boxes, _Legend.of(visible, shades, confidence, picture.size))
    return np.array(picture)


def scale_to_picture(detections: Detections, picture: npt.NDArray[Any]) -> Detections:
    """Detections of an image in pixels of a smaller picture (h, w, …) of it."""
    high, wide = picture.shape[:2]
    height, width = detections.image_shape or (high, wide)
    boxes = scale(detections.xyxy, wide / width, high / height)
    return replace(detections, xyxy=boxes, image_shape=(high, wide), candidates=None)


def _to_display_rgb(pixels: npt.NDArray[Any], factor: float) -> npt.NDArray[np.uint8]:
    """(H, W, 3) uint8, scaled by `factor`; transparent parts white, 12 bit in 16 made bright."""
    height, width = (max(round(side * factor), 1) for side in pixels.shape[:2])
    if factor == 1 and pixels.dtype == np.uint8 and pixels.shape[2] == 3:
        return np.ascontiguousarray(pixels)
    white = white_level(pixels.dtype)
    small = thumbnail(pixels, (width, height)) if factor < 1 else pixels.astype(np.float32)
    brightest = float(np.percentile(small[::7, ::7, :3], 99.5)) / white
    gain = 0.95 / brightest if white != 255 and 0 < brightest < 0.5 else 1.0
    rgb = np.clip(small[..., :3] * (gain * 255 / white), 0, 255)
    if pixels.shape[2] == 4:
        alpha = small[..., 3:] / white
        rgb = alpha * rgb + (1 - alpha) * 255
    return np.asarray(np.rint(rgb), dtype=np.uint8)


def _line_width(size: tuple[int, int], boxes: npt.NDArray[Any]) -> int:
    """Wide enough to be seen in the whole picture, narrow enough to leave the objects visible."""
    width = min(size) / 250
    if len(boxes):
        sides = np.sqrt(np.prod(boxes[:, 2:] - boxes[:, :2], axis=1))
        width = min(width, float(np.median(sides)) / 16)
    return max(round(width), 1)


def _draw_box(draw: ImageDraw.ImageDraw, box: npt.NDArray[Any], width: int, colour: RGB) -> None:
    """A rectangle whose line lies on the box's edge."""
    x1, y1, x2, y2 = (round(float(value)) for value in box)
    out = width // 2
    corners = (x1 - out, y1 - out, max(x2 - 1 + out, x1 - out), max(y2 - 1 + out, y1 - out))
    draw.rectangle(corners, outline=colour, width=width)


def _text_size(size: tuple[int, int]) -> int:
    return max(round(min(size) / 38), 11)


def _write_scores(
    draw: ImageDraw.ImageDraw,
    size: tuple[int, int],
    boxes: npt.NDArray[Any],
    visible: Detections,
    shades: Sequence[RGB],
    width: int,
) -> None:
    """Each score on a tab inside the upper left corner of its box, where there is room."""
    height = max(round(0.8 * _text_size(size)), 10)
    for i in range(len(boxes) - 1, -1, -1):
        box, colour = boxes[i], shades[visible.labels[i]]
        text = f"{100 * visible.scores[i]:.0f} %"
        x, y = max(float(box[0]), 0), max(float(box[1]), 0)
        length = _text_width(text, height) + 0.6 * height
        if box[2] - x < 1.5 * length or box[3] - y < 3 * height:
            continue
        draw.rectangle((x, y, x + length, y + 1.3 * height), fill=colour)
        at = (x + 0.3 * height + width / 2, y + 0.65 * height)
        draw_text(draw, at, text, height, _readable_on(colour))


def _readable_on(colour: RGB) -> RGB:
    red, green, blue = colour
    return INK if 0.299 * red + 0.587 * green + 0.114 * blue > 150 else _WHITE


def _text_width(text: str, height: int) -> float:
    return draw_text(ImageDraw.Draw(Image.new("RGB", (1, 1))), (0, 0), text, height)


@dataclass(frozen=True)
class _Legend:
    """Lines of text, those of classes with a colour, and where they go; lengths in pixels."""

    lines: list[tuple[str, RGB | None]]
    text: int
    width: int

    @classmethod
    def of(
        cls,
        visible: Detections,
        shades: Sequence[RGB],
        confidence: float | None,
        size: tuple[int, int],
    ) -> _Legend:
        text = _text_size(size)
        lines: list[tuple[str, RGB | None]] = list(_class_lines(visible, shades))
        objects = f"{len(visible)} objects" if len(visible) != 1 else "1 object"
        objects = objects if len(visible) else "No objects"
        lines.append((objects if confidence is None else f"{objects} above {confidence:g}", None))
        room = max(0.45 * size[0], min(12 * text, size[0] - 3.5 * text))
        lines = [(elide(line, room, text), colour) for line, colour in lines]
        longest = max(_text_width(line, text) for line, _ in lines)
        return cls(lines, text, round(longest + 2.7 * text))

    @property
    def height(self) -> int:
        return round((1.5 * len(self.lines) + 0.6) * self.text)


def _class_lines(visible: Detections, shades: Sequence[RGB]) -> list[tuple[str, RGB | None]]:
    """ "RBC 154" for each class; where there are many, for the most frequent ones."""
    numbers = np.bincount(visible.labels, minlength=len(visible.names))
    order = list(range(len(numbers)))
    if len(order) > _MAX_LEGEND_ROWS:
        frequent = np.argsort(-numbers, kind="stable")[: _MAX_LEGEND_ROWS - 1]
        order = sorted(int(label) for label in frequent if numbers[label])
    lines: list[tuple[str, RGB | None]] = [
        (f"{visible.names[label]} {numbers[label]}", shades[label]) for label in order
    ]
    rest = int(numbers.sum() - numbers[order].sum())
    return [*lines, (f"other classes {rest}", None)] if rest else lines


def _add_legend(picture: Image.Image, boxes: npt.NDArray[Any], legend: _Legend) -> None:
    """Put the legend into the corner where it hides least, if it leaves half of the picture."""
    width, height = picture.size
    if 2 * legend.width * legend.height > width * height:
        return
    gap = legend.text // 2
    left, top = width - legend.width - gap, height - legend.height - gap
    corners = [(x, y) for y in (gap, top) for x in (gap, left)]
    places = np.array([(x, y, x + legend.width, y + legend.height) for x, y in corners])
    hidden = intersection(places.astype(np.float64), boxes).sum(axis=1)
    x, y = corners[int(np.argmin(hidden))]
    panel = (x, y, x + legend.width, y + legend.height)
    under = picture.crop(panel)
    picture.paste(Image.blend(under, Image.new("RGB", under.size, _WHITE), 0.85), (x, y))
    draw = ImageDraw.Draw(picture)
    draw.rectangle((*panel[:2], panel[2] - 1, panel[3] - 1), outline=LINE)
    for row, (line, colour) in enumerate(legend.lines):
        middle = y + (1.5 * row + 1.05) * legend.text
        start, half = x + 0.6 * legend.text, 0.45 * legend.text
        if colour is not None:
            draw.rectangle((start, middle - half, start + 2 * half, middle + half), fill=colour)
        draw_text(
            draw, (start + 1.5 * legend.text, middle), line, legend.text, INK if colour else GREY
        )
