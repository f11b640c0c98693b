"""Synthetic samples of File › Open Sample, at a scale that fits the layers that are open."""

from __future__ import annotations

import napari

from napari_beerlanet.samples import LayerData, blood_smear_layers, he_field_layers
from napari_beerlanet.ui.viewer.planes import PIXEL_SIZE_KEY, placement_kwargs


def open_synthetic_smear() -> list[LayerData]:
    """A blood smear; its truth is in the layer's metadata."""
    return [_place(layer) for layer in blood_smear_layers()]


def open_synthetic_section() -> list[LayerData]:
    """An H&E section; its truth is in the layer's metadata."""
    return [_place(layer) for layer in he_field_layers()]


def _place(layer: LayerData) -> LayerData:
    data, options, kind = layer
    metadata = options["metadata"]
    placement = placement_kwargs(metadata[PIXEL_SIZE_KEY], napari.current_viewer())
    return data, options | placement | {"metadata": metadata}, kind
