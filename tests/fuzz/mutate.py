"""Files that an attacker or a bad disk would make of good ones."""

from __future__ import annotations

import copy
import io
import json
import pickletools
import random
import re
import zipfile
from collections.abc import Callable
from typing import Any

EXTREMES: list[Any] = [
    *(0, -1, 1, 2, 63, 64, 65, 255, 256, 65_535, 65_536, 60_000_000, 2**31 - 1, 2**31, 2**32),
    *(2**53, 2**63, 2**64, 10**30, 0.5, -0.5, 1e-300, 1e300, float("inf"), float("nan")),
    *(
        "",
        "x",
        "x" * 1000,
        "x" * 100_000,
        "\x1b[2J",
        "a\nb",
        "=cmd|x",
        "../../etc/passwd",
        "\0",
        "ß",
    ),
    *(None, True, False, [], {}, [[]], [None], {"": ""}, [0] * 1000, [[1], [1, 2]]),
]
"""Values that are of another type, too small, too large or too long."""

MAX_BYTES = 10_000_000
"""Of a file: what the promise is about."""

_NUMBER = re.compile(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?")


def change_bytes(data: bytes, rng: random.Random) -> bytes:
    """Flip, cut, repeat, insert, or replace a number."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at = rng.randrange(len(data) + 1)
        length = rng.choice((1, 2, 8, 64, 1024))
        kind = rng.randrange(6)
        if kind == 0 and at < len(data):
            data[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            del data[at : at + length]
        elif kind == 2:
            data[at:at] = data[at : at + length] * rng.choice((1, 2, 100))
        elif kind == 3:
            data[at:at] = rng.randbytes(length)
        elif kind == 4:
            numbers = list(_NUMBER.finditer(bytes(data)))
            if numbers:
                match = rng.choice(numbers)
                data[match.start() : match.end()] = str(rng.choice(EXTREMES)).encode()
        else:
            del data[at:]
        if not data:
            return b""
    return bytes(data)


def change_value(value: Any, rng: random.Random) -> Any:
    """A nested value with something in it replaced, removed, repeated or moved elsewhere."""
    value = copy.deepcopy(value)
    places = list(_places(value))
    if not places:
        return rng.choice(EXTREMES)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        container, key = rng.choice(places)
        try:
            kind = rng.randrange(8)
            if kind < 5:
                container[key] = rng.choice(EXTREMES)
            elif kind == 5:
                del container[key]
            elif kind == 6:
                size = len(json.dumps(container[key]))
                times = min(rng.choice((2, 100, 10_000)), MAX_BYTES // (size + 1))
                container[key] = [container[key]] * times
            else:
                other, its_key = rng.choice(places)
                if len(json.dumps(other[its_key])) < MAX_BYTES // 4:
                    container[key] = copy.deepcopy(other[its_key])
        except (KeyError, IndexError):  # an earlier change has removed it
            continue
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    found, waiting = [], [value]
    while waiting:
        current = waiting.pop()
        pairs = (
            list(current.items())
            if isinstance(current, dict)
            else list(enumerate(current))
            if isinstance(current, list)
            else []
        )
        for key, inside in pairs:
            found.append((current, key))
            waiting.append(inside)
    return found


def change_json(data: bytes, rng: random.Random) -> bytes:
    """A JSON file with another value somewhere."""
    return json.dumps(change_value(json.loads(data), rng)).encode("utf-8", "surrogatepass")


def change_checkpoint(data: bytes, rng: random.Random) -> bytes:
    """A checkpoint with another description, and the checksum that belongs to it."""
    from safetensors.torch import load, save

    from napari_beerlanet.core.checkpoints.info import METADATA_KEY
    from napari_beerlanet.core.checkpoints.serialize import _checksum

    length = int.from_bytes(data[:8], "little")
    info = json.loads(json.loads(data[8 : 8 + length])["__metadata__"][METADATA_KEY])
    del info["checksum"]
    changed = change_value(info, rng)
    tensors = load(data)
    if rng.random() < 0.2 and tensors:
        name = rng.choice(sorted(tensors))
        tensors[name] = tensors[name].flatten()[: rng.randrange(9)].clone()
    try:
        text = json.dumps({**changed, "checksum": _checksum(changed, tensors)})
        return save(tensors, {METADATA_KEY: text})
    except (TypeError, ValueError, AttributeError):  # what safetensors itself cannot write
        return change_bytes(data, rng)


def change_normalizer(data: bytes, rng: random.Random) -> bytes:
    """A saved normalizer with another description."""
    length = int.from_bytes(data[:8], "little")
    header = json.loads(data[8 : 8 + length])
    facts = header["__metadata__"]
    for key, text in facts.items():
        facts[key] = json.dumps(change_value(json.loads(text), rng))
    changed = json.dumps(header).encode("utf-8", "surrogatepass")
    return len(changed).to_bytes(8, "little") + changed + data[8 + length :]


def change_onnx(data: bytes, rng: random.Random) -> bytes:
    """A network with another layer, attribute, constant, or more of them."""
    import numpy as np
    import onnx
    from onnx import helper, numpy_helper

    model = onnx.load_from_string(data)
    graph = model.graph
    for _ in range(rng.choice((1, 1, 2, 4))):
        node = rng.choice(graph.node)
        kind = rng.randrange(5)
        if kind == 0:
            node.op_type = rng.choice(["Resize", "Pad", "Tile", "Loop", "ConvTranspose", "Concat"])
        elif kind == 1:
            name = rng.choice(["strides", "kernel_shape", "pads", "dilations", "axis", "group"])
            value = rng.choice([0, 1, -1, 2, 64, 10**6, 2**31, 2**62])
            del node.attribute[:]
            many = rng.random() < 0.7
            node.attribute.append(helper.make_attribute(name, [value] * 2 if many else value))
        elif kind == 2:
            constant = rng.choice(graph.initializer)
            values = numpy_helper.to_array(constant).astype(np.float64)
            values = np.nan_to_num(values * rng.choice([0, -1, 2, 1000, 10**6]), posinf=1e30)
            kind_of = rng.choice([np.float32, np.int64])
            values = np.clip(values, -(2**62), 2**62).astype(kind_of)
            constant.CopyFrom(numpy_helper.from_array(values, constant.name))
        elif kind == 3:
            dims = rng.choice(graph.initializer).dims
            if dims:
                dims[rng.randrange(len(dims))] = rng.choice([0, 1, 2, 1000, 2**31, 2**62])
        else:
            more = graph.node.add()
            more.CopyFrom(node)
            more.output[0] = f"{node.output[0]}{rng.randrange(99)}"
    return model.SerializeToString()


def change_pickle(data: bytes, rng: random.Random) -> bytes:
    """A `.pt` with other instructions in its pickle."""
    parts: dict[str, bytes] = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            parts[name] = archive.read(name)
    program = next(name for name in parts if name.endswith("data.pkl"))
    parts[program] = _change_program(parts[program], rng)
    if rng.random() < 0.1:
        name = rng.choice(sorted(parts))
        parts[name] = change_bytes(parts[name], rng)
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        for name, content in parts.items():
            archive.writestr(name, content)
    return buffer.getvalue()


def _change_program(program: bytes, rng: random.Random) -> bytes:
    starts = [place for _, _, place in pickletools.genops(program) if place is not None]
    pieces = [program[a:b] for a, b in zip(starts, [*starts[1:], len(program)], strict=True)]
    for _ in range(rng.choice((1, 1, 2, 8))):
        at = rng.randrange(len(pieces))
        kind = rng.randrange(5)
        if kind == 0:
            pieces[at] = rng.choice(pieces)
        elif kind == 1:
            del pieces[at]
        elif kind == 2:
            piece = rng.choice(pieces)
            times = rng.choice((1, 100, 10_000))
            pieces[at:at] = [piece] * min(times, MAX_BYTES // max(len(piece), 1))
        elif kind == 3:
            pieces[at:at] = [bytes([rng.choice(_CODES)])]
        else:
            pieces[at] = change_bytes(pieces[at], rng)
        if len(pieces) < 2:
            break
    return b"".join(pieces)


_CODES = [ord(code.code) for code in pickletools.opcodes]

MUTATORS: dict[str, list[Callable[[bytes, random.Random], bytes]]] = {
    "safetensors": [change_checkpoint, change_checkpoint, change_checkpoint, change_bytes],
    "normalizer.safetensors": [change_normalizer, change_bytes],
    "onnx": [change_onnx, change_onnx, change_bytes],
    "pt": [change_pickle, change_pickle, change_pickle, change_bytes],
    "layout.yaml": [change_json, change_bytes],  # which is YAML, too
    "json": [change_json, change_bytes],
    "geojson": [change_json, change_bytes],
    "review.json": [change_json, change_bytes],
    "preset.json": [change_json, change_bytes],
    "project.json": [change_json, change_bytes],
    "annotations.json": [change_json, change_bytes],
}
"""By what comes after the first stop of a name; all others are changed byte by byte."""


def mutate(data: bytes, kind: str, rng: random.Random) -> bytes:
    """A bad file made of a good one."""
    chosen = rng.choice(MUTATORS.get(kind, [change_bytes]))
    try:
        return chosen(data, rng)[:MAX_BYTES]
    except Exception:  # it was bad already, in whatever way
        return change_bytes(data, rng)
