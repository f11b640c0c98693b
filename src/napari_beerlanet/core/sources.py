"""Which image it is that is annotated: its name, its place and a digest of its pixels."""

from __future__ import annotations

import hashlib
import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np

_HASHED = 1 << 28  # bytes up to which all of an image is hashed; of a larger one, a sample
_SAMPLES, _PATCH = 8, 256


@dataclass(frozen=True)
class Source:
    """An image that is annotated: what it is called, where it lies and what it is.

    `digest` is of its pixels, `shape` (H, W), `pixel_size` (y, x) in micrometres, `plane` the
    place in a stack. The same pixels are the same source, wherever the file lies.
    """

    name: str
    digest: str
    shape: tuple[int, int]
    path: str | None = None
    pixel_size: tuple[float, float] | None = None
    plane: tuple[int, ...] = ()

    @classmethod
    def of(
        cls,
        rgb: Any,
        name: str,
        path: str | os.PathLike[str] | None = None,
        pixel_size: Sequence[float] | None = None,
        plane: Sequence[int] = (),
    ) -> Source:
        """For an image (H, W, 3 or 4), also a lazy one."""
        return cls(
            name,
            content_digest(rgb),
            (int(rgb.shape[0]), int(rgb.shape[1])),
            None if path is None else os.path.abspath(path),
            None if pixel_size is None else (float(pixel_size[0]), float(pixel_size[1])),
            tuple(int(k) for k in plane),
        )

    @property
    def id(self) -> str:
        """A name for files: readable, plain ASCII, and another one for every other image."""
        what = f"{self.digest}\0{','.join(map(str, self.plane))}"
        readable = slug(PurePath(self.name).stem or self.name)
        return f"{readable}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"

    @classmethod
    def read(cls, content: Any) -> Source:
        """From JSON."""
        size = content.get("pixel_size")
        return cls(
            str(content["name"]),
            str(content["digest"]),
            (int(content["shape"][0]), int(content["shape"][1])),
            content.get("path"),
            None if size is None else (float(size[0]), float(size[1])),
            tuple(int(k) for k in content.get("plane", ())),
        )


def slug(name: str) -> str:
    """A name's letters and digits in plain ASCII, at most 40 of them."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore")
    return re.sub(r"[^A-Za-z0-9]+", "-", plain.decode()).strip("-")[:40].strip("-") or "image"


def content_digest(rgb: Any) -> str:
    """SHA-256 of an image's shape, type and values; of a very large one, of patches all over it."""
    shape, dtype = tuple(int(n) for n in rgb.shape), np.dtype(rgb.dtype)
    total = hashlib.sha256(f"{shape} {dtype}".encode())
    if int(np.prod(shape)) * dtype.itemsize <= _HASHED:
        total.update(np.ascontiguousarray(np.asarray(rgb)).data)
        return f"sha256:{total.hexdigest()}"
    for y in np.linspace(0, max(shape[0] - _PATCH, 0), _SAMPLES).astype(int):
        for x in np.linspace(0, max(shape[1] - _PATCH, 0), _SAMPLES).astype(int):
            patch = np.asarray(rgb[y : y + _PATCH, x : x + _PATCH])
            total.update(np.ascontiguousarray(patch).data)
    return f"sampled-sha256:{total.hexdigest()}"
