"""Samples. The synthetic ones' truth is true, seeded, unmoved by stain, light or camera."""

import io
import subprocess
import sys
from dataclasses import FrozenInstanceError, fields
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from napari_beerlanet import samples
from napari_beerlanet.samples import (
    PHOTOGRAPHS,
    SampleField,
    bccd_layers,
    blood_smear,
    blood_smear_layers,
    he_field,
    he_field_layers,
    he_section_layers,
    malaria_layers,
    photograph_path,
)
from napari_beerlanet.ui.viewer.planes import pixel_size

# Cells small enough that even a small field has all kinds of them.
MAKERS = pytest.mark.parametrize(
    "make", [partial(blood_smear, cell_diameter=40), he_field], ids=["smear", "section"]
)
OFF = {"noise": 0, "blur": 0, "vignetting": 0, "jpeg_quality": None}
EMPTY = {**OFF, "red_cells": 0, "plasma": 0}
SHAPE = (200, 260)


def beer_lambert(field: SampleField) -> np.ndarray:
    density = field.densities.astype(float)
    absorbed = np.einsum("cr,rhw->hwc", field.spectra, density)
    return 255 * np.exp(field.background - absorbed)


def same(a: SampleField, b: SampleField) -> bool:
    return all(np.array_equal(getattr(a, f.name), getattr(b, f.name)) for f in fields(a))


def angle(a: np.ndarray, b: np.ndarray) -> float:
    """Degrees between two unit vectors."""
    return float(np.degrees(np.arccos(np.clip(a @ b, -1, 1))))


# --- what a field holds --------------------------------------------------------------------------


@MAKERS
def test_shapes_and_types(make):
    field = make(SHAPE)
    stains, count = len(field.stains), len(field.boxes)
    assert field.image.shape == (*SHAPE, 3)
    assert field.image.dtype == np.uint8
    assert field.background.shape == (3,)
    assert field.background.dtype == np.float64
    assert field.spectra.shape == (3, stains)
    assert field.spectra.dtype == np.float64
    assert field.densities.shape == (stains, *SHAPE)
    assert field.densities.dtype == np.float32
    assert field.boxes.shape == (count, 4)
    assert field.boxes.dtype == np.float32
    assert field.labels.shape == (count,)
    assert field.labels.dtype == np.int64
    assert count > 3
    with pytest.raises(FrozenInstanceError):
        field.pixel_size = 1.0


def test_names_and_stains():
    smear = blood_smear((50, 50))
    assert smear.names == ("RBC", "WBC", "Platelets")
    assert smear.stains == ("haemoglobin", "nuclear dye")
    infected = blood_smear((50, 50), parasites=0.5)
    assert infected.names == ("RBC", "WBC", "Platelets", "ring", "trophozoite")
    assert he_field((50, 50)).stains == ("haematoxylin", "eosin")
    assert he_field((50, 50), stains=3).stains == ("haematoxylin", "eosin", "DAB")


def test_pixel_size_follows_the_cells():
    assert blood_smear((9, 9), cell_diameter=72).pixel_size == pytest.approx(0.1)
    assert he_field((9, 9), nucleus_diameter=17).pixel_size == pytest.approx(0.5)


@MAKERS
@pytest.mark.parametrize("shift", [0, 0.5, 1])
@pytest.mark.parametrize("lab", range(3))
def test_spectra_and_light_are_physical(make, shift, lab):
    field = make((4, 4), shift=shift, lab=lab)
    np.testing.assert_allclose(np.linalg.norm(field.spectra, axis=0), 1, atol=1e-12)
    assert field.spectra.min() >= 0
    assert angle(*field.spectra.T) > 15  # still two stains
    assert (field.background <= 0).all()
    assert (field.background > np.log(0.5)).all()


@MAKERS
def test_densities_are_nonnegative_and_finite(make):
    field = make((400, 400), seed=4)
    assert np.isfinite(field.densities).all()
    assert field.densities.min() >= 0


@pytest.mark.parametrize(
    ("make", "options"), [(blood_smear, {}), (he_field, {}), (he_field, {"stains": 3})]
)
def test_every_stain_occurs_nearly_pure(make, options):
    field = make((600, 600), **options)
    total = field.densities.sum(0)
    for name, plane in zip(field.stains, field.densities, strict=True):
        pure = (plane > 0.85 * total) & (total > 0.3)
        assert pure.mean() > 0.002, name


