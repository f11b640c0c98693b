"""Training processes, real ones: every way to end is told once, and nothing is half-written."""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.common.events import EventTail, RunState
from napari_beerlanet.core.training.runs import RunFolder, inspect_run, list_runs, new_run, read_run
from napari_beerlanet.core.training.settings import TrainSettings
from napari_beerlanet.ui.common import background_process
from napari_beerlanet.ui.finetune import run_view
from napari_beerlanet.ui.finetune.run_view import TrainingProcess
from tinydata import write_smears

AT_START = Path(__file__).parents[2] / "at_start" / "sitecustomize.py"  # what others run first
posix = pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals")


@pytest.fixture(scope="module")
def project(tmp_path_factory, tiny):
    folder = tmp_path_factory.mktemp("project of five")
    write_smears(folder, train=4, val=2, side=64)
    save_checkpoint(tiny, folder / "tiny.safetensors")
    return folder


@pytest.fixture
def begin(project, qtbot, monkeypatch):
    """A function that starts a run in a process; what still runs is killed at the end."""
    monkeypatch.setattr(run_view, "lower_priority", lambda process: None)  # it takes longer
    begun = []

    def start(environment=None, resume: Path | None = None, **settings) -> TrainingProcess:
        given = {"scope": "all", "epochs": 3, "batch": 2, "device": "cpu", "validate_every": 1}
        given |= settings
        data, model = project / "data.yaml", project / "tiny.safetensors"
        recipe = TrainSettings(model=str(model), data=str(data), **given)
        run = TrainingProcess(resume or new_run(project, recipe.model_dump()))
        run.environment = {"OMP_NUM_THREADS": "1", **(environment or {})}
        run.events, run.ends = [], []
        run.event_received.connect(run.events.append)
        run.ended.connect(run.ends.append)
        begun.append(run)
        run.start()
        return run

    yield start
    for run in begun:
        run.kill()
        run.detach()
        qtbot.waitUntil(lambda: not background_process.is_alive(run._process), timeout=600_000)  # noqa: B023


def heard(run: TrainingProcess, kind: str) -> Callable[[], bool]:
    return lambda: any(event["event"] == kind for event in run.events) or bool(run.ends)


def kinds(run):
    return [event["event"] for event in run.events if event["event"] != "warning"]


def assert_whole(folder: Path) -> None:
    """Every file that has its final name can be read to its end."""
    assert read_run(folder / "run.json")["settings"]
    for name in ("best.safetensors", "last.safetensors"):
        if (folder / name).exists():
            load_checkpoint(folder / name, device="cpu")
    RunFolder(folder, locked=False).read_state()
    if (folder / "results.csv").exists():
        lines = (folder / "results.csv").read_text().splitlines()
        assert len({line.count(",") for line in lines}) == 1


def injected(folder: Path, code: str) -> dict[str, str]:
    """An environment in which a process runs this code before all else."""
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AT_START.read_text() + textwrap.dedent(code))
    others = os.environ.get("PYTHONPATH")
    return {"PYTHONPATH": os.pathsep.join([str(folder), *([others] if others else [])])}


# --- a run and its ends --------------------------------------------------------------------------


@pytest.mark.slow
def test_a_run_to_its_end(begin, until):
    run = begin(epochs=2)
    assert run.running
    until(lambda: bool(run.ends))
    epoch = ["batch", "batch", "epoch"]
    assert kinds(run) == ["start", *epoch, *epoch, "compare", "end"]
    assert [end.state for end in run.ends] == [RunState.FINISHED]
    assert not run.running
    assert inspect_run(run.folder).state is RunState.FINISHED
    assert inspect_run(run.folder).best is not None


