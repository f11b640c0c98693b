"""Files opened by drop and menu, no plugin named, in a window with the installed manifest."""

import warnings

import numpy as np
import pytest
import tifffile
from napari.plugins import _npe2
from napari.settings import get_settings
from PIL import Image
from qtpy.QtCore import QMimeData, QPointF, Qt, QUrl
from qtpy.QtGui import QDropEvent
from qtpy.QtWidgets import QFileDialog

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.formats import write_detections
from napari_beerlanet.core.images import slide as slide_files
from napari_beerlanet.ui.batch.widget import BatchWidget
from napari_beerlanet.ui.viewer.planes import pixel_size

pytestmark = pytest.mark.window

PLUGIN = "napari-beerlanet"
GREY = np.arange(40 * 50, dtype=np.uint16).reshape(40, 50)
STACK = np.arange(4 * 20 * 30, dtype=np.uint8).reshape(4, 20, 30)


def pyramid(path, image, **options):
    with tifffile.TiffWriter(path) as file:
        file.write(image, photometric="rgb", tile=(64, 64), subifds=1, **options)
        file.write(image[::2, ::2], photometric="rgb", tile=(64, 64), subfiletype=1)


ORDINARY = {
    "grey.tif": lambda path, rgb: tifffile.imwrite(path, GREY),
    "pages.tiff": lambda path, rgb: tifffile.imwrite(path, STACK, photometric="minisblack"),
    "imagej.tif": lambda path, rgb: tifffile.imwrite(
        path, STACK.reshape(2, 2, 20, 30), imagej=True, metadata={"axes": "ZCYX"}
    ),
    "plain.ome.tif": lambda path, rgb: tifffile.imwrite(path, rgb, photometric="rgb"),
    "stack.ome.tif": lambda path, rgb: tifffile.imwrite(path, STACK, photometric="minisblack"),
    "small_tiled.tif": lambda path, rgb: tifffile.imwrite(
        path, rgb, photometric="rgb", tile=(64, 64), resolution=(20000, 20000), resolutionunit=3
    ),
    "rgb.TIF": lambda path, rgb: tifffile.imwrite(path, rgb, photometric="rgb"),
    "rgb.btf": lambda path, rgb: tifffile.imwrite(path, rgb, photometric="rgb", bigtiff=True),
}
SLIDES = {
    "pyramid.tif": pyramid,
    "pyramid.ome.tiff": pyramid,
    "scanner.svs": lambda path, rgb: tifffile.imwrite(path, rgb, photometric="rgb", tile=(64, 64)),
}


def some_boxes(shape):
    boxes = np.array([[10, 10, 40, 40], [50, 60, 90, 100]], float)
    return Detections(boxes, np.array([0, 1]), np.ones(2), ["RBC", "WBC"], image_shape=shape)


@pytest.fixture
def window(shared_viewer, monkeypatch):
    """A window, without or with a panel of ours; a question is a failure."""
    from napari._qt.dialogs.qt_reader_dialog import QtReaderDialog

    def asked(dialog):
        offered = [button.text() for button in dialog.reader_btn_group.buttons()]
        raise AssertionError(f"napari asks which reader to use: {offered}")

    monkeypatch.setattr(QtReaderDialog, "get_user_choices", asked)
    get_settings().plugins.extension2reader = {}

    def make(panel):
        viewer = shared_viewer()
        if panel:
            viewer.window.add_dock_widget(BatchWidget(viewer))
        return viewer

    yield make
    get_settings().plugins.extension2reader = {}


def drop(viewer, *paths):
    """The layers that come of a drop on the canvas."""
    before = set(viewer.layers)
    mime = QMimeData()
    mime.setUrls([QUrl.fromLocalFile(str(path)) for path in paths])
    event = QDropEvent(
        QPointF(5, 5),
        Qt.DropAction.CopyAction,
        mime,
        Qt.MouseButton.LeftButton,
        Qt.KeyboardModifier.NoModifier,
    )
    viewer.window._qt_viewer.dropEvent(event)
    return [layer for layer in viewer.layers if layer not in before]


def open_from_menu(viewer, monkeypatch, *paths):
    before = set(viewer.layers)
    chosen = ([str(path) for path in paths], "")
    monkeypatch.setattr(QFileDialog, "getOpenFileNames", lambda *_, **__: chosen)
    viewer.window._qt_viewer._open_files_dialog()
    return [layer for layer in viewer.layers if layer not in before]


