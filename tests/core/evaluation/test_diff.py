"""Two results on one image: gained, lost, changed."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.evaluation.diff import (
    ImageChange,
    ModelChange,
    compare_on_images,
    describe_against,
    diff_detections,
    images_to_compare,
)
from napari_beerlanet.core.formats.dataset import read_dataset
from tinydata import write_smears

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


# --- two models on many images -------------------------------------------------------------------


def seen(size, *counts, names=("RBC", "WBC"), side=10):
    """Detections with so many boxes of each class, found with cells of this size assumed."""
    labels = np.repeat(np.arange(len(counts)), counts)
    xyxy = np.zeros((len(labels), 4), np.float32)
    xyxy[:, 2:] = side
    scores = np.full(len(labels), 0.9)
    return Detections(xyxy, labels, scores, list(names), report={"object_size": size})


def changed(*pairs, opened=None, total=None):
    images = [ImageChange.of(f"{k}.png", *pair) for k, pair in enumerate(pairs)]
    change = ModelChange("blood-cells", tuple(images), total or len(images))
    return change if opened is None else change.with_open_image(*opened)


SAME = seen(66, 60, 5), seen(64, 62, 5)
SMALL = seen(66, 60, 5), seen(27, 58, 5)
LARGE = seen(60, 60, 5), seen(90, 58, 5)
MIXED = seen(66, 11, 1), seen(60, 1, 7)


@pytest.mark.parametrize(
    ("change", "code", "text"),
    [
        (changed(SAME, SAME), "alike", ""),
        (ModelChange("blood-cells", (), 2), "alike", ""),  # no image could be read
        (
            changed(SAME, SMALL, LARGE, SAME, SMALL),
            "sizes",
            "On 3 of 5 images the new model assumes cells of another size than “blood-cells” (27 "
            "instead of 66 pixels on 1.png); check its detections before you keep it, or set the "
            "cell size.",
        ),
        (
            changed(SMALL, SAME, total=500),
            "sizes",
            "On 1 of 2 images (of 500) the new model assumes cells of another size than "
            "“blood-cells” (27 instead of 66 pixels on 0.png); check its detections before you "
            "keep it, or set the cell size.",
        ),
        (
            changed(SAME, SMALL, opened=LARGE),
            "sizes",
            "On 1 of 2 images and on the open one the new model assumes cells of another size than "
            "“blood-cells” (27 instead of 66 pixels on 1.png); check its detections before you "
            "keep it, or set the cell size.",
        ),
        (
            changed(SAME, opened=LARGE),
            "sizes",
            "On the open image the new model assumes cells of another size than “blood-cells” (90 "
            "instead of 60 pixels); check its detections before you keep it, or set the cell size.",
        ),
        (
            changed(MIXED),
            "shares",
            "On 1 image 7 of 8 boxes of the new model are WBC instead of 1 of 12 of “blood-cells”; "
            "check its detections before you keep it.",
        ),
        (
            changed(MIXED, (seen(66, 60, 5), seen(27, 1, 40)), opened=MIXED),
            "sizes and shares",
            "On 1 of 2 images the new model assumes cells of another size than “blood-cells” (27 "
            "instead of 66 pixels on 1.png), and on 2 images and the open one 54 of its 57 boxes "
            "are WBC instead of 7 of 89; check its detections before you keep it, or set the cell "
            "size.",
        ),
    ],
)
def test_a_model_whose_cells_are_of_other_sizes_or_classes_is_told(change, code, text):
    assert (change.code, change.text) == (code, text)
    stored = json.loads(json.dumps(change.to_dict()))
    assert ModelChange.from_dict(stored) == change


@pytest.mark.parametrize(
    "pair",
    [
        (seen(66, 60, 2), seen(60, 60, 4)),  # two white cells more may be chance
        (seen(66, 60, 5), seen(50, 60, 5)),  # not a third
        (seen(66, 2, 0), seen(20, 9, 0)),  # two boxes tell no size
        (seen(None, 60, 5), seen(20, 60, 5)),
        (seen(66, 60, 5), seen(66, 0, 0)),
        (seen(66, 60, 5), seen(9, 60, 5, names=("yeast", "hypha"))),  # nothing to compare
        # A class that is new is no other share of those that were known, nor another size.
        (seen(66, 60, 5), seen(9, 60, 5, 300, names=("RBC", "WBC", "parasite"))),
    ],
)
def test_what_tells_nothing_is_not_told(pair):
    assert changed(pair).code == "alike"


def test_where_classes_are_others_the_boxes_of_a_shared_one_tell_the_size():
    pair = seen(66, 60, 5, side=60), seen(60, 60, names=("rbc",), side=25)
    assert changed(pair).images[0].sizes == (60.0, 25.0)
    assert changed(pair).code == "sizes"


class Finder:
    """Stands for a detector that finds the same on every image."""

    def __init__(self, found):
        self.found, self.info, self.seen = found, {"name": "parent"}, []

    def detect(self, rgb, **settings):
        assert settings["object_size"] == "auto"
        self.seen.append(rgb.shape)
        return self.found


def test_both_models_are_run_on_all_images_of_a_project(tmp_path):
    items = images_to_compare(read_dataset(write_smears(tmp_path, train=3, val=2, side=64)))
    (tmp_path / "images" / "train" / "smear-1.png").write_bytes(b"damaged")
    before, after = map(Finder, SMALL)
    fractions = []
    change = compare_on_images(before, after, items, 5, lambda p: fractions.append(p.fraction))
    assert before.seen == after.seen == [(64, 64, 3)] * 4
    assert change.text.startswith("On 4 of 4 images (of 5) the new model assumes cells of another")
    assert fractions == sorted(fractions)


def test_of_very_many_images_some_are_compared_from_first_to_last(tmp_path):
    for k in range(200):
        path = tmp_path / "images" / f"{k:03d}.png"
        path.parent.mkdir(exist_ok=True)
        path.touch()
    (tmp_path / "data.yaml").write_text("train: images\nval: images/199.png\nnames: [RBC]\n")
    chosen = [item.image.name for item in images_to_compare(read_dataset(tmp_path))]
    assert (chosen[0], chosen[-1], len(chosen)) == ("000.png", "199.png", 64)
