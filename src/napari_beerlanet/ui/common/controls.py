"""Small widgets that forms are made of."""

from __future__ import annotations

import html
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar, runtime_checkable

import numpy as np
import numpy.typing as npt
from magicgui.widgets import create_widget
from magicgui.widgets.bases import ValueWidget
from qtpy.QtCore import QEvent, QObject, Qt, Signal
from qtpy.QtGui import (
    QColor,
    QHelpEvent,
    QIcon,
    QImage,
    QPaintEvent,
    QPalette,
    QPixmap,
    QShowEvent,
)
from qtpy.QtWidgets import (
    QAbstractSpinBox,
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
    QStackedWidget,
    QStyle,
    QStyleOptionComboBox,
    QStylePainter,
    QTabWidget,
    QToolButton,
    QToolTip,
    QVBoxLayout,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.common.settings import FieldSpec, Settings
from napari_beerlanet.ui.common.panel import ThemedLabel, open_panel

if TYPE_CHECKING:
    from napari.layers import Layer
    from napari.viewer import Viewer

_TEXT_MARGIN_PX = 4  # that a style leaves beside the text of a combo box
_SMALLEST_STEP = 0.01  # of a number with a fraction, beside a bound that is excluded
T = TypeVar("T")
_BATCH_TITLE = "Run on folder"


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


class ElidingComboBox(QComboBox):
    """A combo box for long names: it does not widen the dock, and they stay readable.

    The chosen name is cut in the middle, as names of files differ at their ends; the list is as
    wide as its longest name, and the tooltip begins with the whole of the chosen one.
    """

    def __init__(self, tooltip: str, min_characters: int) -> None:
        super().__init__()
        self.setToolTip(tooltip)
        self.setMinimumContentsLength(min_characters)
        self.setSizeAdjustPolicy(self.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)

    def elided_text(self, width: int) -> str:
        """The chosen name, or the placeholder, in so many pixels."""
        return self.fontMetrics().elidedText(
            self.currentText() or self.placeholderText(), Qt.TextElideMode.ElideMiddle, width
        )

    def full_tooltip(self) -> str:
        """The chosen name, and what the box is for."""
        return "\n".join(filter(None, (self.currentText(), self.toolTip())))

    def paintEvent(self, event: QPaintEvent | None) -> None:
        """Qt's own name: as ever, with the name cut in the middle instead of at its end."""
        option, style = QStyleOptionComboBox(), QStyle.ComplexControl.CC_ComboBox
        self.initStyleOption(option)
        painter = QStylePainter(self)
        painter.drawComplexControl(style, option)
        look, field = self.style(), QStyle.SubControl.SC_ComboBoxEditField
        if look is not None:
            place = look.subControlRect(style, option, field, self)
            option.currentText = self.elided_text(place.width() - 2 * _TEXT_MARGIN_PX)
        painter.drawControl(QStyle.ControlElement.CE_ComboBoxLabel, option)

    def showPopup(self) -> None:
        """Qt's own name: open the list, wide enough for its names."""
        view, screen = self.view(), self.screen()
        if view is not None and screen is not None:
            view.setTextElideMode(Qt.TextElideMode.ElideMiddle)
            bar = view.verticalScrollBar()
            width = view.sizeHintForColumn(0) + (bar.sizeHint().width() if bar is not None else 0)
            view.setMinimumWidth(min(width, screen.availableGeometry().width() * 9 // 10))
        super().showPopup()

    def event(self, event: QEvent | None) -> bool:
        """Qt's own name: the tooltip has the whole name."""
        if isinstance(event, QHelpEvent) and event.type() == QEvent.Type.ToolTip:
            QToolTip.showText(event.globalPos(), self.full_tooltip(), self)
            return True
        return bool(super().event(event))


def combo_box(tooltip: str, min_characters: int, expanding: bool = False) -> ElidingComboBox:
    """A combo box that does not widen the dock; `expanding` takes the width that there is."""
    box = ElidingComboBox(tooltip, min_characters)
    if expanding:
        box.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
    return box


def size_to_current_page(pages: QTabWidget | QStackedWidget) -> None:
    """Let the current page alone say how high it must be, not the highest of all pages."""

    def update(current: int) -> None:
        for k in range(pages.count()):
            page = pages.widget(k)
            if page is not None:
                policy, counts = page.sizePolicy(), k == current
                fixed = QSizePolicy.Policy.Preferred if counts else QSizePolicy.Policy.Ignored
                policy.setVerticalPolicy(fixed)
                page.setSizePolicy(policy)
        pages.updateGeometry()

    pages.currentChanged.connect(update)
    update(pages.currentIndex())


def colour_icon(colour: str) -> QIcon:
    """A square of a colour "#rrggbb", to stand before a text that stays readable."""
    square = QPixmap(14, 14)
    square.fill(QColor(colour))
    icon = QIcon(square)
    icon.addPixmap(square, QIcon.Mode.Selected)  # or Qt would tint it
    return icon


_LEGEND_ALPHA = 215  # of 255


class PlotTheme(QObject):
    """Gives a pyqtgraph plot and its legend the background, axes and legend the text's colour.

    `apply`, if given, is called with that colour, for what else a plot has.
    """

    def __init__(self, plot: Any, apply: Callable[[QColor], None] | None = None) -> None:
        super().__init__(plot)
        self._plot, self._apply = plot, apply
        plot.installEventFilter(self)
        self.update_colours()

    def eventFilter(self, watched: QObject | None, event: QEvent | None) -> bool:
        """The plot was put into a window, or the window has got another theme."""
        if event is not None and event.type() in (QEvent.Type.Polish, QEvent.Type.StyleChange):
            self.update_colours()
        return False

    def update_colours(self) -> None:
        """Take the colour of the text around the plot."""
        palette = self._plot.palette()
        colour = palette.color(QPalette.ColorRole.WindowText)
        background = palette.color(QPalette.ColorRole.Window)
        self._plot.setBackground(background)
        for name in ("left", "bottom"):
            axis = self._plot.getAxis(name)
            axis.setPen(colour)
            axis.setTextPen(colour)
        legend = self._plot.plotItem.legend
        if legend is not None:
            legend.setLabelTextColor(colour)
            background.setAlpha(_LEGEND_ALPHA)
            legend.setBrush(background)  # it is read where a line runs behind it
            for _, label in legend.items:
                label.setText(label.text)  # pyqtgraph takes another colour only with a text
        if self._apply is not None:
            self._apply(colour)


def rgb_pixmap(pixels: npt.NDArray[np.uint8]) -> QPixmap:
    """A picture (h, w, 3) for Qt."""
    height, width = pixels.shape[:2]
    image = QImage(pixels.tobytes(), width, height, 3 * width, QImage.Format.Format_RGB888)
    return QPixmap.fromImage(image)


def heading(text: str) -> QLabel:
    """A bold line over a group of controls."""
    label = plain_label(text)
    font = label.font()
    font.setBold(True)
    label.setFont(font)
    return label


def hint(text: str = "") -> ThemedLabel:
    """A muted explanatory text that wraps."""
    return ThemedLabel(text, "hint")


class DisabledReason(ThemedLabel):
    """A line near a button that says why it is disabled.

    Its space is kept while there is nothing to say, unless `keep_space` is off: then nothing that
    is clicked may stand below. `updated` is emitted when the button may have been enabled or
    disabled.
    """

    updated = Signal()

    def __init__(self, push: QPushButton, *, keep_space: bool = True) -> None:
        super().__init__(kind="hint")
        self._button, self._tooltip, self._keep_space = push, push.toolTip(), keep_space
        if not keep_space:
            self.hide()

    def update_button(self, reason: str) -> None:
        """Disable the button for a reason, or enable it for ""."""
        self._button.setEnabled(not reason)
        self._button.setToolTip(
            f"{self._tooltip}\n\nNot now: {reason}" if reason else self._tooltip
        )
        self.setText(reason)
        if not self._keep_space:
            self.setVisible(bool(reason))
        self.updated.emit()

    def showEvent(self, event: QShowEvent | None) -> None:
        """The theme's font is known by now."""
        self.setMinimumHeight(self.fontMetrics().lineSpacing())
        super().showEvent(event)


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
        _hide_buttons(self.box)
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
    """Show “Run on folder” with the settings of this panel."""
    batch = open_panel(panel.viewer, _BATCH_TITLE)
    if not batch.progress.running:
        batch.adopt_settings(panel)
    return batch


def panel_button(viewer: Viewer, title: str, tooltip: str) -> QPushButton:
    """Opens the panel of this title."""
    return button(f"{title} …", tooltip, lambda: open_panel(viewer, title))


def plain_label(text: str = "") -> QLabel:
    """A text as it is: Qt would take a name that looks like HTML for it."""
    label = QLabel(text)
    label.setTextFormat(Qt.TextFormat.PlainText)
    return label


def plain_tooltip(text: str) -> str:
    """A tooltip that shows a text as it is, whatever names are in it."""
    return f"<qt>{html.escape(text)}</qt>".replace("\n", "<br>") if "<" in text else text


def wrapping_label(text: str = "") -> QLabel:
    """A text that wraps and can be selected."""
    label = plain_label(text)
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
    for readout in made.native.findChildren(QAbstractSpinBox) if _is_slider(made) else []:
        _hide_buttons(readout)
    return made


_READOUT_STYLE = (
    "QAbstractSpinBox {background: transparent; border: 0;} "
    "QAbstractSpinBox::up-button, QAbstractSpinBox::down-button, "
    "QAbstractSpinBox::up-arrow, QAbstractSpinBox::down-arrow "
    "{width: 0px; height: 0px; image: none;}"
)


def _hide_buttons(readout: QAbstractSpinBox) -> None:
    """Show nothing but the number beside a slider."""
    # Without buttons at all, Qt 6.11.1 and later leave the number no room in napari's style.
    readout.setButtonSymbols(QAbstractSpinBox.ButtonSymbols.UpDownArrows)
    readout.setStyleSheet(_READOUT_STYLE)


def _is_slider(widget: ValueWidget[Any]) -> bool:
    return bool(widget.native.findChildren(QSlider))


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
