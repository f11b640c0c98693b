"""Runs of training from start to end: their files, events and ways to stop, kill and go on."""

import copy
import csv
import importlib.util
import json
import os
import signal
import subprocess
import sys
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from discs import boxes_of, draw, scattered
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import cxcywh_to_xyxy, iou, translate, xyxy_to_cxcywh
from napari_beerlanet.core.checkpoints.checkpoint import (
    checkpoint_hash,
    load_checkpoint,
    save_checkpoint,
)
from napari_beerlanet.core.checkpoints.info import check_info
from napari_beerlanet.core.checkpoints.serialize import describe_network
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.locking import read_owner
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.storage import DataError, FileError
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.stain_statistics import AnnotatedSample
from napari_beerlanet.core.formats.dataset import check_dataset, dataset_hash, read_dataset
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.stains.front_end import fit_stain
from napari_beerlanet.core.training import distributed
from napari_beerlanet.core.training.comparison import compare_models
from napari_beerlanet.core.training.fine_tune import fine_tune
from napari_beerlanet.core.training.monitor import describe_training_domain, explain_divergence
from napari_beerlanet.core.training.runs import RunFolder, TrainingDiverged, inspect_run
from napari_beerlanet.core.training.settings import (
    TrainingSchedule,
    TrainSettings,
    choose_schedule,
    early_stopping_patience,
)
from napari_beerlanet.core.training.setup import (
    checkpoint_info,
    prepare_training,
    resolve_defaults,
    training_sample,
)
from napari_beerlanet.core.training.trainer.data import (
    StainDataset,
    read_bgr,
    read_item,
    training_views,
)
from napari_beerlanet.core.training.trainer.deterministic import DeterministicTrainer
from tinydata import MODEL, NAMES, write_smears

QUICK = {"epochs": 2, "batch": 2, "device": "cpu"}
LASTS = {"end", "failed", "cancelled", "diverged"}
FILES = {"run.json", "progress.jsonl", "results.csv", "state.pt"}
FILES |= {"best.safetensors", "last.safetensors", ".lock"}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_smears(tmp_path_factory.mktemp("smears"), train=5, val=2, side=64)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    network.fit_mix()
    return Detector(network, describe_network(network, "tiny", list(NAMES), 64))


@pytest.fixture(scope="module")
def start(model, tmp_path_factory):
    """The model as a file."""
    path = tmp_path_factory.mktemp("models") / "tiny.safetensors"
    save_checkpoint(model, path)
    return path


@pytest.fixture(scope="module")
def whole(start, data, tmp_path_factory):
    """The folder of a run of three epochs that nobody disturbed, and what it returned."""
    folder = tmp_path_factory.mktemp("runs") / "whole"
    return folder, fine_tune(start, data, folder, **{**QUICK, "epochs": 3})


def events(folder):
    return [json.loads(line) for line in (folder / "progress.jsonl").read_text().splitlines()]


def kinds(folder):
    return [event["event"] for event in events(folder)]


def results(folder):
    with (folder / "results.csv").open() as file:
        return list(csv.DictReader(file))


def weights(path):
    return load_checkpoint(path, device="cpu").network.state_dict()


def assert_same_weights(a, b):
    assert a.keys() == b.keys()
    for name in a:
        assert torch.equal(a[name], b[name]), name


def stop_after(batches):
    def progress(event):
        seen.append(event)
        if sum(e["event"] == "batch" for e in seen) == batches and event["event"] == "batch":
            raise Cancelled

    seen = []
    return progress


# --- a run ---------------------------------------------------------------------------------------


def test_files_and_events_of_a_run(whole):
    folder, _ = whole
    assert {path.name for path in folder.iterdir()} == FILES
    told = events(folder)
    expected = ["start", *["batch", "batch", "batch", "epoch"] * 3, "compare", "end"]
    assert [e for e in kinds(folder) if e != "warning"] == expected
    batch = [event for event in told if event["event"] == "batch"][1]
    assert (batch["epoch"], batch["epochs"], batch["batch"], batch["batches"]) == (1, 3, 2, 3)
    assert set(batch["losses"]) == {"box_loss", "cls_loss", "dfl_loss"}
    assert batch["device"] == "CPU"
    assert batch["memory_mb"] > 50
    assert batch["eta_seconds"] > 0
    epochs = [event for event in told if event["event"] == "epoch"]
    assert [event["epoch"] for event in epochs] == [1, 2, 3]
    assert {"mAP50", "mAP50-95", "precision", "recall", "per_class"} <= set(epochs[0]["metrics"])
    assert [row["epoch"] for row in results(folder)] == ["1", "2", "3"]
    run = json.loads((folder / "run.json").read_text())
    assert (run["state"], run["epoch"]) == ("finished", 3)


def sizes_of_half(detect):
    """`Detector.detect`, but a model that was trained takes cells for half as large."""

    def half(self, *args, **settings):
        found = detect(self, *args, **settings)
        boxes = np.tile(np.array([[1, 1, 9, 9]], np.float32), (5, 1))
        size = 10.0 if self.info["training"] else 20.0
        labels, scores = np.zeros(5, np.int64), np.ones(5, np.float32)
        return Detections(boxes, labels, scores, found.names, report={"object_size": size})

    return half


def test_a_model_that_takes_cells_for_other_sizes_is_told_at_the_end(
    start, data, tmp_path, monkeypatch
):
    monkeypatch.setattr(Detector, "detect", sizes_of_half(Detector.detect))
    folder, reports = tmp_path / "run", []
    fine_tune(start, data, folder, **{**QUICK, "epochs": 1}, report=reports.append)
    assert kinds(folder)[-2:] == ["compare", "end"]
    told = events(folder)[-1]["change"]
    assert (told["code"], told["images"]) == ("sizes", 7)
    assert told["text"].startswith("On 7 of 7 images the new model assumes cells of another size")
    assert inspect_run(folder).warning == told["text"]
    assert "image 7 of 7" in reports[-2].message

    def stop(progress):
        if "image 3" in progress.message:
            raise Cancelled

    fine_tune(None, None, folder, resume=True, device="cpu", report=stop)
    assert kinds(folder)[-2:] == ["compare", "end"]  # trained it is all the same
    assert "change" not in events(folder)[-1]
    run = inspect_run(folder)
    assert (run.state, run.warning) == (RunState.FINISHED, "")


