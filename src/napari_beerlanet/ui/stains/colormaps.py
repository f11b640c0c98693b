"""Colormaps of stain components: from no dye to the colour of the dye, on white or on black."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from napari.utils.colormaps import AVAILABLE_COLORMAPS, Colormap

from napari_beerlanet.core.images.rgb import hex_colour

if TYPE_CHECKING:
    from napari import Viewer

_COLORMAP_STEPS = 33
_COLORMAP_PREFIXES = ("dye #", "glow #")


def dye_colormap(colour: npt.ArrayLike) -> Colormap:
    """From white to the RGB colour (0 … 255), linear in optical density."""
    at = np.linspace(0, 1, _COLORMAP_STEPS)[:, None]
    rgb = (np.maximum(np.asarray(colour, float), 1) / 255)[None] ** at
    return _named_colormap(_COLORMAP_PREFIXES[0], colour, rgb)


def glow_colormap(colour: npt.ArrayLike) -> Colormap:
    """From black to the colour's hue at full brightness, for additive blending."""
    hue = np.asarray(colour, float)
    hue = hue - 0.6 * hue.min()  # the common part of all channels would only turn the sum grey
    rgb = np.linspace(0, 1, _COLORMAP_STEPS)[:, None] * (hue / max(hue.max(), 1))[None]
    return _named_colormap(_COLORMAP_PREFIXES[1], colour, rgb)


def _named_colormap(prefix: str, colour: npt.ArrayLike, rgb: npt.NDArray[np.float64]) -> Colormap:
    opaque = np.ones((len(rgb), 1))
    return Colormap(np.hstack([rgb, opaque]), name=prefix + hex_colour(colour)[1:])


def remove_unused_colormaps(viewer: Viewer) -> None:
    """Remove our colormaps that no layer uses from napari's list.

    napari keeps every colormap that a layer ever had; a moved slider would fill the list.
    """
    used = {getattr(getattr(layer, "colormap", None), "name", None) for layer in viewer.layers}
    for name in [name for name in AVAILABLE_COLORMAPS if name.startswith(_COLORMAP_PREFIXES)]:
        if name not in used:
            AVAILABLE_COLORMAPS.pop(name, None)
