"""Settings of a study, checked before the first image; as a file and as a command line."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from napari_beerlanet.core.classification.settings import StainSource
from napari_beerlanet.core.common.storage import settings_hash, write_json
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.images.tissue import NonTissue
from napari_beerlanet.core.stains.settings import DecomposeSettings

STUDY_FILE = "study.json"
"""Its name in the results folder."""

DetectionFormat = Literal["csv", "geojson", "coco", "voc", "yolo", "types"]
DensityFormat = Literal["none", "ome-tiff", "zarr"]
ImageFormat = Literal["ome-tiff", "png"]

_FILE_NAMES = {"densities": "measure"}  # settings that are called otherwise in files
_TEXT_FIELDS = (
    *("model", "model_sha256", "device", "stain_names"),
    *("detections_file", "annotations_file", "report_file"),
    *("classifier", "classifier_sha256", "classify_only"),
    *("normalizer", "normalizer_sha256"),
)
_NOT_HASHED = ("model", "device")  # where the model lies and what runs it change no result
_NEVER_HASHED = (*_NOT_HASHED, "openvino", "batch", "classifier", "normalizer")
_ALWAYS_HASHED = (
    *("model_sha256", "decompose", "measure", "reports", "components", "iterations", "lam"),
    *("gamma", "spectra", "leave_out", "confidence", "iou", "object_size", "tile", "pixel_size"),
    *("skip_glass", "formats", "previews"),
)


class StudySettings(DecomposeSettings, DetectSettings):
    """What is done with each image of a study, and how.

    `model_sha256`, `classifier_sha256` and `normalizer_sha256` are filled in by `run_study`. In
    files, `densities` is called `measure`.
    """

    model: str = Field(
        "", description="Packaged model's name, or path of a checkpoint; detects objects."
    )
    model_sha256: str = ""
    classifier: str = Field(
        "", description="Packaged classifier's name, or path of a checkpoint; names cell types."
    )
    classifier_sha256: str = ""
    classify_only: tuple[str, ...] = Field(
        (), description="Classes whose cells are classified, if not those the classifier is for."
    )
    classify_fit: StainSource | None = Field(
        None, description="Where the classifier's stains are fitted, if not as in its training."
    )
    normalizer: str = Field(
        "", description="Saved normalizer; writes each image in the colours of its template."
    )
    normalizer_sha256: str = ""
    normalized_format: ImageFormat = Field(
        "ome-tiff", description="File format of the normalized images."
    )
    decompose: bool = Field(True, description="Decompose the stains of each image.")
    reports: bool = Field(True, description="Write an HTML report on each image.")
    previews: bool = Field(
        True, description="Save pictures: a preview of the stains, an overlay of the boxes."
    )
    density_maps: DensityFormat = Field(
        "none", description="Write the stain densities of every pixel in this format."
    )
    leave_out: tuple[NonTissue, ...] = Field(
        ("pen", "border"), description="Non-tissue that the stain fit shall not see."
    )
    formats: tuple[DetectionFormat, ...] = Field(
        ("csv", "geojson"), description="File formats of the detections."
    )
    device: str = Field("auto", description="Where to compute: auto, cpu, cuda:0, mps.")
    detections_file: str = Field(
        "", description="File of detections, reviewed or not, to take instead of a model's."
    )
    annotations_file: str = Field("", description="File of annotations to compare detections with.")
    match_iou: float = Field(
        0.5, gt=0, le=1, description="Minimum IoU of a detection with its annotation."
    )
    report_file: str = Field("", description="Name of the report, if not that of the image.")
    one_page: bool = Field(
        False,
        description="Write reports of one page on infected red cells, as a laboratory files them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file_values(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values as files have them: lists as tuples, and 1e-5, which is a text in YAML."""
        names = {old: new for new, old in _FILE_NAMES.items()}
        return {names.get(name, name): _from_file(name, value) for name, value in given.items()}

    @model_validator(mode="after")
    def _check_there_is_work(self) -> StudySettings:
        if not (self.has_objects or self.decompose or self.normalizer):
            raise ValueError("There is nothing to do: choose a model, or decompose the images.")
        if self.classifier and not self.has_objects:
            raise ValueError("A classifier needs cells: choose a model that detects them, too.")
        return self

    @property
    def has_objects(self) -> bool:
        """Whether there are detections: a model's, or those of a file."""
        return bool(self.model or self.detections_file)

    @classmethod
    def file_names(cls) -> set[str]:
        """What settings are called in files."""
        return {_FILE_NAMES.get(name, name) for name in cls.model_fields}

    def as_dict(self) -> dict[str, Any]:
        """As files have it; settings of later versions only where they are not the default."""
        named = {_FILE_NAMES.get(name, name): (name, value) for name, value in self}
        return {
            file_name: value
            for file_name, (name, value) in named.items()
            if file_name in (*_ALWAYS_HASHED, *_NOT_HASHED) or value != type(self).default(name)
        }

    def non_default(self) -> dict[str, Any]:
        """By their names in files: what differs from the defaults, without models' hashes."""
        usual = type(self)().as_dict()
        changed = {n: value for n, value in self.as_dict().items() if value != usual.get(n)}
        for name in ("model_sha256", "classifier_sha256", "normalizer_sha256"):
            changed.pop(name, None)
        return changed

    def hash(self, *without: str) -> str:
        """Of all that changes results, perhaps `without` some settings."""
        hashed = self.hashed()
        return settings_hash({name: hashed[name] for name in hashed if name not in without})

    def has_hash(self, digest: object) -> bool:
        """Whether a record's hash is of these settings; 40 and 40.0 are the same number."""
        hashed = self.hashed()
        whole = {name: _as_whole(value) for name, value in hashed.items()}
        return digest in (settings_hash(hashed), settings_hash(whole))

    def hashed(self) -> dict[str, Any]:
        """Return the settings that decide results, by their names in files."""
        return {name: value for name, value in self.as_dict().items() if name not in _NEVER_HASHED}


