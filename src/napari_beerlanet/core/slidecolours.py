"""The colours of a slide and what else a fit needs of it: gathered once, fitted as often as wanted.

The solver knows an image by its palette and, to count its stains, by some blocks of it (see
`mosaic`). Both are gathered on one way through the image.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from .colourcount import count_colours
from .decompose import Decomposition, decompose
from .images import ImageError, check_rgb, within_range
from .lazy import Part, as_levels, in_threads, parts_of, read, thumbnail
from .mosaic import Kept, Mosaic, block_corners, corners_in, enough_blocks
from .palette import Palette
from .progress import Report, tell, within
from .tissue import Kind, Tissue, find_tissue

_SIDE = 512  # pixels of a sampled tile's side
_IN_MEMORY = 1 << 24  # pixels of 16 bit or floats that are solved at once
_THUMBNAIL = 1024
_GLASS = 6  # every so many-th sampled tile is of glass, which shows the light, if that counts


@dataclass(frozen=True)
class SlideColours:
    """What was seen of a slide.

    `levels` are the slide's, the finest first; `counted` is how many pixels were seen, `palette`
    their colours (of 8 bits, None of others). `picture` (h, w, 3 or 4) is what is solved, with the
    palette where there is one; `small` the slide's thumbnail, None where that is the picture.
    """

    levels: list[Any] = field(repr=False)
    counted: int
    tissue: Tissue | None = field(default=None, repr=False)
    palette: Palette | None = field(default=None, repr=False)
    picture: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0), repr=False)
    small: npt.NDArray[Any] | None = field(default=None, repr=False)

    def fit(self, report: Report | None = None, **settings: Any) -> Decomposition:
        """The thumbnail's decomposition under a fit of all that was seen.

        `settings` as for `decompose`: components, iterations, spectra, lam, gamma, domain, …
        """
        fit = decompose(self.picture, palette=self.palette, report=report, **settings)
        if self.small is None:
            return fit
        densities = fit.densities_of(self.small)
        return replace(fit, image=check_rgb(self.small), densities=densities)


def count_slide(
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
) -> SlideColours:
    """Go through an image of any size for what a fit needs; all as for `decompose_slide`."""
    levels = as_levels(data)
    chosen = levels[checked_level(level, levels)]
    _check_kinds(leave_out)
    if tissue is None and (leave_out or sample is not None):
        tell(report, 0, 100, "looking for tissue")
        tissue = find_tissue(levels)
        report = within(report, 0.05, 1.0)
    kept = _kept(chosen, tissue, leave_out)
    way = _Way(levels, chosen, sample, seed, tissue, kept, "glass" not in leave_out)
    if np.dtype(chosen.dtype) != np.uint8 or not enough_blocks(chosen.shape):
        return way.in_memory(report)
    return way.streamed(order, threads, report)


@dataclass(frozen=True)
class _Way:
    """What of which level is gone through."""

    levels: list[Any]
    level: Any
    sample: int | None
    seed: int
    tissue: Tissue | None
    kept: Kept | None
    glass: bool = True

    def streamed(
        self, order: Sequence[int] | None, threads: int | None, report: Report | None
    ) -> SlideColours:
        parts = parts_of(self.level) if self.sample is None else self._sampled(self.sample)
        mosaic = self._mosaic(parts)
        if order is not None:
            parts = [parts[k] for k in order]
        mask = None if self.kept is None else self.kept.mask
        palette = count_colours(self.level, parts, mask, mosaic.see, report, threads)
        if not palette.counts.any():
            raise ImageError("Nothing is left to decompose: all is transparent or left out.")
        mosaic.fill_again(self.level, parts, threads)
        small = thumbnail(self.levels, _THUMBNAIL) if mosaic.small is None else mosaic.small
        counted = int(palette.counts.sum())
        picture = mosaic.picture(palette)
        return SlideColours(self.levels, counted, self.tissue, palette, picture, small)

    def in_memory(self, report: Report | None) -> SlideColours:
        """Of a small image, or of 16 bit and floats, where colours hardly repeat."""
        height, width = (int(n) for n in self.level.shape[:2])
        small = height * width <= _IN_MEMORY and (self.sample is None or min(height, width) < _SIDE)
        most = _IN_MEMORY // _SIDE**2
        parts = [Part(0, height, 0, width)]
        if not small:
            parts = self._sampled(min(self.sample or most, most))
        tiles = []
        for tile in in_threads(self._read, parts):
            tiles.append(tile)
            tell(report, len(tiles), len(parts), "reading tiles")
        pixels = np.concatenate(tiles) if len(tiles) > 1 else tiles[0]
        counted = int((pixels[..., 3] > 0).sum()) if pixels.shape[2] == 4 else pixels[..., 0].size
        whole = small and len(self.levels) == 1
        shown = None if whole else within_range(thumbnail(self.levels, _THUMBNAIL))
        return SlideColours(self.levels, counted, self.tissue, None, pixels, shown)

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
        """So many tiles at random places, most of them of tissue where that is known."""
        height, width = (int(n) for n in self.level.shape[:2])
        high, wide = min(_SIDE, height), min(_SIDE, width)
        tiles = [
            Part(y, y + high, x, x + wide)
            for y in range(0, height - high + 1, high)
            for x in range(0, width - wide + 1, wide)
        ]
        count, rng = max(int(count), 1), np.random.default_rng(self.seed)
        if self.tissue is None:
            return _some_of(tiles, count, rng)
        here = replace(self.tissue, shape=(height, width))
        stained = [tile for tile in tiles if here.has_tissue(tile)]
        rest = [tile for tile in tiles if not here.has_tissue(tile)] if self.glass else []
        shown = _some_of(rest, count // _GLASS, rng) if stained else []
        return _some_of(stained or tiles, count - len(shown), rng) + shown


def _some_of(tiles: list[Part], count: int, rng: np.random.Generator) -> list[Part]:
    if not tiles:
        return []
    pick = rng.choice(len(tiles), min(count, len(tiles)), replace=False)
    return [tiles[k] for k in np.sort(pick)]


def _kept(level: Any, tissue: Tissue | None, leave_out: Collection[Kind]) -> Kept | None:
    if tissue is None or not leave_out:
        return None
    cells = tissue.kept(leave_out)
    if not cells.any():
        raise ImageError("Nothing is left to decompose: the whole slide is of kinds left out.")
    return Kept(tissue, cells, (int(level.shape[0]), int(level.shape[1])))


def checked_level(level: int, levels: list[Any]) -> int:
    """The number of a level from 0 on; a `ValueError` where there is none."""
    if not -len(levels) <= level < len(levels):
        raise ValueError(f"level must be from 0 to {len(levels) - 1}, not {level}.")
    return range(len(levels))[level]


def _check_kinds(leave_out: Collection[str]) -> None:
    if isinstance(leave_out, str) or set(leave_out) - set(get_args(Kind)):
        raise ValueError(f"leave_out takes {', '.join(get_args(Kind))}, not {leave_out!r}.")
