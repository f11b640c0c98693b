"""The table of detections: any number of rows, filtered and sorted by NumPy and not by Qt.

Qt's own proxy asks for every comparison in Python, a minute for a hundred thousand rows. Here a
filter or an order is one array of row numbers, which the model maps through.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QAbstractTableModel, QItemSelectionModel, QModelIndex, QObject, Qt, Signal
from qtpy.QtGui import QColor, QFocusEvent
from qtpy.QtWidgets import QAbstractItemView, QAbstractScrollArea, QHeaderView, QTableView
from superqt.utils import signals_blocked

from napari_beerlanet.core.boxes.classes import DECISION_COLOURS
from napari_beerlanet.core.boxes.detections import DOMAIN_SHIFT_COLUMN, TYPE_COLUMN
from napari_beerlanet.core.common.arrays import stable_argsort
from napari_beerlanet.core.review.review import STATES, Review, RowIndices
from napari_beerlanet.ui.common.controls import not_none

_ROOT_INDEX = QModelIndex()
_STATE_TINTS = {state: QColor(f"#5a{rgb[1:]}") for state, rgb in DECISION_COLOURS.items()}
_ALIGN_RIGHT = Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter
_COLUMN_TITLES = {"x": "x (px)", "y": "y (px)", "area": "area (px²)"}
_WIDTHS_PX = {"id": 46, "class": 80, TYPE_COLUMN: 96, "confidence": 88, "status": 88}


class ReviewTableModel(QAbstractTableModel):
    """The rows `rows` (m,) of a `Review`, in this order; columns by name."""

    def __init__(self, review: Review, parent: QObject | None = None) -> None:
        super().__init__(parent)
        self.review = review
        self.names = review.columns
        self.rows: RowIndices = np.arange(len(review))

    def rowCount(self, parent: QModelIndex = _ROOT_INDEX) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def columnCount(self, parent: QModelIndex = _ROOT_INDEX) -> int:
        return 0 if parent.isValid() else len(self.names)

    def set_rows(self, rows: RowIndices) -> None:
        """Show these rows in this order."""
        self.beginResetModel()
        self.rows = rows
        self.endResetModel()

    def place_of(self, row: int) -> int | None:
        """The place of a row of the review in the table, None if it is filtered out."""
        places = np.flatnonzero(self.rows == row)
        return int(places[0]) if len(places) else None

    def update_cells(self) -> None:
        """Classes, types or states have changed; the first type brings its column."""
        if self.names != self.review.columns:
            self.beginResetModel()
            self.names = self.review.columns
            self.endResetModel()
        elif len(self.rows):
            last = self.index(len(self.rows) - 1, len(self.names) - 1)
            self.dataChanged.emit(self.index(0, 0), last)

    def data(self, index: QModelIndex, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """Text, alignment and tint of a cell."""
        if not index.isValid() or index.row() >= len(self.rows):
            return None
        row, name = int(self.rows[index.row()]), self.names[index.column()]
        if role == Qt.ItemDataRole.DisplayRole:
            return cell_text(name, self.review.column(name, np.array([row]))[0])
        if role == Qt.ItemDataRole.TextAlignmentRole:
            return _ALIGN_RIGHT if self.review.column(name, slice(0)).dtype.kind in "iuf" else None
        if role == Qt.ItemDataRole.BackgroundRole:
            return _STATE_TINTS.get(STATES[self.review.status[row]])
        return None

    def headerData(self, section: int, orientation: Any, role: int = 0) -> Any:
        """Column names; rows are counted from 1."""
        if role != Qt.ItemDataRole.DisplayRole:
            return None
        if orientation == Qt.Orientation.Horizontal:
            name = self.names[section]
            return _COLUMN_TITLES.get(name, column_label(name))
        return section + 1

    def sorted_by(self, rows: RowIndices, column: int, descending: bool) -> RowIndices:
        """Rows by the values of a column; equal ones keep their order."""
        values = self._sort_keys(self.names[column])[rows]
        return rows[stable_argsort(-values if descending else values)]

    def _sort_keys(self, name: str) -> npt.NDArray[Any]:
        """(n,) numbers that sort like a column's values, missing values first."""
        review = self.review
        categories: dict[str, tuple[Any, npt.NDArray[Any]]] = {
            "class": (review.names, review.labels),
            "status": (STATES, review.status),
            TYPE_COLUMN: ([*review.type_names, ""], review.type_labels),
        }
        if name in categories:
            texts, codes = categories[name]
            ranks = np.unique(np.array(texts), return_inverse=True)[1].astype(np.int16)
            return np.asarray(ranks[codes])
        values = self.review.column(name)
        if values.dtype.kind not in "iuf":
            return np.unique(values.astype(str), return_inverse=True)[1].astype(np.int32)
        if values.dtype.kind == "f":
            return np.where(np.isnan(values), -np.inf, values)
        return values.astype(np.int64)


