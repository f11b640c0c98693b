"""Resumable tile-by-tile detection on whole slides, prioritised by the viewport.

The tiles, their resolution and how they are merged at their borders are those of
`Detector.detect`, so an image that fits into memory has the same detections either way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.detections import Detections, DetectionTiles, RawDetections
from napari_beerlanet.core.common.device import is_out_of_memory
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.rectangle import Focus, Rectangle
from napari_beerlanet.core.common.tile_store import TileRun
from napari_beerlanet.core.detection import tiling
from napari_beerlanet.core.detection.detector import Detector
from napari_beerlanet.core.detection.inference import BATCH_SIZES
from napari_beerlanet.core.detection.openvino_network import OpenVinoNetwork
from napari_beerlanet.core.detection.pipeline import (
    MIN_SCORE,
    DetectionPipeline,
    ImageCacheEntry,
)
from napari_beerlanet.core.detection.scale_search import ScaleChoice
from napari_beerlanet.core.detection.settings import DetectSettings, OpenVinoMode
from napari_beerlanet.core.detection.tiling import TileGrid
from napari_beerlanet.core.images import PixelSize
from napari_beerlanet.core.images.pyramid import as_levels
from napari_beerlanet.core.images.tissue import TissueMask, find_tissue
from napari_beerlanet.core.stains.front_end import (
    TileMixer,
    fit_from_arrays,
    fit_palette,
    fit_to_arrays,
    weights_digest,
)
from napari_beerlanet.core.stains.palette import Palette
from napari_beerlanet.core.stains.slide_pixels import (
    SlidePixels,
    palette_from_arrays,
    palette_to_arrays,
)

_DEFAULTS = DetectSettings()
_NO_DETECTIONS = RawDetections.concatenate([])


@dataclass(frozen=True)
class TileResult:
    """A tile that is done: boxes that it adds, and those that it shows to be cut or duplicates.

    `added` are the tile's boxes in pixels of the finest level; `removed` are boxes of earlier
    tiles that no longer count. `done` of `total` tiles.
    """

    tile: Rectangle
    added: RawDetections
    removed: RawDetections
    done: int
    total: int


class SlideDetection(TileRun[RawDetections]):
    """A model's run over one slide: prepared when made, then continued by `detect_tiles`."""

    def __init__(
        self,
        model: Detector,
        data: Any,
        *,
        iou: float = _DEFAULTS.iou,
        object_size: float | Literal["auto"] = _DEFAULTS.object_size,
        tile: int | Literal["auto"] = _DEFAULTS.tile,
        batch: int | Literal["auto"] = _DEFAULTS.batch,
        pixel_size: PixelSize | None = None,
        size_hint: float | None = None,
        skip_glass: bool = _DEFAULTS.skip_glass,
        openvino: OpenVinoMode = _DEFAULTS.openvino,
        tissue: TissueMask | None = None,
        palette: Palette | None = None,
        results: Path | None = None,
        source: dict[str, Any] | None = None,
        report: Report | None = None,
    ) -> None:
        """As for `Detector.detect`, and:

        `data`: a lazy image or its pyramid. `palette`: the slide's colours where they have been
        counted. `results`: the file to write to tile by tile and to resume from, for which `source`
        identifies the slide's file (see `storage.file_stamp`). A file of another run is replaced,
        and `changed` lists in words what differs.
        """
        self.settings = DetectSettings(
            iou=iou,
            object_size=object_size,
            tile=tile,
            batch=batch,
            pixel_size=pixel_size,
            skip_glass=skip_glass,
            openvino=openvino,
        )
        self.model, self.levels = model, as_levels(data)
        self.pixels: Any = SlidePixels(self.levels)
        self._report = report
        if skip_glass and tissue is None:
            report_progress(report, 0, 100, "finding tissue")
            tissue = find_tissue(self.levels)
        self.tissue = tissue if skip_glass else None
        self._identity = {
            "model": weights_digest(model.network),
            "source": source or {},
            "shape": list(self.pixels.shape),
            "object_size": object_size,
            "tile": tile,
            "pixel_size": pixel_size,
            "iou": iou,
        }
        self._palette: dict[str, npt.NDArray[Any]] = {}
        earlier, self.changed = DetectionTiles.resume_or_explain(results, self._identity)
        self._pipeline = self._prepare(earlier, palette, size_hint)
        choice = self._pipeline.scale_choice
        self.grid: TileGrid = self._pipeline.plan_grid(self._pipeline.shape, choice.scale)
        """All tiles, also those of background; fixed from here on, and for runs that resume."""
        self._pipeline.grid = self.grid
        self._store = earlier or self._create_store(results)
        self._pipeline.notes += self._store.notes
        self._front_end = TileMixer(self._pipeline.whole_fit)
        # What is no duplicate so far, of each tile; exact only at the end.
        self._alive = {number: np.ones(len(f), bool) for number, f in self._store.tiles.items()}

    @cached_property
    def tiles(self) -> list[int]:
        """Numbers of the tiles to run: those with tissue."""
        if self.tissue is None:
            return list(range(len(self.grid.tiles)))
        return [k for k, tile in enumerate(self.grid.tiles) if self.tissue.has_tissue(tile)]

    def detect_tiles(
        self, focus: Focus = None, order: list[int] | None = None, report: Report | None = None
    ) -> Iterator[TileResult]:
        """Run the tiles that are not done: nearest to `focus` (y, x) first, or in `order`.

        A `focus` that is a function is called again before each tile.
        """
        size = self.settings.batch
        if size == "auto":
            size = BATCH_SIZES.get(self._pipeline.runner.device.type, 1)
        with closing(self._run_tiles(focus, order, size, "finding cells", report)) as steps:
            for number, _, done, total in steps:
                added, removed = self._merge_tile(number)
                yield TileResult(self.grid.tiles[number], added, removed, done, total)

    def detections(
        self, confidence: float = _DEFAULTS.confidence, densities: bool = False
    ) -> Detections:
        """All detections so far, as `Detector.detect` would give them."""
        tiles, pipeline = self._store.tiles, self._pipeline
        if len(self.grid.tiles) == 1 and tiles:
            raw = tiles[0]
            if pipeline.fit is None:  # resumed; stains are fitted to what the network is shown
                pipeline.detect_at(pipeline.scale_choice)
        else:
            parts = [tiles.get(k, _NO_DETECTIONS) for k in range(len(self.grid.tiles))]
            raw = pipeline.runner.merge_tiles(parts, self.grid, self.settings.iou)
        run_report = pipeline.run_report(raw)
        run_report |= {"tiles": len(self.grid.tiles), "tiles_looked_at": len(tiles)}
        result = Detections(
            raw.xyxy,
            raw.labels,
            raw.scores,
            self.model.classes,
            image_shape=pipeline.shape,
            pixel_size=self.settings.pixel_size_yx,
            report=run_report,
            columns=pipeline.columns(raw) if densities else {},
        )
        return result.above(confidence)

    def _prepare(
        self, earlier: DetectionTiles | None, palette: Palette | None, size_hint: float | None
    ) -> DetectionPipeline:
        """Resolution, stain and tiles: from an earlier run's results, or found now."""
        cached, info, runner = ImageCacheEntry(), self.model.info, self.model.runner
        normalizer = runner.network.normalizer
        notes = list(self.model.notes)
        if earlier is None:
            palette = palette or self.pixels.palette(subprogress(self._report, 0.0, 0.8))
        if normalizer is not None:
            if earlier is not None:
                palette = palette_from_arrays(earlier.arrays)
            assert palette is not None
            self._palette = palette_to_arrays(palette)
            self.pixels, palette, colour_map = self.pixels.normalized(normalizer, palette)
            notes += colour_map.notes
        if earlier is not None:
            cached.fits["whole"] = fit_from_arrays(earlier.arrays)
        else:
            assert palette is not None
            cached.fits["whole"] = fit_palette(runner.network, palette)
        rest, settings = subprogress(self._report, 0.8, 1.0), self.settings
        if earlier is not None:  # its tiles may be those of another device, or of less memory
            settings = settings.replace(tile=earlier.header["tile"])
        pipeline = DetectionPipeline(
            runner, info, self.pixels, settings, rest, cached, size_hint, wait=True
        )
        if earlier is not None:
            pipeline.scale_choice = ScaleChoice(*earlier.header["choice"])
            pipeline.notes += earlier.header["notes"]
        else:
            pipeline.notes += notes
            pipeline.scale_choice = pipeline.choose_scale()
        return pipeline

    def _create_store(self, results: Path | None) -> DetectionTiles:
        choice = self._pipeline.scale_choice
        header = {
            "identity": self._identity,
            "choice": [choice.scale, choice.how],
            "tile": self._pipeline.tile,
            "name": self.model.info.get("name", ""),
            "wanted": len(self.tiles),
            "notes": self._pipeline.notes,
        }
        arrays = fit_to_arrays(self._pipeline.whole_fit) | self._palette
        return DetectionTiles.create_or_hold(results, header, arrays)

    def _centres(self) -> npt.NDArray[np.float64]:
        return tile_centres(self.grid)

    def _read_tiles(self, numbers: list[int]) -> list[npt.NDArray[np.uint8]]:
        if len(self.grid.tiles) == 1:
            return []  # what is shown whole is read, and its stain fitted, in the run
        tiles = [self.grid.tiles[k] for k in numbers]
        return [tiling.read_tile(self.pixels, tile, self.grid.size) for tile in tiles]

    def _infer(
        self, pixels: list[npt.NDArray[np.uint8]], numbers: list[int]
    ) -> list[RawDetections]:
        pipeline = self._pipeline
        if len(self.grid.tiles) == 1:
            return [pipeline.detect_at(pipeline.scale_choice)]
        runner = pipeline.runner
        try:
            return self._infer_tiles(pixels, numbers)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        runner.free_memory()
        parts = zip(pixels, numbers, strict=True)
        return [raw for p, k in parts for raw in self._infer_alone([p], [k])]

    def _infer_alone(
        self, pixels: list[npt.NDArray[np.uint8]], numbers: list[int]
    ) -> list[RawDetections]:
        """A tile for which memory did not suffice: by itself, or on the CPU."""
        pipeline = self._pipeline
        try:
            return self._infer_tiles(pixels, numbers)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        pipeline.runner.free_memory()
        if pipeline.move_to_cpu(f"tiles of {pipeline.tile} pixels"):
            del self._openvino  # the CPU may have it
            return self._infer_tiles(pixels, numbers)
        raise MemoryError(f"Memory does not suffice for tiles of {pipeline.tile} pixels; set tile.")

    def _infer_tiles(
        self, pixels: list[npt.NDArray[np.uint8]], numbers: list[int]
    ) -> list[RawDetections]:
        return self._pipeline.runner.infer_tiles(
            pixels,
            [self.grid.tiles[k] for k in numbers],
            self.grid,
            self._front_end,
            min_score=MIN_SCORE,
            iou=self.settings.iou,
            openvino=self._openvino,
        )

    @cached_property
    def _openvino(self) -> OpenVinoNetwork | None:
        """What runs the tiles, chosen with the first of them as `detect` does."""
        pipeline = self._pipeline
        chosen = pipeline.openvino_for(self.pixels, self.grid, self._front_end)
        pipeline.used_openvino = chosen
        return chosen

    def _merge_tile(self, number: int) -> tuple[RawDetections, RawDetections]:
        """Boxes that a tile adds to its neighbours', and those of theirs that it replaces."""
        tiles = self._store.tiles
        self._alive[number] = np.ones(len(tiles[number]), bool)
        near = self.grid.overlapping(number)
        grid = replace(self.grid, tiles=[self.grid.tiles[k] for k in near])
        here = [k for k in near if k in tiles]
        alive = [np.flatnonzero(self._alive[k]) for k in here]
        boxes = RawDetections.concatenate([tiles[k][a] for k, a in zip(here, alive, strict=True)])
        owner = np.repeat([near.index(k) for k in here], [len(a) for a in alive])
        stays = np.zeros(len(boxes), bool)
        iou = self.settings.iou
        stays[tiling.merge_tiles(grid, boxes.xyxy, boxes.scores, boxes.labels, owner, iou)] = True
        ends = np.cumsum([len(a) for a in alive])[:-1]
        for k, rows, stay in zip(here, alive, np.split(stays, ends), strict=True):
            self._alive[k][rows[~stay]] = False
        mine = owner == near.index(number)
        return boxes[mine & stays], boxes[~mine & ~stays]


def detect_slide(
    model: Detector,
    data: Any,
    confidence: float = _DEFAULTS.confidence,
    *,
    focus: Focus = None,
    densities: bool = _DEFAULTS.densities,
    report: Report | None = None,
    **settings: Any,
) -> Detections:
    """All objects of a slide; `settings` as for `SlideDetection`."""
    with SlideDetection(model, data, report=subprogress(report, 0.0, 0.2), **settings) as run:
        for _ in run.detect_tiles(focus, report=subprogress(report, 0.2, 0.95)):
            pass
        detections = run.detections(confidence, densities)
    report_progress(report, 1, 1, "done")
    return detections


def tile_centres(grid: TileGrid) -> npt.NDArray[np.float64]:
    """(n, 2): y and x of the middle of each tile."""
    first = grid.tiles[0]
    corners = np.array([(tile.y, tile.x) for tile in grid.tiles], np.float64)
    return np.asarray(corners + np.array([first.height / 2, first.width / 2]))
