"""Boxes: the container, geometry, suppression against its plain version, matches."""

import subprocess
import sys

import numpy as np
import pytest
import torch
import torchvision
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from napari_beerlanet.core import boxes as bx
from napari_beerlanet.core.boxes import Detections, iou, matches, suppress

NAMES = ["RBC", "WBC", "Platelets"]


def random_boxes(rng, n, extent=100.0, longest=30.0):
    corner = rng.uniform(0, extent, (n, 2))
    return np.hstack([corner, corner + rng.uniform(0, longest, (n, 2))]).astype(np.float32)


def some(n=6, seed=0, **rest):
    rng = np.random.default_rng(seed)
    columns = {"OD 1 mean": rng.uniform(0, 1, n).astype(np.float32)}
    return Detections(
        random_boxes(rng, n), rng.integers(0, 3, n), rng.uniform(0, 1, n), NAMES, columns, **rest
    )


@st.composite
def box_sets(draw, most=40):
    """Boxes on a quarter-pixel lattice, so overlaps, equal boxes, touching and empty ones occur."""
    n = draw(st.integers(0, most))
    reach = draw(st.sampled_from([8, 60, 4000]))
    corner = draw(hnp.arrays(np.int64, (n, 2), elements=st.integers(-reach, reach)))
    longest = draw(st.sampled_from([3, 40, 3000]))
    side = draw(hnp.arrays(np.int64, (n, 2), elements=st.integers(0, longest)))
    scores = draw(hnp.arrays(np.float32, n, elements=st.sampled_from([0.1, 0.25, 0.3, 0.5, 0.9])))
    labels = draw(hnp.arrays(np.int64, n, elements=st.integers(0, 2)))
    first = draw(hnp.arrays(np.bool_, n))
    return np.hstack([corner, corner + side]).astype(np.float32) / 4, scores, labels, first


def plain_suppress(xyxy, scores, labels, limit, first):
    """Greedy suppression as it is defined, with all pairs."""
    shared = iou(xyxy, xyxy)
    turns = sorted(range(len(xyxy)), key=lambda i: (not first[i], -scores[i], i))
    kept = []
    for i in turns:
        if all(labels[i] != labels[k] or shared[k, i] <= limit for k in kept):
            kept.append(i)
    return sorted(kept, key=lambda i: (-scores[i], i))


# --- suppression ---------------------------------------------------------------------------------

LIMITS = st.sampled_from([0.0, 0.05, 0.25, 1 / 3, 0.5, 0.7, 0.95, 1.0])


@given(box_sets(), LIMITS)
def test_suppression_is_plain_greedy(made, limit):
    xyxy, scores, labels, first = made
    kept = suppress(xyxy, scores, labels, limit, first)
    assert kept.dtype == np.int64
    assert kept.tolist() == plain_suppress(xyxy, scores, labels, limit, first)


