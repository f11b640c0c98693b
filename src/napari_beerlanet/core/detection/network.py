"""A YOLO network and what stands in front of it: BeerLaNet, unless told otherwise.

    image (N, 3, H, W) in [0, 1]  ->  densities (N, r, H, W)  ->  1×1 convolution  ->  layer 0

The network is Ultralytics' own and so are its keys (`model.N.…`), so its pretrained weights load
as they are. Ours are `stain.…` (S_init, λ, γ) and `mix.…` (the 1×1 convolution); they stay float32
whatever the network is cast to. The mix starts as the least-squares fit of the densities to the
colours that the pretrained network knows. All of that is in `core.stains.front_end`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from napari_beerlanet.core.detection.ultralytics_api import DetectionModel
from napari_beerlanet.core.normalization.lstainnorm import LStainNorm
from napari_beerlanet.core.stains.front_end import PADDING, MixConv, StainFrontEnd, StainMixing
from napari_beerlanet.core.stains.settings import FrontEnd

DEFAULT_ATTENTION_POOL = 32
"""Pixels along the side of a block that LStainNorm's attention sees as one: a detector's image has
so many that blocks of 8 would take gigabytes."""


_PROBE_SIDES = (64, 128)  # pixels, of the 256 that Ultralytics sends through a network it builds
# Numbers of one result and of all, and products, of such a probe: five, two and two and a half
# times those of Ultralytics' largest networks.
_MAX_NUMBERS, _MAX_ALL_NUMBERS, _MAX_PRODUCTS = 1 << 22, 1 << 26, 1 << 35


class _Cost(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses, with a `ValueError`, operations of which any larger image would take too much."""

    numbers = products = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Keep torch from importing its compiler for this, which takes seconds.

        Its LLVM beside that of software OpenGL also ends the process, see `common.device`.
        """
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            self.products += args[1].numel() * args[0][0, 0].numel()
        made = func(*args, **(kwargs or {}))
        size = made.numel() if isinstance(made, Tensor) else 0
        self.numbers += size
        if size > _MAX_NUMBERS or self.numbers > _MAX_ALL_NUMBERS or self.products > _MAX_PRODUCTS:
            raise ValueError("its network takes more than any detection model")
        return made


class StainDetectionModel(StainMixing, DetectionModel):  # type: ignore[misc]
    """An Ultralytics detection model that sees densities mixed to three channels.

    Parameters
    ----------
    cfg, nc, verbose
        As Ultralytics': model YAML (name, path or dict) and number of classes.
    imgsz
        Side of the training images; `reference_pixels` of the front end is its square.
    light
        See `StainMixing`.
    head_width
        Channels inside the classifying branch. Ultralytics derives it from the number of classes,
        but keeps that of pretrained weights when it loads them; None leaves it to Ultralytics.
    front_end
        See `StainMixing`.
    attention_pool
        See `LStainNorm`.
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
        front_end: FrontEnd = "beerlanet",
        attention_pool: int = DEFAULT_ATTENTION_POOL,
        **front: Any,
    ) -> None:
        if ch != 3:
            raise ValueError(f"Stains are decomposed in RGB images, not in {ch} channels.")
        super().__init__(cfg, ch, nc, verbose)  # runs a forward: the front end is not there yet
        if head_width not in (None, self.head_width):
            donor = DetectionModel(dict(self.yaml), ch, nc=head_width, verbose=False)
            self.load(donor, verbose=False)
        self.light = light
        stain = StainFrontEnd(reference_pixels=float(imgsz**2), padding=PADDING, **front)
        if front_end == "beerlanet":
            self.stain = stain
            self.mix = MixConv(self.stain.components, 3, 1)
        else:
            self.untrained_stain = (stain,)
        if front_end == "lstainnorm":
            self.lstainnorm = LStainNorm(attention_pool)
        self.front_end = front_end  # last: until then a forward has none

    @property
    def head_width(self) -> int:
        """Channels inside the classifying branch."""
        return int(self.model[-1].cv3[0][-1].in_channels)

    def _predict_once(self, x: Tensor, profile: bool = False, embed: Any = None) -> Any:
        if "front_end" in vars(self):
            x = self.apply_front_end(x)
        else:  # Ultralytics builds it, from a layout that may be anyone's
            with torch.no_grad():
                for side in _PROBE_SIDES:
                    with _Cost():  # type: ignore[no-untyped-call]
                        super()._predict_once(x[..., :side, :side])
        return super()._predict_once(x, profile, embed)

    def predict_mixed(self, mixed: Tensor) -> Any:
        """The network behind the front end, on what `apply_front_end` returns."""
        return super()._predict_once(mixed)
