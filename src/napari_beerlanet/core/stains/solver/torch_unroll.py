"""Algorithm 1 in torch: by kernels where they apply, with their own way back; else by operations.

Operations are for accelerators, for export, for gradients of the image, and for tests to compare
with. Automatic differentiation through them takes ten times as long as `unroll_backward`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from napari_beerlanet.core.common.threads import run_parallel, thread_count
from napari_beerlanet.core.stains.solver.unroll import (
    Array,
    Tape,
    Unrolled,
    contiguous,
    unroll,
    unroll_backward,
)

Columns = tuple[Tensor, Tensor]
"""An image: X (c, u) and w (u,)."""


class TensorUnrolled(NamedTuple):
    """What K iterations leave of N images."""

    D: Sequence[Tensor]  # (r, u) of each image, unscaled
    scale: Tensor  # (N, r), of D
    background: Tensor  # (N, c)
    spectra: Tensor  # (N, c, r)


def unroll_tensors(
    images: Sequence[Columns],
    S: Tensor,
    lam: Tensor,
    gamma: Tensor,
    *,
    iterations: int,
    unit_spectra: bool,
) -> TensorUnrolled:
    """`unroll` of images, all from S (c, r): by kernels where they apply, else by operations.

    Results are differentiable in S, λ and γ, by operations in X, too.
    """
    settings: Any = {"iterations": iterations, "unit_spectra": unit_spectra}
    if not all(kernels_apply(X) for X, _ in images):
        return unroll_by_operations(images, S, lam, gamma, **settings)[0]
    given = S.double(), lam.double(), gamma.double()
    start = contiguous(S.detach()), float(lam.detach()), float(gamma.detach())
    record = torch.is_grad_enabled() and any(t.requires_grad for t in given)

    def solve(image: Columns) -> tuple[Tape, Unrolled]:
        X, w = contiguous(image[0]), contiguous(image[1])
        tape = Tape(X, w, *start[1:], unit_spectra)
        return tape, unroll(X, w, *start, **settings, tape=tape if record else None)

    tapes, done = zip(*for_each_image(solve, images), strict=True)
    names = ("scale", "background", "spectra")
    ends = [torch.from_numpy(np.stack([getattr(d, name) for d in done])) for name in names]
    D = [torch.from_numpy(d.D) for d in done]
    if record:
        *D, scale, background, spectra = _UnrollFunction.apply(tapes, ends, *given)
        return TensorUnrolled(D, scale, background, spectra)
    return TensorUnrolled(D, *ends)


def unroll_on(
    device: torch.device,
    X: Array,
    w: Array,
    S: Array,
    lam: float,
    gamma: float,
    *,
    iterations: int,
    unit_spectra: bool,
) -> Unrolled:
    """`unroll` by operations on a device: NumPy's arrays in, NumPy's arrays out."""
    given = (torch.as_tensor(t, dtype=torch.float64, device=device) for t in (X, w, S, lam, gamma))
    columns, weights, start, *penalties = given
    settings: Any = {"iterations": iterations, "unit_spectra": unit_spectra}
    done, steps = unroll_by_operations([(columns, weights)], start, *penalties, **settings)
    background, spectra, D, scale, mass = (
        t.detach().cpu().numpy()
        for t in (done.background[0], done.spectra[0], done.D[0], done.scale[0], steps[-1].m[0])
    )
    values = torch.stack([_objective(columns, weights, step, *penalties) for step in steps])
    maps: list[Any] = [tuple(t[0].cpu().numpy() for t in step.map) for step in steps]
    return Unrolled(background, spectra, D, scale, mass, values.cpu().numpy(), maps)


def kernels_apply(X: Tensor) -> bool:
    """Whether the kernels may solve for columns X: on the CPU, in float64, without a gradient."""
    plain = X.device.type == "cpu" and X.dtype == torch.float64
    return plain and not X.requires_grad and not is_tracing()


def is_tracing() -> bool:
    """Whether torch records operations to export them: what NumPy computes would be constants."""
    tracing: Any = torch.jit  # its functions have no types
    return bool(tracing.is_tracing() or torch.compiler.is_compiling())


def for_each_image(
    work: Callable[[Any], Any], images: Sequence[Any], side_by_side: bool = True
) -> list[Any]:
    """Images side by side where they occupy all threads; one after the other shares them out."""
    if not side_by_side or len(images) < thread_count():
        return [work(image) for image in images]
    return run_parallel([partial(work, image) for image in images])


class _UnrollFunction(torch.autograd.Function):
    """Puts what `unroll` solved for on torch's record, with the gradient of `unroll_backward`."""

    @staticmethod
    def forward(
        ctx: Any, tapes: Sequence[Tape], ends: list[Tensor], S: Tensor, lam: Tensor, gamma: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tapes = tapes
        ctx.set_materialize_grads(False)
        # Torch frees what it saves as soon as it can; the tapes keep the rest.
        stored = [[torch.from_numpy(D) for D in tape.stored] for tape in tapes]
        for tape in tapes:
            tape.stored.clear()
        ctx.save_for_backward(*(D for each in stored for D in each))
        return (*(each[-1] for each in stored), *ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative(*(g for g in gradients if g is not None))
        tapes: Sequence[Tape] = ctx.tapes
        n, saved = len(tapes), [t.detach().numpy() for t in ctx.saved_tensors]

        def pull(k: int) -> tuple[Array, float, float]:
            stored = saved[k * len(saved) // n : (k + 1) * len(saved) // n]
            g_D, *g_ends = (gradients[k], *((g if g is None else g[k]) for g in gradients[n:]))
            last = tapes[k].steps[-1]
            like = stored[-1], last.a, last.x0, last.S
            given = (
                np.zeros_like(x) if g is None else contiguous(g.detach())
                for g, x in zip((g_D, *g_ends), like, strict=True)
            )
            return unroll_backward(tapes[k], stored, *given)

        per_image = zip(*for_each_image(pull, range(n)), strict=True)
        return None, None, *(torch.as_tensor(np.sum(t, 0)) for t in per_image)


def refuse_second_derivative(*gradients: Tensor) -> None:
    """Kernels know first derivatives only; going on would leave the second out without a word."""
    if torch.is_grad_enabled() and any(g.requires_grad for g in gradients):
        raise RuntimeError("BeerLaNet on the CPU has first derivatives only.")


class _OperationStep(NamedTuple):
    """What an iteration leaves, with a leading axis N: S, x₀, the sums of the scaled D, its map."""

    S: Tensor
    x0: Tensor
    G: Tensor
    P: Tensor
    m: Tensor
    map: tuple[Tensor, Tensor, Tensor]


def unroll_by_operations(
    images: Sequence[Columns],
    S: Tensor,
    lam: Tensor,
    gamma: Tensor,
    *,
    iterations: int,
    unit_spectra: bool,
) -> tuple[TensorUnrolled, list[_OperationStep]]:
    """Algorithm 1 in torch's operations on a batch of images, and each of its iterations."""
    weight = torch.stack([w.sum() for _, w in images])
    mean = torch.stack([ratio(X @ w, w.sum()) for X, w in images])
    D = [X.new_zeros((0, X.shape[1])) for X, _ in images]
    S, a, m, steps = S.expand(len(images), *S.shape), None, None, []
    for _ in range(iterations):
        x0 = mean
        if m is not None:
            x0 = mean + ratio((S @ m[..., None])[..., 0], weight[:, None])
        M, N, b, threshold = _plan(S, x0, a, lam, gamma)
        parts = [
            density_step(*image, *given) for image, *given in zip(images, D, M, N, b, strict=True)
        ]
        D, *sums = ([*t] for t in zip(*parts, strict=True))
        G, P, m = (torch.stack(t) for t in sums)
        a = _prox_l2(root(diagonal(G)), threshold)
        G, P, m = _scale_sums(G, P, m, a)
        S = _spectra_step(S, x0, G, P, m, lam, gamma)
        if unit_spectra:
            norm = norms(S)
            S, a = ratio(S, norm[:, None]), a * norm
            G, P, m = _scale_sums(G, P, m, norm)
        steps.append(_OperationStep(S, x0, G, P, m, (M, N, b)))
    assert a is not None
    return TensorUnrolled(D, a, x0, S), steps


def density_step(
    X: Tensor, w: Tensor, D: Tensor, M: Tensor, N: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """max(0, Mᵀ D + Nᵀ X + b) and its sums G, P, m."""
    out = torch.relu(M.T @ D + N.T @ X + b[:, None])
    weighted = out * w
    return out, weighted @ out.T, X @ weighted.T, weighted.sum(1)


def _plan(
    S: Tensor, x0: Tensor, a: Tensor | None, lam: Tensor, gamma: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `step_kernels.plan`: the map M, N, b, and the ℓ₂ prox's threshold."""
    tau = ratio(torch.ones_like(lam), (S**2).sum((-2, -1)))[..., None]
    threshold = lam * tau * norms(S)
    b = tau * (x0[..., None, :] @ S)[..., 0, :] - gamma * threshold
    if a is None:  # D = 0
        M = S[..., :0, :]
    else:
        eye = torch.eye(S.shape[-1], dtype=S.dtype, device=S.device)
        M = a[..., None] * (eye - tau[..., None] * (S.mT @ S))
    return M, -tau[..., None] * S, b, threshold


def _spectra_step(
    S: Tensor, x0: Tensor, G: Tensor, P: Tensor, m: Tensor, lam: Tensor, gamma: Tensor
) -> Tensor:
    """Data step on S, then (·)₊, then its ℓ₂ prox. Where all of D is zero, S stays."""
    square = diagonal(G)
    tau = ratio(torch.ones_like(lam), square.sum(-1))[..., None]
    gradient = S @ G + P - x0[..., None] * m[..., None, :]
    S = positive(S - tau[..., None] * gradient)
    shrink = _prox_l2(norms(S), lam * tau * (gamma * m + root(square)))
    return S * shrink[..., None, :]


def _objective(X: Tensor, w: Tensor, step: _OperationStep, lam: Tensor, gamma: Tensor) -> Tensor:
    """The objective after a step on one image, from its sums alone."""
    S, x0, G, P, m = (t[0] for t in step[:5])
    fit = ((x0[:, None] - X) ** 2 @ w).sum() + (S * (S @ G - 2 * (x0[:, None] * m - P))).sum()
    return 0.5 * positive(fit) + lam * (norms(S) * (gamma * m + root(diagonal(G)))).sum()


def _scale_sums(G: Tensor, P: Tensor, m: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The sums of a ⊙ D from those of D."""
    row, column = a[..., None, :], a[..., None]
    return column * G * row, P * row, m * a


def _prox_l2(norm: Tensor, threshold: Tensor) -> Tensor:
    """The factor 1 − min(norm, threshold) / norm, and 0 where the norm is 0."""
    return ratio(positive(norm - threshold), norm)


def diagonal(G: Tensor) -> Tensor:
    """(…, r) of (…, r, r)."""
    return G.diagonal(0, -2, -1)


def norms(S: Tensor) -> Tensor:
    """‖sᵢ‖₂, (…, r) of (…, c, r)."""
    return root((S**2).sum(-2))


def positive(x: Tensor) -> Tensor:
    """(x)₊, with gradient 0 at 0."""
    return x * (x > 0)


def root(square: Tensor) -> Tensor:
    """√, with 0 and gradient 0 at 0."""
    above = square > 0
    return torch.where(above, torch.sqrt(torch.where(above, square, 1.0)), 0.0)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, with 0 and gradient 0 where b is 0."""
    above = b > 0
    return torch.where(above, a / torch.where(above, b, 1.0), 0.0)
