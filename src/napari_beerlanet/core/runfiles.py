"""The folder of a training run: what it holds, and that only one process writes to it.

    run.json           settings, and how far the run is
    progress.jsonl     one JSON object per line, as the process prints them
    results.csv        a row of losses, metrics and learning rates per epoch
    state.pt           all that the next epoch depends on: tensors, numbers, text
    best.safetensors   the checkpoint of the best epoch so far
    last.safetensors   that of the last
    stop               made by whoever wants the run to end

Every file is written whole or not at all, so a run may be killed at any moment.
"""

from __future__ import annotations

import csv
import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any

from .files import FileError, atomic_path, remove
from .locks import try_lock

FORMAT = 1
_PATIENCE = 10.0  # seconds for what a killed run has left running to end, too


class RunFolder:
    """A run's folder, locked for this process until `close`."""

    def __init__(self, path: str | os.PathLike[str], *, locked: bool = True) -> None:
        self.path = Path(path).resolve()
        if self.path.exists() and not self.path.is_dir():
            raise FileError(f"{self.path}: not a folder, so no run can be written into it.")
        self.path.mkdir(parents=True, exist_ok=True)
        self.lock = _lock(self.path / ".lock") if locked else None
        if locked:
            self.stop_file.unlink(missing_ok=True)  # it was meant for an earlier run
            for unfinished in self.path.glob(".*.partial*"):  # by a run that was killed
                remove(unfinished)

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others write here."""
        if self.lock is not None:
            self.lock.close()
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
        """Checkpoint that training began with, if it was no file."""
        return self.path / "start.safetensors"

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
        """Change entries of run.json."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        run = {**(self.read_run() or {"format": FORMAT}), **changes, "updated": now}
        with atomic_path(self.run_file) as unfinished:
            unfinished.write_text(json.dumps(run, indent=1) + "\n", encoding="utf-8")

    def refuse_to_lose(self) -> None:
        """A `FileError` if a new run would overwrite what an earlier one has learned."""
        if any(path.exists() for path in (self.state_file, self.best, self.last)):
            raise FileError(
                f"{self.path}: there is a run in this folder; go on with it (resume), or choose "
                "another folder."
            )

    def clear(self) -> None:
        """Remove what a run that learned nothing has left."""
        for name in ("run.json", "progress.jsonl", "results.csv"):
            (self.path / name).unlink(missing_ok=True)

    def write_state(self, state: dict[str, Any]) -> None:
        """Keep a `StainTrainer.state_dict()`."""
        import torch

        with atomic_path(self.state_file) as unfinished:
            torch.save(state, unfinished)

    def read_state(self) -> dict[str, Any] | None:
        """What `write_state` kept, None where there is nothing; nothing in it is executed."""
        import torch

        if not self.state_file.exists():
            return None
        try:
            state: dict[str, Any] = torch.load(
                self.state_file, map_location="cpu", weights_only=True
            )
            state["epoch"], state["model"]
        except Exception as error:
            # The reader of a damaged file may fail in any way.
            raise FileError(
                f"{self.state_file}: damaged, or no state of a run; start anew in another folder."
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
            content = file.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]
            if whole != content:
                with atomic_path(file) as unfinished:
                    unfinished.write_bytes(whole)


def read_run(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A run.json, or a `FileError`."""
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise FileError(f"{path}: {str(error.strerror).lower()}.") from error
    except (ValueError, RecursionError) as error:
        raise FileError(f"{path}: not a JSON file of a run.") from error
    if not isinstance(content, dict) or not isinstance(content.get("settings"), dict):
        raise FileError(f"{path}: holds no settings of a run.")
    if content.get("format", FORMAT) != FORMAT:
        raise FileError(f"{path}: of another version of this program; update napari-beerlanet.")
    return content


def _lock(path: Path) -> IO[str]:
    """Open and lock a file; the system unlocks it when this process ends, however it ends."""
    file = path.open("a+", encoding="utf-8")
    given_up = time.monotonic() + _PATIENCE
    while try_lock(file) == "taken":
        owner = _owner(path)
        if owner is None or _is_alive(owner) or time.monotonic() > given_up:
            file.close()
            raise FileError(
                f"{path.parent}: another process trains in this folder"
                + (f" (process {owner})" if owner else "")
                + "; let it finish, or choose another folder."
            )
        time.sleep(0.2)
    file.seek(0)
    file.truncate()
    file.write(f"{os.getpid()}\n")
    file.flush()
    return file


def _owner(path: Path) -> int | None:
    text = path.read_text(encoding="utf-8").strip()
    return int(text) if text.isdecimal() else None


def _is_alive(process: int) -> bool:
    import psutil  # type: ignore[import-untyped]

    return bool(psutil.pid_exists(process))