def test_what_cannot_be_compared_at_the_end_is_no_failure_of_the_training(
    start, data, tmp_path, monkeypatch
):
    def detect(*args, **settings):
        raise MemoryError

    folder = tmp_path / "run"
    monkeypatch.setattr(Detector, "detect", detect)
    assert fine_tune(start, data, folder, **{**QUICK, "epochs": 1}).classes == list(NAMES)
    warning, end = events(folder)[-2:]
    assert (warning["event"], end["event"]) == ("warning", "end")
    assert warning["message"].startswith(
        "The new model could not be compared with the one before: Not enough memory"
    )


def test_colours_and_limits_are_inherited_where_they_are_still_true(model, start, data, tmp_path):
    colours = ["#111111", "#222222", "#333333"]
    unknown = {"parasites": ["WBC"], "blasts": ["WBC", "Platelets"]}
    parent = Detector(model.network, {**model.info, "colours": colours, "unknown": unknown})
    dataset = read_dataset(data)
    check_dataset(dataset)
    more = replace(dataset, names=["ring", "WBC", "RBC"], path=tmp_path / "data.yaml")
    settings = TrainSettings(model=str(start), data=str(data))
    info = checkpoint_info(parent, model.network, dataset, settings, 64, "same")
    assert (info["colours"], info["unknown"]) == (colours, unknown)
    info = checkpoint_info(parent, model.network, more, settings, 64, "more")
    assert info["colours"] == [class_colours(1)[0], "#222222", "#111111"]
    assert info["unknown"] == {"blasts": ["WBC"]}
    with Project.create(tmp_path / "project", more.names) as project:
        project.set_colours({"ring": "#abcdef", "WBC": "#fedcba"})
    here = replace(more, path=tmp_path / "project" / "data.yaml")
    info = checkpoint_info(parent, model.network, here, settings, 64, "project")
    assert info["colours"] == ["#abcdef", "#fedcba", "#111111"]


def test_checkpoint_tells_where_it_comes_from(whole, start, data):
    _, detector = whole
    record = detector.info["training"]
    assert record["data_hash"] == dataset_hash(read_dataset(data))
    assert record["images"] == {"train": 5, "val": 2}
    assert record["parent"] == checkpoint_hash(start)
    assert record["settings"]["epochs"] == 3
    assert (record["seed"], record["scope"]) == (0, "all")
    assert {"napari-beerlanet", "torch", "ultralytics"} <= set(record["versions"])
    assert {"mAP50", "mAP50-95", "per_class"} <= set(record["metrics"])
    assert record["command"].startswith("napari-beerlanet train --data")
    assert str(data.parent) not in json.dumps(detector.info)
    assert detector.info["classes"] == list(NAMES)
    sizes = detector.info["object_sizes"]["RBC"]
    assert 4 < sizes["low"] < sizes["median"] < sizes["high"] < 40
    background = detector.info["stain_seen"]["background"]["mean"]
    assert all(-0.5 < value < 0 for value in background)


def test_checkpoint_tells_how_dense_its_classes_were(whole, data):
    """Against each pixel's densities, averaged box by box."""
    network, info = whole[1].network, whole[1].info
    sample = training_sample(read_dataset(data), 64)
    means = [
        fit_stain(network, one.pixels).planes(one.pixels)[:, y1:y2, x1:x2].mean((1, 2))
        for one in sample
        for (x1, y1, x2, y2), label in zip(one.xyxy.round().astype(int), one.labels, strict=True)
        if label == 0
    ]
    told = info["densities_seen"]["RBC"]
    assert told["count"] == len(means) == sum((one.labels == 0).sum() for one in sample) >= 5
    np.testing.assert_allclose(told["mean"], np.mean(means, 0), rtol=1e-2, atol=1e-4)
    np.testing.assert_allclose(told["sd"], np.std(means, 0), rtol=3e-2, atol=1e-4)
    assert sum(told["mean"]) > 0.02


def test_a_class_without_boxes_keeps_what_its_parent_tells(whole, data):
    network = whole[1].network
    sample = training_sample(read_dataset(data), 64)
    others = [
        AnnotatedSample(s.pixels, s.xyxy[s.labels > 0], s.labels[s.labels > 0]) for s in sample
    ]
    before = {"RBC": {"mean": [0.5] * 8, "sd": [0.1] * 8, "count": 99}}
    info = {"classes": list(NAMES), "densities_seen": before}
    assert describe_training_domain(network, others, info)["densities_seen"]["RBC"] == before["RBC"]
    assert describe_training_domain(network, sample, info)["densities_seen"]["RBC"] != before["RBC"]
    assert (
        "RBC"
        not in describe_training_domain(network, others, {"classes": list(NAMES)})["densities_seen"]
    )


def test_best_is_returned(whole):
    folder, detector = whole
    assert_same_weights(detector.network.state_dict(), weights(folder / "best.safetensors"))
    detector.detect(torch.zeros(64, 64, 3, dtype=torch.uint8).numpy())


def test_model_in_memory_trains_as_from_its_file(whole, model, data, tmp_path):
    before = copy.deepcopy(model.network.state_dict())
    detector = fine_tune(model, data, tmp_path / "run", **{**QUICK, "epochs": 3})
    assert_same_weights(detector.network.state_dict(), whole[1].network.state_dict())
    assert_same_weights(model.network.state_dict(), before)


