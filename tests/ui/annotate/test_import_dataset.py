"""Importing annotated images into the project from the Annotate panel."""

import json
import time

import numpy as np
import pytest
from PIL import Image
from qtpy.QtWidgets import QFileDialog

from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate.widget import AnnotateWidget

pytestmark = pytest.mark.window

BOX = np.array([[9.5, 19.5], [9.5, 39.5], [29.5, 39.5], [29.5, 19.5]])  # x 20 to 40, y 10 to 30


def write_dataset(folder, smear, count=4):
    """`count` crops of a smear with a box each as a YOLO dataset; its data.yaml."""
    for kind in ("images", "labels"):
        (folder / kind).mkdir(parents=True)
    for k in range(count):
        Image.fromarray(np.roll(smear, 17 * k, axis=1)).save(folder / "images" / f"{k}.png")
        (folder / "labels" / f"{k}.txt").write_text(f"{k % 2} 0.5 0.5 0.25 0.25\n")
    path = folder / "data.yaml"
    names = {0: "RBC", 1: "parasite"}
    content = {"path": str(folder), "train": "images", "val": "images", "names": names}
    path.write_text(json.dumps(content))  # JSON is YAML, too
    return path


@pytest.fixture
def panel(shared_viewer, until, tmp_path):
    """The panel of a viewer without images, with a new project of one class."""
    viewer = shared_viewer()
    made = AnnotateWidget(viewer)
    viewer.window.add_dock_widget(made, name="Annotate")
    made.store.classes.add(["RBC"])
    made.project.create_project(tmp_path / "project")
    until(lambda: made.store.project is not None)
    return made


def choose(monkeypatch, path):
    """Answer the file dialogs with a path."""
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(path))
    monkeypatch.setattr(QFileDialog, "getOpenFileName", lambda *_: (str(path), ""))


@pytest.mark.parametrize("kind", ["folder", "file"])
def test_a_dataset_is_imported_with_a_summary(panel, until, tmp_path, smear, monkeypatch, kind):
    data = write_dataset(tmp_path / "data", smear)
    choose(monkeypatch, data.parent if kind == "folder" else data)
    action = panel.import_folder_action if kind == "folder" else panel.import_file_action
    action.trigger()
    assert panel.bar.cancel.isVisibleTo(panel)
    assert not panel.import_dataset.isEnabled()
    until(lambda: not panel.annotation_actions.project_task.running)
    text = panel.message.text()
    assert "Imported 4 images" in text
    assert "4 boxes in" in text
    assert "for training" in text
    assert "for validation" in text
    assert "New in the project: parasite." in text
    assert panel.store.project.summary()["images"] == 4
    assert panel.store.classes.names == ["RBC", "parasite"]
    assert "4 images" in panel.project.status.text()
    assert panel.import_dataset.isEnabled()


def test_an_import_can_be_cancelled_and_keeps_what_it_has(
    panel, until, tmp_path, smear, monkeypatch
):
    choose(monkeypatch, write_dataset(tmp_path / "data", smear, 6))
    add_image = Project.add_image

    def slowly(self, *args, **options):
        time.sleep(0.2)
        return add_image(self, *args, **options)

    monkeypatch.setattr(Project, "add_image", slowly)
    panel.import_file_action.trigger()
    until(lambda: panel.store.project.summary()["images"] >= 2)
    panel.bar.cancel.click()
    until(lambda: not panel.annotation_actions.project_task.running)
    assert "imported so far stay" in panel.bar.text
    assert 2 <= panel.store.project.summary()["images"] < 6


def test_what_cannot_be_imported_is_reported(panel, until, tmp_path, monkeypatch):
    (tmp_path / "empty").mkdir()
    choose(monkeypatch, tmp_path / "empty")
    panel.import_folder_action.trigger()
    until(lambda: not panel.annotation_actions.project_task.running)
    assert "no image with annotations" in panel.bar.text
    assert panel.store.project.summary()["images"] == 0


def test_without_a_project_nothing_can_be_imported(panel, until):
    panel.store.projects.put(None)
    assert not panel.import_dataset.isEnabled()
    panel.annotation_actions.import_dataset("anywhere")
    assert "no project" in panel.message.text()


def test_a_dialog_that_is_cancelled_imports_nothing(panel, monkeypatch):
    choose(monkeypatch, "")
    panel.import_folder_action.trigger()
    panel.import_file_action.trigger()
    assert not panel.annotation_actions.project_task.running


def test_an_imported_image_that_is_being_annotated_asks_whose_boxes_are_right(
    panel, until, tmp_path, smear, monkeypatch
):
    panel.viewer.add_image(smear, name="smear")
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    panel.annotation_actions.annotated.boxes.layer.add([BOX, BOX + 50])
    choose(monkeypatch, write_dataset(tmp_path / "data", smear, 1))  # the same pixels
    panel.import_file_action.trigger()
    until(lambda: "Which ones should it keep?" in panel.question.text.text())
    assert not panel.question.isHidden()
    panel.question.buttons[1].click()
    assert len(panel.annotation_actions.annotated.boxes.all()) == 1


def test_an_image_that_is_being_annotated_is_left_alone_if_the_import_does_not_change_it(
    panel, until, tmp_path, smear, monkeypatch
):
    panel.viewer.add_image(smear, name="smear")
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    annotated = panel.annotation_actions.annotated
    annotated.boxes.layer.add([BOX, BOX + 50])
    panel.store.autosave.flush()
    choose(monkeypatch, write_dataset(tmp_path / "data", smear[::-1], 2))
    panel.import_file_action.trigger()
    until(lambda: not panel.annotation_actions.project_task.running and not annotated.held)
    assert annotated.boxes.history.undo_label == "draw"
    assert len(annotated.boxes.all()) == 2
    assert not panel.store.conflicts
    assert "Saved in project" in panel.saved.text()
    assert not list(panel.store.autosave.drafts.folder.glob("*"))
