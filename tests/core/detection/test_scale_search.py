"""The resolution at which objects are as large as in training, found from what is found."""

import math
from itertools import combinations, pairwise

import numpy as np
import pytest

from discs import SIZES
from napari_beerlanet.core.detection.object_sizes import TrainingSizes
from napari_beerlanet.core.detection.scale_search import (
    MAX_MAGNIFICATION,
    ScaleChoice,
    ScaleSample,
    candidate_scales,
    class_overlap,
    matches_training,
    scale_quality,
    search_scale,
    size_deviation,
)
from tinydata import NAMES

KNOWN = TrainingSizes.of(SIZES, NAMES)
TYPICAL = 40.0


def sample(sizes, labels=0, scores=0.9, area=320.0**2):
    sizes = np.atleast_1d(np.asarray(sizes, float))
    filled = [np.broadcast_to(v, sizes.shape) for v in (labels, scores)]
    return ScaleSample(sizes, filled[0].astype(np.int64), filled[1].astype(float), area)


def test_deviation_is_the_logarithm_of_the_ratio():
    assert size_deviation(sample([80, 80, 80, 80]), KNOWN) == pytest.approx(math.log(2))
    assert size_deviation(sample([20, 20, 20, 300]), KNOWN) == pytest.approx(-math.log(2))
    mixed = sample([40, 40, 75, 75, 16], [0, 0, 1, 1, 2])
    assert size_deviation(mixed, KNOWN) == pytest.approx(0)


def test_deviation_needs_a_few_sure_detections_of_known_classes():
    assert size_deviation(sample([80, 80]), KNOWN) is None
    assert size_deviation(sample([80] * 9, scores=0.3), KNOWN) is None
    unknown = TrainingSizes.of({"RBC": SIZES["RBC"]}, NAMES)
    assert size_deviation(sample([80] * 9, labels=1), unknown) is None


def test_red_cells_of_the_right_size_agree_and_platelets_only_do_not():
    assert matches_training(sample([38, 42, 45, 40]), KNOWN)
    assert not matches_training(sample([80, 82, 85, 90]), KNOWN)
    assert not matches_training(sample([16, 17, 15, 16], labels=2), KNOWN)


def test_quality_is_highest_at_the_size_of_training():
    at = [
        scale_quality(sample([40.0 * f] * int(30 / f**2)), KNOWN) for f in (0.4, 0.7, 1.0, 1.4, 2.5)
    ]
    assert np.argmax(at) == 2
    assert scale_quality(sample([]), KNOWN) == 0


def test_sizes_of_unknown_classes_count_half():
    unknown = TrainingSizes.of({}, NAMES)
    full, half = scale_quality(sample([40.0]), KNOWN), scale_quality(sample([40.0]), unknown)
    assert half == pytest.approx(full / 2, rel=0.02)


def looking_at(true_size, shape, seed=0):
    """What a network trained on SIZES would find in red cells with some platelets."""
    random = np.random.default_rng(seed)
    count = int(0.4 * shape[0] * shape[1] / true_size**2)
    objects = true_size * np.exp(0.12 * random.normal(size=count))
    objects[random.random(count) < 0.1] *= 0.4
    places = random.random((count, 2)) * shape
    medians = np.array([SIZES[name]["median"] for name in NAMES])

    def look(scale):
        window = np.minimum(320 / scale, shape)
        sizes = objects[(places < window).all(1)] * scale
        off = np.log(sizes[:, None] / medians)
        labels = np.argmin(np.abs(off), 1)
        scores = 0.9 * np.exp(-0.5 * (off[np.arange(len(sizes)), labels] / 0.35) ** 2)
        return ScaleSample(sizes, labels, scores, window.prod() * scale**2)

    return look


def search(look, shape, hint=None):
    """What is chosen, and the scales that were looked at, where images of 320 were trained on."""
    tried, home = [], 320 / max(shape)

    def noted(scale, likely):
        tried.append(scale)
        return look(scale)

    scales = candidate_scales(TYPICAL, shape, home)
    return search_scale(noted, scales, home, KNOWN, hint), tried


@pytest.mark.parametrize("true_size", [15, 22, 33, 50, 110, 160, 240, 350, 500, 600])
@pytest.mark.parametrize("seed", range(3))
def test_search_finds_the_size_whatever_it_is(true_size, seed):
    shape = (max(480, 4 * true_size), max(640, 5 * true_size))
    choice, tried = search(looking_at(true_size, shape, seed), shape)
    assert TYPICAL / choice.scale == pytest.approx(true_size, rel=0.15)
    assert choice.how == f"best of {len(tried)} resolutions"
    assert max(tried) < 1.3 * choice.scale, "nothing is looked at that is finer than needed"


@pytest.mark.parametrize("true_size", [68, 80, 92])
def test_the_resolution_of_training_is_preferred_to_those_that_hardly_differ(true_size):
    choice, tried = search(looking_at(true_size, (480, 640)), (480, 640))
    assert choice == ScaleChoice(0.5, "as in training")
    assert max(tried) == 0.5


