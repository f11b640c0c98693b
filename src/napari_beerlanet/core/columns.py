"""One image as weighted columns, and the only step of Algorithm 1 that touches them all.

X (c, u) float64 holds u columns of weight w (u,): pixels, or distinct colours with their counts.
D (r, u) belongs to them and is kept unscaled: what the solver does besides `density_step` only
scales rows of D, and the solver keeps those scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from . import kernels
from .threads import run_all, slices

Array = npt.NDArray[np.float64]
_CHUNK = 1 << 14  # columns per task: fixed, so that sums do not depend on the number of threads


class AffineMap(NamedTuple):
    """One gradient step on D with its ℓ₁ prox: D ← max(0, Mᵀ D + Nᵀ X + b)."""

    M: Tensor  # (q, r), q = 0 while D is zero
    N: Tensor  # (c, r)
    b: Tensor  # (r,)


class Sums(NamedTuple):
    """What an iteration needs to know of all columns."""

    G: Tensor  # (r, r) D W Dᵀ
    P: Tensor  # (c, r) X W Dᵀ
    m: Tensor  # (r,)   D w


class Totals(NamedTuple):
    """What the solver needs to know of X: weight, mean, and spread about the mean."""

    weight: Tensor  # ()
    mean: Tensor  # (c,)
    spread: Tensor  # () Σ w ‖x − mean‖²


class Columns(Protocol):
    """One image as weighted columns, holding the unscaled D that belongs to them."""

    def totals(self) -> Totals:
        """Sums of X."""
        ...

    def step(self, affine: AffineMap) -> Sums:
        """Replace D by its image under the map, and return D's sums."""
        ...


class StoredColumns:
    """Columns in memory: X (c, u), w (u,). Differentiable with respect to maps and X."""

    def __init__(self, X: Tensor, w: Tensor, reference_pixels: float | None = None) -> None:
        self.X = X
        self.w = scale_weights(w, reference_pixels)
        self.D = X.new_zeros((0, X.shape[1]))

    def totals(self) -> Totals:
        """See `Columns`."""
        if _by_kernels(self.X):
            # Torch would wake all its threads for this little, and wait for them.
            X, w = _numpy(self.X), _numpy(self.w)
            weight = w.sum()
            mean = (X * w).sum(1) / weight if weight > 0 else np.zeros(len(X))
            spread = ((X - mean[:, None]) ** 2 * w).sum()
            return Totals(
                *(torch.as_tensor(t, dtype=torch.float64) for t in (weight, mean, spread))
            )
        total = self.w.sum()
        centre = ratio(self.X @ self.w, total)
        return Totals(total, centre, ((self.X - centre[:, None]) ** 2 @ self.w).sum())

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self.D, *sums = density_step(self.X, self.w, self.D, *affine)
        return Sums(*sums)


class StreamedColumns:
    """Columns that are read anew, block by block, in each iteration; D is recomputed on the way.

    Memory is bounded by a block whatever the image's size; time grows with K² / 2.
    """

    def __init__(self, blocks: Callable[[], Iterator[tuple[Array, Array]]], scale: float) -> None:
        self._blocks = blocks
        self._scale = scale
        self._maps: list[tuple[Array, Array, Array]] = []

    def totals(self) -> Totals:
        """See `Columns`."""
        weight = sum(w.sum() for _, w in self._blocks())
        mean = sum(X @ w for X, w in self._blocks()) / weight
        spread = sum(((X - mean[:, None]) ** 2 @ w).sum() for X, w in self._blocks())
        weight, spread = weight * self._scale, spread * self._scale
        return Totals(*(torch.as_tensor(t, dtype=torch.float64) for t in (weight, mean, spread)))

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self._maps.append(tuple(_numpy(t) for t in affine))  # type: ignore[arg-type]
        total: list[Any] = [0.0, 0.0, 0.0]
        for X, w in self._blocks():
            _, sums = apply_maps(X, w * self._scale, self._maps)
            total = [t + s for t, s in zip(total, sums, strict=True)]
        return Sums(*(torch.from_numpy(t) for t in total))


def apply_maps(
    X: Array, w: Array, maps: list[tuple[Array, Array, Array]]
) -> tuple[Array, tuple[Array, Array, Array]]:
    """D (r, u), unscaled, after a chain of maps (M, N, b) from D = 0, and its last sums."""
    D: Array = np.empty((0, X.shape[1]))
    for M, N, b in maps:
        D, sums = kernel_step(X, w, D, M, N, b)
    return D, sums


