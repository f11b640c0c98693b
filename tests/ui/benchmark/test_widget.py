"""The panel "Run benchmark": settings, the estimate, a real run of the smallest kind, the table."""

import json
from pathlib import Path

import pytest
import yaml
from qtpy.QtCore import QUrl
from qtpy.QtGui import QDesktopServices

from napari_beerlanet.core.benchmark.settings import METHODS, BenchmarkSettings
from napari_beerlanet.core.benchmark.table import read_table
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.ui.benchmark.widget import RECENT_BENCHMARKS, BenchmarkWidget
from napari_beerlanet.ui.common import background_process
from napari_beerlanet.ui.common.background_process import RunEnd
from tinyclasses import write_classes

pytestmark = pytest.mark.window


@pytest.fixture
def opened(shared_viewer):
    """Opens the panel; a fixture's own value would keep it, and the window, until the very end."""

    def make():
        viewer = shared_viewer()
        made = BenchmarkWidget(viewer)
        viewer.window.add_dock_widget(made, name="Run benchmark")
        return made

    return make


def choose(panel, *methods):
    for name, box in panel.form.methods.items():
        box.setChecked(name in methods)


def write_values(out: Path, *lines: tuple) -> None:
    head = "kind,task,laboratory,metric,method,seed,percent"
    text = "\n".join([head, *(",".join(map(str, line)) for line in lines)]) + "\n"
    (out / "values.csv").write_text(text)


def test_what_is_missing_is_said_and_the_settings_are_those_of_the_form(opened, tmp_path):
    panel = opened()
    form, task = panel.form, panel.form.task
    assert not panel.start_button.isEnabled()
    assert panel.start_reason.text() == "Choose what to train on."
    (tmp_path / "blood").mkdir()
    (tmp_path / "blood" / "data.yaml").write_text("")
    task.train.setText(str(tmp_path / "blood"))
    assert form.out.text() == str(tmp_path / "blood-benchmark"), "suggested beside the data"
    assert panel.start_reason.text() == "Add data of another laboratory."
    task.add_laboratory("/data/other/data.yaml")
    task.add_laboratory("/data/other/data.yaml")
    assert panel.start_button.isEnabled()
    choose(panel)
    assert panel.start_reason.text() == "Choose a method."
    choose(panel, "none", "macenko", "beerlanet-jitter")
    assert task.epochs.text() == "as in the paper"
    form.seeds.setValue(2)
    task.epochs.setValue(7)
    settings = panel.settings()
    first = settings.tasks[0]
    assert (first.kind, first.name, first.epochs) == ("detect", "blood", 7)
    assert first.train == str(tmp_path / "blood" / "data.yaml")
    assert [(test.name, test.data) for test in first.tests] == [
        ("other", "/data/other/data.yaml"),
        ("other 2", "/data/other/data.yaml"),
    ]
    assert settings.methods == ("none", "macenko", "beerlanet-jitter")
    assert settings.seeds == (0, 1)
    task.laboratories.item(0).setSelected(True)
    task.remove_laboratories()
    assert [test.name for test in panel.settings().tasks[0].tests] == ["other 2"]


def test_a_run_may_have_several_tasks(opened, tmp_path):
    panel = opened()
    form = panel.form
    assert not form.tasks.tabBar().isVisibleTo(panel)
    assert not form.remove_button.isEnabled()
    form.task.train.setText("/data/blood")
    form.task.add_laboratory("/data/other")
    form.add_button.click()
    assert form.tasks.tabBar().isVisibleTo(panel)
    assert [form.tasks.tabText(k) for k in range(2)] == ["blood", "Task 2"]
    assert panel.start_reason.text() == "Task 2: Choose what to train on."
    form.task.kind.setCurrentIndex(1)
    form.task.train.setText("/data/blood")
    form.task.add_laboratory("/data/third")
    form.task.image_size.setValue(64)
    assert form.out.text() == "/data/blood-benchmark", "that of the first"
    tasks = panel.settings().tasks
    assert [(task.name, task.kind) for task in tasks] == [
        ("blood", "detect"),
        ("blood 2", "classify"),
    ]
    assert [task.image_size for task in tasks] == [None, 64]
    form.tasks.setCurrentIndex(0)
    form.remove_button.click()
    (left,) = panel.settings().tasks
    assert (left.kind, left.tests[0].name) == ("classify", "third")


