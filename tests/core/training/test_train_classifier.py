"""Training of classifiers: it learns, is told as the detector's, and resumes to the bit."""

import csv
import json
import math
import shutil
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

import napari_beerlanet as nb
from napari_beerlanet.core.checkpoints.checkpoint import checkpoint_hash, load_classifier
from napari_beerlanet.core.classification.crops import cut_square
from napari_beerlanet.core.classification.network import ClassificationNetwork
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import DataError, FileError, seeded_fraction
from napari_beerlanet.core.formats.class_folders import (
    CropDataset,
    LabelledCrop,
    check_crop_dataset,
    read_crop_dataset,
    with_validation,
)
from napari_beerlanet.core.formats.dataset import read_dataset
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.training.estimate import summarise_crops
from napari_beerlanet.core.training.runs import inspect_run
from napari_beerlanet.core.training.train_classifier import (
    ClassifierTrainSettings,
    train_classifier,
)
from napari_beerlanet.core.training.trainer import classification
from napari_beerlanet.core.training.trainer.classification import (
    Augmentation,
    ClassifierTrainer,
    TrainingCrops,
    balanced_order,
    cut_turned,
    fit_temperature,
    parameter_groups,
    within_error,
)
from napari_beerlanet.core.training.trainer.data import StainJitter
from projects import fill
from tinyclasses import SMALL, TYPES, cell, tiny_backbone, write_classes
from tinydata import write_smears

