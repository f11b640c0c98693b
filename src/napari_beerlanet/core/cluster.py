"""A study's images on the workers of a dask.distributed cluster.

An image of a worker that dies goes to another by the scheduler's own doing, up to its limit. Every
worker process loads the model once.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Generator
from typing import Any

from .files import FileError
from .studyimage import do_image

_LOOK = 0.2  # seconds between two looks at what has ended

Task = tuple[int, dict[str, Any]]


def on_cluster(scheduler: Any) -> Callable[[Any], Generator[Task]]:
    """A runner of tasks, see `study.Runner`: by a scheduler's address or a `Client`."""
    try:
        import distributed
    except ImportError as error:
        raise FileError(
            'Working on a cluster needs dask.distributed: pip install "napari-beerlanet[cluster]".'
        ) from error

    def run(tasks: Any) -> Generator[Task]:
        own = isinstance(scheduler, str)
        client = _connect(distributed, scheduler) if own else scheduler
        run_id = uuid.uuid4().hex[:8]
        futures = {
            client.submit(do_image, task, key=f"beerlanet-{run_id}-{number}", pure=False): number
            for number, task in tasks
        }
        try:
            ended: Any = distributed.as_completed  # has no types
            ended = ended(list(futures))
            while futures:
                if not ended.has_ready():
                    time.sleep(_LOOK)
                    yield -1, {}
                    continue
                future = next(ended)
                yield futures.pop(future), _outcome(future)
                future.release()
        finally:
            client.cancel(list(futures))
            if own:
                client.close()

    return run


def _connect(distributed: Any, address: str) -> Any:
    try:
        return distributed.Client(address, timeout=20)
    except (OSError, TimeoutError, ValueError) as error:
        raise FileError(f"No dask scheduler answers at {address} ({error}).") from error


def _outcome(future: Any) -> dict[str, Any]:
    """What became of an image; it failed where worker after worker died over it."""
    error = future.exception() if future.status != "cancelled" else None
    if future.status == "finished":
        return dict(future.result())
    why = " ".join(str(error or "the scheduler gave it up").split())
    return {"status": "failed", "error": f"its workers died or lost it ({why[:200]})."}
