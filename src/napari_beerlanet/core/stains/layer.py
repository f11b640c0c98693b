"""BeerLaNet as a torch module: images in, optical densities out, differentiable in S_init, λ, γ."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from napari_beerlanet.core.common.device import precise_dtype
from napari_beerlanet.core.common.threads import chunk_slices, map_chunks
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import FLOAT_FLOOR
from napari_beerlanet.core.stains.palette import decode
from napari_beerlanet.core.stains.settings import DEFAULT_COMPONENTS, DEFAULT_ITERATIONS, Method
from napari_beerlanet.core.stains.solver import kernels
from napari_beerlanet.core.stains.solver.spectra import (
    check_number,
    check_solver_settings,
    check_spectra,
)
from napari_beerlanet.core.stains.solver.torch_unroll import (
    TensorUnrolled,
    for_each_image,
    is_tracing,
    kernels_apply,
    refuse_second_derivative,
    unroll_tensors,
)
from napari_beerlanet.core.stains.solver.unroll import contiguous, scale_weights

_MAX_LOG_PENALTY = 40.0  # of λ and γ: beyond it nothing lives, and sums would overflow
_SORTED_CODES = 1 << 17  # pixels of an image up to which a GPU sorts its colours
_PIXELS_PER_TASK = 1 << 18  # pixels per task of the look-up's gradient: fixed, as sums depend on it
_PIXELS_PER_LOOK_UP = 1 << 16


@dataclass(frozen=True, eq=False)
class MixReadout:
    """f(W d + b) of densities d: f is the exponential if `light`, or nothing; padding stays grey.

    f takes no more than 1, so that nothing gets much brighter than the background.
    """

    weight: Tensor  # W (m, r)
    bias: Tensor  # b (m,)
    light: bool
    padding: float  # in [0, 1]
    padding_column: float  # the same, as it is in X

    def __call__(self, X: Tensor, D: Tensor, w: Tensor) -> Tensor:
        """(m, u) of columns X (c, u) with densities D (r, u)."""
        mixed = self.weight.to(D.dtype) @ D + self.bias.to(D.dtype)[:, None]
        mixed = mixed.clamp(max=1.0).exp() if self.light else mixed
        is_padding = ((X - self.padding_column).abs() < 1e-3).all(0)
        return torch.where(is_padding, self.padding, mixed)


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
        components: int = DEFAULT_COMPONENTS,
        iterations: int = DEFAULT_ITERATIONS,
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
        check_solver_settings(iterations, domain, method, reference_pixels)
        if padding is not None:
            check_number(padding, "padding", maximum=1.0)
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
        return self.penalised[0] * self.log_lam.clamp(max=_MAX_LOG_PENALTY).exp()

    @property
    def gamma(self) -> Tensor:
        """γ, a nonnegative scalar."""
        return self.penalised[1] * self.log_gamma.clamp(max=_MAX_LOG_PENALTY).exp()

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
        return self.forward_readout(images, weights)

    def forward_readout(
        self,
        images: Tensor,
        weights: Tensor | None = None,
        readout: Callable[[Tensor, Tensor, Tensor], Tensor] | None = None,
    ) -> Tensor:
        """`forward` of checked images, or (N, m, H, W) read out of their densities.

        readout(X, D, w) takes columns X (c, u), in the solver's domain, their densities D (r, u)
        and their weights w (u,) to (m, u). It is the same as a readout of every pixel at the cost
        of one of every distinct colour. Of a `MixReadout` kernels do all images side by side.
        """
        with torch.autocast(images.device.type, enabled=False):
            pairs = list(zip(images, _weights_per_image(weights), strict=False))
            plain = images.device.type == "cpu" and not images.requires_grad and not is_tracing()
            parts = for_each_image(lambda pair: self._columns(*pair), pairs, plain)
            dtype = parts[0][0].dtype
            learned = (p.to(dtype) for p in (self.spectra, self.lam, self.gamma))
            columns = [(X, w) for X, w, _ in parts]
            done = unroll_tensors(
                columns, *learned, iterations=self.iterations, unit_spectra=self.unit_spectra
            )
            if isinstance(readout, MixReadout) and all(
                kernels_apply(X) and rows is not None for X, _, rows in parts
            ):
                mixed = _mix_colours([(X, rows) for X, _, rows in parts], done, readout)
                return mixed.to(images.dtype).reshape(len(images), -1, *images.shape[2:])
            planes = []
            for (X, w, rows), table, scale in zip(parts, done.D, done.scale, strict=True):
                if readout is not None:
                    table = readout(X, table * scale[:, None], w)
                    scale = table.new_ones(len(table))
                planes.append(_colours_to_pixels(table, scale, rows))
        size = images.shape[2:]
        together = torch.stack(planes) if len(planes) > 1 else planes[0]
        return together.to(images.dtype).reshape(len(images), -1, *size)

    def _columns(
        self, image: Tensor, weights: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """An image (c, H, W) as columns X (c, u), their weights w (u,), and each pixel's row.

        The rows are None where every pixel has its own.
        """
        values, rows = image.flatten(1), None
        by_colour = self.method != "dense" and self.channels == 3 and not is_tracing()
        if by_colour and not image.requires_grad:
            values, counts, rows = distinct_colours(values)
            if rows is None and self.method == "palette":
                raise ValueError('method="palette" takes 8-bit images (k / 255); use "auto".')
        precise = precise_dtype(image.device)
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
        return X, scale_weights(w, self.reference_pixels), rows


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
        distinct, counts, rows = kernels.unique_codes(codes)
        colours = torch.from_numpy(decode(distinct, np.uint8).T / 255.0)
        return colours, torch.from_numpy(counts), torch.from_numpy(rows)
    grey = values.float() * 255
    level = grey.round()
    if not bool(((level - grey).abs() <= min(tolerance, 0.25)).all()):
        return values, values, None
    red, green, blue = level.long()
    found, numbers, places = count_codes((red << 16) | (green << 8) | blue)
    levels = torch.stack([found >> 16, (found >> 8) & 255, found & 255])
    return levels.to(precise_dtype(values.device)) / 255, numbers, places


def count_codes(codes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Distinct 24-bit codes of (n,) int64, ascending, their counts, each one's place among them.

    On any device, by a histogram of all colours that there are: a GPU adds to one faster than it
    sorts. Few codes are sorted, as that is less work than to clear the histogram.
    """
    if len(codes) < _SORTED_CODES:
        distinct, places, counts = torch.unique(codes, return_inverse=True, return_counts=True)
        return distinct, counts, places
    histogram = torch.bincount(codes, minlength=1 << 24)
    present = histogram > 0
    distinct = present.nonzero()[:, 0]
    place_of = present.cumsum(0, dtype=torch.int32) - 1
    return distinct, histogram[distinct], place_of[codes].long()


