"""StainGAN's generator, a user's own one, and the network of 1×1 convolutions distilled from it.

The generator is CycleGAN's ResNet (Shaban et al., 2019): 7×7 convolution, two that halve the image,
blocks with a short cut, two that double it, 7×7 convolution and tanh, instance norm in between;
images in −1 … 1. Its weights have the names of pytorch-CycleGAN-and-pix2pix, so that a generator
from there loads as it is. It looks at a pixel's neighbours, so it runs in tiles.

Three 1×1 convolutions of 32 channels (as StainNet, Kang et al., 2021) learn what it does to
colours. They are a function of colour alone, which the palette applies exactly.

`core.training.staingan` trains both.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from torch.nn import functional

from napari_beerlanet.core.common.device import pick_device
from napari_beerlanet.core.common.messages import system_reason
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.images.rgb import RGBImage, to_uint8
from napari_beerlanet.core.normalization.normalizer import (
    Array,
    ColourMap,
    ColourStatistics,
    NormalizedImage,
    Normalizer,
    NormalizerError,
    State,
    Target,
    unchanged,
)
from napari_beerlanet.core.normalization.onnx_network import PROBE_SIDE, onnx_function
from napari_beerlanet.core.stains.palette import Palette, palette_of

COLOUR_CHANNELS = 32
"""Of the inner layers of the distilled network."""

_TILE, _OVERLAP = 512, 64  # pixels
_MAX_FILTERS, _MAX_BLOCKS = 256, 32
_MAX_FILE_BYTES = 1 << 30

Layers = list[tuple[Array, Array]]
"""Weights (out, in) and biases (out,) of each 1×1 convolution."""


class _Block(nn.Module):
    """Two 3×3 convolutions with a short cut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv_block = nn.Sequential(
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            nn.InstanceNorm2d(channels),
            nn.ReLU(True),
            nn.ReflectionPad2d(1),
            nn.Conv2d(channels, channels, 3),
            nn.InstanceNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        changed: Tensor = self.conv_block(x)
        return x + changed


class StainGenerator(nn.Module):
    """(N, 3, H, W) in −1 … 1 to the same, H and W multiples of 4.

    `filters` of the first layer and the number of `blocks`: 64 and 9 in the paper.
    """

    def __init__(self, filters: int = 16, blocks: int = 6) -> None:
        super().__init__()
        self.filters, self.blocks = filters, blocks
        layers: list[nn.Module] = [nn.ReflectionPad2d(3), nn.Conv2d(3, filters, 7)]
        layers += [nn.InstanceNorm2d(filters), nn.ReLU(True)]
        for channels in (filters, 2 * filters):
            layers += [nn.Conv2d(channels, 2 * channels, 3, 2, 1)]
            layers += [nn.InstanceNorm2d(2 * channels), nn.ReLU(True)]
        layers += [_Block(4 * filters) for _ in range(blocks)]
        for channels in (4 * filters, 2 * filters):
            layers += [nn.ConvTranspose2d(channels, channels // 2, 3, 2, 1, 1)]
            layers += [nn.InstanceNorm2d(channels // 2), nn.ReLU(True)]
        layers += [nn.ReflectionPad2d(3), nn.Conv2d(filters, 3, 7), nn.Tanh()]
        self.model = nn.Sequential(*layers)

    def forward(self, images: Tensor) -> Tensor:
        """What the images look like in the other laboratory."""
        out: Tensor = self.model(images)
        return out


def colour_network() -> nn.Sequential:
    """Three 1×1 convolutions: (N, 3, H, W) in −1 … 1 to the same."""
    k = COLOUR_CHANNELS
    return nn.Sequential(
        *(nn.Conv2d(3, k, 1), nn.ReLU()),
        *(nn.Conv2d(k, k, 1), nn.ReLU()),
        nn.Conv2d(k, 3, 1),
    )


@dataclass(frozen=True, eq=False)
class ColourNetwork(Target):
    """The distilled network: each colour goes through three 1×1 convolutions."""

    layers: Layers

    @classmethod
    def from_network(cls, network: nn.Sequential) -> Self:
        """Of a trained `colour_network`."""
        found = [m for m in network if isinstance(m, nn.Conv2d)]
        return cls([(_numbers(m.weight)[:, :, 0, 0], _numbers(m.bias)) for m in found])

    def colour_map(self, palette: Palette) -> ColourMap:
        """The network itself, whatever image the colours are of."""
        problem = ColourStatistics.of(palette).problem()
        return unchanged(problem) if problem else ColourMap(self.map_colours)

    def map_colours(self, colours: Array) -> Array:
        """(n, 3) float64 of 0 to 255 to the same."""
        x = colours / 127.5 - 1
        for number, (weight, bias) in enumerate(self.layers):
            x = x @ weight.T + bias
            if number < len(self.layers) - 1:
                np.maximum(x, 0, out=x)
        return np.asarray(np.clip((x + 1) * 127.5, 0, 255))

    def state(self) -> State:
        """Weights and biases, float32 as they were learned."""
        arrays: dict[str, npt.NDArray[Any]] = {}
        for number, (weight, bias) in enumerate(self.layers):
            arrays |= {f"weight{number}": weight.astype(np.float32)}
            arrays |= {f"bias{number}": bias.astype(np.float32)}
        return arrays, {}

    @classmethod
    def from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Self:
        """From its weights; a `ValueError` where they do not follow on one another."""
        layers: Layers = []
        width = 3
        for number in range(len(arrays) // 2):
            weight = np.asarray(arrays.get(f"weight{number}", np.empty(0)))
            bias = np.asarray(arrays.get(f"bias{number}", np.empty(0)))
            fits = weight.ndim == 2 and weight.shape[1] == width and bias.shape == weight.shape[:1]
            if not fits or weight.dtype.kind != "f" or bias.dtype.kind != "f":
                raise ValueError(f"layer {number} of its network is not a 1×1 convolution")
            if not (np.isfinite(weight).all() and np.isfinite(bias).all()):
                raise ValueError(f"layer {number} of its network has values that are no numbers")
            layers.append((weight.astype(np.float64), bias.astype(np.float64)))
            width = len(weight)
        if not layers or width != 3 or len(arrays) % 2:
            raise ValueError("its network does not lead from three channels to three")
        return cls(layers)


class Generator(Target):
    """A generator network that images go through in tiles: StainGAN's, or a user's own."""

    colour_only: ClassVar[bool] = False

    def __init__(self, generator: StainGenerator | None, onnx: bytes = b"") -> None:
        self._generator, self._onnx = generator, onnx
        self._device = pick_device("auto")
        self._run: Callable[[Tensor], Tensor]
        if generator is not None:
            generator.eval().requires_grad_(False).to(self._device)
            self._run = generator
        else:
            self._run = onnx_function(onnx)
            _try_out(self._run)

    def __deepcopy__(self, memo: dict[int, Any]) -> Generator:
        return self  # nothing in it changes, and what runs ONNX cannot be copied

    def colour_map(self, palette: Palette) -> ColourMap:
        """Refused: colours are not all that it goes by."""
        raise NormalizerError(
            "A generator looks at more than a pixel's colour, so it has no colour map."
        )

    def apply(self, image: RGBImage) -> NormalizedImage:
        """The image as the generator makes it; unchanged where there is no stain."""
        problem = ColourStatistics.of(palette_of(to_uint8(image.flat))).problem()
        if problem:
            note = f"The image is unchanged: {problem}."
            return NormalizedImage(image.pixels.copy(), (note,), True)
        white = image.white
        given = torch.from_numpy(image.pixels[..., :3].astype(np.float32) / (white / 2) - 1)
        made = self.generate(given.permute(2, 0, 1)).permute(1, 2, 0).numpy()
        if not np.isfinite(made).all():
            note = "The image is unchanged: the generator gives values that are no numbers."
            return NormalizedImage(image.pixels.copy(), (note,), True)
        values = np.clip((made.astype(np.float64) + 1) * (white / 2), 0, white)
        out = image.pixels.copy()
        out[..., :3] = np.rint(values) if white > 1 else values
        return NormalizedImage(out)

    @torch.no_grad()
    def generate(self, image: Tensor) -> Tensor:
        """(3, H, W) float32 in −1 … 1 to the same, tile by tile with soft borders."""
        _, height, width = image.shape
        total, weight = torch.zeros_like(image), torch.zeros(1, height, width)
        for top in _starts(height):
            for left in _starts(width):
                part = image[:, top : top + _TILE, left : left + _TILE]
                shape = part.shape[1:]
                made = self._run(_pad(part)[None].to(self._device))[0].cpu().float()
                soft = _ramp(shape[0])[:, None] * _ramp(shape[1])
                area = slice(top, top + shape[0]), slice(left, left + shape[1])
                total[:, *area] += made[:, : shape[0], : shape[1]] * soft
                weight[:, *area] += soft
        return total / weight

    def state(self) -> State:
        """The generator's weights and size, or the ONNX file as it is."""
        if self._generator is None:
            return {"onnx": np.frombuffer(self._onnx, np.uint8)}, {"kind": "onnx"}
        arrays = {name: _float32(value) for name, value in self._generator.state_dict().items()}
        size = {"filters": self._generator.filters, "blocks": self._generator.blocks}
        return arrays, {"kind": "resnet", **size}

    @classmethod
    def from_state(
        cls, arrays: Mapping[str, npt.NDArray[Any]], settings: Mapping[str, Any]
    ) -> Self:
        """From its weights, or the bytes of an ONNX file."""
        if settings.get("kind") == "onnx":
            stored = np.asarray(arrays.get("onnx", np.empty(0, np.uint8)))
            return cls(None, onnx=stored.astype(np.uint8).tobytes())
        return cls(build_generator({k: torch.from_numpy(np.array(v)) for k, v in arrays.items()}))


def load_generator(path: str | os.PathLike[str]) -> Normalizer:
    """A user's own generator: `.onnx`, or the weights of CycleGAN's ResNet as `.safetensors`.

    Images are in −1 … 1, (N, 3, H, W), and H and W any multiple of 4. Whatever is wrong with a file
    is a `FileError` of one sentence; nothing in it is executed but the network's own operations.
    """
    path = Path(path)
    try:
        if not path.is_file():
            raise ValueError("there is no such file")
        if path.stat().st_size > _MAX_FILE_BYTES:
            raise ValueError("larger than any generator")
        if path.suffix.lower() == ".onnx":
            return Normalizer("staingan-generator", Generator(None, path.read_bytes()))
        if path.suffix.lower() == ".safetensors":
            from safetensors import SafetensorError
            from safetensors.torch import load

            try:
                tensors = load(path.read_bytes())
            except (SafetensorError, KeyError) as error:
                raise ValueError("not a safetensors file, or cut short") from error
            return Normalizer("staingan-generator", Generator(build_generator(tensors)))
        raise ValueError("a generator is a file that ends in .onnx or .safetensors")
    except OSError as error:
        raise FileError(f"{path}: cannot read it ({system_reason(error)}).") from error
    except (ValueError, ImportError, MemoryError) as error:
        reason = str(error).rstrip(".") or "it does not fit into memory"
        raise FileError(f"{path}: no generator that can be used: {reason}.") from error


def build_generator(tensors: Mapping[str, Tensor]) -> StainGenerator:
    """A generator with these weights, its size as they say; a `ValueError` where they do not fit.

    Statistics of instance norm, which old files have, are left out.
    """
    known = {k: v for k, v in tensors.items() if "running_" not in k and "num_batches" not in k}
    first = known.get("model.1.weight")
    if first is None or first.ndim != 4:
        raise ValueError("it has not the weights of CycleGAN's ResNet generator")
    filters = int(first.shape[0])
    blocks = len({name.split(".")[1] for name in known if ".conv_block." in name})
    if not (1 <= filters <= _MAX_FILTERS and 1 <= blocks <= _MAX_BLOCKS):
        raise ValueError(f"a generator of {filters} filters and {blocks} blocks is not known here")
    with torch.device("meta"):
        wanted = {
            k: tuple(v.shape) for k, v in StainGenerator(filters, blocks).state_dict().items()
        }
    if {k: tuple(v.shape) for k, v in known.items()} != wanted:
        odd = sorted(known.keys() ^ wanted.keys()) or [
            k for k in wanted if tuple(known[k].shape) != wanted[k]
        ]
        raise ValueError(f"its weights are not those of CycleGAN's ResNet, such as {odd[0]:.80}")
    for name, value in known.items():
        if not value.is_floating_point() or not bool(value.isfinite().all()):
            raise ValueError(f"{name:.80} holds values that are no numbers")
    with torch.random.fork_rng(devices=[]):
        generator = StainGenerator(filters, blocks)
    generator.load_state_dict({k: v.float() for k, v in known.items()})
    return generator


# --- parts ----------------------------------------------------------------------------------------


def _try_out(run: Callable[[Tensor], Tensor]) -> None:
    """Refuse a generator that does not make images of images."""
    shape = (1, 3, PROBE_SIDE, PROBE_SIDE)
    made = run(torch.zeros(shape))
    if tuple(made.shape) != shape or not made.is_floating_point():
        size = " × ".join(map(str, made.shape))
        raise ValueError(f"it makes {size} numbers of an image of 3 × 64 × 64")


def _numbers(values: Tensor | None) -> Array:
    assert values is not None
    return values.detach().cpu().double().numpy()


def _float32(values: Tensor) -> npt.NDArray[np.float32]:
    return values.detach().cpu().float().contiguous().numpy()


def _starts(length: int) -> list[int]:
    """First pixels of overlapping tiles along a side."""
    if length <= _TILE:
        return [0]
    count = math.ceil((length - _OVERLAP) / (_TILE - _OVERLAP))
    return [round(k * (length - _TILE) / (count - 1)) for k in range(count)]


def _ramp(length: int) -> Tensor:
    """(length,) weights of a tile's pixels, small at its ends."""
    distance = torch.arange(length, dtype=torch.float32) + 1
    return torch.minimum(distance, distance.flip(0)).clamp(max=_OVERLAP)


def _pad(image: Tensor) -> Tensor:
    """(3, h, w) with sides that are multiples of 4 and not too small for the first layers."""
    height, width = (max(-(-side // 4) * 4, 16) for side in image.shape[1:])
    rest = (0, width - image.shape[2], 0, height - image.shape[1])
    return functional.pad(image[None], rest, mode="replicate")[0]
