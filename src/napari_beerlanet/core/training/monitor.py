"""Writes events, metrics and checkpoints while a run trains."""

from __future__ import annotations

import math
import os
import platform
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import numpy as np
import numpy.typing as npt
import psutil
import torch
from torch import distributed

from napari_beerlanet._version import __version__
from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
from napari_beerlanet.core.common.device import describe_device
from napari_beerlanet.core.common.events import Event, EventCallback
from napari_beerlanet.core.common.messages import count_of, format_score
from napari_beerlanet.core.common.progress import Cancelled, EtaEstimator, Report, report_progress
from napari_beerlanet.core.detection import ultralytics_api
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.object_sizes import MeasuredSizes, measure
from napari_beerlanet.core.detection.stain_statistics import (
    AnnotatedSample,
    describe_densities,
    measure_boxes,
)
from napari_beerlanet.core.formats.dataset import Dataset
from napari_beerlanet.core.stains.domain_shift import describe_stains
from napari_beerlanet.core.stains.front_end import StainFit, fit_stain
from napari_beerlanet.core.training.runs import RunFolder, TrainingDiverged
from napari_beerlanet.core.training.trainer.data import shown_shape
from napari_beerlanet.core.training.trainer.trainer import StainTrainer

_FAR_ABOVE, _VERY_FAR_ABOVE = 4.0, 10.0  # times the lowest loss of an epoch so far
_USUAL_LOSS = 2.0  # of a trained model; of hardly any boxes it may be much lower by chance
_MIN_KNOWN_SCORE = 0.2  # mAP50 below which there is nothing to collapse
_COLLAPSED = 0.1  # of the highest mAP50 so far


