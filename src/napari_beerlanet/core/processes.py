"""A study's images done by processes of this machine; one that dies is replaced.

Each process reads a task per line and writes a line, as JSON, for how far it is and for the
outcome. A process of our own, started by name, rather than one that imports the caller's program
again. It ends as soon as nobody is left to read what it writes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Generator
from contextlib import suppress
from queue import Empty, Queue, SimpleQueue
from typing import IO, Any

from .progress import Teller
from .threads import thread_count

_LOOK = 0.5  # seconds between two looks at what has ended
_LIVES = 3  # processes that one image may cost
_DIED = (
    "the process that worked on it died {times} times (memory may not have sufficed); "
    "try it with fewer workers."
)

Task = tuple[int, dict[str, Any]]


def in_processes(workers: int) -> Callable[[Any], Generator[Task]]:
    """A runner of tasks, see `study.Runner`, with so many processes."""

    def run(tasks: Any) -> Generator[Task]:
        waiting = deque(tasks)
        count = min(workers, len(waiting))
        ready: Queue[Task | None] = Queue()
        threads = max(thread_count() // max(count, 1), 1)
        crew = [_Worker(number, waiting, ready, threads) for number in range(count)]
        try:
            left = count
            while left:
                try:
                    outcome = ready.get(timeout=_LOOK)
                except Empty:
                    yield -1, {}
                    continue
                if outcome is None:
                    left -= 1
                else:
                    yield outcome
        finally:
            waiting.clear()
            for worker in crew:
                worker.end()

    return run


class _Worker:
    """A thread that feeds one process after the other."""

    def __init__(
        self, number: int, waiting: deque[Task], ready: Queue[Task | None], threads: int
    ) -> None:
        self._number, self._waiting, self._ready, self._threads = number, waiting, ready, threads
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Stop at once; results are whole or not there, so nothing is lost but time."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()
        self._thread.join(10)

    def _serve(self) -> None:
        try:
            while not self._ended:
                try:
                    task = self._waiting.popleft()
                except IndexError:
                    break
                outcome = self._do(*task)
                if not self._ended:
                    self._ready.put((task[0], outcome))
        except BaseException as error:
            self._ready.put((task[0], {"status": "failed", "error": f"{error}"}))
        finally:
            self._close()
            self._ready.put(None)

    def _do(self, image: int, task: dict[str, Any]) -> dict[str, Any]:
        for _ in range(_LIVES):
            try:
                outcome = self._ask(image, {**task, "worker": self._number})
            except OSError:
                outcome = None
            if outcome is not None:
                return outcome
            self._close()
            if self._ended:
                break
        return {"status": "failed", "error": f"{task['source']}: {_DIED.format(times=_LIVES)}"}

    def _ask(self, image: int, task: dict[str, Any]) -> dict[str, Any] | None:
        """The outcome of a task, None where the process died over it."""
        process = self._alive()
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

    def _alive(self) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise RuntimeError("stopped")
            if self._process is None:
                own = {**os.environ, "OMP_NUM_THREADS": str(self._threads)}
                self._process = subprocess.Popen(
                    [sys.executable, "-m", __name__],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    env=own,
                )
            return self._process

    def _close(self) -> None:
        with self._lock:
            process, self._process = self._process, None
        if process is not None:
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    _shut(stream)
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _shut(stream: IO[bytes]) -> None:
    with suppress(OSError):  # what was in it was for a process that is gone
        stream.close()


def main() -> None:
    """Do the tasks of standard input, one after the other, until it ends."""
    # What libraries print must not come between our lines.
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    tasks: SimpleQueue[bytes] = SimpleQueue()
    threading.Thread(target=_listen, args=(tasks,), daemon=True).start()
    from .studyimage import do_image

    def write(content: dict[str, Any]) -> None:
        answers.write(json.dumps(content).encode() + b"\n")
        answers.flush()

    while True:
        write(do_image(json.loads(tasks.get()), Teller(write)))


def _listen(tasks: SimpleQueue[bytes]) -> None:
    """Take tasks in. When whoever gives them is gone, another may do this image, so end at once."""
    for line in sys.stdin.buffer:
        tasks.put(line)
    os._exit(0)


if __name__ == "__main__":
    main()
