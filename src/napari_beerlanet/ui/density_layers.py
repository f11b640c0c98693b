"""The layers of one image's components: added once, then updated in place."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from napari.layers import Image
from qtpy.QtCore import QTimer

from napari_beerlanet.ui.component_layer import ComponentLayer, Limits, Look, component_name
from napari_beerlanet.ui.density_arrays import Data
from napari_beerlanet.ui.fitting import Fitted
from napari_beerlanet.ui.gl_guard import guard_software_opengl
from napari_beerlanet.ui.stain_maps import forget_unused

_TIDY_AFTER = 1500  # milliseconds without a change, until empty layers go


class DensityLayers:
    """The layers of one source.

    They lie directly above it, the first component on top. Opaque ones are seen one at a time;
    multiplied ones, as dyes lie in the slide, and added ones all together and without the source.
    Adding a layer takes napari long, so there is one at each turn of the event loop.
    """

    def __init__(
        self,
        viewer: Any,
        source: Image,
        parent: Any,
        look: Look = "opaque",
        seen: Callable[[], None] = lambda: None,
    ) -> None:
        """`seen` is called when other layers are visible than before."""
        guard_software_opengl(viewer)  # components that are no longer needed are removed
        self._viewer, self.source, self.look, self._seen = viewer, source, look, seen
        self._ours: dict[int, ComponentLayer] = {}
        self._unwanted: set[int] = set()
        self._busy = self._source_hidden = False
        self._largest = 0
        self._waiting: list[Callable[[], None]] = []
        self._turn = _timer(parent, 0, self._next)
        self._tidy = _timer(parent, _TIDY_AFTER, self.tidy)
        self._tidy.setSingleShot(True)

    @property
    def layers(self) -> dict[int, Image]:
        """The layers that are in the viewer, by component."""
        there = self._viewer.layers
        return {i: ours.layer for i, ours in self._ours.items() if ours.layer in there}

    @property
    def shown(self) -> set[int]:
        """Components whose layers are visible."""
        return {i for i, layer in self.layers.items() if layer.visible}

    @property
    def settled(self) -> bool:
        """Whether all layers are there."""
        return not self._waiting

    def show(self, fitted: Fitted, data: list[Data], anew: bool = False) -> None:
        """Update the layers that are there; those that are not will be added.

        A layer that the user took away stays away, unless all is done `anew`.
        """
        self._notice_removed(anew)
        self._waiting.clear()
        d, limits = fitted.decomposition, (0.0, fitted.limit)
        fading: dict[int, Data | None] = {}
        with self._quietly():
            for i in list(self._ours):
                if i < len(d.active) and not self._ours[i].takes(data[i]):
                    self._give_up(i)
                elif i < len(d.active) and d.active[i]:
                    name = component_name(i, d.share[i])
                    self._ours[i].follow(data[i], name, d.colours[i], limits, self._viewer)
                else:
                    fading[i] = data[i] if i < len(d.active) else None
        self._line_up(fitted, data, limits, set(fading))
        if self._waiting:  # until what comes in their place is there, or the image would flash up
            self._waiting.append(lambda: self._fade(fading))
        else:
            self._fade(fading)
        forget_unused(self._viewer)
        self._tidy.start()

    def _fade(self, empty: dict[int, Data | None]) -> None:
        """Hide layers of components that are no longer."""
        with self._quietly():
            for i, data in empty.items():
                if i in self._ours:
                    self._ours[i].fade(data, component_name(i, 0.0, False))

    def _line_up(self, fitted: Fitted, data: list[Data], limits: Limits, fading: set[int]) -> None:
        """Have the missing layers added, the largest share first, and that one visible."""
        d = fitted.decomposition
        some = bool(self.shown - fading)
        self._largest = int(d.share.argmax())
        for i in sorted(range(len(d.active)), key=lambda i: -d.share[i]):
            if d.active[i] and i not in self._ours and i not in self._unwanted:
                name, colour = component_name(i, d.share[i]), d.colours[i]
                args = (i, data[i], name, colour, limits)
                visible = self.look != "opaque" or not some
                self._waiting.append(lambda args=args, visible=visible: self._add(*args, visible))
                some = True
        if self._waiting:
            self._turn.start()

    def set_look(self, look: Look) -> None:
        """Opaque, multiplicative or additive, with the colormaps that belong to it."""
        self.look = look
        living = {i: ours for i, ours in self._ours.items() if ours.alive}
        with self._quietly():
            for i, ours in living.items():
                ours.set_look(look)
                ours.see(look != "opaque" or i == self._largest)
            self._see_source(look == "opaque" or not living)
        forget_unused(self._viewer)

    def show_only(self, component: int) -> None:
        """Show this component alone, or the image itself where it already was alone."""
        alone = self.shown == {component}
        with self._quietly():
            for i, ours in self._ours.items():
                ours.see(i == component and not alone)
            self._see_source(alone or self.look == "opaque")

    def tidy(self) -> None:
        """Take layers away that have become empty and that nobody touched."""
        with self._quietly():
            for i in [i for i, ours in self._ours.items() if not ours.alive and not ours.touched]:
                self._give_up(i)
        forget_unused(self._viewer)

    def finish(self) -> None:
        """Add at once all that waits for its turn."""
        while self._waiting:
            self._next()

    def close(self) -> None:
        """Nothing more is added or followed; layers stay."""
        self._waiting.clear()
        self._turn.stop()
        self._tidy.stop()
        for ours in self._ours.values():
            self._disconnect(ours.layer)
        self._ours.clear()

    def _next(self) -> None:
        if self._waiting and self.source in self._viewer.layers:
            self._waiting.pop(0)()
            return
        self._waiting.clear()
        self._turn.stop()

    def _add(
        self, i: int, data: Data, name: str, colour: Any, limits: Limits, visible: bool
    ) -> None:
        users = next((ours for ours in self._ours.values() if ours.contrast_is_users), None)
        if users is not None:
            limits = tuple(users.layer.contrast_limits)
        made = ComponentLayer(self.source, i, data, name, colour, limits, self.look, visible)
        made.contrast_is_users = users is not None
        with self._quietly():
            self._insert(i, made.layer)
            if self.look != "opaque":
                self._see_source(False)
        made.accept_name()
        self._ours[i] = made
        made.layer.events.contrast_limits.connect(self._contrast_moved)
        made.layer.events.visible.connect(self._visible_changed)
        self._seen()

    def _insert(self, i: int, layer: Image) -> None:
        layers = self._viewer.layers
        selected, active = set(layers.selection), layers.selection.active
        below = [layers.index(other) for k, other in self.layers.items() if k > i]
        # Selecting each new layer, and then what was selected before, takes as long as adding it.
        selects, layers._activate_on_insert = getattr(layers, "_activate_on_insert", True), False
        try:
            layers.insert(max([layers.index(self.source), *below]) + 1, layer)
        finally:
            layers._activate_on_insert = selects
        if set(layers.selection) != selected:
            layers.selection = selected
            layers.selection.active = active

    def _give_up(self, i: int) -> None:
        """Forget a layer, and take it away unless the user touched it."""
        ours = self._ours.pop(i)
        self._disconnect(ours.layer)
        if not ours.touched and ours.layer in self._viewer.layers:
            self._viewer.layers.remove(ours.layer)

    def _notice_removed(self, anew: bool) -> None:
        gone = [i for i, ours in self._ours.items() if ours.layer not in self._viewer.layers]
        for i in gone:
            self._give_up(i)
        self._unwanted = set() if anew else self._unwanted | set(gone)

    def _see_source(self, visible: bool) -> None:
        """Hide the source where it would cover or outshine its components; never for good."""
        if self.source.visible and not visible:
            self.source.visible, self._source_hidden = False, True
        elif visible and self._source_hidden:
            self.source.visible, self._source_hidden = True, False

    def _disconnect(self, layer: Image) -> None:
        layer.events.contrast_limits.disconnect(self._contrast_moved)
        layer.events.visible.disconnect(self._visible_changed)

    def _visible_changed(self, event: Any = None) -> None:
        self._seen()

    def _contrast_moved(self, event: Any) -> None:
        """The user moved one contrast slider: it is the scale of all."""
        if self._busy:
            return
        with self._quietly():
            for ours in self._ours.values():
                ours.layer.contrast_limits = event.source.contrast_limits
                ours.contrast_is_users = True

    @contextmanager
    def _quietly(self) -> Iterator[None]:
        """While we change layers, what they tell is not the user's doing."""
        before, self._busy = self._busy, True
        try:
            yield
        finally:
            self._busy = before


def _timer(parent: Any, interval: int, call: Callable[[], None]) -> QTimer:
    timer = QTimer(parent)
    timer.setInterval(interval)
    timer.timeout.connect(call)
    return timer
