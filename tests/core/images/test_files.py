"""Image files: what is read, what is refused and how, and that nothing is half-written."""

import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path

import imagecodecs
import numpy as np
import pytest
import tifffile
from PIL import Image

from fuzz.corpus import HOSTILE, SMALL, write_png
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.images import tiff
from napari_beerlanet.core.images.files import IMAGE_SUFFIXES, read_image
from napari_beerlanet.core.images.slide import open_slide

RGB = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)
DEEP = (RGB.astype(np.uint16) << 8) | 7
PLANAR = np.moveaxis(RGB, -1, 0)


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


# --- pixels --------------------------------------------------------------------------------------


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".webp", ".jp2", ".ppm", ".tga", ".tif"])
def test_lossless_formats(tmp_path, suffix):
    path = tmp_path / f"my smear ü{suffix}"
    options = {".webp": {"lossless": True}, ".jp2": {"irreversible": False}}
    Image.fromarray(RGB).save(path, **options.get(suffix, {}))
    image = read_image(path)
    np.testing.assert_array_equal(image.pixels, RGB)
    assert image.pixel_size is None
    assert image.name == path.name


@pytest.mark.parametrize("alpha", [False, True])
def test_deep_png_keeps_its_16_bit(tmp_path, alpha):
    pixels = np.dstack([DEEP, DEEP[..., :1]]) if alpha else DEEP
    path = tmp_path / "deep.png"
    path.write_bytes(imagecodecs.png_encode(pixels))
    read = read_image(path).pixels
    assert read.dtype == np.uint16
    np.testing.assert_array_equal(read, pixels)


def test_deep_jpeg2000_keeps_its_16_bit(tmp_path):
    path = tmp_path / "deep.jp2"
    path.write_bytes(imagecodecs.jpeg2k_encode(DEEP, level=0))
    np.testing.assert_array_equal(read_image(path).pixels, DEEP)


def test_deep_ppm_is_refused_rather_than_cut_down(tmp_path):
    path = tmp_path / "deep.ppm"
    path.write_bytes(b"P6\n31 23\n65535\n" + DEEP.astype(">u2").tobytes())
    with pytest.raises(FileError, match="more than 8 bit"):
        read_image(path)


def test_palette_and_transparency(tmp_path):
    indexed = Image.fromarray(RGB).quantize(16)
    indexed.save(tmp_path / "indexed.png")
    np.testing.assert_array_equal(
        read_image(tmp_path / "indexed.png").pixels, np.asarray(indexed.convert("RGB"))
    )
    indexed.save(tmp_path / "see-through.png", transparency=3)
    pixels = read_image(tmp_path / "see-through.png").pixels
    np.testing.assert_array_equal(pixels[..., 3] == 0, np.asarray(indexed) == 3)
    indexed.save(tmp_path / "indexed.tif")
    np.testing.assert_array_equal(
        read_image(tmp_path / "indexed.tif").pixels, np.asarray(indexed.convert("RGB"))
    )


