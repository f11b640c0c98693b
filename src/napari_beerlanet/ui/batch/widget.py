"""The panel “Run on folder”: run a study with the current settings in a background process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from napari import Viewer
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QWidget
from superqt.utils import qdebounced, qthrottled

from napari_beerlanet.core.batch.settings import STUDY_FILE, StudyConfig, StudySettings
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.storage import read_json_or_empty
from napari_beerlanet.ui.batch.form import BatchForm, BatchInputs
from napari_beerlanet.ui.batch.results import BatchResults
from napari_beerlanet.ui.common.background_process import (
    EVENTS_FILE,
    CloseConfirmation,
    CommandProcess,
    ProcessView,
    RunEnd,
    RunWording,
    find_running,
    running_process,
)
from napari_beerlanet.ui.common.controls import (
    CollapsibleGroup,
    SettingsPanel,
    button,
    copy_text,
    row,
    separator,
    wrapping_label,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel, open_panels
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.recent import RecentPaths
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.viewer.layers import source_image

RECENT_BATCHES = RecentPaths("batches", "batches.json")
"""Output folders."""

_RESULTS_DELAY_MS = 400  # after the output folder was changed
_RESULTS_INTERVAL_MS = 2000  # between updates of the counts while a batch runs
_CLOSE_QUESTION = "A batch is running", "Continue the batch after the viewer is closed?"


class BatchProcess(CommandProcess):
    """The study that the study.json of an output folder describes."""

    wording = RunWording("batch", "run it again", "the last finished image", "image", "images")

    def command(self) -> list[str]:
        """All that it needs is in the file."""
        return ["batch", str(self.folder / STUDY_FILE)]


def prepare_study_folder(config: StudyConfig) -> Path:
    """Write the study file; the folder that a `BatchProcess` can then start in."""
    config.write()
    (config.out / EVENTS_FILE).write_bytes(b"")
    RECENT_BATCHES.add(config.out)
    return config.out


class BatchProgress(ProcessView):
    """Shows one `BatchProcess` at a time; hidden until there was one."""

    def __init__(self) -> None:
        super().__init__(BatchProcess.wording)
        self.open = button("Open output folder", "Show it in the file manager.", self.open_folder)
        self.body.addWidget(row(self.open))
        self.hide()

    def follow(self, process: CommandProcess) -> None:
        """Show a run from now on."""
        super().follow(process)
        self.show()

    def failure_texts(self, event: dict[str, Any]) -> tuple[str, str]:
        """The image by its name, in the tooltip by its path."""
        path, error = str(event.get("path")), str(event.get("error"))
        text = error if path in error else f"{path}: {error}"
        return text.replace(path, Path(path).name), text


class BatchWidget(Panel):
    """Choose images and press Run; the settings are those of the other panels."""

    title = "Run on folder"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self._start_task, self._find_task = self.task(), self.task()
        # Whether the user has chosen here which model, or none, runs, and which classifier.
        self._own_model = self._own_classifier = False
        self.inputs, self.form = BatchInputs(self.task()), BatchForm()
        self.run_button = button(
            "Run", "Start, or resume a run that was stopped in this output folder.", self.run
        )
        self.problem_text = wrapping_label()
        self.start_bar, self.progress = (
            TaskProgressBar(self._start_task, quiet=True),
            BatchProgress(),
        )
        self.results = BatchResults(self)
        self._load_results_soon = qdebounced(
            self._load_results, timeout=_RESULTS_DELAY_MS, parent=self
        )
        self._update_results = qthrottled(
            self._load_results, timeout=_RESULTS_INTERVAL_MS, leading=False, parent=self
        )
        self.command = wrapping_label()
        self.copy = button("Copy", "Copy the command.", self.copy_command)
        self._lay_out()
        self.inputs.changed.connect(self._update)
        self.form.changed.connect(self._update)
        self.progress.ended.connect(self._on_end)
        self.progress.unit_ended.connect(self._update_results)
        self.inputs.out.textChanged.connect(lambda *_: self._load_results_soon())
        self.form.model.chosen.connect(self._model_chosen)
        self.form.detect.native.clicked.connect(self._model_chosen)
        self.form.classifier.chosen.connect(self._classifier_chosen)
        self.form.classify.native.clicked.connect(self._classifier_chosen)
        session = get_session(self.viewer)
        self.connect_event(session.model_changed, self._model_changed)
        self.connect_event(session.classifier_changed, self._types_changed)
        self.connect_event(session.detections_changed, self._types_changed)
        window = getattr(self.viewer.window, "_qt_window", None)
        self.close_confirmation = CloseConfirmation(
            window, lambda: self.progress.process, self, _CLOSE_QUESTION
        )
        self.adopt_settings()
        QTimer.singleShot(0, self._look_for_active_batch)

    def _lay_out(self) -> None:
        self.command_group = CollapsibleGroup("Command line")
        self.command_group.body.addWidget(self.command)
        self.command_group.body.addWidget(self.copy)
        parts: tuple[QWidget, ...] = (
            self.inputs,
            separator(),
            self.form,
            separator(),
            self.run_button,
        )
        below = (self.problem_text, self.start_bar, self.progress, self.results)
        for part in (*parts, *below, self.command_group):
            self.body.addWidget(part)
        self.body.addStretch(1)

    # --- settings ---------------------------------------------------------------------------------

    def adopt_settings(self, source: SettingsPanel | None = None) -> None:
        """Take the settings of the open panels, and the folder of the image that they show."""
        session = get_session(self.viewer)
        given: dict[str, Any] = {"model": str(session.model_key or "")}
        given["classifier"] = self._session_classifier()
        for panel in _panels_with_settings(self.viewer):
            given |= panel.study_settings()
        if source is not None:
            given |= source.study_settings()
        self.form.set_settings(given)
        self._own_model = self._own_classifier = False
        folder = _image_folder(self.viewer, source)
        if folder is not None and not self.inputs.patterns:
            self.inputs.set_inputs([str(folder)], None)
        self._update()

    def _model_chosen(self, *_: object) -> None:
        self._own_model = True

    def _classifier_chosen(self, *_: object) -> None:
        self._own_classifier = True

    def _model_changed(self, model: Any) -> None:
        """The model of the other panels is that of the batch, unless another is chosen here."""
        key = get_session(self.viewer).model_key
        if key and not self._own_model and not self.progress.running:
            self.form.set_settings({"model": key})

    def _types_changed(self, event: Any = None) -> None:
        """Cells have been classified in the viewer, or are not any more."""
        if not self._own_classifier and not self.progress.running:
            key = get_session(self.viewer).classifier_key
            if key:
                self.form.classifier.set_key(key)
            self.form.set_settings({"classifier": self._session_classifier()})

    def _session_classifier(self) -> str:
        """The classifier of the other panels, "" where no cells have been classified with it.

        One is always loaded where *Classify cells* is open: that alone says nothing.
        """
        session = get_session(self.viewer)
        name = session.classifier.info.get("name") if session.classifier is not None else None
        used = [found.report.get("classifier") for found in session.detections.values()]
        return str(session.classifier_key or "") if name is not None and name in used else ""

    def study_config(self) -> StudyConfig | None:
        """The study, None as long as something is missing."""
        out = self.inputs.out_folder
        if out is None or not self.inputs.patterns or self.form.problem:
            return None
        return StudyConfig(
            tuple(str(Path(text).expanduser().absolute()) for text in self.inputs.patterns),
            out,
            StudySettings(**self.form.settings()),
            self.form.workers.value,
            self.form.scheduler,
            self.inputs.recursive.isChecked(),
        )

    def _update(self) -> None:
        config = self.study_config()
        self.command.setText("" if config is None else config.command())
        self.command_group.setVisible(config is not None)
        self.problem_text.setText("" if self.progress.running else self._problem())
        self.problem_text.setVisible(bool(self.problem_text.text()))
        ready = config is not None and self.inputs.image_count > 0
        free = not self.progress.running and not self._start_task.running
        self.run_button.setEnabled(ready and free)
        for part in (self.inputs, self.form):
            part.setEnabled(not self.progress.running)

    def _problem(self) -> str:
        if not self.inputs.patterns:
            return "Choose the images."
        return (
            "Choose a folder for the results." if not self.inputs.out_folder else self.form.problem
        )

    def copy_command(self) -> None:
        """Put the command on the clipboard."""
        copy_text(self.command.text())

    # --- running ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Start the study, or resume it."""
        config = self.study_config()
        if config is None or self.progress.running or self._start_task.running:
            return
        self._start_task.start(
            lambda report: _start_or_attach(config), self._on_started, lambda error: self._update()
        )
        self._update()

    def _on_started(self, folder_and_pid: tuple[Path, int | None]) -> None:
        out, pid = folder_and_pid
        if pid is None:
            self._follow(out).start()
        else:
            self._attach(out, pid)
        self._update()

    def _follow(self, out: Path) -> BatchProcess:
        self.start_bar.set_message("")
        process = BatchProcess(out, self, stop_timeouts=(15.0, 30.0))
        self.progress.follow(process)
        return process

    def _attach(self, out: Path, pid: int) -> None:
        if not self._follow(out).attach_to_pid(pid):
            self.progress.detach()
            self.progress.hide()
        self._update()

    def _on_end(self, end: RunEnd) -> None:
        if end.state in (RunState.FAILED, RunState.INTERRUPTED):
            notify_error(self.progress.message.text() or "The batch has failed.")
        self.results.bring_into_view = True
        self._load_results()
        self._update()

    def _load_results(self) -> None:
        """Show the counts that are in the output folder, of a run that goes on or has ended."""
        self.results.load(self.inputs.out_folder)

    # --- an active batch --------------------------------------------------------------------------

    def _look_for_active_batch(self) -> None:
        if not self._closed:
            self._find_task.start(lambda report: _find_active_batch(), self._on_active_batch)

    def _on_active_batch(self, active: tuple[Path, int, dict[str, Any]] | None) -> None:
        if active is None or self.progress.running:
            return
        out, pid, config = active
        self._show_config(config, out)
        self._attach(out, pid)

    def _show_config(self, config: dict[str, Any], out: Path) -> None:
        """Show the study of an active run."""
        images = [str(one) for one in config.get("images", [])]
        self.inputs.set_inputs(images, out, bool(config.get("recursive")))
        self.form.set_run_location(int(config.get("workers", 1)), config.get("scheduler"))
        self.form.set_settings(
            {"model": "", **{k: v for k, v in config.items() if k in StudySettings.model_fields}}
        )

    def on_closed(self) -> None:
        """The batch continues; it is shown again when the panel is next opened."""
        self.close_confirmation.end()
        self.progress.detach()


def _start_or_attach(config: StudyConfig) -> tuple[Path, int | None]:
    """Write the study file; an active run in that folder is followed instead: its process."""
    pid = running_process(config.out)
    return (config.out, pid) if pid is not None else (prepare_study_folder(config), None)


def _find_active_batch() -> tuple[Path, int, dict[str, Any]] | None:
    active = find_running(RECENT_BATCHES)
    return None if active is None else (*active, read_json_or_empty(active[0] / STUDY_FILE))


def _panels_with_settings(viewer: Viewer) -> list[SettingsPanel]:
    """Panels that have settings of a study."""
    return [panel for panel in open_panels(viewer) if isinstance(panel, SettingsPanel)]


def _image_folder(viewer: Viewer, source: SettingsPanel | None) -> Path | None:
    """The folder of the image that a panel, or the viewer, shows."""
    active = viewer.layers.selection.active
    layer = source.study_layer if source is not None else source_image(viewer, active)
    path = getattr(getattr(layer, "source", None), "path", None)
    return Path(path).absolute().parent if path and Path(path).is_absolute() else None
