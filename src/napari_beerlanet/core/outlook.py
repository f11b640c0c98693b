"""What a training will be before it begins: its data, its length, and how long it will take.

The time comes from a step that is measured on this machine, or, better, from an earlier run that
did the same.
"""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .checkpoint import load_checkpoint
from .dataset import Dataset, check_dataset, read_dataset
from .detector import Detector
from .device import describe_device, pick_device
from .labels import DataError
from .network import StainDetectionModel
from .preparing import is_fresh, settled
from .progress import Report, tell
from .recipe import FRESH_SIZE, Recipe
from .runs import EventTail, Run

_LOADING = 8.0  # seconds until the first step: programs and data are loaded
_WRITING = 0.7  # seconds for an epoch's files
_BESIDES = 1.3  # what a step takes besides forward and backward: loss, images, optimizer
_MEASURED = 0.4  # seconds of steps that are enough
_AT_MOST = 1  # images of a measured step on a CPU, where twice as many take twice as long


@dataclass(frozen=True)
class DataSummary:
    """Of a data.yaml that can be trained with; `notes` are sentences on what is odd."""

    dataset: Dataset
    notes: list[str]

    @property
    def counts(self) -> dict[str, int]:
        """Boxes of each class in training."""
        names, boxes = self.dataset.names, dict.fromkeys(self.dataset.names, 0)
        for item in self.dataset.splits["train"]:
            for label in item.labels:
                boxes[names[int(label)]] += 1
        return boxes

    def sentence(self) -> str:
        """For people."""
        train, val = (len(self.dataset.splits[split]) for split in ("train", "val"))
        boxes = ", ".join(f"{count} {name}" for name, count in self.counts.items())
        return f"{_images(train)} to learn from ({boxes}), {val} to check with."


@dataclass(frozen=True)
class Outlook:
    """Of a run: steps, and seconds on a device; `earlier` where a run told the time."""

    epochs: int
    steps: int
    seconds: float
    device: str
    image_size: int
    earlier: bool = False


def look_at_data(path: str | os.PathLike[str], report: Report | None = None) -> DataSummary:
    """Read and check all that training would; a `DataError` says what is wrong."""
    dataset = read_dataset(path)
    return DataSummary(dataset, check_dataset(dataset, ("train", "val"), report))


def look_ahead(
    recipe: Recipe,
    dataset: Dataset,
    runs: Iterable[Run] = (),
    report: Report | None = None,
    parent: Detector | None = None,
) -> Outlook:
    """How long a run will take. What the run itself would refuse is refused here.

    `parent` is the model to begin with where it is no file.
    """
    device = pick_device(recipe.devices[0])
    tell(report, 0, 3, "loading the model")
    parent = parent or load_checkpoint(str(recipe.model), device="cpu")
    if recipe.scope == "stain" and parent.classes != dataset.names:
        raise DataError(
            f"“Stain only” keeps the classes that the model knows ({', '.join(parent.classes)}), "
            f"and the data has {', '.join(dataset.names)}; train the head or everything."
        )
    fixed = settled(recipe, parent, dataset)
    size = recipe.image_size or (FRESH_SIZE if is_fresh(parent) else parent.info["image_size"])
    size = -(-size // 32) * 32
    seen = len(dataset.splits["train"]) * (fixed.repeats or 1)
    checked = len(dataset.splits["val"])
    batch = fixed.batch if isinstance(fixed.batch, int) else 8
    epochs = fixed.epochs or 1
    tell(report, 1, 3, "timing a step")
    pace = _earlier(fixed, runs, device, seen)
    per_epoch = pace
    if per_epoch is None:
        step, check = _measure(parent.network, recipe.scope, size, batch, device)
        per_epoch = seen * step * _BESIDES + checked * check * _BESIDES + _WRITING
    tell(report, 3, 3, "done")
    seconds = _LOADING + epochs * per_epoch
    steps = epochs * -(-seen // batch)
    return Outlook(epochs, steps, seconds, describe_device(device), size, pace is not None)


def _earlier(recipe: Recipe, runs: Iterable[Run], device: torch.device, seen: int) -> float | None:
    """Seconds of an epoch in the newest run that differs in nothing that costs time."""
    same = ("data", "model", "scope", "image_size", "batch", "repeats")
    for run in runs:
        if any(run.settings.get(key) != getattr(recipe, key) for key in same):
            continue
        events = EventTail(run.path, latest=1 << 17).read()
        told = [event for event in events if event["event"] == "epoch"]
        alike = [e for e in told if str(e.get("device")) == describe_device(device)]
        seconds = sorted(float(e["seconds"]) for e in alike if _is_time(e.get("seconds")))
        if len(seconds) > 1 and _is_time(alike[-1].get("batches")):
            batch = recipe.batch if isinstance(recipe.batch, int) else 8
            return seconds[len(seconds) // 2] * -(-seen // batch) / float(alike[-1]["batches"])
    return None


_known: dict[tuple[Any, ...], tuple[float, float]] = {}


def _measure(
    network: StainDetectionModel, scope: str, size: int, batch: int, device: torch.device
) -> tuple[float, float]:
    """Seconds per image of a training step, and of a check."""
    count = min(batch, _AT_MOST) if device.type == "cpu" else batch
    weights = sum(p.numel() for p in network.parameters())
    key = (weights, scope, size, count, str(device))
    if key not in _known:
        trained = copy.deepcopy(network).to(device).float().train()
        head = f"model.{len(trained.model) - 1}."
        prefix = {"all": "", "head": head, "stain": "stain."}[scope]
        for name, parameter in trained.named_parameters():
            parameter.requires_grad = name.startswith(prefix)
        images = torch.rand(count, 3, size, size, device=device)
        _known[key] = (
            _timed(lambda: _step(trained, images), device) / count,
            _timed(lambda: _check(trained, images), device) / count,
        )
    return _known[key]


def _timed(work: Any, device: torch.device) -> float:
    """Seconds of a call, after one that does not count."""
    work()
    calls, began = 0, time.perf_counter()
    while calls == 0 or (time.perf_counter() - began < _MEASURED and calls < 5):
        work()
        calls += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
    return (time.perf_counter() - began) / calls


def _step(network: StainDetectionModel, images: torch.Tensor) -> None:
    total = sum(part.float().mean() for part in _tensors(network(images)) if part.requires_grad)
    total.backward()  # type: ignore[union-attr]
    network.zero_grad()


def _check(network: StainDetectionModel, images: torch.Tensor) -> None:
    with torch.no_grad():
        network(images)


def _tensors(found: Any) -> Iterable[torch.Tensor]:
    """All tensors in lists and dicts of them."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, (list, tuple, dict)):
        for part in found.values() if isinstance(found, dict) else found:
            yield from _tensors(part)


def project_of(data: str | os.PathLike[str]) -> Path:
    """The folder in which a data.yaml lies: its runs and models are there."""
    path = Path(data)
    return (path if path.is_dir() else path.parent).absolute()


def _images(count: int) -> str:
    return "1 image" if count == 1 else f"{count} images"


def _is_time(value: Any) -> bool:
    return isinstance(value, (int, float)) and 0 < value < 1e6
