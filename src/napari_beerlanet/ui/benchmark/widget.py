"""The panel "Run benchmark": the paper's table on the user's data, in a background process."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QPushButton
from superqt.utils import qdebounced

from napari_beerlanet.core.benchmark.settings import SETTINGS_FILE, BenchmarkSettings
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.jobs import RECORDS_FOLDER
from napari_beerlanet.ui.benchmark.form import OUT_SUFFIX, BenchmarkForm
from napari_beerlanet.ui.benchmark.run_view import (
    RECENT_BENCHMARKS,
    BenchmarkProcess,
    BenchmarkView,
    estimate_in_process,
    prepare_benchmark_folder,
)
from napari_beerlanet.ui.common.background_process import (
    CloseConfirmation,
    RunEnd,
    find_running,
    running_process,
)
from napari_beerlanet.ui.common.controls import DisabledReason, button, row, separator
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.session import get_project_store

if TYPE_CHECKING:
    from napari import Viewer

_CLOSE_QUESTION = "A benchmark is running", "Continue the benchmark after the viewer is closed?"
_RESULTS_DELAY_MS = 400  # after the output folder was changed


class BenchmarkWidget(Panel):
    """The panel "Run benchmark"."""

    title = "Run benchmark"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.estimate_task, self._start_task = self.task(), self.task()
        self._find_task, self._open_task = self.task(), self.task()
        self.form = BenchmarkForm()
        self.estimate_button = button(
            "Estimate",
            "Time a few steps of each kind on this machine, and say how long it will take.",
            self.estimate,
        )
        self.start_button = QPushButton("Start")
        self.start_button.setToolTip(
            "Train and measure every method with every seed, in a process of its own. Jobs that "
            "are done in the output folder are kept, and a training that was stopped resumes."
        )
        self.start_reason = DisabledReason(self.start_button)
        self.estimate_bar = TaskProgressBar(self.estimate_task)
        self.start_bar = TaskProgressBar(self._start_task, quiet=True)
        self.open_bar = TaskProgressBar(self._open_task, quiet=True)
        self.view = BenchmarkView(self)
        for part in (
            self.form,
            separator(),
            row(self.start_button, self.estimate_button, stretch=0),
            self.start_reason,
            self.estimate_bar,
            self.start_bar,
            self.open_bar,
            self.view,
        ):
            self.body.addWidget(part)
        self.body.addStretch(1)
        self._load_soon = qdebounced(self._load, timeout=_RESULTS_DELAY_MS, parent=self)
        self.form.changed.connect(self._update)
        self.form.out.textChanged.connect(lambda *_: self._load_soon())
        self.form.opened.connect(self.open_settings)
        self.start_button.clicked.connect(lambda *_: self.start())
        self.view.ended.connect(self._ended)
        self.connect_event(get_project_store(self.viewer).changed, self._project_changed)
        self.close_confirmation = CloseConfirmation(
            getattr(self.viewer.window, "_qt_window", None),
            lambda: self.view.process,
            self,
            _CLOSE_QUESTION,
        )
        self._project_changed()
        self._update()
        QTimer.singleShot(0, self._look_for_running)

    # --- settings ---------------------------------------------------------------------------------

    def _project_changed(self, project: Any = None) -> None:
        """The open project is what is trained on, unless other data are chosen."""
        store = get_project_store(self.viewer)
        if store.project is not None and self.form.is_empty and not self.view.running:
            self.form.task.train.setText(str(store.project.path))

    def settings(self) -> BenchmarkSettings:
        """As the form has them; what is wrong is a `ValueError` of one sentence."""
        return self.form.settings()

    def _update(self) -> None:
        running = self.view.running or self._start_task.running
        reason = self.form.problem
        if running:
            reason = "A benchmark is running."
        self.start_reason.update_button(reason)
        self.estimate_button.setEnabled(not reason and not self.estimate_task.running)
        self.form.setEnabled(not running)
        out = self.form.out_folder
        resumes = out is not None and (out / SETTINGS_FILE).is_file()
        self.start_button.setText("Resume" if resumes else "Start")

    # --- running ----------------------------------------------------------------------------------

    def estimate(self) -> None:
        """Say how long it will take."""
        out, workers = self.form.out_folder, self.form.workers.value()
        try:
            settings = self.settings()
        except ValueError as error:
            self.estimate_bar.show_error(error)
            return
        self.estimate_task.start(
            lambda report: estimate_in_process(settings, out or Path(), workers, report),
            self.estimate_bar.set_message,
        )

    def open_settings(self, path: Path) -> None:
        """Show the settings of a benchmark.yaml, or of the results folder that has one."""
        in_folder = path.is_dir()
        file = path / SETTINGS_FILE if in_folder else path

        def done(settings: BenchmarkSettings) -> None:
            self.open_bar.set_message("")
            self.form.show_settings(settings, path if in_folder else _results_folder(file))

        self._open_task.start(lambda report: BenchmarkSettings.read(file), done)

    def start(self) -> None:
        """Start the benchmark, or resume it."""
        out = self.form.out_folder
        if out is None or not self.start_button.isEnabled():
            return
        try:
            settings = self.settings()
        except ValueError as error:
            self.start_bar.show_error(error)
            return
        self._start_task.start(
            lambda report: _prepare_or_attach(settings, out),
            self._started,
            lambda _: self._update(),
        )
        self._update()

    def _started(self, folder_and_pid: tuple[Path, int | None]) -> None:
        out, pid = folder_and_pid
        self.start_bar.set_message("")
        self.estimate_bar.set_message("")
        self._follow(out, pid)

    def _follow(self, out: Path, pid: int | None) -> None:
        process = BenchmarkProcess(out, self, self.form.workers.value())
        self.view.follow(process)
        if pid is None:
            process.start()
        elif not process.attach_to_pid(pid):
            self.view.detach()
        self._update()

    def _ended(self, end: RunEnd) -> None:
        if end.state in (RunState.FAILED, RunState.INTERRUPTED):
            notify_error(self.view.message.text() or "The benchmark has failed.")
        self._update()
        self.show_soon(self.view.results)

    def _load(self) -> None:
        """Show what is in the output folder already; its settings, too, where none are chosen."""
        if not self.view.running:
            out = self.form.out_folder
            self.view.load(out)
            if out is not None and self.form.is_empty and (out / SETTINGS_FILE).is_file():
                self.open_settings(out)
            self._update()

    # --- a benchmark that runs --------------------------------------------------------------------

    def _look_for_running(self) -> None:
        if not self._closed:
            self._find_task.start(lambda report: _find_running(), self._on_running)

    def _on_running(self, found: tuple[Path, int, BenchmarkSettings | None] | None) -> None:
        if found is None or self.view.running:
            return
        out, pid, settings = found
        if settings is not None:
            self.form.show_settings(settings, out)
        self._follow(out, pid)

    def on_closed(self) -> None:
        """The benchmark continues; it is shown again when the panel is next opened."""
        self.close_confirmation.end()
        self.view.detach()


def _prepare_or_attach(settings: BenchmarkSettings, out: Path) -> tuple[Path, int | None]:
    """Write the settings; a run in that folder is followed instead: its process."""
    pid = running_process(out) if (out / SETTINGS_FILE).is_file() else None
    return (out, pid) if pid is not None else (prepare_benchmark_folder(settings, out), None)


def _results_folder(file: Path) -> Path:
    """Where a benchmark.yaml's results go: beside it where there are some, or to a new folder."""
    folder = file.absolute().parent
    there = (folder / RECORDS_FOLDER).is_dir() or not folder.name
    return folder if there else folder.with_name(folder.name + OUT_SUFFIX)


def _find_running() -> tuple[Path, int, BenchmarkSettings | None] | None:
    found = find_running(RECENT_BENCHMARKS)
    if found is None:
        return None
    try:
        return (*found, BenchmarkSettings.read(found[0] / SETTINGS_FILE))
    except ValueError:
        return (*found, None)
