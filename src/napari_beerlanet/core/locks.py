"""A folder that one program writes to: a lock that ends with the process that holds it.

The system's own lock on a file decides. Where a disk has none (some network drives), what the file
says does: a process of this computer that is gone holds nothing.
"""

from __future__ import annotations

import json
import os
import socket
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, Literal

from .files import FileError

Answer = Literal["locked", "taken", "unknown"]


class LockedError(FileError):
    """Somebody else writes to the folder; `owner` is what is known: process, host, since."""

    def __init__(self, message: str, owner: dict[str, Any]) -> None:
        super().__init__(message)
        self.owner = owner


class FolderLock:
    """The lock of a folder, held from making it until `release`.

    `take_over` passes over what the file says where the disk has no locks of its own.
    """

    def __init__(self, path: Path, take_over: bool = False) -> None:
        self.path = path
        self._file: IO[str] | None = path.open("a+", encoding="utf-8")
        answer = try_lock(self._file)
        owner = read_owner(path)
        if answer == "taken" or (answer == "unknown" and not take_over and _holds(owner)):
            self._file.close()
            self._file = None
            raise LockedError(_sentence(path, owner), owner)
        self._sign()

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
            with suppress(OSError):
                _unlock(self._file)
            with suppress(OSError):
                self._file.close()
            self._file = None

    def _sign(self) -> None:
        assert self._file is not None
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._file.seek(0)
        self._file.truncate()
        json.dump({"process": os.getpid(), "host": socket.gethostname(), "since": now}, self._file)
        self._file.flush()


def read_owner(path: Path) -> dict[str, Any]:
    """What the lock's file says of its owner, {} where it says nothing."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def _holds(owner: dict[str, Any]) -> bool:
    """Whether the owner may still be at work, as far as can be known from here."""
    process = owner.get("process")
    if not isinstance(process, int):
        return False
    if owner.get("host") != socket.gethostname():
        return True
    import psutil  # type: ignore[import-untyped]

    return process != os.getpid() and bool(psutil.pid_exists(process))


def _sentence(path: Path, owner: dict[str, Any]) -> str:
    who = f"process {owner['process']}" if "process" in owner else "another program"
    where = owner.get("host")
    if where and where != socket.gethostname():
        who += f" on {where}"
    since = f", since {owner['since']}" if owner.get("since") else ""
    return (
        f"{path.parent}: open in another viewer ({who}{since}); close it there, or open the "
        "project here to look at only."
    )


def is_locked(path: Path) -> bool:
    """Whether somebody holds the lock of this file now, as far as the system knows."""
    try:
        with path.open("r+", encoding="utf-8") as file:
            return try_lock(file) == "taken"
    except OSError:
        return False


def try_lock(file: IO[str]) -> Answer:
    """Lock an open file for this process until it is closed, if nobody else has."""
    try:
        if os.name == "nt":
            import msvcrt

            # Far behind the text, as Windows keeps others from reading a locked part.
            file.seek(1 << 20)
            msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined]
        else:
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        return "taken"
    except OSError:
        return "unknown"
    return "locked"


def _unlock(file: IO[str]) -> None:
    """Closing would not do where a forked process has the file, too."""
    if os.name != "nt":
        import fcntl

        fcntl.flock(file, fcntl.LOCK_UN)
