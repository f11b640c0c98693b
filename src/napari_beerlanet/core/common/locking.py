"""An exclusive lock of a folder that ends with the process that holds it.

The operating system's lock on a file decides. Where a disk has none (some network drives), the
owner written in the file does: a process of this computer that is gone holds nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from filelock import lock_descriptor, unlock_descriptor

from napari_beerlanet.core.common.storage import FileError, regular_file

LockState = Literal["locked", "taken", "unknown"]

_POLL_INTERVAL_S = 0.2


class LockedError(FileError):
    """Somebody else writes to the folder; `owner` is what is known: process, host, since."""

    def __init__(self, message: str, owner: dict[str, Any]) -> None:
        super().__init__(message)
        self.owner = owner


class FolderLock:
    """The lock of a folder, held from making it until `release`; a `LockedError` if taken.

    `break_lock` disregards the owner in the file where the disk has no locks of its own. Processes
    that a killed owner has started may outlive it and hold its lock: `timeout` seconds are given
    them to end. `busy` says what others do there, and `advice` what can be done about it.
    """

    def __init__(
        self,
        path: Path,
        break_lock: bool = False,
        timeout: float = 0.0,
        busy: str = "in use",
        advice: str = "",
    ) -> None:
        self.path = path
        self._file: IO[str] | None = regular_file(path).open("a+", encoding="utf-8")
        deadline = time.monotonic() + timeout
        while not self._acquire(break_lock):
            owner = read_owner(path)
            if time.monotonic() >= deadline or "process" not in owner or _is_alive(owner):
                self._file.close()
                self._file = None
                raise LockedError(_locked_message(path, owner, busy, advice), owner)
            time.sleep(_POLL_INTERVAL_S)
        self._write_owner()

    def _acquire(self, break_lock: bool) -> bool:
        assert self._file is not None
        state = try_lock(self._file)
        if state == "unknown":
            owner = read_owner(self.path)
            return break_lock or owner.get("process") == os.getpid() or not _is_alive(owner)
        return state == "locked"

    @property
    def held(self) -> bool:
        """Whether it has not been released."""
        return self._file is not None

    def release(self) -> None:
        """Let others write."""
        if self._file is not None:
            with suppress(OSError):  # the drive may be gone, and the lock with it
                self._file.seek(0)
                self._file.truncate()
            with suppress(OSError):  # closing would not do where a forked process has the file, too
                unlock_descriptor(self._file.fileno())
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _write_owner(self) -> None:
        assert self._file is not None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        owner = {"process": os.getpid(), "host": socket.gethostname(), "since": now}
        self._file.seek(0)
        self._file.truncate()
        # A blank first: Windows keeps others from reading the first byte, which is the locked one.
        self._file.write(f" {json.dumps(owner)}")
        self._file.flush()


def read_owner(path: Path) -> dict[str, Any]:
    """The owner in a lock's file, {} where there is none."""
    try:
        content = json.loads(_read_text(path))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def local_owner(path: Path) -> int | None:
    """The process on this computer that holds a lock, None where there is none."""
    if not is_locked(path):
        return None
    owner = read_owner(path)
    number = owner.get("process")
    return number if owner.get("host") == socket.gethostname() and isinstance(number, int) else None


def _read_text(path: Path) -> str:
    with regular_file(path).open("rb") as file:
        try:
            return file.read().decode("utf-8")
        except PermissionError:
            file.seek(1)
            return file.read().decode("utf-8")


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of this file now, as far as the system knows."""
    return lock_state(path) == "taken"


def lock_state(path: Path) -> LockState:
    """Whether somebody holds the lock of this file now: "taken", "locked" (by none), "unknown"."""
    try:
        with regular_file(path).open("r+", encoding="utf-8") as file:
            return try_lock(file)
    except FileNotFoundError:
        return "locked"
    except OSError:
        return "unknown"


def try_lock(file: IO[Any]) -> LockState:
    """Lock an open file for this process until it is closed, if nobody else has."""
    try:
        return "locked" if lock_descriptor(file.fileno(), blocking=False) else "taken"
    except OSError:
        return "unknown"


def _is_alive(owner: dict[str, Any]) -> bool:
    """Whether the owner may still be at work, as far as can be known from here."""
    process = owner.get("process")
    if not isinstance(process, int):
        return False
    here = socket.gethostname()
    if owner.get("host", here) != here:
        return True
    import psutil

    return bool(psutil.pid_exists(process))


def _locked_message(path: Path, owner: dict[str, Any], busy: str, advice: str) -> str:
    who = f"process {owner['process']}" if "process" in owner else "an unknown process"
    host = owner.get("host")
    if host and host != socket.gethostname():
        who += f" on {host}"
    since = f", since {owner['since']}" if owner.get("since") else ""
    return f"{path.parent}: {busy} ({who}{since}){'; ' if advice else ''}{advice}."
