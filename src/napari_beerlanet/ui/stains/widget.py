"""The stain decomposition panel."""

from __future__ import annotations

import time
from collections.abc import Callable, Container
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary, WeakSet

from napari.layers import Image
from qtpy.QtCore import QObject
from qtpy.QtWidgets import QFileDialog
from superqt.utils import QSignalThrottler

from napari_beerlanet.core.common.messages import count_of
from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.core.stains.files import write_spectra
from napari_beerlanet.core.stains.presets import NamedSpectrum, match_names
from napari_beerlanet.core.stains.settings import DecomposeSettings
from napari_beerlanet.core.stains.slide import SlideColours
from napari_beerlanet.ui.common.controls import (
    batch_button,
    button,
    copy_text,
    form,
    panel_button,
    row,
)
from napari_beerlanet.ui.common.panel import Panel
from napari_beerlanet.ui.common.progress_bar import DelayedProgressBar
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.common.tasks import Task, TaskOutcome
from napari_beerlanet.ui.stains.code_snippet import code_snippet
from napari_beerlanet.ui.stains.density_layers import Blending, DensityLayers
from napari_beerlanet.ui.stains.derived_layers import DerivedLayers
from napari_beerlanet.ui.stains.fitting import (
    FitResult,
    FitTarget,
    LayerData,
    StainFitter,
    density_data,
    describe_fit,
    rough_settings,
)
from napari_beerlanet.ui.stains.form import DecomposeForm
from napari_beerlanet.ui.stains.preset_editor import (
    PresetEditor,
    named_spectra,
    stain_library,
)
from napari_beerlanet.ui.stains.result_panel import StainResultPanel
from napari_beerlanet.ui.viewer.empty_state import EmptyState
from napari_beerlanet.ui.viewer.layers import ImagePicker, step_forward
from napari_beerlanet.ui.viewer.planes import all_planes, current_plane, layer_path, pixel_size

if TYPE_CHECKING:
    from napari import Viewer

FitRequest = tuple[FitTarget, DecomposeSettings]
ShowFit = Callable[[Image, FitResult, list[LayerData]], None]
ScanSlide = Callable[[Report], SlideColours]

_THROTTLE_MS = 15  # movements within this become one request
_MAX_REDRAW_INTERVAL_S = 0.15  # while a slider moves, a stale result is shown after this


