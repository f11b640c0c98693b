"""Reinhard and Macenko as in torchstain, and what every method does with any image."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

import napari_beerlanet as nb
from napari_beerlanet.core.common.storage import FileError
from napari_beerlanet.core.images.files import read_image
from napari_beerlanet.core.images.rgb import to_uint8
from napari_beerlanet.core.normalization.methods import (
    METHODS,
    fitted_normalizer,
    load_normalizer,
    save_normalizer,
)
from napari_beerlanet.core.normalization.normalizer import ColourStatistics, NormalizerError
from napari_beerlanet.samples import blood_smear, he_field, photograph

REAL = (
    "he/he_1024_b.tif",
    "he/hgsc_stromal_1500.jpg",
    "bccd/JPEGImages/BloodImage_00003.jpg",
    "malaria/images/1704282807-0002-R.jpg",
)
TEMPLATES = [name for name, method in METHODS.items() if method.needs_template]


@pytest.fixture(scope="module")
def template():
    return photograph("H&E section")[:256, :256].copy()


@pytest.fixture(scope="module")
def image():
    return he_field((96, 128), seed=3, shift=0.7).image


@pytest.fixture(scope="module")
def normalizers(template):
    return {name: fitted_normalizer(name, template) for name in METHODS}


# --- as torchstain -------------------------------------------------------------------------------


def plain_reinhard(template, image):
    """Pixel by pixel in float32 with the formulas and constants of torchstain's NumPy backend."""
    matrix = np.array(
        [
            [0.412453, 0.357580, 0.180423],
            [0.212671, 0.715160, 0.072169],
            [0.019334, 0.119193, 0.950227],
        ],
        np.float32,
    )
    white = np.array([0.95047, 1.0, 1.08883], np.float32)

    def to_lab(rgb):
        c = rgb.reshape(-1, 3).astype(np.float32) / 255
        xyz = np.where(c > 0.04045, ((c + 0.055) / 1.055) ** 2.4, c / 12.92) @ matrix.T / white
        x, y, z = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116).T
        return np.stack([116 * y - 16, 500 * (x - y), 200 * (y - z)])

    own, target = to_lab(image), to_lab(template)
    means, sds = ([f(lab, axis=1)[:, None] for lab in (own, target)] for f in (np.mean, np.std))
    light, a, b = (own - means[0]) / sds[0] * sds[1] + means[1]
    y = (light + 16) / 116
    f = np.stack([y + a / 500, y, y - b / 200], axis=1)
    xyz = np.where(f > 0.2068966, f**3, (f - 16 / 116) / 7.787) * white
    c = np.maximum(xyz @ np.linalg.inv(matrix.astype(float)).T, 0)
    rgb = np.where(c > 0.0031308, 1.055 * c ** (1 / 2.4) - 0.055, 12.92 * c)
    return (255 * np.clip(rgb, 0, 1)).astype(np.uint8).reshape(image.shape)


def plain_stains(image):
    """Stains, densities and strengths of Macenko, pixel by pixel as torchstain has them."""
    density = -np.log((image.reshape(-1, 3).astype(float) + 1) / 240)
    stained = density[~(density < 0.15).any(axis=1)]
    plane = np.linalg.eigh(np.cov(stained.T))[1][:, 1:3]
    angles = np.arctan2(*(stained @ plane).T[::-1])
    ends = np.percentile(angles, [1, 99])
    stains = plane @ np.array([np.cos(ends), np.sin(ends)])
    if stains[0, 0] <= stains[0, 1]:
        stains = stains[:, ::-1]
    densities = np.linalg.lstsq(stains, density.T, rcond=None)[0]
    return stains, densities, np.percentile(densities, 99, axis=1)


def plain_macenko(template, image):
    stains, _, wanted = plain_stains(template)
    _, densities, strengths = plain_stains(image)
    rgb = 240 * np.exp(-stains @ (densities / (strengths / wanted)[:, None]))
    return np.minimum(rgb, 255).T.reshape(image.shape).astype(np.uint8)


