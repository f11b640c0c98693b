"""Stains of an image of any size: its colours streamed and counted, then solved as in memory.

The solver knows an image by its palette and, to count its stains, by some blocks of it (see
`mosaic`). Both are gathered on one way through the image, so the result is the one of `decompose`,
to the last bit of its spectra, however the image is cut and in whatever order it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from .colourcount import count_colours
from .decompose import Decomposition, decompose
from .images import ImageError, check_rgb
from .lazy import Part, as_levels, in_threads, parts_of, read, thumbnail
from .lookup import DensityLevels
from .mosaic import Kept, Mosaic, block_corners, corners_in, enough_blocks
from .palette import Palette
from .progress import Report, tell, within
from .tissue import Kind, Tissue, find_tissue

_SIDE = 512  # pixels of a sampled tile's side
_IN_MEMORY = 1 << 24  # pixels of 16 bit or floats that are solved at once
_THUMBNAIL = 1024


@dataclass(frozen=True)
class SlideDecomposition:
    """A slide's stains.

    `fit` is the `Decomposition` of a thumbnail under the whole slide's fit: its background,
    spectra, active and share are the slide's, its image and densities the thumbnail's. `levels`
    are the slide's, the finest first; `counted` is how many pixels the fit has seen, `palette`
    their colours (of 8 bits).
    """

    fit: Decomposition
    levels: list[Any] = field(repr=False)
    counted: int
    tissue: Tissue | None = field(default=None, repr=False)
    palette: Palette | None = field(default=None, repr=False)

    @cached_property
    def _lazy(self) -> DensityLevels:
        return DensityLevels(self.levels, self.fit)

    def densities(self, level: int = 0, component: int | None = None) -> Any:
        """Lazy densities of a level: a dask array (r, H, W) float32, or (H, W) of a component."""
        r = len(self.fit.active)
        if component is not None and not 0 <= component < r:
            raise ValueError(f"component must be from 0 to {r - 1}, not {component}.")
        return self._lazy.dask(_checked_level(level, self.levels), component)

    def pyramid(self, component: int) -> list[Any]:
        """Lazy densities of one component at every level, as a multiscale layer takes them."""
        return [self.densities(k, component) for k in range(len(self.levels))]


def decompose_slide(
    data: Any,
    *,
    level: int = 0,
    sample: int | None = None,
    seed: int = 0,
    leave_out: Collection[Kind] = (),
    tissue: Tissue | None = None,
    order: Sequence[int] | None = None,
    threads: int | None = None,
    report: Report | None = None,
    **settings: Any,
) -> SlideDecomposition:
    """Take the stains of an image of any size apart, without having it in memory.

    Parameters
    ----------
    data
        A lazy image (H, W, 3 or 4), or its pyramid as a list, the finest level first.
    level
        Which level's colours are counted; 0 is the finest.
    sample
        So many tiles of 512 × 512 pixels at random places, by `seed`, instead of the whole level:
        for a preview. They are of tissue, where there is any.
    leave_out
        Kinds of what is no tissue that the fit shall not see: "glass", "pen", "border".
    tissue
        What is tissue; found where it is needed and not given.
    order
        In which order the parts of the level are read, as numbers.
    settings
        As for `decompose`: components, iterations, spectra, lam, gamma, domain, …

    Images of 16 bit or floats of more than 16 million pixels are always sampled.
    """
    levels = as_levels(data)
    chosen = levels[_checked_level(level, levels)]
    _check_kinds(leave_out)
    if tissue is None and (leave_out or sample is not None):
        tell(report, 0, 100, "looking for tissue")
        tissue = find_tissue(levels)
    way = _Way(levels, chosen, sample, seed, tissue, _kept(chosen, tissue, leave_out))
    if np.dtype(chosen.dtype) != np.uint8 or not enough_blocks(chosen.shape):
        return way.in_memory(settings, report)
    return way.streamed(order, threads, settings, report)


@dataclass(frozen=True)
class _Way:
    """What of which level is gone through."""

    levels: list[Any]
    level: Any
    sample: int | None
    seed: int
    tissue: Tissue | None
    kept: Kept | None

    def streamed(
        self,
        order: Sequence[int] | None,
        threads: int | None,
        settings: dict[str, Any],
        report: Report | None,
    ) -> SlideDecomposition:
        parts = parts_of(self.level) if self.sample is None else self._sampled(self.sample)
        mosaic = self._mosaic(parts)
        if order is not None:
            parts = [parts[k] for k in order]
        mask = None if self.kept is None else self.kept.mask
        counting, solving = within(report, 0.0, 0.7), within(report, 0.7, 1.0)
        palette = count_colours(self.level, parts, mask, mosaic.see, counting, threads)
        if not palette.counts.any():
            raise ImageError("Nothing is left to decompose: all is transparent or left out.")
        mosaic.fill_again(self.level, parts, threads)
        fit = decompose(mosaic.picture(palette), palette=palette, report=solving, **settings)
        small = thumbnail(self.levels, _THUMBNAIL) if mosaic.small is None else mosaic.small
        fit = _shown_by(fit, small)
        counted = int(palette.counts.sum())
        return SlideDecomposition(fit, self.levels, counted, self.tissue, palette)

    def in_memory(self, settings: dict[str, Any], report: Report | None) -> SlideDecomposition:
        """Of a small image, or of 16 bit and floats, where colours hardly repeat."""
        height, width = (int(n) for n in self.level.shape[:2])
        small = height * width <= _IN_MEMORY and (self.sample is None or min(height, width) < _SIDE)
        most = _IN_MEMORY // _SIDE**2
        parts = [Part(0, height, 0, width)]
        if not small:
            parts = self._sampled(min(self.sample or most, most))
        tiles = list(in_threads(self._read, parts))
        pixels = np.concatenate(tiles) if len(tiles) > 1 else tiles[0]
        fit = decompose(pixels, report=report, **settings)
        if not small or len(self.levels) > 1:
            fit = _shown_by(fit, thumbnail(self.levels, _THUMBNAIL))
        counted = int((pixels[..., 3] > 0).sum()) if pixels.shape[2] == 4 else pixels[..., 0].size
        return SlideDecomposition(fit, self.levels, counted, self.tissue)

    def _read(self, part: Part) -> npt.NDArray[Any]:
        """A part's pixels; those that are left out are transparent."""
        pixels = read(self.level, part)
        if self.kept is None:
            return pixels
        full = np.iinfo(pixels.dtype).max if pixels.dtype.kind == "u" else 1
        alpha = pixels[..., 3] if pixels.shape[2] == 4 else np.full(pixels.shape[:2], full)
        seen = np.where(self.kept.mask(part), alpha, 0).astype(pixels.dtype)
        return np.concatenate([pixels[..., :3], seen[..., None]], axis=2)

    def _mosaic(self, parts: list[Part]) -> Mosaic:
        whole = self.sample is None
        if not whole:
            corners = corners_in(parts, self.seed, self.kept)
        elif self.kept is not None:
            corners = self.kept.corners(self.seed)
        else:
            corners = block_corners(self.level.shape)
        # Without a coarser level, another way through the image would be needed for a thumbnail.
        step = -(-max(self.level.shape[:2]) // _THUMBNAIL) if len(self.levels) == 1 else 0
        holes = whole and self.kept is None and self.level.shape[2] == 4
        return Mosaic(self.level, corners, step if whole else 0, holes)

    def _sampled(self, count: int) -> list[Part]:
        """So many tiles at random places, of tissue where that is known."""
        height, width = (int(n) for n in self.level.shape[:2])
        high, wide = min(_SIDE, height), min(_SIDE, width)
        tiles = [
            Part(y, y + high, x, x + wide)
            for y in range(0, height - high + 1, high)
            for x in range(0, width - wide + 1, wide)
        ]
        if self.tissue is not None:
            here = replace(self.tissue, shape=(height, width))
            tiles = [tile for tile in tiles if here.has_tissue(tile)] or tiles
        count = min(max(int(count), 1), len(tiles))
        pick = np.random.default_rng(self.seed).choice(len(tiles), count, replace=False)
        return [tiles[k] for k in np.sort(pick)]


def _kept(level: Any, tissue: Tissue | None, leave_out: Collection[Kind]) -> Kept | None:
    if tissue is None or not leave_out:
        return None
    cells = tissue.kept(leave_out)
    if not cells.any():
        raise ImageError("Nothing is left to decompose: the whole slide is of kinds left out.")
    return Kept(tissue, cells, (int(level.shape[0]), int(level.shape[1])))


def _shown_by(fit: Decomposition, small: npt.NDArray[Any]) -> Decomposition:
    """The same fit with a thumbnail as its image."""
    return replace(fit, image=check_rgb(small), densities=fit.densities_of(small))


def _checked_level(level: int, levels: list[Any]) -> int:
    if not -len(levels) <= level < len(levels):
        raise ValueError(f"level must be from 0 to {len(levels) - 1}, not {level}.")
    return range(len(levels))[level]


def _check_kinds(leave_out: Collection[str]) -> None:
    if isinstance(leave_out, str) or set(leave_out) - set(get_args(Kind)):
        raise ValueError(f"leave_out takes {', '.join(get_args(Kind))}, not {leave_out!r}.")
