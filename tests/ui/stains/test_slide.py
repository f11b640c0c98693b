"""Slides taken apart in a real window: a preview, then all of it; stopped, broken, real ones."""

import threading
import time
from pathlib import Path

import dask.array as da
import numpy as np
import pytest
import tifffile

import napari_beerlanet as nb
from napari_beerlanet.core.common.progress import report_progress
from napari_beerlanet.samples import he_field
from napari_beerlanet.ui.common.file_opening import add_layers
from napari_beerlanet.ui.io.slide_reader import read_slides
from napari_beerlanet.ui.stains import fitting
from napari_beerlanet.ui.stains.widget import DecomposeWidget
from napari_beerlanet.ui.viewer.layers import role_of
from napari_beerlanet.ui.viewer.planes import pixel_size

pytestmark = pytest.mark.window
SLIDES = Path(__file__).parents[4] / "shared" / "data" / "slide"
DEFAULT = {"iterations": "converge", "leave_out": ("pen", "border")}


@pytest.fixture(scope="module")
def image():
    """(2400, 2600, 3) uint8: tissue with glass at its right."""
    tissue = np.tile(he_field((600, 500), seed=3).image, (4, 4, 1))
    glass = np.full((2400, 600, 3), 243, np.uint8)
    return np.concatenate([tissue, glass], axis=1)


@pytest.fixture
def levels(image):
    return [da.from_array(image[::k, ::k], chunks=(256, 256, 3)) for k in (1, 4)]


class Gate:
    """Holds the counting of whole slides back, but not cancelling it."""

    def __init__(self) -> None:
        self.open, self.counts = threading.Event(), 0


@pytest.fixture
def gate(monkeypatch):
    made, count = Gate(), fitting.scan_slide_colours

    def gated(data, scan, report):
        if scan.sample is None:
            made.counts += 1
            while not made.open.is_set():
                report_progress(report, 0, 1, "counting colours")
                time.sleep(0.01)
        return count(data, scan, report)

    monkeypatch.setattr(fitting, "scan_slide_colours", gated)
    yield made
    made.open.set()


@pytest.fixture
def opened(shared_viewer, until, levels):
    def make(data=None, path=None):
        viewer = shared_viewer(show=True)
        if path is not None:
            add_layers(viewer, str(path), read_slides(path))
            (layer,) = viewer.layers
        else:
            data = levels if data is None else data
            layer = viewer.add_image(data, rgb=True, multiscale=len(data) > 1, name="slide")
        panel = DecomposeWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Stain decomposition")
        return viewer, panel, layer

    return make


@pytest.fixture
def previewed(until):
    def run(panel):
        panel.run_button.click()
        until(lambda: panel.fitted is not None and panel.layers.complete)
        until(lambda: panel.live.slide_scan.running or not panel.fitted.preview)

    return run


def settled(panel):
    return panel.live.idle and panel.layers is not None and panel.layers.complete


def densities(viewer):
    return [layer for layer in viewer.layers if role_of(layer) == "density"]


def test_a_preview_then_the_whole_and_never_nothing(opened, gate, previewed, until, levels):
    viewer, panel, _ = opened()
    assert panel.form.slide.is_shown
    previewed(panel)
    assert "a preview from 12 tiles" in panel.bar.text
    bare = []

    def look(event=None):
        if not any(layer.visible for layer in densities(viewer)):
            bare.append(event)

    viewer.layers.events.removed.connect(look)
    for layer in densities(viewer):
        layer.events.visible.connect(look)
    gate.open.set()
    until(lambda: settled(panel))
    assert not bare, "some stain is shown at every moment"
    right = nb.decompose_slide(levels, **DEFAULT)
    np.testing.assert_array_equal(panel.fitted.decomposition.spectra, right.fit.spectra)
    assert "fitted on" in panel.bar.text
    assert "million pixels" in panel.bar.text
    assert panel.fitted.slide_colours.counted == right.counted
    for i, layer in panel.layers.layers.items():
        assert [level.shape for level in layer.data] == [(2400, 2600), (600, 650)]
        np.testing.assert_array_equal(np.asarray(layer.data[1]), right.densities(1, i).compute())


def test_sliders_move_the_preview_while_the_slide_is_counted(
    opened, gate, previewed, until, levels
):
    _, panel, _ = opened()
    previewed(panel)
    panel.form.lam.slider.setValue(150)
    wanted = panel.form.lam.value
    until(lambda: panel.fitted.settings.lam == wanted)
    assert panel.fitted.preview
    assert gate.counts == 1
    gate.open.set()
    until(lambda: settled(panel))
    assert gate.counts == 1
    assert not panel.fitted.preview
    assert panel.fitted.settings.lam == wanted


def test_stopping_the_count_keeps_the_preview(opened, gate, previewed, until):
    _, panel, _ = opened()
    previewed(panel)
    panel.live.slide_scan.cancel()
    until(lambda: settled(panel))
    assert panel.fitted.preview
    assert "the preview stays" in panel.slide_scan_bar.text
    panel.form.lam.slider.setValue(150)
    until(lambda: settled(panel))
    assert gate.counts == 1, "what was stopped does not begin by itself"
    gate.open.set()
    panel.run_button.click()
    until(lambda: settled(panel) and not panel.fitted.preview)
    assert gate.counts == 2


