"""BeerLaNet as a module: right, differentiable, nonnegative, unmoved by batch and padding."""

import copy
import io
import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from algorithm1 import algorithm1, columns_of
from napari_beerlanet import BeerLaNet
from napari_beerlanet.core.stains import layer
from napari_beerlanet.core.stains.layer import MixReadout, _ColourLookUp, distinct_colours
from napari_beerlanet.core.stains.solver.spectra import default_spectra
from pictures import ODD, section, smear, start

SINGLE = {"rtol": 2e-6, "atol": 2e-6}
METHODS = pytest.mark.parametrize("method", ["palette", "dense"])
GREY = 114


def batch(*images, dtype=torch.float32):
    """(N, 3, H, W) in [0, 1] of uint8 images."""
    return torch.stack([torch.tensor(i).permute(2, 0, 1) for i in images]).to(dtype) / 255


def grads(net, x, weight=None, **more):
    """Densities and the gradients of a loss that looks at each of them differently."""
    net.zero_grad()
    y = net(x, **more)
    g = torch.Generator().manual_seed(0)
    weight = torch.randn(y.shape, generator=g) if weight is None else weight
    (y * weight.to(y.dtype)).sum().backward()
    return y.detach(), [p.grad.clone() for p in net.parameters()]


# Right.


@METHODS
@pytest.mark.parametrize("domain", ["log", "intensity"])
@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
@pytest.mark.parametrize("reference", [None, 1000.0])
def test_densities_are_those_of_algorithm_1(method, domain, unit, reference):
    S = start(4).astype(np.float32).astype(float)
    net = BeerLaNet(
        4,
        7,
        spectra=S,
        lam=0.2,
        gamma=0.05,
        domain=domain,
        unit_spectra=unit,
        reference_pixels=reference,
        method=method,
    )
    pictures = smear(), section()
    out = net(batch(*pictures)).detach()
    assert out.dtype == torch.float32
    assert out.shape == (2, 4, 48, 64)
    lam, gamma = net.lam.item(), net.gamma.item()
    for image, got in zip(pictures, out, strict=True):
        X, _ = columns_of(image, domain)
        end = algorithm1(X, S, lam, gamma, 7, reference_pixels=reference, unit_spectra=unit)
        np.testing.assert_allclose(got.flatten(1).T, end.D, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("channels", [1, 4, 5])
def test_any_number_of_channels(channels):
    net = BeerLaNet(3, 6, lam=0.1, gamma=0.05, channels=channels)
    assert net.spectra.shape == (channels, 3)
    x = torch.rand(2, channels, 8, 9, generator=torch.Generator().manual_seed(0))
    S = net.spectra.detach().double().numpy()
    for image, got in zip(x, net(x).detach(), strict=True):
        X = np.log(np.maximum(image.flatten(1).double().numpy(), 1 / 255))
        end = algorithm1(X, S, net.lam.item(), net.gamma.item(), 6, unit_spectra=True)
        np.testing.assert_allclose(got.flatten(1).T, end.D, **SINGLE)


@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
@pytest.mark.parametrize("weighted", [True, False])
def test_palette_and_dense_agree_forward_and_backward(unit, weighted):
    x = batch(smear(), section(), dtype=torch.float64)
    more = {"weights": torch.rand(2, 48, 64).double()} if weighted else {}
    got = {}
    for method in ("palette", "dense"):
        net = BeerLaNet(4, 8, lam=0.3, gamma=0.1, unit_spectra=unit, method=method).double()
        got[method] = grads(net, x, **more)
    torch.testing.assert_close(got["palette"][0], got["dense"][0], **SINGLE)
    for a, b in zip(got["palette"][1], got["dense"][1], strict=True):
        assert a.abs().max() > 0
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)


def test_gradients_reach_the_raw_parameters_by_the_chain_rule():
    """Against finite differences of a float64 loss, through |·| and exp."""
    x = batch(smear()[:12, :16])
    weight = torch.randn(1, 3, 12, 16, generator=torch.Generator().manual_seed(1)).double()
    net = BeerLaNet(3, 4, lam=0.1, gamma=0.2, spectra=start(3)).double()
    with torch.no_grad():
        net.raw_spectra[:, 1] *= -1  # an absolute value has a slope there, too
    _, (g_S, g_lam, g_gamma) = grads(net, x.double(), weight)
    h = 1e-3  # densities leave as float32
    for parameter, slope, index in (
        (net.log_lam, g_lam, ()),
        (net.log_gamma, g_gamma, ()),
        (net.raw_spectra, g_S[0, 1], (0, 1)),
        (net.raw_spectra, g_S[2, 0], (2, 0)),
    ):
        values = []
        for step in (h, -h):
            with torch.no_grad():
                parameter[index] += step
                values.append((net(x.double()) * weight).sum().item())
                parameter[index] -= step
        assert (values[0] - values[1]) / (2 * h) == pytest.approx(slope.item(), rel=2e-2, abs=1e-2)


