"""The filter and order of the review."""

import pytest

from napari_beerlanet.ui.review.filter import FilterForm
from reviews import random_review

NAMES = ["RBC", "WBC", "Platelets"]


@pytest.fixture
def controls(qtbot):
    controls = FilterForm()
    qtbot.addWidget(controls)
    controls.set_review(random_review(200), 0.4)
    controls.show()
    return controls


def test_what_the_controls_say(controls):
    assert controls.current_filter.classes is None
    assert controls.current_filter.ranges["confidence"] == pytest.approx((0.4, 1.0))
    controls.classes.setCurrentText("WBC")
    controls.states.setCurrentText("rejected")
    controls.text.setText("  wb ")
    controls.column.setCurrentText("Model channel 2 mean")
    assert controls.range_slider.isVisible()
    chosen = controls.current_filter
    assert chosen.classes == {"WBC"}
    assert chosen.states == {"rejected"}
    assert chosen.text == "wb"
    assert set(chosen.ranges) == {"confidence"}
    controls.range_slider.setValue((0.2, 0.5))
    controls.column.setCurrentText("Model channel 1 mean")
    controls.range_slider.setValue((0.1, 0.6))
    ranges = controls.current_filter.ranges
    assert ranges["Model channel 2 mean"] == pytest.approx((0.2, 0.5), abs=0.01)
    assert ranges["Model channel 1 mean"] == pytest.approx((0.1, 0.6), abs=0.01)
    assert "Model channel 2 mean 0.2 to 0.5" in controls.other_ranges_line.text()
    controls.column.setCurrentText("Model channel 2 mean")
    assert controls.range_slider.value() == pytest.approx((0.2, 0.5), abs=0.01)
    controls.clear()
    review = random_review(200)
    assert review.mask(controls.current_filter).all()


def test_the_whole_range_of_a_column_leaves_nothing_out(controls):
    review = random_review(200)
    controls.clear()
    for name in ("area", "Model channel 1 mean", "x"):
        controls.column.setCurrentText(name)
        assert review.mask(controls.current_filter).all(), name


def test_many_movements_are_told_once(controls, qtbot):
    told = []
    controls.changed.connect(lambda: told.append(1))
    qtbot.wait(100)
    told.clear()
    for k in range(30):
        controls.confidence.setValue((0.01 * k, 1.0))
    qtbot.waitUntil(lambda: bool(told), timeout=600_000)
    qtbot.wait(100)
    assert len(told) == 1


def test_a_new_class_is_offered_and_the_choice_stays(controls):
    controls.classes.setCurrentText("WBC")
    controls.update_classes([*NAMES, "schizont"])
    assert controls.classes.currentText() == "WBC"
    assert controls.classes.findText("schizont") > 0
