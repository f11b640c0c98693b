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
from napari_beerlanet.ui.benchmark import run_view
from napari_beerlanet.ui.benchmark.run_view import RECENT_BENCHMARKS
from napari_beerlanet.ui.benchmark.widget import BenchmarkWidget
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
    form = panel.form
    assert not panel.start_button.isEnabled()
    assert panel.start_reason.text() == "Choose what to train on."
    (tmp_path / "blood").mkdir()
    (tmp_path / "blood" / "data.yaml").write_text("")
    form.train.setText(str(tmp_path / "blood"))
    assert form.out.text() == str(tmp_path / "blood-benchmark"), "suggested beside the data"
    assert panel.start_reason.text() == "Add data of another laboratory."
    form.add_laboratory("/data/other/data.yaml")
    form.add_laboratory("/data/other/data.yaml")
    assert panel.start_button.isEnabled()
    choose(panel)
    assert panel.start_reason.text() == "Choose a method."
    choose(panel, "none", "macenko", "beerlanet")
    assert form.epochs.text() == "as in the paper"
    form.seeds.setValue(2)
    form.epochs.setValue(7)
    settings = panel.settings()
    task = settings.tasks[0]
    assert (task.kind, task.name, task.epochs) == ("detect", "blood", 7)
    assert task.train == str(tmp_path / "blood" / "data.yaml")
    assert [(test.name, test.data) for test in task.tests] == [
        ("other", "/data/other/data.yaml"),
        ("other 2", "/data/other/data.yaml"),
    ]
    assert settings.methods == ("none", "macenko", "beerlanet")
    assert settings.seeds == (0, 1)
    form.laboratories.item(0).setSelected(True)
    form.remove_laboratories()
    assert [test.name for test in panel.settings().tasks[0].tests] == ["other 2"]
    other = BenchmarkWidget(panel.viewer)
    other.form.show_settings(settings, tmp_path / "elsewhere")
    assert other.settings() == settings
    other.shut_down()
    other.deleteLater()


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
    panel.view._on_event({"event": "job", "status": "done"})
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


def test_failures_are_listed_and_a_stopped_run_can_be_resumed(opened):
    view = opened().view
    view._on_event(
        {
            "event": "job",
            "status": "failed",
            "task": "cells",
            "method": "macenko",
            "seed": 1,
            "error": "it broke",
        }
    )
    assert view.failures.text() == "⚠ 1 job failed. cells, macenko, seed 1: it broke"
    view._on_end(RunEnd(RunState.STOPPED))
    assert "Press Resume" in view.message.text()


def test_it_runs_in_a_process_and_fills_the_table(opened, until, tmp_path, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(run_view, "lower_priority", lambda process: None)
    panel = opened()
    here, there = tmp_path / "lab one", tmp_path / "lab two"
    for folder in (here, there):
        write_classes(folder)
    panel.form.kind.setCurrentIndex(1)
    panel.form.train.setText(str(here))
    panel.form.add_laboratory(str(there))
    choose(panel, "none")
    panel.form.seeds.setValue(1)
    panel.form.epochs.setValue(1)
    ended = []
    panel.view.ended.connect(ended.append)
    panel.start_button.click()
    until(lambda: panel.view.running)
    assert not panel.start_button.isEnabled()
    assert not panel.form.isEnabled()
    until(lambda: bool(ended))
    assert len(ended) == 1
    assert ended[0].state is RunState.FINISHED, panel.view.message.text()
    until(lambda: panel.view.table_shown is not None)
    out = panel.form.out_folder
    (record,) = (json.loads(path.read_text()) for path in (out / "records").glob("*.json"))
    accuracy = 100 * record["results"]["lab two"]["accuracy"]
    assert panel.view.table.item(0, 0).text() == f"{accuracy:.2f}"
    until(lambda: panel.view.open_page.isEnabled())  # the page is written after the last record
    assert RECENT_BENCHMARKS.paths() == [out]
    assert panel.start_button.text() == "Resume"
