"""What was found in the chosen image: its layer of boxes and its counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from napari.layers import Image
from qtpy.QtCore import QObject, QTimer

from napari_beerlanet.core.counting import Tally
from napari_beerlanet.ui.counts_panel import CountsPanel
from napari_beerlanet.ui.detect_work import Result
from napari_beerlanet.ui.detection_layer import DetectionLayer

if TYPE_CHECKING:  # they are slow to import, and there when a result is
    from napari_beerlanet.ui.density_arrays import Data
    from napari_beerlanet.ui.density_layers import DensityLayers
    from napari_beerlanet.ui.fitting import Fitted

_SOON = 30  # milliseconds


class ResultPart(QObject):
    """Puts results into layers and keeps counts up to date with filter, edits and planes."""

    def __init__(self, panel: Any, session: Any, counts: CountsPanel) -> None:
        super().__init__(panel)
        self._viewer, self._session, self._counts = panel.viewer, session, counts
        self.source: Image | None = None
        self.shower: DetectionLayer | None = None
        self._stains: dict[Image, DensityLayers] = {}
        self._soon = QTimer(self)
        self._soon.setSingleShot(True)
        self._soon.setInterval(_SOON)
        self._soon.timeout.connect(self.count)
        panel.listen(self._viewer.dims.events.point, self._later)

    def follow(self, source: Image | None) -> None:
        """Another image was chosen: show its counts, if it has any."""
        if source is self.source and (self.shower is None or self.shower.alive):
            return
        self.source = source
        self._hear(self._session.shown.get(source) if source is not None else None)
        self.count()

    def put(self, source: Image, result: Result, confidence: float, labels: bool) -> None:
        """Show a result: in the image's own layer, or in a new one if that was edited."""
        index, found = result.order.plane.index, result.detections
        colours = result.model.info.get("colours")
        shower = self._session.shown.get(source)
        if shower is not None and shower.alive and not shower.edited:
            shower.take_colours(colours, found.names)
            shower.put(found, index, confidence)
        else:
            shower = DetectionLayer(self._viewer, source, found, colours, index, confidence, labels)
        if result.stains is not None:
            self._put_stains(source, *result.stains)
        self._session.put_result(source, found, shower)
        self.source = source
        self._hear(shower)
        shower.set_text(labels)
        self.count()

    def growing(self, source: Image, shower: DetectionLayer) -> None:
        """Boxes of a slide came into its layer."""
        self._session.shown[source] = shower
        if self.source is source:
            self._hear(shower)
            self._later()

    def settle(self, source: Image, result: Result, shower: DetectionLayer | None) -> None:
        """A slide's search is done; its layer, if it is still there, has all boxes."""
        if result.stains is not None:
            self._put_stains(source, *result.stains)
        if shower is not None and shower.alive:
            self._session.put_result(source, result.detections, shower)
            if self.source is source:
                self._hear(shower)
                self.count()

    def keep(self, shower: DetectionLayer | None) -> None:
        """A slide's search was stopped: what is in its layer is its result so far."""
        found = shower.found if shower is not None and shower.alive else None
        for source in [s for s, made in self._session.shown.items() if made is shower]:
            if found is not None:
                self._session.put_result(source, found, shower)
        self.count()

    def _put_stains(self, source: Image, fitted: Fitted, data: list[Data]) -> None:
        """Add the stains' layers, hidden: they would lie over the image that has the boxes."""
        from napari_beerlanet.ui.density_layers import DensityLayers

        if source not in self._stains:
            known: set[int] = set()

            def hide_new() -> None:
                for i, layer in self._stains[source].layers.items():
                    if i not in known:
                        known.add(i)
                        layer.visible = False

            self._stains[source] = DensityLayers(self._viewer, source, self, seen=hide_new)
        self._stains[source].show(fitted, data, anew=True)

    def show(self, confidence: float) -> None:
        """Filter what is shown, and count again."""
        if self.shower is not None:
            self.shower.show(confidence)
            self.count()

    def set_labels(self, shown: bool) -> None:
        """Label boxes or not."""
        if self.shower is not None:
            self.shower.set_text(shown)

    def close(self) -> None:
        """Hear nothing more of the layer, which stays."""
        self._hear(None)
        self._soon.stop()
        for stains in self._stains.values():
            stains.close()
        self._stains.clear()

    def count(self) -> None:
        """Count what is chosen in the plane that is shown."""
        shower = self.shower
        passing = shower.passing() if shower is not None and shower.alive else None
        if shower is None or passing is None or self.source is None:
            self._counts.clear()
            return
        store, mask = passing
        numbers = np.bincount(store.labels[mask], minlength=len(store.names))
        counts = dict(zip(store.names, numbers.tolist(), strict=True))
        report = shower.report
        facts = {
            "image": self.source.name,
            "model": str(report.get("model", "")),
            "confidence": f"{shower.confidence:.2f}",
        }
        self._counts.warn(report.get("warnings", []))
        self._counts.show_tally(Tally(counts, facts), shower.colours)

    def _hear(self, shower: DetectionLayer | None) -> None:
        old, self.shower = self.shower, shower
        if old is shower:
            return
        for which, connect in ((old, False), (shower, True)):
            if which is None:
                continue
            pairs = [
                (which.told, self._counts.say),
                (which.changed, self._later),
                (which.gone, self._later),
            ]
            for signal, method in pairs:
                if connect:
                    signal.connect(method)
                else:
                    signal.disconnect(method, missing_ok=True)

    def _later(self, event: Any = None) -> None:
        self._soon.start()
