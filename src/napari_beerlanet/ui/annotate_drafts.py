"""Annotations of images that are in no project yet: a file for each, in the user's own folder."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

import platformdirs

from napari_beerlanet.core.annotationfiles import (
    annotation_file,
    read_annotation_file,
    read_annotations,
)
from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.files import FileError, atomic_path
from napari_beerlanet.core.project import Project
from napari_beerlanet.core.projectfiles import ANNOTATIONS, explained
from napari_beerlanet.core.sources import Source
from napari_beerlanet.ui.annotate_shapes import Plane

_OWN = "NAPARI_BEERLANET_CONFIG"


def own_folder() -> Path:
    """Where we keep what belongs to the user and to no project."""
    asked = os.environ.get(_OWN)
    return Path(asked or platformdirs.user_data_dir("napari-beerlanet", appauthor=False))


@dataclass(frozen=True)
class Found:
    """Annotations that were saved earlier; `draft`: outside of the project."""

    annotations: Annotations
    draft: bool


class Drafts:
    """The drafts in one folder, by default the user's."""

    def __init__(self, folder: Path | None = None) -> None:
        self.folder = folder or own_folder() / "drafts"

    def path(self, source: Source) -> Path:
        """The file of an image's draft."""
        return self.folder / f"{source.id}.json"

    def save(self, source: Source, annotations: Annotations) -> Path:
        """Write an image's annotations; they are on the disk when this returns."""
        path = self.path(source)
        with explained(self.folder, "save a draft"):
            self.folder.mkdir(parents=True, exist_ok=True)
            with atomic_path(path) as unfinished:
                unfinished.write_bytes(annotation_file(source, annotations))
        return path

    def load(self, source: Source) -> Annotations | None:
        """An image's draft, None if there is none."""
        path = self.path(source)
        with explained(self.folder, "read a draft"):
            return read_annotations(path, source) if path.exists() else None

    def forget(self, source: Source) -> None:
        """Remove a draft that has found its way into a project."""
        with suppress(OSError):
            self.path(source).unlink(missing_ok=True)

    def set_aside(self, source: Source) -> None:
        """Keep a draft under another name, by which it is not found again by itself."""
        now = datetime.now().strftime("%Y-%m-%d %H-%M-%S")
        path = self.path(source)
        with suppress(OSError):
            path.rename(path.with_suffix(f".{now}.aside"))

    def sources(self) -> Iterable[Source]:
        """All images with drafts; what cannot be read is passed over."""
        for file in sorted(self.folder.glob("[!.]*.json")):
            with suppress(FileError, KeyError, TypeError, ValueError, OSError):
                yield Source.read(read_annotation_file(file)["source"])


def find(source: Source, project: Project | None, drafts: Drafts) -> Found | None:
    """What was saved last for an image, in the project or as a draft."""
    draft = drafts.path(source)
    mine = project.path / ANNOTATIONS / f"{project.id_of(source)}.json" if project else None
    if project is not None and mine is not None and mine.exists() and _newer(mine, draft):
        saved = project.load_annotations(source)
        return None if saved is None else Found(saved, draft=False)
    saved = drafts.load(source)
    return None if saved is None else Found(saved, draft=True)


def planes_saved(
    shape: tuple[int, int], axes: int, project: Project | None, drafts: Drafts
) -> set[Plane]:
    """Planes of a stack of images (H, W) that something was saved for, perhaps of another stack."""
    known = [*(project.sources().values() if project else ()), *drafts.sources()]
    return {s.plane for s in known if s.shape == shape and len(s.plane) == axes}


def _newer(one: Path, other: Path) -> bool:
    return not other.exists() or one.stat().st_mtime_ns >= other.stat().st_mtime_ns
