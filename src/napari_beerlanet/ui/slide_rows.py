"""What only slides need to be told: which level is fitted, and what is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

from qtpy.QtCore import QObject, QSignalBlocker, Signal
from qtpy.QtWidgets import QCheckBox, QComboBox, QFormLayout, QSizePolicy, QWidget

from napari_beerlanet.core.tissue import Kind
from napari_beerlanet.ui.controls import row
from napari_beerlanet.ui.slide_choice import PREVIEW, SlideChoice

_LEAST = 1_000_000  # pixels of a level that is worth a fit
_KINDS: tuple[tuple[Kind, bool, str], ...] = (
    (
        "glass",
        False,
        "Fit tissue only. What is glass is told by a small picture of the slide; a rim of it about "
        "the tissue is kept, as it shows the light.",
    ),
    ("pen", True, "Leave out strokes of pens: green, blue, red or black ink is no stain."),
    ("border", True, "Leave out what is black and reaches the edge, as scanners leave it."),
)

Shapes = Sequence[tuple[int, int]]


class SlideRows(QObject):
    """Two rows of a form; hidden where the image is no slide. `changed` when one was set."""

    changed = Signal()

    def __init__(self, rows: QFormLayout) -> None:
        super().__init__()
        self._rows, self._shapes = rows, list[tuple[int, int]]()
        self.level = QComboBox()
        self.level.setToolTip(
            "What is fitted. All of it takes as long as reading the slide once; a coarser level is "
            "sooner done. A preview of some tiles is always shown first."
        )
        self.level.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.level.setMinimumContentsLength(12)
        self.level.setSizeAdjustPolicy(
            QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon
        )
        self.kinds = {kind: _box(kind, on, tooltip) for kind, on, tooltip in _KINDS}
        self.left_out = row(*self.kinds.values())
        rows.addRow("Fit on", self.level)
        rows.addRow("Leave out", self.left_out)
        self.level.activated.connect(lambda *_: self.changed.emit())
        for box in self.kinds.values():
            box.toggled.connect(lambda *_: self.changed.emit())
        self.offer([])

    def offer(self, shapes: Shapes) -> None:
        """The levels (H, W) of a slide, the finest first; [] where there is none."""
        self._shapes = [s for k, s in enumerate(shapes) if not k or math.prod(s) >= _LEAST]
        blocker = QSignalBlocker(self.level)
        self.level.clear()
        for k, (height, width) in enumerate(self._shapes):
            name = "All of it" if not k else f"Level {k}"
            self.level.addItem(f"{name}: {height:,} × {width:,}")
        self.level.addItem(f"Preview only: {PREVIEW} tiles")
        blocker.unblock()
        for widget in (self.level, self.left_out):
            self._see(widget, bool(shapes))

    def _see(self, widget: QWidget, visible: bool) -> None:
        widget.setVisible(visible)
        self._rows.labelForField(widget).setVisible(visible)

    @property
    def choice(self) -> SlideChoice:
        """What is set."""
        chosen = self.level.currentIndex()
        sampled = chosen >= len(self._shapes)
        kinds = tuple(kind for kind, box in self.kinds.items() if box.isChecked())
        return SlideChoice(0 if sampled else max(chosen, 0), sampled, kinds)


def _box(text: str, on: bool, tooltip: str) -> QCheckBox:
    made = QCheckBox(text)
    made.setChecked(on)
    made.setToolTip(tooltip)
    return made
