"""A slider with a text field and, where it makes sense, an “auto” check box."""

from __future__ import annotations

import math
from typing import Protocol

from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QCheckBox, QHBoxLayout, QLineEdit, QSlider, QWidget
from superqt.utils import signals_blocked

_FIELD_WIDTH_PX = 58


class SliderScale(Protocol):
    """Maps the positions of a slider, 0 … `steps`, to values, and text to values."""

    steps: int

    def value(self, position: int) -> float: ...
    def position(self, value: float) -> int: ...
    def parse(self, text: str) -> float | None: ...


class IntegerScale:
    """Whole numbers from `low` to `high`; larger ones may be typed up to `maximum`."""

    def __init__(self, low: int, high: int, maximum: int | None = None) -> None:
        self.low, self.steps, self.maximum = low, high - low, maximum or high

    def value(self, position: int) -> int:
        """At a position."""
        return self.low + position

    def position(self, value: float) -> int:
        """Nearest to a value."""
        return min(max(round(value) - self.low, 0), self.steps)

    def parse(self, text: str) -> int | None:
        """A typed number, None if it is none or out of range."""
        number = int(text) if text.strip().isdigit() else 0
        return number if self.low <= number <= self.maximum else None


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

    def parse(self, text: str) -> float | None:
        """A typed number, None if it is none or negative."""
        try:
            number = float(text.replace(",", "."))
        except ValueError:
            return None
        return number if 0 <= number < math.inf else None


class AutoSlider(QWidget):
    """A slider, a text field and a check box; `changed` whenever the user changes the value.

    `value` is None while the box is checked. Moving the slider or typing unchecks it.
    """

    changed = Signal()

    def __init__(
        self, scale: SliderScale, value: float, tooltip: str, box: str = "", box_tooltip: str = ""
    ) -> None:
        super().__init__()
        self._scale, self._value = scale, value
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setRange(0, scale.steps)
        self.slider.setPageStep(max(1, scale.steps // 10))
        self.field = QLineEdit()
        self.field.setFixedWidth(_FIELD_WIDTH_PX)
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
        self.display_value(value)
        self.slider.valueChanged.connect(self._moved)
        self.field.editingFinished.connect(self._typed)
        self.box.toggled.connect(self._ticked)

    @property
    def value(self) -> float | None:
        """The number, None where it is chosen from the image."""
        return None if self.box.isChecked() else self._value

    def set_value(self, value: float | None) -> None:
        """Set the number, or check the box for None, without a signal."""
        with signals_blocked(self.box):
            self.box.setChecked(value is None)
        if value is not None:
            self.display_value(value)

    def display_value(self, value: float) -> None:
        """Display a number, such as one that was chosen from the image, without a signal."""
        self._value = value
        with signals_blocked(self.slider):
            self.slider.setValue(self._scale.position(value))
        self.field.setText(f"{value:.3g}" if isinstance(value, float) else str(value))

    def _moved(self, position: int) -> None:
        self._set_by_user(self._scale.value(position))

    def _typed(self) -> None:
        typed = self._scale.parse(self.field.text())
        if typed is None:
            self.display_value(self._value)
        elif self.field.isModified():
            self._set_by_user(typed)

    def _set_by_user(self, value: float) -> None:
        self.set_value(value)
        self.field.setModified(False)
        self.changed.emit()

    def _ticked(self, _: bool) -> None:
        self.changed.emit()
