"""Checkpoint header: tensor offsets and the model's `info`, validated.

A checkpoint is a safetensors file: eight bytes with the length of a JSON table, the table, then
the tensors. One entry of the table's `__metadata__` is ours, JSON again: a model's `info`. All of
it is checked here, so that whatever is wrong has its sentence, and none of it needs torch.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from napari_beerlanet.core.boxes.classes import is_infected
from napari_beerlanet.core.checkpoints.layout import check_layout
from napari_beerlanet.core.classification.settings import StainSource
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.images import Domain
from napari_beerlanet.core.stains.settings import FRONT_ENDS, FrontEnd
from napari_beerlanet.core.stains.solver import MAX_COMPONENTS

FORMAT_VERSION = 1
DETECTOR, CLASSIFIER = "detector", "classifier"
"""Kinds of models, as `info["kind"]` names them; a detector's `info` need not say it."""
METADATA_KEY = "napari-beerlanet"
_MAX_HEADER_BYTES = 1 << 24  # bytes of a header; those of the largest models have some 200 000
_DTYPE_BYTES = {"BOOL": 1, "F16": 2, "F32": 4, "I64": 8, "F64": 8}  # bytes per number
NORMALIZER_PREFIX = "normalizer."
"""How the names of a normalizer's arrays begin; only they may be float64."""
_MAX_DEPTH = 32


