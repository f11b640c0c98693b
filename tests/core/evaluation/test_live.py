"""Detections judged against annotations: plain cases, any case, and the programs of others."""

import contextlib
import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import iou
from napari_beerlanet.core.boxes.matching import (
    MIN_IOU,
    concatenate_pairs,
    match_greedy,
    overlap_pairs,
)
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.evaluation import live
from napari_beerlanet.core.evaluation.dataset import measure
from napari_beerlanet.core.evaluation.label_errors import likely_label_errors
from napari_beerlanet.core.evaluation.live import (
    LiveEvaluation,
    classes_by_order,
    contradicted_classes,
    unknown_classes,
    with_classes_renamed,
)
from napari_beerlanet.core.evaluation.metrics import (
    IOU_THRESHOLDS,
    PrecisionRecallCurve,
    best_threshold,
    coco_ap,
    ultralytics_ap,
)
from napari_beerlanet.core.formats.voc import read_voc
from plain_matching import plain_matches

NAMES = ["RBC", "WBC", "Platelets"]
CELLS = np.array([[0, 0, 20, 20], [30, 0, 50, 20], [0, 30, 20, 50], [30, 30, 50, 50.0]])


def found(xyxy, labels, scores, names=NAMES):
    return Detections(np.array(xyxy, np.float32), np.array(labels), np.array(scores), list(names))


def truth(xyxy, labels, names=NAMES):
    return Annotations(np.array(xyxy, float), np.array(labels), list(names))


