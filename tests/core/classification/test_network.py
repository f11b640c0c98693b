"""The network against a plain transcription; its options, backbones and starting weights."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from algorithm1 import algorithm1, columns_of
from napari_beerlanet.core.classification.network import (
    ClassificationNetwork,
    backbone_names,
    build_backbone,
    load_backbone_weights,
    weighted_percentile,
)
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.images.rgb import PADDING_GREY
from tinyclasses import SMALL, cell, tiny_backbone

SMALL_STAIN = {"input_size": 24, "components": 3, "iterations": 4}


def tensor(*images):
    return torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy()).float() / 255


def network(seed=0, **settings):
    net = ClassificationNetwork(tiny_backbone(2), 2, ClassifierSettings(**SMALL_STAIN, **settings))
    if net.has_stain:
        net.fit_mix()
        with torch.no_grad():  # not the start, where much is symmetric
            generator = torch.Generator().manual_seed(seed)
            net.mix.weight += 0.1 * torch.randn(net.mix.weight.shape, generator=generator)
    return net.eval()


def transcribed(net, image, weighted=None):
    """Logits (k,) of a crop (H, W, 3) uint8: Algorithm 1, the mix and the backbone, in numpy.

    Written from METHOD.md and the settings' descriptions, knowing nothing of the network's code.
    """
    settings, pad = net.settings, (image == PADDING_GREY).all(2)
    if settings.front_end == "none":
        seen = image / 255
    elif settings.front_end == "grey":
        luma = image @ np.array([0.299, 0.587, 0.114]) / 255
        seen = np.repeat(luma[..., None], 3, 2)
    else:
        X, _ = columns_of(image, settings.domain)
        S = net.stain.raw_spectra.detach().abs().double().numpy()
        lam, gamma = net.stain.lam.item(), net.stain.gamma.item()
        w = (~pad).ravel().astype(float)
        more = {"unit_spectra": settings.unit_spectra, "reference_pixels": 24.0**2}
        D = algorithm1(X, S, lam, gamma, settings.iterations, w=w, **more).D  # (p, r)
        if settings.normalize:
            rank = int(np.ceil(0.98 * w.sum())) - 1
            D = D / np.maximum(np.sort(D[w > 0], axis=0)[rank], 0.05)
        inputs = np.hstack([D, X.T]) if settings.beside_rgb else D
        W, b = (p.detach().double().numpy() for p in (net.mix.weight[:, :, 0, 0], net.mix.bias))
        mixed = inputs @ W.T + b
        seen = np.exp(np.minimum(mixed, 1)) if settings.light else mixed
        seen[w == 0] = PADDING_GREY / 255
        seen = seen.reshape(image.shape)
    if settings.standardize:
        seen = (seen - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    x = torch.from_numpy(seen.transpose(2, 0, 1).copy()).float()[None]
    conv, norm, _, _, _, linear = net.backbone
    x = functional.conv2d(x, conv.weight, conv.bias, stride=2, padding=1)
    x = functional.batch_norm(x, norm.running_mean, norm.running_var, norm.weight, norm.bias)
    return (functional.relu(x).mean((2, 3)) @ linear.weight.T + linear.bias)[0].detach()


OPTIONS = [
    {},
    {"normalize": True},
    {"beside_rgb": True},
    {"normalize": True, "beside_rgb": True, "light": False},
    {"standardize": False, "light": False},
    {"domain": "intensity", "unit_spectra": False},
    {"front_end": "none"},
    {"front_end": "grey"},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_forward_is_the_plain_transcription(options):
    net = network(**options)
    image = cell("dark", 1, 24)
    image[:5] = PADDING_GREY
    with torch.no_grad():
        found = net(tensor(image, cell("pale", 2, 24)))
    torch.testing.assert_close(found[0], transcribed(net, image), atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(
        found[1], transcribed(net, cell("pale", 2, 24)), atol=2e-5, rtol=1e-4
    )


@pytest.mark.parametrize("options", [{}, {"normalize": True, "beside_rgb": True}], ids=str)
def test_stains_fitted_to_other_pixels(options):
    """A sample below the crop, weighted alone: as if the crop had been solved along with it."""
    net = network(**options)
    crop, sample = cell("dark", 1, 24), cell("pale", 5, 24)
    both = np.concatenate([crop, sample])
    weights = torch.zeros(1, 48, 24)
    weights[:, 24:] = 1
    with torch.no_grad():
        found = net.apply_front_end(tensor(both), weights)[0]
        front = net.stain.forward_readout(tensor(both), weights, lambda X, D, w: torch.cat([X, D]))[
            0, :, :24
        ].flatten(1)
        expected = net.mix_densities(front[:3], front[3:], torch.ones(576)).reshape(3, 24, 24)
        alone = net.apply_front_end(tensor(crop))[0]
        all_sample = net.stain(tensor(sample))[0]
        fitted = net.stain(tensor(both), weights)[0, :, 24:]
    assert found.shape == (3, 24, 24)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(fitted, all_sample)  # the crop did not count in the fit
    assert not torch.allclose(found, alone, atol=1e-3)


def test_gradients_reach_the_stains_with_every_option():
    for options in ({}, {"normalize": True, "beside_rgb": True}):
        net = network(**options).train()
        net(tensor(cell("dark", 1, 24), cell("pale", 2, 24))).sum().backward()
        for name, parameter in net.named_parameters():
            assert parameter.grad is not None, name
            assert torch.isfinite(parameter.grad).all(), name
        assert net.stain.raw_spectra.grad.abs().max() > 0


def test_normalised_densities_do_not_depend_on_the_strength_of_a_stain():
    net = network(normalize=True)
    D, w = torch.rand(3, 50).double() + 0.2, torch.ones(50).double()
    X = torch.zeros(3, 50).double()
    strength = torch.tensor([[0.5], [2.0], [3.0]]).double()
    torch.testing.assert_close(net.mix_inputs(X, D * strength, w), net.mix_inputs(X, D, w))
    faint = net.mix_inputs(X, 0.001 * D, w)
    assert faint.max() < 0.1  # noise is not blown up


def test_weighted_percentile_is_that_of_repeated_values():
    random = np.random.default_rng(0)
    values, counts = random.random((2, 30)), random.integers(0, 9, 30)
    found = weighted_percentile(torch.from_numpy(values), torch.from_numpy(counts).double())
    for row, got in zip(values, found, strict=True):
        expected = np.quantile(np.repeat(row, counts), 0.98, method="inverted_cdf")
        assert got == pytest.approx(expected)


def test_the_start_shows_the_backbone_the_colours_that_it_knows():
    for options in ({}, {"normalize": True}, {"beside_rgb": True}):
        net = ClassificationNetwork(
            tiny_backbone(), 2, ClassifierSettings(**SMALL_STAIN, **options)
        )
        crops = [cell(kind, seed, 24) for kind in ("dark", "pale") for seed in range(3)]
        error = net.fit_mix(crops)
        with torch.no_grad():
            seen = net.apply_front_end(tensor(*crops))
        rms = (seen - tensor(*crops)).square().mean().sqrt()
        assert rms == pytest.approx(error, rel=0.05)
        assert rms < (0.01 if options.get("beside_rgb") else 0.08), options


def test_half_precision_leaves_the_front_end_alone():
    net = network().half()
    assert {p.dtype for p in net.stain.parameters()} == {torch.float32}
    assert net.mix.weight.dtype == torch.float32
    assert {p.dtype for p in net.backbone.parameters()} == {torch.float16}


# --- backbones -----------------------------------------------------------------------------------


def test_any_classification_network_of_torchvision():
    names = backbone_names()
    assert {"resnet18", "mobilenet_v2", "googlenet", "vit_b_16"} <= set(names)
    assert not any("rcnn" in name or "raft" in name or "deeplab" in name for name in names)
    with torch.device("meta"):
        for name in ("resnet18", "mobilenet_v2", "googlenet", "inception_v3", "convnext_tiny"):
            last = [m for m in build_backbone(name, 7).modules() if isinstance(m, nn.Linear)][-1]
            assert last.out_features == 7


def test_unknown_backbone_is_one_sentence():
    with pytest.raises(ValueError, match=r"no classification network 'resnet19'.*resnet18"):
        ClassificationNetwork("resnet19", 2)


@pytest.fixture(scope="module")
def donor():
    torch.manual_seed(5)
    return build_backbone(SMALL, 1000).state_dict()


def test_weights_by_their_names(donor):
    backbone = build_backbone(SMALL, 3)
    head = backbone.fc.weight.clone()
    load_backbone_weights(backbone, SMALL, 3, donor)
    assert torch.equal(backbone.fc.weight, head)
    for name, value in backbone.state_dict().items():
        assert name.startswith("fc.") or torch.equal(value, donor[name]), name


@pytest.mark.parametrize("counters", [True, False])
def test_weights_by_their_order(donor, counters):
    """Under other names, without the head, with or without the counters of batches."""
    kept = [(k, v) for k, v in donor.items() if not k.startswith("fc.")]
    kept = [(k, v) for k, v in kept if counters or not k.endswith("num_batches_tracked")]
    renamed = {f"encoder.{k}": value for k, (_, value) in enumerate(kept)}
    backbone = build_backbone(SMALL, 3)
    load_backbone_weights(backbone, SMALL, 3, renamed)
    for name, value in backbone.state_dict().items():
        if not name.startswith("fc.") and not name.endswith("num_batches_tracked"):
            assert torch.equal(value, donor[name]), name


def test_weights_of_another_architecture(donor):
    with pytest.raises(ValueError, match="not those of squeezenet1_1"):
        load_backbone_weights(build_backbone("squeezenet1_1", 3), "squeezenet1_1", 3, donor)
    shuffled = dict(reversed([(f"x{k}", v) for k, v in enumerate(donor.values())]))
    with pytest.raises(ValueError, match=f"not those of {SMALL}"):
        load_backbone_weights(build_backbone(SMALL, 3), SMALL, 3, shuffled)


def test_mobilenet_of_another_package_fits_by_order(shared):
    from napari_beerlanet.core.checkpoints.pt_import import read_state_dict

    tensors = read_state_dict(shared / "weights" / "mobilenet_v2.pt")
    assert len(tensors) == 312
    backbone = build_backbone("mobilenet_v2", 5)
    load_backbone_weights(backbone, "mobilenet_v2", 5, tensors)
    kept = [value for value in tensors.values() if value.is_floating_point()]
    own = [v for k, v in backbone.features.state_dict().items() if v.is_floating_point()]
    assert len(own) == len(kept)
    assert all(torch.equal(a, b.float()) for a, b in zip(own, kept, strict=True))


def test_a_backbone_comes_without_the_compiler():
    """Which loads triton, and that ends the process after software OpenGL has drawn a window."""
    code = (
        "import sys\n"
        "from napari_beerlanet.core.classification.network import build_backbone, backbone_shapes\n"
        "build_backbone('mobilenet_v2', 2)\n"
        "for name in ('mobilenet_v2', 'resnet18', 'efficientnet_b0', 'swin_t', 'vit_b_16'):\n"
        "    backbone_shapes(name, 2)\n"
        "print([name for name in ('triton', 'torch._dynamo') if name in sys.modules])\n"
        "import torchvision.ops, torch\n"
        "box = torch.tensor([[0.0, 0, 0, 4, 4]])\n"
        "print(torchvision.ops.roi_align(torch.ones(1, 1, 8, 8), box, 2).mean().item())\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[:2] == ["[]", "1.0"]