def test_photograph_is_turned_as_its_exif_says(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # turn by 90 degrees clockwise
    smooth = Image.fromarray(RGB).resize((8, 4)).resize((80, 40), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "turned.jpg", exif=exif, quality=100, subsampling=0)
    read = read_image(tmp_path / "turned.jpg").pixels
    assert read.shape == (80, 40, 3)
    expected = np.rot90(np.asarray(smooth), -1).astype(int)
    assert np.abs(read - expected).mean() < 3


def test_phone_jpeg_with_a_second_picture_is_its_first(tmp_path):
    first, second = Image.new("RGB", (40, 30), (200, 90, 120)), Image.new("RGB", (40, 30))
    first.save(tmp_path / "phone.jpg", format="MPO", save_all=True, append_images=[second])
    assert np.abs(read_image(tmp_path / "phone.jpg").pixels - [200.0, 90, 120]).max() < 4


def test_name_does_not_decide_the_format(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.tif", format="PNG")
    tifffile.imwrite(tmp_path / "b.png", RGB, photometric="rgb")
    for name in ("a.tif", "b.png"):
        np.testing.assert_array_equal(read_image(tmp_path / name).pixels, RGB)


# --- TIFF ----------------------------------------------------------------------------------------

CONTIGUOUS = {"photometric": "rgb"}
SEPARATE = {"photometric": "rgb", "planarconfig": "separate"}


@pytest.mark.parametrize(
    ("pixels", "options"),
    [
        (RGB, CONTIGUOUS),
        (RGB, CONTIGUOUS | {"compression": "lzw", "tile": (16, 16), "predictor": True}),
        (RGB, CONTIGUOUS | {"bigtiff": True, "byteorder": ">"}),
        (DEEP, CONTIGUOUS | {"byteorder": ">"}),
        (DEEP / np.float32(65535), CONTIGUOUS),
        (PLANAR, SEPARATE),
        (PLANAR, SEPARATE | {"ome": True, "metadata": {"axes": "SYX"}}),
        (RGB[:1], CONTIGUOUS),
        (RGB[:, :1], CONTIGUOUS),
        (RGB[:1, :1], CONTIGUOUS | {"ome": True}),
        (np.dstack([RGB, RGB[..., :1]]), CONTIGUOUS | {"extrasamples": ["unassalpha"]}),
    ],
)
def test_tiff_layouts(tmp_path, pixels, options):
    tifffile.imwrite(tmp_path / "a.tif", pixels, **options)
    expected = np.moveaxis(pixels, 0, -1) if pixels.shape[0] == 3 else pixels
    read = read_image(tmp_path / "a.tif").pixels
    np.testing.assert_array_equal(read, expected)


def test_fourth_channel_of_unknown_meaning_is_no_alpha(tmp_path):
    four = np.dstack([RGB, RGB[..., :1]])
    tifffile.imwrite(tmp_path / "a.tif", four, photometric="rgb", extrasamples=["unspecified"])
    np.testing.assert_array_equal(read_image(tmp_path / "a.tif").pixels, RGB)


def test_channels_named_red_green_blue_are_rgb_and_others_are_not(tmp_path):
    for names, path in ((["Red", "Green", "Blue"], "rgb.tif"), (["DAPI", "GFP", "Cy5"], "fl.tif")):
        metadata = {"axes": "CYX", "Channel": {"Name": names}}
        tifffile.imwrite(
            tmp_path / path, PLANAR, ome=True, photometric="minisblack", metadata=metadata
        )
    np.testing.assert_array_equal(read_image(tmp_path / "rgb.tif").pixels, RGB)
    with pytest.raises(FileError, match=r"3 separate channels.*RGB"):
        read_image(tmp_path / "fl.tif")


def test_largest_image_of_several_is_taken(tmp_path):
    with tifffile.TiffWriter(tmp_path / "scan.tif") as file:
        file.write(RGB[:9, :9], photometric="rgb", metadata=None)
        file.write(RGB, photometric="rgb", metadata=None)
    np.testing.assert_array_equal(read_image(tmp_path / "scan.tif").pixels, RGB)


def test_more_pixels_than_are_taken_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(tiff, "MAX_PIXELS", 100)
    tifffile.imwrite(tmp_path / "a.tif", RGB, photometric="rgb")
    with pytest.raises(FileError, match="31 x 23 pixels are more than"):
        read_image(tmp_path / "a.tif")


def test_aperio_slide(shared):
    image = read_image(shared / "data" / "slide" / "CMU-1-Small-Region.svs")
    assert image.pixels.shape == (2967, 2220, 3)
    assert image.pixel_size == (0.499, 0.499)
    assert image.pixels[:50, -50:].min() > 200, "glass is bright: its JPEG is decoded as RGB"


def test_pyramid_is_read_at_full_resolution_and_its_print_size_ignored(shared):
    image = read_image(shared / "data" / "slide" / "slide_pyramid.tiff")
    assert image.pixels.shape == (2500, 2500, 3)
    assert image.pixel_size is None


# --- pixel size ----------------------------------------------------------------------------------


def sized(path: Path, **options) -> tuple[float, float] | None:
    tifffile.imwrite(path, RGB, photometric="rgb", **options)
    return read_image(path).pixel_size


@pytest.mark.parametrize(
    ("x", "y", "unit", "expected"),
    [
        (0.25, 0.5, "µm", (0.5, 0.25)),
        (250, 500, "nm", (0.5, 0.25)),
        (0.00025, 0.0005, "mm", (0.5, 0.25)),
        (1, 1, "pixel", None),
        (0, 0, "µm", None),
    ],
)
def test_pixel_size_from_ome(tmp_path, x, y, unit, expected):
    size = {"PhysicalSizeX": x, "PhysicalSizeY": y}
    units = {"PhysicalSizeXUnit": unit, "PhysicalSizeYUnit": unit}
    found = sized(tmp_path / "a.ome.tif", ome=True, metadata={"axes": "YXS", **size, **units})
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize(
    ("resolution", "unit", "expected"),
    [
        ((40_000, 20_000), "centimeter", (0.5, 0.25)),
        ((25_400, 25_400), "inch", (1.0, 1.0)),
        ((72, 72), "inch", None),
        ((300, 300), "inch", None),
        ((1200, 1200), "inch", None),
        ((40_000, 40_000), "none", None),
        ((0, 0), "centimeter", None),
    ],
)
def test_pixel_size_from_tags_only_where_a_microscope_could_have_it(
    tmp_path, resolution, unit, expected
):
    found = sized(tmp_path / "a.tif", resolution=resolution, resolutionunit=unit)
    assert found == (None if expected is None else pytest.approx(expected))


@pytest.mark.parametrize("unit", ["um", "micron", "\\u00B5m"])
def test_pixel_size_from_imagej(tmp_path, unit):
    tifffile.imwrite(
        tmp_path / "a.tif", RGB, imagej=True, resolution=(4, 2), metadata={"unit": unit}
    )
    assert read_image(tmp_path / "a.tif").pixel_size == pytest.approx((0.5, 0.25))


def test_print_resolution_of_a_picture_is_no_pixel_size(tmp_path):
    Image.fromarray(RGB).save(tmp_path / "a.png", dpi=(25_400, 25_400))
    assert read_image(tmp_path / "a.png").pixel_size is None


# --- what is refused -----------------------------------------------------------------------------


def picture(mode: str) -> Image.Image:
    return Image.fromarray(RGB).convert(mode)


WRONG = {
    "missing.png": (lambda path: None, "there is no such file"),
    "folder.png": (lambda path: path.mkdir(), "a folder"),
    "empty.tif": (lambda path: path.touch(), "empty"),
    "text.jpg": (lambda path: path.write_text("No image."), "not an image of a known format"),
    "grey.png": (lambda path: picture("L").save(path), "grey"),
    "grey.tif": (lambda path: tifffile.imwrite(path, DEEP[..., 0]), "grey"),
    "print.jpg": (lambda path: picture("CMYK").save(path), "CMYK"),
    "print.tif": (lambda path: picture("CMYK").save(path), "CMYK"),
    "video.tif": (
        lambda path: picture("YCbCr").save(path, compression="tiff_lzw"),
        "stored as YCBCR",
    ),
    "stack.tif": (
        lambda path: tifffile.imwrite(path, np.stack([RGB] * 4), photometric="rgb"),
        "a stack of 4 images; save the one you want",
    ),
    "film.gif": (
        lambda path: picture("P").save(path, save_all=True, append_images=[picture("L")]),
        "2 images in one",
    ),
    "dark.tif": (
        lambda path: tifffile.imwrite(path, RGB.astype(np.float32), photometric="rgb"),
        "do not say what white is",
    ),
    "garbage.tif": (lambda path: path.write_bytes(b"II*\0" + bytes(RGB.ravel())), "damaged"),
}


@pytest.mark.parametrize("name", WRONG)
def test_refused_with_a_sentence_that_names_the_file(tmp_path, name):
    make, reason = WRONG[name]
    make(tmp_path / name)
    with pytest.raises(FileError, match=reason) as caught:
        read_image(tmp_path / name)
    message = str(caught.value)
    assert message.startswith(f"{tmp_path / name}: ")
    assert message.endswith(".")
    assert "\n" not in message


@pytest.mark.parametrize("part", [0.1, 0.5, 0.95])
@pytest.mark.parametrize("suffix", [".png", ".jpg", ".bmp", ".webp", ".lzw.tif", ".jpeg.tif"])
def test_truncated_is_refused_and_never_filled_with_black(tmp_path, suffix, part):
    path, big = tmp_path / f"whole{suffix}", np.tile(RGB, (9, 9, 1))
    if suffix.endswith(".tif"):
        compression = suffix.split(".")[1]
        tifffile.imwrite(path, big, photometric="rgb", compression=compression, tile=(64, 64))
    else:
        Image.fromarray(big).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(part * len(content))])
    with pytest.raises(FileError, match=r"damaged or cut short|known format"):
        read_image(path)


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may read everything")
def test_no_permission(tmp_path):
    path = tmp_path / "secret.png"
    Image.fromarray(RGB).save(path)
    path.chmod(0)
    with pytest.raises(FileError, match="no permission to read it"):
        read_image(path)


