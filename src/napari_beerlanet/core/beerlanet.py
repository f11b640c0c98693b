"""Algorithm 1 of the paper, and BeerLaNet as a torch module.

    minimise  ½‖x₀1ᵀ − X − SDᵀ‖² + λ Σᵢ ‖sᵢ‖₂ (γ‖dᵢ‖₁ + ‖dᵢ‖₂)   over x₀ and S, D ≥ 0

X (c, u) holds u columns of weight w (pixels, or distinct colours with their counts), S (c, r) the
spectra. D is kept transposed, (r, u), and unscaled: the densities are a ⊙ D with a (r,), because
the ℓ₂ prox and the rescaling to unit spectra only scale rows. So one iteration touches the columns
once, in `density_step`: an affine map of D and X, a ReLU, and three weighted sums. All the rest is
arithmetic on c × r numbers. Batches have a leading axis N everywhere but in X, w and D.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from .columns import AffineMap, Columns, Sums, ratio


@dataclass
class Unrolled:
    """What K iterations leave: per image x₀ (N, c), S (N, c, r), the scales a (N, r) of D."""

    background: Tensor
    spectra: Tensor
    scale: Tensor
    sums: Sums
    objective: Tensor  # (N, K), or (N, 0) where it was not tracked
    maps: list[AffineMap] = field(default_factory=list)  # K of them, batched


def unroll(
    images: Sequence[Columns],
    S: Tensor,
    lam: Tensor,
    gamma: Tensor,
    *,
    iterations: int,
    unit_spectra: bool,
    track: bool = False,
) -> Unrolled:
    """Algorithm 1 on a batch of images, all started from S (c, r). D stays with the columns.

    `track` computes the objective after each iteration.
    """
    c, r = S.shape
    weight, mean, spread = (torch.stack(t) for t in zip(*(i.totals() for i in images), strict=True))
    S = S.expand(len(images), c, r)
    a, m, maps, objective = None, S.new_zeros((len(images), r)), [], []
    for _ in range(iterations):
        x0 = mean + ratio((S @ m[..., None])[..., 0], weight[:, None])
        affine, shrink = _density_map(S, x0, a, lam, gamma)
        maps.append(affine)
        steps = [
            image.step(AffineMap(*parts)) for image, *parts in zip(images, *affine, strict=True)
        ]
        sums = Sums(*(torch.stack(t) for t in zip(*steps, strict=True)))
        a = _prox_l2(_root(_diagonal(sums.G)), shrink)
        sums = _scaled(sums, a)
        S = _spectra_step(S, x0, sums, lam, gamma)
        if unit_spectra:
            norm = _norms(S)
            S, a, sums = ratio(S, norm[:, None]), a * norm, _scaled(sums, norm)
        m = sums.m
        if track:
            objective.append(_objective(S, x0, sums, weight, mean, spread, lam, gamma))
    assert a is not None
    values = torch.stack(objective, 1) if track else S.new_empty((len(images), 0))
    return Unrolled(x0, S, a, sums, values, maps)


def _density_map(
    S: Tensor, x0: Tensor, a: Tensor | None, lam: Tensor, gamma: Tensor
) -> tuple[AffineMap, Tensor]:
    """Data step on D and its ℓ₁ prox as one map of the unscaled D; and the ℓ₂ prox's threshold."""
    r = S.shape[-1]
    tau = ratio(torch.ones_like(x0[:, 0]), (S**2).sum((1, 2)))[:, None]
    penalty = lam * tau * _norms(S)
    b = tau * (x0[:, None] @ S)[:, 0] - gamma * penalty
    if a is None:  # D = 0
        M = S.new_zeros((len(S), 0, r))
    else:
        eye = torch.eye(r, dtype=S.dtype, device=S.device)
        M = a[:, :, None] * (eye - tau[:, :, None] * (S.mT @ S))
    return AffineMap(M, -tau[:, :, None] * S, b), penalty


def _spectra_step(S: Tensor, x0: Tensor, sums: Sums, lam: Tensor, gamma: Tensor) -> Tensor:
    """Data step on S, then (·)₊, then its ℓ₂ prox. Where all of D is zero, S stays."""
    square = _diagonal(sums.G)
    tau = ratio(torch.ones_like(x0[:, 0]), square.sum(1))[:, None]
    gradient = S @ sums.G + sums.P - x0[:, :, None] * sums.m[:, None]
    S = torch.relu(S - tau[:, :, None] * gradient)
    return S * _prox_l2(_norms(S), lam * tau * (gamma * sums.m + _root(square)))[:, None]


def _prox_l2(norm: Tensor, threshold: Tensor) -> Tensor:
    """The factor 1 − min(norm, threshold) / norm, and 0 where the norm is 0."""
    return ratio(torch.relu(norm - threshold), norm)


def _objective(
    S: Tensor,
    x0: Tensor,
    sums: Sums,
    weight: Tensor,
    mean: Tensor,
    spread: Tensor,
    lam: Tensor,
    gamma: Tensor,
) -> Tensor:
    """The objective (N,) from sums alone; not differentiated."""
    with torch.no_grad():
        cross = (S * (x0[:, :, None] * sums.m[:, None] - sums.P)).sum((1, 2))
        square = ((S @ sums.G) * S).sum((1, 2))
        fit = spread + weight * ((x0 - mean) ** 2).sum(1) - 2 * cross + square
        norms = gamma * sums.m + _root(_diagonal(sums.G))
        return 0.5 * fit.clamp_min(0) + lam * (_norms(S) * norms).sum(1)


def _scaled(sums: Sums, a: Tensor) -> Sums:
    return Sums(a[:, :, None] * sums.G * a[:, None], sums.P * a[:, None], sums.m * a)


def _diagonal(G: Tensor) -> Tensor:
    return G.diagonal(dim1=-2, dim2=-1)


def _norms(S: Tensor) -> Tensor:
    return _root((S**2).sum(-2))


def _root(square: Tensor) -> Tensor:
    """√, with 0 and gradient 0 at 0."""
    positive = square > 0
    return torch.where(positive, torch.where(positive, square, 1.0).sqrt(), 0.0)
