"""BeerLaNet as a torch module: images in, optical densities out, differentiable in S_init, λ, γ."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from . import kernels
from .autograd import StoredColumns, is_recorded, refuse_second_derivative, unroll_tensors
from .columns import contiguous
from .images import FLOAT_FLOOR, Domain
from .palette import decode
from .spectra import check_number, check_solver, check_spectra
from .threads import run_all, slices

Method = Literal["auto", "palette", "dense"]
_LARGEST_LOG = 40.0  # of λ and γ: beyond it nothing lives, and sums would overflow
_SCATTER = 1 << 18  # pixels per task of the look-up's gradient: fixed, as sums depend on it


class BeerLaNet(nn.Module):
    """K unrolled iterations of Algorithm 1: (N, c, H, W) in [0, 1] to densities (N, r, H, W).

    S_init, λ and γ are learned; they are nonnegative by construction (an absolute value, and
    exponentials) and nothing is changed in `forward`. Every image is solved by itself, in float64
    (float32 where the device has no float64). `method="auto"` recognises 8-bit images, also as
    float / 255, and solves for their distinct colours.

    Parameters
    ----------
    components, iterations
        r and K.
    spectra
        S_init (channels, r), nonnegative; None is `default_spectra`.
    lam, gamma
        Start values of λ and γ, at least 0. A zero stays zero in training.
    domain
        "log" (Beer–Lambert) or "intensity" (as the authors' published code).
    unit_spectra, reference_pixels
        See METHOD: unit columns of S after each iteration; total weight that an image is scaled to.
    padding
        Grey value in [0, 1] of pixels that weigh zero, for instance 114 / 255.
    """

    def __init__(
        self,
        components: int = 8,
        iterations: int = 10,
        *,
        spectra: npt.ArrayLike | None = None,
        lam: float = 0.01,
        gamma: float = 0.1,
        domain: Domain = "log",
        unit_spectra: bool = True,
        reference_pixels: float | None = None,
        padding: float | None = None,
        method: Method = "auto",
        channels: int = 3,
    ) -> None:
        super().__init__()
        start = check_spectra(spectra, components, channels)
        check_solver(iterations, domain, method, reference_pixels)
        if padding is not None:
            check_number(padding, "padding", most=1.0)
        self.components, self.iterations, self.channels = start.shape[1], iterations, channels
        self.domain, self.unit_spectra, self.method = domain, unit_spectra, method
        self.reference_pixels, self.padding = reference_pixels, padding
        self.raw_spectra = nn.Parameter(torch.tensor(start, dtype=torch.float32))
        lam, gamma = check_number(lam, "lam"), check_number(gamma, "gamma")
        self.log_lam = nn.Parameter(torch.tensor(math.log(lam or 1.0)))
        self.log_gamma = nn.Parameter(torch.tensor(math.log(gamma or 1.0)))
        # The logarithm of zero would be no number to take a step from.
        self.register_buffer("penalised", torch.tensor([lam > 0, gamma > 0]))
        self.penalised: Tensor

    @property
    def spectra(self) -> Tensor:
        """S_init (channels, r), nonnegative."""
        return self.raw_spectra.abs()

    @property
    def lam(self) -> Tensor:
        """λ, a nonnegative scalar."""
        return self.penalised[0] * self.log_lam.clamp(max=_LARGEST_LOG).exp()

    @property
    def gamma(self) -> Tensor:
        """γ, a nonnegative scalar."""
        return self.penalised[1] * self.log_gamma.clamp(max=_LARGEST_LOG).exp()

    def extra_repr(self) -> str:
        """What `print` shows."""
        return (
            f"components={self.components}, iterations={self.iterations}, domain={self.domain!r}, "
            f"unit_spectra={self.unit_spectra}, reference_pixels={self.reference_pixels}"
        )

    def forward(self, images: Tensor, weights: Tensor | None = None) -> Tensor:
        """Densities (N, r, H, W) of images (N, c, H, W), in the images' floating type.

        `weights` (N, H, W) or (N, 1, H, W), nonnegative, say how much each pixel counts in the
        sums; a pixel of weight zero still gets its densities.
        """
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise ValueError(
                f"BeerLaNet takes (N, {self.channels}, H, W), not {tuple(images.shape)}."
            )
        n, _, height, width = images.shape
        fitting = ((n, height, width), (n, 1, height, width))
        if weights is not None and tuple(weights.shape) not in fitting:
            raise ValueError(f"weights must be {fitting[0]}, not {tuple(weights.shape)}.")
        if not (images.is_floating_point() or images.dtype == torch.uint8):
            raise ValueError(f"BeerLaNet takes uint8 or floats in [0, 1], not {images.dtype}.")
        if images.dtype == torch.uint8:
            images = images.float() / 255
        if images.numel() == 0:
            return images.new_zeros((len(images), self.components, *images.shape[2:]))
        return self.read(images, weights)

    def read(
        self,
        images: Tensor,
        weights: Tensor | None = None,
        readout: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`forward` of checked images, or (N, m, H, W) read out of their densities.

        readout(X, D) takes columns X (c, u), in the solver's domain, and their densities D (r, u)
        to (m, u). It is the same as a readout of every pixel at the cost of one of every distinct
        colour.
        """
        with torch.autocast(images.device.type, enabled=False):
            parts = [self._columns(*pair) for pair in zip(images, _each(weights), strict=False)]
            dtype = parts[0][0].X.dtype
            learned = (p.to(dtype) for p in (self.spectra, self.lam, self.gamma))
            columns = [part for part, _ in parts]
            done = unroll_tensors(
                columns, *learned, iterations=self.iterations, unit_spectra=self.unit_spectra
            )
            planes = []
            for (image, rows), a in zip(parts, done.scale, strict=True):
                table, scale = image.D, a
                if readout is not None:
                    table = readout(image.X, table * a[:, None])
                    scale = table.new_ones(len(table))
                planes.append(_spread(table, scale, rows))
        size = images.shape[2:]
        together = torch.stack(planes) if len(planes) > 1 else planes[0]
        return together.to(images.dtype).reshape(len(images), -1, *size)

    def _columns(
        self, image: Tensor, weights: Tensor | None
    ) -> tuple[StoredColumns, Tensor | None]:
        """An image (c, H, W) as columns, and the row of each pixel among them (None: its own)."""
        values, rows = image.flatten(1), None
        by_colour = self.method != "dense" and self.channels == 3 and not is_recorded()
        if by_colour and not image.requires_grad:
            values, counts, rows = distinct_colours(values)
            if rows is None and self.method == "palette":
                raise ValueError('method="palette" takes 8-bit images (k / 255); use "auto".')
        precise = torch.float32 if image.device.type == "mps" else torch.float64
        values = values.to(precise)
        if weights is not None:
            flat = weights.reshape(-1).to(precise)
            w = flat if rows is None else flat.new_zeros(values.shape[1]).index_add_(0, rows, flat)
        else:
            w = values.new_ones(values.shape[1]) if rows is None else counts.to(precise)
        if self.padding is not None:
            near = max(1e-4, torch.finfo(image.dtype).eps)
            w = torch.where(((values - self.padding).abs() < near).all(0), 0.0, w)
        X = values.clamp(FLOAT_FLOOR, None).log() if self.domain == "log" else values
        return StoredColumns(X, w, self.reference_pixels), rows


def distinct_colours(values: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Distinct colours (3, u) of 8-bit `values` (3, n) in [0, 1], their counts, each pixel's row.

    Values that are not k / 255 come back as they are, with rows None.
    """
    tolerance = 4 * 255 * torch.finfo(values.dtype).eps
    if tolerance > 1:  # too coarse a type to tell grey levels apart
        return values, values, None
    if values.device.type == "cpu":
        planes = np.ascontiguousarray(values.detach().float().numpy())
        codes = np.empty(planes.shape[1], np.uint32)
        if not kernels.encode_planes(planes, np.float32(min(tolerance, 0.25)), codes):
            return values, values, None
        found, counts, rows = kernels.number_codes(codes)
        colours = torch.from_numpy(decode(found, np.uint8).T / 255.0)
        return colours, torch.from_numpy(counts), torch.from_numpy(rows)
    grey = values.float() * 255
    level = grey.round()
    if not bool(((level - grey).abs() <= min(tolerance, 0.25)).all()):
        return values, values, None
    key = (level[0] * 65536 + level[1] * 256 + level[2]).long()
    keys, rows, counts = torch.unique(key, return_inverse=True, return_counts=True)
    return torch.stack([keys >> 16, (keys >> 8) & 255, keys & 255]) / 255.0, counts, rows


def _each(weights: Tensor | None) -> Any:
    if weights is None:
        while True:
            yield None
    yield from weights


def _spread(table: Tensor, scale: Tensor, rows: Tensor | None) -> Tensor:
    """(r, n) float32 from `table` (r, u) and its `scale` (r,): column rows[i] for pixel i.

    Without rows it is the scaled table itself.
    """
    if rows is not None and table.device.type == "cpu":
        return _LookUp.apply(table, scale, rows)  # type: ignore[no-any-return]
    scaled = (table * scale[:, None]).float()
    return scaled if rows is None else scaled[:, rows]


class _LookUp(torch.autograd.Function):
    """Densities of pixels from those of colours, scaled; its gradient is a scatter-add."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(table, scale, rows)
        columns, index = contiguous(table.detach()), rows.numpy()
        entries = np.empty(columns.shape[::-1], np.float32)
        kernels.scale_to_rows(columns, contiguous(scale.detach()), entries)
        planes = np.empty((len(columns), len(index)), np.float32)
        run_all(
            [
                lambda part=part: kernels.look_up_rows(index[part], entries, planes[:, part])  # type: ignore[misc]
                for part in slices(len(index), _SCATTER)
            ]
        )
        return torch.from_numpy(planes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative(gradient)
        table, scale, rows = (t.detach().numpy() for t in ctx.saved_tensors)
        planes = np.ascontiguousarray(gradient.numpy())
        parts = slices(len(rows), _SCATTER)
        sums = np.zeros((len(parts), *table.shape[::-1]))
        run_all(
            [
                lambda k=k, part=part: kernels.scatter_add(rows[part], planes[:, part], sums[k])  # type: ignore[misc]
                for k, part in enumerate(parts)
            ]
        )
        g_table, g_scale = np.empty(table.shape), np.empty(scale.shape)
        kernels.scale_to_rows_backward(sums, contiguous(table), contiguous(scale), g_table, g_scale)
        return torch.from_numpy(g_table), torch.from_numpy(g_scale), None
