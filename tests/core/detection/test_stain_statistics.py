"""Warnings of images that a model was not trained for."""

import numpy as np
import pytest
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core.boxes.detections import AGREEMENT_COLUMN, Detections
from napari_beerlanet.core.detection.stain_statistics import (
    class_agreement,
    detection_warnings,
    domain_shift_warnings,
)
from napari_beerlanet.core.stains.domain_shift import subsample_pixels
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


# --- objects that agree with no class ------------------------------------------------------------

INFO = {
    "classes": ["red", "white", "twin"],
    "object_sizes": {
        "red": {"low": 40, "median": 50, "high": 60, "count": 100},
        "white": {"low": 80, "median": 100, "high": 120, "count": 10},
        "twin": {"low": 40, "median": 50, "high": 60, "count": 10},
    },
    "densities_seen": {
        "red": {"mean": [0.2, 0.1], "sd": [0.1, 0.1], "count": 100},
        "white": {"mean": [0.2, 0.4], "sd": [0.1, 0.1], "count": 10},
        "twin": {"mean": [0.1, 0.1], "sd": [0.1, 0.1], "count": 10},
    },
}


def agreement(sides, labels, densities, scale=1.0, stain=1.0, at=500.0, info=INFO):
    """Of square boxes at one place, with these total densities."""
    half = np.array(sides, float)[:, None] * scale / 2
    xyxy = np.hstack([at * scale - half, at * scale - half, at * scale + half, at * scale + half])
    means = stain * np.array(densities, float)[:, None] * [0.5, 0.5]
    labels, scores = np.array(labels), np.full(len(labels), 0.8)
    shape = (round(1000 * scale), round(1000 * scale))
    return class_agreement(info, xyxy, labels, scores, means, shape)


def beside_reds(sides, labels, densities):
    """Six red cells, and these objects."""
    return [50] * 6 + sides, [0] * 6 + labels, [0.3] * 6 + densities


@pytest.mark.parametrize("scale", [0.5, 3.0])
@pytest.mark.parametrize("stain", [0.5, 2.0])
def test_an_object_is_judged_beside_the_commonest_class(scale, stain):
    sides, labels, densities = beside_reds([100, 52], [1, 1], [0.6, 0.32])
    found = agreement(sides, labels, densities, scale, stain)
    assert np.isnan(found[:6]).all()
    assert found[6] == pytest.approx(1, abs=0.01)
    assert found[7] < 0.15


def test_what_cannot_be_judged_is_not():
    sides, labels, densities = beside_reds([100, 50], [1, 2], [0.6, 0.2])
    assert np.isnan(agreement(sides, labels, densities)[7]), "it does not differ from the commonest"
    assert np.isnan(agreement(sides, labels, densities, at=40)).all(), "cut by the border"
    few = agreement(sides[3:], labels[3:], densities[3:])
    assert np.isnan(few).all(), "too few of any class"
    nothing = INFO | {"densities_seen": None}
    assert np.isnan(agreement(sides, labels, densities, info=nothing)).all()


def test_gametocytes_that_are_called_white_cells_are_told_and_white_cells_are_not(model, shared):
    """Fields of another laboratory, with gametocytes; and one of BCCD's with a white cell."""
    fields = shared / "data/malaria-fields"
    for path, size in (
        (fields / "falciparum/images/1603223711-0001-G.jpg", 63),
        (shared / "data/bccd/JPEGImages/BloodImage_00007.jpg", "auto"),
    ):
        pixels = np.asarray(Image.open(path).convert("RGB"))
        found = model.detect(pixels, object_size=size)
        assert found.counts()["WBC"] > 0
        warnings = detection_warnings(model.info, found)
        warned = [text for text in warnings if "not have the size and stain of WBC" in text]
        assert bool(warned) == ("malaria" in str(path)), (path.name, warned)


def test_warnings_count_all_boxes_of_a_class_as_the_table_does():
    boxes = np.array([[0, 0, 9, 9], [50, 50, 59, 59]], np.float32)
    found = Detections(boxes, [0, 0], [0.9, 0.9], ["WBC"])
    found.columns[AGREEMENT_COLUMN] = np.array([0.0, np.nan], np.float32)
    (warning,) = detection_warnings({}, found)
    assert warning.startswith("1 of 2 WBC does not have the size and stain of WBC:")


@pytest.mark.slow
def test_other_laboratories_and_malaria_are_familiar_and_tissue_is_not(model, shared):
    def read(path, side):
        return np.asarray(Image.open(path).convert("RGB"))[:side, :side]

    smears = sorted((shared / "data/other-lab/images").glob("*"))[::100][:4]
    smears += sorted((shared / "data/malaria/images").glob("*"))[:3]
    warned = [told(model, read(path, 800)) for path in smears]
    assert sum(map(bool, warned)) <= 1, warned
    tissue = [told(model, read(p, 1024)) for p in sorted((shared / "data/he").glob("he_1024*.tif"))]
    assert all(tissue)
