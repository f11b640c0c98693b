"""Autosave: annotations are on disk within seconds of a change, in the project or as drafts.

Drafts are the annotations of images that are in no project yet: one file per image, in the user's
data folder.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path

from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.project.files import (
    ANNOTATIONS_DIR,
    ImageSource,
    encode_annotations,
    explain_disk_errors,
    read_annotation_file,
    read_annotations,
)
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.ui.annotate.annotated_image import AnnotatedImage, LazyImageSource
from napari_beerlanet.ui.common.recent import drafts_folder
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.viewer.planes import PlaneIndex

SAVE_DELAY_MS, RETRY_DELAY_MS = 700, 5000
"""From a change to saving it, and from a failure to the next attempt."""

PlaneKey = tuple[AnnotatedImage, PlaneIndex]
"""A plane of an image in the viewer."""

_job_numbers = itertools.count()
_write_lock = threading.Lock()


class Autosave(QObject):
    """Saves the jobs that `collect` returns, shortly after `touch`, off the GUI thread.

    `done` is called with each job's key once it is on disk. `message_changed` carries the state in
    a sentence (`message`). After a failure it retries until it succeeds.
    """

    message_changed = Signal(str)

    def __init__(
        self,
        parent: QObject | None,
        collect: Callable[[], list[SaveJob]],
        done: Callable[[PlaneKey, Annotations], None],
        drafts: Drafts,
    ) -> None:
        super().__init__(parent)
        self.drafts, self.message, self.failing = drafts, "", False
        self._collect, self._done = collect, done
        self._task = Task(self)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._save)

    @property
    def waiting(self) -> bool:
        """Whether something is not on disk yet."""
        return self._timer.isActive() or self._task.running

    def touch(self) -> None:
        """Schedule saving: something has changed."""
        if not self._timer.isActive() or self._timer.remainingTime() > SAVE_DELAY_MS:
            self._timer.start(SAVE_DELAY_MS)

    def flush(self) -> None:
        """Save now and wait for it, as when the viewer is closed."""
        self._timer.stop()
        jobs = self._collect()
        if not jobs:
            return
        try:
            self._ended(jobs, save_jobs(jobs, self.drafts))
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        """Save everything and stop."""
        self.flush()
        self._timer.stop()
        self._task.close()

    def _save(self) -> None:
        if self._task.running:
            self._timer.start(SAVE_DELAY_MS)
            return
        jobs, drafts = self._collect(), self.drafts
        if jobs:
            ended = self._ended
            self._task.start(
                lambda report: save_jobs(jobs, drafts),
                lambda result: ended(jobs, result),
                self._failed,
            )

    def _ended(self, jobs: Sequence[SaveJob], result: SaveResult) -> None:
        for job in jobs:
            if job.key in result.keys:
                self._done(job.key, job.annotations)
        if result.error is not None:
            self._failed(result.error, result.drafted)
            return
        self.failing = False
        if result.keys:
            self._set_message(_saved_message(jobs[-1]))

    def _failed(self, error: BaseException, drafted: bool = False) -> None:
        self.failing = True
        draft = f" A draft is in {self.drafts.folder}." if drafted else ""
        self._set_message(f"Not saved: {error_message(error)}{draft} Retrying every few seconds.")
        self._timer.start(RETRY_DELAY_MS)

    def _set_message(self, text: str) -> None:
        self.message = text
        self.message_changed.emit(text)


@dataclass(frozen=True)
class SaveJob:
    """A plane to save in a project, or as a draft if there is none; `key` identifies the plane."""

    key: PlaneKey
    source: LazyImageSource
    annotations: Annotations
    project: Project | None
    number: int = field(default_factory=lambda: next(_job_numbers))


@dataclass(frozen=True)
class SaveResult:
    """Keys of saved jobs, the last error, and whether a failed job was saved as a draft instead."""

    keys: list[PlaneKey]
    error: Exception | None = None
    drafted: bool = False


def save_jobs(jobs: Sequence[SaveJob], drafts: Drafts) -> SaveResult:
    """Write all jobs; what cannot be written to the project is saved as a draft."""
    keys, error, drafted = [], None, False
    for job in jobs:
        with _write_lock:
            if job.number < job.source.last_saved:
                continue  # a newer state is on disk
            source = job.source.resolve()
            try:
                _save_job(job, source, drafts)
                keys.append(job.key)
            except (OSError, ValueError) as failure:
                error = failure
                if job.project is not None:
                    drafts.save(source, job.annotations)
                    drafted = True
            job.source.last_saved = job.number
    return SaveResult(keys, error, drafted)


def _save_job(job: SaveJob, source: ImageSource, drafts: Drafts) -> None:
    if job.project is None:
        drafts.save(source, job.annotations)
    else:
        job.project.save_annotations(source, job.annotations)
        drafts.remove(source)


def _saved_message(job: SaveJob) -> str:
    now = datetime.now().strftime("%H:%M:%S")
    if job.project is not None:
        return f"Saved in {job.project.path.name} at {now}."
    return f"Saved as a draft at {now}, not in a project yet."


@dataclass(frozen=True)
class SavedAnnotations:
    """Annotations that were saved earlier, in the project or as a `draft`, and when."""

    annotations: Annotations
    draft: bool
    time: datetime | None = None


class Drafts:
    """The drafts in a folder, by default that of the user."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or drafts_folder()

    def path(self, source: ImageSource) -> Path:
        """The file of an image's draft."""
        return self.folder / f"{source.id}.json"

    def save(self, source: ImageSource, annotations: Annotations) -> Path:
        """Write an image's annotations; they are on disk when this returns."""
        path = self.path(source)
        with explain_disk_errors(self.folder, "save a draft"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as unfinished:
                unfinished.write_bytes(encode_annotations(source, annotations))
        return path

    def load(self, source: ImageSource) -> Annotations | None:
        """An image's draft, None if there is none."""
        path = self.path(source)
        with explain_disk_errors(self.folder, "read a draft"):
            return read_annotations(path, source) if path.exists() else None

    def remove(self, source: ImageSource) -> None:
        """Remove the draft of an image that is saved in a project."""
        with suppress(OSError):
            self.path(source).unlink(missing_ok=True)

    def archive(self, source: ImageSource) -> None:
        """Rename a draft so that it is kept but no longer loaded; one kept earlier stays."""
        now = datetime.now().strftime("%Y-%m-%d %H-%M-%S")
        path = self.path(source)
        names = itertools.chain([now], (f"{now} {number}" for number in itertools.count(2)))
        free = (path.with_suffix(f".{name}.aside") for name in names)
        with suppress(OSError):
            path.rename(next(one for one in free if not one.exists()))

    def sources(self) -> Iterable[ImageSource]:
        """All images with drafts, by age; files that cannot be read are skipped."""
        for file in sorted(self.folder.glob("[!.]*.json"), key=_modified):
            with suppress(FileError, KeyError, TypeError, ValueError, OSError):
                yield ImageSource.from_json(read_annotation_file(file)["source"])

    def previous_version_of(self, source: ImageSource) -> ImageSource | None:
        """The last image with a draft that lay in the same file and was as large, None without."""
        earlier = [other for other in self.sources() if source.is_changed_version_of(other)]
        return earlier[-1] if earlier else None

    def reuse(self, source: ImageSource, previous: ImageSource) -> Annotations:
        """Transfer the draft of an image's earlier version to it; a copy is kept."""
        annotations = self.load(previous)
        if annotations is None:
            raise FileError(f"{self.path(previous)}: this draft is gone.")
        self.save(source, annotations)
        self.archive(previous)
        return annotations


def find_saved(
    source: ImageSource, project: Project | None, drafts: Drafts
) -> SavedAnnotations | None:
    """The annotations of an image that were saved last, in the project or as a draft.

    A draft that is older, by a clock that may have been set back meanwhile, is put aside: the next
    save in the project would remove it.
    """
    draft = drafts.path(source)
    file = project.path / ANNOTATIONS_DIR / f"{project.id_of(source)}.json" if project else None
    if project is not None and file is not None and file.exists() and _is_newer(file, draft):
        saved = project.load_annotations(source)
        if saved is not None and _has_other_content(drafts, source, saved):
            drafts.archive(source)
        return None if saved is None else SavedAnnotations(saved, False, _time_of(file))
    saved = drafts.load(source)
    return None if saved is None else SavedAnnotations(saved, True, _time_of(draft))


def _has_other_content(drafts: Drafts, source: ImageSource, saved: Annotations) -> bool:
    try:
        draft = drafts.load(source)
    except FileError:
        return True
    return draft is not None and draft.to_json() != saved.to_json()


def _time_of(file: Path) -> datetime | None:
    try:
        return datetime.fromtimestamp(file.stat().st_mtime)
    except (OSError, OverflowError, ValueError):
        return None


def planes_with_annotations(
    shape: tuple[int, int], axes: int, project: Project | None, drafts: Drafts
) -> set[PlaneIndex]:
    """Planes of stacks of images (H, W) that have saved annotations, perhaps of another stack."""
    sources = [*(project.sources().values() if project else ()), *drafts.sources()]
    return {s.plane for s in sources if s.shape == shape and len(s.plane) == axes}


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError:  # it has become part of a project meanwhile
        return 0


def _is_newer(one: Path, other: Path) -> bool:
    return not other.exists() or one.stat().st_mtime_ns >= other.stat().st_mtime_ns
