"""What is trained, and what with: the choices of project and of the model to begin with."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtpy.QtCore import QSignalBlocker, Signal
from qtpy.QtWidgets import QComboBox, QFileDialog, QHBoxLayout, QSizePolicy, QWidget

from napari_beerlanet.core.checkpoint import packaged_models
from napari_beerlanet.core.runs import MODELS, list_runs
from napari_beerlanet.ui.controls import button
from napari_beerlanet.ui.finetune_recent import recent_projects, remember_project


class _Choice(QWidget):
    """A list that grows with the dock, and a button beside it."""

    def __init__(
        self, tooltip: str, label: str, button_tip: str, open_: Callable[[], None]
    ) -> None:
        super().__init__()
        self.list = QComboBox()
        self.list.setToolTip(tooltip)
        self.list.setMinimumContentsLength(6)
        self.list.setSizeAdjustPolicy(
            QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        )
        self.list.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.open = button(label, button_tip, open_)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.list, 1)
        layout.addWidget(self.open)


class ProjectChoice(_Choice):
    """Projects that were open lately, and a button for another; `chosen` tells a folder or None."""

    chosen = Signal(object)

    def __init__(self) -> None:
        tooltip = "The project to train with: a folder with a data.yaml, as “Annotate” makes it."
        super().__init__(tooltip, "Open …", "Choose the folder of another project.", self._ask)
        self._paths: list[Path] = []
        self._fill(recent_projects(), None)
        self.list.activated.connect(lambda index: self.choose(self._paths[index]))

    @property
    def project(self) -> Path | None:
        """The chosen folder."""
        index = self.list.currentIndex()
        return self._paths[index] if 0 <= index < len(self._paths) else None

    def recent(self) -> list[Path]:
        """Those that are offered and are there now."""
        return [path for path in self._paths if (path / "data.yaml").is_file()]

    def choose(self, path: str | Path) -> None:
        """Choose a folder, or the data.yaml in it."""
        folder = Path(path).absolute()
        folder = folder.parent if folder.suffix in (".yaml", ".yml") else folder
        if (folder / "data.yaml").is_file():
            remember_project(folder)
        self._fill([folder, *(one for one in self._paths if one != folder)], folder)
        self.chosen.emit(folder)

    def _fill(self, paths: list[Path], current: Path | None) -> None:
        blocker = QSignalBlocker(self.list)
        self._paths = paths
        self.list.clear()
        for path in paths:
            self.list.addItem(path.name or str(path))
            self.list.setItemData(self.list.count() - 1, str(path), 3)  # Qt.ToolTipRole
        self.list.setCurrentIndex(paths.index(current) if current in paths else -1)
        self.list.setPlaceholderText("no project yet")
        blocker.unblock()

    def _ask(self) -> None:
        start = str(self.project or Path.home())
        found = QFileDialog.getExistingDirectory(self, "The folder of a project", start)
        if found:
            self.choose(found)


class ModelChoice(_Choice):
    """Models to begin with: the loaded one, packaged ones, kept ones, and the best of runs.

    `given` tells a path or a name for `load_checkpoint`, or the loaded `Detector` if it is neither.
    """

    changed = Signal()

    def __init__(self) -> None:
        tooltip = "The model to begin with. It is not changed: training makes a new one."
        super().__init__(tooltip, "File …", "Begin with a model from a file.", self._ask)
        self._given: list[Any] = []
        self._file: Path | None = None
        self.list.currentIndexChanged.connect(lambda _: self.changed.emit())

    @property
    def given(self) -> Any:
        """What is chosen, None where there is nothing."""
        index = self.list.currentIndex()
        return self._given[index] if 0 <= index < len(self._given) else None

    def fill(self, loaded: Any = None, key: Any = None, project: Path | None = None) -> None:
        """Offer what there is now; what was chosen stays chosen as long as it is there."""
        before = self.given
        offered: list[tuple[str, Any]] = []
        if loaded is not None:
            name = loaded.info.get("name") or "without a name"
            offered.append((f"{name} (loaded)", _source(loaded, key)))
        offered += [(f"{name} (packaged)", name) for name in packaged_models()]
        if project is not None:
            offered += [(path.stem + " (kept)", path) for path in _kept(project)]
            offered += [(f"best of {run.name}", run.best) for run in list_runs(project) if run.best]
        if self._file is not None:
            offered.append((self._file.name, self._file))
        blocker = QSignalBlocker(self.list)
        self._given = [given for _, given in offered]
        self.list.clear()
        self.list.addItems([text for text, _ in offered])
        same = [k for k, given in enumerate(self._given) if given is before or given == before]
        self.list.setCurrentIndex(same[0] if same and before is not None else 0)
        blocker.unblock()
        if self.given is not before:
            self.changed.emit()

    def choose_file(self, path: str | Path) -> None:
        """Begin with a file."""
        self._file = Path(path).absolute()
        if self._file not in self._given:
            self._given.append(self._file)
            self.list.addItem(self._file.name)
        self.list.setCurrentIndex(self._given.index(self._file))

    def _ask(self) -> None:
        kinds = "Models (*.safetensors *.pt)"
        found, _ = QFileDialog.getOpenFileName(self, "A model to begin with", "", kinds)
        if found:
            self.choose_file(found)


def _kept(project: Path) -> list[Path]:
    return sorted((project / MODELS).glob("[!.]*.safetensors"))


def _source(loaded: Any, key: Any) -> Any:
    """Where a loaded model can be loaded from again, or the model itself."""
    if isinstance(key, (str, Path)) and (str(key) in packaged_models() or Path(key).is_file()):
        return key
    return loaded
