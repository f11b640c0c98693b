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
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from napari_beerlanet.core.classification.settings import StainSource
from napari_beerlanet.core.common.settings import Option
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.images import NonTissue
from napari_beerlanet.core.stains.settings import DecomposeSettings

STUDY_FILE = "study.json"
"""Its name in the results folder."""

DetectionFormat = Literal["csv", "geojson", "coco", "voc", "yolo", "types"]
DensityFormat = Literal["none", "ome-tiff", "zarr"]
ImageFormat = Literal["ome-tiff", "png"]

_TEXT_FIELDS = (
    *("model", "model_sha256", "device", "stain_names"),
    *("detections_file", "annotations_file", "report_file"),
    *("classifier", "classifier_sha256", "classify_only"),
    *("normalizer", "normalizer_sha256"),
)
_NO_RESULT = ("model", "classifier", "normalizer", "device", "openvino", "batch")
"""Where models lie and what runs them changes no result."""
_SEEN_IN_FOLDER = ("formats", "previews", "reports", "density_maps", "normalized_format")
_NAMED_FILES = ("detections_file", "annotations_file")
_FileOnly = Annotated[str, Option(in_files_only=True)]
_Model = Annotated[str, Option(value="MODEL")]
_File = Annotated[str, Option(value="FILE")]
_OUTPUTS = Option(group="outputs")


class StudySettings(DecomposeSettings, DetectSettings):
    """What is done with each image of a study, and how.

    `model_sha256`, `classifier_sha256` and `normalizer_sha256` are filled in by `run_study`.
    """

    option_group = ""

    model: _Model = Field(
        "", description="Packaged model's name, or path of a checkpoint; detects objects."
    )
    model_sha256: _FileOnly = ""
    classifier: Annotated[str, Option("--classify", "MODEL")] = Field(
        "", description="Packaged classifier's name, or path of a checkpoint; names cell types."
    )
    classifier_sha256: _FileOnly = ""
    classify_only: Annotated[tuple[str, ...], Option(value="CLASS")] = Field(
        (), description="Classes whose cells are classified, if not those the classifier is for."
    )
    classify_fit: StainSource | None = Field(
        None, description="Where the classifier's stains are fitted, if not as in its training."
    )
    normalizer: _File = Field(
        "", description="Saved normalizer; writes each image in the colours of its template."
    )
    normalizer_sha256: _FileOnly = ""
    normalized_format: Annotated[ImageFormat, _OUTPUTS] = Field(
        "ome-tiff", description="File format of the normalized images."
    )
    decompose: Annotated[bool, Option("--no-stains", group="outputs")] = Field(
        True, description="Decompose the stains of each image."
    )
    reports: Annotated[bool, _OUTPUTS] = Field(
        True, description="Write an HTML report on each image."
    )
    previews: Annotated[bool, _OUTPUTS] = Field(
        True, description="Save pictures: a preview of the stains, an overlay of the boxes."
    )
    density_maps: Annotated[DensityFormat, _OUTPUTS] = Field(
        "none", description="Write the stain densities of every pixel in this format."
    )
    leave_out: Annotated[tuple[NonTissue, ...], Option(group="stains")] = Field(
        ("pen", "border"), description="Non-tissue that the stain fit shall not see."
    )
    formats: Annotated[tuple[DetectionFormat, ...], _OUTPUTS] = Field(
        ("csv", "geojson"), description="File formats of the detections."
    )
    device: Annotated[str, Option(value="DEVICE")] = Field(
        "auto", description="Where to compute: auto, cpu, cuda:0, mps."
    )
    detections_file: _File = Field(
        "", description="File of detections, reviewed or not, to take instead of a model's."
    )
    annotations_file: _File = Field(
        "", description="File of annotations to compare detections with."
    )
    match_iou: float = Field(
        0.5, gt=0, le=1, description="Minimum IoU of a detection with its annotation."
    )
    report_file: _FileOnly = Field("", description="Name of the report, if not that of the image.")
    one_page: Annotated[bool, _OUTPUTS] = Field(
        False,
        description="Write reports of one page on infected red cells, as a laboratory files them.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_file_values(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Values as files have them: lists as tuples, and 1e-5, which is a text in YAML."""
        return {name: _from_file(name, value) for name, value in given.items()}

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

    def as_dict(self) -> dict[str, Any]:
        """As files have it."""
        return dict(self)

    def non_default(self) -> dict[str, Any]:
        """What differs from the defaults, without models' hashes."""
        return {
            name: value
            for name, value in self
            if value != type(self).default(name) and not name.endswith("_sha256")
        }

    def hash(self) -> str:
        """Of all that decides what is in the results, and of the content of files that it names.

        Which results there are, and what they are called, is seen in their folder.
        """
        from napari_beerlanet.core.common.storage import file_hash, settings_hash

        left_out = (*_NO_RESULT, *_SEEN_IN_FOLDER, "report_file")
        values = {name: value for name, value in self if name not in left_out}
        for name in _NAMED_FILES:
            if os.path.isfile(values[name]):
                values[name] = file_hash(Path(values[name]))
        return settings_hash(values)


DECOMPOSE_PRESET: dict[str, Any] = {"density_maps": "ome-tiff", "leave_out": ()}
"""A study that decomposes images, with the densities of every pixel."""

DETECT_PRESET: dict[str, Any] = {
    "model": "blood-cells",
    "decompose": False,
    "reports": False,
    "skip_glass": False,
    "leave_out": (),
    "formats": ("csv", "geojson", "yolo"),
}
"""A study that detects objects everywhere in images."""

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


PRESETS: dict[str, dict[str, Any]] = {
    "batch": {},
    "decompose": DECOMPOSE_PRESET,
    "detect": DETECT_PRESET,
    "malaria": MALARIA_PRESET,
    "normalize": NORMALIZE_PRESET,
    "report": REPORT_PRESET,
}
"""By command: where it differs from the defaults."""


def _from_file(name: str, value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return tuple(_from_file(name, one) for one in value)
    if isinstance(value, str) and name not in _TEXT_FIELDS:
        with suppress(ValueError):
            return float(value)
    return value


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
        from napari_beerlanet.core.common.storage import write_json

        self.out.mkdir(parents=True, exist_ok=True)
        write_json(self.out / STUDY_FILE, self.as_dict())
        return self.out / STUDY_FILE

    def command(self) -> str:
        """The same study as a command line; settings without an option need the study file."""
        words = ["napari-beerlanet", "batch"]
        chosen = self.settings.non_default()
        specs = {name: self.settings.spec(name) for name in chosen}
        if any(spec.option.in_files_only for spec in specs.values()):
            return _join_command([*words, str(self.out / STUDY_FILE)])
        # Beginning with a dash, a name would be taken for an option.
        words += [os.path.join(".", p) if p.startswith("-") else p for p in self.images]
        words += (
            [f"--out={self.out}"] if str(self.out).startswith("-") else ["--out", str(self.out)]
        )
        words += ["--recursive"] if self.recursive else []
        if self.scheduler:
            words += ["--scheduler", self.scheduler]
        elif self.workers != 1:
            words += ["--workers", str(self.workers)]
        for name, value in chosen.items():
            words += specs[name].words(value)
        return _join_command(words)


def _join_command(words: list[str]) -> str:
    return subprocess.list2cmdline(words) if os.name == "nt" else shlex.join(words)
