"""`run_benchmark`: every method on every task with every seed, and the paper's table of it.

Each combination is a job of its own, see `core.common.jobs`: processes on this machine or a dask
cluster, resumable at any moment. The tables are written anew whenever a job has ended.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from napari_beerlanet.core.benchmark.data import check_task
from napari_beerlanet.core.benchmark.estimate import BenchmarkEstimate, estimate_jobs
from napari_beerlanet.core.benchmark.job import (
    PICTURES_FOLDER,
    RUNS_FOLDER,
    WORK_FOLDER,
    BenchmarkJob,
    TaskData,
    find_record,
)
from napari_beerlanet.core.benchmark.settings import METHODS, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import PAGE_FILE, TABLE_FILES, ResultTable, table_of
from napari_beerlanet.core.common.jobs import (
    RECORDS_FOLDER,
    STOP_FILE,
    JobEntry,
    JobMonitor,
    JobProgress,
    lock_results,
)
from napari_beerlanet.core.common.messages import path_text, system_reason
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.common.storage import (
    FileError,
    atomic_path,
    check_no_linked_folder,
    remove_path,
)
from napari_beerlanet.core.common.workers import choose_runner

FAILURES_FILE = "failures.csv"
_WRITE_INTERVAL_S = 5.0


@dataclass
class BenchmarkEntry(JobEntry):
    """A job of a benchmark and its outcome; `weight`: seconds that it is expected to take."""

    job: BenchmarkJob
    weight: float = 1.0

    @property
    def title(self) -> str:
        """Task, method and seed."""
        return self.job.title


@dataclass(frozen=True)
class BenchmarkProgress(JobProgress):
    """Jobs that have ended, of all; jobs count by the time that they are expected to take.

    `finished_work` is the part of all that has ended or is under way, `skipped_work` the part that
    had been done before.
    """

    finished_work: float = 0.0
    skipped_work: float = 0.0

    @property
    def fraction(self) -> float:
        """Between 0 and 1."""
        return min(self.finished_work, 1.0)

    def eta(self, elapsed: float) -> float | None:
        """Seconds still to go after `elapsed`, None while that would be no more than a guess."""
        from napari_beerlanet.core.common.progress import eta_seconds

        skipped = min(self.skipped_work, 1.0)
        return eta_seconds(elapsed, (self.fraction - skipped) / max(1 - skipped, 1e-9))


@dataclass(frozen=True)
class BenchmarkResult:
    """The outcome of a benchmark; `stopped` says why it ended before its time."""

    out: Path
    table: ResultTable
    entries: list[BenchmarkEntry]
    records: list[dict[str, Any]]
    stopped: str = ""
    notes: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        """How many jobs are "done", "skipped", "failed" or "waiting"."""
        return sum(entry.status == status for entry in self.entries)

    @property
    def failures(self) -> dict[str, str]:
        """Error messages by the job's title."""
        return {e.title: e.error for e in self.entries if e.status == "failed"}

    @property
    def page(self) -> Path:
        """The HTML page."""
        return self.out / PAGE_FILE


