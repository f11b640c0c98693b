"""Palettes: they add up however an image is cut, and look-ups are fancy indexing."""

import pickle

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from napari_beerlanet.core.stains import palette
from napari_beerlanet.core.stains.palette import (
    ColourCounter,
    Palette,
    decode,
    encode,
    palette_of,
    palette_pays,
)
from napari_beerlanet.core.stains.solver import kernels
from pictures import section, smear, with_alpha

DTYPES = pytest.mark.parametrize("dtype", [np.uint8, np.uint16])


def same(a: Palette, b: Palette) -> bool:
    return (
        a.dtype == b.dtype
        and a.codes.dtype == b.codes.dtype
        and a.codes.tobytes() == b.codes.tobytes()
        and a.counts.dtype == b.counts.dtype == np.int64
        and a.counts.tobytes() == b.counts.tobytes()
    )


def as_dict(p: Palette) -> dict[tuple[int, ...], int]:
    colours = map(tuple, p.colours.tolist())
    return dict(zip(colours, p.counts.tolist(), strict=True))


def expected(pixels) -> dict[tuple[int, ...], int]:
    colours, counts = np.unique(pixels[:, :3], axis=0, return_counts=True)
    return dict(zip(map(tuple, colours.tolist()), counts.tolist(), strict=True))


def pixels_of(dtype, channels=3, most=60):
    """(n, channels) with colours that repeat, and any colour at all."""
    top = np.iinfo(dtype).max
    values = st.one_of(st.sampled_from([0, 1, top // 2, top - 1, top]), st.integers(0, top))
    return arrays(dtype, st.tuples(st.integers(1, most), st.just(channels)), elements=values)


ANY = st.one_of(
    pixels_of(np.uint8), pixels_of(np.uint16), pixels_of(np.uint8, 4), pixels_of(np.uint16, 4)
)


@given(ANY, st.data())
def test_any_cut_in_any_order_merged_in_any_way_is_the_whole(pixels, data):
    if pixels.shape[1] == 4:
        pixels[0, 3] = 1
    order = data.draw(st.permutations(range(len(pixels))))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(pixels)), max_size=6)))
    tiles = np.split(pixels[order], cuts)
    parts = [palette_of(tile) for tile in tiles]
    while len(parts) > 1:
        a = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        b = parts.pop(data.draw(st.integers(0, len(parts) - 1)))
        parts.append(a + b)
    whole = palette_of(pixels)
    assert same(parts[0], whole)
    seen = pixels if pixels.shape[1] == 3 else pixels[pixels[:, 3] > 0]
    assert {k: n for k, n in as_dict(whole).items() if n} == expected(seen)
    assert whole.counts.sum() == len(seen)
    assert (np.diff(whole.codes.astype(np.int64)) > 0).all()


@given(ANY)
def test_a_palette_has_colours_that_are_only_hidden_too(pixels):
    assert as_dict(palette_of(pixels)).keys() == expected(pixels).keys()


@pytest.mark.parametrize("tables", [1, 2, 3])
def test_tables_counted_in_parallel_add_up(monkeypatch, tables):
    monkeypatch.setattr(palette, "thread_count", lambda: tables)
    monkeypatch.setattr(palette, "_PIXELS_PER_TASK", 50)
    flat = smear().reshape(-1, 3)
    assert as_dict(palette_of(flat)) == expected(flat)


@DTYPES
@pytest.mark.parametrize("channels", [3, 4])
def test_an_empty_tile_adds_nothing(dtype, channels):
    nothing = palette_of(np.zeros((0, channels), dtype))
    assert len(nothing) == 0
    some = palette_of(np.ones((4, channels), dtype))
    assert as_dict(nothing + some + nothing) == {(1, 1, 1): 4}


@DTYPES
def test_a_wholly_transparent_tile_counts_nothing(dtype):
    assert not palette_of(np.zeros((9, 4), dtype)).counts.any()


