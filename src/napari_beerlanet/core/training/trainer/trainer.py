"""Ultralytics' trainer with the stain front end and stain jitter, over data that we have read.

Its loop, losses, augmentation and metrics are used as they are. Images and labels come from
`formats.dataset`, so no cache is written beside them; what is frozen keeps its batch statistics,
too. `AnchoredEMA` averages the weights and holds them part of the way back to the parent: a few
images tell much about what they show and nothing about the rest, and on the straight line from the
parent's weights to the learned ones, what is new comes before what was known goes.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from napari_beerlanet.core.boxes.annotations import MIN_CLASS_BOXES
from napari_beerlanet.core.common.events import owns_process
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.ultralytics_api import (
    ModelEMA,
    optimize_without_compiler,
    v8DetectionLoss,
)
from napari_beerlanet.core.formats.dataset import Dataset, inspect_images, read_dataset
from napari_beerlanet.core.stains.front_end import FRONT_END_PREFIXES
from napari_beerlanet.core.training.trainer.data import (
    ImageJitter,
    ImageNotes,
    ReplayedPhotograph,
    StainDataset,
)
from napari_beerlanet.core.training.trainer.deterministic import (
    DeterministicTrainer,
    TrainingCallback,
    unwrap_model,
)

# What of Ultralytics' defaults does not fit: cells have no upright side, sets are small, and files
# are ours to write.
DEFAULT_ARGS: dict[str, Any] = {
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


_VISIBLE_SCORE = 0.2  # from which on the parent sees a rare class in the photograph
_NEW_CLASS_SPEED = 10.0  # times the steps of what the parent knows, for rows that start at random


class StainTrainer(DeterministicTrainer):
    """Trains a `StainDetectionModel`, or a plain one where `front_end` is None.

    Parameters
    ----------
    overrides
        Ultralytics' training arguments; `save_dir` is required.
    jitter
        None leaves Ultralytics' own hue, saturation and value jitter in place. That one changes
        the padding's grey, too, so that the front end takes it for a part of the slide.
    front_end
        Settings of `StainDetectionModel` beyond Ultralytics' own, for `get_model`.
    scope
        "all"; "head": the last module alone; "stain": the front end alone.
    dataset
        What to train on; None reads overrides["data"].
    repeats
        How often an epoch shows every training image, augmented differently each time.
    validate_every
        Epochs between validations: what Ultralytics calls an epoch is a round of so many.
    keep_statistics
        Normalise with the batch statistics that the model came with, and leave them as they are:
        those of a few images are no good substitute. Nor are few images without any box of a class
        taken for proof that there is none: a class is taught as far as its boxes are evidence, and
        held to the parent otherwise, see `RetainingLoss`.
    new_classes
        Classes that the parent does not know: nothing of them is to be retained, their rows of the
        head learn faster, and are not held back to the parent.
    average
        Steps over which weights are averaged; None is Ultralytics' own average, which forgets what
        is more than some thousand steps ago and hardly averages anything in the first hundreds.
    share
        How far from the parent to what was learned the averaged weights stay, see
        `AnchoredEMA`; 1 is all the way.
    fitness_tolerance
        By how much mAP50-95 of an epoch may stay behind the highest one's and the epoch, as the
        later one, still count as the best: few images cannot tell such differences.
    callback, state
        See `DeterministicTrainer`.
    """

    def __init__(
        self,
        overrides: dict[str, Any],
        *,
        jitter: ImageJitter | None = None,
        front_end: dict[str, Any] | None = None,
        scope: str = "all",
        dataset: Dataset | None = None,
        repeats: int = 1,
        validate_every: int = 1,
        keep_statistics: bool = False,
        new_classes: Collection[str] = (),
        average: int | None = None,
        share: float = 1.0,
        fitness_tolerance: float = 0.0,
        callback: TrainingCallback | None = None,
        state: dict[str, Any] | None = None,
    ) -> None:
        self.jitter, self.front_end, self.scope, self.dataset = jitter, front_end, scope, dataset
        self.repeats, self.keep_statistics, self.average = repeats, keep_statistics, average
        self.share, self.fitness_tolerance = share, fitness_tolerance
        self.new_classes, self.validate_every = frozenset(new_classes), validate_every
        self.image_notes = ImageNotes()
        self.ema: Any = None
        super().__init__({**DEFAULT_ARGS, **overrides}, callback, state)

    # --- data and model --------------------------------------------------------------------------

    def get_dataset(self) -> dict[str, Any]:
        """Ultralytics' description of the data, with items in place of paths."""
        if self.dataset is None:
            self.dataset = read_dataset(self.args.data)
        return ultralytics_data(self.dataset, ("train", self.args.split))

    def build_dataset(self, img_path: Any, mode: str = "train", batch: int | None = None) -> Any:
        """The items `img_path` as Ultralytics' dataset, for training with the jitter in it."""
        assert self.dataset is not None
        hyp = copy.copy(self.args)
        hyp.deterministic = False  # else it warns of the cache, which is exact here
        train = mode == "train"
        return StainDataset(
            img_path=list(img_path) * (self.repeats * self.validate_every if train else 1),
            facts=self.dataset.inspections,
            jitter=self.jitter if train else None,
            normalizer=getattr(unwrap_model(self.model), "normalizer", None),
            notes=self.image_notes,
            imgsz=self.args.imgsz,
            batch_size=batch,
            augment=train,
            hyp=hyp,
            rect=self.args.rect or not train,
            cache="ram" if self.args.cache else None,  # on disk it would lie beside the images
            stride=max(int(unwrap_model(self.model).stride.max()), 32),
            pad=0.0 if train else 0.5,
            data=self.data,
        )

    def get_model(self, cfg: Any = None, weights: Any = None, verbose: bool = False) -> Any:
        """A model for the data's classes, with what fits of `weights` and a fitted mix."""
        if self.front_end is None:
            return super().get_model(cfg, weights, verbose)
        model = StainDetectionModel(
            cfg, nc=self.data["nc"], verbose=verbose, imgsz=self.args.imgsz, **self.front_end
        )
        model = self.set_model_names_for_load(model)
        model.fit_mix()
        if weights is not None:
            model.load(weights, verbose=verbose)
        return model

    # --- what is trained -------------------------------------------------------------------------

    def is_trainable(self, name: str) -> bool:
        """Whether a parameter or module of that name changes."""
        head = f"model.{len(unwrap_model(self.model).model) - 1}."
        prefixes = {"all": ("",), "head": (head,), "stain": FRONT_END_PREFIXES}
        return name.startswith(prefixes[self.scope])

    def _setup_train(self) -> None:
        super()._setup_train()
        for name, parameter in unwrap_model(self.model).named_parameters():
            if not self.is_trainable(name):
                parameter.requires_grad = False

    def resume_training(self, ckpt: Any) -> None:
        """With the average that is asked for, which holds the weights at the beginning."""
        if self.average is not None and self.ema is not None:
            free = {name: self._new_labels() for name in class_rows(self.model)}
            self.ema = AnchoredEMA(self.model, self.share, self.average, free)
        self._retain_rare_classes()  # the weights are still the parent's
        super().resume_training(ckpt)
        self._let_new_classes_learn_faster()

    def _new_labels(self) -> list[int]:
        return [k for k, name in self.data["names"].items() if name in self.new_classes]

    def _retain_rare_classes(self) -> None:
        if not self.keep_statistics:
            return
        evidence = np.minimum(self._class_counts() / MIN_CLASS_BOXES, 1.0)
        evidence[self._new_labels()] = 1.0
        model = unwrap_model(self.model)
        loss = model.init_criterion() if (evidence < 1).any() else None
        if isinstance(loss, v8DetectionLoss):
            weights = torch.as_tensor(evidence, dtype=torch.float32, device=self.device)
            if loss.class_weights is not None and not self.args.cls_pw:
                loss.class_weights = torch.maximum(loss.class_weights, (weights < 1).float())
            normalizer = getattr(model, "normalizer", None)
            photograph = ReplayedPhotograph(self.args.imgsz, self.jitter, normalizer)
            model.criterion = RetainingLoss(loss, model, weights, photograph)

    def _class_counts(self) -> Any:
        assert self.dataset is not None
        labels = [item.labels for item in self.dataset.splits["train"]]
        return np.bincount(np.concatenate(labels), minlength=len(self.data["names"]))

    def _let_new_classes_learn_faster(self) -> None:
        labels = self._new_labels()
        rows = list(class_rows(self.model).values())
        if not labels or not rows or not self.keep_statistics:
            return
        before: list[torch.Tensor] = []

        def remember(*_: Any) -> None:
            before[:] = [row.detach()[labels].clone() for row in rows]

        @torch.no_grad()
        def lengthen(*_: Any) -> None:
            for row, old in zip(rows, before, strict=True):
                row[labels] = old + _NEW_CLASS_SPEED * (row[labels] - old)

        self.optimizer.register_step_pre_hook(remember)
        self.optimizer.register_step_post_hook(lengthen)

    def set_class_weights(self) -> None:
        """Ultralytics' weights, or 0 for classes without any box; see `RetainingLoss` for those."""
        super().set_class_weights()
        present = self.get_class_counts() > 0
        if self.keep_statistics and not self.args.cls_pw and present.any():
            weights = torch.as_tensor(present, dtype=torch.float32, device=self.device)
            unwrap_model(self.model).class_weights = weights

    def _model_train(self) -> None:
        super()._model_train()
        for name, module in unwrap_model(self.model).named_modules():
            frozen = self.keep_statistics or not self.is_trainable(name)
            if isinstance(module, nn.modules.batchnorm._BatchNorm) and frozen:
                module.eval()

    def validate(self) -> Any:
        """Ultralytics' metrics and fitness; a later epoch within the tolerance is best.

        It is no improvement, though: training stops early on a plateau.
        """
        metrics, fitness = super().validate()
        if (
            fitness is not None
            and self.fitness_tolerance
            and fitness > self.stopper.best_fitness - self.fitness_tolerance
        ):
            self.best_fitness = fitness
        return metrics, fitness

    def build_optimizer(self, model: Any, *args: Any, **kwargs: Any) -> Any:
        """Ultralytics' optimizer; λ, γ, S and the mix are no filters to decay or orthogonalise."""
        if owns_process():
            optimize_without_compiler()
        optimizer = super().build_optimizer(model, *args, **kwargs)
        named = unwrap_model(model).named_parameters()
        ours = [p for name, p in named if name.startswith(FRONT_END_PREFIXES)]
        our_ids = {id(p) for p in ours}
        for group in optimizer.param_groups:
            group["params"] = [p for p in group["params"] if id(p) not in our_ids]
        plain = [g for g in optimizer.param_groups if g.get("param_group") == "bn"][-1]
        plain["params"] += ours
        return optimizer


