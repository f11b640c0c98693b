"""Table, filter, gallery and histogram of the review; a hundred thousand rows where it counts."""

import time

import numpy as np
import pyqtgraph as pg
import pytest
from qtpy.QtCore import QEvent, QPoint, QPointF, Qt
from qtpy.QtGui import QMouseEvent

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.reviewing import ACCEPTED, Review
from napari_beerlanet.ui.review_filter import ReviewFilter
from napari_beerlanet.ui.review_histogram import ReviewHistogram
from napari_beerlanet.ui.review_table import ReviewModel, ReviewTable, text_of

NAMES = ["RBC", "WBC", "Platelets"]


def review_of(n, seed=0):
    rng = np.random.default_rng(seed)
    low = rng.uniform(0, 4000, (n, 2))
    boxes = np.concatenate([low, low + rng.uniform(10, 60, (n, 2))], 1)
    columns = {f"OD {k} mean": rng.gamma(2, 0.2, n).astype(np.float32) for k in (1, 2)}
    found = Detections(boxes, rng.integers(0, 3, n), rng.uniform(0.01, 1, n), NAMES, columns)
    return Review(found)


@pytest.fixture
def table(qtbot):
    table = ReviewTable()
    qtbot.addWidget(table)
    table.use(ReviewModel(review_of(200), table))
    table.show()
    return table


def cells(table, name):
    column = table.model().names.index(name)
    return [
        table.model().index(k, column).data(Qt.ItemDataRole.DisplayRole)
        for k in range(table.model().rowCount())
    ]


def test_the_table_shows_every_column_of_the_review(table):
    model = table.model()
    heads = [
        model.headerData(k, Qt.Orientation.Horizontal, Qt.ItemDataRole.DisplayRole)
        for k in range(model.columnCount())
    ]
    assert heads[:4] == ["id", "class", "confidence", "status"]
    assert heads[-2:] == ["OD 1 mean", "OD 2 mean"]
    assert float(cells(table, "confidence")[0]) == pytest.approx(
        float(model.review.found.scores[0]), abs=6e-4
    )


def test_a_click_on_a_heading_sorts_and_a_second_turns_it_round(table, qtbot):
    header = table.horizontalHeader()
    column = table.model().names.index("OD 1 mean")
    x = header.sectionPosition(column) - header.offset() + 5
    table.scrollTo(table.model().index(0, column))
    x = header.sectionViewportPosition(column) + 5
    for _ in range(2):
        qtbot.mouseClick(header.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(x, 5))
        table.show_rows(table.arranged(np.arange(200)))
        values = [float(v) for v in cells(table, "OD 1 mean")]
        descending = header.sortIndicatorOrder() == Qt.SortOrder.DescendingOrder
        assert values == sorted(values, reverse=descending)


def click(table, qtbot, place, keys=Qt.KeyboardModifier.NoModifier):
    point = table.visualRect(table.model().index(place, 0)).center()
    qtbot.mouseClick(table.viewport(), Qt.MouseButton.LeftButton, keys, point)


def test_several_rows_are_selected_while_the_panel_follows(table, qtbot):
    table.picked.connect(table.go_to)  # as the panel does
    click(table, qtbot, 1)
    click(table, qtbot, 3, Qt.KeyboardModifier.ControlModifier)
    assert table.selected_rows.tolist() == [1, 3]
    click(table, qtbot, 2)
    click(table, qtbot, 5, Qt.KeyboardModifier.ShiftModifier)
    assert table.selected_rows.tolist() == [2, 3, 4, 5]


def test_sorting_survives_a_filter(table):
    table._sort(table.model().names.index("area"))
    table.show_rows(table.arranged(np.arange(0, 200, 2)))
    areas = [float(v) for v in cells(table, "area")]
    assert len(areas) == 100
    assert areas == sorted(areas) or areas == sorted(areas, reverse=True)


