"""Crops of detections in a grid that scrolls, painted as far as they are in sight.

Qt's own views lay out every item, which takes a second for a hundred thousand. Here all cells are
of one size, so that places are reckoned.
"""

from __future__ import annotations

import html

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QEvent, QPoint, QRect, Qt
from qtpy.QtGui import QColor, QHelpEvent, QPainter, QPaintEvent, QPalette, QPen, QResizeEvent
from qtpy.QtWidgets import QAbstractScrollArea, QToolTip

from napari_beerlanet.core.reviewing import ACCEPTED, REJECTED, STATES, Review
from napari_beerlanet.ui.crops import SIDE, Crops

Rows = npt.NDArray[np.int64]

CELL = SIDE + 8  # pixels from one crop to the next
NONE = np.empty(0, np.int64)
_FRAMES = {ACCEPTED: QColor(60, 190, 100), REJECTED: QColor(220, 70, 60)}
_BLANK = QColor(128, 128, 128, 40)


class CropsGrid(QAbstractScrollArea):
    """The crops of `rows` (m,) of a `Review`, by place 0 … m − 1; some are marked as selected."""

    def __init__(self) -> None:
        super().__init__()
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.verticalScrollBar().setSingleStep(CELL // 4)
        self.rows: Rows = NONE
        self._review: Review | None = None
        self._crops: Crops | None = None
        self._selected = np.zeros(0, bool)
        self._current = self._anchor = -1
        self._frame: QRect | None = None  # that the user draws, in pixels of the whole grid

    def use(self, review: Review | None, crops: Crops | None) -> None:
        """Show another review."""
        if self._crops is not None:
            self._crops.ready.disconnect(self.changed)
        self._review, self._crops = review, crops
        if crops is not None:
            crops.ready.connect(self.changed)
        self.show_rows(NONE)

    def show_rows(self, rows: Rows) -> None:
        """Show these rows in this order; the current one stays it if it is among them."""
        old = int(self.rows[self._current]) if 0 <= self._current < len(self.rows) else -1
        self.rows = rows
        self._selected = np.zeros(len(rows), bool)
        self._current = self._anchor = self.place_of(old)
        self._frame = None
        self._reckon()
        self.viewport().update()

    def place_of(self, row: int) -> int:
        """Where in the gallery a row of the review is, -1 if it is filtered out."""
        found = np.flatnonzero(self.rows == row)
        return int(found[0]) if len(found) else -1

    def changed(self) -> None:
        """Pictures or states are others now."""
        self.viewport().update()

    @property
    def columns(self) -> int:
        """Crops side by side."""
        return max(self.viewport().width() // CELL, 1)

    def cell(self, place: int) -> QRect:
        """Where a crop is on the viewport."""
        line, column = divmod(place, self.columns)
        return QRect(column * CELL, line * CELL - self.verticalScrollBar().value(), CELL, CELL)

    def place_at(self, point: QPoint) -> int:
        """The crop at a point of the viewport, -1 for none."""
        column = point.x() // CELL
        line = (point.y() + self.verticalScrollBar().value()) // CELL
        place = line * self.columns + column
        inside = 0 <= column < self.columns and 0 <= place < len(self.rows)
        return int(place) if inside else -1

    def in_sight(self) -> range:
        """The places that are to be seen."""
        top, height = self.verticalScrollBar().value(), self.viewport().height()
        first = top // CELL * self.columns
        return range(first, min((top + height) // CELL * self.columns + self.columns, self._n))

    @property
    def _n(self) -> int:
        return len(self.rows)

    def _reckon(self) -> None:
        lines, height = -(-self._n // self.columns), self.viewport().height()
        self.verticalScrollBar().setRange(0, max(lines * CELL - height, 0))
        self.verticalScrollBar().setPageStep(height)

    def resizeEvent(self, event: QResizeEvent) -> None:
        """Other columns; what was at the top stays in sight."""
        top = self.verticalScrollBar().value() // CELL * (max(event.oldSize().width() // CELL, 1))
        self._reckon()
        if event.oldSize().width() != event.size().width():
            self.verticalScrollBar().setValue(top // self.columns * CELL)

    def scrollContentsBy(self, dx: int, dy: int) -> None:
        """Paint anew: crops that were not in sight are to be asked for."""
        self.viewport().update()

    # --- painting ---

    def paintEvent(self, event: QPaintEvent) -> None:
        """What is in sight, and no more."""
        painter = QPainter(self.viewport())
        chosen = self.palette().color(QPalette.ColorRole.Highlight)
        for place in self.in_sight():
            self._paint(painter, place, chosen)
        if self._frame is not None:
            painter.setPen(QPen(chosen, 1, Qt.PenStyle.DashLine))
            top = self.verticalScrollBar().value()
            painter.drawRect(self._frame.normalized().translated(0, -top))
        painter.end()

    def _paint(self, painter: QPainter, place: int, chosen: QColor) -> None:
        cell, row = self.cell(place), int(self.rows[place])
        if self._selected[place]:
            painter.fillRect(cell, chosen)
        picture = self._crops.picture(row) if self._crops is not None else None
        inner = cell.adjusted(4, 4, -4, -4)
        if picture is None:
            painter.fillRect(inner, _BLANK)
        else:
            inner.setSize(picture.size())
            inner.moveCenter(cell.center())
            painter.drawPixmap(inner.topLeft(), picture)
        frame = _FRAMES.get(STATES[self._review.status[row]]) if self._review else None
        if frame is not None:
            painter.setPen(QPen(frame, 3))
            painter.drawRect(inner.adjusted(1, 1, -2, -2))
        if place == self._current:
            painter.setPen(QPen(self.palette().color(QPalette.ColorRole.Text), 1))
            painter.drawRect(cell.adjusted(1, 1, -2, -2))

    def viewportEvent(self, event: QEvent) -> bool:
        """Say what a crop is when the mouse rests on it."""
        if event.type() == QEvent.Type.ToolTip and isinstance(event, QHelpEvent):
            place = self.place_at(event.pos())
            if place >= 0:
                QToolTip.showText(
                    event.globalPos(), f"<qt>{html.escape(self.words_of(place))}", self
                )
                return True
        return bool(super().viewportEvent(event))

    def words_of(self, place: int) -> str:
        """Class, confidence and state of a crop."""
        if self._review is None:
            return ""
        row, review = int(self.rows[place]), self._review
        name, state = review.names[review.labels[row]], STATES[review.status[row]]
        return f"{name}, confidence {review.found.scores[row]:.2f}, {state}"
