"""Files on disk: hashes of pixels."""

import numpy as np

from napari_beerlanet.core.common.storage import pixel_digest, pixel_hash


def test_an_image_is_known_by_its_content():
    a = np.zeros((4, 5, 3), np.uint8)
    b = a.copy()
    b[0, 0, 0] = 1
    assert pixel_hash(a) == pixel_hash(a.copy())
    assert len({pixel_hash(a), pixel_hash(b), pixel_hash(a.reshape(5, 4, 3))}) == 3


def test_the_hash_does_not_depend_on_how_the_pixels_lie():
    import dask.array as da

    rgb = np.random.default_rng(0).integers(0, 255, (700, 90, 3), dtype=np.uint8)
    assert pixel_hash(rgb) == pixel_hash(np.asfortranarray(rgb))
    assert pixel_hash(rgb) == pixel_hash(da.from_array(rgb, chunks=(100, 90, 3)))
    assert pixel_digest(rgb) == f"sha256:{pixel_hash(rgb)}"


def test_hashes_are_those_of_files_written_before():
    rgb = np.arange(300 * 4 * 3, dtype=np.uint16).reshape(300, 4, 3)
    expected = "3205cdee6cfdfe381958c93766921b9c03f616861cbdbd94e86dcaf001f76577"
    assert pixel_hash(rgb) == expected
