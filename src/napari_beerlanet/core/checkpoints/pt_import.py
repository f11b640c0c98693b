"""Read an Ultralytics `.pt`, or a `state_dict` of torch, without running any of it.

A `.pt` is a zip of raw numbers and one pickle, and a pickle is a program that may call whatever it
names. Ultralytics' restricted loader (`safe_only=True`) still calls constructors of its own
classes, and one of those loads a second file, from the network if need be, without any
restriction. Here every class is an empty stand-in: there is nothing to call.
"""

from __future__ import annotations

import io
import math
import pickle
import pickletools
import sys
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from napari_beerlanet.core.common.messages import GET_AGAIN, shortened

_DETECTION_MODELS = {
    "ultralytics.nn.tasks.DetectionModel": False,
    "ultralytics.nn.tasks.YOLOv10DetectionModel": False,
    "napari_beerlanet.core.detection.network.StainDetectionModel": True,
}
_KNOWN_PACKAGES = ("torch", "torchvision", "ultralytics", "napari_beerlanet", "numpy", "pathlib")
_HARMLESS_BUILTINS = {
    "set",
    "frozenset",
    "dict",
    "list",
    "tuple",
    "getattr",
    "slice",
    "complex",
    "object",
}
_STORAGE_DTYPES = {
    **{"HalfStorage": "float16", "FloatStorage": "float32", "DoubleStorage": "float64"},
    **{"BFloat16Storage": "bfloat16", "LongStorage": "int64", "IntStorage": "int32"},
    **{"ShortStorage": "int16", "CharStorage": "int8", "ByteStorage": "uint8"},
    "BoolStorage": "bool",
}
_VALUE_BYTES = {"float64": 8, "int64": 8, "float32": 4, "int32": 4, "float16": 2, "bfloat16": 2}
_VALUE_BYTES |= {"int16": 2, "int8": 1, "uint8": 1, "bool": 1}
# How torch's format before 1.6 begins: its magic number as a pickle of protocol 2.
_OLD_FORMAT_START = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19."
_MAX_PICKLE_BYTES = 1 << 25
_MAX_OPCODES = 1 << 20  # the largest of Ultralytics' have a tenth; each may make an object
_MAX_TUPLE_VALUES = 10_000  # of a tuple and all that are in it, each time that they are
_MAX_INTEGER_BYTES = 8  # dictionaries of longer numbers can be made to take for ever
_MAX_MODULES, _MAX_DEPTH, _MAX_NAME_LENGTH = 50_000, 40, 200


class _UnsupportedFileError(ValueError):
    """A reason of ours, to be told from what Python raises over damaged data."""


class StandIn:
    """An object of a class that is only known by `origin`; its attributes are the pickle's."""

    origin = ""

    def __new__(cls, *args: Any, **kwargs: Any) -> StandIn:
        """Arguments mean nothing."""
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


class StoredTensor(NamedTuple):
    """A tensor that has not been read yet: a part of entry `key` of the archive."""

    key: str
    dtype: str
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]


@dataclass(frozen=True)
class PickledModel:
    """A detection network in plain parts; `stain` and `light` are None for a plain YOLO."""

    weights: dict[str, Any]
    layout: Any
    names: Any
    stain: dict[str, Any] | None
    light: Any
    record: dict[str, Any]


def read_pt(path: Path) -> PickledModel:
    """The detection network of an Ultralytics `.pt`, or a `ValueError` with the reason.

    Weights are torch tensors in the file's types, by their names in the network; the record is
    the checkpoint's own entries as far as they are plain text and numbers.
    """
    with _open_archive(path, "a .pt of Ultralytics") as archive:
        return _read_model(archive)


def read_state_dict(path: Path) -> dict[str, Any]:
    """The tensors of a `state_dict` that torch has saved, in its order; or a `ValueError`.

    Also of one that lies under "state_dict" or "model" in the file.
    """
    with path.open("rb") as file:
        old = file.read(len(_OLD_FORMAT_START)) == _OLD_FORMAT_START
    with _open_archive(path, "a file that torch.save has written", old) as archive:
        found = _unpickle(archive.read("data.pkl"))
        for key in ("state_dict", "model"):
            found = found.get(key, found) if isinstance(found, dict) else found
        if not isinstance(found, dict):
            raise _UnsupportedFileError("it holds a whole network, not its state_dict()")
        tensors = {str(k): v for k, v in found.items() if isinstance(v, StoredTensor)}
        if any(len(name) > _MAX_NAME_LENGTH for name in tensors):
            raise _UnsupportedFileError("a part of its network has no proper name")
        if not tensors:
            raise _UnsupportedFileError("it holds no weights")
        return _load_tensors(archive, tensors)


