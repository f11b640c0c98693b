"""Choose the project (create one, open one, or reopen a recent one), and see what is in it."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count
from pathlib import Path

from qtpy.QtCore import QSignalBlocker, Qt, Signal
from qtpy.QtWidgets import (
    QComboBox,
    QFileDialog,
    QListWidget,
    QSizePolicy,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.locking import LockedError
from napari_beerlanet.core.common.messages import count_of, error_message
from napari_beerlanet.core.common.progress import Cancelled, Progress, Report
from napari_beerlanet.core.project.files import CropRecord
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.project.split import TRAIN, VAL
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    button,
    hint,
    not_none,
    plain_tooltip,
    row,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.recent import recent_projects
from napari_beerlanet.ui.common.session import (
    get_project_store,
    last_open_project,
)

_NO_PROJECT = "No project"
_IMAGE_LIST_HEIGHT_PX = 140

SPLIT_NAMES = {TRAIN: "training", VAL: "validation"}
"""What a person calls the splits."""


class ProjectBar(QWidget):
    """The viewer's project, and how to create or open another.

    `classes` returns the class names of a new project.
    """

    def __init__(self, panel: Panel, classes: Callable[[], list[str]]) -> None:
        super().__init__()
        self.store = get_project_store(panel.viewer)
        self.task = panel.task()
        self._classes = classes
        self._locked_path: Path | None = None
        self._paths: list[Path | None] = []
        self._build()
        panel.connect_event(self.store.changed, self._changed)
        panel.connect_event(self.store.updated, self.refresh)
        self.refresh()

    def _build(self) -> None:
        self.choice = QComboBox()
        self.choice.setToolTip("The folder of annotations, training crops and trained models.")
        self.choice.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.choice.setSizeAdjustPolicy(
            QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        )
        self.choice.setMinimumContentsLength(10)
        self.choice.activated.connect(self._project_chosen)
        self.new_button = button(
            "New …", "Create a project in a new folder.", self.choose_new_folder
        )
        self.open_button = button(
            "Open …", "Open the folder of an existing project.", self.choose_folder
        )
        self.read_only_button = button(
            "Open read-only",
            "Open the project although another viewer is using it; nothing can be changed here.",
            self.open_read_only,
        )
        self.status = hint()
        self.read_only_button.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(row(self.choice, self.new_button, self.open_button, stretch=0))
        layout.addWidget(self.status)
        layout.addWidget(self.read_only_button)

    # --- opening ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Reopen the project that was open when the viewer was closed, if there was one."""
        path = last_open_project()
        if path is not None and self.store.project is None and not self.task.running:
            self.open(path)

    def open(self, path: Path | str, read_only: bool = False) -> None:
        """Open a project off the GUI thread."""
        if self._is_open(path) and not (self.store.project and self.store.project.read_only):
            return
        self._start(Path(path), lambda: Project.open(path, read_only=read_only))

    def create_project(self, path: Path | str) -> None:
        """Create a project with the present classes."""
        names = self._classes()
        if not names:
            problem = "A project needs classes: load a model, or type their names."
            self._set_status(notify_error(problem), problem=True)
            return
        self._start(Path(path), lambda: Project.create(path, names))

    def open_read_only(self) -> None:
        """Open the project that another viewer is using."""
        if self._locked_path is not None:
            self.open(self._locked_path, read_only=True)

    def choose_folder(self) -> None:
        """Let the user choose a project's folder."""
        path = QFileDialog.getExistingDirectory(self, "Open a project folder")
        if path:
            self.open(path)

    def choose_new_folder(self) -> None:
        """Let the user choose a new folder."""
        path, _ = QFileDialog.getSaveFileName(
            self, "Folder of the new project", str(_new_folder(Path.home()))
        )
        if path:
            self.create_project(path)

    def _start(self, path: Path, open_: Callable[[], Project]) -> None:
        self._locked_path = None
        self.read_only_button.hide()
        self._set_status(f"Opening {path.name} …")
        self.task.start(
            lambda report: _close_if_cancelled(open_(), report),
            self.store.put,
            lambda error: self._failed(path, error),
        )

    def _failed(self, path: Path, error: BaseException) -> None:
        self.refresh()
        self._set_status(notify_error(error_message(error)), problem=True)
        if isinstance(error, LockedError):
            self._locked_path = path
            self.read_only_button.show()

    def _is_open(self, path: Path | str) -> bool:
        project = self.store.project
        return project is not None and project.path == Path(path).absolute()

    # --- showing ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Update the project and the list of recent ones."""
        project = self.store.project
        recent = [path for path in recent_projects() if not (project and path == project.path)]
        self._paths = [project.path if project else None, *recent]
        if project:
            self._paths.append(None)
        blocker = QSignalBlocker(self.choice)
        self.choice.clear()
        for path in self._paths:
            self.choice.addItem(path.name if path else _NO_PROJECT)
            last, tip = self.choice.count() - 1, Qt.ItemDataRole.ToolTipRole
            self.choice.setItemData(last, plain_tooltip(str(path or "")), tip)
        self.choice.setCurrentIndex(0)
        blocker.unblock()
        self._set_status(
            _project_status(project), problem=bool(project and (project.read_only or project.notes))
        )

    def _changed(self, project: Project | None) -> None:
        self.read_only_button.hide()
        self.refresh()

    def _project_chosen(self, index: int) -> None:
        path = self._paths[index]
        if path is None:
            self.store.put(None)
        else:
            self.open(path)

    def _set_status(self, text: str, problem: bool = False) -> None:
        """Show a status, muted unless there is a problem."""
        self.status.setText(text)
        self.status.set_kind("hint" if not problem else "")