def run_benchmark(
    settings: BenchmarkSettings | str | os.PathLike[str] | Mapping[str, Any],
    output: str | os.PathLike[str],
    *,
    workers: int = 1,
    scheduler: Any = None,
    paper: bool = False,
    estimate: BenchmarkEstimate | None = None,
    report: Callable[[BenchmarkProgress], None] | None = None,
    ended: Callable[[BenchmarkEntry], None] | None = None,
) -> BenchmarkResult:
    """Train and measure every method on every task with every seed; the paper's table of it.

    Parameters
    ----------
    settings
        A benchmark.yaml, or its content, see `core.benchmark.settings`.
    output
        The results folder: table.md, .tex and .csv, benchmark.html, and a record per job. Jobs that
        are done there with the same settings and data are left as they are, and a training that was
        interrupted is resumed.
    workers
        Processes on this machine; 0 does everything in this one.
    scheduler
        Instead, a dask.distributed scheduler's address, a `Client`, or a cluster. Its workers must
        see the data and `output` under the same paths.
    paper
        Show the paper's own table on the page, too.
    estimate
        What `estimate_benchmark` found, so that the remaining time is known from the start.
    report
        Called with a `BenchmarkProgress` now and then; may raise `Cancelled`, and what is finished
        is saved. A file called "stop" in `output` does the same.
    ended
        Called with each job that is done, skipped or failed.
    """
    chosen = read_settings(settings)
    check_benchmark(chosen)
    out = Path(output).absolute()
    out.mkdir(parents=True, exist_ok=True)
    check_no_linked_folder(out, RECORDS_FOLDER, RUNS_FOLDER, PICTURES_FOLDER, WORK_FOLDER)
    lock = lock_results(out, PICTURES_FOLDER)
    try:
        monitor = BenchmarkMonitor(out, chosen, paper, report, ended)
        chosen.write(out)
        run = choose_runner(workers, scheduler, monitor.progress_of)
        try:
            monitor.skip_done()
            monitor.weigh(estimate)
            monitor.report_progress()
            monitor.collect(run, monitor.tasks())
        finally:
            monitor.finish()
    finally:
        lock.release()
    return BenchmarkResult(
        out, monitor.table(), monitor.entries, monitor.records(), monitor.stopped, monitor.notes
    )


def read_settings(
    given: BenchmarkSettings | str | os.PathLike[str] | Mapping[str, Any],
) -> BenchmarkSettings:
    """Settings from what `run_benchmark` takes."""
    if isinstance(given, BenchmarkSettings):
        return given
    if isinstance(given, Mapping):
        return BenchmarkSettings(**given).resolved(Path.cwd())
    return BenchmarkSettings.read(given)


def check_benchmark(settings: BenchmarkSettings) -> None:
    """Refuse what cannot work before anything is trained; one sentence says what."""
    if settings.template != "random" and not os.path.isfile(settings.template):
        raise FileError(f"{path_text(settings.template)}: the template is no file that is there.")
    for task in settings.tasks:
        check_task(task)
    if "staingan" in settings.methods:
        from napari_beerlanet.core.training.staingan import StainGanSettings

        StainGanSettings(**settings.staingan)


def estimate_benchmark(
    settings: BenchmarkSettings | str | os.PathLike[str] | Mapping[str, Any],
    output: str | os.PathLike[str],
    *,
    workers: int = 1,
    report: Report | None = None,
) -> BenchmarkEstimate:
    """How long `run_benchmark` will take, from trainings of which a step is timed here.

    What is done in `output` counts as done, and tells how long others of its kind take.
    """
    chosen = read_settings(settings)
    check_benchmark(chosen)
    out, data = Path(output).absolute(), {task.name: TaskData(task) for task in chosen.tasks}
    records = [(job, find_record(out, job, data[job.task.name])) for job in list_jobs(chosen)]
    done = [(job, record) for job, record in records if record is not None]
    left = [job for job, record in records if record is None]
    return estimate_jobs(left, done, workers, report)


def list_jobs(settings: BenchmarkSettings) -> list[BenchmarkJob]:
    """All jobs, seed by seed, so that the table fills evenly."""
    return [
        BenchmarkJob(settings, task, METHODS[method], seed)
        for seed in settings.seeds
        for task in settings.tasks
        for method in settings.methods
    ]


