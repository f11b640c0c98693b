"""Metrics of classifiers against scikit-learn, and a classifier on folders of crops."""

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import sklearn.metrics as sk
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

import napari_beerlanet as nb
from discs import boxes_of, disc_detector, draw
from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.classes import wilson_interval
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.evaluation.classification import (
    classification_metrics,
    expected_calibration_error,
    locate_cells,
    match_types,
    relaxed_accuracy,
    roc_auc,
)
from napari_beerlanet.core.formats import read_detections, write_detections
from napari_beerlanet.core.formats.class_folders import (
    CropDataset,
    LabelledCrop,
    check_crop_dataset,
    read_crop_dataset,
    with_validation,
)
from napari_beerlanet.core.images.files import read_image
from tinyclasses import TYPES, cell, tiny_classifier, write_classes
from tinydata import write_smears

NAMES = ["early ring", "middle ring", "late ring", "gametocyte"]


def made(seed, n=200, k=4, absent=()):
    """Labels and probabilities that are often right."""
    random = np.random.default_rng(seed)
    true = random.choice([label for label in range(k) if label not in absent], n)
    scores = random.dirichlet(np.ones(k), n)
    scores[np.arange(n), true] += random.random(n)
    return true, scores / scores.sum(1, keepdims=True)


@pytest.mark.parametrize("seed", range(4))
def test_metrics_are_scikit_learns(seed):
    true, scores = made(seed, absent=(2,) if seed == 3 else ())
    labels = scores.argmax(1)
    found = classification_metrics(true, scores, NAMES)
    assert found["accuracy"] == pytest.approx(sk.accuracy_score(true, labels))
    occurring = [label for label in range(4) if (true == label).any()]
    recalls = sk.recall_score(true, labels, labels=occurring, average=None)
    assert found["balanced_accuracy"] == pytest.approx(recalls.mean())
    if seed < 3:
        assert found["balanced_accuracy"] == pytest.approx(sk.balanced_accuracy_score(true, labels))
    expected = sk.precision_recall_fscore_support(true, labels, labels=range(4), zero_division=0.0)
    for row, name in zip(np.transpose(expected), NAMES, strict=True):
        mine = found["per_class"][name]
        values = [mine[key] for key in ("precision", "recall", "F1", "count")]
        np.testing.assert_allclose(values, row)
    np.testing.assert_array_equal(
        np.array(found["confusion"]["matrix"]).T, sk.confusion_matrix(true, labels, labels=range(4))
    )
    assert found["confusion"]["labels"] == NAMES
    assert found["roc_auc"] is None
    assert found["relaxed_accuracy"] == found["accuracy"]
    assert found["crops"] == 200


@given(st.lists(st.tuples(st.booleans(), st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9])), min_size=2))
def test_roc_auc_is_scikit_learns_with_ties(pairs):
    positive, scores = (np.array(part) for part in zip(*pairs, strict=True))
    if positive.all() or not positive.any():
        assert roc_auc(positive, scores) is None
        return
    assert roc_auc(positive, scores) == pytest.approx(sk.roc_auc_score(positive, scores))


def test_roc_auc_of_two_classes_is_in_the_metrics():
    true, scores = made(1, k=2)
    found = classification_metrics(true, scores, ["uninfected", "infected"])
    assert found["roc_auc"] == pytest.approx(sk.roc_auc_score(true, scores[:, 1]))


@pytest.mark.parametrize("seed", range(3))
def test_relaxed_accuracy_is_one_step_in_an_ordered_group(seed):
    true, scores = made(seed)
    labels = scores.argmax(1)
    right = [
        t == p or (t < 3 and p < 3 and abs(t - p) == 1) for t, p in zip(true, labels, strict=True)
    ]
    found = classification_metrics(true, scores, NAMES, ordered=[NAMES[:3]])
    assert found["relaxed_accuracy"] == pytest.approx(np.mean(right))
    assert found["relaxed_accuracy"] > found["accuracy"]
    # The same through scikit-learn: predictions one step away are taken for right.
    merged = np.where(right, true, labels)
    assert found["relaxed_accuracy"] == pytest.approx(sk.accuracy_score(true, merged))


def test_order_within_a_group_is_as_given():
    true, labels = np.array([0, 0]), np.array([1, 2])
    names = ["a", "b", "c"]
    assert relaxed_accuracy(true, labels, names, [["a", "b", "c"]]) == 0.5
    assert relaxed_accuracy(true, labels, names, [["b", "a", "c"]]) == 1.0
    assert relaxed_accuracy(true, labels, names, []) == 0.0


