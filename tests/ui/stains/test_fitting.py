"""Fits of planes, stacks and slides: counted once, never whole in memory, lazily shown."""

import dask.array as da
import numpy as np
import pytest
import zarr

from napari_beerlanet.core.images.rgb import ImageError
from napari_beerlanet.core.stains.block_sample import sample_stack
from napari_beerlanet.core.stains.decompose import decompose
from napari_beerlanet.core.stains.palette import palette_of
from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.core.stains.slide import decompose_slide
from napari_beerlanet.ui.stains import fitting
from napari_beerlanet.ui.stains.fitting import (
    FitTarget,
    SlideFitOptions,
    StainFitter,
    density_data,
    describe_fit,
    reconstruction_data,
    residual_data,
    rough_settings,
)
from napari_beerlanet.ui.viewer import planes
from napari_beerlanet.ui.viewer.planes import Plane


@pytest.fixture
def stack(smear):
    """(3, 2, 120, 160, 3): other cells and another light in each."""
    planes = [smear[:120, :160], smear[120:, :160], smear[:120, 160:]]
    return np.stack([np.stack([p, (p * 0.9).astype(np.uint8)]) for p in planes])


def planes_of(stack):
    return tuple(Plane("stack", (stack,), index) for index in np.ndindex(stack.shape[:-3]))


def test_a_small_image_is_fitted_whole(smear):
    target = FitTarget((Plane("smear", (smear,)),))
    fit = StainFitter().fit(target, DecomposeSettings())
    d = decompose(smear, iterations="converge")
    assert not target.lazy
    assert describe_fit(fit) == ""
    np.testing.assert_array_equal(fit.decomposition.densities, d.densities)
    for shown, expected in zip(density_data(fit), d.densities, strict=True):
        np.testing.assert_array_equal(shown, expected)
    np.testing.assert_array_equal(reconstruction_data(fit, [0]), d.reconstruct([0]))
    np.testing.assert_allclose(residual_data(fit), np.linalg.norm(d.residual(), axis=-1))


def test_the_same_image_is_read_and_counted_once(smear, monkeypatch):
    counted = []
    monkeypatch.setattr(fitting, "palette_of", lambda p: counted.append(1) or palette_of(p))
    fitter = StainFitter()
    for lam in (0.1, 0.2):
        fitter.fit(FitTarget((Plane("smear", (smear,)),)), DecomposeSettings(iterations=3, lam=lam))
    assert len(counted) == 1
    fitter.fit(FitTarget((Plane("smear", (smear.copy(),)),)), DecomposeSettings(iterations=3))
    assert len(counted) == 2
    fitter.clear_cache()
    fitter.fit(FitTarget((Plane("smear", (smear,)),)), DecomposeSettings(iterations=3))
    assert len(counted) == 3


def test_counted_stains_keep_their_places_when_a_penalty_is_typed(smear):
    fitter, target = StainFitter(), FitTarget((Plane("smear", (smear,)),))
    auto = fitter.fit(target, DecomposeSettings(components="auto")).decomposition
    typed = fitter.fit(
        target, DecomposeSettings(components="auto", lam=auto.lam * 1.5)
    ).decomposition
    np.testing.assert_array_equal(typed.active, auto.active)
    expected = decompose(smear, iterations="converge", spectra=auto.spectra, lam=auto.lam * 1.5)
    np.testing.assert_array_equal(typed.densities, expected.densities)


def test_what_takes_long_has_a_first_look():
    assert rough_settings(DecomposeSettings()) is None
    assert rough_settings(DecomposeSettings(iterations=10, lam=1.0)) is None
    assert rough_settings(DecomposeSettings(components=3, lam=1.0)) is None
    assert rough_settings(DecomposeSettings(components="auto", lam=1.0)) is None
    assert rough_settings(DecomposeSettings(components=8, lam=1.0)).iterations == 30
    assert rough_settings(DecomposeSettings(spectra=np.eye(3).repeat(2, 1))).iterations == 30


def test_a_first_look_says_that_it_is_one(smear):
    fitter, target = StainFitter(), FitTarget((Plane("smear", (smear,)),))
    settings = DecomposeSettings(components=6, lam=0.5)
    first = fitter.fit(target, settings, rough=True)
    assert first.is_rough
    assert first.settings is settings
    assert not fitter.fit(target, settings).is_rough