class BenchmarkMonitor(JobMonitor[BenchmarkEntry]):
    """Keeps the entries and the tables of a benchmark up to date."""

    def __init__(
        self,
        out: Path,
        settings: BenchmarkSettings,
        paper: bool = False,
        report: Callable[[BenchmarkProgress], None] | None = None,
        ended: Callable[[BenchmarkEntry], None] | None = None,
    ) -> None:
        super().__init__(out, [BenchmarkEntry(job) for job in list_jobs(settings)], report, ended)
        self.settings, self.paper = settings, paper
        self.notes: list[str] = []
        self._last_write = 0.0
        self._data = {task.name: TaskData(task) for task in settings.tasks}

    def skip_done(self) -> None:
        """Mark what an earlier run has done."""
        for entry in self.entries:
            record = find_record(self.out, entry.job, self._data[entry.job.task.name])
            if record is not None:
                self.end(entry, {"status": "skipped", "record": record})

    def weigh(self, estimate: BenchmarkEstimate | None) -> None:
        """How long each job may take, by an estimate or as others of its kind took."""
        measured: dict[tuple[str, str], list[float]] = {}
        for entry in self.entries:
            seconds = sum((entry.record.get("seconds") or {}).values())
            if seconds:
                job = entry.job
                measured.setdefault((job.task.name, job.method.name), []).append(seconds)
        known = [value for values in measured.values() for value in values]
        usual = sum(known) / len(known) if known else 1.0
        for entry in self.entries:
            mine = measured.get((entry.job.task.name, entry.job.method.name))
            entry.weight = sum(mine) / len(mine) if mine else usual
            if estimate is not None and entry.job.name in estimate.jobs:
                entry.weight = max(estimate.jobs[entry.job.name], 1e-3)

    def tasks(self) -> list[tuple[int, dict[str, Any]]]:
        """A task for every job that is left."""
        return [
            (number, entry.job.as_task(self.out))
            for number, entry in enumerate(self.entries)
            if entry.status == "waiting"
        ]

    def on_outcome(self, entry: BenchmarkEntry, outcome: Mapping[str, Any]) -> None:
        """Write the tables now and then, and keep what a person should know."""
        self.notes += [note for note in outcome.get("notes", []) if note not in self.notes]
        now = time.monotonic()
        if now - self._last_write > _WRITE_INTERVAL_S:
            self._last_write = now
            with suppress(OSError, FileError):  # said by the job that meets it
                self.write_tables()

    def make_progress(self, done: int, skipped: int) -> BenchmarkProgress:
        """How far the benchmark is."""
        total = sum(entry.weight for entry in self.entries) or 1.0
        ended = sum(e.weight for e in self.entries if e.status != "waiting")
        partly = sum(self.entries[k].weight * part for k, part in self.fractions.items())
        before = sum(e.weight for e in self.entries if e.status == "skipped")
        return BenchmarkProgress(
            done,
            len(self.entries),
            self.message,
            sum(self.fractions.values()),
            skipped,
            (ended + partly) / total,
            before / total,
        )

    def records(self) -> list[dict[str, Any]]:
        """Of all jobs that are done."""
        return [entry.record for entry in self.entries if entry.record]

    def table(self) -> ResultTable:
        """As things stand."""
        return table_of(self.settings, self.records())

    def finish(self) -> None:
        """Tables, page and failures as things stand; a full disk must not hide why."""
        with suppress(OSError):
            remove_path(self.out / STOP_FILE)
        try:
            self.write_tables()
        except (OSError, FileError) as error:
            if not self.stopped:
                why = system_reason(error) if isinstance(error, OSError) else str(error)
                self.stopped = f"{self.out}: {why.rstrip('.')}."

    def write_tables(self) -> None:
        """Markdown, LaTeX, CSV, the page, and what failed."""
        from napari_beerlanet.core.benchmark.page import spread_text, write_benchmark_page

        table = self.table()
        caption = (
            f"{spread_text(len(self.settings.seeds))}. The best and the second-best results are "
            "bold or starred (*), respectively."
        )
        texts = (table.markdown(), table.latex(caption), table.csv(), table.values_csv())
        for name, text in zip(TABLE_FILES, texts, strict=True):
            _write_text(self.out / name, text)
        failures = {e.title: e.error for e in self.entries if e.status == "failed"}
        write_benchmark_page(
            self.out / PAGE_FILE, self.settings, table, self.records(), failures, self.paper
        )
        self._write_failures(failures)

    def _write_failures(self, failures: Mapping[str, str]) -> None:
        path = self.out / FAILURES_FILE
        if not failures:
            remove_path(path)
            return
        with (
            atomic_path(path) as unfinished,
            unfinished.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.writer(file)
            writer.writerow(["job", "error"])
            writer.writerows(failures.items())


def _write_text(path: Path, text: str) -> None:
    with atomic_path(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
