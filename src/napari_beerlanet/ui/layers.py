"""The only place that makes napari layers: densities and RGB images, updated in place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from napari.components import ViewerModel
from napari.layers import Image, Layer
from napari.utils.colormaps import Colormap

from napari_beerlanet.core.results import percent

from .planes import KEY, Plane

_COLOURMAP = "stain #"
_SHADES = 64
_SAME = 12  # of 255: below, a colormap stays, as each new one stays in napari's list for ever


def stain_colormap(colour: Sequence[int] | npt.NDArray[Any]) -> Colormap:
    """White to the colour, as more and more of the stain would look."""
    name = _COLOURMAP + "".join(f"{int(c):02x}" for c in colour)
    dark = np.maximum(np.asarray(colour, dtype=float) / 255, 1 / 255)
    shades = dark ** np.linspace(0, 1, _SHADES)[:, None]
    return Colormap(np.column_stack([shades, np.ones(_SHADES)]), name=name, display_name=name)


@dataclass(frozen=True)
class DensityMap:
    """What a density layer is to show: component `number` (from 0) of a decomposition."""

    number: int
    density: Any  # (H, W), or (…, H, W) for a stack; numpy or dask
    colour: npt.NDArray[np.uint8]
    share: float
    active: bool = True

    @property
    def name(self) -> str:
        """As in "OD 1 · 62 %"."""
        return f"OD {self.number + 1} · {percent(self.share) if self.active else 'inactive'}"


def density_layers(viewer: ViewerModel, source_key: str) -> dict[int, Image]:
    """The density layers of a source that are in the viewer, by component."""
    ours = _made_from(viewer, source_key)
    found = {link["component"]: layer for link, layer in ours if link["role"] == "density"}
    return dict(sorted(found.items()))


def show_densities(
    viewer: ViewerModel,
    plane: Plane,
    maps: Sequence[DensityMap],
    limit: float,
    blending: str = "opaque",
    whole_stack: bool = False,
) -> dict[int, Image]:
    """Add or update one layer per map; `limit` is the density in full colour, shared by all.

    What the user changed on a layer (name, colormap, contrast limits, visibility, place in the
    list) stays. An inactive component gets no new layer; a layer it already has shows zeros.
    """
    place = plane.place_of_stack if whole_stack else plane.place
    known = density_layers(viewer, plane.key)
    new = [m for m in maps if m.active and m.number not in known]
    for number in set(known) - {m.number for m in maps}:
        viewer.layers.remove(known.pop(number))
    for shown in maps:
        if shown.number in known:
            _update(known[shown.number], shown, place, limit)
    with _Selection(viewer):
        for shown in sorted(new, key=lambda m: m.share):
            visible = not known and shown is max(new, key=lambda m: m.share)
            layer = _density_layer(plane, shown, place, limit)
            layer.visible, layer.blending = visible, blending
            _insert_above(viewer, plane.key, layer)
            layer.metadata[KEY]["name"] = layer.name
    return density_layers(viewer, plane.key)


def _density_layer(plane: Plane, shown: DensityMap, place: dict[str, Any], limit: float) -> Image:
    link = _link(plane, "density") | {
        "component": shown.number,
        "colour": shown.colour,
        "limits": (0.0, limit),
    }
    layer = Image(
        _lifted(shown.density, len(place["scale"])),
        rgb=False,
        multiscale=False,
        name=shown.name,
        colormap=stain_colormap(shown.colour),
        contrast_limits=(0, limit),
        metadata={KEY: link},
        **place,
    )
    layer.contrast_limits_range = (0, 4 * limit)
    return layer


def _update(layer: Image, shown: DensityMap, place: dict[str, Any], limit: float) -> None:
    link = layer.metadata[KEY]
    layer.data = _lifted(shown.density, len(place["scale"]))
    _move(layer, place)
    if layer.name == link["name"] != shown.name:
        layer.name = shown.name
        link["name"] = layer.name
    ours = layer.colormap.name.startswith(_COLOURMAP)
    if ours and shown.active and _far(link["colour"], shown.colour):
        layer.colormap = stain_colormap(shown.colour)
        link["colour"] = shown.colour
    if np.allclose(layer.contrast_limits, link["limits"]) and link["limits"] != (0.0, limit):
        layer.contrast_limits_range = (0, 4 * limit)
        layer.contrast_limits = (0, limit)
        link["limits"] = (0.0, limit)


def _far(old: npt.NDArray[np.uint8], new: npt.NDArray[np.uint8]) -> bool:
    return bool(np.abs(old.astype(int) - new.astype(int)).max() > _SAME)


def _link(plane: Plane, role: str) -> dict[str, Any]:
    return {"role": role, "source": plane.key, "source name": plane.name}


def _move(layer: Image, place: dict[str, Any]) -> None:
    for name in ("scale", "translate", "rotate", "shear"):
        if not np.array_equal(getattr(layer, name), place[name]):
            setattr(layer, name, place[name])
    if not np.array_equal(layer.affine.affine_matrix, place["affine"]):
        layer.affine = place["affine"]


def show_rgb(viewer: ViewerModel, plane: Plane, role: str, name: str, image: Any) -> Image:
    """Add or update the one RGB layer of this role ("reconstruction", "residual") of a source."""
    data = _lifted(image, len(plane.place["scale"]) + 1)
    for link, layer in _made_from(viewer, plane.key):
        if link["role"] == role and layer.data.dtype == data.dtype:
            layer.data = data
            _move(layer, plane.place)
            if layer.name == link["name"]:
                layer.name = name
                link["name"] = layer.name
            return layer
    layer = Image(data, rgb=True, name=name, metadata={KEY: _link(plane, role)}, **plane.place)
    with _Selection(viewer):
        viewer.add_layer(layer)
    layer.metadata[KEY]["name"] = layer.name
    return layer


def add_sample(viewer: ViewerModel, data: tuple[Any, dict[str, Any], str]) -> Layer:
    """Add a layer as sample data describe it."""
    return viewer.add_layer(Layer.create(*data))


def show_only(viewer: ViewerModel, source_key: str, number: int | None) -> None:
    """Show one component's layer and hide the source's others; None shows the source alone."""
    for other, layer in density_layers(viewer, source_key).items():
        layer.visible = other == number
    for link, layer in _made_from(viewer, source_key):
        if link["role"] != "density":
            layer.visible = False
    for layer in viewer.layers:
        if str(layer.unique_id) == source_key:
            layer.visible = True


def set_blending(viewer: ViewerModel, source_key: str, blending: str) -> None:
    """Of all density layers of a source."""
    for layer in density_layers(viewer, source_key).values():
        layer.blending = blending


def _lifted(data: Any, ndim: int) -> Any:
    """The array with leading axes of length 1 up to `ndim`."""
    return data[(None,) * (ndim - data.ndim)] if data.ndim < ndim else data


def _made_from(viewer: ViewerModel, source_key: str) -> Iterator[tuple[dict[str, Any], Image]]:
    for layer in list(viewer.layers):
        link = layer.metadata.get(KEY)
        if isinstance(layer, Image) and isinstance(link, dict) and link.get("source") == source_key:
            yield link, layer


def _insert_above(viewer: ViewerModel, source_key: str, layer: Image) -> None:
    """Just above the source and what else was made from it; on top where the source is gone."""
    places = [
        i
        for i, other in enumerate(viewer.layers)
        if str(other.unique_id) == source_key
        or other.metadata.get(KEY, {}).get("source") == source_key
    ]
    viewer.layers.insert(max(places) + 1 if places else len(viewer.layers), layer)


class _Selection:
    """Leaves the user's selection of layers as it was."""

    def __init__(self, viewer: ViewerModel) -> None:
        self._layers = viewer.layers

    def __enter__(self) -> None:
        self._before = list(self._layers.selection)

    def __exit__(self, *_: object) -> None:
        kept = [layer for layer in self._before if layer in self._layers]
        self._layers.selection.clear()
        self._layers.selection.update(kept)