def test_image_gradients_exist_where_asked_for():
    x = batch(smear()[:10, :10]).double().requires_grad_(True)
    net = BeerLaNet(3, 3, lam=0.1)
    net(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert x.grad.abs().max() > 0
    with torch.no_grad():
        torch.testing.assert_close(net(x), net(x.detach()), **SINGLE)


@pytest.mark.parametrize("rows_type", [torch.int32, torch.int64])
@pytest.mark.parametrize("step", [7, 1 << 17])
def test_look_up_and_its_gradient_are_index_select_and_index_add(monkeypatch, rows_type, step):
    monkeypatch.setattr(layer, "_PIXELS_PER_TASK", step)
    g = torch.Generator().manual_seed(0)
    rows = torch.randint(0, 6, (100,), generator=g)
    tables = [torch.rand(4, 9, dtype=torch.float64, generator=g) for _ in range(1)] * 2
    a, b = (t.clone().requires_grad_(True) for t in tables)
    scales = [torch.rand(len(a), generator=torch.Generator().manual_seed(1)).double() for _ in "ab"]
    first, second = (t.requires_grad_() for t in scales)
    ours = _ColourLookUp.apply(a, first, rows.to(rows_type))
    plain = (b * second[:, None]).float()[:, rows]
    assert torch.equal(ours, plain)
    weight = torch.rand(4, 100, generator=g)
    (ours * weight).sum().backward()
    added = torch.zeros(4, 9).double().index_add_(1, rows, weight.double())
    torch.testing.assert_close(a.grad, added * first.detach()[:, None], rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(first.grad, (added * a.detach()).sum(1), rtol=1e-13, atol=1e-13)
    a.grad = None
    _ColourLookUp.apply(
        a, torch.ones(len(a)).double(), rows
    ).sum().backward()  # an expanded gradient
    assert a.grad.sum() == 400


@pytest.mark.parametrize("domain", ["log", "intensity"])
@pytest.mark.parametrize("light", [True, False])
@pytest.mark.parametrize("step", [50, 1 << 17])
def test_kernels_mix_colours_as_torch_does(monkeypatch, domain, light, step):
    monkeypatch.setattr(layer, "_PIXELS_PER_TASK", step)
    pictures = smear(), section()[:48, :64].copy()
    pictures[1][:9] = GREY
    x, padding = batch(*pictures), GREY / 255
    net = BeerLaNet(4, 5, lam=0.2, domain=domain, padding=padding)
    g = torch.Generator().manual_seed(0)
    weight = (0.5 * torch.randn(3, 4, generator=g)).requires_grad_()
    bias = torch.tensor([-0.1, 0.2, 1.2], requires_grad=True)
    grey = float(np.log(padding)) if domain == "log" else padding
    readout = MixReadout(weight, bias, light, padding, grey)
    factor = torch.randn(2, 3, 48, 64, generator=g)
    learned = [weight, bias, *net.parameters()]

    def results(given):
        mixed = net.forward_readout(x, readout=given)
        return mixed.detach(), torch.autograd.grad((mixed * factor).sum(), learned)

    plain, slopes = results(lambda X, D, w: readout(X, D, w))
    monkeypatch.setattr(MixReadout, "__call__", None)  # kernels do not take it
    mixed, kernel_slopes = results(readout)
    if light:
        assert mixed.max() == pytest.approx(np.e, rel=1e-6)  # some are above 1, where f ends
    assert (mixed[1, :, :9] == np.float32(padding)).all()
    torch.testing.assert_close(mixed, plain, rtol=1e-6, atol=1e-7)
    for ours, theirs in zip(kernel_slopes, slopes, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


# Which images are 8-bit.


def recognised(values):
    return distinct_colours(values.flatten(1))[2] is not None


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_all_grey_levels_over_255_are_recognised(dtype):
    levels = torch.arange(256).repeat(3, 1)
    values = levels.to(dtype) / 255
    colours, counts, rows = distinct_colours(values)
    assert rows is not None
    assert len(counts) == 256
    assert counts.sum() == 256
    torch.testing.assert_close(colours[:, rows.long()], levels.double() / 255, rtol=0, atol=1e-15)


@pytest.mark.parametrize("how", ["/ 255", "* (1 / 255)", "float64 / 255 to float32"])
def test_ways_to_divide_by_255(how):
    x = torch.tensor(smear()).permute(2, 0, 1)
    values = {
        "/ 255": x.float() / 255,
        "* (1 / 255)": x.float() * (1 / 255),
        "float64 / 255 to float32": (x.double() / 255).float(),
    }[how]
    colours, counts, rows = distinct_colours(values.flatten(1))
    assert counts.sum() == 48 * 64
    torch.testing.assert_close(colours[:, rows.long()], x.flatten(1).double() / 255)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("value", [0.401, 100.01 / 255, -1 / 255, 256 / 255, float("nan")])
def test_one_other_value_and_it_is_no_8_bit_image(dtype, value):
    x = batch(smear(), dtype=dtype)[0]
    assert recognised(x)
    x[1, 5, 7] = value
    assert not recognised(x)


def test_what_is_no_8_bit_image_is_solved_pixel_by_pixel():
    x = batch(smear())
    x[0, 0, 3, 3] += 0.4 / 255
    nets = [BeerLaNet(3, 4, lam=0.1, method=m) for m in ("auto", "dense")]
    assert torch.equal(nets[0](x), nets[1](x))
    with pytest.raises(ValueError, match=r'method="palette" takes 8-bit images'):
        BeerLaNet(3, 4, method="palette")(x)


def test_uint8_is_float_over_255():
    images = torch.stack([torch.tensor(smear()).permute(2, 0, 1)] * 2)
    net = BeerLaNet(3, 4, lam=0.1)
    out = net(images)
    assert out.dtype == torch.float32
    assert torch.equal(out, net(images.float() / 255))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.bool])
@pytest.mark.parametrize("method", ["auto", "dense"])
def test_other_integers_are_refused(dtype, method):
    with pytest.raises((ValueError, TypeError)) as caught:
        BeerLaNet(method=method)(torch.ones(1, 3, 4, 4, dtype=dtype))
    assert str(dtype).split(".")[1] in str(caught.value)


# Unmoved.


@METHODS
@pytest.mark.parametrize("unit", [True, False], ids=["unit", "letter"])
def test_batch_mates_do_not_matter(method, unit):
    net = BeerLaNet(4, 10, lam=0.2, gamma=0.1, unit_spectra=unit, method=method)
    mates = [smear(), section(), smear(seed=1), np.zeros_like(smear())]
    together = net(batch(*mates))
    for k, image in enumerate(mates):
        torch.testing.assert_close(net(batch(image))[0], together[k], rtol=5e-7, atol=1e-9)
    again = net(batch(*mates[::-1]))
    torch.testing.assert_close(again.flip(0), together, rtol=5e-7, atol=1e-9)


def test_a_batch_of_mixed_content_mixes_paths():
    plain, noisy = batch(smear()), batch(section()) + 0.3 / 255
    net = BeerLaNet(4, 6, lam=0.2)
    together = net(torch.cat([plain, noisy]))
    torch.testing.assert_close(together[:1], net(plain), **SINGLE)
    torch.testing.assert_close(together[1:], net(noisy), **SINGLE)


def test_gradients_of_a_batch_are_the_sum_of_its_images():
    net = BeerLaNet(3, 5, lam=0.2, gamma=0.1).double()
    x = batch(smear(), section()).double()
    weight = torch.rand(2, 3, 48, 64)
    both = grads(net, x, weight)[1]
    parts = [grads(net, x[k : k + 1], weight[k : k + 1])[1] for k in (0, 1)]
    for total, a, b in zip(both, *parts, strict=True):
        torch.testing.assert_close(total, a + b, rtol=1e-9, atol=1e-9)


@METHODS
def test_tiling_under_reference_pixels_changes_nothing_and_otherwise_does(method):
    one, four = smear(), np.tile(smear(), (2, 2, 1))
    net = BeerLaNet(4, 8, lam=0.5, gamma=0.1, reference_pixels=2000, method=method)
    expected = net(batch(one)).tile(1, 1, 2, 2)
    torch.testing.assert_close(net(batch(four)), expected, **SINGLE)
    net.reference_pixels = None
    difference = net(batch(four)) - net(batch(one)).tile(1, 1, 2, 2)
    assert difference.abs().max() > 1e-3


@METHODS
def test_order_of_pixels_and_of_spectra(method):
    x = batch(smear())
    net = BeerLaNet(5, 8, lam=0.2, gamma=0.1, method=method)
    y = net(x)
    turned = net(x.transpose(2, 3).flip(2))
    torch.testing.assert_close(turned, y.transpose(2, 3).flip(2), **SINGLE)
    order = [4, 2, 0, 1, 3]
    with torch.no_grad():
        net.raw_spectra.copy_(net.raw_spectra[:, order].clone())
    torch.testing.assert_close(net(x), y[:, order], **SINGLE)


def letterboxed(image):
    canvas = np.full((80, 70, 3), GREY, np.uint8)
    canvas[20:68, 3:67] = image
    return canvas


@METHODS
@pytest.mark.parametrize("reference", [None, 3000])
def test_grey_padding_weighs_nothing(method, reference):
    settings = {"lam": 0.3, "gamma": 0.1, "reference_pixels": reference, "method": method}
    net = BeerLaNet(4, 8, padding=GREY / 255, **settings).double()
    weight = torch.rand(1, 4, 48, 64)
    bare = grads(net, batch(smear(), dtype=torch.float64), weight)
    frame = torch.zeros(1, 4, 80, 70)
    frame[..., 20:68, 3:67] = weight
    padded = grads(net, batch(letterboxed(smear()), dtype=torch.float64), frame)
    torch.testing.assert_close(padded[0][..., 20:68, 3:67], bare[0], **SINGLE)
    for a, b in zip(padded[1], bare[1], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8)
    unpadded = BeerLaNet(4, 8, **settings).double()
    counted = unpadded(batch(letterboxed(smear())).double())[..., 20:68, 3:67]
    assert (counted - bare[0]).abs().max() > 1e-3


@METHODS
def test_weights_of_zero_weigh_nothing(method):
    net = BeerLaNet(4, 8, lam=0.3, gamma=0.1, method=method)
    shown = torch.zeros(1, 80, 70)
    shown[:, 20:68, 3:67] = 1
    bare = net(batch(smear()))
    canvas = batch(letterboxed(smear()))
    for weights in (shown, shown[:, None], shown.double(), shown.bool()):
        y = net(canvas, weights)
        torch.testing.assert_close(y[..., 20:68, 3:67], bare, **SINGLE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_padding_is_recognised_in_dense_images_of_any_precision(dtype):
    """Interpolation leaves no 8-bit image, but the frame around it is still grey."""
    net = BeerLaNet(3, 6, lam=0.3, gamma=0.1, padding=GREY / 255, method="dense")
    x = batch(letterboxed(smear())).to(dtype)
    bare = net(x[..., 20:68, 3:67]).float()
    torch.testing.assert_close(net(x)[..., 20:68, 3:67].float(), bare, rtol=1e-2, atol=1e-3)


@METHODS
def test_an_image_of_nothing_but_padding(method):
    net = BeerLaNet(3, 4, padding=GREY / 255, reference_pixels=100, method=method)
    y, slopes = grads(net, batch(np.full((5, 5, 3), GREY, np.uint8)))
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(g).all() for g in slopes)


# Odd images and settings: never NaN, never inf, forward or backward.

SETTINGS = {
    "K = 10": {"iterations": 10},
    "r = 1": {"components": 1},
    "r = 32": {"components": 32},
    "K = 1": {"iterations": 1},
    "λ = 0": {"lam": 0.0},
    "γ = 0": {"gamma": 0.0},
    "λ = γ = 0": {"lam": 0.0, "gamma": 0.0},
    "λ huge": {"lam": 1e8},
    "letter": {"unit_spectra": False},
    "intensity": {"domain": "intensity"},
    "reference": {"reference_pixels": 1e6},
    "zero start": {"spectra": np.zeros((3, 2))},
}


@pytest.mark.parametrize("picture", ODD)
@pytest.mark.parametrize("settings", SETTINGS)
def test_odd_images_and_settings_stay_finite(picture, settings):
    for method in ("palette", "dense"):
        net = BeerLaNet(**{"iterations": 5, "method": method, **SETTINGS[settings]})
        x = batch(ODD[picture])
        if method == "dense":
            x.requires_grad_(True)
        y, slopes = grads(net, x)
        assert torch.isfinite(y).all()
        assert (y >= 0).all()
        assert all(torch.isfinite(g).all() for g in slopes)
        assert x.grad is None or torch.isfinite(x.grad).all()
        if settings == "λ huge":
            assert not y.any()


# Learned.


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("lam", [0.01, 0.0])
def test_what_is_learned_stays_nonnegative_and_finite(optimizer, lam):
    net = BeerLaNet(3, 3, lam=lam, gamma=lam)
    steps = optimizer(net.parameters(), lr=0.5, weight_decay=0.1)
    x, g = batch(smear()[:8, :8]), torch.Generator().manual_seed(0)
    for _ in range(6):
        grads(net, x)
        for p in net.parameters():
            p.grad += 3 * torch.randn(p.shape, generator=g)
        steps.step()
        for value in (net.lam, net.gamma, net.spectra):
            assert torch.isfinite(value).all()
            assert (value >= 0).all()
        assert torch.isfinite(net(x)).all()
    if lam == 0:
        assert net.lam.item() == net.gamma.item() == 0


@pytest.mark.parametrize("push", [1e3, -1e3])
@pytest.mark.parametrize("gamma", [0.1, 0.0])
def test_a_step_far_too_large_gives_no_nan(push, gamma):
    net = BeerLaNet(3, 3, gamma=gamma)
    with torch.no_grad():
        for p in net.parameters():
            p += push
    y, slopes = grads(net, batch(smear()[:8, :8]))
    assert torch.isfinite(net.lam)
    assert torch.isfinite(y).all()
    assert all(torch.isfinite(s).all() for s in slopes)


def test_training_lowers_a_loss():
    net = BeerLaNet(3, 5)
    steps, x, losses = torch.optim.Adam(net.parameters(), lr=0.02), batch(smear()), []
    for _ in range(15):
        steps.zero_grad()
        loss = (net(x).mean((0, 2, 3)) - torch.tensor([0.5, 0.2, 0.0])).square().sum()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]