@pytest.mark.slow
def test_paused_run_stands_still_and_is_found_again(begin, until, qtbot):
    run = begin(epochs=500)
    until(heard(run, "epoch"))
    run.pause()
    assert run.paused
    qtbot.wait(500)
    before = len(run.events)
    qtbot.wait(1500)
    assert len(run.events) == before
    assert inspect_run(run.folder).state is RunState.PAUSED
    other = TrainingProcess(run.folder)  # as a viewer does that is started now
    assert other.attach()
    assert other.paused
    other.resume()
    until(lambda: len(run.events) > before)
    other.detach()
    run.resume()
    run.stop()
    until(lambda: bool(run.ends))
    assert [end.state for end in run.ends] == [RunState.STOPPED]


@pytest.mark.slow
def test_stopped_run_keeps_its_best_and_goes_on(begin, until):
    run = begin(epochs=4)
    until(heard(run, "epoch"))
    run.stop()
    until(lambda: bool(run.ends))
    assert [end.state for end in run.ends] == [RunState.STOPPED]
    assert_whole(run.folder)
    assert inspect_run(run.folder).best is not None
    assert inspect_run(run.folder).can_resume
    again = begin(resume=run.folder)
    until(lambda: bool(again.ends))
    assert [end.state for end in again.ends] == [RunState.FINISHED]
    assert next(event for event in again.events if event["event"] == "start")["resumed"]
    rows = (run.folder / "results.csv").read_text().splitlines()
    assert len(rows) == 1 + 4


@pytest.mark.slow
def test_stop_before_the_first_step(begin, until):
    run = begin(epochs=50)
    run.stop()
    until(lambda: bool(run.ends))
    assert [end.state for end in run.ends] == [RunState.STOPPED]
    assert "batch" not in kinds(run)
    assert inspect_run(run.folder).can_resume


@posix
@pytest.mark.slow
def test_a_run_that_does_not_listen_is_killed(begin, until, tmp_path):
    deaf = """
        import signal
        signal.signal = lambda *_: None
        import pathlib
        seen = pathlib.Path.exists
        pathlib.Path.exists = lambda self, **_: False if self.name == "stop" else seen(self)
    """
    run = begin(injected(tmp_path / "deaf", deaf), epochs=500)
    run.stop_timeouts = (30.0, 1.0)
    until(heard(run, "epoch"))
    run.stop()
    until(lambda: bool(run.ends))
    assert [end.state for end in run.ends] == [RunState.STOPPED]
    assert_whole(run.folder)


@pytest.mark.slow
def test_killed_run_is_told_once_and_can_go_on(begin, until):
    run = begin(epochs=50)
    until(heard(run, "epoch"))
    psutil.Process(run.pid).kill()
    until(lambda: bool(run.ends))
    assert [end.state for end in run.ends] == [RunState.INTERRUPTED]
    assert "resume" in run.ends[0].message
    assert inspect_run(run.folder).state is RunState.INTERRUPTED
    assert_whole(run.folder)


