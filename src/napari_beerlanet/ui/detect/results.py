"""Detection results of the chosen image: its detection layer and its counts per class."""

from __future__ import annotations

import html
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image
from psygnal import SignalInstance
from qtpy.QtCore import QObject, Qt
from qtpy.QtWidgets import QPushButton, QVBoxLayout, QWidget
from superqt.utils import QSignalDebouncer

from napari_beerlanet.core.boxes.classes import ClassCounts, is_infected
from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.boxes.geometry import centre_inside
from napari_beerlanet.ui.common.controls import button, copy_text, heading, row
from napari_beerlanet.ui.common.panel import Panel, ThemedLabel
from napari_beerlanet.ui.common.session import Session
from napari_beerlanet.ui.detect.form import AREA_NAMES
from napari_beerlanet.ui.detect.job import DetectResult
from napari_beerlanet.ui.detections.detection_layer import DetectionLayer
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.detections.type_counts import TypeCountsView, count_boxes
from napari_beerlanet.ui.viewer.layers import covering_images
from napari_beerlanet.ui.viewer.planes import PlaneIndex

if TYPE_CHECKING:
    from napari import Viewer

    from napari_beerlanet.ui.stains.density_layers import DensityLayers
    from napari_beerlanet.ui.stains.fitting import FitResult, LayerData

_WARNING_SIGN = "⚠"
_COUNT_DEBOUNCE_MS = 30


