"""Search a slide tile by tile, tiles in the viewport first; a stopped search can be resumed.

`search_slide` runs off the GUI thread and knows no Qt; `SlideSearch` runs it for the panel. They
communicate through a `SearchFeed`: boxes come out of it, the centre of the viewport goes in.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, cast

import numpy as np
import numpy.typing as npt
from napari.layers import Image
from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import centre_inside
from napari_beerlanet.core.checkpoints.info import limits_text
from napari_beerlanet.core.common.progress import Cancelled, Report, report_progress, subprogress
from napari_beerlanet.core.common.rectangle import Rectangle
from napari_beerlanet.core.common.storage import with_file_check
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.images.slide import SLIDE_PIXELS
from napari_beerlanet.ui.common.session import Session
from napari_beerlanet.ui.common.tasks import Task, TaskOutcome
from napari_beerlanet.ui.detect.job import (
    DetectJob,
    DetectResult,
    job_model,
    learned_stains,
    merge_before,
)
from napari_beerlanet.ui.detect.results import place_run
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.viewer.planes import SliceWindow
from napari_beerlanet.ui.viewer.viewport import canvas_corners

if TYPE_CHECKING:
    from collections.abc import Generator

    from napari import Viewer

    from napari_beerlanet.core.detection.slide_detector import SlideDetection, TileResult

_SETUP_FRACTION = 0.15  # of the progress: model, colours and cell size
_POLL_INTERVAL_MS = 200  # between looks into the feed
_NO_BOXES = np.empty((0, 4), np.float32)


class SlideSearch(QObject):
    """Runs one search at a time in `task` and shows its boxes as they come.

    `boxes_added` carries the image and its detection layer, `message` a line on the search.
    """

    boxes_added = Signal(object, object)
    message = Signal(str)

    def __init__(self, viewer: Viewer, session: Session, task: Task, parent: QObject) -> None:
        super().__init__(parent)
        self._viewer, self._session, self._task = viewer, session, task
        self._feed = SearchFeed()
        self._source: Image | None = None
        self._job: DetectJob | None = None
        self.detection_layer: DetectionLayer | None = None
        self._shown_search: tuple[Image, Path | None] | None = None  # the layer has its boxes
        self._labels = False
        self._confidence: float = DetectSettings.default("confidence")
        self._timer = QTimer(self)
        self._timer.setInterval(_POLL_INTERVAL_MS)
        self._timer.timeout.connect(self._poll)
        task.ended.connect(self._ended)

    @property
    def running(self) -> bool:
        """Whether the task is searching a slide."""
        return self._job is not None

    @property
    def total(self) -> int:
        """Tiles of the last search, 0 while they are not known."""
        return self._feed.total

    @property
    def remaining(self) -> int:
        """Tiles that the last search has not searched."""
        return self._feed.total - self._feed.done

    def start(
        self,
        source: Image,
        job: DetectJob,
        confidence: float,
        labels: bool,
        done: Callable[[DetectResult], None],
        failed: Callable[[BaseException], None],
    ) -> None:
        """Start a search; `done(result)` and `failed(error)` as of a task."""
        feed = self._feed = SearchFeed(self._viewport_centre(source))
        self._source, self._job = source, job
        self._confidence, self._labels = confidence, labels
        self._timer.start()
        self._task.start(lambda report: search_slide(job, feed, report), done, failed)

    def finalise(self, result: DetectResult) -> None:
        """The search is finished: replace the boxes in the layer by those of the result."""
        self._poll()
        if self.detection_layer is not None and self.detection_layer.alive:
            self.detection_layer.finalise(result.detections, result.job.plane.index)

    def close(self) -> None:
        """Stop following the search."""
        self._timer.stop()
        self._job = self._source = None

    # --- while it runs ----------------------------------------------------------------------------

    def _poll(self) -> None:
        source, job = self._source, self._job
        if source is None or job is None:
            return
        if source not in self._viewer.layers:
            self._task.cancel()
            return
        self._feed.focus = self._viewport_centre(source)
        started, boxes = self._feed.take()
        if started is not None:
            self._show_start(source, job, started)
        if self.detection_layer is not None and not self.detection_layer.alive:
            self._task.cancel()  # the user has removed the layer
        elif boxes is not None and self.detection_layer is not None:
            self.detection_layer.extend(boxes.added, boxes.duplicates, job.plane.index)
            self.boxes_added.emit(source, self.detection_layer)

    def _show_start(self, source: Image, job: DetectJob, started: SearchStarted) -> None:
        if started.changed:
            self.message.emit(
                f"{_join_words(started.changed)} changed since the last search: starting over."
            )
        elif started.done:
            self.message.emit(
                f"Resumed: {started.done:,} of {started.total:,} tiles were searched before."
            )
        index, search = job.plane.index, (source, job.results)
        layer = detection_layer_of(self._viewer, source)
        resumed = started.done and self._shown_search == search
        if layer is not None and resumed and layer is self.detection_layer:
            return  # its boxes are there already, with the user's edits
        self._shown_search = search
        layer = place_run(
            self._viewer,
            source,
            started.previous,
            started.colours,
            index,
            self._confidence,
            self._labels,
        )
        layer.growing = True  # until the search ends
        self.detection_layer = layer
        self.boxes_added.emit(source, layer)

    def _viewport_centre(self, source: Image) -> tuple[float, float] | None:
        """The centre of the viewport in pixels of the finest level."""
        if self._viewer.dims.ndisplay != 2:
            return None
        y, x = canvas_corners(source, self._viewer).mean(axis=0)
        return float(y), float(x)

    def _ended(self, outcome: TaskOutcome) -> None:
        """However the search ended, show the boxes found so far."""
        source, job = self._source, self._job
        if job is None:
            return
        removed = source not in self._viewer.layers
        if not removed:
            self._poll()
        self._timer.stop()
        self._source = self._job = None
        if self.detection_layer is not None:
            self.detection_layer.growing = False
        if outcome is TaskOutcome.CANCELLED and self._feed.total:
            why = "the image was removed" if removed else "“Resume” continues"
            done = f"Stopped after {self._feed.done:,} of {self._feed.total:,} tiles"
            self.message.emit(f"{done}; {why}.")


def _join_words(words: list[str]) -> str:
    """A list of words as the start of a sentence."""
    text = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
    return text[:1].upper() + text[1:]


# --- off the GUI thread ---------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class SearchStarted:
    """The start of a search: its classes, and what an previous search has found already.

    `changed`: settings that differ from those of the previous search, whose tiles cannot be used.
    """

    names: list[str]
    colours: Sequence[str] | None
    previous: Detections
    done: int
    total: int
    changed: list[str]


@dataclass(frozen=True, eq=False)
class BoxUpdate:
    """New boxes, and previous boxes (m, 4) that are duplicates or parts of them."""

    added: Detections
    duplicates: npt.NDArray[np.float32]


@dataclass(eq=False)
class SearchFeed:
    """Connects the searching thread with the window. `focus` is (y, x) in image pixels."""

    focus: tuple[float, float] | None = None
    done: int = 0
    total: int = 0
    _queue: SimpleQueue[SearchStarted | BoxUpdate] = field(default_factory=SimpleQueue)

    def put(self, item: SearchStarted | BoxUpdate) -> None:
        """Called by the thread."""
        self._queue.put(item)

    def take(self) -> tuple[SearchStarted | None, BoxUpdate | None]:
        """Everything since the last call, box updates merged into one."""
        started, updates = None, []
        while True:
            try:
                item = self._queue.get_nowait()
            except Empty:
                break
            if isinstance(item, SearchStarted):
                started = item
            else:
                updates.append(item)
        return started, _merge_updates(updates)


def search_slide(job: DetectJob, feed: SearchFeed, report: Report) -> DetectResult:
    """Detect objects in a slide, first at the feed's focus, and put them into the feed."""
    from napari_beerlanet.core.detection.slide_detector import SlideDetection
    from napari_beerlanet.core.detection.stain_statistics import detection_warnings
    from napari_beerlanet.ui.viewer.fast_shapes import fast_shapes_supported

    start, settings = time.monotonic(), job.settings
    report = with_file_check(job.path, report)
    model = job_model(job, subprogress(report, 0.0, 0.05) or report)
    fast_shapes_supported()  # compiles what drawing needs here, not while the window waits
    with SlideDetection(
        model,
        job.plane.pyramid,
        iou=settings.iou,
        object_size=settings.object_size,
        pixel_size=settings.pixel_size_yx,
        size_hint=job.size_hint,
        skip_glass=settings.skip_glass,
        openvino=settings.openvino,
        results=job.results,
        source=job.source,
        report=subprogress(report, 0.05, _SETUP_FRACTION),
    ) as run:
        _search_tiles(run, job, feed, subprogress(report, _SETUP_FRACTION, 0.97))
        report_progress(report, 97, 100, "merging tiles")
        # What refines them goes by their densities, however long it takes to measure them.
        measured = math.prod(job.plane.shape) <= SLIDE_PIXELS or job.refine is not None
        detections = _inside_windows(run.detections(densities=measured), job.windows)
    if job.refine is not None:
        detections = job.refine(detections, model.info)
    warnings = detection_warnings(model.info, detections, settings.pixel_size_yx)
    detections = replace(
        detections,
        report=detections.report | {"warnings": warnings, "limits": limits_text(model.info)},
    )
    detections = merge_before(job, model, detections)
    show = job.show_stains and model.network.has_stain
    stains = learned_stains(model, job, subprogress(report, 0.97, 1.0)) if show else None
    return DetectResult(job, model, detections, warnings, time.monotonic() - start, stains)


