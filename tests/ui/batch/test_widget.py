"""The panel “Run on folder” in a real window, its batch in a real process."""

import os
import shlex
import signal
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import psutil
import pytest
from PIL import Image
from pyqtgraph import BarGraphItem
from qtpy.QtCore import Qt, QUrl
from qtpy.QtGui import QDesktopServices
from qtpy.QtWidgets import QApplication, QPushButton, QScrollArea

import napari_beerlanet as nb
from napari_beerlanet.core.batch.counts import ImageCounts, StudyCounts
from napari_beerlanet.core.batch.settings import StudySettings
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
from napari_beerlanet.core.common.events import RunState
from napari_beerlanet.core.common.jobs import LOCK_FILE
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.batch.widget import BatchWidget
from napari_beerlanet.ui.common import background_process
from napari_beerlanet.ui.common.background_process import RunEnd
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.stains.widget import DecomposeWidget
from napari_beerlanet.ui.viewer.layers import Role, role_metadata
from tinyclasses import SMALL, tiny_classifier

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
def viewer(shared_viewer, monkeypatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setattr(background_process, "lower_priority", lambda process: None)
    return shared_viewer()


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


def test_the_model_of_the_other_panels_is_preselected_unless_one_is_chosen_here(viewer, opened):
    panel = opened(BatchWidget, "Run on folder")
    model = nb.load_checkpoint("blood-cells", device="cpu")
    get_session(viewer).set_model(model, "blood-cells")
    assert panel.form.settings()["model"] == "blood-cells", "also where it was loaded afterwards"
    panel.form.detect.native.click()
    assert panel.form.settings()["model"] == ""
    get_session(viewer).set_model(model, "blood-cells")
    assert panel.form.settings()["model"] == "", "the user wants no cells"
    panel.form.detect.native.click()
    panel.form.model.choose("/models/ours.safetensors")
    get_session(viewer).set_model(model, "blood-cells")
    assert panel.form.settings()["model"] == "/models/ours.safetensors", "the user has chosen it"


def test_the_folder_of_the_shared_image_is_suggested_also_when_its_boxes_are_selected(
    viewer, opened, tmp_path
):
    path = tmp_path / "smears" / "one.png"
    path.parent.mkdir()
    Image.fromarray(np.full((48, 64, 3), 200, np.uint8)).save(path)
    (image,) = viewer.open(path, plugin="napari")
    viewer.add_shapes(metadata=role_metadata(Role.DETECTIONS, image))
    panel = opened(BatchWidget, "batch")
    assert panel.inputs.patterns == (str(path.parent),)


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
    until(lambda: not background_process.running_process(out))
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


# --- results --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def counted(tmp_path_factory):
    """The results of two smears and a file that is no image, with cells counted."""
    folder = tmp_path_factory.mktemp("counted") / "smears"
    folder.mkdir()
    for seed in range(2):
        smear = blood_smear((200, 260), cell_diameter=60, seed=seed).image
        Image.fromarray(smear[: 200 - 60 * seed]).save(folder / f"a{seed}.png")
    (folder / "broken.png").write_bytes(b"no image")
    settings = {"model": "blood-cells", "decompose": False, "reports": False, "previews": False}
    out = folder.with_name("out")
    run_study(folder, out, {**settings, "object_size": 60, "densities": False}, workers=0)
    return out


def test_what_limits_the_counts_is_said_once(counted):
    """Beside the table of counts, and not in the message of the end, too."""
    limits = ["Does not know parasites; may call them WBC or Platelets."]
    notes = [f"blood-cells: {limits[0]}", "install pyarrow for Parquet"]
    event = {"event": "end", "done": 2, "notes": notes, "limits": limits}
    assert background_process.summarize_end(event) == "2 done. Install pyarrow for Parquet"
    assert limits[0] in " ".join(StudyCounts.read(counted).reservations())
    del event["limits"]  # of a version before
    assert limits[0] in background_process.summarize_end(event)


def cells(results):
    """The table as it is shown, line by line."""
    model = results.table.model()
    lines, columns = range(model.rowCount()), range(1, model.columnCount())
    return [[model.index(i, j).data() for j in columns] for i in lines]


def test_a_batch_ends_with_a_table_a_plot_and_open_for_every_result(
    viewer, opened, counted, tmp_path, until
):
    panel = opened(BatchWidget, "Run on folder")
    viewer.window._qt_window.resize(1000, 600)
    viewer.window.show()
    panel.inputs.out.setText(str(counted))
    results = panel.results
    until(lambda: results.study is not None)
    scroll = panel.findChild(QScrollArea).verticalScrollBar()
    until(lambda: scroll.maximum() > 0)
    assert scroll.value() == 0, "the form is above"
    panel.progress.ended.emit(RunEnd(RunState.FINISHED))
    until(lambda: scroll.value() > 0)
    assert not results.summary.visibleRegion().isEmpty()
    shown = cells(results)
    assert [line[0] for line in shown] == ["a0", "a1", "broken (failed)", "all images"]
    first, second = int(shown[0][1]), int(shown[1][1])
    assert first > second > 0
    assert shown[3][1] == str(first + second)
    assert shown[2][1] == "–"
    assert "1 image failed: broken." in results.reservations.text()
    assert f"{first + second} cells in 2 images" in results.summary.text()
    bars = [item for item in results.plot.getPlotItem().items if isinstance(item, BarGraphItem)]
    assert [sum(bar.opts["height"][k] for bar in bars) for k in (0, 1)] == [first, second]
    assert not results.table.wordWrap(), "a long name is elided in its middle, on one line"
    column = results.model.columns.index("all cells")
    results.table.sortByColumn(column, Qt.SortOrder.AscendingOrder)
    assert [line[0] for line in cells(results)] == ["a1", "a0", "broken (failed)", "all images"]
    results.copy_table()
    copied = [line.split("\t") for line in QApplication.clipboard().text().splitlines()]
    assert [line[0] for line in copied] == ["image", "a1", "a0", "broken", "all images"]
    results.export_csv(tmp_path / "counts.csv")
    assert pd.read_csv(tmp_path / "counts.csv")["total"].tolist()[:2] == [second, first]

    results.table.clicked.emit(results.model.index(1, 0))  # "Open" of a0
    until(lambda: "a0 · detections" in viewer.layers)
    image = viewer.layers["a0"]
    assert Path(image.source.path).name == "a0.png"
    until(lambda: viewer.layers["a0 · detections"].nshapes == first)
    assert len(get_session(viewer).detections[image]) == first
    mine = viewer.layers["a0 · detections"]
    mine.visible = False
    results.table.doubleClicked.emit(results.model.index(1, 1))
    until(lambda: mine.visible)
    assert sum(layer.name.startswith("a0") for layer in viewer.layers) == 2, "nothing is doubled"
    results.open_result(results.study.images[2])
    assert "broken has no results" in results.bar.text
    panel.inputs.out.setText(str(tmp_path))
    until(lambda: results.study is None)


def test_cell_types_in_the_table_and_the_plot(viewer, opened):
    results = opened(BatchWidget, "Run on folder").results
    numbers = {"a": ({"RBC": 400, "WBC": 2}, {"uninfected": 390, "ring": 10}),
               "b": ({"RBC": 300, "WBC": 2}, {"uninfected": 300, "ring": 0})}  # fmt: skip
    images = [
        ImageCounts(name, f"/{name}.png", "done", counts, types=types)
        for name, (counts, types) in numbers.items()
    ]
    colours = {"uninfected": "#111111", "ring": "#222222"}
    results.show_counts(StudyCounts(images, type_colours=colours))
    columns = results.model.columns
    assert columns[2:7] == ["all cells", "RBC", "WBC", "type uninfected", "type ring"]
    assert [line[columns.index("type ring") - 1] for line in cells(results)] == ["10", "0", "10"]
    tooltip = results.model.index(0, columns.index("type ring")).data(Qt.ItemDataRole.ToolTipRole)
    assert tooltip.startswith("2.5 % (1.4 % to 4.5 %) of 400 classified cells")

    def heights():
        items = results.plot.getPlotItem().items
        return [list(item.opts["height"]) for item in items if isinstance(item, BarGraphItem)]

    assert results.bars.isVisibleTo(results)
    assert heights() == [[390, 300], [10, 0]]
    assert "#222222" in results.legend.text()
    results.bars.setCurrentText("Cells by class")
    assert heights() == [[400, 300], [2, 2]]
    assert "uninfected" not in results.legend.text()
    results.show_counts(StudyCounts([ImageCounts("a", "/a.png", "done", {"RBC": 4})]))
    assert not results.bars.isVisibleTo(results)
    assert heights() == [[4]]


def test_a_classifier_is_chosen_in_the_form(opened, tmp_path):
    form = opened(BatchWidget, "Run on folder").form
    stages = tmp_path / "stages.safetensors"
    names = ["uninfected", "ring"]
    save_checkpoint(tiny_classifier(SMALL, names, info={"applies_to": ["RBC"]}), stages)
    others = tmp_path / "others.safetensors"
    save_checkpoint(tiny_classifier(SMALL), others)
    form.set_settings({"model": "blood-cells"})
    assert form.settings()["classifier"] == ""
    assert not form.classify_options.isVisibleTo(form)
    form.classify.value = True
    assert form.problem == "Choose a classifier."
    form.classifier.choose(str(stages))
    assert form.problem == ""
    assert form.classify_summary.text() == "Cells of the class RBC, as uninfected, ring."
    form.boxes["one_page"].value = True
    settings = StudySettings(**form.settings())
    assert (settings.classifier, settings.one_page) == (str(stages), True)
    form.classifier.choose(str(others))
    assert form.classify_summary.text() == "All cells, as dark, pale."
    assert not StudySettings(**form.settings()).one_page, "which is on infected cells"
    form.detect.value = False
    assert form.settings()["classifier"] == ""
    form.set_settings({"model": "blood-cells", "classifier": str(stages)})
    assert form.settings()["classifier"] == str(stages)
    form.set_settings({"classifier": ""})
    assert form.settings()["classifier"] == ""


def test_the_classifier_that_cells_were_classified_with_is_preselected(viewer, opened):
    panel = opened(BatchWidget, "Run on folder")
    session, form = get_session(viewer), panel.form
    clf = tiny_classifier(info={"applies_to": ["RBC"]})
    session.set_classifier(clf, "/models/tiny.safetensors")
    assert form.settings()["classifier"] == "", "that one is loaded does not mean that it is used"
    image = viewer.add_image(np.full((40, 40, 3), 200, np.uint8), name="smear")
    found = Detections([[2, 2, 20, 20]], [0], [0.9], ["RBC"])
    session.set_model(nb.load_checkpoint("blood-cells", device="cpu"), "blood-cells")
    session.set_detections(image, found)
    assert form.settings()["classifier"] == ""
    p = np.array([[0.8, 0.2]], np.float32)
    session.set_detections(image, found.with_types(["dark", "pale"], p, classifier="tiny"))
    assert form.settings()["classifier"] == "/models/tiny.safetensors"
    form.classify.native.click()
    session.set_detections(image, found.with_types(["dark", "pale"], p, classifier="tiny"))
    assert form.settings()["classifier"] == "", "the user wants no types"
    panel.adopt_settings()
    assert form.settings()["classifier"] == "/models/tiny.safetensors"


def test_boxes_that_the_user_has_stay_when_a_result_is_opened(viewer, opened, counted, until):
    panel = opened(BatchWidget, "Run on folder")
    results = panel.results
    results.load(counted)
    until(lambda: results.study is not None)
    viewer.open(results.study.images[0].path)
    image = viewer.layers["a0"]
    found = Detections(np.array([[5, 5, 40, 40]]), np.array([0]), np.array([0.9]), ["RBC"])
    mine = DetectionLayer(viewer, image, found)
    get_session(viewer).set_detections(image, found, mine)
    results.open_result(results.study.images[0])
    until(lambda: get_session(viewer).detection_layers[image] is not mine)
    assert mine.alive
    assert not mine.layer.visible
    assert "batch" in get_session(viewer).detection_layers[image].layer.name
