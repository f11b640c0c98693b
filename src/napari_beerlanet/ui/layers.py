"""Layers of ours beside the user's: the same place in the world, names, and who made them."""

from __future__ import annotations

from typing import Any

from napari.layers import Image, Layer
from qtpy.QtCore import QSignalBlocker, Signal
from qtpy.QtWidgets import QComboBox, QSizePolicy

from napari_beerlanet.ui.planes import fitting_layers

OWNER = "napari-beerlanet"
"""The key under which a layer's metadata says what we made it for."""


def spatial(layer: Layer, planar: bool = False) -> dict[str, Any]:
    """Keyword arguments that put a layer of the same axes at the same place in the world.

    `planar`: for a layer of the last two axes only.
    """
    keep = slice(-2, None) if planar else slice(None)
    affine = layer.affine.affine_matrix
    if planar and layer.ndim > 2:
        affine = affine[-3:, -3:]
    return {
        "scale": tuple(layer.scale[keep]),
        "translate": tuple(layer.translate[keep]),
        "rotate": layer.rotate[-2:, -2:] if planar else layer.rotate,
        "shear": layer.shear[-1:] if planar else layer.shear,
        "affine": affine,
        "units": tuple(layer.units[keep]),
        "axis_labels": tuple(layer.axis_labels[keep]),
    }


def mark(role: str, source: Layer | None = None, **more: Any) -> dict[str, Any]:
    """Metadata of a layer of ours: its role and the name of the layer that it comes from."""
    return {OWNER: {"role": role, "source": source.name if source else None, **more}}


def role(layer: Layer) -> str | None:
    """What we made a layer for, None where it is the user's own."""
    made = layer.metadata.get(OWNER) if isinstance(layer.metadata, dict) else None
    return made.get("role") if isinstance(made, dict) else None


def add_quietly(viewer: Any, layer: Layer) -> None:
    """Add a layer that only shows something: on top, not editable, and not the active one.

    napari makes every new layer the active one, which takes as long as adding it.
    """
    layers = viewer.layers
    selected, active = set(layers.selection), layers.selection.active
    selects, layers._activate_on_insert = getattr(layers, "_activate_on_insert", True), False
    try:
        viewer.add_layer(layer)
    finally:
        layers._activate_on_insert = selects
    layer.editable = False
    if set(layers.selection) != selected:
        layers.selection = selected
        layers.selection.active = active


def put_above(viewer: Any, layer: Layer, source: Layer) -> None:
    """Move a layer that was just added directly above its source, if that still is there."""
    if source in viewer.layers and layer in viewer.layers:
        viewer.layers.move(viewer.layers.index(layer), viewer.layers.index(source) + 1)


class ImageChoice(QComboBox):
    """The viewer's fitting images to choose from; follows layers that come, go or are renamed.

    `chosen` tells the layer, or None when there is none. A new image is not chosen by itself,
    unless there was none before.
    """

    chosen = Signal(object)

    def __init__(self, panel: Any) -> None:
        super().__init__()
        self.setToolTip("The image to work on: a colour layer of this viewer.")
        self.setSizePolicy(QSizePolicy.Policy.Expanding, QSizePolicy.Policy.Fixed)
        self.setMinimumContentsLength(12)
        self.setSizeAdjustPolicy(QComboBox.SizeAdjustPolicy.AdjustToMinimumContentsLengthWithIcon)
        self._viewer, self._panel = panel.viewer, panel
        self._layers: list[Image] = []
        self._layer: Image | None = None
        self._names = Renames(panel, self._refresh)
        self.currentIndexChanged.connect(self._choose)
        self._refresh()

    @property
    def layer(self) -> Image | None:
        """The chosen layer."""
        return self._layer

    def choose(self, layer: Image) -> None:
        """Choose one of the offered layers."""
        if layer in self._layers:
            self.setCurrentIndex(self._layers.index(layer))

    def _refresh(self) -> None:
        self._layers = [made for made in fitting_layers(self._viewer) if role(made) is None]
        blocker = QSignalBlocker(self)
        self.clear()
        self.addItems([layer.name for layer in self._layers])
        kept = self._layer in self._layers
        index = self._layers.index(self._layer) if kept else len(self._layers) - 1
        self.setCurrentIndex(index)
        self.setEnabled(bool(self._layers))
        blocker.unblock()
        if not kept:
            self._choose(index)

    def _choose(self, index: int) -> None:
        layer = self._layers[index] if 0 <= index < len(self._layers) else None
        if layer is not self._layer:
            self._layer = layer
            self.chosen.emit(layer)


class Renames:
    """Calls back when layers come, go or are renamed, for as long as the panel lives."""

    def __init__(self, panel: Any, changed: Any) -> None:
        self._panel, self._changed = panel, changed
        layers = panel.viewer.layers
        panel.listen(layers.events.inserted, self._inserted)
        panel.listen(layers.events.removed, self._removed)
        for layer in layers:
            panel.listen(layer.events.name, self._told)

    def _inserted(self, event: Any) -> None:
        self._panel.listen(event.value.events.name, self._told)
        self._told(event)

    def _removed(self, event: Any) -> None:
        self._panel.unlisten(event.value.events.name, self._told)
        self._told(event)

    def _told(self, event: Any = None) -> None:
        self._changed()
