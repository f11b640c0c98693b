"""The boxes of each plane of a stack, as they come from a model."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from napari.layers import Shapes

from napari_beerlanet.core.boxes import Detections
from napari_beerlanet.ui.detection_choice import BoxChoice
from napari_beerlanet.ui.detection_edits import rows_at, settled
from napari_beerlanet.ui.detection_store import BoxStore, Chosen
from napari_beerlanet.ui.detection_view import plane_of

Index = tuple[int, ...]
"""A plane's place in a stack, () where there is none."""


class Planes:
    """One `BoxChoice` for each plane on which something was run, and what is chosen of them.

    `confidence` is the last threshold by which boxes were chosen.
    """

    def __init__(self, viewer: Any, layer: Shapes, confidence: float) -> None:
        self._viewer, self._layer = viewer, layer
        self.choose(confidence)
        self._choices: dict[Index, BoxChoice] = {}

    @property
    def current(self) -> BoxChoice | None:
        """Of the plane that is shown, None where nothing was run."""
        return self._choices.get(plane_of(self._layer, self._viewer))

    @property
    def chosen(self) -> Chosen:
        """Of the plane that is shown; the last threshold where a mask is not of its boxes."""
        choice = self.current
        fits = choice is None or choice.store.fits(self._chosen)
        return self._chosen if fits else self.confidence

    def choose(self, chosen: Chosen) -> None:
        """Choose boxes of at least this confidence, or of a mask over the model's."""
        self._chosen: Chosen = chosen
        if np.ndim(chosen) == 0:
            self.confidence = float(chosen)

    @property
    def stores(self) -> dict[Index, BoxStore]:
        """The boxes of each plane."""
        return {index: choice.store for index, choice in self._choices.items()}

    def put(self, detections: Detections, index: Index) -> None:
        """Make these a plane's boxes, whatever it had before."""
        self._use(BoxStore(detections), index)

    def extend(
        self, detections: Detections, doubles: npt.NDArray[Any] | None, index: Index
    ) -> None:
        """Add boxes to a plane's; `doubles` (m, 4) of earlier calls go."""
        choice = self._choices.get(tuple(index))
        if choice is None:
            self.put(detections, index)
            return
        choice.store.extend(detections)
        if doubles is not None and len(doubles):
            (x1, y1), (x2, y2) = doubles[:, :2].min(axis=0) - 1, doubles[:, 2:].max(axis=0) + 1
            near = choice.near((float(x1), float(y1), float(x2), float(y2)))
            choice.store.drop(rows_at(choice.store, near, doubles))

    def settle(self, detections: Detections, index: Index) -> None:
        """Make these the model's boxes of a plane, with what the user did to the earlier ones."""
        self._use(settled(self.stores.get(tuple(index)), detections), index)

    def _use(self, store: BoxStore, index: Index) -> None:
        old = self._choices.get(tuple(index))
        if old is not None:
            old.close()
        self._choices[tuple(index)] = BoxChoice(store)

    def close(self) -> None:
        """Build no further index."""
        for choice in self._choices.values():
            choice.close()
