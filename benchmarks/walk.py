"""The whole loop in a real window, as a person would click it: pictures, clicks, longest stalls.

    xvfb-run -a -s "-screen 0 1920x1200x24" python benchmarks/walk.py --out DIR [--size 1280x720]
        [--theme dark|light] [--images FILE ...] [--no-training]

From an empty napari through the button *Next* to a model that was trained and kept, on a smear of
the packaged sample and on the images that are named (by default a synthetic field of another
laboratory). Every step is a real mouse click; what is asked in a file dialog is answered here.
Saves a picture of the window after each step and prints a table.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

_STEP_TIMEOUT_S = 1200.0
_TICK_MS = 10


class Walk:
    """A viewer, the workspace in it, and what has been clicked and waited for so far."""

    def __init__(self, out: Path, size: tuple[int, int], theme: str) -> None:
        import napari
        from qtpy.QtCore import QTimer
        from qtpy.QtWidgets import QApplication

        self.out, self.clicks, self.longest = out, 0, 0.0
        self.rows: list[tuple[str, int, float, float]] = []
        self.viewer = napari.Viewer()
        self.viewer.theme = theme
        self.viewer.window.resize(*size)
        self.application = QApplication.instance()
        self._last = self._begun = time.perf_counter()
        self._timer = QTimer()
        self._timer.setInterval(_TICK_MS)
        self._timer.timeout.connect(self._tick)
        self._timer.start()

    def _tick(self) -> None:
        now = time.perf_counter()
        self.longest, self._last = max(self.longest, now - self._last), now

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

    def picture(self, name: str) -> None:
        """End a step: note what it took and save the window."""
        self.pause(0.8)
        seconds = time.perf_counter() - self._begun
        self.rows.append((name, self.clicks, seconds, self.longest))
        self.viewer.window._qt_window.grab().save(str(self.out / f"{name}.png"))
        self.clicks, self.longest = 0, 0.0
        self._last = self._begun = time.perf_counter()

    def table(self) -> str:
        """What was noted, as text."""
        lines = [f"{'step':24}{'clicks':>8}{'seconds':>10}{'longest stall, ms':>20}"]
        lines += [f"{n:24}{c:8d}{s:10.1f}{1000 * stall:20.0f}" for n, c, s, stall in self.rows]
        total = sum(row[1] for row in self.rows), sum(row[2] for row in self.rows)
        worst = max(row[3] for row in self.rows)
        return "\n".join([*lines, f"{'all':24}{total[0]:8d}{total[1]:10.1f}{1000 * worst:20.0f}"])


def loop(walk: Walk, images: list[Path], training: bool) -> None:
    """The steps."""
    from qtpy.QtWidgets import QFileDialog

    from napari_beerlanet.samples import blood_smear
    from napari_beerlanet.ui.common.session import get_project_store, get_session
    from napari_beerlanet.ui.workspace.footer import Step
    from napari_beerlanet.ui.workspace.workspace import (
        ANNOTATE,
        BATCH,
        REVIEW,
        STAINS,
        TRAIN,
        open_workspace,
    )

    viewer = walk.viewer
    workspace = open_workspace(viewer, STAINS)
    following = workspace.footer.next_button

    def shown(step: Step) -> None:
        walk.wait(lambda: following.text() == step and following.isEnabled(), f"“{step}”")

    project = Path(tempfile.mkdtemp()) / "our laboratory"
    QFileDialog.getSaveFileName = staticmethod(lambda *_, **__: (str(project), ""))
    walk.picture("empty")
    viewer.open_sample("napari-beerlanet", "bccd")
    shown(Step.FIND)
    walk.picture("opened")
    stains = workspace.open_tab(STAINS)
    walk.click(stains.run_button)
    walk.wait(lambda: stains.live.idle and stains.fitted is not None, "the stains")
    walk.picture("stains")

    def annotate_image(name: str) -> None:
        shown(Step.FIND)
        walk.click(following)
        shown(Step.CORRECT)
        walk.picture(f"{name}-cells")
        walk.click(following)
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

    annotate_image("first")
    if images:
        for path in images:
            viewer.open(path)
            annotate_image(path.stem)
    else:
        viewer.add_image(blood_smear((480, 640), lab=5, shift=1).image, name="other laboratory")
        annotate_image("second")
    review = workspace.open_tab(REVIEW)
    walk.picture("review")
    review.tabs.setCurrentIndex(1)
    walk.picture("review-gallery")
    workspace.open_tab(BATCH)
    walk.picture("batch")
    if not training:
        return
    workspace.open_tab(TRAIN)
    train = workspace.panel(TRAIN)
    walk.wait(train.start_button.isEnabled, "the project")
    train.form.length.value = "quick"
    walk.picture("train")
    walk.click(train.start_button)
    walk.wait(lambda: train.run_view.running, "the start")
    walk.pause(20)
    walk.picture("training")
    walk.wait(lambda: train.comparison.folder is not None and not train.run_view.running, "the end")
    walk.wait(train.comparison.keep_button.isEnabled, "Keep")
    walk.picture("trained")
    walk.click(train.comparison.keep_button)
    walk.wait(lambda: "blood-cells" not in str(get_session(viewer).model_key), "the kept model")
    walk.picture("kept")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--size", default="1280x720")
    parser.add_argument("--theme", default="dark", choices=["dark", "light"])
    parser.add_argument("--images", type=Path, nargs="*", default=[])
    parser.add_argument("--no-training", action="store_true")
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
    walk = Walk(options.out, (width, height), options.theme)
    loop(walk, options.images, not options.no_training)
    print(walk.table())
    walk.viewer.close()


if __name__ == "__main__":
    main()
