"""What decides a study's numbers, checked before the first image costs time."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from typing import Any, Literal

from .manifest import settings_hash

KINDS = ("csv", "geojson", "coco", "voc")
"""Formats of detections."""

Number = float | Literal["auto"]

_NUMBERS = ("lam", "gamma", "confidence", "iou", "object_size", "pixel_size", "spectra")


@dataclass(frozen=True)
class StudySettings:
    """What is done with each image of a study, and how.

    `model` is a packaged model's name, a checkpoint's path, or "" to find no objects;
    `model_sha256` is filled in by `run_study`. `decompose`: take stains apart; `measure`: how much
    stain is in each object; `reports`: an HTML file on each image, where there is a model.
    `components` may be "auto": λ and γ then act on as many stains as are counted on auto.
    `spectra` (3, r) are a start. The rest is as for `decompose_slide`, `SlideDetection` and
    `Detector.detect`.
    """

    model: str = ""
    model_sha256: str = ""
    decompose: bool = True
    measure: bool = True
    reports: bool = True
    components: int | Literal["auto"] = 8
    iterations: int | Literal["converge"] = "converge"
    lam: Number = "auto"
    gamma: Number = "auto"
    spectra: tuple[tuple[float, ...], ...] | None = None
    leave_out: tuple[str, ...] = ("pen", "border")
    confidence: float = 0.25
    iou: float = 0.7
    object_size: Number = "auto"
    tile: int | Literal["auto"] = "auto"
    pixel_size: float | None = None
    skip_glass: bool = True
    formats: tuple[str, ...] = ("csv", "geojson")
    previews: bool = True
    device: str = "auto"

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> StudySettings:
        """From a dict, for instance of a file; what is unknown or wrong is a `ValueError`."""
        names = [f.name for f in fields(cls)]
        unknown = [name for name in given if name not in names]
        if unknown:
            raise ValueError(f"Unknown setting {unknown[0]!r}; known are {', '.join(names)}.")
        settings = cls(**{name: _plain(name, value) for name, value in given.items()})
        settings._check()
        return settings

    def hash(self) -> str:
        """Of all that changes results; where the model lies and what runs it does not."""
        decides = {k: v for k, v in asdict(self).items() if k not in ("model", "device")}
        return settings_hash(decides)

    def _check(self) -> None:
        """What would fail with every image is told at once."""
        wrong = [kind for kind in self.formats if kind not in KINDS]
        if wrong:
            raise ValueError(f"formats are {', '.join(KINDS)}, not {wrong[0]!r}.")
        if not self.model and not self.decompose:
            raise ValueError("There is nothing to do: name a model, or have images decomposed.")
        for name, word in (("iterations", "converge"), ("components", "auto"), ("tile", "auto")):
            value = getattr(self, name)
            if value != word and not (type(value) is int and value > 0):
                raise ValueError(f'{name} is "{word}" or a whole number, not {value!r}.')
        for name in ("lam", "gamma", "object_size"):
            value = getattr(self, name)
            if value != "auto" and not (_is_number(value) and value >= 0):
                raise ValueError(f'{name} is "auto" or a number of at least 0, not {value!r}.')
        for name in ("confidence", "iou"):
            value = getattr(self, name)
            if not (_is_number(value) and 0 <= value <= 1):
                raise ValueError(f"{name} is a number from 0 to 1, not {value!r}.")
        for name in ("model", "device"):
            if not isinstance(getattr(self, name), str):
                raise ValueError(f"{name} is a text, not {getattr(self, name)!r}.")
        self._check_spectra()

    def _check_spectra(self) -> None:
        rows = self.spectra
        if rows is None:
            return
        good = isinstance(rows, tuple) and all(isinstance(row, tuple) and row for row in rows)
        if not good or len(rows) != 3 or len({len(row) for row in rows}) != 1:
            raise ValueError("spectra are three lists, for red, green and blue, of equal length.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _plain(name: str, value: Any) -> Any:
    """A value as a file has it: lists as tuples, and 1e-5, which is a text in YAML, as a number."""
    if isinstance(value, (list, tuple)):
        return tuple(_plain(name, one) for one in value)
    if name in _NUMBERS and isinstance(value, str):
        with suppress(ValueError):
            return float(value)
    return value