@MAKERS
def test_there_is_bare_glass(make):
    total = make((512, 512)).densities.sum(0)
    assert (total < 0.02).mean() > 0.03


# --- the same call gives the same bytes ----------------------------------------------------------


@MAKERS
def test_same_call_same_bytes(make):
    assert same(make(SHAPE, seed=3, shift=0.4), make(SHAPE, seed=3, shift=0.4))


@MAKERS
def test_the_global_generator_plays_no_part(make):
    np.random.seed(1)  # noqa: NPY002
    first, state = make((60, 60)), np.random.get_state()[1].copy()  # noqa: NPY002
    np.random.seed(2)  # noqa: NPY002
    assert same(first, make((60, 60)))
    np.random.seed(1)  # noqa: NPY002
    np.testing.assert_array_equal(state, np.random.get_state()[1])  # noqa: NPY002


@MAKERS
def test_seeds_differ(make):
    a, b = make(SHAPE, seed=0), make(SHAPE, seed=1)
    assert (a.image != b.image).mean() > 0.5
    assert not np.array_equal(a.boxes, b.boxes)


# --- Beer-Lambert, and what the camera adds ------------------------------------------------------


@MAKERS
@pytest.mark.parametrize("shift", [0, 1])
@pytest.mark.parametrize("blur", [0, 1.5])
def test_without_camera_the_image_is_the_law(make, shift, blur):
    field = make((300, 310), shift=shift, seed=2, **{**OFF, "blur": blur})
    np.testing.assert_array_equal(field.image, np.round(beer_lambert(field)))


def test_three_stains_obey_the_law():
    field = he_field((300, 310), stains=3, **OFF)
    assert field.densities[2].max() > 0.5
    np.testing.assert_array_equal(field.image, np.round(beer_lambert(field)))


def test_strips_leave_no_seam():
    field = blood_smear((2, 270_000), cell_diameter=300, **OFF)  # a row is longer than a strip
    np.testing.assert_array_equal(field.image, np.round(beer_lambert(field)))


@MAKERS
def test_camera_changes_neither_truth_nor_places(make):
    clean = make(SHAPE, **{**OFF, "blur": 1})
    dirty = make(SHAPE, blur=1, noise=0.05, vignetting=0.3, jpeg_quality=50)
    for name in ("background", "spectra", "densities", "boxes", "labels"):
        np.testing.assert_array_equal(getattr(clean, name), getattr(dirty, name))
    assert (clean.image != dirty.image).mean() > 0.5


@MAKERS
def test_blur_is_in_the_densities(make):
    sharp, soft = make(SHAPE, **OFF).densities, make(SHAPE, **{**OFF, "blur": 3}).densities
    np.testing.assert_allclose(soft.mean((1, 2)), sharp.mean((1, 2)), rtol=0.05)
    steps = [np.abs(np.diff(plane)).mean() for plane in (sharp, soft)]
    assert steps[1] < 0.7 * steps[0]


@pytest.mark.parametrize("noise", [0.01, 0.05])
def test_noise_on_a_flat_field(noise):
    field = blood_smear((400, 400), **{**EMPTY, "noise": noise})
    pixels = field.image.reshape(-1, 3) / 255
    light = np.exp(field.background)
    expected = noise**2 * (0.9 * light + 0.1) + 1 / (12 * 255**2)  # and rounding
    np.testing.assert_allclose(pixels.mean(0), light, atol=4 * noise / 400)
    np.testing.assert_allclose(pixels.var(0), expected, rtol=0.04)
    assert abs(np.corrcoef(pixels.T) - np.eye(3)).max() < 0.02
    assert abs(np.corrcoef(pixels[1:, 0], pixels[:-1, 0])[0, 1]) < 0.02


def test_photon_noise_falls_with_the_light():
    field = blood_smear((600, 600), seed=1, white_cells=0.2, **{**OFF, "noise": 0.03})
    truth = beer_lambert(field) / 255
    error = field.image / 255 - truth
    for low, high in ((0.2, 0.35), (0.4, 0.55), (0.7, 0.85)):
        band = (truth > low) & (truth < high)
        assert band.sum() > 3000
        expected = 0.03**2 * (0.9 * truth[band].mean() + 0.1)
        assert error[band].var() == pytest.approx(expected, rel=0.1)


