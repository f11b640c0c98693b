"""The detections of an image in one Shapes layer, with the user's edits.

All boxes live in `BoxStore`s, one for each plane of a stack. The layer shows those of the current
plane that pass the threshold: all of them while there are few, otherwise those in view, the most
confident first. Where very many are in view, they fade into a picture of their density
(`density_overlay`). Edges are equally thin at any zoom. Labels appear when few boxes are in view.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from psygnal import Signal
from qtpy.QtCore import QTimer
from superqt.utils import QSignalThrottler

from napari_beerlanet.core.boxes.detections import Detections
from napari_beerlanet.core.detection.settings import DetectSettings
from napari_beerlanet.core.review.review import BoxEdit
from napari_beerlanet.ui.common.panel import Connection
from napari_beerlanet.ui.common.session import get_session
from napari_beerlanet.ui.detections.box_store import (
    BoxFilter,
    BoxStore,
    RowIndices,
    TypeColumns,
)
from napari_beerlanet.ui.detections.density_overlay import MIN_BOXES_FOR_DENSITY
from napari_beerlanet.ui.detections.drawing import (
    BoxStyle,
    ColourBy,
    DetectionRenderer,
    EditListener,
    create_detections_layer,
)
from napari_beerlanet.ui.detections.edits import edits_of, store_of_edits, transfer_edits
from napari_beerlanet.ui.detections.visible_boxes import PlaneStores
from napari_beerlanet.ui.viewer.layers import (
    boxes_removed,
    guard_software_opengl,
    hide_with_source,
    is_selected,
    move_to_top,
    step_back,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex
from napari_beerlanet.ui.viewer.viewport import current_plane_index, paint_later

if TYPE_CHECKING:
    from napari.viewer import Viewer

_SHARE_DELAY_MS = 100  # until other panels hear of new types: after canvas and counts are painted
_REDRAW_INTERVAL_MS = 60  # between changes of what is drawn, while the viewport moves

# napari holds callbacks weakly: a `DetectionLayer` lives as long as its Shapes layer.
_alive_layers: set[DetectionLayer] = set()


class DetectionLayer:
    """Detections of an image layer, shown in one Shapes layer of the same place in the world.

    Signals: `message_changed` with a short text on how many boxes are drawn; `changed` when the
    user edited something, or boxes got types; `filter_changed` when others pass the filter;
    `colours_changed` when the colours say something else; `removed` when the user deleted the
    layer, after which every method does nothing; `selected` with the index in `detections` of a box
    that the user selected.

    Where boxes come one part after the other, as from the tiles of a slide::

        layer = DetectionLayer(viewer, source, Detections.empty(names), colours, index, confidence)
        layer.extend(part)                    # as often as parts come; a few milliseconds each
        layer.extend(part, duplicates)        # … and these boxes of earlier parts are dropped
        layer.finalise(everything)            # in the end, if the whole is known better

    Edits that the user makes meanwhile are kept.
    """

    message_changed = Signal(str)
    changed = Signal()
    filter_changed = Signal()
    colours_changed = Signal()
    removed = Signal()
    selected = Signal(int)

    def __init__(
        self,
        viewer: Viewer,
        source: Image,
        detections: Detections,
        colours: Sequence[str] | None = None,
        index: PlaneIndex = (),
        confidence: float = DetectSettings.default("confidence"),
        labels_visible: bool = False,
        tag: str = "",
    ) -> None:
        """`tag` is appended to the layer's name, to tell it from others of the same image."""
        self.viewer, self._source = viewer, source
        guard_software_opengl(viewer)
        self.layer = create_detections_layer(viewer, source)
        self._base_end = self._own_end = self.layer.name.removeprefix(source.name)
        self.set_tag(tag)
        session = get_session(viewer)
        self._palette, self._type_palette = session.palette, session.type_palette
        self.set_colours(colours, detections.names)
        style = BoxStyle(self._palette, self._type_palette)
        self._renderer = DetectionRenderer(viewer, source, self.layer, style, redraw=self._draw)
        self._renderer.labels_visible = labels_visible
        self._drawn = self._renderer.drawn
        self._planes = PlaneStores(viewer, self.layer, confidence)
        self._edit_listener = EditListener(self._drawn, self.changed.emit, self._emit_selected)
        self._throttler = QSignalThrottler(QSignalThrottler.EmissionPolicy.Trailing)
        self._throttler.setTimeout(_REDRAW_INTERVAL_MS)
        self._throttler.triggered.connect(self._follow_viewport)
        self.growing = False  # while a search adds boxes, which are of the last run
        # The types before the last classification, or those undone; and which of the two.
        self._other_types: WeakKeyDictionary[BoxStore, tuple[TypeColumns, bool]] = (
            WeakKeyDictionary()
        )
        self._connect_events(True)
        self._bind_undo()
        _alive_layers.add(self)
        self.set_detections(detections, index)
        self.reveal()

    def set_tag(self, tag: str) -> None:
        """Append a word to the layer's name, unless the user has given it another one."""
        image = self._source.name
        if self.layer.name == f"{image}{self._own_end}":
            self.layer.name = f"{image}{self._base_end}" + (f" ({tag})" if tag else "")
            self._own_end = self.layer.name.removeprefix(image)  # napari makes it unique

    def reveal(self) -> None:
        """Show the boxes on their image: nothing covers either, whatever was decomposed before.

        The stain layers are hidden as long as the boxes are there, or until the user shows them.
        """
        if not self.alive:
            return
        if is_selected(self.viewer, self._source):
            move_to_top(self.viewer, self.layer)
        if self._source in self.viewer.layers:
            step_back(self.viewer, self._source)
        # napari takes long to fill a layer and to show it: two turns of the event loop.
        QTimer.singleShot(0, self._make_visible)

    def _make_visible(self) -> None:
        if self.alive:
            self.layer.visible = True
            hide_with_source(self.viewer, self.layer)

    @property
    def alive(self) -> bool:
        """Whether the layer still is in the viewer."""
        return self.layer in self.viewer.layers

    @property
    def stores(self) -> dict[PlaneIndex, BoxStore]:
        """The boxes of each plane."""
        return self._planes.stores

    @property
    def store(self) -> BoxStore | None:
        """The boxes of the current plane, None where nothing was run."""
        boxes = self._planes.current
        return None if boxes is None else boxes.store

    @property
    def rows(self) -> RowIndices:
        """(m,) the rows of `store` that are in the layer, in its order."""
        return self._drawn.rows

    @property
    def detections(self) -> Detections | None:
        """The model's detections of the current plane, without the user's edits."""
        store = self.store
        return None if store is None else store.detections

    @property
    def report(self) -> dict[str, Any]:
        """How the detections of the current plane were made: model, scale, …"""
        store = self.store
        return {} if store is None else store.report

    @property
    def colours(self) -> list[str]:
        """Of the classes of the current plane, in their order."""
        store = self.store
        return self._palette.colours(store.names) if store is not None else []

    @property
    def confidence(self) -> float:
        """The last confidence threshold."""
        return self._planes.confidence

    @property
    def edited(self) -> bool:
        """Whether the user moved, added, deleted or relabelled anything."""
        self._commit_edits(force=True)
        return self._edit_listener.edited

    def filtered(self) -> tuple[BoxStore, npt.NDArray[np.bool_]] | None:
        """The current plane's boxes, and which of them pass the filter, in view or not."""
        self._commit_edits()
        boxes = self._planes.current
        if boxes is None:
            return None
        return boxes.store, boxes.mask(self._planes.box_filter)

    def commit_edits(self) -> None:
        """Put what the user has just changed on the canvas into `store`."""
        self._commit_edits(force=True)

    def read_back(self) -> LayerDetections:
        """The boxes of the current plane that pass the filter, with the user's edits."""
        self._commit_edits(force=True)
        return LayerDetections.of(self.filtered())

    def edits(self, index: PlaneIndex) -> list[BoxEdit]:
        """What the user has edited on a plane."""
        self._commit_edits(force=True)
        store = self.stores.get(index)
        return [] if store is None else edits_of(store)

    def restore_edits(self, edits: Sequence[BoxEdit], index: PlaneIndex) -> None:
        """Edit the boxes of a plane as the user did in an earlier session."""
        store = self.stores.get(index)
        if edits and self.alive and store is not None:
            self._commit_edits(force=True)
            transfer_edits(store_of_edits(edits), store)
            self._edit_listener.edited = True
            self._redraw_all()
            self.changed.emit()

    def read_all(self) -> dict[PlaneIndex, tuple[LayerDetections, dict[str, str]]]:
        """The boxes of every plane with the user's edits, and the colours of their classes.

        Those above the threshold and those that were decided on, whatever a review lists.
        """
        self._commit_edits(force=True)
        boxes = {}
        for index, store in self.stores.items():
            kept = (store.filter_mask(self.confidence) | (store.states > 0)) & store.alive
            colours = dict(zip(store.names, self._palette.colours(store.names), strict=True))
            boxes[index] = LayerDetections.of((store, kept)), colours
        return boxes

    # --- adding boxes -----------------------------------------------------------------------------

    def set_detections(
        self, detections: Detections, index: PlaneIndex = (), confidence: float | None = None
    ) -> None:
        """Make these the boxes of a plane and show them; `undo_run` brings back earlier ones."""
        if confidence is not None:
            self._planes.set_filter(confidence)
        self._planes.set_detections(detections, index)
        self._redraw_all()

    def extend(
        self,
        detections: Detections,
        duplicates: npt.NDArray[Any] | None = None,
        index: PlaneIndex = (),
    ) -> None:
        """Add boxes to those of a plane; the user's edits, selection and viewport stay.

        `detections`: if they have candidates, those are added. `duplicates` (m, 4): boxes of
        earlier calls that turned out to be parts or duplicates of others, as the same numbers; they
        are dropped, unless the user edited them. The layer follows within a moment: a call costs a
        few milliseconds, however many boxes there are already. On the GUI thread only.
        """
        if not self.alive:
            return
        if not self._drawn.is_being_edited:
            self._commit_edits()
        self._planes.extend(detections, duplicates, index)
        self._schedule_redraw()

    def finalise(self, detections: Detections, index: PlaneIndex = ()) -> None:
        """Make these the model's boxes of a plane; the user's edits of the earlier ones stay.

        For the end of a run that showed its boxes as they came: `detections` is then this.
        """
        if self.alive:
            self._commit_edits(force=True)
            self._planes.finalise(detections, index)
            self._redraw_all()

    # --- the run before ---------------------------------------------------------------------------

    @property
    def can_undo(self) -> bool:
        """Whether the current plane has boxes of a run before, or of one that was undone."""
        index = current_plane_index(self.layer, self.viewer)
        return self.alive and not self.growing and self._planes.has_other(index)

    @property
    def undone(self) -> bool:
        """Whether the last run on the current plane is undone, so that `undo_run` redoes it."""
        return self._planes.is_undone(current_plane_index(self.layer, self.viewer))

    def undo_run(self) -> None:
        """Swap the boxes of the last run on the current plane with those of the run before.

        Both keep what the user edited in them; a second call undoes the first.
        """
        if not self.can_undo:
            return
        self._commit_edits(force=True)
        self._planes.swap(current_plane_index(self.layer, self.viewer))
        self._redraw_all()
        detections = self.detections
        if detections is not None:
            get_session(self.viewer).set_detections(self._source, detections, self)
        self.changed.emit()

    def _bind_undo(self) -> None:
        """Ctrl+Z undoes a run, unless boxes were edited since: that is not what the user means.

        Types came after the boxes, and go first.
        """
        weak = weakref.ref(self)

        def pressed(layer: Shapes) -> None:
            this = weak()
            if this is not None and this.can_undo_types and not this.types_undone:
                this.undo_types()
                return
            if this is None or not this.can_undo:
                return
            if this.edited:
                this.viewer.status = "Boxes were edited: undo the run in Find cells."
            else:
                this.undo_run()

        self.layer.bind_key("Control-Z", pressed, overwrite=True)

    def _redraw_all(self) -> None:
        """Draw from the beginning: the boxes are others."""
        self._drawn.store = None
        store = self.store
        if store is not None and len(store) > MIN_BOXES_FOR_DENSITY:
            self._schedule_redraw()  # storing so many and drawing them: two turns of the event loop
        else:
            self._draw()

    def _restyle(self) -> None:
        """Draw the same boxes with other colours, or another table."""
        if self._drawn.store is self.store:
            self._drawn.outdate()
            self._draw()
        else:
            self._redraw_all()

    def set_colours(self, colours: Sequence[str] | None, names: Sequence[str]) -> None:
        """Take over a model's colours, in all layers of the viewer; None for no change."""
        self._palette.use_model(dict(zip(names, colours or (), strict=False)))

    def _recolour(self) -> None:
        """A class has got another colour."""
        if self.alive:
            self._commit_edits(force=True)
            self._restyle()

    # --- cell types -------------------------------------------------------------------------------

    @property
    def has_types(self) -> bool:
        """Whether boxes of the current plane have cell types."""
        store = self.store
        return store is not None and bool(store.type_names)

    @property
    def type_colours(self) -> list[str]:
        """Of the types of the current plane, in their order."""
        store = self.store
        return self._type_palette.colours(store.type_names) if store is not None else []

    @property
    def colour_by(self) -> ColourBy:
        """What colours say; those of classes where boxes have no types."""
        return self._renderer.drawn.style.colour_by

    def set_colour_by(self, colour_by: ColourBy) -> None:
        """Colour boxes, their labels and the picture of their density by class or by type."""
        if colour_by != self.colour_by:
            self._renderer.drawn.style.colour_by = colour_by
            self._recolour()
            self.colours_changed.emit()

    def set_types(
        self, types: TypeColumns, index: PlaneIndex = (), colour_by: ColourBy | None = None
    ) -> bool:
        """Give the boxes of a plane types; `undo_types` brings back the earlier ones.

        `colour_by`: what colours say from now on. False where the plane has no boxes any more.
        """
        store = self.stores.get(tuple(index))
        if not self.alive or store is None:
            return False
        self._commit_edits(force=True)
        self._other_types[store] = store.types, False
        if colour_by is not None:
            self._renderer.drawn.style.colour_by = colour_by  # drawn once, with the types
        self._write_types(store, types)
        self.colours_changed.emit()
        return True

    @property
    def can_undo_types(self) -> bool:
        """Whether a classification of the current plane can be undone or redone."""
        return self.alive and self.store in self._other_types

    @property
    def types_undone(self) -> bool:
        """Whether the last classification is undone, so that `undo_types` redoes it."""
        store = self.store
        return store is not None and store in self._other_types and self._other_types[store][1]

    def undo_types(self) -> None:
        """Swap the types of the last classification with those before; a second call redoes it."""
        store = self.store
        if not self.can_undo_types or store is None:
            return
        self._commit_edits(force=True)
        other, undone = self._other_types[store]
        self._other_types[store] = store.types, not undone
        self._write_types(store, other)

    def _write_types(self, store: BoxStore, types: TypeColumns) -> None:
        store.set_types(types)
        paint_later(self.viewer)
        self._restyle()  # at once: the new table must not be mistaken for an edit of the user's
        # To draw boxes takes long, and to list them anew in a review: between the two the canvas is
        # painted, and the window answers.
        QTimer.singleShot(_SHARE_DELAY_MS, self._share_types)
        self.changed.emit()

    def _share_types(self) -> None:
        store, session = self.store, get_session(self.viewer)
        if self.alive and store is not None and self._source in self.viewer.layers:
            session.set_detections(self._source, store.detections, self, same_run=True)

    # --- what is visible --------------------------------------------------------------------------

    def set_filter(self, box_filter: BoxFilter) -> None:
        """Show boxes of at least this confidence, or of a mask over all candidates."""
        if self.alive:
            self._commit_edits()
            self._planes.set_filter(box_filter)
            self._draw()
            self.filter_changed.emit()

    def set_labels_visible(self, visible: bool) -> None:
        """Label boxes with class and confidence, wherever few are in view."""
        if self.alive and visible != self._renderer.labels_visible:
            self._commit_edits()
            self._renderer.labels_visible = visible
            self._draw()

    def select(self, number: int) -> None:
        """Select a box of `detections`; it is drawn, if it passes the filter, wherever it is."""
        store = self.store
        row = store.row_of_detection(number) if store is not None else None
        if not self.alive or row is None:
            return
        if row not in self._drawn.rows:
            self._renderer.pinned = row
            self._draw()
        self._drawn.select(row)

    def apply_review(
        self,
        status: Any,
        states: Sequence[str],
        labels: Any,
        names: Sequence[str],
        type_labels: Any = None,
        type_names: Sequence[str] = (),
    ) -> None:
        """Write a review's decisions on the boxes of `detections` into the table.

        `status` (n,) indices into `states`, the first of which is for boxes that are not decided
        on: they stay as they were. `labels` (n,) indices into `names`; `type_labels` (n,) into
        `type_names`, -1 for none, or None.
        """
        store = self.store
        status = np.asarray(status)
        if not self.alive or store is None or not store.accepts(status):
            return
        self._commit_edits()
        types = None if type_labels is None else np.asarray(type_labels)
        store.apply_review(status, states, np.asarray(labels), names, types, type_names)
        self._edit_listener.edited |= bool(store.reviewed.any())
        self._draw()  # at once: the new table must not be mistaken for an edit of the user's

    def remove(self) -> None:
        """Remove the layer from the viewer."""
        if self.alive:
            self.viewer.layers.remove(self.layer)

    def _draw(self) -> None:
        if self.alive:
            planes = self._planes
            self.message_changed.emit(self._renderer.draw(planes.current, planes.box_filter))

    def _connect_events(self, connect: bool) -> None:
        camera, layers = self.viewer.scene.camera.events, self.viewer.layers.events
        connections: list[Connection] = [
            (camera.zoom, self._schedule_redraw),
            (camera.center, self._schedule_redraw),
            (self.viewer.dims.events.point, self._schedule_redraw),
            (layers.removed, self._on_removed),
            (self._palette.changed, self._recolour),
            (self._type_palette.changed, self._recolour),
        ]
        for emitter, method in connections:
            (emitter.connect if connect else emitter.disconnect)(method)
        self._edit_listener.set_connected(connect)

    def _schedule_redraw(self, event: Any = None) -> None:
        self._throttler.throttle()

    def _follow_viewport(self) -> None:
        """The viewport moved or boxes came: other boxes, other labels, another edge width."""
        if not self.alive:
            return
        if self._drawn.is_being_edited:
            self._schedule_redraw()  # when the user has finished
            return
        self._commit_edits()
        message = self._renderer.follow(self._planes.current, self._planes.box_filter)
        if message is not None:
            self.message_changed.emit(message)

    def _commit_edits(self, force: bool = False) -> None:
        if self.alive:
            self._edit_listener.commit(force)

    def _emit_selected(self, row: int) -> None:
        store = self._drawn.store
        number = store.detection_of_row(row) if store is not None else None
        if number is not None:
            self.selected.emit(number)

    def _on_removed(self, event: Any) -> None:
        if event.value is self.layer:
            self._connect_events(False)
            self._throttler.cancel()
            self._renderer.close()
            self._planes.close()
            _alive_layers.discard(self)
            boxes_removed(self.viewer, self._source)
            self.removed.emit()


class LayerDetections(NamedTuple):
    """The boxes (n, 4) that pass a layer's filter, in pixels; their labels and table."""

    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    names: list[str]
    features: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, filtered: tuple[BoxStore, npt.NDArray[np.bool_]] | None) -> LayerDetections:
        """Of the boxes of a mask; nothing for None."""
        if filtered is None:
            return cls(np.empty((0, 4), np.float32), np.empty(0, np.int64), [], {})
        store, mask = filtered
        rows = np.flatnonzero(mask)
        return cls(store.xyxy[rows], store.labels[rows], list(store.names), store.features(rows))
