"""Fit stains to a plane, a stack or a slide, off the GUI thread.

Colours that were counted once are reused. A slide's colours are counted tile by tile: first those
of a few tiles, for a preview, then those of the whole slide, which takes longer and is requested
separately (`StainFitter.slide_scan`). A stack with one fit for all planes is fitted on the colours
of all of them. Neither is ever in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import with_file_check
from napari_beerlanet.core.common.threads import numpy_until_compiled
from napari_beerlanet.core.images import NonTissue
from napari_beerlanet.core.images.rgb import RGBImage, check_rgb
from napari_beerlanet.core.stains.block_sample import sample_stack
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.lazy_densities import (
    DensityPyramid,
    lazy_densities,
    lazy_reconstruction,
    lazy_residual,
)
from napari_beerlanet.core.stains.palette import Palette, palette_of, palette_pays
from napari_beerlanet.core.stains.settings import DEFAULT_COMPONENTS, DecomposeSettings
from napari_beerlanet.core.stains.slide import SlideColours, SlideScan, scan_slide_colours
from napari_beerlanet.ui.viewer.planes import Plane

LayerData = Any
"""What a layer takes: an array, or a list of them for the levels of a multiscale image."""


PREVIEW_TILES = 12
"""Tiles of 512 × 512 pixels that a preview is fitted on."""


@dataclass(frozen=True)
class SlideFitOptions:
    """Which part of a slide is fitted.

    `level`: the pyramid level whose colours are counted, 0 the finest. `preview_only`: a sample of
    tiles is enough. `leave_out`: kinds of non-tissue that are excluded.
    """

    level: int = 0
    preview_only: bool = False
    leave_out: tuple[NonTissue, ...] = ()

    def arguments(self, preview: bool) -> dict[str, Any]:
        """Keyword arguments of `decompose_slide` that differ from its defaults."""
        arguments: dict[str, Any] = {}
        if self.level:
            arguments["level"] = self.level
        if preview:
            arguments["sample"] = PREVIEW_TILES
        if self.leave_out:
            arguments["leave_out"] = self.leave_out
        return arguments


DEFAULT_SLIDE_OPTIONS = SlideFitOptions()
"""Every pixel of the finest level."""

NON_TISSUE_NAMES: dict[NonTissue, str] = {"glass": "background", "pen": "pen", "border": "border"}
"""What the screen calls the kinds of non-tissue."""

MAX_FIT_PIXELS = 16_000_000
"""Pixels of an image, or of a stack's plane, that are read for a fit; more are sampled."""

_ROUGH_ITERATIONS = 30
_MAX_QUICK_COMPONENTS = 3  # so many converge at once
_MAX_LIMIT_SAMPLES = 1 << 16
_LIMIT_PERCENTILE = 99.8  # of the densities lie below the shared contrast limit


@dataclass(frozen=True, eq=False)
class FitTarget:
    """What is fitted: one plane, or all `planes` of a stack with one fit.

    For a slide, also its `options` and the `path` of its file, if it is known.
    """

    planes: tuple[Plane, ...]
    options: SlideFitOptions = DEFAULT_SLIDE_OPTIONS
    path: Path | None = None

    @property
    def plane(self) -> Plane:
        """The first plane."""
        return self.planes[0]

    @property
    def whole_stack(self) -> bool:
        """Whether it is a stack with one fit for all of its planes."""
        return len(self.planes) > 1

    @property
    def is_slide(self) -> bool:
        """Whether it is one plane whose colours are streamed."""
        return not self.whole_stack and self.plane.is_slide

    @property
    def is_stack(self) -> bool:
        """Whether its layers have all planes of a stack, also if only one of them is fitted.

        So they follow the viewer's sliders by themselves, and a plane is never covered by another.
        """
        return self.whole_stack or (bool(self.plane.index) and not self.is_slide)

    @property
    def lazy(self) -> bool:
        """Whether densities are computed as they come into view, not beforehand."""
        return self.is_stack or len(self.plane.levels) > 1 or self.is_slide

    @property
    def sampling(self) -> tuple[int, int]:
        """The pyramid level that is read, and the stride over its pixels."""
        level = self.plane.level_for(MAX_FIT_PIXELS)
        pixels = math.prod(self.plane.level_shape(level))
        return level, max(1, math.ceil(math.sqrt(pixels / MAX_FIT_PIXELS)))

    def read(self, plane: Plane) -> npt.NDArray[Any]:
        """The pixels (h, w, 3 or 4) of one of the planes that are fitted."""
        level, step = self.sampling
        if step == 1:
            return plane.read(level=level)
        height, width = plane.level_shape(level)
        return plane.read((slice(0, height, step), slice(0, width, step)), level)

    def reads_same_pixels_as(self, other: FitTarget | None) -> bool:
        """Whether both read the same pixels of the same arrays."""
        if other is None or len(self.planes) != len(other.planes):
            return False
        if self.is_slide and self.options != other.options:
            return False
        a, b = self.plane, other.plane
        return a.index == b.index and all(
            mine is its for mine, its in zip(a.levels, b.levels, strict=False)
        )