def test_vignetting_takes_light_from_the_corners_only():
    field = blood_smear((301, 401), **{**EMPTY, "vignetting": 0.4})
    share = field.image / (255 * np.exp(field.background))
    corners = share[[0, 0, -1, -1], [0, -1, 0, -1]]
    assert corners.min() == pytest.approx(0.6, abs=0.01)
    assert corners.max() < 0.8
    assert share[150, 200] == pytest.approx(1, abs=0.01)
    assert not field.densities.any()


def test_vignetting_may_be_total():
    assert blood_smear((30, 30), **{**EMPTY, "vignetting": 1}).image.min() <= 20


@MAKERS
def test_jpeg_is_what_a_file_gives_back(make):
    plain = make(SHAPE, jpeg_quality=None).image
    file = io.BytesIO()
    Image.fromarray(plain).save(file, "JPEG", quality=70)
    np.testing.assert_array_equal(make(SHAPE, jpeg_quality=70).image, np.array(Image.open(file)))


def test_jpeg_of_a_large_image_comes_in_strips(monkeypatch):
    whole = blood_smear((200, 160)).image
    monkeypatch.setattr("napari_beerlanet.samples.camera.JPEG_STRIP_PIXELS", 160 * 70)
    strips = blood_smear((200, 160)).image
    assert strips.shape == whole.shape
    assert np.abs(strips.astype(int) - whole).max() < 12  # colour is interpolated across blocks
    assert (strips == whole).mean() > 0.95


# --- another laboratory --------------------------------------------------------------------------


@MAKERS
def test_shift_changes_colours_and_moves_nothing(make):
    here, there = make(SHAPE, **OFF), make(SHAPE, shift=1, **OFF)
    np.testing.assert_array_equal(here.boxes, there.boxes)
    np.testing.assert_array_equal(here.labels, there.labels)
    for a, b in zip(here.densities, there.densities, strict=True):
        factor = b.sum() / a.sum()
        assert abs(np.log(factor)) > 0.15
        np.testing.assert_allclose(b, factor * a, rtol=1e-4, atol=1e-6)
    for a, b in zip(here.spectra.T, there.spectra.T, strict=True):
        assert 3 < angle(a, b) < 20
    assert np.abs(here.background - there.background).max() > 0.02
    assert np.abs(here.image.mean((0, 1)) - there.image.mean((0, 1))).max() > 5


@MAKERS
def test_shift_goes_step_by_step(make):
    steps = [make((64, 64), shift=s, **OFF) for s in (0, 0.25, 0.5, 0.75, 1)]
    turned = [
        [angle(*pair) for pair in zip(steps[0].spectra.T, f.spectra.T, strict=True)] for f in steps
    ]
    assert (np.diff(turned, axis=0) > 0).all()
    light = np.array([np.abs(f.background - steps[0].background).sum() for f in steps])
    assert (np.diff(light) >= 0).all()
    colour = [np.abs(f.image.astype(float) - steps[0].image).mean() for f in steps]
    assert (np.diff(colour) > 0).all()


def test_a_laboratory_is_one_place_for_all_seeds():
    a, b = (blood_smear((9, 9), seed=s, shift=1, lab=2) for s in (0, 1))
    np.testing.assert_array_equal(a.spectra, b.spectra)
    np.testing.assert_array_equal(a.background, b.background)
    other = blood_smear((9, 9), shift=1, lab=3)
    assert not np.allclose(a.spectra, other.spectra)
    assert not np.allclose(a.background, other.background)


# --- boxes ---------------------------------------------------------------------------------------


@MAKERS
@pytest.mark.parametrize("shape", [(300, 400), (40, 900), (64, 64)])
def test_boxes_lie_in_the_image(make, shape):
    for seed in range(2):
        field = make(shape, seed=seed)
        x1, y1, x2, y2 = field.boxes.T
        assert (x1 >= 0).all()
        assert (y1 >= 0).all()
        assert (x2 <= shape[1]).all()
        assert (y2 <= shape[0]).all()
        assert (x2 > x1).all()
        assert (y2 > y1).all()
        assert np.isin(field.labels, np.arange(len(field.names))).all()


