"""Decompose an image into background, spectra and stain densities.

K steps of Algorithm 1, or the converged solution. Either way the fit maps any colour to its
densities, so that pixels, palettes and tiles that the solver never saw are all treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.device import pick_device
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.threads import chunk_slices, in_numpy
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import (
    ImageError,
    RGBImage,
    check_rgb,
    to_columns,
    to_uint8,
)
from napari_beerlanet.core.stains.decomposition import (
    PIXELS_PER_BLOCK,
    Decomposition,
    DensityArray,
    map_pixels,
)
from napari_beerlanet.core.stains.palette import Palette, palette_of, palette_pays
from napari_beerlanet.core.stains.presets import NamedSpectrum, StainPreset, match_names
from napari_beerlanet.core.stains.settings import DecomposeSettings, Method
from napari_beerlanet.core.stains.solver import kernels, model_selection
from napari_beerlanet.core.stains.solver.converge import (
    ColourCells,
    ColumnSolver,
    build_cells,
    converge,
    solve_fixed_spectra,
)
from napari_beerlanet.core.stains.solver.spectra import check_spectra
from napari_beerlanet.core.stains.solver.unroll import MapChain, scale_weights, unroll

if TYPE_CHECKING:
    import torch


Array = npt.NDArray[np.float64]

_MAX_DENSITIES_IN_MEMORY = 1 << 24  # of a dense solve: 128 MB as float64
_MIN_MEAN_DENSITY = 1e-12  # below it a component is rounding and no stain
_DEFAULTS = DecomposeSettings()


def decompose(
    rgb: Any,
    components: int | Literal["auto"] = _DEFAULTS.components,
    iterations: int | Literal["converge"] = _DEFAULTS.iterations,
    spectra: npt.ArrayLike | StainPreset | None = _DEFAULTS.spectra,
    lam: float | Literal["auto"] = _DEFAULTS.lam,
    gamma: float | Literal["auto"] = _DEFAULTS.gamma,
    domain: Domain = _DEFAULTS.domain,
    unit_spectra: bool = _DEFAULTS.unit_spectra,
    reference_pixels: float | None = _DEFAULTS.reference_pixels,
    method: Method = _DEFAULTS.method,
    device: str | torch.device = "auto",
    report: Report | None = None,
    palette: Palette | None = None,
    fixed_spectra: bool = _DEFAULTS.fixed_spectra,
    stain_names: Sequence[str] = _DEFAULTS.stain_names,
) -> Decomposition:
    """Decompose an image into its stains.

    Parameters
    ----------
    rgb
        (H, W, 3 or 4) uint8, uint16 or float in [0, 1]. Fully transparent pixels weigh zero.
    components
        r, the number of components; `spectra`, if given, decides it. "auto" with K steps, or with
        given λ or γ: the stains are counted by "converge" and "auto", then fitted again from there.
    iterations
        "converge" for the objective's minimum, with parallel components merged; or K steps of
        Algorithm 1, as in the unrolled layer.
    spectra
        (3, r) start values, None for `default_spectra(components)`; or a `StainPreset`, which has
        names, too.
    lam, gamma
        λ and γ, or "auto" to choose them from the image. With "converge", both "auto" and no
        `spectra` given, the number of stains is chosen too: see `solver.model_selection`.
    domain, unit_spectra, reference_pixels
        As for `BeerLaNet`. A converged solution always has unit spectra.
    method
        "palette": exact, through the distinct colours of an 8- or 16-bit image; "dense": pixel by
        pixel, of more pixels than memory holds from colours joined where they agree to 8 bits;
        "auto" takes the palette where that pays.
    device
        Where K steps are computed. "auto" is the CPU for the palette, which is faster there than
        the transfer to a GPU, and the best device for dense. "converge" always runs on the CPU.
    report
        Called with a `Progress`; may raise `Cancelled`.
    palette
        The image's own colours as `palette_of` counts them, or more, for instance those of all
        planes of a stack, which then have one fit. Spares counting them again.
    fixed_spectra
        Keep the given `spectra` and solve for densities and background only: "decompose with these
        spectra". The problem is then convex, and its minimum is found, whatever `iterations`.
        λ and γ on "auto" are as weak as for the densities of a converged solution.
    stain_names
        Names of the given spectra. Without `fixed_spectra` a component keeps its name if it ends
        near the spectrum that it started from.
    """
    image = check_rgb(rgb)
    if isinstance(spectra, StainPreset):
        stain_names = stain_names or spectra.names
        spectra = spectra.spectra
    given: Any = spectra  # made a tuple by the settings
    settings = DecomposeSettings(
        components=components,
        iterations=iterations,
        spectra=given,
        lam=lam,
        gamma=gamma,
        domain=domain,
        unit_spectra=unit_spectra,
        reference_pixels=reference_pixels,
        method=method,
        fixed_spectra=fixed_spectra,
        stain_names=tuple(stain_names),
    )
    if str(device) not in ("auto", "cpu"):
        pick_device(device)
    pixels = image.flat
    if pixels.shape[1] == 4 and not pixels[:, 3].any():
        raise ImageError("Every pixel of the image is fully transparent.")
    report_progress(report, 0, 1, "counting colours")
    if palette is None:
        palette = _choose_palette(pixels, method)
    else:
        _check_palette(palette, pixels, method)
    solving = subprogress(report, 0.1, 0.7)
    # An array is taken as it is: sums depend on its memory layout in the last digit.
    start = settings.start if spectra is None else check_spectra(spectra, 1)
    problem = Problem(image, pixels, palette, start, domain, settings.reference_pixels, solving)
    report_progress(solving, 0, 1, "finding stains")
    fit = _solve(problem, settings, device)
    report_progress(solving, 1, 1, "writing densities")
    result = _build_decomposition(problem, fit)
    report_progress(report, 1, 1, "done")
    if not settings.stain_names or fixed_spectra:
        return replace(result, names=settings.stain_names, fixed_spectra=fixed_spectra)
    named = [NamedSpectrum(*one) for one in zip(settings.stain_names, start.T, strict=True)]
    return replace(result, names=match_names(named, result.spectra, result.active))


def _solve(problem: Problem, settings: DecomposeSettings, device: str | torch.device) -> Fit:
    lam = None if settings.lam == "auto" else settings.lam
    gamma = None if settings.gamma == "auto" else settings.gamma
    if settings.fixed_spectra:
        return solve_fixed(problem, lam, gamma, settings.unit_spectra)
    if settings.refits:
        counting, refitting = (subprogress(problem.report, *span) for span in ((0, 0.5), (0.5, 1)))
        counted = solve_converged(replace(problem, report=counting), None, None, find_rank=True)
        problem = replace(problem, start=counted.spectra, report=refitting)
    if settings.iterations != "converge":
        steps, unit_spectra = settings.iterations, settings.unit_spectra
        return solve_unrolled(problem, lam, gamma, steps, unit_spectra, device)
    return solve_converged(problem, lam, gamma, find_rank=settings.counts_stains)


def _choose_palette(pixels: npt.NDArray[Any], method: str) -> Palette | None:
    if method == "palette" and pixels.dtype.kind == "f":
        raise ImageError('method="palette" takes uint8 or uint16 images; use "auto" or "dense".')
    wanted = method == "palette" or (method == "auto" and palette_pays(pixels))
    return palette_of(pixels) if wanted else None


def _check_palette(palette: Palette, pixels: npt.NDArray[Any], method: str) -> None:
    """Whether it can be the image's palette; colours that it lacks are noticed at the look-up."""
    if method == "dense":
        raise ValueError('method="dense" goes pixel by pixel and takes no palette.')
    if palette.dtype != pixels.dtype:
        raise ImageError(f"The palette is of {palette.dtype} colours, the image {pixels.dtype}.")
    if not palette.counts.any():
        raise ImageError("The palette is empty: none of its colours was counted.")