class CheckpointHeader(NamedTuple):
    """`info`, the checksum of info and numbers, and the type and shape of every tensor."""

    info: dict[str, Any]
    checksum: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def read_header(file: BinaryIO, size: int) -> CheckpointHeader:
    """The header of a file of `size` bytes, from its start; a `ValueError` has the reason."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if size < 10 or not 2 <= length <= min(_MAX_HEADER_BYTES, size - 8):
        if start.startswith((b"PK\x03\x04", b"\x80")):
            raise ValueError("a pickle, which may hold a program; only a .pt can be imported")
        raise ValueError("not a checkpoint, or cut short within its header")
    table = _parse_json(file.read(length), "its header")
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(METADATA_KEY), str):
        raise ValueError("a safetensors file, but not a checkpoint of napari-beerlanet")
    info = _parse_json(metadata[METADATA_KEY], "its description")
    version = info.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError("its format version is missing")
    if version > FORMAT_VERSION:
        raise ValueError(
            f"written in format {version} by a newer napari-beerlanet; this one reads up to "
            f"format {FORMAT_VERSION}, so update it"
        )
    tensors = _check_tensors(table, size - 8 - length)
    checksum = info.pop("checksum", None)
    if not isinstance(checksum, str):
        raise ValueError("its checksum is missing")
    return CheckpointHeader(check_info(info), checksum, tensors)


_Text = Annotated[str, Field(min_length=1, max_length=200)]
_Colour = Annotated[str, Field(pattern="^#[0-9a-fA-F]{6}$")]
_Count = Annotated[int, Field(ge=1, le=1 << 53)]
_Density = Annotated[float, Field(ge=0, le=1e9)]
_Number = Annotated[float, Field(ge=-1e9, le=1e9)]
_FRONT_END_TEXT = "one of " + ", ".join(f'"{name}"' for name in FRONT_ENDS)


class _InfoModel(BaseModel):
    """Entries that are not named are allowed: files of other versions may have them."""

    model_config = ConfigDict(
        strict=True, extra="allow", protected_namespaces=(), allow_inf_nan=False
    )


_Size = Annotated[int, Field(ge=0, le=1 << 40)]


class _TensorEntry(_InfoModel):
    """Where a tensor lies in the file, as safetensors writes it."""

    dtype: str
    shape: Annotated[list[_Size], Field(max_length=8)]
    data_offsets: Annotated[list[_Size], Field(min_length=2, max_length=2)]


class _ObjectSize(_InfoModel):
    low: Annotated[float, Field(ge=0, le=1e6)]
    median: Annotated[float, Field(ge=1e-3, le=1e6)]
    high: Annotated[float, Field(ge=1e-3, le=1e6)]
    count: _Count


class _Background(_InfoModel):
    mean: Annotated[list[_Number], Field(min_length=3, max_length=3)]
    sd: Annotated[list[_Number], Field(min_length=3, max_length=3)]


class _StainSeen(_InfoModel):
    background: _Background
    spectra: Annotated[
        list[Annotated[list[_Number], Field(max_length=MAX_COMPONENTS)]],
        Field(min_length=1, max_length=3),
    ]

    @field_validator("spectra")
    @classmethod
    def _are_columns(cls, spectra: list[list[float]]) -> list[list[float]]:
        if len({len(row) for row in spectra}) > 1:
            raise ValueError("rows of different lengths")
        return spectra


class _ClassDensities(_InfoModel):
    mean: list[_Density]
    sd: list[_Density]
    count: _Count


_Line = Annotated[str, Field(max_length=2000)]
_Counts = Annotated[dict[_Text, _Size], Field(max_length=10_000)]


class _Compared(_InfoModel):
    """Scores before and after a training."""

    reference: Annotated[list[dict[str, Any]], Field(min_length=2, max_length=2)] | None = None
    forgotten: Annotated[list[_Line], Field(max_length=10_000)] | None = None


class _Training(_InfoModel):
    """What is told of a training; of each entry a model may have none."""

    command: _Line | None = None
    data: _Line | None = None
    data_hash: _Line | None = None
    date: _Line | None = None
    parent: _Line | None = None
    run: _Line | None = None
    scope: _Line | None = None
    epochs: _Size | None = None
    seed: int | None = None
    images: _Counts | _Size | None = None
    sources: _Counts | None = None
    boxes: dict[_Text, _Counts] | None = None
    crops: dict[_Text, _Counts] | None = None
    crop_side: Annotated[float, Field(gt=0, le=1e6)] | None = None
    versions: Annotated[dict[_Text, _Line], Field(max_length=100)] | None = None
    settings: dict[str, Any] | None = None
    compared: _Compared | None = None
    metrics: Annotated[dict[str, Any], Field(max_length=1000)] | None = None

    @field_validator("metrics")
    @classmethod
    def _are_scores(cls, metrics: dict[str, Any] | None) -> dict[str, Any] | None:
        """Of one test set, or of several by name."""
        for scores in [metrics or {}, *(v for v in (metrics or {}).values())]:
            _check_scores(scores)
        return metrics

    @field_validator("compared")
    @classmethod
    def _compares_scores(cls, compared: _Compared | None) -> _Compared | None:
        for scores in (compared and compared.reference) or ():
            _check_scores(scores)
            if not {"mAP50", "balanced accuracy"} & scores.keys():
                raise ValueError("a comparison without a score")
        return compared

    @field_validator("boxes")
    @classmethod
    def _are_of_both_splits(cls, boxes: dict[str, Any] | None) -> dict[str, Any] | None:
        if boxes and not {"train", "val"} <= boxes.keys():
            raise ValueError("boxes of one split only")
        return boxes


_SCORES = ("mAP50", "mAP50-95", "accuracy", "balanced_accuracy", "balanced accuracy")


def _check_scores(scores: Any) -> None:
    """A `ValueError` where what is called a score or a number of images is none."""
    if not isinstance(scores, dict):
        return
    for name in _SCORES:
        value = scores.get(name, 0.0)
        if isinstance(value, bool) or not isinstance(value, (int, float, type(None))):
            raise ValueError(f"{name} is no number")
        if value is not None and not -1e9 <= value <= 1e9:
            raise ValueError(f"{name} is no score")
    images = scores.get("images", 0)
    if images is not None and not (type(images) is int and 0 <= images <= 1 << 40):
        raise ValueError("images is no number")


class _NormalizerInfo(_InfoModel):
    method: _Text
    settings: dict[str, Any]


class _SharedInfo(_InfoModel):
    """What every model's `info` has; descriptions are what an entry must be."""

    name: _Text = Field(description="a short text")
    classes: Annotated[list[_Text], Field(min_length=1, max_length=10_000)] = Field(
        description="a list of different names"
    )
    colours: list[_Colour] = Field(description='a list of colours such as "#a03c50"')
    components: Annotated[int, Field(ge=1, le=MAX_COMPONENTS)] = Field(
        description=f"a whole number from 1 to {MAX_COMPONENTS}"
    )
    iterations: Annotated[int, Field(ge=1, le=1000)] = Field(
        description="a whole number from 1 to 1000"
    )
    domain: Domain = Field(description='"log" or "intensity"')
    unit_spectra: bool = Field(description="true or false")
    light: bool = Field(description="true or false")
    reference_pixels: Annotated[float, Field(ge=1, le=1e12)] | None = Field(
        description="a number of pixels or none"
    )
    padding: Annotated[float, Field(ge=0, le=1)] | None = Field(
        description="a number from 0 to 1 or none"
    )
    stain_seen: _StainSeen | None = Field(description="background (mean, sd) and spectra, or none")
    training: _Training | None = Field(description="a table of what a training records, or none")
    unknown: Annotated[dict[_Text, list[_Text]], Field(max_length=50)] = Field(
        {}, description="a table of what the model does not know, with the classes it may be called"
    )
    notes: Annotated[list[_Line], Field(max_length=1000)] = Field([], description="a list of texts")
    normalizer: _NormalizerInfo | None = Field(
        None, description="none, or the method of a normalizer and its settings"
    )
    attention_pool: Annotated[int, Field(ge=1, le=256)] = Field(
        8, description="a whole number from 1 to 256"
    )

    @field_validator("classes")
    @classmethod
    def _are_different(cls, classes: list[str]) -> list[str]:
        if len(set(classes)) != len(classes):
            raise ValueError("a name stands twice")
        return classes


