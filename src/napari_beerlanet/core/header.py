"""The head of a checkpoint: where its numbers lie, and what it says of itself.

A checkpoint is a safetensors file: eight bytes with the length of a JSON table, the table, then
the numbers. One entry of the table's `__metadata__` is ours, JSON again: a model's `info`. All of
it is checked here, so that whatever is wrong has its sentence, and none of it needs torch.
"""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Callable
from typing import Any, BinaryIO, NamedTuple

from .architecture import check_layout

FORMAT = 1
KEY = "napari-beerlanet"
_LONGEST = 1 << 24  # bytes of a header; those of the largest models have some 200 000
_SIZES = {"BOOL": 1, "F16": 2, "F32": 4, "I64": 8}  # bytes per number
_DEEPEST = 32
_SIZE_FROM = {"low": 0.0, "median": 1e-3, "high": 1e-3}


class Header(NamedTuple):
    """`info`, the checksum of info and numbers, and the type and shape of every tensor."""

    info: dict[str, Any]
    checksum: str
    tensors: dict[str, tuple[str, tuple[int, ...]]]


def read_header(file: BinaryIO, size: int) -> Header:
    """The header of a file of `size` bytes, from its start; a `ValueError` has the reason."""
    start = file.read(8)
    length = int.from_bytes(start, "little")
    if size < 10 or not 2 <= length <= min(_LONGEST, size - 8):
        if start.startswith((b"PK\x03\x04", b"\x80")):
            raise ValueError("a pickle, which may hold a program; only a .pt can be imported")
        raise ValueError("not a checkpoint, or cut short within its header")
    table = _json(file.read(length), "its header")
    metadata = table.pop("__metadata__", None)
    if not isinstance(metadata, dict) or not isinstance(metadata.get(KEY), str):
        raise ValueError("a safetensors file, but not a checkpoint of napari-beerlanet")
    info = _json(metadata[KEY], "its description")
    version = info.get("format")
    if not isinstance(version, int) or isinstance(version, bool) or version < 1:
        raise ValueError("its format version is missing")
    if version > FORMAT:
        raise ValueError(
            f"written in format {version} by a newer napari-beerlanet; this one reads up to "
            f"format {FORMAT}, so update it"
        )
    tensors = _tensors(table, size - 8 - length)
    checksum = info.pop("checksum", None)
    if not isinstance(checksum, str):
        raise ValueError("its checksum is missing")
    return Header(check_info(info), checksum, tensors)


def check_info(info: dict[str, Any]) -> dict[str, Any]:
    """A copy of `info` with its model layout checked; a `ValueError` names what does not fit."""
    for key, (fits, meaning) in _FIELDS.items():
        if key not in info:
            raise ValueError(f"its description lacks {key}")
        if not fits(info[key]):
            raise ValueError(f"{key} must be {meaning}, not {reprlib.repr(info[key])}")
    if not _shallow(info, _DEEPEST) or not _texts(info.get("notes", [])):
        raise ValueError("its description is nested too deeply, or its notes are no texts")
    classes = info["classes"]
    if len(info["colours"]) != len(classes):
        raise ValueError(f"{len(info['colours'])} colours for {len(classes)} classes")
    if not info["object_sizes"].keys() <= set(classes):
        raise ValueError("object_sizes names classes that the model does not have")
    if not _densities_seen(info.get("densities_seen"), classes, info["components"]):
        raise ValueError(
            "densities_seen must be none, or mean, sd (one number for each component) and count "
            "by class"
        )
    layout = check_layout(info["model_yaml"])
    if layout["nc"] != len(classes):
        raise ValueError(f"{len(classes)} classes for a network of {layout['nc']}")
    return {**info, "model_yaml": layout}


def plain(value: Any) -> Any:
    """A value as JSON can hold it: numpy's numbers as Python's, NaN and infinity as None."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return str(value)


def _json(text: str | bytes, what: str) -> dict[str, Any]:
    try:
        decoded = text if isinstance(text, str) else text.decode()
        found = json.loads(decoded, object_pairs_hook=_once, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"not a checkpoint, or damaged: {what} is no JSON") from error
    if not isinstance(found, dict):
        raise ValueError(f"not a checkpoint, or damaged: {what} is no JSON table")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a name stands twice")
    return table


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _tensors(table: dict[str, Any], available: int) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Types and shapes by name; the parts must fill the `available` bytes, each byte once."""
    parts = sorted((_part(name, entry) for name, entry in table.items()), key=lambda p: p[:2])
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


