"""The Annotations tab: match detections with annotations, draw the outcome, fix label errors."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from qtpy.QtCore import QTimer, Signal
from qtpy.QtWidgets import QVBoxLayout, QWidget
from superqt.utils import qdebounced

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.evaluation.label_errors import (
    ImageEvaluation,
    LabelError,
    evaluate_image,
)
from napari_beerlanet.core.evaluation.live import (
    LiveEvaluation,
    contradicted_classes,
    with_classes_renamed,
)
from napari_beerlanet.core.evaluation.metrics import MatchResult
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.evaluate.class_mapping import (
    ClassMapping,
    mapping_place,
    remember_classes,
    remembered_classes,
)
from napari_beerlanet.ui.evaluate.metrics_panel import MAX_LABEL_ERRORS, MetricsPanel
from napari_beerlanet.ui.evaluate.outcome_layer import (
    OutcomeLayer,
    annotation_layers,
    preferred_annotations,
    preferred_regions,
    region_layers,
)
from napari_beerlanet.ui.viewer.layer_data import (
    LayerAnnotations,
    ShapesSnapshot,
    fix_label_error,
    read_layer_annotations,
    read_layer_regions,
)
from napari_beerlanet.ui.viewer.planes import Plane

_DEBOUNCE_MS = 250  # after the last change of the annotations


class ComparisonTarget(Protocol):
    """The detections that are compared: their image, plane and layer."""

    source: Image
    plane: Plane
    detections: Detections
    detection_layer: DetectionLayer

    @property
    def colours(self) -> list[str]:
        """Of the classes."""
        ...

    def show_box(self, box: npt.NDArray[Any]) -> None:
        """Bring a box (4,) into sight."""
        ...


class Comparison(NamedTuple):
    """The annotations that were read, with the model's names of classes, and what came out."""

    annotations: LayerAnnotations
    regions: list[Region]
    mapping: ClassMapping
    evaluation: ImageEvaluation


