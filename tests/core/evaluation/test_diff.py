"""Two results on one image: gained, lost, changed."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.evaluation.diff import describe_against, diff_detections

KINDS = ("gained", "lost", "relabelled", "rescored", "unchanged")


def counts_of(diff):
    return {kind: len(getattr(diff, kind)) for kind in KINDS}


def result(*objects, names=("RBC", "WBC")) -> Detections:
    """From (x, label, score) of squares of ten pixels."""
    rows = np.array(objects, float).reshape(-1, 3)
    xyxy = np.column_stack([rows[:, 0], 0 * rows[:, 0], rows[:, 0] + 10, 0 * rows[:, 0] + 10])
    return Detections(xyxy, rows[:, 1].astype(int), rows[:, 2], list(names))


def test_every_kind_of_change_is_told_apart():
    before = result((0, 0, 0.9), (20, 0, 0.8), (40, 0, 0.7), (60, 1, 0.6))
    after = result((1, 0, 0.95), (20, 0, 0.4), (60, 0, 0.85), (80, 1, 0.5))
    found = diff_detections(before, after)
    assert counts_of(found) == {
        "gained": 1,
        "lost": 1,
        "relabelled": 1,
        "rescored": 1,
        "unchanged": 1,
    }
    assert after.xyxy[found.gained, 0].tolist() == [80]
    assert before.xyxy[found.lost, 0].tolist() == [40]
    (was, now), *_ = found.relabelled
    assert (before.xyxy[was, 0], after.xyxy[now, 0]) == (60, 60)
    assert found.summary() == (
        "1 box gained, 1 lost, 1 of another class, 1 of another confidence, 1 as before."
    )


def test_the_same_twice_is_no_change():
    both = result((0, 0, 0.9), (20, 1, 0.8))
    found = diff_detections(both, both)
    assert not found.changed
    assert found.summary() == "Nothing has changed: 2 boxes as before."


def test_classes_go_by_name():
    before = result((0, 0, 0.9), names=("RBC", "WBC"))
    after = result((0, 1, 0.9), names=("WBC", "RBC"))
    assert not diff_detections(before, after).changed


def test_a_box_of_the_same_class_is_preferred_to_a_closer_one_of_another():
    before = result((0, 0, 0.9), (2, 1, 0.8))
    after = result((2, 0, 0.9), (0, 1, 0.8))
    assert counts_of(diff_detections(before, after))["unchanged"] == 2


@pytest.mark.parametrize("count", [0, 1])
def test_nothing_before_or_after(count):
    some, none = result(*[(0, 0, 0.9)] * count), result()
    assert counts_of(diff_detections(none, some))["gained"] == count
    assert counts_of(diff_detections(some, none))["lost"] == count


objects = st.lists(st.tuples(st.integers(0, 60), st.integers(0, 1), st.floats(0, 1)), max_size=8)


@given(objects, objects)
def test_every_detection_is_of_exactly_one_kind(old, new):
    found = diff_detections(result(*old), result(*new))
    counts = counts_of(found)
    pairs = counts["relabelled"] + counts["rescored"] + counts["unchanged"]
    assert counts["lost"] + pairs == len(old)
    assert counts["gained"] + pairs == len(new)
    used = [*found.gained, *found.relabelled[:, 1], *found.rescored[:, 1], *found.unchanged[:, 1]]
    assert sorted(used) == list(range(len(new)))


def test_gained_and_lost_boxes_are_counted_against_the_annotations():
    before = result((0, 0, 0.9), (20, 0, 0.8), (40, 0, 0.7))
    after = result((0, 0, 0.9), (60, 1, 0.6), (80, 0, 0.6), (100, 0, 0.5))
    truth = result((0, 0, 1), (20, 0, 1), (60, 1, 1), (80, 1, 1), names=("RBC", "WBC"))
    annotations = Annotations(truth.xyxy, truth.labels, ["RBC", "WBC"])
    told = describe_against(diff_detections(before, after), annotations)
    assert told == "Against the annotations: 1 of 3 gained is right, 1 of 2 lost was right."
    told = describe_against(diff_detections(before[:2], before), annotations)
    assert told == "Against the annotations: 0 of 1 gained are right."
    assert not describe_against(diff_detections(before, before), annotations)
