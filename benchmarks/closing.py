"""Close napari in the middle of every long task: nothing may crash, hang or be left behind.

    scripts/with-display.sh python benchmarks/closing.py [--times 20] [--exits 3] [--jobs 2]
        [--binding pyqt6 pyside6] [--task NAME ...] [--seed S] [--data FOLDER]

Of each task, with each binding of Qt: `--times` viewers are opened and closed one after the other
in one process, each at a random moment of the task; then as many processes as `--exits` says are
ended by closing their window, as a person does. The table has how many ended well, how often the
task was under way, how long its last thread or process and the program outlived the window, and how
often something was wrong; what that was follows the line, as does where a thread was that took
longer than two seconds. The exit status is 1 if anything was wrong.

Processes that are meant to outlive the window (training, folders, benchmarks) are answered with
*Stop* when the window asks what shall become of them.

PySide6 6.12 aborts before Python 3.12; put an earlier one first:

    pip install --no-deps --target /tmp/pyside "PySide6_Essentials<6.12" "shiboken6<6.12"
    PYTHONPATH=/tmp/pyside scripts/with-display.sh python benchmarks/closing.py --binding pyside6
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PLUGIN = "napari-beerlanet"
MARK = "BEERLANET_CLOSING"
"""Environment variable of all processes that a closing starts, and those start."""

SIDE = 1200
"""Pixels of an image's side."""

_START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 120.0
_LONGEST_DELAY_S = 0.6  # after the start of the task; it is under way by then, and not done
_SLOW_S = 2.0

Running = Callable[[], object]
Start = Callable[["Case"], Running]
TASKS: dict[str, Start] = {}
COMPILING = "open the workspace"
"""The task in which another process may compile kernels, where that was never done."""


class Case:
    """A viewer in which a task is to be started, files for it, and patience.

    `data` has what `prepare` writes, `folder` is this closing's own.
    """

    def __init__(self, viewer: Any, data: Path, folder: Path) -> None:
        self.viewer, self.data, self.folder = viewer, data, folder

    def wait(self, until: Callable[[], object], what: str = "the task") -> None:
        """Run the event loop until something is true."""
        from qtpy.QtWidgets import QApplication

        end = time.monotonic() + _START_TIMEOUT_S
        while not until():
            QApplication.processEvents()
            time.sleep(0.002)
            if time.monotonic() > end:
                raise SystemExit(f"timed out: {what}")

    def panel(self, name: str) -> Any:
        """A panel in the window; a run in a process of its own is stopped with it."""
        panel = self.viewer.window.add_plugin_dock_widget(PLUGIN, name, tabify=True)[1]
        confirmation = getattr(panel, "close_confirmation", None)
        if confirmation is not None:
            confirmation.ask = lambda: "stop"
        return panel

    def press(self, button: Any) -> None:
        """Click a button as soon as it can be clicked."""
        self.wait(button.isEnabled, button.text())
        button.click()

    @property
    def session(self) -> Any:
        """What the viewer's panels share."""
        from napari_beerlanet.ui.common.session import get_session

        return get_session(self.viewer)

    def image(self, side: int = 0, name: str = "smear") -> Any:
        """A layer with a synthetic smear."""
        return self.viewer.add_image(picture(side or SIDE), name=name)

    def slide(self) -> Any:
        """A layer with a file that is taken for a slide."""
        for module, limit in slide_limits():
            setattr(module, limit, 1000)
        return self.viewer.open(self.data / "slide.svs", plugin=PLUGIN)[0]

    def project(self, name: str = "project") -> tuple[Any, Any]:
        """A copy of a prepared project, open in the panel *Annotate*: its path and the panel."""
        path = self.folder / name
        shutil.copytree(self.data / name, path)
        panel = self.panel("Annotate")
        panel.project.open(path)
        self.wait(lambda: panel.store.project is not None, "the project")
        return path, panel


def slide_limits() -> list[tuple[Any, str]]:
    """Modules and names of the numbers of pixels above which an image is lazy, and a slide."""
    from napari_beerlanet.ui.detect import slide_search
    from napari_beerlanet.ui.io import slide_reader
    from napari_beerlanet.ui.viewer import planes

    return [
        (slide_reader, "_MAX_EAGER_PIXELS"),
        (slide_search, "SLIDE_PIXELS"),
        (planes, "SLIDE_PIXELS"),
        (planes, "SLIDE_PIXELS_LAZY"),
    ]


