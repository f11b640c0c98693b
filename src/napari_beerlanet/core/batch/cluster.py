"""Process a study's images on the workers of a dask.distributed cluster.

The scheduler reassigns the image of a worker that dies, up to its own limit. Every worker process
loads the model once. Where workers declare the resource "GPU", only these detect objects, one
image at a time for each.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from napari_beerlanet.core.batch.image import Outcomes, TaskRunner, Tasks, process_image
from napari_beerlanet.core.common.progress import ThrottledProgress
from napari_beerlanet.core.common.storage import FileError

_POLL_INTERVAL_S = 0.2
_REPORT_INTERVAL_S = 1.0  # of a worker on the progress of its image
_SCHEDULER_LOST = (
    "the dask scheduler at {address} is gone; finished images are saved, run it again to resume."
)


class SchedulerLostError(FileError):
    """The scheduler ended before the study did."""


def cluster_runner(scheduler: Any) -> TaskRunner:
    """Runs tasks on a cluster.

    `scheduler`: an address, a `Client`, or a cluster that gives one, such as dask-jobqueue's.
    """
    try:
        import distributed
    except ImportError as error:
        raise FileError(
            'Running on a cluster needs dask.distributed: pip install "napari-beerlanet[cluster]".'
        ) from error

    def run(tasks: Tasks) -> Outcomes:
        own = not hasattr(scheduler, "submit")
        client = _connect(distributed, scheduler) if own else scheduler
        try:
            yield from _stream_outcomes(client, tasks)
        finally:
            if own:
                client.close(timeout=2)

    return run


def _connect(distributed: Any, scheduler: Any) -> Any:
    if hasattr(scheduler, "get_client"):
        return scheduler.get_client()
    try:
        return distributed.Client(scheduler, timeout=20)
    except (OSError, TimeoutError, ValueError) as error:
        raise FileError(f"No dask scheduler answers at {scheduler} ({error}).") from error


def _stream_outcomes(client: Any, tasks: Tasks) -> Outcomes:
    topic = f"beerlanet-{uuid.uuid4().hex[:8]}"
    events: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client.subscribe_topic(topic, lambda event: events.put(event[1]))
    address = str(client.scheduler.address)
    has_gpus = _has_gpu_workers(client)
    futures = {}
    for number, task in tasks:
        needs = {"GPU": 1} if has_gpus and task["settings"]["model"] else None
        key = f"{topic}-{number}"
        work = (_process_and_report, task, number, topic)
        futures[number] = client.submit(*work, key=key, pure=False, resources=needs)
    try:
        while futures:
            ended = [n for n, future in futures.items() if future.status != "pending"]
            if client.status != "running":
                raise SchedulerLostError(_SCHEDULER_LOST.format(address=address))
            for number in ended:
                future = futures.pop(number)
                try:
                    outcome = _outcome(future)
                except (OSError, CancelledError) as error:  # it comes by way of the scheduler
                    raise SchedulerLostError(_SCHEDULER_LOST.format(address=address)) from error
                yield number, outcome
                future.release()
            if not ended:
                time.sleep(_POLL_INTERVAL_S)
                yield -1, {}
                while not events.empty():
                    yield -1, events.get()
    finally:
        with suppress(Exception):  # the scheduler may be gone
            client.cancel(list(futures.values()))
            client.unsubscribe_topic(topic)


def _process_and_report(task: dict[str, Any], number: int, topic: str) -> dict[str, Any]:
    """On a worker: process an image, and report its progress to the client."""
    from distributed import get_worker

    worker: Any = get_worker()

    def write(content: dict[str, Any]) -> None:
        with suppress(Exception):  # progress is not worth a failure
            worker.log_event(topic, {"image": number, **content})

    return process_image(task, ThrottledProgress(write, _REPORT_INTERVAL_S))


def _has_gpu_workers(client: Any) -> bool:
    workers: Mapping[str, Any] = client.scheduler_info(n_workers=-1).get("workers", {})
    return any((worker.get("resources") or {}).get("GPU", 0) >= 1 for worker in workers.values())


def _outcome(future: Any) -> dict[str, Any]:
    """The outcome of an image; it failed where worker after worker died over it."""
    if future.status != "error":
        return dict(future.result())
    why = " ".join(str(future.exception()).split())
    return {"status": "failed", "error": f"its workers died or lost it ({why[:200]})."}
