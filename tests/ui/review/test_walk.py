"""A person's way through a review, with mouse and keys, in a window that is active."""

import numpy as np
import pytest
from PIL import Image
from qtpy.QtCore import Qt
from qtpy.QtTest import QTest
from qtpy.QtWidgets import QApplication, QFileDialog, QPushButton

from napari_beerlanet.core.review.review import ACCEPTED, REJECTED
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes

pytestmark = pytest.mark.window

PLUGIN = "napari-beerlanet"
LEFT = Qt.MouseButton.LeftButton


def press(panel, text):
    """Click the button with this text."""
    (button,) = [b for b in panel.findChildren(QPushButton) if b.text() == text]
    QTest.mouseClick(button, LEFT)


def active(viewer, until):
    """Make the window the one that gets the keys, without a window manager too."""
    window = viewer.window._qt_window
    window.activateWindow()
    window.windowHandle().requestActivate()
    until(lambda: QApplication.activeWindow() is window)


@pytest.fixture
def field(make_napari_viewer, tmp_path):
    """A window with a smear that was opened from a file, and the truth about it."""
    made = blood_smear((240, 320), cell_diameter=50)
    Image.fromarray(made.image).save(tmp_path / "smear.png")
    viewer = make_napari_viewer(show=True)
    (image,) = viewer.open(str(tmp_path / "smear.png"), plugin="napari")
    return viewer, image, made


@pytest.fixture
def detected(field, until):
    """What the packaged model finds there, by the button of its panel; the review panel beside."""
    viewer, image, made = field
    _, cells = viewer.window.add_plugin_dock_widget(PLUGIN, "Find cells")
    until(lambda: cells.run_button.isEnabled())
    QTest.mouseClick(cells.run_button, LEFT)
    until(lambda: cells.result.detection_layer is not None and not cells.detect_task.running)
    _, panel = viewer.window.add_plugin_dock_widget(PLUGIN, "Review detections", tabify=True)
    until(lambda: panel.autosave.path is not None and len(panel.rows) > 0)
    active(viewer, until)
    return viewer, image, made, cells.result.detection_layer, panel


def test_from_detection_to_report(detected, until, tmp_path, monkeypatch):
    viewer, image, made, shower, panel = detected
    review, total = panel.review, len(panel.rows)
    assert total > 5

    # filter: what is filtered out leaves the table and the canvas
    panel.filter.confidence.setValue((0.5, 1.0))
    until(lambda: len(panel.rows) < total)
    assert shower.layer.features["confidence"].min() >= 0.5
    press(panel.filter, "Clear")
    until(lambda: len(panel.rows) == len(review))

    # step, accept, reject, relabel and undo with keys; the view goes to what is out of sight
    panel.filter.confidence.setValue((0.25, 1.0))
    until(lambda: len(panel.rows) == total)
    panel.table.setFocus()
    viewer.scene.camera.center = (-1000.0, -1000.0)
    QTest.keyClick(panel.table, Qt.Key.Key_N)
    assert panel.current == panel.rows[0]
    centre = review.detections.xyxy[panel.current].reshape(2, 2).mean(axis=0)[::-1] - 0.5
    assert viewer.scene.camera.center[-2:] == pytest.approx(tuple(centre), abs=0.1)
    frame = viewer.layers[f"{image.name} · current"]
    assert np.mean(frame.data[0], axis=0) == pytest.approx(centre, abs=0.1)
    for key in (Qt.Key.Key_Y, Qt.Key.Key_X, Qt.Key.Key_2):
        QTest.keyClick(panel.table, key)
    first, second, third = (int(k) for k in panel.rows[:3])
    assert [review.state_of(k) for k in (first, second, third)] == [ACCEPTED, REJECTED, ACCEPTED]
    assert review.class_of(third) == review.names[1]
    assert panel.progress.format() == f"3 of {total} reviewed"
    QTest.keyClick(panel.table, Qt.Key.Key_U)
    assert review.state_of(third) == "unreviewed"
    assert panel.current == third

    # the same keys on the canvas
    canvas = viewer.window._qt_viewer.canvas.native
    canvas.setFocus()
    assert viewer.layers.selection.active is shower.layer
    QTest.keyClick(canvas, Qt.Key.Key_2)
    assert review.class_of(third) == review.names[1]
    states = shower.layer.features.set_index("id")
    assert states["status"][[first, second, third]].tolist() == [ACCEPTED, REJECTED, ACCEPTED]
    assert states["class"][third] == review.names[1]

    # the gallery: select several, reject them at once, take it back
    panel.tabs.setCurrentIndex(1)
    view = panel.gallery.viewport()
    QTest.mouseClick(view, LEFT, pos=panel.gallery.cell(3).center())
    shift = Qt.KeyboardModifier.ShiftModifier
    QTest.mouseClick(view, LEFT, shift, panel.gallery.cell(5).center())
    panel.gallery.setFocus()
    QTest.keyClick(panel.gallery, Qt.Key.Key_X)
    assert {review.state_of(int(k)) for k in panel.rows[3:6]} == {REJECTED}
    QTest.keyClick(panel.gallery, Qt.Key.Key_U)
    assert {review.state_of(int(k)) for k in panel.rows[3:6]} == {"unreviewed"}

    # against annotations
    names = np.array([made.names[k] for k in made.labels], dtype=object)
    viewer.add_shapes(
        list(corners_from_boxes(made.boxes)), shape_type="rectangle", name="truth",
        features={"class": names},
    )  # fmt: skip
    panel.tabs.setCurrentIndex(3)
    tab = panel.annotation_tab
    tab.metrics.annotation_choice.setCurrentText("truth")
    until(lambda: tab.metrics.matches is not None and tab.on_canvas)
    assert len(tab.metrics.matches.true_positives) > 5
    assert tab.metrics.matches.mean.recall > 0.8
    assert not shower.layer.visible

    # export by napari's own saving, and import
    panel.tabs.setCurrentIndex(0)
    assert shower.layer.visible
    saved = tmp_path / "cells.geojson"
    viewer.layers.selection = {shower.layer}
    assert viewer.layers.save(str(saved), selected=True, plugin=PLUGIN) == [str(saved)]
    (again,) = viewer.open(str(saved), plugin=PLUGIN)
    table = again.features
    assert len(again.data) == total
    assert sorted(table["status"]).count(REJECTED) == 1
    assert sorted(table["status"]).count(ACCEPTED) == 2
    np.testing.assert_allclose(np.array(again.data), np.array(shower.layer.data), atol=0.01)

    # the file is reviewed on where it stopped
    panel.target_choice.setCurrentText(f"{again.name} (opened)")
    until(lambda: panel.review is not review and len(panel.rows) == total)
    assert panel.review.progress()[0] == 3
    assert not again.visible
    panel.table.setFocus()
    QTest.keyClick(panel.table, Qt.Key.Key_N)
    assert panel.review.state_of(panel.current) == "unreviewed"

    # the report
    path = tmp_path / "report.html"
    monkeypatch.setattr(QFileDialog, "getSaveFileName", lambda *a, **k: (str(path), ""))
    press(panel.export, "Report …")
    until(lambda: path.exists() and not panel.export.task.running)
    text = path.read_text(encoding="utf-8")
    assert f"3 of {total} reviewed." in text
    assert "Rejected by the reviewer (1)" in text
    assert "<script" not in text
    assert "smear" in text