def test_no_permission_however_it_shows(tmp_path, monkeypatch):
    path = tmp_path / "secret.png"
    Image.fromarray(RGB).save(path)

    def refuse(*_):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr("napari_beerlanet.core.images.files.is_tiff", refuse)
    with pytest.raises(FileError, match="no permission to read it"):
        read_image(path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(FileError, match="not a regular file"):
        read_image(tmp_path / "pipe.png")


def test_suffixes_are_lower_case():
    assert all(s == s.lower() and s.startswith(".") for s in IMAGE_SUFFIXES)


# --- whole or not at all -------------------------------------------------------------------------


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_failed_write_leaves_nothing_and_the_old_file(tmp_path, error):
    path = tmp_path / "a.txt"
    path.write_text("old")

    def write() -> None:
        with atomic_path(path) as unfinished:
            unfinished.write_text("new")
            assert path.read_text() == "old"
            raise error

    with pytest.raises(error):
        write()
    assert path.read_text() == "old"
    assert left_in(tmp_path) == {"a.txt"}


def test_two_writers_do_not_collide(tmp_path):
    path = tmp_path / "a.txt"
    with atomic_path(path) as first, atomic_path(path) as second:
        assert first != second
        assert first.parent == second.parent == tmp_path
        assert first.suffix == ".txt"
        first.write_text("first")
        second.write_text("second")
    assert path.read_text() == "first"
    assert left_in(tmp_path) == {"a.txt"}


def test_folder_replaces_a_full_one(tmp_path):
    path = tmp_path / "a.zarr"

    def write(content: str) -> None:
        with atomic_path(path) as unfinished:
            unfinished.mkdir()
            (unfinished / content).write_text(content)
            if content == "half":
                raise KeyboardInterrupt

    write("old")
    write("new")
    assert left_in(path) == {"new"}
    assert left_in(tmp_path) == {"a.zarr"}
    with pytest.raises(KeyboardInterrupt):
        write("half")
    assert left_in(path) == {"new"}
    assert left_in(tmp_path) == {"a.zarr"}


def test_longest_name_that_a_disk_takes(tmp_path):
    path = tmp_path / ("n" * 251 + ".txt")
    with atomic_path(path) as unfinished:
        unfinished.write_text("x")
    assert path.exists()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("no-places.tif", r"damaged or cut short \(.*0 parts"),
        ("nothing-stored.tif", "out of proportion|0 parts"),
        ("samples.tif", "60000 values per pixel"),
        ("many-pages.tif", "200000 images in one"),
        ("many-sub-images.tif", "2000001 images in one"),
        ("planes.ome.tif", "images in one"),
        ("images.ome.tif", "images in one"),
        ("dimensions.tif", "a shape that no image has"),
        ("not-deflated.tif", "damaged or cut short"),
        ("tile-size.tif", "a tile is larger than the file says"),
        ("rubbish.tif", "a tile is larger than the file says"),
        ("two-in-one.tif", "a tile is larger than the file says"),
        ("png-tile.tif", "a tile is larger than the file says"),
        ("webp-tile.tif", "a tile is larger than the file says"),
        ("lerc-tile.tif", "compressed as LERC"),
        ("jpeg-xr-tile.tif", "compressed as JPEGXR"),
        ("wide-values.tif", "16 values per pixel"),
        ("wide-palette.tif", "a palette, and 16 values per pixel"),
        ("nested.ome.tif", "description is larger"),
        ("entities.ome.tif", "description is larger"),
    ],
)
def test_a_tiff_that_asks_for_more_than_it_has(name, said, tmp_path):
    HOSTILE[name](tmp_path / name)
    with pytest.raises(FileError, match=said):
        read_image(tmp_path / name)
    with pytest.raises(FileError, match=said), open_slide(tmp_path / name) as slide:
        np.asarray(slide.levels[-1][:64, :64])


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("loops/1000-0-500.tif", "pages or tags share"),
        ("values/4000-10000-4.tif", "pages or tags share"),
        ("overlapping/3000-12-2000.tif", "pages or tags share"),
        ("same/zstd-512-60.tif", "out of proportion|more than the 400 million"),
        ("same/deflate-512-40.tif", "the same bytes|more than the 400 million"),
        ("chunks/zstd-14000.tif", "out of proportion"),
        ("precincts/1000-0-0.jp2", "more parts than bytes"),
        ("precincts/2500-0-0.tif", "more parts than bytes"),
        ("passes/500-20000-False.jpg", "more than 50 passes"),
        ("passes of a tile/64-40000-False.tif", "more than 50 passes"),
        ("runs/9000-9000-8.bmp", "out of proportion"),
    ],
)
def test_a_small_file_that_asks_for_much(name, said, tmp_path):
    family, file = name.split("/")
    SMALL[family][file](path := tmp_path / file)
    with pytest.raises(FileError, match=said):
        read_image(path)
    with pytest.raises(FileError, match=said), open_slide(path) as slide:
        np.asarray(slide.levels[-1][:64, :64])


