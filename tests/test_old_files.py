"""Files that the version before Part 7 wrote are opened, resumed, and not computed again."""

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from napari_beerlanet.cli.main import main
from napari_beerlanet.core.batch.outputs import current_row
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.checkpoints.checkpoint import (
    checkpoint_hash,
    learned_spectra,
    load_checkpoint,
    read_info,
)
from napari_beerlanet.core.common.events import EventTail, RunState
from napari_beerlanet.core.evaluation.dataset import evaluate
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.core.formats.dataset import check_dataset, dataset_hash, read_dataset
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.stains.files import read_spectra
from napari_beerlanet.core.training.fine_tune import fine_tune
from napari_beerlanet.core.training.runs import RunFolder, inspect_run, list_runs
from old_files import expected, restored

NAMES = ["RBC", "WBC", "Platelets"]


@pytest.fixture(autouse=True)
def ultralytics_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setenv("YOLO_OFFLINE", "true")
    monkeypatch.setenv("YOLO_CONFIG_DIR", str(tmp_path / "yolo"))


@pytest.fixture
def home(tmp_path):
    return tmp_path / "home"


# --- checkpoints ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["tiny.safetensors", "last.pt"])
def test_checkpoints(home, name):
    """Of ours, and a .pt that names our network by the module in which it was then."""
    path = restored(home, "checkpoints") / "checkpoints" / name
    right = expected(home, "checkpoints")[name]
    model = load_checkpoint(path, "cpu")
    if path.suffix == ".pt":  # has no colours of its own and gets those of today
        right["info"]["colours"] = class_colours(len(right["info"]["classes"]))
    assert json.loads(json.dumps(model.info)) == right["info"]
    if path.suffix != ".pt":
        assert read_info(path) == right["info"]
    weights = model.network.state_dict()
    assert list(weights) == list(right["weights"])
    for key, total in right["weights"].items():
        assert weights[key].double().sum().item() == pytest.approx(total, abs=1e-4), key
    np.testing.assert_allclose(learned_spectra(path), right["spectra"], atol=1e-6)
    assert checkpoint_hash(path) == right["sha256"]


# --- projects ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["whole", "prepared", "begun", "halfway", "locked"])
def test_projects(home, name):
    """Whole; and killed: before a change held, when it did, in its middle, with the lock."""
    path = restored(home, "projects") / "projects" / name
    right = expected(home, "projects")[name]
    with Project.open(path) as project:
        assert project.read_only == ""
        assert project.classes == right["classes"]
        assert project.seed == right["seed"]
        assert project.training_size == right["training_size"]
        summary = {k: v for k, v in project.summary().items() if k != "sentence"}
        for split in ("train", "val"):
            right["summary"][split]["crops"] = right["summary"][split].pop("pieces")
            right["summary"][split]["types"] = {}  # cells had none then
        assert summary == right["summary"]
        rows = [
            [r.file, r.split, r.source, r.x, r.y, r.width, r.height, r.boxes, r.counts]
            for r in project.crops
        ]
        assert rows == right["rows"]
        assert project.notes == right["notes"]
        assert set(project.sources()) == set(right["images"])
        for key, source in project.sources().items():
            found, facts = project.load_annotations(source), right["images"][key]
            assert source.name == facts["name"]
            assert source.digest == facts["digest"]
            assert list(source.shape) == facts["shape"]
            np.testing.assert_allclose(found.xyxy.reshape(-1, 4), facts["boxes"], atol=1e-3)
            assert found.labels.tolist() == facts["labels"]
            assert list(found.names) == facts["classes"]
            assert [region.kind for region in found.regions] == facts["regions"]
        data = read_dataset(project.data)
        check_dataset(data)
        assert dataset_hash(data) == right["data_hash"]
        left = [p.name for p in path.rglob(".*") if p.name != ".lock"]
        assert left == []
        project.rename_class("Parasite", "Malaria")  # it can be written to, all of it
    with Project.open(path) as again:
        assert again.classes[-1] == "Malaria"
        assert again.summary()["images"] == right["summary"]["images"]


# --- runs ----------------------------------------------------------------------------------------


def test_runs(home):
    project = restored(home, "training") / "training"
    right = expected(home, "runs")
    assert [run.name for run in list_runs(project)] == right["newest first"]
    for name, facts in right["runs"].items():
        folder = project / "runs" / name
        run = inspect_run(folder)
        assert str(run.state) == facts["state"]
        assert (run.epoch, run.epochs) == (facts["epoch"], facts["epochs"])
        assert (run.can_resume, run.is_active) == (facts["can_resume"], facts["goes_on"])
        assert {k: v for k, v in run.settings.items() if k in facts["settings"]} == facts[
            "settings"
        ]
        events = [event["event"] for event in EventTail(folder).read()]
        assert {key: events.count(key) for key in sorted(set(events))} == facts["events"]
        last = load_checkpoint(folder / "last.safetensors", "cpu")
        assert last.info["training"]["metrics"]["mAP50"] == facts["mAP50"]
    kept = load_checkpoint(project / "models" / "ours.safetensors", "cpu").info
    assert kept["name"] == right["kept"]["name"]
    assert sorted(kept["training"]) == right["kept"]["training"]
    assert kept["training"]["compared"] == right["kept"]["compared"]


