"""A run bar for runs that mostly are too short for one."""

from __future__ import annotations

import time
from typing import Any

from napari_beerlanet.ui.runbar import RunBar
from napari_beerlanet.ui.tasks import Task

_PATIENCE = 0.4  # seconds of running before the bar appears


class PatientRunBar(RunBar):
    """Shows the bar only for runs that take long, so that it does not flicker for others."""

    def __init__(self, task: Task) -> None:
        super().__init__(task, quiet=True)

    def _progress(self, progress: Any) -> None:
        super()._progress(progress)
        if self.bar.isHidden() and time.monotonic() - self._began > _PATIENCE:
            self._show_running(True)
