"""What is to be said of a process that has ended without a word of its own."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from napari_beerlanet.core.wording import sentence

_FULL = 20e6  # bytes that are free on a disk which is as good as full
_LAST = 2000  # bytes of what a process has printed


@dataclass(frozen=True)
class Words:
    """What a kind of run is called, how to go on with one, and after what it then goes on."""

    name: str
    again: str
    after: str


TRAINING = Words("training", "resume", "the last finished epoch")


def why_it_ended(
    folder: Path,
    code: int | None = None,
    error: BaseException | None = None,
    words: Words = TRAINING,
) -> str:
    """One sentence with the way out; `code` is the process's, below 0 for a signal."""
    name, again = words.name, words.again
    if error is not None:
        return f"{name.capitalize()} could not be started: {sentence(error)}"
    if not folder.is_dir():
        return f"{folder}: the folder is gone; connect the drive that it is on, then {again}."
    if is_full(folder):
        return f"{folder}: no space is left on the drive; make room, then {again}."
    printed = last_line(folder / "process.log")
    if code is not None and code > 0:
        return printed or f"The {name} process ended with status {code}; {again} to try again."
    return f"The {name} process was killed; {again} to go on after {words.after}."


def is_full(folder: Path) -> bool:
    """Whether the drive has no room for a checkpoint."""
    try:
        return shutil.disk_usage(folder).free < _FULL
    except OSError:
        return False


def last_line(path: Path) -> str:
    """The last line that a process printed: the sentence on why it ended, or of a traceback."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _LAST, 0))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")
