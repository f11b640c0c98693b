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
from napari_beerlanet.core.common.messages import quoted
from napari_beerlanet.core.common.progress import (
    Report,
    WorkProgress,
    renamed,
    report_progress,
    subprogress,
)
from napari_beerlanet.core.common.storage import pixel_hash
from napari_beerlanet.core.detection import scale_search, tiling
from napari_beerlanet.core.detection.inference import InferenceRunner, on_cpu
from napari_beerlanet.core.detection.object_sizes import (
    TrainingSizes,
    largest_size,
    reference_size,
)
from napari_beerlanet.core.detection.openvino_network import OpenVinoNetwork
from napari_beerlanet.core.detection.scale_search import (
    MAX_MAGNIFICATION,
    ScaleChoice,
    ScaleSample,
)
from napari_beerlanet.core.detection.settings import (
    MIN_TILE,
    PLAUSIBLE_OBJECT_SIZES,
    DetectSettings,
)
from napari_beerlanet.core.detection.stain_statistics import (
    IndexedColours,
    class_agreement,
    domain_shift_scores,
    measure_boxes,
)
from napari_beerlanet.core.detection.tiling import TileGrid
from napari_beerlanet.core.images.rgb import fill_transparent
from napari_beerlanet.core.stains.domain_shift import subsample_pixels, summarize_stain
from napari_beerlanet.core.stains.front_end import StainFit, TileMixer, fit_stain

Pixels = npt.NDArray[np.uint8]

MIN_SCORE = 0.01
"""Score below which nothing is kept at all."""

_DEFAULT_TILE = {"cpu": 1024, "mps": 1280, "cuda": 1280}
_MAX_AUTO_TILE = 2048  # whatever images a model was trained with
_SEARCH_WINDOWS = 3  # of a large image that are looked at for its objects' size, at most
_ENOUGH_CONFIDENT = 12  # detections in the windows so far: no other one is needed
# An image of at most so many times the work of a training image is looked at whole: then it need
# not be run again if the scale was right, so this is more where that is likely.
_WHOLE_IF, _WHOLE_IF_LIKELY = 1.5, 4.0
_DOUBT = 0.3  # how often a likely scale turns out not to be right


