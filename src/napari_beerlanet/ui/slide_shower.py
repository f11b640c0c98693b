"""A slide's search in the window: boxes as they come, first where the user looks, and on again."""

from __future__ import annotations

from typing import Any

from napari.layers import Image
from qtpy.QtCore import QObject, QTimer, Signal

from napari_beerlanet.ui.detect_work import Order, Result
from napari_beerlanet.ui.detection_layer import DetectionLayer
from napari_beerlanet.ui.planes import canvas_corners
from napari_beerlanet.ui.slide_search import Begun, Feed, search
from napari_beerlanet.ui.tasks import Outcome, Task

_EVERY = 200  # milliseconds between looks at what has come


class SlideSearch(QObject):
    """Runs one search at a time in `task`; `shown` when boxes came, `said` with a line about it."""

    shown = Signal(object, object)
    said = Signal(str)

    def __init__(self, viewer: Any, session: Any, task: Task, parent: QObject) -> None:
        super().__init__(parent)
        self._viewer, self._session, self._task = viewer, session, task
        self._feed = Feed()
        self._source: Image | None = None
        self._order: Order | None = None
        self.shower: DetectionLayer | None = None
        self._fed: tuple[Any, Any] | None = None  # which search the layer has the boxes of
        self._labels = False
        self._confidence = 0.25
        self._timer = QTimer(self)
        self._timer.setInterval(_EVERY)
        self._timer.timeout.connect(self._look)
        task.ended.connect(self._ended)

    @property
    def running(self) -> bool:
        """Whether it is a slide that the task is searching."""
        return self._order is not None

    @property
    def total(self) -> int:
        """Tiles of the last search, 0 as long as they are not known."""
        return self._feed.total

    @property
    def left(self) -> int:
        """Tiles that the last search did not get to."""
        return self._feed.total - self._feed.done

    def start(
        self, source: Image, order: Order, confidence: float, labels: bool, done: Any, failed: Any
    ) -> None:
        """Search; `done(result)` and `failed(error)` as of a task."""
        feed = self._feed = Feed(self._focus_in(source))
        self._source, self._order = source, order
        self._confidence, self._labels = confidence, labels
        self._timer.start()
        self._task.start(lambda report: search(order, feed, report), done, failed)

    def show_as(self, confidence: float, labels: bool) -> None:
        """How boxes of a layer that is not there yet will be chosen."""
        self._confidence, self._labels = confidence, labels

    def settle(self, result: Result) -> None:
        """All is found: the boxes in the layer become those of the result."""
        self._look()
        if self.shower is not None and self.shower.alive:
            self.shower.settle(result.detections, result.order.plane.index)

    def close(self) -> None:
        """Hear nothing more."""
        self._timer.stop()
        self._order = self._source = None

    # --- while it runs ----------------------------------------------------------------------------

    def _look(self) -> None:
        source, order = self._source, self._order
        if source is None or order is None:
            return
        if source not in self._viewer.layers:
            self._task.cancel()
            return
        self._feed.focus = self._focus_in(source)
        begun, boxes = self._feed.take()
        if begun is not None:
            self._begin(source, order, begun)
        if self.shower is not None and not self.shower.alive:
            self._task.cancel()  # the user took the boxes away
        elif boxes is not None and self.shower is not None:
            self.shower.extend(boxes.found, boxes.doubles, order.plane.index)
            self.shown.emit(source, self.shower)

    def _begin(self, source: Image, order: Order, begun: Begun) -> None:
        if begun.changed:
            self.said.emit(f"{_list(begun.changed)} changed since the last search: it begins anew.")
        elif begun.done:
            self.said.emit(f"Going on: {begun.done:,} of {begun.total:,} tiles were done before.")
        index, fed = order.plane.index, (source, order.results)
        shower = self._session.shown.get(source)
        there = shower is not None and shower.alive
        if there and begun.done and self._fed == fed and shower is self.shower:
            return  # its boxes are there already, with what the user did to them
        self._fed = fed
        first = begun.earlier
        if there and not shower.edited:
            shower.take_colours(begun.colours, begun.names)
            shower.put(first, index, self._confidence)
        else:
            shower = DetectionLayer(
                self._viewer, source, first, begun.colours, index, self._confidence, self._labels
            )
        self.shower = shower
        self.shown.emit(source, shower)

    def _focus_in(self, source: Image) -> tuple[float, float] | None:
        """The middle of the view in pixels of the finest level."""
        if self._viewer.dims.ndisplay != 2:
            return None
        y, x = canvas_corners(source, self._viewer).mean(axis=0)
        return float(y), float(x)

    def _ended(self, outcome: Outcome) -> None:
        """Whatever the end, what was found is there."""
        source, order = self._source, self._order
        if order is None:
            return
        gone = source not in self._viewer.layers
        if not gone:
            self._look()
        self._timer.stop()
        self._source = self._order = None
        if outcome is Outcome.CANCELLED and self._feed.total:
            why = "the image was removed" if gone else "“Go on” continues"
            done = f"Stopped after {self._feed.done:,} of {self._feed.total:,} tiles"
            self.said.emit(f"{done}; {why}.")


def _list(words: list[str]) -> str:
    """As in a sentence that begins with it."""
    text = ", ".join(words[:-1]) + " and " + words[-1] if len(words) > 1 else words[0]
    return text[:1].upper() + text[1:]
