"""An annotated image file that has changed on disk: the user decides what becomes of its boxes."""

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.ui.annotate.widget import AnnotateWidget

pytestmark = pytest.mark.window

BOX = np.array([[9.5, 19.5], [9.5, 39.5], [29.5, 39.5], [29.5, 19.5]])  # x 20 to 40, y 10 to 30


@pytest.fixture
def open_file(shared_viewer, until, tmp_path):
    """A function that opens the file in a new viewer, with or without the project."""

    def opened(project=True) -> AnnotateWidget:
        viewer = shared_viewer()
        viewer.open(str(tmp_path / "smear.png"), plugin="napari")
        panel = AnnotateWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Annotate")
        until(lambda: not panel.project.task.running)
        panel.store.projects.put(None)
        panel.store.classes.add(["RBC"])
        if project:
            folder = tmp_path / "project"
            (panel.project.open if folder.exists() else panel.project.create_project)(folder)
            until(lambda: panel.store.project is not None)
        return panel

    return opened


@pytest.fixture
def changed(open_file, until, tmp_path, smear):
    """The file, annotated with two boxes in the project and then saved with other pixels."""
    path = tmp_path / "smear.png"
    Image.fromarray(smear).save(path)
    panel = open_file()
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    panel.annotation_actions.annotated.boxes.layer.add([BOX, BOX + 50])
    panel.store.autosave.flush()
    panel.store.projects.put(None)
    panel.viewer.close()
    Image.fromarray(255 - smear // 2).save(path)
    return path


def asks(panel) -> bool:
    return (
        not panel.question.isHidden()
        and "“smear” has changed since it was annotated." in panel.question.text.text()
    )


def count(panel) -> int:
    return len(panel.annotation_actions.annotated.boxes.all())


def test_the_existing_annotations_can_be_used(changed, open_file, until):
    panel = open_file()
    panel.annotate.click()
    until(lambda: asks(panel))
    assert panel.annotation_actions.annotated is None
    panel.question.buttons[0].click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert count(panel) == 2
    assert panel.question.isHidden()
    assert len(panel.store.project.sources()) == 1
    panel.store.projects.put(None)
    panel.viewer.close()
    again = open_file()
    again.annotate.click()
    until(lambda: again.annotation_actions.annotated is not None)
    assert count(again) == 2, "the decision holds"


def test_or_one_starts_anew_and_the_project_keeps_both(changed, open_file, until):
    panel = open_file()
    panel.annotate.click()
    until(lambda: asks(panel))
    panel.question.buttons[1].click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert count(panel) == 0
    panel.annotation_actions.annotated.boxes.layer.add(BOX)
    panel.store.autosave.flush()
    assert len(panel.store.project.sources()) == 2


def test_the_question_goes_with_the_project(changed, open_file, until):
    panel = open_file()
    panel.annotate.click()
    until(lambda: asks(panel))
    panel.store.projects.put(None)
    assert panel.question.isHidden()
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert count(panel) == 0


@pytest.mark.parametrize("use", [True, False])
def test_it_is_asked_too_when_the_project_is_opened_later(changed, open_file, until, use):
    panel = open_file(project=False)
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    panel.annotation_actions.annotated.boxes.layer.add(BOX)
    panel.project.open(changed.parent / "project")
    until(lambda: asks(panel))
    panel.question.buttons[0 if use else 1].click()
    until(lambda: not panel.store.conflicts)
    panel.store.autosave.flush()
    assert count(panel) == (2 if use else 1)
    assert len(panel.store.project.sources()) == (1 if use else 2)


@pytest.fixture
def changed_draft(open_file, until, tmp_path, smear):
    """The file, annotated with two boxes without a project and then saved with other pixels."""
    path = tmp_path / "smear.png"
    Image.fromarray(smear).save(path)
    panel = open_file(project=False)
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    panel.annotation_actions.annotated.boxes.layer.add([BOX, BOX + 50])
    panel.store.autosave.flush()
    panel.viewer.close()
    Image.fromarray(255 - smear // 2).save(path)
    return path


@pytest.mark.parametrize("project", [False, True])
def test_a_draft_of_a_changed_file_can_be_used(changed_draft, open_file, until, project):
    panel = open_file(project=project)
    panel.annotate.click()
    until(lambda: asks(panel))
    assert panel.annotation_actions.annotated is None
    panel.question.buttons[0].click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert count(panel) == 2
    panel.store.autosave.flush()
    if project:
        assert len(panel.store.project.sources()) == 1
    panel.store.projects.put(None)
    panel.viewer.close()
    again = open_file(project=project)
    again.annotate.click()
    until(lambda: again.annotation_actions.annotated is not None)
    assert count(again) == 2, "the decision holds"
    drafts = again.store.autosave.drafts
    assert len(list(drafts.folder.glob("*.aside"))) == 1, "the earlier draft is kept"


def test_or_one_starts_anew_and_the_draft_is_kept(changed_draft, open_file, until):
    panel = open_file(project=False)
    panel.annotate.click()
    until(lambda: asks(panel))
    panel.question.buttons[1].click()
    until(lambda: panel.annotation_actions.annotated is not None)
    assert count(panel) == 0
    panel.annotation_actions.annotated.boxes.layer.add(BOX)
    panel.store.autosave.flush()
    drafts = panel.store.autosave.drafts
    assert sorted(len(drafts.load(source)) for source in drafts.sources()) == [1, 2]


def test_a_file_that_has_not_changed_is_not_asked_about(open_file, until, tmp_path, smear):
    Image.fromarray(smear).save(tmp_path / "smear.png")
    for expected in (0, 1):
        panel = open_file()
        panel.annotate.click()
        until(lambda panel=panel: panel.annotation_actions.annotated is not None)
        assert count(panel) == expected
        if not expected:
            panel.annotation_actions.annotated.boxes.layer.add(BOX)
        panel.store.autosave.flush()
        panel.store.projects.put(None)
        panel.viewer.close()


@pytest.mark.parametrize("change", ["nothing", "a name", "boxes", "the file"])
def test_crops_that_are_outdated_do_not_pass_as_in_the_project(
    open_file, until, tmp_path, smear, change
):
    """A restart does not make them newer: the next step is to add the image again."""
    path = tmp_path / "smear.png"
    Image.fromarray(smear).save(path)
    panel = open_file()
    actions = panel.annotation_actions
    panel.annotate.click()
    until(lambda: actions.annotated is not None)
    actions.annotated.boxes.layer.add([BOX, BOX + 50])
    actions.add_to_project()
    until(lambda: actions.in_project)
    project = panel.store.project
    if change == "a name":
        project.rename_class("RBC", "red cell")
    elif change == "boxes":
        actions.annotated.boxes.layer.add([BOX + 90])
        assert not actions.in_project
    panel.store.autosave.flush()
    panel.store.projects.put(None)
    panel.viewer.close()
    if change == "the file":
        Image.fromarray(255 - smear // 2).save(path)
    again = open_file()
    again.annotate.click()
    if change == "the file":
        until(lambda: asks(again))
        again.question.buttons[0].click()
    until(lambda: again.annotation_actions.annotated is not None)
    assert count(again) == (3 if change == "boxes" else 2)
    assert again.annotation_actions.in_project == (change in ("nothing", "a name"))
    again.store.projects.put(None)