def check_pickle(path: Path) -> None:
    """A `ValueError` where a file of `torch.save` takes far more than its size to be read."""
    with _open_archive(path, "a file that torch.save has written") as archive:
        _check_program(archive.read("data.pkl"))


@contextmanager
def _open_archive(path: Path, what: str, old: bool = False) -> Iterator[_Archive | _OldFile]:
    try:
        if old:
            yield _OldFile(path.read_bytes())
            return
        with zipfile.ZipFile(path) as archive:
            yield _Archive(archive, path.stat().st_size)
    except (_UnsupportedFileError, OSError, MemoryError):
        raise
    except zipfile.BadZipFile as error:
        raise ValueError(f"not {what}, or cut short or damaged; {GET_AGAIN}") from error
    except Exception as error:  # damaged data fail in whatever way
        raise ValueError(
            f"damaged, as its parts do not fit together any more; {GET_AGAIN}"
        ) from error


class _Archive:
    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        entries = {entry.filename: entry for entry in archive.infolist()}
        programs = [name for name in entries if name.rpartition("/")[2] == "data.pkl"]
        if len(programs) != 1:
            raise _UnsupportedFileError("a zip file, but not a .pt of PyTorch")
        self.folder = programs[0].removesuffix("data.pkl")
        if f"{self.folder}constants.pkl" in entries:
            raise _UnsupportedFileError("a TorchScript export; use the .pt that it was made from")
        stored = all(entry.compress_type == zipfile.ZIP_STORED for entry in entries.values())
        if not stored or sum(entry.file_size for entry in entries.values()) > size:
            raise _UnsupportedFileError(
                "not written by PyTorch: its parts are larger than the file"
            )
        self.archive, self.entries, self.size = archive, entries, size
        order = self.read("byteorder") if f"{self.folder}byteorder" in entries else b"little"
        if order != sys.byteorder.encode():
            raise _UnsupportedFileError("written on a machine of another byte order")

    def read(self, name: str) -> bytes:
        if f"{self.folder}{name}" not in self.entries:
            raise _UnsupportedFileError(f"its part {shortened(name)} is missing")
        return self.archive.read(f"{self.folder}{name}")


class _OldFile:
    """A file of torch before 1.6, as many weights of torchvision still are.

    Five pickles (a magic number, a version, facts on the system, the content, the storages' keys),
    then of each storage the number of its values and the values.
    """

    def __init__(self, data: bytes) -> None:
        self.size = len(data)
        stream = io.BytesIO(data)
        programs = [_next_pickle(stream, data) for _ in range(5)]
        system = _unpickle(programs[2])
        if not isinstance(system, dict) or system.get("little_endian") is not True:
            raise _UnsupportedFileError("written on a machine of another byte order")
        self._parts = {"data.pkl": programs[3]}
        _check_program(programs[3])
        content = _StandInUnpickler(programs[3])
        content.load()
        for key in _unpickle(programs[4]):
            dtype, count = content.storages[str(key)]
            stated = int.from_bytes(stream.read(8), "little", signed=True)
            values = stream.read(count * _VALUE_BYTES[dtype])
            if stated != count or len(values) != count * _VALUE_BYTES[dtype]:
                raise _UnsupportedFileError("cut short or damaged")
            self._parts[f"data/{key}"] = values

    def read(self, name: str) -> bytes:
        if name not in self._parts:
            raise _UnsupportedFileError(f"its part {shortened(name)} is missing")
        return self._parts[name]


def _next_pickle(stream: io.BytesIO, data: bytes) -> bytes:
    start = stream.tell()
    for number, _ in enumerate(pickletools.genops(stream)):
        if stream.tell() - start > _MAX_PICKLE_BYTES or number > _MAX_OPCODES:
            raise _UnsupportedFileError("its table of contents is larger than any model's")
    return data[start : stream.tell()]


