"""Tiles cover the image, boxes come back where they were, and what borders cut is found once."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import ndimage

from discs import boxes_of, draw, scattered
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.detection.tiling import (
    TileGrid,
    busiest_windows,
    is_empty,
    merge_tiles,
    pad_tile,
    plan_tiles,
    read_tile,
    to_image_boxes,
)
from napari_beerlanet.core.images.rgb import PADDING_GREY

SCALES = st.floats(0.05, 8.0)


@given(
    shape=st.tuples(st.integers(1, 5000), st.integers(1, 5000)),
    scale=SCALES,
    tile=st.integers(128, 1300),
    share=st.floats(0.0, 0.5),
)
@settings(max_examples=100)
def test_tiles_cover_the_image_and_overlap(shape, scale, tile, share):
    overlap = int(share * tile)
    made = plan_tiles(shape, scale, tile, overlap)
    first = made.tiles[0]
    for axis, (start, side) in enumerate((("y", "height"), ("x", "width"))):
        length = getattr(first, side)
        assert {getattr(t, side) for t in made.tiles} == {length}
        starts = sorted({getattr(t, start) for t in made.tiles})
        assert starts[0] == 0
        assert starts[-1] + length == shape[axis]
        steps = np.diff(starts)
        if len(steps):
            assert (steps > 0).all()
            assert (length - steps).min() >= min(round(overlap / scale), length - 1)
        assert made.size[axis] <= 1.25 * tile + 1
    assert len(made.tiles) == len({(t.y, t.x) for t in made.tiles})


@pytest.mark.parametrize(
    ("shape", "scale", "count"),
    [((1, 1), 320.0, 1), ((1, 3000), 0.1, 1), ((1, 30000), 1.0, 35), ((1280, 1280), 1.0, 1)],
)
def test_odd_shapes(shape, scale, count):
    made = plan_tiles(shape, scale, 1024, 150)
    assert len(made.tiles) == count
    assert min(made.size) >= 1
    assert max(made.size) <= 1280


def test_ten_thousand_tiles_are_planned_and_merged():
    made = plan_tiles((85_000, 85_000), 1.0, 1024, 180)
    assert len(made.tiles) > 9_999
    random = np.random.default_rng(0)
    owner = np.repeat(np.arange(len(made.tiles)), 3)
    corner = np.array([t.corners[:2] for t in made.tiles])[owner]
    low = corner + random.uniform(0, 900, (len(owner), 2))
    boxes = np.hstack([low, low + 40]).astype(np.float32)
    scores = random.random(len(owner)).astype(np.float32)
    left = merge_tiles(made, boxes, scores, np.zeros(len(owner), np.int64), owner, 0.7)
    assert len(left) > 0.9 * len(owner)


@given(
    scale=SCALES,
    place=st.tuples(st.floats(0.2, 0.8), st.floats(0.2, 0.8)),
    stretch=st.floats(0.4, 2.5),
    pick=st.integers(0, 10**6),
)
@settings(max_examples=40)
def test_a_disc_in_a_tile_is_where_it_is_in_the_image(scale, place, stretch, pick):
    """Also for tiles whose working size is rounded differently along x and y."""
    diameter = 24 / min(scale, 1) if scale < 1 else 12
    height, width = int(8 * diameter * stretch), int(8 * diameter)
    disc = (place[0] * width, place[1] * height, diameter)
    image = draw((height, width), [disc])
    made = plan_tiles((height, width), scale, 128, 64)
    holding = [t for t in made.tiles if _holds(t, boxes_of([disc])[0])]
    tile = holding[pick % len(holding)] if holding else None
    if tile is None:  # larger than the overlap
        return
    small = read_tile(image, tile, made.size)
    assert small.shape == (*made.size, 3)
    grey, (top, left) = pad_tile(small)
    assert grey.shape[0] % 32 == grey.shape[1] % 32 == 0
    dark = (grey[..., 1] < 143) & (grey != PADDING_GREY).any(2)
    ((y, x),) = ndimage.find_objects(dark.astype(int))
    box = np.array([[x.start - left, y.start - top, x.stop - left, y.stop - top]], np.float32)
    found = to_image_boxes(made, tile, box)[0]
    tolerance = 1.01 + 1 / min(scale, 1)
    np.testing.assert_allclose(found, boxes_of([disc])[0], atol=tolerance)


def _holds(tile, box):
    x1, y1, x2, y2 = tile.corners
    return box[0] >= x1 and box[1] >= y1 and box[2] <= x2 and box[3] <= y2


def test_boxes_are_clipped_to_their_tile():
    made = plan_tiles((100, 3000), 1.0, 256, 64)
    tile = made.tiles[1]
    found = to_image_boxes(made, tile, np.array([[-50, -50, 999, 999]], np.float32))
    assert found.tolist() == [list(tile.corners)]


def test_hidden_pixels_are_grey():
    image = np.full((40, 40, 4), 200, np.uint8)
    image[:20, :, 3] = 0
    tile = read_tile(image, Rectangle(0, 0, 40, 40), (20, 20))
    assert (tile[:10] == PADDING_GREY).all()
    assert (tile[10:] == 200).all()


@pytest.mark.parametrize("stride", [32, 64])
def test_padding_is_grey_and_around(stride):
    tile = np.full((33, 70, 3), 9, np.uint8)
    grey, (top, left) = pad_tile(tile, stride)
    assert grey.shape == (64, 96 if stride == 32 else 128, 3)
    assert np.array_equal(grey[top : top + 33, left : left + 70], tile)
    assert (np.delete(grey, np.s_[top : top + 33], 0) == PADDING_GREY).all()


def merged(made, objects, iou=0.7, jitter=0.0, score=0.9):
    """What is left of objects (n, 4) that every tile sees, cut off at its borders."""
    random = np.random.default_rng(0)
    boxes, owner = [], []
    for number, tile in enumerate(made.tiles):
        x1, y1, x2, y2 = tile.corners
        for box in objects:
            seen = np.clip(box + random.uniform(-jitter, jitter, 4), (x1, y1) * 2, (x2, y2) * 2)
            if (seen[2:] - seen[:2] > 2).all():
                boxes.append(seen)
                owner.append(number)
    xyxy = np.array(boxes, np.float32).reshape(-1, 4)
    scores = random.uniform(score - 0.1, score, len(xyxy)).astype(np.float32)
    left = merge_tiles(
        made, xyxy, scores, np.zeros(len(xyxy), np.int64), np.array(owner, np.int64), iou
    )
    assert (np.diff(scores[left]) <= 0).all()
    return xyxy[left]


@given(
    places=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 6)), max_size=25, unique=True),
    seed=st.integers(0, 1000),
    iou=st.sampled_from([0.3, 0.7, 1.0]),
)
@settings(max_examples=40)
def test_every_object_is_left_once_and_whole(places, seed, iou):
    random = np.random.default_rng(seed)
    side = random.uniform(12, 90, (len(places), 1))
    low = np.array(places, float).reshape(-1, 2) * 110 + random.uniform(0, 20, (len(places), 2))
    objects = np.hstack([low, low + side])
    made = plan_tiles((770, 990), 1.0, 256, 128)
    left = merged(made, objects, iou)
    assert len(left) == len(objects)
    np.testing.assert_allclose(_sorted(left), _sorted(objects), atol=0.02)


def _sorted(boxes):
    return np.asarray(sorted(np.round(boxes, 2).tolist())).reshape(-1, 4)


def test_two_views_of_a_small_object_are_one():
    """Two pixels of difference in twelve are an intersection over union far below 0.7."""
    made = plan_tiles((256, 600), 1.0, 256, 128)
    low = np.array([[x, y] for x in range(20, 580, 40) for y in range(20, 230, 40)], float)
    assert len(merged(made, np.hstack([low, low + 12]), jitter=1.5)) == len(low)


def test_touching_objects_that_one_tile_tells_apart_stay_two():
    made = plan_tiles((256, 440), 1.0, 256, 72)
    objects = np.array([[200, 100, 240, 140], [213, 100, 253, 140.0]])
    assert len(merged(made, objects)) == 2


def test_a_small_object_is_not_the_whole_of_a_large_ones_piece():
    """The large one is wider than the overlap: its pieces are all there is of it."""
    made = plan_tiles((200, 400), 1.0, 256, 64)
    assert [t.x for t in made.tiles] == [0, 144]
    xyxy = np.array([[100, 20, 256, 180], [144, 20, 300, 180], [200, 90, 212, 102]], np.float32)
    scores = np.array([0.9, 0.8, 0.9], np.float32)
    left = merge_tiles(made, xyxy, scores, np.array([0, 0, 1]), np.array([0, 1, 1]), 0.7)
    assert 0 in left
    assert 2 in left


def test_a_doubtful_whole_does_not_remove_a_sure_piece():
    made = plan_tiles((200, 400), 1.0, 256, 112)
    xyxy = np.array([[200, 50, 256, 106], [200, 50, 280, 106]], np.float32)
    labels, owner = np.zeros(2, np.int64), np.array([0, 1])
    sure = merge_tiles(made, xyxy, np.array([0.9, 0.8], np.float32), labels, owner, 0.9)
    assert sure.tolist() == [1]
    doubtful = merge_tiles(made, xyxy, np.array([0.9, 0.05], np.float32), labels, owner, 0.9)
    assert 0 in doubtful


def test_nothing_merges_to_nothing():
    none = np.zeros(0, np.int64)
    left = merge_tiles(
        plan_tiles((50, 900), 1.0, 128, 9), np.zeros((0, 4), np.float32), none, none, none, 0.5
    )
    assert len(left) == 0


@pytest.mark.parametrize("scale", [0.2, 0.5, 1.0, 4.0])
def test_what_shows_nothing_is_empty_and_one_faint_object_is_not(scale):
    shape = (round(200 / scale), round(300 / scale))
    y, x = np.indices(shape) * scale / 300
    noise = np.random.default_rng(0).normal(0, 2, (*shape, 3))
    image = 220 - 20 * np.hypot(y - 0.3, x - 0.5)[..., None] ** 2 + noise
    assert is_empty(image.astype(np.uint8), scale)
    assert is_empty(np.dstack([image, np.full(shape, 255)]).astype(np.uint8), scale)
    image[np.hypot(y - 0.4, x - 0.6) < 10 / 300] -= 12
    assert not is_empty(image.astype(np.uint8), scale)


@pytest.mark.parametrize("shape", [(1, 1), (1, 900), (900, 1), (3, 2)])
def test_images_of_a_few_pixels_may_be_empty(shape):
    for scale in (0.01, 0.3, 5.0):
        assert is_empty(np.full((*shape, 3), 114, np.uint8), scale)


def test_windows_are_where_something_is():
    image = draw((2000, 3000), scattered((300, 300), 40))
    assert (0, 0) in busiest_windows(image, 400, 3)
    assert busiest_windows(image, 2400, 3) == [(0, 0)]
    for y, x in busiest_windows(np.zeros((20, 3000, 3), np.uint8), 100, 3):
        assert y == 0
        assert 0 <= x <= 2900


class CountedList(list):
    """A list that counts how many of its items are read."""

    read = 0

    def __getitem__(self, which):
        self.read += len(range(len(self))[which]) if isinstance(which, slice) else 1
        return super().__getitem__(which)

    def __iter__(self):
        self.read += len(self)
        return super().__iter__()


@pytest.mark.parametrize("shape", [(9000, 12000), (100, 12000), (9000, 100), (100, 100)])
def test_neighbours_of_a_tile_are_found_without_looking_at_all_tiles(shape):
    plan = plan_tiles(shape, 1.0, 128, 60)
    grid = TileGrid(shape, CountedList(plan.tiles), plan.size)
    grid.overlapping(0)
    for number in {0, len(plan.tiles) // 3, len(plan.tiles) - 1}:
        grid.tiles.read = 0
        near, tile = grid.overlapping(number), plan.tiles[number]
        assert grid.tiles.read == 0
        assert near == [k for k, other in enumerate(plan.tiles) if tile.touches(other)]
