"""Batch statistics re-estimated on the images of another laboratory: the cheapest adaptation.

A network that normalises batches carries the mean and variance of its training images through every
layer. Taken anew from images of the laboratory that it shall work for, without any label, they
undo part of what another stain and camera change.
"""

from __future__ import annotations

import copy
import itertools
import os
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.detection import tiling
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import check_rgb, fill_transparent, to_uint8
from napari_beerlanet.core.stains.front_end import fit_stain

_DETECTOR_BATCH, _CLASSIFIER_BATCH = 8, 64  # images at a time; of fewer the variance is poor

_Model = TypeVar("_Model", Detector, Classifier)


def adapt_batch_statistics(
    model: _Model, images: Sequence[Any], *, report: Report | None = None
) -> _Model:
    """A copy of a model whose batch statistics are those of `images`; the model stays as it is.

    Parameters
    ----------
    model
        A `Detector` or a `Classifier`, with a network that has batch normalisation.
    images
        Of a detector: images (H, W, 3 or 4) or their files, shown as in training, the longer side
        as many pixels long. Of a classifier: crops or their files. At least two; no labels.

    The mean over batches replaces the old statistics; all weights stay. `info["notes"]` of the copy
    says it.
    """
    if len(images) < 2:
        raise ValueError(f"Batch statistics need at least two images, not {len(images)}.")
    network = copy.deepcopy(model.network)
    layers = [m for m in network.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    if not layers:
        raise ValueError("The network has no batch normalisation, so there is nothing to adapt.")
    before = [layer.momentum for layer in layers]
    for layer in layers:
        layer.reset_running_stats()
        layer.momentum = None  # the mean over all batches
        layer.train()
    try:
        with torch.no_grad():
            if isinstance(model, Classifier):
                _show_crops(model, network, images, report)
            else:
                _show_images(model, network, images, report)
    finally:
        for layer, momentum in zip(layers, before, strict=True):
            layer.momentum = momentum
            layer.eval()
    report_progress(report, 1, 1, "done")
    note = f"Batch statistics were re-estimated on {count_of(len(images), 'image')}."
    info = {**model.info, "notes": [*(model.info.get("notes") or []), note]}
    return type(model)(network, info, model.device)


def _show_crops(model: Classifier, network: Any, images: Sequence[Any], report: Any) -> None:
    for done, part in _batches(list(images), _CLASSIFIER_BATCH):
        report_progress(report, done, len(images), "adapting batch statistics")
        crops = model.prepare_crops([network.normalize(_pixels(image)) for image in part])
        planes = torch.from_numpy(np.ascontiguousarray(crops.transpose(0, 3, 1, 2)))
        network(planes.to(model.device) / 255)


def _show_images(model: Detector, network: Any, images: Sequence[Any], report: Any) -> None:
    """Show images of one size together; files are read twice, so that few are in memory."""
    stride, side = int(network.stride.max()), int(model.info["image_size"])
    sizes: dict[tuple[int, int], list[Any]] = {}
    for k, image in enumerate(images):
        report_progress(report, k, 2 * len(images), "adapting batch statistics")
        height, width = check_rgb(_pixels(image)).pixels.shape[:2]
        scale = side / max(height, width)
        size = max(round(height * scale), 1), max(round(width * scale), 1)
        sizes.setdefault(size, []).append(image)

    def mixed(image: Any, size: tuple[int, int]) -> torch.Tensor:
        pixels = network.normalize(to_uint8(check_rgb(_pixels(image)).pixels))
        tile = _resized(fill_transparent(pixels), size)
        return fit_stain(network, tile).mix_tiles(network, tiling.pad_tile(tile, stride)[0][None])

    shown = len(images)
    for size, mine in sizes.items():
        for _, part in _batches(mine, _DETECTOR_BATCH):
            report_progress(report, shown, 2 * len(images), "adapting batch statistics")
            shown += len(part)
            network.predict_mixed(torch.cat([mixed(image, size) for image in part]))


def _batches(items: list[Any], size: int) -> list[tuple[int, list[Any]]]:
    """Parts of nearly equal size, each with how many come before it."""
    cuts = np.linspace(0, len(items), -(-len(items) // size) + 1).round().astype(int)
    return [(int(a), items[a:b]) for a, b in itertools.pairwise(cuts)]


def _pixels(image: Any) -> npt.NDArray[Any]:
    if isinstance(image, (str, os.PathLike)):
        return read_image(image).pixels
    return np.asarray(image)


def _resized(pixels: npt.NDArray[np.uint8], size: tuple[int, int]) -> npt.NDArray[np.uint8]:
    """Return an image at a `size` (h, w), as in training."""
    height, width = pixels.shape[:2]
    return tiling.read_tile(pixels, Rectangle.from_edges(0, 0, width, height), size)
