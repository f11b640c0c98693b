"""Detections: the container, its thresholds and tables."""

import subprocess
import sys

import numpy as np
import pytest

from napari_beerlanet.core.boxes.detections import Detections, replace_in_windows

NAMES = ["RBC", "WBC", "Platelets"]


def random_boxes(rng, n, extent=100.0, longest=30.0):
    corner = rng.uniform(0, extent, (n, 2))
    return np.hstack([corner, corner + rng.uniform(0, longest, (n, 2))]).astype(np.float32)


def some(n=6, seed=0, **rest):
    rng = np.random.default_rng(seed)
    columns = {"Model channel 1 mean": rng.uniform(0, 1, n).astype(np.float32)}
    return Detections(
        random_boxes(rng, n), rng.integers(0, 3, n), rng.uniform(0, 1, n), NAMES, columns, **rest
    )


def test_types_and_order():
    d = some(50)
    assert (d.xyxy.dtype, d.labels.dtype, d.scores.dtype) == (np.float32, np.int64, np.float32)
    assert (np.diff(d.scores) <= 0).all()
    rng = np.random.default_rng(0)  # as `some` made them
    columns = rng.uniform(0, 1, 50).astype(np.float32)
    xyxy, labels, scores = random_boxes(rng, 50), rng.integers(0, 3, 50), rng.uniform(0, 1, 50)
    order = np.argsort(-scores)
    np.testing.assert_array_equal(d.xyxy, xyxy[order])
    np.testing.assert_array_equal(d.labels, labels[order])
    np.testing.assert_array_equal(d.columns["Model channel 1 mean"], columns[order])


def test_equal_scores_keep_their_order():
    d = Detections([[i, 0, i + 1, 1] for i in range(9)], [0] * 9, [0.5] * 9, ["cell"])
    assert d.xyxy[:, 0].tolist() == list(range(9))


def test_indexing():
    d = some(20, candidates=some(30), image_shape=(5, 6), report={"scale": 2})
    for part in (d[d.labels == 1], d[[3, 4, 9]], d[2:5], d[7], d[np.zeros(20, bool)], d[-1]):
        assert isinstance(part, Detections)
        assert part.image_shape == (5, 6)
        assert part.report == {"scale": 2}
        assert part.candidates is None
        assert part.columns["Model channel 1 mean"].shape == (len(part),)
    assert (d[d.labels == 1].labels == 1).all()
    np.testing.assert_array_equal(d[[3, 4, 9]].scores, d.scores[[3, 4, 9]])
    assert len(d[7]) == 1
    assert [len(one) for one in d] == [1] * 20
    with pytest.raises(IndexError):
        d[20]


def test_thresholds_move_both_ways():
    everything = some(100)
    shown = everything.above(0.25)
    assert 0 < len(shown.above(0.8)) < len(shown) < 100
    assert (shown.scores >= 0.25).all()
    assert len(shown.above(0.8).above(0.0)) == 100
    np.testing.assert_array_equal(shown.above(0.8).above(0.25).xyxy, shown.xyxy)


def test_a_threshold_for_each_class():
    everything = some(100)
    shown = everything.above({"RBC": 0.9, "WBC": 0.1})
    red, white = everything.labels == 0, everything.labels == 1
    expected = (red & (everything.scores >= 0.9)) | (white & (everything.scores >= 0.1))
    np.testing.assert_array_equal(shown.xyxy, everything.xyxy[expected])


def test_a_score_equal_to_the_threshold_stays():
    d = Detections([[0, 0, 1, 1]], [0], [0.3], ["cell"])
    assert len(d.above(0.3)) == len(d.above({"cell": 0.3})) == 1


def test_counts_and_empty():
    d = Detections([[0, 0, 1, 1]] * 3, [2, 0, 2], [0.5] * 3, NAMES)
    assert d.counts() == {"RBC": 1, "WBC": 0, "Platelets": 2}
    none = Detections.empty(NAMES, image_shape=(3, 4))
    assert len(none) == len(none.above(0.1)) == len(none.to_frame()) == 0
    assert none.xyxy.shape == (0, 4)
    assert none.counts() == {"RBC": 0, "WBC": 0, "Platelets": 0}
    assert none.image_shape == (3, 4)


