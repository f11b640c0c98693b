"""One Shapes layer that shows what was found in an image, and keeps what the user changes there.

All boxes live in `BoxStore`s, one for each plane of a stack. The layer shows those of the current
plane that pass the threshold: all of them while there are few, otherwise those in view, the surest
first. Edges are equally thin at any zoom. Labels appear when few boxes are in view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from napari.layers import Image
from napari.layers.base import ActionType
from psygnal import Signal
from qtpy.QtCore import QTimer

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.ui import detection_shapes
from napari_beerlanet.ui.detection_choice import BoxChoice, InView
from napari_beerlanet.ui.detection_edits import rows_at, settled
from napari_beerlanet.ui.detection_look import Look
from napari_beerlanet.ui.detection_shown import Shown, make_layer, nothing
from napari_beerlanet.ui.detection_store import BoxStore, Chosen, Rows
from napari_beerlanet.ui.detection_view import View, plane_of, view_of
from napari_beerlanet.ui.gl_guard import guard_software_opengl

_FEW = 150  # boxes in view that are labelled
_PAUSE = 60  # milliseconds between changes of what is shown, while the view moves

Index = tuple[int, ...]

_living: set[DetectionLayer] = set()  # napari holds listeners weakly; they live with their layers


class ReadBack(NamedTuple):
    """What a layer stands for, hidden boxes left out: boxes (n, 4) in pixels, labels, table."""

    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    names: list[str]
    features: dict[str, npt.NDArray[Any]]


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
        self._choices: dict[Index, BoxChoice] = {}
        self._chosen: Chosen = confidence
        self._confidence, self._text = confidence, text
        self._edited = self._stirred = False
        self._pinned: int | None = None
        guard_software_opengl(viewer)
        self.layer = make_layer(viewer, source)
        self._shown = Shown(self.layer, Look(colours, detections.names))
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

    # --- what there is ----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the layer still is in the viewer."""
        return self.layer in self.viewer.layers

    @property
    def stores(self) -> dict[Index, BoxStore]:
        """The boxes of each plane."""
        return {index: choice.store for index, choice in self._choices.items()}

    @property
    def _choice(self) -> BoxChoice | None:
        return self._choices.get(plane_of(self.layer, self.viewer))

    @property
    def store(self) -> BoxStore | None:
        """The boxes of the plane that is shown, None where nothing was run."""
        choice = self._choice
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
        return self._confidence

    @property
    def edited(self) -> bool:
        """Whether the user moved, added, deleted or renamed anything."""
        self._take_over(anyway=True)
        return self._edited

    def passing(self) -> tuple[BoxStore, npt.NDArray[np.bool_]] | None:
        """The plane's boxes, and which of them are chosen, in view or not."""
        self._take_over()
        choice = self._choice
        if choice is None:
            return None
        return choice.store, choice.mask(self._chosen_for(choice.store))

    def read_back(self) -> ReadBack:
        """What is chosen in the plane that is shown, with the user's edits."""
        self._take_over(anyway=True)
        found = self.passing()
        if found is None:
            return ReadBack(*nothing(), [], {})
        store, mask = found
        rows = np.flatnonzero(mask)
        return ReadBack(
            store.xyxy[rows], store.labels[rows], list(store.names), store.features(rows)
        )

    # --- boxes that come --------------------------------------------------------------------------

    def put(
        self, detections: Detections, index: Index = (), confidence: float | None = None
    ) -> None:
        """Make these the boxes of a plane, whatever it had before, and show them."""
        if confidence is not None:
            self._chosen = self._confidence = confidence
        self._use(BoxStore(detections), index)

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
        choice = self._choices.get(tuple(index))
        if choice is None:
            self.put(detections, index)
            return
        if not self._shown.busy:
            self._take_over()
        choice.store.extend(detections)
        if doubles is not None and len(doubles):
            (x1, y1), (x2, y2) = doubles[:, :2].min(axis=0) - 1, doubles[:, 2:].max(axis=0) + 1
            near = choice.near((float(x1), float(y1), float(x2), float(y2)))
            choice.store.drop(rows_at(choice.store, near, doubles))
        if choice is self._choice:
            self._soon()

    def settle(self, detections: Detections, index: Index = ()) -> None:
        """Make these the model's boxes of a plane; what the user did to the earlier ones stays.

        For the end of a run that showed its boxes as they came: `found` is then this.
        """
        if self.alive:
            self._take_over(anyway=True)
            old = self._choices.get(tuple(index))
            self._use(settled(None if old is None else old.store, detections), index)

    def _use(self, store: BoxStore, index: Index) -> None:
        old = self._choices.get(tuple(index))
        if old is not None:
            old.close()
        self._choices[tuple(index)] = BoxChoice(store)
        self._shown.store = None
        self._draw()

    def take_colours(self, colours: Sequence[str] | None, names: Sequence[str]) -> None:
        """Use these from the next `put` on; another model has others."""
        self._shown.look = Look(colours, names)

    # --- what is shown ----------------------------------------------------------------------------

    def show(self, chosen: Chosen) -> None:
        """Show boxes of at least this confidence, or of a mask over all candidates."""
        if self.alive:
            self._take_over()
            self._chosen = chosen
            if np.ndim(chosen) == 0:
                self._confidence = float(chosen)
            self._draw()

    def set_text(self, shown: bool) -> None:
        """Label boxes with class and confidence, wherever few are in view."""
        if self.alive and shown != self._text:
            self._take_over()
            self._text = shown
            self._draw()

    def select(self, place: int) -> None:
        """Select a box of `found`, and have it in the layer, if it passes, wherever it is."""
        store = self.store
        row = store.row_of(place) if store is not None else None
        if not self.alive or row is None:
            return
        if row not in self._shown.rows:
            self._pinned = row
            self._draw()
        self._shown.select(row)

    def decide(self, status: Any, states: Sequence[str], labels: Any, names: Sequence[str]) -> None:
        """Write a review's decisions on the boxes of `found` into the table.

        `status` (n,) places in `states`, the first of which is for boxes that are not decided on:
        they stay as they were. `labels` (n,) places in `names`.
        """
        store = self.store
        if not self.alive or store is None or len(status) != store.original:
            return
        self._take_over()
        store.decide(np.asarray(status), states, np.asarray(labels), names)
        self._edited |= bool(store.reviewed.any())
        self._draw()

    def remove(self) -> None:
        """Take the layer out of the viewer."""
        if self.alive:
            self.viewer.layers.remove(self.layer)

    def _chosen_for(self, store: BoxStore) -> Chosen:
        return self._chosen if store.fits(self._chosen) else self._confidence

    def _draw(self) -> None:
        """Put what is to be seen into the layer."""
        choice, view = self._choice, view_of(self.layer, self.viewer)
        index = plane_of(self.layer, self.viewer)
        if choice is None:
            self._shown.put(None, np.empty(0, np.int64), view, index)
            self.told.emit("Nothing was run on this plane.")
            return
        rows, near, total = self._to_show(choice, view)
        labelled = self._text and near <= _FEW
        if not labelled:
            self._shown.look.unlabel(self.layer)
        self._shown.put(choice.store, rows, view, index)
        if labelled:
            self._shown.look.label(self.layer, choice.store, rows)
        if len(rows) < near:
            self.told.emit(f"{len(rows):,} of {total:,} shown; zoom in to see all.")
        else:
            self.told.emit("")

    def _to_show(self, choice: BoxChoice, view: View | None) -> InView:
        most, chosen = detection_shapes.most(), self._chosen_for(choice.store)
        mask, total = choice.mask(chosen), choice.total(chosen)
        inside = choice.inside(view, chosen)
        if not self._text and total <= most:
            return InView(np.flatnonzero(mask), len(inside), total)
        pinned = self._pinned_rows(choice.store)
        rows = choice.surest(inside, pinned[mask[pinned]], most)
        return InView(rows, len(inside), total)

    def _pinned_rows(self, store: BoxStore) -> Rows:
        """Rows that stay in the layer wherever the view is: what is selected."""
        rows = self._shown.selected_rows() if self._shown.store is store else []
        if self._pinned is not None and self._pinned < len(store):
            rows = [*rows, self._pinned]
        return np.unique(np.array(rows, np.int64))

    # --- what happens meanwhile -------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        camera, layers = self.viewer.scene.camera.events, self.viewer.layers.events
        heard = [
            (camera.zoom, self._soon),
            (camera.center, self._soon),
            (self.viewer.dims.events.point, self._soon),
            (self.layer.events.data, self._data_changed),
            (self.layer.events.features, self._features_changed),
            (layers.removed, self._removed),
            (self.layer.selected_data.events.items_changed, self._selection_changed),
        ]
        for emitter, method in heard:
            (emitter.connect if on else emitter.disconnect)(method)

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
        if self._shows_all():
            self._shown.fit_width(view_of(self.layer, self.viewer))
        else:
            self._draw()

    def _shows_all(self) -> bool:
        """Whether what is chosen is in the layer, wherever the view is."""
        choice = self._choice
        if choice is None or choice.store is not self._shown.store or self._text:
            return False
        return self._shown.version == choice.store.version and len(
            self._shown.rows
        ) == choice.total(self._chosen_for(choice.store))

    def _data_changed(self, event: Any) -> None:
        over = event.action in (ActionType.ADDED, ActionType.REMOVED, ActionType.CHANGED)
        if over and not self._shown.ours:
            self._edited = self._stirred = True
            self.changed.emit()

    def _features_changed(self, event: Any = None) -> None:
        if not self._shown.ours:
            self._stirred = True
            self.changed.emit()

    def _take_over(self, anyway: bool = False) -> None:
        """Keep what the user changed in the layer since it was last filled.

        `anyway`: look even if the layer told of nothing, as a table may be changed in place.
        """
        if (self._stirred or anyway) and not self._shown.ours and self.alive:
            self._stirred = False
            self._edited |= self._shown.take_over()

    def _selection_changed(self, added: Any, removed: Any) -> None:
        row, store = self._shown.selected_row, self._shown.store
        if not self._shown.ours and row is not None and store is not None:
            place = store.place_of(row)
            if place is not None:
                self.selected.emit(place)

    def _removed(self, event: Any) -> None:
        if event.value is self.layer:
            self._listen(False)
            self._timer.stop()
            for choice in self._choices.values():
                choice.close()
            _living.discard(self)
            self.gone.emit()
