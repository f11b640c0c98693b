"""Weighted columns: the kernels' step against torch's, streamed columns against stored ones."""

import numpy as np
import pytest
import torch

from algorithm1 import columns_of
from napari_beerlanet.core.stains.solver import columns, unrolled_kernels
from napari_beerlanet.core.stains.solver.columns import (
    ArrayColumns,
    MapChain,
    StreamedColumns,
    Sums,
    apply_maps,
    kernel_map,
    kernel_step,
    kernel_step_backward,
    ratio,
)
from napari_beerlanet.core.stains.solver.unroll import unroll
from napari_beerlanet.core.stains.solver.unroll_backward import (
    TensorColumns,
    density_step,
    scale_weights,
)
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


def kernels_and_torch(c, r, u, first, seed=0):
    """The step and its gradients, (out, G, P, m, g_D, gM, gN, gb): by kernels, and by torch."""
    tensors = given(c, r, u, first, seed)
    plain = density_step(*tensors)
    g = torch.Generator().manual_seed(seed)
    factors = [torch.randn(t.shape, generator=g).double() for t in plain]
    slopes = torch.autograd.grad(plain, tensors[2:], factors)
    X, w, *rest = (t.detach().numpy() for t in tensors)
    out, sums = kernel_step(X, w, *rest)
    g_out, *g_sums = (f.numpy() for f in factors)
    g_D, g_map = kernel_step_backward(X, w, *rest[:2], out, g_out, Sums(*g_sums))
    expected = [t.detach().numpy() for t in (*plain, *slopes)]
    return [out, *sums, g_D, *g_map], expected


def assert_step_and_gradients(got, expected):
    for x, y in zip(got[:4], expected[:4], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-11)
    for x, y in zip(got[4:], expected[4:], strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("c", [1, 3, 5])
@pytest.mark.parametrize("r", [1, 3, 4, 8, 9])
@pytest.mark.parametrize("u", [1, 255, 256, 511, 512, 1025])
@pytest.mark.parametrize("first", [True, False], ids=["D=0", "D"])
def test_kernel_step_is_torch_step_forward_and_backward(c, r, u, first):
    assert_step_and_gradients(*kernels_and_torch(c, r, u, first))


@pytest.mark.parametrize("chunk", [7, 30, 64])
def test_sums_over_several_chunks(monkeypatch, chunk):
    monkeypatch.setattr(columns, "COLUMNS_PER_TASK", chunk)
    assert_step_and_gradients(*kernels_and_torch(3, 4, 100, False))


def test_kernel_step_writes_where_it_is_told_to():
    X, w, D, M, N, b = (t.detach().numpy() for t in given(u=600))
    out, room, again = np.empty((4, 600)), np.empty((4, 600)), np.empty((4, 600))
    assert kernel_step(X, w, D, M, N, b, out)[0] is out
    assert kernel_map(X, D, M, N, b, room) is room
    np.testing.assert_array_equal(room, out)
    g = np.random.default_rng(1).normal(size=out.shape)
    sums = Sums(np.ones((4, 4)), np.ones((3, 4)), np.ones(4))
    expected, map_expected = kernel_step_backward(X, w, D, M, out, g, sums, again)
    assert expected is again
    found, g_map = kernel_step_backward(X, w, D, M, out, g, sums, g)  # in place
    assert found is g
    np.testing.assert_array_equal(found, expected)
    for x, y in zip(g_map, map_expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_torch_step_keeps_to_its_columns_type():
    X, w, *rest = given()
    assert density_step(*(t.detach().float() for t in (X, w, *rest)))[0].dtype == torch.float32


def test_kernels_are_for_float64_on_the_cpu_without_a_gradient_in_x():
    X, w, *_ = given()
    assert TensorColumns(X, w).uses_kernels
    assert not TensorColumns(X.clone().requires_grad_(True), w).uses_kernels
    assert not TensorColumns(X.float(), w.float()).uses_kernels
    assert not TensorColumns(X.to("meta"), w.to("meta")).uses_kernels


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
    totals = TensorColumns(torch.tensor(X), torch.tensor(w)).totals()
    mean = np.average(X, 1, w)
    assert totals.weight.item() == pytest.approx(w.sum())
    np.testing.assert_allclose(totals.mean, mean)
    assert totals.spread.item() == pytest.approx((w * (X - mean[:, None]) ** 2).sum())


def test_totals_of_weight_zero_are_finite():
    totals = TensorColumns(torch.ones(3, 4).double(), torch.zeros(4).double(), 10).totals()
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
    chain = MapChain(maps, done.scale[0])
    np.testing.assert_allclose(chain(X[:, pick]), D * done.scale[0][:, None], rtol=1e-12)


@pytest.mark.parametrize("c", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("r", [1, 2, 4, 5, 8, 9])
@pytest.mark.parametrize("u", [1, 300])
def test_a_step_by_the_factors_of_its_map_is_the_step(c, r, u):
    rng = np.random.default_rng(10 * c + r)
    X, w = rng.normal(size=(c, u)), rng.integers(0, 5, u).astype(float)
    D, b = np.maximum(rng.normal(size=(r, u)), 0), rng.normal(size=r)
    a, A, N = rng.uniform(size=r), rng.normal(size=(r, c)), rng.normal(size=(c, r)) / c
    M = np.diag(a) + A @ N
    out, sums = kernel_step(X, w, D, M, N, b)
    assert u == 1 or (out > 0).any(), "not only zeros are compared"
    found = np.full_like(out, 7.0)
    totals = Sums(np.zeros((r, r)), np.zeros((c, r)), np.zeros(r))
    unrolled_kernels.density_step(X, w, D, M, N, b, a, A, found, *totals, 0, u)
    for x, y in zip((found, *totals), (out, *sums), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-11, atol=1e-12)
