"""λ, γ and the number of stains, chosen from the image.

In units of optical density (OD) the penalty has two parts: κ = λγ is what every density is shrunk
by, and ρ = λ/√W (W the total weight) the shrinkage of a whole component. No one pair serves both
halves of the answer. A strong κ holds the cone of spectra tight about the colours that are there,
but takes faint stain for background; a weak one finds the background and leaves densities
unshrunk, but lets the cone open towards noise. So spectra are fitted at the
strong end and background and densities at the weak end, each with the other held, in turn.

Colours in c channels cannot tell more than c stains apart, so ranks 1 … c are fitted, each along
a path of falling penalty, each step started from the last, from every choice of so many among the
first spectra of S_init. The smallest rank is taken whose next would explain less than a camera's
error: 0.02 OD for a second stain, 0.03 OD for a third. This is measured on means of 8 × 8 pixels,
where noise, chroma subsampling and colour fringes have averaged out but cells have not.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.threads import run_parallel
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import to_columns
from napari_beerlanet.core.stains.solver.converge import Array, ColourCells, Solution, converge

PenaltyStrength = tuple[float, float]
"""(ρ, κ) in OD."""

UNROLLED_STRENGTH: PenaltyStrength = (1e-3, 0.01)
SPECTRA_STRENGTH: PenaltyStrength = (1e-3, 0.03)
DENSITIES_STRENGTH: PenaltyStrength = (1e-4, 0.003)
"""For K steps of Algorithm 1; for the spectra and for the densities of a converged solution."""

_STRENGTH_PATH: tuple[PenaltyStrength, ...] = (
    (0.02, 0.1),
    (0.01, 0.05),
    (0.003, 0.02),
)
# Little shrinkage, so that residuals show rank and not penalty.
_RANK_STRENGTH: PenaltyStrength = (1e-3, 0.003)
_MIN_GAIN_OD = (0.02, 0.03)  # OD that a second and a third stain must explain
_MAX_KAPPA_FRACTION = 0.3  # of the image's own OD, so that a pale image is not erased
_ALTERNATIONS = 2  # of holding the one and solving for the other
_START_SPECTRA = 5  # the first spectra that starts are chosen from
BLOCK_SIDE = 8
BLOCK_COUNT = 1024


def find_stains(
    cells: ColourCells, blocks: Array, S: Array, report: Report | None = None
) -> Solution:
    """Spectra, background and densities of as many stains as the image needs.

    `blocks` (c, n) are columns of block means. The solution has all r columns of S (c, r), in
    S's order: each stain takes the place of that of the first five spectra that it resembles most
    (for the default start: haematoxylin, eosin, DAB, methylene blue, grey); the rest are zero.
    """
    coarse = cells
    while coarse.coarser is not None:
        coarse = coarse.coarser
    rank = choose_rank(blocks, S, subprogress(report, 0, 0.5), cells.white)
    strong, weak = (_penalties_for(coarse, s) for s in (SPECTRA_STRENGTH, DENSITIES_STRENGTH))
    stains = _best_fit(coarse, S, rank, (*_STRENGTH_PATH, SPECTRA_STRENGTH))
    for _ in range(_ALTERNATIONS):
        stains = converge(coarse, stains.spectra, *weak, start=stains, hold="spectra")
        stains = converge(coarse, stains.spectra, *strong, start=stains, hold="background")
    last = subprogress(report, 0.5, 1)
    placed, used = _match_to_start(stains, S)
    few = converge(cells, S[:, used], *weak, start=placed, hold="spectra", report=last)
    return _embed_components(few, used, S.shape[1])


def auto_penalties(
    cells: ColourCells,
    lam: float | None,
    gamma: float | None,
    strength: PenaltyStrength = UNROLLED_STRENGTH,
) -> tuple[float, float]:
    """λ and γ where None is given for them: for K steps, or as strong as `strength`."""
    auto_lam, _ = _penalties_for(cells, strength)
    lam = auto_lam if lam is None else lam
    if gamma is None:
        gamma = _kappa(cells, strength) / lam if lam > 0 else 0.0
    return lam, gamma


def _penalties_for(cells: ColourCells, strength: PenaltyStrength) -> tuple[float, float]:
    """λ = ρ√W and γ = κ/λ."""
    lam = strength[0] * float(np.sqrt(cells.w.sum()))
    return lam, _kappa(cells, strength) / lam if lam > 0 else 0.0


def _kappa(cells: ColourCells, strength: PenaltyStrength) -> float:
    return min(strength[1], _MAX_KAPPA_FRACTION * _rms_density(cells))


def choose_rank(blocks: Array, S: Array, report: Report | None = None, white: float = 0.0) -> int:
    """How many stains the columns `blocks` (c, n) need, from 1 to min(c, r)."""
    cells = ColourCells(blocks, np.ones(blocks.shape[1]), white=white)
    most: int = min(S.shape)
    error = []
    for rank in range(1, most + 1):
        report_progress(report, rank - 1, most, "counting stains")
        fit = _best_fit(cells, S, rank, (*_STRENGTH_PATH, _RANK_STRENGTH))
        rest = fit.background[:, None] - blocks - fit.spectra @ fit.densities
        error.append(float((rest**2).sum() / blocks.shape[1]))
    for rank in range(1, most):
        if error[rank - 1] - error[rank] < _MIN_GAIN_OD[min(rank, len(_MIN_GAIN_OD)) - 1] ** 2:
            return rank
    return most


def block_means(pixels: npt.NDArray[Any], domain: Domain) -> Array:
    """Columns (3, n ≤ 1024) of means over 8 × 8 pixels (fewer in a small image), evenly spread.

    Blocks with a fully transparent pixel are left out, unless all have one.
    """
    height, width = pixels.shape[:2]
    size = max(1, min(BLOCK_SIDE, height // BLOCK_SIDE, width // BLOCK_SIDE))
    rows, columns = np.divmod(np.arange((height // size) * (width // size)), width // size)
    if pixels.shape[2] == 4:
        alpha = pixels[: height // size * size, : width // size * size, 3] == 0
        hidden = alpha.reshape(height // size, size, -1, size).any((1, 3)).ravel()
        if not hidden.all():
            rows, columns = rows[~hidden], columns[~hidden]
    pick = np.unique(np.linspace(0, len(rows) - 1, BLOCK_COUNT).round().astype(int))
    if len(rows) > BLOCK_COUNT:  # an even step would follow the columns of the image
        pick = np.random.default_rng(0).choice(len(rows), BLOCK_COUNT, replace=False)
    within = np.arange(size)
    y = (rows[pick, None] * size + within)[:, :, None]
    x = (columns[pick, None] * size + within)[:, None, :]
    values = pixels[y, x].reshape(-1, pixels.shape[2])
    return np.ascontiguousarray(to_columns(values, domain).reshape(3, len(pick), -1).mean(2))


def _best_fit(
    cells: ColourCells, S: Array, rank: int, path: tuple[PenaltyStrength, ...]
) -> Solution:
    starts = combinations(range(min(max(_START_SPECTRA, rank), S.shape[1])), rank)

    def fit(start: tuple[int, ...]) -> Solution:
        return _follow_path(cells, S[:, list(start)], path)

    fits = run_parallel([partial(fit, start) for start in starts])
    return min(fits, key=lambda end: end.objective[-1])


def _follow_path(cells: ColourCells, S: Array, path: tuple[PenaltyStrength, ...]) -> Solution:
    """Converge at each strength of the path, starting from the one before."""
    solution = None
    for strength in path:
        solution = converge(
            cells, S, *_penalties_for(cells, strength), start=solution, single_start=True
        )
    assert solution is not None
    return solution


def _rms_density(cells: ColourCells) -> float:
    """Root mean square of X about its mean: the image's own OD."""
    weight = max(float(cells.w.sum()), np.finfo(float).tiny)
    mean = cells.X @ cells.w / weight
    return float(np.sqrt(((cells.X - mean[:, None]) ** 2 @ cells.w).sum() / weight))


