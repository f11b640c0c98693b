"""See the stains of a microscope image apart, and find its cells.

The public names below load when they are first used, so ``import napari_beerlanet`` itself pulls
in neither torch nor numba nor Qt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from napari_beerlanet.core.boxes import Detections
    from napari_beerlanet.core.checkpoint import load_checkpoint, save_checkpoint
    from napari_beerlanet.core.decompose import Decomposition, decompose
    from napari_beerlanet.core.detector import Detector
    from napari_beerlanet.core.evaluate import evaluate
    from napari_beerlanet.core.layer import BeerLaNet
    from napari_beerlanet.core.palette import Palette
    from napari_beerlanet.core.slidedetect import detect_slide
    from napari_beerlanet.core.slides import open_slide
    from napari_beerlanet.core.stream import decompose_slide
    from napari_beerlanet.core.study import run_study
    from napari_beerlanet.core.train import fine_tune

__version__ = "0.1.0"

__all__ = [
    "BeerLaNet",
    "Decomposition",
    "Detections",
    "Detector",
    "Palette",
    "__version__",
    "decompose",
    "decompose_slide",
    "detect_slide",
    "evaluate",
    "fine_tune",
    "load_checkpoint",
    "open_slide",
    "run_study",
    "save_checkpoint",
]

_HOME = {
    "BeerLaNet": "core.layer",
    "Decomposition": "core.decompose",
    "Detections": "core.boxes",
    "Detector": "core.detector",
    "Palette": "core.palette",
    "decompose": "core.decompose",
    "decompose_slide": "core.stream",
    "detect_slide": "core.slidedetect",
    "evaluate": "core.evaluate",
    "fine_tune": "core.train",
    "load_checkpoint": "core.checkpoint",
    "open_slide": "core.slides",
    "run_study": "core.study",
    "save_checkpoint": "core.checkpoint",
}


def __getattr__(name: str) -> object:
    """Load a public name from its module on first use (PEP 562)."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value: object = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
