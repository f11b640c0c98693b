"""Training runs: the folder of one, those of a project, and the state that each is in.

    run.json           settings, and how far the run is
    progress.jsonl     one JSON object per line, as the process prints them
    results.csv        a row of losses, metrics and learning rates per epoch
    state.pt           all that the next epoch depends on: tensors, numbers, text
    best.safetensors   the checkpoint of the best epoch so far
    last.safetensors   that of the last
    stop               made by whoever wants the run to end

Every file is written whole or not at all, so a run may be killed at any moment. A run may belong to
another process, to one that was killed, or to yesterday: its state follows from run.json and from
whether the process that it names is still alive.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Literal

import psutil

from napari_beerlanet.core.checkpoints.pt_import import check_pickle
from napari_beerlanet.core.common.events import FINAL_EVENTS, EventTail, RunState
from napari_beerlanet.core.common.locking import FolderLock, lock_state
from napari_beerlanet.core.common.messages import slug, system_reason
from napari_beerlanet.core.common.storage import (
    FileError,
    atomic_path,
    check_no_linked_folder,
    read_json,
    read_json_or_empty,
    regular_file,
    remove_partial_files,
)
from napari_beerlanet.core.project.files import MODELS_DIR, RUNS_DIR

FORMAT_VERSION = 1
MEMORY_ADVICE = "use a smaller batch or smaller images"
_GRACE_PERIOD_S = 10.0  # for what a killed run has left running to end, too
_CLOCK_TOLERANCE_S = 2.0  # by which the times of files and of processes may differ
_MAX_SAME_NAME = 1000
_LAST_EVENTS_BYTES = 4096  # of progress.jsonl, in which a live run says where it is

_STATE_BY_RECORD = {
    "new": RunState.NEW,
    "waiting": RunState.NEW,
    "finished": RunState.FINISHED,
    "cancelled": RunState.STOPPED,
    "failed": RunState.FAILED,
    "diverged": RunState.DIVERGED,
}


class TrainingDiverged(ValueError):
    """Training made the model worse instead of better and was stopped; the message says so."""


def _on_cpu(part: Any) -> Any:
    """Dicts, lists and tuples with their tensors on the CPU; as they are where all are there."""
    if isinstance(part, dict):
        moved = {key: _on_cpu(value) for key, value in part.items()}
        return part if all(moved[key] is value for key, value in part.items()) else moved
    if isinstance(part, (list, tuple)):
        items = [_on_cpu(value) for value in part]
        same = all(a is b for a, b in zip(items, part, strict=True))
        return part if same else type(part)(items)
    return part.cpu() if hasattr(part, "cpu") else part


class RunFolder:
    """A run's folder, locked for this process until `close`."""

    def __init__(self, path: str | os.PathLike[str], *, locked: bool = True) -> None:
        self.path = Path(path).resolve()
        if self.path.exists() and not self.path.is_dir():
            raise FileError(f"{self.path}: not a folder, so no run can be written into it.")
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = self._acquire_lock() if locked else None
        if locked:
            self.stop_file.unlink(missing_ok=True)  # it was meant for an earlier run
            remove_partial_files(self.path)

    def _acquire_lock(self) -> FolderLock:
        return FolderLock(
            self.path / ".lock",
            break_lock=True,
            timeout=_GRACE_PERIOD_S,
            busy="another process trains in this folder",
            advice="let it finish, or choose another folder",
        )

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the lock."""
        if self.lock is not None:
            self.lock.release()
            self.lock = None

    @property
    def run_file(self) -> Path:
        """Settings and state of the run."""
        return self.path / "run.json"

    @property
    def state_file(self) -> Path:
        """What the next epoch depends on."""
        return self.path / "state.pt"

    @property
    def start(self) -> Path:
        """Checkpoint that training started from, if it was no file."""
        return self.path / "start.safetensors"

    @property
    def normalizer(self) -> Path:
        """The normalizer of the run, if it was no file."""
        return self.path / "normalizer.safetensors"

    @property
    def best(self) -> Path:
        """Checkpoint of the best epoch."""
        return self.path / "best.safetensors"

    @property
    def last(self) -> Path:
        """Checkpoint of the last epoch."""
        return self.path / "last.safetensors"

    @property
    def stop_file(self) -> Path:
        """Its existence asks the run to end."""
        return self.path / "stop"

    def read_run(self) -> dict[str, Any] | None:
        """What run.json says, None where there is none."""
        return read_run(self.run_file) if self.run_file.exists() else None

    def write_run(self, **changes: Any) -> None:
        """Change entries of run.json.

        With another state the run becomes the newest of its project.
        """
        before = self.read_run() or {"format": FORMAT_VERSION, "folder": str(self.path)}
        updated = max(_now(), str(before.get("updated") or ""))  # the clock may have been set back
        if "state" in changes:
            updated = max(updated, _second_after(max(_times_beside(self.path), default="")))
        run = {**before, **changes, "updated": updated}
        with atomic_path(self.run_file) as unfinished:
            unfinished.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")

    def check_not_overwriting(self) -> None:
        """A `FileError` if a new run would overwrite what an earlier one has learned."""
        if any(path.exists() for path in (self.state_file, self.best, self.last)):
            raise FileError(
                f"{self.path}: there is a run in this folder; resume it, or choose another folder."
            )

    def clear(self) -> None:
        """Remove what a run that learned nothing has left."""
        for name in ("run.json", "progress.jsonl", "results.csv"):
            (self.path / name).unlink(missing_ok=True)

    def write_state(self, state: dict[str, Any]) -> None:
        """Save a `StainTrainer.state_dict()`."""
        import torch

        with atomic_path(self.state_file) as unfinished:
            # On the CPU: a run may be resumed on a machine, or a device, of another kind.
            torch.save(_on_cpu(state), unfinished)

    def read_state(self) -> dict[str, Any] | None:
        """What `write_state` saved, None where there is nothing; nothing in it is executed."""
        import torch

        if not self.state_file.exists():
            return None
        try:
            check_pickle(self.state_file)
            state: dict[str, Any] = torch.load(
                self.state_file, map_location="cpu", weights_only=True
            )
            state["epoch"], state["model"]
        except Exception as error:
            # The reader of a damaged file may fail in any way.
            raise FileError(
                f"{self.state_file}: damaged, or no state of a run; start a new run in another "
                "folder."
            ) from error
        return state

    def write_results(self, rows: list[dict[str, float]]) -> None:
        """Write results.csv, a row per epoch."""
        keys = list(dict.fromkeys(key for row in rows for key in row))
        with (
            atomic_path(self.path / "results.csv") as unfinished,
            unfinished.open("w", newline="", encoding="utf-8") as file,
        ):
            writer = csv.DictWriter(file, keys)
            writer.writeheader()
            writer.writerows(rows)

    def append_event(self, event: dict[str, Any]) -> str:
        """Add a line to progress.jsonl and return it."""
        line = json.dumps(event)
        with (self.path / "progress.jsonl").open("a", encoding="utf-8") as file:
            file.write(line + "\n")
        return line

    def trim_events(self) -> None:
        """Remove the part of a line that a killed process left at the end of progress.jsonl."""
        file = self.path / "progress.jsonl"
        if file.exists():
            content = regular_file(file).read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                with atomic_path(file) as unfinished:
                    unfinished.write_bytes(whole)


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A run.json, or a `FileError`.

    Files of the settings are where they are now, if they were moved together with the run.
    """
    content = read_json(path)
    if not isinstance(content.get("settings"), dict):
        raise FileError(f"{path}: holds no settings of a run.")
    if content.get("format", FORMAT_VERSION) != FORMAT_VERSION:
        raise FileError(f"{path}: of another version of this program; update napari-beerlanet.")
    here = str(Path(path).resolve().parent)
    before, content["folder"] = content.get("folder", here), here
    if isinstance(before, str) and before != here:
        settings = content["settings"]
        content["settings"] = {name: _moved(settings[name], before, here) for name in settings}
    return content


