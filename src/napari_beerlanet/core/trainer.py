"""Ultralytics' trainer with the stain front end and stain jitter, over data that we have read.

Its loop, losses, augmentation and metrics are used as they are. Images and labels come from
`dataset`, so no cache is written beside them and none is rewritten; what is frozen keeps its batch
statistics, too.
"""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import torch
from torch import nn

from .anchored import AnchoredAverage
from .augment import StainJitter
from .dataset import Dataset, look_at_images, read_dataset
from .loader import StainDataset
from .network import StainDetectionModel
from .repeatable import RepeatableTrainer, Watcher, unwrapped
from .yolo import DetectionValidator

Scope = Literal["all", "head", "stain"]

# What of Ultralytics' defaults does not fit: cells have no upright side, sets are small, and files
# are ours to write.
DEFAULTS: dict[str, Any] = {
    "amp": False,
    "cache": "ram",
    "close_mosaic": 0,
    "flipud": 0.5,
    "nbs": 16,
    "plots": False,
    "verbose": False,
    "warmup_epochs": 1,
    "workers": 0,
}


class StainTrainer(RepeatableTrainer):
    """Trains a `StainDetectionModel`, or a plain one where `front` is None.

    Parameters
    ----------
    overrides
        Ultralytics' training arguments; `save_dir` is required.
    jitter
        None leaves Ultralytics' own hue, saturation and value jitter in place. That one changes
        the padding's grey, too, so that the front end takes it for a part of the slide.
    front
        Settings of `StainDetectionModel` beyond Ultralytics' own, for `get_model`.
    scope
        "all"; "head": the last module alone; "stain": the front end alone.
    dataset
        What to train on; None reads overrides["data"].
    repeats
        How often an epoch shows every training image, each time augmented anew.
    keep_statistics
        Normalise with the batch statistics that the model came with, and leave them as they are:
        those of a few fields are no good substitute. Nor are few fields without any box of a class
        taken for proof that there is none: that class is neither taught nor untaught.
    average
        Steps over which weights are averaged; None is Ultralytics' own average, which forgets what
        is more than some thousand steps ago and hardly averages anything in the first hundreds.
    share
        How far from the parent to what was learned the averaged weights stay, see
        `AnchoredAverage`; 1 is all the way.
    doubt
        By how much mAP50-95 of an epoch may stay behind the highest one's and the epoch, as the
        later one, still count as the best: few images cannot tell such differences.
    watcher, state
        See `RepeatableTrainer`.
    """

    def __init__(
        self,
        overrides: dict[str, Any],
        *,
        jitter: StainJitter | None = None,
        front: dict[str, Any] | None = None,
        scope: Scope = "all",
        dataset: Dataset | None = None,
        repeats: int = 1,
        keep_statistics: bool = False,
        average: int | None = None,
        share: float = 1.0,
        doubt: float = 0.0,
        watcher: Watcher | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.jitter, self.front, self.scope, self.dataset = jitter, front, scope, dataset
        self.repeats, self.keep_statistics, self.average = repeats, keep_statistics, average
        self.share, self.doubt = share, doubt
        self.ema: Any = None
        super().__init__({**DEFAULTS, **overrides}, watcher, state)

    # --- data and model --------------------------------------------------------------------------

    def get_dataset(self) -> dict[str, Any]:
        """Ultralytics' description of the data, with items in place of paths."""
        if self.dataset is None:
            self.dataset = read_dataset(self.args.data)
        return described(self.dataset, ("train", self.args.split))

    def build_dataset(self, img_path: Any, mode: str = "train", batch: int | None = None) -> Any:
        """The items `img_path` as Ultralytics' dataset, for training with the jitter in it."""
        assert self.dataset is not None
        hyp = copy.copy(self.args)
        hyp.deterministic = False  # else it warns of the cache, which is exact here
        train = mode == "train"
        return StainDataset(
            img_path=list(img_path) * (self.repeats if train else 1),
            facts=self.dataset.facts,
            jitter=self.jitter if train else None,
            imgsz=self.args.imgsz,
            batch_size=batch,
            augment=train,
            hyp=hyp,
            rect=self.args.rect or not train,
            cache="ram" if self.args.cache else None,  # on disk it would lie beside the images
            stride=max(int(unwrapped(self.model).stride.max()), 32),
            pad=0.0 if train else 0.5,
            data=self.data,
        )

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = False) -> Any:
        """A model for the data's classes, with what fits of `weights` and a fitted mix."""
        if self.front is None:
            return super().get_model(cfg, weights, verbose)
        model = StainDetectionModel(
            cfg, nc=self.data["nc"], verbose=verbose, imgsz=self.args.imgsz, **self.front
        )
        model = self.set_model_names_for_load(model)
        model.fit_mix()
        if weights is not None:
            model.load(weights, verbose=verbose)
        return model

    # --- what is trained -------------------------------------------------------------------------

    def trains(self, name: str) -> bool:
        """Whether a parameter or module of that name changes."""
        head = f"model.{len(unwrapped(self.model).model) - 1}."
        prefixes = {"all": ("",), "head": (head,), "stain": ("stain.", "mix.")}
        return name.startswith(prefixes[self.scope])

    def _setup_train(self) -> None:
        super()._setup_train()
        for name, parameter in unwrapped(self.model).named_parameters():
            if not self.trains(name):
                parameter.requires_grad = False

    def resume_training(self, ckpt: Any) -> None:
        """With the average that is asked for, which holds the weights at the beginning."""
        if self.average is not None and self.ema is not None:
            self.ema = AnchoredAverage(self.model, self.share, self.average)
        super().resume_training(ckpt)

    def set_class_weights(self) -> None:
        """Ultralytics' weights, or 0 for classes that are left alone."""
        super().set_class_weights()
        present = self.get_class_counts() > 0
        if self.keep_statistics and not self.args.cls_pw and present.any():
            weights = torch.as_tensor(present, dtype=torch.float32, device=self.device)
            unwrapped(self.model).class_weights = weights

    def _model_train(self) -> None:
        super()._model_train()
        for name, module in unwrapped(self.model).named_modules():
            frozen = self.keep_statistics or not self.trains(name)
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and frozen:
                module.eval()

    def validate(self) -> Any:
        """Ultralytics' metrics and fitness; an epoch within `doubt` of the highest is the best."""
        metrics, fitness = super().validate()
        if fitness is not None and self.doubt and fitness > self.stopper.best_fitness - self.doubt:
            self.best_fitness, self.stopper.best_epoch = fitness, self.epoch + 1
        return metrics, fitness

    def build_optimizer(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Ultralytics' optimizer; λ, γ, S and the mix are no filters to decay or orthogonalise."""
        optimizer = super().build_optimizer(model, *args, **kwargs)
        named = unwrapped(model).named_parameters()
        ours = [p for name, p in named if name.startswith(("stain.", "mix."))]
        known = {id(p) for p in ours}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in known]
        plain = [g for g in optimizer.param_groups if g.get("param_group") == "bn"][-1]
        plain["params"] += ours
        return optimizer