def task(name: str) -> Callable[[Start], Start]:
    """Add a function that starts a task and returns what says whether it is under way."""

    def add(start: Start) -> Start:
        TASKS[name] = start
        return start

    return add


@functools.cache
def picture(side: int) -> Any:
    """A synthetic smear, (side, side, 3) uint8."""
    from napari_beerlanet.samples import blood_smear

    return blood_smear((side, side), seed=5).image


@functools.cache
def detector() -> Any:
    """The packaged detector."""
    from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint

    return load_checkpoint("blood-cells", device="cpu")


@functools.cache
def small_detector() -> Any:
    """One that has learned nothing, and learns quickly."""
    from napari_beerlanet.core.checkpoints.serialize import describe_network
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.detection.network import StainDetectionModel
    from tinydata import MODEL, NAMES

    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    network.fit_mix()
    return Detector(network, describe_network(network, "tiny", list(NAMES), 64))


@functools.cache
def classifier() -> Any:
    """A classifier of a small network."""
    from tinyclasses import SMALL, tiny_classifier

    return tiny_classifier(SMALL)


def boxes(count: int, side: int = 0) -> Any:
    """Detections at random places."""
    from napari_beerlanet.core.boxes.detections import Detections

    corner = np.random.default_rng(0).uniform(0, (side or SIDE) - 40, (count, 2))
    scores = np.linspace(1, 0.3, count)
    return Detections(np.hstack([corner, corner + 40]), np.zeros(count, int), scores, ["RBC"])


def prepare(data: Path) -> None:
    """Write the files that tasks need."""
    import tifffile
    from PIL import Image

    from napari_beerlanet.cli.main import main as main_of_cli
    from napari_beerlanet.core.checkpoints.checkpoint import save_checkpoint
    from napari_beerlanet.core.project.project import Project
    from napari_beerlanet.samples import blood_smear
    from napari_beerlanet.ui.finetune.start import create_run
    from projects import NAMES, fill
    from tinyclasses import typed_field, write_classes
    from tinydata import write_smears

    (data / "images").mkdir(parents=True)
    for seed in range(8):
        path = data / "images" / f"{seed}.png"
        Image.fromarray(blood_smear((300, 400), seed=seed).image).save(path)
    smear = blood_smear((1500, 1500), seed=6).image
    tifffile.imwrite(data / "slide.svs", smear, photometric="rgb", tile=(256, 256))
    with Project.create(data / "project", NAMES) as project:
        fill(project, [1, 2, 3], 64)
    shutil.copytree(data / "project", data / "large")
    annotations = data / "large" / "annotations"
    one = next(annotations.glob("*.json")).read_bytes()
    for number in range(3000):
        (annotations / f"copy-{number}.json").write_bytes(one)
    write_smears(data / "dataset", 40, 10, 300)
    write_smears(data / "trained", 3, 3, 300)
    run = create_run(data / "trained", small_detector(), {})
    save_checkpoint(small_detector(), run / "best.safetensors")
    run.rename(data / "run")
    for name in ("one", "two"):
        write_classes(data / "laboratories" / name)
    with Project.create(data / "types", ["WBC"]) as project:
        for seed in range(3):
            project.add_image(*typed_field(seed, ("dark", "pale", "band"), count=4), 128)
    save_checkpoint(small_detector(), data / "tiny.safetensors")
    given = f"batch {data / 'images'} --out={data / 'results'} --model={data / 'tiny.safetensors'}"
    quickly = "--workers=0 --components=2 --iterations=2 --no-previews --no-reports --quiet"
    if main_of_cli([*given.split(), *quickly.split()]):
        raise SystemExit("the folder of results was not written")


# --- the tasks ------------------------------------------------------------------------------------


@task(COMPILING)
def open_workspace(case: Case) -> Running:
    """Panels are imported, kernels are compiled or loaded."""
    panel = case.panel("BeerLaNet workspace")
    return lambda: any(one.running for one in panel._tasks)


@task("load a model")
def load_model(case: Case) -> Running:
    """The packaged model is loaded."""
    case.image(300)
    panel = case.panel("Find cells")
    return lambda: panel.model.task.running


@task("decompose an image")
def decompose(case: Case) -> Running:
    """Stains of an image."""
    case.image()
    panel = case.panel("Stain decomposition")
    case.press(panel.run_button)
    return lambda: not panel.live.idle


@task("decompose a slide")
def decompose_slide(case: Case) -> Running:
    """Stains of a slide, from all its pixels."""
    case.slide()
    panel = case.panel("Stain decomposition")
    case.press(panel.run_button)
    return lambda: not panel.live.idle


