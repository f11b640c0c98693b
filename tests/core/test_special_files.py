"""Pipes and devices where files of ours should be: refused, as reading them would never end."""

import os
from pathlib import Path

import numpy as np
import pytest

from napari_beerlanet.core.benchmark.table import read_values
from napari_beerlanet.core.boxes.detections import Detections, DetectionTiles
from napari_beerlanet.core.common.events import EventTail
from napari_beerlanet.core.common.locking import FolderLock, lock_state, read_owner
from napari_beerlanet.core.common.storage import FileError, read_json, read_settings, read_yaml
from napari_beerlanet.core.formats.class_folders import _typed_cells
from napari_beerlanet.core.project.files import read_image_source
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.report.report import read_report_record
from napari_beerlanet.core.review.review import load_review
from napari_beerlanet.core.stains.presets import StainLibrary, read_preset
from projects import NAMES, fill

pytestmark = pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")


@pytest.fixture(params=["pipe", "device"])
def special(request, tmp_path):
    """A pipe that nobody writes to, or a link to a device that never ends."""

    def make(name: str, folder: Path = tmp_path) -> Path:
        path = folder / name
        path.unlink(missing_ok=True)
        if request.param == "pipe":
            os.mkfifo(path)
        else:
            path.symlink_to("/dev/zero")
        return path

    return make


@pytest.mark.parametrize("read", [read_json, read_yaml, read_settings, read_preset])
def test_settings(special, read):
    with pytest.raises(FileError, match="not a regular file"):
        read(special("a.json"))


def test_a_review(special):
    none = Detections(np.empty((0, 4)), np.empty(0, int), np.empty(0), ["RBC"])
    with pytest.raises(FileError, match="not a regular file"):
        load_review(special("a.review.json"), none)


def test_presets_are_left_out(special, tmp_path):
    special("a.json")
    assert StainLibrary(tmp_path).presets() == []


@pytest.mark.parametrize("name", ["project.json", "crops.csv"])
def test_a_project(special, tmp_path, name):
    with Project.create(tmp_path / "project", NAMES) as project:
        fill(project, [1], 64)
    special(name, tmp_path / "project")
    with pytest.raises((FileError, OSError), match=r"not a regular file|no project in"):
        Project.open(tmp_path / "project")


def test_a_project_without_a_lock_that_can_be_taken(special, tmp_path):
    with Project.create(tmp_path / "project", NAMES) as project:
        fill(project, [1], 64)
    special(".lock", tmp_path / "project")
    with Project.open(tmp_path / "project") as opened:
        assert opened.crops


def test_annotations_of_a_project(special):
    with pytest.raises((FileError, OSError), match="not a regular file"):
        read_image_source(special("a.json"))


def test_cells_of_a_project(special, tmp_path):
    special("cells.csv")
    with pytest.raises(FileError, match="damaged"):
        _typed_cells(tmp_path)


def test_values_of_a_benchmark(special):
    with pytest.raises(OSError, match="not a regular file"):
        read_values(special("values.csv"))


def test_events_of_a_run_are_none(special):
    assert EventTail(special("progress.jsonl")).read() == []


def test_a_report_has_no_record(special):
    assert read_report_record(special("a.html")) == {}


def test_locks(special):
    path = special("a.lock")
    assert read_owner(path) == {}
    assert lock_state(path) == "unknown"
    with pytest.raises(OSError, match="not a regular file"):
        FolderLock(path)


def test_the_lock_of_a_search(special, tmp_path):
    special("a.tiles.lock")
    with pytest.raises(OSError, match="not a regular file"):
        DetectionTiles.create(tmp_path / "a.tiles", {"identity": {}}, {})
