"""The step that touches every column: the kernels' against torch's."""

import numpy as np
import pytest
import torch

from algorithm1 import columns_of
from napari_beerlanet.core.stains.solver import unroll
from napari_beerlanet.core.stains.solver.torch_unroll import density_step, kernels_apply, ratio
from napari_beerlanet.core.stains.solver.unroll import MapChain, density_map, scale_weights
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
    D, M, *_ = rest
    out, sums = unroll.density_step(X, w, D, rest[1:])
    g_out, gG, *g_sums = (f.numpy() for f in factors)
    g_D = np.empty_like(D)
    g_sums = gG + gG.T, *g_sums
    g_map = unroll.density_step_backward(X, w, D, M, out, g_out, g_sums, g_D)
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
    monkeypatch.setattr(unroll, "COLUMNS_PER_TASK", chunk)
    assert_step_and_gradients(*kernels_and_torch(3, 4, 100, False))


def test_kernel_step_writes_where_it_is_told_to():
    X, w, D, *step = (t.detach().numpy() for t in given(u=600))
    out, room, again = np.empty((4, 600)), np.empty((4, 600)), np.empty((4, 600))
    assert unroll.density_step(X, w, D, step, out)[0] is out
    assert density_map(X, D, step, room) is room
    np.testing.assert_array_equal(room, out)
    g = np.random.default_rng(1).normal(size=out.shape)
    sums = np.ones((4, 4)), np.ones((3, 4)), np.ones(4)
    expected = unroll.density_step_backward(X, w, D, step[0], out, g, sums, again)
    found = unroll.density_step_backward(X, w, D, step[0], out, g, sums, g)  # in place
    np.testing.assert_array_equal(g, again)
    for x, y in zip(found, expected, strict=True):
        np.testing.assert_array_equal(x, y)


def test_torch_step_keeps_to_its_columns_type():
    X, w, *rest = given()
    assert density_step(*(t.detach().float() for t in (X, w, *rest)))[0].dtype == torch.float32


def test_kernels_are_for_float64_on_the_cpu_without_a_gradient_in_x():
    X = given()[0]
    assert kernels_apply(X)
    assert not kernels_apply(X.clone().requires_grad_(True))
    assert not kernels_apply(X.float())
    assert not kernels_apply(X.to("meta"))


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
    assert scale_weights(np.array([1.0, 3.0]), 8).tolist() == [2, 6]


@pytest.mark.parametrize("u", [1, 480])
def test_maps_give_the_same_colour_the_same_densities(u):
    X, w = columns_of(smear(20, 24))[0], (np.arange(480) % 5 > 0).astype(float)
    done = unroll.unroll(X, w, start(4), 0.2, 0.05, iterations=7, unit_spectra=True)
    pick = np.random.default_rng(0).integers(0, X.shape[1], u)
    D = MapChain(done.maps, done.scale)(X[:, pick])
    assert done.D.any()
    np.testing.assert_allclose(D, done.D[:, pick] * done.scale[:, None], rtol=1e-12, atol=1e-13)