@task("find cells")
def find_cells(case: Case) -> Running:
    """Cells of an image."""
    case.session.set_model(detector(), "blood-cells")
    case.image()
    panel = case.panel("Find cells")
    case.press(panel.run_button)
    return lambda: panel.detect_task.running


@task("find cells on a slide")
def find_cells_on_slide(case: Case) -> Running:
    """Cells of a slide, tile by tile."""
    case.session.set_model(detector(), "blood-cells")
    case.slide()
    panel = case.panel("Find cells")
    panel.form.set_measured_size(40)
    case.press(panel.run_button)
    return lambda: panel.slide.running


@task("a million boxes")
def million_boxes(case: Case) -> Running:
    """Boxes of a search are indexed and drawn as a heat map."""
    from reviews import detected_image

    image = np.full((2500, 2500, 3), 200, np.uint8)
    detected_image(case.viewer, "slide", boxes(1_000_000, 2400), image)
    case.panel("Find cells")
    return lambda: bool(task_threads())


@task("classify cells")
def classify_cells(case: Case) -> Running:
    """Types of many cells."""
    from reviews import detected_image

    detected_image(case.viewer, "smear", boxes(3000), picture(SIDE))
    case.session.set_classifier(classifier(), "tiny")
    panel = case.panel("Classify cells")
    case.press(panel.run_button)
    return lambda: panel.classify_task.running


@task("classify patches")
def classify_patches(case: Case) -> Running:
    """Patches of a slide."""
    case.slide()
    case.session.set_classifier(classifier(), "tiny")
    section = case.panel("Classify cells").patches
    section.header.setChecked(True)
    section.patch_size.setValue(24)
    case.press(section.run_button)
    return lambda: section.patch_task.running


@task("compare normalizations")
def compare_normalizations(case: Case) -> Running:
    """An image by every method that needs no training."""
    from napari_beerlanet.ui.viewer.layers import show_in_place_of_others

    case.image(300, "reference")
    source = case.image()
    panel = case.panel("Compare normalizations")
    show_in_place_of_others(case.viewer, source)
    for name, box in panel.methods.boxes.items():
        box.setChecked(name in ("reinhard", "macenko", "vahadane", "beerlanet"))
    case.press(panel.run_button)
    return lambda: panel.compare_task.running


@task("save a normalized image")
def save_normalized_image(case: Case) -> Running:
    """An image is written as TIFF."""
    case.image(2400)
    panel = case.panel("Compare normalizations")
    case.wait(lambda: panel.image.layer is not None, "the image")
    panel.save_image(str(case.folder / "smear.tif"))
    return lambda: panel.save_task.running


@task("stain presets")
def stain_presets(case: Case) -> Running:
    """The stain of a drawn region is measured, as a preset's."""
    image = case.image(2400)
    panel = case.panel("Stain decomposition")
    case.viewer.add_shapes([[[0, 0], [2300, 2300]]], shape_type="rectangle", name="region")
    editor = panel.preset_editor
    editor.open_for(image, None)
    editor.add_region()
    return lambda: editor.task.running


@task("count infected cells")
def count_infected_cells(case: Case) -> Running:
    """Cells are found, and red cells classified, with one click (malaria)."""
    from napari_beerlanet.ui.workspace.presets import MalariaPreset
    from napari_beerlanet.ui.workspace.workspace import CLASSIFY, open_workspace

    case.image(600)
    panel = open_workspace(case.viewer, CLASSIFY).open_tab(CLASSIFY)
    case.wait(lambda: not panel.model.task.running, "the classifier")
    preset = panel.findChild(MalariaPreset)
    case.press(preset.button)
    return lambda: preset.running


@task("open a project")
def open_project(case: Case) -> Running:
    """Its files are checked, those of many images."""
    panel = case.panel("Annotate")
    panel.project.open(case.data / "large")
    return lambda: panel.project.task.running


@task("add to project")
def add_to_project(case: Case) -> Running:
    """Crops of an annotated image are written."""
    case.image()
    _, panel = case.project()
    actions = panel.annotation_actions
    case.press(panel.annotate)
    case.wait(lambda: actions.annotated is not None)
    corner = np.random.default_rng(0).uniform(0, SIDE - 40, (60, 2))
    layer = actions.annotated.boxes.layer
    layer.add([np.array([c, c + 40]) for c in corner], shape_type="rectangle")
    actions.mark_whole_image()
    actions.add_to_project("use")
    return lambda: actions.project_task.running


