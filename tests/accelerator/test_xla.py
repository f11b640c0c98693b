"""The same numbers on a device that is not the CPU: torch_xla's, which needs no GPU.

`make test-accelerator` makes an environment for it. Images are small and iterations few because XLA
compiles everything anew for every shape.
"""

import copy
import os

import numpy as np
import pytest

# XLA takes minutes to optimise what runs for a moment.
os.environ.setdefault(
    "XLA_FLAGS",
    "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true",
)
torch_xla = pytest.importorskip("torch_xla", reason="needs torch_xla: make test-accelerator")

import torch

import napari_beerlanet as nb
from discs import SIZES, enlivened
from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.common.device import describe_device, pick_device
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.evaluation.dataset import evaluate
from napari_beerlanet.core.stains.layer import BeerLaNet
from napari_beerlanet.core.training.fine_tune import fine_tune
from napari_beerlanet.core.training.train_classifier import train_classifier
from napari_beerlanet.samples import photograph
from tinyclasses import cell, tiny_backbone, tiny_classifier, write_classes
from tinydata import MODEL, NAMES, write_smears

pytestmark = pytest.mark.filterwarnings("ignore")

# Before the first gradient of the process, or there is never one of the device.
DEVICE = torch.zeros(1, device=torch_xla.device()).device
SMEAR = photograph("Blood smear (BCCD)")[:160, :192]
FRONT_ENDS = ("beerlanet", "lstainnorm", "grey", "none")


@pytest.fixture(autouse=True)
def batch_norm_with_fixed_statistics(monkeypatch):
    """torch_xla 2.9 fails in its gradient, so here it is by its formula."""
    whole = torch.nn.functional.batch_norm

    def batch_norm(x, mean, var, weight=None, bias=None, training=False, momentum=0.1, eps=1e-5):
        if training or x.device.type != "xla":
            return whole(x, mean, var, weight, bias, training, momentum, eps)
        scale = weight * (var + eps).rsqrt()
        return x * scale[:, None, None] + (bias - mean * scale)[:, None, None]

    monkeypatch.setattr(torch.nn.functional, "batch_norm", batch_norm)


def planes_of(image):
    """(1, 3, H, W) in [0, 1]."""
    return torch.from_numpy(np.ascontiguousarray(image.transpose(2, 0, 1)))[None].float() / 255


def lively_detector(front_end="beerlanet"):
    """Finds things in the smear, if not the right ones."""
    torch.manual_seed(0)
    front = {"iterations": 3, "components": 3}
    network = StainDetectionModel(dict(MODEL), nc=3, imgsz=96, front_end=front_end, **front)
    if front_end == "beerlanet":
        network.fit_mix()
    with torch.no_grad():
        enlivened(network, SMEAR[:96, :96])
    info = describe_network(network, "lively", list(NAMES), 96, object_sizes={"RBC": SIZES["RBC"]})
    return Detector(network, info)


def assert_same_detections(found, expected):
    assert len(expected) > 10
    assert len(found) == len(expected)
    np.testing.assert_allclose(found.xyxy, expected.xyxy, atol=0.01)
    np.testing.assert_allclose(found.scores, expected.scores, atol=1e-4)
    np.testing.assert_array_equal(found.labels, expected.labels)


def test_the_device_is_no_cpu():
    assert DEVICE.type == "xla"
    assert pick_device("xla:0").type == "xla"
    assert describe_device(DEVICE) == "xla:0"


