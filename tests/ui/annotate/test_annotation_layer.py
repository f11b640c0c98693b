"""Annotations in a Shapes layer: drawn, read, changed by keys, undone."""

import numpy as np
import pytest
from napari.layers import Shapes

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.ui.annotate.annotation_layer import (
    AnnotationLayer,
    copy_of_detections,
    empty_features,
)
from napari_beerlanet.ui.annotate.classes import ClassList
from napari_beerlanet.ui.viewer.box_shapes import points_from_shape, read_shape_boxes

BOX = np.array([[9.5, 19.5], [9.5, 39.5], [29.5, 39.5], [29.5, 19.5]])  # x 20 to 40, y 10 to 30


@pytest.fixture
def boxes() -> AnnotationLayer:
    """An empty layer of an image (100, 200) with three classes."""
    classes = ClassList()
    classes.add(["RBC", "WBC", "platelet"])
    return AnnotationLayer(Shapes([], ndim=2, features=empty_features()), classes, (100, 200), 1.0)


def column(boxes: AnnotationLayer, name: str) -> list:
    return boxes.layer.features[name].tolist()


def found() -> Detections:
    xyxy = np.array([[0, 0, 10, 10], [20, 20, 40, 50], [60, 5, 80, 25]], np.float32)
    return Detections(xyxy, np.array([0, 1, 0]), np.array([0.9, 0.5, 0.2]), ["WBC", "bead"])


def copy_detections(boxes: AnnotationLayer, detections: Detections, plane, what) -> int:
    return boxes.append(copy_of_detections(detections, boxes.classes, boxes.shape), plane, what)


def test_a_drawn_box_has_the_current_class_a_status_and_an_id_of_its_own(boxes):
    boxes.layer.add(BOX)
    boxes.classes.choose(1)
    boxes.layer.add(BOX + 30)
    assert column(boxes, "class") == ["RBC", "WBC"]
    assert column(boxes, "status") == ["drawn", "drawn"]
    assert column(boxes, "id") == [0, 1]
    assert np.allclose(boxes.layer.edge_color, boxes.classes.rgba(["RBC", "WBC"]))


def test_boxes_are_read_in_image_pixels(boxes):
    boxes.layer.add(BOX)
    assert boxes.all().xyxy.tolist() == [[20, 10, 40, 30]]


def test_what_is_put_is_read_again(boxes):
    copy_detections(boxes, found(), (), "copy detections")
    assert np.allclose(boxes.all().xyxy, found().xyxy)


@pytest.mark.parametrize("kind", ["rectangle", "ellipse", "polygon"])
def test_every_shape_with_an_inside_counts_by_its_bounding_box(kind):
    turned = np.array([[0, 10], [10, 20], [20, 10], [10, 0]], float) - 0.5
    read = read_shape_boxes([turned], [kind])
    reach = 10 / np.sqrt(2) if kind == "ellipse" else 10
    assert np.allclose(read.xyxy, [[10 - reach, 10 - reach, 10 + reach, 10 + reach]], atol=1e-4)


def test_lines_paths_and_dots_are_left_out_and_told(boxes):
    boxes.layer.add([BOX[:2]], shape_type="line")
    boxes.layer.add([BOX[:3]], shape_type="path")
    boxes.layer.add([BOX * 0 + 5], shape_type="rectangle")
    boxes.layer.add(BOX)
    assert len(boxes.all()) == 1
    told = " ".join(boxes.notes)
    assert "line" in told
    assert "path" in told
    assert "no area" in told


def test_a_key_sets_the_class_of_selected_boxes_only(boxes):
    boxes.layer.add([BOX, BOX + 30])
    boxes.layer.selected_data = {1}
    boxes.set_class("platelet")
    assert column(boxes, "class") == ["RBC", "platelet"]
    assert np.allclose(boxes.layer.edge_color[1], boxes.classes.rgba(["platelet"])[0])


def test_copies_are_corrected_by_another_class_and_confirmed_by_the_same(boxes):
    assert copy_detections(boxes, found()[:2], (), "copy detections") == 2
    assert column(boxes, "status") == ["copied", "copied"]
    boxes.layer.selected_data = {0}
    boxes.set_class("WBC")
    boxes.layer.selected_data = {1}
    boxes.set_class("RBC")
    assert column(boxes, "status") == ["confirmed", "corrected"]


def test_a_copy_that_is_moved_by_hand_is_corrected(boxes):
    copy_detections(boxes, found()[:2], (), "copy detections")
    moved = [boxes.layer.data[0] + 3, boxes.layer.data[1]]
    boxes.layer.data = moved
    assert column(boxes, "status") == ["corrected", "copied"]


def test_copies_bring_classes_that_are_new(boxes):
    copy_detections(boxes, found(), (), "copy detections")
    assert boxes.classes.names == ["RBC", "WBC", "platelet", "bead"]
    assert boxes.all().counts() == {"RBC": 0, "WBC": 2, "platelet": 0, "bead": 1}


