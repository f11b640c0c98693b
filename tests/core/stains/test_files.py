"""Results on disk: densities as OME-TIFF and OME-Zarr, spectra as JSON, there and back."""

import json
from pathlib import Path

import numpy as np
import pytest
import tifffile
import zarr

from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.images import tiff
from napari_beerlanet.core.stains import files
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.files import read_spectra, write_densities, write_spectra

RGB = np.random.default_rng(0).integers(0, 256, (23, 31, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def result():
    """Five components, of which a penalty has killed some."""
    made = decompose(RGB, components=5, iterations=4, lam=0.5, gamma=0.01)
    assert made.active.any()
    return made


def left_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.mark.parametrize("pixel_size", [(0.25, 0.3), None])
def test_densities_as_ome_tiff(tmp_path, result, pixel_size):
    path = tmp_path / "a.densities.ome.tiff"
    write_densities(path, result, pixel_size, name="Gewebe & <ü> \x07\udcff.tif")
    with tifffile.TiffFile(path) as file:
        assert file.is_ome
        series = file.series[0]
        assert (series.axes, series.shape, series.dtype) == ("CYX", (5, 23, 31), np.float32)
        np.testing.assert_array_equal(series.asarray(), result.densities)
        assert series.keyframe.is_tiled
        elements = tiff._ome_elements(file, "Channel")
        assert [e.get("Name") for e in elements] == files.component_names(result)
        assert tiff.read_pixel_size(file, series) == pixel_size
        assert not file.is_bigtiff
    assert left_in(tmp_path) == {path.name}


def test_large_densities_become_bigtiff(tmp_path, result, monkeypatch):
    monkeypatch.setattr(files, "_MIN_BIGTIFF_BYTES", 1000)
    write_densities(tmp_path / "a.ome.tiff", result)
    with tifffile.TiffFile(tmp_path / "a.ome.tiff") as file:
        assert file.is_bigtiff


@pytest.mark.parametrize("pixel_size", [(0.25, 0.3), None])
def test_densities_as_ome_zarr(tmp_path, result, pixel_size):
    path = tmp_path / "a.densities.zarr"
    write_densities(path, result, pixel_size, name="ü")
    write_densities(path, result, pixel_size, name="ü")
    group = zarr.open_group(str(path), mode="r")
    np.testing.assert_array_equal(group["0"][...], result.densities)
    assert group["0"].metadata.dimension_names == ("c", "y", "x")
    ome = group.attrs["ome"]
    assert ome["version"] == "0.5"
    image = ome["multiscales"][0]
    scale = image["datasets"][0]["coordinateTransformations"][0]["scale"]
    assert scale == [1, *(pixel_size or (1, 1))]
    assert ("unit" in image["axes"][1]) == (pixel_size is not None)
    assert [c["label"] for c in ome["omero"]["channels"]] == files.component_names(result)
    assert left_in(tmp_path) == {path.name}


def test_napari_opens_both(tmp_path, result):
    from napari_builtins.io import napari_get_reader

    for name in ("a.ome.tiff", "a.zarr"):
        path = str(tmp_path / name)
        write_densities(path, result, (0.25, 0.25))
        data = napari_get_reader(path)(path)[0][0]
        level = data[0] if isinstance(data, list) else data
        np.testing.assert_array_equal(np.asarray(level), result.densities)


def test_one_component_keeps_its_axis(tmp_path):
    one = decompose(RGB, components=1, iterations=2, lam=0.01, gamma=0.1)
    write_densities(tmp_path / "a.ome.tiff", one)
    with tifffile.TiffFile(tmp_path / "a.ome.tiff") as file:
        assert file.series[0].get_shape(squeeze=False)[2:5] == (1, 23, 31)


def test_spectra_round_trip(tmp_path, result):
    path = tmp_path / "a.spectra.json"
    write_spectra(path, result, (0.25, 0.3), "ü.tif", {"note": [1, 2]})
    np.testing.assert_array_equal(read_spectra(path), result.spectra)
    content = json.loads(path.read_text(encoding="utf-8"))
    assert content["image"] == "ü.tif"
    assert content["pixel_size_um"] == [0.25, 0.3]
    assert content["background"]["x0"] == result.background.tolist()
    assert content["objective"] == result.objective[-1]
    assert content["iterations"] == 4
    assert content["note"] == [1, 2]
    assert [c["active"] for c in content["components"]] == result.active.tolist()
    assert sum(c["share"] for c in content["components"]) == pytest.approx(1)
    again = decompose(RGB, iterations=1, spectra=read_spectra(path), lam=0.01, gamma=0.1)
    assert again.spectra.shape == (3, 5)


GOOD = {
    "kind": "napari-beerlanet spectra",
    "version": 1,
    "components": [{"spectrum": [0.6, 0.7, 0.3]}],
}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (None, "no such file"),
        ("{", "not a JSON file"),
        ([1], "holds no object"),
        ({}, "not a spectra file"),
        (GOOD | {"version": 9}, "version 9"),
        (GOOD | {"components": []}, "a spectrum of 3 numbers"),
        (GOOD | {"components": 3}, "a spectrum of 3 numbers"),
        (GOOD | {"components": [{}]}, "a spectrum of 3 numbers"),
        (GOOD | {"components": [{"spectrum": [1, 2]}]}, "a spectrum of 3 numbers"),
        (GOOD | {"components": [{"spectrum": [1, 2, -1]}]}, "a spectrum of 3 numbers"),
        (GOOD | {"components": [{"spectrum": [1, 2, "x"]}]}, "a spectrum of 3 numbers"),
        (GOOD | {"components": [{"spectrum": [0, 0, 0]}]}, "all its spectra are zero"),
    ],
)
def test_wrong_spectra_files(tmp_path, content, reason):
    path = tmp_path / "a.json"
    if content is not None:
        path.write_text(content if isinstance(content, str) else json.dumps(content))
    with pytest.raises(FileError, match=reason) as caught:
        read_spectra(path)
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_written_by_hand_suffices(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps(GOOD))
    np.testing.assert_array_equal(read_spectra(tmp_path / "a.json"), [[0.6], [0.7], [0.3]])
