"""Detections of a slide's tiles in a file that is added to as they come.

A line of JSON that says what they are of, then records, each with its length and a checksum. After
a kill or a full disk at any moment, every record before the last is there, and the torn one is cut
off by the next run.
"""

from __future__ import annotations

import io
import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .columns import MapChain
from .files import FileError, atomic_path
from .runner import Found
from .stainfit import StainFit

_KIND, _VERSION = "napari-beerlanet tiles", 1
_FRAME = struct.Struct("<4sIQI")  # what, tile, bytes, checksum
_TILE, _ARRAYS = b"TILE", b"FITS"
_ROW = np.dtype([("xyxy", "<f4", 4), ("label", "<i4"), ("score", "<f4")])

_WORDS = {
    "model": "the model",
    "source": "the image's file",
    "shape": "the image's size",
    "object_size": "the size of cells",
    "tile": "the size of tiles",
    "pixel_size": "the pixel size",
    "iou": "the overlap",
}

Arrays = dict[str, npt.NDArray[Any]]


class TileLog:
    """A file of tiles' detections that is open for adding; `header` and `arrays` stand first."""

    def __init__(self, path: Path, header: dict[str, Any], arrays: Arrays) -> None:
        self.path, self.header, self.arrays = path, header, arrays
        self.tiles: dict[int, Found] = {}
        self._file: IO[bytes] | None = None

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], arrays: Arrays) -> TileLog:
        """Begin a file; one that is there is replaced."""
        content = {"kind": _KIND, "version": _VERSION, **header}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        with atomic_path(path) as unfinished, unfinished.open("wb") as file:
            file.write(json.dumps(content).encode() + b"\n")
            file.write(_framed(_ARRAYS, 0, buffer.getvalue()))
        log = cls(path, content, arrays)
        log._file = path.open("ab")
        return log

    @classmethod
    def resume(cls, path: Path, identity: Mapping[str, Any]) -> TileLog | None:
        """Go on with a file of this identity; None where there is none."""
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise FileError(f"{path}: {(error.strerror or str(error)).lower()}.") from error
        header = _header(content)
        if header is None or header.get("identity") != json.loads(json.dumps(identity)):
            return None
        end = content.index(b"\n") + 1
        log = cls(path, header, {})
        for what, tile, payload, behind in _records(content, end):
            end = behind
            if what == _ARRAYS:
                with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
                    log.arrays = dict(stored)
            else:
                log.tiles[tile] = _found(payload)
        if not log.arrays:
            return None
        log._file = path.open("r+b")
        log._file.truncate(end)
        log._file.seek(end)
        return log

    @staticmethod
    def peek(path: Path) -> tuple[dict[str, Any], int] | None:
        """The header of a file and how many tiles are in it, None where there is no such file."""
        try:
            content = path.read_bytes()
        except OSError:
            return None
        header = _header(content)
        if header is None:
            return None
        records = _records(content, content.index(b"\n") + 1)
        return header, len({tile for what, tile, _, _ in records if what == _TILE})

    def add(self, tile: int, found: Found) -> None:
        """Write what is in a tile; when this returns, a kill does not lose it."""
        self.tiles[tile] = found
        if self._file is not None:
            rows = np.empty(len(found), _ROW)
            rows["xyxy"], rows["label"], rows["score"] = found.xyxy, found.labels, found.scores
            self._file.write(_framed(_TILE, tile, rows.tobytes()))
            self._file.flush()

    def close(self) -> None:
        """To the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def changed_since(path: Path, identity: Mapping[str, Any]) -> list[str]:
    """In what the run that a file is of differs from one of this identity, in words."""
    before = TileLog.peek(path)
    was = before[0].get("identity") if before else None
    if not isinstance(was, dict):
        return []
    now = json.loads(json.dumps(identity))
    return [word for key, word in _WORDS.items() if was.get(key) != now.get(key)]


def _framed(what: bytes, tile: int, payload: bytes) -> bytes:
    return _FRAME.pack(what, tile, len(payload), zlib.crc32(payload)) + payload


def _records(content: bytes, begin: int) -> Iterator[tuple[bytes, int, bytes, int]]:
    """What, tile, payload and end of each record that is whole."""
    while begin + _FRAME.size <= len(content):
        what, tile, length, checksum = _FRAME.unpack_from(content, begin)
        end = begin + _FRAME.size + length
        payload = content[begin + _FRAME.size : end]
        if what not in (_TILE, _ARRAYS) or end > len(content) or zlib.crc32(payload) != checksum:
            return
        yield what, tile, payload, end
        begin = end


def _header(content: bytes) -> dict[str, Any] | None:
    first, line_end, _ = content.partition(b"\n")
    try:
        header = json.loads(first) if line_end else None
    except (ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("kind") != _KIND:
        return None
    return header if header.get("version") == _VERSION else None


def _found(payload: bytes) -> Found:
    rows = np.frombuffer(payload, _ROW)
    return Found(rows["xyxy"].copy(), rows["label"].astype(np.int64), rows["score"].copy())


def arrays_of(fit: StainFit) -> Arrays:
    """A fit as plain arrays."""
    arrays = {"background": fit.background, "spectra": fit.spectra, "scale": fit.densities.scale}
    for k, step in enumerate(fit.densities.maps):
        arrays |= {f"{name}{k}": np.asarray(part) for name, part in zip("MNb", step, strict=True)}
    return {**arrays, "domain": np.array(fit.domain), "codes": fit.codes, "known": fit.known}


def fit_of(arrays: Arrays) -> StainFit:
    """The fit that `arrays_of` took apart."""
    count = sum(name.startswith("M") for name in arrays)
    maps = [(arrays[f"M{k}"], arrays[f"N{k}"], arrays[f"b{k}"]) for k in range(count)]
    chain = MapChain(maps, arrays["scale"])
    domain: Any = str(arrays["domain"])
    known = arrays["codes"], arrays["known"]
    return StainFit(arrays["background"], arrays["spectra"], chain, domain, *known)
