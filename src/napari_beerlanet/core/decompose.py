"""An image to its background light, spectra and densities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from .decomposition import Decomposition, Entries, map_pixels
from .device import pick_device
from .images import Domain, ImageError, check_rgb, to_columns
from .palette import Palette, palette_of, palette_pays
from .progress import Report, tell, within
from .solve import Fit, Problem, solve_converged, solve_unrolled
from .spectra import check_number, check_solver, check_spectra

if TYPE_CHECKING:
    import torch

__all__ = ["Decomposition", "Method", "decompose"]

Method = Literal["auto", "palette", "dense"]

_NOTHING = 1e-12  # mean density that is rounding and no stain


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
    palette: Palette | None = None,
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
    palette
        The image's own colours as `palette_of` counts them, or more, for instance those of all
        planes of a stack, which then have one fit. Spares counting them again.
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
    palette = _palette(pixels, method) if palette is None else _fitting(palette, pixels, method)
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


def _fitting(palette: Palette, pixels: npt.NDArray[Any], method: str) -> Palette:
    """The palette, if it can be the image's; colours that it lacks are found at the look-up."""
    if method == "dense":
        raise ValueError('method="dense" goes pixel by pixel and takes no palette.')
    if palette.dtype != pixels.dtype:
        raise ImageError(f"The palette is of {palette.dtype} colours, the image {pixels.dtype}.")
    if not palette.counts.any():
        raise ImageError("The palette is empty: none of its colours was counted.")
    return palette


def _finish(problem: Problem, fit: Fit) -> Decomposition:
    palette, r = problem.palette, fit.spectra.shape[1]
    present = fit.mass > _NOTHING * problem.total_weight
    active = (np.linalg.norm(fit.spectra, axis=0) > 0) & present
    known = None
    if palette is not None:
        known = palette, _entries(problem, palette, fit)
        planes = _looked_up(*known, problem.pixels)
    else:
        planes = map_pixels(problem.pixels, problem.domain, fit.columns_to_densities, r)
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
        _known=known,
    )


def _entries(problem: Problem, palette: Palette, fit: Fit) -> Entries:
    """(u, r) densities of the palette's colours."""
    table = fit.table
    if table is None:
        table = fit.columns_to_densities(to_columns(palette.colours, problem.domain))
    return np.ascontiguousarray(table.T, dtype=np.float32)


def _looked_up(palette: Palette, entries: Entries, pixels: npt.NDArray[Any]) -> Entries:
    """(r, n) planes from the entries (u, r) of the palette's colours."""
    try:
        return palette.look_up(entries, pixels)
    except KeyError as error:
        raise ImageError("The image has colours that the given palette does not hold.") from error


def _penalty(value: Any, name: str) -> float | None:
    return None if isinstance(value, str) and value == "auto" else check_number(value, name)