def test_settings_of_a_file_are_shown_and_what_has_no_widget_is_kept(opened, tmp_path, until):
    task = {"name": "cells", "kind": "detect", "train": "a.yaml", "epochs": 3, "batch": 4}
    content = {
        "tasks": [
            {**task, "tests": {"x": {"data": "b.yaml", "split": "test"}}},
            {**task, "name": "types", "kind": "classify", "tests": {"y": "c"},
             "options": {"fill": 0.8}},
        ],
        "methods": ["none", "grey"], "seeds": [0, 5], "threads": 1,
        "staingan": {"steps": 7},
    }  # fmt: skip
    file = tmp_path / "mine" / "benchmark.yaml"
    file.parent.mkdir()
    file.write_text(yaml.safe_dump(content))
    panel = opened()
    panel.open_settings(file)
    until(lambda: not panel.form.is_empty)
    form = panel.form
    assert panel.settings() == BenchmarkSettings.read(file)
    assert form.out.text() == str(tmp_path / "mine-benchmark")
    assert [form.tasks.tabText(k) for k in range(2)] == ["cells", "types"]
    shown = [page.kept.text() for page in form.task_forms]
    assert shown == [
        "Also from the file: batch 4.",
        "Also from the file: batch 4, options fill 0.8.",
    ]
    form.seeds.setValue(3)
    form.task_forms[0].epochs.setValue(9)
    changed = panel.settings()
    assert changed.seeds == (0, 1, 2)
    assert [(one.epochs, one.batch) for one in changed.tasks] == [(9, 4), (3, 4)]
    assert (changed.threads, changed.staingan) == (1, {"steps": 7})
    (tmp_path / "mine" / "records").mkdir()
    again = BenchmarkWidget(panel.viewer)
    again.form.out.setText(str(tmp_path / "mine"))  # as with "…"
    until(lambda: not again.form.is_empty)
    assert again.settings() == BenchmarkSettings.read(file)
    assert again.form.out_folder == tmp_path / "mine"
    again.shut_down()
    again.deleteLater()


def test_the_table_fills_with_the_values_that_the_run_writes(opened, tmp_path, until, monkeypatch):
    panel = opened()
    opened = []
    monkeypatch.setattr(QDesktopServices, "openUrl", opened.append)
    settings = BenchmarkSettings(
        tasks=[
            {"name": "cells", "kind": "detect", "train": "a.yaml", "tests": {"lab two": "b.yaml"}}
        ],
        methods=["none", "beerlanet"],
        seeds=[0, 1],
    )
    (tmp_path / "benchmark.yaml").write_text(yaml.safe_dump(settings.as_dict()))
    assert not panel.view.results.isVisibleTo(panel)
    first = ("detect", "cells", "lab two", "mAP50", "none", 0, 50.0)
    write_values(tmp_path, first)
    panel.form.out.setText(str(tmp_path))
    until(lambda: panel.view.table_shown is not None)
    table = panel.view.table
    assert panel.start_button.text() == "Resume"
    assert table.item(0, 0).text() == "50.00"
    assert table.item(1, 0).text() == "–"
    assert panel.view.title.text() == "Results so far: 1 of 8"
    assert not panel.view.open_page.isEnabled()
    lines = [
        ("detect", "cells", "lab two", metric, method, seed, value + seed)
        for method, value in (("none", 50.0), ("beerlanet", 80.0))
        for metric in ("mAP50", "mAP50-95")
        for seed in (0, 1)
    ]
    write_values(tmp_path, *lines)
    (tmp_path / "benchmark.html").write_text("<html></html>")
    panel.view.on_event({"event": "job", "status": "done"})
    until(lambda: panel.view.title.text() == "Results")
    assert [table.verticalHeaderItem(k).text() for k in (0, 1)] == [
        METHODS["none"].title,
        METHODS["beerlanet"].title,
    ]
    assert table.item(1, 0).text() == "80.50 ± 0.71"
    assert table.item(1, 0).font().bold()
    assert table.item(0, 0).text() == "50.50 ± 0.71*"
    headings = [table.horizontalHeaderItem(k).text() for k in range(3)]
    assert headings == ["lab two\nmAP50", "lab two\nmAP50-95", "APU"]
    assert table.item(1, 2).text() == "0.00"
    panel.view.open_page.click()
    assert opened == [QUrl.fromLocalFile(str(tmp_path / "benchmark.html"))]
    assert read_table(tmp_path / "nowhere") is None


