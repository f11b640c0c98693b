"""Densities and background under given spectra: the minimum of a convex problem, exactly.

With S held, the objective is convex in x₀ ≤ white and D together, so it has one minimum value and
no choice of a start. λ‖dᵢ‖₂ = min over nᵢ > 0 of λ(‖dᵢ‖²/nᵢ + nᵢ)/2, which is convex in dᵢ and nᵢ
together. Given x₀ and n, every colour is a small nonnegative least-squares problem of its own,

    φ(x) = min over d ≥ 0 of ½‖x₀ − x − S d‖² + λγ Σ dᵢ + ½ Σ (λ/nᵢ) dᵢ²,

solved exactly by its active set. What is left, Σ w φ(x) + λ/2 Σ nᵢ, is a smooth convex function of
c + r numbers: Newton's method needs some five passes over the colours. A component whose nᵢ goes to
zero is not in the image.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.threads import map_chunks
from napari_beerlanet.core.stains.solver.columns import COLUMNS_PER_TASK
from napari_beerlanet.core.stains.solver.converge import Array, ColourCells, Solution, converge
from napari_beerlanet.core.stains.solver.converged_kernels import solve_columns_and_differentiate

_MAX_STEPS, _USUAL_STEPS = 500, 10  # the most: without λ, and spectra that are nearly parallel
_MAX_SUPPORT_CHANGES = 20
_GRADIENT_TOLERANCE = 1e-11  # of x₀ in the solver's domain, and of each nᵢ relative to itself
_MIN_DAMPING, _MAX_DAMPING, _DAMPING_FACTOR = 1e-12, 1e6, 10.0  # of a Hessian of unit diagonal
_MIN_SHARE = 0.1  # of itself, to which nᵢ may fall in a step
_MIN_NORM = 1e-7  # of nᵢ beside √W: below it a component is not there
_SUFFICIENT_DECREASE = 1e-4
_MAX_STALLED, _PROGRESS = 5, 0.5  # steps that neither lower the objective nor halve the error
_ROUNDING = 1e-14  # of a residual beside x₀, from which it is a difference


def solve_fixed_spectra(
    cells: ColourCells, S: Array, lam: float, gamma: float, report: Report | None = None
) -> Solution:
    """x₀ (c,) and D (r, u) of the columns of `cells` for unit spectra S (c, r), all r of them.

    Columns of S that are zero, and components that the image does not have, get zero densities;
    S itself comes back as it was given.
    """
    coarse = cells
    while coarse.coarser is not None:
        coarse = coarse.coarser
    start = converge(coarse, S, lam, gamma, hold="spectra", single_start=True)
    given = np.linalg.norm(S, axis=0) > 0
    norms = np.where(given, np.sqrt(start.densities**2 @ coarse.w), 0.0)
    x0, values = start.background.copy(), list[float]()
    D = np.zeros((S.shape[1], len(cells.w)))
    for _ in range(_MAX_SUPPORT_CHANGES):
        alive = given & (norms > 0) if lam > 0 else given
        problem = _Problem(cells, S[:, alive], lam, gamma)
        x0, norms[alive], D[alive] = _newton(problem, D[alive], x0, norms[alive], values, report)
        D[~alive] = 0.0
        gone = alive & (norms == 0)
        revived = _missing_components(cells, S, D, x0, lam, gamma, given & ~alive)
        norms = np.where(revived > 0, revived, norms)
        if not gone.any() and not revived.any():
            break
    # Where a component left or came back, the objective was of another set of components.
    objective = np.minimum.accumulate(values)
    return Solution(x0, S.copy(), D, objective, float(lam), float(gamma))


class _Problem(NamedTuple):
    """What is given: the colours, unit spectra S (c, r) without zeros, λ and γ."""

    cells: ColourCells
    S: Array
    lam: float
    gamma: float


def _newton(
    problem: _Problem,
    D: Array,
    x0: Array,
    norms: Array,
    values: list[float],
    report: Report | None,
) -> tuple[Array, Array, Array]:
    """x₀, n and D at the minimum; n is 0, and D left as it is, where a component vanishes."""
    lam = problem.lam
    smallest = _MIN_NORM * float(np.sqrt(problem.cells.w.sum()))
    norms = np.maximum(norms, 2 * smallest) if lam > 0 else norms
    here = _Pass(problem, D, x0, norms)
    best, damping, stalled = here, _MIN_DAMPING, 0
    for count in range(_MAX_STEPS):
        report_progress(report, min(count, _USUAL_STEPS), _USUAL_STEPS + 1, "solving for densities")
        values.append(here.value)
        if here.converged or stalled == _MAX_STALLED:
            break
        after = here.step(problem, damping)
        while after is None and damping < _MAX_DAMPING:
            damping *= _DAMPING_FACTOR
            after = here.step(problem, damping)
        if after is None:
            break
        here, damping = after, max(damping / _DAMPING_FACTOR**2, _MIN_DAMPING)
        if lam > 0 and (here.norms < smallest).any():
            return here.x0, np.where(here.norms < smallest, 0.0, here.norms), here.D
        # Where values are the same but for rounding, it is the gradient that still tells.
        lower = here.value < best.value - best.rounding
        stalled = 0 if lower or here.error < _PROGRESS * best.error else stalled + 1
        best = here if lower or here.error < best.error else best
    return best.x0, best.norms, best.D


class _Pass:
    """Exact densities of all columns for some x₀ and n, and how the objective depends on them."""

    def __init__(self, problem: _Problem, D: Array, x0: Array, norms: Array) -> None:
        cells, S, lam, gamma = problem
        c, r = S.shape
        self.x0, self.norms, self.D, self._white = x0, norms, D.copy(), cells.white
        self._lam, self._weight = lam, max(float(cells.w.sum()), np.finfo(float).tiny)
        curvature = lam / norms if lam > 0 else np.zeros(r)

        def work(part: slice) -> Array:
            sums = np.zeros(1 + c + r + c * c + c * r + r * r)
            piece = np.ascontiguousarray(self.D[:, part])
            columns = np.ascontiguousarray(cells.X[:, part])
            weights = cells.w[part]
            solve_columns_and_differentiate(
                columns, weights, x0, S, lam * gamma, curvature, piece, sums
            )
            self.D[:, part] = piece
            return sums

        total = np.sum(map_chunks(work, len(cells.w), COLUMNS_PER_TASK), axis=0)
        ends = np.cumsum([1, c, r, c * c, c * r, r * r])
        value, gx, square, hxx, hxn, hnn = np.split(total, ends[:-1])
        self.value = float(value[0]) + lam * float(norms.sum()) / 2
        error = _ROUNDING * (1 + float(np.abs(x0).max(initial=0.0)))
        self.rounding = float(error * np.sqrt(self.value * self._weight) + error**2 * self._weight)
        self._squares, scale = square, lam / norms**2 if lam > 0 else np.zeros(r)
        self.gradient = np.concatenate([gx, lam / 2 - scale * square / 2])
        H = np.zeros((c + r, c + r))
        H[:c, :c] = hxx.reshape(c, c)
        H[:c, c:] = -hxn.reshape(c, r) * scale
        H[c:, :c] = H[:c, c:].T
        H[c:, c:] = -scale[:, None] * hnn.reshape(r, r) * scale
        if lam > 0:
            H[c:, c:] += np.diag(scale * square / norms)
        self.hessian = H

    @property
    def _stays_white(self) -> npt.NDArray[np.bool_]:
        """(c,) which channels of x₀ are white and would be brighter."""
        slope = self.gradient[: len(self.x0)]
        return np.asarray((self.x0 >= self._white) & (slope <= 0))

    @property
    def error(self) -> float:
        """How far x₀ is from the mean of what the stains leave, or white, and n from D's norms."""
        slope = np.where(self._stays_white, 0.0, self.gradient[: len(self.x0)])
        background = float(np.abs(slope).max()) / self._weight
        if self._lam == 0:
            return background
        return max(background, float(np.abs(1 - self._squares / self.norms**2).max(initial=0.0)))

    @property
    def converged(self) -> bool:
        """Whether this is the minimum."""
        return self.error < _GRADIENT_TOLERANCE

    def step(self, problem: _Problem, damping: float) -> _Pass | None:
        """The pass after a step; None where that overshoots, and more `damping` is needed."""
        move = self._newton_step(damping)
        slope = float(self.gradient @ move)
        if slope >= 0:
            return None
        c = len(self.x0)
        x0 = np.minimum(self.x0 + move[:c], self._white)
        after = _Pass(problem, self.D, x0, self.norms + move[c:])
        if after.value <= self.value + _SUFFICIENT_DECREASE * slope:
            return after
        # The objective is convex: as long as it falls along the step in the end, it is lower there.
        level = after.value <= self.value + self.rounding
        return after if level and after.gradient @ move <= -slope / 2 else None

    def _newton_step(self, damping: float) -> Array:
        """−(H + damping)⁻¹ g, in units in which the diagonal of H is one.

        x₀ and n differ by orders of magnitude. No channel of x₀ rises beyond white, and no nᵢ falls
        by more than to `_MIN_SHARE` of itself: where it would, it takes that step, and the others
        theirs, given this one.
        """
        c, size = len(self.x0), np.sqrt(np.maximum(np.diag(self.hessian), 0.0))
        unit = np.divide(1.0, size, out=np.zeros_like(size), where=size > 0)
        H = unit[:, None] * self.hessian * unit + damping * np.eye(len(size))
        g, move = unit * self.gradient, np.zeros(len(size))
        lowest, highest = np.full((2, len(size)), [[-np.inf], [np.inf]])
        safe = np.where(unit > 0, unit, 1.0)
        lowest[c:] = (_MIN_SHARE - 1) * self.norms / safe[c:]
        highest[:c] = (self._white - self.x0) / safe[:c]
        held = unit == 0
        held[:c] |= self._stays_white
        while not held.all():
            free = ~held
            right = g[free] + H[np.ix_(free, held)] @ move[held]
            values, vectors = np.linalg.eigh(H[np.ix_(free, free)])
            move[free] = -vectors @ (vectors.T @ right / np.maximum(values, damping))
            beyond = free & ((move < lowest) | (move > highest))
            if not beyond.any():
                break
            move[beyond] = np.clip(move, lowest, highest)[beyond]
            held |= beyond
        return np.asarray(unit * move)


def _missing_components(
    cells: ColourCells,
    S: Array,
    D: Array,
    x0: Array,
    lam: float,
    gamma: float,
    absent: npt.NDArray[np.bool_],
) -> Array:
    """(r,) norms of components that are absent although the objective would fall with them.

    dᵢ = 0 is right as long as ‖(sᵢᵀR − λγ)₊‖ ≤ λ.
    """
    found = np.zeros(len(absent))
    if lam == 0 or not absent.any():
        return found
    R = x0[:, None] - cells.X - S @ D
    for i in np.flatnonzero(absent):
        pull = float(np.sqrt(np.maximum(S[:, i] @ R - lam * gamma, 0.0) ** 2 @ cells.w))
        found[i] = max(pull - lam * (1 + 1e-9), 0.0)
    return found
