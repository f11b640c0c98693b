"""Sample images: three photographs, and synthetic smears and sections with known truth.

A synthetic image is drawn as optical densities D, one plane per dye, blurred as the optics would,
and exposed by Beer-Lambert: intensity = exp(x0 - S D), then vignetting, noise and JPEG. With these
three switched off the image is exactly ``round(255 exp(x0 - S D))``. The same call, the same bytes.

Parameters that synthetic smears and sections share:

seed : int
    Chooses the cells, their positions and the noise.
shift : float
    0 is the reference laboratory, 1 another one: other spectra, stain strength and illumination.
    No cell moves.
lab : int
    Which other laboratory; images with different seeds can share one.
blur : float
    Standard deviation of the optics' blur, in pixels.
vignetting : float
    Fraction of the illumination that the corners lack. It is in neither x0 nor D.
noise : float
    Standard deviation at intensity 1. Of the variance, 0.9 is photon noise, which falls with the
    intensity, and 0.1 is read noise, which does not.
jpeg_quality : int or None
    1 to 100.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from scipy import ndimage

from napari_beerlanet.samples import blood, tissue
from napari_beerlanet.samples.camera import (
    JPEG_MAX_SIDE,
    Camera,
    check_integers,
    check_range,
    expose,
    jpeg,
    laboratory_stain,
)
from napari_beerlanet.samples.shapes import Canvas, Rng

LayerData = tuple[np.ndarray, dict[str, Any], str]

RED_CELL_MICROMETRES = 7.2
NUCLEUS_MICROMETRES = 8.5

# Directions of optical density in RGB, and light. Smears: near what BCCD and thin malaria smears
# show, red cells a little redder. Sections: Macenko's reference H&E, Ruifrok and Johnston's DAB.
SMEAR_DYES = {"haemoglobin": (0.29, 0.70, 0.65), "nuclear dye": (0.60, 0.78, 0.15)}
SECTION_DYES = {
    "haematoxylin": (0.5626, 0.7201, 0.4062),
    "eosin": (0.2159, 0.8012, 0.5581),
    "DAB": (0.27, 0.57, 0.78),
}
SMEAR_BACKGROUND, SECTION_BACKGROUND = (0.84, 0.85, 0.825), (0.96, 0.945, 0.955)
NUCLEI = ("epithelial nucleus", "stromal nucleus", "lymphocyte")


@dataclass(frozen=True, eq=False)
class SampleField:
    """A picture and the truth behind it, n objects and r dyes.

    Attributes
    ----------
    image : (H, W, 3) uint8
        RGB, what the camera gives.
    background : (3,) float64
        x0, ln of the background light, intensity in (0, 1].
    spectra : (3, r) float64
        S, unit nonnegative columns.
    densities : (r, H, W) float32
        D, as the optics show it: after blur, before vignetting, noise and JPEG.
    stains : tuple of r str
    boxes : (n, 4) float32
        x1, y1, x2, y2 in pixels, clipped to the image; pixel j covers [j, j + 1).
    labels : (n,) int64
        Indices into ``names``.
    names : tuple of str
    pixel_size : float
        Micrometres.
    """

    image: np.ndarray
    background: np.ndarray
    spectra: np.ndarray
    densities: np.ndarray
    stains: tuple[str, ...]
    boxes: np.ndarray
    labels: np.ndarray
    names: tuple[str, ...]
    pixel_size: float


def blood_smear(
    shape: Sequence[int] = (480, 640),
    *,
    seed: int = 0,
    shift: float = 0.0,
    lab: int = 0,
    cell_diameter: float = 100.0,
    red_cells: float = 0.5,
    white_cells: float = 0.07,
    platelets: float = 0.09,
    parasites: float = 0.0,
    plasma: float = 0.03,
    blur: float = 1.2,
    vignetting: float = 0.12,
    noise: float = 0.012,
    jpeg_quality: int | None = 92,
) -> SampleField:
    """A Giemsa-like blood smear; stains haemoglobin, nuclear dye; names RBC, WBC, Platelets.

    Parameters
    ----------
    shape : (H, W)
    seed, shift, lab, blur, vignetting, noise, jpeg_quality
        See the module's documentation.
    cell_diameter : float
        Of a red cell (7.2 micrometres), in pixels.
    red_cells : float
        Share of the field that the red cells would cover side by side.
    white_cells, platelets : float
        Expected number per red cell.
    parasites : float
        Share of red cells with a malaria parasite; above 0 adds the names ring, trophozoite.
    plasma : float
        Density of the uneven film between the cells.
    """
    shape = _check_shape(shape, jpeg_quality)
    check_range(0, 1, red_cells=red_cells, white_cells=white_cells, platelets=platelets)
    check_range(0, 1, parasites=parasites, plasma=plasma)
    check_range(2, 1000, cell_diameter=cell_diameter)
    names = ("RBC", "WBC", "Platelets") + (("ring", "trophozoite") if parasites else ())
    counts = {"red": red_cells, "white": white_cells, "platelets": platelets}

    def draw(rng: Rng) -> Canvas:
        return blood.smear(shape, rng, cell_diameter, parasites, plasma, **counts)

    camera = Camera(blur, vignetting, noise, jpeg_quality)
    slide = _Specimen(SMEAR_DYES, SMEAR_BACKGROUND, names, RED_CELL_MICROMETRES / cell_diameter)
    return _render(draw, slide, camera, seed, shift, lab)


def he_field(
    shape: Sequence[int] = (512, 512),
    *,
    seed: int = 0,
    shift: float = 0.0,
    lab: int = 0,
    stains: int = 2,
    nucleus_diameter: float = 24.0,
    nests: float = 0.35,
    stromal_cells: float = 0.07,
    blur: float = 0.8,
    vignetting: float = 0.04,
    noise: float = 0.012,
    jpeg_quality: int | None = 92,
) -> SampleField:
    """A section of tissue; stains haematoxylin, eosin (, DAB); names of three kinds of nuclei.

    Parameters
    ----------
    shape : (H, W)
    seed, shift, lab, blur, vignetting, noise, jpeg_quality
        See the module's documentation.
    stains : 2 or 3
        3 adds DAB, brown, on the membranes or in the nuclei of some nests; nothing moves.
    nucleus_diameter : float
        Of an epithelial nucleus (8.5 micrometres), in pixels.
    nests : float
        Share of the field that nests and glands would cover side by side.
    stromal_cells : float
        Share of the field that the nuclei between the fibres would cover side by side.
    """
    shape = _check_shape(shape, jpeg_quality)
    if stains not in (2, 3):
        raise ValueError(f"stains must be 2 (H&E) or 3 (with DAB), got {stains!r}.")
    check_range(0, 1, nests=nests, stromal_cells=stromal_cells)
    check_range(2, 1000, nucleus_diameter=nucleus_diameter)

    def draw(rng: Rng) -> Canvas:
        return tissue.section(shape, rng, stains, nucleus_diameter, nests, stromal_cells)

    camera = Camera(blur, vignetting, noise, jpeg_quality)
    dyes = dict(list(SECTION_DYES.items())[:stains])
    slide = _Specimen(dyes, SECTION_BACKGROUND, NUCLEI, NUCLEUS_MICROMETRES / nucleus_diameter)
    return _render(draw, slide, camera, seed, shift, lab)


PHOTOGRAPHS = {
    "Blood smear (BCCD)": "blood-smear-bccd.jpg",
    "Malaria, thin smear (MP-IDB)": "malaria-mp-idb.jpg",
    "H&E section": "he-section.png",
}
"""Files of real images beside this module by what they are called; LICENSE-IMAGES.md has their
origin and licences."""


def photograph(name: str) -> np.ndarray:
    """(H, W, 3) uint8: one of `PHOTOGRAPHS`."""
    with Image.open(photograph_path(name)) as picture:
        return np.array(picture.convert("RGB"))


def photograph_path(name: str) -> Path:
    """The file of one of `PHOTOGRAPHS`."""
    return Path(__file__).with_name(PHOTOGRAPHS[name])


def bccd_layers() -> list[LayerData]:
    """A real blood smear as napari opens it from File > Open Sample."""
    return [_photograph_layer("Blood smear (BCCD)")]


def malaria_layers() -> list[LayerData]:
    """A real smear with parasites as napari opens it from File > Open Sample."""
    return [_photograph_layer("Malaria, thin smear (MP-IDB)")]


def he_section_layers() -> list[LayerData]:
    """A real H&E section as napari opens it from File > Open Sample."""
    return [_photograph_layer("H&E section")]


def _photograph_layer(name: str) -> LayerData:
    return photograph(name), {"name": name, "rgb": True}, "image"


def blood_smear_layers() -> list[LayerData]:
    """The smear as napari opens it from File > Open Sample."""
    return [_image_layer(blood_smear((960, 1280), parasites=0.05), "Blood smear (synthetic)")]


def he_field_layers() -> list[LayerData]:
    """The H&E field as napari opens it from File > Open Sample."""
    return [_image_layer(he_field((1024, 1024)), "H&E field (synthetic)")]


def _image_layer(field: SampleField, name: str) -> LayerData:
    """In pixels, as most images are that a user opens beside it; metadata tell the pixel size."""
    truth = {f.name: getattr(field, f.name) for f in fields(field) if f.name != "image"}
    truth["pixel_size_um"] = (field.pixel_size, field.pixel_size)
    return field.image, {"name": name, "rgb": True, "metadata": truth}, "image"


@dataclass(frozen=True)
class _Specimen:
    """What lies under the microscope in the reference laboratory."""

    dyes: dict[str, tuple[float, float, float]]
    light: tuple[float, float, float]
    names: tuple[str, ...]
    pixel_size: float


def _render(
    draw: Callable[[Rng], Canvas],
    slide: _Specimen,
    camera: Camera,
    seed: int,
    shift: float,
    lab: int,
) -> SampleField:
    """Draw, stain and expose; stain and camera have random numbers of their own."""
    check_range(0, 1, shift=shift)
    check_integers(seed=seed, lab=lab)
    canvas = draw(np.random.default_rng([seed, 0]))
    spectra, strength, x0 = laboratory_stain(list(slide.dyes.values()), slide.light, shift, lab)
    for plane, factor in zip(canvas.planes, strength, strict=True):
        plane *= np.float32(factor)
        if camera.blur:
            ndimage.gaussian_filter(plane, camera.blur, output=plane, mode="nearest")
    image = expose(canvas.planes, spectra, x0, camera, np.random.default_rng([seed, 1]))
    return SampleField(
        image=image if camera.jpeg_quality is None else jpeg(image, int(camera.jpeg_quality)),
        background=x0,
        spectra=spectra,
        densities=canvas.planes,
        stains=tuple(slide.dyes),
        boxes=np.array(canvas.boxes, np.float32).reshape(-1, 4),
        labels=np.array(canvas.labels, np.int64),
        names=slide.names,
        pixel_size=slide.pixel_size,
    )


def _check_shape(shape: Sequence[int], jpeg_quality: int | None) -> tuple[int, int]:
    sides = tuple(shape) if isinstance(shape, Sequence | np.ndarray) else ()
    if len(sides) != 2 or not all(isinstance(n, Integral) and n > 0 for n in sides):
        raise ValueError(f"shape must be two positive integers (height, width), got {shape!r}.")
    if jpeg_quality is not None and max(sides) > JPEG_MAX_SIDE:
        raise ValueError(
            f"shape must be at most {JPEG_MAX_SIDE} a side for JPEG, got {shape!r}; "
            "jpeg_quality=None has no limit."
        )
    return int(sides[0]), int(sides[1])
