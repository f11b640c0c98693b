"""The fast order is the order that NumPy gives."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from napari_beerlanet.core import sorting
from napari_beerlanet.core.sorting import stable_order

KINDS = ["f2", "f4", "f8", "i1", "i4", "i8", "u1", "u2", "u4", "u8", "?"]


@pytest.fixture(autouse=True)
def also_few(monkeypatch):
    monkeypatch.setattr(sorting, "_FEW", 1)


@settings(max_examples=200, deadline=None)
@given(data=st.data(), kind=st.sampled_from(KINDS))
def test_as_numpy_does(data, kind):
    values = data.draw(hnp.arrays(kind, st.integers(1, 60)))
    if np.dtype(kind).kind == "f":
        values[data.draw(hnp.arrays(bool, values.shape))] = data.draw(
            st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 0.0, -0.0, 1.0])
        )
    np.testing.assert_array_equal(stable_order(values), np.argsort(values, kind="stable"))


@pytest.mark.parametrize("kind", ["f4", "f8", "i8"])
def test_many(kind):
    rng = np.random.default_rng(0)
    values = (1000 * rng.standard_normal(100_000)).astype(kind)
    np.testing.assert_array_equal(stable_order(values), np.argsort(values, kind="stable"))


def test_words_are_sorted_too():
    words = np.array(["b", "a", "b", "a"], dtype=object)
    assert stable_order(words).tolist() == [1, 3, 0, 2]
