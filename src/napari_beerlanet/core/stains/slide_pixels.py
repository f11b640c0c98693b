"""A slide's pixels as the detector takes them: 8-bit RGB, sliced as if they were in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.images.pyramid import (
    chunk_aligned_regions,
    copy_subsampled,
    read_region,
    read_thumbnail,
)
from napari_beerlanet.core.images.rgb import PADDING_GREY, fill_transparent, to_uint8
from napari_beerlanet.core.stains.palette import Palette, count_colours, decode, encode
from napari_beerlanet.core.stains.solver import kernels

_OVERVIEW_SIDE = 4096  # pixels of the longer side of what is kept in memory

Pixels = npt.NDArray[np.uint8]
ColourFunction = Callable[[Pixels], Pixels]
"""Colours (n, 3) to what they become."""


class SlidePixels:
    """(H, W, 3) uint8 of the finest of some `levels`; transparent pixels are padding's grey.

    Slices with steps, for a look at the whole, come from a small copy in memory: of an image of up
    to 4096 pixels that is the image itself. `recolour` is applied to the colours of all pixels.
    """

    dtype, ndim = np.dtype(np.uint8), 3

    def __init__(self, levels: Sequence[Any], recolour: ColourFunction | None = None) -> None:
        self._levels, self._recolour = levels, recolour
        self.shape = (int(levels[0].shape[0]), int(levels[0].shape[1]), 3)
        chunks = getattr(levels[0], "chunks", None)
        self.chunks = None if chunks is None else (*chunks[:2], 3)
        self._step = -(-max(self.shape) // _OVERVIEW_SIDE)
        self._overview: Pixels | None = None

    def __getitem__(self, index: Any) -> Pixels:
        index = index if isinstance(index, tuple) else (index,)
        index = (*index, *(slice(None),) * (3 - len(index)))
        rows, columns, channels = index
        if (rows.step or 1) > 1 or (columns.step or 1) > 1 or self._step == 1:
            return np.asarray(self._from_overview(rows, columns)[..., channels])
        top, bottom, _ = rows.indices(self.shape[0])
        left, right, _ = columns.indices(self.shape[1])
        return np.asarray(self._read(Rectangle.from_edges(left, top, right, bottom))[..., channels])

    def palette(self, report: Report | None = None) -> Palette:
        """The colours of all pixels."""
        parts = chunk_aligned_regions(self)
        if self._overview is not None or len(self._levels) > 1:
            return count_colours(self, parts, None, None, report)
        size = (-(-n // self._step) for n in self.shape[:2])
        small = np.zeros((*size, 3), np.uint8)

        def see(pixels: npt.NDArray[Any], part: Rectangle) -> None:
            copy_subsampled(small, pixels, part, self._step)

        found = count_colours(_FinestLevel(self), parts, None, see, report)
        self._overview = small
        return found

    def normalized(self, normalizer: Any, palette: Palette) -> tuple[SlidePixels, Palette, Any]:
        """The slide after a normalizer, its palette and the normalizer's `ColourMap`.

        `palette` has the slide's own colours. A normalizer that looks at more than colours is a
        `ValueError`.
        """
        if not normalizer.colour_only:
            raise ValueError(
                f"The model's normalizer ({normalizer.method}) looks at more than a pixel's "
                "colour, so it does not run on a slide; use a part of the slide as an image."
            )
        colour_map = normalizer.colour_map(palette)

        def recolour(colours: Pixels) -> Pixels:
            new: Pixels = colour_map(colours)
            new[(colours == PADDING_GREY).all(1)] = PADDING_GREY
            return new

        codes, rows = np.unique(encode(recolour(palette.colours)), return_inverse=True)
        counts = np.zeros(len(codes), np.int64)
        np.add.at(counts, rows, palette.counts)
        after = Palette(codes, counts, palette.dtype)
        return SlidePixels(self._levels, recolour), after, colour_map

    def _read(self, part: Rectangle) -> Pixels:
        return self._finish(read_region(self._levels[0], part))

    def _finish(self, pixels: npt.NDArray[Any]) -> Pixels:
        """Pixels (h, w, 3 or 4) of a level as they are shown."""
        rgb = fill_transparent(to_uint8(pixels))
        if self._recolour is None or not rgb.size:
            return rgb
        codes, _, rows = kernels.unique_codes(encode(np.ascontiguousarray(rgb).reshape(-1, 3)))
        return np.asarray(self._recolour(decode(codes, np.uint8))[rows].reshape(rgb.shape))

    def _from_overview(self, rows: slice, columns: slice) -> Pixels:
        """Pixels at a slice's places, or those of the small copy that are nearest."""
        if self._overview is None:
            self._overview = self._finish(read_thumbnail(self._levels, _OVERVIEW_SIDE))
        high, wide = self._overview.shape[:2]
        y = np.arange(*rows.indices(self.shape[0])) * high // self.shape[0]
        x = np.arange(*columns.indices(self.shape[1])) * wide // self.shape[1]
        if self._step == 1:
            return np.asarray(self._overview[rows, columns])
        return np.asarray(self._overview[y[:, None], x])


class _FinestLevel:
    """The same, always read from the finest level."""

    def __init__(self, pixels: SlidePixels) -> None:
        self._pixels = pixels
        self.shape, self.dtype, self.chunks = pixels.shape, pixels.dtype, pixels.chunks

    def __getitem__(self, index: Any) -> Pixels:
        rows, columns = index[:2]
        return self._pixels._read(
            Rectangle.from_edges(columns.start, rows.start, columns.stop, rows.stop)
        )


def palette_to_arrays(palette: Palette) -> dict[str, npt.NDArray[Any]]:
    """An 8-bit palette as plain arrays: what a slide's normalizer goes by, kept to resume with."""
    return {"slide_codes": palette.codes, "slide_counts": palette.counts}


def palette_from_arrays(arrays: Mapping[str, npt.NDArray[Any]]) -> Palette:
    """The inverse of `palette_to_arrays`."""
    return Palette(arrays["slide_codes"], arrays["slide_counts"], np.dtype(np.uint8))
