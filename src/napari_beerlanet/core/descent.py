"""Sweeps until the objective settles: extrapolation, restart, and merging of parallel components.

The loop runs in a kernel, ten sweeps at a time: on a few hundred cells a sweep takes microseconds,
and Python between two of them would take as long, and would wait for a busy window's thread.
"""

from __future__ import annotations

from itertools import combinations
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from . import sweeps
from .progress import Report, tell

Array = npt.NDArray[np.float64]

MAX_SWEEPS = 2000
LOOK_BACK = 10
_PARALLEL = 0.9999  # cosine from which a merger is tried; it is kept if the objective does not rise
_FIRST_MOMENTUM, _MOST_MOMENTUM = 0.5, 0.98
_ROUNDING = 1e-10


class Descent:
    """A search on columns X (c, u) with weights w (u,), from D (r, u), S (c, r), x₀ (c,).

    Three points of it are kept, `here`, the one `before`, and room for the `next`.
    """

    def __init__(
        self, X: Array, w: Array, D: Array, S: Array, x0: Array, lam: float, gamma: float, hold: int
    ) -> None:
        self.X, self.w = np.ascontiguousarray(X), w
        self.penalty = float(lam), float(gamma), hold
        self._points = tuple(np.stack([np.asarray(a, np.float64)] * 3) for a in (D, S, x0))
        self._here, self._before, self._next = 0, 1, 2
        self._R = np.empty_like(self.X)

    @property
    def here(self) -> tuple[Array, Array, Array]:
        """D, S, x₀ where the search has come to."""
        return self._at(self._here)

    def run(self, tolerance: float, report: Report | None) -> Array:
        """Sweep until ten sweeps gain less than `tolerance`; the objective after each of them."""
        values = np.empty(MAX_SWEEPS + 1)
        values[0] = self._objective()
        count, momentum, moving, hold = 1, _FIRST_MOMENTUM, False, self.penalty[2]
        while count <= MAX_SWEEPS:
            count, value, momentum, settled = self._advance(
                values, count, momentum, moving, tolerance
            )
            moving = True
            merged = None
            if hold == 0 and (settled or count % LOOK_BACK == 0):
                merged = self._merge(value)
            if merged is not None:
                value, moving = merged, False
            values[count] = min(value, values[count - 1])  # a rise in the last digit is rounding
            count += 1
            tell(report, count - 1, MAX_SWEEPS, "finding stains")
            if settled and merged is None:
                break
        return values[1:count]

    def _advance(
        self, values: Array, count: int, momentum: float, moving: bool, tolerance: float
    ) -> tuple[int, float, float, bool]:
        turn = np.array([self._here, self._before, self._next])
        D, S, x0 = self._points
        state = (self.X, self.w, self._R, D, S, x0, turn, values, count)
        done: Any = _advance(*state, momentum, moving, *self.penalty, tolerance)
        self._here, self._before, self._next = (int(k) for k in turn)
        return done  # type: ignore[no-any-return]

    def _objective(self) -> float:
        D, S, x0 = self.here
        sweeps.residual(self.X, D, S, x0, self._R)
        return float(sweeps.objective(self.w, D, self._R, S, *self.penalty[:2]))

    def _at(self, which: int) -> tuple[Array, Array, Array]:
        D, S, x0 = self._points
        return D[which], S[which], x0[which]

    def _merge(self, value: float) -> float | None:
        """Join the most parallel pair that can be joined without raising the objective."""
        D, S, x0 = self.here
        mass = D @ self.w
        cosine = S.T @ S
        pairs = [p for p in combinations(np.flatnonzero(mass > 0), 2) if cosine[p] > _PARALLEL]
        for i, j in sorted(pairs, key=lambda p: -cosine[p]):
            D1, S1, x1 = self._at(self._next)
            for new, old in ((D1, D), (S1, S), (x1, x0)):
                np.copyto(new, old)
            keep, drop = (i, j) if mass[i] >= mass[j] else (j, i)
            joint = mass[i] * S[:, i] + mass[j] * S[:, j]
            S1[:, keep] = joint / np.linalg.norm(joint)
            D1[keep] += D1[drop]
            S1[:, drop], D1[drop] = 0.0, 0.0
            sweeps.residual(self.X, D1, S1, x1, self._R)
            merged = float(sweeps.sweep(self.w, D1, self._R, S1, x1, *self.penalty))
            if merged <= value * (1 + _ROUNDING):
                self._here, self._next = self._next, self._here
                return merged
        return None


@njit(cache=True, nogil=True)
def _advance(  # type: ignore[no-untyped-def]
    X, w, R, D, S, x0, turn, values, count, momentum, moving, lam, gam, hold, tolerance
):
    """Sweep until it settles, or until a multiple of ten sweeps, when components may be merged.

    D (3, r, u), S (3, c, r), x0 (3, c) are the points `turn` (3,): here, before, next.
    `values` has `count` objectives; all new ones are added but the last, which is returned:
    (count, value, momentum, settled).
    """
    while True:
        here, before, after = turn
        if moving:
            sweeps.extrapolate(D[here], D[before], momentum, D[after])
            sweeps.extrapolate(S[here], S[before], momentum, S[after])
            x0[after] = x0[here] + momentum * (x0[here] - x0[before])
        else:
            D[after], S[after], x0[after] = D[here], S[here], x0[here]
        sweeps.residual(X, D[after], S[after], x0[after], R)
        value = sweeps.sweep(w, D[after], R, S[after], x0[after], lam, gam, hold)
        if value > values[count - 1] and moving:
            D[after], S[after], x0[after] = D[here], S[here], x0[here]
            sweeps.residual(X, D[after], S[after], x0[after], R)
            value = sweeps.sweep(w, D[after], R, S[after], x0[after], lam, gam, hold)
            momentum /= 2
        else:
            momentum = min(1.1 * momentum, _MOST_MOMENTUM)
        turn[0], turn[1], turn[2] = after, here, before
        moving = True
        gained = values[count - LOOK_BACK] - value if count >= LOOK_BACK else np.inf
        settled = gained <= tolerance * value
        if settled or count % LOOK_BACK == 0 or count == MAX_SWEEPS:
            return count, value, momentum, settled
        values[count] = min(value, values[count - 1])
        count += 1
