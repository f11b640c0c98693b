"""The Annotations tab in a window: match, draw, choose a threshold, fix label errors."""

import numpy as np
import pytest

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import OUTCOME_COLOURS
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.evaluation.dataset import measure
from napari_beerlanet.core.evaluation.live import LiveEvaluation
from napari_beerlanet.core.formats import write_yolo
from napari_beerlanet.ui.common.session import get_project_store
from napari_beerlanet.ui.viewer.layers import Role, role_metadata
from reviews import annotate, some

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
    for place, outcome in (((0, 0), "true"), ((0, nothing), "false")):
        colour = matrix.confusion.item(*place).background().color().name()
        assert colour == OUTCOME_COLOURS[outcome], "as on the canvas, never red against green"


def test_the_matrix_is_that_of_evaluate(compared_review):
    """Two classes on one annotation: the more confident one takes it, as Ultralytics counts."""
    metrics = compared_review[1].annotation_tab.metrics
    cells, names = np.array([[0, 0, 20, 20], [0, 0, 20, 20.0]]), ["RBC", "WBC"]
    found = Detections(cells.astype(np.float32), np.array([0, 1]), np.array([0.9, 0.8]), names)
    pair = found, Annotations(cells[:1], np.array([1]), names)
    metrics.show_matches(LiveEvaluation.of(*pair).match_at(0.25), 0.25)
    table = metrics.confusion
    shown = np.array(
        [
            [int(table.item(i, j).text() or 0) for j in range(table.columnCount())]
            for i in range(table.rowCount())
        ]
    )
    evaluated = np.array(measure([pair], names, 0.25)["confusion"]["matrix"])
    assert np.array_equal(shown, evaluated)


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
    _, missed = matrix.matches.confusion.cell(len(matrix.matches.names), 0)
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
    panel.target.show_box(some().xyxy[25])
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


# --- annotations without names of classes ---------------------------------------------------------


def as_yolo(folder, found, image="smear"):
    """A label file of an image, without names of its classes."""
    folder.mkdir(parents=True, exist_ok=True)
    write_yolo(folder / f"{image}.txt", found, confidence=False)
    return folder / f"{image}.txt"


def scores(panel):
    """The table of scores by class: (annotated, detected, precision)."""
    table = panel.annotation_tab.metrics.scores
    texts = [[table.item(i, j).text() for j in range(4)] for i in range(table.rowCount())]
    return {name: (annotated, detected, value) for name, annotated, detected, value in texts}


def compared_with(viewer, panel, until, path):
    """Open a file of boxes, and the tab; what is preselected is compared."""
    viewer.open(str(path), plugin="napari-beerlanet")
    panel.tabs.setCurrentIndex(3)
    until(lambda: panel.annotation_tab.metrics.matches is not None)
    return panel.annotation_tab.metrics


def test_classes_that_a_yolo_file_only_numbers_are_those_of_the_model(open_review, until, tmp_path):
    viewer, panel, _ = open_review()
    metrics = compared_with(viewer, panel, until, as_yolo(tmp_path / "labels", some().above(0.25)))
    assert metrics.annotation_choice.currentText() == "smear.txt", "the only one is preselected"
    shown = {name: value for name, (_, _, value) in scores(panel).items()}
    assert shown == {"all": "100.0 %", "RBC": "100.0 %", "WBC": "100.0 %"}
    mapping = metrics.class_mapping
    assert mapping.isVisibleTo(metrics)
    assert mapping.mapping == {"0": "RBC", "1": "WBC"}
    assert "order" in mapping.text.text()


def test_a_class_that_was_named_once_is_known_for_all_files_of_the_folder(
    open_review, until, tmp_path
):
    truth = some().above(0.25)
    swapped = Detections(truth.xyxy, 1 - truth.labels, truth.scores, ["0", "1"], {}, (400, 600))
    file = as_yolo(tmp_path / "labels", swapped)
    viewer, panel, _ = open_review()
    metrics = compared_with(viewer, panel, until, file)
    assert len(metrics.matches.true_positives) == 0
    assert "lie on" in metrics.notes.text(), "the boxes contradict the order"
    metrics.class_mapping.choices["0"].setCurrentText("WBC")
    metrics.class_mapping.choices["1"].setCurrentText("RBC")
    until(lambda: len(metrics.matches.true_positives) == len(truth))
    assert "lie on" not in metrics.notes.text()
    viewer, panel, _ = open_review()
    file = file.rename(file.with_name("smear of the same folder.txt"))
    metrics = compared_with(viewer, panel, until, file)
    assert len(metrics.matches.true_positives) == len(truth)
    assert metrics.class_mapping.mapping == {"0": "WBC", "1": "RBC"}
    assert not metrics.class_mapping.choices["0"].isVisibleTo(metrics), "it is not asked again"


def test_a_fix_keeps_the_names_that_the_annotations_have(open_review, until, tmp_path):
    viewer, panel, _ = open_review()
    file = as_yolo(tmp_path / "labels", some()[np.arange(40) != 1].above(0.25))
    metrics = compared_with(viewer, panel, until, file)
    kinds = [error.kind for error in metrics._label_errors]
    metrics.label_error_list.setCurrentRow(kinds.index("not annotated"))
    panel.keys["F"]()
    layer = viewer.layers["smear.txt"]
    until(lambda: len(metrics.matches.false_positives) == 0)
    assert set(layer.features["class"]) == {"0", "1"}


