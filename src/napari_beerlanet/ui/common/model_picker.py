"""Pick a model: packaged, recently used, opened from a file or dropped."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from qtpy.QtCore import QMimeData, Qt, Signal
from qtpy.QtGui import QStandardItem, QStandardItemModel
from qtpy.QtWidgets import QFileDialog, QHBoxLayout, QWidget
from superqt.utils import signals_blocked

from napari_beerlanet.core.checkpoints.checkpoint import (
    CheckpointError,
    model_kind,
    packaged_models,
    read_info,
)
from napari_beerlanet.core.checkpoints.info import CLASSIFIER, DETECTOR
from napari_beerlanet.ui.common.controls import button, combo_box, plain_tooltip
from napari_beerlanet.ui.common.panel import open_panel
from napari_beerlanet.ui.common.recent import add_recent_model, recent_models

MODEL_SUFFIXES = (".safetensors", ".pt")
PANELS = {DETECTOR: "Find cells", CLASSIFIER: "Classify cells"}
"""The panel, by its title, that takes models of a kind."""
_WHAT_IT_DOES = {DETECTOR: "detects", CLASSIFIER: "classifies"}
_KEY_ROLE = int(Qt.ItemDataRole.UserRole)
_NO_LAYERS = [(None,)]  # napari's word for a file that was read and has none


class ModelPicker(QWidget):
    """A list of models and a button to open a file. `chosen` is emitted with the name or path.

    `kind`: "detector" or "classifier"; the others are not offered. A file that does not exist any
    more stays in the list, disabled, and says so.
    """

    chosen = Signal(str)

    def __init__(self, kind: str = DETECTOR) -> None:
        super().__init__()
        self.kind = kind
        self.list = combo_box(
            f"The model that {_WHAT_IT_DOES[kind]} the cells. Model files (.safetensors) can also "
            "be dropped here.",
            12,
            expanding=True,
        )
        self.open = button("Open …", "Open a model from a file.", self.open_dialog)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.list, 1)
        layout.addWidget(self.open)
        self._key = ""
        self.refresh()
        self.list.activated.connect(lambda *_: self.choose(self.list.currentData(_KEY_ROLE)))

    @property
    def key(self) -> str:
        """Name of a packaged model or path of a file, "" if none is chosen."""
        return self._key

    def choose(self, key: str) -> None:
        """Choose a model, and emit `chosen`."""
        self.set_key(key)
        self.chosen.emit(key)

    def set_key(self, key: str) -> None:
        """Choose a model without a signal."""
        self._key = key
        self.refresh()

    def add_recent(self, key: str) -> None:
        """A model was loaded: if it is a file, it is offered again."""
        if key not in packaged_models():
            add_recent_model(Path(key), self.kind)
        self.refresh()

    def refresh(self) -> None:
        """List the models that there are now."""
        packaged = packaged_models(self.kind)
        files = [str(path) for path in recent_models(self.kind)]
        if self._key and self._key not in packaged + files:
            files.insert(0, self._key)
        model = QStandardItemModel(self.list)
        for name in packaged:
            model.appendRow(_item(name, f"{name} (packaged)", f"The packaged model “{name}”."))
        for path in files:
            model.appendRow(_file_item(Path(path), path))
        keys = [*packaged, *files]
        with signals_blocked(self.list):
            self.list.setModel(model)
            self.list.setCurrentIndex(keys.index(self._key) if self._key in keys else -1)

    def open_dialog(self) -> None:
        """Let the user open a file."""
        start = str(Path(self._key).parent) if Path(self._key).is_file() else ""
        kinds = (
            "Models (*.safetensors)" if self.kind == CLASSIFIER else "Models (*.safetensors *.pt)"
        )
        path, _ = QFileDialog.getOpenFileName(self, "Open a model", start, kinds)
        if path:
            self.choose(path)


def _item(key: str, text: str, tooltip: str) -> QStandardItem:
    item = QStandardItem(text)
    item.setData(key, _KEY_ROLE)
    item.setToolTip(plain_tooltip(tooltip))
    return item


def _file_item(path: Path, key: str) -> QStandardItem:
    try:
        exists = path.is_file()
    except OSError:
        exists = False
    if exists:
        return _item(key, path.name, key)
    item = _item(key, f"{path.name} (not found)", f"{key} does not exist any more.")
    item.setEnabled(False)
    return item


def dropped_model(mime: QMimeData | None) -> str | None:
    """The path of a single dragged model file, None for anything else."""
    urls = mime.urls() if mime is not None and mime.hasUrls() else []
    path = urls[0].toLocalFile() if len(urls) == 1 else ""
    return path if path.lower().endswith(MODEL_SUFFIXES) else None


def get_reader(path: str | list[str]) -> Callable[[Any], list[Any]] | None:
    """napari's reader for one model file, which is opened in its panel; None for other files."""
    one = path if isinstance(path, str) else path[0] if len(path) == 1 else ""
    return _open_in_panel if one.lower().endswith(MODEL_SUFFIXES) else None


def _open_in_panel(path: str | list[str]) -> list[Any]:
    import napari

    viewer = napari.current_viewer()
    if viewer is not None:
        name = str(path if isinstance(path, str) else path[0])
        open_panel(viewer, _panel_for(name)).choose_model(name)
    return _NO_LAYERS


def _panel_for(path: str) -> str:
    """The panel that takes a model; “Find cells” says what is wrong with a file."""
    kind = DETECTOR
    with suppress(CheckpointError):
        kind = model_kind(read_info(path)) if not path.lower().endswith(".pt") else DETECTOR
    return PANELS[kind]
