"""The review panel in a window: step, decide, undo, filter, and resume tomorrow."""

import threading

import numpy as np
import pytest
from qtpy.QtCore import Qt
from qtpy.QtWidgets import QAbstractScrollArea

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.review.review import (
    ACCEPTED,
    ORDERS,
    REJECTED,
    UNREVIEWED,
    Review,
    load_review,
    save_review,
)
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.review.autosave import reviews_folder
from napari_beerlanet.ui.review.widget import ReviewWidget
from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes
from reviews import NAMES, PICTURE, annotate, detected_image, some

pytestmark = pytest.mark.window


def texts(panel, name):
    column = panel.table.model().names.index(name)
    rows = range(panel.table.model().rowCount())
    return [panel.table.model().index(k, column).data(Qt.ItemDataRole.DisplayRole) for k in rows]


def test_without_detections_it_says_what_to_do(shared_viewer):
    viewer = shared_viewer()
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    assert "Detect cells first" in panel.empty.text()
    for method in (panel.next, panel.back, panel.accept, panel.reject, panel.undo, panel.refresh):
        method()


def test_it_begins_with_the_threshold_of_the_layer(open_review):
    _, panel, _ = open_review()
    assert len(panel.rows) == int((some().scores >= 0.25).sum()) == panel.table.model().rowCount()
    assert panel.progress.format() == f"0 of {len(panel.rows)} reviewed"


def test_the_view_moves_where_a_box_is_out_of_sight_and_only_there(open_review):
    viewer, panel, _ = open_review()
    camera, canvas = viewer.scene.camera, min(viewer.canvas.size)
    camera.zoom, camera.center = 0.1 * canvas / 10, (150, 250)  # a box is 10 units wide
    panel.go_to(0)
    centre = (0.5 * 19.5, 0.5 * 19.5)
    assert camera.center[-2:] == pytest.approx(centre, abs=0.01)
    camera.center = beside = centre[0] + 20, centre[1] - 20  # in sight all the same
    zoom = camera.zoom
    panel.go_to(0)
    assert camera.center[-2:] == pytest.approx(beside)
    assert camera.zoom == zoom
    edge = viewer.canvas.size[0] / camera.zoom / 2  # from the middle, upwards
    camera.center = centre[0] + edge - 2, centre[1]  # the box is cut by it
    panel.go_to(0)
    assert camera.center[-2:] == pytest.approx(centre, abs=0.01)
    camera.center, camera.zoom = beside, 0.01 * canvas / 10  # in sight, and too small to see
    panel.go_to(0)
    assert camera.center[-2:] == pytest.approx(centre, abs=0.01)
    assert camera.zoom > 0.05 * canvas / 10


def test_stepping_selects_the_box(open_review):
    _, panel, detection_layer = open_review()
    panel.next()
    assert panel.current == 0
    assert [detection_layer.rows[k] for k in detection_layer.layer.selected_data] == [0]
    panel.next()
    panel.next()
    assert panel.current == 2
    panel.back()
    assert panel.current == 1
    assert panel.table.selected_rows.tolist() == [1]
    assert "confidence 0.93" in panel.current_line.text()


def test_a_row_that_is_clicked_and_a_box_that_is_selected_mean_the_same(open_review):
    _, panel, detection_layer = open_review()
    panel.table.selectRow(7)
    assert panel.current == 7
    detection_layer.layer.selected_data = {3}
    assert panel.current == int(detection_layer.rows[3])
    assert panel.table.selected_rows.tolist() == [panel.current]


def test_accept_reject_relabel_and_undo_are_in_the_features(open_review):
    _, panel, detection_layer = open_review()
    panel.next()
    panel.accept()
    panel.reject()
    panel.relabel(1)
    table = detection_layer.layer.features.set_index("id")
    assert table["status"][[0, 1, 2]].tolist() == [ACCEPTED, REJECTED, ACCEPTED]
    assert table["class"][2] == "WBC"
    assert panel.current == 3
    assert panel.progress.value() == 3
    panel.undo()
    assert panel.current == 2
    table = detection_layer.layer.features.set_index("id")
    assert table["class"][2] == "RBC"
    assert table["status"][2] == "found"


def test_a_reviewed_layer_counts_as_edited(open_review):
    _, panel, detection_layer = open_review()
    assert not detection_layer.edited
    panel.next()
    panel.accept()
    assert detection_layer.edited


