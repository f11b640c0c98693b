"""Training curves: training and validation loss, and mAP or accuracy, in napari's colours."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyqtgraph as pg
from qtpy.QtWidgets import QSizePolicy, QVBoxLayout, QWidget
from superqt.utils import qthrottled

from napari_beerlanet.core.common.storage import regular_file
from napari_beerlanet.ui.common.controls import PlotTheme

_PLOT_HEIGHT, _TOP_MARGIN = 130, 7  # pixels; the highest number of an axis is half above the plot
# Blue and orange can be distinguished with any colour vision, on dark and light; dashes help, too.
_TRAIN_COLOUR, _VAL_COLOUR = "#3a9bdc", "#e69f00"
_MAX_BATCH_POINTS = 4000
_SCORE_KEYS = ("mAP50", "mAP50-95")  # of the lines that show scores, whatever they are called
_REDRAW_INTERVAL_MS = 100


class ScoreLine(NamedTuple):
    """A score over epochs: its name, and the column of results.csv that has it."""

    name: str
    column: str


SCORES = {
    "detect": (
        "mAP (%)",
        "mAP on the validation images; 100 % is perfect. It should rise, then level off.",
        ScoreLine("mAP50", "metrics/mAP50(B)"),
        ScoreLine("mAP50-95", "metrics/mAP50-95(B)"),
    ),
    "classify": (
        "accuracy (%)",
        "Accuracy on the validation crops; balanced: the mean over types. It should rise, then "
        "level off.",
        ScoreLine("balanced", "metrics/balanced_accuracy"),
        ScoreLine("accuracy", "metrics/accuracy"),
    ),
}
"""What the plot of scores shows, by the task of a run: its title, its tooltip, and two lines."""


class TrainingCurves(QWidget):
    """Plots of loss and scores: call `add_batch` during an epoch, `read_epochs` after each one."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = _plot("loss", (-4, 4))
        self.scores = _plot("", (-4, -4))
        self.losses.setToolTip("Training and validation loss. Both should fall.")
        self.scores.setYRange(0, 100)
        self.lines = {
            "train": self.losses.plot(name="training"),
            "val": self.losses.plot(name="validation", symbol="o", symbolSize=4),
            "mAP50": self.scores.plot(name="mAP50", symbol="o", symbolSize=4),
            "mAP50-95": self.scores.plot(name="mAP50-95", symbol="o", symbolSize=4),
        }
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        for plot in (self.losses, self.scores):
            layout.addWidget(plot)
        self._batches: list[tuple[float, float]] = []
        # Many batches come at once when a run that is already active is attached to.
        self._draw_batches_soon = qthrottled(
            self._draw_batches, timeout=_REDRAW_INTERVAL_MS, leading=False, parent=self
        )
        self._set_pen("train", _TRAIN_COLOUR, dashed=False)
        self._set_pen("val", _VAL_COLOUR, dashed=True)
        self._set_pen("mAP50", _TRAIN_COLOUR, dashed=False)
        self._set_pen("mAP50-95", _VAL_COLOUR, dashed=True)
        self.task = ""
        self.set_task("detect")
        self._warm_up()

    def set_task(self, task: str) -> None:
        """Show the scores of detectors ("detect") or of classifiers ("classify")."""
        if task == self.task:
            return
        self.task = task
        title, tooltip, *lines = SCORES[task]
        self.scores.setLabel("left", title)
        self.scores.setToolTip(tooltip)
        legend = self.scores.getPlotItem().legend
        legend.clear()
        for key, line in zip(_SCORE_KEYS, lines, strict=True):
            legend.addItem(self.lines[key], line.name)

    def _warm_up(self) -> None:
        """Draw once now: the first drawing of a line is slow, and a run must not stall on it."""
        for line in self.lines.values():
            line.setData([0, 1], [0, 1])
        for plot in (self.losses, self.scores):
            plot.grab()
        self.clear()

    def clear(self) -> None:
        """Remove the curves of the last run."""
        self._batches = []
        for line in self.lines.values():
            line.setData([], [])

    def add_batch(self, event: dict[str, Any]) -> None:
        """The training loss so far in this epoch."""
        losses = [value for value in event.get("losses", {}).values() if _is_plottable(value)]
        if losses and event.get("steps"):
            at = event["epochs"] * event["step"] / event["steps"]
            while self._batches and self._batches[-1][0] >= at:  # a repeated epoch after a resume
                self._batches.pop()
            self._batches = [*self._batches, (at, sum(losses))][-_MAX_BATCH_POINTS:]
            self._draw_batches_soon()

    def _draw_batches(self) -> None:
        if self._batches:
            self.lines["train"].setData(*zip(*self._batches, strict=True))

    def read_epochs(self, folder: Path) -> None:
        """Plot all epochs so far, from the run's results.csv."""
        rows = read_results(folder)
        epochs = [row["epoch"] for row in rows]
        if not self._batches:  # none were seen: the run was started elsewhere
            self._draw("train", epochs, [_total_loss(row, "train/") for row in rows])
        self._draw_batches()
        self._draw("val", epochs, [_total_loss(row, "val/") for row in rows])
        for key, line in zip(_SCORE_KEYS, SCORES[self.task][2:], strict=True):
            scores = [row.get(line.column) for row in rows]
            self._draw(key, epochs, [None if score is None else 100 * score for score in scores])

    def _draw(self, line: str, epochs: Sequence[float], values: Sequence[float | None]) -> None:
        points = [(x, y) for x, y in zip(epochs, values, strict=True) if y is not None]
        self.lines[line].setData([x for x, _ in points], [y for _, y in points])

    def _set_pen(self, line: str, colour: str, dashed: bool) -> None:
        pen = pg.mkPen(colour, width=2, dash=[3, 2] if dashed else None)
        self.lines[line].setPen(pen)
        self.lines[line].setSymbolBrush(colour)
        self.lines[line].setSymbolPen(None)


