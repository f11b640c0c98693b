"""The button that leads through the loop: what it says follows from what there is."""

from dataclasses import replace

import numpy as np
import pytest
from qtpy.QtCore import Qt
from qtpy.QtWidgets import QFileDialog, QMenu

from discs import disc_detector
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.common.session import get_project_store, get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.viewer.layers import Role, role_of
from napari_beerlanet.ui.workspace.footer import Situation, Step, next_step
from napari_beerlanet.ui.workspace.workspace import (
    ANNOTATE,
    CELLS,
    STAINS,
    TRAIN,
    open_workspace,
)

RGB = np.full((48, 64, 3), 200, np.uint8)


def test_the_loop():
    now = Situation()
    assert next_step(now) is Step.OPEN
    now = replace(now, image=True)
    assert next_step(now) is Step.FIND
    assert next_step(replace(now, finding=True)) is Step.FINDING
    now = replace(now, detected=True)
    assert next_step(now) is Step.CORRECT
    assert next_step(replace(now, empty=True)) is Step.DRAW
    fits = replace(now, classifiable=True)
    assert next_step(fits) is Step.CLASSIFY
    assert next_step(replace(fits, classifying=True)) is Step.CLASSIFYING
    assert next_step(replace(fits, boxes=7)) is Step.ADD, "they are being corrected"
    now = replace(now, boxes=7)
    assert next_step(now) is Step.ADD
    assert next_step(replace(now, asked=True)) is Step.ANSWER
    assert next_step(replace(now, adding=True)) is Step.ADDING
    now = replace(now, added=True)
    assert next_step(now) is Step.TRAIN
    assert next_step(replace(now, at_start=True)) is Step.START
    assert next_step(replace(now, training=True)) is Step.TRAINING
    assert next_step(replace(now, decide=True)) is Step.KEEP
    kept = replace(now, learned=True, outdated=True)
    assert next_step(kept) is Step.FIND_AGAIN
    assert next_step(replace(kept, outdated=False)) is Step.OPEN_ANOTHER
    another = Situation(image=True, training=True)
    assert next_step(another) is Step.FIND, "while one trains, another image can be worked on"


def shown(workspace):
    return workspace.footer.next_button.text()


@pytest.mark.window
def test_without_an_image_it_offers_to_open_one(make_napari_viewer, qtbot, until):
    viewer = make_napari_viewer(show=True)
    workspace = open_workspace(viewer, STAINS)
    assert shown(workspace) == Step.OPEN
    qtbot.mouseClick(workspace.footer.next_button, Qt.MouseButton.LeftButton)
    until(lambda: any(menu.isVisible() for menu in workspace.findChildren(QMenu)))
    (menu,) = [menu for menu in workspace.findChildren(QMenu) if menu.isVisible()]
    menu.actions()[1].trigger()
    menu.close()
    until(lambda: workspace.image.layer is not None)
    until(lambda: shown(workspace) == Step.FIND)


@pytest.mark.window
def test_where_no_cell_was_found_the_next_step_is_to_draw(shared_viewer, qtbot, until):
    viewer = shared_viewer(show=True)
    image = viewer.add_image(RGB, name="empty field")
    workspace, session = open_workspace(viewer, CELLS), get_session(viewer)
    session.set_model(disc_detector(components=8, iterations=10))
    nothing = Detections(np.empty((0, 4)), np.empty(0, int), np.empty(0), ["RBC"])
    layer = DetectionLayer(viewer, image, nothing)
    session.set_detections(image, nothing, layer)
    until(lambda: shown(workspace) == Step.DRAW)
    qtbot.mouseClick(workspace.footer.next_button, Qt.MouseButton.LeftButton)
    until(lambda: any(role_of(layer) == Role.ANNOTATIONS for layer in viewer.layers))
    assert viewer.layers.selection.active.mode == "add_rectangle"
    assert workspace.current_tab is ANNOTATE


@pytest.mark.window
@pytest.mark.slow
def test_from_an_image_to_training_data_in_three_clicks_and_a_folder(
    shared_viewer, qtbot, until, smear, tmp_path, monkeypatch
):
    viewer = shared_viewer(show=True)
    viewer.add_image(smear, name="smear")
    workspace = open_workspace(viewer, STAINS)

    def click():
        qtbot.mouseClick(workspace.footer.next_button, Qt.MouseButton.LeftButton)

    until(lambda: shown(workspace) == Step.FIND)
    click()
    assert workspace.current_tab is CELLS
    until(lambda: shown(workspace) == Step.FINDING)
    assert not workspace.footer.next_button.isEnabled()
    until(lambda: shown(workspace) == Step.CORRECT)
    click()
    annotate = workspace.panel(ANNOTATE)
    until(lambda: shown(workspace) == Step.ADD)
    (boxes,) = [layer for layer in viewer.layers if role_of(layer) == Role.ANNOTATIONS]
    assert len(boxes.data) > 5
    folder = tmp_path / "project"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *_, **__: (str(folder), ""))
    click()
    store = get_project_store(viewer)
    until(lambda: store.project is not None)
    until(lambda: shown(workspace) == Step.ANSWER)  # copies that nobody has reviewed
    question = annotate.add_question
    workspace.open_tab(STAINS)
    click()
    assert workspace.current_tab is ANNOTATE
    assert not question.visibleRegion().isEmpty()
    assert "border" in question.styleSheet(), "it is pointed to"
    until(lambda: not question.styleSheet())
    question.buttons[2].click()
    until(lambda: shown(workspace) == Step.ADD)
    click()
    until(lambda: shown(workspace) == Step.ANSWER)
    question.buttons[0].click()
    until(lambda: shown(workspace) == Step.TRAIN)
    assert store.project.crops
    click()
    assert workspace.current_tab is TRAIN
    train = workspace.panel(TRAIN)
    until(lambda: train.start_button.isEnabled() and shown(workspace) == Step.START)
    workspace.open_tab(ANNOTATE)
    annotate.annotation_actions.annotated.boxes.layer.selected_data = {0}
    annotate.annotation_actions.annotated.boxes.layer.remove_selected()
    until(lambda: shown(workspace) == Step.ADD)
    viewer.add_image(RGB, name="another")
    until(lambda: shown(workspace) == Step.FIND)
