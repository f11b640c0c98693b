"""What stands in front of a network, and its fit to one whole image.

    image (N, 3, H, W) in [0, 1]  ->  densities (N, r, H, W)  ->  1×1 convolution  ->  layer 0

is BeerLaNet. Others pass the image on as it is, in grey, or as LStainNorm normalises it.
`StainMixing` is what the detector's and the classifier's network have in common. A `StainFit` is
the learned front end fitted to one whole image, then applied to any part of it: whatever is cut
from the image or resized, a colour has the same densities everywhere, so tiles have no seams in
colour, and a tile of nothing but nuclei is not taken for a dark slide.
"""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from napari_beerlanet.core.common.threads import in_numpy
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import FLOAT_FLOOR, PADDING_GREY, to_columns
from napari_beerlanet.core.stains.layer import BeerLaNet, MixReadout
from napari_beerlanet.core.stains.palette import (
    Palette,
    decode,
    distinct_rows,
    encode,
    look_up_rows,
    palette_of,
)
from napari_beerlanet.core.stains.settings import FrontEnd
from napari_beerlanet.core.stains.solver import kernels
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from napari_beerlanet.core.stains.solver.unroll import MapChain, scale_weights, unroll

PADDING = PADDING_GREY / 255
"""The grey level of padding in [0, 1]."""

FRONT_END_PREFIXES = ("stain.", "mix.", "lstainnorm.")
"""How the names of a front end's weights begin; they stay float32."""

_GREY_WEIGHTS = (0.299, 0.587, 0.114)  # ITU-R 601, as Pillow and OpenCV have it


