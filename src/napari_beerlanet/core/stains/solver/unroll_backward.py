"""The gradient of `unroll`, written out, and the autograd function that `BeerLaNet` trains through.

The backward pass is in NumPy, one image at a time. Each function repeats a step of `unroll` and
returns its value with its pullback: the function that takes the gradient of the loss with respect
to the value to those with respect to what the step was given. A prefix g names a gradient: gS is
∂loss/∂S. Where a step takes 0 for 0/0, and at a kink, the gradient is 0. Automatic differentiation
of the same small arithmetic would take ten times as long, and half as long as all the columns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from napari_beerlanet.core.common.threads import run_parallel, thread_count
from napari_beerlanet.core.stains.solver import unrolled_kernels
from napari_beerlanet.core.stains.solver.columns import (
    COLUMNS_PER_TASK,
    AffineMap,
    Array,
    ArrayColumns,
    Sums,
    Totals,
    contiguous,
    kernel_map,
    kernel_step_backward,
    ratio,
)
from napari_beerlanet.core.stains.solver.unroll import (
    IterationState,
    Unrolled,
    diagonal,
    norms,
    positive,
    prox_l2,
    root,
    scaled,
    unroll,
    unroll_one,
)

Pullback = Callable[..., Any]
_STORED_EVERY = 5  # iterations: about the root of how many there are takes the least memory


class LearnedParameters(NamedTuple):
    """What is learned, or the gradient of it."""

    S: Any  # (c, r), the start
    lam: Any
    gamma: Any


class RecordedColumns(ArrayColumns):
    """Columns that remember the sums of every iteration, and a few D: the last, every fifth before.

    Those between are computed again on the way back, in memory that a loss has given back by then.
    """

    def __init__(self, X: Array, w: Array, iterations: int) -> None:
        super().__init__(X, w)
        self.stored: list[Array] = []  # D after iterations …, K − 5, K
        self.sums: list[Sums] = []  # of the unscaled D, after each
        self._remaining = iterations

    def step(self, affine: AffineMap) -> Sums:
        """See `Columns`."""
        before, is_stored = self.D, any(self.D is D for D in self.stored)
        sums = super().step(affine)
        if is_stored and self._spare is before:
            self._spare = None
        self._remaining -= 1
        if self._remaining % _STORED_EVERY == 0:
            self.stored.append(self.D)
        self.sums.append(sums)
        return sums

    def rooms(self, iterations: int) -> npt.NDArray[np.int64]:
        """See `ArrayColumns`: two take turns, and of those that are stored each keeps its own."""
        chosen: list[int] = []
        stored: set[int] = set()
        for k in range(iterations):
            taken = stored | set(chosen[-1:])
            chosen.append(next(room for room in range(k + 1) if room not in taken))
            if (iterations - 1 - k) % _STORED_EVERY == 0:
                stored.add(chosen[-1])
        return np.array(chosen)

    def keep(self, D: Sequence[Array], sums: Sequence[Sums]) -> None:
        """See `ArrayColumns`."""
        super().keep(D, sums)
        self.stored, self.sums = list(D[::-1][::_STORED_EVERY][::-1]), list(sums)
        self._remaining = 0


@dataclass(frozen=True)
class Tape:
    """K iterations on one image, for the way back; all small but X and w."""

    X: Array
    w: Array
    learned: LearnedParameters
    unit_spectra: bool
    states: list[IterationState]  # K + 1, the first the start
    maps: list[AffineMap]  # K
    sums: list[Sums]  # K, of the unscaled D

    def backward(
        self, stored: Sequence[Array], g_D: Array, ga: Array, gx0: Array, gS: Array
    ) -> LearnedParameters:
        """Gradients of what is learned from those of D (r, u), unscaled, of its scales, x₀ and S.

        `stored` is `RecordedColumns.stored`. Nothing given is written to.
        """
        if len(self.w) <= COLUMNS_PER_TASK:
            return self._backward_small(stored, g_D, ga, gx0, gS)
        _, lam, gamma = self.learned
        weight, room = self.w.sum(), np.empty_like(g_D)
        total, gm = np.zeros(2), np.zeros_like(ga)  # total: of λ and γ
        for k, D, out in self._iterate_backwards(stored):
            before, x0, raw = self.states[k], self.states[k + 1].x0, self.sums[k]
            threshold, map_back = _density_map_pullback(before.S, x0, before.a, lam, gamma)
            size = root(diagonal(raw.G))
            a = prox_l2(size, threshold)
            sums = scaled(raw, a)
            S, spectra_back = _spectra_step_pullback(before.S, x0, sums, lam, gamma)

            g_sums = Sums(np.zeros_like(raw.G), np.zeros_like(raw.P), gm)
            if self.unit_spectra:
                gS, ga, g_sums = _unit_spectra_backward(S, a, sums, gS, ga, g_sums)
            gS, more_x0, more_sums, slopes = spectra_back(gS)
            g_sums = Sums(*(p + q for p, q in zip(g_sums, more_sums, strict=True)))
            g_size, g_threshold = _prox_l2_backward(
                size, threshold, ga + _scaled_backward(raw, a, g_sums)
            )
            g_raw = _add_diagonal(scaled(g_sums, a), ratio(g_size, 2 * size))
            g_D, g_map = kernel_step_backward(
                self.X, self.w, D, self.maps[k].M, out, g_D, g_raw, room if k else None
            )
            more_S, map_x0, ga, more_slopes = map_back(g_map, g_threshold)
            gS, gx0, total = gS + more_S, gx0 + more_x0 + map_x0, total + slopes + more_slopes
            if before.sums is not None:  # x₀ = mean + S m / weight
                gx0 = ratio(gx0, weight)
                gS, gm = gS + gx0[:, None] * before.sums.m, gx0 @ before.S
            gx0 = np.zeros_like(x0)
        return LearnedParameters(gS, *total)

    def _backward_small(
        self, stored: Sequence[Array], g_D: Array, ga: Array, gx0: Array, gS: Array
    ) -> LearnedParameters:
        """The same by one kernel per iteration; see `unroll.unroll_one`."""
        _, lam, gamma = (np.asarray(value) for value in self.learned)
        weight, room, none = float(self.w.sum()), np.empty_like(g_D), np.empty(0)
        total, gm = np.zeros(2), np.zeros_like(ga)
        gS, ga, gx0 = gS.copy(), ga.copy(), gx0.copy()
        for k, D, out in self._iterate_backwards(stored):
            before, x0, raw = self.states[k], self.states[k + 1].x0, self.sums[k]
            a, m = (none, none) if before.sums is None else (before.a, before.sums.m)
            unrolled_kernels.iteration_backward(
                self.X, self.w, weight, before.S, x0, a, m, self.maps[k].M, *raw, lam.item(),
                gamma.item(), self.unit_spectra, D, out, g_D, room if k else none[:, None],
                gS, ga, gx0, gm, total,
            )  # fmt: skip
            g_D = room
        return LearnedParameters(gS, *total)

    def _iterate_backwards(self, stored: Sequence[Array]) -> Iterator[tuple[int, Array, Array]]:
        """Iterations from the last to the first, with D before and after each."""
        ends = range(len(self.maps), 0, -_STORED_EVERY)
        known = [np.empty((0, len(self.w))), *stored]
        rooms: list[Array] = []
        for end in ends:
            out, start = known.pop(), max(end - _STORED_EVERY, 0)
            between = known[-1:]  # D after iterations start … end − 1
            for k in range(start, end - 1):
                room = rooms[k - start] if k - start < len(rooms) else None
                between.append(kernel_map(self.X, between[-1], *self.maps[k], room))
            rooms = rooms or between[1:]
            for k in reversed(range(start, end)):
                D = between.pop()
                yield k, D, out
                out = D


def _density_map_pullback(
    S: Array, x0: Array, a: Any, lam: Any, gamma: Any
) -> tuple[Array, Pullback]:
    """`unroll._density_map`: its threshold, and a pullback that takes the map's gradient, too."""
    tau, size = ratio(1.0, (S * S).sum()), norms(S)
    threshold = lam * tau * size

    def back(g: AffineMap, g_threshold: Array) -> tuple[Array, Array, Any, Array]:
        g_threshold = g_threshold - gamma * g.b  # b = τ x₀ᵀS − γ threshold
        along = g_threshold @ size
        g_tau = lam * along + g.b @ (x0 @ S) - (g.N * S).sum()  # N = −τ S
        gS, ga = x0[:, None] * g.b - g.N + ratio(S, size) * (lam * g_threshold), None
        if a is not None:  # M = a (1 − τ SᵀS)
            square, g_inner = S.T @ S, a[:, None] * g.M
            ga = diagonal(g.M) - tau * (g.M * square).sum(1)
            g_tau = g_tau - (g_inner * square).sum()
            gS = gS - S @ (g_inner + g_inner.T)
        gS = tau * gS - 2 * tau**2 * g_tau * S  # τ = 1 / ‖S‖²
        return gS, tau * (S @ g.b), ga, np.array([tau * along, -(g.b @ threshold)])

    return threshold, back