@pytest.mark.parametrize("compression", ["deflate", "lzw", "jpeg", "jpeg2000", "webp"])
def test_blank_glass_is_no_bomb(tmp_path, compression):
    """Blank tiles compress to a thousandth and less; of a slide they may even share their bytes."""
    path, blank = tmp_path / "a.tif", np.full((6144, 6144, 3), 243, np.uint8)
    options = {"photometric": "rgb", "tile": (512, 512), "compression": compression}
    tifffile.imwrite(path, blank, **options)
    with open_slide(path) as slide:
        assert np.asarray(slide.levels[0][:64, :64]).min() > 240
    assert read_image(path).pixels.shape == blank.shape


@pytest.mark.parametrize("compression", ["png", "webp", "jpeg", "jpeg2000"])
def test_tiles_that_are_files_of_their_own(tmp_path, compression):
    image = np.full((96, 128, 3), 200, np.uint8)
    options = {"photometric": "rgb", "tile": (64, 64), "compression": compression}
    tifffile.imwrite(path := tmp_path / "a.tif", image, **options)
    assert abs(read_image(path).pixels.astype(int) - image).max() < 4


@pytest.mark.parametrize("name", ["a_MMStack_1.tif", "NDTiff.index"])
@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no named pipes on this system")
def test_a_micromanager_tiff_is_opened_alone(tmp_path, name):
    """Of its parts and its index, which lie beside it, one may be a pipe that nobody writes to."""
    version = 0 if "Stack" in name else 3
    about = {"MajorVersion": version, "Summary": {"Prefix": "a"}, "IndexMap": []}
    path = tmp_path / "a_MMStack_0.tif"
    tags = [(51123, "s", 0, json.dumps(about), True)]
    image = np.zeros((32, 32, 3), np.uint8)
    tifffile.imwrite(path, image, photometric="rgb", extratags=tags, metadata=None)
    os.mkfifo(tmp_path / name)
    assert not read_image(path).pixels.any()


