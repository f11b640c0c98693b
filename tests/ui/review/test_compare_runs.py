"""Detections of two runs on one image, compared in the review panel."""

import numpy as np
import pytest

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.common.session import get_session
from reviews import NAMES, some

pytestmark = pytest.mark.window


def test_two_runs_are_compared(open_review, until):
    viewer, panel, detection_layer = open_review()
    source = viewer.layers["smear"]
    other = some()
    keep = np.r_[0:5, 8:40]
    second = Detections(
        other.xyxy[keep], other.labels[keep], other.scores[keep], NAMES, report={"model": "other"}
    ).above(0.25)
    detection_layer.set_detections(second)
    get_session(viewer).set_detections(source, second, detection_layer)
    until(lambda: panel.run_comparison.earlier_choice.count() == 2)
    panel.run_comparison.earlier_choice.setCurrentIndex(1)
    panel.run_comparison.earlier_choice.activated.emit(1)
    until(lambda: "3 lost" in panel.run_comparison.summary_line.text())
    layer = viewer.layers["smear · before and after"]
    assert layer.nshapes == 3
    panel.filter.confidence.setValue((0.9, 1.0))
    until(
        lambda: (
            "0 lost" in panel.run_comparison.summary_line.text()
            or "Nothing" in panel.run_comparison.summary_line.text()
        )
    )
    panel.filter.confidence.setValue((0.25, 1.0))
    until(lambda: "3 lost" in panel.run_comparison.summary_line.text())
    layer = viewer.layers["smear · before and after"]
    panel.run_comparison.toggles.boxes["lost"].setChecked(False)
    assert layer.nshapes == 0
    panel.run_comparison.earlier_choice.setCurrentIndex(0)
    panel.run_comparison.earlier_choice.activated.emit(0)
    assert "smear · before and after" not in viewer.layers
    assert detection_layer.layer.visible
