"""Weighted columns: the kernels' step against torch's, streamed columns against stored ones."""

import numpy as np
import pytest
import torch

from algorithm1 import columns_of
from napari_beerlanet.core import columns
from napari_beerlanet.core.autograd import (
    StoredColumns,
    _KernelStep,
    density_step,
    plain_density_step,
    scale_weights,
)
from napari_beerlanet.core.beerlanet import unroll
from napari_beerlanet.core.columns import ArrayColumns, StreamedColumns, apply_maps, ratio
from pictures import smear, start


def given(c=3, r=4, u=30, first=False, seed=0):
    """X, w, D, M, N, b, the last four requiring gradients (D not where there is none)."""
    rng = np.random.default_rng(seed)
    q = 0 if first else r
    X, w = rng.normal(size=(c, u)), rng.integers(0, 5, u).astype(float)
    D = np.maximum(rng.normal(size=(q, u)), 0)
    maps = rng.normal(size=(q, r)) / (q + 1), rng.normal(size=(c, r)), rng.normal(size=r)
    tensors = [torch.tensor(t) for t in (X, w, D, *maps)]
    for t in tensors[2:]:
        t.requires_grad_(True)
    return tensors


@pytest.mark.parametrize("c", [1, 3, 5])
@pytest.mark.parametrize("r", [1, 3, 4, 9])
@pytest.mark.parametrize("u", [1, 511, 512, 1025])
@pytest.mark.parametrize("first", [True, False], ids=["D=0", "D"])
def test_kernel_step_is_the_plain_step_forward_and_backward(c, r, u, first):
    a, b = given(c, r, u, first), given(c, r, u, first)
    ours, plain = _KernelStep.apply(*a), plain_density_step(*b)
    for x, y in zip(ours, plain, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)
    factors = [torch.randn_like(t) for t in plain]
    for result in (ours, plain):
        sum((t * f).sum() for t, f in zip(result, factors, strict=True)).backward()
    for x, y in zip(a[2:], b[2:], strict=True):
        torch.testing.assert_close(x.grad, y.grad, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("chunk", [7, 30, 64])
def test_sums_over_several_chunks(monkeypatch, chunk):
    monkeypatch.setattr(columns, "_CHUNK", chunk)
    test_kernel_step_is_the_plain_step_forward_and_backward(3, 4, 100, False)


@pytest.mark.parametrize("first", [True, False], ids=["D=0", "D"])
def test_kernel_step_gradcheck(first):
    X, w, *rest = given(u=6, r=3, first=first, seed=3)
    fixed = [X, w, *rest[:2]] if first else [X, w]
    learned = rest[len(fixed) - 2 :]
    assert torch.autograd.gradcheck(lambda *t: _KernelStep.apply(*fixed, *t), learned)


def test_kernel_step_takes_gradients_that_are_not_contiguous():
    a, b = given(), given()
    for args, step in ((a, _KernelStep.apply), (b, plain_density_step)):
        step(*args)[0].sum().backward()  # an expanded, zero-stride gradient
    torch.testing.assert_close(a[3].grad, b[3].grad)


def test_second_derivatives_are_right_or_refused_but_not_silently_wrong():
    X, w, D, M, N, b = given()

    def second(step):
        loss = (step(X, w, D, M, N, b)[1] ** 2).sum()
        (slope,) = torch.autograd.grad(loss, N, create_graph=True)
        return torch.autograd.grad((slope**2).sum() + (b**2).sum(), b)[0]

    expected = second(plain_density_step)
    try:
        got = second(_KernelStep.apply)
    except RuntimeError:
        return
    torch.testing.assert_close(got, expected)


def test_kernels_are_for_float64_without_a_gradient_in_x():
    X, w, *rest = given()
    assert "_KernelStep" in density_step(X, w, *rest)[0].grad_fn.name()
    learned = density_step(X.clone().requires_grad_(True), w, *rest)[0]
    assert "_KernelStep" not in learned.grad_fn.name()
    single = density_step(*(t.detach().float() for t in (X, w, *rest)))
    assert single[0].dtype == torch.float32


def test_ratio_is_zero_with_gradient_zero_where_it_would_divide_by_zero():
    a = torch.tensor([1.0, 0.0, 3.0, 0.0], dtype=torch.float64, requires_grad=True)
    b = torch.tensor([2.0, 0.0, 0.0, 5.0], dtype=torch.float64, requires_grad=True)
    out = ratio(a, b)
    out.sum().backward()
    assert out.tolist() == [0.5, 0, 0, 0]
    assert a.grad.tolist() == [0.5, 0, 0, 0.2]
    assert b.grad.tolist() == [-0.25, 0, 0, 0]


def test_scale_weights():
    w = torch.tensor([1.0, 0.0, 3.0])
    assert scale_weights(w, None) is w
    assert scale_weights(w, 8).tolist() == [2, 0, 6]
    assert scale_weights(torch.zeros(3), 8).tolist() == [0, 0, 0]


def test_totals_are_weighted_mean_and_spread():
    rng = np.random.default_rng(0)
    X, w = rng.normal(size=(3, 20)), rng.uniform(size=20)
    totals = StoredColumns(torch.tensor(X), torch.tensor(w)).totals()
    mean = np.average(X, 1, w)
    assert totals.weight.item() == pytest.approx(w.sum())
    np.testing.assert_allclose(totals.mean, mean)
    assert totals.spread.item() == pytest.approx((w * (X - mean[:, None]) ** 2).sum())


def test_totals_of_weight_zero_are_finite():
    totals = StoredColumns(torch.ones(3, 4).double(), torch.zeros(4).double(), 10).totals()
    assert all(torch.isfinite(t).all() for t in totals)


def both_ways(scale, unit, cut=37):
    """One image, stored and streamed in blocks of `cut`, and both solutions."""
    X, w = columns_of(smear(20, 24))[0], (np.arange(480) % 5 > 0).astype(float)
    reference = None if scale == 1 else scale * w.sum()
    stored = ArrayColumns(X, w, reference)
    blocks = [(X[:, k : k + cut], w[k : k + cut]) for k in range(0, 480, cut)]
    streamed = StreamedColumns(lambda: iter(blocks), scale)
    both = [
        unroll([c], start(4), 0.2, 0.05, iterations=7, unit_spectra=unit, track=True)
        for c in (stored, streamed)
    ]
    return X, stored, *both


@pytest.mark.parametrize("unit", [True, False])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_streamed_columns_are_stored_columns(scale, unit):
    _, _, a, b = both_ways(scale, unit)
    for name in ("background", "spectra", "scale", "objective"):
        np.testing.assert_allclose(getattr(a, name), getattr(b, name), rtol=1e-12, atol=1e-12)
    for x, y in zip(a.sums, b.sums, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-12, atol=1e-12)


def test_maps_give_the_same_colour_the_same_densities():
    X, stored, done, _ = both_ways(1.0, True)
    maps = [tuple(t[0] for t in affine) for affine in done.maps]
    pick = np.random.default_rng(0).integers(0, X.shape[1], 50)
    D, _ = apply_maps(np.ascontiguousarray(X[:, pick]), np.zeros(50), maps)
    np.testing.assert_allclose(D, stored.D[:, pick], rtol=1e-12, atol=1e-13)