@pytest.fixture
def small_slides(monkeypatch):
    """An image of more than 20 000 pixels is a slide."""
    monkeypatch.setattr(planes, "SLIDE_PIXELS", 20_000)
    monkeypatch.setattr(planes, "SLIDE_PIXELS_LAZY", 20_000)


@pytest.mark.parametrize("kind", [np.asarray, da.from_array, zarr.array])
def test_a_large_image_is_fitted_as_a_whole_and_shown_lazily(smear, kind, small_slides):
    target = FitTarget((Plane("slide", (kind(smear),)),))
    fitter = StainFitter()
    preview = fitter.fit(target, DecomposeSettings())
    assert preview.preview
    assert "a preview from 12 tiles" in describe_fit(preview)
    fitter.set_slide_colours(target, fitter.slide_scan(preview)(lambda progress: None))
    fit = fitter.fit(target, DecomposeSettings())
    assert not fit.preview
    assert fitter.slide_scan(fit) is None
    assert "0.1 million pixels" in describe_fit(fit)
    whole = decompose(smear, iterations="converge")
    np.testing.assert_array_equal(fit.decomposition.spectra, whole.spectra)
    np.testing.assert_array_equal(fit.decomposition.background, whole.background)
    shown = density_data(fit)
    for i in np.flatnonzero(whole.active):
        assert isinstance(shown[i], da.Array)
        np.testing.assert_array_equal(shown[i].compute(), whole.densities[i])


def test_levels_and_kinds_of_a_slide_are_chosen(smear, small_slides):
    levels = tuple(da.from_array(smear[::k, ::k], chunks=(64, 64, 3)) for k in (1, 2, 4))
    for choice in (SlideFitOptions(level=1), SlideFitOptions(leave_out=("glass",))):
        target, fitter = FitTarget((Plane("slide", levels),), choice), StainFitter()
        preview = fitter.fit(target, DecomposeSettings())
        fitter.set_slide_colours(target, fitter.slide_scan(preview)(lambda progress: None))
        fit = fitter.fit(target, DecomposeSettings())
        given = {"level": choice.level, "leave_out": choice.leave_out}
        right = decompose_slide(list(levels), iterations="converge", **given)
        np.testing.assert_array_equal(fit.decomposition.spectra, right.fit.spectra)
        assert fit.slide_colours.counted == right.counted
    assert "without background" in describe_fit(fit)
    only = FitTarget((Plane("slide", levels),), SlideFitOptions(preview_only=True))
    fitter = StainFitter()
    assert fitter.slide_scan(fitter.fit(only, DecomposeSettings())) is None


def test_what_was_counted_is_dropped_with_another_slide(smear, small_slides):
    one, two = (FitTarget((Plane("a", (smear.copy(),)),)) for _ in range(2))
    fitter = StainFitter()
    counted = fitter.slide_scan(fitter.fit(one, DecomposeSettings()))(lambda progress: None)
    fitter.fit(two, DecomposeSettings())
    fitter.set_slide_colours(one, counted)
    assert fitter.fit(two, DecomposeSettings()).preview


def test_a_multiscale_image_has_every_level(smear, small_slides):
    levels = tuple(da.from_array(smear[::k, ::k], chunks=(64, 64, 3)) for k in (1, 2, 4))
    fit = StainFitter().fit(FitTarget((Plane("slide", levels),)), DecomposeSettings())
    for data in density_data(fit):
        assert [level.shape for level in data] == [(240, 320), (120, 160), (60, 80)]
    rebuilt = reconstruction_data(fit, [0])
    assert [level.shape for level in rebuilt] == [(240, 320, 3), (120, 160, 3), (60, 80, 3)]
    np.testing.assert_array_equal(
        rebuilt[1].compute(), fit.decomposition.reconstruct_of(smear[::2, ::2], [0])
    )
    assert residual_data(fit)[2].compute().shape == (60, 80)


