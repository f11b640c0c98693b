"""The review's tab of crops, and what they show: the image, or one of its stains."""

from __future__ import annotations

from typing import Any

from qtpy.QtWidgets import QComboBox, QVBoxLayout, QWidget

from napari_beerlanet.core.reviewing import Review
from napari_beerlanet.ui.controls import form
from napari_beerlanet.ui.crop_looks import COLOURS, CropLooks
from napari_beerlanet.ui.crops import Crops
from napari_beerlanet.ui.crops_gallery import CropsGallery


class ReviewGallery(QWidget):
    """A gallery under a choice of looks."""

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self.gallery = CropsGallery()
        self.look = QComboBox()
        self.look.setToolTip(
            "What crops show: the image, or how much of one stain there is, as in the table's "
            "columns of that name."
        )
        self.look.currentIndexChanged.connect(self._look)
        self._task = panel.task()
        self._looks: CropLooks | None = None
        self._crops: Crops | None = None
        lines = form()
        lines.addRow("Crops show", self.look)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 4, 0, 0)
        layout.addLayout(lines)
        layout.addWidget(self.gallery, 1)

    def use(self, review: Review | None, looks: CropLooks | None) -> None:
        """Show other detections; the look stays, if they have it."""
        old, wanted = self._crops, self.look.currentText()
        self._looks, self._crops = looks, None
        names = looks.names if looks is not None else [COLOURS]
        was = self.look.blockSignals(True)
        self.look.clear()
        self.look.addItems(names)
        self.look.setCurrentIndex(names.index(wanted) if wanted in names else 0)
        self.look.blockSignals(was)
        if review is not None and looks is not None:
            cut_out = looks.cut_out(self.look.currentText())
            self._crops = Crops(review.found.xyxy, cut_out, self._task, self)
        self.gallery.use(review, self._crops)
        if old is not None:
            old.deleteLater()

    def _look(self) -> None:
        if self._looks is not None and self._crops is not None:
            self._crops.look(self._looks.cut_out(self.look.currentText()))
