"""Slides searched in a real window: boxes as they come, stopped, gone on with, killed, broken."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import tifffile

from discs import boxes_of, disc_detector, draw, scattered
from napari_beerlanet.core.boxes.matching import match_boxes
from napari_beerlanet.core.common.tile_store import read_summary, tile_store_path
from napari_beerlanet.core.detection import stain_statistics
from napari_beerlanet.core.detection.inference import InferenceRunner
from napari_beerlanet.core.stains import slide_pixels
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detect import slide_search
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.viewer.layers import role_of

pytestmark = pytest.mark.window
SHAPE = (2400, 2600)


@pytest.fixture(scope="module")
def model():
    return disc_detector(components=8, iterations=10)


@pytest.fixture(scope="module")
def discs():
    return scattered(SHAPE, 40, seed=2, share=0.06)


@pytest.fixture(scope="module")
def image(discs):
    return draw(SHAPE, discs)


@pytest.fixture(scope="module")
def whole(model, image):
    return model.detect(image, object_size=40)


@pytest.fixture
def slide_file(image, tmp_path):
    path = tmp_path / "slide.svs"
    tifffile.imwrite(path, image, photometric="rgb", tile=(256, 256), compression="zlib")
    return path


class Gate:
    """Lets through as many tiles as it is told; counts them."""

    def __init__(self) -> None:
        self._free, self.tiles = threading.Semaphore(0), []
        self.wide_open = False

    def let(self, count: int) -> None:
        for _ in range(count):
            self._free.release()

    def open(self) -> None:
        self.wide_open = True
        self.let(100)

    def through(self, tiles) -> None:
        while not self.wide_open and not self._free.acquire(timeout=0.05):
            pass
        self.tiles += list(tiles)


@pytest.fixture
def gate(monkeypatch):
    made, find = Gate(), InferenceRunner.infer_tiles

    def gated(self, cut, tiles, *rest, **more):
        made.through(tiles)
        return find(self, cut, tiles, *rest, **more)

    monkeypatch.setattr(InferenceRunner, "infer_tiles", gated)
    yield made
    made.open()


@pytest.fixture
def opened(shared_viewer, model, image):
    """A window with the panel on a slide: a file, or else an array."""

    def make(path=None, array=None):
        viewer = shared_viewer(show=True)
        get_session(viewer).set_model(model, "blood-cells")
        if path is not None:
            (layer,) = viewer.open(path, plugin="napari-beerlanet")
        else:
            lazy = da.from_array(image, chunks=(300, 310, 3)) if array is None else array
            layer = viewer.add_image(lazy, rgb=True, name="slide")
        panel = DetectWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Find cells")
        panel.form.size_auto.value = False
        panel.form.cell_size.value = 40
        panel.form.skip_background.value = False
        panel.form.confidence_slider.value = 0.25
        return viewer, panel, layer

    return make


def shown(panel):
    return panel.slide.detection_layer.read_back().xyxy


def done_tiles(panel):
    return panel.slide._feed.done


def same_boxes(panel, whole):
    """The layer has what the model finds in memory, each box once."""
    boxes = shown(panel)
    assert len(boxes) == len(whole)
    assert (match_boxes(boxes, whole.xyxy, 0.999) >= 0).all()


def at_tile(panel, gate, until, count):
    """Let it come so far and no further."""
    gate.let(count)
    until(lambda: done_tiles(panel) >= count)
    until(lambda: panel.slide.detection_layer is not None and len(shown(panel)) > 0)


def until_stopping(panel, until):
    """The window has noticed: the search is to end, while it waits at the gate."""
    run = panel.detect_task._run
    until(lambda: run.stop.is_set())


# --- the way through -----------------------------------------------------------------------------


def test_boxes_come_while_it_runs_and_are_those_in_memory(opened, gate, until, whole):
    viewer, panel, layer = opened()
    panel.run_button.click()
    at_tile(panel, gate, until, 2)
    first = len(shown(panel))
    assert 0 < first < len(whole)
    until(lambda: panel.counts.class_counts is not None and panel.counts.class_counts.total > 0)
    until(lambda: panel.progress_bar.bar.format().startswith("tile 3 of "))
    gate.open()
    until(lambda: not panel.detect_task.running)
    same_boxes(panel, whole)
    assert panel.progress_bar.text.startswith("Done in")
    until(lambda: panel.run_button.text() == "Find cells")
    assert panel.counts.class_counts.counts == whole.counts()
    assert get_session(viewer).detections[layer].counts() == whole.counts()
    assert len(gate.tiles) == len(set(gate.tiles)) > 5


def test_a_preset_has_the_densities_of_a_slides_cells_and_decides_on_them(
    opened, until, whole, monkeypatch
):
    """As for images that are read at once: see `claim_red_cells`."""
    monkeypatch.setattr(slide_search, "SLIDE_PIXELS", 1000)
    viewer, panel, layer = opened()
    asked = []

    def refine(found, info):
        asked.append((info["name"], found))
        return found.candidates[1:].above(0.25)

    panel.run(refine=refine)
    assert panel.slide.running
    until(lambda: not panel.detect_task.running)
    ((name, found),) = asked
    assert name == "discs"
    assert len(found) == len(whole)
    np.testing.assert_allclose(
        found.columns["Model channel 1 mean"], whole.columns["Model channel 1 mean"], atol=1e-4
    )
    assert len(shown(panel)) == len(whole) - 1
    assert len(get_session(viewer).detections[layer]) == len(whole) - 1


def test_objects_on_every_border_of_tiles_are_found_once(opened, until, model, image):
    """Edges, corners where four tiles meet, the slide's own edges and corners."""
    from napari_beerlanet.core.detection.slide_detector import SlideDetection

    with SlideDetection(model, image, object_size=40, skip_glass=False) as run:
        tiles = run.grid.tiles
    edges_x = sorted({t.x for t in tiles} | {t.x + t.width for t in tiles})
    edges_y = sorted({t.y for t in tiles} | {t.y + t.height for t in tiles})
    assert len(edges_x) > 4
    places = []
    for y in (*edges_y, SHAPE[0] // 2 + 90):
        for x in (*edges_x, SHAPE[1] // 2 + 90):
            cx, cy = np.clip(x, 21, SHAPE[1] - 21), np.clip(y, 21, SHAPE[0] - 21)
            if all(np.hypot(cx - a, cy - b) > 60 for a, b, _ in places):
                places.append((float(cx), float(cy), 40))
    lazy = da.from_array(draw(SHAPE, places), chunks=(400, 500, 3))
    _, panel, _ = opened(array=lazy)
    panel.run()
    until(lambda: not panel.detect_task.running)
    boxes = shown(panel)
    assert len(boxes) == len(places) > 20
    assert (match_boxes(boxes, boxes_of(places), 0.8) >= 0).all()


def test_first_where_the_user_looks_also_if_that_moves(opened, gate, until):
    viewer, panel, _ = opened()
    viewer.camera.zoom = 8
    viewer.camera.center = (0, 2300, 2500)
    panel.run()
    at_tile(panel, gate, until, 1)
    assert gate.tiles[0].y + gate.tiles[0].height == SHAPE[0]
    assert gate.tiles[0].x + gate.tiles[0].width == SHAPE[1]
    viewer.camera.center = (0, 50, 60)
    until(lambda: panel.slide._feed.focus[0] < 200)
    gate.let(3)  # two were chosen before the view moved
    until(lambda: len(gate.tiles) >= 4)
    assert any(tile.y == tile.x == 0 for tile in gate.tiles[1:4])


def test_a_slide_unlike_the_training_is_told_while_it_runs(opened, gate, until, model, monkeypatch):
    monkeypatch.setitem(model.info, "pixel_size", 0.1)
    _, panel, layer = opened()
    layer.scale, layer.units = (1.0, 1.0), ("um", "um")
    panel.run()
    at_tile(panel, gate, until, 1)
    until(lambda: "in training" in panel.counts.warnings.text())
    assert panel.detect_task.running


def test_a_stopped_search_says_that_the_model_is_uncertain(opened, gate, until, monkeypatch):
    monkeypatch.setattr(stain_statistics, "_MIN_DOUBTFUL", 0)
    monkeypatch.setattr(stain_statistics, "_MAX_DOUBTFUL_RATIO", 0)
    _, panel, _ = opened()
    panel.run()
    at_tile(panel, gate, until, 2)
    assert "uncertain" not in panel.counts.warnings.text()
    panel.progress_bar.cancel.click()
    gate.let(2)
    until(lambda: not panel.detect_task.running)
    until(lambda: "uncertain" in panel.counts.warnings.text())


def test_the_view_alone_may_be_searched(opened, until, whole):
    viewer, panel, _ = opened()
    viewer.camera.zoom = 0.6
    viewer.camera.center = (0, 0, 0)
    panel.form.where.value = "view"
    job = panel._job(panel.image.layer)
    assert job.windows is not None
    panel.run()
    until(lambda: not panel.detect_task.running)
    rows, columns = job.windows[0]
    boxes = get_session(viewer).detection_layers[panel.image.layer].read_back().xyxy
    middle = (boxes[:, :2] + boxes[:, 2:]) / 2
    assert 0 < len(boxes) < len(whole)
    assert (middle < (columns.stop, rows.stop)).all()

    panel.form.where.value = "whole"
    panel.run()
    until(lambda: not panel.detect_task.running)
    same_boxes(panel, whole)
    panel.form.where.value = "view"
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert panel.counts.class_counts.total == len(whole), "those elsewhere stay, each once"
    panel.counts.undo_run.click()
    same_boxes(panel, whole)


# --- stopped, and gone on with -------------------------------------------------------------------


def test_cancel_keeps_what_was_found_and_go_on_goes_on(opened, gate, until, whole, slide_file):
    viewer, panel, layer = opened(slide_file)
    panel.run_button.click()
    at_tile(panel, gate, until, 3)
    panel.progress_bar.cancel.click()
    gate.let(2)
    until(lambda: not panel.detect_task.running)
    kept = len(shown(panel))
    assert kept > 0
    assert "“Resume” continues" in panel.progress_bar.text
    assert len(get_session(viewer).detections[layer]) == kept
    until(lambda: panel.run_button.text() == "Resume")
    before = len(gate.tiles)
    gate.open()
    panel.run_button.click()
    until(lambda: not panel.detect_task.running)
    same_boxes(panel, whole)
    assert len(gate.tiles) == len(set(gate.tiles)), "no tile is looked at twice"
    assert before < len(gate.tiles)
    until(lambda: panel.run_button.text() == "Find cells")


def test_boxes_that_the_user_changed_outlast_going_on(opened, gate, until):
    _, panel, _ = opened()
    panel.run()
    at_tile(panel, gate, until, 2)
    panel.progress_bar.cancel.click()
    gate.let(2)
    until(lambda: not panel.detect_task.running)
    detection_layer = panel.slide.detection_layer
    detection_layer.layer.add_rectangles(np.array([[10.0, 10], [70, 90]]))
    gate.open()
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert panel.slide.detection_layer is detection_layer
    features = detection_layer.read_back().features
    assert list(features["status"]).count("added") == 1


def test_another_setting_begins_anew_and_says_so(opened, gate, until, slide_file):
    _, panel, _ = opened(slide_file)
    panel.run()
    at_tile(panel, gate, until, 2)
    panel.progress_bar.cancel.click()
    gate.let(2)
    until(lambda: not panel.detect_task.running)
    panel.form.iou_slider.value = 0.5
    panel.run()
    until(lambda: "The overlap changed" in panel.form.slide_note.text())
    gate.open()
    until(lambda: not panel.detect_task.running)
    assert panel.progress_bar.text.startswith("Done in")
    assert len(gate.tiles) > len(set(gate.tiles))


def test_a_search_that_is_done_is_there_at_once(opened, gate, until, whole, slide_file):
    gate.open()
    _, first, _ = opened(slide_file)
    first.run()
    until(lambda: not first.detect_task.running)
    looked_at = len(gate.tiles)
    _, again, _ = opened(slide_file)
    until(lambda: "Searched before" in again.form.slide_note.text())
    again.run()
    until(lambda: not again.detect_task.running)
    same_boxes(again, whole)
    assert len(gate.tiles) == looked_at


VIEWER = """
import sys
from napari import Viewer
from qtpy.QtWidgets import QApplication
sys.path.insert(0, sys.argv[2])
from discs import disc_detector
from napari_beerlanet.core.detection.inference import InferenceRunner
from napari_beerlanet.ui.detect.widget import DetectWidget
from napari_beerlanet.ui.common.session import get_session
import time
infer_tiles = InferenceRunner.infer_tiles
def slow(self, *given, **more):
    time.sleep(0.3)
    return infer_tiles(self, *given, **more)
InferenceRunner.infer_tiles = slow
viewer = Viewer(show=True)
get_session(viewer).set_model(disc_detector(components=8, iterations=10), "blood-cells")
viewer.open(sys.argv[1], plugin="napari-beerlanet")
panel = DetectWidget(viewer)
viewer.window.add_dock_widget(panel)
panel.form.size_auto.value = False
panel.form.cell_size.value = 40
panel.form.skip_background.value = False
panel.run()
while True:
    QApplication.processEvents()
    time.sleep(0.01)
"""


def test_a_killed_viewer_goes_on_tomorrow(opened, gate, until, whole, slide_file, tmp_path):
    script = tmp_path / "viewer.py"
    script.write_text(VIEWER)
    tests = str(Path(__file__).parents[2])
    child = subprocess.Popen([sys.executable, str(script), str(slide_file), tests])
    log = tile_store_path(slide_file)
    try:
        ends = time.monotonic() + 120
        while (peeked := read_summary(log)) is None or peeked[1] < 2:
            assert child.poll() is None
            assert time.monotonic() < ends
            time.sleep(0.05)
    finally:
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
    done = read_summary(log)[1]
    gate.open()
    _, panel, _ = opened(slide_file)
    until(lambda: panel.run_button.text() == "Resume")
    assert f"{done} of " in panel.form.slide_note.text()
    panel.run_button.click()
    until(lambda: not panel.detect_task.running)
    same_boxes(panel, whole)
    assert len(gate.tiles) == panel.slide._feed.total - done


# --- what may happen meanwhile -------------------------------------------------------------------


def test_the_image_is_removed_while_it_runs(opened, gate, until):
    viewer, panel, layer = opened()
    panel.run()
    at_tile(panel, gate, until, 1)
    viewer.layers.remove(layer)
    until_stopping(panel, until)
    gate.let(2)
    until(lambda: not panel.detect_task.running)
    assert "the image was removed" in panel.progress_bar.text
    assert panel.detect_task.error is None


def test_the_boxes_are_removed_while_it_runs(opened, gate, until):
    viewer, panel, _ = opened()
    panel.run()
    at_tile(panel, gate, until, 1)
    viewer.layers.remove(panel.slide.detection_layer.layer)
    until_stopping(panel, until)
    gate.let(2)
    until(lambda: not panel.detect_task.running)
    assert panel.detect_task.error is None
    gate.open()
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert [role_of(made) for made in viewer.layers].count("detections") == 1


def test_the_panel_is_closed_while_it_runs(opened, gate, until, qtbot, slide_file):
    viewer, panel, _ = opened(slide_file)
    panel.run()
    at_tile(panel, gate, until, 2)
    layer = panel.slide.detection_layer.layer
    viewer.window.remove_dock_widget(panel)
    gate.open()
    qtbot.wait(300)
    assert layer in viewer.layers
    assert read_summary(tile_store_path(slide_file))[1] >= 2


def test_a_file_that_vanishes_is_told_and_boxes_stay(opened, gate, until, slide_file):
    _, panel, _ = opened(slide_file)
    panel.run()
    at_tile(panel, gate, until, 2)
    kept = len(shown(panel))
    slide_file.unlink()
    gate.let(3)
    until(lambda: not panel.detect_task.running)
    assert f"{slide_file}: no longer there" in panel.progress_bar.text
    assert len(shown(panel)) >= kept > 0


def test_an_unreadable_tile_is_told_and_boxes_stay(opened, gate, until, image, monkeypatch):
    monkeypatch.setattr(
        slide_pixels, "_OVERVIEW_SIDE", 500
    )  # as of a slide that is not kept in memory
    broken = threading.Event()

    def load(block, block_info=None):
        if broken.is_set():
            raise OSError("bad sector")
        return block

    lazy = da.from_array(image, chunks=(600, 650, 3)).map_blocks(load, dtype=np.uint8)
    _, panel, _ = opened(array=lazy)
    panel.run()
    at_tile(panel, gate, until, 2)
    kept = len(shown(panel))
    broken.set()
    gate.let(5)
    until(lambda: not panel.detect_task.running)
    assert re.search(
        r"cannot be read at rows \d+–\d+, columns .*bad sector", panel.progress_bar.text
    )
    assert len(shown(panel)) >= kept > 0
    until(lambda: panel.run_button.text() == "Resume")
    broken.clear()
    gate.open()
    panel.run()
    until(lambda: not panel.detect_task.running)
    assert panel.progress_bar.text.startswith("Done in")


def test_the_window_answers_while_a_slide_is_searched(opened, until, stalls):
    _, panel, _ = opened()
    with stalls.watched():
        panel.run()
        until(lambda: not panel.detect_task.running)
    print(f"\nlongest stall while a slide is searched: {1e3 * stalls.longest:.0f} ms")
    assert stalls.answers > 1