def _moved(value: Any, before: str, here: str) -> Any:
    """The path that leads from `here` to where the one of a setting led from the folder before.

    A copy of a project has its own; other files stay where they are as long as they are there.
    """
    if not isinstance(value, str) or not os.path.isabs(value):
        return value
    with suppress(ValueError):  # on another drive
        way = os.path.relpath(value, before)
        levels = 2 if {Path(before).parent.name, Path(here).parent.name} == {RUNS_DIR} else 0
        own = Path(way).parts.count(os.pardir) <= levels
        moved = os.path.normpath(os.path.join(here, way))
        if (own or not os.path.exists(value)) and os.path.exists(moved):
            return moved
    return value


@dataclass(frozen=True)
class Run:
    """A run as it is now; `settings` are a `TrainSettings`'s, `process` is the id of a live one.

    `epoch` are finished epochs, `current_epoch` is the one that a live process is in. `warning` is
    what to know before its model is kept.
    """

    path: Path
    state: RunState
    epoch: int = 0
    epochs: int | None = None
    message: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    updated: str = ""
    process: int | None = None
    best_epoch: int | None = None
    current_epoch: int | None = None
    warning: str = ""

    @property
    def status(self) -> str:
        """In a few words: "running, epoch 5 of 6", "stopped after epoch 4 of 6"."""
        total = f" of {self.epochs}" if self.epochs else ""
        place = f"after epoch {self.epoch}{total}" if self.epoch else "in its first epoch"
        if self.is_active:
            place = f"epoch {self.current_epoch}{total}" if self.current_epoch else "loading"
            return f"{self.state}, {place}"
        if self.state is RunState.FINISHED:
            early = self.epochs is not None and self.epoch < self.epochs
            return f"stopped early {place}" if early else f"{self.state} {place}"
        if self.state is RunState.DIVERGED:
            return f"{self.state} in epoch {self.epoch}{total}"
        if self.state in (RunState.NEW, RunState.DAMAGED):
            return str(self.state)
        return f"{self.state} {place}"

    @property
    def task(self) -> str:
        """What it trains for: "detect" or "classify"."""
        return str(self.settings.get("task", "detect"))

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
    def is_active(self) -> bool:
        """Whether a process works on it, even if paused."""
        return self.state in (RunState.RUNNING, RunState.PAUSED)

    @property
    def can_resume(self) -> bool:
        """Whether it stopped before its last epoch."""
        return self.state in (RunState.NEW, RunState.STOPPED, RunState.FAILED, RunState.INTERRUPTED)


