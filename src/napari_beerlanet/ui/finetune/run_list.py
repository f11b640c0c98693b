"""The list of a project's training runs: resume one, show its result, delete it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from qtpy.QtCore import Qt, QTimer, Signal
from qtpy.QtWidgets import QListWidget, QListWidgetItem, QMessageBox

from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.training.runs import Run, inspect_run, list_runs
from napari_beerlanet.ui.common.controls import CollapsibleGroup, button, plain_tooltip, row
from napari_beerlanet.ui.common.notifications import notify_error

_VISIBLE_ROWS = 5
_UPDATE_INTERVAL_MS = 1000
_TITLE = "Training runs of this project"


class RunList(CollapsibleGroup):
    """Training runs, the newest first. All signals carry the selected `Run`."""

    resume = Signal(object)
    show_result = Signal(object)
    follow = Signal(object)
    deleted = Signal(object)

    def __init__(self) -> None:
        super().__init__(_TITLE)
        self.project: Path | None = None
        self._starting: Path | None = None
        self._unfinished: set[str] = set()
        self._timer = QTimer(self)
        self._timer.setInterval(_UPDATE_INTERVAL_MS)
        self._timer.timeout.connect(self._update_unfinished)
        self._timer.start()
        self.confirm_delete: Callable[[Run], bool] = self._confirm_delete
        self.list = QListWidget()
        self.list.setToolTip("All training runs of this project, the newest first.")
        self.list.setFixedHeight(self.list.fontMetrics().height() * 2 * _VISIBLE_ROWS)
        self.list.setWordWrap(True)
        self.list.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        self.list.currentRowChanged.connect(lambda _: self._update_buttons())
        self.resume_button = button(
            "Resume", "Resume after the last completed epoch.", self._resume_or_follow
        )
        self.result_button = button(
            "Result", "Compare the model before and after; keep or discard it.", self._show_result
        )
        self.delete_button = button("Delete …", "Delete the folder of this run.", self._delete)
        self.body.addWidget(self.list)
        self.body.addWidget(row(self.resume_button, self.result_button, self.delete_button))
        self.refresh()

    def refresh(self, project: Path | None = None) -> list[Run]:
        """List the project's runs as they are now, and return them."""
        self.project = project or self.project
        selected = self.selected
        runs = [] if self.project is None else list_runs(self.project, task=None)
        self.list.clear()
        for run in runs:
            item = QListWidgetItem()
            item.setData(Qt.ItemDataRole.UserRole, str(run.path))
            self._describe(item, run)
            self.list.addItem(item)
            if selected is not None and run.path == selected.path:
                self.list.setCurrentItem(item)
        if self.list.currentRow() < 0 and runs:
            self.list.setCurrentRow(0)
        self.header.setText(f"{_TITLE} ({len(runs)})")
        self._update_buttons()
        return runs

    def set_starting(self, path: Path | None) -> None:
        """A run whose process has been launched and has not written anything yet."""
        self._starting = path
        if path is not None:
            self._unfinished.add(str(path))
        self._update_unfinished()

    def _update_unfinished(self) -> None:
        """Say what is true now of runs that have not ended, whichever process trains them."""
        changed = False
        for item in map(self.list.item, range(self.list.count())):
            path = "" if item is None else item.data(Qt.ItemDataRole.UserRole)
            if item is not None and path in self._unfinished:
                changed = self._describe(item, inspect_run(path)) or changed
        if changed:
            self._update_buttons()

    def _describe(self, item: QListWidgetItem, run: Run) -> bool:
        """Update the text of a row; whether it has changed."""
        if run.path == self._starting and run.is_active:
            self._starting = None
        starting = run.path == self._starting
        text = describe_run(run, starting)
        unfinished = starting or run.is_active or run.state is RunState.NEW
        (self._unfinished.add if unfinished else self._unfinished.discard)(str(run.path))
        changed = item.text() != text
        item.setText(text)
        item.setToolTip(plain_tooltip(run.message or str(run.path)))
        return changed

    @property
    def selected(self) -> Run | None:
        """The run of the selected row, as it is now."""
        item = self.list.currentItem()
        return None if item is None else inspect_run(item.data(Qt.ItemDataRole.UserRole))

    def _update_buttons(self) -> None:
        run = self.selected
        active = run is not None and run.is_active
        self.resume_button.setEnabled(run is not None and (run.can_resume or active))
        self.resume_button.setText("Follow" if active else "Resume")
        self.result_button.setEnabled(run is not None and run.best is not None and not active)
        self.delete_button.setEnabled(run is not None and not active)

    def _resume_or_follow(self) -> None:
        run = self.selected
        if run is not None and run.is_active:
            self.follow.emit(run)
        elif run is not None and run.can_resume:
            self.resume.emit(run)

    def _show_result(self) -> None:
        run = self.selected
        if run is not None and run.best is not None:
            self.show_result.emit(run)

    def _delete(self) -> None:
        run = self.selected
        if run is None or run.is_active or not self.confirm_delete(run):
            return
        try:
            shutil.rmtree(run.path)
        except OSError as error:
            notify_error(error)
        self.refresh()
        self.deleted.emit(run)

    def _confirm_delete(self, run: Run) -> bool:
        answer = QMessageBox.question(
            self.window(),
            "Delete training run",
            f"Delete {run.name} with its checkpoints? Models that you kept are not deleted.",
        )
        return answer == QMessageBox.StandardButton.Yes


def describe_run(run: Run, starting: bool = False) -> str:
    """A run in one line: its name (the time), what it trains, and what is true of it now."""
    what = "classifier · " if run.task == "classify" else ""
    return f"{run.name} · {what}{'starting' if starting else run.status}"
