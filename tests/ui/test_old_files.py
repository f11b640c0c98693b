"""A viewer of the version before Part 7 was killed; this one restores the user's work."""

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.review.review import STATES
from napari_beerlanet.ui.annotate.widget import AnnotateWidget
from napari_beerlanet.ui.batch.widget import RECENT_BATCHES
from napari_beerlanet.ui.common.recent import RECENT_MODELS, RECENT_PROJECTS
from napari_beerlanet.ui.common.session import get_session, last_open_project
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.finetune.widget import FineTuneWidget
from napari_beerlanet.ui.review.widget import ReviewWidget
from old_files import expected, restored

pytestmark = pytest.mark.window


@pytest.fixture
def home(tmp_path, monkeypatch):
    folder = tmp_path / "home"
    monkeypatch.setenv("NAPARI_BEERLANET_CONFIG", str(folder / "config"))
    return folder


def pixels(path):
    return np.asarray(Image.open(path).convert("RGB"))


@pytest.fixture
def annotate(shared_viewer, until):
    def opened(path):
        viewer = shared_viewer()
        viewer.add_image(pixels(path), name=path.stem)
        panel = AnnotateWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Annotate")
        return panel

    return opened


@pytest.mark.parametrize("name", ["draft", "projected"])
def test_a_killed_viewer_s_annotations(home, annotate, until, name):
    """In no project yet, and in the project that was open: it is opened again by itself."""
    restored(home, "viewers", "config")
    right = expected(home, "viewers")[name]
    if name == "draft":
        (home / "config" / "open.json").unlink()
    panel = annotate(home / "viewers" / f"{name}.png")
    panel.store.classes.add(["RBC", "WBC"])
    if name == "projected":
        until(lambda: panel.store.project is not None)
        assert panel.store.project.read_only == ""
        assert panel.store.project.path == home / "viewers" / "project"
    panel.annotate.click()
    until(lambda: panel.annotation_actions.annotated is not None)
    found = panel.annotation_actions.annotated.annotations(())
    assert len(found) == len(right["boxes"]) > 5
    np.testing.assert_allclose(found.xyxy, right["boxes"], atol=1e-3)
    assert [found.names[k] for k in found.labels] == right["classes"]
    assert len(found.regions) == right["regions"]
    drafts = home / "config" / "drafts"
    assert (drafts / expected(home, "viewers")["draft"]["file"]).exists()
    # and it is worked on further
    box = np.array([[9.5, 19.5], [9.5, 39.5], [29.5, 39.5], [29.5, 19.5]])
    panel.annotation_actions.annotated.boxes.layer.add([box])
    saved = drafts if name == "draft" else home / "viewers" / "project" / "annotations"
    until(lambda: (saved / right["file"]).read_text().count('"box"') == len(right["boxes"]) + 1)


def test_a_killed_viewer_s_decisions(home, shared_viewer, until):
    restored(home, "viewers", "config")
    right = expected(home, "viewers")["reviewed"]
    n = right["detections"]
    x, y = 20.0 * (np.arange(n) % 4) + 3, 24.0 * (np.arange(n) // 4) + 3
    boxes = np.stack([x, y, x + 14, y + 14], 1)
    labels = (np.arange(n) % 4 == 3).astype(int)
    image = pixels(home / "viewers" / "reviewed.png")
    scores = np.linspace(0.95, 0.4, n)
    found = Detections(boxes, labels, scores, ["RBC", "WBC"], {}, image.shape[:2])
    viewer = shared_viewer()
    source = viewer.add_image(image, name="reviewed")
    detection_layer = DetectionLayer(viewer, source, found, class_colours(len(found.names)))
    detection_layer.set_filter(0.25)
    get_session(viewer).set_detections(source, found, detection_layer)
    panel = ReviewWidget(viewer)
    viewer.window.add_dock_widget(panel)
    until(lambda: panel.autosave.path is not None and len(panel.rows) > 0)
    assert panel.autosave.path == home / "config" / "reviews" / right["file"]
    until(lambda: (panel.review.status > 0).sum() == len(right["decisions"]))
    for decision in right["decisions"]:
        (row,) = np.flatnonzero(np.abs(found.xyxy - decision[:4]).max(1) < 0.01)
        assert STATES[panel.review.status[row]] == decision[6]
    assert (panel.review.status > 0).sum() == len(right["decisions"])


def test_recent_files_and_folders(home):
    restored(home, "config")
    right = expected(home, "settings")
    assert [str(path) for path in RECENT_MODELS.paths()] == right["models"]
    assert [str(path) for path in RECENT_PROJECTS.paths()] == right["projects"]
    assert [str(path) for path in RECENT_BATCHES.paths()] == right["batches"]
    assert str(last_open_project()) == right["open"]


def test_runs_in_the_fine_tune_panel(home, shared_viewer, until):
    project = restored(home, "training") / "training"
    right = expected(home, "runs")
    panel = FineTuneWidget(shared_viewer())
    try:
        panel.project_choice.choose(project)
        until(lambda: panel.start_button.isEnabled())
        found = panel.run_list.refresh(project)
        assert [run.name for run in found] == right["newest first"]
        states = {run.name: run.state for run in found}
        for name, facts in right["runs"].items():
            assert states[name] is RunState(facts["state"])
    finally:
        panel.shut_down()