@pytest.mark.parametrize("training", [True, False])
def test_forward_changes_nothing(training):
    net = BeerLaNet(4, 5, padding=0.4).train(training)
    before = {k: v.clone() for k, v in net.state_dict().items()}
    settings = {k: v for k, v in vars(net).items() if not k.startswith("_")}
    x = batch(smear(), section())
    kept = x.clone()
    first, second = net(x), net(x)
    first.sum().backward()
    assert torch.equal(first, second)
    assert torch.equal(x, kept)
    assert before.keys() == net.state_dict().keys()
    assert all(torch.equal(v, net.state_dict()[k]) for k, v in before.items())
    assert settings == {k: v for k, v in vars(net).items() if not k.startswith("_")}


# Precision.


@METHODS
def test_autocast_does_not_reach_the_solver(method):
    net = BeerLaNet(4, 6, lam=0.2, method=method)
    x = batch(smear())
    plain, slopes = grads(net, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast, cast_slopes = grads(net, x)
        head = torch.nn.functional.conv2d(cast, torch.ones(3, 4, 1, 1))
    assert head.dtype == torch.bfloat16, "autocast was not on: the test proves nothing"
    assert torch.equal(cast, plain)
    assert all(torch.equal(a, b) for a, b in zip(cast_slopes, slopes, strict=True))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@METHODS
def test_images_of_any_precision_are_solved_precisely(dtype, method):
    if dtype == torch.bfloat16 and method == "palette":
        pytest.skip("too coarse a type to tell grey levels apart")
    x = batch(smear()).to(dtype)
    net = BeerLaNet(4, 6, lam=0.2, method=method)
    y = net(x)
    assert y.dtype == dtype
    exact = net(batch(smear()) if method == "palette" else x.double())
    torch.testing.assert_close(y, exact.to(dtype), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("kind", ["half", "bfloat16", "double"])
def test_modules_of_any_precision_solve_with_the_values_they_hold(kind):
    net = getattr(BeerLaNet(4, 6, lam=0.2, gamma=0.3), kind)()
    rounded = BeerLaNet(4, 6)
    rounded.load_state_dict(net.state_dict())
    x = batch(smear())
    y, slopes = grads(net, x)
    torch.testing.assert_close(y, rounded(x).detach(), rtol=1e-2, atol=1e-2)
    assert y.dtype == torch.float32
    assert all(torch.isfinite(g).all() for g in slopes)


# Handling.


def test_copies_and_pickles_are_the_same_net():
    net = BeerLaNet(
        4, 6, lam=0.03, gamma=0.2, reference_pixels=500, padding=0.4, domain="intensity"
    )
    x = batch(smear())
    expected = net(x)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    copies = (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(file, weights_only=False),
    )
    for again in copies:
        assert torch.equal(again(x), expected)
        assert vars(again).keys() == vars(net).keys()
        with torch.no_grad():
            again.log_lam += 1
        assert torch.equal(net(x), expected), "a copy must not share parameters"
    fresh = BeerLaNet(4, 6, reference_pixels=500, padding=0.4, domain="intensity")
    fresh.load_state_dict(net.state_dict())
    assert torch.equal(fresh(x), expected)


def test_batches_of_a_data_loader():
    images = [smear(), section(), ODD["smear"], np.zeros((48, 64, 3), np.uint8), smear(seed=2)]
    images = [np.resize(i, (48, 64, 3)) for i in images]
    data = [(torch.tensor(i).permute(2, 0, 1), k) for k, i in enumerate(images)]
    net, seen = BeerLaNet(3, 4, lam=0.1), []
    for x, k in DataLoader(data, batch_size=2):
        for one, y in zip(k.tolist(), net(x), strict=True):
            torch.testing.assert_close(y, net(batch(images[one]))[0], **SINGLE)
            seen.append(one)
    assert seen == list(range(5))


def test_memory_formats_and_strides():
    x = batch(smear(), section())
    net = BeerLaNet(3, 4, lam=0.1)
    expected = net(x)
    torch.testing.assert_close(net(x.contiguous(memory_format=torch.channels_last)), expected)
    torch.testing.assert_close(net(x.flip(3))[..., ::1].flip(3), expected, **SINGLE)
    torch.testing.assert_close(net(x[:1].expand(3, -1, -1, -1))[2], expected[0], **SINGLE)


def test_an_empty_batch_gives_an_empty_batch():
    assert BeerLaNet(3, 2)(torch.zeros(0, 3, 5, 6)).shape == (0, 3, 5, 6)


@pytest.mark.parametrize("shape", [(3, 8, 8), (1, 1, 8, 8), (1, 4, 8, 8), (8, 8, 3), (1, 8, 8, 3)])
def test_wrong_image_shapes_are_refused(shape):
    with pytest.raises(ValueError, match=r"takes \(N, 3, H, W\), not \("):
        BeerLaNet()(torch.zeros(shape))


@METHODS
@pytest.mark.parametrize(
    "shape", [(1, 8, 9), (3, 8, 9), (2, 9, 8, 1), (2, 2, 8, 9), (2, 72, 2), (8, 9)]
)
def test_wrong_weight_shapes_are_refused(shape, method):
    with pytest.raises(ValueError, match="weights"):
        BeerLaNet(method=method)(torch.zeros(2, 3, 8, 9), torch.ones(shape))


WRONG = {
    "components": [0, -1, 1.5, True, "many", None, float("nan")],
    "iterations": [0, -1, 1.5, "many", True, None],
    "lam": [-1, float("nan"), float("inf"), "auto", None],
    "gamma": [-0.1, float("nan"), "auto", None],
    "spectra": [np.ones((4, 2)), np.ones(3), -np.ones((3, 2)), np.full((3, 1), np.nan), "x"],
    "domain": ["x", None],
    "method": ["x", None],
    "reference_pixels": [0, -5, float("inf"), float("nan"), "many"],
    "padding": [114, -1, float("nan"), "grey"],
}


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, vs in WRONG.items() for v in vs])
def test_wrong_settings_are_refused_in_a_sentence(name, value):
    with pytest.raises(ValueError, match=rf"^{name} must .*\.$"):
        BeerLaNet(**{name: value})


def test_print_shows_the_settings():
    text = repr(BeerLaNet(5, 7, domain="intensity", reference_pixels=9))
    for word in ("components=5", "iterations=7", "'intensity'", "reference_pixels=9"):
        assert word in text


# The default start.


@pytest.mark.parametrize("r", [1, 2, 3, 7, 8, 32, 100])
@pytest.mark.parametrize("channels", [1, 3, 5])
def test_default_spectra_are_fixed_unit_nonnegative_and_distinct(r, channels):
    S = default_spectra(r, channels)
    assert S.shape == (channels, r)
    assert (S >= 0).all()
    np.testing.assert_allclose(np.linalg.norm(S, axis=0), 1)
    np.testing.assert_array_equal(S, default_spectra(r, channels))
    np.testing.assert_array_equal(
        S[:, : r // 2], default_spectra(max(r // 2, 1), channels)[:, : r // 2]
    )
    if channels > 1:
        cosine = S.T @ S - 2 * np.eye(r)
        assert cosine.max() < 0.99999
