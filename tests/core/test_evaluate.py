"""Measures of what a user gets: exact in plain cases, and Ultralytics' own on its own ground."""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from discs import enlivened
from napari_beerlanet.core.boxes import Detections, to_centres
from napari_beerlanet.core.dataset import read_dataset
from napari_beerlanet.core.detector import Detector
from napari_beerlanet.core.evaluate import (
    Tally,
    Truth,
    _middle_of_maximum,
    class_numbers,
    collect,
    evaluate,
    match,
)
from napari_beerlanet.core.network import StainDetectionModel
from napari_beerlanet.core.yolo import DetectionValidator
from napari_beerlanet.sample_data import blood_smear
from tinydata import MODEL, NAMES

CELLS = np.array([[0, 0, 20, 20], [30, 0, 50, 20], [0, 30, 20, 50], [30, 30, 50, 50.0]])


def found(xyxy, labels, scores):
    return Detections(np.array(xyxy, np.float32), np.array(labels), np.array(scores), list(NAMES))


def tally(*pairs):
    total = Tally(list(NAMES))
    for detections, truth in pairs:
        total.add(detections, truth)
    return total


def test_perfect_detections_measure_one():
    labels = np.array([0, 0, 1, 2])
    result = tally((found(CELLS, labels, [0.9, 0.8, 0.7, 0.6]), Truth(CELLS, labels))).measure()
    # Ultralytics integrates over a hundred and one steps of recall.
    assert result["mAP50"] == pytest.approx(1, abs=0.006)
    assert result["mAP50-95"] == pytest.approx(1, abs=0.006)
    assert (result["precision"], result["recall"]) == pytest.approx((1, 1))
    assert [c["count"] for c in result["per_class"].values()] == [2, 1, 1]
    assert np.array_equal(result["confusion"]["matrix"], np.diag([2, 1, 1, 0]))
    assert json.loads(json.dumps(result)) == result


def test_shifted_boxes_count_at_low_levels_only():
    labels = np.zeros(4, np.int64)
    moved = CELLS + np.array([4, 0, 4, 0])  # intersection over union 2/3
    result = tally((found(moved, labels, [0.9, 0.8, 0.7, 0.6]), Truth(CELLS, labels))).measure()
    assert result["mAP50"] == pytest.approx(1, abs=0.006)
    assert result["mAP50-95"] == pytest.approx(0.4, abs=0.01)


def test_classes_without_annotations_are_left_out_of_the_means():
    labels = np.array([0, 0, 0, 1])
    detections = found(CELLS, [0, 0, 0, 2], [0.9, 0.8, 0.7, 0.6])
    result = tally((detections, Truth(CELLS, labels))).measure()
    assert result["per_class"]["Platelets"]["count"] == 0
    assert result["per_class"]["Platelets"]["threshold"] is None
    assert result["per_class"]["RBC"]["AP50"] == pytest.approx(1, abs=0.006)
    assert result["per_class"]["WBC"]["AP50"] == 0
    assert result["mAP50"] == pytest.approx(0.5, abs=0.006)
    assert set(result["curves"]) == {"RBC", "WBC"}


def test_curves_belong_to_their_class_where_one_is_never_found():
    labels = np.array([0, 1, 2, 2])
    detections = found(CELLS[[0, 2, 3]], [0, 2, 2], [0.9, 0.8, 0.7])
    result = tally((detections, Truth(CELLS, labels))).measure()
    curves = result["curves"]
    assert max(curves["WBC"]["precision"]) == 0
    assert curves["Platelets"]["precision"][500] == pytest.approx(1)
    assert curves["RBC"]["precision"][500] == pytest.approx(1)


@pytest.mark.parametrize("truth", [CELLS, CELLS[:0]])
def test_nothing_found(truth):
    result = tally(
        (Detections.empty(list(NAMES)), Truth(truth, np.zeros(len(truth), np.int64)))
    ).measure()
    assert result["mAP50"] == result["F1"] == 0
    assert result["per_class"]["RBC"]["count"] == len(truth)
    assert result["confusion"]["matrix"][3][0] == len(truth)


def test_detections_in_empty_images_lower_precision():
    labels = np.zeros(4, np.int64)
    good = (found(CELLS, labels, [0.9, 0.8, 0.7, 0.6]), Truth(CELLS, labels))
    bare = (found(CELLS, labels, [0.95, 0.85, 0.75, 0.65]), Truth(CELLS[:0], labels[:0]))
    result = tally(good, bare).measure()
    assert result["images"] == 2
    assert result["per_class"]["RBC"]["AP50"] < 0.6
    assert result["confusion"]["matrix"][0] == [4, 0, 0, 4]