def assert_as_torchstain(method, template, source):
    ours = fitted_normalizer(method, template).apply(source)
    assert not ours.unchanged
    theirs = {"reinhard": plain_reinhard, "macenko": plain_macenko}[method](template, source)
    if method == "macenko":
        np.testing.assert_array_equal(ours.rgb, theirs)
    else:  # float64 and float32, on both sides of a whole grey level
        differ = np.abs(ours.rgb.astype(int) - theirs)
        assert differ.max() <= 1
        assert differ.astype(bool).mean() < 2e-4


@pytest.mark.parametrize("method", ["reinhard", "macenko"])
def test_the_same_as_torchstain_on_samples(method, template):
    for source in (
        photograph("H&E section"),
        photograph("Blood smear (BCCD)"),
        he_field((120, 90), seed=1, shift=1.0).image,
        blood_smear((100, 140), seed=2).image,
    ):
        assert_as_torchstain(method, template, source)


@pytest.mark.slow
@pytest.mark.parametrize("name", REAL)
@pytest.mark.parametrize("method", ["reinhard", "macenko"])
def test_the_same_as_torchstain_on_real_images(method, name, shared):
    template = read_image(shared / "data/he/he_1024_a.tif").pixels[::3, ::3].copy()
    source = read_image(shared / "data" / name).pixels[::3, ::3].copy()
    assert_as_torchstain(method, template, source)


def test_several_templates_are_the_mean_of_their_stains(template):
    templates = [template, he_field((96, 96), seed=5).image]
    found = fitted_normalizer("macenko-multi", templates).state()[0]
    each = [plain_stains(one) for one in templates]
    np.testing.assert_allclose(found["stains"], np.mean([e[0] for e in each], axis=0), atol=1e-9)
    np.testing.assert_allclose(found["strengths"], np.mean([e[2] for e in each], axis=0))


@given(
    hnp.arrays(np.int64, st.integers(1, 12), elements=st.integers(1, 50)),
    st.floats(0, 100),
    st.integers(0, 1000),
)
def test_weighted_percentiles_are_those_of_the_pixels(counts, q, seed):
    values = np.random.default_rng(seed).normal(size=len(counts)).round(1)
    statistics = ColourStatistics(np.zeros((len(counts), 3)), counts)
    assert statistics.percentile(values, q) == np.percentile(np.repeat(values, counts), q)


# --- any image -----------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
def test_types_come_back_and_agree(method, dtype, normalizers, image):
    scale = {np.uint8: 1, np.uint16: 257}.get(dtype, 1 / 255)
    source = (image * np.asarray(scale)).astype(dtype)
    before = source.copy()
    done = normalizers[method].apply(source)
    assert done.rgb.dtype == dtype
    assert done.rgb.shape == source.shape
    np.testing.assert_array_equal(source, before)
    assert not np.shares_memory(done.rgb, source)
    eight = normalizers[method].apply(image).rgb.astype(int)
    assert np.abs(to_uint8(done.rgb).astype(int) - eight).max() <= 1  # some methods cut off


@pytest.mark.parametrize("method", TEMPLATES)
def test_16_bits_keep_more_than_256_levels(method, normalizers, image):
    ramp = image.astype(np.uint16) * 257
    ramp[:, :, 0] -= np.minimum(ramp[:, :, 0], np.arange(ramp.shape[1], dtype=np.uint16) % 200)
    done = normalizers[method].apply(ramp)
    assert not done.unchanged
    assert len(np.unique(done.rgb[..., 0])) > 2 * 256


@pytest.mark.parametrize("method", TEMPLATES)
def test_alpha_is_kept_and_what_it_hides_does_not_count(method, normalizers, image):
    alpha = np.full((*image.shape[:2], 1), 200, np.uint8)
    whole = np.concatenate([image, alpha], axis=2)
    hidden = np.concatenate([whole, np.full_like(whole, (1, 250, 3, 0))])
    done = normalizers[method].apply(hidden)
    np.testing.assert_array_equal(done.rgb[..., 3], hidden[..., 3])
    seen = done.rgb[: len(image), :, :3]
    np.testing.assert_array_equal(seen, normalizers[method].apply(image).rgb)