def test_what_is_not_said_is_chosen_by_the_number_of_fields(start, data, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, batch=2, device="cpu", progress=stop_after(2))
    plan = choose_schedule(5, "all", "normal", 2)
    settings = json.loads((folder / "run.json").read_text())["settings"]
    names = ("epochs", "validate_every", "learning_rate", "keep_statistics", "average", "share")
    assert {name: settings[name] for name in names} == {n: getattr(plan, n) for n in names}
    assert settings["repeats"] == 1
    patience = early_stopping_patience(plan.epochs, plan.validate_every)
    more = {"patience": patience, "optimizer": plan.optimizer, "warmup_epochs": plan.validate_every}
    assert settings["advanced"] == {**plan.advanced, **more}
    told = next(event for event in events(folder) if event["event"] == "batch")
    assert (told["steps"], told["epochs"]) == (plan.steps(5, 2), plan.epochs)


def test_few_images_are_validated_after_several_epochs_each_of_which_is_one_pass(
    whole, start, data, tmp_path
):
    folder = tmp_path / "run"
    detector = fine_tune(start, data, folder, **{**QUICK, "epochs": 4}, validate_every=2)
    batches = [event for event in events(folder) if event["event"] == "batch"]
    assert [event["epoch"] for event in batches] == [1, 1, 2, 2, 2, 3, 3, 4, 4, 4]  # 2 × 5 images
    assert {event["epochs"] for event in batches} == {4}
    assert [event["step"] for event in batches] == list(range(1, 11))
    assert [row["epoch"] for row in results(folder)] == ["2", "4"]
    run = json.loads((folder / "run.json").read_text())
    assert (run["epoch"], run["state"]) == (4, "finished")
    assert detector.info["training"]["epochs"] in (2, 4)


def test_a_network_without_stains_learns_as_ultralytics_has_it(shared, data, tmp_path):
    start = shared / "weights" / "yolov8n.pt"
    assert resolve_defaults(TrainSettings(model=str(start), data=str(data))) == TrainSettings(
        model=str(start), data=str(data)
    ).resolved(TrainingSchedule())


def test_a_model_that_learns_another_class_is_trained_as_gently(start, tmp_path):
    data = write_smears(tmp_path / "smears", train=2, val=1, side=64)
    data.write_text(data.read_text().replace("[RBC", "[parasite, RBC"))
    plan = choose_schedule(2)
    for scope in ("all", "head"):
        recipe = resolve_defaults(TrainSettings(model=str(start), data=str(data), scope=scope))
        assert (recipe.learning_rate, recipe.advanced["optimizer"]) == (3e-4, "AdamW")
        assert recipe.share == plan.share < 1
        assert recipe.keep_statistics


def test_a_new_head_learns_faster(start, tmp_path):
    data = write_smears(tmp_path / "smears", train=2, val=1, side=64)
    data.write_text(data.read_text().replace("RBC, WBC, Platelets", "a, b, c"))
    recipe = resolve_defaults(TrainSettings(model=str(start), data=str(data)))
    assert recipe.learning_rate is None  # Ultralytics' own
    assert recipe.share == 1  # half a new head is none
    assert recipe.keep_statistics


def test_stain_scope_keeps_the_detector_to_the_last_bit(start, data, tmp_path):
    detector = fine_tune(start, data, tmp_path / "run", scope="stain", **QUICK)
    before, after = weights(start), detector.network.state_dict()
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    assert moved
    assert all(name.startswith(("stain.", "mix.")) for name in moved)


def test_plain_yolo_gets_a_front_end_and_other_classes(shared, data, tmp_path):
    seen = []
    detector = fine_tune(
        shared / "weights" / "yolov8n.pt",
        data,
        tmp_path / "run",
        image_size=64,
        progress=seen.append,
        **{**QUICK, "epochs": 1},
    )
    assert detector.info["classes"] == list(NAMES)
    assert detector.info["image_size"] == 64
    assert detector.info["reference_pixels"] == 64**2
    assert "notes" not in detector.info
    assert seen[-1]["event"] == "end"


def test_new_classes_keep_what_fits(start, tmp_path):
    data = write_smears(tmp_path / "smears", train=3, val=1, side=64)
    data.write_text(data.read_text().replace("RBC, WBC, Platelets", "WBC, RBC, other, new"))
    detector = fine_tune(start, data, tmp_path / "run", scope="head", learning_rate=1e-12, **QUICK)
    assert detector.info["classes"] == ["WBC", "RBC", "other", "new"]
    old, new = weights(start), detector.network.state_dict()
    for name in old:
        if "cv3" not in name and not name.startswith("model.5."):
            assert torch.equal(old[name], new[name]), name
    rows = "model.5.cv3.0.2.weight"
    assert new[rows].shape[0] == 4
    torch.testing.assert_close(new[rows][:2], old[rows][[1, 0]], atol=1e-3, rtol=0)


def test_stain_scope_refuses_new_classes(start, tmp_path):
    data = write_smears(tmp_path / "smears", train=2, val=1, side=64)
    data.write_text(data.read_text().replace("RBC", "cell"))
    with pytest.raises(ValueError, match="keeps the head"):
        fine_tune(start, data, tmp_path / "run", scope="stain", **QUICK)


# --- the ways to end -----------------------------------------------------------------------------


def test_bad_data_fails_before_the_first_batch(start, tmp_path):
    data = write_smears(tmp_path / "smears", train=2, val=1, side=64)
    labels = tmp_path / "smears" / "labels" / "train" / "smear-0.txt"
    good = labels.read_text()
    labels.write_text("9 0.5 0.5 0.1 0.1\n")
    with pytest.raises(DataError, match="class 9"):
        fine_tune(start, data, tmp_path / "run", **QUICK)
    assert kinds(tmp_path / "run") == ["failed"]
    assert "class 9" in events(tmp_path / "run")[0]["message"]
    labels.write_text(good)
    fine_tune(start, data, tmp_path / "run", **{**QUICK, "epochs": 1})  # nothing to lose there
    assert kinds(tmp_path / "run")[-1] == "end"