def test_crops_and_flips_are_counted_like_their_copies():
    for view in (smear()[::-1], smear()[3:20, 5:50], smear()[:, ::-2], smear().swapaxes(0, 1)):
        copied = palette_of(view.copy().reshape(-1, 3))
        counter = ColourCounter()
        counter.add(view)
        assert same(counter.palette(), copied)
        assert copied.counts.sum() == view.shape[0] * view.shape[1]


@given(ANY)
def test_decode_undoes_encode(pixels):
    codes = encode(pixels)
    np.testing.assert_array_equal(decode(codes, pixels.dtype), pixels[:, :3])
    assert decode(codes, pixels.dtype).dtype == pixels.dtype


@settings(max_examples=30)
@given(pixels_of(np.uint8, most=400))
def test_number_codes_is_unique_with_inverse(pixels):
    codes = encode(pixels)
    distinct, counts, rows = kernels.unique_codes(codes)
    e = np.unique(codes, return_inverse=True, return_counts=True)
    np.testing.assert_array_equal(distinct, e[0])
    np.testing.assert_array_equal(rows, e[1])
    np.testing.assert_array_equal(counts, e[2])


@given(ANY, st.integers(1, 9))
def test_look_up_is_fancy_indexing(pixels, r):
    p = palette_of(pixels)
    table = np.random.default_rng(r).normal(size=(len(p), r)).astype(np.float32)
    colours = {tuple(c): k for k, c in enumerate(p.colours.tolist())}
    rows = np.array([colours[tuple(c)] for c in pixels[:, :3].tolist()])
    np.testing.assert_array_equal(p.rows(pixels), rows)
    planes = p.look_up(table, pixels)
    np.testing.assert_array_equal(planes, table[rows].T)
    assert planes.dtype == np.float32


@DTYPES
def test_look_up_in_many_short_runs(monkeypatch, dtype):
    for name in ("_PIXELS_PER_TASK", "_PIXELS_PER_PAGE"):
        monkeypatch.setattr(palette, name, 100)
    flat = smear().reshape(-1, 3).astype(dtype)
    p = palette_of(flat)
    table = np.random.default_rng(0).normal(size=(len(p), 3)).astype(np.float32)
    np.testing.assert_array_equal(p.look_up(table, flat), table[p.rows(flat)].T)


@DTYPES
def test_looking_up_no_pixels_gives_empty_planes(dtype):
    p = palette_of(smear().reshape(-1, 3).astype(dtype))
    planes = p.look_up(np.ones((len(p), 2), np.float32), np.zeros((0, 3), dtype))
    assert planes.shape == (2, 0)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
@pytest.mark.parametrize("channels", [3, 4])
def test_replaced_colours_are_fancy_indexing(dtype, channels):
    rng = np.random.default_rng(0)
    pixels = rng.integers(0, 9, (500, channels)).astype(dtype)
    found = palette_of(pixels)
    table = rng.integers(0, 255, (len(found), 3)).astype(dtype)
    out = pixels.copy()
    found.replace_colours(table, pixels, out)
    np.testing.assert_array_equal(out[:, :3], table[found.rows(pixels)])
    np.testing.assert_array_equal(out[:, 3:], pixels[:, 3:])
    with pytest.raises(KeyError, match="does not hold"):
        found.replace_colours(table, np.full_like(pixels, 200), out)
    with pytest.raises(ValueError, match="does not fit"):
        found.replace_colours(table[1:], pixels, out)


def test_colours_are_looked_up_in_a_table_of_all():
    pixels = np.random.default_rng(0).integers(0, 9, (300, 4)).astype(np.uint8)
    codes, table = encode(pixels), np.zeros(kernels.CODE_COUNT, np.uint32)
    red, green, blue = (7 * pixels[:, k].astype(np.uint32) for k in (2, 0, 1))
    table[codes] = (1 << 24) | (blue << 16) | (green << 8) | red
    out = pixels.copy()
    assert kernels.look_up_colours(pixels, table, out)
    np.testing.assert_array_equal(out[:, :3], 7 * pixels[:, [2, 0, 1]])
    np.testing.assert_array_equal(out[:, 3], pixels[:, 3])
    table[codes[17]] = 0
    assert not kernels.look_up_colours(pixels, table, out)


