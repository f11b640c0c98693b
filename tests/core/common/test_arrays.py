"""Lazy arrays are computed on their own, and the fast order is the order that NumPy gives."""

import threading

import dask.array as da
import numpy as np
import pytest
from dask.cache import Cache
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from napari_beerlanet.core.common import arrays
from napari_beerlanet.core.common.arrays import GrowableArray, load_array, stable_argsort

KINDS = ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


@pytest.fixture(autouse=True)
def also_few(monkeypatch):
    monkeypatch.setattr(arrays, "_MIN_RADIX_LENGTH", 1)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_as_numpy_does(data, kind):
    values = data.draw(hnp.arrays(kind, st.integers(1, 60)))
    if np.dtype(kind).kind == "f":
        values[data.draw(hnp.arrays(bool, values.shape))] = data.draw(
            st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
        )
    np.testing.assert_array_equal(stable_argsort(values), np.argsort(values, kind="stable"))


@pytest.mark.parametrize("kind", ["f4", "f8", "i8"])
def test_many(kind):
    rng = np.random.default_rng(0)
    values = (1000 * rng.standard_normal(100_000)).astype(kind)
    np.testing.assert_array_equal(stable_argsort(values), np.argsort(values, kind="stable"))


def test_words_are_sorted_too():
    words = np.array(["b", "a", "b", "a"], dtype=object)
    assert stable_argsort(words).tolist() == [1, 3, 0, 2]


def test_an_array_grows_and_keeps_what_is_written():
    grown = GrowableArray(np.zeros((0, 4), np.float32))
    for k in range(200):
        grown.extend(np.full((k % 5, 4), k))
        grown.values[:1] = 7
    assert len(grown) == sum(k % 5 for k in range(200))
    assert grown.values.dtype == np.float32
    assert (grown.values[0] == 7).all()
    assert (grown.values[-1] == 199).all()


class DroppingCache(Cache):
    """napari's cache of chunks at the moment at which another thread needs the room."""

    def _start(self, dsk):
        self.durations = {}
        known = set(dsk) & set(self.cache.data)
        self.cache.data.clear()
        for key in known:
            dsk[key] = self.cache.data[key]


@pytest.mark.parametrize("options", [{}, {"scheduler": "synchronous"}, {"scheduler": "threads"}])
def test_a_cache_that_drops_a_chunk_meanwhile_does_no_harm(options):
    values = np.arange(60).reshape(6, 10)
    lazy = da.from_array(values, chunks=(2, 10)).map_blocks(np.copy, dtype=values.dtype)
    with DroppingCache(1e9):
        lazy.compute()
        with pytest.raises(KeyError):
            lazy.compute()
        lazy.compute()
        np.testing.assert_array_equal(load_array(lazy, **options), values)


def test_a_cache_stays_registered_while_threads_read():
    """dask takes callbacks away while it computes, and two threads might put them back wrongly."""
    lazy = da.ones((400, 400), chunks=(20, 20))
    with Cache(1e6) as cache:
        threads = [threading.Thread(target=load_array, args=(lazy,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert cache._callback in Cache.active
        assert not cache.cache.data


def test_what_is_not_lazy_is_taken_as_it_is():
    values = np.arange(4)
    assert load_array(values) is values
    assert load_array([1, 2]).tolist() == [1, 2]
