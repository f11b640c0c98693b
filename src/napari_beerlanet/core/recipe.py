"""What a training run is asked to do, checked, and as Ultralytics understands it."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any

from .device import pick_device
from .plan import LENGTHS, Plan, patience

if TYPE_CHECKING:
    from .augment import StainJitter

SCOPES = ("all", "head", "stain")
FRESH_SIZE = 640
"""Longer side of training images for a model that has none of its own."""

# Files, devices and whatever would load or write something else are ours to decide.
_OURS = {
    *("model", "data", "epochs", "imgsz", "batch", "seed", "device", "lr0", "resume", "project"),
    *("name", "save_dir", "save", "exist_ok", "plots", "task", "mode", "cfg", "pretrained"),
    *("distill_model", "augmentations", "single_cls", "classes", "fraction", "split", "verbose"),
    *("save_period", "save_json", "save_txt", "profile", "compile", "quantize", "time", "freeze"),
}
_GENTLE = ("repeats", "keep_statistics", "average", "share")


@dataclass(frozen=True)
class Recipe:
    """The arguments of `fine_tune`; `model` is a path or a name, `data` a path.

    None leaves a setting to the `Plan` for so many fields, which `settled` fills in.
    """

    model: str | None = None
    data: str | None = None
    scope: str = "all"
    epochs: int | None = None
    image_size: int | None = None
    batch: int | str = 8
    learning_rate: float | None = None
    seed: int = 0
    device: str = "auto"
    jitter: bool | dict[str, Any] = True
    pixel_size: float | None = None
    advanced: dict[str, Any] = field(default_factory=dict)
    length: str = "normal"
    repeats: int | None = None
    keep_statistics: bool | None = None
    average: int | None = None
    share: float | None = None

    @classmethod
    def read(cls, settings: Mapping[str, Any]) -> Recipe:
        """From the settings of a run.json; anything else than those is a `ValueError`."""
        unknown = sorted(set(settings) - {part.name for part in fields(cls)})
        if unknown:
            raise ValueError(f"There is no setting {unknown[0]!r} of training.")
        recipe = cls(**settings)
        recipe.check()
        return recipe

    def write(self) -> dict[str, Any]:
        """As `read` takes it, for a run.json."""
        return asdict(self)

    def check(self) -> None:
        """A `ValueError` for a setting that makes no sense."""
        if self.scope not in SCOPES:
            raise ValueError(f"scope must be one of {', '.join(SCOPES)}, not {self.scope!r}.")
        if self.length not in LENGTHS:
            raise ValueError(f"length must be one of {', '.join(LENGTHS)}, not {self.length!r}.")
        for name in ("epochs", "repeats", "average"):
            if getattr(self, name) is not None:
                _whole(name, getattr(self, name), 1)
        if self.keep_statistics not in (None, True, False):
            raise ValueError(f"keep_statistics is yes or no, not {self.keep_statistics!r}.")
        if self.share is not None and not (_number(self.share) and 0 < self.share <= 1):
            raise ValueError(f"share must be a number above 0, at most 1, not {self.share!r}.")
        _whole("seed", self.seed, 0)
        if self.batch != "auto":
            _whole("batch", self.batch, 1)
        if self.image_size is not None:
            _whole("image_size", self.image_size, 32)
        for name, value in (("learning_rate", self.learning_rate), ("pixel_size", self.pixel_size)):
            if value is not None and not (_number(value) and 0 < value < math.inf):
                raise ValueError(f"{name} must be a number above 0, not {value!r}.")
        refused = sorted(_OURS & set(self.advanced))
        if refused:
            raise ValueError(f"{refused[0]} is not a setting of training here; see fine_tune.")
        if not isinstance(self.jitter, bool):
            self.stain_jitter()

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to a plan."""
        return None not in (self.epochs, self.repeats, self.keep_statistics)

    def settled(self, plan: Plan) -> Recipe:
        """With a plan's settings where there are none; an epoch that is counted is one pass."""
        epochs = self.epochs or plan.epochs
        more: dict[str, Any] = {"patience": patience(epochs)} if plan.stops_early else {}
        if plan.learning_rate and not self.learning_rate:  # one goes with the other
            more["optimizer"] = plan.optimizer
        return replace(
            self,
            epochs=epochs,
            repeats=self.repeats or (1 if self.epochs else plan.repeats),
            learning_rate=self.learning_rate or plan.learning_rate,
            keep_statistics=_first(self.keep_statistics, plan.keep_statistics),
            average=self.average or plan.average,
            share=self.share or plan.share,
            advanced={**plan.advanced, **more, **self.advanced},
        )

    def differences(self, other: Recipe) -> list[str]:
        """Sentences on what was asked for here and does not hold where `other` goes on."""
        plain = Recipe()
        return [
            f"The run goes on with {part.name} {there!r}, as it was begun, not {here!r}."
            for part in fields(self)
            if (here := getattr(self, part.name)) != (there := getattr(other, part.name))
            and here != getattr(plain, part.name)
        ]

    def stain_jitter(self) -> StainJitter | None:
        """The jitter that is asked for."""
        from .augment import StainJitter

        if not self.jitter:
            return None
        try:
            return StainJitter(**(self.jitter if isinstance(self.jitter, dict) else {}))
        except TypeError as error:
            raise ValueError(f"jitter has no such setting: {error}.") from error

    @property
    def devices(self) -> list[str]:
        """Names of the devices, as torch has them; each is there."""
        names = [name.strip() for name in str(self.device).split(",") if name.strip()]
        full = [f"cuda:{name}" if name.isdecimal() else name for name in names] or ["auto"]
        found = [str(pick_device(name)) for name in full]
        if len(found) > 1 and any(not name.startswith("cuda") for name in found):
            raise ValueError(f'Several devices must be GPUs such as "0,1", not {self.device!r}.')
        return found

    def command(self, data: str, model: str) -> str:
        """What does the same on the command line, for the training record."""
        words = ["napari-beerlanet", "train", "--data", data, "--model", model]
        words += ["--scope", self.scope, "--epochs", str(self.epochs), "--batch", str(self.batch)]
        words += ["--seed", str(self.seed)]
        words += ["--imgsz", str(self.image_size)] if self.image_size else []
        words += ["--lr", str(self.learning_rate)] if self.learning_rate else []
        ours = {key: getattr(self, key) for key in _GENTLE}
        further = {key: value for key, value in ours.items() if value is not None} | self.advanced
        words += [f"--set={key}={json.dumps(value)}" for key, value in further.items()]
        return shlex.join(words)

    def overrides(self, image_size: int, folder: str) -> dict[str, Any]:
        """Ultralytics' training arguments."""
        devices = self.devices
        kind = devices[0].partition(":")[0]
        asked: dict[str, Any] = {
            "model": "none.pt",  # never looked for: the network is built already
            "data": self.data,
            "epochs": self.epochs,
            "imgsz": image_size,
            "batch": (-1 if kind == "cuda" else 8) if self.batch == "auto" else self.batch,
            "seed": self.seed,
            "device": ",".join(name.partition(":")[2] or "0" for name in devices)
            if kind == "cuda"
            else kind,
            "save_dir": folder,
            "workers": 8 if kind == "cuda" else 0,
            "amp": _half(kind),
            "deterministic": kind == "cpu",  # on GPUs some steps know no exact way
        }
        if self.learning_rate is not None:
            asked |= {"optimizer": "AdamW", "lr0": self.learning_rate, "momentum": 0.9}
            asked |= {"warmup_bias_lr": 0.0}
        if not self.jitter:
            asked |= {"hsv_h": 0.0, "hsv_s": 0.0, "hsv_v": 0.0}
        given = {**self.advanced, "amp": asked["amp"] if self.advanced.get("amp", True) else False}
        return asked | given


def _half(kind: str) -> str | bool:
    """bfloat16 where the GPU has it: Ultralytics tests float16 with a model from the network."""
    import torch

    return "bf16" if kind == "cuda" and torch.cuda.is_bf16_supported(False) else False


def _first(given: bool | None, otherwise: bool) -> bool:
    return otherwise if given is None else given


def _number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _whole(name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(f"{name} must be a whole number of at least {least}, not {value!r}.")
