"""Metrics of detections against annotations.

Scores per class, precision-recall curves, the confusion matrix and likely label errors.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from functools import cached_property

import numpy as np
import numpy.typing as npt
import pyqtgraph as pg
from napari.layers import Shapes
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QColor
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QFormLayout,
    QGridLayout,
    QHeaderView,
    QListWidget,
    QStackedWidget,
    QTabBar,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.messages import format_score
from napari_beerlanet.core.evaluation.label_errors import ImageEvaluation, LabelError
from napari_beerlanet.core.evaluation.metrics import ClassMetrics, MatchResult
from napari_beerlanet.ui.common.controls import (
    PlotTheme,
    button,
    colour_icon,
    combo_box,
    form,
    hint,
    not_none,
    size_to_current_page,
)
from napari_beerlanet.ui.evaluate.class_mapping import ClassMapping, ClassMappingForm
from napari_beerlanet.ui.evaluate.outcome_layer import OUTCOMES

MAX_LABEL_ERRORS = 500
_NO_LAYER, _WHOLE_IMAGE = "none", "whole image"
_NO_MATCH = "no match"
_SCORE_COLUMNS = (
    *("class", "annotated", "detected", "precision", "recall", "F1", "mAP50", "mAP50-95"),
)
_MAX_CURVE_POINTS = 2000
_TABLE_LINE_PX = 22
_CELL_ALPHA = 80  # of the confusion matrix's colours, over which numbers stay readable


class MetricsPanel(QWidget):
    """Shows an `ImageEvaluation` at a confidence threshold.

    `comparison_requested`: another layer or IoU was chosen. `visibility_changed`: other outcomes
    are to be drawn. `cell_selected` carries the detections and annotations behind a cell of the
    confusion matrix, `threshold_selected` the best threshold, `label_error_selected` and
    `fix_requested` a `LabelError`.
    """

    comparison_requested = Signal()
    visibility_changed = Signal()
    cell_selected = Signal(object, object)
    threshold_selected = Signal(float)
    label_error_selected = Signal(object)
    fix_requested = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.matches: MatchResult | None = None
        self._best_threshold: float | None = None
        self._evaluation: ImageEvaluation | None = None
        self._label_errors: list[LabelError] = []
        self._user_choices: set[QComboBox] = set()  # those in which the user has selected a layer
        self.class_mapping, self.notes = ClassMappingForm(), hint()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 4, 0, 0)
        layout.addLayout(self._form_rows())
        layout.addWidget(self.class_mapping)
        layout.addWidget(self._outcome_toggles())
        layout.addWidget(self.notes)
        self.section_bar, self.sections = QTabBar(), QStackedWidget()
        self.section_bar.setDrawBase(False)
        self.section_bar.setExpanding(False)
        self.section_bar.currentChanged.connect(self.sections.setCurrentIndex)
        for title, section in (
            ("Scores", self._score_section()),
            ("Confusion matrix", self._confusion_section()),
            ("Curves", self._plot_section()),
            ("Label errors", self._label_error_section()),
        ):
            self.sections.addWidget(section)
            self.section_bar.addTab(title)
        size_to_current_page(self.sections)
        layout.addWidget(self.section_bar)
        layout.addWidget(self.sections)
        layout.addStretch(1)

    def _score_section(self) -> QWidget:
        self.scores = _read_only_table(
            "At this confidence: precision, recall, F1 and mAP of each class. In the row “all” "
            "every box counts, also of a class that is not annotated; mAP is the mean over the "
            "annotated classes."
        )
        self.use_best_button = button(
            "", "Set the confidence to the value with the highest F1.", self._select_best_threshold
        )
        self.use_best_button.hide()
        return _section(self.scores, self.use_best_button)

    def _confusion_section(self) -> QWidget:
        self.confusion = _read_only_table("Click a number to show its boxes.")
        self.confusion.cellClicked.connect(self._select_cell)
        return _section(hint("Rows: detected as. Columns: annotated as."), self.confusion)

    def _plot_section(self) -> QWidget:
        section = QWidget()
        self._plot_place = QVBoxLayout(section)
        self._plot_place.setContentsMargins(0, 0, 0, 0)
        return section

    def _label_error_section(self) -> QWidget:
        self.label_error_list = QListWidget()
        self.label_error_list.setToolTip("The most likely first. Click one to go there.")
        self.label_error_list.setMinimumHeight(120)
        self.label_error_list.setMaximumHeight(240)
        self.label_error_list.currentRowChanged.connect(self._select_label_error)
        self.fix_button = button(
            "Fix annotation (F)", "Apply the suggestion of the selected line.", self.request_fix
        )
        return _section(self.label_error_list, self.fix_button)

    def _form_rows(self) -> QFormLayout:
        self.annotation_choice = combo_box("The Shapes layer with your annotations.", 10, True)
        self.region_choice = combo_box(
            "The Shapes layer with the annotated regions; detections elsewhere are ignored.",
            10,
            True,
        )
        self.iou_threshold = QDoubleSpinBox()
        self.iou_threshold.setRange(0.1, 0.95)
        self.iou_threshold.setSingleStep(0.05)
        self.iou_threshold.setValue(0.5)
        self.iou_threshold.setToolTip("Minimum IoU of a detection and an annotation to match.")
        self.iou_threshold.valueChanged.connect(self.comparison_requested)
        lines = form()
        lines.addRow("Annotations", self.annotation_choice)
        lines.addRow("Regions", self.region_choice)
        lines.addRow("Min. IoU", self.iou_threshold)
        for box in (self.annotation_choice, self.region_choice):
            box.currentIndexChanged.connect(lambda *_, box=box: self._layer_chosen(box))
        return lines

    def _outcome_toggles(self) -> QWidget:
        self.outcome_boxes: dict[str, QCheckBox] = {}
        for outcome, (colour, tooltip) in OUTCOMES.items():
            box = QCheckBox(outcome)
            box.setChecked(True)
            box.setToolTip(tooltip)
            box.setIcon(colour_icon(colour))
            box.toggled.connect(self.visibility_changed)
            self.outcome_boxes[outcome] = box
        toggles = QWidget()
        grid = QGridLayout(toggles)  # in one row they would be wider than the dock
        grid.setContentsMargins(0, 0, 0, 0)
        for place, box in enumerate(self.outcome_boxes.values()):
            grid.addWidget(box, *divmod(place, 2))
        return toggles

    @cached_property
    def plot(self) -> pg.PlotWidget:
        """Precision and recall; made at the first comparison, as it takes as long as the rest."""
        plot = pg.PlotWidget(background=None)
        plot.setToolTip("Precision-recall curve of each class; the dot is at this confidence.")
        plot.setLabel("bottom", "recall")
        plot.setLabel("left", "precision")
        plot.setRange(xRange=(0, 1), yRange=(0, 1.02), padding=0.02)
        plot.setMouseEnabled(x=False, y=False)
        plot.hideButtons()
        plot.setMenuEnabled(False)
        plot.setMinimumHeight(170)
        plot.setMaximumHeight(260)
        plot.addLegend(offset=(10, -10), labelTextSize="8pt")
        PlotTheme(plot)
        self._plot_place.addWidget(plot)
        return plot

    # --- choices ---

    def set_layers(
        self,
        annotations: Sequence[Shapes],
        regions: Sequence[Shapes],
        preferred_annotations: Shapes | None,
        preferred_regions: Shapes | None,
    ) -> None:
        """Offer these layers, and select the preferred ones, unless the user has selected one."""
        for box, layers, preferred, first in (
            (self.annotation_choice, annotations, preferred_annotations, _NO_LAYER),
            (self.region_choice, regions, preferred_regions, _WHOLE_IMAGE),
        ):
            selected = box.currentData()
            if box not in self._user_choices or (selected is not None and selected not in layers):
                selected = preferred
            with signals_blocked(box):
                box.clear()
                box.addItem(first)
                for layer in layers:
                    box.addItem(layer.name, layer)
                place = next((k for k, one in enumerate(layers, 1) if one is selected), 0)
                box.setCurrentIndex(place)

    def forget_choices(self) -> None:
        """Prefer the layers of another image, whatever the user has selected for the last."""
        self._user_choices.clear()

    def _layer_chosen(self, box: QComboBox) -> None:
        self._user_choices.add(box)
        self.comparison_requested.emit()

    @property
    def annotation_layer(self) -> Shapes | None:
        """The selected annotations, None for none."""
        return _selected_shapes(self.annotation_choice)

    @property
    def region_layer(self) -> Shapes | None:
        """The selected regions, None for the whole image."""
        return _selected_shapes(self.region_choice)

    @property
    def visible_outcomes(self) -> dict[str, bool]:
        """Which outcomes to draw."""
        return {outcome: box.isChecked() for outcome, box in self.outcome_boxes.items()}

    # --- results ---

    def clear(self, text: str = "") -> None:
        """Show no comparison, but a hint."""
        self.matches, self._best_threshold = None, None
        self.notes.setText(text or "Select the layer with your annotations.")
        self.class_mapping.show_mapping(ClassMapping())
        for part in (self.scores, self.confusion):
            part.setRowCount(0)
        if "plot" in vars(self):
            self.plot.clear()
        self.label_error_list.clear()
        self.use_best_button.hide()
        for outcome, box in self.outcome_boxes.items():
            box.setText(outcome)

    def set_evaluation(
        self, evaluation: ImageEvaluation, colours: Sequence[str], notes: Sequence[str]
    ) -> None:
        """Show curves, best threshold and likely label errors of other boxes."""
        self._evaluation = evaluation
        self.notes.setText(" ".join(notes))
        self.plot.clear()
        for k, (name, curve) in enumerate(evaluation.curves.items()):
            if curve.recall.any():
                pen = pg.mkPen(colours[k % len(colours)] if colours else "#888", width=2)
                legend = " ".join(html.escape(name).split())
                points = _subsampled(len(curve.recall))
                recall, precision = curve.recall[points], curve.precision[points]
                self.plot.plot(recall, precision, pen=pen, name=legend)
        self._threshold_dots = pg.ScatterPlotItem(
            size=10, pen=pg.mkPen("#444"), brush=pg.mkBrush("#999")
        )
        self.plot.addItem(self._threshold_dots)
        best = self._best_threshold = evaluation.best_threshold
        self.use_best_button.setVisible(best is not None)
        if best is not None:
            self.use_best_button.setText(f"Use confidence {best:.2f} (best F1)")
        self._label_errors = evaluation.label_errors
        with signals_blocked(self.label_error_list):
            self.label_error_list.clear()
            self.label_error_list.addItems([error.message for error in self._label_errors])

    def show_matches(self, matches: MatchResult, threshold: float) -> None:
        """Show scores, dots and confusion matrix at another threshold."""
        self.matches = matches
        outcomes = (
            matches.true_positives,
            matches.false_positives,
            matches.missed,
            matches.wrong_class,
        )
        counts = [len(outcome) for outcome in outcomes]
        for (outcome, box), count in zip(self.outcome_boxes.items(), counts, strict=True):
            box.setText(f"{outcome} {count:,}")
        rows = [
            matches.all_boxes,
            *(score for score in matches.per_class if score.annotated or score.detected),
        ]
        _fill_table(self.scores, _SCORE_COLUMNS, [_score_texts(score) for score in rows])
        curves = self._evaluation.curves.values() if self._evaluation is not None else ()
        points = [curve.point_at(threshold) for curve in curves if curve.recall.any()]
        self._threshold_dots.setData([x for x, _ in points], [y for _, y in points])
        self._fill_confusion(matches)

    def _fill_confusion(self, matches: MatchResult) -> None:
        counts = matches.confusion.matrix
        heads = [*matches.names, _NO_MATCH]
        used = [k for k in range(len(heads)) if counts[k].any() or counts[:, k].any()]
        self._confusion_classes = used
        cells = [[f"{counts[i, j]:,}" if counts[i, j] else "" for j in used] for i in used]
        _fill_table(self.confusion, [heads[k] for k in used], cells)
        self.confusion.setVerticalHeaderLabels([heads[k] for k in used])
        not_none(self.confusion.verticalHeader()).show()
        for i, a in enumerate(used):
            for j, b in enumerate(used):
                if counts[a, b]:
                    colour = QColor(OUTCOMES["true" if a == b else "false"][0])
                    colour.setAlpha(_CELL_ALPHA)
                    not_none(self.confusion.item(i, j)).setBackground(colour)

    def _select_cell(self, i: int, j: int) -> None:
        if self.matches is not None:
            classes = self._confusion_classes
            self.cell_selected.emit(*self.matches.confusion.cell(classes[i], classes[j]))

    def _select_best_threshold(self) -> None:
        if self._best_threshold is not None:
            self.threshold_selected.emit(self._best_threshold)

    def _select_label_error(self, index: int) -> None:
        if 0 <= index < len(self._label_errors):
            self.label_error_selected.emit(self._label_errors[index])

    def request_fix(self) -> None:
        """Ask for the annotation of the selected line to be fixed."""
        index = self.label_error_list.currentRow()
        if 0 <= index < len(self._label_errors):
            self.fix_requested.emit(self._label_errors[index])


def _selected_shapes(choice: QComboBox) -> Shapes | None:
    layer = choice.currentData()
    return layer if isinstance(layer, Shapes) else None


def _subsampled(count: int) -> npt.NDArray[np.int64]:
    """Indices of a curve's points to draw: about as many as there are pixels."""
    return np.unique(np.linspace(0, count - 1, min(count, _MAX_CURVE_POINTS)).astype(np.int64))


