"""One fit of the whole image, applied to any part of it."""

import numpy as np
import pytest
import torch

from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.network import PADDING, StainDetectionModel
from napari_beerlanet.core.images.rgb import PADDING_GREY, fill_transparent
from napari_beerlanet.core.stains.domain_shift import summarize_stain
from napari_beerlanet.core.stains.front_end import fit_stain
from napari_beerlanet.samples import blood_smear
from tinydata import MODEL


@pytest.fixture(scope="module", params=["log", "intensity"])
def network(request):
    torch.manual_seed(0)
    network = StainDetectionModel(dict(MODEL), nc=3, imgsz=96, domain=request.param)
    network.fit_mix()
    return network.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def smear():
    return blood_smear((80, 112), seed=3, cell_diameter=30.0).image


@pytest.fixture(scope="module")
def bordered(smear):
    """The smear amid 16 pixels of grey."""
    image = np.full((112, 144, 3), PADDING_GREY, np.uint8)
    image[16:-16, 16:-16] = smear
    return image


def tensor(image):
    return torch.from_numpy(image.transpose(2, 0, 1).copy()).float()[None] / 255


def test_colours_seen_are_the_networks_own(network, bordered):
    seen = fit_stain(network, bordered).mix_tiles(network, bordered[None])
    torch.testing.assert_close(seen, network.apply_front_end(tensor(bordered)), atol=2e-5, rtol=0)


def test_pixel_by_pixel_equals_colour_by_colour(network, bordered, smear):
    fit = fit_stain(network, bordered)
    tiles = np.stack([bordered, np.roll(bordered, 9, axis=0)])
    pixels = fit._mix_pixels(network, torch.from_numpy(tiles))
    assert pixels.shape == (2, 3, *bordered.shape[:2])
    torch.testing.assert_close(pixels, fit.mix_tiles(network, tiles), atol=1e-4, rtol=0)


def test_padding_stays_grey_and_weighs_nothing(network, bordered, smear):
    fit, plain = fit_stain(network, bordered), fit_stain(network, smear)
    np.testing.assert_allclose(fit.background, plain.background, rtol=1e-12)
    np.testing.assert_allclose(fit.spectra, plain.spectra, atol=1e-12)
    seen = fit.mix_tiles(network, bordered[None])[0]
    grey = torch.from_numpy((bordered == PADDING_GREY).all(2))
    assert torch.equal(seen[:, grey], torch.full_like(seen[:, grey], PADDING))
    torch.testing.assert_close(seen[:, 16:-16, 16:-16], plain.mix_tiles(network, smear[None])[0])


def test_planes_are_the_detectors_decomposition(network, smear):
    info = {"classes": ["RBC", "WBC", "Platelets"]}
    whole = Detector(network, info).decompose(smear)
    fit = fit_stain(network, smear)
    np.testing.assert_allclose(fit.planes(smear), whole.densities, atol=1e-6)
    np.testing.assert_allclose(fit.background, whole.background, atol=1e-9)
    np.testing.assert_allclose(fit.spectra, whole.spectra, atol=1e-9)


def test_a_part_is_seen_as_in_the_whole(network, smear):
    fit, part = fit_stain(network, smear), np.s_[20:61, 30:77]
    assert np.array_equal(fit.planes(smear[part]), fit.planes(smear)[:, *part])
    whole, alone = (
        fit.mix_tiles(network, smear[None])[0],
        fit.mix_tiles(network, smear[part][None])[0],
    )
    assert torch.equal(alone, whole[:, *part])


def test_colours_that_were_not_in_the_image_are_worked_out(network, smear):
    """Tiles are resized, so most of their colours are new to a fit of the image itself."""
    fit = fit_stain(network, smear)
    other = smear.copy()
    other[::2] = (other[::2] // 3) + 7
    forgetful = type(fit)(fit.background, fit.spectra, fit.densities, fit.domain)
    np.testing.assert_allclose(fit.planes(other), forgetful.planes(other), atol=1e-7)
    rows, table = fit.look_up(other)
    assert np.array_equal(table[rows].transpose(2, 0, 1), fit.planes(other))


def test_hidden_pixels_are_padding(network, smear):
    alpha = np.full((*smear.shape[:2], 1), 255, np.uint8)
    alpha[:30] = 0
    image = np.concatenate([smear, alpha], 2)
    image[:30, :, :3] = (200, 10, 10)
    fit, visible = fit_stain(network, fill_transparent(image)), fit_stain(network, smear[30:])
    np.testing.assert_allclose(fit.spectra, visible.spectra, atol=1e-12)
    seen = fit.mix_tiles(network, fill_transparent(image)[None])[0]
    assert torch.equal(seen[:, :30], torch.full_like(seen[:, :30], PADDING))
    told, right = (
        summarize_stain(visible, pixels) for pixels in (fill_transparent(image), smear[30:])
    )
    assert told == right


@pytest.mark.parametrize("colour", [0, PADDING_GREY, 255])
def test_an_image_of_one_colour_has_finite_densities(network, colour):
    image = np.full((32, 32, 3), colour, np.uint8)
    fit = fit_stain(network, image)
    assert np.isfinite(fit.planes(image)).all()
    assert fit.mix_tiles(network, image[None]).isfinite().all()