@pytest.mark.parametrize(
    ("ordered", "words"),
    [
        ([["a", "x"]], "'x', which is no class"),
        ([["a", "b"], ["b", "c"]], "'b' twice"),
        (["a", "b"], "'a' is no group"),
    ],
)
def test_groups_that_do_not_fit(ordered, words):
    with pytest.raises(ValueError, match=words):
        relaxed_accuracy(np.array([0]), np.array([0]), ["a", "b", "c"], ordered)


@pytest.mark.parametrize("seed", range(3))
def test_calibration_error_bin_by_bin(seed):
    true, scores = made(seed)
    confidence, right = scores.max(1), scores.argmax(1) == true
    expected = 0.0
    for k in range(15):
        here = (confidence > k / 15) & (confidence <= (k + 1) / 15)
        if here.any():
            expected += here.mean() * abs(right[here].mean() - confidence[here].mean())
    assert expected_calibration_error(true, scores) == pytest.approx(expected)
    assert expected_calibration_error(np.empty(0, int), np.empty((0, 2))) is None


def test_a_calibrated_classifier_has_hardly_any_error():
    random = np.random.default_rng(0)
    p = random.uniform(0.5, 1, 50_000)
    true = (random.random(50_000) > p).astype(int)
    assert expected_calibration_error(true, np.stack([p, 1 - p], 1)) < 0.01
    sure = np.stack([np.full(50_000, 0.999), np.full(50_000, 0.001)], 1)
    assert expected_calibration_error(true, sure) > 0.2


def test_nothing_to_measure():
    found = classification_metrics(np.empty(0, int), np.empty((0, 2)), ["a", "b"])
    assert (found["accuracy"], found["crops"], found["roc_auc"]) == (0.0, 0, None)


# --- on folders ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def clf():
    return tiny_classifier()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_classes(tmp_path_factory.mktemp("types"), 3)


def test_evaluate_is_the_metrics_of_what_classify_gives(clf, folder):
    found = nb.evaluate(clf, folder)
    crops = [cell(kind, seed) for kind in TYPES for seed in range(3)]
    expected = classification_metrics(np.repeat([0, 1], 3), clf.classify(crops).scores, TYPES)
    assert found == {**expected, "split": None, "images": 6, "notes": []}
    assert {"accuracy", "balanced_accuracy", "relaxed_accuracy", "confusion", "per_class"} <= set(
        found
    )


def test_the_layout_of_ultralytics(clf, tmp_path):
    write_classes(tmp_path / "train", 2)
    write_classes(tmp_path / "val", 3, first=50)
    assert nb.evaluate(clf, tmp_path)["crops"] == 6
    assert nb.evaluate(clf, tmp_path, split="train")["crops"] == 4
    assert nb.evaluate(clf, tmp_path, split="train")["split"] == "train"
    with pytest.raises(DataError, match="no split `test`; there is train, val"):
        nb.evaluate(clf, tmp_path, split="test")


def test_boxes_of_a_yolo_dataset(tmp_path):
    data = write_smears(tmp_path, train=1, val=2, side=64)
    clf = tiny_classifier(names=["RBC", "WBC", "Platelets"], fit="image")
    found = nb.evaluate(clf, data)
    counted = sum(
        len(file.read_text().splitlines()) for file in (tmp_path / "labels" / "val").iterdir()
    )
    assert found["crops"] == counted > 2
    assert nb.evaluate(clf, tmp_path) == found


def test_fewer_classes_than_the_model_and_other_spelling(clf, folder, tmp_path):
    shutil.copytree(folder / "pale", tmp_path / "Pale")
    found = nb.evaluate(clf, tmp_path)
    assert found["per_class"]["dark"]["count"] == 0
    assert found["balanced_accuracy"] == found["per_class"]["pale"]["recall"]


def test_classes_that_the_model_does_not_know(clf, folder, tmp_path):
    shutil.copytree(folder / "pale", tmp_path / "basophil")
    with pytest.raises(ValueError, match="does not know the class basophil; it knows dark, pale"):
        nb.evaluate(clf, tmp_path)


