"""Where a slide's search is kept: beside its file or in a cache, else for this session."""

from __future__ import annotations

import shutil
import tempfile
import uuid
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from napari.layers import Image

from napari_beerlanet.core.stamps import stamp
from napari_beerlanet.core.tilefile import SUFFIX, log_path, peek
from napari_beerlanet.ui.planes import Plane


@dataclass(frozen=True)
class Kept:
    """The image's own file, the file of its tiles, and which image those are of."""

    path: Path | None
    results: Path
    source: dict[str, Any]


@dataclass(frozen=True)
class Earlier:
    """A search that was begun: `done` of `total` tiles, by the model of this name."""

    done: int
    total: int
    model: str

    @property
    def finished(self) -> bool:
        """Whether nothing is left to do."""
        return self.done >= self.total


class SlideResults:
    """Files of tiles for image layers; those of images without a file end with the session."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._tokens: weakref.WeakKeyDictionary[Image, tuple[Sequence[Any], str]]
        self._tokens = weakref.WeakKeyDictionary()

    def of(self, layer: Image, plane: Plane) -> Kept:
        """Where the search of a plane is kept."""
        path = file_of(layer)
        place = "-".join(map(str, plane.index))
        if path is None:
            token = self._token(layer, plane)
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp("-beerlanet"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            results = self._folder / f"{token}-{place}{SUFFIX}"
            return Kept(None, results, {"session": token, "index": list(plane.index)})
        named = path.with_name(f"{path.name}-{place}") if place else path
        facts = {k: v for k, v in stamp(path).items() if k != "path"}  # it may move with its folder
        source = {"name": path.name, **facts, "index": list(plane.index)}
        return Kept(path, log_path(named), source)

    def _token(self, layer: Image, plane: Plane) -> str:
        """The same as long as the layer has the same arrays."""
        levels, token = self._tokens.get(layer, ((), ""))
        same = len(levels) == len(plane.levels)
        if not same or any(a is not b for a, b in zip(levels, plane.levels, strict=True)):
            token = uuid.uuid4().hex
            self._tokens[layer] = plane.levels, token
        return token


def file_of(layer: Image) -> Path | None:
    """The file or folder that a layer was read from, if it is there."""
    made = layer.metadata.get("path") if isinstance(layer.metadata, dict) else None
    for known in (layer.source.path, made):
        if isinstance(known, (str, Path)) and Path(known).exists():
            return Path(known)
    return None


def earlier(kept: Kept) -> Earlier | None:
    """What was done before, None where nothing was. Reads the file: not for the GUI thread."""
    found = peek(kept.results)
    if found is None:
        return None
    header, done = found
    of = header.get("identity", {}).get("source", {})
    if not isinstance(header.get("wanted"), int) or of != kept.source:
        return None
    return Earlier(done, header["wanted"], str(header.get("name", "")))
