"""Algorithm 1 of the paper, in NumPy or, to be differentiated, in torch.

    minimise  ½‖x₀1ᵀ − X − SDᵀ‖² + λ Σᵢ ‖sᵢ‖₂ (γ‖dᵢ‖₁ + ‖dᵢ‖₂)   over x₀ and S, D ≥ 0

X (c, u) holds u columns of weight w (pixels, or distinct colours with their counts), S (c, r) the
spectra. D is kept transposed, (r, u), and unscaled: the densities are a ⊙ D with a (r,), because
the ℓ₂ prox and the rescaling to unit spectra only scale rows. So one iteration touches the columns
once, in `Columns.step`: an affine map of D and X, a ReLU, and three weighted sums. All the rest is
arithmetic on c × r numbers. Batches have a leading axis N everywhere but in X, w and D.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from napari_beerlanet.core.common.threads import in_numpy, run_with_helpers, thread_count
from napari_beerlanet.core.stains.solver import unrolled_kernels
from napari_beerlanet.core.stains.solver.columns import (
    AffineMap,
    Array,
    ArrayColumns,
    Columns,
    Sums,
    contiguous,
    namespace,
    ratio,
)

COLUMNS_PER_KERNEL = 1 << 16
"""Columns up to which all iterations in one kernel are sooner done than each in one of its own."""

_CHUNKS_PER_THREAD = 2  # fewer are not worth waking it up
_PAUSE_S = 1e-4


class IterationState(NamedTuple):
    """What an iteration leaves: S and D's scales a, the x₀ it took, the sums of the scaled D."""

    S: Any  # (N, c, r)
    x0: Any  # (N, c)
    a: Any  # (N, r), or None while D is zero
    sums: Sums | None  # None while D is zero


@dataclass(frozen=True)
class Unrolled:
    """What K iterations leave of N images; NumPy arrays or torch tensors."""

    background: Any  # (N, c)
    spectra: Any  # (N, c, r)
    scale: Any  # (N, r), of the columns' D
    sums: Sums
    objective: Any  # (N, K), or None where it was not tracked
    maps: list[AffineMap]  # K of them, batched
    states: list[IterationState] = field(
        default_factory=list
    )  # K + 1, the first the start; if from NumPy


def unroll(
    images: Sequence[Columns],
    S: Any,
    lam: Any,
    gamma: Any,
    *,
    iterations: int,
    unit_spectra: bool,
    track: bool = False,
) -> Unrolled:
    """Algorithm 1 on a batch of images, all started from S (c, r). D stays with the columns.

    `track` computes the objective after each iteration.
    """
    xp = namespace(S)
    totals = zip(*(i.totals() for i in images), strict=True)
    weight, mean, spread = (_stack(t, xp) for t in totals)
    S, a, sums = xp.broadcast_to(S, (len(images), *S.shape)), None, None
    maps, states = [], [IterationState(S, mean, a, sums)]
    for _ in range(iterations):
        x0 = mean
        if sums is not None:
            x0 = mean + ratio((S @ sums.m[..., None])[..., 0], weight[:, None])
        affine, shrink = _density_map(S, x0, a, lam, gamma)
        steps = [
            image.step(AffineMap(*parts)) for image, *parts in zip(images, *affine, strict=True)
        ]
        sums = Sums(*(_stack(t, xp) for t in zip(*steps, strict=True)))
        a = prox_l2(root(diagonal(sums.G)), shrink)
        sums = scaled(sums, a)
        S = _spectra_step(S, x0, sums, lam, gamma)
        if unit_spectra:
            norm = norms(S)
            S, a, sums = ratio(S, norm[:, None]), a * norm, scaled(sums, norm)
        maps.append(affine)
        states.append(IterationState(S, x0, a, sums))
    objective = _objective(states[1:], weight, mean, spread, lam, gamma) if track else None
    assert sums is not None
    return Unrolled(x0, S, a, sums, objective, maps, states)


