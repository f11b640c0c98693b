"""Result of a decomposition: background and stains as swatches, objective curve, actions."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from napari.utils.theme import get_theme
from qtpy.QtCore import QPointF, QRectF, QSize, Qt, Signal
from qtpy.QtGui import QColor, QIcon, QPainter, QPaintEvent, QPen, QPixmap, QPolygonF
from qtpy.QtWidgets import (
    QCheckBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.common.messages import count_of, format_percent
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.ui.common.controls import button, heading, hint

if TYPE_CHECKING:
    from napari import Viewer

_SWATCH_PX = 20
_CORNER_RADIUS = 3.0
_SWATCH_TIP = "Click to show only this stain; click again to show the image itself."


class StainResultPanel(QWidget):
    """Shows a decomposition (`show_result`) and emits what the user requests."""

    only = Signal(int)
    reconstruct = Signal(object)
    residual = Signal()
    save = Signal()
    load = Signal()
    copy = Signal()

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer, self.rows = viewer, list[_ComponentRow]()
        self._count = 0
        self.background, self.background_label = ColourSwatch(viewer), QLabel()
        self.background.setCheckable(False)
        self.inactive, self.curve = hint(), ObjectiveCurve(viewer)
        self._grid = QGridLayout()
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(6)
        self._grid.setVerticalSpacing(2)
        self._grid.setColumnStretch(3, 1)
        self._grid.addWidget(self.background, 0, 1)
        self._grid.addWidget(self.background_label, 0, 2, 1, 3)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(heading("Stains"))
        layout.addLayout(self._grid)
        layout.addWidget(self.inactive)
        layout.addLayout(self._view_buttons())
        layout.addWidget(hint("Objective"))
        layout.addWidget(self.curve)
        layout.addLayout(self._file_buttons())

    def _view_buttons(self) -> QHBoxLayout:
        self.reconstruct_button = button(
            "Reconstruct",
            "Rebuild the colour image from the checked stains alone, as a new layer.",
            lambda: self.reconstruct.emit(self.checked_components),
        )
        self.residual_button = button(
            "Residual",
            "Show what the stains do not explain: the difference of model and image in OD.",
            self.residual.emit,
        )
        return _button_row(self.reconstruct_button, self.residual_button)

    def _file_buttons(self) -> QHBoxLayout:
        self.save_button = button(
            "Save spectra …",
            "Save background, spectra and settings to a small file, to start from on other slides.",
            self.save.emit,
        )
        self.load_button = button(
            "Load …", "Start from the spectra of a saved file.", self.load.emit
        )
        self.copy_button = button(
            "Copy as Python",
            "Copy Python code that reproduces these layers.",
            self.copy.emit,
        )
        return _button_row(self.save_button, self.load_button, self.copy_button)

    @property
    def checked_components(self) -> list[int]:
        """Active components whose box is checked."""
        rows = self.rows[: self._count]
        return [
            i
            for i, row in enumerate(rows)
            if row.check_box.isChecked() and not row.check_box.isHidden()
        ]

    def show_result(self, d: Decomposition) -> None:
        """Show a decomposition in place of the last."""
        self._count = len(d.active)
        while len(self.rows) < self._count:
            number = len(self.rows)
            row = _ComponentRow(self._viewer, self._grid, number)
            row.swatch.clicked.connect(lambda _=False, number=number: self.only.emit(number))
            self.rows.append(row)
        for i, row in enumerate(self.rows):
            if i < self._count:
                row.show(d, i)
            else:
                row.hide()
        self._show_background(d)
        empty = int((~d.active).sum())
        self.inactive.setText(f"{count_of(empty, 'component')} not needed" if empty else "")
        self.inactive.setVisible(bool(empty))
        self.curve.set_values(d.objective)

    def _show_background(self, d: Decomposition) -> None:
        background = np.clip(d.light, 0, 1)
        self.background.set_colour(np.rint(255 * background))
        parts = (f"{name} {100 * v:.0f}" for name, v in zip("RGB", background, strict=True))
        self.background_label.setText("Background   " + "  ".join(parts) + " %")
        for widget in (self.background, self.background_label):
            widget.setToolTip(
                "The illumination: how much red, green and blue light passes the empty slide."
            )

    def repaint_swatches(self) -> None:
        """Repaint all swatches in the colours of the present theme."""
        for swatch in (self.background, *(row.swatch for row in self.rows)):
            swatch.paint_icon()

    def mark_visible(self, components: set[int]) -> None:
        """Highlight the swatches of components whose layers are visible."""
        for i, row in enumerate(self.rows):
            row.swatch.setChecked(i in components)


class _ComponentRow:
    """The widgets of one component: a row of the grid."""

    def __init__(self, viewer: Viewer, grid: QGridLayout, number: int) -> None:
        self.check_box = QCheckBox()
        self.check_box.setChecked(True)
        self.check_box.setToolTip("Use this stain in “Reconstruct”.")
        self.swatch, self.bar, self.fraction = ColourSwatch(viewer), FractionBar(viewer), QLabel()
        self.label = QLabel()
        self.swatch.setToolTip(_SWATCH_TIP)
        self.fraction.setMinimumWidth(36)
        self._widgets = (self.check_box, self.swatch, self.label, self.bar, self.fraction)
        for column, widget in enumerate(self._widgets):
            grid.addWidget(widget, number + 1, column)

    def show(self, d: Decomposition, i: int) -> None:
        active = bool(d.active[i])
        for widget in self._widgets:
            widget.setVisible(active)
        if not active:
            return
        self.label.setText(d.labels[i])
        self.swatch.set_colour(d.colours[i])
        self.bar.set_fraction(d.share[i], d.colours[i])
        self.fraction.setText(format_percent(d.share[i]))
        red, green, blue = d.spectra[:, i]
        absorption = f"Absorbs red {red:.2f}, green {green:.2f}, blue {blue:.2f}. "
        self.swatch.setToolTip(absorption + _SWATCH_TIP)
        for widget in (self.label, self.bar, self.fraction):
            widget.setToolTip(
                f"{absorption}Explains {format_percent(d.share[i])} of what the slide absorbs."
            )

    def hide(self) -> None:
        for widget in self._widgets:
            widget.hide()


def theme_colour(viewer: Viewer, name: str) -> QColor:
    """A colour of the viewer's theme: "text", "foreground", "highlight", …"""
    return QColor(*getattr(get_theme(viewer.theme), name).as_rgb_tuple()[:3])


