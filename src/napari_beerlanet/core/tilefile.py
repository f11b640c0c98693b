"""Files of a slide's detections, tile by tile: their format, where they are kept, what is in them.

Apart from `tilelog`, which needs torch: a viewer looks for such files when an image is chosen.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

SUFFIX = ".tiles"
"""What the name of such a file ends in."""

KIND, VERSION = "napari-beerlanet tiles", 1
TILE, ARRAYS = b"TILE", b"FITS"
"""Kinds of records."""

_FRAME = struct.Struct("<4sIQI")  # what, tile, bytes, checksum
_WORDS = {
    "model": "the model",
    "source": "the image's file",
    "shape": "the image's size",
    "object_size": "the size of cells",
    "tile": "the size of tiles",
    "pixel_size": "the pixel size",
    "iou": "the overlap",
}


def log_path(source: Path) -> Path:
    """Where to keep a slide's tiles: beside it, or in the user's cache if that cannot be written.

    A file that is there already is gone on with, wherever it is.
    """
    from platformdirs import user_cache_path

    beside = source.with_name(source.name + SUFFIX)
    digest = hashlib.sha256(os.path.abspath(source).encode("utf-8", "surrogateescape"))
    cache = user_cache_path("napari-beerlanet") / "tiles"
    cached = cache / f"{source.name}-{digest.hexdigest()[:12]}{SUFFIX}"
    if beside.exists() or cached.exists():
        return beside if beside.exists() else cached
    if os.access(source.parent, os.W_OK):
        return beside
    cache.mkdir(parents=True, exist_ok=True)
    return cached


def peek(path: Path) -> tuple[dict[str, Any], int] | None:
    """The header of a file and how many tiles are in it, None where there is no such file."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    header = header_of(content)
    if header is None:
        return None
    found = records(content, content.index(b"\n") + 1)
    return header, len({tile for what, tile, _, _ in found if what == TILE})


def changed_since(path: Path, identity: Mapping[str, Any]) -> list[str]:
    """In what the run that a file is of differs from one of this identity, in words."""
    before = peek(path)
    was = before[0].get("identity") if before else None
    if not isinstance(was, dict):
        return []
    now = json.loads(json.dumps(identity))
    return [word for key, word in _WORDS.items() if was.get(key) != now.get(key)]


def framed(what: bytes, tile: int, payload: bytes) -> bytes:
    """A record."""
    return _FRAME.pack(what, tile, len(payload), zlib.crc32(payload)) + payload


def records(content: bytes, begin: int) -> Iterator[tuple[bytes, int, bytes, int]]:
    """What, tile, payload and end of each record that is whole."""
    while begin + _FRAME.size <= len(content):
        what, tile, length, checksum = _FRAME.unpack_from(content, begin)
        end = begin + _FRAME.size + length
        payload = content[begin + _FRAME.size : end]
        if what not in (TILE, ARRAYS) or end > len(content) or zlib.crc32(payload) != checksum:
            return
        yield what, tile, payload, end
        begin = end


def header_of(content: bytes) -> dict[str, Any] | None:
    """The first line of a file's content, None where it is no such file."""
    first, line_end, _ = content.partition(b"\n")
    try:
        header = json.loads(first) if line_end else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        return None
    return header if header.get("version") == VERSION else None
