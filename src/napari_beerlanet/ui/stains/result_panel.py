"""Result of a decomposition: stains with names and swatches, background, objective, actions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
from napari.utils.theme import get_theme
from qtpy.QtCore import QObject, QPointF, QRectF, QSize, Qt, Signal
from qtpy.QtGui import QColor, QIcon, QPainter, QPaintEvent, QPen, QPixmap, QPolygonF
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QGridLayout,
    QHBoxLayout,
    QLabel,
    QLineEdit,
    QSizePolicy,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.messages import count_of, format_percent
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.presets import NamedSpectrum, StainSuggestion, nearest_dyes
from napari_beerlanet.ui.common.controls import button, combo_box, heading, hint, plain_tooltip

if TYPE_CHECKING:
    from napari import Viewer

_SWATCH_PX = 20
_CORNER_RADIUS = 3.0
_SWATCH_TIP = "Click to show only this stain; click again to show the image itself."
_NAME_TIP = (
    "The name of this stain, used for its layer, in tables and in reports. Type one, or choose a "
    "known dye: the angle says how far its published spectrum is from this one."
)
_TICK_TIP = "Use this stain when “Reconstruct checked” rebuilds the image."
_ROWS_PER_STAIN = 2  # of the grid: the stain, and the suggestion of a name for it
_CAPTION_ROW, _BACKGROUND_ROW = 0, 1000


class StainResultPanel(QWidget):
    """Shows a decomposition (`show_result`) and emits what the user requests."""

    only = Signal(int)
    named = Signal(int, str)
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
        self._grid.setColumnStretch(1, 3)
        self._grid.setColumnStretch(2, 1)
        for column, (text, tooltip) in enumerate(
            (
                ("Show", _SWATCH_TIP),
                ("Stain", _NAME_TIP),
                ("Share", "The share of the optical density that each stain explains."),
                ("", ""),
                ("Use", _TICK_TIP),
            )
        ):
            caption = hint(text)
            caption.setToolTip(tooltip)
            self._grid.addWidget(caption, _CAPTION_ROW, column)
        self._grid.addWidget(self.background, _BACKGROUND_ROW, 0)
        self._grid.addWidget(self.background_label, _BACKGROUND_ROW, 1, 1, 4)
        self.objective = QWidget()
        objective = QVBoxLayout(self.objective)
        objective.setContentsMargins(0, 0, 0, 0)
        objective.addWidget(self.inactive)
        objective.addWidget(hint("Objective"))
        objective.addWidget(self.curve)
        self.body = QVBoxLayout(self)
        self.body.setContentsMargins(0, 0, 0, 0)
        self.body.setSpacing(6)
        self.body.addWidget(heading("Stains"))
        self.body.addLayout(self._grid)
        self.body.addLayout(self._view_buttons())
        self.body.addLayout(self._file_buttons())

    def _view_buttons(self) -> QHBoxLayout:
        self.reconstruct_button = button(
            "Reconstruct checked",
            "Rebuild the colour image from the checked stains only, as a new layer.",
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
            if row.check_box.isChecked() and not row.swatch.isHidden()
        ]

    def show_result(self, d: Decomposition, own: Sequence[NamedSpectrum] = ()) -> None:
        """Show a decomposition in place of the last, the largest share first.

        `own` are stains that the user has named before, to suggest names from.
        """
        self._count = len(d.active)
        while len(self.rows) < self._count:
            number = len(self.rows)
            row = _ComponentRow(self._viewer)
            row.swatch.clicked.connect(lambda _=False, number=number: self.only.emit(number))
            row.renamed.connect(lambda name, number=number: self.named.emit(number, name))
            self.rows.append(row)
        suggestions = {i: one for i, one in d.suggestions(own).items() if one.name not in d.names}
        for i, row in enumerate(self.rows):
            if i < self._count and d.active[i]:
                row.place(self._grid, _ROWS_PER_STAIN * d.order.index(i) + 1)
                row.show(d, i, suggestions.get(i), own)
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
                "The illumination: the red, green and blue light that passes the empty slide."
            )

    def repaint_swatches(self) -> None:
        """Repaint all swatches in the colours of the present theme."""
        for swatch in (self.background, *(row.swatch for row in self.rows)):
            swatch.paint_icon()

    def mark_visible(self, components: set[int]) -> None:
        """Highlight the swatches of components whose layers are visible."""
        for i, row in enumerate(self.rows):
            row.swatch.setChecked(i in components)


class _ComponentRow(QObject):
    """The widgets of one component: two rows of the grid; `renamed` with a name of the user's."""

    renamed = Signal(str)

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self.check_box = QCheckBox()
        self.check_box.setChecked(True)
        self.check_box.setToolTip(_TICK_TIP)
        self.swatch, self.bar, self.fraction = ColourSwatch(viewer), FractionBar(viewer), QLabel()
        self.fraction.setMinimumWidth(36)
        self.name = combo_box(_NAME_TIP, 10)
        self.name.setEditable(True)
        self.name.setInsertPolicy(QComboBox.InsertPolicy.NoInsert)
        self.name.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.edit = QLineEdit()
        self.edit.setToolTip(_NAME_TIP)
        self.name.setLineEdit(self.edit)
        self.name.setCompleter(None)
        self.suggestion = QToolButton()
        self.suggestion.setAutoRaise(True)
        self.suggestion.setToolTip("Use this name.")
        self._label, self._shown, self._offered = "", "", list[str]()
        self._suggested = ""
        self._widgets = (self.swatch, self.name, self.bar, self.fraction, self.check_box)
        self._place = -1
        self.edit.editingFinished.connect(self._edited)
        self.name.activated.connect(self._chosen)
        self.suggestion.clicked.connect(lambda *_: self.renamed.emit(self._suggested))

    def place(self, grid: QGridLayout, place: int) -> None:
        """Put the widgets into these rows of the grid."""
        if place != self._place:
            self._place = place
            for column, widget in enumerate(self._widgets):
                grid.addWidget(widget, place, column)
            grid.addWidget(self.suggestion, place + 1, 1, 1, 4)

    def show(
        self,
        d: Decomposition,
        i: int,
        suggestion: StainSuggestion | None,
        own: Sequence[NamedSpectrum],
    ) -> None:
        for widget in self._widgets:
            widget.show()
        named = bool(d.names and d.names[i])
        self._show_name(d.labels[i], named, d.spectra[:, i], own)
        self.suggestion.setVisible(suggestion is not None and not named)
        if suggestion is not None:
            self._suggested = suggestion.name
            self.suggestion.setText(f"{suggestion.name}?  {suggestion.angle:.0f}°")
            about = (
                f"Call it {suggestion.name}: its spectrum is {suggestion.angle:.1f}° from this one "
                f"({suggestion.source})."
            )
            self.suggestion.setToolTip(plain_tooltip(about))
        self.swatch.set_colour(d.colours[i])
        self.bar.set_fraction(d.share[i], d.colours[i])
        self.fraction.setText(format_percent(d.share[i]))
        red, green, blue = d.spectra[:, i]
        absorption = f"Absorbs red {red:z.2f}, green {green:z.2f}, blue {blue:z.2f}. "
        self.swatch.setToolTip(absorption + _SWATCH_TIP)
        for widget in (self.bar, self.fraction):
            widget.setToolTip(
                f"{absorption}Explains {format_percent(d.share[i])} of the optical density."
            )

    def _show_name(
        self,
        label: str,
        named: bool,
        spectrum: npt.NDArray[np.float64],
        own: Sequence[NamedSpectrum],
    ) -> None:
        self._label, self._shown = label, label if named else ""
        offered = nearest_dyes(spectrum, own)
        with signals_blocked(self.name):
            self.name.clear()
            self.name.addItems([f"{one.name}  ·  {one.angle:.0f}°" for one in offered])
            self.name.setCurrentIndex(-1)
        self._offered = [one.name for one in offered]
        if not self.edit.hasFocus():
            self._write(label)

    def _write(self, text: str) -> None:
        self.edit.setText(text)
        self.edit.setCursorPosition(0)  # or a long name is shown from its end

    def _chosen(self, index: int) -> None:
        self.edit.setText(self._offered[index])
        self._edited()

    def _edited(self) -> None:
        name = self.edit.text().strip()
        if name == self._label:  # the number that it has without a name
            name = self._shown
        if name != self._shown:
            self._shown = name
            self.renamed.emit(name)
        self._write(name or self._label)

    def hide(self) -> None:
        for widget in (*self._widgets, self.suggestion):
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
