"""Vahadane's sparse stain separation, on the palette.

    min ½‖V − WH‖² + λ‖H‖₁   over W, H ≥ 0 with columns of W of unit length

V (3, n) is the optical density against the image's own background, W (3, 2) are two stains, H
(2, n) their densities (Vahadane et al., IEEE Trans. Med. Imaging 35:1962, 2016). Pixels of one
colour have the same column of V and so of H: with one column per distinct colour, weighted by its
count, the problem is the same, and a thousandth of the size.

Given W, each column of H is a problem in two unknowns with an exact answer; given H, so is W by a
few sweeps. Alternating the two never raises the objective. Coarser colours come first, and the
start is Macenko's: nothing is random.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import numpy as np

from napari_beerlanet.core.common.threads import map_chunks, njit
from napari_beerlanet.core.normalization.classical import find_stain_vectors
from napari_beerlanet.core.normalization.normalizer import (
    Appearance,
    Array,
    ColourMap,
    ColourStatistics,
    Image,
    Target,
    learned,
    log_intensity,
    match_strengths,
    pool_templates,
    unchanged,
)
from napari_beerlanet.core.stains.palette import Palette
from napari_beerlanet.core.stains.solver.converge import ColourCells, build_cells

SPARSITY = 0.1
"""λ in units of optical density, as in the paper."""

_BRIGHTEST = 0.05  # of the pixels: their mean is the background
_START = ((0.5626, 0.2159), (0.7201, 0.8012), (0.4062, 0.5581))  # where Macenko finds no two stains
_COLUMNS_PER_TASK = 1 << 15
_MAX_STEPS, _TOLERANCE = 1000, 1e-7  # change of W in a step
_MAX_W_SWEEPS, _W_TOLERANCE = 200, 1e-14


@dataclass(frozen=True, eq=False)
class SparseStains(Target):
    """Background (3,) as ln of the intensity, stains W (3, 2), 99th percentiles (2,) of H."""

    shapes: ClassVar = {"background": (3,), "stains": (3, 2), "strengths": (2,)}

    background: Array
    stains: Array
    strengths: Array

    @property
    def appearance(self) -> Appearance:
        """The same with the background as intensity."""
        return Appearance(np.exp(self.background), self.stains, self.strengths)

    @classmethod
    def fit(cls, templates: Sequence[Image]) -> SparseStains:
        """Those of the templates."""
        return learned(find_sparse_stains(pool_templates(templates)))

    def colour_map(self, palette: Palette) -> ColourMap:
        """Densities under the image's stains, scaled, under the template's."""
        own = ColourStatistics.of(palette).problem() or find_sparse_stains(palette)
        if isinstance(own, str):
            return unchanged(own)
        order = _match_two(own.stains, self.stains)
        own = SparseStains(own.background, own.stains[:, order], own.strengths[order])
        scale, notes = match_strengths(own.strengths, self.strengths)
        values = partial(_vahadane, own=own, target=self, scale=scale)
        return ColourMap(values, notes, own.appearance, self.appearance)


def _match_two(stains: Array, target: Array) -> list[int]:
    """The order of two stains in which they resemble the template's."""
    cosine = stains.T @ target
    return [0, 1] if cosine[0, 0] + cosine[1, 1] >= cosine[0, 1] + cosine[1, 0] else [1, 0]


def _vahadane(colours: Array, *, own: SparseStains, target: SparseStains, scale: Array) -> Array:
    V = np.maximum(own.background[:, None] - log_intensity(colours), 0.0)
    H = sparse_densities(V, own.stains) * scale[:, None]
    return np.asarray(255 * np.exp(target.background[:, None] - target.stains @ H).T)


def find_sparse_stains(palette: Palette, sparsity: float = SPARSITY) -> SparseStains | str:
    """Background, stains and strengths of an 8-bit palette, or why there are none."""
    seen = palette.counts > 0
    statistics = ColourStatistics.of(palette)
    X = log_intensity(statistics.colours)
    background = _find_background(statistics, X)
    V = np.maximum(background[:, None] - X, 0.0)
    cells = build_cells(palette.codes[seen], V, statistics.counts.astype(np.float64))
    W = separate_stains(cells, start_stains(cells, background), sparsity)
    H = sparse_densities(V, W, sparsity)
    if not (H @ cells.w > 0).all():
        return "two stains could not be told apart"
    strengths = np.array([statistics.percentile(h, 99) for h in H])
    return SparseStains(background, W, strengths)


def _find_background(statistics: ColourStatistics, X: Array) -> Array:
    """(3,) mean of ln intensity over the brightest pixels."""
    brightness = np.rint(statistics.colours.sum(axis=1)).astype(np.intp)
    brighter = statistics.total - np.cumsum(np.bincount(brightness, statistics.counts))
    wanted = _BRIGHTEST * statistics.total
    # Of the last brightness that is needed, every colour counts in part.
    at_level = np.diff(-np.r_[statistics.total, brighter])
    part = np.clip((wanted - brighter) / np.maximum(at_level, 1), 0, 1)
    used = statistics.counts * part[brightness]
    return np.asarray(X @ used / used.sum())


