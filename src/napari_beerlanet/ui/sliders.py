"""A slider with a field to type in and, where it makes sense, a box to leave it to the image."""

from __future__ import annotations

import math
from typing import Protocol

from qtpy.QtCore import QSignalBlocker, Qt, Signal
from qtpy.QtWidgets import QCheckBox, QHBoxLayout, QLineEdit, QSlider, QWidget

_FIELD = 58  # pixels


class Scale(Protocol):
    """How positions of a slider, 0 … `steps`, are values, and values text."""

    steps: int

    def value(self, position: int) -> float: ...
    def position(self, value: float) -> int: ...
    def parsed(self, text: str) -> float | None: ...


class WholeScale:
    """Whole numbers from `low` to `high`; larger ones may be typed up to `most`."""

    def __init__(self, low: int, high: int, most: int | None = None) -> None:
        self.low, self.steps, self.most = low, high - low, most or high

    def value(self, position: int) -> int:
        """At a position."""
        return self.low + position

    def position(self, value: float) -> int:
        """Nearest to a value."""
        return min(max(round(value) - self.low, 0), self.steps)

    def parsed(self, text: str) -> int | None:
        """A typed number, None if it is none or out of range."""
        number = int(text) if text.strip().isdigit() else 0
        return number if self.low <= number <= self.most else None


class LogScale:
    """Numbers from `low` to `high` in equal ratios; any of at least 0 may be typed."""

    def __init__(self, low: float, high: float, steps: int = 300) -> None:
        self._low, self.steps = math.log(low), steps
        self._step = (math.log(high) - self._low) / steps

    def value(self, position: int) -> float:
        """At a position."""
        return float(f"{math.exp(self._low + position * self._step):.3g}")

    def position(self, value: float) -> int:
        """Nearest to a value."""
        if value <= 0:
            return 0
        return min(max(round((math.log(value) - self._low) / self._step), 0), self.steps)

    def parsed(self, text: str) -> float | None:
        """A typed number, None if it is none or negative."""
        try:
            number = float(text.replace(",", "."))
        except ValueError:
            return None
        return number if 0 <= number < math.inf else None


class AutoSlider(QWidget):
    """Slider, field and box; `changed` whenever the user changes what it says.

    `value` is None while the box is ticked. Moving the slider or typing takes the tick away.
    """

    changed = Signal()

    def __init__(
        self, scale: Scale, value: float, tooltip: str, box: str = "", box_tooltip: str = ""
    ) -> None:
        super().__init__()
        self._scale, self._value = scale, value
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setRange(0, scale.steps)
        self.slider.setPageStep(max(1, scale.steps // 10))
        self.field = QLineEdit()
        self.field.setFixedWidth(_FIELD)
        self.field.setAlignment(Qt.AlignmentFlag.AlignRight)
        self.box = QCheckBox(box)
        self.box.setVisible(bool(box))
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(6)
        for widget, stretch in ((self.slider, 1), (self.field, 0), (self.box, 0)):
            layout.addWidget(widget, stretch)
            widget.setToolTip(tooltip)
        self.box.setToolTip(box_tooltip or tooltip)
        self.setToolTip(tooltip)
        self.show_value(value)
        self.slider.valueChanged.connect(self._moved)
        self.field.editingFinished.connect(self._typed)
        self.box.toggled.connect(self._ticked)

    @property
    def value(self) -> float | None:
        """The number, None where it is left to the image."""
        return None if self.box.isChecked() else self._value

    def set_value(self, value: float | None) -> None:
        """Set number or tick, as a user would, but without telling."""
        blocker = QSignalBlocker(self.box)
        self.box.setChecked(value is None)
        blocker.unblock()
        if value is not None:
            self.show_value(value)

    def show_value(self, value: float) -> None:
        """Show a number, for instance that which was chosen from the image, without telling."""
        self._value = value
        blocker = QSignalBlocker(self.slider)
        self.slider.setValue(self._scale.position(value))
        blocker.unblock()
        self.field.setText(f"{value:.3g}" if isinstance(value, float) else str(value))

    def _moved(self, position: int) -> None:
        self._become(self._scale.value(position))

    def _typed(self) -> None:
        typed = self._scale.parsed(self.field.text())
        if typed is None:
            self.show_value(self._value)
        elif self.field.isModified():
            self._become(typed)

    def _become(self, value: float) -> None:
        self.set_value(value)
        self.field.setModified(False)
        self.changed.emit()

    def _ticked(self, _: bool) -> None:
        self.changed.emit()
