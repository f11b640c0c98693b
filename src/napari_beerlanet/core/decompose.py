"""An image to its background light, spectra and densities, and back."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .device import pick_device
from .images import Domain, ImageError, RGBImage, check_rgb, from_columns, to_columns
from .palette import Palette, palette_of, palette_pays
from .progress import Report, tell, within
from .solve import BLOCK, Fit, Problem, solve_converged, solve_unrolled
from .spectra import check_number, check_solver, check_spectra
from .threads import run_all, slices

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]
Method = Literal["auto", "palette", "dense"]

_NOTHING = 1e-12  # mean density that is rounding and no stain
_DISPLAY_OD = 1.2  # OD in the strongest channel at which a component's colour is shown


@dataclass(frozen=True)
class Decomposition:
    """An image as background light and r components, in the order of the start spectra.

    background (3,) float64
        x₀ in the solver's domain: ln of the light's intensity for "log".
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

    @property
    def light(self) -> Array:
        """(3,) intensity of the background light; 1 is full."""
        return np.exp(self.background) if self.domain == "log" else self.background

    @property
    def colours(self) -> npt.NDArray[np.uint8]:
        """(r, 3) RGB: what each component alone would look like on white light."""
        strongest = self.spectra.max(axis=0)
        scale = np.divide(_DISPLAY_OD, strongest, where=strongest > 0, out=np.zeros_like(strongest))
        seen = np.exp(-(self.spectra * scale).T)
        return np.asarray(np.rint(255 * seen), dtype=np.uint8)

    def reconstruct(self, components: Sequence[int] | None = None) -> npt.NDArray[Any]:
        """(H, W, 3) in the input's dtype, from all components or those of a list or mask."""
        keep = self._indices(components)
        out = np.empty((*self.image.shape, 3), self.image.pixels.dtype)
        flat, D = out.reshape(-1, 3), self.densities.reshape(len(self.densities), -1)

        def work(part: slice) -> None:
            model = self.background[:, None] - self.spectra[:, keep] @ D[keep, part]
            flat[part] = from_columns(model, self.domain, out.dtype)

        _in_blocks(work, len(flat))
        return out

    def residual(self) -> npt.NDArray[np.float32]:
        """(H, W, 3) float32: model minus image in the solver's domain (OD for "log")."""
        out = np.empty((*self.image.shape, 3), np.float32)
        flat, D = out.reshape(-1, 3), self.densities.reshape(len(self.densities), -1)
        pixels = self.image.flat

        def work(part: slice) -> None:
            model = self.background[:, None] - self.spectra @ D[:, part]
            flat[part] = (model - to_columns(pixels[part], self.domain)).T

        _in_blocks(work, len(flat))
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
        planes = _map_pixels(other.flat, self.domain, self._columns_to_densities, len(self.active))
        return planes.reshape(-1, *other.shape)

    def _indices(self, components: Sequence[int] | None) -> npt.NDArray[np.intp]:
        r = len(self.active)
        if components is None:
            return np.arange(r)
        wanted = np.asarray(components)
        if wanted.dtype == bool and wanted.shape == (r,):
            return np.flatnonzero(wanted)
        whole = wanted.ndim == 1 and (wanted.size == 0 or wanted.dtype.kind in "iu")
        if not whole or ((wanted < 0) | (wanted >= r)).any():
            raise ValueError(f"components must be indices from 0 to {r - 1}, not {components!r}.")
        wanted = wanted.astype(np.intp)
        return np.unique(wanted)


