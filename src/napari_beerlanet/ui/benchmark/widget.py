"""The panel "Run benchmark": the paper's table on the user's data, in a background process."""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import psutil
from qtpy.QtCore import QObject, Qt, QTimer, QUrl
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import (
    QHeaderView,
    QPushButton,
    QTableWidget,
    QTableWidgetItem,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import qdebounced

from napari_beerlanet.core.benchmark.settings import METHODS, SETTINGS_FILE, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import (
    PAGE_FILE,
    Cell,
    ResultTable,
    TableRow,
    read_table,
)
from napari_beerlanet.core.common.events import EventTail, RunState
from napari_beerlanet.core.common.jobs import RECORDS_FOLDER
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.ui.benchmark.form import OUT_SUFFIX, BenchmarkForm
from napari_beerlanet.ui.common.background_process import (
    EVENTS_FILE,
    CloseConfirmation,
    CommandProcess,
    ProcessView,
    RunEnd,
    RunWording,
    apply_to_process_tree,
    explain_exit,
    find_running,
    launch_detached,
    running_process,
    summarize_end,
)
from napari_beerlanet.ui.common.controls import (
    DisabledReason,
    button,
    copy_text,
    heading,
    not_none,
    row,
    separator,
)
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.recent import RecentPaths
from napari_beerlanet.ui.common.session import get_project_store

if TYPE_CHECKING:
    from napari import Viewer

_LINE_PX = 24
_STOP_TIMEOUTS_S = 60.0, 90.0  # a step of a large network takes long
_POLL_INTERVAL_S = 0.1

_CLOSE_QUESTION = "A benchmark is running", "Continue the benchmark after the viewer is closed?"
_RESULTS_DELAY_MS = 400  # after the output folder was changed

RECENT_BENCHMARKS = RecentPaths("benchmarks", "benchmarks.json")
"""Output folders."""


class BenchmarkProcess(CommandProcess):
    """The benchmark that the benchmark.yaml of an output folder describes."""

    wording = RunWording(
        "benchmark", "press Resume", "the last finished epoch", "job", "jobs and epochs"
    )

    def __init__(self, folder: Path, parent: QObject | None = None, workers: int = 1) -> None:
        super().__init__(folder, parent, _STOP_TIMEOUTS_S)
        self.workers = workers

    def command(self) -> list[str]:
        """With so many jobs side by side."""
        return _command(self.folder, self.folder, self.workers)


def _command(settings: Path, out: Path, workers: int) -> list[str]:
    file = str(settings / SETTINGS_FILE)
    return ["benchmark", file, "--out", str(out), "--workers", str(workers)]


def prepare_benchmark_folder(settings: BenchmarkSettings, out: Path) -> Path:
    """Write the settings; the folder that a `BenchmarkProcess` can then start in."""
    out.mkdir(parents=True, exist_ok=True)
    settings.write(out)
    (out / EVENTS_FILE).write_bytes(b"")
    RECENT_BENCHMARKS.add(out)
    return out


def estimate_in_process(
    settings: BenchmarkSettings, out: Path, workers: int, report: Report
) -> str:
    """How long a benchmark will take, in one sentence.

    Trainings are timed for it, in a process of their own: they change settings of torch that hold
    for all threads of this one.
    """
    with tempfile.TemporaryDirectory(prefix="beerlanet-estimate-") as place:
        folder = Path(place)
        settings.write(folder)
        words = ["napari_beerlanet.cli.main", *_command(folder, out, workers)]
        child = launch_detached([*words, "--estimate", "--json"], folder, folder / EVENTS_FILE)
        tail, done, total, doing = EventTail(folder), 0, 1, "starting"
        try:
            while True:
                ended = child.poll() is not None  # before reading, so that all is read
                for event in tail.read():
                    if event["event"] == "estimate":
                        return str(event["message"])
                    if event["event"] == "failed":
                        raise FileError(str(event.get("message")))
                    if event["event"] == "estimating":
                        done, total, doing = event["done"], event["total"], event["message"]
                if ended:
                    raise FileError(
                        explain_exit(folder, child.returncode, wording=BenchmarkProcess.wording)
                    )
                report_progress(report, done, total, doing)
                time.sleep(_POLL_INTERVAL_S)
        finally:
            if child.poll() is None:
                apply_to_process_tree(psutil.Process(child.pid), "kill")
            child.wait()


class BenchmarkView(ProcessView):
    """Shows one benchmark at a time: what runs, and its table."""

    def __init__(self, panel: Panel) -> None:
        super().__init__(BenchmarkProcess.wording)
        self.table_shown: ResultTable | None = None
        self._read_task = panel.task()
        self.title = heading("Results")
        self.table = QTableWidget()
        self.table.setToolTip(
            "Mean and standard deviation over seeds in percent; the best is bold, the second best "
            "has a star. APU: average percentage below the best; lower is better."
        )
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setHorizontalScrollMode(QTableWidget.ScrollMode.ScrollPerPixel)
        not_none(self.table.verticalHeader()).setDefaultSectionSize(_LINE_PX)
        self.open_page = button(
            "Open page", "Open the HTML page with table, pictures and curves.", self._open_page
        )
        self.open = button("Open folder", "Show the results in the file manager.", self.open_folder)
        self.copy = button("Copy table", "Copy the table for a spreadsheet.", self.copy_table)
        self.results = QWidget()
        results = QVBoxLayout(self.results)
        results.setContentsMargins(0, 0, 0, 0)
        results.setSpacing(6)
        for part in (self.title, self.table, row(self.open_page, self.copy, self.open)):
            results.addWidget(part)
        self.body.addWidget(self.results)
        self.unit_ended.connect(lambda: self.load(self.folder))
        self.show_table(None)

    # --- a run ------------------------------------------------------------------------------------

    def follow(self, process: CommandProcess) -> None:
        """Show a run from now on, and what is there of its table."""
        super().follow(process)
        self.load(process.folder)

    def on_event(self, event: dict[str, Any]) -> None:
        """Show what the run says; notes, of which there may be many, are on its page."""
        super().on_event(event)
        if event["event"] == "estimating":
            self.activity.report(f"estimating: {event['message']}")
        elif event["event"] == "end":
            notes = event.get("notes") or []
            seen = f" {count_of(len(notes), 'note')} on the page." if notes else ""
            self.say(summarize_end({**event, "notes": []}) + seen)

    def failure_texts(self, event: dict[str, Any]) -> tuple[str, str]:
        """The job by its task, method and seed."""
        about = f"{event.get('task')}, {event.get('method')}, seed {event.get('seed')}"
        text = f"{about}: {event.get('error')}"
        return text, text

    def on_end(self, end: RunEnd) -> None:
        """The run has ended; its table is complete, or as far as it came."""
        self.load(self.folder)
        super().on_end(end)

    # --- the table --------------------------------------------------------------------------------

    def load(self, out: Path | None) -> None:
        """Read the table of a folder off the GUI thread, and show it."""
        self.folder = out
        if out is None:
            self.show_table(None)
            return
        self._read_task.start(
            lambda report: read_table(out), self.show_table, lambda _: self.show_table(None)
        )

    def show_table(self, table: ResultTable | None) -> None:
        """Show another table; a row per method, a column per test set and metric."""
        self.table_shown = table if table is not None and table.values else None
        self.results.setVisible(self.table_shown is not None)
        if self.table_shown is None:
            return
        shown = self.table_shown
        self.table.setColumnCount(len(shown.titles()))
        self.table.setRowCount(len(shown.rows))
        self.table.setHorizontalHeaderLabels(_headings(shown))
        self.table.setVerticalHeaderLabels([line.title for line in shown.rows])
        for place, line in enumerate(shown.rows):
            for column, cell in enumerate(_cells(shown, line)):
                self.table.setItem(place, column, _table_item(cell))
            not_none(self.table.verticalHeaderItem(place)).setToolTip(_described(line.method))
        header = not_none(self.table.horizontalHeader())
        header.setSectionResizeMode(QHeaderView.ResizeMode.ResizeToContents)
        bar = not_none(self.table.horizontalScrollBar()).sizeHint().height()
        height = len(shown.rows) * _LINE_PX + header.sizeHint().height()
        self.table.setFixedHeight(height + bar + 2 * self.table.frameWidth())
        seeds = [len(cell.values) for line in shown.rows for cell in line.cells]
        done, wanted = sum(seeds), len(seeds) * len(shown.seeds)
        self.title.setText("Results" if done >= wanted else f"Results so far: {done} of {wanted}")
        self.open_page.setEnabled(self.folder is not None and (self.folder / PAGE_FILE).is_file())

    def copy_table(self) -> None:
        """Put the table on the clipboard, as a spreadsheet takes it."""
        if self.table_shown is not None:
            lines = [["method", *self.table_shown.titles()]]
            for line in self.table_shown.rows:
                lines.append([line.title, *self.table_shown.texts(line, lambda text, rank: text)])
            copy_text("\n".join("\t".join(cells) for cells in lines))

    def _open_page(self) -> None:
        if self.folder is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self.folder / PAGE_FILE)))


def _headings(table: ResultTable) -> list[str]:
    """As `ResultTable.titles` in few letters: one task need not be named."""
    if len({column.task for column in table.columns}) > 1:
        return table.titles("\n")
    return [*(f"{one.laboratory}\n{one.metric_title}" for one in table.columns), "APU"]


def _cells(table: ResultTable, line: TableRow) -> list[Cell]:
    """The cells of a row in the order of `ResultTable.titles`."""
    cells: list[Cell] = []
    for kind in table.kinds:
        pairs = zip(table.columns, line.cells, strict=True)
        cells += [cell for column, cell in pairs if column.kind == kind]
        cells.append(line.apu[kind])
    return cells


def _table_item(cell: Cell) -> QTableWidgetItem:
    """A cell: the best bold, the second best with a star."""
    item = QTableWidgetItem(cell.text + ("*" if cell.rank == "second" else ""))
    item.setTextAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
    font = item.font()
    font.setBold(cell.rank == "best")
    item.setFont(font)
    item.setToolTip(", ".join(f"{value:.2f}" for value in cell.values) or "not measured yet")
    return item


def _described(method: str) -> str:
    return METHODS[method].description if method in METHODS else method


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
