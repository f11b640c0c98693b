"""Runs in processes of their own, followed through files on a drive that may be slow."""

import json
import subprocess
import sys
import threading

import numpy as np
import psutil
import pytest
from napari._qt.dialogs.confirm_close_dialog import ConfirmCloseDialog
from napari.settings import get_settings
from qtpy.QtCore import QTimer
from qtpy.QtGui import QCloseEvent
from qtpy.QtWidgets import QApplication

from napari_beerlanet.core.common.events import EventTail, RunState
from napari_beerlanet.ui.common import background_process
from napari_beerlanet.ui.common.background_process import BackgroundProcess, CloseConfirmation

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


class IdleProcess(BackgroundProcess):
    """Does nothing until it is stopped; a deaf one has to be killed."""

    deaf = False

    def _launch(self):
        deafness = "signal.signal(signal.SIGTERM, signal.SIG_IGN)" if self.deaf else ""
        code = f"import signal, time\n{deafness}\nprint(flush=True)\ntime.sleep(600)"
        child = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        with child.stdout:
            child.stdout.readline()
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


@pytest.mark.parametrize("deaf", [False, True])
def test_a_run_is_stopped_while_the_drive_does_not_answer(
    qtbot, until, tmp_path, monkeypatch, deaf
):
    """Its file is not seen then, so that it gets signals."""
    answers, read = threading.Event(), EventTail.read

    def hanging(tail):
        answers.wait(60)
        return read(tail)

    monkeypatch.setattr(EventTail, "read", hanging)
    run, ends = IdleProcess(tmp_path, stop_timeouts=(0.05, 0.3 if deaf else 600)), []
    run.deaf = deaf
    run.ended.connect(ends.append)
    run.start()
    run._has_events = True  # as after its first epoch
    until(lambda: run._reading.running)
    run.stop()
    until(lambda: not background_process.is_alive(run._process), timeout=20_000)
    assert not answers.is_set()
    answers.set()
    until(lambda: bool(ends))
    assert [end.state for end in ends] == [RunState.STOPPED]


class ClosedByWindowManager(QCloseEvent):
    """What a click on the window's own button gives: only then napari asks in `closeEvent`."""

    def spontaneous(self):
        return True


def close_as_a_user(window):
    """As Qt closes a window; whether it did."""
    event = ClosedByWindowManager()
    QApplication.sendEvent(window, event)
    if event.isAccepted():
        window.hide()
    return event.isAccepted()


@pytest.mark.window
@pytest.mark.parametrize("change_of_mind", ["in the first dialog", "in napari's dialog"])
def test_no_run_is_stopped_before_the_window_closes(shared_viewer, until, tmp_path, change_of_mind):
    """All are asked about, then napari asks; whoever cancels anywhere finds all of them running."""
    viewer = shared_viewer(show=True)
    viewer.add_image(np.zeros((9, 9)))
    get_settings().application.confirm_close_window = True
    window, napari_answers, said = viewer.window._qt_window, [], []
    runs = [IdleProcess(tmp_path / str(k)) for k in range(3)]
    guards = [CloseConfirmation(window, lambda run=run: run, window) for run in runs]
    ended = []
    for run in runs:
        run.folder.mkdir()
        run.ended.connect(lambda end: ended.append(end.state))
        run.start()
    runs[2].pause()

    def answer_napari():
        dialog = QApplication.activeModalWidget()
        if isinstance(dialog, ConfirmCloseDialog):
            said.append(napari_answers[0])
            dialog.accept() if napari_answers.pop(0) == "close" else dialog.reject()

    timer = QTimer()
    timer.timeout.connect(answer_napari)
    timer.start(20)
    for guard, answer in zip(guards, ["stop", "stop", "continue"], strict=True):
        guard.ask = lambda answer=answer: answer
    if change_of_mind == "in the first dialog":
        guards[0].ask = lambda: "stay"  # the last to be asked
    else:
        napari_answers.append("cancel")
    assert not close_as_a_user(window)
    assert not any(run.stopping for run in runs)
    assert runs[2].paused
    guards[0].ask = lambda: "stop"
    napari_answers.append("close")
    assert close_as_a_user(window)
    timer.stop()
    assert said == ([] if change_of_mind == "in the first dialog" else ["cancel"]) + ["close"]
    assert [run.stopping for run in runs] == [True, True, False]
    assert not runs[2].paused
    until(lambda: len(ended) == 2)
    assert ended == [RunState.STOPPED] * 2
    assert background_process.is_alive(runs[2]._process)
    runs[2].stop()
    until(lambda: len(ended) == 3)
    for guard in guards:
        guard.end()
        guard.deleteLater()
    viewer.close()
