"""The converged solution: monotone, no worse than plain iterations, a fixed point, merged."""

import numpy as np
import pytest

from algorithm1 import algorithm1, columns_of, objective
from napari_beerlanet import decompose
from napari_beerlanet.core.images.rgb import to_columns
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.solver.converge import (
    TOLERANCE,
    ColourCells,
    ColumnSolver,
    Solution,
    build_cells,
    converge,
)
from napari_beerlanet.core.stains.solver.converged_kernels import advance, residual, sweep
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from pictures import section, smear, start

PICTURES = {"smear": smear(60, 80), "section": section(60, 80), "three": section(60, 80, 1, 3)}
PENALTIES = [(0.05, 0.05), (1.0, 0.001), (5.0, 0.001), (1.0, 0.5)]


def cells(image, shifts=(2, 3)):
    p = palette_of(image.reshape(-1, 3))
    return build_cells(p.codes, to_columns(p.colours, "log"), p.counts.astype(float), shifts)


def value_of(c: ColourCells, s: Solution) -> float:
    return objective(c.X, s.background, s.spectra, s.densities.T, s.lam, s.gamma, c.w)


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize(("lam", "gamma"), PENALTIES)
@pytest.mark.parametrize("r", [2, 3, 6])
def test_it_ends_no_higher_than_plain_iterations_and_at_a_fixed_point(picture, lam, gamma, r):
    c, S = cells(PICTURES[picture]), default_spectra(r)
    found = converge(c, S, lam, gamma)
    values = found.objective
    assert (np.diff(values) <= 0).all()
    assert values[-1] == pytest.approx(value_of(c, found), rel=1e-9), "what it says it reached"
    plain = decompose(PICTURES[picture], r, 300, S, lam, gamma, unit_spectra=False)
    assert values[-1] <= plain.objective[-1] * (1 + 1e-6)
    more = algorithm1(c.X, found.spectra, lam, gamma, 1, w=c.w, D=found.densities.T)
    assert more.objective[0] == pytest.approx(values[-1], rel=1e-4)


@pytest.mark.parametrize("picture", PICTURES)
def test_it_is_what_plain_iterations_settle_at(picture):
    c, S = cells(PICTURES[picture][:20, :24]), start(2)
    lam, gamma = 0.2, 0.05
    found = converge(c, S, lam, gamma, tolerance=1e-11)
    plain = algorithm1(c.X, S, lam, gamma, 4000, w=c.w, unit_spectra=True)
    assert found.objective[-1] <= plain.objective[-1] * (1 + 1e-9)
    np.testing.assert_allclose(found.background, plain.x0, atol=2e-3)
    np.testing.assert_allclose(found.spectra @ found.densities, plain.S @ plain.D.T, atol=5e-3)


@pytest.mark.parametrize("tolerance", [1e-3, TOLERANCE, 1e-9])
def test_the_tolerance_is_honoured(tolerance):
    c = cells(PICTURES["smear"])
    values = converge(c, default_spectra(3), 0.3, 0.05, tolerance=tolerance).objective
    assert len(values) < 2000
    if len(values) > 10:
        assert values[-11] - values[-1] <= tolerance * values[-1]
    for k in range(11, len(values)):  # and it stopped as soon as it was
        assert values[k - 11] - values[k - 1] > tolerance * values[k - 1]


def test_a_tighter_tolerance_goes_further():
    c, S = cells(PICTURES["three"]), default_spectra(4)
    loose, tight = (converge(c, S, 0.3, 0.02, tolerance=t) for t in (1e-3, 1e-8))
    assert tight.objective[-1] < loose.objective[-1]
    assert len(tight.objective) > len(loose.objective)


def test_the_default_tolerance_is_the_stated_one():
    c, S = cells(PICTURES["smear"]), default_spectra(3)
    a, b = converge(c, S, 0.3, 0.05), converge(c, S, 0.3, 0.05, tolerance=TOLERANCE)
    np.testing.assert_array_equal(a.objective, b.objective)
    assert TOLERANCE <= 1e-5