@dataclass(frozen=True, eq=False)
class FitResult:
    """A decomposition, its settings and target; `limit` is the upper shared contrast limit.

    `is_rough`: after a few iterations, the converged one follows. For a slide, `decomposition` is
    that of its thumbnail, `slide_colours` what was fitted, and `preview` tells that this was a
    sample of tiles.
    """

    decomposition: Decomposition
    settings: DecomposeSettings
    target: FitTarget
    limit: float
    is_rough: bool = False
    slide_colours: SlideColours | None = None
    preview: bool = False


class StainFitter:
    """Fits one target after another and caches the colours of the last. One thread at a time."""

    def __init__(self) -> None:
        self._target: FitTarget | None = None
        self._image: RGBImage | None = None
        self._palette: Palette | None = None
        self._slide: tuple[SlideColours, bool] | None = None  # and whether it is a preview
        self._auto_spectra: tuple[Any, npt.NDArray[np.float64]] | None = None  # with its colours

    def clear_cache(self) -> None:
        """The pixels may have changed."""
        self._target = None

    def release_pixels(self) -> None:
        """Free what is quickly read again; the colours of a slide are few, and slow to count."""
        if self._slide is None:
            self._target = self._image = self._palette = self._auto_spectra = None

    def fit(
        self,
        target: FitTarget,
        settings: DecomposeSettings,
        report: Report | None = None,
        rough: bool = False,
    ) -> FitResult:
        """Decompose the target; its colours are read and counted only the first time.

        `rough`: stop after a few iterations if convergence may take long. For a slide the colours
        of a sample are counted, unless those of the whole were passed to `set_slide_colours`.
        """
        with nullcontext() if target.is_slide else numpy_until_compiled():
            return self._fit(target, settings, report, rough)

    def _fit(
        self, target: FitTarget, settings: DecomposeSettings, report: Report | None, rough: bool
    ) -> FitResult:
        if not target.reads_same_pixels_as(self._target):
            self._target = self._auto_spectra = self._slide = None
            self._read(target, subprogress(report, 0, 0.5))
            self._target = target
            report = subprogress(report, 0.5, 1)
        assert self._target is not None
        quick = rough_settings(settings) if rough else None
        used = quick or settings
        colours, is_preview = self._slide or (None, False)  # once: another thread may set it
        if settings.refits:  # the stains are counted once, then sliders only refit them
            if self._auto_spectra is None or self._auto_spectra[0] is not colours:
                auto = self._decompose(colours, DecomposeSettings(), subprogress(report, 0, 0.5))
                self._auto_spectra = colours, auto.spectra
            used = used.replace(components=DEFAULT_COMPONENTS, spectra=self._auto_spectra[1])
        d = self._decompose(colours, used, report)
        limit, is_rough = shared_contrast_limit(d), quick is not None
        return FitResult(d, settings, self._target, limit, is_rough, colours, is_preview)

    def slide_scan(self, fitted: FitResult) -> Callable[[Report], SlideColours] | None:
        """What counts the colours of the whole slide; None if there is no slide or none is needed.

        To be run in a thread of its own; its result is for `set_slide_colours`.
        """
        target, preview = fitted.target, fitted.slide_colours
        if preview is None or not fitted.preview or target.options.preview_only:
            return None
        scan = SlideScan(**target.options.arguments(preview=False), tissue=preview.tissue)

        def work(report: Report) -> SlideColours:
            return scan_slide_colours(preview.levels, scan, with_file_check(target.path, report))

        return work

    def set_slide_colours(self, target: FitTarget, colours: SlideColours) -> None:
        """Fit the slide on these colours from now on."""
        if target.reads_same_pixels_as(self._target):
            self._slide = colours, False

    def _decompose(
        self, colours: SlideColours | None, settings: DecomposeSettings, report: Report | None
    ) -> Decomposition:
        arguments = decompose_arguments(settings)
        if colours is not None:
            return colours.fit(report, **arguments)
        return decompose(self._image, **arguments, palette=self._palette, report=report)

    def _read(self, target: FitTarget, report: Report | None) -> None:
        report_progress(report, 0, len(target.planes), "reading the image")
        if target.is_slide:
            scan = SlideScan(**target.options.arguments(preview=True))
            self._slide = scan_slide_colours(target.plane.pyramid, scan, report), True
            return
        if not target.whole_stack:
            self._image = check_rgb(target.read(target.plane))
            pixels = self._image.flat
            self._palette = palette_of(pixels) if palette_pays(pixels) else None
            return
        planes = (target.read(plane) for plane in target.planes)
        self._image, self._palette = sample_stack(planes, len(target.planes), report)


