"""Annotations: from shapes and detections, what of them can be used, and undoing."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.annotations import COPIED, Annotations, boxes_from_shapes
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.history import (
    History,
    apply_change,
    diff_annotations,
    objects_by_id,
)
from napari_beerlanet.core.boxes.regions import Region

NAMES = ["RBC", "WBC"]


def some(boxes, labels=None, **rest) -> Annotations:
    boxes = np.array(boxes, float).reshape(-1, 4)
    labels = np.zeros(len(boxes), int) if labels is None else labels
    return Annotations(boxes, labels, NAMES, image_shape=(80, 100), **rest)


THREE = some([[1, 2, 11, 12], [20, 20, 30, 40], [50, 5, 60, 9]], [0, 1, 0])


def test_shapes_become_the_boxes_around_them_and_others_are_told():
    square = [[2, 3], [8, 3], [8, 9], [2, 9]]
    diamond = [[25, 20], [30, 25], [25, 30], [20, 25]]
    click = [[5, 5], [5, 5], [5, 5], [5, 5]]
    kinds = ["rectangle", "path", "ellipse", "rectangle", "line", "rectangle"]
    drawn = boxes_from_shapes([square, square, square, diamond, square[:2], click], kinds)
    np.testing.assert_allclose(drawn.xyxy, [[2, 3, 8, 9], [2, 3, 8, 9], [20, 20, 30, 30]])
    assert drawn.which.tolist() == [0, 2, 3]
    told = " ".join(drawn.notes)
    assert "a path encloses nothing" in told
    assert "a line encloses nothing" in told
    assert "1 shape was left out: it has no area." in told


def test_no_shapes_are_no_boxes():
    drawn = boxes_from_shapes([], [])
    assert drawn.xyxy.shape == (0, 4)
    assert not drawn.notes


def test_boxes_outside_and_without_area_are_left_out_and_told():
    given = some([[-5, -5, 5, 5], [200, 0, 210, 9], [3, 3, 3, 9], [90, 70, 120, 90]], [0, 0, 0, 1])
    used, notes = given.trainable()
    np.testing.assert_array_equal(used.xyxy, [[0, 0, 5, 5], [90, 70, 100, 80]])
    assert used.object_ids.tolist() == [0, 3]
    assert notes == [
        "1 box has no area and is left out.",
        "1 box has no part in the image and is left out.",
    ]


def test_boxes_of_a_few_pixels_are_left_out_and_told():
    given = some([[5, 5, 8.9, 30], [5, 5, 9, 9], [-9, 5, 3, 30], [97, 70, 120, 90]], [0, 0, 1, 1])
    used, notes = given.trainable()
    np.testing.assert_array_equal(used.xyxy, [[5, 5, 9, 9]])
    assert notes == ["3 boxes have a side of less than 4 pixels and are left out."]
    assert some([], []).trainable()[1] == []


def test_only_copies_are_not_reviewed():
    boxes = [[0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9], [60, 0, 69, 9]]
    given = replace(some(boxes, [0, 0, 0, 1]), status=["copied", "drawn", "corrected", "confirmed"])
    assert given.reviewed.tolist() == [False, True, True, True]


def test_copied_detections_go_by_the_name_of_their_class():
    found = Detections(
        np.array([[70, 0, 79, 9], [65, 25, 80, 40]], np.float32),
        np.array([1, 0]),
        np.array([0.9, 0.3], np.float32),
        ["WBC", "Platelets"],
    )
    both = THREE.with_detections(found, 0.2)
    assert both.names == ["RBC", "WBC", "Platelets"]
    assert [both.names[k] for k in both.labels[3:]] == ["Platelets", "WBC"]
    assert both.status[3:] == (COPIED, COPIED)
    assert both.object_ids.tolist() == [0, 1, 2, 3, 4]
    assert len(THREE.with_detections(found, 0.5)) == 4


def test_copying_again_adds_nothing():
    found = Detections(
        np.array([[0, 0, 9, 9], [1, 2, 11, 13]], np.float32),
        np.array([0, 1]),
        np.array([0.9, 0.3], np.float32),
        NAMES,
    )
    once = THREE.with_detections(found)
    assert len(once) == 4, "one of them is annotated already"
    assert len(once.with_detections(found)) == 4


def test_candidates_below_the_threshold_shown_can_be_copied():
    everything = Detections(
        np.array([[70, 0, 79, 9], [65, 25, 80, 40]], np.float32),
        np.array([0, 0]),
        np.array([0.9, 0.1], np.float32),
        NAMES,
    )
    assert len(THREE.with_detections(everything.above(0.5), 0.05)) == 5


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"labels": [0, 2, 0]}, "from 0 to 1"),
        ({"labels": [0, 0]}, "as many labels"),
        ({"ids": [1, 1, 2]}, "id of its own"),
        ({"status": ["drawn", "drawn", "strange"]}, "strange"),
        ({"names": ["RBC", "RBC"]}, "must differ"),
        ({"xyxy": [[0, 0, np.nan, 1]] * 3}, "finite"),
    ],
)
def test_what_makes_no_sense_is_refused(change, words):
    with pytest.raises(ValueError, match=words):
        replace(THREE, **change)


def test_written_as_json_and_read_is_the_same():
    regions = (Region.rectangle(0, 0, 50, 50), Region("polygon", [[0, 0], [9, 1], [3, 8]]))
    given = replace(THREE, regions=regions, xyxy=THREE.xyxy + 1 / 3)
    again = Annotations.from_json(json.loads(json.dumps(given.to_json())), (80, 100))
    assert objects_by_id(again) == objects_by_id(given)
    assert [r.kind for r in again.regions] == ["rectangle", "polygon"]
    assert again.image_shape == (80, 100)


def test_classes_are_renumbered_by_name_and_unknown_ones_refused():
    other = THREE.with_classes(["Platelets", "WBC", "RBC"])
    assert other.labels.tolist() == [2, 1, 2]
    with pytest.raises(ValueError, match="no class WBC in the project"):
        THREE.with_classes(["RBC"])
    assert len(THREE[[0, 2]].with_classes(["RBC"])) == 2


def test_detections_and_back():
    found = THREE.to_detections()
    assert found.counts() == THREE.counts() == {"RBC": 2, "WBC": 1}
    assert len(some([]).to_detections()) == 0


# --- undo ----------------------------------------------------------------------------------------


def test_undo_and_redo_of_a_step():
    history = History()
    after = THREE[[0, 1]]
    history.record("delete", THREE, after)
    assert (history.undo_label, history.redo_label) == ("delete", "")
    back = history.undo(after)
    assert objects_by_id(back) == objects_by_id(THREE)
    assert (history.undo_label, history.redo_label) == ("", "delete")
    assert objects_by_id(history.redo(back)) == objects_by_id(after)
    assert history.undo(history.redo(back)) is not None


def test_what_a_hand_drew_in_between_stays():
    history = History()
    relabelled = replace(THREE, labels=np.array([1, 1, 1]))
    history.record("relabel", THREE, relabelled)
    drawn = some([*relabelled.xyxy, [70, 70, 79, 79]], [1, 1, 1, 0], ids=[0, 1, 2, 7])
    back = history.undo(drawn)
    assert objects_by_id(back) == {**objects_by_id(THREE), 7: objects_by_id(drawn)[7]}


def test_a_new_step_ends_what_could_be_redone_and_nothing_is_no_step():
    history = History(limit=2)
    assert not history.record("nothing", THREE, THREE)
    assert history.undo_label == ""
    assert history.undo(THREE) is THREE
    assert history.redo(THREE) is THREE
    for word in ("a", "b", "c"):
        history.record(word, THREE, THREE[[0]])
    history.undo(THREE[[0]])
    history.record("d", THREE, THREE[[1]])
    assert history.redo_label == ""
    history.undo(THREE)
    assert history.undo_label == "b"
    history.undo(THREE)
    assert history.undo_label == "", "only two steps are kept"


subsets = st.lists(st.booleans(), min_size=3, max_size=3)


@given(subsets, subsets, st.lists(st.integers(0, 1), min_size=3, max_size=3))
def test_a_change_and_its_inverse_cancel(first, second, labels):
    before = THREE[np.array(first)]
    after = replace(THREE, labels=np.array(labels))[np.array(second)]
    change = diff_annotations("", before, after)
    assert objects_by_id(apply_change(change, before)) == objects_by_id(after)
    assert objects_by_id(apply_change(change.inverse(), after)) == objects_by_id(before)


def test_types_go_with_the_boxes() -> None:
    boxes = np.array([[0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9]], float)
    types = ["", "monocyte", "monocyte"]
    annotations = Annotations(boxes, [0, 1, 1], ["RBC", "WBC"], image_shape=(60, 60), types=types)
    assert annotations.type_counts() == {"monocyte": 2}
    assert annotations.typed().object_ids.tolist() == [1, 2]
    written = annotations.to_json()
    assert "type" not in written["objects"][0]
    assert written["objects"][1]["type"] == "monocyte"
    assert Annotations.from_json(written, (60, 60)).types == annotations.types
    detections = annotations.to_detections()
    assert Annotations.empty(["RBC", "WBC"]).with_detections(detections).types == tuple(types)
    assert Annotations.empty([]).with_detections(detections[:1]).types == ("",)
    with pytest.raises(ValueError, match="as many types"):
        Annotations(boxes, [0, 1, 1], ["RBC", "WBC"], types=["monocyte"])
