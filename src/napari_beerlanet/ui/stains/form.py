"""Settings of the stain decomposition panel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from magicgui.widgets import CheckBox, ComboBox
from qtpy.QtCore import QObject, Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QComboBox,
    QFileDialog,
    QFormLayout,
    QRadioButton,
    QSizePolicy,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.checkpoints.checkpoint import learned_spectra, packaged_models
from napari_beerlanet.core.images.tissue import NonTissue
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.files import read_spectra
from napari_beerlanet.core.stains.settings import (
    DEFAULT_COMPONENTS,
    DEFAULT_ITERATIONS,
    DecomposeSettings,
)
from napari_beerlanet.ui.common.controls import expand, form, not_none, row
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.sliders import AutoSlider, IntegerScale, LogScale
from napari_beerlanet.ui.stains.density_layers import Blending
from napari_beerlanet.ui.stains.fitting import NON_TISSUE_NAMES, PREVIEW_TILES, SlideFitOptions

_MIN_LEVEL_PIXELS = 1_000_000  # a smaller pyramid level is not worth a fit
_PREVIEW_ONLY = -1  # in place of a level
_DEFAULT_DYES = "Common dyes"
_CHECKPOINT_ENTRY, _FILE_ENTRY = "Checkpoint …", "Spectra file …"

Spectra = npt.NDArray[np.float64]
LevelShapes = Sequence[tuple[int, int]]

_START_TIP = (
    "Spectra that the solver starts from. Common dyes: haematoxylin, eosin, DAB, methylene blue "
    "and others. Checkpoint: the spectra that a detector has learned. Spectra file: those that you "
    "saved from another slide."
)
_COMPONENTS_TIP = "Components that the slide does not need stay empty and get no layer."
_AUTO_COMPONENTS_TIP = (
    "Count the stains of the image once; λ and γ then act on these. Without “converge” nothing is "
    f"counted, and {DEFAULT_COMPONENTS} components are used."
)
_ITERATIONS_TIP = "A few iterations are quick and rough, as inside a detector."
_CONVERGE_TIP = (
    "Iterate until the solution has converged. With λ and γ on auto, the number of stains is found "
    "from the image, too."
)
_LAMBDA_TIP = "Raise it for fewer stains, lower it for more."
_GAMMA_TIP = "Raise it for a cleaner background, lower it to keep pale structures."
_AUTO_TIP = "Choose this penalty from the image."
_STACK_TIP = (
    "One fit for all planes: the same stains in every plane, so that planes can be compared. Each "
    "plane separately: the stains of the displayed plane, fitted again when another is displayed."
)
_LEVEL_TIP = (
    "The part of the slide that is fitted. The whole slide takes as long as reading it once; a "
    "coarser level is faster. A preview of some tiles is always shown first."
)
_BLENDINGS: tuple[tuple[str, Blending, str], ...] = (
    ("Opaque", "opaque", "One stain at a time on white, as it would look alone in the slide."),
    (
        "Overlay",
        "multiplicative",
        "All visible stains multiplied on white, as dyes in the slide; hides the image.",
    ),
    ("Additive", "additive", "All visible stains as lights on black; hides the image."),
)
_EXCLUDABLE_KINDS: tuple[tuple[NonTissue, bool, str], ...] = (
    (
        "glass",
        False,
        "Fit tissue only. The background is found in a thumbnail of the slide; a rim around the "
        "tissue is kept, as it shows the illumination.",
    ),
    ("pen", True, "Exclude pen marks: green, blue, red or black ink is not a stain."),
    ("border", True, "Exclude black areas at the edge, which scanners leave."),
)


class DecomposeForm(QWidget):
    """`changed` for what needs a new fit, `blending_changed` for how layers are blended."""

    changed = Signal()
    blending_changed = Signal(str)

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.start = StartSpectraPicker(panel)
        self.components = AutoSlider(
            IntegerScale(1, 12, 32),
            DEFAULT_COMPONENTS,
            _tooltip("components", _COMPONENTS_TIP),
            "auto",
            _AUTO_COMPONENTS_TIP,
        )
        self.iterations = AutoSlider(
            IntegerScale(1, 100, 1000),
            DEFAULT_ITERATIONS,
            _tooltip("iterations", _ITERATIONS_TIP),
            "converge",
            _CONVERGE_TIP,
        )
        self.lam = AutoSlider(
            LogScale(1e-3, 1e3), 1.0, _tooltip("lam", _LAMBDA_TIP), "auto", _AUTO_TIP
        )
        self.gamma = AutoSlider(
            LogScale(1e-5, 10), 0.01, _tooltip("gamma", _GAMMA_TIP), "auto", _AUTO_TIP
        )
        self.sliders = (self.components, self.iterations, self.lam, self.gamma)
        for slider in self.sliders:
            slider.set_value(None)
        self.stack = ComboBox(
            choices=[("One fit for all planes", True), ("Each plane separately", False)],
            tooltip=_STACK_TIP,
        )
        self.blending_buttons = QButtonGroup(self)
        for text, blending, tooltip in _BLENDINGS:
            radio_button = QRadioButton(text, self)  # the group does not keep it alive
            radio_button.setToolTip(tooltip)
            radio_button.setChecked(blending == "opaque")
            self.blending_buttons.addButton(radio_button)
        expand(self.stack)
        self._lay_out()
        self.start.changed.connect(self._start_changed)
        for slider in self.sliders:
            slider.changed.connect(self.changed)
        self.stack.changed.connect(self._emit_changed)
        self.slide.changed.connect(self.changed)
        self.blending_buttons.buttonClicked.connect(self._emit_blending)

    def _lay_out(self) -> None:
        self._rows = form()
        self.setLayout(self._rows)
        for label, widget in (
            ("Start from", self.start),
            ("Stains", self.components),
            ("Iterations", self.iterations),
            ("λ", self.lam),
            ("γ", self.gamma),
        ):
            self._rows.addRow(label, widget)
            not_none(self._rows.labelForField(widget)).setToolTip(widget.toolTip())
        self._rows.addRow("Stack", self.stack.native)
        self.slide = SlideFitControls(self._rows)
        self._rows.addRow("Show", row(*self.blending_buttons.buttons()))
        self.show_stack_controls(False)

    def _emit_changed(self, value: object = None) -> None:
        self.changed.emit()

    def _emit_blending(self, button: QRadioButton) -> None:
        self.blending_changed.emit(self.blending)

    @property
    def blending(self) -> Blending:
        """How the density layers are blended."""
        checked = [button.isChecked() for button in self.blending_buttons.buttons()]
        return _BLENDINGS[checked.index(True)][1]

    @property
    def one_fit_for_stack(self) -> bool:
        """Whether all planes of a stack are fitted together."""
        return bool(self.stack.value)

    def show_stack_controls(self, is_stack: bool) -> None:
        """Show or hide the controls that only stacks need."""
        _set_row_visible(self._rows, self.stack.native, is_stack)

    def settings(self) -> DecomposeSettings:
        """The present settings."""
        components, iterations = self.components.value, self.iterations.value
        lam, gamma, spectra = self.lam.value, self.gamma.value, self.start.spectra
        return DecomposeSettings(
            components="auto" if components is None else int(components),
            iterations="converge" if iterations is None else int(iterations),
            lam="auto" if lam is None else float(lam),
            gamma="auto" if gamma is None else float(gamma),
            spectra=None if spectra is None else tuple(map(tuple, spectra.tolist())),
        )

    def study_settings(self) -> dict[str, Any]:
        """The present settings by the names of `StudySettings`."""
        settings = self.settings()
        names = ("components", "iterations", "lam", "gamma")
        return {
            **{name: getattr(settings, name) for name in names},
            "spectra": None if self.start.spectra is None else self.start.spectra.tolist(),
            "leave_out": self.slide.options.leave_out if self.slide.is_shown else (),
        }

    def show_result(self, d: Decomposition) -> None:
        """Let sliders on auto display the values that were chosen from the image."""
        for slider, value in ((self.lam, d.lam), (self.gamma, d.gamma)):
            if slider.value is None:
                slider.display_value(float(value))
        if self.iterations.value is None:
            self.iterations.display_value(len(d.objective))
        if self.components.value is None and self.start.spectra is None:
            self.components.display_value(int(d.active.sum()))

    def _start_changed(self) -> None:
        spectra = self.start.spectra
        self.components.setEnabled(spectra is None)
        if spectra is not None:
            self.components.display_value(spectra.shape[1])
        self.changed.emit()


class StartSpectraPicker(QComboBox):
    """`spectra` is (3, r), or None for the common dyes; `changed` is emitted when it changes.

    Files are read off the GUI thread. If one cannot be used, that is reported, and the choice
    stays.
    """

    changed = Signal()

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.setToolTip(_START_TIP)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumContentsLength(12)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.task = panel.task()
        self.spectra: Spectra | None = None
        self._label = _DEFAULT_DYES
        self._loaded: dict[str, Spectra | None] = {_DEFAULT_DYES: None}
        self._models = {f"Model “{name}”": name for name in packaged_models()}
        self.addItems([_DEFAULT_DYES, *self._models, _CHECKPOINT_ENTRY, _FILE_ENTRY])
        self.activated.connect(self._activated)

    def use_file(self, path: str) -> None:
        """Start from the spectra of a spectra file or a checkpoint."""
        reader = read_spectra if Path(path).suffix.lower() == ".json" else learned_spectra
        self._load(Path(path).name, path, reader)

    def _activated(self, index: int) -> None:
        text = self.itemText(index)
        if text in self._loaded:
            self._use(text, self._loaded[text])
        elif text in self._models:
            self._load(text, self._models[text], learned_spectra)
        else:
            self._select(self._label)
            checkpoint = text == _CHECKPOINT_ENTRY
            kind = "Checkpoints (*.safetensors *.pt)" if checkpoint else "Spectra (*.json)"
            path, _ = QFileDialog.getOpenFileName(self, text.removesuffix(" …"), "", kind)
            if path:
                self.use_file(path)

    def _load(self, label: str, source: str, reader: Callable[[str], Spectra]) -> None:
        def done(spectra: Spectra) -> None:
            if label not in self._models and self.findText(label) < 0:
                self.insertItem(self.count() - 2, label)
            self._use(label, spectra)

        def failed(error: BaseException) -> None:
            self._select(self._label)
            notify_error(error)

        self.task.start(lambda report: reader(source), done, failed)

    def _use(self, label: str, spectra: Spectra | None) -> None:
        self._loaded[label] = self.spectra = spectra
        self._label = label
        self._select(label)
        self.changed.emit()

    def _select(self, label: str) -> None:
        with signals_blocked(self):
            self.setCurrentIndex(self.findText(label))


class SlideFitControls(QObject):
    """Two rows of the form, hidden if the image is not a slide; `changed` when one was set."""

    changed = Signal()

    def __init__(self, rows: QFormLayout) -> None:
        super().__init__()
        self._rows, self._shapes = rows, list[tuple[int, int]]()
        self.is_shown = False
        self.level = ComboBox(choices=[], tooltip=_LEVEL_TIP)
        expand(self.level)
        self.kinds = {
            kind: CheckBox(text=NON_TISSUE_NAMES[kind], value=excluded, tooltip=tooltip)
            for kind, excluded, tooltip in _EXCLUDABLE_KINDS
        }
        self._exclude = row(*(box.native for box in self.kinds.values()))
        rows.addRow("Fit on", self.level.native)
        rows.addRow("Exclude", self._exclude)
        for widget in (self.level, *self.kinds.values()):
            widget.changed.connect(self._emit_changed)
        self.set_levels([])

    def set_levels(self, shapes: LevelShapes) -> None:
        """Offer the levels (H, W) of a slide, the finest first; [] if the image is not a slide."""
        self._shapes = [
            s for k, s in enumerate(shapes) if not k or math.prod(s) >= _MIN_LEVEL_PIXELS
        ]
        names = ["Whole slide", *(f"Level {k}" for k in range(1, len(self._shapes)))]
        choices = [
            (f"{name}: {height:,} × {width:,}", k)
            for k, (name, (height, width)) in enumerate(zip(names, self._shapes, strict=False))
        ]
        with self.level.changed.blocked():
            self.level.choices = []  # or magicgui keeps old entries first
            self.level.choices = [*choices, (f"Preview only: {PREVIEW_TILES} tiles", _PREVIEW_ONLY)]
            self.level.value = 0 if choices else _PREVIEW_ONLY
        self.is_shown = bool(shapes)
        for widget in (self.level.native, self._exclude):
            _set_row_visible(self._rows, widget, self.is_shown)

    @property
    def options(self) -> SlideFitOptions:
        """The present options."""
        level = int(self.level.value)
        kinds = tuple(kind for kind, box in self.kinds.items() if box.value)
        return SlideFitOptions(max(level, 0), level == _PREVIEW_ONLY, kinds)

    def _emit_changed(self, value: object = None) -> None:
        self.changed.emit()


def _tooltip(name: str, more: str) -> str:
    """The description of a setting, and what it means for the user of the slider."""
    return f"{DecomposeSettings.spec(name).description} {more}"


def _set_row_visible(rows: QFormLayout, widget: QWidget, visible: bool) -> None:
    widget.setVisible(visible)
    not_none(rows.labelForField(widget)).setVisible(visible)