class TrainingMonitor:
    """A `TrainingCallback` that emits events and writes an epoch's files, whole, in this order.

    Checkpoints come before the state: a run that is killed in between repeats the epoch and
    writes the same ones again.

    Parameters
    ----------
    info
        The checkpoints' `info`, but for what changes from epoch to epoch.
    sample
        Images of the training data with their boxes, for the stains that the front end has seen and
        how dense they are in each class.
    rows
        results.csv so far.
    """

    def __init__(
        self,
        folder: RunFolder,
        info: dict[str, Any],
        sample: Sequence[Any],
        emit: EventCallback,
        report: Report | None = None,
        rows: list[dict[str, float]] | None = None,
    ) -> None:
        self.folder, self.info, self.sample = folder, info, sample
        self.emit, self.report, self.rows = emit, report, rows or []
        self.epoch_started = time.monotonic()
        self.eta = EtaEstimator()
        self.last_progress = (0, 1, "")

    def on_batch_end(self, trainer: StainTrainer) -> None:
        """Emit an event of the batch, and stop where that is requested."""
        self.eta.record_batch(trainer.epoch)
        event = {"event": "batch", **self._position(trainer), "losses": _losses(trainer)}
        if _is_main_process():
            self.emit(event)
        place = f"epoch {event['epoch']} of {event['epochs']}"
        self.last_progress = (event["step"], event["steps"], place)
        self._stop_if_requested(trainer)

    def on_validation_batch_end(self, trainer: StainTrainer) -> None:
        """Stop where that is requested; of several processes each has batches of its own."""
        if not distributed.is_initialized():
            self._stop_if_requested(trainer)

    def _stop_if_requested(self, trainer: StainTrainer) -> None:
        """Raise `Cancelled` if the run shall stop; of several processes all or none do."""
        multi_gpu = distributed.is_initialized()
        try:
            report_progress(self.report, *self.last_progress)
            requested = self.folder.stop_file.exists()
        except Cancelled:
            if not multi_gpu:
                raise
            requested = True
        if multi_gpu:
            flag = torch.tensor([float(requested)], device=trainer.device)
            distributed.all_reduce(flag, distributed.ReduceOp.MAX)
            requested = bool(flag)
        if requested:
            raise Cancelled("stopped as requested")

    def on_epoch_end(self, trainer: StainTrainer) -> None:
        """Write the epoch's files, then emit its event."""
        for message in trainer.image_notes.new_sentences() if _is_main_process() else ():
            self.emit({"event": "warning", "message": message})
        metrics = self.read_metrics(trainer)
        row = {"epoch": trainer.finished_epochs, **trainer.epoch_metrics}
        self.rows = [*self.rows, row]
        reason = explain_divergence(self.rows)
        best = trainer.best_fitness == trainer.fitness and not reason
        if not reason:  # else the checkpoints stay those of the epochs before
            self._save(trainer, metrics, best)
        self.folder.write_results(self.rows)
        self._record_epoch(trainer, best)
        self._emit_epoch(trainer, metrics, best)
        if reason:
            place = f"epoch {trainer.finished_epochs} of {trainer.total_epochs}"
            raise TrainingDiverged(f"Training diverged in {place}: {reason}")

    def _save(self, trainer: StainTrainer, metrics: dict[str, Any], best: bool) -> None:
        model = self.make_model(trainer, metrics)
        for path in [self.folder.best] * best + [self.folder.last]:
            save_checkpoint(model, path)
        self.folder.write_state(
            {
                **trainer.state_dict(),
                "rows": self.rows,
                "finished": bool(trainer.stop),  # as nothing got better for long, perhaps
                "classes": self.info["classes"],
                "data_hash": self.info["training"]["data_hash"],
            }
        )

    def _record_epoch(self, trainer: StainTrainer, best: bool) -> None:
        """How far the run is, and why it ends before its last epoch if it does."""
        done, total = trainer.finished_epochs, trainer.total_epochs
        changes: dict[str, Any] = {"epoch": done}
        if best:
            changes["best_epoch"] = done
        if trainer.stop and done < total:
            waited = count_of(int(trainer.stopper.patience) * trainer.validate_every, "epoch")
            changes["early_stop"] = (
                f"Stopped early at epoch {done} of {total}: no improvement for {waited}."
            )
        self.folder.write_run(**changes)

    def _emit_epoch(self, trainer: StainTrainer, metrics: dict[str, Any], best: bool) -> None:
        now = time.monotonic()
        seconds, self.epoch_started = now - self.epoch_started, now
        rates = {k: v for k, v in trainer.epoch_metrics.items() if k.startswith("lr/")}
        self.emit(
            {
                "event": "epoch",
                **self._position(trainer),
                "losses": _losses(trainer),
                "metrics": metrics,
                "learning_rate": max(rates.values(), default=None),
                "best": best,
                "seconds": round(seconds, 3),
            }
        )

    def _position(self, trainer: StainTrainer) -> Event:
        batches = len(trainer.train_loader)
        rounds = trainer.epochs - trainer.epoch
        left = self.eta.seconds_left(rounds * batches - trainer.batch_number, rounds)
        return {
            "epoch": trainer.current_epoch,
            "epochs": trainer.total_epochs,
            "step": trainer.epoch * batches + trainer.batch_number,
            "steps": trainer.epochs * batches,
            "batch": trainer.batch_number,
            "batches": batches,
            "eta_seconds": None if left is None else round(left, 1),
            "device": describe_device(trainer.device),
            "memory_mb": _memory_mb(trainer.device),
        }

    def read_metrics(self, trainer: StainTrainer) -> dict[str, Any]:
        """Those of the validation after the epoch, as checkpoints record them."""
        return _validation_metrics(trainer)

    def make_model(self, trainer: StainTrainer, metrics: dict[str, Any]) -> Any:
        """The model as it is after the epoch, to be saved."""
        network = trainer.ema.ema
        info = {**self.info, **describe_training_domain(network, self.sample, self.info)}
        info["training"] = self.training_record(trainer, metrics)
        return Detector(network, info, trainer.device)

    def training_record(self, trainer: StainTrainer, metrics: dict[str, Any]) -> dict[str, Any]:
        """`info["training"]` after the epoch."""
        return {
            **self.info["training"],
            "metrics": metrics,
            "epochs": trainer.finished_epochs,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
        }


