"""Memory that does not suffice, at each stage: the run steps down and says so, the next one works.

The batch and the tile are in `test_inference`, a step of training in `training/test_fine_tune`.
"""

import numpy as np
import pytest
import torch

from discs import disc_detector, draw, scattered
from napari_beerlanet.core.common import device as device_module
from napari_beerlanet.core.common.device import place_on
from napari_beerlanet.core.detection import inference, pipeline
from napari_beerlanet.core.detection.inference import InferenceRunner
from napari_beerlanet.core.detection.slide_detector import SlideDetection, detect_slide

SHAPE = (700, 900)
DISCS = scattered(SHAPE, 40, seed=1, spread=0.1)
TOO_LITTLE = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")
SETTINGS = {"object_size": 40, "tile": 256}


@pytest.fixture(scope="module")
def image():
    return draw(SHAPE, DISCS)


@pytest.fixture(scope="module")
def expected(image):
    return disc_detector().detect(image, **SETTINGS)


@pytest.fixture
def card(monkeypatch):
    """A CUDA device that has a name, and no memory."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tiny card")
    return torch.device("cuda:0")


def same(found, expected):
    np.testing.assert_allclose(found.xyxy, expected.xyxy, atol=0.01)
    np.testing.assert_array_equal(found.labels, expected.labels)


def test_loading(card, monkeypatch):
    network, move = torch.nn.Linear(2, 2), torch.nn.Module.to

    def to(self, device):
        if torch.device(device).type == "cuda":
            raise TOO_LITTLE
        return move(self, device)

    monkeypatch.setattr(torch.nn.Module, "to", to)
    where, notes = place_on(network, card)
    assert where.type == "cpu"
    assert notes == [
        "Memory of Tiny card (cuda:0) did not suffice for the model; the CPU was used."
    ]
    assert network(torch.ones(1, 2)).shape == (1, 2)


def test_the_copy_that_runs(card, monkeypatch, image, expected):
    detector, copy_to = disc_detector(), device_module.copy_to

    def scarce(module, device):
        if device.type == "cuda":
            raise TOO_LITTLE
        return copy_to(module, device)

    monkeypatch.setattr(inference, "copy_to", scarce)
    detector.device = card
    found = detector.detect(image, **SETTINGS)
    same(found, expected)
    assert found.report["notes"] == [
        "Memory of Tiny card (cuda:0) did not suffice for the network; the CPU was used."
    ]
    assert detector._runner is None, "the next run is to try the device again"
    detector.device = torch.device("cpu")
    assert detector.detect(image, **SETTINGS).report["notes"] == []


def test_the_fit_of_the_stains(monkeypatch, image, expected):
    detector, fit, calls = disc_detector(), pipeline.fit_stain, []

    def scarce(network, pixels):
        calls.append(pixels.shape)
        if len(calls) == 1:
            raise MemoryError
        return fit(network, pixels)

    monkeypatch.setattr(pipeline, "fit_stain", scarce)
    found = detector.detect(image, **SETTINGS)
    assert [note for note in found.report["notes"] if "fitted to a sample of them" in note]
    assert len(found) == len(expected)
    again = detector.detect(image, **SETTINGS)
    assert len(again) == len(expected)


def test_suppression_of_duplicates(monkeypatch, image, expected):
    detector, suppress, failed = disc_detector(), inference.non_max_suppression, []

    def scarce(*given, **more):
        if not failed:
            failed.append(True)
            raise MemoryError
        return suppress(*given, **more)

    monkeypatch.setattr(inference, "non_max_suppression", scarce)
    found = detector.detect(image, batch=4, **SETTINGS)
    same(found, expected)
    assert [note for note in found.report["notes"] if note.startswith("Memory did not suffice")]
    again = detector.detect(image, batch=4, **SETTINGS)
    same(again, expected)
    assert again.report["notes"] == []


def test_tiles_of_a_slide(monkeypatch, image, expected):
    """Each is run again by itself."""
    infer, seen = InferenceRunner.infer_tiles, set()

    def scarce(self, cut, tiles, *given, **more):
        if tiles[0] not in seen:
            seen.add(tiles[0])
            raise TOO_LITTLE
        return infer(self, cut, tiles, *given, **more)

    monkeypatch.setattr(InferenceRunner, "infer_tiles", scarce)
    same(detect_slide(disc_detector(), image, skip_glass=False, **SETTINGS), expected)


def test_a_slide_without_any_memory_ends_with_a_sentence(monkeypatch, image, expected):
    detector = disc_detector()
    with monkeypatch.context() as patch:

        def fail(self, *given, **more):
            raise TOO_LITTLE

        patch.setattr(InferenceRunner, "infer_tiles", fail)
        run = SlideDetection(detector, image, skip_glass=False, **SETTINGS)
        with run, pytest.raises(MemoryError, match="does not suffice for tiles of 256 pixels"):
            list(run.detect_tiles())
    same(detect_slide(detector, image, skip_glass=False, **SETTINGS), expected)
