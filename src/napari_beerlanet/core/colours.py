"""Colours of classes, as "#rrggbb": told apart by the colour-blind, and seen on stained slides."""

from __future__ import annotations

import colorsys
import re
from collections.abc import Sequence

RGB = tuple[int, int, int]

# Okabe and Ito's colours; those that resemble common stains or the background come last.
_FIRST = ("#0072b2", "#009e73", "#e69f00", "#d55e00", "#56b4e9", "#f0e442", "#3c3c3c", "#cc79a7")
_TURN = 0.618034  # of the circle of hues: each new hue falls into one of the largest gaps


def class_colours(count: int) -> list[str]:
    """As many colours as there are classes, the same ones every time."""
    return [*_FIRST[:count], *(_further(i) for i in range(count - len(_FIRST)))]


def parse_colours(colours: Sequence[str] | None, count: int) -> list[RGB]:
    """Red, green and blue of each class; those of `class_colours` where none are given."""
    given = class_colours(count) if colours is None else list(colours)
    if len(given) != count:
        raise ValueError(f"{len(given)} colours for {count} classes; each class needs one.")
    return [parse_colour(colour) for colour in given]


def parse_colour(text: str) -> RGB:
    """Red, green and blue from 0 to 255 of a colour such as "#a03c50"."""
    if not isinstance(text, str) or not re.fullmatch(r"#[0-9a-fA-F]{6}", text):
        raise ValueError(f'A colour is written as "#a03c50", not {text!r:.40}.')
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)


def _further(index: int) -> str:
    lightness = (0.45, 0.62, 0.32)[index % 3]
    red, green, blue = colorsys.hls_to_rgb(index * _TURN % 1, lightness, 0.9)
    return f"#{round(255 * red):02x}{round(255 * green):02x}{round(255 * blue):02x}"
