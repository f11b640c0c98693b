"""The curves of a training: losses and mAP, in the colours of napari's theme."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyqtgraph as pg
from napari.utils.theme import get_theme
from qtpy.QtCore import QTimer
from qtpy.QtWidgets import QSizePolicy, QVBoxLayout, QWidget

_HEIGHT = 130
# Blue and orange are told apart by everybody, on dark and on light; dashes say it again.
_TRAIN, _CHECK = "#3a9bdc", "#e69f00"
_MOST_POINTS = 4000


class Curves(QWidget):
    """Two plots above each other: `add_batch` while an epoch goes on, `read` after each epoch."""

    def __init__(self, theme: str = "dark") -> None:
        super().__init__()
        self.losses = _plot("loss", (-4, 4))
        self.scores = _plot("mAP", (-4, -4))
        self.losses.setToolTip("Loss: how wrong the model is. Both lines should fall.")
        self.scores.setToolTip(
            "mAP on the fields to check with: 1 is perfect. It should rise, then level off."
        )
        self.scores.setYRange(0, 1)
        self.lines = {
            "batch": self.losses.plot(name="training"),
            "check": self.losses.plot(name="checking", symbol="o", symbolSize=4),
            "mAP50": self.scores.plot(name="mAP50", symbol="o", symbolSize=4),
            "mAP50-95": self.scores.plot(name="mAP50-95", symbol="o", symbolSize=4),
        }
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(2)
        for plot in (self.losses, self.scores):
            layout.addWidget(plot)
        self._batches: list[tuple[float, float]] = []
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(100)
        self._soon.timeout.connect(self._draw_batches)
        self.set_theme(theme)
        self._draw_once()

    def _draw_once(self) -> None:
        """What the first drawing of a line prepares takes long: not while a run is followed."""
        for line in self.lines.values():
            line.setData([0, 1], [0, 1])
        for plot in (self.losses, self.scores):
            plot.grab()
        self.clear()

    def clear(self) -> None:
        """Forget the last run."""
        self._batches = []
        for line in self.lines.values():
            line.setData([], [])

    def add_batch(self, event: dict[str, Any]) -> None:
        """The training loss so far in this epoch."""
        losses = [value for value in event.get("losses", {}).values() if _is_number(value)]
        if losses and event.get("batches"):
            at = event["epoch"] - 1 + event["batch"] / event["batches"]
            while self._batches and self._batches[-1][0] >= at:  # an epoch that is done again
                self._batches.pop()
            self._batches = [*self._batches, (at, sum(losses))][-_MOST_POINTS:]
            if not self._soon.isActive():  # many come at once where a run is found again
                self._soon.start()

    def _draw_batches(self) -> None:
        if self._batches:
            self.lines["batch"].setData(*zip(*self._batches, strict=True))

    def read(self, folder: Path) -> None:
        """All epochs so far, from the run's results.csv."""
        rows = read_results(folder)
        epochs = [row["epoch"] for row in rows]
        if not self._batches:  # of a run that was found again
            self._draw("batch", epochs, [_total(row, "train/") for row in rows])
        self._draw_batches()
        self._draw("check", epochs, [_total(row, "val/") for row in rows])
        self._draw("mAP50", epochs, [row.get("metrics/mAP50(B)") for row in rows])
        self._draw("mAP50-95", epochs, [row.get("metrics/mAP50-95(B)") for row in rows])

    def _draw(self, line: str, epochs: Sequence[float], values: Sequence[float | None]) -> None:
        points = [(x, y) for x, y in zip(epochs, values, strict=True) if y is not None]
        self.lines[line].setData([x for x, _ in points], [y for _, y in points])

    def set_theme(self, name: str) -> None:
        """Take the colours of a theme of napari's."""
        theme = get_theme(name)
        back, text = theme.background.as_hex(), theme.text.as_hex()
        for plot in (self.losses, self.scores):
            plot.setBackground(back)
            for axis in ("left", "bottom"):
                plot.getAxis(axis).setPen(theme.secondary.as_hex())
                plot.getAxis(axis).setTextPen(text)
            plot.plotItem.legend.setLabelTextColor(text)
        self._pen("batch", _TRAIN, dashed=False)
        self._pen("check", _CHECK, dashed=True)
        self._pen("mAP50", _TRAIN, dashed=False)
        self._pen("mAP50-95", _CHECK, dashed=True)

    def _pen(self, line: str, colour: str, dashed: bool) -> None:
        made = pg.mkPen(colour, width=2, dash=[3, 2] if dashed else None)
        self.lines[line].setPen(made)
        self.lines[line].setSymbolBrush(colour)
        self.lines[line].setSymbolPen(None)


class _Epochs(pg.AxisItem):
    """An axis of whole numbers: there is no epoch 1.5."""

    def tickSpacing(self, *given: Any) -> list[tuple[float, float]]:
        return [level for level in super().tickSpacing(*given) if level[0] >= 1] or [(1, 0)]


def _plot(name: str, legend: tuple[int, int]) -> pg.PlotWidget:
    plot = pg.PlotWidget(axisItems={"bottom": _Epochs("bottom")})
    plot.setFixedHeight(_HEIGHT)
    plot.setMinimumWidth(120)
    plot.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
    plot.setMenuEnabled(False)
    plot.setMouseEnabled(False, False)  # the wheel is the panel's
    plot.hideButtons()
    plot.setLabel("left", name)
    plot.getAxis("left").setWidth(46)
    plot.addLegend(offset=legend, labelTextSize="8pt", verSpacing=-6)
    return plot


def read_results(folder: Path) -> list[dict[str, float]]:
    """The rows of a run's results.csv; none where it cannot be read."""
    try:
        with (folder / "results.csv").open(newline="", encoding="utf-8") as file:
            rows = [_numbers(row) for row in csv.DictReader(file)]
    except (OSError, csv.Error, UnicodeDecodeError):
        return []
    return [row for row in rows if "epoch" in row]


def _numbers(row: dict[str, str | None]) -> dict[str, float]:
    found = {}
    for key, text in row.items():
        try:
            value = float(text or "")
        except (TypeError, ValueError):
            continue
        if _is_number(value):
            found[str(key)] = value
    return found


def _total(row: dict[str, float], start: str) -> float | None:
    """The sum of a row's losses of one kind."""
    parts = [v for key, v in row.items() if key.startswith(start) and key.endswith("_loss")]
    return sum(parts) if parts else None


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and abs(value) < 1e9