def test_the_count_ends_when_another_image_is_chosen(opened, gate, previewed, until, image):
    viewer, panel, slide = opened()
    previewed(panel)
    viewer.add_image(image[:64, :64], name="another")
    assert panel.fitted is None
    gate.open.set()
    until(lambda: panel.live.idle)
    assert panel.slide_scan_bar.text == ""
    viewer.layers.selection.active = slide
    assert not panel.fitted.preview
    assert "million pixels" in panel.bar.text
    panel.form.lam.slider.setValue(150)
    until(lambda: settled(panel))
    assert panel.fitted.settings.lam == panel.form.lam.value
    assert not panel.fitted.preview
    assert gate.counts == 1, "the colours of the slide are kept"


def test_what_is_left_out_is_a_choice(opened, gate, until, levels):
    gate.open.set()
    _, panel, _ = opened()
    panel.run()
    until(lambda: settled(panel) and not panel.fitted.preview)
    everything = panel.fitted.slide_colours.counted
    panel.form.slide.kinds["glass"].native.click()
    until(lambda: settled(panel) and not panel.fitted.preview)
    assert "without background and pen and border" in panel.bar.text
    assert panel.fitted.slide_colours.counted < 0.85 * everything
    panel.form.slide.level.value = panel.form.slide.level.choices[-1]
    until(lambda: settled(panel))
    assert panel.fitted.preview, "a preview is what was asked for"


def test_the_slide_is_removed_while_it_is_counted(opened, gate, previewed, until):
    viewer, panel, layer = opened()
    previewed(panel)
    viewer.layers.remove(layer)
    until(lambda: panel.live.idle)
    assert panel.live.slide_scan.error is None
    assert len(densities(viewer)) > 0


def test_the_panel_is_closed_while_a_slide_is_counted(opened, gate, previewed, qtbot):
    viewer, panel, _ = opened()
    previewed(panel)
    counting = panel.live.slide_scan
    viewer.window.remove_dock_widget(panel)
    assert not counting.running
    qtbot.wait(200)
    assert len(densities(viewer)) > 0
    viewer.camera.zoom *= 3
    qtbot.wait(100)


def test_a_slide_that_vanishes_is_told(opened, gate, previewed, until, image, tmp_path):
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, image, photometric="rgb", tile=(256, 256), compression="zlib")
    _, panel, _ = opened(path=path)
    previewed(panel)
    path.unlink()
    until(lambda: panel.live.idle)
    assert f"{path}: no longer there" in panel.slide_scan_bar.text
    assert panel.fitted.preview


def test_an_unreadable_part_is_told_and_the_preview_stays(opened, gate, previewed, until, image):
    broken = threading.Event()

    def load(block, block_info=None):
        if broken.is_set():
            raise OSError("bad sector")
        return block

    fine = da.from_array(image, chunks=(400, 400, 3)).map_blocks(load, dtype=np.uint8)
    _, panel, _ = opened([fine, image[::4, ::4]])
    previewed(panel)
    broken.set()
    gate.open.set()
    until(lambda: panel.live.idle)
    broken.clear()
    assert "cannot be read at rows" in panel.slide_scan_bar.text
    assert "bad sector" in panel.slide_scan_bar.text
    assert panel.fitted.preview


def test_reconstruction_and_residual_of_a_slide_are_lazy(opened, gate, until, image):
    gate.open.set()
    viewer, panel, _ = opened()
    panel.run()
    until(lambda: settled(panel) and not panel.fitted.preview)
    for button in (panel.result_panel.reconstruct_button, panel.result_panel.residual_button):
        before = len(viewer.layers)
        button.click()
        until(lambda: len(viewer.layers) > before)  # noqa: B023
    made = {role_of(layer): layer for layer in viewer.layers}
    d = panel.fitted.decomposition
    right = d.reconstruct_of(image[::4, ::4], panel.result_panel.checked_components)
    np.testing.assert_array_equal(np.asarray(made["reconstruction"].data[1]), right)
    residual = made["residual"]
    assert residual.multiscale
    seen = np.asarray(residual.data[1])
    assert np.percentile(seen, 90) < residual.contrast_limits[1] < 3 * seen.max()


@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "slide_pyramid.tiff"])
def test_real_slides(opened, until, stalls, name):
    if not (SLIDES / name).exists():
        pytest.skip("shared data is not here")
    viewer, panel, layer = opened(path=SLIDES / name)
    size = pixel_size(layer)
    assert size == (pytest.approx((0.499, 0.499)) if name.endswith(".svs") else None)
    with stalls.watched():
        panel.run()
        until(lambda: settled(panel) and not panel.fitted.preview)
    print(f"\n{name}: longest stall {1e3 * stalls.longest:.0f} ms")
    with nb.open_slide(SLIDES / name) as slide:
        right = nb.decompose_slide(slide.levels, **DEFAULT)
    np.testing.assert_array_equal(panel.fitted.decomposition.spectra, right.fit.spectra)
    assert viewer.window.screenshot(canvas_only=True, flash=False).std() > 0
    assert stalls.answers > 1
