"""Detection in windows of an image."""

import numpy as np
import pytest

import napari_beerlanet as nb
from napari_beerlanet.core.detection.detector import detect_windows
from napari_beerlanet.samples import blood_smear

WHOLE = (slice(0, 240), slice(0, 320))


@pytest.fixture(scope="module")
def model():
    return nb.load_checkpoint("blood-cells", device="cpu")


@pytest.fixture(scope="module")
def image():
    return blood_smear((240, 320), cell_diameter=50).image


def run(model, image, windows, **more):
    return detect_windows(
        model, lambda w: image[w], windows, image.shape[:2], object_size=50, **more
    )


def test_one_window_of_all_is_plain_detection(model, image):
    found, plain = run(model, image, [WHOLE]), model.detect(image, object_size=50)
    np.testing.assert_array_equal(found.xyxy, plain.xyxy)
    np.testing.assert_array_equal(found.candidates.scores, plain.candidates.scores)


def test_boxes_lie_where_they_are_in_the_image(model, image):
    window = (slice(40, 240), slice(100, 320))
    found, inside = run(model, image, [window]), model.detect(image[window], object_size=50)
    np.testing.assert_allclose(found.xyxy, inside.xyxy + np.array([100, 40] * 2), atol=1e-4)
    assert found.image_shape == (240, 320)
    assert set(found.columns) == set(inside.columns)


def test_what_two_windows_see_is_found_once(model, image):
    once, twice = run(model, image, [WHOLE]), run(model, image, [WHOLE, WHOLE])
    assert len(twice) == len(once) > 3
    assert twice.report["windows"] == 2
    apart = run(model, image, [(slice(0, 240), slice(0, 160)), (slice(0, 240), slice(160, 320))])
    assert set(apart.labels) <= {0, 1, 2}


def test_progress_runs_once_from_start_to_end(model, image):
    seen = []
    run(model, image, [WHOLE, WHOLE], report=lambda p: seen.append(p.fraction))
    assert seen == sorted(seen)
    assert seen[-1] == 1
