"""The table of detections: any number of rows, filtered and sorted by NumPy and not by Qt.

Qt's own proxy asks for every comparison in Python, a minute for a hundred thousand rows. Here a
filter or an order is one array of row numbers, which the model maps through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QAbstractTableModel, QItemSelectionModel, QModelIndex, Qt, Signal
from qtpy.QtGui import QColor, QFocusEvent
from qtpy.QtWidgets import QAbstractItemView, QAbstractScrollArea, QHeaderView, QTableView

from napari_beerlanet.core.reviewing import ACCEPTED, REJECTED, STATES, Review
from napari_beerlanet.core.sorting import stable_order

Rows = npt.NDArray[np.int64]

_NOWHERE = QModelIndex()
_TINTS = {ACCEPTED: QColor(60, 160, 90, 90), REJECTED: QColor(200, 70, 60, 90)}
_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_TITLES = {"x": "x (px)", "y": "y (px)", "area": "area (px²)"}


class ReviewModel(QAbstractTableModel):
    """Rows of a `Review` in the order of `rows` (m,), places in the review; columns by name."""

    def __init__(self, review: Review, parent: Any = None) -> None:
        super().__init__(parent)
        self.review = review
        self.names = review.columns
        self.rows: Rows = np.arange(len(review))
        self._values: dict[str, npt.NDArray[Any]] = {}

    def rowCount(self, parent: QModelIndex = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: QModelIndex = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.names)

    def show(self, rows: Rows) -> None:
        """Show these rows in this order."""
        self.beginResetModel()
        self.rows = rows
        self.endResetModel()

    def place_of(self, row: int) -> int | None:
        """Where in the table a row of the review is, None if it is filtered out."""
        found = np.flatnonzero(self.rows == row)
        return int(found[0]) if len(found) else None

    def changed(self) -> None:
        """Classes or states are others now."""
        self._values.clear()
        if len(self.rows):
            last = self.index(len(self.rows) - 1, len(self.names) - 1)
            self.dataChanged.emit(self.index(0, 0), last)

    def data(self, index: QModelIndex, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """Text, alignment and tint of a cell."""
        if not index.isValid() or index.row() >= len(self.rows):
            return None
        row, name = int(self.rows[index.row()]), self.names[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return text_of(name, self.values(name)[row])
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _RIGHT if self.values(name).dtype.kind in "iuf" else None
        if role == Qt.ItemDataRole.BackgroundRole:
            return _TINTS.get(STATES[self.review.status[row]])
        return None

    def headerData(self, section: int, orientation: Any, role: int = 0) -> Any:
        """Column names; rows are counted from 1."""
        if role != Qt.ItemDataRole.DisplayRole:
            return None
        if orientation == Qt.Orientation.Horizontal:
            return _TITLES.get(self.names[section], self.names[section])
        return section + 1

    def values(self, name: str) -> npt.NDArray[Any]:
        """A column of all rows of the review; kept until something changes."""
        if name not in self._values:
            self._values[name] = self.review.column(name)
        return self._values[name]

    def sorted_by(self, rows: Rows, column: int, descending: bool) -> Rows:
        """Rows by the values of a column; equal ones keep their order."""
        values = self._sortable(self.names[column])[rows]
        return rows[stable_order(-values if descending else values)]

    def _sortable(self, name: str) -> npt.NDArray[Any]:
        """(n,) numbers in the order of a column's values, what is missing before all others."""
        words: dict[str, tuple[Any, npt.NDArray[Any]]] = {
            "class": (self.review.names, self.review.labels),
            "status": (STATES, self.review.status),
        }
        if name in words:
            known, place = words[name]
            return np.unique(np.array(known), return_inverse=True)[1].astype(np.int16)[place]
        values = self.values(name)
        if values.dtype.kind not in "iuf":
            return np.unique(values.astype(str), return_inverse=True)[1].astype(np.int32)
        if values.dtype.kind == "f":
            return np.where(np.isnan(values), -np.inf, values)
        return values.astype(np.int64)


