"""Runs of a project: created, listed with their state, trained; models saved under unused names."""

import os
import subprocess
import sys
from datetime import UTC, datetime, timedelta

import pytest
import torch

from fuzz.corpus import HOSTILE
from napari_beerlanet.core.common import locking
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.training import runs
from napari_beerlanet.core.training.comparison import save_best_model
from napari_beerlanet.core.training.runs import (
    RunFolder,
    inspect_run,
    list_runs,
    new_run,
    read_run,
    unused_model_path,
)
from napari_beerlanet.core.training.settings import TrainSettings
from projects import NAMES, fill

SETTINGS = TrainSettings(model="blood-cells", data="data.yaml", scope="stain", epochs=3)


@pytest.fixture
def project(tmp_path):
    with Project.create(tmp_path / "project", NAMES) as made:
        yield made


def test_a_new_run_has_its_settings_and_a_folder_of_its_own(project):
    first, second = (new_run(project.path, SETTINGS.model_dump()) for _ in range(2))
    assert first != second
    assert first.parent == second.parent == project.path / "runs"
    assert TrainSettings(**read_run(first / "run.json")["settings"]) == SETTINGS
    assert inspect_run(first).state == RunState.NEW


@pytest.mark.parametrize("gone", [False, True])
def test_files_outside_a_project_are_followed_only_where_they_are_gone(tmp_path, gone):
    """Of a run in any folder, as the command line makes it."""
    run = tmp_path / "lab" / "run"
    for folder in (run, tmp_path / "lab" / "crops", tmp_path / "other" / "crops"):
        folder.mkdir(parents=True)
    names = {"data": tmp_path / "lab" / "crops", "model": run / "start.safetensors"}
    (run / "start.safetensors").touch()
    with RunFolder(run) as folder:
        folder.write_run(settings={name: str(path) for name, path in names.items()})
    run.rename(tmp_path / "other" / "run")
    if gone:
        (tmp_path / "lab" / "crops").rmdir()
    settings = read_run(tmp_path / "other" / "run" / "run.json")["settings"]
    assert settings["model"] == str(tmp_path / "other" / "run" / "start.safetensors")
    assert settings["data"] == str(tmp_path / ("other" if gone else "lab") / "crops")


def test_a_project_that_is_gone_is_named(tmp_path):
    with pytest.raises(FileError, match="no such folder"):
        new_run(tmp_path / "gone", SETTINGS.model_dump())
    assert list_runs(tmp_path / "gone") == []


def test_runs_are_listed_with_their_state_the_newest_first(project):
    first, second = (new_run(project.path, SETTINGS.model_dump()) for _ in range(2))
    (project.path / "runs" / "notes.txt").write_text("mine")
    (project.path / "runs" / "broken").mkdir()
    RunFolder(first, locked=False).write_run(state="running", epoch=2, updated="3000")
    runs = {run.path: run for run in list_runs(project.path)}
    assert set(runs) == {first, second, project.path / "runs" / "broken"}
    assert (runs[first].state, runs[first].epoch) == (RunState.INTERRUPTED, 2)
    assert runs[first].can_resume
    assert runs[first].epochs == 3
    assert runs[project.path / "runs" / "broken"].state == RunState.DAMAGED


def test_runs_of_a_classifier_are_not_among_those_of_detectors(project):
    detector, classifier = (
        new_run(project.path, SETTINGS.model_dump() | task) for task in ({}, {"task": "classify"})
    )
    assert [run.path for run in list_runs(project.path)] == [detector]
    assert [run.path for run in list_runs(project.path, "classify")] == [classifier]


@pytest.mark.parametrize(
    ("record", "state"),
    [
        ("new", RunState.NEW),
        ("waiting", RunState.NEW),
        ("finished", RunState.FINISHED),
        ("cancelled", RunState.STOPPED),
        ("failed", RunState.FAILED),
        ("diverged", RunState.DIVERGED),
        ("running", RunState.INTERRUPTED),
        ("asleep", RunState.INTERRUPTED),
    ],
)
def test_the_state_follows_from_the_record(project, record, state):
    path = new_run(project.path, SETTINGS.model_dump())
    RunFolder(path, locked=False).write_run(state=record)
    assert inspect_run(path).state == state


@pytest.mark.parametrize(
    ("record", "epoch", "status"),
    [
        ("new", 0, "not started"),
        ("finished", 3, "finished after epoch 3 of 3"),
        ("finished", 2, "stopped early after epoch 2 of 3"),
        ("cancelled", 2, "stopped after epoch 2 of 3"),
        ("cancelled", 0, "stopped in its first epoch"),
        ("failed", 1, "failed after epoch 1 of 3"),
        ("diverged", 2, "diverged in epoch 2 of 3"),
        ("running", 1, "interrupted after epoch 1 of 3"),
    ],
)
def test_what_is_said_of_a_run_is_true(project, record, epoch, status):
    path = new_run(project.path, SETTINGS.model_dump())
    RunFolder(path, locked=False).write_run(state=record, epoch=epoch)
    assert inspect_run(path).status == status


def test_an_active_run_says_which_epoch_it_is_in(project):
    path = new_run(project.path, SETTINGS.model_dump())
    with RunFolder(path) as folder:
        folder.append_event({"event": "cancelled", "epoch": 1})  # of an earlier attempt
        folder.write_run(state="running", process=os.getpid(), epoch=1)
        assert inspect_run(path).status == "running, loading"
        folder.append_event({"event": "batch", "epoch": 2, "batch": 1})
        folder.append_event({"event": "warning", "message": "odd"})
        run = inspect_run(path)
        assert (run.status, run.epoch) == ("running, epoch 2 of 3", 1)


