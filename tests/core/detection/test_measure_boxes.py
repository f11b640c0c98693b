"""Densities in boxes against plain sums over pixels."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.detection import stain_statistics
from napari_beerlanet.core.detection.stain_statistics import measure_boxes


def brute(planes, box):
    """Mean and sum (r,) over the pixels whose centres lie in a box that has some."""
    _, height, width = planes.shape
    x, y = np.arange(width) + 0.5, np.arange(height) + 0.5
    inside = planes[:, (y >= box[1]) & (y < box[3])][:, :, (x >= box[0]) & (x < box[2])]
    return inside.mean((1, 2), dtype=float), inside.sum((1, 2), dtype=float)


def measured(planes, boxes):
    r, *shape = planes.shape
    table = planes.reshape(r, -1).T.copy()
    rows = np.arange(len(table), dtype=np.int32).reshape(shape)
    asked = []

    def read(down, across):
        asked.append((down, across))
        return rows[down, across], table

    result = measure_boxes(read, tuple(shape), r, np.array(boxes, np.float32).reshape(-1, 4))
    return *result, asked


@given(data=st.data(), block=st.sampled_from([7, 16, 1024]), seed=st.integers(0, 99))
@settings(max_examples=40)
def test_sums_are_those_over_the_pixels(data, block, seed):
    height, width = data.draw(st.integers(1, 40)), data.draw(st.integers(1, 40))
    planes = np.random.default_rng(seed).random((3, height, width), np.float32)
    boxes = []
    for _ in range(data.draw(st.integers(1, 5))):
        x1, y1 = data.draw(st.floats(0, width - 1)), data.draw(st.floats(0, height - 1))
        x2, y2 = data.draw(st.floats(x1 + 1, width + 5)), data.draw(st.floats(y1 + 1, height + 5))
        boxes.append(np.array([x1, y1, x2, y2], np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stain_statistics, "_BLOCK_SIDE", block)
        patch.setattr(stain_statistics, "_ROWS_PER_TASK", 5)
        mean, total, _ = measured(planes, boxes)
    for k, box in enumerate(boxes):
        expected_mean, expected_total = brute(planes, box)
        np.testing.assert_allclose(mean[k], expected_mean, rtol=1e-5)
        np.testing.assert_allclose(total[k], expected_total, rtol=1e-5)


@pytest.mark.parametrize(
    ("box", "pixel"),
    [
        ((3.6, 2.6, 3.9, 2.9), (3, 4)),  # between centres: one pixel all the same
        ((2.0, 3.0, 2.0, 3.0), (3, 2)),
        ((-9, -9, -4, -4), (0, 0)),
        ((90, 90, 95, 95), (5, 7)),
        ((7.0, 5.0, 8.0, 6.0), (5, 7)),
    ],
)
def test_a_box_has_at_least_one_pixel(box, pixel):
    planes = np.random.default_rng(0).random((2, 6, 8), np.float32)
    mean, total, _ = measured(planes, [box])
    np.testing.assert_allclose(mean[0], planes[:, pixel[0], pixel[1]], rtol=1e-6)
    np.testing.assert_allclose(total[0], mean[0])


def test_small_sums_survive_next_to_large_ones():
    planes = np.full((1, 50, 3000), 1e4, np.float32)
    planes[:, 40:, 2990:] = 1e-4
    _, total, _ = measured(planes, [(2990, 40, 3000, 50)])
    assert total[0, 0] == pytest.approx(1e-2, rel=1e-4)


def test_blocks_without_boxes_are_not_read():
    planes = np.ones((1, 2100, 2100), np.float32)
    mean, total, asked = measured(planes, [(1020, 1020, 1030, 1030), (5, 5, 10, 10)])
    assert total[:, 0].tolist() == [100, 25]
    assert mean[:, 0].tolist() == [1, 1]
    assert len(asked) == 4


def test_no_boxes_need_no_pixels():
    mean, total, asked = measured(np.ones((2, 5, 5), np.float32), [])
    assert mean.shape == total.shape == (0, 2)
    assert asked == []
