"""The Malaria preset: one click from an image to infected red cells by stage."""

import numpy as np
import pytest

from napari_beerlanet.core.batch.settings import MALARIA_PRESET
from napari_beerlanet.core.boxes.classes import ClassCounts
from napari_beerlanet.core.boxes.detections import AGREEMENT_COLUMN, TYPE_COLUMN
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.detect import job
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.workspace.presets import MalariaPreset
from napari_beerlanet.ui.workspace.workspace import CELLS, CLASSIFY, open_workspace

pytestmark = pytest.mark.window


@pytest.fixture
def preset(shared_viewer, until):
    viewer = shared_viewer()
    image = viewer.add_image(blood_smear((140, 180), seed=3, cell_diameter=36).image, name="field")
    workspace = open_workspace(viewer, CLASSIFY)
    panel = workspace.open_tab(CLASSIFY)
    (found,) = panel.findChildren(MalariaPreset)
    ended = []
    found.ended.connect(ended.append)
    until(lambda: not panel.model.task.running)
    return viewer, image, workspace, found, ended


def test_one_click_finds_and_classifies(preset, until, monkeypatch):
    viewer, image, workspace, button, ended = preset
    searched = []

    def claim(found, detector, classifier):
        """One of the red cells is called a white cell, and has a red cell's size and stain."""
        searched.append((detector["name"], classifier["name"]))
        agreement = np.full(len(found.candidates), np.nan, np.float32)
        agreement[0] = 0.0
        found.candidates.columns[AGREEMENT_COLUMN] = agreement
        found.candidates.labels[0] = found.names.index("WBC")
        return claim_red_cells(found.above(0.15), detector, classifier)

    from napari_beerlanet.core.batch import malaria

    claim_red_cells = malaria.claim_red_cells
    monkeypatch.setattr(malaria, "claim_red_cells", claim)
    button.button.click()
    assert not button.button.isEnabled()
    button.button.click()  # nothing is started twice
    until(lambda: bool(ended))
    assert ended == [True]
    assert searched == [(MALARIA_PRESET["model"], MALARIA_PRESET["classifier"])]
    assert workspace.current_tab is CLASSIFY
    assert button.button.isEnabled()
    typed = detection_layer_of(viewer, image).detections
    red = np.array([typed.names[k] == "RBC" for k in typed.labels])
    assert red.sum() > 3
    assert (typed.columns[TYPE_COLUMN][red] != "").all()
    assert (typed.columns[TYPE_COLUMN][~red] == "").all()
    assert workspace.panel(CELLS).form.confidence == MALARIA_PRESET["confidence"] == 0.15
    shown = ClassCounts.of(typed.above(0.15)).parasitaemia
    panel = workspace.panel(CLASSIFY)
    text = panel.counts.parasitaemia.text()
    assert f"{shown.infected} of {shown.cells} red cells" in text
    assert "Only" in panel.counts.warnings.text()
    assert "1 red cell was called WBC" in workspace.panel(CELLS).progress_bar.text


def test_beside_counts_without_parasites_infected_cells_are_offered(preset, until):
    _, _, workspace, _, ended = preset
    cells = workspace.open_tab(CELLS)
    until(lambda: cells.model.loaded is not None)
    cells.run()
    until(lambda: cells.counts.class_counts is not None)
    assert "Count infected cells (malaria)</a>" in cells.counts.limits.text()
    cells.counts.limits.linkActivated.emit("malaria")
    until(lambda: bool(ended))
    assert ended == [True]
    assert workspace.current_tab is CLASSIFY
    until(lambda: "href" not in cells.counts.limits.text())  # they are counted


def test_a_search_that_fails_is_the_last_step(preset, until, monkeypatch):
    _viewer, _image, workspace, button, ended = preset

    def fail(*_, **__):
        raise RuntimeError("no such luck")

    monkeypatch.setattr(job, "job_model", fail)
    classified = []
    workspace.panel(CLASSIFY).classify_task.ended.connect(classified.append)
    button.button.click()
    until(lambda: bool(ended))
    assert ended == [False]
    assert classified == []
    assert workspace.current_tab is CELLS  # which says why
    assert "no such luck" in workspace.panel(CELLS).progress_bar.text
    assert button.button.isEnabled()


def test_cancelling_the_second_step_leaves_the_boxes(preset, until):
    viewer, image, workspace, button, ended = preset
    panel = workspace.panel(CLASSIFY)
    outcomes = []
    panel.classify_task.started.connect(panel.classify_task.cancel)
    panel.classify_task.ended.connect(outcomes.append)
    button.button.click()
    until(lambda: bool(ended))
    panel.classify_task.started.disconnect(panel.classify_task.cancel)
    assert (ended, outcomes) == ([False], [TaskOutcome.CANCELLED])
    found = detection_layer_of(viewer, image).detections
    assert len(found) > 3
    assert not found.types
