"""Every start ends exactly once, on the GUI thread, however it ends."""

import gc
import subprocess
import sys
import threading
import time
import weakref

import pytest
from qtpy.QtCore import QObject
from qtpy.QtWidgets import QWidget

from napari_beerlanet.core.common.progress import Cancelled, Progress
from napari_beerlanet.ui.common import tasks
from napari_beerlanet.ui.common.progress_bar import TaskProgressBar
from napari_beerlanet.ui.common.tasks import Task, TaskOutcome, on_destroyed


@pytest.fixture
def told(qtbot):
    """A task and everything that it tells, with the thread that heard it."""
    task = Task()
    events: list[tuple] = []
    task.started.connect(lambda: events.append(("started", threading.current_thread())))
    task.progressed.connect(lambda p: events.append((p.message, threading.current_thread())))
    task.ended.connect(lambda outcome: events.append((outcome, threading.current_thread())))
    yield task, events
    task.close()


def outcomes(events: list[tuple]) -> list[TaskOutcome]:
    return [what for what, _ in events if isinstance(what, TaskOutcome)]


class Gate:
    """Work that reports until it is let go."""

    def __init__(self) -> None:
        self.entered, self.open = threading.Event(), threading.Event()

    def __call__(self, report):
        self.entered.set()
        while not self.open.is_set():
            report(Progress(1, 2, "waiting"))
            time.sleep(0.002)
        return "through"


def test_result_progress_and_end_arrive_on_the_gui_thread(told, until):
    task, events = told
    gate, results = Gate(), []
    task.start(gate, lambda result: results.append((result, threading.current_thread())))
    until(lambda: any(what == "waiting" for what, _ in events))
    gate.open.set()
    until(lambda: not task.running)
    assert results == [("through", threading.main_thread())]
    assert outcomes(events) == [TaskOutcome.DONE]
    assert events[0][0] == "started"
    assert {thread for _, thread in events} == {threading.main_thread()}


@pytest.mark.parametrize(
    "error", [ValueError("odd"), RuntimeError("CUDA out of memory"), KeyError(1)]
)
def test_an_error_ends_the_run_once_and_is_kept(told, until, error):
    task, events = told
    seen = []

    def work(report):
        raise error

    task.start(work, failed=seen.append)
    until(lambda: not task.running)
    assert seen == [error]
    assert task.error is error
    assert outcomes(events) == [TaskOutcome.FAILED]


def test_an_error_in_done_is_a_failure(told, until):
    task, events = told

    def show(result):
        raise ValueError("cannot be shown")

    task.start(lambda report: 1, show)
    until(lambda: not task.running)
    assert str(task.error) == "cannot be shown"
    assert outcomes(events) == [TaskOutcome.FAILED]


def test_cancel_ends_the_run_at_its_next_report(told, until):
    task, events = told
    gate, results = Gate(), []
    task.start(gate, results.append)
    until(gate.entered.is_set)
    task.cancel()
    until(lambda: not task.running)
    assert results == []
    assert outcomes(events) == [TaskOutcome.CANCELLED]


def test_a_run_that_never_reports_is_still_cancelled(told, until):
    task, events = told
    go, results = threading.Event(), []
    task.start(lambda report: go.wait(600), results.append)
    task.cancel()
    go.set()
    until(lambda: not task.running)
    assert results == []
    assert outcomes(events) == [TaskOutcome.CANCELLED]


def test_core_may_cancel_itself(told, until):
    task, events = told

    def work(report):
        raise Cancelled

    task.start(work)
    until(lambda: not task.running)
    assert outcomes(events) == [TaskOutcome.CANCELLED]
    assert task.error is None


def test_only_the_newest_of_many_starts_gets_its_turn(told, until):
    task, events = told
    gate, results, ran = Gate(), [], []
    task.start(gate, results.append)
    until(gate.entered.is_set)
    for number in range(20):
        task.start(lambda report, number=number: ran.append(number) or number, results.append)
    until(lambda: not task.running)
    assert ran == [19]
    assert results == [19]
    assert outcomes(events).count(TaskOutcome.SUPERSEDED) == 20
    assert outcomes(events).count(TaskOutcome.DONE) == 1


def test_cancel_also_drops_what_waits(told, until):
    task, events = told
    gate, results = Gate(), []
    task.start(gate, results.append)
    until(gate.entered.is_set)
    task.start(lambda report: 1, results.append)
    task.cancel()
    until(lambda: not task.running)
    assert results == []
    assert outcomes(events) == [TaskOutcome.CANCELLED, TaskOutcome.CANCELLED]


def test_a_start_from_done_runs_after_it(told, until):
    task, events = told
    results = []
    task.start(lambda report: 1, lambda first: task.start(lambda report: first + 1, results.append))
    until(lambda: results == [2] and not task.running)
    assert outcomes(events) == [TaskOutcome.DONE, TaskOutcome.DONE]


def test_close_ends_the_run_and_starts_nothing_more(told, qtbot):
    task, events = told
    gate, results = Gate(), []
    task.start(gate, results.append)
    gate.entered.wait(600)
    task.close()
    assert outcomes(events) == [TaskOutcome.CANCELLED]
    gate.open.set()
    task.start(lambda report: 1, results.append)
    qtbot.wait(50)
    assert results == []
    assert outcomes(events) == [TaskOutcome.CANCELLED]


def test_a_deleted_panel_stops_its_thread(qtbot, until):
    for _ in range(20):
        panel = QWidget()
        task, gate, results = Task(panel), Gate(), []
        task.start(gate, results.append)
        gate.entered.wait(600)
        panel.deleteLater()
        del panel, task
        until(lambda: not any(t.name == "napari-beerlanet" for t in threading.enumerate()))
        assert results == []
        gc.collect()


