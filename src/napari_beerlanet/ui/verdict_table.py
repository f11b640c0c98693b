"""Metrics before and after, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qtpy.QtCore import Qt
from qtpy.QtWidgets import QGridLayout, QLabel, QWidget

_HEAD = ("", "before", "after", "")
_TIP = "mAP in points of 100: how well boxes and classes fit. More is better."


class MetricsTable(QWidget):
    """Lines of `judging.Row`, in points, with an arrow that says better or worse."""

    def __init__(self) -> None:
        super().__init__()
        self.setToolTip(_TIP)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setColumnStretch(0, 1)

    def fill(self, rows: Sequence[Any]) -> None:
        """Show these."""
        self.clear()
        lines = [_HEAD]
        lines += [(r.what, _points(r.before), _points(r.after), _change(r)) for r in rows]
        for i, line in enumerate(lines):
            for j, text in enumerate(line):
                label = QLabel(text)
                if j:
                    label.setAlignment(Qt.AlignmentFlag.AlignRight)
                self._grid.addWidget(label, i, j)

    def clear(self) -> None:
        """Show nothing."""
        while self._grid.count():
            label = self._grid.takeAt(0).widget()
            label.hide()
            label.deleteLater()

    def texts(self) -> list[list[str]]:
        """What is shown, line by line."""
        found: dict[int, list[str]] = {}
        for k in range(self._grid.count()):
            i, *_ = self._grid.getItemPosition(k)
            found.setdefault(i, []).append(self._grid.itemAt(k).widget().text())
        return list(found.values())


def _points(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.1f}"


def _change(line: Any) -> str:
    if line.before is None or line.after is None:
        return ""
    points = 100 * (line.after - line.before)
    return "=" if abs(points) < 0.05 else f"{'▲' if points > 0 else '▼'} {abs(points):.1f}"
