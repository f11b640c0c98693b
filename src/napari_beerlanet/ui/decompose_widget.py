"""The stain decomposition widget: choose an image, see its stains apart, live."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from napari.viewer import Viewer
from qtpy.QtCore import QEvent, QTimer
from qtpy.QtGui import QGuiApplication
from qtpy.QtWidgets import QFileDialog, QWidget

from napari_beerlanet.core.progress import Report

from . import layers
from .decompose_form import DecomposeForm
from .fitting import (
    RESIDUAL_RANGE,
    PlaneReader,
    Result,
    Settings,
    as_python,
    fit,
    residual_picture,
)
from .planes import current_plane
from .tasks import Runner, State, describe

_PAUSE = 20  # milliseconds without a movement before a live update starts
_FILES = "Spectra (*.json);;All files (*)"


class DecomposeWidget(DecomposeForm):
    """Takes an RGB layer's stains apart. Reads the form, starts a run, shows its result."""

    def __init__(self, napari_viewer: Viewer, parent: QWidget | None = None) -> None:
        self._viewer = napari_viewer
        self.runner = Runner()
        super().__init__(napari_viewer, self.runner, parent)
        self.runner.setParent(self)
        self.result: Result | None = None
        self._spectra: np.ndarray | None = None
        self._reader = PlaneReader()
        self._following = False
        self._pause = QTimer(self)
        self._pause.setSingleShot(True)
        self._pause.setInterval(_PAUSE)
        self._pause.timeout.connect(self.run)
        self._connect()
        self._follow(True)
        self._on_layer()

    def _connect(self) -> None:
        for control in (self.components, self.iterations, self.lam, self.gamma):
            control.changed.connect(self._on_moved)
        self.stack.currentIndexChanged.connect(self._on_moved)
        self.choice.layer_changed.connect(self._on_layer)
        self.run_button.clicked.connect(self.run)
        self.sample_button.clicked.connect(self.open_sample)
        self.blending.currentTextChanged.connect(self._on_blending)
        self.panel.show_only.connect(self._on_show_only)
        self.panel.ticks_changed.connect(self._follow_state)
        self.reconstruct_button.clicked.connect(self.reconstruct)
        self.residual_button.clicked.connect(self.residual)
        self.save_button.clicked.connect(self._ask_where_to_save)
        self.load_button.clicked.connect(self._ask_what_to_load)
        self.default_button.clicked.connect(self.forget_spectra)
        self.copy_button.clicked.connect(self.copy_as_python)
        self.runner.state_changed.connect(self._follow_state)

    # --- the run ---------------------------------------------------------------------------------

    def settings(self) -> Settings:
        """What the form says."""
        return Settings(
            components=self.components.value,
            iterations="converge" if self.iterations.auto.isChecked() else self.iterations.value,
            lam="auto" if self.lam.auto.isChecked() else self.lam.value,
            gamma="auto" if self.gamma.auto.isChecked() else self.gamma.value,
            spectra=self._spectra,
        )

    def run(self) -> None:
        """Take the chosen layer's stains apart; a run under way is overtaken."""
        self._pause.stop()
        layer = self.choice.layer
        if layer is None:
            return
        plane, settings = current_plane(layer, self._viewer), self.settings()
        whole = self.stack.currentIndex() == 1
        self.runner.start(partial(_fit, plane, settings, self._reader, whole), self._show)

    def open_sample(self) -> None:
        """Add the synthetic smear; where the form can then start."""
        self.runner.start(_draw_sample, lambda data: layers.add_sample(self._viewer, data))

    def _show(self, result: Result) -> None:
        self.result = result
        d = result.decomposition
        blending = self.blending.currentText().lower()
        shown = (result.plane, result.maps, result.limit, blending, result.whole_stack)
        layers.show_densities(self._viewer, *shown)
        self.lam.suggest(d.lam)
        self.gamma.suggest(d.gamma)
        self.panel.display(d)
        self.curve.display(d.objective)
        self._follow_state()

    def _on_moved(self) -> None:
        """A control moved: once there is something to update, and the box is ticked, update it."""
        if self.live.isChecked() and self.result is not None and self._shows_chosen_layer():
            self._pause.start()

    def _shows_chosen_layer(self) -> bool:
        layer = self.choice.layer
        return (
            layer is not None
            and self.result is not None
            and self.result.plane.key == str(layer.unique_id)
        )

    # --- what can be done with a result ----------------------------------------------------------

    def reconstruct(self) -> None:
        """An RGB layer of the ticked components alone."""
        if self.result is None:
            return
        result, ticked = self.result, self.panel.ticked()
        numbers = ", ".join(str(i + 1) for i in ticked)
        name = f"Reconstruction of OD {numbers}" if ticked else "Background light"
        self.runner.start(
            lambda report: result.decomposition.reconstruct(ticked),
            partial(layers.show_rgb, self._viewer, result.plane, "reconstruction", name),
        )

    def residual(self) -> None:
        """An RGB layer of what the components do not explain."""
        if self.result is None:
            return
        result = self.result
        name = f"Residual (mid-grey is 0, ±{RESIDUAL_RANGE} OD)"
        self.runner.start(
            lambda report: residual_picture(result.decomposition),
            partial(layers.show_rgb, self._viewer, result.plane, "residual", name),
        )

    def copy_as_python(self) -> None:
        """The snippet that makes the same layers, to the clipboard."""
        if self.result is not None:
            QGuiApplication.clipboard().setText(as_python(self.result))

    def save_spectra(self, path: str | Path) -> None:
        """Light, spectra and shares to a JSON file."""
        if self.result is None:
            return
        from napari_beerlanet.core.results import write_spectra

        try:
            write_spectra(path, self.result.decomposition, name=self.result.plane.name)
        except (OSError, ValueError) as error:
            self.run_bar.show_failure(describe(error))

    def load_spectra(self, path: str | Path) -> None:
        """Start from the spectra of a file by `save_spectra`."""
        from napari_beerlanet.core.results import read_spectra

        try:
            self._spectra = read_spectra(path)
        except (OSError, ValueError) as error:
            self.run_bar.show_failure(describe(error))
            return
        self.run_bar.clear_failure()
        self.show_start(f"{Path(path).name} ({self._spectra.shape[1]} spectra)", own=True)
        self._on_moved()

    def forget_spectra(self) -> None:
        """Start from the default dyes again."""
        self._spectra = None
        self.show_start("default dyes", own=False)
        self._on_moved()

    def _ask_where_to_save(self) -> None:
        path, _ = QFileDialog.getSaveFileName(self, "Save spectra", "spectra.json", _FILES)
        if path:
            self.save_spectra(path)

    def _ask_what_to_load(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Load spectra", "", _FILES)
        if path:
            self.load_spectra(path)

    # --- following the viewer --------------------------------------------------------------------

    def _on_layer(self) -> None:
        layer = self.choice.layer
        self.show_need(layer is None)
        self.show_stack(layer is not None and layer.ndim > 2)
        self._follow_state()

    def _on_step(self, event: object = None) -> None:
        if self._shows_chosen_layer() and self.stack.currentIndex() == 0:
            plane = current_plane(self.choice.layer, self._viewer)
            if self.result is not None and plane.index != self.result.plane.index:
                self._on_moved()

    def _on_blending(self, text: str) -> None:
        if self.result is not None:
            layers.set_blending(self._viewer, self.result.plane.key, text.lower())

    def _on_show_only(self, number: int | None) -> None:
        if self.result is not None:
            layers.show_only(self._viewer, self.result.plane.key, number)

    def _follow_state(self, *_: Any) -> None:
        idle = self.runner.state is State.IDLE
        self.run_button.setEnabled(idle and self.choice.layer is not None)
        self.sample_button.setEnabled(idle)
        self.show_results(self.result is not None)
        self.reconstruct_button.setEnabled(idle)
        self.residual_button.setEnabled(idle)

    def _follow(self, on: bool) -> None:
        if on is self._following:
            return
        self._following = on
        self.choice.follow(on)
        step = self._viewer.dims.events.current_step
        (step.connect if on else step.disconnect)(self._on_step)

    def event(self, event: QEvent) -> bool:
        """napari takes the widget out of its dock to close it: then all work ends."""
        handled = super().event(event)
        if event.type() == QEvent.Type.ParentChange and hasattr(self, "_following"):
            docked = self.parent() is not None
            if not docked:
                self._end()
            self._follow(docked)
        return handled

    def closeEvent(self, event: Any) -> None:  # noqa: N802
        """A window of its own was closed."""
        self._end()
        super().closeEvent(event)

    def _end(self) -> None:
        self._pause.stop()
        self.runner.abandon()


def _fit(plane: Any, settings: Settings, read: PlaneReader, whole: bool, report: Report) -> Result:
    return fit(plane, settings, read, whole, report)


def _draw_sample(report: Report) -> Any:
    from napari_beerlanet.sample_data import blood_smear_layers

    return blood_smear_layers()[0]
