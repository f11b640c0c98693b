"""The density layers of an image's stain components: added once, then updated in place.

What we set on a layer follows the fit; what the user set on it stays.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import numpy.typing as npt
from napari.layers import Image
from napari.utils.colormaps import AVAILABLE_COLORMAPS, Colormap
from qtpy.QtCore import QObject, QTimer

from napari_beerlanet.core.common.messages import format_percent
from napari_beerlanet.core.images.rgb import hex_colour
from napari_beerlanet.core.stains.decomposition import Decomposition
from napari_beerlanet.ui.stains.fitting import FitResult, LayerData
from napari_beerlanet.ui.viewer.layers import (
    Role,
    UpdateGuard,
    add_unselected,
    guard_software_opengl,
    hide_with_source,
    is_stepped_back,
    role_metadata,
    transform_kwargs,
)

if TYPE_CHECKING:
    from napari import Viewer

Blending = Literal["opaque", "multiplicative", "additive"]
ContrastLimits = tuple[float, float]

_CONTRAST_HEADROOM = 1.5  # of the contrast slider above the limit
_COLOUR_TOLERANCE = 2  # grey levels, which nobody sees
_COLORMAP_STEPS = 33
DYE_PREFIX, GLOW_PREFIX = "dye #", "glow #"
"""How the names of our colormaps begin; their colour follows."""

_CLEANUP_DELAY_MS = 1500  # without a change, until empty layers are removed


class DensityLayers:
    """The density layers of one source image.

    They lie directly above it, the largest share on top. Opaque ones are visible one at a time;
    multiplied ones (as dyes in the slide) and added ones all together and without the source.
    Adding a layer takes napari long, so one is added at each turn of the event loop.
    """

    def __init__(
        self,
        viewer: Viewer,
        source: Image,
        parent: QObject,
        blending: Blending = "opaque",
        visible_changed: Callable[[], None] = lambda: None,
    ) -> None:
        """`visible_changed` is called when other layers are visible than before."""
        guard_software_opengl(viewer)  # as layers are removed
        self._viewer, self.source, self.blending = viewer, source, blending
        self._notify_visible = visible_changed
        self._components: dict[int, ComponentLayer] = {}
        self._removed_by_user: set[int] = set()
        self._updating, self._source_hidden = UpdateGuard(), False
        self._largest_component = 0
        self._order: list[int] = []  # of all components, the largest share first
        self._waiting: list[Callable[[], None]] = []
        self._add_timer = _new_timer(parent, 0, self._next)
        self._cleanup_timer = _new_timer(parent, _CLEANUP_DELAY_MS, self.remove_empty_layers)
        self._cleanup_timer.setSingleShot(True)

    @property
    def layers(self) -> dict[int, Image]:
        """The layers that are in the viewer, by component."""
        there = self._viewer.layers
        return {i: one.layer for i, one in self._components.items() if one.layer in there}

    @property
    def visible_components(self) -> set[int]:
        """Components whose layers are visible."""
        return {i for i, layer in self.layers.items() if layer.visible}

    @property
    def complete(self) -> bool:
        """Whether all layers have been added."""
        return not self._waiting

    def show(self, fitted: FitResult, data: list[LayerData], restore: bool = False) -> None:
        """Update the existing layers and add those that are missing.

        Layers that the user has removed stay removed, unless `restore`.
        """
        self._track_removed_layers(restore)
        self._waiting.clear()
        d, limits = fitted.decomposition, (0.0, fitted.limit)
        fading: dict[int, LayerData | None] = {}
        with self._updating:
            for i in list(self._components):
                if i < len(d.active) and not self._components[i].can_show(data[i]):
                    self._drop_layer(i)
                elif i < len(d.active) and d.active[i]:
                    name = stain_layer_name(d, i)
                    self._components[i].update(data[i], name, d.colours[i], limits, self._viewer)
                else:
                    fading[i] = data[i] if i < len(d.active) else None
        self._queue_missing_layers(fitted, data, limits, set(fading))
        if self._waiting:  # fade after the new ones are there, or the image would flash up
            self._waiting.append(lambda: self._fade(fading))
        else:
            self._fade(fading)
        remove_unused_colormaps(self._viewer)
        self._cleanup_timer.start()

    def _fade(self, empty: dict[int, LayerData | None]) -> None:
        """Hide the layers of components that have become inactive."""
        with self._updating:
            for i, data in empty.items():
                if i in self._components:
                    self._components[i].fade(data)

    def _queue_missing_layers(
        self, fitted: FitResult, data: list[LayerData], limits: ContrastLimits, fading: set[int]
    ) -> None:
        """Queue the missing layers, the largest fraction first, and make that one visible."""
        d = fitted.decomposition
        some = bool(self.visible_components - fading)
        self._largest_component = int(d.share.argmax())
        self._order = np.argsort(-d.share, kind="stable").tolist()
        self._order += [i for i in self._components if i >= len(d.active)]
        for i in d.order:
            if i not in self._components and i not in self._removed_by_user:
                name, colour = stain_layer_name(d, i), d.colours[i]
                visible = self.blending != "opaque" or not some
                self._waiting.append(partial(self._add, i, data[i], name, colour, limits, visible))
                some = True
        if self._waiting:
            self._add_timer.start()

    def set_blending(self, blending: Blending) -> None:
        """Set the blending of all layers, with the matching colormaps."""
        self.blending = blending
        active = {i: one for i, one in self._components.items() if one.active}
        with self._updating:
            for i, component in active.items():
                component.set_blending(blending)
                component.set_visible(blending != "opaque" or i == self._largest_component)
            self._set_source_visible(blending == "opaque" or not active)
        remove_unused_colormaps(self._viewer)

    def rename(self, d: Decomposition) -> None:
        """The stains have other names now; a layer that the user has renamed keeps its own."""
        with self._updating:
            for i in d.order:
                if i in self._components:
                    self._components[i].update_name(stain_layer_name(d, i))

    def show_only(self, index: int) -> None:
        """Show this component alone, or the image itself if it was alone already."""
        alone = self.visible_components == {index}
        with self._updating:
            for i, component in self._components.items():
                component.set_visible(i == index and not alone)
            self._set_source_visible(alone or self.blending == "opaque")

    def remove_empty_layers(self) -> None:
        """Remove layers of inactive components that the user has not edited."""
        with self._updating:
            for i, component in list(self._components.items()):
                if not component.active and not component.edited_by_user:
                    self._drop_layer(i)
        remove_unused_colormaps(self._viewer)

    def finish(self) -> None:
        """Add all queued layers now."""
        while self._waiting:
            self._next()

    def close(self) -> None:
        """Stop adding and updating; layers stay."""
        self._waiting.clear()
        self._add_timer.stop()
        self._cleanup_timer.stop()
        for component in self._components.values():
            self._disconnect(component.layer)
        self._components.clear()

    def _next(self) -> None:
        if self._waiting and self.source in self._viewer.layers:
            self._waiting.pop(0)()
            return
        self._waiting.clear()
        self._add_timer.stop()

    def _add(
        self, i: int, data: LayerData, name: str, colour: Any, limits: ContrastLimits, visible: bool
    ) -> None:
        others = self._components.values()
        users = next((one for one in others if one.contrast_set_by_user), None)
        if users is not None:
            limits = tuple(users.layer.contrast_limits)
        new = ComponentLayer(self.source, i, data, name, colour, limits, self.blending, visible)
        new.contrast_set_by_user = users is not None
        with self._updating:
            self._insert(i, new.layer)
            if self.blending != "opaque":
                self._set_source_visible(False)
        new.accept_name()
        if visible:
            hide_with_source(self._viewer, new.layer)
        self._components[i] = new
        new.layer.events.contrast_limits.connect(self._contrast_changed)
        new.layer.events.visible.connect(self._visible_changed)
        self._notify_visible()

    def _insert(self, i: int, layer: Image) -> None:
        layers = self._viewer.layers
        rank = {k: place for place, k in enumerate(self._order)}
        below = [layers.index(other) for k, other in self.layers.items() if rank[k] > rank[i]]
        position = max([layers.index(self.source), *below]) + 1
        add_unselected(self._viewer, layer, position=position)

    def _drop_layer(self, i: int) -> None:
        """Stop updating a layer, and remove it unless the user has edited it."""
        component = self._components.pop(i)
        self._disconnect(component.layer)
        if not component.edited_by_user and component.layer in self._viewer.layers:
            self._viewer.layers.remove(component.layer)

    def _track_removed_layers(self, restore: bool) -> None:
        layers = self._viewer.layers
        gone = [i for i, one in self._components.items() if one.layer not in layers]
        for i in gone:
            self._drop_layer(i)
        self._removed_by_user = set() if restore else self._removed_by_user | set(gone)

    def _set_source_visible(self, visible: bool) -> None:
        """Hide the source while it would cover or outshine its components."""
        if self.source.visible and not visible:
            self.source.visible, self._source_hidden = False, True
        elif visible and self._source_hidden:
            self.source.visible, self._source_hidden = True, False

    def _disconnect(self, layer: Image) -> None:
        layer.events.contrast_limits.disconnect(self._contrast_changed)
        layer.events.visible.disconnect(self._visible_changed)

    def _visible_changed(self, event: Any = None) -> None:
        self._notify_visible()

    def _contrast_changed(self, event: Any) -> None:
        """The user moved one contrast slider: all layers share its limits."""
        if self._updating:
            return
        with self._updating:
            for component in self._components.values():
                component.layer.contrast_limits = event.source.contrast_limits
                component.contrast_set_by_user = True


class ComponentLayer:
    """The layer of one component and what we last set on it; what differs is the user's edit."""

    def __init__(
        self,
        source: Image,
        index: int,
        data: LayerData,
        name: str,
        colour: npt.ArrayLike,
        limits: ContrastLimits,
        blending: Blending,
        visible: bool,
    ) -> None:
        self.active, self.blending = True, blending
        self.contrast_set_by_user = False
        self._visible_before_fading: bool | None = None
        self._colour = np.asarray(colour, int)
        self.layer = Image(
            data,
            rgb=False,
            multiscale=isinstance(data, list),
            name=name,
            colormap=cast(Any, self._matching_colormap),  # napari's type names only strings
            contrast_limits=limits,
            blending=blending,
            visible=visible,
            metadata=role_metadata(Role.STAIN_DENSITY, source, component=index),
            **transform_kwargs(source, planar=data_ndim(data) < source.ndim),
        )
        self.layer.contrast_limits_range = (0.0, _CONTRAST_HEADROOM * limits[1])
        self._record_state()

    def _record_state(self) -> None:
        layer = self.layer
        self._name, self._colormap = layer.name, layer.colormap.name
        self._limits, self._visible = tuple(layer.contrast_limits), layer.visible

    @property
    def _matching_colormap(self) -> Colormap:
        return (glow_colormap if self.blending == "additive" else dye_colormap)(self._colour)

    @property
    def edited_by_user(self) -> bool:
        """Whether the user has changed its name, colormap, contrast or visibility."""
        layer = self.layer
        return (
            layer.name != self._name
            or layer.colormap.name != self._colormap
            or self.contrast_set_by_user
            or (layer.visible != self._visible and not is_stepped_back(layer))
        )

    def accept_name(self) -> None:
        """The name is not an edit of the user's if napari has appended a number to it."""
        self._name = self.layer.name

    def can_show(self, data: LayerData) -> bool:
        """Whether the layer can take the data, or a new one is needed."""
        same = isinstance(data, list) == self.layer.multiscale
        return same and data_ndim(data) == self.layer.ndim

    def update(
        self,
        data: LayerData,
        name: str,
        colour: npt.ArrayLike,
        limits: ContrastLimits,
        viewer: Viewer | None = None,
    ) -> None:
        """Show the component of a new fit."""
        self._update_data(data, viewer)
        self.update_name(name)
        if np.abs(np.asarray(colour, int) - self._colour).max() > _COLOUR_TOLERANCE:
            self._colour = np.asarray(colour, int)
            self._update_colormap()
        self.update_contrast(limits)
        if not self.active and self._visible_before_fading is not None and not self.layer.visible:
            self.set_visible(self._visible_before_fading)
        self.active = True

    def fade(self, data: LayerData | None) -> None:
        """The component has become inactive: hide it, unless the user has edited it."""
        if not self.active:
            return
        keep = self.edited_by_user
        if data is not None:
            self._update_data(data)
        self.update_name(f"{self._name.partition(' · ')[0]} · inactive")
        self._visible_before_fading = self.layer.visible
        if not keep:
            self.set_visible(False)
        self.active = False

    def update_contrast(self, limits: ContrastLimits) -> None:
        """Set the contrast limits, unless they are the user's."""
        if not self.contrast_set_by_user and limits != self._limits:
            self.layer.contrast_limits_range = (0.0, _CONTRAST_HEADROOM * limits[1])
            self.layer.contrast_limits = limits
            self._limits = tuple(self.layer.contrast_limits)

    def set_blending(self, blending: Blending) -> None:
        """Set the blending, with the matching colormap."""
        self.blending = self.layer.blending = blending
        self._update_colormap()

    def set_visible(self, visible: bool) -> None:
        """Show or hide the layer."""
        self.layer.visible = self._visible = visible

    def _update_data(self, data: LayerData, viewer: Viewer | None = None) -> None:
        """Replace the data; if the shape is the same, the viewer need not update its axes."""
        axes = getattr(viewer, "_on_layers_change", None)
        same = not isinstance(data, list) and data.shape == self.layer.data.shape
        if axes is None or not same:
            self.layer.data = data
            return
        with self.layer.events.data.blocker(axes):
            self.layer.data = data

    def update_name(self, name: str) -> None:
        """Set the name, unless it is the user's."""
        if self.layer.name == self._name and name != self._name:
            self.layer.name = name
            self._name = self.layer.name  # napari makes it unique

    def _update_colormap(self) -> None:
        new = self._matching_colormap
        if self.layer.colormap.name == self._colormap != new.name:
            self.layer.colormap = new
            self._colormap = self.layer.colormap.name


