"""Ultralytics' training loop made deterministic, resumable and silent.

- An epoch draws its random numbers from (seed, epoch) and ends with a step of the optimizer, so a
  run that is resumed after a finished epoch gives the numbers of one that was never interrupted.
- Nothing is pickled, printed or downloaded; the `TrainingCallback` decides what is saved of an
  epoch.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import math
import os
import random
from collections.abc import Callable
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from napari_beerlanet.core.common.device import compute_pending
from napari_beerlanet.core.detection.ultralytics_api import DetectionTrainer, DetectionValidator
from napari_beerlanet.core.training.runs import TrainingDiverged

_RANK = int(os.environ.get("RANK", "-1"))  # of this process in multi-GPU training, -1 without it


_FOREIGN_DEVICES = ("xla",)
"""Types of devices that torch knows and Ultralytics does not."""


class TrainingCallback(Protocol):
    """What is called as training goes on; an exception from it ends training."""

    def on_batch_end(self, trainer: Any) -> None:
        """After every batch, in every process."""

    def on_validation_batch_end(self, trainer: Any) -> None:
        """After every batch of validation, in every process."""

    def on_epoch_end(self, trainer: Any) -> None:
        """After an epoch and its validation, in the first process only."""


class DeterministicTrainer(DetectionTrainer):  # type: ignore[misc]
    """A trainer that calls its `callback`, and resumes from a `state` that `state_dict` gave.

    `validate_every`: what Ultralytics calls an epoch (`epoch`, `epochs`) is a round of so many.
    """

    validate_every = 1

    def __init__(
        self,
        overrides: dict[str, Any],
        callback: TrainingCallback | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.callback, self.state = callback, state
        self.epoch_metrics: dict[str, float] = {}
        self._extra_callbacks: list[tuple[str, Callable[[Any], None]]] = []
        self.batch_number = self._batches_since_step = 0
        if overrides.get("compile"):
            importlib.import_module("torch._inductor")  # made deterministic if it is there
        device = str(overrides.get("device", ""))
        foreign = device.partition(":")[0] in _FOREIGN_DEVICES
        super().__init__(overrides={**overrides, "device": "cpu"} if foreign else overrides)
        if foreign:
            self.device = torch.device(device)
        self._remove_ultralytics_files()

    def _remove_ultralytics_files(self) -> None:
        """Remove what Ultralytics' constructor leaves in the folder; ours says the same."""
        if _RANK in (-1, 0):
            (self.save_dir / "args.yaml").unlink(missing_ok=True)
            if not any(self.wdir.iterdir()):
                self.wdir.rmdir()

    # --- what happens when -----------------------------------------------------------------------

    def add_callback(self, event: str, callback: Callable[[Any], None]) -> None:
        """Have `callback(trainer)` called at one of Ultralytics' events."""
        self._extra_callbacks.append((event, callback))

    def run_callbacks(self, event: str) -> None:
        """Ours and those added; Ultralytics' integrations would report to the network."""
        for _, callback in [pair for pair in self._extra_callbacks if pair[0] == event]:
            callback(self)
        if event == "on_train_epoch_start":
            self._seed_epoch()
        elif event == "on_train_batch_start":
            self.batch_number += 1
            self._batches_since_step += 1
        elif event == "on_train_batch_end":
            self._check_loss()
            if self.callback is not None:
                self.callback.on_batch_end(self)

    def _get_memory(self, fraction: bool = False) -> float:
        """Ultralytics' measure; a device that it does not know has none."""
        if self.device.type in _FOREIGN_DEVICES:
            return 0.0
        return float(super()._get_memory(fraction))

    def _clear_memory(self, threshold: float | None = None) -> None:
        if self.device.type not in _FOREIGN_DEVICES:
            super()._clear_memory(threshold)

    def get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Ultralytics' loader; for a device that it does not know as for the CPU."""
        device = self.device
        self.device = torch.device("cpu") if device.type in _FOREIGN_DEVICES else device
        try:
            return super().get_dataloader(*args, **kwargs)
        finally:
            self.device = device

    def get_validator(self) -> Any:
        """Ultralytics' validator, without its callbacks."""
        kind = _PlainValidator if self.device.type in _FOREIGN_DEVICES else DetectionValidator
        return kind(
            self.test_loader,
            save_dir=self.save_dir,
            args=copy.copy(self.args),
            _callbacks={"on_val_batch_end": [lambda _: self._on_validation_batch_end()]},
        )

    def _on_validation_batch_end(self) -> None:
        if self.callback is not None:
            self.callback.on_validation_batch_end(self)

    def save_metrics(self, metrics: dict[str, float]) -> None:
        """Keep the epoch's losses, metrics and learning rates for the callback."""
        self.epoch_metrics = {key: float(value) for key, value in metrics.items()}

    def save_model(self) -> bool:
        """Have the callback save the epoch; no pickle is written."""
        if self.callback is not None:
            self.callback.on_epoch_end(self)
        return True

    def final_eval(self) -> None:
        """Nothing: Ultralytics would unpickle its best checkpoint to validate it once more."""

    def _check_loss(self) -> None:
        if self.loss is not None and not bool(self.loss.isfinite()):
            raise TrainingDiverged(
                f"Training diverged in epoch {self.current_epoch} of {self.total_epochs}: the loss "
                "is not a finite number"
            )

    @property
    def total_epochs(self) -> int:
        """Passes through the images in all."""
        return int(self.epochs * self.validate_every)

    @property
    def finished_epochs(self) -> int:
        """Passes when this round is done."""
        return int((self.epoch + 1) * self.validate_every)

    @property
    def current_epoch(self) -> int:
        """The pass that the last batch was of."""
        part = self.validate_every * self.batch_number / max(len(self.train_loader), 1)
        return int(self.epoch * self.validate_every + max(math.ceil(part), 1))

    def _handle_nan_recovery(self, epoch: int) -> bool:
        """Never: the same random numbers would lead to the same end, see `_check_loss`."""
        return False

    # --- an epoch depends on nothing but the state before it -------------------------------------

    def _seed_epoch(self) -> None:
        self.batch_number = self._batches_since_step = 0
        numbers = np.random.SeedSequence([self.args.seed, self.epoch, _RANK + 1])
        seed = int(numbers.generate_state(1)[0])
        random.seed(seed)
        np.random.seed(seed)  # noqa: NPY002 - Ultralytics' transforms draw from it
        torch.manual_seed(seed)
        self.train_loader.generator.manual_seed(seed)
        if self.train_loader.num_workers == 0:  # processes would have to be started again
            self.train_loader.reset()

    @property
    def accumulate(self) -> float:
        """Batches per step. Within a batch: 0 where a step is due, else more than there are."""
        if self._batches_since_step == 0:
            return self._accumulate
        last = self.batch_number == len(self.train_loader)
        due = self._batches_since_step >= self._accumulate or last
        return 0 if due else math.inf

    @accumulate.setter
    def accumulate(self, batches: int) -> None:
        self._accumulate = batches

    def optimizer_step(self) -> None:
        """A step, after which batches are counted anew."""
        super().optimizer_step()
        compute_pending(self.device)
        self._batches_since_step = 0

    def _setup_train(self) -> None:
        super()._setup_train()
        if self.device.type in _FOREIGN_DEVICES:
            for model in (unwrap_model(self.model), self.ema.ema):
                model.model[-1].register_forward_hook(lambda *_: compute_pending(self.device))
            compute_pending(self.device)

    def _build_train_pipeline(self) -> None:
        # It is built again within a batch that did not fit into memory.
        self._batches_since_step = 0
        super()._build_train_pipeline()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next epoch depends on, as tensors, numbers and text."""
        best = self.best_fitness
        return {
            "epoch": self.epoch,
            "model": unwrap_model(self.model).state_dict(),
            "ema": self.ema.ema.state_dict(),
            "updates": self.ema.updates,
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "best_fitness": None if best is None else float(best),
            "stopper": {
                "best_fitness": float(self.stopper.best_fitness),
                "best_epoch": self.stopper.best_epoch,
            },
        }

    def resume_training(self, ckpt: Any) -> None:
        """Resume from `state`, if there is one."""
        if self.state is None:
            return
        state, model = self.state, unwrap_model(self.model)
        model.load_state_dict(state["model"])
        self.ema.ema.load_state_dict(state["ema"])
        self.ema.updates = state["updates"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.scaler.load_state_dict(state["scaler"])
        self.best_fitness = state["best_fitness"]
        self.stopper.__dict__.update(state["stopper"])
        self.start_epoch = state["epoch"] + 1
        if hasattr(model.model[-1], "one2one_cv2"):  # its loss changes from epoch to epoch
            model.criterion = model.init_criterion()
            model.criterion.updates = self.start_epoch - 1
            model.criterion.update()


class _PlainValidator(DetectionValidator):  # type: ignore[misc]
    """Ultralytics' validator without its inference mode, which not every device can do with."""

    @torch.no_grad()
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """See `DetectionValidator`."""
        return inspect.unwrap(DetectionValidator.__call__)(self, *args, **kwargs)


def unwrap_model(model: Any) -> Any:
    """The model itself, also where several processes train it."""
    return model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
