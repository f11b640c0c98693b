"""The panel "Compare normalizations": layers beside the image, the grid, references, files."""

import dask.array as da
import numpy as np
import pytest
from napari.layers.utils._link_layers import get_linked_layers
from PIL import Image as PillowImage

import napari_beerlanet as nb
from discs import disc_detector
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.normalization.methods import (
    fitted_normalizer,
    load_normalizer,
    save_normalizer,
)
from napari_beerlanet.core.normalization.normalizer import Normalizer
from napari_beerlanet.core.normalization.slide import normalize_slide
from napari_beerlanet.core.normalization.staingan import ColourNetwork
from napari_beerlanet.samples import blood_smear
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import TaskOutcome
from napari_beerlanet.ui.normalize.form import RECENT_REFERENCES
from napari_beerlanet.ui.normalize.job import CompareJob, Reference, compare_methods
from napari_beerlanet.ui.normalize.widget import CompareWidget
from napari_beerlanet.ui.viewer import planes
from napari_beerlanet.ui.viewer.layers import show_in_place_of_others
from napari_beerlanet.ui.viewer.planes import Plane
from napari_beerlanet.ui.workspace.workspace import CELLS, COMPARE, TABS, open_workspace

pytestmark = pytest.mark.window


@pytest.fixture(scope="module")
def pair():
    """A field, and the same kind of field of another laboratory."""
    here = blood_smear((96, 128), cell_diameter=30, seed=1).image
    there = blood_smear((96, 128), cell_diameter=30, seed=2, shift=1.0, lab=3).image
    return here, there


@pytest.fixture
def opened(shared_viewer, pair):
    """The panel in a viewer with a field and one of another laboratory, the reference."""

    def make(show=False, methods=("reinhard", "macenko"), image=pair[0], **options):
        viewer = shared_viewer(show)
        reference = viewer.add_image(pair[1], name="reference")
        source = viewer.add_image(image, name="smear", **options)
        panel = CompareWidget(viewer)
        viewer.window.add_dock_widget(panel, name="Compare normalizations")
        show_in_place_of_others(viewer, source)  # as the workspace does
        choose(panel, *methods)
        return viewer, panel, source, reference

    return make


@pytest.fixture
def compare(until):
    def press(panel, count=2):
        done = []
        panel.compared.connect(done.append)
        assert panel.run_button.isEnabled(), panel.run_reason.text()
        panel.run_button.click()
        until(lambda: bool(done))
        panel.compared.disconnect(done.append)
        assert len(done) == 1
        assert len(done[0]) == count
        return done[0]

    return press


def choose(panel, *methods):
    for name, box in panel.methods.boxes.items():
        box.setChecked(name in methods)


def names(viewer):
    return [layer.name for layer in viewer.layers]


def visible(viewer):
    return {layer.name for layer in viewer.layers if layer.visible}


# --- layers ---------------------------------------------------------------------------------------


def test_each_method_is_a_linked_layer_beside_the_image(opened, compare, pair):
    viewer, panel, source, _ = opened(scale=(0.5, 0.5), translate=(3, 4), units=("um", "um"))
    ended = []
    panel.compare_task.ended.connect(ended.append)
    compare(panel)
    assert ended == [TaskOutcome.DONE]
    assert names(viewer) == ["reference", "smear", "Reinhard · smear", "Macenko · smear"]
    for layer, method in zip(viewer.layers[2:], ("reinhard", "macenko"), strict=True):
        np.testing.assert_array_equal(layer.data, nb.normalize(pair[0], method, pair[1]))
        assert layer.rgb
        np.testing.assert_array_equal(layer.scale, source.scale)
        np.testing.assert_array_equal(layer.translate, source.translate)
        assert layer.units == source.units
    assert get_linked_layers(source) == set(viewer.layers[2:])
    source.translate = (7, 8)
    assert [tuple(layer.translate) for layer in viewer.layers[2:]] == [(7, 8)] * 2
    assert viewer.layers.selection.active is source, "the user stays where the user was"
    source.name = "field 7"
    assert names(viewer)[2:] == ["Reinhard · field 7", "Macenko · field 7"]


