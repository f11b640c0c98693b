"""Vahadane against a plain solution per pixel, and BeerLaNet as a normalizer."""

import numpy as np
import pytest
from sklearn.decomposition import sparse_encode

from napari_beerlanet.core.normalization.beerlanet import match_spectra
from napari_beerlanet.core.normalization.classical import find_stain_vectors
from napari_beerlanet.core.normalization.methods import fitted_normalizer
from napari_beerlanet.core.normalization.normalizer import ColourStatistics
from napari_beerlanet.core.normalization.vahadane import (
    SPARSITY,
    find_sparse_stains,
    separate_stains,
    sparse_densities,
)
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.presets import spectral_angle
from napari_beerlanet.core.stains.solver.converge import ColourCells
from napari_beerlanet.samples import blood_smear, he_field, photograph


def plain_vahadane(rgb, sparsity=SPARSITY):
    """Background, W, H of an image, pixel by pixel in float64, with nothing but NumPy.

    Alternating minimisation until nothing moves: H by cyclic coordinate descent, as is W.
    """
    pixels = rgb.reshape(-1, 3).astype(float)
    X = np.log(np.maximum(pixels, 1) / 255)
    # The mean of the brightest 5 %; of equally bright pixels, each counts in part.
    brightness, wanted, taken = pixels.sum(1), 0.05 * len(X), 0.0
    weights = np.zeros(len(X))
    for level in np.unique(brightness)[::-1]:
        here = brightness == level
        weights[here] = min((wanted - taken) / here.sum(), 1.0)
        taken += weights[here].sum()
        if taken >= wanted - 1e-9:
            break
    background = weights @ X / weights.sum()
    V = np.maximum(background - X, 0).T
    W = np.maximum(
        find_stain_vectors(ColourStatistics.of(palette_of(rgb.reshape(-1, 3)))).stains, 0
    )
    W /= np.linalg.norm(W, axis=0)
    H = np.zeros((2, V.shape[1]))
    for _ in range(4000):
        before = W.copy()
        for _ in range(30):
            for j in range(2):
                rest = V - np.outer(W[:, 1 - j], H[1 - j])
                H[j] = np.maximum(W[:, j] @ rest - sparsity, 0) / (W[:, j] @ W[:, j])
        for _ in range(30):
            for j in range(2):
                rest = V - np.outer(W[:, 1 - j], H[1 - j])
                best = np.maximum(rest @ H[j] / (H[j] @ H[j]), 0)
                W[:, j] = best / max(np.linalg.norm(best), 1)
        if np.abs(W - before).max() < 1e-11:
            break
    return background, W, H


@pytest.fixture(scope="module")
def section():
    return he_field((48, 64), seed=4, shift=0.4).image


def test_vahadane_is_what_a_plain_solution_per_pixel_gives(section):
    found = find_sparse_stains(palette_of(section.reshape(-1, 3)))
    background, W, H = plain_vahadane(section)
    np.testing.assert_allclose(found.background, background, rtol=1e-12)
    np.testing.assert_allclose(found.stains, W, atol=1e-7)
    X = np.log(np.maximum(section.reshape(-1, 3).astype(float), 1) / 255)
    ours = sparse_densities(np.maximum(background - X, 0).T, found.stains)
    np.testing.assert_allclose(ours, H, atol=1e-6)
    np.testing.assert_allclose(found.stains @ ours, W @ H, atol=1e-7)


def test_weighted_colours_are_the_pixels(section):
    palette = palette_of(section.reshape(-1, 3))
    found = find_sparse_stains(palette)
    X = np.log(np.maximum(section.reshape(-1, 3).astype(float), 1) / 255).T
    V = np.maximum(found.background[:, None] - X, 0)
    W = separate_stains(
        ColourCells(V, np.ones(V.shape[1])), np.array([[0.6, 0.2], [0.7, 0.9], [0.4, 0.4]])
    )
    order = [0, 1] if W[:, 0] @ found.stains[:, 0] > W[:, 1] @ found.stains[:, 0] else [1, 0]
    np.testing.assert_allclose(found.stains, W[:, order], atol=1e-7)  # from another start, too
    H = sparse_densities(V, found.stains)
    np.testing.assert_allclose(found.strengths, np.percentile(H, 99, axis=1), rtol=1e-12)
    np.testing.assert_allclose(np.linalg.norm(found.stains, axis=0), 1, atol=1e-12)
    assert found.stains.min() >= 0


