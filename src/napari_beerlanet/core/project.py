"""A project: images that are annotated, what is learned from them, and the models that came of it.

    project = Project.create(folder, ["RBC", "WBC"])
    source = Source.of(rgb, "smear 1.tif")
    project.save_annotations(source, annotations)           # on disk when it returns
    project.add_image(source, rgb, annotations, training_size=320)
    project.summary(), project.split_notes()

One program writes to a project; others may look (`read_only`). Every change is made whole or not
at all, whatever ends the program.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import journal
from .adding import Added, Outcome, not_learned, stage_pieces, write_change
from .annotationfiles import annotation_file, read_annotations, with_names
from .annotations import Annotations
from .crops import cut_in_two, plan_crops
from .cropsize import GREY
from .files import atomic_path
from .locks import FolderLock, LockedError
from .progress import Report, tell, within
from .projectfiles import (
    ANNOTATIONS,
    DATA,
    PROJECT,
    ProjectError,
    checked_names,
    explained,
    write_data,
    write_manifest,
)
from .projectfolder import make_folder, open_folder
from .projectstate import ProjectState
from .sources import Source

__all__ = ["Added", "LockedError", "Project", "ProjectError", "Source"]


class Project(ProjectState):
    """An open project; `read_only` is the reason why nothing can be changed, or ""."""

    def __init__(self, path: Path, lock: FolderLock | None, read_only: str) -> None:
        self.read_only, self._lock = read_only, lock
        self._changing = threading.RLock()
        super().__init__(path)

    # --- opening and closing ---------------------------------------------------------------------

    @classmethod
    def create(cls, path: str | os.PathLike[str], classes: Sequence[str], seed: int = 0) -> Project:
        """Make a project in a folder that is new, empty, or at least has no project."""
        root = Path(path).absolute()
        make_folder(root, classes, seed)
        return cls.open(root)

    @classmethod
    def open(
        cls, path: str | os.PathLike[str], read_only: bool = False, take_over: bool = False
    ) -> Project:
        """Open a project, to change it or to look at only.

        A `LockedError` where another program has it open. A folder that cannot be written to, or
        is of a newer version, is opened `read_only`. `take_over` is for a disk without locks on
        which another computer has left its mark.
        """
        root = Path(path).absolute()
        lock, reason = open_folder(root, read_only, take_over)
        try:
            return cls(root, lock, reason)
        except BaseException:
            if lock is not None:
                lock.release()
            raise

    def close(self) -> None:
        """Let others change the project."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.read_only = self.read_only or f"{self.path}: the project is closed."

    def __enter__(self) -> Project:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    # --- annotations -----------------------------------------------------------------------------

    def save_annotations(self, source: Source, annotations: Annotations) -> Path:
        """Write an image's annotations; they are on the disk when this returns."""
        self._writable("save annotations")
        name = self.id_of(source)
        path = self.path / ANNOTATIONS / f"{name}.json"
        with explained(self.path, "save annotations"), atomic_path(path) as unfinished:
            unfinished.write_bytes(annotation_file(source, annotations))
        self._sources[name] = source
        return path

    def load_annotations(self, source: Source) -> Annotations | None:
        """An image's annotations as saved last, None if there are none.

        Found by the image's pixels, or by its file if that has changed and is as large as before.
        """
        path = self.path / ANNOTATIONS / f"{self.id_of(source)}.json"
        with explained(self.path, "read annotations"):
            return read_annotations(path, source) if path.exists() else None

    # --- images to learn from --------------------------------------------------------------------

    def add_image(
        self,
        source: Source,
        rgb: Any,
        annotations: Annotations,
        training_size: int,
        *,
        side: int | None = None,
        grey: int = GREY,
        report: Report | None = None,
    ) -> Added:
        """Cut the annotated regions of an image (H, W, 3 or 4) into pieces to learn from.

        `side` image pixels become `training_size` in training, see `crop_side`; as many by default.
        An image that was added before is brought up to date. Whatever happens meanwhile, the
        project has either the pieces it had or the new ones.
        """
        self.save_annotations(source, annotations)
        with self._changing:
            self._ready("add the image")
            return self._add(
                source, rgb, annotations, training_size, side or training_size, grey, report
            )

    def _add(
        self,
        source: Source,
        rgb: Any,
        annotations: Annotations,
        training_size: int,
        side: int,
        grey: int,
        report: Report | None,
    ) -> Added:
        if tuple(rgb.shape[:2]) != source.shape:
            raise ProjectError(f"{source.name}: not the image that was annotated, by its size.")
        used, notes = replace(annotations, image_shape=source.shape).usable()
        used = self._in_our_classes(used)
        planned = plan_crops(used, side)
        if not planned:
            raise ProjectError(
                f"{source.name}: no region of it is marked as annotated; mark where you have "
                "found every object, or the whole image."
            )
        name = self.id_of(source)
        old = [row for row in self._rows if row.source == name]
        others = [row for row in self._rows if row.source != name]
        if not any(row.boxes for row in others):
            planned = cut_in_two(planned, used, side)
        known = {row.file: row for row in old}
        with explained(self.path, "add the image"), journal.changing(self.path) as batch:
            part = within(report, 0.0, 0.95)
            whole = (name, source), rgb, used, planned, side, grey, known, part
            new = stage_pieces(batch, *whole)
            if not new:
                raise ProjectError(f"{source.name}: nothing can be seen in its annotated regions.")
            manifest = replace(self._manifest, training_size=training_size)
            done = write_change(batch, manifest, others, old, new)
        self._now(done)
        tell(report, 1, 1, "done")
        notes += not_learned(used, new)
        return Added(
            name,
            self._manifest.split[name],
            len(new),
            sum(n.row.boxes for n in new),
            [*notes, *done.notes, *self.split_notes()],
        )

    def remove_image(self, name: str) -> None:
        """Take an image's pieces out of the project, by its id; its annotations stay."""
        with self._changing:
            self._ready("remove the image")
            old = [row for row in self._rows if row.source == name]
            others = [row for row in self._rows if row.source != name]
            with explained(self.path, "remove the image"), journal.changing(self.path) as batch:
                done = write_change(batch, self._manifest, others, old, [])
            self._now(done)

    # --- classes ---------------------------------------------------------------------------------

    def add_classes(self, names: Sequence[str]) -> list[str]:
        """Add those that are new, behind the others; returns all."""
        self._ready("add a class")
        wanted = checked_names([*self.classes, *(n for n in names if n not in self.classes)])
        if wanted != self.classes:
            self._write_classes(wanted, {})
        return self.classes

    def rename_class(self, old: str, new: str) -> None:
        """Call a class something else, in saved annotations, too."""
        self._ready("rename a class")
        if old not in self.classes:
            raise ProjectError(f"There is no class {old}; there are {', '.join(self.classes)}.")
        names = checked_names([new if name == old else name for name in self.classes])
        self._write_classes(names, {old: " ".join(new.split())})

    def _write_classes(self, names: list[str], renamed: dict[str, str]) -> None:
        with self._changing:
            manifest = replace(self._manifest, classes=names)
            with explained(self.path, "write the classes"), journal.changing(self.path) as batch:
                for name in list(self._sources) if renamed else ():
                    path = self.path / ANNOTATIONS / f"{name}.json"
                    batch.add(f"{ANNOTATIONS}/{name}.json", with_names(path, renamed))
                batch.add(PROJECT, write_manifest(manifest))
                batch.add(DATA, write_data(manifest))
            self._manifest = manifest

    # --- inside ----------------------------------------------------------------------------------

    def _writable(self, doing: str) -> None:
        if self.read_only:
            raise ProjectError(f"{self.read_only} It is not possible to {doing}.")
        with explained(self.path, doing):
            (self.path / PROJECT).stat()  # where a drive is gone, no new folder may take its place

    def _ready(self, doing: str) -> None:
        """For a change of several files: first, one that was begun is finished."""
        self._writable(doing)
        with self._changing, explained(self.path, doing):
            if journal.pending(self.path):
                journal.carry_out(self.path)
                self.reload()

    def _in_our_classes(self, annotations: Annotations) -> Annotations:
        try:
            return annotations.renamed(self.classes)
        except ValueError as error:
            raise ProjectError(str(error)) from error

    def _now(self, done: Outcome) -> None:
        self._manifest, self._rows = done.manifest, done.rows
