"""Decompose an image of any size: its colours are streamed and counted, then solved as in memory.

The solver knows an image by its palette and, to count its stains, by some blocks of it (see
`block_sample`). Both are gathered in one pass through the image, so the result is the one of
`decompose`, to the last bit of its spectra, however the image is tiled and in whatever order it is
read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import map_threads
from napari_beerlanet.core.images import NonTissue
from napari_beerlanet.core.images.pyramid import (
    as_levels,
    chunk_aligned_regions,
    read_region,
    read_thumbnail,
)
from napari_beerlanet.core.images.rgb import ImageError, check_rgb, clip_floats
from napari_beerlanet.core.images.tissue import TissueMask, find_tissue
from napari_beerlanet.core.stains.block_sample import (
    BlockSample,
    PixelSelection,
    block_corners,
    has_enough_blocks,
    random_corners_in_tiles,
)
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.lazy_densities import DensityPyramid
from napari_beerlanet.core.stains.palette import Palette, count_colours

_TILE_SIDE = 512  # of a sampled tile
_MAX_PIXELS_IN_MEMORY = 1 << 24  # of 16 bit or floats, solved at once
_THUMBNAIL_SIDE = 1024
_BACKGROUND_TILE_EVERY = 6  # of the sampled tiles: it shows the illumination


@dataclass(frozen=True, eq=False)
class SlideDecomposition:
    """A slide's stains.

    `fit` is the `Decomposition` of a thumbnail under the whole slide's fit: its background,
    spectra, active and share are the slide's, its image and densities the thumbnail's. `levels`
    are the slide's, the finest first; `counted` is the number of pixels that were fitted, `palette`
    their colours (of 8 bits).
    """

    fit: Decomposition
    levels: list[Any] = field(repr=False)
    counted: int
    tissue: TissueMask | None = field(default=None, repr=False)
    palette: Palette | None = field(default=None, repr=False)

    @cached_property
    def _lazy(self) -> DensityPyramid:
        return DensityPyramid(self.levels, self.fit)

    def densities(self, level: int = 0, component: int | None = None) -> Any:
        """Lazy densities of a level: a dask array (r, H, W) float32, or (H, W) of a component."""
        r = len(self.fit.active)
        if component is not None and not 0 <= component < r:
            raise ValueError(f"component must be from 0 to {r - 1}, not {component}.")
        return self._lazy.dask(check_level(level, self.levels), component)

    def pyramid(self, component: int) -> list[Any]:
        """Lazy densities of one component at every level, as a multiscale layer takes them."""
        return [self.densities(k, component) for k in range(len(self.levels))]


@dataclass(frozen=True)
class SlideScan:
    """Which pixels of a slide are counted and how, as `decompose_slide` describes it."""

    level: int = 0
    sample: int | None = None
    seed: int = 0
    leave_out: Collection[NonTissue] = ()
    tissue: TissueMask | None = field(default=None, repr=False)
    order: Sequence[int] | None = None
    threads: int | None = None

    def __post_init__(self) -> None:
        kinds = get_args(NonTissue)
        if isinstance(self.leave_out, str) or set(self.leave_out) - set(kinds):
            raise ValueError(f"leave_out takes {', '.join(kinds)}, not {quoted(self.leave_out)}.")


WHOLE_SLIDE = SlideScan()
"""Every pixel of the finest level."""


def decompose_slide(
    data: Any,
    *,
    level: int = WHOLE_SLIDE.level,
    sample: int | None = WHOLE_SLIDE.sample,
    seed: int = WHOLE_SLIDE.seed,
    leave_out: Collection[NonTissue] = WHOLE_SLIDE.leave_out,
    tissue: TissueMask | None = WHOLE_SLIDE.tissue,
    order: Sequence[int] | None = WHOLE_SLIDE.order,
    threads: int | None = WHOLE_SLIDE.threads,
    report: Report | None = None,
    **settings: Any,
) -> SlideDecomposition:
    """Decompose an image of any size into its stains, without having it in memory.

    Parameters
    ----------
    data
        A lazy image (H, W, 3 or 4), or its pyramid as a list, the finest level first.
    level
        Which level's colours are counted; 0 is the finest.
    sample
        Number of tiles of 512 × 512 pixels at random positions, by `seed`, instead of the whole
        level: for a preview. Most are of tissue, where there is any, some of background unless that
        is left out.
    leave_out
        Kinds of what is no tissue to exclude from the fit: "glass" (background), "pen", "border".
    tissue
        What is tissue; found where it is needed and not given.
    order
        In which order the parts of the level are read, as numbers.
    settings
        As for `decompose`: components, iterations, spectra, lam, gamma, domain, …

    Images of 16 bit or floats of more than 16 million pixels are always sampled.
    """
    scan = SlideScan(level, sample, seed, leave_out, tissue, order, threads)
    colours = scan_slide_colours(data, scan, subprogress(report, 0.0, 0.7))
    return fit_slide(colours, subprogress(report, 0.7, 1.0), **settings)


def fit_slide(
    colours: SlideColours, report: Report | None = None, **settings: Any
) -> SlideDecomposition:
    """Decompose a slide whose colours were gathered by `scan_slide_colours`."""
    fit = colours.fit(report, **settings)
    return SlideDecomposition(fit, colours.levels, colours.counted, colours.tissue, colours.palette)


@dataclass(frozen=True, eq=False)
class SlideColours:
    """The colours of a slide and what else a fit needs of it: gathered once, fitted repeatedly.

    `levels` are the slide's, the finest first; `counted` is the number of pixels, `palette`
    their colours (of 8 bits, None of others). `image` (h, w, 3 or 4) is what is solved, with the
    palette where there is one; `thumbnail` the slide's, None where that is the image.
    """

    levels: list[Any] = field(repr=False)
    counted: int
    tissue: TissueMask | None = field(default=None, repr=False)
    palette: Palette | None = field(default=None, repr=False)
    image: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0), repr=False)
    thumbnail: npt.NDArray[Any] | None = field(default=None, repr=False)

    def fit(self, report: Report | None = None, **settings: Any) -> Decomposition:
        """The thumbnail's decomposition under a fit of all colours.

        `settings` as for `decompose`: components, iterations, spectra, lam, gamma, domain, …
        """
        fit = decompose(self.image, palette=self.palette, report=report, **settings)
        if self.thumbnail is None:
            return fit
        densities = fit.densities_of(self.thumbnail)
        return replace(fit, image=check_rgb(self.thumbnail), densities=densities)


def scan_slide_colours(
    data: Any, scan: SlideScan = WHOLE_SLIDE, report: Report | None = None
) -> SlideColours:
    """Scan an image of any size, as `decompose_slide` takes it, for what a fit needs."""
    levels = as_levels(data)
    chosen = levels[check_level(scan.level, levels)]
    if scan.tissue is None and (scan.leave_out or scan.sample is not None):
        report_progress(report, 0, 100, "finding tissue")
        scan = replace(scan, tissue=find_tissue(levels))
        report = subprogress(report, 0.05, 1.0)
    selection = _select_pixels(chosen, scan.tissue, scan.leave_out)
    one_pass = _ColourPass(levels, chosen, scan, selection)
    if np.dtype(chosen.dtype) != np.uint8 or not has_enough_blocks(chosen.shape):
        return one_pass.in_memory(report)
    return one_pass.streamed(report)


@dataclass(frozen=True)
class _ColourPass:
    """One pass over a pyramid level."""

    levels: list[Any]
    level: Any
    scan: SlideScan
    selection: PixelSelection | None

    def streamed(self, report: Report | None) -> SlideColours:
        scan = self.scan
        if scan.sample is None:
            parts = chunk_aligned_regions(self.level)
        else:
            parts = self._sample_tiles(scan.sample)
        blocks = self._block_sample(parts)
        if scan.order is not None:
            parts = [parts[k] for k in scan.order]
        mask = None if self.selection is None else self.selection.mask
        palette = count_colours(self.level, parts, mask, blocks.add_tile, report, scan.threads)
        if not palette.counts.any():
            raise ImageError("Nothing is left to decompose: all is transparent or left out.")
        blocks.resample_without_holes(self.level, parts, scan.threads)
        thumbnail = blocks.thumbnail
        if thumbnail is None:
            thumbnail = read_thumbnail(self.levels, _THUMBNAIL_SIDE)
        counted, image = int(palette.counts.sum()), blocks.as_image(palette)
        return SlideColours(self.levels, counted, self.scan.tissue, palette, image, thumbnail)

    def in_memory(self, report: Report | None) -> SlideColours:
        """Of a small image, or of 16 bit and floats, where colours hardly repeat."""
        height, width = (int(n) for n in self.level.shape[:2])
        small = height * width <= _MAX_PIXELS_IN_MEMORY and (
            self.scan.sample is None or min(height, width) < _TILE_SIDE
        )
        max_tiles = _MAX_PIXELS_IN_MEMORY // _TILE_SIDE**2
        parts = [Rectangle(0, 0, width, height)]
        if not small:
            parts = self._sample_tiles(min(self.scan.sample or max_tiles, max_tiles))
        tiles = []
        for tile in map_threads(self._read, parts):
            tiles.append(tile)
            report_progress(report, len(tiles), len(parts), "reading tiles")
        pixels = np.concatenate(tiles) if len(tiles) > 1 else tiles[0]
        counted = int((pixels[..., 3] > 0).sum()) if pixels.shape[2] == 4 else pixels[..., 0].size
        whole = small and len(self.levels) == 1
        thumbnail = None if whole else clip_floats(read_thumbnail(self.levels, _THUMBNAIL_SIDE))
        return SlideColours(self.levels, counted, self.scan.tissue, None, pixels, thumbnail)

    def _read(self, part: Rectangle) -> npt.NDArray[Any]:
        """A part's pixels; those that are left out are transparent."""
        pixels = read_region(self.level, part)
        if self.selection is None:
            return pixels
        full = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
        alpha = pixels[..., 3] if pixels.shape[2] == 4 else np.full(pixels.shape[:2], full)
        alpha = np.where(self.selection.mask(part), alpha, 0).astype(pixels.dtype)
        return np.concatenate([pixels[..., :3], alpha[..., None]], axis=2)

    def _block_sample(self, parts: list[Rectangle]) -> BlockSample:
        whole = self.scan.sample is None
        if not whole:
            corners = random_corners_in_tiles(parts, self.scan.seed, self.selection)
        elif self.selection is not None:
            corners = self.selection.random_corners(self.scan.seed)
        else:
            corners = block_corners(self.level.shape)
        # Without a coarser level, a thumbnail would need another pass.
        step = -(-max(self.level.shape[:2]) // _THUMBNAIL_SIDE) if len(self.levels) == 1 else 0
        holes = whole and self.selection is None and self.level.shape[2] == 4
        return BlockSample(self.level, corners, step if whole else 0, holes)

    def _sample_tiles(self, count: int) -> list[Rectangle]:
        """`count` tiles at random positions, most of them of tissue where that is known."""
        height, width = (int(n) for n in self.level.shape[:2])
        high, wide = min(_TILE_SIDE, height), min(_TILE_SIDE, width)
        tiles = [
            Rectangle(x, y, wide, high)
            for y in range(0, height - high + 1, high)
            for x in range(0, width - wide + 1, wide)
        ]
        count, rng = max(int(count), 1), np.random.default_rng(self.scan.seed)
        if self.scan.tissue is None:
            return _choose_tiles(tiles, count, rng)
        here = replace(self.scan.tissue, shape=(height, width))
        stained = [tile for tile in tiles if here.has_tissue(tile)]
        empty = [tile for tile in tiles if not here.has_tissue(tile)]
        background = []
        if stained and "glass" not in self.scan.leave_out:
            background = _choose_tiles(empty, count // _BACKGROUND_TILE_EVERY, rng)
        return _choose_tiles(stained or tiles, count - len(background), rng) + background


def _choose_tiles(tiles: list[Rectangle], count: int, rng: np.random.Generator) -> list[Rectangle]:
    if not tiles:
        return []
    pick = rng.choice(len(tiles), min(count, len(tiles)), replace=False)
    return [tiles[k] for k in np.sort(pick)]


def _select_pixels(
    level: Any, tissue: TissueMask | None, leave_out: Collection[NonTissue]
) -> PixelSelection | None:
    if tissue is None or not leave_out:
        return None
    cells = tissue.included(leave_out)
    if not cells.any():
        raise ImageError("Nothing is left to decompose: the whole slide is of kinds left out.")
    return PixelSelection(tissue, cells, (int(level.shape[0]), int(level.shape[1])))


def check_level(level: int, levels: list[Any]) -> int:
    """The index of a level, also of a negative one; a `ValueError` where there is none."""
    if not -len(levels) <= level < len(levels):
        raise ValueError(f"level must be from 0 to {len(levels) - 1}, not {level}.")
    return range(len(levels))[level]
