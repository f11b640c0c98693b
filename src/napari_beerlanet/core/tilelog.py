"""Detections of a slide's tiles in a file that is added to as they come.

A line of JSON that says what they are of, then records, each with its length and a checksum. After
a kill or a full disk at any moment, every record before the last is there, and the torn one is cut
off by the next run.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from .columns import MapChain
from .files import FileError, atomic_path
from .locks import is_locked, try_lock
from .runner import Found
from .stainfit import StainFit
from .tilefile import ARRAYS, KIND, TILE, VERSION, framed, header_of, records

_ROW = np.dtype([("xyxy", "<f4", 4), ("label", "<i4"), ("score", "<f4")])

Arrays = dict[str, npt.NDArray[Any]]


class TileLog:
    """A file of tiles' detections that is open for adding; `header` and `arrays` stand first."""

    def __init__(self, path: Path, header: dict[str, Any], arrays: Arrays) -> None:
        self.path, self.header, self.arrays = path, header, arrays
        self.tiles: dict[int, Found] = {}
        self._file: IO[bytes] | None = None

    @classmethod
    def create(cls, path: Path, header: Mapping[str, Any], arrays: Arrays) -> TileLog:
        """Begin a file; one that is there is replaced, unless another search writes to it."""
        if is_locked(path):
            raise FileError(_taken(path))
        content = {"kind": KIND, "version": VERSION, **header}
        buffer = io.BytesIO()
        np.savez(buffer, allow_pickle=False, **arrays)
        with atomic_path(path) as unfinished, unfinished.open("wb") as file:
            file.write(json.dumps(content).encode() + b"\n")
            file.write(framed(ARRAYS, 0, buffer.getvalue()))
        log = cls(path, content, arrays)
        log._file = _held(path, "ab")
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
        header = header_of(content)
        if header is None or header.get("identity") != json.loads(json.dumps(identity)):
            return None
        end = content.index(b"\n") + 1
        log = cls(path, header, {})
        for what, tile, payload, behind in records(content, end):
            end = behind
            if what == ARRAYS:
                with np.load(io.BytesIO(payload), allow_pickle=False) as stored:
                    log.arrays = dict(stored)
            else:
                log.tiles[tile] = _found(payload)
        if not log.arrays:
            return None
        log._file = _held(path, "r+b")
        log._file.truncate(end)
        log._file.seek(end)
        return log

    def add(self, tile: int, found: Found) -> None:
        """Write what is in a tile; when this returns, a kill does not lose it."""
        self.tiles[tile] = found
        if self._file is not None:
            rows = np.empty(len(found), _ROW)
            rows["xyxy"], rows["label"], rows["score"] = found.xyxy, found.labels, found.scores
            self._file.write(framed(TILE, tile, rows.tobytes()))
            self._file.flush()

    def close(self) -> None:
        """To the disk."""
        if self._file is not None:
            self._file.flush()
            os.fsync(self._file.fileno())
            self._file.close()
            self._file = None


def _held(path: Path, mode: str) -> IO[bytes]:
    """The file, open, and locked as long as it is, where the system knows locks."""
    file: IO[Any] = path.open(mode)
    if try_lock(file) == "taken":
        file.close()
        raise FileError(_taken(path))
    return file


def _taken(path: Path) -> str:
    return f"{path}: another search writes to it; stop that one, or wait until it is done."


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
