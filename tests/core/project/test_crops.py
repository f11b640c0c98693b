"""Pieces of annotated regions: exact pixels, whole cover, what is kept, cut off and hidden."""

import itertools
from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.regions import Region, union_mask
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.project.crops import (
    PADDING_GREY,
    choose_crop_size,
    cut_crop,
    padding_grey,
    plan_crops,
    split_for_validation,
)

SHAPE = (120, 160)
RGB = np.random.default_rng(0).integers(0, 100, (*SHAPE, 3), dtype=np.uint8)


def annotated(boxes=(), regions=(), shape=SHAPE, labels=None) -> Annotations:
    boxes = np.array(boxes, float).reshape(-1, 4)
    labels = np.zeros(len(boxes), int) if labels is None else np.array(labels)
    return Annotations(boxes, labels, ["a", "b"], regions=tuple(regions), image_shape=shape)


def whole(boxes=(), **rest) -> Annotations:
    shape = rest.get("shape", SHAPE)
    return annotated(boxes, [Region.whole_image(shape)], **rest)


def test_the_grey_is_the_one_that_the_network_takes_for_padding():
    from napari_beerlanet.core.stains import front_end

    assert front_end.PADDING_GREY == PADDING_GREY
    assert padding_grey({"padding": 114 / 255}) == PADDING_GREY
    assert padding_grey({"padding": None}) == padding_grey({}) == PADDING_GREY
    assert padding_grey({"padding": 0.5}) == 128


# --- the plan ------------------------------------------------------------------------------------

sides = st.integers(20, 90)
rectangles = st.tuples(
    st.integers(0, 120), st.integers(0, 80), st.integers(5, 60), st.integers(5, 60)
)


@given(st.lists(rectangles, min_size=1, max_size=4), sides)
def test_every_annotated_pixel_is_in_a_piece_and_no_piece_is_too_large(rects, side):
    given_ = annotated(regions=[Region.rectangle(x, y, x + w, y + h) for x, y, w, h in rects])
    full = Rectangle(0, 0, SHAPE[1], SHAPE[0])
    left = union_mask(given_.regions, full)
    for planned in plan_crops(given_, side):
        x1, y1, x2, y2 = planned.window.corners
        assert max(planned.window.width, planned.window.height) <= side
        assert x1 >= 0 <= y1
        assert x2 <= SHAPE[1]
        assert y2 <= SHAPE[0]
        left[y1:y2, x1:x2] = False
    assert not left.any()


@given(st.lists(rectangles, min_size=1, max_size=4), sides)
def test_pieces_of_different_groups_share_no_pixel(rects, side):
    given_ = annotated(regions=[Region.rectangle(x, y, x + w, y + h) for x, y, w, h in rects])
    planned = plan_crops(given_, side)
    for a in planned:
        for b in planned:
            assert a.group == b.group or not a.window.touches(b.window)


def test_neighbours_overlap_by_the_largest_object():
    planned = plan_crops(whole([[0, 0, 30, 20]]), 64)
    starts = sorted({p.window.x for p in planned})
    assert all(b - a <= 64 - 30 for a, b in itertools.pairwise(starts))


def test_no_region_means_nothing_to_learn_from():
    assert plan_crops(annotated([[0, 0, 9, 9]]), 64) == []
    outside = annotated(regions=[Region.rectangle(500, 500, 600, 600)])
    assert plan_crops(outside, 64) == []


def test_a_piece_without_annotated_pixels_is_left_out():
    corner = Region("polygon", [[0, 0], [160, 0], [0, 120]])
    windows = [p.window for p in plan_crops(annotated(regions=[corner]), 40)]
    assert len(windows) < len(plan_crops(whole(), 40))
    assert all(union_mask([corner], window).any() for window in windows)


def test_one_long_region_is_cut_into_two_without_shared_pixels():
    boxes = [[x, 10, x + 10, 20] for x in range(0, 150, 12)]
    given_ = whole(boxes)
    planned = split_for_validation(plan_crops(given_, 60), given_, 60)
    assert {p.group for p in planned} == {0, 1}
    for a in planned:
        for b in planned:
            assert a.group == b.group or not a.window.touches(b.window)


def test_what_is_short_or_has_objects_in_one_half_only_is_not_cut():
    for given_, side in (
        (whole([[0, 0, 9, 9], [150, 0, 159, 9]]), 100),
        (whole([[0, 0, 9, 9]]), 60),
    ):
        planned = plan_crops(given_, side)
        assert split_for_validation(planned, given_, side) == planned


