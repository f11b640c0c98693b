"""The reference against forgetting: the same fields everywhere, measured before and after."""

import copy

import numpy as np
import pytest
import torch

import napari_beerlanet as nb
from napari_beerlanet.core.evaluation.dataset import (
    compare_on_reference,
    evaluate_on_reference,
    reference_images,
)
from napari_beerlanet.samples import NUCLEI


@pytest.fixture(scope="module")
def starter():
    return nb.load_checkpoint("blood-cells", device="cpu")


def test_fields_are_the_same_each_time_and_of_the_size_that_the_model_knows(starter):
    first, again = (reference_images(starter.info, 2) for _ in range(2))
    for a, b in zip(first, again, strict=True):
        np.testing.assert_array_equal(a.image, b.image)
    sizes = first[0].boxes[first[0].labels == 0]
    width = np.median(np.sqrt(np.prod(sizes[:, 2:] - sizes[:, :2], axis=1)))
    known = starter.info["object_sizes"]["RBC"]["median"] * 640 / starter.info["image_size"]
    assert width == pytest.approx(known, rel=0.2)


def test_every_kind_of_model_has_the_fields_that_suit_it():
    nuclei = reference_images({"classes": list(NUCLEI), "image_size": 640}, 1)
    assert nuclei[0].names == NUCLEI
    assert reference_images({"classes": ["bicycle"], "image_size": 640}) == []


@pytest.mark.slow
def test_a_model_that_is_damaged_has_forgotten_and_one_that_is_not_has_not(starter):
    same = compare_on_reference(starter, starter, 1)
    assert same.after["mAP50"] == same.before["mAP50"]
    assert same.before["mAP50"] > 0.7
    network = copy.deepcopy(starter.network)
    with torch.no_grad():
        for parameter in network.model[-1].parameters():
            parameter.mul_(0.5)
    damaged = compare_on_reference(starter, type(starter)(network, starter.info), 1)
    assert damaged.before["mAP50"] - damaged.after["mAP50"] > 0.1


@pytest.mark.slow
def test_only_classes_that_both_know_are_compared(starter):
    other = copy.copy(starter)
    names = {"RBC": "rbc", "WBC": "Blast", "Platelets": "Platelets"}
    sizes = {names[name]: size for name, size in starter.info["object_sizes"].items()}
    other.info = {**starter.info, "classes": list(names.values()), "object_sizes": sizes}
    found = compare_on_reference(starter, other, 1)
    assert found.classes == ["RBC", "Platelets"]
    assert found.before["mAP50"] == pytest.approx(found.after["mAP50"])
    assert (
        evaluate_on_reference(starter, reference_images(starter.info, 1), ["RBC"])["per_class"][
            "WBC"
        ]["count"]
        == 0
    )
    stranger = copy.copy(starter)
    stranger.info = {**starter.info, "classes": ["a", "b", "c"]}
    assert compare_on_reference(starter, stranger, 1) is None
