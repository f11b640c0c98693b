"""An open project: its lock, annotations saved and read, classes; what changes it comes later."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from . import journal
from .annotationfiles import annotation_file, read_annotations, with_names
from .annotations import Annotations
from .files import atomic_path
from .locks import FolderLock
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
from .projectstate import ProjectState
from .sources import Source


class OpenProject(ProjectState):
    """The part of `Project` that writes single files; `read_only` is why nothing can be, or ""."""

    def __init__(self, path: Path, lock: FolderLock | None, read_only: str) -> None:
        self.read_only, self._lock = read_only, lock
        self._changing = threading.RLock()
        super().__init__(path)

    def close(self) -> None:
        """Let others change the project."""
        if self._lock is not None:
            self._lock.release()
            self._lock = None
        self.read_only = self.read_only or f"{self.path}: the project is closed."

    def __enter__(self) -> Self:
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
        """An image's annotations as saved last, None if there are none."""
        path = self.path / ANNOTATIONS / f"{self.id_of(source)}.json"
        with explained(self.path, "read annotations"):
            return read_annotations(path, source) if path.exists() else None

    def take_over(self, source: Source, earlier: str) -> Annotations:
        """Go on with the annotations of `earlier` (see `earlier_of`) for its file as it is now."""
        annotations = self.load_annotations(self._sources[earlier])
        if annotations is None:
            raise ProjectError(f"{earlier}: its annotations are gone from the project.")
        self._sources[earlier] = source
        self.save_annotations(source, annotations)
        return annotations

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
