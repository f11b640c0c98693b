"""Training settings, and the schedule (epochs, learning rate, …) chosen for a dataset's size.

A few annotated images are the normal case, and there a pretrained model is destroyed more easily
than improved. The numbers were chosen on images of another laboratory, see docs/finetune.md.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator

from napari_beerlanet.core.common.device import pick_device
from napari_beerlanet.core.common.messages import error_detail, quoted
from napari_beerlanet.core.common.settings import Option, Settings
from napari_beerlanet.core.stains.settings import FrontEnd

if TYPE_CHECKING:
    from napari_beerlanet.core.training.trainer.data import ImageJitter

Scope = Literal["all", "head", "stain"]
SCOPES: tuple[Scope, ...] = get_args(Scope)
Length = Literal["quick", "normal", "thorough"]
LENGTHS: tuple[Length, ...] = get_args(Length)
JitterKind = Literal["stain", "hed", "none"]
JITTERS: tuple[JitterKind, ...] = get_args(JitterKind)

DEFAULT_IMAGE_SIZE = 640
"""Longer side of training images for a model that has none of its own."""

# Files, devices and whatever would load or write something else are ours to decide.
_RESERVED_ARGS = {
    *("model", "data", "epochs", "imgsz", "batch", "seed", "device", "lr0", "resume", "project"),
    *("name", "save_dir", "save", "exist_ok", "plots", "task", "mode", "cfg", "pretrained"),
    *("distill_model", "augmentations", "single_cls", "classes", "fraction", "split", "verbose"),
    *("save_period", "save_json", "save_txt", "profile", "compile", "quantize", "time", "freeze"),
}
# As the command line has options for them; it takes all other settings with --set.
_OPTIONS = {
    name: f"--{name.replace('_', '-')}"
    for name in (
        *("data", "model", "scope", "backbone", "weights", "epochs", "batch", "seed", "device"),
        *("front_end", "normalizer", "jitter"),
    )
}
_OPTIONS |= {"image_size": "--imgsz", "learning_rate": "--lr"}
_FILES = ("data", "model", "normalizer", "weights", "detector", "reference")
_EPOCH_ARGS = ("patience", "warmup_epochs", "close_mosaic")  # Ultralytics' that count epochs
_MIN_VALIDATIONS = 8  # of a run whose epochs are given, if it has as many


class RunSettings(Settings):
    """What the settings in a run.json have in common."""

    default_jitter: ClassVar[dict[str, Any]] = {}
    """Settings of the `StainJitter` that differ from its own."""

    seed: int = Field(0, ge=0, description="Random seed: same seed and data, same model.")
    device: str = Field("auto", description="auto, cpu, cuda:0 or mps; 0,1 trains on two GPUs.")
    jitter: bool | JitterKind | dict[str, Any] = Field(
        True,
        description="How colours of the training images vary: by stain and light (stain), by "
        "scaled and shifted haematoxylin, eosin and DAB (hed), or not (none).",
    )
    normalizer: Annotated[str | None, Option(value="FILE")] = Field(
        None,
        description="A saved normalizer, applied to every image before the network sees it; the "
        "model keeps it.",
    )

    @field_validator("device", mode="before")
    @classmethod
    def _name_device(cls, device: object) -> str:
        return str(device)  # the number of a GPU, or torch's own device

    @field_validator("jitter")
    @classmethod
    def _check_jitter(
        cls, jitter: bool | JitterKind | dict[str, Any]
    ) -> bool | JitterKind | dict[str, Any]:
        if isinstance(jitter, dict):
            _make_jitter(dict(jitter))
        return jitter

    def portable(self) -> Self:
        """With the last two names of the data's path and the last of others, which say enough."""
        kept = {name: 2 if name == "data" else 1 for name in _FILES if getattr(self, name, None)}
        parts = {name: Path(getattr(self, name)).parts[-count:] for name, count in kept.items()}
        return self.replace(**{name: Path(*part).as_posix() for name, part in parts.items()})

    def command(self) -> str:
        """The same training on the command line: all that differs from the defaults."""
        given = _with_advanced({n: v for n, v in self.portable() if v != self.default(n)})
        words = ["napari-beerlanet", "train"]
        words += ["--task=classify"] if hasattr(self, "task") else []
        for name in [name for name in _OPTIONS if type(given.get(name)) in (str, int, float)]:
            words.append(f"{_OPTIONS[name]}={given.pop(name)}")
        words += [f"--set={name}={json.dumps(value)}" for name, value in given.items()]
        return shlex.join([*words, "--out=run"])

    @property
    def devices(self) -> list[str]:
        """Names of the devices, as torch has them; each is there."""
        names = [name.strip() for name in self.device.split(",") if name.strip()]
        full = [f"cuda:{name}" if name.isdecimal() else name for name in names] or ["auto"]
        devices = [str(pick_device(name)) for name in full]
        if len(devices) > 1 and any(not name.startswith("cuda") for name in devices):
            raise ValueError(
                f'Several devices must be GPUs such as "0,1", not {quoted(self.device)}.'
            )
        return devices

    @property
    def jitter_kind(self) -> JitterKind:
        """How colours vary; true is "stain", false "none", settings are of "stain" unless named."""
        if isinstance(self.jitter, dict):
            return str(self.jitter.get("kind", "stain"))  # type: ignore[return-value]
        if isinstance(self.jitter, bool):
            return "stain" if self.jitter else "none"
        return self.jitter

    def image_jitter(self) -> ImageJitter | None:
        """The augmentation of colours that is asked for."""
        kind = self.jitter_kind
        if kind == "none":
            return None
        chosen = self.jitter if isinstance(self.jitter, dict) else {}
        defaults = self.default_jitter if kind == "stain" else {}
        return _make_jitter({**defaults, **chosen, "kind": kind})


