"""Pictures of detections, cut out of the image in a thread when they are first looked at."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from qtpy.QtCore import QObject, QTimer, Signal
from qtpy.QtGui import QImage, QPixmap

from napari_beerlanet.core.progress import Report, tell
from napari_beerlanet.ui.tasks import Task

CutOut = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint8]]
"""From a box (4,) to its picture (h, w, 3) uint8; called in a thread."""

SIDE = 72  # pixels of a crop on the screen
_AT_ONCE = 400  # crops; about what two screens hold
_KEEP = 4000  # pixmaps: about 80 MB


class Crops(QObject):
    """Pictures of boxes (n, 4) by row; `ready` tells that more of those asked for are there."""

    ready = Signal()

    def __init__(
        self, boxes: npt.NDArray[np.float32], cut_out: CutOut, task: Task, parent: Any = None
    ) -> None:
        super().__init__(parent)
        self._boxes, self._cut_out, self._task = boxes, cut_out, task
        self._ready: OrderedDict[int, QPixmap] = OrderedDict()
        self._wanted: OrderedDict[int, None] = OrderedDict()
        self._failed: set[int] = set()
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(15)
        self._soon.timeout.connect(self._fetch)

    def __len__(self) -> int:
        """How many are kept."""
        return len(self._ready)

    def look(self, cut_out: CutOut) -> None:
        """Show something else of the same boxes, such as one stain."""
        self._cut_out = cut_out
        self._ready.clear()
        self._wanted.clear()
        self._failed.clear()
        self.ready.emit()

    def picture(self, row: int) -> QPixmap | None:
        """The picture of a row, None as long as it is not there."""
        plain = self._ready.get(row)
        if plain is not None:
            self._ready.move_to_end(row)
        elif row not in self._failed:
            self._wanted[row] = None
            self._wanted.move_to_end(row)
            if not self._soon.isActive():
                self._soon.start()
        return plain

    def _fetch(self) -> None:
        """Cut out what was asked for lately; what scrolled by before its turn is left out."""
        rows = list(self._wanted)[-_AT_ONCE:]
        if not rows:
            return
        boxes, cut_out = self._boxes[rows].copy(), self._cut_out

        def work(report: Report) -> list[npt.NDArray[np.uint8]]:
            crops = []
            for k, box in enumerate(boxes):
                tell(report, k, len(boxes), "cutting out")
                crops.append(_fitted(cut_out(box)))
            return crops

        def put(crops: list[npt.NDArray[np.uint8]]) -> None:
            if cut_out is self._cut_out:
                self._put(rows, crops)

        def failed(error: BaseException) -> None:
            self._failed.update(rows)
            self._wanted.clear()

        self._task.start(work, put, failed)

    def _put(self, rows: list[int], crops: list[npt.NDArray[np.uint8]]) -> None:
        for row, crop in zip(rows, crops, strict=True):
            self._ready[row] = _pixmap(crop)
            self._wanted.pop(row, None)
        while len(self._ready) > _KEEP:
            self._ready.popitem(last=False)
        while len(self._wanted) > _AT_ONCE:  # scrolled by
            self._wanted.popitem(last=False)
        if self._wanted:
            self._soon.start()
        self.ready.emit()


def _fitted(crop: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A picture (h, w, 3) so large that it fits into a square of `SIDE`."""
    height, width = crop.shape[:2]
    scale = SIDE / max(height, width)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    plain = Image.fromarray(np.ascontiguousarray(crop[..., :3]))
    return np.asarray(plain.resize(size, Image.Resampling.BILINEAR))


def _pixmap(crop: npt.NDArray[np.uint8]) -> QPixmap:
    height, width = crop.shape[:2]
    image = QImage(crop.tobytes(), width, height, 3 * width, QImage.Format.Format_RGB888)
    return QPixmap.fromImage(image)