def described(dataset: Dataset, splits: tuple[str, ...]) -> dict[str, Any]:
    """A dataset as Ultralytics describes it, with items in place of paths."""
    for split in splits:
        look_at_images(dataset, dataset.splits[split])
    names = dict(enumerate(dataset.names))
    return {"names": names, "nc": len(names), "channels": 3, **dataset.splits}


def validate(
    model: Any, data: str | Path, *, imgsz: int, folder: Path, split: str = "val", batch: int = 16
) -> Any:
    """Ultralytics' box metrics (`map50`, `map`, `ap50`, `maps`, …) of a model on one split.

    The validator runs as in training, where it neither looks for the data in the network nor
    writes a cache beside it.
    """
    dataset = read_dataset(data)
    trainer: Any = StainTrainer(
        {"model": "none.pt", "data": str(data), "split": split, "imgsz": imgsz, "cache": False}
        | {"device": str(next(model.parameters()).device), "save_dir": str(folder)},
        dataset=Dataset(dataset.path, dataset.names, {"train": [], split: dataset.splits[split]}),
    )
    trainer.model = copy.deepcopy(model).eval()
    trainer.model.loss = lambda batch, found: (None, {})
    trainer.ema = SimpleNamespace(ema=trainer.model)
    trainer.stopper = SimpleNamespace(possible_stop=False)
    trainer.amp, trainer.epoch, trainer.loss_items = False, 0, {}
    trainer.test_loader = trainer.get_dataloader(trainer.data[split], batch, rank=-1, mode="val")
    validator = DetectionValidator(trainer.test_loader, folder, copy.copy(trainer.args), {})
    with torch.no_grad():
        validator(trainer=trainer)
    return validator.metrics.box
