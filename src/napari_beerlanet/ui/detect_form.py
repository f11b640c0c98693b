"""The settings of a detection: where to look, how sure to be, how large cells are."""

from __future__ import annotations

from typing import Any, Literal

from qtpy.QtCore import QSignalBlocker, Qt, Signal
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QDoubleSpinBox,
    QHBoxLayout,
    QPushButton,
    QSizePolicy,
    QSlider,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.ui.controls import Fold, form, hint, row
from napari_beerlanet.ui.detect_where import Where

_WHERE: dict[str, Where] = {
    "Whole image": "whole",
    "Current view": "view",
    "Selected shapes": "shapes",
}


class Percent(QWidget):
    """A slider with a field beside it, from 0 to 1 in hundredths. `changed` on every movement."""

    changed = Signal(float)

    def __init__(self, value: float, tooltip: str, low: float = 0.01) -> None:
        super().__init__()
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setRange(round(100 * low), 99)
        self.box = QDoubleSpinBox()
        self.box.setRange(low, 0.99)
        self.box.setSingleStep(0.01)
        self.box.setDecimals(2)
        self.box.setButtonSymbols(QDoubleSpinBox.ButtonSymbols.NoButtons)
        self.box.setFixedWidth(56)
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.slider, 1)
        layout.addWidget(self.box)
        for widget in (self.slider, self.box):
            widget.setToolTip(tooltip)
        self.set_value(value)
        self.slider.valueChanged.connect(lambda v: self._take(v / 100))
        self.box.valueChanged.connect(self._take)

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return round(self.box.value(), 2)

    def set_value(self, value: float) -> None:
        """Move both without a word."""
        blockers = [QSignalBlocker(self.slider), QSignalBlocker(self.box)]
        self.slider.setValue(round(100 * value))
        self.box.setValue(value)
        del blockers

    def _take(self, value: float) -> None:
        self.set_value(value)
        self.changed.emit(self.value)


class DetectForm(QWidget):
    """All settings. `confidence_changed` and `labels_changed` act on what is shown already."""

    confidence_changed = Signal(float)
    labels_changed = Signal(bool)
    draw_asked = Signal(bool)

    def __init__(self, image: QWidget) -> None:
        super().__init__()
        self._make_controls()
        shown = form()
        shown.addRow("Image", image)
        shown.addRow("Where", self.where)
        shown.addRow("Cell size", row(self.size_auto, self.size, self.draw, stretch=1))
        shown.addRow("Confidence", self.confidence)
        self.more = Fold("More settings")
        hidden = form()
        hidden.addRow("Overlap", self.overlap)
        hidden.addRow("Device", self.device)
        self.more.body.addLayout(hidden)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        layout.addLayout(shown)
        layout.addWidget(self.size_note)
        layout.addWidget(self.labels)
        layout.addWidget(self.densities)
        layout.addWidget(self.skip_glass)
        layout.addWidget(self.slide_note)
        layout.addWidget(self.more)

    def _make_controls(self) -> None:
        self.where = _combo(
            list(_WHERE),
            "Where to look: in the whole image, in what the canvas shows, or under the shapes that "
            "are selected in any Shapes layer.",
        )
        self.confidence = Percent(
            0.25,
            "How sure the model must be of a box. Moving this changes boxes and counts at once, "
            "without another run.",
        )
        self.overlap = Percent(
            0.7,
            "Boxes of one class that overlap more than this are taken for one cell. Lower it if "
            "cells are boxed twice, raise it if touching cells are lost. Needs another run.",
        )
        self.labels = QCheckBox("Label boxes with class and confidence")
        self.labels.setToolTip("Labels appear as soon as few enough boxes are in view.")
        self.densities = QCheckBox("Add the stains as layers")
        self.densities.setToolTip(
            "Add one layer for each stain as this model sees it, from the spectra it has learned."
        )
        self.skip_glass = QCheckBox("Skip glass")
        self.skip_glass.setChecked(True)
        self.skip_glass.setToolTip("Look only at tiles of the slide with something on them.")
        self.slide_note = hint()
        self.set_slide(False)
        self.say_slide("")
        self.device = _combo(
            ["Automatic"], "Where the model runs. Automatic takes a graphics card if there is one."
        )
        self._make_size()
        self.confidence.changed.connect(self.confidence_changed)
        self.labels.toggled.connect(self.labels_changed)

    def _make_size(self) -> None:
        self.size_auto = QCheckBox("automatic")
        self.size_auto.setChecked(True)
        self.size_auto.setToolTip(
            "Take the size of cells from the pixel size, or find it by looking at the image."
        )
        self.size = QDoubleSpinBox()
        self.size.setRange(1, 20_000)
        self.size.setDecimals(0)
        self.size.setValue(50)
        self.size.setSuffix(" px")
        self.size.setEnabled(False)
        self.size.setToolTip("How wide a typical cell is, in pixels of the image.")
        self.draw = QPushButton("Draw")
        self.draw.setCheckable(True)
        self.draw.setToolTip("Draw a box over one typical cell; its size is taken.")
        self.size_note = hint()
        self.size_note.hide()
        self.size_auto.toggled.connect(lambda on: self.size.setEnabled(not on))
        self.draw.toggled.connect(self.draw_asked)

    @property
    def chosen_where(self) -> Where:
        """Where to look."""
        return _WHERE[self.where.currentText()]

    @property
    def object_size(self) -> float | Literal["auto"]:
        """In image pixels."""
        return "auto" if self.size_auto.isChecked() else float(self.size.value())

    @property
    def chosen_device(self) -> str:
        """A name for `pick_device`."""
        return "auto" if self.device.currentIndex() <= 0 else self.device.currentText()

    def offer_devices(self, names: list[str]) -> None:
        """Which devices this machine has."""
        chosen = self.chosen_device
        blocker = QSignalBlocker(self.device)
        self.device.clear()
        self.device.addItems(["Automatic", *names])
        self.device.setCurrentIndex(1 + names.index(chosen) if chosen in names else 0)
        blocker.unblock()

    def take_size(self, pixels: float) -> None:
        """A size that was measured."""
        self.size_auto.setChecked(False)
        self.size.setValue(pixels)
        self.say_size(f"Taken from your box: {pixels:.0f} pixels.")

    def set_slide(self, is_slide: bool) -> None:
        """Show what only slides need."""
        self.skip_glass.setVisible(is_slide)

    def say_slide(self, text: str) -> None:
        """What was done of the slide before."""
        self.slide_note.setText(text)
        self.slide_note.setVisible(bool(text))

    def say_size(self, text: str) -> None:
        """What size was used, and why."""
        self.size_note.setText(text)
        self.size_note.setVisible(bool(text))


def _combo(entries: list[str], tooltip: str) -> Any:
    made = QComboBox()
    made.addItems(entries)
    made.setToolTip(tooltip)
    made.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
    return made