def named(viewer):
    """The layers whose names are on the canvas."""
    return {layer.name for layer in viewer.layers if layer.name_overlay.visible}


def test_in_the_grid_at_one_click_and_back(opened, compare):
    viewer, panel, source, _ = opened(show=True)
    boxes = viewer.add_shapes([[[5, 5], [20, 20]]], shape_type="rectangle", name="my boxes")
    viewer.layers.selection.active = source
    assert panel.side_by_side.isChecked()
    compare(panel)
    versions = {"smear", "Reinhard · smear", "Macenko · smear"}
    assert viewer.canvas.grid.enabled
    assert visible(viewer) == versions
    grid, layers = viewer.canvas.grid, viewer.layers
    assert grid.position(layers.index(source), layers) == (0, 0), "the image itself comes first"
    assert named(viewer) == versions, "each cell says which version it is"
    panel.side_by_side.click()
    assert not viewer.canvas.grid.enabled
    assert named(viewer) == set()
    assert viewer.canvas.grid.stride == 1
    assert visible(viewer) == {"smear", "my boxes"}
    panel.side_by_side.click()
    assert visible(viewer) == versions
    panel.table.lines["macenko"].name.click()
    assert panel.shown_method == "macenko"
    assert visible(viewer) == versions, "in the grid nothing is in the way of another"
    viewer.canvas.grid.enabled = False  # by napari's own button
    assert not panel.side_by_side.isChecked()
    assert visible(viewer) == {"Macenko · smear", "my boxes"}
    assert boxes.visible


def test_another_image_ends_the_grid(opened, compare):
    viewer, panel, _source, reference = opened()
    compare(panel)
    assert viewer.canvas.grid.enabled
    viewer.layers.selection.active = reference
    assert not viewer.canvas.grid.enabled
    assert not panel.side_by_side.isChecked()
    assert visible(viewer) == {"reference"}
    assert not panel.result.isVisibleTo(panel), "it was about the other image"


def test_versions_are_looked_at_in_turn_at_the_same_place(opened, compare):
    viewer, panel, _source, _ = opened()
    panel.side_by_side.setChecked(False)
    compare(panel)
    assert visible(viewer) == {"Reinhard · smear"}, "the first one is what the click was for"
    centre, zoom = viewer.scene.camera.center, viewer.scene.camera.zoom
    for method, name in (
        ("macenko", "Macenko · smear"),
        ("", "smear"),
        ("reinhard", "Reinhard · smear"),
    ):
        panel.table.lines[method].name.click()
        assert visible(viewer) == {name}
        assert panel.image.layer.name == name, "the other panels work on it, too"
        assert panel.table.lines[method].name.isChecked()
    assert (viewer.scene.camera.center, viewer.scene.camera.zoom) == (centre, zoom)


def test_running_again_replaces_its_own_layers_and_no_others(opened, compare, pair):
    viewer, panel, source, reference = opened()
    compare(panel)
    mine = viewer.layers["Reinhard · smear"]
    mine.name = "the one to keep"
    kept = mine.data.copy()
    macenko = viewer.layers["Macenko · smear"]
    reference.data = pair[1][::-1, ::-1].copy() // 2 + 60
    choose(panel, "macenko", "grey")
    compare(panel)
    assert set(names(viewer)) == {
        "reference", "smear", "the one to keep", "Grey · smear", "Macenko · smear",
    }  # fmt: skip
    np.testing.assert_array_equal(mine.data, kept)
    assert viewer.layers["Macenko · smear"] is macenko, "updated in place"
    np.testing.assert_array_equal(
        macenko.data, nb.normalize(pair[0], "macenko", np.asarray(reference.data))
    )
    panel.remove_button.click()
    assert names(viewer) == ["reference", "smear", "the one to keep"]
    assert panel.image.layer is source
    assert source.visible
    assert not panel.result.isVisibleTo(panel)