def test_what_the_work_held_is_freed_after_the_run(told, until):
    task, _ = told

    class Big:
        pass

    big = Big()
    alive = weakref.ref(big)
    task.start(lambda report, big=big: id(big))
    del big
    until(lambda: not task.running)
    gc.collect()
    assert alive() is None


# --- the run bar ---------------------------------------------------------------------------------


@pytest.fixture
def bar(told, qtbot):
    bar = TaskProgressBar(told[0])
    qtbot.addWidget(bar)
    bar.show()
    return bar


def test_the_bar_shows_progress_and_hides_at_the_end(told, bar, until):
    task, _ = told
    gate = Gate()
    task.start(gate)
    until(lambda: "waiting" in bar.bar.format())
    assert bar.bar.isVisible()
    assert bar.cancel.isVisible()
    assert bar.bar.value() == 500
    gate.open.set()
    until(lambda: not task.running)
    assert not bar.bar.isVisible()
    assert not bar.cancel.isVisible()


def test_the_bar_never_says_done_while_it_is_shown(told, bar, until):
    """What comes of the work is still to be shown, as layers."""
    task, _ = told
    shown = threading.Event()

    def work(report):
        report(Progress(1, 1, "done"))
        shown.wait()

    task.start(work)
    try:
        until(lambda: bar.bar.format() not in ("", "starting …"))
        assert bar.bar.format() == "finishing"
    finally:
        shown.set()
    until(lambda: not task.running)


def test_cancel_on_the_bar(told, bar, until):
    task, events = told
    gate = Gate()
    task.start(gate)
    until(gate.entered.is_set)
    bar.cancel.click()
    until(lambda: not task.running)
    assert outcomes(events) == [TaskOutcome.CANCELLED]
    assert bar.text == "Cancelled; nothing has changed."


def test_the_bar_shows_a_failure_in_one_sentence_with_details(told, bar, until, monkeypatch):
    task, _ = told
    shown = []
    monkeypatch.setattr("napari_beerlanet.ui.common.notifications.show_error", shown.append)

    def work(report):
        raise ValueError("The file\nis odd.")

    task.start(work)
    until(lambda: not task.running)
    assert bar.text == "The file is odd."
    assert shown == ["The file is odd."]
    bar.details_button.click()
    from qtpy.QtWidgets import QApplication

    assert "in work" in QApplication.clipboard().text()


# --- the end of the program ----------------------------------------------------------------------

LEAVE = """
import sys, threading, time
from qtpy.QtCore import QCoreApplication
from napari_beerlanet.core.common.progress import Progress
from napari_beerlanet.ui.common import tasks

tasks.EXIT_TIMEOUT_S = float(sys.argv[2])
begun = threading.Event()

def reports(report):
    while True:
        report(Progress(0, 1))
        begun.set()
        time.sleep(0.01)

def waits_for_a_drive(report):
    begun.set()
    time.sleep(10_000)

def saves(report):
    begun.set()
    time.sleep(0.3)
    print("saved", flush=True)

app = QCoreApplication([])
task = tasks.Task()
task.start(globals()[sys.argv[1]])
begun.wait()
"""


@pytest.mark.parametrize(
    ("work", "timeout", "code", "printed"),
    [("reports", 600, 0, ""), ("saves", 600, 0, "saved\n"), ("waits_for_a_drive", 0.2, 1, "")],
)
def test_the_program_ends_with_a_task_under_way(work, timeout, code, printed):
    done = subprocess.run(
        [sys.executable, "-c", LEAVE, work, str(timeout)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert (done.returncode, done.stdout) == (code, printed), done.stderr
    assert ("a task did not end" in done.stderr) == (code == 1)


class Clock:
    """Time that passes at each look, and the part of it in which the process works."""

    def __init__(self, share):
        self.share, self.now = share, 0.0

    def monotonic(self):
        return self.now

    def process_time(self):
        return self.now * self.share


class LongThread:
    """A thread that ends after a processor's so many seconds."""

    def __init__(self, clock, work):
        self.clock, self.work = clock, work

    def is_alive(self):
        return self.clock.process_time() < self.work

    def join(self, timeout):
        self.clock.now += 30 * timeout


@pytest.mark.parametrize(
    ("share", "work", "ends"),
    [
        (0.01, 5, True),  # the machine has other things to do: 500 s by the clock
        (0.0001, 5, False),  # it waits for a drive
        (1.0, 50, True),
        (1.0, 500, False),  # it works, and does not look whether it shall stop
    ],
)
def test_at_the_end_a_task_has_its_minute_however_busy_the_machine(share, work, ends, monkeypatch):
    clock = Clock(share)
    monkeypatch.setattr(tasks, "time", clock)
    assert tasks._wait_for([LongThread(clock, work) for _ in range(2)]) == ends


class Cycle(QObject):
    """An object that only the collector can free."""

    def __init__(self, called):
        super().__init__()
        self.myself = self
        on_destroyed(self, lambda: called.append("gone"))


def test_on_destroyed_in_a_cycle_that_is_collected(qapp):
    called = []
    for _ in range(50):
        Cycle(called)
    gc.collect()
    assert len(called) == 50


def test_on_destroyed_when_qt_deletes_it(qapp, qtbot):
    called, parent = [], QObject()
    on_destroyed(QObject(parent), lambda: called.append("gone"))
    parent.deleteLater()
    qtbot.waitUntil(lambda: called == ["gone"], timeout=600_000)
