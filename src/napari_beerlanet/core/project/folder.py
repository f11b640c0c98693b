"""Create, open and lock a project's folder; change many of its files in one transaction.

After a kill at any moment, all files of a transaction are old or all are new. New files are written
to a staging folder first. Then one file, the journal, says what is to be done: which of them go
where, and what is removed. From the moment it exists the change holds: whoever finds it replays it,
as often as it takes. Without it, what was staged is removed.
"""

from __future__ import annotations

import errno
import json
import os
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path, PurePosixPath
from typing import Any

from napari_beerlanet.core.common.locking import FolderLock
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.storage import (
    FileError,
    atomic_path,
    linked_folder,
    regular_file,
    remove_partial_files,
    remove_path,
)
from napari_beerlanet.core.formats.class_folders import CELLS_DIR
from napari_beerlanet.core.project.files import (
    ANNOTATIONS_DIR,
    DATA_FILE,
    FORMAT_VERSION,
    PROJECT_FILE,
    SUBFOLDERS,
    ProjectError,
    ProjectManifest,
    clean_class_names,
    encode_data_yaml,
    encode_manifest,
    explain_disk_errors,
    read_manifest,
)

JOURNAL_FILE = ".journal.json"
STAGE_PREFIX = ".stage-"
_LOCK_FILE = ".lock"


def create_project_folder(root: Path, classes: Sequence[str], seed: int) -> None:
    """Make an empty project; a folder that holds another dataset is refused."""
    names = clean_class_names(classes)
    if (root / PROJECT_FILE).exists():
        raise ProjectError(f"{root}: there is a project in this folder already; open it.")
    with explain_disk_errors(root, "make a project there"):
        foreign = [path for path in (root / "images", root / "labels") if _has_files(path)]
        foreign += [root / DATA_FILE] if (root / DATA_FILE).exists() else []
        if foreign:
            raise ProjectError(
                f"{root}: holds {foreign[0].name} of something else; choose a new folder, and "
                "import this one."
            )
        for folder in SUBFOLDERS:
            (root / folder).mkdir(parents=True, exist_ok=True)
        manifest = ProjectManifest(names, seed, datetime.now(UTC).isoformat(timespec="seconds"))
        _write_atomically(root / PROJECT_FILE, encode_manifest(manifest))
        _write_atomically(root / DATA_FILE, encode_data_yaml(manifest))


def open_project_folder(
    root: Path, read_only: bool, break_lock: bool
) -> tuple[FolderLock | None, str]:
    """The lock of a project's folder, or None and why it is read-only.

    A `LockedError` where another program has it open.
    """
    if not (root / PROJECT_FILE).is_file():
        gone = "no project in this folder" if root.is_dir() else "there is no such folder"
        raise ProjectError(f"{root}: {gone}; make one, or connect the drive that it is on.")
    with explain_disk_errors(root, "open the project"):
        newer = read_manifest(root).format > FORMAT_VERSION
    if newer:
        return None, (
            f"{root}: of a newer version of this program, so it is read-only; update "
            "napari-beerlanet to change it."
        )
    if read_only:
        return None, f"{root}: opened read-only."
    linked = linked_folder(root, (*SUBFOLDERS, CELLS_DIR))
    if linked:
        return None, f"{linked}, so the project is read-only; put the folder itself in its place."
    try:
        lock = FolderLock(
            root / _LOCK_FILE,
            break_lock,
            busy="open in another viewer",
            advice="close it there, or open the project here read-only",
        )
    except OSError:
        return None, _not_writable_message(root)
    try:
        if not _is_writable(root):
            lock.release()
            return None, _not_writable_message(root)
        with explain_disk_errors(root, "finish the last change"):
            _recover(root)
    except BaseException:
        lock.release()
        raise
    return lock, ""


def _not_writable_message(root: Path) -> str:
    return (
        f"{root}: this folder cannot be written to, so the project is read-only; copy it to "
        "where you may write."
    )


def _is_writable(root: Path) -> bool:
    """Whether files can be made here; that there is no space left is another matter."""
    for folder in (root, root / ANNOTATIONS_DIR):
        probe = folder / f".{uuid.uuid4().hex[:16]}.partial"
        try:
            probe.touch()
            probe.unlink()
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
                return False
    return True