@pytest.mark.parametrize("panel", [False, True])
def test_an_ordinary_tiff_opens_as_without_the_plugin(window, smear, tmp_path, monkeypatch, panel):
    viewer = window(panel)
    for name, write in ORDINARY.items():
        write(tmp_path / name, smear)
        assert list(_npe2.get_readers(tmp_path / name)) == ["napari"], name
        plain = viewer.open(str(tmp_path / name), plugin="napari")
        for layers in (
            drop(viewer, tmp_path / name),
            open_from_menu(viewer, monkeypatch, tmp_path / name),
        ):
            assert len(layers) == len(plain) == 1, name
            np.testing.assert_array_equal(layers[0].data, plain[0].data, name)
            for fact in ("rgb", "multiscale", "source", "units", "ndim"):
                assert getattr(layers[0], fact) == getattr(plain[0], fact), name
            np.testing.assert_array_equal(layers[0].scale, plain[0].scale, name)


def test_a_slide_opens_as_a_pyramid_in_a_window_with_a_panel(window, smear, tmp_path, monkeypatch):
    viewer = window(True)
    big = np.tile(smear, (6, 6, 1))[:1400, :1800]  # more than a screenful: overviews are made
    for name, write in SLIDES.items():
        write(tmp_path / name, big)
        (dropped,) = drop(viewer, tmp_path / name)
        (chosen,) = open_from_menu(viewer, monkeypatch, tmp_path / name)
        for layer in (dropped, chosen):
            assert layer.source.reader_plugin == PLUGIN, name
            assert layer.source.path == str(tmp_path / name)
            assert layer.rgb
            assert not isinstance(layer.data, np.ndarray) or name == "scanner.svs"
        assert dropped.multiscale == name.startswith("pyramid")


def test_a_large_tiff_in_tiles_is_a_slide(window, smear, tmp_path, monkeypatch):
    viewer = window(True)
    write = ORDINARY["small_tiled.tif"]
    write(tmp_path / "field.tif", smear)
    monkeypatch.setattr(slide_files, "SLIDE_PIXELS", smear[..., 0].size - 1)
    (layer,) = drop(viewer, tmp_path / "field.tif")
    assert layer.source.reader_plugin == PLUGIN
    monkeypatch.setattr(slide_files, "SLIDE_PIXELS", smear[..., 0].size)
    (layer,) = drop(viewer, tmp_path / "field.tif")
    assert layer.source.reader_plugin == "napari"


def test_several_files_at_once_and_the_users_own_choice_of_a_reader(window, smear, tmp_path):
    viewer = window(True)
    for name in ("pyramid.tif", "grey.tif"):
        {**SLIDES, **ORDINARY}[name](tmp_path / name, smear)
    layers = drop(viewer, tmp_path / "grey.tif", tmp_path / "pyramid.tif")
    assert {layer.name: layer.source.reader_plugin for layer in layers} == {
        "grey": "napari",
        "pyramid": PLUGIN,
    }
    get_settings().plugins.extension2reader = {"*.tif": "napari"}
    (layer,) = drop(viewer, tmp_path / "pyramid.tif")
    assert layer.source.reader_plugin == "napari"


@pytest.mark.parametrize("panel", [False, True])
def test_a_folder_of_images_opens_as_without_the_plugin(window, smear, tmp_path, panel):
    for name in "ab":
        Image.fromarray(smear).save(tmp_path / f"{name}.png")
    assert list(_npe2.get_readers(tmp_path)) == ["napari"]
    viewer = window(panel)
    (plain,) = viewer.open(str(tmp_path), plugin="napari")
    (layer,) = drop(viewer, tmp_path)
    assert layer.data.shape == plain.data.shape == (2, *smear.shape)
    assert layer.source == plain.source
    (tmp_path / "notes.txt").write_text("Slide 7, stained on Monday.")  # no dataset by that
    (layer,) = drop(viewer, tmp_path)
    assert layer.source.reader_plugin == "napari"


def test_a_folder_of_annotated_images_opens_with_its_boxes(window, smear, tmp_path):
    for name in "ab":
        Image.fromarray(smear).save(tmp_path / f"{name}.png")
        write_detections(tmp_path / f"{name}.xml", some_boxes(smear.shape[:2]), f"{name}.png")
    image, boxes = drop(window(True), tmp_path)
    assert image.data.shape == (2, *smear.shape)
    assert len(boxes.data) == 4


@pytest.mark.parametrize("panel", [False, True])
def test_a_table_of_naparis_opens_as_without_the_plugin(window, tmp_path, panel):
    viewer = window(panel)
    viewer.add_points([[1, 2], [3, 4]]).save(str(tmp_path / "points.csv"))
    assert list(_npe2.get_readers(tmp_path / "points.csv")) == ["napari"]
    (layer,) = drop(viewer, tmp_path / "points.csv")
    np.testing.assert_array_equal(layer.data, [[1, 2], [3, 4]])


