"""One image's way through the network: at what resolution, in which tiles, with what densities."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from . import sizes, tiling
from .classstain import UNLIKE, unlike_seen
from .device import describe_device
from .familiar import sample, stain_facts
from .measure import Coloured, densities_in_boxes
from .progress import Report, tell, within
from .runner import Found, Runner, lacks_memory
from .sizes import Choice, Known, Sample
from .stainfit import GREY, Remembered, StainFit, fit_stain
from .tiling import Plan

Pixels = npt.NDArray[np.uint8]
PixelSize = tuple[float, float]

LEAST = 0.01
"""Score below which nothing is kept at all."""

_TILE = {"cpu": 1024, "mps": 1280, "cuda": 1280}
_SMALLEST_TILE = 128
_VISIBLE = (3.0, 20_000.0)  # image pixels of objects that can be found at all
_WINDOWS = 3  # of a large image that are looked at for its objects' size


class ImageRun:
    """One image's way through the network; keeps what later steps need."""

    def __init__(
        self,
        runner: Runner,
        info: dict[str, Any],
        pixels: Pixels,
        iou: float,
        tile: int | Literal["auto"],
        batch: int | Literal["auto"],
        report: Report | None,
        remembered: Remembered | None = None,
    ) -> None:
        self.runner, self.info, self.pixels = runner, info, pixels
        self._remembered = remembered or Remembered()
        self.iou, self.report = iou, report
        self.batch = (
            batch if isinstance(batch, str) and batch == "auto" else check_count(batch, "batch", 1)
        )
        self.tile = self._asked = _tile_side(tile, runner.device.type, info["image_size"])
        self.notes: list[str] = []
        self.shape: tuple[int, int] = pixels.shape[:2]
        self._sizes: dict[str, dict[str, float]] = info.get("object_sizes") or {}
        self.known = Known.of(self._sizes, info["classes"])
        self.typical = sizes.typical_size(self._sizes)
        self.choice = Choice(1.0, "")
        self.plan: Plan | None = None
        self.fit: StainFit | None = None
        self._first: tuple[Choice, Found] | None = None

    def choose(self, object_size: float | Literal["auto"], pixel_size: PixelSize | None) -> Choice:
        """The working resolution."""
        way = (object_size, pixel_size, self.iou, self.tile)
        known = self._remembered.choices.get(way)
        if known is not None:
            choice, self.fit, self._first, self.plan, notes = known
            self.notes += notes
            return choice  # type: ignore[no-any-return]
        choice = self._choose(object_size, pixel_size)
        if self.tile == self._asked:  # memory sufficed
            outcome = (choice, self.fit, self._first, self.plan, list(self.notes))
            self._remembered.choices[way] = outcome
        return choice

    def _choose(self, object_size: float | Literal["auto"], pixel_size: PixelSize | None) -> Choice:
        of_model = self.info.get("pixel_size")
        if not isinstance(object_size, str) or object_size != "auto":
            return self._for_size(object_size)
        if pixel_size and of_model:
            scale = math.sqrt(math.prod(pixel_size)) / of_model
            if self._plausible(scale):
                return Choice(scale, "from the pixel sizes")
        start = Choice(self.info["image_size"] / max(self.shape), "as in training")
        if self.typical is None:
            self.notes.append("The model stores no object sizes; the image was shown whole.")
            return start
        return self._from_image(start, self.typical)

    def _plausible(self, scale: float) -> bool:
        """Whether objects would be of a size that pictures of them have; says so if not."""
        size = (self.typical or 0.125 * self.info["image_size"]) / scale
        if _VISIBLE[0] <= size <= _VISIBLE[1]:
            return True
        self.notes.append(
            f"By the pixel sizes objects would be {size:.3g} pixels wide, so they were left aside."
        )
        return False

    def _for_size(self, object_size: float | str) -> Choice:
        if not is_number(object_size) or not 1 <= float(object_size) < math.inf:
            raise ValueError(
                f'object_size must be "auto" or a number of pixels from 1 on, not {object_size!r}.'
            )
        if self.typical is None:
            raise ValueError(
                "This model does not say how large its objects were in training; "
                'use object_size="auto".'
            )
        return Choice(self.typical / float(object_size), "as asked for")

    def _from_image(self, start: Choice, typical: float) -> Choice:
        """Shown whole, as images were in training, if that agrees; else the best that is found."""
        tried = sizes.scales(typical, self.shape)
        if tried and tried[0] <= start.scale <= tried[-1]:
            found = self.at(start, within(self.report, 0.0, 0.1))
            self._first = (start, found)
            if sizes.agrees(self._sample(found, start.scale, math.prod(self.shape)), self.known):
                return start
        done = iter(range(1, len(tried) + 4))
        searching = within(self.report, 0.1, 0.3)

        def look(scale: float) -> Sample:
            tell(searching, next(done), len(tried) + 3, "finding the objects' size")
            return self._look(scale)

        best = sizes.search(look, typical, self.shape, self.known)
        if best is None:
            self.notes.append(
                "Nothing sure was found at any resolution; give object_size in pixels."
            )
        return best or start

    def _look(self, scale: float) -> Sample:
        """What is found at a scale in the whole image or, of a larger one, in some windows."""
        side = max(round(self.info["image_size"] / scale), 1)
        corners = tiling.windows(self.pixels, side, _WINDOWS)
        parts, area = [], 0
        for y, x in corners:
            part = self.pixels[y : y + side, x : x + side]
            area += part.shape[0] * part.shape[1]
            parts.append(self._tiles(part, scale)[0])
        found = Found.together(parts)
        return self._sample(found, scale, area)

    def _sample(self, found: Found, scale: float, area: float) -> Sample:
        wide, high = (found.xyxy[:, 2:] - found.xyxy[:, :2]).T.astype(np.float64)
        size = np.sqrt(np.maximum(wide * high, 1e-6)) * scale
        return Sample(size, found.labels, found.scores.astype(np.float64), area * scale**2)

    def at(self, choice: Choice, report: Report | None = None) -> Found:
        """Everything above 0.01 at a scale, in image pixels, best first."""
        self.choice = choice
        if self._first is not None and self._first[0] == choice:
            return self._first[1]
        report = report or within(self.report, 0.3, 0.9)
        found, self.plan = self._tiles(self.pixels, choice.scale, report)
        largest = sizes.largest_size(self._sizes, 0.0)
        if len(self.plan.tiles) > 1 and self.tile < 2.5 * largest:
            self.notes.append(
                f"Tiles of {self.tile} pixels are small for objects of up to {largest:.0f} at the "
                "working resolution: large ones may be found in pieces."
            )
        return found

    def _tiles(
        self, pixels: Pixels, scale: float, report: Report | None = None
    ) -> tuple[Found, Plan]:
        """What is in an image at a scale, in tiles that are halved until memory suffices."""
        largest = sizes.largest_size(self._sizes, 0.25 * self.info["image_size"])
        while True:
            overlap = min(round(1.5 * largest), self.tile // 2)
            plan = tiling.plan(pixels.shape[:2], scale, self.tile, overlap)
            try:
                return self._run(pixels, plan, report), plan
            except Exception as error:
                if not lacks_memory(error):
                    raise
            # Not in the handler: there the error still holds what was in memory.
            self._smaller_tiles()

    def _smaller_tiles(self) -> None:
        if self.tile < 2 * _SMALLEST_TILE:
            raise MemoryError(
                f"Memory of {describe_device(self.runner.device)} does not suffice even for tiles "
                f'of {self.tile} pixels; close other programs or use device="cpu".'
            )
        self.tile //= 2
        self.runner.free_memory()

    def _run(self, pixels: Pixels, plan: Plan, report: Report | None) -> Found:
        """All tiles of a plan, merged."""
        whole = len(plan.tiles) == 1 and pixels is self.pixels
        fit = self._remembered.fits.get(plan.size) if whole else self.whole_fit
        notes: list[str] = []
        settings: Any = {"least": LEAST, "iou": self.iou, "batch": self.batch}
        found, fitted = self.runner.run(pixels, plan, fit, **settings, notes=notes, report=report)
        self.notes += [note for note in notes if note not in self.notes]
        if pixels is self.pixels:
            self.fit = fitted
        if whole:
            self._remembered.fits[plan.size] = fitted
        return found

    @property
    def whole_fit(self) -> StainFit:
        """The front end fitted to the whole image."""
        if self.fit is None:
            fits = self._remembered.fits
            if "whole" not in fits:
                fits["whole"] = fit_stain(self.runner.network, _opaque(self.pixels))
            self.fit = fits["whole"]
        return self.fit

    def columns(self, found: Found) -> dict[str, npt.NDArray[np.float32]]:
        """Densities in boxes, by column name, and how unlike the training's they are if known."""
        tell(self.report, 9, 10, "measuring densities")
        fit, r = self.whole_fit, self.runner.network.stain.components

        def read(rows: slice, columns: slice) -> Coloured:
            return fit.look_up(_opaque(self.pixels[rows, columns]))

        mean, total = densities_in_boxes(read, self.shape, r, found.xyxy)
        columns = {
            f"OD {k + 1} {what}": values[:, k]
            for k in range(r)
            for what, values in (("mean", mean), ("sum", total))
        }
        if seen := self.info.get("densities_seen"):
            columns[UNLIKE] = unlike_seen(seen, mean, found.labels, self.info["classes"])
        return columns

    def facts(self) -> dict[str, Any]:
        """How the detections came about."""
        scale, notes = self.choice.scale, list(self.notes)
        if self.tile < self._asked:
            notes.append(f"Memory did not suffice for larger tiles than {self.tile} pixels.")
        assert self.plan is not None
        return {
            "model": self.info.get("name", ""),
            "device": describe_device(self.runner.device),
            "scale": round(scale, 5),
            "object_size": None if self.typical is None else round(self.typical / scale, 2),
            "chosen": self.choice.how,
            "tiles": len(self.plan.tiles),
            "tile_size": list(self.plan.size),
            "stain": stain_facts(self.whole_fit, _opaque(sample(self.pixels))),
            "notes": notes,
        }


def _opaque(pixels: Pixels) -> Pixels:
    """(…, 3): hidden pixels of RGBA become padding."""
    if pixels.shape[-1] == 3:
        return pixels
    return np.where(pixels[..., 3:] > 0, pixels[..., :3], np.uint8(GREY))


def _tile_side(tile: int | str, device: str, least: int) -> int:
    if isinstance(tile, str) and tile == "auto":
        return max(_TILE.get(device, _TILE["cpu"]), least)
    return check_count(tile, "tile", _SMALLEST_TILE)


def check_count(value: Any, name: str, least: int) -> int:
    """A whole number of at least `least`, or a `ValueError` that names the argument."""
    if not is_number(value) or not least <= value < math.inf or int(value) != value:
        raise ValueError(
            f'{name} must be "auto" or a whole number of at least {least}, not {value!r}.'
        )
    return int(value)


def is_number(value: Any) -> bool:
    """Whether it is one plain number."""
    return isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