def _part(name: str, entry: Any) -> tuple[int, int, str, str, tuple[int, ...]]:
    entry = entry if isinstance(entry, dict) else {}
    dtype, shape, span = (entry.get(key) for key in ("dtype", "shape", "data_offsets"))
    if not isinstance(dtype, str) or not _sizes(shape) or not _sizes(span) or len(span) != 2:
        raise ValueError(f"its header does not say where {name:.80} lies")
    if dtype not in _SIZES:
        raise ValueError(f"{name:.80} is of type {dtype:.20}, which no checkpoint holds")
    if span[1] - span[0] != math.prod(shape) * _SIZES[dtype]:
        raise ValueError(f"its header lies: {name:.80} does not have the size of its shape")
    return span[0], span[1], name, dtype, tuple(shape)


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and len(value) <= 8 and all(_whole(n, 0, 1 << 40) for n in value)


def _whole(value: Any, least: int, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


def _number(value: Any, least: float, most: float) -> bool:
    return (
        isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most
    )


def _text(value: Any) -> bool:
    return isinstance(value, str) and 0 < len(value) <= 200


def _texts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(v, str) for v in value)


def _shallow(value: Any, levels: int) -> bool:
    inside = value.values() if isinstance(value, dict) else value
    return not isinstance(value, (dict, list)) or (
        levels > 0 and all(_shallow(v, levels - 1) for v in inside)
    )


def _three(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 3 and all(_number(v, -1e9, 1e9) for v in value)


def _object_size(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and all(_number(value.get(k), least, 1e6) for k, least in _SIZE_FROM.items())
        and _whole(value.get("count"), 1, 1 << 53)
    )


def _stain_seen(value: Any) -> bool:
    if value is None:
        return True
    background = value.get("background") if isinstance(value, dict) else None
    return (
        isinstance(background, dict)
        and all(_three(background.get(k)) for k in ("mean", "sd"))
        and isinstance(value.get("spectra"), list)
    )


def _densities_seen(value: Any, classes: list[str], components: int) -> bool:
    """Whether it is as `classstain.describe_densities` writes it; older files have none."""
    if value is None:
        return True
    return (
        isinstance(value, dict)
        and value.keys() <= set(classes)
        and all(_class_densities(entry, components) for entry in value.values())
    )


def _class_densities(value: Any, components: int) -> bool:
    return (
        isinstance(value, dict)
        and all(_densities(value.get(key), components) for key in ("mean", "sd"))
        and _whole(value.get("count"), 1, 1 << 53)
    )


def _densities(value: Any, count: int) -> bool:
    return (
        isinstance(value, list) and len(value) == count and all(_number(v, 0, 1e9) for v in value)
    )


def _or_none(fits: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or fits(value)


_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (_text, "a short text"),
    "classes": (
        lambda v: (
            isinstance(v, list)
            and 1 <= len(v) <= 10_000
            and all(map(_text, v))
            and len(set(v)) == len(v)
        ),
        "a list of different names",
    ),
    "colours": (
        lambda v: (
            isinstance(v, list)
            and all(isinstance(c, str) and re.fullmatch("#[0-9a-fA-F]{6}", c) for c in v)
        ),
        'a list of colours such as "#a03c50"',
    ),
    "components": (lambda v: _whole(v, 1, 64), "a whole number from 1 to 64"),
    "iterations": (lambda v: _whole(v, 1, 1000), "a whole number from 1 to 1000"),
    "domain": (lambda v: v in ("log", "intensity"), '"log" or "intensity"'),
    "unit_spectra": (lambda v: isinstance(v, bool), "true or false"),
    "light": (lambda v: isinstance(v, bool), "true or false"),
    "reference_pixels": (_or_none(lambda v: _number(v, 1, 1e12)), "a number of pixels or none"),
    "padding": (_or_none(lambda v: _number(v, 0, 1)), "a number from 0 to 1 or none"),
    "image_size": (lambda v: _whole(v, 32, 16384), "a whole number from 32 to 16384"),
    "pixel_size": (_or_none(lambda v: _number(v, 1e-6, 1e6)), "a number of micrometres or none"),
    "object_sizes": (
        lambda v: isinstance(v, dict) and all(map(_object_size, v.values())),
        "a table of low, median, high and count by class",
    ),
    "stain_seen": (_stain_seen, "background (mean, sd) and spectra, or none"),
    "model_yaml": (lambda v: isinstance(v, dict), "the network's layout"),
    "training": (_or_none(lambda v: isinstance(v, dict)), "a table or none"),
}
