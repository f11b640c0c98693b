"""BeerLaNet in front of a YOLO network.

    image (N, 3, H, W) in [0, 1]  ->  densities (N, r, H, W)  ->  1×1 convolution  ->  layer 0

The network is Ultralytics' own and so are its keys (`model.N.…`), so its pretrained weights load
as they are. Ours are `stain.…` (S_init, λ, γ) and `mix.…` (the 1×1 convolution); they stay float32
whatever the network is cast to. The mix starts as the least-squares fit of the densities to the
colours that the pretrained network knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from napari_beerlanet.core.detection.ultralytics_api import DetectionModel
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.stains.layer import BeerLaNet
from napari_beerlanet.core.stains.solver.spectra import default_spectra

PADDING = PADDING_GREY / 255


class _KeepsFloat32(nn.Module):
    """A module whose parameters follow to another device but not to another floating type."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        def moved(tensor: Tensor) -> Tensor:
            result = fn(tensor)
            # Not result.float(): that would keep what half precision has rounded.
            return tensor.to(result.device) if result.is_floating_point() else result

        return super()._apply(moved, recurse)  # type: ignore[no-untyped-call]


class _StainFrontEnd(_KeepsFloat32, BeerLaNet):
    pass


class _MixConv(_KeepsFloat32, nn.Conv2d):
    bias: nn.Parameter


class StainDetectionModel(DetectionModel):  # type: ignore[misc]
    """An Ultralytics detection model that sees densities mixed to three channels.

    Parameters
    ----------
    cfg, nc, verbose
        As Ultralytics': model YAML (name, path or dict) and number of classes.
    imgsz
        Side of the training images; `reference_pixels` of the front end is its square.
    light
        True: the mix is of logarithms, and layer 0 sees its exponential, the cells under one light.
        The 1×1 convolution alone is linear in density and leaves the range that the network knows
        where stains are darker than in training.
    head_width
        Channels inside the classifying branch. Ultralytics derives it from the number of classes,
        but keeps that of pretrained weights when it loads them; None leaves it to Ultralytics.
    front
        Further settings of `BeerLaNet`: components, iterations, spectra, lam, gamma, domain.
    """

    def __init__(
        self,
        cfg: str | dict[str, Any] = "yolov8n.yaml",
        ch: int = 3,
        nc: int | None = None,
        verbose: bool = False,
        *,
        imgsz: int = 640,
        light: bool = True,
        head_width: int | None = None,
        **front: Any,
    ) -> None:
        if ch != 3:
            raise ValueError(f"Stains are decomposed in RGB images, not in {ch} channels.")
        super().__init__(cfg, ch, nc, verbose)  # runs a forward: the front end is not there yet
        if head_width not in (None, self.head_width):
            donor = DetectionModel(dict(self.yaml), ch, nc=head_width, verbose=False)
            self.load(donor, verbose=False)
        self.stain = _StainFrontEnd(reference_pixels=float(imgsz**2), padding=PADDING, **front)
        self.mix = _MixConv(self.stain.components, 3, 1)
        self.light = light

    @property
    def head_width(self) -> int:
        """Channels inside the classifying branch."""
        return int(self.model[-1].cv3[0][-1].in_channels)

    def _predict_once(self, x: Tensor, profile: bool = False, embed: Any = None) -> Any:
        if "mix" in self._modules:
            x = self.apply_front_end(x)
        return super()._predict_once(x, profile, embed)

    def apply_front_end(self, images: Tensor) -> Tensor:
        """What layer 0 gets (N, 3, H, W) for images (N, 3, H, W) in [0, 1]; padding stays grey."""
        with torch.autocast(images.device.type, enabled=False):
            return self.stain.forward_readout(images.float(), readout=self.mix_densities).to(
                images.dtype
            )

    def predict_mixed(self, mixed: Tensor) -> Any:
        """The network behind the front end, on what `apply_front_end` returns."""
        return super()._predict_once(mixed)

    def mix_densities(self, X: Tensor, D: Tensor) -> Tensor:
        """What layer 0 gets (3, u) of columns X (3, u) with densities D (r, u)."""
        weight, bias = self.mix.weight.flatten(1).to(D.dtype), self.mix.bias.to(D.dtype)
        grey = math.log(PADDING) if self.stain.domain == "log" else PADDING
        blank = ((X - grey).abs() < 1e-3).all(0)
        return torch.where(blank, PADDING, self._to_intensity(weight @ D + bias[:, None]))

    def _to_intensity(self, mixed: Tensor) -> Tensor:
        return mixed.clamp(max=1.0).exp() if self.light else mixed

    @torch.no_grad()
    def fit_mix(self, images: Sequence[npt.NDArray[np.uint8]] | None = None) -> float:
        """Fit the mix to the colours of `images` (H, W, 3) uint8; returns the rms error in [0, 1].

        Densities vanish in the background whatever its light, so what comes out is every image
        under the same, mean light. None takes `typical_colours`.
        """
        r = self.stain.components
        G, P = torch.zeros(3, r + 1, r + 1), torch.zeros(3, r + 1, 1)
        images = typical_colours() if images is None else images
        pairs = [self._densities_and_colours(image) for image in images]
        for D, x in pairs:
            # An error in ln x is an error of x times as much in x.
            w, target = (x, x.clamp(1 / 255).log()) if self.light else (torch.ones_like(x), x)
            weighted = D[None] * (w**2)[:, None]
            G += weighted @ D.T
            P += weighted @ target[..., None]
        G += 1e-5 * G[:, -1:, -1:] * torch.eye(r + 1)
        W = torch.linalg.solve(G.double(), P.double()).float()[..., 0]
        self.mix.weight.copy_(W[:, :-1, None, None])
        self.mix.bias.copy_(W[:, -1])
        errors = [((self._to_intensity(W @ D) - x) ** 2).mean() for D, x in pairs]
        return math.sqrt(float(torch.stack(errors).mean()))

    def _densities_and_colours(self, image: npt.NDArray[np.uint8]) -> tuple[Tensor, Tensor]:
        """Densities and a row of ones (r + 1, n), colours in [0, 1] (3, n), of n pixels."""
        planes = torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))
        x = (planes.float() / 255).to(self.mix.weight.device)
        D = self.stain(x[None])[0].flatten(1)
        return torch.cat([D, torch.ones_like(D[:1])]), x.flatten(1)


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
