"""Algorithm 1 of the paper: K steps on weighted columns, and the way back through them.

    minimise  ½‖x₀1ᵀ − X − SDᵀ‖² + λ Σᵢ ‖sᵢ‖₂ (γ‖dᵢ‖₁ + ‖dᵢ‖₂)   over x₀ and S, D ≥ 0

X (c, u) float64 holds u columns of weight w (u,): pixels, or distinct colours with their counts; S
(c, r) the spectra. D is kept transposed, (r, u), and unscaled: the densities are a ⊙ D with a (r,),
because the ℓ₂ prox and the rescaling to unit spectra only scale rows. So one iteration touches the
columns once: an affine map of D and X, a ReLU, and three weighted sums. All the rest is arithmetic
on c × r numbers, see `step_kernels.plan` and `update`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.threads import chunk_slices, in_numpy, map_chunks
from napari_beerlanet.core.stains.solver import step_kernels

Array = npt.NDArray[np.float64]
Map = tuple[Array, Array, Array]
COLUMNS_PER_TASK = 1 << 14
"""Columns that one thread takes: fixed, so that sums do not depend on the number of threads."""
_STORED_EVERY = 5  # iterations: about the root of how many there are takes the least memory


@dataclass(frozen=True)
class Unrolled:
    """What K iterations leave of an image."""

    background: Array  # (c,)
    spectra: Array  # (c, r)
    D: Array  # (r, u), unscaled
    scale: Array  # (r,), of D
    mass: Array  # (r,) Σ w d of the densities
    objective: Array  # (K,)
    maps: list[Map]  # K of them, M (r, r), N (c, r), b (r,): D ← max(0, Mᵀ D + Nᵀ X + b)


class _Step(NamedTuple):
    """One iteration: what it began with, its x₀ and ℓ₂ threshold, its map, the sums of its D."""

    S: Array
    a: Array
    m: Array
    x0: Array
    threshold: Array
    map: Map
    sums: tuple[Array, Array, Array]


@dataclass(frozen=True)
class Tape:
    """K iterations on one image, for the way back: all small but X and w, and a few of its D.

    These are the last and every fifth before. Those between are computed again on the way back, in
    memory that a loss has given back by then.
    """

    X: Array
    w: Array
    lam: float
    gamma: float
    unit_spectra: bool
    steps: list[_Step] = field(default_factory=list)
    stored: list[Array] = field(default_factory=list)  # D after iterations …, K − 5, K


def unroll(
    X: Array,
    w: Array,
    S: Array,
    lam: float,
    gamma: float,
    *,
    iterations: int,
    unit_spectra: bool,
    tape: Tape | None = None,
) -> Unrolled:
    """K iterations from S (c, r) and D = 0, recorded on `tape`, if given, for `unroll_backward`."""
    X, w, S, lam, gamma = contiguous(X), contiguous(w), contiguous(S), float(lam), float(gamma)
    weight, mean = float(w.sum()), np.zeros(len(X))
    if weight > 0:
        mean = np.einsum("cu,u->c", X, w) / weight
    distance = X - mean[:, None]
    spread = float(np.einsum("cu,cu,u->", distance, distance, w))
    (c, r), u = S.shape, X.shape[1]
    a, m = np.zeros(r), np.zeros(r)
    D, spare = np.empty((0, u)), None
    stored = [] if tape is None else tape.stored
    plan, update = (_plain(kernel) for kernel in (step_kernels.plan, step_kernels.update))
    maps, objective = [], np.empty(iterations)
    for k in range(iterations):
        x0, threshold, b, N, M = (np.empty(n) for n in (c, r, r, (c, r), (len(D), r)))
        plan(S, a, m, mean, weight, lam, gamma, x0, M, N, b, threshold)
        out, sums = density_step(X, w, D, (M, N, b), spare)
        S1, a1, m1 = np.empty((c, r)), np.empty(r), np.empty(r)
        around = weight, mean, spread, lam, gamma, unit_spectra
        objective[k] = update(S, x0, threshold, *sums, *around, S1, a1, m1)
        maps.append((M, N, b))
        if tape is not None:
            tape.steps.append(_Step(S, a, m, x0, threshold, maps[-1], sums))
            if (iterations - 1 - k) % _STORED_EVERY == 0:
                stored.append(out)
        # The D before is written over next, unless it is empty or stored.
        spare = D if len(D) and not any(D is kept for kept in stored) else None
        S, a, m, D = S1, a1, m1, out
    return Unrolled(x0, S, D, a, m, objective, maps)


def unroll_backward(
    tape: Tape, stored: Sequence[Array], g_D: Array, ga: Array, gx0: Array, gS: Array
) -> tuple[Array, float, float]:
    """Gradients of S, λ and γ from those of D (r, u), unscaled, of its scales, x₀ and S at the end.

    `stored` are the tape's arrays of that name. Nothing given is written to.
    """
    X, w, lam, gamma = tape.X, tape.w, tape.lam, tape.gamma
    (c, r), weight, room = gS.shape, float(w.sum()), np.empty_like(g_D)
    gS, ga, gx0, gm, total = gS.copy(), ga.copy(), gx0.copy(), np.zeros(r), np.zeros(2)
    both, gP, g_threshold = np.empty((r, r)), np.empty((c, r)), np.empty(r)
    for k, D, out in _iterate_backwards(tape, stored):
        S, a, m, x0, threshold, (M, _, _), sums = tape.steps[k]
        around = lam, gamma, tape.unit_spectra, gS, ga, gx0, gm, total
        step_kernels.update_backward(S, x0, threshold, *sums, *around, both, gP, g_threshold)
        before = room if k else np.empty_like(D)
        g_map = density_step_backward(X, w, D, M, out, g_D, (both, gP, gm), before)
        given = S, a, m, weight, lam, gamma, x0, threshold
        step_kernels.plan_backward(*given, *g_map, g_threshold, gS, ga, gx0, gm, total)
        g_D = room
    return gS, *total


def _iterate_backwards(tape: Tape, stored: Sequence[Array]) -> Iterator[tuple[int, Array, Array]]:
    """Iterations from the last to the first, with D before and after each."""
    known = [np.empty((0, len(tape.w))), *stored]
    rooms: list[Array] = []
    for end in range(len(tape.steps), 0, -_STORED_EVERY):
        out, start = known.pop(), max(end - _STORED_EVERY, 0)
        between = known[-1:]  # D after iterations start … end − 1
        for k in range(start, end - 1):
            room = rooms[k - start] if k - start < len(rooms) else None
            between.append(density_map(tape.X, between[-1], tape.steps[k].map, room))
        rooms = rooms or between[1:]
        for k in reversed(range(start, end)):
            D = between.pop()
            yield k, D, out
            out = D


@dataclass(frozen=True)
class MapChain:
    """Densities of any columns after K iterations: their maps in turn, then D's scales (r,)."""

    maps: Sequence[Map]
    scale: Array

    def __call__(self, X: Array) -> Array:
        """D (r, n) of columns X (c, n)."""
        X = contiguous(X)
        D, spare = np.empty((0, X.shape[1])), None
        for step in self.maps:
            mapped = density_map(X, D, step, spare)
            D, spare = mapped, D if len(D) else None
        D *= self.scale[:, None]
        return D