def test_what_a_method_did_to_background_and_stains_is_beside_it(opened, compare, pair):
    _viewer, panel, _source, _ = opened()
    results = {result.method: result for result in compare(panel)}
    table, macenko = panel.table, results["macenko"]
    original, reference = panel.comparison.original, panel.comparison.reference
    assert spectral_angle(original, reference) > 3, "two laboratories"
    assert spectral_angle(macenko.looks, reference) < 2, "Macenko has moved the stains there"
    after = fitted_normalizer("macenko", pair[1]).apply(pair[0]).after
    vector = ", ".join(f"{value:z.2f}" for value in after.stains[:, 0])
    assert vector in table.lines["macenko"].colours.toolTip(), "also in the method's own terms"
    for label, looks in (
        (table.lines[""].colours, original),
        (table.reference, reference),
        (table.lines["macenko"].colours, macenko.looks),
    ):
        colours = [tuple(map(int, colour)) for colour in looks.colours()]
        picture = label.pixmap().toImage()
        drawn = [picture.pixelColor(16 * k + 7, 7) for k in range(len(colours))]
        assert [(c.red(), c.green(), c.blue()) for c in drawn] == colours
        assert len(colours) == 3
    assert table.lines["macenko"].seconds.text() == f"{macenko.seconds:.1f}"
    assert table.lines["macenko"].warning.isHidden()


def spectral_angle(looks, other):
    """Degrees between the closest stains of two images, of those the largest."""
    cosines = np.clip(looks.stains.T @ other.stains, -1, 1)
    return np.degrees(np.arccos(cosines.max(axis=1))).max()


# --- what goes wrong ------------------------------------------------------------------------------


def test_a_method_that_can_do_nothing_says_so(opened, compare):
    blank = np.full((40, 50, 3), (240, 238, 241), np.uint8)
    viewer, panel, _source, _ = opened(image=blank)
    compare(panel)
    for method in ("reinhard", "macenko"):
        warning = panel.table.lines[method].warning
        assert warning.text().startswith("⚠ The image is unchanged: ")
        assert not warning.isHidden()
    np.testing.assert_array_equal(viewer.layers["Macenko · smear"].data, blank)
    assert "2 could not normalize this image" in panel.progress_bar.text


def test_a_reference_of_background_fails_in_one_sentence_and_others_go_on(opened, compare):
    viewer, panel, _source, reference = opened(methods=("macenko", "grey"))
    reference.data = np.full((40, 50, 3), 250, np.uint8)
    grey, failed = compare(panel)
    assert failed.problem.startswith("The template cannot be used: ")
    assert failed.problem in panel.table.lines["macenko"].warning.text()
    assert not panel.table.lines["macenko"].name.isEnabled()
    assert not grey.problem
    assert names(viewer) == ["reference", "smear", "Grey · smear"]


def test_a_reference_that_is_gone_leaves_the_viewer_as_it_was(opened, until, tmp_path):
    viewer, panel, _source, _ = opened()
    path = tmp_path / "template.png"
    PillowImage.new("RGB", (30, 30), "pink").save(path)
    panel.reference.choose_files([path])
    path.unlink()
    panel.run_button.click()
    until(lambda: not panel.compare_task.running)
    assert str(path) in panel.progress_bar.text
    assert names(viewer) == ["reference", "smear"]


def test_cancelling_and_removing_the_image_add_nothing(opened, until):
    viewer, panel, source, _ = opened()
    ended = []
    panel.compare_task.ended.connect(ended.append)
    panel.run_button.click()
    panel.compare_task.cancel()
    until(lambda: not panel.compare_task.running)
    assert ended == [TaskOutcome.CANCELLED]
    assert names(viewer) == ["reference", "smear"]
    panel.run_button.click()
    viewer.layers.remove(source)
    until(lambda: not panel.compare_task.running)
    assert names(viewer) == ["reference"]


def test_without_methods_there_is_a_reason(opened):
    viewer, panel, _source, _ = opened(methods=())
    assert not panel.run_button.isEnabled()
    assert panel.run_reason.text() == "Choose a method."
    viewer.layers.clear()
    viewer.add_image(np.zeros((20, 20)), name="grey")
    assert "has no colours" in panel.empty.text.text()
    assert panel.empty.isVisibleTo(panel)


