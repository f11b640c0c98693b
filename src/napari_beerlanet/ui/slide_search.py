"""A slide's search from order to result, tile by tile. Runs off the GUI thread, knows no Qt.

The window and the thread talk through a `Feed`: boxes come out of it, where someone looks goes in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.files import still_there
from napari_beerlanet.core.progress import Report, tell, within
from napari_beerlanet.ui.detect_work import Order, Result, model_for, stains_of
from napari_beerlanet.ui.planes import LARGE, Window

_READY = 0.15  # of the progress: model, colours and cell size


@dataclass(frozen=True, eq=False)
class Begun:
    """How a search begins: with what, and with boxes that an earlier one has found."""

    names: list[str]
    colours: Any
    earlier: Detections
    done: int
    total: int
    changed: list[str]


@dataclass(frozen=True, eq=False)
class Boxes:
    """New boxes, and boxes (m, 4) of before that are parts or doubles of them."""

    found: Detections
    doubles: npt.NDArray[np.float32]


@dataclass(eq=False)
class Feed:
    """Between the thread that searches and the window. `focus` is (y, x) in image pixels."""

    focus: tuple[float, float] | None = None
    done: int = 0
    total: int = 0
    _queue: SimpleQueue[Begun | Boxes] = field(default_factory=SimpleQueue)

    def put(self, what: Begun | Boxes) -> None:
        """Called by the thread."""
        self._queue.put(what)

    def take(self) -> tuple[Begun | None, Boxes | None]:
        """All that came since the last time, boxes as one."""
        begun, boxes = None, []
        while True:
            try:
                what = self._queue.get_nowait()
            except Empty:
                break
            if isinstance(what, Begun):
                begun = what
            else:
                boxes.append(what)
        return begun, _together(boxes)


def search(order: Order, feed: Feed, report: Report) -> Result:
    """Find objects in a slide, first where the feed's focus is, and tell of them as they come."""
    from napari_beerlanet.core.familiar import warnings_on
    from napari_beerlanet.core.slidedetect import SlideDetection
    from napari_beerlanet.ui.detection_mesh import fast

    began = time.monotonic()
    report = still_there(order.path, report)
    model = model_for(order, within(report, 0.0, 0.05) or report)
    fast()  # what drawing needs is compiled here, not while the window waits
    with SlideDetection(
        model,
        order.plane.pyramid,
        iou=order.iou,
        object_size=order.object_size,
        pixel_size=order.pixel_size,
        skip_glass=order.skip_glass,
        results=order.results,
        source=order.source,
        report=within(report, 0.05, _READY),
    ) as run:
        _go_through(run, order, feed, within(report, _READY, 0.97))
        tell(report, 97, 100, "putting the tiles together")
        small = math.prod(order.plane.shape) <= LARGE
        found = _inside(run.detections(densities=small), order.windows)
    warnings = warnings_on(model.info, found, order.pixel_size)
    found = replace(found, report=found.report | {"warnings": warnings})
    stains = stains_of(model, order, within(report, 0.97, 1.0)) if order.densities else None
    return Result(order, model, found, warnings, time.monotonic() - began, stains)


def _go_through(run: Any, order: Order, feed: Feed, report: Report | None) -> None:
    from napari_beerlanet.core.familiar import unlike_training

    names = run.model.classes
    wanted = [k for k in run.tiles if _touches(run.plan.tiles[k], order.windows)]
    earlier = _inside(run.detections(), order.windows)
    # A search may take long: in what the slide is unlike those of the training is said at once.
    stain = earlier.report.get("stain")
    facts = earlier.report | {"warnings": unlike_training(run.model.info, stain, order.pixel_size)}
    earlier = replace(earlier, report=facts)
    if earlier.candidates is not None:
        earlier = replace(earlier, candidates=replace(earlier.candidates, report=facts))
    feed.total, feed.done = len(wanted), run.done_of(wanted)
    colours = run.model.info.get("colours")
    feed.put(Begun(names, colours, earlier, feed.done, feed.total, run.changed))
    with closing(run.steps(lambda: feed.focus, wanted)) as steps:
        _tell_tile(feed, report)
        for step in steps:
            found = step.found
            part = Detections(found.xyxy, found.labels, found.scores, names, report=facts)
            feed.put(Boxes(_inside(part, order.windows), step.superseded.xyxy))
            feed.done = step.done
            _tell_tile(feed, report)


def _tell_tile(feed: Feed, report: Report | None) -> None:
    if feed.done < feed.total:
        tell(report, feed.done, feed.total, f"tile {feed.done + 1:,} of {feed.total:,}")


def _together(boxes: Sequence[Boxes]) -> Boxes | None:
    if not boxes:
        return None
    parts, first = [b.found for b in boxes], boxes[0].found
    found = Detections(
        np.concatenate([p.xyxy for p in parts]),
        np.concatenate([p.labels for p in parts]),
        np.concatenate([p.scores for p in parts]),
        first.names,
        report=first.report,
    )
    return Boxes(found, np.concatenate([b.doubles for b in boxes]))


def _touches(tile: Any, windows: Sequence[Window] | None) -> bool:
    return windows is None or any(
        tile.y < rows.stop
        and tile.y + tile.height > rows.start
        and tile.x < columns.stop
        and tile.x + tile.width > columns.start
        for rows, columns in windows
    )


def _inside(found: Detections, windows: Sequence[Window] | None) -> Detections:
    """Those whose middle lies in one of the windows, of all candidates."""
    everything = found.candidates if found.candidates is not None else found
    if windows is None:
        return found
    x, y = (everything.xyxy[:, :2] + everything.xyxy[:, 2:]).T / 2
    keep = np.zeros(len(everything), bool)
    for rows, columns in windows:
        keep |= (y >= rows.start) & (y < rows.stop) & (x >= columns.start) & (x < columns.stop)
    return replace(everything[keep], report=found.report).above(0.25)