class DecomposeWidget(Panel):
    """See the stains of an image separately, live under the sliders."""

    title = "Stain decomposition"

    def __init__(self, napari_viewer: Viewer) -> None:
        super().__init__(napari_viewer)
        self.images, self.empty = ImagePicker(self), EmptyState(self)
        self.form, self.result_panel = DecomposeForm(self), StainResultPanel(self.viewer)
        self.preset_editor = PresetEditor(self)
        self.files = self.task()
        self.live = LiveFit(self.task(), self.task(), self._show, self)
        self.bar, self.file_bar = DelayedProgressBar(self.live.task), DelayedProgressBar(self.files)
        self.slide_scan_bar = DelayedProgressBar(self.live.slide_scan)
        self.run_button = button(
            "Decompose",
            "Decompose the image into stains (Ctrl+Shift+D). The layers then follow the sliders.",
            self.run,
        )
        self._fits: WeakKeyDictionary[Image, FitResult] = WeakKeyDictionary()
        self._layers: dict[Image, DensityLayers] = {}
        self._derived = DerivedLayers(self)
        self._named: WeakKeyDictionary[Image, list[NamedSpectrum]] = WeakKeyDictionary()
        self._own_names: list[NamedSpectrum] = []
        self._followed_layer: Image | None = None
        self._restoring: WeakSet[Image] = WeakSet()  # layers that were removed come back
        self._lay_out()
        self._connect()
        self._choose(self.images.layer)

    def _lay_out(self) -> None:
        top = form()
        top.addRow("Image", self.images)
        self.body.addLayout(top)
        self.body.addWidget(self.empty)
        self.body.addWidget(self.form.start_row)
        self.body.addWidget(row(self.run_button, batch_button(self), stretch=0))
        self.body.addWidget(self.bar)
        self.body.addWidget(self.slide_scan_bar)
        self.body.addWidget(self.result_panel)
        self.body.addWidget(self.file_bar)
        self.body.addWidget(self.form)
        self.body.addWidget(self.form.advanced)
        self.compare_button = panel_button(
            self.viewer,
            "Compare normalizations",
            "See what stain normalization methods make of the image, side by side.",
        )
        self.body.addWidget(row(self.compare_button))
        self.result_panel.body.insertWidget(1, self.form.blending_row)
        self.form.advanced.body.addWidget(self.result_panel.objective)
        self.body.addStretch(1)
        self.result_panel.hide()
        self.result_panel.objective.hide()

    def _connect(self) -> None:
        self.images.chosen.connect(self._choose)
        self.form.changed.connect(self._changed)
        self.form.blending_changed.connect(self._set_blending)
        self.result_panel.only.connect(self._show_only)
        self.result_panel.named.connect(self.name_stain)
        self.form.presets.clicked.connect(self.edit_presets)
        self.preset_editor.saved.connect(self._presets_changed)
        self.result_panel.reconstruct.connect(self._derived.reconstruct)
        self.result_panel.residual.connect(self._derived.residual)
        self.result_panel.save.connect(self._choose_save_path)
        self.result_panel.load.connect(self._choose_spectra_file)
        self.result_panel.copy.connect(self.copy_snippet)
        self.live.task.ended.connect(self._fit_ended)
        self.live.slide_scan.ended.connect(self._slide_scan_ended)
        self.connect_event(self.viewer.layers.events.inserted, self._layers_changed)
        self.connect_event(self.viewer.layers.events.removed, self._layers_changed)
        self.connect_event(self.viewer.dims.events.point, self._plane_changed)
        self.connect_event(self.viewer.events.theme, self._theme_changed)
        self.add_shortcut("Ctrl+Shift+D", self.run)

    def _theme_changed(self, event: Any = None) -> None:
        self.result_panel.repaint_swatches()

    # --- image ------------------------------------------------------------------------------------

    @property
    def fitted(self) -> FitResult | None:
        """The last fit of the chosen image."""
        return self._fits.get(self.images.layer) if self.images.layer is not None else None

    def _choose(self, layer: Image | None) -> None:
        """Show the fit of this image, if it has one. One that runs for another image continues."""
        if self._followed_layer is not None:
            self.disconnect_event(self._followed_layer.events.data, self._data_changed)
        self._followed_layer = layer
        self.live.set_current(layer)
        self._own_names = named_spectra(self.viewer)
        self.bar.set_message("")
        self.slide_scan_bar.set_message("")
        for widget in (
            *(self.form, self.form.start_row, self.form.advanced),
            *(self.run_button, self.bar, self.slide_scan_bar),
        ):
            widget.setVisible(layer is not None)
        self.empty.setVisible(layer is None)
        self.empty.update_text()
        if layer is not None:
            self.connect_event(layer.events.data, self._data_changed)
            self.form.show_stack_controls(layer.ndim > 2)
            self._offer_levels(layer)
        self._show_result()
        if layer is not None and self.fitted is not None and self._is_outdated(self.fitted, layer):
            self._changed()

    def _is_outdated(self, fitted: FitResult, layer: Image) -> bool:
        """Whether the layer has other pixels than were fitted, or shows another plane."""
        plane = current_plane(layer, self.viewer)
        whole = fitted.target.whole_stack
        other_plane = not whole and plane.index != fitted.target.plane.index
        levels = zip(plane.levels, fitted.target.plane.levels, strict=False)
        return other_plane or any(now is not then for now, then in levels)

    def _offer_levels(self, layer: Image) -> None:
        plane = current_plane(layer, self.viewer)
        slide = plane.pyramid if plane.is_slide else []
        self.form.slide.set_levels([(int(s.shape[0]), int(s.shape[1])) for s in slide])

    def _layers_changed(self, event: Any = None) -> None:
        self.empty.update_text()
        for source in [source for source in self._layers if source not in self.viewer.layers]:
            self._layers.pop(source).close()
        self.live.forget_removed(self.viewer.layers)

    def _data_changed(self, event: Any = None) -> None:
        if self.images.layer is not None:
            self.live.clear_cache(self.images.layer)
            self._offer_levels(self.images.layer)
        self._changed()

    def _plane_changed(self, event: Any = None) -> None:
        fitted, layer = self.fitted, self.images.layer
        if fitted is None or layer is None or layer.ndim == 2 or self.form.one_fit_for_stack:
            return
        if current_plane(layer, self.viewer).index != fitted.target.plane.index:
            self._changed()

    # --- fitting ----------------------------------------------------------------------------------

    def run(self) -> None:
        """Decompose the chosen image."""
        layer = self.images.layer
        if layer is not None:
            self._restoring.add(layer)
            step_forward(self.viewer, layer)
            self.slide_scan_bar.set_message("")
            self.live.request(layer, self._target(layer), self.form.settings(), rescan=True)

    def _changed(self) -> None:
        """A setting was changed: fit again, if there is a fit already."""
        layer = self.images.layer
        if layer is not None and (self.fitted is not None or self.live.works_on(layer)):
            self.live.request(layer, self._target(layer), self.form.settings())

    def _target(self, layer: Image) -> FitTarget:
        if layer.ndim > 2 and self.form.one_fit_for_stack:
            return FitTarget(tuple(all_planes(layer)))
        plane, options = current_plane(layer, self.viewer), self.form.slide.options
        return FitTarget((plane,), options, layer_path(layer))

    def _show(self, layer: Image, fitted: FitResult, data: list[LayerData]) -> None:
        """Show a fit in the layers of its image, and in the panel if that is the chosen one."""
        if layer not in self.viewer.layers:
            return
        fitted = self._fits[layer] = self._with_names(layer, fitted)
        if layer not in self._layers:
            self._layers[layer] = DensityLayers(
                self.viewer, layer, self, self.form.blending, self._mark_visible
            )
        self._layers[layer].show(fitted, data, layer in self._restoring)
        if not fitted.is_rough:
            self._restoring.discard(layer)
            get_session(self.viewer).decompositions[layer] = fitted.decomposition
            self._derived.update(layer, fitted)
        if layer is self.images.layer:
            self._show_result()

    def _show_result(self) -> None:
        """Show the fit of the chosen image in the panel, or nothing where it has none."""
        fitted = self.fitted
        fit = None if fitted is None else fitted.decomposition
        self.preset_editor.set_fit(self.images.layer, fit)
        self.result_panel.setVisible(fitted is not None)
        self.result_panel.objective.setVisible(fitted is not None)
        if fitted is not None:
            self.form.show_result(fitted.decomposition)
            self.result_panel.show_result(fitted.decomposition, self._own_names)
            self._mark_visible()
            self._show_summary(fitted)

    def _fit_ended(self, outcome: TaskOutcome) -> None:
        """Say of which image it is told that it was cancelled or failed, if of another one."""
        image, told = self.live.fitting, (TaskOutcome.CANCELLED, TaskOutcome.FAILED)
        if image is not None and image is not self.images.layer and outcome in told:
            self.bar.message_label.setText(f"“{image.name}”: {self.bar.text}")

    def _slide_scan_ended(self, outcome: TaskOutcome) -> None:
        if outcome is TaskOutcome.CANCELLED:
            shown = self.fitted if self.live.scanning is self.images.layer else None
            has_preview = shown is not None and shown.preview
            self.slide_scan_bar.set_message("Cancelled; the preview stays." if has_preview else "")

    def _show_summary(self, fitted: FitResult) -> None:
        count = int(fitted.decomposition.active.sum())
        parts = [count_of(count, "stain") if count else "No stain found"]
        parts += [describe_fit(fitted)] if describe_fit(fitted) else []
        parts += ["converging …"] if fitted.is_rough else []
        self.bar.set_message(", ".join(parts))

    @property
    def layers(self) -> DensityLayers | None:
        """The density layers of the chosen image."""
        return self._layers.get(self.images.layer) if self.images.layer is not None else None

    # --- names and presets ------------------------------------------------------------------------

    def _with_names(self, layer: Image, fitted: FitResult) -> FitResult:
        """The fit with the names that its stains were given before, in this or an earlier run."""
        d = fitted.decomposition
        if layer not in self._named:
            path = layer_path(layer)
            saved = stain_library(self.viewer).names_of(str(path)) if path is not None else []
            self._named[layer] = saved
        if any(d.names):  # those of a preset
            return fitted
        names = match_names(self._named[layer], d.spectra, d.active)
        d = d.with_names(names if any(names) else ())
        if not fitted.is_rough:
            found = {one.name for one in d.named_stains}
            others = [one for one in self._named[layer] if one.name not in found]
            self._named[layer] = [*others, *d.named_stains]
        return replace(fitted, decomposition=d)

    def name_stain(self, component: int, name: str) -> None:
        """Give a stain of the chosen image a name, "" for none; saved for the next time."""
        fitted, layer = self.fitted, self.images.layer
        if fitted is None or layer is None or component >= len(fitted.decomposition.active):
            return
        before = fitted.decomposition
        d = before.with_names({component: name})
        self._fits[layer] = replace(fitted, decomposition=d)
        forgotten = {before.names[component] if before.names else "", name}
        named = [one for one in self._named.get(layer, []) if one.name not in forgotten]
        found = {one.name for one in d.named_stains}
        named = [one for one in named if one.name not in found] + d.named_stains
        self._named[layer] = named
        if self.layers is not None:
            self.layers.rename(d)
        self.result_panel.show_result(d, self._own_names)
        get_session(self.viewer).decompositions[layer] = d
        path = layer_path(layer)
        if path is not None:
            library, key = stain_library(self.viewer), str(path)
            self.files.start(lambda report: library.set_names(key, named))

    def edit_presets(self) -> None:
        """Open the dialog of presets."""
        fit = None if self.fitted is None else self.fitted.decomposition
        self.preset_editor.open_for(self.images.layer, fit, self.form.start.label)

    def _presets_changed(self, name: str) -> None:
        self._own_names = named_spectra(self.viewer)
        self.form.start.refresh_presets(name)

    # --- display ----------------------------------------------------------------------------------

    def _set_blending(self, blending: Blending) -> None:
        if self.layers is not None:
            self.layers.set_blending(blending)

    def _show_only(self, component: int) -> None:
        if self.layers is not None:
            self.layers.show_only(component)
        self._mark_visible()  # the click has toggled the button in any case

    def _mark_visible(self) -> None:
        self.result_panel.mark_visible(
            self.layers.visible_components if self.layers is not None else set()
        )

    # --- export -----------------------------------------------------------------------------------

    def _choose_save_path(self) -> None:
        name = self.images.layer.name if self.images.layer is not None else "stains"
        name = f"{name}.spectra.json"
        path, _ = QFileDialog.getSaveFileName(self, "Save spectra", name, "Spectra (*.json)")
        if path:
            self.save_spectra(path)

    def _choose_spectra_file(self) -> None:
        path, _ = QFileDialog.getOpenFileName(self, "Load spectra", "", "Spectra (*.json)")
        if path:
            self.form.start.use_file(path)

    def save_spectra(self, path: str) -> None:
        """Write background, spectra and settings to a file, off the GUI thread."""
        fitted, layer = self.fitted, self.images.layer
        if fitted is None or layer is None:
            return
        path = path if Path(path).suffix else f"{path}.json"
        size, name, d = pixel_size(layer), layer.name, fitted.decomposition
        self.files.start(
            lambda report: write_spectra(path, d, size, name),
            lambda _: self.file_bar.set_message(f"Saved {Path(path).name}."),
        )

    def copy_snippet(self) -> None:
        """Copy Python code that reproduces the layers to the clipboard."""
        if self.fitted is not None and self.images.layer is not None:
            copy_text(self.snippet)
            self.file_bar.set_message("Copied: paste it into napari's console or a script.")

    @property
    def snippet(self) -> str:
        """Python code that reproduces the layers."""
        assert self.fitted is not None
        assert self.images.layer is not None
        layers = self.layers.layers if self.layers is not None else {}
        return code_snippet(self.fitted, self.images.layer.name, self.form.blending, layers)

    @property
    def study_layer(self) -> Image | None:
        """The image whose folder is suggested for “Run on folder”."""
        return self.images.layer

    def study_settings(self) -> dict[str, Any]:
        """The present settings by the names of `StudySettings`."""
        return self.form.study_settings()

    def on_closed(self) -> None:
        """Layers stay, but are no longer updated."""
        for layers in self._layers.values():
            layers.close()
        self._layers.clear()


