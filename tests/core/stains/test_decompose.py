"""`decompose` from outside: the contract, odd images, bad settings, reports."""

import dataclasses
import pickle
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import napari_beerlanet as nb
from algorithm1 import algorithm1, columns_of
from napari_beerlanet import Decomposition, decompose
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from pictures import ODD, section, smear, start, with_alpha

MODES = pytest.mark.parametrize("iterations", [6, "converge"])
DTYPES = ["uint8", "uint16", "float32"]


def as_type(image, dtype):
    full = {"uint8": 255, "uint16": 65535}.get(dtype, 1)
    return np.round(image / 255 * full, 0 if full > 1 else 12).astype(dtype)


def parts(d: Decomposition) -> bytes:
    arrays = (d.background, d.spectra, d.densities, d.active, d.share, d.objective)
    return b"".join(a.tobytes() for a in arrays)


# The contract.


@MODES
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("r", [1, 4])
def test_shapes_and_types(iterations, dtype, r):
    d = nb.decompose(as_type(smear(), dtype), components=r, iterations=iterations)
    assert isinstance(d, nb.Decomposition)
    assert d.background.shape == (3,)
    assert d.spectra.shape == (3, r)
    assert d.densities.shape == (r, 48, 64)
    assert d.active.shape == d.share.shape == (r,)
    assert d.objective.ndim == 1
    assert iterations == "converge" or len(d.objective) == iterations
    for a in (d.background, d.spectra, d.share, d.objective):
        assert a.dtype == np.float64
        assert np.isfinite(a).all()
    assert d.densities.dtype == np.float32
    assert d.densities.flags.c_contiguous
    assert d.active.dtype == bool
    assert (d.spectra >= 0).all()
    assert (d.densities >= 0).all()
    assert d.lam >= 0
    assert d.gamma >= 0
    assert d.reconstruct().shape == (48, 64, 3)
    with pytest.raises(dataclasses.FrozenInstanceError):
        d.lam = 1.0


def test_the_defaults_are_those_of_the_contract():
    d = decompose(smear())
    assert len(d.active) == 8
    assert d.domain == "log"
    assert d.method == "palette"
    norms = np.linalg.norm(d.spectra, axis=0)
    assert ((abs(norms - 1) < 1e-12) | (norms == 0)).all()
    assert parts(d) == parts(
        decompose(
            smear(),
            components=8,
            iterations="converge",
            spectra=None,
            lam="auto",
            gamma="auto",
            domain="log",
            unit_spectra=True,
            reference_pixels=None,
            method="auto",
            device="auto",
            report=None,
        )
    )


