"""The histogram of the review, which filters by a range."""

import numpy as np
import pyqtgraph as pg
import pytest
from qtpy.QtCore import QEvent, QPointF, Qt
from qtpy.QtGui import QMouseEvent

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.review.review import Review
from napari_beerlanet.ui.review.filter import FilterForm
from napari_beerlanet.ui.review.histogram import ReviewHistogram
from reviews import random_review

NAMES = ["RBC", "WBC", "Platelets"]


@pytest.fixture
def controls(qtbot):
    controls = FilterForm()
    qtbot.addWidget(controls)
    controls.set_review(random_review(200), 0.4)
    controls.show()
    return controls


def test_a_range_brushed_in_the_histogram_goes_to_the_filter(qtbot, controls):
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    review = random_review(500)
    histogram.set_review(review, ["#ff0000", "#00ff00", "#0000ff"])
    histogram.range_selected.connect(controls.set_range)
    histogram.range.setRegion((0.3, 0.6))
    assert controls.current_filter.ranges["confidence"] == pytest.approx((0.3, 0.6), abs=0.01)
    histogram.column.setCurrentText("Model channel 1 mean")
    histogram.range.setRegion((0.2, 0.4))
    ranges = controls.current_filter.ranges
    assert ranges["Model channel 1 mean"] == pytest.approx((0.2, 0.4), abs=0.01)
    assert len(histogram.plot.listDataItems()) == 3


def test_a_drag_over_the_histogram_chooses_a_range(qtbot, controls):
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    histogram.range_selected.connect(controls.set_range)
    histogram.range_of = controls.range_of
    histogram.set_review(random_review(500), ["#ff0000", "#00ff00", "#0000ff"])
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
    assert controls.current_filter.ranges["confidence"] == pytest.approx((0.3, 0.6), abs=0.02)
    assert histogram.range.getRegion() == pytest.approx((0.3, 0.6), abs=0.02)
    controls.confidence.setValue((0.5, 0.9))
    histogram.sync_range()
    assert histogram.range.getRegion() == pytest.approx((0.5, 0.9), abs=0.01)
    histogram.reset_range()
    assert controls.current_filter.ranges["confidence"] == (0.0, 1.0)


def _dragged(point):
    at, left = QPointF(point), Qt.MouseButton.LeftButton
    none = Qt.KeyboardModifier.NoModifier
    return QMouseEvent(QEvent.Type.MouseMove, at, at, left, left, none)


def test_columns_of_words_are_searched_and_not_drawn(qtbot, controls):
    found = random_review(50).detections
    words = {"id": np.arange(50), "field": np.array(["north", "south"] * 25), "n": np.arange(50)}
    review = Review(Detections(found.xyxy, found.labels, found.scores, NAMES, words))
    assert review.columns[-2:] == ["field", "n"]
    controls.set_review(review, 0.0)
    controls.text.setText("SOU")
    assert review.mask(controls.current_filter).sum() == 25
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    histogram.set_review(review, [])
    assert histogram.column.findText("n") >= 0
    assert histogram.column.findText("field") < 0


def test_a_histogram_of_nothing_is_empty(qtbot):
    histogram = ReviewHistogram()
    qtbot.addWidget(histogram)
    histogram.set_review(Review(Detections.empty(NAMES)), [])
    assert histogram.plot.listDataItems() == []
