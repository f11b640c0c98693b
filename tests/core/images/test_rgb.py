"""What is an image and what is not, and the way from pixel values to columns and back."""

import re
import warnings

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from napari_beerlanet import decompose
from napari_beerlanet.core.images.rgb import (
    FLOAT_FLOOR,
    ImageError,
    RGBImage,
    check_rgb,
    from_columns,
    intensity_floor,
    to_columns,
    to_uint8,
    white_level,
)
from pictures import smear


def full(shape, value=0.5, dtype=float):
    return np.full(shape, value, dtype)


def one_value(value, dtype=float, place=(1, 2, 0)):
    image = full((4, 5, 3), 0.5, dtype)
    image[place] = value
    return image


BAD = {
    "grey": (full((4, 5)), "grey"),
    "grey uint8": (full((4, 5), 9, np.uint8), "grey"),
    "one channel": (full((4, 5, 1)), ""),
    "two channels": (full((4, 5, 2), 9, np.uint8), ""),
    "five channels": (full((4, 5, 5), 9, np.uint16), ""),
    "channels first": (full((3, 40, 50), 9, np.uint8), "moveaxis"),
    "a stack": (full((2, 4, 5, 3), 9, np.uint8), "one plane"),
    "a line": (full((3,), 9, np.uint8), ""),
    "a number": (np.array(3, np.uint8), ""),
    "empty": (np.empty((0, 0, 3), np.uint8), "empty"),
    "0 × N": (np.empty((0, 7, 3), np.uint8), "empty"),
    "N × 0": (np.empty((7, 0, 4), np.uint16), "empty"),
    "0 × N floats": (np.empty((0, 7, 3)), "empty"),
    "empty array": (np.array([]), ""),
    "NaN": (one_value(np.nan), "NaN"),
    "NaN float32": (one_value(np.nan, np.float32), "NaN"),
    "NaN float16": (one_value(np.nan, np.float16), "NaN"),
    "inf": (one_value(np.inf), "infinite"),
    "-inf": (one_value(-np.inf, np.float32), "infinite"),
    "negative": (one_value(-0.01), "-0.01"),
    "above 1": (one_value(1.5), "1.5"),
    "0 to 255": (one_value(255.0, np.float32), "image / 255"),
    "0 to 65535": (one_value(65535.0), "rescale"),
    "bool": (full((4, 5, 3), True, bool), "bool"),
    "int64": (full((4, 5, 3), 9, np.int64), "int64"),
    "int8": (full((4, 5, 3), 9, np.int8), "int8"),
    "uint32": (full((4, 5, 3), 9, np.uint32), "uint32"),
    "complex": (full((4, 5, 3), 0.5, complex), "complex128"),
    "object": (full((4, 5, 3), 9, object), "object"),
    "array of strings": (np.full((4, 5, 3), "red"), "<U3"),
    "dates": (np.zeros((4, 5, 3), "M8[s]"), "datetime64"),
}
if np.dtype(np.longdouble).itemsize > 8:  # elsewhere it is float64 by another name
    BAD["long double"] = (full((4, 5, 3), 0.5, np.longdouble), "")
NOT_ARRAYS = {
    "path": ("smear.png", "smear.png"),
    "bytes": (b"\x89PNG", "PNG"),
    "None": (None, "None"),
    "list": ([[[1, 2, 3]]], "list"),
    "tuple": ((1, 2), "tuple"),
    "number": (7, "int"),
    "dict": ({}, "dict"),
}


def refusal(thing, check=check_rgb):
    """The message with which `thing` is refused: one or two sentences, what is accepted among."""
    with pytest.raises(ImageError) as caught:
        check(thing)
    message = str(caught.value)
    assert caught.value.__cause__ is None
    assert "\n" not in message
    assert message.endswith(".")
    assert len(re.findall(r"\.(?= [A-Z]|$)", message)) <= 2
    assert len(message) < 360
    for word in ("RGB", "height, width", "uint8", "uint16", "float", "0 to 1"):
        assert word in message
    return message


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("check", [check_rgb, decompose], ids=["check", "decompose"])
def test_bad_arrays_are_named_and_refused(name, check):
    array, hint = BAD[name]
    message = refusal(array, check)
    assert str(array.shape) in message
    assert str(array.dtype) in message
    assert hint in message


@pytest.mark.parametrize("name", NOT_ARRAYS)
@pytest.mark.parametrize("check", [check_rgb, decompose], ids=["check", "decompose"])
def test_what_is_no_array_is_named_and_refused(name, check):
    thing, word = NOT_ARRAYS[name]
    assert word in refusal(thing, check)


def test_a_long_text_is_not_repeated_in_full():
    assert "x" * 80 not in refusal("x" * 1000)


def test_an_image_error_is_a_value_error():
    assert issubclass(ImageError, ValueError)


