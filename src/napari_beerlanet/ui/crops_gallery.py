"""Many detections side by side: the quickest way to clean ten thousand."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QPoint, QRect, Qt, Signal
from qtpy.QtGui import QKeyEvent, QMouseEvent

from napari_beerlanet.ui.crops_grid import CELL, CropsGrid, Rows

_DRAGGED = 6  # pixels from which a movement is meant


class CropsGallery(CropsGrid):
    """A grid of crops to select in; `picked` tells the row that became the current one."""

    picked = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self.setToolTip(
            "Every detection cut out of the image. Select many with Shift, Ctrl or a frame, "
            "then accept or reject them at once."
        )
        self.setFocusPolicy(Qt.FocusPolicy.StrongFocus)
        self._before = np.zeros(0, bool)  # selected when the frame was begun

    @property
    def selected_rows(self) -> Rows:
        """(k,) rows of the review that are selected."""
        return np.asarray(self.rows[self._selected])

    def selectAll(self) -> None:
        """Select all that pass the filter, in sight or not."""
        self._selected[:] = True
        self.viewport().update()

    def go_to(self, row: int) -> bool:
        """Make a row of the review the current one without telling; whether it is there."""
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
        bar, top = self.verticalScrollBar(), place // self.columns * CELL
        low = top + CELL - self.viewport().height()
        bar.setValue(min(max(bar.value(), low), top))
        self.viewport().update()

    def _step_to(self, place: int, extend: bool) -> None:
        """Go to a place by key or click, with all from the anchor on if `extend`."""
        place = min(max(place, 0), self._n - 1)
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

    def mousePressEvent(self, event: QMouseEvent) -> None:
        """Select one; with Ctrl one more or less, with Shift all from the last one on."""
        if event.button() != Qt.MouseButton.LeftButton:
            return
        place, keys = self.place_at(event.pos()), event.modifiers()
        control = bool(keys & Qt.KeyboardModifier.ControlModifier)
        if place >= 0 and control:
            self._selected[place] ^= True
            self._current = self._anchor = place
        elif place >= 0:
            self._step_to(place, bool(keys & Qt.KeyboardModifier.ShiftModifier))
        elif not control:
            self._selected[:] = False
        self._before = self._selected.copy() if control else np.zeros(self._n, bool)
        top = self.verticalScrollBar().value()
        self._frame = QRect(event.pos() + QPoint(0, top), event.pos() + QPoint(0, top))
        self.viewport().update()

    def mouseMoveEvent(self, event: QMouseEvent) -> None:
        """Draw a frame, which selects what it touches; beyond the edge it scrolls."""
        bar = self.verticalScrollBar()
        beyond = event.pos().y() - min(max(event.pos().y(), 0), self.viewport().height())
        bar.setValue(bar.value() + beyond)
        if self._frame is None:
            return
        self._frame.setBottomRight(event.pos() + QPoint(0, bar.value()))
        area = self._frame.normalized()
        if max(area.width(), area.height()) < _DRAGGED:
            return
        self._selected = self._before | self._touched(area)
        self.viewport().update()

    def mouseReleaseEvent(self, event: QMouseEvent) -> None:
        """The frame is done."""
        self._frame = None
        self.viewport().update()

    def _touched(self, area: QRect) -> npt.NDArray[np.bool_]:
        """(m,) which crops an area of the whole gallery touches."""
        places = np.arange(self._n)
        lines, columns = places // self.columns, places % self.columns
        across = (columns >= area.left() // CELL) & (columns <= area.right() // CELL)
        return across & (lines >= area.top() // CELL) & (lines <= area.bottom() // CELL)

    def keyPressEvent(self, event: QKeyEvent) -> None:
        """Arrows, Home, End and pages go through the crops; Ctrl+A selects all."""
        control = bool(event.modifiers() & Qt.KeyboardModifier.ControlModifier)
        page = max(self.viewport().height() // CELL, 1) * self.columns
        steps = {
            Qt.Key.Key_Left: -1,
            Qt.Key.Key_Right: 1,
            Qt.Key.Key_Up: -self.columns,
            Qt.Key.Key_Down: self.columns,
            Qt.Key.Key_PageUp: -page,
            Qt.Key.Key_PageDown: page,
            Qt.Key.Key_Home: -self._n,
            Qt.Key.Key_End: self._n,
        }
        if event.key() == Qt.Key.Key_A and control:
            self.selectAll()
        elif event.key() in steps and self._n:
            extend = bool(event.modifiers() & Qt.KeyboardModifier.ShiftModifier)
            here = self._current if self._current >= 0 else 0
            self._step_to(here + steps[Qt.Key(event.key())], extend)
        else:
            event.ignore()
