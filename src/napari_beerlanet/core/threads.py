"""One thread pool for the kernels.

The kernels release the GIL and each call works on its own slice, so plain threads suffice.
Unlike numba's own `parallel=True` this is safe from several Python threads at once on every
platform, and because slices do not depend on the number of threads, neither do results.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

_pool: ThreadPoolExecutor | None = None
_inside = threading.local()


def thread_count() -> int:
    """Threads that the kernels use: `OMP_NUM_THREADS` if set, otherwise the cores we may use."""
    asked = os.environ.get("OMP_NUM_THREADS", "")
    if asked.isdigit() and int(asked) > 0:
        return int(asked)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_all(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run the tasks on the pool and return their results in order."""
    if len(tasks) < 2 or thread_count() < 2 or getattr(_inside, "worker", False):
        return [task() for task in tasks]
    return list(_shared_pool().map(lambda task: task(), tasks))


def slices(total: int, step: int) -> list[slice]:
    """`range(total)` cut into slices of `step`; the last may be shorter."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(thread_count(), "beerlanet", initializer=_mark_worker)
    return _pool


def _mark_worker() -> None:
    # A worker that waited for the pool it belongs to could wait for ever.
    _inside.worker = True


def _forget_pool() -> None:
    # Threads do not survive a fork: the child needs a pool of its own.
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
