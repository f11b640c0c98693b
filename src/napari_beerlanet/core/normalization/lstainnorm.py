"""LStainNorm (Ke et al., Medical Image Analysis 101:103424, 2025), a trainable front end.

In each of three colour spaces s (LAB, HSV, RGB) an image is standardised channel by channel and
given the training set's mean and deviation, or what training makes of them:

    x_s = RGB of ((z − mean(z)) / sd(z) · (σ₀ + σ) + μ₀ + μ),    z the image in the space s.

One self-attention for all three, A, says where each of them counts, and the result is their
weighted mean:

    A(x) = softmax over positions of (q(x) k(x)ᵀ) applied to v(x), with q, k, v 1×1 convolutions
           that are max-pooled; upsampled to the image
    w_s = ((1 + γ_s) |A(x_s)| + x_s) / x_s, divided by its sum over s, then a w + b
    result = Σ w_s x_s / Σ w_s

Learned are σ and μ (starting at 0), q, k, v, γ (0), a and b (1): 54 numbers. The statistics of an
image come from its palette, so tiles of one image are standardised alike; attention sees a tile.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from napari_beerlanet.core.stains.front_end import PADDING, KeepsFloat32, typical_colours
from napari_beerlanet.core.stains.palette import Palette, palette_of

SPACES = ("lab", "hsv", "rgb")

_MIN_SD = 1e-3  # by which a channel is divided at least: noise is not blown up
_DARKEST = 1 / 255  # by which attention is divided at least
_LAB_SCALE = (100.0, 110.0, 110.0)  # so that all channels are of about the same range
_WHITE = (0.95047, 1.0, 1.08883)  # D65
_XYZ = (
    (0.412453, 0.357580, 0.180423),
    (0.212671, 0.715160, 0.072169),
    (0.019334, 0.119193, 0.950227),
)  # of linear RGB
_DELTA = 6 / 29


class LStainNorm(KeepsFloat32):
    """Images (N, 3, H, W) in [0, 1] to the same, normalised as training has learned it.

    Parameters
    ----------
    pool
        Pixels along the side of a block that attention sees as one. Its memory grows with
        (H W / pool²)²: 8, as in the paper, is for crops, and an image of 640 × 640 takes 32.

    Pixels of the padding's grey count nowhere and stay as they are.
    """

    template_mean: Tensor
    template_sd: Tensor

    def __init__(self, pool: int = 8) -> None:
        super().__init__()
        self.pool = pool
        self.register_buffer("template_mean", torch.zeros(3, 3))  # μ₀ by space and channel
        self.register_buffer("template_sd", torch.ones(3, 3))  # σ₀
        self.mean = nn.Parameter(torch.zeros(3, 3))
        self.sd = nn.Parameter(torch.zeros(3, 3))
        self.query = nn.Conv2d(3, 1, 1, bias=False)
        self.key = nn.Conv2d(3, 1, 1, bias=False)
        self.value = nn.Conv2d(3, 3, 1, bias=False)
        self.gamma = nn.Parameter(torch.zeros(3))
        self.scale = nn.Parameter(torch.ones(3, 3))
        self.shift = nn.Parameter(torch.ones(3, 3))
        self.fit([palette_of(image.reshape(-1, 3)) for image in typical_colours()])

    @torch.no_grad()
    def fit(self, palettes: Sequence[Palette]) -> None:
        """Take σ₀ and μ₀ from the colours of training images: the mean of each image's own."""
        each = np.mean([self.palette_statistics(palette) for palette in palettes], axis=0)
        # Rounded here: a device without float64 could not.
        self.template_mean.copy_(torch.from_numpy(each[..., 0]).float())
        self.template_sd.copy_(torch.from_numpy(each[..., 1]).float())

    def palette_statistics(self, palette: Palette) -> npt.NDArray[np.float64]:
        """(3, 3, 2) float64: mean and deviation by space and channel of an image's colours."""
        colours = torch.from_numpy(
            palette.colours.T.astype(np.float64) / np.iinfo(palette.dtype).max
        )
        counts = torch.from_numpy(palette.counts.astype(np.float64))
        return self._statistics(colours[None, :, :, None], counts[None, :, None])[0].numpy()

    def statistics(self, images: Tensor, weights: Tensor | None = None) -> Tensor:
        """(N, 3, 3, 2): mean and deviation by space and channel of images (N, 3, H, W).

        `weights` (N, H, W) say how much each pixel counts.
        """
        with torch.autocast(images.device.type, enabled=False):
            return self._statistics(images.float(), weights)

    def _statistics(self, x: Tensor, weights: Tensor | None) -> Tensor:
        w = (~_is_padding(x)).to(x.dtype)
        w = w if weights is None else w * weights.reshape(w.shape).to(x.dtype)
        total = w.sum((2, 3)).clamp(min=1e-12)
        found = []
        for space in SPACES:
            z = to_space(x, space)
            mean = (w * z).sum((2, 3)) / total
            variance = (w * (z - mean[..., None, None]) ** 2).sum((2, 3)) / total
            found.append(torch.stack([mean, variance.sqrt()], dim=-1))
        return torch.stack(found, dim=1)

    def forward(self, images: Tensor, statistics: Tensor | None = None) -> Tensor:
        """Images (N, 3, H, W) in [0, 1], normalised.

        `statistics` (N or 1, 3, 3, 2) are those of the images that these are parts of; None takes
        their own.
        """
        with torch.autocast(images.device.type, enabled=False):
            x = images.float()
            if statistics is None:
                statistics = self._statistics(x, None)
            padding = _is_padding(x)
            each = [self._recolour(x, k, statistics[:, k]) for k in range(len(SPACES))]
            weights = [self._weight(x_s, k, ~padding) for k, x_s in enumerate(each)]
            total = torch.stack(weights).sum(0)
            mapped = [
                (self.scale[k, :, None, None] * w / total + self.shift[k, :, None, None]).relu()
                for k, w in enumerate(weights)
            ]
            fused = torch.stack([w * x_s for w, x_s in zip(mapped, each, strict=True)]).sum(0)
            fused = fused / torch.stack(mapped).sum(0).clamp(min=1e-6)
            fused = torch.where(padding, PADDING, fused)
        return fused.to(images.dtype)

    def _recolour(self, x: Tensor, k: int, statistics: Tensor) -> Tensor:
        """x_s of the k-th space."""
        mean, sd = (part[..., None, None] for part in statistics.to(x.dtype).unbind(-1))
        z = (to_space(x, SPACES[k]) - mean) / sd.clamp(min=_MIN_SD)
        target_sd = (self.template_sd[k] + self.sd[k])[:, None, None]
        target_mean = (self.template_mean[k] + self.mean[k])[:, None, None]
        return from_space(z * target_sd + target_mean, SPACES[k])

    def _weight(self, x: Tensor, k: int, counted: Tensor) -> Tensor:
        """w_s before it is divided by the sum, at least 1."""
        attention = self.attention(x, counted).abs()
        x = x.clamp(min=_DARKEST)
        return ((1 + self.gamma[k]).clamp(min=0) * attention + x) / x

    def attention(self, x: Tensor, counted: Tensor) -> Tensor:
        """A(x) (N, 3, H, W) of x; pixels that are not `counted` (N, 1, H, W) are not seen."""
        n, _, height, width = x.shape
        side = min(self.pool, height), min(self.pool, width)

        def pooled(values: Tensor) -> Tensor:
            hidden = values.masked_fill(~counted, -torch.inf)
            return functional.max_pool2d(hidden, side, ceil_mode=True)

        q, k, v = (pooled(part(x)) for part in (self.query, self.key, self.value))
        blank = q.isneginf().flatten(2)  # blocks of padding alone
        size = q.shape[2:]
        q, k, v = (part.masked_fill(part.isneginf(), 0.0).flatten(2) for part in (q, k, v))
        scores = (q.transpose(1, 2) @ k).masked_fill(blank, -1e9)  # (N, to, from)
        seen = v @ scores.softmax(-1).transpose(1, 2)
        return functional.interpolate(
            seen.reshape(n, 3, *size), (height, width), mode="bilinear", align_corners=False
        )