class DetectionResults(QObject):
    """Shows results in layers and updates the counts with the threshold, edits and planes."""

    def __init__(self, panel: Panel, session: Session, counts: CountsPanel) -> None:
        super().__init__(panel)
        self._viewer, self._session, self._counts = panel.viewer, session, counts
        self.source: Image | None = None
        self.detection_layer: DetectionLayer | None = None
        self._stain_layers: dict[Image, DensityLayers] = {}
        self._debounce = QSignalDebouncer(parent=self)
        self._debounce.setTimeout(_COUNT_DEBOUNCE_MS)
        self._debounce.triggered.connect(self.count)
        self._panel, self._followed = panel, set[Image]()
        panel.connect_event(self._viewer.dims.events.point, self._count_later)
        layers = self._viewer.layers.events
        for emitter in (layers.inserted, layers.removed, layers.reordered):
            panel.connect_event(emitter, self._check_cover)
        counts.undo_run.clicked.connect(lambda *_: self.undo())
        counts.covered.linkActivated.connect(self._uncover)

    def choose(self, source: Image | None) -> None:
        """Another image was chosen: show its counts, if it has any."""
        if source is self.source and (self.detection_layer is None or self.detection_layer.alive):
            return
        self.source = source
        self._connect_layer(detection_layer_of(self._viewer, source) if source else None)
        self.count()

    def show(self, source: Image, result: DetectResult, confidence: float, labels: bool) -> None:
        """Show a result: in the image's own layer, or in a new one if that would lose something."""
        index, detections = result.job.plane.index, result.detections
        colours = result.model.info.get("colours")
        layer = place_run(self._viewer, source, detections, colours, index, confidence, labels)
        if result.stains is not None:
            self._show_stains(source, *result.stains)
        self._session.set_detections(source, detections, layer)
        layer.set_labels_visible(labels)
        if self.source is source:
            self._connect_layer(layer)
            self.count()

    def unedited_detections(self, source: Image, index: PlaneIndex) -> Detections | None:
        """The detections of a plane, None where there are none or the user has edited boxes."""
        layer = detection_layer_of(self._viewer, source)
        if layer is None or layer.edited or index not in layer.stores:
            return None
        return layer.stores[index].detections

    def undo(self) -> None:
        """Bring back the boxes of the run before, or those of the run that was undone."""
        if self.detection_layer is not None:
            self.detection_layer.undo_run()
            self.count()

    def boxes_added(self, source: Image, layer: DetectionLayer) -> None:
        """A slide search has added boxes to the layer."""
        self._session.detection_layers[source] = layer
        if self.source is source:
            self._connect_layer(layer)
            self._count_later()

    def finalise(self, source: Image, result: DetectResult, layer: DetectionLayer | None) -> None:
        """A slide search is finished; its layer, if it still exists, has all boxes."""
        if result.stains is not None:
            self._show_stains(source, *result.stains)
        if layer is not None and layer.alive:
            self._session.set_detections(source, result.detections, layer)
            if self.source is source:
                self._connect_layer(layer)
                self.count()

    def keep_partial(self, layer: DetectionLayer | None) -> None:
        """A slide search was stopped: the boxes in its layer are its result so far."""
        detections = layer.detections if layer is not None and layer.alive else None
        for source in [s for s, other in self._session.detection_layers.items() if other is layer]:
            if detections is not None:
                self._session.set_detections(source, detections, layer)
        self.count()

    def _show_stains(self, source: Image, fitted: FitResult, data: list[LayerData]) -> None:
        """Add the stain layers, hidden: they would cover the image with the boxes."""
        from napari_beerlanet.ui.stains.density_layers import DensityLayers

        if source not in self._stain_layers:
            hidden: set[int] = set()

            def hide_new() -> None:
                for i, layer in self._stain_layers[source].layers.items():
                    if i not in hidden:
                        hidden.add(i)
                        layer.visible = False

            self._stain_layers[source] = DensityLayers(
                self._viewer, source, self, visible_changed=hide_new
            )
        self._stain_layers[source].show(fitted, data, restore=True)

    def set_confidence(self, confidence: float) -> None:
        """Filter the boxes and update the counts."""
        if self.detection_layer is not None:
            self.detection_layer.set_filter(confidence)
            self.count()

    def set_labels(self, visible: bool) -> None:
        """Show or hide the labels of boxes."""
        if self.detection_layer is not None:
            self.detection_layer.set_labels_visible(visible)

    def close(self) -> None:
        """Disconnect from the layer, which stays."""
        self._connect_layer(None)
        self._debounce.cancel()
        for stains in self._stain_layers.values():
            stains.close()
        self._stain_layers.clear()

    def count(self) -> None:
        """Count the boxes of the displayed plane that pass the threshold."""
        self._check_cover()
        layer = self.detection_layer
        passing = layer.filtered() if layer is not None and layer.alive else None
        if layer is None or passing is None or self.source is None:
            self._counts.clear()
            return
        store, mask = passing
        report = layer.report
        facts = {
            "image": self.source.name,
            "model": str(report.get("model", "")),
            "confidence": f"{layer.confidence:.2f}",
        }
        self._counts.show_limits(report.get("limits", ""), bool(store.type_names))
        self._counts.show_warnings(report.get("warnings", []))
        searched, searched_text = report.get("searched"), ""
        if searched:
            facts["searched"] = AREA_NAMES[searched["area"]].lower()
            searched_text = _searched_text(searched, store.xyxy[mask])
        self._counts.show_run(searched_text, layer.can_undo, layer.undone)
        counts = count_boxes(layer, facts)
        if counts is not None:
            self._counts.show_counts(counts, layer.colours)
            self._counts.types.show_layer(counts, layer)

    # --- images over the one that was searched ---

    def _check_cover(self, event: Any = None) -> None:
        """Say which images of the user's hide the one that the boxes are of; they stay there."""
        alive = self.detection_layer is not None and self.detection_layer.alive
        source = self.source if alive else None
        layers = self._viewer.layers if source is not None else []
        self._follow_images({layer for layer in layers if isinstance(layer, Image)})
        covering = covering_images(self._viewer, source) if source is not None else []
        self._counts.show_cover(source.name if source else "", [one.name for one in covering])

    def _follow_images(self, images: set[Image]) -> None:
        followed, self._followed = self._followed, images
        for some, connect in (
            (followed - images, self._panel.disconnect_event),
            (images - followed, self._panel.connect_event),
        ):
            for image in some:
                for emitter in (image.events.visible, image.events.opacity, image.events.name):
                    connect(emitter, self._check_cover)

    def _uncover(self, link: str) -> None:
        covering = covering_images(self._viewer, self.source) if self.source is not None else []
        for image in covering:
            image.visible = False

    def _connect_layer(self, layer: DetectionLayer | None) -> None:
        old, self.detection_layer = self.detection_layer, layer
        if old is layer:
            return
        for signal, method in self._connections(old):
            signal.disconnect(method, missing_ok=True)
        for signal, method in self._connections(layer):
            signal.connect(method)

    def _connections(
        self, layer: DetectionLayer | None
    ) -> list[tuple[SignalInstance, Callable[..., None]]]:
        if layer is None:
            return []
        return [
            (layer.message_changed, self._counts.set_message),
            (layer.changed, self._count_later),
            (layer.removed, self._count_later),
        ]

    def _count_later(self, event: Any = None) -> None:
        self._debounce.throttle()