@given(box_sets(), LIMITS)
def test_suppression_without_first(made, limit):
    xyxy, scores, labels, _ = made
    nobody = np.zeros(len(xyxy), bool)
    assert suppress(xyxy, scores, labels, limit).tolist() == plain_suppress(
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
    kept = suppress(xyxy, scores, labels, limit)
    assert 0 < len(kept) < n
    np.testing.assert_array_equal(kept, theirs.numpy())


@pytest.mark.parametrize("factor", [1e-30, 1e-3, 1e30])
def test_suppression_at_any_scale(factor):
    rng = np.random.default_rng(3)
    xyxy, scores = random_boxes(rng, 200).astype(np.float64), rng.uniform(0, 1, 200)
    labels = np.zeros(200, np.int64)
    kept = suppress(xyxy, scores, labels, 0.3)
    np.testing.assert_array_equal(suppress(xyxy * factor, scores, labels, 0.3), kept)


def test_a_first_box_wins_whatever_its_score():
    xyxy = np.array([[0, 0, 10, 10], [0, 0, 10, 9], [50, 50, 60, 60]], np.float32)
    kept = suppress(xyxy, [0.9, 0.2, 0.1], [0, 0, 0], 0.5, np.array([False, True, False]))
    assert kept.tolist() == [1, 2]


def test_a_hundred_thousand_boxes_with_one_as_large_as_the_image():
    """Copies around each object and one box over all: each object remains, and so does that."""
    objects = np.stack(np.meshgrid(np.arange(200), np.arange(100)), -1).reshape(-1, 2) * 40.0
    rng = np.random.default_rng(0)
    corner = np.repeat(objects, 5, axis=0) + rng.uniform(-1, 1, (100_000, 2))
    xyxy = np.vstack([np.hstack([corner, corner + 30]), [[0, 0, 8000, 4000]]]).astype(np.float32)
    scores = np.append(rng.uniform(0, 1, 100_000), 0.5)
    kept = suppress(xyxy, scores, np.zeros(len(xyxy), np.int64), 0.5)
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
        suppress(**{**good, **change})


# --- geometry ------------------------------------------------------------------------------------


def test_overlaps_by_hand():
    a = np.array([[0, 0, 4, 4], [2, 2, 2, 5]], np.float32)
    b = np.array([[2, 0, 6, 4], [1, 1, 2, 2], [9, 9, 10, 10], [2, 2, 2, 5]], np.float32)
    np.testing.assert_array_equal(bx.intersection(a, b)[0], [8, 1, 0, 0])
    np.testing.assert_allclose(iou(a, b), [[1 / 3, 1 / 16, 0, 0], [0, 0, 0, 0]])
    np.testing.assert_allclose(bx.over_smaller(a, b)[0], [0.5, 1, 0, 0])
    assert iou(a, b[:0]).shape == (2, 0)


def test_overlap_of_far_boxes_is_not_lost_to_rounding():
    """In float32, areas of a slide's larger boxes differ by more than the overlap of small ones."""
    box = np.array([[60_000, 60_000, 64_097, 64_097]], np.float32)
    assert iou(box, box)[0, 0] == 1
    assert bx.area(box)[0] == 4097**2


@given(box_sets())
def test_iou_is_torchvisions(made):
    xyxy = made[0].astype(np.float64)
    theirs = torchvision.ops.box_iou(torch.tensor(xyxy), torch.tensor(xyxy)).numpy()
    np.testing.assert_allclose(iou(xyxy, xyxy), np.nan_to_num(theirs), atol=1e-12)


@given(box_sets(), st.sampled_from([None, (480, 640), (4000, 7)]))
def test_centres_and_back(made, shape):
    xyxy = made[0]
    np.testing.assert_allclose(bx.from_centres(bx.to_centres(xyxy, shape), shape), xyxy, atol=1e-6)


def test_centres_by_hand():
    box = np.array([[3, 10, 6, 30]], np.float32)
    assert bx.to_centres(box).tolist() == [[4.5, 20, 3, 20]]
    assert bx.to_centres(box, (100, 10)).tolist() == [[0.45, 0.2, 0.3, 0.2]]


def test_scaling_moving_and_clipping():
    box = np.array([[3, 10, 6, 30]], np.float32)
    assert bx.scale(box, 2).tolist() == [[6, 20, 12, 60]]
    assert bx.scale(box, 2, 0.5).tolist() == [[6, 5, 12, 15]]
    assert bx.translate(box, -4, 5).tolist() == [[-1, 15, 2, 35]]
    assert bx.clip(bx.translate(box, -4, 5), (20, 100)).tolist() == [[0, 15, 2, 20]]
    outside = bx.clip(bx.translate(box, 500, 0), (100, 100))
    assert bx.area(outside).tolist() == [0]
    for moved in (bx.scale(box, 0.3), bx.translate(box, 0.1, 0), outside):
        assert moved.dtype == np.float32


# --- matches -------------------------------------------------------------------------------------


def plain_matches(found, true, limit, scores, found_labels, true_labels):
    shared = iou(found, true)
    taken = [-1] * len(found)
    for i in sorted(range(len(found)), key=lambda i: (-scores[i], i)):
        free = [j for j in range(len(true)) if j not in taken and found_labels[i] == true_labels[j]]
        best = max(free, key=lambda j: (shared[i, j], -j), default=None)
        if best is not None and shared[i, best] >= limit:
            taken[i] = best
    return taken


@given(box_sets(25), box_sets(25), st.sampled_from([0.01, 0.3, 0.5, 1.0]))
def test_matches_are_plain_greedy(found, true, limit):
    mine = matches(found[0], true[0], limit, found[1], found[2], true[2])
    assert mine.tolist() == plain_matches(found[0], true[0], limit, found[1], found[2], true[2])


def test_matches_in_the_order_given_and_across_classes():
    true = np.array([[0, 0, 10, 10]], np.float32)
    found = np.array([[0, 0, 10, 8], [0, 0, 10, 10]], np.float32)
    assert matches(found, true, 0.5).tolist() == [0, -1]
    assert matches(found, true, 0.5, scores=[0.1, 0.2]).tolist() == [-1, 0]
    assert matches(found, true, 0.5, None, [1, 0], [1]).tolist() == [0, -1]
    assert matches(found, true[:0], 0.5).tolist() == [-1, -1]
    assert matches(found[:0], true, 0.5).shape == (0,)


def test_matches_refuses():
    box = np.array([[0, 0, 1, 1]])
    with pytest.raises(ValueError, match="above 0 to 1, not 0"):
        matches(box, box, 0)
    with pytest.raises(ValueError, match="labels of both"):
        matches(box, box, 0.5, None, [0])


# --- the container -------------------------------------------------------------------------------


def test_types_and_order():
    d = some(50)
    assert (d.xyxy.dtype, d.labels.dtype, d.scores.dtype) == (np.float32, np.int64, np.float32)
    assert (np.diff(d.scores) <= 0).all()
    rng = np.random.default_rng(0)  # as `some` made them
    columns = rng.uniform(0, 1, 50).astype(np.float32)
    xyxy, labels, scores = random_boxes(rng, 50), rng.integers(0, 3, 50), rng.uniform(0, 1, 50)
    order = np.argsort(-scores)
    np.testing.assert_array_equal(d.xyxy, xyxy[order])
    np.testing.assert_array_equal(d.labels, labels[order])
    np.testing.assert_array_equal(d.columns["OD 1 mean"], columns[order])


def test_equal_scores_keep_their_order():
    d = Detections([[i, 0, i + 1, 1] for i in range(9)], [0] * 9, [0.5] * 9, ["cell"])
    assert d.xyxy[:, 0].tolist() == list(range(9))


def test_indexing():
    d = some(20, candidates=some(30), image_shape=(5, 6), report={"scale": 2})
    for part in (d[d.labels == 1], d[[3, 4, 9]], d[2:5], d[7], d[np.zeros(20, bool)], d[-1]):
        assert isinstance(part, Detections)
        assert part.image_shape == (5, 6)
        assert part.report == {"scale": 2}
        assert part.candidates is None
        assert part.columns["OD 1 mean"].shape == (len(part),)
    assert (d[d.labels == 1].labels == 1).all()
    np.testing.assert_array_equal(d[[3, 4, 9]].scores, d.scores[[3, 4, 9]])
    assert len(d[7]) == 1
    assert [len(one) for one in d] == [1] * 20
    with pytest.raises(IndexError):
        d[20]


def test_thresholds_move_both_ways():
    everything = some(100)
    shown = everything.above(0.25)
    assert 0 < len(shown.above(0.8)) < len(shown) < 100
    assert (shown.scores >= 0.25).all()
    assert len(shown.above(0.8).above(0.0)) == 100
    np.testing.assert_array_equal(shown.above(0.8).above(0.25).xyxy, shown.xyxy)


def test_a_threshold_for_each_class():
    everything = some(100)
    shown = everything.above({"RBC": 0.9, "WBC": 0.1})
    red, white = everything.labels == 0, everything.labels == 1
    expected = (red & (everything.scores >= 0.9)) | (white & (everything.scores >= 0.1))
    np.testing.assert_array_equal(shown.xyxy, everything.xyxy[expected])


def test_a_score_equal_to_the_threshold_stays():
    d = Detections([[0, 0, 1, 1]], [0], [0.3], ["cell"])
    assert len(d.above(0.3)) == len(d.above({"cell": 0.3})) == 1


def test_counts_and_empty():
    d = Detections([[0, 0, 1, 1]] * 3, [2, 0, 2], [0.5] * 3, NAMES)
    assert d.counts() == {"RBC": 1, "WBC": 0, "Platelets": 2}
    none = Detections.empty(NAMES, image_shape=(3, 4))
    assert len(none) == len(none.above(0.1)) == len(none.to_frame()) == 0
    assert none.xyxy.shape == (0, 4)
    assert none.counts() == {"RBC": 0, "WBC": 0, "Platelets": 0}
    assert none.image_shape == (3, 4)


def test_frame():
    d = Detections(
        [[1, 2, 4, 10]], [1], [0.5], NAMES, {"OD 1 mean": [0.25]}, pixel_size=(0.5, 0.25)
    )
    row = d.to_frame().iloc[0].to_dict()
    assert row == {
        **{"class": "WBC", "confidence": 0.5, "x1": 1, "y1": 2, "x2": 4, "y2": 10},
        **{"width": 3, "height": 8, "centre_x": 2.5, "centre_y": 6},
        **{"x1_um": 0.25, "y1_um": 1, "x2_um": 1, "y2_um": 5, "width_um": 0.75, "height_um": 4},
        **{"centre_x_um": 0.625, "centre_y_um": 3, "OD 1 mean": 0.25},
    }
    assert len(some(7).to_frame()) == 7
    assert "x1_um" not in some(7).to_frame()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"xyxy": [[0, 0, 1]]}, r"shape \(n, 4\)"),
        ({"xyxy": [["a", "b", "c", "d"]]}, "Boxes are numbers"),
        ({"xyxy": [[0, 0, 1, np.nan]]}, "Box 0 has coordinates that are no finite numbers"),
        ({"xyxy": [[5, 0, 1, 1]]}, r"Box 0 ends before it begins .*\[5.0, 0.0, 1.0, 1.0\]"),
        ({"labels": [3]}, "Label 3 of box 0 has no name: there are 3 classes"),
        ({"labels": [-1]}, "Label -1 of box 0 has no name"),
        ({"labels": [0.5]}, "whole numbers"),
        ({"labels": [0, 1]}, "1 boxes need as many labels"),
        ({"scores": [1.5]}, "Scores are from 0 to 1; number 0 is 1.5"),
        ({"scores": [np.nan]}, "Scores are from 0 to 1; number 0 is nan"),
        ({"columns": {"x1": [0]}}, 'may not be called "x1"'),
        ({"columns": {"OD": [0, 1]}}, 'as many values of "OD"'),
    ],
)
def test_refuses(change, sentence):
    good = {"xyxy": [[0, 0, 1, 1]], "labels": [0], "scores": [0.5], "names": NAMES}
    with pytest.raises(ValueError, match=sentence):
        Detections(**{**good, **change})


def test_import_is_light():
    code = (
        "import sys, napari_beerlanet.core.boxes\n"
        "print(sorted({'numba', 'pandas', 'torch', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
