"""An image classification network and what stands in front of it: BeerLaNet, unless told otherwise.

    crop (N, 3, H, W) in [0, 1]  ->  densities (N, r, H, W)  ->  1×1 convolution  ->  backbone
      ->  logits (N, k)

The backbone is torchvision's own, with one head for k classes, or the caller's, and its keys are
`backbone.…`. Ours are `stain.…` and `mix.…`, as in the detector. The mix starts as the
least-squares fit to the colours of crops, so that a pretrained backbone sees at first what it
knows: cells under one light, in the range of ImageNet.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.device import image_layout, import_torchvision, without_compiler
from napari_beerlanet.core.common.messages import name_list, quoted
from napari_beerlanet.core.normalization.lstainnorm import LStainNorm
from napari_beerlanet.core.stains.front_end import (
    PADDING,
    MixConv,
    StainFit,
    StainFrontEnd,
    StainMixing,
    fit_stain,
    is_padding,
)

OWN_BACKBONE = "own"
"""What a checkpoint calls a backbone that is no network of torchvision."""

_MEAN, _SD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)  # of ImageNet, RGB
_PERCENTILE = 0.98
_MIN_DENSITY = 0.05  # that a channel is divided by at least: noise is not blown up
_WITH_AUXILIARY_HEADS = ("googlenet", "inception_v3")


class ClassificationNetwork(StainMixing, nn.Module):
    """Crops (N, 3, H, W) in [0, 1] to logits (N, k).

    Parameters
    ----------
    backbone
        The name of a classification network of torchvision, or a module from (N, 3, H, W) to
        logits (N, k).
    classes
        k.
    settings
        What stands in front of the backbone.
    """

    def __init__(
        self,
        backbone: str | nn.Module,
        classes: int,
        settings: ClassifierSettings | None = None,
    ) -> None:
        super().__init__()
        self.settings = settings = settings or ClassifierSettings()
        self.backbone_name = backbone if isinstance(backbone, str) else OWN_BACKBONE
        self.backbone = build_backbone(backbone, classes) if isinstance(backbone, str) else backbone
        self.classes, self.light = classes, settings.light
        self.front_end = settings.front_end
        pixels = float(settings.input_size**2)
        if self.has_stain:
            self.stain = StainFrontEnd(
                settings.components,
                settings.iterations,
                domain=settings.domain,
                unit_spectra=settings.unit_spectra,
                reference_pixels=pixels,
                padding=PADDING,
            )
            self.mix = MixConv(settings.components + 3 * settings.beside_rgb, 3, 1)
        else:
            untrained = StainFrontEnd(settings.components, reference_pixels=pixels, padding=PADDING)
            self.untrained_stain = (untrained,)
        if self.front_end == "lstainnorm":
            self.lstainnorm = LStainNorm(settings.attention_pool)

    def forward(self, images: Tensor, weights: Tensor | None = None) -> Tensor:
        """Logits (N, k) of crops (N, 3, H, W) in [0, 1].

        `weights` as for `apply_front_end`.
        """
        return self.forward_mixed(self.apply_front_end(images, weights))

    def forward_mixed(self, mixed: Tensor) -> Tensor:
        """Logits (N, k) of what `apply_front_end` returns."""
        if self.settings.standardize:
            mean, sd = (mixed.new_tensor(part)[:, None, None] for part in (_MEAN, _SD))
            mixed = (mixed - mean) / sd
        # Depthwise convolutions on a CPU take half the time with channels last.
        logits: Tensor = self.backbone(mixed.contiguous(memory_format=image_layout(mixed.device)))
        return logits

    def apply_front_end(self, images: Tensor, weights: Tensor | None = None) -> Tensor:
        """What the backbone gets (N, 3, H, W) for images (N, 3, H, W) in [0, 1].

        With `weights` (N, H, W) images are taller than they are wide: only the upper square is the
        crop. Stains are fitted to all pixels as they are weighted, so the others may be a sample
        of the image that the crop is of.
        """
        if weights is not None:
            return self._apply_to_squares(images, weights)
        return super().apply_front_end(images)

    def fit_crop(self, pixels: npt.NDArray[np.uint8]) -> StainFit:
        """The stain of a crop (H, W, 3) uint8, for statistics."""
        return fit_stain(self, pixels)

    def _apply_to_squares(self, images: Tensor, weights: Tensor) -> Tensor:
        side = images.shape[-1]
        if self.front_end == "lstainnorm":
            statistics = self.lstainnorm.statistics(images, weights)
            return self.apply_plain(images[:, :, :side], statistics)
        if not self.has_stain:
            return self.apply_plain(images[:, :, :side])
        with torch.autocast(images.device.type, enabled=False):
            both = self.stain.forward_readout(
                images.float(), weights, lambda X, D, w: torch.cat([X.to(D.dtype), D])
            )
            mixed = []
            for planes in both[:, :, :side].flatten(2):
                X, D = planes[:3], planes[3:]
                counted = (~is_padding(X, self.stain.domain)).to(D.dtype)
                mixed.append(self.mix_densities(X, D, counted).reshape(3, side, side))
            return torch.stack(mixed).to(images.dtype)

    @property
    def mixes_densities_alone(self) -> bool:
        """See `StainMixing`."""
        return not (self.settings.normalize or self.settings.beside_rgb)

    def mix_inputs(self, X: Tensor, D: Tensor, w: Tensor) -> Tensor:
        """What the mix is of, (m, u): densities, perhaps normalised, perhaps with the columns X."""
        if self.settings.normalize:
            D = D / weighted_percentile(D, w).clamp(min=_MIN_DENSITY)[:, None]
        return torch.cat([D, X.to(D.dtype)]) if self.settings.beside_rgb else D


def weighted_percentile(values: Tensor, weights: Tensor, fraction: float = _PERCENTILE) -> Tensor:
    """(r,) the smallest of values (r, u) that so much of the weight (u,) does not exceed."""
    ordered, order = values.sort(dim=1)
    total = weights.to(values.dtype)[order].cumsum(1)
    place = torch.searchsorted(total.contiguous(), fraction * total[:, -1:])
    return ordered.gather(1, place.clamp(max=values.shape[1] - 1))[:, 0]


# --- backbones -----------------------------------------------------------------------------------


def backbone_names() -> list[str]:
    """All classification networks of torchvision."""
    models = import_torchvision().models
    return list(models.list_models(module=models))


def build_backbone(name: str, classes: int) -> nn.Module:
    """A classification network of torchvision with random weights and a head for so many classes.

    Nothing is downloaded.
    """
    models = import_torchvision().models
    check_backbone_name(name)
    more = {"aux_logits": False, "init_weights": False} if name in _WITH_AUXILIARY_HEADS else {}
    network: nn.Module = models.get_model(name, weights=None, num_classes=classes, **more)
    return network


def check_backbone_name(name: str) -> None:
    """A `ValueError` for a name that torchvision does not have."""
    known = backbone_names()
    if name not in known:
        close = difflib.get_close_matches(name, known, n=3) or ["resnet18", "mobilenet_v2"]
        raise ValueError(
            f"torchvision has no classification network {quoted(name)}; it has, for instance, "
            f"{', '.join(close)}."
        )


def backbone_shapes(
    name: str, classes: int, available: int | None = None
) -> dict[str, tuple[int, ...]]:
    """Shapes of all weights of a backbone by name, without memory for them.

    A few networks can only be built with it. Of these, one that is larger than `available` weights
    is a `ValueError`.
    """
    try:
        with without_compiler(), torch.device("meta"):
            network = build_backbone(name, classes)
    except NotImplementedError:  # their layout is computed with tensors
        if available is not None and _published_size(name) > 2 * available:
            raise ValueError(f"its {available} weights are too few for {name}") from None
        with torch.random.fork_rng(devices=[]):
            network = build_backbone(name, classes)
    return {key: tuple(value.shape) for key, value in network.state_dict().items()}


def _published_size(name: str) -> int:
    """The number of a network's weights, with ImageNet's head, as torchvision states it."""
    models = import_torchvision().models
    return int(models.get_model_weights(name).DEFAULT.meta["num_params"])


def load_backbone_weights(
    backbone: nn.Module, name: str, classes: int, tensors: Mapping[str, Tensor]
) -> None:
    """Start a backbone from weights in torchvision's format; its head stays as it is."""
    found = match_backbone_weights(name, classes, tensors)
    missing = backbone.load_state_dict(found, strict=False).unexpected_keys
    assert not missing


