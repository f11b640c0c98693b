"""`forward` of every module on a CUDA device that is not there: fake tensors know their device.

A tensor that is made on the CPU by mistake, or a NumPy view of one on the device, fails here. There
are no gradients: torch asks the driver for them (`make test-accelerator` has them).
"""

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.openvino_network import NetworkBehindFrontEnd
from napari_beerlanet.core.normalization.lstainnorm import LStainNorm
from napari_beerlanet.core.normalization.staingan import StainGenerator
from napari_beerlanet.core.stains.front_end import MixConv, StainFrontEnd
from napari_beerlanet.core.stains.layer import BeerLaNet
from tinyclasses import tiny_classifier
from tinydata import MODEL

FRONT_ENDS = ("beerlanet", "none", "grey", "lstainnorm")


def detector(front_end="beerlanet"):
    network = StainDetectionModel(dict(MODEL), nc=3, imgsz=64, front_end=front_end)
    return by_pixels(network)


def by_pixels(network):
    """Colours are counted by what they are, and fake ones are nothing."""
    if network.has_stain:
        network.stain.method = "dense"
    return network


def on_fake_cuda(module):
    """The module with fake parameters and buffers on CUDA."""
    for part in module.modules():
        for name, value in list(part._parameters.items()):
            if value is not None:
                fake = torch.empty(value.shape, dtype=value.dtype, device="cuda")
                part._parameters[name] = nn.Parameter(fake, value.requires_grad)
        for name, value in list(part._buffers.items()):
            if value is not None:
                part._buffers[name] = torch.empty(value.shape, dtype=value.dtype, device="cuda")
        if isinstance(getattr(part, "stride", None), torch.Tensor):
            part.stride = part.stride.tolist()  # Ultralytics' head takes them as numbers
    return module


def tensors_of(output):
    if isinstance(output, torch.Tensor):
        return [output]
    parts = output.values() if isinstance(output, dict) else output
    return [t for part in parts for t in tensors_of(part)]


MODULES = {
    "BeerLaNet": lambda: BeerLaNet(components=3, iterations=2, method="dense"),
    "StainFrontEnd": lambda: StainFrontEnd(components=3, iterations=2, method="dense"),
    "MixConv": lambda: MixConv(3, 3, 1),
    "LStainNorm": LStainNorm,
    "StainGenerator": StainGenerator,
    "NetworkBehindFrontEnd": lambda: NetworkBehindFrontEnd(detector()),
    **{f"detector, {name}": lambda name=name: detector(name) for name in FRONT_ENDS},
    **{
        f"classifier, {name}": lambda name=name: by_pixels(tiny_classifier(front_end=name).network)
        for name in FRONT_ENDS
    },
    "classifier, normalized": lambda: by_pixels(tiny_classifier(normalize=True).network),
    "classifier, beside RGB": lambda: by_pixels(tiny_classifier(beside_rgb=True).network),
}


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_forward_on_fake_cuda(name, training):
    module = MODULES[name]().train(training)
    with FakeTensorMode():
        module = on_fake_cuda(module)
        images = torch.empty((2, 3, 64, 64), device="cuda")
        found = tensors_of(module(images))
        assert found
        assert {t.device.type for t in found} == {"cuda"}


def test_a_tensor_of_the_cpu_is_noticed():
    """Or the test above proves nothing."""

    class Careless(nn.Module):
        def forward(self, x):
            return x + torch.ones(3, 1, 1)

    with FakeTensorMode(), pytest.raises(RuntimeError, match="device"):
        Careless()(torch.empty((2, 3, 64, 64), device="cuda"))
