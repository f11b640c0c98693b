"""Starting, watching and ending processes that outlive the viewer."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

LOG = "process.log"
"""What the process prints besides its events, in the run's folder."""

_children: dict[int, subprocess.Popen[bytes]] = {}  # ours, to be asked how they ended


def launch(folder: Path, environment: dict[str, str] | None = None) -> subprocess.Popen[bytes]:
    """Start the training that a folder's run.json describes, or go on with it."""
    words = ["napari_beerlanet.core.train", "--config", str(folder / "run.json"), "--resume"]
    return launch_apart(words, folder, environment=environment)


def launch_apart(
    words: list[str],
    folder: Path,
    events: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a module of ours in a session of its own: it outlives the viewer and its terminal.

    `words` are the module and its arguments. What it prints is added to the file `events`.
    """
    command = [sys.executable, "-P", "-m", *words]
    apart: dict[str, Any] = {"start_new_session": True}
    if os.name == "nt":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        apart = {"creationflags": flags}
    with open(folder / LOG, "wb") as log, open(events or os.devnull, "ab") as printed:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=printed,
            stderr=log,
            env=process_environment() | (environment or {}),
            cwd=tempfile.gettempdir(),  # so that the project's drive can be removed
            **apart,
        )
    _children[child.pid] = child
    return child


def process_environment() -> dict[str, str]:
    """Ours without what is Qt's; Ultralytics' settings are kept apart by `core.yolo` there."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("QT_")}
    return ours | {"YOLO_OFFLINE": "true", "PYTHONIOENCODING": "utf-8"}


def lower_priority(process: psutil.Process) -> None:
    """Have the viewer go first wherever both want the processor."""
    with suppress(psutil.Error, OSError):
        process.nice(10 if os.name != "nt" else psutil.BELOW_NORMAL_PRIORITY_CLASS)


def ask_to_stop(folder: Path, process: psutil.Process | None) -> None:
    """Leave the file that ends a run; one that has not begun to look for it gets a signal."""
    with suppress(OSError):
        (folder / "stop").touch()
    if process is not None:
        with suppress(psutil.Error):
            process.terminate()


def exit_code(number: int | None) -> int | None:
    """Of a process that this one has started and that has ended, else None."""
    child = _children.get(number or 0)
    return None if child is None else child.poll()


def is_alive(process: psutil.Process | None) -> bool:
    """Whether a process is there and not just waiting for its parent to hear of its end."""
    if process is None:
        return False
    child = _children.get(process.pid)
    if child is not None:
        return child.poll() is None
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def each(process: psutil.Process | None, verb: str) -> bool:
    """Do something to a process and all that it has started; whether the process itself took it."""
    if process is None:
        return False
    with suppress(psutil.Error):
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                getattr(child, verb)()
    try:
        getattr(process, verb)()
    except psutil.Error:
        return False
    return True
