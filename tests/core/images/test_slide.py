"""Slide files as lazy pyramids, whole, odd and broken ones; and the reader for napari."""

import sys
import types

import numpy as np
import pytest
import tifffile
from dask.callbacks import Callback
from PIL import Image

from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.storage import FileError, file_stamp
from napari_beerlanet.core.images import pyramid, tiff
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.pyramid import read_region
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.images.slide import is_slide, open_slide
from napari_beerlanet.core.images.tissue import BORDER, TISSUE, find_tissue
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.slide import decompose_slide
from napari_beerlanet.core.stains.slide_pixels import SlidePixels
from napari_beerlanet.samples import he_field
from napari_beerlanet.ui.io.slide_reader import get_reader


@pytest.fixture(scope="module")
def image():
    return he_field((700, 900), seed=4).image


def write_pyramid(path, image, **options):
    """An OME-TIFF with two levels of 0.5 µm per pixel."""
    with tifffile.TiffWriter(path, ome=True) as tif:
        size = {"PhysicalSizeX": 0.5, "PhysicalSizeXUnit": "µm"}
        size |= {"PhysicalSizeY": 0.5, "PhysicalSizeYUnit": "µm"}
        shared = {"tile": (128, 128), "photometric": "rgb", **options}
        tif.write(image, subifds=1, metadata={"axes": "YXS", **size}, **shared)
        tif.write(image[::2, ::2], subfiletype=1, **shared)
    return path


def test_a_pyramid_is_read_level_by_level(image, tmp_path):
    with open_slide(write_pyramid(tmp_path / "a.ome.tif", image, compression="zlib")) as slide:
        assert [level.shape for level in slide.levels] == [(700, 900, 3), (350, 450, 3)]
        assert slide.pixel_size == (0.5, 0.5)
        assert slide.shape == (700, 900)
        np.testing.assert_array_equal(
            read_region(slide.levels[0], Rectangle.from_edges(20, 100, 701, 400)),
            image[100:400, 20:701],
        )
        np.testing.assert_array_equal(slide.dask()[1].compute(), image[::2, ::2])


@pytest.mark.parametrize(
    "options",
    [
        {"planarconfig": "separate"},
        {"rowsperstrip": 64},
        {"tile": (256, 128), "compression": "deflate"},
        {"bigtiff": True, "tile": (64, 64)},
    ],
)
def test_layouts_of_tiff(image, tmp_path, options):
    data = np.moveaxis(image, 2, 0) if "planarconfig" in options else image
    tifffile.imwrite(tmp_path / "a.tif", data, photometric="rgb", **options)
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.levels[0].shape == image.shape
        np.testing.assert_array_equal(np.asarray(slide.levels[0][13:600]), image[13:600])


@pytest.mark.parametrize("kind", ["unassalpha", "unspecified"])
def test_a_fourth_channel_counts_if_it_is_alpha(image, tmp_path, kind):
    four = np.dstack([image, image[..., :1]])
    tifffile.imwrite(
        tmp_path / "a.tif", four, photometric="rgb", extrasamples=[kind], tile=(64, 64)
    )
    with open_slide(tmp_path / "a.tif") as slide:
        assert slide.levels[0].shape[2] == (4 if kind == "unassalpha" else 3)


def test_pictures_are_slides_too(image, tmp_path):
    Image.fromarray(image).save(tmp_path / "a.png")
    slide = open_slide(tmp_path / "a.png")
    np.testing.assert_array_equal(slide.levels[0], image)


def test_a_large_image_without_levels_gets_some(tmp_path, monkeypatch):
    monkeypatch.setattr(pyramid, "_OVERVIEW_SIZE", 32)
    image = np.random.default_rng(0).integers(0, 255, (1000, 700, 3), np.uint8)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", tile=(128, 128))
    with open_slide(tmp_path / "a.tif") as slide:
        sides = [level.shape[0] for level in slide.levels]
        assert sides == [1000, 250, 63]
        np.testing.assert_array_equal(slide.dask()[1], image[::4, ::4])
        np.testing.assert_array_equal(slide.levels[2], image[::16, ::16])
        assert len(decompose_slide(slide.levels, iterations=2).pyramid(0)) == 3


def test_streamed_from_a_file_as_in_memory(image, tmp_path):
    with open_slide(write_pyramid(tmp_path / "a.ome.tif", image)) as slide:
        found = decompose_slide(slide.levels, iterations="converge")
    np.testing.assert_array_equal(
        found.fit.spectra, decompose(image, iterations="converge").spectra
    )


# --- real ones -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["CMU-1-Small-Region.svs", "slide_pyramid.tiff"])
def test_real_slides(shared, name):
    path = shared / "data" / "slide" / name
    with open_slide(path) as slide, tifffile.TiffFile(path) as tif:
        right = tif.series[0].asarray()
        np.testing.assert_array_equal(
            read_region(slide.levels[0], Rectangle.from_edges(300, 0, 900, 700)),
            right[:700, 300:900],
        )
        found = decompose_slide(slide.levels, iterations="converge")
    np.testing.assert_array_equal(
        found.fit.spectra, decompose(right, iterations="converge").spectra
    )
    assert found.fit.active.sum() == 2