def resident_bytes(field: str) -> int:
    """Of this process, now ("VmRSS") or at its peak ("VmHWM")."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(field))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux says what it took")
def test_a_picture_is_not_copied_whole(tmp_path):
    """No more than one copy beside the result."""
    write_png(8000, 8000)(path := tmp_path / "large.png")
    Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
    before = resident_bytes("VmRSS")
    pixels = read_image(path).pixels
    assert resident_bytes("VmHWM") - before - pixels.nbytes < 1.5 * pixels.nbytes


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("narrow.png", "1 x 170000000 pixels are too long and narrow"),
        ("scans.jpg", "more than 50 passes"),
        ("digits.ppm", "a PPM in digits"),
    ],
)
def test_a_picture_that_costs_more_than_it_shows(name, said, tmp_path):
    HOSTILE[name](tmp_path / name)
    with pytest.raises(FileError, match=said):
        read_image(tmp_path / name)


@pytest.mark.parametrize("suffix", [".jp2", ".webp", ".jpg"])
def test_formats_whose_decoders_need_much_memory_have_fewer_pixels(tmp_path, suffix, monkeypatch):
    path = tmp_path / f"a{suffix}"
    Image.new("RGB", (480, 480)).save(path, progressive=True)
    size = path.stat().st_size
    for pixel, refused in ((3, True), (7, False)):
        monkeypatch.setattr(tiff.check_proportion, "__defaults__", ((pixel * 480**2, 1),))
        with pytest.raises(FileError, match="out of proportion") if refused else nullcontext():
            read_image(path)
    assert size < 2 * 480**2


def test_a_tiff_does_not_open_what_it_names(tmp_path):
    """OME-XML names further files, which may be anywhere, or a pipe that nobody writes to."""
    image = np.zeros((32, 32, 3), np.uint8)
    space = "http://www.openmicroscopy.org/Schemas/OME/2016-06"
    text = (
        f'<OME xmlns="{space}" UUID="urn:uuid:1"><Image ID="I"><Pixels ID="P" Type="uint8" '
        'DimensionOrder="XYCZT" SizeX="32" SizeY="32" SizeC="3" SizeZ="1" SizeT="1"><Channel '
        'ID="C" SamplesPerPixel="3"/><TiffData><UUID FileName="other.tif">urn:uuid:2</UUID>'
        "</TiffData></Pixels></Image></OME>"
    )
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", description=text, metadata=None)
    tifffile.imwrite(tmp_path / "other.tif", image + 9, photometric="rgb")
    assert not read_image(tmp_path / "a.tif").pixels.any()