def _spectra_step_pullback(
    S: Array, x0: Array, sums: Sums, lam: Any, gamma: Any
) -> tuple[Array, Pullback]:
    """`unroll._spectra_step`."""
    square = diagonal(sums.G)
    tau, size = ratio(1.0, square.sum()), root(square)
    gradient = S @ sums.G + sums.P - x0[:, None] * sums.m
    T = positive(S - tau * gradient)
    norm, penalty = norms(T), gamma * sums.m + size
    threshold = lam * tau * penalty
    shrink = prox_l2(norm, threshold)

    def back(g: Array) -> tuple[Array, Array, Sums, Array]:
        g_norm, g_threshold = _prox_l2_backward(norm, threshold, (g * T).sum(0))
        gT = (g * shrink + ratio(T, norm) * g_norm) * (T > 0)
        along, g_gradient, g_penalty = g_threshold @ penalty, -tau * gT, lam * tau * g_threshold
        g_tau = lam * along - (gT * gradient).sum()
        g_square = ratio(g_penalty, 2 * size) - tau**2 * g_tau  # τ = 1 / ‖D‖²
        g_sums = Sums(S.T @ g_gradient, g_gradient, gamma * g_penalty - x0 @ g_gradient)
        slopes = np.array([tau * along, g_penalty @ sums.m])
        gS, gx0 = gT + g_gradient @ sums.G, -(g_gradient @ sums.m)
        return gS, gx0, _add_diagonal(g_sums, g_square), slopes

    return T * shrink, back


