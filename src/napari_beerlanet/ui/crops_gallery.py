"""Many detections side by side, cut out of the image: the quickest way to clean ten thousand.

Crops are cut in a thread, only those that are in sight, and kept until memory is short.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QAbstractListModel, QModelIndex, QSize, Qt, QTimer, Signal
from qtpy.QtGui import QColor, QIcon, QImage, QPainter, QPen, QPixmap
from qtpy.QtWidgets import QAbstractItemView, QListView

from napari_beerlanet.core.progress import Report
from napari_beerlanet.core.reviewing import ACCEPTED, REJECTED, STATES, Review
from napari_beerlanet.ui.tasks import Task

Rows = npt.NDArray[np.int64]
CutOut = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint8]]
"""From a box (4,) to its picture (h, w, 3) uint8; called in a thread."""

SIDE = 72  # pixels of a crop on the screen
_AT_ONCE = 400  # crops; about what two screens hold
_KEEP = 4000  # pixmaps: about 80 MB
_FRAMES = {ACCEPTED: QColor(60, 190, 100), REJECTED: QColor(220, 70, 60)}
_NOWHERE = QModelIndex()


class CropsModel(QAbstractListModel):
    """Crops of the rows of a `Review`, made when they are first asked for."""

    def __init__(self, review: Review, cut_out: CutOut, task: Task, parent: Any = None) -> None:
        super().__init__(parent)
        self.review, self._cut_out, self._task = review, cut_out, task
        self.rows: Rows = np.arange(len(review))
        self._ready: OrderedDict[int, QPixmap] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._blank = QPixmap(SIDE, SIDE)
        self._blank.fill(QColor(128, 128, 128, 40))
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(15)
        self._soon.timeout.connect(self._fetch)

    def rowCount(self, parent: QModelIndex = _NOWHERE) -> int:
        return 0 if parent.isValid() else len(self.rows)

    def show(self, rows: Rows) -> None:
        """Show these rows in this order."""
        self.beginResetModel()
        self.rows = rows
        self._wanted.clear()
        self.endResetModel()

    def data(self, index: QModelIndex, role: int = Qt.ItemDataRole.DisplayRole) -> Any:
        """The crop with a frame for its state, and what it is when the mouse rests on it."""
        if not index.isValid() or index.row() >= len(self.rows):
            return None
        row = int(self.rows[index.row()])
        if role == Qt.ItemDataRole.DecorationRole:
            return QIcon(self._picture(row))
        if role == Qt.ItemDataRole.ToolTipRole:
            name = self.review.names[self.review.labels[row]]
            state = STATES[self.review.status[row]]
            return f"{name}, confidence {self.review.found.scores[row]:.2f}, {state}"
        if role == Qt.ItemDataRole.SizeHintRole:
            return QSize(SIDE + 8, SIDE + 8)
        return None

    def changed(self) -> None:
        """States are others now."""
        if len(self.rows):
            self.dataChanged.emit(self.index(0, 0), self.index(len(self.rows) - 1, 0))

    def _picture(self, row: int) -> QPixmap:
        plain = self._ready.get(row)
        if plain is None:
            self._wanted[row] = None
            self._wanted.move_to_end(row)
            self._soon.start()
            return self._blank
        self._ready.move_to_end(row)
        frame = _FRAMES.get(STATES[self.review.status[row]])
        return plain if frame is None else _framed(plain, frame)

    def _fetch(self) -> None:
        """Cut out what was asked for lately; what scrolled by before its turn is left out."""
        rows = list(self._wanted)[-_AT_ONCE:]
        if not rows:
            return
        boxes, cut_out = self.review.found.xyxy[rows].copy(), self._cut_out

        def work(report: Report) -> list[npt.NDArray[np.uint8]]:
            return [cut_out(box) for box in boxes]

        self._task.start(work, lambda crops: self._put(rows, crops))

    def _put(self, rows: list[int], crops: list[npt.NDArray[np.uint8]]) -> None:
        for row, crop in zip(rows, crops, strict=True):
            self._ready[row] = _pixmap(crop)
            self._wanted.pop(row, None)
        while len(self._ready) > _KEEP:
            self._ready.popitem(last=False)
        while len(self._wanted) > _AT_ONCE:  # scrolled by
            self._wanted.popitem(last=False)
        self.changed()


class CropsGallery(QListView):
    """Shows a `CropsModel`; `picked` tells the review's row that became the current one."""

    picked = Signal(int)

    def __init__(self) -> None:
        super().__init__()
        self.setToolTip(
            "Every detection cut out of the image. Select many with Shift or a frame, "
            "then accept or reject them at once."
        )
        self.setViewMode(QListView.ViewMode.IconMode)
        self.setResizeMode(QListView.ResizeMode.Adjust)
        self.setMovement(QListView.Movement.Static)
        self.setUniformItemSizes(True)
        self.setLayoutMode(QListView.LayoutMode.Batched)
        self.setBatchSize(2000)
        self.setIconSize(QSize(SIDE, SIDE))
        self.setGridSize(QSize(SIDE + 8, SIDE + 8))
        self.setSelectionMode(QAbstractItemView.SelectionMode.ExtendedSelection)

    def use(self, model: CropsModel) -> None:
        """Show another model."""
        self.setModel(model)
        self.selectionModel().currentChanged.connect(self._pick)

    @property
    def selected_rows(self) -> Rows:
        """(k,) rows of the review that are selected."""
        if self.selectionModel() is None:
            return np.empty(0, np.int64)
        places = [index.row() for index in self.selectionModel().selectedIndexes()]
        return self.model().rows[np.array(places, np.int64)]

    def _pick(self, current: QModelIndex, _: QModelIndex) -> None:
        if current.isValid():
            self.picked.emit(int(self.model().rows[current.row()]))


def _pixmap(crop: npt.NDArray[np.uint8]) -> QPixmap:
    """A picture (h, w, 3) in a square of `SIDE`."""
    crop = np.ascontiguousarray(crop[..., :3])
    height, width = crop.shape[:2]
    image = QImage(crop.data, width, height, 3 * width, QImage.Format.Format_RGB888)
    scaled = image.scaled(
        SIDE, SIDE, Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation
    )
    return QPixmap.fromImage(scaled)


def _framed(plain: QPixmap, colour: QColor) -> QPixmap:
    framed = QPixmap(plain)
    painter = QPainter(framed)
    painter.setPen(QPen(colour, 6))
    painter.drawRect(framed.rect())
    painter.end()
    return framed