TINY = {"input_size": 24, "components": 3, "iterations": 3, "batch": 6, "device": "cpu"}
QUICK = {**TINY, "epochs": 2, "learning_rate": 1e-2}
WHOLE = {**QUICK, "epochs": 3, "averaging": 0.8, "head_factor": 3.0, "weight_decay": 0.01}
FILES = {"run.json", "progress.jsonl", "results.csv", "state.pt"}
FILES |= {"best.safetensors", "last.safetensors", ".lock"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Six crops of each type that train, and two that are held out."""
    return write_classes(tmp_path_factory.mktemp("types"), 8, first=19)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run of three epochs that nobody disturbed, and what it returned."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, train_classifier(data, folder, SMALL, **WHOLE)


def events(folder):
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def kinds(folder):
    return [event["event"] for event in events(folder) if event["event"] != "warning"]


def results(folder):
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def weights(path, backbone=None):
    return load_classifier(path, "cpu", backbone=backbone).network.state_dict()


def assert_same(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


# --- a run ---------------------------------------------------------------------------------------


def test_files_and_events_are_those_of_the_detectors_runs(whole):
    folder, _ = whole
    assert {path.name for path in folder.iterdir()} == FILES
    assert kinds(folder) == ["start", *["batch", "batch", "epoch"] * 3, "end"]
    start = events(folder)[1]
    assert (start["event"], start["task"], start["classes"]) == ("start", "classify", TYPES)
    assert start["images"] == {"train": 12, "val": 4}
    batch = next(event for event in events(folder) if event["event"] == "batch")
    assert set(batch["losses"]) == {"loss"}
    assert (batch["epoch"], batch["batches"], batch["steps"]) == (1, 2, 6)
    epoch = next(event for event in events(folder) if event["event"] == "epoch")
    assert {"accuracy", "balanced_accuracy", "per_class", "ece"} <= set(epoch["metrics"])
    assert [row["epoch"] for row in results(folder)] == ["1", "2", "3"]
    run = inspect_run(folder)
    assert (run.state, run.epoch, run.epochs) == (RunState.FINISHED, 3, 3)
    warning = events(folder)[0]
    assert "held out" in warning["message"]


def test_boxes_are_spoken_of_where_they_are_learned_from(data, tmp_path):
    """And not of folders per class."""
    told = "No cell has a type, so the classes of the boxes are learned."
    assert told not in summarise_crops(data).notes
    assert told in summarise_crops(write_smears(tmp_path, train=3, val=2, side=64)).notes


def test_the_checkpoint_tells_where_it_comes_from(whole):
    folder, clf = whole
    info = clf.info
    assert (info["kind"], info["backbone"], info["classes"]) == ("classifier", SMALL, TYPES)
    record = info["training"]
    assert record["crops"]["train"] == {"dark": 6, "pale": 6}
    assert record["settings"]["learning_rate"] == 1e-2
    assert record["parent"] is None
    assert "--task=classify" in record["command"]
    assert str(folder.parent.parent) not in json.dumps(record)
    assert info["stain_seen"]["spectra"]
    assert 0.05 <= info["temperature"] <= 20
    assert record["metrics"]["crops"] == 4


def test_it_learns(data, tmp_path):
    clf = train_classifier(data, tmp_path / "run", tiny_backbone(), **{**QUICK, "epochs": 16})
    fresh = write_classes(tmp_path / "fresh", 6, first=100)
    found = nb.evaluate(clf, fresh)
    assert found["balanced_accuracy"] >= 0.9, found["confusion"]
    losses = [float(row["train/loss"]) for row in results(tmp_path / "run")]
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize(
    "options",
    [
        {"front_end": "none"},
        {"front_end": "grey", "balanced": False},
        {"normalize": True, "beside_rgb": True, "denoise": True},
        {"jitter": False, "scale_jitter": 0.0, "blur_jitter": 0.0, "standardize": False},
    ],
    ids=str,
)
def test_every_option_trains(data, tmp_path, options):
    clf = train_classifier(data, tmp_path, tiny_backbone(), **{**QUICK, "epochs": 1, **options})
    for name, value in options.items():
        if name in ClassifierSettings.model_fields:
            assert clf.info[name] == value
    assert len(clf.classify([cell("dark", 0)])) == 1


def test_boxes_of_an_annotated_dataset(tmp_path):
    """As a project has them; stains of the whole image."""
    data = write_smears(tmp_path / "smears", train=4, val=2, side=64)
    text = data.read_text().replace("Platelets]", "Platelets, nobody]")
    data.write_text(text)
    clf = train_classifier(data, tmp_path / "run", SMALL, **{**QUICK, "epochs": 1, "fit": "image"})
    assert {"RBC", "WBC"} <= set(clf.classes) <= {"RBC", "WBC", "Platelets"}
    assert any("no boxes of" in str(e) and "nobody" in str(e) for e in events(tmp_path / "run"))
    assert clf.info["fit"] == "image"
    assert clf.info["training"]["images"]["train"] > 4


def test_boxes_of_a_project(tmp_path):
    """What was annotated in the viewer, split as the project splits it."""
    with Project.create(tmp_path / "project", ["RBC", "WBC", "Platelets"]) as project:
        fill(project, range(4))
    expected = read_dataset(tmp_path / "project")
    clf = train_classifier(tmp_path / "project", tmp_path / "run", SMALL, **{**QUICK, "epochs": 1})
    boxes = {split: sum(len(i.labels) for i in items) for split, items in expected.splits.items()}
    assert clf.info["training"]["images"] == boxes


def test_crops_recentred_by_a_detector(data, tmp_path):
    options = {**QUICK, "epochs": 1, "detector": "blood-cells", "fit": "image"}
    options["object_class"] = "WBC"
    clf = train_classifier(data, tmp_path / "run", SMALL, **options)
    assert clf.info["training"]["settings"]["detector"] == "blood-cells"
    assert clf.info["applies_to"] == ["WBC"]
    plain = train_classifier(data, tmp_path / "plain", SMALL, **{**options, "detector": None})
    assert clf.info["training"]["data_hash"] != plain.info["training"]["data_hash"]


def test_priors_are_those_of_the_names(data, tmp_path):
    options = {**QUICK, "epochs": 1, "prior": {"pale": 3.0}}
    clf = train_classifier(data, tmp_path / "a", SMALL, **options)
    assert clf.info["prior"] == [1.0, 3.0]
    again = train_classifier(data, tmp_path / "b", model=clf, epochs=1, batch=6, device="cpu")
    assert again.info["prior"] == [1.0, 3.0], "what is learned further keeps it"


def test_the_layout_of_ultralytics(data, tmp_path):
    write_classes(tmp_path / "data" / "train", 4)
    write_classes(tmp_path / "data" / "val", 2, first=50)
    clf = train_classifier(
        tmp_path / "data", tmp_path / "run", tiny_backbone(), **{**QUICK, "epochs": 1}
    )
    assert clf.info["training"]["images"] == {"train": 8, "val": 4}
    assert not any("held out" in str(event) for event in events(tmp_path / "run"))


def test_random_numbers_of_the_caller_stay(data, tmp_path):
    torch.manual_seed(5)
    expected = torch.rand(2)
    torch.manual_seed(5)
    train_classifier(data, tmp_path, SMALL, **{**QUICK, "epochs": 1})
    assert torch.equal(torch.rand(2), expected)


# --- starting points -----------------------------------------------------------------------------


def test_from_scratch_as_in_the_paper():
    settings = ClassifierTrainSettings().resolved(3000)
    assert (settings.epochs, settings.batch, settings.learning_rate) == (20, 128, 1e-4)
    assert (settings.share, settings.keep_statistics, settings.cosine) == (1.0, False, False)
    assert (settings.averaging, settings.head_factor, settings.label_smoothing) == (0, 1, 0)
    given = ClassifierTrainSettings(epochs=3, batch=7).resolved(3000)
    assert (given.epochs, given.batch, given.learning_rate) == (3, 7, 1e-4)


def test_weights_of_the_backbone_have_a_schedule_of_their_own():
    settings = ClassifierTrainSettings(weights="backbone.pth").resolved(1000)
    assert (settings.epochs, settings.batch, settings.learning_rate) == (6, 32, 6e-4)
    assert settings.head_factor == 5
    assert settings.averaging == 0.97
    assert settings.cosine
    given = ClassifierTrainSettings(weights="backbone.pth", averaging=0.0).resolved(1000)
    assert given.averaging == 0
    everything = ("averaging", "head_factor", "label_smoothing", "weight_decay", "warm_up")
    for start in ({}, {"weights": "b.pth"}, {"model": "a.safetensors"}):
        for crops in (20, 5000):
            resolved = ClassifierTrainSettings(**start).resolved(crops)
            assert None not in [getattr(resolved, name) for name in everything]


def test_crops_vary_as_laboratories_do():
    jitter = ClassifierTrainSettings().image_jitter()
    assert (jitter.flare, jitter.hue, jitter.saturation) == (0.3, 0.25, (0.6, 2.0))
    milder = ClassifierTrainSettings(jitter={"hue": 0.1, "dyes": 0.0}).image_jitter()
    assert (milder.flare, milder.hue, milder.dyes) == (0.3, 0.1, 0.0)
    assert ClassifierTrainSettings(jitter=False).image_jitter() is None


def test_few_crops_are_gentle_to_a_parent():
    few = ClassifierTrainSettings(model="a.safetensors").resolved(20)
    assert (few.share, few.keep_statistics, few.cosine) == (0.5, True, True)
    many = ClassifierTrainSettings(model="a.safetensors").resolved(5000)
    assert (many.share, many.keep_statistics, many.epochs) == (1.0, False, 10)


def test_fine_tuning_keeps_what_the_parent_is(whole, data, tmp_path):
    folder, parent = whole
    clf = train_classifier(data, tmp_path, model=folder / "best.safetensors", epochs=1, batch=6)
    for key in ("backbone", *ClassifierSettings().record()):
        assert clf.info[key] == parent.info[key], key
    before, after = weights(folder / "best.safetensors"), weights(tmp_path / "last.safetensors")
    changed = {name for name in after if not torch.equal(before[name], after[name])}
    assert "stain.raw_spectra" in changed
    assert not any("running_" in name for name in changed), "few crops keep the statistics"
    assert clf.info["training"]["parent"] == checkpoint_hash(folder / "best.safetensors")


def test_a_model_in_memory_is_a_start_too(whole, data, tmp_path):
    folder, parent = whole
    options = {"epochs": 1, "batch": 6, "device": "cpu"}
    train_classifier(data, tmp_path / "a", model=parent, **options)
    train_classifier(data, tmp_path / "b", model=folder / "best.safetensors", **options)
    assert_same(*(weights(tmp_path / name / "last.safetensors") for name in "ab"))


def test_another_class_keeps_what_fits(whole, tmp_path):
    folder, parent = whole
    write_classes(tmp_path / "data", 4)
    shutil.copytree(tmp_path / "data" / "pale", tmp_path / "data" / "a new one")
    for k, file in enumerate(sorted((tmp_path / "data" / "a new one").iterdir())):
        Image.fromarray(255 - cell("pale", 70 + k)).save(file)
    clf = train_classifier(
        tmp_path / "data", tmp_path / "run", model=folder / "best.safetensors", epochs=1, batch=6
    )
    assert clf.classes == ["a new one", *TYPES]
    colours = dict(zip(clf.classes, clf.info["colours"], strict=True))
    assert [colours[name] for name in TYPES] == parent.info["colours"]


def test_weights_of_a_file(data, tmp_path):
    from torchvision import models

    torch.manual_seed(7)
    donor = models.get_model(SMALL, weights=None)
    torch.save(donor.state_dict(), tmp_path / "weights.pth")
    options = {**QUICK, "epochs": 1, "learning_rate": 1e-12, "keep_statistics": True}
    clf = train_classifier(
        data, tmp_path / "run", SMALL, weights=tmp_path / "weights.pth", **options
    )
    kept = clf.network.backbone.state_dict()["conv1.0.weight"]
    assert torch.allclose(kept, donor.state_dict()["conv1.0.weight"].half().float())
    assert clf.info["training"]["settings"]["weights"] == "weights.pth"


# --- stop, kill, resume --------------------------------------------------------------------------


def test_resuming_equals_never_having_stopped(whole, data, tmp_path):
    folder, _ = whole

    def stop(event):
        if event["event"] == "batch" and event["step"] == 3:
            raise Cancelled

    with pytest.raises(Cancelled):
        train_classifier(data, tmp_path, SMALL, progress=stop, **WHOLE)
    run = inspect_run(tmp_path)
    assert (run.state, run.epoch) == (RunState.STOPPED, 1)
    assert kinds(tmp_path)[-1] == "cancelled"
    train_classifier(None, tmp_path, resume=True, device="cpu")
    assert_same(weights(folder / "last.safetensors"), weights(tmp_path / "last.safetensors"))
    assert_same(weights(folder / "best.safetensors"), weights(tmp_path / "best.safetensors"))
    assert results(folder) == results(tmp_path)


@pytest.mark.slow
def test_killed_and_resumed_to_the_bit(whole, data, tmp_path):
    """A real process, a real SIGKILL in the second epoch."""
    folder, _ = whole
    settings = json.loads((folder / "run.json").read_text())["settings"]
    (tmp_path / "run.json").write_text(json.dumps({"settings": settings, "state": "new"}))
    module = "napari_beerlanet.core.training.train_classifier"
    command = [sys.executable, "-m", module, "--config", str(tmp_path / "run.json")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            event = json.loads(line)
            if event["event"] == "batch" and event["epoch"] == 2:
                process.send_signal(signal.SIGKILL)
                break
    assert process.returncode == -signal.SIGKILL
    assert inspect_run(tmp_path).state is RunState.INTERRUPTED
    assert inspect_run(tmp_path).epoch == 1
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    told = [json.loads(line)["event"] for line in done.stdout.splitlines()]
    assert told[-1] == "end"
    assert_same(weights(folder / "last.safetensors"), weights(tmp_path / "last.safetensors"))
    assert_same(weights(folder / "best.safetensors"), weights(tmp_path / "best.safetensors"))
    assert results(folder) == results(tmp_path)


def test_resuming_after_the_end_changes_nothing(whole):
    folder, _ = whole
    before = {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix == ".safetensors"}
    train_classifier(None, folder, resume=True, device="cpu")
    assert before == {p.name: p.read_bytes() for p in folder.iterdir() if p.name in before}


def test_a_run_of_the_other_kind_is_not_resumed(whole, data):
    folder, _ = whole
    with pytest.raises(ValueError, match="trains a classifier, not a detector"):
        nb.fine_tune(None, None, folder, resume=True)


def test_an_own_backbone_is_resumed_with_it(data, tmp_path):
    def stop(event):
        if event["event"] == "epoch":
            raise Cancelled

    with pytest.raises(Cancelled):
        train_classifier(data, tmp_path, tiny_backbone(), progress=stop, **QUICK)
    with pytest.raises(ValueError, match="a backbone of your own"):
        train_classifier(None, tmp_path, resume=True, device="cpu")
    clf = train_classifier(None, tmp_path, tiny_backbone(seed=3), resume=True, device="cpu")
    whole = tmp_path.with_name("whole")
    expected = train_classifier(data, whole, tiny_backbone(), **QUICK)
    assert_same(clf.network.state_dict(), expected.network.state_dict())


def test_a_class_whose_few_crops_all_validate_is_left_out_and_told(tmp_path):
    """No crop that was held out ever trains, so that none that trains is held out later."""
    data = write_classes(tmp_path / "data", 8, first=19)
    held = [k for k in range(99) if seeded_fraction(0, f"band-{k}.png") < 0.2]
    (data / "band").mkdir()
    for k in held[:2]:
        Image.fromarray(cell("dark", k)).save(data / "band" / f"band-{k}.png")
    clf = train_classifier(data, tmp_path / "run", SMALL, **{**QUICK, "epochs": 1})
    assert clf.classes == TYPES
    assert any("All crops of band validate" in str(event) for event in events(tmp_path / "run"))
    shutil.rmtree(data / "pale")
    with pytest.raises(DataError, match="fewer than two classes would train"):
        train_classifier(data, tmp_path / "other", SMALL, **QUICK)


def test_the_data_may_have_changed(tmp_path):
    data = write_classes(tmp_path / "data", 4)

    def stop(event):
        if event["event"] == "epoch":
            raise Cancelled

    with pytest.raises(Cancelled):
        train_classifier(data, tmp_path / "run", SMALL, progress=stop, **QUICK)
    write_classes(data, 1, first=90)
    train_classifier(None, tmp_path / "run", resume=True, device="cpu")
    assert any("data has changed" in str(event) for event in events(tmp_path / "run"))
    with pytest.raises(Cancelled):
        train_classifier(data, tmp_path / "second", SMALL, progress=stop, **QUICK)
    (data / "pale").rename(data / "other")
    with pytest.raises(DataError, match="was started with classes dark, pale"):
        train_classifier(None, tmp_path / "second", resume=True, device="cpu")


# --- wrong input ---------------------------------------------------------------------------------


def refused(error, words, *args, **kwargs):
    with pytest.raises(error, match=words) as caught:
        train_classifier(*args, **{**QUICK, **kwargs})
    return str(caught.value)


def test_data_that_cannot_be_learned_from(data, tmp_path):
    run = tmp_path / "run"
    write_classes(tmp_path / "a", 2)
    (tmp_path / "a" / "empty").mkdir()
    refused(DataError, "no images of empty; add some", tmp_path / "a", run, SMALL)
    write_classes(tmp_path / "b", 1)
    refused(DataError, "one image only of dark, pale", tmp_path / "b", run, SMALL)
    write_classes(tmp_path / "c", 2, kinds=["dark"])
    refused(DataError, r"only one class \(dark\)", tmp_path / "c", run, SMALL)
    refused(DataError, "no such folder", tmp_path / "none", run, SMALL)
    assert not (run / "best.safetensors").exists()
    assert kinds(run)[-1] == "failed"


def test_corrupt_images_are_named_and_refused(data, tmp_path):
    shutil.copytree(data, tmp_path / "data")
    (tmp_path / "data" / "pale" / "broken.png").write_bytes(b"no picture at all")
    Image.new("L", (30, 30)).save(tmp_path / "data" / "dark" / "grey.png")
    sentence = refused(DataError, "cannot be used", tmp_path / "data", tmp_path / "run", SMALL)
    assert "broken.png" in sentence
    assert "grey.png" in sentence


def test_unknown_backbone(data, tmp_path):
    refused(ValueError, "no classification network 'resnet19'", data, tmp_path, "resnet19")
    assert not (tmp_path / "run.json").exists()


def test_weights_that_do_not_fit(data, tmp_path):
    torch.save(tiny_backbone().state_dict(), tmp_path / "other.pth")
    run = tmp_path / "run"
    path = tmp_path / "other.pth"
    sentence = refused(FileError, f"not those of {SMALL}", data, run, SMALL, weights=path)
    assert sentence.startswith(str(path))
    assert sentence.endswith(f"give a file of {SMALL}, or name another backbone.")
    path.write_bytes(b"nothing")
    refused(FileError, "cut short or damaged", data, run, SMALL, weights=path)
    refused(FileError, "cannot be read", data, run, SMALL, weights=tmp_path / "none.pth")
    refused(ValueError, "either model or weights", data, run, model="a", weights=path)


def test_models_that_do_not_fit(whole, data, tmp_path):
    folder, _ = whole
    run = tmp_path / "run"
    sentence = refused(ValueError, "a detector, where a classifier", data, run, model="blood-cells")
    assert "\n" not in sentence
    best = folder / "best.safetensors"
    with pytest.raises(ValueError, match="front_end is 'beerlanet' in the model"):
        train_classifier(data, run, model=best, front_end="none", device="cpu")


def test_a_backbone_that_takes_no_such_crops(data, tmp_path):
    refused(ValueError, "takes no crops of 24 × 24 pixels", data, tmp_path, "alexnet")
    refused(ValueError, "2 classes need", data, tmp_path / "b", tiny_backbone(classes=5))


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch": 1}, "batch must be"),
        ({"epochs": 0}, "epochs must be"),
        ({"front_end": "macenko"}, "front_end must be one of"),
        ({"fill": 2.0}, "fill must be"),
        ({"jitter": {"wobble": 1}}, "jitter has no such setting"),
        ({"no_such": 1}, "no setting 'no_such'"),
        ({"prior": {"dark": 0.0}}, "prior of dark must be a number above 0"),
        ({"prior": {"blue": 2.0}}, "prior names 'blue', which is no class; there are dark, pale"),
    ],
)
def test_wrong_settings_are_one_sentence(data, tmp_path, settings, words):
    refused(ValueError, words, data, tmp_path, SMALL, **settings)


def test_a_run_is_not_overwritten(whole, data):
    folder, _ = whole
    refused(FileError, "there is a run in this folder", data, folder, SMALL)


# --- crops, order, calibration -------------------------------------------------------------------


def test_augmented_crops_depend_on_their_numbers_alone(data):
    items = [LabelledCrop(path, 0) for path in sorted((data / "dark").iterdir())]
    settings = ClassifierSettings(input_size=24)
    varied = Augmentation(StainJitter(), 0.2, 0.05, 0.02)
    one, two = TrainingCrops(items, settings), TrainingCrops(items, settings)
    two.augmented(3, varied, (0, 0, 0, 0))
    np.testing.assert_array_equal(
        one.augmented(1, varied, (0, 5, 2, 1)), two.augmented(1, varied, (0, 5, 2, 1))
    )
    other = one.augmented(1, varied, (0, 5, 2, 2))
    assert (one.augmented(1, varied, (0, 5, 2, 1)) != other).any()


def test_a_crop_without_augmentation_is_what_classify_sees(tmp_path):
    Image.fromarray(cell("dark", 3, 24)).save(tmp_path / "a.png")
    crops = TrainingCrops([LabelledCrop(tmp_path / "a.png", 0)], ClassifierSettings(input_size=24))
    (plain,) = crops.plain([0])
    np.testing.assert_array_equal(plain, cell("dark", 3, 24))
    still = Augmentation()
    found = [crops.augmented(0, still, (seed,)) for seed in range(40)]
    turned = {np.rot90(image, k).tobytes() for image in (plain, plain[:, ::-1]) for k in range(4)}
    assert {image.tobytes() for image in found} == turned


def test_boxes_bring_a_sample_of_their_image_for_its_stains(tmp_path):
    image = np.full((60, 60, 3), (220, 210, 225), np.uint8)
    image[20:40, 20:40] = cell("dark", 1, 20)
    Image.fromarray(image).save(tmp_path / "a.png")
    item = LabelledCrop(tmp_path / "a.png", 0, (0.5, 0.5, 20 / 60, 20 / 60))
    settings = ClassifierSettings(input_size=16, fit="image", fill=1.0)
    crop = TrainingCrops([item], settings).augmented(0, Augmentation(), (1,))
    assert crop.shape == (16 + 4, 16, 3)
    colours = {tuple(c) for c in image.reshape(-1, 3)}
    assert {tuple(c) for c in crop[16:].reshape(-1, 3)} <= colours
    background = (crop[16:] == (220, 210, 225)).all(2).mean()
    assert 0.7 < background < 1  # the image's, where the crop shows none
    alone = TrainingCrops([item], settings.replace(fit="crop"))
    assert alone.augmented(0, Augmentation(), (1,)).shape == (16, 16, 3)


@pytest.mark.parametrize("room", [1 << 20, 0])
def test_an_image_is_read_once_for_all_its_boxes(tmp_path, monkeypatch, room):
    """For a batch where there is no room to keep what was cut, and never again where there is."""
    read = []
    monkeypatch.setattr(classification, "_MAX_KEPT_BYTES", room)
    monkeypatch.setattr(
        classification, "read_image", lambda path: read.append(path) or read_image(path)
    )
    items = []
    for name in ("a", "b"):
        Image.fromarray(cell("dark", 1, 60)).save(tmp_path / f"{name}.png")
        items += [
            LabelledCrop(tmp_path / f"{name}.png", k % 2, (0.1 + k / 50, 0.5, 0.2, 0.2))
            for k in range(40)
        ]
    dataset = CropDataset(tmp_path, list(TYPES), {"train": items, "val": items[:40]})
    settings = ClassifierTrainSettings(**{**QUICK, "epochs": 2, "batch": 40}).resolved(80)
    network = ClassificationNetwork(tiny_backbone(), 2, settings.network_settings)
    trainer = ClassifierTrainer(
        network, dataset, settings, Augmentation(), torch.device("cpu"), Recorder()
    )
    trainer.train()
    assert len(read) == (2 + 1 if room else 2 * 2 * 2 + 1), "train, and val's image"


def test_jitter_leaves_padding_alone(tmp_path):
    image = cell("dark", 1, 24)
    image[:4] = PADDING_GREY
    changed = StainJitter(share=1.0).apply(image)
    assert (changed[:4] == PADDING_GREY).all()
    assert (changed[4:] != image[4:]).any()
    Image.fromarray(image).save(tmp_path / "a.png")
    crops = TrainingCrops([LabelledCrop(tmp_path / "a.png", 0)], ClassifierSettings(input_size=24))
    blurred = [crops.augmented(0, Augmentation(blur=0.1), (k,)) for k in range(8)]
    assert all((crop == PADDING_GREY).all(2).sum() == 4 * 24 for crop in blurred)
    sharpness = [np.abs(np.diff(crop.astype(int), axis=0)).mean() for crop in blurred]
    assert max(sharpness) > 1.2 * min(sharpness)


def cell_in_a_field(folder, side=120):
    """A cell of 20 pixels in the middle of an image that has no other."""
    image = np.full((side, side, 3), (220, 210, 225), np.uint8)
    middle = slice(side // 2 - 10, side // 2 + 10)
    image[middle, middle] = cell("dark", 1, 20)
    image[middle, middle.start : middle.start + 8] = (250, 60, 60)
    Image.fromarray(image).save(folder / "a.png")
    return LabelledCrop(folder / "a.png", 0, (0.5, 0.5, 20 / side, 20 / side))


def test_cells_are_turned_by_any_angle_with_what_is_around_them(tmp_path):
    settings = ClassifierSettings(input_size=32, fill=0.6)
    crops = TrainingCrops([cell_in_a_field(tmp_path)], settings)
    varied = Augmentation(scale=0.2, shift=0.05, turn=True)
    found = [crops.augmented(0, varied, (seed,)) for seed in range(30)]
    assert not any((crop == PADDING_GREY).all(2).any() for crop in found), "the image goes on"
    angles = []
    for crop in found:
        red = np.argwhere((crop[..., 0].astype(int) - crop[..., 1]) > 120)
        angles.append(np.degrees(np.arctan2(*(red.mean(0) - 15.5))) % 90)
    assert ((np.array(angles) > 20) & (np.array(angles) < 70)).sum() > 8
    whole = TrainingCrops([LabelledCrop(tmp_path / "a.png", 0)], settings)
    alone = whole.augmented(0, Augmentation(turn=True, border=1.0), (1,))
    assert not (alone == PADDING_GREY).all(2).any(), "a file has nothing around it"


def test_turning_moves_nothing():
    pixels = cell("dark", 5, 60)
    pixels[10:20, 30:50] = (250, 60, 60)
    square = cut_square(pixels, 31.0, 28.0, 32.0, 32)
    for turns in range(4):
        turned = cut_turned(pixels, 31.0, 28.0, 32.0, 32, turns * math.pi / 2)
        np.testing.assert_array_equal(turned, np.rot90(square, turns))
    half = cut_turned(pixels, 31.0, 28.0, 32.0, 16, 0.0)
    assert half[3, 8].mean() == pytest.approx(square[6:8, 16:18].mean(), abs=3)
    outside = cut_turned(pixels, 2.0, 2.0, 32.0, 32, 0.3)
    assert (outside == PADDING_GREY).all(2).mean() > 0.4


def test_borders_of_images_cut_cells(tmp_path):
    crops = TrainingCrops([cell_in_a_field(tmp_path)], ClassifierSettings(input_size=40))
    edges = set()
    for seed in range(30):
        padding = (crops.augmented(0, Augmentation(border=1.0), (seed,)) == PADDING_GREY).all(2)
        rows, columns = padding.all(1), padding.all(0)
        assert rows.any() != columns.any()
        assert 0.05 * 40 - 1 <= max(rows.sum(), columns.sum()) <= 0.4 * 40 + 1
        edges.add((rows[0], rows[-1], columns[0], columns[-1]))
        assert padding.sum() == 40 * max(rows.sum(), columns.sum())
    assert len(edges) == 4
    whole = crops.augmented(0, Augmentation(border=0.0), (0,))
    assert not (whole == PADDING_GREY).all(2).any()


class Recorder:
    """Keeps the weights after every step."""

    def __init__(self):
        self.states = []

    def on_batch_end(self, trainer):
        self.states.append({k: v.clone() for k, v in trainer.network.state_dict().items()})

    def on_epoch_end(self, trainer):
        self.result = {k: v.clone() for k, v in trainer.averaged.state_dict().items()}


def test_the_result_is_the_average_over_steps(data):
    dataset = with_validation(read_crop_dataset(data), 0.25, 0)
    check_crop_dataset(dataset, ("train", "val"))
    settings = ClassifierTrainSettings(**{**QUICK, "averaging": 0.3}).resolved(12)
    torch.manual_seed(0)
    network = ClassificationNetwork(tiny_backbone(), 2, settings.network_settings)
    start = {k: v.clone() for k, v in network.state_dict().items()}
    recorder = Recorder()
    trainer = ClassifierTrainer(
        network, dataset, settings, Augmentation(), torch.device("cpu"), recorder
    )
    trainer.train()
    expected = start
    for step, state in enumerate(recorder.states):
        kept = min(0.3, (2 + step) / (11 + step))
        expected = {
            k: kept * v + (1 - kept) * state[k] if v.is_floating_point() else state[k]
            for k, v in expected.items()
        }
    for name, value in recorder.result.items():
        torch.testing.assert_close(value, expected[name], msg=name)
    last = recorder.states[-1]["backbone.0.weight"]
    assert not torch.allclose(recorder.result["backbone.0.weight"], last)


def test_the_head_learns_faster_and_only_kernels_decay():
    settings = ClassifierTrainSettings(**TINY, weight_decay=0.1, head_factor=5.0)
    network = ClassificationNetwork(SMALL, 2, settings.network_settings)
    names = {id(value): name for name, value in network.named_parameters()}
    seen = {}
    for group in parameter_groups(network, settings):
        for value in group["params"]:
            seen[names[id(value)]] = group["factor"], group["weight_decay"]
    assert set(seen) == set(names.values())
    assert seen["backbone.fc.weight"] == (5.0, 0.1)
    assert seen["backbone.fc.bias"] == (5.0, 0.0)
    assert seen["backbone.conv1.0.weight"] == (1.0, 0.1)
    assert seen["backbone.conv1.1.weight"] == (1.0, 0.0)
    assert seen["mix.weight"] == seen["stain.raw_spectra"] == (1.0, 0.0)


def test_a_later_average_is_kept_unless_it_is_clearly_worse():
    assert within_error(0.9975, 1.0, 400)
    assert not within_error(0.98, 1.0, 400)
    assert not within_error(0.5, 1.0, 4)
    assert within_error(0.48, 0.5, 100)


@pytest.mark.parametrize("epoch", range(3))
def test_each_class_is_shown_as_often(epoch):
    labels = np.array([0] * 30 + [1] * 3 + [2] * 7)
    order = balanced_order(labels, 0, epoch, balanced=True)
    counts = np.bincount(labels[order])
    assert counts.max() - counts.min() == 0
    for label, size in ((1, 3), (2, 7)):
        shown = np.bincount(order[labels[order] == label], minlength=40)[labels == label]
        assert shown.max() - shown.min() <= 1, "none is left out while another comes again"
        assert len(shown) == size
    plain = balanced_order(labels, 0, epoch, balanced=False)
    np.testing.assert_array_equal(np.sort(plain), np.arange(40))
    assert (balanced_order(labels, 0, epoch + 1, True) != order).any()


def test_temperature_calibrates():
    random = np.random.default_rng(0)
    logits = random.normal(0, 2, (4000, 3))
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    true = np.array([random.choice(3, p=row) for row in p])
    over = np.exp(3 * logits) / np.exp(3 * logits).sum(1, keepdims=True)
    assert fit_temperature(over, true) == pytest.approx(3, rel=0.1)
    assert fit_temperature(p, true) == pytest.approx(1, rel=0.1)


def test_few_perfect_crops_prove_no_certainty():
    scores = np.array([[0.9, 0.1], [0.1, 0.9]])
    T = fit_temperature(scores, np.array([0, 1]))
    p = 0.9 ** (1 / T) / (0.9 ** (1 / T) + 0.1 ** (1 / T))
    assert p == pytest.approx(0.75, abs=0.01)  # (n + 1) / (n + 2)
    assert fit_temperature(np.empty((0, 2)), np.empty(0, int)) == 1.0