@task("import a dataset")
def import_dataset(case: Case) -> Running:
    """Annotated images are copied into a project."""
    _, panel = case.project()
    panel.annotation_actions.import_dataset(str(case.data / "dataset" / "data.yaml"))
    return lambda: panel.annotation_actions.project_task.running


@task("estimate a training")
def estimate_training(case: Case) -> Running:
    """Steps of a training are timed."""
    case.session.set_model(small_detector(), "tiny")
    case.project()
    panel = case.panel("Fine-tune")
    case.wait(lambda: panel.estimate.text() == "Timing a step …", "the estimate")
    return lambda: panel.estimate._task.running


@task("train")
def train(case: Case) -> Running:
    """A training in a process of its own."""
    case.session.set_model(small_detector(), "tiny")
    case.project()
    panel = case.panel("Fine-tune")
    case.press(panel.start_button)
    case.wait(lambda: panel.run_view.running, "the training")
    return lambda: panel.run_view.running


@task("compare models")
def compare_models(case: Case) -> Running:
    """A model before and after a training, on new data and on the reference."""
    shutil.copytree(case.data / "run", case.folder / "run")
    panel = case.panel("Fine-tune")
    panel.comparison.evaluate_run(case.folder / "run")
    return lambda: panel.comparison.evaluate_task.running


@task("train a classifier")
def train_classifier(case: Case) -> Running:
    """A training of a classifier in a process of its own."""
    case.project("types")
    panel = case.panel("Fine-tune")
    panel.train_classifier.click()
    choice = panel.classifier_choice.list
    names = [choice.itemText(k) for k in range(choice.count())]
    choice.setCurrentIndex(next(k for k, text in enumerate(names) if "New" in text))
    panel.classifier_form.backbone.value = "shufflenet_v2_x0_5"
    panel.classifier_form.input_size.value = 32
    case.press(panel.start_button)
    case.wait(lambda: panel.run_view.running, "the training")
    return lambda: panel.run_view.running


@task("keep a model")
def keep_model(case: Case) -> Running:
    """A run's best model is saved under a name, and loaded."""
    run = case.folder / "project" / "runs" / "run"
    run.parent.mkdir(parents=True)
    shutil.copytree(case.data / "run", run)
    panel = case.panel("Fine-tune")
    panel.comparison.evaluate_run(run, 0)
    case.press(panel.comparison.keep_button)
    return lambda: panel.comparison.keep_task.running


def open_review(case: Case, found: Any = None) -> Any:
    """The panel *Review detections*."""
    from reviews import open_panel

    return open_panel(case.viewer, case.wait, found, picture(SIDE))[1]


@task("compare with annotations")
def compare_with_annotations(case: Case) -> Running:
    """Detections are matched, likely label errors are searched."""
    from reviews import annotate

    panel = open_review(case, boxes(50_000))
    annotate(case.viewer, boxes(1500))
    tab = panel.annotation_tab
    panel.tabs.setCurrentIndex(3)
    tab.metrics.annotation_choice.setCurrentText("truth")
    case.wait(lambda: tab.task.running, "the comparison")
    return lambda: tab.task.running


@task("compare runs")
def compare_runs(case: Case) -> Running:
    """Detections of two runs on one image."""
    case.session.previous_detections.clear()
    panel = open_review(case, boxes(20_000))
    case.session.previous_detections[panel.target.source] = boxes(20_000)
    panel.run_comparison.set_target(panel.target)
    panel.run_comparison.earlier_choice.setCurrentIndex(1)
    panel.run_comparison.compare()
    return lambda: panel.run_comparison._task.running


@task("write a report")
def write_report(case: Case) -> Running:
    """A report from the review."""
    panel = open_review(case)
    panel.export.write_report(case.folder / "report.html")
    return lambda: panel.export.task.running


@task("gallery")
def gallery(case: Case) -> Running:
    """Thumbnails of many cells, each the density of one stain."""
    found = boxes(5000)
    found.columns["OD 1 mean"] = np.linspace(0, 1, len(found), dtype=np.float32)
    tab = (panel := open_review(case, found)).gallery_tab
    panel.tabs.setCurrentWidget(tab)
    tab.style_choice.setCurrentIndex(tab.style_choice.count() - 1)
    case.wait(lambda: tab._task.running, "thumbnails")
    return lambda: tab._task.running


