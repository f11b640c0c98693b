"""Training of a classifier: augmented crops, balanced batches, a loop that resumes to the bit.

Whatever is random depends on the seed, the epoch and the crop's place in it, and on nothing that
came before: a run that was killed repeats the epoch with the same crops.
"""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from scipy import optimize
from torch import Tensor, nn
from torch.nn import functional

from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.crops import (
    Pixels,
    check_crop_boxes,
    cut_square,
    denoise_crop,
    to_rgb8,
)
from napari_beerlanet.core.classification.network import ClassificationNetwork, head_keys
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.common.device import compute_pending, image_layout
from napari_beerlanet.core.common.threads import run_parallel
from napari_beerlanet.core.detection.ultralytics_api import cv2
from napari_beerlanet.core.evaluation.classification import classification_metrics, classify_items
from napari_beerlanet.core.formats.class_folders import CropDataset, LabelledCrop
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.training.trainer.data import ImageJitter, ImageNotes

_CONTEXT = 1.9  # sides of a crop that are kept around a box, so that crops may move and turn
_OVERSAMPLING = 1.25  # pixels that are kept for each of the crop's
_MAX_KEPT_BYTES = 1 << 31  # of all crops together; beyond, files are read again and again
_SAMPLE_ROWS = 0.25  # of the crop's side: rows of an image's pixels below a crop, for the stain fit
_MIN_BLUR = 0.2  # pixels, below which nothing changes
_BORDER = (0.05, 0.4)  # of the crop's side, that may lie beyond the image
_TEMPERATURES = (0.05, 20.0)
_TIE = 1e-3  # of the validation loss, in the choice among epochs of equal balanced accuracy


class Augmentation(NamedTuple):
    """How training crops vary: `jitter` of colours, ln of the `scale`, and as parts of the crop's
    side its `shift` and the largest `blur` (a standard deviation).

    `border` is the part of the cells that a border of the image cuts, `turn` whether they are
    turned by any angle; crops that are files of their own have neither.
    """

    jitter: ImageJitter | None = None
    scale: float = 0.0
    shift: float = 0.0
    blur: float = 0.0
    border: float = 0.0
    turn: bool = False


class _Patch(NamedTuple):
    """What is kept of a crop: pixels around it, its centre (x, y) and side therein, a sample
    (m, 3) of its image's pixels where stains are fitted to the image, whether it is of a box."""

    pixels: Pixels
    centre: tuple[float, float]
    side: float
    sample: Pixels | None
    boxed: bool


_Cut = TypeVar("_Cut")