@pytest.mark.parametrize("how", ["progress", "report", "file"])
def test_cancelling_ends_after_the_batch_and_keeps_the_best(start, data, tmp_path, how):
    folder = tmp_path / "run"
    progress, report = None, None
    if how == "progress":
        progress = stop_after(4)
    elif how == "report":

        def report(step):
            if step.fraction > 0.6:
                raise Cancelled

    else:

        def progress(event):
            if event["event"] == "batch" and event["epoch"] == 2:
                (folder / "stop").touch()

    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, progress=progress, report=report, **QUICK)
    told = kinds(folder)
    assert [kind for kind in told if kind in LASTS] == ["cancelled"]
    assert told[-1] == "cancelled"
    assert told.count("batch") == 4
    assert not (folder / "stop").exists()
    assert json.loads((folder / "run.json").read_text())["state"] == "cancelled"
    load_checkpoint(folder / "best.safetensors", device="cpu")
    with pytest.raises(FileError, match="resume it"):
        fine_tune(start, data, folder, **QUICK)


def test_any_other_exception_is_one_failure(start, data, tmp_path):
    def progress(event):
        if event["event"] == "batch":
            raise RuntimeError("out of memory, says the test")

    with pytest.raises(RuntimeError):
        fine_tune(start, data, tmp_path / "run", progress=progress, **QUICK)
    last = events(tmp_path / "run")[-1]
    assert last["event"] == "failed"
    assert last["message"].startswith("Not enough memory")
    assert kinds(tmp_path / "run").count("batch") == 1


def test_too_little_memory_of_a_gpu_halves_the_batch_and_then_takes_the_cpu(
    start, data, tmp_path, monkeypatch
):
    from napari_beerlanet.core.training import fine_tune as runs
    from napari_beerlanet.core.training import settings as of_settings
    from napari_beerlanet.core.training import setup

    train, tried = setup.train_in_process, []

    def scarce(folder, settings, *more):
        tried.append((settings.device, settings.batch))
        if settings.device != "cpu":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        train(folder, settings, *more)

    monkeypatch.setattr(setup, "train_in_process", scarce)
    for module in (runs, of_settings):
        monkeypatch.setattr(module, "pick_device", torch.device)
    options = {**QUICK, "epochs": 1, "batch": 4, "device": "cuda:0"}
    model = fine_tune(start, data, tmp_path / "run", **options)
    assert tried == [("cuda:0", 4), ("cuda:0", 2), ("cuda:0", 1), ("cpu", 4)]
    assert model.device.type == "cpu"
    told = [e["message"] for e in events(tmp_path / "run") if "did not suffice" in str(e)]
    assert told == [
        "Memory of cuda:0 did not suffice for a batch of 4; training resumes with 2.",
        "Memory of cuda:0 did not suffice for a batch of 2; training resumes with 1.",
        "Memory of cuda:0 did not suffice for a batch of 1; training resumes on the CPU.",
    ]
    assert json.loads((tmp_path / "run" / "run.json").read_text())["state"] == "finished"


@pytest.fixture(scope="module")
def diverged(start, data, tmp_path_factory):
    """The folder of a run whose steps are far too large, and how it ended."""
    folder = tmp_path_factory.mktemp("runs") / "diverged"
    with pytest.raises(TrainingDiverged) as raised:
        fine_tune(start, data, folder, **{**QUICK, "epochs": 8}, learning_rate=0.3)
    return folder, str(raised.value)


def test_a_run_that_diverges_is_stopped_and_says_so(diverged):
    folder, message = diverged
    run = json.loads((folder / "run.json").read_text())
    assert run["state"] == "diverged"
    assert run["epoch"] < 8
    assert run["message"] == message
    assert [kind for kind in kinds(folder) if kind in LASTS] == ["diverged"]
    assert events(folder)[-1]["message"] == message
    assert message.startswith(f"Training diverged in epoch {run['epoch']} of 8: the loss rose from")
    assert f"the model of epoch {run['best_epoch']} is kept" in message
    assert "\n" not in message


def test_the_best_model_before_a_divergence_stays(diverged):
    folder, _ = diverged
    run = json.loads((folder / "run.json").read_text())
    for name in ("best", "last"):
        kept = load_checkpoint(folder / f"{name}.safetensors", device="cpu")
        assert kept.info["training"]["epochs"] < run["epoch"] == len(results(folder))
        assert all(bool(w.isfinite().all()) for w in kept.network.state_dict().values())
        assert kept.info["training"]["epochs"] == run["best_epoch"] or name == "last"


def test_a_run_that_diverged_is_not_resumed(diverged):
    folder, _ = diverged
    found = inspect_run(folder)
    assert found.state is RunState.DIVERGED
    assert not found.can_resume
    with pytest.raises(ValueError, match="diverged and cannot be resumed"):
        fine_tune(None, None, folder, resume=True)
    assert inspect_run(folder).state is RunState.DIVERGED


LOSSES = ("train/box_loss", "train/cls_loss")


