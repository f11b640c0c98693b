"""The review's tab of annotations: compares, draws, and mends what is wrong in them."""

from __future__ import annotations

from typing import Any

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QFrame, QScrollArea

from napari_beerlanet.core.assessment import Assessment, assess
from napari_beerlanet.core.progress import Report
from napari_beerlanet.core.quality import Quality
from napari_beerlanet.core.regions import Region
from napari_beerlanet.core.suspects import Suspect
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.quality_layer import QualityLayer, annotation_layers, region_layers
from napari_beerlanet.ui.quality_panel import MOST_SUSPECTS, QualityPanel
from napari_beerlanet.ui.quality_truth import Drawn, DrawnTruth, mend, read_truth, regions_of

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
        self.layer: QualityLayer | None = None
        self.task = review_panel.task()
        self._regions: list[Region] = []
        self._fresh = False  # whether the annotations are as they were when they were read
        self._mended: int | None = None  # the place of the suspect that was mended last
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
        self._offered: list[Any] = []
        for emitter in (self.viewer.layers.events.inserted, self.viewer.layers.events.removed):
            review_panel.listen(emitter, self._layers_changed)

    def _layers_changed(self, event: Any = None) -> None:
        """Annotations may have come or gone; our own layers do not count."""
        if self._active and self.target is not None and self._layers() != self._offered:
            self._soon.start()

    def _layers(self) -> list[Any]:
        source = self.target.source
        return [annotation_layers(self.viewer, source), region_layers(self.viewer, source)]

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
        self.task.cancel()
        self.quality = self.truth = None
        self._fresh = False

    def _clear_canvas(self) -> None:
        if self.layer is not None:
            self.layer.remove()
            self.layer = None
            if self.target is not None and self.target.shower.alive:
                self.target.shower.layer.visible = True

    # --- comparing ---

    def compare(self) -> None:
        """Read the annotations anew and match everything."""
        self._soon.stop()
        if self.target is None or not self._active:
            return
        self._offered = self._layers()
        self.panel.offer(*self._offered)
        layer = self.panel.truth_layer
        self._listen(layer)
        if layer is None:
            self._clear_canvas()
            self.quality = None
            self.panel.clear()
            return
        target, level, regions = self.target, self.panel.level.value(), self.panel.regions_layer
        drawn = Drawn.of(layer)
        around = Drawn.of(regions) if regions is not None else None
        index, shape, found = target.plane.index, target.plane.shape, target.found
        self._fresh = True

        def work(report: Report) -> tuple[DrawnTruth, list[Region], Assessment]:
            truth, inside = read_truth(drawn, index, shape), regions_of(around, index)
            made = assess(found, truth.annotations, inside, level, MOST_SUSPECTS, report)
            return truth, inside, made

        self.task.start(work, lambda made: self._compared(target, layer, *made), self._failed)

    def _failed(self, error: BaseException) -> None:
        self.quality = self.truth = None
        self.panel.clear(complain(error))

    def _compared(
        self, target: Any, layer: Any, truth: DrawnTruth, regions: list[Region], made: Assessment
    ) -> None:
        if target is not self.target or not self._active:
            return
        self.truth, self._regions, self.quality = truth, regions, made.quality
        notes = list(truth.notes)
        if not len(truth.annotations):
            notes.insert(0, f"“{layer.name}” has no boxes on this plane.")
        self.panel.use(made, target.colours, notes)
        QTimer.singleShot(0, lambda: self.judge(self._threshold))
        place, self._mended = self._mended, None
        if place is not None and self.panel.suspects.count():
            self.panel.suspects.setCurrentRow(min(place, self.panel.suspects.count() - 1))

    def quality_of(self, found: Any) -> Quality | None:
        """The same annotations against other detections, None while there are none."""
        if self.quality is None or self.truth is None:
            return None
        return Quality.of(found, self.truth.annotations, self._regions)

    @property
    def on_canvas(self) -> bool:
        """Whether what is compared is drawn in the place of the detections."""
        return self.layer is not None

    def judge(self, threshold: float) -> None:
        """Another threshold: match again, and show the difference."""
        self._threshold = max(threshold, 0.0)
        if self.quality is None or not self._active:
            return
        verdict = self.quality.at(self._threshold, self.panel.level.value())
        self.panel.judge(verdict, self._threshold)
        self._draw()

    def _draw(self) -> None:
        if self.quality is None or self.panel.verdict is None or not self._active:
            return
        if self.layer is None:
            self.layer = QualityLayer(self.viewer, self.target.source, self.target.plane.index)
            self.target.shower.layer.visible = False
        self.layer.show(self.quality, self.panel.verdict, self.panel.visible)

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
        self._fresh = False
        self._soon.start()

    # --- going there, and mending ---

    def _cell(self, found: Any, true: Any) -> None:
        """Show the detections behind a cell; missed annotations are selected in their layer."""
        if len(found):
            self.review_panel.show_only(found)
            self.review_panel.go_to(int(found[0]))
        elif len(true) and self.truth is not None and self._fresh and not self.task.running:
            layer = self.panel.truth_layer
            layer.selected_data = set(self.truth.places[true].tolist())
            self.viewer.layers.selection.active = layer
            self.target.look_at_box(self.truth.annotations.xyxy[true[0]])

    def _go_to(self, suspect: Suspect) -> None:
        if suspect.found >= 0:
            self.review_panel.go_to(suspect.found)
        elif self.truth is not None:
            self.target.look_at_box(self.truth.annotations.xyxy[suspect.true])

    def _mend(self, suspect: Suspect) -> None:
        if self.quality is None or self.truth is None or not self._fresh or self.task.running:
            return  # what the suspect is about may be another shape by now
        place = self.panel.suspects.currentRow()
        done = mend(
            self.panel.truth_layer, self.truth, self.quality, suspect, self.target.plane.index
        )
        self.compare()
        self._mended = place
        self.review_panel.bar.say(f"Done: {done}.")