def decompose(
    rgb: Any,
    components: int = 8,
    iterations: int | Literal["converge"] = 10,
    spectra: npt.ArrayLike | None = None,
    lam: float | Literal["auto"] = "auto",
    gamma: float | Literal["auto"] = "auto",
    domain: Domain = "log",
    unit_spectra: bool = True,
    reference_pixels: float | None = None,
    method: Method = "auto",
    device: str | torch.device = "auto",
    report: Report | None = None,
) -> Decomposition:
    """Take an image's stains apart.

    Parameters
    ----------
    rgb
        (H, W, 3 or 4) uint8, uint16 or float in [0, 1]. Fully transparent pixels weigh zero.
    components
        r, the number of components; `spectra`, if given, decides it.
    iterations
        K steps of Algorithm 1, or "converge" for the objective's minimum, with parallel
        components merged: what to use for looking at stains.
    spectra
        (3, r) start values, None for `default_spectra(components)`.
    lam, gamma
        λ and γ, or "auto" to choose them from the image. With "converge", both "auto" and no
        `spectra` given, the number of stains is chosen too: see `core.auto`.
    domain, unit_spectra, reference_pixels
        As for `BeerLaNet`. A converged solution always has unit spectra.
    method
        "palette": exact, through the distinct colours of an 8- or 16-bit image; "dense": pixel by
        pixel, blockwise; "auto" takes the palette where that pays.
    device
        Where K steps are computed. "auto" is the CPU for the palette, which is faster there than
        the way to a GPU, and the best device for dense. "converge" always runs on the CPU.
    report
        Called with a `Progress`; may raise `Cancelled`.
    """
    image = check_rgb(rgb)
    start = check_spectra(spectra, components)
    check_solver(1 if iterations == "converge" else iterations, domain, method, reference_pixels)
    given = _penalty(lam, "lam"), _penalty(gamma, "gamma")
    if str(device) not in ("auto", "cpu"):
        pick_device(device)
    pixels = image.flat
    if pixels.shape[1] == 4 and not pixels[:, 3].any():
        raise ImageError("Every pixel of the image is fully transparent.")
    tell(report, 0, 1, "counting colours")
    palette = _palette(pixels, method)
    solving = within(report, 0.1, 0.7)
    problem = Problem(image, pixels, palette, start, domain, reference_pixels, solving)
    tell(solving, 0, 1, "finding stains")
    if iterations == "converge":
        fit = solve_converged(problem, *given, find_rank=spectra is None)
    else:
        fit = solve_unrolled(problem, *given, int(iterations), unit_spectra, device)
    tell(solving, 1, 1, "writing densities")
    result = _finish(problem, fit)
    tell(report, 1, 1, "done")
    return result


def _palette(pixels: npt.NDArray[Any], method: str) -> Palette | None:
    if method == "palette" and pixels.dtype.kind == "f":
        raise ImageError('method="palette" takes uint8 or uint16 images; use "auto" or "dense".')
    wanted = method == "palette" or (method == "auto" and palette_pays(pixels))
    return palette_of(pixels) if wanted else None


def _finish(problem: Problem, fit: Fit) -> Decomposition:
    palette, r = problem.palette, fit.spectra.shape[1]
    present = fit.mass > _NOTHING * problem.total_weight
    active = (np.linalg.norm(fit.spectra, axis=0) > 0) & present
    if palette is not None:
        table = fit.table
        if table is None:
            table = fit.columns_to_densities(to_columns(palette.colours, problem.domain))
        entries = np.ascontiguousarray(table.T, dtype=np.float32)
        planes = palette.look_up(entries, problem.pixels)
    else:
        planes = _map_pixels(problem.pixels, problem.domain, fit.columns_to_densities, r)
    weight = np.where(active, fit.spectra.sum(0) * fit.mass, 0.0)
    share = weight / weight.sum() if weight.sum() > 0 else np.zeros(r)
    return Decomposition(
        background=fit.background,
        spectra=fit.spectra,
        densities=planes.reshape(r, *problem.image.shape),
        active=active,
        share=share,
        objective=fit.objective,
        lam=fit.penalties[0],
        gamma=fit.penalties[1],
        domain=problem.domain,
        method="dense" if palette is None else "palette",
        image=problem.image,
        _columns_to_densities=fit.columns_to_densities,
    )


def _map_pixels(
    pixels: npt.NDArray[Any], domain: Domain, to_densities: Callable[[Array], Array], r: int
) -> npt.NDArray[np.float32]:
    planes = np.empty((r, len(pixels)), np.float32)
    for part in slices(len(pixels), BLOCK):
        planes[:, part] = to_densities(to_columns(pixels[part], domain))
    return planes


def _in_blocks(work: Callable[[slice], None], total: int) -> None:
    run_all([lambda part=part: work(part) for part in slices(total, BLOCK)])  # type: ignore[misc]


def _penalty(value: Any, name: str) -> float | None:
    return None if isinstance(value, str) and value == "auto" else check_number(value, name)
