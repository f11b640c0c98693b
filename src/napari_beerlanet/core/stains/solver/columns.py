"""An image as weighted columns, and the only step of Algorithm 1 that touches all of them.

X (c, u) float64 holds u columns of weight w (u,): pixels, or distinct colours with their counts.
D (r, u) belongs to them and is kept unscaled: what the solver does besides its step on D only
scales rows of D, and the solver keeps those scales.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.threads import chunk_slices, in_numpy, map_chunks
from napari_beerlanet.core.stains.solver import unrolled_kernels

Array = npt.NDArray[np.float64]
Map = tuple[Array, Array, Array]
COLUMNS_PER_TASK = 1 << 14
"""Columns that one thread takes: fixed, so that sums do not depend on the number of threads."""
_NO_SCALE, _NO_FACTOR = np.empty(0), np.empty((0, 0))


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
        self._spare: Array | None = None

    def totals(self) -> Totals:
        """See `Columns`."""
        return column_totals(self.X, self.w)

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`. The D before last is written over."""
        M, N, b = (contiguous(t) for t in affine)
        before, room = self.D, self._spare
        self.D, sums = kernel_step(self.X, self.w, before, M, N, b, room)
        self._spare = before if before.shape == self.D.shape else None
        return sums

    def rooms(self, iterations: int) -> npt.NDArray[np.int64]:
        """(iterations,) which of several arrays each iteration writes its D to: here, over it."""
        return np.zeros(iterations, np.int64)

    def keep(self, D: Sequence[Array], sums: Sequence[Sums]) -> None:
        """Take over what iterations have left: the array and the sums of D of each."""
        self.D, self._spare = D[-1], None


class StreamedColumns:
    """Columns that are read anew, block by block, in each iteration; D is recomputed on the way.

    Memory is bounded by a block whatever the image's size; time grows with K² / 2.
    """

    def __init__(self, blocks: Callable[[], Iterator[tuple[Array, Array]]], scale: float) -> None:
        self._blocks = blocks
        self._scale = scale
        self._maps: list[AffineMap] = []

    def totals(self) -> Totals:
        """See `Columns`."""
        weight = sum(w.sum() for _, w in self._blocks())
        mean = sum(X @ w for X, w in self._blocks()) / weight
        spread = sum(((X - mean[:, None]) ** 2 @ w).sum() for X, w in self._blocks())
        return Totals(weight * self._scale, mean, spread * self._scale)

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        self._maps.append(AffineMap(*(contiguous(t) for t in affine)))
        total: list[Any] = [0.0, 0.0, 0.0]
        for X, w in self._blocks():
            _, sums = apply_maps(X, w * self._scale, self._maps)
            total = [t + s for t, s in zip(total, sums, strict=True)]
        return Sums(*total)


def apply_maps(X: Array, w: Array, maps: Sequence[Map]) -> tuple[Array, Sums]:
    """D (r, u), unscaled, after a chain of maps (M, N, b) from D = 0, and its last sums."""
    return kernel_step(X, w, _apply_chain(X, maps[:-1]), *maps[-1])


def _apply_chain(X: Array, maps: Sequence[Map]) -> Array:
    """D (r, u), unscaled, after a chain of maps (M, N, b) from D = 0."""
    D, spare = np.empty((0, X.shape[1])), None
    for affine in maps:
        M, N, b = (contiguous(t) for t in affine)
        mapped = kernel_map(X, D, M, N, b, spare)
        D, spare = mapped, D if D.shape == mapped.shape else None
    return D


@dataclass(frozen=True)
class MapChain:
    """Densities of any columns after K iterations: their maps in turn, then D's scales (r,)."""

    maps: Sequence[Map]
    scale: Array

    def __call__(self, X: Array) -> Array:
        """D (r, n) of columns X (c, n)."""
        D = _apply_chain(contiguous(X), self.maps)
        D *= self.scale[:, None]
        return D


