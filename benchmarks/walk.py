"""The whole loop in a real window, as a person would click it: pictures, clicks, longest stalls.

    xvfb-run -a -s "-screen 0 1920x1200x24" python benchmarks/walk.py --out DIR [--size 1280x720]
        [--theme dark|light] [--images FILE ...] [--shared DIR] [--fields 5] [--no-training]
        [--length quick|normal|thorough] [--no-measure]

From an empty napari through the button *Next* to a model that was trained and kept, on a smear of
the packaged sample and on fields of another laboratory. There, the annotations are true ones: on
the first field some boxes are drawn with the mouse, the rest comes from the laboratory's YOLO files
by *Import boxes*. The kept model and the one before are then compared on fields of both
laboratories that nobody has annotated here. Without these data, or with `--images`, detections are
copied.

Every step is a real mouse click or drag, tabs included; what is asked in a file dialog is answered
here, and files are opened without a dialog. Saves a
picture of the window after each step and prints a table, with the longest stall of each step, how
much of it the GUI thread was computing, and what (the innermost function of ours, or of napari's,
is named); the rest of a stall it waited for a processor or for Python's lock. In the
end, layers of napari's own are added in the same window: what of the stalls is not ours.
"""

from __future__ import annotations

import argparse
import faulthandler
import os
import re
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

_STEP_TIMEOUT_S = 1200.0
_TICK_MS = 10
_STALL_S, _SAMPLE_S = 0.1, 0.02  # from which it counts, and how often one is looked at
_WAITING = r'  File ".*/(threading|queue|selectors|subprocess)\.py"'
_SHARED = Path(__file__).resolve().parents[2] / "shared"
PARENT, _SCORES = "blood-cells", ("mAP50", "mAP50-95")
_DRAWN_BOXES = 3
_HELD_OUT = 60


class StallWatch(threading.Thread):
    """Notes what the GUI thread, and all that do not wait, do while it does not answer."""

    def __init__(self, last_tick: Callable[[], float]) -> None:
        super().__init__(daemon=True)
        self._last_tick, self._gui = last_tick, threading.main_thread().ident
        self.seen: dict[float, Counter[str]] = {}  # by the tick that a stall began after

    def run(self) -> None:
        """Look at all stacks again and again.

        Through faulthandler, which holds no frame: a painter in one would be freed too late, and in
        the wrong thread. Where a thread holds Python's lock in one call, this one waits, too, and
        then finds it at the end of that call.
        """
        with tempfile.TemporaryFile("w+") as file:
            while True:
                time.sleep(_SAMPLE_S)
                began = self._last_tick()
                if time.perf_counter() - began > _STALL_S / 2:
                    file.seek(0)
                    file.truncate()
                    faulthandler.dump_traceback(file)
                    file.seek(0)
                    self.seen.setdefault(began, Counter())[self._places(file.read())] += 1

    def _places(self, stacks: str) -> str:
        """Where the GUI thread is, and all others but those that wait for something."""
        gui, others = "", []
        for thread, lines in re.findall(r"hread 0x(\w+) .*\n((?:  .*\n?)+)", stacks):
            if int(thread, 16) == self._gui:
                gui = _place(lines)
            elif not re.match(_WAITING, lines) and int(thread, 16) != self.ident:
                others.append(_place(lines))
        beside = f", beside {'; '.join(sorted(others))}" if others else ""
        return f"{gui}{beside}"

    def reason(self, began: float) -> str:
        """Where most of the samples of a stall were."""
        found = self.seen.get(began, Counter()).most_common(1)
        return found[0][0] if found else "Python's lock was held, as by an import"


def _place(stack: str) -> str:
    """The innermost functions of our package and of another on a stack."""
    ours = theirs = ""
    for path, name in re.findall(r'File "(.*)", line \d+ in (.*)', stack):
        short = path.rpartition("/site-packages/")[2]
        if "/napari_beerlanet/" in path:
            ours = ours or f"{path.rpartition('/napari_beerlanet/')[2]}:{name}"
        elif short != path:
            theirs = theirs or f"{short}:{name}"
    return " ← ".join(filter(None, (theirs, ours))) or "the event loop"


