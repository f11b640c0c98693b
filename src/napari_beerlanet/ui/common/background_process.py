"""Launch, follow, pause and stop a run in its own process, which outlives the viewer.

The process writes its events to the run's folder, and a timer reads them there. So it makes no
difference whether this viewer started the run, another one, or one that was killed since: an active
run is followed as from its start. Pausing suspends the process where it is, which loses no step,
and the operating system itself remembers that it is paused. When the viewer is closed, the user is
asked what to do with an active run.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import psutil
from qtpy.QtCore import QEvent, QObject, Qt, QTimer, QUrl, Signal
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import QListWidget, QListWidgetItem, QMessageBox, QVBoxLayout, QWidget

from napari_beerlanet.core.common.events import FINAL_EVENTS, Event, EventTail, RunState
from napari_beerlanet.core.common.jobs import LOCK_FILE
from napari_beerlanet.core.common.locking import local_owner
from napari_beerlanet.core.common.messages import count_of, error_message, format_duration
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.training.runs import inspect_run
from napari_beerlanet.ui.common.controls import button, heading, plain_tooltip, row, wrapping_label
from napari_beerlanet.ui.common.progress_bar import Activity, activity_bar
from napari_beerlanet.ui.common.recent import RecentPaths
from napari_beerlanet.ui.common.tasks import Task

PROCESS_LOG = "process.log"
"""The file in the run's folder with what the process prints to stderr."""

EVENTS_FILE = "progress.jsonl"
"""The file in the run's folder with its events."""

_POLL_INTERVAL_MS = 200
_REPLAY_BYTES = 1 << 16  # of earlier events that are emitted again when a run is attached
_EXIT_GRACE_PERIOD_S = 10.0  # for a process to exit after its final event
_DRIVE_PATIENCE_S = 0.5  # for a file to be created before the window goes on
_MIN_FREE_BYTES = 20e6  # on a disk that is not full
_LOG_TAIL_BYTES = 2000
_MAX_VISIBLE_FAILURES = 5
_STATE_OF_EVENT = {
    "end": RunState.FINISHED,
    "cancelled": RunState.STOPPED,
    "failed": RunState.FAILED,
    "diverged": RunState.DIVERGED,
}

_children: dict[int, subprocess.Popen[bytes]] = {}  # ours, whose exit codes we can read


@dataclass(frozen=True)
class RunEnd:
    """How a run ended: FINISHED, STOPPED, DIVERGED, FAILED or INTERRUPTED; a message for people."""

    state: RunState
    message: str = ""


