"""Images of any size, type and magnification in, boxes in their own pixels out."""

import json
from itertools import groupby, pairwise

import numpy as np
import pytest
import torch

from discs import SIZES, boxes_of, disc_detector, draw, scattered, trained
from napari_beerlanet.core.checkpoints.checkpoint import load_checkpoint
from napari_beerlanet.core.common.progress import Cancelled
from napari_beerlanet.core.detection.network import StainDetectionModel
from napari_beerlanet.core.detection.object_sizes import reference_size
from napari_beerlanet.core.detection.pipeline import ImageCache
from napari_beerlanet.samples import blood_smear


def close_to(result, discs, tolerance):
    """Every disc is found once, within a tolerance in pixels, and nothing else is."""
    near = np.abs(result.xyxy[:, None] - boxes_of(discs)[None]).max(2) < tolerance
    assert (near.sum(0) == 1).all()
    assert (near.sum(1) == 1).all()


@pytest.fixture(scope="module")
def detector():
    return disc_detector()


@pytest.fixture(scope="module")
def field():
    discs = scattered((300, 400), 50, seed=5, spread=0.1)
    return draw((300, 400), discs), discs


@pytest.mark.parametrize(
    ("shape", "diameter"),
    [
        ((480, 640), 60),
        ((480, 640), 18),
        ((500, 500), 120),
        ((1500, 1800), 30),
        ((1600, 1200), 380),
    ],
)
def test_the_size_is_found_and_so_are_the_objects(shape, diameter):
    """The network is sure of nothing but what is as large as in training."""
    discs = scattered(shape, diameter, seed=2, spread=0.08)
    result = disc_detector(judge=trained).detect(draw(shape, discs), densities=False)
    # What differs by less than 1.3 from training needs no other resolution.
    assert result.report["object_size"] == pytest.approx(diameter, rel=0.35)
    close_to(result, discs, tolerance=2 + 0.08 * diameter)
    assert (result.labels == 0).mean() > 0.95
    assert result.report["chosen"]


def test_the_size_asked_for_is_used(detector, field):
    image, discs = field
    result = detector.detect(image, object_size=50)
    assert result.report["scale"] == pytest.approx(40 / 50)
    assert result.report["chosen"] == "as asked for"
    close_to(result, discs, tolerance=2.5)


def test_physical_sizes_decide_where_both_are_known(field):
    image, discs = field
    detector = disc_detector(pixel_size=0.18)
    result = detector.detect(image, pixel_size=(0.144, 0.144))
    assert result.report["scale"] == pytest.approx(0.8)
    assert result.report["chosen"] == "from the pixel sizes"
    assert result.pixel_size == (0.144, 0.144)
    close_to(result, discs, tolerance=2.5)
    assert disc_detector().detect(image, pixel_size=0.144).report["chosen"] == "as in training"


@pytest.mark.parametrize("nonsense", [1e-7, 144.0])
def test_impossible_physical_sizes_are_left_aside(field, nonsense):
    """Metres or nanometres where micrometres are meant."""
    image, discs = field
    result = disc_detector(pixel_size=0.18).detect(image, pixel_size=nonsense)
    assert "By the pixel sizes" in result.report["notes"][0]
    close_to(result, discs, tolerance=5)


def test_a_model_without_sizes_shows_the_image_whole(field):
    image, discs = field
    detector = disc_detector(sizes={})
    result = detector.detect(image)
    assert result.report["scale"] == pytest.approx(320 / 400)
    assert result.report["object_size"] is None
    assert "stores no object sizes" in result.report["notes"][0]
    close_to(result, discs, tolerance=2.5)
    with pytest.raises(ValueError, match='object_size="auto"'):
        detector.detect(image, object_size=40)


@pytest.mark.parametrize("size", [20.0, 40.0, 100.0])
@pytest.mark.parametrize("tile", [128, 200, 300])
def test_tiles_change_nothing(detector, size, tile):
    shape = (280, 410)
    discs = scattered(shape, size, seed=3)
    image = draw(shape, discs)
    whole = detector.detect(image, object_size=size, tile=4000)
    tiled = detector.detect(image, object_size=size, tile=tile)
    assert whole.report["tiles"] == 1
    assert size == 100 or tiled.report["tiles"] > 1
    close_to(whole, discs, tolerance=2 + size / 40)
    close_to(tiled, discs, tolerance=2 + size / 40)


