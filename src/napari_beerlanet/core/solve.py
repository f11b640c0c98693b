"""From an image to a fit: K steps of Algorithm 1, or the converged solution.

Either way the fit says what densities any colour has, so that pixels, palettes and tiles that the
solver never saw are all treated alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from . import auto
from .beerlanet import unroll
from .columns import ArrayColumns, MapChain, StreamedColumns, to_numpy
from .converge import Cells, ColumnSolver, cells_of, converge
from .device import pick_device
from .images import Domain, RGBImage, to_bytes, to_columns
from .palette import Palette, palette_of
from .progress import Report, tell
from .threads import slices

if TYPE_CHECKING:
    import torch

Array = npt.NDArray[np.float64]

BLOCK = 1 << 17
"""Pixels that blockwise work takes at a time."""

_STORED = 1 << 24  # densities that a dense solve keeps in memory: 128 MB as float64


@dataclass(frozen=True)
class Problem:
    """What there is to solve: `pixels` (p, 3 or 4) or, where there is one, their palette."""

    image: RGBImage
    pixels: npt.NDArray[Any]
    palette: Palette | None
    start: Array
    domain: Domain
    reference_pixels: float | None
    report: Report | None

    @property
    def total_weight(self) -> float:
        """What the weights of all pixels add up to."""
        if self.reference_pixels is not None:
            return self.reference_pixels
        if self.palette is not None:
            return float(self.palette.counts.sum())
        return float(_weights(self.pixels).sum())

    def cells(self) -> Cells:
        """Weighted colours in levels for `converge`: the palette's, or 8-bit bins of pixels."""
        if self.palette is not None and self.palette.dtype == np.uint8:
            codes, w = self.palette.codes, self.palette.counts.astype(np.float64)
            X = to_columns(self.palette.colours, self.domain)
        else:
            codes, X, w = self._bins()
        if self.reference_pixels is not None:
            w = w * (self.reference_pixels / w.sum())
        return cells_of(codes, X, w)

    def _bins(self) -> tuple[npt.NDArray[Any], Array, Array]:
        """Pixels joined where they agree to 8 bits: codes (u,), mean X (3, u), weights (u,)."""
        bins = palette_of(to_bytes(self.pixels))
        total = np.zeros((3, len(bins)))
        for part in slices(len(self.pixels), BLOCK):
            rows = bins.rows(to_bytes(self.pixels[part]))
            X = to_columns(self.pixels[part], self.domain) * _weights(self.pixels[part])
            for k in range(3):
                total[k] += np.bincount(rows, X[k], len(bins))
        seen = bins.counts > 0
        w = bins.counts[seen].astype(np.float64)
        return bins.codes[seen], total[:, seen] / w, w


@dataclass(frozen=True)
class Fit:
    """x₀, S, the objective, λ, γ; ‖dᵢ‖₁; D of the palette's colours; D of any columns."""

    background: Array
    spectra: Array
    objective: Array
    penalties: tuple[float, float]
    mass: Array
    table: Array | None
    columns_to_densities: Callable[[Array], Array]


def solve_converged(
    problem: Problem, lam: float | None, gamma: float | None, *, find_rank: bool
) -> Fit:
    """The objective's minimum; `find_rank` chooses the number of stains where λ, γ are free."""
    cells = problem.cells()
    if find_rank and lam is None and gamma is None:
        blocks = auto.block_means(problem.image.pixels, problem.domain)
        found = auto.find_stains(cells, blocks, problem.start, problem.report)
    else:
        used = auto.penalties(cells, lam, gamma)
        found = converge(cells, problem.start, *used, report=problem.report)
    exact = problem.palette is not None and problem.palette.dtype == np.uint8
    return Fit(
        found.background,
        found.spectra,
        found.objective,
        (found.lam, found.gamma),
        found.densities @ cells.w,
        found.densities if exact else None,
        ColumnSolver.of(found, cells.w),
    )


def solve_unrolled(
    problem: Problem,
    lam: float | None,
    gamma: float | None,
    iterations: int,
    unit_spectra: bool,
    device: str | torch.device,
) -> Fit:
    """K steps of Algorithm 1."""
    if lam is None or gamma is None:
        lam, gamma = auto.penalties(problem.cells(), lam, gamma)
    columns = _columns(problem, iterations, device)
    settings: tuple[Any, ...] = (problem.start, lam, gamma)
    if not isinstance(columns, (ArrayColumns, StreamedColumns)):
        settings = columns.like(*settings)
    done = unroll(
        [columns], *settings, iterations=iterations, unit_spectra=unit_spectra, track=True
    )
    scale, background, found, objective, m = (
        to_numpy(t[0])
        for t in (done.scale, done.background, done.spectra, done.objective, done.sums.m)
    )
    maps = [(to_numpy(M[0]), to_numpy(N[0]), to_numpy(b[0])) for M, N, b in done.maps]
    table = None
    if problem.palette is not None and not isinstance(columns, StreamedColumns):
        table = to_numpy(columns.D) * scale[:, None]
    return Fit(background, found, objective, (lam, gamma), m, table, MapChain(maps, scale))


def _columns(problem: Problem, iterations: int, device: str | torch.device) -> Any:
    """The palette's colours or the pixels as columns, in memory if they fit, else streamed."""
    palette, pixels = problem.palette, problem.pixels
    if palette is not None:
        X, w = to_columns(palette.colours, problem.domain), palette.counts.astype(np.float64)
    elif len(pixels) * problem.start.shape[1] <= _STORED:
        X, w = to_columns(pixels, problem.domain), _weights(pixels)
    else:
        return _streamed(problem, iterations)
    if str(device) == "cpu" or (str(device) == "auto" and palette is not None):
        return ArrayColumns(X, w, problem.reference_pixels)
    where = pick_device(device)
    if where.type in ("cpu", "mps"):  # the latter has no float64
        return ArrayColumns(X, w, problem.reference_pixels)
    from .autograd import StoredColumns  # brings torch, which the CPU does without

    return StoredColumns.on(where, X, w, problem.reference_pixels)


def _streamed(problem: Problem, iterations: int) -> StreamedColumns:
    pixels = problem.pixels
    parts = slices(len(pixels), BLOCK)
    visits, done = len(parts) * (3 + iterations), 0  # three passes are for the sums of X

    def blocks() -> Iterator[tuple[Array, Array]]:
        nonlocal done
        for part in parts:
            tell(problem.report, done, visits, "finding stains")
            done += 1
            yield to_columns(pixels[part], problem.domain), _weights(pixels[part])

    scale = 1.0
    if problem.reference_pixels is not None:
        scale = problem.reference_pixels / sum(_weights(pixels[part]).sum() for part in parts)
    return StreamedColumns(blocks, float(scale))


def _weights(pixels: npt.NDArray[Any]) -> Array:
    if pixels.shape[1] == 4:
        return (pixels[:, 3] > 0).astype(np.float64)
    return np.ones(len(pixels))
