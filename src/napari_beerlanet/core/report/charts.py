"""Charts of a report: curves, histograms and the confusion matrix, as numbers for the template."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.floating]

CHART_WIDTH, CHART_HEIGHT = 340, 250
_MARGIN_LEFT, _MARGIN_RIGHT, _MARGIN_TOP, _MARGIN_BOTTOM = 44, 12, 12, 40
_MAX_POINTS = 400
_NO_MATCH = "no match"


def chart_x(fraction: float) -> float:
    """A place from 0 to 1 across, in units of the drawing."""
    width = CHART_WIDTH - _MARGIN_LEFT - _MARGIN_RIGHT
    return round(_MARGIN_LEFT + float(fraction) * width, 1)


def chart_y(fraction: float) -> float:
    """A place from 0 to 1 upwards, in units of the drawing."""
    height = CHART_HEIGHT - _MARGIN_TOP - _MARGIN_BOTTOM
    return round(CHART_HEIGHT - _MARGIN_BOTTOM - float(fraction) * height, 1)


@dataclass(frozen=True, eq=False)
class ChartLine:
    """A curve `x`, `y` (n,) with a name and a colour "#rrggbb"; `mark` is a point on it."""

    name: str
    colour: str
    x: Values
    y: Values
    mark: tuple[float, float] | None = None

    @property
    def points(self) -> str:
        """The curve as SVG has it, thinned out where it has many points."""
        n = len(self.x)
        step = max(n // _MAX_POINTS, 1)
        which = np.unique(np.append(np.arange(0, n, step), max(n - 1, 0)))
        chosen = [int(k) for k in which if k < n]
        return " ".join(f"{chart_x(self.x[k])},{chart_y(self.y[k])}" for k in chosen)


@dataclass(frozen=True)
class LineChart:
    """Curves over 0 … 1 in both directions, with a vertical line at a threshold."""

    lines: Sequence[ChartLine]
    x_title: str
    y_title: str
    threshold: float | None = None
    caption: str = ""


class Bar(NamedTuple):
    """A bar of a histogram, in units of the drawing; `pale` where it does not count."""

    x: float
    y: float
    width: float
    height: float
    pale: bool


@dataclass(frozen=True, eq=False)
class HistogramChart:
    """A histogram over 0 … 1, (n,) counts; what is left of the threshold is pale."""

    counts: npt.NDArray[np.int64]
    colour: str
    x_title: str
    threshold: float | None = None
    caption: str = ""
    y_title: str = "objects"

    @property
    def highest(self) -> int:
        """The scale's end, at least 1."""
        return max(int(self.counts.max(initial=0)), 1)

    @property
    def bars(self) -> list[Bar]:
        """One for each count."""
        step = 1 / max(len(self.counts), 1)
        width = round(chart_x(step) - chart_x(0) - 1, 1)
        made = []
        for k, count in enumerate(self.counts.tolist()):
            top = chart_y(count / self.highest)
            below = self.threshold is not None and (k + 1) * step <= self.threshold + 1e-9
            left = round(chart_x(k * step) + 0.5, 1)
            made.append(Bar(left, top, width, round(chart_y(0) - top, 1), below))
        return made


class ConfusionCell(NamedTuple):
    """A count as text, its share of the column, and whether the classes agree."""

    text: str
    share: float
    kind: str


@dataclass(frozen=True, eq=False)
class ConfusionTable:
    """A confusion matrix [detected as, annotated as] of some classes and "no match"."""

    matrix: npt.NDArray[np.int64]
    classes: Sequence[str]
    no_match: str = _NO_MATCH

    @property
    def names(self) -> list[str]:
        """Of rows and columns."""
        return [*self.classes, self.no_match]

    @property
    def rows(self) -> list[tuple[str, list[ConfusionCell]]]:
        """A name and cells each; what matches nothing on either side has no count."""
        totals, last = np.maximum(self.matrix.sum(axis=0), 1), len(self.classes)
        rows = []
        for i, name in enumerate(self.names):
            cells = []
            for j in range(last + 1):
                if i == j == last:
                    cells.append(ConfusionCell("", 0.0, "none"))
                    continue
                count = int(self.matrix[i, j])
                kind = "right" if i == j else "wrong"
                cells.append(ConfusionCell(str(count), count / totals[j], kind))
            rows.append((name, cells))
        return rows