def field(n, seed=0, extent=600, classes=3, right=0.8, scale=40.0):
    """Cells, and detections of most of them, moved; some of another class, some at nothing."""
    random = np.random.default_rng(seed)
    corner = random.uniform(0, extent, (n, 2))
    true = np.hstack([corner, corner + random.uniform(0.4, 1.0, (n, 2)) * scale])
    labels = random.integers(0, classes, n)
    moved = true + random.normal(0, 0.08 * scale, true.shape)
    moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
    kept = random.random(n) < right
    confused = np.where(random.random(n) < 0.1, random.integers(0, classes, n), labels)
    false = np.hstack([c := random.uniform(0, extent, (n // 5, 2)), c + scale])
    boxes = np.vstack([moved[kept], false])
    mine = np.concatenate([confused[kept], random.integers(0, classes, len(false))])
    scores = random.beta(3, 2, len(boxes))
    return found(boxes, mine, scores), truth(true, labels)


boxes = st.lists(
    st.tuples(*[st.floats(0, 100)] * 2, *[st.floats(0, 60)] * 2), min_size=0, max_size=25
).map(lambda rows: np.array([[x, y, x + w, y + h] for x, y, w, h in rows]).reshape(-1, 4))


# --- matching ------------------------------------------------------------------------------------


@given(boxes, boxes)
def test_pairs_are_all_that_overlap(mine, theirs):
    pairs = overlap_pairs(mine, theirs)
    shares = iou(mine, theirs)
    close = shares >= MIN_IOU + 1e-9
    pairs_found = set(zip(pairs.detection.tolist(), pairs.truth.tolist(), strict=True))
    assert {(int(i), int(j)) for i, j in np.argwhere(close)} <= pairs_found
    np.testing.assert_allclose(pairs.iou, shares[pairs.detection, pairs.truth])
    assert len(pairs_found) == len(pairs.truth)


@pytest.mark.parametrize("sides", [(1, 1e5), (3000, 3001), (1e-3, 1e-2)])
def test_pairs_of_very_different_sizes(sides):
    random = np.random.default_rng(3)
    made = []
    for n in (300, 200):
        corner = random.uniform(-1e3, 1e3, (n, 2))
        made.append(np.hstack([corner, corner + np.exp(random.uniform(*np.log(sides), (n, 2)))]))
    made[0][:50] = made[1][:50] * (1 + 1e-7)
    shares = iou(*made)
    pairs = overlap_pairs(*made)
    assert np.array_equal(
        np.argwhere(shares >= MIN_IOU), np.column_stack([pairs.detection, pairs.truth])
    )


@given(boxes, boxes, st.sampled_from([0.1, 0.5, 0.75]), st.booleans(), st.integers(0, 99))
def test_assigned_as_the_plain_version(mine, theirs, level, classes, seed):
    random = np.random.default_rng(seed)
    scores = random.random(len(mine))
    labels = random.integers(0, 2, len(mine)), random.integers(0, 2, len(theirs))
    kinds = labels if classes else (None, None)
    expected = plain_matches(mine, theirs, level, scores, *kinds)
    turns = np.argsort(-scores, kind="stable")
    assert np.array_equal(match_greedy(overlap_pairs(mine, theirs), turns, level, *kinds), expected)


def test_several_images_are_matched_each_for_itself():
    one, two = overlap_pairs(CELLS, CELLS), overlap_pairs(CELLS[:1], CELLS[:2])
    both = concatenate_pairs([one, two])
    assert match_greedy(both, np.arange(5), 0.5).tolist() == [0, 1, 2, 3, 4]
    assert both.truth_count == 6
    assert len(concatenate_pairs([]).truth) == 0
    with pytest.raises(ValueError, match=r"from an overlap \(IoU\) of 0.1 to 1, not 0"):
        match_greedy(one, np.arange(4), 0)


# --- what is what --------------------------------------------------------------------------------


def test_true_false_missed_and_wrong():
    far = [300, 300, 320, 320]
    d = found([*CELLS[:3], far], [0, 1, 2, 0], [0.9, 0.8, 0.7, 0.6])
    q = LiveEvaluation.of(d, truth(CELLS, [0, 2, 2, 1]))
    v = q.match_at(0.5)
    assert v.true_positives.tolist() == [[0, 0], [2, 2]]
    assert v.wrong_class.tolist() == [[1, 1]]
    assert (v.false_positives.tolist(), v.missed.tolist()) == ([3], [3])
    expected = np.zeros((4, 4))
    expected[0, 0] = expected[1, 2] = expected[2, 2] = expected[0, 3] = expected[3, 1] = 1
    assert np.array_equal(v.confusion.matrix, expected)
    assert [i.tolist() for i in v.confusion.cell(1, 2)] == [[1], [1]]
    assert [i.tolist() for i in v.confusion.cell(0, 3)] == [[3], []]
    assert [i.tolist() for i in v.confusion.cell(3, 1)] == [[], [3]]
    red = v.per_class[0]
    assert (red.annotated, red.detected, red.true_positives, red.precision, red.recall) == (
        1,
        2,
        1,
        0.5,
        1,
    )
    assert v.mean.recall == pytest.approx((1 + 0 + 0.5) / 3)
    fewer = q.match_at(0.75)
    assert (fewer.true_positives.tolist(), fewer.wrong_class.tolist()) == ([[0, 0]], [[1, 1]])
    assert not len(fewer.false_positives)
    by_class = q.match_at({"RBC": 0.1, "WBC": 0.95})
    assert (by_class.true_positives.tolist(), by_class.false_positives.tolist()) == ([[0, 0]], [3])
    assert not len(by_class.wrong_class)


def test_a_wrong_class_takes_nothing_from_a_right_one():
    """The more confident detection has the wrong class: the annotation is found all the same."""
    d = found(CELLS[[0, 0]], [1, 0], [0.9, 0.3])
    v = LiveEvaluation.of(d, truth(CELLS[:1], [0])).match_at(0.25)
    assert (v.false_positives.tolist(), v.true_positives.tolist()) == ([0], [[1, 0]])
    fewer = LiveEvaluation.of(d, truth(CELLS[:1], [0])).match_at(0.5)
    assert fewer.wrong_class.tolist() == [[0, 0]]
    assert not len(fewer.true_positives) + len(fewer.false_positives)


def test_classes_go_by_name():
    v = LiveEvaluation.of(
        found(CELLS, [0, 1, 0, 1], [0.9] * 4, ["wbc", "RBC"]), truth(CELLS, [1, 0, 1, 2])
    )
    verdict = v.match_at(0.5)
    assert v.names == ["wbc", "RBC", "Platelets"]
    assert len(verdict.true_positives) == 3
    assert verdict.wrong_class.tolist() == [[3, 3]]
    two = LiveEvaluation.of(
        found(CELLS[:2], [0, 1], [0.9] * 2, ["a", "A"]), truth(CELLS[:2], [1, 0], "Aa")
    )
    assert two.names == ["a", "A"]
    assert len(two.match_at(0.5).true_positives) == 2


@pytest.mark.parametrize("masked", [False, True])
def test_regions_leave_out_what_is_outside(masked):
    moved = CELLS + 3.0
    d = found([*moved, [200, 200, 220, 220]], [0] * 5, [0.9, 0.8, 0.7, 0.6, 0.5])
    regions = [Region.rectangle(0, 0, 52, 25)]
    mask = np.zeros((300, 300), bool)
    mask[:25, :52] = True
    q = LiveEvaluation.of(d, truth(CELLS, [0] * 4), mask if masked else regions)
    v = q.match_at(0.1)
    assert v.true_positives.tolist() == [[0, 0], [1, 1]]
    assert not len(v.false_positives)
    assert not len(v.missed)
    assert q.match_at(0.85).missed.tolist() == [1]
    matrix = np.diag([2, 0, 0, 0])
    assert np.array_equal(v.confusion.matrix, matrix)
    matrix[0, 0] = matrix[3, 0] = 1
    assert np.array_equal(q.match_at(0.85).confusion.matrix, matrix)
    assert v.per_class[0].annotated == 2
    assert v.per_class[0].ap50 == pytest.approx(0.995)


def test_at_the_border_of_a_region_nothing_counts_against():
    """A detection that leans inwards, of a cell whose annotation is just outside."""
    inside = [Region.rectangle(0, 0, 100, 10)]
    d = found([[0, 0, 20, 19]], [0], [0.9])
    q = LiveEvaluation.of(d, truth([[0, 1, 20, 21]], [0]), inside)
    assert not len(q.match_at(0.5).false_positives)
    assert not len(q.match_at(0.5).true_positives)


@given(st.integers(0, 1000), st.floats(0, 1), st.sampled_from([0.3, 0.5, 0.9]))
def test_every_box_is_one_thing(seed, confidence, level):
    d, t = field(30, seed)
    q = LiveEvaluation.of(d, t)
    v = q.match_at(confidence, level)
    shown = np.flatnonzero(d.scores >= np.float32(confidence))
    assert (
        sorted([*v.true_positives[:, 0], *v.wrong_class[:, 0], *v.false_positives])
        == shown.tolist()
    )
    assert sorted([*v.true_positives[:, 1], *v.wrong_class[:, 1], *v.missed]) == list(range(30))
    assert (d.labels[v.true_positives[:, 0]] == t.labels[v.true_positives[:, 1]]).all()
    assert (d.labels[v.wrong_class[:, 0]] != t.labels[v.wrong_class[:, 1]]).all()
    for row in range(4):
        for column in range(4):
            mine, theirs = v.confusion.cell(row, column)
            assert max(len(mine), len(theirs)) == v.confusion.matrix[row, column]
    counts = np.bincount(t.labels, minlength=3)
    assert np.array_equal(v.confusion.matrix.sum(axis=0)[:3], counts)
    assert len(v.true_positives) == v.mean.true_positives
    plain = np.array(
        plain_matches(d.xyxy[shown], t.xyxy, level, d.scores[shown], d.labels[shown], t.labels),
        int,
    )
    assert np.array_equal(shown[plain >= 0], v.true_positives[:, 0])
    assert np.array_equal(plain[plain >= 0], v.true_positives[:, 1])


def test_several_images_count_together():
    parts = [field(20, seed) for seed in range(4)]
    both, each = (
        LiveEvaluation(parts).match_at(0.4),
        [LiveEvaluation([part]).match_at(0.4) for part in parts],
    )
    assert np.array_equal(both.confusion.matrix, sum(v.confusion.matrix for v in each))


@pytest.mark.parametrize(("n", "m"), [(0, 0), (0, 4), (4, 0)])
def test_nothing_found_or_nothing_annotated(n, m):
    d = found(CELLS[:n].reshape(-1, 4), np.zeros(n, int), np.full(n, 0.9))
    q = LiveEvaluation.of(d, truth(CELLS[:m].reshape(-1, 4), np.zeros(m, int)))
    v = q.match_at(0.5)
    assert (len(v.true_positives), len(v.false_positives), len(v.missed)) == (0, n, m)
    assert v.mean.recall == 0 or not m
    assert q.best_threshold() is None or n
    assert len(q.curve().f1) == min(n, 1)
    assert np.isnan(v.mean.f1) == (m == 0)


# --- curves, thresholds --------------------------------------------------------------------------


@given(st.integers(0, 1000), st.sampled_from([None, "RBC"]))
def test_the_best_threshold_has_the_best_f1(seed, name):
    d, t = field(25, seed)
    q = LiveEvaluation.of(d, t)

    def f1(confidence):
        v = q.match_at(confidence)
        return v.mean.f1 if name is None else v.per_class[0].f1

    if name and not (t.labels == 0).any():
        return
    best = f1(q.best_threshold(name) or 0)
    assert all(f1(float(s)) <= best + 1e-9 for s in d.scores)


@given(st.integers(0, 1000))
def test_curves_say_what_a_threshold_gives(seed):
    d, t = field(25, seed, classes=2)
    q = LiveEvaluation.of(d, t)
    for score in d.scores[::5]:
        v = q.match_at(float(score))
        row = next(s for s in v.per_class if s.name == "RBC")
        if row.annotated:
            recall, precision = q.curve("RBC").point_at(float(score))
            assert (recall, precision) == pytest.approx(
                (row.recall, row.precision if row.detected else 1)
            )


def test_equal_scores_are_one_point():
    curve = PrecisionRecallCurve(
        np.float32([0.9, 0.5, 0.5, 0.5]), np.array([True, False, True, True]), 4
    )
    assert curve.confidence.tolist() == pytest.approx([0.9, 0.5])
    assert curve.recall.tolist() == [0.25, 0.75]
    assert curve.precision.tolist() == [1, 0.75]
    assert curve.point_at(0.95) == (0, 1)
    assert best_threshold([curve]) == pytest.approx(0.25)
    assert best_threshold([]) is None


def test_overlaps_are_found_once_whatever_the_threshold(monkeypatch):
    d, t = field(10_000, extent=12_000)
    q = LiveEvaluation.of(d, t)
    first = len(q.match_at(0.05).true_positives)
    monkeypatch.setattr(live, "overlap_pairs", lambda *_, **__: pytest.fail("found again"))
    counts = [len(q.match_at(confidence).true_positives) for confidence in (0.05, 0.5, 0.95)]
    assert counts[0] == first > counts[1] > counts[2]


# --- label errors --------------------------------------------------------------------------------


def test_likely_label_errors():
    cells = np.array([[100 * i, 0, 100 * i + 50, 50.0] for i in range(12)])
    labels = [0] * 12
    boxes = [*cells[:8], cells[8] + [0, 20, 0, 20], cells[9], [0, 300, 50, 350], cells[0] + 2]
    kinds = [0] * 8 + [0, 1, 0, 0]
    scores = [0.9] * 8 + [0.95, 0.85, 0.97, 0.6]
    d = found(boxes, kinds, scores)
    q = LiveEvaluation.of(d, truth(cells, labels))
    suspects = likely_label_errors(q)
    doubts = [s.doubt for s in suspects]
    assert doubts == sorted(doubts, reverse=True)
    told = {(s.kind, s.annotation) for s in suspects}
    assert told == {
        ("not annotated", -1),
        ("another place", 8),
        ("another class", 9),
        ("never found", 10),
        ("never found", 11),
    }
    assert suspects[0].kind == "not annotated"
    assert suspects[0].message == "RBC with 97 %, and nothing is annotated there."
    assert all(d.scores[s.detection] >= 0.5 for s in suspects if s.detection >= 0)
    assert len(likely_label_errors(q, max_count=2)) == 2
    assert not likely_label_errors(
        LiveEvaluation.of(found(cells, labels, [0.9] * 12), truth(cells, labels))
    )


# --- the same as others' programs ----------------------------------------------------------------


def quiet(function, *args):
    with contextlib.redirect_stdout(io.StringIO()):
        return function(*args)


def as_coco(parts, names, folder):
    """The parts as a file of annotations and a list of results, as COCO's programs take them."""
    images = [
        {"id": k, "file_name": str(k), "width": 9999, "height": 9999} for k in range(len(parts))
    ]
    known, results = [], []
    for k, (d, t) in enumerate(parts):
        for rows, out, scores in ((t, known, None), (d, results, d.scores)):
            sides = np.asarray(rows.xyxy, float)
            sides = np.hstack([sides[:, :2], sides[:, 2:] - sides[:, :2]])
            for i, box in enumerate(sides.tolist()):
                label = names.index(rows.names[rows.labels[i]]) + 1
                entry = {"image_id": k, "category_id": label, "bbox": box, "iscrowd": 0}
                entry |= {"area": box[2] * box[3], "id": len(out) + 1}
                out.append(entry if scores is None else {**entry, "score": float(scores[i])})
    categories = [{"id": k + 1, "name": name} for k, name in enumerate(names)]
    path = folder / "truth.json"
    path.write_text(json.dumps({"images": images, "categories": categories, "annotations": known}))
    return path, results


def coco_table(parts, names, folder, package):
    """(c, 10) average precisions of a program that speaks COCO."""
    if package == "pycocotools":
        coco = pytest.importorskip("pycocotools.coco").COCO
        evaluator = pytest.importorskip("pycocotools.cocoeval").COCOeval
    else:
        module = pytest.importorskip("faster_coco_eval")
        coco, evaluator = module.COCO, module.COCOeval_faster
    path, results = as_coco(parts, names, folder)
    known = quiet(coco, str(path))
    judge = quiet(lambda: evaluator(known, known.loadRes(results), "bbox"))
    judge.params.maxDets = [1, 10, 100_000]
    quiet(judge.evaluate)
    quiet(judge.accumulate)
    precision = judge.eval["precision"][:, :, :, 0, -1]  # levels, recalls, classes
    return precision.mean(axis=1).T


def ultralytics_table(parts, names):
    """(c, 10) average precisions, and precision, recall, F1 of all that is given."""
    import torch

    from napari_beerlanet.core.detection.ultralytics_api import DetectionValidator, ap_per_class

    validator = DetectionValidator.__new__(DetectionValidator)
    validator.iouv = torch.linspace(0.5, 0.95, 10)
    hits, scores, mine, theirs = [], [], [], []
    for d, t in parts:
        batch = {"cls": torch.from_numpy(t.labels), "bboxes": torch.from_numpy(t.xyxy).float()}
        preds = {"cls": torch.from_numpy(d.labels), "bboxes": torch.from_numpy(d.xyxy)}
        hits.append(validator._process_batch({**preds, "conf": None}, batch)["tp"])
        scores.append(d.scores)
        mine.append(d.labels)
        theirs.append(t.labels)
    result = ap_per_class(*(np.concatenate(part) for part in (hits, scores, mine, theirs)))
    assert result[6].tolist() == list(range(len(names)))
    return result[5], np.stack([curve[:, 0] for curve in result[7:10]], axis=1)


def check_against_others(parts, folder, packages):
    """Our averages equal theirs to the digits that we print, and much further."""
    q = LiveEvaluation(parts)
    for package in packages:
        theirs = coco_table(parts, NAMES, folder, package)
        np.testing.assert_allclose(q.average_precisions("coco"), theirs, atol=1e-9)
    theirs, _ = ultralytics_table(parts, NAMES)
    np.testing.assert_allclose(q.average_precisions(), theirs, atol=1e-9)
    for confidence in (0.25, 0.5, 0.7):
        shown = [(d.above(confidence), t) for d, t in parts]
        _, theirs = ultralytics_table(shown, NAMES)
        ours = [(s.precision, s.recall, s.f1) for s in q.match_at(confidence).per_class]
        np.testing.assert_allclose(ours, theirs, atol=1e-9)


@pytest.mark.parametrize("package", ["pycocotools", "faster_coco_eval"])
def test_measures_equal_those_of_others_on_made_up_fields(tmp_path, package):
    check_against_others([field(60, seed) for seed in range(6)], tmp_path, [package])


@pytest.mark.slow
def test_measures_equal_those_of_others_on_real_predictions(shared, tmp_path):
    """The packaged model on BCCD's own test images."""
    import napari_beerlanet as nb
    from napari_beerlanet.core.images.files import read_image

    model = nb.load_checkpoint("blood-cells", "cpu")
    folder = shared / "data/bccd"
    parts = []
    for name in (folder / "ImageSets/Main/test.txt").read_text().split():
        rgb = read_image(folder / f"JPEGImages/{name}.jpg").pixels
        d = model.detect(rgb, densities=False).candidates
        # Of its boxes some are without area, which Ultralytics and COCO count each in its own way.
        known = read_voc(folder / f"Annotations/{name}.xml", names=NAMES)
        known = known[(known.xyxy[:, 2:] > known.xyxy[:, :2]).all(axis=1)]
        t = truth(known.xyxy, known.labels)
        parts.append((d, t))
    packages = [name for name in ("pycocotools", "faster_coco_eval") if installed(name)]
    check_against_others(parts, tmp_path, packages)
    v, measured = LiveEvaluation(parts).match_at(0.25), measure(parts, NAMES, 0.25)
    assert len(parts) > 50
    assert v.mean.ap50 > 0.7
    for what, ours in (("mAP50", v.mean.ap50), ("mAP50-95", v.mean.ap)):
        assert f"{ours:.3f}" == f"{measured[what]:.3f}"
    assert v.confusion.matrix.tolist() == measured["confusion"]["matrix"]


def installed(package):
    import importlib.util

    return importlib.util.find_spec(package) is not None


@settings(max_examples=50)
@given(st.lists(st.booleans(), max_size=40), st.integers(0, 50))
def test_averages_stay_between_bounds(hits, more):
    marks = np.array(hits, bool)
    count = int(marks.sum()) + more
    for average in (ultralytics_ap, coco_ap):
        assert 0 <= average(marks, count) <= 1
    assert coco_ap(np.ones(5, bool), 5) == 1
    assert ultralytics_ap(np.ones(5, bool), 5) == pytest.approx(0.995)
    assert len(IOU_THRESHOLDS) == 10


# --- classes under other names --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["0", "1"], {"0": "RBC", "1": "WBC"}),
        (["2", "0"], {"2": "Platelets", "0": "RBC"}),
        (["class 1", "Class_0"], {"class 1": "WBC", "Class_0": "RBC"}),
        (["0", "7"], {"0": "RBC"}),
        (["0", "ring"], {}),
        (["4", "RBC"], {}),
        ([], {}),
    ],
)
def test_numbers_are_the_models_classes_in_their_order(names, expected):
    assert classes_by_order(names, NAMES) == expected


def test_a_model_whose_classes_are_numbers_itself_is_left_alone():
    assert classes_by_order(["0", "1"], ["1", "0"]) == {}


def test_renamed_classes_are_one_where_their_names_are():
    labels = [0, 1, 2, 0]
    renamed = with_classes_renamed(
        truth(CELLS, labels, ["0", "red cell", "WBC"]), {"0": "RBC", "red cell": "RBC"}
    )
    assert [renamed.names[k] for k in renamed.labels] == ["RBC", "RBC", "WBC", "RBC"]
    assert renamed.names == ["RBC", "WBC"]
    assert unknown_classes(["rbc", "ring", "WBC"], NAMES) == ["ring"]


def test_classes_that_their_boxes_contradict():
    detected = found(CELLS, [0, 0, 1, 2], [0.9, 0.8, 0.7, 0.6])
    swapped = LiveEvaluation.of(detected, truth(CELLS, [1, 1, 0, 2])).match_at(0.0)
    assert contradicted_classes(swapped) == {"RBC": "WBC", "WBC": "RBC"}
    right = LiveEvaluation.of(detected, truth(CELLS, [0, 1, 1, 2])).match_at(0.0)
    assert contradicted_classes(right) == {}, "half of the white cells are no contradiction"


def test_all_boxes_count_those_of_classes_that_are_not_annotated():
    detected = found(CELLS, [0, 0, 1, 2], [0.9, 0.8, 0.7, 0.6])
    matches = LiveEvaluation.of(detected, truth(CELLS[:2], [0, 0])).match_at(0.0)
    assert matches.mean.precision == 1.0
    everything = matches.all_boxes
    assert (everything.annotated, everything.detected, everything.true_positives) == (2, 4, 2)
    assert (everything.precision, everything.recall) == (0.5, 1.0)
    assert everything.f1 == pytest.approx(2 / 3)
    assert everything.ap50 == matches.mean.ap50
