"""Which layers fit, and which pixels of them are meant."""

import os

import dask.array as da
import numpy as np
import pytest
import tifffile
import zarr
from napari.components import ViewerModel
from napari.layers import Image, Labels, Points

from napari_beerlanet.core.common.storage import file_stamp
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.ui.io.slide_reader import read_slides
from napari_beerlanet.ui.viewer.planes import (
    Plane,
    SlideCache,
    all_planes,
    colour_images,
    current_plane,
    pixel_size,
    placement_kwargs,
    unsupported_reason,
)
from napari_beerlanet.ui.viewer.viewport import visible_window


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(8, 9, 3), (8, 9, 4), (2, 8, 9, 3), (2, 5, 8, 9, 4)])
def test_colour_images_fit(shape, dtype):
    assert unsupported_reason(Image(np.zeros(shape, dtype), rgb=True)) is None


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        (None, "no image"),
        (Image(np.zeros((8, 9), np.uint8), name="grey"), "“grey” has no colours"),
        (Image(np.zeros((3, 8, 9), np.uint8), name="stack"), "“stack” has no colours"),
        (Labels(np.zeros((8, 9), int), name="cells"), "“cells” is a labels layer"),
        (Points(np.zeros((2, 2)), name="dots"), "“dots” is a points layer"),
        (Image(np.zeros((8, 9, 3), np.int32), rgb=True, name="wide"), "holds int32 values"),
    ],
)
def test_others_are_refused_by_name(layer, said):
    assert said in unsupported_reason(layer)


def test_only_fitting_layers_are_offered():
    viewer = ViewerModel()
    viewer.add_image(np.zeros((8, 9)))
    colour = viewer.add_image(np.zeros((8, 9, 3), np.uint8), rgb=True)
    viewer.add_labels(np.zeros((8, 9), int))
    assert colour_images(viewer) == [colour]


def numbered(shape):
    """A stack each of whose planes has its number as colour."""
    planes = np.arange(int(np.prod(shape[:-3])), dtype=np.uint8).reshape(shape[:-3])
    return np.broadcast_to(planes[..., None, None, None], shape).copy()


@pytest.mark.parametrize("kind", [np.asarray, da.from_array, zarr.array])
def test_the_plane_that_the_sliders_show(kind):
    viewer = ViewerModel()
    layer = viewer.add_image(
        kind(numbered((4, 5, 8, 9, 3))), rgb=True, scale=(2, 0.5, 1, 1), translate=(1, 0, 0, 0)
    )
    viewer.dims.set_point(0, 1 + 2 * 3)
    viewer.dims.set_point(1, 0.5 * 2)
    plane = current_plane(layer, viewer)
    assert plane.index == (3, 2)
    assert plane.shape == (8, 9)
    assert (plane.read() == 3 * 5 + 2).all()
    assert plane.read((slice(1, 3), slice(0, 4))).shape == (2, 4, 3)


def test_all_planes_in_order():
    layer = Image(numbered((2, 3, 4, 5, 3)), rgb=True)
    assert [int(plane.read()[0, 0, 0]) for plane in all_planes(layer)] == list(range(6))
    assert len(all_planes(Image(np.zeros((4, 5, 3), np.uint8), rgb=True))) == 1