def decompose_arguments(settings: DecomposeSettings) -> dict[str, Any]:
    """Keyword arguments of `decompose` that the panel sets."""
    names = ("components", "iterations", "lam", "gamma", "spectra")
    arguments = {name: getattr(settings, name) for name in names}
    if settings.spectra is not None:
        arguments["spectra"] = np.array(settings.spectra)
        arguments |= {"fixed_spectra": True} if settings.fixed_spectra else {}
        arguments |= {"stain_names": settings.stain_names} if settings.stain_names else {}
    return arguments


def rough_settings(settings: DecomposeSettings) -> DecomposeSettings | None:
    """A few iterations of a fit that may take long to converge; None if it is quick anyway."""
    few = settings.start.shape[1] <= _MAX_QUICK_COMPONENTS
    quick = settings.counts_stains or settings.refits or few or settings.fixed_spectra
    if settings.iterations != "converge" or quick:
        return None
    return settings.replace(iterations=_ROUGH_ITERATIONS)


def shared_contrast_limit(d: Decomposition) -> float:
    """A density that nearly all pixels of every component lie below, rounded to two digits."""
    pixels = d.densities.shape[1] * d.densities.shape[2]
    step = max(1, pixels // _MAX_LIMIT_SAMPLES)
    colours = d.image.flat[::step]
    visible = slice(None) if colours.shape[1] == 3 else colours[:, 3] > 0
    sample = [d.densities[i].reshape(-1)[::step][visible] for i in np.flatnonzero(d.active)]
    if not sample or not sample[0].size:
        return 1.0
    high = max(float(np.percentile(values, _LIMIT_PERCENTILE)) for values in sample)
    return float(f"{high or max(float(values.max()) for values in sample) or 1.0:.1e}")


def describe_fit(fitted: FitResult) -> str:
    """Which part of the image was fitted, in a few words; "" if all of it."""
    target = fitted.target
    if fitted.slide_colours is not None:
        return _describe_slide_fit(fitted, fitted.slide_colours)
    level, step = target.sampling
    parts = []
    if target.whole_stack:
        parts.append(f"one fit for {len(target.planes)} planes")
    if level:
        height, width = target.plane.level_shape(level)
        parts.append(f"fitted on the level of {height} × {width} pixels")
    if step > 1:
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        parts.append(f"fitted on every {ordinal} row and column")
    return ", ".join(parts)


def _describe_slide_fit(fitted: FitResult, colours: SlideColours) -> str:
    options = fitted.target.options
    pixels = f"{colours.counted / 1e6:,.1f} million pixels"
    if fitted.preview:
        parts = [f"a preview from {PREVIEW_TILES} tiles of tissue"]
    elif options.level:
        height, width = colours.levels[options.level].shape[:2]
        parts = [f"fitted on {pixels} of the level of {height} × {width}"]
    else:
        parts = [f"fitted on {pixels}"]
    if options.leave_out:
        kinds = (NON_TISSUE_NAMES[kind] for kind in options.leave_out)
        parts.append(f"without {' and '.join(kinds)}")
    return ", ".join(parts)


# --- layer data -----------------------------------------------------------------------------------


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
    """The target's levels (…, H, W, 3 or 4): of its plane, or of the whole stack."""
    plane = target.plane
    if target.is_slide:
        return list(plane.pyramid)
    return [plane.levels[k] if target.is_stack else plane.lazy(k) for k in range(len(plane.levels))]
