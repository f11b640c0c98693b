"""A YOLO network of a few thousand weights and a dataset of small smears: epochs take a moment."""

from pathlib import Path

import numpy as np
from PIL import Image

from napari_beerlanet.samples import blood_smear

NAMES = ("RBC", "WBC", "Platelets")
MODEL = {
    "nc": 3,
    "backbone": [
        [-1, 1, "Conv", [8, 3, 2]],
        [-1, 1, "Conv", [16, 3, 2]],
        [-1, 1, "Conv", [24, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
        [-1, 1, "Conv", [32, 3, 2]],
    ],
    "head": [[[2, 3, 4], 1, "Detect", ["nc"]]],
}
"""Ultralytics' description of the network, strides 8, 16 and 32."""


def write_smears(folder: Path, train: int = 5, val: int = 2, side: int = 96) -> Path:
    """Write images, labels and a data.yaml; returns its path."""
    for split, seeds in {"train": range(train), "val": range(100, 100 + val)}.items():
        for seed in seeds:
            write_smear(folder, split, seed, side)
    data = folder / "data.yaml"
    names = ", ".join(NAMES)
    data.write_text(f"train: images/train\nval: images/val\nnames: [{names}]\n")
    return data


def write_smear(folder: Path, split: str, seed: int, side: int = 96) -> Path:
    """Write one image and its labels; returns the image's path."""
    field = blood_smear((side, side), seed=seed, cell_diameter=side / 3, white_cells=0.2)
    image = folder / "images" / split / f"smear-{seed}.png"
    labels = folder / "labels" / split / f"smear-{seed}.txt"
    for path in (image, labels):
        path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(field.image).save(image)
    centres, sizes = (
        (field.boxes[:, :2] + field.boxes[:, 2:]) / 2,
        np.diff(field.boxes.reshape(-1, 2, 2), axis=1)[:, 0],
    )
    rows = np.column_stack([field.labels, centres / side, sizes / side])
    np.savetxt(labels, rows, fmt=["%d"] + ["%.6f"] * 4)
    return image