def _is_padding(x: Tensor) -> Tensor:
    """(N, 1, H, W): which pixels of (N, 3, H, W) have the grey of padding."""
    return ((x - PADDING).abs() < 1e-3).all(1, keepdim=True)


# --- colour spaces: (N, 3, H, W) ------------------------------------------------------------------


def to_space(x: Tensor, space: str) -> Tensor:
    """RGB in [0, 1] in another space: "lab" (D65, each channel about −1 to 1), "hsv", "rgb"."""
    if space == "lab":
        return _to_lab(x)
    return _to_hsv(x) if space == "hsv" else x


def from_space(z: Tensor, space: str) -> Tensor:
    """The RGB in [0, 1] of another space; what no screen shows is clipped."""
    if space == "lab":
        return _from_lab(z)
    return _from_hsv(z) if space == "hsv" else z.clamp(0, 1)


def _mix(matrix: Tensor, x: Tensor) -> Tensor:
    return torch.einsum("ij,njhw->nihw", matrix, x)


def _xyz_matrix(x: Tensor) -> Tensor:
    """Of linear RGB, relative to white."""
    return x.new_tensor(_XYZ) / x.new_tensor(_WHITE)[:, None]


def _to_lab(x: Tensor) -> Tensor:
    linear = torch.where(x <= 0.04045, x / 12.92, ((x + 0.055) / 1.055).clamp(min=0) ** 2.4)
    t = _mix(_xyz_matrix(x), linear)
    root = t.clamp(min=_DELTA**3) ** (1 / 3)
    f = torch.where(t > _DELTA**3, root, t / (3 * _DELTA**2) + 4 / 29)
    fx, fy, fz = f.unbind(1)
    lab = torch.stack([116 * fy - 16, 500 * (fx - fy), 200 * (fy - fz)], dim=1)
    return lab / x.new_tensor(_LAB_SCALE)[:, None, None]