class Walk:
    """A viewer, the workspace in it, and what has been clicked and waited for so far."""

    def __init__(self, out: Path, size: tuple[int, int], theme: str) -> None:
        import napari
        from qtpy.QtCore import QTimer
        from qtpy.QtWidgets import QApplication

        self.out, self.clicks, self.longest, self.stalled_at = out, 0, 0.0, 0.0
        self.computed = 0.0
        self.rows: list[tuple[str, int, float, float, float, str]] = []
        self.notes: list[str] = []
        self.viewer = napari.Viewer()
        self.viewer.theme = theme
        self.viewer.window.resize(*size)
        self.application = QApplication.instance()
        self._last = self._begun = time.perf_counter()
        self._last_cpu = time.thread_time()
        self._timer = QTimer()
        self._timer.setInterval(_TICK_MS)
        self._timer.timeout.connect(self._tick)
        self.stalls = StallWatch(lambda: self._last)
        self.stalls.start()
        self._timer.start()

    def _tick(self) -> None:
        now, cpu = time.perf_counter(), time.thread_time()
        if now - self._last > self.longest:
            self.longest, self.stalled_at = now - self._last, self._last
            self.computed = cpu - self._last_cpu
        self._last, self._last_cpu = now, cpu

    def wait(self, until: Callable[[], object], what: str) -> None:
        """Run the event loop until something is true."""
        end = time.monotonic() + _STEP_TIMEOUT_S
        while not until():
            self.application.processEvents()
            time.sleep(0.002)
            if time.monotonic() > end:
                sys.exit(f"Timed out: {what}.")

    def pause(self, seconds: float) -> None:
        """Let the window draw."""
        end = time.monotonic() + seconds
        self.wait(lambda: time.monotonic() > end, "a pause")

    def click(self, button: object) -> None:
        """Click a button with the mouse."""
        from qtpy.QtCore import Qt
        from qtpy.QtTest import QTest

        self.clicks += 1
        QTest.mouseClick(button, Qt.MouseButton.LeftButton)

    def click_tab(self, workspace: Any, tab: Any) -> Any:
        """Click a tab with the mouse, if it is not in front; returns its panel."""
        from qtpy.QtCore import Qt
        from qtpy.QtTest import QTest

        from napari_beerlanet.ui.workspace.workspace import TABS

        if workspace.current_tab is not tab:
            self.clicks += 1
            bar = workspace.tabs.tabBar()
            place = bar.tabRect(TABS.index(tab)).center()
            QTest.mouseClick(bar, Qt.MouseButton.LeftButton, pos=place)
        self.wait(lambda: workspace.panel(tab) is not None, tab.label)
        return workspace.panel(tab)

    def draw_box(self, box: list[float]) -> None:
        """Draw x1, y1, x2, y2 in image pixels on the canvas, with the mouse."""
        from qtpy.QtCore import QPoint, Qt
        from qtpy.QtTest import QTest

        self.clicks += 1
        camera, size = self.viewer.scene.camera, self.viewer.canvas.size
        (y0, x0), native = camera.center[-2:], self.viewer.window._qt_viewer.canvas.native
        start, end = (
            QPoint(
                round(size[1] / 2 + (x - 0.5 - x0) * camera.zoom),
                round(size[0] / 2 + (y - 0.5 - y0) * camera.zoom),
            )
            for x, y in (box[:2], box[2:])
        )
        QTest.mouseMove(native, start)
        self.pause(0.1)
        QTest.mousePress(native, Qt.MouseButton.LeftButton, pos=start)
        for share in (0.5, 1.0):
            self.pause(0.1)
            QTest.mouseMove(native, start + (end - start) * share)
        self.pause(0.1)
        QTest.mouseRelease(native, Qt.MouseButton.LeftButton, pos=end)
        self.pause(0.3)

    def key(self, letter: str) -> None:
        """Press a key on the canvas."""
        from qtpy.QtTest import QTest

        QTest.keyClicks(self.viewer.window._qt_viewer.canvas.native, letter)

    def picture(self, name: str) -> None:
        """End a step: note what it took and save the window."""
        self.pause(0.8)
        seconds = time.perf_counter() - self._begun
        reason = self.stalls.reason(self.stalled_at) if self.longest > _STALL_S else ""
        self.rows.append((name, self.clicks, seconds, self.longest, self.computed, reason))
        self.viewer.window._qt_window.grab().save(str(self.out / f"{name}.png"))
        self.clicks, self.longest, self.computed = 0, 0.0, 0.0
        self._last = self._begun = time.perf_counter()
        self._last_cpu = time.thread_time()

    def table(self) -> str:
        """What was noted, as text."""
        heads = f"{'step':24}{'clicks':>8}{'seconds':>10}{'longest stall, ms':>20}{'computing':>11}"
        lines = [f"{heads}  in"]
        for name, clicks, seconds, stall, computed, reason in self.rows:
            times = f"{1000 * stall:20.0f}{1000 * computed:11.0f}"
            lines.append(f"{name:24}{clicks:8d}{seconds:10.1f}{times}  {reason}")
        total = sum(row[1] for row in self.rows), sum(row[2] for row in self.rows)
        worst = [1000 * max(row[k] for row in self.rows) for k in (3, 4)]
        last = f"{'all':24}{total[0]:8d}{total[1]:10.1f}{worst[0]:20.0f}{worst[1]:11.0f}"
        return "\n".join([*lines, last])


