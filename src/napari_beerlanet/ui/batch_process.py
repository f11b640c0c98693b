"""A study in a process of its own, which the viewer follows but does not hold."""

from __future__ import annotations

import socket
from pathlib import Path

import psutil

from napari_beerlanet.core.locks import is_locked, read_owner
from napari_beerlanet.core.study import LOCK
from napari_beerlanet.core.studycommand import CONFIG, StudyOrder
from napari_beerlanet.ui.followed_process import FollowedProcess
from napari_beerlanet.ui.recent import Recent
from napari_beerlanet.ui.training_launch import launch_apart, lower_priority
from napari_beerlanet.ui.training_words import Words, why_it_ended

EVENTS = "progress.jsonl"
_WORDS = Words("batch", "run it again", "the last finished image")

RECENT = Recent("batches", "batches.json")
"""Folders of results."""


class BatchProcess(FollowedProcess):
    """The study that the study.json of a folder of results describes."""

    def _launch(self) -> psutil.Process:
        words = ["napari_beerlanet.cli", "batch", str(self.folder / CONFIG), "--json"]
        child = launch_apart(words, self.folder, self.folder / EVENTS, self.environment)
        process = psutil.Process(child.pid)
        lower_priority(process)
        return process

    def _why(self, code: int | None = None, error: BaseException | None = None) -> str:
        return why_it_ended(self.folder, code, error, _WORDS)


def prepare(order: StudyOrder) -> Path:
    """Write down what is to be done; the folder that a `BatchProcess` can then begin in."""
    order.write()
    (order.out / EVENTS).write_bytes(b"")
    RECENT.remember(order.out)
    return order.out


def running_in(out: Path) -> int | None:
    """The process on this computer that writes results to a folder, None where there is none."""
    if not is_locked(out / LOCK):
        return None
    owner = read_owner(out / LOCK)
    number = owner.get("process")
    return number if owner.get("host") == socket.gethostname() and isinstance(number, int) else None


def find_running() -> tuple[Path, int] | None:
    """A study that goes on, of those that were begun last."""
    for out in RECENT.paths():
        number = running_in(out)
        if number is not None:
            return out, number
    return None
