"""What leaves the review: a report, and accepted boxes for the project."""

import numpy as np
import pytest
from qtpy.QtWidgets import QFileDialog

from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes
from reviews import PICTURE, some
from tinyclasses import tiny_classifier

pytestmark = pytest.mark.window


def test_a_report_is_written_with_review_and_annotations(compared_review, until, tmp_path):
    _, panel, _, _ = compared_review
    panel.next()
    panel.accept()
    panel.reject()
    path = tmp_path / "a report.html"
    panel.export.write_report(path)
    until(lambda: path.exists() and not panel.export.task.running)
    text = path.read_text()
    assert "smear" in text
    assert "Metrics against annotations" in text
    assert f"2 of {len(panel.rows)} reviewed." in text
    assert "Rejected by the reviewer (1)" in text
    assert str(path) in panel.export.bar.text


def test_a_report_shows_the_stains_that_were_decomposed_already(
    open_review, until, tmp_path, monkeypatch
):
    viewer, panel, _ = open_review()
    stains = decompose(PICTURE, components=2, iterations=5, lam=1e-3, gamma=0.1)
    get_session(viewer).decompositions[viewer.layers["smear"]] = stains
    monkeypatch.setattr("napari_beerlanet.ui.review.export.decompose", None)
    path = tmp_path / "report.html"
    panel.export.write_report(path)
    until(lambda: path.exists() and not panel.export.task.running)
    assert "<h2>Stains</h2>" in path.read_text()


def test_corrected_types_are_in_the_report_and_on_one_page(
    open_review, until, tmp_path, monkeypatch
):
    stages = ["uninfected", "ring"]
    found = some()
    red = np.flatnonzero(found.labels == 0)
    healthy = np.tile(np.array([[0.9, 0.1]], np.float32), (len(red), 1))
    viewer, panel, _ = open_review(
        found=found.with_types(stages, healthy, rows=red, classifier="tiny")
    )
    get_session(viewer).set_classifier(tiny_classifier(names=stages), "no such file")
    panel.review.relabel_type(red[:2], "ring")
    page = tmp_path / "page.html"
    choices = []

    def choose(parent, title, name, kinds):
        choices.extend(kinds.split(";;"))
        return str(page), choices[-1]

    monkeypatch.setattr(QFileDialog, "getSaveFileName", choose)
    monkeypatch.setattr("napari_beerlanet.ui.review.export.decompose", None)
    panel.export.report_button.click()
    until(lambda: page.exists() and not panel.export.task.running)
    assert choices[1].startswith("Malaria smear on one page")
    text = page.read_text()
    counted = panel.review.reviewed().above(panel.filter.min_confidence).type_counts()
    assert counted["ring"] == 2
    assert f"of {sum(counted.values())} counted" in text
    assert "2 of" in text
    assert "Research use only" in text
    assert "Classifier</dt><dd>tiny" in text


def test_nothing_accepted_is_reported(open_review, monkeypatch):
    _, panel, _ = open_review()
    said = []
    monkeypatch.setattr("napari_beerlanet.ui.common.notifications.show_error", said.append)
    panel.export.add_accepted_to_project()
    assert said == ["No boxes are accepted yet: accept some first (Y)."]


def test_accepted_boxes_go_to_the_annotations(open_review, until):
    viewer, panel, _ = open_review()
    panel.next()
    panel.accept()
    panel.relabel(1)
    panel.reject()
    panel.export.add_accepted_to_project()
    until(lambda: any(layer.name.endswith("annotations") for layer in viewer.layers))
    layer = next(layer for layer in viewer.layers if layer.name.endswith("annotations"))
    until(lambda: layer.nshapes == 2)
    assert layer.features["class"].tolist() == ["RBC", "WBC"]
    assert set(layer.features["status"]) == {"confirmed"}


@pytest.mark.parametrize("moved", ["before", "during the lookup"])
def test_accepted_boxes_go_to_the_plane_that_they_were_accepted_on(open_review, until, moved):
    """Whichever plane is shown when the image's saved annotations have been looked up."""
    viewer, panel, detection_layer = open_review(picture=np.stack([PICTURE, 255 - PICTURE]))
    turned = some()
    turned.xyxy[:] = turned.xyxy[::-1]
    detection_layer.set_detections(turned.above(0.25), (1,))
    panel.next()
    panel.accept()
    (accepted,) = panel.target.accepted_detections(panel.review).xyxy.tolist()
    if moved == "before":
        viewer.dims.set_point(0, 1)
    panel.export.add_accepted_to_project()
    viewer.dims.set_point(0, 1)
    until(lambda: any(layer.name.endswith("annotations") for layer in viewer.layers))
    layer = next(layer for layer in viewer.layers if layer.name.endswith("annotations"))
    until(lambda: layer.nshapes == 1)
    assert layer.data[0][:, 0].tolist() == [0] * 4
    np.testing.assert_allclose(layer.data[0][:, 2].min() + 0.5, accepted[0])


def test_boxes_corrected_on_the_canvas_are_sent_as_they_are_now(open_review, until):
    viewer, panel, detection_layer = open_review()
    panel.next()
    panel.accept()  # the first; the second is moved, one is drawn, the third is rejected
    panel.go_to(2)
    panel.reject()
    shapes = [np.array(shape) for shape in detection_layer.layer.data]
    shapes[1] += 7
    shapes[2] += 3
    detection_layer.layer.data = shapes
    detection_layer.layer.add_rectangles(corners_from_boxes(np.array([[5, 300, 45, 340]]))[0])
    kept = panel.target.accepted_detections(panel.review)
    assert sorted(kept.xyxy[:, 0].tolist()) == [5, 10, 67]
    panel.export.add_accepted_to_project()
    until(lambda: any(layer.name.endswith("annotations") for layer in viewer.layers))
    layer = next(layer for layer in viewer.layers if layer.name.endswith("annotations"))
    until(lambda: layer.nshapes == 3)
