"""The one place that imports Ultralytics, and keeps that import from changing the process.

On import Ultralytics checks the network connection, writes settings to the user's home, and
sets `OMP_NUM_THREADS=1`; it replaces Pillow's `open` and torch's `save` by functions of its own,
changes how NumPy and torch print, which warnings are shown and how many threads opencv has, and
opencv points Qt at plugins of its own. Here it is told to stay offline, to keep its
settings in our cache folder and to be quiet, and all of that is put back. All that
we use of it passes through here, so that this file shows what a new version may break.
"""

from __future__ import annotations

import functools
import inspect
import logging
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import platformdirs
import torch  # before Ultralytics, whose OMP_NUM_THREADS=1 it would otherwise read for good
from PIL import Image
from torch import _tensor_str

from napari_beerlanet.core.common.device import import_torchvision

# Child processes need them, too.
_KEPT_VARIABLES = ("YOLO_CONFIG_DIR", "YOLO_OFFLINE", "YOLO_AUTOINSTALL")
_DISABLED_INTEGRATIONS = (
    "clearml",
    "comet",
    "dvc",
    "mlflow",
    "raytune",
    "sync",
    "tensorboard",
    "wandb",
)


def cache_folder() -> Path:
    """Where what can be made again is kept; `NAPARI_BEERLANET_CACHE` names another place."""
    asked = os.environ.get("NAPARI_BEERLANET_CACHE")
    return Path(asked or platformdirs.user_cache_dir("napari-beerlanet", appauthor=False))


def _prepare() -> dict[str, str]:
    """Set what Ultralytics reads while it is imported; return the environment before that."""
    before = dict(os.environ)
    folder = cache_folder() / "ultralytics"
    os.environ.setdefault("YOLO_CONFIG_DIR", str(folder))
    os.environ["YOLO_OFFLINE"] = "true"
    os.environ["YOLO_AUTOINSTALL"] = "false"
    os.environ["YOLO_VERBOSE"] = "false"
    return before


def _restore(before: dict[str, str]) -> None:
    kept = {name: os.environ[name] for name in _KEPT_VARIABLES}
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    os.environ.update(kept)


_before = _prepare()
_patched = (Image.open, torch.save)
_filters = list(warnings.filters)
_printing = np.get_printoptions(), dict(vars(_tensor_str.PRINT_OPTS))
try:
    import cv2

    _opencv_threads = cv2.getNumThreads()
    import ultralytics
    from ultralytics import YOLO
    from ultralytics.data.augment import RandomHSV
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.engine import trainer as _engine
    from ultralytics.models.yolo.detect import DetectionTrainer, DetectionValidator
    from ultralytics.nn.tasks import DetectionModel, parse_model
    from ultralytics.utils import LOGGER, SETTINGS
    from ultralytics.utils.events import events
    from ultralytics.utils.loss import v8DetectionLoss
    from ultralytics.utils.metrics import ConfusionMatrix, ap_per_class
    from ultralytics.utils.torch_utils import ModelEMA
finally:
    _restore(_before)
    Image.open, torch.save = _patched
    warnings.filters[:] = _filters  # type: ignore[index]
    np.set_printoptions(**_printing[0])
    vars(_tensor_str.PRINT_OPTS).update(_printing[1])
cv2.setNumThreads(_opencv_threads)


def _without_compiler(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, which makes torch deterministic or ends that, without loading its compiler.

    `torch.use_deterministic_algorithms` tells the compiler, too, and loads it for that: two seconds
    at the start of every training. Who has loaded it has it told.
    """

    def wrapped(*args: Any, **kwargs: Any) -> None:
        if "torch._inductor" in sys.modules:
            return function(*args, **kwargs)
        whole = torch.use_deterministic_algorithms
        torch.use_deterministic_algorithms = _set_deterministic
        try:
            function(*args, **kwargs)
        finally:
            torch.use_deterministic_algorithms = whole

    return wrapped


def _set_deterministic(mode: bool, *, warn_only: bool = False) -> None:
    torch.set_deterministic_debug_mode(("warn" if warn_only else "error") if mode else "default")


def optimize_without_compiler() -> None:
    """Have torch's optimizers work without loading its compiler, in a process that only trains.

    With every step they tell the compiler what not to compile, and load it for that, as torchvision
    does when it is imported: more than a second at the start of every training. Other versions of
    them may load it as ever.
    """
    if "torch._dynamo" in sys.modules:
        return
    import_torchvision()
    optimizer = torch.optim.Optimizer
    for name in ("add_param_group", "zero_grad", "state_dict", "load_state_dict"):
        function = inspect.unwrap(getattr(optimizer, name))
        # What torch calls instead of `function`, and otherwise asks the compiler for.
        vars(function).setdefault("__dynamo_disable", function)
    for kind in vars(torch.optim).values():
        step = vars(kind).get("step") if isinstance(kind, type) else None
        code = getattr(step, "__code__", None)
        if step is not None and code is not None and code.co_name == "_use_grad":
            kind.step = _step_without_compiler(step.__wrapped__)


def _step_without_compiler(step: Callable[..., Any]) -> Callable[..., Any]:
    """An optimizer's step as torch wraps it, but for the compiler."""

    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> Any:
        with torch.set_grad_enabled(self.defaults["differentiable"]):
            return step(self, *args, **kwargs)

    return wrapped


_engine.init_seeds = _without_compiler(_engine.init_seeds)
_engine.unset_deterministic = _without_compiler(_engine.unset_deterministic)

events.enabled = False
LOGGER.setLevel(logging.WARNING)
# In this process only: a settings file that is the user's own stays as it is.
dict.update(SETTINGS, dict.fromkeys(_DISABLED_INTEGRATIONS, False))

__version__: str = ultralytics.__version__

__all__ = [
    "YOLO",
    "ConfusionMatrix",
    "DetectionModel",
    "DetectionTrainer",
    "DetectionValidator",
    "ModelEMA",
    "RandomHSV",
    "YOLODataset",
    "__version__",
    "ap_per_class",
    "cache_folder",
    "cv2",
    "optimize_without_compiler",
    "parse_model",
    "v8DetectionLoss",
]
