"""One component's layer: what we set on it follows the fit, what the user set stays."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from napari.layers import Image

from napari_beerlanet.core.results import percent
from napari_beerlanet.ui.density_arrays import Data
from napari_beerlanet.ui.layers import mark, spatial
from napari_beerlanet.ui.stain_maps import dye_map, glow_map

Look = Literal["opaque", "multiplicative", "additive"]
Limits = tuple[float, float]

_HEADROOM = 1.5  # of the contrast slider above the limit
_SAME_COLOUR = 2  # grey levels that nobody sees


def component_name(index: int, share: float, active: bool = True) -> str:
    """What a component's layer is called: "OD 1 · 62 %"."""
    return f"OD {index + 1} · {percent(share) if active else 'inactive'}"


def dimensions(data: Data) -> int:
    """Of the layer that shows the data."""
    return int(data[0].ndim if isinstance(data, list) else data.ndim)


class ComponentLayer:
    """A layer and what we last set on it; whatever differs from that is the user's."""

    def __init__(
        self,
        source: Image,
        index: int,
        data: Data,
        name: str,
        colour: npt.ArrayLike,
        limits: Limits,
        look: Look,
        visible: bool,
    ) -> None:
        self.alive, self.look = True, look
        self.contrast_is_users = False
        self._before_fading: bool | None = None
        self._colour = np.asarray(colour, int)
        self.layer = Image(
            data,
            rgb=False,
            multiscale=isinstance(data, list),
            name=name,
            colormap=self._map,
            contrast_limits=limits,
            blending=look,
            visible=visible,
            metadata=mark("density", source, component=index),
            **spatial(source, planar=dimensions(data) < source.ndim),
        )
        self.layer.contrast_limits_range = (0.0, _HEADROOM * limits[1])
        self._remember()

    def _remember(self) -> None:
        layer = self.layer
        self._name, self._colormap = layer.name, layer.colormap.name
        self._limits, self._visible = tuple(layer.contrast_limits), layer.visible

    @property
    def _map(self) -> Any:
        return (glow_map if self.look == "additive" else dye_map)(self._colour)

    @property
    def touched(self) -> bool:
        """Whether the user set something on it."""
        layer = self.layer
        return (
            layer.name != self._name
            or layer.colormap.name != self._colormap
            or self.contrast_is_users
            or layer.visible != self._visible
        )

    def accept_name(self) -> None:
        """The name is ours also where napari had to number it to tell layers apart."""
        self._name = self.layer.name

    def takes(self, data: Data) -> bool:
        """Whether the layer can show the data, or another one is needed."""
        same = isinstance(data, list) == self.layer.multiscale
        return same and dimensions(data) == self.layer.ndim

    def follow(
        self, data: Data, name: str, colour: npt.ArrayLike, limits: Limits, viewer: Any = None
    ) -> None:
        """Show a new fit's component."""
        self._give_data(data, viewer)
        self._give_name(name)
        if np.abs(np.asarray(colour, int) - self._colour).max() > _SAME_COLOUR:
            self._colour = np.asarray(colour, int)
            self._give_colormap()
        self.give_contrast(limits)
        if not self.alive and self._before_fading is not None and not self.layer.visible:
            self.see(self._before_fading)
        self.alive = True

    def fade(self, data: Data | None, name: str) -> None:
        """The component is empty now: hide it, unless the user set something on it."""
        if not self.alive:
            return
        keep = self.touched
        if data is not None:
            self._give_data(data)
        self._give_name(name)
        self._before_fading = self.layer.visible
        if not keep:
            self.see(False)
        self.alive = False

    def give_contrast(self, limits: Limits) -> None:
        """Set the contrast limits, unless they are the user's."""
        if not self.contrast_is_users and limits != self._limits:
            self.layer.contrast_limits_range = (0.0, _HEADROOM * limits[1])
            self.layer.contrast_limits = limits
            self._limits = tuple(self.layer.contrast_limits)

    def set_look(self, look: Look) -> None:
        """Blend in this way, with the colormap that belongs to it."""
        self.look = self.layer.blending = look
        self._give_colormap()

    def see(self, visible: bool) -> None:
        """Show or hide it."""
        self.layer.visible = self._visible = visible

    def _give_data(self, data: Data, viewer: Any = None) -> None:
        """Other pixels in the same place: the viewer need not work its axes out again."""
        axes = getattr(viewer, "_on_layers_change", None)
        same = not isinstance(data, list) and data.shape == self.layer.data.shape
        if axes is None or not same:
            self.layer.data = data
            return
        with self.layer.events.data.blocker(axes):
            self.layer.data = data

    def _give_name(self, name: str) -> None:
        if self.layer.name == self._name and name != self._name:
            self.layer.name = name
            self._name = self.layer.name  # napari makes it unique

    def _give_colormap(self) -> None:
        given = self._map
        if self.layer.colormap.name == self._colormap != given.name:
            self.layer.colormap = given
            self._colormap = self.layer.colormap.name
