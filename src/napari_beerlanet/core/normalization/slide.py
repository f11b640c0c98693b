"""Normalize an image of any size lazily: statistics streamed once, then colours looked up.

The statistics are those of the slide's tissue, not of the empty glass around it, as a template is a
field of tissue. After that a block costs a look-up; colours that come for the first time, as those
of coarser levels do, join the table.
"""

from __future__ import annotations

import uuid
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.images import NonTissue
from napari_beerlanet.core.images.pyramid import as_dask, as_levels
from napari_beerlanet.core.images.rgb import ImageError, clip_floats, to_uint8
from napari_beerlanet.core.normalization.normalizer import (
    Appearance,
    ColourMap,
    Normalizer,
    NormalizerError,
)
from napari_beerlanet.core.stains.palette import Palette, decode, encode, palette_of
from napari_beerlanet.core.stains.slide import SlideScan, scan_slide_colours
from napari_beerlanet.core.stains.solver import kernels

NOT_TISSUE: tuple[NonTissue, ...] = ("glass", "pen", "border")
"""What the statistics of a slide shall not see."""


@dataclass(frozen=True)
class NormalizedSlide:
    """A slide in other colours.

    `levels`: dask arrays (H, W, 3 or 4) of the slide's dtype, the finest first, as a multiscale
    layer takes them; the rest as of `NormalizedImage`.
    """

    levels: list[Any] = field(repr=False)
    notes: tuple[str, ...] = ()
    unchanged: bool = False
    before: Appearance | None = None
    after: Appearance | None = None


def normalize_slide(
    data: Any,
    normalizer: Normalizer,
    *,
    leave_out: Collection[NonTissue] = NOT_TISSUE,
    report: Report | None = None,
) -> NormalizedSlide:
    """Normalize an image (H, W, 3 or 4), or its pyramid as a list, the finest level first.

    `leave_out` as for `decompose_slide`; nothing is left out of a slide on which no tissue is
    found. Methods that look at more than a pixel's colour are a `NormalizerError`.
    """
    levels = as_levels(data)
    palette = slide_palette(levels, leave_out, report) if normalizer.colour_only else None
    if palette is None:
        raise NormalizerError(
            f"{normalizer.method} looks at more than a pixel's colour, so it does not run on a "
            "slide; choose a method that goes by colour alone."
        )
    return recolour_slide(levels, normalizer.colour_map(palette), palette)


def recolour_slide(
    levels: Sequence[Any], colour_map: ColourMap, palette: Palette | None = None
) -> NormalizedSlide:
    """A slide's levels under a colour map; colours of `palette` are looked up from the start."""
    table = ColourTable(colour_map, palette)
    return NormalizedSlide(
        [_lazy_level(level, table) for level in levels],
        colour_map.notes,
        colour_map.unchanged,
        colour_map.before,
        colour_map.after,
    )


def slide_palette(
    data: Any, leave_out: Collection[NonTissue] = NOT_TISSUE, report: Report | None = None
) -> Palette:
    """The 8-bit colours of a slide's finest level, counted where there is tissue."""
    scan = SlideScan(leave_out=tuple(leave_out))
    try:
        colours = scan_slide_colours(data, scan, report)
    except ImageError:
        if not leave_out:
            raise
        colours = scan_slide_colours(data, replace(scan, leave_out=()), report)
    if colours.palette is not None:
        return colours.palette
    pixels = clip_floats(colours.image)
    return palette_of(to_uint8(pixels.reshape(-1, pixels.shape[-1])))


class ColourTable:
    """What colours become, looked up; for any number of threads at once.

    A table of all 8-bit colours, of which only the pages that are touched take memory. A colour is
    written in one go and never changes, so threads need not wait for each other: at worst two write
    the same.
    """

    def __init__(self, colour_map: ColourMap, palette: Palette | None = None) -> None:
        self.colour_map = colour_map
        self._table = np.zeros(kernels.CODE_COUNT, np.uint32)
        if palette is not None and not colour_map.unchanged:
            self._add(palette.codes)

    def __call__(self, pixels: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(h, w, 3 or 4) of pixels (h, w, 3 or 4), in their dtype, alpha kept."""
        if self.colour_map.unchanged or not pixels.size:
            return pixels
        flat = np.ascontiguousarray(pixels).reshape(-1, pixels.shape[-1])
        out = flat.copy()
        if pixels.dtype != np.uint8:
            out[:, :3] = self.colour_map(clip_floats(np.ascontiguousarray(flat[:, :3])))
        elif not kernels.look_up_colours(flat, self._table, out):
            codes = np.unique(encode(flat))
            self._add(codes[self._table[codes] == 0])
            kernels.look_up_colours(flat, self._table, out)
        return out.reshape(pixels.shape)

    def _add(self, codes: npt.NDArray[Any]) -> None:
        new = self.colour_map(decode(codes, np.uint8)).astype(np.uint32)
        self._table[codes] = (1 << 24) | (new[:, 2] << 16) | (new[:, 1] << 8) | new[:, 0]


def _lazy_level(level: Any, table: ColourTable) -> Any:
    import dask.array as da

    array = as_dask(level)
    array = array.rechunk({array.ndim - 1: -1})
    lazy: Any = da.map_blocks  # dask has no types here
    name = f"beerlanet-normalized-{uuid.uuid4().hex}"  # or dask would hash the table
    meta = np.empty((0,) * array.ndim, array.dtype)
    return lazy(table, array, dtype=array.dtype, meta=meta, name=name)
