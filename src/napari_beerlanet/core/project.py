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
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from . import journal
from .adding import (
    Added,
    Outcome,
    family,
    family_of,
    not_learned,
    stage_pieces,
    write_change,
)
from .annotations import Annotations
from .crops import cut_in_two, plan_crops
from .cropsize import GREY
from .locks import LockedError
from .progress import Report, tell, within
from .projectfiles import ProjectError, explained
from .projectfolder import make_folder, open_folder
from .projectopen import OpenProject
from .sources import Source

__all__ = ["Added", "LockedError", "Project", "ProjectError", "Source"]


class Project(OpenProject):
    """An open project; `read_only` is the reason why nothing can be changed, or ""."""

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
        stack = family_of(source.name, source.path, source.plane, name)
        if not any(row.boxes and family(row) != stack for row in others):
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

    def _in_our_classes(self, annotations: Annotations) -> Annotations:
        try:
            return annotations.renamed(self.classes)
        except ValueError as error:
            raise ProjectError(str(error)) from error

    def _now(self, done: Outcome) -> None:
        self._manifest, self._rows = done.manifest, done.rows