def test_picking_and_going_to_a_row(table, qtbot):
    picked = []
    table.picked.connect(picked.append)
    table.show_rows(np.array([5, 9, 2]))
    table.selectRow(1)
    assert picked == [9]
    assert table.go_to(2)
    assert table.selected_rows.tolist() == [2]
    assert picked == [9]
    assert not table.go_to(100)


def test_a_decision_is_tinted(table):
    model = table.model()
    index = model.index(3, 0)
    assert model.data(index, Qt.ItemDataRole.BackgroundRole) is None
    model.review.accept([3])
    model.changed()
    assert model.data(index, Qt.ItemDataRole.BackgroundRole) is not None
    assert cells(table, "status")[3] == ACCEPTED


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("class", "a\nb", "a b"),
        ("x", np.float32(1.25), "1.2"),
        ("id", np.int64(7), "7"),
        ("OD 1 mean", np.float32("nan"), ""),
        ("area", np.float32(1234.5), "1234"),
        ("confidence", np.float32(0.5), "0.500"),
    ],
)
def test_values_as_text(name, value, text):
    assert text_of(name, value) == text


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_filtered_and_sorted_without_a_stall(qtbot, record_property):
    review = review_of(100_000)
    table, controls = ReviewTable(), ReviewFilter()
    qtbot.addWidget(table)
    qtbot.addWidget(controls)
    table.use(ReviewModel(review, table))
    controls.use(review)
    table.show()
    times = {}
    for low in (0.1, 0.5, 0.9):
        controls.confidence.setValue((low, 1.0))
        began = time.perf_counter()
        table.show_rows(review.ordered(review.mask(controls.chosen), "uncertain", low))
        qtbot.wait(1)
        times[f"filter {low}"] = time.perf_counter() - began
    for name in ("class", "confidence", "OD 1 mean"):
        began = time.perf_counter()
        table._sort(table.model().names.index(name))
        table.show_rows(table.arranged(table.rows))
        times[f"sort {name}"] = time.perf_counter() - began
    for what, seconds in times.items():
        record_property(what, seconds)
        print(f"{what}: {1000 * seconds:.0f} ms")
    assert max(times.values()) < 3


# --- the filter ----------------------------------------------------------------------------------


@pytest.fixture
def controls(qtbot):
    controls = ReviewFilter()
    qtbot.addWidget(controls)
    controls.use(review_of(200), 0.4)
    controls.show()
    return controls


def test_what_the_controls_say(controls):
    assert controls.chosen.classes is None
    assert controls.chosen.ranges["confidence"] == pytest.approx((0.4, 1.0))
    controls.classes.setCurrentText("WBC")
    controls.states.setCurrentText("rejected")
    controls.text.setText("  wb ")
    controls.column.setCurrentText("OD 2 mean")
    assert controls.between.isVisible()
    chosen = controls.chosen
    assert chosen.classes == {"WBC"}
    assert chosen.states == {"rejected"}
    assert chosen.text == "wb"
    assert set(chosen.ranges) == {"confidence"}
    controls.between.setValue((0.2, 0.5))
    controls.column.setCurrentText("OD 1 mean")
    controls.between.setValue((0.1, 0.6))
    ranges = controls.chosen.ranges
    assert ranges["OD 2 mean"] == pytest.approx((0.2, 0.5), abs=0.01)
    assert ranges["OD 1 mean"] == pytest.approx((0.1, 0.6), abs=0.01)
    assert "OD 2 mean 0.2 to 0.5" in controls.others.text()
    controls.column.setCurrentText("OD 2 mean")
    assert controls.between.value() == pytest.approx((0.2, 0.5), abs=0.01)
    controls.clear()
    review = review_of(200)
    assert review.mask(controls.chosen).all()


def test_the_whole_range_of_a_column_leaves_nothing_out(controls):
    review = review_of(200)
    controls.clear()
    for name in ("area", "OD 1 mean", "x"):
        controls.column.setCurrentText(name)
        assert review.mask(controls.chosen).all(), name


