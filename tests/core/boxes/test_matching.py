"""Non-maximum suppression and matching, against their plain versions."""

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes import matching
from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.boxes.matching import match_boxes, non_max_suppression, overlap_pairs
from napari_beerlanet.core.common.threads import set_being_compiled
from plain_matching import plain_matches
from random_boxes import box_sets


def random_boxes(rng, n, extent=100.0, longest=30.0):
    corner = rng.uniform(0, extent, (n, 2))
    return np.hstack([corner, corner + rng.uniform(0, longest, (n, 2))]).astype(np.float32)


def plain_suppress(xyxy, scores, labels, limit, first):
    """Greedy suppression as it is defined, with all pairs."""
    shared = iou(xyxy, xyxy)
    turns = sorted(range(len(xyxy)), key=lambda i: (not first[i], -scores[i], i))
    kept = []
    for i in turns:
        if all(labels[i] != labels[k] or shared[k, i] <= limit for k in kept):
            kept.append(i)
    return sorted(kept, key=lambda i: (-scores[i], i))


LIMITS = st.sampled_from([0.0, 0.05, 0.25, 1 / 3, 0.5, 0.7, 0.95, 1.0])


@given(box_sets(), LIMITS)
def test_suppression_is_plain_greedy(made, limit):
    xyxy, scores, labels, first = made
    kept = non_max_suppression(xyxy, scores, labels, limit, first)
    assert kept.dtype == np.int64
    assert kept.tolist() == plain_suppress(xyxy, scores, labels, limit, first)


@given(box_sets(), LIMITS)
def test_suppression_without_first(made, limit):
    xyxy, scores, labels, _ = made
    nobody = np.zeros(len(xyxy), bool)
    assert non_max_suppression(xyxy, scores, labels, limit).tolist() == plain_suppress(
        xyxy, scores, labels, limit, nobody
    )


@pytest.mark.parametrize("limit", [0.1, 0.45, 0.7])
@pytest.mark.parametrize("spread", [0.0, 3.0])
def test_suppression_agrees_with_torchvision(limit, spread):
    rng = np.random.default_rng(7)
    n = 3000
    side = 20 * np.exp(rng.uniform(-spread, spread, (n, 1))) * rng.uniform(0.7, 1.4, (n, 2))
    corner = rng.uniform(0, 700, (n, 2))
    xyxy = np.hstack([corner, corner + side])
    scores, labels = rng.permutation(n) / n, rng.integers(0, 3, n)
    theirs = torchvision.ops.batched_nms(
        torch.tensor(xyxy), torch.tensor(scores), torch.tensor(labels), limit
    )
    kept = non_max_suppression(xyxy, scores, labels, limit)
    assert 0 < len(kept) < n
    np.testing.assert_array_equal(kept, theirs.numpy())


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e30])
def test_suppression_at_any_scale(factor):
    rng = np.random.default_rng(3)
    xyxy, scores = random_boxes(rng, 200).astype(np.float64), rng.uniform(0, 1, 200)
    labels = np.zeros(200, np.int64)
    kept = non_max_suppression(xyxy, scores, labels, 0.3)
    np.testing.assert_array_equal(non_max_suppression(xyxy * factor, scores, labels, 0.3), kept)


def test_a_first_box_wins_whatever_its_score():
    xyxy = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]], np.float32)
    kept = non_max_suppression(
        xyxy, [0.9, 0.2, 0.1], [0, 0, 0], 0.5, np.array([False, True, False])
    )
    assert kept.tolist() == [1, 2]


