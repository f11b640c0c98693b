"""The detection pipeline of one image: working resolution, tiles, inference, densities in boxes."""

from __future__ import annotations

import math
import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import (
    AGREEMENT_COLUMN,
    DOMAIN_SHIFT_COLUMN,
    RawDetections,
    channel_name,
)
from napari_beerlanet.core.common.device import describe_device, is_out_of_memory
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.storage import pixel_hash
from napari_beerlanet.core.detection import scale_search, tiling
from napari_beerlanet.core.detection.inference import InferenceRunner
from napari_beerlanet.core.detection.scale_search import ScaleChoice, ScaleSample, TrainingSizes
from napari_beerlanet.core.detection.settings import MIN_TILE, DetectSettings
from napari_beerlanet.core.detection.stain_statistics import (
    IndexedColours,
    class_agreement,
    domain_shift_scores,
    measure_boxes,
)
from napari_beerlanet.core.detection.tiling import TileGrid
from napari_beerlanet.core.images.rgb import fill_transparent
from napari_beerlanet.core.stains.domain_shift import subsample_pixels, summarize_stain
from napari_beerlanet.core.stains.front_end import StainFit, fit_stain

Pixels = npt.NDArray[np.uint8]
PixelSize = tuple[float, float]

MIN_SCORE = 0.01
"""Score below which nothing is kept at all."""

_DEFAULT_TILE = {"cpu": 1024, "mps": 1280, "cuda": 1280}
_PLAUSIBLE_OBJECT_SIZE = (3.0, 20_000.0)  # image pixels of objects that can be detected at all
_SEARCH_WINDOWS = 3  # of a large image that are looked at for its objects' size


@dataclass
class ImageCacheEntry:
    """Results for one image: stain `fits` and scale `choices` by the settings they depend on."""

    fits: dict[Any, StainFit] = field(default_factory=dict)
    choices: dict[Any, Any] = field(default_factory=dict)


class ImageCache:
    """Results for the last few images, recognised by their pixels, so that a second run is faster.

    Detections never depend on it: what is cached is what would be computed again.
    """

    def __init__(self, images: int = 2) -> None:
        self._max_images = images
        self._entries: dict[str, ImageCacheEntry] = {}
        self._lock = threading.Lock()

    def get(self, pixels: npt.NDArray[np.uint8]) -> ImageCacheEntry:
        """The entry of an image (H, W, 3 or 4), an empty one where it is new."""
        key = pixel_hash(pixels)
        with self._lock:
            entry = self._entries.pop(key, None) or ImageCacheEntry()
            self._entries[key] = entry
            while len(self._entries) > self._max_images:
                del self._entries[next(iter(self._entries))]
        return entry