def test_the_canvas_gets_its_keys_back(open_review):
    viewer, panel, detection_layer = open_review()
    assert "X" in {str(key) for key in detection_layer.layer.keymap}
    viewer.window.remove_dock_widget(panel)
    assert "X" not in {str(key) for key, method in detection_layer.layer.keymap.items() if method}


def test_the_current_box_is_framed_and_the_frame_goes_with_the_panel(open_review, until):
    viewer, panel, detection_layer = open_review()
    viewer.layers.selection.active = viewer.layers["smear"]
    panel.go_to(12)
    frame = viewer.layers["smear · current"]
    y, x = np.mean(frame.data[0], axis=0) + 0.5
    assert (x, y) == pytest.approx(some().xyxy[12].reshape(2, 2).mean(axis=0), abs=0.01)
    assert viewer.layers.selection.active is detection_layer.layer
    width = frame.edge_width[0]
    viewer.scene.camera.zoom *= 4
    until(lambda: frame.edge_width[0] == pytest.approx(width / 4, rel=0.01))
    viewer.window.remove_dock_widget(panel)
    assert "smear · current" not in viewer.layers


def test_a_layer_that_the_user_draws_on_stays_the_active_one(open_review):
    viewer, panel, _ = open_review()
    mine = viewer.add_shapes(name="mine")
    mine.mode = "add_rectangle"
    panel.next()
    assert viewer.layers.selection.active is mine


def test_the_gallery_has_the_order_of_the_table(open_review, until):
    _, panel, _ = open_review()
    column = panel.table.model().names.index("Model channel 1 mean")
    panel.table._sort(column)
    panel.tabs.setCurrentIndex(1)
    order = panel.gallery.rows
    assert order.tolist() == panel.table.rows.tolist()
    values = panel.review.column("Model channel 1 mean")[order]
    assert (np.diff(values) >= 0).all() or (np.diff(values) <= 0).all()
    panel.filter.order.setCurrentText("random")
    until(lambda: panel.gallery.rows.tolist() != order.tolist())
    assert panel.gallery.rows.tolist() == panel.rows.tolist()


def test_the_histogram_is_made_with_its_tab_and_filters_the_table(open_review, until):
    _, panel, _ = open_review()
    assert "histogram" not in vars(panel), "a plot takes as long as the rest of the panel"
    panel.filter.confidence.setValue((0.5, 0.9))
    panel.tabs.setCurrentWidget(panel.histogram_tab)
    assert panel.histogram.isVisibleTo(panel)
    assert len(panel.histogram.plot.listDataItems()) == len(NAMES)
    assert panel.histogram.range.getRegion() == pytest.approx((0.5, 0.9), abs=0.01)
    panel.histogram.range.setRegion((0.6, 0.8))
    until(lambda: len(panel.rows) == int(((some().scores >= 0.6) & (some().scores <= 0.8)).sum()))


def test_what_is_filtered_out_disappears_from_canvas_and_table(open_review, until):
    _, panel, detection_layer = open_review()
    panel.filter.classes.setCurrentText("WBC")
    until(lambda: set(texts(panel, "class")) == {"WBC"})
    assert set(detection_layer.layer.features["class"]) == {"WBC"}
    panel.filter.clear()
    until(lambda: panel.table.model().rowCount() == 40)
    assert detection_layer.layer.nshapes == 40
    panel.filter.confidence.setValue((0.5, 0.8))
    until(lambda: 0 < panel.table.model().rowCount() < 40)
    shown = detection_layer.layer.features["confidence"]
    assert shown.min() >= 0.5
    assert shown.max() <= 0.8


def test_the_cell_with_foreign_colours_is_the_farthest_out_of_domain(open_review, until):
    field = blood_smear((320, 400), seed=1)
    image, model = field.image.copy(), load_checkpoint("blood-cells", device="cpu")
    box = np.array([295, 82, 382, 168])  # of a red cell
    part = image[box[1] : box[3], box[0] : box[2]]
    part[:] = part[..., [1, 0, 2]]  # green and red change places
    _, panel, _ = open_review(model.detect(image, object_size=90), image)
    assert panel.rows[0] == 0
    panel.filter.order.setCurrentText("out of domain")
    until(lambda: panel.rows[0] != 0)
    centre = panel.review.column("x")[panel.rows[0]], panel.review.column("y")[panel.rows[0]]
    np.testing.assert_allclose(centre, (box[:2] + box[2:]) / 2, atol=12)
    told = [float(text) for text in texts(panel, "unlike training")]
    assert told == sorted(told, reverse=True)
    assert told[0] > 4


