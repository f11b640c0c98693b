"""Fits that follow sliders: started at once when idle, never queued, stale ones dropped."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from qtpy.QtCore import QObject, QTimer

from napari_beerlanet.ui.density_arrays import Data, density_data
from napari_beerlanet.ui.fitting import Fitted, Fitter, Settings, Target
from napari_beerlanet.ui.tasks import Task

Request = tuple[Target, Settings]
Shown = Callable[[Fitted, list[Data]], None]

_GATHER = 15  # milliseconds in which movements become one request
_AT_LEAST_EVERY = 0.15  # seconds: a picture while the slider moves, even if it is outdated


class Live(QObject):
    """Fits what was asked for last.

    While a first look is worked out, which is short, a newer request waits for it; anything longer
    is superseded. A result that is outdated is shown only if the last picture is some time ago, so
    that a slider that is moved for long is followed.

    A slide is shown as a preview first. Then `counting` goes through all of it, while sliders move
    the preview; what it brings is fitted as the sliders are by then.
    """

    def __init__(
        self, task: Task, counting: Task, fitter: Fitter, show: Shown, parent: QObject
    ) -> None:
        super().__init__(parent)
        self.task, self.counting, self.fitter, self._show = task, counting, fitter, show
        self._wanted: Request | None = None
        self._last: Request | None = None
        self._counted: Target | None = None  # or being counted, or given up
        self._short = False
        self._shown_at = 0.0
        self._gather = QTimer(self)
        self._gather.setSingleShot(True)
        self._gather.setInterval(_GATHER)
        self._gather.timeout.connect(self._go)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits."""
        return not self.task.running and self._wanted is None and not self.counting.running

    def ask(self, target: Target, settings: Settings, anew: bool = False) -> None:
        """Fit this, soon, and nothing that was asked for earlier.

        `anew`: go through a slide again that the user did not let be counted.
        """
        self._wanted = self._last = target, settings
        if not target.same_as(self._counted) or (anew and not self.counting.running):
            self._counted = None
            self.counting.cancel()
        if not self._gather.isActive():
            self._gather.start()

    def forget(self) -> None:
        """The pixels have changed."""
        self._counted = None
        self.counting.cancel()
        self.fitter.forget()

    def stop(self) -> None:
        """Fit nothing more of what was asked for."""
        self._wanted = self._last = self._counted = None
        self._gather.stop()
        self.task.cancel()
        self.counting.cancel()

    def _go(self) -> None:
        if self._wanted is not None and not (self.task.running and self._short):
            request, self._wanted = self._wanted, None
            self._start(request, first=True)

    def _start(self, request: Request, first: bool) -> None:
        target, settings = request
        fitter = self.fitter
        self._short = first and (
            settings.first_look is not None or settings.iterations != "converge"
        )

        def work(report: Any) -> tuple[Fitted, list[Data]]:
            fitted = fitter.fit(target, settings, report, first)
            return fitted, density_data(fitted)

        self.task.start(work, self._done, self._failed)

    def _done(self, result: tuple[Fitted, list[Data]]) -> None:
        fitted, data = result
        now = time.monotonic()
        if self._wanted is None or now - self._shown_at > _AT_LEAST_EVERY:
            self._show(fitted, data)
            self._shown_at = time.monotonic()
        self._count(fitted)
        if self._wanted is not None:
            self._go()
        elif fitted.first_look:
            self._start((fitted.target, fitted.settings), first=False)

    def _count(self, fitted: Fitted) -> None:
        """Go through the whole slide of a preview, once."""
        target, work = fitted.target, self.fitter.counting(fitted)
        if work is None or self._counted is not None or self._last is None:
            return
        if target.same_as(self._last[0]):
            self._counted = target
            self.counting.start(work, lambda seen: self._take(target, seen))

    def _take(self, target: Target, seen: Any) -> None:
        self.fitter.take(target, seen)
        if self._last is not None and target.same_as(self._last[0]):
            self.ask(*self._last)

    def _failed(self, _: BaseException) -> None:
        if self._wanted is not None:
            self._gather.start()
