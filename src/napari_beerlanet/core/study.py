"""Many images with the same settings: a study, on one machine or many, gone on with after a stop.

Images are independent of each other. Each is done by whoever is free, its results and then its
record written at once, so whatever dies (a worker, this process, a cluster's scheduler), what was
finished is kept and the rest is done by the next run.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from .cluster import SchedulerGone, on_cluster
from .files import FileError, remove
from .inputs import find_images, name_jobs
from .locks import FolderLock, LockedError
from .manifest import MANIFEST, RECORDS, Entry
from .progress import Report
from .studyimage import do_image
from .studysettings import StudySettings
from .studytables import FAILURES
from .studywatch import STOP, StudyProgress, StudyWatch

LOCK = ".lock"
"""A file in the folder of results, locked by the run that writes there."""

Tasks = Iterable[tuple[int, dict[str, Any]]]
Outcomes = Generator[tuple[int, dict[str, Any]]]
Runner = Callable[[Tasks], Outcomes]
"""Does numbered tasks in any order and gives back their outcomes as they come, and number −1 now
and then, perhaps with how far an image is, so that the caller can stop it by closing."""


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
        _tidy(out)
        watch = StudyWatch(out, entries, chosen, report, ended)
        watch.skip_done(overwrite)
        tasks = watch.tasks(overwrite, largest_first=scheduler is not None or workers > 1)
        _go_through(watch, _runner(workers, scheduler, watch.part), tasks)
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


def _tidy(out: Path) -> None:
    """Remove what was meant for an earlier run, and what was half-written when that was killed."""
    remove(out / STOP)
    for folder in (out, out / RECORDS):
        for unfinished in folder.glob(".*.partial*"):
            remove(unfinished)


def _go_through(watch: StudyWatch, run: Runner, tasks: Tasks) -> None:
    try:
        with closing(run(tasks)) as outcomes:
            for number, outcome in outcomes:
                if number < 0:
                    watch.hear(outcome)
                elif watch.take(number, outcome):
                    break
    except SchedulerGone as error:
        watch.stopped = str(error)
    finally:
        watch.finish()


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


__all__ = [
    "FAILURES",
    "LOCK",
    "MANIFEST",
    "STOP",
    "Study",
    "StudyProgress",
    "StudySettings",
    "run_study",
]