class BackgroundProcess(QObject):
    """A run in a process of its own; subclasses say what is run and how it may have ended.

    Signals: `started`; `event_received` with each event; `paused_changed`; `ended` with a `RunEnd`,
    once. `stop_timeouts` are the seconds after which a run that was requested to stop is sent a
    signal, and after which it is killed; what it has finished is on the disk in any case.
    """

    started = Signal()
    event_received = Signal(dict)
    paused_changed = Signal(bool)
    ended = Signal(object)

    def __init__(
        self,
        folder: str | os.PathLike[str],
        parent: QObject | None = None,
        stop_timeouts: tuple[float, float] = (30.0, 45.0),
    ) -> None:
        super().__init__(parent)
        self.folder, self.stop_timeouts = Path(folder), stop_timeouts
        self.end: RunEnd | None = None
        self.environment: dict[str, str] = {}
        self._process: psutil.Process | None = None
        self._tail: EventTail | None = None
        self._final_event: dict[str, Any] | None = None
        self._final_event_at = self._stop_requested_at = 0.0
        self._paused = self._has_events = self._attached = False
        self._timer = QTimer(self)
        self._timer.setInterval(_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)
        self._reading = Task(self)

    # --- starting --------------------------------------------------------------------------------

    @property
    def running(self) -> bool:
        """Whether it was started or attached, and has not ended."""
        return self._tail is not None and self.end is None

    @property
    def paused(self) -> bool:
        """Whether the process is suspended."""
        return self._paused

    @property
    def stopping(self) -> bool:
        """Whether it was requested to stop."""
        return bool(self._stop_requested_at)

    @property
    def pid(self) -> int | None:
        """Of the process."""
        return None if self._process is None else int(self._process.pid)

    def start(self) -> None:
        """Start the run that the folder describes, or resume it."""
        tail = EventTail(self.folder)
        tail.skip()
        self._follow(tail)
        try:
            self._process = self._launch()
        except (OSError, psutil.Error) as error:
            self._finish(RunEnd(RunState.FAILED, self._explain_exit(error=error)))
            return
        self.started.emit()

    def attach_to_pid(self, pid: int, paused: bool = False) -> bool:
        """Follow an active run by its process id; False where there is no such process."""
        try:
            self._process = psutil.Process(pid)
        except psutil.Error:
            return False
        self._has_events = self._attached = True
        self._follow(EventTail(self.folder, latest=_REPLAY_BYTES))
        self._set_paused(paused)
        self.started.emit()
        self._emit_events()
        self._final_event = None  # of an earlier attempt: the process is alive
        return True

    def _launch(self) -> psutil.Process:
        """Start the process."""
        raise NotImplementedError

    def _recorded_end(self) -> RunEnd | None:
        """How an attached run has ended according to its files, None where they do not say."""
        return None

    def _explain_exit(self, code: int | None = None, error: BaseException | None = None) -> str:
        """Why the process exited without a final event, or could not be started; one sentence."""
        raise NotImplementedError

    def _follow(self, tail: EventTail) -> None:
        self.end = self._final_event = None
        self._stop_requested_at, self._tail = 0.0, tail
        self._timer.start()

    # --- controlling -----------------------------------------------------------------------------

    def pause(self) -> None:
        """Suspend the process and its children."""
        if self.running and not self.stopping:
            self._set_paused(apply_to_process_tree(self._process, "suspend"))

    def resume(self) -> None:
        """Resume a paused run."""
        if self.running and self._paused:
            apply_to_process_tree(self._process, "resume")
            self._set_paused(False)

    def stop(self) -> None:
        """Request the run to end after its current step; `ended` is emitted when it has."""
        if self.running:
            self.resume()
            self._stop_requested_at = self._stop_requested_at or time.monotonic()
            request_stop(self.folder, None if self._has_events else self._process)

    def kill(self) -> None:
        """Kill the process and its children."""
        apply_to_process_tree(self._process, "kill")

    def detach(self) -> None:
        """Stop following the run, which continues; no more signals are emitted."""
        self._timer.stop()
        self._reading.cancel()
        self._tail = None

    def release(self, activity: Activity) -> None:
        """`detach` for good; the activity that has shown the run ends."""
        self.detach()
        self.deleteLater()
        activity.end()

    def _set_paused(self, paused: bool) -> None:
        if paused != self._paused:
            self._paused = paused
            self.paused_changed.emit(paused)

    # --- following -------------------------------------------------------------------------------

    def _poll(self) -> None:
        """Read what is new, off the GUI thread: the drive may be slow, or not answer."""
        tail, process, folder = self._tail, self._process, self.folder
        if tail is not None and self.stopping:
            self._escalate_stop()
        if tail is None or self._reading.running:
            return
        stopping = self.stopping and self._final_event is None

        def work(report: Report) -> tuple[bool, list[Event]]:
            if stopping and not (folder / "stop").exists():  # a run that starts removes it
                request_stop(folder, None)
            alive = is_alive(process)  # before reading, so that its last events are read
            return alive, tail.read()

        self._reading.start(work, lambda read: self._on_read(*read), _raise_again)

    def _on_read(self, alive: bool, events: list[Event]) -> None:
        self._emit(events)
        if self._tail is None or self.end is not None:  # a slot may have detached or ended the run
            return
        if not alive:
            if not events:  # otherwise there may be more that it has left
                self._finish(self._resolve_end())
        elif self._exit_is_overdue():
            self.kill()

    def _exit_is_overdue(self) -> bool:
        waited = time.monotonic() - self._final_event_at
        return self._final_event is not None and waited > _EXIT_GRACE_PERIOD_S

    def _emit_events(self) -> None:
        self._emit(self._tail.read() if self._tail is not None else [])

    def _emit(self, events: list[Event]) -> None:
        for event in events:
            self._has_events = True
            if event["event"] in FINAL_EVENTS:
                self._final_event, self._final_event_at = event, time.monotonic()
            elif event["event"] == "start":  # of a run that was resumed after an earlier end
                self._final_event = None
            self.event_received.emit(event)

    def _escalate_stop(self) -> None:
        """Send signals to a run that has not stopped in time, without a look at its drive."""
        waited = time.monotonic() - self._stop_requested_at
        if waited > self.stop_timeouts[1]:
            self.kill()
        elif waited > self.stop_timeouts[0] and self._process is not None:
            self._has_events = True
            with suppress(psutil.Error):
                self._process.terminate()
            self.stop_timeouts = (self.stop_timeouts[1] + 1, self.stop_timeouts[1])

    def _resolve_end(self) -> RunEnd:
        final = self._final_event
        if final is not None:
            return RunEnd(_STATE_OF_EVENT[final["event"]], str(final.get("message") or ""))
        recorded = self._recorded_end() if self._attached else None
        if recorded is not None:
            return recorded
        if self.stopping:
            return RunEnd(RunState.STOPPED, "Stopped immediately.")
        code = exit_code(self.pid)
        failed = code is not None and code > 0  # below 0 is a signal
        state = RunState.FAILED if failed else RunState.INTERRUPTED
        return RunEnd(state, self._explain_exit(code))

    def _finish(self, end: RunEnd) -> None:
        self._timer.stop()
        if self.end is None:
            self.end, self._tail = end, None
            self._set_paused(False)
            with suppress(OSError):
                (self.folder / "stop").unlink(missing_ok=True)
            self.ended.emit(end)