class ProjectImages(CollapsibleGroup):
    """The images that a project trains on; hidden while there are none.

    `remove_requested` is emitted with the ids and the names of the selected ones.
    """

    remove_requested = Signal(list, list)

    def __init__(self) -> None:
        super().__init__("Images in the training data")
        self.list = QListWidget()
        self.list.setToolTip("Images of the project with their split, training crops and boxes.")
        self.list.setSelectionMode(QListWidget.SelectionMode.ExtendedSelection)
        self.list.setMaximumHeight(_IMAGE_LIST_HEIGHT_PX)
        self.remove_button = button(
            "Remove …",
            "Take the selected images out of the training data. Their annotations are kept.",
            self._request_removal,
        )
        self._ids: list[str] = []
        self._project: Project | None = None
        self.list.itemSelectionChanged.connect(self._update_button)
        self.body.addWidget(self.list)
        self.body.addWidget(row(self.remove_button))
        self.refresh(None)

    def refresh(self, project: Project | None, busy: bool = False) -> None:
        """List the images of the project; the selection stays."""
        selected = set(self.selected_ids())
        by_image: dict[str, list[CropRecord]] = {}
        for crop in project.crops if project is not None else ():
            by_image.setdefault(crop.source, []).append(crop)
        self._ids, self._project = list(by_image), project
        with signals_blocked(self.list):
            self.list.clear()
            for name, crops in by_image.items():
                self.list.addItem(_describe_image(crops))
                not_none(self.list.item(self.list.count() - 1)).setSelected(name in selected)
        self.header.setText(f"{count_of(len(self._ids), 'image')} in the training data")
        self.setVisible(bool(self._ids))
        self._update_button(busy)

    def selected_ids(self) -> list[str]:
        """The project's ids of the selected images."""
        return [self._ids[self.list.row(item)] for item in self.list.selectedItems()]

    def _update_button(self, busy: bool = False) -> None:
        writable = self._project is not None and not self._project.read_only and not busy
        self.remove_button.setEnabled(writable and bool(self.list.selectedItems()))

    def _request_removal(self) -> None:
        ids = self.selected_ids()
        crops = [] if self._project is None else self._project.crops
        names = {crop.source: crop.source_name for crop in crops}
        self.remove_requested.emit(ids, [names.get(one, one) for one in ids])


def _describe_image(crops: list[CropRecord]) -> str:
    splits = " and ".join(sorted({SPLIT_NAMES[crop.split] for crop in crops}))
    boxes = count_of(sum(crop.boxes for crop in crops), "box", "boxes")
    plane = f" [{crops[0].plane}]" if crops[0].plane else ""
    return f"{crops[0].source_name}{plane}: {splits}, {count_of(len(crops), 'crop')}, {boxes}"


def _close_if_cancelled(project: Project, report: Report) -> Project:
    """The project; closed again if the panel is gone meanwhile or another one was requested."""
    try:
        report(Progress(1, 1))
    except Cancelled:
        project.close()
        raise
    return project


def _project_status(project: Project | None) -> str:
    """The project in one or two sentences."""
    if project is None:
        return "Annotations are saved as drafts until there is a project."
    lines = [project.read_only] if project.read_only else [f"{project.path}"]
    lines.append(project.summary()["sentence"])
    return "\n".join([*lines, *project.notes])


def _new_folder(parent: Path) -> Path:
    """A name for a new project that no folder has yet."""
    names = (f"BeerLaNet project{f' {k}' if k > 1 else ''}" for k in count(1))
    return next(parent / name for name in names if not (parent / name).exists())