class CheckpointInfo(_SharedInfo):
    """The schema of a detector's `info`."""

    image_size: Annotated[int, Field(ge=32, le=8192)] = Field(
        description="a whole number from 32 to 8192"
    )
    pixel_size: Annotated[float, Field(ge=1e-6, le=1e6)] | None = Field(
        description="a number of micrometres or none"
    )
    object_sizes: dict[str, _ObjectSize] = Field(
        description="a table of low, median, high and count by class"
    )
    size_spread: Annotated[float, Field(ge=0, le=100)] | None = Field(
        None, description="none, or the standard deviation of ln of images' magnifications"
    )
    reference_class: _Text | None = Field(
        None, description="none, or the class whose size stands for all"
    )
    model_yaml: dict[str, Any] = Field(description="the network's layout")
    front_end: FrontEnd = Field("beerlanet", description=_FRONT_END_TEXT)
    densities_seen: dict[str, _ClassDensities] | None = Field(
        None,
        description="none, or mean, sd (one number for each component) and count by class",
    )


class ClassifierInfo(_SharedInfo):
    """The schema of a classifier's `info`."""

    kind: Literal["classifier"] = Field(description='"classifier"')
    backbone: Annotated[str, Field(pattern="^[a-z0-9_]{1,60}$")] = Field(
        description="the name of a network of torchvision"
    )
    front_end: FrontEnd = Field(description=_FRONT_END_TEXT)
    input_size: Annotated[int, Field(ge=16, le=1024)] = Field(
        description="a whole number from 16 to 1024"
    )
    fill: Annotated[float, Field(ge=0.05, le=1)] = Field(description="a number from 0.05 to 1")
    fit: StainSource = Field(description='"crop" or "image"')
    normalize: bool = Field(description="true or false")
    beside_rgb: bool = Field(description="true or false")
    denoise: bool = Field(description="true or false")
    standardize: bool = Field(description="true or false")
    views: Annotated[int, Field(ge=1, le=8)] = Field(1, description="a whole number from 1 to 8")
    temperature: Annotated[float, Field(ge=0.01, le=100)] = Field(
        description="a number from 0.01 to 100"
    )
    prior: list[Annotated[float, Field(gt=0, le=1e6)]] = Field(
        [], description="a positive number for each class, or an empty list"
    )
    prevalence: Annotated[float, Field(gt=0, lt=1)] | None = Field(
        None, description="a number between 0 and 1, or none"
    )
    applies_to: Annotated[list[_Text], Field(max_length=100)] = Field(
        [], description="a list of the detector's classes that it tells apart"
    )
    recognised: dict[_Text, Annotated[list[_Size], Field(min_length=2, max_length=2)]] = Field(
        {}, description="how many of how many crops are recognised, by class"
    )


