"""Background runs: their event logs (progress.jsonl), and how their processes start and end."""

from __future__ import annotations

import atexit
import gc
import json
import os
import sys
from collections.abc import Callable
from enum import StrEnum
from pathlib import Path
from typing import Any, NoReturn

from napari_beerlanet.core.common.storage import regular_file

Event = dict[str, Any]
"""A line of an event log: "event" is its kind."""

EventCallback = Callable[[Event], None]

FINAL_EVENTS = frozenset({"end", "failed", "cancelled", "diverged"})
"""Events that nothing follows."""

_READ_CHUNK_BYTES = 1 << 18  # bytes of events that are read at a time


class RunState(StrEnum):
    """State of a run.

    `DIVERGED`: training was stopped because it made the model worse; `INTERRUPTED`: its process was
    killed; `DAMAGED`: run.json is unreadable.
    """

    NEW = "not started"
    RUNNING = "running"
    PAUSED = "paused"
    FINISHED = "finished"
    STOPPED = "stopped"
    FAILED = "failed"
    DIVERGED = "diverged"
    INTERRUPTED = "interrupted"
    DAMAGED = "damaged"


class EventTail:
    """Follows what is added to a run's progress.jsonl, line by line.

    A line that is not finished waits for its rest; what is no event is skipped. `latest` starts
    that many bytes before the end.
    """

    def __init__(self, folder: str | os.PathLike[str], latest: int | None = None) -> None:
        self.path = Path(folder) / "progress.jsonl"
        self.offset = 0
        if latest is not None and (size := self._size()) > latest:
            self.offset = size - latest
            self.offset = self._offset_after_next_line()

    def read(self) -> list[Event]:
        """The events since the last call, not too many at once."""
        if self._size() < self.offset:  # it was started again
            self.offset = 0
        whole = self._bytes()
        whole = whole[: whole.rfind(b"\n") + 1]
        self.offset += len(whole)
        return [event for line in whole.splitlines() if (event := parse_event(line)) is not None]

    def skip(self) -> None:
        """Skip what is there."""
        self.offset = self._size()

    def _size(self) -> int:
        try:
            return self.path.stat().st_size
        except OSError:
            return 0

    def _bytes(self) -> bytes:
        try:
            with regular_file(self.path).open("rb") as file:
                file.seek(self.offset)
                return file.read(_READ_CHUNK_BYTES)
        except OSError:  # not yet there, or the drive is gone
            return b""

    def _offset_after_next_line(self) -> int:
        return self.offset + self._bytes().find(b"\n") + 1


def parse_event(line: bytes | str) -> Event | None:
    """A line of events, None for anything else."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    good = isinstance(event, dict) and isinstance(event.get("event"), str)
    return event if good else None


def run_process(main: Callable[[], int]) -> NoReturn:
    """Run `main` as all that this process does, and end the process with the status it returns.

    As `sys.exit(main())`, which spends two seconds on the objects that torch consists of: garbage
    is looked for among them while they are made, and each is freed at the end. So collecting is off
    until `loaded` is called; and once threads have ended and exit functions have run, the operating
    system takes the memory back at once.
    """
    global _owns_process
    _owns_process = True
    status: int | None = None

    def leave() -> None:
        if status is not None:  # else an exception ends it, which Python reports
            for stream in (sys.stdout, sys.stderr):
                if stream is not None:
                    stream.flush()
            os._exit(status)

    atexit.register(leave)  # the first to be registered is the last to run
    gc.disable()
    status = main()
    sys.exit(status)


_owns_process = False


def owns_process() -> bool:
    """Whether this process does nothing but what `run_process` was called with."""
    return _owns_process


def loaded() -> None:
    """Have garbage collected from now on, among what is made from now on; see `run_process`.

    Ultralytics collects after every epoch, and would do so through all of torch.
    """
    if not gc.isenabled():
        gc.freeze()
        gc.enable()
