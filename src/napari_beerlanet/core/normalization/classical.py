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

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.normalization.normalizer import (
    Appearance,
    Array,
    ColourMap,
    ColourNormalizer,
    ColourStatistics,
    State,
    check_array,
    check_fitted,
    check_templates,
    pool_templates,
    template_error,
    template_palette,
    unchanged,
)
from napari_beerlanet.core.stains.palette import Palette

_LUMA = (0.299, 0.587, 0.114)  # ITU-R BT.601, as Pillow and OpenCV make grey
_MIN_LAB_DEVIATION = 0.01  # below it a channel is rounding, and would be stretched to noise
_LIGHT, _ALPHA, _BETA = 240.0, 1.0, 0.15  # torchstain's Io, alpha (percentile) and beta (OD)
_MIN_STAIN_ANGLE = 0.5  # degrees between two stains that can be told apart


class NoNormalizer(ColourNormalizer):
    """The image as it is."""

    method: ClassVar[str] = "none"
    needs_template: ClassVar[bool] = False

    @property
    def is_fitted(self) -> bool:
        """Always."""
        return True

    def fit(self, templates: Sequence[Any]) -> Self:
        """Templates are not looked at."""
        return self

    def colour_map(self, palette: Palette) -> ColourMap:
        """Every colour stays."""
        return ColourMap(None)

    def state(self) -> State:
        """Nothing."""
        return {}, {}

    @classmethod
    def from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Self:
        """A new one."""
        return cls()


class GreyNormalizer(NoNormalizer):
    """Brightness without colour, in all three channels."""

    method: ClassVar[str] = "grey"

    def colour_map(self, palette: Palette) -> ColourMap:
        """Every colour becomes the grey of its luma (ITU-R BT.601)."""
        return ColourMap(_to_grey)


def _to_grey(colours: Array) -> Array:
    return np.repeat((colours @ np.array(_LUMA))[:, None], 3, axis=1)


class ReinhardNormalizer(ColourNormalizer):
    """Mean and standard deviation of each LAB channel become those of the template."""

    method: ClassVar[str] = "reinhard"

    def __init__(self) -> None:
        self._target: tuple[Array, Array] | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether there was a template."""
        return self._target is not None

    def fit(self, templates: Sequence[Any]) -> Self:
        """Take over means and deviations."""
        means, deviations = _lab_statistics(ColourStatistics.of(pool_templates(templates)))
        if deviations.min() < _MIN_LAB_DEVIATION:
            raise template_error("it has no colours that differ")
        self._target = means, deviations
        return self

    def colour_map(self, palette: Palette) -> ColourMap:
        """LAB standardised with the image's statistics and scaled to the template's."""
        check_fitted(self)
        assert self._target is not None
        statistics = ColourStatistics.of(palette)
        problem = statistics.problem()
        if problem:
            return unchanged(problem)
        own = _lab_statistics(statistics)
        if own[1].min() < _MIN_LAB_DEVIATION:
            return unchanged("it has no colours that differ")
        return ColourMap(partial(_reinhard, own=own, target=self._target), truncates=True)

    def state(self) -> State:
        """Means and deviations of L, a and b."""
        check_fitted(self)
        assert self._target is not None
        return {"means": self._target[0], "deviations": self._target[1]}, {}

    @classmethod
    def from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Self:
        """A normalizer from its state."""
        new = cls()
        means, deviations = (check_array(arrays, name, (3,)) for name in ("means", "deviations"))
        if deviations.min() <= 0:
            raise ValueError("its deviations are not above 0")
        new._target = means, deviations
        return new


def _lab_statistics(statistics: ColourStatistics) -> tuple[Array, Array]:
    """Means and deviations (3,) of L, a and b over the pixels."""
    from skimage.color import rgb2lab

    lab = rgb2lab(statistics.colours / 255)
    means = np.average(lab, axis=0, weights=statistics.counts)
    variances = np.average((lab - means) ** 2, axis=0, weights=statistics.counts)
    return means, np.sqrt(variances)


def _reinhard(colours: Array, *, own: tuple[Array, Array], target: tuple[Array, Array]) -> Array:
    from skimage.color import lab2rgb, rgb2lab

    lab = (rgb2lab(colours / 255) - own[0]) / own[1] * target[1] + target[0]
    # b up to where Z is 0, over which scikit-image would warn.
    lab[:, 2] = np.minimum(lab[:, 2], 200 / 116 * (lab[:, 0] + 16) - 1e-9)
    return np.asarray(255 * lab2rgb(lab))


class StainVectors(NamedTuple):
    """Two stains (3, 2) and the 99th percentile of the density (2,) of each, as Macenko has them.

    The first is the one that absorbs more red: haematoxylin in a section.
    """

    stains: Array
    strengths: Array

    @property
    def appearance(self) -> Appearance:
        """The same under the light that torchstain assumes."""
        return Appearance(np.full(3, _LIGHT / 255), self.stains, self.strengths)


class MacenkoNormalizer(ColourNormalizer):
    """Stain vectors by principal components; densities under them shown with the template's."""

    method: ClassVar[str] = "macenko"

    def __init__(self) -> None:
        self._target: StainVectors | None = None

    @property
    def is_fitted(self) -> bool:
        """Whether there was a template."""
        return self._target is not None

    def fit(self, templates: Sequence[Any]) -> Self:
        """Take over stain vectors and strengths."""
        self._target = _template_vectors(pool_templates(templates))
        return self

    def colour_map(self, palette: Palette) -> ColourMap:
        """Densities by least squares, scaled to the template's strengths, under its vectors."""
        check_fitted(self)
        assert self._target is not None
        statistics = ColourStatistics.of(palette)
        own = statistics.problem() or find_stain_vectors(statistics)
        if isinstance(own, str):
            return unchanged(own)
        values = partial(_macenko, own=own, target=self._target)
        return ColourMap(values, (), own.appearance, self._target.appearance, truncates=True)

    def state(self) -> State:
        """Stains and strengths of the template."""
        check_fitted(self)
        assert self._target is not None
        return self._target._asdict(), {}

    @classmethod
    def from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Self:
        """A normalizer from its state."""
        new = cls()
        strengths = check_array(arrays, "strengths", (2,))
        if strengths.min() <= 0:
            raise ValueError("its strengths are not above 0")
        new._target = StainVectors(check_array(arrays, "stains", (3, 2)), strengths)
        return new


class MultiMacenkoNormalizer(MacenkoNormalizer):
    """Macenko with the mean of the stain vectors and strengths of several templates."""

    method: ClassVar[str] = "macenko-multi"

    def fit(self, templates: Sequence[Any]) -> Self:
        """Take over the means of stain vectors and strengths."""
        found = [_template_vectors(template_palette(t)) for t in check_templates(templates)]
        means = [np.mean(parts, axis=0) for parts in zip(*found, strict=True)]
        self._target = StainVectors(*means)
        return self


def _template_vectors(palette: Palette) -> StainVectors:
    found = find_stain_vectors(ColourStatistics.of(palette))
    if isinstance(found, str):
        raise template_error(found)
    return found


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