@pytest.mark.parametrize("place", [(0, 0, 0), (3, 4, 2), (2, 2, 1)])
@pytest.mark.parametrize("value", [np.nan, -1e-3, 1.01])
def test_one_bad_value_anywhere_is_found(place, value):
    refusal(one_value(value, np.float32, place))


def test_nan_in_alpha_is_refused():
    rgba = full((4, 5, 4))
    rgba[0, 0, 3] = np.nan
    refusal(rgba)


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float16, np.float32, np.float64])
@pytest.mark.parametrize("channels", [3, 4])
@pytest.mark.parametrize("shape", [(1, 1), (3, 1), (1, 4), (5, 6)])
def test_images_are_accepted_as_they_are(dtype, channels, shape):
    image = np.ones((*shape, channels), dtype)
    checked = check_rgb(image)
    assert checked.pixels is image
    assert checked.shape == shape
    assert checked.white == {"uint8": 255, "uint16": 65535}.get(np.dtype(dtype).name, 1)
    assert checked.flat.shape == (shape[0] * shape[1], channels)
    assert check_rgb(checked) is checked


def test_rounding_above_one_is_clipped_and_no_more():
    image = one_value(1 + 5e-7)
    assert check_rgb(image).pixels.max() == 1
    assert image.max() > 1, "the caller's array is the caller's"
    refusal(one_value(1 + 1e-4))


@pytest.mark.parametrize("kind", ["u2", "f4", "f8"])
def test_either_byte_order(kind):
    native = smear().astype(np.uint16) * 257 if kind == "u2" else (smear() / 255).astype(kind)
    swapped = native.astype(native.dtype.newbyteorder(">"))
    assert swapped.dtype.byteorder == ">"
    np.testing.assert_array_equal(check_rgb(swapped).pixels, native)
    a, b = (decompose(i, 3, 4, lam=0.1, gamma=0.1) for i in (native, swapped))
    np.testing.assert_array_equal(a.densities, b.densities)
    np.testing.assert_array_equal(a.spectra, b.spectra)
    assert b.reconstruct().dtype.newbyteorder("=") == native.dtype


VIEWS = {
    "crop": lambda i: i[5:30, 7:51],
    "flip": lambda i: i[::-1, ::-1],
    "steps": lambda i: i[::2, ::3],
    "transposed": lambda i: i.swapaxes(0, 1),
    "fortran": np.asfortranarray,
    "bgr": lambda i: i[..., ::-1],
    "part of RGBA": lambda i: np.dstack([i, i[..., :1]])[..., :3],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("method", ["palette", "dense"])
def test_views_are_treated_like_copies(view, method):
    image = VIEWS[view](smear())
    settings = {"components": 3, "iterations": 4, "lam": 0.1, "gamma": 0.1, "method": method}
    a, b = decompose(image, **settings), decompose(np.array(image, order="C"), **settings)
    np.testing.assert_array_equal(a.densities, b.densities)
    np.testing.assert_array_equal(a.reconstruct(), b.reconstruct())
    np.testing.assert_array_equal(a.residual(), b.residual())


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32, np.float64])
@pytest.mark.parametrize("crop", [np.s_[:], np.s_[:1, :1], np.s_[:5, :1]])
@pytest.mark.parametrize("read_only", [True, False])
def test_images_stay_as_they_were(dtype, crop, read_only):
    image = (smear()[crop] / (255 if np.dtype(dtype).kind == "f" else 1)).astype(dtype)
    before = image.copy()
    image.flags.writeable = not read_only
    for iterations in (3, "converge"):
        d = decompose(image, 3, iterations)
        d.reconstruct(), d.residual(), d.densities_of(image)
    np.testing.assert_array_equal(image, before)


def test_dask_arrays_are_images_too():
    import dask.array as da

    assert isinstance(check_rgb(da.from_array(smear(), chunks=20)), RGBImage)


# Columns.


def test_white_and_floor():
    assert [white_level(d) for d in ("u1", "u2", "f4")] == [255, 65535, 1]
    assert [intensity_floor(d) for d in ("u1", "u2", "f4")] == [1 / 255, 1 / 65535, FLOAT_FLOOR]
    assert FLOAT_FLOOR == 1 / 255


def test_columns_are_ln_of_intensity_with_a_floor():
    values = np.array([[255, 128, 1], [0, 51, 2]], np.uint8)
    expected = np.log([[1, 1 / 255], [128 / 255, 0.2], [1 / 255, 2 / 255]])
    np.testing.assert_allclose(to_columns(values, "log"), expected, rtol=1e-14)
    np.testing.assert_allclose(to_columns(values, "intensity"), values.T / 255, rtol=1e-14)
    floats = np.array([[1.0, 0.5, 0.0, 0.3]])
    np.testing.assert_allclose(to_columns(floats, "log")[:, 0], np.log([1, 0.5, 1 / 255]))
    wide = np.array([[65535, 1, 0]], np.uint16)
    np.testing.assert_allclose(to_columns(wide, "log")[:, 0], -np.log([1, 65535, 65535]))