def test_without_training_statistics_the_order_by_domain_shift_is_disabled(open_review):
    _, panel, _ = open_review()
    place = ORDERS.index("out of domain")
    item = panel.filter.order.model().item(place)
    assert not item.isEnabled()
    assert item.toolTip().startswith("Unknown for these boxes: detect again")
    found = some()
    told = Detections(
        found.xyxy, found.labels, found.scores, NAMES, {"unlike training": found.scores}, (400, 600)
    )
    panel.filter.set_review(Review(told))
    assert item.isEnabled()
    assert "training data" in item.toolTip()
    panel.filter.order.setCurrentIndex(place)
    panel.filter.set_review(Review(found))
    assert panel.filter.current_order == "unusual"


def test_with_a_state_chosen_decided_ones_leave(open_review, until):
    _, panel, _ = open_review()
    total = len(panel.rows)
    panel.filter.states.setCurrentText(UNREVIEWED)
    until(lambda: panel.filter.current_filter.states is not None)
    panel.next()
    panel.accept()
    until(lambda: len(panel.rows) == total - 1)


def test_many_in_the_gallery_at_once(open_review, until):
    _, panel, _ = open_review()
    panel.tabs.setCurrentIndex(1)
    panel.gallery.selectAll()
    panel.reject()
    assert (panel.review.column("status")[panel.rows] == REJECTED).all()
    panel.undo()
    assert (panel.review.status == 0).all()


def test_tomorrow_resumes_where_today_stopped(open_review, until):
    viewer, panel, _ = open_review()
    panel.next()
    panel.accept()
    panel.reject()
    viewer.window.remove_dock_widget(panel)
    assert len(list(reviews_folder().glob("*.json"))) == 1
    _, panel, detection_layer = open_review()
    until(lambda: panel.review.progress()[0] == 2)
    assert panel.review.column("status")[:2].tolist() == [ACCEPTED, REJECTED]
    assert detection_layer.layer.features.set_index("id")["status"][1] == REJECTED


def test_decisions_are_saved_within_seconds(open_review, until):
    _, panel, _ = open_review()
    panel.next()
    panel.accept()
    until(lambda: panel.autosave.path.exists())
    assert '"accepted"' in panel.autosave.path.read_text()


def test_a_damaged_file_is_reported_and_the_panel_works(open_review, until, monkeypatch):
    viewer, panel, _ = open_review()
    panel.next()
    panel.accept()
    viewer.window.remove_dock_widget(panel)
    (file,) = reviews_folder().glob("*.json")
    file.write_text("{")
    said = []
    monkeypatch.setattr("napari_beerlanet.ui.common.notifications.show_error", said.append)
    _, panel, _ = open_review()
    until(lambda: bool(said))
    assert "not a JSON file" in said[0]
    panel.next()
    panel.accept()
    until(lambda: len(list(reviews_folder().glob("*.json"))) == 2)
    assert file.read_text() == "{"


def test_the_layer_is_removed_under_the_panel(open_review, until):
    viewer, panel, detection_layer = open_review()
    panel.next()
    viewer.layers.remove(detection_layer.layer)
    until(lambda: panel.target is None)
    panel.next()
    panel.accept()


def test_it_follows_the_image_and_the_image_follows_it(open_review, until):
    viewer, panel, first = open_review()
    smear = viewer.layers["smear"]
    panel.next()
    panel.accept()
    review = panel.review
    panel.bar.set_message("All listed detections are reviewed.")
    other, second = detected_image(viewer, "other", some(16), 255 - PICTURE)
    assert panel.target.detection_layer is second, "what was opened last is the chosen image"
    assert panel.target_choice.currentText() == second.layer.name
    assert panel.bar.text == ""
    until(lambda: panel.autosave.path is not None and len(panel.rows) > 0)
    assert panel.review.progress()[0] == 0
    viewer.layers.selection.active = smear
    assert panel.target.detection_layer is first
    assert panel.review is review, "with what can be undone"
    assert panel.current == 1
    until(lambda: panel.autosave.path is not None)
    assert "earlier session" not in panel.bar.text
    assert len(panel.rows) > 16
    panel.undo()
    assert panel.review.progress()[0] == 0

    panel.target_choice.setCurrentText(second.layer.name)  # as by the mouse
    assert panel.target.detection_layer is second
    assert panel.image.layer is other
    assert viewer.layers.selection.active is other
    get_session(viewer).set_detections(smear, first.detections, first)
    assert panel.target.detection_layer is second, "a search in another image changes nothing"


