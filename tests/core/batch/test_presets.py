"""Presets of a study on slides: the commands decompose and detect on images of any size."""

import numpy as np
import pytest
import tifffile
import zarr

import napari_beerlanet as nb
from napari_beerlanet.core.batch import image, outputs
from napari_beerlanet.core.batch.settings import DECOMPOSE_PRESET, DETECT_PRESET
from napari_beerlanet.core.batch.study import run_study
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.formats import read_detections
from napari_beerlanet.core.images import tiff
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.stains.files import read_spectra
from napari_beerlanet.samples import blood_smear

SHAPE = (1100, 1300)


@pytest.fixture(scope="module")
def pixels():
    return blood_smear(SHAPE, seed=5).image


@pytest.fixture
def slide(tmp_path, pixels, monkeypatch):
    """A tiled TIFF of more pixels than an image may have that is read at once."""
    path = tmp_path / "slide.tif"
    tifffile.imwrite(path, pixels, photometric="rgb", tile=(256, 256))
    for module in (tiff, image):
        monkeypatch.setattr(module, "MAX_PIXELS", 300_000)
    with pytest.raises(FileError, match="more than"):
        read_image(path)
    return path


def process(slide, preset):
    done = run_study(slide, slide.parent / "out", preset, workers=0, layout="files")
    assert done.failures == {}
    return slide.parent / "out"


@pytest.mark.parametrize("lazy", [False, True])
@pytest.mark.parametrize("density_maps", ["ome-tiff", "zarr"])
def test_a_slide_is_decomposed_as_an_image_in_memory(
    slide, pixels, density_maps, lazy, monkeypatch
):
    monkeypatch.setattr(outputs, "_MAX_DENSITY_PIXELS", 0 if lazy else pixels.size)
    settings = DECOMPOSE_PRESET | {"iterations": 3, "density_maps": density_maps}
    out = process(slide, settings | {"previews": False})
    right = nb.decompose(pixels, iterations=3)
    np.testing.assert_allclose(read_spectra(out / "slide.spectra.json"), right.spectra, atol=1e-12)
    if density_maps == "zarr":
        written = zarr.open_group(str(out / "slide.densities.zarr"), mode="r")["0"][:]
    else:
        written = tifffile.imread(out / "slide.densities.ome.tiff")
    assert written.shape == (8, *SHAPE)
    np.testing.assert_allclose(written, right.densities, atol=1e-5)
    assert sorted(path.name for path in out.iterdir())[1:] == ["slide.spectra.json"]


def test_objects_of_a_slide_are_those_of_an_image_in_memory(slide, pixels):
    out = process(slide, DETECT_PRESET | {"model": "blood-cells", "device": "cpu"})
    found = read_detections(out / "slide.detections.csv")
    right = nb.load_checkpoint("blood-cells", device="cpu").detect(pixels)
    assert len(found) == len(right) > 50
    np.testing.assert_allclose(found.xyxy, right.xyxy, atol=0.01)
    np.testing.assert_array_equal(found.labels, right.labels)
    assert not (out / ".work").exists()


def test_pixels_of_16_bits_are_not_sampled_for_their_densities(tmp_path, pixels, monkeypatch):
    small = pixels[:150, :170].astype(np.uint16) * 257
    tifffile.imwrite(tmp_path / "slide.tif", small, photometric="rgb", tile=(64, 64))
    monkeypatch.setattr("napari_beerlanet.core.stains.slide._MAX_PIXELS_IN_MEMORY", 100)
    out = process(tmp_path / "slide.tif", DECOMPOSE_PRESET | {"iterations": 2, "previews": False})
    right = nb.decompose(small, iterations=2)
    written = tifffile.imread(out / "slide.densities.ome.tiff")
    np.testing.assert_allclose(written, right.densities, atol=1e-6)