def test_the_finest_level_of_a_multiscale_layer_and_one_that_fits():
    levels = [np.full((64 // 2**k, 96 // 2**k, 3), k, np.uint8) for k in range(3)]
    plane = current_plane(Image(levels, multiscale=True, rgb=True), ViewerModel())
    assert plane.shape == (64, 96)
    assert (plane.read() == 0).all()
    assert [plane.level_for(n) for n in (10_000, 6143, 1000, 10)] == [0, 1, 2, 2]


def test_only_what_is_asked_for_is_read():
    read = []

    def block(block_info=None):
        read.append(block_info[None]["chunk-location"])
        return np.zeros((10, 10, 3), np.uint8)

    big = da.map_blocks(block, chunks=((10,) * 100, (10,) * 100, (3,)), dtype=np.uint8)
    plane = Plane("slide", (big,))
    assert plane.shape == (1000, 1000)
    plane.read((slice(15, 25), slice(0, 10)))
    assert sorted({place[:2] for place in read}) == [(1, 0), (2, 0)]


def test_an_empty_window_is_refused():
    plane = Plane("slide", (np.zeros((8, 9, 3), np.uint8),))
    with pytest.raises(ImageError, match="“slide”: the requested part is empty"):
        plane.read((slice(3, 3), slice(0, 9)))


# --- in view -------------------------------------------------------------------------------------


def looking(layer_options, centre, zoom, size=(100, 200)):
    """A viewer on an image of 400 × 600, and its layer."""
    viewer = ViewerModel()
    layer = viewer.add_image(np.zeros((400, 600, 3), np.uint8), **layer_options)
    viewer.canvas.size = size
    viewer.scene.camera.center, viewer.scene.camera.zoom = centre, zoom
    return layer, viewer


def test_the_window_in_view():
    assert visible_window(*looking({}, (200, 300), 1)) == (slice(150, 251), slice(200, 401))
    assert visible_window(*looking({}, (200, 300), 2)) == (slice(175, 226), slice(250, 351))


def test_the_window_is_clipped_to_the_image():
    assert visible_window(*looking({}, (0, 0), 1)) == (slice(0, 51), slice(0, 101))
    assert visible_window(*looking({}, (200, 300), 0.01)) == (slice(0, 400), slice(0, 600))


def test_a_view_outside_the_image_is_none():
    assert visible_window(*looking({}, (-300, 300), 1)) is None


def test_scale_translate_and_rotation_count():
    options = {"scale": (0.5, 0.5), "translate": (10, 20)}
    rows, columns = visible_window(*looking(options, (10 + 50, 20 + 50), 2))
    assert (rows, columns) == (slice(50, 151), slice(0, 201))
    layer, viewer = looking({"rotate": 90}, (0, 0), 1)
    viewer.scene.camera.center = layer.data_to_world((200, 300))
    rows, columns = visible_window(layer, viewer)
    assert (rows.stop - rows.start, columns.stop - columns.start) == (201, 101)


def test_units_other_than_the_viewers():
    viewer = ViewerModel()
    viewer.add_image(np.zeros((10, 10)), units=("mm", "mm"))
    layer = viewer.add_image(np.zeros((400, 600, 3), np.uint8), units=("um", "um"))
    viewer.canvas.size = (100, 200)
    unit = viewer.dims.units[0]
    factor = (1 * layer.units[0]).to(unit).magnitude
    viewer.scene.camera.center, viewer.scene.camera.zoom = (200 * factor, 300 * factor), 1 / factor
    rows, columns = visible_window(layer, viewer)
    assert abs(rows.start - 150) <= 1
    assert abs(columns.stop - 401) <= 1


@pytest.mark.parametrize(
    ("scale", "units", "size"),
    [
        ((0.5, 0.25), ("um", "um"), (0.5, 0.25)),
        ((1e-3, 2e-3), ("mm", "mm"), (1.0, 2.0)),
        ((250, 250), ("nm", "nm"), (0.25, 0.25)),
        ((0.5, 0.5), ("pixel", "pixel"), None),
        ((0.5, 0.5), None, None),
        ((-0.5, 0.5), ("um", "um"), (0.5, 0.5)),
    ],
)
def test_pixel_size(scale, units, size):
    found = pixel_size(Image(np.zeros((4, 5, 3), np.uint8), rgb=True, scale=scale, units=units))
    assert found == (pytest.approx(size) if size else None)


@pytest.mark.parametrize(
    ("stated", "size"),
    [
        ((0.5, 0.25), (0.5, 0.25)),
        ([0.5, 0.25], (0.5, 0.25)),
        (0.5, (0.5, 0.5)),
        ((0, 0.5), None),
        ((np.nan, 1), None),
        ((1, 2, 3), None),
        ("small", None),
        (None, None),
    ],
)
def test_the_pixel_size_of_an_image_in_pixels_is_in_its_metadata(stated, size):
    layer = Image(np.zeros((4, 5, 3), np.uint8), rgb=True, metadata={"pixel_size_um": stated})
    assert pixel_size(layer) == size
    layer.scale, layer.units = (2, 2), ("um", "um")  # the user's own word
    assert pixel_size(layer) == (2, 2)


def test_an_image_is_placed_in_the_units_of_those_that_are_open():
    viewer, size = ViewerModel(), (0.5, 0.25)
    in_pixels = {"metadata": {"pixel_size_um": size}}
    in_lengths = in_pixels | {"scale": size, "units": ("um", "um")}
    assert placement_kwargs(None, viewer) == {}
    assert placement_kwargs(size, None) == in_pixels
    assert placement_kwargs(size, viewer) == in_pixels
    viewer.add_image(np.zeros((9, 10, 10)), units=("s", "mm", "mm"))
    assert placement_kwargs(size, viewer) == in_lengths
    viewer.add_image(np.zeros((10, 10)))
    assert placement_kwargs(size, viewer) == in_pixels


@pytest.mark.skipif(os.name == "nt", reason="what is open cannot be replaced")
def test_results_are_of_the_file_that_was_opened_not_of_one_that_took_its_place(tmp_path):
    """The layer still shows the pixels of the first."""
    path, viewer = tmp_path / "slide.svs", ViewerModel()

    def opened():
        data, settings, _ = read_slides(path)[0]
        layer = Image(data, **settings)
        return SlideCache().entry(layer, current_plane(layer, viewer)).source

    def write(name, grey):
        pixels = np.full((64, 64, 3), grey, np.uint8)
        tifffile.imwrite(tmp_path / name, pixels, photometric="rgb", tile=(32, 32))

    write(path.name, 10)
    first = file_stamp(path)
    data, settings, _ = read_slides(path)[0]
    layer = Image(data, **settings)
    write("other", 200)
    os.utime(tmp_path / "other", ns=(0, first["mtime_ns"] + 10**9))
    os.replace(tmp_path / "other", path)
    entry = SlideCache().entry(layer, current_plane(layer, viewer))
    assert entry.source["mtime_ns"] == first["mtime_ns"]
    assert opened()["mtime_ns"] == first["mtime_ns"] + 10**9