def test_a_filter_is_of_the_image_under_review(open_review, until):
    viewer, panel, first = open_review()
    every = len(first.rows)
    panel.filter.classes.setCurrentText("WBC")
    until(lambda: len(first.rows) < every)
    _, second = detected_image(viewer, "other", some(16), 255 - PICTURE)
    until(lambda: panel.target.detection_layer is second and len(second.rows) == 3)
    assert len(first.rows) == every, "all boxes of the other image are shown again"
    viewer.layers.selection.active = viewer.layers["smear"]
    until(lambda: len(first.rows) < every)
    viewer.window.remove_dock_widget(panel)
    assert len(first.rows) == every


def test_names_in_the_list_follow_the_image(open_review):
    viewer, panel, first = open_review()
    viewer.layers["smear"].name = "patient 7"
    assert first.layer.name == "patient 7 · detections"
    assert panel.target_choice.currentText() == "patient 7 · detections"
    assert panel.target.detection_layer is first


def test_an_image_without_detections_says_so_and_offers_the_others(open_review, until):
    viewer, panel, first = open_review()
    viewer.add_image(PICTURE, name="new")
    assert panel.target is None
    assert panel.empty.isVisibleTo(panel)
    assert panel.empty.text() == (
        "“new” has no detections: find its cells first, or choose others above."
    )
    assert panel.target_choice.currentText() == ""
    assert panel.target_choice.elided_text(400) == "none of this image"
    assert not panel.decision_buttons.isVisibleTo(panel)
    panel.accept()
    panel.target_choice.setCurrentIndex(0)
    assert panel.target.detection_layer is first
    assert panel.image.layer is viewer.layers["smear"]
    assert not panel.empty.isVisibleTo(panel)
    assert panel.decision_buttons.isVisibleTo(panel)


def test_a_decision_made_before_the_image_was_read_is_saved_after_a_detour(open_review, until):
    viewer, panel, _ = open_review()
    smear = viewer.layers["smear"]
    detected_image(viewer, "other", some(16), 255 - PICTURE)
    until(lambda: panel.autosave.path is not None)
    viewer.layers.selection.active = smear
    assert panel.autosave.path is None
    panel.next()
    panel.accept()
    viewer.layers.selection.active = viewer.layers["other"]
    viewer.layers.selection.active = smear
    until(lambda: panel.autosave.path is not None and panel.autosave.path.exists())
    assert '"accepted"' in panel.autosave.path.read_text()


def test_decisions_on_an_image_that_is_left_are_written_off_the_gui_thread(
    open_review, until, monkeypatch
):
    viewer, panel, _ = open_review()
    written, may_write = {}, threading.Event()

    def save(path, *rest):
        may_write.wait(60)
        written[path] = threading.current_thread()
        return save_review(path, *rest)

    monkeypatch.setattr("napari_beerlanet.ui.review.autosave.save_review", save)
    panel.next()
    panel.accept()
    path = panel.autosave.path
    _, second = detected_image(viewer, "other", some(16), 255 - PICTURE)
    assert panel.target.detection_layer is second
    assert not written, "the window did not wait for it"
    # The same picture again: what is read then is what was decided, not what was on disk before.
    detected_image(viewer, "again", some(), PICTURE)
    assert panel.review.progress()[0] == 0
    may_write.set()
    until(lambda: panel.autosave.path == path and panel.review.progress()[0] == 1)
    assert threading.main_thread() not in written.values()
    # A panel that is closed waits.
    panel.next()
    panel.accept()
    viewer.window.remove_dock_widget(panel)
    assert written[path] is threading.main_thread()
    assert load_review(path, some())[1] == 2


def test_edits_on_the_canvas_outlast_the_session(open_review, until):
    """Boxes that were moved, deleted, relabelled and drawn; beside decisions."""

    def boxes(layer):
        here = layer.read_back()
        names = [here.names[k] for k in here.labels]
        status = here.features["status"].tolist()
        return sorted(zip(here.xyxy.tolist(), names, status, strict=True))

    viewer, panel, detection_layer = open_review()
    panel.next()
    panel.accept()
    before = boxes(detection_layer)
    layer = detection_layer.layer
    shapes = [np.array(shape) for shape in layer.data]
    shapes[1] += 7
    layer.data = shapes
    layer.selected_data = {2}
    layer.remove_selected()
    table = layer.features.copy()
    table.loc[4, "class"] = "a new class"
    layer.features = table
    layer.add_rectangles(corners_from_boxes(np.array([[5, 300, 45, 340]]))[0])
    edited = boxes(detection_layer)
    assert len(edited) == len(before)
    assert len(set(map(str, before)) - set(map(str, edited))) == 3
    until(lambda: panel.autosave.path.exists())
    viewer.window.remove_dock_widget(panel)
    again = ReviewWidget(viewer)
    viewer.window.add_dock_widget(again)
    until(lambda: again.autosave.path is not None and again.review.progress()[0] == 1)
    assert boxes(detection_layer) == edited, "they are there once"
    viewer.window.remove_dock_widget(again)
    _, panel, detection_layer = open_review()
    until(lambda: panel.review.progress()[0] == 1)
    assert boxes(detection_layer) == edited
    assert panel.bar.text == "5 decisions of an earlier session loaded."


