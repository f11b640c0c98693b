"""Two results on one image: what was found now and before, by another model or other settings."""

from __future__ import annotations

from typing import Any

from napari.layers import Shapes
from qtpy.QtWidgets import QCheckBox, QComboBox, QVBoxLayout, QWidget

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.comparing import Comparison, compare
from napari_beerlanet.core.progress import Report
from napari_beerlanet.ui.annotate_detections import DETECTIONS, read_detections
from napari_beerlanet.ui.controls import form, hint, row
from napari_beerlanet.ui.layers import role
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.session import session
from napari_beerlanet.ui.verdict_layers import (
    KINDS,
    remove_comparison,
    show_comparison,
    show_kinds,
)

_NOTHING, _RUN = "nothing", "the run before"


class ReviewBefore(QWidget):
    """Choose an earlier result; boxes gained, lost and changed are shown in colours."""

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self._panel, self._viewer = panel, panel.viewer
        self._task = panel.task()
        self._shown_at = 0.0
        self._hid: Any = None  # the layer of detections, while the comparison is shown
        self.before = QComboBox()
        self.before.setToolTip(
            "Compare what was found with the run before, for instance of another model, or with "
            "another layer of detections of this image."
        )
        self.before.activated.connect(lambda _: self.show())
        self.kinds = {}
        for kind, (colour, tip) in KINDS.items():
            box = QCheckBox(kind)
            box.setChecked(True)
            box.setToolTip(tip)
            box.setStyleSheet(f"QCheckBox {{ color: {colour}; }}")
            box.toggled.connect(lambda _: show_kinds(self._viewer, self._shown))
            self.kinds[kind] = box
        self.toggles, self.line = row(*self.kinds.values()), hint()
        lines = form()
        lines.addRow("Compared with", self.before)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addLayout(lines)
        layout.addWidget(self.toggles)
        layout.addWidget(self.line)
        self.offer()

    @property
    def _shown(self) -> list[str]:
        return [kind for kind, box in self.kinds.items() if box.isChecked()]

    def offer(self) -> None:
        """Offer what there is to compare with, and compare with nothing for now."""
        self.before.clear()
        self.before.addItem(_NOTHING)
        target = self._panel.target
        if target is not None:
            earlier = session(self._viewer).previous.get(target.source)
            if earlier is not None:
                model = earlier.report.get("model")
                self.before.addItem(f"{_RUN} ({model})" if model else _RUN, earlier)
            for layer in self._viewer.layers:
                if self._fits(layer, target):
                    self.before.addItem(layer.name, layer)
        self._clear()

    @staticmethod
    def _fits(layer: Any, target: Any) -> bool:
        return (
            isinstance(layer, Shapes)
            and role(layer) == DETECTIONS
            and layer is not target.shower.layer
            and layer.ndim == target.source.ndim
        )

    def show(self) -> None:
        """Compare with what is chosen, at the panel's confidence, off the GUI thread."""
        chosen, target = self.before.currentData(), self._panel.target
        if chosen is None or target is None:
            self._clear()
            return
        index, confidence = target.plane.index, self._panel.filter.confidence.value()[0]
        before = chosen if isinstance(chosen, Detections) else read_detections(chosen, index)
        after = target.found

        def work(report: Report) -> Comparison:
            return compare(before.above(confidence), after.above(confidence))

        self._task.start(work, lambda found: self._show(target, found), complain)

    def follow(self) -> None:
        """The confidence is another now."""
        if self._hid is not None and self._shown_at != self._panel.filter.confidence.value()[0]:
            self.show()

    def _show(self, target: Any, found: Comparison) -> None:
        if target is not self._panel.target or self.before.currentData() is None:
            return
        show_comparison(self._viewer, target.source, found, target.plane.index, self._shown)
        target.shower.layer.visible = False
        self._hid, self._shown_at = target.shower, self._panel.filter.confidence.value()[0]
        self.line.setText(found.sentence())
        self.toggles.show()
        self.line.show()

    def _clear(self) -> None:
        self._task.cancel()
        remove_comparison(self._viewer)
        hidden, self._hid = self._hid, None
        if hidden is not None and hidden.alive:
            hidden.layer.visible = True
        self.toggles.hide()
        self.line.hide()
