"""Annotations reach the disk by themselves, and come back after a crash or a full disk."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest

from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate import autosave
from napari_beerlanet.ui.annotate.autosave import Drafts, find_saved
from napari_beerlanet.ui.annotate.widget import AnnotateWidget
from napari_beerlanet.ui.common.session import save_open_project
from napari_beerlanet.ui.workspace.workspace import ANNOTATE, STAINS, open_workspace
from projects import NAMES
from projects import smear as field

pytestmark = pytest.mark.window

BOX = np.array([[9.5, 19.5], [9.5, 39.5], [29.5, 39.5], [29.5, 19.5]])  # x 20 to 40, y 10 to 30


@pytest.fixture
def quick(monkeypatch):
    """Try again soon."""
    monkeypatch.setattr(autosave, "SAVE_DELAY_MS", 100)
    monkeypatch.setattr(autosave, "RETRY_DELAY_MS", 300)


@pytest.fixture
def open_panel(shared_viewer, smear, until):
    """A function that opens a viewer with a smear and begins to annotate it."""

    def opened(image=smear, name="smear", project: Path | None = None) -> AnnotateWidget:
        viewer = shared_viewer()
        viewer.add_image(image, name=name)
        panel = AnnotateWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Annotate")
        panel.store.classes.add(["RBC", "WBC"])
        if project is not None:
            until(lambda: not panel.project.task.running)
            (panel.project.open if project.exists() else panel.project.create_project)(project)
            until(lambda: panel.store.project is not None)
        panel.annotate.click()
        until(lambda: panel.annotation_actions.annotated is not None)
        return panel

    return opened


def draw(panel, *boxes):
    panel.annotation_actions.annotated.boxes.layer.add(list(boxes))


def files(folder: Path) -> list[dict]:
    return [json.loads(file.read_text()) for file in sorted(folder.glob("[!.]*.json"))]


def drafts(panel) -> list[dict]:
    return files(panel.store.autosave.drafts.folder)


def test_a_change_is_in_the_project_without_a_click(open_panel, until, tmp_path):
    panel = open_panel(project=tmp_path / "p")
    draw(panel, BOX)
    until(lambda: files(tmp_path / "p" / "annotations") != [])
    (saved,) = files(tmp_path / "p" / "annotations")
    assert saved["objects"][0]["box"] == [20, 10, 40, 30]
    assert saved["objects"][0]["class"] == "RBC"
    until(lambda: "Saved in p" in panel.saved.text())
    assert drafts(panel) == []


def test_without_a_project_a_draft_is_kept_and_it_is_said_where(open_panel, until):
    panel = open_panel()
    draw(panel, BOX)
    until(lambda: "draft" in panel.saved.text())
    folder = str(panel.store.autosave.drafts.folder)
    assert folder in panel.saved.toolTip()
    assert folder not in panel.saved.text(), "a long path is cut off"
    assert len(drafts(panel)[0]["objects"]) == 1


def test_a_draft_goes_into_the_project_that_is_made_later(open_panel, until, tmp_path):
    panel = open_panel()
    draw(panel, BOX)
    until(lambda: drafts(panel) != [])
    panel.project.create_project(tmp_path / "p")
    until(lambda: files(tmp_path / "p" / "annotations") != [])
    until(lambda: drafts(panel) == [])


def test_annotations_come_back_in_another_viewer(open_panel, until, tmp_path):
    panel = open_panel(project=tmp_path / "p")
    draw(panel, BOX, BOX + 60)
    panel.viewer.close()  # at once: what is not saved yet is saved now
    panel.store.projects.release()
    again = open_panel(project=tmp_path / "p")
    assert len(again.annotation_actions.annotated.boxes.all()) == 2
    assert again.annotation_actions.annotated.unsaved() == {}


def test_drawn_regions_come_back_in_another_viewer(open_panel, tmp_path):
    panel = open_panel(project=tmp_path / "p")
    draw(panel, BOX)
    panel.draw_regions.click()
    panel.annotation_actions.annotated.regions.layer.add(
        [BOX * 2, BOX * 3], shape_type=["rectangle", "polygon"]
    )
    panel.viewer.close()
    panel.store.projects.release()
    again = open_panel(project=tmp_path / "p")
    regions = again.annotation_actions.annotated.annotations(()).regions
    assert [region.kind for region in regions] == ["rectangle", "rectangle"]
    assert "2 regions" in again.coverage.text()
    assert again.viewer.layers["smear · annotated regions"].nshapes == 2


def test_annotations_come_back_after_their_layer_was_deleted(open_panel, until):
    panel = open_panel()
    draw(panel, BOX)
    panel.viewer.layers.remove(panel.annotation_actions.annotated.boxes.layer)
    assert panel.annotation_actions.annotated is None
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert len(panel.annotation_actions.annotated.boxes.all()) == 1


def test_planes_of_a_stack_are_saved_apart_and_come_back(open_panel, until, smear):
    stack = np.stack([smear, smear[::-1], smear[:, ::-1]])
    panel = open_panel(stack, "stack")
    draw(panel, np.insert(BOX, 0, 0, axis=1), np.insert(BOX, 0, 2, axis=1))
    until(lambda: len(drafts(panel)) == 2)
    panel.viewer.close()
    again = open_panel(stack, "stack")
    assert again.annotation_actions.annotated.boxes.planes() == [(0,), (2,)]


def test_a_full_disk_is_told_and_tried_again(open_panel, until, tmp_path, monkeypatch, quick):
    panel = open_panel(project=tmp_path / "p")
    whole = Project.save_annotations

    def full(self, source, annotations):
        raise OSError(28, "No space left on device", str(self.path))

    monkeypatch.setattr(Project, "save_annotations", full)
    draw(panel, BOX)
    until(lambda: "no space left" in panel.saved.text().lower())
    assert "Retrying" in panel.saved.text()
    assert len(drafts(panel)) == 1
    monkeypatch.setattr(Project, "save_annotations", whole)
    until(lambda: "Saved in p" in panel.saved.text())
    assert len(files(tmp_path / "p" / "annotations")) == 1
    assert drafts(panel) == []


def test_a_read_only_project_leaves_drafts(open_panel, until, tmp_path):
    Project.create(tmp_path / "p", ["RBC"]).close()
    panel = open_panel()
    panel.project.open(tmp_path / "p", read_only=True)
    until(lambda: panel.store.project is not None)
    assert "read-only" in panel.project.status.text()
    draw(panel, BOX)
    until(lambda: len(drafts(panel)) == 1)
    panel.add.click()
    assert "read-only" in panel.message.text()


def test_a_project_of_a_newer_version_is_not_changed(open_panel, until, tmp_path):
    Project.create(tmp_path / "p", ["RBC"]).close()
    manifest = tmp_path / "p" / "project.json"
    content = json.loads(manifest.read_text()) | {"format": 99}
    manifest.write_text(json.dumps(content))
    panel = open_panel()
    panel.project.open(tmp_path / "p")
    until(lambda: panel.store.project is not None)
    assert "newer version" in panel.project.status.text()
    draw(panel, BOX)
    until(lambda: len(drafts(panel)) == 1)
    assert json.loads(manifest.read_text()) == content


@pytest.fixture
def asked(open_panel, until, tmp_path):
    """A panel with two boxes of an image of which the project that is opened has another one."""
    first = open_panel(project=tmp_path / "p")
    draw(first, BOX)
    first.viewer.close()
    first.store.projects.put(None)
    panel = open_panel()
    draw(panel, BOX + 50, BOX + 80)
    panel.project.open(tmp_path / "p")
    until(lambda: "Which ones should it keep?" in panel.question.text.text())
    return panel


def counts(found: list[dict]) -> list[int]:
    return [len(content["objects"]) for content in found]


def test_nothing_is_lost_while_nobody_says_whose_boxes_hold(asked, until, tmp_path):
    draw(asked, BOX + 100)
    until(lambda: counts(drafts(asked)) == [3])
    assert counts(files(tmp_path / "p" / "annotations")) == [1]


def test_the_project_s_boxes_may_hold(asked):
    asked.question.buttons[1].click()
    assert len(asked.annotation_actions.annotated.boxes.all()) == 1
    assert drafts(asked) == []
    assert len(list(asked.store.autosave.drafts.folder.glob("*.aside"))) == 1


def test_those_drawn_may_hold(asked, until, tmp_path):
    asked.question.buttons[0].click()
    until(lambda: counts(files(tmp_path / "p" / "annotations")) == [2])
    until(lambda: drafts(asked) == [])


CRASH = """
    import sys, numpy as np, napari
    from qtpy.QtCore import QTimer
    from napari_beerlanet.samples import blood_smear
    from napari_beerlanet.ui.annotate.widget import AnnotateWidget

    viewer = napari.Viewer(show=True)
    viewer.add_image(blood_smear((240, 320), cell_diameter=50).image, name="smear")
    panel = AnnotateWidget(viewer)
    viewer.window.add_dock_widget(panel, name="Annotate")
    panel.store.classes.add(["RBC", "WBC"])
    panel.project.create_project(sys.argv[1])
    rng, drawn = np.random.default_rng(0), [0]

    def draw():
        made = panel.annotation_actions.annotated
        if made is None:
            if panel.store.project is not None:
                panel.annotation_actions.start()
            return
        y, x = rng.uniform(0, 180, 2)
        made.boxes.layer.add(np.array([[y, x], [y, x + 30], [y + 20, x + 30], [y + 20, x]]))
        drawn[0] += 1
        print(drawn[0], flush=True)

    timer = QTimer()
    timer.timeout.connect(draw)
    timer.start(60)
    napari.run()
