"""Small widgets that forms are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from magicgui.widgets import create_widget
from magicgui.widgets.bases import ValueWidget
from qtpy.QtCore import Qt, Signal
from qtpy.QtGui import QImage, QPixmap
from qtpy.QtWidgets import (
    QApplication,
    QComboBox,
    QDoubleSpinBox,
    QFormLayout,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QSizePolicy,
    QSlider,
    QToolButton,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.settings import FieldSpec, Settings

if TYPE_CHECKING:
    from napari.layers import Layer
    from napari.viewer import Viewer

_SMALLEST_STEP = 0.01  # of a number with a fraction, beside a bound that is excluded
T = TypeVar("T")
PLUGIN_NAME, BATCH_WIDGET_NAME = "napari-beerlanet", "Run on folder"


def not_none(value: T | None) -> T:
    """A result of Qt that is always there, though PyQt's stubs say that it may be None.

    Qt declares nearly every pointer so: the header of a table, an event, the clipboard.
    """
    if value is None:
        raise RuntimeError("Qt returned nothing where something must be.")
    return value


def copy_text(text: str) -> None:
    """Put a text on the clipboard."""
    not_none(QApplication.clipboard()).setText(text)


def button(text: str, tooltip: str, clicked: Callable[[], None]) -> QPushButton:
    """A push button with a tooltip."""
    push = QPushButton(text)
    push.setToolTip(tooltip)
    push.clicked.connect(lambda *_: clicked())
    return push


def row(*widgets: QWidget, stretch: int | None = None) -> QWidget:
    """Widgets side by side; `stretch` is the index of the one that takes the space."""
    container = QWidget()
    layout = QHBoxLayout(container)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(6)
    for i, widget in enumerate(widgets):
        layout.addWidget(widget, 1 if i == stretch else 0)
    if stretch is None:
        layout.addStretch(1)
    return container


def form() -> QFormLayout:
    """Labels and controls in two columns that fit a narrow dock."""
    layout = QFormLayout()
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(6)
    layout.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
    layout.setLabelAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
    return layout


def combo_box(tooltip: str, min_characters: int) -> QComboBox:
    """A combo box that does not widen the dock with its longest item."""
    box = QComboBox()
    box.setToolTip(tooltip)
    box.setMinimumContentsLength(min_characters)
    box.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
    return box


def rgb_pixmap(pixels: npt.NDArray[np.uint8]) -> QPixmap:
    """A picture (h, w, 3) for Qt."""
    height, width = pixels.shape[:2]
    image = QImage(pixels.tobytes(), width, height, 3 * width, QImage.Format.Format_RGB888)
    return QPixmap.fromImage(image)


def heading(text: str) -> QLabel:
    """A bold line over a group of controls."""
    label = QLabel(text)
    font = label.font()
    font.setBold(True)
    label.setFont(font)
    return label


def hint(text: str = "") -> QLabel:
    """A muted explanatory text that wraps."""
    label = QLabel(text)
    label.setWordWrap(True)
    label.setEnabled(False)  # the theme's own muted colour
    return label


def separator() -> QFrame:
    """A thin horizontal line between groups."""
    line = QFrame()
    line.setFrameShape(QFrame.Shape.HLine)
    return line


class CollapsibleGroup(QWidget):
    """A group that expands and collapses under its header; put widgets into `body`."""

    def __init__(self, title: str, open_: bool = False) -> None:
        super().__init__()
        self.header = QToolButton()
        self.header.setText(title)
        self.header.setCheckable(True)
        self.header.setToolTip(f"Show or hide: {title}.")
        self.header.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.header.setAutoRaise(True)
        self.content = QWidget()
        self.body = QVBoxLayout(self.content)
        self.body.setContentsMargins(12, 0, 0, 0)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.setSpacing(4)
        outer.addWidget(self.header)
        outer.addWidget(self.content)
        self.header.toggled.connect(self._toggle)
        self.header.setChecked(open_)
        self._toggle(open_)

    def _toggle(self, expanded: bool) -> None:
        self.content.setVisible(expanded)
        self.header.setArrowType(Qt.ArrowType.DownArrow if expanded else Qt.ArrowType.RightArrow)


class FractionSlider(QWidget):
    """A slider with a spin box, from 0 to 1 in hundredths. `changed` on every movement."""

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
        self.slider.valueChanged.connect(lambda v: self._set_by_user(v / 100))
        self.box.valueChanged.connect(self._set_by_user)

    @property
    def value(self) -> float:
        """From 0 to 1."""
        return round(self.box.value(), 2)

    def set_value(self, value: float) -> None:
        """Set both without a signal."""
        with signals_blocked(self.slider), signals_blocked(self.box):
            self.slider.setValue(round(100 * value))
            self.box.setValue(value)

    def _set_by_user(self, value: float) -> None:
        self.set_value(value)
        self.changed.emit(self.value)


@runtime_checkable
class SettingsPanel(Protocol):
    """A panel whose settings a study can adopt."""

    viewer: Viewer

    @property
    def study_layer(self) -> Layer | None:
        """The image that the panel is about."""

    def study_settings(self) -> dict[str, Any]:
        """By their names in `StudySettings`."""
        ...


def batch_button(panel: SettingsPanel) -> QPushButton:
    """Opens “Run on folder” with the settings of a panel."""
    tooltip = "Process many images with these settings."
    return button("Run on folder …", tooltip, lambda: open_batch(panel))


def open_batch(panel: SettingsPanel) -> Any:
    """The open panel “Run on folder”, or a new one, with the settings of this panel."""
    window = panel.viewer.window
    inner: Any
    for inner in window.dock_widgets.values():
        if hasattr(inner, "adopt_settings"):
            inner.parentWidget().raise_()
            break
    else:
        inner = window.add_plugin_dock_widget(PLUGIN_NAME, BATCH_WIDGET_NAME, tabify=True)[1]
    if not inner.progress.running:
        inner.adopt_settings(panel)
    return inner


def wrapping_label(text: str = "") -> QLabel:
    """A text that wraps and can be selected."""
    label = QLabel(text)
    label.setWordWrap(True)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label


def field_widget(settings: type[Settings], name: str, **options: Any) -> ValueWidget[Any]:
    """A magicgui widget for a setting: its bounds, default and tooltip are the setting's own.

    `options` go to the widget (`step`, `widget_type`, `label`, …) and win. Special values beside a
    number (None, "auto") are offered by other means, such as the check box of an `AutoSlider`:
    where the default is one, the widget starts with `value` from the options, or its minimum.
    Use `.value` and `.changed`; `.native` is the Qt widget.
    """
    spec = settings.spec(name)
    kind: Any = spec.types[0] if spec.types else Literal[spec.choices]
    value = options.pop("value", spec.default)
    if kind in (int, float):
        options = _bounds(spec) | options
        if isinstance(value, str) or value is None:
            value = options.get("min", 0)
    made = create_widget(
        value=value,
        annotation=kind,
        name=name,
        label=options.pop("label", None),
        widget_type=options.pop("widget_type", None),
        options=options,
    )
    assert isinstance(made, ValueWidget)
    made.tooltip = spec.description
    return made


def expand(widget: ValueWidget[Any]) -> None:
    """Let a widget take the width of its column in a form."""
    widget.native.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)


def _bounds(spec: FieldSpec) -> dict[str, float]:
    """The smallest and the largest value that can be set; an excluded bound is one step off."""
    bounds: dict[str, float] = {}
    if spec.minimum is not None:
        bounds["min"] = spec.minimum
    elif spec.above is not None:
        bounds["min"] = spec.above + (1 if spec.types[0] is int else _SMALLEST_STEP)
    if spec.maximum is not None:
        bounds["max"] = spec.maximum
    return bounds
