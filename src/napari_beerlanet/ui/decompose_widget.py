"""The decomposition panel: see the stains of an image apart, and follow the sliders."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from napari.layers import Image
from qtpy.QtWidgets import QApplication, QFileDialog

from napari_beerlanet.core.results import write_spectra
from napari_beerlanet.ui.batch_settings import batch_button, stain_settings
from napari_beerlanet.ui.controls import button, form, row
from napari_beerlanet.ui.decompose_form import DecomposeForm
from napari_beerlanet.ui.decompose_panel import DecomposePanel
from napari_beerlanet.ui.decompose_snippet import snippet
from napari_beerlanet.ui.density_arrays import Data
from napari_beerlanet.ui.density_layers import DensityLayers
from napari_beerlanet.ui.empty import EmptyState
from napari_beerlanet.ui.fitting import Fitted, Fitter, Target, where_fitted
from napari_beerlanet.ui.layers import ImageChoice
from napari_beerlanet.ui.live import Live
from napari_beerlanet.ui.made_layers import MadeLayers
from napari_beerlanet.ui.panel import Panel
from napari_beerlanet.ui.patient_runbar import PatientRunBar
from napari_beerlanet.ui.planes import all_planes, current_plane, pixel_size
from napari_beerlanet.ui.session import session
from napari_beerlanet.ui.slide_results import file_of
from napari_beerlanet.ui.tasks import Outcome


class DecomposeWidget(Panel):
    """Choose an image, press the button, move the sliders."""

    def __init__(self, napari_viewer: Any) -> None:
        super().__init__(napari_viewer)
        self.images, self.empty = ImageChoice(self), EmptyState(self)
        self.form, self.found = DecomposeForm(self), DecomposePanel(self.viewer)
        self.files = self.task()
        self.live = Live(self.task(), self.task(), Fitter(), self._show, self)
        self.bar, self.file_bar = PatientRunBar(self.live.task), PatientRunBar(self.files)
        self.count_bar = PatientRunBar(self.live.counting)
        self.run_button = button(
            "Decompose",
            "Take the image's stains apart; after that, the layers follow the sliders.",
            self.run,
        )
        self.fitted: Fitted | None = None
        self._layers: dict[Image, DensityLayers] = {}
        self._made = MadeLayers(self)
        self._following: Image | None = None
        self._anew = False
        self._lay_out()
        self._connect()
        self._choose(self.images.layer)

    def _lay_out(self) -> None:
        top = form()
        top.addRow("Image", self.images)
        self.body.addLayout(top)
        self.body.addWidget(self.empty)
        self.body.addWidget(self.form)
        self.body.addWidget(row(self.run_button, batch_button(self), stretch=0))
        self.body.addWidget(self.bar)
        self.body.addWidget(self.count_bar)
        self.body.addWidget(self.found)
        self.body.addWidget(self.file_bar)
        self.body.addStretch(1)
        self.found.hide()

    def _connect(self) -> None:
        self.images.chosen.connect(self._choose)
        self.form.changed.connect(self._changed)
        self.form.look_changed.connect(self._look)
        self.found.only.connect(self._only)
        self.found.reconstruct.connect(self._made.reconstruct)
        self.found.residual.connect(self._made.residual)
        self.found.save.connect(self._ask_where_to_save)
        self.found.load.connect(self._ask_what_to_load)
        self.found.copy.connect(self.copy_snippet)
        self.live.counting.ended.connect(self._counting_ended)
        self.listen(self.viewer.layers.events.inserted, self._layers_changed)
        self.listen(self.viewer.layers.events.removed, self._layers_changed)
        self.listen(self.viewer.dims.events.point, self._plane_changed)
        self.listen(self.viewer.events.theme, self._theme_changed)
        self.shortcut("Ctrl+Shift+D", self.run)

    def _theme_changed(self, event: Any = None) -> None:
        self.found.repaint_swatches()

    # --- which image ---

    def _choose(self, layer: Image | None) -> None:
        self.live.stop()
        if self._following is not None:
            self.unlisten(self._following.events.data, self._data_changed)
        self._following = layer
        self.fitted = None
        self.found.hide()
        self.bar.say("")
        self.count_bar.say("")
        for widget in (self.form, self.run_button, self.bar, self.count_bar):
            widget.setVisible(layer is not None)
        self.empty.setVisible(layer is None)
        self.empty.update_text()
        if layer is not None:
            self.listen(layer.events.data, self._data_changed)
            self.form.set_stack(layer.ndim > 2)
            self._offer_levels(layer)

    def _offer_levels(self, layer: Image) -> None:
        plane = current_plane(layer, self.viewer)
        slide = plane.pyramid if plane.is_slide else []
        self.form.slide.offer([(int(s.shape[0]), int(s.shape[1])) for s in slide])

    def _layers_changed(self, event: Any = None) -> None:
        self.empty.update_text()
        for source in [source for source in self._layers if source not in self.viewer.layers]:
            self._layers.pop(source).close()

    def _data_changed(self, event: Any = None) -> None:
        self.live.forget()
        if self.images.layer is not None:
            self._offer_levels(self.images.layer)
        self._changed()

    def _plane_changed(self, event: Any = None) -> None:
        fitted, layer = self.fitted, self.images.layer
        if fitted is None or layer is None or layer.ndim == 2 or self.form.one_fit_for_all:
            return
        if current_plane(layer, self.viewer).index != fitted.target.plane.index:
            self._changed()

    # --- fitting ---

    def run(self) -> None:
        """Take the chosen image apart."""
        if self.images.layer is not None:
            self._anew = True
            self._began = time.monotonic()
            self.count_bar.say("")
            self.live.ask(self._target(self.images.layer), self.form.settings(), anew=True)

    def _changed(self) -> None:
        """A slider was moved: follow it, if there is something to follow."""
        if self.images.layer is not None and (self.fitted is not None or not self.live.idle):
            self.live.ask(self._target(self.images.layer), self.form.settings())

    def _target(self, layer: Image) -> Target:
        if layer.ndim > 2 and self.form.one_fit_for_all:
            return Target(tuple(all_planes(layer)))
        plane, choice = current_plane(layer, self.viewer), self.form.slide.choice
        return Target((plane,), choice, file_of(layer))

    def _show(self, fitted: Fitted, data: list[Data]) -> None:
        layer = self.images.layer
        if layer is None or layer not in self.viewer.layers:
            return
        self.fitted = fitted
        if layer not in self._layers:
            self._layers[layer] = DensityLayers(
                self.viewer, layer, self, self.form.look, self._mark_shown
            )
        self._layers[layer].show(fitted, data, self._anew)
        d = fitted.decomposition
        self.form.show_found(d)
        self.found.show_found(d)
        self.found.show()
        self._mark_shown()
        if not fitted.first_look:
            self._anew = False
            session(self.viewer).decompositions[layer] = d
            self._made.follow()
        self._say(fitted)

    def _counting_ended(self, outcome: Outcome) -> None:
        if outcome is Outcome.CANCELLED:
            there = self.fitted is not None and self.fitted.preview
            self.count_bar.say("Stopped; the preview stays." if there else "")

    def _say(self, fitted: Fitted) -> None:
        count = int(fitted.decomposition.active.sum())
        said = [f"{count} stain{'s' * (count != 1)}" if count else "No stain found"]
        said += [where_fitted(fitted)] if where_fitted(fitted) else []
        said += ["settling …"] if fitted.first_look else []
        self.bar.say(", ".join(said))

    @property
    def layers(self) -> DensityLayers | None:
        """The density layers of the chosen image."""
        return self._layers.get(self.images.layer) if self.images.layer is not None else None

    # --- looking at it ---

    def _look(self, look: Any) -> None:
        if self.layers is not None:
            self.layers.set_look(look)

    def _only(self, component: int) -> None:
        if self.layers is not None:
            self.layers.show_only(component)
        self._mark_shown()  # a click has turned the button whatever came of it

    def _mark_shown(self) -> None:
        self.found.mark_shown(self.layers.shown if self.layers is not None else set())

    # --- taking it elsewhere ---

    def _ask_where_to_save(self) -> None:
        name = (
            f"{self.images.layer.name if self.images.layer is not None else 'stains'}.spectra.json"
        )
        path, _ = QFileDialog.getSaveFileName(self, "Save spectra", name, "Spectra (*.json)")
        if path:
            self.save_spectra(path)

    def _ask_what_to_load(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Load spectra", "", "Spectra (*.json)")
        if path:
            self.form.start.use_file(path)

    def save_spectra(self, path: str) -> None:
        """Write light, spectra and settings to a file, off the GUI thread."""
        fitted, layer = self.fitted, self.images.layer
        if fitted is None or layer is None:
            return
        path = path if Path(path).suffix else f"{path}.json"
        size, name, d = pixel_size(layer), layer.name, fitted.decomposition
        self.files.start(
            lambda report: write_spectra(path, d, size, name),
            lambda _: self.file_bar.say(f"Saved {Path(path).name}."),
        )

    def copy_snippet(self) -> None:
        """Put Python that makes the same layers on the clipboard."""
        if self.fitted is not None and self.images.layer is not None:
            QApplication.clipboard().setText(self.snippet)
            self.file_bar.say("Copied. Paste it into napari's console or a script.")

    @property
    def snippet(self) -> str:
        """Python that makes the same layers."""
        assert self.fitted is not None
        assert self.images.layer is not None
        return snippet(self.fitted, self.images.layer.name, self.form.look)

    @property
    def study_layer(self) -> Image | None:
        """The image whose folder is proposed for a batch."""
        return self.images.layer

    def study_settings(self) -> dict[str, Any]:
        """What is set, by the names of `StudySettings`."""
        return stain_settings(self.form)

    def ended(self) -> None:
        """The panel is closed: layers stay, nothing follows any more."""
        for layers in self._layers.values():
            layers.close()
        self._layers.clear()
