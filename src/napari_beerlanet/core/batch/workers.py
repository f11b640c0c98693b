"""Worker processes of a study on this machine; a worker that dies is replaced.

Each process reads one task per line and writes its progress and the outcome as lines of JSON. It is
started by module name rather than by importing the caller's program again, and ends as soon as its
parent is gone.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from contextlib import suppress
from queue import Empty, Queue, SimpleQueue
from typing import IO, Any

from napari_beerlanet.core.batch.image import Outcomes, TaskRunner, Tasks, process_image
from napari_beerlanet.core.common.progress import ThrottledProgress
from napari_beerlanet.core.common.threads import thread_count

_POLL_INTERVAL_S = 0.5
_STOP_TIMEOUT_S = 10.0
_MAX_ATTEMPTS = 3  # worker processes that one image may cost
_WORKER_DIED = (
    "its worker process died {times} times, perhaps for lack of memory; try fewer workers."
)

_Task = tuple[int, dict[str, Any]]


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
                    task = self._waiting.popleft()
                except IndexError:
                    break
                outcome = self._process_task(*task)
                if not self._stopped:
                    self._ready.put((task[0], outcome))
        except BaseException as error:
            self._ready.put((task[0], {"status": "failed", "error": f"{error}"}))
        finally:
            self._close()
            self._ready.put(None)

    def _process_task(self, image: int, task: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_MAX_ATTEMPTS):
            try:
                outcome = self._send(image, {**task, "worker": self._number})
            except OSError:
                outcome = None
            if outcome is not None:
                return outcome
            self._close()
            if self._stopped:
                break
        return {
            "status": "failed",
            "error": f"{task['source']}: {_WORKER_DIED.format(times=_MAX_ATTEMPTS)}",
        }

    def _send(self, image: int, task: dict[str, Any]) -> dict[str, Any] | None:
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
            self._ready.put((-1, {"image": image, **content}))
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


def main() -> None:
    """Process the tasks of standard input, one after the other, until it ends."""
    # What libraries print must not come between our lines.
    output = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_read_tasks, args=(tasks,), daemon=True).start()

    def write(content: dict[str, Any]) -> None:
        output.write(json.dumps(content).encode() + b"\n")
        output.flush()

    while True:
        write(process_image(json.loads(tasks.get()), ThrottledProgress(write)))


def _read_tasks(tasks: SimpleQueue[bytes]) -> None:
    """Read tasks. When the parent is gone, another run may process this image, so end at once."""
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
