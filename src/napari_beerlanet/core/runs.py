"""The runs of a project: beginning one, finding them again, and following one that goes on.

A run may belong to another process, to one that was killed, or to yesterday. What it is now is
told by its run.json and by whether the process that it names still lives.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]

from .files import FileError
from .runfiles import RunFolder, read_run

RUNS, MODELS = "runs", "models"
LASTS = frozenset({"end", "failed", "cancelled"})
"""Events that nothing follows."""

_AT_ONCE = 1 << 18  # bytes of events that are read at a time
_CLOCKS = 2.0  # seconds by which the times of files and of processes may differ


class State(StrEnum):
    """What a run is now. `INTERRUPTED`: its process was killed; `DAMAGED`: run.json is no more."""

    NEW = "not begun"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    INTERRUPTED = "interrupted"
    DAMAGED = "damaged"


_WRITTEN = {"finished": State.FINISHED, "cancelled": State.STOPPED, "failed": State.FAILED}


@dataclass(frozen=True)
class Run:
    """A run as it is now; `settings` are a `Recipe`'s, `process` lives where the run goes on."""

    path: Path
    state: State
    epoch: int = 0
    epochs: int | None = None
    message: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    updated: str = ""
    process: int | None = None

    @property
    def name(self) -> str:
        """Of its folder."""
        return self.path.name

    @property
    def best(self) -> Path | None:
        """The checkpoint of the best epoch so far, if there is one."""
        path = self.path / "best.safetensors"
        return path if path.is_file() else None

    @property
    def goes_on(self) -> bool:
        """Whether a process works on it, be it paused."""
        return self.state in (State.RUNNING, State.PAUSED)

    @property
    def can_resume(self) -> bool:
        """Whether it ended before its time."""
        return self.state in (State.NEW, State.STOPPED, State.FAILED, State.INTERRUPTED)


def look_at(path: str | os.PathLike[str]) -> Run:
    """What a run is now; reads small files only, and never raises."""
    folder = Path(path)
    try:
        content = read_run(folder / "run.json")
    except FileError as error:
        return Run(folder, State.DAMAGED, message=str(error))
    process = _living(folder, content)
    state = _WRITTEN.get(str(content.get("state")), State.INTERRUPTED)
    if content.get("state") in ("new", "waiting"):
        state = State.NEW
    if process is not None:
        state = State.PAUSED if _is_stopped(process) else State.RUNNING
    settings = content["settings"]
    return Run(
        folder,
        state,
        _number(content.get("epoch")) or 0,
        _number(settings.get("epochs")),
        str(content.get("message") or ""),
        settings,
        str(content.get("updated") or ""),
        None if process is None else int(process.pid),
    )


def list_runs(project: str | os.PathLike[str]) -> list[Run]:
    """All runs of a project's folder, the newest first; none where there is no such folder."""
    try:
        found = [entry for entry in (Path(project) / RUNS).iterdir() if entry.is_dir()]
    except OSError:
        return []
    return sorted(map(look_at, found), key=lambda run: (run.updated, run.name), reverse=True)


def new_run(project: str | os.PathLike[str], settings: Mapping[str, Any]) -> Path:
    """A new folder below the project's `runs`, whose run.json has these settings."""
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    name = f"{now}_{settings.get('scope', 'all')}"
    runs = Path(project) / RUNS
    try:
        if not Path(project).is_dir():
            raise FileError(f"{project}: there is no such folder; connect the drive that it is on.")
        runs.mkdir(exist_ok=True)
        path = _unused(runs, name)
        with RunFolder(path, locked=False) as folder:
            folder.write_run(settings=dict(settings), state="new", epoch=0)
    except OSError as error:
        why = str(error.strerror or error).lower()
        raise FileError(f"{runs}: a run cannot be written there ({why}).") from error
    return path


def _unused(runs: Path, name: str) -> Path:
    for k in range(1, 1000):
        path = runs / (name if k == 1 else f"{name}_{k}")
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise FileError(f"{runs}: too many runs of the same name.")


class EventTail:
    """What is added to a run's progress.jsonl, line by line.

    A line that is not finished waits for its rest; what is no event is passed over. `latest` begins
    that many bytes before the end.
    """

    def __init__(self, folder: str | os.PathLike[str], latest: int | None = None) -> None:
        self.path = Path(folder) / "progress.jsonl"
        self.offset = 0
        if latest is not None and (size := self._size()) > latest:
            self.offset = size - latest
            self.offset = self._after_the_next_line()

    def read(self) -> list[dict[str, Any]]:
        """The events since the last call, not too many at once."""
        if self._size() < self.offset:  # begun anew
            self.offset = 0
        whole = self._bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [event for line in whole.splitlines() if (event := parse_event(line)) is not None]

    def skip(self) -> None:
        """Pass over what is there."""
        self.offset = self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _bytes(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                file.seek(self.offset)
                return file.read(_AT_ONCE)
        except OSError:  # not yet there, or the drive is gone
            return b""

    def _after_the_next_line(self) -> int:
        return self.offset + self._bytes().find(b"\n") + 1


def parse_event(line: bytes | str) -> dict[str, Any] | None:
    """A line of events, None for anything else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if good else None


def _living(folder: Path, content: Mapping[str, Any]) -> Any:
    """The process that works on a run, None where it is gone or its number is another's now."""
    number = _number(content.get("process"))
    if content.get("state") != "running" or number is None:
        return None
    try:
        process = psutil.Process(number)
        locked = (folder / ".lock").stat().st_mtime
        ours = process.create_time() <= locked + _CLOCKS
        return process if ours and process.status() != psutil.STATUS_ZOMBIE else None
    except (psutil.Error, OSError):
        return None


def _is_stopped(process: Any) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
