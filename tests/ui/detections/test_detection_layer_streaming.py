"""Boxes that come part by part while the user works: nothing of the user's is lost."""

import numpy as np
import pytest

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.detections.box_store import ADDED, EDITED, BoxStore
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer

pytestmark = pytest.mark.window
NAMES = ["RBC", "WBC"]


def some(n: int, x: float = 0.0, score: float = 0.9, names=NAMES) -> Detections:
    """n boxes of 10 × 10 in a row, beginning at x."""
    left = x + 20.0 * np.arange(n)
    boxes = np.stack([left, np.full(n, 5.0), left + 10, np.full(n, 15.0)], axis=1)
    scores = np.linspace(score, score - 0.1, n)
    return Detections(boxes, np.arange(n) % len(names), scores, names, report={"model": "tiny"})


@pytest.fixture
def viewer(shared_viewer):
    return shared_viewer()


@pytest.fixture
def made(viewer):
    source = viewer.add_image(np.full((400, 4000, 3), 200, np.uint8), name="slide")
    return DetectionLayer(viewer, source, Detections.empty(NAMES), confidence=0.25)


def move(made: DetectionLayer, place: int, by: float) -> None:
    data = made.layer.data
    data[place] = data[place] + by
    made.layer.data = data


def test_parts_add_up_and_are_shown(made, until):
    made.extend(some(3))
    made.extend(some(2, x=100, score=0.95, names=["WBC", "blast"]))
    until(lambda: len(made.layer.data) == 5)
    assert made.store.names == ["RBC", "WBC", "blast"]
    found = made.detections
    assert len(found) == 5
    assert (np.diff(found.scores) <= 0).all()
    assert list(made.store.model_rows[:2]) == [3, 0]
    assert found.counts() == {"RBC": 2, "WBC": 2, "blast": 1}
    assert made.report["model"] == "tiny"
    assert not made.edited


def test_doubles_go_but_not_those_that_the_user_changed(made, until):
    made.extend(some(4))
    until(lambda: len(made.layer.data) == 4)
    move(made, 1, 40)
    made.extend(some(2, x=200), duplicates=some(4).xyxy[:2])
    until(lambda: len(made.layer.data) == 5)
    assert set(made.layer.features["id"]) == {1, 2, 3, 4, 5}
    assert made.layer.features["status"][0] == EDITED
    assert made.edited
    assert len(made.detections) == 5
    np.testing.assert_array_equal(np.sort(made.detections.xyxy[:, 0]), [20, 40, 60, 200, 220])


def test_edits_and_selection_outlast_boxes_that_come(made, until):
    made.extend(some(4))
    until(lambda: len(made.layer.data) == 4)
    made.layer.selected_data = {2}
    made.layer.add_rectangles(np.array([[100.0, 100], [150, 180]]))
    made.extend(some(30, x=100))
    until(lambda: len(made.layer.data) == 35)
    assert list(made.read_back().features["status"]).count(ADDED) == 1
    made.set_filter(0.999)
    assert len(made.layer.data) == 1  # the user's own
    assert len(made.detections) == 34
    made.set_filter(np.arange(34) == 33)
    assert len(made.layer.data) == 2
    made.extend(some(1, x=3000))  # the mask is of what there was, so the last threshold counts
    until(lambda: len(made.layer.data) == 1)
    made.set_filter(0.25)
    assert len(made.layer.data) == 36


def test_a_selection_on_the_canvas_is_told_by_its_place_in_what_was_found(made, until):
    made.extend(some(2, score=0.5))
    made.extend(some(2, x=100, score=0.9))
    until(lambda: len(made.layer.data) == 4)
    told = []
    made.selected.connect(told.append)
    made.layer.selected_data = {0}
    assert told == [2]
    np.testing.assert_array_equal(made.detections.xyxy[2], made.store.xyxy[0])
    made.select(0)
    assert made.layer.features["id"][next(iter(made.layer.selected_data))] == 2
    made.apply_review(np.array([1, 0, 0, 0]), ["open", "accepted"], made.detections.labels, NAMES)
    assert list(made.store.status) == ["found", "found", "accepted", "found"]


def test_what_is_known_in_the_end_takes_the_place_and_edits_stay(made, until):
    made.extend(some(5))
    until(lambda: len(made.layer.data) == 5)
    move(made, 0, 30)
    made.layer.selected_data = {1}
    made.layer.remove_selected()
    made.layer.add_rectangles(np.array([[100.0, 100], [150, 180]]))
    final = some(5)
    keep = np.array([0, 1, 3, 4])
    final = Detections(
        final.xyxy[keep], final.labels[keep], final.scores[keep], NAMES, report={"tiles": 9}
    )
    made.finalise(final)
    assert made.detections is final
    assert made.report["tiles"] == 9
    back = made.read_back()
    assert sorted(back.features["status"]) == sorted([EDITED, "found", "found", ADDED])
    assert back.xyxy[list(back.features["status"]).index(EDITED)][0] == pytest.approx(30)
    assert 20 not in back.xyxy[:, 0]  # deleted by the user
    assert 40 not in back.xyxy[:, 0]  # not there in the end
    assert made.edited


def test_an_edited_box_that_the_model_takes_back_is_the_users():
    from napari_beerlanet.ui.detections.edits import finalised_store

    old = BoxStore(some(3))
    old.make_writable()
    old.xyxy[1] += 3
    old.touched[1], old.states[1] = True, 1
    new = finalised_store(old, some(1))
    assert list(new.status) == ["found", EDITED]
    assert new.features(np.array([1]))["source"][0] == "user"


def test_what_the_model_found_is_never_written_to(made, until):
    found = some(4)
    before = found.xyxy.copy(), found.labels.copy()
    made.set_detections(found)
    move(made, 0, 30)
    table = made.layer.features.copy()
    table.loc[1, "class"] = "WBC" if table["class"][1] == "RBC" else "RBC"
    made.layer.features = table
    assert made.edited
    made.apply_review(np.array([0, 0, 1, 1]), ["open", "accepted"], 1 - found.labels, NAMES)
    assert made.detections is found
    np.testing.assert_array_equal(found.xyxy, before[0])
    np.testing.assert_array_equal(found.labels, before[1])
    assert (made.store.labels[1:] == 1 - before[1][1:]).all()


def test_parts_are_added_to_many(made):
    rng = np.random.default_rng(0)
    n = 300_000
    corner = rng.uniform(0, 100_000, (n, 2))
    many = Detections(
        np.concatenate([corner, corner + 30], axis=1),
        rng.integers(0, 2, n),
        rng.uniform(0.3, 1, n),
        NAMES,
    )
    made.set_detections(many)
    for k in range(20):
        part = some(200, x=4000.0 * k)
        made.extend(part, duplicates=some(200, x=4000.0 * (k - 1)).xyxy[-3:])
    assert len(made.store) == n + 4000
    assert not made.store.alive.all()
