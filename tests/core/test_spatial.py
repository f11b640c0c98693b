"""Which boxes are in a window, and how many are where."""

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.spatial import SpatialIndex


def random_boxes(count, extent=1000.0, largest=60.0, seed=0):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(-extent / 3, extent, (count, 2))
    side = np.exp(rng.uniform(np.log(0.5), np.log(largest), (count, 2)))
    return np.hstack([corner, corner + side]).astype(np.float32)


def plain(boxes, window):
    x1, y1, x2, y2 = window
    inside = (boxes[:, 0] < x2) & (boxes[:, 2] > x1) & (boxes[:, 1] < y2) & (boxes[:, 3] > y1)
    return np.flatnonzero(inside)


@settings(max_examples=80)
@given(
    count=st.integers(0, 400),
    largest=st.sampled_from([1.0, 30.0, 3000.0]),
    seed=st.integers(0, 99),
    corner=st.tuples(st.floats(-1500, 1500), st.floats(-1500, 1500)),
    size=st.tuples(st.floats(0, 3000), st.floats(0, 3000)),
)
def test_the_boxes_of_a_window(count, largest, seed, corner, size):
    boxes = random_boxes(count, largest=largest, seed=seed)
    window = (*corner, corner[0] + size[0], corner[1] + size[1])
    np.testing.assert_array_equal(SpatialIndex(boxes).query(window), plain(boxes, window))


def test_boxes_on_the_borders_of_cells():
    """Whole numbers, as a grid of objects has them: no box may be hidden by rounding."""
    x, y = (a.ravel() for a in np.meshgrid(np.arange(40) * 8.0, np.arange(40) * 8.0))
    boxes = np.stack([x, y, x + 8, y + 8], 1).astype(np.float32)
    index = SpatialIndex(boxes)
    for left in range(0, 320, 8):
        window = (left, 16, left + 8, 24)
        np.testing.assert_array_equal(index.query(window), plain(boxes, window))
        assert len(index.query(window)) == 1


def test_the_first_and_the_most():
    boxes = random_boxes(500)
    index, window = SpatialIndex(boxes), (0, 0, 600, 600)
    right = plain(boxes, window)
    np.testing.assert_array_equal(index.query(window, first=200), right[right < 200])
    np.testing.assert_array_equal(index.query(window, most=7), right[:7])
    assert len(index.query(window, first=0)) == 0


def test_what_is_about_a_point():
    boxes = np.array([[0, 0, 10, 10], [5, 5, 20, 20], [30, 30, 40, 40]], np.float32)
    assert SpatialIndex(boxes).at(7, 7).tolist() == [0, 1]
    assert SpatialIndex(boxes).at(25, 25).tolist() == []


def test_counts_are_of_centres():
    boxes = random_boxes(3000)
    index = SpatialIndex(boxes)
    window = (0.0, 100.0, 640.0, 500.0)
    x, y = (boxes[:, :2] + boxes[:, 2:]).T / 2
    right, *_ = np.histogram2d(y, x, bins=(20, 32), range=((100, 500), (0, 640)))
    np.testing.assert_array_equal(index.counts(window, (20, 32)), right)
    keep = np.arange(3000) % 2 == 0
    some = index.counts(window, (20, 32), first=1000, keep=keep)
    few, *_ = np.histogram2d(y[:1000:2], x[:1000:2], bins=(20, 32), range=((100, 500), (0, 640)))
    np.testing.assert_array_equal(some, few)


def test_no_boxes_at_all():
    index = SpatialIndex(np.empty((0, 4), np.float32))
    assert len(index) == len(index.query((0, 0, 9, 9))) == 0
    assert not index.counts((0, 0, 9, 9), (3, 3)).any()


def test_equal_boxes():
    index = SpatialIndex(np.tile(np.float32([3, 4, 5, 6]), (50, 1)))
    assert len(index.query((0, 0, 9, 9))) == 50
    assert len(index.query((5, 0, 9, 9))) == 0


@pytest.mark.slow
def test_a_million_boxes_are_no_stall():
    boxes = random_boxes(1_000_000, extent=100_000, largest=40)
    index = SpatialIndex(boxes)
    times = []
    for k in range(20):
        begun = time.perf_counter()
        found = index.query((4000 * k, 3000 * k, 4000 * k + 2000, 3000 * k + 1500))
        times.append(time.perf_counter() - begun)
        assert len(found) > 100
    assert min(times) < 0.1