def _weights_per_image(weights: Tensor | None) -> Any:
    if weights is None:
        while True:
            yield None
    yield from weights


def _colours_to_pixels(table: Tensor, scale: Tensor, rows: Tensor | None) -> Tensor:
    """(r, n) float32 from `table` (r, u) and its `scale` (r,): column rows[i] for pixel i.

    Without rows it is the scaled table itself.
    """
    if rows is not None and table.device.type == "cpu":
        return _ColourLookUp.apply(table, scale, rows)  # type: ignore[no-any-return]
    scaled = (table * scale[:, None]).float()
    return scaled if rows is None else scaled[:, rows]


def _mix_colours(
    parts: Sequence[tuple[Tensor, Any]], done: TensorUnrolled, readout: MixReadout
) -> Tensor:
    """(N, m, n) float32: the readout of each pixel's colour, from columns X and pixels' rows."""
    images = [(contiguous(X), rows.numpy()) for X, rows in parts]
    constants = readout.light, readout.padding_column, readout.padding
    learned = readout.weight.double(), readout.bias.double()
    return _MixLookUp.apply(images, constants, *learned, done.scale, *done.D)  # type: ignore[no-any-return]


def _look_up(rows: npt.NDArray[Any], entries: npt.NDArray[Any], planes: npt.NDArray[Any]) -> None:
    """planes (m, n) = the entries (u, m) of rows (n,)."""

    which = np.arange(len(planes))

    def work(part: slice) -> None:
        kernels.look_up_rows(rows[part], entries, which, planes, part.start)

    map_chunks(work, len(rows), _PIXELS_PER_LOOK_UP)


