"""One million detections in a real window: adding, panning, filtering, reviewing; three pictures.

    xvfb-run -a -s "-screen 0 1400x900x24" python benchmarks/million.py
    xvfb-run -a -s "-screen 0 1400x900x24" python benchmarks/million.py --pictures docs

The first prints a table: how long each thing takes until it is seen, and the longest time that the
window did not answer meanwhile, by the clock and in the GUI thread's time of the processor: on a
machine that does other things too the latter says more. The slide's own picture is plain, so that
what it costs to read one does not count. The second saves three pictures, of painted tissue.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import napari
import numpy as np
from million_slide import NAMES, levels, plain, tissue
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QApplication

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.review.widget import ReviewWidget
from napari_beerlanet.ui.viewer import fast_shapes
from napari_beerlanet.ui.viewer.layers import guard_software_opengl

SIDE = 100_000


class Watch:
    """The largest gaps between ticks of a timer, by the clock and in the GUI thread's own time."""

    def __init__(self) -> None:
        self.rows: list[tuple[str, float, float, float]] = []
        self._timer = QTimer()
        self._timer.setInterval(5)
        self._timer.timeout.connect(self._tick)

    def _tick(self) -> None:
        now = time.perf_counter(), time.thread_time()
        self._wall = max(self._wall, now[0] - self._last[0])
        self._writable = max(self._writable, now[1] - self._last[1])
        self._last = now

    @contextmanager
    def row(self, what: str) -> Any:
        """Measure one line of the table."""
        process(0.3)
        self._wall = self._writable = 0.0
        start = time.perf_counter()
        self._last = start, time.thread_time()
        self._timer.start()
        yield
        self._tick()
        self._timer.stop()
        self.rows.append((what, time.perf_counter() - start, self._wall, self._writable))
        seen, wall, own = (1e3 * v for v in self.rows[-1][1:])
        print(f"{what:52s} {seen:8.0f} ms   {wall:6.0f} ms   {own:6.0f} ms", flush=True)


def process(seconds: float) -> None:
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        QApplication.processEvents()
        time.sleep(0.002)


def until(condition: Callable[[], bool], most: float = 60) -> None:
    end = time.perf_counter() + most
    while not condition():
        if time.perf_counter() > end:
            raise TimeoutError("waited in vain")
        QApplication.processEvents()
        time.sleep(0.001)


def settled(made: DetectionLayer) -> bool:
    return not made._renderer.density.waiting and not made._throttler._hasPendingEmission


def pan(watch: Watch, viewer: Any, made: DetectionLayer, what: str, zoom: float) -> None:
    """Twenty steps across the tissue; the last line is for one of them."""
    viewer.scene.camera.zoom = zoom
    viewer.scene.camera.center = (SIDE * 0.47, SIDE * 0.47)
    process(0.5)
    steps = 20
    with watch.row(f"pan, {what}, {steps} steps"):
        for _ in range(steps):
            y, x = viewer.scene.camera.center[-2:]
            viewer.scene.camera.center = (y, x + 60 / zoom)
            process(0.05)
        until(lambda: settled(made))


def picture(viewer: Any, path: Path, zoom: float, centre: tuple[float, float]) -> None:
    from PIL import Image

    viewer.scene.camera.zoom, viewer.scene.camera.center = zoom, centre
    process(1.5)
    shot = viewer.screenshot(canvas_only=False, flash=False)
    Image.fromarray(shot[..., :3]).save(path, quality=82)
    print(path, os.path.getsize(path) // 1024, "KB")


def edits(made: DetectionLayer, viewer: Any) -> None:
    """Move, delete and add at high zoom; out and in again; all of it must be there."""
    viewer.scene.camera.zoom, viewer.scene.camera.center = 1.0, (SIDE * 0.47, SIDE * 0.47)
    process(0.6)
    ids = list(made.layer.features["id"])
    data = made.layer.data
    data[0] = data[0] + 7
    made.layer.data = data
    made.layer.selected_data = {1}
    made.layer.remove_selected()
    y, x = SIDE * 0.47, SIDE * 0.47
    made.layer.add_rectangles(np.array([[y, x], [y + 30, x + 40]]))
    total = len(made.store)
    viewer.scene.camera.zoom = 0.008
    process(0.6)
    viewer.scene.camera.zoom = 1.0
    process(0.6)
    there = set(made.layer.features["id"])
    assert ids[0] in there
    assert ids[1] not in there
    assert made.store.status[total if total < len(made.store) else -1] == "added"
    print("edits at high zoom are kept after zooming out and in: yes")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=1_000_000)
    parser.add_argument("--pictures", type=Path, help="folder for three screenshots")
    args = parser.parse_args()
    fast_shapes.fast_shapes_supported()
    start = time.process_time()
    found, where = tissue(SIDE, args.count)
    candidates = found.above(0.25)
    print(f"{args.count:,} detections made in {time.process_time() - start:.1f} s of the processor")
    viewer = napari.Viewer()
    guard_software_opengl(viewer)
    viewer.window.resize(1400, 880)
    slide = levels(SIDE, found, where) if args.pictures else plain(SIDE)
    source = viewer.add_image(slide, rgb=True, multiscale=True, name="slide")
    process(1)
    watch = Watch()
    print(f"{'':52s} {'until seen':>11s}   {'stall':>9s}   {'processor':>9s}")
    empty = napari.layers.Shapes(), napari.layers.Image(np.zeros((9, 9)))
    for name, layer in zip(("Shapes", "Image"), empty, strict=True):
        with watch.row(f"for comparison: napari adds an empty {name} layer"):
            viewer.add_layer(layer)
            process(0.3)
        viewer.layers.remove(layer)
    with watch.row(f"add {args.count:,} detections"):
        made = DetectionLayer(viewer, source, candidates)
        until(lambda: made._renderer.density.layer is not None and settled(made))
    if args.pictures:
        pictures(viewer, args.pictures)
    else:
        get_session(viewer).set_detections(source, candidates, made)
        measure(watch, viewer, made)
    viewer.close()