@pytest.mark.slow
def test_a_killed_run_is_resumed(home):
    project = restored(home, "training") / "training"
    (run,) = [run for run in list_runs(project) if run.state is RunState.INTERRUPTED]
    before = RunFolder(run.path, locked=False).read_state()
    assert len(before["rows"]) == run.epoch == 2
    torch.manual_seed(1)
    fine_tune(None, None, run.path, resume=True)
    now = inspect_run(run.path)
    assert now.state is RunState.FINISHED
    after = RunFolder(run.path, locked=False).read_state()
    assert after["rows"][:2] == before["rows"]
    assert len(after["rows"]) > 2
    events = [event["event"] for event in EventTail(run.path).read()]
    assert events.count("start") == 2
    assert events[-1] == "end"


# --- studies -------------------------------------------------------------------------------------


def close(row, right):
    """The same line of a table, up to the last digits."""
    assert row.keys() == right.keys()
    for key, value in right.items():
        assert row[key] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value)


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("whole", {"skipped": 3, "failed": 1, "done": 0}),
        ("killed", {"skipped": 1, "failed": 1, "done": 2}),
        ("stains", {"skipped": 1, "failed": 0, "done": 0}),
    ],
)
def test_studies(home, name, counts):
    """Settings have the same hash, so what is done is skipped; what is not is done."""
    out = restored(home, "study") / "study" / name
    right = expected(home, "study")[name]
    config = json.loads((out / "study.json").read_text())
    assert sorted(config) == right["config"]
    settings = StudySettings(**right["settings"])
    (digest,) = {record["settings"] for record in right["records"].values()}
    assert settings.hash() == digest
    times = {path: path.stat().st_mtime_ns for path in out.glob("field0*")}
    status = main(["batch", str(out / "study.json"), "--quiet"])
    assert status == (1 if counts["failed"] else 0)
    assert {path: path.stat().st_mtime_ns for path in out.glob("field0*")} == times
    manifest = json.loads((out / "manifest.json").read_text())
    assert {key: manifest["counts"][key] for key in counts} == counts
    assert manifest["counts"]["waiting"] == 0
    whole = expected(home, "study")["whole"]["records"] if name == "killed" else right["records"]
    for path in sorted((out / "records").glob("[!.]*.json")):
        row = current_row(json.loads(path.read_text())["row"])
        row.pop("path")
        row = {key: value for key, value in row.items() if not key.endswith(" resembles")}
        close(row, current_row(whole[path.stem]["row"]))
    assert (out / "summary.csv").is_file()
    assert (out / "failures.csv").is_file() == bool(counts["failed"])
    assert not (out / ".work").exists()


# --- commands ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["decompose/smear", "decompose/discs", "zarr/smear"])
def test_spectra(home, name):
    restored(home, "commands")
    right = expected(home, "commands")[name]
    found = read_spectra(home / "commands" / f"{name}.spectra.json")
    np.testing.assert_array_equal(found, right)


@pytest.mark.parametrize("name", ["smear", "discs"])
@pytest.mark.parametrize("kind", ["csv", "geojson", "coco.json", "xml", "yolo"])
def test_files_of_the_command_detect(home, name, kind):
    restored(home, "commands")
    right = expected(home, "commands")[f"detect/{name}"]
    out = home / "commands" / "detect"
    path = out / "yolo" / f"{name}.txt" if kind == "yolo" else out / f"{name}.detections.{kind}"
    with Image.open(home / "commands" / "images" / f"{name}.png") as image:
        shape = image.size[::-1]
    found = read_detections(path, shape, NAMES)
    assert found.counts() == right["counts"]


def test_metrics(home):
    restored(home, "training", "checkpoints")
    # At a given size: how the automatic search chooses one is no promise to old files.
    right = expected(home, "commands")["evaluate at 20 pixels"]
    model = load_checkpoint(home / "checkpoints" / "tiny.safetensors", "cpu")
    found = evaluate(model, home / "training" / "data.yaml", object_size=20)
    assert set(found) == set(right)
    assert sorted(found["curves"]) == right["curves"]
    assert found["images"] == right["images"]
    for key in ("mAP50", "mAP50-95", "precision", "recall", "F1"):
        assert found[key] == pytest.approx(right[key], abs=1e-4), key
    for key, row in right["per_class"].items():
        for word, value in row.items():
            assert found["per_class"][key][word] == pytest.approx(value, abs=1e-4), (key, word)
    assert found["confusion"] == right["confusion"]


# --- files of boxes ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["image.csv", "image.geojson", "image.coco.json", "image.xml", "image.txt"]
)
def test_files_of_boxes(home, name):
    path = restored(home, "formats") / "formats" / name
    right = expected(home, "formats")[name]
    found = read_detections(path, (120, 160), NAMES if path.suffix == ".txt" else None)
    np.testing.assert_allclose(found.xyxy, right["boxes"], atol=1e-3)
    np.testing.assert_allclose(found.scores, right["scores"], atol=1e-4)
    assert found.labels.tolist() == right["labels"]
    assert found.names == right["names"]


# --- modules that a process of an earlier version may be started by ------------------------------


def test_a_run_can_be_resumed_by_the_command_that_it_names(home):
    """The command in a kept model's record, for instance, which a person may have copied."""
    project = restored(home, "training") / "training"
    kept = load_checkpoint(project / "models" / "ours.safetensors", "cpu").info["training"]
    words = kept["command"].split()[1:]
    environment = {**os.environ, "YOLO_OFFLINE": "true"}
    done = subprocess.run(
        [sys.executable, "-m", "napari_beerlanet.cli.main", words[0], "--help"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0
    for word in words:
        if word.startswith("--"):
            assert word.partition("=")[0] in done.stdout
