"""Images made of a fit on demand: reconstructions from some stains, and the residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from napari.layers import Image

from napari_beerlanet.ui.density_arrays import Data, reconstruction_data, residual_data
from napari_beerlanet.ui.fitting import Fitted
from napari_beerlanet.ui.layers import mark, spatial
from napari_beerlanet.ui.notices import complain

Make = Callable[[Fitted], Data]
Made = tuple[Data, float]

_LEAST = 0.05  # OD: a smaller residual is noise and shall look like it
_HIGH = 99.8


class MadeLayers:
    """One reconstruction and one residual for each image; made again when the fit changes.

    A layer that the user renamed is the user's: it stays as it is, and the next one is new.
    """

    def __init__(self, panel: Any) -> None:
        self._panel = panel
        self.task = panel.task()
        self._wanted: dict[tuple[Image, str], tuple[str, Make, Image]] = {}

    def reconstruct(self, components: Sequence[int]) -> None:
        """The image from just these components."""
        if not components:
            complain("No stain is ticked: tick those that the image shall be built from.")
            return
        name = "Reconstruction: OD " + " + ".join(str(i + 1) for i in components)
        self._make("reconstruction", name, lambda fitted: _kept(fitted, components))

    def residual(self) -> None:
        """What the model does not explain."""
        self._make("residual", "Residual (OD)", residual_data)

    def follow(self) -> None:
        """Make those of the chosen image again that are there and still ours."""
        source, fitted = self._panel.images.layer, self._panel.fitted
        there = {key: value for key, value in self._wanted.items() if key[0] is source}
        ours = {k: v for k, v in there.items() if self._is_ours(v)}
        if not ours:
            return
        makers = {key[1]: (name, make) for key, (name, make, _) in ours.items()}

        def work(report: Any) -> dict[str, Made]:
            return {role: _made(role, make, fitted) for role, (_, make) in makers.items()}

        def done(made: dict[str, Made]) -> None:
            for role, one in made.items():
                self._put(source, role, *makers[role], one)

        self.task.start(work, done)

    def _make(self, role: str, name: str, make: Make) -> None:
        source, fitted = self._panel.images.layer, self._panel.fitted
        if source is None or fitted is None:
            return
        self.task.start(
            lambda report: _made(role, make, fitted),
            lambda made: self._put(source, role, name, make, made),
        )

    def _put(self, source: Image, role: str, name: str, make: Make, made: Made) -> None:
        data, limit = made
        layers = self._panel.viewer.layers
        if source not in layers:
            return
        last = self._wanted.get((source, role))
        if last is not None and self._is_ours(last) and _takes(last[2], data):
            layer = last[2]
            layer.data = data
            layer.name = name
        else:
            layer = _new(source, role, name, data, limit)
            layers.insert(self._above(source), layer)
        self._wanted[source, role] = layer.name, make, layer

    def _above(self, source: Image) -> int:
        """Above the source and its components."""
        layers, mine = self._panel.viewer.layers, self._panel.layers
        group = [source, *(mine.layers.values() if mine is not None else [])]
        return max(layers.index(layer) for layer in group) + 1

    def _is_ours(self, wanted: tuple[str, Make, Image]) -> bool:
        name, _, layer = wanted
        return layer in self._panel.viewer.layers and layer.name == name


def _kept(fitted: Fitted, components: Sequence[int]) -> Data:
    """A reconstruction; the number of components may have become smaller."""
    r = len(fitted.decomposition.active)
    return reconstruction_data(fitted, [i for i in components if i < r])


def _takes(layer: Image, data: Data) -> bool:
    ndim = (data[0] if isinstance(data, list) else data).ndim
    return ndim == layer.ndim + layer.rgb and isinstance(data, list) == layer.multiscale


def _made(role: str, make: Make, fitted: Fitted) -> Made:
    """The data, and up to where a residual's contrast goes."""
    data = make(fitted)
    if role == "reconstruction":
        return data, 1.0
    # What is lazy has a thumbnail, or one plane, that was fitted.
    d = fitted.decomposition
    known = data if isinstance(data, np.ndarray) else np.linalg.norm(d.residual(), axis=-1)
    return data, max(_LEAST, float(np.percentile(known.ravel()[::16], _HIGH)))


def _new(source: Image, role: str, name: str, data: Data, limit: float) -> Image:
    first = data[-1] if isinstance(data, list) else data
    rgb = role == "reconstruction"
    more: dict[str, Any] = {"rgb": True}
    if not rgb:
        more = {"rgb": False, "colormap": "magma", "contrast_limits": (0.0, limit)}
    planar = first.ndim - rgb < source.ndim
    return Image(
        data,
        name=name,
        multiscale=isinstance(data, list),
        blending="translucent_no_depth",
        metadata=mark(role, source),
        **more,
        **spatial(source, planar=planar),
    )
