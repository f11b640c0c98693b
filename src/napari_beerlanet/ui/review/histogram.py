"""Histograms of confidence and stain densities per class, and of what a classifier says per type.

Dragging over a range filters by it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyqtgraph as pg
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QColor
from qtpy.QtWidgets import QComboBox, QVBoxLayout, QWidget
from superqt.utils import signals_blocked

from napari_beerlanet.core.boxes.detections import PROBABILITY_COLUMN, is_type_column
from napari_beerlanet.core.review.review import Review
from napari_beerlanet.ui.common.controls import PlotTheme, button, hint, row
from napari_beerlanet.ui.review.table import column_label

_BIN_COUNT = 48
_MAX_EAGER_ROWS = 50_000  # detections that take a while to be counted
_EXCLUDED_COLUMNS = ("id", "x", "y")
_RANGE_TOLERANCE = 5e-3  # of the extent, by which sliders round


class _RangeSelectionBox(pg.ViewBox):
    """A plot in which dragging the mouse selects a range."""

    dragged = Signal(float, float)

    def mouseDragEvent(self, event: Any, axis: int | None = None) -> None:
        """pyqtgraph's own name: from where the button was pressed to where the mouse is."""
        if event.button() != Qt.MouseButton.LeftButton:
            event.ignore()
            return
        event.accept()
        ends = [self.mapToView(point).x() for point in (event.buttonDownPos(), event.pos())]
        self.dragged.emit(min(ends), max(ends))


class ReviewHistogram(QWidget):
    """The distribution of a value in each class or type.

    `range_selected`: column, minimum, maximum. `range_of` returns the range that a column is
    filtered by, None for none.
    """

    range_selected = Signal(str, float, float)

    def __init__(self) -> None:
        super().__init__()
        self.column = QComboBox()
        self.column.setToolTip("The value whose distribution to show.")
        self.column.currentIndexChanged.connect(self._plot_column)
        reset = button("Full range", "Stop filtering by this value.", self.reset_range)
        box = _RangeSelectionBox(enableMenu=False)
        box.dragged.connect(self._on_drag)
        self.plot = pg.PlotWidget(background=None, viewBox=box)
        self.plot.setToolTip("Drag over a range of values to show only the detections in it.")
        self.plot.setMouseEnabled(x=False, y=False)
        self.plot.hideButtons()
        self.plot.setMenuEnabled(False)
        self.plot.setMinimumHeight(160)
        self.plot.addLegend(offset=(-8, 4), labelTextSize="8pt")
        self.range = pg.LinearRegionItem(brush=(128, 128, 128, 50), movable=False)
        for line in self.range.lines:
            line.setMovable(True)
        self.range.sigRegionChanged.connect(self._on_range_changed)
        PlotTheme(self.plot, self._set_edge_colour)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(row(self.column, reset, stretch=0))
        layout.addWidget(self.plot, 1)
        layout.addWidget(hint("Drag over a range, or its edges, to filter canvas and table."))
        self._review: Review | None = None
        self._colours: Sequence[str] = ()
        self._type_colours: Sequence[str] = ()
        self._extent = (0.0, 1.0)
        self._is_stale = False  # whether a hidden histogram must be plotted when it becomes visible
        self.range_of: Callable[[str], tuple[float, float] | None] = lambda name: None

    def set_review(
        self, review: Review, colours: Sequence[str], type_colours: Sequence[str] = ()
    ) -> None:
        """Show the values of a review, classes and types in these colours."""
        self._review, self._colours, self._type_colours = review, colours, type_colours
        with signals_blocked(self.column):
            self.column.clear()
            for name in review.numeric_columns:
                if name not in _EXCLUDED_COLUMNS:
                    self.column.addItem(column_label(name), name)
        self._is_stale = len(review) > _MAX_EAGER_ROWS and not self.isVisible()
        if not self._is_stale:
            self._plot_column()

    def _set_edge_colour(self, colour: QColor) -> None:
        for line in self.range.lines:
            line.setPen(colour)

    def reset_range(self) -> None:
        """Select the full range."""
        self.range.setRegion(self._extent)

    def sync_range(self) -> None:
        """Show the active range, if it was changed elsewhere, without a signal."""
        if self._is_stale:
            self._is_stale = False
            self._plot_column()
        active = self.range_of(self.column.currentData()) or self._extent
        difference = np.abs(np.subtract(self.range.getRegion(), active)).max()
        if difference > _RANGE_TOLERANCE * (self._extent[1] - self._extent[0]):
            self._set_region(active)

    def _set_region(self, region: tuple[float, float]) -> None:
        with signals_blocked(self.range):
            self.range.setBounds(self._extent)
            self.range.setRegion(region)

    def _plot_column(self, *_: Any) -> None:
        """Plot the selected column."""
        self.plot.clear()
        review, name = self._review, self.column.currentData()
        if review is None or not name or not len(review):
            return
        values = np.asarray(review.column(name), np.float64)
        finite = np.isfinite(values)
        if not finite.any():
            return
        low, high = float(values[finite].min()), float(values[finite].max())
        high = high if high > low else low + 1e-6
        is_share = name in ("confidence", PROBABILITY_COLUMN) or name.startswith("P(")
        self._extent = (0.0, 1.0) if is_share else (low, high)
        edges = np.linspace(*self._extent, _BIN_COUNT + 1)
        by_type = is_type_column(name)
        titles = review.type_names if by_type else review.names
        labels, colours = (
            (review.type_labels, self._type_colours) if by_type else (review.labels, self._colours)
        )
        for label, title in enumerate(titles):
            mine = values[finite & (labels == label)]
            # A number of bins and a range is faster than `edges`.
            counts = np.histogram(mine, _BIN_COUNT, range=self._extent)[0]
            if counts.any():
                self._plot_group(
                    edges, counts, title, colours[label % len(colours)] if colours else "#888"
                )
        self._set_region(self.range_of(name) or self._extent)
        self.plot.addItem(self.range)
        self.plot.setLabel("bottom", column_label(name))
        self.plot.setXRange(*self._extent, padding=0.02)

    def _plot_group(self, edges: Any, counts: Any, title: str, shade: str) -> None:
        colour = pg.mkColor(shade)
        fill = pg.mkColor(colour)
        fill.setAlpha(60)
        self.plot.plot(
            edges, counts, stepMode="center", fillLevel=0, pen=pg.mkPen(colour, width=2),
            brush=fill, name=" ".join(title.split()),
        )  # fmt: skip

    def _on_drag(self, low: float, high: float) -> None:
        self.range.setRegion(np.clip((low, high), *self._extent))

    def _on_range_changed(self) -> None:
        low, high = self.range.getRegion()
        self.range_selected.emit(self.column.currentData(), float(low), float(high))