class _StandInUnpickler(pickle.Unpickler):
    """Knows containers and tensors; any other class is a stand-in, any other module an error."""

    def __init__(self, program: bytes) -> None:
        super().__init__(io.BytesIO(program))
        self._classes: dict[str, type[StandIn]] = {}
        self.storages: dict[str, tuple[str, int]] = {}  # type and number of values, by key

    def find_class(self, module: str, name: str) -> Any:
        # Functions are made anew: a pickle may hang attributes on whatever it gets from here.
        origin = f"{module}.{name}"
        if origin == "collections.OrderedDict":
            return OrderedDict
        if origin in ("builtins.set", "__builtin__.set"):
            return set
        if origin in ("torch._utils._rebuild_tensor_v2", "torch._utils._rebuild_tensor_v3"):
            return lambda storage, offset, shape, strides, *_: _check_stored_tensor(
                storage, offset, shape, strides
            )
        if origin.startswith("torch._utils._rebuild_parameter"):
            return lambda data, *_: data
        top = module.partition(".")[0]
        if top not in _KNOWN_PACKAGES and not (
            (top in ("builtins", "__builtin__") and name in _HARMLESS_BUILTINS) or top == "_codecs"
        ):
            raise _UnsupportedFileError(
                f"it asks for {origin:.80}, which no model needs; nothing was run"
            )
        if origin not in self._classes:
            self._classes[origin] = type("StandIn", (StandIn,), {"origin": origin})
        return self._classes[origin]

    def persistent_load(self, pid: Any) -> tuple[str, str, int]:
        kind, storage, key, _, count, *view = pid  # old files say there which part is meant
        dtype = _STORAGE_DTYPES.get(storage.origin.rpartition(".")[2])
        if kind != "storage" or dtype is None or any(part is not None for part in view):
            raise _UnsupportedFileError("numbers of an unknown type")
        if not isinstance(count, int) or count < 0:
            raise _UnsupportedFileError("a tensor of no proper shape")
        self.storages[str(key)] = dtype, count
        return str(key), dtype, count


def _check_stored_tensor(
    storage: tuple[str, str, int], offset: Any, shape: Any, strides: Any
) -> StoredTensor:
    key, dtype, available = storage
    numbers = [offset, *shape, *strides]
    if not all(isinstance(n, int) and n >= 0 for n in numbers) or len(shape) != len(strides):
        raise _UnsupportedFileError("a tensor of no proper shape")
    count, last = 1, offset
    for size, stride in zip(shape, strides, strict=True):
        count *= size
        last += (size - 1) * stride
    if count > available or (count and last >= available):
        raise _UnsupportedFileError("a tensor is larger than the numbers that it is made of")
    return StoredTensor(key, dtype, offset, tuple(shape), tuple(strides))


def _read_model(archive: _Archive | _OldFile) -> PickledModel:
    found = _unpickle(archive.read("data.pkl"))
    model = found.get("ema") or found.get("model") if isinstance(found, dict) else found
    if not isinstance(model, StandIn) or model.origin not in _DETECTION_MODELS:
        what = model.origin.rpartition(".")[2] if isinstance(model, StandIn) else "no model"
        raise _UnsupportedFileError(
            f"it holds {shortened(what or 'no model')}, not a detection model of Ultralytics"
        )
    state = vars(model)
    ours = _DETECTION_MODELS[model.origin]
    stain = dict(_module_table(state, "_modules")).get("stain") if ours else None
    if ours and not isinstance(stain, StandIn):
        raise _UnsupportedFileError(
            "its stain front end is missing; use the run folder's best.safetensors"
        )
    return PickledModel(
        _load_tensors(archive, dict(_iterate_weights(model))),
        state.get("yaml"),
        state.get("names"),
        None if stain is None else vars(stain),
        state.get("light") if stain is not None else None,
        {k: v for k, v in found.items() if k != "model"} if isinstance(found, dict) else {},
    )


def _unpickle(program: bytes) -> Any:
    _check_program(program)
    return _StandInUnpickler(program).load()


