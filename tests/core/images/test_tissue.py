"""Glass, tissue, pen marks and black borders of a slide."""

import numpy as np
import pytest

from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.images.tissue import (
    BACKGROUND,
    BORDER,
    PEN,
    TISSUE,
    TissueMask,
    classify_thumbnail,
    find_tissue,
)
from napari_beerlanet.samples import he_field


@pytest.fixture(scope="module")
def slide():
    """Glass with a piece of tissue, a black border at the left, and strokes of four pens."""
    image = np.random.default_rng(0).normal(242, 2, (800, 1000, 1)).repeat(3, 2)
    image = np.clip(image, 0, 255).astype(np.uint8)
    image[250:500, 300:600] = np.minimum(he_field((250, 300), seed=1).image, (230, 200, 215))
    image[:, :40] = 8
    for k, ink in enumerate([(30, 150, 70), (40, 80, 180), (190, 30, 40), (25, 25, 30)]):
        image[60 + 30 * k : 75 + 30 * k, 700:950] = ink
    return image


def test_each_kind_is_found(slide):
    kind = classify_thumbnail(slide)
    assert (kind[260:490, 310:590] == TISSUE).mean() > 0.95
    assert (kind[:, :38] == BORDER).all()
    for k in range(4):
        assert (kind[62 + 30 * k : 73 + 30 * k, 705:945] == PEN).all()
    assert (kind[550:, 80:] == BACKGROUND).all()


def test_tissue_has_a_rim_of_glass(slide):
    kind = classify_thumbnail(slide)
    assert kind[249, 450] == TISSUE
    assert kind[240, 450] == BACKGROUND


def test_no_tissue_of_real_slides_is_taken_for_a_pen(shared):
    from napari_beerlanet.core.images.files import read_image

    for name in ("slide/CMU-1-Small-Region.svs", "he/he_1024_a.tif", "he/hgsc_stromal_1500.jpg"):
        kind = classify_thumbnail(read_image(shared / "data" / name).pixels[::3, ::3])
        assert (kind == PEN).mean() < 0.01, name
        assert (kind == BORDER).mean() < 0.01, name
        assert (kind == TISSUE).mean() > 0.3, name


def test_an_image_of_tissue_alone_is_tissue():
    assert (classify_thumbnail(he_field((400, 400), seed=2).image) == TISSUE).mean() > 0.9


def test_transparent_is_border(slide):
    alpha = np.full(slide.shape[:2], 255, np.uint8)
    alpha[700:] = 0
    assert (classify_thumbnail(np.dstack([slide, alpha]))[705:] == BORDER).all()


def test_the_map_answers_for_parts_of_the_image(slide):
    large = slide.repeat(3, 0).repeat(3, 1)
    tissue = find_tissue([large, slide])
    assert tissue.shape == (2400, 3000)
    assert tissue.has_tissue(Rectangle.from_edges(1200, 900, 1210, 910))
    assert not tissue.has_tissue(Rectangle.from_edges(300, 1800, 3000, 2400))
    kept = tissue.included(("glass", "pen", "border"))
    mask = tissue.mask(kept, Rectangle.from_edges(600, 600, 2000, 1800))
    assert mask.shape == (1200, 1400)
    assert mask[160:800, 310:1100].mean() > 0.95
    assert not mask[:100].any()
    assert 0.09 < tissue.fraction < 0.12


def test_mask_does_not_depend_on_the_parts():
    rng = np.random.default_rng(1)
    tissue = TissueMask(rng.integers(0, 4, (7, 9)).astype(np.uint8), (100, 131))
    kept = tissue.included(("glass",))
    whole = tissue.mask(kept, Rectangle.from_edges(0, 0, 131, 100))
    np.testing.assert_array_equal(
        tissue.mask(kept, Rectangle.from_edges(40, 13, 99, 77)), whole[13:77, 40:99]
    )
    assert tissue.included(()).all()