def _unit_spectra_backward(
    S: Array, a: Array, sums: Sums, gS: Array, ga: Array, g_sums: Sums
) -> tuple[Array, Array, Sums]:
    """Pullback of the rescaling to unit spectra, for S, a and sums before it."""
    norm = norms(S)
    unit = ratio(S, norm)
    g_norm = ga * a + _scaled_backward(sums, norm, g_sums) - ratio((gS * unit).sum(0), norm)
    return ratio(gS, norm) + unit * g_norm, ga * norm, scaled(g_sums, norm)


def _scaled_backward(sums: Sums, a: Array, g: Sums) -> Array:
    """Gradient of the factors of `scaled`; that of its sums is `scaled` itself."""
    both = g.G * sums.G
    ga: Array = a @ (both + both.T) + (g.P * sums.P).sum(0) + g.m * sums.m
    return ga


def _prox_l2_backward(norm: Array, threshold: Array, g: Array) -> tuple[Array, Array]:
    """Gradients of the norm and the threshold of `prox_l2`."""
    alive = ratio(g * (norm > threshold), norm)
    return alive - ratio(g * prox_l2(norm, threshold), norm), -alive


def _add_diagonal(g: Sums, diagonal: Array) -> Sums:
    G = g.G.copy()
    np.fill_diagonal(G, G.diagonal() + diagonal)
    return g._replace(G=G)


class TensorColumns:
    """Columns in memory: X (c, u), w (u,). Differentiable with respect to maps and X."""

    def __init__(self, X: Tensor, w: Tensor, reference_pixels: float | None = None) -> None:
        self.X = X
        self.w = scale_weights(w, reference_pixels)
        self.D = X.new_zeros((0, X.shape[1]))

    @classmethod
    def on(
        cls, device: torch.device, X: Array, w: Array, reference_pixels: float | None
    ) -> TensorColumns:
        """Columns of NumPy's arrays on a device."""
        return cls(torch.from_numpy(X).to(device), torch.from_numpy(w).to(device), reference_pixels)

    def as_tensors(self, *values: Any) -> tuple[Tensor, ...]:
        """Numbers and arrays as tensors of X's type, where X is."""
        return tuple(torch.as_tensor(v, dtype=self.X.dtype, device=self.X.device) for v in values)

    @property
    def uses_kernels(self) -> bool:
        """Whether NumPy and the kernels may solve for them: on the CPU, X without a gradient."""
        x = self.X
        plain = x.device.type == "cpu" and x.dtype == torch.float64
        return plain and not x.requires_grad and not is_tracing()

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


def is_tracing() -> bool:
    """Whether torch records operations to export them: what NumPy computes would be constants."""
    tracing: Any = torch.jit  # its functions have no types
    return bool(tracing.is_tracing() or torch.compiler.is_compiling())


