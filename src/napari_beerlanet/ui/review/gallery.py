"""The gallery of detection thumbnails, with selection by mouse and keyboard.

Qt's own views lay out every item, which takes a second for a hundred thousand. Here all cells have
one size, so that positions are computed, and only what is visible is painted.
"""

from __future__ import annotations

import html
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QEvent, QPoint, QRect, Qt, Signal
from qtpy.QtGui import (
    QColor,
    QHelpEvent,
    QKeyEvent,
    QMouseEvent,
    QPainter,
    QPaintEvent,
    QPalette,
    QPen,
    QResizeEvent,
)
from qtpy.QtWidgets import QAbstractScrollArea, QComboBox, QToolTip, QVBoxLayout, QWidget
from superqt.utils import signals_blocked

from napari_beerlanet.core.boxes.classes import DECISION_COLOURS
from napari_beerlanet.core.boxes.detections import PROBABILITY_COLUMN
from napari_beerlanet.core.review.review import STATES, Review, RowIndices
from napari_beerlanet.ui.common.controls import form, not_none
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.review.crops import CROP_SIDE, IMAGE_COLOURS, CropLoader, CropStyles

_MIN_CELL_WIDTH, _MAX_CELL_WIDTH = CROP_SIDE + 8, 2 * CROP_SIDE + 8  # of a crop and its name
CAPTION_HEIGHT = 15  # pixels of the line with the class or type
CELL_HEIGHT = CROP_SIDE + 8 + CAPTION_HEIGHT
NO_ROWS = np.empty(0, np.int64)
_STATE_COLOURS = {state: QColor(colour) for state, colour in DECISION_COLOURS.items()}
_PLACEHOLDER_COLOUR = QColor(128, 128, 128, 40)
_MARGIN = 4  # pixels between the edge of a cell and what is in it
_SWATCH_PIXELS = 7  # the square in the class's colour, before its name
_MIN_DRAG_PIXELS = 6  # shorter drags of the mouse are clicks


