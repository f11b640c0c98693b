"""Stains of an image of any size: its colours streamed and counted, then solved as in memory.

The solver knows an image by its palette and, to count its stains, by some blocks of it (see
`mosaic`). Both are gathered on one way through the image, so the result is the one of `decompose`,
to the last bit of its spectra, however the image is cut and in whatever order it is read.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .decompose import Decomposition
from .lookup import DensityLevels
from .palette import Palette
from .progress import Report, within
from .slidecolours import SlideColours, checked_level, count_slide
from .tissue import Kind, Tissue


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
        return self._lazy.dask(checked_level(level, self.levels), component)

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
        for a preview. Most are of tissue, where there is any, some of glass unless it is left out.
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
    seen = count_slide(
        data,
        level=level,
        sample=sample,
        seed=seed,
        leave_out=leave_out,
        tissue=tissue,
        order=order,
        threads=threads,
        report=within(report, 0.0, 0.7),
    )
    return fit_slide(seen, within(report, 0.7, 1.0), **settings)


def fit_slide(
    seen: SlideColours, report: Report | None = None, **settings: Any
) -> SlideDecomposition:
    """Take the stains of a slide apart whose colours were gathered by `count_slide`."""
    fit = seen.fit(report, **settings)
    return SlideDecomposition(fit, seen.levels, seen.counted, seen.tissue, seen.palette)
