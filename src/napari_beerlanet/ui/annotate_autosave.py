"""Annotations on the disk within seconds of a change, whatever becomes of the viewer."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.project import Project
from napari_beerlanet.ui.annotate_drafts import Drafts
from napari_beerlanet.ui.annotate_images import Sourced
from napari_beerlanet.ui.notices import sentence
from napari_beerlanet.ui.tasks import Task

SOON, AGAIN = 700, 5000
"""Milliseconds from a change to saving it, and from a failure to the next try."""

_numbers = itertools.count()
_one_writes = threading.Lock()


@dataclass(frozen=True)
class Job:
    """A plane to save, and where: a draft without a project. `key` is whose it is."""

    key: Any
    sourced: Sourced
    annotations: Annotations
    project: Project | None
    number: int = field(default_factory=lambda: next(_numbers))


@dataclass(frozen=True)
class Saved:
    """Keys of what lies where it belongs, the error of what does not, where it went instead."""

    keys: list[Any]
    error: Exception | None = None
    drafted: bool = False


def save(jobs: Sequence[Job], drafts: Drafts) -> Saved:
    """Write everything; what the project does not take is kept as a draft."""
    keys, error, drafted = [], None, False
    for job in jobs:
        with _one_writes:
            if job.number < job.sourced.written:
                continue  # something newer lies there
            source = job.sourced.source()
            try:
                _save_one(job, source, drafts)
                keys.append(job.key)
            except (OSError, ValueError) as failure:
                error = failure
                if job.project is not None:
                    drafts.save(source, job.annotations)
                    drafted = True
            job.sourced.written = job.number
    return Saved(keys, error, drafted)


def _save_one(job: Job, source: Any, drafts: Drafts) -> None:
    if job.project is None:
        drafts.save(source, job.annotations)
    else:
        job.project.save_annotations(source, job.annotations)
        drafts.forget(source)


class Autosave(QObject):
    """Saves what `collect` gives a moment after `touch`, off the GUI thread.

    `done` is told each job's key when it is on the disk. `said` tells how things are, in a
    sentence. After a failure it goes on trying.
    """

    said = Signal(str)

    def __init__(
        self,
        parent: QObject | None,
        collect: Callable[[], list[Job]],
        done: Callable[[Any, Annotations], None],
        drafts: Drafts,
    ) -> None:
        super().__init__(parent)
        self.drafts, self.text, self.failing = drafts, "", False
        self._collect, self._done = collect, done
        self._task = Task(self)
        self._timer = QTimer(self)
        self._timer.setSingleShot(True)
        self._timer.timeout.connect(self._save)

    @property
    def waiting(self) -> bool:
        """Whether something is not on the disk yet."""
        return self._timer.isActive() or self._task.running

    def touch(self) -> None:
        """Something has changed."""
        if not self._timer.isActive() or self._timer.remainingTime() > SOON:
            self._timer.start(SOON)

    def flush(self) -> None:
        """Save at once and wait for it, as when the viewer is closed."""
        self._timer.stop()
        jobs = self._collect()
        if not jobs:
            return
        try:
            self._ended(jobs, save(jobs, self.drafts))
        except Exception as error:
            self._failed(error)

    def close(self) -> None:
        """Save what is left and stop."""
        self.flush()
        self._timer.stop()
        self._task.close()

    def _save(self) -> None:
        if self._task.running:
            self._timer.start(SOON)
            return
        jobs, drafts = self._collect(), self.drafts
        if jobs:
            ended = self._ended
            self._task.start(
                lambda report: save(jobs, drafts), lambda saved: ended(jobs, saved), self._failed
            )

    def _ended(self, jobs: Sequence[Job], saved: Saved) -> None:
        for job in jobs:
            if job.key in saved.keys:
                self._done(job.key, job.annotations)
        if saved.error is not None:
            self._failed(saved.error, saved.drafted)
            return
        self.failing = False
        if saved.keys:
            self._say(_where(jobs[-1], self.drafts))

    def _failed(self, error: BaseException, drafted: bool = False) -> None:
        self.failing = True
        kept = f" Meanwhile it is kept in {self.drafts.folder}." if drafted else ""
        self._say(f"Not saved: {sentence(error)}{kept} Trying again every few seconds.")
        self._timer.start(AGAIN)

    def _say(self, text: str) -> None:
        self.text = text
        self.said.emit(text)


def _where(job: Job, drafts: Drafts) -> str:
    now = datetime.now().strftime("%H:%M:%S")
    if job.project is not None:
        return f"Saved in {job.project.path.name} at {now}."
    return f"Saved as a draft at {now}, in no project yet: {drafts.folder}"
