"""Runs and models of a project: begun, found again, kept."""

import json
import subprocess
import sys

import numpy as np
import pytest

from napari_beerlanet.core.labels import DataError
from napari_beerlanet.core.locks import FolderLock
from napari_beerlanet.core.project import Project, ProjectError
from napari_beerlanet.core.projectruns import (
    check_ready,
    keep_model,
    models,
    pixel_size,
    runs,
    start_run_config,
)
from napari_beerlanet.core.recipe import Recipe
from napari_beerlanet.core.runfiles import RunFolder
from projects import NAMES, fill, smear


@pytest.fixture
def project(tmp_path):
    with Project.create(tmp_path / "project", NAMES) as made:
        yield made


def test_a_run_has_the_projects_data_and_sizes(project):
    fill(project, [1, 2])
    file = start_run_config(project, "blood-cells", scope="stain", epochs=3)
    recipe = Recipe.read(json.loads(file.read_text())["settings"])
    assert (recipe.model, recipe.scope, recipe.epochs) == ("blood-cells", "stain", 3)
    assert recipe.data == str(project.data)
    assert recipe.image_size == 128
    assert recipe.pixel_size == pytest.approx(0.1)
    assert file.parent.parent == project.path / "runs"
    assert start_run_config(project, "blood-cells").parent != file.parent


def test_without_images_or_boxes_there_is_nothing_to_train_on(project):
    with pytest.raises(DataError, match="No image has been added"):
        start_run_config(project, "blood-cells")
    source, rgb, annotations = smear(1)
    project.add_image(source, rgb, annotations[[]], 128)
    with pytest.raises(DataError, match="None of the images has a box"):
        check_ready(project)
    assert not list((project.path / "runs").iterdir())


def test_a_wrong_setting_makes_no_folder(project):
    fill(project, [1, 2])
    with pytest.raises(ValueError, match="no setting 'speed'"):
        start_run_config(project, "blood-cells", speed=3)
    assert not list((project.path / "runs").iterdir())


def test_the_pixel_size_is_that_of_all_or_of_none(project):
    fill(project, [1])
    assert pixel_size(project) == pytest.approx(0.1)
    source, rgb, annotations = smear(2)
    twice = source.__class__(source.name, source.digest, source.shape, None, (0.05, 0.05))
    project.add_image(twice, rgb, annotations, 128, side=256)
    middle = np.median([row.side for row in project.rows])
    assert pixel_size(project) == pytest.approx(128 * 0.1 / middle, rel=1e-4)
    project.add_image(twice, rgb, annotations, 128)
    assert pixel_size(project) is None


def test_runs_are_found_again_with_their_state(project):
    fill(project, [1, 2])
    first = start_run_config(project, "blood-cells").parent
    second = start_run_config(project, "blood-cells").parent
    (project.path / "runs" / "notes.txt").write_text("mine")
    (project.path / "runs" / "broken").mkdir()
    RunFolder(first, locked=False).write_run(state="running", epoch=4)
    (first / "state.pt").touch()
    found = runs(project)
    assert [run.path for run in found] == [first, second]
    assert (found[0].state, found[0].epoch, found[0].working) == ("running", 4, False)
    assert found[0].can_resume
    assert not found[1].can_resume
    lock = FolderLock(first / ".lock")
    try:
        assert runs(project)[0].working
        assert not runs(project)[0].can_resume
    finally:
        lock.release()


def test_a_run_at_work_in_another_process_is_seen(project):
    fill(project, [1, 2])
    folder = start_run_config(project, "blood-cells").parent
    code = (
        "import sys, time\nfrom napari_beerlanet.core.runfiles import RunFolder\n"
        "folder = RunFolder(sys.argv[1])\nprint('at work', flush=True)\ntime.sleep(60)\n"
    )
    command = [sys.executable, "-c", code, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout.readline() == "at work\n"
        assert runs(project)[0].working
        other.kill()
        other.wait()
    assert not runs(project)[0].working


def test_models_are_kept_and_never_overwritten(project, tmp_path):
    checkpoint = tmp_path / "best.safetensors"
    checkpoint.write_bytes(b"one")
    first = keep_model(project, checkpoint, "Blood v1.2 (our lab)")
    checkpoint.write_bytes(b"two")
    second = keep_model(project, checkpoint, "Blood v1.2 (our lab)")
    assert first.name == "Blood-v1-2-our-lab.safetensors"
    assert [path.read_bytes() for path in (first, second)] == [b"one", b"two"]
    assert models(project) == sorted([first, second])
    with pytest.raises(ProjectError, match="no such checkpoint"):
        keep_model(project, tmp_path / "none.safetensors", "x")


@pytest.mark.slow
def test_a_run_of_a_project_trains(project):
    fill(project, range(3), shape=(96, 96), size=96)
    file = start_run_config(
        project, "blood-cells", scope="stain", epochs=1, device="cpu", repeats=1, batch=2
    )
    command = [sys.executable, "-m", "napari_beerlanet.core.train", "--config", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project.path)
    assert done.returncode == 0, done.stderr
    run = runs(project)[0]
    assert run.state == "finished"
    assert keep_model(project, run.best, "mine").stat().st_size > 1000
