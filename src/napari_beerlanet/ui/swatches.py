"""Small painted things: a colour to click on, a share as a bar, a falling curve."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from napari.utils.theme import get_theme
from qtpy.QtCore import QPointF, QRectF, QSize, Qt
from qtpy.QtGui import QColor, QIcon, QPainter, QPaintEvent, QPen, QPixmap, QPolygonF
from qtpy.QtWidgets import QSizePolicy, QToolButton, QWidget

_SIDE = 20
_ROUND = 3.0


def theme_colour(viewer: Any, name: str) -> QColor:
    """A colour of the viewer's theme: "text", "foreground", "highlight", …"""
    return QColor(*getattr(get_theme(viewer.theme), name).as_rgb_tuple()[:3])


def colour_icon(rgb: npt.ArrayLike, edge: QColor, width: int = 2) -> QIcon:
    """A filled square with an edge, so that white shows on white."""
    pixmap = QPixmap(2 * _SIDE, 2 * _SIDE)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(edge, width))
    painter.setBrush(QColor(*(int(v) for v in np.asarray(rgb))))
    inset = width / 2
    painter.drawRoundedRect(QRectF(pixmap.rect()).adjusted(inset, inset, -inset, -inset), 7, 7)
    painter.end()
    return QIcon(pixmap)


class Swatch(QToolButton):
    """A colour to click on; its ring says that this is what is shown."""

    def __init__(self, viewer: Any) -> None:
        super().__init__()
        self._viewer, self.rgb = viewer, (255, 255, 255)
        self.setIconSize(QSize(_SIDE, _SIDE))
        self.setCheckable(True)
        self.setAutoRaise(True)
        self.toggled.connect(self.paint_icon)

    def set_colour(self, rgb: npt.ArrayLike) -> None:
        """RGB from 0 to 255."""
        red, green, blue = (int(v) for v in np.asarray(rgb))
        if (red, green, blue) != self.rgb or self.icon().isNull():
            self.rgb = red, green, blue
            self.paint_icon()

    def paint_icon(self) -> None:
        """Paint it in the colours of the theme."""
        ringed = self.isChecked()
        edge = theme_colour(self._viewer, "text" if ringed else "secondary")
        self.setIcon(colour_icon(self.rgb, edge, 5 if ringed else 2))


class ShareBar(QWidget):
    """A share from 0 to 1 as a bar in the component's colour."""

    def __init__(self, viewer: Any) -> None:
        super().__init__()
        self._viewer, self.share, self._rgb = viewer, 0.0, (128, 128, 128)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(12)
        self.setMinimumWidth(40)

    def set_share(self, share: float, rgb: npt.ArrayLike) -> None:
        """What to show, and its colour, RGB from 0 to 255."""
        self.share = float(share)
        red, green, blue = (int(v) for v in np.asarray(rgb))
        self._rgb = red, green, blue
        self.setAccessibleName(f"{100 * self.share:.0f} percent")
        self.update()

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint it."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        whole = QRectF(0, 1, self.width(), self.height() - 2)
        painter.setBrush(theme_colour(self._viewer, "foreground"))
        painter.drawRoundedRect(whole, _ROUND, _ROUND)
        part = QRectF(whole)
        part.setWidth(max(whole.width() * min(self.share, 1.0), 2.0))
        painter.setBrush(QColor(*self._rgb))
        painter.drawRoundedRect(part, _ROUND, _ROUND)
        painter.end()


class Curve(QWidget):
    """The objective over the iterations, on a logarithmic scale: steep at first, then level."""

    def __init__(self, viewer: Any) -> None:
        super().__init__()
        self._viewer = viewer
        self.values: npt.NDArray[np.float64] = np.empty(0)
        self.setFixedHeight(44)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)

    def set_values(self, values: npt.NDArray[np.float64]) -> None:
        """The objective after each iteration."""
        self.values = np.asarray(values, float)
        if len(self.values):
            self.setToolTip(
                f"What the model leaves unexplained, plus the price of its stains, after each of "
                f"{len(self.values)} steps: from {self.values[0]:.4g} to {self.values[-1]:.4g}. "
                "It is level at the end when the search has settled."
            )
        self.update()

    def points(self) -> list[QPointF]:
        """Where the curve runs within the widget."""
        values = np.log(np.maximum(self.values, np.finfo(float).tiny))
        span = float(np.ptp(values)) or 1.0
        across, down = self.width() - 8, self.height() - 8
        n = max(len(values) - 1, 1)
        return [
            QPointF(4 + across * k / n, 4 + down * (1 - (v - values.min()) / span))
            for k, v in enumerate(values)
        ]

    def paintEvent(self, event: QPaintEvent) -> None:
        """Paint it."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(theme_colour(self._viewer, "foreground"))
        painter.drawRoundedRect(QRectF(self.rect()), _ROUND, _ROUND)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(theme_colour(self._viewer, "text"), 1.5))
        points = self.points()
        if len(points) == 1:
            painter.drawPoint(points[0])
        painter.drawPolyline(QPolygonF(points))
        painter.end()