def match_backbone_weights(
    name: str, classes: int, tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The tensors of a file by the names of a backbone's weights, all but those of its head.

    Weights go by their names or, where a file has other names, by their order, if all shapes agree.
    Weights of another architecture are a `ValueError`.
    """
    shapes = backbone_shapes(name, classes)
    other_head = backbone_shapes(name, classes + 1)
    wanted = [key for key in shapes if shapes[key] == other_head[key]]
    found = _match_weights({key: shapes[key] for key in wanted}, tensors)
    if found is None:
        raise ValueError(
            f"the weights are not those of {name}: neither names nor order and shapes of its "
            f"{len(tensors)} tensors fit; give a file of {name}, or name another backbone"
        )
    return found


def rebuild_head(
    source: ClassificationNetwork, before: Sequence[str], names: Sequence[str]
) -> ClassificationNetwork:
    """A network for other classes with all that fits of `source`; what is new is random.

    Rows of the head go by the names of their classes.
    """
    if source.backbone_name == OWN_BACKBONE:
        raise ValueError(
            f"The model's own backbone knows {name_list(before)}, while the data has "
            f"{name_list(names)}; train a new one."
        )
    network = ClassificationNetwork(source.backbone_name, len(names), source.settings)
    if source.has_stain:
        network.stain.reference_pixels = source.stain.reference_pixels
        network.stain.padding = source.stain.padding
    old, new = source.state_dict(), network.state_dict()
    heads = head_keys(source)
    for key, value in old.items():
        if key not in heads:
            new[key] = value
            continue
        for row, name in enumerate(names):
            if name in before:
                new[key][row] = value[list(before).index(name)]
    network.load_state_dict(new)
    return network


def head_keys(network: ClassificationNetwork) -> set[str]:
    """Names of the weights that have a row per class; none of a backbone that is the caller's."""
    if network.backbone_name == OWN_BACKBONE:
        return set()
    one, two = (backbone_shapes(network.backbone_name, k) for k in (1, 2))
    return {f"backbone.{key}" for key in one if one[key] != two[key]}


def _match_weights(
    wanted: Mapping[str, tuple[int, ...]], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor] | None:
    """The tensors by the names that are wanted; None where they do not fit.

    Counters of batches may be missing, as in files of old versions of torch.
    """
    needed = {k: shape for k, shape in wanted.items() if not k.endswith("num_batches_tracked")}
    named = {k: tensors[k] for k in wanted if k in tensors and tuple(tensors[k].shape) == wanted[k]}
    if needed.keys() <= named.keys():
        return named
    in_order = [value for value in tensors.values() if value.is_floating_point()]
    shapes = [tuple(value.shape) for value in in_order[: len(needed)]]
    if shapes != list(needed.values()):
        return None
    return dict(zip(needed, in_order, strict=False))