def colour_icon(rgb: npt.ArrayLike, edge: QColor, width: int = 2) -> QIcon:
    """A filled square with an edge, so that white shows on white."""
    pixmap = QPixmap(2 * _SWATCH_PX, 2 * _SWATCH_PX)
    pixmap.fill(Qt.GlobalColor.transparent)
    painter = QPainter(pixmap)
    painter.setRenderHint(QPainter.RenderHint.Antialiasing)
    painter.setPen(QPen(edge, width))
    painter.setBrush(QColor(*(int(v) for v in np.asarray(rgb))))
    inset = width / 2
    painter.drawRoundedRect(QRectF(pixmap.rect()).adjusted(inset, inset, -inset, -inset), 7, 7)
    painter.end()
    return QIcon(pixmap)


class ColourSwatch(QToolButton):
    """A colour to click on; its ring tells that its layer is visible."""

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer, self.rgb = viewer, (255, 255, 255)
        self.setIconSize(QSize(_SWATCH_PX, _SWATCH_PX))
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
        highlighted = self.isChecked()
        edge = theme_colour(self._viewer, "text" if highlighted else "secondary")
        self.setIcon(colour_icon(self.rgb, edge, 5 if highlighted else 2))


class FractionBar(QWidget):
    """A fraction from 0 to 1 as a bar in the component's colour."""

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer, self.fraction, self._rgb = viewer, 0.0, (128, 128, 128)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setFixedHeight(12)
        self.setMinimumWidth(40)

    def set_fraction(self, fraction: float, rgb: npt.ArrayLike) -> None:
        """Set the fraction and its colour, RGB from 0 to 255."""
        self.fraction = float(fraction)
        red, green, blue = (int(v) for v in np.asarray(rgb))
        self._rgb = red, green, blue
        self.setAccessibleName(f"{100 * self.fraction:.0f} percent")
        self.update()

    def paintEvent(self, event: QPaintEvent | None) -> None:
        """Paint it."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        whole = QRectF(0, 1, self.width(), self.height() - 2)
        painter.setBrush(theme_colour(self._viewer, "foreground"))
        painter.drawRoundedRect(whole, _CORNER_RADIUS, _CORNER_RADIUS)
        part = QRectF(whole)
        part.setWidth(max(whole.width() * min(self.fraction, 1.0), 2.0))
        painter.setBrush(QColor(*self._rgb))
        painter.drawRoundedRect(part, _CORNER_RADIUS, _CORNER_RADIUS)
        painter.end()


class ObjectiveCurve(QWidget):
    """The objective over the iterations, on a logarithmic scale."""

    def __init__(self, viewer: Viewer) -> None:
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
                f"Objective (residual plus penalties) after each of {len(self.values)} iterations: "
                f"from {self.values[0]:.4g} to {self.values[-1]:.4g}; flat once it has converged."
            )
        self.update()

    def points(self) -> list[QPointF]:
        """The curve in pixels of the widget."""
        values = np.log(np.maximum(self.values, np.finfo(float).tiny))
        span = float(np.ptp(values)) or 1.0
        across, down = self.width() - 8, self.height() - 8
        n = max(len(values) - 1, 1)
        return [
            QPointF(4 + across * k / n, 4 + down * (1 - (v - values.min()) / span))
            for k, v in enumerate(values)
        ]

    def paintEvent(self, event: QPaintEvent | None) -> None:
        """Paint it."""
        painter = QPainter(self)
        painter.setRenderHint(QPainter.RenderHint.Antialiasing)
        painter.setPen(Qt.PenStyle.NoPen)
        painter.setBrush(theme_colour(self._viewer, "foreground"))
        painter.drawRoundedRect(QRectF(self.rect()), _CORNER_RADIUS, _CORNER_RADIUS)
        painter.setBrush(Qt.BrushStyle.NoBrush)
        painter.setPen(QPen(theme_colour(self._viewer, "text"), 1.5))
        points = self.points()
        if len(points) == 1:
            painter.drawPoint(points[0])
        painter.drawPolyline(QPolygonF(points))
        painter.end()


def _button_row(*buttons: QWidget) -> QHBoxLayout:
    layout = QHBoxLayout()
    layout.setSpacing(4)
    for each in buttons:
        layout.addWidget(each, 1)
    return layout
