"""The minimum of the objective rather than K steps towards it.

Sweeps of exact block solves (see `converged_kernels`), extrapolated, with a restart whenever
extrapolation would raise the objective, so it never rises. Coarser colours come first: cells of
8 × 8 × 8 grey levels, about a thousandth of the work, bring the solution close before all colours
are touched. Components whose spectra have become parallel are merged: that is how the rank adapts.

The loop runs in a kernel, ten sweeps at a time: on a few hundred cells a sweep takes microseconds,
and Python between two of them would take as long, and would wait for a busy window's thread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from types import FunctionType
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report, max_progress, report_progress, subprogress
from napari_beerlanet.core.common.threads import in_numpy, map_chunks, run_parallel
from napari_beerlanet.core.stains.solver import converged_kernels, numpy_sweeps
from napari_beerlanet.core.stains.solver.converged_kernels import CONVERGENCE_WINDOW, MAX_SWEEPS
from napari_beerlanet.core.stains.solver.unroll import unroll

Array = npt.NDArray[np.float64]
Hold = Literal["nothing", "spectra", "background"]

TOLERANCE = 1e-6
"""Converged: over ten sweeps the objective fell by less than this fraction of itself."""

_HOLD_CODES: tuple[Hold, ...] = get_args(Hold)  # in the order of the kernel's numbers
_PARALLEL_COSINE = 0.9999  # from which a merger is tried; kept if the objective does not rise
_INITIAL_MOMENTUM = 0.5
_ROUNDING_TOLERANCE = 1e-10
_FIXED_TOLERANCE = 1e-12  # sweeps of densities alone are few, and x₀ may have far to go
_COLUMNS_PER_SOLVE = 1 << 14
_WARM_START_STEPS = 30


@dataclass(frozen=True)
class ColourCells:
    """Weighted columns X (c, u), w (u,), and the cell of each column on the next coarser level.

    `white` is what x₀ can be at most: 0 for the logarithm of an intensity, 1 for the intensity.
    """

    X: Array
    w: Array
    coarser: ColourCells | None = None
    parent: npt.NDArray[np.int64] | None = None
    white: float = 0.0


@dataclass(frozen=True)
class Solution:
    """x₀ (c,), S (c, r), D (r, u), and the objective after each sweep on the finest level."""

    background: Array
    spectra: Array
    densities: Array
    objective: Array
    lam: float
    gamma: float


def build_cells(
    codes: npt.NDArray[Any],
    X: Array,
    w: Array,
    shifts: Sequence[int] = (2, 3),
    white: float = 0.0,
) -> ColourCells:
    """Columns in ascending order of their Morton `codes`, with coarser levels above them.

    A level of shift k joins colours that agree in all but the last k bits of each channel. Their
    X is averaged: the mean of ln intensity, so Beer–Lambert holds for it.
    """
    if not shifts:
        return ColourCells(X, w, white=white)
    group = codes >> np.asarray(3 * shifts[0], codes.dtype)
    first = np.flatnonzero(np.r_[True, group[1:] != group[:-1]])
    weight = np.add.reduceat(w, first)
    safe = np.where(weight > 0, weight, 1.0)
    mean = np.where(weight > 0, np.add.reduceat(X * w, first, axis=1) / safe, X[:, first])
    parent = np.cumsum(np.r_[0, group[1:] != group[:-1]])
    above = build_cells(codes[first], mean, weight, shifts[1:], white)
    return ColourCells(X, w, above, parent, white)


def converge(
    cells: ColourCells,
    S: Array,
    lam: float,
    gamma: float,
    *,
    start: Solution | None = None,
    hold: Hold = "nothing",
    tolerance: float = TOLERANCE,
    single_start: bool = False,
    report: Report | None = None,
) -> Solution:
    """Minimise the objective over S, D ≥ 0 and x₀ ≤ white from S (c, r), or from `start`.

    Coarse levels come first: `start` is a solution of the coarsest. `hold` keeps its spectra or its
    background and solves for the rest.
    Without a `start` the lowest of three minima is taken: reached by sweeps from S, and by sweeps
    after some steps of Algorithm 1 with and without unit spectra; `single_start` tries the first
    only.
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
            single_start=single_start,
            report=subprogress(report, 0, 0.5),
        )
        begin = replace(above, densities=np.ascontiguousarray(above.densities[:, cells.parent]))
        report = subprogress(report, 0.5, 1)
    elif start is not None or single_start:
        begin = start or _zero_start(cells, S)
    else:
        return _best_of_starts(cells, S, lam, gamma, hold, tolerance, report)
    return _descend(cells, begin, lam, gamma, hold, tolerance, report)


