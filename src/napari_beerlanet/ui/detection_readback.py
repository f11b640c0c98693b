"""What a layer of boxes stands for, to copy it, save it or hand it on."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from napari_beerlanet.ui.detection_store import BoxStore


class ReadBack(NamedTuple):
    """What a layer stands for, hidden boxes left out: boxes (n, 4) in pixels, labels, table."""

    xyxy: npt.NDArray[np.float32]
    labels: npt.NDArray[np.int64]
    names: list[str]
    features: dict[str, npt.NDArray[Any]]

    @classmethod
    def of(cls, passing: tuple[BoxStore, npt.NDArray[np.bool_]] | None) -> ReadBack:
        """Of the boxes of a mask; nothing for None."""
        if passing is None:
            return cls(np.empty((0, 4), np.float32), np.empty(0, np.int64), [], {})
        store, mask = passing
        rows = np.flatnonzero(mask)
        return cls(store.xyxy[rows], store.labels[rows], list(store.names), store.features(rows))
