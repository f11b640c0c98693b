"""What the canvas shows of a plane's boxes: boxes, how dense they lie, and in words how many."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from napari.layers import Image, Shapes

from napari_beerlanet.ui import detection_shapes
from napari_beerlanet.ui.canvas_words import CanvasWords
from napari_beerlanet.ui.detection_choice import BoxChoice
from napari_beerlanet.ui.detection_heat import FROM, HeatLayer, fade_of
from napari_beerlanet.ui.detection_look import Look
from napari_beerlanet.ui.detection_shown import Shown
from napari_beerlanet.ui.detection_store import BoxStore, Chosen, Rows
from napari_beerlanet.ui.detection_view import View, plane_of, view_of

_FEW = 150  # boxes in view that are labelled


class _Seen(NamedTuple):
    """`rows` to draw, of `near` chosen ones in view, of `total`; how far boxes fade, 0 to 1."""

    rows: Rows
    near: int
    total: int
    fade: float


class Drawing:
    """Draws boxes of one plane at a time into a Shapes layer, and their density below it."""

    def __init__(
        self, viewer: Any, source: Image, layer: Shapes, look: Look, again: Callable[[], None]
    ) -> None:
        """`again` is called when there is more to show than there was at the last `draw`."""
        self.viewer, self.layer = viewer, layer
        self.shown = Shown(layer, look)
        self.heat = HeatLayer(viewer, layer, source, again)
        self.text = False
        self.pinned: int | None = None
        self._words = CanvasWords(viewer)

    def close(self) -> None:
        """The layer is gone."""
        self.heat.close()
        self._words.say("")

    def draw(self, choice: BoxChoice | None, chosen: Chosen) -> str:
        """Show the chosen boxes of a plane, None for one without; in words what is to be seen."""
        view, index = view_of(self.layer, self.viewer), plane_of(self.layer, self.viewer)
        if choice is None:
            self.heat.fade(0)
            self._words.say("")
            self.shown.put(None, np.empty(0, np.int64), view, index)
            return "Nothing was run on this plane."
        self._keep_density(choice, chosen, index)
        seen = self._to_show(choice, chosen, view)
        self.heat.fade(seen.fade)
        self._put(choice.store, seen, view, index)
        words = self._in_words(choice, chosen, seen)
        self._words.say(words if seen.fade > 0 else "")
        return words

    def follow(self, choice: BoxChoice | None, chosen: Chosen) -> str | None:
        """The view moved: draw again, or only make edges as wide as before on the screen."""
        if choice is None or not self._shows_all(choice, chosen):
            return self.draw(choice, chosen)
        self.shown.fit_width(view_of(self.layer, self.viewer))
        return None

    def _shows_all(self, choice: BoxChoice, chosen: Chosen) -> bool:
        """Whether what is chosen is in the layer, wherever the view is."""
        if self.text or not self.shown.holds(choice.store) or self.shown.fade > 0:
            return False
        return len(self.shown.rows) == choice.total(chosen)

    def _keep_density(self, choice: BoxChoice, chosen: Chosen, index: tuple[int, ...]) -> None:
        if choice.total(chosen) > FROM:
            colours = np.rint(255 * self.shown.look.palette(choice.store)[:, :3])
            self.heat.ask(choice, chosen, colours, index)

    def _to_show(self, choice: BoxChoice, chosen: Chosen, view: View | None) -> _Seen:
        most, store = detection_shapes.most(), choice.store
        mask, total = choice.mask(chosen), choice.total(chosen)
        inside = choice.inside(view, chosen)
        if not self.text and total <= most:
            return _Seen(np.flatnonzero(mask), len(inside), total, 0.0)
        dense = view is not None and total > FROM and self.heat.expected(choice)
        fade = fade_of(len(inside), most) if dense else 0.0
        if fade < 1 and not self.heat.shows(choice):
            fade = 0.0
        drawn = inside[store.touched[inside]] if fade == 1 else inside
        pinned = self._pinned_rows(store)
        rows = choice.surest(drawn, pinned[mask[pinned]], most)
        return _Seen(rows, len(inside), total, fade)

    def _pinned_rows(self, store: BoxStore) -> Rows:
        """Rows that stay in the layer wherever the view is: what is selected."""
        rows = self.shown.selected_rows() if self.shown.store is store else []
        if self.pinned is not None and self.pinned < len(store):
            rows = [*rows, self.pinned]
        return np.unique(np.array(rows, np.int64))

    def _put(self, store: BoxStore, seen: _Seen, view: View | None, index: tuple[int, ...]) -> None:
        labelled = self.text and seen.near <= _FEW
        if not labelled:
            self.shown.look.unlabel(self.layer)
        if not labelled and self.shown.holds(store, seen.rows, seen.fade):
            self.shown.fit_width(view)
            return
        self.shown.put(store, seen.rows, view, index, seen.fade)
        if labelled:
            self.shown.look.label(self.layer, store, seen.rows)

    def _in_words(self, choice: BoxChoice, chosen: Chosen, seen: _Seen) -> str:
        if seen.fade > 0:
            exact = view_of(self.layer, self.viewer, margin=0.0)
            count = len(choice.inside(exact, chosen))
            if seen.fade == 1:
                return f"{count:,} cells in view; zoom in to see boxes."
            return f"{count:,} cells in view, the surest with a box; zoom in to see all."
        if len(seen.rows) < seen.near:
            return f"{len(seen.rows):,} of {seen.total:,} shown; zoom in to see all."
        return ""