def _raise_again(error: BaseException) -> None:
    raise error


def launch_training(
    folder: Path, environment: dict[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """Start the training that a folder's run.json describes, or resume it."""
    module = "train_classifier" if inspect_run(folder).task == "classify" else "fine_tune"
    arguments = [
        f"napari_beerlanet.core.training.{module}",
        "--config",
        str(folder / "run.json"),
        "--resume",
    ]
    return launch_detached(arguments, folder, environment=environment)


def launch_detached(
    arguments: list[str],
    folder: Path,
    events: Path | None = None,
    environment: dict[str, str] | None = None,
) -> subprocess.Popen[bytes]:
    """Start a module of ours in a session of its own: it outlives the viewer and its terminal.

    `arguments`: the module and its arguments. Its stdout is appended to the file `events`.
    """
    command = [sys.executable, "-P", "-m", *arguments]
    detached: dict[str, Any] = {"start_new_session": True}
    if sys.platform == "win32":
        flags = subprocess.CREATE_NEW_PROCESS_GROUP | subprocess.CREATE_NO_WINDOW
        detached = {"creationflags": flags}
    with open(folder / PROCESS_LOG, "wb") as log, open(events or os.devnull, "ab") as stdout:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=log,
            env=child_environment() | (environment or {}),
            cwd=tempfile.gettempdir(),  # so that the project's drive can be removed
            **detached,
        )
    _children[child.pid] = child
    return child


def child_environment() -> dict[str, str]:
    """Ours without Qt's variables, which opencv would trip over."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("QT_")}
    return ours | {"YOLO_OFFLINE": "true", "PYTHONIOENCODING": "utf-8"}


def lower_priority(process: psutil.Process) -> None:
    """Give the viewer precedence on the processor."""
    with suppress(psutil.Error, OSError):
        process.nice(10 if os.name != "nt" else psutil.BELOW_NORMAL_PRIORITY_CLASS)


def request_stop(folder: Path, process: psutil.Process | None) -> None:
    """Create the file that stops a run; a `process` that does not look for it yet gets a signal.

    A drive that does not answer is not waited for.
    """

    def touch() -> None:
        with suppress(OSError):
            (folder / "stop").touch()

    touching = threading.Thread(target=touch, daemon=True)
    touching.start()
    touching.join(_DRIVE_PATIENCE_S)
    if process is not None:
        with suppress(psutil.Error):
            process.terminate()


def exit_code(pid: int | None) -> int | None:
    """Of a child process that has exited, else None."""
    child = _children.get(pid or 0)
    return None if child is None else child.poll()


def is_alive(process: psutil.Process | None) -> bool:
    """Whether a process runs, and is no zombie."""
    if process is None:
        return False
    child = _children.get(process.pid)
    if child is not None:
        return child.poll() is None
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def apply_to_process_tree(process: psutil.Process | None, method: str) -> bool:
    """Call a method ("kill", "suspend", …) of a process and its children; whether it worked."""
    if process is None:
        return False
    with suppress(psutil.Error):
        for child in process.children(recursive=True):
            with suppress(psutil.Error):
                getattr(child, method)()
    try:
        getattr(process, method)()
    except psutil.Error:
        return False
    return True


@dataclass(frozen=True)
class RunWording:
    """The name of a kind of run, how to resume one, and where it then continues.

    `unit` is what it consists of, and the event that ends one; `saved` is what a stop keeps.
    """

    name: str
    resume_hint: str
    resume_point: str
    unit: str = "epoch"
    saved: str = "epochs"


TRAINING_WORDING = RunWording("training", "resume", "the last finished epoch")


def explain_exit(
    folder: Path,
    code: int | None = None,
    error: BaseException | None = None,
    wording: RunWording = TRAINING_WORDING,
) -> str:
    """Why a process exited, and what to do, in one sentence; `code` below 0 is a signal."""
    name, resume = wording.name, wording.resume_hint
    if error is not None:
        return f"{name.capitalize()} could not be started: {error_message(error)}"
    if not folder.is_dir():
        return f"{folder}: the folder is not there; connect its drive, then {resume}."
    if is_disk_full(folder):
        return f"{folder}: the drive is full; free some space, then {resume}."
    printed = last_log_line(folder / PROCESS_LOG)
    if code is not None and code > 0:
        return printed or f"The {name} process exited with status {code}; {resume} to try again."
    return f"The {name} process was killed; {resume} to continue after {wording.resume_point}."


def is_disk_full(folder: Path) -> bool:
    """Whether the drive has no space for a checkpoint."""
    try:
        return shutil.disk_usage(folder).free < _MIN_FREE_BYTES
    except OSError:
        return False


def last_log_line(path: Path) -> str:
    """The last line that a process printed: why it exited, or the end of a traceback."""
    try:
        with path.open("rb") as file:
            file.seek(max(path.stat().st_size - _LOG_TAIL_BYTES, 0))
            lines = file.read().decode("utf-8", "replace").split("\n")
    except OSError:
        return ""
    return next((line.strip() for line in reversed(lines) if line.strip()), "")


# --- commands that write many results into a folder ----------------------------------------------


class CommandProcess(BackgroundProcess):
    """A command of ours that does many things and writes their results into the folder."""

    wording: ClassVar[RunWording]

    def command(self) -> list[str]:
        """The command and its arguments, without `--json`."""
        raise NotImplementedError

    def _launch(self) -> psutil.Process:
        words = ["napari_beerlanet.cli.main", *self.command(), "--json"]
        child = launch_detached(words, self.folder, self.folder / EVENTS_FILE, self.environment)
        process = psutil.Process(child.pid)
        lower_priority(process)
        return process

    def _explain_exit(self, code: int | None = None, error: BaseException | None = None) -> str:
        return explain_exit(self.folder, code, error, self.wording)


def running_process(out: Path) -> int | None:
    """The process on this computer that writes results to a folder, None where there is none."""
    return local_owner(out / LOCK_FILE)


def find_running(recent: RecentPaths) -> tuple[Path, int] | None:
    """The folder and process of a run that is under way, of those that were started last."""
    for out in recent.paths():
        number = running_process(out)
        if number is not None:
            return out, number
    return None


class ProcessView(QWidget):
    """Shows one `CommandProcess` at a time: progress and ETA, Stop, what it says, what failed.

    `ended` passes its end on, `unit_ended` that of an image or a job. Subclasses add to `body`.
    """

    ended = Signal(object)
    unit_ended = Signal()

    def __init__(self, wording: RunWording) -> None:
        super().__init__()
        self.wording = wording
        self.process: CommandProcess | None = None
        self.folder: Path | None = None
        self.bar = activity_bar(f"Progress of the {wording.name}, and the estimated time left.")
        self.activity = Activity(
            self, self._stop, "Stop", f"Stop the run; finished {wording.saved} are saved."
        )
        self.activity.changed.connect(self._show_activity)
        self.stop = button("Stop", self.activity.stop_tip, self.activity.stop)
        self.message = wrapping_label()
        self.failed, self.failures = heading(""), QListWidget()
        self.failures.setToolTip(
            f"{wording.unit.capitalize()}s that failed, and why; also listed in failures.csv."
        )
        self.failures.setWordWrap(True)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(0, 0, 0, 0)
        self.body.setSpacing(6)
        self._bar_row = row(self.bar, self.stop, stretch=0)
        self.body.addWidget(self._bar_row)
        for part in (self.message, self.failed, self.failures):
            self.body.addWidget(part)
        self._show_activity()
        self._show_failures()
        self.say("")

    @property
    def running(self) -> bool:
        """Whether a run is followed that has not ended."""
        return self.process is not None and self.process.running

    def follow(self, process: CommandProcess) -> None:
        """Show a run from now on. To be called before it starts or is attached to."""
        self.detach()
        self.process, self.folder = process, process.folder
        process.event_received.connect(self.on_event)
        process.ended.connect(self.on_end)
        self.failures.clear()
        self._show_failures()
        self.say(
            "Continues in the background if the viewer is closed; reopen this panel to follow it."
        )
        self.activity.begin("starting …")

    def detach(self) -> None:
        """Follow this run no more; it continues in the background."""
        process, self.process = self.process, None
        if process is not None:
            process.release(self.activity)

    def open_folder(self) -> None:
        """Show the results in the system's file manager."""
        if self.folder is not None:
            QDesktopServices.openUrl(QUrl.fromLocalFile(str(self.folder)))

    def say(self, text: str) -> None:
        """Show a message; "" hides it."""
        self.message.setText(text)
        self.message.setVisible(bool(text))

    def on_event(self, event: dict[str, Any]) -> None:
        """Show what the run says."""
        if event["event"] == "progress":
            self._show_progress(event)
        elif event["event"] == "estimate":
            self.say(str(event.get("message", "")))
        elif event["event"] == self.wording.unit:
            if event.get("status") == "failed":
                self._add_failure(*self.failure_texts(event))
            self.unit_ended.emit()
        elif event["event"] == "end":
            self.say(summarize_end(event))

    def failure_texts(self, event: dict[str, Any]) -> tuple[str, str]:
        """What failed and why, in short and for the tooltip."""
        raise NotImplementedError

    def on_end(self, end: RunEnd) -> None:
        """The run has ended."""
        if end.state is RunState.FINISHED:
            self.activity.report(self.activity.text, 1.0)
        self.activity.end()
        if end.state is RunState.STOPPED:
            hint = self.wording.resume_hint
            hint = hint[:1].upper() + hint[1:]
            self.say(f"Stopped; finished {self.wording.saved} are saved. {hint} to continue.")
        elif end.message:
            self.say(end.message[:1].upper() + end.message[1:])
        self.ended.emit(end)

    def _show_progress(self, event: dict[str, Any]) -> None:
        text = self.activity.text
        if self.process is not None and not self.process.stopping:
            left = event.get("eta_seconds")
            eta = "" if left is None else f" · {format_duration(left)} left"
            text = f"{event['done']:,} of {event['total']:,} {self.wording.unit}s{eta}"
            if event.get("message"):
                self.say(str(event["message"]))
        self.activity.report(text, float(event.get("fraction", 0)))

    def _add_failure(self, text: str, tooltip: str) -> None:
        item = QListWidgetItem(text)
        item.setToolTip(plain_tooltip(tooltip))
        item.setFlags(item.flags() | Qt.ItemFlag.ItemIsSelectable)
        self.failures.addItem(item)
        self._show_failures()

    def _show_failures(self) -> None:
        count = self.failures.count()
        self.failed.setText(f"{count_of(count, self.wording.unit)} failed")
        rows = 2 * min(count, _MAX_VISIBLE_FAILURES)  # a sentence mostly takes two lines
        self.failures.setFixedHeight(rows * self.failures.fontMetrics().lineSpacing() + 8)
        for widget in (self.failed, self.failures):
            widget.setVisible(count > 0)

    def _stop(self) -> None:
        if self.process is not None and self.process.running:
            self.process.stop()
            self.activity.report("stopping …")

    def _show_activity(self) -> None:
        self.activity.show_on(self.bar, self.stop)
        for widget in (self.bar, self.stop, self._bar_row):
            widget.setVisible(self.activity.shown_in_panel)


def summarize_end(event: dict[str, Any]) -> str:
    """The outcome of a run, by its last event; the table of counts says what limits these."""
    counts = [f"{event['done']:,} done"]
    counts += [f"{event['skipped']:,} already done"] if event.get("skipped") else []
    counts += [f"{event['failed']:,} failed"] if event.get("failed") else []
    more = [event["stopped"]] if event.get("stopped") else []
    said = event.get("limits") or []
    more += [note for note in event.get("notes") or [] if not any(text in note for text in said)]
    return " ".join([", ".join(counts) + ".", *(text[:1].upper() + text[1:] for text in more)])


# --- when the viewer is closed --------------------------------------------------------------------

CloseAnswer = Literal["continue", "stop", "stay"]
TRAINING_QUESTION = "Training is running", "Continue training after the viewer is closed?"


class CloseConfirmation(QObject):
    """An event filter on the main window that asks before it closes. `ask` may be replaced.

    `process` returns the active run, if there is one; `question` is a title and a question. The
    answer "stay" keeps the window open. Any other is carried out once the window has closed: until
    then another run's question, or napari's own, may still be answered with no.
    """

    def __init__(
        self,
        window: QWidget | None,
        process: Callable[[], BackgroundProcess | None],
        parent: QObject,
        question: tuple[str, str] = TRAINING_QUESTION,
    ) -> None:
        super().__init__(parent)
        self._window, self._process = window, process
        self._answer: CloseAnswer | None = None
        self.ask: Callable[[], CloseAnswer] = lambda: ask_before_closing(window, *question)
        if window is not None:
            window.installEventFilter(self)

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """Qt's own name."""
        kind = event.type() if event is not None else None
        process = self._process() if kind in (QEvent.Type.Close, QEvent.Type.Hide) else None
        if event is None or process is None or not process.running:
            return False
        if kind == QEvent.Type.Close:
            self._answer = self.ask()
            if self._answer == "stay":
                event.ignore()
            return self._answer == "stay"
        if not event.spontaneous():  # as it is where the window is minimised
            answer, self._answer = self._answer, None
            if answer == "stop":
                process.stop()
            elif answer == "continue":
                process.resume()  # nobody would be there to do it
        return False

    def end(self) -> None:
        """Remove the filter."""
        if self._window is not None:
            self._window.removeEventFilter(self)
            self._window = None


def ask_before_closing(window: QWidget | None, title: str, question: str) -> CloseAnswer:
    """A dialog with three buttons; Escape keeps the viewer open."""
    box = QMessageBox(window)
    box.setWindowTitle(title)
    box.setText(question)
    box.setInformativeText("A run that continues is shown again when the panel is next opened.")
    proceed = box.addButton("Continue in background", QMessageBox.ButtonRole.AcceptRole)
    stop = box.addButton("Stop", QMessageBox.ButtonRole.DestructiveRole)
    stay = box.addButton("Keep the viewer open", QMessageBox.ButtonRole.RejectRole)
    box.setDefaultButton(proceed)
    box.setEscapeButton(stay)
    box.exec()
    clicked = box.clickedButton()
    return "continue" if clicked is proceed else "stop" if clicked is stop else "stay"
