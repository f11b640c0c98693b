"""Exact block solves: every sweep is a descent, and settles where Algorithm 1 would."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from algorithm1 import algorithm1, columns_of, objective
from napari_beerlanet.core.stains.solver import converged_kernels
from pictures import smear


class Point:
    """x₀, S of unit or zero columns, D (r, u), and the residual that belongs to them."""

    def __init__(self, X, w, S, D, x0):
        self.X, self.w = np.ascontiguousarray(X), np.asarray(w, float)
        self.S, self.D, self.x0 = (np.array(a, np.float64, order="C") for a in (S, D, x0))
        self.R = np.empty_like(self.X)
        converged_kernels.residual(self.X, self.D, self.S, self.x0, self.R)

    def sweep(self, lam, gamma, hold=0, white=np.inf):
        penalty = lam, gamma, hold, white
        return converged_kernels.sweep(self.w, self.D, self.R, self.S, self.x0, *penalty)

    def objective(self, lam, gamma):
        return objective(self.X, self.x0, self.S, self.D.T, lam, gamma, self.w)

    def rest(self):
        return self.x0[:, None] - self.X - self.S @ self.D


def random_point(seed=0, c=3, r=4, u=60):
    rng = np.random.default_rng(seed)
    S = rng.uniform(size=(c, r)) * (rng.uniform(size=(c, r)) < 0.8)
    norm = np.linalg.norm(S, axis=0)
    S = np.divide(S, norm, out=np.zeros_like(S), where=norm > 0)
    D = np.maximum(rng.normal(size=(r, u)), 0)
    X = np.log(rng.uniform(0.02, 1, (c, u)))
    return Point(X, rng.integers(0, 4, u), S, D, rng.normal(size=c))


@pytest.mark.parametrize("u", [1, 511, 512, 1100])
def test_residual_and_objective(u):
    p = random_point(u=u)
    np.testing.assert_allclose(p.R, p.rest(), rtol=1e-12, atol=1e-13)
    got = converged_kernels.objective(p.w, p.D, p.R, p.S, 0.3, 0.2)
    assert got == pytest.approx(p.objective(0.3, 0.2), rel=1e-12)


@pytest.mark.parametrize("white", [0.0, 1.0])
def test_the_background_is_the_mean_of_what_stains_leave_or_white(white):
    """The objective is a parabola in each channel of x₀: its least value up to white is there."""
    p = random_point()
    p.X += np.array([[0.0], [1.0], [2.5]])
    p.S[:] = 0.0
    mean = np.average(p.X, axis=1, weights=p.w)
    assert (mean > white).any()
    assert (mean < white).any()
    converged_kernels.residual(p.X, p.D, p.S, p.x0, p.R)
    value = p.sweep(0.0, 0.0, white=white)
    np.testing.assert_allclose(p.x0, np.minimum(mean, white), rtol=1e-12)
    np.testing.assert_allclose(p.R, p.rest(), atol=1e-12)
    assert value == pytest.approx(p.objective(0.0, 0.0), rel=1e-12)


def test_extrapolate_goes_on_and_stays_nonnegative():
    rng = np.random.default_rng(0)
    here, before, out = rng.uniform(size=(3, 4, 50))
    converged_kernels.extrapolate(here, before, 0.7, out)
    np.testing.assert_allclose(out, np.maximum(here + 0.7 * (here - before), 0), rtol=1e-13)


@given(
    seed=st.integers(0, 10**6),
    c=st.sampled_from([1, 3, 5]),
    r=st.integers(1, 6),
    u=st.sampled_from([1, 2, 40, 513]),
    lam=st.sampled_from([0.0, 0.01, 1.0, 30.0]),
    gamma=st.sampled_from([0.0, 0.1, 2.0]),
    hold=st.sampled_from([0, 1, 2]),
)
def test_a_sweep_descends_and_keeps_its_books(seed, c, r, u, lam, gamma, hold):
    p = random_point(seed, c, r, u)
    last, x0, S = p.objective(lam, gamma), p.x0.copy(), p.S.copy()
    for _ in range(4):
        value = p.sweep(lam, gamma, hold)
        assert hold != 1 or np.array_equal(p.S, S)
        assert hold != 2 or np.array_equal(p.x0, x0)
        assert value <= last + 1e-11 * (1 + last)
        assert value == pytest.approx(p.objective(lam, gamma), rel=1e-9, abs=1e-11)
        np.testing.assert_allclose(p.R, p.rest(), atol=1e-10)
        norm = np.linalg.norm(p.S, axis=0)
        assert ((np.abs(norm - 1) < 1e-12) | (norm == 0)).all()
        assert (p.S >= 0).all()
        assert (p.D >= 0).all()
        last = value


@pytest.mark.parametrize("lam", [0.01, 0.3])
def test_one_component_is_solved_exactly(lam):
    """No other d, and no other s, is better while all else is as it was."""
    X, w = columns_of(smear(12, 16))
    p = Point(X, w, [[0.6], [0.64], [0.48]], np.zeros((1, X.shape[1])), X.mean(1))
    S = p.S.copy()
    p.sweep(lam, 0.1)
    grown, rng = p.S * 1.0, np.random.default_rng(0)
    value = objective(X, p.x0, grown, p.D.T, lam, 0.1, w)
    for _ in range(50):
        other = np.maximum(grown + 1e-3 * rng.normal(size=S.shape), 0)
        assert objective(X, p.x0, other, p.D.T, lam, 0.1, w) >= value
    held = Point(X, w, S, np.zeros((1, X.shape[1])), X.mean(1))
    value = held.sweep(lam, 0.1, hold=1)
    np.testing.assert_array_equal(held.S, S)
    for _ in range(50):
        D = np.maximum(held.D + 1e-3 * rng.normal(size=held.D.shape), 0)
        assert objective(X, held.x0, S, D.T, lam, 0.1, w) >= value
    for factor in (0.999, 1.001):  # random steps hardly show the scale, which the ℓ₂ prox decides
        assert objective(X, held.x0, S, factor * held.D.T, lam, 0.1, w) > value
        assert objective(X, p.x0, factor * grown, p.D.T, lam, 0.1, w) > p.objective(lam, 0.1)
    nearby = np.maximum(held.D + np.where(held.D > 0, 1e-3, 0), 0)
    assert objective(X, held.x0, S, nearby.T, lam, 0.1, w) > value
    assert objective(X, held.x0, S, np.maximum(held.D - 1e-3, 0).T, lam, 0.1, w) > value


def test_sweeps_settle_at_a_fixed_point_of_algorithm_1():
    X, w = columns_of(smear(12, 16))
    rng = np.random.default_rng(0)
    S = rng.uniform(size=(3, 2))
    p = Point(X, w, S / np.linalg.norm(S, axis=0), np.zeros((2, X.shape[1])), X.mean(1))
    for _ in range(3000):
        value = p.sweep(0.05, 0.05)
    after = algorithm1(X, p.S, 0.05, 0.05, 1, w=w, unit_spectra=True, D=p.D.T)
    assert after.objective[0] == pytest.approx(value, rel=1e-9)
    np.testing.assert_allclose(after.S, p.S, atol=1e-5)
    np.testing.assert_allclose(after.D.T, p.D, atol=1e-5)


def test_a_sweep_of_weight_zero_is_finite():
    p = random_point(u=5)
    p.w[:] = 0
    assert np.isfinite(p.sweep(0.1, 0.1))
    assert all(np.isfinite(a).all() for a in (p.S, p.D, p.x0, p.R))


@given(
    seed=st.integers(0, 10**6),
    r=st.integers(1, 5),
    low=st.sampled_from([0.0, 0.05]),
    curvature=st.sampled_from([0.0, 0.01, 2.0]),
)
def test_solve_columns_meets_the_optimality_conditions(seed, r, low, curvature):
    near = 1e-9
    p = random_point(seed, r=r, u=20)
    low, curvature = np.full(r, low), np.full(r, curvature)
    D = np.empty((r, 20))
    converged_kernels.solve_columns(p.X, p.x0, p.S, low, curvature, D)
    rest = p.x0[:, None] - p.X - p.S @ D
    slope = -p.S.T @ rest + low[:, None] + curvature[:, None] * D
    alive = p.S.any(0)
    assert (D >= 0).all()
    assert not D[~alive].any()
    assert (slope[alive] > -near).all()
    assert (np.abs(slope[alive] * D[alive]) < near * (1 + D[alive])).all()
