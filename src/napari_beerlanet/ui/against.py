"""The review's tab of annotations: compares, draws, and mends what is wrong in them."""

from __future__ import annotations

from typing import Any

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QFrame, QScrollArea

from napari_beerlanet.core.quality import Quality
from napari_beerlanet.core.suspects import Suspect
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.quality_layers import (
    DrawnTruth,
    QualityLayers,
    annotation_layers,
    mend,
    quality_of,
    read_truth,
    region_layers,
)
from napari_beerlanet.ui.quality_panel import QualityPanel

_PAUSE = 250  # milliseconds after the last change of the annotations


class Against:
    """Keeps panel, canvas and annotations together while the tab is open."""

    def __init__(self, review_panel: Any) -> None:
        self.review_panel, self.viewer = review_panel, review_panel.viewer
        self.panel = QualityPanel()
        self.scroll = QScrollArea()
        self.scroll.setWidgetResizable(True)
        self.scroll.setFrameShape(QFrame.Shape.NoFrame)
        self.scroll.setWidget(self.panel)
        self.target: Any = None
        self.quality: Quality | None = None
        self.truth: DrawnTruth | None = None
        self.layers: QualityLayers | None = None
        self._active, self._threshold, self._listening = False, 0.25, None
        self._soon = QTimer(review_panel)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_PAUSE)
        self._soon.timeout.connect(self.compare)
        self.panel.asked.connect(self.compare)
        self.panel.toggled.connect(self._draw)
        self.panel.cell_chosen.connect(self._cell)
        self.panel.threshold_chosen.connect(
            lambda best: review_panel.filter.choose_range("confidence", best, 1.0)
        )
        self.panel.suspect_chosen.connect(self._go_to)
        self.panel.mend_asked.connect(self._mend)
        self.panel.clear()

    def use(self, target: Any) -> None:
        """Compare other detections."""
        self.close()
        self.target = target
        if self._active:
            self.compare()

    def set_active(self, active: bool) -> None:
        """The tab is opened or left; when it is left, the canvas is as before."""
        self._active = active
        if active:
            self.compare()
        else:
            self._clear_canvas()

    def close(self) -> None:
        """Forget everything and clear the canvas."""
        self._listen(None)
        self._clear_canvas()
        self.quality = self.truth = None

    def _clear_canvas(self) -> None:
        if self.layers is not None:
            self.layers.remove()
            self.layers = None
            if self.target is not None and self.target.shower.alive:
                self.target.shower.layer.visible = True

    # --- comparing ---

    def compare(self) -> None:
        """Read the annotations anew and match everything."""
        if self.target is None or not self._active:
            return
        source = self.target.source
        self.panel.offer(annotation_layers(self.viewer, source), region_layers(self.viewer, source))
        layer = self.panel.truth_layer
        self._listen(layer)
        if layer is None:
            self._clear_canvas()
            self.quality = None
            self.panel.clear()
            return
        try:
            self._compare_with(layer)
        except ValueError as error:
            self.quality = None
            self.panel.clear(complain(error))

    def _compare_with(self, layer: Any) -> None:
        index, shape = self.target.plane.index, self.target.plane.shape
        self.truth = read_truth(layer, index, shape)
        self.quality = quality_of(self.target.found, self.truth, self.panel.regions_layer, index)
        notes = list(self.truth.notes)
        if not len(self.truth.annotations):
            notes.insert(0, f"“{layer.name}” has no boxes on this plane.")
        self.panel.use(self.quality, self.target.colours, notes)
        self.judge(self._threshold)

    def quality_of(self, found: Any) -> Quality | None:
        """The same annotations against other detections, None while there are none."""
        if self.quality is None or self.truth is None:
            return None
        index = self.target.plane.index
        return quality_of(found, self.truth, self.panel.regions_layer, index)

    def judge(self, threshold: float) -> None:
        """Another threshold: match again, and show the difference."""
        self._threshold = max(threshold, 0.0)
        if self.quality is None or not self._active:
            return
        verdict = self.quality.at(self._threshold, self.panel.level.value())
        self.panel.judge(self.quality, verdict, self._threshold)
        self._draw()

    def _draw(self) -> None:
        if self.quality is None or self.panel.verdict is None or not self._active:
            return
        if self.layers is None:
            self.layers = QualityLayers(self.viewer, self.target.source, self.target.plane.index)
            self.target.shower.layer.visible = False
        self.layers.show(self.quality, self.panel.verdict, self.panel.visible)

    def _listen(self, layer: Any) -> None:
        """Follow changes of the annotations, and of no others."""
        if layer is self._listening:
            return
        for other, connect in ((self._listening, False), (layer, True)):
            if other is not None:
                for emitter in (other.events.data, other.events.features):
                    (emitter.connect if connect else emitter.disconnect)(self._changed)
        self._listening = layer

    def _changed(self, event: Any = None) -> None:
        self._soon.start()

    # --- going there, and mending ---

    def _cell(self, found: Any, true: Any) -> None:
        """Show the detections behind a cell; of missed ones, go to the first."""
        if len(found):
            self.review_panel.show_only(found)
            self.review_panel.go_to(int(found[0]))
        elif len(true) and self.truth is not None:
            self.target.look_at_box(self.truth.annotations.xyxy[true[0]])

    def _go_to(self, suspect: Suspect) -> None:
        if suspect.found >= 0:
            self.review_panel.go_to(suspect.found)
        elif self.truth is not None:
            self.target.look_at_box(self.truth.annotations.xyxy[suspect.true])

    def _mend(self, suspect: Suspect) -> None:
        if self.quality is None or self.truth is None:
            return
        done = mend(
            self.panel.truth_layer, self.truth, self.quality, suspect, self.target.plane.index
        )
        self.compare()
        self.review_panel.bar.say(f"Done: {done}.")
