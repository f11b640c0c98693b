"""Choose the project: make one, open one, or go on with one of earlier days."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtpy.QtCore import QSignalBlocker, Qt
from qtpy.QtWidgets import QComboBox, QFileDialog, QSizePolicy, QVBoxLayout, QWidget

from napari_beerlanet.core.progress import Cancelled, Progress, Report
from napari_beerlanet.core.project import LockedError, Project
from napari_beerlanet.ui.controls import button, hint, row
from napari_beerlanet.ui.notices import complain, sentence
from napari_beerlanet.ui.project_store import last_open, projects, recent

_NONE = "No project"


class ProjectBar(QWidget):
    """The viewer's project and how to get another; any panel may have one.

    `classes` gives the names that a new project starts with.
    """

    def __init__(self, panel: Any, classes: Callable[[], list[str]]) -> None:
        super().__init__()
        self.store = projects(panel.viewer)
        self.task = panel.task()
        self._classes = classes
        self._refused: Path | None = None
        self._paths: list[Path | None] = []
        self._build()
        panel.listen(self.store.changed, self._changed)
        panel.listen(self.store.updated, self.refresh)
        self.refresh()

    def _build(self) -> None:
        self.choice = QComboBox()
        self.choice.setToolTip(
            "The folder that annotations, pieces to learn from and trained models go to."
        )
        self.choice.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.choice.setSizeAdjustPolicy(
            QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        )
        self.choice.setMinimumContentsLength(10)
        self.choice.activated.connect(self._chosen)
        self.new = button("New …", "Make a project in a new folder.", self.ask_new)
        self.other = button("Open …", "Open the folder of a project.", self.ask_open)
        self.look = button(
            "Open to look at only",
            "Open the project although another viewer writes to it; nothing can be changed here.",
            self.open_to_look,
        )
        self.line = hint()
        self.look.hide()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(row(self.choice, self.new, self.other, stretch=0))
        layout.addWidget(self.line)
        layout.addWidget(self.look)

    # --- opening ----------------------------------------------------------------------------------

    def reopen(self) -> None:
        """Go on with the project that was open when the viewer ended, if it still is there."""
        path = last_open()
        if path is not None and self.store.project is None and not self.task.running:
            self.open(path)

    def open(self, path: Path | str, read_only: bool = False) -> None:
        """Open a project off the GUI thread."""
        if self._is_open(path) and not (self.store.project and self.store.project.read_only):
            return
        self._begin(Path(path), lambda: Project.open(path, read_only=read_only))

    def create(self, path: Path | str) -> None:
        """Make a project with the classes that there are."""
        names = self._classes()
        if not names:
            needed = "A project needs classes: load a model, or type their names."
            self._say(complain(needed), problem=True)
            return
        self._begin(Path(path), lambda: Project.create(path, names))

    def open_to_look(self) -> None:
        """Open the project that another viewer has."""
        if self._refused is not None:
            self.open(self._refused, read_only=True)

    def ask_open(self) -> None:
        """Ask for a project's folder."""
        path = QFileDialog.getExistingDirectory(self, "Open a project's folder")
        if path:
            self.open(path)

    def ask_new(self) -> None:
        """Ask for the name of a new folder."""
        path, _ = QFileDialog.getSaveFileName(self, "Name of the new project's folder")
        if path:
            self.create(path)

    def _begin(self, path: Path, open_: Callable[[], Project]) -> None:
        self._refused = None
        self.look.hide()
        self._say(f"Opening {path.name} …")
        self.task.start(
            lambda report: _wanted(open_(), report),
            self.store.put,
            lambda error: self._failed(path, error),
        )

    def _failed(self, path: Path, error: BaseException) -> None:
        self.refresh()
        self._say(complain(sentence(error)), problem=True)
        if isinstance(error, LockedError):
            self._refused = path
            self.look.show()

    def _is_open(self, path: Path | str) -> bool:
        project = self.store.project
        return project is not None and project.path == Path(path).absolute()

    # --- showing ----------------------------------------------------------------------------------

    def refresh(self) -> None:
        """Show the project and the list as they are now."""
        project = self.store.project
        known = [path for path in recent() if not (project and path == project.path)]
        self._paths = [project.path if project else None, *known]
        if project:
            self._paths.append(None)
        blocker = QSignalBlocker(self.choice)
        self.choice.clear()
        for path in self._paths:
            self.choice.addItem(path.name if path else _NONE)
            last, tip = self.choice.count() - 1, Qt.ItemDataRole.ToolTipRole
            self.choice.setItemData(last, str(path or ""), tip)
        self.choice.setCurrentIndex(0)
        blocker.unblock()
        self._say(_state(project), problem=bool(project and (project.read_only or project.notes)))

    def _changed(self, project: Project | None) -> None:
        self.look.hide()
        self.refresh()

    def _chosen(self, index: int) -> None:
        path = self._paths[index]
        if path is None:
            self.store.put(None)
        else:
            self.open(path)

    def _say(self, text: str, problem: bool = False) -> None:
        """A line that is muted unless there is a problem."""
        self.line.setText(text)
        self.line.setEnabled(problem)


def _wanted(project: Project, report: Report) -> Project:
    """The project, closed again where the panel has gone meanwhile or another is wanted."""
    try:
        report(Progress(1, 1))
    except Cancelled:
        project.close()
        raise
    return project


def _state(project: Project | None) -> str:
    """The project in a sentence or two."""
    if project is None:
        return "Annotations are kept as drafts until there is a project."
    told = [project.read_only] if project.read_only else [f"{project.path}"]
    told.append(project.summary()["sentence"])
    return "\n".join([*told, *project.notes])