@dataclass(eq=False)
class _ImageFits:
    """What was requested for one image, and the fitter that has its colours.

    `scanned`: what of a slide was scanned, or is being, or was cancelled by the user.
    """

    fitter: StainFitter = field(default_factory=StainFitter)
    pending: FitRequest | None = None
    last: FitRequest | None = None
    scanned: FitTarget | None = None


class LiveFit(QObject):
    """Fits the last request of each image, one image after the other.

    While a rough fit runs, which is short, a newer request of its image waits for it; anything
    longer is superseded. A stale result is shown only if nothing was shown for a while, so that the
    layers follow a slider that is moved for long. A request of another image always waits, so that
    a fit is finished also if the user chooses another image meanwhile.

    A slide is shown as a preview first. Then `slide_scan` counts the colours of the whole slide,
    while sliders act on the preview; the result is fitted with the settings of that moment.

    `fitting` and `scanning` are the images that `task` and `slide_scan` work on, or did last.
    """

    def __init__(self, task: Task, slide_scan: Task, show: ShowFit, parent: QObject) -> None:
        super().__init__(parent)
        self.task, self.slide_scan, self._show = task, slide_scan, show
        self.fitting: Image | None = None
        self.scanning: Image | None = None
        self._current: Image | None = None
        self._images: dict[Image, _ImageFits] = {}
        self._waiting: list[Image] = []  # images with a pending request, in their order
        self._waiting_scans: list[tuple[Image, FitTarget, ScanSlide]] = []
        self._running_rough_fit = False
        self._shown_at = 0.0
        self._throttle = QSignalThrottler(QSignalThrottler.EmissionPolicy.Trailing, self)
        self._throttle.setTimeout(_THROTTLE_MS)
        self._throttle.triggered.connect(self._start_pending)
        task.ended.connect(self._fit_ended)
        slide_scan.ended.connect(self._start_scan)

    @property
    def idle(self) -> bool:
        """Whether nothing runs or waits, for any image."""
        busy = self.task.running or self.slide_scan.running
        return not (busy or self._waiting or self._waiting_scans)

    def works_on(self, image: Image) -> bool:
        """Whether something runs or waits for this image."""
        return (
            image in self._waiting
            or (self.task.running and self.fitting is image)
            or (self.slide_scan.running and self.scanning is image)
            or any(image is other for other, _, _ in self._waiting_scans)
        )

    def fitter(self, image: Image) -> StainFitter:
        """What fits this image."""
        return self._images.setdefault(image, _ImageFits()).fitter

    def set_current(self, image: Image | None) -> None:
        """The image that is chosen: the colours of others are not kept longer than needed."""
        self._current = image
        self._release_pixels()

    def request(
        self, image: Image, target: FitTarget, settings: DecomposeSettings, rescan: bool = False
    ) -> None:
        """Fit this soon, and nothing that was requested earlier for this image.

        `rescan`: scan a slide again whose scan the user has cancelled.
        """
        fits = self._images.setdefault(image, _ImageFits())
        fits.pending = fits.last = target, settings
        if image not in self._waiting:
            self._waiting.append(image)
        cancelled = rescan and not self._is_scanned(image)
        if cancelled or not target.reads_same_pixels_as(fits.scanned):
            self._drop_scan(image)
        self._throttle.throttle()

    def clear_cache(self, image: Image) -> None:
        """The pixels of an image have changed."""
        self._drop_scan(image)
        self.fitter(image).clear_cache()

    def forget_removed(self, layers: Container[Any]) -> None:
        """Drop all that was requested for images that are no longer among these layers."""
        for image in [image for image in self._images if image not in layers]:
            self._drop_scan(image)
            if image in self._waiting:
                self._waiting.remove(image)
            if self.task.running and self.fitting is image:
                self.task.cancel()
            del self._images[image]

    def _is_scanned(self, image: Image) -> bool:
        """Whether the slide is being scanned, or waits for it."""
        runs = self.slide_scan.running and self.scanning is image
        return runs or any(image is other for other, _, _ in self._waiting_scans)

    def _drop_scan(self, image: Image) -> None:
        if image in self._images:
            self._images[image].scanned = None
        self._waiting_scans = [one for one in self._waiting_scans if one[0] is not image]
        if self.slide_scan.running and self.scanning is image:
            self.slide_scan.cancel()

    def _release_pixels(self) -> None:
        """Drop the colours of images that are neither chosen nor worked on."""
        for image, fits in self._images.items():
            if image is not self._current and not self.works_on(image):
                fits.fitter.release_pixels()

    # --- fits ---

    def _start_pending(self) -> None:
        if not self._waiting:
            return
        image = self._waiting[0]
        if self.task.running:
            if self._running_rough_fit or self.fitting not in self._waiting:
                return
            image = self.fitting
        self._waiting.remove(image)
        fits = self._images[image]
        request, fits.pending = fits.pending, None
        if request is not None:
            self._start(image, request, rough=True)

    def _start(self, image: Image, request: FitRequest, rough: bool) -> None:
        target, settings = request
        fitter = self.fitter(image)
        short = settings.iterations != "converge" or rough_settings(settings) is not None
        self.fitting, self._running_rough_fit = image, rough and short

        def work(report: Report) -> tuple[FitResult, list[LayerData]]:
            fitted = fitter.fit(target, settings, report, rough)
            return fitted, density_data(fitted)

        self.task.start(work, lambda result: self._done(image, *result))

    def _done(self, image: Image, fitted: FitResult, data: list[LayerData]) -> None:
        now, is_last = time.monotonic(), image not in self._waiting
        if is_last or now - self._shown_at > _MAX_REDRAW_INTERVAL_S:
            self._show(image, fitted, data)
            self._shown_at = time.monotonic()
        self._request_scan(image, fitted)
        if not is_last:
            self._start_pending()
        elif fitted.is_rough:
            self._start(image, (fitted.target, fitted.settings), rough=False)

    def _fit_ended(self, outcome: TaskOutcome) -> None:
        """Continue with what waits; what was cancelled is not tried again."""
        if outcome is TaskOutcome.CANCELLED and self.fitting in self._waiting:
            self._waiting.remove(self.fitting)
        if not self.task.running:
            self._release_pixels()
            self._throttle.throttle()  # when all have heard of this end

    # --- the whole of a slide ---

    def _request_scan(self, image: Image, fitted: FitResult) -> None:
        """Scan the whole slide of a preview, once."""
        fits, target = self._images[image], fitted.target
        work = fits.fitter.slide_scan(fitted)
        if work is None or fits.scanned is not None or fits.last is None:
            return
        if target.reads_same_pixels_as(fits.last[0]):
            fits.scanned = target
            self._waiting_scans.append((image, target, work))
            self._start_scan()

    def _start_scan(self, outcome: TaskOutcome | None = None) -> None:
        if self._waiting_scans and not self.slide_scan.running:
            image, target, work = self._waiting_scans.pop(0)
            self.scanning = image
            self.slide_scan.start(work, lambda colours: self._slide_scanned(image, target, colours))

    def _slide_scanned(self, image: Image, target: FitTarget, colours: SlideColours) -> None:
        fits = self._images[image]
        fits.fitter.set_slide_colours(target, colours)
        if fits.last is not None and target.reads_same_pixels_as(fits.last[0]):
            self.request(image, *fits.last)
