"""What was found: light and stains as swatches with their shares, and what to do with them."""

from __future__ import annotations

from typing import Any

import numpy as np
from qtpy.QtCore import Signal
from qtpy.QtWidgets import QCheckBox, QGridLayout, QHBoxLayout, QLabel, QVBoxLayout, QWidget

from napari_beerlanet.core.decompose import Decomposition
from napari_beerlanet.core.results import percent
from napari_beerlanet.ui.controls import button, heading, hint
from napari_beerlanet.ui.swatches import Curve, ShareBar, Swatch

_ONLY = "Click to show only this stain, and once more to see the image itself."


class _Row:
    """The widgets of one component, side by side in the grid."""

    def __init__(self, viewer: Any, grid: QGridLayout, number: int) -> None:
        self.tick = QCheckBox()
        self.tick.setChecked(True)
        self.tick.setToolTip("Tick the stains that “Reconstruct” builds an image from.")
        self.swatch, self.bar, self.share = Swatch(viewer), ShareBar(viewer), QLabel()
        self.label = QLabel(f"OD {number + 1}")
        self.swatch.setToolTip(_ONLY)
        self.share.setMinimumWidth(36)
        self._widgets = (self.tick, self.swatch, self.label, self.bar, self.share)
        for column, widget in enumerate(self._widgets):
            grid.addWidget(widget, number + 1, column)

    def show(self, d: Decomposition, i: int) -> None:
        shown = bool(d.active[i])
        for widget in self._widgets:
            widget.setVisible(shown)
        if not shown:
            return
        self.swatch.set_colour(d.colours[i])
        self.bar.set_share(d.share[i], d.colours[i])
        self.share.setText(percent(d.share[i]))
        red, green, blue = d.spectra[:, i]
        absorbs = f"Absorbs red {red:.2f}, green {green:.2f}, blue {blue:.2f}. "
        self.swatch.setToolTip(absorbs + _ONLY)
        for widget in (self.label, self.bar, self.share):
            widget.setToolTip(f"{absorbs}Explains {percent(d.share[i])} of what the slide absorbs.")

    def hide(self) -> None:
        for widget in self._widgets:
            widget.hide()


class DecomposePanel(QWidget):
    """Emits what the user asks for; `show` what there is to see."""

    only = Signal(int)
    reconstruct = Signal(object)
    residual = Signal()
    save = Signal()
    load = Signal()
    copy = Signal()

    def __init__(self, viewer: Any) -> None:
        super().__init__()
        self._viewer, self.rows = viewer, list[_Row]()
        self._count = 0
        self.light, self.light_label = Swatch(viewer), QLabel()
        self.light.setCheckable(False)
        self.inactive, self.curve = hint(), Curve(viewer)
        self._grid = QGridLayout()
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(6)
        self._grid.setVerticalSpacing(2)
        self._grid.setColumnStretch(3, 1)
        self._grid.addWidget(self.light, 0, 1)
        self._grid.addWidget(self.light_label, 0, 2, 1, 3)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addWidget(heading("Stains found"))
        layout.addLayout(self._grid)
        layout.addWidget(self.inactive)
        layout.addLayout(self._views())
        layout.addWidget(hint("How the search went"))
        layout.addWidget(self.curve)
        layout.addLayout(self._files())

    def _views(self) -> QHBoxLayout:
        self.reconstruct_button = button(
            "Reconstruct",
            "Build the colour image again from the ticked stains alone, as a new layer.",
            lambda: self.reconstruct.emit(self.ticked),
        )
        self.residual_button = button(
            "Residual",
            "Show what the stains do not explain: how far model and image are apart, in OD.",
            self.residual.emit,
        )
        return _side_by_side(self.reconstruct_button, self.residual_button)

    def _files(self) -> QHBoxLayout:
        self.save_button = button(
            "Save spectra …",
            "Write light, spectra and settings to a small file, to start from on other slides.",
            self.save.emit,
        )
        self.load_button = button(
            "Load …", "Start from the spectra of such a file.", self.load.emit
        )
        self.copy_button = button(
            "Copy as Python",
            "Copy a few lines of Python that make the same layers again.",
            self.copy.emit,
        )
        return _side_by_side(self.save_button, self.load_button, self.copy_button)

    @property
    def ticked(self) -> list[int]:
        """Active components whose box is ticked."""
        rows = self.rows[: self._count]
        return [i for i, row in enumerate(rows) if row.tick.isChecked() and not row.tick.isHidden()]

    def show_found(self, d: Decomposition) -> None:
        """Show a decomposition in place of the last."""
        self._count = len(d.active)
        while len(self.rows) < self._count:
            number = len(self.rows)
            row = _Row(self._viewer, self._grid, number)
            row.swatch.clicked.connect(lambda _=False, number=number: self.only.emit(number))
            self.rows.append(row)
        for i, row in enumerate(self.rows):
            if i < self._count:
                row.show(d, i)
            else:
                row.hide()
        self._show_light(d)
        empty = [f"{i + 1}" for i in range(self._count) if not d.active[i]]
        self.inactive.setText(f"Not needed here: OD {', '.join(empty)}" if empty else "")
        self.inactive.setVisible(bool(empty))
        self.curve.set_values(d.objective)

    def _show_light(self, d: Decomposition) -> None:
        light = np.clip(d.light, 0, 1)
        self.light.set_colour(np.rint(255 * light))
        parts = (f"{name} {100 * v:.0f}" for name, v in zip("RGB", light, strict=True))
        self.light_label.setText("Light   " + "  ".join(parts) + " %")
        for widget in (self.light, self.light_label):
            widget.setToolTip("The empty slide: how much red, green and blue light passes it.")

    def repaint_swatches(self) -> None:
        """In the colours of another theme."""
        for swatch in (self.light, *(row.swatch for row in self.rows)):
            swatch.paint_icon()

    def mark_shown(self, shown: set[int]) -> None:
        """Ring the swatches of components whose layers are visible."""
        for i, row in enumerate(self.rows):
            row.swatch.setChecked(i in shown)


def _side_by_side(*buttons: QWidget) -> QHBoxLayout:
    layout = QHBoxLayout()
    layout.setSpacing(4)
    for each in buttons:
        layout.addWidget(each, 1)
    return layout
