"""The picture of detections: where lines lie, what the legend says, that nothing else changes."""

import numpy as np
import pytest

from napari_beerlanet.core.boxes.classes import class_colours, parse_colour
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.figures import overlay
from napari_beerlanet.core.figures.overlay import draw_overlay
from napari_beerlanet.core.formats.voc import read_voc
from napari_beerlanet.core.images.files import read_image

NAMES = ["RBC", "WBC"]
COLOURS = ["#ff0000", "#00ff00"]
PINK = np.full((400, 600, 3), (230, 190, 210), np.uint8)


def coloured(picture, colour):
    """(H, W) bool: where the picture has exactly this colour."""
    return (picture == parse_colour(colour)).all(-1)


@pytest.fixture
def legends(monkeypatch):
    """The text of every legend that is drawn."""
    texts = []
    add = overlay._add_legend

    def spy(picture, boxes, legend):
        texts.append([line for line, _ in legend.lines])
        add(picture, boxes, legend)

    monkeypatch.setattr(overlay, "_add_legend", spy)
    return texts


def many(n, shape=(400, 600), side=20.0, seed=0):
    rng = np.random.default_rng(seed)
    corner = rng.uniform(0, 1, (n, 2)) * (shape[1] - side, shape[0] - side)
    boxes = np.hstack([corner, corner + side])
    return Detections(boxes, rng.integers(0, 2, n), rng.uniform(0.01, 0.99, n), NAMES)


# --- boxes ---------------------------------------------------------------------------------------


