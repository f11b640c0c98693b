"""Predictions of a run's latest model on a few validation images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import Qt
from qtpy.QtGui import QIcon, QPixmap
from qtpy.QtWidgets import QDialog, QHBoxLayout, QLabel, QToolButton, QVBoxLayout, QWidget

from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.ui.common.controls import not_none, rgb_pixmap, wrapping_label
from napari_beerlanet.ui.common.tasks import Task

_IMAGE_COUNT = 3
_MAX_PICTURE_SIDE = 1024  # pixels of a picture
_TOTAL_WIDTH, _MAX_PICTURE_WIDTH = 320, 160  # pixels on the screen, for all pictures and for one
_PREVIEWS_PER_RUN = 6
_SCREEN_FRACTION = 0.8  # that an enlarged picture may take
_FIT = Qt.AspectRatioMode.KeepAspectRatio, Qt.TransformationMode.SmoothTransformation

Picture = tuple[str, npt.NDArray[np.uint8]]
"""A name and pixels (h, w, 3)."""


class PictureButton(QToolButton):
    """A thumbnail that shows its picture in a window of its own when it is clicked."""

    def __init__(self) -> None:
        super().__init__()
        self.setAutoRaise(True)
        self.setCursor(Qt.CursorShape.PointingHandCursor)
        self.dialog: QDialog | None = None
        self._title, self._pixmap = "", QPixmap()
        self.clicked.connect(self.enlarge)

    def show_picture(self, title: str, pixels: npt.NDArray[np.uint8], width: int) -> None:
        """Show a picture (h, w, 3) so wide."""
        self._title, self._pixmap = title, rgb_pixmap(pixels)
        thumbnail = self._pixmap.scaled(width, width, *_FIT)
        self.setIcon(QIcon(thumbnail))
        self.setIconSize(thumbnail.size())
        self.setToolTip(f"{title}. Click to enlarge.")

    def enlarge(self) -> None:
        """Show the picture as large as it is, or as the screen allows."""
        screen = not_none(self.screen()).availableSize() * _SCREEN_FRACTION
        large = self._pixmap.scaled(screen, *_FIT)
        self.dialog = QDialog(self.window())
        self.dialog.setAttribute(Qt.WidgetAttribute.WA_DeleteOnClose)
        self.dialog.destroyed.connect(self._dialog_closed)
        self.dialog.setWindowTitle(self._title)
        picture = QLabel()
        picture.setPixmap(large)
        layout = QVBoxLayout(self.dialog)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(picture)
        self.dialog.show()

    def _dialog_closed(self) -> None:
        self.dialog = None


class PredictionPreview(QWidget):
    """Thumbnails of validation images with predicted boxes, made off the GUI thread."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.caption = wrapping_label()
        self.pictures = [PictureButton() for _ in range(_IMAGE_COUNT)]
        row = QHBoxLayout()
        row.setSpacing(4)
        for picture in self.pictures:
            row.addWidget(picture, 1)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.caption)
        layout.addLayout(row)
        self.clear()

    def clear(self) -> None:
        """Show nothing."""
        self._epoch: int | None = None  # of the last prediction
        self.task.cancel()
        self.hide()

    def on_epoch(self, event: dict[str, Any], folder: Path, data: str) -> None:
        """Predict again after some of the epochs, unless a prediction is still running."""
        every = max(int(event.get("epochs") or 1) // _PREVIEWS_PER_RUN, 1)
        due = self._epoch is None or event["epoch"] >= self._epoch + every
        if due and not self.task.running:
            self._epoch = int(event["epoch"])
            self.predict(folder, data)

    def predict(self, folder: Path, data: str) -> None:
        """Predict now, with the last checkpoint of a run on the validation images of `data`."""
        self.task.start(
            lambda report: predict_validation_images(folder, data, report),
            lambda predicted: self.show_pictures(*predicted),
        )

    def show_pictures(self, epoch: int, pictures: list[Picture]) -> None:
        """Show what `predict_validation_images` returned."""
        self.caption.setText(
            f"Predictions on validation images after epoch {epoch} (click to enlarge):"
        )
        padded = [*pictures, *[None] * _IMAGE_COUNT]
        for thumbnail, picture in zip(self.pictures, padded, strict=False):
            thumbnail.setVisible(picture is not None)
            if picture is not None:
                name, pixels = picture
                width = min(_TOTAL_WIDTH // len(pictures), _MAX_PICTURE_WIDTH)
                thumbnail.show_picture(f"{name}, after epoch {epoch}", pixels, width)
        self.setVisible(bool(pictures))


def predict_validation_images(
    folder: Path, data: str, report: Report | None = None
) -> tuple[int, list[Picture]]:
    """The last epoch, and the first validation images with the predicted boxes drawn in."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
    from napari_beerlanet.core.figures.overlay import draw_overlay
    from napari_beerlanet.core.formats.dataset import read_dataset
    from napari_beerlanet.core.images.files import read_image

    report_progress(report, 0, _IMAGE_COUNT)
    model = load_checkpoint(folder / "last.safetensors", device="cpu")
    pictures = []
    for number, item in enumerate(read_dataset(data).splits.get("val", [])[:_IMAGE_COUNT]):
        report_progress(report, number, _IMAGE_COUNT)
        pixels = read_image(item.image).pixels
        detections = model.detect(pixels, densities=False)
        colours = model.info.get("colours")
        overlay = draw_overlay(pixels, detections, colours, max_side=_MAX_PICTURE_SIDE)
        pictures.append((item.image.name, overlay))
    return int(model.info["training"]["epochs"]), pictures