def _check_program(program: bytes) -> None:
    """Refuse a pickle that takes long or much memory, before any of it is carried out.

    Of what lies on the pickle's stack and in its memo, only sizes are followed: a tuple as a key is
    hashed with all that is in it, however often, so that thirty nested ones take for ever.
    """
    if len(program) > _MAX_PICKLE_BYTES:
        raise _UnsupportedFileError("its table of contents is larger than any model's")
    stack: list[int] = []  # how many values each item has, if it is a tuple
    marks: list[int] = []
    memo: dict[Any, int] = {}
    for number, (code, argument, _) in enumerate(pickletools.genops(program)):
        name = code.name
        if number > _MAX_OPCODES:
            raise _UnsupportedFileError("its table of contents is larger than any model's")
        # Python sets aside memory for all places up to the one that is named.
        if name in ("PUT", "LONG_BINPUT") and (argument or 0) > len(program):
            raise _UnsupportedFileError("it asks for more memory than any model needs")
        if name in ("LONG", "LONG1", "LONG4", "INT") and isinstance(argument, int):
            if argument.bit_length() > 8 * _MAX_INTEGER_BYTES:
                raise _UnsupportedFileError("it holds a number that no model needs")
            stack.append(1)
        elif name == "MARK":
            marks.append(len(stack))
        elif name in ("PUT", "BINPUT", "LONG_BINPUT", "MEMOIZE"):
            memo[len(memo) if name == "MEMOIZE" else argument] = stack[-1]
        elif name in ("GET", "BINGET", "LONG_BINGET"):
            stack.append(memo[argument])
        elif name == "DUP":
            stack.append(stack[-1])
        else:
            popped = _pop_items(code, stack, marks)
            size = 1
            if name in ("TUPLE", "TUPLE1", "TUPLE2", "TUPLE3", "FROZENSET"):
                size += sum(popped)
                if size > _MAX_TUPLE_VALUES:
                    raise _UnsupportedFileError("it holds a tuple that is larger than any model's")
            stack.extend([size] * len(code.stack_after))


def _pop_items(code: pickletools.OpcodeInfo, stack: list[int], marks: list[int]) -> list[int]:
    """Take from the stack what an instruction takes."""
    before = code.stack_before
    count = len(before)
    if pickletools.markobject in before:
        count = len(stack) - marks.pop() + before.index(pickletools.markobject)
    elif code.name == "POP" and marks and marks[-1] == len(stack):
        marks.pop()  # it takes a mark, too
        return []
    if count == 0:
        return []
    popped = stack[-count:]
    del stack[-count:]
    return popped


def _iterate_weights(model: StandIn) -> Iterator[tuple[str, StoredTensor]]:
    """Name and place of every weight of a network, in the order of `state_dict`."""
    visited = 0
    stack: list[tuple[str, Any, int]] = [("", model, 0)]
    while stack:
        prefix, module, depth = stack.pop()
        visited += 1
        if not isinstance(module, StandIn) or visited > _MAX_MODULES or depth > _MAX_DEPTH:
            raise _UnsupportedFileError("its network is not built as Ultralytics builds them")
        state = vars(module)
        passing = state.get("_non_persistent_buffers_set") or ()
        for kind in ("_parameters", "_buffers"):
            for name, part in _module_table(state, kind):
                if isinstance(part, StoredTensor) and name not in passing:
                    yield f"{prefix}{name}", part
        children = [
            (f"{prefix}{k}.", m, depth + 1) for k, m in _module_table(state, "_modules") if m
        ]
        if len(stack) + len(children) > _MAX_MODULES:
            raise _UnsupportedFileError("its network is not built as Ultralytics builds them")
        stack.extend(reversed(children))


def _module_table(state: Mapping[str, Any], kind: str) -> list[tuple[str, Any]]:
    table = state.get(kind) or {}
    if not isinstance(table, dict):
        raise _UnsupportedFileError("its network is not built as Ultralytics builds them")
    if not all(isinstance(name, str) and len(name) <= _MAX_NAME_LENGTH for name in table):
        raise _UnsupportedFileError("a part of its network has no proper name")
    return list(table.items())


def _load_tensors(archive: _Archive | _OldFile, parts: dict[str, StoredTensor]) -> dict[str, Any]:
    if sum(math.prod(part.shape) for part in parts.values()) > archive.size:
        raise _UnsupportedFileError("its tensors together are larger than the file")
    by_storage: dict[str, list[str]] = {}
    for name, part in parts.items():
        by_storage.setdefault(part.key, []).append(name)
    loaded: dict[str, Any] = dict.fromkeys(parts)
    for key, names in by_storage.items():
        data = bytearray(archive.read(f"data/{key}"))  # once for all tensors that share it
        for name in names:
            loaded[name] = _load_tensor(data, parts[name])
    return loaded


def _load_tensor(data: bytearray, part: StoredTensor) -> Any:
    """A copy of a stored tensor."""
    import torch

    dtype = getattr(torch, part.dtype)
    if not data:
        return torch.empty(part.shape, dtype=dtype)
    numbers = torch.frombuffer(data, dtype=dtype)
    return numbers.as_strided(part.shape, part.strides, part.offset).clone()
