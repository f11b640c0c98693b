"""The spectra that the search starts from: the usual dyes, a checkpoint's, or those of a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from qtpy.QtCore import QSignalBlocker, Signal
from qtpy.QtWidgets import QComboBox, QFileDialog, QSizePolicy

from napari_beerlanet.core.checkpoint import learned_spectra, packaged_models
from napari_beerlanet.core.results import read_spectra
from napari_beerlanet.ui.notices import complain

_DEFAULT = "Usual dyes"
_CHECKPOINT, _FILE = "Checkpoint …", "Spectra file …"
_TOOLTIP = (
    "Where the search for stains starts. Usual dyes: haematoxylin, eosin, DAB, methylene blue and "
    "others. A checkpoint: the colours that a detector has learned. A spectra file: those that you "
    "saved from another slide."
)


class StartChoice(QComboBox):
    """`spectra` is (3, r), or None for the usual dyes; `changed` when others are there to use.

    Files are read off the GUI thread. One that cannot be used is told, and the choice stays.
    """

    changed = Signal()

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self.setToolTip(_TOOLTIP)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumContentsLength(12)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.task = panel.task()
        self.spectra: npt.NDArray[np.float64] | None = None
        self._chosen = _DEFAULT
        self._read: dict[str, npt.NDArray[np.float64] | None] = {_DEFAULT: None}
        self._models = {f"Model “{name}”": name for name in packaged_models()}
        self.addItems([_DEFAULT, *self._models, _CHECKPOINT, _FILE])
        self.activated.connect(self._activated)

    @property
    def label(self) -> str:
        """What is chosen."""
        return self._chosen

    def use_file(self, path: str) -> None:
        """Start from the spectra of a file: of ours, or a checkpoint."""
        reader = read_spectra if Path(path).suffix.lower() == ".json" else learned_spectra
        self._load(Path(path).name, path, reader)

    def use_default(self) -> None:
        """Start from the usual dyes."""
        self._take(_DEFAULT, None)

    def _activated(self, index: int) -> None:
        text = self.itemText(index)
        if text in self._read:
            self._take(text, self._read[text])
        elif text in self._models:
            self._load(text, self._models[text], learned_spectra)
        else:
            self._select(self._chosen)
            kind = "Checkpoints (*.safetensors *.pt)" if text == _CHECKPOINT else "Spectra (*.json)"
            path, _ = QFileDialog.getOpenFileName(self, text.removesuffix(" …"), "", kind)
            if path:
                self.use_file(path)

    def _load(self, label: str, what: str, reader: Any) -> None:
        def done(spectra: npt.NDArray[np.float64]) -> None:
            if label not in self._models and self.findText(label) < 0:
                self.insertItem(self.count() - 2, label)
            self._take(label, spectra)

        def failed(error: BaseException) -> None:
            self._select(self._chosen)
            complain(error)

        self.task.start(lambda report: reader(what), done, failed)

    def _take(self, label: str, spectra: npt.NDArray[np.float64] | None) -> None:
        self._read[label] = self.spectra = spectra
        self._chosen = label
        self._select(label)
        self.changed.emit()

    def _select(self, label: str) -> None:
        blocker = QSignalBlocker(self)
        self.setCurrentIndex(self.findText(label))
        blocker.unblock()
