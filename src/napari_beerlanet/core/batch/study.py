"""Batch processing of many images with one set of settings; resumable, local or on a dask cluster.

Each image is a job of its own, see `core.common.jobs`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from napari_beerlanet.core.batch.image import SIZE_FILE, WORK_FOLDER
from napari_beerlanet.core.batch.inputs import find_images, name_jobs
from napari_beerlanet.core.batch.manifest import (
    NO_PARQUET_NOTE,
    Layout,
    Records,
    StudyEntry,
    write_failures,
    write_manifest,
    write_summary,
)
from napari_beerlanet.core.batch.outputs import YOLO_FOLDER
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.common.jobs import (
    RECORDS_FOLDER,
    STOP_FILE,
    JobMonitor,
    JobProgress,
    lock_results,
    remove_half_written,
)
from napari_beerlanet.core.common.messages import system_reason
from napari_beerlanet.core.common.storage import (
    FileError,
    check_no_linked_folder,
    file_hash,
    file_stamp,
    remove_path,
)
from napari_beerlanet.core.common.workers import TaskRunner, choose_runner

PAGE_FILE = "smear.html"
"""The report of one page on all images of a study, if it has such reports."""

_MANIFEST_INTERVAL_S = 2.0
_MIN_IMAGES, _SIZE_FIELDS = 3, 5  # of a study of which some tell the size of objects in all
_WORK = "napari_beerlanet.core.batch.image:process_image"  # of a task, see `core.common.workers`


class NoImagesError(FileError):
    """Nothing that was given is an image to process."""


@dataclass(frozen=True)
class StudyResult:
    """The outcome of a study; `rows` are those of its summary table, in the order of images.

    `stopped` says why it ended before its time, `notes` what a person should know; among these,
    `limits` are what the models do not know.
    """

    out: Path
    entries: list[StudyEntry]
    rows: list[dict[str, Any]]
    stopped: str = ""
    notes: list[str] = field(default_factory=list)
    limits: list[str] = field(default_factory=list)

    def count(self, status: str) -> int:
        """How many images are "done", "skipped", "failed" or "waiting"."""
        return sum(entry.status == status for entry in self.entries)

    @property
    def failures(self) -> dict[str, str]:
        """Error messages by the image's path."""
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
    report: Callable[[StudyProgress], None] | None = None,
    ended: Callable[[StudyEntry], None] | None = None,
    layout: Layout = "study",
) -> StudyResult:
    """Decompose or normalize many images, detect, measure and classify their objects.

    A table over all of them comes with it.

    Parameters
    ----------
    images
        Files, folders, or patterns such as "slides/*.svs".
    out
        The results folder. What is done there with the same settings is left as it is.
    settings
        As `StudySettings`, or as a dict of them.
    workers
        Processes on this machine; 0 does everything in this one.
    scheduler
        Instead, a dask.distributed scheduler's address, a `Client`, or a cluster such as
        dask-jobqueue's. Its workers must see the images and `out` under the same paths.
    recursive
        Include subfolders.
    overwrite
        Process images again that are done.
    report
        Called with a `StudyProgress` now and then; may raise `Cancelled`, and what is finished is
        saved. A file called "stop" in `out` does the same.
    ended
        Called with each image that is done, skipped or failed.
    layout
        "study": records, a manifest and tables beside the results; "files": the results alone;
        "report": nothing but the report.
    """
    chosen = _resolve_models(settings)
    out = Path(out).absolute()
    out.mkdir(parents=True, exist_ok=True)
    check_no_linked_folder(out, RECORDS_FOLDER, WORK_FOLDER, YOLO_FOLDER)
    given = [images] if isinstance(images, (str, Path)) else images
    paths = find_images(map(str, given), out, recursive)
    entries = [
        StudyEntry(job) for job in name_jobs([Path(os.path.abspath(path)) for path in paths])
    ]
    if not entries:
        raise NoImagesError("There are no images in what was given, only results of earlier runs.")
    with ExitStack() as stack:
        if layout == "study":
            stack.callback(lock_results(out).release)
        monitor = StudyMonitor(out, entries, chosen, layout, report, ended)
        run = choose_runner(workers, scheduler, monitor.progress_of)
        try:
            _collect_outcomes(monitor, run, overwrite, scheduler is not None or workers > 1)
        finally:
            # Workers of a cluster may still be at work on images that are not waited for.
            at_work = scheduler is not None and any(e.status == "waiting" for e in entries)
            if layout == "study" and not at_work:
                remove_half_written(out)
    return StudyResult(out, entries, monitor.rows(), monitor.stopped, monitor.notes, monitor.limits)