def place_run(
    viewer: Viewer,
    source: Image,
    detections: Detections,
    colours: Sequence[str] | None,
    index: PlaneIndex,
    confidence: float,
    labels: bool,
) -> DetectionLayer:
    """The layer that shows a run's detections on a plane.

    It is the image's own, whose boxes of the run before can be brought back, unless the user has
    edited it, or only a part of the image was searched with another model than before: then both
    layers stay, and their names say which is which.
    """
    layer = detection_layer_of(viewer, source)
    searched = detections.report.get("searched")
    if layer is not None:
        partial = searched is not None and not searched["kept"]
        there = layer.stores.get(index)
        edited = layer.edited
        if not edited and not (partial and there is not None and len(there)):
            layer.set_colours(colours, detections.names)
            layer.set_detections(detections, index, confidence)
            layer.reveal()
            return layer
        model = str(layer.report.get("model") or "earlier run")
        layer.set_tag("edited" if edited else model)
        same = model == detections.report.get("model")
        tags = ["new run" if same else str(detections.report.get("model") or "new run")]
    else:
        tags = []
    if tags and searched is not None:
        tags.append(AREA_NAMES[searched["area"]].lower())
    return DetectionLayer(
        viewer, source, detections, colours, index, confidence, labels, tag=", ".join(tags)
    )


def _searched_text(searched: Mapping[str, Any], xyxy: npt.NDArray[Any]) -> str:
    """Which of the counted boxes (n, 4) are of the last search, which was of a part only."""
    area = AREA_NAMES[searched["area"]]
    if not searched["kept"]:
        return f"{area} only; the rest of the image was not searched."
    inside = int(centre_inside(xyxy, np.array(searched["windows"])).sum())
    return f"{area}: {inside:,} from this run. Elsewhere: {len(xyxy) - inside:,} from earlier runs."


