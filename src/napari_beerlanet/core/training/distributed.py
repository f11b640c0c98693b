"""Multi-GPU training: one process for each GPU, started by torch's own launcher.

    python -m torch.distributed.run --standalone --nproc_per_node 2
        -m napari_beerlanet.core.training.distributed RUN/run.json

Each reads the run's folder; the first prints the events and writes the files.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import deque
from pathlib import Path

from napari_beerlanet.core.common.events import (
    Event,
    EventCallback,
    loaded,
    parse_event,
    run_process,
)
from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.progress import Cancelled, Report, report_progress
from napari_beerlanet.core.training.runs import (
    MEMORY_ADVICE,
    RunFolder,
    TrainingDiverged,
    read_run,
)
from napari_beerlanet.core.training.settings import TrainSettings

_MAX_LOG_LINES = 12  # of what the processes print last, for the message of a failure


def train_multi_gpu(
    folder: RunFolder, count: int, emit: EventCallback, report: Report | None = None
) -> None:
    """Train the run that `folder` describes in `count` processes, and wait for them."""
    log = deque[str](maxlen=_MAX_LOG_LINES)
    ending: Event = {}
    errors: list[BaseException] = []
    # In a session of their own, as Ctrl-C is for us: it asks them to end after the batch.
    with subprocess.Popen(
        launch_command(folder.run_file, count),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
        start_new_session=True,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            event = parse_event(line)
            if event is None:
                log.append(line.strip())
            elif event["event"] in ("failed", "cancelled", "diverged"):
                ending = ending or event
            else:
                try:
                    _forward_event(event, emit, report)
                except BaseException as error:
                    folder.stop_file.touch()  # all end after the same batch
                    errors.append(error)
    if errors:
        raise errors[0]
    if ending.get("event") == "cancelled":
        raise Cancelled("stopped as asked")
    if ending.get("event") == "diverged":
        raise TrainingDiverged(ending["message"])
    if process.returncode or ending:
        raise ValueError(ending.get("message") or f"Training failed: {' '.join(log)}")


def launch_command(run_file: Path, count: int) -> list[str]:
    """The command that starts `count` processes."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"]
    return [
        sys.executable,
        *launcher,
        "-m",
        "napari_beerlanet.core.training.distributed",
        str(run_file),
    ]


def _forward_event(event: Event, emit: EventCallback, report: Report | None) -> None:
    emit(event)
    if event["event"] == "batch":
        place = f"epoch {event['epoch']} of {event['epochs']}"
        report_progress(report, event["step"], event["steps"], place)


def main(run_file: str) -> int:
    """Run one of the processes."""
    first = os.environ.get("RANK", "0") == "0"
    folder = RunFolder(Path(run_file).resolve().parent, locked=False)

    def print_event(event: Event) -> None:
        try:
            print(json.dumps(event), flush=True)
        except BrokenPipeError:  # the parent process is gone
            folder.stop_file.touch()
            sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115 - until the end

    try:
        from napari_beerlanet.core.training.setup import train_in_process

        settings = TrainSettings(**read_run(folder.run_file)["settings"])

        def emit(event: Event) -> None:
            if event["event"] == "start":  # of all that follow, only the first process hears
                loaded()
            if first:
                print_event(event)

        train_in_process(folder, settings, folder.read_state(), emit)
    except Cancelled:
        print_event({"event": "cancelled"})
    except TrainingDiverged as error:
        print_event({"event": "diverged", "message": str(error)})
        return 1
    except Exception as error:
        print_event(
            {"event": "failed", "message": error_message(error, memory_advice=MEMORY_ADVICE)}
        )
        return 1
    return 0


if __name__ == "__main__":
    run_process(lambda: main(sys.argv[1]))
