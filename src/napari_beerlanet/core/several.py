"""Training on several GPUs: one process for each, started by torch's own launcher.

    python -m torch.distributed.run --standalone --nproc_per_node 2
        -m napari_beerlanet.core.several RUN/run.json

Each reads the run's folder; the first prints the events and writes the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path
from typing import Any

from .progress import Cancelled, Report, tell
from .recipe import Recipe
from .runfiles import RunFolder, read_run
from .training import Tell, explain, train_here

_LINES = 12  # of what the processes print last, for the message of a failure


def train_on_several(
    folder: RunFolder, count: int, tell_event: Tell, report: Report | None = None
) -> None:
    """Train the run that `folder` describes in `count` processes, and wait for them."""
    words = deque[str](maxlen=_LINES)
    last: dict[str, Any] = {}
    reasons: list[BaseException] = []
    # In a session of their own, as Ctrl-C is for us: it asks them to end after the batch.
    with subprocess.Popen(
        command(folder.run_file, count),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = _event(line)
            if event is None:
                words.append(line.strip())
            elif event["event"] in ("failed", "cancelled"):
                last = last or event
            else:
                try:
                    _pass_on(event, tell_event, report)
                except BaseException as error:
                    folder.stop_file.touch()  # all end after the same batch
                    reasons.append(error)
    if reasons:
        raise reasons[0]
    if last.get("event") == "cancelled":
        raise Cancelled("stopped as asked")
    if process.returncode or last:
        raise ValueError(last.get("message") or f"Training failed: {' '.join(words)}")


def command(run_file: Path, count: int) -> list[str]:
    """What starts `count` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    return [sys.executable, *launcher, "-m", "napari_beerlanet.core.several", str(run_file)]


def _pass_on(event: dict[str, Any], tell_event: Tell, report: Report | None) -> None:
    tell_event(event)
    if event["event"] == "batch":
        done = (event["epoch"] - 1) * event["batches"] + event["batch"]
        total = event["epochs"] * event["batches"]
        tell(report, done, total, f"epoch {event['epoch']} of {event['epochs']}")


def _event(line: str) -> dict[str, Any] | None:
    try:
        event = json.loads(line)
    except ValueError:
        return None
    return event if isinstance(event, dict) and "event" in event else None


def main(run_file: str) -> int:
    """One of the processes."""
    first = os.environ.get("RANK", "0") == "0"
    folder = RunFolder(Path(run_file).resolve().parent, locked=False)

    def say(event: dict[str, Any]) -> None:
        try:
            print(json.dumps(event), flush=True)
        except BrokenPipeError:  # who has started us is gone
            folder.stop_file.touch()
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end

    try:
        recipe = Recipe.read(read_run(folder.run_file)["settings"])
        train_here(folder, recipe, folder.read_state(), say if first else lambda event: None)
    except Cancelled:
        say({"event": "cancelled"})
    except Exception as error:
        say({"event": "failed", "message": explain(error)})
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