def _scatter(rows: npt.NDArray[Any], planes: npt.NDArray[Any], u: int) -> npt.NDArray[Any]:
    """(parts, u, m) sums of planes (m, n) over the pixels of each row; add them up."""
    sums = np.zeros((len(chunk_slices(len(rows), _PIXELS_PER_TASK)), u, len(planes)))

    def work(part: slice) -> None:
        kernels.scatter_add(rows[part], planes[:, part], sums[part.start // _PIXELS_PER_TASK])

    map_chunks(work, len(rows), _PIXELS_PER_TASK)
    return sums


class _ColourLookUp(torch.autograd.Function):
    """Densities of pixels from those of colours, scaled; its gradient is a scatter-add."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, scale: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(table, scale, rows)
        columns, index = contiguous(table.detach()), rows.numpy()
        entries = np.empty(columns.shape[::-1], np.float32)
        kernels.scale_to_rows(columns, contiguous(scale.detach()), entries)
        planes = np.empty((len(columns), len(index)), np.float32)
        _look_up(index, entries, planes)
        return torch.from_numpy(planes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        refuse_second_derivative(gradient)
        table, scale, rows = (t.detach().numpy() for t in ctx.saved_tensors)
        sums = _scatter(rows, np.ascontiguousarray(gradient.numpy()), table.shape[1])
        g_table, g_scale = np.empty(table.shape), np.empty(scale.shape)
        kernels.scale_to_rows_backward(sums, contiguous(table), contiguous(scale), g_table, g_scale)
        return torch.from_numpy(g_table), torch.from_numpy(g_scale), None


class _MixLookUp(torch.autograd.Function):
    """`MixReadout` of the colours of all images, looked up for their pixels."""

    @staticmethod
    def forward(
        ctx: Any,
        images: list[tuple[npt.NDArray[Any], npt.NDArray[Any]]],
        constants: tuple[bool, float, float],
        weight: Tensor,
        bias: Tensor,
        scale: Tensor,
        *D: Tensor,
    ) -> Tensor:
        W, b, scales = (contiguous(t.detach()) for t in (weight, bias, scale))
        tables = [contiguous(t.detach()) for t in D]
        slopes = [np.empty((len(W), table.shape[1])) for table in tables]
        planes = np.empty((len(images), len(W), len(images[0][1])), np.float32)

        def mix(k: int) -> None:
            X, rows = images[k]
            entries = np.empty(slopes[k].shape[::-1], np.float32)
            kernels.mix_to_rows(X, tables[k], scales[k], W, b, *constants, entries, slopes[k])
            _look_up(rows, entries, planes[k])

        for_each_image(mix, range(len(images)))
        ctx.rows, ctx.slopes = [rows for _, rows in images], slopes
        ctx.save_for_backward(weight, scale, *D)
        return torch.from_numpy(planes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        refuse_second_derivative(gradient)
        W, scales, *tables = (contiguous(t.detach()) for t in ctx.saved_tensors)
        g_D = [np.empty(table.shape) for table in tables]
        products, g_bias = np.empty((len(tables), *W.shape)), np.empty((len(tables), len(W)))

        def pull(k: int) -> None:
            planes = np.ascontiguousarray(gradient[k].numpy())
            sums = _scatter(ctx.rows[k], planes, tables[k].shape[1])
            kernels.mix_to_rows_backward(
                sums, ctx.slopes[k], tables[k], scales[k], W, g_D[k], products[k], g_bias[k]
            )

        for_each_image(pull, range(len(tables)))
        g_weight = (products * scales[:, None]).sum(0)
        small = (g_weight, g_bias.sum(0), (products * W).sum(1), *g_D)
        return None, None, *(torch.from_numpy(g) for g in small)
