"""The Annotate panel in a real window: layers, keys, copies, regions, the project."""

import threading

import numpy as np
import pytest
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.locking import LockedError
from napari_beerlanet.core.formats import write_detections
from napari_beerlanet.core.project.files import ProjectError
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.annotate.store import annotation_store
from napari_beerlanet.ui.annotate.widget import AnnotateWidget
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer.layers import Role, role_metadata
from napari_beerlanet.ui.viewer.viewport import viewport_of

pytestmark = pytest.mark.window

BOX = np.array([[9.5, 19.5], [9.5, 39.5], [29.5, 39.5], [29.5, 19.5]])  # x 20 to 40, y 10 to 30


def docked(viewer) -> AnnotateWidget:
    """A panel where napari puts one."""
    made = AnnotateWidget(viewer)
    viewer.window.add_dock_widget(made, name="Annotate")
    return made


@pytest.fixture
def panel(shared_viewer, smear):
    """The panel of a viewer with a smear, docked, two classes typed in."""
    viewer = shared_viewer()
    viewer.add_image(smear, name="smear")
    made = docked(viewer)
    made.store.classes.add(["RBC", "WBC"])
    return made


@pytest.fixture
def drawing(panel, until):
    """The panel after a click on Annotate."""
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    return panel


def boxes(panel):
    return panel.annotation_actions.annotated.boxes


def column(panel, name):
    return boxes(panel).layer.features[name].tolist()


def canvas(panel):
    return panel.viewer.window._qt_viewer.canvas.native


def key(panel, code, modifier=Qt.KeyboardModifier.NoModifier):
    QTest.keyClick(canvas(panel), code, modifier)


def show_detections(panel):
    xyxy = np.array([[10, 10, 50, 50], [100, 20, 150, 70], [30, 120, 90, 170]], np.float32)
    found = Detections(xyxy, np.array([0, 1, 0]), np.array([0.9, 0.6, 0.3]), ["RBC", "WBC"])
    image = panel.annotation_actions.image
    detection_layer = DetectionLayer(panel.viewer, image, found)
    get_session(panel.viewer).detection_layers[image] = detection_layer
    return detection_layer


# --- layers ---


def test_annotate_makes_a_layer_to_draw_on_in_the_image_s_place(panel, until):
    panel.annotation_actions.image.scale, panel.annotation_actions.image.translate = (
        (0.5, 0.25),
        (3, 4),
    )
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    layer = boxes(panel).layer
    assert layer.mode == "add_rectangle"
    assert panel.viewer.layers.selection.active is layer
    assert np.allclose(layer.scale, (0.5, 0.25))
    assert np.allclose(layer.translate, (3, 4))


def test_a_small_image_counts_as_annotated_wholly(drawing, smear):
    regions = drawing.annotation_actions.annotated.annotations(()).regions
    assert [r.bounds for r in regions] == [(0, 0, smear.shape[1], smear.shape[0])]
    assert not drawing.question.isVisible()


def test_without_classes_a_name_is_asked_for(shared_viewer, smear):
    viewer = shared_viewer()
    viewer.add_image(smear)
    panel = docked(viewer)
    panel.annotate.click()
    assert "no classes" in panel.message.text()
    panel.classes.entry.setText("RBC, WBC")
    panel.classes.add_typed()
    assert panel.store.classes.names == ["RBC", "WBC"]


def test_without_an_image_the_sample_is_offered(shared_viewer):
    panel = docked(shared_viewer())
    assert not panel.image_section.isEnabled()
    panel.annotation_actions.start()
    assert "no image" in panel.message.text()


# --- keys ---