@dataclass(frozen=True)
class Problem:
    """What there is to solve: `pixels` (p, 3 or 4) or, where there is one, their palette."""

    image: RGBImage
    pixels: npt.NDArray[Any]
    palette: Palette | None
    start: Array
    domain: Domain
    reference_pixels: float | None
    report: Report | None

    @property
    def total_weight(self) -> float:
        """What the weights of all pixels add up to."""
        if self.reference_pixels is not None:
            return self.reference_pixels
        if self.palette is not None:
            return float(self.palette.counts.sum())
        return float(_pixel_weights(self.pixels).sum())

    def cells(self) -> ColourCells:
        """Weighted colours in levels for `converge`: the palette's, or their 8-bit bins."""
        if self.palette is not None and self.palette.dtype == np.uint8:
            codes, w = self.palette.codes, self.palette.counts.astype(np.float64)
            X = to_columns(self.palette.colours, self.domain)
        else:
            codes, X, w = self.bins()
        if self.reference_pixels is not None:
            w = w * (self.reference_pixels / w.sum())
        return build_cells(codes, X, w, white=1.0 if self.domain == "intensity" else 0.0)

    def bins(self) -> tuple[npt.NDArray[Any], Array, Array]:
        """Colours joined where they agree to 8 bits: codes (u,), mean X (3, u), weights (u,)."""
        pixels, weights = self.pixels, None
        if self.palette is not None:
            pixels, weights = self.palette.colours, self.palette.counts
        bins = palette_of(to_uint8(pixels))
        total, w = np.zeros((3, len(bins))), np.zeros(len(bins))
        for part in chunk_slices(len(pixels), PIXELS_PER_BLOCK):
            rows = bins.rows(to_uint8(pixels[part]))
            weight = _pixel_weights(pixels[part]) if weights is None else weights[part]
            X = to_columns(pixels[part], self.domain) * weight
            w += np.bincount(rows, weight, len(bins))
            for k in range(3):
                total[k] += np.bincount(rows, X[k], len(bins))
        seen = w > 0
        return bins.codes[seen], total[:, seen] / w[seen], w[seen]


