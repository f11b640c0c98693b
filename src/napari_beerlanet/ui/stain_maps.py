"""Colormaps of components: from no dye to the colour that the dye gives, on white or on black."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from napari.utils.colormaps import AVAILABLE_COLORMAPS, Colormap

from napari_beerlanet.core.results import hex_colour

_STEPS = 33
_PREFIXES = ("dye #", "glow #")


def dye_map(colour: npt.ArrayLike) -> Colormap:
    """From white to the RGB colour (0 … 255) as dye darkens: evenly in optical density."""
    at = np.linspace(0, 1, _STEPS)[:, None]
    rgb = (np.maximum(np.asarray(colour, float), 1) / 255)[None] ** at
    return _named(_PREFIXES[0], colour, rgb)


def glow_map(colour: npt.ArrayLike) -> Colormap:
    """From black to the colour's hue at full brightness: for adding up on a dark canvas."""
    hue = np.asarray(colour, float)
    hue = hue - 0.6 * hue.min()  # what all three channels share only greys the sum
    rgb = np.linspace(0, 1, _STEPS)[:, None] * (hue / max(hue.max(), 1))[None]
    return _named(_PREFIXES[1], colour, rgb)


def _named(prefix: str, colour: npt.ArrayLike, rgb: npt.NDArray[np.float64]) -> Colormap:
    opaque = np.ones((len(rgb), 1))
    return Colormap(np.hstack([rgb, opaque]), name=prefix + hex_colour(colour)[1:])


def forget_unused(viewer: Any) -> None:
    """Take our colormaps that no layer has any more out of napari's list.

    napari keeps every colormap that a layer ever had; a moved slider would fill the list.
    """
    used = {getattr(getattr(layer, "colormap", None), "name", None) for layer in viewer.layers}
    for name in [name for name in AVAILABLE_COLORMAPS if name.startswith(_PREFIXES)]:
        if name not in used:
            AVAILABLE_COLORMAPS.pop(name, None)
