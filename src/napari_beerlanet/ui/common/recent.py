"""The user's own folders, and what is remembered in them: models, projects, cell sizes."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from statistics import median
from typing import Any

import platformdirs

from napari_beerlanet.core.checkpoints.info import CLASSIFIER, DETECTOR
from napari_beerlanet.core.common.storage import write_json
from napari_beerlanet.core.detection.settings import PLAUSIBLE_OBJECT_SIZES

_MAX_RECENT = 8
_MAX_SIZES = 300  # images whose cell size is saved
_FOLDER_VARIABLE = "NAPARI_BEERLANET_CONFIG"  # replaces both folders


def user_data_folder() -> Path:
    """The user's own data that belong to no project: drafts, reviews, which project was open."""
    return _user_folder(platformdirs.user_data_dir)


def drafts_folder() -> Path:
    """Annotations of images that are in no project yet, one JSON file for each plane."""
    return user_data_folder() / "drafts"


def _user_folder(default: Callable[..., str]) -> Path:
    folder = os.environ.get(_FOLDER_VARIABLE) or default("napari-beerlanet", appauthor=False)
    return Path(folder)


def save_preference(path: Path, content: Mapping[str, Any]) -> None:
    """Save what the user can do without, as JSON; ignored where it cannot be written.

    It does not wait for the disk, as it is called where the window would wait, too.
    """
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, content, durable=False)


class RecentPaths:
    """Recently used paths of one kind, in a file in the user's configuration folder."""

    def __init__(self, kind: str, file: str) -> None:
        self._kind, self._name = kind, file

    @property
    def file(self) -> Path:
        """Where they are saved."""
        return _user_folder(platformdirs.user_config_dir) / self._name

    def paths(self) -> list[Path]:
        """The newest first, also those that do not exist any more."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return []
        names = content.get(self._kind, []) if isinstance(content, dict) else []
        if not isinstance(names, list):
            return []
        return [Path(name) for name in names if isinstance(name, str)][:_MAX_RECENT]

    def add(self, path: Path) -> None:
        """Put a path first; ignored where the user's folder cannot be written to."""
        others = [other for other in self.paths() if other != path]
        names = [str(one) for one in [path, *others][:_MAX_RECENT]]
        save_preference(self.file, {self._kind: names})


class FoundSizes:
    """Cell sizes in pixels that were found automatically, in a file in the configuration folder.

    The next time they are tried first: that of the same image, or else the median of its folder,
    for the same model and `magnification` (any text that images of one magnification share).
    """

    @property
    def file(self) -> Path:
        """Where they are saved."""
        return _user_folder(platformdirs.user_config_dir) / "cell-sizes.json"

    def find(self, model: str, image: Path, magnification: str) -> float | None:
        """The size to try first in an image."""
        here = [
            entry
            for entry in self._entries()
            if (entry["model"], entry["magnification"]) == (model, magnification)
            and Path(entry["image"]).parent == image.parent
        ]
        same = [entry for entry in here if Path(entry["image"]) == image]
        return median(float(entry["size"]) for entry in same or here) if here else None

    def add(self, model: str, image: Path, magnification: str, size: float) -> None:
        """Save a size; ignored where the user's folder cannot be written to."""
        new = {"model": model, "image": str(image), "magnification": magnification}
        others = [entry for entry in self._entries() if not new.items() <= entry.items()]
        sizes = [{**new, "size": round(size, 2)}, *others][:_MAX_SIZES]
        save_preference(self.file, {"sizes": sizes})

    def _entries(self) -> list[dict[str, Any]]:
        """The newest first."""
        try:
            content = json.loads(self.file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return []
        entries = content.get("sizes") if isinstance(content, dict) else None
        return list(filter(_is_size_entry, entries)) if isinstance(entries, list) else []


def _is_size_entry(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return False
    size = entry.get("size")
    named = all(isinstance(entry.get(name), str) for name in ("model", "image", "magnification"))
    low, high = PLAUSIBLE_OBJECT_SIZES
    return named and isinstance(size, (int, float)) and low <= size <= high


RECENT_MODELS = RecentPaths("models", "models.json")
RECENT_CLASSIFIERS = RecentPaths("models", "classifiers.json")


def recent_models(kind: str = DETECTOR) -> list[Path]:
    """Files of models of a kind, the newest first."""
    return (RECENT_CLASSIFIERS if kind == CLASSIFIER else RECENT_MODELS).paths()


def add_recent_model(path: Path, kind: str = DETECTOR) -> None:
    """Put a file first."""
    (RECENT_CLASSIFIERS if kind == CLASSIFIER else RECENT_MODELS).add(path.resolve())


RECENT_PROJECTS = RecentPaths("projects", "recent.json")
recent_projects, add_recent_project = RECENT_PROJECTS.paths, RECENT_PROJECTS.add
