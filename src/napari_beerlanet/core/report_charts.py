"""Charts as SVG inside the page: curves, bars, and the confusion matrix as a table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from .report_html import escaped

Values = npt.NDArray[np.floating]

_WIDTH, _HEIGHT = 340.0, 250.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 44.0, 12.0, 12.0, 40.0
_MOST_POINTS = 400


@dataclass(frozen=True, eq=False)
class Line:
    """A curve `x`, `y` (n,) with a name and a colour "#rrggbb"; `mark` is a point on it."""

    name: str
    colour: str
    x: Values
    y: Values
    mark: tuple[float, float] | None = None


def curves(
    lines: Sequence[Line], x_title: str, y_title: str, at: float | None = None, words: str = ""
) -> str:
    """Curves over 0 … 1 in both directions, with a line upright at `at`."""
    parts = [_frame(x_title, y_title, [0, 0.25, 0.5, 0.75, 1], [0, 0.25, 0.5, 0.75, 1], 1.0)]
    if at is not None:
        x = _x(at)
        parts.append(f'<line class="at" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(0)}" y2="{_y(1)}"/>')
    for line in lines:
        parts.append(
            f'<polyline fill="none" stroke="{escaped(line.colour)}" points="{_points(line)}"/>'
        )
    for line in lines:
        if line.mark is not None:
            x, y = _x(line.mark[0]), _y(line.mark[1])
            parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{escaped(line.colour)}"/>')
    return _svg(parts, words or f"{y_title} over {x_title}")


def bars(
    counts: npt.NDArray[np.int64],
    colour: str,
    x_title: str,
    at: float | None = None,
    words: str = "",
) -> str:
    """A histogram over 0 … 1, (n,) counts; what is left of `at` is pale."""
    most = max(int(counts.max(initial=0)), 1)
    parts = [_frame(x_title, "objects", [0, 0.25, 0.5, 0.75, 1], [0, most], float(most))]
    step = 1 / max(len(counts), 1)
    for k, count in enumerate(counts.tolist()):
        low = k * step
        pale = ' opacity="0.3"' if at is not None and low + step <= at + 1e-9 else ""
        height = _y(0) - _y(count / most)
        parts.append(
            f'<rect x="{_x(low) + 0.5:.1f}" y="{_y(count / most):.1f}" fill="{escaped(colour)}"'
            f' width="{_x(step) - _x(0) - 1:.1f}" height="{height:.1f}"{pale}/>'
        )
    if at is not None:
        parts.append(
            f'<line class="at" x1="{_x(at):.1f}" x2="{_x(at):.1f}" y1="{_y(0)}" y2="{_y(1)}"/>'
        )
    return _svg(parts, words or f"histogram of {x_title}")


def confusion(matrix: npt.NDArray[np.int64], names: Sequence[str]) -> str:
    """A table [found as, is] whose cells are the darker the larger their share of the column."""
    labels = [*names, "not annotated"]
    whole = np.maximum(matrix.sum(axis=0), 1)
    head = "".join(f'<th scope="col">{escaped(name)}</th>' for name in labels)
    rows = []
    for i, name in enumerate([*names, "not found"]):
        cells = []
        for j in range(len(labels)):
            count = int(matrix[i, j])
            last = i == j == len(names)
            share = 0.0 if last else count / whole[j]
            kind = "none" if last else "right" if i == j else "wrong"
            text = "" if last else str(count)
            cells.append(f'<td class="{kind}" style="--share:{share:.3f}">{text}</td>')
        rows.append(f'<tr><th scope="row">{escaped(name)}</th>{"".join(cells)}</tr>')
    corner = '<th class="corner"><span>found as ↓</span> <span>annotated →</span></th>'
    return (
        f'<div class="wide"><table class="confusion"><thead><tr>{corner}{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def _x(share: float) -> float:
    return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)


def _y(share: float) -> float:
    return round(_HEIGHT - _BOTTOM - share * (_HEIGHT - _TOP - _BOTTOM), 1)


def _points(line: Line) -> str:
    step = max(len(line.x) // _MOST_POINTS, 1)
    which = np.unique(np.append(np.arange(0, len(line.x), step), max(len(line.x) - 1, 0)))
    which = which[which < len(line.x)]
    return " ".join(f"{_x(float(line.x[k])):.1f},{_y(float(line.y[k])):.1f}" for k in which)


def _frame(
    x_title: str, y_title: str, across: Sequence[float], up: Sequence[float], most: float
) -> str:
    parts = []
    for value in across:
        x = _x(value)
        parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{_y(0)}" y2="{_y(1)}"/>')
        parts.append(f'<text x="{x:.1f}" y="{_y(0) + 15}" text-anchor="middle">{value:g}</text>')
    for value in up:
        y = _y(value / most)
        parts.append(f'<line class="grid" x1="{_x(0):.1f}" x2="{_x(1):.1f}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{value:g}</text>')
    middle = (_TOP + _HEIGHT - _BOTTOM) / 2
    parts.append(
        f'<text x="{_x(0.5):.1f}" y="{_HEIGHT - 6}" text-anchor="middle">{escaped(x_title)}</text>'
    )
    parts.append(
        f'<text transform="translate(11 {middle}) rotate(-90)" text-anchor="middle">'
        f"{escaped(y_title)}</text>"
    )
    return "".join(parts)


def _svg(parts: Sequence[str], words: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}" role="img" aria-label="{escaped(words)}">'
        f"{''.join(parts)}</svg>"
    )
