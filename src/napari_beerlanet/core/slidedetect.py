"""Objects in a slide: tile after tile, first where someone looks, as far as it gets, and on again.

The tiles, their resolution and what is merged at their borders are those of `Detector.detect`, so
an image that fits into memory has the same detections either way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import sizes, tiling
from .boxes import Detections
from .detector import Detector
from .finding import LEAST, ImageRun, PixelSize
from .lazy import Part, as_levels
from .lazypixels import LazyPixels
from .palette import Palette
from .progress import Report, tell, within
from .runner import Found, lacks_memory
from .sizes import Choice
from .stainfit import Remembered, fit_palette
from .tilefile import changed_since
from .tilelog import TileLog, arrays_of, fit_of
from .tilequeue import Focus, centres_of, neighbourhood, take_next
from .tiling import Plan, Tile
from .tissue import Tissue, find_tissue

_NOTHING = Found.together([])


@dataclass(frozen=True)
class Step:
    """A tile that is done: what is new in it, and what it shows to be a part or a double.

    `found` are the tile's boxes in pixels of the finest level; `superseded` are boxes of earlier
    steps that are no longer. `done` of `total` tiles.
    """

    tile: Tile
    found: Found
    superseded: Found
    done: int
    total: int


class SlideDetection:
    """One slide's way through a model; made, prepared, then gone through by `steps`."""

    def __init__(
        self,
        model: Detector,
        data: Any,
        *,
        iou: float = 0.7,
        object_size: float | Literal["auto"] = "auto",
        tile: int | Literal["auto"] = "auto",
        pixel_size: PixelSize | None = None,
        skip_glass: bool = True,
        tissue: Tissue | None = None,
        palette: Palette | None = None,
        results: Path | None = None,
        source: dict[str, Any] | None = None,
        report: Report | None = None,
    ) -> None:
        """As for `Detector.detect`, and:

        `data`: a lazy image or its pyramid. `palette`: the slide's colours where they have been
        counted. `results`: the file to write to as it goes and to go on from, for which `source`
        says which file the slide is of (see `stamps.stamp`). If there is a file of another run,
        it is begun anew, and `changed` says what is another, in words.
        """
        self.model, self.levels, self.iou = model, as_levels(data), float(iou)
        self.pixels: Any = LazyPixels(self.levels)
        self.pixel_size, self._report = pixel_size, report
        if skip_glass and tissue is None:
            tell(report, 0, 100, "looking for tissue")
            tissue = find_tissue(self.levels)
        self.tissue = tissue if skip_glass else None
        asked = {"object_size": object_size, "tile": tile, "pixel_size": pixel_size, "iou": iou}
        self._identity = {
            "model": _digest(model),
            "source": source or {},
            "shape": list(self.pixels.shape),
            **asked,
        }
        self.changed: list[str] = []
        self._log = None if results is None else self._earlier(results)
        self._run = self._prepared(object_size, tile, palette)
        if self._log is None:
            self._log = self._new_log(results)
        # What is not doubled so far, of each tile; exact only at the end.
        self._alive = {number: np.ones(len(f), bool) for number, f in self._log.tiles.items()}

    @property
    def resumed(self) -> int:
        """How many tiles are done; asked before `steps`, how many an earlier run had done."""
        assert self._log is not None
        return len(self._log.tiles)

    def done_of(self, tiles: Iterable[int]) -> int:
        """How many of these tiles are done."""
        assert self._log is not None
        return sum(k in self._log.tiles for k in tiles)

    def _earlier(self, results: Path) -> TileLog | None:
        """The file to go on with; `changed` says in what another one that is there differs."""
        log = TileLog.resume(results, self._identity)
        if log is None:
            self.changed = changed_since(results, self._identity)
        return log

    @property
    def plan(self) -> Plan:
        """All tiles, of glass too."""
        assert self._run.plan is not None
        return self._run.plan

    @cached_property
    def tiles(self) -> list[int]:
        """Numbers of the tiles that are looked at."""
        if self.tissue is None:
            return list(range(len(self.plan.tiles)))
        parts = [Part(t.y, t.y + t.height, t.x, t.x + t.width) for t in self.plan.tiles]
        return [k for k, part in enumerate(parts) if self.tissue.has_tissue(part)]

    @property
    def finished(self) -> bool:
        """Whether every tile is done."""
        assert self._log is not None
        return all(k in self._log.tiles for k in self.tiles)

    def steps(
        self, focus: Focus = None, order: list[int] | None = None, report: Report | None = None
    ) -> Iterator[Step]:
        """Go through the tiles that are not done: nearest to `focus` (y, x) first, or in `order`.

        A `focus` that is a function is asked again before each tile.
        """
        assert self._log is not None
        log, wanted = self._log, order if order is not None else self.tiles
        left = [k for k in wanted if k not in log.tiles]
        total, done = len(wanted), len(wanted) - len(left)
        size, centres = _batch_size(self._run), centres_of(self.plan)
        with ThreadPoolExecutor(1, "beerlanet-tiles") as ahead:
            now = take_next(centres, left, focus, size)
            reading = ahead.submit(self._cut, now)
            while now:
                tell(report, done, total, "finding objects")
                cut = reading.result()
                later = take_next(centres, left, focus, size)
                reading = ahead.submit(self._cut, later)
                for number, found in zip(now, self._find(cut, now), strict=True):
                    log.add(number, found)
                    new, old = self._merge_in(number)
                    done += 1
                    yield Step(self.plan.tiles[number], new, old, done, total)
                now = later
        tell(report, 1, 1, "finding objects")

    def detections(self, confidence: float = 0.25, densities: bool = False) -> Detections:
        """All that is found so far, as `Detector.detect` would give it."""
        assert self._log is not None
        if len(self.plan.tiles) == 1 and self._log.tiles:
            found = self._log.tiles[0]
        else:
            parts = [self._log.tiles.get(k, _NOTHING) for k in range(len(self.plan.tiles))]
            found = self._run.runner.merged(parts, self.plan, self.iou)
        facts = self._run.facts()
        facts["tiles"], facts["tiles_looked_at"] = len(self.plan.tiles), len(self._log.tiles)
        result = Detections(
            found.xyxy,
            found.labels,
            found.scores,
            self.model.classes,
            image_shape=self._run.shape,
            pixel_size=self.pixel_size,
            report=facts,
            columns=self._run.columns(found) if densities else {},
        )
        return result.above(confidence)

    def close(self) -> None:
        """End the writing; what is in the results file stays."""
        if self._log is not None:
            self._log.close()

    def __enter__(self) -> SlideDetection:
        return self

    def __exit__(self, *why: object) -> None:
        self.close()

    def _prepared(
        self, object_size: float | Literal["auto"], tile: int | Literal["auto"], given: Any
    ) -> ImageRun:
        """Resolution, stain and tiles: from the results file, or found."""
        seen, info = Remembered(), self.model.info
        if self._log is not None:
            seen.fits["whole"] = fit_of(self._log.arrays)
        else:
            colours = given or self.pixels.palette(within(self._report, 0.0, 0.8))
            seen.fits["whole"] = fit_palette(self.model.runner.network, colours)
        later = within(self._report, 0.8, 1.0)
        run = ImageRun(self.model.runner, info, self.pixels, self.iou, tile, "auto", later, seen)
        if self._log is not None:
            run.choice = Choice(*self._log.header["choice"])
            run.notes += self._log.header["notes"]
        else:
            run.choice = run.choose(object_size, self.pixel_size)
        known = info.get("object_sizes") or {}
        largest = sizes.largest_size(known, 0.25 * info["image_size"])
        overlap = min(round(1.5 * largest), run.tile // 2)
        run.plan = tiling.plan(run.shape, run.choice.scale, run.tile, overlap)
        return run

    def _new_log(self, results: Path | None) -> TileLog:
        choice = self._run.choice
        header = {
            "identity": self._identity,
            "choice": [choice.scale, choice.how],
            "name": self.model.info.get("name", ""),
            "wanted": len(self.tiles),
            "notes": self._run.notes,
        }
        arrays = arrays_of(self._run.whole_fit)
        if results is None:
            return TileLog(Path(), header, arrays)
        return TileLog.create(results, header, arrays)

    def _cut(self, numbers: list[int]) -> list[npt.NDArray[np.uint8]]:
        if len(self.plan.tiles) == 1:
            return []  # what is shown whole is read, and its stain fitted, in the run
        tiles = [self.plan.tiles[k] for k in numbers]
        return [tiling.cut_out(self.pixels, tile, self.plan.size) for tile in tiles]

    def _find(self, cut: list[npt.NDArray[np.uint8]], numbers: list[int]) -> list[Found]:
        if len(self.plan.tiles) == 1:
            return [self._run.at(self._run.choice)]
        tiles = [self.plan.tiles[k] for k in numbers]
        runner, fit = self._run.runner, self._run.whole_fit
        try:
            return runner.find(cut, tiles, self.plan, fit, least=LEAST, iou=self.iou)
        except Exception as error:
            if not lacks_memory(error):
                raise
        runner.free_memory()
        if len(cut) > 1:
            one_by_one = (self._find([c], [k]) for c, k in zip(cut, numbers, strict=True))
            return [found for part in one_by_one for found in part]
        raise MemoryError(
            f"Memory does not suffice for tiles of {self._run.tile} pixels; set tile."
        )

    def _merge_in(self, number: int) -> tuple[Found, Found]:
        """What a tile adds to those about it, and what of theirs it makes superfluous."""
        assert self._log is not None
        found = self._log.tiles
        self._alive[number] = np.ones(len(found[number]), bool)
        near, part = neighbourhood(self.plan, number)
        here = [k for k in near if k in found]
        alive = [np.flatnonzero(self._alive[k]) for k in here]
        boxes = Found.together([found[k][a] for k, a in zip(here, alive, strict=True)])
        owner = np.repeat([near.index(k) for k in here], [len(a) for a in alive])
        left = np.zeros(len(boxes), bool)
        left[tiling.merge(part, boxes.xyxy, boxes.scores, boxes.labels, owner, self.iou)] = True
        ends = np.cumsum([len(a) for a in alive])[:-1]
        for k, rows, stays in zip(here, alive, np.split(left, ends), strict=True):
            self._alive[k][rows[~stays]] = False
        mine = owner == near.index(number)
        return boxes[mine & left], boxes[~mine & ~left]


def detect_slide(
    model: Detector,
    data: Any,
    confidence: float = 0.25,
    *,
    focus: Focus = None,
    densities: bool = True,
    report: Report | None = None,
    **settings: Any,
) -> Detections:
    """All objects of a slide; `settings` as for `SlideDetection`."""
    with SlideDetection(model, data, report=within(report, 0.0, 0.2), **settings) as run:
        for _ in run.steps(focus, report=within(report, 0.2, 0.95)):
            pass
        found = run.detections(confidence, densities)
    tell(report, 1, 1, "done")
    return found


def _batch_size(run: ImageRun) -> int:
    return {"cuda": 16, "mps": 4}.get(run.runner.device.type, 1)


def _digest(model: Detector) -> str:
    """Which model it is, by its weights."""
    found = hashlib.sha256()
    for name, value in sorted(model.network.state_dict().items()):
        found.update(name.encode())
        found.update(value.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()
