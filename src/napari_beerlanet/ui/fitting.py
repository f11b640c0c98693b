"""From planes of a layer to a fit, off the GUI thread: what is counted once is not counted again.

A slide's colours are counted tile by tile: first those of a few tiles, for a preview, and then all
of them, which takes longer and is asked for apart (`counting`). A stack with one fit for all is
fitted on the colours of all its planes. Neither is ever in memory as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.decompose import Decomposition, decompose
from napari_beerlanet.core.files import still_there
from napari_beerlanet.core.images import RGBImage, check_rgb
from napari_beerlanet.core.palette import Palette, palette_of, palette_pays
from napari_beerlanet.core.progress import Report, tell, within
from napari_beerlanet.core.slidecolours import SlideColours, count_slide
from napari_beerlanet.core.stacks import colours_of_stack
from napari_beerlanet.ui.planes import Plane
from napari_beerlanet.ui.slide_choice import PREVIEW, USUAL_CHOICE, SlideChoice

USUAL = 8
"""Components where nothing else is said."""

BUDGET = 16_000_000
"""Pixels of a stack's plane that are read at once."""

_FIRST_STEPS = 30
_QUICK = 3  # components that settle at once
_SAMPLE = 1 << 16
_HIGH = 99.8  # per cent of the pixels lie below the shared contrast limit


@dataclass(frozen=True, eq=False)
class Settings:
    """What the form says; `spectra` (3, r) is None for the default start.

    `counted`: as many stains as the image needs. They are counted with λ and γ on auto; where these
    are numbers, they act on the stains that were found so.
    """

    components: int = USUAL
    iterations: int | Literal["converge"] = "converge"
    lam: float | Literal["auto"] = "auto"
    gamma: float | Literal["auto"] = "auto"
    spectra: npt.NDArray[np.float64] | None = None
    counted: bool = False

    @property
    def starts_from_counted(self) -> bool:
        """Whether the fit starts from the stains that were found on auto."""
        free = self.iterations == "converge" and self.spectra is None
        return self.counted and free and not self.lam == self.gamma == "auto"

    @property
    def arguments(self) -> dict[str, Any]:
        """For `decompose`."""
        kept = ("components", "iterations", "lam", "gamma", "spectra")
        return {name: getattr(self, name) for name in kept}

    @property
    def first_look(self) -> Settings | None:
        """Some steps towards what may take long to settle, None where it does not."""
        r = self.components if self.spectra is None else self.spectra.shape[1]
        counted = self.spectra is None and self.lam == self.gamma == "auto"
        quick = counted or self.starts_from_counted or r <= _QUICK
        if self.iterations != "converge" or quick:
            return None
        return replace(self, iterations=_FIRST_STEPS)


@dataclass(frozen=True, eq=False)
class Target:
    """What is fitted: one plane, or all `planes` of a stack with one fit.

    Of a slide: how, and the `path` of its file, if it is known.
    """

    planes: tuple[Plane, ...]
    choice: SlideChoice = USUAL_CHOICE
    path: Path | None = None

    @property
    def plane(self) -> Plane:
        """The first."""
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
    def lazy(self) -> bool:
        """Whether densities are worked out as they are looked at, not beforehand."""
        return self.whole_stack or len(self.plane.levels) > 1 or self.is_slide

    @property
    def sampling(self) -> tuple[int, int]:
        """Level that is read, and the step from one pixel to the next that is taken of it."""
        level = self.plane.level_for(BUDGET)
        pixels = math.prod(self.plane.level_shape(level))
        return level, max(1, math.ceil(math.sqrt(pixels / BUDGET)))

    def read(self, plane: Plane) -> npt.NDArray[Any]:
        """The pixels of one of the planes that the fit sees, (h, w, 3 or 4)."""
        level, step = self.sampling
        if step == 1:
            return plane.read(level=level)
        height, width = plane.level_shape(level)
        return plane.read((slice(0, height, step), slice(0, width, step)), level)

    def same_as(self, other: Target | None) -> bool:
        """Whether the other one reads the same pixels of the same arrays."""
        if other is None or len(self.planes) != len(other.planes):
            return False
        if self.is_slide and self.choice != other.choice:
            return False
        mine, its = self.plane, other.plane
        return mine.index == its.index and all(
            a is b for a, b in zip(mine.levels, its.levels, strict=False)
        )


@dataclass(frozen=True, eq=False)
class Fitted:
    """A decomposition, of what and how; `limit` is the upper end of the shared contrast scale.

    Of a slide, `decomposition` is the one of its thumbnail, `seen` what was fitted, and `preview`
    says that this was a sample.
    """

    decomposition: Decomposition
    settings: Settings
    target: Target
    limit: float
    first_look: bool = False
    seen: SlideColours | None = None
    preview: bool = False


