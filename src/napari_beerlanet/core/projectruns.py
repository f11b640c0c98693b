"""Training runs and models of a project."""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np

from .files import FileError, atomic_path
from .labels import DataError
from .locks import is_locked
from .projectfiles import MODELS, RUNS, ProjectError, explained
from .projectstate import ProjectState
from .recipe import Recipe
from .runfiles import RunFolder, read_run
from .sources import slug

_SUFFIX = ".safetensors"
_ALIKE = 0.05  # by which pixel sizes of images may differ and still be one


@dataclass(frozen=True)
class RunFacts:
    """A run in a project: `state` as in run.json, and whether its process is at work now."""

    path: Path
    state: str
    working: bool
    epoch: int
    settings: dict[str, Any]
    message: str

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.name

    @property
    def can_resume(self) -> bool:
        """Whether it was cut short after it had learned something."""
        unfinished = self.state != "finished" and not self.working
        return unfinished and (self.path / "state.pt").exists()

    @property
    def best(self) -> Path | None:
        """Its best checkpoint, if it has one."""
        path = self.path / f"best{_SUFFIX}"
        return path if path.exists() else None


def start_run_config(project: ProjectState, model: str | os.PathLike[str], **settings: Any) -> Path:
    """A new folder in `runs` with a run.json to train with; returns the file.

    `settings` are those of `Recipe`. The data, the training size and, where all images agree, the
    pixel size are the project's.
    """
    check_ready(project)
    given = {"image_size": project.training_size or None, "pixel_size": pixel_size(project)}
    recipe = Recipe.read(
        {**given, **settings, "model": os.fspath(model), "data": str(project.data)}
    )
    with explained(project.path, "begin a run"):
        folder = RunFolder(_new_folder(project.path / RUNS), locked=False)
        folder.write_run(settings=recipe.write(), state="waiting", message="")
    return folder.run_file


def check_ready(project: ProjectState) -> None:
    """A `DataError` that says what is missing for training."""
    if not project.rows:
        raise DataError("No image has been added yet: annotate one and add it to the project.")
    if not any(row.boxes for row in project.rows):
        raise DataError("None of the images has a box: there is nothing to learn from yet.")


def pixel_size(project: ProjectState) -> float | None:
    """Micrometres per pixel of the pieces, for `Recipe`; None unless all images agree.

    Pieces of different lengths are resized to one: what must agree is the size after that.
    """
    known = project.sources()
    sides = np.array([row.side for row in project.rows], np.float64)
    sizes = [known[row.source].pixel_size if row.source in known else None for row in project.rows]
    if not sizes or any(size is None for size in sizes):
        return None
    lengths = sides * [float(np.sqrt(np.prod(size))) for size in sizes if size is not None]
    middle = float(np.median(lengths))
    if np.abs(lengths / middle - 1).max() > _ALIKE:
        return None
    return round(middle / float(np.median(sides)), 6)


def runs(project: ProjectState) -> list[RunFacts]:
    """All runs, the newest first; what is no run is passed over."""
    found = []
    with explained(project.path, "look for runs"):
        folders = sorted((project.path / RUNS).iterdir()) if (project.path / RUNS).is_dir() else []
    for folder in folders:
        try:
            content = read_run(folder / "run.json")
        except FileError:
            continue
        found.append(
            RunFacts(
                folder,
                str(content.get("state", "")),
                is_locked(folder / ".lock"),
                int(content.get("epoch", 0)),
                content["settings"],
                str(content.get("message", "")),
            )
        )
    return sorted(found, key=lambda run: (run.path / "run.json").stat().st_mtime_ns, reverse=True)


def models(project: ProjectState) -> list[Path]:
    """The kept models, sorted by name."""
    return sorted((project.path / MODELS).glob(f"[!.]*{_SUFFIX}"))


def keep_model(project: ProjectState, checkpoint: str | os.PathLike[str], name: str) -> Path:
    """Copy a run's checkpoint to `models` under a name of its own; none is ever overwritten."""
    source, folder = Path(checkpoint), project.path / MODELS
    if not source.is_file():
        raise ProjectError(f"{source}: there is no such checkpoint, so it cannot be kept.")
    with explained(project.path, "keep the model"):
        path, number = folder / f"{slug(name)}{_SUFFIX}", 1
        while path.exists():
            number += 1
            path = folder / f"{slug(name)}-{number}{_SUFFIX}"
        with atomic_path(path) as unfinished:
            shutil.copyfile(source, unfinished)
    return path


def _new_folder(parent: Path) -> Path:
    today = f"{datetime.now():%Y-%m-%d}"
    number = 1
    while True:
        try:
            path = parent / f"{today}-{number}"
            path.mkdir()
            return path
        except FileExistsError:
            number += 1