def test_what_is_below_the_threshold_of_the_view_is_not_copied(boxes):
    shown = found().above(0.4)
    assert shown.candidates is not None
    assert copy_detections(boxes, shown, (), "copy detections") == 2


def test_undo_and_redo_of_class_copy_and_deletion(boxes):
    boxes.layer.add(BOX)
    boxes.layer.selected_data = {0}
    boxes.set_class("WBC")
    copy_detections(boxes, found(), (), "copy detections")
    boxes.layer.remove([0])
    assert len(boxes.all()) == 3
    assert boxes.undo() == "delete"
    assert len(boxes.all()) == 4
    assert boxes.undo() == "copy detections"
    assert len(boxes.all()) == 1
    assert boxes.undo() == "change the class"
    assert column(boxes, "class") == ["RBC"]
    for _ in range(3):
        boxes.redo()
    assert len(boxes.all()) == 3
    assert sorted(column(boxes, "id")) == [1, 2, 3]


def test_a_step_that_is_undone_leaves_what_was_drawn_since(boxes):
    copy_detections(boxes, found(), (), "copy detections")
    boxes.layer.add(BOX)
    boxes.undo()
    boxes.undo()
    assert len(boxes.all()) == 0
    boxes.redo()
    boxes.redo()
    assert len(boxes.all()) == 4


def test_an_ellipse_that_was_deleted_comes_back_as_one(boxes):
    boxes.layer.add([BOX], shape_type="ellipse")
    drawn = np.array(boxes.layer.data[0])
    boxes.layer.selected_data = {0}
    boxes.layer.remove_selected()
    boxes.undo()
    assert list(boxes.layer.shape_type) == ["ellipse"]
    assert np.allclose(boxes.layer.data[0], drawn)


def test_nothing_to_undo_is_no_error(boxes):
    assert boxes.undo() == ""
    assert boxes.redo() == ""


def test_pasted_boxes_get_ids_of_their_own(boxes):
    boxes.layer.add(BOX)
    boxes.layer.mode = "select"
    boxes.layer.selected_data = {0}
    boxes.layer._copy_data()
    boxes.layer._paste_data()
    assert column(boxes, "id") == [0, 1]
    assert column(boxes, "class") == ["RBC", "RBC"]


def test_an_id_that_was_deleted_is_not_given_again(boxes):
    boxes.layer.add([BOX, BOX + 30])
    boxes.layer.remove([1])
    boxes.layer.add(BOX + 50)
    assert column(boxes, "id") == [0, 2]


def test_a_class_written_into_the_table_is_a_class(boxes):
    boxes.layer.add(BOX)
    boxes.layer.features = {"class": ["mast  cell"], "status": ["odd"], "id": [0]}
    assert boxes.classes.names[-1] == "mast cell"
    assert boxes.all().counts()["mast cell"] == 1
    assert column(boxes, "status") == ["drawn"]


def test_columns_that_were_dropped_come_back(boxes):
    boxes.layer.add(BOX)
    boxes.layer.features = {"note": ["?"]}
    assert column(boxes, "class") == ["RBC"]
    assert column(boxes, "note") == ["?"]


def test_every_change_is_told_once_and_no_change_never(boxes):
    told = []
    boxes.changed.connect(lambda: told.append(1))
    boxes.layer.add(BOX)
    assert len(told) == 1
    boxes.layer.selected_data = {0}
    boxes.layer.selected_data = set()
    boxes.classes.recolour("RBC", "#112233")
    assert len(told) == 1
    boxes.layer.remove([0])
    assert len(told) == 2


def test_boxes_of_a_stack_stay_on_their_planes():
    classes = ClassList()
    classes.add(["RBC"])
    layer = Shapes([], ndim=3, features=empty_features())
    boxes = AnnotationLayer(layer, classes, (100, 200), 1.0)
    copy_detections(boxes, found(), (4,), "copy detections")
    layer.add(np.insert(BOX, 0, 2, axis=1))
    assert boxes.planes() == [(2,), (4,)]
    assert len(boxes.of_plane((4,))) == 3
    assert len(boxes.of_plane((3,))) == 0
    assert boxes.of_plane((2,)).xyxy.tolist() == [[20, 10, 40, 30]]


def test_renamed_classes_keep_their_boxes_and_colours(boxes):
    boxes.layer.add(BOX)
    colour = boxes.classes.colour("RBC")
    boxes.classes.add(["x"])
    boxes.classes.rename("RBC", " red   cell ")
    assert column(boxes, "class") == ["red cell"]
    assert boxes.classes.colour("red cell") == colour


def test_many_boxes_are_changed_without_a_long_pause(boxes):
    rng = np.random.default_rng(0)
    low = rng.uniform(0, 1000, (2000, 2)).astype(np.float32)
    many = Detections(np.hstack([low, low + 20]), np.zeros(2000, int), np.ones(2000), ["RBC"])
    assert copy_detections(boxes, many, (), "copy detections") == 2000
    boxes.layer.selected_data = {5}
    boxes.set_class("WBC")
    assert boxes.all().counts()["WBC"] == 1


