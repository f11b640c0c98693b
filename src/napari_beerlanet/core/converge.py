"""The objective's minimum rather than K steps towards it: for people who look at stains.

Sweeps of exact block solves (see `sweeps`), extrapolated, with a restart whenever extrapolation
would raise the objective, so it never rises. Coarser colours come first: cells of 8 × 8 × 8 grey
levels, about a thousandth of the work, bring the solution close before all colours are touched.
Components whose spectra have become parallel are merged: that is how the rank adapts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from . import sweeps
from .beerlanet import unroll
from .columns import ArrayColumns
from .descent import Descent
from .progress import Report, furthest, within
from .threads import run_all, slices

Array = npt.NDArray[np.float64]
Hold = Literal["nothing", "spectra", "background"]
_HELD: tuple[Hold, ...] = get_args(Hold)  # in the order of the kernel's numbers

TOLERANCE = 1e-6
"""Converged: over ten sweeps the objective fell by less than this share of itself."""

_RUN = 1 << 14
_FIRST_STEPS = 30


@dataclass(frozen=True)
class Cells:
    """Weighted columns X (c, u), w (u,), and the cell of each column on the next coarser level."""

    X: Array
    w: Array
    coarser: Cells | None = None
    parent: npt.NDArray[np.int64] | None = None


@dataclass(frozen=True)
class Solution:
    """x₀ (c,), S (c, r), D (r, u), and the objective after each sweep on the finest level."""

    background: Array
    spectra: Array
    densities: Array
    objective: Array
    lam: float
    gamma: float


def cells_of(codes: npt.NDArray[Any], X: Array, w: Array, shifts: Sequence[int] = (2, 3)) -> Cells:
    """Columns in ascending order of their Morton `codes`, with coarser levels above them.

    A level of shift k joins colours that agree in all but the last k bits of each channel. Their
    X is averaged: the mean of ln intensity, so Beer–Lambert holds for it.
    """
    if not shifts:
        return Cells(X, w)
    group = codes >> np.asarray(3 * shifts[0], codes.dtype)
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    weight = np.add.reduceat(w, first)
    safe = np.where(weight > 0, weight, 1.0)
    mean = np.where(weight > 0, np.add.reduceat(X * w, first, axis=1) / safe, X[:, first])
    parent = np.cumsum(np.r_[0, group[1:] != group[:-1]])
    above = cells_of(codes[first], mean, weight, shifts[1:])
    return Cells(X, w, above, parent)


def converge(
    cells: Cells,
    S: Array,
    lam: float,
    gamma: float,
    *,
    start: Solution | None = None,
    hold: Hold = "nothing",
    tolerance: float = TOLERANCE,
    quick: bool = False,
    report: Report | None = None,
) -> Solution:
    """Minimise the objective from S (c, r), or from `start`, coarse levels first.

    `start` is a solution of the coarsest level. `hold` keeps its spectra or its
    background and solves for the rest.
    Without a `start` the lowest of three minima is taken: reached by sweeps from S, and by sweeps
    after some steps of Algorithm 1 with and without unit spectra; `quick` tries the first only.
    """
    if cells.coarser is not None:
        assert cells.parent is not None
        above = converge(
            cells.coarser,
            S,
            lam,
            gamma,
            start=start,
            hold=hold,
            tolerance=tolerance / 30,  # cheap there, and what is slow is not left for here
            quick=quick,
            report=within(report, 0, 0.5),
        )
        begin = replace(above, densities=np.ascontiguousarray(above.densities[:, cells.parent]))
        report = within(report, 0.5, 1)
    elif start is not None or quick:
        begin = start or _blank(cells, S)
    else:
        return _lowest(cells, S, lam, gamma, hold, tolerance, report)
    return _swept(cells, begin, lam, gamma, hold, tolerance, report)


def _lowest(
    cells: Cells,
    S: Array,
    lam: float,
    gamma: float,
    hold: Hold,
    tolerance: float,
    report: Report | None,
) -> Solution:
    """The lowest of the minima that three starts lead to."""
    report = furthest(report)

    def from_steps(unit_spectra: bool) -> Solution:
        begin = _after_steps(cells, S, lam, gamma, unit_spectra)
        return _swept(cells, begin, lam, gamma, hold, tolerance, report)

    def from_nothing() -> Solution:
        return _swept(cells, _blank(cells, S), lam, gamma, hold, tolerance, report)

    ends = run_all([from_nothing, lambda: from_steps(True), lambda: from_steps(False)])
    return min(ends, key=lambda end: end.objective[-1])


def _after_steps(cells: Cells, S: Array, lam: float, gamma: float, unit_spectra: bool) -> Solution:
    """Where the first steps of Algorithm 1 lead.

    They move all components at once and a little, while a sweep gives the first one all it can
    take; with a strong penalty that can leave nothing for the rest, and a higher minimum.
    """
    columns = ArrayColumns(cells.X, cells.w)
    done = unroll([columns], S, lam, gamma, iterations=_FIRST_STEPS, unit_spectra=unit_spectra)
    D = columns.D * done.scale[0][:, None]
    return Solution(done.background[0], done.spectra[0], D, np.empty(0), lam, gamma)


def _blank(cells: Cells, S: Array) -> Solution:
    norm = np.linalg.norm(S, axis=0)
    unit = np.divide(S, norm, out=np.zeros_like(S), where=norm > 0)
    mean = cells.X @ cells.w / max(cells.w.sum(), np.finfo(float).tiny)
    return Solution(mean, unit, np.zeros((S.shape[1], len(cells.w))), np.empty(0), 0.0, 0.0)


def _swept(
    cells: Cells,
    start: Solution,
    lam: float,
    gamma: float,
    hold: Hold,
    tolerance: float,
    report: Report | None,
) -> Solution:
    """Where sweeps over one level of cells lead."""
    begin = (start.densities, start.spectra, start.background)
    descent = Descent(cells.X, cells.w, *begin, lam, gamma, _HELD.index(hold))
    objective = descent.run(tolerance, report)
    D, S, x0 = descent.here
    return Solution(x0.copy(), S.copy(), D.copy(), objective, float(lam), float(gamma))


@dataclass(frozen=True)
class ColumnSolver:
    """Densities of any columns under a solution: what its own colours converged to.

    At the minimum the penalty acts on a column as a linear term `low` (r,) and a quadratic term
    `curvature` (r,), which follow from λ, γ and the norms of the solution's dᵢ.
    """

    background: Array
    spectra: Array
    low: Array
    curvature: Array

    @classmethod
    def of(cls, solution: Solution, weights: Array) -> ColumnSolver:
        """The solver of a solution whose columns have these weights (u,)."""
        norm = np.sqrt(solution.densities**2 @ weights)
        alive = (norm > 0) & (np.linalg.norm(solution.spectra, axis=0) > 0)
        low = np.full(len(norm), solution.lam * solution.gamma)
        curvature = np.divide(solution.lam, norm, out=np.zeros_like(norm), where=alive)
        return cls(solution.background, np.where(alive, solution.spectra, 0.0), low, curvature)

    def __call__(self, X: Array) -> Array:
        """D (r, n) of columns X (c, n)."""
        D = np.empty((self.spectra.shape[1], X.shape[1]))

        def work(part: slice) -> None:
            piece = np.empty((len(D), part.stop - part.start))
            columns = np.ascontiguousarray(X[:, part])
            settings = (self.background, self.spectra, self.low, self.curvature)
            sweeps.solve_columns(columns, *settings, 1e-12, piece)
            D[:, part] = piece

        run_all([lambda part=part: work(part) for part in slices(X.shape[1], _RUN)])  # type: ignore[misc]
        return D