def test_many_movements_are_told_once(controls, qtbot):
    told = []
    controls.changed.connect(lambda: told.append(1))
    qtbot.wait(100)
    told.clear()
    for k in range(30):
        controls.confidence.setValue((0.01 * k, 1.0))
    qtbot.waitUntil(lambda: bool(told), timeout=5000)
    qtbot.wait(100)
    assert len(told) == 1


def test_a_new_class_is_offered_and_the_choice_stays(controls):
    controls.classes.setCurrentText("WBC")
    controls.update_classes([*NAMES, "schizont"])
    assert controls.classes.currentText() == "WBC"
    assert controls.classes.findText("schizont") > 0


# --- histogram and gallery -----------------------------------------------------------------------


def test_a_range_brushed_in_the_histogram_goes_to_the_filter(qtbot, controls):
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    review = review_of(500)
    histogram.use(review, ["#ff0000", "#00ff00", "#0000ff"])
    histogram.brushed.connect(controls.choose_range)
    histogram.range.setRegion((0.3, 0.6))
    assert controls.chosen.ranges["confidence"] == pytest.approx((0.3, 0.6), abs=0.01)
    histogram.column.setCurrentText("OD 1 mean")
    histogram.range.setRegion((0.2, 0.4))
    assert controls.chosen.ranges["OD 1 mean"] == pytest.approx((0.2, 0.4), abs=0.01)
    assert len(histogram.plot.listDataItems()) == 3


def test_a_drag_over_the_histogram_chooses_a_range(qtbot, controls):
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    histogram.brushed.connect(controls.choose_range)
    histogram.range_of = controls.range_of
    histogram.use(review_of(500), ["#ff0000", "#00ff00", "#0000ff"])
    histogram.resize(500, 300)
    histogram.show()
    qtbot.waitExposed(histogram)
    qtbot.wait(50)
    box, view = histogram.plot.getViewBox(), histogram.plot.viewport()
    ends = [
        histogram.plot.mapFromScene(box.mapViewToScene(pg.Point(x, box.viewRange()[1][1] / 2)))
        for x in (0.3, 0.45, 0.6)
    ]
    qtbot.mousePress(view, Qt.MouseButton.LeftButton, pos=ends[0])
    for point in ends[1:]:
        qtbot.mouseMove(view, point)
        histogram.plot.mouseMoveEvent(_dragged(point))
    qtbot.mouseRelease(view, Qt.MouseButton.LeftButton, pos=ends[-1])
    assert controls.chosen.ranges["confidence"] == pytest.approx((0.3, 0.6), abs=0.02)
    assert histogram.range.getRegion() == pytest.approx((0.3, 0.6), abs=0.02)
    controls.confidence.setValue((0.5, 0.9))
    histogram.follow()
    assert histogram.range.getRegion() == pytest.approx((0.5, 0.9), abs=0.01)
    histogram.whole()
    assert controls.chosen.ranges["confidence"] == (0.0, 1.0)


def _dragged(point):
    at, left = QPointF(point), Qt.MouseButton.LeftButton
    none = Qt.KeyboardModifier.NoModifier
    return QMouseEvent(QEvent.Type.MouseMove, at, at, left, left, none)


def test_columns_of_words_are_searched_and_not_drawn(qtbot, controls):
    found = review_of(50).found
    words = {"id": np.arange(50), "field": np.array(["north", "south"] * 25), "n": np.arange(50)}
    review = Review(Detections(found.xyxy, found.labels, found.scores, NAMES, words))
    assert review.columns[-2:] == ["field", "n"]
    controls.use(review, 0.0)
    controls.text.setText("SOU")
    assert review.mask(controls.chosen).sum() == 25
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    histogram.use(review, [])
    assert histogram.column.findText("n") >= 0
    assert histogram.column.findText("field") < 0


def test_a_histogram_of_nothing_is_empty(qtbot):
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    histogram.use(Review(Detections.empty(NAMES)), [])
    assert histogram.plot.listDataItems() == []