class ReviewTable(QTableView):
    """Shows a `ReviewModel`; `picked` tells the review's row that became the current one.

    `sorted` tells that a click on a heading asks for another order, which `arranged` makes.
    """

    picked = Signal(int)
    sorted = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setToolTip("All detections that pass the filter. Click one to go there.")
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setAlternatingRowColors(False)
        self.setWordWrap(False)
        self.verticalHeader().setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        self.verticalHeader().setDefaultSectionSize(22)
        self.horizontalHeader().setSectionsClickable(True)
        self.horizontalHeader().setSortIndicatorShown(True)
        self.horizontalHeader().sectionClicked.connect(self._sort)
        self._sorting: tuple[int, bool] | None = None

    def use(self, model: ReviewModel) -> None:
        """Show another model."""
        old = self.selectionModel()
        self.setModel(model)
        if old is not None:
            old.deleteLater()
        self._sorting = None
        self.horizontalHeader().setSortIndicator(-1, Qt.SortOrder.AscendingOrder)
        self.selectionModel().currentRowChanged.connect(self._pick)
        for header in (self.horizontalHeader(), self.verticalHeader()):
            header.setSelectionModel(QItemSelectionModel(model, header))  # or it asks every row
        for column, name in enumerate(model.names):
            wide = name in ("class", "status", "confidence")
            self.setColumnWidth(column, 92 if wide else max(76, 8 * len(name)))

    @property
    def rows(self) -> Rows:
        """The rows that are shown, in their order."""
        return self.model().rows if self.model() is not None else np.empty(0, np.int64)

    def show_rows(self, rows: Rows) -> None:
        """Show these rows in this order."""
        self.model().show(rows)

    def arranged(self, rows: Rows) -> Rows:
        """Rows as they are given, or as a click on a heading has sorted them."""
        return rows if self._sorting is None else self.model().sorted_by(rows, *self._sorting)

    def unsort(self, *_: Any) -> None:
        """Back to the order that rows are given in."""
        self._sorting = None
        self.horizontalHeader().setSortIndicator(-1, Qt.SortOrder.AscendingOrder)

    @property
    def selected_rows(self) -> Rows:
        """(k,) rows of the review that are selected."""
        if self.selectionModel() is None:
            return np.empty(0, np.int64)
        chosen = np.zeros(len(self.rows), bool)
        for part in self.selectionModel().selection():  # ranges: Qt lists rows one by one
            chosen[part.top() : part.bottom() + 1] = True
        return self.rows[chosen]

    def go_to(self, row: int) -> bool:
        """Make a row of the review the current one without telling; whether it is in the table."""
        place = self.model().place_of(row) if self.model() is not None else None
        if place is None:
            return False
        if place == self.currentIndex().row():
            return True  # it is, and perhaps one of several that are selected
        was = self.blockSignals(True)
        index = self.model().index(place, 0)
        flags = QItemSelectionModel.SelectionFlag
        self.selectionModel().setCurrentIndex(index, flags.ClearAndSelect | flags.Rows)
        self.scrollTo(index)
        self.blockSignals(was)
        return True

    def focusInEvent(self, event: QFocusEvent) -> None:
        """Unlike Qt's own, go nowhere: the first row would become the current one."""
        if self.currentIndex().isValid():
            super().focusInEvent(event)
        else:
            QAbstractScrollArea.focusInEvent(self, event)

    def _pick(self, current: QModelIndex, _: QModelIndex) -> None:
        if current.isValid() and not self.signalsBlocked():
            self.picked.emit(int(self.model().rows[current.row()]))

    def _sort(self, column: int) -> None:
        header = self.horizontalHeader()
        descending = header.sortIndicatorOrder() == Qt.SortOrder.DescendingOrder
        self._sorting = column, descending
        self.sorted.emit()


def text_of(name: str, value: Any) -> str:
    """A value as a table shows it."""
    if isinstance(value, str):
        return " ".join(value.split())
    if name in ("x", "y", "width", "height"):
        return f"{value:.1f}"
    if isinstance(value, (int, np.integer)):
        return str(value)
    return "" if value != value else f"{value:.0f}" if name == "area" else f"{value:.3f}"