@pytest.mark.parametrize(
    ("losses", "scores", "words"),
    [
        ([2, 2.5, 35], [0.99, 0.98, 0.5], ["from 2.0 to 35.0"]),  # at once
        ([2, 9, 9], [0.99, 0.98, 0.9], ["from 2.0 to 9.0"]),  # twice
        ([2, 9], [0.99, 0.01], ["from 2.0 to 9.0", "from 99.0 % to 1.0 %"]),  # with the score
        ([2, 2, 2], [0.9, 0.05, 0.0], ["mAP50", "from 90.0 % to 0.0 %"]),  # the score twice
        ([2, float("nan")], [0.9, 0.9], ["not a finite number"]),
        ([float("inf")], [0.9], ["not a finite number"]),
        ([2, 9, 2.5], [0.99, 0.98, 0.9], []),  # one odd epoch of few images
        ([2, 2, 2, 2], [0.9, 0.0, 0.9, 0.0], []),
        ([12, 8, 6, 5], [0.0, 0.1, 0.0, 0.0], []),  # as from scratch
        ([2, 3], [0.99, 0.3], []),
        ([0.5, 0.3, 1.4, 1.4], [0.0, 0.0, 0.0, 0.0], []),  # hardly any boxes
        ([3], [0.0], []),
    ],
)
def test_what_counts_as_divergence(losses, scores, words):
    rows = [
        {"epoch": k + 1, LOSSES[0]: loss / 4, LOSSES[1]: 3 * loss / 4, "metrics/mAP50(B)": score}
        for k, (loss, score) in enumerate(zip(losses, scores, strict=True))
    ]
    reason = explain_divergence(rows)
    assert bool(reason) == bool(words)
    assert all(word in reason for word in words), reason


@pytest.mark.parametrize(
    ("scores", "best"), [([0.9, 0.2, 0.1, 0.1, 0.1, 0.1], 1), ([0.5, 0.48, 0.5, 0.5, 0.5, 0.5], 4)]
)
def test_an_early_stop_is_said_as_such(start, data, tmp_path, monkeypatch, scores, best):
    """Also on a plateau, of which the last epoch is the best."""
    fitness = iter(scores)
    validate = DeterministicTrainer.validate

    def as_told(self):
        before, value = self.best_fitness, next(fitness)
        metrics = validate(self)[0]
        self.best_fitness = value if before is None else max(before, value)
        return metrics, value

    monkeypatch.setattr(DeterministicTrainer, "validate", as_told)
    folder = tmp_path / "run"
    fine_tune(start, data, folder, **{**QUICK, "epochs": 6}, patience=3)
    run = json.loads((folder / "run.json").read_text())
    assert (run["state"], run["epoch"], run["best_epoch"]) == ("finished", 4, best)
    sentence = "Stopped early at epoch 4 of 6: no improvement for 3 epochs."
    assert run["message"] == events(folder)[-1]["message"] == sentence


def test_a_run_to_its_last_epoch_has_not_stopped_early(whole):
    run = json.loads((whole[0] / "run.json").read_text())
    assert (run["message"], run.get("early_stop")) == ("", None)


def test_going_on_equals_never_having_stopped(whole, start, data, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, progress=stop_after(5), **{**QUICK, "epochs": 3})
    detector = fine_tune(None, None, folder, resume=True, device="cpu")
    assert_same_weights(detector.network.state_dict(), whole[1].network.state_dict())
    assert results(folder) == results(whole[0])
    told = events(folder)
    assert [e["event"] for e in told if e["event"] in LASTS] == ["cancelled", "end"]
    starts = [e for e in told if e["event"] == "start"]
    assert [(e["epoch"], e["resumed"]) for e in starts] == [(1, False), (2, True)]


def test_going_on_and_stopping_at_once_keeps_the_results(start, data, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, **QUICK, progress=stop_after(4))  # in the second epoch
    before = results(folder)
    assert len(before) == 1
    with pytest.raises(Cancelled):
        fine_tune(None, None, folder, resume=True, device="cpu", progress=stop_after(1))
    assert results(folder) == before


def test_going_on_with_other_data_is_told(start, tmp_path):
    data = write_smears(tmp_path / "smears", train=3, val=1, side=64)
    folder = tmp_path / "run"
    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, progress=stop_after(3), **QUICK)
    text = data.read_text()
    data.write_text(text.replace("WBC, Platelets", "Platelets, WBC"))
    with pytest.raises(DataError, match="started with classes RBC, WBC, Platelets"):
        fine_tune(None, None, folder, resume=True, device="cpu")
    data.write_text(text)
    labels = tmp_path / "smears" / "labels" / "train" / "smear-0.txt"
    labels.write_text(labels.read_text().splitlines()[0])
    fine_tune(None, None, folder, resume=True, device="cpu")
    assert any("has changed" in event.get("message", "") for event in events(folder))


def test_going_on_after_the_end_changes_nothing(whole):
    folder, detector = whole
    before, table = (folder / "best.safetensors").read_bytes(), results(folder)
    (folder / "results.csv").unlink()  # as if it had been killed before the last files
    again = fine_tune(None, None, folder, resume=True, epochs=9, device="cpu")
    assert_same_weights(again.network.state_dict(), detector.network.state_dict())
    assert (folder / "best.safetensors").read_bytes() == before
    assert results(folder) == table
    told = events(folder)[-3:]
    assert "epochs 3" in told[0]["message"]
    assert [one["event"] for one in told] == ["warning", "compare", "end"]


def test_what_was_asked_for_already_is_no_difference(start, data, tmp_path):
    """Neither what was chosen in its place nor the batch that a memory allowed; the rest is."""
    asked = {
        "epochs": 4,
        "batch": 4,
        "validate_every": 3,
        "mosaic": 0.25,
        "jitter": {"saturation": (0.6, 2.0)},
    }
    folder = tmp_path / "run"
    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, device="cpu", progress=stop_after(1), **asked)
    record = json.loads((folder / "run.json").read_text())
    assert (record["settings"]["validate_every"], record["requested"]["validate_every"]) == (2, 3)
    with RunFolder(folder) as opened:  # as `train_within_memory` writes it down
        opened.write_run(settings={**record["settings"], "batch": 2})

    def notes(**settings):
        before = len(events(folder))
        with pytest.raises(Cancelled):
            fine_tune(
                *(start, data, folder),
                resume=True,
                device="cpu",
                progress=stop_after(1),
                **settings,
            )
        told = [event.get("message", "") for event in events(folder)[before:]]
        return [message for message in told if "not" in message and "resumed" in message]

    assert notes(**asked) == []
    assert notes() == []
    assert notes(**{**asked, "batch": 2, "validate_every": 2}) == []  # as it goes on
    assert notes(**{**asked, "batch": 16}) == ["The run is resumed with its own batch 2, not 16."]
    assert "mosaic" in notes(mosaic=0.5)[0]