@task("results of a folder")
def folder_results(case: Case) -> Running:
    """The table of a folder's results is read, and one of its images opened."""
    panel = case.panel("Run on folder")
    panel.results.load(case.data / "results")
    case.wait(lambda: not panel.results._read_task.running, "the results")
    panel.results.open_result(panel.results.study.images[0])
    return lambda: panel.results._open_task.running


@task("run on folder")
def run_on_folder(case: Case) -> Running:
    """Many images in a process of its own."""
    panel = case.panel("Run on folder")
    panel.form.set_settings({"model": "", "iterations": 2, "previews": False, "leave_out": ()})
    panel.inputs.set_inputs([str(case.data / "images")], case.folder / "out")
    case.press(panel.run_button)
    case.wait(lambda: panel.progress.running, "the batch")
    return lambda: panel.progress.running


# --- in a process that goes on --------------------------------------------------------------------


def close_once(
    name: str, data: Path, delay: float, make_viewer: Callable[[], Any] | None = None
) -> dict[str, Any]:
    """Open a viewer, start a task, close it after a while; what was seen."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NAPARI_BEERLANET_CONFIG"] = f"{folder}/settings"
        viewer = make_viewer() if make_viewer is not None else _new_viewer()
        in_the_middle = _start_and_close(name, Case(viewer, data, Path(folder)), delay)
        del viewer
        closed = time.monotonic()
        left, where = wait_for_the_end()
        seconds = time.monotonic() - closed
    return {"middle": in_the_middle, "seconds": seconds, "left": left, "where": where}


def _new_viewer() -> Any:
    import napari

    return napari.Viewer(show=True)


def _start_and_close(name: str, case: Case, delay: float) -> bool:
    """Whether the task was under way when the viewer was closed."""
    running = TASKS[name](case)
    until = time.monotonic() + delay
    case.wait(lambda: time.monotonic() >= until or not running())
    in_the_middle = bool(running())
    case.viewer.close()
    return in_the_middle


def wait_for_the_end() -> tuple[list[str], str]:
    """Until no thread of a task and no process of ours is left.

    Returns those that stay, by name, and where a thread was that has taken long.
    """
    from qtpy.QtWidgets import QApplication

    begin, where = time.monotonic(), ""
    while left := [*(thread.name for thread in task_threads()), *left_processes()]:
        waited = time.monotonic() - begin
        if waited > _SLOW_S and not where:
            where = " | ".join(place_of(thread) for thread in task_threads()) or left[0]
        if waited > _END_TIMEOUT_S:
            break
        QApplication.processEvents()
        time.sleep(0.005)
    return left, where


def task_threads() -> list[threading.Thread]:
    """Threads of ours that have not ended, but for those of pools, which wait for the next work."""
    ours = ("napari-beerlanet", "beerlanet-openvino", "beerlanet-tiles", "beerlanet-read")
    return [one for one in threading.enumerate() if one.name.startswith(ours)]


def place_of(thread: threading.Thread) -> str:
    """The innermost functions of ours that a thread is in."""
    frame = sys._current_frames().get(thread.ident or 0)
    if frame is None:
        return ""
    stack = [part for part in traceback.extract_stack(frame) if "napari_beerlanet" in part.filename]
    last = traceback.extract_stack(frame)[-1]
    inner = " < ".join(f"{Path(p.filename).name}:{p.lineno} {p.name}" for p in stack[:-4:-1])
    return f"{Path(last.filename).name}:{last.lineno} {last.name} in {inner}"


def left_processes() -> list[str]:
    """Processes with the mark of this one, other than it and those around it.

    One that compiles kernels ends with the program, and not with a window.
    """
    return [one for one in marked_processes(os.environ[MARK]) if "compile_kernels" not in one]


def marked_processes(mark: str) -> list[str]:
    """Commands of the processes with a mark, other than this one and those around it."""
    mine = psutil.Process()
    around = {mine.pid, *(parent.pid for parent in mine.parents())}
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.pid in around or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(MARK) == mark:
                found.append(" ".join(process.cmdline())[:120])
    return found


def run_child(name: str, data: Path, times: int, seed: int, leave: bool) -> None:
    """In a process of its own: close so many viewers, or only one, and then end by itself.

    Prints a line of JSON for each.
    """
    chance = random.Random(f"{seed} {name}")
    errors: list[str] = []
    sys.excepthook = lambda kind, error, _: errors.append(f"{kind.__name__}: {error}")
    threading.excepthook = lambda given: errors.append(
        f"{given.exc_type.__name__}: {given.exc_value}"
    )
    if leave:
        _close_and_leave(name, data, chance.uniform(0, _LONGEST_DELAY_S))
        return
    for _ in range(times):
        seen = close_once(name, data, chance.uniform(0, _LONGEST_DELAY_S))
        print(json.dumps(seen | {"errors": errors}), flush=True)
        errors.clear()


def _close_and_leave(name: str, data: Path, delay: float) -> None:
    """As a person: the window is closed, napari's event loop ends, and so does the program."""
    import napari
    from qtpy.QtCore import QTimer

    folder = Path(os.environ["NAPARI_BEERLANET_CONFIG"]).parent
    viewer = _new_viewer()
    running = TASKS[name](Case(viewer, data, folder))

    def close() -> None:
        print(json.dumps({"middle": bool(running()), "closed": time.time()}), flush=True)
        viewer.window._qt_window.close()

    QTimer.singleShot(round(1000 * delay), close)
    napari.run()


