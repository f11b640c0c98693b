"""Stain and HED jitter: other stains and lights, the same cells; padding stays what it is."""

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from skimage.color import combine_stains, hed_from_rgb, rgb_from_hed

from napari_beerlanet.core.detection.ultralytics_api import cv2
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.core.training.train_classifier import ClassifierTrainSettings
from napari_beerlanet.core.training.trainer.data import HedJitter, ReplayedPhotograph, StainJitter
from napari_beerlanet.samples import blood_smear, photograph
from pictures import ODD

NOTHING = {"dyes": 0.0, "strength": 0.0, "light": (1.0, 1.0), "cast": 0.0, "share": 1.0}


@pytest.fixture
def image():
    return blood_smear((64, 64), seed=1, cell_diameter=30.0).image


def changed(image, **settings):
    return StainJitter(**{"share": 1.0, **settings})({"img": image.copy()})["img"]


def test_same_random_numbers_same_image(image):
    random.seed(3)
    first = changed(image, focus=1.0)
    random.seed(3)
    assert (changed(image, focus=1.0) == first).all()
    assert (changed(image, focus=1.0) != first).any()


def test_share_of_none_changes_nothing(image):
    assert (changed(image, share=0.0) == image).all()


def test_what_is_darker_stays_darker_where_only_strength_varies(image):
    random.seed(0)
    dark = changed(image, **{**NOTHING, "strength": 0.3})
    ranks = [np.argsort(np.argsort(i.sum(2, dtype=int).ravel())) for i in (image, dark)]
    assert np.corrcoef(*ranks)[0, 1] > 0.97


def test_background_takes_the_light_that_is_asked_for(image):
    light = changed(image, **{**NOTHING, "light": (0.8, 0.8)})
    background = np.percentile(light.reshape(-1, 3), 95, axis=0)
    np.testing.assert_allclose(background, 0.8 * 255, atol=3)


def test_strength_of_two_doubles_the_optical_density():
    image = blood_smear((64, 64), seed=1, noise=0.0, jpeg_quality=None).image
    jitter = StainJitter(**NOTHING)
    jitter._matrix = lambda: 2 * np.eye(3)
    twice = jitter({"img": image.copy()})["img"]
    density = [-np.log(np.maximum(i, 1) / 255.0) for i in (image, twice)]
    density[0] -= -np.log(np.percentile(image.reshape(-1, 3), 95, axis=0) / 255)
    clear = (twice > 40).all(2) & (density[0] > 0.05).all(2)
    np.testing.assert_allclose(density[1][clear], 2 * density[0][clear], atol=0.06)


def test_a_camera_turns_hues_and_leaves_grey(image):
    grey = np.repeat(image[..., 1:2], 3, axis=2)
    random.seed(2)
    strong = {**NOTHING, "focus": 0.0, "hue": 1.0, "saturation": (0.5, 2.0)}
    assert (
        np.abs(changed(grey, **strong).astype(int) - changed(grey, **NOTHING, focus=0.0)).max() <= 1
    )
    plain = changed(image, **NOTHING, focus=0.0).astype(float)
    turned = changed(image, **strong).astype(float)
    luma = np.array([0.114, 0.587, 0.299])  # BGR
    inside = ((turned > 0) & (turned < 255)).all(2)
    np.testing.assert_allclose((turned @ luma)[inside], (plain @ luma)[inside], atol=1.5)
    assert np.abs(turned - plain).max() > 10
    double = changed(image, **{**strong, "hue": 0.0, "saturation": (2.0, 2.0)}).astype(float)
    inside = ((double > 0) & (double < 255)).all(2)
    colour = [i - (i @ luma)[..., None] for i in (plain, double)]
    np.testing.assert_allclose(colour[1][inside], 2 * colour[0][inside], atol=3)


def test_stray_light_makes_the_darkest_pale(image):
    random.seed(1)
    pale = changed(image, **NOTHING, focus=0.0, flare=0.5).astype(float)
    plain = changed(image, **NOTHING, focus=0.0).astype(float)
    part = (pale - plain) / np.maximum(255 - plain, 1)
    clear = plain < 200
    assert part[clear].std() < 0.02
    assert 0.02 < part[clear].mean() < 0.5


@pytest.mark.parametrize("name", ODD)
def test_odd_images_come_through(name):
    random.seed(0)
    result = changed(ODD[name], focus=1.0)
    assert result.shape == ODD[name].shape
    assert result.dtype == np.uint8


@given(st.integers(0, 2**32 - 1))
def test_padding_stays_whatever_happens(seed):
    random.seed(seed)
    image = blood_smear((32, 32), seed=1, cell_diameter=20.0).image
    image[:, 20:] = 114
    result = changed(image, focus=1.5)
    assert (result[:, 20:] == 114).all()