INTEGERS = st.sampled_from([np.uint8, np.uint16]).flatmap(
    lambda d: arrays(d, st.tuples(st.integers(1, 30), st.sampled_from([3, 4])))
)


@given(INTEGERS, st.sampled_from(["log", "intensity"]))
def test_from_columns_undoes_to_columns_for_integers(values, domain):
    X = to_columns(values, domain)
    assert X.shape == (3, len(values))
    assert X.dtype == np.float64
    assert X.flags.c_contiguous
    expected = values[:, :3] if domain == "intensity" else np.maximum(values[:, :3], 1)
    back = from_columns(X, domain, values.dtype)
    np.testing.assert_array_equal(back, expected)
    assert back.dtype == values.dtype


@given(
    arrays(np.float32, (9, 3), elements=st.floats(0, 1, width=32)),
    st.sampled_from(["log", "intensity"]),
)
def test_from_columns_undoes_to_columns_for_floats(values, domain):
    expected = values if domain == "intensity" else np.maximum(values, 1 / 255)
    back = from_columns(to_columns(values, domain), domain, np.float32)
    np.testing.assert_allclose(back, expected, rtol=1e-6)
    assert back.dtype == np.float32


def test_from_columns_clips():
    X = np.array([[0.5, -0.1], [2.0, -50.0], [0.0, 0.0]])
    assert from_columns(X, "log", np.uint8).tolist() == [[255, 255, 255], [231, 0, 255]]
    assert from_columns(X, "intensity", np.uint16).tolist() == [[32768, 65535, 0], [0, 0, 0]]


def test_neither_way_changes_its_argument():
    values = (smear()[0] / 255).astype(np.float64)
    X = to_columns(values, "log")
    before = values.copy(), X.copy()
    from_columns(X, "log", np.uint8)
    from_columns(X, "intensity", np.float64)
    np.testing.assert_array_equal(values, before[0])
    np.testing.assert_array_equal(X, before[1])
    held = values.T.copy()
    out = to_columns(held.T, "log")  # already transposed and float64: must not be a view of it
    assert not np.shares_memory(out, held)
    np.testing.assert_array_equal(held, before[0].T)


# --- arrays that are not quite arrays ------------------------------------------------------------


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
@pytest.mark.parametrize("channels", [3, 4])
def test_what_a_mask_hides_weighs_nothing(dtype, channels):
    rng = np.random.default_rng(0)
    pixels = rng.uniform(0.1, 0.9, (6, 8, channels)) * white_level(dtype)
    pixels = pixels.astype(dtype)
    mask = np.zeros(pixels.shape, bool)
    mask[2, 3, 1] = mask[4, :, :] = True
    if dtype == np.float32:
        pixels[4] = np.nan  # what is hidden may be anything
    checked = check_rgb(np.ma.MaskedArray(pixels, mask)).pixels
    assert checked.shape == (6, 8, 4)
    assert checked.dtype == dtype
    hidden = mask.any(axis=2)
    assert (checked[hidden] == 0).all()
    np.testing.assert_array_equal(checked[~hidden][:, :3], pixels[~hidden][:, :3])
    assert (checked[~hidden][:, 3] > 0).all()


def test_a_mask_that_hides_nothing_or_all():
    pixels = np.full((4, 4, 3), 7, np.uint8)
    assert check_rgb(np.ma.MaskedArray(pixels, False)).pixels.shape == (4, 4, 3)
    with pytest.raises(ImageError, match="Every pixel of the image is masked"):
        check_rgb(np.ma.MaskedArray(pixels, True))


@pytest.mark.parametrize("kind", ["with gradients", "bfloat16", "meta", "sparse"])
def test_tensors_that_are_no_arrays(kind):
    import torch

    tensor = {
        "with gradients": lambda: torch.zeros(4, 4, 3, requires_grad=True),
        "bfloat16": lambda: torch.zeros(4, 4, 3, dtype=torch.bfloat16),
        "meta": lambda: torch.zeros(4, 4, 3, device="meta"),
        "sparse": lambda: torch.zeros(4, 4, 3).to_sparse(),
    }[kind]()
    with pytest.raises(
        ImageError, match=r"^This Tensor is no array in memory \(.{5,80}\)\. Accept"
    ):
        check_rgb(tensor)


def test_values_that_are_no_numbers_are_shown_as_white():
    pixels = np.array([[[np.nan, 0.5, np.inf]]], np.float32)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert to_uint8(pixels).tolist() == [[[255, 128, 255]]]
