"""Fits in float64: palette and dense against the transcription, streamed against stored."""

import numpy as np
import pytest

from algorithm1 import algorithm1, columns_of
from napari_beerlanet import decompose
from napari_beerlanet.core.images.rgb import check_rgb, to_columns
from napari_beerlanet.core.stains import decompose as solve
from napari_beerlanet.core.stains.decompose import Problem, solve_converged, solve_unrolled
from napari_beerlanet.core.stains.palette import palette_of
from pictures import section, smear, start, with_alpha

EXACT = {"rtol": 1e-9, "atol": 1e-9}
PICTURES = {"smear": smear(), "section": section()}


def problem_of(image, method="palette", *, S=None, domain="log", reference=None, report=None):
    checked = check_rgb(image)
    palette = palette_of(checked.flat) if method == "palette" else None
    S = start(5) if S is None else S
    return Problem(checked, checked.flat, palette, S, domain, reference, report)


def check(image, method, *, K=10, unit=True, domain="log", reference=None, lam=0.4, gamma=0.05):
    """Everything that a fit holds against Algorithm 1 on each pixel."""
    problem = problem_of(image, method, domain=domain, reference=reference)
    fit = solve_unrolled(problem, lam, gamma, K, unit, "cpu")
    X, w = columns_of(image, domain)
    end = algorithm1(X, start(5), lam, gamma, K, w=w, reference_pixels=reference, unit_spectra=unit)
    np.testing.assert_allclose(fit.background, end.x0, **EXACT)
    np.testing.assert_allclose(fit.spectra, end.S, **EXACT)
    np.testing.assert_allclose(fit.objective, end.objective, **EXACT)
    w = w if reference is None else w * reference / w.sum()
    np.testing.assert_allclose(fit.mass, end.D.T @ w, **EXACT)
    assert fit.penalties == (lam, gamma)
    np.testing.assert_allclose(fit.columns_to_densities(X), end.D.T, **EXACT)
    if method == "palette":
        rows = problem.palette.rows(problem.pixels)
        np.testing.assert_allclose(fit.table[:, rows], end.D.T, **EXACT)
    assert end.D.any()
    return end


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("method", ["palette", "dense"])
@pytest.mark.parametrize("domain", ["log", "intensity"])
@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
@pytest.mark.parametrize("reference", [None, 500.0])
def test_fits_are_algorithm_1(picture, method, domain, unit, reference):
    settings = {"domain": domain, "unit": unit, "reference": reference}
    check(PICTURES[picture], method, **settings)


