"""Files on disk: atomic writes, JSON, hashes of files and pixels."""

from __future__ import annotations

import errno
import hashlib
import itertools
import json
import math
import os
import re
import shutil
import socket
import time
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from napari_beerlanet.core.common.arrays import load_array
from napari_beerlanet.core.common.messages import error_detail, quoted, shortened, system_reason
from napari_beerlanet.core.common.progress import Progress, Report

_MAX_FULL_HASH_BYTES = 1 << 28  # up to which all of an image is hashed; of a larger one, a sample
_HASH_PATCHES_PER_AXIS, _HASH_PATCH_SIDE = 8, 256
_HASHED_ROWS = 256  # that are in memory at a time of a lazy image

_MAX_YAML_BYTES = 1 << 20  # ten thousand class names have room
_MAX_YAML_DEPTH = 100  # libyaml calls itself for each, until the process crashes

_PROCESS = uuid.uuid4().hex[:8]  # tells this process from an earlier one of the same number
_PARTIAL = re.compile(
    r"\.(?P<computer>[0-9a-f]{8})-(?P<number>[0-9]{1,9})-(?P<process>[0-9a-f]{8})-[0-9a-f]{8}\.partial"
)
_LONG_LOOK_S = 0.05
_LOOK_INTERVAL = 50  # between two long looks into a folder, as many times as long as a look
_last_look: dict[Path, tuple[float, float]] = {}  # by folder: when, and seconds that it took
_DISK_ERRNOS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_PLAIN_TAGS = (None, "!", "tag:yaml.org,2002:str")

_flush_later: ContextVar[bool] = ContextVar("flush_later", default=False)
_FORMULA = re.compile(r"'*[=+\-@\t\r]")  # how a cell starts that a spreadsheet may execute


class FileError(ValueError):
    """A file that cannot be used; the message is one sentence that names it and the problem."""


class DataError(FileError):
    """Data that nothing can be learned from; the message names each file and what is wrong."""


@contextmanager
def atomic_path(path: str | os.PathLike[str], *, durable: bool = True) -> Iterator[Path]:
    """A path beside `path` to write a file or folder to, which becomes `path` at the end.

    Where the block raises (Ctrl-C, too) nothing is left behind, and what stood at `path` stays.
    What a kill leaves is removed by the next write to the same folder.
    `durable` waits until a file is on the disk, which takes minutes while the disk writes gigabytes
    of others. Without it a power cut may leave an empty file: for caches and conveniences, whose
    readers take a damaged file for none.
    """
    path = Path(path)
    # The suffix stays, as writers go by it; the name does not, as it may be of the longest length.
    unfinished = path.with_name(_partial_name(path.suffix))
    _remove_dead_files(path.parent)
    try:
        yield unfinished
        if durable:
            _flush_to_disk(unfinished)
        _replace_path(unfinished, path)
    except BaseException as error:
        remove_path(unfinished)
        _name_place(error, path)
        raise


def _name_place(error: BaseException, path: Path) -> None:
    """Say where the disk is full: writing to an open file tells no name."""
    if isinstance(error, OSError) and error.errno in _DISK_ERRNOS and error.filename is None:
        error.filename = str(path)


def remove_partial_files(folder: Path) -> None:
    """Remove all that is half written in a folder, for whoever alone may write there."""
    for unfinished in folder.glob(".*.partial*"):
        remove_path(unfinished)


@cache
def _computer() -> str:
    """Return what tells this computer, or container, from others that write to the same disk."""
    try:
        machine = Path("/etc/machine-id").read_text()
        machine += str(os.stat("/proc/self/ns/pid").st_ino)  # what numbers its processes
    except OSError:
        machine = str(uuid.getnode())
    return hashlib.sha256(f"{socket.gethostname()} {machine}".encode()).hexdigest()[:8]


def _partial_name(suffix: str = "") -> str:
    """Return a name for what is being written, which says by whom."""
    return f".{_computer()}-{os.getpid()}-{_PROCESS}-{uuid.uuid4().hex[:8]}.partial{suffix}"


def _remove_dead_files(folder: Path) -> None:
    """Remove what processes of this computer that are gone were writing to a folder."""
    looked, took = _last_look.get(folder, (-math.inf, 0.0))
    started = time.monotonic()
    if (
        took > _LONG_LOOK_S and started - looked < _LOOK_INTERVAL * took
    ):  # many thousand files take their time
        return
    import psutil

    started = time.monotonic()  # the first import is not the folder's doing
    with suppress(OSError):
        for name in os.listdir(folder):
            found = _PARTIAL.match(name)
            if found is None or found["computer"] != _computer():
                continue
            if int(found["number"]) == os.getpid():
                dead = found["process"] != _PROCESS
            else:
                dead = not psutil.pid_exists(int(found["number"]))
            if dead:
                shutil.rmtree(folder / name, ignore_errors=True)
                with suppress(OSError):
                    (folder / name).unlink(missing_ok=True)
    _last_look[folder] = started, time.monotonic() - started


