"""A look-in: what the model of a run that goes on finds in some of the fields to check with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import Qt
from qtpy.QtGui import QImage, QPixmap
from qtpy.QtWidgets import QHBoxLayout, QLabel, QVBoxLayout, QWidget

from napari_beerlanet.core.progress import Report, tell
from napari_beerlanet.ui.finetune_form import wrapped
from napari_beerlanet.ui.tasks import Task

_IMAGES = 3
_LONGEST = 320  # pixels of a picture
_ROOM, _WIDEST = 320, 160  # pixels for all pictures, and for one
_TIMES = 6  # looks in a run

Picture = tuple[str, npt.NDArray[np.uint8]]
"""A name and pixels (h, w, 3)."""


class LookIn(QWidget):
    """Small pictures with boxes; `look` makes new ones off the GUI thread."""

    def __init__(self, task: Task) -> None:
        super().__init__()
        self.task = task
        self.caption = wrapped()
        self.pictures = [QLabel() for _ in range(_IMAGES)]
        row = QHBoxLayout()
        row.setSpacing(4)
        for label in self.pictures:
            label.setAlignment(Qt.AlignmentFlag.AlignCenter)
            row.addWidget(label, 1)
        both = QVBoxLayout(self)
        both.setContentsMargins(0, 0, 0, 0)
        both.addWidget(self.caption)
        both.addLayout(row)
        self.clear()

    def clear(self) -> None:
        """Show nothing."""
        self.task.cancel()
        self.hide()

    def epoch(self, event: dict[str, Any], folder: Path, data: str) -> None:
        """After some of the epochs, look."""
        every = max(int(event.get("epochs") or 1) // _TIMES, 1)
        if (event["epoch"] % every == 0 or event["epoch"] == 1) and not self.task.running:
            self.look(folder, data)

    def look(self, folder: Path, data: str) -> None:
        """Look now."""
        self.task.start(lambda report: look_in(folder, data, report), self.put)

    def put(self, seen: tuple[int, list[Picture]]) -> None:
        """Show what `look_in` saw."""
        epoch, pictures = seen
        when = f"after epoch {epoch}"
        self.caption.setText(f"What it finds in fields to check with, {when}:")
        for label, picture in zip(self.pictures, [*pictures, None, None, None], strict=False):
            label.setVisible(picture is not None)
            if picture is not None:
                name, pixels = picture
                label.setPixmap(pixmap(pixels, min(_ROOM // len(pictures), _WIDEST)))
                label.setToolTip(f"{name}, {when}")
        self.setVisible(bool(pictures))


def look_in(folder: Path, data: str, report: Report | None = None) -> tuple[int, list[Picture]]:
    """The last epoch, and names and pictures of the first images to check with, boxes drawn in."""
    from napari_beerlanet.core.checkpoint import load_checkpoint
    from napari_beerlanet.core.dataset import read_dataset
    from napari_beerlanet.core.files import read_image
    from napari_beerlanet.core.overlay import draw_overlay

    tell(report, 0, _IMAGES)
    model = load_checkpoint(folder / "last.safetensors", device="cpu")
    pictures = []
    for number, item in enumerate(read_dataset(data).splits.get("val", [])[:_IMAGES]):
        tell(report, number, _IMAGES)
        pixels = read_image(item.image).pixels
        found = model.detect(pixels, densities=False)
        drawn = draw_overlay(pixels, found, model.info.get("colours"), longest=_LONGEST)
        pictures.append((item.image.name, drawn))
    return int(model.info["training"]["epochs"]), pictures


def pixmap(pixels: npt.NDArray[np.uint8], side: int) -> QPixmap:
    """A picture (h, w, 3) that fits a square."""
    height, width = pixels.shape[:2]
    whole = np.ascontiguousarray(pixels)
    image = QImage(whole.data, width, height, 3 * width, QImage.Format.Format_RGB888)
    return QPixmap.fromImage(image).scaled(
        side,
        side,
        Qt.AspectRatioMode.KeepAspectRatio,
        Qt.TransformationMode.SmoothTransformation,
    )