@DTYPES
def test_rows_refuses_colours_it_does_not_hold(dtype):
    p = palette_of(np.array([[1, 2, 3], [9, 9, 9]], dtype))
    for stranger in ([0, 0, 0], [1, 2, 4], [255, 255, 255]):
        with pytest.raises(KeyError, match="does not hold"):
            p.rows(np.array([[1, 2, 3], stranger], dtype))
    with pytest.raises(KeyError, match="does not hold"):
        palette_of(np.zeros((0, 3), dtype)).rows(np.zeros((1, 3), dtype))


@given(pixels_of(np.uint8, most=200), pixels_of(np.uint8, 4, most=200))
@settings(max_examples=20)
def test_streamed_and_in_memory_counts_are_the_same(opaque, transparent):
    counter = ColourCounter()
    counter.add(opaque[None])
    assert same(counter.palette(), palette_of(opaque))
    counter.add(transparent[None])
    assert same(counter.palette(), palette_of(opaque) + palette_of(transparent))


def test_a_palette_once_taken_does_not_change():
    counter = ColourCounter()
    counter.add(smear())
    taken = counter.palette()
    before = taken.codes.copy(), taken.counts.copy()
    counter.add(smear())
    counter.add(section())
    assert len(taken + counter.palette()) > len(taken)
    np.testing.assert_array_equal(taken.codes, before[0])
    np.testing.assert_array_equal(taken.counts, before[1])


@DTYPES
def test_adding_a_palette_to_itself_doubles_it(dtype):
    flat = smear().reshape(-1, 3).astype(dtype)
    p = palette_of(flat)
    assert same(p + p, palette_of(np.concatenate([flat, flat])))


@DTYPES
def test_palettes_pickle(dtype):
    p = palette_of(smear()[:9].reshape(-1, 3).astype(dtype))
    p.look_up(np.zeros((len(p), 1), np.float32), smear()[0].astype(dtype))
    assert same(pickle.loads(pickle.dumps(p)), p)
    assert len(pickle.dumps(p)) < 100 * len(p) + 2000  # no look-up table travels with it


@DTYPES
def test_palettes_can_be_compared_and_kept_in_sets(dtype):
    """One is equal to itself alone, as arrays have no one answer."""
    a, b = (palette_of(smear()[:9].reshape(-1, 3).astype(dtype)) for _ in range(2))
    assert a == a
    assert a != b
    assert len({a, b, a}) == 2


def test_palettes_of_other_types_do_not_add_up():
    narrow, wide = (palette_of(np.zeros((2, 3), dtype)) for dtype in (np.uint8, np.uint16))
    with pytest.raises(ValueError, match="uint16 palette does not add to a uint8 one"):
        narrow + wide


def test_when_a_palette_pays():
    rng = np.random.default_rng(0)
    flat = smear().reshape(-1, 3)
    noise = rng.integers(0, 65536, (5000, 3)).astype(np.uint16)
    assert palette_pays(flat)
    assert palette_pays(np.repeat(flat, 3, 0).astype(np.uint16) * 257)
    assert not palette_pays(noise)
    assert not palette_pays(flat / 255)


def test_alpha_only_hides():
    hidden = np.zeros((48, 64), bool)
    hidden[10:20] = True
    rgba = with_alpha(smear(), hidden).reshape(-1, 4)
    seen = {k: n for k, n in as_dict(palette_of(rgba)).items() if n}
    assert seen == expected(smear()[~hidden])
    assert palette_of(rgba).counts.sum() == (~hidden).sum()


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_columns_of_zeros_are_planes_of_zeros(dtype):
    pixels = smear().astype(dtype).reshape(-1, 3)
    p = palette_of(pixels)
    table = np.random.default_rng(0).normal(size=(len(p), 4)).astype(np.float32)
    table[:, [0, 2]] = 0
    np.testing.assert_array_equal(p.look_up(table, pixels), table[p.rows(pixels)].T)