DECOMPOSE_PRESET: dict[str, Any] = {"density_maps": "ome-tiff", "leave_out": ()}
"""A study that decomposes images, with the densities of every pixel."""

DETECT_PRESET: dict[str, Any] = {
    "decompose": False,
    "reports": False,
    "skip_glass": False,
    "leave_out": (),
    "formats": ("csv", "geojson", "yolo"),
}
"""A study that detects objects everywhere in images; it needs a model."""

NORMALIZE_PRESET: dict[str, Any] = {"decompose": False, "reports": False, "previews": False}
"""A study that writes images in the colours of a template; it needs a normalizer."""

REPORT_PRESET: dict[str, Any] = DETECT_PRESET | {
    "decompose": True,
    "reports": True,
    "previews": False,
    "formats": (),
}
"""A study that writes nothing but a report; for the layout "report"."""

MALARIA_PRESET: dict[str, Any] = DETECT_PRESET | {
    "model": "blood-cells",
    "classifier": "malaria",
    "reports": True,
    "one_page": True,
    "confidence": 0.15,
    "iou": 0.5,
    "formats": ("csv", "geojson"),
}
"""A study of a thin smear's fields: infected red cells by stage, with packaged models.

In clumps the detector is less sure of cells, and those with parasites must not be missed. A cell
may be found twice there, and its parasite must not count twice; two cells that lie over each other
by more than half are rare."""


def _from_file(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_from_file(name, one) for one in value)
    if isinstance(value, str) and name not in _TEXT_FIELDS:
        with suppress(ValueError):
            return float(value)
    return value


def _as_whole(value: Any) -> Any:
    return int(value) if isinstance(value, float) and value.is_integer() else value


@dataclass(frozen=True)
class StudyConfig:
    """All arguments of `run_study`. `images`: files, folders or patterns."""

    images: tuple[str, ...]
    out: Path
    settings: StudySettings = field(default_factory=StudySettings)
    workers: int = 1
    scheduler: str | None = None
    recursive: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The content of a study file; defaults are left out."""
        where: dict[str, Any] = {"images": [os.path.abspath(path) for path in self.images]}
        where |= {"out": os.path.abspath(self.out), "workers": self.workers}
        where |= {"scheduler": self.scheduler} if self.scheduler else {}
        where |= {"recursive": True} if self.recursive else {}
        how: dict[str, Any] = json.loads(json.dumps(self.settings.non_default()))
        return where | how

    def write(self) -> Path:
        """Write the study file into the results folder, which is created; its path."""
        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / STUDY_FILE, self.as_dict())
        return self.out / STUDY_FILE

    def command(self) -> str:
        """The same study as a command line; settings without an option need the study file."""
        words = ["napari-beerlanet", "batch"]
        if self.settings.non_default().keys() & _WITHOUT_OPTION:
            return _join_command([*words, str(self.out / STUDY_FILE)])
        # Beginning with a dash, a name would be taken for an option.
        words += [os.path.join(".", p) if p.startswith("-") else p for p in self.images]
        words += _option("--out", str(self.out))
        words += ["--recursive"] if self.recursive else []
        if self.scheduler:
            words += ["--scheduler", self.scheduler]
        elif self.workers != 1:
            words += ["--workers", str(self.workers)]
        for name, value in self.settings.non_default().items():
            words += _command_line_option(name, value)
        return _join_command(words)


OFF_SWITCHES = {
    "decompose": "--no-stains",
    "measure": "--no-measures",
    "reports": "--no-reports",
    "skip_glass": "--all-tiles",
    "previews": "--no-previews",
    "unit_spectra": "--no-unit-spectra",
}
"""Options that switch off what is on by default."""

_OPTION_NAMES = {"classifier": "--classify"}  # where they are not the setting's name
_WITHOUT_OPTION = {"spectra", "report_file"}


def _command_line_option(name: str, value: Any) -> list[str]:
    if name in OFF_SWITCHES:
        return [OFF_SWITCHES[name]]
    if value is True:
        return [f"--{name.replace('_', '-')}"]
    option = _OPTION_NAMES.get(name, f"--{name.replace('_', '-')}")
    if name == "pixel_size" and isinstance(value, tuple):
        return [option, ",".join(map(str, value))]
    return _option(option, *(value if isinstance(value, tuple) else (value,)))


def _option(option: str, *values: Any) -> list[str]:
    """An option with its values; joined with each where one would be taken for an option."""
    texts = [str(value) for value in values]
    if any(text.startswith("-") for text in texts):
        return [f"{option}={text}" for text in texts]
    return [option, *texts]


def _join_command(words: list[str]) -> str:
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