# --- the table ------------------------------------------------------------------------------------


def run_task(name: str, binding: str, data: Path, options: argparse.Namespace) -> tuple[str, bool]:
    """A line of the table, and whether all was well."""
    rows: list[dict[str, Any]] = []
    ends: list[float] = []
    bad: list[str] = []
    middle = 0
    mark = f"{os.getpid()} {binding} {name}"
    environment = os.environ | {"QT_API": binding, MARK: mark, "YOLO_OFFLINE": "true"}
    if name != COMPILING:
        environment["NAPARI_BEERLANET_COMPILE"] = "0"
    command = [sys.executable, __file__, "--child", name, "--data", str(data)]
    if options.times:
        chosen = ["--times", str(options.times), "--seed", str(options.seed)]
        code, rows, text = _run([*command, *chosen], environment)
        middle = sum(row["middle"] for row in rows)
        bad += [str(row) for row in rows if row["left"] or row["errors"]]
        if code or len(rows) < options.times:
            bad.append(f"exit {code} after {len(rows)}: {text}")
    for number in range(options.exits):
        seed = str(options.seed + 1 + number)
        code, told, text = _run([*command, "--leave", "--seed", seed], environment)
        ended = time.time()
        left = _wait_for_processes(mark)
        if code or not told or left:
            bad.append(f"exit {code}, left {left}: {text}")
        else:
            ends.append(ended - told[0]["closed"])
            middle += told[0]["middle"]
    slowest = max((row["seconds"] for row in rows), default=0.0)
    line = (
        f"| {name} | {binding} | {len(rows)} of {options.times} | {len(ends)} of {options.exits} "
        f"| {middle} | {slowest:.1f} s | {max(ends, default=0.0):.1f} s | {len(bad)} |"
    )
    slow = sorted({row["where"] for row in rows if row["where"]})
    return "\n".join([line, *(f"    {text}" for text in (*bad, *slow))]), not bad


def _run(command: list[str], environment: dict[str, str]) -> tuple[int, list[dict[str, Any]], str]:
    """The exit code of a child, the lines of JSON that it prints, and the end of its errors."""
    with tempfile.TemporaryDirectory() as folder:
        own = {"NAPARI_BEERLANET_CONFIG": f"{folder}/settings"}
        own |= {"NAPARI_CONFIG": f"{folder}/napari.yaml"}
        done = subprocess.run(
            command, env=environment | own, capture_output=True, text=True, check=False
        )
    told = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
    return done.returncode, told, done.stderr[-1500:]


def _wait_for_processes(mark: str) -> list[str]:
    end = time.monotonic() + _END_TIMEOUT_S
    while (left := marked_processes(mark)) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--exits", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=2, help="tasks at a time")
    parser.add_argument("--binding", nargs="+", default=["pyqt6"], choices=["pyqt6", "pyside6"])
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--data", type=Path, help="folder of the tasks' files, for further calls")
    parser.add_argument("--leave", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.data, options.times, options.seed, options.leave)
        return 0
    began = time.monotonic()
    print(
        "| task | binding | viewers closed | processes ended | in mid-task | thread | exit | bad |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    well = True
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(options.jobs) as pool:
        data = options.data or Path(folder) / "data"
        if not data.exists():
            prepare(data)
        chosen = [(name, binding) for binding in options.binding for name in options.task]
        for line, good in pool.map(lambda one: run_task(*one, data, options), chosen):
            print(line, flush=True)
            well &= good
    print(f"\n{(time.monotonic() - began) / 60:.1f} minutes")
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
