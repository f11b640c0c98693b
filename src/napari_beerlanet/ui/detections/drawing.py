"""Draw the visible boxes of a plane into its Shapes layer, and notice when the user edits them.

Style, labels, edge width, density.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
from napari.layers import Image, Shapes
from napari.layers.base import ActionType
from napari.utils.colormaps.standardize_color import transform_color

from napari_beerlanet.core.boxes.detections import PROBABILITY_COLUMN
from napari_beerlanet.ui.common.panel import Connection
from napari_beerlanet.ui.common.session import ClassPalette
from napari_beerlanet.ui.detections.box_store import BoxFilter, BoxStore, RowIndices
from napari_beerlanet.ui.detections.density_overlay import (
    MIN_BOXES_FOR_DENSITY,
    CellDensityOverlay,
    fade_fraction,
)
from napari_beerlanet.ui.detections.edits import commit_edits
from napari_beerlanet.ui.detections.visible_boxes import VisibleBoxes
from napari_beerlanet.ui.viewer import box_shapes
from napari_beerlanet.ui.viewer.layers import (
    Role,
    UpdateGuard,
    add_unselected,
    is_selected,
    role_metadata,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex
from napari_beerlanet.ui.viewer.viewport import (
    CanvasMessage,
    Viewport,
    current_plane_index,
    viewport_of,
)

if TYPE_CHECKING:
    from napari.viewer import Viewer

_EDGE_WIDTH_PX = 1.5  # pixels of the screen
_WIDTH_TOLERANCE = 0.02  # relative difference of widths that nobody sees
_FADE_TOLERANCE = 0.02  # that nobody sees
_MAX_LABELLED_BOXES = 150  # in view
_LABEL_FORMAT = "{class} {confidence:.2f}"
UNTYPED_COLOUR = "#8c8c8c"
"""Of boxes without a cell type, where colours are those of types."""
_NO_LABELS = {"string": {"constant": ""}, "visible": False}
_NO_BOXES = np.empty((0, 4), np.float32)

ColourBy = Literal["class", "type"]
"""What the colours of boxes say: the detector's class, or the classifier's cell type."""


def create_detections_layer(viewer: Viewer, source: Image) -> Shapes:
    """An empty layer on top, at the same place in the world as an image, not visible yet.

    If the user is at another image by now, it is not selected and does not cover that.
    """
    layer = Shapes(
        ndim=source.ndim,
        name=f"{source.name} · detections",
        face_color="transparent",
        opacity=1.0,
        visible=False,
        metadata=role_metadata(Role.DETECTIONS, source),
        **transform_kwargs(source),
    )
    if is_selected(viewer, source):
        viewer.add_layer(layer)
    else:
        add_unselected(viewer, layer, above=source)
    return layer


class _DrawSelection(NamedTuple):
    """`rows` to draw, of `in_view` that pass the filter, of `total`; how far boxes fade, 0 to 1."""

    rows: RowIndices
    in_view: int
    total: int
    fade: float


class DetectionRenderer:
    """Draws boxes of one plane at a time into a Shapes layer, and their density below it."""

    def __init__(
        self,
        viewer: Viewer,
        source: Image,
        layer: Shapes,
        style: BoxStyle,
        redraw: Callable[[], None],
    ) -> None:
        """`redraw` is called when there is more to show than there was at the last `draw`."""
        self.viewer, self.layer = viewer, layer
        self.drawn = DrawnBoxes(layer, style)
        self.density = CellDensityOverlay(viewer, layer, source, redraw)
        self.labels_visible = False
        self.pinned: int | None = None
        self._canvas_message = CanvasMessage(viewer)

    def close(self) -> None:
        """The layer was removed."""
        self.density.close()
        self._canvas_message.show("")

    def draw(self, boxes: VisibleBoxes | None, box_filter: BoxFilter) -> str:
        """Draw the boxes of a plane (None: nothing was run there); a message on what is visible."""
        viewport = viewport_of(self.layer, self.viewer)
        index = current_plane_index(self.layer, self.viewer)
        if boxes is None:
            self.density.fade(0)
            self._canvas_message.show("")
            self.drawn.draw(None, np.empty(0, np.int64), viewport, index)
            return "No detections on this plane."
        self._update_density(boxes, box_filter, index)
        selection = self._select_boxes(boxes, box_filter, viewport)
        self.density.fade(selection.fade)
        self._draw_selection(boxes.store, selection, viewport, index)
        message = self._count_message(boxes, box_filter, selection)
        self._canvas_message.show(message if selection.fade > 0 else "")
        return message

    def follow(self, boxes: VisibleBoxes | None, box_filter: BoxFilter) -> str | None:
        """The viewport moved: draw again, or only keep the edge width on the screen."""
        if boxes is None or not self._all_are_drawn(boxes, box_filter):
            return self.draw(boxes, box_filter)
        self.drawn.fit_edge_width(viewport_of(self.layer, self.viewer))
        return None

    def _all_are_drawn(self, boxes: VisibleBoxes, box_filter: BoxFilter) -> bool:
        """Whether all that pass the filter are in the layer, wherever the viewport is."""
        drawn = self.drawn
        if self.labels_visible or not drawn.is_current(boxes.store) or drawn.fade > 0:
            return False
        return len(drawn.rows) == boxes.total(box_filter)

    def _update_density(
        self, boxes: VisibleBoxes, box_filter: BoxFilter, index: PlaneIndex
    ) -> None:
        if boxes.total(box_filter) > MIN_BOXES_FOR_DENSITY:
            codes, colours = self.drawn.style.coding(boxes.store)
            rgb = np.rint(255 * colours[:, :3])
            self.density.request(boxes, box_filter, codes, rgb, index)

    def _select_boxes(
        self, boxes: VisibleBoxes, box_filter: BoxFilter, viewport: Viewport | None
    ) -> _DrawSelection:
        limit, store = box_shapes.max_drawn_boxes(), boxes.store
        mask, total = boxes.mask(box_filter), boxes.total(box_filter)
        in_view = boxes.in_viewport(viewport, box_filter)
        if not self.labels_visible and total <= limit:
            return _DrawSelection(np.flatnonzero(mask), len(in_view), total, 0.0)
        many = viewport is not None and total > MIN_BOXES_FOR_DENSITY
        fade = 0.0
        if many and self.density.is_expected(boxes):
            fade = fade_fraction(len(in_view), limit)
        if fade < 1 and not self.density.has_picture_of(boxes):
            fade = 0.0
        candidates = in_view[store.touched[in_view]] if fade == 1 else in_view
        pinned = self._pinned_rows(store)
        rows = boxes.most_confident(candidates, pinned[mask[pinned]], limit)
        return _DrawSelection(rows, len(in_view), total, fade)

    def _pinned_rows(self, store: BoxStore) -> RowIndices:
        """Rows that stay in the layer wherever the viewport is: what is selected."""
        rows = self.drawn.selected_rows() if self.drawn.store is store else []
        if self.pinned is not None and self.pinned < len(store):
            rows = [*rows, self.pinned]
        return np.unique(np.array(rows, np.int64))

    def _draw_selection(
        self,
        store: BoxStore,
        selection: _DrawSelection,
        viewport: Viewport | None,
        index: PlaneIndex,
    ) -> None:
        drawn = self.drawn
        labelled = self.labels_visible and selection.in_view <= _MAX_LABELLED_BOXES
        if not labelled:
            drawn.style.hide_labels(self.layer)
        if not labelled and drawn.is_current(store, selection.rows, selection.fade):
            drawn.fit_edge_width(viewport)
            return
        drawn.draw(store, selection.rows, viewport, index, selection.fade)
        if labelled:
            drawn.style.show_labels(self.layer, store, selection.rows)

    def _count_message(
        self, boxes: VisibleBoxes, box_filter: BoxFilter, selection: _DrawSelection
    ) -> str:
        if selection.fade > 0:
            exact = viewport_of(self.layer, self.viewer, margin=0.0)
            count = len(boxes.in_viewport(exact, box_filter))
            if selection.fade == 1:
                return f"{count:,} cells in view; zoom in to see boxes."
            return f"{count:,} cells in view, boxes for the most confident; zoom in to see all."
        if len(selection.rows) < selection.in_view:
            return f"{len(selection.rows):,} of {selection.total:,} shown; zoom in to see all."
        return ""


class DrawnBoxes:
    """What a Shapes layer shows: the rows `rows` (m,) of `store`, in this order.

    `version` is the store's when they were drawn. `updating` is true while the layer is changed by
    us and not by the user.
    """

    def __init__(self, layer: Shapes, style: BoxStyle) -> None:
        self.layer, self.style = layer, style
        self.store: BoxStore | None = None
        self.rows: RowIndices = np.empty(0, np.int64)
        self.version, self.fade, self.updating = -1, 0.0, UpdateGuard()
        self._xyxy = _NO_BOXES  # as they were drawn

    def is_current(
        self, store: BoxStore, rows: RowIndices | None = None, fade: float = 0.0
    ) -> bool:
        """Whether the layer was drawn from the store as it is now, and with just these rows."""
        current = store is self.store and store.version == self.version
        if not current or rows is None:
            return current
        return abs(fade - self.fade) < _FADE_TOLERANCE and np.array_equal(rows, self.rows)

    def draw(
        self,
        store: BoxStore | None,
        rows: RowIndices,
        viewport: Viewport | None,
        index: PlaneIndex,
        fade: float = 0.0,
    ) -> None:
        """Make these rows the layer's boxes, faded from 0 to 1; the selection is kept."""
        selected = self.selected_rows() if store is self.store else []
        self.style.set_viewport(viewport)
        xyxy = store.xyxy[rows] if store is not None else _NO_BOXES
        colours = self.style.edge_colours(store, rows, fade)
        features = store.features(rows) if store is not None else {}
        with self.updating:
            # To build thousands of shapes takes long, to give them other colours does not.
            same = store is not None and self._shows(store, rows, xyxy)
            if not same or not box_shapes.restyle_boxes(
                self.layer, colours, self.style.edge_width, features
            ):
                same = False
                corners = box_shapes.corners_from_boxes(xyxy, index)
                box_shapes.set_boxes(self.layer, corners, colours, self.style.edge_width, features)
            if same or store is not self.store:
                self.style.set_defaults(self.layer, store)
            self.store, self.rows, self._xyxy = store, rows, xyxy.copy()
            self.version, self.fade = -1 if store is None else store.version, fade
            if selected and not same:
                self.layer.selected_data = set(np.flatnonzero(np.isin(rows, selected)).tolist())

    def _shows(self, store: BoxStore, rows: RowIndices, xyxy: npt.NDArray[np.float32]) -> bool:
        """Whether the layer has just these boxes, whatever their colours and table."""
        return (
            store is self.store
            and len(rows) > 0
            and np.array_equal(rows, self.rows)
            and np.array_equal(xyxy, self._xyxy)
        )

    def outdate(self) -> None:
        """The boxes stay as they are and have another style: the next `draw` shows it."""
        self.version = -1

    def fit_edge_width(self, viewport: Viewport | None) -> None:
        """Edges of the same width on the screen, at whatever zoom."""
        if self.style.set_viewport(viewport):
            with self.updating:
                self.style.set_edge_width(self.layer)

    def commit_edits(self) -> bool:
        """Commit what the user changed in the layer since it was drawn; whether that is any."""
        if self.store is None:
            return False
        xyxy = box_shapes.bounding_boxes(self.layer.data)
        table = {name: self.layer.features[name].to_numpy() for name in self.layer.features}
        rows = commit_edits(self.store, self.rows, self._xyxy, xyxy, table)
        if rows is None:
            return False
        self.rows, self._xyxy = rows, xyxy
        self.version = self.store.version
        with self.updating:
            self.layer.features = self.store.features(rows)
        return True

    def select(self, row: int) -> None:
        """Select the box of a row of the store, if it is in the layer."""
        with self.updating:
            self.layer.selected_data = set(np.flatnonzero(self.rows == row).tolist())

    @property
    def selected_row(self) -> int | None:
        """The row of the one box that is selected."""
        if len(self.layer.selected_data) != 1:
            return None
        (place,) = self.layer.selected_data
        return int(self.rows[place]) if place < len(self.rows) else None

    def selected_rows(self) -> list[int]:
        """The rows of the boxes that are selected."""
        places = [k for k in self.layer.selected_data if k < len(self.rows)]
        return [int(row) for row in self.rows[places]] if places else []

    @property
    def is_being_edited(self) -> bool:
        """Whether the user is drawing or moving a box."""
        layer: Any = self.layer
        return bool(getattr(layer, "_is_moving", False) or getattr(layer, "_is_creating", False))