@dataclass(frozen=True)
class Fit:
    """x₀, S, the objective, λ, γ; ‖dᵢ‖₁; D of the palette's colours; D of any columns."""

    background: Array
    spectra: Array
    objective: Array
    penalties: tuple[float, float]
    mass: Array
    table: Array | None
    columns_to_densities: Callable[[Array], Array]


def solve_converged(
    problem: Problem, lam: float | None, gamma: float | None, *, find_rank: bool
) -> Fit:
    """The objective's minimum; `find_rank` chooses the number of stains, and λ and γ with it."""
    cells = problem.cells()
    if find_rank:
        blocks = model_selection.block_means(problem.image.pixels, problem.domain)
        solution = model_selection.find_stains(cells, blocks, problem.start, problem.report)
    else:
        used = model_selection.auto_penalties(cells, lam, gamma)
        solution = converge(cells, problem.start, *used, report=problem.report)
    exact = problem.palette is not None and problem.palette.dtype == np.uint8
    return Fit(
        solution.background,
        solution.spectra,
        solution.objective,
        (solution.lam, solution.gamma),
        solution.densities @ cells.w,
        solution.densities if exact else None,
        ColumnSolver.of(solution, cells.w),
    )


def solve_fixed(
    problem: Problem, lam: float | None, gamma: float | None, unit_spectra: bool
) -> Fit:
    """Densities and background under the spectra that the problem starts from."""
    cells, norms = problem.cells(), np.linalg.norm(problem.start, axis=0)
    safe = np.where(norms > 0, norms, 1.0)
    used = model_selection.auto_penalties(cells, lam, gamma, model_selection.DENSITIES_STRENGTH)
    solution = solve_fixed_spectra(cells, problem.start / safe, *used, report=problem.report)
    solver = ColumnSolver.of(solution, cells.w)
    scale = np.ones_like(safe) if unit_spectra else safe
    exact = problem.palette is not None and problem.palette.dtype == np.uint8
    return Fit(
        solution.background,
        solution.spectra * scale,
        solution.objective,
        used,
        solution.densities @ cells.w / scale,
        solution.densities / scale[:, None] if exact else None,
        lambda X: solver(X) / scale[:, None],
    )


