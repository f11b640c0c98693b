"""The sweeps of `converged_kernels` in NumPy, for as long as kernels are being compiled.

The same steps in the same order, so the result is that of the kernels but for the order in which
sums are added up. Some fifty times as slow.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float64]


def residual(X: Array, D: Array, S: Array, x0: Array, R: Array) -> None:
    """As `converged_kernels.residual`."""
    np.subtract(x0[:, None], X, out=R)
    for i in np.flatnonzero(S.any(0)):
        R -= S[:, i, None] * D[i]


def extrapolate(here: Array, before: Array, momentum: float, out: Array) -> None:
    """As `converged_kernels.extrapolate`."""
    np.subtract(here, before, out=out)
    out *= momentum
    out += here
    np.maximum(out, 0.0, out=out)


def copy_point(D: Array, S: Array, x0: Array, source: int, target: int) -> None:
    """As `converged_kernels.copy_point`."""
    D[target], S[target], x0[target] = D[source], S[source], x0[source]


def sweep(
    w: Array,
    D: Array,
    R: Array,
    S: Array,
    x0: Array,
    lam: float,
    gam: float,
    hold: int,
    white: float,
) -> float:
    """As `converged_kernels.sweep`."""
    if hold != 2:
        total = w.sum()
        best = np.minimum(x0 - R @ w / total, white) if total > 0 else x0
        R -= (x0 - best)[:, None]
        x0[:] = best
    penalty = 0.0
    for i in range(len(D)):
        s = S[:, i].copy()
        square = float(s @ s)
        if square == 0.0:
            continue
        size = square**0.5
        v = (s / square) @ R
        v += D[i]
        v -= lam * gam / size
        np.maximum(v, 0.0, out=v)
        d2 = float(w @ (v * v))
        factor = max(0.0, 1.0 - lam / size / d2**0.5) if d2 > 0.0 else 0.0
        d2 *= factor * factor
        v *= factor
        R -= s[:, None] * (v - D[i])
        D[i] = v
        if d2 == 0.0:
            continue
        weighted = w * v
        d1 = float(weighted.sum())
        norm = size
        if hold != 1:
            change, norm = _solve_spectrum(S, i, R @ weighted, d1, d2, lam, gam)
            R -= change[:, None] * v
            D[i] *= norm
        penalty += lam * norm * (gam * d1 + d2**0.5)
    return 0.5 * float((R * R).sum(0) @ w) + penalty


def _solve_spectrum(
    S: Array, i: int, along: Array, d1: float, d2: float, lam: float, gam: float
) -> tuple[Array, float]:
    """sᵢ given all else, stored with unit norm: by how much it changes (c,), and its norm."""
    new = np.maximum(S[:, i] + along / d2, 0.0)
    norm = float(new @ new) ** 0.5
    factor = max(0.0, 1.0 - lam * (gam * d1 + d2**0.5) / d2 / norm) if norm > 0.0 else 0.0
    new *= factor
    norm *= factor
    change = new - S[:, i]
    S[:, i] = new / norm if norm > 0.0 else 0.0
    return change, norm


def objective(w: Array, D: Array, R: Array, S: Array, lam: float, gam: float) -> float:
    """As `converged_kernels.objective`."""
    sizes = np.sqrt((S * S).sum(0)) * (gam * (D @ w) + np.sqrt((D * D) @ w))
    return float(0.5 * ((R * R).sum(0) @ w) + lam * sizes.sum())
