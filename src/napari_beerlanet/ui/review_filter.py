"""The controls that say what to look at, and in which order."""

from __future__ import annotations

from typing import Any

import numpy as np
from qtpy.QtCore import Qt, QTimer, Signal
from qtpy.QtWidgets import QComboBox, QLineEdit, QVBoxLayout, QWidget
from superqt import QLabeledDoubleRangeSlider

from napari_beerlanet.core.classstain import UNLIKE
from napari_beerlanet.core.reviewing import ORDERS, STATES, Filter, Order, Review
from napari_beerlanet.ui.controls import button, form, hint, row

_ALL_CLASSES, _ALL_STATES, _NO_RANGE = "all classes", "all states", "any density"
_PAUSE = 30  # milliseconds after the last movement
_ORDER_HINTS = {
    "confidence": "The surest first.",
    "least confident": "The most doubtful first.",
    "uncertain": "Those nearest to the threshold first: they change the count.",
    "unusual": "Those whose stain is least like the rest of their class first.",
    "unlike training": "Those whose stain is farthest from that of their class in training first.",
    "position": "Line by line, as one reads.",
    "shuffled": "At random, always in the same way: for an unbiased sample.",
}
_NOT_TOLD = (
    "Not known for these boxes: find cells again, with a model that tells its training's densities."
)


