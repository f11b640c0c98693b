"""Histograms of confidence and densities per class; a range dragged in one is shown alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyqtgraph as pg
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QComboBox, QVBoxLayout, QWidget

from napari_beerlanet.core.reviewing import Review
from napari_beerlanet.ui.controls import button, hint, row

_BINS = 48
_MANY = 50_000  # detections that take a while to be counted
_LEFT_OUT = ("id", "x", "y")
_SAME = 5e-3  # of the extent, by which sliders round


class _Brush(pg.ViewBox):
    """A plot in which a drag of the mouse chooses a range."""

    dragged = Signal(float, float)

    def mouseDragEvent(self, event: Any, axis: int | None = None) -> None:
        """From where the button went down to where the mouse is."""
        if event.button() != Qt.MouseButton.LeftButton:
            event.ignore()
            return
        event.accept()
        ends = [self.mapToView(point).x() for point in (event.buttonDownPos(), event.pos())]
        self.dragged.emit(min(ends), max(ends))


class ReviewHistogram(QWidget):
    """How a value is distributed in each class. `brushed` tells column, least and most.

    `range_of` says to which range a column is restricted already, None for none.
    """

    brushed = Signal(str, float, float)

    def __init__(self) -> None:
        super().__init__()
        self.column = QComboBox()
        self.column.setToolTip("The value whose distribution is shown.")
        self.column.currentIndexChanged.connect(self._choose)
        whole = button("Whole range", "Show all values again.", self.whole)
        box = _Brush(enableMenu=False)
        box.dragged.connect(self._drag)
        self.plot = pg.PlotWidget(background=None, viewBox=box)
        self.plot.setToolTip("Drag over a range of values: only what is in it is shown.")
        self.plot.setMouseEnabled(x=False, y=False)
        self.plot.hideButtons()
        self.plot.setMenuEnabled(False)
        self.plot.setMinimumHeight(160)
        self.plot.addLegend(offset=(-8, 4), labelTextSize="8pt")
        self.range = pg.LinearRegionItem(brush=(128, 128, 128, 50), movable=False)
        for line in self.range.lines:
            line.setMovable(True)
        self.range.sigRegionChanged.connect(self._brush)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(row(self.column, whole, stretch=0))
        layout.addWidget(self.plot, 1)
        layout.addWidget(hint("Drag over a range, or its edges; the canvas and the table follow."))
        self._review: Review | None = None
        self._colours: Sequence[str] = ()
        self._extent = (0.0, 1.0)
        self._late = False  # what is not seen yet is drawn when it is
        self.range_of: Callable[[str], tuple[float, float] | None] = lambda name: None

    def use(self, review: Review, colours: Sequence[str]) -> None:
        """Show the values of a review, the classes in these colours."""
        self._review, self._colours = review, colours
        was = self.column.blockSignals(True)
        self.column.clear()
        self.column.addItems([name for name in review.numeric if name not in _LEFT_OUT])
        self.column.blockSignals(was)
        self._late = len(review) > _MANY and not self.isVisible()
        if not self._late:
            self._choose()

    def whole(self) -> None:
        """Choose the whole range."""
        self.range.setRegion(self._extent)

    def follow(self) -> None:
        """Show the range that is in force, if it was changed elsewhere, without telling."""
        if self._late:
            self._late = False
            self._choose()
        wanted = self.range_of(self.column.currentText()) or self._extent
        off = np.abs(np.subtract(self.range.getRegion(), wanted)).max()
        if off > _SAME * (self._extent[1] - self._extent[0]):
            self._set_region(wanted)

    def _set_region(self, region: tuple[float, float]) -> None:
        was = self.range.blockSignals(True)
        self.range.setBounds(self._extent)
        self.range.setRegion(region)
        self.range.blockSignals(was)

    def _choose(self, *_: Any) -> None:
        """Draw the chosen column."""
        self.plot.clear()
        review, name = self._review, self.column.currentText()
        if review is None or not name or not len(review):
            return
        values = np.asarray(review.column(name), np.float64)
        finite = np.isfinite(values)
        if not finite.any():
            return
        low, high = float(values[finite].min()), float(values[finite].max())
        high = high if high > low else low + 1e-6
        self._extent = (0.0, 1.0) if name == "confidence" else (low, high)
        edges = np.linspace(*self._extent, _BINS + 1)
        for label, title in enumerate(review.names):
            mine = values[finite & (review.labels == label)]
            counts, _ = np.histogram(mine, _BINS, range=self._extent)  # faster than with edges
            if counts.any():
                self._draw(edges, counts, title, label)
        self._set_region(self.range_of(name) or self._extent)
        self.plot.addItem(self.range)
        self.plot.setLabel("bottom", name)
        self.plot.setXRange(*self._extent, padding=0.02)

    def _draw(self, edges: Any, counts: Any, title: str, label: int) -> None:
        colour = pg.mkColor(self._colours[label % len(self._colours)] if self._colours else "w")
        fill = pg.mkColor(colour)
        fill.setAlpha(60)
        self.plot.plot(
            edges, counts, stepMode="center", fillLevel=0, pen=pg.mkPen(colour, width=2),
            brush=fill, name=" ".join(title.split()),
        )  # fmt: skip

    def _drag(self, low: float, high: float) -> None:
        least, most = self._extent
        self.range.setRegion((min(max(low, least), most), min(max(high, least), most)))

    def _brush(self) -> None:
        low, high = self.range.getRegion()
        self.brushed.emit(self.column.currentText(), float(low), float(high))