def test_frame():
    d = Detections(
        [[1, 2, 4, 10]], [1], [0.5], NAMES, {"Model channel 1 mean": [0.25]}, pixel_size=(0.5, 0.25)
    )
    row = d.to_frame().iloc[0].to_dict()
    assert row == {
        **{"class": "WBC", "confidence": 0.5, "x1": 1, "y1": 2, "x2": 4, "y2": 10},
        **{"width": 3, "height": 8, "centre_x": 2.5, "centre_y": 6},
        **{"x1_um": 0.25, "y1_um": 1, "x2_um": 1, "y2_um": 5, "width_um": 0.75, "height_um": 4},
        **{"centre_x_um": 0.625, "centre_y_um": 3, "Model channel 1 mean": 0.25},
    }
    assert len(some(7).to_frame()) == 7
    assert "x1_um" not in some(7).to_frame()


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"xyxy": [[0, 0, 1]]}, r"shape \(n, 4\)"),
        ({"xyxy": [["a", "b", "c", "d"]]}, "Boxes are numbers"),
        ({"xyxy": [[0, 0, 1, np.nan]]}, "Box 0 has coordinates that are no finite numbers"),
        ({"xyxy": [[5, 0, 1, 1]]}, r"Box 0 ends before it begins .*\[5.0, 0.0, 1.0, 1.0\]"),
        ({"labels": [3]}, "Label 3 of box 0 has no name: there are 3 classes"),
        ({"labels": [-1]}, "Label -1 of box 0 has no name"),
        ({"labels": [0.5]}, "whole numbers"),
        ({"labels": [0, 1]}, "1 boxes need as many labels"),
        ({"scores": [1.5]}, "Scores are from 0 to 1; number 0 is 1.5"),
        ({"scores": [np.nan]}, "Scores are from 0 to 1; number 0 is nan"),
        ({"columns": {"x1": [0]}}, 'may not be called "x1"'),
        ({"columns": {"OD": [0, 1]}}, 'as many values of "OD"'),
    ],
)
def test_refuses(change, sentence):
    good = {"xyxy": [[0, 0, 1, 1]], "labels": [0], "scores": [0.5], "names": NAMES}
    with pytest.raises(ValueError, match=sentence):
        Detections(**{**good, **change})


