"""What a report is about, and what of it counts after thresholds and review."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet import __version__

from .boxes import Detections
from .colours import class_colours
from .decomposition import Decomposition
from .quality import Quality

Mask = npt.NDArray[np.bool_]

_GOOD = ("accepted", "edited", "added", "drawn", "corrected", "confirmed")
_BAD = ("rejected",)
_OTHERS = ("numpy", "torch", "ultralytics", "napari")


@dataclass(frozen=True, eq=False)
class Subject:
    """One image and everything known about it.

    `pixels` (H, W, 3 or 4) may be lazy, where `picture` is a small copy of it to draw boxes in.
    `found` with all its candidates; a column "status" holds what a review said of each.
    `confidence` is the threshold, or one by class name. `colours` are "#rrggbb" by class.
    `model` is the checkpoint's `info`, `hashes` are digests by what they are of, `settings` and
    `facts` further things to tell by name. `quality` must be about the same candidates.
    """

    name: str
    pixels: Any = field(repr=False)
    found: Detections = field(repr=False)
    confidence: float | Mapping[str, float] = 0.25
    colours: Sequence[str] | None = None
    decomposition: Decomposition | None = field(default=None, repr=False)
    quality: Quality | None = field(default=None, repr=False)
    level: float = 0.5
    model: Mapping[str, Any] = field(default_factory=dict, repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()
    picture: npt.NDArray[Any] | None = field(default=None, repr=False)
    date: datetime = field(default_factory=lambda: datetime.now().astimezone())

    @cached_property
    def everything(self) -> Detections:
        """All candidates."""
        return self.found if self.found.candidates is None else self.found.candidates

    @cached_property
    def shades(self) -> list[str]:
        """A colour for each class."""
        names = self.everything.names
        given = list(self.colours or ())[: len(names)]
        return given + class_colours(len(names))[len(given) :]

    def shade(self, name: str) -> str:
        """A class's colour, grey for one that only the annotations have."""
        names = self.everything.names
        return self.shades[names.index(name)] if name in names else "#7f7f7f"

    @cached_property
    def status(self) -> npt.NDArray[Any] | None:
        """(n,) what a review said, None without one."""
        said = self.everything.columns.get("status")
        return None if said is None else np.asarray(said, str)

    @cached_property
    def accepted(self) -> Mask:
        """(n,) what a person has found right, or made."""
        none = np.zeros(len(self.everything), bool)
        return none if self.status is None else np.isin(self.status, _GOOD)

    @cached_property
    def rejected(self) -> Mask:
        """(n,) what a person has found wrong."""
        none = np.zeros(len(self.everything), bool)
        return none if self.status is None else np.isin(self.status, _BAD)

    @cached_property
    def above(self) -> Mask:
        """(n,) what the threshold lets through."""
        everything = self.everything
        if isinstance(self.confidence, Mapping):
            least = [self.confidence.get(name, np.inf) for name in everything.names]
            return np.asarray(everything.scores >= np.array(least, np.float32)[everything.labels])
        return np.asarray(everything.scores >= np.float32(self.confidence))

    @cached_property
    def counted(self) -> Mask:
        """(n,) what counts: above the threshold or accepted, and not rejected."""
        return (self.above | self.accepted) & ~self.rejected

    @cached_property
    def shown(self) -> Detections:
        """The detections that count."""
        return self.everything[self.counted]

    @property
    def reviewed(self) -> bool:
        """Whether anything was decided on."""
        return bool(self.accepted.any() or self.rejected.any())

    def threshold_words(self) -> str:
        """The threshold, or those of the classes."""
        if isinstance(self.confidence, Mapping):
            return ", ".join(f"{name} {value:.2f}" for name, value in self.confidence.items())
        return f"{self.confidence:.2f}"


def versions() -> dict[str, str]:
    """What the numbers come from: this program, Python, and the libraries that count."""
    told = {"napari-beerlanet": __version__, "Python": platform.python_version()}
    for name in _OTHERS:
        try:
            told[name] = version(name)
        except PackageNotFoundError:
            continue
    return told | {"system": f"{platform.system()} {platform.machine()}"}


def pixels_hash(pixels: npt.NDArray[Any]) -> str:
    """SHA-256 over shape, type and values of an image."""
    total = hashlib.sha256(f"{pixels.shape} {pixels.dtype}".encode())
    for row in range(0, len(pixels), 256):
        total.update(np.ascontiguousarray(pixels[row : row + 256]).tobytes())
    return total.hexdigest()