# --- kinds of images ------------------------------------------------------------------------------


def test_a_plane_of_a_stack_is_normalized_at_its_place(opened, compare, pair):
    stack = np.stack([pair[1], pair[0], pair[1]])
    viewer, panel, source, _ = opened(image=stack, rgb=True)
    viewer.dims.set_point(0, 1)
    compare(panel)
    layer = viewer.layers["Macenko · smear"]
    assert layer.data.shape == (1, *pair[0].shape)
    np.testing.assert_array_equal(layer.data[0], nb.normalize(pair[0], "macenko", pair[1]))
    np.testing.assert_array_equal(layer.translate, (1, 0, 0))
    np.testing.assert_array_equal(source.extent.world[:, 1:], layer.extent.world[:, 1:])


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_the_type_of_the_pixels_stays(opened, compare, pair, dtype):
    white = 65535 if dtype == np.uint16 else 1
    image = (pair[0] / 255 * white).astype(dtype)
    alpha = np.full((*image.shape[:2], 1), white, dtype)
    viewer, panel, _source, _ = opened(image=np.concatenate([image, alpha], 2))
    compare(panel)
    data = viewer.layers["Macenko · smear"].data
    assert data.dtype == dtype
    assert data.shape[2] == 4


def test_a_slide_is_recoloured_where_one_looks(pair, monkeypatch):
    monkeypatch.setattr(planes, "SLIDE_PIXELS_LAZY", 1000)
    read = []

    def block(array, block_info=None):
        read.append(block_info[0]["array-location"])
        return array

    whole = np.tile(pair[0], (8, 8, 1))
    lazy = da.from_array(whole, chunks=(96, 128, 3)).map_blocks(block, dtype=whole.dtype)
    plane = Plane("slide", (lazy,))
    assert plane.is_slide
    job = CompareJob(plane, ("macenko",), Reference(Plane("reference", (pair[1],))))
    (result,) = compare_methods(job, lambda progress: None).results
    assert not result.problem
    read.clear()
    part = np.asarray(result.data[0][96:192, 128:256])
    assert len(read) == 1, "no more than the block that is looked at"
    expected = normalize_slide([whole], fitted_normalizer("macenko", pair[1])).levels[0]
    np.testing.assert_array_equal(part, np.asarray(expected[96:192, 128:256]))
    assert not np.array_equal(part, pair[0])


# --- references and files -------------------------------------------------------------------------


def test_references_are_other_images_files_and_samples_and_files_are_remembered(
    opened, compare, pair, tmp_path, shared_viewer
):
    viewer, panel, source, _reference = opened()
    offered = [panel.reference.list.itemText(k) for k in range(panel.reference.list.count())]
    assert offered[0] == "reference"
    assert "smear" not in offered
    assert "Sample: H&E section" in offered
    path = tmp_path / "template.png"
    PillowImage.fromarray(pair[1]).save(path)
    panel.reference.choose_files([path])
    assert panel.reference.list.currentText() == "template.png"
    compare(panel)
    np.testing.assert_array_equal(
        viewer.layers["Macenko · smear"].data, nb.normalize(pair[0], "macenko", pair[1])
    )
    assert RECENT_REFERENCES.paths() == [path]
    viewer.layers.remove("reference")
    assert panel.reference.list.currentText() == "template.png"
    assert panel.source is source