class _EpochAxis(pg.AxisItem):
    """An axis of whole numbers: there is no epoch 1.5."""

    def tickSpacing(self, *args: Any) -> list[tuple[float, float]]:
        return [level for level in super().tickSpacing(*args) if level[0] >= 1] or [(1, 0)]


def _plot(name: str, legend: tuple[int, int]) -> pg.PlotWidget:
    plot = pg.PlotWidget(background=None, axisItems={"bottom": _EpochAxis("bottom")})
    plot.setFixedHeight(_PLOT_HEIGHT)
    plot.setMinimumWidth(120)
    plot.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
    plot.setMenuEnabled(False)
    plot.setMouseEnabled(False, False)  # the wheel is the panel's
    plot.hideButtons()
    plot.setLabel("left", name)
    plot.getAxis("left").setWidth(46)
    plot.addLegend(offset=legend, labelTextSize="8pt", verSpacing=-6)
    plot.getPlotItem().layout.setContentsMargins(1, _TOP_MARGIN, 4, 1)
    PlotTheme(plot)
    return plot


def read_results(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's results.csv; none where it cannot be read."""
    try:
        with regular_file(folder / "results.csv").open(newline="", encoding="utf-8") as file:
            rows = [_numeric_values(row) for row in csv.DictReader(file)]
    except (OSError, csv.Error, UnicodeDecodeError):
        return []
    return [row for row in rows if "epoch" in row]


def _numeric_values(row: dict[str, str | None]) -> dict[str, float]:
    values = {}
    for key, text in row.items():
        try:
            value = float(text or "")
        except (TypeError, ValueError):
            continue
        if _is_plottable(value):
            values[str(key)] = value
    return values


def _total_loss(row: dict[str, float], prefix: str) -> float | None:
    """The sum of a row's losses: box, class and distribution focal loss; a classifier has one."""
    parts = [v for key, v in row.items() if key.startswith(prefix) and key.endswith("loss")]
    return sum(parts) if parts else None


def _is_plottable(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e9
