"""Batch statistics of other images: what changes, what does not, and bad input."""

import weakref

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from discs import disc_detector
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.evaluation import batch_statistics
from napari_beerlanet.core.evaluation.batch_statistics import adapt_batch_statistics
from napari_beerlanet.samples import blood_smear
from tinyclasses import cell, tiny_classifier
from tinydata import MODEL, NAMES


def plain_detector():
    torch.manual_seed(0)
    network = StainDetectionModel(dict(MODEL), nc=3, imgsz=64, front_end="none")
    return Detector(network, describe_network(network, "tiny", list(NAMES), 64))


def split(network):
    """Statistics, and all else."""
    state = {name: value.clone() for name, value in network.state_dict().items()}
    moving = {name for name in state if "running_" in name or name.endswith("batches_tracked")}
    return {n: state[n] for n in moving}, {n: v for n, v in state.items() if n not in moving}


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[n], other[n]) for n in one)


def test_a_detector_gets_the_statistics_of_the_images():
    model = plain_detector()
    before = split(model.network)
    images = [blood_smear((64, 64), seed=k, cell_diameter=20.0).image for k in range(3)]
    adapted = adapt_batch_statistics(model, images)
    after = split(adapted.network)
    assert same(split(model.network)[0], before[0])
    assert same(after[1], before[1])
    # The first layer's by hand: all images are of one size, so they are one batch.
    layer = model.network.model[0]
    shown = torch.from_numpy(np.stack(images).transpose(0, 3, 1, 2).copy()).float() / 255
    with torch.no_grad():
        out = layer.conv(shown)
    torch.testing.assert_close(after[0]["model.0.bn.running_mean"], out.mean((0, 2, 3)))
    torch.testing.assert_close(after[0]["model.0.bn.running_var"], out.var((0, 2, 3)))
    assert not adapted.network.training
    assert "3 images" in adapted.info["notes"][-1]
    assert not model.info.get("notes")


def test_images_of_any_size_and_type_count_and_files_too(tmp_path):
    model = plain_detector()
    image = blood_smear((50, 90), seed=1, cell_diameter=20.0).image
    path = tmp_path / "smear.png"
    Image.fromarray(image).save(path)
    first = adapt_batch_statistics(model, [image, image])
    again = adapt_batch_statistics(model, [path, image.astype(np.uint16) * 257])
    assert same(split(first.network)[0], split(again.network)[0])


def test_only_a_batch_of_images_is_in_memory(tmp_path, monkeypatch):
    alive, most = [], []
    resized = batch_statistics._resized

    def watched(pixels, size):
        tile = resized(pixels, size)
        alive.append(weakref.ref(tile))
        most.append(sum(one() is not None for one in alive))
        return tile

    monkeypatch.setattr(batch_statistics, "_resized", watched)
    smears = []
    for k in range(24):
        smears.append(tmp_path / f"{k}.png")
        shape = (64, 64) if k % 3 else (64, 96)
        field = blood_smear(shape, seed=k, cell_diameter=20.0)
        Image.fromarray(field.image).save(smears[-1])
    adapt_batch_statistics(plain_detector(), smears)
    assert len(alive) == 24
    assert max(most) <= 8


def test_beerlanet_is_in_front_as_ever():
    model = disc_detector()
    images = [blood_smear((64, 80), seed=k, cell_diameter=20.0).image for k in range(2)]
    adapted = adapt_batch_statistics(model, images)
    assert same(split(adapted.network)[1], split(model.network)[1])


@pytest.mark.parametrize("front_end", ["beerlanet", "lstainnorm"])
def test_a_classifier_gets_the_statistics_of_the_crops(front_end):
    model = tiny_classifier(front_end=front_end)
    crops = [cell("dark" if k % 2 else "pale", k) for k in range(5)]
    before = split(model.network)
    adapted = adapt_batch_statistics(model, crops)
    assert same(split(model.network)[0], before[0])
    mixed = model.network.apply_front_end(
        torch.from_numpy(model.prepare_crops(crops).transpose(0, 3, 1, 2).copy()) / 255
    )
    mean = mixed.new_tensor([0.485, 0.456, 0.406])[:, None, None]
    sd = mixed.new_tensor([0.229, 0.224, 0.225])[:, None, None]
    with torch.no_grad():
        out = model.network.backbone[0]((mixed - mean) / sd)
    layer = adapted.network.backbone[1]
    torch.testing.assert_close(layer.running_mean, out.mean((0, 2, 3)), atol=1e-5, rtol=1e-4)
    assert layer.momentum == model.network.backbone[1].momentum
    assert not np.allclose(adapted.classify(crops).scores, model.classify(crops).scores)


def test_bad_input_is_one_sentence():
    model = tiny_classifier()
    with pytest.raises(ValueError, match=r"at least two images, not 1\.$"):
        adapt_batch_statistics(model, [cell("dark", 0)])
    linear = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(3, 2))
    with pytest.raises(ValueError, match="no batch normalisation"):
        adapt_batch_statistics(tiny_classifier(linear), [cell("dark", k) for k in range(2)])