def _search_tiles(
    run: SlideDetection, job: DetectJob, feed: SearchFeed, report: Report | None
) -> None:
    from napari_beerlanet.core.detection.stain_statistics import (
        detection_warnings,
        domain_shift_warnings,
    )

    names = run.model.classes
    tiles = [k for k in run.tiles if _intersects(run.grid.tiles[k], job.windows)]
    previous = merge_before(job, run.model, _inside_windows(run.detections(), job.windows))
    # A search may take long: warn of a domain shift at its start.
    stain = previous.report.get("stain")
    pixel_size = job.settings.pixel_size_yx
    warnings = domain_shift_warnings(run.model.info, stain, pixel_size)
    facts = previous.report | {"warnings": warnings, "limits": limits_text(run.model.info)}
    previous = replace(previous, report=facts)
    if previous.candidates is not None:
        previous = replace(previous, candidates=replace(previous.candidates, report=facts))
    feed.total, feed.done = len(tiles), run.count_done(tiles)
    colours = run.model.info.get("colours")
    feed.put(SearchStarted(names, colours, previous, feed.done, feed.total, run.changed))
    results = run.detect_tiles(lambda: feed.focus, tiles)
    try:
        with closing(cast("Generator[TileResult]", results)):
            _report_tile(feed, report)
            for result in results:
                raw = result.added
                new = Detections(raw.xyxy, raw.labels, raw.scores, names, report=facts)
                feed.put(BoxUpdate(_inside_windows(new, job.windows), result.removed.xyxy))
                feed.done = result.done
                _report_tile(feed, report)
    except Cancelled:
        # What has been found stays in the window, and with it what is doubtful about it.
        found = _inside_windows(run.detections(), job.windows)
        told = facts | {"warnings": detection_warnings(run.model.info, found, pixel_size)}
        nothing = replace(found[:0], candidates=None, columns={}, report=told)
        feed.put(BoxUpdate(nothing, _NO_BOXES))
        raise


