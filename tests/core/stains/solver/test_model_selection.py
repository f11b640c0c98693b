"""λ, γ and the number of stains chosen from the image: on fields whose truth is known."""

from functools import cache

import numpy as np
import pytest
from scipy.optimize import linear_sum_assignment

from napari_beerlanet import decompose
from napari_beerlanet.core.images.rgb import to_columns
from napari_beerlanet.core.stains.solver import model_selection
from napari_beerlanet.core.stains.solver.converge import ColourCells
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from napari_beerlanet.samples import blood_smear, he_field
from pictures import section, smear, with_alpha

SHAPE = (384, 512)
FIELDS = {
    "smear": lambda **more: blood_smear(SHAPE, cell_diameter=50, **more),
    "H&E": lambda **more: he_field(SHAPE, **more),
    "H&E and DAB": lambda **more: he_field(SHAPE, stains=3, **more),
}
# Of eosin in three-stain fields: its densities are low, so noise of the others shows in them.
CORRELATION = {"eosin": 0.86}


@cache
def field(kind, seed, shift):
    return FIELDS[kind](seed=seed, shift=shift)


def compare(truth, d):
    """Cosine and correlation of each true stain with the component that it matches."""
    on = np.flatnonzero(d.active)
    cosine = truth.spectra.T @ d.spectra[:, on] / np.linalg.norm(d.spectra[:, on], axis=0)
    stains, found = linear_sum_assignment(cosine, maximize=True)
    D, E = (x.reshape(len(x), -1) for x in (truth.densities, d.densities[on]))
    correlation = [np.corrcoef(D[i], E[j])[0, 1] for i, j in zip(stains, found, strict=True)]
    return cosine[stains, found], np.array(correlation)


