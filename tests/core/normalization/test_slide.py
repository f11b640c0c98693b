"""Normalization of slides: lazily, from the statistics of their tissue; and as a study."""

import json

import dask.array as da
import numpy as np
import pytest
import tifffile
from PIL import Image

from napari_beerlanet.cli.main import main
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.slide import open_slide
from napari_beerlanet.core.normalization.methods import fitted_normalizer, load_normalizer
from napari_beerlanet.core.normalization.normalizer import Normalizer, NormalizerError, Target
from napari_beerlanet.core.normalization.slide import normalize_slide
from napari_beerlanet.samples import he_field, photograph

SIDE = 1100


@pytest.fixture(scope="module")
def template():
    return photograph("H&E section")[:200, :200].copy()


@pytest.fixture(scope="module")
def pixels():
    return he_field((SIDE, SIDE), seed=5, shift=0.8).image


@pytest.fixture(scope="module")
def macenko(template):
    return fitted_normalizer("macenko", template)


def test_a_slide_is_normalized_as_the_image_in_memory(pixels, macenko):
    levels = [da.from_array(pixels, chunks=(300, 256, 3)), pixels[::4, ::4]]
    done = normalize_slide(levels, macenko, leave_out=())
    wanted = macenko.apply(pixels)
    assert [level.shape for level in done.levels] == [(SIDE, SIDE, 3), (275, 275, 3)]
    assert done.levels[0].dtype == np.uint8
    np.testing.assert_array_equal(done.levels[0].compute(), wanted.rgb)
    np.testing.assert_array_equal(done.levels[1].compute(), wanted.rgb[::4, ::4])
    np.testing.assert_array_equal(done.before.stains, wanted.before.stains)


def test_a_colour_that_was_never_counted_is_mapped_alike(pixels, macenko):
    blurred = np.asarray(Image.fromarray(pixels).resize((137, 137), Image.Resampling.BOX))
    coarse = normalize_slide([pixels, blurred], macenko, leave_out=()).levels[1].compute()
    from napari_beerlanet.core.stains.palette import palette_of

    colour_map = macenko.colour_map(palette_of(pixels.reshape(-1, 3)))
    np.testing.assert_array_equal(coarse.reshape(-1, 3), colour_map(blurred.reshape(-1, 3)))


def test_empty_glass_does_not_change_a_slides_statistics(pixels, macenko):
    framed = np.full((3 * SIDE, 2 * SIDE, 3), 243, np.uint8)
    framed[:SIDE, :SIDE] = pixels
    alone = macenko.apply(pixels).before
    with_glass = macenko.apply(framed).before
    on_slide = normalize_slide(framed, macenko).before
    error, as_image = (
        np.abs(a.strengths / alone.strengths - 1).max() for a in (on_slide, with_glass)
    )
    assert error < 0.1
    assert error < as_image / 2


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_slides_of_other_types(pixels, macenko, dtype):
    small = pixels[:300, :300]
    given = (small * np.asarray(257 if dtype == np.uint16 else 1 / 255)).astype(dtype)
    done = normalize_slide(da.from_array(given, chunks=(128, 128, 3)), macenko, leave_out=())
    found = done.levels[0].compute()
    assert found.dtype == dtype
    np.testing.assert_array_equal(found, macenko.apply(given).rgb)


def test_alpha_of_a_slide_is_kept(pixels, macenko):
    alpha = np.full((SIDE, SIDE, 1), 255, np.uint8)
    alpha[:20] = 0
    given = np.concatenate([pixels, alpha], axis=2)
    found = normalize_slide(given, macenko, leave_out=()).levels[0].compute()
    np.testing.assert_array_equal(found[..., 3], given[..., 3])
    np.testing.assert_array_equal(found, macenko.apply(given).rgb)


def test_a_slide_of_background_stays_as_it_is(macenko):
    blank = np.random.default_rng(0).integers(238, 244, (600, 600, 3)).astype(np.uint8)
    done = normalize_slide(blank, macenko)
    assert done.unchanged
    assert "almost only background" in done.notes[0]
    np.testing.assert_array_equal(done.levels[0].compute(), blank)


def test_what_looks_at_neighbours_does_not_run_on_slides(pixels):
    class Neighbours(Target):
        colour_only = False
        colour_map = None

    with pytest.raises(NormalizerError, match="more than a pixel's colour"):
        normalize_slide(pixels, Normalizer("neighbours", Neighbours()))


# --- the command ---------------------------------------------------------------------------------


@pytest.fixture
def folder(tmp_path, pixels, template):
    Image.fromarray(pixels[:200, :200]).save(tmp_path / "a.png")
    Image.fromarray(np.full((50, 60, 3), 250, np.uint8)).save(tmp_path / "white.png")
    (tmp_path / "broken.png").write_bytes(b"not an image")
    Image.fromarray(template).save(tmp_path / "template.jpg", quality=95)
    return tmp_path


