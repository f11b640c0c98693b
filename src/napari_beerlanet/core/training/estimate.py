"""Estimate a training run before it starts: its data, its steps and its duration.

The duration comes from a step that is timed on this machine or, better, from an earlier run with
the same settings.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from napari_beerlanet.core.checkpoints.checkpoint import load_classifier, load_detector
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.network import ClassificationNetwork
from napari_beerlanet.core.common.device import describe_device, pick_device, synchronize
from napari_beerlanet.core.common.events import EventTail
from napari_beerlanet.core.common.messages import count_of, name_list
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.storage import DataError
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.formats.class_folders import (
    CropDataset,
    check_crop_dataset,
    unreviewed_notes,
)
from napari_beerlanet.core.formats.dataset import Dataset, check_dataset, read_dataset
from napari_beerlanet.core.stains.front_end import FRONT_END_PREFIXES
from napari_beerlanet.core.training.runs import Run
from napari_beerlanet.core.training.settings import Scope, TrainSettings, choose_scope
from napari_beerlanet.core.training.setup import (
    class_counts,
    few_boxes_notes,
    resolve_defaults_for,
    training_image_size,
)
from napari_beerlanet.core.training.train_classifier import (
    ClassifierTrainSettings,
    few_crops_notes,
    training_crops,
)
from napari_beerlanet.core.training.trainer.data import training_views

_STARTUP_S = 8.0  # seconds until the first step: programs and data are loaded
_EPOCH_OVERHEAD_S = 0.7  # seconds for an epoch's files
_STEP_OVERHEAD_FACTOR = 1.3  # for all but forward and backward: loss, images, optimizer
_MIN_TIMING_S = 0.4  # seconds of steps that are enough
_MAX_TIMED_CROPS = 8  # of a measured step of a classifier
_MAX_CPU_BATCH = 1  # images of a measured step on a CPU, where twice as many take twice as long


@dataclass(frozen=True)
class DatasetSummary:
    """Of a data.yaml that can be trained with; `notes` are sentences on what is odd."""

    dataset: Dataset
    notes: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Boxes of each class in training."""
        return class_counts(self.dataset)

    def scope(self, known_classes: Sequence[str]) -> Scope:
        """What to train on so much data, of a model that knows these classes."""
        images, boxes = len(self.dataset.splits["train"]), sum(self.counts.values())
        return choose_scope(images, boxes, list(known_classes) == self.dataset.names)

    def sentence(self) -> str:
        """For people."""
        train, val = (len(self.dataset.splits[split]) for split in ("train", "val"))
        boxes = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{count_of(train, 'image')} for training ({boxes}), {val} for validation."


@dataclass(frozen=True)
class TrainingEstimate:
    """Steps of a run, and its seconds on a device; `from_earlier_run` where one was measured."""

    epochs: int
    steps: int
    seconds: float
    device: str
    image_size: int
    from_earlier_run: bool = False


def summarise_dataset(path: str | os.PathLike[str], report: Report | None = None) -> DatasetSummary:
    """Read and check all that training would; a `DataError` says what is wrong."""
    dataset = read_dataset(path)
    notes = check_dataset(dataset, ("train", "val"), report)
    return DatasetSummary(dataset, [*few_boxes_notes(dataset), *notes])


@dataclass(frozen=True)
class CropSummary:
    """Of crops that a classifier can be trained with; `notes` are sentences on what is odd."""

    dataset: CropDataset
    notes: list[str]

    def sentence(self) -> str:
        """For people: "34 crops of 3 images for training (20 a, 14 b), 12 of 1 image for …"."""
        parts = []
        for split in ("train", "val"):
            counts = {n: k for n, k in self.dataset.counts(split).items() if k}
            crops = count_of(sum(counts.values()), "crop") if split == "train" else ""
            number = crops or str(sum(counts.values()))
            sources = self.dataset.sources(split)
            images = f" of {count_of(sources, 'image')}" if self.dataset.annotated else ""
            listed = ", ".join(f"{count} {name}" for name, count in counts.items())
            parts.append(f"{number}{images} for " + f"{_SPLIT_WORDS[split]} ({listed})")
        return f"{', '.join(parts)}."