def _score_texts(score: ClassMetrics) -> list[str]:
    values = (score.precision, score.recall, score.f1, score.ap50, score.ap)
    texts = ["–" if np.isnan(value) else format_score(value) for value in values]
    return [" ".join(score.name.split()), f"{score.annotated:,}", f"{score.detected:,}", *texts]


def _section(*widgets: QWidget) -> QWidget:
    section = QWidget()
    layout = QVBoxLayout(section)
    layout.setContentsMargins(0, 0, 0, 0)
    for widget in widgets:
        layout.addWidget(widget)
    layout.addStretch(1)
    return section


def _read_only_table(tooltip: str) -> QTableWidget:
    table = QTableWidget()
    table.setToolTip(tooltip)
    table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
    lines = not_none(table.verticalHeader())
    lines.hide()
    lines.setDefaultSectionSize(_TABLE_LINE_PX)
    table.setVerticalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
    table.setHorizontalScrollMode(QTableWidget.ScrollMode.ScrollPerPixel)
    return table


def _fill_table(table: QTableWidget, heads: Sequence[str], cells: list[list[str]]) -> None:
    table.setRowCount(len(cells))
    table.setColumnCount(len(heads))
    table.setHorizontalHeaderLabels([" ".join(head.split()) for head in heads])
    right = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
    for i, line in enumerate(cells):
        for j, text in enumerate(line):
            item = QTableWidgetItem(text)
            if text[:1].isdigit() or text == "–":
                item.setTextAlignment(right)
            table.setItem(i, j, item)
    header = not_none(table.horizontalHeader())
    header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
    _fit_height(table)


def _fit_height(table: QTableWidget) -> None:
    """Show all lines: the panel scrolls, and a table that scrolls inside of it hides its end."""
    bar, header = not_none(table.horizontalScrollBar()), not_none(table.horizontalHeader())
    lines = header.sizeHint().height() + table.rowCount() * _TABLE_LINE_PX
    height = lines + bar.sizeHint().height() + 2 * table.frameWidth()
    if table.height() != height or table.minimumHeight() != height:
        table.setFixedHeight(height)