def test_sparse_densities_are_those_of_scikit_learn(section):
    rng = np.random.default_rng(0)
    V = np.abs(rng.normal(0.3, 0.4, (3, 200)))
    W = np.array([[0.6, 0.2], [0.7, 0.9], [0.4, 0.4]])
    W /= np.linalg.norm(W, axis=0)
    wanted = sparse_encode(
        V.T, W.T, algorithm="lasso_cd", alpha=SPARSITY, positive=True, max_iter=10000
    )
    np.testing.assert_allclose(sparse_densities(V, W).T, wanted, atol=1e-4)


def test_vahadane_finds_the_known_stains():
    truth = he_field((256, 256), seed=1)
    found = find_sparse_stains(palette_of(truth.image.reshape(-1, 3)))
    angles = [min(spectral_angle(s, t) for s in found.stains.T) for t in truth.spectra.T]
    assert max(angles) < 12


@pytest.mark.parametrize("method", ["vahadane", "beerlanet"])
def test_an_image_takes_the_looks_of_its_template(method):
    template, source = he_field((128, 128), seed=1), he_field((128, 128), seed=1, shift=1.0)
    normalizer = fitted_normalizer(method, template.image)
    done = normalizer.apply(source.image)
    assert not done.unchanged
    again = normalizer.apply(done.rgb)
    np.testing.assert_allclose(again.before.background, done.after.background, atol=0.03)
    for own in again.before.stains.T:
        assert min(spectral_angle(own, other) for other in done.after.stains.T) < 6

    def distance(image):  # the same cells, seen in another laboratory
        return np.abs(image.astype(int) - template.image).mean()

    assert distance(done.rgb) < distance(source.image) / 2


def test_beerlanet_gives_the_template_itself_back():
    template = he_field((128, 128), seed=1).image
    done = fitted_normalizer("beerlanet", template).apply(template)
    assert np.abs(done.rgb.astype(int) - template).mean() < 3


def test_beerlanet_matches_stains_by_angle_and_not_by_index():
    stains = np.array([[0.65, 0.07], [0.70, 0.99], [0.29, 0.11]])
    matched, angles = match_spectra(stains[:, ::-1], stains)
    assert matched.tolist() == [1, 0]
    assert max(angles) < 1e-5


def test_beerlanet_says_where_stains_cannot_be_matched():
    section = fitted_normalizer("beerlanet", photograph("H&E section"))
    rng = np.random.default_rng(0)
    green = np.exp(-rng.gamma(1.0, 0.5, (64, 64, 1)) * np.array([0.9, 0.1, 0.42]))
    source = np.rint(240 * green).astype(np.uint8)
    done = section.apply(source)
    assert done.unchanged
    np.testing.assert_array_equal(done.rgb, source)
    assert "cannot be matched" in done.notes[0]
    assert done.before.stains is not None


def test_beerlanet_of_several_templates():
    templates = [he_field((64, 80), seed=1).image, he_field((72, 64), seed=2).image]
    normalizer = fitted_normalizer("beerlanet", templates)
    assert normalizer.state()[0]["stains"].shape == (3, 2)
    assert not normalizer.apply(templates[0]).unchanged


def test_a_stain_that_is_rare_keeps_its_strength():
    smear = blood_smear((128, 128), seed=3, white_cells=0).image
    section = fitted_normalizer("vahadane", he_field((128, 128), seed=1).image)
    done = section.apply(smear)
    assert done.unchanged or np.isfinite(done.rgb).all()