def test_lazily_means_that_only_what_is_looked_at_is_read(smear, small_slides):
    read, large = [], np.tile(smear, (2, 2, 1))

    def load(block_info=None):
        where = block_info[None]["array-location"]
        read.append(where)
        return large[tuple(slice(*w) for w in where)]

    chunks = ((160,) * 3, (160,) * 4, (3,))
    fine = da.map_blocks(load, chunks=chunks, dtype=np.uint8, meta=smear[:0])
    levels = (fine, large[::4, ::4])
    fit = StainFitter().fit(FitTarget((Plane("slide", levels),)), DecomposeSettings())
    read.clear()
    shown = density_data(fit)
    assert not read
    both = [shown[i][0][:160, :160].compute() for i in np.flatnonzero(fit.decomposition.active)[:2]]
    assert len(both) == 2
    assert {tuple(map(tuple, where)) for where in read} == {((0, 160), (0, 160), (0, 3))}


def test_one_fit_for_all_planes_has_the_colours_of_all(stack):
    target = FitTarget(planes_of(stack))
    fit = StainFitter().fit(target, DecomposeSettings())
    joined = np.concatenate(list(stack.reshape(-1, *stack.shape[-3:])))
    np.testing.assert_allclose(
        fit.decomposition.spectra, decompose(joined, iterations="converge").spectra, rtol=1e-9
    )
    assert "one fit for 6 planes" in describe_fit(fit)
    shown = density_data(fit)[int(fit.decomposition.share.argmax())]
    assert shown.shape == (3, 2, 120, 160)
    expected = fit.decomposition.densities_of(stack[2, 1])[int(fit.decomposition.share.argmax())]
    np.testing.assert_array_equal(shown[2, 1].compute(), expected)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_stacks_of_every_type_and_with_alpha(stack, dtype):
    factor = {np.uint8: 1, np.uint16: 257, np.float32: 1 / 255}[dtype]
    full = 1 if dtype is np.float32 else np.iinfo(dtype).max
    rgba = np.full((*stack.shape[:-1], 4), full, dtype)
    rgba[..., :3] = stack.astype(float) * factor
    rgba[0, 0, ..., 3] = 0  # a hidden plane
    rgba[1, 0, :20, ..., 3] = 0
    fit = StainFitter().fit(FitTarget(planes_of(rgba)), DecomposeSettings(iterations=4))
    shown = density_data(fit)[0].compute()
    assert shown.shape == stack.shape[:-1]
    assert np.isfinite(shown).all()


def test_a_stack_of_nothing_but_transparent_pixels_is_refused(stack):
    hidden = np.zeros((*stack.shape[:-1], 4), np.uint8)
    with pytest.raises(ImageError, match="fully transparent"):
        StainFitter().fit(FitTarget(planes_of(hidden)), DecomposeSettings())


def test_planes_of_a_stack_are_read_one_by_one(stack):
    alive = []

    def planes():
        for plane in stack.reshape(-1, *stack.shape[-3:]):
            alive.append(plane)
            yield plane

    image, palette = sample_stack(planes(), 6)
    assert len(alive) == 6
    assert int(palette.counts.sum()) == stack[..., 0].size
    assert image.pixels.shape[-1] == 3


def test_colours_of_16_bit_planes_are_counted_only_where_that_pays():
    """Of noise every pixel has its own, and a row of a palette costs more than a pixel."""
    rng = np.random.default_rng(0)
    noise = rng.integers(0, 65536, (3, 40, 50, 3), dtype=np.uint16)
    few = noise % 7 * 9000
    assert sample_stack(few, 3)[1] is not None
    assert sample_stack(noise, 3)[1] is None
    assert sample_stack([few[0], noise[1], few[2]], 3)[1] is None


def test_blocks_that_the_fit_never_saw_may_hold_anything(smear, small_slides):
    image = (smear / 255).astype(np.float32)
    odd = np.tile(image, (3, 3, 1))
    odd[-1, -1], odd[-1, -3] = np.nan, 7.0  # in no whole tile of 512 × 512
    fit = StainFitter().fit(FitTarget((Plane("slide", (odd,)),)), DecomposeSettings(iterations=4))
    assert np.isfinite(density_data(fit)[0].compute()).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda image: np.where(image > 0.7, np.nan, image), "NaN"),
        (lambda image: image * 300, "do not say what white is"),
    ],
)
def test_floats_out_of_range_are_refused(smear, change, reason):
    image = change((smear / 255).astype(np.float32))
    with pytest.raises(ImageError, match=reason):
        StainFitter().fit(FitTarget((Plane("smear", (image,)),)), DecomposeSettings())
