"""Classification of a slide patch by patch: a map of probabilities, resumable, in any order.

Patches are squares that follow each other from the slide's corner on. Only those with tissue are
classified, in tiles of a few patches, nearest to the viewport first. What a patch is said to show
is what `Classifier.classify` says of it as a crop.
"""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes.regions import Region
from napari_beerlanet.core.classification.classifier import (
    BATCH_SIZES,
    Classification,
    Classifier,
    Scores,
)
from napari_beerlanet.core.classification.crops import Pixels
from napari_beerlanet.core.classification.settings import PatchSettings, StainSource
from napari_beerlanet.core.common.progress import Report, report_progress, subprogress
from napari_beerlanet.core.common.rectangle import Focus, Rectangle
from napari_beerlanet.core.common.storage import atomic_path, csv_cell
from napari_beerlanet.core.common.tile_store import TileRun, TileStore
from napari_beerlanet.core.images.pyramid import as_levels
from napari_beerlanet.core.images.rgb import PADDING_GREY
from napari_beerlanet.core.images.tissue import TissueMask, find_tissue
from napari_beerlanet.core.stains.front_end import (
    StainFit,
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

PATCH_SUFFIX = ".patches"
"""What the name of a file with the patches of a slide ends in."""

_DEFAULTS = PatchSettings()
_TILE = 4  # patches along a tile's side, at most: as many as a processor does in about a second
_TILE_PIXELS = 4096  # pixels of a tile's side, at most, if it has more than one patch
_SUBCELLS = 16  # along a patch's side, by which its part in a region is measured


@dataclass(frozen=True)
class RegionSummary:
    """What a region of a slide shows.

    `means` and `fractions` are by class: the mean probability of the patches in the region, and the
    part of them whose probability is at least the threshold; each patch counts by its part in the
    region, and both are NaN where none was classified. `patches` is how many patches that is,
    `classified` the part of the region's own area that they cover.
    """

    means: dict[str, float]
    fractions: dict[str, float]
    patches: float
    classified: float


@dataclass(frozen=True, eq=False)
class PatchMap:
    """Probabilities of the classes for each patch of a slide.

    `scores` (rows, columns, k) float32, NaN where a patch was not classified. Cell (i, j) covers
    rows i · cell … (i + 1) · cell and columns j · cell … of the slide, whose size is `shape`
    (H, W); those of the last row and column may reach beyond it. The patch that was classified is
    centred on its cell, `patch` pixels wide: as wide as the cell, or wider where `step` is less.
    """

    scores: Scores
    names: list[str]
    patch: int
    shape: tuple[int, int]
    pixel_size: tuple[float, float] | None = None
    report: dict[str, Any] = field(default_factory=dict, repr=False)
    step: int | None = None

    @property
    def cell(self) -> int:
        """Side of a cell of the map in pixels: the distance between patches."""
        return self.step or self.patch

    @property
    def classified(self) -> npt.NDArray[np.bool_]:
        """(rows, columns): which patches have probabilities."""
        return np.isfinite(self.scores[..., 0])

    def table(self) -> dict[str, npt.NDArray[Any]]:
        """Columns (n,) by name, of the patches that were classified, row by row."""
        rows, columns = np.nonzero(self.classified)
        scores = self.scores[rows, columns]
        height, width = self.shape
        x, y = (
            place * self.cell + patch_offset(self.patch, self.cell) for place in (columns, rows)
        )
        places = {
            "row": rows,
            "column": columns,
            "x1": np.maximum(x, 0),
            "y1": np.maximum(y, 0),
            "x2": np.minimum(x + self.patch, width),
            "y2": np.minimum(y + self.patch, height),
        }
        labels = scores.argmax(1) if len(scores) else np.zeros(0, np.int64)
        return places | Classification(labels, scores, self.names).table()

    def region_summary(
        self, region: Region, threshold: float = _DEFAULTS.threshold
    ) -> RegionSummary:
        """Mean probabilities in a region (x, y in pixels of the slide), and parts above."""
        weights, inside = self._weights(region)
        weights = np.where(self.classified, weights, 0.0)
        total = float(weights.sum())
        scores = np.where(self.classified[..., None], self.scores, 0).astype(np.float64)
        above = (scores >= threshold) & self.classified[..., None]
        with np.errstate(invalid="ignore"):
            means = np.tensordot(weights, scores, 2) / np.float64(total)
            fractions = np.tensordot(weights, above.astype(np.float64), 2) / np.float64(total)
        return RegionSummary(
            dict(zip(self.names, means.tolist(), strict=True)),
            dict(zip(self.names, fractions.tolist(), strict=True)),
            total,
            total / inside if inside else 0.0,
        )

    def region_summaries(
        self,
        regions: Sequence[tuple[str, Region]],
        threshold: float = _DEFAULTS.threshold,
        report: Report | None = None,
    ) -> list[tuple[str, RegionSummary]]:
        """A summary of each named region."""
        summaries = []
        for done, (name, region) in enumerate(regions):
            report_progress(report, done, len(regions), "measuring regions")
            summaries.append((name, self.region_summary(region, threshold)))
        return summaries

    def _weights(self, region: Region) -> tuple[npt.NDArray[np.float64], float]:
        """(rows, columns) the part of each patch that lies in a region, and their sum."""
        rows, columns = self.scores.shape[:2]
        weights = np.zeros((rows, columns))
        step = self.cell / _SUBCELLS
        scaled = Region(region.kind, region.points / step)
        # Of the slide, not of its patches: what lies beyond the last pixel is no part of it.
        size = [math.ceil(length / step) for length in self.shape]
        window = scaled.window(size)
        if window is None:
            return weights, 0.0
        y, x = np.nonzero(scaled.mask(window))
        np.add.at(weights, ((y + window.y) // _SUBCELLS, (x + window.x) // _SUBCELLS), 1)
        weights /= _SUBCELLS**2
        return weights, float(weights.sum())

    def write_csv(self, path: Path) -> None:
        """One line per patch that was classified."""
        table = self.table()
        _write_table(path, list(table), zip(*table.values(), strict=True))

    def write_tiff(self, path: Path) -> None:
        """An OME-TIFF (k, rows, columns) float32; a pixel is a patch, NaN was not classified."""
        import tifffile

        facts: dict[str, Any] = {"axes": "CYX", "Channel": {"Name": self.names}}
        if self.pixel_size is not None:
            for axis, size in zip("YX", self.pixel_size, strict=True):
                facts[f"PhysicalSize{axis}"] = size * self.cell
                facts[f"PhysicalSize{axis}Unit"] = "µm"
        planes = np.ascontiguousarray(np.moveaxis(self.scores, 2, 0))
        with atomic_path(path) as unfinished:
            tifffile.imwrite(unfinished, planes, ome=True, metadata=facts, photometric="minisblack")


def write_region_table(path: Path, summaries: Sequence[tuple[str, RegionSummary]]) -> None:
    """One line per region: mean and part above the threshold of each class; empty: no patch."""
    names = list(summaries[0][1].means) if summaries else []
    header = ["region", "patches", "classified"]
    header += [f"{what}({name})" for what in ("mean", "above") for name in names]
    rows = (
        [name, one.patches, one.classified, *one.means.values(), *one.fractions.values()]
        for name, one in summaries
    )
    _write_table(path, header, rows)


def _write_table(path: Path, header: Sequence[str], rows: Iterable[Iterable[Any]]) -> None:
    """A CSV file; numbers with six decimals, nothing for NaN."""
    text = io.StringIO(newline="")
    writer = csv.writer(text)
    writer.writerow(map(csv_cell, header))
    for row in rows:
        writer.writerow([_cell_text(value) for value in row])
    with atomic_path(path) as unfinished:
        unfinished.write_text(text.getvalue(), encoding="utf-8", newline="")


def _cell_text(value: Any) -> Any:
    if not isinstance(value, (float, np.floating)):
        return csv_cell(value)
    return "" if math.isnan(value) else f"{value:.6f}"


@dataclass(frozen=True, eq=False)
class PatchTile:
    """A tile that is done: the rows and columns of its patches in the map, and their scores.

    `scores` (h, w, k) float32, NaN where a patch has too little tissue. `done` of `total` tiles.
    """

    rows: slice
    columns: slice
    scores: Scores
    done: int
    total: int


class PatchTiles(TileStore[Scores]):
    """Probabilities of a slide's tiles of patches, in a file that a run resumes from."""

    @staticmethod
    def pack(result: Scores) -> bytes:
        """See `TileStore`."""
        return np.ascontiguousarray(result, "<f4").tobytes()

    @staticmethod
    def unpack(stored: bytes) -> Scores:
        """See `TileStore`; flat, as the file does not know the tile's shape."""
        return np.frombuffer(stored, "<f4").astype(np.float32)


class SlideClassification(TileRun[Scores]):
    """A classifier's run over one slide: prepared when made, then continued by `classify_tiles`."""

    def __init__(
        self,
        model: Classifier,
        data: Any,
        *,
        patch: int | Literal["auto"] = _DEFAULTS.patch,
        step: int | Literal["auto"] = _DEFAULTS.step,
        min_tissue: float = _DEFAULTS.min_tissue,
        fit: StainSource | None = None,
        tissue: TissueMask | None = None,
        palette: Palette | None = None,
        pixel_size: tuple[float, float] | None = None,
        results: Path | None = None,
        source: dict[str, Any] | None = None,
        report: Report | None = None,
    ) -> None:
        """Prepare a run.

        Parameters
        ----------
        data
            A lazy image or its pyramid.
        patch
            Side of a patch in pixels of the finest level.
        step
            Distance between patches, at most their side; "auto": side by side.
        min_tissue
            Part of a patch that must be tissue; 0 classifies all.
        fit
            Where stains are fitted: in each patch ("crop") or in the whole slide ("image"); None is
            as in training.
        palette
            The slide's colours where they have been counted.
        results
            The file to write to tile by tile and to resume from, for which `source` identifies the
            slide's file (see `storage.file_stamp`). A file of another run is replaced, and
            `changed` lists in words what differs.
        """
        self.settings = PatchSettings(patch=patch, step=step, min_tissue=min_tissue)
        self.model, self.levels = model, as_levels(data)
        self._pixels = SlidePixels(self.levels)
        self.patch = default_patch(model.info) if patch == "auto" else int(patch)
        self.step = self.patch if step == "auto" else int(step)
        if self.step > self.patch:
            raise ValueError(
                f"step is {self.step} pixels, and patches are {self.patch} wide: what lies between "
                "them would not be seen; set step to that or less."
            )
        self._tile = max(min(_TILE, _TILE_PIXELS // self.step), 1)  # patches along its side
        self._fit: StainSource = fit or model.network.settings.fit
        identity = self._identity(source)
        self.wanted = self._find_wanted(tissue, report)
        """(rows, columns) which patches are classified."""
        earlier, self.changed = PatchTiles.resume_or_explain(results, identity)
        self._front: StainFit | None = None
        self._notes: list[str] = []  # on stains, memory that did not suffice, the file of results
        self._palette: dict[str, npt.NDArray[Any]] = {}
        self._prepare_stains(earlier, palette, report)
        self._store = earlier or self._create_store(results, identity, report)
        self._notes += self._store.notes
        self.map = self._empty_map(pixel_size)
        """What is known so far; its scores are written to as tiles are done."""
        for number, flat in self._store.tiles.items():
            self._place(number, flat)

    def _identity(self, source: dict[str, Any] | None) -> dict[str, Any]:
        """What makes the results of two runs the same."""
        model = self.model
        return {
            "model": [
                weights_digest(model.network),
                model.network.settings.record(),
                float(model.info.get("temperature") or 1),
                model.info.get("prior"),
            ],
            "source": source or {},
            "shape": list(self._pixels.shape[:2]),
            "patch": self.patch,
            "fit": self._fit,
            "min_tissue": self.settings.min_tissue,
            "step": None if self.step == self.patch else self.step,
        }

    def _find_wanted(
        self, tissue: TissueMask | None, report: Report | None
    ) -> npt.NDArray[np.bool_]:
        """(rows, columns) which patches have enough tissue."""
        rows, columns = (-(-length // self.step) for length in self._pixels.shape[:2])
        if self.settings.min_tissue <= 0:
            return np.ones((rows, columns), bool)
        if tissue is None:
            report_progress(report, 0, 100, "finding tissue")
            tissue = find_tissue(self.levels)
        fractions = tissue.fractions(self.step, (rows, columns))
        return np.asarray(fractions >= self.settings.min_tissue)

    def _prepare_stains(
        self, earlier: PatchTiles | None, palette: Palette | None, report: Report | None
    ) -> None:
        """Normalize the slide and fit its stains, where the model does; as an `earlier` run did."""
        network, counting = self.model.network, subprogress(report, 0.0, 0.8)
        if network.normalizer is not None:
            if earlier is not None:
                palette = palette_from_arrays(earlier.arrays)
            palette = palette or self._pixels.palette(counting)
            self._palette = palette_to_arrays(palette)
            normalized = self._pixels.normalized(network.normalizer, palette)
            self._pixels, palette, colour_map = normalized
            self._notes += colour_map.notes
        if network.fits_images and self._fit == "image":
            if earlier is not None:
                self._front = fit_from_arrays(earlier.arrays)
            else:
                self._front = fit_palette(network, palette or self._pixels.palette(counting))

    def _empty_map(self, pixel_size: tuple[float, float] | None) -> PatchMap:
        facts = {
            "model": self.model.info.get("name", ""),
            "fit": self._fit,
            "patch": self.patch,
            "warnings": self._store.header["warnings"],
            "notes": self._notes,
        }
        names = self.model.classes
        scores = np.full((*self.wanted.shape, len(names)), np.nan, np.float32)
        shape = self._pixels.shape[:2]
        return PatchMap(scores, names, self.patch, shape, pixel_size, facts, self.step)

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of tiles."""
        rows, columns = self.wanted.shape
        return -(-rows // self._tile), -(-columns // self._tile)

    @cached_property
    def tiles(self) -> list[int]:
        """Numbers of the tiles to run, row by row: those with a patch that is classified."""
        down, across = self.grid
        return [k for k in range(down * across) if self.wanted[self._slices(k)].any()]

    def classify_tiles(
        self, focus: Focus = None, order: Sequence[int] | None = None, report: Report | None = None
    ) -> Iterator[PatchTile]:
        """Run the tiles that are not done: nearest to `focus` (y, x) first, or in `order`.

        A `focus` that is a function is called again before each batch of tiles.
        """
        count = max(BATCH_SIZES.get(self.model.device.type, 0) // self._tile**2, 1)
        with closing(self._run_tiles(focus, order, count, "classifying patches", report)) as steps:
            for number, scores, done, total in steps:
                self._place(number, scores)
                yield PatchTile(*self._slices(number), scores, done, total)

    def read_patch(self, row: int, column: int) -> Pixels:
        """The pixels (patch, patch, 3) of a patch; beyond the slide is padding."""
        return self._read_patches(row, column, np.ones((1, 1), bool))[0]

    # --- tiles ------------------------------------------------------------------------------------

    def _slices(self, number: int) -> tuple[slice, slice]:
        """Rows and columns of a tile's patches."""
        rows, columns = self.wanted.shape
        side, (i, j) = self._tile, divmod(number, self.grid[1])
        down = slice(i * side, min((i + 1) * side, rows))
        return down, slice(j * side, min((j + 1) * side, columns))

    def _centres(self) -> npt.NDArray[np.float64]:
        """(n, 2): y and x of the middle of each tile in pixels."""
        middles = (np.indices(self.grid) + 0.5) * (self._tile * self.step)
        return np.asarray(middles.reshape(2, -1).T)

    def _infer(self, pixels: list[Pixels], numbers: list[int]) -> list[Scores]:
        """Scores (h, w, k) of each tile from the crops of its patches, NaN without tissue."""
        notes: list[str] = []
        scores = self.model.score_crops(np.concatenate(pixels), self._front, notes)
        self._notes += [note for note in notes if note not in self._notes]
        ends = np.cumsum([len(part) for part in pixels])[:-1]
        tiles = []
        for number, part in zip(numbers, np.split(scores, ends), strict=True):
            wanted = self.wanted[self._slices(number)]
            tile = np.full((*wanted.shape, part.shape[1]), np.nan, np.float32)
            tile[wanted] = part
            tiles.append(tile)
        return tiles

    def _place(self, number: int, scores: Scores) -> None:
        part = self.map.scores[self._slices(number)]
        part[:] = scores.reshape(part.shape)

    def _read_tiles(self, numbers: list[int]) -> list[Pixels]:
        """Crops of the patches with tissue in each tile."""
        crops = []
        for number in numbers:
            rows, columns = self._slices(number)
            patches = self._read_patches(rows.start, columns.start, self.wanted[rows, columns])
            crops.append(self.model.prepare_crops(patches))
        return crops

    def _read_patches(self, row: int, column: int, wanted: npt.NDArray[np.bool_]) -> list[Pixels]:
        """Pixels of the patches that are wanted (h, w), the first of which is (row, column)."""
        side, (height, width) = self.patch, self.map_shape
        i, j = np.nonzero(wanted)
        if not len(i):
            return []
        offset = patch_offset(side, self.step)
        y, x = (row + i) * self.step + offset, (column + j) * self.step + offset
        # No more than what is wanted is read, and that at once: a chunk is decoded once.
        top, left = max(int(y.min()), 0), max(int(x.min()), 0)
        bottom, right = min(int(y.max()) + side, height), min(int(x.max()) + side, width)
        pixels = self._pixels[Rectangle.from_edges(left, top, right, bottom).slices]
        patches = []
        for y1, x1 in zip(y.tolist(), x.tolist(), strict=True):
            above, before = max(-y1, 0), max(-x1, 0)  # beyond the slide
            part = pixels[y1 + above - top : y1 + side - top, x1 + before - left : x1 + side - left]
            if part.shape[:2] != (side, side):
                whole = np.full((side, side, 3), PADDING_GREY, np.uint8)
                whole[above : above + part.shape[0], before : before + part.shape[1]] = part
                part = whole
            patches.append(np.ascontiguousarray(part))
        return patches

    @property
    def map_shape(self) -> tuple[int, int]:
        """(H, W) of the slide."""
        return self._pixels.shape[0], self._pixels.shape[1]

    def _create_store(
        self, results: Path | None, identity: dict[str, Any], report: Report | None
    ) -> PatchTiles:
        header = {
            "identity": identity,
            "name": self.model.info.get("name", ""),
            "classes": self.model.classes,
            "wanted": len(self.tiles),
            "warnings": self._domain_warnings(subprogress(report, 0.8, 1.0)),
        }
        arrays = {} if self._front is None else fit_to_arrays(self._front)
        arrays |= self._palette
        return PatchTiles.create_or_hold(results, header, arrays)

    def _domain_warnings(self, report: Report | None) -> list[str]:
        """In what the slide's stains differ from those of training, by some of its patches."""
        rows, columns = np.nonzero(self.wanted)
        report_progress(report, 0, 1, "comparing stains")

        def read(part: slice) -> Pixels:
            places = zip(rows[part].tolist(), columns[part].tolist(), strict=True)
            return self.model.prepare_crops([self.read_patch(*place) for place in places])

        return self.model.domain_warnings(read, len(rows))


def classify_slide(
    model: Classifier,
    data: Any,
    *,
    focus: Focus = None,
    report: Report | None = None,
    **settings: Any,
) -> PatchMap:
    """Probabilities of all patches of a slide; `settings` as for `SlideClassification`."""
    with SlideClassification(model, data, report=subprogress(report, 0.0, 0.1), **settings) as run:
        for _ in run.classify_tiles(focus, report=subprogress(report, 0.1, 1.0)):
            pass
    report_progress(report, 1, 1, "done")
    return run.map


def patch_offset(patch: int, step: int) -> int:
    """From the corner of a cell of the map to that of its patch, which is centred on it."""
    return -((patch - step) // 2)


def default_patch(info: dict[str, Any]) -> int:
    """The side that the crops of a classifier's training had, in pixels."""
    side = (info.get("training") or {}).get("crop_side")
    return int(side) if isinstance(side, int) and side >= 8 else int(info["input_size"])
