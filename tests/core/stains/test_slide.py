"""Stains of images that are not in memory: streamed and in memory are the same."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import dask.array as da
import numpy as np
import pytest
import zarr
from hypothesis import given, settings
from hypothesis import strategies as st

from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.threads import map_threads
from napari_beerlanet.core.images.pyramid import (
    as_levels,
    chunk_aligned_regions,
    read_thumbnail,
)
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.stains import palette, slide
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.lazy_densities import BlockCache, DensityTable
from napari_beerlanet.core.stains.palette import ColourCounter, count_colours, palette_of
from napari_beerlanet.core.stains.slide import decompose_slide
from napari_beerlanet.samples import he_field


@pytest.fixture(scope="module")
def image():
    return he_field((330, 420), seed=3).image


@pytest.fixture(scope="module")
def in_memory(image):
    return decompose(image, iterations="converge")


def same_bits(slide, whole):
    for name in ("background", "spectra", "share", "active", "objective"):
        np.testing.assert_array_equal(getattr(slide.fit, name), getattr(whole, name), name)
    assert (slide.fit.lam, slide.fit.gamma) == (whole.lam, whole.gamma)


def with_holes(image, share):
    alpha = np.full(image.shape[:2], 255, np.uint8)
    alpha[: round(share * len(alpha))] = 0
    return np.dstack([image, alpha])


# --- streamed equals in memory, to the bit -------------------------------------------------------


@settings(max_examples=12)
@given(
    chunks=st.tuples(st.integers(40, 500), st.integers(40, 500)),
    order=st.randoms(use_true_random=False),
    side=st.sampled_from([32, 100, 1024]),
    threads=st.integers(1, 4),
)
def test_any_chunks_and_order_give_the_same_bits(image, in_memory, chunks, order, side, threads):
    lazy = da.from_array(image, chunks=(*chunks, 3))
    parts = list(range(len(chunk_aligned_regions(lazy, side))))
    order.shuffle(parts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            slide, "chunk_aligned_regions", lambda level: chunk_aligned_regions(level, side)
        )
        found = decompose_slide(lazy, order=parts, threads=threads, iterations="converge")
    same_bits(found, in_memory)


def cuts(length):
    """Chunks of any sizes, one differing from the other, that make up a length."""
    borders = st.sets(st.integers(1, length - 1), max_size=5)
    return borders.map(lambda b: tuple(np.diff([0, *sorted(b), length]).tolist()))


@settings(max_examples=8)
@given(
    rows=cuts(330),
    columns=cuts(420),
    holes=st.booleans(),
    leave_out=st.sampled_from([(), ("glass",), ("pen", "border")]),
    order=st.randoms(use_true_random=False),
)
def test_ragged_chunks_holes_and_what_is_left_out(image, rows, columns, holes, leave_out, order):
    """Whatever the fit sees, how it is cut does not matter."""
    whole = np.where(np.arange(420)[:, None] < 150, np.uint8(243), image)
    whole = with_holes(whole, 0.3) if holes else whole
    lazy = da.from_array(whole, chunks=(rows, columns, whole.shape[2]))
    parts = list(range(len(chunk_aligned_regions(lazy, 32))))
    order.shuffle(parts)
    right = decompose_slide(whole, leave_out=leave_out, iterations=5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            slide, "chunk_aligned_regions", lambda level: chunk_aligned_regions(level, 32)
        )
        found = decompose_slide(lazy, leave_out=leave_out, order=parts, iterations=5)
    same_bits(found, right.fit)
    assert found.counted == right.counted
    np.testing.assert_array_equal(found.fit.densities, right.fit.densities)


@pytest.mark.parametrize("iterations", [1, 10])
def test_steps_of_the_algorithm_give_the_same_bits(image, iterations):
    lazy = da.from_array(image, chunks=(100, 130, 3))
    same_bits(decompose_slide(lazy, iterations=iterations), decompose(image, iterations=iterations))


@pytest.mark.parametrize("share", [0.0, 0.2, 0.9])
def test_transparent_pixels_give_the_same_bits(image, share):
    holed = with_holes(image, share)
    found = decompose_slide(da.from_array(holed, chunks=(77, 130, 4)), iterations="converge")
    same_bits(found, decompose(holed, iterations="converge"))
    assert found.counted == (holed[..., 3] > 0).sum()


@pytest.mark.parametrize("shape", [(1, 1), (20, 30), (63, 400), (200, 300)])
def test_small_images_give_the_same_bits(image, shape):
    part = image[: shape[0], : shape[1]]
    same_bits(decompose_slide(part, iterations="converge"), decompose(part, iterations="converge"))


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_other_types_give_the_same_bits(image, dtype):
    white = 65535 if dtype == np.uint16 else 1
    deep = (image[:48, :48] / 255 * white).astype(dtype)
    lazy = da.from_array(deep, chunks=(20, 30, 3))
    found = decompose_slide(lazy, iterations=3)
    same_bits(found, decompose(deep, iterations=3))
    np.testing.assert_array_equal(found.densities(0), decompose(deep, iterations=3).densities)


def test_tables_that_fill_up_lose_nothing(image, monkeypatch):
    monkeypatch.setattr(palette, "_MAX_TABLE_PIXELS", 5000)
    found = count_colours(image, chunk_aligned_regions(image, 64))
    right = palette_of(image.reshape(-1, 3))
    np.testing.assert_array_equal(found.codes, right.codes)
    np.testing.assert_array_equal(found.counts, right.counts)


def test_counter_takes_a_mask(image):
    counter = ColourCounter()
    keep = np.zeros(image.shape[:2], bool)
    keep[10:50, 20:90] = True
    counter.add(image, keep)
    right = palette_of(image[10:50, 20:90].reshape(-1, 3))
    np.testing.assert_array_equal(counter.palette().counts, right.counts)


# --- densities are lazy, seamless, and right at every level --------------------------------------


def test_densities_are_those_in_memory_without_seams(image, in_memory):
    found = decompose_slide(da.from_array(image, chunks=(90, 130, 3)), iterations="converge")
    np.testing.assert_array_equal(found.densities(0).compute(), in_memory.densities)
    active = int(np.flatnonzero(in_memory.active)[0])
    plane = found.densities(0, active)
    np.testing.assert_array_equal(
        plane[13:300, 77:410:3], in_memory.densities[active, 13:300, 77:410:3]
    )


def test_every_level_has_densities_of_its_own_colours(image):
    half = image.reshape(165, 2, 210, 2, 3).mean((1, 3)).astype(np.uint8)
    found = decompose_slide([da.from_array(image, chunks=(64, 64, 3)), half], iterations="converge")
    for k, level in enumerate((image, half)):
        np.testing.assert_array_equal(found.densities(k).compute(), found.fit.densities_of(level))
    assert [p.shape for p in found.pyramid(0)] == [(330, 420), (165, 210)]


def test_an_inactive_component_is_zero(image, in_memory):
    found = decompose_slide(image, iterations="converge")
    idle = int(np.flatnonzero(~in_memory.active)[0])
    assert not found.densities(0, idle).compute().any()
    with pytest.raises(ValueError, match="component must be from 0 to 7"):
        found.densities(0, 8)


def test_threads_that_meet_the_same_new_colours_at_once(image, in_memory):
    """As dask's do when a viewer looks at several blocks."""
    table, meet = DensityTable(in_memory), threading.Barrier(4)

    def look(_):
        meet.wait()
        return table.planes(image)

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(look, range(4)))
    for planes in found:
        np.testing.assert_array_equal(planes, in_memory.densities[in_memory.active])