_SPLIT_WORDS = {"train": "training", "val": "validation"}


def summarise_crops(
    path: str | os.PathLike[str], model: str | None = None, report: Report | None = None
) -> CropSummary:
    """Read and check all that a classifier's training would, from `model` if there is one."""
    settings = ClassifierTrainSettings(data=str(path), model=model)
    dataset = training_crops(settings)
    notes = check_crop_dataset(dataset, ("train", "val"), report, 0 if dataset.annotated else 1)
    boxes = any(item.cxcywh for items in dataset.splits.values() for item in items)
    if boxes and not dataset.annotated:
        notes.insert(0, "No cell has a type, so the classes of the boxes are learned.")
    return CropSummary(dataset, [*unreviewed_notes(dataset), *few_crops_notes(dataset), *notes])


def estimate_classifier_duration(
    settings: ClassifierTrainSettings,
    dataset: CropDataset,
    report: Report | None = None,
    parent: Classifier | None = None,
) -> TrainingEstimate:
    """Estimate how long the training of a classifier will take, from a timed step.

    `parent` is the model to start from where it is no file.
    """
    device = pick_device(settings.devices[0])
    report_progress(report, 0, 3, "loading the model")
    if parent is None and settings.model is not None:
        parent = load_classifier(settings.model, "cpu")
    if parent is not None:
        network = parent.network
    else:
        with torch.random.fork_rng(devices=[]):
            network = ClassificationNetwork(
                settings.backbone, len(dataset.names), settings.network_settings
            )
    crops, validated = len(dataset.splits["train"]), len(dataset.splits["val"])
    start = settings.model or ("" if parent is not None else None)
    resolved = settings.replace(model=start).resolved(crops)
    batch, epochs, size = resolved.batch or 1, resolved.epochs or 1, network.settings.input_size
    report_progress(report, 1, 3, "timing a step")
    count = min(batch, _MAX_TIMED_CROPS)
    trained = copy.deepcopy(network).to(device).train()
    images = torch.rand(max(count, 2), 3, size, size, device=device)
    step = _time_call(lambda: training_step(trained, images), device) / len(images)
    check = _time_call(lambda: _inference_step(trained.eval(), images), device) / len(images)
    report_progress(report, 3, 3, "done")
    seconds = epochs * ((crops * step + validated * check) * _STEP_OVERHEAD_FACTOR)
    seconds += _STARTUP_S + epochs * _EPOCH_OVERHEAD_S
    steps = epochs * -(-crops // batch)
    return TrainingEstimate(epochs, steps, seconds, describe_device(device), size)


def estimate_duration(
    settings: TrainSettings,
    dataset: Dataset,
    runs: Iterable[Run] = (),
    report: Report | None = None,
    parent: Detector | None = None,
) -> TrainingEstimate:
    """Estimate how long a run will take. What the run itself would refuse is refused here.

    `parent` is the model to start from where it is no file.
    """
    device = pick_device(settings.devices[0])
    report_progress(report, 0, 3, "loading the model")
    parent = parent or load_detector(str(settings.model), device="cpu")
    if settings.scope == "stain" and parent.classes != dataset.names:
        raise DataError(
            f"“Stain only” keeps the classes that the model knows ({name_list(parent.classes)}), "
            f"and the data has {name_list(dataset.names)}; train the head or everything."
        )
    size = training_image_size(settings, parent)
    dataset = training_views(dataset, parent.info, size)
    resolved = resolve_defaults_for(settings, parent, dataset)
    every = resolved.validate_every or 1
    shown = len(dataset.splits["train"]) * (resolved.repeats or 1) * every  # in a round
    validated = len(dataset.splits["val"])
    batch = resolved.batch_size
    epochs = resolved.epochs or 1
    report_progress(report, 1, 3, "timing a step")
    measured = _round_seconds_of_earlier_run(resolved, runs, device, shown)
    round_seconds = measured
    if round_seconds is None:
        step, check = _seconds_per_image(parent.network, settings.scope, size, batch, device)
        round_seconds = (shown * step + validated * check) * _STEP_OVERHEAD_FACTOR
        round_seconds += _EPOCH_OVERHEAD_S
    report_progress(report, 3, 3, "done")
    seconds = _STARTUP_S + resolved.rounds * round_seconds
    steps = resolved.rounds * -(-shown // batch)
    name = describe_device(device)
    return TrainingEstimate(epochs, steps, seconds, name, size, measured is not None)


def _round_seconds_of_earlier_run(
    settings: TrainSettings, runs: Iterable[Run], device: torch.device, shown: int
) -> float | None:
    """Seconds of a round in the newest run that differs in nothing that costs time."""
    same = ("data", "model", "scope", "image_size", "batch", "repeats", "validate_every")
    for run in runs:
        if any(run.settings.get(key) != getattr(settings, key) for key in same):
            continue
        events = EventTail(run.path, latest=1 << 17).read()
        epochs = [event for event in events if event["event"] == "epoch"]
        here = [e for e in epochs if str(e.get("device")) == describe_device(device)]
        seconds = sorted(float(e["seconds"]) for e in here if _is_duration(e.get("seconds")))
        if len(seconds) > 1 and _is_duration(here[-1].get("batches")):
            batches = -(-shown // settings.batch_size)
            return seconds[len(seconds) // 2] * batches / float(here[-1]["batches"])
    return None


_timings: dict[tuple[Any, ...], tuple[float, float]] = {}


def _seconds_per_image(
    network: StainDetectionModel, scope: str, size: int, batch: int, device: torch.device
) -> tuple[float, float]:
    """Seconds per image of a training step, and of validation."""
    count = min(batch, _MAX_CPU_BATCH) if device.type == "cpu" else batch
    weights = sum(p.numel() for p in network.parameters())
    key = (weights, scope, size, count, str(device))
    if key not in _timings:
        trained = copy.deepcopy(network).to(device).float().train()
        head = f"model.{len(trained.model) - 1}."
        prefix = {"all": ("",), "head": (head,), "stain": FRONT_END_PREFIXES}[scope]
        for name, parameter in trained.named_parameters():
            parameter.requires_grad = name.startswith(prefix)
        images = torch.rand(count, 3, size, size, device=device)
        _timings[key] = (
            _time_call(lambda: training_step(trained, images), device) / count,
            _time_call(lambda: _inference_step(trained, images), device) / count,
        )
    return _timings[key]


def _time_call(work: Any, device: torch.device) -> float:
    """Seconds of a call, after one that does not count."""
    work()
    calls, started = 0, time.perf_counter()
    while calls == 0 or (time.perf_counter() - started < _MIN_TIMING_S and calls < 5):
        work()
        calls += 1
        synchronize(device)
    return (time.perf_counter() - started) / calls


def training_step(network: torch.nn.Module, images: torch.Tensor) -> None:
    """Forward and backward on images (N, 3, H, W), which costs what a training step costs."""
    total = sum(
        part.float().mean() for part in _iter_tensors(network(images)) if part.requires_grad
    )
    total.backward()  # type: ignore[union-attr]
    network.zero_grad()


def _inference_step(network: torch.nn.Module, images: torch.Tensor) -> None:
    with torch.no_grad():
        network(images)


def _iter_tensors(output: Any) -> Iterable[torch.Tensor]:
    """All tensors in lists and dicts of them."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, (list, tuple, dict)):
        for part in output.values() if isinstance(output, dict) else output:
            yield from _iter_tensors(part)


def _is_duration(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e6