def run(folder, *more, images=("a.png", "white.png", "broken.png"), method="macenko"):
    names = [str(folder / name) for name in images]
    given = ["normalize", *names, "--out", str(folder / "out"), "--method", method, "--quiet"]
    return main([*given, *more])


def test_the_command_normalizes_lists_failures_and_resumes(folder, capsys):
    reference = ("--reference", str(folder / "template.jpg"))
    assert run(folder, *reference) == 1
    said = capsys.readouterr()
    assert "2 done, 0 skipped, 1 failed" in said.out
    assert "broken.png: not an image" in said.err
    out = folder / "out"
    image = read_image(folder / "a.png").pixels
    normalizer = fitted_normalizer("macenko", folder / "template.jpg")
    written = read_image(out / "a.normalized.ome.tiff").pixels
    np.testing.assert_array_equal(written, normalizer.apply(image).rgb)
    record = json.loads((out / "a.normalized.json").read_text())
    assert record["unchanged"] is False
    np.testing.assert_allclose(record["after"]["stains"], normalizer.state()[0]["stains"].T)
    white = json.loads((out / "white.normalized.json").read_text())
    assert white["unchanged"] is True
    assert "one colour only" in white["notes"][0]
    stamp = (out / "a.normalized.ome.tiff").stat().st_mtime_ns
    assert run(folder, *reference) == 1
    assert "0 done, 2 skipped, 1 failed" in capsys.readouterr().out
    assert (out / "a.normalized.ome.tiff").stat().st_mtime_ns == stamp
    # Another method, or another template, is another result, and stands alone; others stay.
    (out / "a.spectra.json").write_text("{}")
    more = ("--format", "png")
    assert run(folder, *reference, *more, images=["a.png"], method="reinhard") == 0
    assert "1 done" in capsys.readouterr().out
    assert (out / "a.normalized.png").is_file()
    assert not (out / "a.normalized.ome.tiff").exists()
    assert (out / "a.spectra.json").is_file()


def test_a_saved_normalizer_is_a_reference(folder, capsys):
    saved = folder / "lab.safetensors"
    given = ("--reference", str(folder / "template.jpg"), "--save-normalizer", str(saved))
    assert run(folder, *given, "--format", "png", images=["a.png"]) == 0
    first = (folder / "out" / "a.normalized.png").read_bytes()
    assert load_normalizer(saved).method == "macenko"
    (folder / "template.jpg").unlink()
    again = ("--reference", str(saved), "--format", "png", "--overwrite")
    assert run(folder, *again, images=["a.png"]) == 0
    assert (folder / "out" / "a.normalized.png").read_bytes() == first


def test_the_command_says_what_is_wrong_with_a_reference(folder, capsys):
    blank = folder / "white.png"
    for reference, text in (
        ([], "macenko needs a reference"),
        (["--reference", str(folder / "gone.png")], "there is no such file"),
        (["--reference", str(blank)], "The template cannot be used: it has one colour only"),
        (["--reference", str(folder / "broken.png")], "not an image of a known format"),
    ):
        assert run(folder, *reference, images=["a.png"]) == 2
        said = capsys.readouterr().err
        assert text in said
        assert len(said.splitlines()) == 1


def test_a_slide_is_streamed_with_its_pyramid(tmp_path, pixels, macenko, template, monkeypatch):
    from napari_beerlanet.core.images import slide as slides

    monkeypatch.setattr(slides, "SLIDE_PIXELS", 1000)
    path = tmp_path / "slide.tif"
    with tifffile.TiffWriter(path) as file:
        tags = {"photometric": "rgb", "tile": (256, 256), "resolutionunit": "CENTIMETER"}
        file.write(pixels, subifds=1, resolution=(40000, 40000), **tags)
        file.write(pixels[::2, ::2], subfiletype=1, **tags)
    Image.fromarray(template).save(tmp_path / "template.png")
    given = ["normalize", str(path), "--out", str(tmp_path / "out"), "--method", "macenko"]
    assert main([*given, "--reference", str(tmp_path / "template.png"), "--quiet"]) == 0
    with open_slide(tmp_path / "out" / "slide.normalized.ome.tiff") as done:
        assert [level.shape for level in done.levels] == [
            (SIDE, SIDE, 3),
            (SIDE // 2, SIDE // 2, 3),
        ]
        assert done.pixel_size == pytest.approx((0.25, 0.25))
        wanted = normalize_slide([pixels, pixels[::2, ::2]], macenko)
        for found, right in zip(done.levels, wanted.levels, strict=True):
            np.testing.assert_array_equal(np.asarray(found[:, :, :]), right.compute())