@pytest.mark.parametrize("renamed", [False, True])
def test_a_run_goes_on_where_its_project_is_now(start, tmp_path, renamed):
    """Also where another project has the old name by now."""
    project = tmp_path / "project"
    write_smears(project, train=2, val=1, side=64)
    model = project / "models" / "start.safetensors"
    model.parent.mkdir()
    model.write_bytes(start.read_bytes())
    folder = project / "runs" / "first"
    with pytest.raises(Cancelled):
        fine_tune(model, project / "data.yaml", folder, progress=stop_after(2), **QUICK)
    project.rename(tmp_path / "moved")
    if renamed:
        write_smears(project, train=3, val=1, side=64)
    folder = tmp_path / "moved" / "runs" / "first"
    assert inspect_run(folder).settings["data"] == str(tmp_path / "moved" / "data.yaml")
    fine_tune(None, None, folder, resume=True, device="cpu")
    assert not any("has changed" in event.get("message", "") for event in events(folder))
    settings = json.loads((folder / "run.json").read_text())["settings"]
    assert settings["data"] == str(tmp_path / "moved" / "data.yaml")
    assert settings["model"] == str(tmp_path / "moved" / "models" / "start.safetensors")
    compared = compare_models(folder, fields=1)
    assert (compared.before.classes, compared.after.classes) == (list(NAMES), list(NAMES))


@pytest.mark.parametrize("chosen", [None, 3])
def test_the_batch_that_a_memory_decided_is_kept(start, data, tmp_path, monkeypatch, chosen):
    """Ultralytics measures that of a GPU; where there is none, it is the usual number."""
    if chosen:
        overrides = TrainSettings.overrides
        monkeypatch.setattr(
            TrainSettings, "overrides", lambda self, *more: overrides(self, *more) | {"batch": -1}
        )
        monkeypatch.setattr(DeterministicTrainer, "auto_batch", lambda self: chosen)
    folder, options = tmp_path / "run", {**QUICK, "batch": "auto"}
    with pytest.raises(Cancelled):
        fine_tune(*(start, data, folder), progress=stop_after(3 if chosen else 2), **options)
    run = json.loads((folder / "run.json").read_text())
    size = chosen or TrainSettings.default("batch")
    assert (run["requested"]["batch"], run["settings"]["batch"]) == ("auto", size)
    record = load_checkpoint(folder / "best.safetensors", "cpu").info["training"]
    assert record["settings"]["batch"] == size
    assert f"--batch={size}" in record["command"] or size == TrainSettings.default("batch")
    assert "auto" not in record["command"]


def test_nothing_to_go_on_with(tmp_path):
    with pytest.raises(ValueError, match="no run to resume"):
        fine_tune(None, None, tmp_path / "run", resume=True)