def test_corrupt_images_are_named(clf, folder, tmp_path):
    shutil.copytree(folder, tmp_path / "data")
    (tmp_path / "data" / "pale" / "broken.png").write_bytes(b"no picture")
    with pytest.raises(DataError, match=r"broken\.png"):
        nb.evaluate(clf, tmp_path / "data")


def test_folders_that_are_no_dataset(clf, tmp_path):
    with pytest.raises(DataError, match="there is no such folder"):
        nb.evaluate(clf, tmp_path / "none")
    with pytest.raises(DataError, match="no folders in it"):
        nb.evaluate(clf, tmp_path)
    (tmp_path / "train").mkdir()
    with pytest.raises(DataError, match="no folders of classes"):
        nb.evaluate(clf, tmp_path)
    (tmp_path / "file.txt").write_text("x")
    with pytest.raises(DataError, match="not a folder"):
        nb.evaluate(clf, tmp_path / "file.txt")


def crops_of(names, boxes=0):
    """A dataset of two classes in turn: a crop per file, or so many boxes in each image."""
    root = Path("smears")
    if not boxes:
        items = [
            LabelledCrop(root / TYPES[k % 2] / f"{name}.png", k % 2) for k, name in enumerate(names)
        ]
    else:
        items = [
            LabelledCrop(root / f"{name}.png", k % 2, (0.1 + k / 10, 0.5, 0.1, 0.1))
            for name in names
            for k in range(boxes)
        ]
    return CropDataset(root, list(TYPES), {"all": items})


crop_names = st.lists(st.integers(0, 10**6), min_size=8, max_size=40, unique=True)


@given(crop_names, st.integers(1, 20), st.sampled_from([0, 4]), st.integers(0, 5))
def test_nothing_that_was_trained_on_validates_after_more_is_added(names, first, boxes, seed):
    before, after = (
        with_validation(crops_of(part, boxes), 0.2, seed).splits
        for part in (names[: max(first, 4)], names)
    )
    assert not set(before["train"]) & set(after["val"])
    assert len(after["train"]) + len(after["val"]) == len(names) * (boxes or 1)
    assert {item.label for item in after["val"]} == {0, 1}, "small classes validate, too"
    images = [{item.image for item in after[split]} for split in ("train", "val")]
    assert not images[0] & images[1]


def test_about_the_asked_part_validates_wherever_the_folder_lies_and_whatever_its_class():
    dataset = crops_of(range(1000))
    halves = with_validation(dataset, 0.2, 3)
    assert 160 < len(halves.splits["val"]) < 240
    moved = [
        replace(item, image=Path("/elsewhere") / TYPES[1 - item.label] / item.image.name)
        for item in dataset.splits["all"]
    ]
    moved = [replace(item, label=1 - item.label) for item in moved]
    again = with_validation(CropDataset(Path("/elsewhere"), list(TYPES), {"all": moved}), 0.2, 3)
    held = [{item.image.name for item in one.splits["val"]} for one in (halves, again)]
    assert held[0] == held[1]


def test_a_part_of_each_class_is_held_out(folder):
    whole = read_crop_dataset(folder)
    halves = with_validation(whole, 0.34, seed=0)
    everything = {item.image for split in halves.splits.values() for item in split}
    assert everything == {item.image for item in whole.splits["all"]}
    assert all(halves.counts("val").values())
    assert any(
        "a part of each class was held out" in note
        for note in check_crop_dataset(halves, ("train", "val"))
    )


def test_cells_of_one_image_are_in_one_split_where_there_are_more_images(annotated):
    (annotated / "field0.detections.csv").unlink()
    Image.fromarray(draw((70, 100), [(30, 30, 20)])).save(annotated / "field0.png")
    drawn = Annotations([[4, 4, 25, 25]], [0], ["other"], image_shape=(70, 100))
    write_detections(annotated / "field0.detections.csv", drawn.to_detections())
    halves = with_validation(read_crop_dataset(annotated), 0.2, seed=0)
    notes = check_crop_dataset(halves, ("train", "val"), least=0)
    assert any("a part of the images was held out" in note for note in notes)
    sides = [{item.image.name for item in halves.splits[s]} for s in ("train", "val")]
    assert sorted(map(len, sides)) == [1, 1]
    assert sides[0] != sides[1]