def unroll_one(
    columns: ArrayColumns,
    S: Array,
    lam: Any,
    gamma: Any,
    *,
    iterations: int,
    unit_spectra: bool,
    track: bool = False,
) -> Unrolled:
    """`unroll` on one image: in one kernel for all iterations if it has no more columns than pay.

    Up to there the arithmetic on c × r numbers takes longer in NumPy than the columns take. Threads
    share the columns of an iteration and each does that arithmetic for itself.
    """
    X, w = columns.X, columns.w
    (c, u), r, K = X.shape, S.shape[1], iterations
    if u > COLUMNS_PER_KERNEL or in_numpy():
        return unroll(
            [columns], S, lam, gamma, iterations=K, unit_spectra=unit_spectra, track=track
        )
    totals = columns.totals()
    weight, mean = totals.weight, totals.mean
    rooms = columns.rooms(K)
    D = np.empty((1 + int(rooms.max()), r, u))
    nothing = np.empty((0, u)), np.empty((0, r)), np.empty(0)
    chunks = max(-(-u // unrolled_kernels.CHUNK_COLUMNS), 1)
    shapes = (K, chunks, r, r), (K, chunks, c, r), (K, chunks, r)
    shared = *np.zeros((2, K), np.int64), *(np.zeros(shape) for shape in shapes)
    numbers = [float(np.asarray(value).item()) for value in (lam, gamma)]
    problem = X, w, float(weight), mean, contiguous(S), *numbers, unit_spectra
    given = *problem, D, rooms, *nothing, *shared

    def work() -> list[Array]:
        sums = (K, r, r), (K, c, r), (K, r)
        shapes = (K, r, r), (K, c, r), (K, r), (K, c, r), (K, c), (K, r), *sums, *sums
        own = [np.empty(shape) for shape in shapes]
        at = 0
        while (at := unrolled_kernels.unroll_columns(*given, at, *own)) < K:
            time.sleep(_PAUSE_S)  # another thread has taken columns and was put aside: it may run
        return own

    M, N, b, *rest = run_with_helpers(work, min(thread_count(), chunks // _CHUNKS_PER_THREAD) - 1)
    states, raw, sums = rest[:3], rest[3:6], rest[6:]
    columns.keep([D[k] for k in rooms], [Sums(*(t[k] for t in raw)) for k in range(K)])
    maps = [AffineMap((M[k] if k else nothing[1])[None], N[k][None], b[k][None]) for k in range(K)]
    steps = [IterationState(S[None], mean[None], None, None)]
    for k in range(K):
        after = Sums(*(t[k][None] for t in sums))
        S_k, x0, a = (t[k][None] for t in states)
        steps.append(IterationState(S_k, x0, a, after))
    last = steps[-1]
    assert last.sums is not None
    weights, means, spreads = (np.asarray(part)[None] for part in totals)
    objective = _objective(steps[1:], weights, means, spreads, lam, gamma) if track else None
    return Unrolled(last.x0, last.S, last.a, last.sums, objective, maps, steps)


def _stack(parts: tuple[Any, ...], xp: Any) -> Any:
    """Stacked along a new first axis; a view where there is one part."""
    return xp.stack(parts) if len(parts) > 1 else parts[0][None]


def _density_map(S: Any, x0: Any, a: Any, lam: Any, gamma: Any) -> tuple[AffineMap, Any]:
    """Data step on D and its ℓ₁ prox as one map of the unscaled D; and the ℓ₂ prox's threshold."""
    xp = namespace(S)
    tau = ratio(1.0, (S**2).sum((-2, -1)))[..., None]
    threshold = lam * tau * norms(S)
    b = tau * (x0[..., None, :] @ S)[..., 0, :] - gamma * threshold
    if a is None:  # D = 0
        M = -S[..., :0, :]  # no rows, but an array to write to: kernels are compiled for those
    else:
        eye = xp.eye(S.shape[-1], dtype=S.dtype, device=S.device)
        M = a[..., None] * (eye - tau[..., None] * (S.mT @ S))
    return AffineMap(M, -tau[..., None] * S, b), threshold


def _spectra_step(S: Any, x0: Any, sums: Sums, lam: Any, gamma: Any) -> Any:
    """Data step on S, then (·)₊, then its ℓ₂ prox. Where all of D is zero, S stays."""
    square = diagonal(sums.G)
    tau = ratio(1.0, square.sum(-1))[..., None]
    gradient = S @ sums.G + sums.P - x0[..., None] * sums.m[..., None, :]
    S = positive(S - tau[..., None] * gradient)
    shrink = prox_l2(norms(S), lam * tau * (gamma * sums.m + root(square)))
    return S * shrink[..., None, :]


def prox_l2(norm: Any, threshold: Any) -> Any:
    """The factor 1 − min(norm, threshold) / norm, and 0 where the norm is 0."""
    return ratio(positive(norm - threshold), norm)


def _objective(
    states: list[IterationState], weight: Any, mean: Any, spread: Any, lam: Any, gamma: Any
) -> Any:
    """The objective (N, K) from each iteration's S, x₀ and sums alone; not differentiated."""
    xp = namespace(weight)
    each = zip(*((s.S, s.x0, *(s.sums or ())) for s in states), strict=True)
    S, x0, G, P, m = (xp.stack([t if xp is np else t.detach() for t in ts], 1) for ts in each)
    cross = (S * (x0[..., None] * m[..., None, :] - P)).sum((2, 3))
    square = ((S @ G) * S).sum((2, 3))
    offset = ((x0 - mean[:, None]) ** 2).sum(2)
    fit = spread[:, None] + weight[:, None] * offset - 2 * cross + square
    sizes = gamma * m + root(diagonal(G))
    return 0.5 * positive(fit) + lam * (norms(S) * sizes).sum(2)


def scaled(sums: Sums, a: Any) -> Sums:
    """The sums of a ⊙ D from those of D."""
    row, column = a[..., None, :], a[..., None]
    return Sums(column * sums.G * row, sums.P * row, sums.m * a)


def diagonal(G: Any) -> Any:
    """(…, r) of (…, r, r)."""
    return G.diagonal(0, -2, -1)


def norms(S: Any) -> Any:
    """‖sᵢ‖₂, (…, r) of (…, c, r)."""
    return root((S**2).sum(-2))


def positive(x: Any) -> Any:
    """(x)₊, with gradient 0 at 0."""
    return x * (x > 0)


def root(square: Any) -> Any:
    """√, with 0 and gradient 0 at 0."""
    xp = namespace(square)
    above = square > 0
    return xp.where(above, xp.sqrt(xp.where(above, square, 1.0)), 0.0)