def test_a_hundred_thousand_boxes_with_one_as_large_as_the_image():
    """Copies around each object and one box over all: each object remains, and so does that."""
    objects = np.stack(np.meshgrid(np.arange(200), np.arange(100)), -1).reshape(-1, 2) * 40.0
    rng = np.random.default_rng(0)
    corner = np.repeat(objects, 5, axis=0) + rng.uniform(-1, 1, (100_000, 2))
    xyxy = np.vstack([np.hstack([corner, corner + 30]), [[0, 0, 8000, 4000]]]).astype(np.float32)
    scores = np.append(rng.uniform(0, 1, 100_000), 0.5)
    kept = non_max_suppression(xyxy, scores, np.zeros(len(xyxy), np.int64), 0.5)
    assert len(kept) == 20_001
    assert (np.diff(scores[kept]) <= 0).all()
    best = scores[:-1].reshape(-1, 5).argmax(1) + 5 * np.arange(20_000)
    assert set(kept) == {*best, 100_000}


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"iou": 1.5}, "from 0 to 1, not 1.5"),
        ({"iou": float("nan")}, "from 0 to 1, not nan"),
        ({"scores": [0.5, np.nan]}, "finite"),
        ({"scores": [0.5]}, "2 boxes need as many scores"),
        ({"labels": [[0, 1]]}, "2 boxes need as many labels"),
        ({"first": np.array([True])}, "2 boxes need as many marks"),
        ({"xyxy": [[0, 0, 1, np.inf]] * 2}, "Box 0 has coordinates that are no finite numbers"),
    ],
)
def test_suppression_refuses(change, sentence):
    good = {"xyxy": [[0, 0, 1, 1], [2, 2, 3, 3]], "scores": [1, 1], "labels": [0, 1], "iou": 0.5}
    with pytest.raises(ValueError, match=sentence):
        non_max_suppression(**{**good, **change})


@given(box_sets(25), box_sets(25), st.sampled_from([0.1, 0.3, 0.5, 1.0]))
def test_matches_are_plain_greedy(found, true, limit):
    mine = match_boxes(found[0], true[0], limit, found[1], found[2], true[2])
    assert mine.tolist() == plain_matches(found[0], true[0], limit, found[1], found[2], true[2])


def being_compiled(work):
    """What `work` gives, and whether it compiled anything, while another process compiles."""
    kernels = [matching._find_overlaps, matching._match_in_order]
    for kernel in kernels:
        kernel._reset_overloads()
    set_being_compiled(lambda: True)
    try:
        return work(), any(kernel.signatures for kernel in kernels)
    finally:
        set_being_compiled(None)


@given(box_sets(), box_sets(), st.sampled_from([0.1, 0.3, 0.5, 0.9]))
def test_while_kernels_are_compiled_numpy_finds_the_same_matches(found, true, limit):
    """A window that shows matches would otherwise stand still until its own are compiled."""

    def work():
        pairs = overlap_pairs(found[0], true[0])
        matches = match_boxes(found[0], true[0], limit, found[1], found[2], true[2])
        return pairs.starts.tolist(), pairs.truth.tolist(), pairs.iou.tolist(), matches.tolist()

    result, compiled = being_compiled(work)
    assert not compiled
    assert result == work()


def test_matches_in_the_order_given_and_across_classes():
    true = np.array([[0, 0, 10, 10]], np.float32)
    found = np.array([[0, 0, 10, 8], [0, 0, 10, 10]], np.float32)
    assert match_boxes(found, true, 0.5).tolist() == [0, -1]
    assert match_boxes(found, true, 0.5, scores=[0.1, 0.2]).tolist() == [-1, 0]
    assert match_boxes(found, true, 0.5, None, [1, 0], [1]).tolist() == [0, -1]
    assert match_boxes(found, true[:0], 0.5).tolist() == [-1, -1]
    assert match_boxes(found[:0], true, 0.5).shape == (0,)


def test_matches_refuses():
    box = np.array([[0, 0, 1, 1]])
    with pytest.raises(ValueError, match=r"of 0\.1 to 1, not 0"):
        match_boxes(box, box, 0)
    with pytest.raises(ValueError, match="labels of both"):
        match_boxes(box, box, 0.5, None, [0])


def test_boxes_whose_area_is_no_number_overlap_nothing():
    """The product of the sides is below the smallest number: no division by zero."""
    thin = np.array([[0, 0, 0.5, 5e-324]])
    assert len(overlap_pairs(thin, thin).iou) == 0