def test_failures_and_why_a_run_ended_are_said(opened):
    view = opened().view
    failed = {"status": "failed", "task": "cells", "method": "macenko", "error": "it broke"}
    view.on_event({"event": "job", **failed, "seed": 1})
    assert view.failed.text() == "1 job failed"
    assert view.failures.item(0).text() == "cells, macenko, seed 1: it broke"
    view.on_end(RunEnd(RunState.STOPPED))
    assert "Press Resume to continue." in view.message.text()
    full = "no space left on device in /out; stopped with 3 more to do."
    counts = {"done": 2, "skipped": 0, "failed": 1, "notes": ["a", "b"]}
    view.on_event({"event": "end", **counts, "stopped": full})
    view.on_end(RunEnd(RunState.FINISHED))
    assert view.message.text() == f"2 done, 1 failed. N{full[1:]} 2 notes on the page."


def test_it_is_stopped_resumed_followed_and_fills_the_table(opened, until, tmp_path, monkeypatch):
    """All in real processes: of a stop, of the run that resumes, of estimates."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(background_process, "lower_priority", lambda process: None)
    panel = opened()
    panel.close_confirmation.ask = lambda: "continue"
    here, there = tmp_path / "lab one", tmp_path / "lab two"
    for folder in (here, there):
        write_classes(folder)
    task, view = panel.form.task, panel.view
    task.kind.setCurrentIndex(1)
    task.train.setText(str(here))
    task.add_laboratory(str(there))
    choose(panel, "none")
    panel.form.seeds.setValue(1)
    task.epochs.setValue(12)
    task.image_size.setValue(32)
    out = panel.form.out_folder

    panel.estimate_button.click()
    until(lambda: panel.estimate_task.running)
    panel.estimate_bar.activity.stop()
    until(lambda: not panel.estimate_task.running)
    assert not out.exists()

    ended = []
    view.ended.connect(ended.append)
    panel.start_button.click()
    until(lambda: view.running)
    assert view.process.command()[-2:] == ["--workers", "1"]
    assert not panel.start_button.isEnabled()
    assert not panel.form.isEnabled()
    until(lambda: "epoch" in view.message.text() or bool(ended))
    view.stop.click()
    until(lambda: bool(ended))
    assert ended.pop().state is RunState.STOPPED, view.message.text()
    assert panel.form.isEnabled()
    assert panel.start_button.text() == "Resume"
    assert not list(out.glob("records/[!.]*.json"))
    (run,) = (out / "runs").iterdir()

    panel.start_button.click()
    until(lambda: background_process.running_process(out) is not None)
    other = BenchmarkWidget(panel.viewer)
    until(lambda: other.view.running or bool(ended))
    assert other.view.process.pid == view.process.pid
    assert other.settings() == panel.settings()
    until(lambda: bool(ended) and not other.view.running)
    assert len(ended) == 1
    assert ended[0].state is RunState.FINISHED, view.message.text()
    assert [path.name for path in (out / "runs").iterdir()] == [run.name]
    assert view.message.text() == other.view.message.text() == "1 done."
    other.shut_down()
    other.deleteLater()

    until(lambda: view.table_shown is not None)
    (record,) = (json.loads(path.read_text()) for path in (out / "records").glob("*.json"))
    accuracy = 100 * record["results"]["lab two"]["accuracy"]
    assert view.table.item(0, 0).text() == f"{accuracy:.2f}"
    until(lambda: view.open_page.isEnabled())  # the page is written after the last record
    assert RECENT_BENCHMARKS.paths() == [out]
    assert panel.start_button.text() == "Resume"
    panel.estimate_button.click()
    until(lambda: panel.estimate_bar.text == "It is done.")