def test_densities_do_not_depend_on_the_tiles(detector, field):
    """One decomposition of the whole image."""
    image, _ = field
    tiled = detector.detect(image, object_size=50, tile=128)
    planes = detector.decompose(image).densities
    for k in range(len(tiled)):
        x1, y1, x2, y2 = np.ceil(tiled.xyxy[k] - 0.5).astype(int)
        inside = planes[:, y1:y2, x1:x2]
        mean = [tiled.columns[f"Model channel {c + 1} mean"][k] for c in range(len(planes))]
        total = [tiled.columns[f"Model channel {c + 1} sum"][k] for c in range(len(planes))]
        np.testing.assert_allclose(mean, inside.mean((1, 2)), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(total, inside.sum((1, 2), dtype=float), rtol=1e-3, atol=0.02)


def test_densities_can_be_left_out(detector, field):
    assert detector.detect(field[0], densities=False).columns == {}


def test_discs_are_denser_than_the_field(detector, field):
    image, _ = field
    result = detector.detect(image, object_size=50)
    mean = sum(result.columns[f"Model channel {k + 1} mean"] for k in range(8))
    background = detector.decompose(image).densities.sum(0)[(image[..., 1] > 200)].mean()
    assert (mean > 4 * background).all()


def by_place(result):
    order = np.lexsort(np.round(result.xyxy).T)
    return result.xyxy[order]


@pytest.mark.parametrize("kind", ["uint16", "float32", "float64", "rgba", "rgba16", "flipped"])
def test_types_of_images_give_the_same_boxes(detector, field, kind):
    image, _ = field
    opaque = np.concatenate([image, np.full((*image.shape[:2], 1), 255, np.uint8)], 2)
    other = {
        "uint16": image.astype(np.uint16) * 257,
        "float32": image.astype(np.float32) / 255,
        "float64": image / 255,
        "rgba": opaque,
        "rgba16": opaque.astype(np.uint16) * 257,
        "flipped": image[::-1][::-1],
    }[kind]
    expected, result = detector.detect(image), detector.detect(other)
    np.testing.assert_allclose(by_place(result), by_place(expected), atol=0.01)
    for name in ("Model channel 1 mean", "Model channel 2 sum"):
        np.testing.assert_allclose(
            np.sort(result.columns[name]), np.sort(expected.columns[name]), rtol=0.02, atol=1e-3
        )


def test_nothing_is_found_where_pixels_are_hidden(detector, field):
    image, discs = field
    alpha = np.full((*image.shape[:2], 1), 255, np.uint8)
    alpha[:, :200] = 0
    result = detector.detect(np.concatenate([image, alpha], 2), object_size=50)
    assert (result.xyxy[:, 2] > 200).all()
    assert len(result) == sum(d[0] + d[2] / 2 > 204 for d in discs)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 3000), (20, 3000), (3000, 20), (31, 33)])
@pytest.mark.parametrize("content", ["white", "grey", "noise"])
def test_odd_images_are_no_error(detector, shape, content):
    random = np.random.default_rng(0)
    image = {
        "white": np.full((*shape, 3), 240, np.uint8),
        "grey": np.full((*shape, 3), 114, np.uint8),
        "noise": random.integers(0, 256, (*shape, 3), np.uint8),
    }[content]
    result = detector.detect(image)
    assert result.image_shape == shape
    limit = np.array([shape[1], shape[0]] * 2)
    assert ((result.xyxy >= 0) & (result.xyxy <= limit)).all()
    if content != "noise":
        assert len(result) == 0
        assert "No confident detection" in result.report["notes"][0]


def test_an_empty_field_is_not_searched_at_the_finest_resolution():
    """Doubtful detections everywhere, more of them the finer one looks."""
    detector = disc_detector(judge=lambda size: (0, 0.05))
    shape = (900, 900)
    result = detector.detect(draw(shape, scattered(shape, 13, seed=1)), densities=False)
    assert result.report["tiles"] == 1
    assert result.report["chosen"] == "as in training"
    assert len(result) == 0
    assert len(result.candidates) > 0


def test_candidates_are_all_above_one_percent():
    random = np.random.default_rng(4)
    detector = disc_detector(judge=lambda size: (0, float(random.uniform(0.0, 1.0))))
    discs = scattered((600, 600), 40, seed=1)
    result = detector.detect(draw((600, 600), discs), confidence=0.4, object_size=40)
    everything = result.candidates
    assert everything.scores.min() > 0.01
    assert len(everything) == pytest.approx(0.99 * len(discs), abs=4)
    assert (result.scores >= 0.4).all()
    assert len(result) == (everything.scores >= 0.4).sum()
    assert set(everything.columns) == set(result.columns)