@pytest.mark.parametrize("method", ["palette", "dense"])
def test_layer_forward_and_backward(method):
    images = planes_of(SMEAR[:24, :32])
    here = BeerLaNet(components=2, iterations=3, method=method)
    there = copy.deepcopy(here).to(DEVICE)
    results = []
    for network, device in ((here, "cpu"), (there, DEVICE)):
        densities = network(images.to(device))
        assert densities.device.type == torch.device(device).type
        densities.square().mean().backward()
        results.append([densities.detach(), *(p.grad for p in network.parameters())])
    for expected, found in zip(*results, strict=True):
        torch.testing.assert_close(found.cpu(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_front_end_and_detector(front_end):
    detector = lively_detector(front_end)
    there, images = detector.to(DEVICE), planes_of(SMEAR[:64, :96])
    with torch.no_grad():
        mixed, found = there.network.apply_front_end(images.to(DEVICE)), there.network
        expected = detector.network.apply_front_end(images)
        torch.testing.assert_close(mixed.cpu(), expected, rtol=1e-4, atol=1e-5)
        found = there.network(images.to(DEVICE))[0].cpu()
        torch.testing.assert_close(found, detector.network(images)[0], rtol=1e-3, atol=1e-3)


def test_the_mix_is_fitted_on_the_device():
    here, there = lively_detector().network, lively_detector().to(DEVICE).network
    assert there.fit_mix([SMEAR[:32, :32]]) == pytest.approx(here.fit_mix([SMEAR[:32, :32]]), 1e-4)
    torch.testing.assert_close(there.mix.weight.cpu(), here.mix.weight, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("front_end", FRONT_ENDS)
def test_tiled_detection(front_end):
    detector, options = (
        lively_detector(front_end),
        {"object_size": 40, "tile": 128, "batch": 2, "openvino": "off"},
    )
    expected = detector.detect(SMEAR, **options).candidates
    found = detector.to(DEVICE).detect(SMEAR, **options).candidates
    assert found.report["tiles"] > 1
    assert found.report["device"] == "xla:0"
    assert_same_detections(found, expected)
    for name, values in expected.columns.items():
        np.testing.assert_allclose(found.columns[name], values, rtol=1e-3, atol=1e-4)


def test_decomposition():
    options = {"iterations": 3, "components": 2, "method": "dense"}
    expected = nb.decompose(SMEAR[:24, :32], **options)
    found = nb.decompose(SMEAR[:24, :32], device="xla:0", **options)
    np.testing.assert_allclose(found.densities, expected.densities, atol=1e-5)
    np.testing.assert_allclose(found.spectra, expected.spectra, atol=1e-6)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_smears(tmp_path_factory.mktemp("smears"), train=2, val=1, side=64)


def test_evaluation(data):
    detector = lively_detector()
    expected, found = (evaluate(model, data) for model in (detector, detector.to(DEVICE)))
    for key in ("mAP50", "mAP50-95", "precision", "recall"):
        assert found[key] == pytest.approx(expected[key], abs=1e-3)


@pytest.mark.parametrize("scope", ["stain", "head", "all"])
def test_an_epoch_of_training(scope, data, tmp_path):
    options = {"scope": scope, "epochs": 1, "batch": 2, "image_size": 64, "jitter": "none"}
    options |= {"mosaic": 0.0}
    parent, states = lively_detector(), []
    for device in ("cpu", "xla:0"):
        model = fine_tune(parent, data, tmp_path / device, device=device, **options)
        assert model.device.type == device.partition(":")[0]
        states.append({k: v.cpu().float() for k, v in model.network.state_dict().items()})
    before = parent.network.state_dict()
    changed = [name for name, value in states[0].items() if not torch.equal(value, before[name])]
    assert changed
    for name, expected in states[0].items():
        torch.testing.assert_close(states[1][name], expected, rtol=2e-2, atol=2e-3, msg=name)


def test_classification():
    crops = [cell("dark", 1), cell("pale", 2), cell("dark", 3)]
    for settings in ({}, {"views": 2}, {"front_end": "lstainnorm"}, {"normalize": True}):
        classifier = tiny_classifier(iterations=2, **settings)
        expected, found = (m.classify(crops).scores for m in (classifier, classifier.to(DEVICE)))
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_an_epoch_of_training_of_a_classifier(tmp_path):
    crops, scores = write_classes(tmp_path / "crops", 4), []
    options = {"backbone": tiny_backbone(), "epochs": 1, "batch": 4, "input_size": 24}
    for device in ("cpu", "xla:0"):
        options["backbone"] = tiny_backbone()
        model = train_classifier(
            crops, tmp_path / device, device=device, iterations=2, components=2, **options
        )
        assert model.device.type == device.partition(":")[0]
        scores.append(model.to("cpu").classify([cell("dark", 9), cell("pale", 9)]).scores)
    np.testing.assert_allclose(scores[1], scores[0], atol=1e-2)


def test_checkpoints_are_the_same_bytes(tmp_path):
    detector = lively_detector()
    save_checkpoint(detector, tmp_path / "here.safetensors")
    save_checkpoint(detector.to(DEVICE), tmp_path / "there.safetensors")
    assert (tmp_path / "here.safetensors").read_bytes() == (
        tmp_path / "there.safetensors"
    ).read_bytes()
    loaded = load_checkpoint(tmp_path / "there.safetensors", "xla:0")
    assert loaded.device.type == "xla"
    expected = load_checkpoint(tmp_path / "here.safetensors", "cpu").network.state_dict()
    for name, value in loaded.network.state_dict().items():
        assert torch.equal(value.cpu(), expected[name])