@pytest.mark.parametrize("method", TEMPLATES)
@pytest.mark.parametrize(
    "source",
    [
        np.full((20, 30, 3), 255, np.uint8),
        np.zeros((20, 30, 3), np.uint8),
        np.full((20, 30, 3), (200, 100, 150), np.uint8),
        np.full((1, 1, 3), 77, np.uint8),
        np.random.default_rng(0).integers(232, 242, (60, 60, 3)).astype(np.uint8),
        np.random.default_rng(0).integers(0, 2, (60, 60, 3)).astype(np.uint8),
        np.full((5, 5, 4), (200, 100, 150, 0), np.uint8),
    ],
    ids=["white", "black", "one colour", "one pixel", "background", "nearly black", "transparent"],
)
def test_nothing_to_normalize_is_said_and_left_alone(method, source, normalizers):
    for given_image in (source, source.astype(np.uint16) * 257, source / 255):
        done = normalizers[method].apply(given_image)
        np.testing.assert_array_equal(done.rgb, given_image)
        assert done.unchanged
        assert len(done.notes) == 1
        assert done.notes[0].startswith("The image is unchanged: ")


def test_a_grey_image_is_not_stretched_to_noise(normalizers):
    grey = np.repeat(photograph("Blood smear (BCCD)")[:100, :100, :1], 3, axis=2)
    for method in ("reinhard", "macenko"):
        done = normalizers[method].apply(grey)
        assert done.unchanged
        assert done.notes


@settings(max_examples=25)
@given(
    st.sampled_from(sorted(METHODS)),
    hnp.arrays(
        st.sampled_from([np.uint8, np.uint16, np.float32]),
        st.tuples(st.integers(1, 9), st.integers(1, 9), st.sampled_from([3, 4])),
        elements={"min_value": 0, "max_value": 1},
    ),
    st.sampled_from([1, 90, 200]),
)
def test_any_image_keeps_shape_and_type_and_is_finite(normalizers, method, source, factor):
    if source.dtype.kind == "u":
        source = (source * source.dtype.type(factor)).astype(source.dtype)
    done = normalizers[method].apply(source)
    assert done.rgb.shape == source.shape
    assert done.rgb.dtype == source.dtype
    assert np.isfinite(done.rgb).all()
    assert done.rgb.min() >= 0
    if source.dtype.kind == "f":
        assert done.rgb.max() <= 1
    assert all(note.endswith(".") for note in done.notes)


def test_a_method_says_what_it_saw_and_what_it_made_of_it(normalizers, image, template):
    done = normalizers["macenko"].apply(image)
    assert done.before.stains.shape == done.after.stains.shape == (3, 2)
    again = normalizers["macenko"].apply(done.rgb)
    np.testing.assert_allclose(again.before.stains, done.after.stains, atol=0.08)
    assert normalizers["reinhard"].apply(image).before is None


def test_none_and_grey(image):
    np.testing.assert_array_equal(nb.normalize(image, "none"), image)
    grey = nb.normalize(image, "grey")
    assert (grey == grey[..., :1]).all()
    from PIL import Image

    wanted = np.asarray(Image.fromarray(image).convert("L"), int)
    assert np.abs(grey[..., 0] - wanted).max() <= 1


# --- references ----------------------------------------------------------------------------------


def test_a_reference_in_every_form(template, image, tmp_path):
    from PIL import Image

    file, saved = tmp_path / "template.png", tmp_path / "template.safetensors"
    Image.fromarray(template).save(file)
    wanted = nb.normalize(image, "macenko", template)
    save_normalizer(fitted_normalizer("macenko", template), saved)
    for reference in (file, str(file), [file], [template], saved, str(saved)):
        np.testing.assert_array_equal(nb.normalize(image, "macenko", reference), wanted)
    assert (
        nb.normalize(image, "macenko", [template, photograph("Blood smear (BCCD)")]) != wanted
    ).any()