@contextmanager
def staged_folder(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """An empty folder inside `folder` to write files to, which move to `folder` at the end.

    Where the block raises (Ctrl-C, too), none of them does, and a folder that was not there before
    is gone again. Files that are replaced stay whole at every moment; of those with a symbolic
    link's name the link is replaced, not what it leads to.
    """
    folder = Path(folder)
    new = [path for path in (folder, *folder.parents) if not path.exists()]
    stage = folder / _partial_name()
    _remove_dead_files(folder)
    token = _flush_later.set(True)
    try:
        stage.mkdir(parents=True)
        yield stage
        _flush_all(stage)
        for path in sorted(stage.iterdir()):
            _replace_path(path, folder / path.name)
        remove_path(stage)
    except BaseException as error:
        remove_path(stage)
        _name_place(error, folder)
        for path in new:
            try:
                path.rmdir()
            except OSError:
                break
        raise
    finally:
        _flush_later.reset(token)


def linked_folder(folder: Path, inside: Iterable[str]) -> str:
    """Why nothing may be written to folders in a folder, "" where nothing speaks against it.

    One that is a link leads to where nobody has asked us to write.
    """
    for name in inside:
        for path in (folder / name, *(folder / name).parents):
            if path == folder:
                break
            if path.is_symlink():
                return f"{path}: a link to another folder, and results stay in {folder}"
    return ""


def check_no_linked_folder(folder: Path, *inside: str) -> None:
    """A `FileError` where a folder that is written to, in a results folder, is a link."""
    reason = linked_folder(folder, inside)
    if reason:
        raise FileError(f"{reason}; remove the link, or choose another folder for results.")


def _flush_all(folder: Path) -> None:
    if hasattr(os, "sync"):  # one call for all, where each of many thousand files takes its time
        os.sync()
        return
    for path in folder.iterdir():
        with path.open("r+b") as file:
            os.fsync(file.fileno())


def remove_path(path: Path) -> None:
    """Remove a file or folder; no matter if it is not there."""
    if path.is_dir() and not path.is_symlink():
        for _ in range(40):
            shutil.rmtree(path, ignore_errors=True)
            if not path.exists():
                return
            time.sleep(0.05)  # after Ctrl-C zarr's own thread still finishes what it has begun
    else:
        path.unlink(missing_ok=True)


def _flush_to_disk(path: Path) -> None:
    """To the disk before the name says so: a power cut must not leave an empty finished file."""
    if path.is_file() and not _flush_later.get():
        with path.open("r+b") as file:
            os.fsync(file.fileno())


def _replace_path(new: Path, path: Path) -> None:
    if not path.is_dir() or path.is_symlink():
        os.replace(new, path)
        return
    old = path.with_name(_partial_name())  # no system replaces a full folder
    os.replace(path, old)
    try:
        os.replace(new, path)
    except BaseException:
        os.replace(old, path)
        raise
    remove_path(old)


def with_file_check(path: Path | None, report: Report) -> Report:
    """A report that says so where the file that is worked on has vanished, or is another one.

    What is open may be readable for a while, and missing chunks of a zarr folder read as black.
    """
    before = {} if path is None else file_stamp(path)

    def checked(progress: Progress) -> None:
        if path is not None and not path.exists():
            raise FileError(f"{path}: no longer there; what was found so far stays.")
        if path is not None and file_stamp(path) != before:
            raise FileError(f"{path}: it changed while it was being read; open it again.")
        report(progress)

    return checked


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path; an `OSError` where a pipe or a device is there.

    Reading from these would wait for ever, or never end; a file in an archive may be a link to one.
    """
    path = Path(path)
    if path.exists() and not path.is_file() and not path.is_dir():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    return path


def read_json(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a JSON file that holds an object, or a `FileError`."""
    try:
        content = json.loads(regular_file(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {system_reason(error)}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not a JSON file ({error}).") from error
    if not isinstance(content, dict):
        raise FileError(f"{path}: not a JSON file of ours, as it holds no object.")
    return content


def read_json_of_kind(
    path: str | os.PathLike[str], kinds: Collection[str], version: int, what: str
) -> dict[str, Any]:
    """The content of a JSON file of ours, which says its kind and version; or a `FileError`.

    `what` such a file is called on the screen, such as "a review".
    """
    content = read_json(path)
    if content.get("kind") not in kinds:
        raise FileError(f"{path}: not {what} of napari-beerlanet.")
    if content.get("version") != version:
        raise FileError(
            f"{path}: {what} of version {quoted(content.get('version'))}, where version {version} "
            "is known; a newer napari-beerlanet may read it."
        )
    return content


def read_json_or_empty(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of such a file, {} where there is none or it is damaged."""
    try:
        return read_json(path)
    except FileError:
        return {}


def read_yaml(path: str | os.PathLike[str]) -> Any:
    """The content of a YAML file, or a `FileError`; settings and lists of classes are small."""
    import yaml

    path = Path(path)
    try:
        if regular_file(path).stat().st_size > _MAX_YAML_BYTES:
            raise FileError(f"{path}: larger than {_MAX_YAML_BYTES >> 20} MB, too large for YAML.")
        text = path.read_text(encoding="utf-8-sig")
        # libyaml is many times as fast, and is not everywhere.
        loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
        depth = 0
        for event in yaml.parse(text, Loader=loader):
            depth += isinstance(event, yaml.CollectionStartEvent)
            depth -= isinstance(event, yaml.CollectionEndEvent)
            tag = getattr(event, "tag", None)
            if tag not in _PLAIN_TAGS:
                name = shortened(tag.replace("tag:yaml.org,2002:", "!!"))
                raise FileError(f"{path}: a tag ({name}), which is not read; write plain values.")
            if isinstance(event, yaml.ScalarEvent) and event.value == "<<":
                raise FileError(
                    f"{path}: a merge key (<<), which is not read; write its entries out."
                )
            if depth > _MAX_YAML_DEPTH:
                raise FileError(f"{path}: nested deeper than any settings.")
        return yaml.load(text, Loader=loader)
    except OSError as error:
        reason = "there is no such file" if not path.exists() else system_reason(error)
        raise FileError(f"{path}: {reason}.") from error
    except FileError:
        raise
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FileError(f"{path}: not a YAML file ({error_detail(error, 160)}).") from error


def read_settings(path: Path) -> Any:
    """The content of a YAML file of settings, or a `FileError` that says so."""
    try:
        path.stat()
        return read_yaml(path)
    except OSError as error:
        raise FileError(f"{path}: {system_reason(error)}.") from error
    except FileError as error:
        reason = str(error).removeprefix(f"{path}: ").rstrip(".")
        raise FileError(f"{path}: cannot be read as settings ({reason}).") from error


def file_stamp(path: Path) -> dict[str, Any]:
    """Path, size and time of a file; {} where there is none."""
    try:
        status = path.stat()
    except OSError:
        return {}  # reading it will say what is wrong
    return {"path": os.path.abspath(path), "size": status.st_size, "mtime_ns": status.st_mtime_ns}


def file_hash(path: Path) -> str:
    """SHA-256 in hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def settings_hash(settings: Mapping[str, Any]) -> str:
    """SHA-256 of plain values: the same for the same settings, whatever their order."""
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def seeded_fraction(seed: int, name: str) -> float:
    """Return a number from 0 to 1 that depends on nothing but these two."""
    digest = hashlib.sha256(f"{seed}\0{name}".encode("utf-8", "surrogatepass")).digest()
    return int.from_bytes(digest[:8], "big") / 2**64


def write_json(path: Path, content: Mapping[str, Any], *, durable: bool = True) -> None:
    """Whole or not at all; `durable` as in `atomic_path`."""
    with atomic_path(path, durable=durable) as unfinished:
        unfinished.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


def csv_cell(value: Any) -> Any:
    """A value for a CSV file that a spreadsheet does not take for a formula: "=1+1" as "'=1+1".

    Numbers, also as text, stay as they are. `csv_text` gives the text back.
    """
    if not isinstance(value, str) or not _FORMULA.match(value) or _is_number(value):
        return value
    return f"'{value}"


def csv_text(cell: str) -> str:
    """The text that `csv_cell` was given."""
    return cell[1:] if cell.startswith("'") and _FORMULA.match(cell) else cell


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def pixel_hash(pixels: Any) -> str:
    """SHA-256 (hexadecimal) of the shape, type and values of an array, also a lazy one."""
    shape = tuple(int(n) for n in pixels.shape)
    total = hashlib.sha256(f"{shape} {np.dtype(pixels.dtype)}".encode())
    for row in range(0, shape[0], _HASHED_ROWS):
        part = load_array(pixels[row : row + _HASHED_ROWS])
        total.update(np.ascontiguousarray(part).data)
    return total.hexdigest()


def pixel_digest(pixels: Any) -> str:
    """What identifies an image in a project: its `pixel_hash`; of a very large one, of a sample.

    The sample are patches all over it.
    """
    shape, dtype = tuple(int(n) for n in pixels.shape), np.dtype(pixels.dtype)
    if math.prod(shape) * dtype.itemsize <= _MAX_FULL_HASH_BYTES:
        return f"sha256:{pixel_hash(pixels)}"
    total = hashlib.sha256(f"{shape} {dtype}".encode())
    rows, columns = (
        np.linspace(0, max(length - _HASH_PATCH_SIDE, 0), _HASH_PATCHES_PER_AXIS).astype(int)
        for length in shape[:2]
    )
    for y, x in itertools.product(rows, columns):
        patch = load_array(pixels[y : y + _HASH_PATCH_SIDE, x : x + _HASH_PATCH_SIDE])
        total.update(np.ascontiguousarray(patch).data)
    return f"sampled-sha256:{total.hexdigest()}"