def test_the_svs_knows_its_pixel_size(shared):
    with open_slide(shared / "data" / "slide" / "CMU-1-Small-Region.svs") as slide:
        assert slide.pixel_size == pytest.approx((0.499, 0.499))


# --- what cannot be used -------------------------------------------------------------------------


def test_a_file_cut_short(image, tmp_path):
    whole = write_pyramid(tmp_path / "a.ome.tif", image).read_bytes()
    for share in (0.0, 0.3, 0.8):
        (tmp_path / "b.tif").write_bytes(whole[: round(share * len(whole))])
        with pytest.raises(FileError, match=r"b\.tif: (the file is empty|damaged or cut short)"):
            open_slide(tmp_path / "b.tif")


@pytest.mark.parametrize(
    ("pixels", "options", "said"),
    [
        (np.zeros((64, 64), np.uint8), {}, "a grey image has no colours"),
        (np.zeros((3, 64, 64, 3), np.uint8), {"photometric": "rgb"}, "a stack of 3 images"),
        (np.zeros((64, 64, 4), np.uint8), {"photometric": "separated"}, "stored as CMYK"),
    ],
)
def test_odd_files_are_told_in_one_sentence(tmp_path, pixels, options, said):
    tifffile.imwrite(tmp_path / "a.tif", pixels, **options)
    with pytest.raises(FileError, match=said) as error:
        open_slide(tmp_path / "a.tif")
    assert "\n" not in str(error.value)


def test_what_is_no_image(tmp_path):
    (tmp_path / "a.svs").write_bytes(b"II*\0 and nothing else")
    (tmp_path / "b.svs").write_text("words")
    for name in ("a.svs", "b.svs", "none.svs"):
        with pytest.raises(FileError, match=name):
            open_slide(tmp_path / name)
    with pytest.raises(FileError, match="a folder"):
        open_slide(tmp_path)


def test_one_piece_too_large(image, tmp_path, monkeypatch):
    monkeypatch.setattr(tiff, "_MAX_CHUNK_BYTES", 3000)
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb")
    with pytest.raises(FileError, match="save it in tiles"):
        open_slide(tmp_path / "a.tif")


def test_a_header_that_claims_more_than_the_file_has(image, tmp_path):
    """Four thousand million pixels to a side, of which a few hundred are there."""
    path = tmp_path / "a.tif"
    tifffile.imwrite(path, image, photometric="rgb", tile=(64, 64))
    with tifffile.TiffFile(path, mode="r+b") as file:
        for name in ("ImageWidth", "ImageLength"):
            file.pages[0].tags[name].overwrite(4_000_000_000, dtype="I")
    with pytest.raises(FileError, match=r"4000000000 x 4000000000 pixels, of which the file has"):
        open_slide(path)
    with pytest.raises(FileError, match=r"a\.tif"):
        read_image(path)


# --- other readers -------------------------------------------------------------------------------


class FakeSlide:
    """As openslide gives them: what the scanner left out is transparent black."""

    level_count, level_downsamples = 2, (1.0, 2.0)
    properties = {"openslide.mpp-x": "0.25", "openslide.mpp-y": "0.3"}  # noqa: RUF012

    def __init__(self, path):
        if not path.endswith(".mrxs"):
            raise OSError("unknown")
        self.image = Image.fromarray(he_field((300, 400), seed=1).image).convert("RGBA")
        if "partly" in path:
            hole = Image.new("RGBA", (400, 300))
            hole.paste(self.image.crop((160, 100, 320, 260)), (160, 100))
            self.image = hole
        self.level_dimensions = ((400, 300), (200, 150))

    def read_region(self, corner, level, size):
        step = 2**level
        whole = self.image.resize(self.level_dimensions[level], Image.Resampling.NEAREST)
        x, y = corner[0] // step, corner[1] // step
        return whole.crop((x, y, x + size[0], y + size[1]))

    def close(self):
        pass


@pytest.fixture
def openslide(monkeypatch):
    fake = types.ModuleType("openslide")
    fake.OpenSlide = FakeSlide
    monkeypatch.setitem(sys.modules, "openslide", fake)


def test_openslide_reads_what_tifffile_cannot(openslide, tmp_path):
    (tmp_path / "a.mrxs").write_text("odd")
    with open_slide(tmp_path / "a.mrxs") as slide:
        assert slide.pixel_size == (0.3, 0.25)
        right = he_field((300, 400), seed=1).image
        shown = slide.levels[0][30:90, 7:99]
        np.testing.assert_array_equal(shown[..., :3], right[30:90, 7:99])
        assert (shown[..., 3] == 255).all()
        assert slide.dask()[1].compute().shape == (150, 200, 4)
    (tmp_path / "b.tif").write_bytes(b"II*\0")
    with pytest.raises(FileError, match=r"b\.tif"):
        open_slide(tmp_path / "b.tif")


