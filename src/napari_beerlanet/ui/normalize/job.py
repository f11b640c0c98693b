"""Normalize a plane with several methods. Runs off the GUI thread, touches no widget or layer."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.common.messages import error_message
from napari_beerlanet.core.common.progress import Cancelled, Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import FileError, atomic_path
from napari_beerlanet.core.images.files import write_png, write_pyramid
from napari_beerlanet.core.images.rgb import RGBImage, check_rgb, to_uint8
from napari_beerlanet.core.images.slide import SLIDE_PIXELS, open_slide
from napari_beerlanet.core.normalization.classical import find_stain_vectors
from napari_beerlanet.core.normalization.methods import (
    SUFFIX,
    find_method,
    fitted_normalizer,
    load_normalizer,
)
from napari_beerlanet.core.normalization.normalizer import (
    Appearance,
    ColourStatistics,
    NormalizedImage,
    Normalizer,
    NormalizerError,
)
from napari_beerlanet.core.normalization.slide import NormalizedSlide, recolour_slide, slide_palette
from napari_beerlanet.core.stains.palette import Palette, palette_of
from napari_beerlanet.ui.viewer.planes import Plane

LayerData = Any
"""What a layer takes: an array, or a list of them for the levels of a multiscale image."""

_READING = 0.2  # of the progress: the image and the reference
_LIGHT_PERCENTILE = 90.0


@dataclass(frozen=True, eq=False)
class Reference:
    """What the image shall look like: a plane of a layer, or files.

    `paths` are those of images, or of one normalizer that was saved after it was fitted.
    """

    plane: Plane | None = None
    paths: tuple[Path, ...] = ()

    @property
    def is_normalizer(self) -> bool:
        """Whether it is a fitted normalizer, of one method, and no image."""
        return bool(self.paths) and self.paths[0].suffix.lower() == SUFFIX

    def read(self) -> Normalizer | list[npt.NDArray[Any]]:
        """Template images (H, W, 3 or 4), or the normalizer.

        A large image is taken at the finest level that can be taken at once.
        """
        if self.is_normalizer:
            return load_normalizer(self.paths[0])
        pyramids: list[Sequence[Any]] = [open_slide(path).levels for path in self.paths]
        pyramids += [self.plane.pyramid] if self.plane is not None else []
        return [check_rgb(np.asarray(levels[_finest(levels)])).pixels for levels in pyramids]


def _finest(levels: Sequence[Any]) -> int:
    """The number of the finest level that can be taken at once, or of the coarsest there is."""
    fits = (k for k, level in enumerate(levels) if math.prod(level.shape[:2]) <= SLIDE_PIXELS)
    return next(fits, len(levels) - 1)


@dataclass(frozen=True, eq=False)
class CompareJob:
    """Which plane is normalized, by which methods, and after which reference."""

    plane: Plane
    methods: tuple[str, ...]
    reference: Reference | None


@dataclass(frozen=True, eq=False)
class MethodResult:
    """What a method made of the image; `data` is None where it could not be used: `problem`.

    `unchanged`: the image stayed as it was; `notes` say why, or what else is to be known. `looks`
    are measured on the result, `before` and `after` are background and stains as the method knows
    them.
    """

    method: str
    seconds: float = 0.0
    data: LayerData | None = None
    normalizer: Normalizer | None = None
    unchanged: bool = False
    notes: tuple[str, ...] = ()
    looks: Appearance | None = None
    before: Appearance | None = None
    after: Appearance | None = None
    problem: str = ""

    @property
    def label(self) -> str:
        """The method as the user reads it."""
        return find_method(self.method).label

    @property
    def warning(self) -> str:
        """What the user must know of it, "" where all went well."""
        return self.problem or " ".join(self.notes)


@dataclass(frozen=True, eq=False)
class MethodComparison:
    """The results of all methods, in their order, and how the image and the reference look."""

    results: list[MethodResult]
    original: Appearance | None = None
    reference: Appearance | None = None


def compare_methods(job: CompareJob, report: Report) -> MethodComparison:
    """Normalize with all methods; one that fails does not stop the others.

    A reference that is a saved normalizer is used in any case, whatever its method. One that cannot
    be read is an error of the whole.
    """
    methods, given = job.methods, job.reference
    needed = any(find_method(method).needs_template for method in methods)
    report_progress(report, 0, 100, "reading the reference")
    read = given is not None and (needed or given.is_normalizer)
    reference = given.read() if given is not None and read else None
    if isinstance(reference, Normalizer) and reference.method not in methods:
        methods = (*methods, reference.method)
    pixels = _PlanePixels(job.plane, subprogress(report, 0.02, _READING))
    report_progress(report, 2, 100, "reading the image")
    pixels.read()
    results = []
    for k, method in enumerate(methods):
        done = _READING + (1 - _READING) * k / len(methods)
        label = find_method(method).label
        report_progress(report, round(100 * done), 100, f"normalizing: {label}")
        started = time.perf_counter()
        try:
            made = pixels.normalized(_fitted(method, reference))
        except Cancelled:
            raise
        except Exception as error:
            made = {"problem": error_message(error)}
        results.append(MethodResult(method, time.perf_counter() - started, **made))
    report_progress(report, 100, 100, "adding layers")
    template = reference[0] if isinstance(reference, list) else None
    looks = None if template is None else measure_looks(_statistics(template))
    return MethodComparison(results, pixels.looks, looks)


def measure_looks(statistics: ColourStatistics) -> Appearance:
    """Background and stains of colours, measured in the same way whatever made them.

    The background is what a tenth of the pixels exceed in each channel, stains are Macenko's.
    """
    light = [statistics.percentile(statistics.colours[:, k], _LIGHT_PERCENTILE) for k in range(3)]
    background = np.array(light) / 255
    vectors = find_stain_vectors(statistics) if not statistics.problem() else ""
    if isinstance(vectors, str):
        return Appearance(background)
    return replace(vectors.appearance, background=background)


def _statistics(pixels: npt.NDArray[Any]) -> ColourStatistics:
    """Of an image (H, W, 3 or 4)."""
    return ColourStatistics.of(palette_of(to_uint8(check_rgb(pixels).flat)))


def _fitted(method: str, reference: Any) -> Normalizer:
    needs = find_method(method).needs_template
    if needs and isinstance(reference, Normalizer) and reference.method != method:
        label = find_method(reference.method).label
        raise NormalizerError(
            f"The reference is a saved {label} normalizer; choose an image for this method."
        )
    return fitted_normalizer(method, reference if needs else None)


class _PlanePixels:
    """The pixels of a plane, read once for all methods; a slide is known by its colours."""

    def __init__(self, plane: Plane, report: Report | None) -> None:
        self._plane, self._report = plane, report

    def read(self) -> None:
        """Now, and not within the time of the first method."""
        assert self._palette is not None if self._plane.is_slide else self._image is not None

    @cached_property
    def _image(self) -> RGBImage:
        return check_rgb(self._plane.read())

    @cached_property
    def _palette(self) -> Palette:
        """The colours of a slide's tissue at the finest level that can be taken at once.

        They differ little from level to level, and here one wants to look at the result soon.
        """
        levels = self._plane.pyramid
        return slide_palette(levels[_finest(levels) :], report=self._report)

    @cached_property
    def looks(self) -> Appearance:
        """Of the image before anything was done to it."""
        if self._plane.is_slide:
            return measure_looks(ColourStatistics.of(self._palette))
        return measure_looks(_statistics(self._image.pixels))

    def normalized(self, normalizer: Normalizer) -> dict[str, Any]:
        """What a `MethodResult` holds; lazy for a slide."""
        data: LayerData
        done: NormalizedImage | NormalizedSlide
        if self._plane.is_slide:
            before = self._palette
            colour_map = normalizer.colour_map(before)
            done = recolour_slide(self._plane.pyramid, colour_map, before)
            colours = colour_map(before.colours).astype(np.float64)
            after = ColourStatistics(colours, before.counts).where(before.counts > 0)
            data = done.levels
        else:
            done = normalizer.apply(self._image)
            data, after = done.rgb, _statistics(done.rgb)
        return {
            "data": data,
            "normalizer": normalizer,
            "unchanged": done.unchanged,
            "notes": done.notes,
            "looks": measure_looks(after),
            "before": done.before,
            "after": done.after,
        }


# --- saving ---------------------------------------------------------------------------------------


def save_image(
    plane: Plane, pixel_size: tuple[float, float] | None, path: Path, report: Report
) -> None:
    """Write a plane as OME-TIFF, a slide with its pyramid, or as PNG; whole or not at all.

    `pixel_size` (y, x) in micrometres goes into a TIFF, where it is known.
    """
    suffix = path.suffix.lower()
    if suffix not in (".tif", ".tiff", ".png"):
        raise FileError(f"{path.name}: images are saved as .tif or .png.")
    levels = plane.pyramid if plane.is_slide else [plane.lazy()]
    watched = [_WatchedLevel(level, report) for level in levels]
    with atomic_path(path) as unfinished:
        if suffix == ".png":
            write_png(unfinished, np.asarray(levels[0]))
        else:
            write_pyramid(unfinished, watched, pixel_size, plane.name)


class _WatchedLevel:
    """A level whose reading is reported, and ends where that is cancelled."""

    def __init__(self, level: Any, report: Report) -> None:
        self._level, self._report = level, report
        self.shape, self.dtype = level.shape, level.dtype

    def __getitem__(self, index: slice) -> npt.NDArray[Any]:
        report_progress(self._report, index.start, self.shape[0], "saving the image")
        return np.asarray(self._level[index])
