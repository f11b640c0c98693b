"""The viewer killed while a training goes on: the training is found again, and nothing is lost."""

import os
import random
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint, save_checkpoint
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.training.runs import RunFolder, inspect_run, list_runs
from napari_beerlanet.ui.finetune.widget import FineTuneWidget
from tinydata import write_smears

pytestmark = [
    pytest.mark.window,
    pytest.mark.slow,
    pytest.mark.skipif(os.name == "nt", reason="sends POSIX signals"),
]

AT_START = Path(__file__).parents[2] / "at_start" / "sitecustomize.py"  # what others run first
KILLS = int(os.environ.get("KILLS", "3"))  # each takes half a minute

VIEWER = """
    import os
    import sys
    import napari
    from qtpy.QtCore import QTimer
    from napari_beerlanet.ui.finetune import run_view
    from napari_beerlanet.ui.finetune.widget import FineTuneWidget

    run_view.lower_priority = lambda process: None
    project, at_start = sys.argv[1:]
    os.environ["PYTHONPATH"] = os.pathsep.join([at_start, os.environ.get("PYTHONPATH", "")])
    viewer = napari.Viewer(show=True)
    panel = FineTuneWidget(viewer)
    viewer.window.add_dock_widget(panel)
    panel.project_choice.choose(project)
    panel.model_choice.choose_file(project + "/tiny.safetensors")
    panel.form.batch.value = 2
    panel.form.epochs.value = 5000

    def start():
        if panel.start_button.isEnabled() and not panel.run_view.running:
            timer.stop()
            panel.start()

    timer = QTimer()
    timer.timeout.connect(start)
    timer.start(100)
    napari.run()
"""


SLOWER = """
    import time
    from napari_beerlanet.core.training.monitor import TrainingMonitor

    end_batch = TrainingMonitor.on_batch_end

    def on_batch_end(self, trainer):
        time.sleep(0.25)
        end_batch(self, trainer)

    TrainingMonitor.on_batch_end = on_batch_end
"""
"""What the process that trains runs first: hundreds of epochs show no more than twenty do."""


def patiently(condition, seconds=240):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until, "nothing has happened"
        time.sleep(0.1)


@pytest.fixture
def project(tmp_path, tiny):
    folder = tmp_path / "project"
    write_smears(folder, train=3, val=2, side=64)
    save_checkpoint(tiny, folder / "tiny.safetensors")
    yield folder
    for run in list_runs(folder):
        if run.process is not None:
            psutil.Process(run.process).kill()


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "viewer.py"
    path.write_text(textwrap.dedent(VIEWER))
    return path


@pytest.fixture
def at_start(tmp_path):
    """A folder whose code Python runs first, for the process that trains."""
    folder = tmp_path / "at start"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(AT_START.read_text() + textwrap.dedent(SLOWER))
    return folder


def assert_whole(folder):
    """Every file that has its final name can be read to its end."""
    for name in ("best.safetensors", "last.safetensors"):
        load_checkpoint(folder / name, device="cpu")
    assert RunFolder(folder, locked=False).read_state() is not None


def test_viewer_killed_while_training_goes_on(
    script, project, at_start, make_napari_viewer, qtbot, monkeypatch
):
    """The process that trains does not notice; the next viewer finds it and can stop it."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    chance, run, epoch = random.Random(1), None, 0
    for _ in range(KILLS):
        viewer = subprocess.Popen([sys.executable, str(script), str(project), str(at_start)])
        try:
            if run is None:
                patiently(lambda: any(found.is_active for found in list_runs(project)))
                (run,) = list_runs(project)
                patiently(lambda: inspect_run(run.path).best is not None)  # noqa: B023
            time.sleep(10 * chance.random())  # from its start until it follows the run
        finally:
            os.kill(viewer.pid, signal.SIGKILL)
            viewer.wait()
        (now,) = list_runs(project)  # none has begun another one
        assert (now.state, now.process) == (RunState.RUNNING, run.process)
        assert now.epoch >= epoch
        epoch = now.epoch
        assert_whole(run.path)
    patiently(lambda: inspect_run(run.path).epoch > epoch + 1)  # it goes on by itself
    panel = FineTuneWidget(make_napari_viewer())  # opens the project that was open last
    qtbot.waitUntil(lambda: panel.run_view.running, timeout=600_000)
    assert panel.run_view.folder == run.path
    assert panel.run_view.process.pid == run.process
    panel.run_view.stop_button.click()
    qtbot.waitUntil(lambda: not panel.run_view.running, timeout=600_000)
    assert inspect_run(run.path).state is RunState.STOPPED
    assert_whole(run.path)
    assert not list(run.path.glob(".*.partial*"))
    panel.shut_down()
