"""A classifier of a few hundred weights, and crops of cells that it learns in a moment."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from torch import nn

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.checkpoints.serialize import describe_classifier
from napari_beerlanet.core.classification.classifier import Classifier
from napari_beerlanet.core.classification.network import ClassificationNetwork
from napari_beerlanet.core.classification.settings import ClassifierSettings
from napari_beerlanet.core.project.files import ImageSource

TYPES = ["dark", "pale"]
SMALL = "shufflenet_v2_x0_5"
"""The smallest network of torchvision."""


def tiny_backbone(classes: int = 2, seed: int = 0) -> nn.Module:
    """(N, 3, H, W) to logits."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Conv2d(3, 6, 3, stride=2, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, classes),
    )


def tiny_classifier(backbone=None, names=TYPES, seed=0, info=None, **settings) -> Classifier:
    """Untrained, 24 pixels."""
    chosen = ClassifierSettings(**{"input_size": 24, "components": 3, "iterations": 4, **settings})
    torch.manual_seed(seed)
    network = ClassificationNetwork(
        tiny_backbone(len(names), seed) if backbone is None else backbone, len(names), chosen
    )
    if network.has_stain:
        network.fit_mix()
    return Classifier(network, describe_classifier(network, "tiny", list(names), **(info or {})))


def cell(kind: str, seed: int, side: int = 30, diameter: float | None = None) -> np.ndarray:
    """A crop (side, side, 3) uint8 with a cell in its middle, with a dark or a pale nucleus."""
    random = np.random.default_rng(seed)
    image = random.normal((228, 222, 232), 3, (side, side, 3))
    y, x = np.indices((side, side)) + 0.5 - side / 2
    radius = (diameter or 0.7 * side) / 2
    far = np.hypot(x, y)
    image[far < radius] = random.normal((205, 170, 190), 4, 3)
    colour = {"dark": (90, 50, 120), "pale": (190, 140, 180)}[kind]
    image[far < 0.6 * radius] = random.normal(colour, 6, 3)
    return np.clip(image + random.normal(0, 2, image.shape), 0, 255).astype(np.uint8)


def write_classes(
    folder: Path, count: int = 6, kinds=TYPES, first: int = 0, side: int = 30
) -> Path:
    """A folder per class with so many crops each."""
    for kind in kinds:
        (folder / kind).mkdir(parents=True, exist_ok=True)
        for seed in range(first, first + count):
            Image.fromarray(cell(kind, seed, side)).save(folder / kind / f"{kind}-{seed}.png")
    return folder


def typed_field(seed: int, kinds=("dark", "pale"), count: int = 6, side: int = 26):
    """Source, pixels and annotations of a field with a row of cells of each of the kinds."""
    image = np.random.default_rng(seed).integers(215, 235, (40 * len(kinds), 40 * count, 3))
    image, boxes, types = image.astype(np.uint8), [], []
    for row, kind in enumerate(kinds):
        for k in range(count):
            look = "pale" if kind not in ("dark", "pale") else kind
            x, y = 40 * k + 7, 40 * row + 7
            image[y : y + side, x : x + side] = cell(look, 100 * seed + k, side)
            boxes.append((x, y, x + side, y + side))
            types.append(kind)
    shape = image.shape[:2]
    annotations = Annotations(
        np.array(boxes, float),
        np.zeros(len(boxes), np.int64),
        ["WBC"],
        regions=(Region.whole_image(shape),),
        image_shape=shape,
        types=types,
    )
    return ImageSource.from_image(image, f"field {seed}.png"), image, annotations