# --- the cut -------------------------------------------------------------------------------------


def test_pixels_are_the_images_own():
    piece = cut_crop(RGB, whole(), Rectangle(30, 20, 64, 50), 64)
    np.testing.assert_array_equal(piece.pixels[:50], RGB[20:70, 30:94])
    assert piece.pixels.shape == (50, 64, 3)
    assert piece.visible_fraction == 1


def test_a_piece_of_less_than_the_side_is_filled_up_along_its_longer_side():
    piece = cut_crop(RGB, whole(), Rectangle(0, 0, 50, 40), 64)
    assert piece.pixels.shape == (40, 64, 3)
    np.testing.assert_array_equal(piece.pixels[:, :50], RGB[:40, :50])
    assert (piece.pixels[:, 50:] == PADDING_GREY).all()
    assert cut_crop(RGB, whole(), Rectangle(0, 0, 40, 50), 64).pixels.shape == (64, 40, 3)


def test_a_narrow_piece_is_wide_enough_to_train_on():
    piece = cut_crop(RGB, whole(), Rectangle(0, 0, 64, 5), 64)
    assert piece.pixels.shape == (32, 64, 3)
    assert (piece.pixels[5:] == PADDING_GREY).all()


def test_a_piece_of_hardly_any_pixels_is_empty_unless_it_has_an_object():
    dot = Region.rectangle(10, 10, 13, 13)
    bare = cut_crop(RGB, annotated(regions=[dot]), Rectangle(0, 0, 64, 64), 64)
    assert bare.empty
    full = cut_crop(RGB, annotated([[10, 10, 13, 13]], [dot]), Rectangle(0, 0, 64, 64), 64)
    assert not full.empty


def test_a_flat_piece_is_empty_unless_it_has_an_object():
    white = np.full((*SHAPE, 3), 255, np.uint8)
    polygon = Region("polygon", [[0, 0], [60, 0], [0, 60]])
    window = Rectangle(0, 0, 64, 64)
    assert cut_crop(white, annotated(regions=[polygon]), window, 64).empty
    assert not cut_crop(white, annotated([[5, 5, 9, 9]], [polygon]), window, 64).empty
    assert not cut_crop(RGB, annotated(regions=[polygon]), window, 64).empty


def test_what_lies_outside_of_a_polygon_is_hidden():
    polygon = Region("polygon", [[10, 10], [70, 20], [30, 80]])
    window = Rectangle(5, 5, 70, 80)
    piece = cut_crop(RGB, annotated(regions=[polygon]), window, 80)
    inside = polygon.mask(window)
    shown = piece.pixels[:80, :70]
    np.testing.assert_array_equal(shown[inside], RGB[5:85, 5:75][inside])
    assert (shown[~inside] == PADDING_GREY).all()


def test_objects_are_kept_cut_off_where_most_is_inside_and_hidden_otherwise():
    region = Region.rectangle(0, 0, 50, 50)
    mostly, half, hardly, out = [
        [40, 0, 54, 10],
        [40, 20, 60, 30],
        [45, 38, 60, 48],
        [60, 0, 70, 9],
    ]
    given_ = annotated([mostly, half, hardly, out], [region], labels=[1, 0, 1, 0])
    piece = cut_crop(RGB, given_, Rectangle(0, 0, 50, 50), 50)
    np.testing.assert_allclose(piece.xyxy, [[40, 0, 50, 10], [40, 20, 50, 30]])
    assert piece.labels.tolist() == [1, 0]
    assert piece.hidden == 1
    assert (piece.pixels[38:48, 45:50] == PADDING_GREY).all()
    assert (piece.pixels[:38, 45:50] == RGB[:38, 45:50]).all()


def test_hiding_leaves_the_objects_that_are_kept():
    given_ = annotated([[45, 5, 80, 25], [40, 10, 50, 20]], [Region.rectangle(0, 0, 50, 50)])
    piece = cut_crop(RGB, given_, Rectangle(0, 0, 50, 50), 50)
    np.testing.assert_allclose(piece.xyxy, [[40, 10, 50, 20]])
    assert (piece.pixels[10:20, 40:50] == RGB[10:20, 40:50]).all()
    assert (piece.pixels[5:10, 45:50] == PADDING_GREY).all()