def _resolve_models(settings: StudySettings | Mapping[str, Any] | None) -> StudySettings:
    """With the hashes of the models; what does not fit together is a `ValueError` before all."""
    chosen = settings if isinstance(settings, StudySettings) else StudySettings(**(settings or {}))
    from napari_beerlanet.core.checkpoints.checkpoint import check_kind, checkpoint_hash

    for kind, name in (("model", chosen.model), ("classifier", chosen.classifier)):
        if name:
            check_kind(name, "classifier" if kind == "classifier" else "detector")
            place = str(Path(name).absolute()) if os.path.exists(name) else name
            chosen = chosen.replace(**{kind: place, f"{kind}_sha256": checkpoint_hash(name)})
    if chosen.normalizer:
        from napari_beerlanet.core.normalization.methods import load_normalizer

        load_normalizer(chosen.normalizer)
        file = Path(chosen.normalizer).absolute()
        chosen = chosen.replace(normalizer=str(file), normalizer_sha256=file_hash(file))
    if chosen.model and Path(chosen.model).suffix.lower() != ".pt":  # which does not say
        _check_classes(chosen)
    return chosen


def _check_classes(settings: StudySettings) -> None:
    """Whether the detector has classes for the classifier, and both for the report."""
    from napari_beerlanet.core.boxes.classes import classes_to_classify, infected_types, is_infected
    from napari_beerlanet.core.checkpoints.checkpoint import read_info

    names = read_info(settings.model)["classes"]
    classifier = read_info(settings.classifier) if settings.classifier else {}
    if settings.classifier:
        classes_to_classify(classifier, names, settings.classify_only)
    tells = infected_types(classifier.get("classes") or []) or any(map(is_infected, names))
    if settings.one_page and not tells:
        raise ValueError(
            "Reports of one page are on infected red cells: choose a classifier that knows "
            "uninfected and infected ones, such as malaria."
        )


def _collect_outcomes(
    monitor: StudyMonitor, run: TaskRunner, overwrite: bool, in_parallel: bool
) -> None:
    try:
        monitor.report_progress()
        if overwrite and monitor.layout == "study":
            remove_path(monitor.out / SIZE_FILE)
        monitor.skip_done(overwrite)
        monitor.collect(run, monitor.tasks(overwrite, largest_first=in_parallel))
    finally:
        monitor.finish()


@dataclass(frozen=True)
class StudyProgress(JobProgress):
    """Images that have ended, of all, and what is done of others."""

    @property
    def images_in_progress(self) -> float:
        """The sum of the fractions of images that are being processed."""
        return self.in_progress


