"""Names in files of others are shown as they are: Qt takes what looks like HTML for it."""

import html

import numpy as np
import pytest
from qtpy.QtCore import Qt
from qtpy.QtWidgets import QComboBox, QLabel, QListWidget, QWidget

from discs import disc_detector
from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.ui.common.controls import hint, plain_tooltip, wrapping_label
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.workspace.workspace import CLASSIFY, TABS, open_workspace
from tinyclasses import tiny_classifier

pytestmark = pytest.mark.window

TAG = '<img src="//host/share/x.png">'


def rendered(text: str, text_format: Qt.TextFormat = Qt.TextFormat.AutoText) -> bool:
    """Whether Qt would fetch the picture that a name asks for."""
    rich = text_format == Qt.TextFormat.RichText or Qt.mightBeRichText(text)
    return "<img" in text and rich and text_format != Qt.TextFormat.PlainText


def rendered_in(widget: QWidget) -> list[str]:
    """Texts and tooltips below a widget in which a name would be rendered."""
    found = [label.text() for label in widget.findChildren(QLabel) if rendered_label(label)]
    tips = [child.toolTip() for child in (widget, *widget.findChildren(QWidget))]
    role = Qt.ItemDataRole.ToolTipRole
    for box in widget.findChildren(QComboBox):
        tips += [str(box.itemData(k, role) or "") for k in range(box.count())]
    for box in widget.findChildren(QListWidget):
        tips += [box.item(k).toolTip() for k in range(box.count())]
    return found + [tip for tip in tips if rendered(tip)]


def rendered_label(label: QLabel) -> bool:
    return rendered(label.text(), label.textFormat())


def test_what_the_check_finds():
    assert rendered(TAG)
    assert rendered(f"Classify the boxes of “{TAG}”.")
    assert rendered(f"<b>{TAG}</b>", Qt.TextFormat.RichText)
    assert not rendered(f"<b>{html.escape(TAG)}</b>", Qt.TextFormat.RichText)
    assert not rendered(TAG, Qt.TextFormat.PlainText)


def test_labels_and_tooltips_show_it_as_it_is(qtbot):
    for label in (hint(TAG), wrapping_label(TAG)):
        qtbot.addWidget(label)
        assert label.text() == TAG
        assert not rendered_label(label)
    assert plain_tooltip("RBC & WBC") == "RBC & WBC"
    assert not rendered(plain_tooltip(f"one\n{TAG}"))


def test_no_panel_renders_a_name(shared_viewer):
    viewer = shared_viewer()
    source = viewer.add_image(np.full((60, 80, 3), 220, np.uint8), name=TAG)
    names = [TAG, f"{TAG} 2"]
    boxes = np.array([[5, 5, 25, 25], [30, 5, 50, 25]], np.float32)
    found = Detections(boxes, np.array([0, 1]), np.array([0.9, 0.8]), names)
    layer = DetectionLayer(viewer, source, found, class_colours(2), confidence=0.25)
    session = get_session(viewer)
    session.set_detections(source, layer.detections, layer)
    model = disc_detector(components=8, iterations=10)
    session.set_model(Detector(model.network, model.info | {"name": TAG, "unknown": {TAG: [TAG]}}))
    session.set_classifier(tiny_classifier(names=names, info={"unknown": {TAG: [TAG]}}), TAG)
    workspace = open_workspace(viewer)
    for tab in TABS:
        workspace.open_tab(tab)
        assert rendered_in(workspace) == [], tab.label
    choice = workspace.panel(CLASSIFY).classes
    assert choice.chosen == names
