"""Many images with the same settings: a study, on one machine or many, gone on with after a stop.

Images are independent of each other. Each is done by whoever is free, its results and then its
record written at once, so whatever dies (a worker, this process, a cluster's scheduler), what was
finished is kept and the rest is done by the next run.
"""

from __future__ import annotations

import csv
import os
import time
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from .files import FileError, atomic_path, remove
from .inputs import find_images, name_jobs
from .manifest import MANIFEST, Entry, find_record, write_manifest
from .progress import Progress, Report, tell
from .studyimage import WORK, StudySettings, do_image

SUMMARY, FAILURES = "summary", "failures.csv"
_EVERY = 2.0  # seconds between two writings of the manifest

Tasks = Iterable[tuple[int, dict[str, Any]]]
Outcomes = Generator[tuple[int, dict[str, Any]]]
Runner = Callable[[Tasks], Outcomes]
"""Does numbered tasks in any order and gives back their outcomes as they come, and number −1 now
and then, so that the caller can stop it by closing."""


@dataclass(frozen=True)
class Study:
    """What became of a study's images; `rows` are those of its table, in the order of images."""

    out: Path
    entries: list[Entry]
    rows: list[dict[str, Any]]
    stopped: str = ""

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
        A dask.distributed scheduler's address, or a `Client`, instead. Its workers must see the
        images and `out` under the same paths.
    report
        Told after each image; may raise `Cancelled`, and what was finished is kept.
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
    watch = _Watch(out, entries, chosen, report, ended)
    watch.skip_done(overwrite)
    run = _runner(workers, scheduler, watch.beat)
    try:
        with closing(run(watch.tasks(overwrite))) as outcomes:
            for number, outcome in outcomes:
                if number < 0:
                    watch.beat()
                elif watch.take(number, outcome):
                    break
    finally:
        watch.finish()
    return Study(out, entries, watch.rows(), watch.stopped)


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
        self._end(entry, outcome)
        self._write()
        if outcome.get("hopeless"):
            left = sum(e.status == "waiting" for e in self.entries)
            self.stopped = f"{entry.error.rstrip('.')}; stopped with {left} more to do."
        self._told = entry.job.source.name
        self.beat()
        return bool(self.stopped)

    def beat(self, progress: Progress | None = None) -> None:
        """Tell how far it is, and let the caller stop it."""
        done = sum(e.status != "waiting" for e in self.entries)
        what = self._told if progress is None else progress.message
        tell(self.report, done, len(self.entries), what)

    def rows(self) -> list[dict[str, Any]]:
        return [e.record["row"] for e in self.entries if "row" in e.record]

    def finish(self) -> None:
        """Manifest, table and failures as things stand; a full disk must not hide why."""
        try:
            self._write(at_once=True)
            write_summary(self.out, self.rows())
            _write_failures(self.out, self.entries)
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


def write_summary(out: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """The study's table, a row per image: CSV, and Parquet where pyarrow is there."""
    import pandas as pd

    frame = pd.DataFrame(list(rows))
    paths = [out / f"{SUMMARY}.csv"]
    with atomic_path(paths[0]) as unfinished:
        frame.to_csv(unfinished, index=False)
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        return paths
    paths.append(out / f"{SUMMARY}.parquet")
    with atomic_path(paths[1]) as unfinished:
        frame.to_parquet(unfinished, index=False)
    return paths


def _write_failures(out: Path, entries: Sequence[Entry]) -> None:
    failed = [e for e in entries if e.status == "failed"]
    if not failed:
        remove(out / FAILURES)
        return
    with (
        atomic_path(out / FAILURES) as unfinished,
        unfinished.open("w", newline="", encoding="utf-8") as file,
    ):
        writer = csv.writer(file)
        writer.writerow(["path", "error"])
        writer.writerows([str(e.job.source), e.error] for e in failed)


def _with_model(settings: StudySettings | Mapping[str, Any] | None) -> StudySettings:
    chosen = settings if isinstance(settings, StudySettings) else StudySettings.of(settings or {})
    if not chosen.model:
        return chosen
    from .checkpoint import checkpoint_hash

    name = chosen.model
    place = str(Path(name).absolute()) if Path(name).exists() else name
    return replace(chosen, model=place, model_sha256=checkpoint_hash(name))


def _runner(workers: int, scheduler: Any, beat: Report) -> Runner:
    if scheduler is not None:
        from .cluster import on_cluster

        return on_cluster(scheduler)
    if workers > 0:
        from .processes import in_processes

        return in_processes(workers)
    return lambda tasks: ((number, do_image(task, beat)) for number, task in tasks)


__all__ = ["FAILURES", "MANIFEST", "Study", "StudySettings", "run_study", "write_summary"]
