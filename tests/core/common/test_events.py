"""Processes of background runs: how they end. Their event logs: tests/ui/finetune."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

START = """
    import atexit, gc, sys, threading, time
    from napari_beerlanet.core.common.events import loaded, run_process

    class Large:
        def __del__(self):
            print("freed")

    large = Large()
    atexit.register(print, "exit function of before")
"""


def run(main: str) -> subprocess.CompletedProcess[str]:
    code = textwrap.dedent(START) + textwrap.dedent(main) + "run_process(main)\n"
    # Without what other tests have their processes run first, which changes how they end.
    paths = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    paths = [path for path in paths if Path(path).name != "at_start"]
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=600,
    )


@pytest.mark.parametrize("status", [0, 143])
def test_a_process_ends_with_its_status_and_without_freeing_its_memory(status):
    done = run(f"""
        def later():
            time.sleep(0.2)
            print("thread has ended")

        def main():
            print("collects:", gc.isenabled())
            loaded()
            print("collects:", gc.isenabled(), gc.get_freeze_count() > 1000)
            atexit.register(print, "exit function")
            threading.Thread(target=later).start()
            sys.stdout.write("no newline, ")
            return {status}
    """)
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines() == [
        "collects: False",
        "collects: True True",
        "no newline, thread has ended",
        "exit function",
    ]
    assert done.stderr == ""


def test_an_exception_ends_a_process_as_ever():
    done = run("""
        def main():
            raise ValueError("in the middle of it")
    """)
    assert done.returncode == 1
    assert "ValueError: in the middle of it" in done.stderr
    assert done.stdout.splitlines() == ["exit function of before", "freed"]


def test_wrong_arguments_end_a_process_as_ever():
    done = run("""
        def main():
            sys.exit(2)
    """)
    assert done.returncode == 2
    assert "freed" in done.stdout
