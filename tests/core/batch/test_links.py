"""Links to folders: what is read ends where they lead in circles, what is written stays inside."""

import os

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core.batch.inputs import find_images
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.benchmark.benchmark import run_benchmark
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats.dataset import list_images
from napari_beerlanet.core.project.files import ProjectError
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.training.runs import new_run, unused_model_path
from napari_beerlanet.samples import blood_smear
from projects import NAMES, smear
from tinyclasses import write_classes

pytestmark = pytest.mark.skipif(os.name == "nt", reason="links need a permission there")


@pytest.fixture
def images(tmp_path):
    """Two images, one of them in a subfolder with two links back up and one to elsewhere."""
    folder, elsewhere = tmp_path / "images", tmp_path / "elsewhere"
    picture = Image.fromarray(blood_smear((40, 40), cell_diameter=20).image)
    for place in (folder / "day 1", elsewhere):
        place.mkdir(parents=True)
        picture.save(place / "a.png")
    picture.save(folder / "b.png")
    (folder / "day 1" / "up").symlink_to(folder, target_is_directory=True)
    (folder / "day 1" / "up too").symlink_to(folder, target_is_directory=True)
    (folder / "other").symlink_to(elsewhere, target_is_directory=True)
    return folder


@pytest.mark.parametrize(
    ("given", "names"),
    [("**/*.png", "ab"), ("**", "ab"), ("**/a*", "a"), ("day 1/**/*.png", "a"), ("**.png", "b")],
)
def test_a_pattern_ends_where_links_lead_in_circles(images, given, names, tmp_path):
    found = list(find_images([str(images / given)], tmp_path / "out"))
    assert [path.stem for path in sorted(found, key=lambda path: path.name)] == list(names)
    assert {path.parent for path in found} <= {images, images / "day 1"}


def test_hidden_files_match_no_pattern_unless_it_says_so(images, tmp_path):
    (images / ".kept").mkdir()
    (images / "b.png").rename(images / ".kept" / "b.png")
    out = tmp_path / "out"
    assert list(find_images([str(images / "**" / "b.png")], out)) == [images / "**" / "b.png"]
    assert list(find_images([str(images / ".kept" / "**" / "*.png")], out)) == [
        images / ".kept" / "b.png"
    ]


def test_links_below_a_folder_are_not_followed_and_that_is_said(images, tmp_path):
    done = run_study(
        images, tmp_path / "out", {"decompose": True, "previews": False, "iterations": 2},
        recursive=True, workers=0,
    )  # fmt: skip
    assert sorted(entry.job.name for entry in done.entries if entry.status == "done") == ["a", "b"]
    failed = {entry.job.source: entry.error for entry in done.entries if entry.status == "failed"}
    assert set(failed) == {images / "other", images / "day 1" / "up", images / "day 1" / "up too"}
    assert failed[images / "other"] == (
        f"{images / 'other'}: a link to a folder, which is not followed; name the folder itself."
    )
    linked = run_study(images / "other", tmp_path / "out 2", {"previews": False}, workers=0)
    assert [entry.status for entry in linked.entries] == ["done"], "it was named"


def test_a_dataset_ends_where_links_lead_in_circles(images):
    assert sorted(list_images(images, images)) == [images / "b.png", images / "day 1" / "a.png"]


@pytest.mark.parametrize("inner", ["records", ".work", "yolo"])
def test_results_stay_in_their_folder(images, tmp_path, inner):
    out, outside = tmp_path / "out", tmp_path / "outside"
    for folder in (out, outside):
        folder.mkdir()
    (out / inner).symlink_to(outside, target_is_directory=True)
    with pytest.raises(FileError, match=f"{inner}: a link to another folder, .*; remove the link"):
        run_study(images, out, {"previews": False}, workers=0)
    assert list(outside.iterdir()) == []
    assert [path.name for path in out.iterdir()] == [inner]


def test_a_benchmark_stays_in_its_folder(tmp_path):
    here, there = (write_classes(tmp_path / name, 1) for name in ("one", "two"))
    out, outside = tmp_path / "out", tmp_path / "outside"
    for folder in (out, outside):
        folder.mkdir()
    (out / "runs").symlink_to(outside, target_is_directory=True)
    task = {"name": "a", "kind": "classify", "train": str(here), "tests": {"b": str(there)}}
    with pytest.raises(FileError, match="runs: a link to another folder"):
        run_benchmark({"tasks": [task], "methods": ["none"]}, out, workers=0)
    assert list(outside.iterdir()) == []


@pytest.mark.parametrize("inner", ["annotations", "images", "labels/train", "runs", "cells"])
def test_a_project_with_a_linked_folder_may_be_looked_at(tmp_path, inner):
    path, outside = tmp_path / "project", tmp_path / "outside"
    with Project.create(path, NAMES) as project:
        source, pixels, annotations = smear(1)
        project.add_image(source, pixels, annotations, 64)
    if (path / inner).exists():
        (path / inner).rename(outside)
    else:
        outside.mkdir()
    (path / inner).symlink_to(outside, target_is_directory=True)
    before = {file: file.stat().st_mtime_ns for file in outside.rglob("*")}
    with Project.open(path) as again:
        assert again.read_only
        assert again.load_annotations(source) is not None
        with pytest.raises(ProjectError, match=r"another folder, .* project is read-only"):
            again.save_annotations(source, annotations)
    assert {file: file.stat().st_mtime_ns for file in outside.rglob("*")} == before


def test_runs_and_models_stay_in_their_project(tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    for name in ("runs", "models"):
        (tmp_path / name).symlink_to(outside, target_is_directory=True)
    with pytest.raises(FileError, match="runs: a link to another folder"):
        new_run(tmp_path, {})
    with pytest.raises(FileError, match="models: a link to another folder"):
        unused_model_path(tmp_path, "mine")
    assert list(outside.iterdir()) == []


def test_a_result_replaces_a_link_and_not_what_it_leads_to(tmp_path):
    picture, out = tmp_path / "a.png", tmp_path / "out"
    Image.fromarray(np.full((8, 8, 3), 200, np.uint8)).save(picture)
    out.mkdir()
    mine = tmp_path / "mine.json"
    mine.write_text("mine")
    (out / "a.spectra.json").symlink_to(mine)
    done = run_study(picture, out, {"previews": False, "iterations": 2}, workers=0, layout="files")
    assert [entry.status for entry in done.entries] == ["done"], done.entries[0].error
    assert mine.read_text() == "mine"
    assert not (out / "a.spectra.json").is_symlink()