def test_cells_of_an_only_image_train_and_validate_and_it_is_told(annotated):
    (annotated / "field1.png").unlink()
    (annotated / "field1.geojson").unlink()
    halves = with_validation(read_crop_dataset(annotated), 0.34, seed=0)
    notes = check_crop_dataset(halves, ("train", "val"), least=0)
    assert len(halves.splits["train"]) + len(halves.splits["val"]) == 5
    assert all(halves.splits.values())
    assert "train and val share 1 image, so metrics will be optimistic." in notes


def test_test_stands_in_for_val(tmp_path):
    write_classes(tmp_path / "train", 2)
    write_classes(tmp_path / "test", 1, first=9)
    made_ = with_validation(read_crop_dataset(tmp_path), 0.2, 0)
    assert made_.counts("val") == {"dark": 1, "pale": 1}


def test_the_same_image_in_both_splits_is_refused(tmp_path):
    write_classes(tmp_path / "train", 2)
    write_classes(tmp_path / "val", 1)
    dataset = read_crop_dataset(tmp_path)
    for item in dataset.splits["val"]:
        Image.open(item.image).save(item.image.with_name("other.png"))
        item.image.unlink()
    with pytest.raises(DataError, match="the same image as"):
        check_crop_dataset(read_crop_dataset(tmp_path), ("train", "val"))


def test_hidden_folders_are_no_classes(tmp_path):
    write_classes(tmp_path, 1)
    (tmp_path / ".cache").mkdir()
    assert read_crop_dataset(tmp_path).names == TYPES


# --- recentred by a detector ---------------------------------------------------------------------


@pytest.fixture(scope="module")
def off_centre(tmp_path_factory):
    """A crop whose disc is not quite in its middle, and one without any."""
    folder = tmp_path_factory.mktemp("discs")
    disc = (70.0, 52.0, 40.0)
    Image.fromarray(draw((120, 120), [disc, (15, 100, 25)])).save(folder / "disc.png")
    Image.fromarray(draw((120, 120), [])).save(folder / "empty.png")
    return folder, disc


def test_crops_are_recentred_by_the_box_in_their_middle(off_centre):
    folder, disc = off_centre
    items = [LabelledCrop(folder / name, 0) for name in ("disc.png", "empty.png")]
    found, none = locate_cells(items, disc_detector(), 0.7)
    np.testing.assert_allclose(found.box((120, 120)), boxes_of([disc])[0], atol=3)
    assert none.cxcywh == (0.5, 0.5, 0.7, 0.7)
    assert locate_cells([found], disc_detector(), 0.2) == [found], "a box is kept"
    with pytest.raises(ValueError, match="has no class 'WBCs'; it has RBC"):
        locate_cells(items, disc_detector(), 0.7, "WBCs")
    assert locate_cells(items[:1], disc_detector(), 0.7, "WBC")[0].cxcywh == (0.5, 0.5, 0.7, 0.7)


def test_crops_of_a_laboratory_share_their_object_size(off_centre):
    """The second crop is first tried at the size of the first, then at that size alone."""
    folder, _ = off_centre
    detector, asked = disc_detector(), []
    detect = detector.detect

    def listening(pixels, **settings):
        asked.append((settings.get("size_hint"), settings.get("object_size", "auto")))
        return detect(pixels, **settings)

    detector.detect = listening
    names = ("disc.png", "empty.png")
    locate_cells([LabelledCrop(folder / name, 0) for name in names], detector, 0.7)
    size = asked[1][0]
    assert size == pytest.approx(40, rel=0.5)
    assert asked == [(None, "auto"), (size, "auto"), (None, size)]


def test_evaluate_with_a_detector_is_evaluate_of_the_boxes(clf, off_centre, tmp_path):
    folder, _ = off_centre
    (tmp_path / "dark").mkdir()
    shutil.copy(folder / "disc.png", tmp_path / "dark")
    found = nb.evaluate(clf, tmp_path, detector=disc_detector())
    box = locate_cells([LabelledCrop(folder / "disc.png", 0)], disc_detector(), 0.7)[0]
    pixels = np.asarray(Image.open(folder / "disc.png"))
    expected = clf.classify(pixels, boxes=[box.box((120, 120))])
    assert found["accuracy"] == float(expected.labels[0] == 0)
    assert found["ece"] != nb.evaluate(clf, tmp_path)["ece"]


# --- images with files of annotations ------------------------------------------------------------


