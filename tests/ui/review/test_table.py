"""The table of the review; a hundred thousand rows where it counts."""

import time

import numpy as np
import pytest
from qtpy.QtCore import QPoint, Qt

from napari_beerlanet.core.review.review import ACCEPTED
from napari_beerlanet.ui.review.filter import FilterForm
from napari_beerlanet.ui.review.table import ReviewTable, ReviewTableModel, cell_text
from reviews import random_review

NAMES = ["RBC", "WBC", "Platelets"]


@pytest.fixture
def table(qtbot):
    table = ReviewTable()
    qtbot.addWidget(table)
    table.set_review_model(ReviewTableModel(random_review(200), table))
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
    assert heads[-2:] == ["Model channel 1 mean", "Model channel 2 mean"]
    first_four = sum(table.columnWidth(k) for k in range(4))
    assert first_four <= 305, "they are seen at once in a dock of 390 pixels"
    assert float(cells(table, "confidence")[0]) == pytest.approx(
        float(model.review.detections.scores[0]), abs=6e-4
    )


def test_a_click_on_a_heading_sorts_and_a_second_turns_it_round(table, qtbot):
    header = table.horizontalHeader()
    column = table.model().names.index("Model channel 1 mean")
    x = header.sectionPosition(column) - header.offset() + 5
    table.scrollTo(table.model().index(0, column))
    x = header.sectionViewportPosition(column) + 5
    for _ in range(2):
        qtbot.mouseClick(header.viewport(), Qt.MouseButton.LeftButton, pos=QPoint(x, 5))
        table.show_rows(table.apply_sorting(np.arange(200)))
        values = [float(v) for v in cells(table, "Model channel 1 mean")]
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
    table.show_rows(table.apply_sorting(np.arange(0, 200, 2)))
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
    model.update_cells()
    assert model.data(index, Qt.ItemDataRole.BackgroundRole) is not None
    assert cells(table, "status")[3] == ACCEPTED


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("class", "a\nb", "a b"),
        ("x", np.float32(1.25), "1.2"),
        ("id", np.int64(7), "7"),
        ("Model channel 1 mean", np.float32("nan"), ""),
        ("area", np.float32(1234.5), "1234"),
        ("confidence", np.float32(0.5), "0.500"),
    ],
)
def test_values_as_text(name, value, text):
    assert cell_text(name, value) == text


@pytest.mark.slow
def test_a_hundred_thousand_rows_are_filtered_and_sorted_without_a_stall(qtbot, record_property):
    review = random_review(100_000)
    table, controls = ReviewTable(), FilterForm()
    qtbot.addWidget(table)
    qtbot.addWidget(controls)
    table.set_review_model(ReviewTableModel(review, table))
    controls.set_review(review)
    table.show()
    times = {}
    for low in (0.1, 0.5, 0.9):
        controls.confidence.setValue((low, 1.0))
        began = time.perf_counter()
        table.show_rows(review.ordered(review.mask(controls.current_filter), "uncertain", low))
        qtbot.wait(1)
        times[f"filter {low}"] = time.perf_counter() - began
    for name in ("class", "confidence", "Model channel 1 mean"):
        began = time.perf_counter()
        table._sort(table.model().names.index(name))
        table.show_rows(table.apply_sorting(table.rows))
        times[f"sort {name}"] = time.perf_counter() - began
    for what, seconds in times.items():
        record_property(what, seconds)
        print(f"{what}: {1000 * seconds:.0f} ms")
    assert table.model().rowCount() > 0