def inspect_run(path: str | os.PathLike[str]) -> Run:
    """A run as it is now; reads small files only, and never raises."""
    folder = Path(path)
    try:
        content = read_run(folder / "run.json")
    except FileError as error:
        return Run(folder, RunState.DAMAGED, message=str(error))
    process = _live_process(folder, content)
    state = _STATE_BY_RECORD.get(str(content.get("state")), RunState.INTERRUPTED)
    if process is not None:
        state = RunState.PAUSED if _is_suspended(process) else RunState.RUNNING
    settings, change = content["settings"], content.get("change")
    return Run(
        folder,
        state,
        _as_int(content.get("epoch")) or 0,
        _as_int(settings.get("epochs")),
        str(content.get("message") or ""),
        settings,
        str(content.get("updated") or ""),
        None if process is None else int(process.pid),
        _as_int(content.get("best_epoch")),
        None if process is None else _current_epoch(folder),
        str(change.get("text") or "") if isinstance(change, dict) else "",
    )


def list_runs(
    project: str | os.PathLike[str], task: Literal["detect", "classify"] | None = "detect"
) -> list[Run]:
    """A project's runs for `task` (None: all), the newest first; none where there is no folder."""
    try:
        folders = [entry for entry in (Path(project) / RUNS_DIR).iterdir() if entry.is_dir()]
    except OSError:
        return []
    runs = [run for run in map(inspect_run, folders) if task in (None, run.task)]
    return sorted(runs, key=lambda run: (run.updated, run.name), reverse=True)


