"""A project's folder made, opened for one program, and put in order after a kill."""

from __future__ import annotations

import errno
import uuid
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from . import journal
from .files import atomic_path
from .locks import FolderLock
from .projectfiles import (
    ANNOTATIONS,
    DATA,
    FOLDERS,
    FORMAT,
    PROJECT,
    Manifest,
    ProjectError,
    checked_names,
    explained,
    read_manifest,
    write_data,
    write_manifest,
)

_LOCK = ".lock"


def make_folder(root: Path, classes: Sequence[str], seed: int) -> None:
    """Make an empty project; a folder that holds another dataset is refused."""
    names = checked_names(classes)
    if (root / PROJECT).exists():
        raise ProjectError(f"{root}: there is a project in this folder already; open it.")
    with explained(root, "make a project there"):
        foreign = [path for path in (root / "images", root / "labels") if _has_files(path)]
        foreign += [root / DATA] if (root / DATA).exists() else []
        if foreign:
            raise ProjectError(
                f"{root}: holds {foreign[0].name} of something else; choose a new folder, and "
                "import this one."
            )
        for folder in FOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        manifest = Manifest(names, seed, datetime.now(UTC).isoformat(timespec="seconds"))
        _write(root / PROJECT, write_manifest(manifest))
        _write(root / DATA, write_data(manifest))


def open_folder(root: Path, read_only: bool, take_over: bool) -> tuple[FolderLock | None, str]:
    """The lock of a project's folder, or None and why it can only be looked at.

    A `LockedError` where another program has it open.
    """
    if not (root / PROJECT).is_file():
        gone = "no project in this folder" if root.is_dir() else "there is no such folder"
        raise ProjectError(f"{root}: {gone}; make one, or connect the drive that it is on.")
    with explained(root, "open the project"):
        newer = read_manifest(root).format > FORMAT
    if newer:
        return None, (
            f"{root}: of a newer version of this program, so it is open to look at only; update "
            "napari-beerlanet to change it."
        )
    if read_only:
        return None, f"{root}: open to look at only."
    try:
        lock = FolderLock(root / _LOCK, take_over)
    except OSError:
        return None, _not_writable(root)
    try:
        if not _may_write(root):
            lock.release()
            return None, _not_writable(root)
        with explained(root, "finish the last change"):
            _tidy(root)
    except BaseException:
        lock.release()
        raise
    return lock, ""


def _not_writable(root: Path) -> str:
    return (
        f"{root}: this folder cannot be written to, so the project is open to look at only; copy "
        "it to where you may write."
    )


def _may_write(root: Path) -> bool:
    """Whether files can be made here; that there is no space left is another matter."""
    for folder in (root, root / ANNOTATIONS):
        probe = folder / f".{uuid.uuid4().hex[:16]}.partial"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return False
    return True


def _tidy(root: Path) -> None:
    """Finish or clear away what a killed program has left; make what is missing."""
    journal.carry_out(root)
    for folder in (".", *FOLDERS):
        (root / folder).mkdir(exist_ok=True, parents=True)
        journal.clear_partial(root / folder)
    if not (root / DATA).exists():
        _write(root / DATA, write_data(read_manifest(root)))


def _write(path: Path, content: bytes) -> None:
    with atomic_path(path) as unfinished:
        unfinished.write_bytes(content)


def _has_files(folder: Path) -> bool:
    return any(not path.is_dir() for path in folder.rglob("*"))
