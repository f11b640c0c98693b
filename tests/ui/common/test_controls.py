from __future__ import annotations

from enum import Enum
from typing import Annotated, Literal

import pytest
from napari._qt.qt_resources import get_stylesheet
from pydantic import Field
from qtpy.QtWidgets import QAbstractSpinBox, QLineEdit, QVBoxLayout, QWidget

from napari_beerlanet.core.common.settings import Settings
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.ui.common.controls import FractionSlider, field_widget
from napari_beerlanet.ui.common.progress_bar import activity_bar


class Scope(Enum):
    ALL = "all"
    HEAD = "head"


class Example(Settings):
    confidence: float = Field(0.25, ge=0, le=1, description="Show cells above this confidence.")
    epochs: int = Field(50, gt=0, description="Passes over the training images.")
    size: float | Literal["auto"] = Field("auto", gt=0, description="Diameter of a cell.")
    count: Annotated[int, Field(ge=1, le=16)] | Literal["auto"] = 8
    batch: int | None = Field(None, ge=1, le=64)
    domain: Literal["log", "linear"] = Field("log", description="Where the solver works.")
    scope: Scope = Scope.HEAD
    augment: bool = True


@pytest.mark.usefixtures("qtbot")
@pytest.mark.parametrize(
    ("name", "kind", "value"),
    [
        ("confidence", "FloatSpinBox", 0.25),
        ("epochs", "SpinBox", 50),
        ("size", "FloatSpinBox", 0.01),
        ("count", "SpinBox", 8),
        ("batch", "SpinBox", 1),
        ("domain", "ComboBox", "log"),
        ("scope", "ComboBox", Scope.HEAD),
        ("augment", "CheckBox", True),
    ],
)
def test_field_widget_is_the_one_for_the_field(name, kind, value):
    widget = field_widget(Example, name)
    assert type(widget).__name__ == kind
    assert widget.value == value
    assert (widget.tooltip or "") == Example.spec(name).description


@pytest.mark.usefixtures("qtbot")
def test_field_widget_keeps_to_the_bounds_and_takes_options():
    widget = field_widget(Example, "confidence", widget_type="FloatSlider", step=0.05)
    assert (widget.min, widget.max, widget.step) == (0, 1, 0.05)
    with pytest.raises(ValueError, match="outside of the allowed range"):
        widget.value = 1.5
    assert field_widget(Example, "size", value=12.5).value == 12.5
    count, epochs = field_widget(Example, "count"), field_widget(Example, "epochs")
    assert (count.min, count.max, epochs.min) == (1, 16, 1)


def test_a_long_text_on_a_progress_bar_keeps_its_beginning_and_its_end(qtbot):
    bar = activity_bar()
    qtbot.addWidget(bar)
    bar.resize(220, 24)
    bar.setValue(300)
    bar.setFormat("measuring 40002f47-b7dc-555c-9f29-bf308ff4a7ed_x0_y0_ac49.png, 3 of 8")
    shown = bar.text()
    assert shown.startswith("measuring")
    assert shown.endswith("of 8")
    assert "…" in shown
    assert bar.fontMetrics().horizontalAdvance(shown) <= 220
    bar.setFormat("3 of 8")
    assert bar.text() == "3 of 8"


def _confidence_field():
    made = field_widget(DetectSettings, "confidence", widget_type="FloatSlider", step=0.01)
    return made.native


@pytest.mark.parametrize("make", [_confidence_field, lambda: FractionSlider(0.25, "")])
def test_the_number_beside_a_slider_has_room_in_naparis_style(qtbot, make):
    """Without buttons, the field of the number was one pixel wide with PySide6 6.11.3."""
    made = make()
    panel = QWidget()
    panel.setStyleSheet(get_stylesheet("dark"))
    QVBoxLayout(panel).addWidget(made)
    qtbot.addWidget(panel)
    panel.resize(300, 60)
    panel.show()
    (readout,) = made.findChildren(QAbstractSpinBox)
    field = readout.findChild(QLineEdit)
    assert field.text() == "0.25"
    assert field.width() >= field.fontMetrics().horizontalAdvance("0.25")
