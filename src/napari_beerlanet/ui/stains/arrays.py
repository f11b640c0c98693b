"""Layer data of a fit: density, reconstruction and residual arrays.

In memory for small images, lazy otherwise. Lazy arrays are dask arrays: a block is computed when
it comes into view, so neither a stack nor a slide is ever in memory as a whole. The layers of all
components share the work on a block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from napari_beerlanet.core.stains.lazy_densities import (
    DensityPyramid,
    lazy_densities,
    lazy_reconstruction,
    lazy_residual,
)
from napari_beerlanet.core.stains.slide import SlideColours
from napari_beerlanet.ui.stains.fitting import FitResult, FitTarget

LayerData = Any
"""What a layer takes: an array, or a list of them for the levels of a multiscale image."""


def density_data(fitted: FitResult) -> list[LayerData]:
    """The layer data of each of the r components."""
    d = fitted.decomposition
    if not fitted.target.lazy:
        return list(d.densities)
    if fitted.slide_colours is not None and fitted.target.plane.dtype == np.uint8:
        return _slide_density_data(fitted, fitted.slide_colours)
    return [_single_or_levels(levels) for levels in lazy_densities(_levels(fitted.target), d)]


def _slide_density_data(fitted: FitResult, colours: SlideColours) -> list[LayerData]:
    """Lazy look-ups at every level; the coarsest level, which is shown first, is computed now."""
    lazy = DensityPyramid(colours.levels, fitted.decomposition)
    if colours.palette is not None:
        lazy.table.add_palette(colours.palette)
    coarsest = len(colours.levels) - 1
    height, width = colours.levels[coarsest].shape[:2]
    high, wide = lazy.chunk(coarsest)
    for row in range(-(-height // high)):
        for column in range(-(-width // wide)):
            lazy.block(coarsest, row, column)
    return [
        _single_or_levels([lazy.dask(k, i) for k in range(len(colours.levels))])
        for i in range(len(fitted.decomposition.active))
    ]


def _single_or_levels(levels: list[Any]) -> LayerData:
    return levels if len(levels) > 1 else levels[0]


def reconstruction_data(fitted: FitResult, components: Sequence[int]) -> LayerData:
    """The image from these components alone, (…, 3) in its own dtype."""
    d = fitted.decomposition
    if not fitted.target.lazy:
        return d.reconstruct(components)
    return _single_or_levels(lazy_reconstruction(_levels(fitted.target), d, components))


def residual_data(fitted: FitResult) -> LayerData:
    """The distance of model and image in OD over the three colours, float32."""
    d = fitted.decomposition
    if not fitted.target.lazy:
        return np.linalg.norm(d.residual(), axis=-1)
    return _single_or_levels(lazy_residual(_levels(fitted.target), d))


def _levels(target: FitTarget) -> list[Any]:
    """The target's levels (…, H, W, 3 or 4): of its plane, or of a whole stack."""
    plane = target.plane
    if target.is_slide:
        return list(plane.pyramid)
    return [
        plane.levels[k] if target.whole_stack else plane.lazy(k) for k in range(len(plane.levels))
    ]
