"""Number formats: autocast to float16 and bfloat16; colours by histogram; boxes of a batch."""

import numpy as np
import pytest
import torch

from napari_beerlanet.core.common.device import image_layout, no_gradients, precise_dtype
from napari_beerlanet.core.detection.inference import select_boxes
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.stains import layer as layer_module
from napari_beerlanet.core.stains.layer import count_codes
from napari_beerlanet.samples import blood_smear
from tinyclasses import cell, tiny_classifier
from tinydata import MODEL

FRONT_ENDS = ("beerlanet", "none", "grey", "lstainnorm")
SMEAR = blood_smear((300, 420), seed=3, cell_diameter=40.0).image


def planes_of(image):
    """(1, 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float() / 255


def tiny_network(front_end="beerlanet"):
    torch.manual_seed(0)
    return StainDetectionModel(dict(MODEL), nc=3, imgsz=96, front_end=front_end)


def test_boxes_of_a_batch_are_those_of_its_images():
    random = np.random.default_rng(0)
    raw = torch.from_numpy(random.uniform(0, 1, (3, 7, 40)).astype(np.float32))
    raw[:, :4] *= 50
    raw[1, 4:] = 0  # nothing in the second image
    together = select_boxes(raw, 3, 0.5, 0.6)
    alone = [select_boxes(image[None], 3, 0.5, 0.6)[0] for image in raw]
    assert len(together) == 3
    assert len(together[1]) == 0
    for one, other in zip(together, alone, strict=True):
        for name in ("xyxy", "labels", "scores"):
            np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
            assert getattr(one, name).dtype == getattr(other, name).dtype
    end2end = torch.tensor([[[1, 2, 3, 4, 0.9, 2], [0, 0, 1, 1, 0.1, 0]]])
    (found,) = select_boxes(end2end, 3, 0.5, 0.6, end2end=True)
    assert (found.xyxy.tolist(), found.labels.tolist()) == ([[1, 2, 3, 4]], [2])


@pytest.mark.parametrize("sort_up_to", [0, 10**9])
def test_colours_are_counted_by_a_histogram_as_by_sorting(monkeypatch, sort_up_to):
    monkeypatch.setattr(layer_module, "_SORTED_CODES", sort_up_to)
    codes = torch.tensor([5, 2**24 - 1, 5, 0, 77, 5, 0])
    distinct, counts, places = count_codes(codes)
    assert distinct.tolist() == [0, 5, 77, 2**24 - 1]
    assert counts.tolist() == [2, 3, 1, 1]
    assert distinct[places].tolist() == codes.tolist()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 2e-3), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_autocast_changes_nothing_before_the_network(dtype, tolerance, front_end):
    """The network's scores differ by the type's rounding; what layer 0 gets does not at all."""
    network, images = tiny_network(front_end).eval(), planes_of(SMEAR[:96, :96])
    with torch.no_grad():
        expected, mixed = network(images)[0], network.apply_front_end(images)
        with torch.autocast("cpu", dtype=dtype):
            found, cast = network(images)[0], network.apply_front_end(images)
    assert torch.equal(cast, mixed)
    assert cast.dtype == torch.float32
    scores = slice(4, 7)
    assert (found[:, scores].float() - expected[:, scores]).abs().max() < tolerance


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_penalties_and_spectra_stay_float32(dtype):
    """Cast, and trained under autocast: parameters and gradients are float32 and the same."""
    network, images = tiny_network(), planes_of(SMEAR[:64, :64])
    learned = ("raw_spectra", "log_lam", "log_gamma")
    gradients = []
    for enabled in (False, True):
        with torch.autocast("cpu", dtype=dtype, enabled=enabled):
            network.apply_front_end(images).square().mean().backward()
        gradients.append([getattr(network.stain, name).grad.clone() for name in learned])
        network.zero_grad()
    for plain, cast in zip(*gradients, strict=True):
        assert cast.dtype == torch.float32
        assert torch.equal(plain, cast)
    cast = tiny_network().to(dtype)
    for name in learned:
        assert torch.equal(getattr(cast.stain, name), getattr(network.stain, name))
    assert cast.mix.weight.dtype == torch.float32
    assert cast.model[0].conv.weight.dtype == dtype


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float16, 1e-2), (torch.bfloat16, 6e-2)])
def test_a_classifier_under_autocast(dtype, tolerance):
    network = tiny_classifier().network
    images = torch.cat([planes_of(cell("dark", seed)) for seed in range(3)])
    with torch.no_grad():
        expected = network(images)
        with torch.autocast("cpu", dtype=dtype):
            found = network(images)
    assert (found.float() - expected).abs().max() < tolerance * expected.abs().max()


def test_what_devices_can_do():
    cases = {
        "cpu": (torch.float64, torch.channels_last, True),
        "cuda": (torch.float64, torch.channels_last, True),
        "mps": (torch.float32, torch.contiguous_format, True),
        "xla": (torch.float64, torch.contiguous_format, False),
    }
    for name, (dtype, layout, inference) in cases.items():
        device = torch.device(name)
        assert (precise_dtype(device), image_layout(device)) == (dtype, layout)
        with no_gradients(device):
            assert torch.is_inference_mode_enabled() == inference
            assert not torch.is_grad_enabled()
