"""The review panel in a window: step, decide, undo, filter, compare, mend, and go on tomorrow."""

import numpy as np
import pytest
from qtpy.QtCore import Qt

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.checkpoint import load_checkpoint
from napari_beerlanet.core.colours import class_colours
from napari_beerlanet.core.decompose import decompose
from napari_beerlanet.core.reviewing import ACCEPTED, ORDERS, REJECTED, UNREVIEWED, Review
from napari_beerlanet.sample_data import blood_smear
from napari_beerlanet.ui.detection_layer import DetectionLayer
from napari_beerlanet.ui.detection_shapes import corners_of
from napari_beerlanet.ui.review_keeper import folder
from napari_beerlanet.ui.review_widget import ReviewWidget
from napari_beerlanet.ui.session import session

pytestmark = pytest.mark.window

NAMES = ["RBC", "WBC"]
PICTURE = np.random.default_rng(0).integers(0, 255, (400, 600, 3), np.uint8)


def some(n=40):
    """n boxes of 20 × 20 on a grid, the surest first."""
    x, y = 50.0 * (np.arange(n) % 10) + 10, 60.0 * (np.arange(n) // 10) + 10
    boxes = np.stack([x, y, x + 20, y + 20], 1)
    columns = {"OD 1 mean": np.linspace(0, 1, n).astype(np.float32)}
    labels = np.arange(n) % 4 == 3
    scores = np.linspace(0.95, 0.05, n)
    return Detections(boxes, labels.astype(int), scores, NAMES, columns, (400, 600))


@pytest.fixture
def opened(make_napari_viewer, until):
    """Open the panel on detections of one picture; every call is another day."""

    def open_(found=None, picture=PICTURE):
        viewer = make_napari_viewer()
        source = viewer.add_image(picture, name="smear", scale=(0.5, 0.5))
        found = (some() if found is None else found).above(0.25)
        shower = DetectionLayer(viewer, source, found, class_colours(len(found.names)))
        shower.show(0.25)
        session(viewer).put_result(source, found, shower)
        panel = ReviewWidget(viewer)
        viewer.window.add_dock_widget(panel)
        until(lambda: panel.keeper.path is not None and len(panel.rows) > 0)
        return viewer, panel, shower

    return open_


def texts(panel, name):
    column = panel.table.model().names.index(name)
    rows = range(panel.table.model().rowCount())
    return [panel.table.model().index(k, column).data(Qt.ItemDataRole.DisplayRole) for k in rows]


def test_without_detections_it_says_what_to_do(make_napari_viewer):
    viewer = make_napari_viewer()
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    assert "Find cells first" in panel.empty.text()
    for method in (panel.next, panel.back, panel.accept, panel.reject, panel.undo, panel.refresh):
        method()


def test_it_begins_with_the_threshold_of_the_layer(opened):
    _, panel, _ = opened()
    assert len(panel.rows) == int((some().scores >= 0.25).sum()) == panel.table.model().rowCount()
    assert panel.progress.format() == f"0 of {len(panel.rows)} reviewed"


def test_stepping_centres_the_view_and_selects_the_box(opened, until):
    viewer, panel, shower = opened()
    panel.next()
    assert panel.current == 0
    assert viewer.scene.camera.center[-2:] == pytest.approx((0.5 * 19.5, 0.5 * 19.5), abs=0.01)
    assert [shower.rows[k] for k in shower.layer.selected_data] == [0]
    panel.next()
    panel.next()
    assert panel.current == 2
    panel.back()
    assert panel.current == 1
    assert panel.table.selected_rows.tolist() == [1]
    assert "confidence 0.93" in panel.what.text()


def test_a_row_that_is_clicked_and_a_box_that_is_selected_mean_the_same(opened):
    _, panel, shower = opened()
    panel.table.selectRow(7)
    assert panel.current == 7
    shower.layer.selected_data = {3}
    assert panel.current == int(shower.rows[3])
    assert panel.table.selected_rows.tolist() == [panel.current]


def test_accept_reject_relabel_and_undo_are_in_the_features(opened):
    _, panel, shower = opened()
    panel.next()
    panel.accept()
    panel.reject()
    panel.relabel(1)
    table = shower.layer.features.set_index("id")
    assert table["status"][[0, 1, 2]].tolist() == [ACCEPTED, REJECTED, ACCEPTED]
    assert table["class"][2] == "WBC"
    assert panel.current == 3
    assert panel.progress.value() == 3
    panel.undo()
    assert panel.current == 2
    table = shower.layer.features.set_index("id")
    assert table["class"][2] == "RBC"
    assert table["status"][2] == "found"


def test_a_reviewed_layer_counts_as_edited(opened):
    _, panel, shower = opened()
    assert not shower.edited
    panel.next()
    panel.accept()
    assert shower.edited


def test_the_canvas_gets_its_keys_back(opened):
    viewer, panel, shower = opened()
    assert "X" in {str(key) for key in shower.layer.keymap}
    viewer.window.remove_dock_widget(panel)
    assert "X" not in {str(key) for key, method in shower.layer.keymap.items() if method}


def test_the_current_box_is_framed_and_the_frame_goes_with_the_panel(opened, until):
    viewer, panel, shower = opened()
    viewer.layers.selection.active = viewer.layers["smear"]
    panel.go_to(12)
    frame = viewer.layers["smear · current"]
    y, x = np.mean(frame.data[0], axis=0) + 0.5
    assert (x, y) == pytest.approx(some().xyxy[12].reshape(2, 2).mean(axis=0), abs=0.01)
    assert viewer.layers.selection.active is shower.layer
    width = frame.edge_width[0]
    viewer.scene.camera.zoom *= 4
    until(lambda: frame.edge_width[0] == pytest.approx(width / 4, rel=0.01))
    viewer.window.remove_dock_widget(panel)
    assert "smear · current" not in viewer.layers


def test_a_layer_that_the_user_draws_on_stays_the_active_one(opened):
    viewer, panel, _ = opened()
    mine = viewer.add_shapes(name="mine")
    mine.mode = "add_rectangle"
    panel.next()
    assert viewer.layers.selection.active is mine


def test_the_gallery_has_the_order_of_the_table(opened, until):
    _, panel, _ = opened()
    column = panel.table.model().names.index("OD 1 mean")
    panel.table._sort(column)
    panel.tabs.setCurrentIndex(1)
    order = panel.gallery.rows
    assert order.tolist() == panel.table.rows.tolist()
    values = panel.review.column("OD 1 mean")[order]
    assert (np.diff(values) >= 0).all() or (np.diff(values) <= 0).all()
    panel.filter.order.setCurrentText("shuffled")
    until(lambda: panel.gallery.rows.tolist() != order.tolist())
    assert panel.gallery.rows.tolist() == panel.rows.tolist()


def test_what_is_filtered_out_disappears_from_canvas_and_table(opened, until):
    _, panel, shower = opened()
    panel.filter.classes.setCurrentText("WBC")
    until(lambda: set(texts(panel, "class")) == {"WBC"})
    assert set(shower.layer.features["class"]) == {"WBC"}
    panel.filter.clear()
    until(lambda: panel.table.model().rowCount() == 40)
    assert shower.layer.nshapes == 40
    panel.filter.confidence.setValue((0.5, 0.8))
    until(lambda: 0 < panel.table.model().rowCount() < 40)
    shown = shower.layer.features["confidence"]
    assert shown.min() >= 0.5
    assert shown.max() <= 0.8


def test_the_cell_with_foreign_colours_is_the_least_like_the_training(opened, until):
    field = blood_smear((320, 400), seed=1)
    image, model = field.image.copy(), load_checkpoint("blood-cells", device="cpu")
    box = np.array([295, 82, 382, 168])  # of a red cell
    part = image[box[1] : box[3], box[0] : box[2]]
    part[:] = part[..., [1, 0, 2]]  # green and red change places
    _, panel, _ = opened(model.detect(image, object_size=90), image)
    assert panel.rows[0] == 0
    panel.filter.order.setCurrentText("unlike training")
    until(lambda: panel.rows[0] != 0)
    centre = panel.review.column("x")[panel.rows[0]], panel.review.column("y")[panel.rows[0]]
    np.testing.assert_allclose(centre, (box[:2] + box[2:]) / 2, atol=12)
    told = [float(text) for text in texts(panel, "unlike training")]
    assert told == sorted(told, reverse=True)
    assert told[0] > 4


def test_without_the_trainings_densities_their_order_is_not_offered(opened):
    _, panel, _ = opened()
    place = ORDERS.index("unlike training")
    item = panel.filter.order.model().item(place)
    assert not item.isEnabled()
    assert item.toolTip().startswith("Not known for these boxes: find cells again")
    found = some()
    told = Detections(
        found.xyxy, found.labels, found.scores, NAMES, {"unlike training": found.scores}, (400, 600)
    )
    panel.filter.use(Review(told))
    assert item.isEnabled()
    assert "in training" in item.toolTip()
    panel.filter.order.setCurrentIndex(place)
    panel.filter.use(Review(found))
    assert panel.filter.chosen_order == "unusual"


def test_with_a_state_chosen_decided_ones_leave(opened, until):
    _, panel, _ = opened()
    total = len(panel.rows)
    panel.filter.states.setCurrentText(UNREVIEWED)
    until(lambda: panel.filter.chosen.states is not None)
    panel.next()
    panel.accept()
    until(lambda: len(panel.rows) == total - 1)


def test_many_in_the_gallery_at_once(opened, until):
    _, panel, _ = opened()
    panel.tabs.setCurrentIndex(1)
    panel.gallery.selectAll()
    panel.reject()
    assert (panel.review.column("status")[panel.rows] == REJECTED).all()
    panel.undo()
    assert (panel.review.status == 0).all()


def test_tomorrow_goes_on_where_today_stopped(opened, until):
    viewer, panel, _ = opened()
    panel.next()
    panel.accept()
    panel.reject()
    viewer.window.remove_dock_widget(panel)
    assert len(list(folder().glob("*.json"))) == 1
    _, panel, shower = opened()
    until(lambda: panel.review.progress()[0] == 2)
    assert panel.review.column("status")[:2].tolist() == [ACCEPTED, REJECTED]
    assert shower.layer.features.set_index("id")["status"][1] == REJECTED


def test_decisions_are_saved_within_seconds(opened, until):
    _, panel, _ = opened()
    panel.next()
    panel.accept()
    until(lambda: panel.keeper.path.exists())
    assert '"accepted"' in panel.keeper.path.read_text()


def test_a_damaged_file_is_told_and_the_panel_works(opened, until, monkeypatch):
    viewer, panel, _ = opened()
    panel.next()
    panel.accept()
    viewer.window.remove_dock_widget(panel)
    (file,) = folder().glob("*.json")
    file.write_text("{")
    said = []
    monkeypatch.setattr("napari_beerlanet.ui.notices.show_error", said.append)
    _, panel, _ = opened()
    until(lambda: bool(said))
    assert "not a JSON file" in said[0]
    panel.next()
    panel.accept()
    until(lambda: len(list(folder().glob("*.json"))) == 2)
    assert file.read_text() == "{"


def test_the_layer_is_removed_under_the_panel(opened, until):
    viewer, panel, shower = opened()
    panel.next()
    viewer.layers.remove(shower.layer)
    until(lambda: panel.target is None)
    panel.next()
    panel.accept()


def test_each_plane_of_a_stack_has_its_own_review(make_napari_viewer, until):
    viewer = make_napari_viewer()
    stack = viewer.add_image(np.stack([PICTURE, 255 - PICTURE]), name="stack", rgb=True)
    viewer.dims.set_point(0, 0)
    shower = DetectionLayer(viewer, stack, some(10), class_colours(2), index=(0,), confidence=0.0)
    shower.put(some(25), (1,))
    session(viewer).put_result(stack, some(10), shower)
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    until(lambda: panel.keeper.path is not None and len(panel.rows) == 10)
    panel.next()
    panel.accept()
    viewer.dims.set_point(0, 1)
    until(lambda: len(panel.rows) == 25 and panel.keeper.path is not None)
    assert panel.review.progress()[0] == 0
    panel.next()
    panel.reject()
    viewer.dims.set_point(0, 0)
    until(lambda: len(panel.rows) == 10 and panel.review.progress()[0] == 1)
    assert panel.review.state_of(0) == ACCEPTED


# --- against annotations -------------------------------------------------------------------------


def annotated(viewer, found, drop=(), move=()):
    """The found boxes as drawn truth, some left out, some of another class."""
    keep = [k for k in range(len(found)) if k not in drop]
    names = ["WBC" if k in move else NAMES[found.labels[k]] for k in keep]
    return viewer.add_shapes(
        list(corners_of(found.xyxy[keep])),
        shape_type="rectangle",
        name="truth",
        scale=(0.5, 0.5),
        features={"class": np.array(names, dtype=object)},
    )


@pytest.fixture
def compared(opened, until):
    viewer, panel, shower = opened()
    truth = annotated(viewer, some(), drop=(1, 2), move=(4,))
    panel.tabs.setCurrentIndex(3)
    panel.against.panel.truth.setCurrentText("truth")
    until(lambda: panel.against.panel.verdict is not None)
    return viewer, panel, shower, truth


def drawn(viewer, kind):
    """How many boxes of a kind the canvas shows."""
    layer = viewer.layers["smear · compared"]
    return int((layer.features["kind"] == kind).sum()) if len(layer.data) else 0


def test_true_false_missed_and_wrong_are_counted_and_drawn(compared, until):
    viewer, panel, shower, _ = compared
    verdict = panel.against.panel.verdict
    shown = int((some().scores >= 0.25).sum())
    assert len(verdict.false) == 2
    assert len(verdict.wrong) == 1
    assert len(verdict.true) == shown - 3
    assert len(verdict.missed) == 40 - shown
    until(lambda: drawn(viewer, "false") == 2)
    assert drawn(viewer, "true") == shown - 3
    assert drawn(viewer, "missed") == 40 - shown
    assert drawn(viewer, "wrong class") == 1
    assert not shower.layer.visible
    panel.against.panel.kinds["false"].setChecked(False)
    assert drawn(viewer, "false") == 0
    assert drawn(viewer, "true") == shown - 3
    panel.tabs.setCurrentIndex(0)
    assert "smear · compared" not in viewer.layers
    assert shower.layer.visible


def test_the_numbers_follow_the_confidence(compared, until):
    _, panel, shower, _ = compared
    before = len(panel.against.panel.verdict.missed)
    panel.filter.confidence.setValue((0.8, 1.0))
    until(lambda: len(panel.against.panel.verdict.missed) > before)
    panel.tabs.setCurrentIndex(0)
    assert shower.layer.features["confidence"].min() >= 0.8
    panel.tabs.setCurrentIndex(3)
    until(lambda: panel.against.on_canvas)
    assert panel.against.panel.scores.item(0, 2).text() == str(len(panel.rows))


def test_the_best_threshold_is_offered_and_taken(compared, until):
    _, panel, _, _ = compared
    best = panel.against.quality.best_threshold()
    panel.against.panel.use_best.click()
    until(lambda: panel.filter.confidence.value()[0] == pytest.approx(best, abs=0.01))


def test_a_cell_of_the_matrix_shows_its_boxes(compared):
    _, panel, _, _ = compared
    matrix = panel.against.panel
    nothing = matrix._used.index(len(matrix.verdict.names))
    matrix.confusion.cellClicked.emit(0, nothing)
    assert sorted(panel.rows.tolist()) == [1, 2]


@pytest.mark.parametrize("kind", ["not annotated", "another class"])
def test_an_annotation_is_mended_with_one_key(compared, until, kind):
    _, panel, _, truth = compared
    against = panel.against
    place = [s.kind for s in against.panel._suspects].index(kind)
    suspect = against.panel._suspects[place]
    count = truth.nshapes
    against.panel.suspects.setCurrentRow(place)
    assert panel.current == suspect.found
    panel.keys["F"]()
    if kind == "not annotated":
        assert truth.nshapes == count + 1
        until(lambda: len(against.panel.verdict.false) == 1)
    else:
        assert truth.nshapes == count
        until(lambda: len(against.panel.verdict.wrong) == 0)
    until(lambda: not against.task.running)
    assert against.panel.suspects.currentRow() == min(place, len(against.panel._suspects) - 1)


def test_nothing_is_mended_that_may_be_another_shape_by_now(compared):
    _, panel, _, truth = compared
    panel.against.panel.suspects.setCurrentRow(0)
    truth.selected_data = {0}
    truth.remove_selected()
    count = truth.nshapes
    panel.keys["F"]()
    assert truth.nshapes == count


def test_a_cell_of_missed_ones_selects_the_annotations(compared):
    viewer, panel, _, truth = compared
    matrix = panel.against.panel
    nothing = matrix._used.index(len(matrix.verdict.names))
    matrix.confusion.cellClicked.emit(nothing, 0)
    missed = matrix.verdict.missed[matrix.verdict.true_labels[matrix.verdict.missed] == 0]
    assert len(missed) > 3
    assert truth.selected_data == set(panel.against.truth.places[missed].tolist())
    assert viewer.layers.selection.active is truth


def test_annotations_that_come_and_go_are_noticed(compared, until):
    viewer, panel, shower, truth = compared
    other = viewer.add_shapes([np.array([[0, 0], [9, 9]])], shape_type="rectangle", name="other")
    until(lambda: panel.against.panel.truth.findText("other") > 0)
    viewer.layers.remove(truth)
    until(lambda: panel.against.panel.verdict is None)
    assert shower.layer.visible
    panel.against.panel.truth.setCurrentText("other")
    until(lambda: panel.against.panel.verdict is not None)
    assert len(panel.against.panel.verdict.missed) == 1
    assert other in viewer.layers


def test_of_thousands_those_in_view_are_drawn(compared, until, monkeypatch):
    viewer, panel, _, _ = compared
    monkeypatch.setattr("napari_beerlanet.ui.quality_layer.most", lambda: 12)
    viewer.scene.camera.zoom = 20
    panel.target.look_at_box(some().xyxy[25])
    layer = viewer.layers["smear · compared"]
    until(lambda: 0 < layer.nshapes < 12)
    centre = layer.data[0].mean(axis=0)
    assert np.abs(centre - some().xyxy[25, [1, 0]]).max() < 100


def test_annotations_that_change_are_compared_again(compared, until):
    _, panel, _, truth = compared
    missed = len(panel.against.panel.verdict.missed)
    truth.selected_data = {truth.nshapes - 1}
    truth.remove_selected()
    until(lambda: len(panel.against.panel.verdict.missed) == missed - 1)


# --- out -----------------------------------------------------------------------------------------


def test_a_report_is_written_with_review_and_annotations(compared, until, tmp_path):
    _, panel, _, _ = compared
    panel.next()
    panel.accept()
    panel.reject()
    path = tmp_path / "a report.html"
    panel.out.write(path)
    until(lambda: path.exists() and not panel.out.task.running)
    text = path.read_text()
    assert "smear" in text
    assert "Against annotations" in text
    assert f"2 of {len(panel.rows)} reviewed." in text
    assert "Rejected by the reviewer (1)" in text
    assert str(path) in panel.out.bar.text


def test_a_report_shows_the_stains_that_were_taken_apart_already(
    opened, until, tmp_path, monkeypatch
):
    viewer, panel, _ = opened()
    stains = decompose(PICTURE, components=2, iterations=5, lam=1e-3, gamma=0.1)
    session(viewer).decompositions[viewer.layers["smear"]] = stains
    monkeypatch.setattr("napari_beerlanet.ui.review_out.decompose", None)
    path = tmp_path / "report.html"
    panel.out.write(path)
    until(lambda: path.exists() and not panel.out.task.running)
    assert "<h2>Stains</h2>" in path.read_text()


def test_nothing_accepted_is_told(opened, monkeypatch):
    _, panel, _ = opened()
    said = []
    monkeypatch.setattr("napari_beerlanet.ui.notices.show_error", said.append)
    panel.out.send_accepted()
    assert said == ["Nothing is accepted yet: accept boxes first (Y)."]


def test_accepted_boxes_go_to_the_annotations(opened, until):
    viewer, panel, _ = opened()
    panel.next()
    panel.accept()
    panel.relabel(1)
    panel.reject()
    panel.out.send_accepted()
    until(lambda: any(layer.name.endswith("annotations") for layer in viewer.layers))
    layer = next(layer for layer in viewer.layers if layer.name.endswith("annotations"))
    until(lambda: layer.nshapes == 2)
    assert layer.features["class"].tolist() == ["RBC", "WBC"]
    assert set(layer.features["status"]) == {"confirmed"}


def test_boxes_corrected_on_the_canvas_are_sent_as_they_are_now(opened, until):
    viewer, panel, shower = opened()
    panel.next()
    panel.accept()  # the first; the second is moved, one is drawn, the third is rejected
    panel.go_to(2)
    panel.reject()
    shapes = [np.array(shape) for shape in shower.layer.data]
    shapes[1] += 7
    shapes[2] += 3
    shower.layer.data = shapes
    shower.layer.add_rectangles(corners_of(np.array([[5, 300, 45, 340]]))[0])
    kept = panel.target.to_learn_from(panel.review)
    assert sorted(kept.xyxy[:, 0].tolist()) == [5, 10, 67]
    panel.out.send_accepted()
    until(lambda: any(layer.name.endswith("annotations") for layer in viewer.layers))
    layer = next(layer for layer in viewer.layers if layer.name.endswith("annotations"))
    until(lambda: layer.nshapes == 3)


def test_two_runs_are_compared(opened, until):
    viewer, panel, shower = opened()
    source = viewer.layers["smear"]
    other = some()
    keep = np.r_[0:5, 8:40]
    second = Detections(
        other.xyxy[keep], other.labels[keep], other.scores[keep], NAMES, report={"model": "other"}
    ).above(0.25)
    shower.put(second)
    session(viewer).put_result(source, second, shower)
    until(lambda: panel.before.before.count() == 2)
    panel.before.before.setCurrentIndex(1)
    panel.before.before.activated.emit(1)
    until(lambda: "3 lost" in panel.before.line.text())
    layer = viewer.layers["smear · before and after"]
    assert layer.nshapes == 3
    panel.filter.confidence.setValue((0.9, 1.0))
    until(lambda: "0 lost" in panel.before.line.text() or "Nothing" in panel.before.line.text())
    panel.filter.confidence.setValue((0.25, 1.0))
    until(lambda: "3 lost" in panel.before.line.text())
    layer = viewer.layers["smear · before and after"]
    panel.before.kinds["lost"].setChecked(False)
    assert layer.nshapes == 0
    panel.before.before.setCurrentIndex(0)
    panel.before.before.activated.emit(0)
    assert "smear · before and after" not in viewer.layers
    assert shower.layer.visible