class StudyMonitor(JobMonitor[StudyEntry]):
    """Keeps the entries, the manifest and the summary table up to date."""

    def __init__(
        self,
        out: Path,
        entries: list[StudyEntry],
        settings: StudySettings,
        layout: Layout,
        report: Callable[[StudyProgress], None] | None,
        ended: Callable[[StudyEntry], None] | None,
    ) -> None:
        super().__init__(out, entries, report, ended, stop_file=layout == "study")
        self.settings, self.layout = settings, layout
        self.notes, self.limits = list[str](), list[str]()
        self._started = datetime.now(UTC).isoformat(timespec="seconds")
        self._last_write = 0.0

    def skip_done(self, overwrite: bool) -> None:
        """Mark what an earlier run has done."""
        records = Records(self.layout, self.out, self.settings)
        for entry in self.entries if not overwrite else []:
            _, record = records.find(entry.job)
            if record is not None:
                self.end(entry, {"status": "skipped", "record": record})
        self._write_manifest(at_once=True)

    def tasks(
        self, overwrite: bool, largest_first: bool = False
    ) -> list[tuple[int, dict[str, Any]]]:
        """A task for every image that is left.

        The largest files first, so that workers side by side end at about the same time.
        """
        shared = {"out": str(self.out), "layout": self.layout, "overwrite": overwrite}
        shared |= {"work": _WORK, "gpu": bool(self.settings.model or self.settings.classifier)}
        shared["settings"] = self.settings.as_dict()
        chosen = self.settings
        if chosen.model and not chosen.detections_file and chosen.object_size == "auto":
            shared["fields"] = self._fields()
        jobs = [(k, e.job) for k, e in enumerate(self.entries) if e.status == "waiting"]
        if largest_first:
            jobs.sort(key=lambda job: -file_stamp(job[1].source).get("size", 0))
        return [
            (k, {"source": str(job.source), "title": str(job.source), "name": job.name, **shared})
            for k, job in jobs
        ]

    def _fields(self) -> list[str]:
        """A few images, evenly over all, that tell the size of objects."""
        total = len(self.entries)
        few = range(0) if total < _MIN_IMAGES else range(min(total, _SIZE_FIELDS))
        return [str(self.entries[k * total // len(few)].job.source) for k in few]

    def on_outcome(self, entry: StudyEntry, outcome: Mapping[str, Any]) -> None:
        """Write the manifest now and then, and keep what a person should know."""
        self._write_manifest()
        self.notes += [note for note in outcome.get("notes", []) if note not in self.notes]
        self.limits = list(outcome.get("limits") or self.limits)

    def make_progress(self, done: int, skipped: int) -> StudyProgress:
        """How far the study is."""
        partly = sum(self.fractions.values())
        return StudyProgress(done, len(self.entries), self.message, partly, skipped)

    def rows(self) -> list[dict[str, Any]]:
        """The summary table."""
        return [e.record["row"] for e in self.entries if "row" in e.record]

    def finish(self) -> None:
        """Manifest, table and failures as things stand; a full disk must not hide why."""
        try:
            if self.layout == "study":
                self._write_tables()
            work = self.out / WORK_FOLDER
            if work.is_dir() and not any(work.iterdir()):
                remove_path(work)
        except OSError as error:
            if not self.stopped:
                self.stopped = f"{self.out}: {system_reason(error)}."

    def _write_tables(self) -> None:
        with suppress(OSError):
            remove_path(self.out / STOP_FILE)
        self._write_manifest(at_once=True)
        if len(write_summary(self.out, self.rows())) < 2:
            self.notes.append(NO_PARQUET_NOTE)
        write_failures(self.out, self.entries)
        if self.settings.one_page:
            self._write_page()

    def _write_page(self) -> None:
        """The page on all images; what is wrong with it shall not hide the results."""
        from napari_beerlanet.core.batch.counts import StudyCounts

        try:
            counts = StudyCounts.read(self.out)
            if counts is not None and counts.counted:
                counts.write_page(self.out / PAGE_FILE, self.settings)
        except ValueError as error:
            self.notes.append(str(error))

    def _write_manifest(self, at_once: bool = False) -> None:
        now = time.monotonic()
        if self.layout != "study" or not (at_once or now - self._last_write > _MANIFEST_INTERVAL_S):
            return
        try:
            write_manifest(self.out, self.entries, self.settings, self._started)
        except OSError:
            if at_once:
                raise
        self._last_write = now