# Merging.


@pytest.mark.parametrize("tilt", [0.0, 1e-4, 5e-3])
@pytest.mark.parametrize("copies", [2, 3])
def test_parallel_spectra_become_one(tilt, copies):
    """One dye, no noise: as many starts as you like end in one component, the same one."""
    rng = np.random.default_rng(0)
    dye = np.array([0.3, 0.7, 0.648])
    X = np.log(0.9) - dye[:, None] * np.maximum(rng.normal(size=400), 0)
    c = ColourCells(X, np.ones(400))
    S = np.repeat(default_spectra(1), copies, 1)
    S[0] += tilt * np.arange(copies)
    found = converge(c, S, 0.05, 0.01)
    alive = (found.densities @ c.w > 0) & found.spectra.any(0)
    assert alive.sum() == 1
    assert dye @ found.spectra[:, alive].ravel() > 0.999 * np.linalg.norm(dye)
    once = converge(c, S[:, :1], 0.05, 0.01)
    assert found.objective[-1] == pytest.approx(once.objective[-1], rel=1e-4)


@pytest.mark.parametrize("lam", [0.05, 0.5, 2.0])
def test_doubled_starts_do_no_harm(lam):
    """They merge, or part and end lower: three spectra may fit two dyes at a lower price."""
    rng = np.random.default_rng(0)
    dyes = default_spectra(2)
    D = np.maximum(rng.normal(size=(2, 600)), 0)
    c = ColourCells(np.log(0.9) - dyes @ D, np.ones(600))
    twice, once = (converge(c, S, lam, 0.01) for S in (dyes[:, [0, 0, 1, 1]], dyes))
    assert twice.objective[-1] <= once.objective[-1] * (1 + 1e-6)
    alive = twice.densities @ c.w > 0
    live = twice.spectra[:, alive]
    assert (live.T @ live - np.eye(alive.sum())).max() < 0.9999


