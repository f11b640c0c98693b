"""Sizes of training, by class and all at one scale, whatever their images' magnifications."""

import math

import numpy as np
import pytest

from discs import SIZES
from napari_beerlanet.core.detection.object_sizes import (
    TrainingSizes,
    choose_reference,
    largest_size,
    measure,
    pool_sizes,
    rebase,
    reference_size,
)
from tinydata import NAMES

MEDIANS = {name: size["median"] for name, size in SIZES.items()}


def size(median, count, low=10.0, high=190.0):
    return {"median": median, "low": low, "high": high, "count": count}


def field(random, scale, counts=(40, 5, 10)):
    """Sizes and labels of an image at a scale."""
    labels = np.repeat(np.arange(3), counts)
    medians = np.array([MEDIANS[name] for name in NAMES])
    return scale * medians[labels] * np.exp(0.1 * random.normal(size=len(labels))), labels


def test_sizes_are_those_of_classes_whatever_the_magnifications():
    random = np.random.default_rng(0)
    alike = measure([field(random, 1.0) for _ in range(30)], NAMES)
    mixed = measure([field(random, s) for s in [0.4] * 8 + [1.0] * 14 + [2.5] * 8], NAMES)
    for found in (alike, mixed):
        for name in NAMES:
            entry = found.classes[name]
            assert entry["median"] == pytest.approx(MEDIANS[name], rel=0.05)
            assert entry["high"] / entry["low"] < math.exp(0.1 * 3.29 * 1.2)
        assert [found.classes[name]["count"] for name in NAMES] == [1200, 150, 300]
    assert alike.spread < 0.05
    assert mixed.spread > 0.5


def test_classes_of_other_images_than_the_rest_are_at_their_scale():
    """Platelets are annotated in the images alone that are twice as large."""
    random = np.random.default_rng(1)
    images = [field(random, 1.0, (40, 5, 0)) for _ in range(9)]
    images += [field(random, 2.0, (40, 5, 10)) for _ in range(5)]
    found = measure(images, NAMES).classes
    assert found["Platelets"]["median"] == pytest.approx(MEDIANS["Platelets"], rel=0.08)


def test_few_images_boxes_and_classes():
    sides = np.arange(1.0, 102.0)
    one = measure([(sides, np.zeros(101, int))], NAMES)
    assert one.classes == {"RBC": {"median": 51.0, "low": 6.0, "high": 96.0, "count": 101}}
    assert one.spread == 0
    nothing = np.zeros(0), np.zeros(0, int)
    assert measure([nothing, (sides, np.zeros(101, int)), nothing], NAMES) == one
    assert measure([nothing], NAMES).classes == measure([], NAMES).classes == {}
    alone = [(np.array([s]), np.array([0])) for s in sides]
    entry = measure(alone, NAMES).classes["RBC"]
    assert entry["low"] < 0.75 * entry["median"] < entry["median"] < entry["high"]


def test_all_classes_move_by_one_factor():
    now = {"RBC": size(105.1, 200), "WBC": size(150.0, 6)}
    moved = rebase(SIZES, now)
    for name in NAMES:
        assert moved[name]["median"] == pytest.approx(MEDIANS[name] * 105.1 / 40, abs=0.01)
        assert moved[name]["count"] == SIZES[name]["count"]
    pooled = pool_sizes(SIZES, now, 640)
    ratio = pooled["WBC"]["median"] / pooled["RBC"]["median"]
    assert ratio == pytest.approx(75 / 40, rel=0.03)


@pytest.mark.parametrize("now", [{}, {"ring": size(9.0, 30)}, {"Platelets": size(28.0, 1)}])
def test_without_shared_boxes_the_image_size_tells(now):
    pooled = pool_sizes(SIZES, now, 320, 2.0)
    assert pooled["RBC"]["median"] == pytest.approx(2 * MEDIANS["RBC"])
    assert pooled.keys() == SIZES.keys() | now.keys()


def test_a_few_fields_of_the_same_scale_hardly_change_anything():
    before = {"RBC": size(50.0, 3000), "WBC": size(100.0, 300, 60.0, 130.0)}
    now = {"RBC": size(50.0, 60), "WBC": size(121.0, 300, 80.0, 150.0)}
    pooled = pool_sizes(before, {**now, "ring": size(9.0, 3)}, 320)
    assert pooled["WBC"]["high"] == pytest.approx(
        max(150, 130 * pooled["RBC"]["median"] / 50), abs=0.1
    )
    assert pooled["ring"] == size(9.0, 3)
    assert pool_sizes({}, now, 320) == now
    assert pool_sizes(before, {}, 320) == before


def test_no_size_is_larger_than_a_checkpoint_may_have():
    """As where images half as long are asked for, and one box is much larger than the rest."""
    huge = {"RBC": size(60.0, 20, 50.0, 70.0), "WBC": size(100.0, 3, 90.0, 500.0)}
    pooled = pool_sizes(SIZES, huge, 64)
    assert all(s["low"] <= s["median"] <= s["high"] <= 128 for s in pooled.values())


def test_the_reference_is_chosen_once():
    assert choose_reference(SIZES) == "RBC"
    more = {**SIZES, "Platelets": size(16.0, 9000)}
    assert choose_reference(more) == "Platelets"
    assert choose_reference(more, "RBC") == "RBC"
    assert choose_reference(more, "ring") == "Platelets"
    assert reference_size({"object_sizes": more, "reference_class": "RBC"}) == 40.0
    assert reference_size({"object_sizes": SIZES}) == 40.0
    assert choose_reference({}, "RBC") is reference_size({"object_sizes": {}}) is None


def test_largest_size_is_the_largest_class():
    assert largest_size(SIZES, 7.0) == 90.0
    assert largest_size({}, 7.0) == 7.0


def test_deviation_is_of_classes_whose_size_is_known():
    training = TrainingSizes.of({"RBC": SIZES["RBC"]}, NAMES)
    sizes, labels = np.array([80.0, 80.0, 80.0, 500.0]), np.array([0, 0, 0, 1])
    assert training.deviation(sizes, labels) == (pytest.approx(math.log(2)), 3)
    assert training.deviation(sizes[3:], labels[3:])[1] == 0
