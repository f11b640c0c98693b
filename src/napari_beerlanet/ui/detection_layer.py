"""One Shapes layer that shows what was found in an image, and keeps what the user changes there.

All boxes live in `BoxStore`s, one for each plane of a stack. The layer shows those of the current
plane that pass the threshold: all of them while there are few, otherwise those in view, the surest
first. Where very many are in view, they fade into a picture of their density (`detection_heat`).
Edges are equally thin at any zoom. Labels appear when few boxes are in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Image
from psygnal import Signal
from qtpy.QtCore import QTimer

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.ui.detection_drawing import Drawing
from napari_beerlanet.ui.detection_hand import UserHand
from napari_beerlanet.ui.detection_heat import FROM
from napari_beerlanet.ui.detection_look import Look
from napari_beerlanet.ui.detection_planes import Index, Planes
from napari_beerlanet.ui.detection_readback import ReadBack
from napari_beerlanet.ui.detection_shown import make_layer
from napari_beerlanet.ui.detection_store import BoxStore, Chosen, Rows
from napari_beerlanet.ui.gl_guard import guard_software_opengl

_PAUSE = 60  # milliseconds between changes of what is shown, while the view moves

_living: set[DetectionLayer] = set()  # napari holds listeners weakly; they live with their layers


class DetectionLayer:
    """Detections of an image layer, shown in one Shapes layer of the same place in the world.

    `told` says in a few words how many are shown; `changed` that the user changed something;
    `gone` that the user deleted the layer, after which every method does nothing; `selected` the
    place in `found` of a box that the user selected.

    Where boxes come one part after the other, as from the tiles of a slide::

        shown = DetectionLayer(viewer, source, Detections.empty(names), colours, index, confidence)
        shown.extend(part)                    # as often as parts come; a few milliseconds each
        shown.extend(part, doubles)           # … and boxes of earlier parts are no more
        shown.settle(everything)              # in the end, if the whole is known better

    What the user does meanwhile, to boxes that are there already, stays.
    """

    told = Signal(str)
    changed = Signal()
    gone = Signal()
    selected = Signal(int)

    def __init__(
        self,
        viewer: Any,
        source: Image,
        detections: Detections,
        colours: Sequence[str] | None = None,
        index: Index = (),
        confidence: float = 0.25,
        text: bool = False,
    ) -> None:
        self.viewer = viewer
        guard_software_opengl(viewer)
        self.layer = make_layer(viewer, source)
        look = Look(colours, detections.names)
        self._drawing = Drawing(viewer, source, self.layer, look, again=self._draw)
        self._drawing.text = text
        self._shown = self._drawing.shown
        self._planes = Planes(viewer, self.layer, confidence)
        self._hand = UserHand(self._shown, self.changed.emit, self._picked)
        self._timer = QTimer()
        self._timer.setSingleShot(True)
        self._timer.setInterval(_PAUSE)
        self._timer.timeout.connect(self._follow)
        self._listen(True)
        _living.add(self)
        self.put(detections, index)
        QTimer.singleShot(0, self._appear)  # napari takes long for either; so they are two turns

    def _appear(self) -> None:
        if self.alive:
            self.layer.visible = True

    @property
    def alive(self) -> bool:
        """Whether the layer still is in the viewer."""
        return self.layer in self.viewer.layers

    @property
    def stores(self) -> dict[Index, BoxStore]:
        """The boxes of each plane."""
        return self._planes.stores

    @property
    def store(self) -> BoxStore | None:
        """The boxes of the plane that is shown, None where nothing was run."""
        choice = self._planes.current
        return None if choice is None else choice.store

    @property
    def rows(self) -> Rows:
        """(m,) the rows of `store` that are in the layer, in its order."""
        return self._shown.rows

    @property
    def found(self) -> Detections | None:
        """What the model found in the plane that is shown."""
        store = self.store
        return None if store is None else store.found

    @property
    def report(self) -> dict[str, Any]:
        """Facts on how the boxes of the plane that is shown were found."""
        store = self.store
        return {} if store is None else store.report

    @property
    def colours(self) -> list[str]:
        """Of the classes."""
        return list(self._shown.look.colours)

    @property
    def confidence(self) -> float:
        """The last threshold by which boxes were chosen."""
        return self._planes.confidence

    @property
    def edited(self) -> bool:
        """Whether the user moved, added, deleted or renamed anything."""
        self._take_over(anyway=True)
        return self._hand.edited

    def passing(self) -> tuple[BoxStore, npt.NDArray[np.bool_]] | None:
        """The plane's boxes, and which of them are chosen, in view or not."""
        self._take_over()
        choice = self._planes.current
        if choice is None:
            return None
        return choice.store, choice.mask(self._planes.chosen)

    def read_back(self) -> ReadBack:
        """What is chosen in the plane that is shown, with the user's edits."""
        self._take_over(anyway=True)
        return ReadBack.of(self.passing())

    # --- boxes that come --------------------------------------------------------------------------

    def put(
        self, detections: Detections, index: Index = (), confidence: float | None = None
    ) -> None:
        """Make these the boxes of a plane, whatever it had before, and show them."""
        if confidence is not None:
            self._planes.choose(confidence)
        self._planes.put(detections, index)
        self._fill()

    def extend(
        self, detections: Detections, doubles: npt.NDArray[Any] | None = None, index: Index = ()
    ) -> None:
        """Add boxes to those of a plane; the user's edits, selection and view stay.

        `detections`: with all their candidates, those are added. `doubles` (m, 4): boxes of earlier
        calls that turned out to be parts or doubles of others; they go, unless the user had a hand
        in them. They must be the same numbers. The layer follows within a moment: a call costs a
        few milliseconds, however many boxes there are already. On the GUI thread only.
        """
        if not self.alive:
            return
        if not self._shown.busy:
            self._take_over()
        self._planes.extend(detections, doubles, index)
        self._soon()

    def settle(self, detections: Detections, index: Index = ()) -> None:
        """Make these the model's boxes of a plane; what the user did to the earlier ones stays.

        For the end of a run that showed its boxes as they came: `found` is then this.
        """
        if self.alive:
            self._take_over(anyway=True)
            self._planes.settle(detections, index)
            self._fill()

    def _fill(self) -> None:
        """Draw from the beginning: the boxes are others."""
        self._shown.store = None
        store = self.store
        if store is not None and len(store) > FROM:
            self._soon()  # to take so many and to draw them are two turns
        else:
            self._draw()

    def take_colours(self, colours: Sequence[str] | None, names: Sequence[str]) -> None:
        """Use these from the next `put` on; another model has others."""
        self._shown.look = Look(colours, names)

    # --- what is shown ----------------------------------------------------------------------------

    def show(self, chosen: Chosen) -> None:
        """Show boxes of at least this confidence, or of a mask over all candidates."""
        if self.alive:
            self._take_over()
            self._planes.choose(chosen)
            self._draw()

    def set_text(self, shown: bool) -> None:
        """Label boxes with class and confidence, wherever few are in view."""
        if self.alive and shown != self._drawing.text:
            self._take_over()
            self._drawing.text = shown
            self._draw()

    def select(self, place: int) -> None:
        """Select a box of `found`, and have it in the layer, if it passes, wherever it is."""
        store = self.store
        row = store.row_of(place) if store is not None else None
        if not self.alive or row is None:
            return
        if row not in self._shown.rows:
            self._drawing.pinned = row
            self._draw()
        self._shown.select(row)

    def decide(self, status: Any, states: Sequence[str], labels: Any, names: Sequence[str]) -> None:
        """Write a review's decisions on the boxes of `found` into the table.

        `status` (n,) places in `states`, the first of which is for boxes that are not decided on:
        they stay as they were. `labels` (n,) places in `names`.
        """
        store = self.store
        status = np.asarray(status)
        if not self.alive or store is None or not store.fits(status):
            return
        self._take_over()
        store.decide(status, states, np.asarray(labels), names)
        self._hand.edited |= bool(store.reviewed.any())
        self._draw()  # at once: what the layer's table says must not be taken for the user's

    def remove(self) -> None:
        """Take the layer out of the viewer."""
        if self.alive:
            self.viewer.layers.remove(self.layer)

    def _draw(self) -> None:
        """Put what is to be seen into the layer."""
        if self.alive:
            planes = self._planes
            self.told.emit(self._drawing.draw(planes.current, planes.chosen))

    def _listen(self, on: bool) -> None:
        camera, layers = self.viewer.scene.camera.events, self.viewer.layers.events
        heard = [
            (camera.zoom, self._soon),
            (camera.center, self._soon),
            (self.viewer.dims.events.point, self._soon),
            (layers.removed, self._removed),
        ]
        for emitter, method in heard:
            (emitter.connect if on else emitter.disconnect)(method)
        self._hand.listen(on)

    def _soon(self, event: Any = None) -> None:
        if not self._timer.isActive():
            self._timer.start()

    def _follow(self) -> None:
        """The view moved or boxes came: other boxes, other labels, another width of edges."""
        if not self.alive:
            return
        if self._shown.busy:
            self._timer.start()  # the user is drawing
            return
        self._take_over()
        words = self._drawing.follow(self._planes.current, self._planes.chosen)
        if words is not None:
            self.told.emit(words)

    def _take_over(self, anyway: bool = False) -> None:
        if self.alive:
            self._hand.take_over(anyway)

    def _picked(self, row: int) -> None:
        place = self._shown.store.place_of(row) if self._shown.store is not None else None
        if place is not None:
            self.selected.emit(place)

    def _removed(self, event: Any) -> None:
        if event.value is self.layer:
            self._listen(False)
            self._timer.stop()
            self._drawing.close()
            self._planes.close()
            _living.discard(self)
            self.gone.emit()