def test_damaged_state_is_told(start, data, tmp_path):
    folder = tmp_path / "run"
    with pytest.raises(Cancelled):
        fine_tune(start, data, folder, progress=stop_after(4), **QUICK)
    state = (folder / "state.pt").read_bytes()
    (folder / "state.pt").write_bytes(state[: len(state) // 2])
    with pytest.raises(FileError, match=r"state\.pt: damaged"):
        fine_tune(None, None, folder, resume=True)


# --- as a process --------------------------------------------------------------------------------


@contextmanager
def process(folder, *arguments):
    command = [sys.executable, "-m", "napari_beerlanet.core.training.fine_tune"]
    with subprocess.Popen(
        [*command, "--config", str(folder / "run.json"), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
    ) as running:
        try:
            yield running
        finally:
            running.kill()


def until(running, kind, epoch=1):
    """All events up to the first of that kind in that epoch."""
    told = []
    for line in running.stdout:
        told.append(json.loads(line))
        if (told[-1]["event"], told[-1].get("epoch")) == (kind, epoch):
            break
    return told


def configured(folder, start, data, **settings):
    folder.mkdir()
    recipe = TrainSettings(model=str(start), data=str(data), **{**QUICK, **settings})
    (folder / "run.json").write_text(json.dumps({"settings": recipe.model_dump()}))
    return folder


@pytest.mark.slow
def test_killed_in_the_second_epoch_and_gone_on(whole, start, data, tmp_path):
    folder = configured(tmp_path / "run", start, data, epochs=3)
    with process(folder) as first:
        until(first, "batch", epoch=2)
        first.kill()
    assert first.returncode == -signal.SIGKILL
    assert json.loads((folder / "run.json").read_text())["epoch"] == 1
    with (folder / "progress.jsonl").open("a") as file:
        file.write('{"event": "ba')  # as a kill may leave it
    with process(folder, "--resume") as second:
        out, err = second.communicate(timeout=600)
    assert second.returncode == 0, err
    assert err == ""
    told = [json.loads(line) for line in out.splitlines()]
    assert [e["epoch"] for e in told if e["event"] == "epoch"] == [2, 3]
    assert told[-1]["event"] == "end"
    assert {path.name for path in folder.iterdir()} == FILES
    assert [row["epoch"] for row in results(folder)] == ["1", "2", "3"]
    after, expected = weights(folder / "best.safetensors"), whole[1].network.state_dict()
    assert all(value.isfinite().all() for value in after.values())
    assert results(folder) == results(whole[0])
    assert_same_weights(after, expected)


@pytest.mark.slow
@pytest.mark.skipif(os.name == "nt", reason="Windows has no such signals")
def test_signal_ends_it_once_and_others_are_kept_out(start, data, tmp_path):
    folder = configured(tmp_path / "run", start, data, epochs=500)
    with process(folder) as running:
        lines = until(running, "batch")
        with pytest.raises(FileError, match=f"another process trains .* {running.pid}"):
            fine_tune(start, data, folder, **QUICK)
        running.send_signal(signal.SIGTERM)
        out, err = running.communicate(timeout=600)
    lines += [json.loads(line) for line in out.splitlines()]
    assert running.returncode == 128 + signal.SIGTERM, err
    assert [line["event"] for line in lines if line["event"] in LASTS] == ["cancelled"]
    assert lines[-1]["event"] == "cancelled"
    assert events(folder) == lines


# --- several processes ---------------------------------------------------------------------------


@pytest.mark.slow
def test_two_processes_train_one_network(start, data, tmp_path, monkeypatch):
    worker = Path(__file__).parents[2] / "gloo_worker.py"
    command = distributed.launch_command
    monkeypatch.setattr(
        distributed,
        "launch_command",
        lambda run_file, count: [*command(run_file, count)[:5], str(worker), str(run_file)],
    )
    folder = RunFolder(configured(tmp_path / "run", start, data))
    told = []

    def stop(step):
        if step.done > 3:
            raise Cancelled

    with folder:
        with pytest.raises(Cancelled):
            distributed.train_multi_gpu(folder, 2, told.append, stop)
        assert [event["event"] for event in told].count("epoch") == 1
        folder.stop_file.unlink()
        distributed.train_multi_gpu(folder, 2, told.append)
    assert [event["epoch"] for event in told if event["event"] == "epoch"] == [1, 2]
    assert [row["epoch"] for row in results(folder.path)] == ["1", "2"]
    load_checkpoint(folder.best, device="cpu")


def test_what_starts_several_processes_is_torchs_own(tmp_path):
    line = distributed.launch_command(tmp_path / "run.json", 2)
    assert line[1:5] == ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    assert importlib.util.find_spec("torch.distributed.run")
    assert line[6] == distributed.__name__


@pytest.mark.slow
def test_failure_of_one_of_several_is_told(start, tmp_path, monkeypatch):
    folder = RunFolder(configured(tmp_path / "run", start, tmp_path / "gone.yaml"))
    alone = [sys.executable, "-m", distributed.__name__, str(folder.run_file)]
    monkeypatch.setattr(distributed, "launch_command", lambda run_file, count: alone)
    with folder, pytest.raises(ValueError, match=r"gone\.yaml: there is no such file"):
        distributed.train_multi_gpu(folder, 1, print)


# --- the folder ----------------------------------------------------------------------------------


def test_lock_of_a_dead_process_is_taken_over(tmp_path):
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    (tmp_path / ".lock").write_text(f"{done.pid}\n")
    with RunFolder(tmp_path):
        assert read_owner(tmp_path / ".lock")["process"] == os.getpid()
        with pytest.raises(FileError, match="another process"):
            RunFolder(tmp_path)
    RunFolder(tmp_path).close()


def test_a_stop_and_files_of_long_ago_do_not_count(tmp_path):
    (tmp_path / "stop").touch()
    (tmp_path / ".0123456789abcdef.partial.safetensors").write_bytes(b"half")
    with RunFolder(tmp_path):
        assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_a_file_in_place_of_the_folder(tmp_path):
    (tmp_path / "run").touch()
    with pytest.raises(FileError, match="not a folder"):
        RunFolder(tmp_path / "run")


# --- settings ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "word"),
    [
        ({"scope": "neck"}, "scope"),
        ({"epochs": 0}, "epochs"),
        ({"epochs": 2.5}, "epochs"),
        ({"batch": "many"}, "batch"),
        ({"image_size": 8}, "image_size"),
        ({"learning_rate": -1}, "learning_rate"),
        ({"seed": -1}, "seed"),
        ({"jitter": {"tint": 1}}, "tint"),
        ({"pretrained": "x.pt"}, "pretrained"),
        ({"device": "cuda:7"}, "cuda:7"),
        ({"device": "cpu,cpu"}, "GPUs"),
        ({"mosaics": 1}, "mosaics"),
    ],
)
def test_wrong_settings_are_named(start, data, tmp_path, settings, word):
    with pytest.raises(ValueError, match=word):
        fine_tune(start, data, tmp_path / "run", **{**QUICK, **settings})


def test_wrong_settings_are_told_at_once():
    code = (
        "import sys\n"
        "from napari_beerlanet.core.training.fine_tune import fine_tune\n"
        "try: fine_tune('a', 'b', 'c', epochs=-1)\n"
        "except ValueError: print(sorted({'torch', 'ultralytics'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr


def test_recipe_survives_being_written():
    recipe = TrainSettings(model="a", data="b", jitter={"dyes": 0.1}, advanced={"mosaic": 0.5})
    assert TrainSettings(**json.loads(json.dumps(recipe.model_dump()))) == recipe
    with pytest.raises(ValueError, match="colour"):
        TrainSettings(colour=1)


def test_no_half_precision_test_that_would_download():
    recipe = TrainSettings(model="a", data="b", device="cpu", advanced={"amp": True})
    assert recipe.overrides(64, "run")["amp"] is False


# --- sizes ---------------------------------------------------------------------------------------

KNOWN = {
    "RBC": {"median": 20.0, "low": 16.0, "high": 24.0, "count": 3000},
    "WBC": {"median": 40.0, "low": 30.0, "high": 50.0, "count": 300},
    "Platelets": {"median": 8.0, "low": 6.0, "high": 10.0, "count": 300},
}


def write_fields(folder, fields):
    """A data.yaml of red discs (side of the image, diameter in pixels); every third validates."""
    for number, (side, diameter) in enumerate(fields):
        split = "val" if number % 3 == 2 else "train"
        shape = side * 3 // 4, side
        discs = scattered(shape, diameter, seed=number)
        rows = xyxy_to_cxcywh(boxes_of(discs), shape)
        image = folder / "images" / split / f"{number}.png"
        labels = folder / "labels" / split / f"{number}.txt"
        for path in (image, labels):
            path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(draw(shape, discs)).save(image)
        np.savetxt(labels, rows, fmt="0" + " %.6f" * 4)
    data = folder / "data.yaml"
    data.write_text(f"train: images/train\nval: images/val\nnames: [{', '.join(NAMES)}]\n")
    return data


def parent_knowing(model, path, sizes=KNOWN, image_size=128):
    info = {**model.info, "object_sizes": sizes, "image_size": image_size}
    save_checkpoint(Detector(model.network, info), path)
    return str(path)


def shown_cells(setup, split):
    """Median width of the cells of each image as the network is shown it, in its pixels."""
    size = setup.info["image_size"]
    data = {"names": dict(enumerate(NAMES)), "nc": 3, "channels": 3}
    shown = StainDataset(
        img_path=setup.dataset.splits[split],
        facts=setup.dataset.inspections,
        imgsz=size,
        augment=False,
        rect=True,
        batch_size=1,
        data=data,
    )
    for one in (shown[k] for k in range(len(shown))):
        wide = one["bboxes"][:, 2] * one["img"].shape[2]
        if len(wide):
            yield float(wide.median())


@pytest.mark.parametrize(
    ("fields", "image_size", "expected"),
    [
        ([(128, 20)] * 3, None, 20),
        ([(256, 100)] * 3, None, 20),  # shown smaller, with padding around
        ([(512, 20)] * 3, None, 20),  # cut into windows
        ([(256, 96), (128, 20), (256, 96), (128, 20), (512, 20), (256, 40)], None, 20),
        ([(256, 60)] * 3, 64, 15),  # whole, as is asked for
        ([(128, 30), (128, 30), (128, 30), (256, 15)], 64, 15),
    ],
)
def test_images_are_shown_as_large_as_the_parent_knows_cells(
    model, tmp_path, fields, image_size, expected
):
    data = write_fields(tmp_path / "smears", fields)
    start = parent_knowing(model, tmp_path / "parent.safetensors")
    settings = TrainSettings(model=start, data=str(data), image_size=image_size)
    with RunFolder(tmp_path / "run") as folder:
        setup = prepare_training(folder, settings)
    for split in ("train", "val"):
        shown = list(shown_cells(setup, split))
        assert shown
        np.testing.assert_allclose(shown, expected, rtol=0.3)
        assert np.median(shown) == pytest.approx(expected, rel=0.05)
    info = check_info(setup.info)
    sizes = {name: size["median"] for name, size in info["object_sizes"].items()}
    assert sizes["RBC"] == pytest.approx(expected, rel=0.05)
    assert sizes["WBC"] == pytest.approx(2 * sizes["RBC"], rel=0.1)
    assert info["reference_class"] == "RBC"
    val = len(fields) // 3
    assert info["training"]["images"] == {"train": len(fields) - val, "val": val}


@pytest.mark.parametrize("split", ["train", "val"])
def test_every_cell_of_an_image_that_is_cut_is_whole_in_a_window(model, tmp_path, split):
    data = write_fields(tmp_path / "smears", [(512, 20)] * 3)
    start = parent_knowing(model, tmp_path / "parent.safetensors")
    views = training_views(read_dataset(data), load_checkpoint(start).info, 128)
    items = {item.image: item for item in read_dataset(data).splits[split]}
    pixels = {path: read_bgr(path) for path in items}
    found = {path: [] for path in items}
    for view in views.splits[split]:
        x1, y1, x2, y2 = view.window.corners
        seen, drawn = read_item(view), pixels[view.image][y1:y2, x1:x2]
        assert seen.shape[:2] == view.shape
        same = (seen[: y2 - y1, : x2 - x1] == drawn).all(2)
        boxes = cxcywh_to_xyxy(view.cxcywh, view.shape)
        for left, top, right, bottom in boxes.round().astype(int):
            assert same[top:bottom, left:right].all()
        found[view.image].append(translate(boxes, x1, y1))
    for path, item in items.items():
        boxes = cxcywh_to_xyxy(item.cxcywh, pixels[path].shape[:2])
        best = iou(boxes, np.concatenate(found[path])).max(1)
        assert (best > 0.99).all()


def test_a_parent_that_knows_no_sizes_is_shown_images_whole(model, tmp_path):
    dataset = read_dataset(write_fields(tmp_path / "smears", [(256, 100)] * 3))
    assert training_views(dataset, model.info, 64) is dataset
    other = {"nucleus": KNOWN["RBC"]}
    assert training_views(dataset, {**model.info, "object_sizes": other}, 64) is dataset


@pytest.mark.parametrize("image_size", [64, 320])
def test_sizes_of_all_classes_are_at_one_scale(model, tmp_path, image_size):
    """New fields show red cells alone, twice as large as the parent knows them or much smaller."""
    data = write_fields(tmp_path / "smears", [(160, 40)] * 6)
    dataset = read_dataset(data)
    check_dataset(dataset)
    parent = Detector(model.network, {**model.info, "object_sizes": KNOWN, "image_size": 160})
    start = parent_knowing(model, tmp_path / "parent.safetensors")
    settings = TrainSettings(model=start, data=str(data))
    info = checkpoint_info(parent, model.network, dataset, settings, image_size, "new")
    sizes = {name: size["median"] for name, size in check_info(info)["object_sizes"].items()}
    assert sizes["RBC"] == pytest.approx(40 * image_size / 160, rel=0.05)
    assert sizes["WBC"] == pytest.approx(2 * sizes["RBC"], rel=0.02)
    assert sizes["Platelets"] == pytest.approx(0.4 * sizes["RBC"], rel=0.02)
