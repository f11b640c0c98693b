"""Crops of boxes: their geometry, their borders, and the denoising of the paper."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.classification.crops import (
    check_crop_boxes,
    crop_neighbours,
    cut_crops,
    cut_square,
    denoise_crop,
    hide_neighbours,
    whole_crop,
)
from napari_beerlanet.core.images.rgb import PADDING_GREY

RANDOM = np.random.default_rng(0)
NOISE = RANDOM.integers(0, 256, (60, 80, 3), np.uint8)


def ramp(height=60, width=80):
    """Red is the column, green the row: a crop says where it is from."""
    image = np.zeros((height, width, 3), np.uint8)
    image[..., 0] = np.arange(width)
    image[..., 1] = np.arange(height)[:, None]
    image[..., 2] = 200
    return image


boxes = st.tuples(st.floats(-10, 75), st.floats(-10, 55), st.floats(2, 40), st.floats(2, 40)).map(
    lambda b: (b[0], b[1], b[0] + b[2], b[1] + b[3])
)


@given(boxes, st.integers(8, 48), st.floats(0.2, 1))
def test_the_middle_of_a_box_is_the_middle_of_its_crop_at_the_scale_asked_for(box, size, fill):
    x1, y1, x2, y2 = box
    if min(x2, 80) - max(x1, 0) <= 0.1 or min(y2, 60) - max(y1, 0) <= 0.1:
        return
    crop = cut_crops(ramp(), [box], size, fill)[0]
    side = max(x2 - x1, y2 - y1) / fill
    shown = crop[..., 2] == 200
    # Where pixel (i, j) of the crop lies in the image, for those that interpolation cannot clamp.
    place = (np.arange(size) + 0.5) * side / size
    columns, rows = (x1 + x2) / 2 - side / 2 + place, (y1 + y2) / 2 - side / 2 + place
    reach = max(side / size, 1)
    across = (columns > reach) & (columns < 80 - reach)
    down = (rows > reach) & (rows < 60 - reach)
    inside = np.ix_(down, across)
    assert shown[inside].all()
    # A ramp pixel k is centred at k + 0.5.
    assert np.abs(crop[inside][..., 0] - (columns[across][None] - 0.5)).max(initial=0) < 1.01
    assert np.abs(crop[inside][..., 1] - (rows[down][:, None] - 0.5)).max(initial=0) < 1.01


@given(boxes, st.integers(8, 40), st.floats(0.3, 1))
def test_what_lies_beyond_the_image_is_padding_and_nothing_else_is(box, size, fill):
    x1, y1, x2, y2 = box
    if min(x2, 80) - max(x1, 0) <= 0.1 or min(y2, 60) - max(y1, 0) <= 0.1:
        return
    crop = cut_crops(ramp(), [box], size, fill)[0]
    side = max(x2 - x1, y2 - y1) / fill
    edges = np.arange(size + 1) * side / size
    columns, rows = (x1 + x2) / 2 - side / 2 + edges, (y1 + y2) / 2 - side / 2 + edges
    slack = 0.02 * side / size
    across = (columns[:-1] >= -slack) & (columns[1:] <= 80 + slack)
    down = (rows[:-1] >= -slack) & (rows[1:] <= 60 + slack)
    blank = (crop == PADDING_GREY).all(2)
    strict = (columns[:-1] >= 0) & (columns[1:] <= 80), (rows[:-1] >= 0) & (rows[1:] <= 60)
    assert not blank[np.ix_(strict[1], strict[0])].any()
    assert blank[~down].all()
    assert blank[:, ~across].all()


@given(st.integers(-7, 7), st.integers(-7, 7))
def test_a_moved_image_has_the_same_crops(dx, dy):
    box = np.array([[30.3, 20.1, 45.9, 33.7]])
    moved = np.roll(NOISE, (dy, dx), (0, 1))
    expected = cut_crops(NOISE, box, 24, 0.7)
    found = cut_crops(moved, box + np.array([dx, dy, dx, dy]), 24, 0.7)
    assert np.abs(found.astype(int) - expected).max() <= 1


def test_a_crop_at_its_own_size_is_the_pixels_themselves():
    np.testing.assert_array_equal(cut_square(NOISE, 40, 30, 20, 20), NOISE[20:40, 30:50])
    np.testing.assert_array_equal(whole_crop(NOISE[:50, :50], 50), NOISE[:50, :50])


def test_a_crop_that_is_no_square_is_padded_to_one():
    crop = whole_crop(NOISE, 80)
    np.testing.assert_array_equal(crop[10:70], NOISE)
    assert (crop[:10] == PADDING_GREY).all()
    assert (crop[70:] == PADDING_GREY).all()


def test_enlarging_is_bilinear():
    """Against interpolation written out."""
    crop = cut_square(NOISE, 40.25, 30.5, 10, 40)
    place = (np.arange(40) + 0.5) * 10 / 40 - 0.5
    x, y = 35.25 + place, 25.5 + place
    x0, y0 = np.floor(x).astype(int), np.floor(y).astype(int)
    fx, fy = (x - x0)[None, :, None], (y - y0)[:, None, None]
    a, b = NOISE[y0][:, x0], NOISE[y0][:, x0 + 1]
    c, d = NOISE[y0 + 1][:, x0], NOISE[y0 + 1][:, x0 + 1]
    expected = (1 - fy) * ((1 - fx) * a + fx * b) + fy * ((1 - fx) * c + fx * d)
    assert np.abs(crop - expected).max() <= 1.5  # Pillow rounds after each direction


def test_many_boxes_are_each_cut_by_themselves():
    two = np.array([[5, 5, 25, 20], [40, 30, 60, 50]], float)
    both = cut_crops(NOISE, two, 16, 0.7)
    assert both.shape == (2, 16, 16, 3)
    for crop, box in zip(both, two, strict=True):
        np.testing.assert_array_equal(crop, cut_crops(NOISE, [box], 16, 0.7)[0])
    assert cut_crops(NOISE, np.empty((0, 4)), 16, 0.7).shape == (0, 16, 16, 3)


@pytest.mark.parametrize(
    ("box", "words"),
    [
        ([5, 5, 5, 9], "Box 1 .* has no area"),
        ([90, 5, 99, 9], "Box 1 .* has no part in the image of 80 × 60 pixels"),
        ([-9, 5, 0, 9], "has no part in the image"),
        ([5, 5, np.nan, 9], "no finite numbers"),
        ([9, 5, 5, 9], "ends before it begins"),
    ],
)
def test_boxes_that_show_nothing_are_refused_in_one_sentence(box, words):
    with pytest.raises(ValueError, match=words) as caught:
        check_crop_boxes([[1, 1, 9, 9], box], (60, 80))
    assert "\n" not in str(caught.value)


def test_denoising_is_that_of_the_paper():
    """OpenCV's median of 11 and Gaussian of 21, σ = 1, which the authors use."""
    from napari_beerlanet.core.detection.ultralytics_api import cv2

    crop = NOISE[:48, :48]
    expected = cv2.GaussianBlur(cv2.medianBlur(np.ascontiguousarray(crop), 11), (21, 21), 1.0)
    assert np.array_equal(denoise_crop(crop), expected)