class TrainingCrops:
    """The crops of a split as a network gets them, augmented or as they are."""

    def __init__(
        self,
        items: Sequence[LabelledCrop],
        settings: ClassifierSettings,
        seed: int = 0,
        normalizer: Any = None,
        notes: ImageNotes | None = None,
    ) -> None:
        self.items, self.settings, self.seed = items, settings, seed
        self.normalizer, self.notes = normalizer, notes
        self.labels = np.array([item.label for item in items], np.int64)
        self._patches: dict[int, _Patch] = {}
        self._loaded: dict[int, _Patch] = {}
        self._kept_bytes = 0

    def __len__(self) -> int:
        return len(self.items)

    def plain(self, places: Iterable[int]) -> list[Pixels]:
        """Return crops (size, size, 3) as `classify` cuts them: normalised, not yet denoised."""

        def cut(pixels: Pixels, k: int) -> Pixels:
            x, y, side = self._square(pixels, self.items[k])
            return cut_square(pixels, x, y, side, self.settings.input_size)

        places = list(places)
        crops = self._cut_by_image(places, cut)
        return [crops[k] for k in places]

    def load(self, places: Iterable[int]) -> None:
        """Read what `augmented` needs of crops, each image once, with all its other crops.

        Where memory for all is used up, that of the last call alone is kept.
        """
        missing = {k for k in places if k not in self._patches}
        if self._kept_bytes < _MAX_KEPT_BYTES:
            images = {self.items[k].image for k in missing}
            missing.update(k for k, item in enumerate(self.items) if item.image in images)
        self._loaded = self._cut_by_image(sorted(missing - self._patches.keys()), self._cut_patch)

    def augmented(self, k: int, augmentation: Augmentation, numbers: Sequence[int]) -> Pixels:
        """Crop k, varied: (size, size, 3) and below it the rows that stains are fitted to.

        It depends on `numbers` alone.
        """
        patch, size = self._patch(k), self.settings.input_size
        source = random.Random(repr(tuple(numbers)))
        side = patch.side * math.exp(source.uniform(-1, 1) * augmentation.scale)
        x, y = (c + source.uniform(-1, 1) * augmentation.shift * side for c in patch.centre)
        if augmentation.turn and patch.boxed:
            crop = cut_turned(patch.pixels, x, y, side, size, source.uniform(0, 2 * math.pi))
        else:
            crop = np.rot90(cut_square(patch.pixels, x, y, side, size), source.randrange(4))
        crop = crop[:, ::-1] if source.random() < 0.5 else crop
        if patch.boxed and source.random() < augmentation.border:
            crop = _cut_by_border(crop, source.randrange(4), source.uniform(*_BORDER))
        crop = _blurred(crop, source.random() * augmentation.blur * size)
        rows = [crop] if patch.sample is None else [crop, patch.sample.reshape(-1, size, 3)]
        image = np.concatenate(rows)
        if augmentation.jitter is not None:
            jitter = copy.copy(augmentation.jitter)
            jitter.source = source
            image = jitter.apply(np.ascontiguousarray(image[..., ::-1]), size)[..., ::-1]
        if self.settings.denoise:
            image = np.concatenate([denoise_crop(np.ascontiguousarray(image[:size])), image[size:]])
        return np.ascontiguousarray(image)

    def _cut_by_image(
        self, places: Iterable[int], cut: Callable[[Pixels, int], _Cut]
    ) -> dict[int, _Cut]:
        """Return what `cut` makes of the normalised image of each crop and its place."""
        groups: dict[Path, list[int]] = {}
        for k in places:
            groups.setdefault(self.items[k].image, []).append(k)

        def cut_all(image: Path, mine: list[int]) -> list[_Cut]:
            pixels = self._read(image)
            return [cut(pixels, k) for k in mine]

        tasks = [lambda group=group: cut_all(*group) for group in groups.items()]
        parts = zip(groups.values(), run_parallel(tasks), strict=True)
        return {k: done for mine, part in parts for k, done in zip(mine, part, strict=True)}

    def _read(self, image: Path) -> Pixels:
        """Return an image (H, W, 3), normalised."""
        pixels = read_image(image).pixels
        if self.normalizer is not None:
            done = self.normalizer.apply(pixels)
            pixels = done.rgb
            if self.notes is not None:
                self.notes.add(image, done.notes)
        return to_rgb8(pixels)

    def _square(self, pixels: Pixels, item: LabelledCrop) -> tuple[float, float, float]:
        """Centre and side of an item's crop in its image."""
        height, width = pixels.shape[:2]
        box = item.box((height, width))
        if box is None:
            return width / 2, height / 2, float(max(height, width))
        (x1, y1, x2, y2) = check_crop_boxes(box[None], (height, width))[0]
        return (x1 + x2) / 2, (y1 + y2) / 2, max(x2 - x1, y2 - y1) / self.settings.fill

    def _patch(self, k: int) -> _Patch:
        if k not in self._patches and k not in self._loaded:
            self.load([k])
        return self._patches[k] if k in self._patches else self._loaded[k]

    def _cut_patch(self, pixels: Pixels, k: int) -> _Patch:
        """Return what is kept of a crop, and keep it if there is room."""
        item = self.items[k]
        x, y, side = self._square(pixels, item)
        context = 1.0 if item.cxcywh is None else _CONTEXT
        wanted = math.ceil(_OVERSAMPLING * context * self.settings.input_size)
        length = min(wanted, math.ceil(context * side))
        patch = _Patch(
            cut_square(pixels, x, y, context * side, length),
            (length / 2, length / 2),
            length / context,
            self._sample(pixels, k) if item.cxcywh is not None else None,
            item.cxcywh is not None,
        )
        if self._kept_bytes + patch.pixels.nbytes <= _MAX_KEPT_BYTES:
            self._kept_bytes += patch.pixels.nbytes
            self._patches[k] = patch
        return patch

    def _sample(self, pixels: Pixels, k: int) -> Pixels | None:
        """(m, 3) pixels of an image, at random, the same each time."""
        if self.settings.fit != "image" or self.settings.front_end in ("none", "grey"):
            return None
        size = self.settings.input_size
        count = max(round(_SAMPLE_ROWS * size), 1) * size
        flat = pixels.reshape(-1, 3)
        return flat[np.random.default_rng([self.seed, k]).integers(0, len(flat), count)]