def _report_tile(feed: SearchFeed, report: Report | None) -> None:
    if feed.done < feed.total:
        report_progress(report, feed.done, feed.total, f"tile {feed.done + 1:,} of {feed.total:,}")


def _merge_updates(updates: Sequence[BoxUpdate]) -> BoxUpdate | None:
    if not updates:
        return None
    parts = [update.added for update in updates]
    added = Detections(
        np.concatenate([p.xyxy for p in parts]),
        np.concatenate([p.labels for p in parts]),
        np.concatenate([p.scores for p in parts]),
        parts[0].names,
        report=parts[-1].report,
    )
    return BoxUpdate(added, np.concatenate([update.duplicates for update in updates]))


def _intersects(tile: Rectangle, windows: Sequence[SliceWindow] | None) -> bool:
    return windows is None or any(
        tile.y < rows.stop
        and tile.y + tile.height > rows.start
        and tile.x < columns.stop
        and tile.x + tile.width > columns.start
        for rows, columns in windows
    )


def _inside_windows(detections: Detections, windows: Sequence[SliceWindow] | None) -> Detections:
    """Detections, among all candidates, whose centre lies in one of the windows."""
    if windows is None:
        return detections
    everything = detections if detections.candidates is None else detections.candidates
    keep = centre_inside(
        everything.xyxy, np.array([[c.start, r.start, c.stop, r.stop] for r, c in windows])
    )
    inside = replace(everything[keep], report=detections.report)
    return inside.above(DetectSettings.default("confidence"))
