"""Decomposing with given spectra: the exact minimum, per pixel and palette alike."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from scipy.optimize import nnls

from algorithm1 import columns_of, objective
from napari_beerlanet import decompose, decompose_slide, load_preset
from napari_beerlanet.core.stains.solver.converge import ColourCells, solve_fixed_spectra
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from napari_beerlanet.samples import photograph
from pictures import ODD, section, smear, with_alpha

HE = np.array([[0.650, 0.072], [0.704, 0.990], [0.286, 0.105]])
HED = np.array([[0.650, 0.072, 0.268], [0.704, 0.990, 0.570], [0.286, 0.105, 0.776]])


def plain_minimum(X, S, lam, gamma, w=None, steps=40_000):
    """x₀, D (p, r) by accelerated proximal gradient steps on every pixel: slow, and independent.

    x₀ is in closed form given D, at most white, so it is D alone that is stepped; a restart where
    momentum points the wrong way makes it converge linearly.
    """
    w = np.ones(X.shape[1]) if w is None else w
    norms = np.linalg.norm(S, axis=0)
    D = Y = np.zeros((X.shape[1], S.shape[1]))
    tau, t = 1 / np.linalg.norm(S.T @ S, 2), 1.0
    for _ in range(steps):
        x0 = np.minimum((X + S @ Y.T) @ w / w.sum(), 0)
        Z = Y + tau * (x0[:, None] - X - S @ Y.T).T @ S
        Z = np.maximum(Z - lam * gamma * tau * norms, 0)
        length = np.sqrt(w @ Z**2)
        keep = np.maximum(1 - lam * tau * norms / np.where(length > 0, length, 1), 0)
        Z *= np.where(length > 0, keep, 0)
        if np.sum(w[:, None] * (Y - Z) * (Z - D)) > 0:
            t = 1.0
        after = (1 + np.sqrt(1 + 4 * t * t)) / 2
        moved = np.abs(Z - D).max()
        D, Y, t = Z, Z + (t - 1) / after * (Z - D), after
        if moved < 1e-14:
            break
    return np.minimum((X + S @ D.T) @ w / w.sum(), 0), D


def check_is_minimum(X, w, x0, S, D, lam, gamma, near=1e-9):
    """The conditions of optimality, which are sufficient: the problem is convex. D is (r, p)."""
    R = x0[:, None] - X - S @ D
    assert (R @ w < near * w.sum()).all()
    assert (R @ w > -near * w.sum())[x0 < 0].all()
    assert (x0 <= 0).all(), "no light is brighter than white"
    assert (D >= 0).all()
    for i, s in enumerate(S.T):
        size = np.linalg.norm(s)
        pull = s @ R - lam * gamma * size
        length = np.sqrt(w @ D[i] ** 2)
        if length > 0:
            slope = lam * size * D[i] / length - pull
            assert (slope > -near).all()
            assert np.abs(slope[D[i] > 0]).max() < near
        else:
            assert np.sqrt(w @ np.maximum(pull, 0) ** 2) <= lam * size * (1 + 1e-6) + near


@pytest.mark.parametrize("S", [HE, HED], ids=["H&E", "H&E-DAB"])
@pytest.mark.parametrize(("lam", "gamma"), [(0.05, 0.4), (0.5, 0.05), (0.2, 0.0), (6.0, 0.02)])
@pytest.mark.parametrize("unit", [True, False])
def test_it_is_the_minimum_that_plain_steps_on_every_pixel_find(S, lam, gamma, unit):
    image = section(16, 20)
    d = decompose(image, spectra=S, fixed_spectra=True, lam=lam, gamma=gamma, unit_spectra=unit)
    X, w = columns_of(image)
    used = S / np.linalg.norm(S, axis=0) if unit else S
    np.testing.assert_allclose(d.spectra, used, rtol=1e-12)
    x0, D = plain_minimum(X, used, lam, gamma)
    np.testing.assert_allclose(d.background, x0, atol=1e-8)
    np.testing.assert_allclose(d.densities.reshape(len(D.T), -1), D.T, atol=1e-6)  # float32
    value = objective(X, d.background, used, D, lam, gamma, w)
    assert d.objective[-1] == pytest.approx(value, rel=1e-9)
    assert (d.lam, d.gamma) == (lam, gamma)


@pytest.mark.parametrize("image", [smear(), section(stains=3)], ids=["smear", "section"])
def test_without_penalty_every_pixel_is_scipys_nnls(image):
    d = decompose(image, spectra=HE, fixed_spectra=True, lam=0.0, gamma=0.0)
    X, w = columns_of(image)
    right = np.array([nnls(d.spectra, d.background - x)[0] for x in X.T]).T
    np.testing.assert_allclose(d.densities.reshape(2, -1), right, atol=2e-6)
    check_is_minimum(X, w, d.background, d.spectra, right, 0.0, 0.0)


@pytest.mark.parametrize("domain", ["log", "intensity"])
@pytest.mark.parametrize("r", [3, 8])
@pytest.mark.parametrize("lam", [0.0, 1e-3])
def test_no_light_is_brighter_than_white(domain, r, lam):
    """Three spectra or more explain any colour as light that is brighter, and more stain."""
    image = photograph("Blood smear (BCCD)")[:240, :320]
    S = default_spectra(r)
    d = decompose(image, spectra=S, fixed_spectra=True, lam=lam, gamma=0.0, domain=domain)
    assert ((d.light > 0.5) & (d.light <= 1)).all()
    assert d.densities.max() < 5
    X, w = columns_of(image, domain)
    D, white = d.densities.reshape(r, -1).astype(float), domain == "intensity"
    check_is_minimum(X - white, w, d.background - white, d.spectra, D, lam, 0.0, near=2e-4)


@pytest.mark.parametrize("method", ["palette", "dense"])
@pytest.mark.parametrize("reference", [None, 500.0])
def test_palette_and_pixels_are_alike(method, reference):
    image = with_alpha(smear(), np.arange(48)[:, None] % 5 < np.arange(64) % 3)
    settings = {"spectra": HED, "fixed_spectra": True, "reference_pixels": reference}
    d = decompose(image, method=method, **settings)
    X, w = columns_of(image)
    w = w if reference is None else w * (reference / w.sum())
    D = d.densities.reshape(3, -1).astype(np.float64)
    check_is_minimum(X, w, d.background, d.spectra, D, d.lam, d.gamma, near=1e-5)
    assert d.method == method


@given(
    seed=st.integers(0, 10**6),
    r=st.integers(1, 6),
    lam=st.sampled_from([0.0, 0.01, 0.3, 5.0]),
    gamma=st.sampled_from([0.0, 0.1, 1.0]),
)
@example(seed=19710, r=3, lam=0.01, gamma=0.1)  # a density is nearly 0, but for rounding
@example(seed=4946, r=6, lam=0.01, gamma=0.1)  # a component vanishes while the others converge
@example(seed=14177, r=4, lam=0.0, gamma=0.0)  # nearly parallel: x₀ has far to go
@example(seed=7025, r=3, lam=0.0, gamma=0.0)
def test_any_spectra_and_penalties_meet_the_optimality_conditions(seed, r, lam, gamma):
    rng = np.random.default_rng(seed)
    X = -rng.gamma(1.0, 0.4, (3, 60))
    w = rng.integers(0, 5, 60).astype(float)
    w[0] += 1
    S = rng.uniform(size=(3, r))
    S[:, rng.random(r) < 0.1] = 0
    norm = np.linalg.norm(S, axis=0)
    S = S / np.where(norm > 0, norm, 1)
    end = solve_fixed_spectra(ColourCells(X, w), S, lam, gamma)
    check_is_minimum(X, w, end.background, S, end.densities, lam, gamma, near=1e-7)
    assert (np.diff(end.objective) <= 0).all()
    assert not end.densities[~S.any(0)].any()


@pytest.mark.parametrize("name", ODD)
def test_odd_pictures_are_finite(name):
    d = decompose(ODD[name], spectra=HE, fixed_spectra=True)
    for values in (d.background, d.spectra, d.densities, d.share, d.objective):
        assert np.isfinite(values).all()
    assert (d.densities >= 0).all()
    assert d.reconstruct().shape == ODD[name].shape


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_more_than_8_bits(dtype):
    image = smear() / 255
    image = (image * 65535).round().astype(dtype) if dtype == np.uint16 else image.astype(dtype)
    plain = decompose(smear(), spectra=HE, fixed_spectra=True)
    d = decompose(image, spectra=HE, fixed_spectra=True)
    np.testing.assert_allclose(d.background, plain.background, atol=1e-6)
    np.testing.assert_allclose(d.densities, plain.densities, atol=1e-4)


def test_truth_comes_back():
    S = HE / np.linalg.norm(HE, axis=0)
    rng = np.random.default_rng(0)
    D = rng.gamma(0.4, 0.8, (2, 40, 50)) * (rng.random((2, 40, 50)) < 0.6)
    x0 = np.log([0.95, 0.9, 0.92])
    image = np.exp(x0 - np.einsum("ki,ihw->hwk", S, D)).astype(np.float32)
    d = decompose(np.clip(image, 0, 1), spectra=HE, fixed_spectra=True)
    assert np.corrcoef(d.densities.ravel(), D.ravel())[0, 1] > 0.999
    np.testing.assert_allclose(d.light, np.exp(x0), atol=0.01)


def test_a_slide_and_its_pixels_have_one_fit():
    image = np.tile(smear(), (6, 6, 1))
    slide = decompose_slide(image, spectra=load_preset("H&E"), fixed_spectra=True)
    whole = decompose(image, spectra=load_preset("H&E"), fixed_spectra=True)
    np.testing.assert_array_equal(slide.fit.background, whole.background)
    np.testing.assert_array_equal(np.asarray(slide.densities()), whole.densities)
    assert slide.fit.names == whole.names == ("haematoxylin", "eosin")


def test_a_stain_that_is_not_there_is_inactive():
    d = decompose(section(), spectra=np.c_[HE, np.zeros(3)], fixed_spectra=True, lam=40.0)
    assert not d.active[2]
    X, w = columns_of(section())
    D = d.densities.reshape(3, -1).astype(float)
    check_is_minimum(X, w, d.background, d.spectra, D, 40.0, d.gamma, near=1e-5)


def test_what_is_wrong_is_one_sentence():
    with pytest.raises(ValueError, match="fixed_spectra needs spectra"):
        decompose(smear(), fixed_spectra=True)
    with pytest.raises(ValueError, match="for 2 given spectra, but there are 1"):
        decompose(smear(), spectra=HE, stain_names=("one",))