@pytest.fixture
def annotated(tmp_path):
    """Two images of six cells each; the cells of the first have types, but for one."""
    for number in range(2):
        image = np.full((70, 100, 3), (228, 222, 232), np.uint8)
        boxes, types = [], []
        for k in range(6):
            y, x = 4 + 33 * (k // 3), 3 + 33 * (k % 3)
            image[y : y + 30, x : x + 30] = cell(TYPES[k % 2], k)
            boxes.append([x + 4.5, y + 4.5, x + 25.5, y + 25.5])
            types.append(TYPES[k % 2] if number == 0 and k else "")
        Image.fromarray(image).save(tmp_path / f"field{number}.png")
        drawn = Annotations(boxes, [0] * 6, ["cell"], types=types, image_shape=(70, 100))
        ending = ".geojson" if number else ".detections.csv"
        write_detections(tmp_path / f"field{number}{ending}", drawn.to_detections())
    return tmp_path


def test_a_folder_of_images_with_annotated_types(annotated):
    clf = tiny_classifier()
    result = nb.evaluate(clf, annotated)
    pixels = read_image(annotated / "field0.png").pixels
    boxes = read_detections(annotated / "field0.detections.csv")
    typed = boxes[[bool(name) for name in boxes.columns["type"]]]
    labels = clf.classify(pixels, typed).labels
    true = [TYPES.index(name) for name in typed.columns["type"]]
    assert result["crops"] == 5
    assert result["accuracy"] == pytest.approx(np.mean(labels == true))
    assert (result["images"], result["split"]) == (1, None)
    assert "7 boxes have no type and are left out." in result["notes"]


def test_a_folder_of_images_without_types_or_annotations(annotated, tmp_path):
    (annotated / "field0.detections.csv").unlink()
    with pytest.raises(ValueError, match="does not know the class cell; it knows dark, pale"):
        nb.evaluate(tiny_classifier(), annotated)
    (annotated / "field1.geojson").unlink()
    with pytest.raises(DataError, match="annotations with types beside their images"):
        nb.evaluate(tiny_classifier(), annotated)


def test_a_picture_beside_folders_of_classes_is_none_of_them(tmp_path):
    write_classes(tmp_path, 1)
    Image.fromarray(cell("dark", 0)).save(tmp_path / "overview.png")
    assert read_crop_dataset(tmp_path).names == TYPES


# --- types of boxes ------------------------------------------------------------------------------


def test_types_of_matched_boxes_are_compared():
    boxes = np.array([[20 * k, 0, 20 * k + 10, 10] for k in range(6)], float)
    p = np.array([[0.9, 0.1], [0.2, 0.8], [0.6, 0.4], [0.3, 0.7]], np.float32)
    found = Detections(boxes[:5], [0] * 5, np.linspace(0.9, 0.5, 5), ["RBC"])
    found = found.with_types(["ring", "late"], p, rows=np.array([0, 1, 2, 4]))
    truth = Annotations(
        boxes[[0, 1, 2, 3, 5]] + 1, [0] * 5, ["red"], types=["ring", "ring", "", "late", "late"]
    )
    matches = match_types(found, truth)
    assert matches.names == ["ring", "late"]
    assert matches.confusion.tolist() == [
        [1, 0, 1],  # detected as ring: one is right, one is annotated without a type
        [1, 0, 1],  # as late: one is a ring, one is not annotated
        [0, 2, 0],  # one was found and not classified, one was not found
    ]
    metrics = matches.metrics
    assert (metrics["crops"], metrics["accuracy"]) == (2, 0.5)
    assert metrics["accuracy_interval"] == pytest.approx(wilson_interval(1, 2))
    assert metrics["per_class"]["ring"]["recall_interval"] == pytest.approx(wilson_interval(1, 2))
    assert metrics["per_class"]["late"]["recall_interval"] is None
    assert metrics["per_class"]["late"]["predicted"] == 1
    assert match_types(found, truth.to_detections()).confusion.tolist() == (
        matches.confusion.tolist()
    )
    assert match_types(found, Annotations(boxes, [0] * 6, ["red"])) is None


def test_a_corrected_type_counts_and_not_what_the_classifier_said():
    boxes = np.array([[0, 0, 9, 9.0]])
    found = Detections(boxes, [0], [0.9], ["RBC"])
    found = found.with_types(["ring", "late"], np.array([[0.9, 0.1]], np.float32))
    found.columns["type"][0] = "late"
    truth = Annotations(boxes, [0], ["RBC"], types=["late"])
    assert match_types(found, truth).metrics["accuracy"] == 1
