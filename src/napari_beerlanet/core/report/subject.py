"""What a report is about: an image, its detections and their review, and which of them count."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet._version import __version__
from napari_beerlanet.core.boxes.classes import ClassCounts, assign_colours, class_colours
from napari_beerlanet.core.boxes.detections import PROBABILITY_COLUMN, TYPE_COLUMN, Detections
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.evaluation.live import LiveEvaluation
from napari_beerlanet.core.stains.decomposition import Decomposition

Mask = npt.NDArray[np.bool_]

_ACCEPTED_STATUSES = (
    "accepted",
    "edited",
    "added",
    "drawn",
    "corrected",
    "confirmed",
    "classified",
)
_REJECTED_STATUSES = ("rejected",)
_REPORTED_LIBRARIES = ("numpy", "torch", "ultralytics", "napari")


@dataclass(frozen=True, eq=False)
class ReportSubject:
    """One image and everything known about it.

    `pixels` (H, W, 3 or 4) may be lazy, where `picture` is a small copy of it to draw boxes in.
    `detections` with all their candidates; a column "status" holds a review's decision on each.
    `confidence` is the threshold, or one by class name. `colours` are "#rrggbb" by class, and
    `type_colours` those of cell types by name; those of the classifier where there are none.
    `model` and `classifier` are the `info` of checkpoints, `hashes` digests by what they are of,
    `settings` and `facts` further values by name. `evaluation` must be of the same candidates,
    `iou` is the minimum overlap of a match. `record` is for programs: what the report was made
    from.
    """

    name: str
    pixels: Any = field(repr=False)
    detections: Detections = field(repr=False)
    confidence: float | Mapping[str, float] = DetectSettings.default("confidence")
    colours: Sequence[str] | None = None
    type_colours: Mapping[str, str] = field(default_factory=dict, repr=False)
    decomposition: Decomposition | None = field(default=None, repr=False)
    evaluation: LiveEvaluation | None = field(default=None, repr=False)
    iou: float = 0.5
    model: Mapping[str, Any] = field(default_factory=dict, repr=False)
    classifier: Mapping[str, Any] = field(default_factory=dict, repr=False)
    hashes: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    facts: Mapping[str, object] = field(default_factory=dict)
    notes: Sequence[str] = ()
    picture: npt.NDArray[Any] | None = field(default=None, repr=False)
    record: Mapping[str, Any] = field(default_factory=dict, repr=False)
    date: datetime = field(default_factory=lambda: datetime.now().astimezone())

    @cached_property
    def candidates(self) -> Detections:
        """All candidates."""
        return self.detections if self.detections.candidates is None else self.detections.candidates

    @cached_property
    def class_shades(self) -> list[str]:
        """A colour for each class."""
        names = self.candidates.names
        given = list(self.colours or ())[: len(names)]
        return given + class_colours(len(names))[len(given) :]

    def colour_of(self, name: str) -> str:
        """A class's colour, grey for one that only the annotations have."""
        names = self.candidates.names
        return self.class_shades[names.index(name)] if name in names else "#7f7f7f"

    @cached_property
    def status(self) -> npt.NDArray[Any] | None:
        """(n,) what a review said, None without one."""
        said = self.candidates.columns.get("status")
        return None if said is None else np.asarray(said, str)

    @cached_property
    def accepted(self) -> Mask:
        """(n,) what a reviewer has accepted, or added."""
        none = np.zeros(len(self.candidates), bool)
        return none if self.status is None else np.isin(self.status, _ACCEPTED_STATUSES)

    @cached_property
    def rejected(self) -> Mask:
        """(n,) what a reviewer has rejected."""
        none = np.zeros(len(self.candidates), bool)
        return none if self.status is None else np.isin(self.status, _REJECTED_STATUSES)

    @cached_property
    def above_threshold(self) -> Mask:
        """(n,) what the threshold lets through."""
        return self.candidates.is_above(self.confidence)

    @cached_property
    def counted(self) -> Mask:
        """(n,) what counts: above the threshold or accepted, and not rejected."""
        return (self.above_threshold | self.accepted) & ~self.rejected

    @cached_property
    def counted_detections(self) -> Detections:
        """The detections that count."""
        return self.candidates[self.counted]

    @cached_property
    def class_counts(self) -> ClassCounts:
        """Of what counts, by class and by type."""
        return ClassCounts.of(self.counted_detections)

    @cached_property
    def types(self) -> npt.NDArray[Any]:
        """(n,) the type of each detection that counts, "" where it has none."""
        counted = self.counted_detections
        return np.asarray(counted.columns.get(TYPE_COLUMN, [""] * len(counted)), str)

    @cached_property
    def type_shades(self) -> dict[str, str]:
        """A colour for each type: the one that was given, or the classifier's, if it has one."""
        info = self.classifier
        own = dict(zip(info.get("classes") or (), info.get("colours") or (), strict=False))
        return assign_colours(self.counted_detections.types, self.type_colours, own)

    def certainty(self, types: Sequence[str]) -> npt.NDArray[np.float64]:
        """(n,) the probability that a counted one has one of these types.

        Where only that of its own type is known, that; a type that a person has given is certain.
        """
        columns = self.counted_detections.columns
        own = columns.get(PROBABILITY_COLUMN, np.ones(len(self.types)))
        each = [columns[f"P({name})"] for name in types if f"P({name})" in columns]
        summed = np.sum(each, axis=0) if len(each) == len(types) else own
        return np.nan_to_num(np.asarray(summed, np.float64), nan=1.0)

    @property
    def reviewed(self) -> bool:
        """Whether anything was decided on."""
        return bool(self.accepted.any() or self.rejected.any())

    @cached_property
    def review_progress(self) -> tuple[int, int]:
        """How many are decided on, of all above the threshold and all decided on."""
        decided = self.accepted | self.rejected
        return int(decided.sum()), int((self.above_threshold | decided).sum())

    @property
    def area_mm2(self) -> float | None:
        """Of the whole image, None where its pixel size is not known."""
        size = self.candidates.pixel_size
        height, width = self.pixels.shape[:2]
        return height * size[0] * width * size[1] / 1e6 if size else None

    def threshold_of(self, name: str) -> float | None:
        """The threshold of a class, None where it has none."""
        if isinstance(self.confidence, Mapping):
            return self.confidence.get(name)
        return self.confidence

    def threshold_text(self) -> str:
        """The threshold, or those of the classes."""
        if isinstance(self.confidence, Mapping):
            return ", ".join(f"{name} {value:.2f}" for name, value in self.confidence.items())
        return f"{self.confidence:.2f}"


def software_versions() -> dict[str, str]:
    """What the numbers come from: this program, Python, and the libraries that count."""
    versions = {"napari-beerlanet": __version__, "Python": platform.python_version()}
    for name in _REPORTED_LIBRARIES:
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions | {"system": f"{platform.system()} {platform.machine()}"}
