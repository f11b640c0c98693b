"""Close napari in the middle of every long task: nothing may crash, hang or be left behind.

    xvfb-run -a -s "-screen 0 1400x900x24" python benchmarks/closing.py [--times 20] [--exits 3]
        [--binding pyqt6 pyside6] [--task NAME ...] [--seed S]

Of each task, with each binding of Qt: `--times` viewers are opened and closed one after the other
in one process, each at a random moment of the task; then as many processes as `--exits` says are
ended by closing their window. The table has how many ended well, how long the last thread or the
process outlived the window, and what was left. The exit status is 1 if anything was.

Runs in processes of their own (training, folders, benchmarks) are answered with *Stop* when the
window asks what shall become of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests"))

PLUGIN = "napari-beerlanet"
_MARK = "BEERLANET_CLOSING"
_START_TIMEOUT_S = 600.0
_END_TIMEOUT_S = 120.0
_LONGEST_DELAY_S = 1.5  # after the start of the task; it is under way by then, and not done


class Case:
    """A viewer in which a task is to be started, a folder for its files, and patience."""

    def __init__(self, viewer: Any, folder: Path) -> None:
        self.viewer, self.folder = viewer, folder

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
        """A panel in the window."""
        return self.viewer.window.add_plugin_dock_widget(PLUGIN, name, tabify=True)[1]

    def image(self, side: int = 1200, name: str = "smear") -> Any:
        """A layer with a synthetic smear."""
        from napari_beerlanet.samples import blood_smear

        return self.viewer.add_image(blood_smear((side, side), seed=5).image, name=name)

    def slide(self, side: int = 1500) -> Any:
        """A layer with a file that is taken for a slide."""
        import tifffile

        from napari_beerlanet.samples import blood_smear
        from napari_beerlanet.ui.detect import slide_search
        from napari_beerlanet.ui.viewer import planes

        for module in (planes, slide_search):
            for limit in ("SLIDE_PIXELS", "SLIDE_PIXELS_LAZY"):
                if hasattr(module, limit):
                    setattr(module, limit, 1000)
        path = self.folder / "slide.svs"
        image = blood_smear((side, side), seed=6).image
        tifffile.imwrite(path, image, photometric="rgb", tile=(256, 256))
        return self.viewer.open(path, plugin=PLUGIN)[0]


Running = Callable[[], bool]


def decompose(case: Case) -> Running:
    """Stains of an image."""
    case.image()
    panel = case.panel("Stain decomposition")
    case.wait(panel.run_button.isEnabled)
    panel.run()
    return lambda: not panel.live.idle


def decompose_slide(case: Case) -> Running:
    """Stains of a slide, from all its pixels."""
    case.slide()
    panel = case.panel("Stain decomposition")
    case.wait(panel.run_button.isEnabled)
    panel.run()
    return lambda: not panel.live.idle


def find_cells(case: Case) -> Running:
    """Cells of an image."""
    case.image()
    panel = case.panel("Find cells")
    case.wait(panel.run_button.isEnabled)
    panel.run()
    return lambda: panel.detect_task.running


def find_cells_on_slide(case: Case) -> Running:
    """Cells of a slide, tile by tile."""
    case.slide()
    panel = case.panel("Find cells")
    case.wait(panel.run_button.isEnabled)
    panel.form.set_measured_size(40)
    panel.run()
    return lambda: bool(panel.slide.running)


def classify_cells(case: Case) -> Running:
    """Types of many cells."""
    from napari_beerlanet.core.boxes.detections import Detections
    from napari_beerlanet.ui.common.session import get_session
    from reviews import detected_image
    from tinyclasses import tiny_classifier

    corner = np.random.default_rng(0).uniform(0, 1100, (3000, 2))
    boxes = np.hstack([corner, corner + 40])
    found = Detections(boxes, np.zeros(3000, int), np.linspace(1, 0.3, 3000), ["RBC"])
    from napari_beerlanet.samples import blood_smear

    detected_image(case.viewer, "smear", found, blood_smear((1200, 1200), seed=5).image)
    get_session(case.viewer).set_classifier(tiny_classifier("shufflenet_v2_x0_5"), "tiny")
    panel = case.panel("Classify cells")
    case.wait(panel.run_button.isEnabled)
    panel.run()
    return lambda: panel.classify_task.running


def classify_patches(case: Case) -> Running:
    """Patches of a slide."""
    from napari_beerlanet.ui.common.session import get_session
    from tinyclasses import tiny_classifier

    case.slide()
    get_session(case.viewer).set_classifier(tiny_classifier("shufflenet_v2_x0_5"), "tiny")
    section = case.panel("Classify cells").patches
    section.header.setChecked(True)
    section.patch_size.setValue(24)
    case.wait(section.run_button.isEnabled)
    section.run_button.click()
    return lambda: section.patch_task.running


def compare_normalizations(case: Case) -> Running:
    """An image by every method that needs no training."""
    from napari_beerlanet.ui.viewer.layers import show_in_place_of_others

    case.image(300, "reference")
    source = case.image()
    panel = case.panel("Compare normalizations")
    show_in_place_of_others(case.viewer, source)
    for name, box in panel.methods.boxes.items():
        box.setChecked(name in ("reinhard", "macenko", "vahadane", "beerlanet"))
    case.wait(panel.run_button.isEnabled)
    panel.run()
    return lambda: panel.compare_task.running


def add_to_project(case: Case) -> Running:
    """Crops of an annotated image are written."""
    from napari_beerlanet.core.project.project import Project
    from projects import NAMES

    case.image()
    panel = case.panel("Annotate")
    path = case.folder / f"project {time.monotonic_ns()}"
    Project.create(path, NAMES).close()
    panel.project.open(path)
    case.wait(lambda: panel.store.project is not None)
    actions_of_panel = panel.annotation_actions
    case.wait(panel.annotate.isEnabled)
    panel.annotate.click()
    case.wait(lambda: actions_of_panel.annotated is not None)
    layer = actions_of_panel.annotated.boxes.layer
    corner = np.random.default_rng(0).uniform(0, 1100, (60, 2))
    layer.add([np.array([c, c + 40]) for c in corner], shape_type="rectangle")
    actions_of_panel.mark_whole_image()
    actions_of_panel.add_to_project("use")
    return lambda: actions_of_panel.project_task.running


def write_report(case: Case) -> Running:
    """A report from the review."""
    from napari_beerlanet.samples import blood_smear
    from reviews import open_panel

    picture = blood_smear((1200, 1200), seed=5).image
    _, panel, _ = open_panel(case.viewer, case.wait, picture=picture)
    panel.export.write_report(case.folder / "report.html")
    return lambda: panel.export.task.running


def load_model(case: Case) -> Running:
    """The packaged model is loaded."""
    case.image(300)
    panel = case.panel("Find cells")
    return lambda: panel.model.task.running


def _stop_when_asked(confirmation: Any) -> None:
    confirmation.ask = lambda: "stop"


def run_on_folder(case: Case) -> Running:
    """Many images in a process of its own."""
    from PIL import Image

    from napari_beerlanet.samples import blood_smear

    folder = case.folder / "images"
    folder.mkdir(exist_ok=True)
    for seed in range(8):
        Image.fromarray(blood_smear((300, 400), seed=seed).image).save(folder / f"{seed}.png")
    panel = case.panel("Run on folder")
    _stop_when_asked(panel.close_confirmation)
    panel.form.set_settings({"model": "", "iterations": 2, "previews": False, "leave_out": ()})
    panel.inputs.set_inputs([str(folder)], case.folder / f"out {time.monotonic_ns()}")
    case.wait(panel.run_button.isEnabled)
    panel.run()
    case.wait(lambda: panel.progress.running, "the batch")
    return lambda: panel.progress.running


def train(case: Case) -> Running:
    """A training in a process of its own."""
    from napari_beerlanet.core.checkpoints.serialize import describe_network
    from napari_beerlanet.core.detection.detector import Detector
    from napari_beerlanet.core.detection.network import StainDetectionModel
    from napari_beerlanet.core.project.project import Project
    from napari_beerlanet.ui.common.session import get_session
    from projects import NAMES, fill
    from tinydata import MODEL

    path = case.folder / f"project {time.monotonic_ns()}"
    with Project.create(path, NAMES) as project:
        fill(project, [1, 2, 3], 64)
    network = StainDetectionModel(MODEL, nc=3, imgsz=64)
    network.fit_mix()
    model = Detector(network, describe_network(network, "tiny", list(NAMES), 64))
    get_session(case.viewer).set_model(model, "tiny")
    annotate = case.panel("Annotate")
    annotate.project.open(path)
    case.wait(lambda: annotate.store.project is not None, "the project")
    panel = case.panel("Fine-tune")
    _stop_when_asked(panel.close_confirmation)
    case.wait(panel.start_button.isEnabled, "the start button")
    panel.start()
    case.wait(lambda: panel.run_view.running, "the training")
    return lambda: panel.run_view.running


TASKS: dict[str, Callable[[Case], Running]] = {
    "decompose an image": decompose,
    "decompose a slide": decompose_slide,
    "find cells": find_cells,
    "find cells on a slide": find_cells_on_slide,
    "classify cells": classify_cells,
    "classify patches": classify_patches,
    "compare normalizations": compare_normalizations,
    "add to project": add_to_project,
    "write a report": write_report,
    "load a model": load_model,
    "run on folder": run_on_folder,
    "train": train,
}


# --- in a process that goes on --------------------------------------------------------------------


def close_once(task: str, folder: Path, delay: float) -> dict[str, Any]:
    """Open a viewer, start a task, close it after a while; what was seen."""
    import napari

    viewer = napari.Viewer(show=True)
    case = Case(viewer, folder)
    running = TASKS[task](case)
    until = time.monotonic() + delay
    case.wait(lambda: time.monotonic() > until or not running())
    in_the_middle = bool(running())
    viewer.close()
    closed = time.monotonic()
    left = wait_for_the_end()
    return {"middle": in_the_middle, "seconds": time.monotonic() - closed, "left": left}


def wait_for_the_end() -> list[str]:
    """Until no thread of a task and no process of ours is left; those that stay, by name."""
    from qtpy.QtWidgets import QApplication

    end = time.monotonic() + _END_TIMEOUT_S
    while (left := [*left_threads(), *left_processes()]) and time.monotonic() < end:
        QApplication.processEvents()
        time.sleep(0.005)
    return left


def left_threads() -> list[str]:
    """Threads of tasks that have not ended."""
    from napari_beerlanet.ui.common.notifications import WORKER_THREAD_NAME

    return [t.name for t in threading.enumerate() if t.name == WORKER_THREAD_NAME]


def left_processes() -> list[str]:
    """Processes that carry our mark, other than this one and those around it."""
    mark, mine = os.environ[_MARK], psutil.Process()
    around = {mine.pid, *(parent.pid for parent in mine.parents())}
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid in around or process.status() == psutil.STATUS_ZOMBIE:
                continue
            if process.environ().get(_MARK) == mark:
                found.append(" ".join(process.cmdline())[:120])
        except psutil.Error:
            continue
    return found


def run_child(task: str, times: int, seed: int, leave: bool) -> None:
    """In a process of its own: close so many viewers, or only one, and then end by itself.

    Prints a line of JSON for each.
    """
    chance = random.Random(f"{seed} {task}")
    errors: list[str] = []
    sys.excepthook = lambda kind, error, _: errors.append(f"{kind.__name__}: {error}")
    threading.excepthook = lambda given: errors.append(
        f"{given.exc_type.__name__}: {given.exc_value}"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.environ["NAPARI_BEERLANET_CONFIG"] = f"{folder}/settings"
        if leave:
            _close_and_leave(task, Path(folder), chance.uniform(0, _LONGEST_DELAY_S))
            return
        for _ in range(times):
            seen = close_once(task, Path(folder), chance.uniform(0, _LONGEST_DELAY_S))
            print(json.dumps(seen | {"errors": errors}), flush=True)
            errors.clear()


def _close_and_leave(task: str, folder: Path, delay: float) -> None:
    """As a person: the window is closed, napari's event loop ends, and so does the program."""
    import napari
    from qtpy.QtCore import QTimer

    viewer = napari.Viewer(show=True)
    running = TASKS[task](Case(viewer, folder))

    def close() -> None:
        print(json.dumps({"middle": bool(running()), "closed": time.time()}), flush=True)
        viewer.close()

    QTimer.singleShot(round(1000 * delay), close)
    napari.run()