def explain_divergence(rows: Sequence[Mapping[str, float]]) -> str:
    """Why the last of these epochs (rows of results.csv) shows divergence, "" where it does not.

    Few images give noisy numbers, so a loss has to be very far above the lowest one so far, or far
    above it twice in a row or together with a score that has collapsed; a score alone twice.
    """
    losses = [_total_loss(row) for row in rows]
    scores = [float(row.get("metrics/mAP50(B)") or 0.0) for row in rows]
    if not all(math.isfinite(loss) for loss in losses[-1:]):
        return "the loss is not a finite number"
    if len(rows) < 2:
        return ""
    lowest, highest = min(losses[:-1]), max(scores[:-1])
    level = max(lowest, _USUAL_LOSS)
    risen = [loss > _FAR_ABOVE * level for loss in losses[-2:]]
    known = highest >= _MIN_KNOWN_SCORE
    collapsed = [known and score < _COLLAPSED * highest for score in scores[-2:]]
    reasons = []
    if risen[-1] and (losses[-1] > _VERY_FAR_ABOVE * level or all(risen) or collapsed[-1]):
        reasons.append(f"the loss rose from {lowest:.1f} to {losses[-1]:.1f}")
    if collapsed[-1] and (reasons or all(collapsed)):
        before, now = format_score(highest), format_score(scores[-1])
        reasons.append(f"mAP50 on the validation images fell from {before} to {now}")
    return " and ".join(reasons)


def _total_loss(row: Mapping[str, float]) -> float:
    """The training loss of an epoch: box, class and distribution focal loss."""
    return sum(value for key, value in row.items() if key.startswith("train/"))


def training_object_sizes(dataset: Dataset, image_size: int) -> MeasuredSizes:
    """Sizes per class of the training boxes, in pixels of images as long as `image_size`."""
    images = []
    for item in dataset.splits["train"]:
        height, width = shown_shape(item, dataset.inspections)
        scale = image_size / max(height, width)
        sides = item.cxcywh[:, 2:] * (width * scale, height * scale)
        images.append((np.sqrt(sides.prod(1)), item.labels))
    return measure(images, dataset.names)


def describe_training_domain(
    network: StainDetectionModel, sample: Sequence[AnnotatedSample], info: dict[str, Any]
) -> dict[str, Any]:
    """What a front end sees in training images, as `info` has it for domain-shift warnings.

    `stain_seen`, and `densities_seen`, which keeps what `info` has of classes that the sample
    hardly shows.
    """
    fits = [fit_stain(network, one.pixels) for one in sample]
    means = [_mean_densities(fit, one) for fit, one in zip(fits, sample, strict=True)]
    labels = np.concatenate([one.labels for one in sample])
    here = describe_densities(np.concatenate(means), labels, info["classes"])
    return {
        "stain_seen": describe_stains(fits),
        "densities_seen": {**(info.get("densities_seen") or {}), **here},
    }


def _mean_densities(fit: StainFit, one: AnnotatedSample) -> npt.NDArray[np.float32]:
    """(n, r) mean densities of each component in an image's boxes, as `detect` measures them."""
    rows, table = fit.look_up(one.pixels)
    shape, r = one.pixels.shape[:2], table.shape[1]
    return measure_boxes(lambda y, x: (rows[y, x], table), shape, r, one.xyxy)[0]


def package_versions() -> dict[str, str]:
    """Of what takes part in training."""
    return {
        "napari-beerlanet": __version__,
        "ultralytics": ultralytics_api.__version__,
        "torch": str(torch.__version__),
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def _validation_metrics(trainer: StainTrainer) -> dict[str, Any]:
    """Of the validation after the epoch, as checkpoints record them."""
    box = trainer.validator.metrics.box
    names = trainer.data["names"]
    each = zip(box.ap_class_index, box.ap50, box.ap, strict=True) if len(box.all_ap) else ()
    per_class = {
        names[int(k)]: {"mAP50": round(float(a), 5), "mAP50-95": round(float(b), 5)}
        for k, a, b in each
    }
    keys = ("mAP50", "mAP50-95", "precision", "recall")
    overall = {key: trainer.epoch_metrics.get(f"metrics/{key}(B)") for key in keys}
    return {**overall, "per_class": per_class}


def _losses(trainer: StainTrainer) -> dict[str, float]:
    return {name: round(float(value), 5) for name, value in (trainer.tloss or {}).items()}


def _memory_mb(device: torch.device) -> int:
    """Megabytes in use: on a GPU what torch holds there, else what the process holds."""
    if device.type == "cuda":
        return round(torch.cuda.memory_reserved(device) / 1e6)
    return round(float(psutil.Process().memory_info().rss) / 1e6)


def _is_main_process() -> bool:
    return int(os.environ.get("RANK", "-1")) in (-1, 0)
