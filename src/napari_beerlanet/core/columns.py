"""One image as weighted columns, and the only step of Algorithm 1 that touches them all.

X (c, u) float64 holds u columns of weight w (u,): pixels, or distinct colours with their counts.
D (r, u) belongs to them and is kept unscaled: what the solver does besides its step on D only
scales rows of D, and the solver keeps those scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from . import kernels
from .threads import run_all, slices

Array = npt.NDArray[np.float64]
_CHUNK = 1 << 14  # columns per task: fixed, so that sums do not depend on the number of threads


class AffineMap(NamedTuple):
    """One gradient step on D with its ℓ₁ prox: D ← max(0, Mᵀ D + Nᵀ X + b)."""

    M: Any  # (q, r), q = 0 while D is zero
    N: Any  # (c, r)
    b: Any  # (r,)


class Sums(NamedTuple):
    """What an iteration needs to know of all columns."""

    G: Any  # (r, r) D W Dᵀ
    P: Any  # (c, r) X W Dᵀ
    m: Any  # (r,)   D w


class Totals(NamedTuple):
    """What the solver needs to know of X: weight, mean, and spread about the mean."""

    weight: Any  # ()
    mean: Any  # (c,)
    spread: Any  # () Σ w ‖x − mean‖²


class Columns(Protocol):
    """One image as weighted columns, holding the unscaled D that belongs to them."""

    def totals(self) -> Totals:
        """Sums of X."""
        ...

    def step(self, affine: AffineMap) -> Sums:
        """Replace D by its image under the map, and return D's sums."""
        ...


class ArrayColumns:
    """Columns in memory: X (c, u), w (u,), scaled to a total of `reference_pixels` if given."""

    def __init__(self, X: Array, w: Array, reference_pixels: float | None = None) -> None:
        self.X = contiguous(X)
        self.w = contiguous(w)
        if reference_pixels is not None and w.sum() > 0:
            self.w = w * (reference_pixels / w.sum())
        self.D: Array = np.empty((0, X.shape[1]))

    def totals(self) -> Totals:
        """See `Columns`."""
        return column_totals(self.X, self.w)

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self.D, sums = kernel_step(self.X, self.w, self.D, *(contiguous(t) for t in affine))
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
        return Totals(weight * self._scale, mean, spread * self._scale)

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self._maps.append(tuple(contiguous(t) for t in affine))  # type: ignore[arg-type]
        total: list[Any] = [0.0, 0.0, 0.0]
        for X, w in self._blocks():
            _, sums = apply_maps(X, w * self._scale, self._maps)
            total = [t + s for t, s in zip(total, sums, strict=True)]
        return Sums(*total)


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


def column_totals(X: Array, w: Array) -> Totals:
    """Sums of X (c, u) weighted by w (u,); the mean is 0 where nothing has weight."""
    weight = w.sum()
    mean = (X * w).sum(1) / weight if weight > 0 else np.zeros(len(X))
    return Totals(weight, mean, ((X - mean[:, None]) ** 2 * w).sum())


def namespace(array: Any) -> Any:
    """NumPy or torch, whichever the array is of: the solver's arithmetic is the same in both."""
    return np if isinstance(array, (np.ndarray, np.generic)) else sys.modules["torch"]


def ratio(a: Any, b: Any) -> Any:
    """a / b, with 0 and gradient 0 where b is 0."""
    xp = namespace(b)
    positive = b > 0
    return xp.where(positive, a / xp.where(positive, b, 1.0), 0.0)


def to_numpy(array: Any) -> Array:
    """An array of NumPy's or torch's, on whatever device, as NumPy's."""
    return np.asarray(array if namespace(array) is np else array.detach().cpu().numpy())


def contiguous(array: Any) -> Array:
    """A float64 array in C order, as the kernels are compiled for."""
    return np.ascontiguousarray(array, dtype=np.float64)


def kernel_step(
    X: Array, w: Array, D: Array, M: Array, N: Array, b: Array, out: Array | None = None
) -> tuple[Array, tuple[Array, Array, Array]]:
    """max(0, Mᵀ D + Nᵀ X + b) on float64 arrays, (r, u), in `out` if given, and its (G, P, m)."""
    (c, u), r = X.shape, M.shape[1]
    out = np.empty((r, u)) if out is None else out
    sums = (_zeros(u, r, r), _zeros(u, c, r), _zeros(u, r))

    def work(k: int, part: slice) -> None:
        mine = (s[k] for s in sums)
        kernels.density_step(X, w, D, M, N, b, out, *mine, part.start, part.stop)

    _in_chunks(work, u)
    lower, P, m = (s.sum(0) for s in sums)
    return out, (lower + np.tril(lower, -1).T, P, m)


def kernel_step_backward(
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
    """Gradients of D, M, N and b; gG must be the gradient of G plus its transpose."""
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