def column_totals(X: Array, w: Array) -> Totals:
    """Sums of X (c, u) weighted by w (u,); the mean is 0 where nothing has weight."""
    weight = w.sum()
    mean = np.einsum("cu,u->c", X, w) / weight if weight > 0 else np.zeros(len(X))
    distance = X - mean[:, None]
    distance *= distance
    return Totals(weight, mean, np.einsum("cu,u->", distance, w))


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


def kernel_map(X: Array, D: Array, M: Array, N: Array, b: Array, out: Array | None = None) -> Array:
    """max(0, Mᵀ D + Nᵀ X + b) on float64 arrays, (r, u), in `out` if given."""
    mapped = np.empty((M.shape[1], X.shape[1])) if out is None else out
    if in_numpy():
        return np.maximum(M.T @ D + N.T @ X + b[:, None], 0.0, out=mapped)

    def work(_: int, part: slice) -> None:
        unrolled_kernels.density_map(X, D, M, N, b, mapped, part.start, part.stop)

    _run_chunks(work, X.shape[1])
    return mapped


def kernel_step(
    X: Array, w: Array, D: Array, M: Array, N: Array, b: Array, out: Array | None = None
) -> tuple[Array, Sums]:
    """`kernel_map` and its sums."""
    (c, u), r = X.shape, M.shape[1]
    mapped = np.empty((r, u)) if out is None else out
    if in_numpy():
        weighted = kernel_map(X, D, M, N, b, mapped) * w
        return mapped, Sums(weighted @ mapped.T, X @ weighted.T, weighted.sum(1))
    given = X, w, D, M, N, b, _NO_SCALE, _NO_FACTOR, mapped
    if u <= COLUMNS_PER_TASK:  # nothing to share out: a small image is solved in microseconds
        one = Sums(np.zeros((r, r)), np.zeros((c, r)), np.zeros(r))
        unrolled_kernels.density_step(*given, *one, 0, u)
        return mapped, one
    sums = (_zeros_per_chunk(u, r, r), _zeros_per_chunk(u, c, r), _zeros_per_chunk(u, r))

    def work(k: int, part: slice) -> None:
        mine = (s[k] for s in sums)
        unrolled_kernels.density_step(*given, *mine, part.start, part.stop)

    _run_chunks(work, u)
    return mapped, Sums(*(s.sum(0) for s in sums))


def kernel_step_backward(
    X: Array,
    w: Array,
    D: Array,
    M: Array,
    out: Array,
    g_out: Array,
    g_sums: Sums,
    g_D: Array | None = None,
) -> tuple[Array, AffineMap]:
    """Gradients of D, in g_D if given, which may be g_out, and of the map.

    `out` is the step's result; g_out (r, u) and g_sums are the gradients of it and of its sums.
    """
    (c, u), (q, r) = X.shape, M.shape
    gradient = np.empty((q, u)) if g_D is None else g_D
    g_map = (_zeros_per_chunk(u, q, r), _zeros_per_chunk(u, c, r), _zeros_per_chunk(u, r))
    both = g_sums.G + g_sums.G.T
    given = (X, w, D, M, out, g_out, both, contiguous(g_sums.P), contiguous(g_sums.m), gradient)

    def work(k: int, part: slice) -> None:
        mine = (s[k] for s in g_map)
        unrolled_kernels.density_step_backward(*given, *mine, part.start, part.stop)

    _run_chunks(work, u)
    return gradient, AffineMap(*(s.sum(0) for s in g_map))


def _zeros_per_chunk(u: int, *shape: int) -> Array:
    return np.zeros((len(chunk_slices(u, COLUMNS_PER_TASK)), *shape))


def _run_chunks(work: Callable[[int, slice], None], u: int) -> None:
    map_chunks(lambda part: work(part.start // COLUMNS_PER_TASK, part), u, COLUMNS_PER_TASK)


PIXELS_PER_BLOCK = 1 << 17
"""Pixels that blockwise work takes at a time."""
