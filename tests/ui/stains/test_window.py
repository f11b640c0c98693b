"""The decomposition panel in a real window: latency, stalls, and docks closed in the middle."""

import gc

import numpy as np
import pytest

from napari_beerlanet.core.project.project import Project
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.presets import NamedSpectrum, StainPreset
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.session import get_project_store
from napari_beerlanet.ui.stains.preset_editor import named_spectra, saved_presets, stain_library
from napari_beerlanet.ui.stains.widget import DecomposeWidget
from napari_beerlanet.ui.viewer.layers import role_of

pytestmark = pytest.mark.window


@pytest.fixture(scope="module")
def megapixel():
    """(1024, 1024, 3) uint8; and the solver compiled."""
    image = blood_smear((1024, 1024)).image
    decompose(image, iterations="converge")
    decompose(image)
    return image


@pytest.fixture
def docked(shared_viewer, until):
    """A viewer with the panel in a dock of 400 pixels."""

    def make(image=None, **options):
        viewer = shared_viewer(show=True)
        panel = DecomposeWidget(viewer)
        dock = viewer.window.add_dock_widget(panel, name="Stain decomposition", area="right")
        dock.setFixedWidth(400)
        if image is not None:
            viewer.add_image(image, rgb=True, name="smear", **options)
        panel.settle = lambda: until(lambda: is_settled(panel))
        return viewer, panel

    return make


def is_settled(panel):
    return panel.live.idle and (panel.layers is None or panel.layers.complete)


def densities(viewer):
    return [layer for layer in viewer.layers if role_of(layer) == "density"]


def test_click_through(docked, qtbot, until, tmp_path):
    viewer, panel = docked()
    panel.empty.sample.click()
    until(lambda: len(viewer.layers) == 1)
    panel.run_button.click()
    panel.settle()
    assert len(densities(viewer)) == 2
    panel.form.lam.slider.setValue(panel.form.lam.slider.value() + 30)
    panel.settle()
    for button in panel.form.blending_buttons.buttons():
        button.click()
        qtbot.wait(20)
    panel.result_panel.rows[min(panel.layers.layers)].swatch.click()
    panel.result_panel.reconstruct_button.click()
    panel.result_panel.residual_button.click()
    until(lambda: any(role_of(layer) == "residual" for layer in viewer.layers))
    picture = viewer.window.screenshot(canvas_only=False, flash=False)
    assert picture.std() > 0
    assert panel.width() <= 400


def test_a_slider_is_followed_live(docked, megapixel, until):
    viewer, panel = docked(megapixel)
    panel.run()
    panel.settle()
    layers = densities(viewer)
    for step in range(1, 8):
        panel.form.lam.slider.setValue(150 + 5 * step)
        wanted = panel.form.lam.value
        until(lambda: panel.fitted.settings.lam == wanted)  # noqa: B023
        panel.settle()
    assert densities(viewer) == layers


def test_the_window_does_not_stall(docked, until, stalls):
    image = np.tile(blood_smear((1024, 1024)).image, (2, 2, 1))
    decompose(image, iterations="converge")
    _, panel = docked(image)
    with stalls.watched():
        panel.run()
        panel.settle()
        panel.form.lam.slider.setValue(150)
        panel.settle()
    print(f"\nlongest stall, 4 megapixels: {1e3 * stalls.longest:.0f} ms")
    assert stalls.answers > 1


@pytest.mark.parametrize("moment", [0, 30, 150])
def test_the_dock_is_closed_in_the_middle(docked, megapixel, qtbot, until, moment):
    viewer, panel = docked(megapixel)
    task = panel.live.task
    panel.run()
    qtbot.wait(moment)
    viewer.window.remove_dock_widget(panel)
    until(lambda: not task.running)
    del panel
    gc.collect()
    qtbot.wait(100)
    assert "smear" in viewer.layers
    viewer.layers.clear()
    again = DecomposeWidget(viewer)
    viewer.window.add_dock_widget(again)
    viewer.add_image(megapixel, rgb=True)
    again.run()
    until(lambda: is_settled(again) and again.fitted is not None)


def test_the_viewer_is_closed_in_the_middle(docked, megapixel, qtbot):
    viewer, panel = docked(megapixel)
    panel.run()
    qtbot.wait(30)
    viewer.close()
    del viewer, panel
    gc.collect()
    qtbot.wait(100)


def test_two_viewers_at_once(docked, smear):
    (one, left), (two, right) = docked(smear), docked(smear[::-1].copy())
    left.run()
    right.run()
    left.settle()
    right.settle()
    assert densities(one)
    assert densities(two)
    np.testing.assert_array_equal(right.fitted.decomposition.image.pixels, smear[::-1])


def test_the_theme_is_followed(docked, smear):
    viewer, panel = docked(smear)
    panel.run()
    panel.settle()
    dark = panel.result_panel.grab().toImage().pixelColor(2, 2)
    viewer.theme = "light"
    light = panel.result_panel.grab().toImage().pixelColor(2, 2)
    assert light.lightness() > dark.lightness()


def test_presets_are_shared_by_the_images_of_a_project(shared_viewer, tmp_path):
    viewer = shared_viewer()
    mine = StainPreset("mine", (NamedSpectrum("nuclei", (0.6, 0.7, 0.3)),))
    stain_library(viewer).save(mine)
    with Project.create(tmp_path / "project", ["RBC"]) as project:
        get_project_store(viewer).put(project)
        theirs = StainPreset("ours", (NamedSpectrum("plasma", (0.1, 0.9, 0.3)),))
        assert stain_library(viewer).save(theirs).parent == project.path / "stains"
        assert [preset.name for preset in saved_presets(viewer)] == ["ours", "mine"]
        assert [one.name for one in named_spectra(viewer)] == ["plasma", "nuclei"]
        get_project_store(viewer).put(None)
    assert [preset.name for preset in saved_presets(viewer)] == ["mine"]
    with Project.open(tmp_path / "project") as again:
        assert not again.notes
