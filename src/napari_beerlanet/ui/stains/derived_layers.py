"""Layers computed from a fit on demand: reconstructions from selected stains, and the residual."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from napari.layers import Image

from napari_beerlanet.core.common.progress import Report
from napari_beerlanet.ui.common.notifications import notify_error
from napari_beerlanet.ui.stains.fitting import (
    FitResult,
    LayerData,
    reconstruction_data,
    residual_data,
)
from napari_beerlanet.ui.viewer.layers import (
    Role,
    role_metadata,
    stain_images,
    transform_kwargs,
)

if TYPE_CHECKING:
    from napari.viewer import Viewer

    from napari_beerlanet.ui.common.tasks import Task
    from napari_beerlanet.ui.stains.density_layers import DensityLayers
    from napari_beerlanet.ui.viewer.layers import ImagePicker

MakeData = Callable[[FitResult], LayerData]
DataAndLimit = tuple[LayerData, float]

_MIN_RESIDUAL_LIMIT = 0.05  # OD: smaller residuals are noise and should look like it
_RESIDUAL_PERCENTILE = 99.8


class FittedPanel(Protocol):
    """The panel whose fit the layers are made from."""

    viewer: Viewer
    images: ImagePicker

    @property
    def fitted(self) -> FitResult | None:
        """The last fit of the chosen image."""

    @property
    def layers(self) -> DensityLayers | None:
        """The density layers of the chosen image."""

    def task(self) -> Task:
        """A task that ends with the panel."""
        ...


class DerivedLayers:
    """One reconstruction and one residual per image, updated when the fit changes.

    A layer that the user has renamed is no longer updated; the next one is new.
    """

    def __init__(self, panel: FittedPanel) -> None:
        self._panel = panel
        self._add_task, self._update_task = panel.task(), panel.task()
        self._outdated: dict[Image, FitResult] = {}  # images whose layers are of an earlier fit
        self._layers: dict[tuple[Image, Role], tuple[str, MakeData, Image]] = {}

    @property
    def running(self) -> bool:
        """Whether a layer is being computed."""
        return self._add_task.running or self._update_task.running

    def reconstruct(self, components: Sequence[int]) -> None:
        """Add the image from these components alone."""
        if not components:
            notify_error("No stain is checked: check those that the image should be built from.")
            return
        fitted = self._panel.fitted
        if fitted is None:
            return
        labels = fitted.decomposition.labels
        name = "Reconstruction: " + " + ".join(labels[i] for i in components)
        self._add(Role.RECONSTRUCTION, name, lambda fitted: _reconstruct(fitted, components))

    def residual(self) -> None:
        """Add what the model does not explain."""
        self._add(Role.RESIDUAL, "Residual (OD)", residual_data)

    def update(self, source: Image, fitted: FitResult) -> None:
        """Recompute the layers of an image that are there and not renamed."""
        self._outdated[source] = fitted
        outdated = [
            (image, role, name, make, self._outdated[image])
            for (image, role), (name, make, layer) in self._layers.items()
            if image in self._outdated and self._is_ours((name, make, layer))
        ]
        jobs = [(role, make, fit) for _, role, _, make, fit in outdated]

        def work(report: Report) -> list[DataAndLimit]:
            return [_compute(*job) for job in jobs]

        def done(results: list[DataAndLimit]) -> None:
            self._outdated.clear()
            for (image, role, name, make, _), result in zip(outdated, results, strict=True):
                self._put(image, role, name, make, result)

        if outdated:
            self._update_task.start(work, done)
        else:
            self._outdated.clear()

    def _add(self, role: Role, name: str, make: MakeData) -> None:
        source, fitted = self._panel.images.layer, self._panel.fitted
        if source is None or fitted is None:
            return
        self._add_task.start(
            lambda report: _compute(role, make, fitted),
            lambda result: self._put(source, role, name, make, result, reveal=True),
        )

    def _put(
        self,
        source: Image,
        role: Role,
        name: str,
        make: MakeData,
        result: DataAndLimit,
        reveal: bool = False,
    ) -> None:
        """Show a layer's data; `reveal`: above the image's other layers, and visible."""
        data, limit = result
        layers = self._panel.viewer.layers
        if source not in layers:
            return
        last = self._layers.get((source, role))
        if last is not None and self._is_ours(last) and _can_show(last[2], data):
            layer = last[2]
            layer.data = data
            layer.name = name
            if reveal:
                layer.visible = True
                layers.move(layers.index(layer), self._insert_index(source))
        else:
            layer = _new_layer(source, role, name, data, limit)
            layers.insert(self._insert_index(source), layer)
        self._layers[source, role] = layer.name, make, layer

    def _insert_index(self, source: Image) -> int:
        """The position above the source and all that was made from it, below boxes."""
        viewer = self._panel.viewer
        return max(viewer.layers.index(one) for one in [source, *stain_images(viewer, source)]) + 1

    def _is_ours(self, derived: tuple[str, MakeData, Image]) -> bool:
        name, _, layer = derived
        return layer in self._panel.viewer.layers and layer.name == name


def _reconstruct(fitted: FitResult, components: Sequence[int]) -> LayerData:
    """A reconstruction from those of the components that the fit has."""
    r = len(fitted.decomposition.active)
    return reconstruction_data(fitted, [i for i in components if i < r])


def _can_show(layer: Image, data: LayerData) -> bool:
    ndim: int = (data[0] if isinstance(data, list) else data).ndim
    return ndim == layer.ndim + layer.rgb and isinstance(data, list) == bool(layer.multiscale)


def _compute(role: Role, make: MakeData, fitted: FitResult) -> DataAndLimit:
    """The data, and the upper contrast limit of a residual."""
    data = make(fitted)
    if role is Role.RECONSTRUCTION:
        return data, 1.0
    sample = data
    if not isinstance(data, np.ndarray):  # lazy: take the thumbnail or plane that was fitted
        sample = np.linalg.norm(fitted.decomposition.residual(), axis=-1)
    limit = float(np.percentile(sample.ravel()[::16], _RESIDUAL_PERCENTILE))
    return data, max(_MIN_RESIDUAL_LIMIT, limit)


def _new_layer(source: Image, role: Role, name: str, data: LayerData, limit: float) -> Image:
    first = data[-1] if isinstance(data, list) else data
    rgb = role is Role.RECONSTRUCTION
    more: dict[str, Any] = {"rgb": True}
    if not rgb:
        more = {"rgb": False, "colormap": "magma", "contrast_limits": (0.0, limit)}
    planar = first.ndim - rgb < source.ndim
    return Image(
        data,
        name=name,
        multiscale=isinstance(data, list),
        blending="translucent_no_depth",
        metadata=role_metadata(role, source),
        **more,
        **transform_kwargs(source, planar=planar),
    )
