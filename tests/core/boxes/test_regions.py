"""Regions: which pixels they cover, how much of a box lies in them, what hangs together."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.regions import (
    Region,
    clip_box_to_mask,
    fraction_inside,
    group_touching,
    shape_bounds,
    union_mask,
)
from napari_beerlanet.core.common.rectangle import Rectangle

place = st.floats(-5, 25, allow_nan=False).map(lambda v: round(v, 2))
corners = st.lists(st.tuples(place, place), min_size=3, max_size=7)
whole_number = st.integers(-4, 24)


def enclosed(points, x, y):
    """Even and odd crossings of a ray to the left, in plain Python."""
    inside = False
    for (xa, ya), (xb, yb) in zip(points, points[-1:] + points[:-1], strict=True):
        if min(ya, yb) <= y < max(ya, yb) and xa + (y - ya) * (xb - xa) / (yb - ya) <= x:
            inside = not inside
    return inside


@given(corners)
def test_a_polygon_covers_the_pixels_whose_centres_it_encloses(points):
    mask = Region("polygon", points).mask(Rectangle(2, 1, 17, 13))
    for row in range(13):
        for column in range(17):
            x, y = column + 2.5, row + 1.5
            if not any(
                abs(enclosed(points, x + d, y) - enclosed(points, x, y)) for d in (-1e-9, 1e-9)
            ):
                assert mask[row, column] == enclosed(points, x, y)


def test_edges_that_lie_on_each_other_enclose_nothing():
    points = [(0.88, 0.88), (9.0, 9.0), (0.0, 0.0)]
    assert not Region("polygon", points).mask(Rectangle(2, 1, 17, 13)).any()


@given(corners, st.integers(0, 9), st.integers(0, 9))
def test_a_part_of_the_mask_is_the_mask_of_the_part(points, x, y):
    region = Region("polygon", points)
    whole = region.mask(Rectangle(0, 0, 20, 20))
    np.testing.assert_array_equal(region.mask(Rectangle(x, y, 11, 8)), whole[y : y + 8, x : x + 11])


@given(corners)
def test_the_window_of_a_region_holds_all_its_pixels(points):
    region = Region("polygon", points)
    whole = region.mask(Rectangle(0, 0, 20, 16))
    window = region.window((16, 20))
    if window is None:
        assert not whole.any()
    else:
        x1, y1, x2, y2 = window.corners
        assert whole[y1:y2, x1:x2].sum() == whole.sum()


@given(whole_number, whole_number, st.integers(1, 12), st.integers(1, 12))
def test_a_rectangle_of_whole_pixels_covers_them(x, y, width, height):
    mask = Region.rectangle(x, y, x + width, y + height).mask(Rectangle(0, 0, 20, 20))
    expected = np.zeros((20, 20), bool)
    expected[max(y, 0) : max(y + height, 0), max(x, 0) : max(x + width, 0)] = True
    np.testing.assert_array_equal(mask, expected)


def test_regions_that_overlap_or_touch_are_one_area():
    left, right = Region.rectangle(0, 0, 10, 10), Region.rectangle(10, 0, 20, 10)
    window = Rectangle(0, 0, 20, 10)
    assert union_mask([left, right], window).all()
    across = np.array([[6.0, 2, 14, 8]])
    assert fraction_inside(across, union_mask([left, right], window), window) == pytest.approx(1)
    assert fraction_inside(across, union_mask([left], window), window) == pytest.approx(0.5)


@given(place, place, st.floats(0.1, 15), st.floats(0.1, 15))
def test_share_inside_a_rectangle_is_that_of_areas(x, y, width, height):
    window = Rectangle(0, 0, 20, 20)
    covered = Region.rectangle(3, 4, 15, 12).mask(window)
    shared = max(min(x + width, 15) - max(x, 3), 0) * max(min(y + height, 12) - max(y, 4), 0)
    box = np.array([[x, y, x + width, y + height]])
    area = (box[0, 2] - box[0, 0]) * (box[0, 3] - box[0, 1])
    assert fraction_inside(box, covered, window)[0] == pytest.approx(shared / area, abs=1e-6)


def test_the_covered_part_of_a_box_is_cut_at_the_region():
    window = Rectangle(5, 5, 20, 20)
    covered = Region.rectangle(8, 9, 30, 30).mask(window)
    np.testing.assert_allclose(
        clip_box_to_mask(np.array([6.5, 7, 12.25, 13]), covered, window), [8, 9, 12.25, 13]
    )
    assert clip_box_to_mask(np.array([5.0, 5, 8, 9]), covered, window) is None
    assert clip_box_to_mask(np.array([50.0, 50, 60, 60]), covered, window) is None


@given(st.floats(0, np.pi), st.floats(1, 30), st.floats(1, 30))
def test_bounds_of_a_turned_ellipse_are_those_of_its_outline(angle, a, b):
    turn = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    corner = np.array([[-a, -b], [a, -b], [a, b], [-a, b]]) @ turn.T + (40, 50)
    t = np.linspace(0, 2 * np.pi, 20001)
    outline = np.column_stack([a * np.cos(t), b * np.sin(t)]) @ turn.T + (40, 50)
    expected = [*outline.min(axis=0), *outline.max(axis=0)]
    np.testing.assert_allclose(shape_bounds(corner, "ellipse"), expected, atol=1e-4)


def test_bounds_of_a_turned_rectangle_and_a_polygon():
    diamond = [[5, 0], [10, 5], [5, 10], [0, 5]]
    assert shape_bounds(diamond, "rectangle") == (0, 0, 10, 10)
    assert shape_bounds([[1, 2], [7, 3], [4, 9]], "polygon") == (1, 2, 7, 9)


@pytest.mark.parametrize("kind", ["path", "line"])
def test_what_encloses_nothing_is_refused(kind):
    with pytest.raises(ValueError, match=f"(?i)a {kind} encloses nothing"):
        shape_bounds([[0, 0], [1, 1], [2, 0]], kind)
    with pytest.raises(ValueError, match="encloses nothing"):
        Region.from_shape([[0, 0], [1, 1], [2, 0]], kind)


def test_a_drawn_ellipse_is_a_region_of_its_area():
    region = Region.from_shape([[0, 0], [100, 0], [100, 60], [0, 60]], "ellipse")
    pixels = region.mask(Rectangle(0, 0, 100, 60)).sum()
    assert pixels == pytest.approx(np.pi * 50 * 30, rel=0.01)


def test_upright_rectangles_stay_rectangles():
    assert Region.from_shape([[0, 0], [4, 0], [4, 3], [0, 3]], "rectangle").kind == "rectangle"
    assert Region.from_shape([[5, 0], [10, 5], [5, 10], [0, 5]], "rectangle").kind == "polygon"


def test_windows_hang_together_through_others():
    row = [
        Rectangle(0, 0, 10, 10),
        Rectangle(30, 0, 10, 10),
        Rectangle(8, 0, 10, 10),
        Rectangle(18, 0, 9, 10),
    ]
    assert group_touching(row) == [[0, 2], [1], [3]]
    assert group_touching(row, gap=1) == [[0, 2, 3], [1]]


@pytest.mark.parametrize("points", [[[0, 0], [1, 1]], [[0, 0], [1, np.nan], [2, 2]], [1, 2, 3]])
def test_no_region_without_three_finite_corners(points):
    with pytest.raises(ValueError, match="corners"):
        Region("polygon", points)


def test_written_and_read_is_the_same():
    region = Region("polygon", [[0.5, 1], [7, 2.25], [3, 9]])
    again = Region.from_json(region.to_json())
    assert again.kind == "polygon"
    np.testing.assert_array_equal(again.points, region.points)