@dataclass(frozen=True)
class MapChain:
    """Densities of any columns after K iterations: their maps in turn, then D's scales (r,)."""

    maps: list[tuple[Array, Array, Array]]
    scale: Array

    def __call__(self, X: Array) -> Array:
        """D (r, n) of columns X (c, n)."""
        D, _ = apply_maps(X, np.zeros(X.shape[1]), self.maps)
        D *= self.scale[:, None]
        return D


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, with 0 and gradient 0 where b is 0."""
    positive = b > 0
    return torch.where(positive, a / torch.where(positive, b, 1.0), 0.0)


def scale_weights(w: Tensor, reference_pixels: float | None) -> Tensor:
    """Weights (u,) scaled to a total of `reference_pixels`, or as they are for None."""
    return w if reference_pixels is None else w * ratio(w.new_tensor(reference_pixels), w.sum())


def density_step(
    X: Tensor, w: Tensor, D: Tensor, M: Tensor, N: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """max(0, Mᵀ D + Nᵀ X + b) and its sums G, P, m: by kernels on the CPU, by torch elsewhere."""
    if _by_kernels(X):
        return _KernelStep.apply(X, w, D, M, N, b)  # type: ignore[no-any-return]
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
        ctx: Any, X: Tensor, w: Tensor, D: Tensor, M: Tensor, N: Tensor, b: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        out, sums = kernel_step(*(_numpy(t) for t in (X, w, D, M, N, b)))
        result = torch.from_numpy(out)
        ctx.save_for_backward(X, w, D, M, result)
        G, P, m = (torch.from_numpy(s) for s in sums)
        return result, G, P, m

    @staticmethod
    def backward(
        ctx: Any, g_out: Tensor, gG: Tensor, gP: Tensor, gm: Tensor
    ) -> tuple[Tensor | None, ...]:
        X, w, D, M, out = (_numpy(t) for t in ctx.saved_tensors)
        given = (g_out, gG + gG.T, gP, gm)
        grads = _kernel_step_backward(X, w, D, M, out, *(_numpy(t) for t in given))
        return None, None, *(torch.from_numpy(g) for g in grads)


def kernel_step(
    X: Array, w: Array, D: Array, M: Array, N: Array, b: Array
) -> tuple[Array, tuple[Array, Array, Array]]:
    """`density_step` on float64 arrays: out (r, u) and (G, P, m)."""
    (c, u), r = X.shape, M.shape[1]
    out, sums = np.empty((r, u)), (_zeros(u, r, r), _zeros(u, c, r), _zeros(u, r))

    def work(k: int, part: slice) -> None:
        mine = (s[k] for s in sums)
        kernels.density_step(X, w, D, M, N, b, out, *mine, part.start, part.stop)

    _in_chunks(work, u)
    lower, P, m = (s.sum(0) for s in sums)
    return out, (lower + np.tril(lower, -1).T, P, m)


def _kernel_step_backward(
    X: Array,
    w: Array,
    D: Array,
    M: Array,
    out: Array,
    g_out: Array,
    gG: Array,
    gP: Array,
    gm: Array,
) -> tuple[Array, Array, Array, Array]:
    (c, u), (q, r) = X.shape, M.shape
    g_D, sums = np.empty((q, u)), (_zeros(u, q, r), _zeros(u, c, r), _zeros(u, r))
    given = (X, w, D, M, out, g_out, gG, gP, gm)

    def work(k: int, part: slice) -> None:
        mine = (s[k] for s in sums)
        kernels.density_step_backward(*given, g_D, *mine, part.start, part.stop)

    _in_chunks(work, u)
    gM, gN, gb = (s.sum(0) for s in sums)
    return g_D, gM, gN, gb


def _zeros(u: int, *shape: int) -> Array:
    return np.zeros((len(slices(u, _CHUNK)), *shape))


def _in_chunks(work: Callable[[int, slice], None], u: int) -> None:
    run_all([lambda k=k, part=part: work(k, part) for k, part in enumerate(slices(u, _CHUNK))])  # type: ignore[misc]


def _numpy(tensor: Tensor) -> Array:
    return np.ascontiguousarray(tensor.detach().numpy(), dtype=np.float64)
