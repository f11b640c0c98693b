"""Runs in processes of their own, followed through files on a drive that may be slow."""

import json
import subprocess
import sys
import threading

import psutil
from qtpy.QtCore import QTimer

from napari_beerlanet.core.common.events import EventTail, RunState
from napari_beerlanet.ui.common import background_process
from napari_beerlanet.ui.common.background_process import BackgroundProcess

WRITE = """
import json, sys
with open(sys.argv[1], "a") as file:
    for number in range(int(sys.argv[2])):
        file.write(json.dumps({"event": "epoch", "epoch": number, "note": "x" * 100}) + "\\n")
    file.write(json.dumps({"event": "end"}) + "\\n")
"""


class WritingProcess(BackgroundProcess):
    """Writes so many events, and ends."""

    count = 3

    def _launch(self):
        file = self.folder / "progress.jsonl"
        child = subprocess.Popen([sys.executable, "-c", WRITE, str(file), str(self.count)])
        background_process._children[child.pid] = child
        return psutil.Process(child.pid)


def test_the_window_answers_while_the_drive_does_not(qtbot, until, tmp_path, monkeypatch):
    answers, readers, read = threading.Event(), set(), EventTail.read

    def slow(tail):
        readers.add(threading.current_thread())
        answers.wait(60)
        return read(tail)

    monkeypatch.setattr(EventTail, "read", slow)
    run, seen, ends, ticks = WritingProcess(tmp_path), [], [], []
    run.event_received.connect(seen.append)
    run.ended.connect(ends.append)
    timer = QTimer()
    timer.timeout.connect(lambda: ticks.append(answers.is_set()))
    timer.start(5)
    run.start()
    until(lambda: bool(readers))
    until(lambda: ticks.count(False) > 5)
    assert threading.main_thread() not in readers
    assert not seen
    answers.set()
    until(lambda: bool(ends))
    timer.stop()
    assert [event["event"] for event in seen] == ["epoch"] * 3 + ["end"]
    assert [end.state for end in ends] == [RunState.FINISHED]
    assert threading.main_thread() not in readers


def test_all_that_a_run_has_left_is_read(qtbot, until, tmp_path):
    """More than is read at once."""
    run, seen, ends = WritingProcess(tmp_path), [], []
    run.count = 4000
    run.event_received.connect(lambda event: seen.append(event.get("epoch")))
    run.ended.connect(ends.append)
    run.start()
    until(lambda: bool(ends))
    assert seen == [*range(4000), None]
    assert ends[0].state is RunState.FINISHED
    assert json.loads((tmp_path / "progress.jsonl").read_text().splitlines()[-1])["event"] == "end"


def test_a_run_that_is_followed_no_more_says_nothing(qtbot, until, tmp_path, monkeypatch):
    answers, read = threading.Event(), EventTail.read

    def slow(tail):
        answers.wait(60)
        return read(tail)

    monkeypatch.setattr(EventTail, "read", slow)
    run, seen = WritingProcess(tmp_path), []
    run.event_received.connect(seen.append)
    run.start()
    until(lambda: run._reading.running)
    run.detach()
    answers.set()
    until(lambda: not run._reading.running)
    until(lambda: not background_process.is_alive(run._process))
    assert not seen