def cut_turned(pixels: Pixels, x: float, y: float, side: float, size: int, angle: float) -> Pixels:
    """As `cut_square`, of a square that is turned about its centre by so many radians."""
    scale = side / size
    c, s = scale * math.cos(angle), scale * math.sin(angle)
    middle = (size - 1) / 2  # pixel centres are whole numbers here
    shift_x, shift_y = x - 0.5 - (c - s) * middle, y - 0.5 - (s + c) * middle
    matrix = np.array([[c, -s, shift_x], [s, c, shift_y]])
    flags = cv2.INTER_LINEAR | cv2.WARP_INVERSE_MAP
    return np.asarray(
        cv2.warpAffine(pixels, matrix, (size, size), flags=flags, borderValue=(PADDING_GREY,) * 3)
    )


def _cut_by_border(crop: Pixels, edge: int, part: float) -> Pixels:
    """The crop of a cell at a border of its image: beyond it is padding."""
    turned = np.rot90(crop, edge).copy()
    turned[: round(part * len(turned))] = PADDING_GREY
    return np.rot90(turned, -edge)


def _blurred(crop: Pixels, sigma: float) -> Pixels:
    """Under a less sharp objective; padding stays as it is."""
    if sigma < _MIN_BLUR:
        return crop
    blurred = np.asarray(cv2.GaussianBlur(np.ascontiguousarray(crop), (0, 0), sigma))
    return np.where((crop == PADDING_GREY).all(2, keepdims=True), crop, blurred)


