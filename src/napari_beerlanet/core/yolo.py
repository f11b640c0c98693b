"""The one place that imports Ultralytics, and what that import is kept from doing.

On import Ultralytics asks the network whether it is there, writes settings to the user's home, and
sets `OMP_NUM_THREADS=1`; it puts functions of its own in the place of Pillow's `open` and torch's
`save`, and opencv points Qt at plugins of its own. Here it is told to stay offline, to keep its
settings in our cache folder and to be quiet, and all of that is put back. All that
we use of it passes through here, so that this file shows what a new version may break.
"""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import platformdirs
import torch  # before Ultralytics, whose OMP_NUM_THREADS=1 it would otherwise read for good
from PIL import Image

from .architecture import check_layout
from .files import FileError
from .pickled import read_pickled
from .shapes import check_shapes, head_width, layer_shapes

_KEPT = ("YOLO_CONFIG_DIR", "YOLO_OFFLINE", "YOLO_AUTOINSTALL")  # child processes need them, too
_NO_SYNC = ("clearml", "comet", "dvc", "mlflow", "raytune", "sync", "tensorboard", "wandb")


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
    kept = {name: os.environ[name] for name in _KEPT}
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
    os.environ.update(kept)


_before = _prepare()
_patched = (Image.open, torch.save)
try:
    import cv2
    import ultralytics
    from ultralytics import YOLO
    from ultralytics.data.augment import RandomHSV
    from ultralytics.data.dataset import YOLODataset
    from ultralytics.models.yolo.detect import DetectionTrainer, DetectionValidator
    from ultralytics.nn.tasks import DetectionModel, parse_model
    from ultralytics.utils import LOGGER, SETTINGS
    from ultralytics.utils.events import events
    from ultralytics.utils.metrics import ConfusionMatrix, ap_per_class
    from ultralytics.utils.nms import non_max_suppression
    from ultralytics.utils.torch_utils import ModelEMA
finally:
    _restore(_before)
    Image.open, torch.save = _patched

events.enabled = False
LOGGER.setLevel(logging.WARNING)
# In this process only: a settings file that is the user's own stays as it is.
dict.update(SETTINGS, dict.fromkeys(_NO_SYNC, False))

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
    "non_max_suppression",
    "parse_model",
    "read_pt",
]


def read_pt(path: str | Path) -> Any:
    """The network (`nn.Module`, float32) in a `.pt` of Ultralytics.

    Nothing in the file is executed, installed or downloaded: it is read as plain data, and the
    network is built anew from its checked layout. A front end of ours is left out.
    """
    try:
        if not Path(path).is_file():
            raise ValueError("there is no such file")
        parts = read_pickled(Path(path))
        layout = check_layout(parts.layout)
        weights = {k: v for k, v in parts.weights.items() if k.startswith("model.")}
        shapes = {name: tuple(value.shape) for name, value in weights.items()}
        width = head_width(layout, shapes)
        check_shapes(shapes, layer_shapes(layout, parse_model, width))
    except (ValueError, OSError) as error:
        raise FileError(f"{path}: {error}.") from error
    network = DetectionModel(layout, verbose=False)
    if width is not None:  # of the class branch: Ultralytics takes it over from what it loads
        network.load(DetectionModel(dict(layout), nc=width, verbose=False), verbose=False)
    network.load_state_dict(weights)
    if isinstance(parts.names, dict) and all(isinstance(n, str) for n in parts.names.values()):
        network.names = dict(parts.names)
    return torch.nn.Module.float(network)
