"""The result of `decompose`: background, spectra, densities, and images reconstructed from them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.threads import chunk_slices, map_chunks
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import (
    ImageError,
    RGBImage,
    check_rgb,
    from_columns,
    to_columns,
)
from napari_beerlanet.core.stains.palette import Palette, palette_of
from napari_beerlanet.core.stains.presets import NamedSpectrum, StainSuggestion, suggest_names

Array = npt.NDArray[np.float64]
DensityArray = npt.NDArray[np.float32]

PIXELS_PER_BLOCK = 1 << 17
"""Pixels that blockwise work takes at a time."""
_DISPLAY_OD = 1.2  # OD in the strongest channel at which a component's colour is shown


@dataclass(frozen=True, eq=False)
class Decomposition:
    """An image as background and r components, in the order of the start spectra.

    background (3,) float64
        x₀ in the solver's domain: ln of the background's intensity for "log". A solution that
        converged, or has fixed spectra, has no light brighter than white; K steps may.
    spectra (3, r) float64, densities (r, H, W) float32
        S and D.
    active (r,) bool
        False where a component's spectrum or density is zero everywhere.
    share (r,) float64
        How much of the image's optical density each component explains; sums to 1 (to 0 where
        nothing is active).
    objective (iterations,) float64
        The objective after each iteration.
    lam, gamma
        λ and γ as used.
    method
        "palette" or "dense": which one was used.
    names (r,)
        What the user, a preset or a model calls each component, "" for no name; () if none has one.
    fixed_spectra
        Whether the spectra were given and kept.
    """

    background: Array
    spectra: Array
    densities: npt.NDArray[np.float32]
    active: npt.NDArray[np.bool_]
    share: Array
    objective: Array
    lam: float
    gamma: float
    domain: Domain
    method: str
    image: RGBImage = field(repr=False)
    _columns_to_densities: Callable[[Array], Array] = field(repr=False, compare=False)
    _palette_densities: tuple[Palette, DensityArray] | None = field(
        default=None, repr=False, compare=False
    )
    names: tuple[str, ...] = ()
    fixed_spectra: bool = False

    @property
    def order(self) -> list[int]:
        """The active components, the largest share first: the order in which stains are shown."""
        active = np.flatnonzero(self.active)
        return active[np.argsort(-self.share[active], kind="stable")].tolist()  # type: ignore[no-any-return]

    @property
    def labels(self) -> list[str]:
        """(r,) what each component is called on the screen and in files, no two alike.

        Its name, or "Stain 1" for the largest share, "Stain 2" for the next …; "Component 4" for
        the fourth column of S_init if it is inactive.
        """
        numbers = {i: f"Stain {k + 1}" for k, i in enumerate(self.order)}
        labels: list[str] = []
        for i, name in enumerate(self.names or ("",) * len(self.active)):
            label = wanted = name or numbers.get(i, f"Component {i + 1}")
            count = 1
            while label in labels:
                count += 1
                label = f"{wanted} ({count})"
            labels.append(label)
        return labels

    def with_names(self, names: Sequence[str] | Mapping[int, str]) -> Decomposition:
        """The same with other names: (r,) of them, or those of some components by index."""
        r = len(self.active)
        if isinstance(names, Mapping):
            self._component_indices(list(names))
            now = list(self.names or ("",) * r)
            for i, name in names.items():
                now[i] = name
            names = now
        if len(names) not in (0, r):
            raise ValueError(f"There are {r} components, but {len(names)} names.")
        return replace(self, names=tuple(str(name).strip() for name in names))

    def suggestions(self, own: Sequence[NamedSpectrum] = ()) -> dict[int, StainSuggestion]:
        """Names for active components by index, where a known dye's spectrum is near enough.

        `own` are further spectra with names, for instance those of another image.
        """
        active = np.flatnonzero(self.active)
        found = suggest_names(self.spectra[:, active], own)
        return {int(i): one for i, one in zip(active, found, strict=True) if one is not None}

    @property
    def named_stains(self) -> list[NamedSpectrum]:
        """The active components that have a name, with their spectra."""
        return [
            NamedSpectrum(self.names[i], tuple(self.spectra[:, i].tolist()))
            for i in (self.order if self.names else ())
            if self.names[i]
        ]

    @property
    def light(self) -> Array:
        """(3,) intensity of the background (the illumination), 1 being white."""
        return np.exp(self.background) if self.domain == "log" else self.background

    @property
    def colours(self) -> npt.NDArray[np.uint8]:
        """(r, 3) RGB: what each component alone would look like in white illumination."""
        return display_colours(self.spectra)

    def reconstruct(self, components: Sequence[int] | None = None) -> npt.NDArray[Any]:
        """(H, W, 3) in the input's dtype, from all components or those of a list or mask."""
        return self._reconstruct(self.densities, components)

    def reconstruct_of(self, rgb: Any, components: Sequence[int] | None = None) -> npt.NDArray[Any]:
        """As `reconstruct`, of another image under this fit: see `densities_of`."""
        return self._reconstruct(self.densities_of(rgb), components)

    def residual(self) -> npt.NDArray[np.float32]:
        """(H, W, 3) float32: model minus image in the solver's domain (OD for "log")."""
        return self._residual(self.image, self.densities)

    def residual_of(self, rgb: Any) -> npt.NDArray[np.float32]:
        """As `residual`, of another image under this fit: see `densities_of`."""
        other = check_rgb(rgb)
        return self._residual(other, self.densities_of(other))

    def _reconstruct(
        self, densities: DensityArray, components: Sequence[int] | None
    ) -> npt.NDArray[Any]:
        keep = self._component_indices(components)
        out = np.empty((*densities.shape[1:], 3), self.image.pixels.dtype)
        flat, D = out.reshape(-1, 3), densities.reshape(len(densities), -1)

        def work(part: slice) -> None:
            model = self.background[:, None] - self.spectra[:, keep] @ D[keep, part]
            flat[part] = from_columns(model, self.domain, out.dtype)

        map_chunks(work, len(flat), PIXELS_PER_BLOCK)
        return out

    def _residual(self, image: RGBImage, densities: DensityArray) -> npt.NDArray[np.float32]:
        out = np.empty((*image.shape, 3), np.float32)
        flat, D = out.reshape(-1, 3), densities.reshape(len(densities), -1)
        pixels = image.flat

        def work(part: slice) -> None:
            model = self.background[:, None] - self.spectra @ D[:, part]
            flat[part] = (model - to_columns(pixels[part], self.domain)).T

        map_chunks(work, len(flat), PIXELS_PER_BLOCK)
        return out

    def densities_of(self, rgb: Any) -> npt.NDArray[np.float32]:
        """(r, h, w) float32 of another image under this fit, for instance a tile or a thumbnail.

        The same colour has the same densities as in the image that was decomposed.
        """
        other = check_rgb(rgb)
        if other.pixels.dtype != self.image.pixels.dtype:
            raise ImageError(
                f"This fit is of a {self.image.pixels.dtype} image, not {other.pixels.dtype}."
            )
        pixels = other.flat
        if self._palette_densities is not None:
            palette = palette_of(pixels)
            planes = palette.look_up(self._densities_of_palette(palette), pixels)
        else:
            planes = map_pixels(pixels, self.domain, self._columns_to_densities, len(self.active))
        return planes.reshape(-1, *other.shape)

    def _densities_of_palette(self, palette: Palette) -> DensityArray:
        """(u, r) densities of the palette's colours; only new ones are computed."""
        assert self._palette_densities is not None
        known, table = self._palette_densities
        entries = np.empty((len(palette), len(self.active)), np.float32)
        rows = np.minimum(np.searchsorted(known.codes, palette.codes), len(known) - 1)
        old = known.codes[rows] == palette.codes
        entries[old] = table[rows[old]]
        X = to_columns(palette.colours[~old], self.domain)
        entries[~old] = self._columns_to_densities(X).T
        return entries

    def _component_indices(self, components: Sequence[int] | None) -> npt.NDArray[np.intp]:
        r = len(self.active)
        if components is None:
            return np.arange(r)
        wanted = np.asarray(components)
        if wanted.dtype == bool and wanted.shape == (r,):
            return np.flatnonzero(wanted)
        whole = wanted.ndim == 1 and (wanted.size == 0 or wanted.dtype.kind in "iu")
        if not whole or ((wanted < 0) | (wanted >= r)).any():
            raise ValueError(
                f"components must be indices from 0 to {r - 1}, not {quoted(components)}."
            )
        wanted = wanted.astype(np.intp)
        return np.unique(wanted)


def display_colours(spectra: Array) -> npt.NDArray[np.uint8]:
    """(r, 3) RGB: what stains of spectra (3, r) look like in white illumination."""
    strongest = spectra.max(axis=0)
    scale = np.divide(_DISPLAY_OD, strongest, where=strongest > 0, out=np.zeros_like(strongest))
    return np.asarray(np.rint(255 * np.exp(-(spectra * scale).T)), dtype=np.uint8)


def map_pixels(
    pixels: npt.NDArray[Any], domain: Domain, to_densities: Callable[[Array], Array], r: int
) -> npt.NDArray[np.float32]:
    """Planes (r, n) of pixels (n, 3 or 4), computed in blocks."""
    planes = np.empty((r, len(pixels)), np.float32)
    for part in chunk_slices(len(pixels), PIXELS_PER_BLOCK):
        planes[:, part] = to_densities(to_columns(pixels[part], domain))
    return planes