@dataclass(frozen=True)
class NetworkPass:
    """What was detected in an image at one scale: in which tiles, with which stain fit, by what."""

    detections: RawDetections
    grid: TileGrid
    fit: StainFit
    openvino: OpenVinoNetwork | None


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
        size_hint: float | None = None,
        wait: bool = False,
    ) -> None:
        """`wait`: for OpenVINO, if it is being prepared."""
        self.runner, self.info, self.pixels = runner, info, pixels
        self.settings, self.report, self._size_hint = settings, report, check_size_hint(size_hint)
        self._cached = cached or ImageCacheEntry()
        self.notes = list(runner.notes)
        self.openvino = runner.openvino(settings.openvino, self.notes, wait=wait)
        self.used_openvino = self.openvino  # for the tiles of the last run
        self.tile = self._requested_tile = self._tile_side()
        self.shape: tuple[int, int] = pixels.shape[:2]
        self._sizes: dict[str, dict[str, float]] = info.get("object_sizes") or {}
        self.training_sizes = TrainingSizes.of(self._sizes, info["classes"])
        self.typical_size = reference_size(info)
        self.scale_choice = ScaleChoice(1.0, "")
        self.grid: TileGrid | None = None
        self.fit: StainFit | None = None
        self._passes: dict[float, NetworkPass] = {}  # of the whole image, by scale
        self._work = WorkProgress(subprogress(report, 0.0, 0.9))

    def _tile_side(self) -> int:
        if self.settings.tile != "auto":
            return self.settings.tile
        side = _DEFAULT_TILE.get(self.runner.device.type, _DEFAULT_TILE["cpu"])
        return max(side, min(int(self.info["image_size"]), _MAX_AUTO_TILE))

    def choose_scale(self) -> ScaleChoice:
        """The working resolution.

        A hint is no part of the cache's key: it only tells where to look first.
        """
        settings = self.settings
        how = self.runner.describe(self.openvino)
        key = (settings.object_size, settings.pixel_size_yx, settings.iou, self.tile, how)
        cached = self._cached.choices.get(key)
        if cached is not None:
            choice, self._passes, notes = cached
            self.notes += notes
            return choice  # type: ignore[no-any-return]
        told = len(self.notes)
        choice = self._find_scale()
        if self.tile == self._requested_tile:  # memory sufficed
            passes = {scale: one for scale, one in self._passes.items() if scale == choice.scale}
            self._cached.choices[key] = choice, passes, self.notes[told:]
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
        home = min(self.info["image_size"] / max(self.shape), MAX_MAGNIFICATION)
        if self.typical_size is None:
            self.notes.append("The model stores no object sizes; the image was shown whole.")
            return ScaleChoice(home, "as in training")
        return self._search_scale(home, self.typical_size)

    def _is_plausible(self, scale: float) -> bool:
        """Whether objects would be of a size that images of them have; adds a note if not."""
        size = (self.typical_size or 0.125 * self.info["image_size"]) / scale
        if PLAUSIBLE_OBJECT_SIZES[0] <= size <= PLAUSIBLE_OBJECT_SIZES[1]:
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
        scale = self.typical_size / object_size
        if scale > MAX_MAGNIFICATION:
            raise ValueError(
                f"Objects of {object_size:g} pixels would have to be enlarged {scale:.0f} times to "
                f"be as large as in training, {MAX_MAGNIFICATION:.0f} times are possible; use "
                "images of a higher resolution."
            )
        return ScaleChoice(scale, "as asked for")

    def _search_scale(self, home: float, typical: float) -> ScaleChoice:
        """The scale at which objects have the sizes of training, where images were at `home`."""
        in_vain = False

        def look(scale: float, likely: bool) -> ScaleSample:
            nonlocal in_vain
            message = "" if likely else "looking for the cell size"
            if in_vain or (scale >= home and not likely):
                message = "looking at another resolution"  # why the time left has grown
            in_vain = in_vain or likely  # if the search has not ended
            return self._look(scale, likely, max(2 * scale, home), message)

        found = scale_search.search_scale(
            look,
            scale_search.candidate_scales(typical, self.shape, home),
            home,
            self.training_sizes,
            None if self._size_hint is None else typical / self._size_hint,
        )
        if found is None:
            self.notes.append(
                "No confident detection at any resolution; set the cell size (object_size) in "
                "pixels."
            )
        return found or ScaleChoice(home, "as in training")

    def _look(self, scale: float, likely: bool, following: float, message: str) -> ScaleSample:
        """What is detected at a scale: in the whole image if that is little work, or in windows.

        If this scale is not likely, the whole image will probably be run at the `following` one.
        The report says `message`, or else what the network does.
        """
        window, work = float(self.info["image_size"]) ** 2, self._work_at(scale)
        following_work = work if likely else self._work_at(following)
        if work <= window * (_WHOLE_IF_LIKELY if likely else _WHOLE_IF):
            following_work *= _DOUBT if likely else 1.0
            report = self._work.step(work, work + following_work)
            return self._look_at_all(scale, renamed(report, message))
        side = max(round(self.info["image_size"] / scale), 1)
        parts, area = [], 0
        for y, x in tiling.busiest_windows(self.pixels, side, _SEARCH_WINDOWS):
            part = self.pixels[y : y + side, x : x + side]
            area += part.shape[0] * part.shape[1]
            if not tiling.is_empty(part, scale):
                report = self._work.step(window, window + following_work)
                parts.append(self._detect_tiles(part, scale, renamed(report, message)).detections)
            if sum(_count_confident(found) for found in parts) >= _ENOUGH_CONFIDENT:
                break
        return self._sample(RawDetections.concatenate(parts), scale, area)

    def _look_at_all(self, scale: float, report: Report | None) -> ScaleSample:
        """What is detected at a scale in the whole image; kept, in case the scale is right."""
        detections = RawDetections.concatenate([])
        if not tiling.is_empty(self.pixels, scale):
            self._passes[scale] = self._detect_tiles(self.pixels, scale, report)
            detections = self._passes[scale].detections
        return self._sample(detections, scale, math.prod(self.shape), whole=True)

    def _sample(
        self, detections: RawDetections, scale: float, area: float, whole: bool = False
    ) -> ScaleSample:
        wide, high = (detections.xyxy[:, 2:] - detections.xyxy[:, :2]).T.astype(np.float64)
        size = np.sqrt(np.maximum(wide * high, 1e-6)) * scale
        scores = detections.scores.astype(np.float64)
        return ScaleSample(size, detections.labels, scores, area * scale**2, whole)

    def _work_at(self, scale: float) -> float:
        """Working pixels of the whole image at a scale."""
        return math.prod(self.shape) * scale**2

    def detect_at(self, choice: ScaleChoice) -> RawDetections:
        """Everything above 0.01 at a scale, in image pixels, best first."""
        self.scale_choice = choice
        done = self._passes.get(choice.scale)
        if done is None:
            done = self._detect_tiles(self.pixels, choice.scale, self._work.step(1, 1))
        self.grid, self.fit, self.used_openvino = done.grid, done.fit, done.openvino
        largest = largest_size(self._sizes, 0.0)
        if len(self.grid.tiles) > 1 and self.tile < 2.5 * largest:
            self.notes.append(
                f"Tiles of {self.tile} pixels are small for objects of up to {largest:.0f} at the "
                "working resolution: large ones may be detected in pieces."
            )
        return done.detections

    def plan_grid(self, shape: tuple[int, int], scale: float) -> TileGrid:
        """Tiles of an image at a scale that overlap by more than nearly all objects."""
        largest = largest_size(self._sizes, 0.25 * self.info["image_size"])
        overlap = min(round(1.5 * largest), self.tile // 2)
        return tiling.plan_tiles(shape, scale, self.tile, overlap)

    def _detect_tiles(self, pixels: Pixels, scale: float, report: Report | None) -> NetworkPass:
        """What is in an image at a scale, in tiles that are halved until memory suffices."""
        while True:
            grid = self.plan_grid(pixels.shape[:2], scale)
            try:
                return self._run_grid(pixels, grid, report)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
            # Not in the handler: there the error still holds what was in memory.
            self._halve_tiles()

    def _halve_tiles(self) -> None:
        """Smaller tiles, and after the smallest the CPU."""
        self.runner.free_memory()
        if self.tile >= 2 * MIN_TILE:
            self.tile //= 2
        elif self.move_to_cpu(f"tiles of {self.tile} pixels"):
            self.tile = self._requested_tile = self._tile_side()
        else:
            raise MemoryError(
                f"Memory of {describe_device(self.runner.device)} does not suffice even for tiles "
                f"of {self.tile} pixels; close other programs or use a smaller image."
            )

    def move_to_cpu(self, what: str) -> bool:
        """Have the CPU do the rest, as the device's memory does not suffice for `what`.

        False if it does already. The detector keeps its device, and tries it again for the next
        image.
        """
        if self.runner.device.type == "cpu":
            return False
        self.runner = on_cpu(self.runner.source, self.runner.device, what)
        self.notes += self.runner.notes
        self.openvino = self.runner.openvino(self.settings.openvino, self.notes)
        return True

    def _run_grid(self, pixels: Pixels, grid: TileGrid, report: Report | None) -> NetworkPass:
        """All tiles of a grid, merged."""
        notes: list[str] = []
        shown_whole = len(grid.tiles) == 1 and pixels is self.pixels
        known = self._cached.fits.get(grid.size) if shown_whole else self._fit_for(pixels)
        openvino = self.openvino if known is None else self.openvino_for(pixels, grid, known)
        detections, fit = self.runner.run(
            pixels,
            grid,
            known,
            min_score=MIN_SCORE,
            iou=self.settings.iou,
            batch=self.settings.batch,
            notes=notes,
            openvino=openvino,
            report=report,
        )
        self.notes += [note for note in notes if note not in self.notes]
        if shown_whole:
            self._cached.fits[grid.size] = fit
        return NetworkPass(detections, grid, fit, openvino)

    def openvino_for(
        self, pixels: Any, grid: TileGrid, fit: StainFit | TileMixer
    ) -> OpenVinoNetwork | None:
        """What runs the tiles of a grid: of many, a faster number format if boxes are the same."""
        mode, iou = self.settings.openvino, self.settings.iou
        return self.runner.round_if_same(self.openvino, mode, pixels, grid, fit, iou)

    def _fit_for(self, pixels: Pixels) -> StainFit:
        """The front end for tiles of the image, or for a window of it: there any fit will do."""
        if pixels is not self.pixels and self._passes:
            return next(reversed(self._passes.values())).fit
        return self._full_fit()

    def _full_fit(self) -> StainFit:
        """The front end fitted to all pixels of the image."""
        fits = self._cached.fits
        if "whole" not in fits:
            try:
                fits["whole"] = fit_stain(self.runner.network, fill_transparent(self.pixels))
            except MemoryError:
                self.notes.append(
                    "Memory did not suffice to count the colours of all pixels; stains were fitted "
                    "to a sample of them."
                )
        if "whole" not in fits:
            sample = fill_transparent(subsample_pixels(self.pixels))
            fits["whole"] = fit_stain(self.runner.network, sample)
        return fits["whole"]

    @property
    def whole_fit(self) -> StainFit:
        """The front end fitted to the whole image, as it was shown."""
        return self.fit or self._full_fit()

    def columns(self, detections: RawDetections) -> dict[str, npt.NDArray[np.float32]]:
        """Densities in boxes, by column name, and how far they are from training's, if known."""
        report_progress(self.report, 9, 10, "measuring densities")
        network = self.runner.network
        fit, r = self.whole_fit, network.measuring_stain.components

        def read(rows: slice, columns: slice) -> IndexedColours:
            return fit.look_up(fill_transparent(self.pixels[rows, columns]))

        mean, total = measure_boxes(read, self.shape, r, detections.xyxy)
        columns = {
            f"{channel_name(k)} {what}": values[:, k]
            for k in range(r if network.has_stain else 0)
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

    def _measured_size(self, found: RawDetections) -> float | None:
        """The size of the reference class in image pixels: as asked for, or as it is in the image.

        By the sizes of all classes, so that it does not depend on which of them are there.
        """
        if self.typical_size is None or self.settings.object_size != "auto":
            return self.typical_size and self.typical_size / self.scale_choice.scale
        scale = self.scale_choice.scale
        sample = self._sample(found, scale, 1.0)
        deviation = scale_search.size_deviation(sample, self.training_sizes) or 0.0
        return self.typical_size * math.exp(deviation) / scale

    def run_report(self, found: RawDetections) -> dict[str, Any]:
        """How the detections, all that were `found`, came about."""
        self.runner.tell_refusal(self.notes)
        scale, notes = self.scale_choice.scale, list(self.notes)
        if self.tile < self._requested_tile:
            notes.append(f"Memory did not suffice for larger tiles than {self.tile} pixels.")
        assert self.grid is not None
        size = self._measured_size(found)
        return {
            "model": self.info.get("name", ""),
            "device": self.runner.describe(self.used_openvino),
            "scale": round(scale, 5),
            "object_size": None if size is None else round(size, 2),
            "chosen": self.scale_choice.how,
            "tiles": len(self.grid.tiles),
            "tile_size": list(self.grid.size),
            "stain": summarize_stain(
                self.whole_fit, fill_transparent(subsample_pixels(self.pixels))
            ),
            "notes": notes,
        }


def _count_confident(detections: RawDetections) -> int:
    return int((detections.scores >= scale_search.CONFIDENT_SCORE).sum())


def check_size_hint(size: float | None) -> float | None:
    """A plausible object size in image pixels."""
    low, high = PLAUSIBLE_OBJECT_SIZES
    if size is not None and not low <= size <= high:
        raise ValueError(f"size_hint must be from {low:g} to {high:g} pixels, not {quoted(size)}.")
    return size
