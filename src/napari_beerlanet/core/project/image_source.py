"""The identity of an annotated image: its name, path, plane and a hash of its pixels."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from pydantic import TypeAdapter

from napari_beerlanet.core.common.messages import slug
from napari_beerlanet.core.common.storage import pixel_digest


@dataclass(frozen=True)
class ImageSource:
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
    def from_image(
        cls,
        rgb: Any,
        name: str,
        path: str | os.PathLike[str] | None = None,
        pixel_size: Sequence[float] | None = None,
        plane: Sequence[int] = (),
    ) -> ImageSource:
        """For an image (H, W, 3 or 4), also a lazy one."""
        return cls(
            name,
            pixel_digest(rgb),
            (int(rgb.shape[0]), int(rgb.shape[1])),
            None if path is None else os.path.abspath(path),
            None if pixel_size is None else (float(pixel_size[0]), float(pixel_size[1])),
            tuple(int(k) for k in plane),
        )

    @classmethod
    def from_json(cls, content: Any) -> ImageSource:
        """From the content of a JSON file; a `ValueError` where it is something else."""
        return _ADAPTER.validate_python(content)

    @property
    def id(self) -> str:
        """A name for files: readable, plain ASCII, and another one for every other image."""
        what = f"{self.digest}\0{','.join(map(str, self.plane))}"
        readable = slug(PurePath(self.name).stem or self.name)
        return f"{readable}-{hashlib.sha256(what.encode()).hexdigest()[:10]}"


_ADAPTER = TypeAdapter(ImageSource)