@pytest.mark.parametrize("method", ["palette", "dense"])
@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
@pytest.mark.parametrize("reference", [None, 500.0])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_transparent_pixels_weigh_zero(method, unit, reference, dtype):
    hidden = np.zeros((48, 64), bool)
    hidden[5:25, 10:40] = True
    image = smear().astype(dtype) * dtype(np.iinfo(dtype).max // 255)
    rgba = with_alpha(image, hidden)
    rgba[hidden, :3] = 3  # what is under there must not matter
    check(rgba, method, unit=unit, reference=reference)


@pytest.mark.parametrize("lam", [0.0, 1e-3, 0.5, 3.0])
@pytest.mark.parametrize("gamma", [0.0, 0.05])
@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
def test_fits_are_algorithm_1_at_any_penalty(lam, gamma, unit):
    check(smear(), "palette", lam=lam, gamma=gamma, unit=unit, K=20)


@pytest.mark.parametrize("dtype", [np.uint16, np.float16, np.float32, np.float64])
def test_dense_fits_of_other_types(dtype):
    scale = 65535 if dtype == np.uint16 else 1
    noise = np.random.default_rng(0).uniform(-0.3, 0.3, smear().shape)
    check((np.clip((smear() + noise) / 255, 0, 1) * scale).astype(dtype), "dense")


def test_wide_palettes():
    check(smear().astype(np.uint16) * 257, "palette")
    check(smear().astype(np.uint16), "palette")  # nearly black: the floor is one of 65535


@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
@pytest.mark.parametrize("reference", [None, 500.0])
def test_more_pixels_than_memory_holds_are_joined_where_they_agree_to_8_bits(
    monkeypatch, unit, reference
):
    rng = np.random.default_rng(0)
    image = with_alpha(
        np.clip(smear() / 255 + rng.uniform(-1, 1, (48, 64, 3)) / 1000, 0, 1), np.eye(48, 64) > 0
    )
    settings = (0.3, 0.05, 6, unit, "cpu")
    pixels = solve_unrolled(problem_of(image, "dense", reference=reference), *settings)
    monkeypatch.setattr(solve, "_MAX_DENSITIES_IN_MEMORY", 10)
    joined = solve_unrolled(problem_of(image, "dense", reference=reference), *settings)
    X, _ = columns_of(image)
    a, b = (f.columns_to_densities(X) for f in (pixels, joined))
    assert a.any()
    np.testing.assert_allclose(b, a, atol=1e-4)
    np.testing.assert_allclose(joined.spectra, pixels.spectra, atol=1e-4)
    np.testing.assert_allclose(joined.mass, pixels.mass, rtol=1e-4)
    # Of an 8-bit image they are its very colours.
    exact = [with_alpha(smear(), np.eye(48, 64) > 0)] * 2
    problems = problem_of(exact[0], "palette"), problem_of(exact[1], "dense")
    palette, dense = (solve_unrolled(problem, *settings) for problem in problems)
    np.testing.assert_allclose(dense.spectra, palette.spectra, **EXACT)


# The converged solution is the same however the image arrives.


def arrivals():
    image = smear(64, 80)
    yield "uint8, dense", image, "dense"
    yield "uint16, palette", image.astype(np.uint16) * 257, "palette"
    yield "uint16, dense", image.astype(np.uint16) * 257, "dense"
    yield "float64", image / 255, "dense"
    yield "float32", (image / 255).astype(np.float32), "dense"


@pytest.mark.parametrize(("name", "image", "method"), arrivals(), ids=[n for n, *_ in arrivals()])
@pytest.mark.parametrize("penalty", ["auto", 0.3])
def test_converged_alike_for_every_type(name, image, method, penalty):
    settings = {"iterations": "converge", "lam": penalty, "gamma": penalty, "components": 4}
    expected = decompose(smear(64, 80), method="palette", **settings)
    d = decompose(image, method=method, **settings)
    np.testing.assert_array_equal(d.active, expected.active)
    np.testing.assert_allclose(d.background, expected.background, atol=1e-3)
    np.testing.assert_allclose(d.spectra, expected.spectra, atol=1e-3)
    np.testing.assert_allclose(d.densities, expected.densities, atol=2e-3)
    assert d.objective[-1] == pytest.approx(expected.objective[-1], rel=1e-5)


@pytest.mark.parametrize("kind", ["uint8", "uint16", "float32"])
@pytest.mark.parametrize("method", ["palette", "dense"])
@pytest.mark.parametrize("faint", [True, False])
def test_converged_without_the_transparent_pixels(kind, method, faint):
    """Any alpha above zero counts as one, however faint."""
    if kind == "float32" and method == "palette":
        return
    full = {"uint8": 255, "uint16": 65535, "float32": 1}[kind]
    image = (smear(64, 80) / 255 * full).astype(kind)
    alpha = np.full((64, 80), (1 if full > 1 else 1e-4) if faint else full, kind)
    alpha[:, 60:] = 0
    rgba = np.dstack([image, alpha])
    rgba[:, 60:, :3] = 0
    settings = {"iterations": "converge", "lam": 0.3, "gamma": 0.05, "method": method}
    d, bare = decompose(rgba, 3, **settings), decompose(image[:, :60], 3, **settings)
    np.testing.assert_allclose(d.background, bare.background, atol=1e-3)
    np.testing.assert_allclose(d.spectra, bare.spectra, atol=1e-3)
    np.testing.assert_allclose(d.densities[:, :, :60], bare.densities, atol=2e-3)


def test_cells_of_a_dense_image_are_its_8_bit_colours():
    dense, palette = (problem_of(smear(), m).cells() for m in ("dense", "palette"))
    np.testing.assert_allclose(dense.w, palette.w)
    np.testing.assert_allclose(dense.X, palette.X, rtol=1e-12)
    assert len(dense.coarser.w) == len(palette.coarser.w)


def test_bins_average_what_agrees_to_8_bits():
    rng = np.random.default_rng(0)
    image = np.clip(smear() / 255 + rng.uniform(-0.4, 0.4, smear().shape) / 255, 0, 1)
    cells = problem_of(image, "dense").cells()
    X, _ = columns_of(image)
    assert cells.w.sum() == X.shape[1]
    np.testing.assert_allclose(cells.X @ cells.w, X.sum(1), rtol=1e-12)
    assert len(cells.w) == len(np.unique(np.rint(image * 255).reshape(-1, 3), axis=0))


def test_converged_fit_knows_any_colour():
    problem = problem_of(smear(), S=start(3))
    fit = solve_converged(problem, 0.3, 0.05, find_rank=False)
    X = to_columns(problem.palette.colours, "log")
    np.testing.assert_allclose(fit.columns_to_densities(X), fit.table, atol=5e-3)
    np.testing.assert_allclose(fit.mass, fit.table @ problem.palette.counts, rtol=1e-9)