def test_a_table_of_boxes_opens_on_its_image(window, smear, tmp_path):
    viewer = window(True)
    viewer.add_image(smear, name="field")
    write_detections(tmp_path / "field.csv", some_boxes(smear.shape[:2]), "field.png")
    (layer,) = drop(viewer, tmp_path / "field.csv")
    assert layer.features["class"].tolist() == ["RBC", "WBC"]
    (tmp_path / "field.csv").rename(tmp_path / "field.detections.csv")
    assert set(_npe2.get_readers(tmp_path / "field.detections.csv")) == {"napari", PLUGIN}
    assert len(drop(viewer, tmp_path / "field.detections.csv")) == 1
    (tmp_path / "bad.csv").write_text("class,x1,y1,x2,y2\nRBC,1,2,three,4\n")
    before = list(viewer.layers)
    assert drop(viewer, tmp_path / "bad.csv") == []
    assert list(viewer.layers) == before


def test_slides_and_boxes_are_in_the_file_menu(window, smear, tmp_path, monkeypatch):
    """For windows without a panel, and for colour images that are no slides."""
    viewer = window(False)
    ORDINARY["small_tiled.tif"](tmp_path / "field.tif", smear)
    write_detections(tmp_path / "field.csv", some_boxes(smear.shape[:2]), "field.tif")
    menu = viewer.window.file_menu
    (utilities,) = [a.menu() for a in menu.actions() if a.text() == "IO Utilities"]
    entries = {action.text().split("…")[0]: action for action in utilities.actions()}
    for title, name in (("Open slide", "field.tif"), ("Open boxes", "field.csv")):
        chosen = ([str(tmp_path / name)], "")
        monkeypatch.setattr(QFileDialog, "getOpenFileNames", lambda *_, c=chosen: c)
        entries[title].trigger()
    image, boxes = viewer.layers
    assert image.source.path == str(tmp_path / "field.tif")
    assert image.source.reader_plugin == PLUGIN
    assert len(boxes.data) == 2
    viewer.layers.clear()
    monkeypatch.setattr(QFileDialog, "getExistingDirectory", lambda *_: str(tmp_path))
    (tmp_path / "field.csv").unlink()
    write_detections(tmp_path / "field.xml", some_boxes(smear.shape[:2]), "field.tif")
    entries["Open annotated images"].trigger()
    assert [layer.name for layer in viewer.layers] == ["field.tif", "field.tif · boxes"]


@pytest.mark.parametrize("first", ["sample", "slide", "annotated image"])
def test_what_is_opened_next_is_drawn_at_its_size(window, smear, tmp_path, first):
    """Layers in micrometres beside layers in pixels: napari warns, and one of them is a dot."""
    viewer = window(True)
    if first == "sample":
        viewer.open_sample(PLUGIN, "he_field")
    elif first == "slide":
        pyramid(tmp_path / "slide.tif", smear, resolution=(20000, 20000), resolutionunit=3)
        drop(viewer, tmp_path / "slide.tif")
    else:
        ORDINARY["small_tiled.tif"](tmp_path / "field.tif", smear)
        write_detections(tmp_path / "field.txt", some_boxes(smear.shape[:2]), format="yolo")
        drop(viewer, tmp_path / "field.txt")
    sized, size = viewer.layers[0], pixel_size(viewer.layers[0])
    assert size is not None
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        Image.fromarray(smear).save(tmp_path / "next.png")
        (plain,) = drop(viewer, tmp_path / "next.png")
        viewer.screenshot(flash=False)
    assert [str(one.message) for one in said if "units" in str(one.message)] == []
    assert viewer.layers.extent.units is not None
    for layer in (sized, plain):
        pixels = np.subtract(*layer.extent.data[::-1]) + 1
        np.testing.assert_allclose(np.subtract(*layer.extent.world[::-1]) + 1, pixels)
    assert pixel_size(sized) == size


def test_where_all_is_in_micrometres_so_is_what_we_open(window, smear, tmp_path):
    viewer = window(True)
    viewer.add_image(smear, scale=(0.25, 0.25), units=("um", "um"))
    viewer.open_sample(PLUGIN, "he_field")
    pyramid(tmp_path / "slide.tif", smear, resolution=(20000, 20000), resolutionunit=3)
    drop(viewer, tmp_path / "slide.tif")
    assert [str(layer.units[0]) for layer in viewer.layers] == ["micrometer"] * 3
    assert [pixel_size(layer)[0] for layer in viewer.layers] == pytest.approx([0.25, 8.5 / 24, 0.5])