def solve_fixed_spectra(
    cells: ColourCells, S: Array, lam: float, gamma: float, report: Report | None = None
) -> Solution:
    """Densities D (r, u) and x₀ (c,) under unit spectra S (c, r), which come back as they are.

    The objective is convex then and has no choice of a start. Every column's densities are exact
    for the background and the norms of D that the sweeps end with. Columns of S that are zero, and
    components that the image does not have, get zero densities.
    """
    settings: Any = {"hold": "spectra", "tolerance": _FIXED_TOLERANCE, "single_start": True}
    end = converge(cells, S, lam, gamma, report=report, **settings)
    return replace(end, densities=ColumnSolver.of(end, cells.w)(cells.X))


def _best_of_starts(
    cells: ColourCells,
    S: Array,
    lam: float,
    gamma: float,
    hold: Hold,
    tolerance: float,
    report: Report | None,
) -> Solution:
    """The lowest of the minima that three starts lead to."""
    report = max_progress(report)

    def from_steps(unit_spectra: bool) -> Solution:
        begin = _warm_start(cells, S, lam, gamma, unit_spectra)
        return _descend(cells, begin, lam, gamma, hold, tolerance, report)

    def from_nothing() -> Solution:
        return _descend(cells, _zero_start(cells, S), lam, gamma, hold, tolerance, report)

    ends = run_parallel([lambda: from_steps(True), lambda: from_steps(False), from_nothing])
    # Where starts lead to the same, in another order of components, rounding must not choose: the
    # steps come first, as they treat all components alike.
    lowest = min(end.objective[-1] for end in ends) * (1 + _ROUNDING_TOLERANCE)
    return next(end for end in ends if end.objective[-1] <= lowest)


def _warm_start(
    cells: ColourCells, S: Array, lam: float, gamma: float, unit_spectra: bool
) -> Solution:
    """Where the first steps of Algorithm 1 lead.

    They move all components at once and a little, while a sweep gives the first one all it can
    take; with a strong penalty that can leave nothing for the rest, and a higher minimum.
    """
    settings: Any = {"iterations": _WARM_START_STEPS, "unit_spectra": unit_spectra}
    done = unroll(cells.X, cells.w, S, lam, gamma, **settings)
    D = done.D * done.scale[:, None]
    return Solution(done.background, done.spectra, D, np.empty(0), lam, gamma)


def _zero_start(cells: ColourCells, S: Array) -> Solution:
    norm = np.linalg.norm(S, axis=0)
    unit = np.divide(S, norm, out=np.zeros_like(S), where=norm > 0)
    mean = cells.X @ cells.w / max(cells.w.sum(), np.finfo(float).tiny)
    return Solution(mean, unit, np.zeros((S.shape[1], len(cells.w))), np.empty(0), 0.0, 0.0)


def _descend(
    cells: ColourCells,
    start: Solution,
    lam: float,
    gamma: float,
    hold: Hold,
    tolerance: float,
    report: Report | None,
) -> Solution:
    """Where sweeps over one level of cells lead."""
    begin = start.densities, start.spectra, np.minimum(start.background, cells.white)
    penalty = float(lam), float(gamma), _HOLD_CODES.index(hold), float(cells.white)
    descent = BlockCoordinateDescent(cells.X, cells.w, *begin, penalty)
    objective = descent.run(tolerance, report)
    D, S, x0 = descent.current
    return Solution(x0.copy(), S.copy(), D.copy(), objective, float(lam), float(gamma))


