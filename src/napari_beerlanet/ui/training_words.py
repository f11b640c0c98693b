"""What is to be said of a training process that has ended without a word of its own."""

from __future__ import annotations

import shutil
from pathlib import Path

from napari_beerlanet.core.wording import sentence

_FULL = 20e6  # bytes that are free on a disk which is as good as full
_LAST = 2000  # bytes of what a process has printed


def why_it_ended(folder: Path, code: int | None = None, error: BaseException | None = None) -> str:
    """One sentence with the way out; `code` is the process's, below 0 for a signal."""
    if error is not None:
        return f"Training could not be started: {sentence(error)}"
    if not folder.is_dir():
        return f"{folder}: the folder is gone; connect the drive that it is on, then resume."
    if is_full(folder):
        return f"{folder}: no space is left on the drive; make room, then resume."
    printed = last_line(folder / "process.log")
    if code is not None and code > 0:
        return printed or f"The training process ended with status {code}; resume to try again."
    return "The training process was killed; resume to go on after the last finished epoch."


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