def test_moving_the_threshold_equals_detecting_again():
    detector = disc_detector(judge=lambda size: (0, min(size / 60, 1.0)))
    discs = scattered((600, 600), 40, seed=1, spread=0.3)
    image = draw((600, 600), discs)
    low, high = (detector.detect(image, c, object_size=40, tile=256) for c in (0.05, 0.7))
    moved = low.above(0.7)
    assert 0 < len(moved) < len(low)
    assert np.array_equal(moved.xyxy, high.xyxy)
    assert np.array_equal(moved.columns["Model channel 1 sum"], high.columns["Model channel 1 sum"])
    assert np.array_equal(high.above(0.05).xyxy, low.xyxy)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"confidence": 1.5}, "confidence must be a number from 0 to 1"),
        ({"confidence": float("nan")}, "confidence must be"),
        ({"confidence": None}, "confidence must be"),
        ({"confidence": [0.1, 0.2]}, "confidence must be"),
        ({"iou": -0.1}, "iou must be"),
        ({"iou": "0.5"}, "iou must be"),
        ({"object_size": 0}, "object_size must be"),
        ({"object_size": 1e-9}, "object_size must be"),
        ({"object_size": float("inf")}, "object_size must be"),
        ({"object_size": "large"}, "object_size must be"),
        ({"object_size": None}, "object_size must be"),
        ({"object_size": True}, "object_size must be"),
        ({"tile": 0}, "tile must be"),
        ({"tile": 100.5}, "tile must be"),
        ({"tile": float("nan")}, "tile must be"),
        ({"tile": float("inf")}, "tile must be"),
        ({"tile": None}, "tile must be"),
        ({"tile": "big"}, "tile must be"),
        ({"batch": 0}, "batch must be"),
        ({"batch": -1}, "batch must be"),
        ({"batch": "many"}, "batch must be"),
        ({"pixel_size": 0}, "pixel_size must be micrometres"),
        ({"pixel_size": (0.1, -0.1)}, "pixel_size must be micrometres"),
        ({"pixel_size": (0.1, 0.1, 0.1)}, "pixel_size must be micrometres"),
        ({"pixel_size": "0.1"}, "pixel_size must be micrometres"),
        ({"pixel_size": float("nan")}, "pixel_size must be micrometres"),
        ({"size_hint": 0}, "size_hint must be from 3 to 20000 pixels"),
        ({"size_hint": float("nan")}, "size_hint must be"),
    ],
)
def test_bad_settings_are_one_sentence(detector, field, settings, words):
    with pytest.raises(ValueError, match=words) as error:
        detector.detect(field[0], **settings)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith(".")


@pytest.mark.parametrize("size", [np.float32(0.144), np.array([0.144, 0.144]), [0.144, 0.144]])
def test_pixel_sizes_may_come_from_numpy(detector, field, size):
    assert detector.detect(field[0], pixel_size=size).pixel_size == pytest.approx((0.144, 0.144))


def test_not_an_image_is_one_sentence(detector):
    with pytest.raises(ValueError, match="Not an RGB image"):
        detector.detect(np.zeros((5, 5)))


def test_progress_grows_and_ends(field):
    image = draw((900, 900), scattered((900, 900), 30, seed=1))
    seen = []
    disc_detector(judge=trained).detect(image, tile=256, report=seen.append)
    fractions = [p.fraction for p in seen]
    assert fractions == sorted(fractions)
    assert fractions[-1] == 1
    assert {"looking for the cell size", "finding cells", "measuring densities"} <= {
        p.message for p in seen
    }


# --- how much work it is to find the size ---------------------------------------------------------


@pytest.fixture(scope="module")
def packaged():
    return load_checkpoint("blood-cells", "cpu")


@pytest.fixture
def worked(monkeypatch):
    """Detections, the pixels that the network was shown, and their number at each report."""
    done, predict = [0], StainDetectionModel.predict_mixed

    def counted(self, mixed):
        result = predict(self, mixed)
        done[0] += mixed.shape[0] * mixed.shape[2] * mixed.shape[3]
        return result

    monkeypatch.setattr(StainDetectionModel, "predict_mixed", counted)

    def run(model, image, **settings):
        seen, before = [], done[0]
        model._image_cache = ImageCache()  # as in a new session
        result = model.detect(
            image,
            report=lambda p: seen.append((p.fraction, p.message, done[0] - before)),
            **settings,
        )
        return result, done[0] - before, seen

    return run


@pytest.mark.parametrize("diameter", [10, 16, 28, 40, 55, 75, 90, 120, 160, 200])
def test_finding_the_size_is_at_most_as_much_work_as_finding_the_cells(packaged, worked, diameter):
    shape = (600, 800) if diameter >= 40 else (15 * diameter, 20 * diameter)
    image = blood_smear(shape, cell_diameter=diameter, seed=4).image
    found, work, _ = worked(packaged, image, densities=False)
    assert found.report["object_size"] == pytest.approx(diameter, rel=0.35)
    size = reference_size(packaged.info) / found.report["scale"]  # less rounded
    given, given_work, _ = worked(packaged, image, object_size=size, densities=False)
    assert work <= 2 * given_work
    np.testing.assert_allclose(found.xyxy, given.xyxy, atol=0.2)
    again, hinted_work, _ = worked(packaged, image, size_hint=size, densities=False)
    assert hinted_work <= 1.2 * given_work
    assert again.report["chosen"] == "as found before"
    np.testing.assert_allclose(again.xyxy, given.xyxy, atol=0.2)


