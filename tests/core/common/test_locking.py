"""Locks of folders: one holder at a time, across versions, and what others are told."""

import json
import os
import socket
import subprocess
import sys
import time

import pytest

from napari_beerlanet.core.common import locking
from napari_beerlanet.core.common.locking import FolderLock, LockedError, is_locked, read_owner

HOLDER = """
import sys, time
from pathlib import Path
from napari_beerlanet.core.common.locking import FolderLock
lock = FolderLock(Path(sys.argv[1]))
print("held", flush=True)
time.sleep(600)
"""


@pytest.fixture
def holder(tmp_path):
    """Starts a process that holds the lock of the folder."""
    started = []

    def start(code=HOLDER):
        command = [sys.executable, "-c", code, str(tmp_path / ".lock")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        started.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_the_owner_is_named(tmp_path, holder):
    process = holder()
    path = tmp_path / ".lock"
    assert is_locked(path)
    owner = read_owner(path)
    assert (owner["process"], owner["host"]) == (process.pid, socket.gethostname())
    with pytest.raises(
        LockedError, match=rf"open here \(process {process.pid}, since .*\); wait\.$"
    ):
        FolderLock(path, busy="open here", advice="wait")
    assert read_owner(path) == owner


def test_a_killed_owner_holds_nothing(tmp_path, holder):
    process = holder()
    process.kill()
    process.wait()
    lock = FolderLock(tmp_path / ".lock")
    assert read_owner(lock.path)["process"] == os.getpid()
    lock.release()
    assert not lock.held
    assert read_owner(lock.path) == {}


@pytest.mark.parametrize(
    ("left", "process"),
    [
        (json.dumps({"process": 4711, "host": "there", "since": "2026-01-01"}), 4711),
        ("", None),
        ("[1, 2]", None),
        ("{" * 100_000, None),
    ],
)
def test_what_others_left_is_understood(tmp_path, left, process):
    path = tmp_path / ".lock"
    path.write_text(left)
    assert read_owner(path).get("process") == process
    FolderLock(path).release()


def test_children_of_a_killed_owner_are_given_time(tmp_path, monkeypatch):
    """They have inherited the lock."""
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    path = tmp_path / ".lock"
    path.write_text(json.dumps({"process": done.pid}))
    states = iter(["taken", "taken", "locked"])
    monkeypatch.setattr(locking, "try_lock", lambda file: next(states))
    FolderLock(path, timeout=60).release()
    assert next(states, None) is None
    path.write_text(json.dumps({"process": done.pid}))
    monkeypatch.setattr(locking, "try_lock", lambda file: "taken")
    with pytest.raises(LockedError):
        FolderLock(path, timeout=0.3)


def test_a_second_lock_of_this_process_is_refused_at_once(tmp_path, monkeypatch):
    lock = FolderLock(tmp_path / ".lock")
    monkeypatch.setattr(time, "sleep", lambda _: pytest.fail("it waits"))
    with pytest.raises(LockedError):
        FolderLock(tmp_path / ".lock", timeout=30)
    lock.release()