def test_confusion_is_found_by_true():
    detections = found(CELLS[:3], [1, 0, 2], [0.9, 0.8, 0.1])
    total = tally((detections, Truth(CELLS[[0, 3]], np.array([0, 2]))))
    confusion = total.confusion(0.25)
    assert confusion["labels"] == [*NAMES, "background"]
    expected = np.zeros((4, 4))
    expected[1, 0] = 1  # a red cell taken for a white one
    expected[0, 3] = 1  # a red cell where there is nothing
    expected[3, 2] = 1  # a missed platelet
    assert np.array_equal(confusion["matrix"], expected)


@pytest.mark.parametrize("confidence", [0.001, 0.02, 0.25, 0.8])
def test_confusion_and_matches_count_the_same_detections(confidence):
    labels = np.zeros(4, np.int64)
    detections = found(CELLS, labels, [0.8, 0.25, 0.02, 0.011])
    total = tally((detections, Truth(CELLS, labels)))
    (one,) = total.matches(confidence)
    matrix = np.array(total.confusion(confidence)["matrix"])
    assert len(one.true) == matrix[0, 0] == (detections.scores >= np.float32(confidence)).sum()
    assert len(one.missed) == matrix[3, 0]


def test_matches_are_consistent():
    random = np.random.default_rng(0)
    truth = random.uniform(0, 300, (60, 2))
    truth = np.hstack([truth, truth + 20])
    labels = random.integers(0, 3, 60)
    kept = random.permutation(60)[:40]
    moved = np.vstack([truth[kept] + random.normal(0, 2, (40, 4)), truth[:9] + 500])
    detections = found(moved, np.r_[labels[kept], labels[:9]], random.uniform(0.1, 1, 49))
    result = match(detections, Truth(truth, labels, "a.png"))
    assert sorted([*result.true, *result.false]) == list(range(49))
    assert sorted([*result.partner, *result.missed]) == list(range(60))
    assert (detections.labels[result.true] == labels[result.partner]).all()
    assert 30 < len(result.true) <= 40
    assert result.name == "a.png"


def test_threshold_is_where_f1_is_highest():
    random = np.random.default_rng(1)
    truth = np.array(
        [[30 * i, 30 * j, 30 * i + 20, 30 * j + 20] for i in range(9) for j in range(9)]
    )
    right = random.random(81) < 0.7
    scores = np.where(right, random.uniform(0.3, 1, 81), random.uniform(0.05, 0.5, 81))
    boxes = np.where(right[:, None], truth, truth + 1000)
    labels = np.zeros(81, np.int64)
    result = tally((found(boxes, labels, scores), Truth(truth.astype(float), labels))).measure()
    mine, curve = result["per_class"]["RBC"], result["curves"]["RBC"]
    best = int(np.argmax(curve["F1_at"]))
    assert mine["threshold"] == curve["confidence"][best]
    assert mine["F1"] == max(curve["F1_at"])
    assert 0.25 < mine["threshold"] < 0.55
    total = tally((found(boxes, labels, scores), Truth(truth.astype(float), labels)))
    (at,) = total.matches(mine["threshold"])
    precision = len(at.true) / (len(at.true) + len(at.false))
    assert precision == pytest.approx(mine["precision"], abs=0.03)
    assert len(at.true) / 81 == pytest.approx(mine["recall"], abs=0.03)


def test_classes_are_matched_by_name():
    assert class_numbers(["wbc", "RBC"], NAMES).tolist() == [1, 0]
    assert class_numbers(["a", "A"], ["A", "a"]).tolist() == [1, 0]
    with pytest.raises(ValueError, match="does not know the classes ring, spot; it knows RBC"):
        class_numbers(["ring", "RBC", "spot"], NAMES)
    with pytest.raises(ValueError, match="the class ring; "):
        class_numbers(["ring"], NAMES)


SIDE = 128


@pytest.fixture(scope="module")
def model():
    """An untrained network with scores from 0 to 1, so that average precision has work to do."""
    torch.manual_seed(1)
    network = StainDetectionModel(dict(MODEL), nc=3, imgsz=SIDE)
    network.fit_mix()
    network.names = dict(enumerate(NAMES))
    enlivened(network, blood_smear((SIDE, SIDE), seed=9, cell_diameter=32.0).image, -10.0)
    with torch.no_grad():
        for branch in network.model[-1].cv2:  # boxes inside the image: only ours are clipped to it
            branch[-1].bias.view(4, -1)[:, :2] = 14.0
    info = {"classes": list(NAMES), "image_size": SIDE, "object_sizes": {}, "pixel_size": None}
    return Detector(network, info)


