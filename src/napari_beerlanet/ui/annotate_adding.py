"""What runs off the GUI thread when an image goes into the project."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from napari_beerlanet.core.annotations import Annotations
from napari_beerlanet.core.cropsize import crop_side, padding_grey
from napari_beerlanet.core.progress import Report
from napari_beerlanet.core.project import Added, Project
from napari_beerlanet.ui.annotate_images import Sourced

SIZE = 640
"""Pixels of an image in training where neither a model nor the project says."""

FILES = "Boxes (*.txt *.json *.geojson *.xml *.csv);;All files (*)"
"""What a file dialog offers."""


@dataclass(frozen=True)
class Addition:
    """What came of adding an image of `boxes`, and how large its pieces are.

    `known` are notes on the whole project, which stand elsewhere.
    """

    added: Added
    boxes: int
    side: int
    how: str
    new_classes: list[str]
    known: list[str]

    def sentences(self) -> list[str]:
        """For people."""
        side = {"train": "training", "val": "validation"}.get(self.added.side, self.added.side)
        pieces = "1 piece" if self.added.pieces == 1 else f"{self.added.pieces} overlapping pieces"
        boxes = "1 box" if self.boxes == 1 else f"{self.boxes} boxes"
        told = [f"Added for {side}: {boxes} in {pieces} of up to {self.side} pixels ({self.how})."]
        if self.new_classes:
            told.append(f"New in the project: {', '.join(self.new_classes)}.")
        return [*told, *(note for note in self.added.notes if note not in self.known)]


def add_image(
    sourced: Sourced,
    annotations: Annotations,
    project: Project,
    info: Mapping[str, Any],
    scale: float | None,
    report: Report,
) -> Addition:
    """Cut the annotated regions of an image into pieces to learn from."""
    used = [name for name, count in annotations.counts().items() if count]
    new = [name for name in used if name not in project.classes]
    if new:
        project.add_classes(new)
    source = sourced.source()
    size = int(info.get("image_size") or project.training_size or SIZE)
    side, how = crop_side(info, annotations, size, source.pixel_size, scale)
    added = project.add_image(
        source,
        sourced.plane.lazy(),
        annotations,
        size,
        side=side,
        grey=padding_grey(info),
        report=report,
    )
    return Addition(added, len(annotations), side, how, new, project.split_notes())