@pytest.mark.parametrize("picture", PICTURES)
@pytest.mark.parametrize("r", [6, 8])
def test_no_two_active_spectra_are_the_same(picture, r):
    d = decompose(PICTURES[picture], r, "converge", lam=2.0, gamma=0.01)
    live = d.spectra[:, d.active]
    cosine = live.T @ live - np.eye(live.shape[1])
    assert cosine.max() < 0.9999
    assert live.shape[1] <= max(4, r // 2)
    dead = d.spectra[:, ~d.active]
    assert not dead.any() or not d.densities[~d.active].any()


def test_a_large_penalty_kills_everything():
    found = converge(cells(PICTURES["smear"]), default_spectra(4), 1e6, 0.1)
    assert not found.densities.any()
    X, _ = columns_of(PICTURES["smear"])
    np.testing.assert_allclose(found.background, X.mean(1))


@pytest.mark.parametrize("domain", ["log", "intensity"])
@pytest.mark.parametrize(("lam", "gamma"), [(0.0, 0.0), (0.01, 0.01), (0.5, 0.05)])
@pytest.mark.parametrize("hold", ["nothing", "spectra"])
def test_no_light_is_brighter_than_white(domain, lam, gamma, hold):
    image, white = PICTURES["three"], float(domain == "intensity")
    p = palette_of(image.reshape(-1, 3))
    X, w = to_columns(p.colours, domain), p.counts.astype(float)
    c = build_cells(p.codes, X, w, white=white)
    found = converge(c, default_spectra(4), lam, gamma, hold=hold)
    assert (found.background <= white).all()
    assert found.objective[-1] == pytest.approx(value_of(c, found), rel=1e-9, abs=1e-12)
    assert (np.diff(found.objective) <= 0).all()


def test_order_of_start_spectra_orders_the_result():
    order, S = [2, 0, 1], default_spectra(3)
    c = cells(PICTURES["three"])
    a = converge(c, S, 0.2, 0.02, tolerance=1e-10)
    b = converge(c, S[:, order], 0.2, 0.02, tolerance=1e-10)
    assert a.objective[-1] == pytest.approx(b.objective[-1], rel=1e-3)
    np.testing.assert_allclose(b.spectra, a.spectra[:, order], atol=0.05)


def test_scale_of_start_spectra_does_not_matter():
    c, S = cells(PICTURES["smear"]), default_spectra(3)
    a, b = converge(c, S, 0.2, 0.02), converge(c, 7 * S, 0.2, 0.02)
    np.testing.assert_allclose(a.spectra, b.spectra, atol=1e-9)


# Levels.


def test_cells_average_colours_that_agree_in_their_high_bits():
    image = PICTURES["smear"]
    fine = cells(image)
    coarse, coarsest = fine.coarser, fine.coarser.coarser
    assert coarsest.coarser is None
    flat, X = image.reshape(-1, 3), columns_of(image)[0]
    for level, shift in ((coarse, 2), (coarsest, 3)):
        key, index = np.unique(flat >> shift, axis=0, return_inverse=True)
        weight = np.bincount(index.ravel())
        mean = np.stack([np.bincount(index.ravel(), x) / weight for x in X])
        assert len(level.w) == len(key)
        assert level.w.sum() == len(flat)
        np.testing.assert_allclose(np.sort(level.w), np.sort(weight))
        np.testing.assert_allclose(np.sort(level.X[0]), np.sort(mean[0]), rtol=1e-12)
        np.testing.assert_allclose(level.X @ level.w, X.sum(1), rtol=1e-12)
    assert fine.parent.max() == len(coarse.w) - 1
    np.testing.assert_allclose(np.bincount(fine.parent, fine.w), coarse.w)


def test_cells_with_weights_of_zero_are_finite():
    p = palette_of(PICTURES["smear"].reshape(-1, 3))
    w = p.counts.astype(float)
    w[: len(w) // 2] = 0
    level = build_cells(p.codes, to_columns(p.colours, "log"), w)
    while level is not None:
        assert np.isfinite(level.X).all()
        assert level.w.sum() == w.sum()
        level = level.coarser


def test_coarser_levels_first_changes_nothing_but_the_time():
    image, S = PICTURES["smear"], default_spectra(2)
    a = converge(cells(image), S, 0.2, 0.05, tolerance=1e-9)
    b = converge(cells(image, ()), S, 0.2, 0.05, tolerance=1e-9)
    assert a.objective[-1] == pytest.approx(b.objective[-1], rel=1e-5)
    assert len(a.objective) < len(b.objective)


# Any colour under a solution.


@pytest.mark.parametrize("picture", PICTURES)
def test_densities_of_its_own_colours(picture):
    c = cells(PICTURES[picture])
    found = converge(c, default_spectra(3), 0.3, 0.05)
    np.testing.assert_allclose(ColumnSolver.of(found, c.w)(c.X), found.densities, atol=5e-3)
    exact = converge(c, default_spectra(3), 0.3, 0.05, tolerance=1e-12)
    np.testing.assert_allclose(ColumnSolver.of(exact, c.w)(c.X), exact.densities, atol=1e-4)


def test_densities_of_dead_components_are_zero():
    c = cells(PICTURES["smear"])
    found = converge(c, default_spectra(8), 2.0, 0.01)
    dead = ~found.densities.any(1)
    assert dead.any()
    assert not ColumnSolver.of(found, c.w)(c.X)[dead].any()


def test_kernels_are_compiled_for_one_order_of_memory():
    """They would be compiled again, for seconds, for spectra that were picked from others."""
    c, S = cells(PICTURES["smear"]), default_spectra(3)
    converge(c, S, 1.0, 0.05)
    known = [len(kernel.signatures) for kernel in (advance, sweep, residual)]
    for other in (np.asfortranarray(S), S[:, [0, 2]], S.T[:2].T):
        converge(c, other, 1.0, 0.05)
    now = [len(kernel.signatures) for kernel in (advance, sweep, residual)]
    assert now == known