class AnnotationComparisonTab(QWidget):
    """Keeps metrics, canvas and annotations in step while the tab is open.

    `threshold_selected` carries a confidence, `detections_selected` (n,) rows of the detections to
    show alone, `detection_selected` one of them to go to, `message` what was done.
    """

    threshold_selected = Signal(float)
    detections_selected = Signal(object)
    detection_selected = Signal(int)
    message = Signal(str)

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.viewer = panel.viewer
        self.metrics = MetricsPanel()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.metrics)
        self.target: ComparisonTarget | None = None
        self.evaluation: LiveEvaluation | None = None
        self.annotations: LayerAnnotations | None = None
        self.outcome_layer: OutcomeLayer | None = None
        self.task = panel.task()
        self._regions: list[Region] = []
        self._mapping = ClassMapping()
        self._said: weakref.WeakKeyDictionary[Shapes, Mapping[str, str]] = (
            weakref.WeakKeyDictionary()
        )  # classes of layers that are of no file and no project
        self._up_to_date = False  # whether the annotations are as they were when they were read
        self._last_fixed: int | None = None  # the row of the label error that was fixed last
        self._active, self._threshold = False, DetectSettings.default("confidence")
        self._followed_layer: Shapes | None = None
        self._offered_layers: list[list[Shapes]] = []
        self._compare_soon = qdebounced(self.compare, timeout=_DEBOUNCE_MS, parent=self)
        self.metrics.comparison_requested.connect(self.compare)
        self.metrics.class_mapping.changed.connect(self._classes_chosen)
        self.metrics.visibility_changed.connect(self._draw)
        self.metrics.cell_selected.connect(self._show_cell)
        self.metrics.threshold_selected.connect(self.threshold_selected)
        self.metrics.label_error_selected.connect(self._go_to_label_error)
        self.metrics.fix_requested.connect(self._fix_annotation)
        self.metrics.clear()
        for emitter in (self.viewer.layers.events.inserted, self.viewer.layers.events.removed):
            panel.connect_event(emitter, self._layers_changed)

    def _layers_changed(self, event: Any = None) -> None:
        """Layers of annotations may have been added or removed; display layers do not count."""
        if not self._active or self.target is None:
            return
        if self._candidate_layers(self.target) != self._offered_layers:
            self._compare_soon()

    def _candidate_layers(self, target: ComparisonTarget) -> list[list[Shapes]]:
        source = target.source
        return [annotation_layers(self.viewer, source), region_layers(self.viewer, source)]

    def set_target(self, target: ComparisonTarget | None) -> None:
        """Compare other detections."""
        self.clear()
        if self.target is None or target is None or target.source is not self.target.source:
            self.metrics.forget_choices()
        self.target = target
        if self._active:
            self.compare()

    def set_active(self, active: bool) -> None:
        """The tab was opened or left; leaving it restores the canvas."""
        self._active = active
        if active:
            self.compare()
        else:
            self._clear_canvas()

    def clear(self) -> None:
        """Compare nothing, and restore the canvas."""
        self._follow_layer(None)
        self._clear_canvas()
        self.task.cancel()
        self.evaluation = self.annotations = None
        self._up_to_date = False

    def _clear_canvas(self) -> None:
        if self.outcome_layer is not None:
            self.outcome_layer.remove()
            self.outcome_layer = None
            if self.target is not None and self.target.detection_layer.alive:
                self.target.detection_layer.layer.visible = True

    # --- comparing ---

    def compare(self) -> None:
        """Read the annotations again and match all detections."""
        self._compare_soon.cancel()
        target = self.target
        if target is None or not self._active:
            return
        self._offer_layers(target)
        layer = self.metrics.annotation_layer
        self._follow_layer(layer)
        if layer is None:
            self._clear_canvas()
            self.evaluation = None
            self.metrics.clear()
            return
        iou, region_layer = self.metrics.iou_threshold.value(), self.metrics.region_layer
        shapes = ShapesSnapshot.of(layer)
        region_shapes = ShapesSnapshot.of(region_layer) if region_layer is not None else None
        index, shape, detections = target.plane.index, target.plane.shape, target.detections
        place, said = mapping_place(self.viewer, layer), dict(self._said.get(layer, {}))
        self._up_to_date = True

        def work(report: Report) -> Comparison:
            read = read_layer_annotations(shapes, index, shape)
            names = read.annotations.names
            mapping = ClassMapping.resolve(
                names, detections.names, said or remembered_classes(place)
            )
            annotations = with_classes_renamed(read.annotations, mapping.mapping)
            regions = read_layer_regions(region_shapes, index)
            evaluation = evaluate_image(
                detections, annotations, regions, iou, MAX_LABEL_ERRORS, report
            )
            return Comparison(replace(read, annotations=annotations), regions, mapping, evaluation)

        self.task.start(work, lambda done: self._show(target, layer, done), self._on_failed)

    def _offer_layers(self, target: ComparisonTarget) -> None:
        """List the layers there are; those of the image are selected, unless the user chose."""
        self._offered_layers = annotations, regions = self._candidate_layers(target)
        self.metrics.set_layers(
            annotations,
            regions,
            preferred_annotations(annotations, target.source),
            preferred_regions(regions, target.source),
        )

    def _classes_chosen(self, chosen: dict[str, str]) -> None:
        """The user has said which classes of the annotations are which of the model."""
        layer = self.metrics.annotation_layer
        if layer is None:
            return
        place = mapping_place(self.viewer, layer)
        if place is None:
            self._said[layer] = {**self._said.get(layer, {}), **chosen}
        else:
            remember_classes(place, chosen)
        self.compare()

    def _on_failed(self, error: BaseException) -> None:
        self.evaluation = self.annotations = None
        self.metrics.clear(notify_error(error))

    def _show(self, target: ComparisonTarget, layer: Shapes, comparison: Comparison) -> None:
        if target is not self.target or not self._active:
            return
        annotations, evaluation = comparison.annotations, comparison.evaluation
        self.annotations, self._regions = annotations, comparison.regions
        self._mapping, self.evaluation = comparison.mapping, evaluation.live
        notes = list(annotations.notes)
        if not len(annotations.annotations):
            notes.insert(0, f"“{layer.name}” has no boxes on this plane.")
        notes += _contradictions(evaluation.live.match_at(0.0, evaluation.iou), self._mapping)
        self.metrics.class_mapping.show_mapping(self._mapping)
        self.metrics.set_evaluation(evaluation, target.colours, notes)
        QTimer.singleShot(0, lambda: self.set_threshold(self._threshold))
        row, self._last_fixed = self._last_fixed, None
        errors = self.metrics.label_error_list
        if row is not None and errors.count():
            errors.setCurrentRow(min(row, errors.count() - 1))

    def evaluate(self, detections: Detections) -> LiveEvaluation | None:
        """Other detections against the same annotations, None while there are none."""
        if self.evaluation is None or self.annotations is None:
            return None
        return LiveEvaluation.of(detections, self.annotations.annotations, self._regions)

    @property
    def on_canvas(self) -> bool:
        """Whether the outcome is drawn in place of the detections."""
        return self.outcome_layer is not None

    def set_threshold(self, threshold: float) -> None:
        """Match at another confidence, and show the outcome."""
        self._threshold = max(threshold, 0.0)
        if self.evaluation is None or not self._active:
            return
        matches = self.evaluation.match_at(self._threshold, self.metrics.iou_threshold.value())
        self.metrics.show_matches(matches, self._threshold)
        self._draw()

    def _draw(self) -> None:
        target, matches = self.target, self.metrics.matches
        if self.evaluation is None or matches is None or target is None or not self._active:
            return
        if self.outcome_layer is None:
            self.outcome_layer = OutcomeLayer(self.viewer, target.source, target.plane.index)
            target.detection_layer.layer.visible = False
        self.outcome_layer.show(self.evaluation, matches, self.metrics.visible_outcomes)

    def _follow_layer(self, layer: Shapes | None) -> None:
        """Compare again when this layer changes, and no other."""
        if layer is self._followed_layer:
            return
        for other, connect in ((self._followed_layer, False), (layer, True)):
            if other is not None:
                for emitter in (other.events.data, other.events.features):
                    (emitter.connect if connect else emitter.disconnect)(self._annotations_changed)
        self._followed_layer = layer

    def _annotations_changed(self, event: Any = None) -> None:
        self._up_to_date = False
        self._compare_soon()

    # --- going to boxes, and fixing annotations ---

    @property
    def _can_edit(self) -> bool:
        """Whether indices of the annotations are still those of the shapes in their layer."""
        return self.annotations is not None and self._up_to_date and not self.task.running

    def _show_cell(self, detected: npt.NDArray[np.int64], annotated: npt.NDArray[np.int64]) -> None:
        """Show the detections behind a cell; missed annotations are selected in their layer."""
        if len(detected):
            self.detections_selected.emit(detected)
            self.detection_selected.emit(int(detected[0]))
            return
        layer = self.metrics.annotation_layer
        if len(annotated) and layer is not None and self.annotations is not None and self._can_edit:
            layer.selected_data = set(self.annotations.shape_indices[annotated].tolist())
            self.viewer.layers.selection.active = layer
            self._center_on_annotation(int(annotated[0]))

    def _go_to_label_error(self, error: LabelError) -> None:
        if error.detection >= 0:
            self.detection_selected.emit(error.detection)
        else:
            self._center_on_annotation(error.annotation)

    def _center_on_annotation(self, row: int) -> None:
        if self.target is not None and self.annotations is not None:
            self.target.show_box(self.annotations.annotations.xyxy[row])

    def _fix_annotation(self, error: LabelError) -> None:
        target, layer = self.target, self.metrics.annotation_layer
        if target is None or layer is None or not self._can_edit:
            return
        if self.evaluation is None or self.annotations is None:
            return
        row = self.metrics.label_error_list.currentRow()
        done = fix_label_error(
            layer,
            self.annotations,
            self.evaluation,
            error,
            target.plane.index,
            self._mapping.own_names(),
        )
        self.compare()
        self._last_fixed = row
        self.message.emit(f"Fixed: {done}.")


def _contradictions(matches: MatchResult, mapping: ClassMapping) -> list[str]:
    """Sentences on classes that are taken for one of the model, but whose boxes say otherwise."""
    own_names = mapping.own_names()
    return [
        f"“{own_names[name]}” is mapped to {name}, but most of its boxes lie on {other}."
        for name, other in contradicted_classes(matches).items()
        if name in own_names
    ]
