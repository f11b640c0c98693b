"""Columns as torch tensors, and Algorithm 1 on them: what `BeerLaNet` trains through."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .adjoint import Learned, RecordedColumns, Tape
from .beerlanet import State, Unrolled, unroll
from .columns import AffineMap, Array, ArrayColumns, Sums, Totals, contiguous, ratio
from .threads import run_all, thread_count


class StoredColumns:
    """Columns in memory: X (c, u), w (u,). Differentiable with respect to maps and X."""

    def __init__(self, X: Tensor, w: Tensor, reference_pixels: float | None = None) -> None:
        self.X = X
        self.w = scale_weights(w, reference_pixels)
        self.D = X.new_zeros((0, X.shape[1]))

    @classmethod
    def on(
        cls, device: torch.device, X: Array, w: Array, reference_pixels: float | None
    ) -> StoredColumns:
        """Columns of NumPy's arrays on a device."""
        return cls(torch.from_numpy(X).to(device), torch.from_numpy(w).to(device), reference_pixels)

    def like(self, *values: Any) -> tuple[Tensor, ...]:
        """Numbers and arrays as tensors of X's type, where X is."""
        return tuple(torch.as_tensor(v, dtype=self.X.dtype, device=self.X.device) for v in values)

    @property
    def by_kernels(self) -> bool:
        """Whether NumPy and the kernels may solve for them: on the CPU, X without a gradient."""
        x = self.X
        plain = x.device.type == "cpu" and x.dtype == torch.float64
        return plain and not x.requires_grad and not is_recorded()

    def totals(self) -> Totals:
        """See `Columns`."""
        total = self.w.sum()
        centre = ratio(self.X @ self.w, total)
        return Totals(total, centre, ((self.X - centre[:, None]) ** 2 @ self.w).sum())

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self.D, *sums = density_step(self.X, self.w, self.D, *affine)
        return Sums(*sums)


def scale_weights(w: Tensor, reference_pixels: float | None) -> Tensor:
    """Weights (u,) scaled to a total of `reference_pixels`, or as they are for None."""
    return w if reference_pixels is None else w * ratio(w.new_tensor(reference_pixels), w.sum())


