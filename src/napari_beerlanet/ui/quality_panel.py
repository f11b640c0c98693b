"""How good the detections are against annotations: live, per class, and where they differ."""

from __future__ import annotations

import html
from typing import Any

import numpy as np
import numpy.typing as npt
import pyqtgraph as pg
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QColor
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QHeaderView,
    QListWidget,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.assessment import Assessment
from napari_beerlanet.core.suspects import Suspect
from napari_beerlanet.core.verdict import Score, Verdict
from napari_beerlanet.ui.controls import button, form, heading, hint, row
from napari_beerlanet.ui.quality_layer import KINDS

_NONE, _WHOLE = "none", "whole image"
_HEADS = ("class", "drawn", "shown", "precision", "recall", "F1", "mAP50", "mAP50-95")
MOST_SUSPECTS = 500
_MOST_POINTS = 2000  # of a curve that is drawn


class QualityPanel(QWidget):
    """Shows an `Assessment` at a threshold.

    `asked`: other layers, or the overlap, were chosen. `toggled`: other kinds shall be seen.
    `cell_chosen` tells detections and annotations behind a cell of the confusion matrix,
    `threshold_chosen` a better threshold, `suspect_chosen` and `mend_asked` a likely label error.
    """

    asked = Signal()
    toggled = Signal()
    cell_chosen = Signal(object, object)
    threshold_chosen = Signal(float)
    suspect_chosen = Signal(object)
    mend_asked = Signal(object)

    def __init__(self) -> None:
        super().__init__()
        self.verdict: Verdict | None = None
        self._best: float | None = None
        self._assessment: Assessment | None = None
        self._suspects: list[Suspect] = []
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 4, 0, 0)
        layout.addLayout(self._choices())
        layout.addWidget(self._kinds())
        self.notes = hint()
        layout.addWidget(self.notes)
        self.scores = _table("Precision, recall and the rest for each class, at this threshold.")
        layout.addWidget(self.scores)
        self.use_best = button("", "Set the confidence to where F1 is highest.", self._use_best)
        self.use_best.hide()
        layout.addWidget(self.use_best)
        layout.addWidget(self._curve())
        layout.addWidget(heading("Found as (rows), drawn as (columns)"))
        self.confusion = _table("Click a number to see the boxes behind it.")
        self.confusion.cellClicked.connect(self._cell)
        layout.addWidget(self.confusion)
        layout.addWidget(heading("Likely errors of the annotations"))
        self.suspects = QListWidget()
        self.suspects.setToolTip("The most doubtful first. Click one to go there.")
        self.suspects.setMinimumHeight(120)
        self.suspects.setMaximumHeight(240)
        self.suspects.currentRowChanged.connect(self._suspect)
        layout.addWidget(self.suspects)
        self.mend = button(
            "Mend the annotation (F)", "Do what the line suggests.", self.ask_to_mend
        )
        layout.addWidget(self.mend)

    def _choices(self) -> Any:
        self.truth = _box("The layer of shapes that says what is really there.")
        self.regions = _box("Where everything is annotated; elsewhere nothing counts.")
        self.level = QDoubleSpinBox()
        self.level.setRange(0.1, 0.95)
        self.level.setSingleStep(0.05)
        self.level.setValue(0.5)
        self.level.setToolTip("Least overlap (IoU) of a detection with what it is said to be.")
        self.level.valueChanged.connect(self.asked)
        lines = form()
        lines.addRow("Annotations", self.truth)
        lines.addRow("Regions", self.regions)
        lines.addRow("Overlap", self.level)
        self._layers: dict[str, Any] = {}
        for box in (self.truth, self.regions):
            box.currentIndexChanged.connect(self.asked)
        return lines

    def _kinds(self) -> QWidget:
        self.kinds: dict[str, QCheckBox] = {}
        for kind, colour in KINDS.items():
            box = QCheckBox(kind)
            box.setChecked(True)
            box.setToolTip(f"Show boxes that are {kind} in this colour.")
            box.setStyleSheet(f"QCheckBox {{ color: {colour}; }}")
            box.toggled.connect(self.toggled)
            self.kinds[kind] = box
        return row(*self.kinds.values())

    def _curve(self) -> Any:
        self.plot = pg.PlotWidget(background=None)
        self.plot.setToolTip("Precision over recall of each class; the dot is this threshold.")
        self.plot.setLabel("bottom", "recall")
        self.plot.setLabel("left", "precision")
        self.plot.setRange(xRange=(0, 1), yRange=(0, 1.02), padding=0.02)
        self.plot.setMouseEnabled(x=False, y=False)
        self.plot.hideButtons()
        self.plot.setMenuEnabled(False)
        self.plot.setMinimumHeight(170)
        self.plot.setMaximumHeight(260)
        self.plot.addLegend(offset=(10, -10), labelTextSize="8pt")
        return self.plot

    # --- what is compared ---

    def offer(self, truths: list[Any], regions: list[Any]) -> None:
        """Layers to choose from."""
        for box, layers, first in (
            (self.truth, truths, _NONE),
            (self.regions, regions, _WHOLE),
        ):
            was, text = box.blockSignals(True), box.currentText()
            box.clear()
            box.addItem(first)
            for layer in layers:
                box.addItem(layer.name, layer)
            box.setCurrentIndex(max(box.findText(text), 0))
            box.blockSignals(was)

    @property
    def truth_layer(self) -> Any:
        """The chosen annotations, None for none."""
        return self.truth.currentData()

    @property
    def regions_layer(self) -> Any:
        """The chosen regions, None for the whole image."""
        return self.regions.currentData()

    @property
    def visible(self) -> dict[str, bool]:
        """Which kinds are to be seen."""
        return {kind: box.isChecked() for kind, box in self.kinds.items()}

    # --- what is shown ---

    def clear(self, text: str = "") -> None:
        """Nothing is compared."""
        self.verdict, self._best = None, None
        self.notes.setText(text or "Choose the layer with your annotations.")
        for part in (self.scores, self.confusion):
            part.setRowCount(0)
        self.plot.clear()
        self.suspects.clear()
        self.use_best.hide()
        for kind, box in self.kinds.items():
            box.setText(kind)

    def use(self, found: Assessment, colours: list[str], notes: list[str]) -> None:
        """Other boxes are compared: curves, best threshold and suspects."""
        self._assessment = found
        self.notes.setText(" ".join(notes))
        self.plot.clear()
        for k, (name, curve) in enumerate(found.curves.items()):
            if curve.recall.any():
                pen = pg.mkPen(colours[k % len(colours)] if colours else "w", width=2)
                plain = " ".join(html.escape(name).split())
                thin = _thinned(len(curve.recall))
                self.plot.plot(curve.recall[thin], curve.precision[thin], pen=pen, name=plain)
        self._dots = pg.ScatterPlotItem(size=10, pen=pg.mkPen("w"), brush=pg.mkBrush("#888"))
        self.plot.addItem(self._dots)
        self._best = found.best
        self.use_best.setVisible(found.best is not None)
        if found.best is not None:
            self.use_best.setText(f"Best F1 at confidence {found.best:.2f}: use it")
        self._suspects = found.suspects
        was = self.suspects.blockSignals(True)
        self.suspects.clear()
        self.suspects.addItems([suspect.sentence for suspect in self._suspects])
        self.suspects.blockSignals(was)

    def judge(self, verdict: Verdict, threshold: float) -> None:
        """Another threshold: numbers, dots and matrix."""
        self.verdict = verdict
        counts = (len(verdict.true), len(verdict.false), len(verdict.missed), len(verdict.wrong))
        for (kind, box), count in zip(self.kinds.items(), counts, strict=True):
            box.setText(f"{kind} {count:,}")
        rows = [verdict.mean, *(score for score in verdict.scores if score.count or score.shown)]
        _fill(self.scores, _HEADS, [_cells(score) for score in rows])
        points = [c.point(threshold) for c in self._assessment.curves.values() if c.recall.any()]
        self._dots.setData([x for x, _ in points], [y for _, y in points])
        self._matrix(verdict)

    def _matrix(self, verdict: Verdict) -> None:
        counts = verdict.confusion
        heads = [*verdict.names, "nothing"]
        used = [k for k in range(len(heads)) if counts[k].any() or counts[:, k].any()]
        self._used = used
        cells = [[f"{counts[i, j]:,}" if counts[i, j] else "" for j in used] for i in used]
        _fill(self.confusion, [heads[k] for k in used], cells)
        self.confusion.setVerticalHeaderLabels([heads[k] for k in used])
        self.confusion.verticalHeader().show()
        for i, a in enumerate(used):
            for j, b in enumerate(used):
                good = QColor(47, 191, 113, 70) if a == b else QColor(229, 72, 77, 60)
                if counts[a, b]:
                    self.confusion.item(i, j).setBackground(good)

    def _cell(self, i: int, j: int) -> None:
        if self.verdict is not None:
            self.cell_chosen.emit(*self.verdict.cell(self._used[i], self._used[j]))

    def _use_best(self) -> None:
        if self._best is not None:
            self.threshold_chosen.emit(self._best)

    def _suspect(self, place: int) -> None:
        if 0 <= place < len(self._suspects):
            self.suspect_chosen.emit(self._suspects[place])

    def ask_to_mend(self) -> None:
        """Mend the annotation of the line that is chosen."""
        place = self.suspects.currentRow()
        if 0 <= place < len(self._suspects):
            self.mend_asked.emit(self._suspects[place])


def _thinned(count: int) -> npt.NDArray[np.int64]:
    """Places of a curve's points to draw: all of a few, else about as many as there are pixels."""
    return np.unique(np.linspace(0, count - 1, min(count, _MOST_POINTS)).astype(np.int64))


def _cells(score: Score) -> list[str]:
    parts = (score.precision, score.recall, score.f1, score.ap50, score.ap)
    words = ["–" if np.isnan(value) else f"{value:.3f}" for value in parts]
    return [" ".join(score.name.split()), f"{score.count:,}", f"{score.shown:,}", *words]


def _box(tooltip: str) -> QComboBox:
    made = QComboBox()
    made.setToolTip(tooltip)
    made.setMinimumContentsLength(10)
    made.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
    return made


def _table(tooltip: str) -> QTableWidget:
    made = QTableWidget()
    made.setToolTip(tooltip)
    made.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
    made.verticalHeader().hide()
    made.verticalHeader().setDefaultSectionSize(22)
    made.setSizeAdjustPolicy(QTableWidget.SizeAdjustPolicy.AdjustToContents)
    made.setMaximumHeight(220)
    return made


def _fill(table: QTableWidget, heads: Any, cells: list[list[str]]) -> None:
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
    table.horizontalHeader().setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
