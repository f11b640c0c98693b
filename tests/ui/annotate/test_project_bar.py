"""Choosing the project: new ones, open ones, those of other viewers, those that cannot be used."""

import subprocess
import sys
import textwrap

import pytest

from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate.project_bar import ProjectBar
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.recent import recent_projects
from napari_beerlanet.ui.common.session import (
    ProjectStore,
    get_project_store,
    last_open_project,
    save_open_project,
)

OTHER = """
    import sys
    from napari_beerlanet.core.project.project import Project
    project = Project.open(sys.argv[1])
    print("open", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def bar(shared_viewer):
    """The bar in a docked panel, with two classes at hand."""
    viewer = shared_viewer()
    panel = Panel(viewer)
    made = ProjectBar(panel, lambda: ["RBC", "WBC"])
    panel.body.addWidget(made)
    viewer.window.add_dock_widget(panel)
    return made


def test_projects_are_remembered_the_last_one_first(tmp_path):
    for name in "abc":
        save_open_project(tmp_path / name)
    assert [path.name for path in recent_projects()] == ["c", "b", "a"]
    assert last_open_project() == tmp_path / "c"
    save_open_project(tmp_path / "a")
    assert [path.name for path in recent_projects()] == ["a", "c", "b"]


def test_a_damaged_note_of_the_open_project_is_none(tmp_path):
    save_open_project(tmp_path / "a")
    file = tmp_path / "settings" / "open.json"
    for content in ("[1, 2", '{"open": 7}', "[]"):
        file.write_text(content)
        assert last_open_project() is None


def test_another_project_closes_the_one_before(tmp_path):
    store, told = ProjectStore(), []
    store.changed.connect(told.append)
    first = Project.create(tmp_path / "a", ["x"])
    store.put(first)
    store.put(Project.create(tmp_path / "b", ["x"]))
    assert first.read_only
    assert len(told) == 2
    store.put(None)
    assert last_open_project() is None
    assert [path.name for path in recent_projects()] == ["b", "a"]


@pytest.mark.window
def test_a_project_is_made_and_shown(bar, until, tmp_path):
    bar.create_project(tmp_path / "cells of Jürgen")
    until(lambda: bar.store.project is not None)
    assert bar.store.project.classes == ["RBC", "WBC"]
    assert bar.choice.currentText() == "cells of Jürgen"
    assert "0 images" in bar.status.text()
    assert get_project_store(bar.store and bar.window()._qt_viewer.viewer) is bar.store


@pytest.mark.window
def test_a_project_without_classes_is_refused(bar, tmp_path):
    bar._classes = list
    bar.create_project(tmp_path / "p")
    assert "needs classes" in bar.status.text()
    assert not (tmp_path / "p").exists()


@pytest.mark.window
def test_a_folder_without_a_project_is_refused_and_the_open_one_stays(bar, until, tmp_path):
    bar.create_project(tmp_path / "p")
    until(lambda: bar.store.project is not None)
    bar.open(tmp_path / "nowhere")
    until(lambda: "no such folder" in bar.status.text())
    assert bar.store.project.path == tmp_path / "p"
    assert bar.store.project.read_only == ""
    bar.create_project(tmp_path / "p")
    until(lambda: "already" in bar.status.text())


@pytest.mark.window
def test_what_another_viewer_writes_to_can_be_looked_at(bar, until, tmp_path):
    Project.create(tmp_path / "p", ["RBC"]).close()
    command = [sys.executable, "-c", textwrap.dedent(OTHER), str(tmp_path / "p")]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes) as other:
        assert other.stdout.readline() == "open\n"
        bar.open(tmp_path / "p")
        until(lambda: "another viewer" in bar.status.text())
        assert bar.store.project is None
        assert not bar.read_only_button.isHidden()
        bar.read_only_button.click()
        until(lambda: bar.store.project is not None)
        assert bar.store.project.read_only
        assert bar.read_only_button.isHidden()
    bar.open(tmp_path / "p")
    until(lambda: not bar.store.project.read_only)


@pytest.mark.window
def test_the_last_project_is_opened_again(bar, until, tmp_path):
    Project.create(tmp_path / "p", ["RBC"]).close()
    save_open_project(tmp_path / "p")
    bar.reopen()
    until(lambda: bar.store.project is not None)
    assert bar.store.project.path == tmp_path / "p"


@pytest.mark.window
def test_one_of_the_list_or_none_can_be_chosen(bar, until, tmp_path):
    for name in ("a", "b"):
        bar.create_project(tmp_path / name)
        until(lambda name=name: bar.choice.currentText() == name)
    shown = [bar.choice.itemText(k) for k in range(bar.choice.count())]
    assert shown == ["b", "a", "No project"]
    bar.choice.activated.emit(1)
    until(lambda: bar.store.project.path.name == "a")
    bar.choice.activated.emit(bar.choice.count() - 1)
    assert bar.store.project is None
