"""LStainNorm against its description written out in NumPy, one pixel and one space at a time."""

import colorsys

import numpy as np
import pytest
import torch
from skimage.color import lab2rgb, rgb2lab

from napari_beerlanet.core.normalization.lstainnorm import LStainNorm
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.samples import blood_smear

LAB = np.array([100.0, 110.0, 110.0])


def made(pool=8, seed=0, spread=0.02):
    """With parameters away from where they start, so that each of them counts."""
    torch.manual_seed(seed)
    norm = LStainNorm(pool)
    with torch.no_grad():
        for name, value in norm.named_parameters():
            if name in ("mean", "sd", "gamma", "scale", "shift"):
                value += spread * torch.randn_like(value)
    return norm


@pytest.fixture(scope="module")
def smear():
    return blood_smear((40, 27), seed=2, cell_diameter=14.0).image


def as_tensor(image):
    return torch.from_numpy(image.transpose(2, 0, 1).copy())[None].float() / 255


# --- the description, written out ----------------------------------------------------------------


def into(space, rgb):
    if space == "lab":
        return rgb2lab(rgb) / LAB
    if space == "hsv":
        flat = [colorsys.rgb_to_hsv(*pixel) for pixel in rgb.reshape(-1, 3)]
        return np.array(flat).reshape(rgb.shape)
    return rgb


def back(space, values):
    if space == "lab":
        return lab2rgb(values * LAB)
    if space == "hsv":
        flat = values.reshape(-1, 3)
        pixels = [colorsys.hsv_to_rgb(h % 1, *np.clip((s, v), 0, 1)) for h, s, v in flat]
        return np.array(pixels).reshape(values.shape)
    return np.clip(values, 0, 1)


def pooled(planes, side):
    """Maxima of blocks (h, w, c), those at the end smaller."""
    height, width = planes.shape[:2]
    rows = [
        [planes[y : y + side, x : x + side].max((0, 1)) for x in range(0, width, side)]
        for y in range(0, height, side)
    ]
    return np.array(rows)


def upsampled(planes, shape):
    """Linear between the centres of the blocks, constant beyond them."""

    def places(n, m):
        at = np.clip((np.arange(n) + 0.5) * m / n - 0.5, 0, m - 1)
        low = np.minimum(at.astype(int), m - 1)
        return low, np.minimum(low + 1, m - 1), at - low

    (y0, y1, ty), (x0, x1, tx) = (places(n, m) for n, m in zip(shape, planes.shape, strict=False))
    tx, ty = tx[None, :, None], ty[:, None, None]
    upper = planes[y0][:, x0] * (1 - tx) + planes[y0][:, x1] * tx
    lower = planes[y1][:, x0] * (1 - tx) + planes[y1][:, x1] * tx
    return upper * (1 - ty) + lower * ty


def attention(rgb, norm, side):
    q, k, v = (
        pooled(rgb @ part.weight.detach().double().numpy()[:, :, 0, 0].T, side)
        for part in (norm.query, norm.key, norm.value)
    )
    result = np.zeros_like(v)
    for place in np.ndindex(q.shape[:2]):
        scores = np.exp(q[place] * k[..., 0] - (q[place] * k).max())
        result[place] = (scores[..., None] * v).sum((0, 1)) / scores.sum()
    return upsampled(result, rgb.shape[:2])


def written_out(rgb, norm, side):
    p = {name: value.detach().double().numpy() for name, value in norm.state_dict().items()}
    images, weights = [], []
    for s, space in enumerate(("lab", "hsv", "rgb")):
        z = into(space, rgb)
        z = (z - z.mean((0, 1))) / z.std((0, 1))
        x = back(
            space, z * (p["template_sd"][s] + p["sd"][s]) + p["template_mean"][s] + p["mean"][s]
        )
        bright = np.maximum(x, 1 / 255)
        images.append(x)
        weights.append(((1 + p["gamma"][s]) * np.abs(attention(x, norm, side)) + bright) / bright)
    total = sum(weights)
    weights = [p["scale"][s] * w / total + p["shift"][s] for s, w in enumerate(weights)]
    return sum(w * x for w, x in zip(weights, images, strict=True)) / sum(weights)


@pytest.mark.parametrize("pool", [8, 13])
def test_it_is_what_is_described(smear, pool):
    norm = made(pool)
    got = norm(as_tensor(smear))[0].detach().numpy().transpose(1, 2, 0)
    np.testing.assert_allclose(got, written_out(smear / 255.0, norm, pool), atol=2e-4)


# --- what else it promises -----------------------------------------------------------------------


def test_about_55_numbers_are_learned():
    assert sum(p.numel() for p in LStainNorm().parameters()) == 54


def test_every_number_learns(smear):
    norm = made()
    images = torch.cat([as_tensor(smear), as_tensor(smear[::-1])])
    (norm(images) ** 2).mean().backward()
    for name, value in norm.named_parameters():
        assert value.grad is not None, name
        assert value.grad.isfinite().all(), name
        assert (value.grad != 0).any(), name


def test_the_template_is_what_training_images_have(smear):
    norm = made(spread=0.0)
    norm.fit([palette_of(smear.reshape(-1, 3))])
    after = norm(as_tensor(smear))
    assert (after - as_tensor(smear)).abs().max() < 0.02  # it has its own mean and deviation
    dark = (smear * 0.6).astype(np.uint8)
    mean = norm(as_tensor(dark)).mean((2, 3))
    assert (mean - as_tensor(smear).mean((2, 3))).abs().max() < 0.02


def test_statistics_of_a_palette_are_those_of_the_pixels(smear):
    norm = made()
    by_pixels = norm.statistics(as_tensor(smear))[0].numpy()
    by_colours = norm.palette_statistics(palette_of(smear.reshape(-1, 3)))
    np.testing.assert_allclose(by_colours, by_pixels, atol=1e-5)


def test_padding_counts_nowhere_and_stays(smear):
    norm = made()
    bordered = np.full((56, 48, 3), 114, np.uint8)
    bordered[:40, :27] = smear
    alone, amid = norm(as_tensor(smear)), norm(as_tensor(bordered))
    assert torch.equal(amid[..., 40:, :], torch.full_like(amid[..., 40:, :], 114 / 255))
    np.testing.assert_allclose(
        norm.statistics(as_tensor(bordered)), norm.statistics(as_tensor(smear)), atol=1e-6
    )
    # Only the blocks that attention is interpolated between are others at the border.
    assert (amid[..., :24, :16] - alone[..., :24, :16]).abs().max() < 1e-3


def test_weights_say_what_counts(smear):
    norm, image = made(), as_tensor(smear)
    weights = torch.zeros(1, 40, 27)
    weights[:, 10:30] = 2.0
    part = norm.statistics(image[:, :, 10:30])
    np.testing.assert_allclose(norm.statistics(image, weights), part, atol=1e-6)


@pytest.mark.parametrize("grey", [0.0, 1.0, 0.5, 114 / 255])
def test_one_colour_is_no_trouble(grey):
    norm = made()
    out = norm(torch.full((2, 3, 17, 9), grey))
    out.sum().backward()
    assert out.isfinite().all()
    assert out.min() >= 0
    assert out.max() <= 1
    assert all(p.grad is None or p.grad.isfinite().all() for p in norm.parameters())


def test_half_precision_leaves_its_numbers_alone(smear):
    norm = made()
    before = {name: value.clone() for name, value in norm.state_dict().items()}
    halved = norm.half()
    assert all(torch.equal(value, before[name]) for name, value in halved.state_dict().items())
    out = halved(as_tensor(smear).half())
    assert out.dtype == torch.float16
