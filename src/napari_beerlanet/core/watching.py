"""What is told and kept of a training run while it goes on: events, results, checkpoints."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil  # type: ignore[import-untyped]
import torch
from torch import distributed

from napari_beerlanet import __version__

from . import yolo
from .checkpoint import save_checkpoint
from .classstain import Sampled, describe_densities
from .dataset import Dataset
from .detector import Detector
from .device import describe_device
from .measure import densities_in_boxes
from .network import StainDetectionModel
from .pace import Pace
from .progress import Cancelled, Report, tell
from .runfiles import RunFolder
from .sizes import describe_sizes
from .stainfit import StainFit, fit_stain
from .trainer import StainTrainer

Event = dict[str, Any]


class Keeper:
    """A `Watcher` that tells events and writes an epoch's files, whole, in this order.

    Checkpoints come before the state: a run that is killed in between repeats the epoch and
    writes the same ones again.

    Parameters
    ----------
    info
        The checkpoints' header, but for what changes from epoch to epoch.
    sample
        Images of the training data with their boxes, which tell what stains the front end has seen
        and how dense they are in each class.
    rows
        results.csv so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        info: dict[str, Any],
        sample: Sequence[Sampled],
        tell_event: Callable[[Event], None],
        report: Report | None = None,
        rows: list[dict[str, float]] | None = None,
    ) -> None:
        self.folder, self.info, self.sample = folder, info, sample
        self.tell, self.report, self.rows = tell_event, report, rows or []
        self.epoch_began = time.monotonic()
        self.pace = Pace()
        self.so_far = (0, 1, "")

    def batch(self, trainer: StainTrainer) -> None:
        """Tell of a batch, and stop where that is asked for."""
        self.pace.batch(trainer.epoch)
        event = {"event": "batch", **self._where(trainer), "losses": _losses(trainer)}
        if _is_first():
            self.tell(event)
        self.check(trainer, event)

    def check(self, trainer: StainTrainer, event: Event | None = None) -> None:
        """Raise `Cancelled` if the run shall end; of several processes all or none do."""
        several = distributed.is_initialized()
        if several and event is None:  # in validation each has batches of its own
            return
        try:
            if event is not None:
                done = (event["epoch"] - 1) * event["batches"] + event["batch"]
                total = event["epochs"] * event["batches"]
                self.so_far = (done, total, f"epoch {event['epoch']} of {event['epochs']}")
            tell(self.report, *self.so_far)
            asked = self.folder.stop_file.exists()
        except Cancelled:
            if not several:
                raise
            asked = True
        if several:
            flag = torch.tensor([float(asked)], device=trainer.device)
            distributed.all_reduce(flag, distributed.ReduceOp.MAX)
            asked = bool(flag)
        if asked:
            raise Cancelled("stopped as asked")

    def epoch(self, trainer: StainTrainer) -> None:
        """Write the epoch's files, then tell of it."""
        metrics = _metrics(trainer)
        row = {"epoch": trainer.epoch + 1, **trainer.row}
        self.rows = [*self.rows, row]
        best = trainer.best_fitness == trainer.fitness
        detector = self._detector(trainer, metrics)
        for path in [self.folder.best] * best + [self.folder.last]:
            save_checkpoint(detector, path)
        self.folder.write_state(
            {
                **trainer.state_dict(),
                "rows": self.rows,
                "finished": bool(trainer.stop),  # as nothing got better for long, perhaps
                "classes": self.info["classes"],
                "data_hash": self.info["training"]["data_hash"],
            }
        )
        self.folder.write_results(self.rows)
        self.folder.write_run(epoch=trainer.epoch + 1)
        now = time.monotonic()
        seconds, self.epoch_began = now - self.epoch_began, now
        rates = {k: v for k, v in trainer.row.items() if k.startswith("lr/")}
        self.tell(
            {
                "event": "epoch",
                **self._where(trainer),
                "losses": _losses(trainer),
                "metrics": metrics,
                "learning_rate": max(rates.values(), default=None),
                "best": best,
                "seconds": round(seconds, 3),
            }
        )

    def _where(self, trainer: StainTrainer) -> Event:
        batches = len(trainer.train_loader)
        epochs = trainer.epochs - trainer.epoch
        left = self.pace.left(epochs * batches - trainer.batch_number, epochs)
        return {
            "epoch": trainer.epoch + 1,
            "epochs": trainer.epochs,
            "batch": trainer.batch_number,
            "batches": batches,
            "eta_seconds": None if left is None else round(left, 1),
            "device": describe_device(trainer.device),
            "memory_mb": _memory(trainer.device),
        }

    def _detector(self, trainer: StainTrainer, metrics: dict[str, Any]) -> Detector:
        network = trainer.ema.ema
        training = {
            **self.info["training"],
            "metrics": metrics,
            "epochs": trainer.epoch + 1,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }
        info = {**self.info, **seen_in(network, self.sample, self.info), "training": training}
        return Detector(network, info, trainer.device)