@pytest.mark.parametrize("method", ["palette", "dense"])
@pytest.mark.parametrize("picture", [smear, section])
@pytest.mark.parametrize("domain", ["log", "intensity"])
def test_the_result_is_that_of_algorithm_1(method, picture, domain):
    S = start(4)
    d = decompose(picture(), 4, 9, S, 0.3, 0.05, domain, method=method)
    end = algorithm1(columns_of(picture(), domain)[0], S, 0.3, 0.05, 9, unit_spectra=True)
    np.testing.assert_allclose(d.background, end.x0, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(d.spectra, end.S, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(d.objective, end.objective, rtol=1e-9)
    np.testing.assert_allclose(d.densities.reshape(4, -1), end.D.T, rtol=1e-6, atol=1e-7)
    assert d.method == method
    assert (d.lam, d.gamma, d.domain) == (0.3, 0.05, domain)


@settings(max_examples=60)
@given(
    colours=st.integers(1, 300),
    r=st.integers(1, 9),
    K=st.integers(1, 10),
    dtype=st.sampled_from(["uint8", "uint16"]),
    hidden=st.sampled_from([None, 0.0, 0.5, 0.95]),
    reference=st.sampled_from([None, 50.0]),
    unit=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_odd_images_have_the_result_of_algorithm_1(
    colours, r, K, dtype, hidden, reference, unit, seed
):
    rng = np.random.default_rng(seed)
    palette = rng.integers(0, np.iinfo(dtype).max, (colours, 3), dtype, endpoint=True)
    image = palette[rng.integers(0, colours, (13, 17))]
    if hidden is not None:
        mask = rng.uniform(size=(13, 17)) < hidden
        mask[0, 0] = False
        image = with_alpha(image, mask)
    given_settings = {"reference_pixels": reference, "unit_spectra": unit}
    d = decompose(image, r, K, start(r), 0.3, 0.05, method="palette", **given_settings)
    X, w = columns_of(image)
    end = algorithm1(X, start(r), 0.3, 0.05, K, w=w, **given_settings)
    np.testing.assert_allclose(d.background, end.x0, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(d.spectra, end.S, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(d.objective, end.objective, rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(d.densities.reshape(r, -1), end.D.T, rtol=1e-6, atol=1e-7)


def test_the_penalties_that_were_chosen_are_the_penalties_that_were_used():
    d = decompose(smear(), 4, 10)
    assert parts(d) == parts(decompose(smear(), 4, 10, lam=d.lam, gamma=d.gamma))


@pytest.mark.parametrize("picture", [smear, section])
@pytest.mark.parametrize("lam", [0.0, 0.1, 3.0])
def test_objective_never_rises(picture, lam):
    d = decompose(picture(), 6, 80, lam=lam, gamma=0.02, unit_spectra=False)
    X, _ = columns_of(picture())
    first = 0.5 * ((X - X.mean(1, keepdims=True)) ** 2).sum()
    assert (np.diff([first, *d.objective]) <= 1e-12 * first).all()
    e = decompose(picture(), 6, "converge", lam=lam, gamma=0.02)
    assert (np.diff(e.objective) <= 0).all()


def test_components_come_in_the_order_of_the_start():
    order = [2, 0, 3, 1]
    a, b = (decompose(section(), 8, 10, s, lam=0.2, gamma=0.02) for s in
            (start(4), start(4)[:, order]))  # fmt: skip
    np.testing.assert_allclose(b.spectra, a.spectra[:, order], rtol=1e-9)
    np.testing.assert_allclose(b.densities, a.densities[order], atol=1e-6)
    np.testing.assert_allclose(b.share, a.share[order], rtol=1e-9)


def test_start_spectra_decide_the_number_of_components():
    assert decompose(smear(), 8, 2, start(3)).spectra.shape == (3, 3)
    assert decompose(smear(), 8, 2, start(3).tolist()).spectra.shape == (3, 3)
    np.testing.assert_array_equal(
        decompose(smear(), 5, 2).spectra, decompose(smear(), 5, 2, default_spectra(5)).spectra
    )


@MODES
def test_the_same_call_has_the_same_answer(iterations):
    assert parts(decompose(smear(), 5, iterations)) == parts(decompose(smear(), 5, iterations))


# Which method.


def test_auto_takes_the_palette_where_it_pays():
    noise = np.random.default_rng(0).integers(0, 65535, (60, 50, 3), np.uint16)
    assert decompose(smear(), 2, 2).method == "palette"
    assert decompose(np.repeat(smear(), 3, 0).astype(np.uint16), 2, 2).method == "palette"
    assert decompose(noise, 2, 2).method == "dense"
    assert decompose(smear() / 255, 2, 2).method == "dense"
    assert decompose(noise, 2, 2, method="palette").method == "palette"


def test_a_palette_of_floats_is_refused():
    with pytest.raises(ImageError, match=r'method="palette" takes uint8 or uint16 .*"dense"\.$'):
        decompose(smear() / 255, method="palette")


# Shares and activity.


@MODES
@pytest.mark.parametrize("domain", ["log", "intensity"])
def test_shares_are_shares_of_optical_density(iterations, domain):
    d = decompose(section(), 5, iterations, lam=0.2, gamma=0.02, domain=domain)
    assert d.share.sum() == pytest.approx(1)
    assert (d.share >= 0).all()
    explained = d.spectra.sum(0) * d.densities.reshape(5, -1).sum(1)
    np.testing.assert_allclose(d.share, explained / explained.sum(), rtol=1e-4, atol=1e-6)
    assert ((d.share > 0) == d.active).all()


@MODES
def test_active_is_what_has_a_spectrum_and_a_density(iterations):
    S = start(4)
    S[:, 2] = 0
    d = decompose(smear(), 4, iterations, S, 0.1, 0.02)
    assert not d.active[2]
    assert d.active.any()
    seen = d.densities.reshape(4, -1).any(1) & d.spectra.any(0)
    np.testing.assert_array_equal(d.active, seen)


@MODES
def test_when_everything_dies(iterations):
    d = decompose(smear(), 4, iterations, lam=1e7, gamma=0.1)
    assert not d.active.any()
    assert not d.densities.any()
    assert not d.share.any()
    X, _ = columns_of(smear())
    np.testing.assert_allclose(d.background, X.mean(1), rtol=1e-9)
    assert np.ptp(d.reconstruct().reshape(-1, 3), axis=0).max() == 0


def test_hidden_pixels_do_not_share():
    hidden = np.zeros((48, 64), bool)
    hidden[:, 40:] = True
    rgba = with_alpha(smear(), hidden)
    d, bare = (decompose(i, 4, 6, lam=0.2, gamma=0.05) for i in (rgba, smear()[:, :40]))
    np.testing.assert_allclose(d.share, bare.share, rtol=1e-9)
    np.testing.assert_allclose(d.spectra, bare.spectra, rtol=1e-9)
    np.testing.assert_allclose(d.background, bare.background, rtol=1e-9)
    np.testing.assert_array_equal(d.densities[..., :40], bare.densities)
    np.testing.assert_array_equal(d.densities, d.densities_of(smear()))
    assert d.reconstruct().shape == (48, 64, 3)


def test_an_image_of_hidden_pixels_is_refused():
    rgba = with_alpha(smear(), np.ones((48, 64), bool))
    for method in ("palette", "dense"):
        with pytest.raises(ImageError, match=r"^Every pixel .* transparent\.$"):
            decompose(rgba, method=method)


# Back to an image.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("domain", ["log", "intensity"])
def test_reconstruction_is_the_model(dtype, domain):
    image = as_type(section(), dtype)
    d = decompose(image, 4, 8, lam=0.05, gamma=0.02, domain=domain)
    for components in (None, [0, 1, 2, 3], [2], [3, 0], [1, 1], (0,), np.array([2, 3]), []):
        keep = range(4) if components is None else sorted(set(map(int, components)))
        model = d.background[:, None] - sum(
            (np.outer(d.spectra[:, i], d.densities[i].ravel()) for i in keep),
            np.zeros((3, 48 * 64)),
        )
        light = np.clip(np.exp(model) if domain == "log" else model, 0, 1).T.reshape(48, 64, 3)
        got = d.reconstruct(components)
        assert got.dtype == image.dtype
        full = {"uint8": 255, "uint16": 65535}.get(dtype, 1)
        if full > 1:
            np.testing.assert_array_equal(got, np.rint(light * full))
        else:
            np.testing.assert_allclose(got, light, rtol=1e-6, atol=1e-7)


def test_reconstruction_of_all_is_close_to_the_image():
    d = decompose(section(), iterations="converge", lam=0.01, gamma=0.01)
    assert abs(d.reconstruct().astype(int) - section()).mean() < 2


@pytest.mark.parametrize("wrong", [[4], [-1], [0, 99], [0.5], ["a"], 1.5, "ab"])
def test_wrong_components_are_refused_in_a_sentence(wrong):
    d = decompose(smear(), 4, 2)
    with pytest.raises(ValueError, match=r"^components must be indices from 0 to 3, not ") as e:
        d.reconstruct(wrong)
    assert "np." not in str(e.value)


def test_a_mask_of_components_is_a_mask_or_refused():
    """`d.reconstruct(d.active)` must not mean components 0 and 1."""
    d = decompose(smear(), 4, 6, start(4), 0.1, 0.05)
    mask = np.array([False, False, True, True])
    try:
        got = d.reconstruct(mask)
    except ValueError:
        return
    np.testing.assert_array_equal(got, d.reconstruct([2, 3]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("domain", ["log", "intensity"])
@MODES
def test_residual_is_model_minus_image(dtype, domain, iterations):
    image = as_type(section(), dtype)
    d = decompose(image, 4, iterations, lam=0.1, gamma=0.02, domain=domain)
    rest = d.residual()
    assert rest.shape == (48, 64, 3)
    assert rest.dtype == np.float32
    X, _ = columns_of(image, domain)
    model = X.T.reshape(48, 64, 3) + rest
    light = np.clip(np.exp(model) if domain == "log" else model, 0, 1)
    full = {"uint8": 255, "uint16": 65535}.get(dtype, 1)
    bound = 0.51 if full == 255 else (1.0 if full > 1 else 1e-6)
    assert abs(light * full - d.reconstruct().astype(float)).max() < bound
    penalty = d.lam * sum(
        np.linalg.norm(s) * (d.gamma * p.sum(dtype=float) + np.linalg.norm(p))
        for s, p in zip(d.spectra.T, d.densities, strict=True)
    )
    assert d.objective[-1] == pytest.approx(
        0.5 * (rest.astype(float) ** 2).sum() + penalty, rel=1e-3
    )


def test_light_is_the_background_as_intensity():
    d = decompose(smear(), 3, 4)
    np.testing.assert_allclose(d.light, np.exp(d.background))
    e = decompose(smear(), 3, 4, domain="intensity")
    np.testing.assert_array_equal(e.light, e.background)


def test_colours_are_what_a_component_looks_like_on_white():
    S = np.array([[0.65, 0.07, 0.0, 1.0], [0.70, 0.99, 0.0, 1.0], [0.29, 0.11, 0.0, 1.0]])
    d = decompose(section(), 4, 1, S, 1e7, 0.1)  # everything dies at once: S stays
    assert d.colours.shape == (4, 3)
    assert d.colours.dtype == np.uint8
    haematoxylin, eosin, dead, grey = d.colours.astype(int)
    assert haematoxylin.argmax() == 2
    assert haematoxylin.argmin() == 1
    assert eosin.argmin() == 1
    assert eosin.min() < 100 < 200 < eosin.max()
    assert dead.tolist() == [255, 255, 255]
    assert len(set(grey.tolist())) == 1
    expected = 255 * np.exp(-S / np.where(S.max(0) > 0, S.max(0), 1) * -np.log(grey[0] / 255)).T
    np.testing.assert_allclose(d.colours, expected, atol=1.5)


# Any other image under the same fit.


@pytest.mark.parametrize("dtype", DTYPES)
def test_densities_of_the_same_image_and_of_a_tile(dtype):
    image = as_type(smear(), dtype)
    d = decompose(image, 4, 6, lam=0.1, gamma=0.05)
    np.testing.assert_allclose(d.densities_of(image), d.densities, rtol=1e-6, atol=1e-7)
    tile = d.densities_of(image[5:25, 30:33])
    np.testing.assert_allclose(tile, d.densities[:, 5:25, 30:33], rtol=1e-6, atol=1e-7)
    assert tile.dtype == np.float32
    assert tile.shape == (4, 20, 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("penalty", ["auto", 0.3])
def test_densities_of_the_same_image_when_converged(dtype, penalty):
    image = as_type(smear(64, 80), dtype)
    d = decompose(image, 4, "converge", lam=penalty, gamma=penalty)
    np.testing.assert_allclose(d.densities_of(image), d.densities, atol=2e-3)
    tile = image[5:25, 30:50]
    np.testing.assert_allclose(d.densities_of(tile), d.densities[:, 5:25, 30:50], atol=2e-3)


def test_densities_of_colours_never_seen():
    d = decompose(smear(), 3, 6, lam=0.1, gamma=0.05)
    other = d.densities_of(section())
    assert other.shape == (3, 48, 64)
    assert np.isfinite(other).all()
    assert (other >= 0).all()
    whiter = d.densities_of(np.full((1, 1, 3), 255, np.uint8))
    darker = d.densities_of(np.full((1, 1, 3), 30, np.uint8))
    assert darker.sum() > whiter.sum()


def test_densities_of_another_type_or_of_no_image_are_refused():
    d = decompose(smear(), 3, 2)
    with pytest.raises(ImageError, match="uint8 image, not float64"):
        d.densities_of(smear() / 255)
    with pytest.raises(ImageError):
        d.densities_of(smear()[..., 0])


@MODES
def test_a_decomposition_pickles(iterations):
    d = decompose(smear(), 3, iterations, lam=0.1, gamma=0.05)
    again = pickle.loads(pickle.dumps(d))
    assert parts(again) == parts(d)
    np.testing.assert_array_equal(again.densities_of(section()), d.densities_of(section()))
    np.testing.assert_array_equal(again.reconstruct([1]), d.reconstruct([1]))


def test_a_decomposition_can_be_compared_and_kept_in_a_set():
    a, b = (decompose(smear(), 2, 1, lam=0.1, gamma=0.05) for _ in range(2))
    assert a == a
    assert a != b
    assert len({a, b, a, a.image}) == 3


# Odd images and settings.

SETTINGS = {
    "default": {},
    "r = 1": {"components": 1},
    "r = 32": {"components": 32},
    "K = 1": {"iterations": 1},
    "λ = 0": {"lam": 0},
    "γ = 0": {"gamma": 0},
    "λ huge": {"lam": 1e9},
    "letter": {"unit_spectra": False, "lam": 0.0, "gamma": 0.0},
    "intensity": {"domain": "intensity"},
    "reference": {"reference_pixels": 1e6},
    "dense": {"method": "dense"},
    "converge": {"iterations": "converge"},
    "converge, r = 1": {"iterations": "converge", "components": 1},
    "converge, r = 32": {"iterations": "converge", "components": 32, "lam": 0.1},
    "converge, λ = 0": {"iterations": "converge", "lam": 0.0, "components": 3},
    "converge, λ huge": {"iterations": "converge", "lam": 1e9},
    "converge, intensity": {"iterations": "converge", "domain": "intensity"},
    "converge, reference": {"iterations": "converge", "reference_pixels": 100},
    "converge, dense": {"iterations": "converge", "method": "dense"},
}


FLOATS = ("default", "r = 32", "λ = 0", "converge", "converge, λ = 0")  # the rest is the same


@pytest.mark.parametrize("picture", ODD)
@pytest.mark.parametrize(
    ("settings", "dtype"),
    [(s, "uint8") for s in SETTINGS] + [(s, "float32") for s in FLOATS],
)
def test_odd_images_and_settings_stay_finite(picture, settings, dtype):
    image = as_type(ODD[picture], dtype)
    d = decompose(image, **SETTINGS[settings])
    for a in (d.background, d.spectra, d.densities, d.share, d.objective, d.residual(), d.light):
        assert np.isfinite(a).all()
    assert (d.densities >= 0).all()
    assert (d.spectra >= 0).all()
    assert d.share.sum() == pytest.approx(1 if d.active.any() else 0)
    assert d.reconstruct().dtype == image.dtype
    assert np.isfinite(d.densities_of(image)).all()
    if "huge" in settings:
        assert not d.active.any()


@MODES
@pytest.mark.parametrize("picture", ["blank", "one colour", "one pixel", "black", "white"])
@pytest.mark.parametrize("lam", ["auto", 0.0])
def test_an_image_of_one_colour_has_no_stains_and_its_colour_for_background(
    picture, iterations, lam
):
    d = decompose(ODD[picture], 4, iterations, lam=lam)
    assert not d.active.any()
    np.testing.assert_array_equal(d.reconstruct(), np.maximum(ODD[picture], 1))


# Invariances.


@MODES
def test_turning_the_image_turns_the_densities(iterations):
    a = decompose(smear(), 4, iterations, lam=0.2, gamma=0.05)
    b = decompose(smear()[::-1].swapaxes(0, 1), 4, iterations, lam=0.2, gamma=0.05)
    np.testing.assert_allclose(b.spectra, a.spectra, rtol=1e-12)
    np.testing.assert_allclose(b.densities, a.densities[:, ::-1].swapaxes(1, 2), rtol=1e-6)


@MODES
@pytest.mark.parametrize("method", ["palette", "dense"])
@pytest.mark.parametrize("lam", ["auto", 0.5])
def test_tiling_under_reference_pixels_changes_nothing(iterations, method, lam):
    settings = {"components": 4, "iterations": iterations, "method": method, "lam": lam}
    four = np.tile(smear(), (2, 2, 1))
    a, b = (decompose(i, reference_pixels=2000, **settings) for i in (smear(), four))
    np.testing.assert_allclose(b.background, a.background, rtol=1e-9)
    np.testing.assert_allclose(b.spectra, a.spectra, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(b.densities, np.tile(a.densities, (1, 2, 2)), atol=1e-6)
    np.testing.assert_allclose(b.objective, a.objective, rtol=1e-9)


def test_tiling_without_reference_pixels_changes_something():
    a, b = (decompose(i, 4, 8, lam=0.5, gamma=0.05) for i in (smear(), np.tile(smear(), (2, 2, 1))))
    assert abs(a.spectra - b.spectra).max() > 1e-4


# Bad settings.

WRONG = {
    "components": [0, -3, 65, 5000, 10**9, 2.5, True, "many", None, float("nan")],
    "iterations": [0, -1, 1.5, "many", True, None],
    "spectra": [
        np.ones((2, 4)),
        np.ones(3),
        np.ones((3, 0)),
        -np.ones((3, 2)),
        np.full((3, 2), np.nan),
        np.full((3, 2), np.inf),
        "red",
        [[1, 2], [3]],
    ],
    "lam": [-1, float("nan"), float("inf"), "much", None, [1, 2]],
    "gamma": [-1, float("nan"), "much", None],
    "domain": ["x", "", None],
    "method": ["x", "exact", None],
    "reference_pixels": [0, -1, float("nan"), float("inf"), "many"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_wrong_settings_are_refused_in_a_sentence(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*\.$") as caught:
        decompose(smear(), **{name: value})
    message = str(caught.value)
    assert "\n" not in message
    assert message.count(". ") == 0
    assert name == "spectra" or repr(value) in message


@pytest.mark.parametrize("iterations", [3, "converge"])
@pytest.mark.parametrize("method", ["palette", "dense"])
def test_an_unknown_device_is_refused_in_a_sentence(iterations, method):
    with pytest.raises(ValueError, match=r'^"warp" is no device name; use "auto" or one of .*\.$'):
        decompose(smear(), iterations=iterations, method=method, device="warp")


# Reports.


@MODES
@pytest.mark.parametrize("image", [smear(), smear() / 255], ids=["palette", "dense"])
@pytest.mark.parametrize("lam", ["auto", 0.3])
def test_reports_grow_from_zero_to_one(iterations, image, lam):
    heard = []
    decompose(image, 4, iterations, lam=lam, report=heard.append)
    fractions = [p.fraction for p in heard]
    assert fractions[0] == 0
    assert fractions[-1] == 1
    assert (np.diff(fractions) >= 0).all()
    assert len(heard) >= 4
    assert all(p.message for p in heard)


@MODES
def test_a_report_changes_nothing(iterations):
    a = decompose(smear(), 4, iterations)
    b = decompose(smear(), 4, iterations, report=lambda progress: None)
    assert parts(a) == parts(b)


@MODES
@pytest.mark.parametrize("image", [smear(), smear() / 255], ids=["palette", "dense"])
def test_cancelling_at_any_report_stops_the_work(iterations, image):
    heard = []
    decompose(image, 3, iterations, report=heard.append)
    for when in sorted({0, 1, len(heard) // 2, len(heard) - 1}):
        told = []

        def stop(progress, told=told, when=when):
            told.append(progress)
            if len(told) > when:
                raise Cancelled

        with pytest.raises(Cancelled):
            decompose(image, 3, iterations, report=stop)
        assert len(told) == when + 1


def test_reports_come_from_the_thread_that_called():
    seen = set()
    decompose(smear(), 3, "converge", report=lambda _: seen.add(threading.get_ident()))
    assert seen == {threading.get_ident()}


# A palette that was counted before.


@MODES
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_a_ready_palette_gives_the_same_and_is_not_counted_again(iterations, dtype, monkeypatch):
    image = as_type(smear(), dtype)
    d = decompose(image, 4, iterations, method="palette")
    palette = palette_of(image.reshape(-1, 3))
    monkeypatch.setattr("napari_beerlanet.core.stains.decompose._choose_palette", None)
    assert parts(decompose(image, 4, iterations, palette=palette)) == parts(d)


@MODES
@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
def test_one_palette_for_all_planes_gives_them_one_fit(iterations, dtype):
    planes = [as_type(smear(seed=seed), dtype) for seed in (0, 1)]
    palette = palette_of(planes[0].reshape(-1, 3)) + palette_of(planes[1].reshape(-1, 3))
    settings = {"iterations": iterations, "lam": 0.1, "gamma": 0.05}
    one, other = (decompose(p, 3, palette=palette, **settings) for p in planes)
    np.testing.assert_array_equal(one.spectra, other.spectra)
    np.testing.assert_array_equal(one.densities_of(planes[1]), other.densities)
    both = decompose(np.concatenate(planes), 3, **settings)
    np.testing.assert_allclose(one.spectra, both.spectra, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("image", "settings", "reason"),
    [
        (section(), {}, "colours that the given palette does not hold"),
        (section().astype(np.uint16), {}, "palette is of uint8 colours, the image uint16"),
        (section() / 255, {}, "palette is of uint8 colours, the image float64"),
        (smear(), {"method": "dense"}, "takes no palette"),
    ],
)
def test_a_palette_that_is_not_the_images_is_refused(image, settings, reason):
    with pytest.raises(ValueError, match=reason):
        decompose(image, 3, 2, palette=palette_of(smear().reshape(-1, 3)), **settings)


def test_a_palette_of_nothing_is_refused():
    with pytest.raises(ImageError, match="empty"):
        decompose(smear(), 3, 2, palette=palette_of(np.zeros((0, 3), np.uint8)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_a_colour_of_the_image_has_exactly_its_densities_elsewhere(dtype):
    image = as_type(smear(64, 80), dtype)
    d = decompose(image, 4, "converge", method="palette")
    np.testing.assert_array_equal(d.densities_of(image[5:25, 30:50]), d.densities[:, 5:25, 30:50])


def test_a_search_does_not_depend_on_the_number_of_threads(monkeypatch):
    found = []
    for threads in ("1", "3"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        monkeypatch.setattr("napari_beerlanet.core.common.threads._pool", None)
        found += [parts(decompose(smear(), 5, "converge", lam=lam)) for lam in ("auto", 0.3)]
    assert found[:2] == found[2:]


def test_another_image_is_rebuilt_and_compared_under_the_same_fit():
    d = decompose(smear(), 3, "converge")
    tile = smear()[5:25, 30:50]
    np.testing.assert_array_equal(d.reconstruct_of(tile), d.reconstruct()[5:25, 30:50])
    np.testing.assert_array_equal(d.reconstruct_of(tile, [0]), d.reconstruct([0])[5:25, 30:50])
    np.testing.assert_allclose(d.residual_of(tile), d.residual()[5:25, 30:50], atol=1e-6)
