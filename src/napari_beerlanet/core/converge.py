"""The objective's minimum rather than K steps towards it: for people who look at stains.

Sweeps of exact block solves (see `sweeps`), extrapolated, with a restart whenever extrapolation
would raise the objective, so it never rises. Coarser colours come first: cells of 8 × 8 × 8 grey
levels, about a thousandth of the work, bring the solution close before all colours are touched.
Components whose spectra have become parallel are merged: that is how the rank adapts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

from . import sweeps
from .beerlanet import unroll
from .columns import ArrayColumns
from .progress import Report, tell, within
from .threads import run_all, slices

Array = npt.NDArray[np.float64]
Hold = Literal["nothing", "spectra", "background"]
_HELD: tuple[Hold, ...] = get_args(Hold)  # in the order of the kernel's numbers

TOLERANCE = 1e-6
"""Converged: over ten sweeps the objective fell by less than this share of itself."""

_MAX_SWEEPS = 2000
_LOOK_BACK = 10
_PARALLEL = 0.9999  # cosine from which a merger is tried; it is kept if the objective does not rise
_MOMENTUM = 0.5, 0.98  # first and largest
_RUN = 1 << 14
_FIRST_STEPS = 30
_ROUNDING = 1e-10


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
        starts = [replace(above, densities=np.ascontiguousarray(above.densities[:, cells.parent]))]
        report = within(report, 0.5, 1)
    elif start is not None or quick:
        starts = [start or _blank(cells, S)]
    else:
        unit, plain = (_after_steps(cells, S, lam, gamma, u) for u in (True, False))
        starts = [_blank(cells, S), unit, plain]
    ends = [
        _Sweeper(cells, begin, lam, gamma, hold).run(
            tolerance, within(report, k / len(starts), (k + 1) / len(starts))
        )
        for k, begin in enumerate(starts)
    ]
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


class _State:
    """D (r, u), S (c, r), x₀ (c,): one point of the search."""

    def __init__(self, D: Array, S: Array, x0: Array) -> None:
        self.D, self.S, self.x0 = (np.array(a, np.float64, order="C") for a in (D, S, x0))

    def copy_from(self, other: _State) -> None:
        for mine, its in ((self.D, other.D), (self.S, other.S), (self.x0, other.x0)):
            np.copyto(mine, its)


class _Sweeper:
    """Sweeps over one level of cells: extrapolation, restart, merging."""

    def __init__(self, cells: Cells, start: Solution, lam: float, gamma: float, hold: Hold) -> None:
        self.X, self.w = np.ascontiguousarray(cells.X), cells.w
        self.lam, self.gamma = float(lam), float(gamma)
        self.hold = _HELD.index(hold)
        begin = (start.densities, start.spectra, start.background)
        self.here, self.before, self.next = (_State(*begin) for _ in range(3))
        self.R = np.empty_like(self.X)

    def run(self, tolerance: float, report: Report | None) -> Solution:
        self._refresh(self.here)
        here = self.here
        last = float(sweeps.objective(self.w, here.D, self.R, here.S, self.lam, self.gamma))
        values, momentum, moving = [last], _MOMENTUM[0], False
        while len(values) <= _MAX_SWEEPS:
            self._start_next(momentum if moving else 0.0)
            value = self._sweep()
            if value > values[-1] and moving:
                self._start_next(0.0)
                value, momentum = self._sweep(), momentum / 2
            else:
                momentum = min(1.1 * momentum, _MOMENTUM[1])
            self.before, self.here, self.next = self.here, self.next, self.before
            moving = True
            settled = len(values) >= _LOOK_BACK and (
                values[-_LOOK_BACK] - value <= tolerance * value
            )
            merged = None
            if self.hold == 0 and (settled or len(values) % _LOOK_BACK == 0):
                merged = self._merge(value)
            if merged is not None:
                value, moving = merged, False
            values.append(min(value, values[-1]))  # rounding in the last digit is no rise
            tell(report, len(values) - 1, _MAX_SWEEPS, "finding stains")
            if settled and merged is None:
                break
        here, objective = self.here, np.array(values[1:])
        return Solution(here.x0, here.S, here.D, objective, self.lam, self.gamma)

    def _start_next(self, momentum: float) -> None:
        """Where the next sweep starts: here, or further along the way that led here."""
        here, before, after = self.here, self.before, self.next
        if momentum == 0.0:
            after.copy_from(here)
        else:
            sweeps.extrapolate(here.D, before.D, momentum, after.D)
            sweeps.extrapolate(here.S, before.S, momentum, after.S)
            after.x0 = here.x0 + momentum * (here.x0 - before.x0)
        self._refresh(after)

    def _sweep(self) -> float:
        at = self.next
        penalty = (self.lam, self.gamma, self.hold)
        return float(sweeps.sweep(self.w, at.D, self.R, at.S, at.x0, *penalty))

    def _refresh(self, at: _State) -> None:
        sweeps.residual(self.X, at.D, at.S, at.x0, self.R)

    def _merge(self, value: float) -> float | None:
        """Join the most parallel pair that can be joined without raising the objective."""
        S, mass = self.here.S, self.here.D @ self.w
        cosine = S.T @ S
        pairs = [p for p in combinations(np.flatnonzero(mass > 0), 2) if cosine[p] > _PARALLEL]
        for i, j in sorted(pairs, key=lambda p: -cosine[p]):
            after = self.next
            after.copy_from(self.here)
            keep, drop = (i, j) if mass[i] >= mass[j] else (j, i)
            joint = mass[i] * S[:, i] + mass[j] * S[:, j]
            after.S[:, keep] = joint / np.linalg.norm(joint)
            after.D[keep] += after.D[drop]
            after.S[:, drop], after.D[drop] = 0.0, 0.0
            self._refresh(after)
            merged = self._sweep()
            if merged <= value * (1 + _ROUNDING):
                self.here, self.next = self.next, self.here
                return merged
        return None


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