def test_import_is_light():
    code = (
        "import sys, napari_beerlanet.core.boxes.detections\n"
        "print(sorted({'numba', 'pandas', 'torch', 'PIL'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


# --- a part searched again -----------------------------------------------------------------------


def boxes_of(rows: list[tuple[float, float, float, float, float]], **more) -> Detections:
    """Boxes x1, y1, x2, y2 with their scores, of one class."""
    table = np.array(rows, np.float32).reshape(-1, 5)
    labels = np.zeros(len(table), np.int64)
    return Detections(table[:, :4], labels, table[:, 4], ["cell"], **more)


WINDOW = np.array([[100.0, 100, 200, 200]])


def test_a_window_searched_again_replaces_what_lies_in_it_and_nothing_else():
    before = boxes_of([(10, 10, 30, 30, 0.9), (120, 120, 140, 140, 0.8), (300, 0, 320, 20, 0.7)])
    found = boxes_of([(150, 150, 170, 170, 0.6)], report={"model": "new"})
    merged = replace_in_windows(before, found, WINDOW)
    assert sorted(merged.xyxy[:, 0].tolist()) == [10, 150, 300]
    assert merged.report == {"model": "new"}
    assert merged.scores.tolist() == pytest.approx([0.9, 0.7, 0.6])


@pytest.mark.parametrize("centre", [95, 105], ids=["centre outside", "centre inside"])
def test_an_object_on_the_border_stays_whole_and_counts_once(centre):
    whole = (centre - 15, 120, centre + 15, 150, 0.9)
    cut = (100, 120, centre + 15, 150, 0.6)
    merged = replace_in_windows(boxes_of([whole]), boxes_of([cut]), WINDOW)
    np.testing.assert_allclose(merged.xyxy, [whole[:4]])


def test_a_doubtful_box_on_the_border_does_not_keep_out_a_sure_one():
    cut = (100, 120, 120, 150, 0.9)
    merged = replace_in_windows(boxes_of([(95, 120, 120, 150, 0.05)]), boxes_of([cut]), WINDOW)
    np.testing.assert_allclose(merged.xyxy, [cut[:4]])


def test_an_object_on_the_border_that_is_found_no_more_goes_if_most_of_it_was_inside():
    before = boxes_of([(95, 110, 125, 140, 0.9), (80, 150, 110, 180, 0.8)])
    merged = replace_in_windows(before, boxes_of([]), WINDOW)
    np.testing.assert_allclose(merged.xyxy, [[80, 150, 110, 180]])


def test_candidates_columns_and_classes_are_merged_too():
    before = boxes_of(
        [(10, 10, 30, 30, 0.9), (50, 50, 60, 60, 0.1)],
        columns={"Model channel 1 mean": np.array([1.0, 2.0])},
    ).above(0.25)
    found = Detections(
        np.array([[150, 150, 170, 170], [110, 110, 120, 120]], np.float32),
        np.array([1, 0]),
        np.array([0.6, 0.05]),
        ["other", "cell"],
        columns={
            "Model channel 1 mean": np.array([3.0, 4.0]),
            "Model channel 2 mean": np.array([5.0, 6.0]),
        },
    ).above(0.25)
    merged = replace_in_windows(before, found, WINDOW)
    assert len(merged) == 4
    assert merged.above(0.25).counts() == {"other": 0, "cell": 2}
    np.testing.assert_allclose(merged.columns["Model channel 1 mean"], [1, 3, 2, 4])
    np.testing.assert_allclose(merged.columns["Model channel 2 mean"], [np.nan, 5, np.nan, 6])


# --- cell types -----------------------------------------------------------------------------------


def _typed() -> Detections:
    boxes = np.array([[0, 0, 9, 9], [20, 0, 29, 9], [40, 0, 49, 9], [60, 0, 69, 9]], float)
    found = Detections(boxes, [0, 1, 1, 0], [0.9, 0.8, 0.4, 0.05], ["RBC", "WBC"]).above(0.25)
    probabilities = np.array([[0.75, 0.25], [0.0, 1.0]], np.float32)
    return found.with_types(["monocyte", "lymphocyte"], probabilities, rows=[1, 2], classifier="w")


def test_types_are_columns_of_the_candidates_and_follow_the_threshold() -> None:
    typed = _typed()
    assert len(typed) == 4
    assert typed.columns["type"].tolist() == ["", "monocyte", "lymphocyte", ""]
    np.testing.assert_array_equal(typed.columns["probability"], [np.nan, 0.75, 1.0, np.nan])
    entropy = -(0.75 * np.log(0.75) + 0.25 * np.log(0.25))
    np.testing.assert_allclose(typed.columns["entropy"][1:3], [entropy, 0], rtol=1e-6)
    np.testing.assert_array_equal(typed.columns["P(lymphocyte)"], [np.nan, 0.25, 1.0, np.nan])
    assert typed.types == ["monocyte", "lymphocyte"]
    assert typed.report["classifier"] == "w"
    assert typed.above(0.5).type_counts() == {"monocyte": 1, "lymphocyte": 0}
    assert typed.above(0.5).above(0.3).type_counts() == {"monocyte": 1, "lymphocyte": 1}


def test_types_of_the_same_classifier_are_added_and_of_another_replaced() -> None:
    certain = np.array([[1.0, 0.0]], np.float32)
    more = _typed().with_types(["monocyte", "lymphocyte"], certain, rows=[0])
    assert more.columns["type"].tolist() == ["monocyte", "monocyte", "lymphocyte", ""]
    other = more.with_types(["ring", "uninfected"], certain, labels=[1], rows=[0])
    assert other.columns["type"].tolist() == ["uninfected", "", "", ""]
    assert other.columns["probability"][0] == 0
    assert "P(monocyte)" not in other.columns
    assert Detections.empty(["RBC"]).type_counts() == {}


def test_a_search_of_a_window_keeps_the_types_outside_it() -> None:
    found = Detections([[0, 0, 9, 10]], [0], [0.9], ["RBC", "WBC"], {"area": np.ones(1)})
    after = replace_in_windows(_typed(), found, np.array([[0, 0, 15, 15]]))
    assert after.columns["type"].tolist() == ["", "monocyte", "lymphocyte", ""]
    assert after.types == ["monocyte", "lymphocyte"]
    assert np.isnan(after.columns["area"][1])


def test_types_as_classes():
    boxes = [[0, 0, 9, 9]] * 3
    found = Detections(boxes, [0, 1, 0], [0.9, 0.8, 0.7], ["RBC", "WBC"])
    typed = found.with_types(
        ["ring", "late"], np.array([[0.2, 0.8]], np.float32), rows=np.array([2])
    )
    shown = typed.by_type()
    assert shown.names == ["ring", "late", "RBC", "WBC"]
    assert [shown.names[k] for k in shown.labels] == ["RBC", "WBC", "late"]
    same = found.by_type()
    assert (same.names, same.labels.tolist()) == (["RBC", "WBC"], [0, 1, 0])
    assert len(Detections.empty(["RBC"]).by_type()) == 0
