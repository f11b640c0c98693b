"""The jobs of a run that writes into one folder: their states, how far they are, and how it stops.

Jobs are independent of each other. Whoever is free does the next one and writes its results and
then its record at once, so whatever dies (a worker, this process, a cluster's scheduler), what is
finished is saved and the next run does the rest.

An outcome is a plain dict: "status" ("done", "skipped" or "failed"), "record", "error" (one
sentence), "traceback", "seconds", and "fatal", which says what is wrong where every other job would
fail, too.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

from napari_beerlanet.core.common.locking import FolderLock
from napari_beerlanet.core.common.messages import error_message, system_reason
from napari_beerlanet.core.common.progress import Cancelled, Progress, Report, eta_seconds
from napari_beerlanet.core.common.storage import FileError, remove_partial_files, remove_path
from napari_beerlanet.core.common.workers import SchedulerLostError, TaskRunner, Tasks

LOCK_FILE = ".lock"
"""A file in the results folder, locked by the run that writes there."""

STOP_FILE = "stop"
"""A file in the results folder, made by whoever wants the run to end."""

RECORDS_FOLDER = "records"

_FATAL_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EROFS}
_FULL_DISK_BYTES = 1 << 16  # with less than this left, a library's own error is that of a full disk

JobStatus = Literal["waiting", "done", "skipped", "failed"]


def lock_results(out: Path, *folders: str) -> FolderLock:
    """The lock of a results folder, without what was meant for, or left by, an earlier run.

    `folders` in it hold files of results, as that of the records does.
    """
    try:
        lock = FolderLock(
            out / LOCK_FILE,
            busy="another run writes its results there",
            advice="wait for it to end, stop it, or choose another folder",
        )
    except OSError as error:
        raise FileError(
            f"{out}: cannot be written to ({system_reason(error)}); choose another folder."
        ) from error
    remove_path(out / STOP_FILE)
    remove_half_written(out, *folders)
    return lock


def remove_half_written(out: Path, *folders: str) -> None:
    """Remove what a killed run, or a killed worker of this one, was writing to a results folder."""
    for folder in (out, out / RECORDS_FOLDER, *(out / name for name in folders)):
        with suppress(OSError):
            remove_partial_files(folder)


def attempt_job(work: Callable[[], dict[str, Any]], out: Path) -> dict[str, Any]:
    """The outcome of `work`, which returns it without its time; or how it failed.

    `Cancelled` is passed on. A full disk, on which `out` is, is an error of all jobs.
    """
    started = time.monotonic()
    try:
        return {"status": "done", **work(), "seconds": time.monotonic() - started}
    except Cancelled:
        raise
    except Exception as error:
        return {
            "status": "failed",
            "error": error_message(error),
            "fatal": _fatal_reason(error, out),
            "traceback": traceback.format_exc(),
        }


def _fatal_reason(error: Exception, out: Path) -> str:
    number = error.errno if isinstance(error, OSError) else None
    if number is None and isinstance(error, RuntimeError):  # torch does not say why it cannot write
        try:
            full = shutil.disk_usage(out).free < _FULL_DISK_BYTES
        except OSError:
            full = False
        number = errno.ENOSPC if full else None
    return os.strerror(number).lower() if number in _FATAL_ERRNOS else ""


@dataclass(kw_only=True)
class JobEntry:
    """A job of a run and its outcome; `error` is one sentence.

    A `fatal` error is one that every other job would meet, too, such as a full disk.
    """

    status: JobStatus = "waiting"
    error: str = ""
    record: dict[str, Any] = field(default_factory=dict)
    traceback: str = ""
    fatal: bool = False
    seconds: float = 0.0

    @property
    def title(self) -> str:
        """What it is called in messages."""
        raise NotImplementedError


@dataclass(frozen=True)
class JobProgress(Progress):
    """Jobs that have ended, of all; `in_progress` is the sum of the fractions of others.

    `skipped` is how many had been done before, which says nothing on how long the others take.
    `notice` is a sentence on why nothing happens, while nothing does.
    """

    in_progress: float = 0.0
    skipped: int = 0
    notice: str = field(default="", kw_only=True)

    @property
    def fraction(self) -> float:
        """Between 0 and 1, jobs in progress included."""
        done = self.done + self.in_progress
        return min(done / self.total, 1.0) if self.total > 0 else 0.0

    def eta(self, elapsed: float) -> float | None:
        """Seconds still to go after `elapsed`, None while that would be no more than a guess."""
        skipped = self.skipped / max(self.total, 1)
        return eta_seconds(elapsed, (self.fraction - skipped) / max(1 - skipped, 1e-9))


Entry = TypeVar("Entry", bound=JobEntry)


class JobMonitor(Generic[Entry]):
    """Keeps the entries of a run up to date, reports how far it is, and stops it.

    `stopped` says why it ended before its time. A file "stop" in `out` ends it where `stop_file`.
    """

    def __init__(
        self,
        out: Path,
        entries: Sequence[Entry],
        report: Callable[[Any], None] | None,
        ended: Callable[[Entry], None] | None,
        stop_file: bool = True,
    ) -> None:
        self.out, self.entries, self.report, self.ended = out, list(entries), report, ended
        self.stopped, self.message, self._stop_file = "", "", stop_file
        self.notice = ""
        self.fractions: dict[int, float] = {}

    def collect(self, run: TaskRunner, tasks: Tasks) -> None:
        """Run the tasks and take their outcomes, until all have ended or the run must stop."""
        try:
            with closing(run(tasks)) as outcomes:
                for number, outcome in outcomes:
                    if number < 0:
                        self.on_worker_progress(outcome)
                    elif self.record_outcome(number, outcome):
                        break
        except SchedulerLostError as error:
            self.stopped = str(error)

    def record_outcome(self, number: int, outcome: Mapping[str, Any]) -> bool:
        """Take the outcome of a job; whether the run must stop."""
        entry = self.entries[number]
        self.fractions.pop(number, None)
        self.end(entry, outcome)
        self.on_outcome(entry, outcome)
        if entry.fatal:
            left = sum(e.status == "waiting" for e in self.entries)
            self.stopped = f"{outcome['fatal']} in {self.out}; stopped with {left} more to do."
        self.message = entry.title
        self.report_progress()
        return bool(self.stopped)

    def end(self, entry: Entry, outcome: Mapping[str, Any]) -> None:
        """A job has ended so."""
        entry.status, entry.error = outcome["status"], outcome.get("error", "")
        entry.record, entry.fatal = outcome.get("record", {}), bool(outcome.get("fatal"))
        entry.traceback, entry.seconds = outcome.get("traceback", ""), outcome.get("seconds", 0.0)
        if self.ended is not None:
            self.ended(entry)

    def on_outcome(self, entry: Entry, outcome: Mapping[str, Any]) -> None:
        """Called when a job has ended, for what is written over all of them."""

    def on_worker_progress(self, outcome: Mapping[str, Any]) -> None:
        """Take the progress of a job, where there is any, or a notice on all of them."""
        self.notice = outcome.get("notice", self.notice)
        number = outcome.get("task")
        if number is not None and self.entries[number].status == "waiting":  # not a late report
            self.fractions[number] = float(outcome["fraction"])
            self.message = f"{self.entries[number].title}: {outcome['message']}"
        self.report_progress()

    def progress_of(self, number: int) -> Report:
        """A report for one job that is done in this process."""
        return lambda p: self.on_worker_progress(
            {"task": number, "fraction": p.fraction, "message": p.message}
        )

    def report_progress(self) -> None:
        """Report the progress, and let the caller, or a file, stop the run."""
        if self._stop_file and (self.out / STOP_FILE).exists():
            raise Cancelled("stopped as requested")
        if self.report is not None:
            done, skipped = (
                sum(e.status in which for e in self.entries)
                for which in (("done", "skipped", "failed"), ("skipped",))
            )
            progress = self.make_progress(done, skipped)
            if self.notice:
                progress = replace(progress, message=self.notice, notice=self.notice)
            self.report(progress)

    def make_progress(self, done: int, skipped: int) -> JobProgress:
        """How far the run is."""
        partly = sum(self.fractions.values())
        return JobProgress(done, len(self.entries), self.message, partly, skipped)
