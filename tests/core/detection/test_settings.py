"""Settings of detection: the only place of their defaults."""

import inspect

import numpy as np
import pytest

from napari_beerlanet.core.detection.detector import Detector, detect_windows
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.detection.slide_detector import SlideDetection, detect_slide


@pytest.mark.parametrize(
    "function",
    [Detector.detect, detect_windows, SlideDetection.__init__, detect_slide],
    ids=lambda f: f.__qualname__,
)
def test_defaults_are_those_of_the_settings(function):
    shared = inspect.signature(function).parameters.keys() & DetectSettings.model_fields.keys()
    assert shared
    for name in shared:
        default = inspect.signature(function).parameters[name].default
        assert default == DetectSettings.default(name), name


def test_every_setting_has_a_description():
    for name in DetectSettings.model_fields:
        assert DetectSettings.spec(name).description.endswith("."), name


@pytest.mark.parametrize(
    ("given", "pair"),
    [
        (None, None),
        (0.5, (0.5, 0.5)),
        (1, (1.0, 1.0)),
        (np.float32(0.5), (0.5, 0.5)),
        ((0.5, 0.25), (0.5, 0.25)),
        ([0.5, 0.25], (0.5, 0.25)),
        (np.array([0.5, 0.25]), (0.5, 0.25)),
    ],
)
def test_pixel_sizes(given, pair):
    assert DetectSettings(pixel_size=given).pixel_size_yx == pair


@pytest.mark.parametrize("wrong", [0, -1, True, "0.5", (1, 2, 3), (1,), (1, 0), np.ones((2, 2))])
def test_wrong_pixel_sizes_are_one_sentence(wrong):
    with pytest.raises(ValueError, match=r"^pixel_size must be micrometres above 0, or \(y, x\)"):
        DetectSettings(pixel_size=wrong)


def test_whole_numbers_may_be_floats():
    assert DetectSettings(tile=640.0, batch=np.float64(2)).tile == 640
