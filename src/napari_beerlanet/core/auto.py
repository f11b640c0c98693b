"""λ, γ and the number of stains, chosen from the image.

In units of optical density (OD) the penalty has two parts: κ = λγ is what every density is
shrunk by, and ρ = λ/√W (W the total weight) the shrinkage of a whole component. Spectra of real
fields come out well at κ = 0.01 OD: with less the cone of spectra opens towards noise, with more
faint stain is taken for glass. ρ stays a tenth of it, so that a rare stain lives.

Colours in c channels cannot tell more than c stains apart, so ranks 1 … c are fitted, each along
a path of falling penalty, each step started from the last, from every choice of so many among the
first spectra of S_init. The smallest rank is taken whose next would explain less than a camera's
error: 0.02 OD for a second stain, 0.03 OD for a third. This is measured on means of 8 × 8 pixels,
where noise, chroma subsampling and colour fringes have averaged out but cells have not.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linear_sum_assignment

from .converge import Array, Cells, Solution, converge
from .images import Domain, to_columns
from .progress import Report, tell, within

KAPPA, RHO = 0.01, 1e-3
"""Ends of the path: what a density and what a component is shrunk by, in OD."""

_PATH = ((0.02, 0.1), (0.01, 0.05), (0.003, 0.02))  # (ρ, κ) on the way
_RANK_RHO_KAPPA = (1e-3, 0.003)  # little shrinkage, so that residuals show rank and not penalty
_GAIN = (0.02, 0.03)  # OD that a second and a third stain must explain
_FAINT = 0.1  # κ at most this share of the image's own OD, so that a pale image is not erased
_STARTS = 5  # the first spectra that starts are chosen from
_BLOCK = 8
_SAMPLE = 1024


def choose(
    cells: Cells,
    blocks: Array,
    S: Array,
    lam: float | None,
    gamma: float | None,
    report: Report | None = None,
) -> Solution:
    """Fit with λ, γ (None: chosen) and a rank chosen from the image, on the coarsest cells.

    `blocks` (c, n) are columns of block means. The solution has all r columns of S (c, r), in
    S's order: each stain takes the place of the spectrum it resembles most; the rest are zero.
    """
    while cells.coarser is not None:
        cells = cells.coarser
    rank = choose_rank(blocks, S, within(report, 0, 0.7))
    kappa = min(KAPPA, _FAINT * _spread(cells))
    best = _best_fit(cells, S, rank, (*_PATH, (RHO, kappa)))
    end = penalties(cells, lam, gamma, kappa)
    last = within(report, 0.7, 1)
    return _placed(converge(cells, best.spectra, *end, start=best, report=last), S)


def penalties(
    cells: Cells, lam: float | None, gamma: float | None, kappa: float | None = None
) -> tuple[float, float]:
    """λ and γ where None is given for them: λ = ρ√W, γ = κ/λ."""
    kappa = min(KAPPA, _FAINT * _spread(cells)) if kappa is None else kappa
    weight = max(float(cells.w.sum()), np.finfo(float).tiny)
    lam = RHO * np.sqrt(weight) if lam is None else lam
    return lam, (kappa / lam if lam > 0 else 0.0) if gamma is None else gamma


def choose_rank(blocks: Array, S: Array, report: Report | None = None) -> int:
    """How many stains the columns `blocks` (c, n) need, from 1 to min(c, r)."""
    cells = Cells(blocks, np.ones(blocks.shape[1]))
    most: int = min(S.shape)
    error = []
    for rank in range(1, most + 1):
        tell(report, rank - 1, most, "counting stains")
        fit = _best_fit(cells, S, rank, (*_PATH, _RANK_RHO_KAPPA))
        rest = fit.background[:, None] - blocks - fit.spectra @ fit.densities
        error.append(float((rest**2).sum() / blocks.shape[1]))
    for rank in range(1, most):
        if error[rank - 1] - error[rank] < _GAIN[min(rank, len(_GAIN)) - 1] ** 2:
            return rank
    return most


def block_means(pixels: npt.NDArray[Any], domain: Domain) -> Array:
    """Columns (3, n ≤ 1024) of means over 8 × 8 pixels (fewer in a small image), evenly spread.

    Blocks with a fully transparent pixel are left out, unless all have one.
    """
    height, width = pixels.shape[:2]
    size = max(1, min(_BLOCK, height // _BLOCK, width // _BLOCK))
    rows, columns = np.divmod(np.arange((height // size) * (width // size)), width // size)
    if pixels.shape[2] == 4:
        alpha = pixels[: height // size * size, : width // size * size, 3] == 0
        hidden = alpha.reshape(height // size, size, -1, size).any((1, 3)).ravel()
        if not hidden.all():
            rows, columns = rows[~hidden], columns[~hidden]
    pick = np.unique(np.linspace(0, len(rows) - 1, _SAMPLE).round().astype(int))
    if len(rows) > _SAMPLE:  # an even step would follow the columns of the image
        pick = np.random.default_rng(0).choice(len(rows), _SAMPLE, replace=False)
    within = np.arange(size)
    y = (rows[pick, None] * size + within)[:, :, None]
    x = (columns[pick, None] * size + within)[:, None, :]
    values = pixels[y, x].reshape(-1, pixels.shape[2])
    return np.ascontiguousarray(to_columns(values, domain).reshape(3, len(pick), -1).mean(2))


def _best_fit(cells: Cells, S: Array, rank: int, path: tuple[tuple[float, float], ...]) -> Solution:
    starts = combinations(range(min(max(_STARTS, rank), S.shape[1])), rank)
    fits = (_follow(cells, S[:, list(start)], path) for start in starts)
    return min(fits, key=lambda fit: fit.objective[-1])


def _follow(cells: Cells, S: Array, path: tuple[tuple[float, float], ...]) -> Solution:
    """Converge at each (ρ, κ) of the path, starting from the one before."""
    solution = None
    root = np.sqrt(cells.w.sum())
    for rho, kappa in path:
        lam = rho * root
        solution = converge(cells, S, lam, kappa / lam if lam > 0 else 0.0, start=solution)
    assert solution is not None
    return solution


def _spread(cells: Cells) -> float:
    """Root mean square of X about its mean: the image's own OD."""
    weight = max(float(cells.w.sum()), np.finfo(float).tiny)
    mean = cells.X @ cells.w / weight
    return float(np.sqrt(((cells.X - mean[:, None]) ** 2 @ cells.w).sum() / weight))


def _placed(solution: Solution, S: Array) -> Solution:
    """The solution with its stains in the places of the most similar columns of S (c, r)."""
    norm = np.linalg.norm(S, axis=0)
    unit = np.divide(S, norm, out=np.zeros_like(S), where=norm > 0)
    stains, places = linear_sum_assignment(solution.spectra.T @ unit, maximize=True)
    spectra = np.zeros_like(S)
    densities = np.zeros((S.shape[1], solution.densities.shape[1]))
    spectra[:, places] = solution.spectra[:, stains]
    densities[places] = solution.densities[stains]
    return replace(solution, spectra=spectra, densities=densities)
