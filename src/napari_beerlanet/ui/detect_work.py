"""One detection from order to result. Runs off the GUI thread and knows neither Qt nor layers.

Whatever is slow to import is imported here, in the thread: the panel opens at once.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.progress import Report, tell, within
from napari_beerlanet.ui.planes import LARGE, Plane, Window

if TYPE_CHECKING:
    from napari_beerlanet.ui.density_arrays import Data
    from napari_beerlanet.ui.fitting import Fitted


@dataclass(frozen=True, eq=False)
class Order:
    """What is to be done. `windows` is None for the whole plane; `model` one that is loaded.

    Of a slide also: the `path` of its file, the file `results` that is written as it goes, and of
    which `source` that is; whether to `skip_glass`.
    """

    plane: Plane
    windows: tuple[Window, ...] | None
    key: str
    model: Any = None
    device: str = "auto"
    iou: float = 0.7
    object_size: float | Literal["auto"] = "auto"
    pixel_size: tuple[float, float] | None = None
    densities: bool = False
    skip_glass: bool = True
    path: Path | None = None
    results: Path | None = None
    source: dict[str, Any] | None = None

    @property
    def streamed(self) -> bool:
        """Whether it is too much to be read at once."""
        if self.windows is None:
            return self.plane.is_slide
        sides = ((part.stop - part.start for part in window) for window in self.windows)
        return sum(math.prod(window) for window in sides) > LARGE


@dataclass(frozen=True, eq=False)
class Result:
    """What came of it: the model as it was used, everything that it found, words of warning."""

    order: Order
    model: Any
    detections: Detections
    warnings: list[str]
    seconds: float
    stains: tuple[Fitted, list[Data]] | None = None


def load(key: str, device: str, report: Report) -> Any:
    """The model of a name or path, ready to run."""
    tell(report, 0, 1, "loading the model")
    from napari_beerlanet.core.checkpoint import load_checkpoint

    model = load_checkpoint(key, device)
    tell(report, 1, 2, "loading the model")
    assert model.runner is not None  # made here, not at the first image
    return model


def carry_out(order: Order, report: Report) -> Result:
    """Load the model, unless it is loaded, find objects, and look whether the image is usual."""
    from napari_beerlanet.core.familiar import warnings_on
    from napari_beerlanet.core.parts import detect_parts
    from napari_beerlanet.ui.detection_mesh import fast

    began = time.monotonic()
    model = model_for(order, within(report, 0.0, 0.1) or report)
    height, width = order.plane.shape
    windows = order.windows or ((slice(0, height), slice(0, width)),)
    end = 0.85 if order.densities else 0.98
    found = detect_parts(
        model,
        order.plane.read,
        windows,
        order.plane.shape,
        iou=order.iou,
        object_size=order.object_size,
        pixel_size=order.pixel_size,
        report=within(report, 0.1, end),
    )
    stains = stains_of(model, order, within(report, end, 0.98)) if order.densities else None
    tell(report, 98, 100, "preparing the layer")
    fast()  # what drawing needs is compiled here, not while the window waits
    warnings = warnings_on(model.info, found, order.pixel_size)
    found = replace(found, report=found.report | {"warnings": warnings})
    return Result(order, model, found, warnings, time.monotonic() - began, stains)


def model_for(order: Order, report: Report) -> Any:
    """The order's model on its device."""
    from napari_beerlanet.core.device import pick_device

    if order.model is None:
        return load(order.key, order.device, report)
    wanted = pick_device(order.device)
    same = wanted.type == order.model.device.type
    if same and (wanted.index or 0) == (order.model.device.index or 0):
        return order.model
    return order.model.to(wanted)


def stains_of(model: Any, order: Order, report: Report | None) -> tuple[Fitted, list[Data]]:
    """What the layers of the learned stains show, worked out lazily where the image is large."""
    from napari_beerlanet.core.slidecolours import count_slide
    from napari_beerlanet.ui.density_arrays import density_data
    from napari_beerlanet.ui.fitting import Fitted, Settings, Target, shared_limit

    target, seen = Target((order.plane,)), None
    if target.is_slide:
        seen = count_slide(order.plane.pyramid, report=report)
        decomposition = seen.fit(**model.stain_settings)
    else:
        decomposition = model.decompose(target.read(order.plane), report)
    limit = shared_limit(decomposition)
    fitted = Fitted(decomposition, Settings(), target, limit, seen=seen)
    return fitted, density_data(fitted)
