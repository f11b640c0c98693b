"""Settings of a decomposition: one place for their defaults, and the rule "count, then refit"."""

import inspect

import numpy as np
import pytest

from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.settings import DEFAULT_COMPONENTS, DecomposeSettings
from pictures import section


def test_decompose_takes_its_defaults_from_the_settings():
    parameters = inspect.signature(decompose).parameters
    for name in DecomposeSettings.model_fields:
        assert parameters[name].default == DecomposeSettings.default(name), name


def test_every_setting_has_a_description():
    for name in DecomposeSettings.model_fields:
        assert DecomposeSettings.spec(name).description.endswith("."), name


def test_settings_of_numpy_are_plain_and_can_be_compared():
    spectra = np.eye(3)
    given = DecomposeSettings(components=np.int64(3), lam=np.float32(0.5), spectra=spectra)
    assert given == DecomposeSettings(components=3, lam=0.5, spectra=spectra.tolist())
    assert type(given.components) is int
    assert type(given.lam) is float
    np.testing.assert_array_equal(given.start, spectra)
    assert DecomposeSettings(components="auto").start.shape == (3, DEFAULT_COMPONENTS)


@pytest.mark.parametrize(
    ("changes", "counts", "refits"),
    [
        ({}, True, False),
        ({"components": "auto"}, True, False),
        ({"components": "auto", "lam": 0.1}, False, True),
        ({"components": "auto", "gamma": 0.1}, False, True),
        ({"components": 3, "lam": 0.1}, False, False),
        ({"components": "auto", "iterations": 5}, False, True),
        ({"components": "auto", "lam": 0.1, "iterations": 5}, False, True),
        ({"iterations": 5}, False, False),
        ({"components": "auto", "lam": 0.1, "spectra": np.eye(3)}, False, False),
        ({"spectra": np.eye(3)}, False, False),
    ],
)
def test_when_stains_are_counted(changes, counts, refits):
    settings = DecomposeSettings(**changes)
    assert (settings.counts_stains, settings.refits) == (counts, refits)


@pytest.mark.parametrize(
    ("iterations", "penalty"),
    [
        ("converge", {"lam": 0.5}),
        ("converge", {"gamma": 0.2}),
        ("converge", {"lam": 0.5, "gamma": 0.2}),
        (10, {}),
        (10, {"lam": 0.5}),
    ],
)
def test_counted_stains_are_fitted_again_as_was_asked_for(iterations, penalty):
    image = section()
    counted = decompose(image, iterations="converge")
    by_hand = decompose(image, iterations=iterations, spectra=counted.spectra, **penalty)
    found = decompose(image, "auto", iterations, **penalty)
    np.testing.assert_array_equal(found.spectra, by_hand.spectra)
    np.testing.assert_array_equal(found.densities, by_hand.densities)
    assert found.active.sum() <= counted.active.sum()