def measure(watch: Watch, viewer: Any, made: DetectionLayer) -> None:
    """All lines of the table but the first."""
    whole = float(viewer.scene.camera.zoom)
    pan(watch, viewer, made, "whole slide", whole)
    pan(watch, viewer, made, "where boxes take over", 0.12)
    pan(watch, viewer, made, "boxes", 0.5)
    with watch.row("zoom from the whole slide to cells, 30 steps"):
        for zoom in np.geomspace(whole, 1, 30):
            viewer.scene.camera.zoom = float(zoom)
            process(0.05)
        until(lambda: settled(made))
    for name, zoom in (("whole slide", whole), ("boxes", 0.5)):
        viewer.scene.camera.zoom, viewer.scene.camera.center = zoom, (SIDE / 2, SIDE / 2)
        for confidence in (0.5, 0.8, 0.25):
            with watch.row(f"confidence {confidence}, {name}"):
                made.set_filter(confidence)
                until(lambda: settled(made))
    edits(made, viewer)
    review(watch, viewer)
    counts(watch, viewer, made)
    grow(watch, made)


def pictures(viewer: Any, folder: Path) -> None:
    """The whole slide, where density and boxes meet, and boxes alone."""
    middle = (SIDE * 0.47, SIDE * 0.47)
    whole = float(viewer.scene.camera.zoom)
    picture(viewer, folder / "million-whole.jpg", whole, (SIDE / 2, SIDE / 2))
    picture(viewer, folder / "million-between.jpg", 0.2, middle)
    picture(viewer, folder / "million-boxes.jpg", 0.8, middle)


def grow(watch: Watch, made: DetectionLayer) -> None:
    """A hundred tiles of two hundred boxes, beside the others."""
    rng = np.random.default_rng(1)
    with watch.row("100 tiles of 200 boxes come"):
        for k in range(100):
            corner = rng.uniform(0, 600, (200, 2)) + np.array([1000 * k, 500])
            boxes = np.concatenate([corner, corner + 30], axis=1)
            made.extend(Detections(boxes, rng.integers(0, 4, 200), rng.random(200), NAMES))
            process(0.02)
        until(lambda: settled(made))


def counts(watch: Watch, viewer: Any, made: DetectionLayer) -> None:
    """The slider and the counts of the panel that finds cells."""
    panel = DetectWidget(viewer)
    viewer.window.add_dock_widget(panel, name="Find cells")
    process(8)  # a model is loaded
    for confidence in (0.7, 0.4):
        before = panel.counts.table.text()
        with watch.row(f"slider of Find cells to {confidence}, with counts"):
            panel.form.confidence_slider.value = round(confidence, 2)
            until(lambda before=before: panel.counts.table.text() != before and settled(made))


def review(watch: Watch, viewer: Any) -> None:
    with watch.row("review opens"):
        panel = ReviewWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Review")
        until(lambda: len(panel.rows) > 0)
    process(3)
    for what, act in (
        ("review: one class", lambda: panel.filter.classes.setCurrentIndex(2)),
        ("review: all classes", lambda: panel.filter.classes.setCurrentIndex(0)),
        ("review: confidence", lambda: panel.filter.confidence.setValue((0.6, 1.0))),
        ("review: order by position", lambda: panel.filter.order.setCurrentText("position")),
        ("review: sort by area", lambda: panel.table._sort(4)),
        ("review: sort by class", lambda: panel.table._sort(1)),
        ("review: go to the first (napari adds a layer)", lambda: panel.next()),
        ("review: go to the next", lambda: panel.next()),
        ("review: accept, and go to the next", lambda: panel.accept()),
        ("review: take it back", lambda: panel.undo()),
        ("review: histogram", lambda: panel.tabs.setCurrentIndex(2)),
    ):
        with watch.row(what):
            act()
            process(0.05)  # the filter waits for 30 ms whether more comes
            until(lambda: not panel.filter._changed_debounced._hasPendingEmission)


if __name__ == "__main__":
    main()
