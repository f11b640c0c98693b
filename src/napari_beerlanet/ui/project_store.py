"""The project that the panels of one viewer work in, and those of earlier days."""

from __future__ import annotations

import json
import weakref
from contextlib import suppress
from pathlib import Path
from typing import Any

from psygnal import Signal

from napari_beerlanet.core.files import atomic_path
from napari_beerlanet.core.project import Project
from napari_beerlanet.ui.annotate_drafts import own_folder
from napari_beerlanet.ui.finetune_recent import recent_projects, remember_project
from napari_beerlanet.ui.last_words import when_deleted
from napari_beerlanet.ui.panel import unwrapped


class ProjectStore:
    """One per viewer; `changed` tells the project that is open now, or None.

    A folder has one writer: all panels of a viewer take the project from here. `changing` is told
    before the project that is open is closed, `updated` when there is something new in it.
    """

    changing = Signal()
    changed = Signal(object)
    updated = Signal()

    def __init__(self) -> None:
        self.project: Project | None = None

    def put(self, project: Project | None) -> None:
        """Make this the viewer's project; the one before it is closed."""
        self.changing.emit()
        before, self.project = self.project, project
        if before is not None and before is not project:
            before.close()
        remember(project.path if project else None)
        self.changed.emit(project)

    def release(self) -> None:
        """Close the project with the viewer; it stays the one to open next time."""
        before, self.project = self.project, None
        if before is not None:
            before.close()

    def tell_updated(self) -> None:
        """The project's content is another: images were added, classes named."""
        self.updated.emit()


_stores: weakref.WeakKeyDictionary[Any, ProjectStore] = weakref.WeakKeyDictionary()


def projects(viewer: Any) -> ProjectStore:
    """The store of this viewer."""
    viewer = unwrapped(viewer)
    if viewer not in _stores:
        _stores[viewer] = store = ProjectStore()
        weakref.finalize(viewer, store.release)
        when_deleted(viewer.window._qt_window, store.release)
    return _stores[viewer]


def recent() -> list[Path]:
    """Folders of projects, the last one first; also those that are gone or on another drive."""
    return recent_projects()


def last_open() -> Path | None:
    """The project that was open when the viewer ended, however it did."""
    try:
        content = json.loads(_file().read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    path = content.get("open") if isinstance(content, dict) else None
    return Path(path) if isinstance(path, str) else None


def remember(path: Path | None) -> None:
    """Put a project first, or remember that none is open.

    A convenience: where it cannot be written, nothing else suffers.
    """
    if path is not None:
        remember_project(path)
    content = {"open": str(path) if path else None}
    with suppress(OSError):
        _file().parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(_file()) as unfinished:
            unfinished.write_text(json.dumps(content), encoding="utf-8")


def _file() -> Path:
    return own_folder() / "open.json"