class DetectionPipeline:
    """Runs one image through the network and keeps what later steps need."""

    def __init__(
        self,
        runner: InferenceRunner,
        info: dict[str, Any],
        pixels: Pixels,
        settings: DetectSettings,
        report: Report | None,
        cached: ImageCacheEntry | None = None,
    ) -> None:
        self.runner, self.info, self.pixels = runner, info, pixels
        self.settings, self.report = settings, report
        self._cached = cached or ImageCacheEntry()
        self.tile = self._requested_tile = self._tile_side()
        self.notes: list[str] = []
        self.shape: tuple[int, int] = pixels.shape[:2]
        self._sizes: dict[str, dict[str, float]] = info.get("object_sizes") or {}
        self.training_sizes = TrainingSizes.of(self._sizes, info["classes"])
        self.typical_size = scale_search.typical_size(self._sizes)
        self.scale_choice = ScaleChoice(1.0, "")
        self.grid: TileGrid | None = None
        self.fit: StainFit | None = None
        self._first_pass: tuple[ScaleChoice, RawDetections] | None = None

    def _tile_side(self) -> int:
        if self.settings.tile != "auto":
            return self.settings.tile
        side = _DEFAULT_TILE.get(self.runner.device.type, _DEFAULT_TILE["cpu"])
        return max(side, int(self.info["image_size"]))

    def choose_scale(self) -> ScaleChoice:
        """The working resolution."""
        settings = self.settings
        key = (settings.object_size, settings.pixel_size_yx, settings.iou, self.tile)
        cached = self._cached.choices.get(key)
        if cached is not None:
            choice, self.fit, self._first_pass, self.grid, notes = cached
            self.notes += notes
            return choice  # type: ignore[no-any-return]
        choice = self._find_scale()
        if self.tile == self._requested_tile:  # memory sufficed
            entry = (choice, self.fit, self._first_pass, self.grid, list(self.notes))
            self._cached.choices[key] = entry
        return choice

    def _find_scale(self) -> ScaleChoice:
        model_pixel_size = self.info.get("pixel_size")
        object_size, pixel_size = self.settings.object_size, self.settings.pixel_size_yx
        if object_size != "auto":
            return self._scale_for_size(object_size)
        if pixel_size and model_pixel_size:
            scale = math.sqrt(math.prod(pixel_size)) / model_pixel_size
            if self._is_plausible(scale):
                return ScaleChoice(scale, "from the pixel sizes")
        start = ScaleChoice(self.info["image_size"] / max(self.shape), "as in training")
        if self.typical_size is None:
            self.notes.append("The model stores no object sizes; the image was shown whole.")
            return start
        return self._scale_from_image(start, self.typical_size)

    def _is_plausible(self, scale: float) -> bool:
        """Whether objects would be of a size that images of them have; adds a note if not."""
        size = (self.typical_size or 0.125 * self.info["image_size"]) / scale
        if _PLAUSIBLE_OBJECT_SIZE[0] <= size <= _PLAUSIBLE_OBJECT_SIZE[1]:
            return True
        self.notes.append(
            f"By the pixel sizes objects would be {size:.3g} pixels wide, so they were left aside."
        )
        return False

    def _scale_for_size(self, object_size: float) -> ScaleChoice:
        if self.typical_size is None:
            raise ValueError(
                "This model does not say how large its objects were in training; "
                'use object_size="auto".'
            )
        return ScaleChoice(self.typical_size / object_size, "as asked for")

    def _scale_from_image(self, start: ScaleChoice, typical: float) -> ScaleChoice:
        """Shown whole, as images were in training, if that agrees; else the best scale."""
        tried = scale_search.candidate_scales(typical, self.shape)
        if tried and tried[0] <= start.scale <= tried[-1]:
            detections = self.detect_at(start, subprogress(self.report, 0.0, 0.1))
            self._first_pass = (start, detections)
            if scale_search.matches_training(
                self._sample(detections, start.scale, math.prod(self.shape)), self.training_sizes
            ):
                return start
        done = iter(range(1, len(tried) + 4))
        searching = subprogress(self.report, 0.1, 0.3)

        def probe(scale: float) -> ScaleSample:
            report_progress(searching, next(done), len(tried) + 3, "finding the objects' size")
            return self._probe(scale)

        best = scale_search.search_scale(probe, typical, self.shape, self.training_sizes)
        if best is None:
            self.notes.append(
                "No confident detection at any resolution; give object_size in pixels."
            )
        return best or start

    def _probe(self, scale: float) -> ScaleSample:
        """What is detected at a scale in the whole image or, of a larger one, in some windows."""
        side = max(round(self.info["image_size"] / scale), 1)
        corners = tiling.busiest_windows(self.pixels, side, _SEARCH_WINDOWS)
        parts, area = [], 0
        for y, x in corners:
            part = self.pixels[y : y + side, x : x + side]
            area += part.shape[0] * part.shape[1]
            parts.append(self._detect_tiles(part, scale)[0])
        detections = RawDetections.concatenate(parts)
        return self._sample(detections, scale, area)

    def _sample(self, detections: RawDetections, scale: float, area: float) -> ScaleSample:
        wide, high = (detections.xyxy[:, 2:] - detections.xyxy[:, :2]).T.astype(np.float64)
        size = np.sqrt(np.maximum(wide * high, 1e-6)) * scale
        return ScaleSample(
            size, detections.labels, detections.scores.astype(np.float64), area * scale**2
        )

    def detect_at(self, choice: ScaleChoice, report: Report | None = None) -> RawDetections:
        """Everything above 0.01 at a scale, in image pixels, best first."""
        self.scale_choice = choice
        if self._first_pass is not None and self._first_pass[0] == choice:
            return self._first_pass[1]
        report = report or subprogress(self.report, 0.3, 0.9)
        detections, self.grid = self._detect_tiles(self.pixels, choice.scale, report)
        largest = scale_search.largest_size(self._sizes, 0.0)
        if len(self.grid.tiles) > 1 and self.tile < 2.5 * largest:
            self.notes.append(
                f"Tiles of {self.tile} pixels are small for objects of up to {largest:.0f} at the "
                "working resolution: large ones may be detected in pieces."
            )
        return detections

    def plan_grid(self, shape: tuple[int, int], scale: float) -> TileGrid:
        """Tiles of an image at a scale that overlap by more than nearly all objects."""
        largest = scale_search.largest_size(self._sizes, 0.25 * self.info["image_size"])
        overlap = min(round(1.5 * largest), self.tile // 2)
        return tiling.plan_tiles(shape, scale, self.tile, overlap)

    def _detect_tiles(
        self, pixels: Pixels, scale: float, report: Report | None = None
    ) -> tuple[RawDetections, TileGrid]:
        """What is in an image at a scale, in tiles that are halved until memory suffices."""
        while True:
            grid = self.plan_grid(pixels.shape[:2], scale)
            try:
                return self._run_grid(pixels, grid, report), grid
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Not in the handler: there the error still holds what was in memory.
            self._halve_tiles()

    def _halve_tiles(self) -> None:
        if self.tile < 2 * MIN_TILE:
            raise MemoryError(
                f"Memory of {describe_device(self.runner.device)} does not suffice even for tiles "
                f'of {self.tile} pixels; close other programs or use device="cpu".'
            )
        self.tile //= 2
        self.runner.free_memory()

    def _run_grid(self, pixels: Pixels, grid: TileGrid, report: Report | None) -> RawDetections:
        """All tiles of a grid, merged."""
        whole = len(grid.tiles) == 1 and pixels is self.pixels
        fit = self._cached.fits.get(grid.size) if whole else self.whole_fit
        notes: list[str] = []
        detections, fitted = self.runner.run(
            pixels,
            grid,
            fit,
            min_score=MIN_SCORE,
            iou=self.settings.iou,
            batch=self.settings.batch,
            notes=notes,
            report=report,
        )
        self.notes += [note for note in notes if note not in self.notes]
        if pixels is self.pixels:
            self.fit = fitted
        if whole:
            self._cached.fits[grid.size] = fitted
        return detections

    @property
    def whole_fit(self) -> StainFit:
        """The front end fitted to the whole image."""
        if self.fit is None:
            fits = self._cached.fits
            if "whole" not in fits:
                fits["whole"] = fit_stain(self.runner.network, fill_transparent(self.pixels))
            self.fit = fits["whole"]
        return self.fit

    def columns(self, detections: RawDetections) -> dict[str, npt.NDArray[np.float32]]:
        """Densities in boxes, by column name, and how far they are from training's, if known."""
        report_progress(self.report, 9, 10, "measuring densities")
        fit, r = self.whole_fit, self.runner.network.stain.components

        def read(rows: slice, columns: slice) -> IndexedColours:
            return fit.look_up(fill_transparent(self.pixels[rows, columns]))

        mean, total = measure_boxes(read, self.shape, r, detections.xyxy)
        columns = {
            f"{channel_name(k)} {what}": values[:, k]
            for k in range(r)
            for what, values in (("mean", mean), ("sum", total))
        }
        if seen := self.info.get("densities_seen"):
            columns[DOMAIN_SHIFT_COLUMN] = domain_shift_scores(
                seen, mean, detections.labels, self.info["classes"]
            )
            columns[AGREEMENT_COLUMN] = class_agreement(
                self.info,
                detections.xyxy,
                detections.labels,
                detections.scores,
                mean,
                self.shape,
            )
        return columns

    def run_report(self) -> dict[str, Any]:
        """How the detections came about."""
        scale, notes = self.scale_choice.scale, list(self.notes)
        if self.tile < self._requested_tile:
            notes.append(f"Memory did not suffice for larger tiles than {self.tile} pixels.")
        assert self.grid is not None
        return {
            "model": self.info.get("name", ""),
            "device": describe_device(self.runner.device),
            "scale": round(scale, 5),
            "object_size": None
            if self.typical_size is None
            else round(self.typical_size / scale, 2),
            "chosen": self.scale_choice.how,
            "tiles": len(self.grid.tiles),
            "tile_size": list(self.grid.size),
            "stain": summarize_stain(
                self.whole_fit, fill_transparent(subsample_pixels(self.pixels))
            ),
            "notes": notes,
        }