class CountsPanel(QWidget):
    """The counts of one image.

    Beside counts of a model that does not know parasites, `count_malaria` is offered, if set: a
    call that finds infected cells with models that know them.
    """

    def __init__(self) -> None:
        super().__init__()
        self.count_malaria: Callable[[], None] | None = None
        self.class_counts: ClassCounts | None = None
        self.warnings = _label("Why these counts may be unreliable.")
        self.table = _label("Boxes of each class above the confidence threshold.")
        self.parasitaemia = _label(
            "Infected red cells as a percentage of all red cells, with the 95 % confidence "
            "interval of a count of this size (Wilson)."
        )
        self.note = _label("How the boxes were found, and how many of them are drawn.")
        self.note.set_kind("hint")
        self.warnings.set_kind("warning")
        self.copy = button(
            "Copy table", "Copy the counts as a table for a spreadsheet.", self.copy_table
        )
        self.copy_summary_button = button(
            "Copy summary", "Copy the counts as one sentence.", self.copy_summary
        )
        self.limits = _label("What this model was not trained on; its counts mislead there.")
        self.limits.setTextInteractionFlags(
            Qt.TextInteractionFlag.TextSelectableByMouse
            | Qt.TextInteractionFlag.LinksAccessibleByMouse
        )
        self.limits.linkActivated.connect(self._take_offer)
        self.covered = _label("The boxes are drawn over an image that they do not belong to.")
        self.covered.setTextInteractionFlags(Qt.TextInteractionFlag.LinksAccessibleByMouse)
        self.covered.set_kind("warning")
        self.types = TypeCountsView()
        self.searched = _label("Which part of the image the last run has searched.")
        self.undo_run = QPushButton()
        layout = QVBoxLayout(self)
        layout.setContentsMargins(0, 0, 0, 0)
        layout.setSpacing(4)
        layout.addWidget(row(heading("Counts"), self.undo_run, stretch=0))
        for widget in (
            self.limits,
            self.warnings,
            self.covered,
            self.searched,
            self.table,
            self.parasitaemia,
            self.types,
            self.note,
        ):
            layout.addWidget(widget)
        layout.addWidget(row(self.copy, self.copy_summary_button))
        self.show_run("", False, False)
        self.show_cover("", [])
        self.set_message("")
        self.clear()

    def clear(self) -> None:
        """There is no result."""
        self.class_counts = None
        self.hide()

    def show_counts(self, class_counts: ClassCounts, colours: Sequence[str]) -> None:
        """Show the counts, each class in its colour."""
        self.class_counts = class_counts
        padded = [*colours, *["#808080"] * len(class_counts.counts)]
        rows = "".join(
            f"<tr><td><span style='color:{colour}'>■</span>&nbsp;{html.escape(name)}</td>"
            f"<td align='right'><b>{n:,}</b></td></tr>"
            for (name, n), colour in zip(class_counts.counts.items(), padded, strict=False)
        )
        total = f"<tr><td>All</td><td align='right'>{class_counts.total:,}</td></tr>"
        self.table.setText(f"<table width='100%'>{rows}{total}</table>")
        # That of types stands below them.
        value = class_counts.parasitaemia if not class_counts.types else None
        self.parasitaemia.setVisible(value is not None)
        if value is not None:
            self.parasitaemia.setText(
                f"Parasitaemia <b>{value}</b><br>{value.infected:,} of {value.cells:,} red cells"
            )
        self.show()

    def show_run(self, searched: str, can_undo: bool, undone: bool) -> None:
        """Show what the last run has searched, and offer to undo or redo it."""
        self.searched.setText(html.escape(searched))
        self.searched.setVisible(bool(searched))
        self.undo_run.setVisible(can_undo)
        self.undo_run.setText("Redo run" if undone else "Undo run")
        self.undo_run.setToolTip(
            "Show the boxes of the last run again."
            if undone
            else "Bring back the boxes of the run before (Ctrl+Z while their layer is selected)."
        )

    def show_limits(self, text: str, typed: bool = False) -> None:
        """Show what the model does not know; nothing for "".

        If that is parasites, and boxes are not `typed` yet, offer to count infected cells.
        """
        offer = ""
        if self.count_malaria is not None and is_infected(text) and not typed:
            offer = f' <a href="malaria" style="color: {self.limits.text_colour()}">'
            offer += "Count infected cells (malaria)</a>"
        self.limits.setText(f"<i>{html.escape(text)}</i>{offer}" if text else "")
        self.limits.setVisible(bool(text))

    def _take_offer(self, link: str) -> None:
        if self.count_malaria is not None:
            self.count_malaria()

    def show_warnings(self, sentences: Sequence[str]) -> None:
        """Show why the counts may be wrong; nothing for []."""
        self.warnings.setVisible(bool(sentences))
        lines = "<br>".join(f"{_WARNING_SIGN} {html.escape(text)}" for text in sentences)
        self.warnings.setText(lines)

    def show_cover(self, image: str, covering: Sequence[str]) -> None:
        """Say that images lie above the one that was searched, and offer to hide them."""
        names = html.escape(", ".join(f"“{name}”" for name in covering))
        verb, them = ("lies", "it") if len(covering) == 1 else ("lie", "them")
        colour = self.covered.text_colour()
        self.covered.setText(
            f"{names} {verb} above “{html.escape(image)}”, which the boxes belong to. "
            f'<a href="hide" style="color: {colour}">Hide {them}</a>'
        )
        self.covered.setVisible(bool(covering))

    def set_message(self, text: str) -> None:
        """Show a small line below the counts."""
        self.note.setText(html.escape(text))
        self.note.setVisible(bool(text))

    def copy_table(self) -> None:
        """Copy the counts to the clipboard as a table."""
        if self.class_counts is not None:
            copy_text(self.class_counts.tsv())

    def copy_summary(self) -> None:
        """Copy the counts to the clipboard as a sentence."""
        if self.class_counts is not None:
            copy_text(self.class_counts.text())


def _label(tooltip: str) -> ThemedLabel:
    label = ThemedLabel()
    label.setTextFormat(Qt.TextFormat.RichText)
    label.setToolTip(tooltip)
    label.setTextInteractionFlags(Qt.TextInteractionFlag.TextSelectableByMouse)
    return label
