"""What was found: the light and every component as a swatch, with its share; and the curve."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from qtpy.QtCore import QPointF, Qt, Signal
from qtpy.QtGui import QColor, QPainter, QPen, QPixmap, QPolygonF
from qtpy.QtWidgets import (
    QCheckBox,
    QGridLayout,
    QLabel,
    QProgressBar,
    QToolButton,
    QWidget,
)

from napari_beerlanet.core.results import percent

if TYPE_CHECKING:
    from napari_beerlanet.core.decompose import Decomposition

_SIDE = 18


class ComponentPanel(QWidget):
    """One row for the light, one for each active component, one that lists the inactive."""

    show_only = Signal(object)  # a component's number, None for the image itself
    ticks_changed = Signal()

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setVerticalSpacing(3)
        self._grid.setColumnStretch(3, 1)
        self.ticks: dict[int, QCheckBox] = {}
        self.names: dict[int | None, QToolButton] = {}
        self.inactive = QLabel()
        self._unticked: set[int] = set()

    def ticked(self) -> list[int]:
        """The components to reconstruct from."""
        return [number for number, box in self.ticks.items() if box.isChecked()]

    def display(self, d: Decomposition) -> None:
        """Show a decomposition; boxes that the user unticked stay so."""
        self._clear()
        light = np.rint(255 * np.clip(d.light, 0, 1))
        values = ", ".join(f"{value:.2f}" for value in d.light)
        self._name(0, None, "Background light", light, f"Red, green, blue: {values}. {_CLICK}")
        for row, i in enumerate(np.flatnonzero(d.active).tolist(), start=1):
            spectrum = ", ".join(f"{value:.2f}" for value in d.spectra[:, i])
            tip = f"Absorbs red, green, blue as {spectrum}. Click to show only this one."
            self._name(row, i, f"OD {i + 1}", d.colours[i], tip)
            self._tick(row, i)
            self._share(row, float(d.share[i]), d.colours[i])
        self._grid.addWidget(self.inactive, len(d.active) + 1, 0, 1, 4)
        self.inactive.setText(_not_needed(d))
        self.inactive.setVisible(True)

    def _clear(self) -> None:
        while self._grid.count():
            widget = self._grid.takeAt(0).widget()
            if widget is self.inactive:
                widget.setVisible(False)
            elif widget is not None:
                widget.setParent(None)
                widget.deleteLater()
        self.ticks.clear()
        self.names.clear()

    def _name(self, row: int, number: int | None, text: str, colour: Any, tip: str) -> None:
        swatch, name = QLabel(), QToolButton()
        swatch.setPixmap(_swatch(colour))
        swatch.setToolTip(tip)
        name.setText(text)
        name.setToolTip(tip)
        name.setAutoRaise(True)
        name.clicked.connect(lambda: self.show_only.emit(number))
        self.names[number] = name
        self._grid.addWidget(swatch, row, 1)
        self._grid.addWidget(name, row, 2, 1, 1 if number is not None else 3)

    def _tick(self, row: int, number: int) -> None:
        box = QCheckBox()
        box.setToolTip("Take this component along when reconstructing")
        box.setAccessibleName(f"Reconstruct with OD {number + 1}")
        box.setChecked(number not in self._unticked)
        box.toggled.connect(lambda on: self._on_tick(number, on))
        self.ticks[number] = box
        self._grid.addWidget(box, row, 0)

    def _on_tick(self, number: int, on: bool) -> None:
        (self._unticked.discard if on else self._unticked.add)(number)
        self.ticks_changed.emit()

    def _share(self, row: int, share: float, colour: Any) -> None:
        bar = QProgressBar()
        bar.setRange(0, 1000)
        bar.setValue(round(1000 * share))
        bar.setTextVisible(False)
        bar.setFixedHeight(_SIDE - 6)
        name = QColor(*map(int, colour)).name()
        bar.setStyleSheet(f"QProgressBar::chunk {{ background-color: {name}; }}")
        tip = "How much of the image's optical density this component explains"
        text = QLabel(percent(share))
        for part in (bar, text):
            part.setToolTip(tip)
        self._grid.addWidget(bar, row, 3)
        self._grid.addWidget(text, row, 4, Qt.AlignmentFlag.AlignRight)


_CLICK = "Click to show the image alone."


def _not_needed(d: Decomposition) -> str:
    idle = np.flatnonzero(~d.active) + 1
    if len(idle) == len(d.active):
        return "No stain found in this image."
    return f"Not needed: OD {', '.join(map(str, idle))}" if len(idle) else ""


def _swatch(colour: Any) -> QPixmap:
    pixmap = QPixmap(_SIDE, _SIDE)
    pixmap.fill(QColor(*(int(c) for c in colour)))
    return pixmap


class Curve(QWidget):
    """The objective after each iteration: a falling line."""

    def __init__(self, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._values = np.zeros(0)
        self.setMinimumHeight(48)

    def display(self, values: Any) -> None:
        """Show a curve, (iterations,)."""
        self._values = np.asarray(values, dtype=float)
        steps = len(self._values)
        last = f"{self._values[-1]:.4g}" if steps else "none"
        self.setToolTip(
            f"How the fit improved: {steps} iterations, objective at the end {last}. "
            "A curve that has become flat means that more iterations change nothing."
        )
        self.update()

    def paintEvent(self, event: object) -> None:  # noqa: N802
        """Draw the curve in the theme's text colour."""
        values = self._values[np.isfinite(self._values)]
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        if len(values) >= 2:
            low, high = float(values.min()), float(values.max())
            x = np.linspace(2, self.width() - 2, len(values))
            y = 3 + (self.height() - 6) * (1 - (values - low) / ((high - low) or 1.0))
            painter.setPen(QPen(self.palette().text().color(), 1.5))
            points = [QPointF(float(a), float(b)) for a, b in zip(x, y, strict=True)]
            painter.drawPolyline(QPolygonF(points))
        painter.end()