def test_a_wrong_hint_does_no_harm(packaged, worked):
    image = blood_smear((600, 800), cell_diameter=50, seed=4).image
    expected, _, _ = worked(packaged, image)
    for wrong in (9.0, 300.0):
        found, _, _ = worked(packaged, image, size_hint=wrong)
        assert found.report["chosen"] != "as found before"
        # What differs by less than 1.3 from training needs no other resolution.
        assert found.report["object_size"] == pytest.approx(50, rel=0.3)
        assert len(found) == pytest.approx(len(expected), rel=0.05)


@pytest.mark.parametrize("light", ["even", "noisy", "uneven"])
def test_an_empty_field_is_looked_at_once(packaged, worked, light):
    y, x = np.indices((600, 800)) / 400
    image = np.full((600, 800, 3), 230.0)
    if light == "noisy":
        image += np.random.default_rng(0).normal(0, 3, image.shape)
    elif light == "uneven":
        image -= 30 * np.hypot(y - 0.7, x - 1.0)[..., None] ** 2
    found, work, _ = worked(packaged, image.clip(0, 255).astype(np.uint8))
    assert len(found) == 0
    assert work == 320 * 256  # 320 × 240, in multiples of 32
    assert "No confident detection" in found.report["notes"][0]


@pytest.mark.parametrize("diameter", [24, 90, 200])
def test_the_time_left_does_not_climb_without_a_reason(packaged, worked, diameter):
    """As the progress bar tells it for each stage, but by work and not by time."""
    image = blood_smear((600, 800), cell_diameter=diameter, seed=4).image
    _, _, seen = worked(packaged, image, tile=256, densities=False)
    fractions = [fraction for fraction, _, _ in seen]
    assert fractions == sorted(fractions)
    reason = "looking at another resolution"
    messages = {message for _, message, _ in seen}
    assert {"looking for the cell size", "finding cells"} <= messages
    assert (reason in messages) == (diameter == 24)
    stages = [list(told) for _, told in groupby(seen, lambda entry: entry[1].split()[0])]
    assert stages[-2][0][1] == "finding cells"
    assert len(stages[-2]) >= (2 if diameter == 200 else 5)  # tiles
    for (first, _, before), *told in stages:
        shares = [((f - first) / (1 - first), why, done - before) for f, why, done in told]
        left = [(done * (1 - f) / f, why) for f, why, done in shares if f > 0.05]
        for (earlier, _), (after, why) in pairwise(left):
            assert after < 1.05 * earlier or why == reason


@pytest.mark.parametrize("when", [0, 2, 7])
def test_cancelling_leaves_the_detector_usable(detector, field, when):
    image, discs = field
    calls = []

    def report(progress):
        calls.append(progress)
        if len(calls) > when:
            raise Cancelled

    with pytest.raises(Cancelled):
        detector.detect(image, object_size=50, tile=128, report=report)
    assert len(calls) == when + 1
    close_to(detector.detect(image, object_size=50), discs, tolerance=2.5)


def test_the_report_is_plain(detector, field):
    result = detector.detect(field[0])
    assert json.loads(json.dumps(result.report)) == result.report
    assert result.report["device"] == "CPU"
    assert result.names == ["RBC", "WBC", "Platelets"]


def test_the_network_itself_is_left_as_it_was(field):
    detector = disc_detector()
    before = {k: v.clone() for k, v in detector.network.state_dict().items()}
    detector.detect(field[0])
    after = detector.network.state_dict()
    assert before.keys() == after.keys()
    assert all(torch.equal(before[k], after[k]) for k in before)
    assert all(p.requires_grad for p in detector.network.mix.parameters())


def test_another_device_is_another_detector(detector):
    other = detector.to("cpu")
    assert other is not detector
    assert other.network is not detector.network
    assert other.info == detector.info
    assert "discs" in repr(other)


def test_sizes_are_those_of_the_model(detector):
    assert detector.info["object_sizes"] == SIZES
    assert detector.classes == ["RBC", "WBC", "Platelets"]


def test_decomposition_starts_from_what_was_learned(detector):
    image = blood_smear((64, 64), seed=1, cell_diameter=30.0).image
    before = detector.decompose(image).spectra
    other = detector.to("cpu")
    with torch.no_grad():
        other.network.stain.raw_spectra.add_(0.5)
    assert np.abs(other.decompose(image).spectra - before).max() > 1e-3
