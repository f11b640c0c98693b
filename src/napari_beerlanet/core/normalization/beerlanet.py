"""BeerLaNet as a normalizer for the eye: decompose, recompose with a template's light and stains.

The template is decomposed with the number of stains found in it. An image is decomposed from the
template's spectra as a start, so that it gets as many stains; which of its stains is which of the
template's is decided by spectral angle. Each stain then takes the template's spectrum, its density
is scaled so that the 99th percentiles agree, and the background becomes the template's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.normalization.normalizer import (
    Appearance,
    Array,
    ColourMap,
    ColourStatistics,
    Image,
    Target,
    log_intensity,
    match_strengths,
    pool_templates,
    template_error,
    unchanged,
)
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.palette import Palette
from napari_beerlanet.core.stains.presets import spectral_angle
from napari_beerlanet.core.stains.solver.converge import (
    ColourCells,
    ColumnSolver,
    build_cells,
    converge,
    solve_fixed_spectra,
)
from napari_beerlanet.core.stains.solver.model_selection import (
    DENSITIES_STRENGTH,
    SPECTRA_STRENGTH,
    auto_penalties,
)

MAX_STAIN_ANGLE = 30.0
"""Degrees up to which a stain of an image may be one of the template's."""

_MAX_STAINS = 3  # as many as there are channels
_SEPARATOR = 8  # pixels between templates on their canvas: no block lies on two


@dataclass(frozen=True)
class _StainFit:
    """An image's stains: `cells` of a palette's colours solved; strengths (r,) are percentiles."""

    solver: ColumnSolver
    strengths: Array

    @property
    def present(self) -> npt.NDArray[np.bool_]:
        """(r,) which stains are in the image."""
        return np.asarray(np.linalg.norm(self.solver.spectra, axis=0) > 0)

    @property
    def appearance(self) -> Appearance:
        """What is in the image."""
        keep = self.present
        stains = self.solver.spectra[:, keep]
        return Appearance(np.exp(self.solver.background), stains, self.strengths[keep])


@dataclass(frozen=True, eq=False)
class TemplateStains(Target):
    """Background (3,) as intensity, spectra (3, r), and 99th percentiles (r,) of densities."""

    shapes: ClassVar = {"background": (3,), "stains": (3, None), "strengths": (None,)}

    background: Array
    stains: Array
    strengths: Array

    def __post_init__(self) -> None:
        if not 1 <= self.stains.shape[1] == len(self.strengths) <= _MAX_STAINS:
            raise ValueError(f"its stains are not 1 to {_MAX_STAINS}, each with a strength")

    @property
    def appearance(self) -> Appearance:
        """The same as the other methods have it."""
        return Appearance(self.background, self.stains, self.strengths)

    @classmethod
    def fit(cls, templates: Sequence[Image]) -> TemplateStains:
        """Those of the templates."""
        palette = pool_templates(templates)
        canvas = templates[0] if len(templates) == 1 else _canvas(templates)
        found = decompose(canvas, iterations="converge")
        fit = _fit_stains(palette, np.ascontiguousarray(found.spectra[:, found.active]))
        if not fit.present.any():
            raise template_error("no stain was found in it")
        return cls(**vars(fit.appearance))

    def colour_map(self, palette: Palette) -> ColourMap:
        """Densities of the image's stains, scaled, under the template's spectra and background."""
        problem = ColourStatistics.of(palette).problem()
        if problem:
            return unchanged(problem)
        fit = _fit_stains(palette, self.stains)
        if not fit.present.any():
            return unchanged("no stain was found in it")
        matched, angles = match_spectra(fit.solver.spectra, self.stains)
        if max(angles) > MAX_STAIN_ANGLE:
            return unchanged(
                f"a stain of it is {max(angles):.0f}° from the nearest free one of the template, "
                f"more than {MAX_STAIN_ANGLE:.0f}°, so they cannot be matched",
                fit.appearance,
            )
        scale, notes = match_strengths(fit.strengths, self.strengths[matched])
        spectra = self.stains[:, matched] * np.where(fit.present, scale, 0.0)
        light = np.log(self.background)
        values = partial(_recompose, solver=fit.solver, light=light, spectra=spectra)
        return ColourMap(values, notes, fit.appearance, self.appearance)


def match_spectra(spectra: Array, target: Array) -> tuple[npt.NDArray[np.intp], list[float]]:
    """For each of the spectra (3, r) one of the target's (3, m), and the angles of those there are.

    The pairs are those with the least sum of angles; absent stains, zero columns, take what is
    left.
    """
    from scipy.optimize import linear_sum_assignment

    angle = np.array([[spectral_angle(a, b) for b in target.T] for a in spectra.T])
    rows, columns = linear_sum_assignment(angle)
    matched = np.zeros(spectra.shape[1], np.intp)
    matched[rows] = columns
    there = np.linalg.norm(spectra, axis=0) > 0
    return matched, [float(angle[i, matched[i]]) for i in np.flatnonzero(there)]


def _recompose(colours: Array, *, solver: ColumnSolver, light: Array, spectra: Array) -> Array:
    D = solver(log_intensity(colours))
    return np.asarray(255 * np.exp(light[:, None] - spectra @ D).T)


def _fit_stains(palette: Palette, start: Array) -> _StainFit:
    """The stains of a palette from spectra (3, r) to start from.

    As the solver does it for an image of its own: spectra under a strong penalty and on coarse
    colours, which hold them to what is there; background and densities under a weak one.
    """
    statistics = ColourStatistics.of(palette)
    codes, w = palette.codes[palette.counts > 0], statistics.counts.astype(np.float64)
    cells = build_cells(codes, log_intensity(statistics.colours), w)
    coarse: ColourCells = cells
    while coarse.coarser is not None:
        coarse = coarse.coarser
    strong = auto_penalties(coarse, None, None, SPECTRA_STRENGTH)
    weak = auto_penalties(coarse, None, None, DENSITIES_STRENGTH)
    found = converge(coarse, start, *strong, single_start=True)
    for _ in range(2):
        found = converge(coarse, found.spectra, *weak, start=found, hold="spectra")
        found = converge(coarse, found.spectra, *strong, start=found, hold="background")
    last = solve_fixed_spectra(coarse, found.spectra, *weak)
    solver = ColumnSolver.of(last, coarse.w)
    D = solver(cells.X)
    strengths = np.array([statistics.percentile(d, 99) for d in D])
    return _StainFit(solver, strengths)


def _canvas(images: Sequence[Image]) -> Image:
    """Images (H, W, 3 or 4) below each other, with transparent pixels around them."""
    height = sum(len(image) + _SEPARATOR for image in images)
    canvas = np.zeros((height, max(image.shape[1] for image in images), 4), np.uint8)
    top = 0
    for image in images:
        part = canvas[top : top + image.shape[0], : image.shape[1]]
        part[..., : image.shape[2]] = image
        if image.shape[2] == 3:
            part[..., 3] = 255
        top += len(image) + _SEPARATOR
    return canvas
