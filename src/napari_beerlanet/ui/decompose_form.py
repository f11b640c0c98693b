"""The controls of the decomposition panel; it says what is set and tells when that changes."""

from __future__ import annotations

from typing import Any

from qtpy.QtCore import Signal
from qtpy.QtWidgets import QButtonGroup, QComboBox, QHBoxLayout, QLabel, QRadioButton, QWidget

from napari_beerlanet.core.decompose import Decomposition
from napari_beerlanet.ui.component_layer import Look
from napari_beerlanet.ui.controls import form
from napari_beerlanet.ui.fitting import USUAL, Settings
from napari_beerlanet.ui.slide_rows import SlideRows
from napari_beerlanet.ui.sliders import AutoSlider, LogScale, WholeScale
from napari_beerlanet.ui.start_choice import StartChoice

_COMPONENTS = (
    "How many stains to look for at most. Those that the slide does not need stay empty and get no "
    "layer."
)
_COUNT = (
    "As many stains as the image needs: they are counted once, and λ and γ then act on just these. "
    "Without “settle” there is no counting, and 8 are used."
)
_STEPS = (
    "How long the search goes on. A few steps are quick and rough, as inside a detector; “settle” "
    "goes on until nothing changes any more."
)
_SETTLE = (
    "Go on until the result has settled. With λ and γ on auto, the number of stains is found "
    "from the image, too."
)
_LAM = (
    "Parsimony, λ: how much a stain must explain to be kept. Move it up for fewer stains, down for "
    "more."
)
_GAMMA = (
    "Sparsity, γ: how strongly faint stain is taken for empty glass. Move it up for cleaner "
    "background, down to keep pale structures."
)
_AUTO = "Choose this strength from the image."
_LOOKS: tuple[tuple[Look, str, str], ...] = (
    ("opaque", "Opaque", "One stain at a time, on white, as it would look alone in the slide."),
    (
        "multiplicative",
        "Overlay",
        "All shown stains over each other on white, as dyes lie in the slide; hides the image.",
    ),
    ("additive", "Additive", "All shown stains as lights on black; hides the image."),
)


class DecomposeForm(QWidget):
    """`changed` for what needs a new fit, `look_changed` for how layers lie over each other."""

    changed = Signal()
    look_changed = Signal(str)

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self.start = StartChoice(panel)
        self.components = AutoSlider(WholeScale(1, 12, 32), USUAL, _COMPONENTS, "auto", _COUNT)
        self.iterations = AutoSlider(WholeScale(1, 100, 1000), 10, _STEPS, "settle", _SETTLE)
        self.lam = AutoSlider(LogScale(1e-3, 1e3), 1.0, _LAM, "auto", _AUTO)
        self.gamma = AutoSlider(LogScale(1e-5, 10), 0.01, _GAMMA, "auto", _AUTO)
        for slider in (self.components, self.iterations, self.lam, self.gamma):
            slider.set_value(None)
        self.stack = QComboBox()
        self.stack.addItems(["Each plane by itself", "One fit for all planes"])
        self.stack.setToolTip(
            "Each plane by itself: the layers follow the plane that is shown. One fit for all: the "
            "same stains in every plane, so that planes can be compared."
        )
        self._lay_out()
        self.start.changed.connect(self._start_changed)
        for slider in (self.components, self.iterations, self.lam, self.gamma):
            slider.changed.connect(self.changed)
        self.stack.activated.connect(lambda _: self.changed.emit())
        self.slide.changed.connect(self.changed)

    def _lay_out(self) -> None:
        rows = form()
        self.setLayout(rows)
        self.stack_label = QLabel("Stack")
        for label, widget in (
            ("Start from", self.start),
            ("Stains", self.components),
            ("Steps", self.iterations),
            ("λ", self.lam),
            ("γ", self.gamma),
        ):
            rows.addRow(label, widget)
            rows.labelForField(widget).setToolTip(widget.toolTip())
        rows.addRow(self.stack_label, self.stack)
        self.slide = SlideRows(rows)
        rows.addRow("Show", self._looks())
        self.set_stack(False)

    def _looks(self) -> QWidget:
        made, self.looks = QWidget(), QButtonGroup(self)
        layout = QHBoxLayout(made)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(10)
        for look, text, tooltip in _LOOKS:
            button = QRadioButton(text)
            button.setToolTip(tooltip)
            button.setChecked(look == "opaque")
            button.clicked.connect(lambda _=False, look=look: self.look_changed.emit(look))
            self.looks.addButton(button)
            layout.addWidget(button)
        layout.addStretch(1)
        return made

    @property
    def look(self) -> Look:
        """How layers lie over each other."""
        return _LOOKS[self.looks.buttons().index(self.looks.checkedButton())][0]

    @property
    def one_fit_for_all(self) -> bool:
        """Of a stack."""
        return self.stack.currentIndex() == 1

    def set_stack(self, is_stack: bool) -> None:
        """Show what only stacks need."""
        self.stack.setVisible(is_stack)
        self.stack_label.setVisible(is_stack)

    def settings(self) -> Settings:
        """What is set."""
        steps, lam, gamma = (s.value for s in (self.iterations, self.lam, self.gamma))
        count = self.components.value
        return Settings(
            components=USUAL if count is None else int(count),
            counted=count is None,
            iterations="converge" if steps is None else int(steps),
            lam="auto" if lam is None else float(lam),
            gamma="auto" if gamma is None else float(gamma),
            spectra=self.start.spectra,
        )

    def show_found(self, d: Decomposition) -> None:
        """Let sliders that were left to the image show what was chosen."""
        for slider, value in ((self.lam, d.lam), (self.gamma, d.gamma)):
            if slider.value is None:
                slider.show_value(float(value))
        if self.iterations.value is None:
            self.iterations.show_value(len(d.objective))
        if self.components.value is None and self.start.spectra is None:
            self.components.show_value(int(d.active.sum()))

    def _start_changed(self) -> None:
        spectra = self.start.spectra
        self.components.setEnabled(spectra is None)
        if spectra is not None:
            self.components.show_value(spectra.shape[1])
        self.changed.emit()
