"""The Annotations tab in a window: match, draw, choose a threshold, fix label errors."""

import numpy as np
import pytest

from reviews import some

pytestmark = pytest.mark.window


def drawn(viewer, kind):
    """How many boxes of a kind the canvas shows."""
    layer = viewer.layers["smear · evaluation"]
    return int((layer.features["kind"] == kind).sum()) if len(layer.data) else 0


def test_true_false_missed_and_wrong_are_counted_and_drawn(compared_review, until):
    viewer, panel, detection_layer, _ = compared_review
    matches = panel.annotation_tab.metrics.matches
    shown = int((some().scores >= 0.25).sum())
    assert len(matches.false_positives) == 2
    assert len(matches.wrong_class) == 1
    assert len(matches.true_positives) == shown - 3
    assert len(matches.missed) == 40 - shown
    until(lambda: drawn(viewer, "false") == 2)
    assert drawn(viewer, "true") == shown - 3
    assert drawn(viewer, "missed") == 40 - shown
    assert drawn(viewer, "wrong class") == 1
    assert not detection_layer.layer.visible
    panel.annotation_tab.metrics.outcome_boxes["false"].setChecked(False)
    assert drawn(viewer, "false") == 0
    assert drawn(viewer, "true") == shown - 3
    panel.tabs.setCurrentIndex(0)
    assert "smear · evaluation" not in viewer.layers
    assert detection_layer.layer.visible


def test_the_numbers_follow_the_confidence(compared_review, until):
    _, panel, detection_layer, _ = compared_review
    before = len(panel.annotation_tab.metrics.matches.missed)
    panel.filter.confidence.setValue((0.8, 1.0))
    until(lambda: len(panel.annotation_tab.metrics.matches.missed) > before)
    panel.tabs.setCurrentIndex(0)
    assert detection_layer.layer.features["confidence"].min() >= 0.8
    panel.tabs.setCurrentIndex(3)
    until(lambda: panel.annotation_tab.on_canvas)
    assert panel.annotation_tab.metrics.scores.item(0, 2).text() == str(len(panel.rows))


def test_the_best_threshold_is_offered_and_taken(compared_review, until):
    _, panel, _, _ = compared_review
    best = panel.annotation_tab.evaluation.best_threshold()
    panel.annotation_tab.metrics.use_best_button.click()
    until(lambda: panel.filter.confidence.value()[0] == pytest.approx(best, abs=0.01))


def test_a_cell_of_the_matrix_shows_its_boxes(compared_review):
    _, panel, _, _ = compared_review
    matrix = panel.annotation_tab.metrics
    nothing = matrix._confusion_classes.index(len(matrix.matches.names))
    matrix.confusion.cellClicked.emit(0, nothing)
    assert sorted(panel.rows.tolist()) == [1, 2]


@pytest.mark.parametrize("kind", ["not annotated", "another class"])
def test_an_annotation_is_fixed_with_one_key(compared_review, until, kind):
    _, panel, _, truth = compared_review
    tab = panel.annotation_tab
    place = [s.kind for s in tab.metrics._label_errors].index(kind)
    label_error = tab.metrics._label_errors[place]
    count = truth.nshapes
    tab.metrics.label_error_list.setCurrentRow(place)
    assert panel.current == label_error.detection
    panel.keys["F"]()
    if kind == "not annotated":
        assert truth.nshapes == count + 1
        until(lambda: len(tab.metrics.matches.false_positives) == 1)
    else:
        assert truth.nshapes == count
        until(lambda: len(tab.metrics.matches.wrong_class) == 0)
    until(lambda: not tab.task.running)
    assert tab.metrics.label_error_list.currentRow() == min(
        place, len(tab.metrics._label_errors) - 1
    )


def test_nothing_is_fixed_that_may_be_another_shape_by_now(compared_review):
    _, panel, _, truth = compared_review
    panel.annotation_tab.metrics.label_error_list.setCurrentRow(0)
    truth.selected_data = {0}
    truth.remove_selected()
    count = truth.nshapes
    panel.keys["F"]()
    assert truth.nshapes == count


def test_a_cell_of_missed_ones_selects_the_annotations(compared_review):
    viewer, panel, _, truth = compared_review
    matrix = panel.annotation_tab.metrics
    nothing = matrix._confusion_classes.index(len(matrix.matches.names))
    matrix.confusion.cellClicked.emit(nothing, 0)
    missed = matrix.matches.missed[matrix.matches.true_labels[matrix.matches.missed] == 0]
    assert len(missed) > 3
    assert truth.selected_data == set(
        panel.annotation_tab.annotations.shape_indices[missed].tolist()
    )
    assert viewer.layers.selection.active is truth


def test_annotations_that_come_and_go_are_noticed(compared_review, until):
    viewer, panel, detection_layer, truth = compared_review
    other = viewer.add_shapes([np.array([[0, 0], [9, 9]])], shape_type="rectangle", name="other")
    until(lambda: panel.annotation_tab.metrics.annotation_choice.findText("other") > 0)
    viewer.layers.remove(truth)
    until(lambda: panel.annotation_tab.metrics.matches is None)
    assert detection_layer.layer.visible
    panel.annotation_tab.metrics.annotation_choice.setCurrentText("other")
    until(lambda: panel.annotation_tab.metrics.matches is not None)
    assert len(panel.annotation_tab.metrics.matches.missed) == 1
    assert other in viewer.layers


def test_of_thousands_those_in_the_viewport_are_drawn(compared_review, until, monkeypatch):
    viewer, panel, _, _ = compared_review
    monkeypatch.setattr("napari_beerlanet.ui.evaluate.outcome_layer.max_drawn_boxes", lambda: 12)
    viewer.scene.camera.zoom = 20
    panel.target.center_on_box(some().xyxy[25])
    layer = viewer.layers["smear · evaluation"]
    until(lambda: 0 < layer.nshapes < 12)
    centre = layer.data[0].mean(axis=0)
    assert np.abs(centre - some().xyxy[25, [1, 0]]).max() < 100


def test_annotations_that_change_are_compared_again(compared_review, until):
    _, panel, _, truth = compared_review
    missed = len(panel.annotation_tab.metrics.matches.missed)
    truth.selected_data = {truth.nshapes - 1}
    truth.remove_selected()
    until(lambda: len(panel.annotation_tab.metrics.matches.missed) == missed - 1)
