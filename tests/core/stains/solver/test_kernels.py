"""The compiled loops against NumPy."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from napari_beerlanet.core.stains.solver import kernels, step_kernels

PIXELS = arrays(np.uint8, st.tuples(st.integers(0, 40), st.sampled_from([3, 4])))


def morton(pixel):
    """Bits of R, G and B interleaved, R first, the highest bits first."""
    bits = "".join(f"{r}{g}{b}" for r, g, b in zip(*(f"{v:08b}" for v in pixel[:3]), strict=True))
    return int(bits, 2)


def tables():
    return np.zeros(kernels.CODE_COUNT, np.uint32), np.zeros(kernels.CODE_COUNT >> 6, np.uint8)


def encoded(pixels):
    codes = np.empty(len(pixels), np.uint32)
    kernels.encode_pixels(pixels, codes)
    return codes


@given(PIXELS)
def test_codes_follow_the_morton_curve(pixels):
    assert encoded(pixels).tolist() == [morton(p) for p in pixels.tolist()]


def test_every_colour_has_its_own_code():
    grey = np.arange(256, dtype=np.uint8)
    for channel in range(3):
        pixels = np.full((256, 3), 93, np.uint8)
        pixels[:, channel] = grey
        assert len(np.unique(encoded(pixels))) == 256
    corners = np.array([[0, 0, 0], [255, 255, 255]], np.uint8)
    assert encoded(corners).tolist() == [0, kernels.CODE_COUNT - 1]


@given(PIXELS, st.booleans())
def test_count_pixels_is_unique(pixels, skip):
    skip = skip and pixels.shape[1] == 4
    counts, touched = tables()
    kernels.count_pixels(pixels, skip, counts, touched)
    kept = pixels[pixels[:, 3] > 0] if skip else pixels
    codes, expected = np.unique(encoded(kept), return_counts=True)
    found = kernels.drain_counts(counts, touched)
    np.testing.assert_array_equal(found[0], codes)
    np.testing.assert_array_equal(found[1], expected)
    assert found[0].dtype == np.uint32
    assert found[1].dtype == np.int64


COUNTS = st.dictionaries(st.integers(0, 50), st.integers(0, 2**40), max_size=30)


@given(COUNTS, COUNTS, st.sampled_from([np.uint32, np.uint64]))
def test_merge_counts_adds(a, b, dtype):
    parts = []
    for d in (a, b):
        keys = sorted(d)
        parts += [np.array(keys, dtype), np.array([d[k] for k in keys], np.int64)]
    codes, counts = kernels.merge_counts(*parts)
    total = {k: a.get(k, 0) + b.get(k, 0) for k in sorted({*a, *b})}
    assert codes.tolist() == list(total)
    assert counts.tolist() == list(total.values())
    assert codes.dtype == dtype


def test_planes_of_whole_grey_levels_are_recognised():
    rng = np.random.default_rng(0)
    pixels = np.vstack([np.repeat(np.arange(256, dtype=np.uint8)[:, None], 3, 1)] * 2)
    pixels[256:] = rng.integers(0, 256, (256, 3))
    planes = np.ascontiguousarray((pixels.T / 255).astype(np.float32))
    codes = np.empty(512, np.uint32)
    assert kernels.encode_planes(planes, np.float32(1e-4), codes)
    np.testing.assert_array_equal(codes, encoded(pixels))


@pytest.mark.parametrize("value", [0.5, -0.1, 1.1, np.nan, np.inf, -np.inf, 100.001 / 255])
@pytest.mark.parametrize("place", [(0, 0), (1, 4), (2, 9)])
def test_planes_with_one_other_value_are_not(value, place):
    planes = np.full((3, 10), 51 / 255, np.float32)
    planes[place] = value
    assert not kernels.encode_planes(planes, np.float32(1e-4), np.empty(10, np.uint32))


@pytest.mark.parametrize("n", [0, 1, 511, 512, 1300])
@pytest.mark.parametrize("dtype", [np.int32, np.int64])
def test_look_up_and_scatter_are_fancy_indexing(n, dtype):
    rng = np.random.default_rng(n)
    table = rng.normal(size=(17, 5)).astype(np.float32)
    rows = rng.integers(0, 17, n).astype(dtype)
    planes = np.empty((5, n), np.float32)
    kernels.look_up_rows(rows, table, np.arange(5), planes, 0)
    np.testing.assert_array_equal(planes, table[rows].T)

    expected, got = np.ones((17, 5)), np.ones((17, 5))
    np.add.at(expected, rows, planes.T)
    kernels.scatter_add(rows, planes, got)
    np.testing.assert_allclose(got, expected, rtol=1e-12)


@pytest.mark.parametrize("n", [0, 1, 700, 40_000])
@pytest.mark.parametrize("largest", [0, 1, 100, kernels.CODE_COUNT - 1])
def test_number_codes_is_unique(n, largest):
    codes = np.random.default_rng(n).integers(0, largest, n, np.uint32, endpoint=True)
    expected = np.unique(codes, return_counts=True, return_inverse=True)
    found, counts, rows = kernels.unique_codes(codes)
    np.testing.assert_array_equal(found, expected[0])
    np.testing.assert_array_equal(rows, expected[1])
    np.testing.assert_array_equal(counts, expected[2])


@pytest.mark.parametrize("u", [1, 63, 64, 200])
@pytest.mark.parametrize("parts", [1, 3])
def test_scaled_rows_and_their_gradient(u, parts):
    rng = np.random.default_rng(u)
    table, scale, g = rng.normal(size=(5, u)), rng.normal(size=5), rng.normal(size=(parts, u, 5))
    entries = np.empty((u, 5), np.float32)
    kernels.scale_to_rows(table, scale, entries)
    np.testing.assert_array_equal(entries, (table.T * scale).astype(np.float32))
    g_table, g_scale = np.empty_like(table), np.empty_like(scale)
    kernels.scale_to_rows_backward(g, table, scale, g_table, g_scale)
    np.testing.assert_allclose(g_table, (g.sum(0) * scale).T, rtol=1e-12)
    np.testing.assert_allclose(g_scale, (g.sum(0).T * table).sum(1), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("n", [0, 1, 512, 1300])
def test_look_up_pixels(n, channels):
    rng = np.random.default_rng(n)
    pixels = rng.integers(0, 4, (n, channels), np.uint8)
    codes = encoded(
        np.array([[r, g, b] for r in range(4) for g in range(4) for b in range(4)], "B")
    )
    order = np.argsort(codes)
    index = np.full(kernels.CODE_COUNT, -7, np.int32)
    index[codes] = np.argsort(order)
    table, planes = rng.normal(size=(64, 3)).astype(np.float32), np.empty((3, n), np.float32)
    which = np.arange(3)
    assert kernels.look_up_pixels(pixels, codes[order], index, table[order], which, planes, 0)
    rows = pixels[:, 0] * 16 + pixels[:, 1] * 4 + pixels[:, 2]
    np.testing.assert_array_equal(planes, table[rows].T)
    some = np.full((3, n), 7, np.float32)
    which = np.array([0, 2])
    assert kernels.look_up_pixels(pixels, codes[order], index, table[order], which, some, 0)
    np.testing.assert_array_equal(some[which], planes[which])
    assert (some[1] == 7).all()


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 511, 519, 1300])
@pytest.mark.parametrize(
    ("r", "which"),
    [
        (8, range(8)),
        (9, range(9)),
        (17, range(17)),
        (9, range(1, 9)),
        (16, [0, 2, 3, 4, 5, 6, 7, 8, 9, 15]),
        (8, [0, 1, 2, 3, 4, 5, 7]),
        (3, []),
    ],
)
def test_look_up_of_many_planes_writes_those_that_are_wanted(n, r, which):
    rng = np.random.default_rng(n)
    table = rng.normal(size=(40, r)).astype(np.float32)
    rows = rng.integers(0, 40, n).astype(np.int32)
    which, expected = np.array(which, np.int64), np.full((r, n + 10), 7, np.float32)
    expected[which, 3 : n + 3] = table[rows].T[which]
    planes = np.full((r, n + 10), 7, np.float32)
    kernels.look_up_rows(rows, table, which, planes, 3)
    np.testing.assert_array_equal(planes, expected)


@pytest.mark.parametrize("garbage", [-1, 0, 63, 64, 2**31 - 1])
def test_look_up_pixels_refuses_a_colour_it_does_not_hold(garbage):
    codes = np.arange(64, dtype=np.uint32)
    index = np.full(kernels.CODE_COUNT, garbage, np.int32)
    index[codes] = np.arange(64)
    table, planes = np.zeros((64, 2), np.float32), np.zeros((2, 3), np.float32)
    pixels = np.array([[1, 1, 1], [9, 9, 9], [2, 2, 2]], np.uint8)
    assert not kernels.look_up_pixels(pixels, codes, index, table, np.arange(2), planes, 0)


@pytest.mark.parametrize("u", [1, 513])
@pytest.mark.parametrize("q", [0, 6])
def test_density_step_touches_its_own_columns_only(u, q):
    rng = np.random.default_rng(0)
    c, r = 3, 6
    X, w, D = rng.normal(size=(c, u)), rng.uniform(size=u), rng.uniform(size=(q, u))
    M, N, b = rng.normal(size=(q, r)), rng.normal(size=(c, r)), rng.normal(size=r)
    first, last = u // 3, u - u // 4
    out, G, P, m = np.full((r, u), 7.0), np.zeros((r, r)), np.zeros((c, r)), np.zeros(r)
    step_kernels.density_step(X, w, D, M, N, b, out, G, P, m, first, last)
    expected = np.maximum(M.T @ D + N.T @ X + b[:, None], 0)[:, first:last]
    weighted = expected * w[first:last]
    np.testing.assert_allclose(out[:, first:last], expected, rtol=1e-12, atol=1e-14)
    assert (out[:, :first] == 7).all()
    assert (out[:, last:] == 7).all()
    np.testing.assert_allclose(G, weighted @ expected.T, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(P, X[:, first:last] @ weighted.T, rtol=1e-11, atol=1e-12)
    np.testing.assert_allclose(m, weighted.sum(1), rtol=1e-11, atol=1e-12)