class BoxStyle:
    """Colours by class or type, edge width and labels of boxes."""

    def __init__(self, palette: ClassPalette, type_palette: ClassPalette) -> None:
        self._palette, self._type_palette = palette, type_palette
        self.colour_by: ColourBy = "class"
        self.edge_width = 1.0
        self._next_colour = ""

    def colours_of(self, names: Sequence[str]) -> list[str]:
        """The colour "#rrggbb" of each class."""
        return self._palette.colours(names)

    def set_viewport(self, viewport: Viewport | None) -> bool:
        """Set the edge width for a zoom; whether it differs visibly from before."""
        if viewport is None:
            return False
        width = _EDGE_WIDTH_PX * viewport.pixel_size
        if abs(width - self.edge_width) <= _WIDTH_TOLERANCE * self.edge_width:
            return False
        self.edge_width = width
        return True

    def by_type(self, store: BoxStore) -> bool:
        """Whether these boxes have the colours of types: they need to have some."""
        return self.colour_by == "type" and bool(store.type_names)

    def coding(self, store: BoxStore) -> tuple[npt.NDArray[Any], npt.NDArray[np.float32]]:
        """(n,) what each box is, class or type, as a row of the colours (k, 4) RGBA, 0 to 1."""
        if self.by_type(store):
            colours = [UNTYPED_COLOUR, *self._type_palette.colours(store.type_names)]
            return store.type_codes, np.asarray(transform_color(colours), np.float32)
        return store.labels, np.asarray(transform_color(self.colours_of(store.names)), np.float32)

    def edge_colours(
        self, store: BoxStore | None, rows: RowIndices, fade: float
    ) -> npt.NDArray[np.float32]:
        """(m, 4) RGBA of the rows' edges; `fade` from 0 to 1 for all but the user's."""
        if store is None or not len(rows):
            return np.empty((0, 4), np.float32)
        codes, shades = self.coding(store)
        colours: npt.NDArray[np.float32] = shades[codes[rows]]
        colours[~store.touched[rows], 3] *= 1 - fade
        return colours

    def set_edge_width(self, layer: Shapes) -> None:
        """Give the width to the layer's edges, and to those that the user will draw."""
        box_shapes.set_edge_width(layer, self.edge_width)
        layer.current_edge_width = self.edge_width

    def set_defaults(self, layer: Shapes, store: BoxStore | None) -> None:
        """Class, colour and edge width of the next box that the user draws."""
        if store is None or not len(store.names):
            return
        label = int(np.bincount(store.labels, minlength=1).argmax())
        layer.feature_defaults = store.feature_defaults(label)
        by_type = self.by_type(store)
        colour = UNTYPED_COLOUR if by_type else self.colours_of(store.names)[label]
        # The next box's, not those of what is selected.
        with layer.block_update_properties(), layer.block_thumbnail_update():
            if layer.current_edge_width != self.edge_width:  # napari draws all anew
                layer.current_edge_width = self.edge_width
            if self._next_colour != colour:
                self._next_colour = colour
                layer.current_edge_color = self._next_colour

    def show_labels(self, layer: Shapes, store: BoxStore, rows: RowIndices) -> None:
        """Write class and confidence, or type and probability, at boxes, which are these rows."""
        colours = self.edge_colours(store, rows, 0.0)
        text: dict[str, Any] = {"string": _LABEL_FORMAT, "size": 9, "anchor": "upper_left"}
        if self.by_type(store):
            text["string"] = {"array": _type_labels(store, rows), "default": ""}
        if len(colours):
            text["color"] = {"array": colours, "default": "gray"}
        layer.text = text | {"visible": True}

    def hide_labels(self, layer: Shapes) -> None:
        """Write nothing; to be done before many boxes come, as text takes long."""
        if layer.text.visible:
            layer.text = _NO_LABELS