def test_a_run_in_another_process_is_active_until_that_is_killed(project):
    path = new_run(project.path, SETTINGS.model_dump())
    code = (
        "import os, sys, time\nfrom napari_beerlanet.core.training.runs import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\n"
        "folder.write_run(state='running', process=os.getpid())\n"
        "print('at work', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "at work\n"
        run = inspect_run(path)
        assert run.state == RunState.RUNNING
        assert run.is_active
        assert run.process == other.pid
        with pytest.raises(FileError, match=f"another process trains .*{other.pid}"):
            RunFolder(path)
        other.kill()
        other.wait()
    assert inspect_run(path).state == RunState.INTERRUPTED
    RunFolder(path).close()


def test_the_number_of_another_process_is_not_taken_for_the_run(project):
    path = new_run(project.path, SETTINGS.model_dump())
    RunFolder(path).close()
    os.utime(path / ".lock", (0, 0))  # long before this process began
    RunFolder(path, locked=False).write_run(state="running", process=os.getpid())
    assert inspect_run(path).state == RunState.INTERRUPTED


def test_a_clock_that_was_set_back_makes_no_dead_run_alive(project):
    path = new_run(project.path, SETTINGS.model_dump())
    RunFolder(path).close()
    os.utime(path / ".lock", (2**32, 2**32))  # by the clock as it was then
    RunFolder(path, locked=False).write_run(state="running", process=os.getpid())
    assert inspect_run(path).state == RunState.INTERRUPTED


def test_a_clock_that_was_set_forward_makes_no_live_run_dead(project):
    path = new_run(project.path, SETTINGS.model_dump())
    with RunFolder(path) as folder:
        os.utime(path / ".lock", (0, 0))
        folder.write_run(state="running", process=os.getpid())
        assert inspect_run(path).state == RunState.RUNNING


@pytest.mark.parametrize(
    ("locked", "state"), [(0, RunState.INTERRUPTED), (2**32, RunState.RUNNING)]
)
def test_on_a_disk_without_locks_times_decide(project, monkeypatch, locked, state):
    path = new_run(project.path, SETTINGS.model_dump())
    RunFolder(path).close()
    os.utime(path / ".lock", (locked, locked))
    RunFolder(path, locked=False).write_run(state="running", process=os.getpid())
    monkeypatch.setattr(locking, "try_lock", lambda file: "unknown")
    assert inspect_run(path).state == state


def test_the_newest_run_is_first_after_the_clock_was_set_back(project, monkeypatch):
    clock = [datetime(2026, 5, 1, 12, tzinfo=UTC)]

    class Clock(datetime):
        @classmethod
        def now(cls, tz=None):
            return clock[0].astimezone(tz)

    monkeypatch.setattr(runs, "datetime", Clock)
    first = new_run(project.path, SETTINGS.model_dump())
    clock[0] -= timedelta(days=400)
    second = new_run(project.path, SETTINGS.model_dump())
    assert [run.path for run in list_runs(project.path)] == [second, first]
    RunFolder(first, locked=False).write_run(state="running")
    assert [run.path for run in list_runs(project.path)] == [first, second]
    RunFolder(second, locked=False).write_run(epoch=1)  # says nothing of when it was started
    assert [run.path for run in list_runs(project.path)] == [first, second]


def test_a_model_never_gets_a_name_that_is_taken(project):
    first = unused_model_path(project.path, "Blood v1.2 (our lab)")
    assert first == project.path / "models" / "Blood-v1-2-our-lab.safetensors"
    first.touch()
    second = unused_model_path(project.path, "Blood v1.2 (our lab)")
    assert second.name == "Blood-v1-2-our-lab-2.safetensors"
    second.touch()
    assert unused_model_path(project.path, "Blood v1.2 our lab").stem.endswith("-3")


@pytest.mark.slow
def test_a_run_of_a_project_trains(project):
    fill(project, range(3), shape=(96, 96), size=96)
    project.check_ready_to_train()
    settings = TrainSettings(
        model="blood-cells",
        data=str(project.data),
        scope="stain",
        epochs=1,
        device="cpu",
        repeats=1,
        batch=2,
        image_size=project.training_size,
        pixel_size=project.pixel_size,
    )
    path = new_run(project.path, settings.model_dump())
    command = [sys.executable, "-m", "napari_beerlanet.core.training.fine_tune", "--config"]
    done = subprocess.run(
        [*command, str(path / "run.json")], capture_output=True, text=True, cwd=project.path
    )
    assert done.returncode == 0, done.stderr
    run = list_runs(project.path)[0]
    assert run.state == RunState.FINISHED
    saved = [save_best_model(run.path, "mine") for _ in range(2)]
    assert [file.name for file in saved] == ["mine.safetensors", "mine-2.safetensors"]
    assert saved[0].stat().st_size > 1000


def test_the_state_of_a_run_takes_no_more_than_its_size(tmp_path):
    """Thirty nested tuples as a key take for ever to be hashed."""
    folder = RunFolder(tmp_path, locked=False)
    HOSTILE["tuple-as-key.pt"](folder.state_file)
    with pytest.raises(FileError, match="damaged, or no state of a run"):
        folder.read_state()
    folder.write_state({"epoch": 1, "model": {"w": torch.zeros(3)}})
    assert folder.read_state()["epoch"] == 1
