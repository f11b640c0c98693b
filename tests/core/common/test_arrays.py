"""The fast order is the order that NumPy gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from napari_beerlanet.core.common import arrays
from napari_beerlanet.core.common.arrays import GrowableArray, stable_argsort

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