def _from_lab(z: Tensor) -> Tensor:
    light, a, b = (z * z.new_tensor(_LAB_SCALE)[:, None, None]).unbind(1)
    fy = (light + 16) / 116
    f = torch.stack([fy + a / 500, fy, fy - b / 200], dim=1)
    t = torch.where(f > _DELTA, f**3, 3 * _DELTA**2 * (f - 4 / 29))
    linear = _mix(torch.linalg.inv(_xyz_matrix(z)), t).clamp(0, 1)
    # The root has no finite slope at 0, and where() passes on the gradient of both branches.
    bright = 1.055 * linear.clamp(min=0.0031308) ** (1 / 2.4) - 0.055
    return torch.where(linear <= 0.0031308, 12.92 * linear, bright)


def _to_hsv(x: Tensor) -> Tensor:
    value, low = x.amax(1), x.amin(1)
    spread = value - low
    safe = torch.where(spread > 0, spread, 1.0)
    r, g, b = x.unbind(1)
    hue = torch.where(
        value == r, (g - b) / safe, torch.where(value == g, 2 + (b - r) / safe, 4 + (r - g) / safe)
    )
    hue = torch.where(spread > 0, (hue / 6) % 1, 0.0)
    saturation = torch.where(value > 0, spread / torch.where(value > 0, value, 1.0), 0.0)
    return torch.stack([hue, saturation, value], dim=1)


def _from_hsv(z: Tensor) -> Tensor:
    hue = z[:, 0] % 1
    saturation, value = z[:, 1].clamp(0, 1), z[:, 2].clamp(0, 1)
    channels = []
    for n in (5, 3, 1):
        k = (n + 6 * hue) % 6
        part = torch.minimum(k, 4 - k).clamp(0, 1)
        channels.append(value - value * saturation * part)
    return torch.stack(channels, dim=1)
