"""Warnings of images that a model was not trained for."""

import numpy as np
import pytest
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core.detection.stain_statistics import domain_shift_warnings, subsample_pixels
from napari_beerlanet.samples import blood_smear, he_field


@pytest.fixture(scope="module")
def model():
    return nb.load_checkpoint("blood-cells", device="cpu")


def told(model, image, **more) -> list[str]:
    found = model.detect(image)
    return domain_shift_warnings(
        model.info, found.report["stain"], scores=found.candidates.scores, **more
    )


@pytest.fixture(scope="module")
def field():
    return blood_smear((480, 640)).image


def test_a_smear_is_familiar(model, field):
    assert told(model, field) == []


def test_an_inverted_image_is_not(model, field):
    said = " ".join(told(model, 255 - field))
    assert "% of full intensity; in training it had 79 %" in said


def test_a_dark_image_is_not(model, field):
    assert any("of full intensity" in text for text in told(model, (field * 0.4).astype(np.uint8)))


def test_a_grey_image_is_not(model, field):
    grey = np.repeat(field.mean(axis=2).astype(np.uint8)[..., None], 3, axis=2)
    assert any("hardly any colour" in text for text in told(model, grey))


def test_a_tinted_background_is_not(model, field):
    tinted = (field * [1, 0.9, 0.35]).astype(np.uint8)
    assert "The background has a different colour than in training." in told(model, tinted)


def test_an_empty_field_is_told(model):
    assert told(model, np.full((200, 200, 3), 200, np.uint8)) == [
        "There is hardly any stain in this image."
    ]


def test_tissue_is_not(model):
    assert any("uncertain" in text for text in told(model, he_field((480, 640)).image))


def test_fluorescence_is_not(model):
    rng = np.random.default_rng(0)
    image = np.full((300, 300, 3), 3, np.uint8)
    y, x = np.mgrid[:300, :300]
    for cy, cx, channel in zip(*rng.uniform(0, 300, (2, 30)), rng.integers(1, 3, 30), strict=True):
        spot = 230 * np.exp(-((y - cy) ** 2 + (x - cx) ** 2) / 300)
        image[..., channel] = np.maximum(image[..., channel], spot.astype(np.uint8))
    assert told(model, image)


@pytest.mark.parametrize(
    ("size", "expected"),
    [((0.5, 0.5), None), ((0.05, 0.05), "10 times smaller"), ((5, 5), "10 times larger")],
)
def test_pixel_sizes_are_compared(size, expected):
    said = domain_shift_warnings({"pixel_size": 0.5}, pixel_size=size)
    assert (expected is None and said == []) or expected in said[0]


def test_nothing_known_nothing_said():
    assert domain_shift_warnings({}, None, (1, 1), np.empty(0)) == []
    stain = {"background": [0, 0, 0], "spectra": [[1]] * 3, "share": [1.0]}
    assert domain_shift_warnings({}, stain | {"optical_density": [1, 1, 1]}) == []


def test_sample_is_bounded():
    assert subsample_pixels(np.zeros((4000, 3000, 3))).shape[0] * 1333 < 600_000
    assert subsample_pixels(np.zeros((40, 30, 3))).shape == (40, 30, 3)


@pytest.mark.slow
def test_other_laboratories_and_malaria_are_familiar_and_tissue_is_not(model, shared):
    def read(path):
        return np.asarray(Image.open(path).convert("RGB"))[:1200, :1200]

    smears = sorted((shared / "data/other-lab/images").glob("*"))[::100][:4]
    smears += sorted((shared / "data/malaria/images").glob("*"))[:3]
    warned = [told(model, read(path)) for path in smears]
    assert sum(map(bool, warned)) <= 1, warned
    tissue = [told(model, read(p)) for p in sorted((shared / "data/he").glob("he_1024*.tif"))]
    assert all(tissue)
