"""A running benchmark: its background process, progress and ETA, and the table as jobs finish."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import psutil
from qtpy.QtCore import Qt, QUrl, Signal
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import QHeaderView, QTableWidget, QTableWidgetItem, QVBoxLayout, QWidget

from napari_beerlanet.core.benchmark.settings import METHODS, SETTINGS_FILE, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import (
    PAGE_FILE,
    Cell,
    ResultTable,
    TableRow,
    read_table,
)
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.jobs import LOCK_FILE
from napari_beerlanet.core.common.locking import local_owner
from napari_beerlanet.core.common.messages import count_of, format_duration
from napari_beerlanet.ui.common.background_process import (
    BackgroundProcess,
    RunEnd,
    RunWording,
    explain_exit,
    launch_detached,
    lower_priority,
)
from napari_beerlanet.ui.common.controls import (
    button,
    copy_text,
    heading,
    not_none,
    row,
    wrapping_label,
)
from napari_beerlanet.ui.common.panel import Panel, ThemedLabel
from napari_beerlanet.ui.common.progress_bar import Activity, activity_bar
from napari_beerlanet.ui.common.recent import RecentPaths

_EVENTS_FILE = "progress.jsonl"
_END_TEXTS = RunWording("benchmark", "press Start again", "the last finished epoch")
_LINE_PX = 24

RECENT_BENCHMARKS = RecentPaths("benchmarks", "benchmarks.json")
"""Output folders."""


class BenchmarkProcess(BackgroundProcess):
    """The benchmark that the benchmark.yaml of an output folder describes."""

    def _launch(self) -> psutil.Process:
        settings = str(self.folder / SETTINGS_FILE)
        words = ["napari_beerlanet.cli.main", "benchmark", settings, "--out", str(self.folder)]
        words.append("--json")
        child = launch_detached(words, self.folder, self.folder / _EVENTS_FILE, self.environment)
        process = psutil.Process(child.pid)
        lower_priority(process)
        return process

    def _explain_exit(self, code: int | None = None, error: BaseException | None = None) -> str:
        return explain_exit(self.folder, code, error, _END_TEXTS)


def prepare_benchmark_folder(settings: BenchmarkSettings, out: Path) -> Path:
    """Write the settings; the folder that a `BenchmarkProcess` can then start in."""
    out.mkdir(parents=True, exist_ok=True)
    settings.write(out)
    (out / _EVENTS_FILE).write_bytes(b"")
    RECENT_BENCHMARKS.add(out)
    return out


def running_process(out: Path) -> int | None:
    """The process on this computer that writes a benchmark to a folder, None if there is none."""
    return local_owner(out / LOCK_FILE) if (out / SETTINGS_FILE).is_file() else None


def find_running_benchmark() -> tuple[Path, int] | None:
    """The output folder and process of a benchmark that runs, of those that were started last."""
    for out in RECENT_BENCHMARKS.paths():
        number = running_process(out)
        if number is not None:
            return out, number
    return None


class BenchmarkView(QWidget):
    """Shows one benchmark at a time: what runs, and its table; `ended` passes its end on."""

    ended = Signal(object)

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.process: BenchmarkProcess | None = None
        self.out: Path | None = None
        self.table_shown: ResultTable | None = None
        self._read_task = panel.task()
        self.bar = activity_bar("Progress of the benchmark, and the estimated time left.")
        self.activity = Activity(
            self, self._stop, "Stop", "Stop the run; finished jobs and epochs are saved."
        )
        self.activity.changed.connect(self._show_activity)
        self.stop = button("Stop", self.activity.stop_tip, self.activity.stop)
        self.message = wrapping_label()
        self.failures = ThemedLabel(kind="warning")
        self.failures.setToolTip("Jobs that failed, and why; also listed in failures.csv.")
        self._failed: list[str] = []
        self.title = heading("Results")
        self.table = QTableWidget()
        self.table.setToolTip(
            "Mean and standard deviation over seeds in percent; the best is bold, the second best "
            "has a star. APU: average percent below the best, the less the better."
        )
        self.table.setEditTriggers(QTableWidget.EditTrigger.NoEditTriggers)
        self.table.setHorizontalScrollMode(QTableWidget.ScrollMode.ScrollPerPixel)
        not_none(self.table.verticalHeader()).setDefaultSectionSize(_LINE_PX)
        self.open_page = button(
            "Open page", "Open the HTML page with table, pictures and curves.", self._open_page
        )
        self.open_folder = button(
            "Open folder", "Show the results in the file manager.", self._open_folder
        )
        self.copy = button("Copy table", "Copy the table for a spreadsheet.", self.copy_table)
        self.results = QWidget()
        results = QVBoxLayout(self.results)
        results.setContentsMargins(0, 0, 0, 0)
        results.setSpacing(6)
        for part in (self.title, self.table, row(self.open_page, self.copy, self.open_folder)):
            results.addWidget(part)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(row(self.bar, self.stop, stretch=0))
        for part in (self.message, self.failures, self.results):
            layout.addWidget(part)
        self._show_activity()
        self._show_failures()
        self.message.hide()
        self.show_table(None)

    # --- a run ------------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether a run is followed that has not ended."""
        return self.process is not None and self.process.running

    def follow(self, process: BenchmarkProcess) -> None:
        """Show a run from now on. To be called before it starts or is attached to."""
        self.detach()
        self.process, self.out = process, process.folder
        process.event_received.connect(self._on_event)
        process.ended.connect(self._on_end)
        self._failed.clear()
        self._show_failures()
        self._say("Continues in the background if the viewer is closed; reopen it to follow it.")
        self.activity.begin("starting …")
        self.load(process.folder)

    def detach(self) -> None:
        """Follow this run no more; it continues in the background."""
        process, self.process = self.process, None
        if process is not None:
            process.release(self.activity)

    def _on_event(self, event: dict[str, Any]) -> None:
        if event["event"] == "progress":
            self._show_progress(event)
        elif event["event"] == "estimate":
            self._say(str(event.get("message", "")))
        elif event["event"] == "job":
            if event.get("status") == "failed":
                about = f"{event.get('task')}, {event.get('method')}, seed {event.get('seed')}"
                self._failed.append(f"{about}: {event.get('error')}")
                self._show_failures()
            self.load(self.out)

    def _show_progress(self, event: dict[str, Any]) -> None:
        text = self.activity.text
        if self.process is not None and not self.process.stopping:
            left = event.get("eta_seconds")
            eta = "" if left is None else f" · {format_duration(left)} left"
            text = f"{event['done']:,} of {event['total']:,} jobs{eta}"
            if event.get("message"):
                self._say(str(event["message"]))
        self.activity.report(text, float(event.get("fraction", 0)))

    def _stop(self) -> None:
        if self.process is not None and self.process.running:
            self.process.stop()
            self.activity.report("stopping …")

    def _on_end(self, end: RunEnd) -> None:
        if end.state is RunState.FINISHED:
            self.activity.report(self.activity.text, 1.0)
            self._say("Done." if not self._failed else "Done; some jobs failed.")
        self.activity.end()
        if end.state is RunState.STOPPED:
            self._say("Stopped; finished jobs and epochs are saved. Press Resume to continue.")
        elif end.message:
            self._say(end.message[:1].upper() + end.message[1:])
        self.load(self.out)
        self.ended.emit(end)

    def _say(self, text: str) -> None:
        self.message.setText(text)
        self.message.setVisible(bool(text))

    def _show_failures(self) -> None:
        count = count_of(len(self._failed), "job")
        self.failures.setText(f"⚠ {count} failed. " + "  ".join(self._failed[-3:]))
        self.failures.setVisible(bool(self._failed))

    def _show_activity(self) -> None:
        self.activity.show_on(self.bar, self.stop)
        for widget in (self.bar, self.stop):
            widget.setVisible(self.activity.shown_in_panel)

    # --- the table --------------------------------------------------------------------------------

    def load(self, out: Path | None) -> None:
        """Read the table of a folder off the GUI thread, and show it."""
        self.out = out
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
        self.open_page.setEnabled(self.out is not None and (self.out / PAGE_FILE).is_file())

    def copy_table(self) -> None:
        """Put the table on the clipboard, as a spreadsheet takes it."""
        if self.table_shown is not None:
            lines = [["method", *self.table_shown.titles()]]
            for line in self.table_shown.rows:
                lines.append([line.title, *self.table_shown.texts(line, lambda text, rank: text)])
            copy_text("\n".join("\t".join(cells) for cells in lines))

    def _open_page(self) -> None:
        if self.out is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self.out / PAGE_FILE)))

    def _open_folder(self) -> None:
        if self.out is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self.out)))


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
