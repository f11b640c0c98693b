"""The panel “Run on folder”: the present settings on many images, in a process of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QApplication, QWidget

from napari_beerlanet.core.results import read_record
from napari_beerlanet.core.runs import State
from napari_beerlanet.core.studycommand import CONFIG, StudyOrder
from napari_beerlanet.core.studysettings import StudySettings
from napari_beerlanet.ui.batch_form import BatchForm
from napari_beerlanet.ui.batch_places import Places
from napari_beerlanet.ui.batch_process import BatchProcess, find_running, prepare, running_in
from napari_beerlanet.ui.batch_progress import BatchProgress
from napari_beerlanet.ui.controls import Fold, button, rule
from napari_beerlanet.ui.finetune_closing import ClosingQuestion
from napari_beerlanet.ui.finetune_form import wrapped
from napari_beerlanet.ui.followed_process import End
from napari_beerlanet.ui.notices import complain
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.session import session

PLUGIN, NAME = "napari-beerlanet", "Run on folder"
_GOES_ON = "A batch goes on", "Images are being worked on. Shall this go on"


class BatchPanel(Panel):
    """Choose folders, press the button; what it does is what the other panels are set to."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self._begin_task, self._find_task = self.task(), self.task()
        self.places, self.form = Places(self.task()), BatchForm()
        self.run_button = button(
            "Run", "Begin, or go on where a run into this folder was stopped.", self.run
        )
        self.why = wrapped()
        self.start_bar, self.progress = RunBar(self._begin_task, quiet=True), BatchProgress()
        self.command = wrapped()
        self.copy = button("Copy", "Copy the command.", self.copy_command)
        self._lay_out()
        self.places.changed.connect(self._changed)
        self.form.changed.connect(self._changed)
        self.progress.ended.connect(self._ended)
        window = getattr(self.viewer.window, "_qt_window", None)
        self.closing = ClosingQuestion(window, lambda: self.progress.process, self, _GOES_ON)
        self.take_present()
        QTimer.singleShot(0, self._look_for_running)

    def _lay_out(self) -> None:
        self.shown = Fold("The same as a command")
        self.shown.body.addWidget(self.command)
        self.shown.body.addWidget(self.copy)
        parts: tuple[QWidget, ...] = (self.places, rule(), self.form, rule(), self.run_button)
        for part in (*parts, self.why, self.start_bar, self.progress, self.shown):
            self.body.addWidget(part)
        self.body.addStretch(1)

    # --- what is set ------------------------------------------------------------------------------

    def take_present(self, asked_by: Any = None) -> None:
        """Take the settings of the open panels, and the folder of the image that they show."""
        given: dict[str, Any] = {"model": str(session(self.viewer).model_key or "")}
        for panel in _open_panels(self.viewer):
            given |= panel.study_settings()
        if asked_by is not None:
            given |= asked_by.study_settings()
        self.form.take(given)
        folder = _folder_of_image(self.viewer, asked_by)
        if folder is not None and not self.places.given:
            self.places.show_places([str(folder)], None)
        self._changed()

    def order(self) -> StudyOrder | None:
        """All that is set, None as long as something is missing."""
        out = self.places.results
        if out is None or not self.places.given or self.form.problem:
            return None
        return StudyOrder(
            tuple(str(Path(one).expanduser().absolute()) for one in self.places.given),
            out,
            StudySettings.of(self.form.settings()),
            self.form.workers.value(),
            self.form.scheduler,
            self.places.recursive.isChecked(),
        )

    def _changed(self) -> None:
        order = self.order()
        self.command.setText("" if order is None else order.command())
        self.shown.setVisible(order is not None)
        self.why.setText("" if self.progress.running else self._problem())
        self.why.setVisible(bool(self.why.text()))
        ready = order is not None and self.places.found > 0
        free = not self.progress.running and not self._begin_task.running
        self.run_button.setEnabled(ready and free)
        for part in (self.places, self.form):
            part.setEnabled(not self.progress.running)

    def _problem(self) -> str:
        if not self.places.given:
            return "Choose the images."
        return "Choose a folder for the results." if not self.places.results else self.form.problem

    def copy_command(self) -> None:
        """Put the command on the clipboard."""
        QApplication.clipboard().setText(self.command.text())

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Begin with what is set, or go on."""
        order = self.order()
        if order is None or self.progress.running or self._begin_task.running:
            return
        self._begin_task.start(
            lambda report: _begin(order), self._begun, lambda error: self._changed()
        )
        self._changed()

    def _begun(self, found: tuple[Path, int | None]) -> None:
        out, number = found
        if number is None:
            self._follow(out).start()
        else:
            self._attach(out, number)
        self._changed()

    def _follow(self, out: Path) -> BatchProcess:
        self.start_bar.say("")
        process = BatchProcess(out, self, patience=(15.0, 30.0))
        self.progress.follow(process)
        return process

    def _attach(self, out: Path, number: int) -> None:
        if not self._follow(out).attach_to(number):
            self.progress.leave()
            self.progress.hide()
        self._changed()

    def _ended(self, end: End) -> None:
        if end.state in (State.FAILED, State.INTERRUPTED):
            complain(self.progress.line.text() or "The batch has failed.")
        self._changed()

    # --- one that goes on -------------------------------------------------------------------------

    def _look_for_running(self) -> None:
        if not self._over:
            self._find_task.start(lambda report: _find(), self._found)

    def _found(self, found: tuple[Path, int, dict[str, Any]] | None) -> None:
        if found is None or self.progress.running:
            return
        out, number, config = found
        self._show(config, out)
        self._attach(out, number)

    def _show(self, config: dict[str, Any], out: Path) -> None:
        """The settings of a run that goes on."""
        own = ("images", "out", "workers", "scheduler", "recursive")
        images = [str(one) for one in config.get("images", [])]
        self.places.show_places(images, out, bool(config.get("recursive")))
        self.form.set_where(int(config.get("workers", 1)), config.get("scheduler"))
        self.form.take({"model": "", **{k: v for k, v in config.items() if k not in own}})

    def ended(self) -> None:
        """The batch goes on; it is found again when the panel is opened the next time."""
        self.closing.end()
        self.progress.leave()


def _begin(order: StudyOrder) -> tuple[Path, int | None]:
    """Write what is to be done; a run that goes on in that folder is followed instead."""
    number = running_in(order.out)
    return (order.out, number) if number is not None else (prepare(order), None)


def _find() -> tuple[Path, int, dict[str, Any]] | None:
    found = find_running()
    return None if found is None else (*found, read_record(found[0] / CONFIG))


def _open_panels(viewer: Any) -> list[Any]:
    """Panels that have settings of a study."""
    try:
        docked = list(viewer.window.dock_widgets.values())
    except AttributeError:  # a viewer without a window
        return []
    return [panel for panel in docked if hasattr(panel, "study_settings")]


def _folder_of_image(viewer: Any, asked_by: Any) -> Path | None:
    """Where the image lies that a panel, or the viewer, shows."""
    layer = asked_by.study_layer if asked_by is not None else viewer.layers.selection.active
    path = getattr(getattr(layer, "source", None), "path", None)
    return Path(path).absolute().parent if path and Path(path).is_absolute() else None


def open_batch(panel: Any) -> BatchPanel:
    """The open panel “Run on folder”, or a new one, with the settings of the panel that asks."""
    viewer = panel.viewer
    for inner in viewer.window.dock_widgets.values():
        if isinstance(inner, BatchPanel):
            inner.parentWidget().raise_()
            break
    else:
        inner = viewer.window.add_plugin_dock_widget(PLUGIN, NAME, tabify=True)[1]
    if not inner.progress.running:
        inner.take_present(panel)
    return inner