class ReviewTable(QTableView):
    """Shows a `ReviewTableModel`; `picked` carries the review's row that became the current one.

    `sort_requested`: a column header was clicked; `apply_sorting` sorts by it.
    """

    picked = Signal(int)
    sort_requested = Signal()

    def __init__(self) -> None:
        super().__init__()
        self.setToolTip("All detections that pass the filter. Click one to go there.")
        self.setSelectionBehavior(QAbstractItemView.SelectionBehavior.SelectRows)
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)
        self.setEditTriggers(QAbstractItemView.EditTrigger.NoEditTriggers)
        self.setAlternatingRowColors(False)
        self.setWordWrap(False)
        lines, self._header = not_none(self.verticalHeader()), not_none(self.horizontalHeader())
        lines.setSectionResizeMode(QHeaderView.ResizeMode.Fixed)
        lines.setDefaultSectionSize(22)
        self._header.setSectionsClickable(True)
        self._header.setSortIndicatorShown(True)
        self._header.sectionClicked.connect(self._sort)
        self._model: ReviewTableModel | None = None
        self._sorting: tuple[int, bool] | None = None

    def set_review_model(self, model: ReviewTableModel) -> None:
        """Show another review."""
        old = self.selectionModel()
        self._model = model
        self.setModel(model)
        if old is not None:
            old.deleteLater()
        self._sorting = None
        self._header.setSortIndicator(-1, Qt.SortOrder.AscendingOrder)
        self._selection.currentRowChanged.connect(self._pick)
        for header in (self._header, not_none(self.verticalHeader())):
            # With the table's own, Qt would ask for every row.
            header.setSelectionModel(QItemSelectionModel(model, header))
        for column, name in enumerate(model.names):
            self.setColumnWidth(column, _WIDTHS_PX.get(name, max(76, 8 * len(name))))

    @property
    def _selection(self) -> QItemSelectionModel:
        return not_none(self.selectionModel())

    @property
    def rows(self) -> RowIndices:
        """The listed rows, in their order."""
        return self._model.rows if self._model is not None else np.empty(0, np.int64)

    def show_rows(self, rows: RowIndices) -> None:
        """Show these rows in this order."""
        if self._model is not None:
            self._model.set_rows(rows)

    def update_cells(self) -> None:
        """Classes or states have changed."""
        if self._model is not None:
            self._model.update_cells()

    def apply_sorting(self, rows: RowIndices) -> RowIndices:
        """Rows as they are, or sorted by the column whose header was clicked."""
        if self._model is None or self._sorting is None:
            return rows
        return self._model.sorted_by(rows, *self._sorting)

    def reset_sorting(self, *_: Any) -> None:
        """Stop sorting by a column."""
        self._sorting = None
        self._header.setSortIndicator(-1, Qt.SortOrder.AscendingOrder)

    @property
    def selected_rows(self) -> RowIndices:
        """(k,) selected rows of the review."""
        if self._model is None:
            return np.empty(0, np.int64)
        selected = np.zeros(len(self.rows), bool)
        ranges = self._selection.selection()  # Qt would list rows one by one
        for part in (ranges[k] for k in range(len(ranges))):
            selected[part.top() : part.bottom() + 1] = True
        return self.rows[selected]

    def go_to(self, row: int) -> bool:
        """Make a row of the review the current one, without a signal; whether it is listed."""
        place = self._model.place_of(row) if self._model is not None else None
        if self._model is None or place is None:
            return False
        if place == self.currentIndex().row():
            return True  # keeps a selection of several rows
        with signals_blocked(self):
            index = self._model.index(place, 0)
            flags = QItemSelectionModel.SelectionFlag
            self._selection.setCurrentIndex(index, flags.ClearAndSelect | flags.Rows)
            self.scrollTo(index)
        return True

    def focusInEvent(self, event: QFocusEvent | None) -> None:
        """Qt's own makes the first row the current one; here focus selects nothing."""
        if self.currentIndex().isValid():
            super().focusInEvent(event)
        else:
            QAbstractScrollArea.focusInEvent(self, event)

    def _pick(self, current: QModelIndex, _: QModelIndex) -> None:
        if current.isValid() and not self.signalsBlocked():
            self.picked.emit(int(self.rows[current.row()]))

    def _sort(self, column: int) -> None:
        descending = self._header.sortIndicatorOrder() == Qt.SortOrder.DescendingOrder
        self._sorting = column, descending
        self.sort_requested.emit()


def column_label(name: str) -> str:
    """How a column is called on the screen."""
    return "out of domain" if name == DOMAIN_SHIFT_COLUMN else name


def cell_text(name: str, value: Any) -> str:
    """The text of a cell."""
    if isinstance(value, str):
        return " ".join(value.split())
    if name in ("x", "y", "width", "height"):
        return f"{value:.1f}"
    if isinstance(value, (int, np.integer)):
        return str(value)
    return "" if value != value else f"{value:.0f}" if name == "area" else f"{value:.3f}"
