"""How long a training will take, told before it begins."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QLabel

from napari_beerlanet.core.wording import duration
from napari_beerlanet.ui.finetune_begin import is_detector, recipe_of
from napari_beerlanet.ui.notices import sentence
from napari_beerlanet.ui.tasks import Task

_WAIT = 400  # milliseconds after a change until the time is estimated again

Asked = tuple[Path, Any, dict[str, Any], Any]
"""Project, model to begin with, settings, the dataset."""


class Estimate(QLabel):
    """One line. `asked` tells what is to be estimated, or None where nothing is."""

    def __init__(self, task: Task, asked: Callable[[], Asked | None]) -> None:
        super().__init__()
        self.setWordWrap(True)
        self.setToolTip("From a step that was measured on this machine, or from an earlier run.")
        self._task, self._asked = task, asked
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_WAIT)
        self._soon.timeout.connect(self._begin)

    def renew(self) -> None:
        """Something has changed: estimate again, soon."""
        self.cancel()
        self._soon.start()

    def cancel(self) -> None:
        """Say nothing, and stop measuring."""
        self._soon.stop()
        self._task.cancel()
        self.setText("")

    def _begin(self) -> None:
        asked = self._asked()
        if asked is None:
            return
        project, model, settings, dataset = asked
        self.setText("Timing a step …")
        self._task.start(
            lambda report: estimate(project, model, settings, dataset, report),
            lambda outlook: self.setText(describe(outlook)),
            lambda error: self.setText(sentence(error)),
        )


def estimate(project: Path, model: Any, settings: dict[str, Any], dataset: Any, report: Any) -> Any:
    """An `Outlook`; a `ValueError` where the run would be refused."""
    from napari_beerlanet.core.outlook import look_ahead
    from napari_beerlanet.core.runs import list_runs

    recipe = recipe_of(project, model, settings)
    parent = model if is_detector(model) else None
    return look_ahead(recipe, dataset, list_runs(project), report, parent)


def describe(outlook: Any) -> str:
    """For people, no more exact than it is."""
    source = "as an earlier run took" if outlook.earlier else "from a step just measured"
    length = f"{outlook.epochs} epochs, {outlook.steps} steps"
    return f"About {roughly(outlook.seconds)} on {outlook.device} ({length}; {source})."


def roughly(seconds: float) -> str:
    """A time of one or two digits: "35 s", "6 min", "1 h 20 min"."""
    if seconds < 55:
        return duration(5 * max(round(seconds / 5), 1))
    if seconds < 3000:
        return f"{max(round(seconds / 60), 1)} min"
    return duration(600 * round(seconds / 600))
