"""Which boxes are in a window: what the index finds is what a full search finds."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.spatial_index import DynamicSpatialIndex, SpatialIndex


def random_boxes(count, extent=1000.0, largest=60.0, seed=0):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(-extent / 3, extent, (count, 2))
    side = np.exp(rng.uniform(np.log(0.5), np.log(largest), (count, 2)))
    return np.hstack([corner, corner + side]).astype(np.float32)


def plain(boxes, window):
    x1, y1, x2, y2 = window
    inside = (boxes[:, 0] < x2) & (boxes[:, 2] > x1) & (boxes[:, 1] < y2) & (boxes[:, 3] > y1)
    return np.flatnonzero(inside)


def query(index, window):
    """What a viewer asks: of boxes none of which was moved or added."""
    dynamic = DynamicSpatialIndex()
    dynamic.use_grid(index)
    return dynamic.query(window, index.xyxy, np.zeros(len(index), bool))


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
    np.testing.assert_array_equal(query(SpatialIndex(boxes), window), plain(boxes, window))


def test_boxes_on_the_borders_of_cells():
    """Whole numbers, as a grid of objects has them: no box may be hidden by rounding."""
    x, y = (a.ravel() for a in np.meshgrid(np.arange(40) * 8.0, np.arange(40) * 8.0))
    boxes = np.stack([x, y, x + 8, y + 8], 1).astype(np.float32)
    index = SpatialIndex(boxes)
    for left in range(0, 320, 8):
        window = (left, 16, left + 8, 24)
        np.testing.assert_array_equal(query(index, window), plain(boxes, window))
        assert len(query(index, window)) == 1


def test_candidates_are_all_in_the_window_and_some_about_it():
    boxes = random_boxes(500)
    index, window = SpatialIndex(boxes), (0, 0, 300, 300)
    near = index.candidates_in(window)
    assert set(plain(boxes, window)) <= set(near.tolist())
    assert len(near) < 400
    assert index.candidates_in(window, max_count=7) is None


def test_no_boxes_at_all():
    index = SpatialIndex(np.empty((0, 4), np.float32))
    assert len(index) == len(query(index, (0, 0, 9, 9))) == 0


def test_equal_boxes():
    index = SpatialIndex(np.tile(np.float32([3, 4, 5, 6]), (50, 1)))
    assert len(query(index, (0, 0, 9, 9))) == 50
    assert len(query(index, (5, 0, 9, 9))) == 0


def boxes(rng: np.random.Generator, n: int) -> np.ndarray:
    corner = rng.uniform(0, 1000, (n, 2))
    return np.concatenate([corner, corner + rng.uniform(0, 60, (n, 2))], axis=1).astype(np.float32)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    known=st.integers(0, 300),
    later=st.integers(0, 50),
    moves=st.integers(0, 50),
    window=st.tuples(*[st.floats(-50, 1050)] * 4),
)
def test_moved_and_added_boxes_are_found(seed, known, later, moves, window):
    rng = np.random.default_rng(seed)
    x1, x2 = sorted(window[::2])
    y1, y2 = sorted(window[1::2])
    xyxy = boxes(rng, known)
    index = DynamicSpatialIndex()
    index.use_grid(SpatialIndex(xyxy.copy()))
    xyxy = np.concatenate([xyxy, boxes(rng, later)])
    moved = np.zeros(len(xyxy), bool)
    if len(xyxy):
        which = rng.integers(0, len(xyxy), moves)
        xyxy[which] = boxes(rng, len(which))
        moved[which] = True
    found = index.query((x1, y1, x2, y2), xyxy, moved)
    left, top, right, bottom = xyxy.T
    all_ = np.flatnonzero((left < x2) & (right > x1) & (top < y2) & (bottom > y1))
    np.testing.assert_array_equal(found, all_)
    np.testing.assert_array_equal(DynamicSpatialIndex().query((x1, y1, x2, y2), xyxy, moved), all_)


def test_a_new_grid_is_asked_for_when_many_have_come():
    index = DynamicSpatialIndex()
    assert not index.is_stale(1000)
    assert index.is_stale(30_000)
    index.use_grid(SpatialIndex(boxes(np.random.default_rng(0), 30_000)))
    assert not index.is_stale(40_000)
    assert index.is_stale(60_000)
    index.use_grid(SpatialIndex(boxes(np.random.default_rng(0), 10)))  # an older one that came late
    assert not index.is_stale(40_000)


@pytest.mark.slow
def test_of_a_million_boxes_few_are_looked_at():
    boxes = random_boxes(1_000_000, extent=100_000, largest=40)
    index = SpatialIndex(boxes)
    for k in range(20):
        window = (4000 * k, 3000 * k, 4000 * k + 2000, 3000 * k + 1500)
        found = query(index, window)
        assert 100 < len(found) <= len(index.candidates_in(window)) < 0.01 * len(boxes)