def test_the_line_lies_on_the_edge():
    d = Detections([[300, 200, 340, 260]], [1], [1.0], NAMES)
    drawn = coloured(draw_overlay(PINK, d, COLOURS), COLOURS[1])[180:280, 280:360]
    rows, columns = np.nonzero(drawn)
    width = overlay._line_width((600, 400), d.xyxy)
    assert (columns.min() + 280, columns.max() + 281) == (300 - width // 2, 340 + width // 2)
    assert (rows.min() + 180, rows.max() + 181) == (200 - width // 2, 260 + width // 2)
    assert not drawn[40:60, 40:50].any()


def test_the_image_is_not_changed_and_stays_where_nothing_is_drawn():
    before = PINK.copy()
    picture = draw_overlay(PINK, Detections([[300, 200, 340, 260]], [0], [0.5], NAMES), COLOURS)
    np.testing.assert_array_equal(PINK, before)
    assert picture.shape == PINK.shape
    assert picture.dtype == np.uint8
    assert picture.flags.writeable
    assert (picture == PINK).all(-1).mean() > 0.85


def test_the_best_is_on_top():
    d = Detections([[300, 200, 340, 260]] * 2, [0, 1], [0.3, 0.9], NAMES)
    picture = draw_overlay(PINK, d, COLOURS)[150:300, 250:400]
    assert coloured(picture, COLOURS[1]).any()
    assert not coloured(picture, COLOURS[0]).any()


def test_lines_grow_with_the_picture_and_never_fill_a_box():
    large = np.array([[0, 0, 900, 900]], np.float32)
    small = np.array([[0, 0, 20, 20]], np.float32)
    assert overlay._line_width((640, 480), large) == 2
    assert overlay._line_width((8000, 8000), large) == 32
    assert overlay._line_width((8000, 8000), small) == 1
    assert overlay._line_width((50, 50), large[:0]) == 1


@pytest.mark.parametrize(
    "box", [[-50, -50, 20, 20], [590, 390, 900, 900], [700, 700, 800, 800], [5, 5, 5, 5]]
)
def test_boxes_at_and_beyond_the_border(box):
    assert draw_overlay(PINK, Detections([box], [0], [0.5], NAMES)).shape == PINK.shape


def test_scores_are_written_at_few_and_not_at_certain_ones():
    box = [[250, 150, 350, 350]]
    certain = draw_overlay(PINK, Detections(box, [0], [1.0], NAMES), COLOURS)
    scored = draw_overlay(PINK, Detections(box, [0], [0.99], NAMES), COLOURS)
    tab = (slice(152, 160), slice(254, 270))
    assert not coloured(certain[tab], COLOURS[0]).any()
    assert coloured(scored[tab], COLOURS[0]).any()


# --- legend --------------------------------------------------------------------------------------


def test_legend_counts(legends):
    d = Detections([[0, 0, 9, 9]] * 3, [0, 0, 1], [0.9, 0.3, 0.8], NAMES)
    draw_overlay(PINK, d)
    draw_overlay(PINK, d, confidence=0.5)
    draw_overlay(PINK, d[:1])
    draw_overlay(PINK, Detections.empty(NAMES), confidence=0.25)
    draw_overlay(PINK, Detections.empty([]))
    assert legends == [
        ["RBC 2", "WBC 1", "3 objects"],
        ["RBC 1", "WBC 1", "2 objects above 0.5"],
        ["RBC 1", "WBC 0", "1 object"],
        ["RBC 0", "WBC 0", "No objects above 0.25"],
        ["No objects"],
    ]


def test_legend_of_many_classes_has_the_most_frequent(legends):
    names = [f"class {i}" for i in range(40)]
    labels = np.repeat(np.arange(40), np.arange(40))
    boxes = np.tile([[0.0, 0, 9, 9]], (len(labels), 1))
    draw_overlay(PINK, Detections(boxes, labels, [0.5] * len(labels), names))
    assert legends[0][0] == "class 29 29"
    assert legends[0][10:] == ["class 39 39", f"other classes {sum(range(29))}", "780 objects"]


def test_legend_leaves_the_objects_free():
    """With a box in three of the corners it goes to the fourth."""
    corners = {"top left": (0, 0), "top right": (400, 0), "left": (0, 300), "right": (400, 300)}
    for free, (x, y) in corners.items():
        boxes = [[cx, cy, cx + 200, cy + 100] for cx, cy in corners.values() if (cx, cy) != (x, y)]
        picture = draw_overlay(PINK, Detections(boxes, [0] * 3, [1.0] * 3, NAMES), COLOURS)
        changed = (picture != PINK).any(-1)[y : y + 100, x : x + 200]
        assert changed.mean() > 0.2, free


def test_a_long_name_leaves_the_count(legends):
    d = Detections([[0, 0, 9, 9]], [0], [0.5], ["a very long name of a class " * 20])
    assert draw_overlay(PINK, d).shape == PINK.shape
    assert legends[0][0].endswith(" 1")
    assert "…" in legends[0][0]


@pytest.mark.parametrize("shape", [(1, 1), (10, 12), (40, 3000), (3000, 40)])
def test_odd_pictures(shape):
    image = np.full((*shape, 3), 200, np.uint8)
    d = Detections([[0, 0, shape[1], shape[0]]], [0], [0.9], NAMES)
    assert draw_overlay(image, d).shape == image.shape
    assert draw_overlay(image, Detections.empty(NAMES)).shape == image.shape


# --- images --------------------------------------------------------------------------------------


def test_deep_dark_and_transparent_images():
    none = Detections.empty(NAMES)
    middle = (slice(200, 300), slice(300, 500))
    deep = PINK.astype(np.uint16) * 257
    np.testing.assert_array_equal(draw_overlay(deep, none)[middle], PINK[middle])
    np.testing.assert_array_equal(draw_overlay(PINK / 255, none)[middle], PINK[middle])
    camera = PINK.astype(np.uint16) * 16  # 12 bit
    assert draw_overlay(camera, none)[middle].max() > 200
    clear = np.dstack([PINK, np.zeros(PINK.shape[:2], np.uint8)])
    assert (draw_overlay(clear, none)[middle] == 255).all()


def test_a_smaller_picture():
    d = Detections([[300, 200, 340, 260]], [1], [1.0], NAMES)
    picture = draw_overlay(PINK, d, COLOURS, max_side=300)
    assert picture.shape == (200, 300, 3)
    rows, columns = np.nonzero(coloured(picture, COLOURS[1])[90:140, 140:180])
    assert abs(columns.min() + 140 - 150) <= 1
    assert abs(rows.max() + 91 - 130) <= 1
    assert draw_overlay(PINK, d, max_side=5000).shape == PINK.shape


def test_real_smear(shared):
    data = shared / "data/bccd"
    image = read_image(data / "JPEGImages/BloodImage_00000.jpg").pixels
    truth = read_voc(data / "Annotations/BloodImage_00000.xml", image_shape=image.shape[:2])
    picture = draw_overlay(image, truth)
    for label, colour in enumerate(class_colours(len(truth.names))):
        assert coloured(picture, colour).sum() > 100, truth.names[label]
    changed = (picture != image).any(-1).mean()
    assert 0.03 < changed < 0.25


def test_ten_thousand_boxes(legends):
    image = np.full((3000, 4000, 3), 220, np.uint8)
    picture = draw_overlay(image, many(10_000, image.shape[:2]), COLOURS)
    assert legends[0][-1] == "10000 objects"
    lines = coloured(picture, COLOURS[0]) | coloured(picture, COLOURS[1])
    assert 0.02 < lines.mean() < 0.1  # one pixel wide, and nothing written at them


def test_bad_colours():
    with pytest.raises(ValueError, match="A colour is written as"):
        draw_overlay(PINK, many(3), ["red", "green"])
    with pytest.raises(ValueError, match="1 colours for 2 classes"):
        draw_overlay(PINK, many(3), ["#ff0000"])
