"""Synthetic smears as they would be annotated, for tests of projects."""

from pathlib import Path

import numpy as np

from napari_beerlanet.core.boxes.annotations import Annotations
from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.project.files import ImageSource
from napari_beerlanet.core.project.project import Project
from napari_beerlanet.samples import blood_smear

NAMES = ["RBC", "WBC", "Platelets"]


def smear(seed: int, shape=(96, 128), name: str = "", path: str | None = None, regions=None):
    """Source, pixels and annotations of a field; all of it is annotated by default."""
    field = blood_smear(shape, seed=seed, cell_diameter=30, white_cells=0.2)
    source = ImageSource.from_image(field.image, name or f"smear {seed}.png", path, (0.1, 0.1))
    annotations = Annotations(
        field.boxes.astype(np.float64),
        field.labels,
        list(NAMES),
        regions=(Region.whole_image(shape),) if regions is None else tuple(regions),
        image_shape=shape,
    )
    return source, field.image, annotations


def fill(project: Project, seeds, size: int = 128, **rest) -> list[str]:
    """Add fields; returns their ids."""
    return [project.add_image(*smear(seed, **rest), size).id for seed in seeds]


def tree(folder: Path) -> dict[str, bytes]:
    """Everything in a folder by relative path, except for the lock."""
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != ".lock"
    }
