"""What a crop shows: the image's colours, or how much of one stain there is."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.core.decompose import Decomposition, decompose
from napari_beerlanet.core.images import check_rgb, to_bytes
from napari_beerlanet.ui.crops import CutOut
from napari_beerlanet.ui.planes import Plane, Window

COLOURS = "colours"
"""The look of the image itself."""

_CONTEXT = 0.25  # of a box's longer side, around it in a crop
_FIT = 4e6  # pixels of the level that stains are fitted to
_COLUMN = re.compile(r"OD (\d+) mean")


class CropLooks:
    """The looks of one plane's crops. Holds pixels and a model, neither layers nor widgets.

    `names` are the looks: `COLOURS`, and "OD k" for each stain that `found` has a column of, or
    that the given decomposition has. Stains are as the model sees them, if there is one.
    """

    def __init__(
        self,
        plane: Plane,
        found: Detections,
        model: Any = None,
        decomposition: Decomposition | None = None,
    ) -> None:
        self.plane = plane
        self._model, self._fitted = model, None if model is not None else decomposition
        self._lock = threading.Lock()
        self._limit = 0.0
        stains = [int(m[1]) for name in found.columns if (m := _COLUMN.fullmatch(name))]
        stains = [k for k in stains if np.any(found.columns[f"OD {k} mean"] > 0)]
        if not stains and decomposition is not None:
            stains = (np.flatnonzero(decomposition.active) + 1).tolist()
        self.names = [COLOURS, *(f"OD {k}" for k in stains)]

    def cut_out(self, look: str = COLOURS) -> CutOut:
        """A function from a box to its picture in that look; to be called in a thread."""
        paint: Callable[[npt.NDArray[Any]], npt.NDArray[np.uint8]] = _colours
        if look != COLOURS:
            component = int(look.split()[1]) - 1
            paint = lambda pixels: self._stain(pixels, component)  # noqa: E731
        plane = self.plane
        return lambda box: paint(plane.read(around(box, plane.shape)))

    def _stain(self, pixels: npt.NDArray[Any], component: int) -> npt.NDArray[np.uint8]:
        """(h, w, 3): from white, where there is none, to the stain's own colour."""
        d = self._fit()
        if component >= len(d.active):
            return np.full((*pixels.shape[:2], 3), 255, np.uint8)
        density = d.densities_of(pixels)[component, ..., None]
        full = 255.0 - d.colours[component].astype(np.float32)
        return np.asarray(255 - full * np.clip(density / self._limit, 0, 1), np.uint8)

    def _fit(self) -> Decomposition:
        """The decomposition, worked out at the first use."""
        from napari_beerlanet.ui.fitting import shared_limit

        with self._lock:
            if self._fitted is None:
                pixels = self.plane.read(level=self.plane.level_for(_FIT))
                apart = self._model.decompose if self._model is not None else _converged
                self._fitted = apart(pixels)
            if not self._limit:
                self._limit = shared_limit(self._fitted)
            return self._fitted


def around(box: npt.NDArray[Any], shape: tuple[int, int]) -> Window:
    """Rows and columns of a square around a box (4,), with some context, within the image."""
    height, width = shape
    x, y = (box[0] + box[2]) / 2, (box[1] + box[3]) / 2
    half = max((0.5 + _CONTEXT) * max(box[2] - box[0], box[3] - box[1]), 4)
    top, left = (int(min(max(v - half, 0), n - 1)) for v, n in ((y, height), (x, width)))
    bottom, right = (int(min(max(v + half, 0), n - 1)) + 1 for v, n in ((y, height), (x, width)))
    return slice(top, max(bottom, top + 1)), slice(left, max(right, left + 1))


def _colours(pixels: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
    return to_bytes(check_rgb(pixels).pixels)[..., :3]


def _converged(pixels: npt.NDArray[Any]) -> Decomposition:
    return decompose(pixels, iterations="converge")