def test_an_object_across_two_regions_that_touch_is_kept_whole():
    regions = [Region.rectangle(0, 0, 50, 50), Region.rectangle(50, 0, 100, 50)]
    planned = plan_crops(annotated([[40, 10, 60, 20]], regions), 100)
    assert [p.window for p in planned] == [Rectangle(0, 0, 100, 50)]
    assert planned[0].regions == (0, 1)
    piece = cut_crop(RGB, annotated([[40, 10, 60, 20]], regions), planned[0].window, 100)
    np.testing.assert_allclose(piece.xyxy, [[40, 10, 60, 20]])


def test_transparent_pixels_and_other_types_are_as_detect_sees_them():
    alpha = np.dstack([RGB, np.full(SHAPE, 255, np.uint8)])
    alpha[:10, :10, 3] = 0
    piece = cut_crop(alpha, whole(), Rectangle(0, 0, 64, 64), 64)
    assert (piece.pixels[:10, :10] == PADDING_GREY).all()
    np.testing.assert_array_equal(piece.pixels[10:], RGB[10:64, :64])
    deep = RGB.astype(np.uint16) * 257
    np.testing.assert_array_equal(
        cut_crop(deep, whole(), Rectangle(0, 0, 64, 64), 64).pixels, RGB[:64, :64]
    )


def test_only_the_window_is_read():
    class Lazy:
        shape, dtype = RGB.shape, RGB.dtype

        def __getitem__(self, where):
            rows, columns = where
            assert (rows.stop - rows.start, columns.stop - columns.start) == (40, 50)
            return RGB[where]

    piece = cut_crop(Lazy(), whole(), Rectangle(5, 6, 50, 40), 50)
    np.testing.assert_array_equal(piece.pixels, RGB[6:46, 5:55])


box = st.tuples(st.floats(-20, 150), st.floats(-20, 110), st.floats(1, 60), st.floats(1, 60)).map(
    lambda b: [b[0], b[1], b[0] + b[2], b[1] + b[3]]
)


@given(st.lists(box, max_size=5), st.lists(rectangles, min_size=1, max_size=3), sides)
def test_boxes_lie_in_their_piece_and_each_has_pixels_shown(boxes, rects, side):
    regions = [Region.rectangle(x, y, x + w, y + h) for x, y, w, h in rects]
    given_, _ = annotated(boxes, regions).trainable()
    for planned in plan_crops(given_, side):
        piece = cut_crop(RGB, given_, planned.window, side)
        assert len(piece.labels) == len(piece.xyxy)
        for x1, y1, x2, y2 in piece.xyxy:
            assert 0 <= x1 < x2 <= planned.window.width
            assert 0 <= y1 < y2 <= planned.window.height
            part = piece.pixels[int(y1) : int(np.ceil(y2)), int(x1) : int(np.ceil(x2))]
            assert (part != PADDING_GREY).any()


# --- the magnification ---------------------------------------------------------------------------

INFO = {
    "image_size": 320,
    "pixel_size": None,
    "object_sizes": {"a": {"median": 50.0, "low": 30, "high": 70, "count": 100}},
}


def test_the_side_shows_objects_as_large_as_the_model_knows_them():
    large = whole([[x, 0, x + 400, 400] for x in range(4)], shape=(3000, 4000))
    side, how = choose_crop_size(INFO, large, 320)
    assert side == 320 * 400 / 50
    assert "annotated objects" in how
    assert choose_crop_size(INFO, large, 320, scale=0.25)[0] == 1280
    side, how = choose_crop_size({**INFO, "pixel_size": 0.4}, large, 320, pixel_size=(0.1, 0.1))
    assert side == 1280
    assert "pixel sizes" in how


def test_an_image_that_is_nearly_right_is_taken_whole():
    nearly = whole([[x, 0, x + 110, 110] for x in range(4)], shape=(480, 640))
    assert choose_crop_size(INFO, nearly, 320) == (
        640,
        "the whole image, from the sizes of the annotated objects",
    )


def test_without_any_clue_the_image_is_taken_whole():
    assert choose_crop_size(INFO, whole([[0, 0, 9, 9]]), 320) == (160, "the whole image")
    assert choose_crop_size({}, whole([[0, 0, 9, 9]] * 1), 320)[0] == 160
    unknown = replace(whole([[0, 0, 9, 9]] * 1), names=["x", "y"])
    assert choose_crop_size(INFO, unknown, 320)[0] == 160