class KeepsFloat32(nn.Module):
    """A module whose parameters follow to another device but not to another floating type."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            # Not result.float(): that would keep what half precision has rounded.
            return tensor.to(result.device) if result.is_floating_point() else result

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


class StainFrontEnd(KeepsFloat32, BeerLaNet):
    """BeerLaNet in front of a network."""


class MixConv(KeepsFloat32, nn.Conv2d):
    """The 1×1 convolution from densities to what the network gets."""

    bias: nn.Parameter


class StainMixing:
    """The front end of a network: images to what layer 0 gets.

    `front_end` "beerlanet" has `stain`, `mix` and `light`. light True: the mix is of logarithms,
    and layer 0 sees its exponential, the cells under one light. The 1×1 convolution alone is linear
    in density and leaves the range that a pretrained network knows where stains are darker than in
    training. "none" shows the image as it is, "grey" in grey, and "lstainnorm" has `lstainnorm`, a
    `core.normalization.lstainnorm.LStainNorm`. These have `untrained_stain`, a BeerLaNet that is no
    part of the network: stains are measured with it, for domain-shift warnings.

    `normalizer`, if there is one, is applied to every image before all of this.
    """

    front_end: FrontEnd = "beerlanet"
    stain: StainFrontEnd
    mix: MixConv
    light: bool
    lstainnorm: Any
    untrained_stain: tuple[StainFrontEnd]
    normalizer: Any = None

    @property
    def has_stain(self) -> bool:
        """Whether BeerLaNet is in front of the network."""
        return self.front_end == "beerlanet"

    @property
    def fits_images(self) -> bool:
        """Whether what layer 0 gets of a colour depends on the image that it is in."""
        return self.front_end in ("beerlanet", "lstainnorm")

    @property
    def measuring_stain(self) -> StainFrontEnd:
        """The BeerLaNet that stains are measured with: the network's own, or an untrained one."""
        return self.stain if self.has_stain else self.untrained_stain[0]

    def normalize(
        self, pixels: npt.NDArray[Any], notes: list[str] | None = None
    ) -> npt.NDArray[Any]:
        """An image (H, W, 3 or 4) after the normalizer, if there is one; it may add to `notes`."""
        if self.normalizer is None:
            return pixels
        done = self.normalizer.apply(pixels)
        if notes is not None:
            notes += [note for note in done.notes if note not in notes]
        rgb: npt.NDArray[Any] = done.rgb
        return rgb

    def apply_front_end(self, images: Tensor, weights: Tensor | None = None) -> Tensor:
        """What layer 0 gets (N, 3, H, W) for images (N, 3, H, W) in [0, 1]; padding stays grey.

        `weights` (N, H, W) say how much each pixel counts in the fit.
        """
        if not self.has_stain:
            statistics = None
            if self.front_end == "lstainnorm":
                statistics = self.lstainnorm.statistics(images, weights)
            return self.apply_plain(images, statistics)
        readout = self._readout() if self.mixes_densities_alone else self.mix_densities
        with torch.autocast(images.device.type, enabled=False):
            mixed = self.stain.forward_readout(images.float(), weights, readout)
        return mixed.to(images.dtype)

    @property
    def mixes_densities_alone(self) -> bool:
        """Whether `mix_inputs` are the densities as they are."""
        return True

    def apply_plain(self, images: Tensor, statistics: Tensor | None = None) -> Tensor:
        """What layer 0 gets (N, 3, H, W) by a front end that is not BeerLaNet.

        `statistics` (N or 1, 3, 3, 2) are those that LStainNorm standardises images with.
        """
        if self.front_end == "lstainnorm":
            normalised: Tensor = self.lstainnorm(images, statistics)
            return normalised
        if self.front_end == "grey":
            luma = images.new_tensor(_GREY_WEIGHTS)[:, None, None]
            return (images * luma).sum(1, keepdim=True).expand_as(images)
        return images

    def fit_front_end(self, images: Sequence[npt.NDArray[np.uint8]]) -> None:
        """Start the front end from the colours of training images (H, W, 3) uint8."""
        if self.has_stain:
            self.fit_mix(images)
        elif self.front_end == "lstainnorm":
            self.lstainnorm.fit([palette_of(image.reshape(-1, 3)) for image in images])

    def mix_densities(self, X: Tensor, D: Tensor, w: Tensor) -> Tensor:
        """What layer 0 gets (3, u) of columns X (3, u) with densities D (r, u), weights w (u,)."""
        return self._readout()(X, self.mix_inputs(X, D, w), w)

    def _readout(self) -> MixReadout:
        weight, grey = self.mix.weight.flatten(1), padding_column(self.stain.domain)
        return MixReadout(weight, self.mix.bias, self.light, PADDING, grey)

    def mix_in_kernel(
        self, X: npt.NDArray[np.float64], D: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.float32]:
        """`mix_densities` (u, 3) on a CPU, where `mixes_densities_alone`.

        One thread of torch's would wait for the others, as those of other tiles have the cores.
        """
        X, D = np.ascontiguousarray(X), np.ascontiguousarray(D)
        W, b = (p.detach().double().numpy() for p in (self.mix.weight.flatten(1), self.mix.bias))
        entries, slopes = np.empty((D.shape[1], len(W)), np.float32), np.empty((len(W), D.shape[1]))
        constants = bool(self.light), padding_column(self.stain.domain), PADDING
        kernels.mix_to_rows(X, D, np.ones(len(D)), W, b, *constants, entries, slopes)
        return entries

    def mix_inputs(self, X: Tensor, D: Tensor, w: Tensor) -> Tensor:
        """What the mix is of, (m, u): the densities."""
        return D

    def _to_intensity(self, mixed: Tensor) -> Tensor:
        return mixed.clamp(max=1.0).exp() if self.light else mixed

    @torch.no_grad()
    def fit_mix(self, images: Sequence[npt.NDArray[np.uint8]] | None = None) -> float:
        """Fit the mix to the colours of `images` (H, W, 3) uint8; returns the rms error in [0, 1].

        Densities vanish in the background whatever its light, so what comes out is every image
        under the same, mean light. None takes `typical_colours`.
        """
        m = self.mix.in_channels
        # On the CPU, wherever the network is: not every device solves equations, or has float64.
        G, P = torch.zeros(3, m + 1, m + 1), torch.zeros(3, m + 1, 1)
        images = typical_colours() if images is None else images
        pairs = [self._inputs_and_colours(image) for image in images]
        for D, x in pairs:
            # An error in ln x is an error of x times as much in x.
            w, target = (x, x.clamp(1 / 255).log()) if self.light else (torch.ones_like(x), x)
            weighted = D[None] * (w**2)[:, None]
            G += weighted @ D.T
            P += weighted @ target[..., None]
        G += 1e-5 * G[:, -1:, -1:] * torch.eye(m + 1)
        W = torch.linalg.solve(G.double(), P.double()).float()[..., 0]
        self.mix.weight.copy_(W[:, :-1, None, None])
        self.mix.bias.copy_(W[:, -1])
        errors = [((self._to_intensity(W @ D) - x) ** 2).mean() for D, x in pairs]
        return math.sqrt(float(torch.stack(errors).mean()))

    def _inputs_and_colours(self, image: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        """The mix's inputs and a row of ones (m + 1, n), colours in [0, 1] (3, n), of n pixels."""
        planes = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        x = (planes.float() / 255).to(self.mix.weight.device)
        D = self.stain.forward_readout(x[None], readout=self.mix_inputs)[0].flatten(1)
        return torch.cat([D, torch.ones_like(D[:1])]).cpu(), x.flatten(1).cpu()


def is_padding(X: Tensor, domain: Domain) -> Tensor:
    """(u,) whether columns X (3, u) have the grey of padding."""
    return ((X - padding_column(domain)).abs() < 1e-3).all(0)


def padding_column(domain: Domain) -> float:
    """The grey of padding as it is in columns X."""
    return math.log(PADDING) if domain == "log" else PADDING


def typical_colours(labs: int = 6, side: int = 96) -> list[npt.NDArray[np.uint8]]:
    """(side, side, 3) uint8 images of smear-like colours under several lights and stains.

    Rendered by Beer and Lambert from the first two default dyes: half background, two fifths pale
    cytoplasm, one tenth dark nuclei. Positions mean nothing.
    """
    random = np.random.default_rng(0)
    S = default_spectra(3)
    images = []
    for _ in range(labs):
        pale, dark = random.uniform(0.2, 0.7), random.uniform(0.7, 1.6)
        D = np.zeros((3, side * side))
        kind = random.choice(3, D.shape[1], p=[0.5, 0.4, 0.1])
        D[1, kind > 0] = pale * random.gamma(16.0, 1 / 16, (kind > 0).sum())
        D[0, kind > 1] = dark * random.gamma(9.0, 1 / 9, (kind > 1).sum())
        D[2] = 0.02 * random.random(D.shape[1])
        spectra = np.abs(S + random.normal(0, 0.05, S.shape))
        light = np.log(random.uniform(0.75, 1.0) * random.uniform(0.92, 1.0, 3))
        shown = np.exp(light[:, None] - spectra @ D) + random.normal(0, 0.01, D.shape)
        images.append(np.rint(255 * shown.clip(0, 1)).astype(np.uint8).T.reshape(side, side, 3))
    return images


@dataclass(frozen=True)
class StainFit:
    """x₀ (3,), S (3, r) and the map from colours to densities that K learned steps found.

    `codes` (u,) are the colours that it was fitted to, ascending, and `known` (r, u) float64 their
    densities, which need not be computed again. `statistics` (3, 3, 2) float64 are those of the
    image that LStainNorm standardises it with; empty of other front ends.
    """

    background: npt.NDArray[np.float64]
    spectra: npt.NDArray[np.float64]
    densities: MapChain
    domain: Domain = "log"
    codes: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint32), repr=False)
    known: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)), repr=False)
    statistics: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty(0), repr=False)

    def mix_tiles(self, network: StainMixing, tiles: npt.NDArray[np.uint8]) -> Tensor:
        """What layer 0 gets, (N, 3, h, w) float32 on its device, of tiles (N, h, w, 3)."""
        device = next(cast(nn.Module, network).parameters()).device
        with torch.no_grad():
            if not network.has_stain:
                images = torch.from_numpy(tiles).to(device).permute(0, 3, 1, 2).float() / 255
                of_image = torch.from_numpy(self.statistics.astype(np.float32)).to(device)
                return network.apply_plain(images, of_image[None])
            if device.type == "cpu":
                return torch.stack([self._mix_colours(network, tile) for tile in tiles])
            return self._mix_pixels(network, torch.from_numpy(tiles).to(device))

    def _mix_colours(self, network: StainMixing, tile: npt.NDArray[np.uint8]) -> Tensor:
        """One tile (h, w, 3), colour by colour."""
        *colours, places = self._colours(tile)
        if network.mixes_densities_alone and not in_numpy():
            table = network.mix_in_kernel(*colours)
        else:
            X, D, rows = (torch.from_numpy(part) for part in (*colours, places))
            w = torch.bincount(rows, minlength=X.shape[1])
            w = w.masked_fill(is_padding(X, self.domain), 0).to(X.dtype)
            table = network.mix_densities(X, D, w).float().T.contiguous().numpy()
        return torch.from_numpy(look_up_rows(places, table).reshape(3, *tile.shape[:2]))

    def _mix_pixels(self, network: StainMixing, tiles: Tensor) -> Tensor:
        """Tiles (N, h, w, 3), pixel by pixel: on a GPU that is faster than to sort colours."""
        n, height, width, _ = tiles.shape
        x = tiles.permute(3, 0, 1, 2).reshape(3, -1).float() / 255
        X = x.clamp(FLOAT_FLOOR, None).log() if self.domain == "log" else x
        D = X.new_zeros((0, X.shape[1]))
        maps, scale = self._maps_on(X.device)
        for step in maps:
            M, N, b = step
            D = torch.relu(M.T @ D + N.T @ X + b[:, None])
        D *= scale[:, None]
        w = (~is_padding(X, self.domain)).to(X.dtype)
        parts = (t.reshape(*t.shape[:-1], n, -1).unbind(-2) for t in (X, D, w))
        mixed = [network.mix_densities(*tile) for tile in zip(*parts, strict=True)]
        return torch.stack(mixed).reshape(n, 3, height, width)

    def _maps_on(self, device: torch.device) -> tuple[list[tuple[Tensor, ...]], Tensor]:
        """Maps and scale of the densities as float32 on a device, copied there all at once."""
        arrays = [np.asarray(t) for step in self.densities.maps for t in step]
        arrays.append(np.asarray(self.densities.scale))
        flat = np.concatenate([t.ravel() for t in arrays]).astype(np.float32)
        parts = torch.split(torch.from_numpy(flat).to(device), [t.size for t in arrays])
        *tensors, scale = (p.reshape(t.shape) for p, t in zip(parts, arrays, strict=True))
        return [tuple(tensors[k : k + 3]) for k in range(0, len(tensors), 3)], scale

    def planes(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Densities (r, h, w) float32 of pixels (h, w, 3)."""
        rows, table = self.look_up(pixels)
        return look_up_rows(rows.ravel(), table).reshape(-1, *rows.shape)

    def look_up(
        self, pixels: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """Rows (h, w) of pixels (h, w, 3) in a table (u, r) float32 of their colours' densities."""
        _, D, rows = self._colours(pixels)
        return rows.reshape(pixels.shape[:2]), np.ascontiguousarray(D.T, dtype=np.float32)

    def _colours(
        self, pixels: npt.NDArray[np.uint8]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64], npt.NDArray[np.int32]]:
        """Columns X (3, u) and densities D (r, u) of the distinct colours; each pixel's row."""
        found, rows = distinct_rows(pixels.reshape(-1, 3))
        return *self.columns_of(found), rows

    def columns_of(
        self, found: npt.NDArray[np.uint32]
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
        """Columns X (3, u) and densities D (r, u) of the colours with these codes (u,)."""
        X = to_columns(decode(found, np.uint8), self.domain)
        place = np.minimum(np.searchsorted(self.codes, found), max(len(self.codes) - 1, 0))
        new = self.codes[place] != found if len(self.codes) else np.ones(len(found), bool)
        if new.all():
            return X, self.densities(X)
        D = self.known[:, place]
        if new.any():
            D[:, new] = self.densities(np.ascontiguousarray(X[:, new]))
        return X, D


class TileMixer:
    """`mix_tiles` of a fit for many tiles of an image, by any number of threads.

    On a CPU the colours of the fit are mixed once, others in the first tile that has them.
    """

    def __init__(self, fit: StainFit) -> None:
        self.fit = fit
        self._lock = threading.Lock()
        # Colours by their codes (u,), what layer 0 gets of them (u, 3), and the row of each code.
        # Only pages that are touched take memory.
        self._mixed = np.empty(0, np.uint32), np.empty((0, 3), np.float32)
        self._index = np.zeros(kernels.CODE_COUNT, np.int32)

    def mix_tiles(self, network: StainMixing, tiles: npt.NDArray[np.uint8]) -> Tensor:
        """As `StainFit.mix_tiles`."""
        device = next(cast(nn.Module, network).parameters()).device
        colour_only = network.has_stain and network.mixes_densities_alone
        if device.type != "cpu" or not colour_only or in_numpy():
            return self.fit.mix_tiles(network, tiles)
        planes, every = np.empty((len(tiles), 3, *tiles.shape[1:3]), np.float32), np.arange(3)
        for tile, mixed in zip(tiles, planes, strict=True):
            pixels, flat = np.ascontiguousarray(tile).reshape(-1, 3), mixed.reshape(3, -1)
            while True:
                codes, entries = self._mixed
                given = pixels, codes, self._index, entries, every, flat, 0
                if len(codes) and kernels.look_up_pixels(*given):
                    break
                self._add_colours(network, pixels)
        return torch.from_numpy(planes)

    def _add_colours(self, network: StainMixing, pixels: npt.NDArray[np.uint8]) -> None:
        """Mix the colours of the fit, then those of pixels (n, 3) that have not been mixed."""
        with self._lock:
            codes, entries = self._mixed
            if len(codes):
                wanted = encode(pixels)
                # A code that was never seen has row 0, which is another's.
                wanted = wanted[codes[self._index[wanted]] != wanted]
            else:
                wanted = self.fit.codes if len(self.fit.codes) else encode(pixels)
            if not len(wanted):
                return
            new = wanted if wanted is self.fit.codes else kernels.unique_codes(wanted)[0]
            mixed = network.mix_in_kernel(*self.fit.columns_of(new))
            self._index[new] = np.arange(len(codes), len(codes) + len(new), dtype=np.int32)
            self._mixed = np.concatenate([codes, new]), np.concatenate([entries, mixed])


def own_stain(network: StainMixing, kind: str) -> StainFrontEnd:
    """The BeerLaNet of a network; a `ValueError` where another front end is before it."""
    if not network.has_stain:
        raise ValueError(
            f'This {kind} has no stain front end (front_end is "{network.front_end}"); decompose '
            "the image by itself."
        )
    return network.stain


def decompose_settings(stain: BeerLaNet) -> dict[str, Any]:
    """How a front end decomposes stains, as arguments of `decompose`."""
    with torch.no_grad():
        S, lam, gamma = (p.cpu().double() for p in (stain.spectra, stain.lam, stain.gamma))
    return {
        "iterations": stain.iterations,
        "spectra": S.numpy(),
        "lam": float(lam),
        "gamma": float(gamma),
        "domain": stain.domain,
        "unit_spectra": stain.unit_spectra,
        "reference_pixels": stain.reference_pixels,
    }


def fit_stain(network: StainMixing, pixels: npt.NDArray[np.uint8]) -> StainFit:
    """Fit the front end to an image (H, W, 3) uint8; pixels of the padding's grey weigh zero."""
    return fit_palette(network, palette_of(np.ascontiguousarray(pixels).reshape(-1, 3)))


def fit_palette(network: StainMixing, palette: Palette) -> StainFit:
    """Fit the front end to the colours of an image and their counts.

    Of a network without BeerLaNet its untrained one is fitted, which its statistics are of.
    """
    stain: Any = network.measuring_stain
    colours = palette.colours
    w = np.where((colours == PADDING_GREY).all(1), 0.0, palette.counts)
    columns = to_columns(colours, stain.domain), scale_weights(w, stain.reference_pixels)
    with torch.no_grad():
        learned = [p.cpu().double().numpy() for p in (stain.spectra, stain.lam, stain.gamma)]
    settings = {"iterations": stain.iterations, "unit_spectra": stain.unit_spectra}
    done = unroll(*columns, learned[0], *(float(p) for p in learned[1:]), **settings)
    chain, known = MapChain(done.maps, done.scale), done.D * done.scale[:, None]
    fit = StainFit(done.background, done.spectra, chain, stain.domain, palette.codes, known)
    if network.front_end == "lstainnorm":
        return replace(fit, statistics=network.lstainnorm.palette_statistics(palette))
    return fit


def fit_to_arrays(fit: StainFit) -> dict[str, npt.NDArray[Any]]:
    """A fit as plain arrays."""
    arrays = {"background": fit.background, "spectra": fit.spectra, "scale": fit.densities.scale}
    for k, step in enumerate(fit.densities.maps):
        arrays |= {f"{name}{k}": np.asarray(part) for name, part in zip("MNb", step, strict=True)}
    arrays |= {"statistics": fit.statistics} if fit.statistics.size else {}
    return {**arrays, "domain": np.array(fit.domain), "codes": fit.codes, "known": fit.known}


def fit_from_arrays(arrays: dict[str, npt.NDArray[Any]]) -> StainFit:
    """The inverse of `fit_to_arrays`."""
    count = sum(name.startswith("M") for name in arrays)
    maps = [(arrays[f"M{k}"], arrays[f"N{k}"], arrays[f"b{k}"]) for k in range(count)]
    chain = MapChain(maps, arrays["scale"])
    domain: Any = str(arrays["domain"])
    known = arrays["codes"], arrays["known"], arrays.get("statistics", np.empty(0))
    return StainFit(arrays["background"], arrays["spectra"], chain, domain, *known)


def weights_digest(network: nn.Module) -> str:
    """SHA-256 of all weights of a network, and of what else decides on its results."""
    digest = hashlib.sha256()
    front_end = getattr(network, "front_end", "beerlanet")
    if front_end != "beerlanet":
        digest.update(front_end.encode())
    normalizer = getattr(network, "normalizer", None)
    if normalizer is not None:
        arrays, settings = normalizer.state()
        digest.update(json.dumps([normalizer.method, settings], sort_keys=True).encode())
        for name in sorted(arrays):
            digest.update(name.encode() + np.ascontiguousarray(arrays[name]).tobytes())
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().numpy().tobytes())
    return digest.hexdigest()