def object_sizes(dataset: Dataset, image_size: int) -> dict[str, Any]:
    """Sizes per class of the training boxes, in pixels of images as long as `image_size`."""
    boxes, labels = [np.zeros((0, 2))], [np.zeros(0, np.int64)]
    for item in dataset.splits["train"]:
        height, width = dataset.facts[item.image].shape
        scale = image_size / max(height, width)
        boxes.append(item.cxcywh[:, 2:] * (width * scale, height * scale))
        labels.append(item.labels)
    return describe_sizes(np.concatenate(boxes), np.concatenate(labels), dataset.names)


def seen_in(
    network: StainDetectionModel, sample: Sequence[Sampled], info: dict[str, Any]
) -> dict[str, Any]:
    """The header's entries on what a front end sees in training images, `stain_seen` and …

    … `densities_seen`, which keeps what `info` has of classes that the sample hardly shows.
    """
    fits = [fit_stain(network, one.pixels) for one in sample]
    means = [_densities(fit, one) for fit, one in zip(fits, sample, strict=True)]
    labels = np.concatenate([one.labels for one in sample])
    here = describe_densities(np.concatenate(means), labels, info["classes"])
    return {
        "stain_seen": stain_seen(fits),
        "densities_seen": {**(info.get("densities_seen") or {}), **here},
    }


def _densities(fit: StainFit, one: Sampled) -> npt.NDArray[np.float32]:
    """(n, r) mean densities of each component in an image's boxes, as `detect` measures them."""
    rows, table = fit.look_up(one.pixels)
    shape, r = one.pixels.shape[:2], table.shape[1]
    return densities_in_boxes(lambda y, x: (rows[y, x], table), shape, r, one.xyxy)[0]


def stain_seen(fits: Sequence[StainFit]) -> dict[str, Any]:
    """Background light x₀ (mean and spread) and mean spectra (3, r) of images."""
    x0, S = np.array([fit.background for fit in fits]), np.array([fit.spectra for fit in fits])
    background = {"mean": _plain(x0.mean(0)), "sd": _plain(x0.std(0))}
    return {"background": background, "spectra": _plain(S.mean(0))}


def versions() -> dict[str, str]:
    """Of what takes part in training."""
    return {
        "napari-beerlanet": __version__,
        "ultralytics": yolo.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _metrics(trainer: StainTrainer) -> dict[str, Any]:
    """Of the validation after the epoch, as checkpoints record them."""
    box = trainer.validator.metrics.box
    names = trainer.data["names"]
    each = zip(box.ap_class_index, box.ap50, box.ap, strict=True) if len(box.all_ap) else ()
    per_class = {
        names[int(k)]: {"mAP50": round(float(a), 5), "mAP50-95": round(float(b), 5)}
        for k, a, b in each
    }
    short = {"mAP50": "mAP50", "mAP50-95": "mAP50-95", "precision": "precision", "recall": "recall"}
    found = {key: trainer.row.get(f"metrics/{name}(B)") for key, name in short.items()}
    return {**found, "per_class": per_class}


def _losses(trainer: StainTrainer) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in (trainer.tloss or {}).items()}


def _memory(device: torch.device) -> int:
    """Megabytes in use: on a GPU what torch holds there, else what the process holds."""
    if device.type == "cuda":
        return round(torch.cuda.memory_reserved(device) / 1e6)
    return round(float(psutil.Process().memory_info().rss) / 1e6)


def _is_first() -> bool:
    return int(os.environ.get("RANK", "-1")) in (-1, 0)


def _plain(array: npt.NDArray[np.float64]) -> Any:
    return np.round(array, 6).tolist()
