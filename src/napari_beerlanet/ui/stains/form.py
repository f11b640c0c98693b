"""Settings of the stain decomposition panel."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from magicgui.widgets import CheckBox, ComboBox
from qtpy.QtCore import QObject, Signal
from qtpy.QtWidgets import (
    QButtonGroup,
    QCheckBox,
    QComboBox,
    QFileDialog,
    QFormLayout,
    QLabel,
    QPushButton,
    QRadioButton,
    QSizePolicy,
    QWidget,
)
from superqt.utils import signals_blocked

from napari_beerlanet.core.checkpoints.checkpoint import (
    has_spectra,
    learned_spectra,
    packaged_models,
    read_info,
)
from napari_beerlanet.core.images import NonTissue
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.core.stains.presets import BUILT_IN_PRESETS, read_start
from napari_beerlanet.core.stains.settings import (
    DEFAULT_COMPONENTS,
    DEFAULT_ITERATIONS,
    DecomposeSettings,
)
from napari_beerlanet.ui.common.controls import CollapsibleGroup, expand, form, not_none, row
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.sliders import AutoSlider, IntegerScale, LogScale
from napari_beerlanet.ui.stains.density_layers import Blending
from napari_beerlanet.ui.stains.fitting import NON_TISSUE_NAMES, PREVIEW_TILES, SlideFitOptions
from napari_beerlanet.ui.stains.preset_editor import saved_presets

_MIN_LEVEL_PIXELS = 1_000_000  # a smaller pyramid level is not worth a fit
_PREVIEW_ONLY = -1  # in place of a level
_FROM_IMAGE = "Found in this image"
_CHECKPOINT_ENTRY, _FILE_ENTRY = "Checkpoint …", "Spectra or preset file …"

Spectra = npt.NDArray[np.float64]
LevelShapes = Sequence[tuple[int, int]]

_START_TIP = (
    "Which spectra the stains have. Found in this image: from the image alone, starting from "
    "common dyes. A preset: published spectra (H&E, H-DAB, Giemsa) or your own. Model, "
    "Checkpoint: the spectra that a detector has learned. File: those that you saved from another "
    "image."
)
_KEEP_TIP = (
    "Decompose with exactly these spectra: only densities and background are solved for, so that "
    "images can be compared. Without the tick, the spectra adapt to the image. For spectra that "
    "are given: of a preset, a model or a file."
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
    """`changed` for what needs a new fit, `blending_changed` for how layers are blended.

    In three parts: `start_row`, which spectra; this widget, what only stacks and slides need; and
    `advanced`, a group that is collapsed at first.
    """

    changed = Signal()
    blending_changed = Signal(str)

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.start = StartSpectraPicker(panel)
        self.presets = QPushButton("Presets …")
        self.presets.setToolTip(
            "Make, change, import and export presets: named spectra, also measured in a drawn "
            "region, shared by the images of a project."
        )
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
        top = form()
        top.addRow("Spectra", row(self.start, self.presets, stretch=0))
        top.addRow("", self.start.keep)
        self.start_row = QWidget()
        self.start_row.setLayout(top)
        inner = form()
        for label, widget in (
            ("Components", self.components),
            ("Iterations", self.iterations),
            ("λ", self.lam),
            ("γ", self.gamma),
        ):
            caption = QLabel(label)
            caption.setToolTip(widget.toolTip())
            inner.addRow(caption, widget)
        self.advanced = CollapsibleGroup("Advanced")
        self.advanced.header.setToolTip(
            "Show or hide the solver's settings: number of components, iterations, penalties λ and "
            "γ. On auto they are chosen from the image."
        )
        self.advanced.body.addLayout(inner)
        self._rows = form()
        self.setLayout(self._rows)
        self._rows.addRow("Stack", self.stack.native)
        self.slide = SlideFitControls(self._rows)
        self.blending_row = row(QLabel("Show as"), *self.blending_buttons.buttons())
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
            fixed_spectra=self.start.fixed,
            stain_names=self.start.names,
        )

    def study_settings(self) -> dict[str, Any]:
        """The present settings by the names of `StudySettings`."""
        settings = self.settings()
        names = ("components", "iterations", "lam", "gamma")
        return {
            **{name: getattr(settings, name) for name in names},
            "spectra": None if self.start.spectra is None else self.start.spectra.tolist(),
            "fixed_spectra": self.start.fixed,
            "stain_names": self.start.names,
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
        self.iterations.setEnabled(not self.start.fixed)
        if spectra is not None:
            self.components.display_value(spectra.shape[1])
        self.changed.emit()


@dataclass(frozen=True, eq=False)
class _StartChoice:
    """An entry of the list: spectra (3, r), None for those of the image; whether kept at first."""

    spectra: Spectra | None
    names: tuple[str, ...] = ()
    fixed: bool = False


class StartSpectraPicker(QComboBox):
    """`spectra` is (3, r), or None for those of the image; `changed` is emitted when it changes.

    `names` are those of the spectra, () for none, and `fixed` tells that they are kept, which is
    what the box `keep` is for. Files are read off the GUI thread. If one cannot be used, that is
    reported, and the choice stays.
    """

    changed = Signal()

    def __init__(self, panel: Panel) -> None:
        super().__init__()
        self.setToolTip(_START_TIP)
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumContentsLength(12)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self.task, self._viewer = panel.task(), panel.viewer
        self.keep = QCheckBox("Keep these spectra fixed")
        self.keep.setToolTip(_KEEP_TIP)
        self.keep.setEnabled(False)
        self._label = _FROM_IMAGE
        self._loaded: dict[str, _StartChoice] = {}
        self._presets: dict[str, _StartChoice] = {}
        self._models = {
            f"Model “{name}”": name for name in packaged_models() if has_spectra(read_info(name))
        }
        self._choice = _StartChoice(None)
        self.refresh_presets()
        self.activated.connect(self._activated)
        self.keep.toggled.connect(lambda _: self.changed.emit())

    @property
    def spectra(self) -> Spectra | None:
        """(3, r), None for those of the image."""
        return self._choice.spectra

    @property
    def names(self) -> tuple[str, ...]:
        """Of the spectra."""
        return self._choice.names

    @property
    def fixed(self) -> bool:
        """Whether the spectra are kept."""
        return self.spectra is not None and self.keep.isChecked()

    @property
    def label(self) -> str:
        """The chosen entry."""
        return self._label

    def refresh_presets(self, chosen: str = "") -> None:
        """List the built-in and the saved presets; use the one that is `chosen`."""
        saved = saved_presets(self._viewer)
        self._presets = {
            preset.name: _StartChoice(preset.spectra, preset.names, fixed=True)
            for preset in (*BUILT_IN_PRESETS, *saved)
        }
        with signals_blocked(self):
            self.clear()
            self.addItems([_FROM_IMAGE, *self._presets, *self._models, *self._loaded])
            self.addItems([_CHECKPOINT_ENTRY, _FILE_ENTRY])
            place = [0, len(self._presets), len(self._models), len(self._loaded)]
            for k in (1, 2):
                self.insertSeparator(sum(place[: k + 1]) + k)
        if chosen in self._presets:
            self._use(chosen, self._presets[chosen])
        elif self.findText(self._label) < 0:
            self._use(_FROM_IMAGE, _StartChoice(None))
        else:
            self._select(self._label)

    def use_file(self, path: str) -> None:
        """Use the spectra of a spectra file, a preset or a checkpoint."""
        if Path(path).suffix.lower() == ".json":
            self._load(Path(path).name, lambda: _StartChoice(*read_start(path), fixed=True))
        else:
            self._load(Path(path).name, lambda: _StartChoice(learned_spectra(path)))

    def use_preset(self, name: str) -> None:
        """Use a built-in or saved preset."""
        self._use(name, self._presets[name])

    def _activated(self, index: int) -> None:
        text = self.itemText(index)
        if text == _FROM_IMAGE:
            self._use(text, _StartChoice(None))
        elif text in self._presets or text in self._loaded:
            self._use(text, (self._presets | self._loaded)[text])
        elif text in self._models:
            name = self._models[text]
            self._load(text, lambda: _StartChoice(learned_spectra(name)))
        else:
            self._select(self._label)
            checkpoint = text == _CHECKPOINT_ENTRY
            kind = "Checkpoints (*.safetensors *.pt)" if checkpoint else "Spectra (*.json)"
            path, _ = QFileDialog.getOpenFileName(self, text.removesuffix(" …"), "", kind)
            if path:
                self.use_file(path)

    def _load(self, label: str, read: Callable[[], _StartChoice]) -> None:
        def done(choice: _StartChoice) -> None:
            if label not in self._models:
                if self.findText(label) < 0:
                    self.insertItem(self.count() - 2, label)
                self._loaded[label] = choice
            self._use(label, choice)

        def failed(error: BaseException) -> None:
            self._select(self._label)
            notify_error(error)

        self.task.start(lambda report: read(), done, failed)

    def _use(self, label: str, choice: _StartChoice) -> None:
        self._label, self._choice = label, choice
        self._select(label)
        with signals_blocked(self.keep):
            self.keep.setChecked(choice.fixed)
        self.keep.setEnabled(choice.spectra is not None)
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
