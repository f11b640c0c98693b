"""The thread pool of the kernels, and an ordered map over threads with bounded look-ahead.

The kernels release the GIL and each call works on its own slice, so plain threads suffice.
Unlike numba's own `parallel=True` this is safe from several Python threads at once on every
platform, and because slices do not depend on the number of threads, neither do results.

On a machine where nothing has been compiled yet, NumPy can serve in the place of kernels while
another process compiles them: see `numpy_until_compiled`.
"""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from functools import cache, partial
from importlib import import_module
from typing import Any, TypeVar

T = TypeVar("T")
R = TypeVar("R")

_pool: ThreadPoolExecutor | None = None
_thread_local = threading.local()
_in_numpy: ContextVar[bool] = ContextVar("in_numpy", default=False)
_being_compiled: Callable[[], bool] | None = None


def njit(cache: bool, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    """numba's decorator of this name.

    Where no folder can be written to, numba refuses to keep what it compiles, and the function with
    it: there, each process compiles for itself.
    """
    numba = _import_numba()

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return numba.njit(cache=cache, **options)(function)
        except RuntimeError:
            return numba.njit(**options)(function)

    return decorate


@cache
def _import_numba() -> Any:
    """numba, which leaves SciPy's linear algebra alone until a function multiplies matrices.

    With the first function that it loads, of whatever kind, it loads 140 modules to know that it
    could link such products: 0.2 s and 16 MB for what no kernel has. A function that has them loads
    those modules when it is compiled, as ever.
    """
    import numba

    if "numba.np.arraymath" not in sys.modules:
        linalg: Any = import_module("numba.np.linalg")
        load = getattr(linalg, "ensure_blas", None)

        def ensure_blas() -> None:  # called once, by `arraymath` as it is loaded
            linalg.ensure_blas = load

        if load is not None:
            linalg.ensure_blas = ensure_blas
    return numba


def set_being_compiled(being_compiled: Callable[[], bool] | None) -> None:
    """What says whether another process is compiling the kernels; None: there is none."""
    global _being_compiled
    _being_compiled = being_compiled


def kernels_being_compiled() -> bool:
    """Whether another process is compiling the kernels for this one."""
    return _being_compiled is not None and _being_compiled()


@contextmanager
def numpy_until_compiled() -> Iterator[None]:
    """NumPy serves in the place of the kernels in here if these are being compiled when it begins.

    What is chosen then holds to the end, in threads of ours, too. Results differ by rounding: sums
    are added up in another order.
    """
    token = _in_numpy.set(kernels_being_compiled())
    try:
        yield
    finally:
        _in_numpy.reset(token)


def in_numpy() -> bool:
    """Whether NumPy is to serve in the place of a kernel, see `numpy_until_compiled`."""
    return _in_numpy.get()


def thread_count() -> int:
    """Threads that the kernels use: `OMP_NUM_THREADS` if set, otherwise the cores we may use."""
    requested = os.environ.get("OMP_NUM_THREADS", "")
    if requested.isdigit() and int(requested) > 0:
        return int(requested)
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def run_parallel(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """Run the tasks on the pool and return their results in order."""
    if len(tasks) < 2 or thread_count() < 2 or getattr(_thread_local, "worker", False):
        return [task() for task in tasks]
    contexts = [copy_context() for _ in tasks]
    return list(_shared_pool().map(lambda context, task: context.run(task), contexts, tasks))


def run_with_helpers(work: Callable[[], T], helpers: int) -> T:
    """The result of `work`, which up to so many threads of the pool do at the same time.

    For work that shares out itself what there is to do: the caller's own call returns when all is
    done, whether or not a helper came to it. None help where the caller is of the pool.
    """
    futures: list[Future[T]] = []
    if helpers > 0 and not getattr(_thread_local, "worker", False):
        futures = [_shared_pool().submit(copy_context().run, work) for _ in range(helpers)]
    try:
        return work()
    finally:
        for future in futures:
            if not future.cancel():  # it holds what they share, so that it must not outlive this
                future.exception()


def map_threads(
    work: Callable[[T], R], items: Iterable[T], threads: int | None = None
) -> Generator[R]:
    """The results of `work` in the order of the items; few are under way at a time.

    Where the consumer stops (an exception, too), nothing new is started.
    """
    count = threads or thread_count()
    if count < 2:
        yield from map(work, items)
        return
    under_way: deque[Future[R]] = deque()
    with ThreadPoolExecutor(count, "beerlanet-read") as pool:
        try:
            for item in items:
                under_way.append(pool.submit(copy_context().run, work, item))
                if len(under_way) > 2 * count:
                    yield under_way.popleft().result()
            while under_way:
                yield under_way.popleft().result()
        finally:
            for future in under_way:
                future.cancel()


def chunk_slices(total: int, step: int) -> list[slice]:
    """`range(total)` cut into slices of `step`; the last may be shorter."""
    return [slice(start, min(start + step, total)) for start in range(0, total, step)]


def map_chunks(work: Callable[[slice], T], total: int, step: int) -> list[T]:
    """Run `work` on every slice of `chunk_slices` and return the results in order."""
    return run_parallel([partial(work, part) for part in chunk_slices(total, step)])


def _shared_pool() -> ThreadPoolExecutor:
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(thread_count(), "beerlanet", initializer=_mark_worker)
    return _pool


def _mark_worker() -> None:
    # A worker that waited for the pool it belongs to could wait for ever.
    _thread_local.worker = True


def _reset_after_fork() -> None:
    # Threads do not survive a fork: the child needs a pool of its own, and torch would wait for
    # ever for those of the parent. It cannot be given others, so it works without.
    global _pool
    _pool = None
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.set_num_threads(1)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