@pytest.mark.parametrize("true_size", [22, 50, 110, 240])
def test_a_hint_is_looked_at_first_and_used_where_it_agrees(true_size):
    shape = (1200, 1600)
    look, right = looking_at(true_size, shape), TYPICAL / true_size
    for off in (0.75, 1.0, 1.3):
        choice, tried = search(look, shape, off * right)
        assert choice == ScaleChoice(off * right, "as found before")
        assert tried == [off * right]
    for off in (0.05, 0.5, 20):
        choice, tried = search(look, shape, off * right)
        assert TYPICAL / choice.scale == pytest.approx(true_size, rel=0.25)
        assert tried[0] == off * right


def test_a_scale_is_looked_at_once():
    """Sizes that lead to and fro between two scales, and agree with training at neither."""
    look = {True: sample([90] * 9), False: sample([18] * 9)}
    choice, tried = search(lambda scale: look[scale > 0.4], (480, 640))
    assert choice is not None
    assert min(abs(math.log(a / b)) for a, b in combinations(tried, 2)) > 0.99 * math.log(1.15)
    assert len(tried) < 20


def test_search_without_anything_sure_chooses_nothing():
    """An empty field has doubtful detections: many of them, at the finest resolution."""
    shape = (2000, 2000)
    assert search(lambda scale: sample([]), shape)[0] is None
    doubtful, _ = search(lambda scale: sample([40.0] * int(90 * scale), scores=0.05), shape)
    assert doubtful is None


def test_one_sure_object_suffices():
    def look(scale):
        return sample([100 * scale], scores=0.8 if 0.3 < scale < 0.7 else 0.02)

    choice, _ = search(look, (200, 200))
    assert 0.3 < choice.scale < 0.7


def test_images_too_small_for_any_resolution():
    assert candidate_scales(TYPICAL, (1, 1), 320.0) == []
    assert search(lambda scale: pytest.fail("looked"), (1, 1)) == (None, [])


@pytest.mark.parametrize("side", [300, 640, 4000, 100_000])
def test_resolutions_span_the_sizes_of_objects(side):
    home = 320 / side
    tried = candidate_scales(TYPICAL, (side, side), home)
    assert tried == sorted(tried)
    # A network finds objects from 0.4 to 1.8 times the size of training.
    assert TYPICAL / tried[0] >= min(400, side / 3)
    assert TYPICAL / tried[-1] <= 16
    assert max(b / a for a, b in pairwise(tried)) <= 2
    assert (home in tried) == (8 <= TYPICAL / home <= 800)


def test_no_image_is_enlarged_without_end():
    """Whatever sizes a model claims to have seen."""
    scales = candidate_scales(3000, (100, 100), 6.4)
    assert scales
    assert max(scales) <= MAX_MAGNIFICATION
    training = TrainingSizes.of({"a": {"median": 3000, "count": 5}}, ["a"])
    tried = []

    def look(scale, likely):
        tried.append(scale)
        size = np.full(5, 20.0 * scale)
        return ScaleSample(size, np.zeros(5, int), np.full(5, 0.9), 1e4)

    search_scale(look, scales, 6.4, training)
    assert max(tried) <= MAX_MAGNIFICATION


def test_a_class_of_unknown_size_beside_known_ones_counts_half():
    some = TrainingSizes.of({"RBC": SIZES["RBC"]}, NAMES)
    known, unknown = (scale_quality(sample([40.0] * 5, labels=k), some) for k in (0, 1))
    assert unknown == pytest.approx(known / 2)


def test_shares_of_classes_as_in_training_count():
    """A hundred white cells without any red one are less likely than doubtful red cells."""
    red = sample([40.0] * 100, scores=0.4, area=320.0**2)
    white = sample([80.0] * 100, labels=1, scores=0.9, area=640.0**2)
    assert scale_quality(red, KNOWN) > 1.5 * scale_quality(white, KNOWN)


@pytest.mark.parametrize("cells", [1, 3])
def test_a_few_white_cells_alone_may_be_there(cells):
    right = sample([75.0] * cells, labels=1)
    assert class_overlap(right, KNOWN) > 0.75
    assert scale_quality(right, KNOWN) > scale_quality(sample([30.0] * cells, scores=0.5), KNOWN)


@pytest.mark.parametrize(("score", "believed"), [(0.41, False), (0.9, True)])
def test_a_size_far_from_that_of_other_images_has_to_be_clearly_better(score, believed):
    def look(scale):
        return sample([40.0] * 9, scores=score if scale > 0.75 else 0.38)

    alone, _ = search(look, (480, 640))
    assert alone.scale == 1
    among, _ = search(look, (480, 640), 0.5)
    assert (among.scale, among.how) == ((1, alone.how) if believed else (0.5, "as found before"))