"""


KILLS = int(os.environ.get("KILLS", "2"))  # more of them take minutes


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(KILLS))
def test_a_killed_viewer_loses_no_more_than_the_last_moments(open_panel, tmp_path, seed):
    rng, folder = np.random.default_rng(seed), tmp_path / "p"
    (tmp_path / "viewer.py").write_text(textwrap.dedent(CRASH))
    command = [sys.executable, str(tmp_path / "viewer.py"), str(folder)]
    least, saved = int(rng.integers(1, 40)), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as viewer:
        for line in viewer.stdout:
            saved = files(folder / "annotations")
            if int(line) >= least and saved:
                break
        time.sleep(float(rng.uniform(0, 1)))
        viewer.send_signal(signal.SIGKILL)
        viewer.wait()
    before = len(saved[0]["objects"])
    assert before > 0
    panel = open_panel(project=folder)
    assert len(panel.annotation_actions.annotated.boxes.all()) >= before
    assert panel.store.project.read_only == ""
    assert not list(folder.rglob("*.partial*"))


# --- saved annotations are shown when their image is opened ---------------------------------------


@pytest.fixture
def saved_draft(open_panel, until, smear):
    """Two boxes on the smear, saved as a draft by an earlier viewer."""
    panel = open_panel()
    draw(panel, BOX, BOX + 60)
    until(lambda: drafts(panel) != [] and len(drafts(panel)[0]["objects"]) == 2)
    panel.viewer.close()
    return panel.store.autosave.drafts.folder


def content(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_saved_annotations_are_there_when_the_image_is_opened(
    saved_draft, shared_viewer, smear, until, qtbot
):
    before = content(saved_draft)
    viewer = shared_viewer()
    panel = AnnotateWidget(viewer)
    viewer.window.add_dock_widget(panel, name="Annotate")
    other = viewer.add_image(255 - smear, name="without annotations")
    image = viewer.add_image(smear, name="smear")
    until(lambda: panel.store.of(image) is not None)
    shown = panel.store.of(image).boxes.layer
    assert shown.nshapes == 2
    assert shown.visible
    assert viewer.layers.selection.active is image, "the selection is the user's"
    assert shown.mode == "pan_zoom"
    panel.image.choose(image)
    assert "2 saved boxes of this image, from a draft" in panel.shown_from.text()
    assert panel.shown_from.isVisibleTo(panel)
    qtbot.wait(2 * autosave.SAVE_DELAY_MS)
    assert content(saved_draft) == before, "to look is not to save"
    assert panel.store.of(other) is None
    assert not [layer for layer in viewer.layers if layer.name.startswith("without annotations ·")]
    again = viewer.add_image(smear, name="the same pixels")
    until(lambda: again in panel.store._looked_up and not panel.store._show_task.running)
    assert panel.store.of(again) is None, "boxes have one place"
    panel.image.choose(image)
    panel.annotate.click()
    assert viewer.layers.selection.active is shown
    assert shown.mode == "add_rectangle"
    assert panel.store.of(image).shown_from == ""
    viewer.layers.remove(shown)
    qtbot.wait(300)
    assert panel.store.of(image) is None, "what the user puts away stays away"


def test_a_draft_that_is_only_shown_does_not_go_into_a_project(
    saved_draft, shared_viewer, smear, until, tmp_path, qtbot
):
    viewer = shared_viewer()
    image = viewer.add_image(smear, name="smear")
    panel = AnnotateWidget(viewer)
    viewer.window.add_dock_widget(panel, name="Annotate")
    until(lambda: panel.store.of(image) is not None)
    panel.project.create_project(tmp_path / "p")
    until(lambda: panel.store.project is not None)
    until(lambda: panel.store.of(image) is not None and not panel.store._show_task.running)
    qtbot.wait(2 * autosave.SAVE_DELAY_MS)
    assert files(tmp_path / "p" / "annotations") == []
    assert "go into p when you continue" in panel.shown_from.text()
    panel.annotate.click()
    until(lambda: files(tmp_path / "p" / "annotations") != [])
    assert len(files(tmp_path / "p" / "annotations")[0]["objects"]) == 2
    until(lambda: list(saved_draft.glob("[!.]*.json")) == [])


def test_the_projects_annotations_are_shown_once_it_is_open(open_panel, until, tmp_path, smear):
    panel = open_panel(project=tmp_path / "p")
    draw(panel, BOX)
    panel.viewer.close()
    panel.store.projects.release()
    save_open_project(None)
    panel = open_panel(255 - smear, "another")
    image = panel.viewer.add_image(smear, name="smear")
    until(lambda: image in panel.store._looked_up and not panel.store._show_task.running)
    assert panel.store.of(image) is None
    panel.project.open(tmp_path / "p")
    until(lambda: panel.store.of(image) is not None)
    panel.image.choose(image)
    assert "1 saved box of this image, from p" in panel.shown_from.text()
    draw(panel, BOX + 60)
    assert panel.store.of(image).shown_from == ""
    until(lambda: len(files(tmp_path / "p" / "annotations")) >= 1 and panel.saved.text() != "")
    until(lambda: max(len(f["objects"]) for f in files(tmp_path / "p" / "annotations")) == 2)


def test_the_workspace_shows_them_whatever_tab_is_open(saved_draft, shared_viewer, smear, until):
    viewer = shared_viewer()
    workspace = open_workspace(viewer, STAINS)
    assert workspace.panel(ANNOTATE) is None
    viewer.add_image(smear, name="smear")
    until(lambda: "smear · annotations" in viewer.layers)
    assert viewer.layers["smear · annotations"].nshapes == 2
    assert "smear · annotated regions" not in viewer.layers
    assert workspace.current_tab is STAINS
    assert viewer.layers.selection.active is viewer.layers["smear"]


def test_saved_boxes_of_an_image_that_is_hidden_are_hidden_with_it(
    saved_draft, shared_viewer, smear, until
):
    """Of two images that are opened together the last is seen, without boxes of the first."""
    viewer = shared_viewer()
    open_workspace(viewer, STAINS)
    first = viewer.add_image(smear, name="smear")
    viewer.add_image(255 - smear, name="another")
    until(lambda: "smear · annotations" in viewer.layers)
    shown = viewer.layers["smear · annotations"]
    assert not first.visible
    assert not shown.visible
    viewer.layers.selection.active = first
    until(lambda: shown.visible)


# --- a clock that was set back -------------------------------------------------------------------


def test_a_draft_that_seems_older_is_put_aside(tmp_path):
    source, _, annotations = field(1)
    other = replace(annotations, xyxy=annotations.xyxy + 1)
    drafts = Drafts(tmp_path / "drafts")
    with Project.create(tmp_path / "project", NAMES) as project:
        project.save_annotations(source, annotations)
        drafts.save(source, other)
        os.utime(drafts.path(source), (0, 0))  # drawn after it, as it happens
        found = find_saved(source, project, drafts)
        assert not found.draft
        assert not drafts.path(source).exists(), "the next save would remove it"
        (kept,) = drafts.folder.glob("*.aside")
        assert json.loads(kept.read_text())["objects"] == other.to_json()["objects"]
        drafts.save(source, annotations)
        os.utime(drafts.path(source), (0, 0))
        find_saved(source, project, drafts)
        assert list(drafts.folder.glob("*.aside")) == [kept], "nothing new is in this one"


def test_drafts_of_the_same_second_are_all_kept(tmp_path, monkeypatch):
    class Noon(datetime):
        @classmethod
        def now(cls, tz=None):
            return cls(2026, 5, 1, 12)

    monkeypatch.setattr(autosave, "datetime", Noon)
    source, _, annotations = field(1)
    drafts = Drafts(tmp_path)
    for shift in range(3):
        drafts.save(source, replace(annotations, xyxy=annotations.xyxy + shift))
        drafts.archive(source)
    assert len(list(tmp_path.glob("*.aside"))) == 3