def differences(requested: Settings, before: Mapping[str, Any], resumed: Settings) -> list[str]:
    """Sentences on what is requested and neither holds for the run that is resumed nor was before.

    `before` is what was requested when the run was started, as JSON has it.
    """
    usual, now, there = (
        _with_advanced(s.model_dump(mode="json")) for s in (type(requested)(), requested, resumed)
    )
    before = _with_advanced(dict(before))
    return [
        f"The run is resumed with its own {name} {quoted(there.get(name))}, not {quoted(value)}."
        for name, value in now.items()
        if value not in (usual.get(name), before.get(name), there.get(name))
    ]


def _with_advanced(settings: dict[str, Any]) -> dict[str, Any]:
    advanced: dict[str, Any] = settings.pop("advanced", {})
    return settings | advanced


class TrainSettings(RunSettings):
    """The arguments of `fine_tune`, and the settings in a run.json.

    None leaves a setting to the `TrainingSchedule`, see `resolved`.
    """

    model: Annotated[str | None, Option(value="MODEL")] = Field(
        None,
        description="The model to start from: a packaged model's name, a checkpoint, or an "
        "Ultralytics .pt file such as yolov8n.pt.",
    )
    data: Annotated[str | None, Option(value="DATA")] = Field(
        None, description="A data.yaml with images, labels and class names."
    )
    scope: Scope = Field(
        "all",
        description="What is trained: everything, the detection head alone, or the stain front "
        "end alone, which adapts a model to another laboratory's stain.",
    )
    epochs: int | None = Field(
        None,
        ge=1,
        description="Passes through the training images; by default as many as the dataset needs.",
    )
    image_size: Annotated[int | None, Option("--imgsz", "PIXELS")] = Field(
        None,
        ge=32,
        description="Longer side of training images in pixels; by default the model's own.",
    )
    batch: Annotated[int, Field(ge=1)] | Literal["auto"] = Field(
        8, description="Images per training step; fewer need less memory. auto fits a GPU's memory."
    )
    learning_rate: Annotated[float | None, Option("--lr", "RATE")] = Field(
        None,
        gt=0,
        description="Learning rate; by default one that is gentle to a pretrained model.",
    )
    front_end: FrontEnd | None = Field(
        None,
        description="What the network sees: mixed stain densities (beerlanet), the image itself "
        "(none), grey, or the image as lstainnorm learns to normalise it; by default what the "
        "model has, beerlanet in front of a plain YOLO.",
    )
    attention_pool: int | None = Field(
        None,
        ge=1,
        le=256,
        description="Pixels along the side of a block that LStainNorm's attention sees as one.",
    )
    pixel_size: float | None = Field(
        None, gt=0, description="Pixel size of the training images in µm, if all have the same."
    )
    advanced: dict[str, Any] = Field(
        default_factory=dict,
        description="Further Ultralytics training arguments, for instance mosaic=0.5.",
    )
    length: Length = Field(
        "normal",
        description="How long to train if epochs is not given; training stops early when "
        "validation no longer improves.",
    )
    validate_every: int | None = Field(
        None,
        ge=1,
        description="Epochs from one validation and checkpoint to the next; by default so many "
        "that there are some training steps in between.",
    )
    repeats: int | None = Field(
        None,
        ge=1,
        description="How often an epoch shows each image, augmented differently each time; by "
        "default once.",
    )
    keep_statistics: bool | None = Field(
        None, description="Keep the batch-norm statistics of the model that training starts from."
    )
    average: int | None = Field(
        None, ge=1, description="Training steps over which the weights are averaged."
    )
    share: float | None = Field(
        None,
        gt=0,
        le=1,
        description="How far the weights move from the starting model to what was learned; 1 is "
        "all the way.",
    )

    @field_validator("advanced")
    @classmethod
    def _refuse_reserved(cls, advanced: dict[str, Any]) -> dict[str, Any]:
        reserved = sorted(_RESERVED_ARGS & set(advanced))
        if reserved:
            raise ValueError(f"{reserved[0]} is not a setting of training here; see fine_tune.")
        return advanced

    # --- defaults that depend on the data ---

    @property
    def is_resolved(self) -> bool:
        """Whether nothing is left to a schedule."""
        return None not in (self.epochs, self.repeats, self.keep_statistics)

    def resolved(self, schedule: TrainingSchedule) -> TrainSettings:
        """With the schedule's values where there are none."""
        epochs = self.epochs or schedule.epochs
        every = self.validate_every or schedule.validate_every
        if self.epochs and not self.validate_every:
            every = min(every, max(epochs // _MIN_VALIDATIONS, 1))
        every = _largest_divisor(epochs, every)  # so that each round is whole
        more: dict[str, Any] = (
            {"warmup_epochs": every} if "warmup_epochs" in schedule.advanced else {}
        )
        if schedule.early_stopping:
            more["patience"] = early_stopping_patience(epochs, every)
        if schedule.learning_rate and not self.learning_rate:  # one goes with the other
            more["optimizer"] = schedule.optimizer
        keep = self.keep_statistics
        return self.replace(
            epochs=epochs,
            validate_every=every,
            repeats=self.repeats or 1,
            learning_rate=self.learning_rate or schedule.learning_rate,
            keep_statistics=schedule.keep_statistics if keep is None else keep,
            average=self.average or schedule.average,
            share=self.share or schedule.share,
            advanced={**schedule.advanced, **more, **self.advanced},
        )

    # --- as other programs take them ---

    @property
    def batch_size(self) -> int:
        """Images per step; where a GPU's memory decides, the usual number."""
        return int(self.default("batch")) if self.batch == "auto" else self.batch

    @property
    def rounds(self) -> int:
        """Validations of a run."""
        return -(-(self.epochs or 1) // (self.validate_every or 1))

    def overrides(self, image_size: int, folder: str) -> dict[str, Any]:
        """Ultralytics' training arguments."""
        devices = self.devices
        kind = devices[0].partition(":")[0]
        ours: dict[str, Any] = {
            "model": "none.pt",  # never looked for: the network is built already
            "data": self.data,
            "epochs": self.rounds,
            "imgsz": image_size,
            "batch": -1 if kind == "cuda" and self.batch == "auto" else self.batch_size,
            "seed": self.seed,
            "device": ",".join(name.partition(":")[2] or "0" for name in devices)
            if kind == "cuda"
            else devices[0],
            "save_dir": folder,
            "workers": 8 if kind == "cuda" else 0,
            "amp": _amp_dtype(kind),
            "deterministic": kind == "cpu",  # on GPUs some steps know no exact way
        }
        if self.learning_rate is not None:
            ours |= {"optimizer": "AdamW", "lr0": self.learning_rate, "momentum": 0.9}
            ours |= {"warmup_bias_lr": 0.0}
        if self.jitter_kind == "none":
            ours |= {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
        amp = ours["amp"] if self.advanced.get("amp", True) else False
        return ours | self.advanced | self._epoch_args() | {"amp": amp}

    def _epoch_args(self) -> dict[str, Any]:
        """What is given in epochs, in rounds: Ultralytics validates after each of its epochs."""
        every = self.validate_every or 1
        given = {key: self.advanced[key] for key in _EPOCH_ARGS if key in self.advanced}
        return {
            key: value / every if key == "warmup_epochs" else -(-value // every)
            for key, value in given.items()
        }


class StainGanSettings(Settings):
    """How a StainGAN is trained; the paper's size is 64 filters, 9 blocks and crops of 256."""

    task: Literal["staingan"] = Field("staingan", description="What is trained.")
    source: str | None = Field(None, description="Folder with images of the laboratory to convert.")
    target: str | None = Field(
        None, description="Folder with images of the laboratory whose looks are taken over."
    )
    filters: Annotated[int, Field(ge=4, le=64)] = Field(
        16, description="Filters of the first layer; the time of a step grows with their square."
    )
    blocks: Annotated[int, Field(ge=1, le=9)] = Field(6, description="Blocks of the generator.")
    crop: Annotated[int, Field(ge=32, le=256)] = Field(
        128, description="Side of training crops in pixels, a multiple of 4."
    )
    steps: Annotated[int, Field(ge=1)] = Field(2000, description="Training steps.")
    batch: Annotated[int, Field(ge=1, le=16)] = Field(1, description="Crops per step.")
    learning_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        2e-4, description="Learning rate of Adam; falls to 0 in the second half."
    )
    cycle: Annotated[float, Field(ge=0)] = Field(10.0, description="Weight of the cycle loss.")
    identity: Annotated[float, Field(ge=0)] = Field(
        0.5, description="Weight of the identity loss, in weights of the cycle loss."
    )
    pool: Annotated[int, Field(ge=0, le=1000)] = Field(
        50, description="Generated crops that are kept to train the discriminators on."
    )
    distill_steps: Annotated[int, Field(ge=1)] = Field(
        1500, description="Steps in which the 1×1 network learns what the generator does."
    )
    save_every: Annotated[int, Field(ge=1)] = Field(
        25, description="Steps from one saved state to the next; a killed run loses at most these."
    )
    seed: Annotated[int, Field(ge=0)] = Field(0, description="Random seed: same seed, same result.")
    device: str = Field("auto", description="auto, cpu, cuda:0 or mps.")

    @field_validator("crop")
    @classmethod
    def _check_crop(cls, crop: int) -> int:
        if crop % 4:
            raise ValueError(f"crop must be a multiple of 4, not {crop}.")
        return crop


def _make_jitter(settings: dict[str, Any]) -> ImageJitter:
    from napari_beerlanet.core.training.trainer.data import HedJitter, StainJitter

    kinds: dict[str, type[ImageJitter]] = {"stain": StainJitter, "hed": HedJitter}
    kind = settings.pop("kind", "stain")
    if kind not in kinds:
        raise ValueError(f'kind of jitter must be "stain" or "hed", not {quoted(kind)}.')
    try:
        return kinds[kind](**settings)
    except TypeError as error:
        raise ValueError(f"jitter has no such setting: {error_detail(error)}.") from error


def _amp_dtype(kind: str) -> str | bool:
    """bfloat16 where the GPU has it: Ultralytics tests float16 with a model from the network."""
    import torch

    return "bf16" if kind == "cuda" and torch.cuda.is_bf16_supported(False) else False


# --- the schedule that fits a dataset's size ---

_LENGTH_FACTORS = {"quick": 0.4, "normal": 1.0, "thorough": 2.5}  # of the normal number of steps

_BATCH: int = TrainSettings.default("batch")

LARGE_DATASET_IMAGES = 100
"""From so many images on, their batch statistics and weights replace the starting model's."""

_STEPS_FACTOR, _STEPS_EXPONENT = 36, 0.35  # for n images 36 n^0.35, so 5: 63, 50: 142
_MAX_STEPS_PER_IMAGE = 20  # with more, what the images do not show is forgotten
_LARGE_DATASET_STEPS_FACTOR = 0.55  # of many images each needs to be seen only some times
_MAX_STEPS = 600
_MIN_STEPS_PER_ROUND = 6  # after which come validation and writing
# AdamW moves every weight alike, by little or much evidence, and wins most; what it would destroy
# is kept by staying between parent and result. In the head alone SGD loses less.
_SMALL_DATASET_OPTIMIZERS = {
    "all": ("AdamW", 3e-4),
    "head": ("SGD", 2e-3),
    "stain": ("AdamW", 2e-3),
}
_LARGE_DATASET_OPTIMIZERS = {
    "all": ("AdamW", 6e-4),
    "head": ("AdamW", 1.5e-3),
    "stain": ("AdamW", 6e-3),
}
_SMALL_DATASET_SHARE = 0.5  # farther from the parent, images that were not shown gain no more
# With all weights trained on fewer images, most is won by this share, and what the parent knows of
# its own laboratory is lost beyond it.
_HANDFUL_IMAGES, _HANDFUL_SHARE = 10, 0.3
# A parent knows objects of other sizes and places; few images, shown much too large or as parts of
# mosaics only, would unteach how whole images look at the scale that they are detected at.
_GENTLE_AUGMENTATION = {"scale": 0.2, "translate": 0.05, "mosaic": 0.5}


@dataclass(frozen=True)
class TrainingSchedule:
    """The hyper-parameters that hold where none are given; names as in `TrainSettings`."""

    epochs: int = 50
    validate_every: int = 1
    learning_rate: float | None = None
    optimizer: str = "AdamW"
    keep_statistics: bool = False
    average: int | None = None
    share: float = 1.0
    early_stopping: bool = False
    advanced: dict[str, Any] = field(default_factory=dict)

    def steps(self, images: int, batch: int = _BATCH) -> int:
        """Optimizer steps of the whole run, if it does not stop early."""
        rounds = -(-self.epochs // self.validate_every)
        return rounds * -(-images * self.validate_every // batch)


_FEW_IMAGES, _FEW_BOXES = 4, 20  # below which all weights would learn these images by heart


def choose_scope(images: int, boxes: int, same_classes: bool) -> Scope:
    """What to train by default: with little data as little as possible, see docs/finetune.md."""
    if images >= _FEW_IMAGES and boxes >= _FEW_BOXES:
        return "all"
    return "stain" if same_classes else "head"


def early_stopping_patience(epochs: int, validate_every: int = 1) -> int:
    """Epochs without a better one after which a run of so many stops."""
    return max(-(-epochs // validate_every) // 2, 3) * validate_every


def _largest_divisor(number: int, most: int) -> int:
    return max(k for k in range(1, min(most, number) + 1) if number % k == 0)


def _share(images: int, scope: Scope) -> float:
    """How far a model that is fine-tuned on so many images moves from its parent."""
    if images >= LARGE_DATASET_IMAGES:
        return 1.0
    handful = scope == "all" and images < _HANDFUL_IMAGES
    return _HANDFUL_SHARE if handful else _SMALL_DATASET_SHARE


def choose_schedule(
    images: int, scope: Scope = "all", length: Length = "normal", batch: int = _BATCH
) -> TrainingSchedule:
    """The hyper-parameters for fine-tuning a pretrained model on so many annotated images."""
    few = images < LARGE_DATASET_IMAGES
    normal = _STEPS_FACTOR * images**_STEPS_EXPONENT * (1 if few else _LARGE_DATASET_STEPS_FACTOR)
    steps = round(min(normal, _MAX_STEPS_PER_IMAGE * images, _MAX_STEPS) * _LENGTH_FACTORS[length])
    # Few images are shown again and again before they are validated: an epoch is always one pass.
    every = (
        -(-_MIN_STEPS_PER_ROUND * batch // images) if images < _MIN_STEPS_PER_ROUND * batch else 1
    )
    rounds = max(round(steps / -(-images * every // batch)), 2 if length == "quick" else 3)
    optimizer, rate = (_SMALL_DATASET_OPTIMIZERS if few else _LARGE_DATASET_OPTIMIZERS)[scope]
    gentle = {"cos_lr": True, "lrf": 0.05, "nbs": batch, "warmup_epochs": 1}
    return TrainingSchedule(
        rounds * every,
        every,
        rate,
        optimizer,
        keep_statistics=few,
        average=max(steps // (3 if few else 5), 2),
        share=_share(images, scope),
        early_stopping=True,
        advanced=gentle | (_GENTLE_AUGMENTATION if few else {}),
    )
