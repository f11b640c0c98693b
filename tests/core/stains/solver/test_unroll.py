"""Algorithm 1 itself: against the transcription, its gradients, its invariances."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from algorithm1 import algorithm1, columns_of, objective
from napari_beerlanet.core.stains.solver.torch_unroll import (
    unroll_by_operations,
    unroll_on,
    unroll_tensors,
)
from napari_beerlanet.core.stains.solver.unroll import scale_weights, unroll
from pictures import section, smear, start

EXACT = {"rtol": 1e-9, "atol": 1e-9}
BOTH = pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])


SOLVERS = {"kernels": unroll, "operations": partial(unroll_on, torch.device("cpu"))}


def run(X, S, lam, gamma, K, *, w=None, unit=False, reference=None, mode="kernels"):
    """K iterations on one image of NumPy columns; D comes back as (p, r), scaled."""
    w = scale_weights(np.ones(X.shape[1]) if w is None else w, reference)
    done = SOLVERS[mode](X, w, S, lam, gamma, iterations=K, unit_spectra=unit)
    return done.background, done.spectra, (done.D * done.scale[:, None]).T, done.objective


def agree(got, expected):
    for a, b in zip(got, expected, strict=True):
        np.testing.assert_allclose(a, b, **EXACT)


def random_columns(c=3, p=40, seed=0):
    return np.log(np.random.default_rng(seed).uniform(0.02, 1.0, (c, p)))


# The transcription, first: it must deserve its name.


@BOTH
def test_transcription_with_weights_is_transcription_with_repeated_pixels(unit):
    X, S, counts = random_columns(p=12), start(3), np.arange(12) % 4
    weighted = algorithm1(X, S, 0.3, 0.2, 6, w=counts, unit_spectra=unit)
    repeated = algorithm1(np.repeat(X, counts, 1), S, 0.3, 0.2, 6, unit_spectra=unit)
    agree((weighted.x0, weighted.S, np.repeat(weighted.D, counts, 0), weighted.objective), repeated)


def test_transcription_settles_where_its_objective_is_stationary():
    X = columns_of(smear(12, 16))[0]
    end = algorithm1(X, start(2), 0.05, 0.05, 1500)
    value, rng = objective(X, end.x0, end.S, end.D, 0.05, 0.05), np.random.default_rng(0)
    for _ in range(20):
        S = np.maximum(end.S + 1e-3 * rng.normal(size=end.S.shape), 0)
        D = np.maximum(end.D + 1e-3 * rng.normal(size=end.D.shape), 0)
        assert objective(X, end.x0, S, D, 0.05, 0.05) > value


# The engine against it.


@BOTH
@pytest.mark.parametrize("mode", SOLVERS)
@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("reference", [None, 7.5])
def test_unroll_is_algorithm_1(unit, mode, channels, reference):
    X, S = random_columns(channels, 60), start(4, channels=channels)
    w = np.random.default_rng(1).integers(0, 4, 60).astype(float)
    got = run(X, S, 0.2, 0.1, 12, w=w, unit=unit, reference=reference, mode=mode)
    agree(
        got,
        algorithm1(X, S, 0.2, 0.1, 12, w=w, reference_pixels=reference, unit_spectra=unit),
    )


@BOTH
@pytest.mark.parametrize("lam", [0.0, 1e-4, 0.1, 1.0, 3.0, 10.0, 40.0, 1e6])
@pytest.mark.parametrize("gamma", [0.0, 0.02, 1.0])
def test_unroll_is_algorithm_1_from_no_penalty_until_all_is_dead(unit, lam, gamma):
    X, S = columns_of(smear(16, 20))[0], start(5)
    agree(run(X, S, lam, gamma, 15, unit=unit), algorithm1(X, S, lam, gamma, 15, unit_spectra=unit))


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    p=st.integers(1, 30),
    r=st.integers(1, 6),
    lam=st.sampled_from([0.0, 0.01, 0.3, 2.0, 20.0]),
    gamma=st.sampled_from([0.0, 0.1, 3.0]),
    unit=st.booleans(),
    zeros=st.booleans(),
    mode=st.sampled_from(list(SOLVERS)),
)
def test_unroll_is_algorithm_1_for_any_numbers(seed, p, r, lam, gamma, unit, zeros, mode):
    # One pixel without a penalty: D is zero but for rounding, and τ = 1/‖D‖² magnifies that.
    assume(p > 1 or lam > 0)
    X, S = random_columns(p=p, seed=seed), start(r, seed)
    if zeros:
        S[np.random.default_rng(seed).uniform(size=S.shape) < 0.5] = 0
    agree(
        run(X, S, lam, gamma, 6, unit=unit, mode=mode),
        algorithm1(X, S, lam, gamma, 6, unit_spectra=unit),
    )


# Dead components.


@BOTH
def test_a_zero_start_spectrum_stays_dead(unit):
    S = start(3)
    S[:, 1] = 0
    _, S, D, values = run(random_columns(), S, 0.01, 0.01, 8, unit=unit)
    assert not S[:, 1].any()
    assert not D[:, 1].any()
    assert S[:, [0, 2]].any(0).all()
    assert np.isfinite(values).all()


@BOTH
def test_where_all_densities_are_zero_the_spectra_stay(unit):
    first = start(3)
    x0, S, D, _ = run(random_columns(), first, 1e6, 0.1, 5, unit=unit)
    assert not D.any()
    np.testing.assert_allclose(S, first / np.linalg.norm(first, axis=0) if unit else first)
    np.testing.assert_allclose(x0, random_columns().mean(1))


@BOTH
def test_a_dead_density_may_revive_while_its_spectrum_lives(unit):
    X = np.array([[-11, -15, -14, -270], [-207, -158, -101, -1], [-55, -43, -84, -86]]) / 100
    S = np.array([[0, 0.76], [0.88, 0.87], [0, 0.72]])
    alive = [run(X, S, 0.55, 0.0, K, unit=unit)[2].any(0).tolist() for K in (1, 2, 3)]
    if not unit:
        assert alive == [[True, False], [True, False], [True, True]]
    agree(run(X, S, 0.55, 0.0, 3, unit=unit), algorithm1(X, S, 0.55, 0.0, 3, unit_spectra=unit))


def test_unit_spectra_have_unit_norm_and_the_same_product():
    X, S = columns_of(smear(16, 20))[0], start(4)
    one = run(X, S, 0.3, 0.05, 1, unit=True)
    letter = run(X, S, 0.3, 0.05, 1, unit=False)
    np.testing.assert_allclose(np.linalg.norm(one[1], axis=0), 1)
    np.testing.assert_allclose(one[1] @ one[2].T, letter[1] @ letter[2].T, atol=1e-12)
    np.testing.assert_allclose(one[3], letter[3])


# The objective.


@BOTH
@pytest.mark.parametrize("picture", [smear, section])
@pytest.mark.parametrize("lam", [0.0, 0.01, 1.0, 10.0])
def test_objective_is_the_objective_and_never_rises(picture, lam, unit):
    X, S = columns_of(picture(24, 32))[0], start(6)
    x0, S, D, values = run(X, S, lam, 0.02, 60, unit=unit)
    np.testing.assert_allclose(values[-1], objective(X, x0, S, D, lam, 0.02), rtol=1e-9)
    before = 0.5 * ((X - X.mean(1, keepdims=True)) ** 2).sum()
    assert (np.diff([before, *values]) <= 1e-12 * before).all()
    assert values[-1] < (0.95 if lam < 10 else 1.001) * before


@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    p=st.integers(1, 40),
    r=st.integers(1, 8),
    size=st.sampled_from([1e-3, 1.0, 1e3]),
    lam=st.floats(0, 30),
    gamma=st.floats(0, 3),
)
def test_objective_never_rises_whatever_the_start(seed, p, r, size, lam, gamma):
    X, S = random_columns(p=p, seed=seed), size * start(r, seed)
    before = 0.5 * ((X - X.mean(1, keepdims=True)) ** 2).sum()
    values = run(X, S, lam, gamma, 15)[3]
    assert (np.diff([before, *values]) <= 1e-11 * (before + 1e-12)).all()


def test_more_iterations_go_on_from_fewer():
    X, S = random_columns(), start(3)
    few, many = (run(X, S, 0.1, 0.1, K)[3] for K in (4, 9))
    np.testing.assert_array_equal(many[:4], few)


# Invariances.


@BOTH
def test_order_of_pixels_does_not_matter(unit):
    X, S = columns_of(smear(16, 20))[0], start(4)
    order = np.random.default_rng(0).permutation(X.shape[1])
    x0, spectra, D, values = run(X, S, 0.2, 0.05, 10, unit=unit)
    agree(run(X[:, order], S, 0.2, 0.05, 10, unit=unit), (x0, spectra, D[order], values))


@BOTH
def test_order_of_start_spectra_orders_the_result(unit):
    X, S = columns_of(section(16, 20))[0], start(5)
    order = [3, 0, 4, 1, 2]
    x0, spectra, D, values = run(X, S, 0.2, 0.05, 10, unit=unit)
    agree(
        run(X, S[:, order], 0.2, 0.05, 10, unit=unit),
        (x0, spectra[:, order], D[:, order], values),
    )


@BOTH
def test_twice_the_pixels_are_the_same_under_reference_pixels_and_only_then(unit):
    X, S = columns_of(smear(16, 20))[0], start(4)
    twice = np.hstack([X, X])
    once = run(X, S, 0.5, 0.05, 10, unit=unit, reference=500)
    again = run(twice, S, 0.5, 0.05, 10, unit=unit, reference=500)
    agree(again, (*once[:2], np.vstack([once[2]] * 2), once[3]))
    plain, plain_again = (run(x, S, 0.5, 0.05, 10, unit=unit) for x in (X, twice))
    assert abs(plain[1] - plain_again[1]).max() > 1e-4


@BOTH
def test_pixels_of_weight_zero_change_nothing_and_get_densities(unit):
    X, S = random_columns(p=50), start(3)
    w = (np.arange(50) % 3 > 0).astype(float)
    x0, spectra, D, values = run(X, S, 0.1, 0.05, 8, w=w, unit=unit, reference=20)
    alone = run(X[:, w > 0], S, 0.1, 0.05, 8, unit=unit, reference=20)
    agree((x0, spectra, D[w > 0], values), alone)
    assert D[w == 0].any()


@BOTH
def test_images_of_a_batch_do_not_see_each_other(unit):
    pictures = [columns_of(p)[0] for p in (smear(9, 11), section(20, 8), smear(5, 5, seed=3))]
    S, lam, gamma = (torch.tensor(v, dtype=torch.float64) for v in (start(4), 0.1, 0.05))
    batch = [(torch.tensor(X), torch.ones(X.shape[1]).double()) for X in pictures]
    done = unroll_tensors(batch, S, lam, gamma, iterations=8, unit_spectra=unit)
    for k, X in enumerate(pictures):
        x0, spectra, D, _ = run(X, start(4), 0.1, 0.05, 8, unit=unit)
        got = (done.D[k] * done.scale[k][:, None]).numpy().T
        for a, b in (
            (done.background[k].numpy(), x0),
            (done.spectra[k].numpy(), spectra),
            (got, D),
        ):
            np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-13)


# Gradients.


def outputs(X, w, S, lam, gamma, unit, reference=None):
    images = [(X, scale_weights(w, reference))]
    done = unroll_tensors(images, S, lam, gamma, iterations=3, unit_spectra=unit)
    return done.D[0] * done.scale[0][:, None], done.background, done.spectra


def point(p=6, r=2, grad_X=False):
    X = torch.tensor(random_columns(p=p, seed=2), requires_grad=grad_X)
    w = torch.arange(p, dtype=torch.float64) % 3
    S, lam, gamma = (
        torch.tensor(v, dtype=torch.float64, requires_grad=True)
        for v in (start(r, seed=4), 0.11, 0.23)
    )
    return X, w, S, lam, gamma


@BOTH
@pytest.mark.parametrize("reference", [None, 4.0])
def test_gradients_with_respect_to_what_is_learned(unit, reference):
    X, w, *learned = point()
    assert torch.autograd.gradcheck(
        lambda S, lam, gamma: outputs(X, w, S, lam, gamma, unit, reference), learned
    )


@BOTH
def test_gradients_with_respect_to_the_image(unit):
    X, w, S, lam, gamma = point(grad_X=True)
    assert torch.autograd.gradcheck(
        lambda *given: outputs(given[0], w, *given[1:], unit), (X, S, lam, gamma)
    )


@BOTH
@pytest.mark.parametrize("grad_X", [False, True], ids=["kernels", "plain"])
@pytest.mark.parametrize("lam", [0.0, 1.5, 1e5])
def test_gradients_are_finite_where_components_are_dead(unit, grad_X, lam):
    X, w, S, _, gamma = point(grad_X=grad_X)
    with torch.no_grad():
        S[:, 1] = 0
    lam = torch.tensor(lam, dtype=torch.float64, requires_grad=True)
    sum(t.sum() for t in outputs(X, w, S, lam, gamma, unit)).backward()
    for t in (S, lam, gamma) + ((X,) if grad_X else ()):
        assert torch.isfinite(t.grad).all()


def by_kernels_and_by_torch(S, lam, gamma, K, unit, sizes=(700, 40)):
    """Results and gradients of a batch: by kernels and their adjoint, and by torch alone."""
    rng = np.random.default_rng(5)
    both = []
    pictures = [np.log(rng.uniform(0.02, 1, (3, n))) for n in sizes]
    weights = [rng.integers(0, 4, n).astype(float) for n in sizes]
    images = [
        (torch.tensor(X), scale_weights(torch.tensor(w), 300.0))
        for X, w in zip(pictures, weights, strict=True)
    ]
    for solve in (unroll_tensors, lambda *a, **k: unroll_by_operations(*a, **k)[0]):
        learned = [
            torch.tensor(v, dtype=torch.float64, requires_grad=True) for v in (S, lam, gamma)
        ]
        done = solve(images, *learned, iterations=K, unit_spectra=unit)
        ends = [D * a[:, None] for D, a in zip(done.D, done.scale, strict=True)]
        ends += [done.background, done.spectra]
        g = torch.Generator().manual_seed(3)
        loss = sum((t * torch.randn(t.shape, generator=g)).sum() for t in ends)
        slopes = torch.autograd.grad(loss, learned, allow_unused=True)
        slopes = [
            torch.zeros_like(x) if s is None else s for x, s in zip(learned, slopes, strict=True)
        ]
        both.append(([t.detach() for t in ends], slopes))
    return both


@BOTH
@pytest.mark.parametrize("K", [1, 2, 6, 10])
@pytest.mark.parametrize("lam", [0.0, 0.1, 2.0, 1e3])
@pytest.mark.parametrize("dead", [False, True], ids=["alive", "dead"])
def test_adjoint_is_automatic_differentiation(unit, K, lam, dead):
    check_adjoint(unit, K, lam, dead)


@BOTH
@pytest.mark.parametrize("K", [1, 4, 12])
@pytest.mark.parametrize(("lam", "dead"), [(0.1, False), (2.0, True), (1e3, False)])
def test_adjoint_over_several_chunks_of_columns(unit, K, lam, dead, monkeypatch):
    monkeypatch.setattr("napari_beerlanet.core.stains.solver.unroll.COLUMNS_PER_TASK", 300)
    check_adjoint(unit, K, lam, dead)


def check_adjoint(unit, K, lam, dead):
    S = start(5)
    S[:, 3] *= not dead
    ours, plain = by_kernels_and_by_torch(S, lam, 0.05, K, unit)
    for a, b in zip(ours[0], plain[0], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    for a, b in zip(ours[1], plain[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    assert lam > 100 or ours[1][0].abs().max() > 0


def test_gradients_of_some_results_only():
    X, w, *learned = point()
    results = outputs(X, w, *learned, True)
    total = torch.autograd.grad(sum(t.sum() for t in results), learned, retain_graph=True)
    each = [torch.autograd.grad(t.sum(), learned, retain_graph=True) for t in results]
    for slope, *parts in zip(total, *each, strict=True):
        torch.testing.assert_close(slope, sum(parts))


def test_a_second_way_back_gives_the_same_and_a_third_after_the_last_is_refused():
    X, w, *learned = point(p=50)
    loss = sum(t.square().sum() for t in outputs(X, w, *learned, True))
    first = torch.autograd.grad(loss, learned, retain_graph=True)
    second = torch.autograd.grad(loss, learned)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(loss, learned)


def test_second_derivatives_are_refused_where_there_are_none():
    X, w, *learned = point()
    loss = sum(t.square().sum() for t in outputs(X, w, *learned, True))
    with pytest.raises(RuntimeError, match="first derivatives only"):
        torch.autograd.grad(loss, learned, create_graph=True)


@pytest.mark.parametrize("K", [1, 5, 6, 10, 11])
def test_every_fifth_density_is_kept_for_the_way_back_and_none_without_one(K):
    X, w, *learned = point()
    D = unroll_tensors([(X, w)], *learned, iterations=K, unit_spectra=True).D[0]
    saved = D.grad_fn.saved_tensors
    assert len(saved) == -(-K // 5)
    assert saved[-1].data_ptr() == D.data_ptr()
    with torch.no_grad():
        D = unroll_tensors([(X, w)], *learned, iterations=K, unit_spectra=True).D[0]
    assert D.grad_fn is None


def test_gradients_do_not_depend_on_the_number_of_threads(monkeypatch):
    got = []
    for threads in ("1", "2", "5"):
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
        ours, _ = by_kernels_and_by_torch(start(4), 0.1, 0.05, 5, True, (40_000, 20_000))
        got.append((*ours[0], *ours[1]))
    for other in got[1:]:
        assert all(torch.equal(a, b) for a, b in zip(got[0], other, strict=True))


# Columns that threads share.


@BOTH
@pytest.mark.parametrize("p", [1, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("r", [1, 8])
def test_many_columns_are_the_transcription(unit, p, r):
    X, S = random_columns(p=p), start(r)
    w = np.random.default_rng(1).integers(0, 9, p) + 0.5
    agree(
        run(X, S, 0.1, 0.2, 6, w=w, unit=unit),
        algorithm1(X, S, 0.1, 0.2, 6, w=w, unit_spectra=unit),
    )


def test_threads_do_not_change_a_bit(monkeypatch):
    X, S = random_columns(p=50_000), start(8)
    w = np.random.default_rng(1).uniform(1, 9, X.shape[1])
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = run(X, S, 0.1, 0.2, 6, w=w)
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    for _ in range(5):
        for a, b in zip(run(X, S, 0.1, 0.2, 6, w=w), alone, strict=True):
            np.testing.assert_array_equal(a, b)
