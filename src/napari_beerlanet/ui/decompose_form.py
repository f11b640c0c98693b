"""The controls of the stain decomposition widget and where they stand; no behaviour."""

from __future__ import annotations

from napari.viewer import Viewer
from qtpy.QtCore import Qt
from qtpy.QtWidgets import (
    QCheckBox,
    QComboBox,
    QFormLayout,
    QFrame,
    QHBoxLayout,
    QLabel,
    QPushButton,
    QScrollArea,
    QVBoxLayout,
    QWidget,
)

from .controls import CountSlider, LayerChoice, MagnitudeSlider
from .panel import ComponentPanel, Curve
from .runbar import RunBar
from .tasks import Runner

_NEED = (
    "Open a colour image first: RGB or RGBA, as from a microscope's camera or a slide scanner. "
    "Grey images have no colours to take apart."
)


class DecomposeForm(QWidget):
    """All controls, laid out for a dock 400 pixels wide; scrolls when the dock is short."""

    def __init__(self, viewer: Viewer, runner: Runner, parent: QWidget | None = None) -> None:
        super().__init__(parent)
        self.choice = LayerChoice(viewer)
        self.run_bar = RunBar(runner)
        self.panel, self.curve = ComponentPanel(), Curve()
        inner = QWidget()
        column = QVBoxLayout(inner)
        column.addWidget(self._need())
        column.addLayout(self._parameters())
        column.addLayout(self._running())
        column.addWidget(self.run_bar)
        column.addWidget(self._results())
        column.addStretch(1)
        scroll = QScrollArea()
        scroll.setWidgetResizable(True)
        scroll.setFrameShape(QFrame.Shape.NoFrame)
        scroll.setHorizontalScrollBarPolicy(Qt.ScrollBarPolicy.ScrollBarAlwaysOff)
        scroll.setWidget(inner)
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.addWidget(scroll)

    def show_need(self, on: bool) -> None:
        """Say what is needed and offer the sample, where no layer fits."""
        self.need.setVisible(on)

    def show_stack(self, on: bool) -> None:
        """Offer what to do with the other planes."""
        self.form.setRowVisible(self.stack, on)

    def show_results(self, on: bool) -> None:
        """Show the part below the run button."""
        self.results.setVisible(on)

    def show_start(self, name: str, own: bool) -> None:
        """Name the spectra that the fit starts from."""
        self.start_label.setText(name)
        self.default_button.setVisible(own)
        self.components.setEnabled(not own)

    def _need(self) -> QWidget:
        self.need = QWidget()
        text = QLabel(_NEED)
        text.setWordWrap(True)
        self.sample_button = _button("Open the sample smear", "Add a synthetic blood smear")
        column = QVBoxLayout(self.need)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(text)
        column.addWidget(self.sample_button)
        return self.need

    def _parameters(self) -> QFormLayout:
        self.components = CountSlider(
            16,
            8,
            "",
            "How many stains and pigments to look for at most. Components that the image does not "
            "need come out as inactive.",
            "",
        )
        self.iterations = CountSlider(
            100,
            10,
            "settle",
            "How many rounds of improvement. Few are quick and rough.",
            "Go on until nothing changes any more, and merge stains of the same colour: what to "
            "use for looking at stains.",
        )
        self.lam = MagnitudeSlider(
            "auto",
            "λ: how strict to be. To the right, weak and doubtful stains disappear; to the left, "
            "every tint is kept, noise included.",
            "Choose λ from the image",
        )
        self.gamma = MagnitudeSlider(
            "auto",
            "γ: how clean each stain's picture should be. To the right, faint haze between the "
            "cells disappears; to the left, it stays.",
            "Choose γ from the image",
        )
        self.form = QFormLayout()
        self.form.setFieldGrowthPolicy(QFormLayout.FieldGrowthPolicy.ExpandingFieldsGrow)
        self.form.addRow("Image", self.choice)
        self.stack = _choices(
            ["this plane", "whole stack, one fit"],
            "Fit each plane for itself as you come to it, or fit the plane that is shown and use "
            "its stains for all planes.",
        )
        self.form.addRow("Planes", self.stack)
        self.form.addRow("Start from", self._start())
        self.form.addRow("Components", self.components)
        self.form.addRow("Iterations", self.iterations)
        self.form.addRow("Strictness λ", self.lam)
        self.form.addRow("Cleanness γ", self.gamma)
        return self.form

    def _start(self) -> QWidget:
        self.start_label = QLabel("default dyes")
        self.start_label.setToolTip("The spectra that the fit starts from")
        self.load_button = _button("Load …", "Start from the spectra of a file saved here before")
        self.default_button = _button("Default", "Start from the default dyes again")
        self.default_button.setVisible(False)
        return _row(self.start_label, None, self.default_button, self.load_button)

    def _running(self) -> QHBoxLayout:
        self.run_button = _button("Take stains apart", "Add one layer per stain of the image")
        self.live = QCheckBox("live")
        self.live.setToolTip("Update the layers while sliders move")
        self.live.setChecked(True)
        row = QHBoxLayout()
        row.addWidget(self.run_button, 1)
        row.addWidget(self.live)
        return row

    def _results(self) -> QWidget:
        self.results = QWidget()
        self.blending = _choices(
            ["Opaque", "Multiplicative", "Additive", "Minimum"],
            "How the stains' layers are laid over what is below. Opaque shows one at a time; "
            "multiplicative lays them over each other like filters.",
        )
        self.reconstruct_button = _button("Reconstruct", "An image of the ticked components alone")
        self.residual_button = _button("Residual", "What the components do not explain")
        self.save_button = _button("Save spectra …", "Light, spectra and shares, as JSON")
        self.copy_button = _button("Copy as Python", "A snippet that makes the same layers again")
        column = QVBoxLayout(self.results)
        column.setContentsMargins(0, 0, 0, 0)
        column.addWidget(self.panel)
        column.addWidget(_row(QLabel("Fit"), self.curve))
        column.addWidget(_row(QLabel("Layers"), self.blending))
        column.addWidget(_row(self.reconstruct_button, self.residual_button))
        column.addWidget(_row(self.save_button, self.copy_button))
        self.results.setVisible(False)
        return self.results


def _button(text: str, tooltip: str) -> QPushButton:
    button = QPushButton(text)
    button.setToolTip(tooltip)
    return button


def _choices(texts: list[str], tooltip: str) -> QComboBox:
    box = QComboBox()
    box.addItems(texts)
    box.setToolTip(tooltip)
    return box


def _row(*widgets: QWidget | None) -> QWidget:
    """Side by side; None is a space that grows."""
    row = QWidget()
    layout = QHBoxLayout(row)
    layout.setContentsMargins(0, 0, 0, 0)
    for widget in widgets:
        if widget is None:
            layout.addStretch(1)
        else:
            layout.addWidget(widget, 0 if isinstance(widget, QLabel) else 1)
    return row
