"""Where the jobs of a run are done: worker processes on this machine, or a dask cluster.

A task is a plain dict: "work" names the function that does it ("package.module:function", called
with the task and a `Report`), "title" what it is called in messages, and "gpu" says whether it runs
a network. Its outcome is a plain dict, too, see `core.common.jobs`.

On this machine, each process reads one task per line and writes its progress and the outcome as
lines of JSON. It is started by module name rather than by importing the caller's program again, and
ends as soon as its parent is gone. A worker that dies is replaced.

On a cluster of dask.distributed, the scheduler reassigns the task of a worker that dies, up to its
own limit; where there is no worker at all, the run waits for one, and says so. Where workers
declare the resource "GPU", only these get tasks that need one, one task at a time for each.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import Empty, Queue, SimpleQueue
from typing import IO, Any

from napari_beerlanet.core.common.messages import error_detail, format_duration, shortened
from napari_beerlanet.core.common.progress import Report, ThrottledProgress
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.common.threads import thread_count

Tasks = Iterable[tuple[int, dict[str, Any]]]
Outcomes = Generator[tuple[int, dict[str, Any]]]
TaskRunner = Callable[[Tasks], Outcomes]
"""Does numbered tasks in any order and yields their outcomes as they come, and number −1 now and
then, perhaps with the progress of a task, or a "notice" of why there is none ("" where that is
over), so that the caller can stop it by closing."""

_POLL_INTERVAL_S = 0.5
_STOP_TIMEOUT_S = 10.0
_MAX_ATTEMPTS = 3  # worker processes that one task may cost
_WORKER_DIED = (
    "its worker process died {times} times, perhaps for lack of memory; try fewer workers."
)

_CLUSTER_POLL_INTERVAL_S = 0.2
_REPORT_INTERVAL_S = 1.0  # of a worker on the progress of its task
_RESULT_TIMEOUT_S = 5.0  # a result is small: where it takes longer, its worker is gone
_WORKERS_INTERVAL_S = 2.0  # between looks at which workers there are
_NO_WORKERS_S = 10.0  # a worker that dies is replaced sooner
_NO_WORKERS = (
    "no worker{kind} has been connected to the dask scheduler at {address} for {time}; the run "
    "waits. Start one (dask worker {address}), or stop the run: what is finished is saved."
)
_SCHEDULER_LOST = (
    "the dask scheduler at {address} is gone; what is finished is saved, run it again to resume."
)

_Task = tuple[int, dict[str, Any]]


def do_task(task: Mapping[str, Any], report: Report | None = None) -> dict[str, Any]:
    """Do a task in this process, and return its outcome."""
    module, _, function = str(task["work"]).partition(":")
    outcome: dict[str, Any] = getattr(importlib.import_module(module), function)(task, report)
    return outcome


def in_process_runner(progress: Callable[[int], Report]) -> TaskRunner:
    """Does one task after the other in this process; `progress` gives the report of each."""
    return lambda tasks: ((number, do_task(task, progress(number))) for number, task in tasks)


def choose_runner(workers: int, scheduler: Any, progress: Callable[[int], Report]) -> TaskRunner:
    """A cluster's where there is a `scheduler`; else so many processes, 0: in this one."""
    if scheduler is not None:
        return cluster_runner(scheduler)
    return process_pool_runner(workers) if workers > 0 else in_process_runner(progress)


