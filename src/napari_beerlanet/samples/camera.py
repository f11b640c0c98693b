"""Image formation of the samples: dyes and illumination of a laboratory, exposure, noise, JPEG."""

import io
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Integral, Real

import numpy as np
from PIL import Image

from napari_beerlanet.samples.shapes import Rng

JPEG_MAX_SIDE = 65500  # pixels a side
JPEG_STRIP_PIXELS = 2**25  # pixels at a time, below what Pillow takes for an attack


def check_range(low: float, high: float, **values: float) -> None:
    """Raise ValueError unless every named value is a number from ``low`` to ``high``."""
    for name, value in values.items():
        if not isinstance(value, Real) or not low <= value <= high:
            raise ValueError(f"{name} must be a number from {low:g} to {high:g}, got {value!r}.")


def check_integers(**values: int) -> None:
    """Raise ValueError unless every named value is an integer of at least 0."""
    for name, value in values.items():
        if not isinstance(value, Integral) or isinstance(value, bool) or value < 0:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}.")


@dataclass(frozen=True)
class Camera:
    """Everything between the slide and the file; see ``sample_data`` for the fields."""

    blur: float
    vignetting: float
    noise: float
    jpeg_quality: int | None

    def __post_init__(self) -> None:
        check_range(0, 100, blur=self.blur)
        check_range(0, 1, vignetting=self.vignetting, noise=self.noise)
        quality = self.jpeg_quality
        if quality is not None and not (isinstance(quality, Integral) and 1 <= quality <= 100):
            raise ValueError(f"jpeg_quality must be None or an integer 1 to 100, got {quality!r}.")


def laboratory_stain(
    dyes: Sequence[Sequence[float]], light: Sequence[float], shift: float, lab: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Spectra (3, r), strength (r,) and ln of the light (3,) on the way to another laboratory.

    ``dyes`` (r, 3) and ``light`` (3,) are those of the reference. Camera and dye lots turn all
    spectra much the same way, so they stay about as far apart as they were.
    """
    rng = np.random.default_rng([lab, 2])
    spectra = np.array(dyes, float).T
    spectra /= np.linalg.norm(spectra, axis=0)
    toward = 0.14 * _random_tangent(rng, spectra.mean(1))[:, None]
    if (spectra + toward).min() < (spectra - toward).min():
        toward = -toward
    own = 0.04 * np.stack([_random_tangent(rng, column) for column in spectra.T], 1)
    spectra = np.maximum(spectra + shift * (toward + own), 0)
    signs = rng.choice([-1, 1], len(dyes) + 1)
    strength = np.exp(shift * signs[1:] * rng.uniform(0.2, 0.5, len(dyes)))
    warmth, tint, gain = signs[0] * rng.uniform(0.05, 0.12), *rng.uniform(-1, 1, 2)
    change = np.array([warmth, 0.04 * tint, -warmth]) + 0.15 * gain
    x0 = np.minimum(np.log(light) + shift * change, np.log(254 / 255))
    return spectra / np.linalg.norm(spectra, axis=0), strength, x0


def _random_tangent(rng: Rng, direction: np.ndarray) -> np.ndarray:
    """A random unit vector at right angles to ``direction``."""
    vector = np.cross(direction, rng.standard_normal(3))
    return vector / np.linalg.norm(vector)


def expose(
    densities: np.ndarray, spectra: np.ndarray, x0: np.ndarray, camera: Camera, rng: Rng
) -> np.ndarray:
    """round(255 exp(x0 - S D)), (H, W, 3) uint8, in strips so that memory stays small."""
    _, height, width = densities.shape
    image = np.empty((height, width, 3), np.uint8)
    rows, cols = (_squared_distance(n, rng.uniform(0.45, 0.55)) for n in (height, width))
    far = rows.max() + cols.max()
    strip = max(1, 2**18 // width)
    for top in range(0, height, strip):
        part = slice(top, top + strip)
        intensity = np.exp(x0 - np.moveaxis(densities[:, part], 0, -1).astype(float) @ spectra.T)
        if camera.vignetting:
            fall = (rows[part, None] + cols) / far
            intensity *= 1 - camera.vignetting * fall[..., None]
        if camera.noise:
            grain = rng.standard_normal(intensity.shape, dtype=np.float32)
            intensity += camera.noise * np.sqrt(0.9 * intensity + 0.1) * grain
        image[part] = np.clip(np.rint(255 * intensity), 0, 255)
    return image


def _squared_distance(n: int, middle: float) -> np.ndarray:
    """Squared distance of each of n pixels from the brightest point, in side lengths."""
    return ((np.arange(n) + 0.5) / n - middle) ** 2


def jpeg(image: np.ndarray, quality: int) -> np.ndarray:
    """The image as it comes back from a JPEG file, (H, W, 3) uint8."""
    strip = max(1, JPEG_STRIP_PIXELS // image.shape[1] // 16) * 16  # whole blocks: no seams
    parts = []
    for top in range(0, len(image), strip):
        file = io.BytesIO()
        Image.fromarray(image[top : top + strip]).save(file, "JPEG", quality=quality)
        parts.append(np.asarray(Image.open(file)))
    return np.concatenate(parts)