def solve_unrolled(
    problem: Problem,
    lam: float | None,
    gamma: float | None,
    iterations: int,
    unit_spectra: bool,
    device: str | torch.device,
) -> Fit:
    """K steps of Algorithm 1."""
    if lam is None or gamma is None:
        lam, gamma = model_selection.auto_penalties(problem.cells(), lam, gamma)
    palette, pixels, r = problem.palette, problem.pixels, problem.start.shape[1]
    if palette is not None:
        X, w = to_columns(palette.colours, problem.domain), palette.counts.astype(np.float64)
    elif len(pixels) * r <= _MAX_DENSITIES_IN_MEMORY:
        X, w = to_columns(pixels, problem.domain), _pixel_weights(pixels)
    else:
        X, w = problem.bins()[1:]
    w = scale_weights(w, problem.reference_pixels)
    given = X, w, problem.start, lam, gamma
    settings: Any = {"iterations": iterations, "unit_spectra": unit_spectra}
    on_cpu = str(device) == "cpu" or (str(device) == "auto" and palette is not None)
    where = None if on_cpu else pick_device(device)
    if where is None or where.type in ("cpu", "mps"):  # the latter has no float64
        done = unroll(*given, **settings)
    else:
        from napari_beerlanet.core.stains.solver.torch_unroll import unroll_on

        done = unroll_on(where, *given, **settings)
    table = None if palette is None else done.D * done.scale[:, None]
    chain = MapChain(done.maps, done.scale)
    penalties = (lam, gamma)
    return Fit(done.background, done.spectra, done.objective, penalties, done.mass, table, chain)


def _pixel_weights(pixels: npt.NDArray[Any]) -> Array:
    if pixels.shape[1] == 4:
        return (pixels[:, 3] > 0).astype(np.float64)
    return np.ones(len(pixels))


def _build_decomposition(problem: Problem, fit: Fit) -> Decomposition:
    palette, r = problem.palette, fit.spectra.shape[1]
    present = fit.mass > _MIN_MEAN_DENSITY * problem.total_weight
    active = (np.linalg.norm(fit.spectra, axis=0) > 0) & present
    palette_densities = None
    if palette is not None:
        palette_densities = palette, _palette_densities(problem, palette, fit)
        planes = _look_up_pixels(*palette_densities, problem.pixels)
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
        _palette_densities=palette_densities,
    )


def _palette_densities(problem: Problem, palette: Palette, fit: Fit) -> DensityArray:
    """(u, r) densities of the palette's colours."""
    table = fit.table
    if table is None:
        table = fit.columns_to_densities(to_columns(palette.colours, problem.domain))
    if in_numpy():
        return np.ascontiguousarray(table.T, dtype=np.float32)
    entries = np.empty(table.shape[::-1], np.float32)
    kernels.scale_to_rows(np.ascontiguousarray(table), np.ones(len(table)), entries)
    return entries


def _look_up_pixels(
    palette: Palette, entries: DensityArray, pixels: npt.NDArray[Any]
) -> DensityArray:
    """(r, n) planes from the entries (u, r) of the palette's colours."""
    try:
        return palette.look_up(entries, pixels)
    except KeyError as error:
        raise ImageError("The image has colours that the given palette does not hold.") from error