def test_denoising_keeps_padding():
    crop = NOISE[:32, :32].copy()
    crop[:, :6] = PADDING_GREY
    found = denoise_crop(crop)
    assert (found[:, :6] == PADDING_GREY).all()


def test_neighbours_are_the_boxes_that_a_crop_shows():
    """Against all pairs, of boxes whose sides differ by a factor of two."""
    corner = RANDOM.uniform(0, 300, (80, 2))
    xyxy = np.hstack([corner, corner + RANDOM.uniform(20, 40, (80, 2))])
    rows = np.arange(0, 80, 3)
    expected = []
    for i in rows:
        x, y = (xyxy[i, :2] + xyxy[i, 2:]) / 2
        reach = (xyxy[i, 2:] - xyxy[i, :2]).max() / 0.8 / 2
        x1, y1, x2, y2 = xyxy.T
        shown = (x1 < x + reach) & (x2 > x - reach) & (y1 < y + reach) & (y2 > y - reach)
        expected += [(i, j) for j in np.flatnonzero(shown) if j != i]
    assert 40 < len(expected) < 1000
    assert [tuple(pair) for pair in crop_neighbours(xyxy, rows, 0.8)] == expected
    assert crop_neighbours(xyxy[:1], np.array([0]), 0.8).shape == (0, 2)
    assert crop_neighbours(np.empty((0, 4)), np.empty(0, int), 0.8).shape == (0, 2)


def test_neighbours_are_painted_over_and_the_cell_itself_stays():
    image = np.full((60, 80, 3), 200, np.uint8)
    image[20:40, 20:40] = (180, 120, 110)  # a cell
    image[20:40, 40:60] = (20, 10, 90)  # a dark one beside it
    box, other = np.array([20.0, 20, 40, 40]), np.array([40.0, 20, 60, 40])
    crop = cut_crops(image, [box], 40, 0.5)[0]
    assert (crop[15:25, 31:39] == (20, 10, 90)).all()
    alone = hide_neighbours(crop, box, other[None], 0.5)
    assert (alone[15:25, 31:39] == np.median(crop[:, :30], axis=(0, 1))).all()
    assert (alone[:, :30] == crop[:, :30]).all(), "what is nearer to the cell stays"
    assert (crop[15:25, 31:39] == (20, 10, 90)).all(), "the crop that was given stays"
    # Of two that lie over each other, the line between them divides what both show.
    halves = hide_neighbours(crop, box, (box + other)[None] / 2, 0.5)
    assert (halves[20, :25] == crop[20, :25]).all()
    assert (halves[20, 31:39] == halves[20, 31]).all()
    assert hide_neighbours(crop, box, np.empty((0, 4)), 0.5) is crop
