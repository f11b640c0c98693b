"""How boxes look: a colour for each class, edges of one width on the screen, labels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes
from napari.utils.colormaps.standardize_color import transform_color

from napari_beerlanet.core.colours import class_colours
from napari_beerlanet.ui import detection_shapes
from napari_beerlanet.ui.detection_store import BoxStore, Rows
from napari_beerlanet.ui.detection_view import View

_EDGE = 1.5  # pixels of the screen
_SAME = 0.02  # relative difference of widths that nobody sees
_TEXT = "{class} {confidence:.2f}"
_NO_TEXT = {"string": {"constant": ""}, "visible": False}


class Look:
    """The look of one layer's boxes; `colours` are those of the classes, as "#rrggbb"."""

    def __init__(self, colours: Sequence[str] | None, names: Sequence[str]) -> None:
        self.colours = list(colours or class_colours(len(names)))
        self.width = 1.0
        self._drawn_in = ""

    def see(self, view: View | None) -> bool:
        """Take the width for a view, if it is another than before; whether it is."""
        if view is None or abs(_EDGE * view.pixel - self.width) <= _SAME * self.width:
            return False
        self.width = _EDGE * view.pixel
        return True

    def palette(self, store: BoxStore) -> npt.NDArray[np.float32]:
        """(k, 4) RGBA of the classes, from 0 to 1."""
        missing = len(store.names) - len(self.colours)
        if missing > 0:  # classes that the user named
            self.colours += class_colours(len(store.names))[-missing:]
        return np.asarray(transform_color(self.colours), np.float32)

    def edges(self, store: BoxStore | None, rows: Rows, fade: float) -> npt.NDArray[np.float32]:
        """(m, 4) RGBA of the rows' edges; `fade` from 0 to 1 for all but the user's."""
        if store is None or not len(rows):
            return np.empty((0, 4), np.float32)
        colours = self.palette(store)[store.labels[rows]]
        colours[~store.touched[rows], 3] *= 1 - fade
        return colours

    def set_width(self, layer: Shapes) -> None:
        """Give the layer's edges the width, and those that the user will draw."""
        detection_shapes.set_width(layer, self.width)
        layer.current_edge_width = self.width

    def set_defaults(self, layer: Shapes, store: BoxStore | None) -> None:
        """What the next box has that the user draws."""
        if store is None or not len(store.names):
            return
        label = int(np.bincount(store.labels, minlength=1).argmax())
        layer.feature_defaults = store.defaults(label)
        layer.current_edge_width = self.width
        if self._drawn_in != self.colours[label]:
            self._drawn_in = self.colours[label]
            with layer.block_thumbnail_update():
                layer.current_edge_color = self._drawn_in

    def label(self, layer: Shapes, store: BoxStore, rows: Rows) -> None:
        """Write class and confidence at the boxes, which are these rows."""
        colours = self.edges(store, rows, 0.0)
        text: dict[str, Any] = {"string": _TEXT, "size": 9, "anchor": "upper_left"}
        if len(colours):
            text["color"] = {"array": colours, "default": "gray"}
        layer.text = text | {"visible": True}

    def unlabel(self, layer: Shapes) -> None:
        """Write nothing; to be done before many boxes come, as text takes long."""
        if layer.text.visible:
            layer.text = _NO_TEXT
