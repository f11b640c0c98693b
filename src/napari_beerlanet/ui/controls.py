"""Small parts that forms are made of."""

from __future__ import annotations

from collections.abc import Callable

from qtpy.QtCore import Qt
from qtpy.QtWidgets import (
    QFormLayout,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QToolButton,
    QVBoxLayout,
    QWidget,
)


def button(text: str, tooltip: str, clicked: Callable[[], None]) -> QPushButton:
    """A push button that says what it does."""
    made = QPushButton(text)
    made.setToolTip(tooltip)
    made.clicked.connect(lambda *_: clicked())
    return made


def row(*widgets: QWidget, stretch: int | None = None) -> QWidget:
    """Widgets side by side; `stretch` is the number of the one that takes the room."""
    made = QWidget()
    layout = QHBoxLayout(made)
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(6)
    for i, widget in enumerate(widgets):
        layout.addWidget(widget, 1 if i == stretch else 0)
    if stretch is None:
        layout.addStretch(1)
    return made


def form() -> QFormLayout:
    """Label and control in two columns that fit a narrow dock."""
    layout = QFormLayout()
    layout.setContentsMargins(0, 0, 0, 0)
    layout.setSpacing(6)
    layout.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
    layout.setLabelAlignment(Qt.AlignmentFlag.AlignLeft | Qt.AlignmentFlag.AlignVCenter)
    return layout


def heading(text: str) -> QLabel:
    """A bold line over a group of controls."""
    label = QLabel(text)
    font = label.font()
    font.setBold(True)
    label.setFont(font)
    return label


def hint(text: str = "") -> QLabel:
    """A small explanatory line that wraps."""
    label = QLabel(text)
    label.setWordWrap(True)
    label.setEnabled(False)  # the theme's own muted colour
    return label


def rule() -> QFrame:
    """A thin line between groups."""
    line = QFrame()
    line.setFrameShape(QFrame.Shape.HLine)
    return line


class Fold(QWidget):
    """A group that opens and closes under its heading; put widgets into `body`."""

    def __init__(self, title: str, open_: bool = False) -> None:
        super().__init__()
        self.head = QToolButton()
        self.head.setText(title)
        self.head.setCheckable(True)
        self.head.setToolTip(f"Show or hide: {title}.")
        self.head.setToolButtonStyle(Qt.ToolButtonStyle.ToolButtonTextBesideIcon)
        self.head.setAutoRaise(True)
        self.inside = QWidget()
        self.body = QVBoxLayout(self.inside)
        self.body.setContentsMargins(12, 0, 0, 0)
        outer = QVBoxLayout(self)
        outer.setContentsMargins(0, 0, 0, 0)
        outer.setSpacing(4)
        outer.addWidget(self.head)
        outer.addWidget(self.inside)
        self.head.toggled.connect(self._toggle)
        self.head.setChecked(open_)
        self._toggle(open_)

    def _toggle(self, shown: bool) -> None:
        self.inside.setVisible(shown)
        self.head.setArrowType(Qt.ArrowType.DownArrow if shown else Qt.ArrowType.RightArrow)
