"""Which detections are listed, and in which order."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QStandardItemModel
from qtpy.QtWidgets import QComboBox, QLineEdit, QVBoxLayout, QWidget
from superqt import QLabeledDoubleRangeSlider
from superqt.utils import qdebounced, signals_blocked

from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.review.review import (
    ORDERS,
    OUT_OF_DOMAIN,
    STATES,
    UNCERTAIN_TYPE,
    DetectionFilter,
    Review,
    ReviewOrder,
)
from napari_beerlanet.ui.common.controls import button, combo_box, form, hint, not_none, row
from napari_beerlanet.ui.review.table import column_label

_ALL_CLASSES, _ALL_STATES, _NO_COLUMN = "all classes", "all states", "none"
_ALL_TYPES, _NO_TYPE = "all types", "without a type"
_DEBOUNCE_MS = 30
_ORDER_TEXTS = {
    "confidence": ("highest confidence", "Highest confidence first."),
    "least confident": ("lowest confidence", "Lowest confidence first."),
    "uncertain": ("uncertain", "Nearest to the threshold first: these change the count."),
    UNCERTAIN_TYPE: ("least certain type", "Lowest probability of the cell type first."),
    "unusual": ("unusual stain", "Stain least like the rest of the class first."),
    OUT_OF_DOMAIN: (
        "out of domain",
        "Stain farthest from that of the class in the training data first.",
    ),
    "position": ("position", "Line by line, from top left."),
    "shuffled": ("random", "In a fixed random order: an unbiased sample."),
}
"""How each order is called on the screen, and its tooltip."""
_NO_TYPES = "These boxes have no types of a classifier: classify them first."
_NO_TRAINING_STATISTICS = (
    "Unknown for these boxes: detect again, with a model that records the stains of its training "
    "images."
)


class FilterForm(QWidget):
    """Emits `changed` a moment after the last change."""

    changed = Signal()

    def __init__(self) -> None:
        super().__init__()
        self._changed_debounced = qdebounced(self._emit_changed, timeout=_DEBOUNCE_MS, parent=self)
        self._build()

    def _build(self) -> None:
        self.classes = _filter_combo_box("Show only detections of this class.", [_ALL_CLASSES])
        self.states = _filter_combo_box(
            "Show only detections in this state.", [_ALL_STATES, *STATES]
        )
        self.types = _filter_combo_box("Show only cells of this type.", [_ALL_TYPES])
        self.text = QLineEdit()
        self.text.setPlaceholderText("Search class, state and other text columns")
        self.text.setToolTip(
            "Show only detections with this text in class, state or another text column."
        )
        self.text.setClearButtonEnabled(True)
        self.confidence = _range_slider("Show only detections with a confidence in this range.")
        self.confidence.setRange(0.0, 1.0)
        self.confidence.setValue((DetectSettings.default("confidence"), 1.0))
        self.column = _filter_combo_box(
            "Another value to filter by, such as area or the density of a stain.", [_NO_COLUMN]
        )
        self.range_slider = _range_slider("Show only detections with the value in this range.")
        self.range_slider.hide()
        self.other_ranges_line = hint()
        self.other_ranges_line.hide()
        orders = [_ORDER_TEXTS[order][0] for order in ORDERS]
        self.order = _filter_combo_box("The order of table and gallery.", orders)
        self.order.setMinimumContentsLength(max(map(len, orders)))
        self._update_orders(set())
        clear = button("Clear", "Remove all filters.", self.clear)
        lines = form()
        lines.addRow("Show", row(self.classes, self.states, stretch=0))
        self.types_row = row(self.types, stretch=0)
        lines.addRow("Type", self.types_row)
        self._lines = lines
        lines.addRow("Text", row(self.text, clear, stretch=0))
        lines.addRow("Confidence", self.confidence)
        lines.addRow("Filter by", self.column)
        lines.addRow("", self.range_slider)
        lines.addRow("", self.other_ranges_line)
        lines.addRow("Order", self.order)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addLayout(lines)
        self.update_types([])
        for combo in (self.classes, self.types, self.states, self.order):
            combo.currentIndexChanged.connect(self._changed_soon)
        self.column.currentIndexChanged.connect(self._apply_column)
        self.text.textChanged.connect(self._changed_soon)
        self.confidence.valueChanged.connect(self._changed_soon)
        self.range_slider.valueChanged.connect(self._apply_range)
        self._extents: dict[str, tuple[float, float]] = {}
        self._ranges: dict[str, tuple[float, float]] = {}

    def set_review(self, review: Review, confidence: float | None = None) -> None:
        """Offer the classes and columns of a review."""
        self.blockSignals(True)
        self.update_classes(review.names)
        self.update_types(review.type_names)
        columns = [name for name in review.numeric_columns if name not in ("id", "confidence")]
        self._extents = {name: _extent(review.column(name)) for name in columns}
        self._ranges = {name: r for name, r in self._ranges.items() if name in self._extents}
        _replace_items(self.column, {_NO_COLUMN: ""} | {column_label(n): n for n in self._extents})
        self._apply_column()
        known: set[ReviewOrder] = {OUT_OF_DOMAIN} if review.has_domain_shift else set()
        self._update_orders(known | ({UNCERTAIN_TYPE} if review.has_type_probability else set()))
        if confidence is not None:
            self.confidence.setValue((confidence, 1.0))
        self.blockSignals(False)
        self._changed_soon()

    def _update_orders(self, known: Collection[ReviewOrder]) -> None:
        """Enable all orders; those by domain shift and by type only where these are known."""
        model = self.order.model()
        assert isinstance(model, QStandardItemModel)  # Qt's own, of a combo box
        reasons = {OUT_OF_DOMAIN: _NO_TRAINING_STATISTICS, UNCERTAIN_TYPE: _NO_TYPES}
        for place, order in enumerate(ORDERS):
            enabled = order in known or order not in reasons
            item = not_none(model.item(place))
            item.setEnabled(enabled)
            item.setToolTip(_ORDER_TEXTS[order][1] if enabled else reasons[order])
        instead: dict[ReviewOrder, ReviewOrder] = {
            OUT_OF_DOMAIN: "unusual",
            UNCERTAIN_TYPE: "confidence",
        }
        if self.current_order in instead and self.current_order not in known:
            self.order.setCurrentIndex(ORDERS.index(instead[self.current_order]))

    def update_classes(self, names: list[str]) -> None:
        """Offer these classes; the selection stays if it is among them."""
        _replace_items(self.classes, dict.fromkeys([_ALL_CLASSES, *names]))

    def update_types(self, names: list[str]) -> None:
        """Offer these cell types; the selection stays if it is among them."""
        texts = [_ALL_TYPES, *names, _NO_TYPE] if names else [_ALL_TYPES]
        _replace_items(self.types, dict.fromkeys(texts))
        self.types_row.setVisible(bool(names))
        label = self._lines.labelForField(self.types_row)
        if label is not None:
            label.setVisible(bool(names))

    @property
    def current_filter(self) -> DetectionFilter:
        """Which detections to list."""
        low, high = self.confidence.value()
        ranges = {"confidence": (low - 1e-9 if low > 0 else 0.0, 1.0 if high > 0.999 else high)}
        ranges |= self._ranges
        return DetectionFilter(
            classes=_selected_item(self.classes),
            states=_selected_item(self.states),
            ranges=ranges,
            text=self.text.text().strip(),
            types=self._selected_types(),
        )

    def _selected_types(self) -> frozenset[str] | None:
        without = self.types.count() > 1 and self.types.currentIndex() == self.types.count() - 1
        return frozenset({""}) if without else _selected_item(self.types)

    @property
    def min_confidence(self) -> float:
        """The confidence threshold."""
        return float(self.confidence.value()[0])

    @property
    def current_order(self) -> ReviewOrder:
        """In which order to list them."""
        return ORDERS[max(self.order.currentIndex(), 0)]

    def clear(self) -> None:
        """Remove all filters."""
        self.classes.setCurrentIndex(0)
        self.types.setCurrentIndex(0)
        self.states.setCurrentIndex(0)
        self._ranges.clear()
        self.column.setCurrentIndex(0)
        self._apply_column()
        self.text.clear()
        self.confidence.setValue((0.0, 1.0))

    def set_range(self, name: str, low: float, high: float) -> None:
        """Filter by the range of a column."""
        if name == "confidence":
            self.confidence.setValue((max(low, 0.0), min(high, 1.0)))
        elif name in self._extents:
            self.column.setCurrentText(column_label(name))
            self.range_slider.setValue((low, high))

    def range_of(self, name: str) -> tuple[float, float] | None:
        """The range that a column is filtered by, None for none."""
        if name == "confidence":
            return tuple(self.confidence.value())
        return self._ranges.get(name)

    def _apply_range(self) -> None:
        """A range that excludes nothing is none."""
        name, selected = self.column.currentData(), tuple(self.range_slider.value())
        if name in self._extents:
            low, high = self._extents[name]
            self._ranges.pop(name, None)
            if selected[0] > low or selected[1] < high:
                self._ranges[name] = selected
        self._show_other_ranges()
        self._changed_soon()

    def _show_other_ranges(self) -> None:
        """Name the active ranges that are not on the slider."""
        others = {n: r for n, r in self._ranges.items() if n != self.column.currentData()}
        texts = [
            f"{column_label(name)} {low:.3g} to {high:.3g}" for name, (low, high) in others.items()
        ]
        self.other_ranges_line.setText("Also " + ", ".join(texts) if texts else "")
        self.other_ranges_line.setVisible(bool(texts))

    def _apply_column(self) -> None:
        name = self.column.currentData()
        self.range_slider.setVisible(self.column.currentIndex() > 0)
        if name in self._extents:
            low, high = self._extents[name]
            with signals_blocked(self.range_slider):
                self.range_slider.setRange(low, high)
                self.range_slider.setDecimals(0 if high - low > 50 else 2)
                self.range_slider.setValue(self._ranges.get(name, (low, high)))
        self._show_other_ranges()
        self._changed_soon()

    def _changed_soon(self, *_: Any) -> None:
        self._changed_debounced()

    def _emit_changed(self) -> None:
        self.changed.emit()


def _filter_combo_box(tooltip: str, items: list[str]) -> QComboBox:
    box = combo_box(tooltip, 7)
    box.addItems(items)
    return box


def _range_slider(tooltip: str) -> Any:  # superqt's types ask for integers here
    slider = QLabeledDoubleRangeSlider(Qt.Orientation.Horizontal)
    slider.setToolTip(tooltip)
    slider.setDecimals(2)
    return slider


def _replace_items(box: QComboBox, items: Mapping[str, Any]) -> None:
    """Offer other texts with their data; the selected text stays if it is among them."""
    text = box.currentText()
    with signals_blocked(box):
        box.clear()
        for item, data in items.items():
            box.addItem(item, data)
        box.setCurrentIndex(max(box.findText(text), 0))


def _selected_item(box: QComboBox) -> frozenset[str] | None:
    return frozenset({box.currentText()}) if box.currentIndex() > 0 else None


def _extent(values: Any) -> tuple[float, float]:
    """The range of a column's finite values, with a small margin."""
    numbers = np.asarray(values)
    if len(numbers) and not np.isfinite([numbers.min(), numbers.max()]).all():
        numbers = numbers[np.isfinite(numbers)]
    if not len(numbers):
        return 0.0, 1.0
    low, high = float(numbers.min()), float(numbers.max())
    margin = max((high - low) * 1e-3, 1e-3)
    return low - margin, high + margin