def new_run(project: str | os.PathLike[str], settings: Mapping[str, Any]) -> Path:
    """A new folder below the project's `runs`, whose run.json has these settings."""
    now = datetime.now().strftime("%Y-%m-%d_%H-%M-%S")
    classifies = settings.get("task") == "classify"
    name = f"{now}_{'types' if classifies else settings.get('scope', 'all')}"
    runs = Path(project) / RUNS_DIR
    try:
        if not Path(project).is_dir():
            raise FileError(f"{project}: there is no such folder; connect the drive that it is on.")
        check_no_linked_folder(Path(project), RUNS_DIR)
        runs.mkdir(exist_ok=True)
        path = _make_unused_folder(runs, name)
        with RunFolder(path, locked=False) as folder:
            folder.write_run(settings=dict(settings), state="new", epoch=0)
    except OSError as error:
        why = system_reason(error)
        raise FileError(f"{runs}: a run cannot be written there ({why}).") from error
    return path


def unused_model_path(project: str | os.PathLike[str], name: str) -> Path:
    """A file for a model in the project's `models`; a name that is taken gets a number."""
    models = Path(project) / MODELS_DIR
    try:
        check_no_linked_folder(Path(project), MODELS_DIR)
        models.mkdir(exist_ok=True)
    except OSError as error:
        why = system_reason(error)
        raise FileError(f"{models}: a model cannot be saved there ({why}).") from error
    paths = _numbered_paths(models, slug(name), "-", ".safetensors")
    return next(path for path in paths if not path.exists())


def _times_beside(path: Path) -> list[str]:
    """When the other runs of a project were last updated."""
    if path.parent.name != RUNS_DIR:
        return []
    files = (file for file in path.parent.glob("*/run.json") if file.parent != path)
    return [str(read_json_or_empty(file).get("updated") or "") for file in files]


def _now() -> str:
    """The time in UTC; later times are larger texts."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _second_after(time: str) -> str:
    """A second after what `_now` returned; "" after anything else."""
    try:
        return (datetime.fromisoformat(time) + timedelta(seconds=1)).isoformat(timespec="seconds")
    except (ValueError, OverflowError):
        return ""


def _make_unused_folder(runs: Path, name: str) -> Path:
    for path in _numbered_paths(runs, name, "_"):
        with suppress(FileExistsError):
            path.mkdir()
            return path
    raise AssertionError  # the numbers end with an error


def _numbered_paths(folder: Path, name: str, separator: str, suffix: str = "") -> Iterator[Path]:
    """name, name_2, name_3, …; a `FileError` after very many."""
    yield folder / f"{name}{suffix}"
    for number in range(2, _MAX_SAME_NAME):
        yield folder / f"{name}{separator}{number}{suffix}"
    raise FileError(f"{folder}: too many files called {name}; choose another name.")


def _live_process(folder: Path, content: Mapping[str, Any]) -> Any:
    """The process that works on a run, None where it is gone or its number is another's now."""
    number = _as_int(content.get("process"))
    if content.get("state") != "running" or number is None:
        return None
    lock = folder / ".lock"
    try:
        process = psutil.Process(number)
        if process.status() == psutil.STATUS_ZOMBIE:
            return None
        state = lock_state(lock)
        if state == "unknown":  # a disk without locks: by the clock, which may have been set
            earlier = process.create_time() <= lock.stat().st_mtime + _CLOCK_TOLERANCE_S
            state = "taken" if earlier else "locked"
        return process if state == "taken" else None
    except (psutil.Error, OSError):
        return None


def _current_epoch(folder: Path) -> int | None:
    """The epoch that a live process is in, None while it loads."""
    for event in reversed(EventTail(folder, latest=_LAST_EVENTS_BYTES).read()):
        if event["event"] in ("start", "batch", "epoch"):
            return _as_int(event.get("epoch"))
        if event["event"] in FINAL_EVENTS:  # of an earlier attempt
            return None
    return None


def _is_suspended(process: Any) -> bool:
    try:
        return bool(process.status() == psutil.STATUS_STOPPED)
    except psutil.Error:
        return False


def _as_int(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None
