"""Pictures embedded in a report as data URIs: the annotated overview and galleries of crops."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw

from napari_beerlanet.core.boxes.classes import parse_colour
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.images.rgb import fill_transparent, to_uint8

Pixels = npt.NDArray[Any]
Indices = npt.NDArray[np.int64]

_CROP_SIZE = 104  # pixels of a crop in the page, at twice the density of a screen
_CROP_CONTEXT = 0.5  # of a box's longer side, around it


class EmbeddedImage(NamedTuple):
    """An image as a data URI, with the text that says what is to be seen.

    A crop also has the name of its class, and that class's colour.
    """

    address: str
    text: str
    width: int
    height: int
    class_name: str = ""
    colour: str = ""


def embed_image(image: Image.Image, text: str, quality: int = 86) -> EmbeddedImage:
    """An image as JPEG in the page."""
    buffer = io.BytesIO()
    image.convert("RGB").save(buffer, "JPEG", quality=quality, optimize=True)
    address = "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode("ascii")
    return EmbeddedImage(address, text, *image.size)


def evenly_spaced(scores: npt.NDArray[Any], count: int) -> Indices:
    """Up to `count` places in (n,) falling scores, evenly from the highest to the lowest."""
    n = len(scores)
    if n <= count:
        return np.arange(n, dtype=np.int64)
    return np.unique(np.linspace(0, n - 1, count).round().astype(np.int64))


def crop_gallery(
    pixels: Pixels, xyxy: npt.NDArray[Any], colours: Sequence[str], texts: Sequence[str]
) -> list[EmbeddedImage]:
    """Crops around boxes (n, 4), each with its box in a colour and a text."""
    return [
        embed_image(crop_with_box(pixels, box, colour), text, 82)
        for box, colour, text in zip(np.asarray(xyxy, float), colours, texts, strict=True)
    ]


def crop_with_box(pixels: Pixels, box: npt.NDArray[Any], colour: str) -> Image.Image:
    """A square picture around a box x1, y1, x2, y2, white beyond the image's border."""
    x1, y1, x2, y2 = (float(v) for v in box)
    side = max((x2 - x1, y2 - y1, 8.0)) * (1 + _CROP_CONTEXT)
    left, top = (x1 + x2 - side) / 2, (y1 + y2 - side) / 2
    height, width = pixels.shape[:2]
    columns = slice(max(int(left), 0), min(int(left + side) + 2, width))
    rows = slice(max(int(top), 0), min(int(top + side) + 2, height))
    part = pixels[rows, columns]
    scale = 2 * _CROP_SIZE / side
    square = Image.new("RGB", (2 * _CROP_SIZE, 2 * _CROP_SIZE), (255, 255, 255))
    if part.size:
        eight = np.ascontiguousarray(fill_transparent(to_uint8(load_array(part))))
        size = (max(round(part.shape[1] * scale), 1), max(round(part.shape[0] * scale), 1))
        at = (round((columns.start - left) * scale), round((rows.start - top) * scale))
        square.paste(Image.fromarray(eight).resize(size, Image.Resampling.BICUBIC), at)
    corners = [(v - o) * scale for v, o in zip((x1, y1, x2, y2), (left, top) * 2, strict=True)]
    ImageDraw.Draw(square).rectangle(corners, outline=parse_colour(colour), width=3)
    return square


class CertaintyGallery(NamedTuple):
    """Crops of cells of one kind, the most certain ones first, and then the least certain ones."""

    most: list[EmbeddedImage]
    least: list[EmbeddedImage]


def certainty_gallery(
    pixels: Pixels,
    xyxy: npt.NDArray[Any],
    certainty: npt.NDArray[np.float64],
    names: Sequence[str],
    colours: Sequence[str],
    count: int,
) -> CertaintyGallery:
    """Up to `count` crops each of the most and the least certain boxes (n, 4), none twice.

    `certainty` (n,) from 0 to 1, `names` and `colours` of their types (n,).
    """

    def crop(k: int) -> EmbeddedImage:
        return typed_crop(pixels, xyxy[k], float(certainty[k]), names[k], colours[k])

    most, least = most_and_least(certainty, count)
    return CertaintyGallery([crop(int(k)) for k in most], [crop(int(k)) for k in least])


def most_and_least(certainty: npt.NDArray[np.float64], count: int) -> tuple[Indices, Indices]:
    """Up to `count` places each of the highest and the lowest of (n,) values, none twice."""
    order = np.argsort(-certainty, kind="stable")
    most = order[:count]
    return most, order[max(len(order) - count, len(most)) :][::-1]


def typed_crop(
    pixels: Pixels, box: npt.NDArray[Any], certainty: float, name: str, colour: str
) -> EmbeddedImage:
    """The crop of a box x1, y1, x2, y2 with its type and how certain that is."""
    (made,) = crop_gallery(pixels, np.asarray(box)[None], [colour], [f"{100 * certainty:.0f} %"])
    return made._replace(class_name=name, colour=colour)


def example_gallery(
    pixels: Pixels,
    detections: Detections,
    rows: Indices,
    class_colours: Sequence[str],
    frame: str | None = None,
    count: int = 12,
) -> list[EmbeddedImage]:
    """Crops of some of the detections `rows`, each with its class, by falling score.

    The boxes are drawn in the class's colour, or that of the `frame`.
    """
    chosen = rows[evenly_spaced(detections.scores[rows], count)]
    labels = detections.labels[chosen].tolist()
    shades = [class_colours[label] for label in labels]
    texts = [f"{100 * score:.0f} %" for score in detections.scores[chosen]]
    frames = shades if frame is None else [frame] * len(chosen)
    crops = crop_gallery(pixels, detections.xyxy[chosen], frames, texts)
    return [
        crop._replace(class_name=detections.names[label], colour=shade)
        for crop, label, shade in zip(crops, labels, shades, strict=True)
    ]
