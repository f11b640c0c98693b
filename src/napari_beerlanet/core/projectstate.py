"""What a project holds, as read from its folder: images, pieces, classes, sides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from .annotationfiles import read_source
from .files import FileError
from .projectfiles import (
    ANNOTATIONS,
    DATA,
    Row,
    explained,
    read_manifest,
    read_table,
)
from .sources import Source
from .split import TRAIN, VAL, count_of, describe


class ProjectState:
    """The part of `Project` that reads; `notes` are sentences on files that are damaged."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.notes: list[str] = []
        self.reload()

    def reload(self) -> None:
        """Read again what is on the disk."""
        with explained(self.path, "read the project"):
            self._manifest = read_manifest(self.path)
            self._rows = read_table(self.path)
            self._sources: dict[str, Source] = {}
            self.notes = []
            for file in sorted((self.path / ANNOTATIONS).glob("[!.]*.json")):
                try:
                    self._sources[file.stem] = read_source(file)
                except FileError as error:
                    self.notes.append(str(error))

    # --- what it holds ---------------------------------------------------------------------------

    @property
    def classes(self) -> list[str]:
        """Names of the classes, by label."""
        return list(self._manifest.classes)

    @property
    def data(self) -> Path:
        """The data.yaml to train with."""
        return self.path / DATA

    @property
    def seed(self) -> int:
        """Of the split."""
        return self._manifest.seed

    @property
    def training_size(self) -> int:
        """The size for which images were added last; 0 if none was."""
        return self._manifest.training_size

    @property
    def rows(self) -> list[Row]:
        """Where each piece comes from."""
        return list(self._rows)

    def sources(self) -> dict[str, Source]:
        """All images with saved annotations, by id."""
        return dict(self._sources)

    def id_of(self, source: Source) -> str:
        """The id of an image in this project, found by its pixels, wherever its file lies."""
        if source.id in self._sources:
            return source.id
        for name, known in list(self._sources.items()):
            if (known.digest, known.plane) == (source.digest, source.plane):
                return name
        return source.id

    def earlier_of(self, source: Source) -> str:
        """The id of an image that lay in the same file and was as large, "" if there is none.

        It may be the same picture saved anew, or another one under the name of the last: only a
        person can tell. If it is the same, `Project.take_over` goes on with its annotations.
        """
        place = (source.path, source.plane, source.shape)
        for name, known in list(self._sources.items()):
            here = (known.path, known.plane, known.shape) == place
            if source.path is not None and here and known.digest != source.digest:
                return name
        return ""

    def side_of(self, source: Source) -> str:
        """ "train" or "val", "" if the image has not been added."""
        return self._manifest.split.get(self.id_of(source), "")

    def summary(self) -> dict[str, Any]:
        """Numbers: images, pieces and boxes (per class) of each side, and all in a sentence."""
        sides: dict[str, Any] = {}
        for side in (TRAIN, VAL):
            mine = [row for row in self._rows if row.split == side]
            counts = dict.fromkeys(self.classes, 0)
            for label, number in (pair.split(":") for row in mine for pair in row.counts.split()):
                if int(label) < len(self.classes):
                    counts[self.classes[int(label)]] += int(number)
            images = {row.source for row in mine}
            sides[side] = {"images": len(images), "pieces": len(mine), "boxes": counts}
        total = len({row.source for row in self._rows})
        boxes = sum(sum(part["boxes"].values()) for part in sides.values())
        sentence = (
            f"{count_of(total, 'image')} in {count_of(len(self._rows), 'piece')} with "
            f"{count_of(boxes, 'box', 'boxes')}; {len(self._sources)} annotated."
        )
        return {"images": total, "annotated": len(self._sources), **sides, "sentence": sentence}

    def split_notes(self) -> list[str]:
        """Sentences on which images validate, and where that is too little."""
        boxed = {row.source for row in self._rows if row.boxes}
        if self._rows and not boxed:
            return ["No image that was added has boxes, so there is nothing to learn from."]
        used = [side for name, side in self._manifest.split.items() if name in boxed]
        return describe(used, self._manifest.one)