def test_a_block_that_several_layers_want_at_once_is_computed_once():
    cache, meet, computed = BlockCache(), threading.Barrier(4), []

    def compute():
        computed.append(threading.get_ident())
        time.sleep(0.1)  # the others come meanwhile
        if len(computed) == 1:
            raise ValueError("cannot be read")
        return np.ones((1, 2, 3), np.float32)

    def look(_):
        meet.wait()
        try:
            return cache.get("block", compute)
        except ValueError:
            return None

    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(look, range(4))) == [None] * 4
        found = list(pool.map(look, range(4)))  # an error is not kept
    assert len(computed) == 2
    assert all(planes is found[0] for planes in found)


def test_only_what_is_looked_at_is_read(image):
    source = CountsReads(image)
    found = decompose_slide(source, iterations=2)
    source.reads.clear()
    found.densities(0)[:10, :10, :10].compute()
    assert len(source.reads) == 1
    found.densities(0, 1)[5:20, 5:20].compute()
    assert len(source.reads) == 1, "components share what was read"


class CountsReads:
    """An array that notes which parts of it are read."""

    def __init__(self, array, chunks=(128, 128)):
        self.array, self.shape, self.dtype, self.ndim = array, array.shape, array.dtype, array.ndim
        self.chunks = (*chunks, array.shape[2])
        self.reads = []

    def __getitem__(self, index):
        self.reads.append(index)
        return self.array[index]


# --- levels, samples, what is left out -----------------------------------------------------------


