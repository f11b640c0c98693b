"""A study's images on the workers of a dask.distributed cluster.

An image of a worker that dies goes to another by the scheduler's own doing, up to its limit. Every
worker process loads the model once. Where workers say that they have a GPU (the resource "GPU"),
only these find objects, one image at a time for each.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from .files import FileError
from .progress import Teller
from .studyimage import do_image

_LOOK = 0.2  # seconds between two looks at what has ended
_TELL = 1.0  # seconds between two words of a worker on how far its image is
_GONE = "the dask scheduler at {address} is gone; what was finished is kept, run it again to go on."

Task = tuple[int, dict[str, Any]]


class SchedulerGone(FileError):
    """The scheduler ended before the study did."""


def on_cluster(scheduler: Any) -> Callable[[Any], Generator[Task]]:
    """A runner of tasks, see `study.Runner`.

    `scheduler`: an address, a `Client`, or a cluster that gives one, such as dask-jobqueue's.
    """
    try:
        import distributed
    except ImportError as error:
        raise FileError(
            'Working on a cluster needs dask.distributed: pip install "napari-beerlanet[cluster]".'
        ) from error

    def run(tasks: Any) -> Generator[Task]:
        own = not hasattr(scheduler, "submit")
        client = _connect(distributed, scheduler) if own else scheduler
        try:
            yield from _results(client, list(tasks))
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


def _results(client: Any, tasks: list[Task]) -> Generator[Task]:
    topic = f"beerlanet-{uuid.uuid4().hex[:8]}"
    told: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client.subscribe_topic(topic, lambda event: told.put(event[1]))
    address = str(client.scheduler.address)
    cards = _have_gpus(client)
    futures = {}
    for number, task in tasks:
        needs = {"GPU": 1} if cards and task["settings"]["model"] else None
        key = f"{topic}-{number}"
        work = (_do_and_tell, task, number, topic)
        futures[number] = client.submit(*work, key=key, pure=False, resources=needs)
    try:
        while futures:
            ended = [n for n, future in futures.items() if future.status != "pending"]
            if client.status != "running":
                raise SchedulerGone(_GONE.format(address=address))
            for number in ended:
                future = futures.pop(number)
                try:
                    outcome = _outcome(future)
                except (OSError, CancelledError) as error:  # it comes by way of the scheduler
                    raise SchedulerGone(_GONE.format(address=address)) from error
                yield number, outcome
                future.release()
            if not ended:
                time.sleep(_LOOK)
                yield -1, {}
                while not told.empty():
                    yield -1, told.get()
    finally:
        with suppress(Exception):  # nobody may be left to hear it
            client.cancel(list(futures.values()))
            client.unsubscribe_topic(topic)


def _do_and_tell(task: dict[str, Any], number: int, topic: str) -> dict[str, Any]:
    """On a worker: do an image, and have the client hear how far it is."""
    from distributed import get_worker

    worker: Any = get_worker()

    def write(content: dict[str, Any]) -> None:
        with suppress(Exception):  # nobody has to listen
            worker.log_event(topic, {"image": number, **content})

    return do_image(task, Teller(write, _TELL))


def _have_gpus(client: Any) -> bool:
    workers: Mapping[str, Any] = client.scheduler_info(n_workers=-1).get("workers", {})
    return any((worker.get("resources") or {}).get("GPU", 0) >= 1 for worker in workers.values())


def _outcome(future: Any) -> dict[str, Any]:
    """What became of an image; it failed where worker after worker died over it."""
    if future.status != "error":
        return dict(future.result())
    why = " ".join(str(future.exception()).split())
    return {"status": "failed", "error": f"its workers died or lost it ({why[:200]})."}