@pytest.fixture(scope="module")
def data(model, tmp_path_factory):
    """Smears whose annotations are some of what the network finds in them, a little moved."""
    folder, random = tmp_path_factory.mktemp("data"), np.random.default_rng(0)
    for name in ("images", "labels"):
        (folder / name / "val").mkdir(parents=True)
    for seed in range(5):
        image = blood_smear((SIDE, SIDE), seed=seed, cell_diameter=32.0).image
        Image.fromarray(image).save(folder / "images" / "val" / f"{seed}.png")
        everything = model.detect(image, confidence=0.02)
        some = everything[random.random(len(everything)) < 0.5] if seed else everything[:0]
        moved = np.clip(some.xyxy + random.normal(0, 0.4, some.xyxy.shape), 0, SIDE)
        rows = np.column_stack([(some.labels + 1) % 3, to_centres(moved, (SIDE, SIDE))])
        text = folder / "labels" / "val" / f"{seed}.txt"
        np.savetxt(text, rows, fmt=["%d"] + ["%.6f"] * 4)
    path = folder / "data.yaml"
    # Numbered otherwise than in the network.
    path.write_text("train: images/val\nval: images/val\nnames: [Platelets, RBC, WBC]\n")
    return path


def ultralytics(network, data, folder, **settings):
    """Ultralytics' own validation of a network on the same files."""
    names = {0: "Platelets", 1: "RBC", 2: "WBC"}
    network = copy.deepcopy(network)
    network.names = names
    order = [2, 0, 1]  # the network's channels in the data's order
    with torch.no_grad():
        for branch in network.model[-1].cv3:
            branch[-1].weight.copy_(branch[-1].weight[order])
            branch[-1].bias.copy_(branch[-1].bias[order])
    fixed = {"mode": "val", "split": "val", "imgsz": SIDE, "rect": False, "batch": 2, "workers": 0}
    quiet = {"plots": False, "verbose": False, "device": "cpu", "model": "x"}
    validator = DetectionValidator(
        save_dir=folder, args={**fixed, **quiet, "data": str(data), **settings}
    )
    validator(model=network)
    return validator.metrics.box


@pytest.mark.parametrize(("several", "tolerance"), [(False, 2e-3), (True, 0.1)])
def test_agrees_with_ultralytics_on_its_own_ground(
    model, data, tmp_path, monkeypatch, several, tolerance
):
    """On images of the training size. Theirs lets a box have several classes, ours has the best.

    That is the only difference here, and large in an untrained network: three boxes of 78.
    """
    if not several:
        thin = sys.modules[DetectionValidator.__module__].nms
        once = partial_without(thin.non_max_suppression, "multi_label")
        monkeypatch.setattr(thin, "non_max_suppression", once)
    ours = evaluate(model, data)
    theirs = ultralytics(model.network, data, tmp_path, conf=0.01, max_det=10_000)
    assert 0.3 < ours["mAP50"] < 0.9
    assert ours["images"] == 5
    assert ours["mAP50"] == pytest.approx(float(theirs.map50), abs=tolerance)
    assert ours["mAP50-95"] == pytest.approx(float(theirs.map), abs=tolerance)
    per_class = dict(zip(("Platelets", "RBC", "WBC"), theirs.ap50, strict=True))
    for name, expected in per_class.items():
        assert ours["per_class"][name]["AP50"] == pytest.approx(expected, abs=tolerance)


def partial_without(function, name):
    """The function without one of its keyword arguments."""

    def without(*args, **settings):
        settings.pop(name)
        return function(*args, **settings)

    return without


def test_matches_of_a_dataset_know_their_images(model, data):
    seen = []
    total = collect(model, read_dataset(data), report=seen.append)
    matches = total.matches(0.1)
    assert [Path(m.name).stem for m in matches] == [str(k) for k in range(5)]
    assert len(matches[0].true) == 0
    assert sum(len(m.true) for m in matches) > 10
    assert [p.fraction for p in seen] == sorted(p.fraction for p in seen)
    assert seen[-1].fraction == 1


def test_unknown_classes_and_empty_splits_are_refused(model, data, tmp_path):
    other = data.with_name("other.yaml")
    other.write_text("val: images/val\nnames: [ring, RBC, WBC]\n")
    with pytest.raises(ValueError, match="does not know the class ring"):
        evaluate(model, other)
    with pytest.raises(ValueError, match="test"):
        evaluate(model, data, split="test")


@pytest.mark.parametrize(
    ("curve", "index"),
    [
        ([0.1, 0.5, 0.2], 1),
        ([1.0, 1.0, 1.0, 0.0], 1),
        ([0.0, 0.7, 0.7, 0.7, 0.2, 0.7], 2),
        ([0.3], 0),
    ],
)
def test_best_threshold_is_amid_the_best_ones(curve, index):
    assert _middle_of_maximum(np.array(curve)) == index