def test_a_sample_is_seeded_and_near(image, in_memory):
    large = np.tile(image, (4, 4, 1))
    a, b = (decompose_slide(large, sample=2, seed=5, iterations="converge") for _ in range(2))
    np.testing.assert_array_equal(a.fit.spectra, b.fit.spectra)
    assert a.counted == 2 * 512 * 512
    cosine = (a.fit.spectra * in_memory.spectra).sum(0)[in_memory.active]
    assert (cosine > 0.98).all()


def test_a_coarser_level_can_be_counted(image):
    half = np.ascontiguousarray(image[::2, ::2])
    half = np.tile(half, (2, 2, 1))
    large = np.tile(image, (2, 2, 1))
    found = decompose_slide([large, half], level=1, iterations="converge")
    same_bits(found, decompose(half, iterations="converge"))
    with pytest.raises(ValueError, match="level must be from 0 to 1"):
        decompose_slide([large, half], level=2)


@pytest.mark.parametrize("extent", [2, 0.5])
def test_glass_may_be_left_out(image, extent):
    """As if it were transparent, in a large image and in one that is solved in memory."""
    slide = np.full((round(500 * extent), round(900 * extent), 3), 240, np.uint8)
    slide[100:200, 150:300] = image[:100, :150]
    found = decompose_slide(slide, leave_out=("glass", "pen", "border"), iterations="converge")
    assert 100 * 150 <= found.counted < 1.4 * 100 * 150
    assert found.fit.active.sum() == 2


def test_nothing_left_is_said():
    with pytest.raises(ImageError, match="Nothing is left"):
        decompose_slide(np.full((500, 500, 3), 240, np.uint8), leave_out=("glass",))


def test_wrong_words_are_refused(image):
    with pytest.raises(ValueError, match="leave_out takes glass, pen, border"):
        decompose_slide(image, leave_out="glass")
    with pytest.raises(ImageError, match="Not an RGB image"):
        decompose_slide(image[..., 0])


# --- reading --------------------------------------------------------------------------------------


def test_cancelling_stops_the_reading(image):
    source = CountsReads(np.tile(image, (20, 20, 1)))

    def stop(progress):
        if progress.done:
            raise Cancelled

    with pytest.raises(Cancelled):
        decompose_slide(source, report=stop, threads=2)
    assert len(source.reads) < len(chunk_aligned_regions(source))


def test_progress_only_rises(image):
    seen = []
    decompose_slide(np.tile(image, (4, 4, 1)), report=lambda p: seen.append(p.fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1


@settings(max_examples=40)
@given(st.integers(1, 300), st.integers(1, 300), st.integers(1, 99), st.integers(1, 120))
def test_parts_cover_a_level_once(height, width, chunk, side):
    level = da.zeros((height, width, 3), chunks=(chunk, chunk + 3, 3), dtype=np.uint8)
    seen = np.zeros((height, width), int)
    for part in chunk_aligned_regions(level, side):
        seen[part.top : part.bottom, part.left : part.right] += 1
    assert (seen == 1).all()


def test_parts_of_strips_are_not_too_large():
    strips = da.zeros((4096, 200_000, 3), chunks=(8, 200_000, 3), dtype=np.uint8)
    assert max(part.width * part.height for part in chunk_aligned_regions(strips)) < 18 << 20
    tiles = da.zeros((9000, 9000, 3), chunks=(512, 512, 3), dtype=np.uint8)
    assert chunk_aligned_regions(tiles)[0] == Rectangle.from_edges(0, 0, 2048, 2048)


def test_zarr_is_read_along_its_chunks(image, tmp_path):
    array = zarr.create_array(tmp_path / "a.zarr", data=image, chunks=(64, 64, 3))
    assert chunk_aligned_regions(array, 64)[0] == Rectangle.from_edges(0, 0, 64, 64)
    np.testing.assert_array_equal(read_thumbnail([array], 105), image[::4, ::4])
    same_bits(decompose_slide(array), decompose(image))


def test_levels_are_put_in_order_and_checked(image):
    levels = as_levels([image[::2, ::2], image])
    assert levels[0].shape == image.shape
    with pytest.raises(ImageError, match="several types"):
        as_levels([image, image[::2, ::2].astype(np.uint16)])


def test_a_layer_of_napari_is_a_pyramid(image):
    from napari.layers import Image

    layer = Image([image, image[::2, ::2]], multiscale=True, rgb=True)
    assert [level.shape for level in as_levels(layer.data)] == [(330, 420, 3), (165, 210, 3)]
    assert len(decompose_slide(layer.data, iterations=2).levels) == 2


def test_few_are_under_way_at_a_time():
    begun = []
    results = map_threads(lambda k: begun.append(k) or k, range(100), threads=2)
    assert next(results) == 0
    assert len(begun) <= 6
    results.close()
    assert len(begun) < 20