def loop(
    walk: Walk, images: list[Path], lab: Path | None, fields: int, length: str, measure: bool
) -> None:
    """The steps; without a `length`, nothing is trained."""
    from qtpy.QtWidgets import QFileDialog

    from napari_beerlanet.samples import blood_smear
    from napari_beerlanet.ui.common.session import get_project_store, get_session
    from napari_beerlanet.ui.viewer.layers import is_made_from, role_of
    from napari_beerlanet.ui.workspace.footer import Step
    from napari_beerlanet.ui.workspace.workspace import (
        ANNOTATE,
        BATCH,
        CELLS,
        REVIEW,
        STAINS,
        TRAIN,
        open_workspace,
    )

    viewer = walk.viewer
    walk.picture("napari's window")
    workspace = open_workspace(viewer)  # as napari's menu does
    walk.wait(lambda: workspace.panel(STAINS) is not None, "Stains")
    following = workspace.footer.next_button

    def shown(step: Step) -> None:
        walk.wait(lambda: following.text() == step and following.isEnabled(), f"“{step}”")

    project = Path(tempfile.mkdtemp()) / "our laboratory"
    QFileDialog.getSaveFileName = staticmethod(lambda *_, **__: (str(project), ""))
    walk.picture("empty")
    viewer.open_sample("napari-beerlanet", "bccd")
    shown(Step.FIND)
    walk.picture("opened")
    stains = walk.click_tab(workspace, STAINS)
    walk.click(stains.run_button)
    walk.wait(lambda: stains.live.idle and stains.fitted is not None, "the stains")
    walk.picture("stains")

    def annotate_image(name: str) -> None:
        shown(Step.FIND)
        walk.click(following)
        shown(Step.CORRECT)
        walk.picture(f"{name}-cells")
        walk.click(following)
        add_image(name)

    def annotate_truth(image: Path, labels: Path, drawn: int) -> None:
        """With the laboratory's own boxes, some of them drawn by hand."""
        viewer.open(image)
        shown(Step.FIND)
        panel = walk.click_tab(workspace, ANNOTATE)
        if drawn:
            walk.click(panel.annotate)
            walk.wait(lambda: panel.annotation_actions.annotated is not None, "the annotations")
        height, width = workspace.image.layer.data.shape[:2]
        for label, x, y, w, h in _read_yolo(labels)[-drawn:] if drawn else []:
            corners = [(x - w / 2) * width, (y - h / 2) * height]
            corners += [(x + w / 2) * width, (y + h / 2) * height]
            walk.key(str(int(label) + 1))
            walk.draw_box(corners)
        if drawn:
            walk.picture(f"{image.stem[:8]}-drawn")
        QFileDialog.getOpenFileName = staticmethod(lambda *_, **__: (str(labels), ""))
        walk.click(panel.import_boxes)
        walk.wait(lambda: panel.annotation_actions.annotated is not None, "the annotations")
        boxes = panel.annotation_actions.annotated.boxes
        count = len(_read_yolo(labels))
        walk.wait(lambda: sum(boxes.counts().values()) >= count, f"{count} boxes")
        add_image(image.stem[:8])

    def add_image(name: str) -> None:
        shown(Step.ADD)
        walk.click(following)
        panel = workspace.panel(ANNOTATE)
        store = get_project_store(viewer)
        walk.wait(
            lambda: (
                store.project is not None
                and (not panel.add_question.isHidden() or following.text() == Step.TRAIN)
            ),
            "the project",
        )
        if not panel.add_question.isHidden():
            walk.picture(f"{name}-question")
            walk.click(panel.add_question.buttons[0])
        shown(Step.TRAIN)
        walk.picture(f"{name}-annotate")
        image = workspace.image.layer
        made = [layer for layer in viewer.layers if is_made_from(layer, image)]
        texts = [f"{role_of(layer)}{'' if layer.visible else ' (hidden)'}" for layer in made]
        walk.notes.append(f"{name}: {len(made)} layers beside the image: {', '.join(texts)}")

    annotate_image("first")
    if lab is not None and not images:
        for place, image in enumerate(_fields(lab)[:fields]):
            labels = lab / "labels" / f"{image.stem}.txt"
            annotate_truth(image, labels, 0 if place else _DRAWN_BOXES)
    elif images:
        for path in images:
            viewer.open(path)
            annotate_image(path.stem)
    else:
        viewer.add_image(blood_smear((480, 640), lab=5, shift=1).image, name="other laboratory")
        annotate_image("second")
    review = walk.click_tab(workspace, REVIEW)
    walk.picture("review")
    review.tabs.setCurrentIndex(1)
    walk.picture("review-gallery")
    walk.click_tab(workspace, BATCH)
    walk.picture("batch")
    plain_layers(walk)
    if not length:
        return
    shown(Step.TRAIN)
    walk.click(following)
    walk.wait(lambda: workspace.panel(TRAIN) is not None, "Train")
    train = workspace.panel(TRAIN)
    train.form.length.value = length
    shown(Step.START)
    walk.picture("train")
    walk.click(following)
    walk.wait(lambda: train.run_view.running, "the start")
    walk.pause(20)
    walk.picture("training")
    walk.wait(lambda: train.comparison.folder is not None and not train.run_view.running, "the end")
    walk.wait(train.comparison.keep_button.isEnabled, "Keep")
    walk.picture("trained")
    walk.click(train.comparison.keep_button)
    walk.wait(lambda: "blood-cells" not in str(get_session(viewer).model_key), "the kept model")
    walk.picture("kept")
    workspace.show_tab(CELLS)  # where the new model's card is; no step of the way
    walk.picture("kept-cells")
    if lab is not None and not images and measure:
        walk.notes.append(_compare(str(get_session(viewer).model_key), lab, fields))