def density_step(
    X: Tensor, w: Tensor, D: Tensor, M: Tensor, N: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """max(0, Mᵀ D + Nᵀ X + b) and its sums G, P, m, in torch operations."""
    out = torch.relu(M.T @ D + N.T @ X + b[:, None])
    weighted = out * w
    return out, weighted @ out.T, X @ weighted.T, weighted.sum(1)


def is_recorded() -> bool:
    """Whether torch records operations to export them: what NumPy computes would be constants."""
    tracing: Any = torch.jit  # its functions have no types
    return bool(tracing.is_tracing() or torch.compiler.is_compiling())


def unroll_tensors(
    images: Sequence[StoredColumns],
    S: Tensor,
    lam: Tensor,
    gamma: Tensor,
    *,
    iterations: int,
    unit_spectra: bool,
    track: bool = False,
) -> Unrolled:
    """`unroll` on tensors: by kernels where they apply, by torch's operations elsewhere.

    The columns' D and the result's scale, background and spectra are differentiable in S, λ and γ
    (by torch's operations, all results are, and in X, too).
    """
    settings: Any = {"iterations": iterations, "unit_spectra": unit_spectra, "track": track}
    if not all(image.by_kernels for image in images):
        return unroll(images, S, lam, gamma, **settings)
    given = tuple(t.double() for t in (S, lam, gamma))
    learned = Learned(*(contiguous(t.detach()) for t in given))
    record = torch.is_grad_enabled() and any(t.requires_grad for t in given)

    def solve(image: StoredColumns) -> tuple[ArrayColumns, Unrolled]:
        X, w = contiguous(image.X), contiguous(image.w)
        columns = RecordedColumns(X, w, iterations) if record else ArrayColumns(X, w)
        return columns, unroll([columns], *learned, **settings)

    columns, done = zip(*_for_each(solve, images), strict=True)
    found = [(d.scale, d.background, d.spectra) for d in done]
    scale, background, spectra = (_joined(t) for t in zip(*found, strict=True))
    D = [torch.from_numpy(c.D) for c in columns]
    if record:
        tapes = [_tape(*pair, learned, unit_spectra) for pair in zip(columns, done, strict=True)]
        kept, ends = [c.kept for c in columns], (scale, background, spectra)
        *D, scale, background, spectra = _Solved.apply(tapes, kept, ends, *given)
    for image, densities in zip(images, D, strict=True):
        image.D = densities
    sums = Sums(*(_joined(t) for t in zip(*(d.sums for d in done), strict=True)))
    maps = [
        AffineMap(*(_joined(t) for t in zip(*step, strict=True)))
        for step in zip(*(d.maps for d in done), strict=True)
    ]
    objective = _joined([d.objective for d in done]) if track else None
    return Unrolled(background, spectra, scale, sums, objective, maps)


def _for_each(work: Callable[[Any], Any], images: Sequence[Any]) -> list[Any]:
    """Images side by side where they occupy all threads; one after the other shares them out."""
    if len(images) < thread_count():
        return [work(image) for image in images]
    return run_all([lambda image=image: work(image) for image in images])  # type: ignore[misc]


def _joined(parts: Sequence[Array]) -> Tensor:
    """Batches of one image each as one batch."""
    return torch.from_numpy(np.concatenate(parts))


def _tape(columns: RecordedColumns, done: Unrolled, learned: Learned, unit_spectra: bool) -> Tape:
    """What the gradient needs of one image's iterations, without the batch's axis."""
    maps = [AffineMap(*(contiguous(t[0]) for t in affine)) for affine in done.maps]
    states = [
        State(s.S[0], s.x0[0], s.a[0], Sums(*(t[0] for t in s.sums or ()))) for s in done.states[1:]
    ]
    start = State(learned.S, done.states[0].x0[0], None, None)
    return Tape(columns.X, columns.w, learned, unit_spectra, [start, *states], maps, columns.sums)


class _Solved(torch.autograd.Function):
    """Puts what NumPy solved for on torch's record, with the gradient that `Tape` has for it."""

    @staticmethod
    def forward(
        ctx: Any,
        tapes: list[Tape],
        kept: list[list[Array]],
        ends: tuple[Tensor, ...],
        S: Tensor,
        lam: Tensor,
        gamma: Tensor,
    ) -> tuple[Tensor, ...]:
        stored = [[torch.from_numpy(D) for D in each] for each in kept]
        ctx.tapes = tapes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(D for each in stored for D in each))
        return (*(each[-1] for each in stored), *ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative(*(g for g in gradients if g is not None))
        tapes: list[Tape] = ctx.tapes
        n, saved = len(tapes), [t.detach().numpy() for t in ctx.saved_tensors]
        kept = [saved[k * len(saved) // n : (k + 1) * len(saved) // n] for k in range(n)]

        def pull(k: int) -> Learned:
            g_D, *ends = (gradients[k], *((g if g is None else g[k]) for g in gradients[n:]))
            start = tapes[k].states[-1]
            like = kept[k][-1], start.a, start.x0, start.S
            given = (
                np.zeros_like(x) if g is None else contiguous(g.detach())
                for g, x in zip((g_D, *ends), like, strict=True)
            )
            return tapes[k].backward(kept[k], *given)

        found = _for_each(pull, range(n))
        total = (torch.as_tensor(np.sum(t, 0)) for t in zip(*found, strict=True))
        return None, None, None, *total


def refuse_second_derivative(*gradients: Tensor) -> None:
    """Kernels know first derivatives only; going on would leave the second out without a word."""
    if torch.is_grad_enabled() and any(g.requires_grad for g in gradients):
        raise RuntimeError("BeerLaNet on the CPU has first derivatives only.")
