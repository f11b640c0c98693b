"""Thumbnails of detections, read in a thread when they first become visible.

They show the image's colours, or the density of one stain.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from qtpy.QtCore import QObject, Signal
from qtpy.QtGui import QPixmap
from superqt.utils import qthrottled

from napari_beerlanet.core.boxes.detections import CHANNEL_MEAN_COLUMN, Detections
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.images.rgb import check_rgb, fill_transparent, to_uint8
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.ui.common.controls import rgb_pixmap
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.viewer.planes import Plane, SliceWindow

if TYPE_CHECKING:
    from napari_beerlanet.core.detection.detector import Detector

CropReader = Callable[[npt.NDArray[np.float32]], npt.NDArray[np.uint8]]
"""Reads the picture (h, w, 3) uint8 of a box (4,); called in a thread."""

CROP_SIDE = 72  # screen pixels of a thumbnail
_MAX_CROPS_PER_TASK = 400  # crops; about what two screens hold
_MAX_CACHED_CROPS = 4000  # pixmaps: about 80 MB
_REQUEST_INTERVAL_MS = 15


IMAGE_COLOURS = "image"
"""The style that shows the image itself."""

_CONTEXT_FRACTION = 0.25  # of a box's longer side, around it in a crop
_MAX_FIT_PIXELS = 4e6  # pixels of the level that stains are fitted to


class CropLoader(QObject):
    """Thumbnails of boxes (n, 4) by row; `ready`: more of the requested ones are loaded."""

    ready = Signal()

    def __init__(
        self,
        boxes: npt.NDArray[np.float32],
        read_crop: CropReader,
        task: Task,
        parent: QObject | None = None,
    ) -> None:
        super().__init__(parent)
        self._boxes, self._read_crop, self._task = boxes, read_crop, task
        self._cached: OrderedDict[int, QPixmap] = OrderedDict()
        self._requested: OrderedDict[int, None] = OrderedDict()
        self._failed: set[int] = set()
        self._load_soon = qthrottled(
            self._load_requested, timeout=_REQUEST_INTERVAL_MS, leading=False, parent=self
        )

    def __len__(self) -> int:
        """The number of cached thumbnails."""
        return len(self._cached)

    def set_reader(self, read_crop: CropReader) -> None:
        """Show the same boxes in another style, such as one stain."""
        self._read_crop = read_crop
        self._cached.clear()
        self._requested.clear()
        self._failed.clear()
        self.ready.emit()

    def picture(self, row: int) -> QPixmap | None:
        """The thumbnail of a row, None until it is loaded."""
        pixmap = self._cached.get(row)
        if pixmap is not None:
            self._cached.move_to_end(row)
        elif row not in self._failed:
            self._requested[row] = None
            self._requested.move_to_end(row)
            self._load_soon()
        return pixmap

    def _load_requested(self) -> None:
        """Load the latest requests; what was scrolled past meanwhile is left out."""
        rows = list(self._requested)[-_MAX_CROPS_PER_TASK:]
        if not rows:
            return
        boxes, read_crop = self._boxes[rows].copy(), self._read_crop

        def work(report: Report) -> list[npt.NDArray[np.uint8]]:
            crops = []
            for k, box in enumerate(boxes):
                report_progress(report, k, len(boxes), "loading thumbnails")
                crops.append(_fit_to_side(read_crop(box)))
            return crops

        def finished(crops: list[npt.NDArray[np.uint8]]) -> None:
            if read_crop is self._read_crop:
                self._store(rows, crops)

        def failed(error: BaseException) -> None:
            self._failed.update(rows)
            self._requested.clear()

        self._task.start(work, finished, failed)

    def _store(self, rows: list[int], crops: list[npt.NDArray[np.uint8]]) -> None:
        for row, crop in zip(rows, crops, strict=True):
            self._cached[row] = rgb_pixmap(crop)
            self._requested.pop(row, None)
        while len(self._cached) > _MAX_CACHED_CROPS:
            self._cached.popitem(last=False)
        while len(self._requested) > _MAX_CROPS_PER_TASK:  # scrolled past
            self._requested.popitem(last=False)
        if self._requested:
            self._load_soon()
        self.ready.emit()


def _fit_to_side(crop: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    """A picture (h, w, 3) scaled to fit a square of `CROP_SIDE`."""
    height, width = crop.shape[:2]
    scale = CROP_SIDE / max(height, width)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    image = Image.fromarray(np.ascontiguousarray(crop[..., :3]))
    return np.asarray(image.resize(size, Image.Resampling.BILINEAR))


class CropStyles:
    """How thumbnails of one plane can be shown. Holds pixels and a model, no layers or widgets.

    `names` are the styles: `IMAGE_COLOURS`, and each model channel that the detections have a
    column of, or else each stain of the decomposition, the largest share first. Model channels
    are painted by the model, if there is one.
    """

    def __init__(
        self,
        plane: Plane,
        detections: Detections,
        model: Detector | None = None,
        decomposition: Decomposition | None = None,
    ) -> None:
        self.plane = plane
        self._model, self._decomposition = model, None if model is not None else decomposition
        self._lock = threading.Lock()
        self._density_limit = 0.0
        self._components = {
            match[1]: int(match[2]) - 1
            for name, values in detections.columns.items()
            if (match := CHANNEL_MEAN_COLUMN.fullmatch(name)) and np.any(values > 0)
        }
        if not self._components and decomposition is not None:
            self._model, self._decomposition = None, decomposition
            self._components = {decomposition.labels[i]: i for i in decomposition.order}
        self.names = [IMAGE_COLOURS, *self._components]

    def crop_reader(self, style: str = IMAGE_COLOURS) -> CropReader:
        """A function from a box to its picture in that style, for a thread."""
        paint: Callable[[npt.NDArray[Any]], npt.NDArray[np.uint8]] = _paint_rgb
        if style != IMAGE_COLOURS:
            component = self._components[style]
            paint = lambda pixels: self._paint_stain(pixels, component)  # noqa: E731
        plane = self.plane
        return lambda box: paint(plane.read(crop_window(box, plane.shape)))

    def _paint_stain(self, pixels: npt.NDArray[Any], component: int) -> npt.NDArray[np.uint8]:
        """(h, w, 3): from white, where there is no stain, to the stain's own colour."""
        d = self._fit()
        if component >= len(d.active):
            return np.full((*pixels.shape[:2], 3), 255, np.uint8)
        density = d.densities_of(pixels)[component, ..., None]
        full = 255.0 - d.colours[component].astype(np.float32)
        return np.asarray(255 - full * np.clip(density / self._density_limit, 0, 1), np.uint8)

    def _fit(self) -> Decomposition:
        """The decomposition, computed at the first use."""
        from napari_beerlanet.ui.stains.fitting import shared_contrast_limit

        with self._lock:
            if self._decomposition is None:
                pixels = self.plane.read(level=self.plane.level_for(_MAX_FIT_PIXELS))
                fit = self._model.decompose if self._model is not None else _decompose_converged
                self._decomposition = fit(pixels)
            if not self._density_limit:
                self._density_limit = shared_contrast_limit(self._decomposition)
            return self._decomposition


def crop_window(box: npt.NDArray[Any], shape: tuple[int, int]) -> SliceWindow:
    """Rows and columns of a square around a box (4,), with some context, within the image."""
    height, width = shape
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    half = max((0.5 + _CONTEXT_FRACTION) * max(box[2] - box[0], box[3] - box[1]), 4)
    top, left = (int(min(max(v - half, 0), n - 1)) for v, n in ((y, height), (x, width)))
    bottom, right = (int(min(max(v + half, 0), n - 1)) + 1 for v, n in ((y, height), (x, width)))
    return slice(top, max(bottom, top + 1)), slice(left, max(right, left + 1))


def _paint_rgb(pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return fill_transparent(to_uint8(check_rgb(pixels).pixels))


def _decompose_converged(pixels: npt.NDArray[Any]) -> Decomposition:
    return decompose(pixels, iterations="converge")
