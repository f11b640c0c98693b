"""The learned stain front end fitted to one whole image, then applied to any part of it.

Whatever is cut from the image or resized, a colour has the same densities everywhere: tiles have
no seams in colour, and a tile of nothing but nuclei is not taken for a dark slide.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from napari_beerlanet.core.common.storage import pixel_hash
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.tile_store import Arrays
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.images.rgb import FLOAT_FLOOR, PADDING_GREY, to_columns
from napari_beerlanet.core.stains.palette import Palette, decode, encode, palette_of
from napari_beerlanet.core.stains.solver import kernels
from napari_beerlanet.core.stains.solver.columns import ArrayColumns, MapChain
from napari_beerlanet.core.stains.solver.unroll import unroll

"""The grey level of padding."""


@dataclass(frozen=True)
class StainFit:
    """x₀ (3,), S (3, r) and the map from colours to densities that K learned steps found.

    `codes` (u,) are the colours that it was fitted to, ascending, and `known` (r, u) float64 their
    densities, which need not be computed again.
    """

    background: npt.NDArray[np.float64]
    spectra: npt.NDArray[np.float64]
    densities: MapChain
    domain: Domain = "log"
    codes: npt.NDArray[Any] = field(default_factory=lambda: np.empty(0, np.uint32), repr=False)
    known: npt.NDArray[np.float64] = field(default_factory=lambda: np.empty((0, 0)), repr=False)

    def mix_tiles(self, network: StainDetectionModel, tiles: npt.NDArray[np.uint8]) -> Tensor:
        """What layer 0 gets, (N, 3, h, w) float32 on its device, of tiles (N, h, w, 3)."""
        device = network.mix.weight.device
        with torch.no_grad():
            if device.type == "cpu":
                return torch.stack([self._mix_colours(network, tile) for tile in tiles])
            return self._mix_pixels(network, torch.from_numpy(tiles).to(device))

    def _mix_colours(self, network: StainDetectionModel, tile: npt.NDArray[np.uint8]) -> Tensor:
        """One tile (h, w, 3), colour by colour."""
        X, D, rows = self._colours(tile)
        mixed = network.mix_densities(torch.from_numpy(X), torch.from_numpy(D)).float()
        table = mixed.T.contiguous().numpy()
        planes = np.empty((3, len(rows)), np.float32)
        kernels.look_up_rows(rows, table, planes)
        return torch.from_numpy(planes.reshape(3, *tile.shape[:2]))

    def _mix_pixels(self, network: StainDetectionModel, tiles: Tensor) -> Tensor:
        """Tiles (N, h, w, 3), pixel by pixel: on a GPU that is faster than to sort colours."""
        x = tiles.permute(3, 0, 1, 2).reshape(3, -1).float() / 255
        X = x.clamp(FLOAT_FLOOR, None).log() if network.stain.domain == "log" else x
        D = X.new_zeros((0, X.shape[1]))
        for step in self.densities.maps:
            M, N, b = (torch.tensor(t, dtype=X.dtype, device=X.device) for t in step)
            D = torch.relu(M.T @ D + N.T @ X + b[:, None])
        D *= torch.tensor(self.densities.scale, dtype=X.dtype, device=X.device)[:, None]
        n, height, width, _ = tiles.shape
        return network.mix_densities(X, D).reshape(3, n, height, width).transpose(0, 1).contiguous()

    def planes(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.float32]:
        """Densities (r, h, w) float32 of pixels (h, w, 3)."""
        rows, table = self.look_up(pixels)
        planes = np.empty((table.shape[1], rows.size), np.float32)
        kernels.look_up_rows(rows.ravel(), table, planes)
        return planes.reshape(-1, *rows.shape)

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
        found, _, rows = kernels.unique_codes(encode(pixels.reshape(-1, 3)))
        X = to_columns(decode(found, np.uint8), self.domain)
        place = np.minimum(np.searchsorted(self.codes, found), max(len(self.codes) - 1, 0))
        new = self.codes[place] != found if len(self.codes) else np.ones(len(found), bool)
        if new.all():
            return X, self.densities(X), rows
        D = self.known[:, place]
        if new.any():
            D[:, new] = self.densities(np.ascontiguousarray(X[:, new]))
        return X, D, rows


def fit_stain(network: StainDetectionModel, pixels: npt.NDArray[np.uint8]) -> StainFit:
    """Fit the front end to an image (H, W, 3) uint8; pixels of the padding's grey weigh zero."""
    return fit_palette(network, palette_of(np.ascontiguousarray(pixels).reshape(-1, 3)))


def fit_palette(network: StainDetectionModel, palette: Palette) -> StainFit:
    """Fit the front end to the colours of an image and their counts."""
    stain: Any = network.stain
    colours = palette.colours
    w = np.where((colours == PADDING_GREY).all(1), 0.0, palette.counts)
    columns = ArrayColumns(to_columns(colours, stain.domain), w, stain.reference_pixels)
    with torch.no_grad():
        learned = [p.double().cpu().numpy() for p in (stain.spectra, stain.lam, stain.gamma)]
    settings = {"iterations": stain.iterations, "unit_spectra": stain.unit_spectra}
    done = unroll([columns], learned[0], *(float(p) for p in learned[1:]), **settings)
    maps = [(M[0], N[0], b[0]) for M, N, b in done.maps]
    chain = MapChain(maps, done.scale[0])
    known = columns.D * chain.scale[:, None]
    return StainFit(done.background[0], done.spectra[0], chain, stain.domain, palette.codes, known)


@dataclass
class ImageCacheEntry:
    """Results for one image: stain `fits` and scale `choices` by the settings they depend on."""

    fits: dict[Any, StainFit] = field(default_factory=dict)
    choices: dict[Any, Any] = field(default_factory=dict)


class ImageCache:
    """Results for the last few images, recognised by their pixels, so that a second run is faster.

    Detections never depend on it: what is cached is what would be computed again.
    """

    def __init__(self, images: int = 2) -> None:
        self._max_images = images
        self._entries: dict[str, ImageCacheEntry] = {}
        self._lock = threading.Lock()

    def get(self, pixels: npt.NDArray[np.uint8]) -> ImageCacheEntry:
        """The entry of an image (H, W, 3 or 4), an empty one where it is new."""
        key = pixel_hash(pixels)
        with self._lock:
            entry = self._entries.pop(key, None) or ImageCacheEntry()
            self._entries[key] = entry
            while len(self._entries) > self._max_images:
                del self._entries[next(iter(self._entries))]
        return entry


def fit_to_arrays(fit: StainFit) -> Arrays:
    """A fit as plain arrays."""
    arrays = {"background": fit.background, "spectra": fit.spectra, "scale": fit.densities.scale}
    for k, step in enumerate(fit.densities.maps):
        arrays |= {f"{name}{k}": np.asarray(part) for name, part in zip("MNb", step, strict=True)}
    return {**arrays, "domain": np.array(fit.domain), "codes": fit.codes, "known": fit.known}


def fit_from_arrays(arrays: Arrays) -> StainFit:
    """The inverse of `fit_to_arrays`."""
    count = sum(name.startswith("M") for name in arrays)
    maps = [(arrays[f"M{k}"], arrays[f"N{k}"], arrays[f"b{k}"]) for k in range(count)]
    chain = MapChain(maps, arrays["scale"])
    domain: Any = str(arrays["domain"])
    known = arrays["codes"], arrays["known"]
    return StainFit(arrays["background"], arrays["spectra"], chain, domain, *known)