def alone(boxes: np.ndarray, margin: float) -> np.ndarray:
    """Which boxes, grown by ``margin``, touch no other."""
    low, high = boxes[:, :2] - margin, boxes[:, 2:] + margin
    meet = (low[:, None] < high).all(-1) & (low < high[:, None]).all(-1)
    return meet.sum(1) == 1


def whole(boxes: np.ndarray, shape: tuple[int, int], margin: float) -> np.ndarray:
    """Which boxes keep ``margin`` from the edge of the image."""
    return (boxes[:, :2] > margin).all(1) & (boxes[:, 2:] < np.array(shape[::-1]) - margin).all(1)


@pytest.mark.parametrize("kind", ["RBC", "WBC", "Platelets"])
def test_boxes_are_tight(kind):
    """Around a cell that stands alone, dye begins within two pixels of the box on every side."""
    counts = {"red_cells": 0.08, "white_cells": 0.5, "platelets": 0.8, "plasma": 0}
    field = blood_smear((900, 900), cell_diameter=32, **counts, **OFF)
    stained = field.densities.sum(0) > 0.03
    chosen = alone(field.boxes, 4) & whole(field.boxes, (900, 900), 30)
    chosen &= field.labels == field.names.index(kind)
    assert chosen.sum() >= 6
    for x1, y1, x2, y2 in field.boxes[chosen].astype(int):
        around = stained[y1 - 4 : y2 + 4, x1 - 4 : x2 + 4]
        rows, cols = np.flatnonzero(around.any(1)) - 4, np.flatnonzero(around.any(0)) - 4
        found = np.array([cols[0], rows[0], cols[-1] + 1, rows[-1] + 1])
        assert np.abs(found - (0, 0, x2 - x1, y2 - y1)).max() <= 2


def test_dye_is_in_the_boxes():
    field = blood_smear((800, 800), seed=1, plasma=0, **OFF)
    outside = np.ones(field.image.shape[:2], bool)
    for x1, y1, x2, y2 in field.boxes.astype(int):
        outside[max(y1 - 2, 0) : y2 + 2, max(x1 - 2, 0) : x2 + 2] = False
    density = field.densities.sum(0)
    # A cell of which less than a tenth is in the picture has no box.
    inner = np.s_[60:-60, 60:-60]
    assert outside[inner].mean() > 0.05
    assert density[inner][outside[inner]].max() < 0.01
    for (x1, y1, x2, y2), label in zip(field.boxes.astype(int), field.labels, strict=True):
        dye = field.densities[0 if field.names[label] == "RBC" else 1, y1:y2, x1:x2]
        assert dye.mean() > 0.05
        assert dye.max() > 0.2


def test_cells_have_the_sizes_asked_for():
    field = blood_smear((1200, 1200), cell_diameter=50, **OFF)
    complete = whole(field.boxes, (1200, 1200), 0)
    sides = (field.boxes[:, 2:] - field.boxes[:, :2]).mean(1)
    median = [np.median(sides[complete & (field.labels == k)]) / 50 for k in range(3)]
    assert median[0] == pytest.approx(1, abs=0.06)
    assert 1.3 < median[1] < 2
    assert 0.25 < median[2] < 0.5


def test_counts_follow_the_parameters():
    few, many = (blood_smear((600, 600), red_cells=n, white_cells=0.1) for n in (0.1, 0.6))
    reds = [int((field.labels == 0).sum()) for field in (few, many)]
    assert reds[1] > 4 * reds[0] > 0
    none = blood_smear((600, 600), white_cells=0, platelets=0)
    assert set(none.labels.tolist()) == {0}
    assert len(blood_smear((600, 600), red_cells=0).boxes) == 0


def test_no_seed_leaves_a_small_field_empty():
    counts = [len(blood_smear((80, 104), seed=s, cell_diameter=40).boxes) for s in range(20)]
    assert min(counts) >= 3