def stain_layer_name(d: Decomposition, component: int) -> str:
    """The name of a stain's layer: "Stain 1 · 62 %", "eosin · 38 %"."""
    return f"{d.labels[component]} · {format_percent(d.share[component])}"


def data_ndim(data: LayerData) -> int:
    """The number of dimensions of layer data."""
    return int(data[0].ndim if isinstance(data, list) else data.ndim)


def _new_timer(parent: QObject, interval: int, call: Callable[[], None]) -> QTimer:
    timer = QTimer(parent)
    timer.setInterval(interval)
    timer.timeout.connect(call)
    return timer


def dye_colormap(colour: npt.ArrayLike) -> Colormap:
    """From white to the RGB colour (0 … 255), linear in optical density."""
    at = np.linspace(0, 1, _COLORMAP_STEPS)[:, None]
    rgb = (np.maximum(np.asarray(colour, float), 1) / 255)[None] ** at
    return _named_colormap(DYE_PREFIX, colour, rgb)


def glow_colormap(colour: npt.ArrayLike) -> Colormap:
    """From black to the colour's hue at full brightness, for additive blending."""
    hue = np.asarray(colour, float)
    hue = hue - 0.6 * hue.min()  # the common part of all channels would only turn the sum grey
    rgb = np.linspace(0, 1, _COLORMAP_STEPS)[:, None] * (hue / max(hue.max(), 1))[None]
    return _named_colormap(GLOW_PREFIX, colour, rgb)


def _named_colormap(prefix: str, colour: npt.ArrayLike, rgb: npt.NDArray[np.float64]) -> Colormap:
    opaque = np.ones((len(rgb), 1))
    return Colormap(np.hstack([rgb, opaque]), name=prefix + hex_colour(colour)[1:])


def remove_unused_colormaps(viewer: Viewer) -> None:
    """Remove our colormaps that no layer uses from napari's list.

    napari keeps every colormap that a layer ever had; a moved slider would fill the list.
    """
    used = {getattr(getattr(layer, "colormap", None), "name", None) for layer in viewer.layers}
    for name in [
        name for name in AVAILABLE_COLORMAPS if name.startswith((DYE_PREFIX, GLOW_PREFIX))
    ]:
        if name not in used:
            AVAILABLE_COLORMAPS.pop(name, None)
