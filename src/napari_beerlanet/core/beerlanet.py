"""Algorithm 1 of the paper, in NumPy or, to be differentiated, in torch.

    minimise  ½‖x₀1ᵀ − X − SDᵀ‖² + λ Σᵢ ‖sᵢ‖₂ (γ‖dᵢ‖₁ + ‖dᵢ‖₂)   over x₀ and S, D ≥ 0

X (c, u) holds u columns of weight w (pixels, or distinct colours with their counts), S (c, r) the
spectra. D is kept transposed, (r, u), and unscaled: the densities are a ⊙ D with a (r,), because
the ℓ₂ prox and the rescaling to unit spectra only scale rows. So one iteration touches the columns
once, in `Columns.step`: an affine map of D and X, a ReLU, and three weighted sums. All the rest is
arithmetic on c × r numbers. Batches have a leading axis N everywhere but in X, w and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from .columns import AffineMap, Columns, Sums, namespace, ratio


@dataclass(frozen=True)
class Unrolled:
    """What K iterations leave of N images; NumPy arrays or torch tensors."""

    background: Any  # (N, c)
    spectra: Any  # (N, c, r)
    scale: Any  # (N, r), of the columns' D
    sums: Sums
    objective: Any  # (N, K), or None where it was not tracked
    maps: list[AffineMap]  # K of them, batched


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
    weight, mean, spread = (_together(t, xp) for t in totals)
    S = xp.broadcast_to(S, (len(images), *S.shape))
    a, sums, maps, states = None, None, [], []
    for _ in range(iterations):
        x0 = mean
        if sums is not None:
            x0 = mean + ratio((S @ sums.m[..., None])[..., 0], weight[:, None])
        affine, shrink = _density_map(S, x0, a, lam, gamma)
        maps.append(affine)
        steps = [
            image.step(AffineMap(*parts)) for image, *parts in zip(images, *affine, strict=True)
        ]
        sums = Sums(*(_together(t, xp) for t in zip(*steps, strict=True)))
        a = _prox_l2(_root(_diagonal(sums.G)), shrink)
        sums = _scaled(sums, a)
        S = _spectra_step(S, x0, sums, lam, gamma)
        if unit_spectra:
            norm = _norms(S)
            S, a, sums = ratio(S, norm[:, None]), a * norm, _scaled(sums, norm)
        states.append((S, x0, *sums) if track else ())
    objective = _objective(states, weight, mean, spread, lam, gamma) if track else None
    assert sums is not None
    return Unrolled(x0, S, a, sums, objective, maps)


def _together(parts: tuple[Any, ...], xp: Any) -> Any:
    """Stacked along a new first axis; a view where there is one part."""
    return xp.stack(parts) if len(parts) > 1 else parts[0][None]


def _density_map(S: Any, x0: Any, a: Any, lam: Any, gamma: Any) -> tuple[AffineMap, Any]:
    """Data step on D and its ℓ₁ prox as one map of the unscaled D; and the ℓ₂ prox's threshold."""
    xp = namespace(S)
    tau = ratio(xp.ones_like(x0[:, :1]), (S**2).sum((1, 2))[:, None])
    penalty = lam * tau * _norms(S)
    b = tau * (x0[:, None] @ S)[:, 0] - gamma * penalty
    if a is None:  # D = 0
        M = S[:, :0]
    else:
        eye = xp.eye(S.shape[2], dtype=S.dtype, device=S.device)
        M = a[:, :, None] * (eye - tau[:, :, None] * (S.mT @ S))
    return AffineMap(M, -tau[:, :, None] * S, b), penalty


def _spectra_step(S: Any, x0: Any, sums: Sums, lam: Any, gamma: Any) -> Any:
    """Data step on S, then (·)₊, then its ℓ₂ prox. Where all of D is zero, S stays."""
    square = _diagonal(sums.G)
    tau = ratio(namespace(S).ones_like(x0[:, :1]), square.sum(1)[:, None])
    gradient = S @ sums.G + sums.P - x0[:, :, None] * sums.m[:, None]
    S = _positive(S - tau[:, :, None] * gradient)
    return S * _prox_l2(_norms(S), lam * tau * (gamma * sums.m + _root(square)))[:, None]


def _prox_l2(norm: Any, threshold: Any) -> Any:
    """The factor 1 − min(norm, threshold) / norm, and 0 where the norm is 0."""
    return ratio(_positive(norm - threshold), norm)


def _objective(
    states: list[tuple[Any, ...]], weight: Any, mean: Any, spread: Any, lam: Any, gamma: Any
) -> Any:
    """The objective (N, K) from each iteration's S, x₀ and sums alone; not differentiated."""
    xp = namespace(weight)
    S, x0, G, P, m = (
        xp.stack([t if xp is np else t.detach() for t in each], 1)
        for each in zip(*states, strict=True)
    )
    cross = (S * (x0[..., None] * m[..., None, :] - P)).sum((2, 3))
    square = ((S @ G) * S).sum((2, 3))
    offset = ((x0 - mean[:, None]) ** 2).sum(2)
    fit = spread[:, None] + weight[:, None] * offset - 2 * cross + square
    norms = gamma * m + _root(_diagonal(G))
    return 0.5 * _positive(fit) + lam * (_norms(S) * norms).sum(2)


def _scaled(sums: Sums, a: Any) -> Sums:
    return Sums(a[:, :, None] * sums.G * a[:, None], sums.P * a[:, None], sums.m * a)


def _diagonal(G: Any) -> Any:
    return G.diagonal(0, -2, -1)


def _norms(S: Any) -> Any:
    return _root((S**2).sum(-2))


def _positive(x: Any) -> Any:
    """(x)₊, with gradient 0 at 0."""
    return x * (x > 0)


def _root(square: Any) -> Any:
    """√, with 0 and gradient 0 at 0."""
    xp = namespace(square)
    positive = square > 0
    return xp.where(positive, xp.sqrt(xp.where(positive, square, 1.0)), 0.0)