def test_a_process_that_cannot_be_started(begin, qtbot, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    run = begin()
    assert [end.state for end in run.ends] == [RunState.FAILED]
    assert "could not be started" in run.ends[0].message
    assert not run.running


@pytest.mark.slow
def test_leaving_a_run_lets_it_go_on(begin, until, qtbot):
    run = begin(epochs=500)
    until(heard(run, "epoch"))
    run.detach()
    assert psutil.pid_exists(run.pid)
    found = [each for each in list_runs(run.folder.parents[1]) if each.is_active]
    assert [each.path for each in found] == [run.folder]
    other = TrainingProcess(found[0].path)
    seen, ends = [], []
    other.event_received.connect(seen.append)
    other.ended.connect(ends.append)
    assert other.attach(found[0])
    until(lambda: len(seen) > 3)
    assert seen[0]["event"] in ("start", "warning")  # what was told before is told again
    other.stop()
    until(lambda: bool(ends))
    assert ends[0].state is RunState.STOPPED
    assert not run.ends


# --- many kills ----------------------------------------------------------------------------------

KILLS = int(os.environ.get("KILLS", "8"))  # twenty take ten minutes


@posix
@pytest.mark.slow
def test_many_kills_at_random_moments(begin, until, qtbot):
    """One run, killed over and over: it always goes on, and gets to its end."""
    chance = random.Random(4)
    run, folder, reached = begin(epochs=60), None, []
    for _ in range(KILLS):
        folder = run.folder
        # From within the loading of the program to some epochs after the start.
        if chance.random() < 0.75:
            steps = chance.randrange(1, 7)
            until(lambda: kinds(run).count("batch") >= steps or bool(run.ends))  # noqa: B023
            qtbot.wait(chance.randrange(300))
        else:
            qtbot.wait(chance.randrange(3000))
        if not run.ends:
            os.kill(run.pid, signal.SIGKILL)
            until(lambda: bool(run.ends))  # noqa: B023 - waited for right here
        assert len(run.ends) == 1
        assert run.ends[0].state in (RunState.INTERRUPTED, RunState.FINISHED)
        assert_whole(folder)
        state = (
            RunFolder(folder, locked=False).read_state() if (folder / "state.pt").exists() else None
        )
        reached.append(-1 if state is None else state["epoch"])
        run = begin(resume=folder)
    assert reached == sorted(reached), "a kill has cost a finished epoch"
    assert reached[-1] > 0
    until(lambda: "batch" in kinds(run) or bool(run.ends))  # it has put the folder in order
    run.stop()
    until(lambda: bool(run.ends))
    assert run.ends[0].state in (RunState.STOPPED, RunState.FINISHED)
    assert_whole(folder)
    assert not list(folder.glob(".*.partial*"))
    rows = (folder / "results.csv").read_text().splitlines()[1:]
    assert [int(row.split(",")[0]) for row in rows] == list(range(1, len(rows) + 1))


# --- what goes wrong has its sentence ------------------------------------------------------------


def failed(run, until) -> str:
    until(lambda: bool(run.ends))
    assert [end.state for end in run.ends] == [RunState.FAILED]
    message = run.ends[0].message
    assert message
    assert "\n" not in message
    assert "Traceback" not in message
    return message


@pytest.mark.slow
def test_exception_inside_training(begin, until, tmp_path):
    broken = """
        import sys
        import napari_beerlanet.core.training.monitor as watching
        def epoch(self, trainer):
            loaded = "torch._dynamo" in sys.modules
            raise RuntimeError(f"something in the middle of it; compiler loaded: {loaded}")
        watching.TrainingMonitor.on_epoch_end = epoch
    """
    run = begin(injected(tmp_path / "broken", broken))
    # The compiler is not needed, and takes longer to load than a short epoch.
    assert "something in the middle of it; compiler loaded: False" in failed(run, until)
    assert inspect_run(run.folder).can_resume


@pytest.mark.slow
def test_no_space_left(begin, until, tmp_path):
    full = """
        import errno, os
        from contextlib import contextmanager
        import napari_beerlanet.core.training.runs as runfiles
        plain = runfiles.atomic_path
        @contextmanager
        def atomic_path(path):
            if str(path).endswith("state.pt"):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
            with plain(path) as unfinished:
                yield unfinished
        runfiles.atomic_path = atomic_path
    """
    run = begin(injected(tmp_path / "full", full))
    assert "no space left" in failed(run, until)
    assert_whole(run.folder)


@pytest.mark.slow
def test_device_that_is_gone(begin, until):
    run = begin(device="cuda:7")
    assert "cuda:7" in failed(run, until)
    assert inspect_run(run.folder).can_resume


@pytest.mark.slow
def test_folder_that_is_gone(begin, until, tmp_path, project):
    run = begin(epochs=500)
    until(heard(run, "epoch"))
    moved = tmp_path / "elsewhere"
    run.folder.rename(moved)
    until(lambda: bool(run.ends))
    assert len(run.ends) == 1
    assert run.ends[0].state in (RunState.FAILED, RunState.INTERRUPTED)
    assert "the folder is not there" in run.ends[0].message
    assert_whole(moved)
    moved.rename(run.folder)
    assert inspect_run(run.folder).can_resume


# --- following -----------------------------------------------------------------------------------


def test_end_of_an_earlier_try_is_not_taken_for_this_one(tmp_path, qtbot, until):
    """Found while it loads: all that progress.jsonl tells so far is how it failed yesterday."""
    path = new_run(tmp_path, TrainSettings(model="m", data="d").model_dump())
    (path / "progress.jsonl").write_text('{"event": "failed", "message": "yesterday"}\n')
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    folder = RunFolder(path)  # as if the child held the lock
    folder.write_run(state="running", process=child.pid)
    run = TrainingProcess(path)
    ends = []
    run.ended.connect(ends.append)
    assert run.attach()
    qtbot.wait(600)
    assert run.running
    assert child.poll() is None
    folder.write_run(state="finished")
    child.communicate()
    until(lambda: bool(ends))
    folder.close()
    assert [end.state for end in ends] == [RunState.FINISHED]


def test_tail_waits_for_whole_lines_and_passes_over_garbage(tmp_path):
    file = tmp_path / "progress.jsonl"
    tail = EventTail(tmp_path)
    assert tail.read() == []
    file.write_bytes(b'{"event": "batch", "epoch": 1}\nwarning: \xff\xfe\n[1]\n{"a": 1}\n{"eve')
    assert tail.read() == [{"event": "batch", "epoch": 1}]
    assert tail.read() == []
    with file.open("ab") as more:
        more.write(b'nt": "end"}\n')
    assert tail.read() == [{"event": "end"}]
    file.write_bytes(b'{"event": "start"}\n')  # begun anew
    assert tail.read() == [{"event": "start"}]


def test_tail_begins_late_in_a_long_file_with_a_whole_line(tmp_path):
    lines = [json.dumps({"event": "batch", "number": k}) for k in range(1000)]
    (tmp_path / "progress.jsonl").write_text("\n".join(lines) + "\n")
    read = EventTail(tmp_path, latest=500).read()
    assert 5 < len(read) < 20
    assert read[-1]["number"] == 999


def test_states_of_runs(tmp_path):
    path = new_run(tmp_path, TrainSettings(model="m", data="d").model_dump())
    assert inspect_run(path).state is RunState.NEW
    done = subprocess.Popen([sys.executable, "-c", ""])
    done.wait()
    folder = RunFolder(path)
    folder.write_run(state="running", process=done.pid)
    assert inspect_run(path).state is RunState.INTERRUPTED
    folder.write_run(process=os.getpid())
    assert inspect_run(path).state is RunState.RUNNING
    folder.close()  # the number is another's now
    assert inspect_run(path).state is RunState.INTERRUPTED
    folder.write_run(state="finished")
    assert inspect_run(path).state is RunState.FINISHED
    (path / "run.json").write_text("{")
    assert inspect_run(path).state is RunState.DAMAGED
    assert new_run(tmp_path, {"scope": "all"}) != path
    assert len(list_runs(tmp_path)) == 2
    assert list_runs(tmp_path / "gone") == []


@posix
def test_priority_is_lowered():
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    background_process.lower_priority(psutil.Process(child.pid))
    assert psutil.Process(child.pid).nice() == 10
    child.communicate()


def test_environment_of_the_process(monkeypatch):
    monkeypatch.setenv("QT_QPA_PLATFORM_PLUGIN_PATH", "cv2")
    made = background_process.child_environment()
    assert "QT_QPA_PLATFORM_PLUGIN_PATH" not in made
    assert made["YOLO_OFFLINE"] == "true"


def test_fifty_runs_are_listed(tmp_path):
    for _ in range(50):
        new_run(tmp_path, TrainSettings(model="m", data="d").model_dump())
    assert len(list_runs(tmp_path)) == 50
