"""A second run on the same image has less to do, and finds the same."""

import numpy as np
import pytest

import napari_beerlanet as nb
from napari_beerlanet.core.detection import inference, pipeline
from napari_beerlanet.samples import blood_smear


@pytest.fixture(scope="module")
def model():
    return nb.load_checkpoint("blood-cells", device="cpu")


@pytest.fixture(scope="module")
def image():
    return blood_smear((300, 400), cell_diameter=40).image


@pytest.mark.parametrize("size", ["auto", 40, 20])
def test_second_run_fits_nothing_and_finds_the_same(model, image, size, monkeypatch):
    first = model.detect(image, object_size=size, tile=320)

    def refuse(*_):
        raise AssertionError("the stain was fitted again")

    monkeypatch.setattr(inference, "fit_stain", refuse)
    monkeypatch.setattr(pipeline, "fit_stain", refuse)
    again = model.detect(image.copy(), object_size=size, tile=320)
    np.testing.assert_array_equal(again.candidates.xyxy, first.candidates.xyxy)
    np.testing.assert_array_equal(again.candidates.scores, first.candidates.scores)
    assert again.report == first.report
    for name, values in first.columns.items():
        np.testing.assert_array_equal(again.columns[name], values)


def test_what_ran_before_makes_no_difference(model, image):
    fresh = nb.load_checkpoint("blood-cells", device="cpu").detect(image, object_size=33, tile=256)
    model.detect(image)
    model.detect(image, object_size=33)
    used = model.detect(image, object_size=33, tile=256)
    np.testing.assert_array_equal(used.candidates.xyxy, fresh.candidates.xyxy)
    np.testing.assert_array_equal(used.candidates.scores, fresh.candidates.scores)


def test_another_image_is_another_image():
    memory = pipeline.ImageCache(images=2)
    pixels = np.arange(300, dtype=np.uint8).reshape(10, 10, 3)
    first = memory.get(pixels)
    assert memory.get(pixels.copy()) is first
    assert memory.get(pixels.reshape(5, 20, 3)) is not first
    assert memory.get(pixels + 1) is not first
    assert memory.get(pixels) is not first, "only the last two are kept"