def test_names_that_the_model_does_not_have_can_be_given_one(open_review, until):
    viewer, panel, _ = open_review()
    layer = annotate(viewer, some())
    layer.features = {"class": np.where(layer.features["class"] == "RBC", "red cell", "wbc")}
    panel.tabs.setCurrentIndex(3)
    metrics = panel.annotation_tab.metrics
    until(lambda: metrics.matches is not None)
    assert list(metrics.class_mapping.choices) == ["red cell"], "WBC is known in any spelling"
    assert metrics.class_mapping.mapping == {}
    right = len(metrics.matches.true_positives)
    metrics.class_mapping.choices["red cell"].setCurrentText("RBC")
    until(lambda: len(metrics.matches.true_positives) > right)
    assert scores(panel)["RBC"][2] == "100.0 %"


# --- which layer is compared ----------------------------------------------------------------------


def test_the_annotations_of_this_image_are_preselected(open_review, until):
    viewer, panel, _ = open_review()
    source = viewer.layers["smear"]
    other = viewer.add_image(np.zeros((400, 600, 3), np.uint8), name="another image")
    boxes = np.array([[5, 5], [5, 40], [40, 40], [40, 5]])
    plain = viewer.add_shapes([boxes], name="plain")
    theirs = viewer.add_shapes([boxes], metadata=role_metadata(Role.ANNOTATIONS, other), name="a")
    mine = viewer.add_shapes([boxes], metadata=role_metadata(Role.ANNOTATIONS, source), name="m")
    regions = viewer.add_shapes([boxes], metadata=role_metadata(Role.REGIONS, source), name="r")
    saved = viewer.add_shapes([boxes], name="smear · annotated regions")  # opened from a CSV
    panel.tabs.setCurrentIndex(3)
    until(lambda: panel.annotation_tab.metrics.matches is not None)
    metrics = panel.annotation_tab.metrics
    choice = metrics.annotation_choice
    offered = [choice.itemData(k) for k in range(1, choice.count())]
    assert offered == [mine, plain]
    assert metrics.annotation_layer is mine
    choice = metrics.region_choice
    offered = [choice.itemData(k) for k in range(1, choice.count())]
    assert offered == [regions, plain, saved]
    assert metrics.region_layer is regions
    assert theirs in viewer.layers
    metrics.annotation_choice.setCurrentText("none")
    until(lambda: metrics.matches is None)
    viewer.layers.remove(plain)
    until(lambda: metrics.annotation_choice.count() == 2)
    assert metrics.annotation_layer is None, "what the user has chosen stays"


def test_a_long_name_is_readable(open_review, until):
    viewer, panel, _ = open_review()
    name = "02706fbf-6d7d-5dfb-8d60-bdcad7ac1339 of the second slide.txt"
    annotate(viewer, some()).name = name
    panel.tabs.setCurrentIndex(3)
    metrics = panel.annotation_tab.metrics
    until(lambda: metrics.matches is not None)
    choice = metrics.annotation_choice
    assert choice.currentText() == name
    assert choice.full_tooltip().startswith(name)
    shown = choice.elided_text(150)
    assert shown.startswith("02706")
    assert shown.endswith("slide.txt")
    assert "…" in shown
    choice.showPopup()
    assert choice.view().width() >= choice.fontMetrics().horizontalAdvance(name)
    choice.hidePopup()


def test_the_row_of_all_counts_classes_that_the_annotations_do_not_have(open_review, until):
    viewer, panel, _ = open_review()
    found = some()
    annotate(viewer, found[found.labels == 0])
    panel.tabs.setCurrentIndex(3)
    until(lambda: panel.annotation_tab.metrics.matches is not None)
    shown = some().above(0.25)
    right = int((shown.labels == 0).sum())
    table = scores(panel)
    assert table["RBC"][2] == "100.0 %"
    assert table["all"][1] == str(len(shown)) == str(len(panel.rows))
    assert table["all"][2] == f"{100 * right / len(shown):.1f} %", "the white cells are false ones"


def test_a_class_named_for_a_project_is_known_in_that_project(open_review, until, tmp_path):
    from napari_beerlanet.core.project.project import Project

    for expected in ({}, {"red cell": "RBC"}):
        viewer, panel, _ = open_review()
        project = (
            Project.open(tmp_path / "project")
            if expected
            else Project.create(tmp_path / "project", ["red cell", "WBC"])
        )
        get_project_store(viewer).put(project)
        layer = annotate(viewer, some())
        layer.metadata.update(role_metadata(Role.ANNOTATIONS, viewer.layers["smear"]))
        layer.features = {"class": np.where(layer.features["class"] == "RBC", "red cell", "WBC")}
        panel.tabs.setCurrentIndex(3)
        metrics = panel.annotation_tab.metrics
        until(lambda m=metrics: m.matches is not None)
        assert metrics.class_mapping.mapping == expected
        metrics.class_mapping.choices["red cell"].setCurrentText("RBC")
        get_project_store(viewer).put(None)