@pytest.mark.parametrize("meanwhile", ["the image stays", "another image", "the panel is closed"])
def test_decisions_that_cannot_be_written_are_told_once_and_written_later(
    open_review, until, monkeypatch, meanwhile
):
    """As on a full disk, until there is space again."""
    viewer, panel, _ = open_review()
    said, tried, space = [], [], threading.Event()
    monkeypatch.setattr("napari_beerlanet.ui.common.notifications.show_error", said.append)
    monkeypatch.setattr("napari_beerlanet.ui.review.autosave._RETRY_DELAY_MS", 50)

    def save(path, *rest):
        tried.append(path)
        if not space.is_set():
            raise FileError(f"{path.name}: no space left")
        return save_review(path, *rest)

    monkeypatch.setattr("napari_beerlanet.ui.review.autosave.save_review", save)
    panel.next()
    panel.accept()
    path = panel.autosave.path
    if meanwhile == "another image":
        detected_image(viewer, "other", some(16), 255 - PICTURE)
    elif meanwhile == "the panel is closed":
        viewer.window.remove_dock_widget(panel)
        panel = ReviewWidget(viewer)
        viewer.window.add_dock_widget(panel)
        until(lambda: panel.autosave.path == path)
        assert panel.review.progress()[0] == 1, "they are shown, though not on disk"
    until(lambda: tried.count(path) > 3)
    assert said == [f"{path.name}: no space left Retrying every few seconds."]
    space.set()
    until(lambda: path.exists())
    assert load_review(path, some())[1] == 1


def test_each_plane_of_a_stack_has_its_own_review(shared_viewer, until):
    viewer = shared_viewer()
    stack = viewer.add_image(np.stack([PICTURE, 255 - PICTURE]), name="stack", rgb=True)
    viewer.dims.set_point(0, 0)
    detection_layer = DetectionLayer(
        viewer, stack, some(10), class_colours(2), index=(0,), confidence=0.0
    )
    detection_layer.set_detections(some(25), (1,))
    get_session(viewer).set_detections(stack, some(10), detection_layer)
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    until(lambda: panel.autosave.path is not None and len(panel.rows) == 10)
    panel.next()
    panel.accept()
    viewer.dims.set_point(0, 1)
    until(lambda: len(panel.rows) == 25 and panel.autosave.path is not None)
    assert panel.review.progress()[0] == 0
    panel.next()
    panel.reject()
    viewer.dims.set_point(0, 0)
    until(lambda: len(panel.rows) == 10 and panel.review.progress()[0] == 1)
    assert panel.review.state_of(0) == ACCEPTED


def test_the_confusion_matrix_has_one_scroll_bar_around_it(open_review, until):
    viewer, panel, _ = open_review()
    viewer.window._qt_window.resize(1280, 720)
    viewer.window.show()
    annotate(viewer, some(), drop=(1, 2), move=(4,))
    panel.tabs.setCurrentIndex(3)
    metrics = panel.annotation_tab.metrics
    until(lambda: metrics.matches is not None)
    metrics.section_bar.setCurrentIndex(1)
    around, widget = [], metrics.confusion
    assert widget.verticalScrollBar().maximum() == 0, "all its lines are shown"
    while widget is not panel:
        widget = widget.parentWidget()
        around += [widget] if isinstance(widget, QAbstractScrollArea) else []
    assert len(around) == 1
    until(lambda: metrics.confusion.isVisible())
    around[0].ensureWidgetVisible(metrics.confusion, 0, 0)
    seen = metrics.confusion.visibleRegion().boundingRect()
    assert seen.height() == metrics.confusion.height()
    height = panel.tabs.minimumSizeHint().height()
    panel.tabs.setCurrentIndex(0)
    assert panel.tabs.minimumSizeHint().height() < height, "other tabs stay as low as they can be"