def check_info(info: dict[str, Any]) -> dict[str, Any]:
    """A copy of `info` with its model layout checked; a `ValueError` names what does not fit."""
    if not _is_shallow(info, _MAX_DEPTH):
        raise ValueError("its description is nested too deeply")
    kind = info.get("kind", DETECTOR)
    if kind not in (DETECTOR, CLASSIFIER):
        raise ValueError(f"a model of the kind {quoted(kind)}, which is not known here")
    schema: type[_SharedInfo] = ClassifierInfo if kind == CLASSIFIER else CheckpointInfo
    try:
        checked = schema.model_validate(info)
    except ValidationError as error:
        raise ValueError(_first_reason(schema, info, error)) from None
    classes = checked.classes
    if len(checked.colours) != len(classes):
        raise ValueError(f"{len(checked.colours)} colours for {len(classes)} classes")
    if not {name for called in checked.unknown.values() for name in called} <= set(classes):
        raise ValueError("unknown names classes that the model does not have")
    if isinstance(checked, ClassifierInfo):
        _check_classifier(checked)
    if isinstance(checked, CheckpointInfo):
        return {**info, "model_yaml": _check_detector(checked)}
    return dict(info)


def _check_classifier(checked: ClassifierInfo) -> None:
    """Entries of a classifier that have to fit together."""
    classes = checked.classes
    if len(checked.prior) not in (0, len(classes)):
        raise ValueError(f"{len(checked.prior)} priors for {len(classes)} classes")
    if not checked.recognised.keys() <= set(classes):
        raise ValueError("recognised names classes that the model does not have")
    if any(right > count for right, count in checked.recognised.values()):
        raise ValueError("recognised must not count more crops than there are")


def _check_detector(checked: CheckpointInfo) -> dict[str, Any]:
    """The layout of a detector whose entries fit together."""
    classes = checked.classes
    if not checked.object_sizes.keys() <= set(classes):
        raise ValueError("object_sizes names classes that the model does not have")
    if checked.reference_class not in (None, *classes):
        raise ValueError("reference_class names a class that the model does not have")
    for name, size in checked.object_sizes.items():
        if not size.low <= size.median <= size.high <= 2 * checked.image_size:
            raise ValueError(
                f"object_sizes of {name:.80} must be low, median and high in this order, and no "
                f"larger than images of {checked.image_size} pixels"
            )
    densities = checked.densities_seen or {}
    right_length = all(
        len(values) == checked.components
        for entry in densities.values()
        for values in (entry.mean, entry.sd)
    )
    if not right_length or not densities.keys() <= set(classes):
        requirement = _requirement(CheckpointInfo, "densities_seen")
        raise ValueError(f"densities_seen must be {requirement}")
    layout = check_layout(checked.model_yaml)
    if layout["nc"] != len(classes):
        raise ValueError(f"{len(classes)} classes for a network of {layout['nc']}")
    return layout


def limits_text(info: Mapping[str, Any]) -> str:
    """What a model does not know, to be read beside its counts; "" where `info` says nothing.

    With the classes of which it recognises fewer than half, where this was measured.
    """
    sentences = []
    measured = (info.get("recognised") or {}).items()
    seldom = [(name, *counts) for name, counts in measured if 2 * counts[0] < counts[1]]
    if seldom:
        names = ", ".join(f"{name} ({right} of {count})" for name, right, count in seldom)
        sentences.append(f"Seldom recognises, in images that it was not trained on: {names}.")
    for what, called in (info.get("unknown") or {}).items():
        names = " or ".join([", ".join(called[:-1]), called[-1]] if len(called) > 1 else called)
        sentences.append(f"Does not know {what}" + (f"; may call them {names}." if called else "."))
    return " ".join(sentences)