class Fitter:
    """Fits one target after the other; keeps the colours of the last. One thread at a time."""

    def __init__(self) -> None:
        self._target: Target | None = None
        self._image: RGBImage | None = None
        self._palette: Palette | None = None
        self._seen: tuple[SlideColours, bool] | None = None  # and whether it is a sample
        self._counted: tuple[Any, npt.NDArray[np.float64]] | None = None

    def forget(self) -> None:
        """The pixels may have changed."""
        self._target = None

    def fit(
        self, target: Target, settings: Settings, report: Report | None = None, first: bool = False
    ) -> Fitted:
        """Read and count the target's colours, unless that is done, and take it apart.

        `first` gives a first look where the settings have one. Of a slide the colours of a sample
        are counted, unless those of the whole were given to `take`.
        """
        if not target.same_as(self._target):
            self._target = self._counted = self._seen = None
            self._read(target, within(report, 0, 0.5))
            self._target = target
            report = within(report, 0.5, 1)
        assert self._target is not None
        look = settings.first_look if first else None
        used = (look or settings).arguments
        seen, sampled = self._seen or (None, False)
        if settings.starts_from_counted:
            if self._counted is None or self._counted[0] is not seen:
                auto = self._decompose(seen, Settings().arguments, within(report, 0, 0.5))
                self._counted = seen, auto.spectra
            used["spectra"] = self._counted[1]
        d = self._decompose(seen, used, report)
        first_look = look is not None
        return Fitted(d, settings, self._target, shared_limit(d), first_look, seen, sampled)

    def counting(self, fitted: Fitted) -> Callable[[Report], SlideColours] | None:
        """What gathers the colours of the whole slide; None where a sample is what is wanted.

        To be run in a thread of its own; its result is for `take`.
        """
        target, seen = fitted.target, fitted.seen
        if seen is None or not fitted.preview or target.choice.sampled:
            return None
        given = target.choice.arguments(sampled=False) | {"tissue": seen.tissue}

        def work(report: Report) -> SlideColours:
            return count_slide(seen.levels, report=still_there(target.path, report), **given)

        return work

    def take(self, target: Target, seen: SlideColours) -> None:
        """From now on fit the slide by these colours."""
        if target.same_as(self._target):
            self._seen = seen, False

    def _decompose(
        self, seen: SlideColours | None, arguments: dict[str, Any], report: Report | None
    ) -> Decomposition:
        if seen is not None:
            return seen.fit(report, **arguments)
        return decompose(self._image, **arguments, palette=self._palette, report=report)

    def _read(self, target: Target, report: Report | None) -> None:
        tell(report, 0, len(target.planes), "reading the image")
        if target.is_slide:
            given = target.choice.arguments(sampled=True)
            self._seen = count_slide(target.plane.pyramid, report=report, **given), True
            return
        if not target.whole_stack:
            self._image = check_rgb(target.read(target.plane))
            pixels = self._image.flat
            self._palette = palette_of(pixels) if palette_pays(pixels) else None
            return
        planes = (target.read(plane) for plane in target.planes)
        self._image, self._palette = colours_of_stack(planes, len(target.planes), report)


def shared_limit(d: Decomposition) -> float:
    """A density that nearly all pixels of every component lie below, in two digits."""
    pixels = d.densities.shape[1] * d.densities.shape[2]
    step = max(1, pixels // _SAMPLE)
    sample = [d.densities[i].reshape(-1)[::step] for i in np.flatnonzero(d.active)]
    if not sample:
        return 1.0
    most = max(float(np.percentile(values, _HIGH)) for values in sample)
    return float(f"{most or max(float(values.max()) for values in sample) or 1.0:.1e}")


def where_fitted(fitted: Fitted) -> str:
    """How the fit saw the image where it did not see all of it at once, in a few words."""
    target = fitted.target
    if fitted.seen is not None:
        return _where_of_slide(fitted, fitted.seen)
    level, step = target.sampling
    said = []
    if target.whole_stack:
        said.append(f"one fit for {len(target.planes)} planes")
    if level:
        height, width = target.plane.level_shape(level)
        said.append(f"fitted on the level of {height} × {width} pixels")
    if step > 1:
        ordinal = {2: "2nd", 3: "3rd"}.get(step, f"{step}th")
        said.append(f"fitted on every {ordinal} row and column")
    return ", ".join(said)


def _where_of_slide(fitted: Fitted, seen: SlideColours) -> str:
    choice = fitted.target.choice
    pixels = f"{seen.counted / 1e6:,.1f} million pixels"
    if fitted.preview:
        said = [f"a preview from {PREVIEW} tiles of tissue"]
    elif choice.level:
        height, width = seen.levels[choice.level].shape[:2]
        said = [f"fitted on {pixels} of the level of {height} × {width}"]
    else:
        said = [f"fitted on {pixels}"]
    if choice.leave_out:
        said.append(f"without {' and '.join(choice.leave_out)}")
    return ", ".join(said)
