"""Small controls that the widgets share: a choice of RGB layers, sliders that can be automatic."""

from __future__ import annotations

from napari.layers import Image
from napari.viewer import Viewer
from qtpy.QtCore import Qt, Signal
from qtpy.QtWidgets import QCheckBox, QComboBox, QHBoxLayout, QLabel, QSlider, QWidget

from .planes import rgb_layers

_DECADES = 3  # that a slider of orders of magnitude goes up and down from its centre
_PER_DECADE = 50


class LayerChoice(QComboBox):
    """The RGB layers of a viewer; follows what is added, removed, renamed and reordered."""

    layer_changed = Signal()

    def __init__(self, viewer: Viewer, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self._viewer = viewer
        self._offered: list[Image] = []
        self._chosen: Image | None = None
        self.setToolTip("The colour image to work on. Only RGB and RGBA images are offered.")
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.setMinimumContentsLength(12)
        self.activated.connect(self._on_activated)

    @property
    def layer(self) -> Image | None:
        """The chosen layer, None where no layer fits."""
        return self._chosen

    def choose(self, layer: Image) -> None:
        """Choose a layer, as the user would."""
        self.refresh()
        if layer in self._offered:
            self._choose(layer)

    def follow(self, on: bool) -> None:
        """Listen to the viewer's list of layers, or stop to."""
        events = self._viewer.layers.events
        for event in (events.inserted, events.removed, events.reordered):
            (event.connect if on else event.disconnect)(self.refresh)
        if on:
            self.refresh()
        else:
            self._watch_names([])

    def refresh(self, event: object = None) -> None:
        """Offer what fits now; the choice stays where it still can."""
        offered = rgb_layers(self._viewer)
        self._watch_names(offered)
        self.blockSignals(True)
        self.clear()
        self.addItems([layer.name for layer in offered])
        self.blockSignals(False)
        wanted = self._chosen if self._chosen in offered else None
        active = self._viewer.layers.selection.active
        if wanted is None and offered:
            wanted = active if active in offered else offered[0]
        self._choose(wanted)

    def _choose(self, layer: Image | None) -> None:
        if layer is not None:
            self.setCurrentIndex(self._offered.index(layer))
        if layer is not self._chosen:
            self._chosen = layer
            self.layer_changed.emit()

    def _watch_names(self, offered: list[Image]) -> None:
        for layer in self._offered:
            layer.events.name.disconnect(self.refresh)
        self._offered = offered
        for layer in offered:
            layer.events.name.connect(self.refresh)

    def _on_activated(self, index: int) -> None:
        self._choose(self._offered[index])


class AutoSlider(QWidget):
    """A slider with its value beside it, and a box that leaves the choice to the image."""

    changed = Signal()

    def __init__(self, auto_label: str, tooltip: str, auto_tooltip: str) -> None:
        super().__init__()
        self.slider = QSlider(Qt.Orientation.Horizontal)
        self.slider.setToolTip(tooltip)
        self.value_label = QLabel()
        self.value_label.setMinimumWidth(52)
        self.value_label.setToolTip(tooltip)
        self.auto = QCheckBox(auto_label)
        self.auto.setToolTip(auto_tooltip)
        self.auto.setChecked(True)
        self.auto.setVisible(bool(auto_label))
        layout = QHBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(self.slider, 1)
        layout.addWidget(self.value_label)
        layout.addWidget(self.auto)
        self.slider.valueChanged.connect(self._on_moved)
        self.auto.toggled.connect(self._on_auto)
        self._follow_auto()

    def _on_moved(self) -> None:
        self._show()
        self.changed.emit()

    def _on_auto(self) -> None:
        self._follow_auto()
        self.changed.emit()

    def _follow_auto(self) -> None:
        self.slider.setEnabled(not (self.auto.isChecked() and self.auto.text()))

    def _show(self) -> None:
        raise NotImplementedError


class CountSlider(AutoSlider):
    """Whole numbers from 1."""

    def __init__(self, most: int, value: int, *texts: str) -> None:
        super().__init__(*texts)
        self.slider.setRange(1, most)
        self.slider.setValue(value)
        self._show()

    @property
    def value(self) -> int:
        """What the slider is at."""
        return int(self.slider.value())

    def _show(self) -> None:
        self.value_label.setText(str(self.value))


class MagnitudeSlider(AutoSlider):
    """Positive numbers by orders of magnitude, around the value that the image itself suggests."""

    def __init__(self, *texts: str) -> None:
        super().__init__(*texts)
        self._centre = 1.0
        self.slider.setRange(-_DECADES * _PER_DECADE, _DECADES * _PER_DECADE)
        self.slider.setPageStep(_PER_DECADE // 2)
        self.value_label.setText("")

    @property
    def value(self) -> float:
        """What the slider is at, to three digits."""
        return float(f"{self._centre * 10 ** (self.slider.value() / _PER_DECADE):.3g}")

    def suggest(self, value: float) -> None:
        """Where the box is ticked: go to the value that was used, without telling anyone."""
        if self.auto.isChecked() and value > 0:
            self._centre = value
            self.slider.blockSignals(True)
            self.slider.setValue(0)
            self.slider.blockSignals(False)
            self._show()

    def _show(self) -> None:
        self.value_label.setText(f"{self.value:.3g}")