@pytest.mark.parametrize(
    ("kind", "shift"),
    # A shifted third dye can explain less than the 0.03 OD from which it is counted.
    [(kind, shift) for kind in FIELDS for shift in (0.0, 0.5) if "DAB" not in kind or shift == 0],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_stains_are_counted_and_recovered(kind, shift, seed):
    truth = field(kind, seed, shift)
    d = decompose(truth.image, iterations="converge")
    assert d.active.sum() == len(truth.stains)
    cosine, correlation = compare(truth, d)
    assert cosine.min() > 0.99
    least = 0.95
    for name, value in zip(truth.stains, correlation, strict=True):
        assert value > (CORRELATION.get(name, least) if len(truth.stains) == 3 else least), name
    assert abs(d.light - np.exp(truth.background)).max() < 0.06


@pytest.mark.parametrize("seed", [0, 1])
def test_one_stain_is_one_component(seed):
    truth = blood_smear(SHAPE, cell_diameter=50, white_cells=0, platelets=0, seed=seed)
    d = decompose(truth.image, iterations="converge")
    assert d.active.sum() == 1
    assert d.share[d.active] == pytest.approx(1)
    assert d.spectra[:, d.active].ravel() @ truth.spectra[:, 0] > 0.998
    correlation = np.corrcoef(d.densities[d.active].ravel(), truth.densities[0].ravel())[0, 1]
    assert correlation > 0.96


def test_stains_take_the_places_of_the_spectra_that_they_resemble():
    d = decompose(field("H&E and DAB", 0, 0.0).image, iterations="converge")
    places = np.flatnonzero(d.active)
    assert 0 in places  # haematoxylin
    assert 2 in places  # DAB
    cosine = default_spectra(8)[:, :5].T @ d.spectra[:, places]
    best = linear_sum_assignment(cosine, maximize=True)
    assert sorted(best[0].tolist()) == places.tolist()
    assert not d.spectra[:, ~d.active].any()


@pytest.mark.parametrize("r", [1, 2, 3])
def test_no_more_stains_than_components(r):
    d = decompose(field("H&E and DAB", 0, 0.0).image, r, "converge")
    assert d.active.sum() == r
    assert d.spectra.shape == (3, r)


def test_counting_does_not_depend_on_the_way_the_image_lies():
    image = field("H&E", 0, 0.0).image
    a = decompose(image, iterations="converge")
    b = decompose(image.swapaxes(0, 1)[::-1], iterations="converge")
    np.testing.assert_array_equal(a.active, b.active)
    np.testing.assert_allclose(a.spectra, b.spectra, atol=5e-3)


# λ given, γ given, both given.


@pytest.mark.parametrize("iterations", [5, "converge"])
def test_what_is_given_is_used(iterations):
    image = smear(64, 80)
    both = decompose(image, 4, iterations, lam=0.4, gamma=0.07)
    assert (both.lam, both.gamma) == (0.4, 0.07)
    lam = decompose(image, 4, iterations, lam=0.4)
    assert lam.lam == 0.4
    assert lam.gamma > 0
    gamma = decompose(image, 4, iterations, gamma=0.07)
    assert gamma.gamma == 0.07
    assert gamma.lam > 0
    for d in (both, lam, gamma):
        assert d.active.any()
        assert np.isfinite(d.spectra).all()


def test_zero_may_be_given():
    d = decompose(smear(), 3, 5, lam=0.0)
    assert d.lam == 0
    assert np.isfinite(d.gamma)
    assert decompose(smear(), 3, 5, gamma=0.0).gamma == 0


@pytest.mark.parametrize("iterations", [5, "converge"])
def test_start_spectra_with_free_penalties(iterations):
    S = default_spectra(2)
    d = decompose(section(96, 128), iterations=iterations, spectra=S)
    assert d.spectra.shape == (3, 2)
    assert d.active.all()


def test_chosen_penalties_grow_with_the_image_as_the_norms_do():
    """λ ~ √p and λγ fixed: what is shrunk is shrunk by the same optical density."""
    one, four = smear(64, 80), np.tile(smear(64, 80), (2, 2, 1))
    a, b = decompose(one, 4), decompose(four, 4)
    assert b.lam == pytest.approx(2 * a.lam)
    assert b.lam * b.gamma == pytest.approx(a.lam * a.gamma)
    np.testing.assert_allclose(a.spectra, b.spectra, rtol=1e-6)


def test_a_pale_image_is_not_erased():
    truth = blood_smear((256, 320), cell_diameter=50, noise=0, jpeg_quality=None, vignetting=0)
    light = np.exp(truth.background)
    pale = np.rint(255 * light * (truth.image / 255 / light) ** 0.2).astype(np.uint8)
    d = decompose(pale, iterations="converge")
    assert d.active.any()
    seen = np.einsum("cr,rhw->hw", d.spectra, d.densities)
    true = np.einsum("cr,rhw->hw", truth.spectra, truth.densities)
    assert np.corrcoef(seen.ravel(), true.ravel())[0, 1] > 0.9


# Its parts.


def test_rank_of_columns_that_have_that_rank():
    rng = np.random.default_rng(0)
    S = default_spectra(8)
    dyes = np.array([[0.65, 0.70, 0.29], [0.07, 0.99, 0.11], [0.27, 0.57, 0.78]]).T
    D = np.maximum(rng.normal(0.2, 0.6, (3, 500)), 0)
    for rank in (1, 2, 3):
        columns = -0.05 - dyes[:, :rank] @ D[:rank] + rng.normal(0, 0.002, (3, 500))
        assert model_selection.choose_rank(columns, S) == rank
    assert model_selection.choose_rank(np.full((3, 50), -0.3), S) == 1
    assert model_selection.choose_rank(-0.05 - dyes @ D, S[:, :2]) == 2


def test_block_means_are_means_of_ln_intensity():
    image = smear(64, 80)
    blocks = model_selection.block_means(image, "log")
    X = to_columns(image.reshape(-1, 3), "log").reshape(3, 8, 8, 10, 8).mean((2, 4))
    np.testing.assert_allclose(blocks, X.reshape(3, 80), rtol=1e-12)


@pytest.mark.parametrize("shape", [(1, 1), (1, 300), (300, 1), (7, 9), (17, 130), (64, 80)])
def test_block_means_of_any_shape(shape):
    image = np.resize(smear(), (*shape, 3))
    blocks = model_selection.block_means(image, "log")
    assert blocks.shape[0] == 3
    assert 1 <= blocks.shape[1] <= 1024
    assert np.isfinite(blocks).all()


def test_block_means_leave_hidden_blocks_out():
    hidden = np.zeros((128, 80), bool)
    hidden[:64] = True
    rgba = with_alpha(smear(128, 80), hidden)
    rgba[:64, :, :3] = 0
    blocks = model_selection.block_means(rgba, "log")
    np.testing.assert_allclose(blocks, model_selection.block_means(smear(128, 80)[64:], "log"))
    assert np.isfinite(
        model_selection.block_means(with_alpha(smear(), np.eye(48, 64) >= 0), "log")
    ).all()


def test_penalties_of_an_image_without_contrast_are_finite():
    cells = ColourCells(np.full((3, 2), -0.5), np.array([3.0, 4.0]))
    lam, gamma = model_selection.auto_penalties(cells, None, None)
    assert lam > 0
    assert gamma == pytest.approx(0, abs=1e-12)
    assert model_selection.auto_penalties(cells, 0.0, None) == (0.0, 0.0)
    assert model_selection.auto_penalties(cells, 2.0, 3.0) == (2.0, 3.0)
