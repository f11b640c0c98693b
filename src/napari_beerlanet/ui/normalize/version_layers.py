"""The layers of Compare normalizations: one for each method and image."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from napari.layers import Image

from napari_beerlanet.core.normalization.methods import METHODS, TRAINED_METHODS
from napari_beerlanet.ui.detections.image_detections import detection_layer_of
from napari_beerlanet.ui.normalize.job import LayerData, MethodResult
from napari_beerlanet.ui.viewer.layers import (
    NAME_SEPARATOR,
    Role,
    add_hidden,
    grid_transform,
    is_made_from,
    own_metadata,
    role_metadata,
    role_of,
    transform_kwargs,
)
from napari_beerlanet.ui.viewer.planes import PlaneIndex

if TYPE_CHECKING:
    from napari import Viewer

_LINKED = (
    *("scale", "translate", "rotate", "shear", "affine"),
    *("contrast_limits", "gamma", "interpolation2d"),
)
"""What layers of one image share: place and contrast, not the visibility, as one looks at them in
turn."""


class NormalizedLayers:
    """The normalized versions of images: one layer for each method, updated by the next run.

    A layer that the user has renamed is the user's own: it is neither updated nor removed.
    """

    def __init__(self, viewer: Viewer) -> None:
        self._viewer = viewer

    def of(self, source: Image) -> dict[str, Image]:
        """The layers of an image by method, in the order of napari's list."""
        return {
            str(own_metadata(layer.metadata).get("method")): layer
            for layer in self._viewer.layers
            if isinstance(layer, Image)
            and role_of(layer) == Role.NORMALIZED
            and is_made_from(layer, source)
            and layer.name == _layer_name(layer, source)
        }

    def method_of(self, layer: Image | None) -> str:
        """The method that a layer was made with, "" where it is none of ours."""
        if layer is None or role_of(layer) != Role.NORMALIZED:
            return ""
        return str(own_metadata(layer.metadata).get("method", ""))

    def put(self, source: Image, result: MethodResult, index: PlaneIndex) -> Image:
        """Show a result: in the method's layer, or in a new one above the others."""
        data = _with_plane_axes(result.data, len(index))
        place = transform_kwargs(source)
        if index:
            place |= grid_transform(source, 1, index)
        there = self.of(source)
        layer = there.get(result.method)
        if layer is not None and _can_show(layer, data):
            layer.data = data
            layer.translate = place["translate"]
            return layer
        if layer is not None:
            self._viewer.layers.remove(layer)
        layer = Image(
            data,
            name=f"{result.label}{NAME_SEPARATOR}{source.name}",
            rgb=True,
            multiscale=isinstance(data, list),
            metadata=role_metadata(Role.NORMALIZED, source, method=result.method),
            **place,
        )
        others = [one for one in there.values() if one in self._viewer.layers]
        add_hidden(self._viewer, layer, above=others[-1] if others else source)
        return layer

    def link(self, source: Image) -> None:
        """Let the versions of an image follow when it is moved or scaled."""
        layers = [source, *self.of(source).values()]
        if len(layers) > 1 and source.ndim == 2:  # planes of a stack are at places of their own
            self._viewer.layers.link_layers(layers, _LINKED)

    def remove(self, source: Image, keep: Sequence[str] = ()) -> None:
        """Remove the versions of an image, but not those of some methods.

        Boxes that were found in them go with them, unless the user has edited them.
        """
        for method, layer in self.of(source).items():
            if method not in keep:
                boxes = detection_layer_of(self._viewer, layer)
                if boxes is not None and not boxes.edited:
                    self._viewer.layers.remove(boxes.layer)
                self._viewer.layers.remove(layer)


def _layer_name(layer: Image, source: Image) -> str:
    """The name that we give a version of an image."""
    method = str(own_metadata(layer.metadata).get("method"))
    known = METHODS | TRAINED_METHODS
    label = known[method].label if method in known else method
    return f"{label}{NAME_SEPARATOR}{source.name}"


def _with_plane_axes(data: LayerData, leading: int) -> LayerData:
    """The data with the leading axes of a stack, each of length 1."""
    if isinstance(data, list):
        return [_with_plane_axes(level, leading) for level in data]
    return data[(None,) * leading] if leading else data


def _can_show(layer: Image, data: LayerData) -> bool:
    """Whether a layer can take the data, or a new one is needed."""
    ndim = data[0].ndim if isinstance(data, list) else data.ndim
    return bool(layer.multiscale) == isinstance(data, list) and layer.ndim + 1 == ndim