# --- the table ------------------------------------------------------------------------------------


def run_task(task: str, binding: str, options: argparse.Namespace) -> tuple[str, bool]:
    """A line of the table, and whether all was well."""
    rows, bad = [], []
    with tempfile.TemporaryDirectory() as config:
        environment = os.environ | {"QT_API": binding, _MARK: f"{os.getpid()} {binding} {task}"}
        environment |= {"NAPARI_CONFIG": f"{config}/napari.yaml", "YOLO_OFFLINE": "true"}
        command = [sys.executable, __file__, "--child", task, "--seed", str(options.seed)]
        if options.times:
            done = _run([*command, "--times", str(options.times)], environment)
            rows = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
            bad += [str(row) for row in rows if row["left"] or row["errors"]]
            if done.returncode or len(rows) < options.times:
                bad.append(f"exit {done.returncode} after {len(rows)}: {done.stderr[-600:]}")
        ends, middle = [], sum(row["middle"] for row in rows)
        for number in range(options.exits):
            seed = str(options.seed + 1 + number)
            done = _run([*command[:-1], seed, "--leave"], environment)
            ended = time.time()
            told = [json.loads(line) for line in done.stdout.splitlines() if line[:1] == "{"]
            os.environ[_MARK] = environment[_MARK]
            left = _wait_for_processes()
            if done.returncode or not told or left:
                bad.append(f"exit {done.returncode}, left {left}: {done.stderr[-600:]}")
            else:
                ends.append(ended - told[0]["closed"])
                middle += told[0]["middle"]
    slowest = max((row["seconds"] for row in rows), default=0.0)
    line = (
        f"| {task} | {binding} | {len(rows)} of {options.times} | {len(ends)} of {options.exits} "
        f"| {middle} | {slowest:.1f} s | {max(ends, default=0.0):.1f} s | {len(bad)} |"
    )
    return "\n".join([line, *(f"    {text}" for text in bad)]), not bad


def _run(command: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


def _wait_for_processes() -> list[str]:
    end = time.monotonic() + _END_TIMEOUT_S
    while (left := left_processes()) and time.monotonic() < end:
        time.sleep(0.1)
    return left


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--times", type=int, default=20)
    parser.add_argument("--exits", type=int, default=3)
    parser.add_argument("--binding", nargs="+", default=["pyqt6", "pyside6"])
    parser.add_argument("--task", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--leave", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_child(options.child, options.times, options.seed, options.leave)
        return 0
    print(
        "| task | binding | viewers closed | processes ended | in mid-task | thread | exit | bad |"
    )
    print("|---|---|---|---|---|---|---|---|", flush=True)
    well = True
    for binding in options.binding:
        for task in options.task:
            line, good = run_task(task, binding, options)
            print(line, flush=True)
            well &= good
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
