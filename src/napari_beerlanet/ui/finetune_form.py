"""The settings of a training: what is trained, how long, and the rest under Advanced."""

from __future__ import annotations

from typing import Any

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QComboBox,
    QDoubleSpinBox,
    QLabel,
    QRadioButton,
    QSpinBox,
    QVBoxLayout,
    QWidget,
)

from napari_beerlanet.core.plan import LENGTHS
from napari_beerlanet.ui.controls import Fold, form, heading

SCOPES = {
    "stain": ("Stain only", "Same cells, other colours. Hardest to spoil; one field may do."),
    "head": ("Head", "New classes, or classes drawn otherwise. The stains stay as learned."),
    "all": ("Everything", "Best with five fields or more that look different from before."),
}
"""What is trained, by `Recipe`'s name: what it is called, and when to use it."""

_AUTO = "auto"


def wrapped(text: str = "") -> QLabel:
    """A line that wraps and can be copied."""
    label = QLabel(text)
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


class FinetuneForm(QWidget):
    """Reads as settings of a `Recipe`, all but model and data; `changed` when one changes."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(heading("What to train"))
        self.scopes = self._scope_buttons(layout)
        lines = form()
        layout.addLayout(lines)
        self.length = QComboBox()
        self.length.addItems([name.capitalize() for name in LENGTHS])
        self.length.setCurrentText("Normal")
        self.length.setToolTip("How long to train. It ends early when nothing gets better.")
        self.length.currentIndexChanged.connect(lambda _: self.changed.emit())
        lines.addRow("Length", self.length)
        self.advanced = Fold("Advanced")
        layout.addWidget(self.advanced)
        self._build_advanced()

    def _scope_buttons(self, layout: QVBoxLayout) -> dict[str, QRadioButton]:
        group, made = QButtonGroup(self), {}
        for scope, (name, when) in SCOPES.items():
            choice = QRadioButton(name)
            choice.setToolTip(when)
            group.addButton(choice)
            line = wrapped(when)
            line.setContentsMargins(22, 0, 0, 2)
            layout.addWidget(choice)
            layout.addWidget(line)
            made[scope] = choice
        made["all"].setChecked(True)
        group.buttonToggled.connect(lambda _, on: self.changed.emit() if on else None)
        return made

    def _build_advanced(self) -> None:
        lines = form()
        self.advanced.body.addLayout(lines)
        self.epochs = _whole(0, 10_000, "Passes through the data; auto takes as many as it needs.")
        self.size = _whole(0, 4096, "Longer side of training images in pixels; auto: the model's.")
        self.size.setSingleStep(32)
        self.batch = _whole(1, 512, "Images at a time. Fewer need less memory.", 8)
        self.rate = QDoubleSpinBox()
        self.rate.setDecimals(6)
        self.rate.setRange(0, 1)
        self.rate.setSingleStep(0.0001)
        self.rate.setSpecialValueText(_AUTO)
        self.rate.setToolTip("Learning rate: how far a step goes. Auto is gentle to the model.")
        self.seed = _whole(0, 2**31 - 1, "Same seed, same data: same model.")
        self.seed.setSpecialValueText("")
        self.device = QComboBox()
        self.device.addItem(_AUTO)
        self.device.setToolTip("Where to train; auto takes a GPU if there is one.")
        for name, control in {
            "Epochs": self.epochs,
            "Image size": self.size,
            "Batch": self.batch,
            "Learning rate": self.rate,
            "Seed": self.seed,
            "Device": self.device,
        }.items():
            lines.addRow(name, control)
        for box in (self.epochs, self.size, self.batch, self.rate, self.seed):
            box.valueChanged.connect(lambda _: self.changed.emit())
        self.device.currentIndexChanged.connect(lambda _: self.changed.emit())

    def offer_devices(self, names: list[str]) -> None:
        """The devices that this machine has."""
        for name in names:
            if self.device.findText(name) < 0:
                self.device.addItem(name)

    @property
    def scope(self) -> str:
        """Which scope is chosen."""
        return next(scope for scope, choice in self.scopes.items() if choice.isChecked())

    def settings(self) -> dict[str, Any]:
        """By the names of `Recipe`; None leaves one to the plan."""
        return {
            "scope": self.scope,
            "length": self.length.currentText().lower(),
            "epochs": self.epochs.value() or None,
            "image_size": self.size.value() or None,
            "batch": self.batch.value(),
            "learning_rate": self.rate.value() or None,
            "seed": self.seed.value(),
            "device": self.device.currentText(),
        }


def _whole(least: int, most: int, tooltip: str, value: int | None = None) -> QSpinBox:
    box = QSpinBox()
    box.setRange(least, most)
    box.setToolTip(tooltip)
    if value is None:
        box.setSpecialValueText(_AUTO)  # shown for the least value
        value = least
    box.setValue(value)
    box.setKeyboardTracking(False)
    return box
