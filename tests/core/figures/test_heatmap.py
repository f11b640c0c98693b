"""The picture of where boxes are: every box counts once, at its place, in its class's colour."""

import numpy as np
import pytest

from napari_beerlanet.core.figures.heatmap import MAX_CELLS, HeatmapGrid, draw_heatmap

RED, BLUE = (200, 0, 0), (0, 0, 200)
COLOURS = np.array([RED, BLUE])


def at(*centres: tuple[float, float], side: float = 10) -> np.ndarray:
    c = np.array(centres, np.float32).reshape(-1, 2)
    return np.concatenate([c - side / 2, c + side / 2], axis=1)


def test_a_grid_covers_its_image_and_is_no_finer_than_the_boxes():
    grid = HeatmapGrid.for_boxes((50_000, 100_000), at((5, 5)))
    assert grid.shape == (MAX_CELLS // 2, MAX_CELLS)
    assert grid.cell * grid.shape[1] >= 100_000
    assert HeatmapGrid.for_boxes((1000, 1000), at((5, 5), side=40)).cell == pytest.approx(60)
    assert HeatmapGrid.for_boxes((7, 3), np.empty((0, 4))).shape == (5, 2)


def test_boxes_are_where_they_are_and_outside_ones_at_the_border():
    grid = HeatmapGrid(10.0, (4, 6))
    cells = grid.cells_of(at((15, 5), (59, 39), (-30, 20), (99, 99)))
    assert cells.tolist() == [1, 23, 12, 23]


def test_colour_and_opacity_say_which_and_how_many():
    grid = HeatmapGrid(10.0, (20, 20))
    boxes = at(*[(55, 55)] * 4, (155, 155), (155, 155))
    picture, full = draw_heatmap(grid, boxes, np.array([0, 0, 0, 0, 0, 1]), COLOURS)
    assert picture.shape == (20, 20, 4)
    assert picture[5, 5].tolist()[:3] == list(RED)
    assert picture[15, 15].tolist()[:3] == [100, 0, 100]
    assert picture[5, 5, 3] > picture[15, 15, 3] > picture[15, 16, 3] > 0
    assert picture[10, 10, 3] == 0
    fewer, same = draw_heatmap(grid, boxes[:2], np.array([0, 0]), COLOURS, full)
    assert same == full
    assert 0 < fewer[5, 5, 3] < picture[5, 5, 3]  # on the scale of the first


def test_nothing_is_transparent():
    picture, full = draw_heatmap(
        HeatmapGrid(10.0, (3, 4)), np.empty((0, 4)), np.empty(0, int), COLOURS
    )
    assert not picture[..., 3].any()
    assert full == 1


def test_smoothing_keeps_the_number_of_boxes_to_the_border():
    from napari_beerlanet.core.figures.heatmap import _smooth

    plane = np.random.default_rng(0).poisson(2, (9, 7)).astype(np.float32)
    assert _smooth(plane).sum() == pytest.approx(plane.sum(), rel=1e-6)