def _type_labels(store: BoxStore, rows: RowIndices) -> list[str]:
    """Type and probability of each box; class and confidence where it has no type.

    A type that is not the likeliest one is a person's, and stands alone.
    """
    unknown = np.full(len(store), np.nan, np.float32)
    probability = store.columns.get(PROBABILITY_COLUMN, unknown)[rows]
    others = [store.columns.get(f"P({name})", unknown)[rows] for name in store.type_names]
    unsaid = np.isnan(probability) | np.any([p > probability for p in others], axis=0)
    labels = []
    for k, (row, name) in enumerate(zip(rows.tolist(), store.types_of(rows), strict=True)):
        if not name:
            labels.append(f"{store.names[store.labels[row]]} {store.scores[row]:.2f}")
        else:
            labels.append(str(name) if unsaid[k] else f"{name} {probability[k]:.2f}")
    return labels


class EditListener:
    """Tracks the user's edits of a layer and commits them to the box store before a redraw.

    `edited` stays true once the user moved, added or relabelled anything. `changed` is called when
    the user did something, `selected(row)` when one box was selected.
    """

    def __init__(
        self, drawn: DrawnBoxes, changed: Callable[[], None], selected: Callable[[int], None]
    ) -> None:
        self.edited = False
        self._drawn, self._changed, self._selected = drawn, changed, selected
        self._dirty = False

    def set_connected(self, connected: bool) -> None:
        """Connect to the layer's events, or disconnect from them."""
        layer = self._drawn.layer
        connections: list[Connection] = [
            (layer.events.data, self._data_changed),
            (layer.events.features, self._features_changed),
            (layer.selected_data.events.items_changed, self._selection_changed),
        ]
        for emitter, method in connections:
            (emitter.connect if connected else emitter.disconnect)(method)

    def commit(self, force: bool = False) -> None:
        """Commit what the user changed in the layer since it was last drawn.

        `force`: compare even if the layer has sent no event, as a table may be edited in place.
        """
        if (self._dirty or force) and not self._drawn.updating:
            self._dirty = False
            self.edited |= self._drawn.commit_edits()

    def _data_changed(self, event: Any) -> None:
        finished = event.action in (ActionType.ADDED, ActionType.REMOVED, ActionType.CHANGED)
        if finished and not self._drawn.updating:
            self.edited = self._dirty = True
            self._changed()

    def _features_changed(self, event: Any = None) -> None:
        if not self._drawn.updating:
            self._dirty = True
            self._changed()

    def _selection_changed(self, added: Any, removed: Any) -> None:
        row = self._drawn.selected_row
        if not self._drawn.updating and row is not None:
            self._selected(row)
