"""Decisions on detections: what they change, how they are taken back, found and kept."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.detection.stain_statistics import describe_densities, domain_shift_scores
from napari_beerlanet.core.review.review import (
    ACCEPTED,
    ORDERS,
    REJECTED,
    UNREVIEWED,
    DetectionFilter,
    Review,
    load_review,
    save_review,
)

NAMES = ["RBC", "WBC", "Platelets"]


def some(n=30, seed=0):
    """n boxes that do not overlap, ten to a line."""
    rng = np.random.default_rng(seed)
    x, y = 50.0 * (np.arange(n) % 10), 50.0 * (np.arange(n) // 10)
    boxes = np.stack([x, y, x + rng.uniform(10, 40, n), y + rng.uniform(10, 40, n)], 1)
    columns = {
        "Model channel 1 mean": rng.normal(1, 0.1, n),
        "Model channel 2 mean": rng.normal(2, 0.1, n),
    }
    return Detections(
        boxes, rng.integers(0, 3, n), rng.uniform(0.02, 1, n), NAMES, columns, (400, 600)
    )


def test_it_looks_at_all_candidates():
    found = some().above(0.5)
    assert len(Review(found)) == 30 > len(found)


def test_decisions_and_undo():
    review = Review(some())
    assert review.accept([3, 5, 5]).tolist() == [3, 5]
    assert review.reject(np.array([5])).tolist() == [5]
    review.relabel([7], "schizont")
    assert review.column("status")[[3, 5, 7]].tolist() == [ACCEPTED, REJECTED, ACCEPTED]
    assert review.column("class")[7] == "schizont"
    assert review.progress() == (3, 30)
    assert review.undo().tolist() == [7]
    assert review.class_of(7) == review.detections.names[review.detections.labels[7]]
    assert review.undo().tolist() == [5]
    assert review.column("status")[5] == ACCEPTED
    assert review.redo().tolist() == [5]
    assert review.column("status")[5] == REJECTED
    review.reset([5])
    assert review.redo().tolist() == []


def test_some_cells_of_a_column_are_those_of_the_whole():
    review = Review(some())
    review.accept([3, 5])
    rows = np.array([5, 0, 29, 3])
    for name in review.columns:
        whole = review.column(name)
        assert len(whole) == 30
        np.testing.assert_array_equal(review.column(name, rows), whole[rows])
        np.testing.assert_array_equal(review.column(name, slice(4, 20, 3)), whole[4:20:3])
        assert review.column(name, slice(0)).dtype == whole.dtype


def test_nothing_new_is_no_step():
    review = Review(some())
    review.accept([1])
    assert review.accept([1]).tolist() == []
    assert review.undo().tolist() == [1]
    assert review.undo().tolist() == []


def test_a_row_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, match="There are 30 detections"):
        Review(some()).accept([30])


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["accept", "reject", "reset", "relabel"]),
            st.lists(st.integers(0, 9), max_size=6),
        ),
        max_size=12,
    )
)
def test_undo_goes_all_the_way_back_and_redo_forth(steps):
    review = Review(some(10))
    for verb, rows in steps:
        if verb == "relabel":
            review.relabel(rows, "WBC")
        else:
            getattr(review, verb)(rows)
    status, labels = review.status.copy(), review.labels.copy()
    count = 0
    while len(review.undo()):
        count += 1
    assert (review.status == 0).all()
    assert (review.labels == review.detections.labels).all()
    for _ in range(count):
        review.redo()
    assert (review.status == status).all()
    assert (review.labels == labels).all()


# --- filter and order ----------------------------------------------------------------------------


def test_filters_combine():
    review = Review(some())
    review.accept([0, 1, 2])
    chosen = DetectionFilter(
        classes=frozenset({"RBC", "WBC"}),
        states=frozenset({UNREVIEWED}),
        ranges={"confidence": (0.3, 0.8), "Model channel 1 mean": (0.95, 2)},
    )
    expected = [
        review.column("class")[k] in ("RBC", "WBC")
        and k > 2
        and 0.3 <= review.detections.scores[k] <= 0.8
        and review.detections.columns["Model channel 1 mean"][k] >= 0.95
        for k in range(30)
    ]
    assert review.mask(chosen).tolist() == expected
    assert any(expected)


def test_the_least_confidence_counts_itself():
    review = Review(some())
    score = float(review.detections.scores[4])
    assert review.mask(DetectionFilter(ranges={"confidence": (round(score, 9), 1)}))[4]


def test_text_is_looked_for_in_class_and_status():
    review = Review(some())
    review.reject([4])
    assert np.flatnonzero(review.mask(DetectionFilter(text="REJ"))).tolist() == [4]
    assert (
        review.mask(DetectionFilter(text="plate")) == (review.column("class") == "Platelets")
    ).all()


@pytest.mark.parametrize("order", ORDERS)
def test_every_order_has_each_row_once(order):
    review = Review(some())
    mask = review.mask(DetectionFilter(ranges={"confidence": (0.2, 1)}))
    assert sorted(review.ordered(mask, order)) == np.flatnonzero(mask).tolist()


def test_orders():
    review = Review(some())
    everything = np.ones(30, bool)
    scores = review.detections.scores
    assert (np.diff(scores[review.ordered(everything, "least confident")]) >= 0).all()
    near = np.abs(scores[review.ordered(everything, "uncertain", 0.4)] - 0.4)
    assert (np.diff(near) >= 0).all()
    lines = review.column("y")[review.ordered(everything, "position")] // 50
    assert (np.diff(lines) >= 0).all()
    shuffled = review.ordered(everything, "shuffled", seed=1)
    assert shuffled.tolist() != sorted(shuffled)
    assert (shuffled == review.ordered(everything, "shuffled", seed=1)).all()


def test_shuffled_keeps_its_order_when_the_filter_changes():
    review = Review(some())
    all_rows = review.ordered(np.ones(30, bool), "shuffled").tolist()
    mask = review.detections.scores > 0.5
    assert review.ordered(mask, "shuffled").tolist() == [k for k in all_rows if mask[k]]


def test_the_odd_one_is_the_most_unusual():
    found = some()
    found.columns["Model channel 2 mean"][12] = 5
    assert Review(found).ordered(np.ones(30, bool), "unusual")[0] == 12


def test_the_one_least_like_the_training_comes_first_and_unknown_classes_last():
    found = some()
    seen = {
        "RBC": {"mean": [1.0, 2.0], "sd": [0.1, 0.1], "count": 50},
        "WBC": {"mean": [1.0, 2.0], "sd": [0.1, 0.0], "count": 50},
    }
    labels = np.arange(30) % 3
    means = np.tile([1.1, 2.0], (30, 1))
    means[7] = 1.3, 2.0  # a WBC, 3 standard deviations
    means[9] = 1.0, 2.45  # an RBC, 4.5 of them
    means[10] = 1.0, 2.02  # a WBC, 4 times the least that a standard deviation counts as
    far = domain_shift_scores(seen, means, labels, NAMES)
    np.testing.assert_allclose(far[[9, 10, 7, 0]], [4.5, 4, 3, 1], rtol=1e-5)
    assert (np.isnan(far) == (labels == 2)).all()
    columns = {"unlike training": far}
    review = Review(Detections(found.xyxy, labels, found.scores, NAMES, columns, (400, 600)))
    order = review.ordered(np.ones(30, bool), "out of domain")
    values = review.column("unlike training")[order]
    np.testing.assert_allclose(values[:4], [4.5, 4, 3, 1], rtol=1e-5)
    assert np.isnan(values[20:]).all()
    assert review.has_domain_shift
    assert not Review(found).has_domain_shift


def test_few_boxes_tell_no_spread():
    labels = np.array([0] * 5 + [1] * 4)
    means = np.arange(9.0)[:, None] * [1, 2]
    told = describe_densities(means, labels, NAMES)
    assert told == {"RBC": {"mean": [2, 4], "sd": [1.414214, 2.828427], "count": 5}}


def test_the_next_one_to_look_at_goes_round():
    review = Review(some(5))
    rows = np.array([4, 2, 0])
    review.accept([2])
    assert review.next_unreviewed(rows, 0) == 2
    assert review.next_unreviewed(rows, 2) == 0
    review.accept([0, 4])
    assert review.next_unreviewed(rows, 0) is None


def test_what_was_decided_as_detections():
    review = Review(some())
    review.accept([1])
    review.relabel([2], "schizont")
    review.reject([3])
    decided = review.accepted()
    assert [decided.names[k] for k in decided.labels] == [review.column("class")[1], "schizont"]
    assert (decided.xyxy == review.detections.xyxy[[1, 2]]).all()


def test_none_at_all():
    review = Review(Detections.empty(NAMES))
    assert review.progress() == (0, 0)
    for order in ORDERS:
        assert len(review.ordered(review.mask(DetectionFilter(text="x")), order)) == 0


# --- on disk -------------------------------------------------------------------------------------


def test_decisions_come_back(tmp_path):
    review = Review(some())
    review.accept([1, 4])
    review.reject([7])
    review.relabel([9], 'Zelle "ü" <b>')
    path = save_review(tmp_path / "deep" / "a review.json", review, "smear.png")
    again, count = load_review(path, some())
    assert count == 4
    assert (again.status == review.status).all()
    assert (again.column("class") == review.column("class")).all()
    assert not list(tmp_path.glob("**/*.partial*"))


def test_boxes_that_moved_a_little_keep_their_decision_and_others_do_not(tmp_path):
    review = Review(some())
    review.accept([1])
    review.reject([2])
    path = save_review(tmp_path / "r.json", review)
    moved = some()
    moved.xyxy[1] += 0.5
    moved.xyxy[2] += 30
    again, count = load_review(path, moved)
    assert count == 1
    assert again.column("status")[[1, 2]].tolist() == [ACCEPTED, UNREVIEWED]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("[1]", "holds no object"),
        ("{", "not a JSON file"),
        ("[" * 100_000, "not a JSON file"),
        ('{"kind": "x"}', "not a review"),
        (json.dumps({"kind": "napari-beerlanet review", "version": 9}), "version 9"),
        (
            json.dumps({"kind": "napari-beerlanet review", "version": 1, "decisions": [[1, 2, 3]]}),
            "cannot be read",
        ),
    ],
)
def test_a_bad_file_gets_a_sentence(tmp_path, content, said):
    path = tmp_path / "bad.json"
    path.write_text(content)
    with pytest.raises(FileError, match=said):
        load_review(path, some())


# --- cell types -----------------------------------------------------------------------------------

TYPES = ["neutrophil", "monocyte", "lymphocyte"]


def typed(n=30, seed=0):
    """Every third box has no type; the others take turns, at a probability that falls."""
    found = some(n, seed)
    rows = np.flatnonzero(np.arange(n) % 3 != 0)
    p = np.full((len(rows), 3), 0.05, np.float32)
    p[np.arange(len(rows)), np.arange(len(rows)) % 3] = np.linspace(0.95, 0.4, len(rows))
    return found.with_types(TYPES, p / p.sum(1, keepdims=True), rows=rows, classifier="white")


def test_types_are_corrected_undone_and_redone():
    review = Review(typed())
    assert review.type_names == TYPES
    assert review.type_labels[:6].tolist() == [-1, 0, 1, -1, 2, 0]
    assert review.column("type")[:3].tolist() == ["", "neutrophil", "monocyte"]
    assert review.relabel_type([1, 2, 3], "lymphocyte").tolist() == [1, 2, 3]
    assert review.column("type", np.array([1, 2, 3])).tolist() == ["lymphocyte"] * 3
    assert review.column("status", np.array([1, 4])).tolist() == [ACCEPTED, UNREVIEWED]
    assert review.relabel_type([4], "blast").tolist() == [4]
    assert (review.type_names[-1], review.type_of(4)) == ("blast", "blast")
    assert review.relabel_type([4], "blast").tolist() == []
    review.undo()
    assert (review.type_of(4), review.state_of(4)) == ("lymphocyte", UNREVIEWED)
    review.undo()
    assert review.column("type")[:4].tolist() == ["", "neutrophil", "monocyte", ""]
    review.redo()
    assert review.type_of(3) == "lymphocyte"
    review.relabel_type([3], "")
    assert review.type_of(3) == ""
    # The class is another matter, and the detections are what they were.
    assert review.labels.tolist() == review.detections.labels.tolist()
    assert review.detections.columns["type"][1] == "neutrophil"


def test_filters_orders_and_columns_know_types():
    review = Review(typed())
    assert review.columns[:4] == ["id", "class", "type", "confidence"]
    assert {"probability", "P(monocyte)"} <= set(review.numeric_columns)
    assert "type" not in review.numeric_columns
    review.relabel_type([0], "monocyte")
    chosen = review.mask(DetectionFilter(types=frozenset({"monocyte"})))
    assert (review.column("type")[chosen] == "monocyte").all()
    assert chosen[0]
    untyped = review.mask(DetectionFilter(types=frozenset({""})))
    assert np.flatnonzero(untyped).tolist() == list(range(3, 30, 3))
    assert review.mask(DetectionFilter(text="MONO")).tolist() == chosen.tolist()
    order = review.ordered(np.ones(30, bool), "least certain type")
    p = review.detections.columns["probability"][order]
    assert np.all(np.diff(p[:20]) >= 0)
    assert np.isnan(p[20:]).all()
    assert review.has_type_probability
    without = Review(some())
    assert not without.has_type_probability
    assert "type" not in without.columns
    assert len(without.ordered(np.ones(30, bool), "least certain type")) == 30


def test_reviewed_detections_have_the_types_of_the_reviewer():
    review = Review(typed())
    review.relabel_type([1], "monocyte")
    review.relabel_type([2], "blast")
    accepted = review.accepted()
    assert accepted.columns["type"].tolist() == ["monocyte", "blast"]
    assert accepted.columns["probability"][0] == review.detections.columns["P(monocyte)"][1]
    assert np.isnan(accepted.columns["probability"][1])
    assert accepted.types == [*TYPES, "blast"]


def test_types_are_saved_with_decisions_and_carried_over(tmp_path):
    review = Review(typed())
    review.relabel_type([1], "blast")
    review.accept([3, 4])
    path = save_review(tmp_path / "r.json", review)
    decisions = json.loads(path.read_text(encoding="utf-8"))["decisions"]
    assert [len(decision) for decision in decisions] == [9, 8, 9]
    # Another run of the classifier, or of the detector: what was decided stays.
    again = typed().with_types(TYPES, np.tile(np.float32([1, 0, 0]), (30, 1)))
    restored, count = load_review(path, again)
    assert count == 3
    assert [restored.type_of(k) for k in (1, 3, 4, 5)] == [
        "blast",
        "neutrophil",  # it had none when it was accepted
        "lymphocyte",
        "neutrophil",
    ]
    bare, count = load_review(path, some())
    assert (count, bare.type_of(1), bare.type_of(5)) == (3, "blast", "")


def test_a_file_without_types_is_as_before(tmp_path):
    review = Review(some())
    review.accept([1])
    review.relabel([2], "schizont")
    content = json.loads(save_review(tmp_path / "r.json", review).read_text(encoding="utf-8"))
    assert all(len(decision) == 8 for decision in content["decisions"])
    restored, count = load_review(tmp_path / "r.json", typed())
    assert count == 2
    assert restored.type_labels.tolist() == typed().type_labels.tolist()
