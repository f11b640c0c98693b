"""BeerLaNet as a torch module: images in, optical densities out, differentiable in S_init, λ, γ."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from . import kernels
from .beerlanet import unroll
from .columns import StoredColumns
from .images import FLOAT_FLOOR, Domain
from .palette import count_codes, decode, rows_of
from .threads import run_all, slices

Method = Literal["auto", "palette", "dense"]
_SCATTER = 1 << 17  # pixels per task of the look-up's gradient: fixed, as sums depend on it
_DYES = {
    "haematoxylin": (0.65, 0.70, 0.29),
    "eosin": (0.07, 0.99, 0.11),
    "DAB": (0.27, 0.57, 0.78),
    "methylene blue": (0.83, 0.51, 0.20),
    "grey": (1.0, 1.0, 1.0),
    "red absorber": (0.98, 0.14, 0.13),
    "blue absorber": (0.12, 0.20, 0.97),
}


def default_spectra(components: int, channels: int = 3) -> npt.NDArray[np.float64]:
    """The start S_init (channels, components) that is used where none is given; unit columns.

    For RGB these are haematoxylin, eosin, DAB, methylene blue, grey, a red and a blue absorber,
    then directions that fill the nonnegative octant evenly (a golden-ratio sequence). For other
    channel counts they are drawn from that orthant with a fixed seed.
    """
    if channels != 3:
        columns = np.abs(np.random.default_rng(0).normal(size=(components, channels)))
    else:
        k = np.arange(max(components - len(_DYES), 0))[:, None]
        plastic = 1.32471795724474602596  # its powers give the evenest sequence in two dimensions
        height, turn = np.modf(0.5 + k * np.array([plastic**-1, plastic**-2]))[0].T
        radius = np.sqrt(1 - height**2)
        filling = (radius * np.cos(turn * np.pi / 2), radius * np.sin(turn * np.pi / 2), height)
        columns = np.vstack([list(_DYES.values()), np.stack(filling, 1)])[:components]
    unit: npt.NDArray[np.float64] = columns / np.linalg.norm(columns, axis=1, keepdims=True)
    return unit.T


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
        self.components, self.iterations, self.channels = start.shape[1], iterations, channels
        self.domain, self.unit_spectra, self.method = domain, unit_spectra, method
        self.reference_pixels, self.padding = reference_pixels, padding
        self.raw_spectra = nn.Parameter(torch.tensor(start, dtype=torch.float32))
        self.log_lam = nn.Parameter(torch.tensor(_log(lam, "lam"), dtype=torch.float32))
        self.log_gamma = nn.Parameter(torch.tensor(_log(gamma, "gamma"), dtype=torch.float32))

    @property
    def spectra(self) -> Tensor:
        """S_init (channels, r), nonnegative."""
        return self.raw_spectra.abs()

    @property
    def lam(self) -> Tensor:
        """λ, a nonnegative scalar."""
        return self.log_lam.exp()

    @property
    def gamma(self) -> Tensor:
        """γ, a nonnegative scalar."""
        return self.log_gamma.exp()

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
        if weights is not None and weights.numel() != images[:, 0].numel():
            raise ValueError(
                f"weights {tuple(weights.shape)} do not fit images {tuple(images.shape)}."
            )
        if images.dtype == torch.uint8:
            images = images.float() / 255
        if images.numel() == 0:
            return images.new_zeros((len(images), self.components, *images.shape[2:]))
        with torch.autocast(images.device.type, enabled=False):
            parts = [self._columns(*pair) for pair in zip(images, _each(weights), strict=False)]
            dtype = parts[0][0].X.dtype
            learned = (p.to(dtype) for p in (self.spectra, self.lam, self.gamma))
            columns = [part for part, _ in parts]
            done = unroll(
                columns, *learned, iterations=self.iterations, unit_spectra=self.unit_spectra
            )
            planes = [
                _spread(image.D * a[:, None], rows)
                for (image, rows), a in zip(parts, done.scale, strict=True)
            ]
        size = images.shape[2:]
        return torch.stack(planes).to(images.dtype).reshape(len(images), -1, *size)

    def _columns(
        self, image: Tensor, weights: Tensor | None
    ) -> tuple[StoredColumns, Tensor | None]:
        """An image (c, H, W) as columns, and the row of each pixel among them (None: its own)."""
        values, rows = image.flatten(1), None
        if self.method != "dense" and self.channels == 3 and not image.requires_grad:
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
            w = torch.where(((values - self.padding).abs() < 1e-4).all(0), 0.0, w)
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
        found, counts = count_codes(codes)
        colours = torch.from_numpy(decode(found, np.uint8).T / 255.0)
        return colours, torch.from_numpy(counts), torch.from_numpy(rows_of(codes, found))
    grey = values.float() * 255
    level = grey.round()
    if not bool(((level - grey).abs() <= min(tolerance, 0.25)).all()):
        return values, values, None
    key = (level[0] * 65536 + level[1] * 256 + level[2]).long()
    keys, rows, counts = torch.unique(key, return_inverse=True, return_counts=True)
    return torch.stack([keys >> 16, (keys >> 8) & 255, keys & 255]) / 255.0, counts, rows


def check_spectra(
    spectra: npt.ArrayLike | None, components: int, channels: int = 3
) -> npt.NDArray[np.float64]:
    """S_init (channels, r) as float64, or a `ValueError` of one sentence."""
    if isinstance(components, bool) or int(components) != components or components < 1:
        raise ValueError(f"components must be a whole number of at least 1, not {components!r}.")
    if spectra is None:
        return default_spectra(int(components), channels)
    start = np.asarray(spectra, dtype=np.float64)
    if start.ndim != 2 or start.shape[0] != channels or start.shape[1] < 1:
        raise ValueError(
            f"spectra must have shape ({channels}, components), one column each, not {start.shape}."
        )
    if not np.isfinite(start).all() or (start < 0).any():
        raise ValueError("spectra must be finite and nonnegative.")
    return start


def check_solver(iterations: Any, domain: str, method: str, reference_pixels: float | None) -> None:
    """Settings that decompose and BeerLaNet share, or a `ValueError` of one sentence."""
    if (
        isinstance(iterations, bool)
        or not isinstance(iterations, (int, np.integer))
        or iterations < 1
    ):
        raise ValueError(f"iterations must be a whole number of at least 1, not {iterations!r}.")
    if domain not in ("log", "intensity"):
        raise ValueError(f'domain must be "log" or "intensity", not {domain!r}.')
    if method not in ("auto", "palette", "dense"):
        raise ValueError(f'method must be "auto", "palette" or "dense", not {method!r}.')
    if reference_pixels is not None and not 0 < reference_pixels < math.inf:
        raise ValueError(f"reference_pixels must be positive or None, not {reference_pixels!r}.")


def _log(value: float, name: str) -> float:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a number of at least 0, not {value!r}.")
    return math.log(value) if value > 0 else -math.inf


def _each(weights: Tensor | None) -> Any:
    if weights is None:
        while True:
            yield None
    yield from weights


def _spread(table: Tensor, rows: Tensor | None) -> Tensor:
    """(r, n) float32 from `table` (r, u): column rows[i] for pixel i, or the table itself."""
    if rows is None:
        return table.float()
    if table.device.type == "cpu":
        return _LookUp.apply(table, rows)  # type: ignore[no-any-return]
    return table.float()[:, rows]


class _LookUp(torch.autograd.Function):
    """Densities of pixels from densities of colours; its gradient is a scatter-add."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.colours = table.shape[1]
        entries = np.ascontiguousarray(table.detach().numpy().T, dtype=np.float32)
        index = rows.numpy()
        planes = np.empty((entries.shape[1], len(index)), np.float32)
        run_all(
            [
                lambda part=part: kernels.look_up_rows(index[part], entries, planes[:, part])  # type: ignore[misc]
                for part in slices(len(index), _SCATTER)
            ]
        )
        return torch.from_numpy(planes)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        index, planes = rows.numpy(), np.ascontiguousarray(gradient.numpy())

        def scatter(part: slice) -> npt.NDArray[np.float64]:
            table = np.zeros((ctx.colours, planes.shape[0]))
            kernels.scatter_add(index[part], planes[:, part], table)
            return table

        parts = run_all([lambda p=p: scatter(p) for p in slices(len(index), _SCATTER)])  # type: ignore[misc]
        return torch.from_numpy(np.ascontiguousarray(sum(parts).T)), None  # type: ignore[union-attr]