def _match_to_start(solution: Solution, S: Array) -> tuple[Solution, npt.NDArray[np.int64]]:
    """The solution with its stains in the order of the columns of S (c, r) most similar to them.

    Also which columns those are, ascending. All others would be zero and stay it, and are left out:
    of hundreds of thousands of colours, moving their zeros takes longer than the rest.
    """
    from scipy.optimize import linear_sum_assignment  # loads slowly, and training needs none

    norm = np.linalg.norm(S, axis=0)
    unit = np.divide(S, norm, out=np.zeros_like(S), where=norm > 0)
    named = unit[:, : max(_START_SPECTRA, solution.spectra.shape[1])]
    stains, places = linear_sum_assignment(solution.spectra.T @ named, maximize=True)
    order = stains[np.argsort(places)]
    spectra, densities = solution.spectra[:, order], solution.densities[order]
    return replace(solution, spectra=spectra, densities=densities), np.sort(places)


def _embed_components(few: Solution, used: npt.NDArray[np.int64], r: int) -> Solution:
    """A solution of r components, those that are not `used` zero."""
    spectra = np.zeros((len(few.spectra), r))
    densities = np.zeros((r, few.densities.shape[1]))
    spectra[:, used], densities[used] = few.spectra, few.densities
    return replace(few, spectra=spectra, densities=densities)