def ultralytics_data(dataset: Dataset, splits: tuple[str, ...]) -> dict[str, Any]:
    """A dataset as Ultralytics describes it, with items in place of paths."""
    for split in splits:
        inspect_images(dataset, dataset.splits[split])
    names = dict(enumerate(dataset.names))
    return {"names": names, "nc": len(names), "channels": 3, **dataset.splits}


def class_rows(model: Any) -> dict[str, torch.Tensor]:
    """Weights and biases of the head with one row per class, by name; none of other heads."""
    model = unwrap_model(model)
    branches = getattr(model.model[-1], "cv3", None) or ()
    ours = {id(p) for branch in branches for p in branch[-1].parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in ours}


class RetainingLoss:
    """Ultralytics' detection loss, with classes of few boxes held to what the parent sees.

    The target of a class is e y + (1 − e) t: y as annotated, t the score that the parent gives in
    the same place, and e (classes,) the evidence, which grows with the number of boxes up to 1. So
    one box teaches a tenth of what it could, and does not undo what many have taught before. Where
    the parent sees such a class, outlines are held to its own, too, by (1 − e) t.

    Few images may show nothing of a rare class: in each step, if the parent sees such classes in
    the photograph at all, a replay of it, on which nothing is annotated, holds both as well.
    """

    def __init__(
        self,
        loss: Any,
        model: Any,
        evidence: torch.Tensor,
        photograph: ReplayedPhotograph,
    ) -> None:
        self._loss, self._model, self._evidence = loss, model, evidence
        self._parent = copy.deepcopy(model).eval()
        for parameter in self._parent.parameters():
            parameter.requires_grad = False
        seen = self._parent_sight(photograph.as_taken().to(evidence.device))
        visible = ((1 - evidence) * _scores(seen)).max() > _VISIBLE_SCORE
        self._replay = photograph if visible else None
        self._parent_scores: Any = None
        self._annotated_sum: Any = None
        loss.bce = self._cross_entropy

    def __call__(self, preds: Any, batch: dict[str, Any]) -> Any:
        """Ultralytics' loss and its parts."""
        seen = self._parent_sight(batch["img"])
        self._parent_scores = _scores(seen)
        loss, parts = self._loss(preds, batch)
        scores, outlines = loss.new_zeros(()), self._outlines(self._loss.parse_output(preds), seen)
        if self._replay is not None:
            images = self._replay().to(self._evidence.device)
            seen, now = self._parent_sight(images), self._loss.parse_output(self._model(images))
            t, logits = _scores(seen), now["scores"].permute(0, 2, 1)
            scores = ((1 - self._evidence) * _divergence(logits, t)).sum()
            outlines = outlines + self._outlines(now, seen)
        hyp, size = self._loss.hyp, len(batch["img"]) / self._annotated_sum
        held = torch.stack([outlines * hyp.box, scores * hyp.cls, loss.new_zeros(())])
        return loss + size * held, parts

    @torch.no_grad()
    def _parent_sight(self, images: torch.Tensor) -> dict[str, torch.Tensor]:
        seen: dict[str, torch.Tensor] = self._loss.parse_output(self._parent(images))
        return seen

    def _outlines(
        self, now: dict[str, torch.Tensor], seen: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """How far the distributions of the boxes' sides are from the parent's where it counts."""
        shape = *now["boxes"].shape[:1], 4, -1, now["boxes"].shape[-1]
        ours, theirs = (p["boxes"].view(shape).log_softmax(2) for p in (now, seen))
        divergence = (theirs.exp() * (theirs - ours)).sum(2).mean(1)  # (images, anchors)
        weight = ((1 - self._evidence) * _scores(seen)).amax(2)
        return (weight * divergence).sum()

    def _cross_entropy(self, logits: torch.Tensor, annotated: torch.Tensor) -> torch.Tensor:
        """(images, anchors, classes), less the entropy of the targets, which no model is below."""
        e = self._evidence
        self._annotated_sum = annotated.sum().clamp(min=1)
        target = e * annotated + (1 - e) * self._parent_scores.to(annotated.dtype)
        plain = functional.binary_cross_entropy_with_logits(logits, annotated, reduction="none")
        return torch.where(e < 1, _divergence(logits, target), plain)


def _scores(sight: dict[str, torch.Tensor]) -> torch.Tensor:
    """(images, anchors, classes)."""
    return sight["scores"].permute(0, 2, 1).sigmoid()


def _divergence(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy less the entropy of the target: 0 where both are the same."""
    cross_entropy = functional.binary_cross_entropy_with_logits
    entropy = cross_entropy(torch.logit(target, 1e-6), target, reduction="none")
    return cross_entropy(logits, target, reduction="none") - entropy


class AnchoredEMA(ModelEMA):  # type: ignore[misc]
    """The average of p + share · (w − p): p are the weights at the beginning, w after each step.

    Parameters
    ----------
    share
        0 would be the parent, 1 is what was learned.
    steps
        Over which is averaged: a plain mean at first, p among it, then the last ones.
    free
        Rows of weights, by name, that no parent has learned: their share is 1.
    """

    def __init__(
        self, model: Any, share: float, steps: int, free: Mapping[str, list[int]] | None = None
    ) -> None:
        super().__init__(model)
        self.share, self.steps, self.free = share, steps, free or {}
        self.parent = {k: v.clone() for k, v in self._averaged().items()}

    def _averaged(self) -> dict[str, torch.Tensor]:
        held = self.ema.state_dict().items()
        return {name: value for name, value in held if value.dtype.is_floating_point}

    @torch.no_grad()
    def update(self, model: Any) -> None:
        """Take in the weights after a step."""
        self.updates += 1
        past = 1 - 1 / min(self.updates + 1, self.steps)
        back = (1 - past) * (1 - self.share)
        learned = (1 - past) * self.share / (1 - back)  # so that `past` stays of the average
        weights = unwrap_model(model).state_dict()
        for name, value in self._averaged().items():
            rows = self.free.get(name, [])
            plain = value[rows].lerp(weights[name][rows], 1 - past) if rows else None
            value.lerp_(weights[name], learned).lerp_(self.parent[name], back)
            if plain is not None:
                value[rows] = plain
