"""An example of a benchmark: synthetic smears of two laboratories, and networks that learn fast.

Everything is drawn from seeds, so it is the same everywhere: cells of the same kind, stained and
photographed by two laboratories. It shows what a benchmark gives, and says nothing about methods on
real images.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from napari_beerlanet.core.benchmark.settings import METHODS
from napari_beerlanet.core.common.progress import Report, report_progress
from napari_beerlanet.core.common.storage import atomic_path
from napari_beerlanet.samples import SampleField, blood_smear

_SIDE, _DIAMETER = 128, 40.0
_FIRST_SEEDS = {"train": 500_000, "val": 510_000, "test": 520_000}  # far from those of the tests
_COUNTS = {"train": 24, "val": 6, "test": 10}
_NETWORK = """\
# A detector of some ten thousand weights, strides 8, 16 and 32.
nc: 3
backbone:
  - [-1, 1, Conv, [8, 3, 2]]
  - [-1, 1, Conv, [16, 3, 2]]
  - [-1, 1, Conv, [24, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
  - [-1, 1, Conv, [32, 3, 2]]
head:
  - [[2, 3, 4], 1, Detect, [nc]]
"""


def write_example(folder: Path, report: Report | None = None) -> Path:
    """Write images, labels and a benchmark.yaml into a folder; returns the path of the latter.

    What is there already is left as it is.
    """
    import yaml

    total, done = sum(_COUNTS.values()), 0
    for laboratory, splits in {"first-lab": ("train", "val"), "second-lab": ("test",)}.items():
        for split in splits:
            for number in range(_COUNTS[split]):
                report_progress(report, done, total, "drawing the example")
                _write_smear(folder / laboratory, split, number, laboratory == "second-lab")
                done += 1
        named: dict[str, Any] = {split: f"images/{split}" for split in splits}
        _write_text(
            folder / laboratory / "data.yaml",
            yaml.safe_dump({**named, "names": ["RBC", "WBC", "Platelets"]}),
        )
    _write_text(folder / "network.yaml", _NETWORK)
    _write_text(folder / "benchmark.yaml", yaml.safe_dump(example_content(), sort_keys=False))
    report_progress(report, 1, 1, "done")
    return folder / "benchmark.yaml"


def example_content() -> dict[str, Any]:
    """The example's benchmark.yaml."""
    shared: dict[str, Any] = {
        "train": "first-lab/data.yaml",
        "tests": {"second lab": "second-lab/data.yaml"},
    }
    return {
        "methods": list(METHODS),
        "seeds": [0],
        "tasks": [
            {
                "name": "find cells",
                "kind": "detect",
                **shared,
                "weights": "network.yaml",
                "epochs": 40,
                "image_size": _SIDE,
                "batch": 4,
                # Much in little time: from scratch, on images of which each shows whole cells.
                "options": {
                    "learning_rate": 0.01,
                    "validate_every": 10,
                    "warmup_epochs": 1,
                    "mosaic": 0.0,
                    "scale": 0.1,
                    "translate": 0.05,
                },
            },
            {
                "name": "name cells",
                "kind": "classify",
                **shared,
                "backbone": "shufflenet_v2_x0_5",
                "epochs": 6,
                "image_size": 32,
                "batch": 16,
                "options": {"learning_rate": 0.002},
            },
        ],
        "staingan": {"filters": 8, "blocks": 3, "crop": 64, "steps": 300, "distill_steps": 300},
        "threads": 1,
    }


def _write_smear(folder: Path, split: str, number: int, other: bool) -> None:
    image = folder / "images" / split / f"smear-{number:02d}.png"
    if image.exists():
        return
    field = blood_smear(
        (_SIDE, _SIDE),
        seed=_FIRST_SEEDS[split] + number,
        shift=1.0 if other else 0.0,
        lab=2,
        cell_diameter=_DIAMETER,
        white_cells=0.2,
        platelets=0.2,
    )
    labels = folder / "labels" / split / f"smear-{number:02d}.txt"
    for path in (image, labels):
        path.parent.mkdir(parents=True, exist_ok=True)
    _write_text(labels, _label_lines(field))
    with atomic_path(image) as unfinished:
        Image.fromarray(field.image).save(unfinished)


def _label_lines(field: SampleField) -> str:
    sides = np.array(field.image.shape[1::-1] * 2, float)
    boxes = field.boxes / sides
    centres, sizes = (boxes[:, :2] + boxes[:, 2:]) / 2, boxes[:, 2:] - boxes[:, :2]
    rows = np.column_stack([field.labels, centres, sizes])
    return "".join(f"{int(row[0])} " + " ".join(f"{v:.6f}" for v in row[1:]) + "\n" for row in rows)


def _write_text(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_path(path) as unfinished:
        unfinished.write_text(text, encoding="utf-8")