def test_nothing_to_normalize_is_logged(template, caplog):
    white = np.full((9, 9, 3), 255, np.uint8)
    np.testing.assert_array_equal(nb.normalize(white, "reinhard", template), white)
    assert "one colour only" in caplog.text


@pytest.mark.parametrize("method", TEMPLATES)
def test_a_template_without_stain_is_refused(method):
    background = np.random.default_rng(0).integers(235, 240, (40, 40, 3)).astype(np.uint8)
    with pytest.raises(NormalizerError, match=r"almost only background .* choose an image"):
        fitted_normalizer(method, background)


def test_what_is_wrong_with_a_reference_is_said(image, tmp_path, template):
    with pytest.raises(FileError, match="there is no such file"):
        nb.normalize(image, "macenko", tmp_path / "gone.png")
    with pytest.raises(FileError, match="there is no such file"):
        nb.normalize(image, "macenko", tmp_path / "gone.safetensors")
    with pytest.raises(NormalizerError, match="needs a reference"):
        nb.normalize(image, "macenko")
    with pytest.raises(NormalizerError, match="there are none, grey, reinhard"):
        nb.normalize(image, "mackenko", template)
    with pytest.raises(NormalizerError, match="template is needed"):
        nb.normalize(image, "reinhard", [])
    with pytest.raises(NormalizerError, match="of the method macenko, not reinhard"):
        nb.normalize(image, "reinhard", fitted_normalizer("macenko", template))


# --- files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
def test_a_saved_normalizer_does_the_same(method, normalizers, image, tmp_path):
    path = tmp_path / "saved.safetensors"
    save_normalizer(normalizers[method], path)
    again = load_normalizer(path)
    assert again.method == method
    np.testing.assert_array_equal(again.apply(image).rgb, normalizers[method].apply(image).rgb)
    first = path.read_bytes()
    save_normalizer(again, path)
    assert path.read_bytes() == first


def test_files_that_are_no_normalizers_get_a_sentence(normalizers, tmp_path, root):
    import json

    from safetensors.numpy import save

    path = tmp_path / "saved.safetensors"
    save_normalizer(normalizers["macenko"], path)
    good = path.read_bytes()
    arrays = {"stains": np.ones((3, 2)), "strengths": np.ones(2)}

    def file(changes=None, arrays=arrays, **header):
        known = {"kind": "normalizer", "version": 1, "method": "macenko", "settings": {}}
        return save(arrays, {"napari-beerlanet": json.dumps(known | header)})

    bad = {
        "empty": b"",
        "cut": good[: len(good) // 2],
        "pickle": b"\x80\x04cos\nsystem\n",
        "long header": (1 << 40).to_bytes(8, "little") + b"{}",
        "model": (root / "src/napari_beerlanet/models/malaria.safetensors").read_bytes(),
        "kind": file(kind="detector"),
        "version": file(version=2),
        "method": file(method="../evil"),
        "settings": file(settings=[1]),
        "shape": file(arrays=arrays | {"stains": np.ones((2, 3))}),
        "absent": file(arrays={"stains": np.ones((3, 2))}),
        "NaN": file(arrays=arrays | {"strengths": np.full(2, np.nan)}),
        "zero": file(arrays=arrays | {"strengths": np.zeros(2)}),
        "whole numbers": file(arrays=arrays | {"strengths": np.ones(2, np.int64)}),
    }
    for what, content in bad.items():
        path.write_bytes(content)
        with pytest.raises(FileError) as told:
            load_normalizer(path)
        text = str(told.value)
        assert text.startswith(str(path)), what
        assert text.endswith("."), what
        assert "\n" not in text, what
    with pytest.raises(FileError, match="not a file"):
        load_normalizer(tmp_path)
    with pytest.raises(NormalizerError, match="must end in"):
        save_normalizer(normalizers["macenko"], tmp_path / "saved.pt")
    with pytest.raises(NormalizerError, match="cannot write it"):
        save_normalizer(normalizers["macenko"], tmp_path / "no folder" / "saved.safetensors")
