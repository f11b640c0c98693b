"""The index of boxes that are moved and added while it is in use finds what a full search finds."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.growing import GrowingArray
from napari_beerlanet.core.liveindex import LiveIndex
from napari_beerlanet.core.spatial import SpatialIndex


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
    index = LiveIndex()
    index.take(SpatialIndex(xyxy.copy()))
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
    np.testing.assert_array_equal(LiveIndex().query((x1, y1, x2, y2), xyxy, moved), all_)


def test_a_new_grid_is_asked_for_when_many_have_come():
    index = LiveIndex()
    assert not index.stale(1000)
    assert index.stale(30_000)
    index.take(SpatialIndex(boxes(np.random.default_rng(0), 30_000)))
    assert not index.stale(40_000)
    assert index.stale(60_000)
    index.take(SpatialIndex(boxes(np.random.default_rng(0), 10)))  # an older one that came late
    assert not index.stale(40_000)


def test_an_array_grows_and_keeps_what_is_written():
    grown = GrowingArray(np.zeros((0, 4), np.float32))
    for k in range(200):
        grown.extend(np.full((k % 5, 4), k))
        grown.values[:1] = 7
    assert len(grown) == sum(k % 5 for k in range(200))
    assert grown.values.dtype == np.float32
    assert (grown.values[0] == 7).all()
    assert (grown.values[-1] == 199).all()
