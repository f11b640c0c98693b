"""The runs of a project: going on with one of yesterday, looking at its result, deleting it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QListWidget, QListWidgetItem, QMessageBox, QWidget

from napari_beerlanet.core.runs import Run, State, list_runs, look_at
from napari_beerlanet.ui.controls import Fold, button, row
from napari_beerlanet.ui.notices import complain

_SHOWN = 5  # rows


class RunList(Fold):
    """Runs, the newest first. `resume`, `show_result` and `follow` tell a `Run`."""

    resume = Signal(object)
    show_result = Signal(object)
    follow = Signal(object)
    deleted = Signal(object)

    def __init__(self) -> None:
        super().__init__("Runs of this project")
        self.project: Path | None = None
        self.ask_delete: Callable[[Run], bool] = self._ask_delete
        self.list = QListWidget()
        self.list.setToolTip("Every training in this project, the newest first.")
        self.list.setFixedHeight(self.list.fontMetrics().height() * 2 * _SHOWN)
        self.list.setWordWrap(True)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.currentRowChanged.connect(lambda _: self._enable())
        self.go_on = button("Resume", "Go on after the last finished epoch.", self._go_on)
        self.result = button("Result", "Compare before and after, keep or discard.", self._result)
        self.delete = button("Delete …", "Delete the folder of this run.", self._delete)
        self.body.addWidget(self.list)
        self.body.addWidget(row(self.go_on, self.result, self.delete))
        self.refresh()

    def refresh(self, project: Path | None = None) -> list[Run]:
        """Look at the project's runs again; they are returned."""
        self.project = project or self.project
        chosen = self.chosen
        found = [] if self.project is None else list_runs(self.project)
        self.list.clear()
        for run in found:
            item = QListWidgetItem(describe(run))
            item.setData(Qt.ItemDataRole.UserRole, str(run.path))
            item.setToolTip(run.message or str(run.path))
            self.list.addItem(item)
            if chosen is not None and run.path == chosen.path:
                self.list.setCurrentItem(item)
        if self.list.currentRow() < 0 and found:
            self.list.setCurrentRow(0)
        self.head.setText(f"Runs of this project ({len(found)})")
        self._enable()
        return found

    @property
    def chosen(self) -> Run | None:
        """The run of the selected row, as it is now."""
        item = self.list.currentItem()
        return None if item is None else look_at(item.data(Qt.ItemDataRole.UserRole))

    def _enable(self) -> None:
        run = self.chosen
        self.go_on.setEnabled(run is not None and (run.can_resume or run.goes_on))
        self.go_on.setText("Follow" if run is not None and run.goes_on else "Resume")
        self.result.setEnabled(run is not None and run.best is not None and not run.goes_on)
        self.delete.setEnabled(run is not None and not run.goes_on)

    def _go_on(self) -> None:
        run = self.chosen
        if run is not None and run.goes_on:
            self.follow.emit(run)
        elif run is not None and run.can_resume:
            self.resume.emit(run)

    def _result(self) -> None:
        run = self.chosen
        if run is not None and run.best is not None:
            self.show_result.emit(run)

    def _delete(self) -> None:
        run = self.chosen
        if run is None or run.goes_on or not self.ask_delete(run):
            return
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            complain(error)
        self.refresh()
        self.deleted.emit(run)

    def _ask_delete(self, run: Run) -> bool:
        answer = QMessageBox.question(
            _window(self),
            "Delete a run",
            f"Delete {run.name} with all that it has learned? Models that were kept stay.",
        )
        return answer == QMessageBox.StandardButton.Yes


def describe(run: Run) -> str:
    """A run in a line: when, what, how far."""
    what = f"{run.name} · {run.state}"
    if run.state is State.DAMAGED:
        return what
    of = f" of {run.epochs}" if run.epochs else ""
    return f"{what} · epoch {run.epoch}{of}"


def _window(widget: QWidget) -> QWidget:
    return widget.window()