def test_red_cells_are_pale_in_the_middle():
    counts = {"red_cells": 0.2, "white_cells": 0, "platelets": 0, "plasma": 0}
    field = blood_smear((900, 900), cell_diameter=50, **counts, **OFF)
    ratios = []
    for x1, y1, x2, y2 in field.boxes[alone(field.boxes, 1)].astype(int):
        cell = field.densities[0, y1:y2, x1:x2]
        height, width = cell.shape
        middle = cell[height // 2 - 2 : height // 2 + 3, width // 2 - 2 : width // 2 + 3]
        ratios.append(middle.mean() / np.percentile(cell, 90))
    assert len(ratios) > 10
    assert 0.2 < np.median(ratios) < 0.75


def test_parasites_sit_in_red_cells_and_move_none():
    clean = blood_smear((700, 700), seed=5)
    field = blood_smear((700, 700), seed=5, parasites=0.5)
    cells = field.labels < 3
    np.testing.assert_array_equal(field.boxes[cells], clean.boxes)
    found = field.boxes[~cells]
    assert set(field.labels[~cells].tolist()) == {3, 4}
    reds = field.boxes[field.labels == 0]
    middle = (found[:, :2] + found[:, 2:]) / 2
    within = (middle[:, None] > reds[:, :2]).all(-1) & (middle[:, None] < reds[:, 2:]).all(-1)
    assert within.any(1).mean() > 0.95
    for x1, y1, x2, y2 in found.astype(int):
        assert field.densities[1, y1:y2, x1:x2].max() > 0.3


@pytest.mark.parametrize("seed", range(3))
def test_nuclei_hold_haematoxylin(seed):
    field = he_field((600, 600), seed=seed, **OFF)
    assert set(field.labels.tolist()) == {0, 1, 2}
    nuclei = np.zeros((600, 600), bool)
    for x1, y1, x2, y2 in field.boxes.astype(int):
        nuclei[y1:y2, x1:x2] = True
        dye = field.densities[0, y1:y2, x1:x2] > 0.3
        assert dye.mean() > 0.1
        if min(x1, y1) > 0 and max(x2, y2) < 600:  # reaches from side to side, a pixel or two off
            assert np.ptp(np.flatnonzero(dye.any(0))) >= 0.7 * (x2 - x1) - 3
            assert np.ptp(np.flatnonzero(dye.any(1))) >= 0.7 * (y2 - y1) - 3
    outside = field.densities[0][~nuclei]
    assert np.percentile(outside, 99) < 0.4
    assert field.densities[0][nuclei].mean() > 5 * outside.mean()


def test_third_dye_moves_nothing_and_marks_cells():
    two, three = he_field((600, 600), **OFF), he_field((600, 600), stains=3, **OFF)
    np.testing.assert_array_equal(two.boxes, three.boxes)
    np.testing.assert_array_equal(two.densities[1], three.densities[1])
    brown = three.densities[2] > 0.3
    assert 0.005 < brown.mean() < 0.3
    assert (two.image[~(three.densities[2] > 0)] == three.image[~(three.densities[2] > 0)]).all()


# --- any size ------------------------------------------------------------------------------------


@MAKERS
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 500), (40, 2000), (2000, 3)])
def test_any_shape(make, shape):
    for seed in range(2):
        field = make(shape, seed=seed)
        assert field.image.shape == (*shape, 3)
        assert np.isfinite(field.densities).all()
    clean = make(shape, **OFF)
    np.testing.assert_array_equal(clean.image, np.round(beer_lambert(clean)))


@pytest.mark.parametrize("size", [2, 5.5, 200])
def test_any_cell_size(size):
    for field in (
        blood_smear((50, 60), cell_diameter=size, parasites=0.5),
        he_field((50, 60), nucleus_diameter=size, stains=3),
    ):
        assert field.image.shape == (50, 60, 3)
        assert np.isfinite(field.densities).all()


def test_shape_may_be_an_array_or_a_list():
    expected = blood_smear((20, 30)).image
    np.testing.assert_array_equal(blood_smear([20, 30]).image, expected)
    np.testing.assert_array_equal(blood_smear(np.array([20, 30])).image, expected)


# --- wrong arguments -----------------------------------------------------------------------------


