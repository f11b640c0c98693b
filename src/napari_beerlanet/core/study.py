"""Many images with the same settings: a study, on one machine or many, gone on with after a stop.

Images are independent of each other. Each is done by whoever is free, its results and then its
record written at once, so whatever dies (a worker, this process, a cluster's scheduler), what was
finished is kept and the rest is done by the next run.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .cluster import SchedulerGone, on_cluster
from .files import FileError, remove
from .inputs import find_images, name_jobs
from .locks import FolderLock, LockedError
from .manifest import MANIFEST, Entry, find_record, write_manifest
from .progress import Cancelled, Progress, Report
from .studyimage import WORK, do_image
from .studysettings import StudySettings
from .studytables import FAILURES, NO_PARQUET, write_failures, write_summary

LOCK, STOP = ".lock", "stop"
"""In the folder of results: held by the run that writes there, and made by whoever wants it to
end."""

_EVERY = 2.0  # seconds between two writings of the manifest

Tasks = Iterable[tuple[int, dict[str, Any]]]
Outcomes = Generator[tuple[int, dict[str, Any]]]
Runner = Callable[[Tasks], Outcomes]
"""Does numbered tasks in any order and gives back their outcomes as they come, and number −1 now
and then, perhaps with how far an image is, so that the caller can stop it by closing."""


@dataclass(frozen=True)
class StudyProgress(Progress):
    """Images that have ended, of all; `partly` is what is done of those under way, in images.

    `skipped` is how many had been done before, which says nothing on how long the others take.
    """

    partly: float = 0.0
    skipped: int = 0

    def left(self, elapsed: float) -> float | None:
        """Seconds still to go after so many, None while that would be no more than a guess."""
        begun = self.skipped / max(self.total, 1)
        done = self.fraction - begun
        enough = elapsed > 1 and done > 0.02 * (1 - begun)
        return elapsed * (1 - self.fraction) / done if enough else None

    @property
    def fraction(self) -> float:
        """Between 0 and 1, the parts of images under way included."""
        return min((self.done + self.partly) / self.total, 1.0) if self.total > 0 else 0.0


@dataclass(frozen=True)
class Study:
    """What became of a study's images; `rows` are those of its table, in the order of images.

    `stopped` says why it ended before its time, `notes` what a person should know.
    """

    out: Path
    entries: list[Entry]
    rows: list[dict[str, Any]]
    stopped: str = ""
    notes: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        """How many images are "done", "skipped", "failed" or "waiting"."""
        return sum(entry.status == status for entry in self.entries)

    @property
    def failures(self) -> dict[str, str]:
        """What went wrong, by the image's path."""
        return {str(e.job.source): e.error for e in self.entries if e.status == "failed"}


def run_study(
    images: str | Path | Sequence[str | Path],
    out: str | Path,
    settings: StudySettings | Mapping[str, Any] | None = None,
    *,
    workers: int = 1,
    scheduler: Any = None,
    recursive: bool = False,
    overwrite: bool = False,
    report: Report | None = None,
    ended: Callable[[Entry], None] | None = None,
) -> Study:
    """Decompose many images, find and measure their objects, and write a table over all.

    Parameters
    ----------
    images
        Files, folders, or patterns such as "slides/*.svs".
    out
        The folder for results. What is done there with the same settings is left as it is.
    workers
        Processes on this machine; 0 does everything in this one.
    scheduler
        Instead, a dask.distributed scheduler's address, a `Client`, or a cluster such as
        dask-jobqueue's. Its workers must see the images and `out` under the same paths.
    report
        Told a `StudyProgress` now and then; may raise `Cancelled`, and what was finished is kept.
        So does a file called "stop" in `out`.
    ended
        Called with each image that is done, skipped or failed.
    """
    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    chosen = _with_model(settings)
    given = [images] if isinstance(images, (str, Path)) else images
    found = find_images(map(str, given), out, recursive)
    sources = [Path(os.path.abspath(path)) for path in found]
    entries = [Entry(job) for job in name_jobs(sources)]
    if not entries:
        raise FileError("There are no images in what was given, only results of ours.")
    lock = _locked(out)
    try:
        remove(out / STOP)  # it was meant for an earlier run
        watch = _Watch(out, entries, chosen, report, ended)
        watch.skip_done(overwrite)
        _go_through(watch, _runner(workers, scheduler, watch.part), overwrite)
    finally:
        lock.release()
    return Study(out, entries, watch.rows(), watch.stopped, watch.notes)


def _locked(out: Path) -> FolderLock:
    try:
        return FolderLock(out / LOCK)
    except LockedError as error:
        who = error.owner.get("process", "unknown")
        raise FileError(
            f"{out}: another run (process {who}) writes its results there; wait for it to end, "
            "stop it, or choose another folder."
        ) from error


