"""Many files changed as one: after a kill at any moment, all of them are old or all are new.

New files are written to a folder of their own first. Then one file, the journal, says what is to be
done: which of them go where, and what is removed. From the moment it is there the change holds:
whoever finds it carries it out, as often as it takes. Without it, what was prepared is rubbish.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from .files import FileError, atomic_path, remove

JOURNAL = ".journal.json"
STAGE = ".stage-"


@dataclass
class Batch:
    """A change being prepared; paths are relative to the project's folder, with /.

    `moves` are done in their order, then `removals` in theirs, so that a piece's labels can be
    there before it and go after it.
    """

    root: Path
    stage: Path
    moves: list[tuple[str, str]] = field(default_factory=list)
    removals: list[str] = field(default_factory=list)
    written: int = 0

    def put(self, content: bytes) -> str:
        """Write a file whose place is not known yet; returns what `move` takes as the old one."""
        path = self.stage / f"{self.written:06d}"
        self.written += 1
        with path.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return f"{self.stage.name}/{path.name}"

    def add(self, where: str, content: bytes) -> None:
        """A file to be at `where`."""
        self.move(self.put(content), where)

    def move(self, old: str, new: str) -> None:
        """A file of the project to go to another place."""
        self.moves.append((old, new))

    def remove(self, where: str) -> None:
        """A file to be gone; no matter if it is already."""
        self.removals.append(where)


@contextmanager
def changing(root: Path) -> Iterator[Batch]:
    """Prepare a change in the block; at its end it is carried out, where it raises it is not."""
    stage = root / f"{STAGE}{uuid.uuid4().hex[:12]}"
    stage.mkdir()
    try:
        batch = Batch(root, stage)
        yield batch
        content = {"stage": stage.name, "moves": batch.moves, "removals": batch.removals}
        with atomic_path(root / JOURNAL) as unfinished:
            unfinished.write_text(json.dumps(content), encoding="utf-8")
    except BaseException:
        remove(stage)
        raise
    carry_out(root)


def pending(root: Path) -> bool:
    """Whether a change has been begun and not finished."""
    return (root / JOURNAL).exists()


def carry_out(root: Path) -> bool:
    """Finish what the journal says, if there is one, and clear away what never held."""
    journal = root / JOURNAL
    found = journal.exists()
    if found:
        content = _read(journal)
        _flush_folder(root)
        for old, new in content["moves"]:
            _move(_inside(root, old), _inside(root, new))
        for where in content["removals"]:
            _inside(root, where).unlink(missing_ok=True)
        journal.unlink()
    for stage in root.glob(f"{STAGE}*"):
        remove(stage)
    return found


def clear_partial(folder: Path) -> None:
    """Remove what a kill during `atomic_path` has left in a folder."""
    for unfinished in folder.glob(".*.partial*"):
        remove(unfinished)


def _read(journal: Path) -> dict[str, Any]:
    try:
        content = json.loads(journal.read_text(encoding="utf-8"))
        content["moves"], content["removals"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FileError(
            f"{journal}: damaged, so a change of the project cannot be finished; remove this file "
            "and add the last image again."
        ) from error
    return dict(content)


def _move(old: Path, new: Path) -> None:
    """Done already, by one who was killed after it, if the old is gone."""
    if old.exists():
        new.parent.mkdir(parents=True, exist_ok=True)
        os.replace(old, new)


def _inside(root: Path, where: str) -> Path:
    """A path of the journal, which must not lead out of the folder."""
    parts = PurePosixPath(where).parts
    if not parts or ".." in parts or PurePosixPath(where).is_absolute() or ":" in parts[0]:
        raise FileError(f"{root / JOURNAL}: names {where!r}, which is not in the project.")
    return root.joinpath(*parts)


def _flush_folder(folder: Path) -> None:
    """Names to the disk: the journal must not be lost while what it has done is kept."""
    if os.name != "nt":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