@MAKERS
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shape", (0, 5)),
        ("shape", (5, -1)),
        ("shape", (5,)),
        ("shape", (5, 5, 3)),
        ("shape", (5.0, 5)),
        ("shape", 5),
        ("shape", "ab"),
        ("shape", None),
        ("shape", (1, 65501)),
        ("seed", -1),
        ("seed", 1.5),
        ("seed", "a"),
        ("seed", None),
        ("lab", -1),
        ("lab", True),
        ("shift", 1.1),
        ("shift", -0.1),
        ("shift", np.nan),
        ("shift", "1"),
        ("noise", -0.1),
        ("blur", -1),
        ("blur", np.inf),
        ("vignetting", 2),
        ("jpeg_quality", 0),
        ("jpeg_quality", 101),
        ("jpeg_quality", 90.5),
    ],
)
def test_wrong_arguments_are_named(make, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be .*got "):
        make(**{"shape": (4, 4), name: value})


@pytest.mark.parametrize(
    ("make", "name", "value"),
    [
        (blood_smear, "cell_diameter", 1),
        (blood_smear, "red_cells", -1),
        (blood_smear, "white_cells", 2),
        (blood_smear, "platelets", "many"),
        (blood_smear, "parasites", 1.5),
        (blood_smear, "plasma", -1),
        (he_field, "stains", 4),
        (he_field, "stains", "HE"),
        (he_field, "nests", -0.1),
        (he_field, "stromal_cells", 2),
        (he_field, "nucleus_diameter", 0),
    ],
)
def test_wrong_contents_are_named(make, name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        make((4, 4), **{name: value})


# --- in napari -----------------------------------------------------------------------------------


@pytest.mark.parametrize("open_sample", [blood_smear_layers, he_field_layers])
def test_napari_takes_the_layers(open_sample):
    from napari.layers import Image as ImageLayer
    from napari.layers import Layer

    (data,) = open_sample()
    layer = Layer.create(*data)
    assert isinstance(layer, ImageLayer)
    assert layer.rgb
    # In pixels, as a picture is that the user opens next.
    assert [str(unit) for unit in layer.units] == ["pixel", "pixel"]
    np.testing.assert_array_equal(layer.scale, 1)
    assert pixel_size(layer) == pytest.approx((layer.metadata["pixel_size"],) * 2)
    assert layer.metadata["densities"].shape[1:] == layer.data.shape[:2]
    assert {"spectra", "background", "boxes", "labels", "names", "stains"} <= set(layer.metadata)


def test_photographs_are_small_and_licensed():
    folder = Path(samples.__file__).parent
    images = {path.name for path in folder.iterdir() if path.suffix in (".jpg", ".png")}
    assert images == set(PHOTOGRAPHS.values())
    assert sum((folder / name).stat().st_size for name in images) < 1_500_000
    notice = (folder / "LICENSE-IMAGES.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in notice for name in images)
    for holder in ("shenggan", "andrealoddo", "Mitko Veta"):
        assert holder in notice
    assert notice.count("Permission is hereby granted, free of charge") == 2


@pytest.mark.parametrize(
    ("open_sample", "shape"),
    [
        (bccd_layers, (480, 640, 3)),
        (malaria_layers, (972, 1296, 3)),
        (he_section_layers, (640, 640, 3)),
    ],
)
def test_photographs_open_in_napari(open_sample, shape):
    from napari.layers import Layer

    layer = Layer.create(*open_sample()[0])
    assert layer.name in PHOTOGRAPHS
    assert layer.rgb
    assert layer.data.shape == shape
    assert layer.data.dtype == np.uint8
    assert layer.data.std() > 15


def test_the_bccd_smear_is_no_test_image(shared):
    """The packaged model's figures are of BCCD's test split; a demonstration must not show it."""
    bccd = shared / "data" / "bccd"
    path = bccd / "JPEGImages" / "BloodImage_00168.jpg"
    assert path.read_bytes() == photograph_path("Blood smear (BCCD)").read_bytes()
    assert path.stem not in (bccd / "ImageSets" / "Main" / "test.txt").read_text().split()


def test_samples_need_neither_viewer_nor_torch():
    code = (
        "import sys, napari_beerlanet.samples as s; s.blood_smear((20, 20)); "
        "print(*({'torch', 'numba', 'napari', 'qtpy', 'matplotlib'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
