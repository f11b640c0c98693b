"""Reinhard and Macenko as torchstain has them, grey images, and no normalization at all.

torchstain (MIT licence) computes on every pixel; here its arithmetic runs on the palette, in
float64:

- Macenko: sums over weighted colours differ from sums over pixels by rounding only, some 1e-13 of a
  grey level, so results are those of torchstain's NumPy backend to the bit.
- Reinhard: the conversions are scikit-image's, from which torchstain's are made. torchstain has
  them in float32: about one pixel in 10 000 differs by a grey level.
- Macenko with several templates: the mean of the templates' stains and strengths ("avg-post", of
  torchstain's modes the one that runs with current versions of torch). torchstain has it in float32
  and with percentiles that are not interpolated; results differ by one grey level, and by more only
  on smears that hardly determine a second stain, where rounding in float32 turns it.

Several templates of the other methods count as one image.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from napari_beerlanet.core.normalization.normalizer import (
    Appearance,
    Array,
    ColourMap,
    ColourStatistics,
    Image,
    Target,
    learned,
    pool_templates,
    unchanged,
)
from napari_beerlanet.core.stains.palette import Palette

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow and OpenCV make grey
_MIN_LAB_DEVIATION = 0.01  # below it a channel is rounding, and would be stretched to noise
_LIGHT, _ALPHA, _BETA = 240.0, 1.0, 0.15  # torchstain's Io, alpha (percentile) and beta (OD)
_MIN_STAIN_ANGLE = 0.5  # degrees between two stains that can be told apart


class Unchanged(Target):
    """No normalization: every colour stays."""

    def colour_map(self, palette: Palette) -> ColourMap:
        """None of them changes."""
        return ColourMap(None)


class Grey(Target):
    """Brightness without colour, in all three channels."""

    def colour_map(self, palette: Palette) -> ColourMap:
        """Every colour becomes the grey of its luma (ITU-R BT.601)."""
        return ColourMap(_to_grey)


def _to_grey(colours: Array) -> Array:
    return np.repeat((colours @ np.array(_LUMA))[:, None], 3, axis=1)


@dataclass(frozen=True, eq=False)
class LabStatistics(Target):
    """Reinhard: `means` and standard `deviations` (3,) of L, a and b over the pixels."""

    shapes: ClassVar = {"means": (3,), "deviations": (3,)}
    positive: ClassVar = ("deviations",)

    means: Array
    deviations: Array

    @classmethod
    def fit(cls, templates: Sequence[Image]) -> LabStatistics:
        """Those of the templates."""
        return learned(_find_lab_statistics(ColourStatistics.of(pool_templates(templates))))

    def colour_map(self, palette: Palette) -> ColourMap:
        """LAB standardised with the image's statistics and scaled to the template's."""
        statistics = ColourStatistics.of(palette)
        own = statistics.problem() or _find_lab_statistics(statistics)
        if isinstance(own, str):
            return unchanged(own)
        return ColourMap(partial(_reinhard, own=own, target=self), truncates=True)


def _find_lab_statistics(statistics: ColourStatistics) -> LabStatistics | str:
    """Those of colours, or why there are none to go by."""
    from skimage.color import rgb2lab

    lab = rgb2lab(statistics.colours / 255)
    means = np.average(lab, axis=0, weights=statistics.counts)
    deviations = np.sqrt(np.average((lab - means) ** 2, axis=0, weights=statistics.counts))
    if deviations.min() < _MIN_LAB_DEVIATION:
        return "it has no colours that differ"
    return LabStatistics(means, deviations)


def _reinhard(colours: Array, *, own: LabStatistics, target: LabStatistics) -> Array:
    from skimage.color import lab2rgb, rgb2lab

    lab = (rgb2lab(colours / 255) - own.means) / own.deviations * target.deviations + target.means
    # b up to where Z is 0, over which scikit-image would warn.
    lab[:, 2] = np.minimum(lab[:, 2], 200 / 116 * (lab[:, 0] + 16) - 1e-9)
    return np.asarray(255 * lab2rgb(lab))


@dataclass(frozen=True, eq=False)
class StainVectors(Target):
    """Macenko: two `stains` (3, 2), and `strengths` (2,), the 99th percentiles of their densities.

    The first is the one that absorbs more red: haematoxylin in a section.
    """

    shapes: ClassVar = {"stains": (3, 2), "strengths": (2,)}
    positive: ClassVar = ("strengths",)

    stains: Array
    strengths: Array

    @property
    def appearance(self) -> Appearance:
        """The same under the light that torchstain assumes."""
        return Appearance(np.full(3, _LIGHT / 255), self.stains, self.strengths)

    @classmethod
    def fit(cls, templates: Sequence[Image]) -> StainVectors:
        """Those of the templates."""
        return learned(find_stain_vectors(ColourStatistics.of(pool_templates(templates))))

    def colour_map(self, palette: Palette) -> ColourMap:
        """Densities by least squares, scaled to the template's strengths, under its vectors."""
        statistics = ColourStatistics.of(palette)
        own = statistics.problem() or find_stain_vectors(statistics)
        if isinstance(own, str):
            return unchanged(own)
        values = partial(_macenko, own=own, target=self)
        return ColourMap(values, (), own.appearance, self.appearance, truncates=True)


class MeanStainVectors(StainVectors):
    """Macenko with several templates: the means of their stains and strengths."""

    @classmethod
    def fit(cls, templates: Sequence[Image]) -> StainVectors:
        """The means over the templates."""
        found = [StainVectors.fit([template]) for template in templates]
        means = (np.mean([one.state()[0][k] for one in found], axis=0) for k in cls.shapes)
        return cls(*means)


def find_stain_vectors(statistics: ColourStatistics, light: float = _LIGHT) -> StainVectors | str:
    """Macenko's stain vectors of an image's colours, or why there are none."""
    density = _optical_density(statistics.colours, light)
    dark = np.asarray(~(density < _BETA).any(axis=1))
    problem = statistics.too_few(dark)
    if problem:
        return problem
    stained = statistics.where(dark)
    covariance = np.cov(density[dark].T, fweights=stained.counts)
    _, vectors = np.linalg.eigh(covariance)
    plane = vectors[:, 1:3]
    projected = density[dark] @ plane
    angles = np.arctan2(projected[:, 1], projected[:, 0])
    ends = [stained.percentile(angles, q) for q in (_ALPHA, 100 - _ALPHA)]
    first, second = (plane @ np.array([np.cos(a), np.sin(a)]) for a in ends)
    # torchstain's rule for which is haematoxylin.
    stains = np.stack([first, second] if first[0] > second[0] else [second, first], axis=1)
    if abs(ends[1] - ends[0]) < np.deg2rad(_MIN_STAIN_ANGLE):
        return "its stained pixels all have one hue, so two stains cannot be told apart"
    C = np.linalg.pinv(stains) @ density.T
    strengths = np.array([statistics.percentile(c, 99) for c in C])
    if not (np.isfinite(strengths).all() and strengths.min() > 0):
        return "two stains could not be told apart"
    return StainVectors(stains, strengths)


def _optical_density(colours: Array, light: float = _LIGHT) -> Array:
    return np.asarray(-np.log((colours + 1) / light))


def _macenko(colours: Array, *, own: StainVectors, target: StainVectors) -> Array:
    C = np.linalg.pinv(own.stains) @ _optical_density(colours).T
    C = C / (own.strengths / target.strengths)[:, None]
    with np.errstate(over="ignore"):  # clipped
        return np.asarray(_LIGHT * np.exp(-(target.stains @ C)).T)