def test_what_the_scanner_left_out_is_not_black(openslide, tmp_path):
    """It weighs nothing, is no tissue, and is padding to a network."""
    (tmp_path / "partly.mrxs").write_text("odd")
    scanned = he_field((300, 400), seed=1).image[100:260, 160:320]
    with open_slide(tmp_path / "partly.mrxs") as slide:
        found = decompose_slide(slide.levels, iterations="converge")
        tissue = find_tissue(slide.levels)
        pixels = SlidePixels(slide.levels)[:, :]
    assert found.counted == scanned[..., 0].size
    right = decompose(scanned, iterations="converge")
    np.testing.assert_allclose(found.fit.light, right.light, atol=0.005)
    assert found.fit.active.sum() == right.active.sum() == 2
    outside = np.ones(tissue.kind.shape, bool)
    outside[98:262, 158:322] = False
    assert (tissue.kind[outside] == BORDER).all()
    assert (tissue.kind[~outside] == TISSUE).any()
    np.testing.assert_array_equal(pixels[100:260, 160:320], scanned)
    assert (pixels[:100] == PADDING_GREY).all()


# --- napari --------------------------------------------------------------------------------------


def test_napari_gets_a_multiscale_layer(image, tmp_path):
    path = write_pyramid(tmp_path / "a.ome.tif", image)
    ((levels, settings, kind),) = get_reader(str(path))(str(path))
    assert kind == "image"
    assert [level.shape for level in levels] == [(700, 900, 3), (350, 450, 3)]
    assert settings["multiscale"]
    assert settings["rgb"]
    stamp = {"opened_file": file_stamp(path)}
    assert settings["metadata"] == {"pixel_size_um": (0.5, 0.5), "path": str(path), **stamp}
    assert not {"scale", "units"} & set(settings)
    from napari.layers import Image as Layer

    layer = Layer(levels, **settings)
    assert layer.data.shapes[0] == (700, 900, 3)


def test_what_is_no_slide_is_left_to_others(image, tmp_path):
    assert get_reader("a.png") is None
    assert get_reader([]) is None
    assert get_reader("missing.tif") is None
    stack = np.arange(5 * 64 * 60, dtype=np.uint16).reshape(5, 64, 60)
    tifffile.imwrite(tmp_path / "stack.tif", stack)
    tifffile.imwrite(tmp_path / "field.tif", image, photometric="rgb", tile=(64, 64))
    (tmp_path / "broken.tif").write_bytes(b"II*\0")
    for name in ("stack.tif", "field.tif", "broken.tif"):
        assert not is_slide(tmp_path / name)
        assert get_reader(str(tmp_path / name)) is None
    slide = str(write_pyramid(tmp_path / "a.tif", image))
    assert get_reader([slide, slide]) is not None
    assert get_reader([slide, str(tmp_path / "field.tif")]) is None


def test_a_scanners_file_that_is_no_slide_is_opened_as_napari_does(tmp_path):
    """So that a user may have napari remember this plugin for all .qptiff."""
    from napari_builtins.io import napari_get_reader

    stack = np.arange(5 * 64 * 60, dtype=np.uint16).reshape(5, 64, 60)
    path = str(tmp_path / "stack.qptiff")
    tifffile.imwrite(path, stack)
    ours, its = get_reader(path)(path), napari_get_reader(path)(path)
    assert [layer[1:] for layer in ours] == [layer[1:] for layer in its]
    np.testing.assert_array_equal(ours[0][0], stack)


def test_a_small_picture_is_read_at_once(image, tmp_path):
    path = str(tmp_path / "a.svs")
    tifffile.imwrite(path, image, photometric="rgb", resolution=(20000, 20000), resolutionunit=3)
    ((pixels, settings, _),) = get_reader(path)(path)
    np.testing.assert_array_equal(pixels, image)
    assert isinstance(pixels, np.ndarray)
    assert settings["metadata"]["pixel_size_um"] == (0.5, 0.5)


def test_regions_are_read_past_a_cache_of_chunks(image, tmp_path):
    """As napari's, which threads share without a lock: one that drops a chunk fails another."""
    tifffile.imwrite(tmp_path / "a.tif", image, tile=(64, 64))

    class Failing(Callback):
        def _start(self, dsk):
            raise KeyError(next(iter(dsk)))

    with open_slide(tmp_path / "a.tif") as slide, Failing():
        level = slide.dask()[0]
        height, width = image.shape[:2]
        pixels = read_region(level, Rectangle(0, 0, width, height))
        np.testing.assert_array_equal(pixels, image)
