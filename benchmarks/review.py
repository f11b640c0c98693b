"""How smoothly a hundred thousand detections are reviewed: each step of a user, in a window.

    xvfb-run -a -s "-screen 0 1400x900x24" python benchmarks/review.py [--count 100000]

For each step: the GUI thread's work until everything follows, and the longest stall, in which the
window did not answer (the largest gap between ticks of a 5 ms timer). Both are processor time of
the GUI thread, the median of several; the last column is the shortest that the longest stall was
by the clock, which includes waiting for other programs. The image is made up.
"""

import argparse
import gc
import os
import tempfile
import time

os.environ.setdefault("LIBGL_ALWAYS_SOFTWARE", "1")

import napari
import numpy as np
from qtpy.QtCore import QEvent, QEventLoop, QTimer
from qtpy.QtWidgets import QApplication

from napari_beerlanet.core.boxes.classes import class_colours
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.review.widget import ReviewWidget
from napari_beerlanet.ui.viewer.box_shapes import corners_from_boxes

NAMES = ["RBC", "WBC", "Platelets"]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=100_000, help="detections")
    parser.add_argument("--annotations", type=int, default=5_000, help="drawn boxes")
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as own:
        os.environ["NAPARI_BEERLANET_CONFIG"] = own
        rows = measure(options)
    print(f"{options.count:,} detections, {options.annotations:,} annotations\n")
    print("| | work | longest stall | by the clock |\n|---|---|---|---|")
    for name, *values in rows:
        print(f"| {name} | " + " | ".join(f"{1e3 * value:.0f} ms" for value in values) + " |")


def made(count, seed=0):
    """An image and that many detections of it, of which nine of ten are sure."""
    rng = np.random.default_rng(seed)
    side = int(np.ceil(np.sqrt(count))) * 24
    low = np.stack(np.meshgrid(*[np.arange(0, side, 24)] * 2), -1).reshape(-1, 2)[:count]
    low = low + rng.uniform(0, 4, low.shape)
    boxes = np.concatenate([low, low + rng.uniform(12, 20, low.shape)], 1)
    columns = {f"OD {k} mean": rng.gamma(2, 0.2, count).astype(np.float32) for k in (1, 2, 3)}
    labels = rng.choice(3, count, p=[0.9, 0.02, 0.08])
    scores = np.where(rng.random(count) < 0.9, rng.uniform(0.5, 1, count), rng.uniform(0.01, 0.5))
    image = np.full((side, side, 3), 235, np.uint8)
    image[::7] = (200, 160, 190)
    return image, Detections(boxes, labels, scores, NAMES, columns, image.shape[:2])


class Watch:
    """Runs an action and the event loop until a condition holds; notes work and stall.

    `stolen`: processor time, of all cores together, that the host of a virtual machine has given to
    others during the stall that was the longest by the clock; 0 where nothing says so. `collected`:
    the longest collection of Python's garbage, which goes through all that napari and torch are of.
    """

    def __init__(self):
        self.timer = QTimer()
        self.timer.setInterval(5)
        self.timer.timeout.connect(self._tick)
        self.last = self.longest = np.zeros(2)
        self.stolen = self._stolen_before = 0.0
        self.collected = self._collecting_since = 0.0
        gc.callbacks.append(self._note_collection)

    def _note_collection(self, phase, info):
        if phase == "start":
            self._collecting_since = time.perf_counter()
        else:
            self.collected = max(self.collected, time.perf_counter() - self._collecting_since)

    def _tick(self):
        now = np.array([time.thread_time(), time.perf_counter()])
        stall, stolen = now - self.last, stolen_time()
        if stall[1] > self.longest[1]:
            self.stolen = stolen - self._stolen_before
        self.longest, self.last = np.maximum(self.longest, stall), now
        self._stolen_before = stolen

    def run(self, action, until=lambda: True, settle=0.3, limit=60):
        """Seconds of the GUI thread's work, and the longest stall in its time and by the clock."""
        spin(0.1)
        self.last = np.array([time.thread_time(), time.perf_counter()])
        self.longest = np.zeros(2)
        self.stolen, self._stolen_before = 0.0, stolen_time()
        self.collected = 0.0
        self.timer.start()
        before = time.thread_time()
        action()
        end = time.perf_counter() + limit
        while not until():
            if time.perf_counter() > end:
                raise TimeoutError("the panel does not follow")
            spin(0.02)
        spin(settle)
        self._tick()
        self.timer.stop()
        return np.array([time.thread_time() - before, *self.longest])