def start_stains(cells: ColourCells, background: Array) -> Array:
    """(3, 2): Macenko's stain vectors without what is negative in them, or those of H&E.

    Of the coarsest `cells` of V, as it is only a start.
    """
    while cells.coarser is not None:
        cells = cells.coarser
    colours = 255 * np.exp(background[:, None] - cells.X).T
    found = find_stain_vectors(ColourStatistics(colours, cells.w.astype(np.int64)))
    if not isinstance(found, str):
        W = np.maximum(found.stains, 0.0)
        norms = np.linalg.norm(W, axis=0)
        if norms.min() > 0:
            return np.asarray(W / norms)
    W = np.array(_START)
    return np.asarray(W / np.linalg.norm(W, axis=0))


def separate_stains(cells: ColourCells, W: Array, sparsity: float = SPARSITY) -> Array:
    """W (3, 2) at the objective's minimum for weighted columns V of `cells`, from a start."""
    if cells.coarser is not None:
        W = separate_stains(cells.coarser, W, sparsity)
    V, w = np.ascontiguousarray(cells.X), cells.w
    for _ in range(_MAX_STEPS):
        before, W = W, _alternate(V, w, W, sparsity)
        if np.abs(W - before).max() < _TOLERANCE:
            break
    return np.asarray(W / np.maximum(np.linalg.norm(W, axis=0), np.finfo(float).tiny))


def _alternate(V: Array, w: Array, W: Array, sparsity: float) -> Array:
    """The best stains for the densities that are best for stains W."""

    def work(part: slice) -> Array:
        sums = np.zeros(9)
        _sum_columns(np.ascontiguousarray(V[:, part]), w[part], W, sparsity, sums)
        return sums

    total = np.sum(map_chunks(work, len(w), _COLUMNS_PER_TASK), axis=0)
    a, b, c = total[:3]
    return _best_stains(np.array([[a, b], [b, c]]), total[3:].reshape(3, 2), W)


def _best_stains(A: Array, B: Array, W: Array) -> Array:
    """W ≥ 0 with columns of at most unit length that minimises ½ tr(WAWᵀ) − tr(WᵀB).

    λ makes densities small and so columns long: at the objective's minimum they are of unit length.
    """
    W = W.copy()
    for _ in range(_MAX_W_SWEEPS):
        before = W.copy()
        for j in range(2):
            if A[j, j] <= 0:
                continue  # a stain that is nowhere stays as it is
            best = np.maximum((B[:, j] - W[:, 1 - j] * A[j, 1 - j]) / A[j, j], 0.0)
            length = float(np.linalg.norm(best))
            W[:, j] = best / max(length, 1.0) if length > 0 else W[:, j]
        if np.abs(W - before).max() < _W_TOLERANCE:
            break
    return W


def sparse_densities(V: Array, W: Array, sparsity: float = SPARSITY) -> Array:
    """H (2, n) ≥ 0 that minimises ½‖v − Wh‖² + λ Σ h for each column of V (3, n)."""
    H = np.empty((2, V.shape[1]))
    _solve_columns(np.ascontiguousarray(V), np.ascontiguousarray(W), sparsity, H)
    return H


@njit(cache=True, nogil=True)
def _solve_two(a, c, d, b0, b1):  # type: ignore[no-untyped-def]
    """h ≥ 0 that minimises ½ hᵀ[[a, c], [c, d]]h − b·h: the inside, or else one of the edges."""
    det = a * d - c * c
    if det > 1e-14 * a * d:
        h0, h1 = (d * b0 - c * b1) / det, (a * b1 - c * b0) / det
        if h0 >= 0.0 and h1 >= 0.0:
            return h0, h1
    first = b0 / a if b0 > 0.0 and a > 0.0 else 0.0
    second = b1 / d if b1 > 0.0 and d > 0.0 else 0.0
    if first * b0 >= second * b1:  # twice what each gains
        return first, 0.0
    return 0.0, second


@njit(cache=True, nogil=True)
def _solve_columns(V, W, sparsity, H):  # type: ignore[no-untyped-def]
    """Fill H (2, n)."""
    a = c = d = 0.0
    for k in range(3):
        a += W[k, 0] * W[k, 0]
        c += W[k, 0] * W[k, 1]
        d += W[k, 1] * W[k, 1]
    for t in range(V.shape[1]):
        b0 = b1 = -sparsity
        for k in range(3):
            b0 += W[k, 0] * V[k, t]
            b1 += W[k, 1] * V[k, t]
        H[0, t], H[1, t] = _solve_two(a, c, d, b0, b1)


@njit(cache=True, nogil=True)
def _sum_columns(V, w, W, sparsity, sums):  # type: ignore[no-untyped-def]
    """Add to `sums` Σw h hᵀ (three numbers) and Σw v hᵀ (3, 2)."""
    H = np.empty((2, V.shape[1]))
    _solve_columns(V, W, sparsity, H)
    for t in range(V.shape[1]):
        h0, h1 = H[0, t], H[1, t]
        sums[0] += w[t] * h0 * h0
        sums[1] += w[t] * h0 * h1
        sums[2] += w[t] * h1 * h1
        for k in range(3):
            sums[3 + 2 * k] += w[t] * V[k, t] * h0
            sums[4 + 2 * k] += w[t] * V[k, t] * h1
