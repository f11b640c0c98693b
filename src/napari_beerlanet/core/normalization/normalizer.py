"""What all methods share: a target, learned of templates, and images that are made to look like it.

A method is a `Target` with two functions: `fit` learns one of templates, and `colour_map` says what
the colours of an image become under it. Most methods are functions of colour once an image's
statistics are known. Those need only the palette of an image, its distinct colours with their
counts, for the statistics as well as for the result, which is then looked up pixel by pixel. What
looks at a pixel's neighbours, as a generator network does, has an `apply` of its own.

Statistics are those of 8 bits, for which the methods were made. A 16-bit or float image is mapped
with all its digits; only its statistics are taken from colours rounded to 8 bits.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Self, TypeVar

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import format_percent
from napari_beerlanet.core.common.threads import chunk_slices, map_chunks
from napari_beerlanet.core.images.rgb import RGBImage, check_rgb, to_uint8, white_level
from napari_beerlanet.core.stains.decomposition import display_colours
from napari_beerlanet.core.stains.palette import Palette, palette_of, palette_pays

Array = npt.NDArray[np.float64]
Image = npt.NDArray[np.uint8]
State = tuple[dict[str, npt.NDArray[Any]], dict[str, Any]]
"""Arrays by name and plain settings (JSON): all that a normalizer is."""

T = TypeVar("T")

_COLOURS_PER_TASK = 1 << 16
_LIGHT_PERCENTILE = 90.0  # of each channel: what stain is darker than
_MIN_STAIN_OD = 0.15  # in one channel at least: Macenko's threshold
_MIN_STAIN_LEVELS = 8  # of 255: in the dark, a camera's noise is that much optical density
_MIN_STAINED_SHARE = 0.005
_MIN_STRENGTH = 1e-3  # OD below which a stain's 99th percentile says nothing
_ENOUGH_STAINED_PIXELS = 100_000  # whatever their share: a slide may be nearly all background


class NormalizerError(ValueError):
    """A template, a file or a setting that no normalizer can be made of; one sentence."""


@dataclass(frozen=True)
class Appearance:
    """How an image looks to a method, in the method's own terms; None for what it does not have.

    background (3,)
        Intensity of the light in red, green and blue; 1 is white.
    stains (3, r)
        Optical density (natural logarithm) of each stain in the channels, columns of unit length.
    strengths (r,)
        The 99th percentile of each stain's density.
    """

    background: Array | None = None
    stains: Array | None = None
    strengths: Array | None = None

    def colours(self) -> list[npt.NDArray[np.uint8]]:
        """RGB (3,) of the background, where it is known, then of each stain."""
        found: list[npt.NDArray[np.uint8]] = []
        if self.background is not None:
            found.append(np.rint(255 * np.clip(self.background, 0, 1)).astype(np.uint8))
        if self.stains is not None:
            found += list(display_colours(np.maximum(self.stains, 0)))
        return found

    @property
    def description(self) -> str:
        """Background and stain vectors in numbers, a line each."""
        lines = []
        if self.background is not None:
            pairs = zip("RGB", self.background, strict=True)
            lines.append(f"Background: {', '.join(f'{c} {100 * v:.0f}' for c, v in pairs)} %")
        for k, stain in enumerate(self.stains.T if self.stains is not None else []):
            vector = ", ".join(f"{v:z.2f}" for v in stain)
            strong = self.strengths
            strength = f"; 99 % of densities below {strong[k]:.2f}" if strong is not None else ""
            lines.append(f"Stain {k + 1}: absorbs red, green, blue {vector}{strength}")
        return "\n".join(lines) or "No background or stains could be measured."


@dataclass(frozen=True)
class ColourMap:
    """What the colours of one image become; call it with (n, 3) colours of any accepted type.

    `values` maps (n, 3) float64 of 0 to 255 to the same, and is None where the image stays as it
    is; `notes` say why. `truncates`: 8-bit results are cut off as in torchstain, not rounded.
    """

    values: Callable[[Array], Array] | None
    notes: tuple[str, ...] = ()
    before: Appearance | None = None
    after: Appearance | None = None
    truncates: bool = False

    @property
    def unchanged(self) -> bool:
        """Whether every colour stays what it is."""
        return self.values is None

    def __call__(self, colours: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """(n, 3) in the dtype of the (n, 3) `colours`: uint8, uint16, or float in [0, 1]."""
        values = self.values
        if values is None:
            return colours.copy()
        out = np.empty_like(colours)

        def work(part: slice) -> None:
            white = white_level(colours.dtype)
            given = colours[part].astype(np.float64)
            found = values(given if white == 255 else given * (255 / white))
            if colours.dtype != np.uint8:
                found = np.clip(found, 0, 255) * (white / 255)
                out[part] = np.rint(found) if white > 1 else found
            else:
                found = np.clip(found, 0, 255)
                out[part] = found if self.truncates else np.rint(found)

        map_chunks(work, len(colours), _COLOURS_PER_TASK)
        return out


@dataclass(frozen=True, eq=False)
class NormalizedImage:
    """An image that was normalized.

    `rgb` has the shape and dtype of what was given, alpha kept; `notes` are sentences, none if all
    went well; `unchanged` where the image stayed as it was.
    """

    rgb: npt.NDArray[Any]
    notes: tuple[str, ...] = ()
    unchanged: bool = False
    before: Appearance | None = None
    after: Appearance | None = None


class Target(ABC):
    """What a method has learned: a frozen dataclass of float64 arrays, which are all its state."""

    colour_only: ClassVar[bool] = True
    """Whether a pixel's result depends on its colour alone, given the image's statistics."""
    shapes: ClassVar[Mapping[str, tuple[int | None, ...]]] = {}
    """Of the arrays by name; None is any length."""
    positive: ClassVar[tuple[str, ...]] = ()
    """Arrays whose values are above 0."""

    @classmethod
    def fit(cls, templates: Sequence[Image]) -> Target:
        """The looks of one or several template images (H, W, 3 or 4) uint8.

        A template that shows no stain is a `NormalizerError`.
        """
        return cls()

    @abstractmethod
    def colour_map(self, palette: Palette) -> ColourMap:
        """What the colours of the image with this 8-bit palette become."""

    def apply(self, image: RGBImage) -> NormalizedImage:
        """The image made to look like the target."""
        palette = palette_of(to_uint8(image.flat))
        return recolour(image, palette, self.colour_map(palette))

    def state(self) -> State:
        """All that makes the target, for `from_state`."""
        return {name: getattr(self, name) for name in self.shapes}, {}

    @classmethod
    def from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Self:
        """A target from its `state`; a `ValueError` has what is wrong with it."""
        found = {name: check_array(arrays, name, shape) for name, shape in cls.shapes.items()}
        for name in cls.positive:
            if found[name].min() <= 0:
                raise ValueError(f"its {name} are not above 0")
        return cls(**found)


@dataclass(frozen=True, eq=False)
class Normalizer:
    """A method, by its name in `METHODS`, and the target that images are made to look like."""

    method: str
    target: Target

    @property
    def colour_only(self) -> bool:
        """Whether a pixel's result depends on its colour alone, given the image's statistics."""
        return self.target.colour_only

    def colour_map(self, palette: Palette) -> ColourMap:
        """What the colours of the image with this 8-bit palette become."""
        return self.target.colour_map(palette)

    def apply(self, rgb: Any) -> NormalizedImage:
        """Normalize an image (H, W, 3 or 4), uint8, uint16 or float in [0, 1]."""
        return self.target.apply(check_rgb(rgb))

    def state(self) -> State:
        """All that is saved of it besides its name."""
        return self.target.state()


def recolour(image: RGBImage, palette: Palette, colour_map: ColourMap) -> NormalizedImage:
    """The image under a colour map; `palette` has its colours of 8 bits."""
    if colour_map.unchanged:
        out = image.pixels.copy()
    else:
        flat = image.flat
        new = flat.copy() if flat.shape[1] == 4 else np.empty_like(flat)
        if flat.dtype == np.uint16 and palette_pays(flat):
            palette = palette_of(flat)
        if palette.dtype == flat.dtype:
            palette.replace_colours(colour_map(palette.colours), flat, new)
        else:
            for part in chunk_slices(len(flat), _COLOURS_PER_TASK * 16):
                new[part, :3] = colour_map(np.ascontiguousarray(flat[part, :3]))
        out = new.reshape(image.pixels.shape)
    notes, unchanged = colour_map.notes, colour_map.unchanged
    return NormalizedImage(out, notes, unchanged, colour_map.before, colour_map.after)


@dataclass(frozen=True)
class ColourStatistics:
    """Weighted colours: `colours` (u, 3) float64 of 0 to 255, `counts` (u,) int64, none of them 0.

    Percentiles and covariances are those of the pixels.
    """

    colours: Array
    counts: npt.NDArray[np.int64]

    @classmethod
    def of(cls, palette: Palette) -> ColourStatistics:
        """Of the colours that were seen; those of transparent pixels are left out."""
        seen = palette.counts > 0
        scale = 255 / white_level(palette.dtype)
        return cls(palette.colours[seen].astype(np.float64) * scale, palette.counts[seen])

    def where(self, keep: npt.NDArray[np.bool_]) -> ColourStatistics:
        """Of the colours of a mask (u,)."""
        return ColourStatistics(self.colours[keep], self.counts[keep])

    @cached_property
    def total(self) -> int:
        """The number of pixels."""
        return int(self.counts.sum())

    def percentile(self, values: Array, q: float) -> float:
        """`np.percentile` of a value (u,) of each colour over all pixels, to the bit."""
        order = np.argsort(values)
        ends = np.cumsum(self.counts[order])
        place = np.true_divide(q, 100) * (self.total - 1)
        low = int(np.floor(place))
        first, second = np.searchsorted(ends, [low, min(low + 1, self.total - 1)], side="right")
        a, b = (float(values[order[k]]) for k in (first, second))
        t = float(place) - low
        return b - (b - a) * (1 - t) if t >= 0.5 else a + (b - a) * t

    def problem(self) -> str:
        """Why no method can do anything with these colours; "" where there is stain.

        Stain is what is darker than the image's light in a channel at least.
        """
        if not len(self.counts):
            return "every pixel is fully transparent"
        if len(self.counts) == 1:
            return "it has one colour only"
        levels = np.rint(self.colours).astype(np.intp)
        seen = [np.bincount(levels[:, k], self.counts, 256).cumsum() for k in range(3)]
        share = _LIGHT_PERCENTILE / 100 * self.total
        light = np.array([np.searchsorted(ends, share) for ends in seen])
        limit = np.minimum((light + 1) * np.exp(-_MIN_STAIN_OD) - 1, light - _MIN_STAIN_LEVELS)
        return self.too_few((self.colours <= limit).any(axis=1))

    def too_few(self, stained: npt.NDArray[np.bool_]) -> str:
        """Why the colours of a mask (u,) are too few pixels to go by; "" where they suffice."""
        count = int(self.counts[stained].sum())
        if count >= min(_ENOUGH_STAINED_PIXELS, _MIN_STAINED_SHARE * self.total) and count > 2:
            return ""
        return f"it is almost only background ({format_percent(count / self.total)} stained)"


def unchanged(problem: str, before: Appearance | None = None) -> ColourMap:
    """The map of an image that a method can do nothing with; `problem` as of `ColourStatistics`."""
    return ColourMap(None, (f"The image is unchanged: {problem}.",), before)


def pool_templates(templates: Sequence[Image]) -> Palette:
    """The colours of all templates, counted together; a `NormalizerError` where one is useless."""
    palettes = [template_palette(template) for template in templates]
    total = palettes[0]
    for palette in palettes[1:]:
        total = total + palette
    return total


def template_palette(template: Image) -> Palette:
    """The colours of a template that shows stain."""
    palette = palette_of(np.ascontiguousarray(template).reshape(-1, template.shape[-1]))
    problem = ColourStatistics.of(palette).problem()
    if problem:
        raise template_error(problem)
    return palette


def learned(found: T | str) -> T:
    """What was found in a template; where it is a reason why not, a `NormalizerError`."""
    if isinstance(found, str):
        raise template_error(found)
    return found


def template_error(problem: str) -> NormalizerError:
    """The error over a template of which a method cannot learn."""
    return NormalizerError(
        f"The template cannot be used: {problem}; choose an image with stained cells or tissue."
    )


def log_intensity(colours: Array) -> Array:
    """(3, n) of colours (n, 3) of 0 to 255; what is darker than 1 counts as 1."""
    return np.ascontiguousarray(np.log(np.maximum(colours, 1.0) / 255).T)


def match_strengths(own: Array, target: Array) -> tuple[Array, tuple[str, ...]]:
    """Factors (r,) that make the strengths of an image those of a template, and notes.

    A stain in less than 1 % of the pixels has no 99th percentile to match.
    """
    rare = (own < _MIN_STRENGTH) | (target < _MIN_STRENGTH)
    scale = np.where(rare, 1.0, target / np.where(rare, 1.0, own))
    if not rare.any():
        return scale, ()
    return scale, (
        "A stain covers less than 1 % of the image or of the template, so its strength was left "
        "as it is.",
    )


def check_array(
    arrays: Mapping[str, npt.NDArray[Any]], name: str, shape: tuple[int | None, ...]
) -> Array:
    """An array of a state as float64; None in `shape` is any length. A `ValueError` otherwise."""
    found = np.asarray(arrays.get(name, np.empty(0)))
    fits = found.ndim == len(shape) and all(
        want in (None, have) for want, have in zip(shape, found.shape, strict=True)
    )
    if not fits or found.dtype.kind != "f" or not np.isfinite(found).all():
        wanted = " x ".join("n" if n is None else str(n) for n in shape)
        raise ValueError(f"its {name} are not {wanted} finite numbers")
    return found.astype(np.float64)