def test_points_are_x_y():
    assert points_from_shape(np.array([[7, 1.5, 2.5]])).tolist() == [[3.0, 2.0]]


# --- types ---


def typed(boxes: AnnotationLayer, *names: str) -> AnnotationLayer:
    boxes.types.add(["neutrophil", "lymphocyte"])
    for k, name in enumerate(names):
        boxes.layer.add(BOX + 40 * k)
        boxes.layer.selected_data = {k}
        boxes.set_type(name)
    return boxes


def test_names_of_types_can_be_read_on_the_slide_and_on_the_black_canvas(boxes):
    typed(boxes, "neutrophil", "", "")
    boxes.types.activate(True)
    rgb = np.asarray(boxes.layer.text.color.constant)[:3]
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    luminance = float(linear @ (0.2126, 0.7152, 0.0722))  # as WCAG defines it
    assert min((luminance + 0.05) / 0.05, 1.05 / (luminance + 0.05)) >= 4.5


def test_a_type_is_given_to_many_and_taken_back_in_one_step(boxes):
    typed(boxes, "neutrophil", "", "")
    boxes.layer.selected_data = {1, 2}
    boxes.set_type("lymphocyte")
    assert column(boxes, "type") == ["neutrophil", "lymphocyte", "lymphocyte"]
    assert boxes.type_counts() == {"neutrophil": 1, "lymphocyte": 2}
    assert column(boxes, "class") == ["RBC"] * 3
    boxes.set_type("no such type")
    assert boxes.undo() == "change the type"
    assert column(boxes, "type") == ["neutrophil", "", ""]
    boxes.redo()
    assert boxes.all().types == ("neutrophil", "lymphocyte", "lymphocyte")
    boxes.layer.selected_data = {0}
    boxes.set_type("")
    assert boxes.type_counts() == {"lymphocyte": 2}


def test_a_deleted_box_comes_back_with_its_type(boxes):
    typed(boxes, "neutrophil", "lymphocyte")
    boxes.layer.selected_data = {1}
    boxes.layer.remove_selected()
    boxes.undo()
    assert sorted(column(boxes, "type")) == ["lymphocyte", "neutrophil"]


def test_boxes_have_the_colour_and_the_name_of_their_type_while_keys_set_types(boxes):
    typed(boxes, "neutrophil", "")
    by_class = boxes.layer.edge_color.copy()
    boxes.types.activate(True)
    assert np.allclose(boxes.layer.edge_color, boxes.types.rgba(["neutrophil", ""]))
    assert list(boxes.layer.text.values) == ["neutrophil", ""]
    boxes.layer.selected_data = set()
    boxes.types.choose(1)
    boxes.layer.add(BOX + 80)
    assert column(boxes, "type") == ["neutrophil", "", "lymphocyte"]
    assert list(boxes.layer.text.values)[2] == "lymphocyte"
    boxes.types.activate(False)
    assert np.allclose(boxes.layer.edge_color[:2], by_class)
    assert not boxes.layer.text.visible
    boxes.layer.add(BOX + 20)
    assert column(boxes, "type")[3] == ""


def test_copied_detections_bring_their_types_and_a_key_reviews_them(boxes):
    types = np.array(["monocyte", "", "monocyte"], object)
    detections = Detections(
        found().xyxy, found().labels, found().scores, found().names, {"type": types}
    )
    copy_detections(boxes, detections, (), "copy detections")
    assert boxes.type_counts() == {"monocyte": 2}
    assert boxes.types.names == ["monocyte"]
    boxes.types.add(["basophil"])
    boxes.layer.selected_data = {0}
    boxes.set_type("monocyte")
    boxes.layer.selected_data = {2}
    boxes.set_type("basophil")
    assert column(boxes, "status") == ["confirmed", "copied", "corrected"]


def test_a_renamed_type_and_what_users_write_into_the_table(boxes):
    typed(boxes, "neutrophil", "lymphocyte")
    boxes.types.rename("neutrophil", "band")
    assert column(boxes, "type") == ["band", "lymphocyte"]
    table = boxes.layer.features.copy()
    table["type"] = [None, " plasma   cell "]
    boxes.layer.features = table
    assert column(boxes, "type") == ["", "plasma cell"]
    assert "plasma cell" in boxes.types.names
    boxes.layer.features = table.drop(columns="type")
    assert column(boxes, "type") == ["", ""]


def test_boxes_with_their_centre_in_a_region_are_selected(boxes):
    boxes.layer.add([BOX, BOX + 30, BOX + 60])
    triangle = Region("polygon", np.array([[0, 0], [75, 0], [0, 75]]))
    assert boxes.select_inside(triangle, ()) == 1
    assert set(boxes.layer.selected_data) == {0}
    assert boxes.select_inside(Region.rectangle(0, 0, 70, 70), ()) == 2