def _recover(root: Path) -> None:
    """Finish or clear away what a killed program has left; make what is missing."""
    replay_journal(root)
    for folder in (".", *SUBFOLDERS):
        (root / folder).mkdir(exist_ok=True, parents=True)
        remove_partial_files(root / folder)
    if not (root / DATA_FILE).exists():
        _write_atomically(root / DATA_FILE, encode_data_yaml(read_manifest(root)))


def _write_atomically(path: Path, content: bytes) -> None:
    with atomic_path(path) as unfinished:
        unfinished.write_bytes(content)


def _has_files(folder: Path) -> bool:
    return any(not path.is_dir() for path in folder.rglob("*"))


# --- transactions ---


@dataclass
class Transaction:
    """A change being prepared; paths are relative to the project's folder, with /.

    `moves` are done in their order, then `removals` in theirs, so that a crop's labels can be
    there before it and go after it.
    """

    root: Path
    stage: Path
    moves: list[tuple[str, str]] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)
    written: int = 0

    def stage_file(self, content: bytes) -> str:
        """Write a file whose place is not known yet; returns what `move` takes as the old one."""
        path = self.stage / f"{self.written:06d}"
        self.written += 1
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return f"{self.stage.name}/{path.name}"

    def write(self, where: str, content: bytes) -> None:
        """A file to be at `where`."""
        self.move(self.stage_file(content), where)

    def move(self, old: str, new: str) -> None:
        """A file of the project to go to another place."""
        self.moves.append((old, new))

    def remove(self, where: str) -> None:
        """A file to be gone; no matter if it is already."""
        self.removals.append(where)


@contextmanager
def transaction(root: Path) -> Iterator[Transaction]:
    """Prepare a change in the block; at its end it is carried out, where it raises it is not."""
    stage = root / f"{STAGE_PREFIX}{uuid.uuid4().hex[:12]}"
    stage.mkdir()
    try:
        change = Transaction(root, stage)
        yield change
        content = {"stage": stage.name, "moves": change.moves, "removals": change.removals}
        with atomic_path(root / JOURNAL_FILE) as unfinished:
            unfinished.write_text(json.dumps(content), encoding="utf-8")
    except BaseException:
        remove_path(stage)
        raise
    replay_journal(root)


def has_unfinished_transaction(root: Path) -> bool:
    """Whether a change was started and not finished."""
    return (root / JOURNAL_FILE).exists()


def replay_journal(root: Path) -> bool:
    """Finish what the journal says, if there is one, and clear away what never held."""
    journal = root / JOURNAL_FILE
    pending = journal.exists()
    if pending:
        content = _read_journal(journal)
        _fsync_folder(root)
        for old, new in content["moves"]:
            _move_file(_path_inside(root, old), _path_inside(root, new))
        for where in content["removals"]:
            _path_inside(root, where).unlink(missing_ok=True)
        journal.unlink()
    for stage in root.glob(f"{STAGE_PREFIX}*"):
        remove_path(stage)
    return pending


def _read_journal(journal: Path) -> dict[str, Any]:
    try:
        content = json.loads(regular_file(journal).read_text(encoding="utf-8"))
        content["moves"], content["removals"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{journal}: damaged, so a change of the project cannot be finished; remove this file "
            "and add the last image again."
        ) from error
    return dict(content)


def _move_file(old: Path, new: Path) -> None:
    """Done already, by one who was killed after it, if the old is gone."""
    if old.exists():
        new.parent.mkdir(parents=True, exist_ok=True)
        os.replace(old, new)


def _path_inside(root: Path, where: str) -> Path:
    """A path of the journal, which must not lead out of the folder."""
    parts = PurePosixPath(where).parts
    if not parts or ".." in parts or PurePosixPath(where).is_absolute() or ":" in parts[0]:
        raise FileError(
            f"{root / JOURNAL_FILE}: names {quoted(where)}, which is not in the project."
        )
    return root.joinpath(*parts)


def _fsync_folder(folder: Path) -> None:
    """Names to the disk: the journal must not be lost while what it has done is kept."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