def stolen_time():
    """Seconds that the host of a virtual machine has given to others, of all cores together."""
    try:
        with open("/proc/stat") as file:
            return float(file.readline().split()[8]) / os.sysconf("SC_CLK_TCK")
    except (OSError, IndexError, ValueError):
        return 0.0


def spin(seconds):
    """Let the event loop run for a while."""
    loop = QEventLoop()
    QTimer.singleShot(int(1e3 * seconds), loop.quit)
    loop.exec()
    QApplication.sendPostedEvents(None, QEvent.Type.DeferredDelete)


def measure(options):
    viewer = napari.Viewer()
    watch = Watch()
    image, found = made(options.count)
    source = viewer.add_image(image, name="slide")
    found = found.above(0.25)
    shower = DetectionLayer(viewer, source, found, class_colours(3))
    get_session(viewer).set_detections(source, found, shower)
    spin(1)
    panel = None
    rows = []

    def note(name, actions, until=lambda: True):
        measured = np.array([watch.run(action, until) for action in actions])
        typical = [*np.median(measured[:, :2], axis=0), measured[:, 2].min()]
        rows.append((name, *typical))
        print(name, *(f"{1e3 * value:.0f} ms" for value in typical), sep="  ", flush=True)

    def open_panel():
        nonlocal panel
        panel = ReviewWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Review")

    note("open the panel", [open_panel], lambda: panel and panel.autosave.path and len(panel.rows))
    steps = range(options.repeats)
    note(
        "confidence slider",
        [lambda k=k: panel.filter.confidence.setValue((0.5 + k / 50, 1.0)) for k in steps],
    )
    note("one class", [lambda k=k: panel.filter.classes.setCurrentIndex(k % 3 + 1) for k in steps])
    panel.filter.classes.setCurrentIndex(0)
    note(
        "density range",
        [lambda k=k: panel.filter.set_range("OD 1 mean", 0.2 + k / 50, 0.8) for k in steps],
    )
    note("text", [lambda k=k: panel.filter.text.setText("RBC"[: k % 3 + 1]) for k in steps])
    panel.filter.clear()
    spin(0.5)
    note("order", [lambda k=k: panel.filter.order.setCurrentIndex(k % 6) for k in range(6)])
    note("sort by a heading", [lambda k=k: panel.table._sort(4 + k % 3) for k in steps])
    note("next", [panel.next for _ in steps])
    note("accept", [panel.accept for _ in steps])
    note("undo", [panel.undo for _ in steps])
    note(
        "select all rows and reject",
        [
            lambda: (panel.table.selectAll(), panel.reject()),
        ],
    )
    note("undo that", [panel.undo])
    note("open the gallery", [lambda: panel.tabs.setCurrentIndex(1)])
    bar = panel.gallery.verticalScrollBar()
    spin(1)
    note(
        "scroll the gallery",
        [lambda k=k: bar.setValue((k + 1) * bar.maximum() // 7) for k in steps],
    )
    note(
        "gallery, another filter",
        [lambda k=k: panel.filter.confidence.setValue((0.3 + k / 50, 1.0)) for k in steps],
    )
    note(
        "select all in the gallery and reject",
        [lambda: (panel.gallery.selectAll(), panel.reject())],
    )
    note("undo that", [panel.undo])
    note("open the histogram", [lambda: panel.tabs.setCurrentIndex(2)])
    note("brush", [lambda k=k: panel.histogram.range.setRegion((0.3, 0.9 - k / 50)) for k in steps])
    panel.filter.clear()
    panel.tabs.setCurrentIndex(0)
    spin(0.5)
    some = np.random.default_rng(1).choice(len(panel.review), options.annotations, replace=False)
    names = np.array(NAMES, object)[panel.review.detections.labels[some]]
    viewer.add_shapes(
        list(corners_from_boxes(panel.review.detections.xyxy[some])),
        shape_type="rectangle",
        name="truth",
        features={"class": names},
    )
    spin(1)
    panel.tabs.setCurrentIndex(3)
    truth = panel.annotation_tab.metrics.annotation_choice
    note(
        "compare with annotations",
        [lambda: truth.setCurrentText("truth")],
        lambda: panel.annotation_tab.metrics.matches is not None,
    )
    note(
        "confidence slider, compared",
        [lambda k=k: panel.filter.confidence.setValue((0.5 + k / 50, 1.0)) for k in steps],
    )
    viewer.close()
    return rows


if __name__ == "__main__":
    main()