def scale_weights(w: Any, reference_pixels: float | None) -> Any:
    """Weights (u,) scaled to a total of `reference_pixels`, or as they are for None."""
    if reference_pixels is None:
        return w
    total = w.sum()
    return w * (reference_pixels / (total + (total == 0)))


def contiguous(array: Any) -> Array:
    """A float64 array in C order, as the kernels are compiled for."""
    return np.ascontiguousarray(array, dtype=np.float64)


def density_map(X: Array, D: Array, step: Map, out: Array | None = None) -> Array:
    """max(0, Mᵀ D + Nᵀ X + b), (r, u), in `out` if given."""
    M, N, b = (contiguous(t) for t in step)
    mapped = np.empty((M.shape[1], X.shape[1])) if out is None else out
    if in_numpy():
        return np.maximum(M.T @ D + N.T @ X + b[:, None], 0.0, out=mapped)

    def work(part: slice) -> None:
        step_kernels.density_map(X, D, M, N, b, mapped, part.start, part.stop)

    map_chunks(work, X.shape[1], COLUMNS_PER_TASK)
    return mapped


def density_step(
    X: Array, w: Array, D: Array, step: Map, out: Array | None = None
) -> tuple[Array, tuple[Array, Array, Array]]:
    """`density_map` and its sums G (r, r), P (c, r) and m (r,)."""
    (c, u), r = X.shape, step[0].shape[1]
    if in_numpy():
        mapped = density_map(X, D, step, out)
        weighted = mapped * w
        return mapped, (weighted @ mapped.T, X @ weighted.T, weighted.sum(1))
    mapped = np.empty((r, u)) if out is None else out
    sums = _zeros_per_chunk(u, (r, r), (c, r), (r,))

    def work(part: slice) -> None:
        mine = (s[part.start // COLUMNS_PER_TASK] for s in sums)
        step_kernels.density_step(X, w, D, *step, mapped, *mine, part.start, part.stop)

    map_chunks(work, u, COLUMNS_PER_TASK)
    G, P, m = (s.sum(0) for s in sums)
    return mapped, (G, P, m)


def density_step_backward(
    X: Array,
    w: Array,
    D: Array,
    M: Array,
    out: Array,
    g_out: Array,
    g_sums: tuple[Array, Array, Array],
    g_D: Array,
) -> tuple[Array, Array, Array]:
    """Gradients of the map; that of D goes to g_D, which may be g_out.

    `out` is the step's result, g_out (r, u) its gradient; g_sums are those of its sums, G's plus
    its transpose.
    """
    (c, u), (q, r) = X.shape, M.shape
    g_map = _zeros_per_chunk(u, (q, r), (c, r), (r,))

    def work(part: slice) -> None:
        mine = (s[part.start // COLUMNS_PER_TASK] for s in g_map)
        given = X, w, D, M, out, g_out, *g_sums, g_D, *mine
        step_kernels.density_step_backward(*given, part.start, part.stop)

    map_chunks(work, u, COLUMNS_PER_TASK)
    gM, gN, gb = (s.sum(0) for s in g_map)
    return gM, gN, gb


def _zeros_per_chunk(u: int, *shapes: tuple[int, ...]) -> list[Array]:
    chunks = len(chunk_slices(u, COLUMNS_PER_TASK))
    return [np.zeros((chunks, *shape)) for shape in shapes]


def _plain(kernel: Any) -> Any:
    """A kernel, or the function that it is compiled from while NumPy serves in its place."""
    return getattr(kernel, "py_func", kernel) if in_numpy() else kernel
