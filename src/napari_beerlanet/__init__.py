"""See the stains of a microscope image apart, find its cells and classify them.

The public names below load when they are first used, so ``import napari_beerlanet`` itself pulls
in neither torch nor numba nor Qt.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from napari_beerlanet._version import __version__

if TYPE_CHECKING:
    from napari_beerlanet.core.batch.malaria import count_malaria
    from napari_beerlanet.core.batch.study import run_study
    from napari_beerlanet.core.benchmark.benchmark import run_benchmark
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
    from napari_beerlanet.core.classification.classifier import Classification, Classifier
    from napari_beerlanet.core.classification.slide_classifier import classify_slide
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.detection.slide_detector import detect_slide
    from napari_beerlanet.core.evaluation.batch_statistics import adapt_batch_statistics
    from napari_beerlanet.core.evaluation.dataset import evaluate
    from napari_beerlanet.core.images.slide import open_slide
    from napari_beerlanet.core.normalization.methods import normalize
    from napari_beerlanet.core.stains.decompose import decompose
    from napari_beerlanet.core.stains.decomposition import Decomposition
    from napari_beerlanet.core.stains.layer import BeerLaNet
    from napari_beerlanet.core.stains.palette import Palette
    from napari_beerlanet.core.stains.presets import StainPreset, load_preset
    from napari_beerlanet.core.stains.slide import decompose_slide
    from napari_beerlanet.core.training.fine_tune import fine_tune, train_detector
    from napari_beerlanet.core.training.train_classifier import train_classifier

__all__ = [
    "BeerLaNet",
    "Classification",
    "Classifier",
    "Decomposition",
    "Detections",
    "Detector",
    "Palette",
    "StainPreset",
    "__version__",
    "adapt_batch_statistics",
    "classify_slide",
    "count_malaria",
    "decompose",
    "decompose_slide",
    "detect_slide",
    "evaluate",
    "fine_tune",
    "load_checkpoint",
    "load_preset",
    "normalize",
    "open_slide",
    "run_benchmark",
    "run_study",
    "save_checkpoint",
    "train_classifier",
    "train_detector",
]

_HOME = {
    "BeerLaNet": "core.stains.layer",
    "Classification": "core.classification.classifier",
    "Classifier": "core.classification.classifier",
    "Decomposition": "core.stains.decomposition",
    "Detections": "core.boxes.detections",
    "Detector": "core.detection.detector",
    "Palette": "core.stains.palette",
    "StainPreset": "core.stains.presets",
    "adapt_batch_statistics": "core.evaluation.batch_statistics",
    "classify_slide": "core.classification.slide_classifier",
    "count_malaria": "core.batch.malaria",
    "decompose": "core.stains.decompose",
    "decompose_slide": "core.stains.slide",
    "detect_slide": "core.detection.slide_detector",
    "evaluate": "core.evaluation.dataset",
    "fine_tune": "core.training.fine_tune",
    "load_checkpoint": "core.checkpoints.checkpoint",
    "load_preset": "core.stains.presets",
    "normalize": "core.normalization.methods",
    "open_slide": "core.images.slide",
    "run_benchmark": "core.benchmark.benchmark",
    "run_study": "core.batch.study",
    "save_checkpoint": "core.checkpoints.checkpoint",
    "train_classifier": "core.training.train_classifier",
    "train_detector": "core.training.fine_tune",
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