def test_number_keys_set_the_class_of_new_and_of_selected_boxes(drawing):
    layer = boxes(drawing).layer
    layer.add(BOX)
    key(drawing, Qt.Key.Key_2)
    layer.add(BOX + 40)
    assert column(drawing, "class") == ["RBC", "WBC"]
    layer.selected_data = {0}
    key(drawing, Qt.Key.Key_2)
    assert column(drawing, "class") == ["WBC", "WBC"]
    key(drawing, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert column(drawing, "class") == ["RBC", "WBC"]


def test_a_number_without_a_class_changes_nothing(drawing):
    boxes(drawing).layer.add(BOX)
    boxes(drawing).layer.selected_data = {0}
    key(drawing, Qt.Key.Key_7)
    assert column(drawing, "class") == ["RBC"]
    assert boxes(drawing).layer.mode == "add_rectangle"


def test_tab_steps_through_the_boxes_and_centres_those_out_of_view(drawing):
    layer = boxes(drawing).layer
    layer.add([BOX + 100, BOX, BOX + np.array([0, 60])])
    visited = []
    drawing.viewer.reset_view()
    whole = drawing.viewer.scene.camera.center
    key(drawing, Qt.Key.Key_Tab)
    assert set(layer.selected_data) == {1}
    assert drawing.viewer.scene.camera.center == whole, "it is in view, so nothing moves"
    layer.selected_data = set()
    drawing.viewer.scene.camera.zoom = min(drawing.viewer.canvas.size) / 25
    for _ in range(4):
        key(drawing, Qt.Key.Key_Tab)
        visited.append(next(iter(layer.selected_data)))
        centre = layer.data[visited[-1]].mean(axis=0)
        assert np.allclose(drawing.viewer.scene.camera.center[-2:], centre, atol=0.6)
    assert visited == [1, 2, 0, 1]
    key(drawing, Qt.Key.Key_Backtab, Qt.KeyboardModifier.ShiftModifier)
    assert set(layer.selected_data) == {0}


def test_delete_removes_the_selected_and_undo_brings_them_back(drawing):
    layer = boxes(drawing).layer
    layer.add([BOX, BOX + 40])
    layer.selected_data = {0}
    key(drawing, Qt.Key.Key_Delete)
    assert len(layer.data) == 1
    key(drawing, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert len(layer.data) == 2


def test_letters_keep_napari_s_meaning(drawing):
    layer = boxes(drawing).layer
    for letter, mode in (
        (Qt.Key.Key_S, "select"),
        (Qt.Key.Key_E, "add_ellipse"),
        (Qt.Key.Key_P, "add_polygon"),
        (Qt.Key.Key_R, "add_rectangle"),
    ):
        key(drawing, letter)
        assert layer.mode == mode


def test_tab_is_qt_s_own_while_another_layer_is_active(drawing):
    boxes(drawing).layer.add(BOX)
    drawing.viewer.layers.selection.active = drawing.annotation_actions.image
    key(drawing, Qt.Key.Key_Tab)
    assert not boxes(drawing).layer.selected_data


def test_a_box_drawn_with_the_mouse_has_class_and_colour(drawing, qtbot):
    viewer, native = drawing.viewer, canvas(drawing)
    viewer.window._qt_window.show()
    drawing.store.classes.choose(1)
    start, end = native.rect().center(), native.rect().center()
    end.setX(end.x() + 60)
    end.setY(end.y() + 40)
    QTest.mousePress(native, Qt.MouseButton.LeftButton, pos=start)
    QTest.mouseMove(native, end)
    QTest.mouseRelease(native, Qt.MouseButton.LeftButton, pos=end)
    layer = boxes(drawing).layer
    assert len(layer.data) == 1
    assert column(drawing, "class") == ["WBC"]
    assert np.allclose(layer.edge_color, drawing.store.classes.rgba(["WBC"]))
    assert not layer.selected_data  # the next number is for the next box


def test_a_click_while_drawing_makes_no_box(drawing):
    native = canvas(drawing)
    drawing.viewer.window._qt_window.show()
    layer, middle = boxes(drawing).layer, native.rect().center()
    layer.add(BOX)
    for zoom in (0.5, 6.0):
        drawing.viewer.scene.camera.zoom = zoom
        layer.mode = "add_rectangle"
        QTest.mousePress(native, Qt.MouseButton.LeftButton, pos=middle)
        QTest.mouseRelease(native, Qt.MouseButton.LeftButton, pos=middle)
        assert len(layer.data) == 1, f"at zoom {zoom}"
    assert len(layer.features) == len(boxes(drawing).all()) == 1
    key(drawing, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert not len(layer.data), "undo takes back the box, not the click"


def test_edges_stay_thin_at_any_zoom(drawing, until):
    layer = boxes(drawing).layer
    layer.add([BOX, BOX + 40])
    layer.add([BOX + 70], shape_type="ellipse")
    camera = drawing.viewer.scene.camera
    for zoom in (0.5, 8.0):
        camera.zoom = zoom
        until(lambda zoom=zoom: np.allclose(layer.edge_width, 1.8 / zoom, rtol=0.05))
    layer.add(BOX + 90)
    assert np.allclose(layer.edge_width, 1.8 / 8, rtol=0.05)
    assert len(boxes(drawing).all()) == 4


def test_a_turned_and_scaled_image_has_its_boxes_in_its_own_pixels(panel, until):
    image = panel.annotation_actions.image
    image.scale, image.rotate, image.translate = (0.5, 0.25), 30, (7, -3)
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    layer = boxes(panel).layer
    corners = [layer.world_to_data(image.data_to_world(corner)) for corner in BOX]
    layer.add(np.array(corners))
    assert np.allclose(boxes(panel).all().xyxy, [[20, 10, 40, 30]], atol=1e-3)
    panel.viewer.scene.camera.center = (900, 900)
    key(panel, Qt.Key.Key_Tab)
    wanted = image.data_to_world(BOX.mean(axis=0))
    assert np.allclose(panel.viewer.scene.camera.center[-2:], wanted, atol=1e-2)


# --- detections ---


def test_detections_are_copied_with_the_user_s_changes(drawing):
    detection_layer = show_detections(drawing)
    detection_layer.set_filter(0.25)
    detection_layer.layer.remove([1])
    drawing.copy.click()
    assert sorted(map(tuple, boxes(drawing).all().xyxy.tolist())) == [
        (10, 10, 50, 50),
        (30, 120, 90, 170),
    ]
    assert set(column(drawing, "status")) == {"copied"}
    assert boxes(drawing).layer.mode == "select", "they are there to be corrected"


def test_boxes_are_copied_and_imported_without_pressing_annotate_first(panel, until, tmp_path):
    show_detections(panel).set_filter(0.0)
    assert panel.annotation_actions.annotated is None
    panel.copy.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert set(column(panel, "status")) == {"copied"}
    assert len(boxes(panel).all()) == 3
    assert boxes(panel).layer.mode == "select"
    other = panel.viewer.add_image(panel.annotation_actions.image.data[::-1].copy(), name="other")
    panel.image.choose(other)
    panel.copy.click()
    assert "no detections" in panel.message.text()
    assert panel.annotation_actions.annotated is None, "there is nothing to copy"
    file = tmp_path / "other.txt"
    file.write_text("1 0.5 0.5 0.25 0.25\n")
    panel.annotation_actions.import_boxes(str(file))
    until(lambda: panel.annotation_actions.annotated is not None)
    until(lambda: column(panel, "class") == ["WBC"])
    assert panel.store.of(other).boxes is boxes(panel)


@pytest.mark.parametrize("what", ["copied", "imported"])
def test_boxes_go_to_the_plane_that_was_shown_when_they_were_asked_for(
    shared_viewer, smear, until, tmp_path, what
):
    """Not to that which is shown when the image's saved annotations have been looked up."""
    viewer = shared_viewer()
    image = viewer.add_image(np.stack([smear, 255 - smear]), name="stack")
    viewer.dims.set_point(0, 0)
    panel = docked(viewer)
    panel.store.classes.add(["RBC", "WBC"])
    found = Detections(np.float32([[10, 10, 50, 50]]), np.array([0]), np.ones(1), ["RBC"])
    if what == "copied":
        detection_layer = DetectionLayer(viewer, image, found, index=(0,))
        get_session(viewer).detection_layers[image] = detection_layer
        panel.copy.click()
    else:
        write_detections(tmp_path / "one.csv", found)
        panel.annotation_actions.import_boxes(str(tmp_path / "one.csv"))
    viewer.dims.set_point(0, 1)
    until(lambda: "added" in panel.message.text() or "no detections" in panel.message.text())
    assert boxes(panel).planes() == [(0,)]


def test_boxes_of_a_plain_layer_of_detections_are_copied_too(drawing):
    image = drawing.annotation_actions.image
    drawing.viewer.add_shapes(
        [BOX, BOX + 60],
        name="boxes of a file",
        features={"class": ["WBC", "bead"], "confidence": [0.9, np.nan]},
        metadata=role_metadata(Role.DETECTIONS, image),
    )
    drawing.copy.click()
    assert sorted(column(drawing, "class")) == ["WBC", "bead"]
    assert "New classes: bead" in drawing.message.text()
    assert not drawing.viewer.layers["boxes of a file"].visible


def test_only_sure_detections_are_copied_when_asked_for(drawing):
    show_detections(drawing).set_filter(0.0)
    drawing.confidence.setValue(0.5)
    drawing.copy.click()
    assert len(boxes(drawing).all()) == 2


def test_what_is_annotated_already_is_not_copied_again(drawing):
    show_detections(drawing).set_filter(0.0)
    drawing.copy.click()
    drawing.copy.click()
    assert len(boxes(drawing).all()) == 3
    assert "3 were already annotated" in drawing.message.text()


def test_without_detections_a_sentence_says_so(drawing):
    drawing.copy.click()
    assert "no detections" in drawing.message.text()


# --- regions ---


def test_of_a_large_image_it_is_asked_what_is_annotated(shared_viewer, until):
    viewer = shared_viewer()
    viewer.add_image(np.full((2100, 2100, 3), 200, np.uint8), name="slide")
    panel = docked(viewer)
    panel.store.classes.add(["RBC"])
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    made = panel.annotation_actions.annotated
    assert not panel.question.isHidden()
    assert made.annotations(()).regions == ()
    made.boxes.layer.add(BOX)
    assert made.annotations(()).regions == ()
    assert made.regions.layer not in viewer.layers
    panel.annotation_actions.draw_regions()
    assert viewer.layers.selection.active is made.regions.layer
    made.regions.layer.add(BOX * 10)
    assert len(made.annotations(()).regions) == 1
    panel.annotation_actions.mark_whole_image()
    assert [r.bounds for r in made.annotations(()).regions] == [(0, 0, 2100, 2100)]


def test_disabled_buttons_say_why_beside_them(panel, until):
    assert not panel.whole_image.isEnabled()
    assert not panel.draw_regions.isEnabled()
    assert "Press “Annotate” first." in panel.coverage.text()
    assert not panel.import_dataset.isEnabled()
    assert panel.import_reason.isVisibleTo(panel)
    assert "project" in panel.import_reason.text()
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert panel.whole_image.isEnabled()
    assert "Press" not in panel.coverage.text()


def test_an_image_that_is_annotated_wholly_has_one_layer_of_ours(drawing, until):
    """The layer of regions comes when the user draws one: below the boxes, where the image is."""
    viewer, made = drawing.viewer, drawing.annotation_actions.annotated
    boxes(drawing).layer.add(BOX)
    drawing.whole_image.click()
    assert [layer.name for layer in viewer.layers] == ["smear", "smear · annotations"]
    assert [region.bounds for region in made.annotations(()).regions] == [(0, 0, *made.shape[::-1])]
    assert drawing.coverage.text() == "The whole image counts as annotated."
    viewer.layers["smear"].scale = (0.5, 0.5)
    viewer.layers["smear"].name = "patient 7"
    drawing.draw_regions.click()
    names = ["patient 7", "patient 7 · annotated regions", "patient 7 · annotations"]
    assert [layer.name for layer in viewer.layers] == names
    assert viewer.layers.selection.active is made.regions.layer
    assert made.regions.layer.mode == "add_rectangle"
    assert tuple(made.regions.layer.scale) == (0.5, 0.5)
    assert drawing.coverage.text() == "No region is marked as annotated yet."
    made.regions.layer.add(BOX)
    assert drawing.coverage.text() == "1 region is annotated."
    pixel = viewport_of(made.regions.layer, viewer).pixel_size
    until(lambda: made.regions.layer.edge_width[0] == pytest.approx(1.8 * pixel, rel=0.03))


def test_regions_that_are_deleted_are_asked_for_again(drawing, until):
    made = drawing.annotation_actions.annotated
    boxes(drawing).layer.add(BOX)
    drawing.draw_regions.click()
    made.regions.layer.add(BOX * 2)
    drawing.viewer.layers.remove(made.regions.layer)
    until(lambda: drawing.question.about == ("coverage", made))
    assert made.annotations(()).regions == ()
    drawing.annotation_actions.mark_whole_image()
    assert len(made.annotations(()).regions) == 1
    assert made.regions.layer not in drawing.viewer.layers
    assert drawing.question.isHidden()


def test_one_image_is_not_annotated_in_two_layers(drawing, until, smear):
    twin = drawing.viewer.add_image(smear.copy(), name="the same")
    drawing.image.choose(twin)
    drawing.annotate.click()
    until(lambda: "annotated as “smear”" in drawing.message.text())
    assert drawing.annotation_actions.annotated is None


# --- the project ---


def test_an_image_goes_into_the_project_as_crops(drawing, until, tmp_path):
    drawing.project.create_project(tmp_path / "my cells")
    until(lambda: drawing.store.project is not None)
    boxes(drawing).layer.add([BOX, BOX + 60])
    drawing.add.click()
    until(lambda: not drawing.annotation_actions.project_task.running)
    project = drawing.store.project
    assert project.summary()["images"] == 1
    assert "2 boxes" in drawing.message.text()
    assert list((project.path / "images").rglob("*.png"))
    assert "Only one image" in drawing.split.text()


def test_an_image_can_be_removed_from_the_training_data_and_added_again(drawing, until, tmp_path):
    images, task = drawing.project_images, drawing.annotation_actions.project_task
    assert images.isHidden()
    drawing.project.create_project(tmp_path / "my cells")
    until(lambda: drawing.store.project is not None)
    boxes(drawing).layer.add([BOX, BOX + 60])
    drawing.add.click()
    until(lambda: not task.running)
    project = drawing.store.project
    assert images.isVisibleTo(drawing)
    images.header.click()
    assert [images.list.item(0).text()] == ["smear: training, 1 crop, 2 boxes"]
    assert not images.remove_button.isEnabled(), "nothing is selected"

    images.list.item(0).setSelected(True)
    images.remove_button.click()
    assert drawing.remove_question.isVisibleTo(drawing)
    assert "“smear”" in drawing.remove_question.text.text()
    assert "annotations are kept" in drawing.remove_question.text.text()
    drawing.remove_question.buttons[1].click()
    assert project.summary()["images"] == 1, "cancelled"

    images.remove_button.click()
    drawing.remove_question.buttons[0].click()
    until(lambda: not task.running)
    assert project.summary()["images"] == 0
    assert not list((project.path / "images").rglob("*.png"))
    assert images.isHidden()
    assert drawing.remove_question.isHidden()
    assert "“smear” was removed" in drawing.message.text()
    assert "0 images" in drawing.project.status.text()
    assert len(project.load_annotations(next(iter(project.sources().values())))) == 2

    drawing.add.click()
    until(lambda: not task.running)
    assert project.summary()["images"] == 1
    assert images.isVisibleTo(drawing)


def test_no_image_is_removed_from_a_project_of_another_viewer(drawing, until, tmp_path):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    boxes(drawing).layer.add(BOX)
    drawing.add.click()
    until(lambda: not drawing.annotation_actions.project_task.running)
    drawing.store.projects.put(None)
    drawing.project.open(tmp_path / "p", read_only=True)
    until(lambda: drawing.store.project is not None)
    drawing.project_images.list.item(0).setSelected(True)
    assert not drawing.project_images.remove_button.isEnabled()


def copied_and_confirmed(drawing, until, folder):
    """Three copied boxes, one of them confirmed, and a project to add them to."""
    drawing.project.create_project(folder)
    until(lambda: drawing.store.project is not None)
    show_detections(drawing).set_filter(0.0)
    drawing.copy.click()
    boxes(drawing).layer.selected_data = {0}
    boxes(drawing).confirm()


def test_types_that_a_classifier_gave_are_asked_about(drawing, until, tmp_path):
    copied_and_confirmed(drawing, until, tmp_path / "my types")
    layer = boxes(drawing).layer
    table = layer.features.copy()
    table["type"], table["status"] = ["dark", "pale", "dark"], ["classified", "drawn", "classified"]
    layer.features = table
    sentence = "2 types were given by a classifier and not reviewed."
    assert drawing.unreviewed.text() == sentence
    drawing.add.click()
    question = drawing.add_question
    assert question.text.text() == sentence
    question.buttons[1].click()
    until(lambda: not drawing.annotation_actions.project_task.running)
    told = drawing.message.text()
    assert "Added to the training data: 3 boxes in" in told
    assert "Cells with a type: 1 pale." in told
    assert "2 types are a classifier's, not reviewed and left out." in told
    assert [cell.type for cell in drawing.store.project.cells] == ["pale"]


def test_copies_that_nobody_has_reviewed_are_asked_about(drawing, until, tmp_path):
    copied_and_confirmed(drawing, until, tmp_path / "my cells")
    sentence = "2 of 3 boxes were copied from detections and not reviewed."
    assert drawing.unreviewed.text() == sentence
    question = drawing.add_question
    drawing.add.click()
    assert not drawing.annotation_actions.project_task.running
    assert question.isVisibleTo(drawing)
    assert question.text.text() == sentence
    assert [b.text() for b in question.buttons] == ["Add all", "Only reviewed", "Cancel"]
    assert question.buttons[0].isDefault()
    question.buttons[2].click()
    assert not question.isVisibleTo(drawing)
    assert drawing.store.project.summary()["images"] == 0

    drawing.add.click()
    question.buttons[1].click()
    until(lambda: not drawing.annotation_actions.project_task.running)
    told = drawing.message.text().splitlines()[0]
    assert told.startswith("Added to the training data: 1 of 3 boxes in 1 crop of up to ")
    assert told.endswith("; not used: 2 copied from detections and not reviewed.")
    assert sum(crop.boxes for crop in drawing.store.project.crops) == 1

    drawing.add.click()
    assert question.buttons[1].isDefault()  # the last answer is offered
    question.buttons[0].click()
    until(lambda: not drawing.annotation_actions.project_task.running)
    assert "Added to the training data: 3 boxes in" in drawing.message.text()

    boxes(drawing).layer.selected_data = {0, 1, 2}
    boxes(drawing).confirm()
    assert not drawing.unreviewed.isVisibleTo(drawing)
    drawing.add.click()  # nothing to ask any more
    assert drawing.annotation_actions.project_task.running
    until(lambda: not drawing.annotation_actions.project_task.running)


def test_the_window_answers_while_an_image_is_added(shared_viewer, until, tmp_path, stalls):
    viewer = shared_viewer()
    viewer.add_image(blood_smear((1600, 1600), cell_diameter=60).image, name="field")
    panel = docked(viewer)
    panel.store.classes.add(["RBC"])
    panel.project.create_project(tmp_path / "p")
    until(lambda: panel.store.project is not None)
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    places = np.stack(np.meshgrid(np.arange(0, 1500, 80), np.arange(0, 1500, 80)), -1).reshape(
        -1, 2
    )
    boxes(panel).layer.add([BOX + place for place in places])
    with stalls.watched():
        panel.add.click()
        until(
            lambda: (
                not panel.annotation_actions.project_task.running
                and not panel.store.autosave.waiting
            )
        )
    print(f"longest stall while an image is added: {1e3 * stalls.longest:.0f} ms")
    assert panel.store.project.summary()["images"] == 1
    assert stalls.answers > 1


def test_what_cannot_be_learned_from_is_told(drawing, until, tmp_path):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    layer = boxes(drawing).layer
    layer.add([BOX, BOX - 500])
    layer.add([BOX[:2]], shape_type="line")
    drawing.add.click()
    until(lambda: "Added" in drawing.message.text())
    assert "1 of 2 boxes" in drawing.message.text()
    assert "not used: 1 with no part in the image" in drawing.message.text()
    assert "line" in drawing.message.text()
    assert len(boxes(drawing).layer.data) == 3  # told, and nothing taken away


def test_without_a_region_the_way_out_is_told(drawing, until, tmp_path):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    boxes(drawing).layer.add(BOX)
    regions = drawing.annotation_actions.annotated.regions.layer
    regions.remove(list(range(regions.nshapes)))
    drawing.add.click()
    until(lambda: "no region" in drawing.bar.text)
    drawing.whole_image.click()
    drawing.add.click()
    until(lambda: "Added" in drawing.message.text())


def test_a_panel_that_was_closed_goes_on_where_it_was(drawing, until):
    boxes(drawing).layer.add(BOX)
    viewer = drawing.viewer
    viewer.window.remove_dock_widget(drawing)
    again = docked(viewer)
    assert len(again.annotation_actions.annotated.boxes.all()) == 1
    again.annotation_actions.annotated.boxes.layer.add(BOX + 50)
    assert again.classes.table.item(0, 2).text() == "2"


def test_the_project_is_free_when_the_window_is_closed(drawing, until, tmp_path):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    drawing.viewer.close()
    until(lambda: _opens(tmp_path / "p"))


def _opens(path) -> bool:
    try:
        Project.open(path).close()
    except LockedError:
        return False
    return True


def test_without_a_project_nothing_is_added_and_that_is_said(drawing):
    boxes(drawing).layer.add(BOX)
    drawing.add.click()
    assert "no project" in drawing.message.text()


def test_classes_of_the_project_come_first(drawing, until, tmp_path):
    Project.create(tmp_path / "p", ["platelet", "WBC"]).close()
    drawing.project.open(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    assert drawing.store.classes.names == ["platelet", "WBC", "RBC"]


def test_a_class_is_renamed_everywhere(drawing, until, tmp_path):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    boxes(drawing).layer.add(BOX)
    drawing.classes.table.item(0, 1).setText("red cell")
    until(lambda: not drawing.classes.rename_task.running)
    assert column(drawing, "class") == ["red cell"]
    assert drawing.store.project.classes == ["red cell", "WBC"]
    drawing.classes.table.item(1, 1).setText("red cell")
    assert drawing.store.classes.names == ["red cell", "WBC"]


def test_the_window_does_not_wait_while_a_class_is_renamed_on_a_slow_disk(
    drawing, until, tmp_path, monkeypatch
):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)
    boxes(drawing).layer.add(BOX)
    answers, threads, rename = threading.Event(), [], Project.rename_class

    def slowly(project, old, new):
        threads.append(threading.current_thread())
        if threads[-1] is not threading.main_thread():
            answers.wait(60)
        rename(project, old, new)

    monkeypatch.setattr(Project, "rename_class", slowly)
    drawing.classes.table.item(0, 1).setText("red cell")
    until(lambda: bool(threads))
    assert threads != [threading.main_thread()]
    assert not drawing.classes.isEnabled()
    assert drawing.store.classes.names == ["RBC", "WBC"]
    answers.set()
    until(drawing.classes.isEnabled)
    assert column(drawing, "class") == ["red cell"]


def test_a_class_keeps_its_name_where_that_cannot_be_written(drawing, until, tmp_path, monkeypatch):
    drawing.project.create_project(tmp_path / "p")
    until(lambda: drawing.store.project is not None)

    def full(project, old, new):
        raise ProjectError("The disk is full.")

    monkeypatch.setattr(Project, "rename_class", full)
    drawing.classes.table.item(0, 1).setText("red cell")
    until(drawing.classes.isEnabled)
    assert drawing.store.classes.names == ["RBC", "WBC"]
    assert drawing.classes.table.item(0, 1).text() == "RBC"


def test_boxes_of_a_file_come_onto_the_image(drawing, until, tmp_path):
    file = tmp_path / "smear.txt"
    file.write_text("1 0.5 0.5 0.25 0.25\n0 0.1 0.1 0.1 0.1\n")
    drawing.annotation_actions.import_boxes(str(file))
    until(lambda: len(boxes(drawing).layer.data) == 2)
    assert sorted(column(drawing, "class")) == ["RBC", "WBC"]
    assert column(drawing, "status") == ["confirmed", "confirmed"]
    drawing.annotation_actions.import_boxes(str(tmp_path / "none.xml"))
    until(lambda: "none.xml" in drawing.message.text())


# --- stacks ---


def test_boxes_of_a_stack_belong_to_the_plane_that_is_shown(shared_viewer, smear, until):
    viewer = shared_viewer()
    viewer.add_image(np.stack([smear, smear[::-1], smear[:, ::-1]]), name="stack")
    panel = docked(viewer)
    panel.store.classes.add(["RBC"])
    viewer.dims.set_current_step(0, 2)
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    made = panel.annotation_actions.annotated
    made.boxes.layer.add(np.insert(BOX, 0, 2, axis=1))
    made.boxes.layer.add(np.insert(BOX, 0, 1, axis=1))
    assert made.boxes.planes() == [(1,), (2,)]
    assert len(made.annotations((1,)).regions) == 1
    assert set(made.unsaved()) == {(1,), (2,)}


def test_everything_has_a_tool_tip(drawing):
    from qtpy.QtWidgets import QAbstractButton, QComboBox, QLineEdit

    parts = [
        p for kind in (QAbstractButton, QComboBox, QLineEdit) for p in drawing.findChildren(kind)
    ]
    without = [p for p in parts if not p.toolTip() and p.objectName() != "qt_spinbox_lineedit"]
    assert not [p for p in without if not p.parent().toolTip()]


def test_the_store_is_the_viewer_s(drawing):
    assert annotation_store(drawing.viewer) is drawing.store


# --- cell types ---


def test_types_are_given_by_keys_in_a_region_and_stay_in_the_project(drawing, until, tmp_path):
    layer = boxes(drawing).layer
    layer.add([BOX, BOX + 40, BOX + 100])
    drawing.types.entry.setText("neutrophil, lymphocyte")
    drawing.types.add_typed()
    assert drawing.type_section.header.isChecked()
    assert drawing.type_section.header.text() == "Cell types (2)"
    drawing.keys_set_type.click()
    assert "0 no type" in drawing.help.text()

    drawing.select_in_region.click()
    lasso = drawing.viewer.layers.selection.active
    assert lasso.mode == "add_polygon_lasso"
    lasso.add(np.array([[0, 0], [0, 90], [90, 90], [90, 0]]), shape_type="polygon")
    until(lambda: lasso not in drawing.viewer.layers)
    assert drawing.message.text() == "2 boxes selected."
    assert drawing.viewer.layers.selection.active is layer
    key(drawing, Qt.Key.Key_2)
    assert column(drawing, "type") == ["lymphocyte", "lymphocyte", ""]
    assert column(drawing, "class") == ["RBC"] * 3
    assert [drawing.types.table.item(row, 2).text() for row in (0, 1)] == ["0", "2"]
    layer.selected_data = {1}
    key(drawing, Qt.Key.Key_0)
    assert column(drawing, "type") == ["lymphocyte", "", ""]
    key(drawing, Qt.Key.Key_Z, Qt.KeyboardModifier.ControlModifier)
    assert column(drawing, "type") == ["lymphocyte", "lymphocyte", ""]

    drawing.project.create_project(tmp_path / "project")
    until(lambda: drawing.store.project is not None)
    drawing.annotation_actions.add_to_project()
    until(lambda: "Cells with a type: 2 lymphocyte." in drawing.message.text())
    project = drawing.store.project
    assert project.types == ["lymphocyte"]
    until(lambda: project.type_colours.get("lymphocyte") is not None)
    assert project.type_colours["lymphocyte"] == drawing.store.types.colour("lymphocyte")
    drawing.types.rename("lymphocyte", "lympho")
    until(lambda: not drawing.types.rename_task.running)
    assert project.types == ["lympho"]
    assert column(drawing, "type") == ["lympho", "lympho", ""]
    (source,) = project.sources().values()
    assert project.load_annotations(source).types == ("lympho", "lympho", "")
    drawing.keys_set_class.click()
    layer.selected_data = {2}
    key(drawing, Qt.Key.Key_2)
    assert column(drawing, "class") == ["RBC", "RBC", "WBC"]
