"""Presets: what several panels do one after the other, at one click."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QPushButton, QVBoxLayout, QWidget

from napari_beerlanet.ui.common.controls import DisabledReason, row
from napari_beerlanet.ui.common.tasks import TaskOutcome

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.ui.classify.widget import ClassifyWidget
    from napari_beerlanet.ui.detect.widget import DetectWidget


class MalariaPreset(QWidget):
    """A button that finds the cells of a thin smear and classifies the red ones.

    Each step is that of its panel, with its progress, its messages and its *Cancel*; a step that
    does not end well is the last one. `ended` is emitted once for each start, with whether all
    were done. `show_cells(then)` shows the panel "Find cells" and calls `then` with it,
    `show_types()` shows the panel `classify`.
    """

    ended = Signal(bool)

    def __init__(
        self,
        classify: ClassifyWidget,
        show_cells: Callable[[Callable[[Any], None]], None],
        show_types: Callable[[], None],
    ) -> None:
        super().__init__()
        self.classify = classify
        self._show_cells, self._show_types = show_cells, show_types
        self._cells: DetectWidget | None = None
        self.running = False
        self.button = QPushButton("Count infected cells (malaria)")
        self.button.setToolTip(
            "Find the cells of a thin blood smear, classify the red cells, and count infected ones "
            "by stage: both steps with packaged models. For research only."
        )
        self.reason = DisabledReason(self.button)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(row(self.button))
        layout.addWidget(self.reason)
        self.button.clicked.connect(lambda *_: self.run())
        classify.image.chosen.connect(lambda *_: self._update_button())
        self._update_button()

    def _update_button(self) -> None:
        reason = "Infected cells are being counted." if self.running else ""
        self.reason.update_button(
            "Open an image first." if self.classify.image.layer is None else reason
        )

    def run(self) -> None:
        """Start with the first step; nothing happens while the preset is running."""
        if self.running or self.classify.image.layer is None:
            return
        self.running = True
        self._update_button()
        self._show_cells(self._find)

    def _end(self, done: bool) -> None:
        self.running = False
        self._update_button()
        self.ended.emit(done)

    # --- the first step ---------------------------------------------------------------------------

    def _find(self, cells: DetectWidget) -> None:
        from napari_beerlanet.core.batch.settings import MALARIA_PRESET
        from napari_beerlanet.core.checkpoints.checkpoint import read_info

        if cells.detect_task.running:
            cells.progress_bar.set_message(
                "A search is running; count infected cells when it has ended."
            )
            self._end(False)
            return
        self._cells = cells
        cells.choose_model(MALARIA_PRESET["model"])
        cells.detect_task.ended.connect(self._found)
        cells.run(
            iou=MALARIA_PRESET["iou"],
            refine=partial(_claim, classifier=read_info(MALARIA_PRESET["classifier"])),
            confidence=MALARIA_PRESET["confidence"],
        )
        if not cells.detect_task.running:  # the panel says why
            cells.detect_task.ended.disconnect(self._found)
            self._end(False)

    def _found(self, outcome: TaskOutcome) -> None:
        assert self._cells is not None
        self._cells.detect_task.ended.disconnect(self._found)
        if outcome is not TaskOutcome.DONE:
            self._end(False)
            return
        self._show_types()
        self._load_classifier()

    # --- the second -------------------------------------------------------------------------------

    def _load_classifier(self) -> None:
        from napari_beerlanet.core.batch.settings import MALARIA_PRESET

        model = self.classify.model
        if model.picker.key == MALARIA_PRESET["classifier"] and model.loaded is not None:
            self._classify()
            return
        model.ready.connect(self._classifier_ready)
        self.classify.choose_model(MALARIA_PRESET["classifier"])

    def _classifier_ready(self) -> None:
        from napari_beerlanet.core.batch.settings import MALARIA_PRESET

        model = self.classify.model
        failed = model.picker.key != MALARIA_PRESET["classifier"]
        if model.loaded is None and not failed:
            return  # chosen, and being loaded
        model.ready.disconnect(self._classifier_ready)
        if failed:
            self._end(False)
        else:
            self._classify()

    def _classify(self) -> None:
        panel = self.classify
        panel.classify_task.ended.connect(self._classified)
        panel.run_on_detections()
        if not panel.classify_task.running:  # the panel says why
            panel.classify_task.ended.disconnect(self._classified)
            self._end(False)

    def _classified(self, outcome: TaskOutcome) -> None:
        self.classify.classify_task.ended.disconnect(self._classified)
        self.classify.when_shown(lambda: self._end(outcome is TaskOutcome.DONE))


def _claim(
    found: Detections, detector: Mapping[str, Any], classifier: Mapping[str, Any]
) -> Detections:
    from napari_beerlanet.core.batch.malaria import claim_red_cells

    return claim_red_cells(found, detector, classifier)
