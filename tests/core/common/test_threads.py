"""The thread pool: order, nesting, forks, several callers at once."""

import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numba
import pytest
from hypothesis import given
from hypothesis import strategies as st

from napari_beerlanet import decompose
from napari_beerlanet.core.common import threads
from napari_beerlanet.core.common.threads import (
    chunk_slices,
    njit,
    run_parallel,
    run_with_helpers,
    thread_count,
)
from pictures import section, smear


@pytest.fixture
def several(monkeypatch):
    """Three threads, whatever this machine has; a pool of the test's own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    monkeypatch.setattr(threads, "_pool", None)
    yield
    if threads._pool is not None:
        threads._pool.shutdown()


@given(st.integers(0, 1000), st.integers(1, 50))
def test_slices_cover_everything_once(total, step):
    parts = chunk_slices(total, step)
    assert [i for p in parts for i in range(total)[p]] == list(range(total))
    assert all(p.stop - p.start <= step for p in parts)


@pytest.mark.usefixtures("several")
def test_results_come_in_the_order_of_tasks():
    def task(k):
        time.sleep(0.02 * (k % 3 == 0))
        return k

    assert run_parallel([lambda k=k: task(k) for k in range(12)]) == list(range(12))
    assert run_parallel([]) == []


@pytest.mark.usefixtures("several")
def test_tasks_run_at_the_same_time():
    meeting = threading.Barrier(2, timeout=600)
    assert sorted(run_parallel([meeting.wait, meeting.wait])) == [0, 1]


NESTED = """
from napari_beerlanet.core.common.threads import run_parallel
outer = lambda k: sum(run_parallel([lambda j=j: k * j for j in range(5)]))
print(run_parallel([lambda k=k: outer(k) for k in range(9)]))
"""


def test_nested_calls_do_not_wait_for_ever():
    done = subprocess.run(  # a process of its own: one that waits for ever can be ended
        [sys.executable, "-c", NESTED],
        env={**os.environ, "OMP_NUM_THREADS": "3"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.stdout.strip() == str([10 * k for k in range(9)]), done.stderr


@pytest.mark.usefixtures("several")
def test_an_error_in_a_task_reaches_the_caller_and_the_pool_lives_on():
    def fail():
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        run_parallel([fail, fail, lambda: 1])
    assert run_parallel([lambda: 1, lambda: 2]) == [1, 2]


@pytest.mark.usefixtures("several")
def test_helpers_come_and_the_caller_gets_its_own_result():
    came, meeting = [], threading.Barrier(2, timeout=60)

    def work():
        came.append(threading.current_thread())
        meeting.wait()
        return threading.current_thread()

    assert run_with_helpers(work, 1) is threading.current_thread()
    assert len(set(came)) == 2


def test_the_caller_does_not_wait_for_a_helper_that_is_busy_elsewhere(monkeypatch):
    busy, free = threading.Event(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        monkeypatch.setattr(threads, "_pool", pool)
        pool.submit(lambda: (busy.set(), free.wait(60)))
        assert busy.wait(60)
        came = []
        assert run_with_helpers(lambda: came.append(1) or "done", 3) == "done"
        assert came == [1]
        free.set()
    assert came == [1]  # nor later


@pytest.mark.usefixtures("several")
def test_nobody_helps_a_helper():
    meeting, came = threading.Barrier(2, timeout=60), []

    def nested():
        meeting.wait()
        return run_with_helpers(lambda: came.append(1), 5)

    run_parallel([nested, nested])
    assert came == [1, 1]


@pytest.mark.usefixtures("several")
def test_an_error_of_a_helper_is_not_the_callers():
    caller, meeting = threading.current_thread(), threading.Barrier(2, timeout=60)

    def work():
        meeting.wait()
        if threading.current_thread() is not caller:
            raise OSError("not mine")
        return 3

    assert run_with_helpers(work, 1) == 3


def test_thread_count_follows_the_environment(monkeypatch):
    for text, expected in (("1", 1), ("5", 5)):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert thread_count() == expected
    for text in ("0", "", "many", "-2"):
        monkeypatch.setenv("OMP_NUM_THREADS", text)
        assert 1 <= thread_count() <= (os.cpu_count() or 1)


@pytest.mark.usefixtures("several")
def test_several_callers_at_once_get_the_answers_they_get_alone():
    pictures = [smear(), section(), smear(seed=1), section(seed=1)]
    jobs = [(p, k) for p in pictures for k in (8, "converge")]

    def work(job):
        d = decompose(job[0], 4, job[1], lam=0.1, gamma=0.05)
        return d.spectra.tobytes() + d.densities.tobytes() + d.background.tobytes()

    alone = [work(job) for job in jobs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(2):
            assert list(pool.map(work, jobs)) == alone


FORK = """
import os, sys, time
import numpy as np
from napari_beerlanet import decompose
from napari_beerlanet.core.common.threads import run_parallel
from napari_beerlanet import load_checkpoint
model = load_checkpoint("blood-cells", "cpu")
image = np.random.default_rng(0).integers(0, 256, (300, 400, 3), np.uint8)