def process_pool_runner(workers: int) -> TaskRunner:
    """Runs tasks in so many processes."""

    def run(tasks: Tasks) -> Outcomes:
        waiting = deque(tasks)
        count = min(workers, len(waiting))
        ready: Queue[_Task | None] = Queue()
        threads = max(thread_count() // max(count, 1), 1)
        worker_threads = [_WorkerThread(number, waiting, ready, threads) for number in range(count)]
        try:
            left = count
            while left:
                try:
                    outcome = ready.get(timeout=_POLL_INTERVAL_S)
                except Empty:
                    yield -1, {}
                    continue
                if outcome is None:
                    left -= 1
                else:
                    yield outcome
        finally:
            waiting.clear()
            for worker in worker_threads:
                worker.stop()

    return run


class _WorkerThread:
    """A thread that feeds one process after the other."""

    def __init__(
        self,
        number: int,
        waiting: deque[_Task],
        ready: Queue[_Task | None],
        threads: int,
    ) -> None:
        self._number, self._waiting, self._ready, self._threads = number, waiting, ready, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._stopped = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop at once; results are whole or not there, so nothing is lost but time."""
        with self._lock:
            self._stopped = True
            if self._process is not None:
                self._process.kill()
        self._thread.join(_STOP_TIMEOUT_S)

    def _serve(self) -> None:
        try:
            while not self._stopped:
                try:
                    number, task = self._waiting.popleft()
                except IndexError:
                    break
                try:
                    outcome = self._process_task(number, task)
                except Exception as error:  # the other tasks may do better
                    self._close()
                    reason = f"{task['title']}: {error_detail(error)}."
                    outcome = {"status": "failed", "error": reason}
                if not self._stopped:
                    self._ready.put((number, outcome))
        finally:
            self._close()
            self._ready.put(None)

    def _process_task(self, number: int, task: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_MAX_ATTEMPTS):
            try:
                outcome = self._send(number, {**task, "worker": self._number})
            except OSError:
                outcome = None
            if outcome is not None:
                return outcome
            self._close()
            if self._stopped:
                break
        return {
            "status": "failed",
            "error": f"{task['title']}: {_WORKER_DIED.format(times=_MAX_ATTEMPTS)}",
        }

    def _send(self, number: int, task: dict[str, Any]) -> dict[str, Any] | None:
        """The outcome of a task, None where the process died over it."""
        process = self._running_process()
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(task).encode() + b"\n")
        process.stdin.flush()
        for line in process.stdout:
            if not line.endswith(b"\n"):
                return None
            content = dict(json.loads(line))
            if "status" in content:
                return content
            self._ready.put((-1, {"task": number, **content}))
        return None

    def _running_process(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._stopped:
                raise RuntimeError("stopped")
            if self._process is None:
                environment = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=environment,
                )
            return self._process

    def _close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _close_quietly(stream)
            try:
                process.wait(_STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _close_quietly(stream: IO[bytes]) -> None:
    with suppress(OSError):  # what was in it was for a process that is gone
        stream.close()


# --- on a cluster ---------------------------------------------------------------------------------


class SchedulerLostError(FileError):
    """The scheduler ended before the run did."""


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
        raise FileError(
            f"No dask scheduler answers at {shortened(scheduler)} ({error_detail(error)})."
        ) from error


def _stream_outcomes(client: Any, tasks: Tasks) -> Outcomes:
    topic = f"beerlanet-{uuid.uuid4().hex[:8]}"
    events: SimpleQueue[dict[str, Any]] = SimpleQueue()
    client.subscribe_topic(topic, lambda event: events.put(event[1]))
    address = str(client.scheduler.address)
    has_gpus = _has_gpu_workers(client)
    futures = {}
    watch = _WorkerWatch(client, address)
    for number, task in tasks:
        needs = {"GPU": 1} if has_gpus and task.get("gpu") else None
        watch.needs_gpu |= needs is not None
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
                except TimeoutError:  # its worker has died with it: another does the task again
                    futures[number] = future
                    yield -1, {}
                    continue
                except (OSError, CancelledError) as error:  # it comes by way of the scheduler
                    raise SchedulerLostError(_SCHEDULER_LOST.format(address=address)) from error
                yield number, outcome
                future.release()
            yield from ((-1, {"notice": notice}) for notice in watch.notices())
            if not ended:
                time.sleep(_CLUSTER_POLL_INTERVAL_S)
                yield -1, {}
                while not events.empty():
                    yield -1, events.get()
    finally:
        with suppress(Exception):  # the scheduler may be gone
            client.cancel(list(futures.values()))
            client.unsubscribe_topic(topic)


class _WorkerWatch:
    """Whether a cluster has workers for the tasks, and since when it has none."""

    def __init__(self, client: Any, address: str) -> None:
        self._client, self._address = client, address
        self.needs_gpu = False
        self._looked = self._seen = time.monotonic()
        self._told = 0.0

    def notices(self) -> Iterator[str]:
        """What is to be said now: that there are none, each time twice as late, or "" again."""
        now = time.monotonic()
        if now - self._looked < _WORKERS_INTERVAL_S:
            return
        self._looked = now
        if self._has_workers():
            self._seen = now
            if self._told:
                self._told = 0.0
                yield ""
        elif now - self._seen >= max(_NO_WORKERS_S, 2 * self._told):
            self._told = now - self._seen
            kind = " with a GPU" if self.needs_gpu else ""
            waited = format_duration(self._told)
            yield _NO_WORKERS.format(kind=kind, address=self._address, time=waited)

    def _has_workers(self) -> bool:
        try:
            if self.needs_gpu:
                return _has_gpu_workers(self._client)
            return bool(self._client.scheduler_info(n_workers=-1).get("workers"))
        except (OSError, RuntimeError):  # the scheduler does not answer: that is told elsewhere
            return True


def _process_and_report(task: dict[str, Any], number: int, topic: str) -> dict[str, Any]:
    """On a worker: do a task, and report its progress to the client."""
    from distributed import get_worker

    worker: Any = get_worker()

    def write(content: dict[str, Any]) -> None:
        with suppress(Exception):  # progress is not worth a failure
            worker.log_event(topic, {"task": number, **content})

    return do_task(task, ThrottledProgress(write, _REPORT_INTERVAL_S))


def _has_gpu_workers(client: Any) -> bool:
    workers: Mapping[str, Any] = client.scheduler_info(n_workers=-1).get("workers", {})
    return any((worker.get("resources") or {}).get("GPU", 0) >= 1 for worker in workers.values())


def _outcome(future: Any) -> dict[str, Any]:
    """The outcome of a task; it failed where worker after worker died over it.

    A `TimeoutError` where it was lost with its worker.
    """
    if future.status != "error":
        return dict(future.result(timeout=_RESULT_TIMEOUT_S))
    why = " ".join(str(future.exception()).split())
    return {"status": "failed", "error": f"its workers died or lost it ({why[:200]})."}


# --- a worker process on this machine -------------------------------------------------------------


def main() -> None:
    """Do the tasks of standard input, one after the other, until it ends."""
    # What libraries print must not come between our lines.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_tasks, args=(tasks,), daemon=True).start()

    def write(content: dict[str, Any]) -> None:
        output.write(json.dumps(content).encode() + b"\n")
        output.flush()

    while True:
        write(do_task(json.loads(tasks.get()), ThrottledProgress(write)))


def _read_tasks(tasks: SimpleQueue[bytes]) -> None:
    """Read tasks. When the parent is gone, another run may do this task, so end at once."""
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