class BlockCoordinateDescent:
    """Descent on columns X (c, u) with weights w (u,), from D (r, u), S (c, r), x₀ (c,).

    Three points of it are kept: the current one, the previous one, and room for the next.
    `penalty` is λ, γ, what is held, and white, as sweeps take them.
    """

    def __init__(
        self,
        X: Array,
        w: Array,
        D: Array,
        S: Array,
        x0: Array,
        penalty: tuple[float, float, int, float],
    ) -> None:
        self.X, self.w, self.penalty = np.ascontiguousarray(X), w, penalty
        # Always in C order: kernels are compiled for every order that they are given.
        self._points = tuple(np.ascontiguousarray(np.stack([a] * 3), float) for a in (D, S, x0))
        self._current, self._previous, self._next = 0, 1, 2
        self._R = np.empty_like(self.X)
        self._kernels: Any = numpy_sweeps if in_numpy() else converged_kernels

    @property
    def current(self) -> tuple[Array, Array, Array]:
        """D, S, x₀ as they are now."""
        return self._point(self._current)

    def run(self, tolerance: float, report: Report | None) -> Array:
        """Sweep until ten sweeps gain less than `tolerance`; the objective after each of them."""
        values = np.empty(MAX_SWEEPS + 1)
        values[0] = self._objective()
        count, momentum, moving, hold = 1, _INITIAL_MOMENTUM, False, self.penalty[2]
        while count <= MAX_SWEEPS:
            count, value, momentum, converged = self._advance(
                values, count, momentum, moving, tolerance
            )
            moving = True
            merged = None
            if hold == 0 and (converged or count % CONVERGENCE_WINDOW == 0):
                merged = self._merge(value)
            if merged is not None:
                value, moving = merged, False
            values[count] = min(value, values[count - 1])  # a rise in the last digit is rounding
            count += 1
            report_progress(report, count - 1, MAX_SWEEPS, "finding stains")
            if converged and merged is None:
                break
        return values[1:count]

    def _advance(
        self, values: Array, count: int, momentum: float, moving: bool, tolerance: float
    ) -> tuple[int, float, float, bool]:
        turn = np.array([self._current, self._previous, self._next])
        D, S, x0 = self._points
        state = (self.X, self.w, self._R, D, S, x0, turn, values, count)
        in_kernels = self._kernels is converged_kernels
        advance: Any = converged_kernels.advance if in_kernels else _advance_in_numpy
        done: Any = advance(*state, momentum, moving, *self.penalty, tolerance)
        self._current, self._previous, self._next = (int(k) for k in turn)
        return done  # type: ignore[no-any-return]

    def _objective(self) -> float:
        D, S, x0 = self.current
        self._kernels.residual(self.X, D, S, x0, self._R)
        return float(self._kernels.objective(self.w, D, self._R, S, *self.penalty[:2]))

    def _point(self, which: int) -> tuple[Array, Array, Array]:
        D, S, x0 = self._points
        return D[which], S[which], x0[which]

    def _merge(self, value: float) -> float | None:
        """Join the most parallel pair that can be joined without raising the objective."""
        D, S, x0 = self.current
        mass = D @ self.w
        cosine = S.T @ S
        pairs = [
            p for p in combinations(np.flatnonzero(mass > 0), 2) if cosine[p] > _PARALLEL_COSINE
        ]
        for i, j in sorted(pairs, key=lambda p: -cosine[p]):
            D1, S1, x1 = self._point(self._next)
            for new, old in ((D1, D), (S1, S), (x1, x0)):
                np.copyto(new, old)
            keep, drop = (i, j) if mass[i] >= mass[j] else (j, i)
            joint = mass[i] * S[:, i] + mass[j] * S[:, j]
            S1[:, keep] = joint / np.linalg.norm(joint)
            D1[keep] += D1[drop]
            S1[:, drop], D1[drop] = 0.0, 0.0
            self._kernels.residual(self.X, D1, S1, x1, self._R)
            merged = float(self._kernels.sweep(self.w, D1, self._R, S1, x1, *self.penalty))
            if merged <= value * (1 + _ROUNDING_TOLERANCE):
                self._current, self._next = self._next, self._current
                return merged
        return None


# The same loop over functions of the same names.
_advance_in_numpy = FunctionType(
    getattr(converged_kernels.advance, "py_func", converged_kernels.advance).__code__,
    {**vars(converged_kernels), **vars(numpy_sweeps)},
)


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
            converged_kernels.solve_columns(columns, *settings, piece)
            D[:, part] = piece

        map_chunks(work, X.shape[1], _COLUMNS_PER_SOLVE)
        return D