def answer():
    assert run_parallel([lambda k=k: k for k in range(4)]) == [0, 1, 2, 3]
    steps, end = decompose(image, 3, 5, lam=1.0, gamma=0.1), decompose(image[:50], 3, "converge")
    found = model.detect(image, object_size=90.0, confidence=0.01)
    return steps.densities.tobytes() + end.densities.tobytes(), len(found)

before = answer()
child = os.fork()
if child == 0:
    os._exit(0 if answer() == before else 7)
for _ in range(600):
    pid, status = os.waitpid(child, os.WNOHANG)
    if pid:
        sys.exit(os.waitstatus_to_exitcode(status))
    time.sleep(0.1)
os.kill(child, 9)
sys.exit("the child hangs")
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_computes_too():
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", FORK],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr


THREADS = """
import hashlib
import numpy as np
from napari_beerlanet import decompose
from napari_beerlanet.core.common.threads import thread_count
from napari_beerlanet.core.stains.solver.unroll import COLUMNS_PER_TASK
from napari_beerlanet.samples import blood_smear
many = np.random.default_rng(0).integers(0, 256, (280, 280, 3), np.uint8)
assert len(np.unique(many.reshape(-1, 3), axis=0)) > 4 * COLUMNS_PER_TASK
image = blood_smear((200, 260), noise=0.03, jpeg_quality=None).image
assert len(np.unique(image.reshape(-1, 3), axis=0)) > 2 * COLUMNS_PER_TASK  # work for both
for d in (
    decompose(image, 5, 10, lam=2.0, gamma=0.02),
    decompose(many, 5, 4, lam=2.0, gamma=0.02),
    decompose(many / 255, 5, 4, lam=2.0, gamma=0.02),
    decompose(image, 8, "converge"),
):
    for part in (d.spectra, d.background, d.densities):
        print(hashlib.sha256(part.tobytes()).hexdigest())
print(thread_count())
"""


@pytest.mark.slow
def test_results_do_not_depend_on_the_number_of_threads():
    runs = [
        subprocess.Popen(
            [sys.executable, "-c", THREADS],
            env={**os.environ, "OMP_NUM_THREADS": count},
            stdout=subprocess.PIPE,
            text=True,
        )
        for count in ("1", "2")
    ]
    try:
        outputs = [run.communicate(timeout=600)[0].split() for run in runs]
    finally:
        for run in runs:
            run.kill()
            run.wait()
            run.stdout.close()
    assert [lines.pop() for lines in outputs] == ["1", "2"]
    solved = ("palette", "more colours", "dense", "converge")
    names = [f"{part}, {run}" for run in solved for part in "SxD"]
    pairs = zip(names, *outputs, strict=True)
    assert [name for name, one, two in pairs if one != two] == []


def test_kernels_work_where_nothing_can_be_kept(monkeypatch):
    """numba refuses to cache where neither the package's nor the user's folder can be written."""
    monkeypatch.setattr("numba.core.caching.CacheImpl._locator_classes", [])
    with pytest.raises(RuntimeError, match="cannot cache"):
        numba.njit(cache=True)(thread_count)

    @njit(cache=True, nogil=True)
    def double(x):
        return 2 * x

    assert double(21) == 42


LINEAR_ALGEBRA = """
import sys
import numba
import numpy as np
from napari_beerlanet.core.stains.solver import kernels
print(kernels.encode_planes(np.ones((3, 4), np.float32), np.float32(0.01), np.empty(4, np.uint32)))
print("scipy.linalg" in sys.modules)
multiply = numba.njit(lambda a, b: a @ b)
print(multiply(np.eye(2), np.full((2, 2), 3.0)).sum())
print("scipy.linalg" in sys.modules)
"""


def test_linear_algebra_is_loaded_by_functions_that_need_it_alone():
    done = subprocess.run(
        [sys.executable, "-c", LINEAR_ALGEBRA], capture_output=True, text=True, timeout=600
    )
    assert done.stdout.split() == ["True", "False", "12.0", "True"], done.stderr