class CropGallery(QAbstractScrollArea):
    """A grid of thumbnails of `rows` (m,) of a `Review`, by place 0 … m − 1, to select in.

    `picked` carries the row of the review that became the current one.
    """

    picked = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self.setToolTip(
            "A thumbnail of every detection. Select many with Shift, Ctrl or a frame, "
            "then accept or reject them at once."
        )
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self._bar = not_none(self.verticalScrollBar())
        self._canvas = not_none(self.viewport())
        self._bar.setSingleStep(CELL_HEIGHT // 4)
        self._cell_width = _MIN_CELL_WIDTH  # from one crop to the next
        self.rows: RowIndices = NO_ROWS
        self._review: Review | None = None
        self._colours: list[QColor] = []
        self._type_colours: list[QColor] = []
        self._loader: CropLoader | None = None
        self._selected = np.zeros(0, bool)
        self._current = self._anchor = -1
        self._rubber_band: QRect | None = None  # in pixels of the whole grid
        self._selected_before_drag = np.zeros(0, bool)

    def set_review(
        self,
        review: Review | None,
        loader: CropLoader | None,
        colours: Sequence[str] = (),
        type_colours: Sequence[str] = (),
    ) -> None:
        """Show another review; `colours` are "#rrggbb" by class, `type_colours` by type."""
        self._colours = [QColor(colour) for colour in colours]
        self.set_type_colours(type_colours)
        if self._loader is not None:
            self._loader.ready.disconnect(self.update_cells)
        self._review, self._loader = review, loader
        if loader is not None:
            loader.ready.connect(self.update_cells)
        self.show_rows(NO_ROWS)

    def set_type_colours(self, colours: Sequence[str]) -> None:
        """The colours "#rrggbb" of cell types; there may be more types than before."""
        self._type_colours = [QColor(colour) for colour in colours]

    def show_rows(self, rows: RowIndices) -> None:
        """Show these rows in this order; the current one stays current if it is among them."""
        old = int(self.rows[self._current]) if 0 <= self._current < len(self.rows) else -1
        self.rows = rows
        self._cell_width = self._fitting_width()
        self._selected = np.zeros(len(rows), bool)
        self._current = self._anchor = self.place_of(old)
        self._rubber_band = None
        self._update_scroll_range()
        self._canvas.update()

    def place_of(self, row: int) -> int:
        """The place of a row of the review, -1 if it is filtered out."""
        places = np.flatnonzero(self.rows == row)
        return int(places[0]) if len(places) else -1

    def update_cells(self) -> None:
        """Thumbnails, states or names have changed: lay out and paint again."""
        width = self._fitting_width()
        if width != self._cell_width:
            self._cell_width = width
            self._update_scroll_range()
        self._canvas.update()

    def _fitting_width(self) -> int:
        """The width of a cell in which every name of a class or type that is used has space."""
        review = self._review
        if review is None:
            return _MIN_CELL_WIDTH
        # Counted, as to sort a million labels would hold up every decision.
        classes = np.flatnonzero(np.bincount(review.labels, minlength=1))
        types = np.flatnonzero(np.bincount(review.type_labels + 1, minlength=1)[1:])
        names = [review.names[k] for k in classes] + [review.type_names[k] for k in types]
        widest = max(map(self.fontMetrics().horizontalAdvance, names), default=0)
        width = widest + _SWATCH_PIXELS + 3 * _MARGIN
        return min(max(width, _MIN_CELL_WIDTH), _MAX_CELL_WIDTH)

    @property
    def columns(self) -> int:
        """The number of thumbnails side by side."""
        return max(self._canvas.width() // self._cell_width, 1)

    def cell(self, place: int) -> QRect:
        """The rectangle of a thumbnail on the viewport."""
        line, column = divmod(place, self.columns)
        return QRect(
            column * self._cell_width,
            line * CELL_HEIGHT - self._bar.value(),
            self._cell_width,
            CELL_HEIGHT,
        )

    def place_at(self, point: QPoint) -> int:
        """The place at a point of the viewport, -1 for none."""
        column = point.x() // self._cell_width
        line = (point.y() + self._bar.value()) // CELL_HEIGHT
        place = line * self.columns + column
        inside = 0 <= column < self.columns and 0 <= place < len(self.rows)
        return int(place) if inside else -1

    def visible_places(self) -> range:
        """The places within the viewport."""
        top, height = self._bar.value(), self._canvas.height()
        first = top // CELL_HEIGHT * self.columns
        return range(
            first, min((top + height) // CELL_HEIGHT * self.columns + self.columns, self._count)
        )

    @property
    def _count(self) -> int:
        return len(self.rows)

    def _update_scroll_range(self) -> None:
        lines, height = -(-self._count // self.columns), self._canvas.height()
        self._bar.setRange(0, max(lines * CELL_HEIGHT - height, 0))
        self._bar.setPageStep(height)

    def resizeEvent(self, event: QResizeEvent | None) -> None:
        """Qt's own name: lay out again, and keep what was at the top visible."""
        old, new = not_none(event).oldSize().width(), not_none(event).size().width()
        top = self._bar.value() // CELL_HEIGHT * max(old // self._cell_width, 1)
        self._update_scroll_range()
        if old != new:
            self._bar.setValue(top // self.columns * CELL_HEIGHT)

    def scrollContentsBy(self, dx: int, dy: int) -> None:
        """Qt's own name: paint again, which requests thumbnails that have become visible."""
        self._canvas.update()

    # --- painting ---

    def paintEvent(self, event: QPaintEvent | None) -> None:
        """Qt's own name: paint what is visible, and no more."""
        painter = QPainter(self._canvas)
        highlight = self.palette().color(QPalette.ColorRole.Highlight)
        for place in self.visible_places():
            self._paint(painter, place, highlight)
        if self._rubber_band is not None:
            painter.setPen(QPen(highlight, 1, Qt.PenStyle.DashLine))
            top = self._bar.value()
            painter.drawRect(self._rubber_band.normalized().translated(0, -top))
        painter.end()

    def _paint(self, painter: QPainter, place: int, highlight: QColor) -> None:
        cell, row = self.cell(place), int(self.rows[place])
        if self._selected[place]:
            painter.fillRect(cell, highlight)
        picture = self._loader.picture(row) if self._loader is not None else None
        inner = cell.adjusted(4, 4, -4, -4 - CAPTION_HEIGHT)
        if picture is None:
            painter.fillRect(inner, _PLACEHOLDER_COLOUR)
        else:
            centre = inner.center()
            inner.setSize(picture.size())
            inner.moveCenter(centre)
            painter.drawPixmap(inner.topLeft(), picture)
        self._paint_caption(painter, place, bool(self._selected[place]))
        colour = _STATE_COLOURS.get(STATES[self._review.status[row]]) if self._review else None
        if colour is not None:
            painter.setPen(QPen(colour, 3))
            painter.drawRect(inner.adjusted(1, 1, -2, -2))
        if place == self._current:
            painter.setPen(QPen(self.palette().color(QPalette.ColorRole.Text), 1))
            painter.drawRect(cell.adjusted(1, 1, -2, -2))

    def _paint_caption(self, painter: QPainter, place: int, selected: bool) -> None:
        """The name under the crop, with its colour: of the cell type or, without one, the class."""
        cell = self.cell(place)
        if self._review is None:
            return
        line = QRect(
            cell.left() + _MARGIN,
            cell.bottom() - CAPTION_HEIGHT,
            cell.width() - 2 * _MARGIN,
            CAPTION_HEIGHT,
        )
        colour = self.caption_colour(place)
        if colour is not None:
            top = line.center().y() - _SWATCH_PIXELS // 2
            painter.fillRect(line.left(), top, _SWATCH_PIXELS, _SWATCH_PIXELS, colour)
        line.setLeft(line.left() + _SWATCH_PIXELS + _MARGIN)
        role = QPalette.ColorRole.HighlightedText if selected else QPalette.ColorRole.Text
        painter.setPen(self.palette().color(role))
        text = self.caption_text(place)
        painter.drawText(line, Qt.AlignmentFlag.AlignVCenter | Qt.AlignmentFlag.AlignLeft, text)

    def caption(self, place: int) -> str:
        """The cell type of a detection or, without one, its class, as the reviewer has it."""
        if self._review is None:
            return ""
        row = int(self.rows[place])
        return self._review.type_of(row) or self._review.class_of(row)

    def caption_text(self, place: int) -> str:
        """What of `caption` is written: all of it, but of a name that is longer than two crops."""
        width = self._cell_width - _SWATCH_PIXELS - 3 * _MARGIN
        elide = Qt.TextElideMode.ElideMiddle
        return self.fontMetrics().elidedText(self.caption(place), elide, width)

    def caption_colour(self, place: int) -> QColor | None:
        """The colour of what `caption` says."""
        if self._review is None:
            return None
        row = int(self.rows[place])
        label, colours = int(self._review.type_labels[row]), self._type_colours
        if label < 0:
            label, colours = int(self._review.labels[row]), self._colours
        return colours[label] if label < len(colours) else None

    def viewportEvent(self, event: QEvent | None) -> bool:
        """Qt's own name: a tooltip with class, confidence and state."""
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            place = self.place_at(event.pos())
            if place >= 0:
                QToolTip.showText(
                    event.globalPos(), f"<qt>{html.escape(self.tooltip_text(place))}", self
                )
                return True
        return bool(super().viewportEvent(event))

    def tooltip_text(self, place: int) -> str:
        """Class, confidence, type and state of a detection."""
        if self._review is None:
            return ""
        return describe_detection(self._review, int(self.rows[place]))

    # --- selection ---

    @property
    def selected_rows(self) -> RowIndices:
        """(k,) selected rows of the review."""
        return np.asarray(self.rows[self._selected])

    def selectAll(self) -> None:
        """Qt's own name: select all that pass the filter, visible or not."""
        self._selected[:] = True
        self._canvas.update()

    def go_to(self, row: int) -> bool:
        """Make a row of the review the current one, without a signal; whether it is listed."""
        place = self.place_of(row)
        if place >= 0 and place != self._current:
            self._make_current(place)
        return place >= 0

    def _make_current(self, place: int) -> None:
        self._selected[:] = False
        self._selected[place] = True
        self._current = self._anchor = place
        self._reveal(place)

    def _reveal(self, place: int) -> None:
        bar, top = self._bar, place // self.columns * CELL_HEIGHT
        low = top + CELL_HEIGHT - self._canvas.height()
        bar.setValue(min(max(bar.value(), low), top))
        self._canvas.update()

    def _select(self, place: int, extend: bool) -> None:
        """Go to a place by key or click; `extend` selects all from the anchor to it."""
        place = min(max(place, 0), self._count - 1)
        if extend and self._anchor >= 0:
            low, high = sorted((self._anchor, place))
            self._selected[:] = False
            self._selected[low : high + 1] = True
            self._current = place
            self._reveal(place)
        else:
            self._make_current(place)
        self.picked.emit(int(self.rows[place]))

    # --- mouse and keys ---

    def mousePressEvent(self, event: QMouseEvent | None) -> None:
        """Select one; with Ctrl one more or less, with Shift all from the last one on."""
        event = not_none(event)
        if event.button() != Qt.MouseButton.LeftButton:
            return
        place, modifiers = self.place_at(event.pos()), event.modifiers()
        control = bool(modifiers & Qt.KeyboardModifier.ControlModifier)
        if place >= 0 and control:
            self._selected[place] ^= True
            self._current = self._anchor = place
        elif place >= 0:
            self._select(place, bool(modifiers & Qt.KeyboardModifier.ShiftModifier))
        elif not control:
            self._selected[:] = False
        self._selected_before_drag = (
            self._selected.copy() if control else np.zeros(self._count, bool)
        )
        top = self._bar.value()
        self._rubber_band = QRect(event.pos() + QPoint(0, top), event.pos() + QPoint(0, top))
        self._canvas.update()

    def mouseMoveEvent(self, event: QMouseEvent | None) -> None:
        """Draw a rubber band, which selects what it touches; beyond the edge it scrolls."""
        event, bar = not_none(event), self._bar
        beyond = event.pos().y() - min(max(event.pos().y(), 0), self._canvas.height())
        bar.setValue(bar.value() + beyond)
        if self._rubber_band is None:
            return
        self._rubber_band.setBottomRight(event.pos() + QPoint(0, bar.value()))
        area = self._rubber_band.normalized()
        if max(area.width(), area.height()) < _MIN_DRAG_PIXELS:
            return
        self._selected = self._selected_before_drag | self._inside(area)
        self._canvas.update()

    def mouseReleaseEvent(self, event: QMouseEvent | None) -> None:
        """End the rubber band."""
        self._rubber_band = None
        self._canvas.update()

    def _inside(self, area: QRect) -> npt.NDArray[np.bool_]:
        """(m,) which thumbnails an area of the whole grid touches."""
        places = np.arange(self._count)
        lines, columns = places // self.columns, places % self.columns
        across = (columns >= area.left() // self._cell_width) & (
            columns <= area.right() // self._cell_width
        )
        return (
            across & (lines >= area.top() // CELL_HEIGHT) & (lines <= area.bottom() // CELL_HEIGHT)
        )

    def keyPressEvent(self, event: QKeyEvent | None) -> None:
        """Arrows, Home, End and pages go through the thumbnails; Ctrl+A selects all."""
        event = not_none(event)
        control = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        page = max(self._canvas.height() // CELL_HEIGHT, 1) * self.columns
        steps = {
            Qt.Key.Key_Left: -1,
            Qt.Key.Key_Right: 1,
            Qt.Key.Key_Up: -self.columns,
            Qt.Key.Key_Down: self.columns,
            Qt.Key.Key_PageUp: -page,
            Qt.Key.Key_PageDown: page,
            Qt.Key.Key_Home: -self._count,
            Qt.Key.Key_End: self._count,
        }
        if event.key() == Qt.Key.Key_A and control:
            self.selectAll()
        elif event.key() in steps and self._count:
            extend = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
            here = self._current if self._current >= 0 else 0
            self._select(here + steps[Qt.Key(event.key())], extend)
        else:
            event.ignore()


def describe_detection(review: Review, row: int) -> str:
    """ "WBC, confidence 0.93, monocyte (probability 0.71), accepted"."""
    parts = [review.class_of(row), f"confidence {review.detections.scores[row]:.2f}"]
    cell_type = review.type_of(row)
    if cell_type:
        parts.append(cell_type + _probability_text(review, row))
    return ", ".join([*parts, review.state_of(row)])


def _probability_text(review: Review, row: int) -> str:
    """The probability of a type that the classifier gave; nothing for one that a person gave."""
    changed = review.type_labels[row] != review.detections.type_labels[row]
    if changed or not review.has_type_probability:
        return ""
    p = review.column(PROBABILITY_COLUMN, np.array([row]))[0]
    return f" (probability {p:.2f})" if np.isfinite(p) else ""


class GalleryTab(QWidget):
    """The gallery, and a choice of what its thumbnails show."""

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.gallery = CropGallery()
        self.style_choice = QComboBox()
        self.style_choice.setToolTip(
            "What thumbnails show: the image, or the density of one stain, as in that column of "
            "the table."
        )
        self.style_choice.currentIndexChanged.connect(self._style_changed)
        self._task = panel.task()
        self._styles: CropStyles | None = None
        self._loader: CropLoader | None = None
        lines = form()
        lines.addRow("Thumbnails show", self.style_choice)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 4, 0, 0)
        layout.addLayout(lines)
        layout.addWidget(self.gallery, 1)

    def set_review(
        self,
        review: Review | None,
        styles: CropStyles | None,
        colours: Sequence[str] = (),
        type_colours: Sequence[str] = (),
    ) -> None:
        """Show other detections; the style stays, if they have it. Colours by class and by type."""
        old, wanted = self._loader, self.style_choice.currentText()
        self._styles, self._loader = styles, None
        names = styles.names if styles is not None else [IMAGE_COLOURS]
        with signals_blocked(self.style_choice):
            self.style_choice.clear()
            self.style_choice.addItems(names)
            self.style_choice.setCurrentIndex(names.index(wanted) if wanted in names else 0)
        if review is not None and styles is not None:
            read_crop = styles.crop_reader(self.style_choice.currentText())
            self._loader = CropLoader(review.detections.xyxy, read_crop, self._task, self)
        self.gallery.set_review(review, self._loader, colours, type_colours)
        if old is not None:
            old.deleteLater()

    def _style_changed(self) -> None:
        if self._styles is not None and self._loader is not None:
            self._loader.set_reader(self._styles.crop_reader(self.style_choice.currentText()))
