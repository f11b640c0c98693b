"""Live fitting: refit while sliders move; throttled, never queued, stale results dropped."""

from __future__ import annotations

import time
from collections.abc import Callable

from qtpy.QtCore import QObject
from superqt.utils import QSignalThrottler

from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.core.stains.slide import SlideColours
from napari_beerlanet.ui.common.tasks import Task
from napari_beerlanet.ui.stains.arrays import LayerData, density_data
from napari_beerlanet.ui.stains.fitting import FitResult, FitTarget, StainFitter, rough_settings

FitRequest = tuple[FitTarget, DecomposeSettings]
ShowFit = Callable[[FitResult, list[LayerData]], None]

_THROTTLE_MS = 15  # movements within this become one request
_MAX_REDRAW_INTERVAL_S = 0.15  # while a slider moves, a stale result is shown after this


class LiveFit(QObject):
    """Fits the last request.

    While a rough fit runs, which is short, a newer request waits for it; anything longer is
    superseded. A stale result is shown only if nothing was shown for a while, so that the layers
    follow a slider that is moved for long.

    A slide is shown as a preview first. Then `slide_scan` counts the colours of the whole slide,
    while sliders act on the preview; the result is fitted with the settings of that moment.
    """

    def __init__(
        self, task: Task, slide_scan: Task, fitter: StainFitter, show: ShowFit, parent: QObject
    ) -> None:
        super().__init__(parent)
        self.task, self.slide_scan, self.fitter, self._show = task, slide_scan, fitter, show
        self._pending: FitRequest | None = None
        self._last: FitRequest | None = None
        self._scanned: FitTarget | None = None  # or being scanned, or cancelled by the user
        self._running_rough_fit = False
        self._shown_at = 0.0
        self._throttle = QSignalThrottler(QSignalThrottler.EmissionPolicy.Trailing, self)
        self._throttle.setTimeout(_THROTTLE_MS)
        self._throttle.triggered.connect(self._start_pending)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.task.running and self._pending is None and not self.slide_scan.running

    def request(self, target: FitTarget, settings: DecomposeSettings, rescan: bool = False) -> None:
        """Fit this soon, and nothing that was requested earlier.

        `rescan`: scan a slide again whose scan the user has cancelled.
        """
        self._pending = self._last = target, settings
        cancelled = rescan and not self.slide_scan.running
        if cancelled or not target.reads_same_pixels_as(self._scanned):
            self._scanned = None
            self.slide_scan.cancel()
        self._throttle.throttle()

    def clear_cache(self) -> None:
        """The pixels have changed."""
        self._scanned = None
        self.slide_scan.cancel()
        self.fitter.clear_cache()

    def stop(self) -> None:
        """Drop all requests."""
        self._pending = self._last = self._scanned = None
        self._throttle.cancel()
        self.task.cancel()
        self.slide_scan.cancel()

    def _start_pending(self) -> None:
        if self._pending is not None and not (self.task.running and self._running_rough_fit):
            request, self._pending = self._pending, None
            self._start(request, rough=True)

    def _start(self, request: FitRequest, rough: bool) -> None:
        target, settings = request
        fitter = self.fitter
        short = settings.iterations != "converge" or rough_settings(settings) is not None
        self._running_rough_fit = rough and short

        def work(report: Report) -> tuple[FitResult, list[LayerData]]:
            fitted = fitter.fit(target, settings, report, rough)
            return fitted, density_data(fitted)

        self.task.start(work, self._done, self._failed)

    def _done(self, result: tuple[FitResult, list[LayerData]]) -> None:
        fitted, data = result
        now = time.monotonic()
        if self._pending is None or now - self._shown_at > _MAX_REDRAW_INTERVAL_S:
            self._show(fitted, data)
            self._shown_at = time.monotonic()
        self._scan_slide(fitted)
        if self._pending is not None:
            self._start_pending()
        elif fitted.is_rough:
            self._start((fitted.target, fitted.settings), rough=False)

    def _scan_slide(self, fitted: FitResult) -> None:
        """Scan the whole slide of a preview, once."""
        target, work = fitted.target, self.fitter.slide_scan(fitted)
        if work is None or self._scanned is not None or self._last is None:
            return
        if target.reads_same_pixels_as(self._last[0]):
            self._scanned = target
            self.slide_scan.start(work, lambda colours: self._slide_scanned(target, colours))

    def _slide_scanned(self, target: FitTarget, colours: SlideColours) -> None:
        self.fitter.set_slide_colours(target, colours)
        if self._last is not None and target.reads_same_pixels_as(self._last[0]):
            self.request(*self._last)

    def _failed(self, _: BaseException) -> None:
        if self._pending is not None:
            self._throttle.throttle()
