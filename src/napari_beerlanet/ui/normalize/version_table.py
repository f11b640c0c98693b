"""The table of Compare normalizations: what each method did to the colours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy.typing as npt
from napari.layers import Image
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QColor, QPainter, QPixmap
from qtpy.QtWidgets import QButtonGroup, QGridLayout, QLabel, QRadioButton, QSizePolicy, QWidget

from napari_beerlanet.core.normalization.methods import find_method
from napari_beerlanet.core.normalization.normalizer import Appearance
from napari_beerlanet.ui.common.controls import hint, plain_label, plain_tooltip
from napari_beerlanet.ui.common.panel import ThemedLabel
from napari_beerlanet.ui.normalize.job import MethodComparison, MethodResult
from napari_beerlanet.ui.stains.result_panel import colour_icon, theme_colour

if TYPE_CHECKING:
    from napari import Viewer

_SWATCH_PX, _MAX_STAINS = 14, 4
_ORIGINAL = "Original"
_NAME_COLUMN, _CELLS_COLUMN, _FIRST_ROW = 0, 2, 2
_CAPTIONS = (
    ("Version", "Click one to look at it, and to work on it in the other panels."),
    (
        "Colours",
        "Background, then stain vectors, measured in the same way on each: what a tenth of the "
        "pixels exceed, and Macenko's vectors.",
    ),
    ("Cells", "Cells that were found in this version, with “Use in Find cells”."),
    ("s", "Seconds that the method took."),
)


class VersionTable(QWidget):
    """A line for the image itself and one for each method; `chosen` with a method, or ""."""

    chosen = Signal(str)

    def __init__(self, viewer: Viewer) -> None:
        super().__init__()
        self._viewer = viewer
        self.lines: dict[str, VersionLine] = {}
        self._group = QButtonGroup(self)
        self._grid = QGridLayout(self)
        self._grid.setContentsMargins(0, 0, 0, 0)
        self._grid.setHorizontalSpacing(6)
        self._grid.setVerticalSpacing(2)
        self._grid.setColumnStretch(_NAME_COLUMN, 1)
        self.captions = [hint(text) for text, _ in _CAPTIONS]
        for column, (caption, (_, tip)) in enumerate(zip(self.captions, _CAPTIONS, strict=True)):
            caption.setToolTip(tip)
            self._grid.addWidget(caption, 0, column)
        self.reference_label, self.reference = QLabel("Reference"), plain_label()
        self._reference: Appearance | None = None
        self._grid.addWidget(self.reference_label, 1, 0)
        self._grid.addWidget(self.reference, 1, 1)

    def show_comparison(self, comparison: MethodComparison, layers: Mapping[str, Image]) -> None:
        """Show these results; a method without a layer cannot be chosen."""
        wanted = {"": None, **{result.method: result for result in comparison.results}}
        for method in [method for method in self.lines if method not in wanted]:
            self.lines.pop(method).remove(self._grid, self._group)
        for method in wanted:
            if method not in self.lines:
                line = VersionLine(self._viewer)
                line.name.clicked.connect(lambda *_, method=method: self.chosen.emit(method))
                self._group.addButton(line.name)
                self.lines[method] = line
        for place, (method, result) in enumerate(wanted.items()):
            line = self.lines[method]
            line.place(self._grid, 2 * place + _FIRST_ROW)
            line.show(result, comparison.original)
            line.name.setEnabled(result is None or method in layers)
        self._reference = comparison.reference
        for widget in (self.reference_label, self.reference):
            widget.setVisible(comparison.reference is not None)
        self.repaint_swatches()

    def mark(self, method: str) -> None:
        """Highlight the version that is chosen."""
        if method in self.lines:
            self.lines[method].name.setChecked(True)

    def show_counts(self, counts: Mapping[str, int]) -> None:
        """The number of cells that were found in each version, where one was searched."""
        for method, line in self.lines.items():
            line.cells.setText(f"{counts[method]:,}" if method in counts else "")
        self.captions[_CELLS_COLUMN].setVisible(bool(counts))

    def repaint_swatches(self) -> None:
        """Repaint all swatches in the colours of the present theme."""
        _paint_looks(self.reference, self._reference, self._viewer)
        for line in self.lines.values():
            line.paint()


class VersionLine:
    """The widgets of one version: a line of the grid, and a warning under it."""

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer
        self._looks: Appearance | None = None
        self._own_terms = ""
        self.name = QRadioButton()
        self.name.setSizePolicy(QSizePolicy.Policy.Ignored, QSizePolicy.Policy.Fixed)
        self.colours = QLabel()
        self.cells, self.seconds = QLabel(), QLabel()
        for label in (self.cells, self.seconds):
            label.setAlignment(Qt.AlignmentFlag.AlignRight | Qt.AlignmentFlag.AlignVCenter)
        self.warning = ThemedLabel(kind="warning")
        self._widgets = (self.name, self.colours, self.cells, self.seconds)

    def place(self, grid: QGridLayout, place: int) -> None:
        """Put the widgets into these two rows of the grid."""
        for column, widget in enumerate(self._widgets):
            grid.addWidget(widget, place, column)
        grid.addWidget(self.warning, place + 1, 0, 1, len(self._widgets))

    def remove(self, grid: QGridLayout, group: QButtonGroup) -> None:
        """Take the widgets away."""
        group.removeButton(self.name)
        for widget in (*self._widgets, self.warning):
            grid.removeWidget(widget)
            widget.deleteLater()

    def show(self, result: MethodResult | None, original: Appearance | None) -> None:
        """Show the result of a method, or the image itself where there is none."""
        self.name.setText(_ORIGINAL if result is None else result.label)
        about = "The image itself." if result is None else find_method(result.method).description
        self.name.setToolTip(f"{about}\nClick to look at this version, and to work on it.")
        warning = "" if result is None else result.warning
        self.warning.setText(f"⚠ {warning}" if warning else "")
        self.warning.setVisible(bool(warning))
        self.seconds.setText("" if result is None else f"{result.seconds:.1f}")
        for widget, (_, tip) in zip(self._widgets[2:], _CAPTIONS[2:], strict=True):
            widget.setToolTip(tip)
        self._looks = original if result is None else result.looks
        self._own_terms = "" if result is None else _own_terms(result)
        self.paint()

    def paint(self) -> None:
        """Paint the swatches in the colours of the theme."""
        _paint_looks(self.colours, self._looks, self._viewer)
        self.colours.setToolTip(plain_tooltip(self.colours.toolTip() + self._own_terms))


def _paint_looks(label: QLabel, looks: Appearance | None, viewer: Viewer) -> None:
    looks = looks or Appearance()
    colours = looks.colours()[: _MAX_STAINS + 1]
    label.setPixmap(swatches(colours, theme_colour(viewer, "secondary")))
    label.setToolTip(looks.description)


def _own_terms(result: MethodResult) -> str:
    """Background and stains before and after, as the method itself knows them."""
    known = [(word, looks) for word, looks in (("before", result.before), ("after", result.after))]
    return "".join(
        f"\n\nAs the method sees it {word}:\n{looks.description}"
        for word, looks in known
        if looks is not None
    )


def swatches(colours: Sequence[npt.ArrayLike], edge: QColor) -> QPixmap:
    """Squares side by side, at least one wide."""
    side = _SWATCH_PX
    picture = QPixmap(max(len(colours), 1) * (side + 2), side)
    picture.fill(Qt.GlobalColor.transparent)
    painter = QPainter(picture)
    for k, colour in enumerate(colours):
        square = colour_icon(colour, edge).pixmap(side, side)
        painter.drawPixmap(k * (side + 2), 0, square)
    painter.end()
    return picture
