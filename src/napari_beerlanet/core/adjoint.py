"""The gradient of `unroll`, written out: what training takes back through K iterations.

For one image, in NumPy. Each function repeats a step of `beerlanet` and returns its value with its
pullback: the function that takes the gradient of the loss with respect to the value to those with
respect to what the step was given. A prefix g names a gradient: gS is ∂loss/∂S. Where a step takes
0 for 0/0, and at a kink, the gradient is 0. Automatic differentiation of the same small arithmetic
would take ten times as long, and half as long as all the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .beerlanet import State, diagonal, norms, positive, prox_l2, root, scaled
from .columns import (
    AffineMap,
    Array,
    ArrayColumns,
    Sums,
    contiguous,
    kernel_map,
    kernel_step,
    kernel_step_backward,
    ratio,
)

Pullback = Callable[..., Any]


class Learned(NamedTuple):
    """What is learned, or the gradient of it."""

    S: Any  # (c, r), the start
    lam: Any
    gamma: Any


class RecordedColumns(ArrayColumns):
    """Columns that remember the sums of every iteration, and every second D.

    The D between are computed again on the way back: that is as fast as to get memory for them.
    """

    def __init__(self, X: Array, w: Array, iterations: int) -> None:
        super().__init__(X, w)
        self.kept: list[Array] = []  # D after iterations …, K − 2, K
        self.sums: list[Sums] = []  # of the unscaled D, after each
        self._left = iterations
        self._between: Array | None = None

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self._left -= 1
        keep = self._left % 2 == 0
        M, N, b = (contiguous(t) for t in affine)
        room = None if keep else self._between
        self.D, sums = kernel_step(self.X, self.w, self.D, M, N, b, room)
        if keep:
            self.kept.append(self.D)
        else:
            self._between = self.D
        self.sums.append(sums)
        return sums


@dataclass(frozen=True)
class Tape:
    """K iterations on one image, for the way back; all small but X and w."""

    X: Array
    w: Array
    learned: Learned
    unit_spectra: bool
    states: list[State]  # K + 1, the first the start
    maps: list[AffineMap]  # K
    sums: list[Sums]  # K, of the unscaled D

    def backward(
        self, kept: Sequence[Array], g_D: Array, ga: Array, gx0: Array, gS: Array
    ) -> Learned:
        """Gradients of what is learned from those of D (r, u), unscaled, of its scales, x₀ and S.

        `kept` is `RecordedColumns.kept`. Nothing given is written to.
        """
        _, lam, gamma = self.learned
        weight, room = self.w.sum(), np.empty_like(g_D)
        total, gm = np.zeros(2), np.zeros_like(ga)  # total: of λ and γ
        for k, D, out in self._visits(kept):
            before, x0, raw = self.states[k], self.states[k + 1].x0, self.sums[k]
            threshold, map_back = _density_map(before.S, x0, before.a, lam, gamma)
            size = root(diagonal(raw.G))
            a = prox_l2(size, threshold)
            sums = scaled(raw, a)
            S, spectra_back = _spectra_step(before.S, x0, sums, lam, gamma)

            g_sums = Sums(np.zeros_like(raw.G), np.zeros_like(raw.P), gm)
            if self.unit_spectra:
                gS, ga, g_sums = _unit_back(S, a, sums, gS, ga, g_sums)
            gS, more_x0, more_sums, slopes = spectra_back(gS)
            g_sums = Sums(*(p + q for p, q in zip(g_sums, more_sums, strict=True)))
            g_size, g_threshold = _prox_back(size, threshold, ga + _scale_back(raw, a, g_sums))
            g_raw = _add_diagonal(scaled(g_sums, a), ratio(g_size, 2 * size))
            g_D, g_map = kernel_step_backward(
                self.X, self.w, D, self.maps[k].M, out, g_D, g_raw, room if k else None
            )
            more_S, map_x0, ga, more_slopes = map_back(g_map, g_threshold)
            gS, gx0, total = gS + more_S, gx0 + more_x0 + map_x0, total + slopes + more_slopes
            if before.sums is not None:  # x₀ = mean + S m / weight
                gx0 = ratio(gx0, weight)
                gS, gm = gS + gx0[:, None] * before.sums.m, gx0 @ before.S
            gx0 = np.zeros_like(x0)
        return Learned(gS, *total)

    def _visits(self, kept: Sequence[Array]) -> Iterator[tuple[int, Array, Array]]:
        """Iterations from the last to the first, with D before and after each."""
        nothing, between = np.empty((0, len(self.w))), None
        stack = [nothing, *kept]
        out = stack.pop()
        for k in reversed(range(len(self.maps))):
            if k == 0:
                D = nothing
            elif (len(self.maps) - k) % 2 == 0:
                D = stack.pop()
            else:
                D = between = kernel_map(self.X, stack[-1], *self.maps[k - 1], between)
            yield k, D, out
            out = D


def _density_map(S: Array, x0: Array, a: Any, lam: Any, gamma: Any) -> tuple[Array, Pullback]:
    """`density_map`: its threshold alone, but the pullback takes the gradient of the map, too."""
    tau, size = ratio(1.0, (S * S).sum()), norms(S)
    threshold = lam * tau * size

    def back(g: AffineMap, g_threshold: Array) -> tuple[Array, Array, Any, Array]:
        g_threshold = g_threshold - gamma * g.b  # b = τ x₀ᵀS − γ threshold
        along = g_threshold @ size
        g_tau = lam * along + g.b @ (x0 @ S) - (g.N * S).sum()  # N = −τ S
        gS, ga = x0[:, None] * g.b - g.N + ratio(S, size) * (lam * g_threshold), None
        if a is not None:  # M = a (1 − τ SᵀS)
            square, g_inner = S.T @ S, a[:, None] * g.M
            ga = diagonal(g.M) - tau * (g.M * square).sum(1)
            g_tau = g_tau - (g_inner * square).sum()
            gS = gS - S @ (g_inner + g_inner.T)
        gS = tau * gS - 2 * tau**2 * g_tau * S  # τ = 1 / ‖S‖²
        return gS, tau * (S @ g.b), ga, np.array([tau * along, -(g.b @ threshold)])

    return threshold, back


def _spectra_step(S: Array, x0: Array, sums: Sums, lam: Any, gamma: Any) -> tuple[Array, Pullback]:
    """`spectra_step`."""
    square = diagonal(sums.G)
    tau, size = ratio(1.0, square.sum()), root(square)
    gradient = S @ sums.G + sums.P - x0[:, None] * sums.m
    T = positive(S - tau * gradient)
    norm, penalty = norms(T), gamma * sums.m + size
    threshold = lam * tau * penalty
    shrink = prox_l2(norm, threshold)

    def back(g: Array) -> tuple[Array, Array, Sums, Array]:
        g_norm, g_threshold = _prox_back(norm, threshold, (g * T).sum(0))
        gT = (g * shrink + ratio(T, norm) * g_norm) * (T > 0)
        along, g_gradient, g_penalty = g_threshold @ penalty, -tau * gT, lam * tau * g_threshold
        g_tau = lam * along - (gT * gradient).sum()
        g_square = ratio(g_penalty, 2 * size) - tau**2 * g_tau  # τ = 1 / ‖D‖²
        g_sums = Sums(S.T @ g_gradient, g_gradient, gamma * g_penalty - x0 @ g_gradient)
        slopes = np.array([tau * along, g_penalty @ sums.m])
        gS, gx0 = gT + g_gradient @ sums.G, -(g_gradient @ sums.m)
        return gS, gx0, _add_diagonal(g_sums, g_square), slopes

    return T * shrink, back


def _unit_back(
    S: Array, a: Array, sums: Sums, gS: Array, ga: Array, g_sums: Sums
) -> tuple[Array, Array, Sums]:
    """Pullback of the rescaling to unit spectra, for S, a and sums before it."""
    norm = norms(S)
    unit = ratio(S, norm)
    g_norm = ga * a + _scale_back(sums, norm, g_sums) - ratio((gS * unit).sum(0), norm)
    return ratio(gS, norm) + unit * g_norm, ga * norm, scaled(g_sums, norm)


def _scale_back(sums: Sums, a: Array, g: Sums) -> Array:
    """Gradient of the factors of `scaled`; that of its sums is `scaled` itself."""
    both = g.G * sums.G
    ga: Array = a @ (both + both.T) + (g.P * sums.P).sum(0) + g.m * sums.m
    return ga


def _prox_back(norm: Array, threshold: Array, g: Array) -> tuple[Array, Array]:
    """Gradients of the norm and the threshold of `prox_l2`."""
    alive = ratio(g * (norm > threshold), norm)
    return alive - ratio(g * prox_l2(norm, threshold), norm), -alive


def _add_diagonal(g: Sums, diagonal: Array) -> Sums:
    G = g.G.copy()
    np.fill_diagonal(G, G.diagonal() + diagonal)
    return g._replace(G=G)