def plain_layers(walk: Walk) -> None:
    """Layers of napari's without anything of ours, in the same window, for comparison."""
    viewer = walk.viewer
    made = viewer.add_image(np.zeros((480, 640, 3), np.uint8), name="plain image")
    walk.picture("napari's image")
    viewer.layers.remove(made)
    made = viewer.add_image(np.zeros((480, 640), np.float32), name="plain grey", colormap="blue")
    walk.picture("napari's grey image")
    viewer.layers.remove(made)
    corners = np.array([[0, 0], [0, 20], [20, 20], [20, 0]], np.float32)
    boxes = [corners + 25 * k for k in range(15)]
    made = viewer.add_shapes(boxes, name="plain shapes", face_color="transparent")
    walk.picture("napari's shapes")
    viewer.layers.remove(made)
    walk.picture("napari's removal")


def _fields(lab: Path) -> list[Path]:
    """The laboratory's images, in an order that is always the same."""
    images = sorted((lab / "images").iterdir())
    order = np.random.default_rng(8).permutation(len(images))
    return [images[k] for k in order]


def _read_yolo(path: Path) -> list[tuple[float, ...]]:
    """Class, x, y, width and height of each box."""
    return [tuple(map(float, line.split())) for line in path.read_text().splitlines() if line]


def _compare(kept: str, lab: Path, fields: int) -> str:
    """mAP of the kept model and of the one before, on images that neither was trained on here."""
    from smears import write_bccd, write_other_lab

    import napari_beerlanet as nb
    from napari_beerlanet.core.formats.dataset import Dataset, read_dataset

    folder = Path(tempfile.mkdtemp())
    other = read_dataset(write_other_lab(lab.parents[1], folder / "other"))
    held = {path.name for path in _fields(lab)[fields : fields + _HELD_OUT]}
    chosen = [item for item in other.splits["val"] if item.image.name in held]
    bccd = read_dataset(write_bccd(lab.parents[1], folder / "bccd"))
    sets = {
        "other laboratory": Dataset(other.path, other.names, {"test": chosen}),
        "BCCD": Dataset(bccd.path, bccd.names, {"test": bccd.splits["test"][:_HELD_OUT]}),
    }
    lines = []
    for name, data in sets.items():
        before, after = (nb.evaluate(nb.load_checkpoint(m), data, "test") for m in (PARENT, kept))
        texts = [f"{key} {100 * before[key]:.1f} → {100 * after[key]:.1f}" for key in _SCORES]
        lines.append(f"{name}, {len(data.splits['test'])} images: {', '.join(texts)}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--theme", default="dark", choices=["dark", "light"])
    parser.add_argument("--images", type=Path, nargs="*", default=[])
    parser.add_argument("--shared", type=Path, default=_SHARED)
    parser.add_argument("--fields", type=int, default=5, help="of the other laboratory")
    parser.add_argument("--no-training", action="store_true")
    parser.add_argument("--length", default="normal", choices=["quick", "normal", "thorough"])
    parser.add_argument("--no-measure", action="store_true", help="of the kept model")
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    width, height = map(int, options.size.split("x"))
    own = tempfile.mkdtemp()
    os.environ |= {
        "NAPARI_BEERLANET_CONFIG": f"{own}/settings",
        "NAPARI_CONFIG": f"{own}/napari.yaml",
        "YOLO_CONFIG_DIR": f"{own}/yolo",
        "YOLO_OFFLINE": "true",
    }
    import napari_beerlanet.samples  # noqa: F401  it is this script that needs it so early

    walk = Walk(options.out, (width, height), options.theme)
    lab = options.shared / "data" / "other-lab"
    lab = lab if lab.is_dir() else None
    length = "" if options.no_training else options.length
    loop(walk, options.images, lab, options.fields, length, not options.no_measure)
    print(walk.table(), *walk.notes, sep="\n")
    walk.viewer.close()


if __name__ == "__main__":
    main()