def model_limits(detector: Mapping[str, Any], classifier: Mapping[str, Any]) -> list[str]:
    """What a detector and a classifier together do not know, a sentence each.

    By their `info`, {} where there is none. A classifier may know what the detector does not.
    """
    unknown = detector.get("unknown") or {}
    rest = still_unknown(unknown, classifier.get("classes") or ())
    names = [detector.get("name", ""), classifier.get("name", "")]
    texts = [limits_text({"unknown": {k: unknown[k] for k in rest}}), limits_text(classifier)]
    pairs = zip(names, texts, strict=True)
    limits = [f"{name}: {text}" if name else text for name, text in pairs if text]
    solved = [what for what in unknown if what not in rest and is_infected(what)]
    if solved:
        limits.insert(
            0,
            f"{names[0]} does not know {', '.join(solved)}: those outside of the red cells that it "
            "finds, or called platelets, are not counted.",
        )
    return limits


def model_notes(info: Mapping[str, Any]) -> list[str]:
    """What a person who counts with a model should know: its notes, and what it does not know."""
    limits = limits_text(info)
    name = f"{info['name']}: " if info.get("name") else ""
    return [*map(str, info.get("notes") or []), *([f"{name}{limits}"] if limits else [])]


def still_unknown(
    unknown: Mapping[str, Sequence[str]] | None, classes: Sequence[str]
) -> dict[str, list[str]]:
    """What of `unknown` is still true of a model that was trained further, with these classes."""
    return {
        what: [name for name in called if name in classes]
        for what, called in (unknown or {}).items()
        if not any(_names_same(name, what) for name in classes)
    }


def _names_same(class_name: str, what: str) -> bool:
    """Whether a class is of what a text such as "parasites" or "blasts" says."""
    if is_infected(class_name) and is_infected(what):
        return True
    return what.lower().rstrip("s") in re.sub(r"[_./\\-]+", " ", class_name).lower()


def _first_reason(schema: type[BaseModel], info: dict[str, Any], error: ValidationError) -> str:
    first = error.errors(include_url=False, include_context=False)[0]
    key = str(first["loc"][0])
    if first["type"] == "missing" and len(first["loc"]) == 1:
        return f"its description lacks {key}"
    return f"{key} must be {_requirement(schema, key)}, not {quoted(info[key])}"


def _requirement(schema: type[BaseModel], key: str) -> str:
    return schema.model_fields[key].description or ""


def to_json_types(value: Any) -> Any:
    """A value as JSON can hold it: numpy's numbers as Python's, NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(k): to_json_types(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        return to_json_types(value.tolist())
    if isinstance(value, (list, tuple)):
        return [to_json_types(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)


def _parse_json(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        decoded = text if isinstance(text, str) else text.decode()
        found = json.loads(decoded, object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a checkpoint, or damaged: {what} is no JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"not a checkpoint, or damaged: {what} is no JSON table")
    return found


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _check_tensors(table: dict[str, Any], available: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes by name; the parts must fill the `available` bytes, each byte once."""
    parts = sorted(
        (_check_tensor(name, entry) for name, entry in table.items()), key=lambda p: p[:2]
    )
    end = 0
    for begin, stop, name, _, _ in parts:
        if begin < end:
            raise ValueError(f"its header lies: {name:.80} overlaps with another tensor")
        if stop > available:
            raise ValueError(f"cut short, or its header lies: {name:.80} ends beyond the file")
        if begin > end:
            raise ValueError(f"its header lies: there is a gap before {name:.80}")
        end = stop
    if end != available:
        raise ValueError(f"its header lies: {available - end} bytes belong to no tensor")
    return {name: (dtype, shape) for _, _, name, dtype, shape in parts}


def _check_tensor(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    try:
        tensor = _TensorEntry.model_validate(entry)
    except ValidationError:
        raise ValueError(f"its header does not say where {name:.80} lies") from None
    precise = tensor.dtype == "F64" and not name.startswith(NORMALIZER_PREFIX)
    if tensor.dtype not in _DTYPE_BYTES or precise:
        raise ValueError(f"{name:.80} is of type {tensor.dtype:.20}, which no checkpoint holds")
    begin, stop = tensor.data_offsets
    if stop - begin != math.prod(tensor.shape) * _DTYPE_BYTES[tensor.dtype]:
        raise ValueError(f"its header lies: {name:.80} does not have the size of its shape")
    return begin, stop, name, tensor.dtype, tuple(tensor.shape)


def _is_shallow(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return not isinstance(value, (dict, list)) or (
        levels > 0 and all(_is_shallow(v, levels - 1) for v in inside)
    )
