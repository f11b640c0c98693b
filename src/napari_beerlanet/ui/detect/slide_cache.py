"""Where the tile results of a slide search are cached.

Beside the slide's file or in a cache folder; for an image without a file, in this session only.
"""

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

from napari_beerlanet.core.common.storage import file_stamp
from napari_beerlanet.core.detection.tile_store import SUFFIX, read_summary, tile_store_path
from napari_beerlanet.ui.viewer.planes import Plane, layer_path


@dataclass(frozen=True)
class SlideCacheEntry:
    """The image's own file, the file of its tile results, and which image these are of."""

    path: Path | None
    results: Path
    source: dict[str, Any]


@dataclass(frozen=True)
class PreviousSearch:
    """An earlier search: `done` of `total` tiles, with the model of this name."""

    done: int
    total: int
    model: str

    @property
    def finished(self) -> bool:
        """Whether all tiles were searched."""
        return self.done >= self.total


class SlideCache:
    """Tile result files of image layers; those of images without a file end with the session."""

    def __init__(self) -> None:
        self._folder: Path | None = None
        self._tokens: weakref.WeakKeyDictionary[Image, tuple[Sequence[Any], str]]
        self._tokens = weakref.WeakKeyDictionary()

    def entry(self, layer: Image, plane: Plane) -> SlideCacheEntry:
        """Where the tile results of a plane are stored."""
        path = layer_path(layer)
        suffix = "-".join(map(str, plane.index))
        if path is None:
            token = self._token(layer, plane)
            if self._folder is None:
                self._folder = Path(tempfile.mkdtemp("-beerlanet"))
                weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)
            results = self._folder / f"{token}-{suffix}{SUFFIX}"
            return SlideCacheEntry(None, results, {"session": token, "index": list(plane.index)})
        named = path.with_name(f"{path.name}-{suffix}") if suffix else path
        # Not the path: the file may be moved with its folder.
        facts = {k: v for k, v in file_stamp(path).items() if k != "path"}
        source = {"name": path.name, **facts, "index": list(plane.index)}
        return SlideCacheEntry(path, tile_store_path(named), source)

    def _token(self, layer: Image, plane: Plane) -> str:
        """An identifier that stays as long as the layer has the same arrays."""
        levels, token = self._tokens.get(layer, ((), ""))
        same = len(levels) == len(plane.levels)
        if not same or any(a is not b for a, b in zip(levels, plane.levels, strict=True)):
            token = uuid.uuid4().hex
            self._tokens[layer] = plane.levels, token
        return token


def read_previous_search(entry: SlideCacheEntry) -> PreviousSearch | None:
    """The earlier search, None if there is none. Reads a file: not for the GUI thread."""
    summary = read_summary(entry.results)
    if summary is None:
        return None
    header, done = summary
    source = header.get("identity", {}).get("source", {})
    if not isinstance(header.get("wanted"), int) or source != entry.source:
        return None
    return PreviousSearch(done, header["wanted"], str(header.get("name", "")))