def _go_through(watch: _Watch, run: Runner, overwrite: bool) -> None:
    try:
        with closing(run(watch.tasks(overwrite))) as outcomes:
            for number, outcome in outcomes:
                if number < 0:
                    watch.hear(outcome)
                elif watch.take(number, outcome):
                    break
    except SchedulerGone as error:
        watch.stopped = str(error)
    finally:
        watch.finish()


class _Watch:
    """Keeps the entries, the manifest and the table up to date."""

    def __init__(
        self,
        out: Path,
        entries: list[Entry],
        settings: StudySettings,
        report: Report | None,
        ended: Callable[[Entry], None] | None,
    ) -> None:
        self.out, self.entries, self.settings = out, entries, settings
        self.report, self.ended, self.stopped = report, ended, ""
        self.notes: list[str] = []
        self._partly: dict[int, float] = {}
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._written, self._told = 0.0, ""

    def skip_done(self, overwrite: bool) -> None:
        """Mark what an earlier run has done."""
        digest = self.settings.hash()
        for entry in self.entries if not overwrite else []:
            _, record = find_record(self.out, entry.job, digest)
            if record is not None:
                self._end(entry, {"status": "skipped", "record": record})
        self._write(at_once=True)

    def tasks(self, overwrite: bool) -> list[tuple[int, dict[str, Any]]]:
        """What is left to do."""
        shared = {"out": str(self.out), "overwrite": overwrite, "settings": asdict(self.settings)}
        return [
            (k, {"source": str(entry.job.source), "name": entry.job.name, **shared})
            for k, entry in enumerate(self.entries)
            if entry.status == "waiting"
        ]

    def take(self, number: int, outcome: Mapping[str, Any]) -> bool:
        """Note what became of an image; whether it makes no sense to go on."""
        entry = self.entries[number]
        self._partly.pop(number, None)
        self._end(entry, outcome)
        self._write()
        if outcome.get("hopeless"):
            left = sum(e.status == "waiting" for e in self.entries)
            self.stopped = f"{entry.error.rstrip('.')}; stopped with {left} more to do."
        self._told = entry.job.source.name
        self.beat()
        return bool(self.stopped)

    def hear(self, outcome: Mapping[str, Any]) -> None:
        """Take how far an image is, where that is told."""
        if "image" in outcome:
            self._partly[outcome["image"]] = float(outcome["fraction"])
            self._told = f"{self.entries[outcome['image']].job.source.name}: {outcome['message']}"
        self.beat()

    def part(self, number: int) -> Report:
        """A report of one image that is done in this process."""
        return lambda p: self.hear({"image": number, "fraction": p.fraction, "message": p.message})

    def beat(self) -> None:
        """Tell how far it is, and let the caller, or a file, stop it."""
        if (self.out / STOP).exists():
            raise Cancelled("stopped as asked")
        if self.report is not None:
            done, skipped = (
                sum(e.status in which for e in self.entries)
                for which in (("done", "skipped", "failed"), ("skipped",))
            )
            partly = sum(self._partly.values())
            self.report(StudyProgress(done, len(self.entries), self._told, partly, skipped))

    def rows(self) -> list[dict[str, Any]]:
        return [e.record["row"] for e in self.entries if "row" in e.record]

    def finish(self) -> None:
        """Manifest, table and failures as things stand; a full disk must not hide why."""
        try:
            with suppress(OSError):
                remove(self.out / STOP)
            self._write(at_once=True)
            if len(write_summary(self.out, self.rows())) < 2:
                self.notes.append(NO_PARQUET)
            write_failures(self.out, self.entries)
            work = self.out / WORK
            if work.is_dir() and not any(work.iterdir()):
                remove(work)
        except OSError as error:
            if not self.stopped:
                self.stopped = f"{self.out}: {(error.strerror or str(error)).lower()}."

    def _end(self, entry: Entry, outcome: Mapping[str, Any]) -> None:
        entry.status = outcome["status"]
        entry.error, entry.record = outcome.get("error", ""), outcome.get("record", {})
        if self.ended is not None:
            self.ended(entry)

    def _write(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if at_once or now - self._written > _EVERY:
            try:
                write_manifest(self.out, self.entries, asdict(self.settings), self._started)
            except OSError:
                if at_once:
                    raise
            self._written = now


def _with_model(settings: StudySettings | Mapping[str, Any] | None) -> StudySettings:
    chosen = settings if isinstance(settings, StudySettings) else StudySettings.of(settings or {})
    if not chosen.model:
        return chosen
    from .checkpoint import checkpoint_hash

    name = chosen.model
    place = str(Path(name).absolute()) if Path(name).exists() else name
    return replace(chosen, model=place, model_sha256=checkpoint_hash(name))


def _runner(workers: int, scheduler: Any, part: Callable[[int], Report]) -> Runner:
    if scheduler is not None:
        return on_cluster(scheduler)
    if workers > 0:
        from .processes import in_processes

        return in_processes(workers)
    return lambda tasks: ((number, do_image(task, part(number))) for number, task in tasks)


__all__ = ["FAILURES", "LOCK", "MANIFEST", "STOP", "Study", "StudySettings", "run_study"]
