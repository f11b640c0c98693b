"""Which model: one that is packaged, one used before, a file that is opened or dropped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtCore import QMimeData, QSignalBlocker, Qt, Signal
from qtpy.QtGui import QStandardItem, QStandardItemModel
from qtpy.QtWidgets import QComboBox, QFileDialog, QHBoxLayout, QSizePolicy, QWidget

from napari_beerlanet.core.checkpoint import packaged_models
from napari_beerlanet.ui.controls import button
from napari_beerlanet.ui.recent_models import recent_models, remember_model

SUFFIXES = (".safetensors", ".pt")
_KEY = int(Qt.ItemDataRole.UserRole)


class ModelChoice(QWidget):
    """A list of models and a button to open another. `chosen` tells the name or path.

    A file that is not there any more stays in the list, grey, and says so.
    """

    chosen = Signal(str)

    def __init__(self) -> None:
        super().__init__()
        self.list = QComboBox()
        self.list.setToolTip(
            "The model that finds the cells. Files (.safetensors) can also be dropped here."
        )
        self.list.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.list.setMinimumContentsLength(12)
        shrink = QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        self.list.setSizeAdjustPolicy(shrink)
        self.open = button("Open …", "Open a model from a file.", self.ask)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.list, 1)
        layout.addWidget(self.open)
        self._key = ""
        self.refresh()
        self.list.activated.connect(lambda *_: self.choose(self.list.currentData(_KEY)))

    @property
    def key(self) -> str:
        """Name of a packaged model or path of a file, "" if none is chosen."""
        return self._key

    def choose(self, key: str) -> None:
        """Make this the choice and tell of it."""
        self.show_choice(key)
        self.chosen.emit(key)

    def show_choice(self, key: str) -> None:
        """Make this the choice without a word."""
        self._key = key
        self.refresh()

    def used(self, key: str) -> None:
        """A model could be loaded: if it is a file, it is offered again."""
        if key not in packaged_models():
            remember_model(Path(key))
        self.refresh()

    def refresh(self) -> None:
        """Look again which models there are."""
        packaged = packaged_models()
        files = [str(path) for path in recent_models()]
        if self._key and self._key not in packaged + files:
            files.insert(0, self._key)
        model = QStandardItemModel(self.list)
        for name in packaged:
            model.appendRow(_item(name, f"{name} (packaged)", f"The packaged model “{name}”."))
        for path in files:
            model.appendRow(_file_item(Path(path), path))
        blocker = QSignalBlocker(self.list)
        self.list.setModel(model)
        keys = [model.item(row).data(_KEY) for row in range(model.rowCount())]
        self.list.setCurrentIndex(keys.index(self._key) if self._key in keys else -1)
        blocker.unblock()

    def ask(self) -> None:
        """Let the user open a file."""
        start = str(Path(self._key).parent) if Path(self._key).is_file() else ""
        kinds = "Models (*.safetensors *.pt)"
        path, _ = QFileDialog.getOpenFileName(self, "Open a model", start, kinds)
        if path:
            self.choose(path)


def _item(key: str, text: str, tooltip: str) -> QStandardItem:
    item = QStandardItem(text)
    item.setData(key, _KEY)
    item.setToolTip(tooltip)
    return item


def _file_item(path: Path, key: str) -> QStandardItem:
    try:
        there = path.is_file()
    except OSError:
        there = False
    if there:
        return _item(key, path.name, key)
    item = _item(key, f"{path.name} (not found)", f"{key} is not there any more.")
    item.setEnabled(False)
    return item


def dropped_model(mime: QMimeData | Any) -> str | None:
    """The path of a single model file that is dragged, None for anything else."""
    urls = mime.urls() if mime is not None and mime.hasUrls() else []
    path = urls[0].toLocalFile() if len(urls) == 1 else ""
    return path if path.lower().endswith(SUFFIXES) else None
