"""From the form to a training run: inspect the data, estimate the duration, create the run.

Only `EstimateLabel` is a widget; everything else runs in worker threads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from qtpy.QtWidgets import QLabel
from superqt.utils import qdebounced

from napari_beerlanet.core.common.messages import error_message, format_duration
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.training.runs import RunFolder, new_run, read_run
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.core.training.train_classifier import ClassifierTrainSettings
from napari_beerlanet.ui.common.tasks import Task

if TYPE_CHECKING:  # what takes long to load is loaded in worker threads
    from napari_beerlanet.core.classification.classifier import Classifier
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.training.estimate import (
        CropSummary,
        DatasetSummary,
        TrainingEstimate,
    )

    InitialModel = str | Path | Detector | Classifier

NEW_CLASSIFIER = ""
"""Stands for the initial model of a classifier that starts from a backbone."""

_DEBOUNCE_MS = 400  # after a change, until the duration is estimated again


class EstimateRequest(NamedTuple):
    """What to estimate: a run of this project, from this model, with the form's settings."""

    project: Path
    model: InitialModel
    settings: dict[str, Any]
    dataset: Any  # a Dataset, or a CropDataset of a classifier


class EstimateLabel(QLabel):
    """The estimated duration of the run that would start now.

    `request` returns what to estimate, or None where nothing can be.
    """

    def __init__(self, task: Task, request: Callable[[], EstimateRequest | None]) -> None:
        super().__init__()
        self.setWordWrap(True)
        self.setToolTip("Estimated from a step timed on this machine, or from an earlier run.")
        self._task, self._request = task, request
        self._estimate_soon = qdebounced(self._estimate, timeout=_DEBOUNCE_MS, parent=self)

    def update_soon(self) -> None:
        """Estimate again a moment after the last change."""
        self.cancel()
        self._estimate_soon()

    def cancel(self) -> None:
        """Show nothing, and stop measuring."""
        self._estimate_soon.cancel()
        self._task.cancel()
        self.setText("")

    def _estimate(self) -> None:
        request = self._request()
        if request is None:
            return
        self.setText("Timing a step …")
        self._task.start(
            lambda report: estimate_run(*request, report),
            lambda estimate: self.setText(describe_estimate(estimate)),
            lambda error: self.setText(error_message(error)),
        )


def make_settings(
    project: Path, model: InitialModel, settings: dict[str, Any]
) -> TrainSettings | ClassifierTrainSettings:
    """The settings of a run. A model that is not a file gets its path when the run is created.

    Image size and pixel size come from the project if it has them and the form does not. A
    classifier may start without a model: "".
    """
    name = os.fspath(model) if isinstance(model, (str, Path)) else None
    if settings.get("task") == "classify":
        chosen = {key: value for key, value in settings.items() if value is not None}
        return ClassifierTrainSettings(model=name or None, data=str(project), **chosen)
    of_project = {} if settings.get("pixel_size") else _project_settings(project)
    given = {key: value for key, value in settings.items() if value is not None}
    return TrainSettings(model=name, data=str(project / "data.yaml"), **{**of_project, **given})


def create_run(project: Path, model: InitialModel, settings: dict[str, Any]) -> Path:
    """Create the run's folder; a model that is not a file is saved into it.

    A backbone or weights that cannot be trained are refused before there is a folder.
    """
    train_settings = make_settings(project, model, settings)
    if isinstance(train_settings, ClassifierTrainSettings) and model == NEW_CLASSIFIER:
        from napari_beerlanet.core.training.classifier_setup import check_start

        check_start(train_settings)
    path = new_run(project, train_settings.model_dump())
    if not isinstance(model, (str, Path)):
        from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint

        folder = RunFolder(path, locked=False)
        save_checkpoint(model, folder.start)
        folder.write_run(settings=train_settings.replace(model=str(folder.start)).model_dump())
    return path


def set_run_device(path: Path, device: str) -> None:
    """Let a run be resumed on another device than the one it was started on."""
    settings = read_run(path / "run.json")["settings"]
    if settings.get("device") != device:
        RunFolder(path, locked=False).write_run(settings={**settings, "device": device})


def inspect_project(
    folder: Path, report: Report, task: str = "detect", model: str | None = None
) -> tuple[DatasetSummary | CropSummary, list[str]]:
    """A summary of the project's data, and the devices of this machine.

    The `model` is the classifier that training would start from, if there is one.
    """
    from napari_beerlanet.core.common.device import available_devices
    from napari_beerlanet.core.common.storage import FileError
    from napari_beerlanet.core.training.estimate import summarise_crops, summarise_dataset

    if not folder.is_dir():
        raise FileError(f"{folder}: the folder does not exist; connect the drive that it is on.")
    if task == "classify":
        return summarise_crops(folder, model, report), available_devices()
    return summarise_dataset(folder / "data.yaml", report), available_devices()


def _project_settings(project: Path) -> dict[str, Any]:
    """Image size and pixel size of a project made in the Annotate panel."""
    if not (project / "project.json").is_file():
        return {}
    from napari_beerlanet.core.project.project import Project

    opened = Project.open(project, read_only=True)
    opened.check_ready_to_train()
    return {"image_size": opened.training_size or None, "pixel_size": opened.pixel_size}


def estimate_run(
    project: Path,
    model: InitialModel,
    settings: dict[str, Any],
    dataset: Any,
    report: Report,
) -> TrainingEstimate:
    """A `TrainingEstimate`; raises `ValueError` where the run would be refused."""
    from napari_beerlanet.core.training.estimate import (
        estimate_classifier_duration,
        estimate_duration,
    )
    from napari_beerlanet.core.training.runs import list_runs

    train_settings = make_settings(project, model, settings)
    parent: Any = None if isinstance(model, (str, Path)) else model
    if isinstance(train_settings, ClassifierTrainSettings):
        return estimate_classifier_duration(train_settings, dataset, report, parent)
    return estimate_duration(train_settings, dataset, list_runs(project), report, parent)


def describe_estimate(estimate: TrainingEstimate) -> str:
    """One line, so that the button below stays in place; no more precise than the estimate is."""
    length = f"{estimate.epochs} epochs, {estimate.steps} steps"
    return f"About {rounded_duration(estimate.seconds)} on {estimate.device} · {length}"


def rounded_duration(seconds: float) -> str:
    """A duration with one or two digits: "35 s", "6 min", "1 h 20 min"."""
    if seconds < 55:
        return format_duration(5 * max(round(seconds / 5), 1))
    if seconds < 3000:
        return f"{max(round(seconds / 60), 1)} min"
    return format_duration(600 * round(seconds / 600))
