"""Columns as torch tensors, differentiable: what `BeerLaNet` trains through."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from .columns import (
    AffineMap,
    Array,
    Sums,
    Totals,
    column_totals,
    contiguous,
    kernel_step,
    kernel_step_backward,
    ratio,
)

_ROOM = 5  # iterations whose D share one piece of memory


class StoredColumns:
    """Columns in memory: X (c, u), w (u,). Differentiable with respect to maps and X."""

    def __init__(self, X: Tensor, w: Tensor, reference_pixels: float | None = None) -> None:
        self.X = X
        self.w = scale_weights(w, reference_pixels)
        self.D = X.new_zeros((0, X.shape[1]))
        self._room: list[Array] = []

    @classmethod
    def on(
        cls, device: torch.device, X: Array, w: Array, reference_pixels: float | None
    ) -> StoredColumns:
        """Columns of NumPy's arrays on a device."""
        return cls(torch.from_numpy(X).to(device), torch.from_numpy(w).to(device), reference_pixels)

    def like(self, *values: Any) -> tuple[Tensor, ...]:
        """Numbers and arrays as tensors of X's type, where X is."""
        return tuple(torch.as_tensor(v, dtype=self.X.dtype, device=self.X.device) for v in values)

    def totals(self) -> Totals:
        """See `Columns`."""
        if _by_kernels(self.X):
            # Torch would wake all its threads for this little, and wait for them.
            sums = column_totals(_numpy(self.X), _numpy(self.w))
            return Totals(*(torch.as_tensor(t, dtype=torch.float64) for t in sums))
        total = self.w.sum()
        centre = ratio(self.X @ self.w, total)
        return Totals(total, centre, ((self.X - centre[:, None]) ** 2 @ self.w).sum())

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        room = self._next_room(affine.b.shape[0]) if _by_kernels(self.X) else None
        self.D, *sums = density_step(self.X, self.w, self.D, *affine, room)
        return Sums(*sums)

    def _next_room(self, r: int) -> Array:
        """Memory (r, u) for the next D, cut from a larger piece.

        Every D is kept for the gradient, so it is always new memory, and many small pieces of that
        cost the system more time than filling them.
        """
        if not self._room:
            self._room = list(np.empty((_ROOM, r, self.X.shape[1])))
        return self._room.pop()


def scale_weights(w: Tensor, reference_pixels: float | None) -> Tensor:
    """Weights (u,) scaled to a total of `reference_pixels`, or as they are for None."""
    return w if reference_pixels is None else w * ratio(w.new_tensor(reference_pixels), w.sum())


def density_step(
    X: Tensor, w: Tensor, D: Tensor, M: Tensor, N: Tensor, b: Tensor, room: Array | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """max(0, Mᵀ D + Nᵀ X + b) and its sums G, P, m: by kernels on the CPU, by torch elsewhere."""
    if _by_kernels(X):
        return _KernelStep.apply(X, w, D, M, N, b, room)  # type: ignore[no-any-return]
    return plain_density_step(X, w, D, M, N, b)


def _by_kernels(X: Tensor) -> bool:
    return X.device.type == "cpu" and X.dtype == torch.float64 and not X.requires_grad


def plain_density_step(
    X: Tensor, w: Tensor, D: Tensor, M: Tensor, N: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """`density_step` in torch operations, on any device, differentiable in everything."""
    out = torch.relu(M.T @ D + N.T @ X + b[:, None])
    weighted = out * w
    return out, weighted @ out.T, X @ weighted.T, weighted.sum(1)


class _KernelStep(torch.autograd.Function):
    """`density_step` by kernels, with its gradient written out: it stores D and nothing else."""

    @staticmethod
    def forward(
        ctx: Any,
        X: Tensor,
        w: Tensor,
        D: Tensor,
        M: Tensor,
        N: Tensor,
        b: Tensor,
        room: Array | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        columns = (_numpy(X), _numpy(w), _numpy(D))
        out, sums = kernel_step(*columns, _numpy(M), _numpy(N), _numpy(b), room)
        result = torch.from_numpy(out)
        ctx.save_for_backward(X, w, D, M, result)
        G, P, m = (torch.from_numpy(s) for s in sums)
        return result, G, P, m

    @staticmethod
    def backward(
        ctx: Any, g_out: Tensor, gG: Tensor, gP: Tensor, gm: Tensor
    ) -> tuple[Tensor | None, ...]:
        refuse_second_derivative(g_out, gG, gP, gm)
        X, w, D, M, out = (_numpy(t) for t in ctx.saved_tensors)
        given = (g_out, gG + gG.T, gP, gm)
        grads = kernel_step_backward(X, w, D, M, out, *(_numpy(t) for t in given))
        return None, None, *(torch.from_numpy(g) for g in grads), None


def refuse_second_derivative(*gradients: Tensor) -> None:
    """Kernels know first derivatives only; going on would leave the second out without a word."""
    if torch.is_grad_enabled() and any(g.requires_grad for g in gradients):
        raise RuntimeError("BeerLaNet on the CPU has first derivatives only.")


def _numpy(tensor: Tensor) -> Any:
    return contiguous(tensor.detach().numpy())
