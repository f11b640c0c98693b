"""The panel “Run on folder” in a real window, its batch in a real process."""

import os
import shlex
import signal
import sys

import pandas as pd
import psutil
import pytest
from PIL import Image
from qtpy.QtCore import QUrl
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import QApplication, QPushButton

import napari_beerlanet as nb
from napari_beerlanet.core.batch.study import LOCK_FILE, run_study
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.batch import progress
from napari_beerlanet.ui.batch.widget import BatchWidget
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.stains.widget import DecomposeWidget

pytestmark = pytest.mark.window

COUNT = 6


@pytest.fixture
def until(qtbot):
    """As in conftest, with the patience that processes need on a busy machine."""
    return lambda condition: qtbot.waitUntil(condition, timeout=300_000)


@pytest.fixture
def images(tmp_path):
    folder = tmp_path / "smears é"
    folder.mkdir()
    for seed in range(COUNT):
        Image.fromarray(blood_smear((150, 200), seed=seed).image).save(folder / f"a{seed}.png")
    return folder


@pytest.fixture
def viewer(make_napari_viewer, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(progress, "lower_priority", lambda process: None)
    return make_napari_viewer()


@pytest.fixture
def opened(viewer):
    """Panels in their docks; a batch that still runs at the end is killed."""
    made = []

    def dock(kind, name):
        panel = kind(viewer)
        if kind is BatchWidget:
            panel.close_confirmation.ask = lambda: "continue"
        viewer.window.add_dock_widget(panel, name=name)
        made.append(panel)
        return panel

    yield dock
    for panel in made:
        if isinstance(panel, BatchWidget) and panel.progress.process is not None:
            panel.progress.process.kill()
        panel.shut_down()


@pytest.fixture
def panel(opened, images, tmp_path, until):
    """On a folder of smears, to be decomposed quickly."""
    made = opened(BatchWidget, "Run on folder")
    quick = {"model": "", "iterations": 2, "previews": False, "leave_out": ()}
    made.form.set_settings(quick)
    made.inputs.set_inputs([str(images)], tmp_path / "out")
    until(lambda: made.run_button.isEnabled())
    return made


def run(panel, until):
    """Press the button and wait for the end."""
    ends = []
    panel.progress.ended.connect(ends.append)
    panel.run_button.click()
    until(lambda: panel.progress.running)
    assert not panel.inputs.isEnabled()
    until(lambda: bool(ends))
    panel.progress.ended.disconnect(ends.append)
    assert len(ends) == 1
    return ends[0]


# --- what is set ----------------------------------------------------------------------------------


def test_it_begins_with_what_the_panels_are_set_to(viewer, opened, images, until):
    viewer.open(str(images / "a0.png"))
    model = nb.load_checkpoint("blood-cells", device="cpu")
    get_session(viewer).set_model(model, "blood-cells")
    find, stains = opened(DetectWidget, "Find cells"), opened(DecomposeWidget, "Stains")
    find.form.confidence_slider.value = 0.4
    find.form.iou_slider.value = 0.55
    find.form.set_measured_size(33)
    stains.form.iterations.set_value(12)
    stains.form.lam.set_value(0.5)
    assert stains.study_settings()["leave_out"] == (), "what is no slide is fitted whole"
    stains.form.slide.set_levels([(9000, 9000)])
    stains.form.slide.kinds["glass"].value = True
    pressed = [b for b in find.findChildren(QPushButton) if b.text().startswith("Run on folder")]
    pressed[0].click()
    (panel,) = [w for w in viewer.window.dock_widgets.values() if isinstance(w, BatchWidget)]
    until(lambda: panel.inputs.image_count == COUNT)
    order = panel.study_config()
    assert order.images == (str(images),)
    assert order.out == images.with_name("smears é-results")
    told = order.settings
    assert (told.model, told.confidence, told.iou) == ("blood-cells", 0.4, 0.55)
    assert (told.object_size, told.iterations, told.lam) == (33.0, 12, 0.5)
    assert (told.components, told.gamma) == ("auto", "auto")
    assert told.leave_out == ("glass", "pen", "border")
    panel.copy_command()
    words = shlex.split(QApplication.clipboard().text())
    assert words[:3] == ["napari-beerlanet", "batch", str(images)]
    assert words[words.index("--iou") + 1] == "0.55"
    find.form.confidence_slider.value = 0.6
    pressed[0].click()
    assert panel.study_config().settings.confidence == 0.6, "the same panel, with what is set now"
    assert sum(isinstance(w, BatchWidget) for w in viewer.window.dock_widgets.values()) == 1


def test_what_is_missing_is_said(opened, images, tmp_path, until):
    panel = opened(BatchWidget, "Run on folder")
    assert "Choose the images" in panel.problem_text.text()
    assert not panel.run_button.isEnabled()
    panel.inputs.set_inputs([str(images), str(tmp_path / "none.svs")], None)
    until(lambda: panel.inputs.image_count == COUNT)
    assert "none.svs" in panel.inputs.count_label.text()
    assert panel.inputs.out_folder == images.with_name("smears é-results")
    panel.form.detect.value = False
    panel.form.boxes["decompose"].value = False
    assert "at least one processing step" in panel.problem_text.text()
    panel.form.boxes["decompose"].value = True
    panel.form.run_on_cluster.setChecked(True)
    assert "scheduler" in panel.problem_text.text()
    panel.form.scheduler_address.value = "tcp://head:8786"
    assert panel.study_config().scheduler == "tcp://head:8786"
    assert not panel.problem_text.isVisible()
    panel.form.run_locally.setChecked(True)
    (tmp_path / "file").touch()
    panel.inputs.out.setText(str(tmp_path / "file"))
    until(lambda: panel.run_button.isEnabled())
    panel.run_button.click()
    until(lambda: bool(panel.start_bar.text))
    assert "file" in panel.start_bar.text
    assert panel.run_button.isEnabled()


# --- running --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_folder_is_done_and_failures_are_listed(panel, images, tmp_path, until, stalls):
    (images / "broken.svs").write_bytes(b"II*\0 no slide")
    panel.form.workers.value = 2
    with stalls.watched():
        end = run(panel, until)
    print(f"longest stall {1000 * stalls.longest:.0f} ms")
    assert end.state is RunState.FINISHED
    assert panel.progress.message.text() == f"{COUNT} done, 1 failed."
    assert panel.progress.failures.count() == 1
    assert panel.progress.failures.item(0).text().startswith("broken.svs: damaged")
    assert len(pd.read_csv(tmp_path / "out" / "summary.csv")) == COUNT
    again = run_study(images, tmp_path / "out", panel.study_config().settings, workers=0)
    assert again.count("skipped") == COUNT, "the command's settings are the panel's"
    end = run(panel, until)
    assert panel.progress.message.text() == f"0 done, {COUNT} already done, 1 failed."


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no SIGKILL")
def test_stopped_and_killed_and_gone_on_with(panel, tmp_path, until):
    out, ends = tmp_path / "out", []
    panel.progress.ended.connect(ends.append)
    panel.run_button.click()
    until(lambda: len(list(out.glob("records/[!.]*.json"))) >= 1)
    panel.progress.stop.click()
    until(lambda: bool(ends))
    assert ends[0].state is RunState.STOPPED
    assert "saved" in panel.progress.message.text()
    done = len(list(out.glob("records/[!.]*.json")))
    assert 0 < done < COUNT
    panel.run_button.click()
    until(lambda: (out / LOCK_FILE).exists() and bool((out / LOCK_FILE).read_text()))
    os.kill(panel.progress.process.pid, signal.SIGKILL)
    until(lambda: len(ends) == 2)
    assert ends[1].state is RunState.INTERRUPTED
    assert "run it again" in panel.progress.message.text()
    assert panel.run_button.isEnabled()
    assert run(panel, until).state is RunState.FINISHED
    assert len(pd.read_csv(out / "summary.csv")) == COUNT


@pytest.mark.slow
def test_it_goes_on_without_the_panel_and_is_found_again(panel, opened, tmp_path, until):
    out = tmp_path / "out"
    panel.run_button.click()
    until(lambda: len(list(out.glob("records/[!.]*.json"))) >= 1)
    number = panel.progress.process.pid
    panel.shut_down()
    assert psutil.pid_exists(number)
    again = opened(BatchWidget, "Run on folder again")
    until(lambda: again.progress.running or len(list(out.glob("records/[!.]*.json"))) == COUNT)
    if again.progress.running:
        assert again.progress.process.pid == number
        assert again.inputs.out_folder == out
        assert again.study_config().settings.iterations == 2
        until(lambda: not again.progress.running)
        assert "6 done" in again.progress.message.text()
    until(lambda: not progress.active_process(out))
    assert len(pd.read_csv(out / "summary.csv")) == COUNT


def test_a_process_that_cannot_be_started(panel, until, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    panel.run_button.click()
    until(lambda: "could not be started" in panel.progress.message.text())
    assert panel.run_button.isEnabled()
    assert not panel.progress.running


def test_the_results_folder_is_opened(panel, tmp_path, monkeypatch, until):
    shown = []
    monkeypatch.setattr(QDesktopServices, "openUrl", lambda url: shown.append(url))
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    panel.run_button.click()
    until(lambda: bool(panel.progress.message.text()) and not panel.progress.running)
    panel.progress.open.click()
    assert shown == [QUrl.fromLocalFile(str(tmp_path / "out"))]