class ReviewFilter(QWidget):
    """Emits `changed` a moment after the last movement; `chosen` and `order` are what it says."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_PAUSE)
        self._soon.timeout.connect(self.changed)
        self._build()

    def _build(self) -> None:
        self.classes = _box("Show only this class.", [_ALL_CLASSES])
        self.states = _box("Show only what is in this state.", [_ALL_STATES, *STATES])
        self.text = QLineEdit()
        self.text.setPlaceholderText("find in class, state and other words")
        self.text.setToolTip(
            "Show only rows with this text in class, state or another column of words."
        )
        self.text.setClearButtonEnabled(True)
        self.confidence = _slider("Show only detections with a confidence in this range.")
        self.confidence.setRange(0.0, 1.0)
        self.confidence.setValue((0.25, 1.0))
        self.column = _box("Another value to choose by: size, or density of a stain.", [_NO_RANGE])
        self.between = _slider("Show only detections with this value in this range.")
        self.between.hide()
        self.others = hint()
        self.others.hide()
        self.order = _box("In which order to go through them.", list(ORDERS))
        self.order.setMinimumContentsLength(max(map(len, ORDERS)))
        self._offer_orders(told=False)
        clear = button("Clear", "Show everything again.", self.clear)
        lines = form()
        lines.addRow("Show", row(self.classes, self.states, clear, stretch=0))
        lines.addRow("Text", self.text)
        lines.addRow("Confidence", self.confidence)
        lines.addRow("And", self.column)
        lines.addRow("", self.between)
        lines.addRow("", self.others)
        lines.addRow("Order", self.order)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addLayout(lines)
        for combo in (self.classes, self.states, self.order):
            combo.currentIndexChanged.connect(self._tell)
        self.column.currentIndexChanged.connect(self._take_column)
        self.text.textChanged.connect(self._tell)
        self.confidence.valueChanged.connect(self._tell)
        self.between.valueChanged.connect(self._take_range)
        self._extents: dict[str, tuple[float, float]] = {}
        self._ranges: dict[str, tuple[float, float]] = {}

    def use(self, review: Review, confidence: float | None = None) -> None:
        """Offer the classes and columns of a review."""
        self.blockSignals(True)
        self.update_classes(review.names)
        columns = [name for name in review.numeric if name not in ("id", "confidence")]
        self._extents = {name: _extent(review.column(name)) for name in columns}
        self._ranges = {name: r for name, r in self._ranges.items() if name in self._extents}
        _refill(self.column, [_NO_RANGE, *self._extents])
        self._take_column()
        self._offer_orders(review.tells_training)
        if confidence is not None:
            self.confidence.setValue((confidence, 1.0))
        self.blockSignals(False)
        self._tell()

    def _offer_orders(self, told: bool) -> None:
        """All orders; the one by the training only where it is `told`, else with the reason."""
        model: Any = self.order.model()
        for place, order in enumerate(ORDERS):
            known = told or order != UNLIKE
            model.item(place).setEnabled(known)
            model.item(place).setToolTip(_ORDER_HINTS[order] if known else _NOT_TOLD)
        if not told and self.chosen_order == UNLIKE:
            self.order.setCurrentIndex(ORDERS.index("unusual"))

    def update_classes(self, names: list[str]) -> None:
        """Offer these classes; the choice stays where it can."""
        _refill(self.classes, [_ALL_CLASSES, *names])

    @property
    def chosen(self) -> Filter:
        """What to look at."""
        low, high = self.confidence.value()
        ranges = {"confidence": (low - 1e-9 if low > 0 else 0.0, 1.0 if high > 0.999 else high)}
        ranges |= self._ranges
        return Filter(
            classes=_one(self.classes),
            states=_one(self.states),
            ranges=ranges,
            text=self.text.text().strip(),
        )

    @property
    def chosen_order(self) -> Order:
        """In which order."""
        return ORDERS[max(self.order.currentIndex(), 0)]

    def clear(self) -> None:
        """Show everything."""
        self.classes.setCurrentIndex(0)
        self.states.setCurrentIndex(0)
        self._ranges.clear()
        self.column.setCurrentIndex(0)
        self._take_column()
        self.text.clear()
        self.confidence.setValue((0.0, 1.0))

    def choose_range(self, name: str, low: float, high: float) -> None:
        """Set the range of a column, as a brushed histogram does."""
        if name == "confidence":
            self.confidence.setValue((max(low, 0.0), min(high, 1.0)))
        elif name in self._extents:
            self.column.setCurrentText(name)
            self.between.setValue((low, high))

    def range_of(self, name: str) -> tuple[float, float] | None:
        """The range that a column is restricted to, None for none."""
        if name == "confidence":
            return tuple(self.confidence.value())
        return self._ranges.get(name)

    def _take_range(self) -> None:
        """A range that leaves nothing out is none."""
        name, chosen = self.column.currentText(), tuple(self.between.value())
        if name in self._extents:
            low, high = self._extents[name]
            self._ranges.pop(name, None)
            if chosen[0] > low or chosen[1] < high:
                self._ranges[name] = chosen
        self._say_others()
        self._tell()

    def _say_others(self) -> None:
        """Name the ranges that are in force and not on the slider."""
        others = {n: r for n, r in self._ranges.items() if n != self.column.currentText()}
        words = [f"{name} {low:.3g} to {high:.3g}" for name, (low, high) in others.items()]
        self.others.setText("And " + ", ".join(words) if words else "")
        self.others.setVisible(bool(words))

    def _take_column(self) -> None:
        name = self.column.currentText()
        self.between.setVisible(self.column.currentIndex() > 0)
        if name in self._extents:
            low, high = self._extents[name]
            self.between.blockSignals(True)
            self.between.setRange(low, high)
            self.between.setDecimals(0 if high - low > 50 else 2)
            self.between.setValue(self._ranges.get(name, (low, high)))
            self.between.blockSignals(False)
        self._say_others()
        self._tell()

    def _tell(self, *_: Any) -> None:
        self._soon.start()


def _box(tooltip: str, items: list[str]) -> QComboBox:
    made = QComboBox()
    made.addItems(items)
    made.setToolTip(tooltip)
    made.setMinimumContentsLength(7)
    made.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
    return made


def _slider(tooltip: str) -> Any:
    made = QLabeledDoubleRangeSlider(Qt.Orientation.Horizontal)
    made.setToolTip(tooltip)
    made.setDecimals(2)
    return made


def _refill(box: QComboBox, items: list[str]) -> None:
    """Other items; the chosen text stays if it is among them."""
    text = box.currentText()
    was = box.blockSignals(True)
    box.clear()
    box.addItems(items)
    box.setCurrentIndex(max(box.findText(text), 0))
    box.blockSignals(was)


def _one(box: QComboBox) -> frozenset[str] | None:
    return frozenset({box.currentText()}) if box.currentIndex() > 0 else None


def _extent(values: Any) -> tuple[float, float]:
    """The range of a column with a little room, of any numbers."""
    numbers = np.asarray(values, np.float64)
    numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return 0.0, 1.0
    low, high = float(numbers.min()), float(numbers.max())
    room = max((high - low) * 1e-3, 1e-3)
    return low - room, high + room
