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
from napari.layers import Image, Shapes
from napari.layers.base import ActionType
from psygnal import Signal
from qtpy.QtCore import QTimer

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.ui import detection_shapes
from napari_beerlanet.ui.detection_look import Look
from napari_beerlanet.ui.detection_store import BoxStore, Rows
from napari_beerlanet.ui.detection_view import View, plane_of, surest, touching, view_of
from napari_beerlanet.ui.gl_guard import guard_software_opengl
from napari_beerlanet.ui.layers import mark, put_above, spatial

ROLE = "detections"
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
    row of a box that the user selected.
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
        self._look = Look(colours, detections.names)
        self.stores: dict[Index, BoxStore] = {}
        self._founds: dict[Index, Detections] = {}
        self._chosen: float | npt.NDArray[np.bool_] = confidence
        self._confidence, self._text = confidence, text
        self._edited = self._stirred = self._ours = False
        self._pinned: int | None = None
        self._store: BoxStore | None = None
        self._rows: Rows = np.empty(0, np.int64)
        self._put = np.empty((0, 4), np.float32)
        guard_software_opengl(viewer)
        self.layer = self._make_layer(source)
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

    def _make_layer(self, source: Image) -> Shapes:
        layer = Shapes(
            ndim=source.ndim,
            name=f"{source.name} · detections",
            face_color="transparent",
            opacity=1.0,
            visible=False,
            metadata=mark(ROLE, source),
            **spatial(source),
        )
        self.viewer.add_layer(layer)
        put_above(self.viewer, layer, source)
        return layer

    # --- what there is ----------------------------------------------------------------------------

    @property
    def alive(self) -> bool:
        """Whether the layer still is in the viewer."""
        return self.layer in self.viewer.layers

    @property
    def store(self) -> BoxStore | None:
        """The boxes of the plane that is shown, None where nothing was run."""
        return self.stores.get(plane_of(self.layer, self.viewer))

    @property
    def found(self) -> Detections | None:
        """What the model found in the plane that is shown."""
        return self._founds.get(plane_of(self.layer, self.viewer))

    @property
    def colours(self) -> list[str]:
        """Of the classes."""
        return list(self._look.colours)

    @property
    def confidence(self) -> float:
        """The last threshold by which boxes were chosen."""
        return self._confidence

    @property
    def edited(self) -> bool:
        """Whether the user moved, added, deleted or renamed anything."""
        self._take_over(anyway=True)
        return self._edited

    def put(
        self, detections: Detections, index: Index = (), confidence: float | None = None
    ) -> None:
        """Make these the boxes of a plane, whatever it had before, and show them."""
        if confidence is not None:
            self._chosen = self._confidence = confidence
        self.stores[tuple(index)] = BoxStore(detections)
        self._founds[tuple(index)] = detections
        self._store = None
        self._draw()

    def take_colours(self, colours: Sequence[str] | None, names: Sequence[str]) -> None:
        """Use these from the next `put` on; another model has others."""
        self._look = Look(colours, names)

    def passing(self) -> tuple[BoxStore, npt.NDArray[np.bool_]] | None:
        """The plane's boxes, and which of them are chosen, in view or not."""
        self._take_over()
        store = self.store
        return None if store is None else (store, store.passing(self._chosen_for(store)))

    def read_back(self) -> ReadBack:
        """What is chosen in the plane that is shown, with the user's edits."""
        self._take_over(anyway=True)
        found = self.passing()
        if found is None:
            nothing = np.empty((0, 4), np.float32), np.empty(0, np.int64)
            return ReadBack(*nothing, [], {})
        store, mask = found
        rows = np.flatnonzero(mask)
        return ReadBack(
            store.xyxy[rows], store.labels[rows], list(store.names), store.features(rows)
        )

    # --- what is shown ----------------------------------------------------------------------------

    def show(self, chosen: float | npt.NDArray[np.bool_]) -> None:
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

    def select(self, row: int) -> None:
        """Select a box of the store, and have it in the layer, if it passes, wherever it is."""
        store = self.store
        if not self.alive or store is None:
            return
        if row not in self._rows:
            self._pinned = row
            self._draw()
        self._ours = True
        self.layer.selected_data = set(np.flatnonzero(self._rows == row).tolist())
        self._ours = False

    def decide(self, words: Sequence[str], labels: Any, names: Sequence[str], open_: str) -> None:
        """Write a review's states (n,) and classes of the model's boxes into the table.

        `open_` is the word for boxes that are not decided on: they stay as they were.
        """
        store = self.store
        if not self.alive or store is None or len(words) != store.original:
            return
        self._take_over()
        store.decide(np.asarray(words, dtype=object), np.asarray(labels), names, open_)
        self._edited |= bool(store.reviewed.any())
        self._draw()

    def remove(self) -> None:
        """Take the layer out of the viewer."""
        if self.alive:
            self.viewer.layers.remove(self.layer)

    def _chosen_for(self, store: BoxStore) -> float | npt.NDArray[np.bool_]:
        fits = np.ndim(self._chosen) == 0 or len(np.asarray(self._chosen)) == store.original
        return self._chosen if fits else 0.25

    def _draw(self) -> None:
        """Put what is to be seen into the layer."""
        store, view = self.store, view_of(self.layer, self.viewer)
        if store is None:
            self._put_rows(None, np.empty(0, np.int64), view)
            self.told.emit("Nothing was run on this plane.")
            return
        mask = store.passing(self._chosen_for(store))
        rows, near = self._to_show(store, mask, view)
        labelled = self._text and near <= _FEW
        if not labelled:
            self._look.unlabel(self.layer)
        self._put_rows(store, rows, view)
        if labelled:
            self._look.label(self.layer, store, rows)
        total = int(mask.sum())
        if len(rows) < near:
            self.told.emit(f"{len(rows):,} of {total:,} shown; zoom in to see all.")
        else:
            self.told.emit("")

    def _to_show(
        self, store: BoxStore, mask: npt.NDArray[np.bool_], view: View | None
    ) -> tuple[Rows, int]:
        """Rows to put into the layer, and how many of the chosen are in view."""
        most = detection_shapes.most()
        inside = mask & touching(store.xyxy, view.box) if view is not None else mask
        near = int(inside.sum())
        if not self._text and int(mask.sum()) <= most:
            return np.flatnonzero(mask), near
        pinned = np.isin(store.ids, list(self._selected_ids())) & mask
        if self._pinned is not None and self._pinned < len(store):
            pinned[self._pinned] = mask[self._pinned]
        rows = np.flatnonzero(inside | pinned)
        return surest(rows, store.scores, pinned | store.touched, most), near

    def _put_rows(self, store: BoxStore | None, rows: Rows, view: View | None) -> None:
        selected = self._selected_ids() if store is self._store else set()
        self._look.see(view)
        index = plane_of(self.layer, self.viewer)
        boxes = store.xyxy[rows] if store is not None else np.empty((0, 4), np.float32)
        self._ours = True
        try:
            detection_shapes.put(
                self.layer,
                detection_shapes.corners_of(boxes, index),
                self._look.edges(store, rows),
                self._look.width,
                store.features(rows) if store is not None else {},
            )
            if store is not self._store:
                self._look.set_defaults(self.layer, store)
            self._store, self._rows, self._put = store, rows, boxes.copy()
            if selected and store is not None:
                self.layer.selected_data = set(
                    np.flatnonzero(np.isin(store.ids[rows], list(selected))).tolist()
                )
        finally:
            self._ours = False

    # --- what happens meanwhile -------------------------------------------------------------------

    def _listen(self, on: bool) -> None:
        camera, layers = self.viewer.scene.camera.events, self.viewer.layers.events
        heard = [
            (camera.zoom, self._moved),
            (camera.center, self._moved),
            (self.viewer.dims.events.point, self._moved),
            (self.layer.events.data, self._data_changed),
            (self.layer.events.features, self._features_changed),
            (layers.removed, self._removed),
            (self.layer.selected_data.events.items_changed, self._selection_changed),
        ]
        for emitter, method in heard:
            (emitter.connect if on else emitter.disconnect)(method)

    def _moved(self, event: Any = None) -> None:
        if not self._timer.isActive():
            self._timer.start()

    def _follow(self) -> None:
        """The view moved: other boxes, other labels, another width of edges."""
        if not self.alive:
            return
        if getattr(self.layer, "_is_moving", False) or getattr(self.layer, "_is_creating", False):
            self._timer.start()  # the user is drawing
            return
        self._take_over()
        if not self._shows_all():
            self._draw()
        elif self._look.see(view_of(self.layer, self.viewer)):
            self._ours = True
            self._look.set_width(self.layer)
            self._ours = False

    def _shows_all(self) -> bool:
        """Whether what is chosen is in the layer, wherever the view is."""
        store = self.store
        if store is None or store is not self._store or self._text:
            return False
        return len(self._rows) == int(store.passing(self._chosen_for(store)).sum())

    def _data_changed(self, event: Any) -> None:
        over = event.action in (ActionType.ADDED, ActionType.REMOVED, ActionType.CHANGED)
        if over and not self._ours:
            self._edited = self._stirred = True
            self.changed.emit()

    def _features_changed(self, event: Any = None) -> None:
        if not self._ours:
            self._stirred = True
            self.changed.emit()

    def _take_over(self, anyway: bool = False) -> None:
        """Keep what the user changed in the layer since it was last filled.

        `anyway`: look even if the layer told of nothing, as a table may be changed in place.
        """
        if self._ours or self._store is None or not (self._stirred or anyway) or not self.alive:
            return
        self._stirred = False
        boxes = detection_shapes.boxes_of(self.layer.data)
        table = {name: self.layer.features[name].to_numpy() for name in self.layer.features}
        rows = self._store.take_over(self._rows, self._put, boxes, table)
        if rows is None:
            return
        self._edited, self._rows, self._put = True, rows, boxes
        self._ours = True
        self.layer.features = self._store.features(rows)
        self._ours = False

    def _selection_changed(self, added: Any, removed: Any) -> None:
        if not self._ours and len(self.layer.selected_data) == 1:
            (place,) = self.layer.selected_data
            if place < len(self._rows):
                self.selected.emit(int(self._rows[place]))

    def _selected_ids(self) -> set[int]:
        if self._store is None or not self.layer.selected_data:
            return set()
        chosen = [k for k in self.layer.selected_data if k < len(self._rows)]
        return set(self._store.ids[self._rows[chosen]].tolist())

    def _removed(self, event: Any) -> None:
        if event.value is self.layer:
            self._listen(False)
            self._timer.stop()
            _living.discard(self)
            self.gone.emit()
