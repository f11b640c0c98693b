"""Compare the detections of two runs on one image: boxes gained, lost and changed."""

from __future__ import annotations

from napari.layers import Layer, Shapes
from qtpy.QtWidgets import QComboBox, QVBoxLayout, QWidget

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.evaluation.diff import DetectionDiff, diff_detections
from napari_beerlanet.ui.common.controls import form, hint
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.comparison_layer import (
    ChangeToggles,
    remove_comparison,
    show_comparison,
)
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.image_detections import detections_from_layer
from napari_beerlanet.ui.review.filter import FilterForm
from napari_beerlanet.ui.review.target import ReviewTarget
from napari_beerlanet.ui.viewer.layers import Role, role_of

_NO_COMPARISON, _PREVIOUS_RUN = "nothing", "previous run"


class RunComparison(QWidget):
    """Choose an earlier result; boxes gained, lost and changed are shown in colours."""

    def __init__(self, panel: Panel, filter_form: FilterForm) -> None:
        super().__init__()
        self._viewer, self._task, self._filter = panel.viewer, panel.task(), filter_form
        self._target: ReviewTarget | None = None
        self._compared_confidence = 0.0
        self._hidden_layer: DetectionLayer | None = None  # while the comparison is shown
        self.earlier_choice = QComboBox()
        self.earlier_choice.setToolTip(
            "Compare the detections with those of the previous run, for example of another model, "
            "or with another detection layer of this image."
        )
        self.earlier_choice.activated.connect(lambda _: self.compare())
        self.toggles, self.summary_line = ChangeToggles(self._viewer), hint()
        lines = form()
        lines.addRow("Compare with", self.earlier_choice)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addLayout(lines)
        layout.addWidget(self.toggles)
        layout.addWidget(self.summary_line)
        self.set_target(None)

    def set_target(self, target: ReviewTarget | None) -> None:
        """Offer what these detections can be compared with, and compare nothing for now."""
        self._target = target
        self.earlier_choice.clear()
        self.earlier_choice.addItem(_NO_COMPARISON)
        if target is not None:
            earlier = get_session(self._viewer).previous_detections.get(target.source)
            if earlier is not None:
                model = earlier.report.get("model")
                text = f"{_PREVIOUS_RUN} ({model})" if model else _PREVIOUS_RUN
                self.earlier_choice.addItem(text, earlier)
            for layer in self._viewer.layers:
                if _is_comparable(layer, target):
                    self.earlier_choice.addItem(layer.name, layer)
        self._clear()

    def compare(self) -> None:
        """Compare with the selected result at the present confidence, off the GUI thread."""
        earlier, target = self.earlier_choice.currentData(), self._target
        if earlier is None or target is None:
            self._clear()
            return
        index, confidence = target.plane.index, self._filter.min_confidence
        if isinstance(earlier, Detections):
            before = earlier
        else:
            before = detections_from_layer(earlier, index)
        after = target.detections

        def work(report: Report) -> DetectionDiff:
            return diff_detections(before.above(confidence), after.above(confidence))

        self._task.start(work, lambda diff: self._show_diff(target, diff), notify_error)

    def update_confidence(self) -> None:
        """Compare again if the confidence has changed."""
        if (
            self._hidden_layer is not None
            and self._compared_confidence != self._filter.min_confidence
        ):
            self.compare()

    def _show_diff(self, target: ReviewTarget, diff: DetectionDiff) -> None:
        if target is not self._target or self.earlier_choice.currentData() is None:
            return
        visible = self.toggles.visible_kinds
        show_comparison(self._viewer, target.source, diff, target.plane.index, visible)
        target.detection_layer.layer.visible = False
        self._hidden_layer = target.detection_layer
        self._compared_confidence = self._filter.min_confidence
        self.summary_line.setText(diff.summary())
        self.toggles.show()
        self.summary_line.show()

    def _clear(self) -> None:
        self._task.cancel()
        hidden, self._hidden_layer = self._hidden_layer, None
        if hidden is not None:  # else what is shown is a comparison of models
            remove_comparison(self._viewer)
        if hidden is not None and hidden.alive:
            hidden.layer.visible = True
        self.toggles.hide()
        self.summary_line.hide()


def _is_comparable(layer: Layer, target: ReviewTarget) -> bool:
    """Whether it is another detection layer of the target's dimensions."""
    return (
        isinstance(layer, Shapes)
        and role_of(layer) == Role.DETECTIONS
        and layer is not target.detection_layer.layer
        and layer.ndim == target.source.ndim
    )