def unroll_tensors(
    images: Sequence[TensorColumns],
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
    if not all(image.uses_kernels for image in images):
        return unroll(images, S, lam, gamma, **settings)
    given = tuple(t.double() for t in (S, lam, gamma))
    learned = LearnedParameters(*(contiguous(t.detach()) for t in given))
    record = torch.is_grad_enabled() and any(t.requires_grad for t in given)

    def solve(image: TensorColumns) -> tuple[ArrayColumns, Unrolled]:
        X, w = contiguous(image.X), contiguous(image.w)
        columns = RecordedColumns(X, w, iterations) if record else ArrayColumns(X, w)
        return columns, unroll_one(columns, *learned, **settings)

    columns, done = zip(*for_each_image(solve, images), strict=True)
    solutions = [(d.scale, d.background, d.spectra) for d in done]
    scale, background, spectra = (_concatenate(t) for t in zip(*solutions, strict=True))
    D = [torch.from_numpy(c.D) for c in columns]
    if record:
        tapes = [
            _make_tape(*pair, learned, unit_spectra) for pair in zip(columns, done, strict=True)
        ]
        stored, ends = [c.stored for c in columns], (scale, background, spectra)
        *D, scale, background, spectra = _UnrollFunction.apply(tapes, stored, ends, *given)
    for image, densities in zip(images, D, strict=True):
        image.D = densities
    sums = Sums(*(_concatenate(t) for t in zip(*(d.sums for d in done), strict=True)))
    maps = [
        AffineMap(*(_concatenate(t) for t in zip(*step, strict=True)))
        for step in zip(*(d.maps for d in done), strict=True)
    ]
    objective = _concatenate([d.objective for d in done]) if track else None
    return Unrolled(background, spectra, scale, sums, objective, maps)


def for_each_image(
    work: Callable[[Any], Any], images: Sequence[Any], side_by_side: bool = True
) -> list[Any]:
    """Images side by side where they occupy all threads; one after the other shares them out."""
    if not side_by_side or len(images) < thread_count():
        return [work(image) for image in images]
    return run_parallel([partial(work, image) for image in images])


def _concatenate(parts: Sequence[Array]) -> Tensor:
    """Batches of one image each as one batch."""
    return torch.from_numpy(np.concatenate(parts))


def _make_tape(
    columns: RecordedColumns, done: Unrolled, learned: LearnedParameters, unit_spectra: bool
) -> Tape:
    """What the gradient needs of one image's iterations, without the batch's axis."""
    maps = [AffineMap(*(contiguous(t[0]) for t in affine)) for affine in done.maps]
    states = [
        IterationState(s.S[0], s.x0[0], s.a[0], Sums(*(t[0] for t in s.sums or ())))
        for s in done.states[1:]
    ]
    start = IterationState(learned.S, done.states[0].x0[0], None, None)
    return Tape(columns.X, columns.w, learned, unit_spectra, [start, *states], maps, columns.sums)


class _UnrollFunction(torch.autograd.Function):
    """Puts what NumPy solved for on torch's record, with the gradient that `Tape` has for it."""

    @staticmethod
    def forward(
        ctx: Any,
        tapes: list[Tape],
        stored: list[list[Array]],
        ends: tuple[Tensor, ...],
        S: Tensor,
        lam: Tensor,
        gamma: Tensor,
    ) -> tuple[Tensor, ...]:
        tensors = [[torch.from_numpy(D) for D in each] for each in stored]
        ctx.tapes = tapes
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*(D for each in tensors for D in each))
        return (*(each[-1] for each in tensors), *ends)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Any, ...]:
        refuse_second_derivative(*(g for g in gradients if g is not None))
        tapes: list[Tape] = ctx.tapes
        n, saved = len(tapes), [t.detach().numpy() for t in ctx.saved_tensors]
        stored = [saved[k * len(saved) // n : (k + 1) * len(saved) // n] for k in range(n)]

        def pull(k: int) -> LearnedParameters:
            g_D, *ends = (gradients[k], *((g if g is None else g[k]) for g in gradients[n:]))
            start = tapes[k].states[-1]
            like = stored[k][-1], start.a, start.x0, start.S
            given = (
                np.zeros_like(x) if g is None else contiguous(g.detach())
                for g, x in zip((g_D, *ends), like, strict=True)
            )
            return tapes[k].backward(stored[k], *given)

        gradients_per_image = for_each_image(pull, range(n))
        columns = zip(*gradients_per_image, strict=True)
        total = (torch.as_tensor(np.sum(t, 0)) for t in columns)
        return None, None, None, *total


def refuse_second_derivative(*gradients: Tensor) -> None:
    """Kernels know first derivatives only; going on would leave the second out without a word."""
    if torch.is_grad_enabled() and any(g.requires_grad for g in gradients):
        raise RuntimeError("BeerLaNet on the CPU has first derivatives only.")