def test_image_and_normalizer_are_saved_and_the_normalizer_is_a_reference(
    opened, compare, until, pair, tmp_path
):
    _viewer, panel, source, _ = opened(scale=(0.25, 0.5), units=("um", "um"))
    panel.side_by_side.setChecked(False)
    compare(panel)
    panel.table.lines["macenko"].name.click()
    expected = nb.normalize(pair[0], "macenko", pair[1])
    for name in ("normalized.tif", "normalized.png"):
        panel.save_image(str(tmp_path / name))
        until(lambda: not panel.save_task.running)
        assert panel.save_bar.text == f"Saved {name}."
        file = read_image(tmp_path / name)
        np.testing.assert_array_equal(file.pixels, expected)
        assert file.pixel_size == (pytest.approx((0.25, 0.5)) if name.endswith("tif") else None)
    panel.save_normalizer(str(tmp_path / "lab"))
    until(lambda: not panel.save_task.running)
    saved = tmp_path / "lab.safetensors"
    np.testing.assert_array_equal(load_normalizer(saved).apply(pair[0]).rgb, expected)
    assert RECENT_REFERENCES.paths() == [saved]
    panel.table.lines[""].name.click()
    panel.reference.choose_files([saved])
    reinhard, macenko = compare(panel)
    assert reinhard.problem.startswith("The reference is a saved Macenko normalizer")
    np.testing.assert_array_equal(macenko.data, expected)
    assert panel.source is source
    choose(panel)
    (macenko,) = compare(panel, 1)
    np.testing.assert_array_equal(macenko.data, expected)


def test_a_normalizer_that_was_trained_is_a_reference(opened, compare, pair, tmp_path):
    rng, path = np.random.default_rng(0), tmp_path / "gan.safetensors"
    layers = [(rng.normal(0, 0.3, (n, m)), np.zeros(n)) for n, m in ((32, 3), (32, 32), (3, 32))]
    save_normalizer(Normalizer("staingan", ColourNetwork(layers)), path)
    viewer, panel, _source, _ = opened(methods=())
    assert not panel.run_button.isEnabled()
    panel.reference.choose_files([path])
    (result,) = compare(panel, 1)
    assert result.method == "staingan"
    np.testing.assert_array_equal(
        viewer.layers["StainGAN · smear"].data, load_normalizer(path).apply(pair[0]).rgb
    )


# --- the workspace and Find cells -----------------------------------------------------------------


def test_it_is_a_dock_beside_the_workspace_and_comes_back_as_it_was(shared_viewer, pair, qtbot):
    viewer = shared_viewer(show=True)
    viewer.window.resize(1280, 720)
    viewer.add_image(pair[0], name="smear")
    _, panel = viewer.window.add_plugin_dock_widget("napari-beerlanet", "Compare normalizations")
    workspace = open_workspace(viewer)
    dock = panel.parentWidget()
    window = viewer.window._qt_window
    assert workspace.parentWidget() in window.tabifiedDockWidgets(dock)
    assert panel.isVisible()
    assert workspace.tabs.count() == len(TABS), "the row of tabs is full"
    assert panel.image.layer is workspace.image.layer
    qtbot.wait(50)
    assert (window.width(), window.height()) == (1280, 720)
    assert dock.width() <= 400
    dock.destroyOnClose()
    qtbot.wait(50)
    assert not panel.closed
    assert workspace.open_tab(COMPARE) is panel
    assert panel.isVisible()


def test_use_in_find_cells_searches_the_version(shared_viewer, pair, until, compare):
    viewer = shared_viewer()
    get_session(viewer).set_model(disc_detector(components=2, iterations=3), "tiny")
    viewer.add_image(pair[1], name="reference")
    source = viewer.add_image(pair[0], name="smear")
    workspace = open_workspace(viewer, COMPARE)
    panel = workspace.panel(COMPARE)
    choose(panel, "macenko")
    compare(panel, 1)
    assert viewer.canvas.grid.enabled
    panel.table.lines["macenko"].name.click()
    panel.find_button.click()
    cells = workspace.panel(CELLS)
    until(lambda: not cells.detect_task.running and "Done" in cells.progress_bar.text)
    version = viewer.layers["Macenko · smear"]
    assert not viewer.canvas.grid.enabled, "boxes are drawn on their image"
    assert version in get_session(viewer).detections
    assert source not in get_session(viewer).detections
    boxes = viewer.layers["Macenko · smear · detections"]
    until(lambda: boxes.visible)
    assert version.visible
    assert not source.visible
    found = get_session(viewer).detections[version]
    assert panel.table.lines["macenko"].cells.text() == f"{len(found):,}"
    workspace.image.pick(source)
    assert visible(viewer) == {"smear"}, "boxes go with their image"
    panel.remove_button.click()
    assert names(viewer) == ["reference", "smear"], "boxes of what is gone go with it"
