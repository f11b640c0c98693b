"""From the panel's settings to a run's folder; what is done here touches no widget."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

from napari_beerlanet.core.recipe import Recipe
from napari_beerlanet.core.runfiles import RunFolder, read_run
from napari_beerlanet.core.runs import new_run


def recipe_of(project: Path, model: Any, settings: dict[str, Any]) -> Recipe:
    """What is asked for. A model that is no file has no name until the run's folder is there.

    Where the project tells training size and pixel size of its images, these hold.
    """
    name = None if is_detector(model) else os.fspath(model)
    known = {} if settings.get("pixel_size") else _project_settings(project)
    asked = {key: value for key, value in settings.items() if value is not None}
    recipe = Recipe(name, str(project / "data.yaml"), **{**known, **asked})
    recipe.check()
    return recipe


def begin(project: Path, model: Any, settings: dict[str, Any]) -> Path:
    """Make the run's folder; a model that is no file is written into it."""
    recipe = recipe_of(project, model, settings)
    path = new_run(project, recipe.write())
    if is_detector(model):
        from napari_beerlanet.core.checkpoint import save_checkpoint

        folder = RunFolder(path, locked=False)
        save_checkpoint(model, folder.start)
        folder.write_run(settings=replace(recipe, model=str(folder.start)).write())
    return path


def use_device(path: Path, device: str) -> None:
    """Let a run go on with another device than it was begun with."""
    settings = read_run(path / "run.json")["settings"]
    if settings.get("device") != device:
        RunFolder(path, locked=False).write_run(settings={**settings, "device": device})


def look_at_project(folder: Path, report: Any) -> tuple[Any, list[str]]:
    """A `DataSummary` of the data, and the devices that this machine has."""
    from napari_beerlanet.core.device import available_devices
    from napari_beerlanet.core.files import FileError
    from napari_beerlanet.core.outlook import look_at_data

    if not folder.is_dir():
        raise FileError(f"{folder}: there is no such folder; connect the drive that it is on.")
    return look_at_data(folder / "data.yaml", report), available_devices()


def is_detector(model: Any) -> bool:
    """Whether it is a model itself, and no name or path of one."""
    return hasattr(model, "network") and hasattr(model, "info")


def _project_settings(project: Path) -> dict[str, Any]:
    """What a project that was made with “Annotate” says of its images."""
    if not (project / "project.json").is_file():
        return {}
    from napari_beerlanet.core.projectruns import check_ready, pixel_size
    from napari_beerlanet.core.projectstate import ProjectState

    state = ProjectState(project)
    check_ready(state)
    return {"image_size": state.training_size or None, "pixel_size": pixel_size(state)}