def test_nothing_but_padding():
    image = np.full((8, 8, 3), 114, np.uint8)
    assert (changed(image) == image).all()


# --- HED jitter ----------------------------------------------------------------------------------


def hed_changed(image, a, b):
    """An image (H, W, 3) RGB whose haematoxylin, eosin and DAB are a ⊙ D + b."""
    jitter = HedJitter(share=1.0)
    numbers = iter([*(value - 1 for value in a), *b])
    jitter.source = SimpleNamespace(random=lambda: 0.0, uniform=lambda low, high: next(numbers))
    return jitter({"img": image[..., ::-1].copy()})["img"][..., ::-1]


def test_hed_is_that_of_scikit_image(image):
    a, b = (1.15, 0.9, 1.1), (0.02, 0.04, 0.01)
    unit = -np.log(1e-6)  # of its optical densities
    D = -np.log(np.maximum(image, 1) / 255) @ hed_from_rgb
    expected = combine_stains((D * a + b) / unit, rgb_from_hed)
    got = hed_changed(image, a, b)
    np.testing.assert_allclose(got, 255 * expected, atol=0.51)
    assert np.abs(got.astype(int) - image).max() > 5


def test_hed_of_no_scale_and_shift_changes_nothing(image):
    assert (HedJitter(scale=0, shift=0, share=1.0).apply(image) == np.maximum(image, 1)).all()


def test_hed_keeps_padding_and_stays_within_its_bounds(image):
    image[:10] = 114
    random.seed(1)
    first = HedJitter(share=1.0).apply(image)
    assert (first[:10] == 114).all()
    assert (first[10:] != image[10:]).any()
    random.seed(1)
    assert (HedJitter(share=1.0).apply(image) == first).all()
    assert (HedJitter(share=0.0).apply(image) == image).all()


def test_one_setting_chooses_the_jitter():
    for settings in (TrainSettings, ClassifierTrainSettings):
        assert isinstance(settings().image_jitter(), StainJitter)
        assert settings(jitter="stain").image_jitter() == settings(jitter=True).image_jitter()
        assert settings(jitter="hed").image_jitter() == HedJitter()
        assert settings(jitter={"kind": "hed", "scale": 0.5}).image_jitter() == HedJitter(scale=0.5)
        assert settings(jitter="none").image_jitter() is None
        assert settings(jitter=False).image_jitter() is None
        with pytest.raises(ValueError, match="jitter must be"):
            settings(jitter="much")
        with pytest.raises(ValueError, match="kind of jitter"):
            settings(jitter={"kind": "much"})
    assert TrainSettings(jitter="none").overrides(64, "x")["hsv_h"] == 0
    assert "hsv_h" not in TrainSettings(jitter="hed").overrides(64, "x")


# --- the photograph ------------------------------------------------------------------------------


def test_the_photograph_is_turned_and_stained_differently_each_time():
    torch.manual_seed(5)
    state = random.getstate()
    plain = ReplayedPhotograph(64, None)
    seen = [plain.as_taken(), *(plain() for _ in range(12))]
    assert all(image.shape == (1, 3, 64, 64) for image in seen)
    assert 4 <= len({image.numpy().tobytes() for image in seen}) <= 8
    for image in seen:
        assert torch.equal(image.flatten(2).sort().values, seen[0].flatten(2).sort().values)
    small = photograph("Blood smear (BCCD)")
    small = cv2.resize(small, (64, 48), interpolation=cv2.INTER_AREA)
    upright = np.full((64, 64, 3), PADDING_GREY, np.uint8)
    upright[8:56] = small
    found = [(image[0].permute(1, 2, 0).numpy() * 255).round() for image in seen]
    turned = [np.rot90(flip, k) for flip in (upright, upright[:, ::-1]) for k in range(4)]
    assert np.array_equal(found[0], upright)
    assert all(any(np.array_equal(one, other) for other in turned) for one in found)
    jittered = ReplayedPhotograph(64, StainJitter(share=1.0))
    first, second = (jittered().mean((0, 2, 3)) for _ in range(2))
    assert (first - second).abs().max() > 0.01
    torch.manual_seed(5)
    again = ReplayedPhotograph(64, StainJitter(share=1.0))().mean((0, 2, 3))
    assert torch.equal(again, first), "a run that is resumed sees the same"
    assert random.getstate() == state, "training images do not notice"


def test_the_photograph_is_normalised_as_the_training_images_are():
    darker = SimpleNamespace(apply=lambda image: SimpleNamespace(rgb=image // 2))
    image, halved = (ReplayedPhotograph(64, None, n).as_taken() for n in (None, darker))
    inside = (slice(None), slice(None), slice(8, 56))
    torch.testing.assert_close(halved[inside], image[inside] / 2, atol=0.01, rtol=0)