def balanced_order(
    labels: npt.NDArray[np.int64], seed: int, epoch: int, balanced: bool
) -> npt.NDArray[np.int64]:
    """(n,) the crops of an epoch: each once or, balanced, of each class as many.

    A class is gone through as a whole before one of its crops comes a second time.
    """
    random_ = np.random.default_rng([seed, epoch])
    if not balanced:
        return random_.permutation(len(labels))
    classes = np.unique(labels)
    share = -(-len(labels) // len(classes))
    chosen = []
    for label in classes:
        mine = np.flatnonzero(labels == label)
        rounds = [random_.permutation(mine) for _ in range(-(-share // len(mine)))]
        chosen.append(np.concatenate(rounds)[:share])
    return random_.permutation(np.concatenate(chosen))


def fit_temperature(scores: npt.NDArray[Any], true: npt.NDArray[np.int64]) -> float:
    """T for which the probabilities softmax(ln(scores) / T) are likeliest; 1 without data.

    As in Platt's scaling, n crops are never taken for more certain than (n + 1) / (n + 2): a
    perfect result on few crops does not prove that the network cannot be wrong.
    """
    if not len(true):
        return 1.0
    logits = np.log(np.maximum(np.asarray(scores, np.float64), 1e-30))
    n, k = logits.shape
    target = np.full((n, k), 1 / (n + 2) / max(k - 1, 1))
    target[np.arange(n), true] = 1 - 1 / (n + 2)

    def loss(ln_t: float) -> float:
        scaled = logits / math.exp(ln_t)
        scaled = scaled - scaled.max(1, keepdims=True)
        log_p = scaled - np.log(np.exp(scaled).sum(1, keepdims=True))
        return float(-(target * log_p).sum() / n)

    bounds = tuple(math.log(t) for t in _TEMPERATURES)
    return math.exp(float(optimize.minimize_scalar(loss, bounds=bounds, method="bounded").x))


def parameter_groups(network: ClassificationNetwork, settings: Any) -> list[dict[str, Any]]:
    """Parameters for an optimizer: the head has its own learning rate, `factor` of the others'.

    Kernels decay; biases, normalisation and the stain front end do not. Of a backbone that is the
    caller's own nobody knows the head.
    """
    if not settings.weight_decay and settings.head_factor == 1:
        return [{"params": list(network.parameters()), "factor": 1.0, "weight_decay": 0.0}]
    head = head_keys(network)
    groups: dict[tuple[bool, bool], dict[str, Any]] = {}
    for name, value in network.named_parameters():
        kind = name in head, name.startswith("backbone.") and value.ndim > 1
        fresh: dict[str, Any] = {
            "params": [],
            "factor": settings.head_factor if kind[0] else 1.0,
            "weight_decay": settings.weight_decay if kind[1] else 0.0,
        }
        groups.setdefault(kind, fresh)["params"].append(value)
    return list(groups.values())


def within_error(score: float, highest: float, count: int) -> bool:
    """Whether a share of `count` crops is below the highest one by a standard error at most.

    It is that of the difference of two shares. As with `fit_temperature`, a perfect result on few
    crops is not certain.
    """
    likely = (highest * count + 1) / (count + 2)
    return score >= highest - math.sqrt(2 * likely * (1 - likely) / max(count, 1))


class ClassifierCallback(Protocol):
    """What a training tells while it runs."""

    def on_batch_end(self, trainer: Any) -> None:
        """After a training batch."""

    def on_epoch_end(self, trainer: Any) -> None:
        """After the validation of an epoch."""


class ClassifierTrainer:
    """The training loop; attributes are those that `TrainingMonitor` reads.

    Parameters
    ----------
    settings
        A `ClassifierTrainSettings` with all defaults filled in.
    parent
        Weights that a share of the way is kept to (NaN: none); None: all the way. Where classes
        have no training crops, their rows of its head stay as they are, and so does all before the
        head: nothing would tell what becomes of them.
    """

    def __init__(
        self,
        network: ClassificationNetwork,
        dataset: CropDataset,
        settings: Any,
        augmentation: Augmentation,
        device: torch.device,
        callback: ClassifierCallback,
        *,
        parent: Mapping[str, Tensor] | None = None,
        state: Mapping[str, Any] | None = None,
    ) -> None:
        self.network: ClassificationNetwork
        layout = image_layout(device)
        self.network = network.to(device, memory_format=layout)  # type: ignore[call-overload]
        self.dataset, self.settings = dataset, settings
        self.augmentation, self.device, self.callback = augmentation, device, callback
        self.parent = None if parent is None else {k: v.clone() for k, v in parent.items()}
        self.image_notes = ImageNotes()
        shown = network.settings, settings.seed, network.normalizer, self.image_notes
        self.data = TrainingCrops(dataset.splits["train"], *shown)
        self.validation = TrainingCrops(dataset.splits["val"], *shown)
        self._plain_validation: list[Pixels] = []
        self.optimizer = torch.optim.AdamW(
            parameter_groups(self.network, settings), lr=settings.learning_rate
        )
        self.average = copy.deepcopy(self.network) if settings.averaging else None
        absent = sorted(set(range(len(dataset.names))) - set(self.data.labels.tolist()))
        heads = head_keys(network) if parent is not None and absent else set()
        self._fixed_rows = []
        for name, weight in self.network.named_parameters() if heads else ():
            weight.requires_grad_(name in heads)
            if name in heads:
                self._fixed_rows.append((weight, absent, weight.detach()[absent].clone()))
        self.epochs = self.total_epochs = settings.epochs
        self.epoch, self.batch_number, self.validate_every = 0, 0, 1
        self.batches = -(-len(self._order(0)) // settings.batch)
        self.train_loader = range(self.batches)
        self.tloss: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}
        self.epoch_metrics: dict[str, float] = {}
        self.temperature, self.learning_rate = 1.0, float(settings.learning_rate)
        self.fitness, self.best_fitness, self.stop = -math.inf, -math.inf, False
        self.highest = -math.inf  # balanced accuracy of the epochs so far
        self.averaged = self.network
        if state is not None:
            self.network.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.epoch, self.best_fitness = state["epoch"] + 1, state["best_fitness"]
            self.highest = state.get("highest", -math.inf)
            if self.average is not None:
                self.average.load_state_dict(state["average"])

    @property
    def finished_epochs(self) -> int:
        """Epochs that are done, counting the one that is being validated."""
        return self.epoch + 1

    current_epoch = finished_epochs

    def state_dict(self) -> dict[str, Any]:
        """All that the next epoch depends on."""
        return {
            "epoch": self.epoch,
            "model": self.network.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "best_fitness": self.best_fitness,
            "highest": self.highest,
            "average": None if self.average is None else self.average.state_dict(),
        }

    def train(self) -> None:
        """From the next epoch to the last."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices=devices):
            for epoch in range(self.epoch, self.epochs):
                self.epoch = epoch
                torch.manual_seed(self.settings.seed * 100_003 + self.epoch)  # for dropout
                self._train_epoch()
                self._validate()
                self.callback.on_epoch_end(self)

    def _order(self, epoch: int) -> npt.NDArray[np.int64]:
        return balanced_order(self.data.labels, self.settings.seed, epoch, self.settings.balanced)

    def _train_epoch(self) -> None:
        self.network.train()
        if self.settings.keep_statistics or self._fixed_rows:
            for module in self.network.modules():
                if isinstance(module, nn.modules.batchnorm._BatchNorm):
                    module.eval()
        total = 0.0
        # Of nearly equal size: a batch of one has no statistics.
        for number, part in enumerate(np.array_split(self._order(self.epoch), self.batches)):
            self._set_learning_rate(number)
            loss = self._step(part, number)
            total += loss
            self.batch_number = number + 1
            self.tloss = {"loss": total / self.batch_number}
            self.callback.on_batch_end(self)

    def _step(self, part: npt.NDArray[np.int64], number: int) -> float:
        images, weights = self._batch(part, number)
        labels = torch.from_numpy(self.data.labels[part]).to(self.device)
        self.optimizer.zero_grad(set_to_none=True)
        logits = self.network(images, weights)
        compute_pending(self.device)
        smoothing = self.settings.label_smoothing
        loss = functional.cross_entropy(logits, labels, label_smoothing=smoothing)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        with torch.no_grad():
            for head, rows, values in self._fixed_rows:
                head[rows] = values
        if self.average is not None:
            self._update_average(self.epoch * self.batches + number)
        compute_pending(self.device)
        return float(loss.detach())

    def _update_average(self, step: int) -> None:
        # The first steps count less: they are the farthest from where training ends.
        momentum = min(self.settings.averaging, (2 + step) / (11 + step))
        assert self.average is not None
        now = self.network.state_dict()
        with torch.no_grad():
            for name, value in self.average.state_dict().items():
                if value.is_floating_point():
                    value.lerp_(now[name], 1 - momentum)
                else:
                    value.copy_(now[name])

    def _batch(self, part: npt.NDArray[np.int64], number: int) -> tuple[Tensor, Tensor | None]:
        """Images (n, 3, h, w) in [0, 1], and weights (n, h, w) where stains are those of images."""
        seed = self.settings.seed
        self.data.load(part.tolist())
        tasks = [
            lambda k=int(k), place=place: self.data.augmented(
                k, self.augmentation, (seed, self.epoch, number, place)
            )
            for place, k in enumerate(part)
        ]
        crops = np.stack(run_parallel(tasks))
        images = torch.from_numpy(crops.transpose(0, 3, 1, 2).copy()).to(self.device) / 255
        size = images.shape[-1]
        if images.shape[-2] == size:
            return images, None
        weights = images.new_zeros(len(images), *images.shape[2:])
        weights[:, size:] = 1
        return images, weights

    def _set_learning_rate(self, number: int) -> None:
        rate = self.settings.learning_rate
        step = self.epoch * self.batches + number
        if self.settings.cosine:
            done = step / (self.epochs * self.batches)
            rate *= 0.05 + 0.95 * (1 + math.cos(math.pi * done)) / 2
        rate *= min((step + 1) / (self.settings.warm_up + 1), 1)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group["factor"]
        self.learning_rate = rate

    def _validate(self) -> None:
        self.averaged = self._averaged_network()
        info = {"classes": self.dataset.names, "temperature": 1.0}
        model = Classifier(self.averaged, info, self.device)
        if self.network.settings.fit == "image" and self.network.fits_images:
            scores = classify_items(model, self.validation.items).scores
        else:
            if not self._plain_validation:
                self._plain_validation = self.validation.plain(range(len(self.validation)))
            scores = model.score_crops(model.prepare_crops(self._plain_validation))
        true = self.validation.labels
        self.temperature = fit_temperature(scores, true)
        metrics = classification_metrics(true, scores, self.dataset.names)
        likely = np.maximum(scores[np.arange(len(true)), true].astype(np.float64), 1e-30)
        loss = float(-np.log(likely).mean()) if len(true) else 0.0
        self.metrics = {key: v for key, v in metrics.items() if key != "confusion"}
        self.epoch_metrics = {
            "train/loss": self.tloss["loss"],
            "val/loss": loss,
            "metrics/accuracy": metrics["accuracy"],
            "metrics/balanced_accuracy": metrics["balanced_accuracy"],
            "lr/all": self.learning_rate,
        }
        self._rate(metrics["balanced_accuracy"], loss)

    def _rate(self, score: float, loss: float) -> None:
        """Decide whether the epoch is the best one: `best_fitness` equals its `fitness` then.

        An average of weights gets better with every step, which crops of the same laboratory need
        not show, so a later one is kept unless it is worse by more than the standard error.
        """
        self.fitness = score - _TIE * min(loss, 100.0)
        self.highest = max(self.highest, score)
        later = self.average is not None
        if later and within_error(score, self.highest, len(self.validation)):
            self.best_fitness = self.fitness
        else:
            self.best_fitness = max(self.best_fitness, self.fitness)

    def _averaged_network(self) -> ClassificationNetwork:
        """The network, averaged over steps if so asked, and a share of the way from its parent."""
        network = copy.deepcopy(self.network if self.average is None else self.average).eval()
        share = self.settings.share
        if self.parent is None or share >= 1:
            return network
        state = network.state_dict()
        for name, value in self.parent.items():
            if value.is_floating_point() and state[name].shape == value.shape:
                between = torch.lerp(value.to(self.device), state[name], share)
                state[name] = torch.where(between.isnan(), state[name], between)
        network.load_state_dict(state)
        return network
