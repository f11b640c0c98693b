"""Small pictures that the engine's tests share: two that look real, and the odd ones."""

from functools import cache

import numpy as np

from napari_beerlanet.samples import blood_smear, he_field


@cache
def smear(height=48, width=64, seed=0):
    """A (height, width, 3) uint8 blood smear, read-only."""
    return _frozen(blood_smear((height, width), cell_diameter=22, seed=seed).image)


@cache
def section(height=48, width=64, seed=0, stains=2):
    """A (height, width, 3) uint8 field of stained tissue, read-only."""
    field = he_field((height, width), nucleus_diameter=10, seed=seed, stains=stains)
    return _frozen(field.image)


def with_alpha(image, hidden):
    """RGBA with alpha 0 where `hidden` (H, W), and full or half of full elsewhere."""
    full = np.iinfo(image.dtype).max if image.dtype.kind == "u" else 1
    alpha = np.where(hidden, 0, full).astype(image.dtype)
    alpha[:, ::3] = np.where(hidden[:, ::3], 0, full / 2).astype(image.dtype)
    return np.dstack([image, alpha])


def start(r, seed=0, channels=3):
    """Random nonnegative start spectra (channels, r), not of unit norm."""
    return np.random.default_rng(seed).uniform(0.05, 1.0, (channels, r))


def _frozen(image):
    image.flags.writeable = False
    return image


def _flat(*colour, size=(4, 5)):
    return np.full((*size, 3), colour, np.uint8)


ODD = {
    "blank": _flat(231, 229, 230),
    "one colour": _flat(120, 60, 160),
    "one pixel": _flat(10, 200, 90, size=(1, 1)),
    "two pixels": np.array([[[200, 100, 50], [40, 90, 220]]], np.uint8),
    "black": _flat(0, 0, 0),
    "white": _flat(255, 255, 255),
    "saturated": np.random.default_rng(0).choice(np.array([0, 255], np.uint8), (6, 7, 3)),
    "black and white": np.array([[[0] * 3, [255] * 3]] * 3, np.uint8),
    "one row": smear()[20:21, :24],
    "smear": smear()[10:20, 10:22],
}
